"""Every example in a docstring runs, in the module under the name that users import.

pytest's --doctest-modules would name modules after the repository's folders: it would import
planning/ a second time as `planning`, and take the standard library's `io` for ours.
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
ROOMS = ("shardplan.planning", "shardplan.io", "shardplan.dist")


def module_names():
    # An editable install maps each room to a folder of its own, so walk each by itself.
    names = {"shardplan", *ROOMS}
    for package in ("shardplan", *ROOMS):
        path = importlib.import_module(package).__path__
        names.update(found.name for found in pkgutil.walk_packages(path, f"{package}."))
    return sorted(name for name in names if not name.endswith("__main__") and can_import(name))


def can_import(name):
    """Return False for modules that need a training framework; `make integrations` tests them."""
    return not name.startswith("shardplan.integrations.")


def find_examples():
    finder = doctest.DocTestFinder()
    found = [test for name in module_names() for test in finder.find(importlib.import_module(name))]
    return [test for test in found if test.examples]


EXAMPLES = find_examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_prints_what_it_says(example):
    report = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", module_names())
def test_no_example_is_overlooked(name):
    # doctest finds docstrings through live objects, and some decorators hide theirs from it.
    tree = ast.parse(Path(importlib.import_module(name).__file__).read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    written = {
        ast.get_docstring(node, clean=True) or ""
        for node in ast.walk(tree)
        if isinstance(node, documented)
    }
    run = {inspect.cleandoc(example.docstring) for example in EXAMPLES}
    assert {text for text in written if ">>> " in text} <= run


def test_every_room_is_searched_for_examples():
    assert {"shardplan", *ROOMS} <= set(module_names())
