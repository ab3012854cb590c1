"""How ranks come to one plan: what they tell each other, and what they remember."""

import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import shardplan
from shardplan._agree import agree
from shardplan._offers import Begun, PlanCache
from shardplan._report import Stopwatch
from shardplan.dist import CheckpointError, run_ranks, solo
from shardplan.io.stores.base import open_store
from shardplan.planning import RefusedError, annotate, cast, chain, rename, select
from shardplan.planning.mesh import layout_key

FOLDER = Path(__file__).parents[1] / "ranks"


def script(name):
    spec = importlib.util.spec_from_file_location(f"ranks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parts = script("parts")
WORLD = 3


class Saves:
    """Saves one after the other, each rank with its own memory; what ranks give is counted."""

    def __init__(self, name, world=WORLD):
        self.store = open_store(f"memory://agreement/{name}")
        self.store.delete(self.store.list())
        self.world = world
        self.caches = [PlanCache() for _ in range(world)]

    def save(self, state_of, **options):
        """Save what ``state_of(rank)`` returns; return how plans came to be, and bytes given."""

        def fn(comm):
            spy = parts.SpyComm(comm)
            report = shardplan.save(
                state_of(comm.rank),
                self.store,
                comm=spy,
                cache=self.caches[comm.rank],
                overwrite=True,
                **options,
            )
            meets, answers = ([n for name, n in spy.given if name == m] for m in ("meet", "answer"))
            # What ranks give before they write: all but the last meeting.
            return report.how, sum(meets[:-1]) + sum(answers[:-1]), spy.given

        told = run_ranks(self.world, fn)
        (how,) = {how for how, _, _ in told}
        return how, [n for _, n, _ in told]

    def restored(self):
        return shardplan.restore(self.store)


def many(rank, seed=0, count=200):
    return {f"layers.{i}.w": torch.full((4, 2), float(seed + i)) for i in range(count)}


def chunked(rank, count=200, rows=6):
    """Return tensors of which each rank holds some rows, and says so itself."""
    whole = {f"layers.{i}.w": torch.full((rows, 2), float(i)) for i in range(count)}
    return parts.part(whole, "rows", WORLD, rank)


def test_the_first_save_of_equal_plain_tensors_exchanges_one_fingerprint_per_rank():
    saves = Saves("first")
    how, given = saves.save(many)
    assert how == "derived"
    assert max(given) < 300


def test_tensors_that_only_their_holders_know_are_gathered():
    saves = Saves("gathered")
    how, given = saves.save(chunked)
    assert how == "gathered"
    assert min(given) > 1000


def test_an_unchanged_layout_exchanges_fingerprints_only_and_new_values_are_saved():
    saves = Saves("unchanged")
    saves.save(many)
    how, given = saves.save(lambda rank: many(rank, seed=5) | {"layers.0.w": torch.ones(4, 2)})
    assert how == "cached"
    assert max(given) < 300
    assert torch.equal(saves.restored()["layers.3.w"], torch.full((4, 2), 8.0))


def staged(rank, count=100):
    """Return what a stage of four ranks holds, the state of single ranks among it."""
    stage = rank // 4
    sd = {f"layers.{2 * i + stage}.w": torch.full((4, 2), float(i)) for i in range(count)}
    return sd | {"step": 7, "seed": shardplan.PerRank(torch.full((3,), float(rank)))}


@pytest.mark.parametrize("planner", [None, cast("bfloat16")], ids=["no planner", "cast"])
def test_of_each_stage_of_a_pipeline_one_description_travels(planner):
    saves = Saves(f"stages-{planner}", world=8)
    how, given = saves.save(staged, planner=planner)
    assert how == "derived"
    speakers = [n for n in given if n > 500]
    assert len(speakers) == 2  # rank 0, which also answers, and the first of the second stage
    assert max(speakers) < 8 * 2000  # 8 plans of 100 tensors take twice as much to gather alone
    restored = saves.restored()
    assert {f"layers.{i}.w" for i in range(200)} | {"step", "seed"} == restored.keys()
    assert restored["seed"]["rank_5_of_8"].tolist() == [5, 5, 5]
    assert saves.save(staged, planner=planner)[0] == "cached"


def test_stages_that_hold_a_tensor_in_part_are_refused_with_their_ranks():
    def torn(rank):
        return {"w": torch.zeros(4 + rank // 4), f"stage.{rank // 4}": 1}

    with pytest.raises(CheckpointError, match=r"`w` is not the same .*ranks 0-3: .*ranks 4-7"):
        Saves("torn", world=8).save(torn)


@pytest.mark.parametrize("how", ["derived", "cached"])
def test_what_travels_for_a_plan_that_is_known_grows_as_the_number_of_ranks(how):
    def travels(world):
        caches = [PlanCache() for _ in range(world)]
        for _ in range(1 + (how == "cached")):
            spies = [None] * world

            def fn(comm, spies=spies):
                spy = spies[comm.rank] = parts.SpyComm(comm)
                options = {"planner": None, "watch": Stopwatch(), "cache": caches[comm.rank]}
                begun = Begun(many(0, count=2), "a/path" * 10)
                return agree(spy, lambda: begun, **options).agreement.how

            (found,) = set(run_ranks(world, fn))
            how_much = [spy.nbytes() + spy.taken for spy in spies]
        assert found == how
        return sum(how_much), max(how_much[1:])

    (few, one_of_few), (many_more, one_of_many) = travels(4), travels(16)
    assert many_more < 6 * few  # as squares, sixteen times
    assert one_of_few == one_of_many < 600


@pytest.mark.parametrize("seed", range(3))
def test_changed_values_are_always_saved(seed):
    saves = Saves(f"values-{seed}")
    for turn in range(3):
        sd = {"w": torch.full((3,), float(turn + seed)), "step": turn, "note": f"turn {turn}"}
        how, _ = saves.save(lambda rank, sd=sd: sd)
        assert how == ("derived" if turn == 0 else "cached")
        restored = saves.restored()
        assert restored["w"].tolist() == [turn + seed] * 3
        assert (restored["step"], restored["note"]) == (turn, f"turn {turn}")


CHANGES = {
    "shape": lambda sd: sd | {"w": torch.zeros(5, 2)},
    "dtype": lambda sd: sd | {"w": torch.zeros(4, 2, dtype=torch.float64)},
    "name": lambda sd: {k + "x" if k == "w" else k: v for k, v in sd.items()},
    "more": lambda sd: sd | {"extra": torch.zeros(1)},
    "fewer": lambda sd: {k: v for k, v in sd.items() if k != "own"},
    "a value more": lambda sd: sd | {"note": "hello"},
    "a value for a tensor": lambda sd: sd | {"own": 3},
    "grad": lambda sd: sd | {"own": torch.zeros(2, requires_grad=True)},
}


@pytest.mark.parametrize("victim", range(WORLD))
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_any_single_rank_makes_all_plan_again(change, victim):
    saves = Saves("change")

    def unchanged(rank):
        return {"w": torch.full((4, 2), float(rank)), "own": torch.zeros(2)}

    def changed(rank):
        return CHANGES[change](unchanged(rank)) if rank == victim else unchanged(rank)

    def named(state):
        return lambda rank: {f"{name}.{rank}": value for name, value in state(rank).items()}

    hows = [saves.save(named(s))[0] for s in (unchanged, unchanged, changed, changed, unchanged)]
    # The last time, the others remember a plan with the change.
    assert hows == ["derived", "cached", "gathered", "cached", "gathered"]
    assert set(shardplan.open_checkpoint(saves.store).keys()) == {
        name for rank in range(WORLD) for name in named(unchanged)(rank)
    }


def test_equal_flat_names_in_other_nestings_are_not_confused():
    saves = Saves("nesting")
    w = torch.ones(2)
    nestings = [{"a.b": w}, {"a": {"b": w}}, {"a": [w]}, {"a": {0: w}}, {"a": {"0": w}}]
    for nested in nestings:
        saves.save(lambda rank, nested=nested: nested)
        restored = saves.restored()
        assert repr(restored) == repr(nested)
        how, _ = saves.save(lambda rank, nested=nested: nested)
        assert how == "cached"


def test_ranks_that_nest_differently_do_not_share_a_plan():
    saves = Saves("differently", world=2)
    how, _ = saves.save(lambda rank: {"a": {"b": torch.ones(2)}} if rank else {"c": torch.ones(2)})
    assert how == "gathered"


def test_another_planner_is_another_plan():
    saves = Saves("planner")
    bf16, renamed = cast("bfloat16"), rename({"layers.0.w": "first"})
    hows = [saves.save(many, planner=p)[0] for p in (None, bf16, renamed, None, bf16)]
    assert hows == ["derived", "derived", "derived", "cached", "cached"]
    assert shardplan.open_checkpoint(saves.store)["layers.0.w"].dtype == torch.bfloat16


def test_what_a_planner_made_is_remembered_whether_or_not_the_planner_hashes():
    class Planner(list):
        def __call__(self, plans):
            return plans

    saves = Saves("unhashable")
    hows = [saves.save(many, planner=Planner())[0] for _ in range(2)]
    assert hows == ["derived", "cached"]


def test_another_coordinator_or_fewer_ranks_make_another_plan():
    cache = [PlanCache() for _ in range(4)]
    store = open_store("memory://agreement/ranks")

    def fn(comm):
        return shardplan.save(
            many(comm.rank), store, comm=comm, cache=cache[comm.rank], overwrite=True
        ).how

    assert set(run_ranks(4, fn)) == {"derived"}
    assert set(run_ranks(3, fn)) == {"derived"}
    assert set(run_ranks(3, fn, coordinator=1)) == {"derived"}
    assert set(run_ranks(4, fn)) == {"cached"}


def test_a_single_rank_remembers_too():
    cache, store = PlanCache(), open_store("memory://agreement/solo")
    for turn in range(2):
        shardplan.save({"w": torch.full((2,), float(turn))}, store, cache=cache, overwrite=True)
        assert shardplan.restore(store)["w"].tolist() == [turn, turn]


def test_a_rank_that_forgot_makes_all_plan_again():
    saves = Saves("forgot")
    saves.save(chunked_plain)
    assert saves.save(chunked_plain)[0] == "cached"
    saves.caches[1].clear()
    assert saves.save(chunked_plain)[0] == "gathered"
    assert saves.save(chunked_plain)[0] == "cached"


def chunked_plain(rank):
    """Return tensors that differ from rank to rank, so that only a gathering tells."""
    return {f"w{rank}": torch.full((2,), float(rank)), "all": torch.ones(3)}


def test_a_value_that_cannot_be_stored_is_refused_on_any_rank_with_a_known_plan_too():
    saves = Saves("objects", world=2)
    saves.save(lambda rank: {"w": torch.zeros(2), "s": [7]})
    assert saves.save(lambda rank: {"w": torch.ones(2), "s": [7]})[0] == "cached"
    for culprit in range(2):

        def bad(rank, culprit=culprit):
            return {"w": torch.zeros(2), "s": [print] if rank == culprit else [7]}

        with pytest.raises(CheckpointError, match="`s`") as raised:
            saves.save(bad)
        assert {failure.rank for failure in raised.value.failures} == {culprit}
        assert {failure.type for failure in raised.value.failures} == {"ValueRefusedError"}
    assert shardplan.restore(saves.store)["w"].tolist() == [1, 1]


def test_a_save_with_a_known_plan_plans_nothing_and_still_compares(monkeypatch):
    saves = Saves("known", world=2)
    saves.save(lambda rank: {"w": torch.zeros(2), "s": 7})

    def never(*args, **options):
        raise AssertionError("a plan was made")

    monkeypatch.setattr("shardplan._offers.plan_flat", never)
    assert saves.save(lambda rank: {"w": torch.ones(2), "s": 8})[0] == "cached"
    with pytest.raises(CheckpointError, match="`s` differs"):
        saves.save(lambda rank: {"w": torch.ones(2), "s": rank})


class Once(dict):
    """A mapping that gives its values once for each time that it is asked."""

    def values(self):
        return iter(list(super().values()))


@pytest.mark.parametrize(
    "state_of",
    [
        lambda value: {"a": np.array([value]), "b": np.zeros(2)},
        lambda value: {"a": np.zeros(2), "b": np.array([value])},
        lambda value: {"a": [torch.zeros(2), {"b": (1, value)}]},
        lambda value: {"a": Once(b=value)},
    ],
)
def test_objects_are_found_wherever_they_are_though_the_plan_is_known(state_of):
    saves = Saves("objects-anywhere", world=2)
    hows = [saves.save(lambda rank: state_of(1.5))[0] for _ in range(2)]
    assert hows[1] == "cached"
    with pytest.raises(CheckpointError, match=r"ValueRefusedError: `[ab]"):
        saves.save(lambda rank: state_of(print))


def test_errors_of_a_plan_tell_ranks_by_their_numbers_in_the_job():
    def group(comm):
        """Return a comm of ranks 4 and 6 of a job."""
        spy = parts.SpyComm(comm)
        spy.ranks = (4, 6)
        return spy

    def fn(comm):
        sd = {"w": torch.zeros(2 + comm.rank)}
        with pytest.raises(CheckpointError) as raised:
            shardplan.save(sd, "memory://agreement/numbers", comm=group(comm))
        return raised.value.failures

    for failures in run_ranks(2, fn):
        assert [failure.rank for failure in failures] == [4]
        assert "rank 0 of this group is rank 4, rank 1 of this group is rank 6" in failures[0].text


def test_a_cache_keeps_the_last_few_and_forgets_the_oldest():
    cache = PlanCache(entries=2)
    for key in "abc":
        cache.put(key, key)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (None, "b", "c")
    cache.get("b")
    cache.put("d", "d")
    assert (cache.get("b"), cache.get("c"), cache.get("d")) == ("b", None, "d")


def test_the_key_of_a_layout_is_the_same_for_other_values_and_no_other_layout():
    base = {"w": torch.zeros(2, 3), "n": np.zeros(2), "step": 1}
    key = layout_key(base)
    assert layout_key({"w": torch.ones(2, 3), "n": np.ones(2), "step": 2}) == key
    others = [
        base | {"w": torch.zeros(3, 2)},
        base | {"w": torch.zeros(2, 3).half()},
        base | {"w": torch.zeros(2, 3, requires_grad=True)},
        base | {"n": np.zeros(2, np.float32)},
        {k: v for k, v in base.items() if k != "step"},
        base | {"step": torch.zeros(())},
    ]
    keys = [layout_key(other) for other in others]
    assert key not in keys
    assert len(set(keys)) == len(keys)


def test_names_and_nesting_are_part_of_the_key_of_a_layout():
    w, v = torch.zeros(2), torch.zeros(3)
    layouts = [
        {"a": w, "b": v},
        {"b": v, "a": w},
        {"a": v, "b": w},
        {"a": {"b": w}},
        {"a": {"b": v}},
        {"a": [w, v]},
        {"a": (w, v)},
        {"a": [v, w]},
        {"a": [[w], v]},
        {"a": 7},
        *({name: w} for name in (1, True, 1.0, "1", 0.0, -0.0, (1,), (True,))),
    ]
    keys = [layout_key(layout) for layout in layouts]
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("wrong", [None, 7, [("w", 1)]])
def test_what_is_no_state_dict_has_no_key(wrong):
    assert layout_key(wrong) is None


def test_what_cannot_be_hashed_or_asked_has_no_key():
    class Strange:
        def __getattr__(self, name):
            raise KeyError(name)

    class Listed:
        shape, dtype = (2,), ["float32"]

    assert layout_key({"w": torch.zeros(2), "x": Strange()}) is None
    assert layout_key({"w": Listed()}) is None
    with pytest.raises(RefusedError, match="`x` is a Strange that has no shape"):
        shardplan.save({"w": torch.zeros(2), "x": Strange()}, "memory://strange")


def test_a_tensor_that_knows_its_own_chunks_has_no_key():
    assert layout_key(chunked(0)) is None


# Derived and gathered plans are one


def test_an_agreement_is_the_same_however_it_came_about(monkeypatch):
    """With the way to derive it closed, the coordinator makes the very same plan."""
    store = open_store("memory://agreement/ways")

    def agreed(comm):
        begun = Begun(many(comm.rank, count=5) | {"step": 7}, "here")
        options = {"planner": chain(), "watch": Stopwatch(), "cache": PlanCache()}
        return agree(comm, lambda: begun, **options).agreement

    derived = run_ranks(WORLD, agreed)
    monkeypatch.setattr("shardplan._offers.describe", lambda *args: None)
    gathered = run_ranks(WORLD, agreed)
    assert {a.how for a in derived} == {"derived"}
    assert {a.how for a in gathered} == {"gathered"}
    assert [a.plan for a in derived] == [a.plan for a in gathered]
    assert derived[0].whole.metadata == gathered[0].whole.metadata
    assert tuple(derived[0].whole.plans) == tuple(gathered[0].whole.plans)
    assert store.list() == ()


def test_plans_are_derived_only_if_all_ranks_derive_the_same():
    saves = Saves("same", world=2)
    how, _ = saves.save(
        lambda rank: (
            {"w": torch.zeros(2 + rank), "v": torch.zeros(1)}
            if rank == 0
            else {"v": torch.zeros(1)}
        )
    )
    assert how == "gathered"


def test_tensors_of_one_name_and_two_shapes_are_a_conflict_on_all_ranks():
    saves = Saves("conflict", world=2)
    with pytest.raises(CheckpointError, match="`w`"):
        saves.save(lambda rank: {"w": torch.zeros(2 + rank)})
    assert saves.store.list() == ()


def test_agreements_of_several_saves_at_once_do_not_mix():
    """Comms of their own keep saves apart, though they share a cache."""
    cache = [PlanCache() for _ in range(2)]
    stores = [open_store(f"memory://agreement/at-once-{i}") for i in range(4)]
    errors = []

    def save(number):
        def fn(comm):
            sd = {"w": torch.full((number + 1,), float(number))}
            return shardplan.save(
                sd, stores[number], comm=comm, cache=cache[comm.rank], overwrite=True
            )

        try:
            for _ in range(3):
                run_ranks(2, fn)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for number, store in enumerate(stores):
        assert shardplan.restore(store)["w"].tolist() == [number] * (number + 1)


def test_one_rank_alone_needs_no_comm_to_agree():
    begun = Begun({"w": torch.ones(1)}, "here")
    agreed = agree(solo(), lambda: begun, planner=None, watch=Stopwatch(), cache=PlanCache())
    assert agreed.agreement.how == "alone"
    assert agreed.begun is begun


def test_a_planner_is_asked_every_time_whatever_was_planned_before():
    """It may look at anything: at the step, at a list that grows."""
    step, keep = [1], ["a"]
    sd = {"a": torch.ones(2), "b": torch.ones(2)}
    marks = annotate(lambda plan: {"step": step[0]})

    def grows(plans):
        return select(*keep)(plans)

    for planner in (marks, grows):
        step[0], keep[:] = 1, ["a"]
        found = []
        for turn in range(2):
            path = f"memory://asked-{planner is marks}-{turn}"
            shardplan.save(sd, path, planner=planner)
            found.append(shardplan.open_checkpoint(path).metadata)
            step[0] += 1
            keep.append("b")
        assert found[0] != found[1]


def test_ranks_that_open_different_checkpoints_load_neither():
    def both(comm):
        shardplan.save(
            {"w": torch.full((2,), float(comm.rank))}, f"memory://side-{comm.rank}", comm=solo()
        )
        sd = {"w": torch.zeros(2)}
        try:
            shardplan.load(sd, f"memory://side-{comm.rank}", comm=comm)
        except CheckpointError as error:
            return str(error), sd["w"].tolist()
        return "", sd["w"].tolist()

    for text, left in run_ranks(2, both):
        assert "the checkpoints: they differ between ranks (" in text
        assert left == [0.0, 0.0]


def test_zeros_of_either_sign_are_different_names():
    shardplan.save({0.0: torch.ones(2)}, "memory://zero")
    shardplan.save({-0.0: torch.ones(2)}, "memory://minus")
    assert [repr(k) for k in shardplan.restore("memory://minus")] == ["-0.0"]


def test_a_plan_for_an_empty_dict_is_not_used_for_a_value_in_its_place(tmp_path):
    cache = PlanCache()

    def save(held, name):
        def fn(comm):
            state = {"opt": {"state": held if comm.rank else {"w": torch.ones(2)}}}
            return shardplan.save(state, tmp_path / name, comm=comm, cache=cache)

        return run_ranks(2, fn)

    save({}, "a")
    with pytest.raises(CheckpointError, match=r"`opt\.state` is a value"):
        save(None, "b")
