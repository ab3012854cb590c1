"""Which bytes of which file is a read, where it is one range that goes into one range?

Such reads need no tensor to go through: their bytes can be copied from file to file.
"""

from __future__ import annotations

import attrs
import numpy as np

from shardplan.planning import itemsize
from shardplan.planning.columns import Ints, ReadItems, column, padded
from shardplan.planning.geometry import pad
from shardplan.planning.storage import lies_together, steps

from ..formats.base import Source

__all__ = ["Places", "find_places"]


@attrs.frozen(eq=False)
class Places:
    """Where the bytes of reads lie; one row a read.

    Attributes:
        paths: Where each file is on the disk; None if it is not on one.
        files: Their names.
        plain: Whether a read is one range of a file, and goes into one range of its box.
        file: The number of its file.
        begin: Where it begins there, in bytes.
        into: Where it goes in its box, in bytes.
        nbytes: How many bytes it has.
    """

    paths: tuple[str | None, ...]
    files: tuple[str, ...]
    plain: list[bool]
    file: list[int]
    begin: list[int]
    into: list[int]
    nbytes: list[int]


def find_places(source: Source, reads: ReadItems, boxes: Ints) -> Places | None:
    """Find the bytes of reads, all of tensors and none of them empty.

    Args:
        source: The checkpoint.
        reads: What is read of it.
        boxes: The sizes of the box that each read is a part of; one row a read.

    Returns:
        Where they lie; None if that is not on a disk.
    """
    if all(source.store.locate(name) is None for name in source.files):
        return None
    keys = list(zip(reads.storage.tolist(), reads.storage_hint.tolist(), strict=True))
    distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    spots = source.find_chunks([(reads.names[name], hint) for name, hint in distinct])
    at = column([distinct[key] for key in keys])
    axes = max(reads.lengths.shape[1], boxes.shape[1], 1)
    extents = padded([spot.extents for spot in spots], 1, axes)[at]
    lengths, boxes = pad(reads.lengths, axes, 1), pad(boxes, axes, 1)
    width = column([itemsize(spot.dtype) for spot in spots])[at]
    file = column([spot.file for spot in spots])[at]
    files = tuple(source.files)  # of which `find_chunks` may have made up some
    paths = tuple(source.store.locate(name) for name in files)
    real = np.array([s.axes is None and paths[s.file] is not None for s in spots], bool)[at]
    plain = real & lies_together(lengths, extents) & lies_together(lengths, boxes)
    first = (pad(reads.storage_offsets, axes, 0) * steps(extents)).sum(axis=1) * width
    into = (pad(reads.dest_offsets, axes, 0) * steps(boxes)).sum(axis=1) * width
    begin = column([spot.begin for spot in spots])[at] + first
    nbytes = lengths.prod(axis=1) * width
    return Places(paths, files, *(c.tolist() for c in (plain, file, begin, into, nbytes)))
