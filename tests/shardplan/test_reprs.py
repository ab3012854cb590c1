"""What people meet in a notebook or at a prompt reads well: checkpoints, reports, plans."""

import re

import pytest
import torch

import shardplan
from shardplan.planning import (
    Mesh,
    Shard,
    TensorSpec,
    explain,
    global_plan,
    local_plan,
    world_metadata,
    world_plans,
)


@pytest.fixture
def cut(tmp_path):
    """A checkpoint of a tensor that is cut into four."""
    shardplan.save({"w": torch.ones(8, 4), "step": 7}, tmp_path / "whole")
    shardplan.convert(tmp_path / "whole", tmp_path / "cut", mesh=Mesh(dp=4))
    return tmp_path / "cut"


def world(ranks):
    mesh = Mesh(dp=ranks)
    return world_plans({"w": TensorSpec((8, 4), "float32", [Shard(0)])}, mesh)


def test_a_checkpoint_tells_format_date_and_sharding_in_words(cut):
    text = repr(shardplan.open_checkpoint(cut))
    assert re.search(r"format safetensors, \d{4}-\d\d-\d\d \d\d:\d\d UTC, 1 tensor, 1 value", text)
    assert "128 B in 4 files" in text
    assert re.search(r"w +8 × 4 +float32 +128 B +4 × 1 grid, 4 files", text)
    assert "Grid(" not in text


def test_a_checkpoint_of_another_format_tells_what_it_can(cut, tmp_path):
    shardplan.convert(cut, tmp_path / "hf", format="hf")
    text = repr(shardplan.open_checkpoint(tmp_path / "hf"))
    assert "format hf, 1 tensor, 128 B in 1 file" in text
    assert re.search(r"w .*whole, 1 file$", text)


def test_everything_has_html_that_escapes_names(tmp_path):
    shardplan.save({"<b>": torch.ones(2)}, tmp_path / "a")
    opened = shardplan.open_checkpoint(tmp_path / "a")
    converted = shardplan.convert(tmp_path / "a", tmp_path / "b", format="torch")
    pruned = shardplan.prune(tmp_path, keep_last=1)
    for value in (opened, opened["<b>"], converted, pruned, world(2)):
        html = value._repr_html_()
        assert "<table" in html
        assert "<b>" not in html.replace("</b>", "")


def test_names_that_cannot_be_printed_are_spelled_out():
    plan = local_plan({"a\nb\x1b[31m": TensorSpec((4,))})
    _, metadata = global_plan([plan])
    for text in (repr(plan), repr(metadata)):
        assert "a\\nb\\x1b[31m" in text
        assert "\x1b" not in text


def test_numbers_with_units_are_set_to_the_right_and_names_to_the_left(cut):
    html = shardplan.open_checkpoint(cut)._repr_html_()
    assert re.search(r'text-align:right">128 B', html)
    assert re.search(r'text-align:left">w<', html)


def test_a_prune_prints_what_became_of_each_checkpoint(tmp_path):
    for step in (1, 2):
        shardplan.save({"w": torch.ones(2)}, tmp_path / f"step-{step}")
    text = repr(shardplan.prune(tmp_path, keep_last=1))
    assert text.startswith("1 checkpoint and 0 files of killed saves gone, 1 checkpoint kept")
    assert re.search(r"step-1 +gone\n", text)
    assert re.search(r"step-2 +kept$", text)


def test_a_background_save_says_how_far_it_is(tmp_path):
    done = shardplan.async_save({"w": torch.ones(2)}, tmp_path / "a")
    done.result()
    assert re.search(r"a'\): done: saved .* in 1 file", repr(done))
    failed = shardplan.async_save({"w": torch.ones(2)}, tmp_path / "a")
    assert failed.exception() is not None
    assert "failed: ExistsError" in repr(failed)
    assert "under way" in repr(type(done)("b"))


def test_one_of_something_is_no_plural():
    alone = world(1)
    assert "1 rank on" in repr(alone)
    assert "1 tensor in 1 layout" in repr(alone)
    assert "1 rank reads 128 B in 1 request," in repr(explain(world_metadata(alone), alone))


def test_a_report_says_which_limit_makes_its_time():
    plans = world(2)
    report = explain(world_metadata(plans), plans)
    assert "all ranks, as storage serves them" not in repr(report)
    slow = explain(
        world_metadata(plans), plans, model=shardplan.planning.CostModel(storage_total=128.0)
    )
    assert slow.totals.seconds == 1.0
    assert re.search(r"all ranks, as storage serves them +1\.0 s \(128 B at", repr(slow))
