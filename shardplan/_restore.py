"""Make a new state dict from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import attrs
import numpy as np

from shardplan.io import Pool, ProgressCallback, empty_tensor, refuse_dtypes, torch
from shardplan.io.execute import Reader, map_tensors
from shardplan.io.formats import open_source, read_as
from shardplan.io.stores import Store
from shardplan.planning import (
    Issue,
    LoadPlan,
    Metadata,
    NotFoundError,
    Passes,
    Path,
    PlanError,
    SavePlan,
    TensorMetadata,
    TensorSpec,
    chain,
    dtype_name,
    flatten,
    is_tensor,
    load_plan,
    local_plan,
    nearest_names,
    saved_nodes,
    unflatten,
    whole_names,
    with_replicas,
)
from shardplan.planning.columns import ReadItems
from shardplan.planning.passes import Stages, reading_of
from shardplan.planning.storage import partly_filled, seen_through

from ._comm import Place, own_place
from ._memory import blank_like, destinations, resize, tied_names, tied_sources
from ._read import Opened, plain_errors, read_anew, read_rank
from ._report import LOG
from ._state import State, expand, part, unpart


def restore(
    path: str | os.PathLike[str] | Store,
    target: State | None = None,
    *,
    keys: Iterable[str] | None = None,
    planner: Passes[SavePlan] | None = None,
    device: Any = "cpu",
    dtype: Literal["same", "cast"] = "same",
    format: str | None = None,
    verify: bool | None = None,
    mmap: bool = False,
    progress: ProgressCallback | None = None,
    pool: Pool | None = None,
) -> dict[Any, Any]:
    """Make a new state dict from a checkpoint, nested as it was saved.

    Its tensors are numpy arrays where torch is not installed.

    Args:
        path: The checkpoint.
        target: What to make, nested in any way: meta tensors, `TensorSpec`s, or anything else with
            a shape and a dtype; other leaves stand for non-tensor values. Of a DTensor, this rank
            reads its own part; an object with ``state_dict()`` stands for its state. Everything
            that was saved if left out.
        keys: Shell-style patterns of the flattened names to read; everything if left out.
        planner: A pass, or a list of them, that maps the state dict to this checkpoint, as for
            `load`. Without a ``target``, each pass must have an inverse.
        device: Where new tensors are made; DTensors are made where their mesh is.
        dtype: Whether tensors of ``target`` may have another dtype than the saved ones: ``"cast"``.
        format: What wrote the checkpoint; detected if left out.
        verify: Whether to check what is read whole against its checksums; by default all but what
            is mapped, since that would read it.
        mmap: Whether tensors that a local file holds whole become views of it, copy-on-write: their
            bytes are read as they are used, and a write does not reach the file. On Linux; other
            tensors are read. A file that is cut short while its tensors are in use kills the
            process; `save` never does that, it makes new files.
        progress: Called as ``progress(done_bytes, total_bytes)``, from one thread at a time. What
            it raises stops the load.
        pool: The threads and the memory budget to use.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"model": {"w": torch.ones(2)}, "step": 7}, folder)
    ...     restore(folder)
    {'model': {'w': tensor([1., 1.])}, 'step': 7}

    Raises:
        PlanError: Something in ``target`` is not in the checkpoint, or does not fit.
        ValueError: The planner has no inverse, and there is no ``target``.
        NotFoundError: A pattern of ``keys`` matches nothing.
        FormatError: The checkpoint is damaged. If it was overwritten meanwhile, the new one is
            read instead.
    """
    if str(device).partition(":")[0] == "meta":
        raise ValueError(
            "the meta device holds no elements to restore; open_checkpoint gives names, shapes and "
            "dtypes without reading them"
        )
    if mmap and str(device).partition(":")[0] != "cpu":
        raise ValueError(f"files can only be mapped into the memory of the CPU, not of {device}")
    reading = reading_of(planner)
    options: dict[str, Any] = {
        "planner": reading.planner,
        "dtype": dtype,
        "verify": verify,
        "mmap": mmap,
        "progress": progress,
    }
    return read_anew(
        lambda: (Reader(read_as(open_source(path, format=format, pool=pool), reading), pool),),
        partial(_restore, target=target, keys=keys, device=device, **options),
    )


def _restore(
    reader: Reader,
    *,
    target: State | None,
    keys: Iterable[str] | None,
    planner: Passes[SavePlan] | None,
    device: Any,
    dtype: Literal["same", "cast"],
    verify: bool | None,
    mmap: bool,
    progress: ProgressCallback | None,
) -> dict[Any, Any]:
    """Make a new state dict; all is planned before memory is allocated."""
    metadata, place = reader.metadata, own_place()
    with plain_errors(reader):
        nested = {} if target is None else part(expand(target), place)
        if target is None:
            every, paths, nodes = _everything(metadata, planner)
        else:
            (every, paths), nodes = _flat(nested, metadata), {}
        wanted = _matching(every, keys)
        specs = {name: _spec(leaf) for name, leaf in wanted.items()}
        local = _passed(local_plan(specs), planner, place)
        tied = tied_names(local, wanted, metadata)
        opened = Opened(metadata, reader)
        resized = resize(nested, local, opened, place, strict=True, verify=verify is not False)
        plan = load_plan(metadata, local, dtype=dtype, optional={*tied, *resized.names})
        _refuse_partly(local, plan)
        refuse_dtypes({n: spec.dtype for n, spec in specs.items() if isinstance(spec, TensorSpec)})
        same = tied_sources(local, wanted, tied)
        mapped = _mapped(reader, plan.items, specs, verify=bool(verify)) if mmap else {}
        plan = attrs.evolve(plan, items=_without(plan.items, mapped))
        blank = {name: spec for name, spec in specs.items() if name not in {*same, *mapped}}
        flat = {name: _blank(spec, device) for name, spec in blank.items()} | mapped
        flat |= {name: flat[kept] for name, kept in same.items()}
        into = destinations(flat, plan.items, reader)
        done = read_rank(reader, plan, into, verify=verify is not False, progress=progress)
    LOG.info("%s: restored %d names, %d bytes", reader.store.url, len(flat), done.stats.bytes_read)
    whole = {**flat, **done.values}
    if target is None:
        made = unflatten(whole, paths, nodes=_complete(nodes, paths, whole))
    else:
        made = unflatten(whole, paths, like=nested)
    resized.put(made)
    unpart(made, nested)
    return made


def _passed(plan: SavePlan, planner: Passes[SavePlan] | None, place: Place) -> SavePlan:
    """Run a planner over the plan of this rank alone."""
    if planner is None:
        return plan
    plan = attrs.evolve(plan, rank=place.rank, world_size=place.ranks)
    stages = Stages.of(planner, load=True)
    if stages.needs_all and place.ranks > 1:
        text = f"restore plans each rank alone, and {stages.rest_text} needs the plans of all"
        raise ValueError(
            f"{text} {place.ranks} ranks: use load(), or give the pass its sizes or count, so that "
            "it works on each rank alone"
        )
    given = chain(*stages.own)((plan,))
    return with_replicas(chain(*stages.rest)(given), given)[0]


def _refuse_partly(local: SavePlan, plan: LoadPlan) -> None:
    """Refuse new tensors that the planner leaves out in part: that part would be uninitialised."""
    text = "`{}` would be filled only in part: the planner leaves out the rest; use load"
    partly = sorted(partly_filled(local, plan.items))
    if partly:
        raise PlanError(Issue("left_out", name, text.format(name)) for name in partly)


def _flat(
    nested: Mapping[Any, Any], metadata: Metadata
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Flatten a target; what the checkpoint keeps as one value is one."""
    flat, paths = flatten(nested)
    whole = whole_names(flat, paths, metadata)
    if whole:
        flat, paths = flatten(nested, whole=whole)
    return {name: None if name in whole else leaf for name, leaf in flat.items()}, paths


