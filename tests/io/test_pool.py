"""The pool keeps its budget, raises the first error once, and never waits for itself."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan.io.pool import Pool, StoppedError, check_stopped
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore


class Gauge:
    """Adds up what is in flight by itself, as a check on the pool's own counter."""

    def __init__(self):
        self.lock, self.now, self.most, self.together = threading.Lock(), 0, 0, []

    def hold(self, nbytes):
        with self.lock:
            self.now += nbytes
            self.most = max(self.most, self.now)
            self.together.append((nbytes, self.now))
        time.sleep(0.0005)
        with self.lock:
            self.now -= nbytes
        return nbytes


def held(pool):
    """Return the bytes in flight, as the pool prints them."""
    return int(re.search(r"([0-9]+) of", repr(pool))[1])


@given(st.lists(st.integers(0, 120), max_size=30), st.integers(1, 6))
def test_the_budget_is_kept_and_larger_work_runs_alone(costs, workers):
    gauge = Gauge()
    with Pool(max_workers=workers, max_bytes=100) as pool:
        assert pool.map(gauge.hold, costs, nbytes=lambda cost: cost) == costs
    assert gauge.most <= pool.peak_bytes <= max([100, *costs])
    costly = [(cost, now) for cost, now in gauge.together if cost]  # free work goes beside any
    assert all(now <= 100 or now == cost for cost, now in costly)


def test_the_budget_is_shared_by_all_who_hand_in_work():
    gauge = Gauge()
    with Pool(max_workers=8, max_bytes=100) as pool:
        callers = [
            threading.Thread(target=pool.map, args=(gauge.hold, [30] * 20), kwargs={"nbytes": 30})
            for _ in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert 30 < gauge.most <= pool.peak_bytes <= 90


def test_work_runs_at_the_same_time():
    barrier = threading.Barrier(4, timeout=10)
    with Pool(max_workers=4) as pool:
        assert len(pool.map(lambda _: barrier.wait(), range(4))) == 4


def test_the_first_error_is_raised_once_after_the_others_ended():
    started, ended = [], []
    both = threading.Barrier(2, timeout=10)

    def work(n):
        started.append(n)
        if n < 2:
            both.wait()
        if n == 0:
            raise ValueError("first")
        time.sleep(0.05)
        ended.append(n)
        raise KeyError("second")

    with Pool(max_workers=2) as pool:
        with pytest.raises(ValueError, match="first"):
            pool.map(work, range(100))
        assert set(started) - {0} == set(ended)
        assert len(started) < 10
        assert pool.map(abs, [-1]) == [1]


def test_an_error_among_the_items_is_raised_before_work_begins():
    def items():
        yield 1
        raise KeyError("no more")

    begun = []
    with Pool(max_workers=2) as pool:
        with pytest.raises(KeyError, match="no more"):
            pool.map(begun.append, items())
        assert begun == []
        assert held(pool) == 0


def test_work_that_hands_in_work_does_not_wait_for_itself():
    with Pool(max_workers=1, max_bytes=10) as pool:
        inner = pool.map(lambda n: pool.map(lambda m: n * m, [1, 2], nbytes=10), [3, 4], nbytes=10)
        assert inner == [[3, 6], [4, 8]]


def test_work_that_comes_back_to_its_pool_through_another_does_not_wait_for_itself():
    with Pool(max_workers=1, max_bytes=10) as outer, Pool(max_workers=1, max_bytes=10) as inner:

        def there_and_back(n):
            return inner.map(lambda m: outer.map(lambda k: n * m * k, [1, 2], nbytes=10), [1, 10])

        found = outer.map(there_and_back, [3], nbytes=10)
    assert found == [[[3, 6], [30, 60]]]


def test_two_who_hand_in_work_take_turns():
    begun, gate, order = threading.Event(), threading.Event(), []

    def work(name):
        begun.set()
        gate.wait(10)
        order.append(name)

    with Pool(max_workers=1) as pool:
        long = threading.Thread(target=pool.map, args=(work, ["long"] * 20))
        long.start()
        assert begun.wait(10)
        short = threading.Thread(target=pool.map, args=(work, ["short"]))
        short.start()
        time.sleep(0.1)  # until the short job is in the line, while the long one is worked on
        gate.set()
        short.join()
        long.join()
    assert order.index("short") <= 2


def test_closing_a_pool_lets_what_is_under_way_finish():
    begun, found = threading.Event(), []

    def work(n):
        begun.set()
        time.sleep(0.01)
        return n

    with Pool(max_workers=2) as pool:
        caller = threading.Thread(target=lambda: found.extend(pool.map(work, range(20))))
        caller.start()
        assert begun.wait(10)
    caller.join(10)
    assert found == [*range(20)]


def test_the_threads_of_a_pool_that_nobody_holds_end():
    def running():
        return {t for t in threading.enumerate() if t not in before}

    before = set(threading.enumerate())
    assert Pool(max_workers=3).map(abs, range(9)) == [*range(9)]
    gc.collect()
    end = time.monotonic() + 10
    while running() and time.monotonic() < end:
        time.sleep(0.01)
    assert not running()


@pytest.mark.parametrize("here", [False, True])
def test_a_pool_keeps_neither_work_nor_items_nor_results(here):
    class Thing:
        pass

    kept = []

    def keep(thing):
        kept.append(weakref.ref(thing))
        return thing

    gc.disable()  # memory must be free at once, not when cycles are next looked for
    try:
        with Pool(max_workers=3) as pool:
            work = partial(lambda own, item: own and item and keep(Thing()), keep(Thing()))
            pool.map(work, [keep(Thing())] * 9, here=here)
            del work
            end = time.monotonic() + 10  # threads may be leaving the last piece of work
            while any(ref() for ref in kept) and time.monotonic() < end:
                time.sleep(0.01)
            assert not any(ref() for ref in kept)
    finally:
        gc.enable()


def test_the_handlers_of_signals_are_left_alone(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("a handler was replaced"))
    with Pool(max_workers=2) as pool:
        assert pool.map(abs, [-1, 2, -3]) == [1, 2, 3]


def test_a_closed_pool_says_so():
    with Pool() as pool:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        pool.map(abs, [1])


@pytest.mark.parametrize("wrong", [{"max_workers": 0}, {"max_bytes": 0}])
def test_a_pool_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="needs a thread and a byte"):
        Pool(**wrong)


