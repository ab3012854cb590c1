"""Reading `torch.save` files: their pickle says where the elements of every tensor lie.

Only the pickle is read; torch is needed only for values that are not plain. DCP's files are made
of such archives, too, so the views of tensors and the checks of archives here serve both formats:

- A view whose axes nest, in any order and with gaps, is a box of a row-major array: a
  `ChunkPlace`. Any other (every second column, a repeated row, conjugates) is exposed as a virtual
  file, which an `Overlay` computes from the real one as it is read.
- `check_archives` compares records with their CRC-32, which torch writes and never looks at.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.planning import (
    ITEMSIZE,
    Metadata,
    PlanError,
    RefusedError,
    flatten,
    global_plan,
    is_tensor,
    local_plan,
)

from ...buffers import copy_into
from ...checksums import CRC32, read_pieces
from ...errors import FormatError, listed
from ...pool import Pool, Progress, ProgressCallback, default_pool
from ...stores.base import MissingFileError, Store, StoreError, WrappedStore
from ..base import LIMITS, ChunkPlace, Fault, Findings, Format, Source, read_bytes
from .archive import Archive, Window, read_archive, read_ranges
from .names import Nested, explain, load_nested
from .standins import Later, Named, OddTensor, StoredTensor, TensorLeaf, build_value, needs_torch
from .unpickler import PickleError

if TYPE_CHECKING:
    from .write import TorchWriter

_ZIP: Final = b"PK\3\4"
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle: torch's magic number
_SPAN: Final = 64 << 20  # bytes of a record that one thread reads
_STEP: Final = 4 << 20  # bytes that are summed, or computed, at once
_WORDS: Final = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


class TorchFormat(Format):
    """Files that `torch.save` writes."""

    name = "torch"
    is_file = True
    whole_tensors = True

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether a file begins as `torch.save` has it; see `Format.detect`."""
        return bool(name) and _head(store, name).startswith((_ZIP, _LEGACY))

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> TorchSource:
        """Open a file; only its pickle is read. See `Format.open`."""
        if not name:
            raise FormatError(store.url, "a torch checkpoint is a file, and this is a folder")
        if _head(store, name).startswith(_LEGACY):
            raise FormatError(
                name,
                "it is of the kind that torch.save wrote before version 1.6, which cannot be read "
                "in place; load it with torch.load(..., weights_only=True) and save it again",
            )
        try:
            archive = read_archive(Window(store, name, 0, store.size(name)))
        except MissingFileError:
            raise FormatError(name, "it is missing") from None
        if "constants.pkl" in archive.records:
            raise FormatError(
                name, "it is a TorchScript archive, not a state dict; use torch.jit.load"
            )
        if not archive.is_little:
            reason = "it was written on a machine of another byte order; load it with torch.load"
            raise FormatError(name, reason)
        try:
            nested = load_nested(archive.read("data.pkl", LIMITS["pickle"]))
        except PickleError as error:
            raise FormatError(name, f"its state dict {explain(error)}") from None
        archive.check_storages(nested.storages)
        return TorchSource(store, name, archive, nested)

    def writer(self) -> TorchWriter:
        """Return what writes this format; see `Format.writer`."""
        from .write import TorchWriter  # which needs torch

        return TorchWriter()

    def verify(
        self,
        store: Store,
        name: str = "",
        *,
        tell: ProgressCallback | None = None,
        pool: Pool | None = None,
    ) -> Findings:
        """Compare every record with its checksum; see `Format.verify`."""
        opened = self.open(store, name, pool)
        whole = Stored(name, 0, store.size(name), keys_in=opened.keys_in)
        return attrs.evolve(check_archives(store, [whole], tell, pool), files=1)


def _head(store: Store, name: str) -> bytes:
    try:
        return read_bytes(store, name, 0, min(len(_LEGACY), store.size(name)))
    except StoreError:
        return b""


