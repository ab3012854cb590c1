"""Tensors that lie in the files of a checkpoint: copy-on-write views of local files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import attrs
import numpy as np

from shardplan.planning import BytesMetadata, TensorMetadata, itemsize
from shardplan.planning.columns import column
from shardplan.planning.storage import boxes_of

from ..buffers import Bytes
from ..checksums import BlockSums, Key
from ..formats.base import ChunkPlace, Source
from ..pool import Pool
from ..tensors import as_elements, empty_tensor
from .read import Reader

__all__ = ["map_tensors"]


@attrs.frozen(eq=False)
class _View:
    """A chunk, and its bytes in a mapped file."""

    key: Key
    place: ChunkPlace
    data: Bytes


def map_tensors(reader: Reader, names: Sequence[str], *, verify: bool) -> dict[str, Any]:
    """Return those of some saved tensors that a local file holds whole, by name, without a copy.

    A write to one does not reach the file. Others have to be read: tensors in several chunks, of
    another order of axes, quantised, empty, or not aligned.

    Args:
        reader: Reads the checkpoint.
        names: The tensors.
        verify: Whether to compare them with their checksums, for which all of them is read.
    """
    source, entries = reader.source, reader.metadata.state_dict_metadata
    if not source.store.can_map or source.quantized:
        return {}
    found = ((name, entries[name]) for name in names)
    sizes = {(name, 0): entry.size for name, entry in found if _is_whole(entry)}
    views = list(_views(source, sizes, touch=verify))
    if verify:
        _verify(source, views, reader.pool)
    return {view.key[0]: _tensor(view) for view in views}


def _is_whole(entry: TensorMetadata | BytesMetadata) -> TypeGuard[TensorMetadata]:
    return isinstance(entry, TensorMetadata) and len(entry.chunks) == 1 and 0 not in entry.size


def _views(source: Source, sizes: Mapping[Key, tuple[int, ...]], *, touch: bool) -> Iterator[_View]:
    """Map each file once, and yield the chunks that can be used as they lie there."""
    by_file: dict[int, list[tuple[Key, ChunkPlace]]] = {}
    for (key, size), place in zip(sizes.items(), source.find_chunks([*sizes]), strict=True):
        aligned = place.begin % itemsize(place.dtype) == 0
        if aligned and place.axes is None and tuple(place.extents) == size:
            by_file.setdefault(place.file, []).append((key, place))
    for file, found in by_file.items():
        starts = column([place.begin for _, place in found])
        lengths = column([place.nbytes for _, place in found])
        first = int(starts.min())
        with source.store.mapped(source.files[file], starts, lengths, touch=touch) as pages:
            for key, place in found:
                low = place.begin - first
                yield _View(key, place, pages[low : low + place.nbytes])


def _verify(source: Source, views: Sequence[_View], pool: Pool) -> None:
    """Compare chunks with their checksums, as far as they have some."""
    sums, blocks = BlockSums(), list[tuple[Key, int, int, Bytes]]()
    known = source.chunk_sums([view.key for view in views])
    for view in (view for view, one in zip(views, known, strict=True) if one is not None):
        boxes = boxes_of(view.place.extents, view.place.dtype, source.block_bytes)
        width = itemsize(view.place.dtype)
        ends = np.cumsum([int(np.prod(sizes)) * width for _, sizes in boxes]).tolist()
        parts = [view.data[low:high] for low, high in zip([0, *ends], ends, strict=False)]
        blocks += [(view.key, len(ends), number, part) for number, part in enumerate(parts)]
    digests = pool.map(lambda block: source.checksum_of(block[0][0]).of([block[3].data]), blocks)
    for (key, count, number, part), digest in zip(blocks, digests, strict=True):
        sums.add(key, count, {number: digest}, part.nbytes)
    sums.settle(source)


def _tensor(view: _View) -> Any:
    like = empty_tensor((0,), "uint8")
    return as_elements(view.data, view.place.dtype, view.place.extents, like=like)
