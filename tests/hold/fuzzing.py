"""Damaged and hostile input: only documented errors come out, in bounded memory, and nothing runs.

`KINDS` make cases: what Hypothesis mutates by structure, and what takes the bytes. With atheris
installed, each case is fuzzed for as long again guided by coverage. Input that found a fault goes
to ``corpus/KIND-CASE-...``, and is tried first ever after. Run as ``fuzzing.py EXAMPLES KIND ...``
to fuzz some kinds alone, with so many examples for each of their cases.

An audit hook ends the process with an error if anything is executed, or opened outside the folder.
"""

import contextlib
import copy
import hashlib
import importlib.util
import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter, OrderedDict, deque
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from common import DOCUMENTED, Row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardplan
from shardplan import planning
from shardplan.io.formats.native.manifest import MANIFEST, sign
from shardplan.io.formats.torch_save.archive import zip_bytes
from shardplan.planning import errors

CORPUS = Path(__file__).parent / "corpus"
ROOM = 512 << 20  # bytes that reading a small file may take
SECONDS = 20  # of processors
PLANNING = (*DOCUMENTED, errors.NotFoundError, ValueError, TypeError)  # of wrong arguments
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
FORBIDDEN += ("socket.connect", "ctypes.dlopen", "pty.spawn")
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


def edit_json(choose, tree):
    """Replace a part of JSON data, or leave it out; return the data, and in words what was done."""
    tree = copy.deepcopy(tree)
    ways = [way for way in places(tree) if way]
    if not ways:
        return tree, "nothing"
    way = choose(ways)
    owner = tree
    for key in way[:-1]:
        owner = owner[key]
    if choose(range(7)):
        owner[way[-1]] = copy.deepcopy(choose([*ODD_JSON, *near(owner[way[-1]])]))
        return tree, f"{way} becomes {str(owner[way[-1]])[:60]}"
    del owner[way[-1]]
    return tree, f"{way} left out"


