"""Non-tensor values, as JSON that keeps their types, or as bytes in a shard file.

What JSON has no word for is an object with a single key that starts with ``$``. Values that JSON
cannot carry are stored as ``torch.save`` writes them, but only if we read that back: loading a
checkpoint never runs code. All others are refused by key. Large bytes are stored as they are,
without a copy.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from .errors import FormatError, ValueRefusedError

RAW: Final[dict[str, type[bytes] | type[bytearray]]] = {"bytes": bytes, "bytearray": bytearray}
"""The kinds of values that are stored as they are, and their types."""
_INLINE_LIMIT: Final = 1 << 16  # bytes in the manifest; what is larger goes into a shard file
_PLAIN_INT: Final = 1 << 63
_NUMPY_KINDS: Final = "biufc"
_DEPTH: Final = 8  # how deep an error looks inside a value for the part that cannot be stored


@attrs.frozen
class StoredValue:
    """A value as it is stored."""

    # ``"inline"``: JSON data in the manifest; ``"json"``: JSON text in a shard file; ``"torch"``:
    # what `torch.save` writes, in a shard file; ``"bytes"`` and ``"bytearray"``: the value itself,
    # in a shard file.
    kind: str
    data: Any  # the JSON data, or the bytes


def store_values(values: Mapping[str, Any]) -> dict[str, StoredValue]:
    """Encode every value; if some cannot be, refuse them all at once, by key.

    >>> store_values({"step": 7, "betas": (0.9, 0.99)})["betas"]
    StoredValue(kind='inline', data={'$tuple': [0.9, 0.99]})
    """
    stored, refused = sort_values(values)
    if refused:
        raise ValueRefusedError(refused)
    return stored


def sort_values(values: Mapping[str, Any]) -> tuple[dict[str, StoredValue], dict[str, str]]:
    """Return the encoded values, and by key the reason why others cannot be encoded."""
    found = {key: _store(value) for key, value in values.items()}
    refused = {key: _refusal(values[key]) for key, stored in found.items() if stored is None}
    return {key: stored for key, stored in found.items() if stored is not None}, refused


def load_value(stored: StoredValue, file: str, key: str) -> Any:
    """Return the value that was stored; ``file`` and ``key`` are for errors."""
    try:
        if stored.kind in RAW:
            return RAW[stored.kind](stored.data)
        if stored.kind == "torch":
            from .formats.torch_save.names import load_summed  # which few checkpoints need

            return load_summed(stored.data, file, key)[0]
        return decode_value(json.loads(stored.data) if stored.kind == "json" else stored.data)
    except FormatError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(file, f"the value of `{key}` is damaged: {str(error)[:300]}") from error


def _store(value: Any) -> StoredValue | None:
    """Encode a value; None if that cannot be done safely."""
    kind = type(value)
    if kind in RAW.values() and len(value) > _INLINE_LIMIT:
        return StoredValue(kind.__name__, value)
    try:
        data = encode_value(value)
    except (_Unfit, RecursionError):
        data = _torch_bytes(value)
        return None if data is None else StoredValue("torch", data)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if len(text) > _INLINE_LIMIT:
        return StoredValue("json", text.encode("ascii"))
    return StoredValue("inline", data)


def _torch_bytes(value: Any) -> bytes | None:
    """Return a value as torch saves it; None if we could not load that safely."""
    from .formats.torch_save.write import dump_value

    try:
        return dump_value(value)
    except Exception:  # classes may raise anything when pickled
        return None


def _refusal(value: Any) -> str:
    """Return which part of a value cannot be stored, and why."""
    way, culprit = _culprit(value)
    name = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
    article = "an" if name[0] in "aeiou" else "a"
    what = f"holds {article} {name} at {way}" if way else f"is {article} {name}"
    return (
        f"{what}, which cannot be loaded without running code; save plain values or tensors "
        "instead, or open it with register_node"
    )


def _culprit(value: Any, way: str = "", depth: int = 0) -> tuple[str, Any]:
    """Return the path to the first part of a value that cannot be stored, and the part."""
    inner: Iterable[tuple[str, Any]] = ()
    if depth < _DEPTH and type(value) is dict:
        inner = ((f"{way}[{str(k)[:40]!r}]", v) for k, v in value.items())
    elif depth < _DEPTH and type(value) in (list, tuple):
        inner = ((f"{way}[{i}]", v) for i, v in enumerate(value))
    for there, part in inner:
        if _store(part) is None:
            return _culprit(part, there, depth + 1)
    return way, value


class _Unfit(TypeError):
    """A value that JSON cannot carry."""


def encode_value(value: Any) -> Any:
    """Return a value as JSON data that `decode_value` turns back into an equal one, types kept.

    Subclasses of plain types are refused, but named tuples become tuples, and other lists lists.

    >>> encode_value({"a": (1, 2.0, float("nan")), 3: b"x"})
    {'$dict': [['a', {'$tuple': [1, 2.0, {'$float': 'nan'}]}], [3, {'$bytes': 'eA=='}]]}
    """
    kind = type(value)
    if kind in (bool, str, type(None)):
        return value
    encode = _ENCODERS.get(_plain(value))
    if encode is not None:
        return encode(value)
    if isinstance(value, np.complex128) or (
        isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS and value.itemsize <= 8
    ):
        return {"$numpy": [value.dtype.name, _text(value.tobytes())]}
    raise _Unfit(f"is a {kind.__name__}")


def _plain(value: Any) -> type:
    """Return the type of a value after loading: lists and named tuples lose their subclass."""
    if isinstance(value, list):
        return list
    return tuple if isinstance(value, tuple) and hasattr(value, "_fields") else type(value)


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    if all(type(k) is str and not k.startswith("$") for k in value):
        return {k: encode_value(v) for k, v in value.items()}
    return {"$dict": [[encode_value(k), encode_value(v)] for k, v in value.items()]}


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _encode_set(value: set[Any] | frozenset[Any]) -> list[Any]:
    return sorted(map(encode_value, value), key=json.dumps)


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


_ENCODERS: Final[dict[type, Callable[[Any], Any]]] = {
    int: lambda v: v if abs(v) < _PLAIN_INT else {"$int": hex(v)},
    float: _encode_float,
    complex: lambda v: {"$complex": [_encode_float(v.real), _encode_float(v.imag)]},
    bytes: lambda v: {"$bytes": _text(v)},
    bytearray: lambda v: {"$bytearray": _text(v)},
    dict: _encode_dict,
    list: lambda v: [encode_value(x) for x in v],
    tuple: lambda v: {"$tuple": [encode_value(x) for x in v]},
    set: lambda v: {"$set": _encode_set(v)},
    frozenset: lambda v: {"$frozenset": _encode_set(v)},
    range: lambda v: {"$range": [v.start, v.stop, v.step]},
}


def _decode_numpy(body: Any) -> Any:
    dtype = np.dtype(body[0])
    if dtype.kind not in _NUMPY_KINDS or len(data := _bytes(body[1])) != dtype.itemsize:
        raise ValueError(f"not a numpy scalar: {str(body)[:80]}")
    return np.frombuffer(data, dtype)[0]


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$int": lambda body: int(body, 16),
    "$float": float,
    "$complex": lambda body: complex(decode_value(body[0]), decode_value(body[1])),
    "$bytes": _bytes,
    "$bytearray": lambda body: bytearray(_bytes(body)),
    "$tuple": lambda body: tuple(map(decode_value, body)),
    "$set": lambda body: set(map(decode_value, body)),
    "$frozenset": lambda body: frozenset(map(decode_value, body)),
    "$range": lambda body: range(*body),
    "$dict": lambda body: {decode_value(k): decode_value(v) for k, v in body},
    "$numpy": _decode_numpy,
}


def decode_value(data: Any) -> Any:
    """Return the value that `encode_value` was given."""
    if isinstance(data, list):
        return [decode_value(v) for v in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data)) if len(data) == 1 else ""
    if not tag.startswith("$"):
        return {k: decode_value(v) for k, v in data.items()}
    if tag not in _DECODERS:
        raise ValueError(f"unknown tag {tag!r}; was it written by a newer version?")
    return _DECODERS[tag](data[tag])
