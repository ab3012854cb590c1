"""Saves in the background: what is saved is what was there, and nothing gets in training's way."""

import importlib.util
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan import _async as background
from shardplan._line import Line
from shardplan._snapshots import Buffers
from shardplan.dist import CheckpointError, Failure, run_ranks, solo
from shardplan.io.errors import ExistsError, ValueRefusedError
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore

FOLDER = Path(__file__).parents[1] / "ranks"


def script(name):
    spec = importlib.util.spec_from_file_location(f"ranks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parts = script("parts")


class Gate(CountingStore):
    """A store that writes nothing until it is opened, and can fail then."""

    def __init__(self, name):
        inner = open_store(f"memory://async/{name}")
        inner.delete(inner.list())
        super().__init__(inner)
        self.open, self.writing, self.error = threading.Event(), threading.Event(), None
        self.under_way = self.most = 0

    def write(self, path, *args, **options):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.writing.set()
        assert self.open.wait(30)
        self.under_way -= 1
        if self.error is not None:
            raise self.error
        return super().write(path, *args, **options)


@pytest.fixture
def gate(request):
    gate = Gate(request.node.name)
    yield gate
    gate.open.set()


# The snapshot


def test_nothing_that_happens_after_it_returned_is_saved(gate):
    base = torch.arange(20.0).reshape(4, 5)
    array, frozen = np.arange(6.0), torch.ones(2, requires_grad=True)
    sd = {
        "w": base,
        "view": base[1:, ::2],
        "transposed": base.T,
        "expanded": torch.ones(1).expand(3),
        "numpy": array,
        "nested": [{"x": torch.zeros(2)}, (torch.ones(1), [torch.full((2,), 3.0)])],
        "grad": frozen,
        "value": [1, {"deep": [2]}],
        "text": "before",
    }
    before = {
        "w": base.clone(),
        "view": base[1:, ::2].clone(),
        "transposed": base.T.clone(),
        "numpy": array.copy(),
    }
    future = shardplan.async_save(sd, gate)
    base.zero_()
    array[:] = -1
    sd["nested"][0]["x"].fill_(9)
    sd["nested"][1][0].fill_(9)
    sd["nested"][1][1][0].fill_(9)
    sd["value"][1]["deep"].append("late")
    sd["text"] = "after"
    sd["new"] = torch.ones(1)
    with torch.no_grad():
        frozen.zero_()
    gate.open.set()
    future.result(30)
    saved = shardplan.restore(gate)
    for name, value in before.items():
        assert np.array_equal(np.asarray(saved[name]), np.asarray(value)), name
    assert saved["expanded"].tolist() == [1.0] * 3
    assert saved["nested"][0]["x"].tolist() == [0, 0]
    assert [saved["nested"][1][0].tolist(), saved["nested"][1][1][0].tolist()] == [[1], [3, 3]]
    assert saved["grad"].tolist() == [1, 1]
    assert saved["value"] == [1, {"deep": [2]}]
    assert saved["text"] == "before"
    assert "new" not in saved


def test_tensors_that_know_their_own_chunks_are_copied_too(gate):
    whole = {"w": torch.arange(24.0).reshape(6, 4)}
    mine = parts.part(whole, "scattered", 1, 0)
    future = shardplan.async_save(mine, gate)
    for tensor in mine["w"].parts.values():
        tensor.zero_()
    gate.open.set()
    future.result(30)
    assert torch.equal(shardplan.restore(gate)["w"], whole["w"])


def test_stateful_objects_are_asked_at_once(gate):
    net = torch.nn.Linear(2, 2)
    before = net.weight.detach().clone()
    future = shardplan.async_save({"net": net}, gate)
    with torch.no_grad():
        net.weight.zero_()
    gate.open.set()
    future.result(30)
    assert torch.equal(shardplan.restore(gate)["net"]["weight"], before)


shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3)


