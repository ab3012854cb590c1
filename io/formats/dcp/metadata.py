"""The `.metadata` file of torch.distributed.checkpoint, a pickle of torch's own records.

Each becomes a `TorchRecord`, a stand-in with the same name and fields. A pickle that names anything
else than `_CLASSES` is refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import (
    ITEMSIZE,
    BytesMetadata,
    CodecError,
    Entries,
    Layout,
    Metadata,
    Path,
    StorageMeta,
    TensorMetadata,
    TensorProperties,
    empty_names,
    from_json,
    listed,
    nesting_issues,
    to_json,
)
from shardplan.planning.columns import DAMAGE, column
from shardplan.planning.geometry import shape_fault, tile, tile_chunks

from ...errors import FormatError, ValueRefusedError
from ...stores.base import StoreError, check_path
from ..base import MAX_BYTES
from ..torch_save.names import PATHS, PLAIN
from ..torch_save.standins import whole_numbers
from ..torch_save.unpickler import (
    Call,
    PickleError,
    RefusedName,
    StatefulStandIn,
    calls,
    load_pickle,
    require,
)

METADATA: Final = ".metadata"
"""The file that makes a folder a checkpoint of torch.distributed.checkpoint."""
FIRST_RANK: Final = "__0.metadata"
"""The file that makes a folder a checkpoint whose ranks saved independently; see `merge_ranks`."""
_FLATTENED: Final = "nd_reformulated_orig_global_shape"
_RANK_FILE: Final = re.compile(r"__(\d{1,9})\.metadata")
OWN_PATHS: Final = "_shardplan_paths"
"""An attribute of the pickled metadata: nested keys that torch's own paths do not describe."""
OWN_EMPTY: Final = "_shardplan_empty"
"""Another one: the path of each empty dict. It has no entry, because torch's loader takes such an
entry as a sign of torch 2.3. None for a dict that holds something on other ranks."""

Item = tuple[str, tuple[int, ...] | None]
"""A name and the offset of a chunk; None for a non-tensor value."""


@attrs.frozen
class ItemBytes:
    """The bytes of one item in a file, and the extensions that they went through."""

    file: int
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Described:
    """A checkpoint as its `.metadata` describes it; `copies` if several ranks saved an item."""

    metadata: Metadata
    files: tuple[str, ...]
    places: Mapping[Item, ItemBytes]
    copies: Mapping[Item, tuple[ItemBytes, ...]] = {}
    notes: tuple[str, ...] = ()


