"""Saves and loads on many ranks: threads for every combination, processes where torch cuts."""

import contextlib
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict, namedtuple
from itertools import product
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan._offers import PlanCache
from shardplan._replicas import COMPARED_BYTES, digests
from shardplan.dist import CheckpointError, run_ranks, solo
from shardplan.io.errors import ExistsError, FormatError, ValueRefusedError
from shardplan.io.formats import WriteJob
from shardplan.io.formats.native.write import assemble, publish, write_rank
from shardplan.io.pool import Pool
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore, FaultyStore
from shardplan.planning import (
    Chunk,
    PlanError,
    cast,
    chain,
    global_plan,
    local_plan,
    rename,
    select,
    split_chunks,
)
from shardplan.planning.text import human_bytes

FOLDER = Path(__file__).parents[1] / "ranks"


def script(name):
    spec = importlib.util.spec_from_file_location(f"ranks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parts = script("parts")
VALUES = {"step": 7, "betas": (0.9, 0.99), "note": "two\nlines"}


@pytest.fixture
def store(request):
    store = open_store(f"memory://ranks/{request.node.nodeid.replace(':', '-')}")
    store.delete(store.list())
    return store


def save_on(world, layout, whole, store, **options):
    """Save whole tensors on threads, cut as the layout says; return every rank's report."""

    def fn(comm):
        mine = parts.part(whole, layout, world, comm.rank)
        return shardplan.save(mine, store, comm=comm, cache=PlanCache(), **options)

    return run_ranks(world, fn, timeout=60)


def load_on(world, layout, whole, store, **options):
    """Load on threads; return every rank's report, after comparing every bit."""

    def fn(comm):
        mine = parts.part(whole, layout, world, comm.rank, parts.blank)
        for name, value in mine.items():
            if not hasattr(value, "shape"):
                mine[name] = None
        report = shardplan.load(mine, store, comm=comm, **options)
        assert parts.same(mine, whole) == []
        return report

    return run_ranks(world, fn, timeout=60)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("world", [2, 3])
def test_an_empty_dict_on_some_ranks_is_filled_by_what_another_saves(tmp_path, world, format):
    def state(rank, scale):
        tensor = torch.full((2,), 1.0 * scale)
        return {"stage": {"w": tensor, "n": scale} if rank == 1 else {}, "none": {}, "all": scale}

    def fn(comm):
        shardplan.save(state(comm.rank, 3), tmp_path / "a", format=format, comm=comm)
        got = state(comm.rank, 0)
        shardplan.load(got, tmp_path / "a", comm=comm)
        return repr(got) == repr(state(comm.rank, 3))

    assert run_ranks(world, fn, timeout=60) == [True] * world
    got = shardplan.restore(tmp_path / "a")
    assert got["stage"].pop("w").tolist() == [3, 3]
    assert got == {"all": 3, "none": {}, "stage": {"n": 3}}


# Every world and layout, to every other


def everything(world, rank, turn, make=torch.clone):
    """Return a rank's part of tensors in all layouts: what is named after one is cut as another."""
    layouts = list(parts.LAYOUTS)
    whole = parts.tensors() | VALUES
    return {
        name: parts.part(whole, layouts[(number + turn) % len(layouts)], world, rank, make)
        for number, name in enumerate(layouts)
    }


@pytest.mark.parametrize("target", parts.WORLDS)
@pytest.mark.parametrize("source", parts.WORLDS)
def test_what_any_world_saved_in_any_layout_any_world_loads_in_any_other(store, source, target):
    whole = parts.tensors() | VALUES
    run_ranks(
        source, lambda comm: shardplan.save(everything(source, comm.rank, 0), store, comm=comm)
    )

    def load(comm):
        wrong = []
        for turn in range(len(parts.LAYOUTS)):
            mine = everything(target, comm.rank, turn, parts.blank)
            shardplan.load(mine, store, comm=comm, share_reads=turn % 2 == 0)
            wrong += [(turn, name, parts.same(part, whole)) for name, part in mine.items()]
        return [found for found in wrong if found[-1]]

    assert run_ranks(target, load) == [[]] * target


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(list(parts.LAYOUTS)),
    st.sampled_from(list(parts.LAYOUTS)),
    st.lists(st.integers(0, 9), max_size=3),
    st.booleans(),
    st.integers(0, 4),
)
def test_tensors_of_any_shape_move_between_any_two_worlds(a, b, source, target, shape, share, who):
    count = torch.Size(shape).numel()
    whole = {"w": torch.arange(count, dtype=torch.float64).reshape(shape), "step": count}
    store = open_store("memory://ranks/any")
    store.delete(store.list())

    def save(comm):
        return shardplan.save(parts.part(whole, source, a, comm.rank), store, comm=comm)

    run_ranks(a, save, coordinator=who % a)
    load_on(b, target, whole, store, share_reads=share)


def test_any_rank_can_be_the_coordinator(store):
    whole = parts.tensors() | VALUES

    def fn(comm):
        report = shardplan.save(parts.part(whole, "grid", 4, comm.rank), store, comm=comm)
        mine = parts.part(whole, "columns", 4, comm.rank, parts.blank)
        shardplan.load(mine, store, comm=comm, share_reads=True)
        return len(report.ranks), parts.same(mine, whole)

    assert run_ranks(4, fn, coordinator=2) == [(1, []), (1, []), (4, []), (1, [])]


# Who writes what


def test_all_ranks_write_and_replicas_are_written_once_in_equal_shares(store):
    whole = {f"w{i}": torch.full((64, 64), float(i)) for i in range(16)}
    coordinator = save_on(4, "replicated", whole, store)[0]
    shares = [rank.nbytes for rank in coordinator.ranks]
    data = 16 * 64 * 64 * 4
    assert data <= sum(shares) < 1.05 * data
    assert max(shares) < 1.05 * data / 4
    assert coordinator.files == 4


def test_ranks_write_at_the_same_time(store):
    """Each rank's write waits for all others': in turn, they would wait for ever."""
    together = threading.Barrier(3)

    class Meeting(CountingStore):
        def write(self, path, *args, **options):
            if path.endswith(".safetensors"):
                together.wait(20)
            return super().write(path, *args, **options)

    whole = {"w": torch.arange(12.0).reshape(6, 2)}

    def fn(comm):
        mine = parts.part(whole, "rows", 3, comm.rank)
        with Pool() as pool:  # as each process has its own
            return shardplan.save(mine, Meeting(store), comm=comm, pool=pool)

    run_ranks(3, fn)
    load_on(2, "columns", whole, store)


def test_nothing_is_committed_before_the_last_rank_has_written(store):
    seen = []

    class Slow(CountingStore):
        def write(self, path, *args, **options):
            if path.startswith("shard-00002"):
                threading.Event().wait(0.3)
                seen.append(store.exists("shardplan.json"))
            return super().write(path, *args, **options)

    def fn(comm):
        sd = {f"w{comm.rank}": torch.ones(4)}
        return shardplan.save(sd, Slow(store), comm=comm)

    run_ranks(3, fn)
    assert seen == [False]


def test_a_rank_that_holds_nothing_takes_part(store):
    whole = {"w": torch.arange(6.0)}

    def fn(comm):
        sd = parts.part(whole, "replicated", 3, comm.rank) if comm.rank == 1 else {}
        shardplan.save(sd, store, comm=comm)
        mine = {"w": torch.zeros(6)} if comm.rank == 2 else {}
        shardplan.load(mine, store, comm=comm, share_reads=True)
        return mine.get("w", torch.zeros(0)).tolist()

    assert run_ranks(3, fn) == [[], [], whole["w"].tolist()]


def test_one_planner_serves_all_ranks_in_both_directions(store):
    planner = shardplan.planning.chain(rename({"w": "model.w"}), cast("bfloat16"))
    whole = {"w": torch.arange(24.0).reshape(6, 4)}
    save_on(3, "rows", whole, store, planner=planner)
    assert list(shardplan.open_checkpoint(store).keys()) == ["model.w"]
    load_on(2, "columns", whole, store, planner=planner, dtype="cast")


def test_disjoint_keys_make_one_checkpoint(store):
    def fn(comm):
        sd = {"model": {f"stage{comm.rank}": {"w": torch.full((3,), float(comm.rank))}}, "step": 7}
        shardplan.save(sd, store, comm=comm)
        other = 1 - comm.rank
        target = {"model": {f"stage{other}": {"w": torch.zeros(3)}}, "step": 0}
        report = shardplan.load(target, store, comm=comm)
        return target["model"][f"stage{other}"]["w"].tolist(), target["step"], report.unexpected

    assert run_ranks(2, fn) == [
        ([1.0] * 3, 7, ("model.stage0.w",)),
        ([0.0] * 3, 7, ("model.stage1.w",)),
    ]
    assert set(shardplan.restore(store)["model"]) == {"stage0", "stage1"}


