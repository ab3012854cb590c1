"""Every store keeps the same promises: a disk, plain memory, and S3 over real HTTP."""

import errno
import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import shardplan
from shardplan.io.formats.registry import locate
from shardplan.io.pool import Pool
from shardplan.io.stores import local, local_files
from shardplan.io.stores.base import (
    Entry,
    FolderStore,
    MissingFileError,
    Store,
    StoreError,
    open_store,
)
from shardplan.io.stores.local import LocalStore
from shardplan.io.stores.testing import CountingStore, FaultyStore, InjectedError, Operation

MIB = 1 << 20
names = (f"folder-{n}" for n in itertools.count())


@pytest.fixture(params=["local", "memory", "s3"])
def store(request, tmp_path):
    """A fresh, empty store of each kind."""
    match request.param:
        case "local":
            return open_store(tmp_path / "root")
        case "memory":
            return open_store(f"memory://{next(names)}/inner")
        case "s3":
            s3 = request.getfixturevalue("s3")
            return open_store(f"s3://{s3.bucket}/{next(names)}", **s3.options)


def content(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def fetch(store, path, *ranges):
    """Read (offset, length) pairs and return their bytes."""
    buffers = [bytearray(length) for _, length in ranges]
    asked = [(offset, memoryview(b)) for (offset, _), b in zip(ranges, buffers, strict=True)]
    assert store.read(path, asked) == sum(length for _, length in ranges)
    return [bytes(buffer) for buffer in buffers]


def whole(store, path):
    (data,) = fetch(store, path, (0, store.size(path)))
    return data


# Reading and writing


def test_every_store_fits_the_protocol(store):
    assert isinstance(store, Store)
    assert isinstance(CountingStore(store), Store)
    assert isinstance(FaultyStore(store), Store)
    assert open_store(store) is store


def test_what_is_written_is_read_back(store):
    parts = [content(1000, 1), b"", content(7, 2), np.zeros((0, 3)), content(50, 3)]
    assert store.write("a.bin", parts) == 1057
    assert store.size("a.bin") == 1057
    assert whole(store, "a.bin") == content(1000, 1) + content(7, 2) + content(50, 3)


def test_arrays_of_any_type_and_shape_are_written_as_their_bytes(store):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    store.write("a", [array, array[1:]])
    assert whole(store, "a") == array.tobytes() + array[1:].tobytes()


def test_memory_that_is_not_contiguous_is_refused(store):
    with pytest.raises(ValueError, match="not contiguous"):
        store.write("a", [np.zeros((4, 4))[:, ::2]])
    assert not store.exists("a")


def test_an_empty_file_is_a_file(store):
    assert store.write("none", []) == store.write("empty", [b"", b""]) == 0
    assert store.list() == ("empty", "none")
    assert store.size("none") == 0


def test_parts_may_be_made_on_the_fly(store):
    data = content(5000)
    made = (data[i : i + 100] for i in range(0, 5000, 100))
    assert store.write("a", made, nbytes=5000) == 5000
    assert whole(store, "a") == data


@pytest.mark.parametrize("announced", [4, 6])
@pytest.mark.parametrize("make", [list, iter])
def test_another_size_than_announced_is_refused_and_leaves_nothing(store, announced, make):
    with pytest.raises(StoreError, match=f"{announced} bytes were announced.* have 5"):
        store.write("a", make([b"abc", b"de"]), nbytes=announced)
    assert store.list() == ()


def test_an_error_while_parts_are_made_is_raised_and_leaves_nothing(store):
    def parts():
        yield b"abc"
        raise KeyError("no such tensor")

    with pytest.raises(KeyError, match="no such tensor"):
        store.write("a", parts())
    assert store.list() == ()


def test_writing_again_replaces_the_whole_file(store):
    store.write("a", [content(100)])
    store.write("a", [b"new"])
    assert whole(store, "a") == b"new"


def test_ranges_come_in_any_order_overlap_and_may_be_empty(store):
    data = content(1000)
    store.write("a", [data])
    ranges = [(900, 100), (0, 10), (5, 10), (500, 0), (0, 1000), (10, 5), (999, 1)]
    assert fetch(store, "a", *ranges) == [data[o : o + n] for o, n in ranges]


def test_a_range_of_no_bytes_asks_for_nothing(store):
    assert fetch(store, "not there", (10, 0)) == [b""]
    assert store.read("not there", []) == 0


@pytest.mark.parametrize("gap", [0, 1])
def test_more_ranges_than_one_system_call_takes(store, gap):
    count = 3 * local_files.IOV_MAX + 1 if isinstance(store, LocalStore) else 200
    data = content(count * (3 + gap))
    store.write("a", [data])
    ranges = [(i * (3 + gap), 3) for i in range(count)]
    assert fetch(store, "a", *ranges) == [data[o : o + n] for o, n in ranges]


def test_more_parts_than_one_system_call_takes(store):
    data = content(5 * local_files.IOV_MAX)
    store.write("a", [data[i : i + 2] for i in range(0, len(data), 2)])
    assert whole(store, "a") == data


def test_many_threads_may_read_and_write_at_once(store):
    data = [content(20_000, seed) for seed in range(8)]

    def work(n):
        store.write(f"folder/{n}", [data[n]])
        return fetch(store, f"folder/{n}", (n, 5000), (10_000, 10_000))

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(work, range(8)))
    assert results == [[d[n : n + 5000], d[10_000:]] for n, d in enumerate(data)]


