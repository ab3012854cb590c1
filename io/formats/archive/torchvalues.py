"""Values and nested state dicts, written as `torch.save` writes them; see `archived` for reading.

Torch is imported when it is first needed.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import attrs

from ...errors import ValueRefusedError
from .archived import explain_name, explain_refusal, load_archive, load_torch
from .objects import Storages, load_nested
from .unpickler import PickleError
from .zip_read import in_memory, read_archive
from .zip_write import zip_bytes

__all__ = [
    "Leaf",
    "dump_value",
    "dump_values",
    "load_torch",
    "pickle_nested",
    "pickle_tensor",
    "why_unsafe",
]

_SCALARS: Final = (bool, float, type(None))
_SMALL_INT: Final = 1 << 31


def dump_values(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Encode every value as `torch.save` does, or refuse all those that we would not load, by key.

    >>> sorted(dump_values({"step": 7, "betas": (0.9, 0.99)}))
    ['betas', 'step']

    Raises:
        ValueRefusedError: Some cannot be read back without running code; all are named.
    """
    dumped: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for key, value in values.items():
        try:
            dumped[key] = dump_value(value)
        except Exception as error:  # pickling may fail in any way that a class thinks of
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            refused[key] = f"is a {kind}, which {explain_refusal(error)}"
    if refused:
        raise ValueRefusedError(refused)
    return dumped


def dump_value(value: Any) -> bytes:
    """Return what `torch.save` makes of a value, having made sure that we read it back.

    Raises:
        Exception: It cannot be pickled, or not be read back without running code.
    """
    if type(value) in _SCALARS or (type(value) is int and abs(value) < _SMALL_INT):
        return zip_bytes(pickle.dumps(value, protocol=2))
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getvalue()
    load_archive(read_archive(in_memory(data, "")))
    return data


def why_unsafe(data: bytes) -> str | None:
    """Return why torch would not load a pickle with ``weights_only=True``; None if it would."""
    from torch import _weights_only_unpickler as restricted

    seen: list[str] = []
    try:
        load_nested(data, Storages(), seen)
    except PickleError as error:
        return explain_refusal(error)
    allowed: Any = restricted
    known = {**allowed._get_allowed_globals(), **allowed._get_user_allowed_globals()}
    return next((explain_name(name) for name in seen if name not in known), None)


@attrs.frozen
class Leaf:
    """A tensor's place in a nested state dict that is to be pickled.

    Attributes:
        key: The name of its storage.
        dtype: What its elements are.
        shape: Its shape; its elements lie row-major.
        requires_grad: Whether it needs gradients.
        parameter: Whether it is a parameter of a module.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False


@attrs.frozen
class _Storage:
    kind: Any
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """Writes leaves the way torch writes tensors, so that `torch.load` makes tensors of them.

    Args:
        file: Where to.
        first: The number of the first storage that is not a leaf's.

    Attributes:
        storages: The storages of tensors that are no leaves, but hide in values.
    """

    def __init__(self, file: io.BytesIO, first: int) -> None:
        import torch

        super().__init__(file, protocol=2)
        self._first, self._keys = first, dict[int, str]()
        self._kinds = (torch.storage.TypedStorage, torch.storage.UntypedStorage)
        self.storages: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is _Storage:
            return "storage", obj.kind, obj.key, "cpu", obj.numel
        if isinstance(obj, self._kinds):
            return self._refer(obj)
        return None

    def _refer(self, storage: Any) -> tuple[Any, ...]:
        """Name a storage as torch does, and keep it."""
        import torch

        if type(storage) is torch.UntypedStorage:
            kind, numel, bare = torch.UntypedStorage, storage.nbytes(), storage
        else:  # whose public methods warn that it will go
            kind, bare = getattr(torch, storage._pickle_storage_type()), storage._untyped_storage
            numel = storage._size()
        if bare._cdata not in self._keys:
            self._keys[bare._cdata] = str(self._first + len(self.storages))
            self.storages.append(bare)
        return "storage", kind, self._keys[bare._cdata], "cpu", numel

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Leaf:
            return _rebuild_parameter(obj) if obj.parameter else _rebuild(obj)
        if type(obj) is OrderedDict and not obj:
            return OrderedDict, ()  # what Python finds out the long way, for every tensor
        return NotImplemented


def _rebuild_parameter(leaf: Leaf) -> tuple[Any, ...]:
    import torch

    data = attrs.evolve(leaf, parameter=False, requires_grad=False)
    hooks: OrderedDict[Any, Any] = OrderedDict()
    return torch._utils._rebuild_parameter, (data, leaf.requires_grad, hooks)


def _rebuild(leaf: Leaf) -> tuple[Any, ...]:
    import torch

    dtype = getattr(torch, leaf.dtype)
    numel, stride = 1, list[int]()
    for size in reversed(leaf.shape):
        stride.insert(0, numel)
        numel *= max(size, 1)
    numel = 0 if 0 in leaf.shape else numel
    kind = _storage_types().get(dtype)
    hooks: OrderedDict[Any, Any] = OrderedDict()
    place = 0, leaf.shape, tuple(stride), leaf.requires_grad, hooks
    if kind is None:
        storage = _Storage(torch.UntypedStorage, leaf.key, numel * dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, *place, dtype)
    storage = _Storage(getattr(torch, kind), leaf.key, numel)
    return torch._utils._rebuild_tensor_v2, (storage, *place)


@lru_cache(maxsize=1)
def _storage_types() -> Mapping[Any, str]:
    """Return the dtypes that have a storage class of their own, and its name."""
    import torch

    kinds = torch.storage._dtype_to_storage_type_map()
    new = torch.storage._new_dtypes()
    return {dtype: kind for dtype, kind in kinds.items() if dtype not in new}


def pickle_nested(nested: Any, first: int = 0) -> tuple[bytes, list[Any]]:
    """Return the pickle of a nested state dict whose tensors are leaves.

    Args:
        nested: The state dict.
        first: The number of the first storage that is not a leaf's.

    Returns:
        The pickle, and the storages of tensors that hide in values; they are numbered in order.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, first)
    pickler.dump(nested)
    return buffer.getvalue(), pickler.storages


@lru_cache(maxsize=4096)
def pickle_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of one tensor, whose storage is ``data/0``."""
    return pickle_nested(Leaf("0", dtype, shape))[0]
