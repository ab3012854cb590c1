"""State of which every rank has its own: saved for each, and given back to the same one."""

import random
import threading
from types import MappingProxyType

import numpy as np
import pytest
import torch

import shardplan
from shardplan import PerRank
from shardplan._offers import PlanCache
from shardplan.dist import CheckpointError, run_ranks, solo
from shardplan.io.errors import ValueRefusedError
from shardplan.planning import PlanError, cast, chain, rename, select


class Loader:
    """A data loader: it keeps its own state, which differs between ranks."""

    def __init__(self, position, shard):
        self.position, self.shard = position, shard

    def state_dict(self):
        return {"position": self.position, "shard": self.shard, "seen": torch.tensor(self.position)}

    def load_state_dict(self, state):
        self.position, self.shard = state["position"], state["shard"]
        assert state["seen"].item() == self.position


def state_of(rank):
    """Return what a rank trains with: a model that all share, and state of its own."""
    return {
        "model": {"w": torch.arange(6.0)},
        "step": 7,
        "rng": {
            "torch": PerRank(torch.full((4,), rank, dtype=torch.uint8)),
            "python": PerRank((3, tuple(range(rank, rank + 5)), None)),
        },
        "loaders": [PerRank(Loader(10 * rank, f"shard-{rank}")), PerRank({"a": [rank, {"b": ()}]})],
        "pair": (PerRank([torch.tensor([rank]), rank]), "same"),
    }


def blank():
    """Return the same with nothing in it."""
    state = state_of(-1 % 100)
    state["model"]["w"].zero_()
    return state | {"step": 0}


