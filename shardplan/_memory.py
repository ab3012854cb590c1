"""Tied tensors, tensors on the meta device, and containers that cannot change, in a load."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardplan.io import ValueRefusedError
from shardplan.planning import LoadItemType, LoadPlan, Metadata, SavePlan

from ._state import State, is_stateful

__all__ = ["blank_like", "blanks", "refuse_fixed", "refuse_unfillable", "tied_names"]


def tied_names(plan: SavePlan, flat: Mapping[str, Any], metadata: Metadata) -> dict[str, str]:
    """Find tensors that are not in a checkpoint, but share memory with one that is.

    Many tools store tied weights once, under one of their names.

    Args:
        plan: What this rank wants, after any passes.
        flat: The state dict, flattened.
        metadata: The checkpoint.

    Returns:
        For each such tensor, the name of the one that is in the checkpoint.

    >>> from shardplan.planning import local_plan, metadata_of
    >>> sd = {"embed": torch.zeros(2)}
    >>> metadata = metadata_of(sd)
    >>> sd["head"] = sd["embed"].view(2)
    >>> tied_names(local_plan(sd), sd, metadata)
    {'head': 'embed'}
    """
    catalog, known = plan.items.catalog, metadata.state_dict_metadata
    names = dict(zip(catalog.names, catalog.sources, strict=True))
    absent = [name for name in names if name not in known]
    if not absent:
        return {}
    filled: dict[Hashable, str] = {}
    for name, source in names.items():
        place = _place(flat.get(source)) if name in known else None
        if place is not None:
            filled.setdefault(place, name)
    places = {name: _place(flat.get(names[name])) for name in absent}
    return {name: filled[place] for name, place in places.items() if place in filled}


def blanks(flat: Mapping[str, Any], plan: LoadPlan) -> dict[str, Any]:
    """Make memory for the tensors on the meta device that a load fills.

    Those that share their storage, as tied weights do, share the new memory. The new tensors are
    returned by name in the state dict.

    >>> from shardplan.planning import load_plan, local_plan, metadata_of
    >>> sd = {"w": torch.empty(2, device="meta"), "v": torch.empty(2)}
    >>> made = blanks(sd, load_plan(metadata_of(sd), local_plan(sd)))
    >>> {name: tensor.device.type for name, tensor in made.items()}
    {'w': 'cpu'}
    """
    made: dict[Hashable, Any] = {}
    reads = plan.items
    filled = reads.dest[reads.type == LoadItemType.TENSOR.value]
    for name in (reads.names[number] for number in dict.fromkeys(filled.tolist())):
        if _is_meta(flat[name]) and _place(flat[name]) not in made:
            made[_place(flat[name])] = blank_like(flat[name], _default_device())
    if not made:
        return {}
    places = {name: _place(value) for name, value in flat.items() if _is_meta(value)}
    return {name: made[place] for name, place in places.items() if place in made}


def refuse_unfillable(
    state_dict: State, paths: Mapping[str, Any], plan: LoadPlan, names: Iterable[str]
) -> None:
    """Refuse tensors on the meta device that would be filled in part, or that a module holds.

    Args:
        state_dict: What the load was given, stateful objects included.
        paths: The path to each value; see `flatten`.
        plan: The reads.
        names: The tensors on the meta device that get memory.

    Raises:
        ValueRefusedError: There are such tensors; all of them are named.
    """
    partly = {issue.fqn for issue in plan.report.mismatched if issue.kind in ("uncovered", "shape")}
    refused = {}
    for name in names:
        keeper = _keeper(state_dict, paths[name])
        if name in partly:
            refused[name] = (
                "is on the meta device, and the checkpoint fills only a part of it; materialise it "
                "first"
            )
        elif keeper is not None:
            refused[name] = (
                f"is on the meta device in a {type(keeper).__name__}, which cannot be filled; call "
                'to_empty(device="cpu") on that first, or load its state_dict() and hand this over '
                "with load_state_dict(..., assign=True)"
            )
    if refused:
        raise ValueRefusedError(refused)


def refuse_fixed(state_dict: State, paths: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse to replace values in containers that cannot change.

    Args:
        state_dict: What the load was given, stateful objects included.
        paths: The path to each value; see `flatten`.
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
    holders = {name: _holder(state_dict, paths[name]) for name in names}
    refused = {
        name: f"lies in a {type(holder).__name__}, which cannot change; pass a dict"
        for name, holder in holders.items()
        if not hasattr(holder, "__setitem__")
    }
    if refused:
        raise ValueRefusedError(refused)


def _holder(state_dict: State, path: Sequence[tuple[str, Any]]) -> Any:
    """Return the innermost container on the way to a value that must take another entry.

    Tuples are made anew, a `PerRank` is replaced, and a stateful object is given all its state.
    """
    holder: Any = state_dict
    node: Any = state_dict
    for kind, key in path:
        if is_stateful(node):
            return {}
        if not isinstance(node, (Mapping, list, tuple)):
            return holder
        if kind != "tuple":
            holder = node
        node = node[key]
    return holder


def blank_like(value: Any, device: Any) -> torch.Tensor:
    """Return a new tensor; a DTensor where its mesh is, with memory for this rank's part."""
    if not hasattr(value, "placements"):
        return torch.empty_like(value, device=device, requires_grad=False)
    with torch.no_grad():
        local = value.to_local()
    device = value.device_mesh.device_type if local.is_meta else local.device
    blank: torch.Tensor = type(value).from_local(
        torch.empty_like(local, device=device, requires_grad=False),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return blank


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _default_device() -> torch.device:
    """Return where torch makes new tensors, unless that is the meta device as well."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def _place(value: Any) -> Hashable | None:
    """Return a key that is equal for tensors of the same memory and shape; None if unknown.

    >>> a = torch.zeros(4)
    >>> _place(a) == _place(a.view(4)) != _place(a.view(2, 2))
    True
    """
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


def _keeper(state_dict: State, path: Sequence[tuple[str, Any]]) -> Any:
    """Return the stateful object on the way to a value; None if there is none."""
    node: Any = state_dict
    for _, key in path:
        if is_stateful(node):
            return node
        node = node[key]
    return None
