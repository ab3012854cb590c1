"""How does one rank write its part? Straight out of tensor memory, one pass, hashed on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
import numpy as np
import torch
import xxhash

from shardplan.planning import (
    CodecError,
    MetadataIndex,
    SavePlan,
    dtype_name,
    find_shard,
    flatten,
    itemsize,
)
from shardplan.planning.blocks import BLOCK_BYTES, cut_blocks
from shardplan.planning.catalog import column
from shardplan.planning.files import FileAssignment, assign_files
from shardplan.planning.packing import DAMAGE, pack, unpack

from .arrays import as_tensor, can_cast, dump, memory, same_dtype, window
from .checksums import Sums, combine, hash_views
from .errors import ValueRefusedError
from .headers import Slot, build_header, refused_name
from .pool import Pool, default_pool
from .stores import Store
from .values import StoredValue, store_values

__all__ = ["Written", "WrittenFile", "write_rank"]

_PIECE: Final = 1 << 20  # bytes that are hashed and then written, while they are in the cache
_STAGED: Final = 96 << 20  # memory that one file in the making may take


@attrs.frozen
class WrittenFile:
    """A data file that a rank wrote.

    Attributes:
        number: Which of the rank's files it is.
        name: Its name inside the checkpoint.
        size: Its size, in bytes.
        header: The length of its header, in bytes.
        digest: The xxh3-64 of its header.
    """

    number: int
    name: str
    size: int
    header: int
    digest: int


@attrs.frozen(eq=False)
class Written:
    """What one rank wrote, for whoever commits the checkpoint.

    Attributes:
        files: Its data files.
        sums: The checksum of each of its plan's items; 0 for an inline value.
        values: Its values that are no tensors, by name: kind (see `StoredValue`), and the JSON data
            of an inline one, or how many bytes another takes.
    """

    files: tuple[WrittenFile, ...]
    sums: Sums
    values: Mapping[str, tuple[str, Any]]

    @property
    def nbytes(self) -> int:
        """How many bytes the files have."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """Encode it, for the rank that commits."""
        head = {"files": [attrs.astuple(f) for f in self.files], "values": dict(self.values)}
        return pack(head, {"sums": self.sums.astype("<u8").tobytes()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Written:
        """Decode it.

        Raises:
            CodecError: These bytes are something else.
        """
        head, arrays = unpack(data)
        try:
            files = tuple(WrittenFile(*fields) for fields in head["files"])
            values = {name: (str(kind), data) for name, (kind, data) in head["values"].items()}
            return cls(files, np.frombuffer(arrays["sums"], "<u8").astype(np.uint64), values)
        except DAMAGE as error:
            raise CodecError(f"a rank's report of what it wrote is damaged: {error}") from error


@attrs.frozen(eq=False)
class _Source:
    """The elements of one item: tensor memory, and the place and dtype to store it in."""

    tensor: torch.Tensor
    slot: Slot

    @property
    def dtype(self) -> str:
        return self.slot.dtype


def write_rank(
    store: Store,
    sd: Mapping[Any, Any],
    plan: SavePlan,
    *,
    save_id: str,
    rank: int = 0,
    pool: Pool | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Written:
    """Write the data files of one rank; nothing can be loaded until the save is committed.

    Args:
        store: Where to.
        sd: The rank's state dict, nested or flat.
        plan: The rank's plan, as `global_plan` returned it.
        save_id: A name for this save, part of every file's name.
        rank: Which rank it is.
        pool: The threads and the memory budget to use.
        block_bytes: The most bytes of a block; `assemble` must be told the same.

    Returns:
        What was written. All of it has reached the disk.

    Raises:
        ValueRefusedError: Some values cannot be stored; nothing was written then.
        StoreError: The store failed; what was written is removed again.
    """
    flat, _ = flatten(sd)
    sources, values = _collect(flat, plan)
    files = assign_files(plan, rank, save_id)
    sums = np.zeros(len(plan.items), np.uint64)
    jobs = [
        _Job(n, files, plan, sources, values, sums, block_bytes) for n in range(len(files.names))
    ]
    jobs = [job for job in jobs if job.rows]
    headers = [build_header(job.name, job.slots, save_id)[0] for job in jobs]
    try:
        written = (pool or default_pool()).map(
            lambda pair: _write_file(store, *pair),
            zip(jobs, headers, strict=True),
            nbytes=_STAGED + store.staging,
        )
    except BaseException:
        with suppress(Exception):
            store.delete([job.name for job in jobs])
        raise
    told = {k: (v.kind, v.data if v.kind == "inline" else len(v.data)) for k, v in values.items()}
    return Written(tuple(written), sums, told)


def _collect(
    flat: Mapping[str, Any], plan: SavePlan
) -> tuple[dict[int, _Source], dict[str, StoredValue]]:
    """Find all that is to be written, and refuse what cannot be, before anything is."""
    sources: dict[int, _Source] = {}
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for row, item in enumerate(plan.items):
        name, data = item.index.fqn, item.tensor_data
        reason = refused_name(name)
        if data is None:
            values[name] = flat[item.source.fqn]
        elif reason is None:
            shard = find_shard(flat, MetadataIndex(item.source.fqn, item.source.offset))
            start = item.source.offset or ()
            offsets = [o - s for o, s in zip(data.chunk.offsets, start, strict=True)]
            try:
                tensor = window(as_tensor(shard), offsets, data.chunk.sizes)
                dtype, chunk = data.properties.dtype, data.chunk
                sources[row] = _Source(tensor, Slot(name, dtype, chunk.sizes, chunk.offsets))
                reason = _misfit(sources[row])
            except TypeError as error:
                reason = str(error)
        if reason is not None and (data is not None or _needs_file(values, name)):
            refused[name] = reason
    try:
        stored = store_values(values)
    except ValueRefusedError as error:
        raise ValueRefusedError({**refused, **error.reasons}) from None
    if refused:
        raise ValueRefusedError(refused)
    return sources, stored


def _needs_file(values: Mapping[str, Any], name: str) -> bool:
    """Tell whether a value whose name no data file can carry needs one."""
    return store_values({name: values[name]})[name].kind != "inline"


def _misfit(source: _Source) -> str | None:
    shape = tuple(source.tensor.shape)
    if shape != source.slot.shape:
        return f"has shape {shape} where its plan says {source.slot.shape}"
    own = dtype_name(source.tensor.dtype)
    if not can_cast(own, source.dtype):
        return f"is {own}, which torch cannot cast to {source.dtype}"
    return None


class _Job:
    """One file to write: its items in order, and where their bytes come from."""

    def __init__(
        self,
        number: int,
        files: FileAssignment,
        plan: SavePlan,
        sources: Mapping[int, _Source],
        values: Mapping[str, StoredValue],
        sums: Sums,
        block_bytes: int,
    ) -> None:
        self.number, self.name = number, files.names[number]
        self.plan, self.sources, self.sums = plan, sources, sums
        self.block_bytes = block_bytes
        names, of = plan.items.catalog.names, plan.items.row
        self.payloads = {
            row: values[names[of[row]]].data
            for row in np.flatnonzero(plan.items.catalog.is_bytes[of]).tolist()
            if values[names[of[row]]].kind != "inline"
        }
        rows = files.order[files.file[files.order] == number].tolist()
        self.rows = [row for row in rows if row in sources or row in self.payloads]
        self.slots = [self._slot(row) for row in self.rows]

    def _slot(self, row: int) -> Slot:
        if row in self.sources:
            return self.sources[row].slot
        name = self.plan.items.catalog.names[self.plan.items.row[row]]
        return Slot(name, "uint8", (len(self.payloads[row]),), (0,))

    def parts(self, header: bytes) -> Iterator[memoryview]:
        """Yield the file's bytes in order, noting the checksum of each item on the way."""
        yield memoryview(header)
        for row, slot in zip(self.rows, self.slots, strict=True):
            digests = []
            for block in self._blocks(row, slot):
                state = xxhash.xxh3_64()
                for start in range(0, len(block), _PIECE):
                    state.update(block[start : start + _PIECE])
                    yield block[start : start + _PIECE]
                digests.append(state.intdigest())
            self.sums[row] = combine(digests)

    def _blocks(self, row: int, slot: Slot) -> Iterator[memoryview]:
        """Yield the bytes of one item, block by block."""
        for offsets, sizes in self._boxes(slot):
            if row in self.payloads:
                yield memoryview(self.payloads[row])[offsets[0] : offsets[0] + sizes[0]]
                continue
            source = self.sources[row]
            box = window(source.tensor, offsets, sizes)
            view = memory(box) if same_dtype(box, source.dtype) else None
            yield dump(box, source.dtype) if view is None else view

    def _boxes(self, slot: Slot) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        if slot.nbytes <= self.block_bytes:
            return iter([([0] * len(slot.shape), slot.shape)])
        width = column([itemsize(slot.dtype)])
        shape = column([slot.shape], 1, len(slot.shape))
        blocks = cut_blocks(shape, width, self.block_bytes)
        return zip(blocks.offsets.tolist(), blocks.sizes.tolist(), strict=True)


def _write_file(store: Store, job: _Job, header: bytes) -> WrittenFile:
    size = len(header) + sum(slot.nbytes for slot in job.slots)
    store.write(job.name, job.parts(header), nbytes=size)
    return WrittenFile(job.number, job.name, size, len(header), hash_views([memoryview(header)]))
