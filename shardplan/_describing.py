"""How does an open checkpoint print? What and how large it is, and how its tensors are cut."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

from shardplan.io.formats import Source
from shardplan.planning import (
    Grid,
    Sheet,
    TensorMetadata,
    counted,
    cut_text,
    human_bytes,
    listing,
    shape_text,
)

__all__ = ["describe"]

_SHOWN: Final = 12
_HEAD: Final = ("name", "shape", "dtype", "bytes", "sharding")


def describe(source: Source, name: str | None = None) -> Sheet:
    """Describe a checkpoint, or one of its tensors, in the words of ``shardplan inspect``.

    Args:
        source: The checkpoint; nothing more of it is read.
        name: The tensor; the whole checkpoint if left out.

    >>> import tempfile, torch
    >>> from shardplan import open_checkpoint, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save({"w": torch.zeros(4, 3), "step": 7}, folder)
    ...     print(describe(open_checkpoint(folder).reader.source, "w").text())
    Tensor w of ...
    name  shape  dtype    bytes  sharding
    w     4 × 3  float32   48 B  whole, 1 file
    """
    entries = source.metadata.state_dict_metadata
    if name is not None:
        return listing(f"Tensor {name} of {source.store.url}", _HEAD, [_row(source, name)], 1)
    rows = [_row(source, name) for name in entries.names[:_SHOWN]]
    return listing(_title(source), _HEAD, rows, len(entries))


def _title(source: Source) -> str:
    entries = source.metadata.state_dict_metadata
    volumes = [layout.tiling.volume() for layout in entries.layouts]
    pairs = zip(entries.layout.tolist(), entries.prop.tolist(), strict=True)
    total = sum(volumes[la] * entries.props[pr].itemsize for la, pr in pairs if la >= 0)
    tensors = int((entries.layout >= 0).sum())
    about = [f"format {source.format}"]
    if source.created:
        about.append(f"{datetime.fromtimestamp(source.created, UTC):%Y-%m-%d %H:%M} UTC")
    about.append(counted(tensors, "tensor"))
    if tensors < len(entries):
        about.append(counted(len(entries) - tensors, "value"))
    about.append(f"{human_bytes(total)} in {counted(len(source.files), 'file')}")
    return f"Checkpoint {source.store.url}: {', '.join(about)}"


def _row(source: Source, name: str) -> tuple[str, ...]:
    entry = source.metadata.entry(name)
    if not isinstance(entry, TensorMetadata):
        return name, "value", "", "", ""
    chunks = entry.chunks
    grid = [len(cuts) - 1 for cuts in chunks.cuts] if isinstance(chunks, Grid) else None
    cut = cut_text(len(chunks), grid)
    files = source.file_numbers(name)
    if files is not None:
        cut += f", {counted(len(set(files)), 'file')}"
    size = human_bytes(math.prod(entry.size) * entry.properties.itemsize)
    return name, shape_text(entry.size), entry.properties.dtype, size, cut
