"""Bytes that only have to be copied are, by several threads, and every bit arrives."""

import os
import signal
import threading
import time
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan.io import FormatError, open_store
from shardplan.io.checksums import combine_crc
from shardplan.io.execute import copying
from shardplan.io.execute.copying import (
    PIECE,
    Block,
    Content,
    Deferred,
    FileContents,
    Seal,
    Stretch,
    literal,
    threads_for,
)
from shardplan.io.execute.streaming import Ahead
from shardplan.io.pool import Pool
from shardplan.io.stores.base import StoreError
from shardplan.io.stores.testing import CountingStore
from shardplan.planning import Mesh, Shard, cast
from shardplan.planning.storage import blocks

SD = {
    "big": torch.arange(3 << 18, dtype=torch.int32).reshape(1 << 10, -1),
    "column": torch.arange(77.0),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(7),
    **{f"small.{i}": torch.full((i % 5 + 1, 3), float(i)) for i in range(40)},
}


@pytest.fixture
def small_tasks(monkeypatch):
    """As if all were large: a task is some kilobytes."""
    monkeypatch.setattr(blocks, "_WRITTEN", 5000)
    monkeypatch.setattr(blocks, "_SMALL", 0)
    monkeypatch.setattr(copying, "processors", lambda: 4)


def target(folder, format):
    return folder / ("x.pt" if format == "torch" else f"to-{format}")


def same(path, sd=SD):
    found = shardplan.restore(path)
    assert set(found) == set(sd)
    for name, tensor in sd.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def write_direct(store, path, contents, *, nbytes, atomic=False, threads=1):
    file = FileContents(lambda local: contents, threads)
    store.write_contents(path, file, nbytes=nbytes, atomic=atomic)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_the_crc_of_two_parts_is_that_of_the_whole(data, cut):
    first, second = data[:cut], data[cut:]
    assert combine_crc(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)


@pytest.mark.parametrize("format", ["torch", "dcp", "hf"])
@pytest.mark.parametrize("cut", [None, Mesh(dp=3)], ids=["whole", "rows"])
def test_what_lies_together_is_copied_and_never_made_a_tensor(
    tmp_path, monkeypatch, small_tasks, format, cut
):
    shardplan.save(SD, tmp_path / "native")
    shardplan.convert(tmp_path / "native", tmp_path / "a", format="dcp", mesh=cut)
    shardplan.convert(tmp_path / "a", tmp_path / "streamed", mesh=Mesh(dp=1))

    def never(*_):
        raise AssertionError("it was read into a tensor")

    monkeypatch.setattr(Ahead, "_fetch", never)
    report = shardplan.convert(tmp_path / "a", target(tmp_path, format), format=format)
    assert report.bytes_read == sum(tensor.nbytes for tensor in SD.values())
    monkeypatch.undo()
    same(target(tmp_path, format))


@pytest.mark.parametrize("format", ["torch", "dcp", "hf"])
def test_what_does_not_lie_together_is_converted_all_the_same(tmp_path, small_tasks, format):
    sd = {name: tensor for name, tensor in SD.items() if tensor.ndim == 2 and len(tensor)}
    shardplan.save(sd, tmp_path / "native")
    placed = {"mesh": Mesh(tp=3), "placements": [Shard(1)]}
    shardplan.convert(tmp_path / "native", tmp_path / "a", **placed)
    shardplan.convert(tmp_path / "a", target(tmp_path, format), format=format)
    same(target(tmp_path, format), sd)
    half = target(tmp_path / "half", format)
    shardplan.convert(tmp_path / "native", half, format=format, planner=cast("float64"))
    wide = {n: t.double() if t.is_floating_point() else t for n, t in sd.items()}
    same(half, wide)


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_checksums_of_archives_are_right_whichever_way_they_are_written(
    tmp_path, small_tasks, format
):
    shardplan.save(SD, tmp_path / "a")
    shardplan.convert(tmp_path / "a", target(tmp_path, format), format=format)
    report = shardplan.verify(target(tmp_path, format))
    assert report.ok, report
    if format == "torch":
        with zipfile.ZipFile(target(tmp_path, format)) as archive:
            assert archive.testzip() is None
        found = torch.load(target(tmp_path, format), weights_only=True)
        assert torch.equal(found["big"], SD["big"])


