"""The names that torch's pickles may use, the function behind each, and reading such pickles.

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

from ...errors import FormatError
from .archive import Archive, in_memory, read_archive
from .standins import (
    Array,
    DType,
    Later,
    Named,
    OddTensor,
    Simple,
    StorageRef,
    StoredTensor,
    Stream,
    TensorLeaf,
    build_value,
    make_array,
    needs_torch,
    whole_numbers,
)
from .unpickler import (
    Call,
    PickleError,
    RefusedName,
    Sealed,
    calls,
    check_alike,
    load_pickle,
    require,
)

_DANGEROUS: Final = (
    *("os", "posix", "nt", "builtins", "__builtin__", "subprocess", "sys", "shutil", "pty"),
    *("importlib", "runpy", "socket", "ctypes", "webbrowser", "code", "commands", "pickle"),
)


class _Storages:
    """The storages that a pickle refers to: how many bytes each has, by key."""

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}

    def refer(self, pid: Any) -> StorageRef:
        """Return a storage, given a word, its type, its key, its device and its size."""
        is_storage = type(pid) is tuple and len(pid) == 5 and pid[0] == "storage"
        require(is_storage, "it refers to something else than a storage")
        _, kind, key, _, numel = pid
        is_known = type(kind) is Named and type(key) is str
        require(is_known, "it refers to a storage in an unknown way")
        why = f"it holds a quantized tensor ({kind.name}); save its int_repr()"
        require(kind.dtype in ITEMSIZE, why)
        found = StorageRef(key, kind.dtype, *whole_numbers((numel,)))
        same = self.nbytes.setdefault(key, found.nbytes) == found.nbytes
        require(same, f"storage {key[:80]} has different sizes")
        return found


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any = None, *rest: Any
) -> TensorLeaf | OddTensor:
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
) -> TensorLeaf | OddTensor:
    is_stored = type(storage) is StorageRef and type(dtype) in (StorageRef, Named)
    require(is_stored, "a tensor is made of something else than a storage")
    require(dtype.dtype in ITEMSIZE, "a tensor is of an unknown dtype")
    require(type(extra) in (dict, type(None)), "a tensor's flags are not a dict")
    (start,) = whole_numbers((offset,))
    shape, strides = whole_numbers(size), whole_numbers(stride)
    made = StoredTensor(storage, dtype.dtype, start, shape, strides)
    made.check()
    if extra:
        return OddTensor("is a view that conjugates or negates; save its resolve_conj() instead")
    return TensorLeaf(made, grad is True)


def _parameter(data: Any, grad: Any = None, *_: Any) -> Any:
    if type(data) is TensorLeaf:
        return attrs.evolve(data, requires_grad=grad is True, parameter=True)
    return _same_tensor(data)


def _same_tensor(data: Any, *_: Any) -> Any:
    require(type(data) in (TensorLeaf, OddTensor), "a tensor is made of something else than one")
    return data


def _odd(why: str) -> Callable[..., OddTensor]:
    return lambda *_: OddTensor(why)


def _sparse(layout: Any, *_: Any) -> OddTensor:
    require(type(layout) is Named, "a sparse tensor is of an unknown layout")
    return OddTensor(f"is a {layout.name.removeprefix('torch.')} tensor; save it dense instead")


def _layout(name: Any) -> Named:
    require(type(name) is str and len(name) < 30, "a tensor has an unknown layout")
    return Named(name)


def _subclass(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """Make a tensor with attributes, which are dropped, and refuse one of a class of its own."""
    is_known = type(make) is Call and type(args) is tuple and type(kind) in (Call, Named)
    require(is_known, "a tensor is of an unknown kind")
    is_torchs = make.name.startswith("torch._utils._rebuild_")
    require(is_torchs, f"a tensor is made by {make.name[:80]}")
    if kind.name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return OddTensor(f"is a {kind.name}; save plain tensors instead")
    return make.make(*args)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    made = Array()
    made.state = (1, shape, dtype, order == "F", data)
    return made


def _encode(text: Any, codec: Any) -> bytes:
    """Return bytes that protocol 2 wrote as text, one character for each."""
    require(type(text) is str and codec == "latin1", "bytes are encoded in an unknown way")
    return text.encode("latin1")  # type: ignore[no-any-return]


def _bytearray(data: Any = b"", codec: Any = "latin-1") -> bytearray:
    """Return a bytearray of given bytes; the class itself would make one of any length."""
    if type(data) is bytes:
        return bytearray(data)
    is_text = type(data) is str and codec == "latin-1"
    require(is_text, "it makes a bytearray of something else than bytes")
    return bytearray(data, "latin-1")


def _distinct(items: Any, first: Callable[[Any], Any] = lambda item: item) -> Any:
    """Return items whose keys do not collide."""
    require(type(items) in (list, tuple), f"it makes a collection of a {type(items).__name__}")
    check_alike(map(first, items))
    return items


def _member(value: Any) -> Any:
    require(type(value) in (int, str), "an enum has a member that is neither a number nor text")
    return value


def join_path(*parts: Any) -> str:
    """Return a path of the standard library as text."""
    require(all(type(part) is str for part in parts), "a path is made of something else than text")
    return "/".join(parts).replace("//", "/")


def _counter(counts: Any = None) -> Counter[Any]:
    require(type(counts) in (dict, type(None)), "a counter is made of something else than a dict")
    made: Counter[Any] = Counter()
    dict.update(made, counts or {})
    return made


def _complex(real: Any, imag: Any) -> complex:
    is_pair = type(real) is type(imag) is float
    require(is_pair, "a complex number is made of something else than two floats")
    return complex(real, imag)


PLAIN: Final[Mapping[str, Call]] = calls(
    {
        "collections.OrderedDict": lambda items=(): OrderedDict(_distinct(items, lambda i: i[0])),
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

_REBUILD: Final[Mapping[str, Callable[..., Any]]] = {
    "tensor": _tensor,
    "tensor_v2": _tensor,
    "tensor_v3": _typed_tensor,
    "parameter": _parameter,
    "parameter_with_state": _parameter,
    "device_tensor_from_cpu_tensor": _same_tensor,
    "meta_tensor_no_storage": _odd("was saved without elements"),
    "sparse_tensor": _sparse,
    "qtensor": _odd("is quantized; save its int_repr(), scale and zero point instead"),
    "nested_tensor": _odd("is a nested tensor; save it dense instead"),
    "wrapper_subclass": _odd("is a wrapper of tensors; save plain tensors instead"),
}
_NUMPY: Final[Mapping[str, Callable[..., Any]]] = {
    "multiarray._reconstruct": Array,
    "multiarray.scalar": lambda dtype, data: make_array(data, dtype, (1,))[0],
    "numeric._frombuffer": _from_buffer,
}
_CALLS: Final = calls(
    {
        **{f"torch._utils._rebuild_{kind}": make for kind, make in _REBUILD.items()},
        "torch._tensor._rebuild_from_type_v2": _subclass,
        "torch.nn.parameter.Parameter": _parameter,
        "torch.serialization._get_layout": _layout,
        "torch.Size": lambda sizes=(): Later("torch.Size", None, False, whole_numbers(sizes)),
        "torch.device": partial(Later, "torch.device", None, False),
        "_io.BytesIO": Stream,
        "argparse.Namespace": lambda: Simple("argparse", "Namespace"),
        "types.SimpleNamespace": lambda: Simple("types", "SimpleNamespace"),
        "signal.Signals": lambda number: Simple("signal", "Signals", _member(number)),
        "numpy.dtype": DType,
        **{f"numpy.core.{name}": make for name, make in _NUMPY.items()},
        **{f"numpy._core.{name}": make for name, make in _NUMPY.items()},
    }
)
_CONSTANTS: Final[Mapping[str, str]] = {
    "torch.Tensor": "",
    "torch.storage.UntypedStorage": "uint8",
    "torch.UntypedStorage": "uint8",
    **{f"torch.{kind}Storage": dtype for kind, dtype in _STORAGES.items()},
    **{f"torch.{dtype}": dtype for dtype in ITEMSIZE},
    "numpy.ndarray": "",
}
NAMES: Final[Mapping[str, Any]] = {
    **PLAIN,
    **_CALLS,
    **{name: Named(name, dtype) for name, dtype in _CONSTANTS.items()},
}
"""Names in pickles of state dicts and of values, besides those that the user allows."""

_PATH_KINDS: Final = ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
PATHS: Final = calls(
    {f"pathlib{m}.{kind}": join_path for m in ("", "._local") for kind in _PATH_KINDS}
)
"""The names of paths, which become text."""
_MEGATRON_ENUMS: Final = (
    "enums.ModelType",
    "rerun_state_machine.RerunMode",
    "rerun_state_machine.RerunState",
    "transformer.enums.AttnBackend",
    "transformer.enums.CudaGraphScope",
)
_SIMPLIFIED: Final = PATHS | calls({f"megatron.core.{n}": _member for n in _MEGATRON_ENUMS})
"""Names in the values of Megatron-core: an enum's member becomes its value, and a path text."""

