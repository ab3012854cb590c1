"""Columns: sequences of records stored in arrays, their distinct values, and their encoding.

Packed arrays are a JSON header that describes what follows, then the arrays in the narrowest
integer type that fits. The decoder only slices a buffer: it cannot run code, and it checks every
length against the available bytes before it makes an array.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self, TypeVar, overload

import attrs
import numpy as np
import numpy.typing as npt

from ..errors import CodecError

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Index = npt.NDArray[Any]
T = TypeVar("T")

# Exceptions that decoding damaged bytes can raise (RuntimeError for deep nesting).
DAMAGE: Final = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError
)  # fmt: skip

_MAGIC: Final = b"SPLN1\n"
_WIDTHS: Final = ("|u1", "<u2", "<u4", "<i8")
_LIMITS: Final = (1 << 8, 1 << 16, 1 << 32)


def readonly(array: Array) -> Array:
    """Return a read-only view of ``array``."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def column(values: npt.ArrayLike, *shape: int) -> Ints:
    """Return a read-only int64 array."""
    array = np.asarray(values, np.int64)
    return readonly(array.reshape(shape) if shape else array)


def padded(rows: Sequence[Sequence[int]], value: int, width: int | None = None) -> Ints:
    """Return rows of different lengths as one array, padded with ``value``."""
    axes = max(map(len, rows), default=0) if width is None else width
    fill = [value] * axes
    numbers = chain.from_iterable(chain(row, fill[len(row) :]) for row in rows)
    return readonly(np.fromiter(numbers, np.int64).reshape(len(rows), axes))


def pad(columns: Ints, axes: int, value: int) -> Ints:
    """Return ``columns`` with columns of ``value`` added, up to ``axes`` columns."""
    missing = axes - columns.shape[1]
    if missing <= 0:
        return columns
    return np.concatenate([columns, np.full((len(columns), missing), value, np.int64)], axis=1)


@attrs.frozen(eq=False, repr=False, weakref_slot=False)
class ColumnTable:
    """An attrs record of columns: arrays, and tables of as many rows. All rows share the rest."""

    def take(self, rows: Index | slice) -> Self:
        """Return the given rows (numbers, a mask or a slice), in that order."""
        return type(self)(*[_taken(value, rows) for value in _fields(self)])

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate tables; boxes are padded, sizes and lengths with 1, others with 0."""
        kind: Any = cls
        fills = [int(name.endswith(("sizes", "lengths"))) for name in _names(kind)]
        columns = zip(*map(_fields, parts), strict=True)
        return cls(*[_concat(values, fill) for values, fill in zip(columns, fills, strict=True)])

    def same(self, other: Self) -> bool:
        """Compare with a table of the same length."""
        return all(map(_equals, _fields(self), _fields(other)))


@lru_cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(kind))


@lru_cache
def _getter(kind: Any) -> attrgetter[tuple[Any, ...]]:
    return attrgetter(*_names(kind))


def _fields(table: Any) -> tuple[Any, ...]:
    """Return the fields of a table, which has at least two."""
    kind: Any = type(table)
    return _getter(kind)(table)


def _taken(value: Any, rows: Index | slice) -> Any:
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        return readonly(value[rows])
    return value.take(rows) if isinstance(value, ColumnTable) else value


def _concat(values: Sequence[Any], fill: int) -> Any:
    if isinstance(values[0], ColumnTable):
        return type(values[0]).concat(values)
    if not isinstance(values[0], np.ndarray):
        return values[0]
    if values[0].ndim == 2:
        width = max(value.shape[1] for value in values)
        values = [pad(value, width, fill) for value in values]
    return readonly(np.concatenate(values))


def _equals(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, np.ndarray):
        return np.array_equal(mine, theirs)
    return mine.same(theirs) if isinstance(mine, ColumnTable) else bool(mine == theirs)


def row_tuples(table: Ints, widths: Ints) -> list[tuple[int, ...]]:
    """Return the first ``widths`` numbers of each row as a tuple; equal ones are one object.

    >>> row_tuples(np.array([[2, 3], [4, 1], [2, 3]]), np.array([2, 1, 2]))
    [(2, 3), (4,), (2, 3)]
    """
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    rows: Iterable[tuple[int, ...]] = [()] * len(table)
    if table.shape[1]:
        rows = zip(*table.T.tolist(), strict=True)
    if (widths != table.shape[1]).any():
        rows = (row[:width] for row, width in zip(rows, widths.tolist(), strict=True))
    return [seen.setdefault(row, row) for row in rows]


class Columns(Sequence[T]):
    """An immutable sequence of records stored in arrays. Compares and hashes like a tuple."""

    def record(self, row: int) -> T:
        """Return the record of one row."""
        raise NotImplementedError

    def take(self, rows: Index | slice) -> Sequence[T]:
        """Return the given rows (numbers, a mask or a slice), in that order."""
        return tuple(map(self.record, np.arange(len(self))[rows].tolist()))

    def _same(self, other: Self) -> bool:
        """Compare with columns of the same length."""
        return all(a == b for a, b in zip(self, other, strict=True))

    def to_bytes(self) -> bytes:
        """Encode the columns."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode, or raise `CodecError` if the columns are inconsistent."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return self.take(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"no item {index}: {type(self).__name__} has {len(self):,}")
        return self.record(int(index) % len(self))

    def __iter__(self) -> Iterator[T]:
        return map(self.record, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Columns, tuple, list)):
            return NotImplemented
        if self is other or len(self) != len(other):
            return self is other
        if type(other) is type(self) and len(self):
            return self._same(other)
        return all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = [repr(item) for item in self[:4]] + (["…"] if len(self) > 4 else [])
        return f"<{len(self):,} {type(self).__name__}: {', '.join(shown)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)


