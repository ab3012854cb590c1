"""How is a picture of a tensor told in words? Labels, tips and captions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..text import counted, human_bytes
from .cells import Cell, Cut, Window
from .svg import runs_text

__all__ = ["about", "named", "remarks", "tip_of", "whose"]


def named(who: Sequence[int], unit: str) -> str:
    """Name ranks or chunks.

    >>> named((3,), "rank"), named((0, 4), "rank")
    ('rank 3', 'ranks 0, 4')
    """
    return f"{unit}{'s' if len(who) > 1 else ''} {runs_text(who)}"


def tip_of(cell: Cell, cut: Cut, window: Window, saved: Cut | None = None) -> str:
    """Say in one line what a cell is; of a piece also where it comes from."""
    sides = zip(window.axes, (cell.top, cell.left), (cell.height, cell.width), strict=True)
    box = ", ".join(f"{low}:{low + n}" for axis, low, n in sides if axis >= cut.lead)
    names = _short(cell.holders, cut.unit)
    if saved is not None:
        names = f"{_short(cell.sources, saved.unit)} → {names}"
    count = "" if cell.chunks == 1 else f"{cell.chunks:,} chunks, "
    return f"{names}: {count}[{box}]"


def _short(who: Sequence[int], unit: str) -> str:
    """Name ranks or chunks in a few words, however many they are."""
    if not who:
        return "nobody"
    words = named(who, unit)
    return words if len(words) <= 60 else f"{counted(len(who), unit)}, {who[0]} … {who[-1]}"


def about(cut: Cut, wanted: Cut | None = None) -> str:
    """Describe a tensor in one line."""
    nbytes = human_bytes(math.prod(cut.size) * cut.itemsize)
    words = f"{cut.dtype} {list(cut.size)} · {nbytes} · {_many(cut)}"
    if wanted is None:
        return words
    shape = f"{list(wanted.size)} in " if wanted.size != cut.size else ""
    return f"{words} → {shape}{_many(wanted)}"


def _many(cut: Cut) -> str:
    """Count chunks and the ranks that hold them."""
    chunks = counted(len(cut.tiling), "chunk")
    ranks = len(set(cut.who.tolist()))
    return f"{chunks} on {counted(ranks, 'rank')}" if cut.unit == "rank" else chunks


def whose(cut: Cut) -> str:
    """Say what colours and labels mean."""
    if cut.unit == "chunk":
        return "Colour and number: the chunk, in the order of the metadata."
    copies = " Several numbers: each of these ranks holds a copy."
    shared = len(cut.who) > len(cut.tiling)
    return f"Colour and number: the rank that holds each chunk.{copies if shared else ''}"


def remarks(
    cut: Cut, window: Window, whole: int, shown: Sequence[Cell], to_scale: bool
) -> list[str]:
    """Say in which ways a picture is not the whole truth.

    Args:
        cut: The tensor.
        window: The plane that is shown.
        whole: How many cells there would be if none were drawn together.
        shown: The cells that are drawn.
        to_scale: Whether both axes have the same scale.
    """
    told = []
    if len(shown) < whole:
        most = counted(max(cell.chunks for cell in shown), "chunk")
        ranks = counted(max(len(cell.holders) for cell in shown), "rank")
        held = f", {ranks}" if cut.unit == "rank" else ""
        told.append(f"Neighbours are drawn together: each cell up to {most}{held}.")
    if len(cut.size) > 2:
        axes, cuts = (" and ".join(map(str, a)) for a in (window.axes, window.hidden))
        behind = f"chunks cut along axis {cuts} lie behind each other"
        rest = behind if cuts else "no other axis is cut"
        told.append(f"Axes {axes} of {len(cut.size)} are shown; {rest}.")
    if not to_scale:
        told.append("The axes do not have the same scale.")
    if 0 in cut.size:
        told.append("The tensor is empty.")
    elif not cut.is_whole:
        told.append("The chunks leave gaps or overlap.")
    return told
