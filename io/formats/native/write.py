"""How does one rank write its part? Straight out of tensor memory, one pass, hashed on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import CodecError, SavePlan, flatten
from shardplan.planning.columns import DAMAGE, pack, unpack
from shardplan.planning.storage import BLOCK_BYTES, WritePlan, write_plan

from ...checksums import Sums, combine, hash_views, xxhash
from ...errors import ValueRefusedError
from ...execute.pieces import Piece, collect
from ...pool import Pool, check_stopped, default_pool
from ...progress import Progress
from ...stores.base import Store
from ...values import StoredValue, sort_values
from ..headers import Slot, build_header, refused_name

__all__ = ["Written", "WrittenFile", "write_rank"]

_PIECE: Final = 1 << 20  # bytes that are hashed and then written, while they are in the cache
_STAGED: Final = 96 << 20  # memory that copies for one file in the making may take
_COPIES: Final = 3  # of what cannot be written as it lies: cast, laid out, waiting to be written


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


def write_rank(
    store: Store,
    sd: Mapping[Any, Any],
    plan: SavePlan,
    *,
    save_id: str,
    rank: int = 0,
    pool: Pool | None = None,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
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
        progress: Is told of the bytes of tensors.

    Returns:
        What was written. All of it has reached the disk, the names of the files included.

    Raises:
        ValueRefusedError: Some values cannot be stored; nothing was written then.
        StoreError: The store failed; what was written is removed again.
    """
    flat, _ = flatten(sd)
    pieces, values = _collect(flat, plan, progress)
    files = write_plan(plan, rank, save_id)
    sums = np.zeros(len(plan.items), np.uint64)
    jobs = [
        _Job(n, files, plan, pieces, values, sums, block_bytes) for n in range(len(files.names))
    ]
    jobs = [job for job in jobs if job.rows]
    headers = [build_header(job.name, job.slots, save_id) for job in jobs]
    try:
        written = (pool or default_pool()).map(
            lambda pair: _write_file(store, *pair),
            zip(jobs, headers, strict=True),
            nbytes=lambda pair: pair[0].staged(store.staging) + len(pair[1]),
        )
        store.sync()  # whoever commits may do so elsewhere, and cannot sync what it did not write
    except BaseException:
        with suppress(Exception):
            store.delete([job.name for job in jobs])
        raise
    told = {k: (v.kind, v.data if v.kind == "inline" else len(v.data)) for k, v in values.items()}
    return Written(tuple(written), sums, told)


def _collect(
    flat: Mapping[str, Any], plan: SavePlan, progress: Progress | None
) -> tuple[dict[int, Piece], dict[str, StoredValue]]:
    """Find all that is to be written, and refuse what cannot be, before anything is."""
    pieces, values, refused = collect(flat, plan, refused_name, progress)
    stored, unfit = sort_values(values)
    refused |= unfit
    for name, value in stored.items():
        reason = None if value.kind == "inline" else refused_name(name)
        if reason is not None:
            refused[name] = reason
    if refused:
        raise ValueRefusedError(refused)
    return pieces, stored


class _Job:
    """One file to write: its items in order, and where their bytes come from."""

    def __init__(
        self,
        number: int,
        files: WritePlan,
        plan: SavePlan,
        pieces: Mapping[int, Piece],
        values: Mapping[str, StoredValue],
        sums: Sums,
        block_bytes: int,
    ) -> None:
        self.number, self.name = number, files.names[number]
        self.plan, self.pieces, self.sums = plan, pieces, sums
        self.block_bytes = block_bytes
        names, of = plan.items.catalog.names, plan.items.row
        self.payloads = {
            row: values[names[of[row]]].data
            for row in np.flatnonzero(plan.items.catalog.is_bytes[of]).tolist()
            if values[names[of[row]]].kind != "inline"
        }
        rows = files.rows(number).tolist()
        self.rows = [row for row in rows if row in pieces or row in self.payloads]
        self.slots = [self._slot(row) for row in self.rows]

    def _slot(self, row: int) -> Slot:
        if row in self.pieces:
            piece = self.pieces[row]
            return Slot(piece.name, piece.dtype, piece.shape, piece.offsets)
        name = self.plan.items.catalog.names[self.plan.items.row[row]]
        return Slot(name, "uint8", (len(self.payloads[row]),), (0,))

    def staged(self, by_store: int) -> int:
        """Return how many bytes of memory it takes to write, given what the store may take."""
        pieces = (self.pieces[row] for row in self.rows if row in self.pieces)
        rough = sum(piece.nbytes for piece in pieces if not piece.is_plain)
        nbytes = sum(slot.nbytes for slot in self.slots)
        return min(_COPIES * rough, _STAGED) + min(2 * nbytes, by_store)

    def parts(self, header: bytes) -> Iterator[memoryview]:
        """Yield the file's bytes in order, noting the checksum of each item on the way."""
        yield memoryview(header)
        for row in self.rows:
            digests = []
            for block in self._blocks(row):
                state = xxhash.xxh3_64()
                for start in range(0, len(block), _PIECE):
                    check_stopped()
                    state.update(block[start : start + _PIECE])
                    yield block[start : start + _PIECE]
                digests.append(state.intdigest())
            self.sums[row] = combine(digests)

    def _blocks(self, row: int) -> Iterator[memoryview]:
        """Yield the bytes of one item, block by block."""
        if row in self.pieces:
            return self.pieces[row].blocks(self.block_bytes)
        payload, step = memoryview(self.payloads[row]), self.block_bytes
        return (payload[i : i + step] for i in range(0, len(payload) or 1, step))


def _write_file(store: Store, job: _Job, header: bytes) -> WrittenFile:
    size = len(header) + sum(slot.nbytes for slot in job.slots)
    store.write(job.name, job.parts(header), nbytes=size)
    return WrittenFile(job.number, job.name, size, len(header), hash_views([memoryview(header)]))