def test_an_existing_checkpoint_is_refused_on_all_ranks_and_replaced_if_asked(store):
    old, new = parts.tensors(1), parts.tensors(2)
    save_on(2, "rows", old, store)
    before = store.list()
    with pytest.raises(CheckpointError, match="rank 0, plan the save: ExistsError"):
        save_on(3, "rows", new, store)
    assert store.list() == before
    save_on(3, "rows", new, store, overwrite=True)
    load_on(2, "columns", new, store)
    assert not set(before) - {"shardplan.json"} & set(store.list())


def test_a_single_rank_raises_its_own_errors(store):
    shardplan.save({"w": torch.ones(1)}, store)
    with pytest.raises(ExistsError):
        shardplan.save({"w": torch.ones(1)}, store)


@pytest.mark.parametrize("world", [2, 4])
def test_a_format_that_one_process_writes_is_refused_before_anything_is_written(tmp_path, world):
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    before = (tmp_path / "x.pt").read_bytes()

    def fn(comm):
        sd, path = {"w": torch.zeros(2)}, tmp_path / "x.pt"
        return shardplan.save(sd, path, format="torch", overwrite=True, comm=comm)

    with pytest.raises(CheckpointError, match="ranks cannot save as 'torch'"):
        run_ranks(world, fn)
    assert (tmp_path / "x.pt").read_bytes() == before


@pytest.mark.parametrize("format", ["torch"])
def test_where_one_process_may_save_many_may_save_and_convert_as_the_error_says(tmp_path, format):
    sd, target = {"w": torch.arange(6.0), "v": torch.ones(3)}, tmp_path / "x.pt"
    with pytest.raises(CheckpointError, match=r'save with format="safetensors".*then `convert`'):
        run_ranks(2, lambda comm: shardplan.save(sd, target, format=format, comm=comm))
    assert not target.exists()
    run_ranks(2, lambda comm: shardplan.save(sd, tmp_path / "a", comm=comm))
    run_ranks(2, lambda comm: shardplan.convert(tmp_path / "a", target, format=format, comm=comm))
    got = shardplan.restore(target)
    assert all(torch.equal(got[name], sd[name]) for name in sd)


# Objects that keep their own state


class Counter:
    def __init__(self, count, fails=False):
        self.count, self.fails, self.given = count, fails, None

    def state_dict(self):
        if self.fails:
            raise RuntimeError("no state today")
        return {"count": self.count, "seen": [torch.full((2,), float(self.count))]}

    def load_state_dict(self, state):
        if self.fails:
            raise RuntimeError("not that state")
        self.given = state


def test_stateful_objects_are_asked_for_their_state_and_given_it(store):
    def fn(comm):
        shardplan.save({"a": {"counter": Counter(3)}, "step": 7}, store, comm=comm)
        target = {"a": {"counter": Counter(0)}, "step": 0}
        report = shardplan.load(target, store, comm=comm)
        given = target["a"]["counter"].given
        assert "hand over" in report.seconds
        return given["count"], given["seen"][0].tolist(), target["step"]

    assert run_ranks(2, fn) == [(3, [3.0, 3.0], 7)] * 2


@pytest.mark.parametrize("kind", [dict, UserDict, OrderedDict])
def test_mappings_of_any_kind_and_lists_may_hold_stateful_objects(store, kind):
    pair = namedtuple("pair", "counter step")

    def state(n):
        counters = [Counter(n), Counter(n + 1), n]
        return kind({"c": Counter(n), "step": n, "list": counters, "pair": pair(Counter(n), n)})

    shardplan.save(state(3), store)
    target = state(0)
    counters = target["list"]
    shardplan.load(target, store)
    assert (target["c"].given["count"], target["step"]) == (3, 3)
    assert target["list"] is counters
    assert [c.given["count"] for c in counters[:2]] + counters[2:] == [3, 4, 3]
    assert type(target["pair"]) is pair
    assert (target["pair"].counter.given["count"], target["pair"].step) == (3, 3)


def test_what_a_stateful_object_raises_is_told_whatever_it_is(store):
    class Deep:
        def state_dict(self):
            raise RecursionError("the trainer refers to itself")

        def load_state_dict(self, state):
            raise AssertionError

    sd = {"good": torch.zeros(2), "trainer": {"deep": [Deep()]}}
    with pytest.raises(RecursionError, match="the trainer refers to itself"):
        shardplan.save(sd, store)
    assert store.list() == ()


def test_values_beside_a_stateful_object_in_a_mapping_that_cannot_change_are_refused(store):
    shardplan.save({"c": Counter(3), "step": 7}, store)
    target = Counter(0)
    with pytest.raises(ValueRefusedError, match="`step` lies in a mappingproxy"):
        shardplan.load(MappingProxyType({"c": target, "step": 0}), store)
    assert target.given is None
    shardplan.load(MappingProxyType({"c": target}), store)
    assert target.given["count"] == 3


def test_an_object_that_refuses_its_state_fails_the_load_on_all_ranks(store):
    def fn(comm):
        shardplan.save({"counter": Counter(3)}, store, comm=comm)
        target = {"counter": Counter(0)}
        original = target["counter"]
        original.load_state_dict = Counter(0, fails=comm.rank == 1).load_state_dict
        with pytest.raises(CheckpointError) as caught:
            shardplan.load(target, store, comm=comm)
        (failure,) = caught.value.failures
        return failure.rank, failure.step, failure.text

    assert run_ranks(3, fn) == [(1, "load_state_dict", "not that state")] * 3


def test_real_modules_and_optimizers_may_be_passed_as_they_are(store):
    def made(seed):
        torch.manual_seed(seed)
        net = torch.nn.Linear(3, 2)
        adam = torch.optim.Adam(net.parameters(), lr=0.1)
        net(torch.ones(3) * seed).sum().backward()
        adam.step()
        return net, adam

    nets = [(made(1), made(2)) for _ in range(2)]

    def fn(comm):
        (net, adam), (other, second) = nets[comm.rank]
        shardplan.save({"net": net, "adam": adam}, store, comm=comm)
        shardplan.load({"net": other, "adam": second}, store, comm=comm)
        weights = zip(net.parameters(), other.parameters(), strict=True)
        states = zip(adam.state.values(), second.state.values(), strict=True)
        same = [torch.equal(a, b) for a, b in weights]
        return same, [torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in states]

    assert run_ranks(2, fn) == [([True, True], [True, True])] * 2


# Replicas that are not


def test_replicas_that_differ_are_named_with_the_ranks_on_either_side(store):
    def fn(comm):
        sd = {
            "same": torch.ones(3),
            "w": torch.tensor([1.0, 2.0 + (comm.rank == 2)]),
            "lr": 0.1 if comm.rank else 0.2,
        }
        return shardplan.save(sd, store, comm=comm, verify_replicas=True)

    with pytest.raises(CheckpointError) as caught:
        run_ranks(4, fn)
    text = str(caught.value)
    assert "`w` differs between ranks that save it: ranks 0, 1 and 3 against rank 2" in text
    assert "`lr`" in text
    assert "`same`" not in text
    assert store.list() == ()


# Tensors on the meta device


def staged(rank, real, size=4):
    """Return a state of which a rank has only some elements: the rest is on the meta device."""
    return {
        name: torch.full((size,), float(holder))
        if rank in holders
        else torch.empty(size, device="meta")
        for holder, (name, holders) in enumerate(real.items())
    }


@pytest.mark.parametrize("size", [4, 40_000])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("planner", [None, rename({"a": "x"})])
def test_a_rank_with_a_tensor_on_the_meta_device_does_not_hold_it(store, size, background, planner):
    real = {"a": [0], "b": [1], "c": [2, 0], "d": [0, 1, 2]}

    def fn(comm, real):
        sd, cache = staged(comm.rank, real, size), caches[comm.rank]
        options = {"comm": comm, "planner": planner, "cache": cache, "overwrite": True}
        if background:
            return shardplan.async_save(sd, store, **options).result(30).how
        return shardplan.save(sd, store, **options).how

    caches = [PlanCache() for _ in range(3)]
    for every in (real, real, {name: [0, 1, 2] for name in real}, {**real, "a": [1]}):
        run_ranks(3, lambda comm, every=every: fn(comm, every))
        found = shardplan.restore(store)
        names = ["x" if planner and name == "a" else name for name in real]
        assert {n: found[n].unique().tolist() for n in names} == {
            n: [float(i)] for i, n in enumerate(names)
        }
    assert shardplan.verify(store).ok


def test_a_tensor_that_is_on_the_meta_device_everywhere_is_refused_with_its_ranks(store):
    def fn(comm):
        shardplan.save(staged(comm.rank, {"a": [0], "b": []}), store, comm=comm)

    with pytest.raises(CheckpointError, match=r"no rank holds `b`: ranks 0-2 have it on the meta"):
        run_ranks(3, fn)
    assert store.list() == ()


def test_a_planner_may_leave_out_what_is_on_the_meta_device_everywhere(store):
    def fn(comm):
        sd = staged(comm.rank, {"a": [0], "b": []})
        shardplan.save(sd, store, comm=comm, planner=select("a"))

    run_ranks(2, fn)
    assert shardplan.restore(store)["a"].tolist() == [0, 0, 0, 0]