_OWN_OF_TORCH: Final = ("torch.distributed.", "torch.nested.", "torch._dynamo.")


class _Allowed(dict[str, Any]):
    """`NAMES` and what the user allowed; with ``sealed`` all others too, which are not built."""

    def __init__(self, sealed: bool) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.sealed = sealed

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.append(key)
        found = NAMES.get(key)
        if found is None:
            found = _user_names().get(key)
        if found is None and self.sealed:
            found = _SIMPLIFIED.get(key) or Call(key, partial(Sealed, key))
        return found


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
        name: Call(name, partial(Later, name, f, False), new=partial(Later, name, f, True))
        for name, f in found.items()
        if not name.startswith(_OWN_OF_TORCH)
    }


# Reading pickles


@attrs.frozen(eq=False)
class Nested:
    """A state dict or a value, with stand-ins for all that is not plain."""

    value: Any
    storages: Mapping[str, int]  # how many bytes each of its storages has, by key
    names: tuple[str, ...]  # the names in its pickle


def load_nested(data: bytes, *, sealed: bool = False) -> Nested:
    """Read a pickle; with ``sealed``, what is not allowed is refused only when it is built."""
    names, storages = _Allowed(sealed), _Storages()
    value = load_pickle(data, names, storages.refer)
    return Nested(value, storages.nbytes, tuple(names.seen))


