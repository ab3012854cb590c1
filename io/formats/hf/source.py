"""Safetensors files as Hugging Face tools and torch write them, read where they lie.

Files are chosen as those tools choose them: ``model.safetensors`` if it is there; else the files
that the one ``*.safetensors.index.json`` names; else all safetensors files of the folder. Several
files may hold chunks of one tensor, as torch's ``HuggingFaceStorageWriter`` writes them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import attrs

from shardplan.planning import (
    Chunk,
    Layout,
    Metadata,
    TensorMetadata,
    TensorProperties,
    layout_issues,
)
from shardplan.planning.geometry import fills, self_overlaps, tile_chunks
from shardplan.planning.storage import MAX_SHARD_SIZE, save_id_of

from ...errors import FormatError, listed
from ...pool import Pool, Progress, ProgressCallback, default_pool
from ...stores.base import MissingFileError, Store, StoreError, check_path
from ..base import ChunkPlace, ExtraFiles, Fault, Findings, Format, Source, read_whole
from ..headers import Header, Slot, read_header, read_header_text
from .companions import find_companions

if TYPE_CHECKING:
    from .write import HfWriter


SINGLE: Final = "model.safetensors"  # holds a whole model
INDEX: Final = "model.safetensors.index.json"  # says which of several files holds which tensor
PART_OF: Final = "index"  # key of a header: the file counts only together with an index
TIED: Final = "tied"  # key of a header of ours: names that are tied to the file's tensors
RESERVED: Final = ("format", "shardplan", "DCP_VERSION", "DCP_SHARDING_INFO")
"""Keys of a header's ``__metadata__`` that are not names of tensors."""
_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_NUMBERED: Final = re.compile(r"(?!shard-)(.+)-(\d{5})-of-(\d{5})\.safetensors")
OWN_NAME: Final = re.compile(r"model-(?:[0-9a-f]+-)?\d{5}-of-\d{5}\.safetensors")
_LOG: Final = logging.getLogger("shardplan")
_NO_SUMS: Final = (
    "safetensors files have no checksums: headers and sizes were checked, elements were not"
)


