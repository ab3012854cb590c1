"""What is nested in a `torch.save` file? Names, shapes and plain values, read without torch.

The pickle of a state dict names few things. What it says of tensors becomes records that tell where
their elements lie; what only torch can make (a dtype, a device) becomes a mark. Whatever names
more than that is torch's affair: see `torchbare`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import attrs

from shardplan.planning.dtypes import ITEMSIZE

from .pickles import PickleError, Sealed, load_pickle
from .torchpickles import PLAIN, STORAGES, StorageRef, StoredTensor, stored_tensor

__all__ = ["NeedsTorch", "Storages", "TensorLeaf", "copy_plain", "load_nested", "load_tensor"]

_ATOMS: Final = (bool, int, float, complex, str, bytes, bytearray, type(None))


@attrs.frozen(eq=False, getstate_setstate=False)
class NeedsTorch:
    """Stands for what only torch can make; it is no key, as a key's text would name a value.

    Attributes:
        name: What it is, in full.
        dtype: Which dtype it is or is made for, if it is a dtype or a type of storages.
    """

    name: str
    dtype: str = ""
    __hash__ = None  # type: ignore[assignment]


@attrs.frozen(eq=False, getstate_setstate=False)
class TensorLeaf:
    """A tensor in a nested state dict.

    Attributes:
        stored: Where its elements lie.
        requires_grad: Whether it said that it needs gradients.
    """

    stored: StoredTensor
    requires_grad: bool = False
    __hash__ = None  # type: ignore[assignment]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stored.size

    @property
    def dtype(self) -> str:
        """What its elements are, by name."""
        return self.stored.dtype


class Storages:
    """The storages that a pickle refers to.

    Attributes:
        nbytes: How many bytes each has, by key.
        begin: Where each begins in its file or record, in bytes; 0 if that is not known yet.
    """

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}
        self.begin: dict[str, int] = {}

    def refer(self, key: str, numel: int, width: int, view: Any = None) -> tuple[int, int]:
        """Note that a storage is referred to; return where what is meant begins, and its bytes.

        Args:
            key: The storage's name.
            numel: How many elements it has.
            width: The bytes of one.
            view: Which of them are meant, if not all: any name, the first, and how many.

        Raises:
            ValueError: That cannot be.
        """
        nbytes, first = numel * width, 0
        if nbytes < 0 or self.nbytes.setdefault(key, nbytes) != nbytes:
            raise ValueError(f"storage {key} is told to have {nbytes} bytes")
        if view is not None:
            _, offset, size = view
            first, nbytes = offset * width, size * width
            if min(first, nbytes) < 0 or first + nbytes > self.nbytes[key]:
                raise ValueError(f"a view reaches out of storage {key}")
        return first, nbytes


class _RebuildV2(metaclass=Sealed):
    def __new__(
        cls,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        grad: Any = None,
        hooks: Any = None,
        extra: Any = None,
    ) -> Any:
        dtype = getattr(storage, "dtype", None)
        return TensorLeaf(stored_tensor(storage, dtype, offset, size, stride, extra), grad is True)


class _RebuildV3(metaclass=Sealed):
    def __new__(
        cls,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        grad: Any,
        hooks: Any,
        dtype: Any,
        extra: Any = None,
    ) -> Any:
        named = getattr(dtype, "dtype", None)
        return TensorLeaf(stored_tensor(storage, named, offset, size, stride, extra), grad is True)


class _Parameter(metaclass=Sealed):
    def __new__(cls, data: Any, grad: Any = None, hooks: Any = None) -> Any:
        if not isinstance(data, TensorLeaf):
            raise PickleError("a parameter is made of something else than a tensor")
        return TensorLeaf(data.stored, grad is True)


class _Size(metaclass=Sealed):
    def __new__(cls, *sizes: Any) -> Any:
        return NeedsTorch("torch.Size")


class _Device(metaclass=Sealed):
    def __new__(cls, *where: Any) -> Any:
        return NeedsTorch("torch.device")


_NAMES: Final[Mapping[str, Any]] = {
    **PLAIN,
    "torch._utils._rebuild_tensor_v2": _RebuildV2,
    "torch._utils._rebuild_tensor": _RebuildV2,
    "torch._utils._rebuild_tensor_v3": _RebuildV3,
    "torch._utils._rebuild_parameter": _Parameter,
    "torch.Size": _Size,
    "torch.device": _Device,
    "torch.storage.UntypedStorage": NeedsTorch("torch.UntypedStorage", "uint8"),
    "torch.UntypedStorage": NeedsTorch("torch.UntypedStorage", "uint8"),
    **{
        f"torch.{kind}Storage": NeedsTorch(f"torch.{kind}Storage", dtype)
        for kind, dtype in STORAGES.items()
    },
    **{f"torch.{dtype}": NeedsTorch(f"torch.{dtype}", dtype) for dtype in ITEMSIZE},
}


def load_nested(data: bytes, storages: Storages) -> Any:
    """Read the pickle of a state dict, with tensors that tell where their elements lie.

    Args:
        data: The pickle.
        storages: What notes the storages that it refers to.

    >>> import pickle
    >>> load_nested(pickle.dumps({"lr": 0.1, "betas": (0.9, 0.99)}, protocol=2), Storages())
    {'lr': 0.1, 'betas': (0.9, 0.99)}

    Raises:
        RefusedName: It names something else: see what torch says.
        PickleError: It is damaged.
    """

    def refer(pid: Any) -> StorageRef:
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise PickleError("it refers to something else than a storage")
        _, kind, key, _, numel, *view = pid
        known = isinstance(kind, NeedsTorch) and type(key) is str and type(numel) is int
        if not known or kind.dtype not in ITEMSIZE:
            raise PickleError("it refers to a storage in an unknown way")
        width = ITEMSIZE[kind.dtype]
        first, nbytes = storages.refer(key, numel, width, *view)
        return StorageRef(key, kind.dtype, nbytes // width, first)

    return load_pickle(data, _NAMES, refer)


def load_tensor(data: bytes) -> StoredTensor:
    """Read the pickle of an archive that holds one tensor, of a whole storage.

    Raises:
        RefusedName: It names something that plain tensors do not need.
        PickleError: It is damaged, or holds something else.
    """
    found = load_nested(data, Storages())
    if not isinstance(found, TensorLeaf) or found.stored.storage.first:
        raise PickleError(f"it holds a {type(found).__name__}, not a tensor of its own")
    return found.stored


def copy_plain(value: Any) -> tuple[Any] | None:
    """Return a copy of a value that is made of Python's own types alone, in a tuple; else None."""
    return (copy.deepcopy(value),) if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    return type(value) in _ATOMS
