"""Whatever is done to a checkpoint's files, `verify` finds it, names it, and goes on."""

import itertools
import json
import os
import shutil
import threading
import time
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import shardplan
from shardplan import open_checkpoint
from shardplan._verify import verify
from shardplan.io.errors import FormatError
from shardplan.io.formats.headers import parse_header
from shardplan.io.formats.native.manifest import MANIFEST, decode_manifest, sign
from shardplan.io.pool import Pool, Progress
from shardplan.io.stores.base import StoreError, open_store
from shardplan.io.stores.testing import CountingStore, FaultyStore
from shardplan.planning import split_chunks
from shardplan.planning.dtypes import ITEMSIZE

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

GOLDEN = Path(__file__).parents[1] / "golden"


def small_state():
    return {
        "a": torch.arange(6, dtype=torch.float32),
        "b": torch.arange(12, dtype=torch.int64).reshape(4, 3),
        "c": torch.float32,  # a value that lies in a data file
        "step": 7,
    }


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two data files: b has a chunk in either."""
    shardplan.save(small_state(), tmp_path, planner=split_chunks(48))
    return tmp_path


def data_files(folder):
    return sorted(folder.glob("shard-*.safetensors"))


def slots(file):
    data = file.read_bytes()
    return parse_header(data, file.name, len(data)).slots


def span(slot):
    return slot.begin, slot.begin + slot.nbytes


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def edit_manifest(folder, change):
    """Change the manifest as somebody would who also mends its checksum."""
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    rest = {k: v for k, v in body.items() if k not in ("format", "version", "xxh3_64")}
    (folder / MANIFEST).write_bytes(sign(json.dumps(rest).encode()[1:]))


def told(report):
    return [(f.kind, f.key, f.file, f.begin, f.end) for f in report.faults]


def kinds(report):
    return [(f.kind, f.key, f.file) for f in report.faults]


# What is sound


def test_a_sound_checkpoint_is_true_and_every_byte_was_read(saved):
    report = verify(saved)
    assert report
    assert report.ok
    assert (report.faults, report.keys, report.leftovers) == ((), (), ())
    assert (report.files, report.chunks) == (2, 4)
    assert report.nbytes == sum(file.stat().st_size for file in saved.iterdir())


def test_every_byte_of_every_file_is_asked_for_once(saved):
    store = CountingStore(open_store(saved))
    verify(store)
    for file in data_files(saved):
        reads = [o.ranges for o in store.operations if (o.name, o.path) == ("read", file.name)]
        ranges = sorted(r for ranges in reads for r in ranges)
        assert sum(length for _, length in ranges) == file.stat().st_size
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(ranges))


def test_checkpoints_of_every_dtype_are_sound(tmp_path):
    raw = torch.arange(64, dtype=torch.uint8)
    sd = {name: raw.view(getattr(torch, name)) for name in ITEMSIZE if name != "bool"}
    sd |= {"bool": torch.ones(3, dtype=torch.bool), "empty": torch.zeros(0, 3)}
    sd |= {"scalar": torch.tensor(1.5), "long": "x" * 100_000}
    shardplan.save(sd, tmp_path)
    assert verify(tmp_path).ok


@pytest.mark.parametrize("version", sorted(p.name for p in GOLDEN.glob("v*") if p.is_dir()))
def test_checkpoints_of_every_version_are_sound(version):
    assert verify(GOLDEN / version).ok


@pytest.mark.parametrize("sd", [{}, {"step": 1}, {"e": torch.zeros(0)}], ids=str)
def test_checkpoints_without_data_are_sound(tmp_path, sd):
    shardplan.save(sd, tmp_path)
    assert verify(tmp_path).ok


def test_chunks_of_many_blocks_are_sound_until_a_bit_is_flipped_in_any_of_them(tmp_path):
    shardplan.save({"w": torch.zeros(5 << 20, 2), "v": torch.zeros(3)}, tmp_path)
    assert verify(tmp_path).ok
    (file,) = data_files(tmp_path)
    for block in range(3):
        flip(file, slots(file)["w"].begin + (block << 24) + 12345)
        assert told(verify(tmp_path)) == [("checksum", "w", file.name, *span(slots(file)["w"]))]
        flip(file, slots(file)["w"].begin + (block << 24) + 12345)


# One fault


@pytest.mark.parametrize("key", ["a", "b", "c"])
@pytest.mark.parametrize("end", ["first", "last"])
def test_a_flipped_bit_is_found_in_its_chunk(saved, key, end):
    file = data_files(saved)[0]
    begin, stop = span(slots(file)[key])
    flip(file, begin if end == "first" else stop - 1)
    report = verify(saved)
    assert not report
    assert told(report) == [("checksum", key, file.name, begin, stop)]
    assert report.keys == (key,)
    assert report.chunks == 3


def test_a_header_that_is_no_header_any_more_loses_its_file(saved):
    file = data_files(saved)[0]
    length = min(s.begin for s in slots(file).values())
    flip(file, 8)  # the brace with which the JSON begins
    report = verify(saved)
    assert told(report) == [("header", None, file.name, 0, length)]
    assert report.keys == ("a", "b", "c")


def test_data_is_still_checked_where_a_damaged_header_can_be_read(saved):
    file = data_files(saved)[0]
    found = slots(file)
    length = min(s.begin for s in found.values())
    flip(file, file.read_bytes().index(b"DCP_VERSION"))
    flip(file, found["a"].begin)
    report = verify(saved)
    assert told(report) == [
        ("header", None, file.name, 0, length),
        ("checksum", "a", file.name, *span(found["a"])),
    ]
    assert report.keys == ("a",)


@pytest.mark.parametrize("part", [b"shard-", b'save_id\\":\\"'])
def test_a_header_that_is_at_odds_with_itself_is_damaged_and_not_foreign(saved, part):
    file = data_files(saved)[0]
    flip(file, file.read_bytes().index(part) + len(part))
    assert kinds(verify(saved)) == [("header", None, file.name)]


def test_a_chunk_that_the_header_calls_otherwise_is_named(saved):
    file = data_files(saved)[1]
    file.write_bytes(file.read_bytes().replace(b'"b"', b'"x"').replace(b'\\"b\\"', b'\\"x\\"'))
    report = verify(saved)
    assert kinds(report) == [
        ("header", None, file.name),
        ("disagrees", "b", file.name),
        ("disagrees", "x", file.name),
    ]
    assert report.keys == ("b",)


def test_a_file_that_is_cut_short_loses_just_what_was_cut_off(saved):
    file = data_files(saved)[0]
    found, size = slots(file), file.stat().st_size
    last = max(found, key=lambda name: found[name].begin)
    os.truncate(file, size - 1)
    report = verify(saved)
    assert told(report) == [
        ("size", None, file.name, size - 1, size),
        ("size", last, file.name, *span(found[last])),
    ]
    assert report.keys == (last,)
    assert report.chunks == 3


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_file_that_is_cut_in_its_header_is_lost(saved, size):
    file = data_files(saved)[0]
    whole = file.stat().st_size
    os.truncate(file, size)
    assert told(verify(saved)) == [("size", None, file.name, size, whole)]


def test_a_file_that_was_added_to_is_told_and_its_chunks_are_sound(saved):
    file = data_files(saved)[0]
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"more")
    report = verify(saved)
    assert told(report) == [("size", None, file.name, size, size + 4)]
    assert report.keys == ()


@pytest.mark.parametrize("alike", [False, True], ids=["of unlike sizes", "of one size"])
def test_swapped_files_are_told_by_the_names_that_they_were_written_under(tmp_path, alike):
    state = {"b": torch.ones(12)} if alike else small_state()
    shardplan.save(state, tmp_path, planner=split_chunks(24 if alike else 48))
    one, two = data_files(tmp_path)
    assert (one.stat().st_size == two.stat().st_size) == alike
    (tmp_path / "x").write_bytes(one.read_bytes())
    two.rename(one)
    (tmp_path / "x").rename(two)
    report = verify(tmp_path)
    assert kinds(report) == [("swapped", None, one.name), ("swapped", None, two.name)]
    assert two.name in report.faults[0].reason
    assert one.name in report.faults[1].reason


def test_a_missing_file_is_named_with_all_that_it_held(saved):
    file = data_files(saved)[0]
    size = file.stat().st_size
    file.unlink()
    report = verify(saved)
    assert told(report) == [("missing", None, file.name, 0, size)]
    assert report.keys == ("a", "b", "c")


def test_a_file_of_another_program_is_foreign(saved):
    file = data_files(saved)[0]
    save_file({"a": torch.zeros(6)}, file)
    report = verify(saved)
    assert kinds(report) == [("foreign", None, file.name)]
    assert "another program" in report.faults[0].reason


def test_a_file_of_another_save_is_foreign_though_it_has_the_same_size(saved, tmp_path):
    file = data_files(saved)[0]
    other = tmp_path / "other"
    shardplan.save(small_state(), other, planner=split_chunks(48))
    stranger = data_files(other)[0]
    file.write_bytes(stranger.read_bytes())
    report = verify(saved)
    assert kinds(report) == [("foreign", None, file.name)]
    assert stranger.name in report.faults[0].reason


def test_a_chunk_that_cannot_be_read_is_told_and_the_others_are_checked(saved):
    file = data_files(saved)[0]
    slot = slots(file)["a"]

    class BadSector(CountingStore):
        def read(self, path, ranges):
            bad = any(o < slot.begin + 4 and slot.begin < o + len(v) for o, v in ranges)
            if bad and path == file.name:
                raise StoreError("read", path, "Input/output error")
            return super().read(path, ranges)

    report = verify(BadSector(open_store(saved)))
    assert told(report) == [("unreadable", "a", file.name, *span(slot))]
    assert "Input/output error" in report.faults[0].reason


# The manifest


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[:-1], "checksum does not fit"),
        (lambda text: b"", "not a manifest"),
        (lambda text: b"[]", "not a manifest"),
        (lambda text: text.replace(b'"version":3', b'"version":9'), "version 9"),
        (lambda text: text.replace(b"[4,3]", b"[3,4]"), "edited"),
    ],
)
def test_a_damaged_manifest_is_a_fault_and_not_an_error(saved, damage, reason):
    manifest = saved / MANIFEST
    manifest.write_bytes(damage(manifest.read_bytes()))
    report = verify(saved)
    assert kinds(report) == [("manifest", None, MANIFEST)]
    assert reason in report.faults[0].reason


def test_a_manifest_that_was_edited_with_care_contradicts_the_headers(saved):
    def change(body):
        for prop in body["properties"]:
            prop["dtype"] = {"float32": "int32"}.get(prop["dtype"], prop["dtype"])

    edit_manifest(saved, change)
    report = verify(saved)
    file = data_files(saved)[0]
    assert told(report) == [("disagrees", "a", file.name, *span(slots(file)["a"]))]
    assert "int32 [6] at [0]" in report.faults[0].reason
    assert "float32 [6] at [0]" in report.faults[0].reason


def test_a_manifest_whose_chunks_leave_a_gap_is_at_fault(saved):
    def change(body):
        for layout in body["layouts"]:
            layout["size"] = [5, 3] if layout["size"] == [4, 3] else layout["size"]

    edit_manifest(saved, change)
    report = verify(saved)
    assert kinds(report) == [("manifest", "b", MANIFEST)]


def test_a_value_in_the_manifest_that_nobody_can_read_is_named(saved):
    edit_manifest(saved, lambda body: body["values"]["step"].__setitem__(1, {"$odd": 1}))
    assert kinds(verify(saved)) == [("manifest", "step", MANIFEST)]


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FormatError, match="no checkpoint"):
        verify(tmp_path)


# Many faults


def test_all_faults_are_told_at_once(tmp_path):
    state = {"w": torch.arange(36.0), "v": torch.zeros(3)}
    shardplan.save(state, tmp_path, planner=split_chunks(24))
    files = data_files(tmp_path)
    assert len(files) == 6
    places = [slots(file) for file in files]
    flip(files[0], places[0]["w"].begin + 3)
    flip(files[0], places[0]["v"].begin)
    files[1].unlink()
    os.truncate(files[2], files[2].stat().st_size - 2)
    flip(files[3], 8)
    save_file({"x": torch.zeros(1)}, files[4])
    report = verify(tmp_path)
    assert kinds(report) == [
        ("checksum", "v", files[0].name),
        ("checksum", "w", files[0].name),
        ("missing", None, files[1].name),
        ("size", None, files[2].name),
        ("size", "w", files[2].name),
        ("header", None, files[3].name),
        ("foreign", None, files[4].name),
    ]
    assert report.keys == ("v", "w")
    text, html = repr(report), report._repr_html_()
    for fault in report.faults:
        assert fault.kind in text
        assert fault.file in text
        assert fault.file in html
    assert "7 faults" in text
    assert "2 keys cannot be loaded whole: v, w" in text


@given(st.data())
def test_any_single_change_to_any_file_is_found(data):
    store = open_store("memory://single")
    if not store.list():
        shardplan.save(small_state(), store, planner=split_chunks(48))
    name = data.draw(st.sampled_from(store.list()))
    whole = bytearray(store.size(name))
    store.read(name, [(0, memoryview(whole))])
    at = data.draw(st.integers(0, len(whole) - 1))
    bad = data.draw(
        st.sampled_from(
            [
                whole[:at],
                whole[:at] + whole[at + 1 :],
                whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :],
                whole + whole[:at] + b"\0",
            ]
        )
    )
    store.write(name, [bytes(bad)])
    report = verify(store)
    store.write(name, [bytes(whole)])
    assert not report.ok
    assert {fault.file for fault in report.faults} == {name}
    assert verify(store).ok


# How it goes about it


def test_leftovers_are_a_note_and_no_fault(saved):
    stopped = FaultyStore(open_store(saved), fail_at=2, mode="stop")
    with pytest.raises(StoreError):
        shardplan.save({"w": torch.ones(4)}, stopped, overwrite=True)
    report = verify(saved)
    assert report.ok
    assert len(report.leftovers) == 1
    assert report.leftovers[0] in repr(report)


@pytest.mark.parametrize("damage", [None, "missing", "header", "short"])
def test_progress_starts_at_nothing_never_goes_back_and_ends_at_all(saved, damage):
    total = sum(file.stat().st_size for file in saved.iterdir())
    file = data_files(saved)[0]
    if damage == "missing":
        file.unlink()
    elif damage == "header":
        flip(file, 8)
    elif damage == "short":
        os.truncate(file, file.stat().st_size - 1)
    calls = []
    verify(saved, progress=lambda done, of: calls.append((done, of)))
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    assert {of for _, of in calls} == {total}


def test_progress_is_told_by_one_thread_at_a_time(tmp_path):
    shardplan.save({"w": torch.zeros(1 << 20)}, tmp_path, planner=split_chunks(1 << 16))
    inside = threading.Lock()

    def tell(done, total):
        assert inside.acquire(blocking=False)
        time.sleep(0.002)  # long enough for another thread to come along
        inside.release()

    with Pool(max_workers=8) as pool:
        verify(tmp_path, progress=tell, pool=pool)
    progress = Progress(100, tell)
    with Pool(max_workers=8) as pool:
        pool.map(progress.add, [1] * 50)


def test_what_progress_raises_stops_the_check(saved):
    def tell(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(saved, progress=tell)


def test_memory_stays_small_however_large_a_chunk_is(tmp_path):
    shardplan.save({"w": torch.zeros(24 << 20)}, tmp_path)
    with Pool(max_workers=2) as pool:
        tracemalloc.start()
        assert verify(tmp_path, pool=pool).ok
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20


def test_reading_a_header_costs_the_same_whoever_reads_it(tmp_path):
    long = "x" * 1000
    shardplan.save({f"{long}{i}": torch.zeros(1) for i in range(300)}, tmp_path)
    header = int(decode_manifest((tmp_path / MANIFEST).read_bytes()).files.headers[0])
    peaks = []
    for read in (verify, lambda path, pool: open_checkpoint(path, pool=pool)[f"{long}0"].read()):
        with Pool(max_workers=1, max_bytes=1) as pool:
            read(tmp_path, pool=pool)
            peaks.append(pool.peak_bytes)
    assert min(peaks) >= 8 * header


def test_a_manifest_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(FormatError, match="no checkpoint"):
        verify(tmp_path)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_checkpoint_that_is_overwritten_meanwhile_is_checked_anew(tmp_path, format):
    save = partial(shardplan.save, small_state(), tmp_path, format=format)
    save()
    calls = []

    def tell(done, total):
        calls.append((done, total))
        if len(calls) == 2:
            save(overwrite=True)

    report = verify(tmp_path, progress=tell)
    assert report.ok, report
    assert sum(done == 0 for done, _ in calls) == 2


def test_what_was_removed_meanwhile_is_not_sound(saved):
    def tell(done, total):
        if done:
            shutil.rmtree(saved, ignore_errors=True)

    assert {fault.kind for fault in verify(saved, progress=tell).faults} == {"missing"}


def test_an_object_store_is_checked_like_a_disk(s3):
    store = open_store(f"s3://{s3.bucket}/verify", **s3.options)
    shardplan.save(small_state(), store, planner=split_chunks(48))
    assert verify(store).ok
    name = next(n for n in store.list() if n.endswith(".safetensors"))
    data = bytearray(store.size(name))
    store.read(name, [(0, memoryview(data))])
    slot = parse_header(bytes(data), name, len(data)).slots["b"]
    data[slot.begin] ^= 1
    store.write(name, [data])
    store.delete([n for n in store.list() if n not in (name, MANIFEST)])
    report = verify(store)
    assert [f.kind for f in report.faults] == ["checksum", "missing"]
    assert told(report)[0] == ("checksum", "b", name, *span(slot))
