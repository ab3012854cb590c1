"""The contents of a checkpoint of any format, read from its metadata alone, without torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

import attrs

from shardplan.io.formats import Source, open_source
from shardplan.planning import Entries, Grid, nearest_hint, nearest_names
from shardplan.planning.columns import Ints, column
from shardplan.planning.geometry import Tiling

from .screen import waiting

_SMALL: Final = 4096  # the largest value, in bytes, to read for display
_FEW: Final = 64  # the most values to read for display, one request each
_log = logging.getLogger("shardplan.cli")


@attrs.frozen
class Total:
    """The number and the bytes of some tensors."""

    tensors: int
    nbytes: int


@attrs.frozen(eq=False, slots=False)
class Contents:
    """The tensors and values of a checkpoint, or some of them."""

    path: str  # the checkpoint, as the user named it
    source: Source  # the opened checkpoint
    rows: Sequence[int]  # the selected rows of its entries: tensors first, each kind by name

    @cached_property
    def entries(self) -> Entries:
        """All entries of the checkpoint, in columns."""
        return self.source.metadata.state_dict_metadata

    @cached_property
    def tensors(self) -> list[int]:
        """The rows of tensors."""
        return [row for row in self.rows if self.entries.layout[row] >= 0]

    @cached_property
    def values(self) -> list[int]:
        """The rows of non-tensor values."""
        return [row for row in self.rows if self.entries.layout[row] < 0]

    @cached_property
    def chunks(self) -> int:
        """The number of chunks of all tensors."""
        counts = [len(layout.tiling) for layout in self.entries.layouts]
        return sum(counts[self.entries.layout[row]] for row in self.tensors)

    @cached_property
    def nbytes(self) -> Ints:
        """The bytes of each row's chunks; 0 for values."""
        width = column([*(p.itemsize for p in self.entries.props), 0])
        volume = column([*(layout.tiling.volume() for layout in self.entries.layouts), 0])
        return volume[self.entries.layout] * width[self.entries.prop]

    def tiling(self, row: int) -> Tiling:
        """Return the chunks of a tensor."""
        return self.entries.layouts[int(self.entries.layout[row])].tiling

    def total(self, rows: Sequence[int]) -> Total:
        """Add up some rows."""
        numbers = column(rows)
        tensors = (self.entries.layout[numbers] >= 0).sum()
        return Total(int(tensors), int(self.nbytes[numbers].sum()))

    def dtype(self, row: int) -> str:
        """Return the dtype of a tensor."""
        return self.entries.props[int(self.entries.prop[row])].dtype

    def shape(self, row: int) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.entries.layouts[int(self.entries.layout[row])].size

    def grid(self, row: int) -> list[int] | None:
        """Return how many parts each axis is cut into; None if the chunks do not form a grid."""
        tiling = self.tiling(row)
        return [len(cut) - 1 for cut in tiling.cuts] if isinstance(tiling, Grid) else None

    def file_sizes(self) -> Mapping[str, int]:
        """Return the size of each file, from the metadata or from a listing of the folder."""
        if self.source.file_sizes:
            return self.source.file_sizes
        return {entry.name: entry.size for entry in self.source.store.entries(recursive=False)}

    def small_values(self, rows: Iterable[int]) -> dict[int, Any]:
        """Return values by row, if they need neither torch nor long reads."""
        values: dict[int, Any] = {}
        for row in rows:
            name = self.entries.names[row]
            with suppress(ValueError):  # a damaged value is reported when it is loaded
                nbytes = self.source.value_bytes(name)
                if nbytes <= _SMALL and (not nbytes or len(values) < _FEW):
                    value = self.source.plain_value(name)
                    if len(repr(value)) <= _SMALL:
                        values[row] = value
        return values

    def matching(self, pattern: str | None) -> Contents:
        """Keep what a pattern matches (see `choose`); raise ValueError if nothing does."""
        if pattern is None:
            return self
        names = [self.entries.names[row] for row in self.rows]
        chosen = [self.rows[number] for number in choose(pattern, names)]
        if not chosen:
            raise ValueError(f"no name in {self.path} matches {pattern!r}{hint(pattern, names)}")
        return attrs.evolve(self, rows=chosen)


def open_contents(path: str) -> Contents:
    """Open a checkpoint of any format, reading only its metadata."""
    start = time.perf_counter()
    with waiting(f"opening {path}"):
        source = open_source(path)
        entries = source.metadata.state_dict_metadata
    took = time.perf_counter() - start
    _log.info("opened %s in %.3f s: %s, %d entries", path, took, source.format, len(entries))
    order = sorted(range(len(entries)), key=lambda n: (entries.layout[n] < 0, entries.names[n]))
    return Contents(path, source, order)


def choose(pattern: str, names: Sequence[str]) -> list[int]:
    """Return the positions of the names that a pattern matches.

    A pattern is a name, the start of names up to a dot, or else a shell-style pattern.

    >>> names = ["w", "w[0]", "layers.0.w", "layers.1.w"]
    >>> choose("w[0]", names), choose("layers.1", names), choose("*.w", names)
    ([1], [3], [2, 3])
    """
    start = f"{pattern.rstrip('.')}."
    rows = [row for row, n in enumerate(names) if n == pattern or n.startswith(start)]
    return rows or [row for row, name in enumerate(names) if fnmatchcase(name, pattern)]


def hint(pattern: str, names: Sequence[str]) -> str:
    """Return the end of a message about a pattern without a match: similar names and prefixes.

    >>> hint("model.layerz", ["model.layers.0.w", "step"])
    '; nearest: model.layers, model.layers.0, model.layers.0.w'
    """
    known = dict.fromkeys(names)
    for name in names:
        known |= dict.fromkeys(accumulate(name.split("."), "{}.{}".format))
    return nearest_hint(nearest_names(pattern.strip("*."), known))