def _narrow(array: Array) -> Array:
    """Return integers in the narrowest little-endian type that holds them all."""
    if array.size == 0 or array.min() < 0:
        return array.astype("<i8" if array.size else "|u1")
    high = int(array.max())
    return array.astype(_WIDTHS[sum(high >= limit for limit in _LIMITS)])


def pack(header: Mapping[str, Any], arrays: Mapping[str, Array | bytes]) -> bytes:
    """Encode JSON data and integer arrays (or raw bytes) as one buffer.

    >>> header, arrays = unpack(pack({"rank": 3}, {"row": np.array([0, 300])}))
    >>> header, arrays["row"]
    ({'rank': 3}, array([  0, 300]))
    """
    parts: list[tuple[str, str, tuple[int, ...], bytes]] = []
    for name, array in arrays.items():
        if isinstance(array, bytes):
            parts.append((name, "", (len(array),), array))
        else:
            narrow = _narrow(array)
            parts.append((name, narrow.dtype.str, narrow.shape, narrow.tobytes()))
    spec = [[name, dtype, list(shape)] for name, dtype, shape, _ in parts]
    head = json.dumps([dict(header), spec], separators=(",", ":"), allow_nan=False).encode()
    return b"".join([_MAGIC, len(head).to_bytes(8, "little"), head, *(p[3] for p in parts)])


def unpack(buffer: bytes | memoryview) -> tuple[dict[str, Any], dict[str, Any]]:
    """Decode the output of `pack`: the JSON data, and the arrays (int64, read-only) or bytes."""
    view = memoryview(buffer)
    start = len(_MAGIC) + 8
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise CodecError(f"not a packed plan: it starts with {bytes(view[:6])!r}, not {_MAGIC!r}")
    end = start + int.from_bytes(view[len(_MAGIC) : start], "little")
    try:
        header, spec = json.loads(bytes(view[start:end]))
        arrays: dict[str, Any] = {}
        for name, dtype, shape in spec:
            arrays[name], end = _slice(view, end, dtype, shape)
    except DAMAGE as error:
        raise CodecError(f"a packed plan's header is damaged: {error}") from error
    if end != len(view) or not isinstance(header, dict):
        raise CodecError(f"a packed plan of {len(view)} bytes should have {end}")
    return header, arrays


def flat(arrays: Mapping[str, Any], *names: str) -> tuple[Ints, ...]:
    """Return the named columns, checking that each has one dimension."""
    columns = tuple(arrays[name] for name in names)
    if any(column.ndim != 1 for column in columns):
        raise ValueError(f"of {', '.join(names)}, one is not a column")
    return columns


def within(values: Ints, end: int) -> bool:
    """Return True if all values are at least 0 and less than ``end``."""
    return values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < end)


