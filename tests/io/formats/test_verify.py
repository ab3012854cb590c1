"""Checkpoints of other tools are checked as far as they can be, and the rest is told."""

import json
import os
import pickle
import struct
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardplan
from shardplan import verify
from shardplan.dist import run_ranks
from shardplan.io import FormatError
from shardplan.io.formats import checks
from shardplan.io.formats.hf.source import INDEX
from shardplan.io.formats.torch_save import verify as archive_check
from shardplan.planning import Chunk

SD = {
    "w": torch.arange(3000.0).reshape(30, 100),
    "v": torch.arange(50),
    "none": torch.empty(0),
    "lr": 0.1,
}
TENSORS = {name: tensor for name, tensor in SD.items() if isinstance(tensor, torch.Tensor)}


def of_torch(folder):
    torch.save(SD, folder / "x.pt")
    return folder / "x.pt"


def of_dcp(folder):
    dcp.save(dict(SD), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def flip(file, needle):
    """Change one bit of what comes after some bytes."""
    data = bytearray(file.read_bytes())
    data[data.index(needle) + len(needle)] ^= 1
    file.write_bytes(data)


NEEDLE = SD["w"].numpy().tobytes()[:400]


@pytest.mark.parametrize("make", [of_torch, of_dcp])
def test_what_torch_wrote_is_sound_and_its_checksums_are_looked_at(tmp_path, make, monkeypatch):
    path = make(tmp_path)
    monkeypatch.setattr(archive_check, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(checks, "_PIECE", 1000)
    done = []
    report = verify(path, progress=lambda at, total: done.append((at, total)))
    assert report.ok, report
    assert report.chunks > len(TENSORS)
    assert report.nbytes >= sum(t.nbytes for t in TENSORS.values())
    assert done[-1] == (report.nbytes, report.nbytes)
    assert report.notes == ()
    assert report.format == ("torch" if make is of_torch else "dcp")


@pytest.mark.parametrize("make", [of_torch, of_dcp])
def test_a_bit_that_flipped_is_found_though_torch_loads_it(tmp_path, make):
    path = make(tmp_path)
    flip(path if path.is_file() else path / "__0_0.distcp", NEEDLE)
    report = verify(path)
    (fault,) = report.faults
    assert (fault.kind, fault.end - fault.begin) == ("checksum", SD["w"].nbytes)
    assert "do not fit their checksum" in fault.reason
    assert report.keys == ("w",)
    assert "1 fault" in repr(report)


def test_parts_that_are_missing_or_cut_short_are_reported_by_name(tmp_path):
    path = of_dcp(tmp_path)
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: data.index(NEEDLE) + 700])
    report = verify(path)
    assert "size" in {fault.kind for fault in report.faults}
    assert "w" in report.keys
    assert "lr" not in report.keys
    file.unlink()
    report = verify(path)
    assert {fault.kind for fault in report.faults} == {"missing"}
    assert set(report.keys) == set(SD)


def test_a_file_that_is_not_an_archive_any_more_is_a_fault_not_an_error(tmp_path):
    path = of_torch(tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    report = verify(path)
    assert [fault.kind for fault in report.faults] == ["header"]


def test_metadata_that_cannot_be_read_is_a_fault(tmp_path):
    path = of_dcp(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps(print))
    (fault,) = verify(path).faults
    assert fault.file == ".metadata"


def test_archives_without_checksums_are_reported_as_such(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = of_torch(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    flip(path, NEEDLE)
    report = verify(path)
    assert (report.ok, report.chunks) == (True, 0)
    assert report.unchecked == path.stat().st_size
    assert "sound" not in report.verdict
    assert report.notes == ("1 of 1 archives have no checksums",)


def test_safetensors_files_are_checked_as_far_as_they_can_be(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    report = verify(tmp_path)
    assert report.ok
    data = sum(tensor.nbytes for tensor in TENSORS.values())
    assert report.unchecked == data
    assert report.nbytes == os.path.getsize(tmp_path / "model.safetensors") - data
    assert "headers fit; there are no checksums for the elements" in repr(report)
    assert "sound" not in repr(report)
    assert "no checksums: headers and sizes were checked" in report.notes[0]
    assert report.notes[0] in repr(report)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(tmp_path / "model.safetensors") - 1)
    (fault,) = verify(tmp_path).faults
    assert fault.file == "model.safetensors"


def test_an_index_that_names_what_is_not_there_is_a_fault(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "b.safetensors"}}')
    (fault,) = verify(tmp_path).faults
    assert fault.file == "b.safetensors"


def test_every_shard_that_is_damaged_or_missing_is_reported(tmp_path):
    weights = {}
    for number, name in enumerate("abcde", 1):
        file = f"model-{number:05d}-of-00005.safetensors"
        save_file({name: torch.ones(4)}, tmp_path / file)
        weights[name] = file
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}))
    os.truncate(tmp_path / weights["b"], 20)
    os.truncate(tmp_path / weights["c"], os.path.getsize(tmp_path / weights["c"]) - 1)
    (tmp_path / weights["e"]).unlink()
    report = verify(tmp_path)
    kinds = [("header", "b"), ("header", "c"), ("missing", "e")]
    assert [(f.kind, f.file) for f in report.faults] == [(k, weights[n]) for k, n in kinds]
    assert report.keys == ("b", "c", "e")
    assert report.files == 5
    (tmp_path / INDEX).unlink()
    (tmp_path / weights["d"]).unlink()
    found = {(fault.kind, fault.file) for fault in verify(tmp_path).faults}
    assert found == {(k, weights[n]) for k, n in (*kinds, ("missing", "d"))}


