"""What torch's pickles hold, described: tensors as places in a file, other objects as stand-ins.

The tables here say what a pickle may name, and what it gets instead. Nothing is built yet, so that
a file can be looked into without torch; `standins` builds the values that are asked for.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import ITEMSIZE
from shardplan.planning.geometry import shape_fault

from .unpickler import Call, PickleError, StandIn, calls, check_alike, load_pickle_at

__all__ = [
    "PLAIN",
    "Array",
    "DType",
    "Later",
    "Named",
    "OddTensor",
    "StorageRef",
    "Storages",
    "StoredTensor",
    "Stream",
    "TensorLeaf",
    "load_nested",
    "load_nested_at",
    "load_tensor",
]

_MAX_NUMBER: Final = 1 << 62  # elements, or bytes


@attrs.frozen
class StorageRef:
    """The bytes that a tensor is a view of.

    Attributes:
        key: Its name: the record is ``data/<key>``.
        dtype: What its elements are, by name; ``"uint8"`` if that is left to the tensor.
        numel: How many there are.
        first: Where it begins in what is stored under its name, in bytes.
    """

    key: str
    dtype: str
    numel: int
    first: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.numel * ITEMSIZE[self.dtype]


@attrs.frozen
class StoredTensor:
    """A tensor as a pickle describes it.

    Attributes:
        storage: What it is a view of.
        dtype: What its elements are, by name.
        offset: Where in the storage it starts, in elements.
        size, stride: Its shape, and how far apart its elements lie, in elements.
        conj, neg: Whether its elements are the conjugates, or the negatives, of what is stored.
    """

    storage: StorageRef
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def span(self) -> int:
        """How many elements lie between its first and its last, both included."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    def fault(self) -> str | None:
        """Say why it cannot be; None if it can."""
        wrong = shape_fault(self.size)
        if wrong is not None:
            return f"such a shape: it {wrong}"
        numbers = (self.offset, *self.size, *self.stride)
        if len(self.size) != len(self.stride) or min(numbers) < 0 or self.storage.numel < 0:
            return f"shape {self.size} and strides {self.stride} from {self.offset} on"
        if self.span and (self.offset + self.span) * ITEMSIZE[self.dtype] > self.storage.nbytes:
            return f"shape {self.size} in a storage of {self.storage.nbytes:,} bytes"
        return None


@attrs.frozen(eq=False)
class TensorLeaf:
    """A tensor in a nested state dict.

    Attributes:
        stored: Where its elements lie.
        requires_grad: Whether it said that it needs gradients.
        parameter: Whether it is a parameter of a module.
    """

    stored: StoredTensor
    requires_grad: bool = False
    parameter: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stored.size

    @property
    def dtype(self) -> str:
        """What its elements are, by name."""
        return self.stored.dtype


@attrs.frozen(eq=False)
class Named:
    """Something that torch or numpy has under a name, such as a dtype.

    Attributes:
        name: Its full name.
        dtype: Which dtype it is or is made for, if it is a dtype or a type of storages.
    """

    name: str
    dtype: str = ""


class Later(StandIn):
    """An object that is made once its value is asked for.

    Attributes:
        name: What the pickle calls to make it.
        args: The arguments of that call.
        target: What to call, if the user allowed it with ``torch.serialization.add_safe_globals``.
        is_new: Whether ``__new__`` is to be called, not the class itself.
    """

    __slots__ = ("args", "is_new", "name", "target")

    def __init__(self, name: str, args: Any, target: Any = None, is_new: bool = False) -> None:
        super().__init__()
        self.name, self.args, self.target, self.is_new = name, args, target, is_new

    @property
    def parts(self) -> tuple[Any, ...]:
        """Everything that it holds."""
        return (*self.args, self.state)


class OddTensor(Later):
    """A tensor that is more than a view of a storage; it can be part of a value, not a tensor.

    Attributes:
        why: What it is, and what to do about it.
    """

    __slots__ = ("why",)
    shape = ()
    dtype = ""

    def __init__(self, name: str, args: Any, why: str) -> None:
        super().__init__(name, args)
        self.why = why


class Stream(StandIn):
    """A BytesIO; its state is its bytes, its position, and attributes, which are left out."""


class DType(StandIn):
    """A dtype of numpy; its state tells the order of bytes.

    Args:
        code: Its kind and its bytes, such as ``"f4"``.
    """

    __slots__ = ("code",)

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.code = code

    def make(self) -> np.dtype[Any]:
        """Return it.

        Raises:
            PickleError: It is none whose elements are bytes.
        """
        order = self.state[1] if type(self.state) is tuple and len(self.state) > 1 else "|"
        if type(self.code) is not str or not _NUMPY.fullmatch(self.code):
            raise PickleError("it holds a numpy array that is neither of numbers nor of text")
        if type(order) is not str or order not in ("<", ">", "|", "="):
            raise PickleError("it holds a numpy array of an unknown order of bytes")
        return np.dtype(order + self.code)


