"""Checksums of chunks: hash blocks, combine them, compare.

A chunk is hashed block by block (see `planning.storage`), so that threads and ranks can share the
work. Ours is xxh3-64: the checksum of a chunk of one block is that of its bytes; a larger chunk's
is that of the checksums of its blocks, eight bytes each, most significant first. Archives of torch
have the CRC-32 of each record.

- `Checksum` (`XXH3`, `CRC32`): hash the bytes of a block, combine the checksums of blocks.
- `BlockSums`: collect the checksums of blocks from several reads or ranks, compare whole chunks.
- `Proof`: the same for a checkpoint that is read piece by piece; reads again what is incomplete.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning import LoadItemType, TensorMetadata, itemsize, named_extras
from shardplan.planning.columns import column
from shardplan.planning.storage import cut_blocks

from .errors import FormatError, listed

with named_extras("reading or writing a checkpoint"):
    import xxhash

if TYPE_CHECKING:  # what is planned to be read is not needed to open a checkpoint
    from shardplan.planning.columns import ReadItems

    from .formats.base import Source
    from .pool import Pool
    from .stores.base import Store

Sums = npt.NDArray[np.uint64]
Key = tuple[str, int]  # a tensor's name, and the number of one of its chunks
Box = tuple[int, ...]

sum_crc = zlib.crc32


def read_pieces(
    store: Store, file: str, start: int, nbytes: int, piece: int
) -> Iterator[memoryview]:
    """Yield a range of a file piece by piece; each is overwritten by the next."""
    buffer = memoryview(bytearray(min(piece, nbytes)))
    for at in range(start, start + nbytes, piece):
        view = buffer[: min(piece, start + nbytes - at)]
        store.read(file, [(at, view)])
        yield view


@attrs.frozen
class Checksum:
    """A kind of checksum."""

    start: Callable[[], Any]  # begins that of a block, as hashlib does
    combine: Callable[[Sequence[int]], int]  # returns that of a chunk, given those of its blocks

    def of(self, views: Iterable[memoryview]) -> int:
        """Return the checksum of a block, one view after the other."""
        state = self.start()
        for view in views:
            state.update(view)
        return int(state.intdigest())

    def of_pieces(self, pieces: Iterator[memoryview], lengths: Iterable[int]) -> Iterator[int]:
        """Yield the checksum of each block, given the bytes of all in pieces of any length."""
        view = memoryview(b"")
        for left in lengths:
            state = self.start()
            while left:
                view = view or next(pieces)
                part, view = view[:left], view[left:]
                state.update(part)
                left -= len(part)
            yield int(state.intdigest())

    def of_blocks(self, view: memoryview, block_bytes: int) -> int:
        """Return the checksum of a chunk of bytes."""
        starts = range(0, len(view) or 1, block_bytes)
        return self.combine([self.of([view[start : start + block_bytes]]) for start in starts])


def combine(digests: Sequence[int]) -> int:
    """Return a chunk's xxh3-64, given those of its blocks in order."""
    if len(digests) == 1:
        return digests[0]
    return xxhash.xxh3_64_intdigest(b"".join(d.to_bytes(8, "big") for d in digests))


class _Crc:
    """The CRC-32 of a block in the making.

    The digest carries the length of the block in its high bytes, to be combined.
    """

    def __init__(self) -> None:
        self._crc = self._nbytes = 0

    def update(self, data: memoryview, /) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._nbytes += len(data)

    def intdigest(self) -> int:
        return self._nbytes << 32 | self._crc


def _combine_crcs(digests: Sequence[int]) -> int:
    crc = 0
    for digest in digests:
        crc = combine_crc(crc, digest & 0xFFFFFFFF, digest >> 32)
    return crc


XXH3: Final = Checksum(xxhash.xxh3_64, combine)
"""The checksums of our own format."""
hash_views: Final = XXH3.of
CRC32: Final = Checksum(_Crc, _combine_crcs)
"""The checksums of archives.

>>> CRC32.combine([CRC32.of([memoryview(b"check")]), CRC32.of([memoryview(b"point")])])
2345966128
"""


