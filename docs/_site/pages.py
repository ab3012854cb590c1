"""Pages of the site that are made of other files: notebooks, commands, functions, and the top's.

MkDocs calls `on_files` before it reads pages, and `on_page_markdown` for each.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[2]
TOP: Final = {"SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
FIRST: Final = (
    *("save", "load", "restore", "async_save", "Checkpoints", "Keep", "PerRank", "open_checkpoint"),
    *("transfer", "convert", "verify", "diff", "content_hash", "latest", "prune", "explore"),
)
DIST: Final = (*("torch_comm", "solo", "run_ranks", "Comm", "Failure", "LostRanksError"),)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    pages = {
        "security.md": (ROOT / "SECURITY.md").read_text(encoding="utf-8"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "commands.md": commands(),
        "api.md": functions("Functions", shardplan=None),
        "api-planning.md": functions("Planning", planning=None),
        "api-ranks.md": functions("Ranks and stores", dist=DIST, io=None),
    }
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = notebook(json.loads(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "benchmarks").glob("*.svg")):
        pages[f"benchmarks/{path.name}"] = path.read_text(encoding="utf-8")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to files outside of docs/ lead to the pages that were made of these."""
    for name, page in TOP.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}").replace(
            f"](docs/{name}", f"]({name}"
        )
    markdown = markdown.replace("](docs/", "](").replace("](../benchmarks/", "](benchmarks/")
    return re.sub(r"\]\((?:\.\./)?notebooks/([\w-]+)\.ipynb", r"](notebooks/\1.md", markdown)


# Functions


def functions(title: str, **names: Iterable[str] | None) -> str:
    """Return a page that shows public names of modules: all of them, functions first, or some."""
    lines = [f"# {title}"]
    for module, some in names.items():
        path = "shardplan" if module == "shardplan" else f"shardplan.{module}"
        public = [name for name in importlib.import_module(path).__all__ if name != "__version__"]
        chosen = sorted(public, key=by_kind) if some is None else some
        lines += [f"## {path}", *(f"::: {home(path, name)}" for name in chosen)]
    return "\n\n".join(lines)


def by_kind(name: str) -> tuple[int, bool, str]:
    """Return a sort key: what everybody needs, then functions, then classes."""
    place = FIRST.index(name) if name in FIRST else len(FIRST)
    return place, name[0].isupper(), name.lower()


def home(module: str, name: str) -> str:
    """Return where a public name is defined: doors load it when it is used."""
    value = getattr(importlib.import_module(module), name)
    there = getattr(value, "__module__", None)
    at_home = there is not None and hasattr(importlib.import_module(there), name)
    return f"{there}.{name}" if at_home and there.startswith("shardplan") else f"{module}.{name}"


# Commands


def commands() -> str:
    """Return what the program says of itself."""
    from typer.main import get_command

    from shardplan.cli.app import app

    names = list(get_command(app).commands)
    sections = [f"## {name}\n\n{helped(app, name)}" for name in names]
    return "\n\n".join(["# Commands", "What `--help` prints.", helped(app), *sections])


def helped(app: Any, *command: str) -> str:
    """Return what ``--help`` prints, in a block."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "100", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return f"```text\n{result.output.strip()}\n```"


# Notebooks


def notebook(data: Mapping[str, Any]) -> str:
    """Return a notebook as a page: text, code, and what the code showed."""
    parts = []
    for cell in data["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif text.strip():
            parts += [f"```python\n{text}\n```", *map(shown, cell.get("outputs", ()))]
    return "\n\n".join(part for part in parts if part)


def shown(output: Mapping[str, Any]) -> str:
    """Return one output: a picture or HTML as it is, text in a block."""
    data = output.get("data", {})
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            lines = (line for line in "".join(data[kind]).splitlines() if line.strip())
            return "<div>" + "\n".join(lines) + "</div>"
    text = "".join(data.get("text/plain", output.get("text", "")))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""