class Array(StandIn):
    """An array of numpy; its state is a version, shape, dtype, whether it is Fortran's, bytes."""

    def make(self) -> Any:
        """Return a new array.

        Raises:
            PickleError: Its bytes are not those of its shape.
        """
        if type(self.state) is not tuple or len(self.state) != 5:
            raise PickleError("it holds a numpy array of an unknown kind")
        _, shape, dtype, fortran, data = self.state
        return _array(data, dtype, shape, "F" if fortran is True else "C")


_NUMPY: Final = re.compile(r"[biufc](1|2|4|8|16)|[SU][0-9]{1,9}")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    if type(dtype) is not DType or type(data) not in (bytes, bytearray):
        raise PickleError("it holds a numpy array of objects")
    made, count = dtype.make(), 1
    for size in _ints(shape):
        count *= size
    if count * made.itemsize != len(data) or order not in ("C", "F"):
        raise PickleError(f"a numpy array of {count * made.itemsize:,} bytes has {len(data):,}")
    flat = np.frombuffer(data, made) if data else np.empty(0, made)
    return flat.reshape(shape, order=order).copy(order)


def _scalar(dtype: Any, data: Any) -> Any:
    return _array(data, dtype, (1,), "C")[0]


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    made = Array()
    made.state = (1, shape, dtype, order == "F", data)
    return made


class Storages:
    """The storages that a pickle refers to.

    Attributes:
        nbytes: How many bytes each has, by key.
        begin: Where each begins in its file, in bytes, if it is not a record of an archive.
    """

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}
        self.begin: dict[str, int] = {}

    def refer(self, pid: Any) -> StorageRef:
        """Note that a storage is referred to, and return what is meant.

        Args:
            pid: The persistent id: a word, the type of storage, its key, its device, how many
                elements it has; and which of them are meant, if not all: any name, the first, and
                how many.

        Raises:
            PickleError: There can be no such storage.
        """
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise PickleError("it refers to something else than a storage")
        kind, key, _, numel = pid[1:5]
        if type(kind) is not Named or type(key) is not str:
            raise PickleError("it refers to a storage in an unknown way")
        if kind.dtype not in ITEMSIZE:
            raise PickleError(f"it holds a quantized tensor ({kind.name}); save its int_repr()")
        (numel,), width = _ints((numel,)), ITEMSIZE[kind.dtype]
        if self.nbytes.setdefault(key, numel * width) != numel * width:
            raise PickleError(f"storage {key[:80]} has different sizes")
        first = 0
        if len(pid) == 6 and pid[5] is not None:
            first, numel = _ints(pid[5][1:])
            if (first + numel) * width > self.nbytes[key]:
                raise PickleError(f"a view reaches out of storage {key[:80]}")
        return StorageRef(key, kind.dtype, numel, first * width)


def _ints(value: Any) -> tuple[int, ...]:
    """Return whole numbers as they are: those of a shape, of strides, of an offset."""
    if type(value) is not tuple or not all(type(n) is int for n in value):
        raise PickleError("a shape is not a tuple of whole numbers")
    if value and not (min(value) >= 0 and max(value) < _MAX_NUMBER):
        raise PickleError("a shape or a stride is negative, or impossibly large")
    return value


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any = None,
    hooks: Any = None,
    extra: Any = None,
) -> TensorLeaf:
    return _typed_tensor(storage, offset, size, stride, grad, hooks, storage, extra)


def _typed_tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    extra: Any = None,
) -> TensorLeaf:
    """Make a tensor of what a pickle says of it, which may be anything."""
    if type(storage) is not StorageRef or type(dtype) not in (StorageRef, Named):
        raise PickleError("a tensor is made of something else than a storage")
    if dtype.dtype not in ITEMSIZE:
        raise PickleError("a tensor is of an unknown dtype")
    if not isinstance(extra, (dict, type(None))):
        raise PickleError("a tensor's flags are not a dict")
    flags = {k: bool(v) for k, v in (extra or {}).items() if type(k) is str}
    if len(flags) < len(extra or {}) or not flags.keys() <= {"conj", "neg"}:
        raise PickleError(f"a tensor has unknown flags, such as {', '.join(flags)[:80]}")
    (start,) = _ints((offset,))
    made = StoredTensor(storage, dtype.dtype, start, _ints(size), _ints(stride), **flags)
    why = made.fault()
    if why is not None:
        raise PickleError(f"a tensor cannot have {why}")
    return TensorLeaf(made, grad is True)


def _parameter(data: Any, grad: Any = None, *_: Any) -> Any:
    if type(data) is TensorLeaf:
        return attrs.evolve(data, requires_grad=grad is True, parameter=True)
    if type(data) is OddTensor:
        return data
    raise PickleError("a parameter is made of something else than a tensor")


