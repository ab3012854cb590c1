"""Everything that happens is logged under the name `shardplan`: news, details, and worries."""

import logging

import pytest
import torch

import shardplan
from shardplan.dist import run_ranks
from shardplan.io import FormatError
from shardplan.io.stores.base import StoreError, open_store


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, logger="shardplan")

    def lines(level):
        found = [r for r in caplog.records if r.levelno == level]
        assert {r.name.split(".")[0] for r in found} <= {"shardplan"}
        texts = [r.getMessage() for r in found]
        caplog.clear()
        return texts

    return lines


def saved(path, **more):
    return shardplan.save({"w": torch.arange(6.0), "step": 7}, path, **more)


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda a, b: saved(b), "saved"),
        (lambda a, b: shardplan.load({"w": torch.zeros(6)}, a), "loaded 24 B"),
        (lambda a, b: shardplan.restore(a), "restored 2 names, 24 bytes"),
        (lambda a, b: shardplan.convert(a, b, format="hf"), "converted 1 tensor"),
        (lambda a, b: shardplan.verify(a), "sound; 1 file"),
        (lambda a, b: shardplan.diff(a, a), "No difference: 2 keys"),
        (
            lambda a, b: shardplan.prune(a.parent, keep_last=1),
            "0 checkpoints and 0 files of killed saves gone, 1 checkpoint kept",
        ),
        (lambda a, b: shardplan.async_save({"w": torch.ones(2)}, b).result(), "saved"),
    ],
    ids=["save", "load", "restore", "convert", "verify", "diff", "prune", "async_save"],
)
def test_each_piece_of_work_is_one_line_of_news_that_says_where(tmp_path, log, work, told):
    a = tmp_path / "a"
    saved(a)
    log(logging.INFO)
    work(a, tmp_path / "b")
    (line,) = log(logging.INFO)
    assert told in line
    assert str(tmp_path) in line


def test_phases_are_details_with_their_seconds(tmp_path, log):
    saved(tmp_path / "a")
    phases = [line.split(":")[0] for line in log(logging.DEBUG)]
    assert [phase for phase in phases if phase in ("write", "commit")] == ["write", "commit"]


def test_what_all_ranks_do_alike_is_news_on_one_of_them(tmp_path, log):
    state = {"w": torch.ones(4)}
    run_ranks(3, lambda comm: shardplan.save(state, tmp_path / "a", comm=comm))
    assert len(log(logging.INFO)) == 1
    run_ranks(3, lambda comm: shardplan.load(state, tmp_path / "a", comm=comm))
    assert len(log(logging.INFO)) == 1


def test_files_that_are_left_over_are_a_worry(tmp_path, log, monkeypatch):
    saved(tmp_path / "a")
    store = open_store(tmp_path / "a")
    old = [name for name in store.list() if name.startswith("shard-")]

    def refuse(self, names):
        raise StoreError("delete", store.url, "read-only")

    monkeypatch.setattr(type(store), "delete", refuse)
    saved(tmp_path / "a", overwrite=True)
    (line,) = log(logging.WARNING)
    assert "1 file left over" in line
    assert old[0] in line


def test_a_read_that_begins_anew_is_a_worry(tmp_path, log, monkeypatch):
    saved(tmp_path / "a")
    target, failed = {"w": torch.zeros(6)}, []

    def overwritten_meanwhile(*args, **kwargs):
        if not failed:
            failed.append(True)
            saved(tmp_path / "a", overwrite=True)
            raise FormatError("shard", "gone")
        return read(*args, **kwargs)

    read = shardplan.io.execute.read.Reader.fill
    monkeypatch.setattr(shardplan.io.execute.read.Reader, "fill", overwritten_meanwhile)
    shardplan.load(target, tmp_path / "a")
    (line,) = log(logging.WARNING)
    assert "begins anew" in line
