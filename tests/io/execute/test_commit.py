"""A checkpoint exists whole or not at all, whoever saves, prunes or pulls the plug meanwhile."""

import itertools
import json
import os
import shutil
import threading
import time
import tracemalloc

import pytest
import torch

import shardplan
from shardplan.dist import run_ranks
from shardplan.io.errors import ExistsError, FormatError, UnsureCommitError
from shardplan.io.execute import commit as left_by_saves
from shardplan.io.execute import leftovers
from shardplan.io.formats import CommitJob, WriteJob
from shardplan.io.formats.native.manifest import MANIFEST, read_manifest, sign
from shardplan.io.formats.native.write import NativeWriter, assemble, publish, write_rank
from shardplan.io.pool import Pool
from shardplan.io.stores.base import MissingFileError, Store, StoreError, open_store
from shardplan.io.stores.local import LocalStore
from shardplan.io.stores.testing import CountingStore, FaultyStore
from shardplan.planning import global_plan, local_plan, split_chunks

names = (f"commit-{n}" for n in itertools.count())


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


def state(value):
    return {"w": torch.full((4,), float(value))}


def held(store):
    """Return what the checkpoint says that it is, having read all of it."""
    (value,) = set(shardplan.restore(store)["w"].tolist())
    return value


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def save_two_ranks(store, save_id="s", stores=None):
    """Have two ranks write; return the manifest that is yet to be published."""
    sds = [{"a": torch.ones(2)}, {"b": torch.ones(3)}]
    final, metadata = global_plan(tuple(local_plan(sd) for sd in sds))
    places = stores or [store, store]
    written = [
        write_rank(WriteJob(place, sd, plan, save_id=save_id, rank=rank))
        for rank, (place, sd, plan) in enumerate(zip(places, sds, final, strict=True))
    ]
    return assemble(metadata, final, written, save_id=save_id)


# Whether it happened


def replacing(save):
    """Return which change of a save is the commit."""
    counting = CountingStore(open_store(f"memory://{next(names)}"))
    faulty = FaultyStore(counting)
    save(faulty)
    kinds = [o.name for o in counting.operations if o.name in ("write", "sync", "replace")]
    return kinds.index("replace")


@pytest.mark.parametrize("old", [False, True], ids=["first", "overwrite"])
def test_a_commit_that_times_out_and_lands_later_finds_all_of_its_files(store, old):
    def save(where):
        shardplan.save(state(2), where, overwrite=old)

    at = replacing(save)
    if old:
        shardplan.save(state(1), store)
    late = FaultyStore(store, fail_at=at, mode="late")
    with pytest.raises(UnsureCommitError, match="may exist nevertheless, so its files were kept"):
        save(late)
    if old:
        assert held(store) == 1
    late.arrive()
    assert held(store) == 2


def test_what_an_unsure_commit_kept_is_pruned_if_it_did_not_happen(store):
    late = FaultyStore(store, fail_at=replacing(lambda s: shardplan.save({}, s)) + 1, mode="late")
    with pytest.raises(UnsureCommitError):
        shardplan.save(state(1), late)
    assert len(leftovers(store)) == 1
    assert shardplan.prune(store, keep_last=1, min_age=0).leftovers
    assert store.list() == ()


def test_an_interrupt_while_the_manifest_is_put_in_place_keeps_the_files(tmp_path):
    class Interrupted(CountingStore):
        def replace(self, path, data, *, overwrite=True):
            super().replace(path, data, overwrite=overwrite)
            raise KeyboardInterrupt

        def read_all(self, path, *, limit):
            raise StoreError("read", path, "the line is dead", kind="missing")

    with pytest.raises(KeyboardInterrupt):
        shardplan.save(state(1), Interrupted(open_store(tmp_path)))
    assert held(tmp_path) == 1


@pytest.mark.parametrize("kind", ["denied", "full", "path"])
def test_a_commit_that_surely_failed_leaves_nothing(store, kind):
    class Refusing(CountingStore):
        def replace(self, path, data, *, overwrite=True):
            raise StoreError("replace", path, "no", kind=kind)

    with pytest.raises(StoreError, match="no") as info:
        shardplan.save(state(1), Refusing(store))
    assert not isinstance(info.value, UnsureCommitError)
    assert store.list() == ()


