"""Oracles for tests: they check plans element by element.

They share no code with the planning that they check; they use only the records. Use small tensors.
An *element* is a tuple of indices in the tensor's global frame; a non-tensor value has the single
element ``()``. Plans whose tensors lie otherwise in the state dict than in the checkpoint are
followed from the elements of the one to those of the other; `written` and `filled` move numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import span
from ..geometry.tilings import Chunk
from ..metadata import BytesMetadata, Metadata, TensorMetadata
from ..plans import LoadPlan, SavePlan
from ..records import LoadItemType, MetadataIndex, ReadItem, WriteItem
from .frames import Element, assert_accounted, filled, item_elements, pairs, plus, written

__all__ = [
    "Element", "SavedAt", "Trace", "assert_accounted", "assert_all_saved", "assert_read_once",
    "assert_written_once", "cells", "count_writes", "filled", "trace_reads", "written",
]  # fmt: skip


class SavedAt(NamedTuple):
    """Where an element was saved."""

    fqn: str
    chunk: int  # which of the tensor's chunks
    element: Element  # where it lies in that chunk


Trace = dict[MetadataIndex, dict[Element, tuple[SavedAt, ...]]]
"""Per shard of a state dict, per element of its tensor, every place from which it is read."""


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
            writes = ((rank, _written(item)) for rank, item in _items(plans))
            ranks = [r for r, w in writes if w.fqn == name and element in set(cells(w.chunk))]
            raise AssertionError(
                f"`{name}`: element {element} is written {len(ranks)} times, "
                f"by {span(ranks) if ranks else 'no rank'}"
            )
    entries = metadata.state_dict_metadata
    writers: dict[str, list[tuple[int, WriteItem]]] = {name: [] for name in entries}
    for rank, item in _items(plans):
        name = item.index.fqn
        assert name in writers, f"`{name}` is written by rank {rank}, but not in the metadata"
        writers[name].append((rank, item))
    for name, items in writers.items():
        assert items, f"`{name}` is in the metadata, but no rank writes it"
        _assert_described(name, items, entries[name])


def _assert_described(
    name: str, items: Sequence[tuple[int, WriteItem]], entry: TensorMetadata | BytesMetadata
) -> None:
    """Assert that the metadata of a tensor agrees with the ranks that write it."""
    ranks = span([rank for rank, _ in items])
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
    """Assert that each element of each state dict is written once; return the names dropped.

    A tensor or value is dropped if no rank writes any of it. No rank may write an element twice; of
    the ranks that hold it under one name, one must write it, or leave it out as `trim` does.

    Args:
        held: What each rank holds, before passes.
        plans: What each rank writes.

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
    made = [(rank, item) for rank, item in _items(plans) if item.fill is None]
    for rank, item in made:
        name = item.source.fqn
        assert (rank, name) in shards, f"`{item.index.fqn}` is from `{name}`: rank {rank} has none"
    saved = {(item.source.fqn, shapes[rank, item.source.fqn]) for rank, item in made}
    left_out = [(rank, item) for rank, plan in enumerate(plans) for item in plan.left_out or ()]
    counts: dict[tuple[int, str], Counter[Element]] = {}
    for rank, item in [*made, *left_out]:
        name = item.source.fqn
        if (name, shapes[rank, name]) not in saved:
            continue  # left out, and the rest dropped
        for _, element in item_elements(item):
            assert element is not None
            shard = shards[rank, name].get(element)
            assert shard == item.source, (
                f"`{name}` of rank {rank}: {item} reads {element}, not held"
            )
            counts.setdefault((rank, name), Counter())[element] += 1
    for (rank, name), count in counts.items():
        for element, times in count.items():
            where = f"`{name}` of rank {rank}: element {element}"
            assert times == 1, f"{where} is written {times} times"
    accounted = {
        (name, shapes[rank, name], element)
        for (rank, name), count in counts.items()
        for element in count
    }
    for (rank, name), mine in shards.items():
        source = name, shapes[rank, name]
        for element in mine if source in saved else ():
            assert (*source, element) in accounted, (
                f"`{name}` of rank {rank}: element {element} is not written, though others are"
            )
    return tuple(sorted({name for rank, name in shards if (name, shapes[rank, name]) not in saved}))


