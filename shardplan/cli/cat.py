"""``shardplan cat``: print elements of a tensor, or a value."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Container, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import attrs
import typer

from shardplan.planning import counted, shape_text

from .names import hint
from .options import Ckpt, Debug, Json, Verbose, complete_name
from .screen import print_json, safe, show, waiting, width

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from shardplan._checkpoint import Axis, SavedTensor
    from shardplan.io.formats import Source

__all__ = ["cat", "parse_key"]

_INDEXED: Final = re.compile(r"(.+)\[([^\[\]]*)\]", re.DOTALL)
_EDGE: Final = 3  # elements shown at each end of a long axis
_WHOLE: Final = 1000  # the most elements shown in full


def cat(
    ckpt: Ckpt,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="A name, with an index or without.",
            show_default=False,
            autocompletion=complete_name,
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
    """Show elements of a tensor as numpy prints them, or a non-tensor value.

    KEY may end with an index of whole numbers, slices and ..., as in 'model.w[0:2, :5]': only those
    elements are read. Of a large tensor only the corners are read and shown; --all shows all.

    JSON keys: key, index (or null), type (tensor or value), dtype, shape, values (nested lists; NaN
    and infinities as text, complex numbers as pairs). For a value: key, type, value (bytes as an
    object with the key base64).

    Example: shardplan cat step-100 'model.w[0:2, :5]'
    """
    from .contents import open_contents

    contents = open_contents(ckpt)
    names = contents.entries
    name, index = parse_key(key, names)
    if name not in names:
        raise ValueError(_missing(name, ckpt, names))
    if names.layout[names.row_of[name]] >= 0:
        with waiting(f"reading {key}"):
            shown = _read(contents.source, name, index, everything or json)
        _show_elements(name, key.removeprefix(name).strip(), shown, None if json else precision)
        return
    if index is not None:
        raise ValueError(f"`{name}` is not a tensor, and takes no index")
    with waiting(f"reading {key}"):
        value = contents.source.value(name)
    _show_value(name, value, json)


def _missing(name: str, ckpt: str, names: Collection[str]) -> str:
    """Return the message for a name that is not in the checkpoint."""
    below = [known for known in names if known.startswith(f"{name}.")]
    if below:
        many = counted(len(below), "name")
        return f"`{name}` is the start of {many}, such as {below[0]}; give one of these"
    return f"`{name}` is not in {ckpt}{hint(name, list(names))}"


def parse_key(key: str, names: Container[str]) -> tuple[str, Any]:
    """Split a key into name and index; the index is None if there is none.

    >>> parse_key("model.w[0:2, -1, ...]", {"model.w"})
    ('model.w', (slice(0, 2, None), -1, Ellipsis))
    >>> parse_key("groups[0]", {"groups[0]"})  # a name that looks like one with an index
    ('groups[0]', None)

    Raises:
        ValueError: The index is malformed.
    """
    match = None if key in names else _INDEXED.fullmatch(key)
    if match is None or not match[2].strip():
        return key, None
    return match[1].rstrip(), tuple(_part(part.strip(), key) for part in match[2].split(","))


def _part(text: str, key: str) -> Any:
    if text == "...":
        return ...
    try:
        numbers = [int(number) if number.strip() else None for number in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if 2 <= len(numbers) <= 3:
        return slice(*numbers)
    raise ValueError(f"{key!r}: {text!r} is not an index; write whole numbers, slices (0:2) or ...")


@attrs.frozen(eq=False)
class _Elements:
    """Elements that were read, with the shape of the indexed part and the dtype in the checkpoint.

    ``array`` has all of them, or the corners plus one element between, which is not shown.
    """

    shape: tuple[int, ...]
    array: npt.NDArray[Any]
    dtype: str


def _read(source: Source, name: str, index: Any, everything: bool) -> _Elements:
    from shardplan._checkpoint import Checkpoint, normal_index
    from shardplan.io.execute import Reader

    saved = Checkpoint(Reader(source))[name]
    index = ... if index is None else index
    axes = normal_index(index, saved.shape)
    shape = tuple(axis.count for axis in axes if not axis.dropped)
    whole = everything or math.prod(shape) <= _WHOLE
    array = _array(saved[index]) if whole else _corners(saved, axes)
    return _Elements(shape, array, str(saved.dtype).removeprefix("torch."))


def _corners(saved: SavedTensor, axes: Sequence[Axis]) -> npt.NDArray[Any]:
    """Read both ends of every long axis, plus one element between them."""
    import numpy as np

    out = np.block(_nested(saved, [_ends(axis) for axis in axes], ()))
    return out[tuple(0 if axis.dropped else slice(None) for axis in axes)]


def _nested(saved: SavedTensor, ends: Sequence[Sequence[slice]], at: tuple[slice, ...]) -> Any:
    """Return the corners as nested lists of arrays, one level per axis, as `numpy.block` takes."""
    if not ends:
        return _array(saved[at])
    return [_nested(saved, ends[1:], (*at, end)) for end in ends[0]]


def _ends(axis: Axis) -> list[slice]:
    """Return the slices to read along an axis: all of a short one, both ends of a long one."""
    if axis.count <= 2 * _EDGE + 1:
        return [_slice(axis, 0, axis.count)]
    return [_slice(axis, 0, _EDGE + 1), _slice(axis, axis.count - _EDGE, _EDGE)]


def _slice(axis: Axis, first: int, count: int) -> slice:
    """Return the slice of the saved axis for some of the indexed elements."""
    start = axis.start + first * axis.step
    stop = start + count * axis.step
    return slice(start, stop if stop >= 0 else None, axis.step)


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as a numpy array; small floats that numpy lacks become float32."""
    import torch

    narrow = tensor.dtype.is_floating_point and tensor.element_size() < 4
    if narrow and tensor.dtype != torch.float16:
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def _show_elements(name: str, index: str, shown: _Elements, precision: int | None) -> None:
    """Print elements as numpy does, or as JSON if no precision is given."""
    import numpy as np

    if precision is None:
        head = {"key": name, "index": index or None, "type": "tensor", "dtype": shown.dtype}
        print_json(head | {"shape": shown.shape, "values": shown.array.tolist()})
        return
    corners = shown.array.shape != shown.shape
    show(f"{safe(name + index)}: {shape_text(shown.shape)} {shown.dtype}", bold=True)
    text = np.array2string(
        shown.array,
        max_line_width=min(width(), 10_000),
        precision=precision,
        threshold=0 if corners else sys.maxsize,
        edgeitems=_EDGE,
        separator=", ",
    )
    print(text)


def _show_value(name: str, value: Any, json: bool) -> None:
    """Print a value."""
    from pprint import pformat

    if json:
        print_json({"key": name, "type": "value", "value": value})
    else:
        print(pformat(value, width=min(width(), 120)))
