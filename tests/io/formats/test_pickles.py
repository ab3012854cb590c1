"""Pickles that are short and would take ages to read: all are refused at once."""

import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import shardplan
from shardplan.io.errors import FormatError
from shardplan.io.formats.dcp.metadata import parse_metadata
from shardplan.io.formats.torch_save.archive import zip_bytes
from shardplan.io.formats.torch_save.names import NAMES, load_nested, load_summed
from shardplan.io.formats.torch_save.standins import build_value
from shardplan.io.formats.torch_save.unpickler import PickleError
from shardplan.torch_dcp.planners import UnsafeValueError, load_buffer

LEVELS = 60


def load_value_pickle(data):
    return load_nested(data).value


TOP = b"h%c" % LEVELS


def tower():
    """Open a pickle with a tuple that holds another twice, which holds another twice; object 60."""
    return b"\x80\x04)\x94" + b"".join(b"0h%ch%c\x86\x94" % (n, n) for n in range(LEVELS)) + b"0"


def old_tower(first=b"N"):
    """Return a dict of one, as older protocols write it; the last value is a key, too."""
    steps = (b"K%c(j%bh%ctr%b" % (n, _long(n), n, _long(n + 1)) for n in range(LEVELS))
    return b"\x80\x02}(K\xfe" + first + b"K\xff)q\x00" + b"".join(steps) + TOP + b"Nu."


def _long(number):
    return number.to_bytes(4, "little")


def twin_sets():
    """Open a pickle with two equal frozensets, objects 118 and 119: their hashes are known, but
    comparing them takes ages.
    """
    first = b"(K\x02\x91\x94(K\x02\x91\x94"
    pair = b"(h%cK\x00\x86h%cK\x01\x86\x91\x94"
    steps = (pair % (n, n) for n in range(2 * LEVELS - 2))
    return b"\x80\x04" + first + b"".join(steps) + b"0" * (2 * LEVELS)


