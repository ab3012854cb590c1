"""Oracles for tests: they check plans element by element.

They share no code with the planning that they check; they use only the records. Use small tensors.
An *element* is a tuple of indices in the tensor's global frame; a non-tensor value has the single
element ``()``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..geometry.tilings import Chunk
from ..metadata import BytesMetadata, Metadata, TensorMetadata
from ..plans import LoadPlan, SavePlan
from ..records import LoadItemType, MetadataIndex, ReadItem, WriteItem

__all__ = [
    "Element",
    "Origin",
    "Trace",
    "assert_all_saved",
    "assert_read_once",
    "assert_written_once",
    "cells",
    "count_writes",
    "trace_reads",
]

Element = tuple[int, ...]
"""Where an element lies in its tensor, in the global frame."""

Origin = tuple[str, int, Element]
"""Where an element was saved: the name, which of its chunks, and where inside that chunk."""

Trace = dict[MetadataIndex, dict[Element, tuple[Origin, ...]]]
"""Per shard of a state dict, per element of it, every place from which it is read."""


def cells(chunk: Chunk) -> Iterator[Element]:
    """Yield every element of a chunk, in row-major order."""
    return itertools.product(*(range(o, o + n) for o, n in _axes(chunk)))


def _axes(chunk: Chunk) -> list[tuple[int, int]]:
    return list(zip(chunk.offsets, chunk.sizes, strict=True))


def count_writes(plans: Iterable[SavePlan]) -> dict[str, npt.NDArray[np.int64]]:
    """Count how often each element is written: per name, an array of the tensor's global shape.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((3,)), "step": 7})
    >>> count_writes([plan, plan])
    {'step': array(2), 'w': array([2, 2, 2])}
    """
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for rank, item in _items(plans):
        name, chunk, size = _written(item)
        count = counts.setdefault(name, np.zeros(size, np.int64))
        assert count.shape == size, (
            f"`{name}`: rank {rank} says its shape is {size}, an earlier item says {count.shape}"
        )
        assert all(o + n <= end for (o, n), end in zip(_axes(chunk), size, strict=True)), (
            f"`{name}`: rank {rank} writes {chunk}, which lies outside shape {size}"
        )
        for element in cells(chunk):
            count[element] += 1
    return dict(sorted(counts.items()))


def assert_written_once(plans: Iterable[SavePlan], metadata: Metadata) -> None:
    """Assert that every element is written by one rank, and where the metadata says it lies.

    >>> from shardplan.planning import TensorSpec, global_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((3,))})
    >>> plans, metadata = global_plan([plan, plan])
    >>> assert_written_once(plans, metadata)
    >>> assert_written_once([plan, plan], metadata)
    Traceback (most recent call last):
    AssertionError: `w`: element (0,) is written 2 times, by ranks 0, 1
    """
    plans = tuple(plans)
    for name, count in count_writes(plans).items():
        for element in map(tuple, np.argwhere(count != 1).tolist()):
            ranks = [rank for rank, item in _items(plans) if _writes(item, name, element)]
            raise AssertionError(
                f"`{name}`: element {element} is written {len(ranks)} times, "
                f"by {_ranks(ranks) if ranks else 'no rank'}"
            )
    entries = metadata.state_dict_metadata
    written: dict[str, list[tuple[int, WriteItem]]] = {name: [] for name in entries}
    for rank, item in _items(plans):
        name = item.index.fqn
        assert name in written, f"`{name}` is written by rank {rank}, but not in the metadata"
        written[name].append((rank, item))
    for name, items in written.items():
        assert items, f"`{name}` is in the metadata, but no rank writes it"
        _assert_described(name, items, entries[name])


def _assert_described(
    name: str, items: Sequence[tuple[int, WriteItem]], entry: TensorMetadata | BytesMetadata
) -> None:
    """Assert that the metadata of a tensor agrees with the ranks that write it."""
    ranks = _ranks([rank for rank, _ in items])
    if isinstance(entry, BytesMetadata):
        stray = [item.tensor_data for _, item in items if item.tensor_data is not None]
        assert not stray, f"`{name}` is a value in the metadata, but {ranks} write {stray[0]}"
        return
    for rank, item in items:
        data = item.tensor_data
        assert data is not None, f"`{name}` is a tensor in the metadata; rank {rank} writes a value"
        said, known = (data.properties.dtype, data.size), (entry.properties.dtype, entry.size)
        assert said == known, f"`{name}`: rank {rank} writes {said}, the metadata says {known}"
    chunks = Counter(_written(item)[1] for _, item in items)
    wrong = chunks - Counter(entry.chunks), Counter(entry.chunks) - chunks
    assert wrong == ({}, {}), (
        f"`{name}`: {ranks} write {list(wrong[0])}, which the metadata does not list, "
        f"and not {list(wrong[1])}, which it lists"
    )


def assert_all_saved(held: Iterable[SavePlan], plans: Iterable[SavePlan]) -> tuple[str, ...]:
    """Assert that each element of each state dict is written, and by no rank twice, or is dropped.

    A tensor or value is dropped if no rank writes any of it. An element that several ranks hold
    under one name counts as written if one of them writes it.

    Returns:
        The names in the state dicts of what was dropped.

    >>> from shardplan.planning import TensorSpec, drop, local_plan
    >>> plan = local_plan({"w": TensorSpec((3,)), "step": 7})
    >>> assert_all_saved([plan], drop("step")((plan,)))
    ('step',)
    >>> assert_all_saved([plan], [SavePlan([*plan.items, *plan.items])])
    Traceback (most recent call last):
    AssertionError: `step` of rank 0: element () is written 2 times
    """
    held, plans = tuple(held), tuple(plans)
    shards: dict[tuple[int, str], dict[Element, MetadataIndex]] = {}  # of each held element
    shapes: dict[tuple[int, str], tuple[int, ...]] = {}
    for rank, item in _items(held):
        _, chunk, size = _written(item)
        shapes[rank, item.source.fqn] = size
        shards.setdefault((rank, item.source.fqn), {}).update(
            dict.fromkeys(cells(chunk), item.source)
        )
    counts: dict[tuple[int, str], Counter[Element]] = {}
    for rank, item in _items(plans):
        name = item.source.fqn
        assert (rank, name) in shards, f"`{item.index.fqn}` is from `{name}`: rank {rank} has none"
        for element in _read(item):
            shard = shards[rank, name].get(element)
            assert shard == item.source, (
                f"`{name}` of rank {rank}: {item} reads {element}, not held"
            )
            counts.setdefault((rank, name), Counter())[element] += 1
    for (rank, name), count in counts.items():
        for element, times in count.items():
            where = f"`{name}` of rank {rank}: element {element}"
            assert times == 1, f"{where} is written {times} times"
    written = {
        (name, shapes[rank, name], element)
        for (rank, name), count in counts.items()
        for element in count
    }
    saved = {(item.source.fqn, shapes[rank, item.source.fqn]) for rank, item in _items(plans)}
    for (rank, name), mine in shards.items():
        source = name, shapes[rank, name]
        for element in mine if source in saved else ():
            assert (*source, element) in written, (
                f"`{name}` of rank {rank}: element {element} is not written, though others are"
            )
    return tuple(sorted({name for rank, name in shards if (name, shapes[rank, name]) not in saved}))


def _read(item: WriteItem) -> Iterator[Element]:
    """Yield each element of the state dict's tensor that an item is made of."""
    return cells(_written(item)[1])


