"""Checkpoints whose ranks saved independently: one metadata file per rank, read as one.

``torch.distributed.checkpoint.save(use_collectives=False)`` writes ``__0.metadata``,
``__1.metadata``, … and no `.metadata`. Items that several ranks saved are there several times;
`merge_ranks` lists them as copies, which `DcpSource` compares before it uses one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from shardplan.planning import BytesMetadata, Metadata, TensorMetadata, empty_names, nesting_issues
from shardplan.planning.geometry import tile_chunks

from ...errors import FormatError
from .metadata import Described, Place

FIRST_RANK: Final = "__0.metadata"
"""The file that makes a folder such a checkpoint."""
_NAME: Final = re.compile(r"__(\d{1,9})\.metadata")

Entry = TensorMetadata | BytesMetadata


def is_rank_metadata(name: str) -> bool:
    """Return True if a file's name is that of one rank's metadata."""
    return _NAME.fullmatch(name) is not None


def rank_metadata(names: Iterable[str]) -> tuple[str, ...]:
    """Pick the metadata files of ranks from a folder's files, in order of rank."""
    found = [match for match in map(_NAME.fullmatch, names) if match]
    return tuple(match[0] for match in sorted(found, key=lambda match: int(match[1])))


def merge_ranks(parts: Mapping[str, Described]) -> Described:
    """Describe what all ranks saved together, given the contents of each file, in order of rank."""
    _refuse_gaps(parts)
    saved: dict[str, dict[str, Entry]] = {}  # by name, what each file has of it
    for file, part in parts.items():
        for name, entry in part.metadata.state_dict_metadata.items():
            saved.setdefault(name, {})[file] = entry
    files: dict[str, int] = {}
    places: dict[Any, list[Place]] = {}
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
        first.old,
        {key: tuple(found[1:]) for key, found in places.items() if len(found) > 1},
    )


def _refuse_gaps(parts: Mapping[str, Described]) -> None:
    for rank, file in enumerate(parts):
        if file != f"__{rank}.metadata":
            raise FormatError(
                f"__{rank}.metadata",
                f"it is missing, and {file} is there: rank {rank} never finished its part of this "
                "save, in which ranks saved independently",
            )


def _joined(name: str, entries: Mapping[str, Entry]) -> Entry:
    """Return the entry of one name for all ranks, given that in the file of each."""
    (first, one), *others = entries.items()
    for file, other in others:
        if _kind(one) != _kind(other):
            raise FormatError(
                file,
                f"`{name}` is {_kind(other)} there, and {_kind(one)} in {first}; ranks saved "
                "different things under one name. Open one rank's part",
            )
    if not others or isinstance(one, BytesMetadata):
        return one
    tensors = (entry for entry in entries.values() if isinstance(entry, TensorMetadata))
    chunks = dict.fromkeys(itertools.chain.from_iterable(entry.chunks for entry in tensors))
    return attrs.evolve(one, chunks=tile_chunks(chunks))


def _kind(entry: Entry) -> str:
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
