"""The known formats, and opening a checkpoint of any of them, to be read or to be written.

Formats of other packages join by a call of `register_format`, or by an entry point in the group
``shardplan.formats`` whose object is a `Format`. They are asked after our own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, Final

from shardplan.planning import nearest_hint, nearest_names

from ..errors import FormatError, listed
from ..pool import Pool
from ..stores.base import Location, Store, open_store
from .base import Format, Source, Writer

_OWN: Final = {
    "safetensors": "shardplan.io.formats.native.source:NativeFormat",
    "hf": "shardplan.io.formats.hf.source:HfFormat",
    "dcp": "shardplan.io.formats.dcp.source:DcpFormat",
    "torch": "shardplan.io.formats.torch_save.source:TorchFormat",
}
_registered: Final[dict[str, Format]] = {}


def register_format(format: Format) -> None:
    """Make a format known: `save`, `load`, `convert`, `verify` and all others then take it."""
    if format.name in _OWN or _registered.get(format.name, format) is not format:
        raise ValueError(f"there is a format {format.name!r} already; choose another name")
    _registered[format.name] = format


def known_formats() -> Iterator[Format]:
    """Yield all formats, in the order in which `detect` asks them; each is loaded when asked."""
    for name in _OWN:
        yield _own(name)
    _load_plugins()
    yield from tuple(_registered.values())


def find_format(name: str) -> Format:
    """Return the format of a name."""
    if name in _OWN:
        return _own(name)
    names = [known.name for known in known_formats()]
    if name not in _registered:
        raise ValueError(f"unknown format {name!r}; known formats are {', '.join(names)}")
    return _registered[name]


@cache
def _own(name: str) -> Format:
    module, _, kind = _OWN[name].partition(":")
    made: Format = getattr(import_module(module), kind)()
    return made


@cache
def _load_plugins() -> None:
    from importlib.metadata import entry_points  # opening a checkpoint of ours does without

    for point in entry_points(group="shardplan.formats"):
        register_format(point.load())


def open_source(path: Location, *, format: str | None = None, pool: Pool | None = None) -> Source:
    """Open a checkpoint, a folder or a file; the format is detected if left out."""
    return open_located(*locate(path), format=format, pool=pool)


def open_located(
    store: Store, name: str, *, format: str | None = None, pool: Pool | None = None
) -> Source:
    """Open a checkpoint, given what `locate` has found; see `open_source`."""
    return find_format(format or detect(store, name)).open(store, name, pool)


def detect(store: Store, name: str = "") -> str:
    """Return the name of the format of the checkpoint in a folder, or of a single file."""
    found = find_any(store, name)
    if found is None:
        raise FormatError(name or store.url, _why_none(store, name))
    return found.name


def find_any(store: Store, name: str = "") -> Format | None:
    """Return the format of the checkpoint in a folder, or of a single file; None without one."""
    return next((one for one in known_formats() if one.detect(store, name)), None)


def _why_none(store: Store, name: str) -> str:
    names = ", ".join(known.name for known in known_formats())
    if name:
        return _why_no_file(store, name) or f"it is not a checkpoint of a known format ({names})"
    found = store.list(recursive=False)
    if not found:
        return f"there is no checkpoint: {_why_empty(store.url)}"
    marks = [mark for known in known_formats() for mark in known.marks]
    folders = [name for name in found if name.endswith("/")]
    inside = [name for name in folders if any(store.exists(name + mark) for mark in marks)]
    if inside:
        url = store.url.rstrip("/")
        these = listed([f"{url}/{folder.rstrip('/')}" for folder in inside], quote="")
        return f"there is no checkpoint in it, but in folders of it; give one: {these}"
    return (
        f"there is no checkpoint: no save was ever committed in this folder, and it holds none of "
        f"another format ({names}); it holds {listed(found, quote='')}"
    )


def _why_no_file(store: Store, name: str) -> str | None:
    """Explain that a file is a part of a checkpoint that is a folder, if it is."""
    writer = next((one for one in known_formats() if one.save_of(name) is not None), None)
    if writer is None:
        return None
    if writer.detect(store):
        return f"it is a part of a checkpoint; give the folder: {store.url}"
    return "it belongs to no checkpoint: the save that wrote it was never committed"


def _why_empty(url: str) -> str:
    """Explain what is wrong with the path of a folder that is empty, or does not exist."""
    if "://" in url:
        return "nothing has this prefix; check the URL"
    if os.path.isdir(url):
        return "the folder is empty"
    parent, name = os.path.split(url.rstrip("/"))
    if not os.path.isdir(parent):
        return f"{parent} does not exist; check the path"
    near = nearest_hint(nearest_names(name, sorted(os.listdir(parent))))
    return f"the folder does not exist{near}"


def locate(path: Location) -> tuple[Store, str]:
    """Return the store to look in, and the name of a single file there; empty for a folder."""
    if not isinstance(path, (str, os.PathLike)):
        return open_store(path), ""
    path = os.fspath(path)
    head, _, tail = path.rstrip("/").rpartition("/")
    if "://" not in path and os.path.isfile(path):
        return open_store(os.path.dirname(path) or "."), os.path.basename(path)
    if "://" in path and os.path.splitext(tail)[1] and not head.endswith(":/"):
        store = open_store(head)
        if store.exists(tail):
            return store, tail
    return open_store(path), ""


def find_writer(format: str, **options: Any) -> Writer:
    """Return what writes a format, given the options that its `Format.writer` takes."""
    from inspect import signature  # reading does without

    make = find_format(format).writer
    parameters = signature(make).parameters
    unknown = sorted(options.keys() - parameters.keys())
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(f"the format {format!r} has no option {', '.join(unknown)}")
    return make(**options)


def open_target(path: Location, format: str, **options: Any) -> tuple[Store, Writer]:
    """Return where a checkpoint goes, and what writes it there."""
    if not find_format(format).is_file:
        return open_store(path), find_writer(format, **options)
    if not isinstance(path, (str, os.PathLike)):
        open_store(path)  # refuses what is not a store either
        raise ValueError(f"a {format} checkpoint is a file: pass its path, not a store")
    text = os.fspath(path)
    folder, slash, file = text.rpartition("/")
    if not file or folder.endswith(":/") or ("://" not in text and os.path.isdir(text)):
        raise ValueError(f"a {format} checkpoint is a file, such as model.pt; {text} is a folder")
    writer = find_writer(format, file=file, **options)
    return open_store(folder or (slash or ".")), writer