def trace_reads(
    metadata: Metadata,
    target: SavePlan | Mapping[str, Iterable[Chunk]],
    reads: LoadPlan | Iterable[ReadItem],
) -> Trace:
    """Follow every read: per shard of the target and element, the places it is read from.

    Shards and elements are those of the state dict. Exactly one place is correct.

    >>> from shardplan.planning import TensorProperties, resolve_overlaps
    >>> saved = [Chunk((0,), (1,)), Chunk((1,), (2,))]
    >>> metadata = Metadata({"w": TensorMetadata(TensorProperties(), (3,), saved)})
    >>> target = {"w": [Chunk((1,), (2,))]}
    >>> trace = trace_reads(metadata, target, resolve_overlaps(metadata, target))
    >>> trace[MetadataIndex("w", (1,))][(2,)]
    (SavedAt(fqn='w', chunk=1, element=(1,)),)

    Raises:
        AssertionError: A read's source was not saved, or its destination is not in the target.
    """
    trace: Trace = {}
    for shard, _, element, _ in _wanted(target):
        trace.setdefault(shard, {})[element] = ()
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

    The target is a rank's plan, or chunks by name. If ``rank`` is given, what others read for that
    rank counts.

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
    for shard, name, element, wanted in _wanted(target):
        where = "" if shard.offset is None else f" of the shard at {shard.offset}"
        origins = trace[shard][element]
        text = f"`{name}`: element {element}{where} is read"
        sources = f" (from {', '.join(map(str, origins))})" if origins else ""
        assert len(origins) == 1, f"{text} {len(origins)} times{whose}, expected once{sources}"
        saved, number, home = origins[0]
        entry = metadata.state_dict_metadata[saved]
        if isinstance(entry, TensorMetadata):
            home = plus(entry.chunks[number].offsets, home)
        assert (saved, home) == (name, wanted), f"{text} from {home} of `{saved}`{whose}"


def _items(plans: Iterable[SavePlan]) -> Iterator[tuple[int, WriteItem]]:
    """Yield every item of every plan, with its rank."""
    for rank, plan in enumerate(plans):
        for item in plan.items:
            yield rank, item


class _Written(NamedTuple):
    """What an item is in the checkpoint."""

    fqn: str
    chunk: Chunk
    size: tuple[int, ...]  # the global shape


def _written(item: WriteItem) -> _Written:
    data = item.tensor_data
    if data is None:
        return _Written(item.index.fqn, Chunk((), ()), ())
    return _Written(item.index.fqn, data.chunk, data.size)


class _Wanted(NamedTuple):
    """What fills an element of a state dict."""

    shard: MetadataIndex
    fqn: str  # in the checkpoint
    element: Element  # in the state dict
    saved: Element  # in the checkpoint


def _wanted(target: SavePlan | Mapping[str, Iterable[Chunk]]) -> Iterator[_Wanted]:
    if isinstance(target, SavePlan):
        for item in target.items:
            for saved, element in item_elements(item):
                if element is not None:  # padding fills nothing
                    yield _Wanted(item.source, item.index.fqn, element, saved)
    else:
        for name, chunks in target.items():
            for chunk in chunks:
                shard = MetadataIndex(name, chunk.offsets)
                yield from (_Wanted(shard, name, element, element) for element in cells(chunk))


def _copied(metadata: Metadata, read: ReadItem) -> Iterator[tuple[Element, SavedAt]]:
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
        yield (), SavedAt(source.fqn, 0, ())
        return
    known = [n for n, chunk in enumerate(entry.chunks) if chunk.offsets == source.offset]
    assert known, f"`{source.fqn}`: no chunk was saved at {source.offset}, from which {read} reads"
    number = known[0]
    box = Chunk(read.storage_offsets, read.lengths)
    for position, element in pairs(box, read.dest_box, read.axes):
        assert all(p < n for p, n in zip(position, entry.chunks[number].sizes, strict=True)), (
            f"`{source.fqn}`: {read} runs past the saved {entry.chunks[number]}"
        )
        yield plus(into.offset or (), element), SavedAt(source.fqn, number, position)