class HfFormat(Format):
    """Safetensors files as Hugging Face tools write them, with an index if they are several."""

    name = "hf"
    marks = (INDEX, SINGLE)
    whole_tensors = True
    has_values = False
    reserved = RESERVED

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether there are safetensors files; see `Format.detect`."""
        if name:
            return name.endswith((_SUFFIX, _INDEX_SUFFIX)) and save_id_of(name) is None
        found = store.list(recursive=False)
        if SINGLE in found or indices(found):
            return True
        return any(not uncommitted(store, file) for file in plain_files(found))

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> HfSource:
        """Open a checkpoint; its index and the headers of all files are read. See `Format.open`."""
        return HfSource(store, name, pool)

    def writer(
        self,
        *,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        leave_out: bool = False,
        extra_files: ExtraFiles | None = None,
    ) -> HfWriter:
        """Return what writes this format; see `HfWriter`."""
        from .write import HfWriter  # which needs torch

        extra = () if extra_files is None else (extra_files,)
        return HfWriter(max_shard_size=max_shard_size, leave_out=leave_out, extra=extra)

    def verify(
        self,
        store: Store,
        name: str = "",
        *,
        progress: ProgressCallback | None = None,
        pool: Pool | None = None,
    ) -> Findings:
        """Check headers and sizes: there are no checksums. See `Format.verify`."""
        Progress(0, progress)
        try:
            found = self.open(store, name, pool)
        except FormatError as error:
            return _find_faults(store, name, error, pool or default_pool())
        count, read, left = len(found.files), found.header_bytes, found.data_bytes
        return Findings((), count, nbytes=read, notes=(_NO_SUMS,), unchecked=left)


def _find_faults(store: Store, name: str, error: FormatError, pool: Pool) -> Findings:
    """Find all that is wrong with files that could not be opened; ``error`` if that is nothing."""
    try:
        chosen = choose_files(store, name)
    except FormatError as damage:
        return Findings((Fault("header", damage.file, damage.reason),))
    lacking = () if chosen.index or name else missing_parts(chosen.files)
    faults = [Fault("missing", file, reason) for file, reason in lacking]
    found = pool.map(lambda file: _look(store, file, chosen.index), chosen.files)
    faults += [one for one in found if isinstance(one, Fault)]
    bad = {fault.file for fault in faults}
    return Findings(
        tuple(faults) or (Fault("header", error.file, error.reason),),
        len(chosen.files),
        nbytes=sum(one.length for one in found if isinstance(one, Header)),
        lost=frozenset(key for key, file in chosen.weights.items() if file in bad),
    )


def _look(store: Store, file: str, index: str | None) -> Header | Fault:
    """Read and check one header, which an index may have named; or return what is wrong."""
    try:
        return read_header(store, file)
    except MissingFileError:
        named = f", and {index} names it" if index else ""
        return Fault("missing", file, f"it is missing{named}; was all of it downloaded?")
    except FormatError as error:
        return Fault("header", file, error.reason)


class _Place(NamedTuple):
    file: int
    slot: Slot


class HfSource(Source):
    """Safetensors files; ``tied`` are names that share another's elements, and those others."""

    format, has_sums = "hf", False

    def __init__(self, store: Store, name: str = "", pool: Pool | None = None) -> None:
        chosen = choose_files(store, name)
        loose = chosen.index is None and not name
        lost = next(missing_parts(chosen.files), None) if loose else None
        if lost is not None:
            raise FormatError(*lost)
        found = (pool or default_pool()).map(
            lambda file: _look(store, file, chosen.index), chosen.files
        )
        for fault in found:
            if isinstance(fault, Fault):
                raise FormatError(fault.file, fault.reason)
        headers = [header for header in found if isinstance(header, Header)]
        if loose:
            headers = [header for header in headers if not is_part(header.metadata)]
        if not headers:
            raise FormatError(name or store.url, "there are no safetensors files to read")
        self.store, self.files = store, tuple(header.file for header in headers)
        self.beside = store if find_companions(store) else None
        self.header_bytes = sum(header.length for header in headers)
        last = [(slot, h.length) for h in headers for slot in [*h.slots.values()][-1:]]
        self.data_bytes = sum(slot.begin + slot.nbytes - length for slot, length in last)
        self._places = _gather(headers, chosen.weights)
        self.tied = _find_ties(headers, self._places, chosen.weights)
        self._places |= {name: self._places[kept] for name, kept in self.tied.items()}
        self.remarks = _remarks(headers, self.tied)
        absent = sorted(name for name in chosen.weights if name not in self._places)
        if absent and chosen.index is not None:
            note = _excuse(store, absent, chosen.weights, chosen.index)
            self.notes = (f"{store.url}: {note}",)
        kinds: dict[Any, TensorMetadata] = {}  # most tensors are cut as others are
        entries = {}
        for name, held in self._places.items():
            key = tuple([place.slot.place for place in held])
            if key not in kinds:
                kinds[key] = _entry(name, held, self.files)
            entries[name] = kinds[key]
        self.metadata = Metadata(entries)
        if self.tied:
            pairs = listed([f"`{name}` to `{kept}`" for name, kept in self.tied.items()], quote="")
            _LOG.info("%s: tied weights are stored once: %s", self.store.url, pairs)
        for note in self.notes:
            _LOG.warning(note)

    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Find chunks; see `Source.find_chunks`."""
        found = [self._places[name][chunk] for name, chunk in chunks]
        return [ChunkPlace(p.file, p.slot.begin, p.slot.dtype, p.slot.shape) for p in found]


def _gather(headers: Sequence[Header], weights: Mapping[str, str]) -> dict[str, list[_Place]]:
    """Return the chunks of each tensor, by offset; of two files with one, the index decides."""
    places: dict[str, list[_Place]] = {}
    at = {header.file: header for header in headers}
    for number, header in enumerate(headers):
        for name, slot in header.slots.items():
            file = weights.get(name)
            if file is None or file == header.file or name not in at[file].slots:
                places.setdefault(name, []).append(_Place(number, slot))
    return {name: _ordered(held) for name, held in sorted(places.items())}


def _ordered(held: list[_Place]) -> list[_Place]:
    """Sort chunks by place; chunks without elements go, if there are others."""
    if len(held) == 1:
        return held
    real = [place for place in held if 0 not in place.slot.shape] or held[:1]
    return sorted(real, key=lambda place: (place.slot.offsets, place.file))


def _find_ties(
    headers: Iterable[Header], places: Mapping[str, object], weights: Mapping[str, str]
) -> dict[str, str]:
    """Find names that are tied to tensors, among all that headers say by name.

    ``safetensors.torch.save_model`` notes there which tensor stands for one that it left out,
    beside whatever its caller noted. So a note alone proves nothing: it counts if we wrote it, if
    the index has the name, or if both are the same parameter, of two modules.
    """
    tied: dict[str, str] = {}
    for header in headers:
        ours = own_words(header.metadata).get(TIED)
        ours = ours if isinstance(ours, list) else []
        for name, kept in header.metadata.items():
            if name in places or name in tied or name in RESERVED or kept not in header.slots:
                continue
            same = name.rpartition(".")[2] == kept.rpartition(".")[2]
            if same or name in ours or name in weights:
                tied[name] = kept
    return tied


def _remarks(headers: Sequence[Header], tied: Mapping[str, str]) -> dict[str, str]:
    """Return what else headers say, by key; where they differ, the first."""
    said = {k: v for header in reversed(headers) for k, v in header.metadata.items()}
    others = set(RESERVED) - {"format"} | tied.keys()
    return {key: text for key, text in said.items() if key not in others}


def _excuse(store: Store, absent: Sequence[str], weights: Mapping[str, str], index: str) -> str:
    """Refuse names of the index that no file holds, unless the model says that it ties them."""
    named = listed(absent)
    if not _ties_weights(store):
        raise FormatError(weights[absent[0]], f"it does not hold {named}, which {index} has in it")
    return (
        f"{index} names {named}, which no file holds; they were left out: config.json says that "
        "the model ties its embeddings"
    )


def _ties_weights(store: Store) -> bool:
    try:
        config = json.loads(read_whole(store, "config.json", "config"))
    except (StoreError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("tie_word_embeddings") is True


def _entry(name: str, held: Sequence[_Place], files: Sequence[str]) -> TensorMetadata:
    """Describe one tensor, having checked that its chunks make it up."""
    slots = [place.slot for place in held]
    first = slots[0]
    for place in held:
        slot = place.slot
        if (slot.dtype, len(slot.shape)) != (first.dtype, len(first.shape)):
            raise FormatError(
                files[place.file],
                f"its `{name}` is {slot.dtype} with {len(slot.shape)} axes, and another file's is "
                f"{first.dtype} with {len(first.shape)}",
            )
    ends = [[o + n for o, n in zip(s.offsets, s.shape, strict=True)] for s in slots]
    size = tuple(max(column) for column in zip(*ends, strict=True))
    tiling = tile_chunks([Chunk(slot.offsets, slot.shape) for slot in slots])
    if not fills(tiling, size):
        raise _misfit(name, [files[place.file] for place in held], Layout(size, tiling))
    return TensorMetadata(TensorProperties(first.dtype), size, tiling)


def _misfit(name: str, holders: Sequence[str], layout: Layout) -> FormatError:
    """Return the error for chunks that do not make up a tensor, given the file of each."""
    clashes = self_overlaps(layout.tiling, 1)
    if clashes:
        one, other = (holders[number] for number in clashes[0])
        reason = f"its `{name}` overlaps that of {one}: the same elements are there twice"
        return FormatError(other, reason)
    issue = next(iter(layout_issues(name, layout)), None)
    reason = issue.message if issue is not None else f"chunks of `{name}` do not fill it"
    return FormatError(listed([*dict.fromkeys(holders)], quote=""), f"{reason}; is a file missing?")


@attrs.frozen
class Chosen:
    """The files of a checkpoint, and the index that names them; None if there is none."""

    files: Sequence[str]
    index: str | None = None
    weights: Mapping[str, str] = attrs.Factory(dict)


def choose_files(store: Store, name: str = "") -> Chosen:
    """Choose the files of a checkpoint: of the folder, or of a file or an index in it."""
    if name and not name.endswith(_INDEX_SUFFIX):
        return Chosen([name])
    found = () if name else store.list(recursive=False)
    if SINGLE in found:
        return Chosen([SINGLE])
    named = [name] if name else indices(found)
    if len(named) > 1 and INDEX not in named:
        raise FormatError(
            store.url, f"it holds several models: {', '.join(named)}; give the path of one of these"
        )
    if not named:
        return Chosen(plain_files(found))
    index = INDEX if INDEX in named else named[0]
    weights = read_index(store, index)
    return Chosen(sorted(set(weights.values())), index, weights)


def indices(found: Iterable[str]) -> list[str]:
    """Name the files that say which of several files holds which tensor."""
    return [name for name in found if name.endswith(_INDEX_SUFFIX)]


def plain_files(found: Iterable[str]) -> list[str]:
    """Name the safetensors files that may be a checkpoint: not those of a killed save of ours."""
    return [name for name in found if name.endswith(_SUFFIX) and save_id_of(name) is None]


def missing_parts(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the files that are missing of those that belong together by their names, and why."""
    known = set(files)
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match is None:
            continue
        stem, count = match[1], int(match[3])
        for name in (f"{stem}-{i + 1:05d}-of-{match[3]}{_SUFFIX}" for i in range(count)):
            if name not in known:
                known.add(name)
                yield name, f"it is missing; {file} is one of {count} files"


