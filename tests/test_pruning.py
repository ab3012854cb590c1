"""Pruning is told clearly what to keep, and tells clearly what it spared."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

import shardplan
from shardplan.cli.app import app


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