def _spec(leaf: Any) -> Any:
    """Return what is to be made like a leaf: a DTensor, a whole tensor, or some value."""
    if not is_tensor(leaf):
        return {} if isinstance(leaf, Mapping) and not leaf else None
    if isinstance(leaf, torch.Tensor) and hasattr(leaf, "placements"):
        return leaf
    if isinstance(leaf, TensorSpec) and not leaf.placements:
        return leaf
    return TensorSpec(tuple(leaf.shape), dtype_name(leaf.dtype))


def _mapped(
    reader: Reader, items: ReadItems, specs: Mapping[str, Any], *, verify: bool
) -> dict[str, Any]:
    """Map the tensors that are just what the checkpoint has under some name."""
    saved, names, entries = dict[str, str](), items.names, reader.metadata.state_dict_metadata
    alone = np.bincount(items.dest, minlength=len(names))[items.dest] == 1
    moved = np.zeros(len(items), bool) if items.frame is None else items.frame.axes.known
    for row in np.flatnonzero(alone & ~moved).tolist():
        name, source = names[int(items.dest[row])], names[int(items.storage[row])]
        entry, spec = entries[source], specs[name]
        if isinstance(spec, TensorSpec) and isinstance(entry, TensorMetadata):
            same = (spec.shape, spec.dtype) == (entry.size, entry.properties.dtype)
            saved |= {source: name} if same else {}  # two that map the same would share memory
    found = map_tensors(reader, sorted(saved), verify=verify)
    return {saved[source]: tensor for source, tensor in found.items()}