def test_memory_is_filled_in_place_and_nowhere_else(store):
    store.write("a", [content(100)])
    target = np.zeros(120, np.uint8)
    store.read("a", [(0, memoryview(target)[10:110])])
    assert target[10:110].tobytes() == content(100)
    assert not target[:10].any()
    assert not target[110:].any()


def test_memory_of_any_type_can_be_filled(store):
    store.write("a", [np.arange(6, dtype=np.int32)])
    target = np.zeros((2, 3), np.int32)
    store.read("a", [(0, memoryview(target))])
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_memory_that_is_read_only_is_refused(store):
    store.write("a", [b"abc"])
    with pytest.raises(ValueError, match="read-only"):
        store.read("a", [(0, memoryview(b"xyz"))])


# What is not there


@pytest.mark.parametrize("verb", ["read", "size"])
def test_a_missing_file_is_named(store, verb):
    store.write("there", [b"abc"])
    with pytest.raises(MissingFileError, match=r"not/there: no such file; check the name") as info:
        fetch(store, "not/there", (0, 1)) if verb == "read" else store.size("not/there")
    assert isinstance(info.value, FileNotFoundError)
    assert info.value.kind == "missing"
    assert info.value.url.startswith(store.url)
    assert not store.exists("not/there")


@pytest.mark.parametrize(("offset", "length"), [(90, 11), (100, 1), (5000, 1), (0, 200)])
def test_a_short_file_is_an_error_that_names_the_range_and_the_size(store, offset, length):
    store.write("a", [content(100)])
    message = f"bytes {offset} to {offset + length} were asked for, but the file has 100"
    with pytest.raises(StoreError, match=message) as info:
        fetch(store, "a", (0, 10), (offset, length))
    assert info.value.kind == "short"
    assert info.value.url.endswith("/a")


def test_an_error_survives_pickling(store):
    with pytest.raises(StoreError) as info:
        store.size("nothing")
    again = pickle.loads(pickle.dumps(info.value))
    assert type(again) is MissingFileError
    assert (str(again), again.kind) == (str(info.value), info.value.kind)


# Names


@pytest.mark.parametrize(
    "path",
    ["../x", "/x", "a/../../x", "a/..", "..", ".", "", "a//b", "a/", "./a", "a\\b", "a\nb", "\0"],
)
def test_a_name_that_could_leave_the_root_is_refused_by_every_verb(store, path):
    calls = [
        lambda: store.write(path, [b"abc"]),
        lambda: store.replace(path, b"abc"),
        lambda: store.read_all(path, limit=9),
        lambda: store.read(path, [(0, memoryview(bytearray(1)))]),
        lambda: store.size(path),
        lambda: store.exists(path),
        lambda: store.delete(["a", path]),
    ]
    calls += [lambda: store.list(path), lambda: store.entries(path)] if path else []
    for call in calls:
        with pytest.raises(StoreError, match="cannot use") as info:
            call()
        assert info.value.kind == "path"
    assert store.list() == ()


@pytest.mark.parametrize("name", ["模型/ö ä.bin", "a b%20c", "q?x=1&y#z", "[1]*~'", "...", "a..b"])
def test_names_may_hold_any_visible_character(store, name):
    store.write(name, [b"abc"])
    store.replace(f"{name}.json", b"{}")
    assert store.list() == tuple(sorted([name, f"{name}.json"]))
    assert whole(store, name) == b"abc"
    store.delete([name, f"{name}.json"])
    assert store.list() == ()


# Listing, deleting, replacing


def test_a_listing_is_sorted_and_below_a_folder(store):
    for path in ("b/2", "b/1", "a", "b/c/3", "bb/4"):
        store.write(path, [b"x"])
    assert store.list() == ("a", "b/1", "b/2", "b/c/3", "bb/4")
    assert store.list("b") == ("b/1", "b/2", "b/c/3")
    assert store.list("b", recursive=False) == ("b/1", "b/2", "b/c/")
    assert store.list(recursive=False) == ("a", "b/", "bb/")
    assert store.list("nothing") == store.list("a") == ()


def test_a_folder_is_not_a_file(store):
    store.write("folder/a", [b"x"])
    assert store.exists("folder/a")
    assert not store.exists("folder")


def test_deleting_takes_just_those_files_and_minds_no_missing_one(store):
    for path in ("a", "b/1", "b/2"):
        store.write(path, [b"x"])
    store.delete(["b/1", "nothing", "a"])
    assert store.list() == ("b/2",)
    store.delete([])
    store.delete(iter(["b/2"]))
    assert store.list(recursive=False) == ()


def test_replacing_publishes_new_bytes_and_leaves_nothing_else(store):
    store.replace("folder/manifest.json", b"one")
    store.replace("folder/manifest.json", b"")
    store.replace("folder/manifest.json", b"three")
    assert whole(store, "folder/manifest.json") == b"three"
    assert store.list() == ("folder/manifest.json",)


