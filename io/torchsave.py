"""Where do the bytes of `torch.save` files lie? Their pickle says, and nothing else is read.

So tensors come out as places in the file, of the newer kind of file (an archive) as of the older
(pickles, then storages one after another). Torch is needed only for values that are not plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from shardplan.planning import Metadata, PlanError, RefusedError, flatten, global_plan, local_plan
from shardplan.planning.blocks import BLOCK_BYTES
from shardplan.planning.flatten import is_tensor

from .checksums import Sums
from .errors import FormatError
from .pickles import PickleError
from .pool import Pool
from .sources import Spot
from .stores import MissingFileError, Store, StoreError
from .strided import Overlay
from .torchnested import TensorLeaf, copy_plain
from .torchsave_pickles import Pickled, read_legacy, read_zip
from .torchzip import Archive, Window, read_archive, read_ranges

__all__ = ["TorchSource", "find", "source"]

_ZIP: Final = b"PK\3\4"
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_PICKLE: Final = 1 << 30
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
    pickled = read_zip(archive.read("data.pkl", _MAX_PICKLE), archive, name)
    return TorchSource(store, name, pickled, archive)


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
        pickled: What its pickle says.
        archive: The archive that it is; None for a file of the older kind.

    Attributes:
        inner: The folder as it is, without the files that `store` makes up.
    """

    format = "torch"
    block_bytes = BLOCK_BYTES

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
        self._bare: Any = (nested, pickled.storages) if pickled.by_torch else None
        try:
            self._flat, self._paths = flatten(nested)
            self._tensors = _find_tensors(self._flat, pickled, file)
            self.metadata: Metadata = global_plan((local_plan(nested),))[1]
        except (PlanError, RefusedError) as error:
            raise FormatError(file, str(error)) from None

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
        found = [self._tensors[name].stored for name, _ in chunks]
        return [
            self._overlay.spot(0, self._begin(t.storage.key) + t.storage.first, t) for t in found
        ]

    def _begin(self, key: str) -> int:
        """Say where a storage begins in the file."""
        if self.archive is None:
            return self._pickled.storages.begin[key]
        return self.archive.begin(f"data/{key}")

    def keys_in(self, record: str) -> tuple[str, ...]:
        """Name the tensors whose elements lie in a record of the archive."""
        found = self._tensors.items()
        return tuple(n for n, one in found if f"data/{one.stored.storage.key}" == record)

    def sums_of(self, name: str) -> Sums | None:
        """There are no checksums that could be compared."""
        return None

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a value that is no tensor; see `Source.value`."""
        with suppress(PickleError):
            return self.plain_value(name)
        from .torchbare import load_bare, load_value

        if self._bare is None:
            self._bare = load_bare(self._pickled.data, self.file)
        path = self._paths[name]
        return load_value(self._bare, self._pickled.data, self.file, path, self._read_storage)

    def plain_value(self, name: str) -> Any:
        """Return a value that is no tensor, if making it takes no torch.

        Raises:
            PickleError: It does.
        """
        plain = copy_plain(self._flat[name])
        if plain is None:
            raise PickleError(f"the value of `{name}` takes torch")
        return plain[0]

    def value_bytes(self, name: str) -> int:
        """Return 0: values are known once the file is opened."""
        return 0

    def value_cost(self, name: str) -> int:
        """Return 0: values are held already; what a copy of one takes, nobody knows before."""
        return 0

    def _read_storage(self, key: str, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        begin = self._begin(key)
        steps = range(0, nbytes, _STEP)
        ranges = [(begin + at, data[at : at + _STEP]) for at in steps]
        read_ranges(self.inner, self.file, ranges)
        return data


def _find_tensors(flat: Mapping[str, Any], pickled: Pickled, file: str) -> dict[str, TensorLeaf]:
    """Say where every tensor lies, or tell all that cannot be read in place."""
    found, refused = {}, []
    for name, value in flat.items():
        if not is_tensor(value):
            continue
        try:
            found[name] = pickled.leaf(value)
        except ValueError as error:
            refused.append(f"`{name}` {error}")
    if refused:
        raise FormatError(file, "; ".join(refused))
    return found
