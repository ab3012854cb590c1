"""What a checkpoint of any format holds, read from its metadata alone, without torch."""

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

from .names import choose, hint
from .screen import waiting

__all__ = ["Contents", "Total", "open_contents"]

_SMALL: Final = 4096  # bytes of a value that is read only to be shown
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
    """The tensors and values of a checkpoint, or some of them.

    Attributes:
        path: The checkpoint, as the user named it.
        source: The opened checkpoint.
        rows: The rows of its entries that are meant: tensors first, each kind by name.
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
        """The rows of tensors."""
        return [row for row in self.rows if self.entries.layout[row] >= 0]

    @cached_property
    def values(self) -> list[int]:
        """The rows of non-tensor values."""
        return [row for row in self.rows if self.entries.layout[row] < 0]

    @cached_property
    def nbytes(self) -> Ints:
        """The bytes of each row's chunks; 0 for values."""
        width = column([*(p.itemsize for p in self.entries.props), 0])
        volume = column([*(layout.tiling.volume() for layout in self.entries.layouts), 0])
        return volume[self.entries.layout] * width[self.entries.prop]

    @cached_property
    def _counts(self) -> list[int]:
        return [len(layout.tiling) for layout in self.entries.layouts]

    def count(self, row: int) -> int:
        """Return how many chunks a tensor has."""
        return self._counts[int(self.entries.layout[row])]

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
        tiling = self.entries.layouts[self.entries.layout[row]].tiling
        return [len(cut) - 1 for cut in tiling.cuts] if isinstance(tiling, Grid) else None

    def file_numbers(self, row: int) -> Sequence[int] | None:
        """Return which of the files holds each chunk of a tensor; None if that is not recorded."""
        return self.source.file_numbers(self.entries.names[row])

    def file_sizes(self) -> Mapping[str, int]:
        """Return the size of each file: as it was saved, or as the folder lists them."""
        if self.source.file_sizes:
            return self.source.file_sizes
        return {entry.name: entry.size for entry in self.source.store.entries(recursive=False)}

    def small_values(self, rows: Iterable[int]) -> dict[int, Any]:
        """Return values by row: those that need neither torch nor much reading."""
        found: dict[int, Any] = {}
        for row in rows:
            name = self.entries.names[row]
            with suppress(ValueError):  # a damaged value is reported when it is loaded
                nbytes = self.source.value_bytes(name)
                if nbytes <= _SMALL and (not nbytes or len(found) < _FEW):
                    value = self.source.plain_value(name)
                    if len(repr(value)) <= _SMALL:
                        found[row] = value
        return found

    def matching(self, pattern: str | None) -> Contents:
        """Keep what a pattern matches; see `choose`.

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


def open_contents(path: str) -> Contents:
    """Open a checkpoint of any format, reading only its metadata.

    Raises:
        FormatError: There is none, or its metadata is damaged.
    """
    start = time.perf_counter()
    with waiting(f"opening {path}"):
        source = open_source(path)
        entries = source.metadata.state_dict_metadata
    took = time.perf_counter() - start
    _log.info("opened %s in %.3f s: %s, %d entries", path, took, source.format, len(entries))
    order = sorted(range(len(entries)), key=lambda n: (entries.layout[n] < 0, entries.names[n]))
    return Contents(path, source, order)
