"""Reading `torch.save` files: their pickle says where the elements of every tensor lie.

There are two kinds of files: archives, and the older kind, which is five pickles followed by the
storages. Of both, only pickles are read; torch is needed only for values that are not plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from shardplan.planning import (
    Metadata,
    Path,
    PlanError,
    RefusedError,
    flatten,
    global_plan,
    is_tensor,
    local_plan,
)

from ...checksums import CRC32
from ...errors import FormatError, listed
from ...limits import LIMITS
from ...pool import Pool, Progress, ProgressCallback
from ...stores.base import MissingFileError, Store, StoreError
from ..base import ChunkPlace, Findings, Format, Source, read_bytes
from .check import Stored, check_archives
from .names import Nested, load_nested
from .standins import Later, Named, OddTensor, TensorLeaf, build_value, needs_torch
from .torch_values import explain_name
from .unpickler import CutShort, PickleError, RefusedName, load_pickle
from .views import Overlay
from .zip_read import Archive, Window, read_archive, read_ranges

if TYPE_CHECKING:
    from .write import TorchWriter


_ZIP: Final = b"PK\3\4"
_OLD: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle: torch's magic number
_OLD_VERSION: Final = 1001
_OLD_HEAD: Final = 1 << 16  # bytes of a file of the older kind that are read first
_STEP: Final = 64 << 20


class TorchFormat(Format):
    """Files that `torch.save` writes."""

    name = "torch"
    is_file = True
    whole_tensors = True

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether a file begins as `torch.save` has it; see `Format.detect`."""
        return bool(name) and _head(store, name).startswith((_ZIP, _OLD))

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> TorchSource:
        """Open a file; only its pickle is read. See `Format.open`."""
        if not name:
            raise FormatError(store.url, "a torch checkpoint is a file, and this is a folder")
        try:
            size = store.size(name)
        except MissingFileError:
            raise FormatError(name, "it is missing") from None
        is_old = _head(store, name).startswith(_OLD)
        saved = _read_old(store, name, size) if is_old else _read_zip(store, name, size)
        return TorchSource(store, name, saved)

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
        size = store.size(name)
        if opened.archive is None:
            Progress(0, tell)
            note = "files of old torch versions have no checksums"
            return Findings((), 1, notes=(note,), unchecked=size)
        whole = Stored(name, 0, size, keys_in=opened.keys_in)
        return attrs.evolve(check_archives(store, [whole], tell, pool), files=1)


def _head(store: Store, name: str) -> bytes:
    try:
        return read_bytes(store, name, 0, min(len(_OLD), store.size(name)))
    except StoreError:
        return b""


@attrs.frozen(eq=False)
class _Saved:
    """The contents of a file; `archive` is None for the older kind.

    Attributes:
        begins: Where each storage begins, by key, in a file of the older kind.
    """

    nested: Nested
    archive: Archive | None = None
    begins: Mapping[str, int] = attrs.field(factory=dict)

    def begin(self, key: str) -> int:
        """Return where a storage begins in the file."""
        return self.archive.begin(f"data/{key}") if self.archive else self.begins[key]


def _fault(file: str, error: PickleError) -> FormatError:
    if isinstance(error, RefusedName):
        return FormatError(file, f"its state dict {explain_name(error.name)}")
    return FormatError(file, f"its state dict cannot be loaded: {error}")


def _read_zip(store: Store, file: str, size: int) -> _Saved:
    archive = read_archive(Window(store, file, 0, size))
    if "constants.pkl" in archive.records:
        raise FormatError(file, "it is a TorchScript archive, not a state dict; use torch.jit.load")
    if not archive.is_little:
        reason = "it was written on a machine of another byte order; load it with torch.load"
        raise FormatError(file, reason)
    try:
        nested = load_nested(archive.read("data.pkl", LIMITS["pickle"]))
    except PickleError as error:
        raise _fault(file, error) from None
    archive.check_storages(nested.storages)
    return _Saved(nested, archive)


def _read_old(store: Store, file: str, size: int) -> _Saved:
    """Read a file of the older kind: as much as its pickles take, whose length is unknown."""
    data = b""
    while True:
        try:
            nested, keys, end = _old_pickles(data, file)
            break
        except CutShort:
            more = min(size, LIMITS["pickle"], max(_OLD_HEAD, 4 * len(data)))
            if more == len(data):
                reason = "its state dict cannot be loaded: the file is cut short"
                raise FormatError(file, reason) from None
            data = Window(store, file, 0, more).read(0, more)
        except PickleError as error:
            raise _fault(file, error) from None
    return _Saved(nested, begins=_old_storages(store, file, size, nested.storages, keys, end))


