"""Carry out a transfer plan on one rank: send, receive and copy, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import attrs
import numpy as np
import torch

from shardplan.dist import Comm, decode_json, encode_json, exchange, swap
from shardplan.io import (
    ValueRefusedError,
    Window,
    flat_memory,
    load_value,
    same_dtype,
    store_values,
)
from shardplan.io.execute import Piece, collect
from shardplan.planning import (
    LoadItemType,
    LoadPlan,
    Metadata,
    SavePlan,
    decode_metadata,
    decode_plan,
)
from shardplan.planning.columns import ReadItems, unpack
from shardplan.planning.storage import (
    Exchange,
    Parcel,
    ParcelPart,
    boxes_of,
    transfer_rounds,
    value_reads,
)

from ._memory import destinations, refuse_fixed
from ._read import Destinations, decode_values, encode_values, leaving
from ._report import Stopwatch

__all__ = ["Moving", "Filled"]

_ROUND_BYTES: Final = 256 << 20  # that a rank sends at a time, and receives


@attrs.frozen(eq=False)
class Filled:
    """A state dict to be filled: as it is, flattened, and the path of each name."""

    state: Mapping[Any, Any]
    flat: Mapping[str, Any]
    paths: Mapping[str, Any]


@attrs.frozen(eq=False)
class Moving:
    """One rank's part of a transfer: its plan, and the memory that is sent and filled."""

    comm: Comm
    plan: LoadPlan
    metadata: Metadata
    rounds: Sequence[Exchange]  # what it sends and receives, in order
    # What it can send, by the name and the start of each chunk.
    pieces: Mapping[tuple[str, tuple[int, ...]], Piece]
    given: Mapping[str, Any]  # the non-tensor values that it can send, by name
    into: Destinations  # what it fills

    @classmethod
    def of(
        cls, comm: Comm, source: Mapping[str, Any] | None, target: Filled | None, reply: bytes
    ) -> Moving:
        """Find the memory of this rank's part, and refuse what cannot be sent or filled."""
        header, parts = unpack(reply)
        plan, metadata = (
            cast(LoadPlan, decode_plan(parts["plan"])),
            decode_metadata(parts["metadata"]),
        )
        pieces: dict[int, Piece] = {}
        values: dict[str, Any] = {}
        if source is not None:
            pieces, values, refused = collect(source, cast(SavePlan, decode_plan(parts["given"])))
            if refused:
                raise ValueRefusedError(refused)
        coming = plan.transfers.take(plan.transfers.target == comm.rank).reads
        reads = ReadItems.concat([plan.items, coming])
        into = destinations({} if target is None else target.flat, reads, None)
        if target is not None:
            refuse_fixed(target.state, target.paths, [dest for dest, _ in value_reads(reads)])
        _refuse_shared(pieces.values(), into)
        peers = int(header["peers"])
        rounds = transfer_rounds(plan, metadata, comm.rank, peers=peers, round_bytes=_ROUND_BYTES)
        by_place = {(piece.name, piece.offsets): piece for piece in pieces.values()}
        return cls(comm, plan, metadata, rounds, by_place, values, into)

    def move(self, watch: Stopwatch) -> dict[str, Any]:
        """Send, receive and copy; return the non-tensor values, by name in the state dict."""
        with watch.phase("move"), leaving(self.comm, "transfer"):
            values = self._move_values()
            for one in self.rounds:
                self._move_tensors(one)
            self._copy_own()
        return values

    def _move_tensors(self, one: Exchange) -> None:
        """Take part in a round."""
        reads = _Reads.of(self.plan.transfers.reads, self.metadata)
        window = self.into.of(reads.items)
        landings = [_Landing.of(parcel, reads, window) for parcel in one.receives]
        going = [(parcel.peer, self._packed(parcel, reads)) for parcel in one.sends]
        swap(self.comm, going, [(landing.peer, landing.view) for landing in landings])
        for landing in landings:
            landing.deliver()

    def _packed(self, parcel: Parcel, reads: _Reads) -> memoryview:
        """Return the bytes of a parcel: tensor memory itself, if it is one part that lies so."""
        blocks = [self._block(reads, part.row, part.offsets, part.sizes) for part in parcel.parts]
        return blocks[0] if len(blocks) == 1 else memoryview(bytearray().join(blocks))

    def _block(
        self, reads: _Reads, row: int, offsets: Sequence[int], sizes: Sequence[int]
    ) -> memoryview:
        """Return the bytes of a box of a read, from this rank's memory."""
        chunk, start = reads.chunk(row)
        at = [a + b for a, b in zip(start, offsets, strict=False)]
        return self.pieces[chunk].block(at, sizes)

    def _copy_own(self) -> None:
        """Copy what this rank has itself."""
        reads = _Reads.of(self.plan.items, self.metadata)
        window = self.into.of(reads.items)
        for row in np.flatnonzero(self.plan.items.type == LoadItemType.TENSOR.value).tolist():
            into, dtype = window(row), reads.dtype(row)
            for offsets, sizes in boxes_of(into.sizes, dtype):
                block = self._block(reads, row, offsets, sizes)
                into.fill(offsets, sizes, np.frombuffer(block, np.uint8), dtype)

    def _move_values(self) -> dict[str, Any]:
        """Send, receive and copy non-tensor values."""
        moved = self.plan.transfers
        rows = np.flatnonzero(moved.reads.type == LoadItemType.BYTE_IO.value)
        moved = moved.take(rows)
        ends = list(zip(moved.source.tolist(), moved.target.tolist(), strict=True))
        names = [name for _, name in value_reads(moved.reads)]
        going: dict[int, list[str]] = {}
        for (source, target), name in zip(ends, names, strict=True):
            if source == self.comm.rank:
                going.setdefault(target, []).append(name)
        own = [name for _, name in value_reads(self.plan.items)]
        wanted = dict.fromkeys([*own, *(name for some in going.values() for name in some)])
        stored = store_values({name: self.given[name] for name in wanted})
        messages = {
            target: encode_json(encode_values({name: stored[name] for name in some}))
            for target, some in going.items()
        }
        sources = sorted({source for source, target in ends if target == self.comm.rank})
        for data in exchange(self.comm, messages, sources):
            stored = {**stored, **decode_values(decode_json(data))}
        coming = moved.reads.take(moved.target == self.comm.rank)
        pairs = value_reads(ReadItems.concat([self.plan.items, coming]))
        return {dest: load_value(stored[name], "the transfer", name) for dest, name in pairs}


