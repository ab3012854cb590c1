"""Hostile and broken files: what is refused, under a limit of memory where that is the danger."""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import shardplan
from shardplan.io.errors import FormatError
from shardplan.io.formats.base import LIMITS
from shardplan.io.formats.native.manifest import MANIFEST, sign
from shardplan.io.formats.torch_save.archive import zip_bytes
from shardplan.io.formats.torch_save.names import load_nested, load_summed
from shardplan.io.formats.torch_save.unpickler import PickleError
from shardplan.torch_dcp.planners import UnsafeValueError, load_buffer

HOLD = Path(__file__).parents[1] / "hold"
READERS = (shardplan.open_checkpoint, shardplan.restore)


def run(script, *args):
    """Run a script that limits its own memory."""
    command = [sys.executable, str(HOLD / script), *map(str, args)]
    # The scripts import each other, also where PYTHONSAFEPATH keeps their folder off the path.
    env = os.environ | {"PYTHONPATH": str(HOLD)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    "kinds",
    [
        ("pickle", "zip", "codec", "placements"),
        ("metadata", "items", "manifest", "header", "index", "slices", "options"),
    ],
)
def test_damaged_files_raise_documented_errors_alone_and_take_little_memory(kinds):
    assert "only documented errors" in run("fuzzing.py", 20, *kinds)


def text(word):
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def number(value):
    return b"\x8a\x08" + value.to_bytes(8, "little")


def named(module, name):
    return f"c{module}\n{name}\n".encode()


def entry(key, value):
    return text(key) + value + b"s"


HUGE = 1 << 30
BYTEARRAY = named("builtins", "bytearray")
NUMPY = "numpy._core.multiarray"
LONG_LIST = b"]q\x01(" + b"".join(b"J" + struct.pack("<i", i) for i in range(200_000)) + b"e"
ARRAY = named(NUMPY, "_reconstruct") + named("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
DTYPE = named("numpy", "dtype") + text("u4") + b"\x89\x88\x87R"
FLOATS = named("torch", "FloatStorage")
BOMBS = {
    "a bytearray of a number": entry("a", BYTEARRAY + number(HUGE) + b"\x85R"),
    "arguments that are a list": entry("z", b"]q\x00" + number(HUGE) + b"a")
    + entry("a", BYTEARRAY + b"h\x00R"),
    "a function as a tensor's": entry(
        "a",
        named("torch._tensor", "_rebuild_from_type_v2")
        + b"(" + BYTEARRAY + BYTEARRAY + number(HUGE) + b"\x85}tR",
    ),
    "a thousand sets of one list": entry("l", LONG_LIST)
    + entry("a", b"](" + (named("builtins", "set") + b"h\x01\x85R") * 1000 + b"e"),
    "a thousand dicts of one dict": entry("l", b"}q\x01(" + b"".join(
        b"J" + struct.pack("<i", i) + b"N" for i in range(100_000)) + b"u")
    + entry("a", b"](" + (named("collections", "Counter") + b"h\x01\x85R") * 1000 + b"e"),
    "a numpy array of a shape alone": entry(
        "a", ARRAY + b"(K\x01" + number(HUGE) + b"\x85" + DTYPE + b"\x89C\x00tb"
    ),
    "a numpy scalar of a width alone": entry(
        "a",
        named(NUMPY, "scalar") + named("numpy", "dtype") + text("S999999999")
        + b"\x89\x88\x87RC\x00\x86R",
    ),
    "a tensor of a storage that is not there": entry(
        "a",
        named("torch._utils", "_rebuild_tensor_v2") + b"((" + text("storage") + FLOATS + text("0")
        + text("cpu") + number(HUGE) + b"tQK\x00" + number(HUGE) + b"\x85K\x01\x85\x89)tR",
    ),
    "a number of a billion digits": entry("a", b"\x8b\xff\xff\xff\x7f"),
    "text of a billion letters": entry("a", b"X\xff\xff\xff\x7fabc"),
    "bytes of petabytes": entry("a", b"\x8e" + struct.pack("<Q", 1 << 50)),
    "lists of lists of lists": entry(
        "a", b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(40))
    ),
    "dicts of dicts of dicts": entry(
        "a", b"}q\x00" + b"".join(b"}(K\x01h%cK\x02h%cuq%c" % (n, n, n + 1) for n in range(40))
    ),
    "a list that is filled after it was taken up": entry("z", b"]q\x00")
    + b"".join(entry(f"k{n}", b"](" + b"h\x00" * 3000 + b"e") for n in range(40))
    + entry("y", b"h\x00(" + b"}" * 3000 + b"e"),
    "keys that are long to compare": entry(
        "a",
        b"}q\x00" + text("a" * 500_000) + b"q\x01Ns" + text("a" * 500_000) + b"q\x020"
        + b"h\x02Ns" * 200_000,
    ),
    "numbers that are long to hash": entry(
        "a",
        b"\x8b" + struct.pack("<I", 500_000) + b"\x7f" * 500_000 + b"q\x010}"
        + b"h\x01Ns" * 200_000,
    ),
    "nested too deeply": entry("a", b")" + b"\x85" * 100_000),
    "nested too deeply in lists": entry("a", b"]" * 50_000 + b"a" * 49_999),
}  # fmt: skip


