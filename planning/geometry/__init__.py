"""Chunks as boxes: tilings of a tensor, and where boxes overlap or leave gaps."""

from .overlap import Overlap, expand, fills, gaps, overlap, self_overlaps
from .tilings import MAX_NUMEL, Boxes, Chunk, Grid, Tiling, pad, shape_fault, tile, tile_chunks
