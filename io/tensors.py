"""Tensor memory as bytes: views of it where possible, copies into and out of it.

The only module that knows how torch lays out a tensor. Numpy arrays are handled as torch tensors
that share their memory. Where torch is not installed, reading fills arrays instead, of the dtypes
of numpy and of the package ml_dtypes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from shardplan.planning import dtype_name

from .clib import c_function
from .errors import ValueRefusedError
from .optional import HAS_TORCH, torch

Bytes = npt.NDArray[np.uint8]


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch {torch.__version__} has no dtype {name}; a newer one may have")
    return dtype


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of that name: numpy's own, or that of the package ml_dtypes."""
    if name in np.sctypeDict:
        return np.dtype(name)
    try:
        found: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), name))
        return found
    except (ModuleNotFoundError, AttributeError):
        raise TypeError(
            f"numpy has no dtype {name}; pip install ml_dtypes, or 'shardplan[torch]'"
        ) from None


def own_dtype(name: str) -> Any:
    """Return torch's dtype of that name, or numpy's where torch is not installed."""
    return torch_dtype(name) if HAS_TORCH else numpy_dtype(name)


_LARGE_PAGE: Final = 2 << 20
# Dtypes of each width that torch can always copy, whatever the bits mean.
_RAW: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
# Dtypes that Python's memory views support.
_NUMPY: Final = frozenset(
    torch_dtype(name)
    for name in ("uint8", "int8", "int16", "int32", "int64", "float32", "float64")
    if HAS_TORCH
)


def _is_array(value: object) -> TypeGuard[npt.NDArray[Any]]:
    """Return whether a tensor to read into is an array, for want of torch."""
    return isinstance(value, np.ndarray)


def _like_tensor(array: Any) -> torch.Tensor:
    """Return an array for callers that treat it as a tensor."""
    made: torch.Tensor = array
    return made


def refuse_dtypes(dtypes: Mapping[str, str]) -> None:
    """Refuse tensors, given the dtype of each, that cannot be made here."""
    refused = {}
    for name, dtype in dtypes.items():
        try:
            own_dtype(dtype)
        except TypeError as error:
            refused[name] = f"cannot be read here: {error}"
    if refused:
        raise ValueRefusedError(refused)


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
    """Return a new tensor with uninitialised elements; an array where torch is not installed."""
    if not HAS_TORCH:
        if str(device) != "cpu":
            raise ModuleNotFoundError(
                f"the device {device} needs torch: pip install 'shardplan[torch]'", name="torch"
            )
        return _like_tensor(np.empty(tuple(shape), numpy_dtype(dtype)))
    return in_large_pages(torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=device))


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Ask the system for large pages for a new tensor's memory, and return the tensor.

    Threads that read into it bring the pages; small ones take several times as long.
    """
    if tensor.is_cpu and tensor.nbytes >= 2 * _LARGE_PAGE:
        low = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        high = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if advise := c_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int):
            advise(low, high - low, mmap.MADV_HUGEPAGE)  # no harm where there are none
    return tensor


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
            tensor = tensor[(slice(None),) * axis + (slice(offset, offset + size),)]
    return tensor


def flat_memory(tensor: torch.Tensor) -> memoryview | None:
    """Return a tensor's elements as flat bytes without copying; None if not contiguous."""
    if _is_array(tensor):
        return tensor.reshape(-1).view(np.uint8).data if tensor.flags.c_contiguous else None
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
    if _is_array(tensor):
        return tensor.flags.c_contiguous and tensor.dtype == numpy_dtype(dtype)
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
    tensor = _raw(tensor).to("cpu")
    if not tensor.is_contiguous():
        copied = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy_elements(copied, tensor)
        tensor = copied
    view = flat_memory(tensor)
    assert view is not None
    return view