def test_a_reader_sees_the_old_bytes_or_the_new_ones(store):
    versions = [bytes([65 + n]) * 4096 for n in range(12)]
    store.replace("manifest", versions[0])
    done = threading.Event()
    seen = set()

    def watch():
        while not done.is_set():
            seen.update(fetch(store, "manifest", (0, 4096)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for version in versions[1:]:
            store.replace("manifest", version)
    finally:
        done.set()
        watcher.join()
    assert seen
    assert seen <= set(versions)


def test_a_file_is_created_once(store):
    store.replace("folder/m", b"one", overwrite=False)
    with pytest.raises(StoreError, match="the file exists") as info:
        store.replace("folder/m", b"two", overwrite=False)
    assert info.value.kind == "exists"
    assert whole(store, "folder/m") == b"one"
    assert store.list() == ("folder/m",)
    store.replace("folder/m", b"three")
    assert whole(store, "folder/m") == b"three"


def test_of_many_who_create_a_file_one_succeeds(store):
    ready = threading.Barrier(8, timeout=30)

    def create(n):
        ready.wait()
        try:
            store.replace("m", bytes([n]), overwrite=False)
        except StoreError as error:
            return error.kind
        return n

    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(create, range(8)))
    (winner,) = (n for n in told if n != "exists")
    assert whole(store, "m") == bytes([winner])
    assert store.list() == ("m",)


def test_a_whole_file_is_read_by_its_name_up_to_a_limit(store):
    store.write("a", [b"abcdef"])
    store.write("empty", [])
    assert store.read_all("a", limit=6) == b"abcdef"
    assert store.read_all("empty", limit=0) == b""
    with pytest.raises(StoreError, match="6 bytes, and at most 5") as info:
        store.read_all("a", limit=5)
    assert info.value.kind == "long"
    with pytest.raises(MissingFileError):
        store.read_all("nothing", limit=5)


def test_a_listing_tells_sizes_and_times(store):
    begin = time.time()
    store.write("a", [b"abc"])
    store.write("b/c", [b"abcd"])
    end = time.time()
    found = store.entries()
    assert [(e.name, e.size) for e in found] == [("a", 3), ("b/c", 4)]
    assert all(begin - 2 < e.modified < end + 2 for e in found)
    assert [(e.name, e.size) for e in store.entries(recursive=False)] == [("a", 3), ("b/", 0)]
    assert [e.name for e in store.entries("b")] == ["b/c"]
    assert store.entries("nothing") == ()
    inner = FolderStore(store, "b")
    assert [(e.name, e.size) for e in inner.entries()] == [("c", 4)]
    assert inner.read_all("c", limit=4) == b"abcd"


def test_any_store_reads_by_pieces_and_maps_ranges(store):
    data = bytes(range(256)) * 400
    store.write("a", [data])
    wanted = [(70_000, 5000), (3, 1000), (90_000, 1)]
    groups = [[(at, memoryview(bytearray(n))) for at, n in wanted], [(9, memoryview(bytearray(7)))]]
    for group, pieces in zip(groups, store.read_pieces("a", groups, 999), strict=True):
        found = list(pieces)
        assert all(len(piece) <= 999 for piece in found)
        assert b"".join(found) == b"".join(
            data[at : at + len(v)] for at, v in sorted_by_place(group)
        )
        assert all(view == data[at : at + len(view)] for at, view in group)
    starts, lengths = (np.array(column) for column in zip(*wanted, strict=True))
    with store.mapped("a", starts, lengths) as mapped:
        for at, n in wanted:
            assert mapped[at - 3 : at - 3 + n].tobytes() == data[at : at + n]
    with pytest.raises(StoreError, match="were asked for"):
        store.mapped("a", np.array([0, len(data) - 1]), np.array([1, 2])).__enter__()


def sorted_by_place(group):
    return sorted(group, key=lambda pair: pair[0])


def test_a_store_renames_and_links_or_says_that_it_does_not(store):
    store.write("a", [b"abc"])
    store.write("c", [b"x"])
    assert not store.link("a", "c")
    if not store.can_rename:
        with pytest.raises(StoreError, match="does not rename"):
            store.rename("a", "b")
        assert not store.link("a", "b")
        assert store.list() == ("a", "c")
        return
    assert store.link("a", "b")
    assert store.link("a", "b")  # an answer that was lost: it is that file
    store.rename("a", "c")
    store.sync()
    assert [whole(store, name) for name in store.list()] == [b"abc", b"abc"]
    assert store.list() == ("b", "c")


def test_a_store_says_where_on_the_disk_its_files_are(store):
    file, root = store.locate("folder/a"), store.locate()
    assert (file is None) == (root is None)
    if root is not None:
        assert file == os.path.join(root, "folder", "a")
        with pytest.raises(StoreError, match="leaves the folder"):
            store.locate("../a")


class Ten(Store):
    """A store of one's own: a dict of files, and what each store must have."""

    staging, url = 0, "ten://"

    def __init__(self):
        self.files = {}

    def read(self, path, ranges):
        for at, view in ranges:
            view[:] = self.files[path][at : at + len(view)]
        return sum(len(view) for _, view in ranges)

    def write(self, path, parts, *, nbytes=None, atomic=False):
        self.files[path] = b"".join(bytes(part) for part in parts)
        return len(self.files[path])

    def read_all(self, path, *, limit):
        size = self.size(path)
        return self.files[path][:size]

    def replace(self, path, data, *, overwrite=True):
        self.files[path] = data

    def size(self, path):
        if path not in self.files:
            raise MissingFileError("measure", path, "no such file", kind="missing")
        return len(self.files[path])

    def entries(self, prefix="", *, recursive=True):
        return tuple(Entry(name, len(data)) for name, data in sorted(self.files.items()))

    def delete(self, paths):
        for path in paths:
            self.files.pop(path, None)

    def sync(self):
        pass


@pytest.mark.parametrize("format", ["safetensors", "hf", "dcp"])
def test_ten_members_make_a_store(format):
    store, sd = Ten(), {"w": torch.arange(12.0).reshape(3, 4), "half": torch.ones(7).half()}
    shardplan.save(sd, store, format=format)
    found = shardplan.restore(store)
    assert all(torch.equal(found[name], tensor) for name, tensor in sd.items())
    assert torch.equal(shardplan.open_checkpoint(store)["w"][:, 1], sd["w"][:, 1])


def test_syncing_is_always_allowed(store):
    store.sync()
    store.write("folder/a", [b"x"])
    store.sync()
    assert whole(store, "folder/a") == b"x"


# Opening


def test_an_unknown_scheme_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ValueError, match=r"ftp://x.*one of file://, s3://, gs://, az://, memory"):
        open_store("ftp://x")


