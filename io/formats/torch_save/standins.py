"""Stand-ins for what torch's pickles hold, and how values are built from them.

A file can be inspected without torch: a tensor is a place in it. `build_value` makes the objects
once a value is asked for. No foreign function is called, except those that the user allowed with
``torch.serialization.add_safe_globals``. `names` lists what a pickle may name.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import ITEMSIZE
from shardplan.planning.geometry import MAX_NUMEL, shape_fault

from .unpickler import Call, PickleError, Sealed, StandIn, StatefulStandIn, require

_WHOLE: Final = frozenset((int,))
_FIXED: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))
_COPIED: Final = (list, tuple, set, frozenset, bytearray)
_DICTS: Final = (dict, OrderedDict, Counter)
_NUMPY_CODE: Final = re.compile(r"[biufc](1|2|4|8|16)|[SU][0-9]{1,9}")


def whole_numbers(value: Any) -> tuple[int, ...]:
    """Return a tuple of sizes, strides or offsets as it is."""
    if type(value) is not tuple or not _WHOLE.issuperset(map(type, value)):
        raise PickleError("a shape or an offset is not a tuple of whole numbers")
    if value and not (min(value) >= 0 and max(value) < MAX_NUMEL):
        raise PickleError("a shape or an offset is negative, or impossibly large")
    return value


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements.

    >>> row_major((2, 3, 4)), row_major((2, 0, 4))
    ((12, 4, 1), (4, 4, 1))
    """
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


@attrs.frozen
class StorageRef:
    """The bytes that a tensor is a view of; `dtype` is ``"uint8"`` if the tensor decides."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.numel * ITEMSIZE[self.dtype]


@attrs.frozen
class StoredTensor:
    """A tensor as a pickle describes it; ``offset`` and ``stride`` count elements."""

    storage: StorageRef
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def check(self) -> None:
        """Refuse a tensor that cannot be."""
        wrong = shape_fault(self.size)
        require(wrong is None, f"a tensor cannot have such a shape: it {wrong}")
        same = len(self.size) == len(self.stride)
        require(same, f"a tensor cannot have shape {self.size} and strides {self.stride}")
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        end = (self.offset + last + 1) * ITEMSIZE[self.dtype]
        held = self.storage.nbytes
        fits = end <= held or 0 in self.size
        require(fits, f"a tensor cannot have shape {self.size} in a storage of {held:,} bytes")


@attrs.frozen(eq=False)
class TensorLeaf(StandIn):
    """A tensor in a nested state dict."""

    needs_torch = True
    stored: StoredTensor
    requires_grad: bool = False
    parameter: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stored.size

    @property
    def dtype(self) -> str:
        """The dtype of its elements, by name."""
        return self.stored.dtype

    def build(self, builder: Builder) -> Any:
        """Return the tensor: a view of its storage, whose bounds were checked."""
        import torch

        stored = self.stored
        made = torch.empty(0, dtype=getattr(torch, stored.dtype))
        storage = builder.storage(stored.storage)
        made = made.set_(storage, stored.offset, stored.size, stored.stride)
        if self.parameter:
            return torch.nn.Parameter(made, self.requires_grad)
        return made.requires_grad_(self.requires_grad)


@attrs.frozen(eq=False)
class OddTensor(StandIn):
    """A tensor that is more than a view of a storage, which is refused; `why` says what it is."""

    needs_torch = True
    why: str
    shape = ()
    dtype = ""

    def build(self, builder: Builder) -> Any:
        """Refuse to build it."""
        raise PickleError(f"it holds a tensor that {self.why}")


@attrs.frozen(eq=False)
class Named(StandIn):
    """A constant of torch or numpy, such as a dtype; ``dtype`` is empty for others."""

    needs_torch = True
    name: str
    dtype: str = ""

    def build(self, builder: Builder) -> Any:
        """Return the dtype."""
        import torch

        module, _, name = self.name.partition(".")
        if module != "torch" or not self.dtype or name.endswith("Storage"):
            raise PickleError(f"it holds {self.name} as a value")
        return getattr(torch, name)


class Later(StatefulStandIn):
    """An object made by a call once its value is asked for; the user allowed `target`, if any."""

    __slots__ = ("args", "is_new", "name", "target")
    needs_torch = True

    def __init__(self, name: str, target: Any, is_new: bool, *args: Any) -> None:
        super().__init__()
        self.name, self.target, self.is_new, self.args = name, target, is_new, args

    @property
    def parts(self) -> Sequence[Any]:  # type: ignore[override]
        """Everything that it holds."""
        return (*self.args, self.state)

    def build(self, builder: Builder) -> Any:
        """Make the call, and set the object's state as Python's unpickler does."""
        import torch

        args, target = [builder.build(arg) for arg in self.args], self.target
        if target is None:
            return {"torch.Size": torch.Size, "torch.device": torch.device}[self.name](*args)
        made = target.__new__(target, *args) if self.is_new else target(*args)
        state = builder.build(self.state)
        if state is not None and hasattr(made, "__setstate__"):
            made.__setstate__(state)
        elif state is not None:
            is_pair = isinstance(state, tuple) and len(state) == 2
            plain, slots = state if is_pair else (state, None)
            made.__dict__.update(plain or {})
            for name, inner in (slots or {}).items():
                setattr(made, name, inner)
        return made


class Simple(StatefulStandIn):
    """An object of the standard library, made of numbers or text; its state is its attributes."""

    __slots__ = ("args", "kind", "module")

    def __init__(self, module: str, kind: str, *args: Any) -> None:
        super().__init__()
        self.module, self.kind, self.args = module, kind, args

    def build(self, builder: Builder) -> Any:
        """Return the object; attributes are those of a namespace."""
        made = getattr(import_module(self.module), self.kind)(*self.args)
        if self.state is not None:
            named = type(self.state) is dict and all(type(name) is str for name in self.state)
            require(named and not self.args, f"it holds a {self.kind} with odd attributes")
            vars(made).update(builder.build(self.state))
        return made


class Stream(StatefulStandIn):
    """A BytesIO; its state is its bytes, its position, and attributes, which are dropped."""

    def build(self, builder: Builder) -> io.BytesIO:
        """Return the stream, at its position."""
        data, position, _ = (b"", 0, None) if self.state is None else self.state
        if type(data) is not bytes or type(position) is not int or not 0 <= position < MAX_NUMEL:
            raise PickleError("it holds a BytesIO of an unknown kind")
        made = io.BytesIO(data)
        made.seek(position)
        return made


class DType(StatefulStandIn):
    """A dtype of numpy; its state holds the order of bytes."""

    __slots__ = ("code",)

    def __init__(self, code: Any, *_: Any) -> None:
        super().__init__()
        self.code = code

    def build(self, builder: Any = None) -> np.dtype[Any]:
        """Return the dtype, if it is one of numbers or text."""
        order = self.state[1] if type(self.state) is tuple and len(self.state) > 1 else "|"
        if type(self.code) is not str or not _NUMPY_CODE.fullmatch(self.code):
            raise PickleError("it holds a numpy array that is neither of numbers nor of text")
        if type(order) is not str or order not in ("<", ">", "|", "="):
            raise PickleError("it holds a numpy array of an unknown order of bytes")
        return np.dtype(order + self.code)


class Array(StatefulStandIn):
    """An array of numpy; its state is a version, shape, dtype, Fortran order or not, and bytes."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def build(self, builder: Builder) -> Any:
        """Return a new array."""
        if type(self.state) is not tuple or len(self.state) != 5:
            raise PickleError("it holds a numpy array of an unknown kind")
        _, shape, dtype, fortran, data = self.state
        return make_array(data, dtype, shape, "F" if fortran is True else "C")


