"""Meshes and placements as text.

A mesh is ``dp=96,tp=2``. Placements are ``PATTERN=PLACED``: a pattern of names, and either one
placement per mesh axis, in order (``Shard(0),Replicate()``), or placements by the name of the axis
(``dp:shard0,tp:shard1``), where other axes hold copies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from shardplan.planning import (
    Entries,
    Mesh,
    Only,
    Replicate,
    Shard,
    StridedShard,
    counted,
)
from shardplan.planning.mesh import Placement

from .names import choose, hint

__all__ = ["Placing", "by_axis", "fitting", "parse_mesh", "parse_placements", "place"]

_MOST: Final = 1 << 20  # ranks; the columns of more would not fit into memory
_MESH: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]+)\s*")
_PLACED: Final = re.compile(r"([a-z]+)\s*(?:\(([^()]*)\)|(-?[0-9]+))?", re.IGNORECASE)
_NAMED: Final = re.compile(r"([A-Za-z_]\w*)\s*:(.*)")
_COMMA: Final = re.compile(r",(?![^()]*\))")  # not those between parentheses
_NUMBER: Final = re.compile(r"(?:dim=|split_factor=)?(-?[0-9]+)")


@attrs.frozen
class Placing:
    """How some tensors are placed.

    Attributes:
        pattern: Which names.
        placements: One placement per mesh axis.
    """

    pattern: str
    placements: tuple[Placement, ...]


def parse_mesh(text: str) -> Mesh:
    """Read a mesh.

    >>> parse_mesh("dp = 96, tp=2")
    Mesh(dp=96, tp=2)

    Raises:
        ValueError: It is not one.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        found = _MESH.fullmatch(part)
        if found is None:
            raise ValueError(f"--mesh {text!r}: {part.strip()!r} is not an axis; write dp=96,tp=2")
        if int(found[2]) < 1:
            raise ValueError(f"--mesh {text!r}: {found[1]} needs at least 1 rank")
        if found[1] in axes:
            raise ValueError(f"--mesh {text!r}: there are two axes named {found[1]}")
        axes[found[1]] = int(found[2])
    ranks = math.prod(axes.values())
    if ranks > _MOST:
        raise ValueError(f"--mesh {text!r} has {ranks:,} ranks; at most {_MOST:,} can be planned")
    return Mesh(axes)


def parse_placements(texts: Sequence[str], mesh: Mesh) -> tuple[Placing, ...]:
    """Read how tensors are placed; the default comes last, and matches all names.

    >>> for placing in parse_placements(["*.wo=dp:shard0,tp:shard1"], Mesh(dp=4, tp=2)):
    ...     print(placing.pattern, *placing.placements)
    *.wo Shard(dim=0) Shard(dim=1)
    * Shard(dim=0) Replicate()

    Raises:
        ValueError: One of them is wrong.
    """
    copies: list[Placement] = [Replicate()] * (len(mesh.shape) - 1)
    default = (Shard(0), *copies)
    return (*(_parse(text, mesh) for text in texts), Placing("*", default))


def _parse(text: str, mesh: Mesh) -> Placing:
    pattern, _, placed = map(str.strip, text.partition("="))
    where = f"--placements {text!r}"
    if not pattern or not placed:
        raise ValueError(f"{where}: write PATTERN=PLACED, as in '*.weight=dp:shard0'")
    parts = [part.strip() for part in _COMMA.split(placed)]
    named = [_NAMED.fullmatch(part) for part in parts]
    if not any(named):
        in_order = tuple(_placement(part, where) for part in parts)
        if len(parts) != len(mesh.shape):
            raise ValueError(
                f"{where}: {counted(len(parts), 'placement')} given, and {mesh!r} takes "
                f"{len(mesh.shape)}; name the axes to leave some out, as in {mesh.names[0]}:shard0"
            )
        return Placing(pattern, in_order)
    axes: dict[str, Placement] = {}
    for part, found in zip(parts, named, strict=True):
        if found is None:
            raise ValueError(f"{where}: {part!r} does not name a mesh axis, while others do")
        if found[1] not in mesh.names or found[1] in axes:
            problem = "is named twice" if found[1] in axes else f"is not an axis of {mesh!r}"
            raise ValueError(f"{where}: {found[1]} {problem}")
        axes[found[1]] = _placement(found[2].strip(), where)
    return Placing(pattern, tuple(axes.get(name, Replicate()) for name in mesh.names))


def _placement(text: str, where: str) -> Placement:
    found = _PLACED.fullmatch(text)
    kind = found[1].lower() if found else ""
    inside = "" if found is None else found[2] or found[3] or ""
    parts = [_NUMBER.fullmatch(part.strip()) for part in inside.split(",")] if inside else []
    numbers = [int(part[1]) for part in parts if part]
    if len(numbers) == len(parts):
        match kind, numbers:
            case "replicate" | "r", []:
                return Replicate()
            case "shard" | "s", [dim]:
                return Shard(dim)
            case "shard" | "s", []:
                raise ValueError(
                    f"{where}: {text!r} needs an axis number, as in shard0 or Shard(0)"
                )
            case "stridedshard", [dim, factor] if factor > 0:
                return StridedShard(dim, split_factor=factor)
            case "only", [_, *_] if min(numbers) >= 0:
                return Only(numbers)
    known = "shard0, replicate, StridedShard(0,2) or Only(3)"
    raise ValueError(f"{where}: {text!r} is not a placement; write {known}")


def place(entries: Entries, placings: Sequence[Placing]) -> dict[str, Placing]:
    """Return how each tensor of a checkpoint is placed: by the first pattern that matches it.

    Raises:
        ValueError: A pattern matches no tensor.
    """
    names = [n for n, layout in zip(entries.names, entries.layout, strict=True) if layout >= 0]
    found: dict[str, Placing] = {}
    for placing in placings:
        chosen = choose(placing.pattern, names)
        if not chosen and placing is not placings[-1]:
            near = hint(placing.pattern, names)
            raise ValueError(f"--placements: {placing.pattern!r} matches no tensor{near}")
        for number in chosen:
            found.setdefault(names[number], placing)
    return found


def fitting(placing: Placing, shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placements of a tensor; every rank holds one that has no axes."""
    return placing.placements if shape else (Replicate(),) * len(placing.placements)


def by_axis(placing: Placing, mesh: Mesh) -> Mapping[str, str]:
    """Write placements as the command line takes them, by mesh axis.

    >>> by_axis(Placing("*", (Shard(0), Replicate())), Mesh(dp=4, tp=2))
    {'dp': 'Shard(0)', 'tp': 'Replicate()'}
    """
    texts = map(_text, placing.placements)
    return dict(zip(mesh.names, texts, strict=True))


def _text(placement: Placement) -> str:
    match placement:
        case Shard(dim):
            return f"Shard({dim})"
        case StridedShard(dim, factor):
            return f"StridedShard({dim},{factor})"
        case Only(coordinates):
            return f"Only({','.join(map(str, coordinates))})"
        case _:
            return "Replicate()"
