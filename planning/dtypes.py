"""Dtypes by name: their width, and whether a cast keeps every value.

Records hold names (``"bfloat16"``); functions that take a dtype also accept torch's and numpy's,
without importing torch. The names are torch's, which equal numpy's where both have the type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from .errors import nearest_hint, nearest_names

Dtype = str | Any
"""A dtype as users write it: ``"bfloat16"``, ``torch.bfloat16`` or ``np.dtype("float32")``."""


class _Kind(NamedTuple):
    itemsize: int  # bytes per element
    family: str  # the kind of number
    bits: int  # the exact bits: the mantissa, or an integer's width
    reach: int  # the power of two above the largest finite value


_TABLE: Final = {
    name: _Kind(*row)
    for name, row in {
        "bool": (1, "bool", 1, 1),
        "uint8": (1, "uint", 8, 8),
        "uint16": (2, "uint", 16, 16),
        "uint32": (4, "uint", 32, 32),
        "uint64": (8, "uint", 64, 64),
        "int8": (1, "int", 7, 7),
        "int16": (2, "int", 15, 15),
        "int32": (4, "int", 31, 31),
        "int64": (8, "int", 63, 63),
        "float8_e4m3fn": (1, "float", 4, 9),
        "float8_e4m3fnuz": (1, "float8fnuz", 4, 8),
        "float8_e5m2": (1, "float", 3, 16),
        "float8_e5m2fnuz": (1, "float8fnuz", 3, 16),
        "float8_e8m0fnu": (1, "scale", 1, 128),
        "float4_e2m1fn_x2": (1, "packed", 2, 3),
        "float16": (2, "float", 11, 16),
        "bfloat16": (2, "float", 8, 128),
        "float32": (4, "float", 24, 128),
        "float64": (8, "float", 53, 1024),
        "complex32": (4, "complex", 11, 16),
        "complex64": (8, "complex", 24, 128),
        "complex128": (16, "complex", 53, 1024),
    }.items()
}
# The families that can hold all numbers of a family, given enough bits.
_HOMES: Final = {
    "bool": ("uint", "int", "float", "complex"),
    "uint": ("uint", "int", "float", "complex"),
    "int": ("int", "float", "complex"),
    "float": ("float", "complex"),
    "complex": ("complex",),
}
_ALIASES: Final[dict[str, str]] = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}
ITEMSIZE: Final[dict[str, int]] = {name: kind.itemsize for name, kind in _TABLE.items()}


def dtype_name(dtype: Dtype) -> str:
    """Return the name of a torch dtype, a numpy dtype or a name.

    >>> dtype_name("torch.bfloat16"), dtype_name("half")
    ('bfloat16', 'float16')
    >>> import numpy as np
    >>> dtype_name(np.dtype("<f4")), dtype_name(np.int64)
    ('float32', 'int64')

    Raises:
        ValueError: No checkpoint can hold that dtype.
        TypeError: It is not a dtype at all.
    """
    try:
        return _known_name(dtype)
    except TypeError:  # not hashable, or not a dtype
        return _find_name(dtype)


def _find_name(dtype: Any) -> str:
    if isinstance(dtype, (tuple, list, Mapping)) or dtype is None:
        kind = type(dtype).__name__
        raise TypeError(f"a dtype is a name (\"bfloat16\"), or torch's or numpy's; not a {kind}")
    own = getattr(dtype, "name", None) if not isinstance(dtype, str) else dtype
    name = own if isinstance(own, str) else getattr(dtype, "__name__", None) or str(dtype)
    name = name.removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _TABLE:
        hint = nearest_hint(nearest_names(name, _TABLE))
        raise ValueError(f"unknown dtype {name!r}{hint}; known are {', '.join(sorted(_TABLE))}")
    return name


_known_name: Final = lru_cache(maxsize=None)(_find_name)  # there are few dtypes


def itemsize(dtype: Dtype) -> int:
    """Return the bytes that one element takes.

    >>> itemsize("bfloat16")
    2
    """
    try:
        return ITEMSIZE[dtype]
    except (KeyError, TypeError):
        return ITEMSIZE[dtype_name(dtype)]


def family(dtype: Dtype) -> str:
    """Return the kind of number of a dtype, such as "float", "int" or "scale"."""
    return _TABLE[dtype_name(dtype)].family


def is_exact_cast(source: Dtype, target: Dtype) -> bool:
    """Return True if every value of ``source`` survives a cast to ``target`` unchanged.

    >>> is_exact_cast("bfloat16", "float32"), is_exact_cast("float32", "bfloat16")
    (True, False)
    >>> is_exact_cast("int32", "float32"), is_exact_cast("int16", "float32")
    (False, True)
    """
    source, target = dtype_name(source), dtype_name(target)
    if source == target:
        return True
    have, wanted = _TABLE[source], _TABLE[target]
    fits = have.bits <= wanted.bits and have.reach <= wanted.reach
    return fits and wanted.family in _HOMES.get(have.family, ())


def can_hold(dtype: Dtype, value: float) -> bool:
    """Return True if a tensor can be filled with a value, at most rounded.

    >>> can_hold("uint8", 255), can_hold("uint8", -1), can_hold("int64", 0.5)
    (True, False, False)
    >>> can_hold("bfloat16", 0.1), can_hold("float16", 1e6)
    (True, False)
    """
    kind = _TABLE[dtype_name(dtype)]
    if kind.family in ("bool", "uint", "int"):
        low = -(1 << kind.bits) if kind.family == "int" else 0
        return isinstance(value, int) and low <= value < 1 << kind.bits
    if math.isinf(value):
        return kind.family in ("float", "complex") and kind.itemsize > 1
    return (
        kind.family in ("float", "float8fnuz", "complex")
        and abs(value) < 2.0 ** (kind.reach - 1) * 2
    )