def test_a_memory_is_shared_by_name():
    name = next(names)
    open_store(f"memory://{name}").write("folder/a", [b"abc"])
    assert open_store(f"memory://{name}/folder").list() == ("a",)
    assert open_store(f"memory://{next(names)}").list() == ()


def test_a_local_store_opens_by_path_string_or_url(tmp_path):
    open_store(tmp_path / "ä b").write("x", [b"abc"])
    assert open_store(str(tmp_path / "ä b")).list() == ("x",)
    assert open_store((tmp_path / "ä b").as_uri()).list() == ("x",)
    with pytest.raises(ValueError, match="three slashes"):
        open_store("file://host/x")


@pytest.mark.parametrize("name", ["run#1", "run?1", "a b", "a%20b", "run#1?x=%2e%2e"])
def test_a_url_means_every_letter_of_it(tmp_path, s3, name):
    (tmp_path / name).mkdir()
    assert open_store((tmp_path / name).as_uri()).url == str(tmp_path / name)
    home = f"{s3.bucket}/{next(names)}"
    url = f"s3://{home}/{name}"
    open_store(url, **s3.options).write("x", [b"abc"])
    assert open_store(url, **s3.options).url == url
    assert open_store(f"s3://{home}", **s3.options).list() == (f"{name}/x",)
    memory = next(names)
    open_store(f"memory://{memory}/{name}").write("x", [b"abc"])
    assert open_store(f"memory://{memory}").list() == (f"{name}/x",)


@pytest.mark.parametrize("url", ["file:///tmp/run#1", "file:///tmp/run?1"])
def test_a_url_of_a_file_with_a_loose_tail_is_refused(url):
    with pytest.raises(ValueError, match="%3F and # as %23"):
        open_store(url)


@pytest.mark.parametrize("rest", ["b/x/../y", "b/../y", "b/x//y", "b/./y"])
def test_a_url_that_climbs_is_refused(rest):
    for scheme in ("s3", "memory"):
        with pytest.raises(StoreError, match="cannot use") as info:
            open_store(f"{scheme}://{rest}")
        assert info.value.kind == "path"


@pytest.mark.parametrize("bucket", ["", "?x", "b?x", "b#1", "b%20"])
def test_a_url_without_a_bucket_is_refused(bucket):
    with pytest.raises(ValueError, match="not the name of a bucket"):
        open_store(f"s3://{bucket}/x")


@pytest.mark.parametrize("nowhere", ["", "file://"])
def test_an_empty_path_is_not_the_current_folder(nowhere):
    with pytest.raises(ValueError, match="the path is empty"):
        open_store(nowhere)
    with pytest.raises(ValueError, match="the path is empty"):
        locate(nowhere)


def test_what_is_not_a_store_is_refused_with_what_it_lacks():
    class Half:
        def read(self, path, ranges):
            return 0

    with pytest.raises(TypeError, match=r"a Half is not a store: it lacks .*read_all"):
        open_store(Half())


def test_a_store_of_ones_own_that_cannot_replace_files_is_refused_before_anything_is_saved():
    class Forgetful(Ten):
        replace = Store.replace

    with pytest.raises(TypeError, match=r"abstract.*replace"):
        Forgetful()


def test_an_open_store_takes_no_more_options(tmp_path):
    with pytest.raises(TypeError, match="pool"):
        open_store(open_store(tmp_path), pool=None)


def test_without_obstore_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from shardplan.io.stores.base import open_store\n"
        "open_store('/tmp')\n"
        "try: open_store('s3://bucket')\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    run = [sys.executable, "-P", "-c", code]
    told = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert "pip install 'shardplan[objects]'" in told


