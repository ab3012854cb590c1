"""Comparing what several ranks hold under one name, by checksum, before a save.

Values and small plain tensors are always compared; with ``verify_replicas`` every chunk is, shards
of DTensors included. What is compared is what would be stored, under its name in the checkpoint.
Each rank sends one fingerprint of its table of checksums. Where these differ, one rank of each kind
sends its table, and the coordinator compares.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from shardplan.io import (
    ValueRefusedError,
    as_tensor,
    combine,
    default_pool,
    flat_memory,
    hash_views,
    tensor_bytes,
)
from shardplan.io.execute import Kept, Piece, collect
from shardplan.planning import (
    Issue,
    SavePlan,
    WriteItemType,
    dtype_name,
    is_tensor,
    span,
)

__all__ = ["COMPARED_BYTES", "differences", "digests", "tag_of"]

COMPARED_BYTES: Final = 1 << 16
"""Bytes of the largest plain tensor that is compared always."""

_SHARDED: Final = ("placements", "local_shards", "__create_chunk_list__")
_REMEDY: Final = (
    "make them equal, or give each rank's its own name; state that is meant to differ is saved as "
    "PerRank(value)"
)
_OWN: Final = "save plain values or tensors instead, or each rank's own as PerRank(value)"


def digests(
    flat: Mapping[str, Any],
    plan: SavePlan | None = None,
    *,
    own: Collection[str] = (),
    everything: bool = False,
) -> dict[str, int]:
    """Return the checksums of what a rank must hold as others do, by name.

    A part of a tensor, if it is cut, is named by where it starts, after a null character.

    Args:
        flat: The rank's state dict, flattened.
        plan: What is stored of it; None if all of it is stored as it is.
        own: Names of the state dict that no other rank has; they are left out.
        everything: Whether to look at every chunk of the plan; else at values and small tensors.

    >>> digests({"w": np.zeros(2), "step": 7}) == digests({"step": 7, "w": np.zeros(2)})
    True
    >>> digests({"nan": float("nan"), "s": {1, 2}}) == digests({"nan": float("nan"), "s": {2, 1}})
    True

    Raises:
        ValueRefusedError: Some values cannot be compared; all of them are named.
    """
    compared = _compared(flat)
    if plan is None:
        kept = {name: value for name, value in compared.items() if name not in own}
        return _each(kept, lambda v: _tensor_digest(v) if is_tensor(v) else value_digest(v))
    items = plan.items
    wanted = [
        head[1] not in own
        and (everything or (head[1] in compared and head[2] is not WriteItemType.SHARD))
        for head in items.catalog.heads
    ]
    rows = np.flatnonzero(np.array(wanted, bool)[items.row])
    pieces, values, refused = collect(flat, attrs.evolve(plan, items=items.take(rows)))
    if refused:
        raise ValueRefusedError(refused)
    keys = {f"{p.name}\0{_place(p.offsets)}".rstrip("\0"): p for p in pieces.values()}
    if not everything:
        return _each(values, value_digest) | _each(keys, _piece_digest)
    sums = default_pool().map(_piece_digest, keys.values())
    return _each(values, value_digest) | dict(zip(keys, sums, strict=True))


def _compared(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values and small plain tensors of a state dict: what is always compared."""
    plain: dict[type, bool] = {}
    found = {}
    for name, value in flat.items():
        if is_tensor(value):
            kind = type(value)
            if kind not in plain:
                plain[kind] = not any(hasattr(value, attribute) for attribute in _SHARDED)
            small = plain[kind] and getattr(value, "nbytes", COMPARED_BYTES + 1) <= COMPARED_BYTES
            if not small or getattr(value, "is_meta", False):
                continue
        found[name] = value
    return found


def _each(values: Mapping[str, Any], digest: Callable[[Any], int]) -> dict[str, int]:
    """Return the checksum of each value; refuse all that have none, by name."""
    found: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name, value in values.items():
        try:
            found[name] = digest(value)
        except Exception as error:  # an object may fail in any way when it is looked into
            why = f"{type(error).__name__}: {str(error)[:300]}"
            refused[name.partition("\0")[0]] = f"cannot be compared between ranks ({why}); {_OWN}"
    if refused:
        raise ValueRefusedError(refused)
    return found


def _piece_digest(piece: Piece) -> int:
    return combine([hash_views([block]) for block in piece.blocks()])


def _place(offsets: Sequence[int]) -> str:
    """Return where a chunk starts, as text; empty if that is where its tensor does."""
    return f" at {list(offsets)}" if any(offsets) else ""