def combine_crc(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two parts, given those of each; the second has ``nbytes`` bytes."""
    return _times(_power(nbytes), first) ^ second


def _times(a: int, b: int) -> int:
    """Multiply polynomials over GF(2) modulo that of the CRC; the lowest power is the top bit."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ 0xEDB88320 if b & 1 else b >> 1
    return product


@cache
def _square(power: int) -> int:
    """Return x to the 2 to the ``power``."""
    return 1 << 30 if not power else _times(_square(power - 1), _square(power - 1))


@cache
def _power(nbytes: int) -> int:
    """Return x to the number of bits in ``nbytes``."""
    product, bits, power = 1 << 31, 8 * nbytes, 0
    while bits:
        if bits & 1:
            product = _times(_square(power), product)
        bits, power = bits >> 1, power + 1
    return product


def sums_to_hex(sums: Sums) -> str:
    """Write checksums as text, sixteen digits each."""
    return sums.astype(">u8").tobytes().hex()


def sums_from_hex(text: str) -> Sums:
    """Read checksums from text; see `sums_to_hex`."""
    sums = np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)
    sums.flags.writeable = False
    return sums


@attrs.define
class _Partial:
    """One chunk: its number of blocks, the checksums of some of them, and the bytes read."""

    count: int
    digests: dict[int, int] = attrs.field(factory=dict)
    nbytes: int = 0

    @property
    def complete(self) -> bool:
        return len(self.digests) == self.count


class BlockSums:
    """Checksums of blocks by chunk, collected until all blocks of a chunk are known.

    Any thread may add to it.
    """

    def __init__(self) -> None:
        self._chunks: dict[Key, _Partial] = {}
        self._lock = threading.Lock()
        self.verified = self.nbytes = 0

    def add(
        self, name: str, chunk: int, count: int, digests: Mapping[int, int], nbytes: int = 0
    ) -> None:
        """Add the checksums of some blocks of a chunk."""
        with self._lock:
            found = self._chunks.setdefault((name, chunk), _Partial(count))
            found.digests.update(digests)
            found.nbytes += nbytes

    def is_complete(self, key: Key) -> bool:
        """Return whether all blocks of a chunk are known."""
        return key in self._chunks and self._chunks[key].complete

    def settle(self, source: Source) -> None:
        """Compare all complete chunks with the checksums of a checkpoint, and drop them."""
        with self._lock:
            done = {key: found for key, found in self._chunks.items() if found.complete}
            self._chunks = {key: found for key, found in self._chunks.items() if key not in done}
        expected = source.chunk_sums(list(done))
        damaged = [
            key
            for (key, found), wanted in zip(done.items(), expected, strict=True)
            if wanted is not None
            and wanted != source.checksum.combine([found.digests[n] for n in range(found.count)])
        ]
        self.verified += len(done) - len(damaged)
        self.nbytes += sum(found.nbytes for found in done.values())
        if damaged:
            files = sorted({source.files[place.file] for place in source.find_chunks(damaged)})
            named = listed(sorted({name for name, _ in damaged}))
            raise FormatError(listed(files, quote=""), f"checksums do not fit: {named}")

    def pack(self) -> list[tuple[Any, ...]]:
        """Return what is known as plain data that can be sent to another rank."""
        packed = []
        for key, found in self._chunks.items():
            numbers, digests = np.array([*found.digests], "<i8"), [*found.digests.values()]
            blocks = numbers.tobytes(), np.array(digests, "<u8").tobytes()
            packed.append((*key, found.count, found.nbytes, *blocks))
        return packed

    def unpack(self, packed: Sequence[tuple[Any, ...]]) -> None:
        """Add what `pack` returned elsewhere."""
        for name, chunk, count, nbytes, numbers, digests in packed:
            columns = np.frombuffer(numbers, "<i8").tolist(), np.frombuffer(digests, "<u8").tolist()
            self.add(name, chunk, count, dict(zip(*columns, strict=True)), nbytes)


