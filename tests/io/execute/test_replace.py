"""One checkpoint takes the place of another of its format at one instant; others are refused."""

import itertools
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardplan
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import ExistsError, open_store
from shardplan.io.errors import UnsureCommitError
from shardplan.io.execute.pieces import Lazy
from shardplan.io.formats import CommitJob, WriteJob
from shardplan.io.formats.hf.source import INDEX, SINGLE
from shardplan.io.formats.registry import detect, find_writer, open_target
from shardplan.io.stores.base import StoreError
from shardplan.io.stores.testing import FaultyStore, InjectedError
from shardplan.planning import RefusedError, global_plan, local_plan
from shardplan.planning.storage import number_shards

OLD = {"old": torch.ones(30), "w": torch.zeros(30)}
NEW = {"new": torch.ones(40), "w": torch.ones(40)}
KINDS = ("safetensors", "hf", "hf in files", "dcp")
FORMAT = {kind: kind.split()[0] for kind in KINDS}
PAIRS = list(itertools.product(KINDS, KINDS))
ALIKE = [(before, after) for before, after in PAIRS if FORMAT[before] == FORMAT[after]]


def put(store, sd, kind, overwrite=True, save_id=None):
    """Save as one of the kinds of checkpoint."""
    options = {"max_shard_size": 160} if kind == "hf in files" else {}
    writer = find_writer(FORMAT[kind], **options)
    plans, metadata = global_plan([local_plan(sd)])
    writer.refuse(store, overwrite)
    save_id = save_id or os.urandom(3).hex()
    part = writer.write(WriteJob(store, sd, plans[0], save_id=save_id, rank=0))
    try:
        return writer.commit(
            CommitJob(store, metadata, plans, [part.report], save_id=save_id, overwrite=overwrite)
        )
    except Exception:
        writer.discard(store, part.report, save_id)
        raise


def holds(store, sd):
    found = shardplan.restore(store)
    return set(found) == set(sd) and all(torch.equal(found[name], sd[name]) for name in sd)


def count_changes(store, *args):
    counting = FaultyStore(store)
    put(counting, *args)
    return counting.changes


@pytest.mark.parametrize(("before", "after"), ALIKE)
def test_a_checkpoint_takes_the_place_of_another_of_its_format(tmp_path, before, after):
    store = open_store(tmp_path / "a")
    put(store, OLD, before)
    with pytest.raises(ExistsError, match="overwrite=True"):
        put(store, NEW, after, overwrite=False)
    assert holds(store, OLD)
    assert put(store, NEW, after) == ()
    assert detect(store) == FORMAT[after]
    assert holds(store, NEW)
    alone = open_store(tmp_path / "b")
    put(alone, NEW, after)
    assert len(store.list()) == len(alone.list()), store.list()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair not in ALIKE])
def test_a_checkpoint_of_another_format_is_not_replaced(tmp_path, before, after, overwrite):
    store = open_store(tmp_path)
    put(store, OLD, before)
    files = store.list()
    with pytest.raises(ExistsError, match="choose another folder") as caught:
        put(store, NEW, after, overwrite=overwrite)
    assert not caught.value.can_overwrite
    assert store.list() == files
    assert holds(store, OLD)


@pytest.mark.parametrize(
    ("where", "mode", "landed"),
    [("local", "stop", 1), ("memory", "stop", 0), ("memory", "raise", 1)],
)
@pytest.mark.parametrize(("before", "after"), ALIKE)
def test_at_every_kill_point_the_old_one_or_the_new_one_loads_as_the_error_tells(
    tmp_path, before, after, mode, landed, where
):
    def fresh(step):
        url = str(tmp_path / f"s{step}") if where == "local" else f"memory://{tmp_path.name}/{step}"
        store = open_store(url)
        put(store, OLD, before)
        return store

    total = FaultyStore(fresh("count"), questions=True)
    put(total, NEW, after)
    for step in range(total.changes):
        store = fresh(step)
        faulty = FaultyStore(store, fail_at=step, questions=True, mode=mode, landed=landed)
        try:
            put(faulty, NEW, after)
        except UnsureCommitError:
            assert holds(store, OLD) or holds(store, NEW), (step, store.list())
        except InjectedError:
            assert holds(store, OLD), (step, store.list())
        else:
            assert holds(store, NEW), (step, store.list())
        put(store, NEW, after)
        assert holds(store, NEW)
        assert detect(store) == FORMAT[after]


@pytest.mark.parametrize(
    ("before", "after"),
    [pair for pair in [*ALIKE, *((None, kind) for kind in KINDS)] if pair[1] != "hf"],
)
def test_what_times_out_at_the_commit_and_lands_later_finds_its_files(tmp_path, before, after):
    def fresh(step):
        store = open_store(tmp_path / f"s{step}")
        if before is not None:
            put(store, OLD, before)
        return store

    unsure = 0
    for step in range(count_changes(fresh("count"), NEW, after)):
        store = fresh(step)
        late = FaultyStore(store, fail_at=step, mode="late")
        try:
            put(late, NEW, after)
        except UnsureCommitError:
            unsure += 1
            late.arrive()
            assert holds(store, NEW) or holds(store, OLD)
            if after == "hf in files":
                store.delete([SINGLE])  # which may hide the new one
            assert holds(store, NEW)
        except InjectedError:
            assert before is None or holds(store, OLD)
        else:
            assert holds(store, NEW)
    assert unsure >= 1


