"""What does a `.metadata` file of torch.distributed.checkpoint say? Read without torch.

The file is a pickle of torch's own records. Here they are stand-ins of the same names; a pickle
that names anything else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import (
    ITEMSIZE,
    CodecError,
    Entries,
    Layout,
    Metadata,
    Path,
    StorageMeta,
    TensorProperties,
    from_json,
    to_json,
)
from shardplan.planning.columns import DAMAGE, column
from shardplan.planning.geometry import MAX_NUMEL, Tiling, shape_fault, tile

from ...errors import FormatError, ValueRefusedError
from ...limits import MAX_BYTES
from ...stores.base import StoreError, check_path
from ..torch_save.names import PLAIN
from ..torch_save.unpickler import Call, PickleError, RefusedName, Stateful, calls, load_pickle

__all__ = [
    "METADATA",
    "OWN_EMPTY",
    "OWN_PATHS",
    "Described",
    "Place",
    "pack_path",
    "parse_metadata",
    "unpack_path",
]

METADATA: Final = ".metadata"
"""The file that makes a folder a checkpoint of torch.distributed.checkpoint."""

_PLAIN_KEYS: Final = (str, int, float, bool, bytes, type(None))
_PLAIN: Final = {str, bool, int, type(None)}
_WHOLE: Final = frozenset((int,))
OWN_PATHS: Final = "_shardplan_paths"
"""An attribute of the pickled metadata: nested keys that torch's own way of telling cannot tell."""
OWN_EMPTY: Final = "_shardplan_empty"
"""Another one: the way to each empty dict, which has no entry. torch saves none, and its loader
takes an entry for one as a sign of torch 2.3. None for one that holds something on other ranks."""


@attrs.frozen
class Place:
    """Where one item lies.

    Attributes:
        file: The number of its file.
        offset, length: Its bytes there.
        transforms: The extensions that its bytes went through.
    """

    file: int
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Described:
    """A checkpoint as its `.metadata` describes it.

    Attributes:
        metadata: What it holds.
        files: The files that it names.
        places: Where each item lies, by name and offset (None for a value that is no tensor).
        old: Whether torch 2.3 or older wrote it, which kept dicts without tensors whole.
        copies: Where else an item lies, if several ranks saved it; see `dcp_ranks`.
    """

    metadata: Metadata
    files: tuple[str, ...]
    places: Mapping[tuple[str, tuple[int, ...] | None], Place]
    old: bool
    copies: Mapping[tuple[str, tuple[int, ...] | None], tuple[Place, ...]] = {}


class _Record(Stateful):
    """One of torch's records; its state is its fields, by name."""

    __slots__ = ()

    @property
    def fields(self) -> Mapping[str, Any]:
        """Its fields.

        Raises:
            PickleError: It was given none.
        """
        if type(self.state) is not dict:
            raise PickleError(f"a {type(self).__name__.strip('_')} has no fields")
        return self.state


class _Metadata(_Record):
    __slots__ = ()


class _Tensor(_Record):
    __slots__ = ()


class _Bytes(_Record):
    __slots__ = ()


class _Chunk(_Record):
    __slots__ = ()


class _Index(_Record):
    __slots__ = ()


class _Info(_Record):
    __slots__ = ()


class _Meta(_Record):
    __slots__ = ()


class _Properties(_Record):
    __slots__ = ()


def _member(owner: Any, name: Any) -> None:
    """Read an enum as some versions of Python pickle it: as an attribute of its class."""
    if type(owner) is not Call or owner.name not in _ENUMS:
        raise RefusedName("builtins.getattr")


def _path(*parts: Any) -> str:
    return "/".join(map(_text, parts)).replace("//", "/")


