"""Values built from stand-ins: what a pickle describes is made here, once it is asked for.

Plain containers are copied, so that nobody changes what a reader holds. Torch is imported where a
tensor, a dtype or a device is made, and not before. The only foreign functions that are called are
those that the user allowed with ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from .objects import (
    Array,
    DType,
    Later,
    Named,
    OddTensor,
    StorageRef,
    StoredTensor,
    Stream,
    TensorLeaf,
)
from .unpickler import PickleError

__all__ = ["Read", "build_value", "needs_torch"]

Read = Callable[[str], memoryview]
"""What returns the bytes of a storage, writable, given its key."""

_FIXED: Final = frozenset((bool, int, float, complex, str, bytes, type(None)))
_NEED_TORCH: Final = (TensorLeaf, Later, Named)


def needs_torch(value: Any) -> bool:
    """Return True if torch is needed to build a value.

    >>> needs_torch([1, {"a": Stream()}]), needs_torch((Named("torch.float32"),))
    (False, True)
    """
    if isinstance(value, _NEED_TORCH):
        return True
    if isinstance(value, Mapping):
        return any(needs_torch(k) or needs_torch(v) for k, v in value.items())
    return isinstance(value, (list, tuple, set, frozenset)) and any(map(needs_torch, value))


def build_value(value: Any, read: Read) -> Any:
    """Build what a pickle described.

    Args:
        value: Plain values and stand-ins.
        read: What reads the storages of its tensors; those that no part needs are not read.

    >>> build_value({"lr": 0.1, "seen": [1, 2]}, lambda key: memoryview(b""))
    {'lr': 0.1, 'seen': [1, 2]}

    Raises:
        PickleError: Some of it cannot be built.
    """
    try:
        return _Builder(read).build(value)
    except PickleError:
        raise
    except RecursionError:
        raise PickleError("it is nested too deeply") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PickleError(lines[0][:300]) from error


class _Builder:
    """Builds one value; what is there twice is one object there, too."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._built: dict[int, Any] = {}
        self._storages: dict[str, Any] = {}

    def build(self, value: Any) -> Any:
        if type(value) in _FIXED:
            return value
        if id(value) not in self._built:
            self._built[id(value)] = self._make(value)
        return self._built[id(value)]

    def _make(self, value: Any) -> Any:
        kind = type(value)
        if kind in _CONTAINERS:
            return kind(map(self.build, value))
        if kind in (dict, OrderedDict, Counter):
            made: dict[Any, Any] = kind()
            for key, inner in value.items():
                made[self.build(key)] = self.build(inner)
            return made
        if isinstance(value, (Array, DType)):
            return value.make()
        if isinstance(value, np.generic):
            return value
        if kind not in _MAKERS:
            raise PickleError(f"it holds a {getattr(value, 'name', kind.__name__)} as a value")
        return _MAKERS[kind](self, value)

    def stream(self, value: Stream) -> io.BytesIO:
        state = value.state if value.state is not None else (b"", 0, None)
        data, position, _ = state
        if type(data) is not bytes or type(position) is not int or not 0 <= position < 1 << 62:
            raise PickleError("it holds a BytesIO of an unknown kind")
        made = io.BytesIO(data)
        made.seek(position)
        return made

    def tensor(self, leaf: TensorLeaf) -> Any:
        import torch

        made = self._view(leaf.stored)
        if leaf.parameter:
            return torch.nn.Parameter(made, leaf.requires_grad)
        return made.requires_grad_(leaf.requires_grad)

    def _view(self, stored: StoredTensor) -> Any:
        """Return the tensor that is a view of a storage; its bounds were checked."""
        import torch

        dtype = getattr(torch, stored.dtype)
        flat = torch.empty(0, dtype=dtype)
        storage = self._storage(stored.storage)
        made = flat.set_(storage, stored.offset, stored.size, stored.stride)
        made = made.conj() if stored.conj else made
        return torch._neg_view(made) if stored.neg else made

    def _storage(self, ref: StorageRef) -> Any:
        import torch

        if ref.key not in self._storages:
            data = self._read(ref.key)
            held = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
            self._storages[ref.key] = held.untyped_storage()
        whole = self._storages[ref.key]
        part = ref.first, ref.first + ref.nbytes
        return whole if part == (0, whole.nbytes()) else whole[part[0] : part[1]]

    def named(self, value: Named) -> Any:
        import torch

        module, _, name = value.name.partition(".")
        if module != "torch" or not value.dtype or value.name.endswith("Storage"):
            raise PickleError(f"it holds {value.name} as a value")
        return getattr(torch, name)

    def later(self, value: Later) -> Any:
        import torch

        args = [self.build(arg) for arg in value.args]
        if value.target is not None:
            return self._allowed(value, args)
        return {"torch.Size": torch.Size, "torch.device": torch.device}[value.name](*args)

    def _allowed(self, value: Later, args: list[Any]) -> Any:
        """Make an object of a class that the user allowed, as Python's unpickler does."""
        target = value.target
        made = target.__new__(target, *args) if value.is_new else target(*args)
        state = self.build(value.state)
        if state is None:
            return made
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return made
        plain, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        made.__dict__.update(plain or {})
        for name, inner in (slots or {}).items():
            setattr(made, name, inner)
        return made

    def odd_tensor(self, value: OddTensor) -> Any:
        import torch

        if value.name == "meta":
            dtype, size, stride, grad = value.args
            made = torch.empty_strided(size, stride, dtype=self.named(dtype), device="meta")
            return made.requires_grad_(grad)
        args = [self.build(arg) for arg in value.args]
        if value.name == "sparse_coo":
            indices, values, size, *coalesced = args
            once = coalesced[0] is True if coalesced else None
            make = torch.sparse_coo_tensor
            return make(indices, values, size, check_invariants=True, is_coalesced=once)
        if value.name.startswith("sparse_"):
            layout = getattr(torch, value.name)
            return torch.sparse_compressed_tensor(*args[:4], layout=layout, check_invariants=True)
        if value.target is None:
            raise PickleError(f"it holds a tensor that {value.why}")
        made, state = args
        set_state: Any = torch._utils._set_obj_state
        return set_state(made.as_subclass(value.target), state)


_CONTAINERS: Final = (list, tuple, set, frozenset)
_MAKERS: Final[Mapping[type, Callable[[_Builder, Any], Any]]] = {
    bytearray: lambda _, value: bytearray(value),
    Stream: _Builder.stream,
    TensorLeaf: _Builder.tensor,
    Named: _Builder.named,
    Later: _Builder.later,
    OddTensor: _Builder.odd_tensor,
}