class Proof:
    """Compares the chunks of a checkpoint that is read piece by piece with their checksums.

    The blocks that are read are hashed on the way. A chunk with blocks that were not read whole is
    read again at the end, in small steps: such a chunk may not fit into memory.

    Attributes:
        has_sums: Whether the format has checksums that are known without reading; no others are
            collected.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.sums = BlockSums()
        first = next(iter(source.metadata.state_dict_metadata), None)
        self.has_sums = first is not None and source.sums_of(first) is not None
        self._lock = threading.Lock()
        self._begun: set[Key] = set()
        self._whole: set[Key] = set()
        self._blocks_of = cache(self._cut)

    @property
    def proved(self) -> int:
        """How many chunks matched their checksums."""
        return len(self._whole) + self.sums.verified

    def note(self, items: ReadItems) -> None:
        """Note which chunks were read; those read whole, and blocks in `sums`, are hashed."""
        if not self.has_sums:
            return
        kinds, names, axes = items.type.tolist(), items.storage.tolist(), items.ndim.tolist()
        for row, chunk in enumerate(items.storage_hint.tolist()):
            key = items.names[names[row]], chunk
            if kinds[row] == LoadItemType.TENSOR.value:
                offsets = tuple(items.storage_offsets[row, : axes[row]].tolist())
                self._begin(key, offsets, tuple(items.lengths[row, : axes[row]].tolist()))

    def wants(self, key: Key, offsets: Box, sizes: Box) -> Callable[[int], None] | None:
        """Return what to call with the xxh3-64 of a box of a chunk; None if it is not a block."""
        if not self.has_sums:
            return None
        self._begin(key, offsets)
        number = self._blocks_of(key).get((offsets, sizes))
        return None if number is None else partial(self._add, key, number)

    def settle(self, pool: Pool) -> None:
        """Compare all chunks that were begun; read those again that are incomplete."""
        again = [key for key in self._begun - self._whole if not self.sums.is_complete(key)]
        limit = self._source.block_bytes + self._source.store.staging
        pool.map(self._read_again, sorted(again), nbytes=limit)
        self.sums.settle(self._source)
        self._begun.clear()

    def _begin(self, key: Key, offsets: Box, sizes: Box = ()) -> None:
        if not any(offsets):
            with self._lock:
                self._begun.add(key)
                if len(self._blocks_of(key)) == 1 and (offsets, sizes) in self._blocks_of(key):
                    self._whole.add(key)

    def _add(self, key: Key, number: int, digest: int) -> None:
        self.sums.add(*key, len(self._blocks_of(key)), {number: digest})

    def _cut(self, key: Key) -> dict[tuple[Box, Box], int]:
        """Return the number of each block of a chunk, by its offsets and sizes."""
        entry = self._source.metadata.state_dict_metadata[key[0]]
        assert isinstance(entry, TensorMetadata)
        sizes, axes = entry.chunks.sizes[key[1]], len(entry.size)
        width = column([itemsize(entry.properties.dtype)])
        cut = cut_blocks(column([sizes], 1, axes), width, self._source.block_bytes)
        boxes = zip(cut.offsets[:, :axes].tolist(), cut.sizes[:, :axes].tolist(), strict=True)
        return {(tuple(low), tuple(size)): n for n, (low, size) in enumerate(boxes)}

    def _read_again(self, key: Key) -> None:
        """Read one chunk, block by block, and add the checksums."""
        (place,) = self._source.find_chunks([key])
        store, file = self._source.store, self._source.files[place.file]
        pieces = read_pieces(store, file, place.begin, place.nbytes, self._source.block_bytes)
        blocks, width = self._blocks_of(key), itemsize(place.dtype)
        digests = XXH3.of_pieces(pieces, (math.prod(sizes) * width for _, sizes in blocks))
        for number, digest in zip(blocks.values(), digests, strict=True):
            self._add(key, number, digest)
