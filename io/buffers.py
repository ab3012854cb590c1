"""Buffers as flat bytes, cut and joined without copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

_NOTHING: Final = memoryview(b"")

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Contiguous memory of any type."""

Bytes: TypeAlias = NDArray[np.uint8]
"""Bytes as an array."""

Run: TypeAlias = tuple[int, list[memoryview]]
"""A byte offset in a file, and the memory that goes there, one view after another."""


def byte_view(buffer: Buffer) -> memoryview:
    """Return a view of contiguous memory as flat bytes."""
    view = memoryview(cast(bytes, buffer))  # typed so for Python 3.11, where arrays are not buffers
    if not view.c_contiguous:
        raise ValueError(f"memory of shape {view.shape} is not contiguous: make it so first")
    if not view.nbytes:
        return _NOTHING  # a view of no elements cannot be cast
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def wanted(ranges: Iterable[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
    """Return ranges to read as flat views, sorted by offset, without empty ones."""
    found = []
    for offset, buffer in ranges:
        view = byte_view(buffer)
        if not view.nbytes:
            continue
        if offset < 0 or view.readonly:
            wrong = f"offset {offset}" if offset < 0 else "memory that is read-only"
            raise ValueError(f"cannot read into {view.nbytes} bytes: {wrong}")
        found.append((offset, view))
    return sorted(found, key=itemgetter(0))


def total_bytes(parts: Iterable[Buffer]) -> int | None:
    """Return the size of all parts in bytes, or None if they are made on the fly."""
    if not isinstance(parts, Sequence):
        return None
    return sum(byte_view(part).nbytes for part in parts)


def pieces(parts: Iterable[Buffer], max_bytes: int) -> Iterator[memoryview]:
    """Cut parts into views of at most ``max_bytes``, without empty ones."""
    for part in parts:
        view = byte_view(part)
        for start in range(0, view.nbytes, max_bytes):
            yield view[start : start + max_bytes]


def placed(views: Iterable[memoryview], start: int = 0) -> Iterator[tuple[int, memoryview]]:
    """Pair each view with its offset in the file, where one follows another."""
    offset = start
    for view in views:
        yield offset, view
        offset += view.nbytes


def gather(
    ranges: Iterable[tuple[int, memoryview]], *, max_bytes: int, max_views: int
) -> Iterator[Run]:
    """Join ranges that follow one another in the file into runs that one system call can move.

    Longer views are cut. No view may be empty.

    >>> views = [memoryview(text) for text in (b"abc", b"de", b"f")]
    >>> runs = gather(zip([0, 3, 9], views), max_bytes=4, max_views=8)
    >>> [(offset, [bytes(view) for view in run]) for offset, run in runs]
    [(0, [b'abc', b'd']), (4, [b'e']), (9, [b'f'])]
    """
    start, end, run = 0, 0, list[memoryview]()
    for offset, rest in ranges:
        while rest.nbytes:
            room = max_bytes - (end - start)
            if run and (offset != end or len(run) == max_views):
                yield start, run
                run = []
            if not run:
                start, end, room = offset, offset, max_bytes
            view, rest = (rest, _NOTHING) if rest.nbytes <= room else (rest[:room], rest[room:])
            run.append(view)
            offset = end = end + view.nbytes
            if end - start == max_bytes:  # at once, so that its memory can be freed
                yield start, run
                run = []
    if run:
        yield start, run


def bundles(runs: Iterable[Run], max_bytes: int) -> Iterator[list[Run]]:
    """Group small runs into bundles of about ``max_bytes``, each enough work for a thread."""
    bundle, held = list[Run](), 0
    for run in runs:
        bundle.append(run)
        held += sum(view.nbytes for view in run[1])
        if held >= max_bytes:
            yield bundle
            bundle, held = [], 0
    if bundle:
        yield bundle


def advance(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Drop the first ``done`` bytes of some views."""
    for position, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[position + 1 :]]
        done -= view.nbytes
    return []


def copy_into(destination: memoryview, source: Any) -> None:
    """Copy bytes of equal length, without the interpreter lock."""
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))
