"""The oracles that ship: they accept what is right and name what is wrong, in both frames."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    Chunk,
    LoadPlan,
    SavePlan,
    TensorSpec,
    cast,
    chain,
    dedup_replicas,
    drop,
    global_plan,
    load_plan,
    local_plan,
    pad,
    permute,
    rename,
    reshape,
    split,
    split_replicas,
    stack,
    trim,
)
from shardplan.planning.strategies import (
    assert_accounted,
    assert_all_saved,
    assert_read_once,
    assert_written_once,
    filled,
    framings,
    save_plans,
    trace_reads,
    written,
)
from shardplan.planning.testing.frames import framed

TENSORS = {"x.0": TensorSpec((4, 6)), "x.1": TensorSpec((4, 6)), "w": TensorSpec((6, 4)), "v": None}
STEPS = [
    permute("x.*", (1, 0), required=False),
    split("w", ["a.0", "a.1"], required=False),
    stack("a.#", into="a", required=False),
    reshape("x.*", (2, 12), required=False),
    pad("x.0", axis=1, to=15, required=False),
    trim("x.1", axis=0, to=1, required=False),
    cast("float16"),
    drop("v", required=False),
    rename({"w": "u"}, required=False),
    split_replicas(16),
]


@given(save_plans(tensors=TENSORS), st.sets(st.sampled_from(range(len(STEPS)))))
def test_what_planners_make_is_accepted(plans, chosen):
    steps = [STEPS[number] for number in sorted(chosen)]
    passes = [step for step in steps if step != split_replicas(16)]
    done, metadata = global_plan(plans, [*steps, dedup_replicas()])
    assert ("v" in assert_all_saved(plans, done)) <= (drop("v", required=False) in steps)
    assert_written_once(done, metadata)
    targets = chain(*passes)(plans)
    assert_accounted(targets)
    for rank, target in enumerate(targets):
        assert_read_once(metadata, target, load_plan(metadata, target), rank=rank)


@given(st.data(), save_plans(tensors={"w": TensorSpec((4, 6))}))
def test_any_framing_is_followed_element_by_element(data, plans):
    framing = data.draw(framings((4, 6)))
    changed = [framed(plan, {"w": framing}) for plan in plans]
    done, metadata = global_plan(changed)
    assert assert_all_saved(plans, done) == ()
    for plan in changed:
        reads = load_plan(metadata, plan)
        assert_read_once(metadata, plan, reads)
        trace = trace_reads(metadata, plan, reads)
        elements = {(shard, element) for shard, places in trace.items() for element in places}
        assert len(elements) == sum(map(len, trace.values()))


def shapes(step, **sd):
    """Return the plans before and after a pass, the checkpoint, and the reads, of one rank."""
    plan = local_plan(sd)
    done, metadata = global_plan([plan], step)
    (target,) = step((plan,))
    return plan, done, metadata, target, load_plan(metadata, target)


def test_a_box_that_is_made_of_another_than_it_says_is_found():
    plan, (done,), *_ = shapes(split("w", ["a", "b"]), w=TensorSpec((4, 2)))
    first, second = done.items
    twice = SavePlan([first, attrs.evolve(second, source_box=first.source_box)])
    with pytest.raises(AssertionError, match=r"`w` of rank 0: element \(0, 0\) is written 2 times"):
        assert_all_saved([plan], [twice])
    with pytest.raises(AssertionError, match=r"element \(2, 0\) is not written, though others are"):
        assert_all_saved([plan], [SavePlan([first])])


def test_what_is_trimmed_is_accounted_for_and_what_is_forgotten_is_not():
    plan = local_plan({"w": TensorSpec((4, 2))})
    (trimmed,) = trim("w", axis=0, to=3)((plan,))
    assert assert_all_saved([plan], [trimmed]) == ()
    with pytest.raises(AssertionError, match=r"element \(3, 0\) is not written"):
        assert_all_saved([plan], [attrs.evolve(trimmed, left_out=None)])
    everything = attrs.evolve(trimmed, items=[], left_out=plan.items)
    assert assert_all_saved([plan], [everything]) == ("w",)


def test_padding_is_made_of_nothing_and_fills_nothing():
    plan, done, metadata, target, reads = shapes(pad("w", axis=0, to=6), w=TensorSpec((4,)))
    assert assert_all_saved([plan], done) == ()
    (elements,) = trace_reads(metadata, target, reads).values()
    assert sorted(elements) == [(0,), (1,), (2,), (3,)]


def test_a_read_in_the_wrong_order_of_axes_is_found():
    *_, metadata, target, reads = shapes(permute("w", (1, 0)), w=TensorSpec((2, 2)))
    assert_read_once(metadata, target, reads)
    wrong = LoadPlan([attrs.evolve(read, axes=None) for read in reads.items])
    with pytest.raises(AssertionError, match=r"element \(1, 0\) .* is read from \(1, 0\) of `w`"):
        assert_read_once(metadata, target, wrong)


def test_a_read_into_the_wrong_box_is_found():
    *_, metadata, target, reads = shapes(split("w", ["a", "b"]), w=TensorSpec((4,)))
    first, second = reads.items
    moved = attrs.evolve(second, dest_offsets=first.dest_offsets)
    with pytest.raises(AssertionError, match=r"element \(0,\) .* is read 2 times"):
        assert_read_once(metadata, target, [first, moved])


def test_numbers_are_written_and_filled():
    whole = {"w": np.arange(8).reshape(4, 2)}
    plan, done, _, target, reads = shapes(permute("w", (1, 0)), w=TensorSpec((4, 2), "int64"))
    saved = written(done, whole)
    assert np.array_equal(saved["w"], whole["w"].T)
    assert np.array_equal(filled(reads, saved, plan)["w"], whole["w"])
    with pytest.raises(AssertionError, match="is wrong"):
        assert_accounted([attrs.evolve(target, items=[*target.items, *target.items])])


def test_the_elements_of_a_chunk_lie_in_the_state_dict_s_shard():
    plan = local_plan({"w": TensorSpec((4,))})
    (item,) = plan.items
    stray = attrs.evolve(item, source=attrs.evolve(item.source, offset=(2,)))
    with pytest.raises(AssertionError, match="not held"):
        assert_all_saved([plan], [SavePlan([attrs.evolve(stray, source_box=Chunk((0,), (4,)))])])
