"""Reading checkpoints of torch.distributed.checkpoint: every item is an archive in a file.

The first bytes of an archive say where in it the elements are. They are the same for all tensors of
one shape and dtype, so most archives need only a comparison of these bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import attrs

from shardplan.planning import TensorMetadata

from ...checksums import CRC32
from ...errors import FormatError
from ...pool import Pool, default_pool
from ...stores.base import MissingFileError, Store, StoreError
from ..base import ChunkPlace, Fault, Findings, Format, Source, read_ranges, read_whole
from ..torch_save.archive import DESCRIPTOR, FileWindow, described_crc, in_memory, read_archive
from ..torch_save.names import load_archive, load_summed, load_tensor
from ..torch_save.source import place_view
from ..torch_save.standins import StoredTensor
from ..torch_save.unpickler import PickleError
from ..torch_save.verify import Stored, check_archives
from .metadata import (
    FIRST_RANK,
    METADATA,
    Described,
    ItemBytes,
    merge_ranks,
    parse_metadata,
    rank_metadata,
)

if TYPE_CHECKING:
    from .write import DcpWriter


Chunk = tuple[str, int]
"""A chunk: its tensor's name, and its number among the tensor's chunks."""
_OURS: Final = re.compile(r"__\d+_\d+-([0-9a-f]{12})\.distcp")  # torch's names have no save id
_HEAD: Final = 1024  # bytes of an archive before its tensor's elements, and some to spare
_MAX_PICKLE: Final = 1 << 20
_DECODED: Final = 5  # how many times its own size a value takes while it is decoded


class DcpFormat(Format):
    """Checkpoints of torch.distributed.checkpoint."""

    name = "dcp"
    marks = (METADATA, FIRST_RANK)

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether there is a metadata file; see `Format.detect`."""
        if name:
            return (name == METADATA or bool(rank_metadata([name]))) and store.exists(name)
        return store.exists(METADATA) or store.exists(FIRST_RANK)

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> DcpSource:
        """Open a checkpoint; only its metadata is read. See `Format.open`.

        The name of one rank's metadata stands for what that rank saved. Where Megatron-core wrote
        the folder, `common.pt` is a part of it, and `.metadata` stands for the rest.
        """
        described = _describe(store, name)
        if _has_common(store, name):
            from .megatron import MegatronSource  # which is built on this module

            return MegatronSource(store, described, pool)
        return DcpSource(store, described, pool)

    def writer(self) -> DcpWriter:
        """Return what writes this format; see `Format.writer`."""
        from .write import DcpWriter  # which needs torch

        return DcpWriter()

    def verify(self, store: Store, name: str = "", **options: Any) -> Findings:
        """Compare every archive with its checksums; see `Format.verify`."""
        opened = DcpSource(store, _describe(store, name))
        lacking, archives = [*opened.missing()], [*opened.archives()]
        files, notes = opened.files, opened.notes
        if _has_common(store, name):
            from .megatron import COMMON, find_common

            common, files = find_common(store), (*files, COMMON)
            if isinstance(common, Fault):
                lacking.append(common)
            else:
                archives.append(common[0])
                notes += common[1]
        found = check_archives(store, archives, **options)
        faulty = {fault.key for fault in [*lacking, *found.faults]}
        lacking += opened.unfit(set(opened.metadata.state_dict_metadata) - faulty)
        order = {file: number for number, file in enumerate(files)}
        faults = sorted((*lacking, *found.faults), key=lambda f: (order.get(f.file, -1), f.begin))
        about = Findings(
            tuple(faults), len(files), notes=found.notes + notes, save_id=opened.save_id
        )
        return attrs.evolve(
            about, chunks=found.chunks, nbytes=found.nbytes, unchecked=found.unchecked
        )

    def made(self, store: Store) -> float | None:
        """Return when its metadata was written; see `Format.made`."""
        found = {entry.name: entry.written for entry in store.entries(recursive=False)}
        ranks = rank_metadata(found) if FIRST_RANK in found else ()
        return found.get(METADATA, max((found[name] for name in ranks), default=None))

    def save_of(self, file: str) -> str | None:
        """Return which save of ours wrote a file; see `Format.save_of`."""
        match = _OURS.fullmatch(file)
        return match[1] if match else None


def _describe(store: Store, name: str) -> Described:
    """Read what the metadata in a folder says, or what a file of metadata does."""
    if rank_metadata([name]):
        return _read(store, name)
    names = () if store.exists(METADATA) else rank_metadata(store.list(recursive=False))
    if not names:
        return _read(store, METADATA)
    return merge_ranks({name: _read(store, name) for name in names})


