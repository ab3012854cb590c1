"""Damaged and hostile files, read under a limit of memory: only documented errors may come out.

Run as ``fuzz.py EXAMPLES KIND ...``, where the kinds are those of `KINDS`.
"""

import contextlib
import copy
import io
import json
import pickle
import resource
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardplan
from shardplan.io.errors import FormatError, LoadError
from shardplan.io.formats.native.manifest import MANIFEST, sign
from shardplan.io.formats.torch_save.archive import zip_bytes
from shardplan.io.stores.base import StoreError
from shardplan.planning import PlanError
from shardplan.planning.errors import RefusedError

DOCUMENTED = (FormatError, LoadError, PlanError, RefusedError, StoreError)
ROOM = 1 << 30  # bytes that reading a small file may take
SECONDS = 20
TENSORS = (torch.arange(6).reshape(2, 3).t(), torch.nn.Parameter(torch.ones(2)))
VALUE = {
    "plain": [1, -2.5, 10**30, "é" * 300, b"raw", None, True, (1, (2, 3)), {"a": {1, 2}}],
    "more": [bytearray(b"z"), frozenset((1, b"x")), complex(1, 2), Counter("aab"), OrderedDict()],
    "numpy": [np.arange(6.0).reshape(2, 3), np.float32(2.5), np.random.RandomState(7).get_state()],
    "stream": io.BytesIO(b"abc"),
    "torch": [torch.Size([2, 3]), torch.float32, torch.device("cpu")],
    "tensors": TENSORS,
}
POWERS = [31, 32, 40, 59, 60, 62, 63, 64]
ODD = [0, 1, -1, 255, *(1 << power for power in POWERS), (1 << 63) - 1, 10**400]
OPERATIONS = b"]})(teusaR\x81b01.\x8f\x90\x91\x93\x94QN2"
NAMES = [
    *("builtins\nbytearray", "builtins\nset", "torch\nSize", "_io\nBytesIO", "posix\nsystem"),
    *("numpy._core.multiarray\n_reconstruct", "torch._utils\n_rebuild_tensor_v2"),
    *("torch._tensor\n_rebuild_from_type_v2", "collections\nOrderedDict", "numpy\ndtype"),
]
SNIPPETS = [
    *(bytes([code]) for code in OPERATIONS),
    *(f"c{name}\n".encode() for name in NAMES),
    *(b"h\x00", b"h\x01", b"q\x00", b"J\xff\xff\xff\x7f", b"r\xff\xff\xff\xff"),
    *(code + struct.pack("<Q", 1 << 50) for code in (b"\x8a\x08", b"\x8d", b"\x8e", b"\x96")),
    *(code + struct.pack("<I", 1 << 31) for code in (b"\x8b", b"X", b"B", b"T")),
    b"I" + b"9" * 5000 + b"\n",
]


@st.composite
def mutated(draw, data, snippets=()):
    """Return some bytes with a few of them changed, left out, repeated or put in."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), at + draw(st.integers(1, 40)))
        kind = draw(st.integers(0, 5))
        if kind == 0:
            data[at:end] = draw(st.binary(max_size=8))
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = bytes(data[at:end]) * draw(st.sampled_from([1, 2, 50, 2000]))
        elif kind == 3:
            width = draw(st.sampled_from([1, 2, 4, 8]))
            number = draw(st.sampled_from(ODD)) % (1 << 8 * width)
            data[at : at + width] = number.to_bytes(width, "little")
        elif snippets:
            many = draw(st.sampled_from([1, 1, 1, 3, 500]))
            data[at : at + (kind - 4)] = draw(st.sampled_from(snippets)) * many
        else:
            data[at:end] = bytes(end - at)
    return bytes(data)


def places(tree, way=()):
    """Return the way to every part of JSON data."""
    yield way
    if isinstance(tree, (dict, list)):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*way, key))


ODD_JSON = [
    *ODD,
    -(10**400),
    1e300,
    0.5,
    None,
    True,
    "",
    "x",
    "9" * 5000,
    [],
    {},
    [0],
    [[]],
    {"$x": 1},
]
ODD_JSON += [[1 << 59, 1 << 59], [1] * 70, [[0, 1]] * 70, {"$tuple": [[]]}, {"$numpy": ["U9", ""]}]


@st.composite
def edited(draw, tree):
    """Return JSON data with a few of its parts replaced."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        ways = [way for way in places(tree) if way]
        if not ways:
            break
        way = draw(st.sampled_from(ways))
        owner = tree
        for key in way[:-1]:
            owner = owner[key]
        if draw(st.integers(0, 6)):
            owner[way[-1]] = copy.deepcopy(draw(st.sampled_from(ODD_JSON)))
        else:
            del owner[way[-1]]
    return tree


