"""Who reads what for whom, when it is sent, and whether that is worth it."""

from collections import Counter, defaultdict, deque
from itertools import product

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    Mesh,
    Replicate,
    Shard,
    StridedShard,
    TensorSpec,
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
    replica_groups,
    shared_by_rule,
    shared_by_transfers,
    shared_rounds,
    sharing_way,
    turns_of,
    value_exchange,
    wants_of,
)
from shardplan.planning.testing.strategies import save_plans

TENSORS = {"w": TensorSpec((5, 3)), "b": TensorSpec((4,), "int8"), "s": TensorSpec(()), "v": None}
WORLDS = st.tuples(save_plans(tensors=TENSORS), save_plans(tensors=TENSORS))
LIMITS = st.tuples(  # bytes of a round, of a block, and of a small block
    st.sampled_from([1, 8, 1 << 20]),
    st.sampled_from([4, 16, 1 << 20]),
    st.sampled_from([0, 8, 1 << 20]),
)
GAPS = st.sampled_from([0, 8])


@attrs.frozen
class Loaded:
    """The loads of a world, and every rank's shared reads and rounds."""

    metadata: object
    plans: list
    wants: list
    groups: list
    shared: list
    rounds: list


def ranks_of(group):
    return tuple(rank for span in group for rank in span)


def by_rule(pair, limits, max_gap=0, most_peers=1 << 10):
    saved, wanted = pair
    round_bytes, block_bytes, small_bytes = limits
    metadata = global_plan(saved)[1]
    plans = [load_plan(metadata, plan) for plan in wanted]
    split = split_reads(metadata, block_bytes, max_gap=max_gap)
    cut = [split((plan,))[0].items for plan in plans]
    small = {"block_bytes": block_bytes, "small_bytes": small_bytes}
    wants = [wants_of(items, metadata, len(plans), **small) for items in cut]
    needs = [
        need_of(*both, metadata, max_gap, host="a", is_local=False)
        for both in zip(plans, wants, strict=True)
    ]
    groups = [list(map(ranks_of, mine)) for mine in replica_groups(needs)]
    sizes = {"round_bytes": round_bytes, "block_bytes": block_bytes, "most_peers": most_peers}
    shared = [
        shared_by_rule(wants[rank], metadata, rank, groups[rank], **sizes)
        for rank in range(len(plans))
    ]
    return loaded(metadata, plans, wants, groups, shared, block_bytes, max_gap)


def by_transfers(pair, limits, max_gap=0):
    saved, wanted = pair
    round_bytes, block_bytes, _ = limits
    metadata = global_plan(saved)[1]
    plans = [load_plan(metadata, plan) for plan in wanted]
    passes = [
        split_reads(metadata, block_bytes, max_gap=max_gap),
        share_reads(metadata, min_bytes=1, block_bytes=block_bytes, max_gap=max_gap),
    ]
    shared = [
        shared_by_transfers(plan, metadata, rank, round_bytes=round_bytes)
        for rank, plan in enumerate(global_load_plan(plans, passes))
    ]
    return loaded(metadata, plans, None, None, shared, block_bytes, max_gap)


def loaded(metadata, plans, wants, groups, shared, block_bytes, max_gap):
    sizes = {"block_bytes": block_bytes, "max_gap": max_gap}
    rounds = [shared_rounds(one, metadata, rank, **sizes) for rank, one in enumerate(shared)]
    return Loaded(metadata, plans, wants, groups, shared, rounds)


def cells(read):
    """Return the elements of the checkpoint that a read brings, in order."""
    start = np.add(read.storage_index.offset, read.storage_offsets)
    return [
        (read.storage_index.fqn, *np.add(start, at).tolist())
        for at in product(*map(range, read.lengths))
    ]


def box_cells(shared, row):
    """Return the elements of the box that travels if a read is shared."""
    read, axes = shared.reads[row], int(shared.reads.ndim[row])
    start = np.add(read.storage_index.offset, shared.offsets[row, :axes])
    return [
        (read.storage_index.fqn, *np.add(start, at).tolist())
        for at in product(*map(range, shared.lengths[row, :axes].tolist()))
    ]


