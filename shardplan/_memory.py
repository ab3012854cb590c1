"""The memory that a load fills: found and checked before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import attrs
import numpy as np

from shardplan.io import HAS_TORCH, ValueRefusedError, as_tensor, flat_memory, in_large_pages, torch
from shardplan.io.execute import Reader
from shardplan.planning import (
    Issue,
    LoadItemType,
    LoadPlan,
    Metadata,
    Path,
    PlanError,
    SavePlan,
    Strict,
    entry_of,
    is_node,
    shard_finder,
    unflatten,
)
from shardplan.planning.columns import ReadItems, row_tuples
from shardplan.planning.storage import (
    SavedElsewhere,
    find_chunks,
    is_folded,
    is_needed,
    meeting,
    saved_elsewhere,
)

from ._checkpoint import Checkpoint, SavedTensor
from ._comm import Place
from ._read import Destinations, Opened
from ._state import State, at, is_stateful, parted, put

_WORK: Final = 100_000  # how long to look for an element that two views have in common
_PAIRS: Final = 100_000  # how many pairs of overlapping views to compare

_Key = tuple[str, tuple[int, ...]]  # a tensor's name in the state dict, where its shard starts


# Tied tensors, and tensors on the meta device


def tied_names(plan: SavePlan, flat: Mapping[str, Any], metadata: Metadata) -> dict[str, str]:
    """Map tensors missing from a checkpoint to saved ones that share their memory.

    Many tools store tied weights once, under one of their names.

    >>> from shardplan.planning import local_plan, metadata_of
    >>> sd = {"embed": torch.zeros(2)}
    >>> metadata = metadata_of(sd)
    >>> sd["head"] = sd["embed"].view(2)
    >>> tied_names(local_plan(sd), sd, metadata)
    {'head': 'embed'}
    """
    known = metadata.state_dict_metadata
    heads = plan.items.catalog.heads
    absent = set(plan.items.catalog.names) - known.row_of.keys()
    if not absent:
        return {}
    places = {head.source: _place(flat.get(head.source)) for head in heads}
    partly = {head.source for head in heads if head.name in absent}
    filled: dict[Hashable, str] = {}
    for head in heads:
        if head.name in known and head.source not in partly and places[head.source] is not None:
            filled.setdefault(places[head.source], head.name)
    found: dict[str, str] = {}
    lacking = {head.name for head in heads if places[head.source] not in filled}
    for head in heads:
        if head.name in absent - lacking:
            found.setdefault(head.name, filled[places[head.source]])
    return found


def tied_sources(
    plan: SavePlan, flat: Mapping[str, Any], tied: Mapping[str, str]
) -> dict[str, str]:
    """Map tensors of a state dict that no read fills to those with which they share memory."""
    heads = plan.items.catalog.heads
    filled: dict[Hashable, str] = {}
    for head in heads:
        if head.name not in tied:
            filled.setdefault(_place(flat.get(head.source)), head.source)
    unfilled = {head.source for head in heads if head.name in tied}
    return {name: filled[_place(flat.get(name))] for name in sorted(unfilled)}


def blanks(
    flat: Mapping[str, Any], plan: LoadPlan, held: SavePlan, metadata: Metadata
) -> dict[str, Any]:
    """Make memory for the tensors on the meta device that a load fills, by name.

    Those that share their storage, as tied weights do, share the new memory. Those without elements
    on this rank are replaced too, so that no rank is left with a tensor on the meta device.
    """
    if not any(map(_is_meta, flat.values())):
        return {}
    made: dict[Hashable, Any] = {}
    reads, device = plan.items, torch.get_default_device()
    device = torch.device("cpu") if device.type == "meta" else device
    filled = reads.dest[reads.type == LoadItemType.TENSOR.value]
    for name in (reads.names[number] for number in dict.fromkeys(filled.tolist())):
        if _is_meta(flat[name]) and _place(flat[name]) not in made:
            made[_place(flat[name])] = blank_like(flat[name], device)
    hollow = {
        head.source: blank_like(flat[head.source], device)
        for head in held.items.catalog.heads
        if head.name in metadata.state_dict_metadata and _is_hollow(flat.get(head.source))
    }
    if not made:
        return hollow
    places = {name: _place(value) for name, value in flat.items() if _is_meta(value)}
    return hollow | {name: made[place] for name, place in places.items() if place in made}


def _is_hollow(value: Any) -> bool:
    """Return True for a tensor on the meta device without elements on this rank."""
    if not _is_meta(value):
        return False
    with torch.no_grad():
        local = value.to_local() if hasattr(value, "placements") else value
    return not local.numel()


def blank_like(value: Any, device: Any) -> torch.Tensor:
    """Return a new tensor; a DTensor where its mesh is, with memory for this rank's part."""
    if not hasattr(value, "placements"):
        return in_large_pages(torch.empty_like(value, device=device, requires_grad=False))
    with torch.no_grad():
        local = value.to_local()
    device = value.device_mesh.device_type if local.is_meta else local.device
    blank: torch.Tensor = type(value).from_local(
        in_large_pages(torch.empty_like(local, device=device, requires_grad=False)),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return blank


def _is_meta(value: Any) -> bool:
    """Return True for a tensor on the meta device; a ShardedTensor may not have a device."""
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _place(value: Any) -> Hashable | None:
    """Return a key that is equal for tensors of the same memory and shape; None if unknown."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return None
    layout: tuple[Any, ...] = (value.dtype, tuple(value.shape))
    part: Any = value
    if hasattr(part, "placements"):
        layout = (*layout, part.placements, part.device_mesh)
        with torch.no_grad():
            part = part.to_local()
    try:
        storage = part.untyped_storage()._cdata  # which tensors without memory have as well
        return (*layout, storage, part.storage_offset(), part.stride())
    except Exception:  # tensors of other kinds may have no storage
        return None


# What cannot be filled or replaced


def refuse_unfillable(
    state_dict: State, paths: Mapping[str, Any], partly: Collection[str], names: Iterable[str]
) -> None:
    """Refuse tensors on the meta device that would be filled in part, or that a module holds.

    ``state_dict`` is what the load was given, ``partly`` names what it fills only a part of, and
    ``names`` are those that get memory.
    """
    refused = {}
    for name in names:
        *_, last = _nodes(state_dict, paths[name])
        if name in partly:
            refused[name] = (
                "is on the meta device, and the checkpoint fills only a part of it; materialise it "
                "first"
            )
        elif is_stateful(last):
            refused[name] = (
                f"is on the meta device in a {type(last).__name__}, which cannot be filled; call "
                'to_empty(device="cpu") on it first, or load its state_dict() and pass that to '
                "load_state_dict(..., assign=True)"
            )
    if refused:
        raise ValueRefusedError(refused)


def refuse_fixed(state_dict: State, paths: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse to replace values in containers that cannot change.

    >>> from types import MappingProxyType
    >>> from shardplan.planning import flatten
    >>> fixed = MappingProxyType({"step": 0})
    >>> refuse_fixed(fixed, flatten(fixed)[1], ["step"])
    Traceback (most recent call last):
    shardplan.io.errors.ValueRefusedError: `step` lies in a mappingproxy, which cannot change; ...
    """
    refused = {}
    for name in names:
        nodes = list(_nodes(state_dict, paths[name]))
        # Tuples and nodes are made anew, a `PerRank` is replaced, a stateful object is given all.
        plain = [node for node in nodes if not is_node(node)]
        holder = [node for node in plain if isinstance(node, (Mapping, list))][-1:]
        if holder and not is_stateful(nodes[-1]) and not hasattr(holder[0], "__setitem__"):
            kind = type(holder[0]).__name__
            refused[name] = f"lies in a {kind}, which cannot change; pass a dict"
    if refused:
        raise ValueRefusedError(refused)


def _nodes(state_dict: State, path: Sequence[tuple[str, Any]]) -> Iterator[Any]:
    """Yield what a path to a value leads through, up to a stateful object or a `PerRank`."""
    node: Any = state_dict
    for _, key in path:
        yield node
        if is_stateful(node) or not (is_node(node) or isinstance(node, (Mapping, list, tuple))):
            return
        node = entry_of(node, key)


# The memory of the tensors


def destinations(flat: Mapping[str, Any], items: ReadItems, reader: Reader | None) -> Destinations:
    """Find the memory that some reads fill, and refuse tensors that cannot be filled.

    Given a reader, tensors that share memory must have been saved with the same values.
    """
    shard_of = _shard_of(items)
    keys = dict.fromkeys(key for key in shard_of if key is not None)
    if not HAS_TORCH:  # the arrays are new ones
        return Destinations({key: flat[key[0]] for key in keys})
    shards: dict[_Key, torch.Tensor] = {}
    refused: dict[str, str] = {}
    find = shard_finder(flat)
    with torch.no_grad():  # so that DTensors give their local tensors as they are
        for key in keys:
            try:
                shards[key] = as_tensor(find(*key), writable=True)
            except TypeError as error:
                refused[key[0]] = str(error)
    refused |= {
        name: "has elements that share memory, as expand() makes them, and cannot hold what was "
        "saved; make it contiguous first"
        for (name, _), shard in shards.items()
        if not shard.is_contiguous() and is_folded(shard.stride(), shard.shape)
    }
    if not refused and reader is not None:
        pairs, rows = list(_overlapping(shards)), dict[_Key | None, list[int]]()
        for row, own in enumerate(shard_of) if pairs else ():
            rows.setdefault(own, []).append(row)
        for a, b in pairs:
            ours, theirs = (items.take(np.array(rows[key], np.int64)) for key in (a, b))
            if _layout(shards[a]) != _layout(shards[b]) or not _same_saved(
                reader, ours, theirs, shards[a]
            ):
                refused[a[0]] = (
                    f"shares memory with `{b[0]}`, and they were saved with different values; load "
                    "one of them, or give each its own memory"
                )
    if refused:
        raise ValueRefusedError(refused)
    return Destinations(shards)


def _shard_of(items: ReadItems) -> list[_Key | None]:
    """Return which shard each read fills; None for a value."""
    names = [items.names[number] for number in items.dest.tolist()]
    keys = zip(names, row_tuples(items.dest_anchor, items.dest_ndim), strict=True)
    tensors = (items.type == LoadItemType.TENSOR.value).tolist()
    return [key if is_tensor else None for key, is_tensor in zip(keys, tensors, strict=True)]


def _overlapping(shards: Mapping[_Key, torch.Tensor]) -> Iterator[tuple[_Key, _Key]]:
    """Yield the shards that have elements in common, in pairs; the first comes first in memory."""
    spans = {}
    for key, shard in shards.items():
        if shard.numel():
            reach = shard.nbytes
            if not shard.is_contiguous():
                steps = zip(shard.stride(), shard.shape, strict=True)
                reach = (1 + sum(stride * (n - 1) for stride, n in steps)) * shard.itemsize
            spans[key] = (start := shard.data_ptr()), start + reach
    for pair in islice(meeting(spans), _PAIRS):
        if _share(*(shards[key] for key in pair)):
            yield pair


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


def _same_saved(reader: Reader, ours: ReadItems, theirs: ReadItems, into: torch.Tensor) -> bool:
    """Return True if the reads of two shards in the same memory leave the same elements there."""
    if _same_sums(reader, ours, theirs):
        return True
    filled = []
    for items in (ours, theirs):
        copy = into.detach().clone()
        (key,) = filter(None, set(_shard_of(items)))
        reader.fill(items, Destinations({key: copy}).of(items), verify=False)
        filled.append(flat_memory(copy.contiguous()))
    return filled[0] == filled[1]


def _same_sums(reader: Reader, ours: ReadItems, theirs: ReadItems) -> bool:
    """Return True if the same parts of chunks of one dtype with the same checksums are read."""
    if any(
        items.frame is not None or len(np.unique(items.storage)) > 1 for items in (ours, theirs)
    ):
        return False
    parts = ("dest_offsets", "storage_offsets", "lengths")
    if not all(np.array_equal(getattr(ours, part), getattr(theirs, part)) for part in parts):
        return False
    names = [items.names[items.storage[0]] for items in (ours, theirs)]
    a, b = map(reader.source.sums_of, names)
    if a is None or b is None or reader.dtype_of(names[0]) != reader.dtype_of(names[1]):
        return False
    metadata = reader.metadata
    return np.array_equal(a[find_chunks(metadata, ours)], b[find_chunks(metadata, theirs)])


# Per-rank state of another number of ranks


@attrs.frozen
class Resized:
    """Per-rank state, by path, that was made of what other ranks had saved.

    ``names`` are those that its parts would have in a checkpoint of as many ranks.
    """

    values: Mapping[Path, Any]
    names: frozenset[str]

    def put(self, state: Any) -> None:
        """Put the states in their places, in what was loaded."""
        for path, value in self.values.items():
            put(state, path, value)


def resize(
    state: Mapping[Any, Any],
    plan: SavePlan,
    opened: Opened,
    place: Place,
    *,
    strict: Strict,
    verify: bool,
) -> Resized:
    """Make this rank's state of all ranks' where the number of ranks has changed.

    ``state`` is what `part` returned, and ``plan`` the plan of it, after any passes.
    """
    values: dict[Path, Any] = {}
    names: set[str] = set()
    issues: list[Issue] = []
    for path, node in parted(state):
        prefix = ".".join([*(str(key) for _, key in path), node.label])
        ranks = int(node.label.rpartition("_")[2])
        saved = saved_elsewhere(prefix, ranks, plan, opened.metadata)
        if saved is None:
            continue
        merge = node.source.resize
        if merge is not None and opened.reader is not None:
            states = _states(saved, Checkpoint(opened.reader, verify=verify))
            values[*path, ("dict", node.label)] = merge(states, place.rank, place.ranks)
            names.update(saved.names)
        elif is_needed(saved.names, strict):
            remedy = (
                "pass PerRank(value, resize=...), a function of all saved values, the rank and "
                "the number of ranks, which returns this rank's value; strict=False leaves what "
                "is there"
                if merge is None
                else "only one rank reads a torch.save file: convert it to another format first"
            )
            text = f"`{saved.name}` was saved by each of {saved.ranks} ranks, and is loaded on"
            reason = f"{text} {place.ranks}; {remedy}"
            issues.append(Issue("missing", saved.name, reason, [place.rank]))
    if issues:
        raise PlanError(issues)
    return Resized(values, frozenset(names))


def _states(saved: SavedElsewhere, checkpoint: Checkpoint) -> tuple[Any, ...]:
    """Read the states of all ranks that saved."""
    labels = [Place(rank, saved.ranks).label for rank in range(saved.ranks)]
    return tuple(_state(saved.name, label, checkpoint) for label in labels)


def _state(base: str, label: str, checkpoint: Checkpoint) -> Any:
    """Read one rank's state, nested as it was saved; None if it saved none."""
    prefix = f"{base}.{label}".lstrip(".")
    names = [name for name in checkpoint if f"{name}.".startswith(f"{prefix}.")]
    values = {name: checkpoint[name] for name in names}
    flat = {n: v.read() if isinstance(v, SavedTensor) else v for n, v in values.items()}
    if prefix in flat or not flat:
        return flat.get(prefix)
    data = checkpoint.metadata.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    first = paths.get(names[0], ())
    depth = next((n for n, (_, key) in enumerate(first, 1) if key == label), 0)
    if not depth:  # it was saved flat
        return {name.removeprefix(f"{prefix}."): value for name, value in flat.items()}
    return at(unflatten(flat, paths), first[:depth])
