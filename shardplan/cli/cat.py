"""``shardplan cat``: print elements of a tensor, or a value."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Container, Sequence
from pprint import pformat
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Argument, Option

from shardplan.planning import counted, shape_text

from .options import Ckpt, Json, complete_name
from .screen import print_json, safe, show, waiting, width

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from shardplan._checkpoint import Axis, SavedTensor

__all__ = ["cat", "parse_key"]

_INDEXED: Final = re.compile(r"(.+)\[([^\[\]]*)\]", re.DOTALL)
_EDGE: Final = 3  # elements shown at each end of a long axis
_WHOLE: Final = 1000  # the most elements shown in full
_KEY: Final = "A name, with an index or without."


def cat(
    ckpt: Ckpt,
    key: Annotated[str, Argument(metavar="KEY", help=_KEY, autocompletion=complete_name)],
    everything: Annotated[bool, Option("--all", help="Show all elements, however many.")] = False,
    precision: Annotated[int, Option(min=0, help="Digits shown.")] = 4,
    json: Json = False,
) -> None:
    """Show elements of a tensor as numpy prints them, or a non-tensor value.

    KEY may end with an index of whole numbers, slices and ..., as in 'model.w[0:2, :5]': only those
    elements are read. Of a large tensor only the corners are read and shown; --all shows all.

    JSON keys: key, index (or null), type (tensor or value), dtype, shape, values (nested lists; NaN
    and infinities as text, complex numbers as pairs). For a value: key, type, value (bytes as an
    object with the key base64).

    Example: shardplan cat step-100 'model.w[0:2, :5]'
    """
    from .contents import hint, open_contents

    contents = open_contents(ckpt)
    names = contents.entries
    name, index = parse_key(key, names)
    if name not in names:
        below = [known for known in names if known.startswith(f"{name}.")]
        if below:
            many = counted(len(below), "name")
            raise ValueError(f"`{name}` is the start of {many}, such as {below[0]}; give one")
        raise ValueError(f"`{name}` is not in {ckpt}{hint(name, list(names))}")
    is_tensor = names.layout[names.row_of[name]] >= 0
    if index is not None and not is_tensor:
        raise ValueError(f"`{name}` is not a tensor, and takes no index")
    with waiting(f"reading {key}"):
        if is_tensor:
            from shardplan._checkpoint import Checkpoint
            from shardplan.io.execute import Reader

            saved = Checkpoint(Reader(contents.source))[name]
            shape, array = _read(saved, ... if index is None else index, everything or json)
        else:
            value = contents.source.value(name)
    if not is_tensor:
        if json:
            print_json({"key": name, "type": "value", "value": value})
        else:
            print(pformat(value, width=min(width(), 120)))
        return
    dtype, where = str(saved.dtype).removeprefix("torch."), key.removeprefix(name).strip()
    if json:
        head = {"key": name, "index": where or None, "type": "tensor", "dtype": dtype}
        print_json(head | {"shape": shape, "values": array.tolist()})
        return
    show(f"{safe(name + where)}: {shape_text(shape)} {dtype}", bold=True)
    print(_text(array, precision, array.shape == shape))


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


def _read(
    saved: SavedTensor, index: Any, everything: bool
) -> tuple[tuple[int, ...], npt.NDArray[Any]]:
    """Return the shape of the indexed part, and its elements, or the corners of many."""
    from shardplan._checkpoint import normal_index

    axes = normal_index(index, saved.shape)
    shape = tuple(axis.count for axis in axes if not axis.dropped)
    if everything or math.prod(shape) <= _WHOLE:
        return shape, _array(saved[index])
    import numpy as np

    corners = np.block(_nested(saved, [_ends(axis) for axis in axes], ()))
    return shape, corners[tuple(0 if axis.dropped else slice(None) for axis in axes)]


def _nested(saved: SavedTensor, ends: Sequence[Sequence[slice]], at: tuple[slice, ...]) -> Any:
    """Return the corners as nested lists of arrays, one level per axis, as `numpy.block` takes."""
    if not ends:
        return _array(saved[at])
    return [_nested(saved, ends[1:], (*at, end)) for end in ends[0]]


def _ends(axis: Axis) -> list[slice]:
    """Return what to read of an axis: all of a short one; of a long one both ends and one more."""
    parts = [(0, axis.count)]
    if axis.count > 2 * _EDGE + 1:
        parts = [(0, _EDGE + 1), (axis.count - _EDGE, axis.count)]
    edges = [[axis.start + i * axis.step for i in part] for part in parts]
    return [slice(first, stop if stop >= 0 else None, axis.step) for first, stop in edges]


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as a numpy array; small floats that numpy lacks become float32."""
    import torch

    narrow = tensor.dtype.is_floating_point and tensor.element_size() < 4
    if narrow and tensor.dtype != torch.float16:
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.numpy()
    return array


def _text(array: npt.NDArray[Any], precision: int, whole: bool) -> str:
    """Write elements as numpy does; corners leave out the element between them."""
    import numpy as np

    return np.array2string(
        array,
        max_line_width=min(width(), 10_000),
        precision=precision,
        threshold=sys.maxsize if whole else 0,
        edgeitems=_EDGE,
        separator=", ",
    )