KEYS = {
    "dict": tower() + b"}" + TOP + b"Ns.",
    "dict, several": tower() + b"}(" + TOP + b"Nu.",
    "set": tower() + b"\x8f(" + TOP + b"\x90.",
    "frozenset": tower() + b"(" + TOP + b"\x91.",
    "a set by its name": tower() + b"cbuiltins\nset\n]" + TOP + b"a\x85R.",
    "older protocols": old_tower(),
    "numbered anew": tower() + TOP + b"\x940}h%cNs." % (LEVELS + 1),
    "numbered in both ways": tower() + b"Nq\xff0}" + TOP + b"Ns.",
    "numbered later": tower() + TOP + b"N0\x940}h%cNs." % (LEVELS + 1),
    "equal sets": twin_sets() + b"}(h\x76Nh\x77Nu.",
    "one tuple, often": b"\x80\x04(" + b"N" * 9_000 + b"t\x940" + b"}h\x00Ns0" * 9_000 + b"N.",
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_that_take_ages_to_hash_or_compare_are_refused(kind):
    for read in (load_value_pickle, parse_metadata):
        with pytest.raises(ValueError, match="copies or hashes more than its own length justifies"):
            read(KEYS[kind])


@pytest.mark.parametrize("first", [b"N", b"ccollections\nCounter\n)R"])  # which only torch knows
def test_torch_is_not_asked_to_hash_what_takes_ages(tmp_path, first):
    data = zip_bytes(old_tower(first))
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.pt: .*copies or hashes more"):
        shardplan.restore(tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"`v` .*copies or hashes more"):
        load_summed(data, "file", "v")
    with pytest.raises(UnsafeValueError, match="copies or hashes more"):
        load_buffer(io.BytesIO(data))


def shared_lists():
    """Return a pickle of lists each of which holds another twice; they are filled from above."""
    opened = b"]\x94" * LEVELS + b"0" * LEVELS
    filled = b"".join(b"h%c(h%ch%ce0" % (n, n + 1, n + 1) for n in range(LEVELS - 1))
    return b"\x80\x04" + opened + filled + b"}\x8c\x01ah\x00s."


@pytest.mark.parametrize("data", [shared_lists(), b"\x80\x04]\x94h\x00a0}\x8c\x01ah\x00s."])
def test_lists_without_end_are_refused(tmp_path, data):
    with pytest.raises(PickleError, match="holds itself, or its parts more often"):
        load_value_pickle(data)
    (tmp_path / "a.pt").write_bytes(zip_bytes(data))
    with pytest.raises(FormatError, match=r"a\.pt: .*holds itself"):
        shardplan.restore(tmp_path / "a.pt")


def test_lists_that_are_nested_too_deeply_are_refused(tmp_path):
    (tmp_path / "a.pt").write_bytes(
        zip_bytes(b"\x80\x02}K\x01" + b"]" * 5000 + b"a" * 4999 + b"s.")
    )
    with pytest.raises(FormatError, match=r"a\.pt: .*nested too deeply"):
        shardplan.restore(tmp_path / "a.pt")


def test_lists_without_end_are_refused_where_torch_reads_them(tmp_path):
    lists = b"".join(b"K%c](h%ch%ceq%c" % (n, n, n, n + 1) for n in range(LEVELS))
    data = b"\x80\x02}(K\xfeccollections\nCounter\n)RK\xff]q\x00" + lists + b"u."
    (tmp_path / "a.pt").write_bytes(zip_bytes(data))
    with pytest.raises(FormatError, match=r"a\.pt: .*holds itself"):
        shardplan.restore(tmp_path / "a.pt")


def test_tuples_that_many_keys_share_are_read():
    betas = (0.9, 0.99)
    deep = (((betas, betas), betas), betas)
    groups = [{"betas": betas, deep: n} for n in range(1000)]
    value = {"groups": groups, (betas, 1): {deep}, "empty": ()}
    for protocol in (2, 3, 4, 5):
        assert load_value_pickle(pickle.dumps(value, protocol)) == value


class Long:
    """Becomes a bytearray of three billion zeros."""

    def __reduce__(self):
        return bytearray, (3 << 30,)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("first", [None, torch.device("cpu")])  # which we leave to torch
def test_torch_is_not_asked_for_a_bytearray_of_a_mere_number(tmp_path, protocol, first):
    data = pickle.dumps({"device": first, "long": Long()}, protocol)
    archive = zip_bytes(data)
    (tmp_path / "bomb.pt").write_bytes(archive)
    with pytest.raises(FormatError, match="bytearray of something else"):
        shardplan.restore(tmp_path / "bomb.pt")
    with pytest.raises(FormatError, match="bytearray of something else"):
        load_summed(archive, "a file", "a value")[0]


def test_bytearrays_and_lists_that_are_there_often_are_read(tmp_path):
    numbers = list(range(1_000_000))
    sd = {"bytes": bytearray(b"ab"), "count": 7, **{f"k{i}": numbers for i in range(20)}}
    torch.save(sd, tmp_path / "honest.pt")
    assert shardplan.restore(tmp_path / "honest.pt") == sd


EVERY_NAME = r"""
import resource, signal, struct
from shardplan.io.formats.torch_save import names
from shardplan.io.formats.dcp import metadata as dcp_metadata
from shardplan.io.errors import FormatError
from shardplan.io.formats.torch_save.unpickler import PickleError
from shardplan.io.formats.torch_save.standins import build_value, needs_torch

def load_value(data):
    found = names.load_nested(data).value
    return None if needs_torch(found) else build_value(found, lambda key: memoryview(b""))

def load_sealed(data):
    found = names.load_nested(data, sealed=True).value
    return None if needs_torch(found) else build_value(found, lambda key: memoryview(b""))

def sized(op, data):
    return op + struct.pack("<I", len(data)) + data

dtype = b"cnumpy\ndtype\n" + sized(b"X", b"S1000000") + b"\x85R"
small = b"cnumpy\ndtype\n" + sized(b"X", b"u1") + b"\x85R"
LONG = {
    "text": sized(b"X", b"x" * 1_000_000),
    "bytes": sized(b"B", b"x" * 1_000_000),
    "bytearray": b"\x96" + struct.pack("<Q", 1_000_000) + b"x" * 1_000_000,
    "tuple": b"(" + b"N" * 20_000 + b"t",
    "tuple of numbers": b"(" + b"K\x01" * 20_000 + b"t",
    "tuple in a tuple": b"(" + b"K\x01" * 20_000 + b"t\x85",
    "list": b"](" + b"K\x01" * 20_000 + b"e",
    "colliding numbers": b"](" + b"".join(
        b"\x8a\x0b" + (n * (2**61 - 1)).to_bytes(11, "little") for n in range(1, 5_000)) + b"e",
    "state": b"(K\x01J" + struct.pack("<i", 1_000_000) + b"\x85" + small + b"\x89"
        + sized(b"B", b"x" * 1_000_000) + b"t",
}
CALLS = {
    "one": b"h\x01h\x00\x85R",
    "two": b"h\x01h\x02h\x00\x86R",
    "all": b"h\x01h\x00R",
    "new": b"h\x01h\x00\x85\x81",
    "state": b"h\x01)Rh\x00b",
    "name": b"h\x03h\x00\x93",
}
TABLES = {
    load_value: names.NAMES,
    load_sealed: {**names._SIMPLIFIED, "another.Class": None},
    dcp_metadata.parse_metadata: {**dcp_metadata._CLASSES, **names.PLAIN},
}

resource.setrlimit(resource.RLIMIT_CPU, (300, 300))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
signal.signal(signal.SIGVTALRM, lambda *_: print("SLOW", what, flush=True) or exit())
for read, table in TABLES.items():
    for name in table:
        module, _, last = name.rpartition(".")
        top = b"c" + module.encode() + b"\n" + last.encode() + b"\n"
        for long, data in LONG.items():
            head = b"\x80\x04" + data + b"\x940" + top + b"\x940" + dtype + b"\x940"
            head += sized(b"X", b"torch") + b"\x940"
            for how, call in CALLS.items():
                what = (read.__name__, name, long, how)
                signal.setitimer(signal.ITIMER_VIRTUAL, 5)
                try:
                    read(head + b"](" + call * 1000 + b"e.")
                except (PickleError, FormatError) as error:
                    if isinstance(error.__cause__, MemoryError) or "MemoryError" in str(error):
                        print("MEMORY", what)
                except BaseException as error:
                    print(type(error).__name__, what)
print("done", len(TABLES[load_value]))
"""


def test_no_allowed_name_multiplies_memory_or_time():
    """Call each with a long argument from the memo, 1,000 times, with 100 MiB to spare."""
    run = subprocess.run(
        [sys.executable, "-c", EVERY_NAME], capture_output=True, text=True, timeout=600
    )
    assert run.stdout.splitlines() == [f"done {len(NAMES)}"], run.stdout + run.stderr


def colliding(count):
    """Return the pickled keys of a dict that all have the hash of 0."""
    keys = (n * (2**61 - 1) for n in range(1, count))
    return [b"\x8a\x0b" + key.to_bytes(11, "little") for key in keys]


ALIKE = {
    "dict": b"}(" + b"N".join(colliding(1000)) + b"Nu.",
    "dict, one by one": b"}" + b"".join(key + b"Ns" for key in colliding(1000)) + b".",
    "tuples": b"}(" + b"\x85N".join(colliding(1000)) + b"\x85Nu.",
    "set": b"\x8f(" + b"".join(colliding(1000)) + b"\x90.",
    "frozenset": b"(" + b"".join(colliding(1000)) + b"\x91.",
    "a set by its name": b"cbuiltins\nset\n](" + b"".join(colliding(1000)) + b"e\x85R.",
    "pairs": b"ccollections\nOrderedDict\n](" + b"N\x86".join(colliding(99)) + b"N\x86e\x85R.",
}


@pytest.mark.parametrize("kind", ALIKE)
def test_keys_of_the_same_hash_are_refused(kind):
    with pytest.raises(PickleError, match="many keys of the same hash"):
        load_value_pickle(b"\x80\x04" + ALIKE[kind])


def test_numbers_of_all_sizes_are_keys():
    value = {2.0**n: n for n in range(-1000, 1000)} | {(n, -n): {n, -n} for n in range(500)}
    assert load_value_pickle(pickle.dumps(value, 2)) == value


SHARED = {
    "bytearray": b"\x96" + (1 << 20).to_bytes(8, "little") + b"x" * (1 << 20),
    "BytesIO": b"c_io\nBytesIO\n)R(B\0\0\x10\0" + b"x" * (1 << 20) + b"K\0Ntb",
}


@pytest.mark.parametrize("kind", SHARED)
def test_what_is_copied_for_every_name_of_it_is_refused_if_there_are_many(kind):
    entries = b"".join(b"K%ch\x00" % n for n in range(100))
    with pytest.raises(PickleError, match="more often than its length justifies"):
        load_value_pickle(b"\x80\x04" + SHARED[kind] + b"\x940}(" + entries + b"u.")


def test_a_tuple_that_holds_another_often_is_weighed_once():
    inner = b"(" + b"N" * 50_000 + b"t\x940"
    outer = b"(" + b"h\x00" * 50_000 + b"t\x940"
    with pytest.raises(PickleError, match="more often than its length justifies"):
        load_value_pickle(b"\x80\x04" + inner + outer + b"h\x010" * 9_000 + b"N.")


def test_arrays_that_older_protocols_write_as_text_are_read():
    value = {"a": np.arange(1 << 20, dtype=np.uint8), "b": np.full(1 << 20, 255, np.uint8)}
    found = build_value(load_value_pickle(pickle.dumps(value, 2)), lambda key: memoryview(b""))
    assert all((found[name] == value[name]).all() for name in value)
