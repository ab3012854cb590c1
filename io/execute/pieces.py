"""`Piece`: the elements of one item of a save plan as bytes, block by block.

Every format writes `Piece`s. Their elements lie in tensor memory, or, when one checkpoint is
converted to another, in the checkpoint that they are read from as they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning import SavePlan, dtype_name, itemsize, shard_finder
from shardplan.planning.storage import BLOCK_BYTES, boxes_of, reads_of

from ..pool import Progress, check_stopped
from ..tensors import (
    as_tensor,
    block_of_memory,
    box_view,
    can_cast,
    can_share,
    empty_tensor,
    flat_memory,
    is_plain,
    same_dtype,
    tensor_bytes,
    torch_dtype,
)
from .copying import Block, Made

__all__ = ["Kept", "Lazy", "Piece", "blocks_of", "collect", "tied_pieces"]


@runtime_checkable
class Lazy(Protocol):
    """A tensor whose elements are somewhere else, and read box by box."""

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""

    @property
    def dtype(self) -> Any:
        """What its elements are."""

    def read_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of it, contiguous."""
        ...

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
class Piece:
    """One chunk to write.

    Attributes:
        name: Its tensor's name in the checkpoint.
        dtype: What to store it as.
        offsets: Where it starts in its tensor.
        shape: Its sizes.
        size: The tensor's global shape.
        source: What holds its elements, and maybe others.
        start: Where it starts there.
        progress: Gets its bytes as they are written.
    """

    name: str
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    size: tuple[int, ...]
    source: torch.Tensor | Lazy
    start: tuple[int, ...]
    progress: Progress | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are those of tensor memory as it is, so that no copy is made."""
        if not isinstance(self.source, torch.Tensor):
            return False
        return is_plain(box_view(self.source, self.start, self.shape), self.dtype)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """Yield its bytes in row-major order, a block at a time; see `cut_blocks`.

        They are those of tensor memory itself where these can be had without a copy.
        """
        if not self.nbytes:
            yield memoryview(b"")
            return
        for offsets, sizes in boxes_of(self.shape, self.dtype, block_bytes):
            check_stopped()
            view = self._make(offsets, sizes)
            yield view
            self._tell(len(view))

    def _make(self, offsets: Sequence[int], sizes: Sequence[int]) -> memoryview:
        """Return the bytes of a block."""
        at = [s + o for s, o in zip(self.start, offsets, strict=False)]
        if isinstance(self.source, torch.Tensor):
            box = box_view(self.source, at, sizes)
        else:
            box = self._read(self.source, at, sizes[: len(at)])
        view = flat_memory(box) if same_dtype(box, self.dtype) else None
        return tensor_bytes(box, self.dtype) if view is None else view

    def _read(self, source: Lazy, at: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of what is somewhere else, cast a part at a time where it has to be."""
        own = dtype_name(source.dtype)
        if own == self.dtype:
            return source.read_box(at, sizes)
        memory = torch.from_numpy(block_of_memory(math.prod(sizes) * itemsize(self.dtype)))
        box = memory.view(torch_dtype(self.dtype)).view(tuple(sizes))
        for offsets, part in reads_of(sizes, self.dtype, own):
            found = source.read_box([a + o for a, o in zip(at, offsets, strict=True)], part)
            box_view(box, offsets, part).copy_(found)
        return box

    def made_blocks(self) -> list[Block]:
        """Return its blocks, to be made as they are written."""
        if not self.nbytes:
            return []
        width = itemsize(self.dtype)
        return [
            Block(
                [Made(math.prod(sizes) * width, partial(self._make, offsets, sizes))],
                partial(self._tell, math.prod(sizes) * width),
            )
            for offsets, sizes in boxes_of(self.shape, self.dtype)
        ]

    def lying_blocks(self) -> list[Block] | None:
        """Return its blocks as bytes that lie somewhere just as they are to be written.

        None if some do not, and must be made.
        """
        if not self.nbytes:
            return []
        if isinstance(self.source, torch.Tensor):
            box = box_view(self.source, self.start, self.shape)
            view = flat_memory(box) if same_dtype(box, self.dtype) else None
            if view is None:
                return None
            cut = (view[i : i + BLOCK_BYTES] for i in range(0, len(view), BLOCK_BYTES))
            return [Block([part], partial(self._tell, len(part))) for part in cut]
        if dtype_name(self.source.dtype) != self.dtype:
            return None
        found = []
        for offsets, sizes in boxes_of(self.shape, self.dtype):
            at = [s + o for s, o in zip(self.start, offsets, strict=False)]
            block = self.source.stretches(at, sizes)
            if block is None:
                return None
            found.append(block)
        return found

    def _tell(self, nbytes: int) -> None:
        if self.progress is not None:
            self.progress.add(nbytes)