class TorchRecord(StatefulStandIn):
    """One of torch's records: the name of its class; its fields are its state."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


def _fields(value: Any, kind: str) -> Mapping[str, Any]:
    """Return the fields of a record that must be of a kind."""
    if type(value) is not TorchRecord or value.kind != kind or type(value.state) is not dict:
        shown = value.kind if type(value) is TorchRecord else type(value).__name__
        raise PickleError(f"it holds a {shown} in place of a {kind}")
    return value.state


def _records(module: str, kinds: str) -> dict[str, Any]:
    return {f"{module}.{kind}": partial(TorchRecord, kind) for kind in kinds.split()}


def _member(owner: Any, name: Any) -> None:
    """Read an enum as some versions of Python pickle it: as an attribute of its class."""
    if type(owner) is not Call or owner.name not in _ENUMS:
        raise RefusedName("builtins.getattr")


_HOME: Final = "torch.distributed.checkpoint"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch"
_ENUMS: Final = (
    f"{_HOME}.metadata._MEM_FORMAT_ENCODING",
    f"{_SHARDED}.MEM_FORMAT_ENCODING",
    f"{_HOME}.planner.WriteItemType",
)
_CLASSES: Final[Mapping[str, Call]] = {
    **PATHS,
    **calls(
        {
            **_records(
                f"{_HOME}.metadata",
                "Metadata StorageMeta MetadataIndex TensorStorageMetadata BytesStorageMetadata "
                "ChunkStorageMetadata TensorProperties",
            ),
            **_records(_SHARDED, "TensorProperties"),
            **_records(f"{_HOME}.filesystem", "_StorageInfo _StoragePrefix"),
            # What Megatron-core keeps of the plans that it saved by; nothing here looks at it.
            **_records(f"{_HOME}.planner", "SavePlan WriteItem TensorWriteData BytesIOWriteData"),
            f"{_MEGATRON}.MCoreSavePlan": partial(TorchRecord, "SavePlan"),
            f"{_MEGATRON}.MCoreMetadata": partial(TorchRecord, "Metadata"),
            **dict.fromkeys(_ENUMS, lambda *_: None),
            "torch.serialization._get_layout": lambda name: _text(name),
            "builtins.getattr": _member,
        }
    ),
    "torch.Size": Call("torch.Size", lambda sizes=(): sizes, free=True),  # see `whole_numbers`
}


class _Names(dict[str, Any]):
    """The classes above, and every dtype by its name, known here or not."""

    def get(self, key: str, default: Any = None) -> Any:
        found = _CLASSES.get(key) or PLAIN.get(key)
        module, _, name = key.rpartition(".")
        is_dtype = module == "torch" and name.islower() and any(c.isdigit() for c in name)
        return name if found is None and (is_dtype or key == "torch.bool") else found


def parse_metadata(data: bytes, file: str = METADATA) -> Described:
    """Read a `.metadata` file, or that of one rank."""
    try:
        return _describe(_fields(load_pickle(data, _Names()), "Metadata"))
    except RefusedName as error:
        raise FormatError(
            file,
            f"{error}: it was not written by torch.distributed.checkpoint's own planner and "
            "storage, or it is malicious; nothing of it was run",
        ) from None
    except PickleError as error:
        raise FormatError(file, str(error)) from None
    except (*DAMAGE, OverflowError) as error:
        raise FormatError(file, f"it is damaged: {error}") from error


def _describe(fields: Mapping[str, Any]) -> Described:
    known = fields["state_dict_metadata"]
    empty = _dict(fields.get(OWN_EMPTY))
    bare = {_text(name): path for name, path in empty.items() if path and name not in known}
    entries = _entries(
        {**{_text(name): entry for name, entry in known.items()}, **dict.fromkeys(bare)}
    )
    files: dict[str, int] = {}
    places: dict[Item, ItemBytes] = {}
    for index, info in (fields.get("storage_data") or {}).items():
        item = _fields(index, "MetadataIndex")
        name, offset = _text(item["fqn"]), item.get("offset")
        place = _place(name, files, _fields(info, "_StorageInfo"))
        places[name, None if offset is None else whole_numbers(offset)] = place
    own = {**_dict(fields.get(OWN_PATHS)), **bare}
    paths = _paths(entries.names, _dict(fields.get("planner_data")), own)
    data = {"paths": paths, "empty": tuple(sorted(map(_text, empty)))}
    meta = fields.get("storage_meta")
    metadata = Metadata(
        entries,
        planner_data={key: part for key, part in data.items() if part} or None,
        storage_meta=None if meta is None else _storage_meta(_fields(meta, "StorageMeta")),
        version=_text(fields["version"]) if fields.get("version") else None,
    )
    return Described(metadata, tuple(files), places, notes=_notes(fields))


def _notes(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the tensors whose stored shape is not that of the model, as older Megatron-core did."""
    known = _dict(fields.get("mcore_data")).items()
    flattened = sorted(_text(name) for name, data in known if _FLATTENED in _dict(data))
    if not flattened:
        return ()
    more = "are read in the shape that Megatron-core flattened them to, as its metadata says"
    return (f"{listed(flattened)} {more}",)


def _entries(described: Mapping[str, Any]) -> Entries:
    """Return the entries, given torch's record of each; None for a value without a record."""
    props: dict[Any, tuple[int, TensorProperties]] = {}
    layouts: dict[Any, tuple[int, Layout]] = {}
    rows = []
    for name, entry in described.items():
        if entry is None or (type(entry) is TorchRecord and entry.kind == "BytesStorageMetadata"):
            rows.append((-1, -1))
            continue
        try:
            fields = _fields(entry, "TensorStorageMetadata")
            state = (
                fields["properties"].state if type(fields["properties"]) is TorchRecord else None
            )
            if type(state) is not tuple or not _PLAIN.issuperset(map(type, state)):
                raise ValueError("its properties are of an unknown kind")
            if state not in props:
                props[state] = len(props), _properties(*state)
            size = whole_numbers(fields["size"])
            boxes = tuple(
                [_box(_fields(chunk, "ChunkStorageMetadata")) for chunk in fields["chunks"]]
            )
            if (size, boxes) not in layouts:
                layouts[size, boxes] = len(layouts), _layout(size, boxes)
            rows.append((props[state][0], layouts[size, boxes][0]))
        except (ValueError, TypeError) as error:
            raise PickleError(f"`{name}`: {error}") from None
    columns = column(rows, len(rows), 2)
    return Entries(
        tuple(described),
        tuple(made for _, made in props.values()),
        columns[:, 0],
        tuple(made for _, made in layouts.values()),
        columns[:, 1],
    )


