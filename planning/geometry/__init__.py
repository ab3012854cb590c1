"""Chunks as boxes: tilings of a tensor, where boxes overlap or leave gaps, what indices select."""

from ..columns.arrays import pad
from .axes import Axes, Cut, cut, parts, permuted
from .indexing import Axis, selection_of
from .overlap import fills, overlap, self_overlaps
from .tilings import MAX_NUMEL, Boxes, Chunk, Grid, Tiling, shape_fault, tile, tile_chunks
