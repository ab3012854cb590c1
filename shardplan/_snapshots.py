"""Copies of state dicts that training cannot change, in buffers that are used again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from shardplan.planning import MetadataIndex, find_shard, flatten, held, is_tensor, unflatten
from shardplan.planning.geometry import Chunk

__all__ = ["Buffers"]


class Buffers:
    """Memory for snapshots, kept from one to the next. On CPUs that feed GPUs it is pinned.

    >>> buffers, w = Buffers(), torch.ones(2)
    >>> snapshot = buffers.copy({"w": w, "seen": [1, 2]})
    >>> _ = w.zero_()
    >>> snapshot
    {'w': tensor([1., 1.]), 'seen': [1, 2]}
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the last copy."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def copy(self, sd: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return a copy of a state dict, complete when this returns.

        The copy before it, made by the same buffers, is overwritten.
        """
        flat, paths = flatten(sd)
        copying = _Copying(self._kept)
        copies = {name: copying.leaf(name, value) for name, value in flat.items()}
        for device in copying.devices:
            torch.accelerator.synchronize(device)
        self._kept = copying.used  # memory that is not needed any more is freed
        return unflatten(copies, paths)


@attrs.frozen(eq=False)
class _Copying:
    """A snapshot in the making.

    Attributes:
        kept: Memory of the snapshot before, by name, dtype and shape.
        used: The memory of this one.
        seen: The copies of what was copied already, by its memory.
        devices: What to wait for.
    """

    kept: Mapping[tuple[Any, ...], torch.Tensor]
    used: dict[tuple[Any, ...], torch.Tensor] = attrs.field(factory=dict)
    seen: dict[tuple[Any, ...], torch.Tensor] = attrs.field(factory=dict)
    devices: set[torch.device] = attrs.field(factory=set)

    def leaf(self, name: str, value: Any) -> Any:
        """Copy one value; on other devices than the CPU, begin to."""
        if not is_tensor(value):
            return copy.deepcopy(value)
        if isinstance(value, np.ndarray):
            return value.copy()
        if type(value).__name__ == "DTensor" and hasattr(value, "_spec"):
            local = self._copy((name,), value._local_tensor)
            return type(value)(local, value._spec, requires_grad=value.requires_grad)
        if hasattr(value, "local_shards") or hasattr(value, "__create_chunk_list__"):
            return self._shards(name, value)
        if isinstance(value, torch.Tensor):
            copied = self._copy((name,), value)
            return copied.detach().requires_grad_() if value.requires_grad else copied
        return copy.deepcopy(value)

    def _shards(self, name: str, value: Any) -> Shards:
        here = held(name, value)
        shards = []
        for chunk in here.chunks:
            shard = find_shard({name: value}, MetadataIndex(name, chunk.offsets))
            shards.append(self._copy((name, chunk.offsets), torch.as_tensor(shard)))
        grad = bool(getattr(value, "requires_grad", False))
        return Shards(here.size, value.dtype, grad, here.chunks, tuple(shards))

    def _copy(self, key: tuple[Any, ...], source: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; tensors that are the same memory become one copy."""
        source = source.detach()
        if source.device.type == "meta":
            return source  # refused when it is saved
        same = _memory_of(source)
        if same is not None and same in self.seen:
            return self.seen[same]
        key = (*key, source.dtype, tuple(source.shape))
        target = self.kept.get(key)
        if target is None:
            pin = source.device.type == "cuda"
            target = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pin)
        self.used[key] = target
        if same is not None:
            self.seen[same] = target
        target.copy_(source, non_blocking=True)
        if source.device.type != "cpu":
            self.devices.add(source.device)
        return target


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key of the elements of a tensor in memory; None if there is none."""
    if type(tensor) is not torch.Tensor or not tensor.numel() or not tensor.data_ptr():
        return None  # a subclass may mean something else by its memory
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, *flags)


@attrs.frozen(eq=False)
class Shards:
    """The shards of a tensor that knows its own chunks, copied."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    _chunks: Sequence[Chunk]
    _shards: Sequence[torch.Tensor]

    @property
    def is_meta(self) -> bool:
        """Whether no shard has elements."""
        return bool(self._shards) and all(shard.is_meta for shard in self._shards)

    def __create_chunk_list__(self) -> Sequence[Chunk]:
        """Return the chunks that are here."""
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of one chunk."""
        starts = [chunk.offsets for chunk in self._chunks]
        return self._shards[starts.index(tuple(index.offset or ()))]