def test_negative_cost_is_refused():
    with Pool() as pool, pytest.raises(ValueError, match="-1"):
        pool.map(abs, [1], nbytes=-1)


def test_a_thread_that_outlives_the_program_s_end_still_gets_its_work_done():
    code = (
        "import threading, time\n"
        "from shardplan.io.pool import default_pool\n"
        "default_pool().map(abs, [1])\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    time.sleep(0.2)\n"
        "    print(default_pool().map(abs, [-1, -2]))\n"
        "threading.Thread(target=late).start()\n"
    )
    run = [sys.executable, "-P", "-c", code]
    done = subprocess.run(run, check=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[1, 2]", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_child_gets_a_pool_that_works():
    code = (
        "import os\n"
        "from shardplan.io.pool import default_pool\n"
        "default_pool().map(abs, range(100))\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(sum(default_pool().map(abs, [-3, -4])))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    run = [sys.executable, "-P", "-W", "ignore", "-c", code]
    done = subprocess.run(run, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "7"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_what_was_opened_before_a_fork_works_in_the_child(tmp_path):
    code = (
        "import os, signal, sys, threading, time, torch, shardplan\n"
        "from shardplan.io.pool import Pool\n"
        "pool, gate = Pool(max_workers=1, max_bytes=10), threading.Event()\n"
        "shardplan.save({'w': torch.arange(9)}, sys.argv[1])\n"
        "checkpoint = shardplan.open_checkpoint(sys.argv[1], pool=pool)\n"
        "assert checkpoint['w'][3] == 3\n"
        "long = dict(target=pool.map, args=(lambda _: gate.wait(), [0]), kwargs={'nbytes': 10})\n"
        "threading.Thread(**long).start()\n"
        "while '10 of 10' not in repr(pool): time.sleep(0.01)\n"  # the budget is used up
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    assert repr(pool).startswith('Pool(1 threads, 0 of'), pool\n"
        "    os._exit(int(checkpoint['w'][7]) + pool.map(abs, [3], nbytes=10)[0])\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "gate.set()\n"
        "print(status)\n"
    )
    run = [sys.executable, "-P", "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(run, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "10"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_pool_that_was_closed_before_a_fork_stays_closed():
    with Pool() as pool:
        pass
    child = os.fork()
    if child == 0:
        try:
            pool.map(abs, [1])
        except RuntimeError:
            os._exit(5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_work_under_way_stops_when_another_fails():
    begun, stopped = threading.Event(), []

    def work(item):
        if item == "fails":
            begun.wait(30)
            raise ValueError("the first")
        begun.set()
        try:
            while True:
                check_stopped()
        except StoppedError:
            stopped.append(item)
            raise

    with Pool(max_workers=2) as pool, pytest.raises(ValueError, match="the first"):
        pool.map(work, ["long", "fails"])
    assert stopped == ["long"]


def test_what_failed_before_stops_no_later_work():
    def work(item):
        check_stopped()
        if item:
            raise ValueError("odd")

    with Pool(max_workers=1) as pool:
        with pytest.raises(ValueError, match="odd"):
            pool.map(work, [1])
        pool.map(work, [0])
    check_stopped()


def test_work_inside_of_work_is_stopped_with_it():
    begun, stopped = threading.Event(), []

    def inner(_):
        begun.set()
        while True:
            check_stopped()

    def work(item):
        if item == "fails":
            begun.wait(30)
            raise ValueError("the first")
        try:
            pool.map(inner, [0])
        except StoppedError:
            stopped.append(item)

    with Pool(max_workers=2) as pool, pytest.raises(ValueError, match="the first"):
        pool.map(work, ["long", "fails"])
    assert stopped == ["long"]


@pytest.mark.parametrize("nbytes", [8 << 20, 20 << 20])  # hashed before it is written, or meanwhile
def test_an_interrupted_save_does_not_write_its_file_to_the_end(nbytes):
    taken = []

    def wait_until_stopped():
        with suppress(StoppedError):
            while True:
                check_stopped()

    class Interrupted(CountingStore):
        def write(self, path, parts, **options):
            def pieces():
                for number, part in enumerate(parts):
                    taken.append(number)
                    if number == 2:
                        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                        wait_until_stopped()
                    yield part

            return super().write(path, pieces(), **options)

    inner = open_store(f"memory://interrupted-save-{nbytes}")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            shardplan.save({"w": torch.zeros(nbytes >> 2)}, Interrupted(inner))
    finally:
        signal.signal(signal.SIGINT, before)
    assert taken == [0, 1, 2]
    assert inner.list() == ()


@pytest.mark.parametrize("items", [[7], range(3)])
def test_work_that_is_done_here_keeps_to_the_budget_and_may_hand_in_more(items):
    seen = []

    def work(item):
        seen.append((threading.current_thread(), held(pool)))
        return pool.map(lambda inner: inner + item, [1, 2], nbytes=100)  # more than there is

    with Pool(max_workers=2, max_bytes=100) as pool:
        found = pool.map(work, items, nbytes=100, here=True)
        assert found == [[item + 1, item + 2] for item in items]
        assert seen == [(threading.current_thread(), 100)] * len(items)
        assert held(pool) == 0
        assert pool.map(lambda _: threading.current_thread(), range(2)) != [seen[0][0]] * 2


def test_what_work_that_is_done_here_raises_stops_the_rest_and_gives_its_memory_back():
    done = []

    def work(item):
        done.append(item)
        raise KeyboardInterrupt

    with Pool(max_workers=2, max_bytes=100) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.map(work, range(3), nbytes=60, here=True)
        assert (done, held(pool)) == ([0], 0)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1"])
def test_a_program_ends_that_was_interrupted_while_threads_were_started(number):
    program = """
import signal, sys, threading
from shardplan.io import Pool

start, ran = threading.Thread.start, []

def interrupted(thread):
    start(thread)
    signal.raise_signal(number)

number = getattr(signal, sys.argv[1])
signal.signal(number, signal.default_int_handler)  # a shell may ignore it
threading.Thread.start = interrupted
try:
    Pool(max_workers=2).map(ran.append, range(100))
except KeyboardInterrupt:
    print("interrupted", len(ran) < 2)
"""
    command = [sys.executable, "-P", "-c", program, number]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("interrupted True\n", "")


def test_work_is_done_by_what_threads_can_be_started_and_only_once(monkeypatch):
    start, started, seen = threading.Thread.start, [], []

    def limited(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with Pool(max_workers=4, max_bytes=100) as pool:
        assert pool.map(seen.append, range(8), nbytes=10) == [None] * 8
        assert sorted(seen) == [*range(8)]
        assert held(pool) == 0


def test_work_that_no_thread_can_be_started_for_may_hand_in_more(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with Pool(max_workers=2, max_bytes=100) as pool:
        found = pool.map(lambda i: pool.map(lambda j: (i, j), [0, 1], nbytes=80), [0, 1], nbytes=80)
    assert found == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_a_pool_works_where_python_takes_another_thread_for_the_main_one():
    program = """
import _thread
done = _thread.allocate_lock()

def run():
    from shardplan.io import Pool  # and with it, first of all, threading
    print(Pool(max_workers=2).map(abs, range(3)))
    done.release()

done.acquire()
_thread.start_new_thread(run, ())
done.acquire(timeout=30)
"""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0, 1, 2]\n"


def test_a_handler_may_hand_in_work_while_its_thread_waits_for_room():
    program = """
import signal, threading, time
from shardplan.io import Pool

def handler(number, frame):
    print(pool.map(abs, range(2), nbytes=50))

def work(item):
    if item == 0:
        signal.raise_signal(signal.SIGTERM)  # the main thread waits for room, and handles it
    time.sleep(0.2)
    return item

signal.signal(signal.SIGTERM, handler)
with Pool(max_workers=2, max_bytes=100) as pool:
    print(pool.map(work, range(3), nbytes=80), pool)
"""
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (
        "[0, 1]\n[0, 1, 2] Pool(2 threads, 0 of 100 bytes in flight, peak 80)\n",
        "",
    )
