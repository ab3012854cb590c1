"""share_reads: what several ranks need is read once, and everybody still gets all of it."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    LoadPlan,
    Mesh,
    PlanError,
    Replicate,
    Shard,
    TensorSpec,
    chain,
    decode_plan,
    encode_plan,
    explain,
    global_load_plan,
    global_plan,
    load_plan,
    local_plan,
    share_reads,
    split_reads,
    world_pass,
    world_plans,
)
from shardplan.planning.testing import assert_read_once
from shardplan.planning.testing.strategies import save_plans


def worlds(specs):
    return st.tuples(save_plans(tensors=specs), save_plans(tensors=specs))


TENSORS = {"w": TensorSpec((5, 3)), "b": TensorSpec((4,), "int8"), "s": TensorSpec(()), "v": None}


def shared(saved, wanted, **options):
    metadata = global_plan(saved)[1]
    plans = tuple(load_plan(metadata, plan) for plan in wanted)
    return metadata, plans, global_load_plan(plans, share_reads(metadata, **options))


def read_cells(plans):
    """Name every saved element that is read from storage, once per read of it."""
    found = []
    for plan in plans:
        for read in plan.items:
            is_value = read.storage_index.offset is None
            start = () if is_value else np.add(read.storage_index.offset, read.storage_offsets)
            shape = () if is_value else read.lengths
            found += [
                (read.storage_index.fqn, *np.add(start, cell).tolist())
                for cell in np.ndindex(*shape)
            ]
    return found


@given(worlds(TENSORS))
def test_no_byte_is_read_from_storage_twice(pair):
    _, _, after = shared(*pair, min_bytes=1)
    # One rank may need an element in two places of its own; it is still read for both at once.
    for plan in after:
        own = LoadPlan(plan.items)
        mine, others = set(read_cells([own])), [p for p in after if p is not plan]
        assert mine.isdisjoint(read_cells(others))


@given(worlds(TENSORS))
def test_every_rank_still_gets_every_element_once(pair):
    metadata, _, after = shared(*pair, min_bytes=1)
    for rank, (plan, wanted) in enumerate(zip(after, pair[1], strict=True)):
        received = [t.read for t in plan.transfers if t.target == rank]
        assert_read_once(metadata, wanted, LoadPlan([*plan.items, *received]))


@given(worlds(TENSORS))
def test_both_ends_know_of_every_transfer(pair):
    _, _, after = shared(*pair, min_bytes=1)
    sent = [t for rank, plan in enumerate(after) for t in plan.transfers if t.source == rank]
    received = [t for rank, plan in enumerate(after) for t in plan.transfers if t.target == rank]
    assert sorted(map(repr, sent)) == sorted(map(repr, received))
    assert len(sent) + len(received) == sum(len(plan.transfers) for plan in after)
    assert all(t.source != t.target for t in sent)


@given(worlds(TENSORS))
def test_a_sender_reads_what_it_sends(pair):
    _, _, after = shared(*pair, min_bytes=1)
    for rank, plan in enumerate(after):
        own = {(r.storage_index, r.storage_offsets, r.lengths) for r in plan.items}
        for t in plan.transfers:
            if t.source == rank:
                assert (t.read.storage_index, t.read.storage_offsets, t.read.lengths) in own


def replicated(ranks, **options):
    specs = {f"w{i}": TensorSpec((64,), "float32", [Replicate()]) for i in range(3 * ranks)}
    plans = [local_plan(specs, mesh=Mesh(dp=ranks), rank=rank) for rank in range(ranks)]
    return shared(plans, plans, **options)


def test_readers_of_replicated_tensors_share_the_work_evenly():
    _, _, after = replicated(4, min_bytes=1)
    assert [len(plan.items) for plan in after] == [3, 3, 3, 3]
    assert all(len(plan.transfers) == 3 * 3 + 9 for plan in after)


def test_small_pieces_and_few_readers_are_left_alone():
    _, before, after = replicated(2, min_bytes=64 * 4 + 1)
    assert after == before
    _, before, after = replicated(2, min_bytes=1, min_readers=3)
    assert after == before


def test_reads_that_overlap_in_part_are_cut_where_they_part():
    """Two ranks want rows 0 to 4 and 2 to 6 of one saved chunk: three pieces, the middle shared."""
    saved = [local_plan({"w": TensorSpec((6, 2))})]
    metadata = global_plan(saved)[1]
    mesh = Mesh(dp=2)
    specs = {"w": TensorSpec((6, 2), "float32", [Shard(0)])}
    plans = []
    for rank, rows in enumerate(((0, 4), (2, 6))):
        plan = local_plan(specs, mesh=mesh, rank=rank)
        item = plan.items[0]
        chunk = type(item.tensor_data.chunk)((rows[0], 0), (rows[1] - rows[0], 2))
        data = type(item.tensor_data)(chunk, item.tensor_data.properties, (6, 2))
        plans.append(type(plan)([type(item)(type(item.index)("w"), item.type, data)]))
    loads = tuple(load_plan(metadata, plan) for plan in plans)
    after = share_reads(metadata, min_bytes=1)(loads)
    assert sorted(read_cells(after)) == [("w", r, c) for r in range(6) for c in range(2)]
    assert sum(len(plan.transfers) for plan in after) == 2


@given(worlds(TENSORS))
def test_transfers_survive_encoding(pair):
    _, _, after = shared(*pair, min_bytes=1)
    for plan in after:
        assert decode_plan(encode_plan(plan)) == plan


def test_without_passes_every_rank_reads_for_itself():
    _, before, _ = replicated(2, min_bytes=1)
    assert global_load_plan(before) == before


@pytest.mark.parametrize("ranks", [1, 3])
def test_disjoint_reads_are_not_touched(ranks):
    specs = {"w": TensorSpec((6,), "float32", [Shard(0)])}
    plans = [local_plan(specs, mesh=Mesh(dp=ranks), rank=rank) for rank in range(ranks)]
    _, before, after = shared(plans, plans, min_bytes=1)
    assert after == before


def test_sharing_twice_keeps_what_the_first_round_agreed():
    metadata, before, _ = replicated(4, min_bytes=1)
    some = share_reads(metadata, min_readers=4, min_bytes=1)
    more = share_reads(metadata, min_readers=2, min_bytes=1)
    assert global_load_plan(before, [some, more]) == global_load_plan(before, some)


def test_a_pass_that_loses_a_read_is_caught_by_key_and_rank():
    _, before, _ = replicated(2, min_bytes=1)

    @world_pass
    def lose(plans):
        return (plans[0], LoadPlan(plans[1].items[1:]))

    with pytest.raises(
        PlanError, match=r"rank 1 would fill 0 elements of `w0` at \[0\], and needs 64"
    ):
        global_load_plan(before, lose)


def test_reads_of_another_checkpoint_are_refused_by_name():
    _, before, _ = replicated(2, min_bytes=1)
    other = global_plan([local_plan({"x": TensorSpec((2,))})])[1]
    with pytest.raises(ValueError, match="`w0` is read but not in the metadata"):
        share_reads(other)(before)


def fetched(metadata, plan, rank, max_gap):
    """Name the bytes that a rank fetches: what it reads, for itself or others, and narrow gaps.

    Blocks are of one chunk here, and read whole if all of their elements are read by this rank.
    """
    mine = [t.read for t in plan.transfers if t.source == rank]
    cells = {}
    for read in [*plan.items, *mine]:
        if read.storage_index.offset is not None:
            chunk = read.storage_index.fqn, read.storage_index.offset
            at = np.ndindex(*read.lengths)
            places = [tuple(np.add(read.storage_offsets, cell).tolist()) for cell in at]
            cells.setdefault(chunk, []).append(places)
    found = []
    for (name, offset), parts in cells.items():
        entry = metadata.entry(name)
        (box,) = [c for c in entry.chunks if c.offsets == offset and c.numel]
        whole = {cell for part in parts for cell in part}
        for part in [list(whole)] if len(whole) == box.numel else parts:
            flat = sorted(int(np.ravel_multi_index(cell, box.sizes)) for cell in part)
            most = max_gap // entry.properties.itemsize
            gaps = [range(a + 1, b) for a, b in itertools.pairwise(flat) if b - a - 1 <= most]
            found += [(name, offset, i) for i in {*flat, *itertools.chain(*gaps)}]
    return found


@given(st.integers(1, 2), st.sampled_from([(4, 12), (6, 8), (3, 4, 4)]), st.integers(1, 3))
def test_columns_of_far_blocks_are_fetched_once_by_all_ranks_together(saved_on, shape, axis):
    axis = min(axis, len(shape) - 1)
    save = {"w": TensorSpec(shape, "int32", [Shard(0)])}
    want = {"w": TensorSpec(shape, "int32", [Shard(axis)])}
    metadata = global_plan(world_plans(save, Mesh(dp=saved_on)))[1]
    wanted = world_plans(want, Mesh(tp=4))
    loads = tuple(load_plan(metadata, plan) for plan in wanted)
    passes = chain(
        split_reads(metadata, 1 << 20, max_gap=1 << 10),
        share_reads(metadata, min_bytes=1, max_gap=1 << 10),
    )
    alone, after = loads, global_load_plan(loads, passes)
    once = [cell for r, plan in enumerate(after) for cell in fetched(metadata, plan, r, 1 << 10)]
    often = [cell for r, plan in enumerate(alone) for cell in fetched(metadata, plan, r, 1 << 10)]
    assert len(once) == len(set(once)) == int(np.prod(shape))
    assert len(often) > len(once)
    for rank, (plan, want) in enumerate(zip(after, wanted, strict=True)):
        received = [t.read for t in plan.transfers if t.target == rank]
        assert_read_once(metadata, want, LoadPlan([*plan.items, *received]))
    report, before = explain(metadata, after), explain(metadata, alone)
    assert report.totals.nbytes == report.totals.unique == before.totals.nbytes
    assert report.totals.needed == before.totals.needed


def test_reads_that_fetch_less_than_their_block_or_have_wide_gaps_are_left_to_those_who_need_them():
    whole = global_plan(world_plans({"w": TensorSpec((4, 8))}, Mesh(dp=1)))[1]
    loads = tuple(
        load_plan(whole, plan)
        for plan in world_plans({"w": TensorSpec((4, 8), placements=[Shard(1)])}, Mesh(tp=4))
    )
    for plans, gap in ((loads, 23), (loads[:1], 24)):
        assert share_reads(whole, min_bytes=1, max_gap=gap)(plans) == plans
    assert share_reads(whole, min_bytes=1, max_gap=24)(loads[:3]) != loads[:3]  # 3 × 26 of 32
    assert share_reads(whole, min_bytes=1, max_gap=24)(loads) != loads
    assert share_reads(whole, min_bytes=129, max_gap=24)(loads) == loads
