"""Safetensors files as Hugging Face tools and torch write them, read where they lie.

Which files make up a checkpoint is told by `hf_index`. Several files may hold chunks of one tensor,
if their headers say where each starts (as torch's ``HuggingFaceStorageWriter`` does). Nothing here
needs torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NoReturn

from shardplan.planning import (
    Chunk,
    Layout,
    Metadata,
    TensorMetadata,
    TensorProperties,
    layout_issues,
)
from shardplan.planning.geometry import fills, self_overlaps, tile_chunks
from shardplan.planning.storage import BLOCK_BYTES, save_id_of

from ...checksums import XXH3
from ...errors import FormatError, listed
from ...limits import read_whole
from ...pool import Pool, default_pool
from ...stores.base import Store, StoreError
from ..headers import Header, Slot
from ..sources import Spot
from .index import (
    INDEX_SUFFIX,
    RESERVED,
    SINGLE,
    SUFFIX,
    TIED,
    choose_files,
    indices,
    is_part,
    missing_parts,
    own_words,
    plain_files,
    read_header,
    uncommitted,
)

__all__ = ["HfSource", "find", "source"]

_LOG: Final = logging.getLogger("shardplan")


def find(store: Store, name: str = "") -> bool:
    """Say whether there is a checkpoint: a file of that name, or anything in the folder."""
    if name:
        return name.endswith((SUFFIX, INDEX_SUFFIX)) and save_id_of(name) is None
    found = store.list(recursive=False)
    if SINGLE in found or indices(found):
        return True
    return any(not uncommitted(store, file) for file in plain_files(found))


def source(store: Store, name: str = "", pool: Pool | None = None) -> HfSource:
    """Open a checkpoint; its index and the headers of all its files are read.

    Raises:
        FormatError: There is none; a file is damaged or missing; the index names what is not there;
            chunks of one tensor overlap or leave holes. File and key are named.
    """
    return HfSource(store, name, pool)


class HfSource:
    """Safetensors files; a `Source`.

    Args:
        store: Where they lie.
        name: A single file, or an index; empty for whatever is in the folder.
        pool: The threads to use.

    Attributes:
        tied: Names that share another's elements, and those others: a header says so of weights
            that were saved once under one of their names.
        remarks: What else the files' ``__metadata__`` says, by key; where they differ, the first.
        notes: What is odd and yet no error, as text; it was logged, too.
        header_bytes, data_bytes: How many bytes all headers have, and all elements in the files.
    """

    format = "hf"
    block_bytes = BLOCK_BYTES

    def __init__(self, store: Store, name: str = "", pool: Pool | None = None) -> None:
        self.store = store
        self.tied: dict[str, str] = {}
        self.notes: tuple[str, ...] = ()
        weights, files, index = choose_files(store, name)
        lost = next(missing_parts(files), None) if index is None and not name else None
        if lost is not None:
            raise FormatError(*lost)
        headers = (pool or default_pool()).map(lambda file: read_header(store, file, index), files)
        if not name and index is None:
            headers = [h for h in headers if not is_part(h.metadata)]
        if not headers:
            raise FormatError(name or store.url, "there are no safetensors files to read")
        self.files: Sequence[str] = tuple(header.file for header in headers)
        self.header_bytes = sum(header.length for header in headers)
        self.data_bytes = sum(slot.nbytes for h in headers for slot in h.slots.values())
        self._places = _gather(headers, weights)
        self._add_tied(headers, weights)
        self.remarks = self._remarks(headers)
        if index is not None:
            self._settle_absent(weights, index)
        entries = {name: _entry(name, self._places[name], self.files) for name in self._places}
        self._metadata = Metadata(entries)

    @property
    def metadata(self) -> Metadata:
        """What it holds; all are tensors."""
        return self._metadata

    def spots(self, chunks: Sequence[tuple[str, int]]) -> list[Spot]:
        """Find chunks; see `Source.spots`."""
        found = [self._places[name][chunk] for name, chunk in chunks]
        return [Spot(number, slot.begin, slot.dtype, slot.shape) for number, slot in found]

    def sums_of(self, name: str) -> None:
        """Return None: these files have no checksums."""

    checksum = XXH3

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return None for each: these files have no checksums."""
        return [None] * len(chunks)

    def has_value_sum(self, name: str) -> bool:
        """Return False: there are only tensors."""
        return False

    def value(self, name: str, *, verify: bool = True) -> NoReturn:
        """Raise: there are only tensors."""
        raise FormatError(self.store.url, f"`{name}` is no value: safetensors hold tensors only")

    def value_bytes(self, name: str) -> int:
        """Return 0: there are only tensors."""
        return 0

    def value_cost(self, name: str) -> int:
        """Return 0: there are only tensors."""
        return 0

    def _add_tied(self, headers: Iterable[Header], weights: Mapping[str, str]) -> None:
        """Find names that are tied to tensors, among all that headers say by name.

        ``safetensors.torch.save_model`` notes there which tensor stands for one that it left out,
        beside whatever its caller noted. So a note alone is no proof: it counts if we wrote it, if
        the index has the name, or if both are the same parameter, of two modules.
        """
        doubtful = []
        for header in headers:
            ours = own_words(header.metadata).get(TIED)
            ours = ours if isinstance(ours, list) else []
            for name, kept in header.metadata.items():
                if name in self._places or name in RESERVED or kept not in header.slots:
                    continue
                if name in ours or name in weights or _parameter(name) == _parameter(kept):
                    self.tied[name] = kept
                    self._places[name] = self._places[kept]
                else:
                    doubtful.append(f"`{name}`: `{kept}`")
        if self.tied:
            pairs = listed([f"`{name}` to `{kept}`" for name, kept in self.tied.items()], quote="")
            _LOG.info("%s: tied weights are stored once: %s", self.store.url, pairs)
        if doubtful:
            self._note(f"taken for remarks, not for tied weights: {listed(doubtful, quote='')}")

    def _remarks(self, headers: Sequence[Header]) -> dict[str, str]:
        said = {k: v for header in reversed(headers) for k, v in header.metadata.items()}
        others = set(RESERVED) - {"format"} | self.tied.keys()
        return {key: text for key, text in said.items() if key not in others}

    def _note(self, note: str) -> None:
        self.notes = (*self.notes, f"{self.store.url}: {note}")
        _LOG.warning(self.notes[-1])

    def _settle_absent(self, weights: Mapping[str, str], index: str) -> None:
        """Refuse names of the index that no file holds, unless the model says that it ties them."""
        absent = sorted(name for name in weights if name not in self._places)
        if not absent:
            return
        named = listed(absent)
        if not _ties_weights(self.store):
            file = weights[absent[0]]
            raise FormatError(file, f"it does not hold {named}, which {index} has in it")
        self._note(
            f"{index} names {named}, which no file holds; they were left out: config.json says "
            "that the model ties its embeddings"
        )


