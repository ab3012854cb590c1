"""Pickles that are short and would take ages to read: all are refused at once."""

import io
import pickle

import pytest
import torch

import shardplan
from shardplan.adapters.values import UnsafeValueError, load_value
from shardplan.io.dcp_metadata import parse_metadata
from shardplan.io.errors import FormatError
from shardplan.io.pickles import PickleError, pickle_end
from shardplan.io.torchnested import Storages, load_nested
from shardplan.io.torchpickles import load_plain
from shardplan.io.torchvalues import load_torch
from shardplan.io.torchzip_write import zip_bytes

LEVELS = 60
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
    for read in (load_plain, lambda data: load_nested(data, Storages()), parse_metadata):
        with pytest.raises(ValueError, match="more tuples in tuples than its own length justifies"):
            read(KEYS[kind])


def legacy(state):
    """Return a `torch.save` file of the older kind whose state dict is a given pickle."""
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=False)
    ends = [0]
    for _ in range(5):
        ends.append(pickle_end(file.getvalue(), ends[-1]))
    return file.getvalue()[: ends[3]] + state + file.getvalue()[ends[4] :]


@pytest.mark.parametrize("pack", [zip_bytes, legacy])
@pytest.mark.parametrize("first", [b"N", b"ccollections\nCounter\n)R"])  # which only torch knows
def test_torch_is_not_asked_to_hash_what_takes_ages(tmp_path, pack, first):
    data = pack(old_tower(first))
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.pt: .*more tuples in tuples"):
        shardplan.restore(tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"`v` .*more tuples in tuples"):
        load_torch(data, "file", "v")
    with pytest.raises(UnsafeValueError, match="more tuples in tuples"):
        load_value(io.BytesIO(data))


def shared_lists():
    """Return a pickle of lists each of which holds another twice; they are filled from above."""
    opened = b"]\x94" * LEVELS + b"0" * LEVELS
    filled = b"".join(b"h%c(h%ch%ce0" % (n, n + 1, n + 1) for n in range(LEVELS - 1))
    return b"\x80\x04" + opened + filled + b"}\x8c\x01ah\x00s."


@pytest.mark.parametrize("data", [shared_lists(), b"\x80\x04]\x94h\x00a0}\x8c\x01ah\x00s."])
def test_lists_without_end_are_refused(tmp_path, data):
    with pytest.raises(PickleError, match="holds itself, or its parts more often"):
        load_plain(data)
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
        assert load_plain(pickle.dumps(value, protocol)) == value


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
    with pytest.raises(FormatError, match="bytearray of a mere number"):
        shardplan.restore(tmp_path / "bomb.pt")
    with pytest.raises(FormatError, match="bytearray of a mere number"):
        load_torch(archive, "a file", "a value")


def test_bytearrays_and_lists_that_are_there_often_are_read(tmp_path):
    numbers = list(range(1_000_000))
    sd = {"bytes": bytearray(b"ab"), "count": 7, **{f"k{i}": numbers for i in range(20)}}
    torch.save(sd, tmp_path / "honest.pt")
    assert shardplan.restore(tmp_path / "honest.pt") == sd