def assert_is(state, rank):
    """Check that a state is what a rank had."""
    assert state["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert state["step"] == 7
    assert state["rng"]["torch"].value.tolist() == [rank] * 4
    assert state["rng"]["python"].value == (3, tuple(range(rank, rank + 5)), None)
    loader, other = state["loaders"]
    assert (loader.value.position, loader.value.shard) == (10 * rank, f"shard-{rank}")
    assert other.value == {"a": [rank, {"b": ()}]}
    assert state["pair"][0].value[0].tolist() == [rank]
    assert state["pair"][0].value[1] == rank
    assert state["pair"][1] == "same"


def save_on(world, path, state=state_of, *, background=False, **options):
    def fn(comm):
        if background:
            return shardplan.async_save(state(comm.rank), path, comm=comm, **options).result(30)
        return shardplan.save(state(comm.rank), path, comm=comm, **options)

    return run_ranks(world, fn, timeout=60)


def load_on(world, path, target, **options):
    """Return what each rank has in a target of its own after a load."""

    def fn(comm):
        state = target()
        shardplan.load(state, path, comm=comm, **options)
        return state

    return run_ranks(world, fn, timeout=60)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_is_given_back_its_own(tmp_path, world, background, format):
    save_on(world, tmp_path / "c", background=background, format=format)
    for rank, state in enumerate(load_on(world, tmp_path / "c", blank)):
        assert_is(state, rank)
    assert shardplan.verify(tmp_path / "c").ok


def test_the_second_save_uses_the_plan_of_the_first_and_compares_what_is_shared(tmp_path):
    caches = [PlanCache() for _ in range(3)]

    def fn(comm, step):
        sd = {"seed": PerRank([comm.rank, step]), "w": torch.ones(2), "step": step}
        options = {"comm": comm, "cache": caches[comm.rank], "overwrite": True}
        return shardplan.save(sd, tmp_path / "c", **options).how

    assert run_ranks(3, lambda comm: fn(comm, 1)) == ["derived"] * 3
    assert run_ranks(3, lambda comm: fn(comm, 2)) == ["cached"] * 3
    assert [s["seed"].value for s in load_on(3, tmp_path / "c", lambda: {"seed": PerRank(0)})] == [
        [rank, 2] for rank in range(3)
    ]
    with pytest.raises(CheckpointError, match="`step` differs"):
        run_ranks(3, lambda comm: fn(comm, comm.rank))


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_any_tool_can_read_it_by_names_that_say_whose_it_is(tmp_path, format):
    save_on(2, tmp_path / "c", format=format)
    restored = shardplan.restore(tmp_path / "c")
    assert {k: v.tolist() for k, v in restored["rng"]["torch"].items()} == {
        "rank_0_of_2": [0] * 4,
        "rank_1_of_2": [1] * 4,
    }
    assert restored["loaders"][0]["rank_1_of_2"]["position"] == 10
    opened = shardplan.open_checkpoint(tmp_path / "c")
    assert opened["rng.python.rank_1_of_2"] == (3, (1, 2, 3, 4, 5), None)
    assert opened["loaders.0.rank_0_of_2.shard"] == "shard-0"


@pytest.mark.parametrize(("source", "target"), [("safetensors", "dcp"), ("dcp", "safetensors")])
def test_a_conversion_carries_it_along(tmp_path, source, target):
    save_on(2, tmp_path / "a", format=source)
    shardplan.convert(tmp_path / "a", tmp_path / "b", format=target)
    for rank, state in enumerate(load_on(2, tmp_path / "b", blank)):
        assert_is(state, rank)


def test_a_file_of_torch_save_holds_that_of_its_one_rank(tmp_path):
    shardplan.save(state_of(5), tmp_path / "c.pt", format="torch")
    state = blank()
    shardplan.load(state, tmp_path / "c.pt")
    assert_is(state, 5)


@pytest.mark.parametrize(("saved", "wanted"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_another_number_of_ranks_is_an_error_unless_a_function_says_what_to_do(
    tmp_path, saved, wanted
):
    save_on(saved, tmp_path / "c", lambda rank: {"seed": PerRank(rank), "w": torch.ones(2)})
    state = {"seed": PerRank(-1), "w": torch.zeros(2)}
    text = rf"`seed` was saved by each of {saved} ranks, and is loaded on {wanted}; pass PerRank\("
    with pytest.raises((PlanError, CheckpointError), match=text):
        load_on(wanted, tmp_path / "c", lambda: state)
    assert state["w"].tolist() == [0, 0]
    assert state["seed"].value == -1
    target = {"seed": PerRank(-1, resize=lambda *told: told)}
    for rank, found in enumerate(load_on(wanted, tmp_path / "c", lambda: dict(target))):
        assert found["seed"].value == (tuple(range(saved)), rank, wanted)


def test_a_function_that_resizes_gets_values_of_any_kind_as_they_were_saved(tmp_path):
    save_on(2, tmp_path / "c")

    def last(values, rank, ranks):
        assert (rank, ranks) == (0, 1)
        return values[-1]

    state = blank()
    state["rng"] = {name: PerRank(one.value, resize=last) for name, one in state["rng"].items()}
    state["loaders"] = [PerRank(one.value, resize=last) for one in state["loaders"]]
    state["pair"] = (PerRank(state["pair"][0].value, resize=last), "other")
    report = shardplan.load(state, tmp_path / "c")
    assert_is(state, 1)
    assert report.missing == report.unexpected == ()


def test_a_rank_that_saved_none_is_none_to_the_function(tmp_path):
    def state(rank):
        return {"w": torch.ones(2)} | ({"odd": PerRank(rank)} if rank % 2 else {})

    save_on(4, tmp_path / "c", state)
    target = {"odd": PerRank(0, resize=lambda values, rank, ranks: values)}
    shardplan.load(target, tmp_path / "c")
    assert target["odd"].value == (None, 1, None, 3)


def test_without_strict_what_is_there_stays_and_is_reported(tmp_path):
    save_on(2, tmp_path / "c", lambda rank: {"seed": PerRank(rank), "w": torch.ones(2)})
    state = {"seed": PerRank(-1), "w": torch.zeros(2)}
    report = shardplan.load(state, tmp_path / "c", strict=False)
    assert report.missing == ("seed.rank_0_of_1",)
    assert (state["seed"].value, state["w"].tolist()) == (-1, [1, 1])
    shardplan.load(state, tmp_path / "c", strict="w")
    with pytest.raises(PlanError, match="`seed` was saved by each of 2 ranks"):
        shardplan.load(state, tmp_path / "c", strict="seed*")


def test_what_other_ranks_saved_is_not_unexpected(tmp_path):
    save_on(2, tmp_path / "c", lambda rank: {"seed": PerRank(rank), "more": 1})

    def fn(comm):
        return shardplan.load({"seed": PerRank(0)}, tmp_path / "c", comm=comm).unexpected

    assert run_ranks(2, fn) == [("more",)] * 2


def test_it_goes_through_planners_that_rename_and_cast(tmp_path):
    planner = chain(rename(lambda key: key.replace("rng.", "random.")), cast("bfloat16"))

    def state(rank, resize=None):
        return {"rng": {"x": PerRank(torch.tensor([rank + 0.5]), resize)}, "w": torch.ones(2)}

    save_on(2, tmp_path / "c", state, planner=planner)
    assert "random.x.rank_1_of_2" in shardplan.open_checkpoint(tmp_path / "c")
    found = load_on(2, tmp_path / "c", lambda: state(-1), planner=planner)
    assert [one["rng"]["x"].value.item() for one in found] == [0.5, 1.5]
    (one,) = load_on(1, tmp_path / "c", lambda: state(-1, lambda v, *_: sum(v)), planner=planner)
    assert one["rng"]["x"].value.item() == 2.0
    save_on(2, tmp_path / "d", state, planner=select("w"))
    assert list(shardplan.restore(tmp_path / "d")) == ["w"]


def test_an_object_may_have_it_in_its_own_state(tmp_path):
    class Trainer:
        def __init__(self, seed):
            self.seed = seed

        def state_dict(self):
            return {"seed": PerRank(self.seed), "step": 3}

        def load_state_dict(self, state):
            assert state["step"] == 3
            self.seed = state["seed"].value

    save_on(2, tmp_path / "c", lambda rank: {"trainer": Trainer(rank)})
    found = load_on(2, tmp_path / "c", lambda: {"trainer": Trainer(-1)})
    assert [state["trainer"].seed for state in found] == [0, 1]


def test_a_restore_gives_this_rank_s_own(tmp_path, monkeypatch):
    save_on(
        2, tmp_path / "c", lambda rank: {"x": [PerRank(torch.tensor([rank])), 7], "y": rank // 2}
    )
    target = {"x": [PerRank(torch.empty(1, dtype=torch.int64)), 0]}
    with pytest.raises(PlanError, match=r"`x.0` was saved by each of 2 ranks, and is loaded on 1"):
        shardplan.restore(tmp_path / "c", target)
    both = {"x": [PerRank(torch.empty(1, dtype=torch.int64), lambda v, *_: torch.cat(v)), 0]}
    assert shardplan.restore(tmp_path / "c", both)["x"][0].value.tolist() == [0, 1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        restored = shardplan.restore(tmp_path / "c", target)
        assert restored["x"][0].value.tolist() == [rank]
        assert restored["x"][1] == 7
        assert shardplan.restore(tmp_path / "c", target, keys="x.1") == {"x": [None, 7]}


def test_state_that_is_per_rank_on_some_ranks_only_is_a_conflict(tmp_path):
    with pytest.raises(CheckpointError, match=r"`seed`.*rank"):
        save_on(2, tmp_path / "c", lambda rank: {"seed": PerRank(rank) if rank else rank})


LOOK_ALIKES = {
    "a longer label": lambda rank: {"rng.rank_0_of_20": rank},
    "a dict": lambda rank: {"rng": {"rank_0_of_2": rank, "rank_1_of_2": rank}},
    "a key": lambda rank: {"rng.rank_1_of_2": torch.tensor(rank), "rng.rank_0_of_2": 3},
    "beside": lambda rank: {"rng": PerRank({"a": rank}), "rng.rank_0_of_2.b": rank},
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("planner", [None, rename(lambda name: f"x.{name}")])
@pytest.mark.parametrize("kind", LOOK_ALIKES)
def test_names_that_only_look_like_those_of_a_rank_are_compared(tmp_path, kind, planner, verify):
    def fn(comm):
        options = {"comm": comm, "planner": planner, "verify_replicas": verify}
        shardplan.save(LOOK_ALIKES[kind](comm.rank), tmp_path / "c", **options)

    with pytest.raises(CheckpointError, match=r"rank_\d_of_2.*differs.*rank 0 against rank 1"):
        run_ranks(2, fn)


def test_state_that_a_planner_gives_one_name_on_all_ranks_is_refused(tmp_path):
    def fn(comm):
        planner = rename(lambda name: name.partition(".rank_")[0])
        shardplan.save({"seed": PerRank(comm.rank)}, tmp_path / "c", comm=comm, planner=planner)

    with pytest.raises(CheckpointError, match=r"`seed` stands for `seed\.rank_0_of_2` of rank 0"):
        run_ranks(2, fn)


def test_a_container_that_cannot_change_is_refused_before_anything_is_read(tmp_path):
    shardplan.save({"w": torch.ones(2), "fixed": {"seed": PerRank(1)}}, tmp_path / "c")
    state = {"w": torch.zeros(2), "fixed": MappingProxyType({"seed": PerRank(0)})}
    with pytest.raises(ValueRefusedError, match="mappingproxy"):
        shardplan.load(state, tmp_path / "c")
    assert state["w"].tolist() == [0, 0]


def test_what_it_holds_is_refused_by_name_if_it_cannot_be_stored(tmp_path):
    with pytest.raises(ValueRefusedError, match=r"`seed.rank_0_of_1.f` is a builtin_function"):
        shardplan.save({"seed": PerRank({"f": len})}, tmp_path / "c")


def test_the_random_states_of_torch_numpy_and_python_go_on_where_they_were(tmp_path):
    lock = threading.Lock()

    def states():
        return {
            "torch": PerRank(torch.get_rng_state()),
            "numpy": PerRank(np.random.default_rng(3).bit_generator.state),
            "python": PerRank(random.getstate()),
        }

    def fn(comm):
        with lock:
            torch.manual_seed(comm.rank)
            random.seed(comm.rank)
            state, drawn = states(), (torch.rand(2).tolist(), random.random())
        shardplan.save(state, tmp_path / "c", comm=comm)
        target = states()
        shardplan.load(target, tmp_path / "c", comm=comm)
        with lock:
            torch.set_rng_state(target["torch"].value)
            random.setstate(target["python"].value)
            assert (torch.rand(2).tolist(), random.random()) == drawn
        assert target["numpy"].value == state["numpy"].value

    run_ranks(2, fn)


def test_one_process_alone_saves_and_loads_its_own(tmp_path):
    shardplan.save(state_of(4), tmp_path / "c", comm=solo())
    state = blank()
    shardplan.load(state, tmp_path / "c")
    assert_is(state, 4)
