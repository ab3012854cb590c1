"""Arrangements of axes, cell by cell against numpy on tensors that number their elements."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.planning.geometry.axes import (
    MAX_CUTS,
    Axes,
    Cut,
    canonical,
    composed,
    cut,
    cut_source,
    inverted,
    parts,
    permuted,
    reshaped,
)

SIDES = st.integers(1, 4)


def tensor(shape):
    return np.arange(math.prod(shape)).reshape(shape)


def boxed(array, offsets, sizes):
    return array[(*(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)), ...)]


def arranged(box, axes, sizes):
    """What becomes of a box, as the definition says."""
    if axes is None:
        assert box.shape == tuple(sizes)
        return box
    return box.reshape(axes.split).transpose(axes.order).reshape(sizes)


def merged(draw, sizes):
    """Multiply random runs of neighbouring sizes, and put sizes of 1 between them."""
    shape = []
    for size in sizes:
        if shape and draw(st.booleans()):
            shape[-1] *= size
        else:
            shape += [1] * draw(st.integers(0, 1)) + [size]
    return tuple(shape)


@st.composite
def arrangements(draw, min_digits=0):
    """A split, an order, and the sizes of two boxes whose axes are made of its parts."""
    split = draw(st.lists(SIDES, min_size=min_digits, max_size=5))
    order = draw(st.permutations(range(len(split))))
    return split, order, merged(draw, split), merged(draw, [split[part] for part in order])


@st.composite
def sub_boxes(draw, shape):
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple(offsets), tuple(
        draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)
    )


def check_cuts(cuts, source, target, wanted):
    """Every cut says which elements become which; together they hold the wanted ones once."""
    seen = []
    for one in cuts:
        assert one.axes is None or one.axes == canonical(
            one.axes.split, one.axes.order, one.box_sizes, one.chunk_sizes
        )
        box = boxed(source, one.box_offsets, one.box_sizes)
        chunk = boxed(target, one.chunk_offsets, one.chunk_sizes)
        assert (arranged(box, one.axes, one.chunk_sizes) == chunk).all()
        parts(one.axes, one.box_sizes, one.chunk_sizes)  # there are common parts
        seen += box.ravel().tolist()
    assert sorted(seen) == sorted(wanted.ravel().tolist())


@given(arrangements())
def test_the_canonical_form_means_the_same(case):
    split, order, box, chunk = case
    source = tensor(box)
    wanted = source.reshape(split).transpose(order).reshape(chunk)
    assert (arranged(source, canonical(split, order, box, chunk), chunk) == wanted).all()


@given(arrangements(), arrangements())
def test_equal_arrangements_are_equal_values(one, other):
    """However an arrangement is written, the values agree exactly if the elements do."""
    for case in (one, other):
        split, order, box, chunk = case
        axes = canonical(split, order, box, chunk)
        if axes is not None:
            assert canonical(axes.split, axes.order, box, chunk) == axes
            refined = parts(axes, box, chunk)
            assert canonical(refined.split, refined.order, box, chunk) == axes
    (split, order, box, chunk), (split2, order2, _, _) = one, other
    if math.prod(split2) == math.prod(split):
        same = (
            tensor(box).reshape(split).transpose(order).ravel()
            == tensor(box).reshape(split2).transpose(order2).ravel()
        ).all()
        assert same == (
            canonical(split, order, box, chunk) == canonical(split2, order2, box, chunk)
        )


@given(arrangements())
def test_the_inverse_leads_back(case):
    split, order, box, chunk = case
    axes = canonical(split, order, box, chunk)
    back = inverted(axes)
    there = arranged(tensor(box), axes, chunk)
    assert (arranged(there, back, box) == tensor(box)).all()
    if back is not None:
        assert canonical(back.split, back.order, chunk, box) == back


@given(arrangements())
def test_parts_are_views_of_strided_memory(case):
    split, order, box, chunk = case
    axes = canonical(split, order, box, chunk)
    refined = parts(axes, box, chunk)
    held = np.zeros([2 * n for n in box])[(*(slice(0, 2 * n, 2) for n in box), ...)]
    saved = np.zeros([2 * n for n in chunk])[(*(slice(0, 2 * n, 2) for n in chunk), ...)]
    assert np.shares_memory(held, held.reshape(refined.split))
    assert np.shares_memory(saved, saved.reshape(refined.ordered))
    numbers = tensor(box)
    moved = numbers.reshape(refined.split).transpose(refined.order).reshape(chunk)
    assert (moved == arranged(numbers, axes, chunk)).all()


@given(st.data())
def test_a_cut_holds_each_element_of_a_sub_box_once(data):
    split, order, box, chunk = data.draw(arrangements())
    offsets, sizes = data.draw(sub_boxes(chunk))
    axes = canonical(split, order, box, chunk)
    target = arranged(tensor(box), axes, chunk)
    cuts = cut(axes, box, chunk, offsets, sizes)
    check_cuts(cuts, tensor(box), target, boxed(target, offsets, sizes))
    if sizes == chunk:
        assert len(cuts) == 1


@given(st.data())
def test_a_cut_from_the_source_holds_each_element_of_a_sub_box_once(data):
    split, order, box, chunk = data.draw(arrangements())
    offsets, sizes = data.draw(sub_boxes(box))
    axes = canonical(split, order, box, chunk)
    target = arranged(tensor(box), axes, chunk)
    cuts = cut_source(axes, box, chunk, offsets, sizes)
    check_cuts(cuts, tensor(box), target, boxed(tensor(box), offsets, sizes))


@given(st.data())
def test_permuting_the_chunk_is_numpys(data):
    split, order, box, chunk = data.draw(arrangements())
    axes = canonical(split, order, box, chunk)
    further = data.draw(st.permutations(range(len(chunk))))
    target = arranged(tensor(box), axes, chunk).transpose(further)
    after = permuted(axes, box, chunk, further)
    assert (arranged(tensor(box), after, target.shape) == target).all()


FACTORS = st.lists(st.sampled_from([2, 3, 4]), max_size=4)


@given(st.data())
def test_any_reshape_is_cut_into_boxes(data):
    factors = data.draw(FACTORS)
    before = merged(data.draw, factors)
    after = merged(data.draw, data.draw(st.permutations(factors)))
    cuts = reshaped(before, after)
    check_cuts(cuts, tensor(before), tensor(after), tensor(before))


@given(st.data())
def test_merging_and_parting_axes_needs_no_cut(data):
    factors = data.draw(FACTORS)
    assert len(reshaped(merged(data.draw, factors), merged(data.draw, factors))) == 1


@given(st.data())
@settings(deadline=None)
def test_joining_is_one_arrangement_after_the_other(data):
    """Boxes anywhere in their frames, whose middle ones overlap in some box."""
    factors = data.draw(st.lists(st.sampled_from([2, 3]), max_size=3))
    cases = []
    for _ in range(2):
        split = data.draw(st.permutations(factors))
        order = data.draw(st.permutations(range(len(split))))
        cases.append((split, order, [split[part] for part in order]))
    middle = merged(data.draw, cases[0][2])
    source = merged(data.draw, cases[0][0])
    first = canonical(*cases[0][:2], source, middle)
    low, sizes = data.draw(sub_boxes(middle))
    numel = math.prod(sizes)
    split = data.draw(st.sampled_from([(numel,), sizes]))
    order = data.draw(st.permutations(range(len(split))))
    target = merged(data.draw, [split[part] for part in order])
    second = canonical(split, order, sizes, target)
    here, there = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    between = arranged(tensor(source), first, middle)
    inner = arranged(boxed(between, low, sizes), second, target)
    after = np.zeros([n + there for n in target], int)
    after[(*(slice(there, None) for _ in target), ...)] = inner
    found = composed(
        Cut((0,) * len(source), source, first, (here,) * len(middle), middle),
        Cut(tuple(o + here for o in low), sizes, second, (there,) * len(target), target),
    )
    check_cuts(found, tensor(source), after, boxed(between, low, sizes))


def test_the_rotary_order_of_whole_heads_is_one_box():
    """Reshape (heads, 2, d/2, dim), permute (0, 2, 1, 3): one box for each shard of whole heads."""
    heads, width, dim = 4, 6, 5
    split = canonical((heads, 2, width // 2, dim), (0, 2, 1, 3), (24, 5), (24, 5))
    assert split == Axes((4, 2, 3, 5), (0, 2, 1, 3))
    assert len(cut(split, (24, 5), (24, 5), (6, 0), (12, 5))) == 1
    assert len(cut(split, (24, 5), (24, 5), (0, 2), (24, 3))) == 1
    assert len(cut(split, (24, 5), (24, 5), (6, 0), (9, 5))) == 4  # half a head: row by row


def test_arrangements_without_elements_are_trivial():
    assert canonical((0, 3), (1, 0), (0, 3), (3, 0)) == Axes((0,), (0,))
    assert canonical((1, 1), (1, 0), (1, 1), (1,)) == Axes((), ())
    assert cut(Axes((0,), (0,)), (0, 3), (3, 0), (0, 0), (3, 0))[0].box_sizes == (0, 3)
    assert reshaped((0, 3), (3, 0)) == (Cut((0, 0), (0, 3), Axes((0,), (0,)), (0, 0), (3, 0)),)


def test_too_many_boxes_are_refused():
    side = MAX_CUTS + 1
    with pytest.raises(ValueError, match="the most is 65,536"):
        reshaped((side, side + 1), (side + 1, side))
    with pytest.raises(ValueError, match="no common parts"):
        parts(Axes((24,), (0,)), (6, 4), (4, 6))
    with pytest.raises(ValueError, match="not an order"):
        Axes((2, 3), (1, 1))
    with pytest.raises(ValueError, match="do not fit"):
        canonical((2, 3), (0, 1), (2, 3), (5,))
