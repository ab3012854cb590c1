"""Pruning is told clearly what to keep, and tells clearly what it spared."""

import json
import math
import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from typer.testing import CliRunner

import shardplan
from shardplan.cli.app import app
from shardplan.io.formats.native.manifest import MANIFEST
from shardplan.io.stores.base import MissingFileError, StoreError, open_store
from shardplan.io.stores.local import LocalStore
from shardplan.io.stores.testing import CountingStore


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ({"keep_last": None}, TypeError),
        ({"keep_last": 1.5}, TypeError),
        ({"keep_last": True}, TypeError),
        ({"keep_last": "2"}, TypeError),
        ({"keep_last": 0}, ValueError),
        ({"keep_last": 1, "min_age": -1}, ValueError),
        ({"keep_last": 1, "min_age": math.nan}, ValueError),
        ({"keep_last": 1, "min_age": None}, TypeError),
        ({"keep_last": 1, "min_age": True}, TypeError),
    ],
)
def test_odd_wishes_are_refused_in_words(tmp_path, wish, error):
    with pytest.raises(error, match=r"keep_last|min_age"):
        shardplan.prune(tmp_path, **wish)


def run(*words):
    result = CliRunner().invoke(app, ["prune", *map(str, words)])
    return result.exit_code, result.output


def leave(folder):
    """Leave what a killed save does: data files without a manifest."""
    shardplan.save({"w": torch.ones(2)}, folder)
    (folder / "shardplan.json").unlink()
    (left,) = folder.iterdir()
    return left


def test_young_leftovers_are_shown_as_spared_until_asked_for(tmp_path):
    left = leave(tmp_path / "a")
    code, text = run(tmp_path, "--keep-last", 1)
    assert code == 0
    assert "spared" in text
    assert left.exists()
    code, text = run(tmp_path, "--keep-last", 1, "--json")
    assert json.loads(text)["spared"] == [f"a/{left.name}"]
    code, text = run(tmp_path, "--keep-last", 1, "--min-age", 0, "--json")
    assert (code, json.loads(text)["leftovers"]) == (0, [f"a/{left.name}"])
    assert not left.exists()


def make_steps(folder, *steps):
    for step in steps:
        shardplan.save({"w": torch.full((4,), float(step))}, folder / f"step-{step}")


