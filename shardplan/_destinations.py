"""Where do reads go? The memory of a state dict's tensors, checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from shardplan.io import ValueRefusedError, as_tensor, memory, window
from shardplan.io.execute import Reader, boxes_of
from shardplan.planning import LoadItemType, TensorMetadata, shard_finder
from shardplan.planning.columns import Ints, ReadItems, column
from shardplan.planning.storage import find_chunks

from ._checkpoint import SavedTensor
from ._state import PerRank, State

__all__ = ["destinations", "refuse_fixed", "refuse_shared"]

_WORK: Final = 100_000  # how long to look for an element that two views have in common
_PAIRS: Final = 100_000  # views that lie in each other's way and are looked at

_Key = tuple[int, tuple[int, ...]]
_Shards = dict[_Key, torch.Tensor]


def destinations(
    flat: Mapping[str, Any], items: ReadItems, reader: Reader | None = None
) -> Callable[[int], torch.Tensor]:
    """Return what gives the box of the state dict that a read fills, having checked them all.

    Args:
        flat: The state dict, flattened.
        items: The reads.
        reader: The checkpoint, which tells whether tensors that share memory were saved alike.

    Raises:
        ValueRefusedError: Some tensors cannot be filled; all of them are named.
    """
    with torch.no_grad():  # so that DTensors give their local tensors as they are
        keys, shards, refused = _shards(flat, items)
    refused |= {
        items.names[dest]: "has elements that share memory, as expand() makes them, and cannot "
        "hold what was saved; make it contiguous first"
        for (dest, _), shard in shards.items()
        if _is_folded(shard)
    }
    if refused:
        raise ValueRefusedError(refused)
    if reader is not None:
        _refuse_shared(reader, items, keys, shards)
    offsets, lengths = items.dest_offsets.tolist(), items.lengths.tolist()
    return lambda row: window(shards[keys[row]], offsets[row], lengths[row])


def refuse_shared(flat: Mapping[str, Any], items: ReadItems, reader: Reader) -> None:
    """Refuse tensors that share memory, but were saved with different values.

    Raises:
        ValueRefusedError: There are such tensors; each is named with the other one.
    """
    with torch.no_grad():
        keys, shards, _ = _shards(flat, items)
    _refuse_shared(reader, items, keys, shards)


def refuse_fixed(sd: State, paths: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse to replace values in containers that cannot change.

    Args:
        sd: The state dict; objects in it may keep their own state.
        paths: The way to each value; see `flatten`.
        names: The values that are to be replaced.

    >>> from types import MappingProxyType
    >>> from shardplan.planning import flatten
    >>> fixed = MappingProxyType({"step": 0})
    >>> refuse_fixed(fixed, flatten(fixed)[1], ["step"])
    Traceback (most recent call last):
    shardplan.io.errors.ValueRefusedError: `step` lies in a mappingproxy, which cannot change; ...

    Raises:
        ValueRefusedError: There are such containers; all values in them are named.
    """
    refused = {}
    for name in names:
        holder: Any = sd
        node: Any = sd
        for kind, key in paths[name]:
            if isinstance(node, PerRank):
                break  # another takes its place
            if not isinstance(node, (Mapping, list, tuple)):
                holder = {}  # it keeps its own state, and is given all of it
                break
            if kind != "tuple":  # tuples are made anew
                holder = node
            node = node[key]
        if not hasattr(holder, "__setitem__"):
            kind = type(holder).__name__
            refused[name] = f"lies in a {kind}, which cannot change; pass a dict"
    if refused:
        raise ValueRefusedError(refused)


def _shards(
    flat: Mapping[str, Any], items: ReadItems
) -> tuple[list[_Key], _Shards, dict[str, str]]:
    """Return the shard of each read as a key, the shards by key, and what cannot be filled."""
    shards: _Shards = {}
    refused: dict[str, str] = {}
    find = shard_finder(flat)
    keys = list(zip(items.dest.tolist(), map(tuple, items.dest_anchor.tolist()), strict=True))
    for row in np.flatnonzero(items.type == LoadItemType.TENSOR.value).tolist():
        key = keys[row]
        if key not in shards:
            name, anchor = items.names[key[0]], key[1][: items.ndim[row]]
            try:
                shards[key] = as_tensor(find(name, anchor), writable=True)
            except TypeError as error:
                refused[name] = str(error)
    return keys, shards, refused


def _is_folded(tensor: torch.Tensor) -> bool:
    """Tell whether elements of a tensor share memory.

    >>> _is_folded(torch.zeros(1).expand(3)), _is_folded(torch.zeros(4, 3)[::2, 1:].T)
    (True, False)
    >>> _is_folded(torch.zeros(9).as_strided((4, 3), (2, 1)))
    True
    """
    if tensor.is_contiguous() or not tensor.numel():
        return False
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 0  # from the first element to the last, along the axes so far
    for stride, size in sorted((stride, size) for stride, size in pairs if size > 1):
        if stride <= reach:
            return stride == 0 or _is_folded_somehow(tensor)
        reach += stride * (size - 1)
    return False


