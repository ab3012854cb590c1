"""The catalog of a plan: its tensors and values, one row each, shared by items and by ranks.

Arrays are padded to the widest tensor: size 1 past a tensor's own axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from ..errors import CodecError
from ..geometry.tilings import MAX_AXES
from ..records import TensorProperties, WriteItemType
from .arrays import DAMAGE, Ints, flat, pack, readonly, unpack

__all__ = ["Catalog", "Head", "column", "merge_catalogs", "padded"]

_TYPES: Final = {t.value: t for t in WriteItemType}
_BYTES: Final = WriteItemType.BYTE_IO.value


def column(values: npt.ArrayLike, *shape: int) -> Ints:
    """Return a read-only int64 array."""
    array = np.asarray(values, np.int64)
    return readonly(array.reshape(shape) if shape else array)


def padded(rows: Sequence[Sequence[int]], value: int, width: int | None = None) -> Ints:
    """Return rows of different lengths as one array, short ones filled up with ``value``.

    >>> padded([(2,), (3, 4)], 1)
    array([[2, 1],
           [3, 4]])
    """
    axes = max(map(len, rows), default=0) if width is None else width
    return column([(*row, *[value] * (axes - len(row))) for row in rows], len(rows), axes)


class Head(NamedTuple):
    """One row of a catalog, as a value that hashes quickly.

    Attributes:
        name: The name in the checkpoint.
        source: The name in the state dict.
        type: How it lies in the state dict.
        properties: How it is stored; None for a non-tensor value.
        size: The global shape, in elements; without axes for a non-tensor value.
    """

    name: str
    source: str
    type: WriteItemType
    properties: TensorProperties | None
    size: tuple[int, ...]

    @classmethod
    def value(cls, name: str) -> Head:
        """Return the row of a non-tensor value."""
        return cls(name, name, WriteItemType.BYTE_IO, None, ())


@attrs.frozen(eq=False, repr=False, slots=False)
class Catalog:
    """The tensors and values that a plan speaks of; one row each, shared by all items.

    Attributes:
        names: Their names in the checkpoint.
        sources: Their names in the state dict.
        type: `WriteItemType` values.
        props: The distinct properties, and ``prop``, which of them each row has (-1: none).
        ndim: The number of axes.
        size: The global shape, padded with 1.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    type: Ints
    props: tuple[TensorProperties, ...]
    prop: Ints
    ndim: Ints
    size: Ints

    @classmethod
    def of(cls, heads: Iterable[Head]) -> Catalog:
        """Make a catalog with one row for each head, in order."""
        fields = list(zip(*heads, strict=True)) or [()] * 5
        names, sources, types, properties, sizes = fields
        seen = {id(p): p for p in properties if p is not None}  # hashing each one takes long
        ids = {p: i for i, p in enumerate(dict.fromkeys(seen.values()))}
        number = {key: ids[p] for key, p in seen.items()}
        return cls(
            names,
            names if sources == names else sources,
            column([t.value for t in types]),
            tuple(ids),
            column([-1 if p is None else number[id(p)] for p in properties]),
            column([len(s) for s in sizes]),
            padded(sizes, 1),
        )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def axes(self) -> int:
        """How many columns offsets and sizes have."""
        return int(self.size.shape[1])

    def head(self, row: int) -> Head:
        """Return what one row says, as a hashable value."""
        prop, size = int(self.prop[row]), self.size[row, : self.ndim[row]]
        properties = None if prop < 0 else self.props[prop]
        kind = _TYPES[int(self.type[row])]
        return Head(self.names[row], self.sources[row], kind, properties, tuple(size.tolist()))

    @cached_property
    def heads(self) -> tuple[Head, ...]:
        """Every row as a hashable value."""
        return tuple(map(self.head, range(len(self))))

    @cached_property
    def name_order(self) -> Ints:
        """The place of each row's name among all names, sorted; equal names have the same."""
        number = {name: i for i, name in enumerate(sorted(set(self.names)))}
        return column([number[name] for name in self.names])

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes that one element takes in the checkpoint; 0 for non-tensor values."""
        return readonly(column([*(p.itemsize for p in self.props), 0])[self.prop])

    @property
    def is_bytes(self) -> npt.NDArray[np.bool_]:
        """Which rows are non-tensor values."""
        return np.equal(self.type, _BYTES)

    @cached_property
    def content(self) -> tuple[object, ...]:
        """All that this catalog says, as a hashable value that is cheap to compare."""
        arrays = (self.type, self.prop, self.ndim, self.size)
        return self.names, self.sources, self.props, self.axes, *(a.tobytes() for a in arrays)

    def to_bytes(self) -> bytes:
        """Encode: names as one text, numbers as narrow columns."""
        header = {"props": [attrs.astuple(p) for p in self.props]}
        arrays: dict[str, Any] = {
            "type": self.type,
            "prop": self.prop + 1,
            "ndim": self.ndim,
            "size": self.size,
            **pack_names("names", self.names),
        }
        if self.sources is not self.names:
            arrays.update(pack_names("sources", self.sources))
        return pack(header, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> Catalog:
        """Decode, or raise `CodecError` where the columns do not fit each other."""
        header, arrays = unpack(data)
        try:
            props = tuple(TensorProperties(*p) for p in header["props"])
            names = unpack_names("names", arrays)
            sources = unpack_names("sources", arrays) if "sources" in arrays else names
            kind, ndim, prop = flat(arrays, "type", "ndim", "prop")
            size, prop = arrays["size"], readonly(prop - 1)
            fits = len({len(names), len(sources), len(kind), len(prop), len(ndim), len(size)}) == 1
            spare = np.arange(size.shape[-1]) >= ndim[:, None]
            if fits and size.ndim == 2 and ((size != 1) & spare).any():
                raise ValueError("a shape reaches past its axes")
            if not fits or size.ndim != 2 or size.shape[1] > MAX_AXES:
                raise ValueError("its columns differ in length")
            if not within(ndim, size.shape[1] + 1):
                raise ValueError("its columns differ in length")
            if not set(np.unique(kind).tolist()) <= _TYPES.keys() or not within(size, 1 << 62):
                raise ValueError("unknown item type or negative size")
            if (
                not within(prop + 1, len(props) + 1)
                or ((prop < 0) != (kind == _BYTES)).any()
                or (ndim[kind == _BYTES] > 0).any()
            ):
                raise ValueError("properties do not fit the item types")
        except DAMAGE as error:
            raise CodecError(f"a catalog is damaged: {error}") from error
        return cls(names, sources, kind, props, prop, ndim, size)


Merged = tuple[Catalog, list[Ints]]


def merge_catalogs(*catalogs: Catalog) -> Merged:
    """Return one catalog with the rows of several, and where each one's rows are in it."""
    heads: dict[Head, int] = {}
    numbers = [column([heads.setdefault(h, len(heads)) for h in c.heads]) for c in catalogs]
    return Catalog.of(tuple(heads)), numbers


def within(values: Ints, end: int) -> bool:
    return values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < end)


def pack_names(label: str, names: tuple[str, ...]) -> dict[str, Any]:
    text = "".join(names).encode("utf-8", "surrogatepass")
    return {label: text, f"{label}.length": column([len(n) for n in names])}


def unpack_names(label: str, arrays: dict[str, Any]) -> tuple[str, ...]:
    text = arrays[label].decode("utf-8", "surrogatepass")
    (lengths,) = flat(arrays, f"{label}.length")
    ends = np.cumsum(lengths).tolist()
    if len(text) != (ends[-1] if ends else 0) or not within(lengths, len(text) + 1):
        raise ValueError("names are cut short")
    return tuple(text[a:b] for a, b in zip([0, *ends], ends, strict=False))