def flip(folder):
    """Change one bit of a checkpoint's data; no size tells."""
    (file,) = folder.glob("shard-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


class Meanwhile(CountingStore):
    """A store in which something else happens just before the first file is deleted."""

    def __init__(self, path, act):
        super().__init__(open_store(path))
        self.act = act

    def delete(self, paths):
        act, self.act = self.act, lambda: None
        act()
        super().delete(paths)


# What stays is sound


def test_a_damaged_checkpoint_is_not_kept_in_the_place_of_a_sound_one(tmp_path):
    make_steps(tmp_path, 100, 200, 300, 1000)
    flip(tmp_path / "step-1000")
    report = shardplan.prune(tmp_path, keep_last=1)
    assert (report.kept, report.damaged) == (("step-300",), ("step-1000",))
    assert report.removed == ("step-100", "step-200")
    assert report.checked == "bytes"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1000", "step-300"]


def test_nothing_goes_where_too_few_are_sound(tmp_path):
    make_steps(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-1")
    flip(tmp_path / "step-3")
    report = shardplan.prune(tmp_path, keep_last=2)
    assert (report.removed, report.kept) == ((), ("step-2",))
    assert report.damaged == ("step-1", "step-3")


def test_bytes_are_not_read_if_nobody_wants_it_or_nothing_goes(tmp_path):
    make_steps(tmp_path, 1, 2)
    flip(tmp_path / "step-2")
    for wish in ({"keep_last": 2}, {"keep_last": 1, "verify": False}):
        store = CountingStore(open_store(tmp_path))
        report = shardplan.prune(store, **wish)
        assert report.checked == "sizes"
        assert {o.path[7:] for o in store.operations if o.name == "read"} == {"shardplan.json"}
    assert (report.removed, report.kept) == (("step-1",), ("step-2",))


def test_progress_never_goes_back_and_grows_when_another_must_be_checked(tmp_path):
    make_steps(tmp_path, 1, 2, 3, 4)
    flip(tmp_path / "step-4")
    told = []
    shardplan.prune(tmp_path, keep_last=2, progress=lambda *at: told.append(at))
    assert told == sorted(told)
    one = sum(file.stat().st_size for file in (tmp_path / "step-2").iterdir())
    assert (told[0], told[-1]) == ((0, told[0][1]), (told[-1][1],) * 2)
    assert told[-1][1] == told[0][1] + one


def test_the_command_line_says_how_it_checked(tmp_path):
    make_steps(tmp_path, 1, 2)
    words = tmp_path, "--keep-last", 1, "--dry-run"
    assert "every byte was checked" in run(*words)[1]
    assert "presence and sizes" in run(*words, "--no-verify")[1]
    assert json.loads(run(*words, "--json")[1])["checked"] == "bytes"
    assert json.loads(run(*words, "--json", "--no-verify")[1])["checked"] == "sizes"


def test_a_dry_run_tells_the_same_and_removes_nothing(tmp_path):
    make_steps(tmp_path, 1, 2, 3)
    left = leave(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    wish = {"keep_last": 1, "min_age": 0}
    would = shardplan.prune(tmp_path, dry_run=True, **wish)
    assert sorted(tmp_path.rglob("*")) == before
    sizes = [f.stat().st_size for n in (1, 2) for f in (tmp_path / f"step-{n}").iterdir()]
    assert (would.files, would.nbytes) == (5, sum(sizes) + left.stat().st_size)
    did = shardplan.prune(tmp_path, **wish)
    assert (would.dry_run, did.dry_run) == (True, False)
    assert (would.removed, would.leftovers) == (did.removed, did.leftovers)
    assert (would.files, would.nbytes) == (did.files, did.nbytes)


# Others are at it, too


def test_a_checkpoint_that_was_saved_anew_meanwhile_stays(tmp_path):
    make_steps(tmp_path, 1, 2, 3)
    again = {"w": torch.full((4,), 99.0)}
    store = Meanwhile(tmp_path, lambda: shardplan.save(again, tmp_path / "step-2", overwrite=True))
    report = shardplan.prune(store, keep_last=1)
    assert (report.removed, report.replaced) == (("step-1",), ("step-2",))
    assert shardplan.restore(tmp_path / "step-2")["w"].tolist() == [99.0] * 4


def test_a_save_that_commits_while_the_old_one_is_being_deleted_is_not_deleted(
    tmp_path, monkeypatch
):
    make_steps(tmp_path, 1, 2, 3)
    again = {"w": torch.full((4,), 99.0)}
    target, unlink = tmp_path / "step-1", os.unlink
    saving = threading.Thread(target=lambda: shardplan.save(again, target, overwrite=True))

    def late(path, **options):
        if path == str(target / MANIFEST) and not saving.ident:
            saving.start()
            saving.join(2)  # which it would be done in, if nothing held it up
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", late)
    shardplan.prune(tmp_path, keep_last=1)
    saving.join()
    assert shardplan.restore(target)["w"].tolist() == [99.0] * 4
    assert shardplan.verify(target).ok


def test_a_manifest_that_is_not_the_one_that_was_looked_at_is_not_deleted(tmp_path):
    store = LocalStore(tmp_path)
    store.replace("a", b"new")
    assert not store.delete_same("a", b"old")
    assert not store.delete_same("a", b"newer")
    assert not store.delete_same("b", b"")
    assert store.list() == ("a",)
    assert store.delete_same("a", b"new")
    assert store.list() == ()


def test_two_prunes_at_once_do_each_other_no_harm(tmp_path):
    make_steps(tmp_path, 1, 2, 3)
    store = Meanwhile(tmp_path, lambda: shardplan.prune(tmp_path, keep_last=1))
    report = shardplan.prune(store, keep_last=1)
    assert "step-2" not in report.removed  # the other one removed it
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]


# What is no checkpoint of ours


def test_a_folder_that_may_not_be_read_is_passed_over(tmp_path):
    class Closed(CountingStore):
        def refuse(self, path):
            if path.startswith("lost+found"):
                raise StoreError("read", path, "permission denied", kind="denied")

        def entries(self, prefix="", *, recursive=True):
            self.refuse(prefix)
            return super().entries(prefix, recursive=recursive)

        def read_all(self, path, *, limit):
            self.refuse(path)
            return super().read_all(path, limit=limit)

    make_steps(tmp_path, 1, 2)
    (tmp_path / "lost+found").mkdir()
    store = Closed(open_store(tmp_path))
    assert shardplan.latest(store).url == str(tmp_path / "step-2")
    report = shardplan.prune(store, keep_last=1)
    assert (report.removed, report.denied) == (("step-1",), ("lost+found",))


def test_a_root_that_may_not_be_read_is_an_error(tmp_path):
    class Closed(CountingStore):
        def entries(self, prefix="", *, recursive=True):
            raise StoreError("list", prefix, "permission denied", kind="denied")

    with pytest.raises(StoreError, match="denied"):
        shardplan.prune(Closed(open_store(tmp_path)), keep_last=1)


def test_a_folder_to_prune_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(MissingFileError, match="no such folder"):
        shardplan.prune(tmp_path / "nowhere", keep_last=1)
    assert run(tmp_path / "nowhere", "--keep-last", 1)[0] == 2


def test_an_empty_path_is_wrong_usage(tmp_path, monkeypatch):
    make_steps(tmp_path, 1, 2)
    monkeypatch.chdir(tmp_path)
    code, text = run("", "--keep-last", 1)
    assert (code, "the path is empty" in text) == (2, True)
    assert len(list(tmp_path.iterdir())) == 2


def test_checkpoints_of_other_formats_are_left_alone_and_listed(tmp_path):
    make_steps(tmp_path, 1)
    sd = {"w": torch.ones(2)}
    shardplan.save(sd, tmp_path / "dcp", format="dcp")
    shardplan.save(sd, tmp_path / "x.pt", format="torch")
    (tmp_path / "hf").mkdir()
    save_file(sd, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    report = shardplan.prune(tmp_path, keep_last=1, min_age=0)
    assert (report.kept, report.ignored) == (("step-1",), ("dcp", "hf", "x.pt"))
    assert sorted(tmp_path.rglob("*")) == before
    assert "another format" in run(tmp_path, "--keep-last", 1)[1]


def test_the_latest_may_be_one_of_torch_s_own(tmp_path):
    make_steps(tmp_path, 1)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    os.utime(tmp_path / "step-2" / ".metadata", (2e9, 2e9))
    assert shardplan.latest(tmp_path) == str(tmp_path / "step-2")
    os.utime(tmp_path / "step-2" / ".metadata", (1e9, 1e9))  # a copy that has kept its time
    assert shardplan.latest(tmp_path) == str(tmp_path / "step-1")
    os.utime(tmp_path / "step-2" / ".metadata", (2e9, 2e9))
    next((tmp_path / "step-2").glob("*.distcp")).write_bytes(b"cut")
    assert shardplan.latest(tmp_path) == str(tmp_path / "step-1")


def test_files_that_an_index_names_and_those_with_other_words_are_never_leftovers(tmp_path):
    ours, users = (f"shard-00000-model-00001-of-00001-{x}.safetensors" for x in ("0" * 12, "final"))
    for name in (ours, users):
        save_file({"w": torch.ones(2)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": ours}}))
    assert shardplan.prune(tmp_path, keep_last=1, min_age=0).leftovers == ()
    assert shardplan.restore(tmp_path)["w"].tolist() == [1, 1]
    index.unlink()
    assert shardplan.prune(tmp_path, keep_last=1, min_age=0).leftovers == (ours,)
    assert (tmp_path / users).exists()


def test_metadata_that_vanishes_while_it_is_looked_at_does_not_stop_a_prune(tmp_path, monkeypatch):
    shardplan.save({"w": torch.ones(2)}, tmp_path / "a", format="dcp")
    read_all = LocalStore.read_all

    def replaced(self, path, **options):
        if path.endswith(".metadata"):
            os.unlink(self.locate(path))
        return read_all(self, path, **options)

    monkeypatch.setattr(LocalStore, "read_all", replaced)
    report = shardplan.prune(tmp_path, keep_last=1, min_age=0)
    assert (report.leftovers, report.spared) == ((), ())
