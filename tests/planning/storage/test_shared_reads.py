"""shared_rounds and sharing_pays: who reads what, sends it when, and whether that is worth it."""

import math

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    LoadItemType,
    LoadPlan,
    Mesh,
    MetadataIndex,
    ReadItem,
    Replicate,
    Shard,
    TensorSpec,
    Transfer,
    global_load_plan,
    global_plan,
    load_plan,
    share_reads,
    split_reads,
    world_plans,
)
from shardplan.planning.storage import (
    MOST_READS,
    need_of,
    shared_rounds,
    sharing_pays,
    value_exchange,
)
from shardplan.planning.testing.strategies import save_plans

TENSORS = {"w": TensorSpec((5, 3)), "b": TensorSpec((4,), "int8"), "s": TensorSpec(()), "v": None}
WORLDS = st.tuples(save_plans(tensors=TENSORS), save_plans(tensors=TENSORS))
LIMITS = st.tuples(st.sampled_from([1, 8, 1 << 20]), st.sampled_from([4, 16, 1 << 20]))


def planned(pair, limits, max_gap=0):
    """Share the reads of a world, and return every rank's plan and its rounds."""
    saved, wanted = pair
    round_bytes, block_bytes = limits
    metadata = global_plan(saved)[1]
    options = {"block_bytes": block_bytes, "max_gap": max_gap}
    passes = [
        split_reads(metadata, block_bytes, max_gap=max_gap),
        share_reads(metadata, min_bytes=1, **options),
    ]
    plans = global_load_plan([load_plan(metadata, plan) for plan in wanted], passes)
    rounds = [
        shared_rounds(plan, metadata, rank, round_bytes=round_bytes, **options)
        for rank, plan in enumerate(plans)
    ]
    return metadata, plans, rounds


def box(read):
    """Return the name and the box, in the saved tensor, of a read."""
    start = np.add(read.storage_index.offset, read.storage_offsets).tolist()
    return read.storage_index.fqn, tuple(start), tuple(read.lengths)


def sent_box(one, piece):
    """Return the name and the box of a piece of a round."""
    name, start, _ = box(one.reads[piece.read])
    return name, tuple(np.add(start, piece.offsets).tolist()), piece.sizes


@given(WORLDS, LIMITS, st.sampled_from([0, 8]))
def test_every_rank_expects_what_the_others_send_in_the_order_of_sending(pair, limits, max_gap):
    _, plans, rounds = planned(pair, limits, max_gap)
    for source, sender in enumerate(rounds):
        for target, receiver in enumerate(rounds):
            sent = [
                [sent_box(one, p) for p in one.pieces for t in p.targets if t == target]
                for one in sender.rounds
            ]
            reads = plans[target].transfers
            expected = [
                [box(reads[a.transfer].read) for a in one.arrivals if a.source == source]
                for one in receiver.rounds
            ]
            assert [part for part in sent if part] == [part for part in expected if part]


@given(WORLDS, LIMITS, st.sampled_from([0, 8]))
def test_every_own_read_and_every_transfer_is_carried_out_once(pair, limits, max_gap):
    _, plans, rounds = planned(pair, limits, max_gap)
    for rank, (plan, mine) in enumerate(zip(plans, rounds, strict=True)):
        tensors = [n for n, read in enumerate(plan.items) if read.storage_index.offset is not None]
        done = [row for one in mine.rounds for piece in one.pieces for row in piece.items]
        assert sorted([*done, *mine.rest]) == tensors
        came = [a.transfer for one in mine.rounds for a in one.arrivals]
        moves = [n for n, t in enumerate(plan.transfers) if t.read.storage_index.offset is not None]
        assert sorted(came) == [n for n in moves if plan.transfers[n].target == rank]
        targets = [t for one in mine.rounds for piece in one.pieces for t in piece.targets]
        going = [plan.transfers[n].target for n in moves if plan.transfers[n].source == rank]
        assert sorted(targets) == sorted(going)


@given(WORLDS, LIMITS)
def test_pieces_lie_in_what_is_read_and_fill_what_they_are_for(pair, limits):
    _, plans, rounds = planned(pair, limits)
    for plan, mine in zip(plans, rounds, strict=True):
        for one in mine.rounds:
            for piece in one.pieces:
                ends = np.add(piece.offsets, piece.sizes)
                assert (ends <= one.reads[piece.read].lengths).all()
                assert all(box(plan.items[row]) == sent_box(one, piece) for row in piece.items)