def pack_names(label: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return names as two arrays for `pack`: one text, and the length of each."""
    text = "".join(names).encode("utf-8", "surrogatepass")
    return {label: text, f"{label}.length": column([len(n) for n in names])}


def unpack_names(label: str, arrays: dict[str, Any]) -> tuple[str, ...]:
    """Return the names that `pack_names` was given."""
    text = arrays[label].decode("utf-8", "surrogatepass")
    (lengths,) = flat(arrays, f"{label}.length")
    ends = np.cumsum(lengths).tolist()
    if len(text) != (ends[-1] if ends else 0) or not within(lengths, len(text) + 1):
        raise ValueError("names are cut short")
    return tuple(text[a:b] for a, b in zip([0, *ends], ends, strict=False))


def _slice(view: memoryview, at: int, dtype: str, shape: list[Any]) -> tuple[Any, int]:
    """Return the array (or bytes) that starts at byte ``at``, and where it ends."""
    if any(type(n) is not int or n < 0 for n in shape) or dtype not in ("", *_WIDTHS):
        raise ValueError(f"impossible array of {dtype!r} and shape {shape}")
    count = math.prod(shape)
    end = at + count * (np.dtype(dtype).itemsize if dtype else 1)
    if end > len(view):
        raise ValueError(f"it should have at least {end} bytes and has {len(view)}")
    if not dtype:
        return bytes(view[at:end]), end
    array = np.frombuffer(view[at:end], dtype=dtype).reshape(shape).astype(np.int64)
    return readonly(array), end


def distinct(values: Ints) -> Ints:
    """Return the distinct values of a column, ascending."""
    ordered = np.sort(values)
    return ordered[_news(ordered)]


class Numbered(NamedTuple):
    """The distinct values of a column."""

    values: Ints  # the values, ascending
    first: Ints  # the first row of each value
    which: Ints  # the value number of each row


def numbered(values: Ints) -> Numbered:
    """Return the distinct values of a column, and where they occur."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = _news(ordered)
    which = np.empty(len(values), np.int64)
    which[order] = np.cumsum(new) - 1
    return Numbered(ordered[new], order[new], which)


def nth_equal(values: Ints) -> Ints:
    """Return how many equal values come before each.

    >>> nth_equal(np.array([5, 3, 5, 5])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    nth = np.empty(len(values), np.int64)
    nth[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return nth


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat each row number ``counts`` times; return the rows, and the number of each repeat.

    >>> [a.tolist() for a in spread(np.array([2, 0, 1]))]
    [[0, 0, 2], [0, 1, 0]]
    """
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def distinct_columns(parts: Iterable[Ints]) -> tuple[tuple[Ints, ...], list[int]]:
    """Return the distinct ones of some columns, and which of them each is; -1 for an empty one.

    >>> distinct_columns([np.array([1, 2]), np.array([]), np.array([1, 2])])
    ((array([1, 2]),), [0, -1, 0])
    """
    known: dict[bytes, int] = {}
    found, which = list[Ints](), []
    for part in parts:
        number = known.setdefault(part.tobytes(), len(found)) if len(part) else -1
        if number == len(found):
            found.append(readonly(part.copy()))
        which.append(number)
    return tuple(found), which


def group_rows(columns: Iterable[Ints]) -> tuple[Ints, Ints]:
    """Number the distinct rows of some columns, in lexicographic order.

    A column with several axes counts as several columns. Return the first row of each group, and
    the group of each row.

    >>> first, group = group_rows(
    ...     [np.array([7, 3, 7, 7]), np.array([[1, 1], [0, 0], [1, 1], [1, 2]])]
    ... )
    >>> first.tolist(), group.tolist()
    ([1, 0, 3], [1, 0, 1, 2])
    """
    flat = [c for array in columns for c in (array.T if array.ndim == 2 else [array])]
    order = np.lexsort(flat[::-1])
    fresh = np.zeros(len(order), bool)  # whether a row, in order, differs from the one before
    fresh[:1] = True
    for values in flat:
        ordered = values[order]
        fresh[1:] |= ordered[1:] != ordered[:-1]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(fresh) - 1
    return order[fresh], group


def _news(ordered: Ints) -> npt.NDArray[np.bool_]:
    """Return which rows of an ascending column differ from the row before."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new