@pytest.mark.parametrize("format", ["hf", "dcp"])
def test_copied_and_streamed_files_are_the_same(tmp_path, small_tasks, format):
    shardplan.save(SD, tmp_path / "a")
    shardplan.convert(tmp_path / "a", tmp_path / "copied", format=format)
    streamed = CountingStore(open_store(tmp_path / "streamed"))
    shardplan.convert(tmp_path / "a", streamed, format=format)
    assert streamed.bytes_written()
    sides = []
    for folder in ("copied", "streamed"):
        names = [name for name in os.listdir(tmp_path / folder) if name != ".metadata"]
        # Names of dcp files end with the save's id.
        cut = {name.partition("-")[0] if format == "dcp" else name: name for name in names}
        sides.append({n: (tmp_path / folder / name).read_bytes() for n, name in cut.items()})
    assert sides[0] == sides[1]


@pytest.mark.parametrize("format", ["hf", "dcp", "torch"])
def test_damage_that_is_copied_is_noticed_and_nothing_is_left(tmp_path, small_tasks, format):
    shardplan.save(SD, tmp_path / "a")
    (file,) = (name for name in os.listdir(tmp_path / "a") if name.startswith("shard-"))
    with open(tmp_path / "a" / file, "r+b") as damaged:
        damaged.seek(-5, os.SEEK_END)
        damaged.write(b"oops")
    with pytest.raises(FormatError, match="checksums do not fit"):
        shardplan.convert(tmp_path / "a", target(tmp_path, format), format=format)
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()].count(file) == 1
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 2


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_source_that_is_not_all_there_is_named(tmp_path, harm):
    store = open_store(tmp_path)
    (tmp_path / "a").write_bytes(bytes(3 * PIECE))
    name = "a" if harm == "cut" else "b"
    stretch = Stretch(store.locate(name), name, PIECE, 3 * PIECE)
    contents = [literal(b"head"), Content([Block([stretch])])]
    with pytest.raises(FormatError, match=r"a: it ends at byte|b: it is missing"):
        write_direct(store, "out", contents, nbytes=4 + 3 * PIECE, threads=2)
    assert store.list() == ("a",)


