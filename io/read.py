"""How is a load plan carried out? Exactly the planned bytes are read, into the tensors themselves.

A `Reader` knows one checkpoint. It reads the headers of the files that are touched, and no others;
cuts the reads into blocks; and has threads fetch, check and deliver them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from shardplan.planning import LoadItemType, LoadPlan, itemsize
from shardplan.planning.blocks import Blocks, cut_blocks
from shardplan.planning.catalog import column
from shardplan.planning.metadata import TensorMetadata
from shardplan.planning.packing import Ints
from shardplan.planning.reads import ReadItems
from shardplan.planning.tiling import pad

from .checksums import combine, hash_views
from .errors import FormatError, LoadError
from .fetch import Fetch, Job
from .headers import MAX_HEADER, Header, Slot, parse_header
from .manifest import MANIFEST, Manifest
from .pool import Pool, default_pool
from .stores import MissingFileError, Store, StoreError
from .values import StoredValue, load_value

__all__ = ["ReadStats", "Reader"]


@attrs.frozen
class ReadStats:
    """What a load took.

    Attributes:
        bytes_needed: Bytes of the elements that were wanted.
        bytes_read: Bytes that were fetched for them, headers left out.
        requests: How many ranges were asked for.
        verified: How many chunks were read whole and found to fit their checksums.
    """

    bytes_needed: int = 0
    bytes_read: int = 0
    requests: int = 0
    verified: int = 0

    @property
    def amplification(self) -> float:
        """How many bytes were fetched for each byte that was needed."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0


