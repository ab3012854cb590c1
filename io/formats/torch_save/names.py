"""The names that torch's pickles may use, and the function behind each.

To allow another class, add a line to a table below: its full name, and a function that checks its
arguments and returns a plain value or a stand-in. Arguments may be anything, so each is checked.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import attrs

from shardplan.planning import ITEMSIZE

from .standins import (
    Array,
    DType,
    Later,
    Named,
    OddTensor,
    StorageRef,
    StoredTensor,
    Stream,
    TensorLeaf,
    make_array,
    whole_numbers,
)
from .unpickler import Call, PickleError, calls, check_alike, load_pickle, require


class _Storages:
    """The storages that a pickle refers to: how many bytes each has, by key."""

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}

    def refer(self, pid: Any) -> StorageRef:
        """Note a storage that is referred to, and return a reference to it.

        Args:
            pid: The persistent id: a word, the type of storage, its key, its device, its number of
                elements. In older files, a sixth part selects some of these: any name, the first,
                and their number.
        """
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            raise PickleError("it refers to something else than a storage")
        kind, key, _, numel = pid[1:5]
        if type(kind) is not Named or type(key) is not str:
            raise PickleError("it refers to a storage in an unknown way")
        if kind.dtype not in ITEMSIZE:
            raise PickleError(f"it holds a quantized tensor ({kind.name}); save its int_repr()")
        (numel,), width, first = whole_numbers((numel,)), ITEMSIZE[kind.dtype], 0
        if self.nbytes.setdefault(key, numel * width) != numel * width:
            raise PickleError(f"storage {key[:80]} has different sizes")
        if len(pid) == 6 and pid[5] is not None:
            first, numel = whole_numbers(pid[5][1:])
            if (first + numel) * width > self.nbytes[key]:
                raise PickleError(f"a view reaches out of storage {key[:80]}")
        return StorageRef(key, kind.dtype, numel, first * width)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = None, *rest: Any
) -> TensorLeaf:
    hooks, extra = (*rest, None, None)[:2]
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
    if type(storage) is not StorageRef or type(dtype) not in (StorageRef, Named):
        raise PickleError("a tensor is made of something else than a storage")
    require(dtype.dtype in ITEMSIZE, "a tensor is of an unknown dtype")
    require(type(extra) in (dict, type(None)), "a tensor's flags are not a dict")
    flags = {k: bool(v) for k, v in (extra or {}).items() if k in ("conj", "neg")}
    require(len(flags) == len(extra or ()), "a tensor has unknown flags")
    (start,) = whole_numbers((offset,))
    shape, strides = whole_numbers(size), whole_numbers(stride)
    made = StoredTensor(storage, dtype.dtype, start, shape, strides, **flags)
    why = made.fault()
    if why is not None:
        raise PickleError(f"a tensor cannot have {why}")
    return TensorLeaf(made, grad is True)


def _parameter(data: Any, grad: Any = None, *_: Any) -> Any:
    if type(data) is TensorLeaf:
        return attrs.evolve(data, requires_grad=grad is True, parameter=True)
    require(type(data) is OddTensor, "a parameter is made of something else than a tensor")
    return data


def _same_tensor(data: Any, *_: Any) -> Any:
    require(type(data) in (TensorLeaf, Array), "a tensor is made of something else than a tensor")
    return data


def _meta(dtype: Any, size: Any, stride: Any, grad: Any) -> OddTensor:
    if type(dtype) is not Named or len(whole_numbers(size)) != len(whole_numbers(stride)):
        raise PickleError("a tensor without elements is of an unknown kind")
    return OddTensor("meta", (dtype, size, stride, grad is True), "was saved without elements")


def _sparse(layout: Any, data: Any) -> OddTensor:
    if type(layout) is not Named or type(data) is not tuple:
        raise PickleError("a sparse tensor is of an unknown kind")
    kind = layout.name.removeprefix("torch.")
    return OddTensor(kind, data, f"is a {kind} tensor; save it dense instead")


def _odd(kind: str, why: str) -> Callable[..., OddTensor]:
    return lambda *args: OddTensor(kind, args, why)


def _subclass(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """Make a tensor with attributes, which are dropped; or one of a class of its own."""
    if type(make) is not Call or type(args) is not tuple or type(kind) not in (Call, Named):
        raise PickleError("a tensor is of an unknown kind")
    if not make.name.startswith("torch._utils._rebuild_"):
        raise PickleError(f"a tensor is made by {make.name[:80]}")
    made = make.make(*args)
    if kind.name in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return made
    target = kind.allowed if type(kind) is Call else None
    why = f"is a {kind.name}; save plain tensors instead"
    return OddTensor(kind.name, (made, state), why, target)


def _layout(name: Any) -> Named:
    require(type(name) is str and name in _LAYOUTS, "a tensor has an unknown layout")
    return Named(name)


def _encode(text: Any, codec: Any) -> bytes:
    """Return bytes that protocol 2 wrote as text, one character for each."""
    require(type(text) is str and codec == "latin1", "bytes are encoded in an unknown way")
    return text.encode("latin1")  # type: ignore[no-any-return]


def _bytearray(data: Any = b"", codec: Any = "latin-1") -> bytearray:
    """Return a bytearray of given bytes; the class itself would make one of any length."""
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
    require(type(counts) in (dict, type(None)), "a counter is made of something else than a dict")
    made: Counter[Any] = Counter()
    dict.update(made, counts or {})
    return made


def _complex(real: Any, imag: Any) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise PickleError("a complex number is made of something else than two floats")
    return complex(real, imag)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    made = Array()
    made.state = (1, shape, dtype, order == "F", data)
    return made


PLAIN: Final[Mapping[str, Call]] = calls(
    {
        "collections.OrderedDict": _ordered,
        "collections.Counter": _counter,
        "_codecs.encode": _encode,
        "builtins.bytes": lambda: b"",  # as protocol 2 writes empty bytes
        "builtins.bytearray": _bytearray,
        "builtins.set": lambda items=(): set(_distinct(items)),
        "builtins.frozenset": lambda items=(): frozenset(_distinct(items)),
        "builtins.complex": _complex,
    }
)
"""Names in pickles of plain values."""

_STORAGES: Final = {
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
"""The dtype of each of torch's typed storages; empty for quantized ones."""