def test_a_folder_that_cannot_be_synced_after_the_commit_is_reported_as_that(tmp_path, monkeypatch):
    shardplan.save(state(1), tmp_path)
    real = shardplan.io.stores.local_files.sync_folder
    renamed = []

    def sync(path):
        if renamed:
            raise OSError(5, "Input/output error")
        real(path)

    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *a: (replace(*a), renamed.append(1)))
    monkeypatch.setattr("shardplan.io.stores.local_files.sync_folder", sync)
    with pytest.raises(UnsureCommitError, match="it was replaced, but a loss of power may undo"):
        shardplan.save(state(2), tmp_path, overwrite=True)
    monkeypatch.undo()
    assert held(tmp_path) == 2


def test_ranks_keep_their_files_when_the_store_fails_after_the_commit(store):
    committed = threading.Event()

    class Failing(CountingStore):
        def replace(self, path, data, *, overwrite=True):
            super().replace(path, data, overwrite=overwrite)
            committed.set()

        def list(self, prefix="", *, recursive=True):
            if committed.is_set():
                raise StoreError("list", self.url, "connection reset")
            return super().list(prefix, recursive=recursive)

        def read_all(self, path, *, limit):
            raise MissingFileError("read", path, "not seen yet", kind="missing")

    def work(comm):
        shardplan.save({f"w{comm.rank}": torch.ones(4)}, Failing(store), comm=comm)

    run_ranks(2, work)
    assert sorted(shardplan.restore(store)) == ["w0", "w1"]


@pytest.mark.parametrize("kind", ["other", "missing"])
def test_a_manifest_in_the_way_that_cannot_be_read_may_be_our_own(store, kind):
    class Twice(CountingStore):
        def replace(self, path, data, *, overwrite=True):
            super().replace(path, data, overwrite=overwrite)
            super().replace(path, data, overwrite=overwrite)

        def read_all(self, path, *, limit):
            error = MissingFileError if kind == "missing" else StoreError
            raise error("read", path, "no answer", kind=kind)

    with pytest.raises(UnsureCommitError):
        shardplan.save(state(1), Twice(store))
    assert held(store) == 1


def test_a_folder_in_the_manifests_place_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    for overwrite in (False, True):
        with pytest.raises((StoreError, FormatError), match="folder"):
            shardplan.save(state(1), tmp_path, overwrite=overwrite)
        assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]
    with pytest.raises(FormatError, match="folder"):
        read_manifest(open_store(tmp_path))


# Several at once


