"""The manifest: all that is global about a checkpoint, as a record and as one JSON file.

It is written last and replaced atomically: a checkpoint exists from the instant that its manifest
does. Equal tilings, properties and columns of file numbers are written once, so that half a million
chunks open at once. Decoding trusts nothing: every number is checked before it is used.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import (
    CodecError,
    Entries,
    Grid,
    Layout,
    Metadata,
    StorageMeta,
    TensorProperties,
    from_json,
    to_json,
    unflatten,
)
from shardplan.planning.columns import DAMAGE, Ints, column, readonly, within
from shardplan.planning.geometry import Boxes, Tiling, shape_fault
from shardplan.planning.storage import BLOCK_BYTES

from ...checksums import Sums, sums_from_hex, sums_to_hex, xxhash
from ...errors import FormatError
from ...stores.base import MissingFileError, Store, StoreError, check_path
from ...values import RAW
from ..base import LIMITS, MAX_BYTES, check_size, read_bytes, read_whole

MANIFEST: Final = "shardplan.json"
VERSIONS: Final = (1, 2)
"""The versions that are read; see `version_of`."""
_MISFIT: Final = "its checksum does not fit its text: it was damaged or edited"
_USUAL: Final = 64 << 20  # up to here a manifest is read before anything is known of it
_PIECE: Final = 16 << 20  # bytes of a larger one that are looked at, at a time
_HEAD_BYTES: Final = 128  # at the beginning: format, version, checksum
_TEXT: Final = bytes(range(32, 127))  # what its text is made of
_FORMAT: Final = "shardplan"
_LAST_SECOND: Final = 1 << 36  # in the year 4147
_KINDS: Final = ("dict", "list", "tuple")
_EMPTY_SEATS: Final = 1 << 20  # entries that lists may have in all, beyond those that are saved
_HEAD: Final = re.compile(
    rb'\{"format":"shardplan","version":(\d{1,9}),"xxh3_64":"([0-9a-f]{16})",'
)
_FILE: Final = re.compile(r"[^/]+\.safetensors")


@attrs.frozen(eq=False)
class FileTable:
    """A checkpoint's data files, one row each; sizes and lengths of headers are in bytes."""

    names: tuple[str, ...]
    sizes: Ints
    headers: Ints
    digests: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)


@attrs.frozen(eq=False, slots=False)
class Manifest:
    """A checkpoint, all but its bytes.

    Attributes:
        places: The distinct columns of file numbers, one number a chunk.
        place: Per entry of the metadata, which of these columns it has; -1 for an inline value.
        sums: The checksum of every chunk, by entry, then by chunk; see `sums_of`.
        values: Non-tensor values, by name: kind (see `StoredValue`), and the JSON data of
            an inline one, or how many bytes another takes.
        created: When it was made, in seconds since 1970.
        block_bytes: The most bytes of a block; see `shardplan.planning.storage.blocks`.
    """

    save_id: str
    metadata: Metadata
    files: FileTable
    places: tuple[Ints, ...]
    place: Ints
    sums: Sums
    values: Mapping[str, tuple[str, Any]]
    created: float = 0.0
    block_bytes: int = BLOCK_BYTES

    @property
    def entries(self) -> Entries:
        """The metadata's entries, in columns."""
        return self.metadata.state_dict_metadata

    @cached_property
    def start(self) -> Ints:
        """Per entry, where its chunks start among all chunks; and how many chunks there are."""
        counts = column([*map(len, self.places), 0])[self.place]
        return readonly(np.concatenate([[0], np.cumsum(counts)]))

    def sums_of(self, name: str) -> Sums:
        """Return the checksum of each chunk of one entry; none for an inline value."""
        row = self.entries.row_of[name]
        return self.sums[self.start[row] : self.start[row + 1]]

    @property
    def file_bytes(self) -> Ints:
        """How many bytes the chunks of each file take; tensors alike are counted, not visited."""
        entries, limit = self.entries, float(self.files.sizes.sum())
        tensors = np.stack([self.place, entries.layout, entries.prop])[:, entries.layout >= 0]
        kinds = Counter(map(tuple, tensors.T.tolist()))
        width = column([p.itemsize for p in entries.props])
        files, sizes = [column([])], [column([])]
        for (place, layout, prop), count in kinds.items():
            where, tiling = self.places[place], entries.layouts[layout].tiling
            if len(where) != len(tiling):  # before any chunk of a grid is made
                raise ValueError(f"{len(tiling)} chunks lie in {len(where)} files")
            volume = _volumes(tiling)
            if float(volume.sum(dtype=float)) * float(width[prop]) * count > limit:
                raise ValueError("its chunks are larger than its files")
            files.append(where)
            sizes.append(volume * (width[prop] * count))
        for name, (kind, data) in self.values.items():
            if kind != "inline":
                where = self.files_of(name)
                if len(where) != 1:
                    raise ValueError(f"the value of `{name}` lies in {len(where)} files")
                files.append(where)
                sizes.append(column([data]))
        every = np.concatenate(sizes)
        if every.sum(dtype=float) > limit:
            raise ValueError("its chunks are larger than its files")
        total = np.zeros(len(self.files), np.int64)
        np.add.at(total, np.concatenate(files), every)
        return total

    def files_of(self, name: str) -> Ints:
        """Return the number of the file of each chunk of one entry; none for an inline value."""
        place = self.place[self.entries.row_of[name]]
        return column([]) if place < 0 else self.places[place]


