"""Chunks as boxes: tilings of a tensor, where boxes overlap or leave gaps, what indices select."""

from ..columns.arrays import pad
from .axes import Axes, Cut, composed, cut, parts, permuted
from .indexing import Axis, Selection, selection_of
from .overlap import Overlap, fills, gaps, grid_cells, overlap, self_overlaps
from .tilings import MAX_NUMEL, Boxes, Chunk, Grid, Tiling, shape_fault, tile, tile_chunks