_HOME: Final = "torch.distributed.checkpoint"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_ENUMS: Final = (f"{_HOME}.metadata._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING")
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_CLASSES: Final = calls(
    {
        f"{_HOME}.metadata.Metadata": _Metadata,
        f"{_HOME}.metadata.TensorStorageMetadata": _Tensor,
        f"{_HOME}.metadata.BytesStorageMetadata": _Bytes,
        f"{_HOME}.metadata.ChunkStorageMetadata": _Chunk,
        f"{_HOME}.metadata.MetadataIndex": _Index,
        f"{_HOME}.metadata.StorageMeta": _Meta,
        f"{_HOME}.metadata.TensorProperties": _Properties,
        f"{_SHARDED}.TensorProperties": _Properties,
        f"{_HOME}.filesystem._StorageInfo": _Info,
        **dict.fromkeys(_ENUMS, lambda *_: None),
        "torch.serialization._get_layout": lambda name: _text(name),
        "builtins.getattr": _member,
        **{f"{home}.{kind}": _path for home in ("pathlib", "pathlib._local") for kind in _PATHS},
    }
) | {"torch.Size": Call("torch.Size", lambda sizes=(): sizes, free=True)}  # see `_ints`


class _Names(dict[str, Any]):
    """The classes above, and every dtype by its name, known here or not."""

    def get(self, key: str, default: Any = None) -> Any:
        found = _CLASSES.get(key) or PLAIN.get(key)
        module, _, name = key.rpartition(".")
        plain = module == "torch" and name.islower() and any(c.isdigit() for c in name)
        return name if found is None and (plain or key == "torch.bool") else found


def parse_metadata(data: bytes, file: str = METADATA) -> Described:
    """Read a `.metadata` file, or another one of the kind.

    Raises:
        FormatError: It is damaged, or names a class that no checkpoint needs; none was called.
    """
    try:
        found = load_pickle(data, _Names())[0]
        if not isinstance(found, _Metadata):
            raise PickleError(f"it holds a {type(found).__name__}, not a checkpoint's metadata")
        return _describe(found.fields)
    except RefusedName as error:
        raise FormatError(
            file,
            f"{error}: it was not written by torch.distributed.checkpoint's own planner and "
            "storage, or it is malicious; nothing of it was run",
        ) from None
    except PickleError as error:
        raise FormatError(file, str(error)) from None
    except FormatError:
        raise
    except (*DAMAGE, OverflowError) as error:
        raise FormatError(file, f"it is damaged: {error}") from error


def _describe(fields: Mapping[str, Any]) -> Described:
    entries, known = _Columns(), fields["state_dict_metadata"]
    for name, entry in known.items():
        entries.add(_text(name), entry)
    told = fields.get(OWN_EMPTY)
    empty = told if isinstance(told, dict) else {}
    bare = {_text(name): way for name, way in empty.items() if way and name not in known}
    for name in bare:
        entries.add(name, None)
    files: dict[str, int] = {}
    places = {}
    for index, info in (fields.get("storage_data") or {}).items():
        if type(index) is not _Index:
            raise PickleError(f"an item is named by a {type(index).__name__}")
        offset = index.fields.get("offset")
        key = _text(index.fields["fqn"]), None if offset is None else _ints(offset)
        places[key] = _place(key[0], info, files)
    own = {**(fields.get(OWN_PATHS) or {}), **bare}
    paths = _paths(entries.names, fields.get("planner_data"), own)
    data = {"paths": paths, "empty": tuple(sorted(map(_text, empty)))}
    meta = fields.get("storage_meta")
    metadata = Metadata(
        entries.done(),
        planner_data={key: part for key, part in data.items() if part} or None,
        storage_meta=None if meta is None else _storage_meta(meta),
        version=_text(fields["version"]) if fields.get("version") else None,
    )
    return Described(metadata, tuple(files), places, "storage_meta" not in fields)