def _volumes(tiling: Tiling) -> Ints:
    """Return how many elements each chunk has, in little more memory than that."""
    if not isinstance(tiling, Grid):
        volume: Ints = tiling.sizes.prod(axis=1)
        return volume
    volume = np.ones(1, np.int64)
    for cuts in tiling.cuts:
        volume = np.multiply.outer(volume, np.diff(cuts)).reshape(-1)
    return volume


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's JSON text, which starts with a checksum of what follows it."""
    entries = manifest.entries
    try:
        _check_paths(manifest.metadata.planner_data, entries.names)
    except ValueError as error:
        raise FormatError(MANIFEST, f"it could not be opened: {error}") from None
    is_tensor = entries.layout >= 0
    rows = np.flatnonzero(is_tensor)
    files = manifest.files
    body = {
        "save_id": manifest.save_id,
        "created": manifest.created,
        "block_bytes": manifest.block_bytes,
        "files": {
            "names": list(files.names),
            "sizes": files.sizes.tolist(),
            "headers": files.headers.tolist(),
            "xxh3_64": [f"{digest:016x}" for digest in files.digests],
        },
        "properties": [attrs.asdict(p) for p in entries.props],
        "layouts": [_encode_layout(layout) for layout in entries.layouts],
        "places": [p.tolist() for p in manifest.places],
        "tensors": {
            "names": [entries.names[row] for row in rows.tolist()],
            "properties": entries.prop[rows].tolist(),
            "layouts": entries.layout[rows].tolist(),
            "places": manifest.place[rows].tolist(),
        },
        "values": {
            name: [*manifest.values[name], int(manifest.place[entries.row_of[name]])]
            for row, name in enumerate(entries.names)
            if not is_tensor[row]
        },
        "planner_data": to_json(manifest.metadata.planner_data, "planner_data"),
        "sums": sums_to_hex(manifest.sums),
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")[1:]
    return sign(text, version_of(manifest.values))


def version_of(values: Mapping[str, tuple[str, Any]]) -> int:
    """Return the lowest version whose readers know every kind of these values.

    Bytes that are stored as they are came with the second. All else stays readable by programs that
    know the first alone.
    """
    return 2 if any(kind in RAW for kind, _ in values.values()) else 1


def sign(body: bytes, version: int = VERSIONS[0]) -> bytes:
    """Put format, version and checksum before the rest of a manifest's text."""
    digest = xxhash.xxh3_64_hexdigest(body)
    head = f'{{"format":"{_FORMAT}","version":{version},"xxh3_64":"{digest}",'
    return head.encode("ascii") + body


def read_manifest(store: Store) -> Manifest:
    """Read the manifest of the checkpoint that a store holds.

    Raises:
        FormatError: There is none, or it is damaged.
    """
    data = find_manifest(store)
    if data is None:
        raise FormatError(
            MANIFEST, f"there is no checkpoint in {store.url}: no save was ever committed there"
        )
    return decode_manifest(data)


def find_manifest(store: Store) -> bytes | None:
    """Return the text of a checkpoint's manifest; None if there is none.

    An unusually large one is validated in pieces before it is read in full.
    """
    try:
        return store.read_all(MANIFEST, limit=min(_USUAL, LIMITS["manifest"]))
    except MissingFileError:
        return None
    except StoreError as error:
        if error.kind not in ("long", "path"):
            raise
        if error.kind == "long":
            _validate(store, store.size(MANIFEST))
    return read_whole(store, MANIFEST, "manifest")


def _validate(store: Store, size: int) -> None:
    """Refuse a large file that is not a manifest, or damaged, before all of it is in memory."""
    check_size(MANIFEST, size, "manifest")
    start = read_bytes(store, MANIFEST, 0, _HEAD_BYTES)
    head, state = _read_head(start, MANIFEST), xxhash.xxh3_64()
    try:
        for at in range(head.end(), size, _PIECE):
            piece = read_bytes(store, MANIFEST, at, min(_PIECE, size - at))
            if piece.translate(None, _TEXT):  # no manifest has such characters
                break
            state.update(piece)
        else:
            if state.hexdigest() == head[2].decode():
                return
    except StoreError as error:
        if error.kind != "short":
            raise
    if read_bytes(store, MANIFEST, 0, _HEAD_BYTES) == start:  # else another save has replaced it
        raise FormatError(MANIFEST, _MISFIT)


def _read_head(data: bytes, file: str) -> re.Match[bytes]:
    """Return the version and the checksum that a manifest begins with."""
    head = _HEAD.match(data)
    if head is None:
        raise FormatError(file, "it is not a manifest: it does not begin as one")
    if int(head[1]) not in VERSIONS:
        known = f"{VERSIONS[0]} to {VERSIONS[-1]}"
        reason = f"it has version {int(head[1])}, and this program reads {known}"
        raise FormatError(file, f"{reason}; upgrade shardplan")
    return head


def decode_manifest(data: bytes, file: str = MANIFEST) -> Manifest:
    """Read a manifest's text; see `encode_manifest`. Nothing is parsed unless its checksum fits."""
    head = _read_head(data, file)
    if xxhash.xxh3_64_hexdigest(memoryview(data)[head.end() :]) != head[2].decode():
        raise FormatError(file, _MISFIT)
    try:
        return _decode(json.loads(data))
    except (ArithmeticError, CodecError, MemoryError, RecursionError, StoreError, *DAMAGE) as error:
        raise FormatError(file, f"it is damaged: {str(error)[:300]}") from None


def _decode(body: dict[str, Any]) -> Manifest:
    files = _decode_files(body["files"])
    props = tuple(TensorProperties(**p) for p in body["properties"])
    places = tuple(_column(p, len(files), "a file number") for p in body["places"])
    layouts = tuple(map(_decode_layout, body["layouts"]))
    tensors, values = body["tensors"], body["values"]
    names = (*tensors["names"], *values)
    count = len(tensors["names"])
    limits = {"properties": len(props), "layouts": len(layouts), "places": len(places)}
    columns = [_column(tensors[key], limit, key) for key, limit in limits.items()]
    if any(len(c) != count for c in columns) or len(set(names)) != len(names):
        raise ValueError("its tensors' columns differ in length, or a name is there twice")
    if len(set(columns[1].tolist())) != len(layouts):  # np.unique would import numpy.ma
        raise ValueError("no tensor has some of its layouts")
    if not all(type(name) is str for name in names):
        raise ValueError("a name is not text")
    stored = {name: _decode_value(value, len(places)) for name, value in values.items()}
    planner_data = from_json(body["planner_data"])
    _check_paths(planner_data, names)
    none = np.full(len(stored), -1, np.int64)
    prop, layout = (readonly(np.concatenate([c, none])) for c in columns[:2])
    place = np.concatenate([columns[2], column([at for _, _, at in stored.values()])])
    created, sums = body["created"], _text(body["sums"])
    if type(created) not in (int, float) or not 0 <= created < _LAST_SECOND:
        raise ValueError("its time of creation is not a number of seconds since 1970")
    if len(sums) % 16:
        raise ValueError(f"its sums have {len(sums):,} digits, and a checksum has sixteen")
    manifest = Manifest(
        _text(body["save_id"]),
        Metadata(
            Entries(names, props, prop, layouts, layout),
            planner_data=planner_data,
            storage_meta=StorageMeta(save_id=_text(body["save_id"])),
            version=str(body["version"]),
        ),
        files,
        places,
        readonly(place),
        sums_from_hex(sums),
        {name: (kind, data) for name, (kind, data, _) in stored.items()},
        float(created),
        int(_column([body["block_bytes"]], MAX_BYTES, "a block's size")[0]),
    )
    if manifest.block_bytes < 1:
        raise ValueError(f"its block_bytes are {manifest.block_bytes}, and a block has some")
    if len(manifest.sums) != manifest.start[-1]:
        raise ValueError(f"{manifest.start[-1]} chunks have {len(manifest.sums)} checksums")
    expected = files.headers + manifest.file_bytes
    for number in np.flatnonzero(expected != files.sizes)[:1].tolist():
        raise ValueError(
            f"{files.names[number]} should have {files.sizes[number]} bytes, and its header and "
            f"chunks take {expected[number]}"
        )
    return manifest


def _decode_files(table: dict[str, Any]) -> FileTable:
    names = tuple(table["names"])
    for name in names:
        if type(name) is not str or not _FILE.fullmatch(check_path(name)):
            raise ValueError(f"{str(name)[:200]!r} does not name a file inside the checkpoint")
    sizes = _column(table["sizes"], MAX_BYTES, "a file's size")
    headers = _column(table["headers"], MAX_BYTES, "a header's length")
    digests = tuple(int(_text(d), 16) for d in table["xxh3_64"])
    if not len(set(names)) == len(names) == len(sizes) == len(headers) == len(digests):
        raise ValueError("its files' columns differ in length, or a file is there twice")
    return FileTable(names, sizes, headers, digests)


def _encode_layout(layout: Layout) -> dict[str, Any]:
    tiling = layout.tiling
    size = list(layout.size)
    if isinstance(tiling, Grid):
        return {"size": size, "cuts": [c.tolist() for c in tiling.cuts]}
    return {"size": size, "offsets": tiling.offsets.tolist(), "sizes": tiling.sizes.tolist()}


def _decode_layout(data: dict[str, Any]) -> Layout:
    """Read a layout. A few bytes of cuts can stand for any number of chunks: none are made here."""
    size = _column(data["size"], MAX_BYTES, "a size")
    fault = shape_fault(size.tolist())
    if fault is not None:
        raise ValueError(f"a tensor {fault}")
    tiling: Tiling
    if "cuts" in data:
        cuts = tuple(_column(c, MAX_BYTES, "a cut") for c in data["cuts"])
        if len(cuts) != len(size) or any(
            len(c) < 2 or c[-1] > end or (c[1:] <= c[:-1]).any()
            for c, end in zip(cuts, size, strict=True)
        ):
            raise ValueError(f"the cuts of shape {size.tolist()} do not ascend inside it")
        tiling = Grid(cuts)
    else:
        offsets, sizes = (_boxes(data[key], len(size)) for key in ("offsets", "sizes"))
        if offsets.shape != sizes.shape or (offsets + sizes > size).any():
            raise ValueError(f"chunks of shape {size.tolist()} lie outside of it")
        tiling = Boxes(offsets, sizes)
    return Layout(tuple(size.tolist()), tiling)


def _boxes(rows: Any, axes: int) -> Ints:
    array = np.array(rows, np.int64) if rows else np.zeros((0, axes), np.int64)
    if array.shape != (len(rows), axes) or not within(array, MAX_BYTES):
        raise ValueError("a chunk's offsets or sizes are impossible")
    return readonly(array)


def _decode_value(value: Any, places: int) -> tuple[str, Any, int]:
    kind, data, place = value
    if kind not in ("inline", "json", "torch", *RAW) or type(place) is not int:
        raise ValueError(f"unknown kind of value {str(kind)[:20]!r}")
    if not (-1 if kind == "inline" else 0) <= place < (0 if kind == "inline" else places):
        raise ValueError("a value lies in no file")
    if kind != "inline" and (type(data) is not int or not 0 <= data < MAX_BYTES):
        raise ValueError("a value's size is impossible")
    return kind, data, place


def _check_paths(planner_data: Any, names: Sequence[str]) -> None:
    """Refuse paths that no nested state dict has, and lists that are nearly empty.

    A few bytes of a position would make a list of any length.
    """
    paths = planner_data.get("paths", {}) if isinstance(planner_data, Mapping) else {}
    if not isinstance(paths, Mapping):
        raise ValueError("its planner_data has paths that are no object")
    lengths: dict[Any, int] = {}
    steps = 0
    for name, path in paths.items():
        for depth, step in enumerate(path):
            kind, key = step if len(step) == 2 else ("", 0)
            if kind not in _KINDS:
                raise ValueError(f"the path of `{name}` has a step that is none: {str(step)[:80]}")
            steps += 1
            if kind != "dict":
                node = path[:depth]
                lengths[node] = max(lengths.get(node, 0), int(key) + 1)
    if sum(lengths.values()) > steps + _EMPTY_SEATS:
        raise ValueError(f"its lists would have {sum(lengths.values()):,} entries")
    if paths:
        unflatten(dict.fromkeys(names), paths)


def _column(values: Sequence[int], end: int, what: str) -> Ints:
    """Return whole numbers as an array, all of them at least 0 and less than ``end``."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise ValueError(f"{what} is not a whole number")
    array = column(values)
    if not within(array, end):
        raise ValueError(f"{what} is impossible: {array.min()} to {array.max()}, of {end}")
    return array


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected text, not {str(value)[:80]!r}")
    return value
