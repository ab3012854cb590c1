"""Dtypes by name: widths and exact casts, checked against torch's own casts."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch

from shardplan.planning import dtype_name, is_exact_cast, itemsize
from shardplan.planning.dtypes import ITEMSIZE

# Packed pairs have no casts in torch at all.
NAMES = [n for n in ITEMSIZE if hasattr(torch, n) and n != "float4_e2m1fn_x2"]
# Exact casts out of these (to float32, say) and into them (of bools) exist, but are not promised.
NOT_PROMISED = {"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
INTEGERS = {8: torch.uint8, 16: torch.int16}


def extreme_values(name):
    """Every value of a narrow dtype; the largest, smallest and odd values of a wide one."""
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.tensor([False, True])
    if dtype.is_complex:
        real = extreme_values({4: "float16", 8: "float32", 16: "float64"}[dtype.itemsize])
        parts = real.to(torch.float64)
        return torch.complex(parts, parts.flip(0)).to(dtype)
    bits = 8 * dtype.itemsize
    if bits <= 16:
        every = torch.arange(-(1 << 15), 1 << 15) if bits == 16 else torch.arange(256)
        return every.to(INTEGERS[bits]).view(dtype)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        near = {s * (1 << k) + d for k in range(64) for s in (1, -1) for d in (-1, 0, 1)}
        return torch.tensor([v for v in sorted(near) if info.min <= v <= info.max], dtype=dtype)
    info = torch.finfo(dtype)
    low = math.ldexp(1.0, -1074 if bits == 64 else -149)
    values = [0.0, 1.0, 1.0 + info.eps, 1.0 - info.eps / 2, info.max, info.tiny, low, math.pi]
    values += [math.inf, math.nan, 16777217.0, 0.1]
    return torch.tensor([s * v for v in values for s in (1, -1)], dtype=dtype)


def numbers(tensor):
    """The values as Python numbers, exactly."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).tolist()
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64).tolist()
    return [int(v) for v in tensor.tolist()]


def is_same(a, b):
    a, b = complex(a) if a != a else a, complex(b) if b != b else b
    if a == b:
        return True
    if not (isinstance(a, complex) and isinstance(b, complex)):
        return False
    parts = ((a.real, b.real), (a.imag, b.imag))
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in parts)


def survives(source, target):
    values = extreme_values(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that imaginary parts go, as they should
        cast = values.to(getattr(torch, target))
    return all(map(is_same, numbers(values), numbers(cast)))


@pytest.mark.parametrize("source", NAMES)
def test_a_cast_is_called_exact_exactly_where_torch_keeps_every_value(source):
    said = {target for target in NAMES if is_exact_cast(source, target)}
    kept = {target for target in NAMES if survives(source, target)}
    assert said <= kept
    if source not in NOT_PROMISED:
        assert kept - said <= NOT_PROMISED


def test_exact_casts_compose():
    for a, b, c in itertools.product(ITEMSIZE, repeat=3):
        if is_exact_cast(a, b) and is_exact_cast(b, c):
            assert is_exact_cast(a, c), (a, b, c)


@pytest.mark.parametrize("name", ITEMSIZE)
def test_widths_are_those_of_torch(name):
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    assert itemsize(name) == getattr(torch, name).itemsize
    assert dtype_name(getattr(torch, name)) == name


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.uint16, np.float16, np.complex128])
def test_numpy_dtypes_and_their_classes_have_the_same_name(kind):
    assert (
        dtype_name(kind) == dtype_name(np.dtype(kind)) == dtype_name(np.dtype(kind).newbyteorder())
    )


def test_a_cast_that_loses_a_digit_is_not_exact():
    assert torch.tensor(16777217, dtype=torch.int32).to(torch.float32).item() != 16777217
    assert not is_exact_cast("int32", "float32")
    assert is_exact_cast("int32", "float64")


@pytest.mark.parametrize("wrong", ["float33", "str", object, np.dtype("U3"), np.longdouble])
def test_other_dtypes_are_refused_with_those_that_are_known(wrong):
    with pytest.raises(ValueError, match=r"unknown dtype .*; known are bfloat16, bool"):
        dtype_name(wrong)
