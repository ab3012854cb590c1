"""What does the pickle of a `torch.save` file say? Torch's own unpickler, but no elements."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import _weights_only_unpickler as restricted

from .errors import FormatError
from .stores import Store
from .torchvalues import explain_refusal
from .torchzip import Archive, read_ranges

_QUANTIZED: Final = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_torch: Any = torch  # parts of it have no types

__all__ = ["Storages", "read_legacy", "read_zip"]

_PROTOCOL: Final = 1001  # of files of the older kind; their magic number was seen already


class Storages:
    """The storages that a pickle refers to: those that tensors are made of have no elements.

    Attributes:
        nbytes: How many bytes each has, by key.
        begin: Where each begins in its file or record, in bytes; 0 if that is not known yet.
    """

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}
        self.begin: dict[str, int] = {}
        self._made: dict[tuple[str, int], Any] = {}
        self._places: dict[int, tuple[str, int, int]] = {}

    def make(self, kind: Any, key: str, numel: int, view: Any = None) -> Any:
        """Return a storage without elements, the same one each time."""
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if dtype in _QUANTIZED:
            raise ValueError(f"it holds a quantized tensor ({dtype}); save its int_repr() instead")
        width = dtype.itemsize
        nbytes, first = numel * width, 0
        if nbytes < 0 or self.nbytes.setdefault(key, nbytes) != nbytes:
            raise ValueError(f"storage {key} is told to have {nbytes} bytes")
        if view is not None:
            _, offset, size = view
            first, nbytes = offset * width, size * width
            if min(first, nbytes) < 0 or first + nbytes > self.nbytes[key]:
                raise ValueError(f"a view reaches out of storage {key}")
        if (key, first) not in self._made:
            bare = _torch.UntypedStorage(nbytes, device="meta")
            self._places[bare._cdata] = key, first, nbytes
            self._made[key, first] = _torch.storage.TypedStorage(
                wrap_storage=bare, dtype=dtype, _internal=True
            )
        return self._made[key, first]

    def find(self, tensor: torch.Tensor) -> tuple[str, int, int] | None:
        """Return the key of a tensor storage, where it begins, and its size; None if unknown."""
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None:
            return None
        key, first, nbytes = place
        return key, self.begin.get(key, 0) + first, nbytes


class _Unpickler(restricted.Unpickler):
    def __init__(self, file: Any, storages: Storages) -> None:
        super().__init__(file, encoding="utf-8")
        self._storages = storages

    def load_one(self) -> Any:
        """Read one pickle."""
        return self.load()  # type: ignore[no-untyped-call]

    def persistent_load(self, pid: Any) -> Any:
        kind, *fields = pid[1:]
        key, _, numel, *view = fields
        return self._storages.make(kind, str(key), numel, *view)


@contextmanager
def _reading(file: str, ended: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Say in our words why torch's unpickler stopped, and leave torch as it was.

    Args:
        file: What it reads.
        ended: Says whether it came to the end of the file.
    """
    waiting = torch._utils._sparse_tensors_to_validate
    before = len(waiting)
    try:
        yield
    except FormatError:
        raise
    except Exception as error:  # it fails in many ways
        if ended():
            reason = "its state dict cannot be loaded: the file ends within it, being cut short"
            raise FormatError(file, reason) from None
        raise FormatError(file, f"its state dict {explain_refusal(error)}") from None
    finally:
        del waiting[before:]


def read_zip(pickle: bytes, archive: Archive, file: str) -> tuple[Any, Storages]:
    """Read the pickle of an archive.

    Returns:
        What was saved, with tensors that have no elements, and their storages.

    Raises:
        FormatError: It is damaged or not safe to read, or a storage is not there.
    """
    storages = Storages()
    with _reading(file):
        nested = _Unpickler(io.BytesIO(pickle), storages).load_one()
    for key, nbytes in storages.nbytes.items():
        record = archive.records.get(f"data/{key}")
        if record is None or record.nbytes != nbytes:
            found = "none" if record is None else f"{record.nbytes:,}"
            raise FormatError(file, f"storage {key} should have {nbytes:,} bytes, and has {found}")
    return nested, storages


def read_legacy(store: Store, file: str, size: int) -> tuple[Any, Storages]:
    """Read the pickles of a file of the older kind; see `read_zip`."""
    from .torchsave import StoreFile

    storages = Storages()
    stream = io.BufferedReader(StoreFile(store, file), 1 << 16)
    with _reading(file, lambda: stream.tell() >= size):
        _Unpickler(stream, storages).load_one()  # the magic number
        protocol = _Unpickler(stream, storages).load_one()
        if protocol != _PROTOCOL:
            raise FormatError(file, f"it is of version {protocol}; only {_PROTOCOL} is known")
        told = _Unpickler(stream, storages).load_one()
        nested = _Unpickler(stream, storages).load_one()
        keys = [str(key) for key in _Unpickler(stream, storages).load_one()]
    if not isinstance(told, Mapping) or told.get("little_endian") is not True:
        raise FormatError(file, "it was written on a machine of another byte order")
    if set(keys) != storages.nbytes.keys():
        raise FormatError(file, "its list of storages is damaged")
    _place(store, file, size, keys, storages, stream.tell())
    return nested, storages


def _place(
    store: Store, file: str, size: int, keys: list[str], storages: Storages, at: int
) -> None:
    """Find storages that follow one another, each after its count of elements."""
    counts = memoryview(bytearray(8 * len(keys)))
    ranges = []
    for number, key in enumerate(keys):
        ranges.append((at, counts[8 * number : 8 * number + 8]))
        storages.begin[key] = at + 8
        at += 8 + storages.nbytes[key]
    if at > size:
        raise FormatError(file, f"it should have {at:,} bytes and has {size:,}: it was cut short")
    read_ranges(store, file, ranges)
    for number, key in enumerate(keys):
        count = int.from_bytes(counts[8 * number : 8 * number + 8], "little")
        nbytes = storages.nbytes[key]
        if nbytes % max(count, 1) or (count == 0) != (nbytes == 0):
            raise FormatError(file, f"storage {key} has {count:,} elements and {nbytes:,} bytes")
