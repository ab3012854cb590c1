"""The manifest as text: JSON that begins with a checksum of what follows.

Its size grows with distinct layouts and names. Equal tilings, properties and columns of file
numbers are written once, and numbers that follow a rule as the rule (`shardplan.planning.columns`,
`runs`). What is per chunk is not here: where it begins and its checksum are in its file's header.

    {"format":"shardplan","version":3,"xxh3_64":"<of all that follows>",
     "save_id": …, "created": …, "block_bytes": …,
     "files": {"ranks": …, "numbers": …, "counts": …,         which make the files' names
               "headers": <bytes of each>, "xxh3_64": "<of each header>",
               "tables": <files with a table of checksums>, "table_bytes": …},
     "properties": […], "layouts": [{"size": …, "cuts": …}, …], "places": [<file numbers>, …],
     "tensors": {"names": […], "properties": …, "layouts": …, "places": …},
     "values": {<name>: [<kind>, <data or bytes>, <place>]},
     "planner_data": …, "nesting": <at how many dots each name is split into keys>}

Versions 1 and 2 list all numbers, and the checksums of all chunks. Decoding trusts nothing: every
number is checked before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import (
    CodecError,
    Entries,
    Metadata,
    StorageMeta,
    TensorProperties,
)
from shardplan.planning.columns import (
    DAMAGE,
    Ints,
    column,
    decode_columns,
    encode_runs,
    readonly,
    within,
)
from shardplan.planning.storage import file_name, numbers_of, table_name

from ...checksums import Sums, sums_from_hex, xxhash
from ...errors import FormatError
from ...stores.base import StoreError, check_path
from ...values import RAW
from ..base import MAX_BYTES, check_size
from .layouts import MOST_NUMBERS, decode_layouts, decode_numbers, encode_layout
from .nesting import decode_nesting, encode_nesting
from .record import MANIFEST, FileTable, Manifest, file_bytes

VERSION: Final = 4
"""The newest version that is read; it is written where files are shared, and else version 3."""
PLAIN: Final = 3
MISFIT: Final = "its checksum does not fit its text: it was damaged or edited"
_FORMAT: Final = "shardplan"
_MOST_BYTES: Final = float(1 << 62)  # of all files
_LAST_SECOND: Final = 1 << 36  # in the year 4147
_HEAD: Final = re.compile(
    rb'\{"format":"shardplan","version":(\d{1,9}),"xxh3_64":"([0-9a-f]{16})",'
)
_FILE: Final = re.compile(r"[^/]+\.safetensors")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's text, once it is known that it can be read.

    Raises:
        FormatError: No program could open the checkpoint.
    """
    version = VERSION if manifest.files.shared else PLAIN
    data = sign(_dump(_body(manifest))[1:], version)
    check_size(MANIFEST, len(data), "manifest")
    try:
        if not np.array_equal(decode_manifest(data).files.sizes, manifest.files.sizes):
            raise FormatError(MANIFEST, "the sizes of its files do not fit its chunks")
    except FormatError as error:
        reason = error.reason.removeprefix("it is damaged: ")
        raise FormatError(MANIFEST, f"it could not be opened: {reason}") from None
    return data