def test_pickles_that_ask_for_more_than_their_length_justifies_are_refused(tmp_path):
    for number, bomb in enumerate(BOMBS.values()):
        (tmp_path / f"{number}.pt").write_bytes(zip_bytes(b"\x80\x02}" + bomb + b"."))
    assert "all refused cheaply" in run("refused.py", *sorted(tmp_path.iterdir()))


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_value_that_asks_for_more_than_its_length_justifies_is_refused(bomb):
    data = zip_bytes(b"\x80\x02}" + BOMBS[bomb] + b".")
    with pytest.raises(FormatError, match=r"`v` cannot be loaded"):
        load_summed(data, "file", "v")[0]
    with pytest.raises(UnsafeValueError, match="cannot be loaded"):
        load_buffer(io.BytesIO(data))


def test_a_bomb_among_the_values_of_our_own_checkpoint_is_refused(tmp_path):
    shardplan.save({"v": torch.Size([2]), "w": torch.ones(2)}, tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    data = file.read_bytes()
    at = data.index(b"PK\3\4")
    bomb = zip_bytes(b"\x80\x02}" + BOMBS["arguments that are a list"] + b".")
    size = data.rindex(b"PK\5\6") + 22 - at
    assert len(bomb) <= size
    gap = size - len(bomb)  # in the pickle, after its end
    bomb = zip_bytes(b"\x80\x02}" + BOMBS["arguments that are a list"] + b"." + bytes(gap))[:size]
    file.write_bytes(data[:at] + bomb.ljust(size, b"\0") + data[at + size :])
    with pytest.raises(FormatError):
        shardplan.restore(tmp_path / "a")
    with pytest.raises(FormatError):
        shardplan.load({"v": None, "w": torch.zeros(2)}, tmp_path / "a", verify=False)


def test_state_is_given_to_stand_ins_alone():
    for target in (b"N", b"]", b"}", named("builtins", "set"), b"K\x01", text("a")):
        with pytest.raises(PickleError, match="gives state to"):
            load_nested(b"\x80\x02" + target + b"}b.")


def test_only_what_the_user_allowed_is_called(tmp_path):
    calls = []

    class Spy:
        def __setstate__(self, state):
            calls.append(state)

    Spy.__module__, Spy.__qualname__ = "spies", "Spy"
    data = b"\x80\x02}" + entry("a", named("spies", "Spy") + b")\x81}b") + b"."
    (tmp_path / "m.pt").write_bytes(zip_bytes(data))
    for reader in (*READERS, shardplan.verify):
        if reader is shardplan.verify:
            reader(tmp_path / "m.pt")
            continue
        with pytest.raises(FormatError, match=r"spies\.Spy.*add_safe_globals"):
            reader(tmp_path / "m.pt")
    assert not calls
    with torch.serialization.safe_globals([Spy]):
        found = shardplan.open_checkpoint(tmp_path / "m.pt")
        assert not calls  # nothing is made before it is asked for
        assert isinstance(found["a"], Spy)
    assert calls == [{}]


# Files that are read whole


def enlarged(file, what):
    """Make a file larger than its limit; it takes no space on the disk."""
    file.touch()
    with open(file, "r+b") as found:
        found.truncate(LIMITS[what] + 1)


@pytest.mark.parametrize(
    ("format", "name", "what"),
    [
        ("dcp", ".metadata", "metadata"),
        ("safetensors", MANIFEST, "manifest"),
        ("hf", "model.safetensors.index.json", "index"),
    ],
)
def test_a_file_that_is_read_whole_is_measured_first(tmp_path, format, name, what):
    shardplan.save({"w": torch.ones(3)}, tmp_path / "good")
    shardplan.save({"w": torch.ones(3)}, tmp_path / "bad", format=format)
    if format == "hf":
        (file,) = (tmp_path / "bad").glob("*.safetensors")
        file.rename(tmp_path / "bad" / "model-00001-of-00001.safetensors")
    enlarged(tmp_path / "bad" / name, what)
    for reader in READERS:
        with pytest.raises(
            FormatError, match=rf"{name}.* {LIMITS[what] + 1:,} bytes.*{LIMITS[what]:,}"
        ):
            reader(tmp_path / "bad")
    assert not shardplan.verify(tmp_path / "bad").ok
    assert shardplan.latest(tmp_path) == str(tmp_path / "good")
    shardplan.prune(tmp_path, keep_last=1)
    assert (tmp_path / "bad" / name).exists()


def test_a_large_config_says_nothing(tmp_path):
    shardplan.save({"w": torch.ones(3)}, tmp_path / "a", format="hf")
    enlarged(tmp_path / "a" / "config.json", "config")
    assert shardplan.restore(tmp_path / "a")["w"].tolist() == [1, 1, 1]


# Archives


def archive(*, entries=(), count=None, begin=None, pad=64):
    """Write a zip by hand: (name, header, size) of each entry."""
    directory = b"".join(
        struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, 0, 0, 0, 0, 0, n, n, len(name), 0, 0, 0, 0, 0, at
        )
        + name
        for name, at, n in entries
    )
    begin = pad if begin is None else begin
    count = len(entries) if count is None else count
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, count, len(directory), begin, 0)
    return b"PK\3\4" + bytes(pad - 4) + directory + end


