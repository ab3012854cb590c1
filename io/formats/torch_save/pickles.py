"""The pickles of a `torch.save` file, and where its storages lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ...errors import FormatError
from ...limits import LIMITS
from ...stores.base import Store
from ..archive.archived import explain_name
from ..archive.objects import Storages, load_nested, load_nested_at
from ..archive.unpickler import CutShort, PickleError, RefusedName, load_pickle_at
from ..archive.zip_read import Archive, read_ranges

__all__ = ["Pickled", "read_legacy", "read_zip"]

_PROTOCOL: Final = 1001  # of files of the older kind; their magic number was seen already
_FIRST: Final = 1 << 16


@attrs.frozen(eq=False)
class Pickled:
    """What a file holds.

    Attributes:
        nested: What was saved, with stand-ins; see `torchpickles`.
        storages: The storages that its tensors lie in.
    """

    nested: Any
    storages: Storages


def _fault(file: str, error: PickleError) -> FormatError:
    if isinstance(error, RefusedName):
        return FormatError(file, f"its state dict {explain_name(error.name)}")
    return FormatError(file, f"its state dict cannot be loaded: {error}")


def read_zip(archive: Archive, file: str) -> Pickled:
    """Read the pickle of an archive.

    Raises:
        FormatError: It is damaged or not safe to read, or a storage is not there.
    """
    storages = Storages()
    try:
        nested = load_nested(archive.read("data.pkl", LIMITS["pickle"]), storages)
    except PickleError as error:
        raise _fault(file, error) from None
    archive.check_storages(storages.nbytes)
    return Pickled(nested, storages)


def read_legacy(store: Store, file: str, size: int) -> Pickled:
    """Read a file of the older kind: five pickles, then storages; see `read_zip`.

    The pickles are a magic number, a version, the system that wrote the file, what was saved, and
    the keys of its storages.
    """
    head, storages = _Head(store, file, size), Storages()
    head.plain()
    version, machine = head.plain(), head.plain()
    if version != _PROTOCOL:
        raise FormatError(file, f"it is not of version {_PROTOCOL}, the only one that is known")
    if not isinstance(machine, Mapping) or machine.get("little_endian") is not True:
        raise FormatError(file, "it was written on a machine of another byte order")
    nested, keys = head.nested(storages), head.plain()
    if not isinstance(keys, list) or set(map(str, keys)) != storages.nbytes.keys():
        raise FormatError(file, "its list of storages is damaged")
    _place(store, file, size, list(map(str, keys)), storages, head.at)
    return Pickled(nested, storages)


class _Head:
    """The pickles that a file begins with, read as far as they go.

    Attributes:
        at: Where the next one begins.
    """

    def __init__(self, store: Store, file: str, size: int) -> None:
        self._store, self._file, self._size = store, file, size
        self._data = b""
        self.at = 0

    def plain(self) -> Any:
        """Read the next one, which names nothing."""
        return self._next(None)

    def nested(self, storages: Storages) -> Any:
        """Read the next one, which is the state dict."""
        return self._next(storages)

    def _next(self, storages: Storages | None) -> Any:
        while True:
            try:
                if storages is None:
                    found, self.at = load_pickle_at(self._data, self.at, {})
                else:
                    found, self.at = load_nested_at(self._data, self.at, storages)
                return found
            except CutShort:
                self._read_on()
            except PickleError as error:
                raise _fault(self._file, error) from None

    def _read_on(self) -> None:
        done = len(self._data)
        more = min(self._size, LIMITS["pickle"], max(_FIRST, 4 * done))
        if more == done:
            reason = "its state dict cannot be loaded: the file ends within it, being cut short"
            raise FormatError(self._file, reason)
        rest = bytearray(more - done)
        read_ranges(self._store, self._file, [(done, memoryview(rest))])
        self._data += rest


def _place(
    store: Store, file: str, size: int, keys: list[str], storages: Storages, at: int
) -> None:
    """Find storages that follow one another, each after its count of elements."""
    ends = at + sum(8 + storages.nbytes[key] for key in keys)
    if ends > size:
        raise FormatError(file, f"it should have {ends:,} bytes and has {size:,}: it was cut short")
    counts = memoryview(bytearray(8 * len(keys)))
    ranges = []
    for number, key in enumerate(keys):
        ranges.append((at, counts[8 * number : 8 * number + 8]))
        storages.begin[key] = at + 8
        at += 8 + storages.nbytes[key]
    read_ranges(store, file, ranges)
    for number, key in enumerate(keys):
        count = int.from_bytes(counts[8 * number : 8 * number + 8], "little")
        nbytes = storages.nbytes[key]
        if nbytes % max(count, 1) or (count == 0) != (nbytes == 0):
            raise FormatError(file, f"storage {key} has {count:,} elements and {nbytes:,} bytes")
