"""Checksums of what several ranks hold under one name, to be compared before a save."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from shardplan.planning import SavePlan, WriteItemType, dtype_name, is_tensor

COMPARED_BYTES: Final = 1 << 16
"""Bytes of the largest plain tensor that is compared always."""

_SHARDED: Final = ("placements", "local_shards", "__create_chunk_list__")
_OWN: Final = "save plain values or tensors instead, or each rank's own as PerRank(value)"


def digests(
    flat: Mapping[str, Any],
    plan: SavePlan | None = None,
    *,
    own: Collection[str] = (),
    everything: bool = False,
) -> dict[str, int]:
    """Return the checksums of what a rank must hold as others do, by name.

    These are values and small plain tensors, or with ``everything`` all chunks of a plan, shards of
    DTensors included; the name of a part is followed by a null character and its start. Without a
    plan, all of ``flat`` is stored unchanged. Names in ``own`` are left out.

    >>> digests({"w": np.zeros(2), "step": 7}) == digests({"step": 7, "w": np.zeros(2)})
    True

    Raises:
        ValueRefusedError: Some values cannot be compared; it names all of them.
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
    """Return the values and small plain tensors, which are always compared."""
    plain: dict[type, bool] = {}
    compared = {}
    for name, value in flat.items():
        if is_tensor(value):
            kind = type(value)
            if kind not in plain:
                plain[kind] = not any(hasattr(value, attribute) for attribute in _SHARDED)
            small = plain[kind] and getattr(value, "nbytes", COMPARED_BYTES + 1) <= COMPARED_BYTES
            if not small or getattr(value, "is_meta", False):
                continue
        compared[name] = value
    return compared


def _each(values: Mapping[str, Any], digest: Callable[[Any], int]) -> dict[str, int]:
    """Return the checksum of each value; refuse values without one, by name."""
    found: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name, value in values.items():
        try:
            found[name] = digest(value)
        except Exception as error:  # inspecting an object may raise anything
            why = f"{type(error).__name__}: {str(error)[:300]}"
            refused[name.partition("\0")[0]] = f"cannot be compared between ranks ({why}); {_OWN}"
    if refused:
        raise ValueRefusedError(refused)
    return found


def _piece_digest(piece: Piece) -> int:
    return combine([hash_views([block]) for block in piece.blocks()])


def _place(offsets: Sequence[int]) -> str:
    """Return the start of a chunk as text; empty at the tensor's origin."""
    return f" at {list(offsets)}" if any(offsets) else ""


# The checksum of one value


def value_digest(value: Any) -> int:
    """Return a checksum of the contents of a value.

    The order of sets and dicts does not count, nor whether two equal parts are one object.

    >>> value_digest({"a": {1, 2}, "b": 3.0}) == value_digest({"b": 3.0, "a": {2, 1}})
    True
    >>> value_digest((1, 2)) == value_digest([1, 2]), value_digest(1) == value_digest(1.0)
    (False, False)
    """
    data = b"".join(_parts(value.value if isinstance(value, Kept) else value))
    return hash_views([memoryview(data)])


def _digest(value: Any) -> bytes:
    """Return the digest, of fixed length, of a part of a value."""
    return hashlib.blake2b(b"".join(_parts(value)), digest_size=16).digest()


def _parts(value: Any) -> list[bytes]:
    """Return the bytes to hash of a value: the name of its type, and the digests of its parts."""
    kind = type(value)
    if kind is int:
        return [b"int:", hex(value).encode()]  # unlike repr, without a limit on digits
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
        kind = list if isinstance(value, list) else tuple  # the type they are loaded as
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
