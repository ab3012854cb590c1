"""Copies of state dicts that training cannot change, in reused buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch

from shardplan.planning import (
    MetadataIndex,
    find_shard,
    flatten,
    held,
    is_tensor,
    unflatten,
)
from shardplan.planning.geometry import Chunk

from ._staging import Key, Memory, PrivateMemory

__all__ = ["Buffers", "LocalShards", "Snapshot", "plain"]


class Buffers:
    """Memory for snapshots, reused from one to the next; by default private, see `PrivateMemory`.

    >>> buffers, w = Buffers(), torch.ones(2)
    >>> snapshot = buffers.copy({"w": w, "seen": [1, 2]})
    >>> _ = w.zero_()
    >>> snapshot
    {'w': tensor([1., 1.]), 'seen': [1, 2]}
    """

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory or PrivateMemory()
        self.nbytes = 0  # of the last copy

    def copy(self, sd: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return a complete copy of a state dict, which overwrites the previous one."""
        snapshot = self.begin(sd)
        snapshot.finish()
        return snapshot.sd

    def begin(self, sd: Mapping[Any, Any]) -> Snapshot:
        """Copy all values but the tensors, and have other devices begin to send theirs.

        `Snapshot.finish` does the rest.
        """
        flat, paths = flatten(sd)
        parts = {name: _parts(name, value) for name, value in flat.items()}
        tensors = {key: one for part in parts.values() for key, one in part.tensors.items()}
        keys = _copied_as(tensors)
        sources = {key: tensors[key] for key in keys.values()}
        targets = self.memory.take(sources)
        self.nbytes = sum(tensor.nbytes for tensor in targets.values())
        copies = {key: targets[keys[key]] if key in keys else one for key, one in tensors.items()}
        made = {n: part.make([copies[key] for key in part.tensors]) for n, part in parts.items()}
        moves = _sending({key: (tensor, targets[key]) for key, tensor in sources.items()})
        return Snapshot(unflatten(made, paths, like=sd), moves)


@attrs.frozen(eq=False)
class Snapshot:
    """A copy of a state dict; until `finish` returns, the elements of its tensors are undefined."""

    sd: Mapping[Any, Any]
    _moves: list[_Move]

    def finish(self) -> list[str]:
        """Copy what is not copied yet, and let go of the originals, which may be temporary.

        Returns the names of tensors that changed since the copy began, as far as torch counts that.
        """
        for move in self._moves:
            move.finish()
        changed = [move.name for move in self._moves if move.version != _version(move.source)]
        self._moves.clear()
        return changed


@attrs.frozen(eq=False)
class _Move:
    """A tensor to be copied; ``stream``, if any, already does so."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    version: int
    stream: torch.Stream | None

    def finish(self) -> None:
        if self.stream is None:
            self.target.copy_(self.source)
        else:
            self.stream.synchronize()


def _sending(pairs: Mapping[Key, tuple[torch.Tensor, torch.Tensor]]) -> list[_Move]:
    """Begin to copy tensors from accelerators, on a stream beside that of training."""
    streams: dict[torch.device, torch.Stream] = {}
    moves = []
    for key, (source, target) in pairs.items():
        stream = None
        if source.device.type != "cpu" and torch.accelerator.is_available():
            stream = streams.get(source.device) or _side_stream(source.device)
            streams[source.device] = stream
            with stream:
                target.copy_(source, non_blocking=True)
        moves.append(_Move(key[0], source, target, _version(source), stream))
    return moves


def _side_stream(device: torch.device) -> torch.Stream:
    """Return a new stream, which waits for the work that the device has been given so far."""
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


def _version(tensor: torch.Tensor) -> int:
    """Return the number of changes of a tensor, as torch counts them; 0 if it does not."""
    return 0 if tensor.is_inference() else tensor._version


def _copied_as(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, Key]:
    """Map tensors to the first one with the same memory; those on the meta device to nothing."""
    first: dict[tuple[Any, ...], Key] = {}
    return {
        key: first.setdefault(_memory_of(tensor) or key, key)
        for key, tensor in tensors.items()
        if tensor.device.type != "meta"  # refused when they are saved
    }


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a key of a tensor's memory; None if it has none."""
    if type(tensor) is not torch.Tensor or not tensor.numel() or not tensor.data_ptr():
        return None  # a subclass may use its memory differently
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, *flags)


# The tensors in a value


@attrs.frozen(eq=False)
class _Parts:
    """The tensors in a value, by key, and what makes the value's copy of their copies."""

    tensors: Mapping[Key, torch.Tensor]
    make: Callable[[list[torch.Tensor]], Any]


def _parts(name: str, value: Any) -> _Parts:
    if isinstance(value, np.ndarray) and is_tensor(value):
        array = np.ascontiguousarray(value if value.flags.writeable else value.copy())
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
        return _Parts({(name,): flat}, partial(_array, value))
    if type(value).__name__ == "DTensor" and hasattr(value, "_spec"):
        return _Parts({(name,): value._local_tensor.detach()}, partial(_dtensor, value))
    if is_tensor(value) and _has_chunks(value):
        shards = _shards(name, value)
        return _Parts(
            {(name, chunk.offsets): one for chunk, one in shards.pairs()},
            lambda copies: attrs.evolve(shards, shards=tuple(copies)),
        )
    if isinstance(value, torch.Tensor) and is_tensor(value):
        return _Parts({(name,): value.detach()}, partial(_tensor, value))
    copied = copy.deepcopy(value)
    return _Parts({}, lambda _: copied)


def _has_chunks(value: Any) -> bool:
    return hasattr(value, "local_shards") or hasattr(value, "__create_chunk_list__")


def _array(like: np.ndarray[Any, Any], copies: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = copies[0].numpy().view(like.dtype).reshape(like.shape)
    return array


def _dtensor(like: Any, copies: list[torch.Tensor]) -> Any:
    return type(like)(copies[0], like._spec, requires_grad=like.requires_grad)


def _tensor(like: torch.Tensor, copies: list[torch.Tensor]) -> torch.Tensor:
    return copies[0].detach().requires_grad_() if like.requires_grad else copies[0]


def _shards(name: str, value: Any) -> LocalShards:
    """Return the shards of a tensor on this rank; they are not copied."""
    here = held(name, value)
    with torch.no_grad():
        shards = tuple(
            torch.as_tensor(find_shard({name: value}, MetadataIndex(name, chunk.offsets))).detach()
            for chunk in here.chunks
        )
    grad = bool(getattr(value, "requires_grad", False))
    return LocalShards(here.size, value.dtype, grad, here.chunks, shards)


@attrs.frozen(eq=False)
class LocalShards:
    """The shards of a tensor that this rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    _chunks: Sequence[Chunk]
    _shards: Sequence[torch.Tensor]

    @property
    def is_meta(self) -> bool:
        """Whether all shards are on the meta device."""
        return bool(self._shards) and all(shard.is_meta for shard in self._shards)

    def pairs(self) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Return each chunk with its elements."""
        return zip(self._chunks, self._shards, strict=True)

    def __create_chunk_list__(self) -> Sequence[Chunk]:
        """Return the local chunks."""
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of one chunk."""
        starts = [chunk.offsets for chunk in self._chunks]
        return self._shards[starts.index(tuple(index.offset or ()))]


def plain(sd: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a state dict flat, with `LocalShards` for DTensors, which need their mesh.

    >>> plain({"model": {"w": 1}})
    {'model.w': 1}
    """
    flat, _ = flatten(sd)
    return {
        name: _shards(name, value) if hasattr(value, "placements") else value
        for name, value in flat.items()
    }