class _Columns:
    """Entries in the making; what a thousand layers have in common is looked at once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: list[tuple[int, int]] = []
        self._props: dict[Any, int] = {}
        self._layouts: dict[Any, int] = {}
        self._made: list[TensorProperties] = []
        self._cut: list[Layout] = []

    def add(self, name: str, entry: Any) -> None:
        """Add a tensor or a value; None for a value that has no record."""
        self.names.append(name)
        if entry is None or isinstance(entry, _Bytes):
            self._rows.append((-1, -1))
            return
        if not isinstance(entry, _Tensor):
            raise PickleError(f"`{name}` is no tensor and no bytes, but a {type(entry).__name__}")
        fields = entry.fields
        try:
            prop = self._property(_state(fields["properties"]))
            self._rows.append((prop, self._layout(_ints(fields["size"]), fields["chunks"])))
        except (ValueError, TypeError) as error:
            raise PickleError(f"`{name}`: {error}") from None

    def _property(self, state: tuple[Any, ...]) -> int:
        if not {type(value) for value in state} <= _PLAIN:  # a tuple may take ages to hash
            raise ValueError("its properties are no plain values")
        number = self._props.get(state)
        if number is None:
            dtype, layout, grad, _, pinned = state
            if dtype not in ITEMSIZE:
                raise ValueError(f"it is of the unknown dtype {dtype}")
            layout = str(layout).removeprefix("torch.")
            if layout != "strided":
                raise ValueError(f"it is a {layout} tensor; only dense ones can be read")
            flags = {"requires_grad": grad is True, "pin_memory": pinned is True}
            self._made.append(TensorProperties(dtype, **flags))
            number = self._props[state] = len(self._props)
        return number

    def _layout(self, size: tuple[int, ...], chunks: Sequence[Any]) -> int:
        key = size, tuple([_box(chunk) for chunk in chunks])
        number = self._layouts.get(key)
        if number is None:
            fault = shape_fault(size)
            if fault is not None:
                raise ValueError(f"it {fault}")
            self._cut.append(Layout(size, _tiling(size, key[1])))
            number = self._layouts[key] = len(self._layouts)
        return number

    def done(self) -> Entries:
        """Return them."""
        rows = column(self._rows, len(self._rows), 2)
        return Entries(
            tuple(self.names), tuple(self._made), rows[:, 0], tuple(self._cut), rows[:, 1]
        )


def _state(properties: Any) -> tuple[Any, ...]:
    if type(properties) is not _Properties or type(properties.state) is not tuple:
        raise PickleError("its properties are of an unknown kind")
    return properties.state


def _box(chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if type(chunk) is not _Chunk:
        raise PickleError(f"a chunk is a {type(chunk).__name__}")
    return _ints(chunk.fields["offsets"]), _ints(chunk.fields["sizes"])


def _text(name: Any) -> str:
    if type(name) is not str:
        raise PickleError(f"a name is no text, but a {type(name).__name__}")
    return name


def _ints(numbers: Any) -> tuple[int, ...]:
    """Return whole numbers as they are; anything else may take ages to hash or to print."""
    if type(numbers) is not tuple or not _WHOLE.issuperset(map(type, numbers)):
        raise PickleError("a shape or an offset is not made of whole numbers")
    if numbers and not (min(numbers) >= 0 and max(numbers) < MAX_NUMEL):
        raise PickleError("a shape or an offset is negative, or impossibly large")
    return numbers


def _tiling(size: tuple[int, ...], chunks: Sequence[tuple[Any, Any]]) -> Tiling:
    axes, count = len(size), len(chunks)
    boxes = np.array(chunks)
    if boxes.size and (boxes.dtype.kind != "i" or boxes.shape != (count, 2, axes)):
        raise ValueError("its chunks have other axes than it has")
    boxes = boxes.astype(np.int64).reshape(count, 2, axes)
    if (boxes < 0).any() or (boxes.sum(axis=1) > np.array(size, np.int64)).any():
        raise ValueError(f"a chunk reaches out of its shape {list(size)}")
    if 0 in size:
        boxes = np.array([[[0] * axes, list(size)]], np.int64)
    else:
        boxes = boxes[boxes[:, 1].all(axis=1)]  # an empty shard may share a real one's offset
    return tile(boxes[:, 0], boxes[:, 1])


def _place(name: str, info: Any, files: dict[str, int]) -> Place:
    if not isinstance(info, _Info):
        raise PickleError(f"where `{name}` lies is told by a {type(info).__name__}")
    fields = info.fields
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    numbers = type(offset) is int and type(length) is int
    if not numbers or not (min(offset, length) >= 0 and max(offset, length) < MAX_BYTES):
        raise PickleError(f"where `{name}` lies is not said by whole numbers below 2^60")
    if _text(file) not in files:
        try:
            files[check_path(file)] = len(files)
        except StoreError as error:
            raise PickleError(f"`{name}` lies in {file!r}: {error.reason}") from None
    transforms = fields.get("transform_descriptors") or ()
    return Place(files[file], offset, length, tuple(map(_text, transforms)))


def _storage_meta(meta: Any) -> StorageMeta:
    if type(meta) is not _Meta:
        raise PickleError(f"its storage_meta is a {type(meta).__name__}")
    fields = meta.fields
    for text in (fields.get("checkpoint_id"), fields.get("save_id")):
        if text is not None:
            _text(text)
    return StorageMeta(fields.get("checkpoint_id"), fields.get("save_id"))


def _paths(names: Sequence[str], theirs: Any, ours: Any) -> dict[str, Any]:
    """Return the way to each nested value; see `shardplan.planning.tree`."""
    paths = {}
    theirs = theirs if isinstance(theirs, dict) else {}
    ours = ours if isinstance(ours, dict) else {}
    for name in names:
        path = (
            unpack_path(name, ours[name]) if name in ours else _torch_path(name, theirs.get(name))
        )
        if path is not None and path != (("dict", name),):
            paths[name] = path
    return paths


def _torch_path(name: str, path: Any) -> Any:
    """Read torch's way of telling: keys of dicts are text, positions in lists whole numbers."""
    if path is None:
        return None
    if type(path) is not tuple or not path or not all(type(key) in (str, int) for key in path):
        raise PickleError(f"the place of `{name}` is told by no path of plain keys")
    return tuple(("dict" if type(key) is str else "list", key) for key in path)