def _has_common(store: Store, name: str) -> bool:
    """Return whether Megatron-core wrote a folder; its `.metadata` alone stands for itself."""
    from .megatron import is_there

    return not name and is_there(store)


def _read(store: Store, name: str) -> Described:
    try:
        return parse_metadata(read_whole(store, name, "metadata"), name)
    except MissingFileError:
        raise FormatError(name, f"there is none in {store.url}: no checkpoint") from None


@attrs.frozen
class _Layout:
    """The position of a tensor in an archive of so many bytes."""

    length: int
    begin: int
    tensor: StoredTensor


@attrs.frozen
class _Item:
    """A chunk to find, its place, and what it should be."""

    chunk: Chunk
    place: ItemBytes
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.chunk[0]


class DcpSource(Source):
    """A checkpoint of torch.distributed.checkpoint; a `Source`."""

    format = "dcp"
    checksum = CRC32

    def __init__(self, store: Store, described: Described, pool: Pool | None = None) -> None:
        self.described = described
        self.metadata = described.metadata
        self.store, self.files, self.notes = store, described.files, described.notes
        self._pool = pool or default_pool()
        self._sizes: dict[int, int] = {}
        self._found: dict[Chunk, ChunkPlace] = {}
        self._known: dict[int, dict[bytes, _Layout]] = defaultdict(dict)  # by `begin`
        self._sums: dict[Chunk, int | None] = {}
        self._summed_values: set[str] = set()  # those whose archives have checksums
        self._boxes: dict[int, Any] = {}  # by layout: offsets and sizes of its chunks

    # Tensors

    def find_chunks(self, chunks: Sequence[Chunk]) -> list[ChunkPlace]:
        """Find chunks; see `Source.find_chunks`. Only the first bytes of most of them are read."""
        groups: dict[int, list[_Item]] = defaultdict(list)
        for chunk in dict.fromkeys(chunks):
            if chunk not in self._found:
                item = self._item(*chunk)
                groups[item.place.file].append(item)
        for found in self._pool.map(self._locate, groups.values()):
            self._found.update(found)
        return [self._found[chunk] for chunk in chunks]

    def _item(self, name: str, number: int) -> _Item:
        entries = self.metadata.state_dict_metadata
        row = entries.row_of[name]
        layout = int(entries.layout[row])
        if layout not in self._boxes:
            tiling = entries.layouts[layout].tiling
            columns = tiling.offsets.tolist(), tiling.sizes.tolist()
            self._boxes[layout] = tuple([tuple(map(tuple, column)) for column in columns])
        offsets, sizes = self._boxes[layout]
        place = self._place(name, offsets[number])
        dtype = entries.props[entries.prop[row]].dtype
        return _Item((name, number), place, dtype, offsets[number], sizes[number])

    def _place(self, name: str, offset: tuple[int, ...] | None) -> ItemBytes:
        place = self.described.places.get((name, offset))
        if place is None:
            which = "" if offset is None else f", from {list(offset)} on,"
            raise FormatError(METADATA, f"it does not say where `{name}`{which} lies")
        if place.transforms:
            raise FormatError(
                self.files[place.file],
                f"`{name}` was written through the extension {', '.join(place.transforms)}, which "
                "is not known here; load it with torch.distributed.checkpoint and save it without",
            )
        return place

    def _window(self, name: str, place: ItemBytes, head: bytes = b"") -> FileWindow:
        """Return the bytes of an item, having checked that its file has them."""
        file = self.files[place.file]
        if place.file not in self._sizes:
            try:
                self._sizes[place.file] = self.store.size(file)
            except MissingFileError:
                raise FormatError(file, f"it is missing; `{name}` lies in it") from None
        size, end = self._sizes[place.file], place.offset + place.length
        if end > size:
            raise FormatError(
                file,
                f"`{name}` should be at bytes {place.offset:,} to {end:,}, but the file has "
                f"{size:,}: it was cut short, or {METADATA} is of another save",
            )
        return FileWindow(self.store, file, place.offset, place.length, head)

    def _locate(self, items: Sequence[_Item]) -> dict[Chunk, ChunkPlace]:
        windows = [self._window(item.name, item.place) for item in items]
        heads = [bytearray(min(_HEAD, window.length)) for window in windows]
        file = windows[0].file
        pairs = zip(windows, heads, strict=True)
        read_ranges(self.store, file, [(w.offset, memoryview(head)) for w, head in pairs])
        found = {}
        for item, head in zip(items, heads, strict=True):
            try:
                found[item.chunk] = self._chunk_place(item, bytes(head))
                self._compare_chunks(item)
            except (FormatError, PickleError) as error:
                reason = error.reason if isinstance(error, FormatError) else str(error)
                raise FormatError(file, f"`{item.name}`: {reason}") from None
        return found

    def _chunk_place(self, item: _Item, head: bytes) -> ChunkPlace:
        if head[8:9] == b"{":
            raise PickleError("it was written as safetensors, which torch cannot load here either")
        layout = self._in_archive(item, head)
        place, tensor = item.place, _with_first_axes(layout.tensor, item.sizes)
        if (tensor.dtype, tensor.size) != (item.dtype, item.sizes):
            raise PickleError(
                f"it is {tensor.dtype} of shape {list(tensor.size)}, and {METADATA} says "
                f"{item.dtype} of shape {list(item.sizes)}"
            )
        return place_view(place.file, place.offset + layout.begin, tensor)

    def _in_archive(self, item: _Item, head: bytes) -> _Layout:
        """Find the elements in an archive: as in one that begins with the same bytes, if any."""
        for begin, known in list(self._known.items()):
            layout = known.get(head[:begin])
            if layout is not None and layout.length == item.place.length:
                return layout
        archive = read_archive(self._window(item.name, item.place, head))
        tensor = load_tensor(archive.pickle(_MAX_PICKLE))
        archive.check_storages({tensor.storage.key: tensor.storage.nbytes})
        begin = archive.begin(f"data/{tensor.storage.key}")
        layout = _Layout(item.place.length, begin, tensor)
        if archive.begin("data.pkl") < begin <= len(head):
            self._known[begin][head[:begin]] = layout
        return layout

    # Checksums

    def chunk_sums(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Return the checksums, which follow the elements; see `Source.chunk_sums`."""
        groups: dict[int, list[tuple[Chunk, ChunkPlace]]] = defaultdict(list)
        for chunk, place in zip(chunks, self.find_chunks(chunks), strict=True):
            if chunk not in self._sums:
                groups[place.file].append((chunk, place))
        for found in self._pool.map(self._read_sums, groups.values()):
            self._sums.update(found)
        return [self._sums.get(chunk) for chunk in chunks]

    def _read_sums(self, items: Sequence[tuple[Chunk, ChunkPlace]]) -> dict[Chunk, int | None]:
        number = items[0][1].file
        ends = [place.begin + place.nbytes for _, place in items]
        room = [max(min(self._sizes[number] - end, DESCRIPTOR), 0) for end in ends]
        views = [memoryview(bytearray(nbytes)) for nbytes in room]
        read_ranges(self.store, self.files[number], list(zip(ends, views, strict=True)))
        pairs = zip(items, views, strict=True)
        return {chunk: self._sum(chunk, place, bytes(view)) for (chunk, place), view in pairs}

    def _sum(self, chunk: Chunk, place: ChunkPlace, after: bytes) -> int | None:
        """Return a chunk's checksum: of the descriptor after it, or else of the directory."""
        crc = described_crc(after, place.nbytes)
        if crc is None and place.nbytes:  # the record of its checksum may itself be damaged
            item = self._item(*chunk)
            archive = read_archive(self._window(item.name, item.place))
            crc = archive.crc_at(place.begin - item.place.offset, place.nbytes)
        return crc or None

    def file_numbers(self, name: str) -> Sequence[int] | None:
        """Return the file of each chunk as the metadata has it; see `Source.file_numbers`."""
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorMetadata)
        offsets = map(tuple, entry.chunks.offsets.tolist())
        found = [self.described.places.get((name, offset)) for offset in offsets]
        numbers = [place.file for place in found if place is not None]
        return numbers if len(numbers) == len(found) else None

    def missing(self) -> Sequence[Fault]:
        """Return what is not all there, by the sizes of files; see `Source.missing`."""
        absent = [found for found in self._stored() if isinstance(found, Fault)]
        return [*absent, *self._misplaced()]

    def unfit(self, names: Set[str]) -> list[Fault]:
        """Return why a load would refuse some tensors, though their archives are sound.

        A load reads nothing for a tensor without elements.
        """
        packed = {name for (name, _), place in self.described.places.items() if place.transforms}
        chunks = {
            name: [(name, number) for number in range(len(entry.chunks))]
            for name, entry in self.metadata.state_dict_metadata.items()
            if name in names - packed and isinstance(entry, TensorMetadata) and 0 not in entry.size
        }
        if self._refusal(list(chain.from_iterable(chunks.values()))) is None:
            return []
        found = ((name, self._refusal(of_name)) for name, of_name in chunks.items())
        return [Fault("header", e.file, e.reason, name) for name, e in found if e is not None]

    def _refusal(self, chunks: Sequence[Chunk]) -> FormatError | None:
        try:
            self.find_chunks(chunks)
        except FormatError as error:
            return error
        return None

    def _misplaced(self) -> Iterator[Fault]:
        """Yield a fault for each name whose parts the metadata does not all place."""
        places = self.described.places
        for name, entry in self.metadata.state_dict_metadata.items():
            offsets: list[tuple[int, ...] | None] = [None]
            if isinstance(entry, TensorMetadata):
                offsets = [tuple(row) for row in entry.chunks.offsets.tolist()]
            if any((name, offset) not in places for offset in offsets):
                yield Fault("manifest", METADATA, "it does not say where all of it lies", name)

    def archives(self) -> Sequence[Stored]:
        """Return the archives that are all there, and were written without extensions."""
        return [found for found in self._stored() if isinstance(found, Stored)]

    def _stored(self) -> Iterator[Stored | Fault]:
        """Yield every archive that the metadata names, or why it is not all there."""
        described = self.described
        sizes = [_file_size(self.store, file) for file in described.files]
        copies = [(key, place) for key, found in described.copies.items() for place in found]
        for (name, _), place in [*described.places.items(), *copies]:
            file = described.files[place.file]
            size, end = sizes[place.file], place.offset + place.length
            if isinstance(size, Fault):
                yield attrs.evolve(size, key=name)
            elif end > size:
                reason = f"it has {size:,} bytes, and `{name}` ends at {end:,}: it was cut short"
                yield Fault("size", file, reason, name, place.offset, end)
            elif not place.transforms:
                yield Stored(file, place.offset, place.length, name)

    def _compare_chunks(self, item: _Item) -> None:
        """Refuse a chunk whose content differs between the ranks that saved it."""
        copies = self.described.copies.get((item.name, item.offsets), ())
        mine = self._content(item.name, item.place) if copies else None
        for copy in copies:
            if self._content(item.name, copy) != mine:
                raise FormatError(self.files[copy.file], _differs(item.name))

    def _content(self, name: str, place: ItemBytes) -> tuple[bytes, int]:
        """Return an archive's pickle and its checksum, which identify its content."""
        archive = read_archive(self._window(name, place))
        if not archive.is_summed:
            raise PickleError("several ranks saved it, and without checksums they are not compared")
        pickled = archive.pickle(_MAX_PICKLE)
        return pickled, archive.records[f"data/{load_tensor(pickled).storage.key}"].crc

    # Values

    def has_value_sum(self, name: str) -> bool:
        """Return whether the archive of a value that was read has sums; see `Source`."""
        return name in self._summed_values

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value; see `Source.value`."""
        file, data = self._value(name)
        value, is_summed = load_summed(data, file, name)
        if is_summed:
            self._summed_values.add(name)
        return value

    def plain_value(self, name: str) -> Any:
        """Return a non-tensor value that needs no torch; see `Source.plain_value`."""
        file, data = self._value(name)
        return load_archive(read_archive(in_memory(data, file)), plain=True)

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads; see `Source.value_bytes`."""
        return self._place(name, None).length

    def value_cost(self, name: str) -> int:
        """Return how many bytes of memory it takes to read a value; see `Source.value_cost`."""
        return _DECODED * self.value_bytes(name)

    def _value(self, name: str) -> tuple[str, bytes]:
        """Return the file of a value, and its bytes, having compared those of all ranks."""
        copies = self.described.copies.get((name, None), ())
        windows = [self._window(name, place) for place in (self._place(name, None), *copies)]
        data = windows[0].read(0, windows[0].length)
        for copy in windows[1:]:
            if copy.read(0, copy.length) != data:
                raise FormatError(copy.file, _differs(name))
        return windows[0].file, data


def _with_first_axes(tensor: StoredTensor, sizes: tuple[int, ...]) -> StoredTensor:
    """Return a tensor with the first axes of size one that Megatron-core does not store."""
    ones = (1,) * (len(sizes) - len(tensor.size))
    return attrs.evolve(tensor, size=ones + tensor.size, stride=ones + tensor.stride)


def _file_size(store: Store, file: str) -> int | Fault:
    try:
        return store.size(file)
    except MissingFileError:
        return Fault("missing", file, "it is missing")
    except StoreError as error:
        return Fault("unreadable", file, error.reason)


def _differs(name: str) -> str:
    return (
        f"`{name}` differs between ranks, which saved it independently; open one rank's metadata "
        f"file, such as {FIRST_RANK}, instead of the folder, to read what that rank saved"
    )