class TorchSource(Source):
    """A `torch.save` file; a `Source`."""

    format = "torch"
    checksum = CRC32

    def __init__(self, store: Store, file: str, archive: Archive, saved: Nested) -> None:
        nested = saved.value
        if not isinstance(nested, Mapping):
            kind = "tensor" if is_tensor(nested) else type(nested).__name__
            raise FormatError(file, f"it holds a {kind}, not a state dict: a dict by name")
        self.inner, self.file, self.archive = store, file, archive
        self.store = self._overlay = Overlay(store, (file,))
        self.files = self._overlay.files
        self._storages = saved.storages
        self._found: dict[str, ChunkPlace] = {}
        try:
            self._flat, paths = flatten(nested)
            keys = {key for path in paths.values() for _, key in path}
            odd = [key.name for key in keys if isinstance(key, (Named, Later))]
            if odd:
                raise RefusedError(f"its state dict has keys that are not plain, such as {odd[0]}")
            self._tensors = _find_tensors(self._flat)
            self.metadata: Metadata = global_plan((local_plan(nested),))[1]
        except (PlanError, RefusedError) as error:
            raise FormatError(file, str(error)) from None

    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Find tensors, which are one chunk each; see `Source.find_chunks`."""
        for name, _ in chunks:
            if name not in self._found:
                stored = self._tensors[name].stored
                begin = self.archive.begin(f"data/{stored.storage.key}")
                self._found[name] = self._overlay.chunk_place(0, begin, stored)
        return [self._found[name] for name, _ in chunks]

    def keys_in(self, record: str) -> tuple[str, ...]:
        """Name the tensors whose elements lie in a record of the archive."""
        keys = {name: leaf.stored.storage.key for name, leaf in self._tensors.items()}
        return tuple(name for name, key in keys.items() if f"data/{key}" == record)

    def file_numbers(self, name: str) -> Sequence[int]:
        """Return the one file, for the one chunk of a tensor; see `Source.file_numbers`."""
        return [0]

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each tensor that fills its record; see `Source.chunk_sums`."""
        if not self.archive.is_summed:
            return [None] * len(chunks)
        sums: list[int | None] = []
        for (name, _), place in zip(chunks, self.find_chunks(chunks), strict=True):
            stored = self._tensors[name].stored
            record = self.archive.records[f"data/{stored.storage.key}"]
            whole = place.nbytes == record.nbytes and not stored.offset
            sums.append(record.crc if whole and place.file == 0 else None)  # not of a virtual file
        return sums

    def has_value_sum(self, name: str) -> bool:
        """Return True: values are known once the file is opened; see `Source.has_value_sum`."""
        return True

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value; see `Source.value`."""
        try:
            return build_value(self._flat[name], self._read_storage)
        except PickleError as error:
            raise FormatError(self.file, f"`{name}` cannot be loaded: {error}") from None

    def plain_value(self, name: str) -> Any:
        """Return a non-tensor value that needs no torch; see `Source.plain_value`."""
        if needs_torch(self._flat[name]):
            raise PickleError(f"the value of `{name}` needs torch")
        return self.value(name)

    def _read_storage(self, key: str) -> memoryview:
        nbytes, begin = self._storages[key], self.archive.begin(f"data/{key}")
        data = memoryview(bytearray(nbytes))
        ranges = [(begin + at, data[at : at + _SPAN]) for at in range(0, nbytes, _SPAN)]
        read_ranges(self.inner, self.file, ranges)
        return data


def _find_tensors(flat: Mapping[str, Any]) -> dict[str, TensorLeaf]:
    """Return the tensors of a state dict."""
    odd = [f"`{name}` {leaf.why}" for name, leaf in flat.items() if isinstance(leaf, OddTensor)]
    if odd:
        raise RefusedError(listed(odd, quote="", between="; "))
    return {name: leaf for name, leaf in flat.items() if isinstance(leaf, TensorLeaf)}


# Views


def nest(
    size: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """Return a row-major array whose first corner is a view.

    Args:
        size: The view's shape.
        stride: Its strides, in elements.

    Returns:
        The sizes of the array, in the order in which its axes are stored, and the view's axis that
        each is (None if they are in order); None if there is no such array.

    >>> nest((2, 3), (3, 1)), nest((2, 3), (1, 2)), nest((4, 3), (6, 1))
    (((2, 3), None), ((3, 2), (1, 0)), ((4, 6), None))
    >>> nest((4, 3), (6, 2)), nest((4, 3), (0, 1))
    (None, None)
    """
    if 0 in size:
        return tuple(size), None
    extents = _extents(size, stride)
    if extents is not None:
        return extents, None
    order = sorted(range(len(size)), key=lambda axis: (size[axis] > 1, -stride[axis]))
    extents = _extents([size[a] for a in order], [stride[a] for a in order])
    return None if extents is None else (extents, tuple(order))


def _extents(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    extents = list(size)
    inner, step = -1, 1  # the next axis inwards, and its stride
    for axis in reversed(range(len(size))):
        if size[axis] == 1:
            continue
        if inner < 0:
            if stride[axis] != 1:
                return None
        elif stride[axis] % step or stride[axis] // step < size[inner]:
            return None
        else:
            extents[inner] = stride[axis] // step
        inner, step = axis, stride[axis]
    return tuple(extents)


@attrs.frozen
class _Virtual:
    """A virtual file: the elements of a view, row-major, its widest strides first.

    Attributes:
        file: The real file.
        begin: Where the view's first element lies there, in bytes.
        tensor: The view, its axes in the order of the virtual file.
    """

    file: str
    begin: int
    tensor: StoredTensor

    def read(self, store: Store, low: int, high: int) -> npt.NDArray[np.uint8]:
        """Return some bytes of the virtual file."""
        width = ITEMSIZE[self.tensor.dtype]
        first = low // width
        cells = self._cells(store, first, -(-high // width))
        _flip(cells, self.tensor)
        return cells.view(np.uint8)[low - first * width : high - first * width]

    def _cells(self, store: Store, first: int, last: int) -> npt.NDArray[Any]:
        """Return some elements, having read the rows that they lie in, a few at a time."""
        size, stride = self.tensor.size or (1,), self.tensor.stride or (1,)
        start, row = 0, math.prod(size[1:])
        while len(size) > 1 and first // row == (last - 1) // row:  # in one row: enter it
            start += first // row * stride[0]
            first, last = first % row, (last - 1) % row + 1
            size, stride = size[1:], stride[1:]
            row = math.prod(size[1:])
        width = ITEMSIZE[self.tensor.dtype]
        span = 1 + sum((n - 1) * s for n, s in zip(size[1:], stride[1:], strict=True))
        steps = [step * width for step in stride]
        fit = max(_STEP // max(steps[0], 1), 1)  # rows that are read at once
        rows, parts = range(first // row, -(-last // row)), []
        for at in rows[::fit]:
            count = min(fit, rows.stop - at)
            data = bytearray(((count - 1) * stride[0] + span) * width)
            begin = self.begin + (start + at * stride[0]) * width
            read_ranges(store, self.file, [(begin, memoryview(data))])
            found = np.frombuffer(data, _WORDS[width])
            box = np.lib.stride_tricks.as_strided(found, (count, *size[1:]), steps)
            parts.append(box.reshape(-1))
        return np.concatenate(parts)[first - rows.start * row : last - rows.start * row]


def _flip(cells: npt.NDArray[Any], tensor: StoredTensor) -> None:
    """Apply conjugation, which flips one sign of each element, and negation, which flips all."""
    if not tensor.conj and not tensor.neg:
        return
    parts = 2 if tensor.dtype.startswith("complex") else 1
    width = ITEMSIZE[tensor.dtype] // parts
    words: npt.NDArray[Any] = cells.view(f"<u{width}")
    sign = words.dtype.type(1 << (8 * width - 1))
    if tensor.conj:
        words[1::2] ^= sign
    if tensor.neg:
        words ^= sign


class Overlay(WrappedStore):
    """A store with some virtual files; all others are those of the inner store."""

    def __init__(self, inner: Store, files: Sequence[str]) -> None:
        super().__init__(inner)
        self.files = list(files)  # the real files, then the virtual ones so far
        self._virtual: dict[str, _Virtual] = {}
        self._numbers: dict[_Virtual, int] = {}
        self._lock = threading.Lock()

    def locate(self, path: str = "") -> str | None:
        """Return where a real file is on this machine's disks; see `Store.locate`."""
        return self.inner.locate(path) if path and path not in self._virtual else None

    def chunk_place(self, file: int, begin: int, tensor: StoredTensor) -> ChunkPlace:
        """Return where a view's elements can be read."""
        first = begin + tensor.offset * ITEMSIZE[tensor.dtype]
        nested = None if tensor.conj or tensor.neg else nest(tensor.size, tensor.stride)
        if nested is not None:
            return ChunkPlace(file, first, tensor.dtype, *nested)
        wide = [(n == 1, -step) for n, step in zip(tensor.size, tensor.stride, strict=True)]
        order = tuple(sorted(range(len(wide)), key=wide.__getitem__))
        size = tuple(tensor.size[axis] for axis in order)
        stride = tuple(tensor.stride[axis] for axis in order)
        view = _Virtual(self.files[file], first, attrs.evolve(tensor, size=size, stride=stride))
        with self._lock:
            if view not in self._numbers:
                name = f"<view {len(self._virtual)} of {view.file}>"
                self._virtual[name], self._numbers[view] = view, len(self.files)
                self.files.append(name)
        axes = None if order == tuple(range(len(order))) else order
        return ChunkPlace(self._numbers[view], 0, tensor.dtype, size, axes)

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        view = self._virtual.get(path)
        if view is None:
            return self.inner.read(path, ranges)
        for group in _groups(ranges):
            low = group[0][0]
            high = max(offset + len(part) for offset, part in group)
            cells = view.read(self.inner, low, high)
            for offset, part in group:
                copy_into(part, cells[offset - low : offset - low + len(part)])
        return sum(len(part) for _, part in ranges)


