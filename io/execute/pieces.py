"""`Piece`: the elements of one item of a save plan as bytes, block by block.

Every format writes `Piece`s. Their elements lie in tensor memory, or, when one checkpoint is
converted to another, in the checkpoint that they are read from as they are needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from shardplan.planning import (
    SavePlan,
    dtype_name,
    is_tensor,
    itemsize,
    kind_of,
    shard_finder,
)
from shardplan.planning.columns import row_tuples
from shardplan.planning.geometry import Cut
from shardplan.planning.storage import BLOCK_BYTES, boxes_of, cut_within, reads_of

from ..optional import torch
from ..pool import Progress, check_stopped
from ..tensors import (
    as_tensor,
    block_of_memory,
    box_view,
    can_cast,
    copy_elements,
    empty_tensor,
    flat_memory,
    is_plain,
    same_dtype,
    tensor_bytes,
    torch_dtype,
)
from ..windows import Window
from .copying import Block, Deferred

__all__ = [
    "Kept",
    "Lazy",
    "Origin",
    "Piece",
    "blocks_of",
    "collect",
    "joined_pieces",
    "tied_pieces",
    "tied_tensors",
]


class Lazy:
    """A tensor whose elements are somewhere else, and read box by box."""

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """What its elements are."""
        raise NotImplementedError

    def read_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of it, contiguous."""
        raise NotImplementedError

    def stretches(self, offsets: Sequence[int], sizes: Sequence[int]) -> Block | None:
        """Return the bytes of local files that a box of it is made of; None if there are none."""
        return None


@attrs.frozen
class Kept:
    """A value that is one leaf of a state dict, whatever it is made of.

    Another tool may have stored a list of dicts as one value; it stays one.

    >>> from shardplan.planning import flatten
    >>> flatten({"groups": Kept([{"lr": 0.1}])})[0]
    {'groups': Kept(value=[{'lr': 0.1}])}
    """

    value: Any