def pack_path(name: str, path: Path) -> Any:
    """Return the way to a value as `OWN_PATHS` keeps it: as text, where keys are not plain ones.

    >>> pack_path("a.(1, 2)", (("dict", "a"), ("dict", (1, 2))))
    '[["dict", "a"], ["dict", [1, 2]]]'

    Raises:
        ValueRefusedError: A key is of a type that our own format cannot keep either.
    """
    if all(type(key) in _PLAIN_KEYS for _, key in path):
        return tuple(path)
    for _, key in path:
        try:
            to_json(key)
        except CodecError:
            reason = f"lies under the key {key!r}, a {type(key).__name__}, which cannot be kept"
            raise ValueRefusedError(
                {name: f"{reason}; use text, numbers, bytes, None, or tuples and sets of these"}
            ) from None
    return json.dumps(to_json(path))


def unpack_path(name: str, packed: Any) -> Path:
    """Return the way to a value that `pack_path` was given.

    >>> unpack_path("a.(1, 2)", '[["dict", "a"], ["dict", [1, 2]]]')
    (('dict', 'a'), ('dict', (1, 2)))

    Raises:
        PickleError: It is something else.
    """
    is_text = type(packed) is str
    path = from_json(json.loads(packed)) if is_text else packed
    if type(path) is not tuple or not all(
        type(step) is tuple
        and len(step) == 2
        and step[0] in ("dict", "list", "tuple")
        and (is_text or type(step[1]) in _PLAIN_KEYS)
        for step in path
    ):
        raise PickleError(f"the place of `{name}` is told by no path of plain keys")
    return path