STAGES = {0: "a", 1: "a", 2: "b", 3: "b"}  # two pipeline stages, with names of their own


def state_of(rank, *, stages=False, **values):
    """Return a rank's state: a tensor and a value of its stage, and what it has in common."""
    stage = STAGES[rank] if stages else "all"
    own = {f"{stage}.w": torch.full((3,), len(stage)), f"{stage}.lr": 0.1}
    return {**own, "step": torch.tensor(7.0), "note": "x", **values}


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "change", [{"step": torch.tensor(8.0)}, {"note": "y"}, {"step": torch.tensor(-7.0)}]
)
def test_a_value_or_small_tensor_that_differs_is_named_however_the_plan_was_made(
    store, change, known, stages
):
    caches = [PlanCache() for _ in range(4)]

    def fn(comm, changed):
        sd = state_of(comm.rank, stages=stages, **(change if comm.rank in changed else {}))
        return shardplan.save(sd, store, comm=comm, cache=caches[comm.rank], overwrite=True).how

    if known:
        assert run_ranks(4, lambda comm: fn(comm, ())) == ["derived"] * 4
        assert run_ranks(4, lambda comm: fn(comm, ())) == ["cached"] * 4
    with pytest.raises(CheckpointError) as caught:
        run_ranks(4, lambda comm: fn(comm, (1, 2)))
    (name,) = change
    issues = caught.value.own.issues if caught.value.own else caught.value.__cause__.issues
    assert [(i.kind, i.fqn, i.ranks) for i in issues] == [("conflict", name, (0, 1, 2, 3))]
    text = f"`{name}` differs between ranks that save it: ranks 0 and 3 against ranks 1 and 2"
    assert text.replace(" and ", ", ") in str(caught.value).replace(" and ", ", ")
    assert "PerRank(value)" in str(caught.value)
    assert run_ranks(4, lambda comm: fn(comm, (0, 1, 2, 3)))  # all have changed it alike


def test_what_is_compared_is_what_would_be_stored(store):
    """Under the names that passes give; and bits that a cast drops do not count."""
    planner = chain(rename({"mine": "ours"}), cast("bfloat16"))

    def fn(comm, last):
        tiny = 2.0**-20 * comm.rank  # which bfloat16 has no room for beside 1
        sd = {"mine": torch.tensor([1.0 + tiny, last if comm.rank else 2.0])}
        shardplan.save(sd, store, comm=comm, planner=planner, overwrite=True)

    run_ranks(2, lambda comm: fn(comm, 2.0))
    assert shardplan.restore(store)["ours"].tolist() == [1, 2]
    with pytest.raises(CheckpointError, match=r"`ours` differs.*rank 0 against rank 1"):
        run_ranks(2, lambda comm: fn(comm, 3.0))


def test_parts_of_a_small_tensor_that_a_planner_cuts_are_compared_part_by_part(store):
    def fn(comm):
        w = torch.arange(8.0)
        w[6] += comm.rank
        shardplan.save({"w": w}, store, comm=comm, planner=split_chunks(16))

    with pytest.raises(CheckpointError, match=r"`w` at \[4\] differs.*rank 0 against rank 1"):
        run_ranks(2, fn)


@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: [-n], lambda n: {"a": ({n},)}])
def test_numbers_too_long_to_be_printed_are_compared(store, wrap):
    def fn(comm, apart):
        value = wrap(10**5000 + apart * comm.rank)
        shardplan.save({"v": value}, store, comm=comm)

    with pytest.raises(CheckpointError, match=r"`v.*differs"):
        run_ranks(2, lambda comm: fn(comm, 1))
    run_ranks(2, lambda comm: fn(comm, 0))


def test_large_tensors_that_a_planner_cuts_into_small_parts_are_not_compared_unasked(store):
    def fn(comm, verify):
        w = torch.zeros(COMPARED_BYTES)
        w[-1] = comm.rank
        options = {"planner": split_chunks(1 << 12), "overwrite": True}
        shardplan.save({"w": w}, store, comm=comm, verify_replicas=verify, **options)

    run_ranks(2, lambda comm: fn(comm, False))
    with pytest.raises(CheckpointError, match=r"`w` at \[\d+\] differs.*rank 0 against rank 1"):
        run_ranks(2, lambda comm: fn(comm, True))


class Closed:
    """An object that cannot be looked into."""

    def __reduce_ex__(self, protocol):
        raise RuntimeError("keep out")


@pytest.mark.parametrize("planner", [None, split_chunks(16)])
def test_values_that_cannot_be_looked_into_are_refused_by_name_and_not_taken_for_equal(planner):
    sd = {"a": 1, "odd": [Closed()]}
    plan = None if planner is None else planner((local_plan(sd),))[0]
    for options in ({"plan": plan}, {"plan": plan or local_plan(sd), "everything": True}):
        with pytest.raises(ValueRefusedError, match="keep out") as caught:
            digests(sd, **options)
        assert list(caught.value.reasons) == ["odd"]


class Pair:
    """An object of which torch is told that it may be loaded, and that holds a set."""

    def __init__(self, names):
        self.names = names


def shared(twice):
    """Return a list that holds one object twice, or two equal ones."""
    text = "".join(["long", "er"])
    other = text if twice else "".join(["long", "er"])
    return [torch.device("cpu"), text, other]


ALIKE = [
    ({1, 2, 1000, "a"}, {"a", 1000, 2, 1}),
    ([frozenset({(1, "b"), (2, "a")})], [frozenset({(2, "a"), (1, "b")})]),
    ({torch.float32, torch.int8}, {torch.int8, torch.float32}),
    (float("nan"), -float("nan")),
    (shared(True), shared(False)),
    (torch.tensor(float("nan")), torch.tensor(float("nan"))),
    (torch.zeros(2, 3).T, torch.zeros(3, 2)),
    (np.arange(3)[::-1], np.array([2, 1, 0])),
    (Pair({"a", "b", "c"}), Pair({"c", "b", "a"})),
]


@pytest.mark.parametrize("pair", ALIKE, ids=lambda pair: type(pair[0]).__name__)
def test_values_that_are_equal_are_not_taken_for_different_ones(store, pair):
    with torch.serialization.safe_globals([Pair]):
        run_ranks(2, lambda comm: shardplan.save({"v": pair[comm.rank]}, store, comm=comm))


def test_the_order_of_keys_does_not_count(store):
    sd = {"groups": [{"lr": 0.1, "betas": (1, 2)}], "b": {"x": 1, "y": {"z": 2}}}
    back = {"b": {"y": {"z": 2}, "x": 1}, "groups": [{"betas": (1, 2), "lr": 0.1}]}
    run_ranks(2, lambda comm: shardplan.save((sd, back)[comm.rank], store, comm=comm))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ((1,), [1]),
        (b"a", "a"),
        ({1, 2}, {1, 3}),
        ("", None),
        (np.float32(1), np.float64(1)),
        (torch.device("cpu"), torch.device("meta")),
        (Pair({1}), Pair({2})),
        ({"a": ()}, {"a": []}),
        (10**30, 10**30 + 1),
    ],
)
def test_values_that_come_back_different_are_different(store, one, other):
    def fn(comm):
        shardplan.save({"v": (one, other)[comm.rank]}, store, comm=comm)

    safe = torch.serialization.safe_globals([Pair])
    with safe, pytest.raises(CheckpointError, match=r"`v.*differs"):
        run_ranks(2, fn)


