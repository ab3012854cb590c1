"""What torch's own storage says of itself, as records of ours; and records inside plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

__all__ = ["StorageInfo", "StoragePrefix", "inside"]


def _texts(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


@attrs.frozen
class StorageInfo:
    """Where torch's writers put one chunk.

    Attributes:
        relative_path: The file.
        offset: Where the chunk starts in it, in bytes.
        length: How many bytes it takes there.
        transform_descriptors: What its bytes went through; None for nothing.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_texts)
    )


@attrs.frozen
class StoragePrefix:
    """How the names of the files begin that torch's writers make for one rank."""

    prefix: str


def inside(value: Any, table: Mapping[type, Callable[[Any], Any]]) -> Any:
    """Convert all records inside plain data."""
    if type(value) in table:
        return table[type(value)](value)
    if isinstance(value, Mapping):
        return {inside(k, table): inside(v, table) for k, v in value.items()}
    return tuple(inside(v, table) for v in value) if type(value) in (list, tuple) else value
