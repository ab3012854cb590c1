"""A hash of the contents of state dicts and checkpoints that is the same under every sharding."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import attrs
import numpy as np

from shardplan.dist import Comm, Turn, take_step
from shardplan.io import (
    PlaceSums,
    ValueRefusedError,
    fingerprint_of,
    place_sums,
    tensor_bytes,
)
from shardplan.io.execute import Piece, collect
from shardplan.io.stores import Store
from shardplan.planning import Issue, PlanError, dtype_name, flatten, itemsize, local_plan, span
from shardplan.planning.storage import boxes_of

from ._checkpoint import SavedTensor, open_checkpoint
from ._comm import as_comm, place_of
from ._replicas import value_digest
from ._state import State, expand, is_stateful, part

__all__ = ["content_hash"]

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@overload
def content_hash(
    contents: State | str | os.PathLike[str] | Store,
    *,
    by: Literal["all"] = "all",
    comm: Comm | None = None,
) -> str: ...
@overload
def content_hash(
    contents: State | str | os.PathLike[str] | Store,
    *,
    by: Literal["tensor"],
    comm: Comm | None = None,
) -> dict[str, str]: ...
def content_hash(
    contents: State | str | os.PathLike[str] | Store,
    *,
    by: Literal["all", "tensor"] = "all",
    comm: Comm | None = None,
) -> str | dict[str, str]:
    """Return a hash that is equal for equal contents, however these are cut, stored or spread.

    It is equal for the same names, dtypes, shapes, elements and values on any mesh, on any number
    of ranks, in any format. It differs if an element, its place, its dtype, its shape or its name
    does. It finds changes that happen by accident; it is not cryptography.

    Many ranks call this together. Each hashes the elements that it holds, or a part of the
    checkpoint, and one small message per rank brings the sums together. Ranks that hold the same
    chunk are compared on the way.

    Args:
        contents: A state dict, as in `save`; or the path of a checkpoint.
        by: ``"all"`` for one hash, ``"tensor"`` for one per tensor and value, by name.
        comm: As in `save`.

    Returns:
        32 hex digits, or a dict of them; the same on all ranks.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> state = {"w": torch.arange(6.0).reshape(2, 3), "step": 7}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(state, folder, format="dcp")
    ...     content_hash(folder) == content_hash(state)
    True
    >>> content_hash({**state, "step": 8}) == content_hash(state)
    False

    Raises:
        PlanError: Ranks hold different data under one name, or only a part of a tensor.
        ValueRefusedError: A value cannot be compared, or a tensor not be read.
        FormatError, StoreError: The checkpoint cannot be read.
        CheckpointError: On many ranks, any of these.
    """
    if by not in ("all", "tensor"):
        raise ValueError(f'by must be "all" or "tensor", not {by!r}')
    comm = as_comm(comm)

    def mine() -> Turn[None]:
        is_state = isinstance(contents, Mapping) or is_stateful(contents)
        found = _of_state(contents, comm) if is_state else _of_checkpoint(contents, comm)
        return Turn(None, [[name, *attrs.astuple(held)] for name, held in found])

    def merge(ranks: Sequence[Any]) -> Turn[None]:
        known = [[(name, _Held(*rest)) for name, *rest in one] for one in ranks]
        return Turn(None, _merged(comm.ranks, known))

    hashes = dict(take_step(comm, "hash the contents", mine, merge).reply)
    if by == "tensor":
        return hashes
    return hashlib.blake2b(json.dumps(sorted(hashes.items())).encode(), digest_size=16).hexdigest()


@attrs.frozen
class _Held:
    """What a rank knows of a tensor, or of a value."""

    dtype: str  # the tensor's; empty for a value
    shape: Sequence[int] = ()  # the tensor's
    # What the rank hashed: offsets, sizes and the two sums of each box.
    boxes: Sequence[Sequence[Any]] = ()
    digest: str = ""  # the value's; empty for a tensor


def _of_state(contents: Any, comm: Comm) -> Iterator[tuple[str, _Held]]:
    """Hash what this rank holds."""
    state = part(expand(contents), place_of(comm))
    pieces, values, refused = collect(flatten(state)[0], local_plan(state))
    if refused:
        raise ValueRefusedError(refused)
    for piece in pieces.values():
        box = _hashed(piece.dtype, piece.size, piece.offsets, piece.shape, _blocks(piece))
        yield piece.name, _Held(piece.dtype, piece.size, [box])
    for name, value in values.items():
        yield name, _Held("", digest=f"{value_digest(value):016x}")


def _blocks(piece: Piece) -> Iterator[tuple[Box, memoryview]]:
    for offsets, sizes in boxes_of(piece.shape, piece.dtype):
        axes = len(piece.shape)
        box = tuple(offsets[:axes]), tuple(sizes[:axes])
        yield box, piece.block(*box)


def _of_checkpoint(contents: Any, comm: Comm) -> Iterator[tuple[str, _Held]]:
    """Hash this rank's share of a checkpoint: every n-th block; the coordinator, values too."""
    checkpoint, number = open_checkpoint(contents), 0
    for name in checkpoint:
        saved = checkpoint[name]
        if not isinstance(saved, SavedTensor):
            if comm.rank == comm.coordinator:
                yield name, _Held("", digest=f"{value_digest(saved):016x}")
            continue
        dtype, axes = dtype_name(saved.dtype), len(saved.shape)
        for offsets, sizes in boxes_of(saved.shape, dtype):
            number += 1
            if number % comm.world_size != comm.rank:
                continue
            at, box = tuple(offsets[:axes]), tuple(sizes[:axes])
            data = tensor_bytes(saved.read_box(at, box), dtype)
            whole = ((0,) * axes, box)
            yield (
                name,
                _Held(dtype, saved.shape, [_hashed(dtype, saved.shape, at, box, [(whole, data)])]),
            )


