"""What does a checkpoint hold, as far as what describes it tells? Any format, without torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

import attrs

from shardplan.io.formats import Source, open_source
from shardplan.planning import Entries, Grid
from shardplan.planning.columns import Ints, column

from .choosing import choose, hint
from .waiting import spinning

__all__ = ["Contents", "Total", "open_contents"]

_SMALL: Final = 4096  # bytes of a value that are read only to be shown
_FEW: Final = 64  # values that are read only to be shown, a request each
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
        found = self.source.file_columns
        return [] if found is None else [len(set(place.tolist())) for place in found.columns]

    def files(self, row: int) -> int | None:
        """In how many files a tensor lies; None if what describes the checkpoint is silent."""
        if self.source.file_columns is not None:
            return self._places[int(self.source.file_columns.entry[row])]
        numbers = self.source.file_numbers(self.entries.names[row])
        return None if numbers is None else len(set(numbers))

    def file_names(self, row: int) -> list[str] | None:
        """The file of each chunk of a tensor; None likewise."""
        numbers = self.source.file_numbers(self.entries.names[row])
        return None if numbers is None else [self.source.files[number] for number in numbers]

    def values_at_hand(self, rows: Iterable[int]) -> dict[int, Any]:
        """Return values by row: those that are small, and take neither torch nor much reading."""
        found: dict[int, Any] = {}
        requests = 0
        for row in rows:
            with suppress(ValueError):  # whoever asks for this one learns what is wrong
                name = self.entries.names[row]
                nbytes = self.source.value_bytes(name)
                requests += nbytes > 0
                if nbytes > _SMALL or requests > _FEW:
                    continue
                value = self.source.plain_value(name)
                if len(repr(value)) <= _SMALL:
                    found[row] = value
        return found

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
        """Keep what a pattern means; see `choose`.

        Raises:
            ValueError: Nothing matches.
        """
        if pattern is None:
            return self
        names = [self.entries.names[row] for row in self.rows]
        chosen = [self.rows[number] for number in choose(pattern, names)]
        if not chosen:
            raise ValueError(f"no name in {self.path} matches {pattern!r}{hint(pattern, names)}")
        return attrs.evolve(self, rows=chosen)

    def as_json(self, *, chunks: bool = False) -> dict[str, Any]:
        """Return all of this as plain data."""
        source, sizes = self.source, self._file_sizes()
        return {
            "path": self.path,
            "format": source.format,
            "save_id": None if source.created is None else source.save_id,
            "created": source.created or None,
            "bytes": self.total(self.rows).nbytes,
            "chunks": sum(map(self.count, self.tensors)),
            "files": [{"name": name, "bytes": sizes.get(name)} for name in source.files],
            "tensors": [self._tensor(row, chunks) for row in self.tensors],
            "values": self._values(),
            "by_dtype": _plain(self.by_dtype),
            "by_prefix": _plain(self.by_prefix),
        }

    def _file_sizes(self) -> Mapping[str, int]:
        """The size of each file: as the manifest says, or as a listing of the folder does."""
        if self.source.file_sizes:
            return self.source.file_sizes
        return {entry.name: entry.size for entry in self.source.store.entries(recursive=False)}

    def _values(self) -> list[dict[str, Any]]:
        from .screen import plain

        told = self.values_at_hand(self.values)
        return [
            {"name": self.entries.names[row]} | ({"value": plain(told[row])} if row in told else {})
            for row in self.values
        ]

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
    # Tensors before values, each by name, whatever order they were saved in.
    order = sorted(range(len(entries)), key=lambda n: (entries.layout[n] < 0, entries.names[n]))
    return Contents(path, source, order)