def _is_folded_somehow(tensor: torch.Tensor) -> bool:
    """Compare the places of all elements; those of strides that interleave may all differ."""
    places = np.zeros(1, np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return len(np.unique(places)) < len(places)


def _refuse_shared(reader: Reader, items: ReadItems, keys: list[_Key], shards: _Shards) -> None:
    refused: dict[str, str] = {}
    rows: dict[_Key, list[int]] = {}
    for a, b in _meeting(shards):
        if not rows:
            for row, key in enumerate(keys):
                rows.setdefault(key, []).append(row)
        if not _alike(reader, items, (shards[a], rows[a]), (shards[b], rows[b])):
            one, other = items.names[a[0]], items.names[b[0]]
            refused[one] = (
                f"shares memory with `{other}`, and they were saved with different values; load "
                "one of them, or give each its own memory"
            )
    if refused:
        raise ValueRefusedError(refused)


def _meeting(shards: _Shards) -> Iterator[tuple[_Key, _Key]]:
    """Yield the shards that have elements in common, in pairs."""
    by_device: dict[torch.device, list[tuple[_Key, torch.Tensor]]] = {}
    for key, shard in shards.items():
        if shard.numel():
            by_device.setdefault(shard.device, []).append((key, shard))
    for found in by_device.values():
        start = column([shard.data_ptr() for _, shard in found])
        end = start + column([_reach(shard) for _, shard in found])
        order = np.argsort(start, kind="stable")
        late = start[order][1:] < np.maximum.accumulate(end[order])[:-1]
        if late.any():
            yield from _pairs(found, start, end, order)


def _reach(tensor: torch.Tensor) -> int:
    """Return how many bytes it is from a tensor's first element past its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return (1 + sum(stride * (n - 1) for stride, n in pairs)) * tensor.dtype.itemsize


def _pairs(
    found: Sequence[tuple[_Key, torch.Tensor]], start: Ints, end: Ints, order: Ints
) -> Iterator[tuple[_Key, _Key]]:
    """Look, in order of place, at all that lie in each other's way."""
    active: list[int] = []
    looked = 0
    for one in order.tolist():
        active = [other for other in active if end[other] > start[one]]
        for other in active:
            looked += 1
            if looked <= _PAIRS and _share(found[other][1], found[one][1]):
                yield found[other][0], found[one][0]
        active.append(one)


class _Place:
    """A tensor's memory, as numpy sees it: looked at, never read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        width = tensor.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": f"|V{width}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * width for stride in tensor.stride()),
        }


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    if _layout(a) == _layout(b):
        return True
    try:
        work: Any = _WORK
        return np.shares_memory(np.asarray(_Place(a)), np.asarray(_Place(b)), max_work=work)
    except np.exceptions.TooHardError:
        return False  # nobody is refused on suspicion


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


_Side = tuple[torch.Tensor, list[int]]


def _alike(reader: Reader, items: ReadItems, a: _Side, b: _Side) -> bool:
    """Tell whether two shards of the same memory are given the same elements."""
    if _layout(a[0]) != _layout(b[0]):
        return False
    ours, theirs = (items.take(np.array(rows, np.int64)) for _, rows in (a, b))
    names = [one.names[one.storage[0]] for one in (ours, theirs)]
    entries = [reader.metadata.state_dict_metadata[name] for name in names]
    if not all(isinstance(entry, TensorMetadata) for entry in entries):
        return False
    lows = [(one.storage_anchor + one.storage_offsets).min(axis=0) for one in (ours, theirs)]
    if names[0] == names[1] and np.array_equal(*lows):
        return True
    one, other = (entry for entry in entries if isinstance(entry, TensorMetadata))
    if one.properties.dtype != other.properties.dtype:
        return False
    return _same_sums(reader, ours, theirs) or _same_bits(
        *(
            (SavedTensor(reader, name, entry, False), low[: a[0].ndim].tolist())
            for name, entry, low in zip(names, (one, other), lows, strict=True)
        ),
        shape=tuple(a[0].shape),
    )


def _same_sums(reader: Reader, ours: ReadItems, theirs: ReadItems) -> bool:
    """Tell whether the same parts of chunks with the same checksums are read."""
    parts = ("dest_offsets", "storage_offsets", "lengths")
    if len(ours) != len(theirs) or not all(
        np.array_equal(getattr(ours, part), getattr(theirs, part)) for part in parts
    ):
        return False
    found = []
    for items in (ours, theirs):
        sums = reader.source.sums_of(items.names[items.storage[0]])
        if sums is None:
            return False
        found.append(sums[find_chunks(reader.metadata, items)])
    return np.array_equal(found[0], found[1])


def _same_bits(
    a: tuple[SavedTensor, list[int]], b: tuple[SavedTensor, list[int]], *, shape: tuple[int, ...]
) -> bool:
    """Compare boxes of two saved tensors, block by block."""
    for offsets, sizes in boxes_of(shape, str(a[0].dtype).removeprefix("torch.")):
        blocks = [
            saved.read_box([o + at for o, at in zip(low, offsets, strict=False)], sizes)
            for saved, low in (a, b)
        ]
        if memory(blocks[0]) != memory(blocks[1]):
            return False
    return True
