"""Make a new state dict of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch

from shardplan.io import Pool, ProgressCallback, empty_tensor
from shardplan.io.execute import Reader
from shardplan.io.formats import open_source
from shardplan.io.stores import Store
from shardplan.planning import (
    Metadata,
    NotFoundError,
    TensorMetadata,
    TensorSpec,
    dtype_name,
    flatten,
    is_tensor,
    load_plan,
    local_plan,
    nearest_names,
    unflatten,
    whole_names,
)

from ._comm import own_place
from ._memory import blank_like, destinations, resize, tied_names
from ._read import Opened, plain_errors, read_anew, read_rank
from ._report import LOG
from ._state import State, expand, part, unpart


def restore(
    path: str | os.PathLike[str] | Store,
    target: State | None = None,
    *,
    keys: Iterable[str] | None = None,
    device: Any = "cpu",
    dtype: Literal["same", "cast"] = "same",
    format: str | None = None,
    verify: bool = True,
    progress: ProgressCallback | None = None,
    pool: Pool | None = None,
) -> dict[Any, Any]:
    """Make a new state dict of a checkpoint, nested as it was saved.

    Args:
        path: The checkpoint.
        target: What to make, nested in any way: meta tensors, `TensorSpec`s, or anything else with
            a shape and a dtype; other leaves stand for non-tensor values. A DTensor stands for one
            on the same mesh, and this rank reads its own part; an object with ``state_dict()`` and
            ``load_state_dict()`` stands for its state, and is not changed. Everything that was
            saved if left out.
        keys: Shell-style patterns of the flattened names to read; everything if left out.
        device: Where new tensors are made; DTensors are made where their mesh is.
        dtype: Whether tensors of ``target`` may have another dtype than the saved ones: ``"cast"``.
        format: What wrote the checkpoint; detected if left out.
        verify: Whether to check what is read whole against its checksums.
        progress: Called as ``progress(done_bytes, total_bytes)``, from one thread at a time, with
            more and more bytes of this process's tensors done, and all of them in the end. What
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
        NotFoundError: A pattern of ``keys`` matches nothing.
        FormatError: The checkpoint is damaged. If it was overwritten meanwhile, the new one is
            read instead.
    """
    if torch.device(device).type == "meta":
        raise ValueError(
            "the meta device holds no elements to restore; open_checkpoint gives names, shapes and "
            "dtypes without reading them"
        )
    options: dict[str, Any] = {"dtype": dtype, "verify": verify, "progress": progress}
    return read_anew(
        lambda: (Reader(open_source(path, format=format, pool=pool), pool),),
        partial(_restore, target=target, keys=keys, device=device, **options),
    )


def _restore(
    reader: Reader,
    *,
    target: State | None,
    keys: Iterable[str] | None,
    device: Any,
    dtype: Literal["same", "cast"],
    verify: bool,
    progress: ProgressCallback | None,
) -> dict[Any, Any]:
    """Make a new state dict of a checkpoint; all is planned before memory is asked for."""
    metadata, place = reader.metadata, own_place()
    with plain_errors(reader):
        nested = {} if target is None else part(expand(target), place)
        every, paths = _everything(metadata) if target is None else _flat(nested, metadata)
        wanted = _matching(every, keys)
        specs = {name: _spec(leaf) for name, leaf in wanted.items()}
        local = local_plan(specs)
        tied = tied_names(local, wanted, metadata)
        opened = Opened(metadata, reader)
        resized = resize(nested, local, opened, place, strict=True, verify=verify)
        plan = load_plan(metadata, local, dtype=dtype, optional={*tied, *resized.names})
        flat = {name: _blank(spec, device) for name, spec in specs.items() if name not in tied}
        flat |= {name: flat[kept] for name, kept in tied.items()}
        into = destinations(flat, plan.items, reader)
        done = read_rank(reader, plan, into, verify=verify, progress=progress)
    LOG.info("%s: restored %d names, %d bytes", reader.store.url, len(flat), done.stats.bytes_read)
    made = unflatten({**flat, **done.values}, paths)
    resized.put(made)
    unpart(made, nested)
    return made


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


def _blank(spec: Any, device: Any) -> Any:
    """Return a new tensor, or what stands for a value until it is read."""
    if isinstance(spec, TensorSpec):
        return empty_tensor(spec.shape, spec.dtype, device)
    return blank_like(spec, device) if is_tensor(spec) else spec


def _everything(metadata: Metadata) -> tuple[dict[str, Any], Mapping[str, Any]]:
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
    return wanted, data.get("paths", {}) if isinstance(data, Mapping) else {}


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
            raise NotFoundError(f"nothing in the checkpoint is called `{pattern}`{hint}", near)
    return {n: v for n, v in wanted.items() if any(fnmatchcase(n, p) for p in patterns)}
