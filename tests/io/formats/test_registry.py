"""Formats of other people work as ours do, once they are registered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardplan
from shardplan.dist import run_ranks
from shardplan.io import ExistsError, FormatError
from shardplan.io.formats import known_formats, register_format, registry

PLUGIN = Path(__file__).parents[2] / "plugin"
SD = {"model": {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(5)}, "step": 7}
FLAT = {"model.w": SD["model"]["w"], "model.b": SD["model"]["b"], "step": 7}


@pytest.fixture
def toy(monkeypatch):
    """Register the format, for one test."""
    monkeypatch.syspath_prepend(PLUGIN)
    import toyformat

    monkeypatch.setattr(registry, "_registered", {})
    register_format(toyformat.FORMAT)
    return toyformat


def same(found, sd=FLAT):
    return set(found) == set(sd) and all(
        torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        for name, value in sd.items()
    )


def test_a_registered_format_is_saved_detected_loaded_and_verified(toy, tmp_path):
    path = tmp_path / "a"
    assert shardplan.save(SD, path, format="toy").files == 2
    assert same(shardplan.restore(path))
    target = {"model.w": torch.zeros(4, 3), "model.b": torch.zeros(5), "step": 0}
    shardplan.load(target, path)
    assert same(target)
    checkpoint = shardplan.open_checkpoint(path)
    assert torch.equal(checkpoint["model.w"][1:3], SD["model"]["w"][1:3])
    assert "format toy" in repr(checkpoint)
    report = shardplan.verify(path)
    assert (report.ok, report.format, report.files, report.chunks) == (True, "toy", 2, 2)
    (file, *_) = sorted(path.glob("*.toy"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert [fault.kind for fault in shardplan.verify(path).faults] == ["checksum"]


@pytest.mark.parametrize("format", ["safetensors", "hf", "dcp", "torch"])
def test_a_registered_format_is_converted_both_ways(toy, tmp_path, format):
    shardplan.save(SD, tmp_path / "a", format="toy")
    shardplan.convert(tmp_path / "a", tmp_path / "b", format=format)
    shardplan.convert(tmp_path / "b", tmp_path / "c", format="toy")
    kept = {name: v for name, v in FLAT.items() if format != "hf" or isinstance(v, torch.Tensor)}
    assert same(shardplan.restore(tmp_path / "c"), kept)
    changes = shardplan.diff(tmp_path / "a", tmp_path / "c").changes
    assert [change.key for change in changes] == (["step"] if format == "hf" else [])


def test_ranks_save_and_load_a_registered_format(toy, tmp_path):
    w = torch.arange(8.0)

    def work(comm):
        shardplan.save({f"w{comm.rank}": w[comm.rank :]}, tmp_path / "a", format="toy", comm=comm)
        found = {"w0": torch.zeros(8), "w1": torch.zeros(7)}
        shardplan.load(found, tmp_path / "a", comm=comm)
        return same(found, {"w0": w, "w1": w[1:]})

    assert run_ranks(2, work) == [True, True]


def test_a_registered_format_is_overwritten_but_does_not_replace_another(toy, tmp_path):
    shardplan.save(SD, tmp_path / "a", format="toy")
    with pytest.raises(ExistsError, match="overwrite=True"):
        shardplan.save(SD, tmp_path / "a", format="toy")
    shardplan.save({"x": torch.ones(1)}, tmp_path / "a", format="toy", overwrite=True)
    assert len(os.listdir(tmp_path / "a")) == 2
    with pytest.raises(ExistsError, match=r"format 'toy'.*choose another folder"):
        shardplan.save(SD, tmp_path / "a", overwrite=True)


def test_a_registered_format_takes_part_in_a_run(toy, tmp_path):
    shardplan.save(SD, tmp_path / "step-1")
    shardplan.save(SD, tmp_path / "step-2", format="toy")
    assert shardplan.latest(tmp_path) == str(tmp_path / "step-2")
    stray = tmp_path / "step-2" / "0123456789ab.0.0.toy"
    stray.write_bytes(b"of a killed save")
    assert shardplan.verify(tmp_path / "step-2").leftovers == (stray.name,)
    report = shardplan.prune(tmp_path, keep_last=1, min_age=0)
    assert (report.kept, report.ignored) == (("step-1",), ("step-2",))
    assert not stray.exists()
    assert same(shardplan.restore(tmp_path / "step-2"))


def test_a_name_is_given_once(toy):
    register_format(toy.FORMAT)  # again: it is the same
    for name in ("toy", "hf"):
        other = toy.ToyFormat()
        other.name = name
        with pytest.raises(ValueError, match="choose another name"):
            register_format(other)


def test_an_unknown_format_is_refused_and_the_known_ones_are_named(toy, tmp_path):
    with pytest.raises(ValueError, match=r"unknown format 'toi'.*torch, toy"):
        shardplan.save(SD, tmp_path, format="toi")
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(FormatError, match="torch, toy"):
        shardplan.restore(tmp_path / "x.txt")


def test_an_installed_package_brings_its_format_by_an_entry_point(tmp_path):
    info = tmp_path / "toyformat-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toyformat\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardplan.formats]\ntoy = toyformat:FORMAT\n")
    code = (
        "import shardplan, torch\n"
        f"shardplan.save({{'w': torch.ones(2)}}, {str(tmp_path / 'a')!r}, format='toy')\n"
        f"print(shardplan.restore({str(tmp_path / 'a')!r})['w'].tolist())\n"
    )
    path = os.pathsep.join([str(tmp_path), str(PLUGIN)])
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[1.0, 1.0]\n", "")


def test_every_format_of_ours_says_what_it_can_do():
    formats = {format.name: format for format in known_formats()}
    assert list(formats)[:4] == ["safetensors", "hf", "dcp", "torch"]
    assert [name for name, one in formats.items() if one.is_file] == ["torch"]
    assert [name for name, one in formats.items() if not one.has_values] == ["hf"]
    assert all(one.marks for one in formats.values() if not one.is_file)
