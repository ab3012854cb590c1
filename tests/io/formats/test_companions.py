"""Files beside tensors: a config, a tokenizer and their like."""

import os

import pytest
import torch

import shardplan
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import FormatError, StoreError, UnsureCommitError, open_store
from shardplan.io.formats import CommitJob, WriteJob
from shardplan.io.formats.hf.write import HfWriter
from shardplan.io.stores.testing import FaultyStore
from shardplan.planning import global_plan, local_plan

STATE = {"w": torch.arange(6.0)}


def model(folder, **files):
    """Make a model with a config, a tokenizer and files that are somebody's notes."""
    shardplan.save(STATE, folder, format="hf")
    found = {
        "config.json": '{"model_type": "llama"}',
        "generation_config.json": "{}",
        "tokenizer.json": "{1}",
        "tokenizer_config.json": "{2}",
        "notes.txt": "mine",
        "training_args.bin": "x",
    }
    for name, text in (found | files).items():
        (folder / name).write_text(text)
    (folder / "tokenizer").mkdir()
    return folder


CARRIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def test_a_conversion_from_hf_to_hf_carries_them_over_and_says_so(tmp_path):
    model(tmp_path / "a")
    report = shardplan.convert(tmp_path / "a", tmp_path / "b", format="hf")
    assert report.carried == CARRIED
    assert f"put beside the tensors: {', '.join(CARRIED)}" in str(report)
    assert sorted(os.listdir(tmp_path / "b")) == sorted([*CARRIED, "model.safetensors"])
    for name in CARRIED:
        assert (tmp_path / "b" / name).read_text() == (tmp_path / "a" / name).read_text()


def test_other_formats_get_none(tmp_path):
    model(tmp_path / "a")
    report = shardplan.convert(tmp_path / "a", tmp_path / "b")
    assert report.carried == ()
    assert "config.json" not in os.listdir(tmp_path / "b")


def test_files_that_are_given_count_before_those_that_are_carried_over(tmp_path):
    model(tmp_path / "a")
    (tmp_path / "merges").write_text("m")
    extra = {"config.json": b"new", "merges.txt": tmp_path / "merges"}
    shardplan.convert(tmp_path / "a", tmp_path / "b", format="hf", extra_files=extra)
    assert (tmp_path / "b/config.json").read_bytes() == b"new"
    assert (tmp_path / "b/merges.txt").read_text() == "m"
    assert (tmp_path / "b/tokenizer.json").read_text() == "{1}"


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_save_takes_them_from_a_folder(tmp_path, where):
    model(tmp_path / "a")
    target = open_store(tmp_path / "b" if where == "local" else "memory://companions-of-a-save")
    shardplan.save(STATE, target, format="hf", extra_files=tmp_path / "a")
    assert target.list() == tuple(sorted([*CARRIED, "model.safetensors"]))
    assert torch.equal(shardplan.restore(target)["w"], STATE["w"])


def test_only_the_coordinator_has_to_see_them(tmp_path):
    def one(comm):
        extra = {"config.json": b"{}"} if comm.rank == 0 else tmp_path / "nowhere"
        return shardplan.save(STATE, tmp_path / "b", format="hf", extra_files=extra, comm=comm)

    run_ranks(2, one)
    assert sorted(os.listdir(tmp_path / "b")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("extra", "error", "text"),
    [
        ("", ValueError, "has no config.json"),
        ({"config.json": "missing.json"}, ValueError, "not a file"),
        ({"../config.json": b""}, StoreError, "leaves the folder"),
        ({"model.safetensors": b""}, ValueError, "those of the tensors"),
    ],
)
def test_what_cannot_be_put_there_is_refused_before_anything_is_written(
    tmp_path, extra, error, text
):
    extra = tmp_path if extra == "" else extra
    with pytest.raises(error, match=text):
        shardplan.save(STATE, tmp_path / "b", format="hf", extra_files=extra)
    with pytest.raises(CheckpointError, match=text):
        run_ranks(
            2,
            lambda comm: shardplan.save(
                STATE, tmp_path / "b", format="hf", extra_files=extra, comm=comm
            ),
        )
    assert not (tmp_path / "b").exists()


def test_a_format_that_has_none_refuses_them(tmp_path):
    with pytest.raises(ValueError, match="'dcp' has no option extra_files"):
        shardplan.save(STATE, tmp_path / "b", format="dcp", extra_files=tmp_path)


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path, monkeypatch):
    from shardplan.io.formats import base

    monkeypatch.setitem(base.LIMITS, "companion", 2)
    with pytest.raises(FormatError, match="limit for a file of this kind"):
        shardplan.save(STATE, tmp_path / "b", format="hf", extra_files=model(tmp_path / "a"))


def put(store, sd, text):
    """Save with two files beside the tensors, one of them under a name of its own."""
    writer = HfWriter(max_shard_size=16, extra=[{"config.json": text, f"{text.decode()}.txt": b""}])
    plans, metadata = global_plan([local_plan(sd)])
    save_id = os.urandom(6).hex()
    part = writer.write(WriteJob(store, sd, plans[0], save_id=save_id))
    job = CommitJob(store, metadata, plans, [part.report], save_id=save_id, overwrite=True)
    try:
        writer.commit(job)
    except UnsureCommitError:
        return
    except StoreError:
        writer.discard(store, part.report, save_id)
        raise


@pytest.mark.parametrize("landed", [0, 1])
def test_a_commit_that_surely_failed_changes_none_of_them(landed):
    new = {"u": torch.ones(4), "v": torch.ones(4)}
    at = 0
    while True:
        store = open_store(f"memory://companions-{landed}-{at}")
        put(store, STATE, b"old")
        faulty = FaultyStore(store, fail_at=at, landed=landed)
        failed = False
        try:
            put(faulty, new, b"new")
        except StoreError:
            failed = True
        found, text = shardplan.restore(store), store.read_all("config.json", limit=10)
        assert set(found) in ({"w"}, {"u", "v"})
        if set(found) == {"w"}:
            assert text == b"old"
        elif not failed and at >= faulty.changes:
            assert text == b"new"
            break
        at += 1
    assert at > 4