def use(path):
    """Do with a checkpoint all that a user may do; documented errors are fine."""
    target = {"w": torch.zeros(6, 4), "a": {"b": torch.zeros(3)}, "step": 0}
    for action in (
        lambda: shardplan.restore(path),
        lambda: shardplan.verify(path),
        lambda: repr(shardplan.open_checkpoint(path)),
        lambda: shardplan.load(target, path, strict=False),
        lambda: shardplan.latest(path.parent),
    ):
        begun = time.monotonic()
        with contextlib.suppress(*DOCUMENTED):
            action()
        assert time.monotonic() - begun < SECONDS, "it took too long"


def torch_file():
    buffer = io.BytesIO()
    torch.save({**VALUE, "w": torch.ones(6, 4)}, buffer)
    return buffer.getvalue()


def writing(file, pack=lambda data: data, path=None):
    """Return what writes a file, given its bytes, and returns the path of the checkpoint."""

    def write(data):
        file.write_bytes(pack(data))
        return path or file

    return write


def pickled(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def rezipped(data, pickle):
    """Return an archive with another pickle, and a right checksum for it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickle if name.endswith("data.pkl") else old.read(name))
    return out.getvalue()


def fuzz_pickle(folder):
    """Pickles of `torch.save` files."""
    data, file = torch_file(), Path(folder, "m.pt")
    for protocol in (2, 4):
        plain = pickle.dumps({**VALUE, "torch": 0, "tensors": 0}, protocol)
        yield mutated(plain, SNIPPETS), writing(file, zip_bytes)
    yield mutated(pickled(data), SNIPPETS), writing(file, lambda got: rezipped(data, got))


def fuzz_zip(folder):
    """`torch.save` files as a whole, of the newer and the older kind, and their ends."""
    data, file = torch_file(), Path(folder, "m.pt")
    old = io.BytesIO()
    torch.save(VALUE, old, _use_new_zipfile_serialization=False)
    yield mutated(data), writing(file)
    yield mutated(data[-1500:]), writing(file, lambda tail: data[:-1500] + tail)
    yield mutated(old.getvalue(), SNIPPETS), writing(file)


def dcp_folder(folder):
    path = Path(folder, "dcp")
    value = (torch.eye(2).to_sparse(), VALUE)
    sd = {"w": torch.ones(6, 4), "a": {"b": torch.ones(3)}, "v": {"x": value}, "step": 1}
    dcp.save(sd, checkpoint_id=path)
    return path


def fuzz_metadata(folder):
    """`.metadata` of torch.distributed.checkpoint."""
    path = dcp_folder(folder)
    file = path / ".metadata"
    for protocol in (2, 4):
        data = pickle.dumps(pickle.loads(file.read_bytes()), protocol)
        yield mutated(data, SNIPPETS), writing(file, path=path)


def fuzz_items(folder):
    """The files of torch.distributed.checkpoint."""
    path = dcp_folder(folder)
    (file,) = path.glob("*.distcp")
    yield mutated(file.read_bytes(), SNIPPETS), writing(file, path=path)


def fuzz_manifest(folder):
    """Our manifest, with a right checksum."""
    path = Path(folder, "ours")
    shardplan.save({"w": torch.ones(6, 4), "a": {"b": torch.ones(3)}, "v": VALUE, "step": 1}, path)
    file = path / MANIFEST
    tree = json.loads(file.read_bytes())
    head = [tree.pop(key) for key in ("format", "version", "xxh3_64")]

    def put(body):
        text = json.dumps(body).encode()
        file.write_bytes(sign(text[1:], head[1]))
        return path

    yield edited(tree), put


def fuzz_header(folder):
    """Safetensors files and their index, as Hugging Face has them."""
    path = Path(folder, "hf")
    shardplan.save({"w": torch.ones(6, 4), "a": {"b": torch.ones(3)}}, path, format="hf")
    (file,) = path.glob("*.safetensors")
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")

    def put(tree):
        text = json.dumps(tree).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[length:])
        return path

    yield edited(json.loads(data[8:length])), put
    yield mutated(data), writing(file, path=path)


def fuzz_index(folder):
    """An index of safetensors files."""
    path = Path(folder, "hf")
    shardplan.save({"w": torch.ones(6, 4), "b": torch.ones(3)}, path, format="hf")
    (file,) = path.glob("*.safetensors")
    file = file.rename(path / "model-00001-of-00001.safetensors")
    index = path / "model.safetensors.index.json"
    tree = {"metadata": {"total_size": 108}, "weight_map": dict.fromkeys("wb", file.name)}
    yield edited(tree), writing(index, lambda got: json.dumps(got).encode(), path)


KINDS = {
    name.removeprefix("fuzz_"): make for name, make in globals().items() if name.startswith("fuzz_")
}


def limit_memory():
    """Leave this process so much more memory than it has now, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def main(examples, kinds):
    warnings.simplefilter("ignore")
    options = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for kind in kinds:
            (Path(folder) / kind).mkdir()
            cases += KINDS[kind](f"{folder}/{kind}")
        limit_memory()
        for strategy, put in cases:
            check = given(strategy)(lambda got: use(put(got)))  # noqa: B023
            settings(max_examples=examples, **options)(check)()
    print("only documented errors")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