@pytest.mark.parametrize("nbytes", [COMPARED_BYTES, COMPARED_BYTES + 4])
def test_plain_tensors_are_compared_up_to_a_size_and_larger_ones_if_asked(store, nbytes):
    def fn(comm, verify):
        w = torch.zeros(nbytes // 4)
        w[-1] = comm.rank
        shardplan.save({"w": w}, store, comm=comm, verify_replicas=verify, overwrite=True)

    if nbytes > COMPARED_BYTES:
        run_ranks(2, lambda comm: fn(comm, False))
    for verify in {True, nbytes > COMPARED_BYTES}:
        with pytest.raises(CheckpointError, match=r"`w` differs.*rank 0 against rank 1"):
            run_ranks(2, lambda comm, verify=verify: fn(comm, verify))


def test_ranks_that_disagree_about_a_shape_are_told_that(store):
    def fn(comm):
        shardplan.save({"w": torch.zeros(2 + comm.rank)}, store, comm=comm)

    with pytest.raises(CheckpointError, match="shape"):
        run_ranks(2, fn)


def test_values_are_compared_in_the_background_too(store):
    def fn(comm):
        future = shardplan.async_save({"seed": comm.rank}, store, comm=comm)
        return str(future.exception(30))

    for text in run_ranks(2, fn):
        assert "`seed` differs between ranks that save it: rank 0 against rank 1" in text


def test_replicas_that_agree_pass_and_are_saved(store):
    whole = parts.tensors() | VALUES
    reports = save_on(4, "halves", whole, store, verify_replicas=True)
    assert reports[0].how == "gathered"
    load_on(3, "rows", whole, store)


def test_a_difference_in_a_single_bit_of_a_shard_s_replica_is_found(store):
    whole = {"w": torch.zeros(8, 4)}

    def fn(comm):
        mine = parts.part(whole, "halves", 4, comm.rank)
        if comm.rank == 3:
            next(iter(mine["w"].parts.values())).view(torch.int32)[-1, -1] = 1
        return shardplan.save(mine, store, comm=comm, verify_replicas=True)

    with pytest.raises(CheckpointError, match=r"`w` at \[4, 0\].*rank 2 against rank 3"):
        run_ranks(4, fn)


# Faults: whatever fails, on whichever rank


def at(rank, comm, action):
    return action if comm.rank == rank else (lambda *args: None)


class Fault:
    """One thing that goes wrong on one rank."""

    def __init__(self, phase, victim):
        self.phase, self.victim, self.calls = phase, victim, 0

    def strike(self, comm, phase):
        if comm.rank == self.victim and phase == self.phase:
            self.calls += 1
            raise RuntimeError(f"{phase} broke")

    def comm(self, comm):
        """Break one call of the comm."""
        name, _, number = self.phase.partition("#")
        if comm.rank != self.victim or not number:
            return comm

        def fail(method):
            if method in name.split("|"):
                self.calls += 1
                if self.calls == int(number):
                    raise RuntimeError(f"{self.phase} broke")

        return parts.SpyComm(comm, fail)

    def store(self, comm, inner):
        fault = self

        class Broken(CountingStore):
            def write(self, *args, **options):
                fault.strike(comm, "write")
                return super().write(*args, **options)

            def read(self, *args):
                fault.strike(comm, "read")
                return super().read(*args)

            def read_all(self, *args, **options):
                fault.strike(comm, "open")
                return super().read_all(*args, **options)

            def sync(self):
                fault.strike(comm, "sync")
                return super().sync()

            def replace(self, *args, **options):
                fault.strike(comm, "commit")
                return super().replace(*args, **options)

        return Broken(inner)

    def planner(self, comm):
        def planner(plans):
            self.strike(comm, "plan")
            return plans

        return planner

    def state(self, comm, state):
        outer = self

        class Part:
            def state_dict(self):
                outer.strike(comm, "state_dict")
                return state

            def load_state_dict(self, state):
                outer.strike(comm, "load_state_dict")

        return {"part": Part()}


def told(function):
    """Return the error that each rank is to raise."""
    try:
        function()
    except CheckpointError as error:
        return error
    return None


OLD, NEW = parts.tensors(1) | VALUES, parts.tensors(2) | VALUES
SAVE_PHASES = ["state_dict", "plan", "write", "sync"]
TOLD = ["answer#3"]  # after the commit, when the coordinator is about to report it to the others
SAVE_PHASES += ["meet#1", "answer#1", "meet#2", "answer#2", "meet#3", *TOLD]
LOAD_PHASES = ["state_dict", "plan", "open", "read", "load_state_dict"]
LOAD_PHASES += ["meet#1", "answer#1", "meet#2", "answer#2", "meet#3", "answer#3"]
LOAD_PHASES += ["send#1", "receive#1"]


def on_each(phases):
    """Pair phases with who fails and who coordinates; only a coordinator answers."""
    return [
        (phase, victim, coordinator)
        for phase, victim, coordinator in product(phases, range(3), (0, 2))
        if not phase.startswith("answer") or victim == coordinator
    ]


def check_saved(errors, victim, store, whole):
    """All ranks name the one that failed; what was there loads, and the next save succeeds."""
    assert [type(error) for error in errors] == [CheckpointError] * len(errors)
    assert {error.ranks for error in errors} == {(victim,)}
    saved = {f"part.{name}": value for name, value in whole.items()}
    load_on(2, "rows", saved, store)


@pytest.mark.parametrize(("phase", "victim", "coordinator"), on_each(SAVE_PHASES))
def test_a_save_that_fails_on_one_rank_fails_on_all_and_changes_nothing(
    store, phase, victim, coordinator
):
    save_on(3, "rows", {f"part.{k}": v for k, v in OLD.items()}, store)
    before, fault = set(store.list()), Fault(phase, victim)

    def fn(comm):
        state = fault.state(comm, parts.part(NEW, "columns", 3, comm.rank))
        return told(
            lambda: shardplan.save(
                state,
                fault.store(comm, store),
                comm=fault.comm(comm),
                planner=fault.planner(comm),
                cache=PlanCache(),  # so that plans are gathered
                overwrite=True,
            )
        )

    errors = run_ranks(3, fn, coordinator=coordinator, timeout=5)
    committed = phase in TOLD
    check_saved(errors, victim, store, NEW if committed else OLD)
    lost = any(f.type == "LostRank" for error in errors for f in error.failures)
    if not committed:
        assert lost or set(store.list()) == before  # who does not know for sure removes nothing
        shardplan.prune(store, keep_last=1, min_age=0)
        assert set(store.list()) == before
    again = {f"part.{k}": v for k, v in NEW.items()}
    save_on(2, "rows", again, store, overwrite=True)
    load_on(3, "grid", again, store)


@pytest.mark.parametrize("coordinator", [0, 2])
@pytest.mark.parametrize("landed", [0.0, 1.0])
def test_a_commit_that_may_have_happened_leaves_a_whole_checkpoint(store, coordinator, landed):
    save_on(3, "rows", OLD, store)
    late = []

    def fn(comm):
        mine = parts.part(NEW, "columns", 3, comm.rank)
        broken = FaultyStore(store, mode="late" if not landed else "raise", landed=landed)
        broken._fails = lambda operation, path: operation == "replace"
        if comm.rank == coordinator:
            late.append(broken)
        return told(lambda: shardplan.save(mine, broken, comm=comm, overwrite=True))

    errors = run_ranks(3, fn, coordinator=coordinator)
    assert {error.ranks for error in errors} == {(coordinator,)}
    assert {f.type for error in errors for f in error.failures} == {"UnsureCommitError"}
    load_on(2, "rows", NEW if landed else OLD, store)
    late[0].arrive()  # the request that timed out is carried out after all
    load_on(2, "rows", NEW, store)


@pytest.mark.parametrize(("phase", "victim", "coordinator"), on_each(LOAD_PHASES))
def test_a_load_that_fails_on_one_rank_fails_on_all(store, phase, victim, coordinator):
    whole = {f"part.{k}": v for k, v in OLD.items()}
    save_on(2, "rows", whole, store)
    fault = Fault(phase, victim)

    def fn(comm):
        state = fault.state(comm, parts.part(OLD, "replicated", 3, comm.rank, parts.blank))
        return told(
            lambda: shardplan.load(
                state,
                fault.store(comm, store),
                comm=fault.comm(comm),
                planner=fault.planner(comm),
                share_reads=True,
            )
        )

    errors = run_ranks(3, fn, coordinator=coordinator, timeout=5)
    if phase.startswith(("read", "send", "receive")) and fault.calls == 0:
        pytest.skip("this rank reads, sends, or receives nothing")
    check_saved(errors, victim, store, OLD)


def test_a_state_dict_that_cannot_be_filled_fails_a_shared_load_on_all_ranks_at_once(store):
    whole = {"w": torch.arange(1 << 16)}
    save_on(2, "rows", whole, store)

    def fn(comm):
        target = torch.zeros(1 << 16, dtype=torch.int64)
        if comm.rank == 1:
            target = target.numpy()
            target.flags.writeable = False
        return told(lambda: shardplan.load({"w": target}, store, comm=comm, share_reads=True))

    errors = run_ranks(3, fn, timeout=30)
    assert [error.ranks for error in errors] == [(1,)] * 3
    assert errors[0].failures[0].type == "ValueRefusedError"


def test_all_ranks_that_fail_are_told_together(store):
    def fn(comm):
        return told(lambda: shardplan.load({"w": torch.zeros(comm.rank)}, store, comm=comm))

    save_on(1, "rows", {"w": torch.zeros(2)}, store)
    errors = run_ranks(4, fn)
    assert [error.ranks for error in errors] == [(0, 1, 3)] * 4


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("held", [[], None, torch.ones(2)], ids=["list", "none", "tensor"])
def test_ranks_that_do_not_nest_alike_do_not_replace_what_can_be_opened(tmp_path, held, format):
    shardplan.save({"good": torch.ones(2)}, tmp_path / "c", format=format)

    def fn(comm):
        state = {"opt": {"state": held if comm.rank else {"w": torch.ones(2)}}}
        options = {"comm": comm, "format": format, "overwrite": True}
        return told(lambda: shardplan.save(state, tmp_path / "c", **options))

    for error in run_ranks(2, fn):
        assert "`opt.state` is a value (or empty) on rank 1 and holds `opt.state.w`" in str(error)
    assert list(shardplan.restore(tmp_path / "c")) == ["good"]


@pytest.mark.parametrize("share", [False, True])
def test_nothing_is_filled_on_any_rank_if_one_cannot_be(tmp_path, share):
    shardplan.save({"a": torch.ones(4, 6), "b": torch.ones(6, 4)}, tmp_path)

    def fn(comm):
        b = torch.zeros(6, 4) if comm.rank else torch.zeros(1, 1).expand(6, 4)
        state = {"a": torch.zeros(4, 6), "b": b}
        error = told(lambda: shardplan.load(state, tmp_path, comm=comm, share_reads=share))
        return error.ranks, [float(tensor.sum()) for tensor in state.values()]

    assert run_ranks(2, fn) == [((0,), [0.0, 0.0])] * 2


def test_a_tensor_without_elements_is_saved_though_no_rank_has_a_part_of_it(tmp_path):
    none = torch.zeros(0, 3)

    def fn(comm):
        state = {"e": parts.Shards(none, [], torch.clone), "w": torch.ones(2)}
        shardplan.save(state, tmp_path, comm=comm)

    run_ranks(2, fn)
    assert shardplan.restore(tmp_path)["e"].shape == (0, 3)
    assert shardplan.verify(tmp_path).ok


def test_a_manifest_that_nobody_could_open_is_not_committed(tmp_path, monkeypatch):
    monkeypatch.setattr("shardplan.io.formats.native.nesting._EMPTY_SEATS", 10)
    shardplan.save({"good": torch.ones(2)}, tmp_path)
    sparse = {"layers": [torch.ones(2) for _ in range(100)]}
    with pytest.raises(FormatError, match=r"could not be opened: its lists would have 100 entries"):
        shardplan.save(sparse, tmp_path, planner=select("layers.99"), overwrite=True)
    assert list(shardplan.restore(tmp_path)) == ["good"]


# Read once, sent to all


@pytest.mark.parametrize("target", ["replicated", "halves"])
def test_shared_reads_fetch_every_byte_once(tmp_path, target):
    store = open_store(tmp_path)  # from afar, gaps are read over
    whole = {f"w{i}": torch.rand(1024, 64) for i in range(6)} | VALUES  # too big to read over
    save_on(2, "rows", whole, store)
    alone = load_on(4, target, whole, store, share_reads=False)
    shared = load_on(4, target, whole, store, share_reads=True)
    unique = 6 * 1024 * 64 * 4
    assert {report.total_read for report in shared} == {unique}
    assert sum(report.bytes_read for report in shared) == unique
    assert alone[0].total_read == sum(report.bytes_needed for report in alone) > unique
    assert [r.bytes_needed for r in shared] == [r.bytes_needed for r in alone]
    received = sum(report.bytes_received for report in shared)
    assert received == sum(rank.sent for rank in shared[0].ranks) > 0


@pytest.mark.parametrize("share", ["auto", True])
@pytest.mark.parametrize("target", ["columns", "replicated", "halves"])
@pytest.mark.parametrize("source", ["rows", "replicated"])
def test_bytes_far_away_are_fetched_once_however_they_are_cut(store, source, target, share):
    whole = {f"w{i}": torch.rand(512, 1024 * (i + 1)) for i in range(4)} | VALUES  # wide: see above
    save_on(3, source, whole, store)
    shared = load_on(4, target, whole, store, share_reads=share)
    unique = sum(tensor.nbytes for name, tensor in whole.items() if name not in VALUES)
    assert {report.total_read for report in shared} == {unique}
    assert sum(report.bytes_read for report in shared) == unique
    read = [report.bytes_read for report in shared]
    assert max(read) <= unique / 2  # not all by one
    if target != "halves":  # of which no rank reads a block whole
        chunks = shardplan.open_checkpoint(store).metadata.state_dict_metadata.values()
        count = sum(len(entry.chunks) for entry in chunks if hasattr(entry, "chunks"))
        assert sum(report.verified for report in shared) >= count


@pytest.mark.parametrize(("count", "most"), [(2, 1.1), (3, 1.1), (4, 1.0)])
def test_of_columns_far_away_no_more_is_fetched_than_the_tensor_has(store, count, most):
    whole = {"w": torch.rand(256, 1024), "middle": torch.rand(64, 4, 256)}
    shardplan.save(whole, store)
    boxes = {"w": ((0, 256), (256, 256)), "middle": ((0, 1, 0), (64, 1, 256))}

    def fn(comm):
        state = {}
        for name, (step, sizes) in boxes.items():
            chunk = Chunk(tuple(comm.rank * s for s in step), sizes)
            state[name] = parts.Shards(whole[name], [chunk], torch.zeros_like)
        seen = []
        report = shardplan.load(state, store, comm=comm, progress=lambda *told: seen.append(told))
        assert parts.same(state, whole) == []
        assert seen[-1][0] == seen[-1][1]
        return report

    reports = run_ranks(count, fn, timeout=60)
    assert reports[0].total_read <= most * sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize("count", [20, 400])
@pytest.mark.parametrize("target", ["replicated", "halves"])
def test_small_tensors_are_read_once_and_sent_in_a_message_per_peer(store, target, count):
    """The number of messages, and what ranks tell the coordinator, is that for few tensors."""
    whole = {f"w{i:03}": torch.full((64, 16), float(i)) for i in range(count)} | VALUES
    shardplan.save(whole, store)
    spies, seen = [], CountingStore(store)

    def fn(comm):
        spy = parts.SpyComm(comm)
        spies.append(spy)
        mine = parts.part(whole, target, 8, comm.rank, parts.blank)
        with Pool() as pool:
            report = shardplan.load(mine, seen, comm=spy, pool=pool, share_reads=True)
        assert parts.same(mine, whole) == []
        return report

    reports = run_ranks(8, fn, timeout=120)
    unique = count * 64 * 16 * 4
    assert {report.total_read for report in reports} == {unique}
    (data,) = [name for name in store.list() if name.endswith(".safetensors")]
    ranges = [r for o in seen.operations if o.name == "read" and o.path == data for r in o.ranges]
    assert sum(nbytes for start, nbytes in ranges if nbytes > 8) < 1.2 * unique  # with its header
    sends = [size for spy in spies for name, size in spy.given if name == "send"]
    assert sum(report.bytes_received for report in reports) == 7 * unique
    assert 7 * unique <= sum(sends) < 8 * unique
    assert len(sends) <= 8 * 7
    assert max(spy.nbytes("meet") for spy in spies) < 6000


def test_in_a_large_group_a_rank_connects_to_few_others(store):
    whole = {f"w{i}": torch.full((256, 1024), float(i)) for i in range(6)}
    shardplan.save(whole, store)
    spies = []

    def fn(comm):
        spy = parts.SpyComm(comm)
        spies.append(spy)
        mine = parts.part(whole, "replicated", 40, comm.rank, parts.blank)
        report = shardplan.load(mine, store, comm=spy, share_reads=True)
        assert parts.same(mine, whole) == []
        return report

    reports = run_ranks(40, fn, timeout=120)
    assert {report.total_read for report in reports} == {6 << 20}
    assert sum(report.bytes_received for report in reports) == 39 * 6 << 20
    assert max(len(spy.peers) for spy in spies) <= 6 + 6  # of lines of 7, and one in each column


@pytest.mark.parametrize("place", [0.0, 0.3, 1.0])
def test_columns_of_many_blocks_far_away_are_fetched_once_and_checked(store, place):
    tensor = torch.arange(1 << 18, dtype=torch.int32).reshape(512, 512)
    small_blocks(tensor, store, block_bytes=1 << 18)  # 128 rows each
    reports = load_on(3, "columns", {"w": tensor}, store)
    assert {report.total_read for report in reports} == {tensor.nbytes}
    assert max(report.bytes_read for report in reports) == 2 << 18
    (name,) = [name for name in store.list() if name.endswith(".safetensors")]
    data = bytearray(store.read_all(name, limit=1 << 30))
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin + int(place * (len(data) - begin - 1))] ^= 1
    store.write(name, [bytes(data)])

    def fn(comm):
        mine = parts.part({"w": tensor}, "columns", 3, comm.rank, parts.blank)
        return told(lambda: shardplan.load(mine, store, comm=comm))

    for error in run_ranks(3, fn, timeout=60):
        assert any("checksums do not fit: `w`" in failure.text for failure in error.failures)