def test_a_single_file_that_may_still_hide_its_successor_is_no_success(tmp_path):
    def fresh(step):
        store = open_store(tmp_path / f"s{step}")
        put(store, OLD, "hf")
        return store

    for step in range(count_changes(fresh("count"), NEW, "hf in files")):
        store = fresh(step)
        try:
            put(FaultyStore(store, fail_at=step, mode="late"), NEW, "hf in files")
        except (InjectedError, UnsureCommitError):
            assert holds(store, OLD)
        else:
            assert holds(store, NEW)


@pytest.mark.parametrize("after", ["hf in files", "dcp"])
def test_a_commit_that_surely_failed_leaves_nothing(tmp_path, monkeypatch, after):
    store = open_store(tmp_path)

    def denied(path, data, *, overwrite=True):
        raise StoreError("replace", path, "no", kind="denied")

    monkeypatch.setattr(store, "replace", denied)
    with pytest.raises(StoreError) as info:
        put(store, NEW, after)
    assert not isinstance(info.value, UnsureCommitError)
    assert store.list() == ()


@pytest.mark.parametrize("after", ["hf in files", "dcp", "safetensors"])
def test_an_interrupt_at_the_commit_keeps_the_files(tmp_path, monkeypatch, after):
    store = open_store(tmp_path / "b")
    shardplan.save(NEW, tmp_path / "a")
    replace = store.replace

    def interrupted(*args, **options):
        replace(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "replace", interrupted)
    options = {"max_shard_size": 160} if after == "hf in files" else {}
    with pytest.raises(KeyboardInterrupt):
        shardplan.convert(tmp_path / "a", store, format=FORMAT[after], **options)
    monkeypatch.undo()
    assert holds(store, NEW)


class Saver:
    """A save into a folder, step by step."""

    def __init__(self, folder, kind, sd, save_id, overwrite=False):
        options = {"max_shard_size": 160} if kind == "hf in files" else {}
        self.store, self.writer = open_target(folder, FORMAT[kind], **options)
        self.plans, self.metadata = global_plan([local_plan(sd)])
        self.save_id, self.overwrite = save_id, overwrite
        self.writer.refuse(self.store, overwrite)
        self.sd = sd

    def write(self):
        plan = self.plans[0]
        part = self.writer.write(WriteJob(self.store, self.sd, plan, save_id=self.save_id, rank=0))
        self.report = part.report

    def commit(self):
        options = {"save_id": self.save_id, "overwrite": self.overwrite}
        try:
            self.writer.commit(
                CommitJob(self.store, self.metadata, self.plans, [self.report], **options)
            )
        except Exception:
            self.writer.discard(self.store, self.report, self.save_id)
            raise


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_two_saves_into_one_new_folder_the_first_to_commit_stays_whole(tmp_path, kind, where):
    if (kind, where) == ("hf", "memory"):
        pytest.skip("a single file in a store without names to change is in place when written")
    folder = tmp_path if where == "local" else f"memory://two-{tmp_path.name}"
    first, second = Saver(folder, kind, OLD, "aaaa"), Saver(folder, kind, NEW, "bbbb")
    first.write()
    second.write()
    first.commit()
    assert holds(first.store, OLD)
    with pytest.raises(ExistsError):
        second.commit()
    assert holds(first.store, OLD)
    assert not any("bbbb" in name for name in first.store.list())


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_saves_that_commit_at_once_one_stays_whole(tmp_path, monkeypatch, kind):
    """The second looks for a checkpoint just before the first has one."""
    first, second = Saver(tmp_path, kind, OLD, "aaaa"), Saver(tmp_path, kind, NEW, "bbbb")
    first.write()
    second.write()
    refuse = second.writer.refuse

    def slow(store, overwrite):
        refuse(store, overwrite)
        first.commit()

    if kind == "safetensors":
        first.commit()
    else:
        monkeypatch.setattr(second.writer, "refuse", slow)
    with pytest.raises(ExistsError):
        second.commit()
    assert holds(first.store, OLD)


@pytest.mark.parametrize("kind", ["hf", "hf in files"])
def test_files_that_another_save_tidied_away_are_not_committed(tmp_path, kind):
    first = Saver(tmp_path, kind, OLD, "aaaa", overwrite=True)
    second = Saver(tmp_path, kind, NEW, "bbbb", overwrite=True)
    first.write()
    second.write()
    first.commit()
    with pytest.raises(ExistsError, match="another save"):
        second.commit()
    assert holds(first.store, OLD)


@pytest.mark.parametrize("kind", KINDS)
def test_several_ranks_are_refused_as_hf_where_files_are_written_whole(kind):
    store = open_store(f"memory://several-ranks-{kind.replace(' ', '-')}")
    put(store, OLD, kind)
    before = store.list()
    with pytest.raises(CheckpointError, match="convert"):
        run_ranks(
            2, lambda comm: shardplan.save(NEW, store, format="hf", overwrite=True, comm=comm)
        )
    assert store.list() == before
    assert holds(store, OLD)


