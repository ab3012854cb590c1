"""A copy of a state dict, out of training's reach, in buffers that are used again."""

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
        """How many bytes the last copy has in them."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def copy(self, sd: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return a copy of a state dict, complete when this returns.

        The copy before it, made by the same buffers, is overwritten.
        """
        flat, paths = flatten(sd)
        work = _Copying(self._kept)
        copies = {name: work.leaf(name, value) for name, value in flat.items()}
        work.finish()
        self._kept = work.used  # what is not needed any more is let go
        return unflatten(copies, paths)


class _Copying:
    """One snapshot in the making."""

    def __init__(self, kept: Mapping[tuple[Any, ...], torch.Tensor]) -> None:
        self._kept = kept
        self.used: dict[tuple[Any, ...], torch.Tensor] = {}
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._seen: dict[tuple[Any, ...], torch.Tensor] = {}

    def leaf(self, name: str, value: Any) -> Any:
        """Return a stand-in for one value, to be filled by `finish`."""
        if not is_tensor(value):
            return copy.deepcopy(value)
        if isinstance(value, np.ndarray):
            return value.copy()
        if type(value).__name__ == "DTensor" and hasattr(value, "_spec"):
            local = self._buffer((name,), value._local_tensor)
            return type(value)(local, value._spec, requires_grad=value.requires_grad)
        if hasattr(value, "local_shards") or hasattr(value, "__create_chunk_list__"):
            return self._shards(name, value)
        if isinstance(value, torch.Tensor):
            copied = self._buffer((name,), value)
            return copied.detach().requires_grad_() if value.requires_grad else copied
        return copy.deepcopy(value)

    def _shards(self, name: str, value: Any) -> Shards:
        here = held(name, value)
        shards = []
        for chunk in here.chunks:
            shard = find_shard({name: value}, MetadataIndex(name, chunk.offsets))
            shards.append(self._buffer((name, chunk.offsets), torch.as_tensor(shard)))
        grad = bool(getattr(value, "requires_grad", False))
        return Shards(here.size, value.dtype, grad, here.chunks, tuple(shards))

    def _buffer(self, key: tuple[Any, ...], source: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor's elements; tensors that are the same memory get the same."""
        source = source.detach()
        if source.device.type == "meta":
            return source  # refused when it is saved
        same = _memory_of(source)
        if same is not None and same in self._seen:
            return self._seen[same]
        key = (*key, source.dtype, tuple(source.shape))
        target = self._kept.get(key)
        if target is None:
            pin = source.device.type == "cuda"
            target = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pin)
        self.used[key] = target
        if same is not None:
            self._seen[same] = target
        self._sources.append(source)
        self._targets.append(target)
        return target

    def finish(self) -> None:
        """Copy everything, and wait for it."""
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source, non_blocking=True)
        for device in {source.device for source in self._sources}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what tells whether two tensors are the same elements; None if nothing does."""
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
        """Say which chunks are here."""
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of one chunk."""
        starts = [chunk.offsets for chunk in self._chunks]
        return self._shards[starts.index(tuple(index.offset or ()))]