@given(st.data(), st.sampled_from(["memory", "stretches", "made"]))
def test_any_contents_arrive_in_order(tmp_path_factory, data, kind):
    """Bytes and seals of any size, in tasks of any size, by several threads or in a stream."""
    folder = tmp_path_factory.mktemp("copying")
    store = open_store(folder)
    source = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    (folder / "a").write_bytes(source)
    contents, expected, sums = [], b"", []

    def part(at, nbytes):
        view = memoryview(source)[at : at + nbytes]
        if kind == "memory" or data.draw(st.booleans()):
            return view
        return Deferred(nbytes, lambda: view) if kind == "made" else stretch_of(store, at, nbytes)

    for _ in range(data.draw(st.integers(1, 8))):
        ranges = st.tuples(st.integers(0, 4000), st.integers(0, 1000))
        drawn = data.draw(st.lists(ranges, max_size=3))
        body = b"".join(source[at : at + nbytes] for at, nbytes in drawn)
        contents.append(Content([Block([part(*one)]) for one in drawn], len(sums)))
        sums.append(zlib.crc32(body))
        expected += body
        if data.draw(st.booleans()):
            wanted = data.draw(st.lists(st.integers(0, len(sums) - 1), max_size=3))
            contents.append(
                Seal(4 * len(wanted), wanted, lambda s: b"".join(n.to_bytes(4, "big") for n in s))
            )
            expected += b"".join(sums[n].to_bytes(4, "big") for n in wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_WRITTEN", data.draw(st.sampled_from([1, 700, 1 << 20])))
        patch.setattr(blocks, "_SMALL", 0)
        write_direct(store, "out", contents, nbytes=len(expected), threads=3)
    assert (folder / "out").read_bytes() == expected
    if kind != "stretches":
        assert b"".join(FileContents(lambda local: contents).parts()) == expected


def stretch_of(store, at, nbytes):
    return Stretch(store.locate("a"), "a", at, nbytes)


@pytest.mark.parametrize("length", [3, 5])
def test_what_is_made_of_another_size_than_announced_is_refused(tmp_path, length):
    store = open_store(tmp_path)
    made = Content([Block([Deferred(4, lambda: memoryview(bytes(length)))])], 0)
    seal = Seal(4, [0], lambda sums: bytes(length))
    for contents in ([made], [Content([], 0), seal]):
        with pytest.raises(ValueError, match=f"4 bytes were announced, and {length} were made"):
            write_direct(store, "out", contents, nbytes=4)
        with pytest.raises(ValueError, match=f"4 bytes were announced, and {length} were made"):
            list(FileContents(lambda local, held=contents: held).parts())
    assert store.list() == ()


def test_what_one_thread_raises_stops_all_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_WRITTEN", 10)
    monkeypatch.setattr(blocks, "_SMALL", 0)
    store, done = open_store(tmp_path), []

    def fail():
        done.append(1)
        if len(done) == 3:
            raise KeyError("third")

    contents = [Content([Block([memoryview(bytes(8))], fail)]) for _ in range(1000)]
    with pytest.raises(KeyError, match="third"):
        write_direct(store, "out", contents, nbytes=8000, atomic=True, threads=2)
    assert len(done) < 1000
    assert store.list() == ()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_ends_early_when_what_it_is_a_part_of_fails(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(blocks, "_WRITTEN", 1 << 20)
    store, done, begun = open_store(tmp_path), [], threading.Event()
    (tmp_path / "a").write_bytes(bytes(1 << 20))

    def tell():
        done.append(1)
        begun.set()
        time.sleep(0.005)

    copied = [Block([Stretch(store.locate("a"), "a", 0, 1 << 20)], tell) for _ in range(400)]

    def work(name):
        if name == "fails":
            assert begun.wait(10)
            raise KeyError("sibling")
        write_direct(store, "out", [Content(copied)], nbytes=400 << 20, threads=threads)

    with Pool(max_workers=2) as pool, pytest.raises(KeyError, match="sibling"):
        pool.map(work, ["copies", "fails"])
    assert len(done) < 200
    assert store.list() == ("a",)


def test_a_file_of_another_size_than_announced_is_refused(tmp_path):
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match="announced"):
        write_direct(store, "out", [literal(b"abc")], nbytes=4)
    assert store.list() == ()


def test_threads_are_shared_among_the_files_that_are_written_at_once(monkeypatch):
    monkeypatch.setattr(copying, "processors", lambda: 8)
    with Pool(max_workers=4) as pool:
        assert [threads_for(pool, files) for files in (1, 2, 3, 100)] == [8, 4, 2, 2]
        assert pool.map(lambda _: threads_for(pool, 1), [0]) == [2]


@pytest.mark.usefixtures("small_tasks")
def test_a_copy_that_is_interrupted_while_its_threads_are_started_leaves_none_behind(
    monkeypatch, tmp_path
):
    """One that nobody knows of would write on, to a file that is closed by then."""
    start, started, store = threading.Thread.start, [], open_store(tmp_path)

    def interrupted(thread):
        started.append(thread)
        start(thread)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_direct(store, "out", [literal(bytes(5000))] * 9, nbytes=45000, threads=2)
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)
    assert store.list() == ()


@pytest.mark.usefixtures("small_tasks")
def test_a_copy_that_is_interrupted_half_way_stops_all_of_its_threads(tmp_path):
    store, read = open_store(tmp_path), []

    def interrupt():
        read.append(1)
        if len(read) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.05)

    contents = [Content([Block([memoryview(bytes(5000))], interrupt)])] * 100
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_direct(store, "out", contents, nbytes=500_000, threads=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(read) < 50
    assert store.list() == ()