def test_of_two_saves_at_once_one_succeeds_and_the_other_leaves_nothing(store):
    both = threading.Barrier(2, timeout=30)

    class Together(CountingStore):
        def replace(self, path, data, *, overwrite=True):
            both.wait()
            super().replace(path, data, overwrite=overwrite)

    outcome = {}

    def save(value):
        try:
            outcome[value] = shardplan.save(state(value), Together(store)).save_id
        except ExistsError as error:
            outcome[value] = error

    threads = [threading.Thread(target=save, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (value for value, save_id in outcome.items() if isinstance(save_id, str))
    assert isinstance(outcome[3 - winner], ExistsError)
    assert held(store) == winner
    assert set(store.list()) == {MANIFEST, *read_manifest(store).files.names}


def test_a_checkpoint_that_appears_while_another_is_written_stays(store):
    class Raced(CountingStore):
        def sync(self):
            if not store.exists(MANIFEST):
                shardplan.save(state(1), store)

    with pytest.raises(ExistsError, match="overwrite=True"):
        shardplan.save(state(2), Raced(store))
    assert held(store) == 1
    assert len(store.list()) == 2


def test_a_commit_that_was_sent_twice_is_no_conflict_with_itself(store):
    class Twice(CountingStore):
        def replace(self, path, data, *, overwrite=True):
            super().replace(path, data, overwrite=overwrite)
            super().replace(path, data, overwrite=overwrite)

    shardplan.save(state(1), Twice(store))
    assert held(store) == 1


@pytest.mark.parametrize("old", [False, True], ids=["first", "overwrite"])
def test_a_save_whose_files_are_pruned_is_not_committed(store, old):
    class Pruned(CountingStore):
        def sync(self):
            shardplan.prune(self.inner, keep_last=1, min_age=0)

    if old:
        shardplan.save(state(1), store)
    before = store.list()
    with pytest.raises(StoreError, match=r"are gone, or were changed: shard-.*save again"):
        shardplan.save(state(2), Pruned(store), overwrite=old)
    assert store.list() == before
    if old:
        assert held(store) == 1


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_the_files_of_every_rank_must_be_there_in_full(store, harm):
    manifest = save_two_ranks(store)
    theirs = manifest.files.names[1]
    store.delete([theirs])
    if harm == "cut":
        store.write(theirs, [b"x"])
    with pytest.raises(StoreError, match=theirs):
        publish(store, manifest)
    assert not store.exists(MANIFEST)


def test_files_that_a_listing_shows_late_are_looked_for_by_name(store):
    class Stale(CountingStore):
        def entries(self, prefix="", *, recursive=True):
            return ()

    publish(Stale(store), save_two_ranks(store))
    assert shardplan.restore(store)["b"].tolist() == [1, 1, 1]


def test_a_save_that_commits_while_leftovers_are_looked_for_has_none(store):
    manifest = save_two_ranks(store)

    class Meanwhile(CountingStore):
        def _then(self, found):
            if not store.exists(MANIFEST):
                publish(store, manifest)
            return found

        def entries(self, prefix="", *, recursive=True):
            return self._then(super().entries(prefix, recursive=recursive))

        def read_all(self, path, *, limit):
            try:
                return super().read_all(path, limit=limit)
            finally:
                self._then(None)

    assert leftovers(Meanwhile(store)) == ()


def test_a_manifest_is_read_by_one_call_and_of_one_version(store):
    shardplan.save(state(1), store)
    counting = CountingStore(store)
    read_manifest(counting)
    assert [(o.name, o.path) for o in counting.operations] == [("read", MANIFEST)]
    counting.clear()
    assert shardplan.verify(counting).ok
    names = [o.name for o in counting.operations if o.path == MANIFEST]
    assert set(names) == {"exists", "read"}


def test_a_manifest_that_is_larger_than_any_is_not_read(tmp_path):
    shardplan.save(state(1), tmp_path)
    os.truncate(tmp_path / MANIFEST, 1 << 36)
    tracemalloc.start()
    with pytest.raises(FormatError, match="68,719,476,736 bytes"):
        shardplan.restore(tmp_path)
    assert [f.kind for f in shardplan.verify(tmp_path).faults] == ["manifest"]
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_large_file_that_is_not_a_manifest_is_not_read(tmp_path):
    (tmp_path / MANIFEST).write_bytes(b'{"format":"shardplan","version":1,')
    os.truncate(tmp_path / MANIFEST, 1 << 29)
    tracemalloc.start()
    with pytest.raises(FormatError, match="does not begin as one"):
        shardplan.restore(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_large_file_that_only_begins_as_a_manifest_is_refused_at_once(tmp_path):
    shardplan.save(state(1), tmp_path)
    os.truncate(tmp_path / MANIFEST, 1 << 29)
    store = CountingStore(open_store(tmp_path))
    tracemalloc.start()
    with pytest.raises(FormatError, match=f"{MANIFEST}.*checksum does not fit"):
        read_manifest(store)
    assert tracemalloc.get_traced_memory()[1] < 40_000_000
    tracemalloc.stop()
    assert store.bytes_read() < 20_000_000


def test_a_large_text_that_only_begins_as_a_manifest_is_never_held_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("shardplan.io.formats.native.manifest._USUAL", 1 << 20)
    monkeypatch.setattr("shardplan.io.formats.native.manifest._PIECE", 1 << 16)
    shardplan.save(state(1), tmp_path)
    with open(tmp_path / MANIFEST, "ab") as file:
        file.write(b" " * (1 << 24))
    tracemalloc.start()
    with pytest.raises(FormatError, match=f"{MANIFEST}.*checksum does not fit"):
        shardplan.restore(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_large_manifest_of_a_newer_version_is_refused_by_its_beginning(tmp_path):
    (tmp_path / MANIFEST).write_bytes(sign(b'"save_id":"x"}', 99))
    os.truncate(tmp_path / MANIFEST, 1 << 29)
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"version 99.*upgrade"):
        shardplan.restore(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_large_manifest_that_is_replaced_while_it_is_looked_at_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("shardplan.io.formats.native.manifest._USUAL", 100)
    monkeypatch.setattr("shardplan.io.formats.native.manifest._PIECE", 200)
    shardplan.save(state(1), tmp_path / "a")
    shardplan.save(state(2), tmp_path / "b")
    new = (tmp_path / "b" / MANIFEST).read_bytes()

    class Meanwhile(CountingStore):
        def read(self, path, ranges):
            if path == MANIFEST and ranges[0][0]:  # after its first piece
                self.inner.replace(MANIFEST, new)
            return super().read(path, ranges)

    assert read_manifest(Meanwhile(open_store(tmp_path / "a"))).save_id in new.decode()


def test_a_manifest_of_unusual_size_is_read(store, monkeypatch):
    shardplan.save(state(1), store)
    monkeypatch.setattr("shardplan.io.formats.native.manifest._USUAL", 100)
    assert held(store) == 1


def test_a_small_file_is_read_into_memory_once(tmp_path):
    store = open_store(tmp_path)
    store.write("a", [bytes(1 << 22)])
    tracemalloc.start()
    assert len(store.read_all("a", limit=1 << 22)) == 1 << 22
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_a_pipe_in_the_manifests_place_is_refused(tmp_path):
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(FormatError, match="a pipe, a socket or a device"):
        read_manifest(open_store(tmp_path))


# A loss of power


@pytest.fixture
def log(tmp_path, monkeypatch):
    """What reaches the disk, in order: syncs, names that are given, and names that are taken."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("the system does not tell a descriptor's name")
    events = []
    fsync, link, replace, unlink = os.fsync, os.link, os.replace, os.unlink

    def short(path):
        return os.path.relpath(path, tmp_path)

    def record(what, real, which):
        def call(*args):
            real(*args)
            events.append((what, short(args[which])))

        return call

    def sync(fd):
        events.append(("sync", short(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "link", record("name", link, 1))
    monkeypatch.setattr(os, "replace", record("name", replace, 1))
    monkeypatch.setattr(os, "unlink", record("unlink", unlink, 0))
    return events


@pytest.mark.parametrize("overwrite", [False, True])
def test_data_and_names_are_on_the_disk_before_the_manifest_is_named(tmp_path, log, overwrite):
    root = tmp_path / "run" / "step-1"
    if overwrite:
        shardplan.save(state(1), root)
        log.clear()
    shardplan.save(state(2), root, overwrite=overwrite)
    (file,) = shards(root)
    inside, run = "run/step-1", "run"
    commit = log.index(("name", f"{inside}/{MANIFEST}"))
    data = log.index(("sync", f"{inside}/{file.name}"))
    assert data < log.index(("sync", inside), data) < commit
    assert ("sync", run) in log[:commit]
    assert ("sync", inside) in log[commit:]
    if overwrite:
        gone = next(n for n, (what, path) in enumerate(log) if what == "unlink" and "shard" in path)
        assert log.index(("sync", inside), commit) < gone


def test_every_rank_has_made_its_names_durable_before_another_commits(tmp_path, log):
    root = tmp_path / "run" / "step-1"
    manifest = save_two_ranks(None, stores=[LocalStore(root), LocalStore(root)])
    for name in manifest.files.names:
        data = log.index(("sync", f"run/step-1/{name}"))
        assert ("sync", "run/step-1") in log[data:]
    publish(LocalStore(root), manifest)
    assert held_by_rank(root) == [2, 3]


def held_by_rank(root):
    return [len(tensor) for tensor in shardplan.restore(root).values()]


def test_a_folder_that_somebody_made_for_us_is_made_durable_too(tmp_path, log):
    (tmp_path / "step-1").mkdir()
    shardplan.save(state(1), tmp_path / "step-1")
    assert log.count(("sync", ".")) == 1


def test_a_parent_that_may_not_be_listed_is_no_reason_to_fail(tmp_path, monkeypatch):
    (tmp_path / "step-1").mkdir()
    real = shardplan.io.stores.local_files.sync_folder

    def sync(path):
        if path == str(tmp_path):
            raise PermissionError(13, "Permission denied")
        real(path)

    monkeypatch.setattr("shardplan.io.stores.local_files.sync_folder", sync)
    shardplan.save(state(1), tmp_path / "step-1")


def test_a_pruned_checkpoint_loses_its_manifest_for_good_before_any_file(tmp_path, log):
    for step in (1, 2):
        shardplan.save(state(step), tmp_path / f"step-{step}")
    (file,) = shards(tmp_path / "step-1")
    log.clear()
    assert shardplan.prune(tmp_path, keep_last=1).removed == ("step-1",)
    assert log == [
        ("unlink", f"step-1/{MANIFEST}"),
        ("sync", "step-1"),
        ("unlink", f"step-1/{file.name}"),
    ]


def test_what_a_delete_removed_stays_removed_after_a_sync(tmp_path, log):
    store = open_store(tmp_path / "root")
    store.write("a/b/c", [b"x"])
    store.sync()
    log.clear()
    store.delete(["a/b/c"])
    store.sync()
    assert log == [("unlink", "root/a/b/c"), ("sync", "root")]


# Which one, and which can go


def make_steps(folder, steps):
    for step in steps:
        shardplan.save(state(step), f"{folder}/step-{step}")


def test_latest_stops_at_the_newest_whole_one_and_lists_it_once(tmp_path):
    make_steps(tmp_path, range(5))
    store = CountingStore(open_store(tmp_path))
    assert shardplan.latest(store).url == str(tmp_path / "step-4")
    asked = [(o.name, o.path) for o in store.operations]
    assert [path for name, path in asked if name == "list"] == ["", "step-4"]
    assert not {name for name, _ in asked} - {"list", "read"}


def test_prune_takes_sizes_from_one_listing_a_folder(tmp_path):
    make_steps(tmp_path, range(3))
    store = CountingStore(open_store(tmp_path))
    shardplan.prune(store, keep_last=3)
    asked = [(o.name, o.path) for o in store.operations]
    assert len(asked) == len(set(asked)) + 1  # the root is listed for folders, and for its files
    assert {name for name, _ in asked} == {"list", "read"}


def test_of_checkpoints_made_at_once_the_highest_number_is_the_latest(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)
    make_steps(tmp_path, (9, 10, 8))
    assert shardplan.latest(tmp_path) == str(tmp_path / "step-10")
    report = shardplan.prune(tmp_path, keep_last=2)
    assert (report.removed, report.kept) == (("step-8",), ("step-9", "step-10"))


def test_the_latest_of_a_store_opens_with_the_stores_own_options(s3):
    url = f"s3://{s3.bucket}/{next(names)}"
    runs = open_store(url, **s3.options)
    shardplan.save(state(7), open_store(f"{url}/step-7", **s3.options))
    found = shardplan.latest(runs)
    assert isinstance(found, Store)
    assert found.url == f"{url}/step-7"
    assert held(found) == 7
    assert shardplan.latest(open_store(f"{url}/nothing", **s3.options)) is None


def test_one_damaged_manifest_does_not_end_the_search(tmp_path):
    make_steps(tmp_path, (1, 2))
    manifest = tmp_path / "step-2" / MANIFEST
    body = json.loads(manifest.read_text())
    body["files"]["names"] = ["x\ny.safetensors"]
    rest = {k: v for k, v in body.items() if k not in ("format", "version", "xxh3_64")}
    manifest.write_bytes(sign(json.dumps(rest).encode()[1:]))
    assert shardplan.latest(tmp_path) == str(tmp_path / "step-1")
    assert shardplan.prune(tmp_path, keep_last=1).damaged == ("step-2",)


def test_young_files_are_spared_and_old_ones_go(store, monkeypatch):
    save_two_ranks(store, "dead" * 3)
    left = store.list()
    report = shardplan.prune(store, keep_last=1)
    assert (report.leftovers, report.spared) == ((), left)
    now = time.time()
    monkeypatch.setattr(left_by_saves.time, "time", lambda: now + 3700)
    assert shardplan.prune(store, keep_last=1, min_age=7200).spared == left
    assert shardplan.prune(store, keep_last=1).leftovers == left
    assert store.list() == ()


def test_a_long_save_keeps_its_first_files_while_it_writes_its_last(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    manifest = save_two_ranks(store)
    entries = {e.name: e for e in store.entries()}
    young = manifest.files.names[1]

    class Aged(CountingStore):
        def entries(self, prefix="", *, recursive=True):
            now = time.time()
            return tuple(
                shardplan.io.stores.base.Entry(n, e.size, now - (0 if n == young else 9000))
                for n, e in entries.items()
            )

    assert shardplan.prune(Aged(store), keep_last=1).leftovers == ()
    publish(store, manifest)


def test_a_copy_in_progress_is_young_though_its_files_are_old(tmp_path):
    make_steps(tmp_path, (1,))
    (file,) = shards(tmp_path / "step-1")
    os.utime(file, (1e9, 1e9))
    (tmp_path / "copy").mkdir()
    shutil.copy2(file, tmp_path / "copy")  # the manifest comes last
    assert shardplan.prune(tmp_path, keep_last=1).leftovers == ()
    shutil.copy2(tmp_path / "step-1" / MANIFEST, tmp_path / "copy")
    assert held(tmp_path / "copy") == 1


def test_only_our_own_temporary_files_are_leftovers(tmp_path):
    shardplan.save(state(1), tmp_path)
    mine = ["mine.tmp", "tmp", "0123456789abcdef0.tmp", "0123456789ABCDEF.tmp"]
    for name in mine:
        (tmp_path / f"{MANIFEST}.{name}").write_text("x")
    (tmp_path / f"{MANIFEST}.0123456789abcdef.tmp").write_text("x")
    report = shardplan.prune(tmp_path, keep_last=1, min_age=0)
    assert report.leftovers == (f"{MANIFEST}.0123456789abcdef.tmp",)
    assert all((tmp_path / f"{MANIFEST}.{name}").exists() for name in mine)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, not 0"),
        ({"keep_last": 1, "min_age": -1}, "min_age must be at least 0 seconds, not -1"),
    ],
)
def test_a_prune_of_nonsense_is_refused(tmp_path, wrong, text):
    with pytest.raises(ValueError, match=text):
        shardplan.prune(tmp_path, **wrong)


# Headers


def test_a_file_of_another_save_is_refused_though_the_manifest_has_its_checksum(tmp_path):
    for name in "ab":
        shardplan.save(state(1), tmp_path / name)
    (ours,), (theirs,) = shards(tmp_path / "a"), shards(tmp_path / "b")
    shutil.copy(theirs, ours)
    bodies = [json.loads((tmp_path / name / MANIFEST).read_text()) for name in "ab"]
    for key in ("headers", "xxh3_64"):
        bodies[0]["files"][key] = bodies[1]["files"][key]
    rest = {k: v for k, v in bodies[0].items() if k not in ("format", "version", "xxh3_64")}
    (tmp_path / "a" / MANIFEST).write_bytes(sign(json.dumps(rest).encode()[1:]))
    with pytest.raises(FormatError, match=f"save .* wrote it as {theirs.name}; this is save"):
        shardplan.restore(tmp_path / "a")


def test_a_file_that_went_while_the_checkpoint_was_open_says_what_may_have_happened(tmp_path):
    shardplan.save(state(1), tmp_path)
    checkpoint = shardplan.open_checkpoint(tmp_path)
    shardplan.save(state(2), tmp_path, overwrite=True)
    with pytest.raises(FormatError, match="overwritten while it was open: open it again"):
        checkpoint["w"].read()


def test_headers_keep_to_the_budget_and_are_not_kept(tmp_path):
    store = open_store(tmp_path)
    sd = {"x" * 1000 + str(i): torch.zeros(16) for i in range(500)}
    shardplan.save(sd, store, planner=split_chunks(4))
    with Pool(max_workers=4, max_bytes=1) as pool:
        checkpoint = shardplan.open_checkpoint(store, pool=pool)
        tracemalloc.start()
        checkpoint["x" * 1000 + "0"].read()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    header = int(read_manifest(store).files.headers[0])
    assert header > 1_000_000
    assert pool.peak_bytes >= header
    assert kept < header


def test_a_writer_whose_commit_is_unsure_keeps_its_files(tmp_path):
    store = open_store(tmp_path)
    plans, metadata = global_plan((local_plan(state(1)),))
    writer = NativeWriter()
    part = writer.write(WriteJob(store, state(1), plans[0], save_id="s", rank=0))
    late = FaultyStore(store, fail_at=1, mode="late")
    with pytest.raises(UnsureCommitError):
        writer.commit(CommitJob(late, metadata, plans, [part.report], save_id="s", overwrite=False))
    writer.discard(store, part.report, "s")
    late.arrive()
    assert held(store) == 1


def test_a_writer_that_did_not_commit_removes_its_files(tmp_path):
    store = open_store(tmp_path)
    (plan,), _ = global_plan((local_plan(state(1)),))
    part = NativeWriter().write(WriteJob(store, state(1), plan, save_id="s", rank=0))
    NativeWriter().discard(store, part.report, "s")
    assert store.list() == ()
