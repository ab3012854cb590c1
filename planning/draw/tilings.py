"""A tensor's tiling, each chunk in the colour of the rank that holds it."""

from __future__ import annotations

from ..metadata import Metadata
from .captions import about, remarks, tip_of, whose
from .cells import Plans, Window, cut_of, seen
from .panels import (
    Frame,
    colours_of,
    draw_axes,
    draw_box,
    draw_legend,
    draw_paper,
    fit,
    gutter,
    head,
    is_to_scale,
    labels_of,
    readable,
)
from .svg import MARGIN, TOP, Picture, card

__all__ = ["draw_tiling"]


def draw_tiling(source: Metadata | Plans, fqn: str) -> Picture:
    """Draw how a tensor is cut, each chunk in the colour of the rank that holds it.

    Boxes are to scale along each axis, and both axes have the same scale unless the tensor is very
    long or thin. Of a tensor with more than two axes the first two that are cut are shown. Chunks
    too small to be read are drawn together, and the caption says how many.

    Args:
        source: One plan per rank, in rank order (what ranks hold, or, after `global_plan`, what
            they write), or a checkpoint's metadata, which knows the chunks but not the ranks.
        fqn: The tensor's name in the checkpoint.

    >>> from shardplan.planning import Mesh, Shard, TensorSpec, local_plan
    >>> sd, mesh = {"w": TensorSpec((6, 4), "float32", [Shard(0)])}, Mesh(dp=2)
    >>> picture = draw_tiling([local_plan(sd, mesh=mesh, rank=r) for r in range(2)], "w")
    >>> picture
    Picture: w. Colour and number: the rank that holds each chunk.
    >>> str(picture).count('class="cell"')
    2

    Raises:
        NotFoundError: There is no such name; the nearest ones are told.
        PlanError: Ranks disagree about the tensor, or a chunk lies outside of it.
        ValueError: It is no tensor.
    """
    cut = cut_of(source, fqn)
    window = Window.of(cut)
    cells = seen(cut, window)
    size = fit(window, cells, (560, 320), 80)
    shown = readable(cells, size)
    side = gutter(cut, window, shown)
    full = max(460.0, 2 * MARGIN + side + size[0])
    left = side + (full - side - size[0]) / 2 if side else MARGIN
    frame = Frame(left, TOP + head(cut, window), *size, window.lengths)
    colours = colours_of(cell.holders[0] for cell in shown)
    labels = labels_of(shown, frame, cut.unit)
    body = [
        draw_paper(frame, window.of_shape(cut.plane)),
        *(
            draw_box(cell, frame, colours[cell.holders[0]], label, tip_of(cell, cut, window))
            for cell, label in zip(shown, labels, strict=True)
        ),
        *draw_axes(frame, shown, cut, window, {"left": True, "top": True}),
    ]
    bottom = frame.bottom + 12
    if not all(words for words, _ in labels):
        legend, bottom = draw_legend(colours, cut.unit, MARGIN, bottom + 6, full - MARGIN)
        body += legend
    told = [whose(cut), *remarks(cut, window, len(cells), shown, is_to_scale(window, size))]
    return card(fqn, about(cut), "".join(body), " ".join(told), (full, bottom))
