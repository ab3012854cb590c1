"""Every notebook runs from top to bottom and shows what it was committed with."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def run_cell(source, names):
    """Run a cell as a notebook does, and return the value of its last line, if that is one."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return (
        None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    )


def outputs_of(value):
    """Return what a notebook shows for a value."""
    if value is None:
        return {}
    shown = {"text/plain": repr(value)}
    for kind, method in (("image/svg+xml", "_repr_svg_"), ("text/html", "_repr_html_")):
        if hasattr(value, method):
            shown[kind] = getattr(value, method)()
    return shown


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_what_it_was_committed_with(path):
    names = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        shown = outputs_of(run_cell("".join(cell["source"]), names))
        committed = cell["outputs"][0]["data"] if cell["outputs"] else {}
        assert {kind: "".join(text) for kind, text in committed.items()} == shown