def blocks_of(pieces: Sequence[Piece], local: bool) -> list[list[Block]]:
    """Return the blocks of each piece, for a file that holds them.

    Args:
        pieces: What the file holds.
        local: Whether bytes may be taken from other local files. They are, unless some block must
            be made: then all are, as what is read ahead is read in order.
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
    """Find all that a plan writes, before anything is written.

    Args:
        flat: The rank's state dict, flattened.
        plan: What to write of it.
        refused_name: Says why a format cannot carry a tensor of some name; None if it can.
        progress: Gets the pieces' bytes as they are written.

    Returns:
        The pieces by row of the plan's items; the non-tensor values, by name in the
        checkpoint; and what cannot be written, by name, with the reason.
    """
    items = plan.items
    catalog, at = items.catalog, items.row.tolist()
    offsets, sizes, starts = (a.tolist() for a in (items.offsets, items.sizes, items.shard_offsets))
    names = {catalog.names[number] for number in at}
    reasons = {name: why for name in names if (why := refused_name(name)) is not None}
    pieces: dict[int, Piece] = {}
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    holders: dict[tuple[str, tuple[int, ...]], torch.Tensor | Lazy] = {}
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
        axes = len(size)
        offset, start = tuple(offsets[row][:axes]), tuple(starts[row][:axes])
        shape = tuple(sizes[row][:axes])
        try:
            held = holders.get((source, start))
            if held is None and 0 in size:  # which no rank may have any part of
                held = empty_tensor(shape, properties.dtype)
            elif held is None:
                held = holders[source, start] = _holder(find(source, start))
        except TypeError as error:
            refused[name] = str(error)
            continue
        inner = tuple(o - s for o, s in zip(offset, start, strict=True))
        pieces[row] = Piece(name, properties.dtype, offset, shape, size, held, inner, progress)
        why = _misfit(pieces[row])
        if why is not None:
            refused[name] = why
    return pieces, values, refused


def _holder(shard: Any) -> torch.Tensor | Lazy:
    """Return what holds a shard's elements, without copying them."""
    if isinstance(shard, torch.Tensor):
        return as_tensor(shard)
    if isinstance(shard, Lazy):
        return shard
    if isinstance(shard, np.ndarray) and not can_share(shard):
        return _Askew(shard, as_tensor(shard[tuple(slice(0) for _ in shard.shape)]).dtype)
    return as_tensor(shard)


@attrs.frozen(eq=False)
class _Askew(Lazy):
    """An array as no tensor can be: reversed, say, or of foreign byte order. A `Lazy`."""

    array: npt.NDArray[Any]
    dtype: torch.dtype

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""
        return self.array.shape

    def read_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a copy of a box of it."""
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        return as_tensor(np.array(self.array[box], self.array.dtype.newbyteorder("="), order="C"))


def _misfit(piece: Piece) -> str | None:
    extent = tuple(piece.source.shape)
    if 0 in piece.shape and 0 in extent:  # nothing is nothing, however the rest is cut
        return None
    fits = len(extent) == len(piece.shape) and all(
        s >= 0 and s + n <= e for s, n, e in zip(piece.start, piece.shape, extent, strict=True)
    )
    if not fits:
        return f"has shape {extent} where its plan says {piece.shape} from {piece.start} on"
    own = dtype_name(piece.source.dtype)
    if not can_cast(own, piece.dtype):
        return f"is {own}, which torch cannot cast to {piece.dtype}"
    return None


def tied_pieces(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """Find tensors that are the same view of the same memory; the first of each stays.

    Returns:
        The names of the others, and for each the one that stays.
    """
    kept: dict[tuple[Any, ...], str] = {}
    ties = {}
    for name, piece in pieces.items():
        tensor = piece.source
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        flags = (tensor.is_conj(), tensor.is_neg())
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.stride(), *flags)
        first = kept.setdefault((*view, piece.dtype, piece.shape, piece.start), name)
        if first != name:
            ties[name] = first
    return ties