@pytest.mark.parametrize("mebibytes", [1, 12, 40])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_damage_anywhere_in_a_chunk_fails_a_shared_load_on_all_ranks(tmp_path, mebibytes, place):
    whole = {"w": torch.full((mebibytes, 1 << 20), 7, dtype=torch.uint8)}
    shardplan.save(whole, tmp_path)
    damage(tmp_path, place)

    def fn(comm):
        mine = parts.part(whole, "replicated", 3, comm.rank, parts.blank)
        error = told(lambda: shardplan.load(mine, tmp_path, comm=comm, share_reads=True))
        return {(one.type, "checksums do not fit: `w`" in one.text) for one in error.failures}

    assert run_ranks(3, fn, timeout=60) == [{("FormatError", True)}] * 3


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_about_a_checkpoint_tells_which_one_it_is(tmp_path, world):
    shardplan.save({"w": torch.ones(64)}, tmp_path / "step-7")
    damage(tmp_path / "step-7", 0.5)

    def fn(comm):
        with pytest.raises((CheckpointError, FormatError)) as caught:
            shardplan.load({"w": torch.zeros(64)}, tmp_path / "step-7", comm=comm)
        return caught.value

    def lost(comm):
        with pytest.raises((CheckpointError, PlanError)) as caught:
            shardplan.load({"other": torch.zeros(64)}, tmp_path / "step-7", comm=comm)
        return caught.value

    for damaged in (fn, lost):
        for error in run_ranks(world, damaged):
            texts = [f.text for f in getattr(error, "failures", ())] or ["; ".join(error.__notes__)]
            assert all(f"the checkpoint is {tmp_path / 'step-7'}" in text for text in texts)