class Reader:
    """Reads one checkpoint; headers that were read are kept.

    Args:
        store: Where it lies.
        manifest: What it says of itself; see `read_manifest`.
        pool: The threads and the memory budget to use.
    """

    def __init__(self, store: Store, manifest: Manifest, pool: Pool | None = None) -> None:
        self.store = store
        self.manifest = manifest
        self.pool = pool or default_pool()
        self._headers: dict[int, Header] = {}

    def headers(self, numbers: Iterable[int]) -> Mapping[int, Header]:
        """Read the headers of some files, and check that these are the files that were saved.

        Raises:
            FormatError: A file is missing, of another size, or its header is not the saved one.
        """
        new = [n for n in dict.fromkeys(numbers) if n not in self._headers]
        if new:
            self._headers.update(zip(new, self.pool.map(self._header, new), strict=True))
        return self._headers

    def _header(self, number: int) -> Header:
        files = self.manifest.files
        name, size = files.names[number], int(files.sizes[number])
        length = min(int(files.headers[number]), MAX_HEADER + 8, size)
        data = bytearray(length)
        try:
            found = self.store.size(name)
            if found != size:
                raise FormatError(name, f"it has {found:,} bytes and was saved with {size:,}")
            self.store.read(name, [(0, memoryview(data))])
        except MissingFileError:
            raise FormatError(name, "it is missing") from None
        if hash_views([memoryview(data)]) != files.digests[number]:
            raise FormatError(name, "its header is damaged, or belongs to another file")
        header = parse_header(bytes(data), name, size)
        if (header.save_id, header.name) != (self.manifest.save_id, name):
            raise FormatError(
                name,
                f"it was written as {header.name} by save {header.save_id}: files were swapped",
            )
        return header

    def slot(self, name: str, chunk: int) -> tuple[int, Slot]:
        """Return the file that holds a chunk, and its place there, checked against the manifest."""
        number = int(self.manifest.files_of(name)[chunk])
        header = self.headers([number])[number]
        if name not in header.slots:
            raise FormatError(header.file, f"it does not hold `{name}`")
        slot, entry = header.slots[name], self.manifest.entries[name]
        if isinstance(entry, TensorMetadata):
            box = entry.chunks[chunk]
            expected = (entry.properties.dtype, box.sizes, box.offsets)
        else:
            expected = ("uint8", (int(self.manifest.values[name][1]),), (0,))
        if (slot.dtype, slot.shape, slot.offsets) != expected:
            raise FormatError(header.file, f"its `{name}` is {slot}, not {expected}")
        return number, slot

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a value that is no tensor.

        Raises:
            FormatError: It is damaged.
        """
        kind, data = self.manifest.values[name]
        if kind == "inline":
            return load_value(StoredValue("inline", data), MANIFEST, name)
        number, slot = self.slot(name, 0)
        file = self.manifest.files.names[number]
        buffer = bytearray(slot.nbytes)
        self.store.read(file, [(slot.begin, memoryview(buffer))])
        limit = self.manifest.block_bytes
        blocks = [memoryview(buffer)[i : i + limit] for i in range(0, len(buffer) or 1, limit)]
        found = combine([hash_views([block]) for block in blocks])
        if verify and found != int(self.manifest.sums_of(name)[0]):
            raise FormatError(file, f"the value of `{name}` does not fit its checksum")
        return load_value(StoredValue("json" if kind == "json" else "torch", buffer), file, name)

    def values(self, plan: LoadPlan, *, verify: bool = True) -> dict[str, Any]:
        """Return, by name in the state dict, the values that a plan reads."""
        items = plan.items
        rows = np.flatnonzero(items.type == LoadItemType.BYTE_IO.value)
        names = [(items.names[items.dest[r]], items.names[items.storage[r]]) for r in rows.tolist()]
        found = self.pool.map(lambda pair: self.value(pair[1], verify=verify), names)
        return {dest: value for (dest, _), value in zip(names, found, strict=True)}

    def fill(
        self, items: ReadItems, dest: Callable[[int], torch.Tensor], *, verify: bool = True
    ) -> ReadStats:
        """Fill tensors with what a plan reads.

        Args:
            items: The reads of a `LoadPlan`; values that are no tensors are left out.
            dest: Given the row of a read, the tensor of just its box to fill.
            verify: Whether to check every chunk that is read whole.

        Raises:
            FormatError: A file is damaged; it says which keys were filled.
            LoadError: Anything else went wrong half way; it says so, too.
        """
        rows = np.flatnonzero((items.type == LoadItemType.TENSOR.value) & (items.numel > 0))
        if not len(rows):
            return ReadStats()
        job, chunk = self._job(items.take(rows), [dest(row) for row in rows.tolist()], verify)
        fetch = Fetch(self.store, job)
        names = [items.names[i] for i in items.dest[rows].tolist()]
        try:
            self.pool.map(
                fetch.run, job.tasks, nbytes=lambda t: 2 * job.cost(t) + self.store.staging
            )
        except Exception as error:
            raise _stopped(error, *_progress(job.blocks, fetch, names)) from error
        self._check(fetch, job, chunk, names)
        whole = int(job.whole.sum()) if verify else 0
        return ReadStats(job.nbytes, fetch.bytes_read, fetch.requests, whole)

    def _job(
        self, items: ReadItems, tensors: list[torch.Tensor], verify: bool
    ) -> tuple[Job, list[tuple[str, int]]]:
        """Find the bytes of every read."""
        keys = list(zip(items.storage.tolist(), items.storage_hint.tolist(), strict=True))
        distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        chunks = [(items.names[name], hint) for name, hint in distinct]
        self.headers(int(self.manifest.files_of(name)[chunk]) for name, chunk in chunks)
        spots = [self.slot(name, chunk) for name, chunk in chunks]
        at = column([distinct[key] for key in keys])
        axes = max(items.lengths.shape[1], 1)
        shapes = [(*slot.shape, *[1] * (axes - len(slot.shape))) for _, slot in spots]
        extents = column(shapes, len(shapes), axes)[at]
        lengths, offsets = pad(items.lengths, axes, 1), pad(items.storage_offsets, axes, 0)
        width = column([itemsize(slot.dtype) for _, slot in spots])[at]
        job = Job(
            tensors=tensors,
            files=self.manifest.files.names,
            file=column([number for number, _ in spots])[at],
            begin=column([slot.begin for _, slot in spots])[at],
            dtypes=[spots[i][1].dtype for i in at.tolist()],
            itemsize=width,
            extents=extents,
            offsets=offsets,
            whole=(lengths == extents).all(axis=1) & verify,
            blocks=cut_blocks(lengths, width, self.manifest.block_bytes),
        )
        return job, [chunks[i] for i in at.tolist()]

    def _check(
        self, fetch: Fetch, job: Job, chunk: list[tuple[str, int]], names: list[str]
    ) -> None:
        """Compare the checksums of all chunks that were read whole; tell every one that differs."""
        damaged: dict[int, str] = {}
        edges = np.searchsorted(job.blocks.box, np.arange(len(names) + 1))
        for row in np.flatnonzero(job.whole).tolist():
            name, number = chunk[row]
            found = combine([fetch.digests[b] for b in range(edges[row], edges[row + 1])])
            if found != int(self.manifest.sums_of(name)[number]):
                nbytes = int(job.extents[row].prod() * job.itemsize[row])
                first = int(job.begin[row])
                damaged[row] = f"`{name}` (bytes {first:,} to {first + nbytes:,})"
        if damaged:
            bad = {names[row] for row in damaged}
            files = sorted({job.files[job.file[row]] for row in damaged})
            raise FormatError(
                ", ".join(files),
                f"checksums do not fit: {', '.join(list(damaged.values())[:8])}"
                + (f" and {len(damaged) - 8} more" if len(damaged) > 8 else ""),
                filled=set(names) - bad,
                touched=bad,
            )


def _progress(blocks: Blocks, fetch: Fetch, names: list[str]) -> tuple[set[str], set[str]]:
    """Tell the keys of which all blocks are done, and those of which some were begun."""
    boxes: Ints = blocks.box
    unfinished = {names[box] for box in boxes[~fetch.done].tolist()}
    begun = {names[box] for box in boxes[fetch.begun].tolist()}
    return begun - unfinished, begun & unfinished


def _stopped(error: Exception, filled: set[str], touched: set[str]) -> Exception:
    if isinstance(error, StoreError) and error.kind in ("missing", "short"):
        name = str(error.url).replace("\\", "/").rpartition("/")[2]
        return FormatError(name, error.reason, filled=filled, touched=touched)
    if isinstance(error, FormatError):
        return FormatError(error.file, error.reason, filled=filled, touched=touched)
    return LoadError(f"the load failed: {error}", filled, touched)
