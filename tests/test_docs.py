"""Every example in the README and in docs/ does what it says, and every link leads somewhere."""

import doctest
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import shardplan
from shardplan.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# `make integrations` runs the examples of the first, and test_format_page.py the reader of the
# second; the third names tests.
ELSEWHERE = {"integrations.md", "format.md", "guarantees.md"}
EXECUTED = [page for page in PAGES if page.name not in ELSEWHERE]
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_the_examples_of_a_page_print_what_they_say(page):
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=OPTIONS)
    assert failed == 0


def test_the_pages_have_examples():
    parser = doctest.DocTestParser()
    for page in EXECUTED:
        assert parser.get_examples(page.read_text()), page


def test_the_oldest_versions_that_the_package_admits_are_named():
    admitted = re.findall(r'"(torch|numpy|attrs)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    page = (ROOT / "docs/index.md").read_text().replace("\n", " ")
    assert len(admitted) == 3
    assert [name for name, oldest in admitted if f"{name} {oldest}" not in page] == []


def test_the_tests_that_the_page_of_guarantees_names_exist():
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs/guarantees.md").read_text())
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_commands_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (7, 8):
        shardplan.save({"model": {"w": torch.ones(4, 3)}}, f"step-{step}")
    lines = re.findall(r"^\$ (shardplan .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        for command in line.partition("#")[0].split("&&"):
            result = CliRunner().invoke(app, shlex.split(command)[1:])
            assert result.exit_code == 0, (command, result.output)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_lines_of_a_page_can_be_read(page):
    lines = (line for line in page.read_text().splitlines() if not line.startswith(("|", "![")))
    assert [line for line in lines if len(line) > 110] == []
