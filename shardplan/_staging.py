"""The memory of snapshots: private to this process, or shared with a writer process."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any, Final, Protocol

import attrs
import torch

from ._report import LOG

__all__ = [
    "Memory",
    "PrivateMemory",
    "SharedFile",
    "SharedMemory",
    "TensorPlace",
    "map_file",
    "tensor_at",
]

_ALIGNMENT: Final = 64  # bytes: a cache line, and more than any dtype needs
_SHRINK: Final = 4  # memory is made anew when so much less would do

Key = tuple[Any, ...]
Tensors = Mapping[Key, torch.Tensor]


class Memory(Protocol):
    """Where copies of tensors are kept; each call of `take` may use the memory of the last one."""

    def take(self, like: Tensors) -> dict[Key, torch.Tensor]:
        """Return CPU tensors of the same dtypes and shapes, whose elements are undefined."""
        ...


class PrivateMemory(Memory):
    """Memory of this process; pinned for tensors of a GPU."""

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}

    def take(self, like: Tensors) -> dict[Key, torch.Tensor]:
        """Return tensors, those of the last call where key, dtype and shape are the same."""
        kept, self._kept = self._kept, {}  # what is not used again is freed
        for key, tensor in like.items():
            full = (key, tensor.dtype, tensor.shape)
            self._kept[full] = kept[full] if full in kept else _empty_like(tensor)
        return {key: tensor for (key, *_), tensor in self._kept.items()}


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    pin = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)


@attrs.frozen(eq=False)
class SharedFile:
    """Memory that another process can map, given the descriptor; see `SharedMemory`."""

    nbytes: int  # its size
    descriptor: int  # a file without a name, which goes when no process has it any more
    mapped: mmap.mmap
    address: int  # where it begins in this process
    owner: int  # the process that made it

    @classmethod
    def make(cls, nbytes: int) -> SharedFile:
        """Allocate shared memory.

        Raises:
            OSError: The system does not grant it.
        """
        descriptor = _file_of(nbytes)
        mapped = mmap.mmap(descriptor, nbytes)
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        file = cls(nbytes, descriptor, mapped, address, os.getpid())
        weakref.finalize(file, os.close, descriptor)
        return file

    def pin(self) -> None:
        """Pin the memory, so that a GPU copies into it at full speed; if it cannot, go on."""
        code = int(_cudart().cudaHostRegister(self.address, self.nbytes, 0))
        if code:
            LOG.warning("staging memory cannot be pinned (CUDA error %d): copies are slower", code)
        else:
            weakref.finalize(self, _unpin, self.mapped, self.address)


def _unpin(mapped: mmap.mmap, address: int) -> None:
    """Unpin memory, which is mapped until then."""
    _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _file_of(nbytes: int) -> int:
    """Return the descriptor of a nameless file; in memory, if the system has such files."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardplan", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, nbytes)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)  # or a lack of memory kills the process later
    except OSError as error:
        os.close(descriptor)
        text = f"cannot allocate {nbytes:,} bytes of staging memory: {error.strerror}"
        raise OSError(error.errno, text) from None
    return descriptor


@attrs.frozen
class TensorPlace:
    """A tensor in shared memory: where it begins, in bytes, and its strides, in elements."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def tensor_at(mapped: mmap.mmap, place: TensorPlace) -> torch.Tensor:
    """Return a tensor that lies in mapped memory."""
    if not all(place.shape):
        return torch.empty(place.shape, dtype=place.dtype)
    last = sum((n - 1) * s for n, s in zip(place.shape, place.stride, strict=True))
    nbytes = (last + 1) * place.dtype.itemsize
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=place.offset)
    return flat.view(place.dtype).as_strided(place.shape, place.stride)


def map_file(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map memory that another process made, and close its descriptor."""
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


class SharedMemory(Memory):
    """Memory that a writer process maps; allocated once, and again only for another size.

    >>> memory, w = SharedMemory(), torch.ones(2, 3)
    >>> memory.take({("w",): w})["w",].data_ptr() == memory.take({("w",): w})["w",].data_ptr()
    True
    """

    def __init__(self) -> None:
        self.file: SharedFile | None = None

    def take(self, like: Tensors) -> dict[Key, torch.Tensor]:
        """Return tensors, one behind the other."""
        places, end = {}, 0
        for key, tensor in like.items():
            stride = torch.empty(tensor.shape, device="meta").stride()
            places[key] = TensorPlace(end, tensor.dtype, tuple(tensor.shape), stride)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if not self._fits(max(end, 1)):
            self.file = None  # first: there may not be memory for both
            self.file = SharedFile.make(max(end, 1))
            if any(tensor.device.type == "cuda" for tensor in like.values()):
                self.file.pin()
        assert self.file is not None
        mapped = self.file.mapped
        return {key: tensor_at(mapped, place) for key, place in places.items()}

    def _fits(self, nbytes: int) -> bool:
        file = self.file
        if file is None or file.owner != os.getpid():  # of a process that forked this one
            return False
        return nbytes <= file.nbytes <= max(_SHRINK * nbytes, mmap.PAGESIZE)

    def place_of(self, tensor: torch.Tensor) -> TensorPlace | None:
        """Return where in the memory a tensor lies; None if it is somewhere else."""
        if self.file is None or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
            return None
        offset = tensor.data_ptr() - self.file.address if tensor.numel() else -1
        if not 0 <= offset < self.file.nbytes:
            return None
        return TensorPlace(offset, tensor.dtype, tuple(tensor.shape), tensor.stride())