@attrs.frozen(eq=False)
class _Reads:
    """Reads, with quick access to where each comes from, and as what."""

    items: ReadItems
    dtypes: Mapping[int, str]
    storage: list[int]
    ndim: list[int]
    anchors: list[list[int]]
    offsets: list[list[int]]

    @classmethod
    def of(cls, items: ReadItems, metadata: Metadata) -> _Reads:
        entries = metadata.state_dict_metadata
        dtypes = {
            number: entries.props[entries.prop[entries.row_of[name]]].dtype
            for number, name in enumerate(items.names)
            if name in entries.row_of and entries.prop[entries.row_of[name]] >= 0
        }
        columns = (items.storage, items.ndim, items.storage_anchor, items.storage_offsets)
        return cls(items, dtypes, *(column.tolist() for column in columns))

    def dtype(self, row: int) -> str:
        """Return the dtype that is sent."""
        return self.dtypes[self.storage[row]]

    def chunk(self, row: int) -> tuple[tuple[str, tuple[int, ...]], list[int]]:
        """Return the chunk of a read, by name and start, and where the read begins in it."""
        axes = slice(0, self.ndim[row])
        name = self.items.names[self.storage[row]]
        return (name, tuple(self.anchors[row][axes])), self.offsets[row][axes]


@attrs.frozen(eq=False)
class _Landing:
    """A parcel that is being received: straight into a tensor, or into memory of its own."""

    peer: int
    view: memoryview  # what is filled
    # If that is memory of its own: what each part fills, its box there, and its dtype.
    boxes: Sequence[tuple[Window, ParcelPart, str]] = ()

    @classmethod
    def of(cls, parcel: Parcel, reads: _Reads, window: Callable[[int], Window]) -> _Landing:
        """Make ready to receive a parcel."""
        boxes = [(window(part.row), part, reads.dtype(part.row)) for part in parcel.parts]
        if len(boxes) == 1:
            [(into, part, dtype)] = boxes
            box = into.box(part.offsets, part.sizes)
            is_direct = box is not None and same_dtype(box, dtype)
            view = flat_memory(box) if box is not None and is_direct else None
            if view is not None:
                return cls(parcel.peer, view)
        return cls(parcel.peer, np.empty(parcel.nbytes, np.uint8).data, boxes)

    def deliver(self) -> None:
        """Copy what has come to where it belongs, unless it came there."""
        data, begin = np.frombuffer(self.view, np.uint8), 0
        for into, box, dtype in self.boxes:
            own = data[begin : begin + box.nbytes]
            begin += box.nbytes
            aligned = own.copy() if len(self.boxes) > 1 else own
            into.fill(box.offsets, box.sizes, aligned, dtype)


def _refuse_shared(pieces: Iterable[Piece], into: Destinations) -> None:
    """Refuse targets whose memory is also sent: it would change while it is being sent."""
    sent = {
        origin.source.untyped_storage().data_ptr(): piece.name
        for piece in pieces
        for origin in piece.origins
        if isinstance(origin.source, torch.Tensor) and origin.source.numel()
    }
    for (name, _), shard in into.shards.items():
        memory = shard.untyped_storage().data_ptr() if shard.numel() else None
        if memory in sent:
            raise ValueError(
                f"`{name}` of the target shares memory with `{sent[memory]}` of the source, which "
                "would change while it is sent; give the target memory of its own"
            )
