"""Writing one rank's files: straight out of tensor memory, in one pass, hashed on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from ...pool import Pool, Progress, check_stopped, default_pool
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
        values: Its non-tensor values, by name: kind (see `StoredValue`), and the JSON data of an
            inline one, or how many bytes another takes.
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
        block_bytes: The most bytes of a block; `assemble` must be given the same.
        progress: Counts the bytes of tensors.

    Returns:
        What was written. All of it has reached the disk, the names of the files included.

    Raises:
        ValueRefusedError: Some values cannot be stored; nothing was written then.
        StoreError: The store failed; what was written is removed again.
    """
    pieces, values = _collect(flatten(sd)[0], plan, progress)
    files = _files(plan, write_plan(plan, rank, save_id), pieces, values)
    headers = [build_header(file.name, file.slots, save_id) for file in files]
    try:
        written = (pool or default_pool()).map(
            lambda pair: pair[0].write(store, pair[1], block_bytes),
            zip(files, headers, strict=True),
            nbytes=lambda pair: pair[0].staged(store.staging) + len(pair[1]),
        )
        store.sync()  # another process may commit, and cannot sync what it did not write
    except BaseException:
        with suppress(Exception):
            store.delete([file.name for file in files])
        raise
    sums = np.zeros(len(plan.items), np.uint64)
    for file, digests in zip(files, written, strict=True):
        sums[file.rows] = digests
    kinds = {k: (v.kind, v.data if v.kind == "inline" else len(v.data)) for k, v in values.items()}
    made = (file.described(header) for file, header in zip(files, headers, strict=True))
    return Written(tuple(made), sums, kinds)


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


@attrs.frozen(eq=False)
class _File:
    """One file to write.

    Attributes:
        number: Which of the rank's files it is.
        name: Its name.
        rows: The plan's items that lie in it, in order.
        contents: The bytes of each: a piece of a tensor, or those of a value.
        slots: What the header says of each.
    """

    number: int
    name: str
    rows: Sequence[int]
    contents: Sequence[Piece | bytes]
    slots: Sequence[Slot]

    def staged(self, by_store: int) -> int:
        """Return how many bytes of memory it takes to write, given what the store may take."""
        pieces = (one for one in self.contents if isinstance(one, Piece))
        rough = sum(piece.nbytes for piece in pieces if not piece.is_plain)
        nbytes = sum(slot.nbytes for slot in self.slots)
        return min(_COPIES * rough, _STAGED) + min(2 * nbytes, by_store)

    def described(self, header: bytes) -> WrittenFile:
        """Return what is known of the file once it was written."""
        size = len(header) + sum(slot.nbytes for slot in self.slots)
        digest = hash_views([memoryview(header)])
        return WrittenFile(self.number, self.name, size, len(header), digest)

    def write(self, store: Store, header: bytes, block_bytes: int) -> list[int]:
        """Write it, and return the checksum of each item."""
        sums: list[int] = []
        size = len(header) + sum(slot.nbytes for slot in self.slots)
        store.write(self.name, self._parts(header, block_bytes, sums), nbytes=size)
        return sums

    def _parts(self, header: bytes, block_bytes: int, sums: list[int]) -> Iterator[memoryview]:
        """Yield the file's bytes in order; each item's checksum is appended once it was yielded."""
        yield memoryview(header)
        for content in self.contents:
            digests = []
            for block in _blocks(content, block_bytes):
                state = xxhash.xxh3_64()
                for start in range(0, len(block), _PIECE):
                    check_stopped()
                    state.update(block[start : start + _PIECE])
                    yield block[start : start + _PIECE]
                digests.append(state.intdigest())
            sums.append(combine(digests))


def _blocks(content: Piece | bytes, block_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of one item, block by block."""
    if isinstance(content, Piece):
        yield from content.blocks(block_bytes)
        return
    view = memoryview(content)
    for at in range(0, len(view) or 1, block_bytes):
        yield view[at : at + block_bytes]


def _files(
    plan: SavePlan,
    files: WritePlan,
    pieces: Mapping[int, Piece],
    values: Mapping[str, StoredValue],
) -> list[_File]:
    """Return the files to write; inline values lie in none."""
    catalog, row_of = plan.items.catalog, plan.items.row
    contents: dict[int, tuple[Piece | bytes, Slot]] = {}
    for row, piece in pieces.items():
        slot = Slot(piece.name, piece.dtype, piece.shape, piece.offsets)
        contents[row] = (piece, slot)
    for row in np.flatnonzero(catalog.is_bytes[row_of]).tolist():
        name = catalog.names[row_of[row]]
        if values[name].kind != "inline":
            data = values[name].data
            contents[row] = (data, Slot(name, "uint8", (len(data),), (0,)))
    found = []
    for number, file in enumerate(files.names):
        mine = files.rows(number).tolist()
        rows = [row for row in mine if row in contents]
        held = [contents[row] for row in rows]
        if rows:
            slots = [slot for _, slot in held]
            found.append(_File(number, file, rows, [data for data, _ in held], slots))
    return found