def load_tensor(data: bytes) -> StoredTensor:
    """Read the pickle of an archive that holds one tensor."""
    found = load_nested(data).value
    if type(found) is OddTensor:
        raise PickleError(f"it {found.why}")
    require(type(found) is TensorLeaf, f"it holds a {type(found).__name__}, not a tensor")
    return found.stored  # type: ignore[no-any-return]


def load_archive(archive: Archive, *, plain: bool = False) -> Any:
    """Return the value that an archive of `torch.save` holds; ``plain`` if torch is not there."""
    limit = archive.window.length
    nested = load_nested(archive.pickle(limit))
    require(not plain or not needs_torch(nested.value), "it needs torch")
    archive.check_storages(nested.storages)
    return build_value(
        nested.value, lambda key: memoryview(bytearray(archive.read(f"data/{key}", limit)))
    )


def load_summed(data: bytes, file: str, name: str) -> tuple[Any, bool]:
    """Return a value that `torch.save` wrote, and whether its archive has checksums."""
    try:
        archive = read_archive(in_memory(data, file))
        return load_archive(archive), archive.is_summed
    except (PickleError, FormatError) as error:
        raise FormatError(file, f"the value of `{name}` {fault_of(error)}") from None


def fault_of(error: Exception) -> str:
    """Return why a value cannot be loaded or stored, given the error of reading or pickling it."""
    if isinstance(error, RefusedName):
        return explain_name(error.name)
    reason = error.reason if isinstance(error, FormatError) else str(error)
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return f"cannot be loaded: {(lines or [type(error).__name__])[-1][:300]}"


def explain_name(kind: str) -> str:
    """Return why a class or function that a pickle names is refused, and how to allow it."""
    if kind.partition(".")[0] in _DANGEROUS:
        return f"needs `{kind}`, which no checkpoint does: it may be malicious; none of it ran"
    return (
        f"needs `{kind}`, which is not known to be safe; if you trust it, allow it with "
        f"torch.serialization.add_safe_globals([{kind}]) and try again"
    )
