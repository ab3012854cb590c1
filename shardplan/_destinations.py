"""The memory of a state dict's tensors that a load fills, checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import numpy as np
import torch

from shardplan.io import ValueRefusedError, as_tensor, box_view, flat_memory
from shardplan.io.execute import Reader
from shardplan.planning import LoadItemType, TensorMetadata, shard_finder
from shardplan.planning.columns import ReadItems
from shardplan.planning.storage import boxes_of, find_chunks

from ._checkpoint import SavedTensor

__all__ = ["Destinations", "destinations"]

_WORK: Final = 100_000  # how long to look for an element that two views have in common
_PAIRS: Final = 100_000  # how many pairs of overlapping views to compare

_Key = tuple[str, tuple[int, ...]]  # a tensor's name in the state dict, where its shard starts


@attrs.frozen(eq=False)
class Destinations:
    """The shards that a load fills.

    Attributes:
        shards: Their memory, by the tensor's name in the state dict and the shard's offset.
    """

    shards: Mapping[_Key, torch.Tensor]

    def of(self, items: ReadItems) -> Callable[[int], torch.Tensor]:
        """Return a function from the row of a read to the box of memory that it fills."""
        names, anchors = items.names, items.dest_anchor.tolist()
        dest, axes = items.dest.tolist(), items.ndim.tolist()
        offsets, lengths = items.dest_offsets.tolist(), items.lengths.tolist()

        def box(row: int) -> torch.Tensor:
            shard = self.shards[names[dest[row]], tuple(anchors[row][: axes[row]])]
            return box_view(shard, offsets[row], lengths[row])

        return box


def destinations(
    flat: Mapping[str, Any], items: ReadItems, reader: Reader | None = None
) -> Destinations:
    """Find the memory that some reads fill, and check that all of it can be.

    Args:
        flat: The state dict, flattened.
        items: The reads.
        reader: The checkpoint, to compare what was saved of tensors that share memory.

    Raises:
        ValueRefusedError: Some tensors cannot be filled; all of them are named.
    """
    rows = _rows_by_shard(items)
    shards: dict[_Key, torch.Tensor] = {}
    refused: dict[str, str] = {}
    find = shard_finder(flat)
    with torch.no_grad():  # so that DTensors give their local tensors as they are
        for key in rows:
            try:
                shards[key] = as_tensor(find(*key), writable=True)
            except TypeError as error:
                refused[key[0]] = str(error)
    refused |= {
        name: "has elements that share memory, as expand() makes them, and cannot hold what was "
        "saved; make it contiguous first"
        for (name, _), shard in shards.items()
        if _is_folded(shard)
    }
    if not refused and reader is not None:
        for a, b in _overlapping(shards):
            ours, theirs = (items.take(np.array(rows[key], np.int64)) for key in (a, b))
            if _layout(shards[a]) != _layout(shards[b]) or not _same_saved(
                reader, ours, theirs, tuple(shards[a].shape)
            ):
                refused[a[0]] = (
                    f"shares memory with `{b[0]}`, and they were saved with different values; load "
                    "one of them, or give each its own memory"
                )
    if refused:
        raise ValueRefusedError(refused)
    return Destinations(shards)


def _rows_by_shard(items: ReadItems) -> dict[_Key, list[int]]:
    """Return which reads fill each shard."""
    names, dest, axes = items.names, items.dest.tolist(), items.ndim.tolist()
    anchors, rows = items.dest_anchor.tolist(), dict[_Key, list[int]]()
    for row in np.flatnonzero(items.type == LoadItemType.TENSOR.value).tolist():
        key = names[dest[row]], tuple(anchors[row][: axes[row]])
        rows.setdefault(key, []).append(row)
    return rows


def _is_folded(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor share memory.

    >>> _is_folded(torch.zeros(1).expand(3)), _is_folded(torch.zeros(4, 3)[::2, 1:].T)
    (True, False)
    >>> _is_folded(torch.zeros(9).as_strided((4, 3), (2, 1)))
    True
    """
    if tensor.is_contiguous() or not tensor.numel():
        return False
    axes = sorted(axis for axis in zip(tensor.stride(), tensor.shape, strict=True) if axis[1] > 1)
    reach = 0  # from the first element to the last, along the axes so far
    for stride, size in axes:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if axes[0][0] == 0:
        return True
    places = np.zeros(1, np.int64)  # of all elements: strides that interleave may not meet
    for stride, size in axes:
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return len(np.unique(places)) < len(places)


def _overlapping(shards: Mapping[_Key, torch.Tensor]) -> Iterator[tuple[_Key, _Key]]:
    """Yield the shards that have elements in common, in pairs; the first comes first in memory."""
    starts = {key: shard.data_ptr() for key, shard in shards.items() if shard.numel()}
    ends: dict[_Key, int] = {}  # of earlier shards that reach as far as the current one
    compared = 0
    for key in sorted(starts, key=starts.__getitem__):
        ends = {other: end for other, end in ends.items() if end > starts[key]}
        for other in ends:
            compared += 1
            if compared <= _PAIRS and _share(shards[other], shards[key]):
                yield other, key
        ends[key] = starts[key] + _reach(shards[key])


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element past its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return (1 + sum(stride * (n - 1) for stride, n in pairs)) * tensor.itemsize


class _Memory:
    """A tensor's memory as numpy sees it; it is never read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        width = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": f"|V{width}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * width for stride in tensor.stride()),
        }


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have elements in common; False if that is too hard to find out."""
    if a.device != b.device:
        return False
    if _layout(a) == _layout(b):
        return True
    work: Any = _WORK
    try:
        return np.shares_memory(np.asarray(_Memory(a)), np.asarray(_Memory(b)), max_work=work)
    except np.exceptions.TooHardError:
        return False


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _same_saved(reader: Reader, ours: ReadItems, theirs: ReadItems, shape: tuple[int, ...]) -> bool:
    """Return True if the reads of two shards of one shape bring the same elements."""
    both = (ours, theirs)
    names = [items.names[items.storage[0]] for items in both]
    lows = [(items.storage_anchor + items.storage_offsets).min(axis=0).tolist() for items in both]
    if names[0] == names[1] and lows[0] == lows[1]:
        return True
    saved = [SavedTensor(reader, name, _tensor_entry(reader, name), False) for name in names]
    if saved[0].dtype != saved[1].dtype:
        return False
    if _same_sums(reader, ours, theirs):
        return True
    for offsets, sizes in boxes_of(shape, str(saved[0].dtype).removeprefix("torch.")):
        one, other = (
            tensor.read_box([o + at for o, at in zip(low, offsets, strict=False)], sizes)
            for tensor, low in zip(saved, lows, strict=True)
        )
        if flat_memory(one) != flat_memory(other):
            return False
    return True


def _tensor_entry(reader: Reader, name: str) -> TensorMetadata:
    entry = reader.metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorMetadata)
    return entry


def _same_sums(reader: Reader, ours: ReadItems, theirs: ReadItems) -> bool:
    """Return True if the same parts of chunks with the same checksums are read."""
    parts = ("dest_offsets", "storage_offsets", "lengths")
    if not all(np.array_equal(getattr(ours, part), getattr(theirs, part)) for part in parts):
        return False
    found = []
    for items in (ours, theirs):
        sums = reader.source.sums_of(items.names[items.storage[0]])
        if sums is None:
            return False
        found.append(sums[find_chunks(reader.metadata, items)])
    return np.array_equal(found[0], found[1])