def test_a_shared_load_that_finds_damage_promises_of_no_key_that_it_is_as_it_was(tmp_path):
    whole = {name: torch.full((3, 1 << 17), 7, dtype=torch.uint8) for name in "abc"}
    shardplan.save(whole, tmp_path)
    damage(tmp_path, 0.5)  # in `b`

    def fn(comm):
        mine = parts.part(whole, "replicated", 3, comm.rank, parts.blank)
        return told(lambda: shardplan.load(mine, tmp_path, comm=comm, share_reads=True))

    errors = run_ranks(3, fn, timeout=60)
    assert any(errors[failure.rank].own is not None for failure in errors[0].failures)
    for error in errors:
        assert error.own is None or (error.own.touched, error.own.filled) == (tuple("abc"), ())
        for failure in error.failures:
            assert failure.type == "FormatError"
            assert "checksums do not fit: `b`" in failure.text
            assert "on each of them, any key of the load may be overwritten" in failure.text
            assert "possibly overwritten in part: `a`, `b`, `c`" in failure.text
            assert "filled before that: none" in failure.text


def damage(folder, place):
    """Change one byte of the only data file, so far into its tensors."""
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin + int(place * (len(data) - begin - 1))] ^= 1
    file.write_bytes(data)


def small_blocks(tensor, place, block_bytes):
    """Save a tensor as one chunk that is hashed in small blocks."""
    store, (plan,) = open_store(place), (plans := global_plan([local_plan({"w": tensor})]))[0]
    written = write_rank(WriteJob(store, {"w": tensor}, plan, "s"), block_bytes)
    manifest = assemble(plans[1], [plan], [written], save_id="s", block_bytes=block_bytes)
    publish(store, manifest)


SLICES = {
    "rows in the middle": [(slice(None), slice(None)), (slice(3, 9), slice(None))],
    "columns": [(slice(None), slice(0, 5)), (slice(None), slice(None))],
    "a box": [(slice(None), slice(None)), (slice(3, 9), slice(2, 5)), (slice(4, 12), slice(0, 4))],
    "halves of blocks": [(slice(0, 8), slice(None)), (slice(8, 12), slice(None))],
}


@pytest.mark.parametrize("shape", [(1024, 4), (300, 6), (64, 256)])
def test_columns_of_a_torch_save_file_are_read_once_for_all_ranks(tmp_path, shape):
    """Columns this narrow are fetched with what lies between them: with those of other ranks."""
    tensor, half = torch.arange(math.prod(shape)).reshape(shape), shape[1] // 2
    torch.save({"w": tensor}, tmp_path / "w.pt")

    def fn(comm):
        chunk = Chunk((0, comm.rank * half), (shape[0], half))
        mine = parts.Shards(tensor, [chunk], torch.zeros_like)
        report = shardplan.load({"w": mine}, tmp_path / "w.pt", comm=comm)
        assert torch.equal(mine.parts[chunk], parts.box(tensor, chunk))
        return report

    assert {report.total_read for report in run_ranks(2, fn, timeout=60)} == {tensor.nbytes}


@pytest.mark.parametrize("place", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("cut", SLICES)
def test_chunks_that_ranks_need_in_part_and_others_whole_are_checked(tmp_path, cut, place):
    tensor = torch.arange(12 * 8).reshape(12, 8)
    small_blocks(tensor, tmp_path, block_bytes=2 * 8 * 8)  # two rows each

    def fn(comm):
        rows, columns = (s.indices(n) for s, n in zip(SLICES[cut][comm.rank], (12, 8), strict=True))
        chunk = Chunk((rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0]))
        mine = parts.Shards(tensor, [chunk], torch.zeros_like)
        report = shardplan.load({"w": mine}, tmp_path, comm=comm, share_reads=True)
        assert torch.equal(mine.parts[chunk], parts.box(tensor, chunk))
        return report

    world = len(SLICES[cut])
    reports = run_ranks(world, fn, timeout=60)
    assert sum(report.verified for report in reports) == 1
    assert reports[0].total_read == tensor.nbytes
    damage(tmp_path, place)
    errors = run_ranks(world, lambda comm: told(lambda: fn(comm)), timeout=60)
    assert {one.type for error in errors for one in error.failures} == {"FormatError"}
    text = "possibly overwritten in part: `w`"  # whoever finds it
    assert all(text in one.text for error in errors for one in error.failures)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_values_are_read_once_too_and_counted(tmp_path, format):
    values = {"long": "x" * 100_000, "raw": b"y" * 50_000, "short": 7}
    shardplan.save({"w": torch.ones(1 << 15)} | values, tmp_path, format=format)
    stores = [CountingStore(open_store(tmp_path)) for _ in range(4)]

    def fn(comm):
        mine = {"w": torch.zeros(1 << 15)} | dict.fromkeys(values)
        if comm.rank == 3:
            del mine["raw"]
        report = shardplan.load(
            mine, stores[comm.rank], comm=comm, share_reads=True, strict=list(mine)
        )
        assert {name: mine[name] for name in values if name in mine} == {
            name: value for name, value in values.items() if name in mine
        }
        return report

    reports = run_ranks(4, fn, timeout=60)
    (needed,) = {report.bytes_needed for report in reports[:3]}
    assert needed > (1 << 17) + 150_000
    assert sum(r.bytes_read for r in reports) == reports[0].total_read == needed
    sent = sum(rank.sent for rank in reports[0].ranks)
    assert sent == sum(report.bytes_received for report in reports) > 3 * ((1 << 17) + 100_000)


def test_a_value_that_cannot_be_read_fails_a_shared_load_on_all_ranks(tmp_path):
    shardplan.save({"long": "x" * 100_000}, tmp_path)
    damage(tmp_path, 0.5)

    def fn(comm):
        return told(lambda: shardplan.load({"long": ""}, tmp_path, comm=comm, share_reads=True))

    for error in run_ranks(3, fn, timeout=60):
        assert [(one.type, "`long`" in one.text) for one in error.failures] == [
            ("FormatError", True)
        ]


def test_shares_of_shared_reads_are_even(store):
    whole = {f"w{i}": torch.rand(1024, 64) for i in range(16)}
    save_on(1, "rows", whole, store)
    reads = [r.bytes_read for r in load_on(4, "replicated", whole, store, share_reads=True)]
    assert max(reads) <= 1.1 * sum(reads) / 4


def test_reads_are_shared_by_themselves_from_an_object_store_and_not_from_a_disk(store, tmp_path):
    whole = {"w": torch.rand(256, 128)}
    for place in (store, open_store(tmp_path / "here")):
        save_on(2, "rows", whole, place)
    shared = load_on(3, "replicated", whole, store)
    local = load_on(3, "replicated", whole, open_store(tmp_path / "here"))
    assert shared[0].total_read == whole["w"].nbytes
    assert local[0].total_read == 3 * whole["w"].nbytes
    assert load_on(3, "rows", whole, store)[0].total_read == whole["w"].nbytes


def test_reads_are_shared_between_machines_even_from_a_disk(tmp_path, monkeypatch):
    whole = {"w": torch.rand(256, 128)}
    place = open_store(tmp_path / "here")
    save_on(2, "rows", whole, place)
    names = {}

    def host_name():
        return names.setdefault(threading.current_thread().name, f"host-{len(names)}")

    monkeypatch.setattr("socket.gethostname", host_name)
    assert load_on(2, "replicated", whole, place)[0].total_read == whole["w"].nbytes


def test_a_real_object_store_is_asked_for_every_byte_once(s3):
    whole = {"w": torch.rand(256, 128)}
    store = open_store(f"s3://{s3.bucket}/shared", **s3.options)
    save_on(2, "rows", whole, store)
    s3.requests.clear()
    load_on(3, "replicated", whole, store)
    data = [r for r in s3.requests if r[0] == "GET" and r[1].endswith(".safetensors") and r[3]]
    spans = [tuple(map(int, r[3].removeprefix("bytes=").split("-"))) for r in data]
    assert sum(high - low + 1 for low, high in spans) < 1.2 * whole["w"].nbytes


