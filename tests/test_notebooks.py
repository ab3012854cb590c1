"""Every notebook runs from top to bottom and shows what it was committed with.

Run as a script, it writes what the notebooks show now into them. A cell that measures this machine
(its tag is ``measured``) shows something else every time: it is run, and not compared.
"""

import ast
import contextlib
import io
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def run_cell(source, names):
    """Run a cell as a notebook does; return what it prints and its last line's value, if any."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "<cell>", "exec"), names)
        value = None
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return printed.getvalue(), value


def shown(value):
    """Return what a notebook shows for a value."""
    kinds = {"text/plain": repr(value)}
    for kind, method in (("image/svg+xml", "_repr_svg_"), ("text/html", "_repr_html_")):
        if hasattr(value, method):
            kinds[kind] = getattr(value, method)()
    return {kind: text.splitlines(keepends=True) for kind, text in kinds.items()}


def outputs_of(printed, value, number):
    """Return the outputs that a notebook stores for a cell."""
    outputs = []
    if printed:
        text = printed.splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        result = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        outputs.append({**result, "data": shown(value)})
    return outputs


def executed(notebook):
    """Return a notebook with what its code cells show when they are run in order."""
    names, number, cells = {}, 0, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            outputs = outputs_of(*run_cell("".join(cell["source"]), names), number)
            cell = {**cell, "execution_count": number, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def compared(notebook):
    """Return the cells that show the same every time."""
    return [c for c in notebook["cells"] if "measured" not in c["metadata"].get("tags", ())]


def as_text(notebook):
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_what_it_was_committed_with(path):
    notebook = json.loads(path.read_text())
    assert compared(executed(notebook)) == compared(notebook)


if __name__ == "__main__":
    for path in NOTEBOOKS:
        path.write_text(as_text(executed(json.loads(path.read_text()))))