def trace_reads(
    metadata: Metadata,
    target: SavePlan | Mapping[str, Iterable[Chunk]],
    reads: LoadPlan | Iterable[ReadItem],
) -> Trace:
    """Follow every read, element by element, from the saved chunk into the state dict.

    Returns:
        Per shard of the target and element, the places it is read from; exactly one is correct.

    >>> from shardplan.planning import TensorProperties, resolve_overlaps
    >>> saved = [Chunk((0,), (1,)), Chunk((1,), (2,))]
    >>> metadata = Metadata({"w": TensorMetadata(TensorProperties(), (3,), saved)})
    >>> target = {"w": [Chunk((1,), (2,))]}
    >>> trace_reads(metadata, target, resolve_overlaps(metadata, target))[MetadataIndex("w", (1,))]
    {(1,): (('w', 1, (0,)),), (2,): (('w', 1, (1,)),)}

    Raises:
        AssertionError: A read's source was not saved, or its destination is not in the target.
    """
    trace: Trace = {}
    for shard, _, chunk in _wanted(target):
        trace.setdefault(shard, {}).update(dict.fromkeys(cells(chunk), ()))
    for read in reads.items if isinstance(reads, LoadPlan) else reads:
        shard = read.dest_index
        name = shard.fqn
        assert shard in trace, f"`{name}`: {read} fills {shard}, which the target does not have"
        into = trace[shard]
        for element, origin in _copied(metadata, read):
            assert element in into, f"`{name}`: {read} fills element {element}, not in the target"
            into[element] = (*into[element], origin)
    return trace