PICKLE = (b"archive/data.pkl", 0, 2)
ZIPS = {
    "no entries": archive(),
    "a folder alone": archive(entries=[(b"archive/", 0, 0)]),
    "no pickle": archive(entries=[(b"archive/version", 0, 2)]),
    "an entry past the end": archive(entries=[(b"archive/data.pkl", 1 << 20, 2)]),
    "an entry that reaches past the end": archive(entries=[(b"archive/data.pkl", 0, 1 << 30)]),
    "entries that overlap": archive(
        entries=[PICKLE, (b"archive/data/0", 1, 40), (b"archive/data/1", 2, 40)], pad=400
    ),
    "a name twice": archive(entries=[PICKLE, (b"archive/data.pkl", 60, 2)], pad=400),
    "more entries than there are": archive(entries=[PICKLE], count=3),
    "entries without number": archive(entries=[PICKLE], count=0xFFFF),
    "a directory past the end": archive(entries=[PICKLE], begin=1 << 30),
    "sizes told nowhere": archive(entries=[(b"archive/data.pkl", 0, 0xFFFFFFFF)]),
    "an end told elsewhere": archive(entries=[PICKLE])[:-22]
    + struct.pack("<4sIQI", b"PK\6\7", 0, 1 << 60, 1)
    + archive(entries=[PICKLE])[-22:],
    "an end of another kind": archive(entries=[PICKLE])[:-22]
    + struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)
    + archive(entries=[PICKLE])[-22:],
    "no name": archive(entries=[(b"", 0, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ZIPS)
def test_an_impossible_archive_is_refused(tmp_path, kind):
    (tmp_path / "m.pt").write_bytes(ZIPS[kind])
    for reader in READERS:
        with pytest.raises(FormatError, match=r"m\.pt: .* at byte 0 .*damaged"):
            reader(tmp_path / "m.pt")
    assert not shardplan.verify(tmp_path / "m.pt").ok


def test_folders_in_an_archive_are_passed_over(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        new.mkdir("archive")
        for name in old.namelist():
            new.writestr("archive/" + name.partition("/")[2], old.read(name))
    assert shardplan.restore(tmp_path / "b.pt")["w"].tolist() == [1, 1]


def test_a_pickle_that_does_not_fit_its_checksum_is_refused(tmp_path):
    torch.save({"lr": 0.125, "w": torch.ones(2)}, tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(data.replace(struct.pack(">d", 0.125), struct.pack(">d", 0.5)))
    with pytest.raises(FormatError, match=r"data\.pkl does not fit its checksum"):
        shardplan.restore(tmp_path / "m.pt")


# Manifests

TIMES = [10**400, -(10**400), 1e300, -1, "now", True, [1]]


@pytest.mark.parametrize("created", TIMES, ids=[str(n)[:8] for n in TIMES])
def test_a_manifest_of_an_impossible_time_is_refused(tmp_path, created):
    shardplan.save({"w": torch.ones(2)}, tmp_path / "a")
    shardplan.save({"w": torch.ones(2)}, tmp_path / "b")
    file = tmp_path / "b" / MANIFEST
    body = json.loads(file.read_bytes())
    version = [body.pop(key) for key in ("format", "version", "xxh3_64")][1]
    file.write_bytes(sign(json.dumps(body | {"created": created}).encode()[1:], version))
    with pytest.raises(FormatError, match="time of creation"):
        shardplan.restore(tmp_path / "b")
    assert shardplan.latest(tmp_path) == str(tmp_path / "a")
