"""The safetensors files that make up a checkpoint of Hugging Face tools, and what they say of that.

They are chosen as those tools choose them: ``model.safetensors`` if it is there; else the files
that the one ``*.safetensors.index.json`` names; else all safetensors files of the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from shardplan.planning.storage import save_id_of

from ...errors import FormatError
from ...limits import read_whole
from ...stores.base import MissingFileError, Store, StoreError, check_path
from ..headers import Header, header_length, parse_header

SINGLE: Final = "model.safetensors"
"""The file that holds a whole model."""
INDEX: Final = "model.safetensors.index.json"
"""The file that says which of several files holds which tensor."""
PART_OF: Final = "index"
"""Under this key of its header a file says that it counts only together with an index."""
TIED: Final = "tied"
"""Under this key of its header a file of ours lists the names that are tied to its tensors."""
RESERVED: Final = ("format", "shardplan", "DCP_VERSION", "DCP_SHARDING_INFO")
"""Words of a header's ``__metadata__`` that name no tensor."""

SUFFIX: Final = ".safetensors"
"""How files with tensors are named."""
INDEX_SUFFIX: Final = ".safetensors.index.json"
"""How indices are named."""
_NUMBERED: Final = re.compile(r"(?!shard-)(.+)-(\d{5})-of-(\d{5})\.safetensors")
_OURS: Final = re.compile(r"model-(?:[0-9a-f]+-)?\d{5}-of-\d{5}\.safetensors")
_FIRST: Final = 1 << 16  # bytes that are read of a file at first: most headers fit


@attrs.frozen
class Chosen:
    """The files of a checkpoint, and the index that names them; None if there is none."""

    files: Sequence[str]
    index: str | None = None
    weights: Mapping[str, str] = attrs.Factory(dict)


def choose_files(store: Store, name: str = "") -> Chosen:
    """Choose the files of a checkpoint.

    Args:
        store: The folder.
        name: A single file, or an index; empty for whatever is in the folder.
    """
    if name and not name.endswith(INDEX_SUFFIX):
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
    return [name for name in found if name.endswith(INDEX_SUFFIX)]


def plain_files(found: Iterable[str]) -> list[str]:
    """Name the safetensors files that may be a checkpoint: not those of a killed save of ours."""
    return [name for name in found if name.endswith(SUFFIX) and save_id_of(name) is None]


def missing_parts(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the files that are missing of those that belong together by their names, and why."""
    known = set(files)
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match is None:
            continue
        stem, count = match[1], int(match[3])
        for name in (f"{stem}-{i + 1:05d}-of-{match[3]}{SUFFIX}" for i in range(count)):
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
        return _OURS.fullmatch(file) is not None


def _peek(store: Store, file: str) -> Mapping[str, str]:
    """Return the ``__metadata__`` of a file's header; the file may well be cut short."""
    first = bytearray(min(8, store.size(file)))
    store.read(file, [(0, memoryview(first))])
    data = bytearray(header_length(bytes(first), file, store.size(file)))
    store.read(file, [(0, memoryview(data))])
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


def read_header(store: Store, file: str, index: str | None = None) -> Header:
    """Read one header, in one request if it is short; an index may have named the file."""
    try:
        size = store.size(file)
        data = bytearray(min(size, _FIRST))
        store.read(file, [(0, memoryview(data))])
        length = header_length(bytes(data[:8]), file, size)
        if length > len(data):
            rest = bytearray(length - len(data))
            store.read(file, [(len(data), memoryview(rest))])
            data += rest
    except MissingFileError:
        named = f", and {index} names it" if index else ""
        raise FormatError(file, f"it is missing{named}; was all of it downloaded?") from None
    return parse_header(bytes(data[:length]), file, size)


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
        _check_inside(index, name, file)
    return weights


def _check_inside(index: str, name: str, file: Any) -> None:
    try:
        inside = isinstance(file, str) and bool(check_path(file))
    except StoreError:
        inside = False
    if not inside or not file.endswith(SUFFIX):
        raise FormatError(
            index,
            f"it has `{name}` in {str(file)[:80]!r}, which is not a safetensors file beside it",
        )