def _same_tensor(data: Any, *_: Any) -> Any:
    if type(data) not in (TensorLeaf, Array):
        raise PickleError("a tensor is made of something else than a tensor")
    return data


def _meta(dtype: Any, size: Any, stride: Any, grad: Any) -> OddTensor:
    if type(dtype) is not Named or len(_ints(size)) != len(_ints(stride)):
        raise PickleError("a tensor without elements is of an unknown kind")
    return OddTensor("meta", (dtype, size, stride, grad is True), "was saved without elements")


def _sparse(layout: Any, data: Any) -> OddTensor:
    if type(layout) is not Named or type(data) is not tuple:
        raise PickleError("a sparse tensor is of an unknown kind")
    kind = layout.name.removeprefix("torch.")
    return OddTensor(kind, data, f"is a {kind} tensor; save it dense instead")


def _subclass(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """Make a tensor with attributes, which are left out; or one of a class of its own."""
    if type(make) is not Call or type(args) is not tuple or type(kind) not in (Call, Named):
        raise PickleError("a tensor is of an unknown kind")
    if not make.name.startswith("torch._utils._rebuild_"):
        raise PickleError(f"a tensor is made by {make.name[:80]}")
    made = make.make(*args)
    if kind.name in _TENSORS:
        return made
    odd = OddTensor(kind.name, (made, state), f"is a {kind.name}; save plain tensors instead")
    odd.target = kind.allowed if type(kind) is Call else None
    return odd


def _layout(name: Any) -> Named:
    if type(name) is not str or name not in _LAYOUTS:
        raise PickleError("a tensor has an unknown layout")
    return Named(name)


def _encode(text: Any, codec: Any) -> bytes:
    """Return bytes that protocol 2 wrote as text of which each character is one."""
    if type(text) is not str or codec != "latin1":
        raise PickleError("bytes are encoded in an unknown way")
    return text.encode("latin1")


def _bytearray(data: Any = b"", codec: Any = "latin-1") -> bytearray:
    """Return a bytearray of what is there; the type would make one of any length that is named."""
    if type(data) is bytes:
        return bytearray(data)
    if type(data) is not str or codec != "latin-1":
        raise PickleError("it makes a bytearray of something else than bytes")
    return bytearray(data, "latin-1")


def _listed(items: Any) -> Any:
    if type(items) not in (list, tuple):
        raise PickleError(f"it makes a collection of a {type(items).__name__}")
    return items


def _distinct(items: Any) -> Any:
    check_alike(_listed(items))
    return items


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    check_alike([key for key, _ in _listed(items)])
    return OrderedDict(items)


def _counter(counts: Any = None) -> Counter[Any]:
    if type(counts) not in (dict, type(None)):
        raise PickleError("a counter is made of something else than a dict")
    made: Counter[Any] = Counter()
    for key, count in (counts or {}).items():
        made[key] = count
    return made


def _complex(real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise PickleError("a complex number is made of something else than two floats")
    return complex(real, imag)


STORAGES: Final = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    **dict.fromkeys(("QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4"), ""),
}
"""The dtypes of torch's kinds of storages; none for quantized ones."""

PLAIN: Final[Mapping[str, Call]] = calls(
    {
        "collections.OrderedDict": _ordered,
        "collections.Counter": _counter,
        "_codecs.encode": _encode,
        "builtins.bytes": lambda: b"",  # as protocol 2 writes bytes that are empty
        "builtins.bytearray": _bytearray,
        "builtins.set": lambda items=(): set(_distinct(items)),
        "builtins.frozenset": lambda items=(): frozenset(_distinct(items)),
        "builtins.complex": _complex,
    }
)
"""What pickles of plain values name, and what they get instead."""

_TENSORS: Final = ("torch.Tensor", "torch.nn.parameter.Parameter")
_LAYOUTS: Final = (
    *("torch.strided", "torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc"),
    *("torch.sparse_bsr", "torch.sparse_bsc"),
)
_QUANTIZED: Final = "is a quantized tensor; save its int_repr(), scale and zero point instead"
_REBUILD: Final[Mapping[str, Callable[..., Any]]] = {
    "tensor": _tensor,
    "tensor_v2": _tensor,
    "tensor_v3": _typed_tensor,
    "parameter": _parameter,
    "parameter_with_state": _parameter,
    "device_tensor_from_cpu_tensor": _same_tensor,
    "device_tensor_from_numpy": _same_tensor,
    "meta_tensor_no_storage": _meta,
    "sparse_tensor": _sparse,
    "qtensor": lambda *args: OddTensor("quantized", args, _QUANTIZED),
    "nested_tensor": lambda *args: OddTensor(
        "nested", args, "is a nested tensor; save it dense instead"
    ),
    "wrapper_subclass": lambda *args: OddTensor(
        "wrapper", args, "is a wrapper of tensors; save plain tensors instead"
    ),
}
_TORCH: Final = calls(
    {
        **{f"torch._utils._rebuild_{kind}": make for kind, make in _REBUILD.items()},
        "torch._tensor._rebuild_from_type_v2": _subclass,
        "torch.nn.parameter.Parameter": _parameter,
        "torch.serialization._get_layout": _layout,
        "torch.Size": lambda sizes=(): Later("torch.Size", (_ints(sizes),)),
        "torch.device": lambda *where: Later("torch.device", where),
    }
)
_NAMED: Final[Mapping[str, Named]] = {
    name: Named(name, dtype)
    for name, dtype in {
        "torch.Tensor": "",
        "torch.storage.UntypedStorage": "uint8",
        "torch.UntypedStorage": "uint8",
        **{f"torch.{kind}Storage": dtype for kind, dtype in STORAGES.items()},
        **{f"torch.{dtype}": dtype for dtype in ITEMSIZE},
        **dict.fromkeys(("torch.per_tensor_affine", "torch.per_tensor_symmetric"), ""),
        **dict.fromkeys(("torch.per_channel_affine", "torch.per_channel_symmetric"), ""),
        "torch.per_channel_affine_float_qparams": "",
        "numpy.ndarray": "",
    }.items()
}
_NUMPY_CORE: Final[Mapping[str, Callable[..., Any]]] = {
    "multiarray._reconstruct": lambda *_: Array(),
    "multiarray.scalar": _scalar,
    "numeric._frombuffer": _from_buffer,
}
_OTHERS: Final = calls(
    {
        "_io.BytesIO": Stream,
        "numpy.dtype": lambda code, *_: DType(code),
        **{f"numpy.core.{name}": make for name, make in _NUMPY_CORE.items()},
        **{f"numpy._core.{name}": make for name, make in _NUMPY_CORE.items()},
    }
)
_NAMES: Final[Mapping[str, Any]] = {**PLAIN, **_TORCH, **_NAMED, **_OTHERS}
_OWN_OF_TORCH: Final = ("torch.distributed.", "torch.nested.", "torch._dynamo.")


class _Allowed(dict[str, Any]):
    """The names above, and those that the user allowed.

    Args:
        seen: Gets the names that are looked up.
    """

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def get(self, key: str, default: Any = None) -> Any:
        self._seen.append(key)
        found = _NAMES.get(key)
        return _user_names().get(key) if found is None else found


def _user_names() -> dict[str, Call]:
    """Return what the user allowed with ``torch.serialization.add_safe_globals``, by name.

    Torch adds classes of its own there when some of its modules are imported; those are left out.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    pairs = [f if isinstance(f, tuple) else (f, "") for f in torch.serialization.get_safe_globals()]
    found = {name or f"{f.__module__}.{f.__qualname__}": f for f, name in pairs}
    return {
        name: Call(name, partial(_user_call, name, f), new=partial(_user_new, name, f), allowed=f)
        for name, f in found.items()
        if not name.startswith(_OWN_OF_TORCH)
    }


def _user_call(name: str, target: Any, *args: Any) -> Later:
    return Later(name, args, target)


def _user_new(name: str, target: Any, *args: Any) -> Later:
    return Later(name, args, target, is_new=True)


def load_nested(data: bytes, storages: Storages, seen: list[str] | None = None) -> Any:
    """Read the pickle of a state dict or of a value, with stand-ins for all that is not plain.

    Args:
        data: The pickle.
        storages: What notes the storages that it refers to.
        seen: Gets the names that the pickle uses.

    >>> import pickle
    >>> load_nested(pickle.dumps({"lr": 0.1, "raw": b"x"}, protocol=2), Storages())
    {'lr': 0.1, 'raw': b'x'}

    Raises:
        RefusedName: It names something that no checkpoint needs; nothing of it was called.
        PickleError: It is damaged, or would take more memory or time than its length justifies.
    """
    return load_pickle_at(data, 0, _Allowed([] if seen is None else seen), storages.refer)[0]


def load_nested_at(data: bytes, begin: int, storages: Storages) -> tuple[Any, int]:
    """Read a pickle that lies somewhere in some bytes; return the value, and where it ends."""
    return load_pickle_at(data, begin, _Allowed([]), storages.refer)


def load_tensor(data: bytes) -> StoredTensor:
    """Read the pickle of an archive that holds one tensor, of a whole storage.

    Raises:
        RefusedName: It names something that plain tensors do not need.
        PickleError: It is damaged, or holds something else.
    """
    found = load_nested(data, Storages())
    if type(found) is not TensorLeaf or found.stored.storage.first:
        raise PickleError(f"it holds a {type(found).__name__}, not a tensor of its own")
    return found.stored
