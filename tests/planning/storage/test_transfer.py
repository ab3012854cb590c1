"""transfer_plan: every element goes once, from a rank that holds it, to each rank that wants it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    Mesh,
    PlanError,
    Replicate,
    SavePlan,
    Shard,
    TensorSpec,
    cast,
    chain,
    concat,
    decode_plan,
    encode_plan,
    local_plan,
    rename,
    stack,
    transfer_plan,
    world_plans,
)
from shardplan.planning.storage import transfer_rounds
from shardplan.planning.testing.frames import filled, framed, written
from shardplan.planning.testing.strategies import framings, meshes, save_plans, shapes


@st.composite
def worlds(draw):
    """Draw tensors, their framing on either side, and the plans of sources and targets."""
    sizes = draw(
        st.dictionaries(st.sampled_from("abc"), shapes(min_dims=1, min_side=1), min_size=1)
    )
    specs = {name: TensorSpec(shape) for name, shape in sizes.items()}
    frames = {name: draw(framings(shape)) for name, shape in sizes.items() if draw(st.booleans())}
    tensors = {
        name: np.arange(math.prod(shape)).reshape(shape) + 1000.0 * at
        for at, (name, shape) in enumerate(sizes.items(), 1)
    }
    source, target = (draw(save_plans(tensors=specs, mesh=meshes())) for _ in range(2))
    framing = lambda plans: tuple(framed(plan, frames) for plan in plans)  # noqa: E731
    shift = draw(st.sampled_from([0, 1, len(source)]))  # the same ranks, some of them, or others
    return tensors, source, target, framing(source), framing(target), shift


def planned(world):
    *_, source, target, shift = world
    ranks = [rank + shift for rank in range(len(target))]
    return transfer_plan(source, target, target_ranks=ranks), ranks


@given(worlds())
def test_every_wanted_element_arrives_once_with_its_value(world):
    tensors, _, wanted, source, target, _ = world
    plan, ranks = planned(world)
    saved = written(_once(source, plan.metadata), tensors)
    for rank, own, after in zip(ranks, wanted, target, strict=True):
        got = filled(plan.part(rank), saved, after, rank)
        out = {(i.source.fqn, i.tensor_data.chunk) for i in after.left_out or ()}
        for item in own.items:
            name, chunk = item.index.fqn, item.tensor_data.chunk
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            mask = got[name][box] != -1
            assert np.array_equal(got[name][box][mask], tensors[name][box][mask])
            assert mask.all() or any(fqn == name for fqn, _ in out)


def _once(plans, metadata):
    """Return the plans with each chunk on one rank only."""
    seen, done = set(), []
    for plan in plans:
        kept = []
        for item in plan.items:
            key = item.index.fqn, item.tensor_data and item.tensor_data.chunk
            if key not in seen and math.prod(key[1].sizes):
                kept.append(item)
            seen.add(key)
        done.append(SavePlan(kept))
    return done


@given(worlds())
def test_a_sender_holds_the_chunk_and_no_one_is_sent_what_it_holds(world):
    *_, source, _, _ = world
    plan, _ = planned(world)
    held = [
        {(i.index.fqn, i.tensor_data.chunk.offsets, i.tensor_data.chunk.sizes) for i in own.items}
        for own in source
    ] + [set()] * len(plan.plans)
    layouts = plan.metadata.state_dict_metadata
    for rank, own in enumerate(plan.plans):
        made = [(rank, rank, read) for read in own.items]
        for giver, taker, read in [*made, *((t.source, t.target, t.read) for t in own.transfers)]:
            index = read.storage_index
            chunks = {c.offsets: c.sizes for c in layouts[index.fqn].chunks}
            chunk = (index.fqn, index.offset, chunks[index.offset])
            assert chunk in held[giver]
            assert giver == taker or chunk not in held[taker]
            assert rank in (giver, taker)


@given(worlds())
def test_both_ends_of_a_transfer_know_it_and_bytes_sent_are_bytes_needed(world):
    plan, _ = planned(world)
    sent = {(t.source, t.target, t.read) for own in plan.plans for t in own.transfers}
    for rank, own in enumerate(plan.plans):
        assert {t for t in sent if rank in t[:2]} == {
            (t.source, t.target, t.read) for t in own.transfers
        }
        assert own == decode_plan(encode_plan(own))
    needed = sum(math.prod(t.lengths) for *_, t in sent) * 4
    stays = sum(math.prod(read.lengths) for own in plan.plans for read in own.items) * 4
    assert int(plan.nbytes.sum()) == needed + stays


@given(worlds(), st.integers(1, 40))
def test_rounds_hold_every_transfer_once_alike_on_both_sides_in_bounded_memory(world, most):
    plan, _ = planned(world)
    rounds = [
        transfer_rounds(own, plan.metadata, rank, peers=plan.peers, round_bytes=most)
        for rank, own in enumerate(plan.plans)
    ]

    def parcels(rank, peer, side):
        own = plan.part(rank).transfers
        return [
            [(own[p.row].read, p.offsets, p.sizes) for p in parcel.parts]
            for one in rounds[rank]
            for parcel in getattr(one, side)
            if parcel.peer == peer
        ]

    share = max(most // max(plan.peers, 1), 1)
    for rank, own in enumerate(rounds):
        for one in own:
            for side in (one.sends, one.receives):
                by_peer = {}
                for parcel in side:
                    by_peer[parcel.peer] = by_peer.get(parcel.peer, 0) + parcel.nbytes
                assert all(n < share + max(share, 4) for n in by_peer.values())
                assert len(by_peer) <= plan.peers
        for peer in range(len(rounds)):
            assert parcels(rank, peer, "sends") == parcels(peer, rank, "receives")
        rows = [
            (p.row, offset)
            for one in own
            for parcel in (*one.sends, *one.receives)
            for p in parcel.parts
            for offset in _cells(p)
        ]
        moved = plan.part(rank).transfers
        assert len(rows) == len(set(rows))
        assert len(rows) == sum(math.prod(t.read.lengths) for t in moved)


def _cells(part):
    return [
        tuple(o + at for o, at in zip(part.offsets, place, strict=True))
        for place in np.ndindex(*part.sizes)
    ]


def test_replicas_share_the_sending_evenly():
    specs = {f"w{n}": TensorSpec((8, 4), "float32", [Replicate()]) for n in range(4)}
    source = world_plans(specs, Mesh(n=4))
    target = world_plans({name: TensorSpec((8, 4)) for name in specs}, Mesh(n=1))
    plan = transfer_plan(source, target, target_ranks=[4])
    assert plan.nbytes[:, 4].tolist() == [128] * 4 + [0]


def test_on_the_same_ranks_only_what_a_rank_lacks_is_sent():
    spec = TensorSpec((4, 4), "float32", [Shard(0)])
    plan = transfer_plan(
        world_plans({"w": spec}, Mesh(n=2)),
        world_plans({"w": TensorSpec((4, 4), "float32", [Shard(1)])}, Mesh(n=2)),
    )
    assert plan.nbytes.tolist() == [[16, 16], [16, 16]]
    assert "32 B of which stay" in str(plan)


def test_fused_and_stacked_names_of_the_source_become_those_of_the_target():
    """q, k, v of a trainer fill the fused weight of a server, experts its stack of them."""
    rows = [Shard(0)]
    trainer = {f"{n}.weight": TensorSpec((4, 6), "float32", rows) for n in "qkv"} | {
        f"experts.{n}.w": TensorSpec((2, 6), "float32", rows) for n in range(3)
    }
    server = {
        "qkv": TensorSpec((12, 6), "float32", [Shard(1)]),
        "experts": TensorSpec((3, 2, 6), "float32", [Shard(2)]),
    }
    fuse = chain(
        concat([f"{n}.weight" for n in "qkv"], into="qkv", axis=0),
        stack("experts.#.w", into="experts"),
    )
    source = fuse(tuple(world_plans(trainer, Mesh(fsdp=4))))
    target = tuple(world_plans(server, Mesh(tp=2)))
    plan = transfer_plan(source, target, target_ranks=[4, 5])
    assert int(plan.nbytes.sum()) == (12 * 6 + 3 * 2 * 6) * 4
    assert int(plan.nbytes[:4, 4:].sum()) == int(plan.nbytes.sum())


def test_what_is_missing_or_of_another_dtype_is_refused_and_can_be_cast():
    source = [local_plan({"w": TensorSpec((2,), "float32")})]
    with pytest.raises(PlanError, match="other"):
        transfer_plan(source, [local_plan({"other": TensorSpec((2,))})])
    half = [local_plan({"w": TensorSpec((2,), "bfloat16")})]
    with pytest.raises(PlanError, match="bfloat16"):
        transfer_plan(source, half)
    assert transfer_plan(source, half, dtype="cast").nbytes.sum() == 8
    assert transfer_plan(cast("bfloat16")(tuple(source)), half).nbytes.sum() == 4
    renamed = rename({"w": "other"})(tuple(source))
    assert transfer_plan(renamed, [local_plan({"other": TensorSpec((2,))})]).nbytes.sum() == 8


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 2]])
def test_ranks_must_name_each_plan_once(ranks):
    plans = world_plans({"w": TensorSpec((2,), "float32", [Shard(0)])}, Mesh(n=2))
    with pytest.raises(ValueError, match=r"target_ranks must name one rank for each of 2"):
        transfer_plan(plans, plans, target_ranks=ranks)