def places(read):
    """Return the elements of the state dict that a read without other axes fills, in order."""
    start = np.add(read.dest_index.offset, read.dest_offsets)
    return [
        (read.dest_index.fqn, *np.add(start, at).tolist())
        for at in product(*map(range, read.lengths))
    ]


def is_tensor(read):
    return read.storage_index.offset is not None


def wanted(plan):
    return {
        place: cell
        for read in filter(is_tensor, plan.items)
        for place, cell in zip(places(read), cells(read), strict=True)
    }


def piece_cells(one, piece):
    read = one.reads[piece.read]
    start = np.add(read.storage_index.offset, read.storage_offsets) + piece.offsets
    shape = tuple(piece.sizes)
    return [(read.storage_index.fqn, *np.add(start, at)) for at in product(*map(range, shape))]


def carry_out(world):
    """Carry out all rounds element by element; return what each rank filled, and what it read."""
    filled = [defaultdict(list) for _ in world.rounds]
    was_read = [Counter() for _ in world.rounds]
    wires = defaultdict(deque)
    left = [deque(mine.rounds) for mine in world.rounds]

    def fill(rank, row, found):
        inner, shape = world.shared[rank].inner(row), world.shared[rank].lengths[row]
        if inner is not None and len(found) > world.shared[rank].reads.numel[row]:
            table = np.empty(len(found), object)
            table[:] = found
            found = table.reshape(shape[: len(inner)])[inner].reshape(-1).tolist()
        for place, cell in zip(places(world.shared[rank].reads[row]), found, strict=True):
            filled[rank][place].append(cell)

    held = [[] for _ in left]

    def post(rank, one, messages):
        for message in messages:
            data = [held[rank][number] for number in message.regions]
            for target in message.targets:
                assert target != rank
                wires[rank, target].append((one.starts(message), data))

    def take(rank, messages):
        came = []
        for message in messages:
            starts, data = wires[message.source, rank].popleft()
            assert starts == message.starts
            for region, found in zip(message.regions, data, strict=True):
                came.append(found)
                for row in region.rows:
                    fill(rank, row, found)
        return came

    def begin(rank, one):
        for read in one.reads:
            was_read[rank].update(cells(read))
        for piece in one.pieces:
            for row in piece.rows:
                fill(rank, row, piece_cells(one, piece))
        held[rank] = [piece_cells(one, piece) for piece in one.pieces]
        post(rank, one, one.outgoing)
        return one.incoming

    def pass_on(rank, one):
        held[rank] += take(rank, one.incoming)
        post(rank, one, one.passed_on)
        return one.relayed

    def end(rank, one):
        take(rank, one.relayed)
        left[rank].popleft()
        return ()

    steps, step, waits = (begin, pass_on, end), [0] * len(left), [()] * len(left)
    moved = True
    while moved:
        moved = False
        for rank, rounds in enumerate(left):
            if rounds and all(wires[message.source, rank] for message in waits[rank]):
                waits[rank] = steps[step[rank]](rank, rounds[0])
                step[rank], moved = (step[rank] + 1) % 3, True
    assert not any(left)  # else ranks wait for each other in a circle
    assert not any(wires.values())  # what is sent is received
    for rank, mine in enumerate(world.rounds):
        for row in mine.rest:
            read = world.shared[rank].reads[row]
            was_read[rank].update(cells(read))
            fill(rank, row, cells(read))
    return filled, was_read


def in_lines(pair, limits, max_gap=0):
    return by_rule(pair, limits, max_gap, most_peers=1)


@pytest.mark.parametrize("plan", [by_rule, in_lines, by_transfers])
@given(pair=WORLDS, limits=LIMITS, max_gap=GAPS)
def test_every_rank_gets_what_it_needs_once_in_a_message_per_peer_and_round(
    plan, pair, limits, max_gap
):
    world = plan(pair, limits, max_gap)
    filled, _ = carry_out(world)
    for mine, load in zip(filled, world.plans, strict=True):
        assert mine == {place: [cell] for place, cell in wanted(load).items()}
    for mine in world.rounds:
        for one in mine.rounds:
            messages = (*one.outgoing, *one.passed_on)
            targets = [target for message in messages for target in message.targets]
            assert len(targets) == len(set(targets))
            sources = [message.source for message in (*one.incoming, *one.relayed)]
            assert len(sources) == len(set(sources))
    assert sum(mine.sent for mine in world.rounds) == sum(mine.received for mine in world.rounds)


