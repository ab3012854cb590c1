"""Were chunks that are read piece by piece those that were saved? Checked block by block.

A checksum is that of a whole chunk, put together from those of its blocks. What converts a large
checkpoint never has such a chunk in memory: so the blocks that come by are hashed, and a chunk of
which some did not come as blocks is read once more, in small steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from shardplan.planning import LoadItemType, TensorMetadata, itemsize
from shardplan.planning.columns import ReadItems, column
from shardplan.planning.storage import cut_blocks

from .checksums import combine, hash_views
from .errors import FormatError, listed
from .formats.base import Source
from .pool import Pool
from .tensors import memory

__all__ = ["Proof"]

Key = tuple[str, int]
Corner = tuple[int, ...]


class Proof:
    """Collects what was seen of each chunk of a checkpoint, from any number of threads.

    Args:
        source: The checkpoint.

    Attributes:
        proved: How many chunks were found to be what was saved.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._blocks: dict[Key, dict[Corner, tuple[int, Corner]]] = {}
        self._seen: dict[Key, dict[int, int]] = {}
        self._open: set[Key] = set()
        self._hashed: dict[str, bool] = {}
        self.proved = 0

    def note(self, items: ReadItems, dest: Callable[[int], torch.Tensor]) -> None:
        """Look at what was just read; chunks that were read whole have been checked already.

        Args:
            items: The reads.
            dest: Given the row of a read, the tensor that it filled.

        Raises:
            FormatError: A chunk is complete, and not what was saved.
        """
        chunk, axes = items.storage_hint.tolist(), items.ndim.tolist()
        kinds, names = items.type.tolist(), items.storage.tolist()
        for row, (kind, number, name) in enumerate(zip(kinds, chunk, names, strict=True)):
            key = items.names[name], number
            if kind != LoadItemType.TENSOR.value or not self._is_hashed(key[0]):
                continue
            offsets = tuple(items.storage_offsets[row, : axes[row]].tolist())
            sizes = tuple(items.lengths[row, : axes[row]].tolist())
            self._note(key, offsets, sizes, partial(dest, row))

    def wants(self, key: Key, offsets: Corner, sizes: Corner) -> Callable[[int], None] | None:
        """Ask for the checksum of a box that is about to be read.

        Args:
            key: Its chunk.
            offsets: Where in the chunk it starts.
            sizes: How large it is.

        Returns:
            What to call with its xxh3; None if it is of no use.
        """
        if not self._is_hashed(key[0]):
            return None
        number, extent = self._blocks_of(key).get(offsets, (-1, ()))
        if not any(offsets):
            with self._lock:
                self._open.add(key)
        return partial(self._saw, key, number) if extent == sizes else None

    def settle(self, pool: Pool) -> None:
        """Check all chunks that were begun here and are not proved yet, by reading them again.

        Raises:
            FormatError: Some are not what was saved; all are named.
        """
        limit = self._source.block_bytes + self._source.store.staging
        damaged = pool.map(self._check, sorted(self._open), nbytes=limit)
        wrong = [text for text in damaged if text]
        if wrong:
            files = sorted({file for file, _ in wrong})
            named = listed([name for _, name in wrong], quote="")
            raise FormatError(listed(files, quote=""), f"checksums do not fit: {named}")
        self._open.clear()

    def _is_hashed(self, name: str) -> bool:
        found = self._hashed.get(name)
        if found is None:
            found = self._hashed[name] = self._source.sums_of(name) is not None
        return found

    def _note(
        self, key: Key, offsets: Corner, sizes: Corner, tensor: Callable[[], torch.Tensor]
    ) -> None:
        blocks = self._blocks_of(key)
        number, extent = blocks.get(offsets, (-1, ()))
        with self._lock:
            if not any(offsets):
                self._open.add(key)
            if len(blocks) == 1 and extent == sizes:
                self.proved += key in self._open
                self._open.discard(key)
                return
        view = memory(tensor()) if extent == sizes else None
        if view is None:
            return
        self._saw(key, number, hash_views([view]))

    def _saw(self, key: Key, number: int, digest: int) -> None:
        """Note the checksum of a block, and compare that of its chunk if it is complete."""
        count = len(self._blocks_of(key))
        with self._lock:
            seen = self._seen.setdefault(key, {})
            seen[number] = digest
            complete = len(seen) == count and key in self._open
            if complete:
                self._open.discard(key)
                self.proved += 1
        if complete:
            self._compare(key, combine([seen[n] for n in range(count)]))

    def _blocks_of(self, key: Key) -> dict[Corner, tuple[int, Corner]]:
        """Return the number and the size of each block of a chunk, by where it starts."""
        found = self._blocks.get(key)
        if found is None:
            entry = self._source.metadata.state_dict_metadata[key[0]]
            assert isinstance(entry, TensorMetadata)
            sizes, axes = entry.chunks.sizes[key[1]], len(entry.size)
            width = column([itemsize(entry.properties.dtype)])
            cut = cut_blocks(column([sizes], 1, axes), width, self._source.block_bytes)
            corners = zip(cut.offsets.tolist(), cut.sizes.tolist(), strict=True)
            found = {tuple(o[:axes]): (n, tuple(s[:axes])) for n, (o, s) in enumerate(corners)}
            self._blocks[key] = found
        return found

    def _compare(self, key: Key, found: int) -> None:
        sums = self._source.sums_of(key[0])
        if sums is not None and found != int(sums[key[1]]):
            file = self._source.files[self._source.spots([key])[0].file]
            raise FormatError(file, f"checksums do not fit: `{key[0]}`")

    def _check(self, key: Key) -> tuple[str, str] | None:
        """Read one chunk, block by block; return its file and name if it is damaged."""
        (spot,) = self._source.spots([key])
        file, width = self._source.files[spot.file], itemsize(spot.dtype)
        at, digests = spot.begin, []
        buffer = np.empty(min(self._source.block_bytes, self._chunk_bytes(key, width)), np.uint8)
        for _, sizes in self._blocks_of(key).values():
            view = buffer.data[: int(np.prod(sizes, dtype=np.int64)) * width]
            self._source.store.read(file, [(at, view)])
            at += len(view)
            digests.append(hash_views([view]))
        try:
            self._compare(key, combine(digests))
        except FormatError:
            return file, f"`{key[0]}`"
        with self._lock:
            self.proved += 1
        return None

    def _chunk_bytes(self, key: Key, width: int) -> int:
        blocks = self._blocks_of(key).values()
        return sum(int(np.prod(sizes, dtype=np.int64)) for _, sizes in blocks) * width