def _properties(dtype: Any, layout: Any, grad: Any, _: Any, pinned: Any) -> TensorProperties:
    require(dtype in ITEMSIZE, f"it is of the unknown dtype {dtype}")
    kind = str(layout).removeprefix("torch.")
    require(kind == "strided", f"it is a {kind} tensor; only dense ones can be read")
    return TensorProperties(dtype, requires_grad=grad is True, pin_memory=pinned is True)


_PLAIN: Final = frozenset((str, bool, int, type(None)))
_PLAIN_KEYS: Final = (str, int, float, bool, bytes, type(None))


def _box(chunk: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes; Megatron-core may leave out the first sizes that are one."""
    offsets, sizes = whole_numbers(chunk["offsets"]), whole_numbers(chunk["sizes"])
    return offsets, (1,) * (len(offsets) - len(sizes)) + sizes


def _text(name: Any) -> str:
    require(type(name) is str, f"it holds a {type(name).__name__} in place of text")
    return name  # type: ignore[no-any-return]


def _dict(value: Any) -> dict[Any, Any]:
    return value if type(value) is dict else {}


def _layout(size: tuple[int, ...], chunks: Sequence[tuple[Any, Any]]) -> Layout:
    fault = shape_fault(size)
    if fault is not None:
        raise ValueError(f"it {fault}")
    axes, count = len(size), len(chunks)
    boxes = np.array(chunks)
    if boxes.size and (boxes.dtype.kind != "i" or boxes.shape != (count, 2, axes)):
        raise ValueError("its chunks have other axes than it has")
    boxes = boxes.astype(np.int64).reshape(count, 2, axes)
    if (boxes.sum(axis=1) > np.array(size, np.int64)).any():
        raise ValueError(f"a chunk reaches out of its shape {list(size)}")
    if 0 in size:
        boxes = np.array([[[0] * axes, list(size)]], np.int64)
    else:
        boxes = boxes[boxes[:, 1].all(axis=1)]  # an empty shard may share a real one's offset
    return Layout(size, tile(boxes[:, 0], boxes[:, 1]))


def _place(name: str, files: dict[str, int], stored: Mapping[str, Any]) -> ItemBytes:
    """Return where an item lies; new files, which must be in the checkpoint, are numbered."""
    file = _text(stored["relative_path"])
    if file not in files:
        try:
            files[check_path(file)] = len(files)
        except StoreError as error:
            raise PickleError(f"`{name}` lies in {file!r}: {error.reason}") from None
    offset, length = stored["offset"], stored["length"]
    numbers = type(offset) is type(length) is int
    valid = numbers and min(offset, length) >= 0 and max(offset, length) < MAX_BYTES
    require(valid, f"the position of `{name}` is not given by whole numbers below 2^60")
    transforms = stored.get("transform_descriptors") or ()
    return ItemBytes(files[file], offset, length, tuple(map(_text, transforms)))


def _storage_meta(fields: Mapping[str, Any]) -> StorageMeta:
    checkpoint, save = fields.get("checkpoint_id"), fields.get("save_id")
    for text in (checkpoint, save):
        require(text is None or type(text) is str, "its storage_meta is not made of text")
    return StorageMeta(checkpoint, save)


def _paths(
    names: Sequence[str], theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the path of each nested value; see `shardplan.planning.tree`."""
    paths = {}
    for name in names:
        if name in ours:
            path = unpack_path(name, ours[name])
        elif theirs.get(name) is not None:
            path = _torch_path(name, theirs[name])
        else:
            continue
        if path != (("dict", name),):
            paths[name] = path
    return paths


def _torch_path(name: str, path: Any) -> Path:
    """Read a path of torch: keys of dicts are text, positions in lists are whole numbers."""
    if type(path) is not tuple or not path or not all(type(key) in (str, int) for key in path):
        raise PickleError(f"the path of `{name}` has keys that are not plain")
    return tuple(("dict" if type(key) is str else "list", key) for key in path)


def pack_path(name: str, path: Path) -> Any:
    """Return a path as `OWN_PATHS` stores it: as text, if its keys are not plain."""
    odd = [key for _, key in path if type(key) not in _PLAIN_KEYS]
    if not odd:
        return tuple(path)
    try:
        return json.dumps(to_json(path))
    except CodecError:
        keys = " and ".join(f"{key!r}, a {type(key).__name__}" for key in odd)
        reason = f"lies under the key {keys}, which cannot be kept"
        raise ValueRefusedError(
            {name: f"{reason}; use text, numbers, bytes, None, or tuples and sets of these"}
        ) from None


def unpack_path(name: str, packed: Any) -> Path:
    """Return the path that `pack_path` was given."""
    is_text = type(packed) is str
    path = from_json(json.loads(packed)) if is_text else packed
    if type(path) is not tuple or not all(
        type(step) is tuple
        and len(step) == 2
        and step[0] in ("dict", "list", "tuple")
        and (is_text or type(step[1]) in _PLAIN_KEYS)
        for step in path
    ):
        raise PickleError(f"the path of `{name}` has keys that are not plain")
    return path


Entry = TensorMetadata | BytesMetadata


def rank_metadata(names: Iterable[str]) -> tuple[str, ...]:
    """Pick the metadata files of ranks from a folder's files, in order of rank."""
    found = [match for match in map(_RANK_FILE.fullmatch, names) if match]
    return tuple(match[0] for match in sorted(found, key=lambda match: int(match[1])))


def merge_ranks(parts: Mapping[str, Described]) -> Described:
    """Describe what all ranks saved together, given the contents of each file, in order of rank.

    ``torch.distributed.checkpoint.save(use_collectives=False)`` writes ``__0.metadata``,
    ``__1.metadata``, … and no `.metadata`. Items that several ranks saved become copies, which
    `DcpSource` compares before it uses one.
    """
    for rank, file in enumerate(parts):
        if file != f"__{rank}.metadata":
            raise FormatError(
                f"__{rank}.metadata",
                f"it is missing, and {file} is there: rank {rank} never finished its part of this "
                "save, in which ranks saved independently",
            )
    saved: dict[str, dict[str, Entry]] = {}  # by name, what each file has of it
    for file, part in parts.items():
        for name, entry in part.metadata.state_dict_metadata.items():
            saved.setdefault(name, {})[file] = entry
    files: dict[str, int] = {}
    places: dict[Any, list[ItemBytes]] = {}
    for part in parts.values():
        numbers = [files.setdefault(name, len(files)) for name in part.files]
        for key, place in part.places.items():
            places.setdefault(key, []).append(attrs.evolve(place, file=numbers[place.file]))
    first = next(iter(parts.values()))
    metadata = Metadata(
        {name: _joined(name, entries) for name, entries in saved.items()},
        planner_data=_nesting(parts),
        storage_meta=first.metadata.storage_meta,
        version=first.metadata.version,
    )
    return Described(
        metadata,
        tuple(files),
        {key: found[0] for key, found in places.items()},
        {key: tuple(found[1:]) for key, found in places.items() if len(found) > 1},
    )


def _joined(name: str, entries: Mapping[str, Entry]) -> Entry:
    """Return the entry of one name for all ranks, given that in the file of each."""
    (first, one), *others = entries.items()
    for file, other in others:
        if _described(one) != _described(other):
            raise FormatError(
                file,
                f"`{name}` is {_described(other)} there, and {_described(one)} in {first}; ranks "
                "saved different things under one name. Open one rank's part",
            )
    if not others or isinstance(one, BytesMetadata):
        return one
    tensors = (entry for entry in entries.values() if isinstance(entry, TensorMetadata))
    chunks = dict.fromkeys(itertools.chain.from_iterable(entry.chunks for entry in tensors))
    return attrs.evolve(one, chunks=tile_chunks(chunks))


def _described(entry: Entry) -> str:
    if isinstance(entry, BytesMetadata):
        return "a single value"
    return f"{entry.properties.dtype} of shape {list(entry.size)}"


def _nesting(parts: Mapping[str, Described]) -> dict[str, Any] | None:
    """Merge the paths of nested keys of all ranks."""
    paths: dict[str, Any] = {}
    holders: dict[str, int] = {}
    empty: set[str] = set()
    for rank, (file, part) in enumerate(parts.items()):
        data = part.metadata.planner_data or {}
        empty |= empty_names(data)
        for name in part.metadata.state_dict_metadata:
            path = data.get("paths", {}).get(name, (("dict", name),))
            holders.setdefault(name, rank)
            if paths.setdefault(name, path) != path:
                raise FormatError(file, f"`{name}` is nested in another way than on other ranks")
    for issue in nesting_issues(paths, holders):
        raise FormatError(f"__{issue.ranks[-1]}.metadata", str(issue))
    nested = {name: path for name, path in paths.items() if path != (("dict", name),)}
    data = {"paths": nested, "empty": tuple(sorted(empty))}
    return {key: found for key, found in data.items() if found} or None
