"""Boxes in the state dict's frame, in columns, for items whose tensors a pass has reshaped.

Most plans have none: their boxes are the same in the state dict and in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, Self, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from ..geometry.axes import Axes
from ..geometry.tilings import MAX_AXES
from ..records import fill_value, fitting_axes
from .arrays import ColumnTable, Ints, column, flat, group_rows, numbered, pad, readonly, within

T = TypeVar("T")


@attrs.frozen(eq=False)
class Coded(ColumnTable, Generic[T]):
    """A column with few distinct values.

    >>> coded = Coded.of(["a", None, "a"])
    >>> coded.number.tolist(), coded.values, coded[1]
    ([0, -1, 0], ('a',), None)
    """

    number: Ints  # the position in ``values`` of each row's value; -1 for None
    values: tuple[T, ...] = ()  # the distinct values

    @classmethod
    def of(cls, values: Iterable[T | None]) -> Coded[T]:
        """Return the column of some values."""
        table: dict[T, int] = {}
        number = [-1 if v is None else table.setdefault(v, len(table)) for v in values]
        return cls(column(number), tuple(table))

    @classmethod
    def none(cls, count: int) -> Coded[T]:
        """Return a column of None."""
        return cls(column(np.full(count, -1)))

    def __len__(self) -> int:
        return len(self.number)

    def __getitem__(self, row: int) -> T | None:
        number = int(self.number[row])
        return None if number < 0 else self.values[number]

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which rows have a value."""
        return self.number >= 0

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate several columns."""
        table: dict[T, int] = {}
        new = [column([*(table.setdefault(v, len(table)) for v in p.values), -1]) for p in parts]
        numbers = [of[p.number] for of, p in zip(new, parts, strict=True)]
        return cls(column(np.concatenate(numbers)), tuple(table))

    def canonical(self) -> Coded[T]:
        """Return the same column, its values in order of first use."""
        used, first, _ = numbered(self.number)
        order = used[np.argsort(first, kind="stable")]
        order = order[order >= 0]
        new = np.full(len(self.values) + 1, -1, np.int64)
        new[order] = np.arange(len(order))
        return Coded(column(new[self.number]), tuple(self.values[n] for n in order.tolist()))

    def same(self, other: Self) -> bool:
        """Compare with a column of the same length."""
        mine, theirs = self.canonical(), other.canonical()
        return mine.values == theirs.values and np.array_equal(mine.number, theirs.number)


@attrs.frozen(eq=False)
class SourceFrame(ColumnTable):
    """The source box of each item. Fills and non-tensor values have none."""

    ndim: Ints  # the number of axes of the source's tensor
    offsets: Ints  # the box, in the global frame of the source's tensor, padded with 0 and 1
    sizes: Ints
    axes: Coded[Axes]  # how its axes become those of the chunk; None if they are the same
    fill: Coded[float]  # the value of padding; None for all other items

    @classmethod
    def of_chunks(cls, ndim: Ints, offsets: Ints, sizes: Ints) -> SourceFrame:
        """Return the frame of boxes that are the chunks that they become."""
        none = Coded[Any].none(len(ndim))
        return cls(ndim, offsets, sizes, none, none)

    def canonical(self) -> SourceFrame:
        """Return the form that is equal for equal rows: no unused columns or values."""
        width = int(self.ndim.max(initial=0))
        return SourceFrame(
            self.ndim,
            readonly(self.offsets[:, :width]),
            readonly(self.sizes[:, :width]),
            self.axes.canonical(),
            self.fill.canonical(),
        )

    def same(self, other: Self) -> bool:
        """Compare with a frame of the same length."""
        return ColumnTable.same(self.canonical(), other.canonical())

    def is_plain(self, ndim: Ints, offsets: Ints, sizes: Ints) -> bool:
        """Return True if every box is the chunk itself."""
        if self.axes.known.any() or self.fill.known.any() or not np.array_equal(self.ndim, ndim):
            return False
        width = max(offsets.shape[1], self.offsets.shape[1])
        pairs = ((self.offsets, offsets, 0), (self.sizes, sizes, 1))
        return all(np.array_equal(pad(a, width, v), pad(b, width, v)) for a, b, v in pairs)

    def pack(self) -> tuple[dict[str, Any], dict[str, Ints]]:
        """Return the JSON data and the arrays that `unpack` takes."""
        arrays = {
            "box.ndim": self.ndim,
            "box.offsets": self.offsets,
            "box.sizes": self.sizes,
            "axes": self.axes.number + 1,
            "fill": self.fill.number + 1,
        }
        fills = [repr(value) for value in self.fill.values]  # JSON has no infinity
        return {"axes": _packed(self.axes.values), "fills": fills}, arrays

    @classmethod
    def unpack(
        cls,
        header: dict[str, Any],
        arrays: dict[str, Any],
        is_bytes: npt.NDArray[np.bool_],
        ndim: Ints,
        sizes: Ints,
    ) -> Self | None:
        """Decode what `pack` returned, if there is a frame, or raise an error of `DAMAGE`.

        ``is_bytes`` marks the items that are non-tensor values; ``ndim`` and ``sizes`` are those of
        the items' chunks.
        """
        if "box.ndim" not in arrays:
            return None
        frame = cls(
            arrays["box.ndim"],
            arrays["box.offsets"],
            arrays["box.sizes"],
            Coded(readonly(arrays["axes"] - 1), _axes(header["axes"])),
            Coded(readonly(arrays["fill"] - 1), tuple(map(_fill, header["fills"]))),
        )
        width = frame.offsets.shape[-1]
        check_boxes(frame.ndim, width, [frame.offsets], [frame.sizes])
        _check_codes(frame.fill, len(ndim))
        fills = frame.fill.known
        none = fills | is_bytes
        if (fills & is_bytes).any() or frame.ndim[none].any() or frame.axes.known[none].any():
            raise ValueError("a fill or a value has a box")
        _check_axes(frame.axes, (frame.ndim, frame.sizes), (ndim, sizes), ~none)
        return frame


@attrs.frozen(eq=False)
class TargetFrame(ColumnTable):
    """Which box of the state dict each read fills; one row per read."""

    ndim: Ints  # the number of axes of the tensor in the state dict
    lengths: Ints  # the size of the box that is filled, padded with 1
    # How its axes become those of the box that is read; None if they are the same.
    axes: Coded[Axes]

    def pack(self) -> tuple[dict[str, Any], dict[str, Ints]]:
        """Return the JSON data and the arrays that `unpack` takes."""
        boxes = {"dest_ndim": self.ndim, "dest_lengths": self.lengths}
        return {"axes": _packed(self.axes.values)}, {**boxes, "axes": self.axes.number + 1}

    @classmethod
    def unpack(
        cls, header: dict[str, Any], arrays: dict[str, Any], ndim: Ints, sizes: Ints
    ) -> Self | None:
        """Decode; None if there is no frame. See `SourceFrame.unpack`."""
        if "dest_ndim" not in arrays:
            return None
        codes = Coded(readonly(arrays["axes"] - 1), _axes(header["axes"]))
        frame = cls(arrays["dest_ndim"], arrays["dest_lengths"], codes)
        check_boxes(frame.ndim, sizes.shape[1], sizes=[frame.lengths])
        every = np.ones(len(ndim), bool)
        _check_axes(frame.axes, (frame.ndim, frame.lengths), (ndim, sizes), every)
        return frame


def _packed(axes: Iterable[Axes]) -> list[list[tuple[int, ...]]]:
    return [[one.split, one.order] for one in axes]


def _axes(pairs: Iterable[Any]) -> tuple[Axes, ...]:
    return tuple(Axes(*pair) for pair in pairs)


def _fill(text: str) -> float:
    return fill_value(int(text) if text.lstrip("-").isdigit() else float(text))


def _check_codes(coded: Coded[Any], count: int) -> None:
    if coded.number.shape != (count,) or not within(coded.number + 1, len(coded.values) + 1):
        raise ValueError("a code is out of range")
    if len(set(coded.values)) != len(coded.values):
        raise ValueError("a coded value is there twice")


def check_boxes(
    ndim: Ints, width: int, offsets: Sequence[Ints] = (), sizes: Sequence[Ints] = ()
) -> None:
    """Refuse offsets and sizes of boxes that are negative or reach past their axes."""
    flat({"ndim": ndim}, "ndim")
    if any(c.shape != (len(ndim), width) for c in (*offsets, *sizes)) or width > MAX_AXES:
        raise ValueError("its columns differ in length or axes")
    if not within(ndim, width + 1) or not all(within(c, 1 << 62) for c in (*offsets, *sizes)):
        raise ValueError("a box is out of range")
    spare = np.arange(width) >= ndim[:, None]
    if any(c[spare].any() for c in offsets) or any((c[spare] != 1).any() for c in sizes):
        raise ValueError("a box reaches past its tensor's axes")


Shapes = tuple[Ints, Ints]  # the number of axes of each box, and its sizes, padded


def _check_axes(
    axes: Coded[Axes], source: Shapes, chunk: Shapes, boxed: npt.NDArray[np.bool_]
) -> None:
    """Refuse boxes that cannot correspond to their chunks."""
    _check_codes(axes, len(boxed))
    width = max(source[1].shape[1], chunk[1].shape[1])
    plain = boxed & ~axes.known
    a, b = (pad(sizes[plain], width, 1) for _, sizes in (source, chunk))
    if (source[0] != chunk[0])[plain].any() or (a != b).any():
        raise ValueError("a box differs from its chunk")
    rows = np.flatnonzero(boxed & axes.known)
    first, _ = group_rows([axes.number[rows], *(side[rows] for side in (*source, *chunk))])
    for row in rows[first].tolist():
        box, own = (tuple(sizes[row, : ndim[row]].tolist()) for ndim, sizes in (source, chunk))
        if fitting_axes(box, own, axes[row]) != axes[row]:
            raise ValueError("axes are not in canonical form")