def _hashed(
    dtype: str,
    shape: Sequence[int],
    start: Sequence[int],
    sizes: Sequence[int],
    blocks: Any,
) -> list[Any]:
    """Hash a box of a tensor, given its blocks relative to it."""
    total, width = PlaceSums(), itemsize(dtype)
    for (offsets, extent), data in blocks:
        at = [a + b for a, b in zip(start, offsets, strict=True)]
        total += place_sums(np.frombuffer(data, np.uint8), width, shape, at, extent)
    return [list(start), list(sizes), total.words, total.halves]


def _merged(numbers: Sequence[int], ranks: Sequence[Any]) -> dict[str, str]:
    """Put together what all ranks hashed, by name; raise if they contradict each other."""
    kinds: dict[str, dict[Any, list[int]]] = {}
    sums: dict[str, dict[Any, dict[Any, list[int]]]] = {}
    for rank, found in zip(numbers, ranks, strict=True):
        for name, held in found:
            kind = (held.dtype, tuple(held.shape), held.digest)
            kinds.setdefault(name, {}).setdefault(kind, []).append(rank)
            boxes = sums.setdefault(name, {})
            for offsets, sizes, words, halves in held.boxes:
                box = boxes.setdefault((tuple(offsets), tuple(sizes)), {})
                box.setdefault((words, halves), []).append(rank)
    issues = [*_conflicts(kinds, sums), *_gaps(kinds, sums)]
    if issues:
        raise PlanError(issues)
    return {
        name: _hash_of(name, next(iter(kind)), sums[name].values())
        for name, kind in sorted(kinds.items())
    }


def _hash_of(name: str, kind: tuple[str, Sequence[int], str], boxes: Any) -> str:
    dtype, shape, digest = kind
    if not dtype:
        data = json.dumps([name, "value", digest]).encode()
        return hashlib.blake2b(data, digest_size=16).hexdigest()
    total = sum((PlaceSums(*next(iter(found))) for found in boxes), PlaceSums())
    return fingerprint_of(name, dtype, shape, total)


def _conflicts(
    kinds: Mapping[str, Mapping[Any, list[int]]],
    sums: Mapping[str, Mapping[Any, Mapping[Any, list[int]]]],
) -> Iterator[Issue]:
    """Report names under which ranks hold different data."""
    for name, kind in kinds.items():
        boxes = sums[name].values()
        sides = [kind] if len(kind) > 1 else [found for found in boxes if len(found) > 1]
        if sides:
            apart = " against ".join(span(sorted({*ranks})) for ranks in sides[0].values())
            yield Issue("conflict", name, f"`{name}` differs between ranks: {apart}")


def _gaps(
    kinds: Mapping[str, Mapping[Any, list[int]]],
    sums: Mapping[str, Mapping[Any, Mapping[Any, list[int]]]],
) -> Iterator[Issue]:
    """Report tensors that the ranks hold only in part, or in parts that overlap."""
    for name, kind in kinds.items():
        dtype, shape, _ = next(iter(kind))
        held = sum(math.prod(sizes) for _, sizes in sums[name])
        if dtype and held != math.prod(shape):
            text = f"the chunks of `{name}` have {held:,} of its {math.prod(shape):,} elements"
            yield Issue("gap", name, f"{text}: every rank that holds a part must call this")