@given(st.lists(st.tuples(shapes, st.booleans(), st.booleans()), max_size=4), st.integers(1, 3))
def test_copies_in_used_buffers_are_copies_all_the_same(kinds, turns):
    buffers = Buffers()
    for turn in range(turns):
        sd = {}
        for number, (shape, transposed, as_list) in enumerate(kinds[turn:] or kinds):
            tensor = torch.rand(shape)
            tensor = tensor.T if transposed and tensor.ndim == 2 else tensor
            sd[f"t{number}"] = [tensor, turn] if as_list else tensor
        wanted = {
            name: [v[0].clone(), v[1]] if isinstance(v, list) else v.clone()
            for name, v in sd.items()
        }
        copied = buffers.copy(sd)
        for value in sd.values():
            (value[0] if isinstance(value, list) else value).fill_(-1)
        for name, value in wanted.items():
            got, want = copied[name], value
            if isinstance(want, list):
                assert got[1] == want[1]
                got, want = got[0], want[0]
            assert torch.equal(got, want)


def test_tied_tensors_are_copied_once_and_buffers_are_used_again():
    buffers, w = Buffers(), torch.ones(1000)
    first = buffers.copy({"a": w, "b": w})
    assert first["a"] is first["b"]
    kept = first["a"].data_ptr()
    assert buffers.copy({"a": w, "b": w})["a"].data_ptr() == kept
    assert buffers.copy({"a": torch.ones(999)})["a"].data_ptr() != kept


# One at a time


def test_it_returns_before_anything_is_written(gate):
    future = shardplan.async_save({"w": torch.ones(2)}, gate)
    assert not future.done()
    assert gate.inner.list() == ()
    assert 0 < future.blocked < 10
    gate.open.set()
    report = future.result(30)
    assert "stage" in report.seconds
    assert future.done()


def test_a_second_call_waits_for_the_first_save(gate):
    shardplan.async_save({"w": torch.ones(2)}, gate)
    assert gate.writing.wait(10)
    threading.Timer(0.3, gate.open.set).start()
    start = time.monotonic()
    second = shardplan.async_save({"w": torch.zeros(2)}, gate, overwrite=True)
    assert time.monotonic() - start > 0.2
    second.result(30)
    assert gate.most == 1
    assert shardplan.restore(gate)["w"].tolist() == [0, 0]


