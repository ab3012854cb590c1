"""Tensors that lie otherwise in the checkpoint than in the state dict are moved whole."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    Chunk,
    Mesh,
    MetadataIndex,
    PlanError,
    SavePlan,
    TensorSpec,
    cast,
    check,
    dedup_replicas,
    explain,
    find_issues,
    global_load_plan,
    global_plan,
    load_plan,
    local_plan,
    read_on,
    share_reads,
    split_chunks,
    split_reads,
    split_replicas,
    why,
    with_replicas,
)
from shardplan.planning.geometry.axes import Axes
from shardplan.planning.sources import dropped_names, source_issues
from shardplan.planning.testing.frames import Framing, assert_accounted, filled, framed, written
from shardplan.planning.testing.strategies import framings, meshes, save_plans, shapes

SAVES = [
    [dedup_replicas()],
    [dedup_replicas(prefer="lowest_rank")],
    [split_chunks(8), dedup_replicas()],
    [split_replicas(1), dedup_replicas()],
    [split_chunks(12), split_replicas(4), dedup_replicas()],
]


@st.composite
def worlds(draw, mesh=None):
    """Draw tensors, what becomes of them, and the plans of two worlds that hold them."""
    names = st.sampled_from("abc")
    sizes = draw(st.dictionaries(names, shapes(min_dims=1, min_side=1), min_size=1))
    specs = {name: TensorSpec(shape) for name, shape in sizes.items()}
    frames = {name: draw(framings(shape)) for name, shape in sizes.items()}
    frames = {name: frame for name, frame in frames.items() if draw(st.integers(0, 3))}
    tensors = {
        name: np.arange(np.prod(shape)).reshape(shape) + 1000.0 * at
        for at, (name, shape) in enumerate(sizes.items(), 1)
    }
    plans = [draw(save_plans(tensors=specs, mesh=mesh or meshes())) for _ in range(2)]
    return tensors, frames, *plans


def expected(tensors, frames):
    made = {}
    for name, tensor in tensors.items():
        made |= frames[name].of(name, tensor) if name in frames else {name: tensor}
    return made


def all_framed(plans, frames):
    return tuple(framed(plan, frames) for plan in plans)


def held_values(plan, tensors):
    """Return what a rank's tensors hold after a load; -1 where nothing is read."""
    values = {}
    for items, is_read in ((plan.holds, True), (plan.left_out or (), False)):
        for item in items:
            name, chunk = item.source.fqn, item.tensor_data.chunk
            box = tuple(map(slice, chunk.offsets, chunk.ends))
            values.setdefault(name, np.full(tensors[name].shape, -1.0))
            values[name][box] = tensors[name][box] if is_read else -1
    return values


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


@given(worlds(), st.sampled_from(SAVES))
def test_every_element_is_saved_once_and_where_it_belongs(world, passes):
    tensors, frames, plans, _ = world
    after = all_framed(plans, frames)
    assert_accounted(after)
    assert find_issues(after) == ()
    done, metadata = global_plan(after, passes)
    assert_same(written(done, tensors), expected(tensors, frames))
    sizes = {name: entry.size for name, entry in metadata.state_dict_metadata.items()}
    assert sizes == {name: value.shape for name, value in expected(tensors, frames).items()}


@given(worlds(), st.data())
def test_every_element_is_read_once_and_from_where_it_was_saved(world, data):
    tensors, frames, plans, others = world
    _, metadata = global_plan(all_framed(plans, frames), data.draw(st.sampled_from(SAVES)))
    saved = expected(tensors, frames)
    targets = all_framed(others, frames)
    loads = tuple(load_plan(metadata, plan) for plan in targets)
    passes = data.draw(
        st.sampled_from(
            [
                [],
                [split_reads(metadata, 8)],
                [share_reads(metadata, min_bytes=1, block_bytes=16)],
                [split_reads(metadata, 12, max_gap=8), share_reads(metadata, min_bytes=1)],
                [read_on(0)],
                [lambda plans: (attrs.evolve(plans[0], items=plans[0].items[::-1]),)],
            ]
        )
    )
    for rank, load in enumerate(global_load_plan(loads, passes)):
        assert_same(filled(load, saved, targets[rank], rank), held_values(targets[rank], tensors))


@given(worlds(), st.sampled_from(SAVES))
def test_replicas_that_another_rank_writes_are_filled_on_every_rank(world, passes):
    tensors, frames, plans, _ = world
    done, metadata = global_plan(all_framed(plans, frames), passes)
    for plan in with_replicas(done):
        load = load_plan(metadata, plan)
        assert_same(filled(load, expected(tensors, frames), plan), held_values(plan, tensors))


@given(worlds(mesh=Mesh(dp=1)), st.data())
def test_a_box_that_is_lost_doubled_or_moved_is_found(world, data):
    _, frames, plans, _ = world
    plan = framed(plans[0], frames)
    at = data.draw(st.integers(0, len(plan.items) - 1))
    item, items = plan.items[at], list(plan.items)
    damage = data.draw(st.sampled_from(["lost", "doubled", "moved"]))
    if damage == "lost":
        items.pop(at)
        remain = {other.source.fqn for other in items if other.fill is None}
        if item.fill is None and item.source.fqn not in remain:
            items = [other for other in items if other.source.fqn != item.source.fqn]
            assert dropped_names([attrs.evolve(plan, items=items)]) == (item.source.fqn,)
            return
    elif damage == "doubled" and item.fill is None:
        items.append(item)
    elif item.source_box is None:  # padding may be written by any rank, as replicas are
        return
    else:
        offsets = [o + 1 for o in item.source_box.offsets]
        items[at] = attrs.evolve(item, source_box=Chunk(offsets, item.source_box.sizes))
    assert find_issues([attrs.evolve(plan, items=items)])