@pytest.mark.parametrize("layout", ["rows", "replicated", "mixed"])
def test_a_file_of_torch_save_is_read_by_one_rank_and_sent_in_slices(tmp_path, monkeypatch, layout):
    whole = parts.tensors() | {"step": 7, "betas": (0.9, 0.99), "note": "text"}
    torch.save(whole, tmp_path / "x.pt")
    stores, lock = {}, threading.Lock()

    def counting(path, **options):
        with lock:
            store = CountingStore(open_store(path, **options))
            stores.setdefault(threading.current_thread().name, []).append(store)
            return store

    monkeypatch.setattr("shardplan.io.formats.registry.open_store", counting)

    def fn(comm):
        mine = parts.part(whole, layout, 3, comm.rank, parts.blank)
        report = shardplan.load(mine, tmp_path / "x.pt", comm=comm)
        assert parts.same(mine, whole) == []
        return report

    reports = run_ranks(3, fn, coordinator=1)
    touched = {name for name, made in stores.items() if any(s.operations for s in made)}
    assert touched == {"rank-1"}
    assert [report.bytes_read > 0 for report in reports] == [False, True, False]
    for rank in (0, 2):
        assert reports[rank].bytes_received == reports[rank].bytes_needed
    sent = [report.bytes_sent for report in reports]
    assert sent == [0, sum(report.bytes_received for report in reports), 0]
    assert "× what was needed" not in repr(reports[1])
    assert f"sent {human_bytes(sent[1])}" in repr(reports[1])


def test_a_file_that_is_missing_or_damaged_is_told_on_all_ranks(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"PK\3\4 and nothing more")

    def fn(comm):
        damaged = told(lambda: shardplan.load({}, tmp_path / "x.pt", comm=comm))
        missing = told(lambda: shardplan.load({}, tmp_path / "y.pt", comm=comm))
        return damaged.ranks, missing.ranks

    assert run_ranks(2, fn) == [((0,), (0, 1))] * 2


# Reports


def test_reports_tell_bytes_and_seconds_by_phase_and_rank_and_the_slowest(store):
    whole = {"w": torch.rand(64, 32)}

    class Slow(CountingStore):
        def write(self, *args, **options):
            threading.Event().wait(0.5)
            return super().write(*args, **options)

        def read(self, *args):
            threading.Event().wait(0.5)
            return super().read(*args)

    def fn(comm):
        mine = parts.part(whole, "rows", 3, comm.rank)
        place = Slow(store) if comm.rank == 1 else store
        with Pool() as pool:  # as each process has its own
            saved = shardplan.save(mine, place, comm=comm, pool=pool)
            return saved, shardplan.load(mine, place, comm=comm, pool=pool)

    saved, loaded = zip(*run_ranks(3, fn), strict=True)
    assert [[one.rank for one in report.ranks] for report in saved] == [[0, 1, 2], [1], [2]]
    assert {"open", "plan", "exchange", "write", "wait"} <= set(saved[1].seconds)
    assert "commit" in saved[0].seconds
    assert saved[0].ranks[0].seconds["commit"] == saved[2].slowest["commit"][1] > 0
    assert saved[2].slowest["commit"][0] == 0
    assert all("commit" not in one.seconds for one in saved[0].ranks[1:])
    assert saved[2].slowest["write"][0] == 1 == loaded[2].slowest["read"][0]
    assert saved[2].slowest["write"][1] >= 0.5
    assert "wait" not in saved[2].slowest | loaded[2].slowest  # who waits is not slow
    assert "write rank 1 (" in repr(saved[0])
    assert "read rank 1 (" in repr(loaded[0])
    assert saved[0].nbytes == sum(one.nbytes for one in saved[0].ranks) >= whole["w"].nbytes
    assert [one.nbytes for one in loaded[0].ranks] == [r.bytes_read for r in loaded]
    for report, phase in ((saved, "write"), (loaded, "read")):
        for one in (*report[0].ranks, *report[1].ranks):
            assert one.phase_bytes[phase] == one.nbytes > 0
            assert one.phase_bytes["exchange"] > 0


def test_every_rank_reports_its_own_device(store, monkeypatch):
    whole = {"w": torch.rand(64, 32)}
    monkeypatch.setattr(
        "shardplan._report.device_of", lambda sd: f"cuda:{threading.current_thread().name[-1]}"
    )
    saved = save_on(3, "rows", whole, store)
    loaded = load_on(3, "rows", whole, store)
    for reports in (saved, loaded):
        assert [one.device for one in reports[0].ranks] == ["cuda:0", "cuda:1", "cuda:2"]
        assert [report.ranks[0].device for report in reports[1:]] == ["cuda:1", "cuda:2"]


def test_what_ranks_tell_each_other_to_plan_a_load_grows_no_faster_than_they_do(store):
    whole = {"w": torch.rand(64, 32)}
    save_on(1, "rows", whole, store)
    exchanged = {
        world: [r.phase_bytes["exchange"] for r in load_on(world, "rows", whole, store)]
        for world in (2, 8)
    }
    assert max(exchanged[8][1:]) < 2 * max(exchanged[2][1:])  # all but the coordinator
    assert exchanged[8][0] < 8 * exchanged[2][0]


def test_the_bytes_of_a_snapshot_are_told(store):
    report = shardplan.async_save({"w": torch.rand(64, 32), "step": 7}, store).result()
    assert report.phase_bytes["stage"] == report.ranks[0].phase_bytes["stage"] == 64 * 32 * 4


class Seen(list):
    """A progress callback that keeps what it is told."""

    def __call__(self, done, total):
        self.append((done, total))

    def check(self, total):
        assert {one for _, one in self} == {total}
        done = [one for one, _ in self]
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, total)
        assert len(self) > 2


@pytest.mark.parametrize("format", ["safetensors", "dcp", "hf", "torch"])
def test_progress_is_told_by_every_call_in_every_format(tmp_path, format):
    large = torch.zeros(20 << 20, dtype=torch.uint8)  # more than is read or written at a time
    sd = {"a": large, "b": torch.rand(16, 32).T, "c": torch.rand(8)}
    total = sum(tensor.nbytes for tensor in sd.values())
    seen = {call: Seen() for call in ("save", "async", "load", "restore")}
    one, two = (tmp_path / f"{n}.pt" if format == "torch" else tmp_path / n for n in "12")
    shardplan.save(sd, one, format=format, progress=seen["save"])
    shardplan.async_save(sd, two, format=format, progress=seen["async"]).result()
    shardplan.load(sd, one, progress=seen["load"])
    shardplan.restore(one, keys=["a", "b"], progress=seen["restore"])
    for call in ("save", "async", "load"):
        seen[call].check(total)
    seen["restore"].check(total - sd["c"].nbytes)


@pytest.mark.parametrize("share", [False, True])
def test_every_rank_tells_its_own_progress(store, share):
    whole = {f"w{i}": torch.rand(64, 32) for i in range(4)}
    half = 2 * 64 * 32 * 4

    def fn(comm):
        saved, loaded = Seen(), Seen()
        mine = parts.part(whole, "rows", 2, comm.rank)
        shardplan.save(mine, store, comm=comm, progress=saved)
        full = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        shardplan.load(full, store, comm=comm, share_reads=share, progress=loaded)
        return saved, loaded

    for saved, loaded in run_ranks(2, fn, timeout=60):
        saved.check(half)
        loaded.check(2 * half)


@pytest.mark.parametrize("after", [0, 1])
def test_a_progress_callback_that_raises_stops_a_shared_load_on_all_ranks(store, after):
    whole = {f"w{i}": torch.rand(64, 32) for i in range(4)}
    save_on(1, "rows", whole, store)

    def fn(comm):
        def stop(done, total):
            if comm.rank == 1 and done >= after:
                raise RuntimeError("enough")

        full = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        options = {"share_reads": True, "progress": stop}
        return told(lambda: shardplan.load(full, store, comm=comm, **options))

    for error in run_ranks(3, fn, timeout=60):
        assert error.ranks == (1,)
        assert "enough" in error.failures[0].text
        assert error.failures[0].type == "LoadError"


def test_phases_add_up_to_the_time_that_a_rank_took(store):
    import time

    whole = {"w": torch.rand(64, 32)}

    def fn(comm):
        start = time.perf_counter()
        report = shardplan.save(parts.part(whole, "rows", 2, comm.rank), store, comm=comm)
        return sum(report.seconds.values()), time.perf_counter() - start

    for told_seconds, took in run_ranks(2, fn):
        assert 0.5 * took - 0.05 < told_seconds <= took


# Processes: torch's own ways to cut a model


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(folder, name, world):
    """Run one script as all ranks of a process group; all must end well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    port, logs = free_port(), [(folder / f"log-{name}-{r}").open("w+") for r in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", FOLDER / f"{name}.py", str(r), str(world), str(port), folder],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for r, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    assert codes == [0] * world, "\n".join(Path(log.name).read_text()[-3000:] for log in logs)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Train, save and load on four real ranks; return the folder, and what each rank told."""
    folder = tmp_path_factory.mktemp("four")
    run_processes(folder, "layouts", 4)
    return folder, [json.loads((folder / f"told-4-{r}").read_text()) for r in range(4)]


