"""Where do the bytes of `torch.save` files lie? Their pickle says, read as torch reads it.

Torch's own restricted unpickler reads the pickle, with storages that have a size but no elements.
So all that torch refuses is refused, and tensors come out as places in the file, of the newer kind
of file (an archive) as of the older (pickles, then storages one after another).
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from shardplan.planning import (
    Metadata,
    PlanError,
    RefusedError,
    dtype_name,
    flatten,
    global_plan,
    local_plan,
)
from shardplan.planning.blocks import BLOCK_BYTES
from shardplan.planning.flatten import is_tensor

from .checksums import Sums
from .errors import FormatError
from .pool import Pool
from .sources import Spot
from .stores import MissingFileError, Store, StoreError
from .strided import Overlay
from .torchpickles import StorageRef, StoredTensor
from .torchvalues import explain_refusal
from .torchzip import Archive, Window, read_archive, read_ranges

if TYPE_CHECKING:
    from .torchsave_pickles import Storages

__all__ = ["TorchSource", "find", "source"]

_ZIP: Final = b"PK\3\4"
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_PICKLE: Final = 1 << 30


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
    from .torchsave_pickles import read_legacy, read_zip

    try:
        size = store.size(name)
    except MissingFileError:
        raise FormatError(name, "it is missing") from None
    if _head(store, name).startswith(_LEGACY):
        nested, storages = read_legacy(store, name, size)
        archive = None
    else:
        archive = read_archive(Window(store, name, 0, size))
        _check_archive(archive, name)
        nested, storages = read_zip(archive.read("data.pkl", _MAX_PICKLE), archive, name)
    return TorchSource(store, name, nested, storages, archive)


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


class TorchSource:
    """A `torch.save` file; a `Source`.

    Args:
        store: The folder it lies in.
        file: Its name there.
        nested: Its state dict, with tensors that have no elements.
        storages: Where the storages of these tensors lie.
        archive: The archive that it is; None for a file of the older kind.

    Attributes:
        inner: The folder as it is, without the files that `store` makes up.
    """

    format = "torch"
    block_bytes = BLOCK_BYTES

    def __init__(
        self,
        store: Store,
        file: str,
        nested: Any,
        storages: Storages,
        archive: Archive | None = None,
    ) -> None:
        if not isinstance(nested, Mapping):
            raise FormatError(
                file, f"it holds a {type(nested).__name__}, not a state dict: a dict by name"
            )
        self.inner, self.file, self.archive = store, file, archive
        self._overlay = Overlay(store, (file,))
        try:
            self._flat, self._paths = flatten(nested)
            self._tensors = _find_tensors(self._flat, storages, file)
            self.metadata: Metadata = global_plan((local_plan(nested),))[1]
        except (PlanError, RefusedError) as error:
            raise FormatError(file, str(error)) from None
        self._loaded: Any = None

    @property
    def store(self) -> Store:
        """The folder it lies in."""
        return self._overlay.store

    @property
    def files(self) -> Sequence[str]:
        """The file."""
        return self._overlay.files

    def spots(self, chunks: Sequence[tuple[str, int]]) -> list[Spot]:
        """Find tensors, each of which is one chunk; see `Source.spots`."""
        return [
            self._overlay.spot(0, self._begin(self._tensors[n]), self._tensors[n].tensor)
            for n, _ in chunks
        ]

    def _begin(self, found: _Found) -> int:
        if self.archive is None:
            return found.begin
        return found.begin + self.archive.begin(f"data/{found.tensor.storage.key}")

    def keys_in(self, record: str) -> tuple[str, ...]:
        """Name the tensors whose elements lie in a record of the archive."""
        found = self._tensors.items()
        return tuple(n for n, one in found if f"data/{one.tensor.storage.key}" == record)

    def sums_of(self, name: str) -> Sums | None:
        """There are no checksums that could be compared."""
        return None

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a value that is no tensor; see `Source.value`."""
        value = self._flat[name]
        if _is_plain(value):
            return copy.deepcopy(value)
        found = self._load_all()  # it may hold tensors, which have no elements here
        for _, key in self._paths[name]:
            found = found[key]
        return found

    def value_bytes(self, name: str) -> int:
        """Return 0: values are known once the file is opened."""
        return 0

    def _load_all(self) -> Any:
        import torch

        if self._loaded is None:
            if self.archive is not None and self.archive.packed:
                raise FormatError(
                    self.file, "its records are compressed, which torch.save never does"
                )
            file = StoreFile(self.inner, self.file)
            try:
                self._loaded = torch.load(
                    io.BufferedReader(file), map_location="cpu", weights_only=True
                )
            except Exception as error:  # torch.load fails in many ways
                raise FormatError(self.file, f"it {explain_refusal(error)}") from None
        return self._loaded


@attrs.frozen
class _Found:
    """A tensor, and where its storage begins: in the file, or in the storage's record."""

    begin: int
    tensor: StoredTensor


def _find_tensors(flat: Mapping[str, Any], storages: Storages, file: str) -> dict[str, _Found]:
    """Say where every tensor lies, or tell all that cannot be read in place."""
    found, refused = {}, []
    for name, value in flat.items():
        if not is_tensor(value):
            continue
        why = _unreadable(value)
        place = None if why else storages.find(value)
        if place is None:
            refused.append(f"`{name}` {why or 'was saved without elements'}")
            continue
        key, begin, nbytes = place
        tensor = StoredTensor(
            StorageRef(key, "uint8", nbytes),
            dtype_name(value.dtype),
            value.storage_offset(),
            tuple(value.shape),
            tuple(value.stride()),
            value.is_conj(),
            value.is_neg(),
        )
        wrong = tensor.fault()
        if wrong is not None:
            refused.append(f"`{name}` cannot have {wrong}")
        found[name] = _Found(begin, tensor)
    if refused:
        raise FormatError(file, "; ".join(refused))
    return found


def _unreadable(value: Any) -> str | None:
    import torch

    kind = type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {kind.__module__}.{kind.__qualname__}; save plain tensors instead"
    if value.is_quantized:
        return "is a quantized tensor; save its int_repr(), scale and zero point instead"
    if value.layout != torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"is a {layout} tensor; save it dense instead"
    try:
        dtype_name(value.dtype)
    except ValueError as error:
        return f"is of an {error}"
    return None


def _is_plain(value: Any) -> bool:
    """Tell whether a value is made of nothing but Python's own types and torch's constants."""
    import torch

    if type(value) in (dict, OrderedDict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    atoms = (bool, int, float, complex, str, bytes, bytearray, type(None))
    return type(value) in (*atoms, torch.Size, torch.dtype, torch.device)


class StoreFile(io.RawIOBase):
    """A file in a store, as Python's own files are: what it is read for is read, and no more."""

    def __init__(self, store: Store, file: str) -> None:
        super().__init__()
        self._store, self._file, self._at = store, file, 0
        self._size = store.size(file)

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It has places."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, counted from the start, from here, or from the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no place {base + offset} in a file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Say where it is."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, as far as the file reaches."""
        view = memoryview(buffer).cast("B")[: max(self._size - self._at, 0)]
        read_ranges(self._store, self._file, [(self._at, view)])
        self._at += len(view)
        return len(view)