_LAYOUTS: Final = tuple(
    f"torch.{kind}"
    for kind in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
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
    "qtensor": _odd("quantized", _QUANTIZED),
    "nested_tensor": _odd("nested", "is a nested tensor; save it dense instead"),
    "wrapper_subclass": _odd("wrapper", "is a wrapper of tensors; save plain tensors instead"),
}
_NUMPY: Final[Mapping[str, Callable[..., Any]]] = {
    "multiarray._reconstruct": Array,
    "multiarray.scalar": lambda dtype, data: make_array(data, dtype, (1,), "C")[0],
    "numeric._frombuffer": _from_buffer,
}
_CALLS: Final = calls(
    {
        **{f"torch._utils._rebuild_{kind}": make for kind, make in _REBUILD.items()},
        "torch._tensor._rebuild_from_type_v2": _subclass,
        "torch.nn.parameter.Parameter": _parameter,
        "torch.serialization._get_layout": _layout,
        "torch.Size": lambda sizes=(): Later("torch.Size", (whole_numbers(sizes),)),
        "torch.device": lambda *where: Later("torch.device", where),
        "_io.BytesIO": Stream,
        "numpy.dtype": DType,
        **{f"numpy.core.{name}": make for name, make in _NUMPY.items()},
        **{f"numpy._core.{name}": make for name, make in _NUMPY.items()},
    }
)
_QSCHEMES: Final = (
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine"),
    *("per_channel_symmetric", "per_channel_affine_float_qparams"),
)
_CONSTANTS: Final[Mapping[str, str]] = {
    "torch.Tensor": "",
    "torch.storage.UntypedStorage": "uint8",
    "torch.UntypedStorage": "uint8",
    **{f"torch.{kind}Storage": dtype for kind, dtype in _STORAGES.items()},
    **{f"torch.{dtype}": dtype for dtype in ITEMSIZE},
    **{f"torch.{scheme}": "" for scheme in _QSCHEMES},
    "numpy.ndarray": "",
}
NAMES: Final[Mapping[str, Any]] = {
    **PLAIN,
    **_CALLS,
    **{name: Named(name, dtype) for name, dtype in _CONSTANTS.items()},
}
"""Names in pickles of state dicts and of values, besides those that the user allows."""

_OWN_OF_TORCH: Final = ("torch.distributed.", "torch.nested.", "torch._dynamo.")


class _Allowed(dict[str, Any]):
    """`NAMES` and the names that the user allowed; ``seen`` lists those that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.append(key)
        found = NAMES.get(key)
        return _user_names().get(key) if found is None else found


def _user_names() -> dict[str, Call]:
    """Return what the user allowed with ``torch.serialization.add_safe_globals``, by name.

    Torch adds classes of its own there when some of its modules are imported; they are left out.
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


@attrs.frozen(eq=False)
class Nested:
    """A state dict or a value, with stand-ins for all that is not plain; bytes of its storages."""

    value: Any
    storages: Mapping[str, int]
    names: tuple[str, ...]
    end: int


def load_nested(data: bytes, begin: int = 0) -> Nested:
    """Read the pickle of a state dict or of a value."""
    names, storages = _Allowed(), _Storages()
    value, end = load_pickle(data, names, storages.refer, begin)
    return Nested(value, storages.nbytes, tuple(names.seen), end)


def load_tensor(data: bytes) -> StoredTensor:
    """Read the pickle of an archive that holds one tensor, of a whole storage."""
    found = load_nested(data).value
    if type(found) is not TensorLeaf or found.stored.storage.first:
        raise PickleError(f"it holds a {type(found).__name__}, not a tensor of its own")
    return found.stored
