"""Checksums of chunks: hash blocks, combine them, compare.

A chunk is hashed block by block (see `planning.storage`), so that threads and ranks can share the
work. Ours is xxh3-64: the checksum of a chunk of one block is that of its bytes; a larger chunk's
is that of the checksums of its blocks, eight bytes each, most significant first. Archives of torch
have the CRC-32 of each record.

- `Checksum` (`XXH3`, `CRC32`): hash the bytes of a block, combine the checksums of blocks.
- `BlockSums`: collect the checksums of blocks from several reads or ranks, compare whole chunks.
- `Proof`: the same for a checkpoint that is copied; reads again what is incomplete.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning import itemsize, named_extras
from shardplan.planning.storage import boxes_of

from .errors import FormatError, listed

with named_extras("reading or writing a checkpoint"):
    import xxhash

if TYPE_CHECKING:  # what is planned to be read is not needed to open a checkpoint
    from .formats.base import Source
    from .pool import Pool
    from .stores.base import Store

Sums = npt.NDArray[np.uint64]
Key = tuple[str, int]  # a tensor's name, and the number of one of its chunks

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

    Attributes:
        matched: The chunks that were compared and matched, here or where they were taken from.
        verified: How many of them were compared here.
        nbytes: Bytes of the chunks that were compared here.
    """

    def __init__(self) -> None:
        self._chunks: dict[Key, _Partial] = {}
        self._whole: dict[Key, tuple[int, int]] = {}  # of chunks of one block: sum, and bytes
        self._lock = threading.Lock()
        self.matched: set[Key] = set()
        self.verified = self.nbytes = 0

    def add(self, key: Key, count: int, digests: Mapping[int, int], nbytes: int = 0) -> None:
        """Add the checksums of some of the ``count`` blocks of a chunk."""
        with self._lock:
            held = self._chunks.setdefault(key, _Partial(count))
            held.digests.update(digests)
            held.nbytes += nbytes

    def add_whole(self, keys: Iterable[Key], digests: Iterable[int], sizes: Iterable[int]) -> None:
        """Add the checksums, and the bytes, of chunks that have one block each."""
        with self._lock:
            self._whole.update(zip(keys, zip(digests, sizes, strict=True), strict=True))

    def take(self, other: BlockSums) -> None:
        """Add what another one holds."""
        for key, held in other._chunks.items():
            self.add(key, held.count, held.digests, held.nbytes)
        with self._lock:
            self._whole.update(other._whole)
        self.matched.update(other.matched)

    def incomplete(self, keys: Iterable[Key]) -> list[Key]:
        """Return those of some chunks that did not match yet, and lack checksums of blocks."""
        with self._lock:
            known = {
                key for key, held in self._chunks.items() if held.complete
            } | self._whole.keys()
        return [key for key in keys if key not in known and key not in self.matched]

    def compare(self, source: Source) -> list[Key]:
        """Compare all complete chunks with a checkpoint's, drop them, and return damaged ones."""
        found = dict[Key, int]()
        with self._lock:
            done = {key: held for key, held in self._chunks.items() if held.complete}
            self._chunks = {key: held for key, held in self._chunks.items() if key not in done}
            whole, self._whole = self._whole, {}
        for key, held in done.items():
            digests = [held.digests[number] for number in range(held.count)]
            found[key] = source.checksum_of(key[0]).combine(digests)
        for key, (digest, _) in whole.items():
            found[key] = source.checksum_of(key[0]).combine([digest])
        expected = zip(found.items(), source.chunk_sums(list(found)), strict=True)
        summed = [(key, own == known) for (key, own), known in expected if known is not None]
        damaged = [key for key, fits in summed if not fits]
        self.matched.update(key for key, fits in summed if fits)
        self.verified += len(summed) - len(damaged)
        self.nbytes += sum(size for _, size in whole.values())
        self.nbytes += sum(held.nbytes for held in done.values())
        return damaged

    def settle(self, source: Source) -> None:
        """Compare all complete chunks with a checkpoint's, drop them, and raise if one differs."""
        damaged = self.compare(source)
        if damaged:
            raise damage_error(source, damaged)

    def pack(self) -> list[tuple[Any, ...]]:
        """Return what is known as plain data that can be sent to another rank."""
        packed = []
        whole = {key: _Partial(1, {0: digest}, size) for key, (digest, size) in self._whole.items()}
        for key, held in (self._chunks | whole).items():
            numbers, digests = np.array([*held.digests], "<i8"), [*held.digests.values()]
            blocks = numbers.tobytes(), np.array(digests, "<u8").tobytes()
            packed.append((*key, held.count, held.nbytes, *blocks))
        return packed

    def unpack(self, packed: Sequence[tuple[Any, ...]]) -> None:
        """Add what `pack` returned elsewhere."""
        for name, chunk, count, nbytes, numbers, digests in packed:
            columns = np.frombuffer(numbers, "<i8").tolist(), np.frombuffer(digests, "<u8").tolist()
            self.add((name, chunk), count, dict(zip(*columns, strict=True)), nbytes)


def damage_error(
    source: Source, chunks: Sequence[Key], filled: Iterable[str] = (), touched: Iterable[str] = ()
) -> FormatError:
    """Return the error for chunks whose checksums differ."""
    places = source.find_chunks(chunks)
    texts = [
        f"`{name}` (bytes {place.begin:,} to {place.begin + place.nbytes:,})"
        for (name, _), place in zip(chunks, places, strict=True)
    ]
    files = sorted({source.files[place.file] for place in places})
    return FormatError(
        listed(files, quote=""),
        f"checksums do not fit: {listed(texts, quote='')}; this copy is damaged: use another, "
        "and see what verify says of it",
        filled=filled,
        touched=touched,
    )


class Proof:
    """Compares the chunks of a checkpoint that is copied piece by piece with their checksums.

    The blocks that are read are hashed on the way. A chunk with blocks that were not read whole is
    read again at the end, in small steps: such a chunk may not fit into memory.

    Attributes:
        sums: Gets the checksums of the blocks.
    """

    def __init__(self, source: Source) -> None:
        self._source, self.sums = source, BlockSums()
        self._begun: set[Key] = set()

    def begin(self, chunks: Iterable[Key]) -> None:
        """Have some chunks compared at the end."""
        self._begun.update(chunks)

    def settle(self, pool: Pool) -> None:
        """Compare all chunks that were begun; read those again that are incomplete."""
        limit = self._source.block_bytes + self._source.store.staging
        left = sorted(self.sums.incomplete(self._begun))
        known = zip(left, self._source.chunk_sums(left), strict=True)
        again = [key for key, checksum in known if checksum is not None]
        pool.map(self._read_again, again, nbytes=limit)
        self.sums.settle(self._source)
        self._begun.clear()

    def _read_again(self, key: Key) -> None:
        """Read one chunk, block by block, and add the checksums."""
        source, (place,) = self._source, self._source.find_chunks([key])
        blocks = boxes_of(place.extents, place.dtype, source.block_bytes)
        lengths = [math.prod(sizes) * itemsize(place.dtype) for _, sizes in blocks]
        file = source.files[place.file]
        pieces = read_pieces(source.store, file, place.begin, place.nbytes, source.block_bytes)
        digests = source.checksum_in(place.file).of_pieces(pieces, lengths)
        self.sums.add(key, len(lengths), dict(enumerate(digests)))