def _groups(ranges: Sequence[tuple[int, memoryview]]) -> Iterator[list[tuple[int, memoryview]]]:
    """Split long ranges, and group short neighbours; the first of a group begins first."""
    group: list[tuple[int, memoryview]] = []
    for offset, view in ranges:
        for at in range(0, len(view), _STEP):
            part = view[at : at + _STEP]
            low = group[0][0] if group else 0
            if group and not low <= offset + at <= low + _STEP - len(part):
                yield group
                group = []
            group.append((offset + at, part))
    if group:
        yield group


# Checks


@attrs.frozen
class Stored:
    """An archive: its bytes of a file, and what they hold.

    Attributes:
        offset, length: Its bytes there.
        key: The tensor or value that it holds; None if it holds a whole state dict.
        keys_in: Names what one of its records holds, if it holds a whole state dict.
    """

    file: str
    offset: int
    length: int
    key: str | None = None
    keys_in: Callable[[str], Sequence[str]] = lambda record: ()


@attrs.frozen(eq=False)
class _Summed:
    """A record that has a checksum, and the bytes of the file that it is made of."""

    archive: Stored
    name: str
    begin: int
    end: int
    crc: int

    def faults(self, found: Sequence[int | StoreError]) -> list[Fault]:
        """Return a fault for each name in it, if it is damaged, given the CRC-32 of its spans."""
        failed = [error for error in found if isinstance(error, StoreError)]
        crc = CRC32.combine([part for part in found if not isinstance(part, StoreError)])
        if not failed and crc == self.crc:
            return []
        reason = f"the CRC-32 of {self.name} is {crc:08x}, and {self.crc:08x} was written down"
        kind: Any = "unreadable" if failed else "checksum"
        reason = failed[-1].reason if failed else reason
        keys = self.archive.keys_in(self.name) or (self.archive.key,)
        return [Fault(kind, self.archive.file, reason, key, self.begin, self.end) for key in keys]