def assert_read_once(
    metadata: Metadata,
    target: SavePlan | Mapping[str, Iterable[Chunk]],
    reads: LoadPlan | Iterable[ReadItem],
    *,
    rank: int | None = None,
) -> None:
    """Assert that each element of the target is read once, and from where it was written.

    Args:
        metadata: The checkpoint.
        target: What is to be filled: a rank's plan, or chunks by name.
        reads: A load plan, or its items.
        rank: The rank that reads; if given, what others read for it counts.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> plan = local_plan({"w": TensorSpec((3,))})
    >>> _, metadata = global_plan([plan])
    >>> assert_read_once(metadata, plan, load_plan(metadata, plan))
    >>> assert_read_once(metadata, plan, [], rank=5)
    Traceback (most recent call last):
    AssertionError: `w`: element (0,) of the shard at (0,) is read 0 times on rank 5, expected once
    """
    if isinstance(reads, LoadPlan):
        reads = [*reads.items, *(t.read for t in reads.transfers if t.target == rank)]
    trace = trace_reads(metadata, target, reads)
    whose = "" if rank is None else f" on rank {rank}"
    for shard, name, chunk in _wanted(target):
        where = "" if shard.offset is None else f" of the shard at {shard.offset}"
        for element in cells(chunk):
            origins = trace[shard][element]
            text = f"`{name}`: element {element}{where} is read"
            sources = f" (from {', '.join(map(str, origins))})" if origins else ""
            assert len(origins) == 1, f"{text} {len(origins)} times{whose}, expected once{sources}"
            (saved, number, home) = origins[0]
            entry = metadata.state_dict_metadata[saved]
            if isinstance(entry, TensorMetadata):
                home = _sum(entry.chunks[number].offsets, home)
            assert (saved, home) == (name, element), f"{text} from {home} of `{saved}`{whose}"


def _items(plans: Iterable[SavePlan]) -> Iterator[tuple[int, WriteItem]]:
    """Yield every item of every plan, with its rank."""
    for rank, plan in enumerate(plans):
        for item in plan.items:
            yield rank, item


def _written(item: WriteItem) -> tuple[str, Chunk, tuple[int, ...]]:
    """Return the name, the chunk and the global shape of an item."""
    data = item.tensor_data
    if data is None:
        return item.index.fqn, Chunk((), ()), ()
    return item.index.fqn, data.chunk, data.size


def _writes(item: WriteItem, name: str, element: Element) -> bool:
    mine, chunk, _ = _written(item)
    return mine == name and element in set(cells(chunk))


def _wanted(
    target: SavePlan | Mapping[str, Iterable[Chunk]],
) -> Iterator[tuple[MetadataIndex, str, Chunk]]:
    """Yield the shard of the state dict, the name in the checkpoint and the chunk of each item."""
    if isinstance(target, SavePlan):
        for item in target.items:
            name, chunk, _ = _written(item)
            yield item.source, name, chunk
    else:
        for name, chunks in target.items():
            for chunk in chunks:
                yield MetadataIndex(name, chunk.offsets), name, chunk


def _copied(metadata: Metadata, read: ReadItem) -> Iterator[tuple[Element, Origin]]:
    """Yield each element that a read fills, with its source."""
    source, into = read.storage_index, read.dest_index
    entries = metadata.state_dict_metadata
    assert source.fqn in entries, f"`{source.fqn}` is read, but was not saved: {read}"
    entry = entries[source.fqn]
    is_value = isinstance(entry, BytesMetadata)
    assert is_value == (read.type is LoadItemType.BYTE_IO), (
        f"`{source.fqn}` was saved as {type(entry).__name__}, but is read as {read.type.name}"
    )
    if isinstance(entry, BytesMetadata):
        yield (), (source.fqn, 0, ())
        return
    number = _chunk_number(entry, read)
    for step in itertools.product(*map(range, read.lengths)):
        position = _sum(read.storage_offsets, step)
        assert all(p < n for p, n in zip(position, entry.chunks[number].sizes, strict=True)), (
            f"`{source.fqn}`: {read} runs past the saved {entry.chunks[number]}"
        )
        yield _sum(into.offset or (), read.dest_offsets, step), (source.fqn, number, position)


def _chunk_number(entry: TensorMetadata, read: ReadItem) -> int:
    """Find the saved chunk of a read by linear search, ignoring hints."""
    name, offset = read.storage_index.fqn, read.storage_index.offset
    known = [number for number, chunk in enumerate(entry.chunks) if chunk.offsets == offset]
    assert known, f"`{name}`: no chunk was saved at {offset}, from which {read} reads"
    return known[0]


def _sum(*vectors: Any) -> Element:
    return tuple(map(sum, zip(*vectors, strict=True)))


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(set(ranks))]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(numbers)}"
