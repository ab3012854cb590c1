"""Tensor memory as bytes: views of it where possible, copies into and out of it.

The only module that knows how torch lays out a tensor. Numpy arrays are handled as torch tensors
that share their memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shardplan.planning import dtype_name

Bytes = npt.NDArray[np.uint8]

# Dtypes of each width that torch can always copy, whatever the bits mean.
_RAW: Final[dict[int, torch.dtype]] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
# Dtypes that Python's memory views support.
_NUMPY: Final = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
)


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {name}; a newer one may have")
    return dtype


def as_tensor(value: Any, *, writable: bool = False) -> torch.Tensor:
    """Return a torch tensor that shares a value's memory; if not ``writable``, maybe a copy."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            raise TypeError("is on the meta device and has no elements; materialise it first")
        own = type(value) is torch.Tensor and not value.requires_grad
        return value if own else value.detach()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"is a {type(value).__qualname__}, which holds no elements")
    if can_share(value) and (value.flags.writeable or not writable):
        return torch.from_numpy(value if value.flags.writeable else np.asarray(_Unlocked(value)))
    if writable:
        raise TypeError(
            "is a numpy array that is read-only, reversed, of foreign byte order, or whose "
            "elements are not aligned, like the fields of a record"
        )
    return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))


def can_share(value: npt.NDArray[Any]) -> bool:
    """Return whether a tensor can share an array's memory."""
    return value.dtype.isnative and all(s >= 0 and s % value.itemsize == 0 for s in value.strides)


class _Unlocked:
    """A read-only array that claims to be writable: torch would warn of a read-only one."""

    def __init__(self, value: npt.NDArray[Any]) -> None:
        interface = value.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._value = value  # keeps the memory alive


def empty_tensor(shape: Sequence[int], dtype: str, device: Any = "cpu") -> torch.Tensor:
    """Return a new tensor with uninitialised elements."""
    return torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=device)


def block_of_memory(nbytes: int) -> Bytes:
    """Return memory that goes back to the system as soon as it is not used any more.

    `malloc` may keep freed memory, for each thread: with blocks of many megabytes, that is several
    times what is in use.
    """
    own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1), flags=own), np.uint8)[:nbytes]


@cache
def can_cast(source: str, target: str) -> bool:
    """Return whether torch can convert one dtype into another."""
    if source == target:
        return True
    try:
        raw = torch.zeros(16, dtype=torch.uint8).view(torch_dtype(source))
        raw.to(torch_dtype(target))
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def box_view(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, sharing its memory (surplus axes of the box are ignored)."""
    box = zip(offsets, sizes, tensor.shape, strict=False)
    for axis, (offset, size, extent) in enumerate(box):
        if size != extent:
            tensor = tensor.narrow(axis, offset, size)
    return tensor


def flat_memory(tensor: torch.Tensor) -> memoryview | None:
    """Return a tensor's elements as flat bytes without copying; None if not contiguous."""
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None  # conjugated or negated lazily: memory holds other values
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype not in _NUMPY:
        tensor = _raw(tensor)
        if tensor.dtype not in _NUMPY:
            flat = tensor.as_strided((tensor.numel(),), (1,))  # an axis of one has any stride
            return flat.view(torch.uint8).numpy().data
    return tensor.numpy().data.cast("B")


def is_plain(tensor: torch.Tensor, dtype: str) -> bool:
    """Return whether a tensor's memory is its elements of that dtype, row-major."""
    return (
        tensor.dtype == torch_dtype(dtype)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def tensor_bytes(tensor: torch.Tensor, dtype: str) -> memoryview:
    """Return a tensor's elements, cast to ``dtype``, row-major, as bytes; copies if necessary."""
    target = torch_dtype(dtype)
    if tensor.dtype != target:
        tensor = tensor.resolve_conj().resolve_neg().to(target)
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = _raw(tensor).to("cpu").contiguous()
    view = flat_memory(tensor)
    assert view is not None
    return view


def fill_from_bytes(
    tensor: torch.Tensor, data: Bytes, dtype: str, strides: Sequence[int] | None = None
) -> None:
    """Fill a tensor from bytes that hold elements of ``dtype``, casting them."""
    if not data.size:
        return
    source = torch.from_numpy(data).view(torch_dtype(dtype))
    if strides is None:
        source = source.reshape(tensor.shape)
    else:
        source = source.as_strided(tensor.shape, tuple(strides[: tensor.ndim]))
    if source.dtype == tensor.dtype and not (tensor.is_conj() or tensor.is_neg()):
        _raw(tensor).copy_(_raw(source))
    else:
        tensor.copy_(source)


def flip_axes(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return a copy with some axes reversed, for any dtype."""
    return _raw(tensor).flip(tuple(axes)).view(tensor.dtype)


def to_numpy(tensor: torch.Tensor, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return a tensor as an array, cast to ``dtype`` if given.

    Dtypes that numpy lacks become those of the package ml_dtypes, if it is installed.
    """
    try:
        return np.asarray(tensor.numpy(), dtype)
    except TypeError:
        name = dtype_name(tensor.dtype)
    if dtype is not None:
        wide = torch.complex64 if tensor.dtype.is_complex else torch.float32
        if can_cast(name, dtype_name(wide)):  # which holds all values of dtypes that numpy lacks
            return np.asarray(tensor.to(wide).numpy(), dtype)
    try:
        return _raw(tensor).numpy().view(getattr(import_module("ml_dtypes"), name))
    except (ImportError, AttributeError):
        raise TypeError(
            f"is {name}, which numpy does not have; read it as a torch tensor, with [...], or ask "
            f'for "{"complex64" if tensor.dtype.is_complex else "float32"}", or install ml_dtypes'
        ) from None


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a dtype of the same width that torch can copy."""
    return tensor.view(_RAW[tensor.dtype.itemsize])


def same_dtype(tensor: torch.Tensor, dtype: str) -> bool:
    """Return whether a tensor has that dtype."""
    return dtype_name(tensor.dtype) == dtype


def run_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor are contiguous, counted from its last axis."""
    run = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size != 1 and stride != run:
            break
        run *= size
    return run * tensor.dtype.itemsize


def runs(tensor: torch.Tensor, length: int) -> list[memoryview]:
    """Return a tensor's elements as views of ``length`` bytes each, row-major, without copying.

    ``length`` is the size of some last axes that are contiguous; see `run_bytes`.

    >>> [r.tolist() for r in runs(torch.arange(6, dtype=torch.uint8).reshape(2, 3)[:, 1:], 2)]
    [[1, 2], [4, 5]]
    """
    width = tensor.dtype.itemsize
    starts = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        starts = (starts[:, None] + np.arange(size) * (stride * width)).reshape(-1)
        if len(starts) * length == tensor.numel() * width:
            break
    span = int(starts.max()) + length
    whole = flat_memory(tensor.as_strided((span // width,), (1,)))
    assert whole is not None
    return [whole[start : start + length] for start in starts.tolist()]