@pytest.mark.parametrize("plan", [by_rule, in_lines])
@given(pair=WORLDS, limits=LIMITS)
def test_each_element_is_read_once_per_group_that_needs_it(plan, pair, limits):
    world = plan(pair, limits)
    _, was_read = carry_out(world)
    needed = defaultdict(set)  # the groups that want an element
    for rank, shared in enumerate(world.shared):
        for row, read in enumerate(shared.reads):
            if is_tensor(read):
                class_of = world.wants[rank].of_row[row]
                group = world.groups[rank][class_of]
                for cell in box_cells(shared, row) if len(group) > 1 else cells(read):
                    needed[cell].add(group)
    assert sum(was_read, Counter()) == {cell: len(groups) for cell, groups in needed.items()}


@given(WORLDS, LIMITS)
def test_every_value_is_read_once_per_group_and_comes_to_all_of_it(pair, limits):
    world = by_rule(pair, limits)
    parts = [value_exchange(one, rank, len) for rank, one in enumerate(world.shared)]
    for rank, part in enumerate(parts):
        came = {name for one in parts for name in one.send.get(rank, ())}
        wanted = {read.name for read in part.wanted}
        assert came | set(part.read) | {read.name for read in part.alone} == wanted
        assert part.sources == [n for n, one in enumerate(parts) if rank in one.send]
    if len(parts) > 1 and all(part.wanted for part in parts):
        assert sum(len(part.read) for part in parts) == 1  # all ranks want "v" alone


# The rule


def replicas(copies, shards, *, count=100, size=1 << 10):
    """Return loads on a mesh of copies and shards of a checkpoint that one rank saved."""
    specs = {f"t{n:04}": TensorSpec((size,), "uint8") for n in range(count)}
    metadata = global_plan(world_plans(specs, Mesh(one=1)))[1]
    cut = {name: attrs.evolve(s, placements=[Replicate(), Shard(0)]) for name, s in specs.items()}
    return metadata, world_plans(cut, Mesh(copies=copies, shards=shards))


def need(plan, metadata, ranks, *, max_gap=0, host="a", is_local=False, small_bytes=0):
    wants = wants_of(plan.items, metadata, ranks, block_bytes=16 << 20, small_bytes=small_bytes)
    return need_of(plan, wants, metadata, max_gap, host=host, is_local=is_local)


def needs_on(metadata, wanted, ranks, **options):
    plans = [load_plan(metadata, wanted[rank]) for rank in ranks]
    return [need(plan, metadata, len(ranks), **options) for plan in plans]


def test_groups_are_the_replicas_of_each_kind_of_tensor():
    specs = {
        "norm": TensorSpec((8,), "int8", [Shard(0), Replicate()]),
        "wq": TensorSpec((8, 8), "int8", [Shard(0), Shard(1)]),
        "embed": TensorSpec((8, 8), "int8", [Replicate(), Shard(0)]),
        "strided": TensorSpec((8, 8), "int8", [StridedShard(0, 4), Shard(0)]),
    }
    whole = {name: TensorSpec(spec.shape, "int8") for name, spec in specs.items()}
    metadata = global_plan(world_plans(whole, Mesh(one=1)))[1]
    needs = needs_on(metadata, world_plans(specs, Mesh(dp=4, tp=2)), range(8))
    groups = [set(map(ranks_of, mine)) for mine in replica_groups(needs)]
    assert groups[5] == {(4, 5), (5,), (1, 3, 5, 7)}
    assert sharing_way(needs) == "groups"