def test_stores_do_not_load_torch():
    code = (
        "import sys; from shardplan.io.stores import local, objects, testing\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


# Local files


def test_a_large_file_is_moved_in_steps_by_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_STEP", 1000)
    data = content(100_123)
    with Pool(max_workers=4) as pool:
        store = open_store(tmp_path, pool=pool)
        store.write("a", [data[:5], data[5:60_000], data[60_000:]])
        assert whole(store, "a") == data
        assert fetch(store, "a", (1, 50_000), (70_000, 9)) == [data[1:50_001], data[70_000:70_009]]


def test_system_calls_that_move_less_than_asked_are_continued(tmp_path, monkeypatch):
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:7]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:5]], at))
    store = open_store(tmp_path)
    store.write("a", [content(100, 1), content(33, 2)])
    assert whole(store, "a") == content(100, 1) + content(33, 2)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: 0)
    store = open_store(tmp_path)
    store.write("a", [content(100)])
    with pytest.raises(StoreError) as info:
        fetch(store, "a", (0, 100))
    assert info.value.kind == "short"


def fill_up(monkeypatch, code=errno.ENOSPC):
    """Let the disk take 10 bytes of a file and then no more."""
    write = os.pwritev

    def pwritev(fd, views, at):
        if at >= 10:
            raise OSError(code, os.strerror(code))
        return write(fd, [views[0][:10]], at)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("verb", ["write", "replace"])
def test_a_full_disk_is_called_that_and_leaves_the_old_file_only(tmp_path, monkeypatch, verb, code):
    store = open_store(tmp_path)
    store.replace("old", b"old")
    fill_up(monkeypatch, code)
    with pytest.raises(StoreError, match="disk full") as info:
        store.write("new", [content(100)]) if verb == "write" else store.replace("old", content(99))
    assert (info.value.kind, info.value.errno) == ("full", code)
    monkeypatch.undo()
    assert store.list() == ("old",)
    assert whole(store, "old") == b"old"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one mebibyte, where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("announced", [True, False])
def test_a_disk_that_is_really_full_is_called_that_and_leaves_no_file(small_disk, announced):
    store = open_store(small_disk)
    store.write("a", [content(100_000)])
    parts = [content(500_000), content(700_000)]
    with pytest.raises(StoreError, match="disk full"):
        store.write("folder/b", parts if announced else iter(parts))
    assert store.list() == ("a",)
    assert store.write("c", [content(800_000)]) == 800_000


def test_a_file_larger_than_the_process_may_write_leaves_nothing(tmp_path):
    code = (
        "import resource, sys\n"
        "from shardplan.io.stores.base import StoreError, open_store\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "store = open_store(sys.argv[1])\n"
        "try: store.write('a', iter([bytes(900), bytes(900)]))\n"
        "except StoreError as error: print(error.errno, store.list())\n"
    )
    run = [sys.executable, "-P", "-c", code, str(tmp_path)]
    told = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert told.split() == [str(errno.EFBIG), "()"]


