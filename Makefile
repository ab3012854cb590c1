# One command checks everything: `make test`. It needs Python 3.11+ and nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The repository's root must never be on sys.path: its folder io/ is not the standard library's.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv format lint types test test-quick thorough hold integrations docs demo bench bench-peers build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## make .venv with torch, the package (editable) and every tool

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("shardplan needs Python 3.11 or newer, and $(PYTHON) is %d.%d; try: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0 'setuptools>=77'
	$(BIN)/python -m pip install --no-build-isolation --editable '.[dev]'
	@touch $@

format: $(STAMP) ## rewrite the code in the house format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

lint: $(STAMP) ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Not from the root, nor from tests/: there mypy would take io/ for the standard library's.
types: $(STAMP) ## type-check the package, strictly
	cd docs && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p shardplan

test: $(STAMP) ## check everything: format, lint, types, tests, examples, notebooks, demo
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	$(BIN)/pytest -n 2 --dist loadfile

test-quick: $(STAMP) ## run the tests that take no time
	$(BIN)/pytest -q -x -m 'not slow'

thorough: $(STAMP) ## run the tests with many more random examples
	HYPOTHESIS_PROFILE=thorough $(BIN)/pytest -n 2 --dist loadfile

# An environment of their own: these packages are large, and pin what others need.
FRAMEWORKS := torchtitan==0.3.0 lightning==2.6.6 accelerate==1.15.0 megatron-core==0.16.1 psutil

HOLD :=

hold: $(STAMP) ## kill, damage and fuzz for hours, and print a table; HOLD="kills=60" for a part
	$(BIN)/python -P -W ignore tests/hold/run.py $(HOLD)

integrations: .venv-integrations/.installed ## test with torchtitan, Lightning, accelerate, Megatron-core
	.venv-integrations/bin/pytest -q tests/integrations

.venv-integrations/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install torch==2.13.0 'setuptools>=77'
	.venv-integrations/bin/python -m pip install --no-build-isolation --editable '.[test]' $(FRAMEWORKS)
	@touch $@

docs: $(VENV)/.docs ## make the documentation site in build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --no-build-isolation --editable '.[docs]'
	@touch $@

demo: $(STAMP) ## run the demo
	$(BIN)/python -P -m shardplan demo

bench: $(STAMP) ## compare planning, saving, loading and converting with torch
	$(BIN)/python -P benchmarks/planning.py
	$(BIN)/python -P benchmarks/io.py
	$(BIN)/python -P benchmarks/formats.py
	$(BIN)/python -P benchmarks/ranks.py
	$(BIN)/python -P benchmarks/async.py
	$(BIN)/python -P benchmarks/transfer.py
	$(BIN)/python -P benchmarks/cli.py

# An environment of their own: what does not install is named, and left out.
PEERS := safetensors fastsafetensors runai-model-streamer tensorizer orbax-checkpoint tensorstore \
	torch_checkpointing

bench-peers: .venv-peers/.installed ## compare with other libraries, and write docs/performance.md
	.venv-peers/bin/python -P benchmarks/peers.py

.venv-peers/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install torch==2.13.0 'setuptools>=77'
	.venv-peers/bin/python -m pip install --no-build-isolation --editable '.[torch]'
	@for peer in $(PEERS); do .venv-peers/bin/python -m pip install $$peer || echo "left out: $$peer"; done
	@touch $@

build: $(STAMP) ## build the wheel and the sdist into build/wheels (dist/ holds source)
	@rm -rf build/wheels build/lib build/bdist.*
	$(BIN)/python -m build --no-isolation --outdir build/wheels

clean: ## remove all that the other targets made
	rm -rf $(VENV) .venv-integrations .venv-peers build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