@pytest.mark.parametrize("comm", [None, solo()])
def test_saves_of_several_threads_wait_for_each_other_and_save_what_each_had(gate, comm):
    """One begins while another is under way, and a third meanwhile: no copy replaces another's."""
    stores = [gate, Gate("second"), Gate("third")]
    stores[1].open.set()
    stores[2].open.set()
    futures = {}

    def save(number):
        sd = {"w": torch.full((1000,), float(number))}
        futures[number] = shardplan.async_save(sd, stores[number], comm=comm)

    save(0)
    threads = [threading.Thread(target=save, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert list(futures) == [0]  # the others have not come to their copies
    gate.open.set()
    for thread in threads:
        thread.join(30)
    for number, store in enumerate(stores):
        futures[number].result(30)
        assert shardplan.restore(store)["w"].unique().tolist() == [number]


# Interrupts


class Interrupted:
    """A state that is asked for when Ctrl-C is pressed."""

    def state_dict(self):
        raise KeyboardInterrupt

    def load_state_dict(self, state):
        pass


def test_an_interrupt_in_the_snapshot_comes_through_and_the_other_ranks_learn_at_once(gate):
    gate.open.set()
    told = {}

    def fn(comm):
        state = {"s": Interrupted()} if comm.rank == 1 else {"w": torch.ones(1)}
        try:
            told[comm.rank] = shardplan.async_save(state, gate, comm=comm).exception(30).failures
        except KeyboardInterrupt:
            time.sleep(0.5)  # a rank that has returned is lost anyway
            told[comm.rank] = "interrupted"

    run_ranks(3, fn, timeout=60)
    lost = Failure(1, told[0][0].step, "LostRank", "left the save: KeyboardInterrupt")
    assert told == {0: (lost,), 1: "interrupted", 2: (lost,)}


def test_an_interrupt_while_it_waits_for_the_save_before_leaves_that_one_alone(gate, monkeypatch):
    told = {}

    def fn(comm):
        first = shardplan.async_save({"w": torch.ones(1)}, gate, comm=comm)
        assert gate.writing.wait(10)
        if comm.rank == 1:
            line = background._savers[comm].line
            monkeypatch.setattr(line, "drain", interrupt)
            with pytest.raises(KeyboardInterrupt):
                shardplan.async_save({"w": torch.zeros(1)}, gate, comm=comm)
            gate.open.set()
            told[1] = first.exception(30)
            time.sleep(0.5)  # a rank that has returned is lost anyway
        else:
            second = shardplan.async_save({"w": torch.zeros(1)}, gate, comm=comm, overwrite=True)
            told[comm.rank] = first.exception(30), second.exception(30).failures[0]

    def interrupt():
        raise KeyboardInterrupt

    run_ranks(2, fn, timeout=60)
    assert told[1] is None
    assert told[0][0] is None
    assert told[0][1].text == "left the save: KeyboardInterrupt"
    assert shardplan.restore(gate)["w"].tolist() == [1]


def test_a_call_that_was_interrupted_does_not_keep_the_next_one_from_saving(gate):
    gate.open.set()
    with pytest.raises(KeyboardInterrupt):
        shardplan.async_save({"s": Interrupted()}, gate)
    shardplan.async_save({"w": torch.ones(2)}, gate).result(30)
    assert shardplan.restore(gate)["w"].tolist() == [1, 1]


class Interrupter:
    """Raises KeyboardInterrupt at one of the bytecodes that a call executes on its own thread."""

    FILES = (
        background.__file__,
        sys.modules[Line.__module__].__file__,
        sys.modules[Buffers.__module__].__file__,
        threading.__file__,
    )

    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in self.FILES:
            return None
        frame.f_trace_opcodes = True
        if event in ("opcode", "line"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def hits(self, call):
        """Make a call; tell whether it was interrupted."""
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def slowly(plans):
    """Take long enough for another save to begin meanwhile, if it may."""
    time.sleep(0.005)
    return plans


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 8))
def test_wherever_ctrl_c_hits_every_checkpoint_has_its_own_elements(first):
    hits, number = 0, first
    while True:
        stores = [open_store(f"memory://interrupted/{first}/{number}-{i}") for i in range(2)]
        w = torch.full((4,), 1.0)
        trial = Interrupter(number)
        hit = trial.hits(
            lambda store=stores[0], w=w: shardplan.async_save({"w": w}, store, planner=slowly)
        )
        w.fill_(2.0)
        shardplan.async_save({"w": w}, stores[1], planner=slowly).result(30)
        background._own.line.drain()
        assert shardplan.restore(stores[1])["w"].unique().tolist() == [2.0]
        if stores[0].exists("shardplan.json") or not hit:
            assert shardplan.restore(stores[0])["w"].unique().tolist() == [1.0]
        if not hit:
            break
        hits, number = hits + 1, number + 7
    assert hits > 20


# Errors


def test_an_error_surfaces_in_result_and_is_logged(gate, caplog):
    gate.error = OSError("disk full")
    gate.open.set()
    with caplog.at_level(logging.ERROR, "shardplan"):
        future = shardplan.async_save({"w": torch.ones(2)}, gate)
        with pytest.raises(OSError, match="disk full"):
            future.result(30)
    assert "the save to memory://async" in caplog.text
    assert "disk full" in caplog.text
    gate.error = None
    shardplan.async_save({"w": torch.ones(2)}, gate).result(30)  # it was told: this one goes on


def test_an_error_nobody_asked_for_surfaces_in_the_next_call(gate):
    gate.error = OSError("disk full")
    gate.open.set()
    shardplan.async_save({"w": torch.ones(2)}, gate)
    with pytest.raises(OSError, match="disk full"):
        shardplan.async_save({"w": torch.ones(2)}, gate)
    gate.error = None
    shardplan.async_save({"w": torch.ones(2)}, gate).result(30)
    assert shardplan.restore(gate)["w"].tolist() == [1, 1]


def test_an_error_that_was_asked_for_by_exception_is_not_raised_again(gate):
    gate.error = OSError("disk full")
    gate.open.set()
    error = shardplan.async_save({"w": torch.ones(2)}, gate).exception(30)
    assert "disk full" in str(error)
    gate.error = None
    shardplan.async_save({"w": torch.ones(2)}, gate).result(30)


def test_what_save_refuses_surfaces_in_the_future(gate):
    gate.open.set()
    shardplan.save({"w": torch.ones(2)}, gate)
    with pytest.raises(ExistsError):
        shardplan.async_save({"w": torch.zeros(2)}, gate).result(30)
    assert shardplan.restore(gate)["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("path", "format", "error"),
    [
        (None, "safetensors", TypeError),
        ({"w": 1}, "safetensors", TypeError),
        ("", "safetensors", ValueError),
        ("nowhere://a/b", "safetensors", ValueError),
        ("memory://formats", "no such format", ValueError),
    ],
)
def test_a_wrong_path_or_format_is_refused_by_the_call_as_by_save(path, format, error, caplog):
    texts = []
    for way in (shardplan.save, shardplan.async_save):
        with pytest.raises(error) as raised:
            way({"w": torch.ones(2)}, path, format=format)
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    assert "background" not in caplog.text  # the caller has the error
    shardplan.async_save({"w": torch.ones(2)}, "memory://after", overwrite=True).result(30)


def test_ranks_learn_of_a_wrong_path_on_one_of_them_and_the_next_save_works(gate):
    gate.open.set()

    def fn(comm):
        if comm.rank == 1:
            with pytest.raises(TypeError):
                shardplan.async_save({"w": torch.ones(1)}, None, comm=comm)
            told = None
        else:
            told = shardplan.async_save({"w": torch.ones(1)}, gate, comm=comm).exception(30)
        shardplan.async_save({"w": torch.ones(1)}, gate, comm=comm).result(30)
        return told

    told = run_ranks(3, fn, timeout=60)
    assert told[1] is None
    for error in (told[0], told[2]):
        assert [(failure.rank, failure.type) for failure in error.failures] == [(1, "TypeError")]


def test_a_state_that_cannot_be_copied_fails_the_save_not_the_call(gate):
    class Broken:
        def state_dict(self):
            raise RuntimeError("no state today")

        def load_state_dict(self, state):
            pass

    gate.open.set()
    future = shardplan.async_save({"broken": Broken()}, gate)
    with pytest.raises(RuntimeError, match="no state today"):
        future.result(30)


@pytest.mark.parametrize("asks", [(), (0,), (0, 1), (0, 1, 2)])
def test_ranks_of_which_only_some_asked_for_an_error_stay_together(gate, asks):
    """Who has not asked gets the old error; who has gets one that names those ranks."""
    gate.open.set()

    class Broken:
        def __init__(self, fails):
            self.fails = fails

        def state_dict(self):
            if self.fails:
                raise RuntimeError("no state today")
            return {"w": torch.ones(1)}

        def load_state_dict(self, state):
            pass

    def fn(comm):
        future = shardplan.async_save({"b": Broken(comm.rank == 1)}, gate, comm=comm)
        if comm.rank in asks:
            with pytest.raises(CheckpointError):
                future.result(30)
        told = None
        try:
            second = shardplan.async_save({"b": Broken(False)}, gate, comm=comm, overwrite=True)
            second.result(30)
        except CheckpointError as error:
            told = [(f.rank, f.text.splitlines()[0]) for f in error.failures]
        third = shardplan.async_save({"b": Broken(False)}, gate, comm=comm, overwrite=True)
        return told, third.exception(30)

    told = run_ranks(3, fn, timeout=20)
    assert [third for _, third in told] == [None] * 3
    for rank, (second, _) in enumerate(told):
        if len(asks) == 3:
            assert second is None
        elif rank in asks:
            assert [who for who, _ in second] == [r for r in range(3) if r not in asks]
        else:
            assert second == [(1, "no state today")]


# The end of the program


def run(program, **env):
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


SLOW = """
    import sys, time, torch, shardplan
    from shardplan.io.stores import open_store
    from shardplan.io.stores.testing import CountingStore

    class Slow(CountingStore):
        def write(self, *args, **options):
            time.sleep(1)
            {error}
            return super().write(*args, **options)

    shardplan.async_save({{"w": torch.arange(6.0)}}, Slow(open_store({path!r})))
    print("main ends")
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise ValueError('in training')"])
def test_an_interpreter_that_exits_waits_for_the_save(tmp_path, end):
    done = run(SLOW.format(error="", path=str(tmp_path / "c"), end=end))
    assert done.stdout == "main ends\n"
    assert done.returncode == {"pass": 0, "sys.exit(3)": 3}.get(end, 1), done.stderr
    assert shardplan.restore(tmp_path / "c")["w"].tolist() == list(range(6))


@pytest.mark.slow
def test_a_save_that_fails_while_the_interpreter_exits_is_told(tmp_path):
    error = "raise OSError('disk full')"
    done = run(SLOW.format(error=error, path=str(tmp_path / "c"), end="pass"))
    assert "the save to" in done.stderr
    assert "disk full" in done.stderr


def test_tensors_that_share_memory_but_not_values_are_kept_apart(tmp_path):
    """A conjugate is the same memory with a flag; so is a negative imaginary part."""
    x = torch.tensor([1 + 2j, 3 + 4j])
    sd = {"x": x, "conj": x.conj(), "imag": x.imag, "minus": x.conj().imag}
    shardplan.async_save(sd, tmp_path).result()
    found = shardplan.restore(tmp_path)
    assert all(torch.equal(found[name], sd[name]) for name in sd)


def test_what_requires_a_gradient_is_saved_alike_in_the_background(tmp_path):
    sd = {"w": torch.nn.Parameter(torch.ones(2)), "b": torch.zeros(2)}
    shardplan.save(sd, tmp_path / "now")
    shardplan.async_save(sd, tmp_path / "later").result()
    metadata = [shardplan.open_checkpoint(tmp_path / n).metadata for n in ("now", "later")]
    assert metadata[0].state_dict_metadata == metadata[1].state_dict_metadata


def test_a_save_under_way_cannot_be_cancelled_and_the_next_one_works(tmp_path):
    future = shardplan.async_save({"w": torch.ones(2)}, tmp_path / "a")
    assert not future.cancel()
    assert future.result().nbytes > 0
    assert shardplan.async_save({"w": torch.ones(2)}, tmp_path / "b").result().nbytes > 0


def test_if_no_thread_can_be_started_the_call_says_so_and_the_next_one_works(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            shardplan.async_save({"w": torch.ones(2)}, tmp_path / "a")
    assert shardplan.async_save({"w": torch.ones(2)}, tmp_path / "c").result().nbytes > 0


def test_snapshots_go_when_the_comm_they_were_made_for_goes():
    import gc

    gc.collect()
    before = len(background._savers)
    run_ranks(
        2,
        lambda comm: shardplan.async_save(
            {"w": torch.ones(2)}, "memory://gone", comm=comm
        ).result(),
    )
    gc.collect()
    assert len(background._savers) == before


@pytest.mark.slow
def test_a_save_outlives_the_process_group_that_training_destroys(tmp_path):
    """The usual last line of a script; here rank 0 itself hosts the store that ranks meet in."""
    program = textwrap.dedent(
        """
        import sys, torch, torch.distributed as dist, shardplan
        path, place, rank = sys.argv[1:]
        dist.init_process_group("gloo", init_method=place, rank=int(rank), world_size=2)
        shardplan.async_save({f"w{rank}": torch.ones(2_000_000)}, path)
        dist.destroy_process_group()
        """
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-c", program, str(tmp_path / "a"), f"tcp://127.0.0.1:{port}"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert sorted(shardplan.restore(tmp_path / "a")) == ["w0", "w1"]


@pytest.mark.parametrize(
    ("value", "why"),
    [(torch.eye(3).to_sparse(), "sparse_coo"), (threading.Lock(), "is a _thread.lock")],
)
def test_what_cannot_be_copied_is_refused_by_name(gate, caplog, value, why):
    gate.open.set()
    future = shardplan.async_save({"w": torch.ones(2), "deep": {"m": value}}, gate)
    with pytest.raises(ValueRefusedError, match=rf"`deep\.m`.*{why}"):
        future.result(30)
    assert gate.inner.list() == ()
    assert "Traceback" not in caplog.text