def test_all_tensors_that_share_a_damaged_record_are_named(tmp_path):
    w = SD["w"].clone()
    torch.save({"w": w, "rows": w[3:], "v": torch.ones(3)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt", NEEDLE)
    report = verify(tmp_path / "x.pt")
    assert report.keys == ("rows", "w")
    assert len({(fault.begin, fault.end) for fault in report.faults}) == 1


def test_a_damaged_record_that_holds_no_tensor_names_none(tmp_path):
    path = of_torch(tmp_path)
    with zipfile.ZipFile(path) as archive:
        flip(path, archive.read("x/.data/serialization_id")[:-1])
    report = verify(path)
    assert [(fault.kind, fault.key) for fault in report.faults] == [("checksum", None)]
    assert report.keys == ()


@pytest.mark.parametrize("format", ["torch", "dcp"])
def test_what_is_written_here_is_sound(tmp_path, format):
    path = tmp_path / "x.pt"
    shardplan.save(SD, path, format=format)
    report = verify(path)
    assert report.ok, report
    assert report.chunks > len(TENSORS)


def test_where_there_is_no_checkpoint_that_is_said(tmp_path):
    with pytest.raises(FormatError, match="no checkpoint"):
        verify(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FormatError, match=r"notes\.txt: it is not a checkpoint of a known format"):
        verify(tmp_path / "notes.txt")
    shardplan.save(SD, tmp_path / "step-1")
    with pytest.raises(FormatError, match=r"in folders of it; give one: .*step-1"):
        verify(tmp_path)


# What a load verifies


def of_save(format):
    def make(folder):
        path = folder / ("x.pt" if format == "torch" else format)
        shardplan.save(SD, path, format=format)
        return path

    return make


def blank():
    return {name: torch.zeros_like(value) if name != "lr" else 0 for name, value in SD.items()}


def data_file(path):
    if path.is_file():
        return path
    return next(file for file in path.iterdir() if NEEDLE in file.read_bytes())


SUMMED = [of_torch, of_dcp, of_save("torch"), of_save("dcp"), of_save("safetensors")]
KINDS = ["of torch", "of dcp", "our torch", "our dcp", "ours"]
TOTAL = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize("make", SUMMED, ids=KINDS)
def test_a_load_that_reads_records_whole_compares_all_checksums(tmp_path, make):
    path = make(tmp_path)
    sd = blank()
    report = shardplan.load(sd, path)
    assert (report.bytes_unverified, report.verified) == (0, 2)
    assert "verified" not in repr(report)
    assert torch.equal(sd["w"], SD["w"])
    report = shardplan.load(blank(), path, verify=False)
    assert report.verified == 0
    assert report.bytes_unverified == report.bytes_needed >= TOTAL
    assert "KiB not verified" in repr(report)
    assert "not verified" in report._repr_html_()


@pytest.mark.parametrize("make", SUMMED, ids=KINDS)
def test_a_load_finds_a_bit_that_flipped(tmp_path, make):
    path = make(tmp_path)
    file = data_file(path)
    flip(file, NEEDLE)
    for read in (lambda: shardplan.load(blank(), path), lambda: shardplan.restore(path)):
        with pytest.raises(FormatError, match=rf"{file.name}.*checksums do not fit: `w`"):
            read()
    sd = blank()
    shardplan.load(sd, path, verify=False)
    assert not torch.equal(sd["w"], SD["w"])


@pytest.mark.parametrize("make", [of_dcp, of_save("dcp")], ids=["of dcp", "our dcp"])
def test_a_value_whose_archive_is_damaged_is_refused(tmp_path, make):
    path = make(tmp_path)
    (file,) = path.glob("*.distcp")
    data = file.read_bytes()
    at = data.index(struct.pack(">d", SD["lr"]))
    file.write_bytes(data[:at] + struct.pack(">d", 0.2) + data[at + 8 :])
    with pytest.raises(FormatError, match=r"`lr` cannot be loaded: .*does not fit its checksum"):
        shardplan.restore(path)


@pytest.mark.parametrize("make", SUMMED, ids=KINDS)
def test_parts_of_records_cannot_be_compared_and_are_counted(tmp_path, make):
    path = make(tmp_path)
    part = {"w": torch.zeros(10, 100), "v": torch.zeros(50, dtype=torch.int64)}
    report = shardplan.load(part, path, shape="overlap")
    assert (report.verified, report.bytes_unverified) == (1, part["w"].nbytes)


def test_records_larger_than_a_block_are_compared_as_well(tmp_path):
    large = {"w": torch.arange(9.0 * (1 << 20)).reshape(9, 1 << 20), "t": torch.ones(3, 4).t()}
    for format in ("torch", "dcp"):
        path = tmp_path / ("x.pt" if format == "torch" else "x")
        torch.save(large, path) if format == "torch" else dcp.save(
            large, checkpoint_id=path, no_dist=True
        )
        sd = {"w": torch.zeros(9, 1 << 20), "t": torch.zeros(4, 3)}
        report = shardplan.load(sd, path)
        assert (report.verified, report.bytes_unverified) == (2, 0)
        assert torch.equal(sd["w"], large["w"])
        assert torch.equal(sd["t"], large["t"])


def test_formats_without_checksums_say_so(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    sd = {name: tensor for name, tensor in blank().items() if name != "lr"}
    report = shardplan.load(sd, tmp_path)
    assert (report.verified, report.bytes_unverified) == (0, TOTAL)
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = of_torch(tmp_path)
        dcp.save({"w": SD["w"], "lr": [1]}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(computes)
    assert shardplan.load(blank(), path).bytes_unverified == TOTAL
    report = shardplan.load({"w": torch.zeros(30, 100), "lr": 0}, tmp_path / "dcp")
    assert report.bytes_unverified == report.bytes_needed > SD["w"].nbytes


def test_tensors_that_share_a_storage_are_counted_where_they_do_not_fill_it(tmp_path):
    whole = torch.arange(100.0)
    torch.save({"all": whole, "half": whole[:50], "last": whole[50:]}, tmp_path / "x.pt")
    sd = {"all": torch.zeros(100), "half": torch.zeros(50), "last": torch.zeros(50)}
    report = shardplan.load(sd, tmp_path / "x.pt")
    assert (report.verified, report.bytes_unverified) == (1, 400)


def test_ranks_that_read_parts_count_what_nobody_compared(tmp_path):
    torch.save({"w": SD["w"]}, tmp_path / "x.pt")
    shardplan.save({"w": SD["w"]}, tmp_path / "ours")

    def load(comm, path, rows):
        low, high = rows[comm.rank]
        shard = ShardOf(SD["w"].shape, low, torch.zeros(high - low, 100))
        report = shardplan.load({"w": shard}, path, comm=comm)
        return report.bytes_unverified, report.verified

    for path in (tmp_path / "x.pt", tmp_path / "ours"):
        halves = run_ranks(2, lambda comm, path=path: load(comm, path, [(0, 15), (15, 30)]))
        assert {unverified for unverified, _ in halves} <= {0, SD["w"].nbytes}
        assert len({unverified for unverified, _ in halves}) == 1  # all ranks know it


class ShardOf:
    """Some rows of a tensor."""

    def __init__(self, shape, low, rows):
        self.shape, self.dtype, self._low, self._rows = shape, rows.dtype, low, rows

    def __create_chunk_list__(self):
        return [Chunk((self._low, 0), self._rows.shape)]

    def __get_tensor_shard__(self, index):
        return self._rows