def make_array(data: Any, dtype: Any, shape: Any, order: Any = "C") -> Any:
    """Return a numpy array, given what a pickle says of it."""
    if type(dtype) is not DType or type(data) not in (bytes, bytearray):
        raise PickleError("it holds a numpy array of objects")
    made = dtype.build()
    nbytes = math.prod(whole_numbers(shape)) * made.itemsize
    require(nbytes == len(data), f"a numpy array of {nbytes:,} bytes has {len(data):,}")
    flat = np.frombuffer(data, made) if data else np.empty(0, made)
    return flat.reshape(shape, order=order).copy(order)


def needs_torch(value: Any) -> bool:
    """Return True if torch is needed to build a value."""
    return any(isinstance(part, StandIn) and part.needs_torch for part in _walk(value))


def sealed_name(value: Any) -> str | None:
    """Return a refused class or function that a value needs; None if there is none."""
    return next((part.name for part in _walk(value) if isinstance(part, (Sealed, Call))), None)


def _walk(value: Any) -> Iterator[Any]:
    """Yield a value and all that it holds."""
    yield value
    parts: Iterable[Any] = ()
    if isinstance(value, StandIn):
        parts = value.parts
    elif isinstance(value, Mapping):
        parts = (*value, *value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    for part in parts:
        yield from _walk(part)


def build_value(value: Any, read: Callable[[str], memoryview]) -> Any:
    """Build what a pickle described, of plain values and stand-ins; plain containers are copied.

    ``read`` returns the bytes of a storage, writable; only those that the value needs are read.
    """
    try:
        return Builder(read).build(value)
    except PickleError:
        raise
    except RecursionError:
        raise PickleError("it is nested too deeply") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PickleError(lines[0][:300]) from error


class Builder:
    """Builds one value; an object that occurs twice is built once."""

    def __init__(self, read: Callable[[str], memoryview]) -> None:
        self._read = read
        self._built: dict[int, Any] = {}
        self._storages: dict[str, Any] = {}

    def build(self, value: Any) -> Any:
        """Return the object that a value or a stand-in describes."""
        if type(value) in _FIXED:
            return value
        if id(value) not in self._built:
            self._built[id(value)] = self._make(value)
        return self._built[id(value)]

    def _make(self, value: Any) -> Any:
        kind = type(value)
        if kind in _COPIED:
            return kind(map(self.build, value))
        if kind in _DICTS:
            made: dict[Any, Any] = kind()
            for key, inner in value.items():
                made[self.build(key)] = self.build(inner)
            return made
        if isinstance(value, StandIn):
            return value.build(self)
        require(isinstance(value, np.generic), "it holds a function as a value")
        return value

    def storage(self, ref: StorageRef) -> Any:
        """Return a storage of torch, reading its bytes the first time."""
        import torch

        if ref.key not in self._storages:
            data = self._read(ref.key)
            held = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
            self._storages[ref.key] = held.untyped_storage()
        return self._storages[ref.key]
