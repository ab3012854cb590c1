"""Copies of state dicts that training cannot change, in reused buffers."""

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
    """Memory for snapshots, reused from one to the next; pinned if tensors are on a GPU.

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
        """Return a complete copy of a state dict, which overwrites the previous one."""
        flat, paths = flatten(sd)
        copying = _Copying(self._kept)
        copies = {name: copying.leaf(name, value) for name, value in flat.items()}
        for device in copying.devices:
            torch.accelerator.synchronize(device)
        self._kept = copying.used  # frees unused memory
        return unflatten(copies, paths, like=sd)


@attrs.frozen(eq=False)
class _Copying:
    """A snapshot in progress.

    ``kept`` is the memory of the previous snapshot, by name, dtype and shape; ``seen`` has finished
    copies by the memory of the original.
    """

    kept: Mapping[tuple[Any, ...], torch.Tensor]
    used: dict[tuple[Any, ...], torch.Tensor] = attrs.field(factory=dict)
    seen: dict[tuple[Any, ...], torch.Tensor] = attrs.field(factory=dict)
    devices: set[torch.device] = attrs.field(factory=set)

    def leaf(self, name: str, value: Any) -> Any:
        """Copy one value; from other devices than the CPU, asynchronously."""
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
        """Copy a tensor; tensors that share memory become one copy."""
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
    """Return a key of a tensor's memory; None if it has none."""
    if type(tensor) is not torch.Tensor or not tensor.numel() or not tensor.data_ptr():
        return None  # a subclass may use its memory differently
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, *flags)


@attrs.frozen(eq=False)
class Shards:
    """Copies of the shards of a tensor that defines its own chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    _chunks: Sequence[Chunk]
    _shards: Sequence[torch.Tensor]

    @property
    def is_meta(self) -> bool:
        """Whether all shards are on the meta device."""
        return bool(self._shards) and all(shard.is_meta for shard in self._shards)

    def __create_chunk_list__(self) -> Sequence[Chunk]:
        """Return the local chunks."""
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of one chunk."""
        starts = [chunk.offsets for chunk in self._chunks]
        return self._shards[starts.index(tuple(index.offset or ()))]