def _old_pickles(data: bytes, file: str) -> tuple[Nested, list[str], int]:
    """Return the state dict, the keys of its storages in order, and where these begin.

    The pickles are a magic number, a version, the system that wrote the file, what was saved, and
    the keys of its storages.
    """
    version, at = load_pickle(data, {}, begin=load_pickle(data, {})[1])
    machine, at = load_pickle(data, {}, begin=at)
    if version != _OLD_VERSION:
        raise FormatError(file, f"it is not of version {_OLD_VERSION}, the only one that is known")
    if not isinstance(machine, Mapping) or machine.get("little_endian") is not True:
        raise FormatError(file, "it was written on a machine of another byte order")
    nested = load_nested(data, at)
    keys, end = load_pickle(data, {}, begin=nested.end)
    if not isinstance(keys, list) or set(map(str, keys)) != nested.storages.keys():
        raise FormatError(file, "its list of storages is damaged")
    return nested, list(map(str, keys)), end


def _old_storages(
    store: Store, file: str, size: int, nbytes: Mapping[str, int], keys: list[str], at: int
) -> dict[str, int]:
    """Return where each storage begins: they follow one another, each after its element count."""
    begins = {}
    for key in keys:
        begins[key] = at + 8
        at += 8 + nbytes[key]
    if at > size:
        raise FormatError(file, f"it should have {at:,} bytes and has {size:,}: it was cut short")
    counts = {key: bytearray(8) for key in keys}
    ranges = [(begins[key] - 8, memoryview(count)) for key, count in counts.items()]
    read_ranges(store, file, ranges)
    for key, data in counts.items():
        count = int.from_bytes(data, "little")
        if nbytes[key] % max(count, 1) or (count == 0) != (nbytes[key] == 0):
            reason = f"storage {key} has {count:,} elements and {nbytes[key]:,} bytes"
            raise FormatError(file, reason)
    return begins


class TorchSource(Source):
    """A `torch.save` file; a `Source`."""

    format = "torch"
    checksum = CRC32

    def __init__(self, store: Store, file: str, saved: _Saved) -> None:
        nested = saved.nested.value
        if not isinstance(nested, Mapping):
            kind = "tensor" if is_tensor(nested) else type(nested).__name__
            raise FormatError(file, f"it holds a {kind}, not a state dict: a dict by name")
        self.inner, self.file, self.archive = store, file, saved.archive
        self.store = self._overlay = Overlay(store, (file,))
        self.files = self._overlay.files
        self._saved = saved
        self._found: dict[str, ChunkPlace] = {}
        try:
            self._flat, paths = flatten(nested)
            _check_keys(paths, file)
            self._tensors = _find_tensors(self._flat, file)
            self.metadata: Metadata = global_plan((local_plan(nested),))[1]
        except (PlanError, RefusedError) as error:
            raise FormatError(file, str(error)) from None

    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Find tensors, which are one chunk each; see `Source.find_chunks`."""
        for name, _ in chunks:
            if name not in self._found:
                stored = self._tensors[name].stored
                begin = self._saved.begin(stored.storage.key) + stored.storage.first
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
        if self.archive is None or not self.archive.is_summed:
            return [None] * len(chunks)
        sums: list[int | None] = []
        for (name, _), place in zip(chunks, self.find_chunks(chunks), strict=True):
            stored = self._tensors[name].stored
            record = self.archive.records[f"data/{stored.storage.key}"]
            whole = place.nbytes == record.nbytes and not stored.offset and not stored.storage.first
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
        nbytes, begin = self._saved.nested.storages[key], self._saved.begin(key)
        data = memoryview(bytearray(nbytes))
        ranges = [(begin + at, data[at : at + _STEP]) for at in range(0, nbytes, _STEP)]
        read_ranges(self.inner, self.file, ranges)
        return data


def _check_keys(paths: Mapping[str, Path], file: str) -> None:
    """Refuse keys that only torch can make: names of tensors and values are plain text."""
    odd = {
        key.name for path in paths.values() for _, key in path if isinstance(key, (Named, Later))
    }
    if odd:
        raise FormatError(file, f"its state dict has keys that are not plain, such as {min(odd)}")


def _find_tensors(flat: Mapping[str, Any], file: str) -> dict[str, TensorLeaf]:
    """Return the tensors of a state dict."""
    odd = [f"`{name}` {leaf.why}" for name, leaf in flat.items() if isinstance(leaf, OddTensor)]
    if odd:
        raise FormatError(file, listed(odd, quote="", between="; "))
    return {name: leaf for name, leaf in flat.items() if isinstance(leaf, TensorLeaf)}
