"""`DequantizedSource`: a checkpoint of quantised tensors, as if it held what they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.planning import BLOCK, Quantized, RefusedError, dequantized, find_quantized
from shardplan.planning.passes import Reading

from ..errors import FormatError
from ..stores.base import MissingFileError, Store
from .base import ChunkPlace, ExtraFiles, Fault, Source, read_whole
from .hf.companions import read_extra

__all__ = ["DequantizedSource", "read_as"]

_CONFIG = "config.json"
_SECTION = "quantization_config"


def read_as(source: Source, reading: Reading) -> Source:
    """Return a checkpoint as it is to be read; refuse if nothing in it is quantised as expected."""
    return (
        source if reading.dtype is None else DequantizedSource(source, reading.dtype, reading.block)
    )


class DequantizedSource(Source):
    """A checkpoint whose quantised tensors are dequantised as they are read by `Reader`."""

    def __init__(self, stored: Source, dtype: str, block: Sequence[int] | None = None) -> None:
        self._stored, self._dtype = stored, dtype
        self.quantized: Mapping[str, Quantized] = find_quantized(
            stored.metadata, block or _block_of(stored.store)
        )
        if not self.quantized:
            raise RefusedError(
                f"{stored.store.url} holds no tensors to dequantise: neither 8-bit floats with a "
                "`_scale_inv` beside them, nor `_blocks` with `_scales`; leave out dequantize()"
            )
        self.metadata = dequantized(stored.metadata, self.quantized, dtype)
        self.format, self.store, self.files = stored.format, stored.store, stored.files
        self.block_bytes, self.checksum = stored.block_bytes, stored.checksum
        self.created, self.remarks, self.notes = stored.created, stored.remarks, stored.notes

    @property
    def stored(self) -> Source:
        """The checkpoint as it is stored."""
        return self._stored

    @property
    def beside(self) -> ExtraFiles | None:  # type: ignore[override]
        """The files beside the tensors; the config no longer says that these are quantised."""
        if self._stored.beside is None:
            return None
        files = read_extra([self._stored.beside])
        if _CONFIG in files:
            files[_CONFIG] = _plain(files[_CONFIG], self._dtype)
        return files

    @property
    def save_id(self) -> str | None:
        """The save that made it."""
        return self._stored.save_id

    @property
    def file_sizes(self) -> Mapping[str, int]:
        """The sizes of its files."""
        return self._stored.file_sizes

    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Find chunks; those of quantised tensors where their elements lie, as they are stored."""
        names = [(self._stored_name(name), number) for name, number in chunks]
        found = self._stored.find_chunks(names)
        # Axes that are named, if only in order, say that bytes cannot be copied as they are.
        return [
            ChunkPlace(p.file, p.begin, p.dtype, p.extents, p.axes or tuple(range(len(p.extents))))
            if name in self.quantized
            else p
            for p, (name, _) in zip(found, chunks, strict=True)
        ]

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksums of chunks as they are stored."""
        return self._stored.chunk_sums([(self._stored_name(name), n) for name, n in chunks])

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value."""
        return self._stored.value(name, verify=verify)

    def has_value_sum(self, name: str) -> bool:
        """Return whether a value has a checksum."""
        return self._stored.has_value_sum(name)

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads."""
        return self._stored.value_bytes(name)

    def value_cost(self, name: str) -> int:
        """Return about how many bytes of memory `value` takes."""
        return self._stored.value_cost(name)

    def missing(self) -> Sequence[Fault]:
        """Return what is missing."""
        return self._stored.missing()

    def _stored_name(self, name: str) -> str:
        return self.quantized[name].values if name in self.quantized else name


def _block_of(store: Store) -> tuple[int, ...]:
    """Return how large the blocks are, as the model's config says."""
    try:
        config = json.loads(read_whole(store, _CONFIG, "config"))
        block = config.get(_SECTION, {}).get("weight_block_size")
    except (MissingFileError, ValueError, AttributeError, RecursionError):
        block = None
    if block is None:
        return BLOCK
    if not isinstance(block, list) or any(type(n) is not int or n < 1 for n in block):
        raise FormatError(_CONFIG, f"its weight_block_size is {str(block)[:80]}, not two numbers")
    return tuple(block)


def _plain(config: bytes, dtype: str) -> bytes:
    """Return a config that says what tensors are now; text that is not JSON stays as it is."""
    try:
        table = json.loads(config)
        table.pop(_SECTION, None)
    except (ValueError, AttributeError, RecursionError):
        return config
    named = {key: dtype for key in ("dtype", "torch_dtype") if key in table}
    return (json.dumps(table | named, indent=2) + "\n").encode()
