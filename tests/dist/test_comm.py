"""Ranks that exchange bytes and take steps together: alone, as threads, and as real processes."""

import contextlib
import gc
import importlib.util
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch.distributed

from shardplan.dist import (
    CheckpointError,
    Failure,
    LostRanksError,
    all_gather,
    all_keys,
    all_reduce,
    reduce_scatter,
    run_ranks,
    solo,
    steps,
    torch_comm,
)
from shardplan.dist.errors import thinned
from shardplan.dist.rendezvous import Meetings, _Note
from shardplan.dist.transport import Worker

FOLDER = Path(__file__).parents[1] / "ranks"
WORLD = 4


def script(name):
    spec = importlib.util.spec_from_file_location(f"ranks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


together, parts = script("together"), script("parts")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(name, *arguments, log):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", FOLDER / f"{name}.py", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def run_processes(folder, commands):
    """Run commands (script, arguments) at once; all must end well."""
    logs = [(folder / f"log-{i}").open("w+") for i in range(len(commands))]
    processes = [start(*command, log=log) for command, log in zip(commands, logs, strict=True)]
    try:
        codes = [process.wait(timeout=100) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    texts = [(folder / f"log-{i}").read_text() for i in range(len(commands))]
    assert codes == [0] * len(commands), "\n".join(texts)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Run both scripts at once: a group of four that lives, and groups in which a rank exits."""
    folder, port = tmp_path_factory.mktemp("real"), free_port()
    ranks = [("together", r, WORLD, port, folder / f"told-{r}") for r in range(WORLD)]
    run_processes(folder, [*ranks, ("exits", folder)])
    return folder


@pytest.fixture(scope="module")
def stops(tmp_path_factory):
    """Return, per case in which rank 0 is stopped, what each other rank told."""
    folder = tmp_path_factory.mktemp("stops")
    run_processes(folder, [("stops", folder)])
    cases = script("stops").CASES
    return {
        case: [json.loads((folder / f"{case}-{rank}").read_text()) for rank in (1, 2)]
        for case in cases
    }


@pytest.fixture(scope="module")
def processes(real):
    """Return, per rank of a group of four processes, what each case told."""
    return [json.loads((real / f"told-{r}").read_text()) for r in range(WORLD)]


@pytest.fixture(scope="module")
def exits(real):
    """Return, per case in which a process exits, what each survivor told."""
    told = {}
    for path in real.glob("*:*-*"):
        if not path.name.startswith("store-"):
            case, rank = path.name.rsplit("-", 1)
            told.setdefault(case, {})[int(rank)] = json.loads(path.read_text())
    return told


KINDS = [
    "solo",
    *(f"threads-{n}" for n in (1, 2, 3, 5, 8)),
    pytest.param("processes", marks=pytest.mark.slow),
]


@pytest.fixture
def tell(request):
    """Return a function that gives, per rank, what a case tells on ranks of the given kind."""

    def told(kind, case):
        if kind == "processes":
            return [rank[case] for rank in request.getfixturevalue("processes")]
        if kind == "solo":
            return [together.CASES[case](solo())]
        return run_ranks(int(kind.removeprefix("threads-")), together.CASES[case], timeout=20)

    return told


# The contract, whatever the ranks are


def guilty(step, fault, n):
    """Return the ranks on which a fault strikes in a step."""
    everyone, last, first = set(range(n)), {n - 1}, {0}
    runs_map = first if step == "broadcast" else everyone
    reduces = step in ("reduce_scatter", "all_reduce")
    return {
        "none": set(),
        "map_on_the_last": last & runs_map,
        "map_on_all_but_the_first": (everyone - first) & runs_map,
        "map_on_the_coordinator": first,
        "reduce": first if reduces else set(),
        "unsendable_on_the_last": last & runs_map,
        "unsendable_result": first if reduces else set(),
    }[fault]


@pytest.mark.parametrize("fault", together.FAULTS)
@pytest.mark.parametrize("step", together.STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_fails_on_all_ranks_alike_and_names_exactly_those_to_blame(tell, kind, step, fault):
    told = tell(kind, f"{step}:{fault}")
    blamed = guilty(step, fault, len(told))
    if not blamed:
        assert all("value" in rank for rank in told)
        return
    assert all(rank["failures"] == told[0]["failures"] for rank in told)
    failures = told[0]["failures"]
    assert {rank for rank, *_ in failures} == blamed
    assert len(failures) == len(blamed)
    for rank, step_name, kind_of_error, text, trace in failures:
        assert step_name == "a step"
        assert kind_of_error == ("CodecError" if fault.startswith("unsendable") else "ValueError")
        if kind_of_error == "ValueError":
            assert text.startswith(f"{fault.split('_')[0]} failed on {rank}")
        assert trace.startswith("Traceback")
        assert kind_of_error in trace


@pytest.mark.parametrize("fault", together.FAULTS)
@pytest.mark.parametrize("step", together.STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_together_after_a_step_that_failed(tell, kind, step, fault):
    told = tell(kind, f"{step}:{fault}")
    assert [rank["after"] for rank in told] == [len(told)] * len(told)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_give_each_rank_what_it_is_due(tell, kind):
    def values(step):
        return [rank["value"] for rank in tell(kind, f"{step}:none")]

    scattered = values("reduce_scatter")
    n = len(scattered)
    assert scattered == [10 * (rank + 1) for rank in range(n)]
    assert values("all_reduce") == [n * (n + 1) // 2] * n
    assert values("all_gather") == [list(range(1, n + 1))] * n
    assert values("broadcast") == [1] * n


@pytest.mark.parametrize("size", together.SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_payloads_of_any_size_arrive_whole(tell, kind, size):
    if size > 1 << 20 and kind in ("threads-3", "threads-5", "threads-8"):
        size = 1 << 20  # Threads pass references: more of them at more bytes show nothing new.
    for rank in tell(kind, f"exchange:{size}"):
        assert all(rank.values()), rank


@pytest.mark.parametrize("kind", KINDS)
def test_all_keys_are_the_sorted_union_of_every_rank_s(tell, kind):
    told = tell(kind, "keys")
    layers = [f"model.layer.{rank}" for rank in range(len(told))]
    assert told == [[*layers, "model.shared", "step"]] * len(told)


# Processes


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", together.COLLECTIVES)
def test_a_process_that_stalls_is_named_in_time_and_is_told_when_it_comes(processes, name, victim):
    told = [rank[f"stall:{name}:{victim}"] for rank in processes]
    reason = {str(victim): f"did not come to {name} within 1 s"}
    assert [rank["lost"] for rank in told] == [reason] * WORLD
    assert [rank["again"] for rank in told] == [{"lost": reason}] * WORLD
    assert max(rank["seconds"] for rank in told) < 1 + 3


@pytest.mark.slow
def test_a_process_that_comes_late_but_in_time_is_waited_for(processes):
    told = [rank["late:all_gather:2"] for rank in processes]
    assert [rank["value"] for rank in told] == [True] * WORLD
    assert told[0]["seconds"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("case", script("exits").CASES)
def test_a_process_that_exits_is_named_by_all_survivors_in_time(exits, case):
    victim = int(case.split(":")[1])
    told = exits[case]
    assert sorted(told) == sorted(set(range(WORLD)) - {victim})
    assert [rank["named"] for rank in told.values()] == [[victim]] * (WORLD - 1)
    assert max(rank["seconds"] for rank in told.values()) < 3 + 4


@pytest.mark.slow
@pytest.mark.parametrize("case", script("stops").CASES)
def test_a_stopped_rank_0_is_named_within_the_timeout_and_two_seconds(stops, case):
    assert [rank.get("named") for rank in stops[case]] == [[0]] * 2
    assert max(rank["seconds"] for rank in stops[case]) < 3 + 2


@pytest.mark.slow
def test_a_process_that_comes_for_something_else_is_named(processes):
    for rank in processes:
        assert rank["astray"]["lost"] == {"3": "came to barrier while rank 0 came to gather"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "victim", "error"), [("map", 2, "KeyboardInterrupt"), ("reduce", 0, "SystemExit: 3")]
)
def test_an_interrupt_comes_through_and_the_others_learn_at_once(processes, where, victim, error):
    told = [rank[f"interrupted:{where}"] for rank in processes]
    assert told.pop(victim) == {"propagated": error.removesuffix(": 3")}
    for rank in told:
        text = f"left a step: {error}"
        assert rank["failures"] == [[victim, "a step", "LostRank", text, ""]]
        assert rank["seconds"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_who_is_interrupted_in_a_meeting_is_named_and_not_who_is_late(processes, victim):
    told = [rank[f"interrupted:waiting:{victim}"] for rank in processes]
    assert told.pop(victim) == {"propagated": "KeyboardInterrupt"}
    for rank in told:
        assert rank["lost"] == {str(victim): "left barrier: KeyboardInterrupt"}


@pytest.mark.slow
def test_an_interrupt_comes_through_while_bytes_flow_and_who_waits_learns_at_once(processes):
    told = [rank["interrupted:transfer"] for rank in processes]
    assert told.pop(2) == {"propagated": "KeyboardInterrupt"}
    text = "left a step: KeyboardInterrupt"
    for rank in told:
        assert rank["failures"] == [[2, "a step", "LostRank", text, ""]]
        assert rank["seconds"] < 8  # and not the ten that bytes may take


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "text"),
    [("absent", "did not come to"), ("late", "sent or took nothing: no reply in 2 s")],
)
def test_of_ranks_that_wait_for_each_other_the_one_that_stalls_is_named(processes, case, text):
    for rank in processes:
        ((who, _, kind, why, _),) = rank[f"chain:{case}"]["failures"]
        assert (who, kind) == (2, "LostRank")
        assert why.startswith(text)


@pytest.mark.slow
def test_a_process_that_gives_nonsense_raises_and_the_others_learn_at_once(processes):
    text = "scatter takes one part for each of 4 ranks, and 1 came"
    first, *others = [rank["invalid"] for rank in processes]
    assert first == {"propagated": text}
    assert [rank["lost"] for rank in others] == [{"0": f"left scatter: ValueError: {text}"}] * 3


@pytest.mark.slow
def test_a_coordinator_that_is_at_work_is_waited_for(processes):
    assert [rank["patience"] for rank in processes] == [{"value": "xxxx"}] * 4


@pytest.mark.slow
def test_overlapping_groups_and_two_comms_of_one_group_work_at_the_same_time(processes):
    members = {"low": [0, 1], "high": [2, 3], "odd": [1, 3], "world": [0, 1, 2, 3]}
    for number, rank in enumerate(processes):
        told = {k: v for k, v in rank["groups"].items() if k != "odd_failure"}
        assert {k for k, ranks in members.items() if number in ranks} <= told.keys()
        for name, exchanged in told.items():
            ranks = exchanged.pop("ranks")
            assert all(exchanged.values()), (name, exchanged)
            assert ranks == members.get(name, ranks)


@pytest.mark.slow
def test_errors_name_global_ranks_not_places_in_the_group(processes):
    for rank in (1, 3):
        failures = processes[rank]["groups"]["odd_failure"]["failures"]
        assert [row[:4] for row in failures] == [[3, "a step", "ValueError", "no"]]


@pytest.mark.slow
def test_a_group_whose_backend_moves_nothing_works_all_the_same(processes):
    for rank in processes[1:]:
        assert all(all(exchanged.values()) for exchanged in rank["twin"]["values"])


@pytest.mark.slow
def test_a_message_larger_than_a_piece_goes_in_many(processes):
    assert all(all(rank["pieces"].values()) for rank in processes)


@pytest.mark.slow
def test_a_hundred_meetings_leave_no_more_in_the_store_than_fifty(processes):
    for rank in processes:
        after_fifty, after_a_hundred = rank["leftovers"]
        assert after_a_hundred - after_fifty < 2 * WORLD  # Some may be at the next meeting already.


# Threads


def test_sixty_four_threads_take_a_step():
    def fn(comm):
        return reduce_scatter(comm, "double", lambda: comm.rank, lambda v: [2 * x for x in v])

    assert run_ranks(64, fn) == [2 * rank for rank in range(64)]


def test_no_work_is_begun_in_a_meeting_that_was_called_off():
    store = torch.distributed.HashStore()
    late, coordinator = (Meetings(store, rank, 0, (0, 1), 5.0) for rank in (1, 0))
    late.number += 1
    late._come(_Note("a topic", b"", {}))
    late.leave("left a topic: KeyboardInterrupt")  # while it waited
    with pytest.raises(LostRanksError, match=r"rank 1.*left a topic"):
        coordinator.open("a topic", b"")


def test_a_rank_that_comes_right_after_the_last_look_is_there():
    store = torch.distributed.HashStore()
    late = Meetings(store, 1, 0, (0, 1), 5.0, number=1)

    class Late:
        """A store in which rank 1 comes once the coordinator's time is up, behind its back."""

        def __getattr__(self, name):
            return getattr(store, name)

        def check(self, keys):
            if keys == ["1/verdict"]:
                late._come(_Note("a topic", b"one", {}))
            return store.check(keys)

    coordinator = Meetings(Late(), 0, 0, (0, 1), 0.2)
    assert coordinator.open("a topic", b"zero") == [b"zero", b"one"]


@pytest.mark.parametrize("coordinator", [0, 2])
def test_a_rank_that_reads_the_verdict_late_still_names_the_rank_that_did_not_come(coordinator):
    inner, ended = torch.distributed.HashStore(), threading.Event()

    class Hosted:
        """The store of rank 0, which ends when rank 0 does; to ask it takes a while."""

        def __init__(self, delay):
            self.delay = delay

        def __getattr__(self, name):
            def call(*arguments):
                time.sleep(self.delay)
                if ended.is_set():
                    raise RuntimeError("Connection reset by peer")
                return getattr(inner, name)(*arguments)

            return call

    delays = {0: 0.0, 2: 0.1, 3: 0.1}
    ranks = {r: Meetings(Hosted(delays[r]), r, coordinator, range(4), 1.0) for r in delays}
    named = {}

    def attend(rank):
        try:
            ranks[rank].meet("a topic")
        except LostRanksError as error:
            named[rank] = list(error.reasons)
        if rank == 0:
            ended.set()

    threads = [threading.Thread(target=attend, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert named == {0: [1], 2: [1], 3: [1]}


def test_that_all_have_come_is_told_once_and_taken_back():
    inner, log = torch.distributed.HashStore(), []

    class Spy:
        """A store that notes when it is told of work."""

        def __getattr__(self, name):
            return getattr(inner, name)

        def set(self, key, value):
            log.append(("set", key))
            inner.set(key, value)

        def delete_key(self, key):
            log.append(("delete", key))
            return inner.delete_key(key)

    ranks = [Meetings(Spy(), rank, 0, (0, 1), 5.0) for rank in range(2)]

    def attend(meetings):
        for _ in range(20):
            meetings.meet("a topic")
        meetings.end()

    threads = [threading.Thread(target=attend, args=[meetings]) for meetings in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    ranks[0].worker.join(5)
    for number in range(1, 21):
        done = [what for what, key in log if key == f"{number}/all"]
        assert done == ["set", "delete"]


def test_whether_all_is_well_costs_as_many_bytes_as_there_are_ranks():
    def travels(n):
        def fn(comm):
            spy = parts.SpyComm(comm)
            all_reduce(spy, "add up", lambda: 1, sum)
            return spy.nbytes() + spy.taken

        return sum(run_ranks(n, fn))

    assert travels(16) < 6 * travels(4)  # as squares, sixteen times


def test_ranks_in_different_steps_are_told_who_is_in_which():
    """Though both steps reduce: no rank takes what another sent for something else."""
    seen = {}

    def fn(comm):
        step, value = ("save", "text") if comm.rank != 1 else ("load", 7)
        try:
            all_reduce(comm, step, lambda: value, len)
        except CheckpointError as error:
            seen[comm.rank] = [(f.rank, f.type, f.text) for f in error.failures]

    run_ranks(3, fn)
    text = "came to 'load' while rank 0 came to 'save'"
    assert seen == {rank: [(1, "LostRank", text)] for rank in range(3)}


def test_bytes_travel_as_they_are():
    data = bytes(range(256)) * 99

    def fn(comm):
        spy = parts.SpyComm(comm)
        assert all_gather(spy, "plans", lambda: data) == [data] * comm.world_size
        return spy.nbytes("meet")

    assert max(run_ranks(3, fn)) == len(data) + 1


def test_any_rank_can_be_the_coordinator():
    def fn(comm):
        return comm.gather(b"%d" % comm.rank)

    assert run_ranks(3, fn, coordinator=2) == [None, None, [b"0", b"1", b"2"]]


def test_a_rank_that_raises_surfaces_with_all_others_that_did():
    def fn(comm):
        if comm.rank in (1, 3):
            raise ValueError(f"bad {comm.rank}")
        comm.barrier()

    with pytest.raises(CheckpointError, match=r"failed on ranks 1 and 3 of the job") as caught:
        run_ranks(4, fn)
    assert [f.text for f in caught.value.failures] == ["bad 1", "bad 3"]
    assert isinstance(caught.value.__cause__, ValueError)


def test_what_a_rank_raised_in_a_step_is_the_cause_of_what_run_ranks_raises():
    def fn(comm):
        def fail():
            raise ValueError(f"bad {comm.rank}")

        all_reduce(comm, "a step", fail if comm.rank else int, sum)

    with pytest.raises(CheckpointError) as caught:
        run_ranks(3, fn)
    assert str(caught.value.__cause__) == str(caught.value.own) == "bad 1"


def test_a_failed_step_surfaces_once_for_all_threads():
    def fn(comm):
        return all_reduce(comm, "divide", lambda: 1 / comm.rank, sum)

    with pytest.raises(CheckpointError) as caught:
        run_ranks(4, fn)
    assert [(f.rank, f.step, f.type) for f in caught.value.failures] == [
        (0, "divide", "ZeroDivisionError")
    ]


@pytest.mark.parametrize("name", together.COLLECTIVES)
@pytest.mark.parametrize("how", ["returns", "raises"])
def test_threads_that_wait_for_one_that_is_gone_are_released_and_name_it(name, how):
    seen = {}

    def fn(comm):
        if comm.rank == 2:
            if how == "raises":
                raise ValueError("bad")
            return
        try:
            together.collective(comm, name)
        except LostRanksError as error:
            seen[comm.rank] = error.reasons
            if how == "raises":
                raise

    start = time.monotonic()
    if how == "raises":
        with pytest.raises(CheckpointError, match="ValueError: bad"):
            run_ranks(4, fn, timeout=30)
    else:
        run_ranks(4, fn, timeout=30)
    reason = {"returns": "had already returned", "raises": "left: ValueError: bad"}[how]
    assert seen == {rank: {2: reason} for rank in (0, 1, 3)}
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("name", together.COLLECTIVES)
def test_a_thread_that_stalls_is_named_in_time(name):
    release = threading.Event()

    def fn(comm):
        if comm.rank == 1:
            release.wait(20)
        return together.collective(comm, name)

    start = time.monotonic()
    with pytest.raises(CheckpointError, match=f"did not come to {name} within 0.2 s") as caught:
        run_ranks(3, fn, timeout=0.2)
    release.set()
    assert caught.value.ranks == (1,)
    assert time.monotonic() - start < 5


def test_a_thread_that_comes_late_but_in_time_is_waited_for():
    def fn(comm):
        time.sleep(0.3 * (comm.rank == 1))
        return comm.all_gather(b"x")

    assert run_ranks(3, fn, timeout=10) == [[b"x"] * 3] * 3


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["map", "reduce"])
def test_an_interrupt_in_a_thread_reaches_the_caller_and_the_others_learn_of_it(interrupt, where):
    seen = {}

    def map(comm):
        if where == "map" and comm.rank == 1:
            raise interrupt
        return 1

    def reduce(values):
        raise interrupt

    def fn(comm):
        try:
            all_reduce(comm, "a step", lambda: map(comm), reduce)
        except CheckpointError as error:
            seen[comm.rank] = error.failures

    with pytest.raises(interrupt):
        run_ranks(3, fn)
    victim = 1 if where == "map" else 0
    told = Failure(victim, "a step", "LostRank", f"left a step: {interrupt.__name__}")
    assert seen == {rank: (told,) for rank in range(3) if rank != victim}


@pytest.mark.parametrize("bad", [None, "text", 7, [1]])
def test_only_bytes_travel(bad):
    with pytest.raises(TypeError, match="only bytes travel"):
        solo().gather(bad)
    with pytest.raises(CheckpointError, match="TypeError: only bytes travel"):
        run_ranks(2, lambda comm: comm.all_gather(bad))


def test_a_reduce_that_forgets_a_rank_is_told_so():
    with pytest.raises(CheckpointError, match="reduce returned 1 results for 2 ranks"):
        run_ranks(2, lambda comm: reduce_scatter(comm, "share", lambda: 1, lambda values: [1]))


def test_keys_that_clash_on_one_rank_fail_all_keys_on_every_rank():
    def fn(comm):
        sd = {"a": {"b": 1}, "a.b": 2} if comm.rank == 1 else {}
        return all_keys(comm, sd)

    with pytest.raises(CheckpointError, match="rank 1, all_keys: PlanError"):
        run_ranks(2, fn)


# Errors


def test_a_checkpoint_error_pickles_and_prints_each_way_to_fail():
    failures = [
        Failure(2, "write", "OSError", "full\nvery", "Trace 2"),
        Failure(0, "write", "E", "", "Trace 0", expected=True),
    ]
    error = pickle.loads(pickle.dumps(CheckpointError(failures)))
    assert error.failures == tuple(reversed(failures))
    assert str(error).splitlines() == [
        "failed on ranks 0 and 2 of the job",
        "rank 0, write: E: ",
        "rank 2, write: OSError: full",
        "very",
        "",
        "--- rank 2 ---",
        "Trace 2",
    ]
    lost = LostRanksError({1: "is gone"})
    assert pickle.loads(pickle.dumps(lost)).reasons == lost.reasons


def test_ranks_that_fail_alike_are_told_in_one_line_and_send_one_traceback():
    def fn(comm):
        def fail():
            raise ValueError("no such key")

        with pytest.raises(CheckpointError) as caught:
            all_reduce(comm, "plan", fail, sum)
        return caught.value

    for error in run_ranks(16, fn):
        assert [f.rank for f in error.failures] == list(range(16))
        assert all("no such key" in f.traceback for f in error.failures)
        lines = str(error).splitlines()
        assert lines[:2] == [
            "failed on ranks 0-15 of the job",
            "ranks 0-15, plan: ValueError: no such key",
        ]
        assert [line for line in lines if line.startswith("---")] == ["--- ranks 0-15 ---"]
        assert error.tracebacks.count("Traceback") == 1


def test_of_thousands_of_ranks_that_fail_each_in_its_own_way_a_message_tells_the_first():
    every = [
        Failure(r, "read", "FormatError", f"shard {r}: cut short", f"Trace {r}" * 100)
        for r in range(5000)
    ]
    kept = thinned(every)
    told = steps._unpacked(steps._packed(kept))
    assert [(f.rank, f.text) for f in told] == [(f.rank, f.text) for f in every]
    assert [f.rank for f in told if f.traceback] == list(range(64))
    assert len(steps._packed(kept)) < 100 * len(every)
    lines = str(CheckpointError(told)).splitlines()
    assert lines[:2] == [
        "failed on ranks 0-4999 of the job",
        "rank 0, read: FormatError: shard 0: cut short",
    ]
    assert "and 4,992 more: this error's `failures` has all" in lines
    assert len(lines) < 50


def test_every_lost_rank_is_named_and_texts_that_differ_later_are_told_apart():
    even = CheckpointError(Failure(r, "plan", "LostRank", "is gone") for r in range(0, 64, 2))
    assert str(even).splitlines()[1].startswith("ranks 0, 2, 4")
    assert all(str(r) in str(even).replace(",", "").split() for r in range(0, 64, 2))
    texts = [Failure(r, "plan", "E", f"issues\nof rank {r}") for r in range(2)]
    assert len(CheckpointError(texts).lines) == 2
    many = CheckpointError(Failure(r, "plan", "E", "all", f"trace {r}") for r in range(100))
    assert str(many).endswith("and 92 more: this error's `failures` has all")


def test_what_all_gather_tells_of_many_failures_is_as_short_as_what_all_reduce_does():
    def fn(comm):
        def fail():
            raise ValueError(f"rank {comm.rank}")

        found = []
        for step in (
            lambda: all_reduce(comm, "a", fail, sum),
            lambda: all_gather(comm, "b", fail),
        ):
            with pytest.raises(CheckpointError) as caught:
                step()
            found.append(sum(bool(f.traceback) for f in caught.value.failures))
        return found

    assert run_ranks(70, fn) == [[64, 64]] * 70


def test_a_failed_step_keeps_nothing_alive_once_its_error_is_dropped():
    class Buffer:
        """Stands for memory that is dear."""

    alive = []

    def fail():
        mine = Buffer()
        alive.append(weakref.ref(mine))
        raise ValueError("no")

    gc.disable()
    try:
        with contextlib.suppress(CheckpointError):
            all_reduce(solo(), "a step", fail, sum)
        assert alive[0]() is None
    finally:
        gc.enable()


def test_a_rank_that_fails_while_another_is_lost_still_tells_its_own_error():
    def fn(comm):
        if comm.rank == 1:
            comm.leave("left")
            return None

        def fail():
            raise ValueError("disk full here")

        with pytest.raises(CheckpointError) as caught:
            all_reduce(comm, "write", fail, sum)
        return caught.value

    error = run_ranks(2, fn)[0]
    assert error.ranks == (1,)
    assert isinstance(error.own, ValueError)
    assert error.__notes__ == ["rank 0, write: ValueError: disk full here"]
    assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__


@pytest.mark.parametrize("where", ["map", "reduce"])
def test_a_rank_keeps_its_own_error_with_all_that_it_carries_and_others_get_text(where):
    def fn(comm):
        mine = OSError(28, "no space")

        def fail(*_):
            raise mine

        def total(values):
            return fail() if where == "reduce" else sum(values)

        work = fail if where == "map" and comm.rank == 1 else (lambda: 1)
        with pytest.raises(CheckpointError) as caught:
            all_reduce(comm, "write", work, total)
        return caught.value.own is mine, pickle.loads(pickle.dumps(caught.value)).own

    blamed = 1 if where == "map" else 0
    assert run_ranks(3, fn) == [(rank == blamed, None) for rank in range(3)]


def test_an_error_that_cannot_be_printed_is_still_told():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def fn(comm):
        def map():
            raise Mute

        return all_gather(comm, "speak", map)

    with pytest.raises(CheckpointError, match="Mute: its message cannot be printed"):
        fn(solo())


def test_an_endless_message_is_cut_and_a_lone_surrogate_is_carried():
    failure = Failure.of(ValueError("x" * 10**6 + "\ud800"), 0, "a step")
    assert len(failure.text) < 21_000
    assert "characters left out" in failure.text
    failure.text.encode()


# Without a process group


def test_torch_comm_needs_a_process_group():
    with pytest.raises(RuntimeError, match="call init_process_group, or use solo"):
        torch_comm()


def test_importing_dist_does_not_import_torch():
    code = "import sys, shardplan.dist; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


def test_a_store_that_never_answers_does_not_hang_a_rank(monkeypatch):
    monkeypatch.setattr("shardplan.dist.rendezvous.GRACE", 0.1)
    release = threading.Event()

    class Frozen:
        def __getattr__(self, name):
            return lambda *arguments: release.wait(20)

    meetings = Meetings(Frozen(), 1, 0, [0, 1], timeout=0.1)
    start = time.monotonic()
    with pytest.raises(LostRanksError, match="rank 0 is lost, and with it the store"):
        meetings.attend("gather", b"")
    assert time.monotonic() - start < 5
    release.set()


def test_a_worker_raises_what_its_call_raised():
    worker = Worker()
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0, limit=5)
    assert worker.call(lambda: 2, limit=5) == 2
    worker.close()


def failures_of(function):
    """Return what went wrong."""
    with pytest.raises(CheckpointError) as caught:
        function()
    return caught.value.failures


def test_a_rank_that_has_no_room_to_decode_what_others_decode_is_lost_to_them_at_once():
    def deep(calls, function):
        return function() if not calls else deep(calls - 1, function)

    def nested(_):
        value = 0
        for _ in range(240):
            value = [value]
        return value

    def fn(comm):
        def take():
            deep(700 * comm.rank, lambda: all_reduce(comm, "a step", int, nested))
            all_reduce(comm, "another", int, sum)

        return [(f.rank, f.step, f.text[:26]) for f in failures_of(take)]

    text = "left a step: CodecError: t"
    assert run_ranks(2, fn) == [[(1, "another", text)], [(1, "a step", text)]]
