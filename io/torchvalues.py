"""Values as `torch.save` writes them: only such as ``weights_only=True`` reads back.

Torch is imported when it is first needed: plain values are read without it.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import attrs

from .errors import FormatError, ValueRefusedError
from .torchzip import refuse_bombs
from .torchzip_write import zip_bytes

__all__ = [
    "Leaf",
    "dump_values",
    "explain_name",
    "explain_refusal",
    "load_torch",
    "pickle_nested",
    "pickle_tensor",
]

_SCALARS: Final = (bool, float, type(None))
_SMALL_INT: Final = 1 << 31
_DANGEROUS: Final = frozenset(
    (
        *("os", "posix", "nt", "builtins", "__builtin__", "subprocess", "sys", "shutil", "pty"),
        *("importlib", "runpy", "socket", "ctypes", "webbrowser", "code", "commands", "pickle"),
    )
)


def load_torch(data: bytes, file: str, name: str) -> Any:
    """Return a value that `torch.save` wrote.

    Args:
        data: What it wrote.
        file: Where that was found, for errors.
        name: The value's name, for errors.

    Raises:
        FormatError: It is damaged, or not safe to load; then it says how to allow it.
    """
    try:
        refuse_bombs(data, file)
    except FormatError as error:
        raise FormatError(file, f"the value of `{name}` cannot be loaded: {error.reason}") from None
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load fails in many ways
        raise FormatError(file, f"the value of `{name}` {explain_refusal(error)}") from None


def explain_refusal(error: Exception) -> str:
    """Say in our words why torch did not load something with ``weights_only=True``."""
    text = str(error)
    found = re.search(r"GLOBAL ([\w.]+)", text)
    if found:
        return explain_name(found[1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"cannot be loaded: {(lines or [type(error).__name__])[-1][:300]}"


def explain_name(kind: str) -> str:
    """Say why a class or function that a pickle names is refused, and how to allow it."""
    if kind.partition(".")[0] in _DANGEROUS:
        return f"needs `{kind}`, which no checkpoint does: it may be malicious; none of it ran"
    return (
        f"needs `{kind}`, which is not safe to load unasked; if you trust it, allow it with "
        f"torch.serialization.add_safe_globals([{kind}]) and load again"
    )


def dump_values(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Encode every value as `torch.save` does, or refuse all those that are not safe, by key.

    >>> sorted(dump_values({"step": 7, "betas": (0.9, 0.99)}))
    ['betas', 'step']

    Raises:
        ValueRefusedError: `torch.load` would not read some of them with ``weights_only=True``.
    """
    dumped: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for key, value in values.items():
        try:
            dumped[key] = _dump(value)
        except Exception as error:  # pickling may fail in any way that a class thinks of
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            refused[key] = f"is a {kind}, which {explain_refusal(error)}"
    if refused:
        raise ValueRefusedError(refused)
    return dumped


def _dump(value: Any) -> bytes:
    if type(value) in _SCALARS or (type(value) is int and abs(value) < _SMALL_INT):
        return zip_bytes(pickle.dumps(value, protocol=2))
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return buffer.getvalue()


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