@given(worlds(mesh=Mesh(dp=1)))
def test_what_is_left_out_must_be_stated_and_not_be_saved_too(world):
    _, frames, plans, _ = world
    plan = framed(plans[0], frames)
    used = {item.source.fqn for item in plan.items if item.fill is None}
    if any(item.source.fqn in used for item in plan.left_out):
        assert source_issues([attrs.evolve(plan, left_out=None)])
        assert source_issues([attrs.evolve(plan, left_out=[*plan.left_out, *plan.left_out])])
    whole = [item for item in plan.items if item.fill is None and item.source_box is None][:1]
    if whole:
        assert source_issues([attrs.evolve(plan, left_out=[*plan.left_out, *whole])])


# Named cases


def turned(**options):
    frame = Framing((2, 3), (2, 3), (1, 0), (3, 2), 0, 3, keeps=False, pads=0)
    return attrs.evolve(frame, **options)


def plan_of(**frames):
    return framed(local_plan({"w": TensorSpec((2, 3))}), frames)


def test_chunks_that_are_made_of_other_boxes_are_no_replicas():
    plan = plan_of(w=turned())
    (item,) = plan.items
    fill = attrs.evolve(item, source=MetadataIndex("w"), source_box=None, axes=None, fill=1)
    for other in (fill, attrs.evolve(item, source_box=Chunk((0, 0), (3, 2)), axes=None)):
        with pytest.raises(PlanError, match=r"`w.0` stands for .* of rank 0 and .* of rank 1"):
            check([plan, SavePlan([other])])


def test_padding_that_differs_between_ranks_is_refused():
    plan = plan_of(w=turned(pads=1))
    other = [attrs.evolve(item, fill=item.fill and 8) for item in plan.items]
    with pytest.raises(PlanError, match=r"padding with 7 of rank 0 and padding with 8 of rank 1"):
        check([plan, attrs.evolve(plan, items=other)])


def test_padding_that_the_dtype_cannot_hold_is_refused():
    plan = plan_of(w=turned(pads=1))
    for fill, dtype, fits in [(-1, "uint8", False), (0.5, "int32", False), (1, "int32", True)]:
        items = [attrs.evolve(item, fill=item.fill and fill) for item in plan.items]
        after = cast({"*": dtype}, lossy=True)((attrs.evolve(plan, items=items),))
        assert [issue.kind for issue in find_issues(after)] == ([] if fits else ["lossy"])


def test_a_dropped_tensor_needs_none_of_what_was_left_out_of_it():
    plan = plan_of(w=turned(at=2))
    assert len(plan.left_out)
    gone = attrs.evolve(plan, items=[])
    assert source_issues([gone]) == []
    assert dropped_names([gone]) == ("w",)
    assert dropped_names([attrs.evolve(plan, items=plan_of(w=turned(pads=1)).items[1:])]) == ("w",)


def test_a_turned_matrix_is_read_in_one_piece_per_chunk():
    plan = plan_of(w=turned())
    _, metadata = global_plan([plan], [split_chunks(8)])
    reads = load_plan(metadata, plan).items
    assert [(r.storage_index.offset, r.lengths) for r in reads] == [
        ((i, 0), (1, 2)) for i in range(3)
    ]
    assert [(r.dest_offsets, r.dest_lengths) for r in reads] == [((0, i), (2, 1)) for i in range(3)]


def test_a_pass_that_moves_a_turned_read_is_found():
    plan = plan_of(w=turned())
    _, metadata = global_plan([plan])
    load = load_plan(metadata, plan)
    (read,) = load.items

    def astray(plans):
        square = {"lengths": (2, 2), "dest_lengths": (2, 2), "axes": Axes((2, 2), (1, 0))}
        row = {"lengths": (1, 2), "dest_lengths": (2, 1), "axes": Axes((2,), (0,))}
        parts = [
            attrs.evolve(read, **square, storage_offsets=(1, 0)),
            attrs.evolve(read, **row, dest_offsets=(0, 2)),
        ]
        return (attrs.evolve(plans[0], items=parts),)

    with pytest.raises(PlanError, match="from elsewhere"):
        global_load_plan([load], [astray])


@given(worlds())
def test_why_says_from_where_an_element_comes(world):
    tensors, frames, plans, others = world
    saved, metadata = global_plan(all_framed(plans, frames))
    loads = [load_plan(metadata, plan) for plan in all_framed(others, frames)]
    report = explain(metadata, loads, writers=saved)
    for name, value in expected(tensors, frames).items():
        for element in np.ndindex(value.shape):
            for got in why(report, name, element).reads:
                into = got.read.dest_index
                at = tuple(a + b for a, b in zip(into.offset, got.dest_offsets, strict=True))
                assert tensors[into.fqn][at] == value[element]


def test_plans_print_the_boxes_of_the_state_dict():
    plan = plan_of(w=turned(pads=1))
    assert str(plan.items and plan).splitlines()[2].split() == [
        *("w.0", "←", "w[0:2,", "0:3]", "TENSOR", "float32", "[4,", "2]", "[0:3,", "0:2]")
    ]
    assert "w.0 ← 7" in str(plan)
    _, metadata = global_plan([plan])
    assert "[3, 2] → [2, 3]" in str(load_plan(metadata, plan))
    assert explain(metadata, [plan])