def near(value):
    """Return numbers close to a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value + 1, value - 1, value * 2, value ^ 8]
    return []


@st.composite
def edited(draw, tree):
    """Return JSON data with a few of its parts replaced, as bytes."""
    for _ in range(draw(st.integers(1, 3))):
        tree, _what = edit_json(lambda options: draw(st.sampled_from(options)), tree)
    return json.dumps(tree).encode()


@attrs.frozen
class Case:
    """What is fuzzed: bytes by structure, bytes to begin with, and what takes them."""

    strategy: object
    seed: bytes
    take: object


def on_file(strategy, seed, write):
    """Return a case of a file, of which all that a user may do is done."""
    return Case(strategy, seed, lambda data: use(write(data)))


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
        begun = time.process_time()
        with contextlib.suppress(*DOCUMENTED):
            action()
        assert time.process_time() - begun < SECONDS, "it took too long"


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
        yield on_file(mutated(plain, SNIPPETS), plain, writing(file, zip_bytes))
    inner = pickled(data)
    pack = writing(file, lambda changed: rezipped(data, changed))
    yield on_file(mutated(inner, SNIPPETS), inner, pack)


def fuzz_zip(folder):
    """`torch.save` files as a whole, of the newer and the older kind, and their ends."""
    data, file = torch_file(), Path(folder, "m.pt")
    old = io.BytesIO()
    torch.save(VALUE, old, _use_new_zipfile_serialization=False)
    yield on_file(mutated(data), data, writing(file))
    end = writing(file, lambda tail: data[:-1500] + tail)
    yield on_file(mutated(data[-1500:]), data[-1500:], end)
    yield on_file(mutated(old.getvalue(), SNIPPETS), old.getvalue(), writing(file))


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
        yield on_file(mutated(data, SNIPPETS), data, writing(file, path=path))


def fuzz_items(folder):
    """The files of torch.distributed.checkpoint."""
    path = dcp_folder(folder)
    (file,) = path.glob("*.distcp")
    data = file.read_bytes()
    yield on_file(mutated(data, SNIPPETS), data, writing(file, path=path))


def fuzz_manifest(folder):
    """Our manifest, with a right checksum."""
    path = Path(folder, "ours")
    shardplan.save({"w": torch.ones(6, 4), "a": {"b": torch.ones(3)}, "v": VALUE, "step": 1}, path)
    file = path / MANIFEST
    tree = json.loads(file.read_bytes())
    version = [tree.pop(key) for key in ("format", "version", "xxh3_64")][1]
    pack = writing(file, lambda text: sign(text[1:], version), path)
    yield on_file(edited(tree), json.dumps(tree).encode(), pack)


def fuzz_header(folder):
    """Safetensors files and their headers, as Hugging Face has them."""
    path = Path(folder, "hf")
    shardplan.save({"w": torch.ones(6, 4), "a": {"b": torch.ones(3)}}, path, format="hf")
    (file,) = path.glob("*.safetensors")
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")

    def pack(text):
        return len(text).to_bytes(8, "little") + text + data[length:]

    header = data[8:length]
    yield on_file(edited(json.loads(header)), header, writing(file, pack, path))
    yield on_file(mutated(data), data, writing(file, path=path))


def fuzz_index(folder):
    """An index of safetensors files."""
    path = Path(folder, "hf")
    shardplan.save({"w": torch.ones(6, 4), "b": torch.ones(3)}, path, format="hf")
    (file,) = path.glob("*.safetensors")
    file = file.rename(path / "model-00001-of-00001.safetensors")
    index = path / "model.safetensors.index.json"
    tree = {"metadata": {"total_size": 108}, "weight_map": dict.fromkeys("wb", file.name)}
    yield on_file(edited(tree), json.dumps(tree).encode(), writing(index, path=path))


# Planning


def documented(call, known=PLANNING):
    """Return what takes bytes and makes a call with them; documented errors are fine."""

    def take(data):
        with contextlib.suppress(*known):
            call(data)

    return take


def fuzz_codec(folder):
    """Plans and metadata as bytes."""
    spec = planning.TensorSpec((6, 4))
    plans, metadata = planning.global_plan([planning.local_plan({"w": spec, "step": 7})])
    load = planning.load_plan(metadata, plans[0])
    for plan in (plans[0], load):
        data = planning.encode_plan(plan)
        take = documented(lambda got: repr(planning.decode_plan(got)), (errors.CodecError,))
        yield Case(mutated(data), data, take)
    data = planning.encode_metadata(metadata)
    take = documented(lambda got: repr(planning.decode_metadata(got)), (errors.CodecError,))
    yield Case(mutated(data), data, take)


NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 7, 64, -1, -2, 1 << 31, 1 << 62, 1 << 70])


def as_bytes(strategy):
    """Return JSON data as bytes."""
    return strategy.map(lambda made: json.dumps(made).encode())


def fuzz_placements(folder):
    """Meshes and placements of tensors: plans of all ranks that are refused or whole."""

    def call(data):
        sizes, shape, cuts = json.loads(data)
        mesh = planning.Mesh(dict(zip("abcdef", sizes, strict=False)))
        placed = [
            planning.Replicate() if dim is None else planning.StridedShard(dim, by)
            for dim, by in cuts
        ]
        spec = planning.TensorSpec(tuple(shape), placements=tuple(placed))
        plans = planning.world_plans({"w": spec}, mesh)
        planning.check(*planning.global_plan(plans))

    number = st.integers(-1, 9) | NUMBERS
    cut = st.tuples(st.none() | st.integers(-2, 4), st.integers(-1, 4))
    shape = st.lists(number, max_size=3)
    made = as_bytes(st.tuples(st.lists(st.integers(0, 4), max_size=3), shape, st.lists(cut)))
    yield Case(made, json.dumps([[2, 2], [6, 4], [[0, 2], [0, 1]]]).encode(), documented(call))


def fuzz_slices(folder):
    """Slices of a stored tensor: what numpy gives, or an error."""
    path, array = Path(folder, "sliced"), np.arange(60).reshape(5, 4, 3)
    shardplan.save({"w": torch.tensor(array)}, path)
    stored = shardplan.open_checkpoint(path)["w"]
    known = (*PLANNING, IndexError)

    def call(data):
        index = tuple(... if one == "..." else one for one in map(part, json.loads(data)))
        try:
            wanted = array[index]
        except Exception:
            wanted = None
        found = np.asarray(stored[index])
        assert wanted is not None, f"{index} is refused by numpy alone"
        assert np.array_equal(found, wanted), f"{index} has other elements"

    def part(one):
        return slice(*one) if isinstance(one, list) else one

    number = st.integers(-7, 7) | NUMBERS
    cut = st.lists(st.none() | number, min_size=3, max_size=3)
    made = as_bytes(st.lists(st.just("...") | number | cut, max_size=4))
    yield Case(made, json.dumps([[0, 3, 1], -1, "..."]).encode(), documented(call, known))


PASSES = ("rename", "select", "drop", "cast", "split", "concat", "stack", "unstack", "permute")
PASSES += ("reshape", "pad", "trim", "split_chunks", "split_replicas", "where", "on_ranks")


def fuzz_options(folder):
    """Planners of odd arguments: a plan that saves every element, or an error."""
    spec = planning.TensorSpec((6, 4))
    plan = planning.local_plan({"w": spec, "v": spec, "b": planning.TensorSpec((3,)), "step": 7})

    def call(data):
        name, arguments, options = json.loads(data)
        if name not in PASSES:
            return
        made = getattr(planning, name)(*arguments, **options)
        planning.check(*planning.global_plan([plan], made))

    names = st.sampled_from(["w", "v", "b", "x", "*", "w*", "", "step", "b*s"])
    number = st.integers(-3, 7) | NUMBERS
    some = st.none() | names | number | st.sampled_from(["bfloat16", "int8", "float33"])
    some = some | st.lists(names | number, max_size=4) | st.dictionaries(names, some, max_size=2)
    keys = st.sampled_from(["axis", "sizes", "shape", "into", "required", "max_bytes", "dtype"])
    options = st.dictionaries(keys, some, max_size=2)
    made = st.tuples(st.sampled_from(PASSES), st.lists(some, max_size=3), options)
    seed = json.dumps(["rename", [{"w": "x"}], {}]).encode()
    yield Case(as_bytes(made), seed, documented(call))


KINDS = {
    name.removeprefix("fuzz_"): make for name, make in globals().items() if name.startswith("fuzz_")
}
CHEAP = ("codec", "placements", "slices", "options")


# Running


def limit_memory():
    """Leave this process so much more memory than it has now, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def watch(folder):
    """End this process if anything is executed, or opened outside a folder."""
    allowed = tuple(map(str, (folder, sys.prefix, sys.base_prefix, Path(__file__).parents[2])))
    allowed += ("/proc/", "/sys/", "/dev/", "/usr/lib", "/lib", "/etc/localtime")

    def audit(event, args):
        outside = event == "open" and isinstance(args[0], str) and args[0].startswith("/")
        if event in FORBIDDEN or (outside and not args[0].startswith(allowed)):
            print(f"{event} {args} was not to happen", file=sys.stderr, flush=True)
            os._exit(3)

    sys.addaudithook(audit)


