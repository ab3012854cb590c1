"""Passes on the command line, which run in this order: what is left out needs no new name."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import Annotated, Any, Final

from typer import Option

from shardplan.planning import (
    Pass,
    Passes,
    SavePlan,
    cast,
    chain,
    drop,
    dtype_name,
    rename,
    select,
)

_NEEDED: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _many(name: str, metavar: str, about: str) -> Any:
    """Return an option that may be given several times."""
    return Option(name, metavar=metavar, help=about, default_factory=list, show_default=False)


Select = Annotated[
    list[str], _many("--select", "PATTERN", "Keep only names that match: 'model.*'.")
]
Drop = Annotated[list[str], _many("--drop", "PATTERN", "Leave out names that match: 'optim.*'.")]
Rename = Annotated[
    list[str], _many("--rename", "OLD=NEW", "Rename; * carries over: '*.wq=*.q_proj'.")
]
Cast = Annotated[
    list[str],
    _many("--cast", "DTYPE", "Cast floats (or integers) to a dtype: bfloat16."),
]
PlannerName = Annotated[
    str | None, Option("--planner", metavar="MODULE:NAME", help="A planner of your own, run last.")
]


def parse_passes(
    selects: Sequence[str],
    drops: Sequence[str],
    renames: Sequence[str],
    casts: Sequence[str],
    planner: str | None,
) -> tuple[Pass[SavePlan], ...]:
    """Return the passes that options ask for.

    >>> parse_passes(["model.*"], ["*.tmp"], ["a=b"], ["bfloat16"], None)
    (select('model.*'), drop('*.tmp'), rename({'a': 'b'}), cast('bfloat16'))
    """
    steps: list[Pass[SavePlan]] = []
    if selects:
        steps.append(select(*selects))
    if drops:
        steps.append(drop(*drops))
    steps += map(_rename, renames)
    steps += map(_cast, casts)
    if planner is not None:
        steps += _flat(planner, import_planner(planner))
    return tuple(steps)


def _rename(text: str) -> Pass[SavePlan]:
    """Parse a renaming of one name, or of all names that a pattern matches."""
    old, equals, new = text.partition("=")
    if not old or not equals or not new:
        raise ValueError(f"--rename {text!r}: write OLD=NEW, as in 'step=iteration'")
    if old.count("*") != new.count("*"):
        raise ValueError(
            f"--rename {text!r}: what each * of OLD matches goes to a * of NEW; write as many"
        )
    if "*" not in old:
        return rename({old: new})
    first, *rest = new.replace("\\", r"\\").split("*")
    after = "".join(rf"\g<{number}>{part}" for number, part in enumerate(rest, 1))
    return rename([(rf"^{'(.*?)'.join(map(re.escape, old.split('*')))}\Z", first + after)])


def _cast(text: str) -> Pass[SavePlan]:
    try:
        return cast(dtype_name(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"--cast {text!r}: {error}") from None


# Planners of users


def import_planner(text: str) -> Passes[SavePlan]:
    """Import a planner, or call a function without arguments that returns one.

    Modules are found as ``python -m`` finds them: in the working directory, then on PYTHONPATH.

    Raises:
        ValueError: The text does not name a planner.
        ImportError: Its module cannot be imported.
    """
    name, colon, path = text.partition(":")
    if not colon or not name or not path:
        raise ValueError(f"--planner {text!r}: write MODULE:NAME, as in my_planners:for_export")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        value = resolve_name(text)
    except AttributeError as error:
        raise ValueError(f"--planner {text!r}: {error}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {error} (looked in {here} and on PYTHONPATH)"
        raise ImportError(f"--planner {text!r}: importing {name} failed: {why}") from error
    if not _is_factory(value):
        return value  # type: ignore[no-any-return]
    try:
        return value()  # type: ignore[no-any-return]
    except Exception as error:
        error.add_note(f"raised by {text}, as --planner called it")
        raise


def _flat(text: str, planner: Passes[SavePlan]) -> tuple[Pass[SavePlan], ...]:
    """Return the passes of a planner; refuse what is none."""
    try:
        return (chain(planner),)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--planner {text!r} names no planner: {error}") from None


def _is_factory(value: object) -> bool:
    """Return True if a value is to be called without arguments; a pass takes plans."""
    if not callable(value):
        return False
    try:
        parameters = signature(value).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    return not any(p.kind in _NEEDED and p.default is Parameter.empty for p in parameters)