@pytest.mark.parametrize("format", ["hf", "torch"])
def test_a_single_file_whose_last_answer_is_lost_is_reported_as_unsure(tmp_path, format):
    store, writer = open_target(tmp_path / "x.pt" if format == "torch" else tmp_path, format)
    plans, _ = global_plan([local_plan(NEW)])
    late = FaultyStore(store, fail_at=0, mode="late")
    with pytest.raises(UnsureCommitError, match="may exist nevertheless"):
        writer.write(WriteJob(late, NEW, plans[0], save_id="ab", rank=0))
    late.arrive()
    assert set(shardplan.restore(tmp_path / "x.pt" if format == "torch" else tmp_path)) == set(NEW)


def test_a_file_that_cannot_be_read_to_its_end_is_no_unsure_commit(tmp_path):
    """Nothing can have been committed that was never written to its end."""
    store, writer = open_target("memory://unsure-read/x.pt", "torch")

    class Failing(Lazy):
        shape, dtype = (4,), torch.float32

        def read_box(self, offsets, sizes):
            raise StoreError("read", "a", "no")

    plans, _ = global_plan([local_plan({"w": torch.ones(4)})])
    with pytest.raises(StoreError) as info:
        writer.write(WriteJob(store, {"w": Failing()}, plans[0], save_id="ab", rank=0))
    assert not isinstance(info.value, UnsureCommitError)


@pytest.mark.parametrize("format", ["hf", "dcp", "safetensors"])
def test_ranks_keep_their_files_when_a_conversions_commit_is_unsure(tmp_path, format):
    shardplan.save({f"w{i}": torch.full((64,), float(i)) for i in range(8)}, tmp_path / "a")
    options = {"format": format, "max_shard_size": 512}
    store = open_store(tmp_path / "b")
    name = {"hf": INDEX, "dcp": ".metadata", "safetensors": "shardplan.json"}[format]

    class Lost(FaultyStore):
        def replace(self, path, data, *, overwrite=True):
            if path == name:
                self.lost = data
                raise StoreError("replace", path, "timed out")
            super().replace(path, data, overwrite=overwrite)

    lost = Lost(store)

    def work(comm):
        return shardplan.convert(tmp_path / "a", lost, comm=comm, **options)

    with pytest.raises(CheckpointError, match="UnsureCommitError"):
        run_ranks(2, work)
    store.replace(name, lost.lost)
    found = shardplan.restore(store)
    assert all(torch.equal(found[f"w{i}"], torch.full((64,), float(i))) for i in range(8))


# ---- what cannot be promised is refused


@pytest.mark.parametrize("after", ["safetensors", "dcp"])
def test_files_that_nothing_names_are_not_replaced(tmp_path, after):
    save_file(OLD, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ExistsError, match="choose another folder"):
        shardplan.save(NEW, tmp_path, format=after, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


def test_a_folder_of_another_format_is_not_written_to_unasked(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ExistsError, match="'dcp'"):
        shardplan.save(NEW, tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("name", ["model.safetensors", ".metadata", "shardplan.json"])
def test_a_torch_file_is_not_called_as_another_formats_would_be(tmp_path, name):
    with pytest.raises(ValueError, match="taken for one of another format"):
        shardplan.save(NEW, tmp_path / name, format="torch")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("after", ["safetensors", "hf", "dcp"])
def test_a_folder_does_not_take_a_files_place(tmp_path, after):
    shardplan.save(OLD, tmp_path / "x.pt", format="torch")
    with pytest.raises(ExistsError, match="is a file"):
        shardplan.save(NEW, tmp_path / "x.pt", format=after, overwrite=True)
    assert holds(tmp_path / "x.pt", OLD)


@pytest.mark.parametrize("before", KINDS)
def test_a_torch_file_does_not_take_a_folders_place(tmp_path, before):
    put(open_store(tmp_path / "a"), OLD, before)
    with pytest.raises(ValueError, match="is a folder"):
        shardplan.save(NEW, tmp_path / "a", format="torch", overwrite=True)
    assert holds(open_store(tmp_path / "a"), OLD)


# ---- options


def test_options_of_a_format_are_passed_on_and_others_refused(tmp_path):
    _, writer = open_target(tmp_path, "hf", max_shard_size="1KB", leave_out=True)
    assert (writer.max_shard_size, writer.leave_out) == (1000, True)
    with pytest.raises(ValueError, match="'dcp' has no option max_shard_size"):
        open_target(tmp_path, "dcp", max_shard_size=10)


def test_plans_that_split_tensors_are_refused_where_tensors_are_whole(tmp_path):
    whole = {"w": torch.ones(4, 2)}
    halves, _ = global_plan([local_plan(whole)], shardplan.planning.split_chunks(16))
    with pytest.raises(RefusedError, match=r"`w` would be split.*convert"):
        number_shards(halves, 100)
