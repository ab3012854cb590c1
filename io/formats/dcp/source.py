"""Where do the bytes of torch.distributed.checkpoint's checkpoints lie? In archives, one an item.

`.metadata` says which bytes of which file are an item's archive. Its first bytes tell where in it
the elements are; they are the same for all tensors of one shape and dtype, so that most archives
need no more than a look at them. Torch is imported only for values that are no plain ones.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import attrs

from shardplan.planning import BytesMetadata, TensorMetadata, flatten

from ...checksums import CRC32, sum_crc
from ...errors import FormatError
from ...limits import read_whole
from ...pool import Pool, default_pool
from ...progress import Tell
from ...stores.base import MissingFileError, Store
from ..base import Fault, Findings, Format, Source, Spot
from ..headers import Header, header_length, parse_header
from ..torch_save.check import Stored, check_archives, file_size
from ..torch_save.names import load_tensor
from ..torch_save.standins import StorageRef, StoredTensor, row_major
from ..torch_save.torch_values import load_archive, load_torch
from ..torch_save.unpickler import PickleError
from ..torch_save.views import Overlay
from ..torch_save.zip_read import (
    DESCRIPTOR,
    Window,
    described_crc,
    in_memory,
    read_archive,
    read_ranges,
)
from .metadata import METADATA, Described, Place, parse_metadata
from .ranks import FIRST_RANK, is_rank_metadata, merge_ranks, rank_metadata

if TYPE_CHECKING:
    from .write import DcpWriter

__all__ = ["DcpFormat", "DcpSource"]

Chunk = tuple[str, int]
"""A chunk: its tensor's name, and its number among the tensor's chunks."""
_OURS: Final = re.compile(r"__\d+_\d+-([0-9a-f]{12})\.distcp")  # torch's names have no save id
_HEAD: Final = 1024  # bytes of an archive before its tensor's elements, and some to spare
_MAX_PICKLE: Final = 1 << 20
_STEP: Final = 4 << 20
_DECODED: Final = 5  # how many times its own size a value takes while it is decoded


class DcpFormat(Format):
    """Checkpoints of torch.distributed.checkpoint."""

    name = "dcp"
    marks = (METADATA, FIRST_RANK)

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether there is a metadata file; see `Format.detect`."""
        if name:
            return (name == METADATA or is_rank_metadata(name)) and store.exists(name)
        return store.exists(METADATA) or store.exists(FIRST_RANK)

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> DcpSource:
        """Open a checkpoint; only its metadata is read. See `Format.open`.

        That is `.metadata`, or, where each rank saved by itself, one file a rank. The name of such
        a file stands for what that rank saved.
        """
        if is_rank_metadata(name):
            described = _read(store, name)
        elif store.exists(METADATA):
            described = _read(store, METADATA)
        else:
            names = rank_metadata(store.list(recursive=False))
            if not names:
                raise FormatError(METADATA, f"there is none in {store.url}: no checkpoint")
            described = merge_ranks({name: _read(store, name) for name in names})
        found = DcpSource(store, described, pool)
        if found.described.old:
            found.open_old_values()
        return found

    def writer(self) -> DcpWriter:
        """Return what writes this format; see `Format.writer`."""
        from .write import DcpWriter  # which needs torch

        return DcpWriter()

    def verify(
        self, store: Store, name: str = "", *, tell: Tell | None = None, pool: Pool | None = None
    ) -> Findings:
        """Compare every archive with its checksums; see `Format.verify`."""
        opened = self.open(store, name, pool)
        lacking = opened.missing()
        found = check_archives(store, opened.archives(), tell, pool)
        order = {file: number for number, file in enumerate(opened.files)}
        faults = sorted((*lacking, *found.faults), key=lambda f: (order.get(f.file, -1), f.begin))
        return attrs.evolve(
            found, faults=tuple(faults), files=len(opened.files), save_id=opened.save_id
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


def _read(store: Store, name: str) -> Described:
    try:
        data = read_whole(store, name, "metadata")
    except MissingFileError:
        raise FormatError(name, f"there is none in {store.url}: no checkpoint") from None
    return parse_metadata(data, name)


@attrs.frozen
class _Layout:
    """Where the elements lie in an archive, and what they are.

    Attributes:
        length: How many bytes the archive has.
        begin: Where the tensor's storage begins in it.
        tensor: The tensor.
    """

    length: int
    begin: int
    tensor: StoredTensor


class DcpSource(Source):
    """A checkpoint of torch.distributed.checkpoint; a `Source`. What was found is kept.

    Args:
        store: Where it lies.
        described: What its `.metadata` says.
        pool: The threads and the memory budget to use.

    Attributes:
        inner: The store as it is, without the files that `store` makes up.
    """

    format = "dcp"

    def __init__(self, store: Store, described: Described, pool: Pool | None = None) -> None:
        self.described = described
        self.metadata = described.metadata
        self.inner = store
        self._overlay = Overlay(store, described.files)
        self._pool = pool or default_pool()
        self._sizes: dict[int, int] = {}
        self._spots: dict[tuple[str, int], Spot] = {}
        self._known: dict[int, dict[bytes, _Layout]] = defaultdict(dict)  # by `begin`
        self._shared: dict[tuple[int, int], Header] = {}  # headers of safetensors
        self._inline: dict[str, Any] = {}
        self._sums: dict[Chunk, int | None] = {}
        self._summed_values: set[str] = set()  # those whose archives have checksums
        self._boxes: dict[int, Any] = {}  # by layout: offsets and sizes of its chunks

    @property
    def store(self) -> Store:
        """Where its files are."""
        return self._overlay

    @property
    def files(self) -> Sequence[str]:
        """Their names."""
        return self._overlay.files

    def spots(self, chunks: Sequence[tuple[str, int]]) -> list[Spot]:
        """Find chunks; see `Source.spots`. Only the first bytes of most of them are read."""
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._spots]
        groups: dict[int, list[_Item]] = defaultdict(list)
        for item in self._items(new):
            groups[item.place.file].append(item)
        for found in self._pool.map(self._locate, groups.values()):
            self._spots.update(found)
        return [self._spots[chunk] for chunk in chunks]

    checksum = CRC32

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each chunk that fills its record; see `Source.chunk_sums`.

        It follows the elements, so that a few bytes behind them are read.
        """
        groups: dict[int, list[tuple[Chunk, Spot]]] = defaultdict(list)
        for chunk, spot in zip(chunks, self.spots(chunks), strict=True):
            if chunk not in self._sums and spot.file < len(self.described.files):
                groups[spot.file].append((chunk, spot))
        for found in self._pool.map(self._read_sums, groups.values()):
            self._sums.update(found)
        return [self._sums.get(chunk) for chunk in chunks]

    def _read_sums(self, items: Sequence[tuple[Chunk, Spot]]) -> dict[Chunk, int | None]:
        """Read what follows the elements of some chunks of one file: a descriptor, in archives."""
        number = items[0][1].file
        ends = [spot.begin + spot.nbytes for _, spot in items]
        room = [max(min(self._sizes[number] - end, DESCRIPTOR), 0) for end in ends]
        views = [memoryview(bytearray(nbytes)) for nbytes in room]
        file = self.described.files[number]
        read_ranges(self.inner, file, list(zip(ends, views, strict=True)))
        pairs = zip(items, views, strict=True)
        return {chunk: described_crc(bytes(view), spot.nbytes) for (chunk, spot), view in pairs}

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
        return [found for found in self._stored() if isinstance(found, Fault)]

    def archives(self) -> Sequence[Stored]:
        """Return the archives that are all there, and were written without extensions."""
        return [found for found in self._stored() if isinstance(found, Stored)]

    def _stored(self) -> Iterator[Stored | Fault]:
        """Yield every archive that the metadata names, or why it is not all there."""
        described = self.described
        sizes = {file: file_size(self.inner, file) for file in described.files}
        copies = [(key, place) for key, found in described.copies.items() for place in found]
        for (name, _), place in [*described.places.items(), *copies]:
            file = described.files[place.file]
            size, end = sizes[file], place.offset + place.length
            if isinstance(size, Fault):
                yield attrs.evolve(size, key=name)
            elif end > size:
                reason = (
                    f"it has {size:,} bytes, and `{name}` ends at byte {end:,}: it was cut short"
                )
                yield Fault("size", file, reason, name, place.offset, end)
            elif not place.transforms:
                yield Stored(file, place.offset, place.length, name)

    def has_value_sum(self, name: str) -> bool:
        """Return True if a value that was read has a checksum; see `Source.has_value_sum`."""
        return name in self._inline or name in self._summed_values

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a value that is no tensor; see `Source.value`."""
        if name in self._inline:
            return deepcopy(self._inline[name])
        file, data = self._value(name)
        value = load_torch(data, file, name)
        if read_archive(in_memory(data, file)).is_summed:
            self._summed_values.add(name)
        return value

    def plain_value(self, name: str) -> Any:
        """Return a value that is no tensor, if reading it takes no torch.

        Raises:
            FormatError: It is not where it should be, or its archive is damaged.
            PickleError: It takes torch, or is damaged.
        """
        if name in self._inline:
            return self._inline[name]
        return _plain(*self._value(name))

    def _value(self, name: str) -> tuple[str, bytes]:
        """Return the file of a value, and its bytes there, which are the same on all ranks."""
        file, data = self._bytes(name, self._place(name, None))
        self._compare_values(name, data)
        return file, data

    def _compare_values(self, name: str, data: bytes) -> None:
        """Refuse a value that differs between the ranks that saved it."""
        for copy in self.described.copies.get((name, None), ()):
            file, other = self._bytes(name, copy)
            if other != data:
                raise FormatError(file, _differs(name))

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads; see `Source.value_bytes`."""
        return 0 if name in self._inline else self._place(name, None).length

    def value_cost(self, name: str) -> int:
        """Return how many bytes of memory it takes to read a value; see `Source.value_cost`."""
        return _DECODED * self.value_bytes(name)

    def open_old_values(self) -> None:
        """Open dicts that torch 2.3 kept whole, so that their values go by today's names."""
        entries = dict(self.metadata.state_dict_metadata)
        data = self.metadata.planner_data
        paths = dict(data.get("paths", {})) if data else {}
        for name, entry in list(entries.items()):
            place = self.described.places.get((name, None))
            if not isinstance(entry, BytesMetadata) or place is None or place.transforms:
                continue
            try:
                value = _plain(*self._bytes(name, place))
                flat, inner = flatten({name: value})
            except ValueError:
                continue  # whoever asks for it learns why
            if name in flat or flat.keys() & entries.keys():
                continue
            del entries[name]
            entries |= dict.fromkeys(flat, BytesMetadata())
            self._inline |= flat
            above = paths.pop(name, (("dict", name),))
            paths |= {leaf: (*above, *inner[leaf][1:]) for leaf in flat}
        planner = {"paths": paths} if paths else None
        self.metadata = attrs.evolve(
            self.metadata, state_dict_metadata=entries, planner_data=planner
        )

    def _bytes(self, name: str, place: Place) -> tuple[str, bytes]:
        """Return the file of a value that is no tensor, and its bytes there."""
        self._check_inside(name, place)
        window = Window(self.inner, self.described.files[place.file], place.offset, place.length)
        return window.file, window.read(0, place.length)

    def _items(self, chunks: Sequence[tuple[str, int]]) -> list[_Item]:
        entries = self.metadata.state_dict_metadata
        items = []
        for name, number in chunks:
            row = entries.row_of[name]
            layout = int(entries.layout[row])
            if layout not in self._boxes:
                tiling = entries.layouts[layout].tiling
                columns = tiling.offsets.tolist(), tiling.sizes.tolist()
                self._boxes[layout] = tuple([tuple(map(tuple, c)) for c in columns])
            offsets, sizes = self._boxes[layout]
            place = self._place(name, offsets[number])
            dtype = entries.props[entries.prop[row]].dtype
            items.append(_Item(name, number, place, dtype, offsets[number], sizes[number]))
        return items

    def _place(self, name: str, offset: tuple[int, ...] | None) -> Place:
        place = self.described.places.get((name, offset))
        if place is None:
            which = "" if offset is None else f", from {list(offset)} on,"
            raise FormatError(METADATA, f"it does not say where `{name}`{which} lies")
        if place.transforms:
            raise FormatError(
                self.described.files[place.file],
                f"`{name}` was written through the extension {', '.join(place.transforms)}, which "
                "is not known here; load it with torch.distributed.checkpoint and save it without",
            )
        return place

    def _check_inside(self, name: str, place: Place) -> None:
        file = self.described.files[place.file]
        if place.file not in self._sizes:
            try:
                self._sizes[place.file] = self.inner.size(file)
            except MissingFileError:
                raise FormatError(file, f"it is missing; `{name}` lies in it") from None
        size, end = self._sizes[place.file], place.offset + place.length
        if end > size:
            raise FormatError(
                file,
                f"`{name}` should be at bytes {place.offset:,} to {end:,}, but the file has "
                f"{size:,}: it was cut short, or {METADATA} is of another save",
            )

    def _locate(self, items: Sequence[_Item]) -> dict[tuple[str, int], Spot]:
        """Find some chunks of one file."""
        number = items[0].place.file
        file = self.described.files[number]
        ends = [0]
        for item in items:
            self._check_inside(item.name, item.place)
            ends.append(ends[-1] + min(_HEAD, item.place.length))
        heads = memoryview(bytearray(ends[-1]))
        spans = list(zip(items, ends, ends[1:], strict=False))
        read_ranges(self.inner, file, [(i.place.offset, heads[a:b]) for i, a, b in spans])
        found = {}
        for item, low, high in spans:
            head = bytes(heads[low:high])
            try:
                found[item.key] = self._spot(file, item, head)
                self._compare_chunks(file, item)
            except (FormatError, PickleError) as error:
                reason = error.reason if isinstance(error, FormatError) else str(error)
                raise FormatError(file, f"`{item.name}`: {reason}") from None
        return found

    def _spot(self, file: str, item: _Item, head: bytes) -> Spot:
        place = item.place
        if head[:4] == b"PK\3\4":
            layout = self._layout(file, place, head)
        else:
            layout = self._safetensors(file, item)
        tensor = layout.tensor
        if (tensor.dtype, tensor.size) != (item.dtype, item.sizes):
            raise PickleError(
                f"it is {tensor.dtype} of shape {list(tensor.size)}, and {METADATA} says "
                f"{item.dtype} of shape {list(item.sizes)}"
            )
        return self._overlay.spot(place.file, place.offset + layout.begin, tensor)

    def _compare_chunks(self, file: str, item: _Item) -> None:
        """Refuse a chunk whose checksum differs between the ranks that saved it."""
        copies = self.described.copies.get((item.name, item.offsets), ())
        mine = self._content(file, item.place) if copies else None
        for copy in copies:
            other = self.described.files[copy.file]
            self._check_inside(item.name, copy)
            if self._content(other, copy) != mine:
                raise FormatError(other, _differs(item.name))

    def _content(self, file: str, place: Place) -> tuple[bytes, int]:
        """Return a key that identifies an archive's content."""
        archive = read_archive(Window(self.inner, file, place.offset, place.length))
        pickled = archive.read("data.pkl", _MAX_PICKLE)
        name = f"data/{load_tensor(pickled).storage.key}"
        begin, record = place.offset + archive.begin(name), archive.records[name]
        return pickled, record.crc or self._summed(file, begin, record.nbytes)

    def _summed(self, file: str, begin: int, nbytes: int) -> int:
        """Return the CRC-32 of a record that was saved without one."""
        crc = 0
        for at in range(begin, begin + nbytes, _STEP):
            data = memoryview(bytearray(min(_STEP, begin + nbytes - at)))
            read_ranges(self.inner, file, [(at, data)])
            crc = sum_crc(data, crc)
        return crc

    def _layout(self, file: str, place: Place, head: bytes) -> _Layout:
        """Find the elements in an archive: as in one that begins with the same bytes, if any."""
        for begin, known in list(self._known.items()):
            layout = known.get(head[:begin])
            if layout is not None and layout.length == place.length:
                return layout
        archive = read_archive(Window(self.inner, file, place.offset, place.length, head))
        if not archive.is_little:
            raise PickleError("it was written on a machine of another byte order")
        tensor = load_tensor(archive.read("data.pkl", _MAX_PICKLE))
        record = f"data/{tensor.storage.key}"
        begin = archive.begin(record)
        held = archive.records[record].nbytes
        if held != tensor.storage.nbytes:
            raise PickleError(f"its storage has {held:,} bytes, not {tensor.storage.nbytes:,}")
        layout = _Layout(place.length, begin, tensor)
        if archive.begin("data.pkl") < begin <= len(head):
            self._known[begin][head[:begin]] = layout
        return layout

    def _safetensors(self, file: str, item: _Item) -> _Layout:
        """Find the elements where the tensors of a file are one block of safetensors."""
        at = item.place.offset
        header = self._shared.get((item.place.file, at))
        if header is None:
            window = Window(self.inner, file, at, self._sizes[item.place.file] - at)
            length = header_length(window.read(0, min(8, window.length)), file, window.length)
            header = parse_header(window.read(0, length), file, window.length)
            self._shared[item.place.file, at] = header
        return _from_header(item, header)


@attrs.frozen
class _Item:
    """A chunk to find: its name, its number, its place, and what it should be."""

    name: str
    number: int
    place: Place
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.number


def _from_header(item: _Item, header: Header) -> _Layout:
    slot = header.slots.get(item.name)
    if slot is None or slot.offsets != item.offsets:
        raise PickleError("its safetensors header tells of another chunk")
    storage = StorageRef("", "uint8", slot.nbytes)
    tensor = StoredTensor(storage, slot.dtype, 0, slot.shape, row_major(slot.shape))
    return _Layout(item.place.length, slot.begin, tensor)


def _differs(name: str) -> str:
    return (
        f"`{name}` differs between ranks, which saved it each by itself; give one rank's metadata "
        f"file, such as {FIRST_RANK}, in place of the folder, to read what that rank saved"
    )


def _plain(file: str, data: bytes) -> Any:
    """Return a value that needs no torch."""
    return load_archive(read_archive(in_memory(data, file)), plain=True)
