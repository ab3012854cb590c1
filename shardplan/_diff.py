"""The differences between two checkpoints, however each of them was sharded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import attrs

from shardplan.io import (
    FormatError,
    Pool,
    Progress,
    ProgressCallback,
    compare_tensors,
    default_pool,
    named_errors,
    same_value,
)
from shardplan.io.execute import Reader
from shardplan.io.formats import locate, open_source
from shardplan.io.stores import Location, Store
from shardplan.planning import (
    BytesMetadata,
    PlanError,
    Sheet,
    Table,
    TensorMetadata,
    check,
    counted,
    human_bytes,
    human_seconds,
)

from ._read import read_anew
from ._report import Printed, logged

_SHOWN: Final = 50
_WIDE: Final = 60  # characters of a value that are shown
_SIGNS: Final = {"added": "+", "removed": "-"}


@attrs.frozen
class Change:
    """One way in which two checkpoints differ.

    Attributes:
        key: The name of the tensor or value.
        what: ``added`` (only the second has it), ``removed`` (only the first has it), ``type``
            (one has a tensor, the other a value of another kind), ``shape``, ``dtype`` or
            ``values``.
        before, after: The shape, the dtype, the value, or the first element that differs; None on
            the side that lacks it, and where it was not read.
        elements: How many elements of a tensor differ; None if only checksums were compared.
        first: The index of the first of these; None likewise.
        chunks: How many of the first side's chunks differ; 0 for non-tensor values.
    """

    key: str
    what: Literal["added", "removed", "type", "shape", "dtype", "values"]
    before: Any = None
    after: Any = None
    elements: int | None = None
    first: tuple[int, ...] | None = None
    chunks: int = 0


@attrs.frozen(repr=False)
class CheckpointDiff(Printed):
    """What differs between two checkpoints; true if anything does; printed as a table.

    Attributes:
        a, b: The checkpoints.
        changes: All differences, by key.
        keys: How many keys both have.
        bytes_read: How many bytes of tensors were read, of both.
        seconds: How long it took.
        by_checksum: How many keys were compared, at least in part, by the checksums recorded when
            they were saved: their bytes were not read.
        values: Whether values were compared at all, beside names, shapes and dtypes.
    """

    a: str
    b: str
    changes: tuple[Change, ...]
    keys: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    by_checksum: int = 0
    values: bool = True

    def __bool__(self) -> bool:
        return bool(self.changes)

    @property
    def added(self) -> tuple[str, ...]:
        """Names that only the second checkpoint has."""
        return tuple(c.key for c in self.changes if c.what == "added")

    @property
    def removed(self) -> tuple[str, ...]:
        """Names that only the first checkpoint has."""
        return tuple(c.key for c in self.changes if c.what == "removed")

    @property
    def changed(self) -> tuple[Change, ...]:
        """Differences of names that both have."""
        return tuple(c for c in self.changes if c.what not in _SIGNS)

    @property
    def _sheet(self) -> Sheet:
        cost = f"{human_bytes(self.bytes_read)} of tensors read in {human_seconds(self.seconds)}"
        trust = list(filter(None, [self._trusted()]))
        if not self.changes:
            return Sheet(f"No difference: {counted(self.keys, 'key')}, {cost}", notes=trust)
        changed = len({change.key for change in self.changed})
        counts = len(self.added), len(self.removed), changed, self.keys - changed
        title = "{:,} added, {:,} removed, {:,} changed, {:,} equal; {}".format(*counts, cost)
        rows = [_row(change) for change in self.changes[:_SHOWN]]
        more = len(self.changes) - _SHOWN
        head = ("", "key", "what", "before", "after", "where")
        sides = [f"before: {self.a}", f"after: {self.b}", *trust]
        notes = [f"… {more:,} more", *sides] if more > 0 else sides
        return Sheet(title, [Table(head, rows)], notes)

    def _trusted(self) -> str:
        """Return a note on what was not read; empty if all was."""
        if not self.values:
            return "values were not compared: only names, shapes and dtypes"
        if not self.by_checksum:
            return ""
        keys = counted(self.keys, "key")
        some = keys if self.by_checksum == self.keys else f"{self.by_checksum:,} of {keys}"
        return f"{some} compared by recorded checksums: their bytes were not read"


def diff(
    a: str | os.PathLike[str] | Store,
    b: str | os.PathLike[str] | Store,
    *,
    values: bool = True,
    locate: bool = False,
    read: bool = False,
    progress: ProgressCallback | None = None,
    pool: Pool | None = None,
) -> CheckpointDiff:
    """Compare two checkpoints by key: names, shapes, dtypes and values.

    Chunks that both cut alike are compared by their recorded checksums, without reading them. All
    other elements are read from both and compared as bits. Every file must be there in its full
    size; damage inside is found only with ``read=True``, or by `verify`. If a side is overwritten
    meanwhile, the new one is compared, from the start.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        values: Whether to compare values at all.
        locate: Whether to read tensors whose checksums differ, to count the elements that differ
            and to find the first.
        read: Whether to read everything from both. Damage is then an error.
        progress: Called as ``progress(done_bytes, total_bytes)`` of one side, from one thread at a
            time.
        pool: The threads and the memory budget to use.

    Returns:
        All differences; false if there are none.

    >>> import tempfile, torch
    >>> from shardplan import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     w = torch.zeros(4, 3)
    ...     _ = save({"w": w, "step": 7}, f"{folder}/a")
    ...     w[2, 1] = 5
    ...     _ = save({"w": w, "step": 8}, f"{folder}/b")
    ...     found = diff(f"{folder}/a", f"{folder}/b", locate=True)
    >>> for change in found.changes:
    ...     print(change.key, change.what, change.before, change.after, change.first)
    step values 7 8 None
    w values 0.0 5.0 (2, 1)

    Raises:
        FormatError: One of them is not a checkpoint, or is damaged.
        PlanError: A checkpoint does not hold every element of its tensors.
    """
    start = time.perf_counter()
    pool = pool or default_pool()
    report = read_anew(
        lambda: (_open(a, pool), _open(b, pool)),
        lambda *sides: _compare(
            CheckpointDiff(_url(a), _url(b), (), values=values),
            *sides,
            locate=locate,
            read=read,
            progress=progress,
        ),
    )
    report = attrs.evolve(report, seconds=time.perf_counter() - start)
    return logged(report, f"{report.a} and {report.b}")


def _open(path: Location, pool: Pool) -> Reader:
    try:
        return Reader(open_source(path, pool=pool), pool)
    except FormatError as error:
        raise error.within(locate(path)[0].url) from error.__cause__


def _url(path: Location) -> str:
    """Name a checkpoint: its folder, or its file if it is a single one."""
    store, name = locate(path)
    return f"{store.url.rstrip('/')}/{name}" if name else store.url


def _check(side: Reader) -> None:
    """Refuse a side with gaps, or with a file missing or cut short: checksums cannot show that."""
    url = side.store.url
    try:
        check(side.metadata)
    except PlanError as error:
        error.add_note(f"the checkpoint is {url}")
        raise
    faults = side.source.missing()
    if faults:
        more = f"; {len(faults) - 1:,} more files" if len(faults) > 1 else ""
        raise FormatError(faults[0].file, f"{faults[0].reason}, in {url}{more}")


def _compare(
    report: CheckpointDiff,
    a: Reader,
    b: Reader,
    *,
    locate: bool,
    read: bool,
    progress: ProgressCallback | None,
) -> CheckpointDiff:
    """Compare two open checkpoints, and fill in an empty report."""
    for side in (a, b):
        _check(side)
    changes = list(_structure(a, b))
    entries = a.metadata.state_dict_metadata
    report = attrs.evolve(report, keys=len(entries.keys() & b.metadata.state_dict_metadata.keys()))
    if not report.values:
        Progress(0, progress)
        return attrs.evolve(report, changes=_by_key(changes))
    changed = {change.key for change in changes}
    shared = [name for name in entries if name not in changed]
    tensors = [n for n in shared if isinstance(entries[n], TensorMetadata)]
    found = compare_tensors(a, b, tensors, locate=locate, read=read, progress=progress)
    changes += [
        Change(name, "values", d.before, d.after, d.elements, d.first, d.chunks)
        for name, d in found.differing.items()
    ]
    others = [n for n in shared if isinstance(entries[n], BytesMetadata)]
    keys = {} if read else {name: a.source.value_key(name) for name in others}
    alike = {n for n, key in keys.items() if key is not None and key == b.source.value_key(n)}
    changes += _values(a, b, [name for name in others if name not in alike])
    by_checksum = len(found.unread | alike)
    return attrs.evolve(
        report, changes=_by_key(changes), bytes_read=found.bytes_read, by_checksum=by_checksum
    )


def _by_key(changes: list[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: change.key))


def _structure(a: Reader, b: Reader) -> Iterator[Change]:
    """Compare names, kinds, shapes and dtypes."""
    ours, theirs = a.metadata.state_dict_metadata, b.metadata.state_dict_metadata
    for name in theirs.keys() - ours.keys():
        yield Change(name, "added", after=_kind(theirs[name]))
    for name in ours:
        old, new = ours[name], theirs.get(name)
        if new is None:
            yield Change(name, "removed", before=_kind(old))
        elif isinstance(old, TensorMetadata) and isinstance(new, TensorMetadata):
            if old.size != new.size:
                yield Change(name, "shape", old.size, new.size)
            if old.properties.dtype != new.properties.dtype:
                yield Change(name, "dtype", old.properties.dtype, new.properties.dtype)
        elif type(old) is not type(new):
            yield Change(name, "type", _kind(old), _kind(new))


def _values(a: Reader, b: Reader, names: list[str]) -> Iterator[Change]:
    """Compare non-tensor values."""
    for name in names:
        with named_errors(a):
            old = a.value(name)
        with named_errors(b):
            new = b.value(name)
        if not same_value(old, new):
            yield Change(name, "values", old, new)


def _kind(entry: TensorMetadata | BytesMetadata) -> str:
    if isinstance(entry, BytesMetadata):
        return "value"
    return f"{entry.properties.dtype} {list(entry.size)}"


def _row(change: Change) -> tuple[str, ...]:
    sides = (change.before, change.after)
    texts = ("" if side is None and change.chunks else repr(side) for side in sides)
    before, after = (text if len(text) <= _WIDE else f"{text[:_WIDE]}…" for text in texts)
    if change.what in _SIGNS:
        before, after = change.before or "", change.after or ""
    elif change.what in ("shape", "dtype", "type"):
        before, after = (str(list(s)) if isinstance(s, tuple) else str(s) for s in sides)
    where = f"in {counted(change.chunks, 'chunk')}, by checksum" if change.chunks else ""
    if change.chunks and change.elements is not None and change.first is not None:
        many = f"{change.elements:,} elements, the first" if change.elements > 1 else "1 element"
        where = f"{many} at {list(change.first)}"
    return _SIGNS.get(change.what, "~"), change.key, change.what, before, after, where
