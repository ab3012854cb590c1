"""Values as `torch.save` writes them: loading them without running code, and writing them.

Torch is imported when it is first needed.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import attrs

from ...errors import FormatError, ValueRefusedError
from .names import load_nested
from .standins import build_value, needs_torch, row_major
from .unpickler import PickleError, RefusedName
from .zip_read import Archive, in_memory, read_archive
from .zip_write import zip_bytes

_SCALARS: Final = (bool, float, type(None))
_SMALL_INT: Final = 1 << 31
_DANGEROUS: Final = frozenset(
    (
        *("os", "posix", "nt", "builtins", "__builtin__", "subprocess", "sys", "shutil", "pty"),
        *("importlib", "runpy", "socket", "ctypes", "webbrowser", "code", "commands", "pickle"),
    )
)


def load_torch(data: bytes, file: str, name: str) -> Any:
    """Return a value that `torch.save` wrote."""
    return load_summed(data, file, name)[0]


def load_summed(data: bytes, file: str, name: str) -> tuple[Any, bool]:
    """Return a value as `load_torch` does, and whether its archive has checksums."""
    try:
        archive = read_archive(in_memory(data, file))
        return load_archive(archive), archive.is_summed
    except RefusedName as error:
        raise FormatError(file, f"the value of `{name}` {explain_name(error.name)}") from None
    except (PickleError, FormatError) as error:
        reason = error.reason if isinstance(error, FormatError) else error
        raise FormatError(file, f"the value of `{name}` cannot be loaded: {reason}") from None


def load_archive(archive: Archive, *, plain: bool = False) -> Any:
    """Return the value that an archive of `torch.save` holds."""
    if archive.packed:
        raise PickleError("its records are compressed, which torch.save never does")
    if not archive.is_little:
        raise PickleError("it was written on a machine of another byte order")
    limit = archive.window.length
    nested = load_nested(archive.read("data.pkl", limit))
    if plain and needs_torch(nested.value):
        raise PickleError("it needs torch")
    archive.check_storages(nested.storages)
    return build_value(
        nested.value, lambda key: memoryview(bytearray(archive.read(f"data/{key}", limit)))
    )


def explain_refusal(error: Exception) -> str:
    """Return why a value cannot be stored, given the error of pickling or reading it back."""
    if isinstance(error, RefusedName):
        return explain_name(error.name)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"cannot be loaded: {(lines or [type(error).__name__])[-1][:300]}"


def explain_name(kind: str) -> str:
    """Return why a class or function that a pickle names is refused, and how to allow it."""
    if kind.partition(".")[0] in _DANGEROUS:
        return f"needs `{kind}`, which no checkpoint does: it may be malicious; none of it ran"
    return (
        f"needs `{kind}`, which is not known to be safe; if you trust it, allow it with "
        f"torch.serialization.add_safe_globals([{kind}]) and load again"
    )


def dump_values(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Encode every value as `torch.save` does."""
    dumped: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for key, value in values.items():
        try:
            dumped[key] = dump_value(value)
        except Exception as error:  # a class may fail to pickle in any way
            refused[key] = explain_value(value, explain_refusal(error))
    if refused:
        raise ValueRefusedError(refused)
    return dumped


def explain_value(value: Any, why: str) -> str:
    """Return why a value is refused, after what it is."""
    return f"is a {type(value).__module__}.{type(value).__qualname__}, which {why}"


def dump_value(value: Any) -> bytes:
    """Return what `torch.save` makes of a value, having checked that we read it back."""
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

    try:
        names = load_nested(data).names
    except PickleError as error:
        return explain_refusal(error)
    allowed: Any = restricted
    known = {**allowed._get_allowed_globals(), **allowed._get_user_allowed_globals()}
    return next((explain_name(name) for name in names if name not in known), None)


@attrs.frozen
class Leaf:
    """A row-major tensor's place in a nested state dict that is to be pickled."""

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
    """Writes leaves the way torch writes tensors, so that `torch.load` makes tensors of them."""

    def __init__(self, file: io.BytesIO, first: int) -> None:
        import torch

        super().__init__(file, protocol=2)
        self._first, self._keys = first, dict[int, str]()
        self._kinds = (torch.storage.TypedStorage, torch.storage.UntypedStorage)
        self.storages: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is _Storage:
            return "storage", obj.kind, obj.key, "cpu", obj.numel
        return self._refer(obj) if isinstance(obj, self._kinds) else None

    def _refer(self, storage: Any) -> tuple[Any, ...]:
        """Name a storage as torch does, and keep it."""
        import torch

        if type(storage) is torch.UntypedStorage:
            kind, numel, bare = torch.UntypedStorage, storage.nbytes(), storage
        else:  # its public methods warn that it is deprecated
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
            return OrderedDict, ()  # faster than Python's own way, once for every tensor
        return NotImplemented


def _rebuild_parameter(leaf: Leaf) -> tuple[Any, ...]:
    import torch

    data = attrs.evolve(leaf, parameter=False, requires_grad=False)
    hooks: OrderedDict[Any, Any] = OrderedDict()
    return torch._utils._rebuild_parameter, (data, leaf.requires_grad, hooks)


def _rebuild(leaf: Leaf) -> tuple[Any, ...]:
    import torch

    dtype, stride = getattr(torch, leaf.dtype), row_major(leaf.shape)
    numel = math.prod(leaf.shape)
    kind = _storage_types().get(dtype)
    hooks: OrderedDict[Any, Any] = OrderedDict()
    place = 0, leaf.shape, stride, leaf.requires_grad, hooks
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

    Returns:
        The pickle, and the storages of tensors inside values, in the order of their numbers.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, first)
    pickler.dump(nested)
    return buffer.getvalue(), pickler.storages


@lru_cache(maxsize=4096)
def pickle_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of one tensor, whose storage is ``data/0``."""
    return pickle_nested(Leaf("0", dtype, shape))[0]