MESHES = {
    "ddp": ([Replicate(), Replicate()], [Replicate(), Replicate()]),
    "hsdp": ([Replicate(), Shard(0)], [Replicate(), Shard(0)]),
    "fsdp with tp": ([StridedShard(0, 2), Shard(0)], [Shard(0), Replicate()]),
    "tp in dp": ([Replicate(), Shard(1)], [Replicate(), Replicate()]),
}


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("mesh", MESHES)
def test_on_usual_meshes_every_element_is_read_once(mesh, parts, small):
    matrix, vector = MESHES[mesh]
    shapes = {"w": (8, 6), "v": (12, 4), "norm": (8,), "bias": (16,), "step": ()}
    saved = world_plans(
        {n: TensorSpec(s, "int8", [Shard(0)] if s else [Replicate()]) for n, s in shapes.items()},
        Mesh(dp=parts),
    )
    placed = {2: matrix, 1: vector, 0: [Replicate(), Replicate()]}
    specs = {name: TensorSpec(shape, "int8", placed[len(shape)]) for name, shape in shapes.items()}
    world = by_rule((saved, world_plans(specs, Mesh(dp=4, tp=2))), (64, 32, small))
    _, was_read = carry_out(world)
    assert set(sum(was_read, Counter()).values()) == {1}
    assert len(sum(was_read, Counter())) == 8 * 6 + 12 * 4 + 8 + 16 + 1


@pytest.mark.parametrize(("copies", "shards"), [(8, 1), (4, 8), (32, 4)])
def test_the_work_of_the_coordinator_does_not_depend_on_the_number_of_reads(copies, shards):
    few, many = (
        replica_groups(needs_on(*replicas(copies, shards, count=n), range(copies * shards)))
        for n in (10, 300)
    )
    assert few == many
    assert {len(group) for mine in few for group in mine} == {1}  # one range for any number


@pytest.mark.parametrize("members", [2, 7, 64])
@pytest.mark.parametrize("size", [1 << 10, 1 << 20, 16 << 20])
def test_members_read_equal_shares_in_rounds_of_bounded_size(members, size):
    count = max(256 * members * (1 << 20) // size // 8, members)
    round_bytes = 128 << 20
    turns = turns_of(np.full(count, size), members, round_bytes)
    assert (np.diff(turns.round) >= 0).all()
    assert np.bincount(turns.round).max() * size <= round_bytes + size
    shares = np.bincount(turns.member, minlength=members) * size
    assert shares.max() - shares.min() <= max(size, 1 << 20) * (1 + round_bytes // (1 << 27)) * 2


def test_small_blocks_that_lie_together_are_read_by_one_rank():
    turns = turns_of(np.full(1000, 1 << 10), 8, 128 << 20)
    assert set(turns.member.tolist()) == {0}
    turns = turns_of(np.full(64 << 10, 1 << 10), 8, 128 << 20)  # 64 MiB
    assert np.count_nonzero(np.diff(turns.member)) == 7


def columns_on(ranks, placement):
    saved = world_plans({"w": TensorSpec((8, 4), "int8")}, Mesh(one=1))
    metadata = global_plan(saved)[1]
    wanted = world_plans({"w": TensorSpec((8, 4), "int8", [placement])}, Mesh(tp=ranks))
    return metadata, [load_plan(metadata, plan) for plan in wanted]


def needs_of(ranks, placement, *, max_gap=0, hosts=1, **options):
    metadata, plans = columns_on(ranks, placement)
    return [
        need(plan, metadata, ranks, max_gap=max_gap, host=f"host-{rank % hosts}", **options)
        for rank, plan in enumerate(plans)
    ]


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"placement": Replicate()}, "groups"),
        ({"placement": Replicate(), "is_local": True}, "alone"),
        ({"placement": Replicate(), "is_local": True, "hosts": 2}, "groups"),
        ({"placement": Shard(0)}, "alone"),
        ({"placement": Shard(1)}, "alone"),
        ({"placement": Shard(1), "max_gap": 8}, "coordinator"),  # each would fetch all columns
        ({"placement": Shard(1), "max_gap": 8, "small_bytes": 64}, "groups"),  # all of a small one
    ],
    ids=str,
)
def test_reads_are_shared_where_ranks_would_fetch_the_same_from_afar(options, way):
    assert sharing_way(needs_of(4, **options)) == way


def test_the_coordinator_plans_only_as_many_reads_as_it_can():
    needs = needs_of(4, Shard(1), max_gap=8)
    assert sharing_way(needs) == "coordinator"
    assert sharing_way([attrs.evolve(need, reads=MOST_READS) for need in needs]) == "groups"


def test_ranks_that_read_different_tensors_share_nothing():
    needs = needs_of(2, Shard(0))
    apart = [attrs.evolve(need, names=str(n), total=64) for n, need in enumerate(needs)]
    assert sharing_way(apart) == "alone"
