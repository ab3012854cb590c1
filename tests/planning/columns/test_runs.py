"""Columns as text: any comes back, regular ones are short, nothing small becomes large."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning.columns import decode_columns, decode_runs, encode_runs

numbers = st.integers(0, 1 << 59)
small = st.integers(0, 12)
steps = st.integers(-9, 9)


@st.composite
def regular(draw, depth=3):
    """Return a column as nested runs, some of them broken up by single numbers."""
    if not depth:
        return [draw(small)]
    inner, count, step = draw(regular(depth - 1)), draw(st.integers(1, 7)), draw(steps)
    block = [n + step * i for i in range(count) for n in inner]
    return [*draw(st.lists(small, max_size=2)), *block, *draw(st.lists(small, max_size=2))]


def through_text(values):
    text = json.dumps(encode_runs(np.array(values, np.int64)))
    return decode_runs(json.loads(text), len(values)).tolist(), text


@given(st.lists(numbers, max_size=40) | st.lists(small, max_size=60) | regular())
def test_every_column_comes_back_and_is_no_longer_than_its_list(values):
    found, text = through_text(values)
    assert found == values
    assert len(text) <= len(json.dumps(values)) + 2


def reference(parts):
    """Do what the format's page says, in as few words as it does."""
    found = []
    for part in parts:
        if isinstance(part, int):
            found.append(part)
            continue
        inner, count, step = part
        block = [inner] if isinstance(inner, int) else reference(inner)
        found += [number + step * turn for turn in range(count) for number in block]
    return found


@given(regular())
def test_a_plain_reader_reads_the_same(values):
    assert reference(encode_runs(np.array(values, np.int64))) == values


@pytest.mark.parametrize(
    "values",
    [
        np.arange(16_384),
        np.arange(16_384).reshape(2048, 8).T.reshape(-1),
        np.arange(16_384).reshape(16, 128, 8).transpose(2, 0, 1).reshape(-1),
        np.zeros(16_384, int),
        np.cumsum(np.arange(16_384) % 3 + 5),
        np.minimum(np.arange(16_385) * 8, 128_256),
    ],
    ids=["ranks", "tensor parallel", "three axes", "one file", "uneven", "a short end"],
)
def test_what_follows_a_rule_takes_a_few_bytes(values):
    found, text = through_text(values.tolist())
    assert found == values.tolist()
    assert len(text) < 50


@pytest.mark.parametrize(
    "parts",
    [
        7,
        None,
        "12",
        [1.0],
        [True],
        [None],
        [[1, 2]],
        [[1, 2, 3, 4]],
        [[1, 1, 0]],
        [[1, 0, 0]],
        [[1, -1, 0]],
        [[1, 2.0, 0]],
        [[1, 2, None]],
        [[[], 2, 0]],
        [[1, 11, 0]],
        [[[[1, 4, 0]], 3, 0]],
        [[1, 6, 0], [1, 5, 0]],
        [[1, 2, 1 << 70]],
        [[1, 1 << 70, 0]],
        [[1 << 62, 2, 1 << 61]],
        [1 << 64],
    ],
)
def test_what_is_no_column_or_stands_for_too_many_numbers_is_refused(parts):
    with pytest.raises((ValueError, OverflowError)):
        decode_runs(parts, 10)


def test_a_few_bytes_never_become_more_than_is_allowed():
    deep = [0]
    for _ in range(60):
        deep = [[deep, 2, 1]]
    tracemalloc.start()
    for parts in ([[0, 1 << 40, 1]], deep, [[0, 900, 0]] * 5000, [[[[0, 900, 0]], 2, 0]] * 5000):
        with pytest.raises(ValueError, match="stands for"):
            decode_runs(parts, 1000)
    with pytest.raises(ValueError, match="stands for"):
        list(decode_columns([[[0, 900, 0]]] * 5000, 1000, 5000))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_a_column_that_is_listed_is_only_as_long_as_allowed():
    with pytest.raises(ValueError, match="3 numbers, and at most 2 fit"):
        list(decode_columns([[1, 2], [1, 2, 3]], 2, 100))
