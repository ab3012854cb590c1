"""What does a `.metadata` file of torch.distributed.checkpoint say? Read without torch.

The file is a pickle of torch's own records. Here they are stand-ins of the same names; a pickle
that names anything else is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from shardplan.planning import Metadata, StorageMeta
from shardplan.planning.catalog import column
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.items import TensorProperties
from shardplan.planning.metadata import Entries, Layout
from shardplan.planning.packing import DAMAGE
from shardplan.planning.tiling import Tiling, tile

from .errors import FormatError
from .pickles import Copies, PickleError, RefusedName, Sealed, load_pickle
from .stores import StoreError, check_path

__all__ = ["METADATA", "OWN_PATHS", "Described", "Place", "parse_metadata"]

METADATA: Final = ".metadata"
"""The file that makes a folder a checkpoint of torch.distributed.checkpoint."""

_PLAIN: Final = {str, bool, int, type(None)}
OWN_PATHS: Final = "_shardplan_paths"
"""An attribute of the pickled metadata: nested keys that torch's own way of telling cannot tell."""


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
    """

    metadata: Metadata
    files: tuple[str, ...]
    places: Mapping[tuple[str, tuple[int, ...] | None], Place]
    old: bool


class _Record(metaclass=Sealed):
    """An object with attributes, whatever the pickle sets."""


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Bytes(_Record):
    pass


class _Chunk(_Record):
    pass


class _Index(_Record):
    pass


class _Info(_Record):
    pass


class _Meta(_Record):
    pass


class _Properties(_Record):
    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Ignored(metaclass=Sealed):
    """A value that nothing here depends on, such as a memory format."""

    def __new__(cls, *args: Any) -> Any:
        return None


class _Member(metaclass=Sealed):
    """How some versions of Python pickle an enum: as an attribute of its class."""

    def __new__(cls, owner: Any, name: Any) -> Any:
        if owner is not _Ignored:
            raise RefusedName("builtins.getattr")
        return None


class _Size(metaclass=Sealed):
    def __new__(cls, sizes: Any = ()) -> Any:
        return _ints(sizes)


class _Layout(metaclass=Sealed):
    def __new__(cls, name: Any) -> Any:
        return _text(name)


class _Path(metaclass=Sealed):
    def __new__(cls, *parts: Any) -> Any:
        return "/".join(map(_text, parts)).replace("//", "/")


_HOME: Final = "torch.distributed.checkpoint"
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES: Final[Mapping[str, Any]] = {
    f"{_HOME}.metadata.Metadata": _Metadata,
    f"{_HOME}.metadata.TensorStorageMetadata": _Tensor,
    f"{_HOME}.metadata.BytesStorageMetadata": _Bytes,
    f"{_HOME}.metadata.ChunkStorageMetadata": _Chunk,
    f"{_HOME}.metadata.MetadataIndex": _Index,
    f"{_HOME}.metadata.StorageMeta": _Meta,
    f"{_HOME}.metadata.TensorProperties": _Properties,
    f"{_SHARDED}.TensorProperties": _Properties,
    f"{_HOME}.metadata._MEM_FORMAT_ENCODING": _Ignored,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": _Ignored,
    f"{_HOME}.filesystem._StorageInfo": _Info,
    "torch.Size": Copies(_Size),
    "torch.serialization._get_layout": _Layout,
    "collections.OrderedDict": Copies(OrderedDict),
    "builtins.getattr": _Member,
    "__builtin__.getattr": _Member,
    **{
        f"{home}.{kind}": _Path
        for home in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
    },
}


class _Names(dict[str, Any]):
    """The classes above, and every dtype by its name, known here or not."""

    def get(self, key: str, default: Any = None) -> Any:
        found = _CLASSES.get(key)
        module, _, name = key.rpartition(".")
        plain = module == "torch" and name.islower() and any(c.isdigit() for c in name)
        return name if found is None and (plain or key == "torch.bool") else found


def parse_metadata(data: bytes) -> Described:
    """Read a `.metadata` file.

    Raises:
        FormatError: It is damaged, or names a class that no checkpoint needs; none was called.
    """
    try:
        found = load_pickle(data, _Names())
        if not isinstance(found, _Metadata):
            raise PickleError(f"it holds a {type(found).__name__}, not a checkpoint's metadata")
        return _describe(vars(found))
    except RefusedName as error:
        raise FormatError(
            METADATA,
            f"{error}: it was not written by torch.distributed.checkpoint's own planner and "
            "storage, or it is malicious; nothing of it was run",
        ) from None
    except PickleError as error:
        raise FormatError(METADATA, str(error)) from None
    except FormatError:
        raise
    except (*DAMAGE, OverflowError) as error:
        raise FormatError(METADATA, f"it is damaged: {error}") from error


def _describe(fields: Mapping[str, Any]) -> Described:
    entries = _Columns()
    for name, entry in fields["state_dict_metadata"].items():
        entries.add(_text(name), entry)
    files: dict[str, int] = {}
    places = {}
    for index, info in (fields.get("storage_data") or {}).items():
        told = vars(index)
        offset = told.get("offset")
        key = _text(told["fqn"]), None if offset is None else _ints(offset)
        places[key] = _place(key[0], info, files)
    paths = _paths(entries.names, fields.get("planner_data"), fields.get(OWN_PATHS))
    meta = fields.get("storage_meta")
    metadata = Metadata(
        entries.done(),
        planner_data={"paths": paths} if paths else None,
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
        """Add a tensor or a value."""
        self.names.append(name)
        if isinstance(entry, _Bytes):
            self._rows.append((-1, -1))
            return
        if not isinstance(entry, _Tensor):
            raise PickleError(f"`{name}` is no tensor and no bytes, but a {type(entry).__name__}")
        fields = vars(entry)
        try:
            prop = self._property(tuple(vars(fields["properties"])["state"]))
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
        key = size, tuple([(_ints(c.offsets), _ints(c.sizes)) for c in chunks])
        number = self._layouts.get(key)
        if number is None:
            if any(n < 0 for n in size):
                raise ValueError(f"a tensor cannot have the shape {size}")
            self._cut.append(Layout(size, _tiling(size, key[1])))
            number = self._layouts[key] = len(self._layouts)
        return number

    def done(self) -> Entries:
        """Return them."""
        rows = column(self._rows, len(self._rows), 2)
        return Entries(
            tuple(self.names), tuple(self._made), rows[:, 0], tuple(self._cut), rows[:, 1]
        )


def _text(name: Any) -> str:
    if type(name) is not str:
        raise PickleError(f"a name is no text, but a {type(name).__name__}")
    return name


def _ints(numbers: Any) -> tuple[int, ...]:
    """Return whole numbers as they are; anything else may take ages to hash or to print."""
    found = tuple(numbers)
    if not {type(n) for n in found} <= {int}:
        raise PickleError("a shape or an offset is not made of whole numbers")
    return found


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
    fields = vars(info)
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise PickleError(f"where `{name}` lies is not told by whole numbers from 0 on")
    if _text(file) not in files:
        try:
            files[check_path(file)] = len(files)
        except StoreError as error:
            raise PickleError(f"`{name}` lies in {file!r}: {error.reason}") from None
    transforms = fields.get("transform_descriptors") or ()
    return Place(files[file], offset, length, tuple(map(_text, transforms)))


def _storage_meta(meta: Any) -> StorageMeta:
    fields = vars(meta)
    for text in (fields.get("checkpoint_id"), fields.get("save_id")):
        if text is not None:
            _text(text)
    return StorageMeta(fields.get("checkpoint_id"), fields.get("save_id"))


def _paths(names: Sequence[str], theirs: Any, ours: Any) -> dict[str, Any]:
    """Return the way to each nested value; see `shardplan.planning.flatten`."""
    paths = {}
    theirs = theirs if isinstance(theirs, dict) else {}
    ours = ours if isinstance(ours, dict) else {}
    for name in names:
        path = _our_path(name, ours[name]) if name in ours else _torch_path(name, theirs.get(name))
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


def _our_path(name: str, path: Any) -> Any:
    plain = (str, int, float, bool, bytes, type(None))
    if type(path) is not tuple or not all(
        type(step) is tuple
        and len(step) == 2
        and step[0] in ("dict", "list", "tuple")
        and type(step[1]) in plain
        for step in path
    ):
        raise PickleError(f"the place of `{name}` is told by no path of plain keys")
    return path