@attrs.frozen(eq=False)
class Origin:
    """A box of a chunk, and what its elements are."""

    # What holds its elements, and maybe others; or their value, if all are the same.
    source: torch.Tensor | Lazy | float
    where: Cut  # the box of the source, relative to what that holds, and the box of the chunk

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Origin:
        """Return a whole tensor as the only origin of a chunk."""
        origin, sizes = (0,) * tensor.ndim, tuple(tensor.shape)
        return cls(tensor, Cut(origin, sizes, None, origin, sizes))

    @property
    def window(self) -> Window | None:
        """The memory of the box; None if its elements are somewhere else."""
        if not isinstance(self.source, torch.Tensor):
            return None
        box = box_view(self.source, self.where.box_offsets, self.where.box_sizes)
        return Window(box, self.where.chunk_sizes, self.where.axes)

    def moved(self, by: Sequence[int]) -> Origin:
        """Return the same origin of a greater chunk, in which this one begins at ``by``."""
        start = tuple(at + o for at, o in zip(self.where.chunk_offsets, by, strict=True))
        return Origin(self.source, self.where._replace(chunk_offsets=start))

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Cut, ...]:
        """Return what it has of a box of the chunk, with boxes of the chunk relative to that."""
        return cut_within(self.where, tuple(offsets), tuple(sizes))

    def lying(self, offsets: Sequence[int], sizes: Sequence[int]) -> Block | None:
        """Return a box of the chunk as bytes of files; None if it is not stored so."""
        if isinstance(self.source, (torch.Tensor, float, int)):
            return None
        cuts = self.within(offsets, sizes)
        if len(cuts) != 1 or math.prod(cuts[0].chunk_sizes) != math.prod(sizes):
            return None
        if cuts[0].axes is not None and len(cuts[0].axes.order) > 1:
            return None  # in another order
        return self.source.stretches(cuts[0].box_offsets, cuts[0].box_sizes)

    def copy_into(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        """Fill a tensor, which is a box of the chunk, with what this has of it, casting that."""
        if isinstance(self.source, (float, int)):
            for one in self.within(offsets, box.shape):
                box_view(box, one.chunk_offsets, one.chunk_sizes).fill_(self.source)
            return
        stored = dtype_name(self.source.dtype)
        for at, sizes in reads_of(box.shape, dtype_name(box.dtype), stored):
            start = [o + a for o, a in zip(offsets, at, strict=True)]
            block = box_view(box, at, sizes)
            for one in self.within(start, sizes):
                found = self._found(one)
                target = box_view(block, one.chunk_offsets, one.chunk_sizes)
                for mine, theirs in found.pairs((0,) * len(sizes), one.chunk_sizes, target):
                    copy_elements(theirs, mine)

    def _found(self, one: Cut) -> Window:
        """Return the elements of one box of the source, read if they are somewhere else."""
        assert not isinstance(self.source, (float, int))
        if isinstance(self.source, torch.Tensor):
            box = box_view(self.source, one.box_offsets, one.box_sizes)
        else:
            box = self.source.read_box(one.box_offsets, one.box_sizes)
        return Window(box, one.chunk_sizes, one.axes)


@attrs.frozen(eq=False)
class Piece:
    """One chunk to write."""

    name: str  # its tensor's name in the checkpoint
    dtype: str  # what to store it as
    offsets: tuple[int, ...]  # where it starts in its tensor
    shape: tuple[int, ...]  # its sizes
    size: tuple[int, ...]  # the tensor's global shape
    origins: tuple[Origin, ...]  # what it is made of; together they hold each element once
    progress: Progress | None = None  # gets its bytes as they are written

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are those of tensor memory as it is, so that no copy is made."""
        view = self._memory([0] * len(self.shape), self.shape)
        return view is not None and is_plain(view, self.dtype)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """Yield its bytes in row-major order, a block at a time; see `cut_blocks`.

        They are those of tensor memory itself where these can be had without a copy.
        """
        if self.nbytes <= block_bytes and (whole := self.lying) is not None:
            check_stopped()
            yield whole
            self._report(len(whole))
            return
        if not self.nbytes:
            yield memoryview(b"")
            return
        for offsets, sizes in boxes_of(self.shape, self.dtype, block_bytes):
            check_stopped()
            view = self._make(offsets, sizes)
            yield view
            self._report(len(view))

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> memoryview:
        """Return the bytes of a box of it, of tensor memory itself where that is possible."""
        check_stopped()
        return self._make(offsets, sizes)

    @property
    def lying(self) -> memoryview | None:
        """Its bytes, if they are those of a whole tensor as it is; None if they may not be."""
        (origin, *others), tensor = self.origins, self.origins[0].source
        if others or origin.where.axes is not None or not isinstance(tensor, torch.Tensor):
            return None
        is_same = tensor.shape == self.shape and same_dtype(tensor, self.dtype)
        return flat_memory(tensor) if is_same else None

    def made_blocks(self) -> list[Block]:
        """Return its blocks, to be made as they are written."""
        width, cut = itemsize(self.dtype), boxes_of(self.shape, self.dtype) if self.nbytes else ()
        made = [Deferred(math.prod(n) * width, partial(self._make, at, n)) for at, n in cut]
        return [self._block(one) for one in made]

    def lying_blocks(self) -> list[Block] | None:
        """Return its blocks as bytes that lie somewhere as they are to be written.

        None if some do not, and must be made.
        """
        if 0 < self.nbytes <= BLOCK_BYTES and (whole := self.lying) is not None:
            return [self._block(whole)]
        found = []
        for offsets, sizes in boxes_of(self.shape, self.dtype) if self.nbytes else ():
            block = self._lying(offsets, sizes)
            if block is None:
                return None
            found.append(block)
        return found

    def _lying(self, offsets: Sequence[int], sizes: Sequence[int]) -> Block | None:
        (origin, *others), sizes = self.origins, sizes[: len(self.shape)]
        if others:
            return None
        if origin.window is None:
            is_same = _dtype_of(origin.source) == self.dtype
            return origin.lying(offsets[: len(sizes)], sizes) if is_same else None
        box = self._memory(offsets, sizes)
        view = None if box is None else self._bytes(box)
        return None if view is None else self._block(view)

    def _make(self, offsets: Sequence[int], sizes: Sequence[int]) -> memoryview:
        """Return the bytes of a block, copied only if they must be."""
        offsets, sizes = offsets[: len(self.shape)], sizes[: len(self.shape)]
        box = self._memory(offsets, sizes)
        if box is None:
            box = self._read(offsets, sizes)
        if box is None:
            memory = torch.from_numpy(block_of_memory(math.prod(sizes) * itemsize(self.dtype)))
            box = memory.view(torch_dtype(self.dtype)).view(tuple(sizes))
            for origin in self.origins:
                origin.copy_into(box, offsets)
        view = self._bytes(box)
        return tensor_bytes(box, self.dtype) if view is None else view

    def _memory(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
        """Return a box as a view of tensor memory; None if one view cannot hold it.

        No other place makes such views.
        """
        window = self.origins[0].window if len(self.origins) == 1 else None
        return None if window is None else window.box(offsets, sizes)

    def _read(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
        """Return a box of what is elsewhere; None if it cannot be taken as it is."""
        (origin, *others) = self.origins
        if others or origin.where.axes is not None or _dtype_of(origin.source) != self.dtype:
            return None
        assert isinstance(origin.source, Lazy)
        start = zip(origin.where.box_offsets, offsets, strict=True)
        return origin.source.read_box([a + b for a, b in start], sizes)

    def _bytes(self, box: torch.Tensor) -> memoryview | None:
        return flat_memory(box) if same_dtype(box, self.dtype) else None

    def _block(self, part: memoryview | Deferred) -> Block:
        if self.progress is None:
            return Block([part])
        return Block([part], partial(self.progress.add, part.nbytes))

    def _report(self, nbytes: int) -> None:
        if self.progress is not None:
            self.progress.add(nbytes)


def _dtype_of(source: torch.Tensor | Lazy | float) -> str | None:
    """Return the dtype of a source by name; None for a value, which has that of its chunk."""
    return None if isinstance(source, (float, int)) else dtype_name(source.dtype)


def joined_pieces(pieces: Mapping[int, Piece]) -> dict[str, Piece]:
    """Return the tensors that pieces make up together, by name; each must be there as a whole."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces.values():
        by_name.setdefault(piece.name, []).append(piece)
    return {name: _joined(found) for name, found in by_name.items()}


def _joined(pieces: Sequence[Piece]) -> Piece:
    first = pieces[0]
    if len(pieces) == 1 and first.shape == first.size:
        return first
    origins = tuple(origin.moved(one.offsets) for one in pieces for origin in one.origins)
    origin = (0,) * len(first.size)
    return attrs.evolve(first, offsets=origin, shape=first.size, origins=origins)


def blocks_of(pieces: Sequence[Piece], local: bool) -> list[list[Block]]:
    """Return the blocks of each piece of a file; ``local`` if bytes may come from other files.

    If some block must be made, all are, as what is read ahead is read in order.
    """
    lying = [piece.lying_blocks() if local else None for piece in pieces]
    known = [blocks for blocks in lying if blocks is not None]
    return known if len(known) == len(pieces) else [piece.made_blocks() for piece in pieces]


@torch.no_grad()  # so that DTensors give their local tensors as they are
def collect(
    flat: Mapping[str, Any],
    plan: SavePlan,
    refused_name: Callable[[str], str | None] = lambda _: None,
    progress: Progress | None = None,
) -> tuple[dict[int, Piece], dict[str, Any], dict[str, str]]:
    """Find all that a plan writes of a flat state dict, before anything is written.

    ``refused_name`` returns why a format cannot carry a tensor of some name, or None.

    Returns:
        The pieces by row of the plan's items; the non-tensor values, by name in the
        checkpoint; and what cannot be written, by name, with the reason.
    """
    items = plan.items
    catalog, at, frame = items.catalog, items.row.tolist(), items.frame
    ndim = catalog.ndim[items.row]
    axes = ndim if frame is None else frame.ndim
    offsets, sizes = row_tuples(items.offsets, ndim), row_tuples(items.sizes, ndim)
    starts, boxes = row_tuples(items.shard_offsets, axes), row_tuples(items.box_sizes, axes)
    width = min(items.box_offsets.shape[1], items.shard_offsets.shape[1])
    inside = row_tuples(items.box_offsets[:, :width] - items.shard_offsets[:, :width], axes)
    names = {catalog.names[number] for number in at}
    reasons = {name: why for name in names if (why := refused_name(name)) is not None}
    pieces: dict[int, Piece] = {}
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    holders: dict[tuple[str, tuple[int, ...]], torch.Tensor | Lazy] = {}
    cuts: dict[Any, Cut] = {}  # most tensors have one of a few shapes
    find = shard_finder(flat)
    for row, number in enumerate(at):
        name, source, _, properties, size = catalog.heads[number]
        if properties is None:
            value = flat[source]
            values[name] = value.value if isinstance(value, Kept) else value
            continue
        if name in reasons:
            refused[name] = reasons[name]
            continue
        origin, dtype, shape = (0,) * len(size), properties.dtype, sizes[row]
        fill = None if frame is None else frame.fill[row]
        if fill is not None:
            found = Origin(fill, Cut(origin, shape, None, origin, shape))
            pieces[row] = Piece(name, dtype, offsets[row], shape, size, (found,), progress)
            continue
        start, box = starts[row], boxes[row]
        try:
            held = holders.get((source, start))
            if held is None and 0 in size:  # which no rank may have any origin of
                held = empty_tensor(box, properties.dtype)
            elif held is None:
                value = flat.get(source)
                held = value if isinstance(value, Lazy) else as_tensor(find(source, start))
                holders[source, start] = held
        except TypeError as error:
            refused[name] = str(error)
            continue
        cut = Cut(inside[row], box, None if frame is None else frame.axes[row], origin, shape)
        found = Origin(held, cuts.setdefault(cut, cut))
        pieces[row] = Piece(name, dtype, offsets[row], shape, size, (found,), progress)
        why = _misfit(found, dtype)
        if why is not None:
            refused[name] = why
    return pieces, values, refused


def _misfit(origin: Origin, dtype: str) -> str | None:
    assert not isinstance(origin.source, (float, int))
    extent, (start, sizes, *_) = tuple(origin.source.shape), origin.where
    if 0 in sizes and 0 in extent:  # nothing is nothing, however the rest is cut
        return None
    fits = extent == sizes and not any(start)
    if not fits and len(extent) == len(sizes):
        ends = zip(start, sizes, extent, strict=True)
        fits = all(s >= 0 and s + n <= e for s, n, e in ends)
    if not fits:
        return f"has shape {extent} where its plan says {sizes} from {start} on"
    own = dtype_name(origin.source.dtype)
    if not can_cast(own, dtype):
        return f"is {own}, which torch cannot cast to {dtype}"
    return None


def tied_pieces(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """Return the names of tensors that are the same view as an earlier one, and that one's name."""
    kept: dict[Hashable, str] = {}
    ties, count = {}, Counter(map(_start, pieces.values()))
    for name, piece in pieces.items():
        if count[_start(piece)] == 1:
            continue
        views = tuple(_view(origin) for origin in piece.origins)
        if None in views:
            continue
        first = kept.setdefault((views, piece.dtype, piece.shape), name)
        if first != name:
            ties[name] = first
    return ties


@torch.no_grad()  # as in `collect`
def tied_tensors(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return names of tensors that are held as the same view as an earlier one, and its name.

    They may be parts of tensors that are cut in the same way.

    >>> w = torch.ones(2)
    >>> tied_tensors({"a": w, "b": w.clone(), "c": w})
    {'c': 'a'}
    """
    kept: dict[Hashable, str] = {}
    ties = {}
    for name, value in flat.items():
        kind = kind_of(value) if is_tensor(value) else None
        local = getattr(value, "_local_tensor", value)
        if kind is None or not isinstance(local, torch.Tensor) or not local.numel():
            continue
        first = kept.setdefault((kind, _memory_of(local)), name)
        if first != name:
            ties[name] = first
    return ties


def _start(piece: Piece) -> Hashable:
    """Return a key that is equal for chunks that begin with the same elements, and for others."""
    source = piece.origins[0].source
    return source.data_ptr() if isinstance(source, torch.Tensor) else None


def _view(origin: Origin) -> Hashable | None:
    """Return a key that is equal for origins of the same elements; None if none is known."""
    tensor = origin.source
    if isinstance(tensor, (float, int)):
        return origin.source, origin.where
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return None
    return _memory_of(tensor), origin.where


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors of one shape only if they are the same memory."""
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.stride(), *flags)