def as_elements(
    data: Bytes,
    dtype: str,
    sizes: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    like: torch.Tensor,
) -> torch.Tensor:
    """Return bytes as elements of some sizes, of the same library as ``like``.

    They are row-major, unless strides say otherwise.
    """
    if _is_array(like):
        found = data.view(numpy_dtype(dtype))
        if strides is not None:
            steps = [step * found.itemsize for step in strides[: len(sizes)]]
            return _like_tensor(np.lib.stride_tricks.as_strided(found, tuple(sizes), steps))
        return _like_tensor(found.reshape(tuple(sizes)))
    source = torch.from_numpy(data).view(torch_dtype(dtype))
    if strides is None:
        return source.view(tuple(sizes))
    return source.as_strided(tuple(sizes), tuple(strides[: len(sizes)]))


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another one of the same shape, casting elements."""
    if _is_array(target):
        target[...] = source
        return
    lazily = target.is_conj() or target.is_neg() or source.is_conj() or source.is_neg()
    if source.dtype == target.dtype and not lazily:
        target, source = _raw(target), _raw(source)
        if source.is_cpu and target.is_cpu and source.numel() >= _TURNED:
            _copy_planes(target, source)
            return
    target.copy_(source)


_TURNED: Final = 1 << 14  # elements from which on it pays to copy in two steps
_BAND: Final = 1 << 21  # bytes that stay in the cache between two steps


def _copy_planes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements; where the two tensors lie along different axes, a band of these at a time.

    Torch transposes fast only what it lays out anew, without gaps; otherwise it is several times
    slower than memory.
    """
    along, into = _fastest(source), _fastest(target)
    rest = [axis for axis in range(source.ndim) if axis not in (along, into)]
    if along == into or source.shape[along] * source.shape[into] < _TURNED:
        target.copy_(source)
    elif rest:
        for one, other in zip(target.unbind(rest[0]), source.unbind(rest[0]), strict=True):
            _copy_planes(one, other)
    else:
        rows, length = source.movedim(into, 0), source.shape[along]
        columns = target.movedim(along, 0)
        height = max(_BAND // (length * source.itemsize), 16)
        for low in range(0, len(rows), height):
            band = rows[low : low + height].contiguous()
            turned = torch.empty((length, len(band)), dtype=band.dtype).copy_(band.T)
            columns[:, low : low + height].copy_(turned)


def _fastest(tensor: torch.Tensor) -> int:
    """Return the axis along which elements are closest in memory."""
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return min(enumerate(axes), key=lambda axis: (axis[1][1] == 1, axis[1][0], -axis[0]))[0]


def permute(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return a view with its axes in another order."""
    return _like_tensor(tensor.transpose(axes)) if _is_array(tensor) else tensor.permute(*axes)


def flip_axes(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return a copy with some axes reversed, for any dtype."""
    if _is_array(tensor):
        return _like_tensor(np.flip(tensor, tuple(axes)).copy())
    return _raw(tensor).flip(tuple(axes)).view(tensor.dtype)


def to_numpy(tensor: torch.Tensor, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return a tensor, or an array, as an array, cast to ``dtype`` if given.

    Dtypes that numpy lacks become those of the package ml_dtypes, if it is installed.
    """
    if _is_array(tensor):
        return np.asarray(tensor, dtype)
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
    return tensor.view(torch_dtype(_RAW[tensor.dtype.itemsize]))


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


def direct_bytes(tensor: torch.Tensor, dtype: str) -> int:
    """Return how long the runs of a tensor's memory are that can be read into; or 0."""
    if _is_array(tensor) or tensor.device.type != "cpu" or not same_dtype(tensor, dtype):
        return 0
    return 0 if tensor.is_conj() or tensor.is_neg() else run_bytes(tensor)


def memory_runs(tensor: torch.Tensor, length: int) -> list[memoryview]:
    """Return a tensor's elements as views of ``length`` bytes each, row-major, without copying.

    ``length`` is the size of some last axes that are contiguous; see `run_bytes`.

    >>> columns = torch.arange(6, dtype=torch.uint8).reshape(2, 3)[:, 1:]
    >>> [run.tolist() for run in memory_runs(columns, 2)]
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