def uncommitted(store: Store, file: str) -> bool:
    """Return whether a file belongs to a save that was never committed: one that needs an index.

    A file named as such a save names it counts as one, too, if it has no header yet.
    """
    try:
        return is_part(_peek(store, file))
    except (FormatError, StoreError):
        return OWN_NAME.fullmatch(file) is not None


def _peek(store: Store, file: str) -> Mapping[str, str]:
    """Return the ``__metadata__`` of a file's header; the file may well be cut short."""
    data = read_header_text(store, file, store.size(file))
    try:
        found = json.loads(data[8:]).get("__metadata__", {})
    except (ValueError, AttributeError, RecursionError):
        raise FormatError(file, "its header is damaged") from None
    return found if isinstance(found, dict) else {}


def is_part(metadata: Mapping[str, str]) -> bool:
    """Return whether a file counts only together with an index, by what its header says."""
    return PART_OF in own_words(metadata)


def own_words(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return what a file of ours says of itself; nothing if it is not ours, or damaged."""
    try:
        own = json.loads(metadata.get("shardplan", "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    return own if isinstance(own, dict) else {}


def read_index(store: Store, index: str) -> dict[str, str]:
    """Return which tensor lies in which file, as an index says."""
    try:
        table = json.loads(read_whole(store, index, "index"))
        weights = table["weight_map"]
    except MissingFileError:
        raise FormatError(index, "it is missing") from None
    except FormatError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FormatError(index, f"it is not an index of safetensors files: {error!r}") from None
    if not isinstance(weights, dict) or not weights:
        raise FormatError(index, "its `weight_map` names no files")
    for name, file in weights.items():
        if not isinstance(file, str) or not file.endswith(_SUFFIX) or not _is_inside(file):
            what = f"`{name}` in {str(file)[:80]!r}, which is not a safetensors file beside it"
            raise FormatError(index, f"it has {what}")
    return weights


def _is_inside(file: str) -> bool:
    try:
        return bool(check_path(file))
    except StoreError:
        return False