def _without(items: ReadItems, names: Collection[str]) -> ReadItems:
    """Return the reads that do not fill tensors of some names."""
    kept = np.array([name not in names for name in items.names], bool)
    return items.take(np.flatnonzero(kept[items.dest]))


def _blank(spec: Any, device: Any) -> Any:
    """Return a new tensor, or what stands for a value until it is read."""
    if isinstance(spec, TensorSpec):
        return empty_tensor(spec.shape, spec.dtype, device)
    return blank_like(spec, device) if is_tensor(spec) else spec


def _everything(
    metadata: Metadata, planner: Passes[SavePlan] | None
) -> tuple[dict[str, Any], Mapping[str, Path], Mapping[Path, Any]]:
    """Return the state dict that made a checkpoint, the path of each value, and its nodes."""
    if planner is not None:
        try:
            metadata = seen_through(metadata, planner).metadata
        except PlanError:
            raise
        except ValueError as error:
            raise ValueError(f"{error}; or pass a target that says what to make") from None
    entries = metadata.state_dict_metadata
    specs: dict[tuple[int, int], TensorSpec | None] = {}  # few tensors differ in shape and dtype
    wanted = {}
    columns = zip(entries.names, entries.layout.tolist(), entries.prop.tolist(), strict=True)
    for name, layout, prop in columns:
        if (layout, prop) not in specs:
            entry, spec = entries[name], None
            if isinstance(entry, TensorMetadata):
                spec = TensorSpec(entry.size, entry.properties.dtype)
            specs[layout, prop] = spec
        wanted[name] = specs[layout, prop]
    data = metadata.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    return wanted, paths, saved_nodes(data)


def _complete(
    nodes: Mapping[Path, Any], paths: Mapping[str, Path], made: Collection[str]
) -> dict[Path, Any]:
    """Return the nodes whose leaves are all made; others come back as dicts and tuples."""
    lost = [path for name, path in paths.items() if name not in made] if nodes else []
    broken = {path[:depth] for path in lost for depth in range(1, len(path))}
    return {path: data for path, data in nodes.items() if path not in broken}


def _matching(wanted: Mapping[str, Any], keys: Iterable[str] | None) -> Mapping[str, Any]:
    if keys is None:
        return wanted
    patterns = [keys] if isinstance(keys, str) else list(keys)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"keys are patterns of names, such as 'model.*', not {patterns!r}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in wanted):
            near = nearest_names(pattern, wanted)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise NotFoundError(f"no name in the checkpoint matches `{pattern}`{hint}", near)
    return {n: v for n, v in wanted.items() if any(fnmatchcase(n, p) for p in patterns)}