def _parameter(name: str) -> str:
    """Return which parameter of its module a name means."""
    return name.rpartition(".")[2]


def _ties_weights(store: Store) -> bool:
    """Say whether the model's own configuration ties its embeddings."""
    try:
        config = json.loads(read_whole(store, "config.json", "config"))
    except (StoreError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("tie_word_embeddings") is True


Place = tuple[int, Slot]


def _gather(headers: Sequence[Header], weights: Mapping[str, str]) -> dict[str, list[Place]]:
    """Return the chunks of each tensor, in order of their offsets; the index settles who has it."""
    places: dict[str, list[Place]] = {}
    at = {header.file: header for header in headers}
    for number, header in enumerate(headers):
        for name, slot in header.slots.items():
            file = weights.get(name)
            if file is None or file == header.file or name not in at[file].slots:
                places.setdefault(name, []).append((number, slot))
    for name, held in places.items():
        if len(held) > 1:
            places[name] = _ordered(held)
    return dict(sorted(places.items()))


def _ordered(held: list[Place]) -> list[Place]:
    """Sort chunks by place; chunks without elements go, if there are others."""
    real = [(n, slot) for n, slot in held if 0 not in slot.shape] or held[:1]
    return sorted(real, key=lambda place: (place[1].offsets, place[0]))


def _entry(name: str, held: Sequence[Place], files: Sequence[str]) -> TensorMetadata:
    """Describe one tensor, having checked that its chunks make it up."""
    slots = [slot for _, slot in held]
    first = slots[0]
    for number, slot in held:
        if (slot.dtype, len(slot.shape)) != (first.dtype, len(first.shape)):
            raise FormatError(
                files[number],
                f"its `{name}` is {slot.dtype} with {len(slot.shape)} axes, and another file's is "
                f"{first.dtype} with {len(first.shape)}",
            )
    ends = [[o + n for o, n in zip(s.offsets, s.shape, strict=True)] for s in slots]
    size = tuple(max(column) for column in zip(*ends, strict=True))
    tiling = tile_chunks([Chunk(slot.offsets, slot.shape) for slot in slots])
    if not fills(tiling, size):
        _refuse(name, held, files, Layout(size, tiling))
    return TensorMetadata(TensorProperties(first.dtype), size, tiling)


def _refuse(name: str, held: Sequence[Place], files: Sequence[str], layout: Layout) -> NoReturn:
    clashes = self_overlaps(layout.tiling, 1)
    if clashes:
        one, other = (files[held[i][0]] for i in clashes[0])
        raise FormatError(
            other, f"its `{name}` overlaps that of {one}: the same elements are there twice"
        )
    issue = next(iter(layout_issues(name, layout)), None)
    reason = issue.message if issue is not None else f"chunks of `{name}` do not fill it"
    holders = listed(list(dict.fromkeys(files[number] for number, _ in held)), quote="")
    raise FormatError(holders, f"{reason}; is a file missing?")