def tag_of(table: Mapping[str, int]) -> str:
    """Return one short text for a table of checksums, the same in whatever order it is.

    >>> tag_of({"a": 1, "b": 2}) == tag_of({"b": 2, "a": 1}), tag_of({"a": 1}) == tag_of({"a": 2})
    (True, False)
    """
    names = sorted(table)
    sums = struct.pack(f"<{len(names)}Q", *(table[name] for name in names))
    return hashlib.blake2b(json.dumps(names).encode() + sums, digest_size=16).hexdigest()


def differences(
    ranks: Sequence[int], tags: Sequence[str], tables: Sequence[Mapping[str, int]]
) -> list[Issue]:
    """Return a conflict for each name under which ranks hold different things.

    Args:
        ranks: Their numbers in the job.
        tags: The `tag_of` of each rank.
        tables: The `digests` of each rank; of those with the same tag, the first one's is enough.

    >>> print(*differences((0, 1, 2), ("a", "a", "b"), ({"lr": 1, "x": 5}, {}, {"lr": 2})))
    `lr` differs between ranks that save it: ranks 0, 1 against rank 2; make them equal, or give ...
    """
    holders: dict[str, list[int]] = {}
    for rank, tag in zip(ranks, tags, strict=True):
        holders.setdefault(tag, []).append(rank)
    first = dict(zip(reversed(tags), reversed(tables), strict=True))
    sides: dict[str, dict[int, list[int]]] = {}
    for tag, who in holders.items():
        for name, digest in first[tag].items():
            sides.setdefault(name, {}).setdefault(digest, []).extend(who)
    apart = {key: side.values() for key, side in sorted(sides.items()) if len(side) > 1}
    return [_conflict(*key.partition("\0")[::2], side) for key, side in apart.items()]


def _conflict(name: str, where: str, sides: Iterable[list[int]]) -> Issue:
    apart = " against ".join(span(sorted(side)) for side in sorted(sides))
    text = f"`{name}`{where} differs between ranks that save it: {apart}; {_REMEDY}"
    return Issue("conflict", name, text, sorted(rank for side in sides for rank in side))


# The checksum of one value


def value_digest(value: Any) -> int:
    """Return the checksum of a value: of what it holds, not of how it happens to be laid out.

    Sets and dicts count as equal in any order, and a part that occurs twice may be one object or
    two.

    >>> value_digest({"a": {1, 2}, "b": 3.0}) == value_digest({"b": 3.0, "a": {2, 1}})
    True
    >>> value_digest((1, 2)) == value_digest([1, 2]), value_digest(1) == value_digest(1.0)
    (False, False)
    """
    data = b"".join(_parts(value.value if isinstance(value, Kept) else value))
    return hash_views([memoryview(data)])


def _digest(value: Any) -> bytes:
    """Return the digest of a part of a value, of a fixed length."""
    return hashlib.blake2b(b"".join(_parts(value)), digest_size=16).digest()


def _parts(value: Any) -> list[bytes]:
    """Return what to hash of a value: the name of its type, and the digests of what it holds."""
    kind = type(value)
    if kind is int:
        return [b"int:", hex(value).encode()]  # which, unlike repr, has no limit
    if kind is range:
        return [b"range:", *map(_digest, (value.start, value.stop, value.step))]
    if kind in (str, float, bool, complex, type(None)):
        return [kind.__name__.encode(), b":", repr(value).encode("utf-8", "surrogatepass")]
    if isinstance(value, (bytes, bytearray)):
        return [kind.__name__.encode(), b":", bytes(value)]
    if isinstance(value, Mapping):
        return [b"dict:", *sorted(_digest(k) + _digest(v) for k, v in value.items())]
    if isinstance(value, (set, frozenset)):
        return [kind.__name__.encode(), b":", *sorted(map(_digest, value))]
    if isinstance(value, list) or hasattr(value, "_fields"):
        kind = list if isinstance(value, list) else tuple  # as which they come back
    if kind in (list, tuple):
        return [kind.__name__.encode(), b":", *map(_digest, value)]
    if isinstance(value, type):
        return [b"type:", f"{value.__module__}.{value.__qualname__}".encode()]
    if is_tensor(value):
        shape = str((dtype_name(value.dtype), *value.shape)).encode()
        return [b"tensor:", shape, _tensor_digest(value).to_bytes(8, "big")]
    made = value.__reduce_ex__(4)
    if isinstance(made, str):
        return [kind.__qualname__.encode(), b":", made.encode()]
    maker, *rest = made
    name = f"{getattr(maker, '__module__', '')}.{getattr(maker, '__qualname__', '')}"
    parts = [list(part) if isinstance(part, Iterator) else part for part in rest]
    return [b"object:", name.encode(), *map(_digest, parts)]


def _tensor_digest(value: Any) -> int:
    """Return the checksum of a plain tensor's elements."""
    tensor = as_tensor(value)
    view = flat_memory(tensor)
    return hash_views([tensor_bytes(tensor, dtype_name(tensor.dtype)) if view is None else view])