@pytest.mark.parametrize("verb", ["write", "replace", "read", "list"])
def test_a_folder_without_permission_is_called_that(tmp_path, monkeypatch, verb):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    store = open_store(tmp_path)
    store.write("a", [b"abc"])
    monkeypatch.setattr(os, "scandir" if verb == "list" else "open", refuse)
    calls = {
        "write": lambda: store.write("b", [b"x"]),
        "replace": lambda: store.replace("b", b"x"),
        "read": lambda: fetch(store, "a", (0, 1)),
        "list": lambda: store.list(),
    }
    with pytest.raises(StoreError, match="permission denied") as info:
        calls[verb]()
    assert info.value.kind == "denied"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_whether_a_file_exists_is_an_error_if_nobody_can_tell(tmp_path, monkeypatch, code):
    store = open_store(tmp_path)
    store.write("a", [b"abc"])
    stat = os.stat

    def fail(path, *args, **options):
        if str(path).endswith("/a"):
            raise OSError(code, os.strerror(code))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(StoreError) as info:
        store.exists("a")
    assert info.value.errno == code
    assert not store.exists("a/b/c")
    assert not store.exists("b")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_disk_without_links_looks_first(tmp_path, monkeypatch, code):
    def link(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    store = open_store(tmp_path)
    store.replace("m", b"one", overwrite=False)
    with pytest.raises(StoreError) as info:
        store.replace("m", b"two", overwrite=False)
    assert info.value.kind == "exists"
    assert (whole(store, "m"), store.list()) == (b"one", ("m",))


def test_a_link_whose_answer_was_lost_is_not_a_conflict(tmp_path, monkeypatch):
    link = os.link

    def twice(*args):
        link(*args)
        link(*args)

    monkeypatch.setattr(os, "link", twice)
    store = open_store(tmp_path)
    store.replace("m", b"one", overwrite=False)
    assert (whole(store, "m"), store.list()) == (b"one", ("m",))


def test_files_and_then_their_folders_are_synced(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def record(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("the system does not tell a descriptor's name")
    monkeypatch.setattr(os, "fsync", record)
    store = open_store(tmp_path / "root")
    store.write("folder/a", [b"x"])
    store.write("folder/b", [b"x"])
    assert synced == [f"{store.url}/folder/a", f"{store.url}/folder/b"]
    store.sync()
    assert synced[2:] == [str(tmp_path), store.url, f"{store.url}/folder"]
    synced.clear()
    store.replace("folder/m", b"x")
    assert synced[0].startswith(f"{store.url}/folder/m.")
    assert synced[1:] == [f"{store.url}/folder"]


@pytest.mark.parametrize(
    "read",
    [
        lambda store, view: store.read("a", [(0, view)]),
        lambda store, view: store.read_all("a", limit=1),
        lambda store, view: next(store.read_pieces("a", [[(0, view)]], 1)),
        lambda store, view: store.mapped("a", np.array([0]), np.array([1])).__enter__(),
    ],
    ids=["read", "read_all", "read_pieces", "mapped"],
)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(StoreError, match="not a file") as caught:
        read(open_store(tmp_path), memoryview(bytearray(1)))
    assert caught.value.kind == "path"


def test_a_link_is_read_through_but_not_written_through(tmp_path):
    (tmp_path / "blob").write_bytes(b"blob")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").symlink_to(tmp_path / "blob")
    (tmp_path / "root" / "latest").symlink_to(tmp_path)
    store = open_store(tmp_path / "root")
    assert whole(store, "a") == b"blob"
    assert store.list() == store.list(recursive=False) == ("a",)
    store.write("a", [b"new"])
    assert (tmp_path / "blob").read_bytes() == b"blob"


def test_an_interrupted_replacement_leaves_a_name_that_can_be_told(tmp_path, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    store = open_store(tmp_path)
    monkeypatch.setattr(os, "replace", die)
    monkeypatch.setattr(os, "unlink", die)
    with pytest.raises(KeyboardInterrupt):
        store.replace("m", b"abc")
    (left,) = store.list()
    assert left.endswith(".tmp")


# Object stores


@pytest.fixture
def small_parts(s3, monkeypatch):
    """S3 with parts of 64 KiB, which real ones would refuse."""
    models = pytest.importorskip("moto.s3.models")
    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", 1)
    return open_store(f"s3://{s3.bucket}/{next(names)}", part_size=64 << 10, **s3.options)


def test_a_large_file_goes_up_in_parts_and_comes_down_in_ranges(small_parts, s3):
    data = content(3 * MIB + 17)
    s3.requests.clear()
    assert small_parts.write("big", [data[:100], data[100 : 2 * MIB], data[2 * MIB :]]) == len(data)
    uploaded = [int(r[4]) for r in s3.requests if "partNumber" in r[2]]
    assert sorted(uploaded) == [17] + [64 << 10] * 48
    assert whole(small_parts, "big") == data
    assert s3.unfinished_uploads() == []


def test_a_small_file_is_a_single_request(s3):
    store = open_store(f"s3://{s3.bucket}/{next(names)}", **s3.options)
    store.write("a", [b"abc", b"def"])
    store.replace("b", b"abc")
    assert [r[0] for r in s3.requests] == ["PUT", "PUT"]


def test_only_the_bytes_asked_for_are_fetched(s3):
    store = open_store(f"s3://{s3.bucket}/{next(names)}", **s3.options)
    data = content(MIB)
    store.write("a", [data])
    s3.requests.clear()
    ranges = [(1000, 10), (5000, 20), (900_000, 5), (5020, 7)]
    assert fetch(store, "a", *ranges) == [data[o : o + n] for o, n in ranges]
    asked = sorted(r[3] for r in s3.requests)
    assert asked == ["bytes=1000-1009", "bytes=5000-5026", "bytes=900000-900004"]


@pytest.mark.parametrize("fault", ["part", "source"])
def test_a_half_sent_file_is_withdrawn(small_parts, s3, fault):
    def parts():
        yield content(MIB)
        if fault == "source":
            raise KeyError("no such tensor")
        yield content(MIB)

    if fault == "part":
        s3.refuse = lambda request: "partNumber=5" in request[2]
    with pytest.raises(KeyError if fault == "source" else StoreError) as info:
        small_parts.write("big", parts())
    s3.refuse = None
    if fault == "part":
        assert info.value.kind == "denied"
        assert "check who owns" in str(info.value)
    assert s3.unfinished_uploads() == []
    assert small_parts.list() == ()


def test_no_more_than_the_staging_is_on_its_way_up(small_parts, s3):
    made, arrived, most, lock = 0, 0, 0, threading.Lock()

    def slowly(request):
        nonlocal arrived
        if "partNumber" in request[2]:
            time.sleep(0.005)
            with lock:
                arrived += int(request[4])
        return False

    def parts():
        nonlocal made, most
        for _ in range(64):
            made += 64 << 10
            most = max(most, made - arrived)
            yield bytes(64 << 10)

    s3.refuse = slowly
    small_parts.write("big", parts())
    assert most <= small_parts.staging + (64 << 10)


def test_reads_keep_to_the_pool_s_budget(s3, monkeypatch):
    with Pool(max_workers=8, max_bytes=200_000) as pool:
        options = s3.options | {"pool": pool, "part_size": 64 << 10}
        monkeypatch.setattr(pytest.importorskip("moto.s3.models"), "S3_UPLOAD_PART_MIN_SIZE", 1)
        store = open_store(f"s3://{s3.bucket}/{next(names)}", **options)
        data = content(2 * MIB)
        store.write("a", [data])
        assert whole(store, "a") == data
        assert 64 << 10 < pool.peak_bytes <= 200_000


def test_a_whole_file_is_a_single_request(s3):
    store = open_store(f"s3://{s3.bucket}/{next(names)}", **s3.options)
    store.write("a", [b"abc"])
    s3.requests.clear()
    assert store.read_all("a", limit=10) == b"abc"
    assert [r[0] for r in s3.requests] == ["GET"]


def test_a_deletion_that_fails_names_the_files(s3):
    store = open_store(f"s3://{s3.bucket}/{next(names)}", **s3.options)
    s3.refuse = lambda request: True
    with pytest.raises(StoreError, match=f"cannot delete {store.url}/a, {store.url}/b: perm"):
        store.delete(["a", "b"])


def test_a_body_that_is_shorter_than_was_asked_for_is_an_error(s3, monkeypatch):
    store, service = open_store(f"s3://{s3.bucket}/{next(names)}", **s3.options), s3._app
    store.write("a", [bytes(1000)])

    def cut(environ, start_response):
        if environ["REQUEST_METHOD"] != "GET":
            return service(environ, start_response)

        def start(status, headers, *rest):
            kept = [header for header in headers if header[0].lower() != "content-length"]
            return start_response(status, [*kept, ("Content-Length", "10")], *rest)

        return [b"".join(service(environ, start))[:10]]

    monkeypatch.setattr(s3, "_app", cut)
    for offsets in ((0,), (0, 20), (5, 500)):
        with pytest.raises(StoreError, match="fewer bytes than it was asked"):
            store.read("a", [(offset, memoryview(bytearray(16))) for offset in offsets])


def test_a_replacement_whose_answer_is_lost_is_unsure(s3):
    store = open_store(
        f"s3://{s3.bucket}/{next(names)}",
        **s3.options | {"endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}},
    )
    with pytest.raises(StoreError) as info:
        store.replace("a", b"abc")
    assert info.value.kind == "unsure"


def test_an_endpoint_that_refuses_is_reported_as_permission(s3):
    store = open_store(f"s3://{s3.bucket}/{next(names)}", **s3.options)
    s3.refuse = lambda request: True
    with pytest.raises(StoreError, match="permission denied") as info:
        store.write("a", [b"abc"])
    assert "\n" not in str(info.value)


def test_a_listing_that_is_refused_is_reported_as_permission(s3):
    store = open_store(f"s3://{s3.bucket}/{next(names)}", **s3.options)
    s3.refuse = lambda request: True
    with pytest.raises(StoreError, match=r"denied \(the service answered 403 Forbidden\)") as info:
        store.list()
    assert info.value.kind == "denied"


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.list(),
        lambda store: store.write("a", [b"abc"]),
        lambda store: store.write("a", [bytes(20 << 20)]),
        lambda store: store.replace("a", b"abc"),
        lambda store: store.read_all("a", limit=9),
        lambda store: shardplan.save({"w": torch.ones(2)}, store),
        lambda store: shardplan.load({"w": torch.ones(2)}, store),
        lambda store: shardplan.latest(store),
        lambda store: shardplan.verify(store),
    ],
)
def test_a_bucket_that_is_not_there_is_reported_in_the_services_own_words(s3, ask):
    store = open_store("s3://no-such-bucket/run", **s3.options)
    with pytest.raises(MissingFileError) as info:
        ask(store)
    assert re.fullmatch(
        r"cannot \w+ s3://no-such-bucket/run/a?: The specified bucket does not exist "
        r"\(NoSuchBucket\); check its name and the endpoint in use, or make the bucket first",
        str(info.value),
    )


# Counting and failing


def test_a_counting_store_tells_what_was_asked(store):
    counted = CountingStore(store)
    counted.write("a", [b"abc", b"def"])
    counted.replace("m", b"{}")
    counted.read("a", [(1, memoryview(bytearray(2))), (5, memoryview(bytearray(1)))])
    counted.delete(["a", "m"])
    counted.sync()
    assert counted.operations == [
        Operation("write", "a", 6),
        Operation("replace", "m", 2),
        Operation("read", "a", 3, ((1, 2), (5, 1))),
        Operation("delete", "a"),
        Operation("delete", "m"),
        Operation("sync"),
    ]
    assert counted.bytes_written() == 8
    assert counted.bytes_read("a") == 3
    assert counted.bytes_read("m") == 0
    counted.clear()
    assert counted.operations == []


def changes(store):
    store.write("data", [b"abcd", b"efgh"])
    store.sync()
    store.replace("manifest", b"new")
    store.delete(["old-1", "old-2"])


def prepared():
    store = open_store(f"memory://{next(names)}")
    for name in ("old-1", "old-2", "manifest"):
        store.replace(name, b"old")
    return store


def found(store):
    return {name: whole(store, name) for name in store.list()}


OLD = {"old-1": b"old", "old-2": b"old", "manifest": b"old"}
STATES = [
    OLD | {"data": b"abcd"},
    OLD | {"data": b"abcdefgh"},
    OLD | {"data": b"abcdefgh"},
    {"old-2": b"old", "manifest": b"new", "data": b"abcdefgh"},
]


@pytest.mark.parametrize("mode", ["raise", "stop"])
@pytest.mark.parametrize("fail_at", range(4))
def test_a_fault_at_each_change_leaves_what_came_before(fail_at, mode):
    inner = prepared()
    faulty = FaultyStore(inner, fail_at=fail_at, mode=mode)
    with pytest.raises(InjectedError, match=f"change {fail_at} fails") as info:
        changes(faulty)
    assert info.value.kind == "stopped"
    assert found(inner) == STATES[fail_at]


def test_without_a_fault_changes_are_counted_and_happen():
    inner = prepared()
    faulty = FaultyStore(inner)
    changes(faulty)
    assert faulty.changes == 4
    assert found(inner) == {"manifest": b"new", "data": b"abcdefgh"}


def test_after_a_stop_nothing_reaches_the_store_and_nothing_is_answered():
    inner = prepared()
    faulty = FaultyStore(inner, fail_at=0, mode="stop", landed=0)
    with pytest.raises(InjectedError):
        faulty.sync()
    before = found(inner)
    calls = [
        lambda: faulty.write("x", [b"x"]),
        lambda: faulty.replace("x", b"x"),
        lambda: faulty.delete(["old-1"]),
        lambda: faulty.sync(),
        lambda: faulty.read("old-1", [(0, memoryview(bytearray(1)))]),
        lambda: faulty.size("old-1"),
        lambda: faulty.exists("old-1"),
        lambda: faulty.list(),
    ]
    for call in calls:
        with pytest.raises(InjectedError, match="stopped"):
            call()
    assert found(inner) == before


def test_after_a_raise_the_store_works_again():
    faulty = FaultyStore(prepared(), fail_at=0)
    with pytest.raises(InjectedError):
        faulty.write("data", [b"abcd"])
    assert faulty.write("data", [b"abcd"]) == 4


def test_a_late_change_happens_when_it_arrives():
    for fail_at, expected in enumerate(
        [
            OLD | {"data": b"abcdefgh"},
            None,
            OLD | {"data": b"abcdefgh", "manifest": b"new"},
            {"manifest": b"new", "data": b"abcdefgh"},
        ]
    ):
        inner = prepared()
        late = FaultyStore(inner, fail_at=fail_at, mode="late")
        with pytest.raises(InjectedError):
            changes(late)
        before = found(inner)
        late.arrive()
        late.arrive()
        if expected is not None:
            assert before != expected
            assert found(inner) == expected


@pytest.mark.parametrize(("landed", "kept"), [(0, b"old"), (0.9, b"old"), (1, b"new")])
def test_a_replacement_fails_before_or_after_but_never_between(landed, kept):
    inner = prepared()
    with pytest.raises(InjectedError):
        FaultyStore(inner, fail_at=0, landed=landed).replace("manifest", b"new")
    assert whole(inner, "manifest") == kept


def test_pieces_come_in_the_order_of_the_file_each_filled_by_then(tmp_path):
    data = bytes(range(256)) * 4
    store = LocalStore(tmp_path)
    store.write("a", [data])
    buffers = [memoryview(bytearray(n)) for n in (300, 0, 70, 5)]
    groups = [list(zip((500, 9, 3), buffers, strict=False)), [(2, buffers[3])]]
    found = [[bytes(piece) for piece in pieces] for pieces in store.read_pieces("a", groups, 128)]
    assert found == [[data[3:73], data[500:628], data[628:756], data[756:800]], [data[2:7]]]
    assert bytes(buffers[0]) == data[500:800]


def test_pieces_past_the_end_or_of_no_file_are_refused(tmp_path):
    store = LocalStore(tmp_path)
    store.write("a", [bytes(10)])
    with pytest.raises(StoreError, match="bytes 5 to 15 were asked for") as caught:
        list(store.read_pieces("a", [[(5, memoryview(bytearray(10)))]], 4))
    assert caught.value.kind == "short"
    with pytest.raises(MissingFileError):
        list(store.read_pieces("b", [[(0, memoryview(bytearray(1)))]], 4))


def test_a_failed_save_takes_away_just_the_folders_it_made(tmp_path, monkeypatch):
    import torch

    import shardplan

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shardplan.io.stores.local_files.write_run", full)
    (tmp_path / "mine").mkdir()
    for place in ("a/b/c", "mine", "mine/d"):
        with pytest.raises(StoreError, match="disk full"):
            shardplan.save({"w": torch.ones(3)}, tmp_path / place)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
    store = LocalStore(tmp_path / "kept")
    monkeypatch.undo()
    store.write("x", [b"1"])
    store.sync()
    store.delete(["x"])
    assert (tmp_path / "kept").is_dir()


def test_no_code_asks_what_class_a_store_is_of():
    root = Path(__file__).parents[3]
    files = [file for folder in ("io", "shardplan") for file in (root / folder).rglob("*.py")]
    asks = re.compile(r"isinstance\([^)]*\b(Local|Object|Folder|Wrapped)Store\b")
    assert [str(file) for file in files if asks.search(file.read_text())] == []


def test_a_folder_of_a_disk_can_all_that_the_disk_can(tmp_path):
    inside = LocalStore(tmp_path).folder("run/step-1")
    assert inside.write("a", [b"abc"]) == 3
    assert (tmp_path / "run" / "step-1" / "a").read_bytes() == b"abc"
    assert inside.can_rename
    assert inside.locate("a") == str(tmp_path / "run" / "step-1" / "a")
    with pytest.raises(StoreError, match="leaves the folder"):
        LocalStore(tmp_path).folder("../other")