def cases_of(kind, folder):
    """Make the cases of a kind, each in a folder of its own."""
    Path(folder, kind).mkdir()
    return list(KINDS[kind](f"{folder}/{kind}"))


def corpus_of(kind, number):
    """Return the input of a case that once found a fault."""
    return [file.read_bytes() for file in sorted(CORPUS.glob(f"{kind}-{number}-*"))]


@contextlib.contextmanager
def kept(kind, number, tried):
    """Keep the input that was tried last if it found a fault."""
    try:
        yield
    except BaseException:
        name = f"{kind}-{number}-{hashlib.sha256(tried[-1]).hexdigest()[:12]}"
        CORPUS.mkdir(exist_ok=True)
        (CORPUS / name).write_bytes(tried[-1])
        raise


def explore(case, kind, number, examples):
    """Try what was found before, and then so many examples by structure."""
    for data in corpus_of(kind, number):
        case.take(data)
    tried = deque(maxlen=1)

    def take(data):
        tried.append(data)
        case.take(data)

    options = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    with kept(kind, number, tried):
        settings(max_examples=examples, **options)(given(case.strategy)(take))()


def main(examples, kinds):
    """Fuzz kinds in this process, for so many examples of each case."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        made = {kind: cases_of(kind, folder) for kind in kinds}
        watch(folder)
        limit_memory()
        for kind, cases in made.items():
            for number, case in enumerate(cases):
                explore(case, kind, number, examples)
    print("only documented errors")


def run_alone(script, *arguments):
    """Run a script of this folder in a process of its own; return what is wrong, if anything."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script))]
    command += map(str, arguments)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2500:]


def guide(kind, number, runs):
    """Fuzz one case guided by coverage; return what is wrong, if anything."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return run_alone("guided.py", kind, number, runs, folder)


def hold(executions):
    """Fuzz that often, nine of ten times what is cheap; return a row for each kind."""
    guided = importlib.util.find_spec("atheris") is not None
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        counts = {kind: len(cases_of(kind, folder)) for kind in KINDS}
    for kind, cases in counts.items():
        share = 0.9 / len(CHEAP) if kind in CHEAP else 0.1 / (len(KINDS) - len(CHEAP))
        each = max(1, int(executions * share / cases / 2))
        wrong = [run_alone("fuzzing.py", each if guided else 2 * each, kind)]
        if guided:
            wrong += [guide(kind, number, each) for number in range(cases)]
        found = tuple(filter(None, wrong))
        rows.append(Row(kind, 2 * each * cases, found, "half guided by coverage" * guided))
    return rows


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