@given(WORLDS, LIMITS)
def test_bytes_are_those_of_the_boxes(pair, limits):
    metadata, _, rounds = planned(pair, limits)

    def nbytes(name, sizes):
        return math.prod(sizes) * metadata.entry(name).properties.itemsize

    sent = received = 0
    for mine in rounds:
        for one in mine.rounds:
            for piece in one.pieces:
                name, _, sizes = sent_box(one, piece)
                assert piece.nbytes == nbytes(name, sizes)
        sent, received = sent + mine.sent, received + mine.received
    assert sent == received


def columns_on(ranks, placement):
    saved = world_plans({"w": TensorSpec((8, 4), "int8")}, Mesh(one=1))
    metadata = global_plan(saved)[1]
    wanted = world_plans({"w": TensorSpec((8, 4), "int8", [placement])}, Mesh(tp=ranks))
    return metadata, [load_plan(metadata, plan) for plan in wanted]


def needs_of(ranks, placement, *, max_gap=0, hosts=1, is_local=False):
    metadata, plans = columns_on(ranks, placement)
    return [
        need_of(plan, metadata, max_gap, host=f"host-{rank % hosts}", is_local=is_local)
        for rank, plan in enumerate(plans)
    ]


@pytest.mark.parametrize(
    ("options", "pays"),
    [
        ({"placement": Replicate()}, True),
        ({"placement": Replicate(), "is_local": True}, False),
        ({"placement": Replicate(), "is_local": True, "hosts": 2}, True),
        ({"placement": Shard(0)}, False),
        ({"placement": Shard(1)}, False),
        ({"placement": Shard(1), "max_gap": 8}, True),  # each rank would fetch all columns
    ],
    ids=str,
)
def test_sharing_pays_where_ranks_would_fetch_the_same_from_afar(options, pays):
    assert sharing_pays(needs_of(4, **options)) is pays


def test_sharing_is_not_planned_unasked_for_more_reads_than_the_coordinator_can_plan():
    needs = needs_of(4, Replicate())
    assert sharing_pays(needs)
    assert not sharing_pays([attrs.evolve(need, reads=MOST_READS) for need in needs])


def test_ranks_that_read_different_tensors_share_nothing():
    needs = needs_of(2, Shard(0))
    apart = [attrs.evolve(need, names=str(n), total=64) for n, need in enumerate(needs)]
    assert not sharing_pays(apart)


# Non-tensor values

RANKS = 3
INSIDE = "inside"  # a value that is kept with the metadata
VALUE_NAMES = st.sampled_from(["a", "b", INSIDE])
# Per value and rank that wants it, the rank that reads it.
RANK = st.integers(0, RANKS - 1)
WANTED_VALUES = st.dictionaries(st.tuples(VALUE_NAMES, RANK), RANK)


def read(name):
    return ReadItem(
        LoadItemType.BYTE_IO, MetadataIndex(f"my.{name}"), (), MetadataIndex(name), (), ()
    )


def plan_of(wanted, rank):
    """Return the plan of one rank: its own reads, and the transfers that it takes part in."""
    own = [read(name) for (name, to), source in wanted.items() if to == rank == source]
    moved = [
        Transfer(read(name), source, to)
        for (name, to), source in wanted.items()
        if source != to and rank in (source, to)
    ]
    return LoadPlan(own, transfers=moved)


@given(WANTED_VALUES)
def test_each_rank_gets_every_value_it_wants_and_what_is_sent_is_expected(wanted):
    parts = [
        value_exchange(plan_of(wanted, rank), rank, lambda name: int(name != INSIDE))
        for rank in range(RANKS)
    ]
    for rank, part in enumerate(parts):
        mine = sorted(name for name, to in wanted if to == rank)
        assert sorted(value.name for value in part.wanted) == mine
        assert all(value.dest == f"my.{value.name}" for value in part.wanted)
        arriving = {name for source in part.sources for name in parts[source].send.get(rank, ())}
        have = {value.name for value in part.alone} | set(part.read) | arriving
        assert have >= set(mine)
        assert INSIDE not in arriving
        expected = {s for (name, to), s in wanted.items() if to == rank != s and name != INSIDE}
        assert set(part.sources) == expected