@attrs.frozen
class _Span:
    """Bytes of a record, from one offset of the file to another."""

    record: _Summed
    low: int
    high: int


def check_archives(
    store: Store,
    archives: Sequence[Stored],
    tell: ProgressCallback | None = None,
    pool: Pool | None = None,
) -> Findings:
    """Compare every record of some archives with its checksum."""
    pool = pool or default_pool()
    opened = list(pool.map(lambda archive: _records(store, archive), archives))
    faults = [found for found in opened if isinstance(found, Fault)]
    summed = [record for found in opened if not isinstance(found, Fault) for record in found]
    bare = [archive for archive, found in zip(archives, opened, strict=True) if not found]
    nbytes = sum(record.end - record.begin for record in summed)
    progress = Progress(nbytes, tell)

    def digest(span: _Span) -> int | StoreError:
        try:
            file, nbytes = span.record.archive.file, span.high - span.low
            return CRC32.of(read_pieces(store, file, span.low, nbytes, _STEP))
        except StoreError as error:
            return error
        finally:
            progress.add(span.high - span.low)

    spans = [
        _Span(record, low, min(low + _SPAN, record.end))
        for record in summed
        for low in range(record.begin, record.end, _SPAN)
    ]
    digests: dict[_Summed, list[int | StoreError]] = {record: [] for record in summed}
    for span, result in zip(
        spans, pool.map(digest, spans, nbytes=_STEP + store.staging), strict=True
    ):
        digests[span.record].append(result)
    progress.finish()
    damaged = [record.faults(found) for record, found in digests.items()]
    note = f"{len(bare):,} of {len(archives):,} archives have no checksums"
    return Findings(
        (*faults, *(fault for some in damaged for fault in some)),
        chunks=sum(not some for some in damaged),
        nbytes=nbytes,
        notes=(note,) if bare else (),
        unchecked=sum(archive.length for archive in bare),
    )


def _records(store: Store, archive: Stored) -> list[_Summed] | Fault:
    """Return the records of an archive that have checksums, or what is wrong with it."""
    file, offset, end = archive.file, archive.offset, archive.offset + archive.length
    try:
        found = read_archive(Window(store, file, offset, archive.length))
        begins = {name: offset + found.begin(name) for name in found.records}
    except FormatError as error:
        # DCP's tensors may lie there as safetensors, which begin with a length and JSON.
        if archive.key is not None:
            head = read_bytes(store, file, offset, min(9, archive.length))
            if head[8:] == b"{":
                return []
        return Fault("header", file, error.reason, archive.key, offset, end)
    except StoreError as error:
        return Fault("unreadable", file, error.reason, archive.key, offset)
    if not found.is_summed:
        return []
    return [
        _Summed(archive, name, begins[name], begins[name] + record.nbytes, record.crc)
        for name, record in found.records.items()
    ]


def file_size(store: Store, file: str) -> int | Fault:
    """Return the size of a file, or what is wrong with it."""
    try:
        return store.size(file)
    except MissingFileError:
        return Fault("missing", file, "it is missing")
    except StoreError as error:
        return Fault("unreadable", file, error.reason)
