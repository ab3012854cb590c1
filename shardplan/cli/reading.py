"""``shardplan cat``: show elements of a tensor, or a value."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .options import Ckpt, Debug, Json, Verbose, names_to_come

if TYPE_CHECKING:
    from collections.abc import Collection, Container

__all__ = ["HELP", "cat", "parse_key"]

HELP = r"""Show elements of a tensor as numpy would, or a value that is no tensor.

KEY may end with an index of whole numbers, slices and ..., as in 'model.w[0:2, :5]': just those
elements are read. Of a large tensor only the corners are read and shown; --all shows everything.

JSON keys: key, index (or null), type (tensor or value), dtype, shape, values (nested lists; NaN and
infinities as text, complex numbers as pairs). For a value: key, type, value (bytes as an object
with the key base64).

Example: shardplan cat step-100 'model.w[0:2, :5]'
"""

_INDEXED: Final = re.compile(r"(.+)\[([^\[\]]*)\]", re.DOTALL)


def cat(
    ckpt: Ckpt,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A name, with an index or without.",
            show_default=False,
            autocompletion=names_to_come,
        ),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help="Show all elements, however many.")
    ] = False,
    precision: Annotated[int, typer.Option("--precision", min=0, help="Digits shown.")] = 4,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Show elements of a tensor, or a value; see `HELP`."""
    from .contents import open_contents
    from .waiting import spinning

    contents = open_contents(ckpt)
    names = contents.entries
    name, index = parse_key(key, names)
    if name not in names:
        raise ValueError(_missing(name, ckpt, names))
    where = key.removeprefix(name).strip()
    if names.layout[names.row_of[name]] >= 0:
        with spinning(f"reading {key}"):
            from .elements import look, print_tensor, show_tensor

            shown = look(contents.source, name, index, everything or json)
        if json:
            print_tensor(name, where, shown)
        else:
            show_tensor(f"{name}{where}", shown, precision)
        return
    if index is not None:
        raise ValueError(f"`{name}` is no tensor, and takes no index")
    with spinning(f"reading {key}"):
        value = contents.source.value(name)
    _show_value(name, value, json)


def _missing(name: str, ckpt: str, names: Collection[str]) -> str:
    """Say that a name is not there, and what may have been meant."""
    from shardplan.planning import counted

    from .choosing import hint

    below = [known for known in names if known.startswith(f"{name}.")]
    if below:
        many = counted(len(below), "name")
        return f"`{name}` is the start of {many}, such as {below[0]}; give one of these"
    return f"`{name}` is not in {ckpt}{hint(name, list(names))}"


def _show_value(name: str, value: Any, json: bool) -> None:
    """Print a value that is no tensor."""
    from .screen import console, plain, print_json

    if json:
        print_json({"key": name, "type": "value", "value": plain(value)})
        return
    from pprint import pformat

    print(pformat(value, width=min(console().width, 120)))


def parse_key(key: str, names: Container[str]) -> tuple[str, Any]:
    """Tell the name from the index; None if there is no index.

    >>> parse_key("model.w[0:2, -1, ...]", {"model.w"})
    ('model.w', (slice(0, 2, None), -1, Ellipsis))
    >>> parse_key("groups[0]", {"groups[0]"})  # a name that looks like one with an index
    ('groups[0]', None)

    Raises:
        ValueError: The index is none.
    """
    found = None if key in names else _INDEXED.fullmatch(key)
    if found is None or not found[2].strip():
        return key, None
    return found[1].rstrip(), tuple(_part(part.strip(), key) for part in found[2].split(","))


def _part(text: str, key: str) -> Any:
    if text == "...":
        return ...
    try:
        numbers = [int(number) if number.strip() else None for number in text.split(":")]
        if len(numbers) == 1 and numbers[0] is not None:
            return numbers[0]
        if 2 <= len(numbers) <= 3:
            return slice(*numbers)
    except ValueError:
        pass
    raise ValueError(f"{key!r}: {text!r} is no index; write whole numbers, slices (0:2) or ...")
