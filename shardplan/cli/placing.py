"""How are meshes and placements written on a command line?

A mesh is ``dp=96,tp=2``. Placements are ``PATTERN=PLACED``: a shell-style pattern of names, and
either one placement per mesh axis, in order (``Shard(0),Replicate()``), or placements by the name
of the axis (``dp:shard0,tp:shard1``), where an axis that is not named holds copies.
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
    TensorMetadata,
    counted,
)
from shardplan.planning.mesh import Placement

from .choosing import choose, hint

__all__ = ["DEFAULT", "Placing", "by_axis", "parse_mesh", "parse_placements", "place", "words"]

DEFAULT: Final = "*"
_MOST: Final = 1 << 20  # ranks; the columns of more would not fit into memory
_MESH: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]+)\s*")
_PLACED: Final = re.compile(
    r"(?P<kind>[a-z]+)\s*(?:\(\s*(?P<inside>[^()]*?)\s*\)|(?P<short>-?[0-9]+)?)", re.IGNORECASE
)
_NAMED: Final = re.compile(r"([A-Za-z_]\w*)\s*:(.*)")
_COMMA: Final = re.compile(r",(?![^()]*\))")  # not those between parentheses
_FACTOR: Final = re.compile(r"(?:split_factor\s*=\s*)?([0-9]+)")


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
        ValueError: It is none.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        found = _MESH.fullmatch(part)
        if found is None:
            raise ValueError(f"--mesh {text!r}: {part.strip()!r} is no axis; write dp=96,tp=2")
        if int(found[2]) < 1:
            raise ValueError(f"--mesh {text!r}: {found[1]} needs at least 1 rank")
        if found[1] in axes:
            raise ValueError(f"--mesh {text!r}: there are two axes named {found[1]}")
        axes[found[1]] = int(found[2])
    ranks = math.prod(axes.values())
    if ranks > _MOST:
        raise ValueError(
            f"--mesh {text!r}: these are {ranks:,} ranks; at most {_MOST:,} are planned"
        )
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
    return (*(_parse(text, mesh) for text in texts), Placing(DEFAULT, default))


def _parse(text: str, mesh: Mesh) -> Placing:
    pattern, _, placed = text.partition("=")
    where = f"--placements {text!r}"
    if not pattern.strip() or not placed.strip():
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
        return Placing(pattern.strip(), in_order)
    by_axis: dict[str, Placement] = {}
    for part, found in zip(parts, named, strict=True):
        if found is None:
            raise ValueError(f"{where}: {part!r} names no mesh axis, while others do")
        if found[1] not in mesh.names or found[1] in by_axis:
            problem = "is named twice" if found[1] in by_axis else f"is no axis of {mesh!r}"
            raise ValueError(f"{where}: {found[1]} {problem}")
        by_axis[found[1]] = _placement(found[2].strip(), where)
    return Placing(pattern.strip(), tuple(by_axis.get(name, Replicate()) for name in mesh.names))


def _placement(text: str, where: str) -> Placement:
    found = _PLACED.fullmatch(text)
    kind = found["kind"].lower() if found else ""
    inside = "" if found is None else found["inside"] or found["short"] or ""
    numbers = [part.strip() for part in inside.split(",")] if inside else []
    try:
        if kind in ("replicate", "r") and not numbers:
            return Replicate()
        if kind in ("shard", "s") and len(numbers) == 1:
            return Shard(int(numbers[0].removeprefix("dim=")))
        if kind == "only" and numbers:
            return Only(map(int, numbers))
        factor = _FACTOR.fullmatch(numbers[1]) if len(numbers) == 2 else None
        if kind == "stridedshard" and factor is not None:
            return StridedShard(int(numbers[0].removeprefix("dim=")), split_factor=int(factor[1]))
    except ValueError:
        pass
    if kind in ("shard", "s") and not numbers:
        raise ValueError(f"{where}: {text!r} needs an axis number, as in shard0 or Shard(0)")
    raise ValueError(
        f"{where}: {text!r} is no placement; write shard0, replicate, StridedShard(0,2) or Only(3)"
    )


def place(
    entries: Entries, mesh: Mesh, placings: Sequence[Placing]
) -> tuple[dict[str, tuple[Placement, ...]], dict[str, Placing]]:
    """Place every tensor of a checkpoint; one without axes is held by every rank.

    Returns:
        The placements by name, and which of the ``placings`` gave them.

    Raises:
        ValueError: A pattern matches no tensor.
    """
    names = [n for n, layout in zip(entries.names, entries.layout, strict=True) if layout >= 0]
    which: dict[str, Placing] = {}
    for placing in placings:
        chosen = choose(placing.pattern, names)
        if not chosen and placing is not placings[-1]:
            near = hint(placing.pattern, names)
            raise ValueError(f"--placements: {placing.pattern!r} matches no tensor{near}")
        for number in chosen:
            which.setdefault(names[number], placing)
    copies = (Replicate(),) * len(mesh.shape)
    placements = {
        name: placing.placements if _has_axes(entries, name) else copies
        for name, placing in which.items()
    }
    return placements, which


def _has_axes(entries: Entries, name: str) -> bool:
    entry = entries[name]
    return isinstance(entry, TensorMetadata) and len(entry.size) > 0


def words(placements: Sequence[Placement], mesh: Mesh) -> str:
    """Say how something is placed.

    >>> words((Shard(0), Replicate()), Mesh(dp=4, tp=2))
    'axis 0 cut over dp (4), copied along tp (2)'
    """
    return ", ".join(
        _words(placement, f"{axis} ({ranks})")
        for placement, (axis, ranks) in zip(placements, mesh.axes.items(), strict=True)
    )


def _words(placement: Placement, axis: str) -> str:
    match placement:
        case Shard(dim):
            return f"axis {dim} cut over {axis}"
        case StridedShard(dim, factor):
            return f"axis {dim} cut over {axis}, strided by {factor}"
        case Only(coordinates):
            return f"only at {', '.join(map(str, coordinates))} of {axis}"
        case _:
            return f"copied along {axis}"


def by_axis(placements: Sequence[Placement], mesh: Mesh) -> Mapping[str, str]:
    """Write placements as the command line takes them, by mesh axis.

    >>> by_axis((Shard(0), Replicate()), Mesh(dp=4, tp=2))
    {'dp': 'Shard(0)', 'tp': 'Replicate()'}
    """
    return {axis: _text(placed) for axis, placed in zip(mesh.names, placements, strict=True)}


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
