"""Chunks as boxes: tilings of a tensor, where boxes overlap or leave gaps, what indices select."""

from .axes import Axes, Cut, cut, joined, parts, permuted
from .indexing import Axis, Selection, select
from .overlap import Overlap, expand, fills, gaps, overlap, self_overlaps
from .tilings import MAX_NUMEL, Boxes, Chunk, Grid, Tiling, pad, shape_fault, tile, tile_chunks
