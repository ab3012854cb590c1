"""What does a checkpoint hold, as far as what describes it tells? Any format, without torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final

import attrs

from shardplan.io.sources import Source, open_source
from shardplan.planning import Grid
from shardplan.planning.catalog import column
from shardplan.planning.errors import nearest_hint, nearest_names
from shardplan.planning.metadata import Entries
from shardplan.planning.packing import Ints

from .waiting import spinning

__all__ = ["Contents", "Total", "open_contents"]

_KNOWN_PLACES: Final = ("hf",)  # formats that tell where chunks lie without any more reading
_PATTERN: Final = frozenset("*?[")
_log = logging.getLogger("shardplan.cli")


@attrs.frozen
class Total:
    """Some tensors together.

    Attributes:
        tensors: How many there are.
        nbytes: The bytes of their chunks.
    """

    tensors: int
    nbytes: int


@attrs.frozen(eq=False, slots=False)
class Contents:
    """The tensors and values of a checkpoint, or those that were asked for.

    Attributes:
        path: The checkpoint, as it was asked for.
        source: Where it lies.
        rows: Which rows of its entries are meant.
    """

    path: str
    source: Source
    rows: Sequence[int]

    @cached_property
    def entries(self) -> Entries:
        """All that the checkpoint holds, in columns."""
        return self.source.metadata.state_dict_metadata

    @cached_property
    def manifest(self) -> Any:
        """The manifest of a checkpoint of ours; None for other formats."""
        return getattr(self.source, "manifest", None)

    @cached_property
    def tensors(self) -> list[int]:
        """The rows that are tensors."""
        return [row for row in self.rows if self.entries.layout[row] >= 0]

    @cached_property
    def values(self) -> list[int]:
        """The rows that are no tensors."""
        return [row for row in self.rows if self.entries.layout[row] < 0]

    @cached_property
    def _volumes(self) -> list[int]:
        """How many elements the chunks of each layout have."""
        return [layout.tiling.volume() for layout in self.entries.layouts]

    @cached_property
    def nbytes(self) -> Ints:
        """The bytes of each row's chunks; 0 for what is no tensor."""
        width = column([*(p.itemsize for p in self.entries.props), 0])
        return column([*self._volumes, 0])[self.entries.layout] * width[self.entries.prop]

    @cached_property
    def _counts(self) -> list[int]:
        return [len(layout.tiling) for layout in self.entries.layouts]

    def count(self, row: int) -> int:
        """How many chunks a tensor has."""
        return self._counts[int(self.entries.layout[row])]

    def total(self, rows: Sequence[int]) -> Total:
        """Add up some rows."""
        numbers = column(rows)
        return Total(
            int((self.entries.layout[numbers] >= 0).sum()), int(self.nbytes[numbers].sum())
        )

    def dtype(self, row: int) -> str:
        """What a tensor is stored as."""
        return self.entries.props[int(self.entries.prop[row])].dtype

    def shape(self, row: int) -> tuple[int, ...]:
        """A tensor's shape."""
        return self.entries.layouts[int(self.entries.layout[row])].size

    def grid(self, row: int) -> list[int] | None:
        """Into how many parts each axis was cut; None if the chunks form no grid."""
        tiling = self.entries.layouts[self.entries.layout[row]].tiling
        return [len(cut) - 1 for cut in tiling.cuts] if isinstance(tiling, Grid) else None

    @cached_property
    def _places(self) -> list[int]:
        return [len(set(place.tolist())) for place in self.manifest.places]

    def files(self, row: int) -> int | None:
        """In how many files a tensor lies; None if that takes more than a look."""
        if self.manifest is not None:
            return self._places[int(self.manifest.place[row])]
        names = self.file_names(row)
        return None if names is None else len(set(names))

    def file_names(self, row: int) -> list[str] | None:
        """The file of each chunk of a tensor; None likewise."""
        name = self.entries.names[row]
        if self.manifest is not None:
            numbers = self.manifest.files_of(name).tolist()
        elif self.source.format in _KNOWN_PLACES:
            spots = self.source.spots([(name, chunk) for chunk in range(self.count(row))])
            numbers = [spot.file for spot in spots]
        else:
            return None
        return [self.source.files[number] for number in numbers]

    @property
    def by_dtype(self) -> dict[str, Total]:
        """The totals of each dtype, the largest first."""
        groups: dict[str, list[int]] = {}
        for row in self.tensors:
            groups.setdefault(self.dtype(row), []).append(row)
        return self._totals(groups)

    @property
    def by_prefix(self) -> dict[str, Total]:
        """The totals of each beginning of a name, where names first part; the largest first."""
        names = [self.entries.names[row].split(".") for row in self.tensors]
        shared = 0
        while names and all(len(n) > shared + 1 and n[shared] == names[0][shared] for n in names):
            shared += 1
        groups: dict[str, list[int]] = {}
        for row, steps in zip(self.tensors, names, strict=True):
            groups.setdefault(".".join(steps[: shared + 1]), []).append(row)
        return self._totals(groups)

    def _totals(self, groups: Mapping[str, Sequence[int]]) -> dict[str, Total]:
        found = {name: self.total(rows) for name, rows in groups.items()}
        return dict(sorted(found.items(), key=lambda pair: (-pair[1].nbytes, pair[0])))

    def matching(self, pattern: str | None) -> Contents:
        """Keep what a pattern matches; without any of ``*?[`` it is a name or the start of one.

        Raises:
            ValueError: Nothing matches.
        """
        if pattern is None:
            return self
        names = self.entries.names
        if _PATTERN & set(pattern):
            rows = [row for row in self.rows if fnmatchcase(names[row], pattern)]
        else:
            start = f"{pattern.rstrip('.')}."
            rows = [r for r in self.rows if names[r] == pattern or names[r].startswith(start)]
        if not rows:
            near = nearest_hint(nearest_names(pattern.strip("*."), names))
            raise ValueError(f"no name in {self.path} matches {pattern!r}{near}")
        return attrs.evolve(self, rows=rows)

    def as_json(self, *, chunks: bool = False) -> dict[str, Any]:
        """Return all of this as plain data."""
        manifest = self.manifest
        sizes = None if manifest is None else manifest.files.sizes.tolist()
        return {
            "path": self.path,
            "format": self.source.format,
            "save_id": None if manifest is None else manifest.save_id,
            "created": None if manifest is None else manifest.created or None,
            "bytes": self.total(self.rows).nbytes,
            "chunks": sum(map(self.count, self.tensors)),
            "files": [
                {"name": name, "bytes": None if sizes is None else sizes[number]}
                for number, name in enumerate(self.source.files)
            ],
            "tensors": [self._tensor(row, chunks) for row in self.tensors],
            "values": [self.entries.names[row] for row in self.values],
            "by_dtype": _plain(self.by_dtype),
            "by_prefix": _plain(self.by_prefix),
        }

    def _tensor(self, row: int, chunks: bool) -> dict[str, Any]:
        told: dict[str, Any] = {
            "name": self.entries.names[row],
            "shape": list(self.shape(row)),
            "dtype": self.dtype(row),
            "bytes": int(self.nbytes[row]),
            "chunks": self.count(row),
            "grid": self.grid(row),
            "files": self.files(row),
        }
        if chunks:
            tiling = self.entries.layouts[self.entries.layout[row]].tiling
            width = self.entries.props[self.entries.prop[row]].itemsize
            files: Sequence[str | None] = self.file_names(row) or [None] * len(tiling)
            told["chunk_list"] = [
                {"offsets": offsets, "sizes": sizes, "bytes": volume * width, "file": file}
                for offsets, sizes, volume, file in zip(
                    tiling.offsets.tolist(),
                    tiling.sizes.tolist(),
                    tiling.sizes.prod(axis=1).tolist(),
                    files,
                    strict=True,
                )
            ]
        return told


def _plain(totals: Mapping[str, Total]) -> dict[str, dict[str, int]]:
    return {name: {"tensors": t.tensors, "bytes": t.nbytes} for name, t in totals.items()}


def open_contents(path: str) -> Contents:
    """Open a checkpoint of any format, reading only what describes it.

    Raises:
        FormatError: There is none, or what describes it is damaged.
    """
    start = time.perf_counter()
    with spinning(f"opening {path}"):
        source = open_source(path)
        entries = source.metadata.state_dict_metadata
    took = time.perf_counter() - start
    _log.info("opened %s in %.3f s: %s, %d entries", path, took, source.format, len(entries))
    return Contents(path, source, range(len(entries)))