@pytest.fixture(scope="module")
def eight(four):
    """Load on eight ranks what four have saved."""
    folder, _ = four
    run_processes(folder, "layouts", 8)
    return [json.loads((folder / f"told-8-{r}").read_text()) for r in range(8)]


LAYOUTS = ("fsdp", "tp", "fsdp_tp", "hsdp", "ddp", "pipeline")
LAZY = [f"optim.state.second.lazy.{name}" for name in ("exp_avg", "exp_avg_sq", "step")]


def check_training(told, digests, source, target):
    """Each bit of model and optimizer came back, and training goes on as if nothing had been."""
    for rank in told:
        got = rank[f"{source}:{target}"]
        found = {name: digest for name, digest in got["digests"].items() if name not in LAZY}
        assert found == digests
        assert set(got["missing"]) <= set(LAZY)  # of the parameter that never had a gradient
        assert got["distance"] <= (0 if source == f"{len(told)}-{target}" else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_training_saved_on_one_layout_goes_on_alike_on_another(four, source, target):
    _, told = four
    check_training(told, told[0][f"saved:{source}"]["digests"], f"4-{source}", target)


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS)
def test_a_single_process_restores_what_four_ranks_saved(four, source):
    folder, _ = four
    kept = torch.load(folder / f"4-{source}.ref")["saved"]
    restored, _ = shardplan.planning.flatten(shardplan.restore(folder / f"4-{source}"))
    assert set(restored) == set(kept)
    for name, value in kept.items():
        same = torch.equal(restored[name], value) if torch.is_tensor(value) else None
        assert same if same is not None else restored[name] == value
    assert shardplan.verify(folder / f"4-{source}").ok


@pytest.mark.slow
def test_the_plans_of_all_layouts_are_derived(four):
    _, told = four
    hows = {name: told[0][f"saved:{name}"]["how"] for name in LAYOUTS}
    assert hows == {
        "fsdp": "derived",
        "tp": "derived",
        "fsdp_tp": "derived",
        "hsdp": "derived",
        "ddp": "derived",
        "pipeline": "derived",
    }


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fsdp", "fsdp_tp"])
@pytest.mark.parametrize("source", ["fsdp", "fsdp_tp", "pipeline"])
def test_eight_ranks_go_on_with_what_four_saved(four, eight, source, target):
    digests = four[1][0][f"saved:{source}"]["digests"]
    check_training(eight, digests, f"4-{source}", target)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Take every case of the script on four real ranks; return the folder, and what each told."""
    folder = tmp_path_factory.mktemp("cases")
    run_processes(folder, "cases", 4)
    return folder, [json.loads((folder / f"told-{r}").read_text()) for r in range(4)]


@pytest.mark.slow
def test_derived_and_gathered_plans_of_real_meshes_are_equal(cases):
    _, told = cases
    for rank in told:
        for name, (hows, same, nbytes) in rank["ways"].items():
            assert hows == ["derived", "gathered", "cached"], name
            assert same, name
            derived, gathered, cached = nbytes
            assert derived < 300
            assert cached < 300 < gathered


@pytest.mark.slow
def test_training_goes_on_over_its_own_connections_while_a_save_is_under_way(cases):
    folder, told = cases
    for rank in told:
        found = rank["background"]
        assert found["rounds"] >= 20
        assert found["wrong"] == 0
        assert found["how"] == "gathered"
    restored = shardplan.restore(folder / "background")
    assert torch.equal(restored["w"], torch.arange(32.0).reshape(8, 4))


@pytest.mark.slow
def test_reads_shared_by_real_ranks_fetch_every_byte_once(cases):
    _, told = cases
    for rank in told:
        found = rank["shared"]
        assert found["same"]
        assert found["total_read"] == found["unique"]
    assert sum(rank["shared"]["received"] for rank in told) == 3 * told[0]["shared"]["unique"]


@pytest.mark.slow
def test_a_torch_save_file_is_read_by_the_coordinator_of_real_ranks_only(cases):
    _, told = cases
    assert [rank["file"]["same"] for rank in told] == [True] * 4
    assert [rank["file"]["read"] > 0 for rank in told] == [True, False, False, False]


@pytest.mark.slow
def test_replicas_of_real_ranks_that_differ_are_named(cases):
    _, told = cases
    assert len({rank["replicas"] for rank in told}) == 1
    assert "`w` at [3, 0]" in told[0]["replicas"]
    assert "rank 1 against rank 3" in told[0]["replicas"]


@pytest.mark.slow
def test_optimizer_state_with_groups_comes_back_as_get_state_dict_gave_it(cases):
    _, told = cases
    for rank in told:
        assert rank["nested"]["before"] == rank["nested"]["after"]
        assert len(rank["nested"]["before"]) > 20


@pytest.mark.slow
def test_real_ranks_go_on_with_new_connections_after_one_was_interrupted(cases):
    _, told = cases
    for number, rank in enumerate(told):
        for first, *others in (rank["lost"][:3], rank["lost"][3:]):
            assert first == ("interrupted" if number == 2 else [2])
            assert others == [others[0]] * 2
            assert others[0] > 0


@pytest.mark.slow
def test_real_ranks_that_exit_wait_for_their_save(cases):
    folder, _ = cases
    assert shardplan.restore(folder / "last")["w"].tolist() == list(range(8))


# Processes that exit or stall


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """Let a rank exit or stall in every phase; return the folder."""
    folder = tmp_path_factory.mktemp("faults")
    command = [sys.executable, "-P", FOLDER / "faults.py", folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=150)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, (folder / "log").read_text()[-3000:]
    return folder


FAULTS = script("faults")


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS.CASES)
def test_a_process_that_exits_or_stalls_is_named_by_all_and_the_checkpoint_is_whole(faults, case):
    phase, victim, how, _ = case.split(":")
    victim, folder = int(victim), faults / case
    told = {int(f.name[5:]): json.loads(f.read_text()) for f in folder.glob("told-*")}
    alive = {r for r in range(FAULTS.WORLD) if how == "stall" or r != victim}
    assert set(told) == alive, (faults / "log").read_text()[-3000:]
    for rank, found in told.items():
        assert found.get("named") == [victim], (rank, found)
        if rank != victim:
            assert found["seconds"] < 2 * (FAULTS.TIMEOUT + 2) + 5
    path = folder / "checkpoint"
    saved = shardplan.restore(path)["part"]
    late = phase == "commit" and how == "stall"  # carried out when it is long given up
    for rank in range(FAULTS.WORLD):
        expected = FAULTS.new(rank) if late else FAULTS.old(rank)
        for name, value in expected.items():
            assert torch.equal(saved[name], value), name
    assert shardplan.verify(path).ok
    shardplan.prune(path, keep_last=1, min_age=0)
    named = {file.name for file in path.iterdir()}
    save_on(2, "rows", {"w": torch.arange(6.0)}, open_store(path), overwrite=True)
    assert not named - {"shardplan.json"} & {file.name for file in path.iterdir()}
    load_on(3, "rows", {"w": torch.arange(6.0)}, open_store(path))


SOLITARY = {
    "save": lambda path, **o: shardplan.save({"w": torch.ones(2)}, f"{path}/new", **o),
    "async_save": lambda path, **o: shardplan.async_save({"w": torch.ones(2)}, path / "n", **o),
    "load": lambda path, **o: shardplan.load({"w": torch.zeros(2)}, path / "old", **o),
    "convert": lambda path, **o: shardplan.convert(path / "old", path / "c", format="dcp", **o),
}


@pytest.mark.parametrize("name", SOLITARY)
def test_a_process_of_torchrun_without_a_process_group_does_not_work_alone_unless_it_says_so(
    name, tmp_path, monkeypatch
):
    shardplan.save({"w": torch.ones(2)}, tmp_path / "old")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"rank 1 of 2.*init_process_group\(\).*comm=.*solo\(\)"):
        SOLITARY[name](tmp_path)
    assert os.listdir(tmp_path) == ["old"]
    done = SOLITARY[name](tmp_path, comm=solo())
    if name == "async_save":
        done.result()


def test_reading_alone_and_the_command_line_are_not_refused_under_torchrun(tmp_path, monkeypatch):
    shardplan.save({"w": torch.ones(2)}, tmp_path / "old")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert shardplan.restore(tmp_path / "old")["w"].tolist() == [1, 1]
    assert shardplan.open_checkpoint(tmp_path / "old")["w"][0] == 1
    assert shardplan.verify(tmp_path / "old").ok
    shardplan.diff(tmp_path / "old", tmp_path / "old")
    arguments = ["convert", str(tmp_path / "old"), str(tmp_path / "dcp"), "--format", "dcp"]
    done = subprocess.run([sys.executable, "-m", "shardplan", *arguments], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2"},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "many"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    ],
)
def test_only_what_torchrun_sets_counts_as_torchrun(environment, tmp_path, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    shardplan.save({"w": torch.ones(2)}, tmp_path / "new")
