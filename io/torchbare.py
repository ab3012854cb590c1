"""What does torch make of a pickle? Its own restricted unpickler, with storages read if wanted.

All that torch refuses is refused, and all that it was told to allow is read. Tensors come out
without elements, as places in the file; a value that hides tensors is read with just these.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import _weights_only_unpickler as restricted

from shardplan.planning import dtype_name
from shardplan.planning.flatten import Path

from .errors import FormatError
from .torchnested import Storages, TensorLeaf
from .torchpickles import StorageRef, StoredTensor
from .torchvalues import explain_refusal

__all__ = ["BareStorages", "load_bare", "load_value", "why_unsafe"]

_QUANTIZED: Final = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_SUBJECT: Final = "its state dict "
_torch: Any = torch  # parts of it have no types

Read = Callable[[str, int], memoryview]
"""What returns the bytes of a storage, given its key and how many they are."""


class BareStorages(Storages):
    """The storages that a pickle refers to: those that tensors are made of have no elements.

    Args:
        wanted: The keys of those that have, nevertheless.
        read: What reads these.
    """

    def __init__(self, wanted: Collection[str] = (), read: Read | None = None) -> None:
        super().__init__()
        self._wanted, self._read = wanted, read
        self._made: dict[tuple[str, int], Any] = {}
        self._whole: dict[str, Any] = {}
        self._places: dict[int, tuple[str, int, int]] = {}

    def make(self, pid: Any) -> Any:
        """Return the storage that a persistent id means, the same one each time."""
        kind, *fields = pid[1:]
        key, _, numel, *view = fields
        key = str(key)
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if dtype in _QUANTIZED:
            raise ValueError(f"it holds a quantized tensor ({dtype}); save its int_repr() instead")
        first, nbytes = self.refer(key, numel, dtype.itemsize, *view)
        if (key, first) not in self._made:
            bare = self._storage(key, first, nbytes)
            self._places[bare._cdata] = key, first, nbytes
            self._made[key, first] = _torch.storage.TypedStorage(
                wrap_storage=bare, dtype=dtype, _internal=True
            )
        return self._made[key, first]

    def _storage(self, key: str, first: int, nbytes: int) -> Any:
        if self._read is None or key not in self._wanted:
            return _torch.UntypedStorage(nbytes, device="meta")
        if key not in self._whole:
            data = self._read(key, self.nbytes[key])
            held = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
            self._whole[key] = held.untyped_storage()
        return self._whole[key][first : first + nbytes]

    def find(self, tensor: torch.Tensor) -> tuple[str, int, int] | None:
        """Return the key of a tensor's storage, where it begins, and its size; None if unknown."""
        return self._places.get(tensor.untyped_storage()._cdata)

    def leaf(self, value: Any) -> TensorLeaf:
        """Say where a tensor lies.

        Raises:
            ValueError: It cannot be read in place.
        """
        why = _unreadable(value)
        place = None if why else self.find(value)
        if place is None:
            raise ValueError(why or "was saved without elements")
        key, first, nbytes = place
        tensor = StoredTensor(
            StorageRef(key, "uint8", nbytes, first),
            dtype_name(value.dtype),
            value.storage_offset(),
            tuple(value.shape),
            tuple(value.stride()),
            value.is_conj(),
            value.is_neg(),
        )
        wrong = tensor.fault()
        if wrong is not None:
            raise ValueError(f"cannot have {wrong}")
        return TensorLeaf(tensor, value.requires_grad)

    def used_by(self, value: Any) -> Collection[str]:
        """Return the keys of the storages that a value refers to; all, if it does not tell."""
        finder = _Finder(self)
        try:
            finder.dump(value)
        except Exception:  # pickling may fail in any way that a class thinks of
            return self.nbytes.keys()
        return finder.keys


def _unreadable(value: Any) -> str | None:
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


class _Finder(pickle.Pickler):
    """Goes through a value as pickling does, to find the storages of its tensors."""

    def __init__(self, storages: BareStorages) -> None:
        super().__init__(io.BytesIO())
        self._storages = storages
        self.keys: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            place = self._storages.find(obj)  # fails for what has no storage, such as sparse ones
            self.keys |= {place[0]} if place is not None else set()
            return list, ()
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
            raise TypeError("a storage that is no tensor's")
        return NotImplemented


class _Unpickler(restricted.Unpickler):
    def __init__(self, data: bytes, storages: BareStorages) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._storages = storages

    def load_one(self) -> Any:
        """Read the pickle."""
        return self.load()  # type: ignore[no-untyped-call]

    def persistent_load(self, pid: Any) -> Any:
        return self._storages.make(pid)


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Say in our words why torch's unpickler stopped, and leave torch as it was."""
    waiting = torch._utils._sparse_tensors_to_validate
    before = len(waiting)
    try:
        yield
    except FormatError:
        raise
    except Exception as error:  # it fails in many ways
        raise FormatError(file, f"{_SUBJECT}{explain_refusal(error)}") from None
    finally:
        del waiting[before:]


def load_bare(data: bytes, file: str) -> tuple[Any, BareStorages]:
    """Read the pickle of a `torch.save` file.

    Returns:
        What was saved, with tensors that have no elements, and their storages.

    Raises:
        FormatError: It is damaged or not safe to read.
    """
    storages = BareStorages()
    with _reading(file):
        return _Unpickler(data, storages).load_one(), storages


def why_unsafe(data: bytes) -> str | None:
    """Say why torch would not load a pickle with ``weights_only=True``; None if it would."""
    try:
        load_bare(data, "")
    except FormatError as error:
        return error.reason.removeprefix(_SUBJECT)
    return None


def load_value(
    bare: tuple[Any, BareStorages], data: bytes, file: str, path: Path, read: Read
) -> Any:
    """Read one value of a `torch.save` file, and no storages but those that it refers to.

    Args:
        bare: What `load_bare` returned.
        data: The pickle.
        file: Where it was found, for errors.
        path: The way to the value.
        read: What reads storages.
    """
    value = _at(bare[0], path)
    keys = bare[1].used_by(value)
    if not keys:
        return copy.deepcopy(value)
    with _reading(file):
        return _at(_Unpickler(data, BareStorages(keys, read)).load_one(), path)


def _at(nested: Any, path: Path) -> Any:
    for _, key in path:
        nested = nested[key]
    return nested
