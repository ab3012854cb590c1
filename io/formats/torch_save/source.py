"""Where do the bytes of `torch.save` files lie? Their pickle says, and nothing else is read.

So tensors come out as places in the file, of the newer kind of file (an archive) as of the older
(pickles, then storages one after another). Torch is needed only for values that are not plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

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
from ...pool import Pool
from ...stores.base import MissingFileError, Store, StoreError
from ..archive.objects import Later, Named, OddTensor, TensorLeaf
from ..archive.standins import build_value, needs_torch
from ..archive.strided import Overlay
from ..archive.unpickler import PickleError
from ..archive.zip_read import Archive, Window, read_archive, read_ranges
from ..base import Source, Spot
from .pickles import Pickled, read_legacy, read_zip

__all__ = ["TorchSource", "find", "source"]

_ZIP: Final = b"PK\3\4"
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_STEP: Final = 64 << 20


def find(store: Store, name: str = "") -> bool:
    """Say whether a file is one that `torch.save` wrote, by its first bytes."""
    return bool(name) and _head(store, name).startswith((_ZIP, _LEGACY))


def source(store: Store, name: str = "", pool: Pool | None = None) -> TorchSource:
    """Open a `torch.save` file; only its pickle is read, and what says where that is.

    Raises:
        FormatError: It is damaged, not safe to read, or holds what cannot be read in place.
    """
    if not name:
        raise FormatError(store.url, "a torch checkpoint is a file, and this is a folder")
    try:
        size = store.size(name)
    except MissingFileError:
        raise FormatError(name, "it is missing") from None
    if _head(store, name).startswith(_LEGACY):
        return TorchSource(store, name, read_legacy(store, name, size))
    archive = read_archive(Window(store, name, 0, size))
    _check_archive(archive, name)
    return TorchSource(store, name, read_zip(archive, name), archive)


def _head(store: Store, name: str) -> bytes:
    data = bytearray(len(_LEGACY))
    try:
        data = data[: store.size(name)]
        store.read(name, [(0, memoryview(data))])
    except StoreError:
        return b""
    return bytes(data)


def _check_archive(archive: Archive, name: str) -> None:
    if "constants.pkl" in archive.records:
        raise FormatError(name, "it is a TorchScript archive, not a state dict; use torch.jit.load")
    if "byteorder" in archive.records and archive.read("byteorder", 8) != b"little":
        raise FormatError(
            name, "it was written on a machine of another byte order; load it with torch.load"
        )


class TorchSource(Source):
    """A `torch.save` file; a `Source`.

    Args:
        store: The folder it lies in.
        file: Its name there.
        pickled: What its pickle says.
        archive: The archive that it is; None for a file of the older kind.

    Attributes:
        inner: The folder as it is, without the files that `store` makes up.
    """

    format = "torch"

    def __init__(
        self, store: Store, file: str, pickled: Pickled, archive: Archive | None = None
    ) -> None:
        nested = pickled.nested
        if not isinstance(nested, Mapping):
            kind = "tensor" if is_tensor(nested) else type(nested).__name__
            raise FormatError(file, f"it holds a {kind}, not a state dict: a dict by name")
        self.inner, self.file, self.archive = store, file, archive
        self._overlay = Overlay(store, (file,))
        self._pickled = pickled
        self._spots: dict[str, Spot] = {}
        try:
            self._flat, paths = flatten(nested)
            _check_keys(paths, file)
            self._tensors = _find_tensors(self._flat, file)
            self.metadata: Metadata = global_plan((local_plan(nested),))[1]
        except (PlanError, RefusedError) as error:
            raise FormatError(file, str(error)) from None

    @property
    def store(self) -> Store:
        """The folder it lies in."""
        return self._overlay

    @property
    def files(self) -> Sequence[str]:
        """The file."""
        return self._overlay.files

    def spots(self, chunks: Sequence[tuple[str, int]]) -> list[Spot]:
        """Find tensors, each of which is one chunk; see `Source.spots`."""
        for name, _ in chunks:
            if name not in self._spots:
                stored = self._tensors[name].stored
                begin = self._begin(stored.storage.key) + stored.storage.first
                self._spots[name] = self._overlay.spot(0, begin, stored)
        return [self._spots[name] for name, _ in chunks]

    def _begin(self, key: str) -> int:
        """Say where a storage begins in the file."""
        if self.archive is None:
            return self._pickled.storages.begin[key]
        return self.archive.begin(f"data/{key}")

    def keys_in(self, record: str) -> tuple[str, ...]:
        """Name the tensors whose elements lie in a record of the archive."""
        found = self._tensors.items()
        return tuple(n for n, one in found if f"data/{one.stored.storage.key}" == record)

    def file_numbers(self, name: str) -> Sequence[int]:
        """Return the one file, for the one chunk of a tensor; see `Source.file_numbers`."""
        return [0]

    checksum = CRC32

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each tensor that fills its record; see `Source.chunk_sums`."""
        if self.archive is None or not self.archive.is_summed:
            return [None] * len(chunks)
        found = zip(chunks, self.spots(chunks), strict=True)
        return [self._sum(name, spot) for (name, _), spot in found]

    def _sum(self, name: str, spot: Spot) -> int | None:
        assert self.archive is not None
        stored = self._tensors[name].stored
        record = self.archive.records[f"data/{stored.storage.key}"]
        whole = spot.nbytes == record.nbytes and not stored.offset and not stored.storage.first
        return record.crc if whole and spot.file == 0 else None  # not one that is made up

    def has_value_sum(self, name: str) -> bool:
        """Return True: values are known once the file is opened; see `Source.has_value_sum`."""
        return True

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a value that is no tensor; see `Source.value`."""
        try:
            return build_value(self._flat[name], self._read_storage)
        except PickleError as error:
            raise FormatError(self.file, f"`{name}` cannot be loaded: {error}") from None

    def plain_value(self, name: str) -> Any:
        """Return a value that is no tensor, if making it takes no torch.

        Raises:
            PickleError: It does.
        """
        if needs_torch(self._flat[name]):
            raise PickleError(f"the value of `{name}` takes torch")
        return self.value(name)

    def _read_storage(self, key: str) -> memoryview:
        nbytes = self._pickled.storages.nbytes[key]
        data = memoryview(bytearray(nbytes))
        begin = self._begin(key)
        steps = range(0, nbytes, _STEP)
        ranges = [(begin + at, data[at : at + _STEP]) for at in steps]
        read_ranges(self.inner, self.file, ranges)
        return data


def _check_keys(paths: Mapping[str, Path], file: str) -> None:
    """Refuse keys that only torch can make: their text names tensors and values."""
    odd = {
        key.name for path in paths.values() for _, key in path if isinstance(key, (Named, Later))
    }
    if odd:
        raise FormatError(file, f"its state dict has keys that are not plain, such as {min(odd)}")


def _find_tensors(flat: Mapping[str, Any], file: str) -> dict[str, TensorLeaf]:
    """Return where every tensor lies.

    Raises:
        FormatError: Some cannot be read in place; all are named.
    """
    odd = [f"`{name}` {leaf.why}" for name, leaf in flat.items() if isinstance(leaf, OddTensor)]
    if odd:
        raise FormatError(file, listed(odd, quote="", between="; "))
    return {name: leaf for name, leaf in flat.items() if isinstance(leaf, TensorLeaf)}