def _body(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as JSON data, all but what `sign` adds."""
    entries = manifest.entries
    rows = np.flatnonzero(entries.layout >= 0)
    tensors = [entries.names[row] for row in rows.tolist()]
    values = [entries.names[row] for row in np.flatnonzero(entries.layout < 0).tolist()]
    planner_data, dots = encode_nesting(manifest.metadata.planner_data, [*tensors, *values])
    return {
        "save_id": manifest.save_id,
        "created": manifest.created,
        "block_bytes": manifest.block_bytes,
        "files": _encode_files(manifest.files, manifest.save_id),
        "properties": [attrs.asdict(p) for p in entries.props],
        "layouts": [encode_layout(layout) for layout in entries.layouts],
        "places": [encode_runs(place) for place in manifest.places],
        "tensors": {
            "names": tensors,
            "properties": encode_runs(entries.prop[rows]),
            "layouts": encode_runs(entries.layout[rows]),
            "places": encode_runs(manifest.place[rows]),
        },
        "values": {
            name: [*manifest.values[name], int(manifest.place[entries.row_of[name]])]
            for name in values
        },
        "planner_data": planner_data,
        "nesting": encode_runs(dots),
    }


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii")


def sign(body: bytes, version: int = PLAIN) -> bytes:
    """Put format, version and checksum before the rest of a manifest's text."""
    digest = xxhash.xxh3_64_hexdigest(body)
    head = f'{{"format":"{_FORMAT}","version":{version},"xxh3_64":"{digest}",'
    return head.encode("ascii") + body


def read_head(data: bytes, file: str) -> re.Match[bytes]:
    """Return the version and the checksum that a manifest begins with."""
    head = _HEAD.match(data)
    if head is None:
        raise FormatError(file, "it is not a manifest: it does not begin as one")
    if not 1 <= int(head[1]) <= VERSION:
        reason = f"it has version {int(head[1])}, and this program reads 1 to {VERSION}"
        raise FormatError(file, f"{reason}; upgrade shardplan")
    return head


def decode_manifest(data: bytes, file: str = MANIFEST) -> Manifest:
    """Read a manifest's text; see `encode_manifest`. Nothing is parsed unless its checksum fits."""
    head = read_head(data, file)
    if xxhash.xxh3_64_hexdigest(memoryview(data)[head.end() :]) != head[2].decode():
        raise FormatError(file, MISFIT)
    try:
        return _decode(json.loads(data))
    except (ArithmeticError, CodecError, MemoryError, RecursionError, StoreError, *DAMAGE) as error:
        raise FormatError(file, f"it is damaged: {str(error)[:300]}") from None


def _decode(body: dict[str, Any]) -> Manifest:
    version, tensors = body["version"], body["tensors"]
    stored = {name: _decode_value(value) for name, value in body["values"].items()}
    names = (*tensors["names"], *stored)
    if len(set(names)) != len(names) or not all(type(name) is str for name in names):
        raise ValueError("a name is there twice, or is not text")
    digests = body["files"]["xxh3_64"]
    files = len(digests) // (16 if type(digests) is str else 1)
    # A name occurs once in a file: so a tensor has no more chunks than there are files.
    places = tuple(decode_columns(body["places"], files, MOST_NUMBERS))
    entries = _decode_entries(body, names, files, version)
    if not all(within(place, files) for place in places):
        raise ValueError(f"a file number is impossible: there are {files} files")
    place = np.concatenate(
        [
            decode_numbers(tensors["places"], len(places), "a place", len(tensors["names"])),
            column([at for _, _, at in stored.values()]),
        ]
    )
    values = {name: (kind, data) for name, (kind, data, _) in stored.items()}
    if not all(
        (at == -1) if kind == "inline" else (0 <= at < len(places))
        for kind, _, at in stored.values()
    ):
        raise ValueError("a value lies in no file")
    in_files = file_bytes(
        entries,
        places,
        place,
        values,
        files,
        max_bytes=_MOST_BYTES,
        max_work=8 * MOST_NUMBERS if version > 2 else None,
    )
    dots = decode_numbers(body["nesting"], MAX_BYTES, "a dot") if version > 2 else column([])
    save_id = _text(body["save_id"])
    manifest = Manifest(
        save_id,
        Metadata(
            entries,
            planner_data=decode_nesting(body["planner_data"], dots, names),
            storage_meta=StorageMeta(save_id=save_id),
            version=str(version),
        ),
        _decode_files(body["files"], in_files, save_id, version),
        places,
        readonly(place),
        values,
        _decode_time(body["created"]),
        _decode_block_bytes(body["block_bytes"]),
    )
    return manifest if version > 2 else attrs.evolve(manifest, sums=_old_sums(body, manifest))


def _decode_entries(
    body: dict[str, Any], names: tuple[str, ...], files: int, version: int
) -> Entries:
    tensors = body["tensors"]
    count = len(tensors["names"])
    props = tuple(TensorProperties(**p) for p in body["properties"])
    layouts = decode_layouts(body["layouts"], files, version)
    prop = decode_numbers(tensors["properties"], len(props), "a property", count)
    layout = decode_numbers(tensors["layouts"], len(layouts), "a layout", count)
    if len(set(layout.tolist())) != len(layouts):  # np.unique would import numpy.ma
        raise ValueError("no tensor has some of its layouts")
    none = np.full(len(names) - count, -1, np.int64)
    prop, layout = (readonly(np.concatenate([c, none])) for c in (prop, layout))
    return Entries(names, props, prop, layouts, layout)


def _encode_files(files: FileTable, save_id: str) -> dict[str, Any]:
    """Describe files; what the names of `file_name` say is written by rule."""
    data = len(files) - len(files.tables)
    of, tables = column([*files.tables]), column([*files.tables.values()])
    if (tables != np.arange(data, len(files))).any():
        raise FormatError(MANIFEST, "the tables of checksums do not follow the files in order")
    said = [numbers_of(name) for name in files.names[:data]]
    named: dict[str, Any] = {"names": list(files.names[:data])}
    known = [numbers for numbers in said if numbers is not None]
    if [file_name(*numbers, save_id) for numbers in known] == named["names"]:
        numbers = column(known, len(known), 3)
        keys = ("ranks", "numbers", "counts")
        named = {key: encode_runs(numbers[:, at]) for at, key in enumerate(keys)}
    return {
        **named,
        "headers": encode_runs(files.headers[:data]),
        "tables": encode_runs(of),
        "table_bytes": encode_runs(files.headers[tables]),
        "xxh3_64": "".join(f"{digest:016x}" for digest in files.digests),
        **_encode_shared(files),
    }


def _encode_shared(files: FileTable) -> dict[str, Any]:
    if not files.shared:
        return {}
    columns = {"shared": column([*files.shared]), "unused": column([*files.shared.values()])}
    return {key: encode_runs(numbers) for key, numbers in columns.items()}


def _decode_files(table: dict[str, Any], nbytes: Ints, save_id: str, version: int) -> FileTable:
    """Return the files, given how many bytes the chunks in each take."""
    if version < 3:
        return _old_files(table, nbytes)
    count = len(nbytes)
    digests = _text(table["xxh3_64"])
    if len(digests) != 16 * count:
        raise ValueError(f"its files have {len(digests):,} digits of checksums")
    of = decode_numbers(table["tables"], count, "a table's file")
    data = count - len(of)
    if "names" in table:
        names = _file_names(table["names"])
    else:
        columns = [decode_numbers(table[key], MAX_BYTES, key, data).tolist() for key in _NAMED]
        save = check_path(save_id)
        names = tuple(file_name(r, n, c, save) for r, n, c in zip(*columns, strict=True))
    headers = decode_numbers(table["headers"], MAX_BYTES, "a header's length", data)
    sizes = decode_numbers(table["table_bytes"], MAX_BYTES, "a table's size", len(of))
    if len(names) != data or len(set(of.tolist())) != len(of) or not within(of, data):
        raise ValueError("its files' columns differ in length, or a table is there twice")
    names += tuple(table_name(names[row]) for row in of.tolist())
    headers = np.concatenate([headers, sizes])
    if len(set(names)) != count or nbytes[data:].any():
        raise ValueError("a file is there twice, or chunks lie in a table of checksums")
    found = tuple(int(digests[at : at + 16], 16) for at in range(0, len(digests), 16))
    shared = _decode_shared(table, data) if version > PLAIN else {}
    sizes = headers + nbytes
    sizes[column([*shared])] += column([*shared.values()])
    return FileTable(names, readonly(sizes), readonly(headers), found, shared)


def _decode_shared(table: dict[str, Any], data: int) -> dict[int, int]:
    """Return the files that are shared, and how many bytes of each are not used."""
    rows = decode_numbers(table["shared"], data, "a shared file")
    unused = decode_numbers(table["unused"], MAX_BYTES, "an unused part", len(rows))
    shared = dict(zip(rows.tolist(), unused.tolist(), strict=True))
    if len(shared) != len(rows):
        raise ValueError("a file is shared twice")
    return shared


_NAMED: Final = ("ranks", "numbers", "counts")  # what makes a file's name


def _file_names(names: Sequence[Any]) -> tuple[str, ...]:
    for name in names:
        if type(name) is not str or not _FILE.fullmatch(check_path(name)):
            raise ValueError(f"{str(name)[:200]!r} does not name a file inside the checkpoint")
    return tuple(names)


def _decode_value(value: Any) -> tuple[str, Any, int]:
    kind, data, place = value
    if kind not in ("inline", "json", "torch", *RAW) or type(place) is not int:
        raise ValueError(f"unknown kind of value {str(kind)[:20]!r}")
    if kind != "inline" and (type(data) is not int or not 0 <= data < MAX_BYTES):
        raise ValueError("a value's size is impossible")
    return kind, data, place


def _decode_time(created: Any) -> float:
    if type(created) not in (int, float) or not 0 <= created < _LAST_SECOND:
        raise ValueError("its time of creation is not a number of seconds since 1970")
    return float(created)


def _decode_block_bytes(block_bytes: Any) -> int:
    (found,) = decode_numbers([block_bytes], MAX_BYTES, "a block's size").tolist()
    if found < 1:
        raise ValueError(f"its block_bytes are {found}, and a block has some")
    return int(found)


def _old_files(table: dict[str, Any], nbytes: Ints) -> FileTable:
    """Read the files of versions 1 and 2, which list their sizes."""
    names = _file_names(table["names"])
    keys, count = ("sizes", "headers"), len(names)
    sizes, headers = (decode_numbers(table[key], MAX_BYTES, key, count) for key in keys)
    digests = tuple(int(_text(d), 16) for d in table["xxh3_64"])
    if not len(set(names)) == len(names) == len(digests):
        raise ValueError("its files' columns differ in length, or a file is there twice")
    for number in np.flatnonzero(headers + nbytes != sizes)[:1].tolist():
        raise ValueError(
            f"{names[number]} should have {sizes[number]} bytes, and its header and "
            f"chunks take {headers[number] + nbytes[number]}"
        )
    return FileTable(names, sizes, headers, digests)


def _old_sums(body: dict[str, Any], manifest: Manifest) -> Sums:
    """Read the checksums of all chunks, which versions 1 and 2 have in the manifest."""
    text = _text(body["sums"])
    if len(text) % 16:
        raise ValueError(f"its sums have {len(text):,} digits, and a checksum has sixteen")
    sums = sums_from_hex(text)
    if len(sums) != manifest.start[-1]:
        raise ValueError(f"{manifest.start[-1]} chunks have {len(sums)} checksums")
    return sums


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected text, not {str(value)[:80]!r}")
    return value
