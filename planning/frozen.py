"""Immutable values: frozen dicts, and plain data as JSON that keeps its types."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final, TypeVar

from .errors import CodecError

K = TypeVar("K")
V = TypeVar("V")

SCALARS: Final = frozenset((str, int, float, bool, bytes, type(None)))
"""The most common types of values, none of which can change."""


class FrozenDict(Mapping[K, V]):
    """An immutable, hashable mapping. Equal to any mapping of the same items.

    >>> FrozenDict({"a": [1, 2]})
    FrozenDict({'a': (1, 2)})
    >>> FrozenDict({"a": 1, "b": 2}) == {"b": 2, "a": 1}
    True
    """

    __slots__ = ("_dict", "_hash")
    _dict: dict[K, V]
    _hash: int

    def __init__(self, items: Mapping[K, V] | Sequence[tuple[K, V]] = ()) -> None:
        frozen = {freeze(key): freeze(value) for key, value in dict(items).items()}
        object.__setattr__(self, "_dict", frozen)

    @classmethod
    def of_frozen(cls, items: dict[K, V]) -> FrozenDict[K, V]:
        """Wrap a dict of immutable keys and values, which the caller gives up."""
        made: FrozenDict[K, V] = cls.__new__(cls)
        object.__setattr__(made, "_dict", items)
        return made

    def __setattr__(self, name: str, value: object = None) -> None:
        raise AttributeError("a FrozenDict cannot change; make a new one from dict(this)")

    __delattr__ = __setattr__

    def __getitem__(self, key: K) -> V:
        return self._dict[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(frozenset(self.items())))
            return self._hash

    def __repr__(self) -> str:
        return f"FrozenDict({self._dict!r})"

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return ``value`` with every list, set and dict inside it replaced by an immutable one.

    >>> freeze({"a": [1, {2}]})
    FrozenDict({'a': (1, frozenset({2}))})
    """
    kind = type(value)
    if kind in SCALARS or isinstance(value, (str, bytes, int, float, FrozenDict)):
        return value
    if kind is tuple or isinstance(value, list):
        return tuple([v if type(v) in SCALARS else freeze(v) for v in value])
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (set, frozenset)):
        return frozenset(freeze(v) for v in value)
    if isinstance(value, Mapping):
        return FrozenDict(dict(value))
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return freeze(value.tolist())  # an array or a numpy scalar
    return value


def to_json(value: Any, where: str = "value") -> Any:
    """Return frozen data as plain JSON data that `from_json` decodes to an equal value.

    Tuples become arrays and string-keyed mappings become objects; types that JSON lacks are objects
    with a single key that starts with ``$``.

    >>> to_json((1, 2.5, b"x", {3: None}))
    [1, 2.5, {'$bytes': 'eA=='}, {'$map': [[3, None]]}]

    Raises:
        CodecError: ``value`` contains another type; the message starts with ``where``.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (tuple, list)):
        return [to_json(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: to_json(v, f"{where}[{k!r}]") for k, v in value.items()}
        pairs = [[to_json(k, where), to_json(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {"$map": sorted(pairs, key=json.dumps)}
    if isinstance(value, Set):
        return {"$set": sorted((to_json(v, where) for v in value), key=json.dumps)}
    raise CodecError(
        f"{where} is a {type(value).__name__}, which has no safe encoding; "
        "use None, bool, int, float, str, bytes, tuples, sets and dicts of these"
    )


def from_json(data: Any) -> Any:
    """Return the frozen value that `to_json` was given."""
    if isinstance(data, list):
        return tuple([v if type(v) in SCALARS else from_json(v) for v in data])
    if not isinstance(data, dict):
        return data
    tag = next(iter(data)) if len(data) == 1 else ""
    if not tag.startswith("$"):
        return FrozenDict.of_frozen({k: from_json(v) for k, v in data.items()})
    body = data[tag]
    match tag:
        case "$float":
            return float(body)
        case "$bytes":
            return base64.b64decode(body, validate=True)
        case "$map":
            return FrozenDict.of_frozen({from_json(k): from_json(v) for k, v in body})
        case "$set":
            return frozenset(from_json(v) for v in body)
    raise CodecError(f"unknown tag {tag!r} in encoded data; was it written by a newer version?")
