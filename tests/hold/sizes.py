"""Save what is large, oddly named or of an odd kind: it comes back exactly, or is refused at once.

``hold(count)``: so many tensors in one checkpoint of each format. From 100,000 on, also half a
million chunks, and a tensor of more than 4 GiB in each format.
"""

import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from common import DOCUMENTED, FORMATS, Row, same, target

import shardplan
from shardplan.planning import split_chunks

REFUSED = "refused"
LONG = "x" * 10_000
NAMES = [
    "ü.é",
    "日本/語",
    "a b",
    "a/b/../c",
    "..",
    ".",
    "/",
    "a\\b",
    "*?[x]",
    "\u202e",
    "a\nb",
    " ",
]
NAMES += [
    "__metadata__",
    "nul\0",
    "",
    "a..b",
    ".a",
    "a.",
    "CON",
    "-",
    "~",
    "%2e%2e",
    "\ud800",
    LONG,
]
KEYS = [0, -1, (1, 2), ("a", ("b", 3)), 1.5, True, None, b"x", frozenset({1})]
DTYPES = sorted({str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}.items())


class Subclass(torch.Tensor):
    """A tensor of a class of its own."""


def kinds():
    """Return functions that make tensors of every kind, by what they are."""
    grid = torch.arange(12.0).reshape(3, 4)
    return {
        "sparse": grid.to_sparse,
        "sparse rows": grid.to_sparse_csr,
        "quantised": lambda: torch.quantize_per_tensor(grid, 0.5, 3, torch.qint8),
        "jagged": lambda: torch.nested.nested_tensor([grid[0], grid[1, :2]], layout=torch.jagged),
        "nested": lambda: torch.nested.nested_tensor([grid[0], grid[1, :2]]),
        "subclass": lambda: grid.as_subclass(Subclass),
        "parameter": lambda: torch.nn.Parameter(grid),
        "expanded": lambda: torch.ones(1, 4).expand(3, 4),
        "conjugate": lambda: torch.complex(grid, grid).conj(),
        "negative": lambda: torch.complex(grid, grid).conj().imag,
        "transposed": grid.t,
        "stepped": lambda: grid[:, ::2],
        "channels last": lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "without elements": lambda: torch.empty(0, 4),
        "without axes": lambda: torch.tensor(3.5),
        "meta": lambda: torch.empty(3, device="meta"),
        "part of a graph": lambda: torch.nn.Parameter(grid) * 2,
        "nan": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
        "overlapping": lambda: torch.arange(6.0).as_strided((3, 3), (1, 1)),
        "64 axes": lambda: torch.ones([1] * 64),
    }


def of_dtype(dtype):
    """Make a tensor of a dtype, of bits that are all different."""
    if str(dtype).startswith("torch.q"):
        return torch.quantize_per_tensor(torch.arange(4.0), 1.0, 0, dtype)
    if dtype.itemsize == 0 or dtype == torch.bool:
        return torch.tensor([True, False, True])
    return torch.arange(3 * dtype.itemsize, dtype=torch.uint8).view(dtype)


def cases():
    """Return small state dicts, as functions that make them, by what they are."""
    one = torch.ones(2)
    made = {
        f"name {name[:20]!r}": lambda name=name: {name: one, "other": one * 2} for name in NAMES
    }
    made |= {f"key {key!r}": lambda key=key: {key: one, "other": one * 2} for key in KEYS}
    made |= {f"dtype {name}": lambda dtype=dtype: {"w": of_dtype(dtype)} for name, dtype in DTYPES}
    made |= {f"kind {name}": lambda make=make: {"w": make()} for name, make in kinds().items()}
    return made | {
        "nothing": dict,
        "a clash": lambda: {"a": {"b": one}, "a.b": one * 2},
        "empty dicts": lambda: {"a": {}, "b": [], "c": {"d": {}}, "w": one},
        "deeply nested": lambda: nested(60),
        "ordered": lambda: {"a": OrderedDict(z=one, a=one * 2)},
        "names alike but for case": lambda: {"w": one, "W": one * 2},
        "two names that look alike": lambda: {"\u00e9": one, "e\u0301": one * 2},
    }


def nested(depth):
    """Nest a tensor in dicts."""
    return {"a": nested(depth - 1)} if depth else torch.ones(2)


def judge(make, form):
    """Return what is wrong about how a state dict is saved; `REFUSED` or nothing is fine."""
    try:
        wanted = make()
    except (RuntimeError, TypeError, NotImplementedError, AttributeError):
        return REFUSED  # by torch itself
    with tempfile.TemporaryDirectory() as folder:
        path = target(Path(folder), form)
        try:
            shardplan.save(wanted, path, format=form)
        except DOCUMENTED as error:
            left = [str(file) for file in Path(folder).rglob("*")]
            return f"refused ({error}), but {left} were left" if left else REFUSED
        return compare(wanted, path)


def compare(wanted, path):
    """Return how what is read differs from what was saved."""
    try:
        report = shardplan.verify(path)
        found = shardplan.restore(path)
    except DOCUMENTED as error:
        return f"saved, but not read: {error}"
    if not report.ok:
        return f"saved, but verify says {report}"
    return "" if alike(found, wanted) else f"{str(wanted)[:200]} becomes {str(found)[:200]}"


def alike(found, wanted):
    """Return True if what was found is what was wanted; formats that keep no nesting are flat."""
    if same(plain(found), plain(wanted)):
        return True
    from shardplan.planning import flatten

    return same(plain(flatten(found)[0]), plain(flatten(wanted)[0]))


def plain(value):
    """Return a value with tensors of torch's own class, strided, and without gradients."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    return value


def guarded(judge, *arguments):
    """Return what is wrong, an error that is not documented included."""
    try:
        return judge(*arguments)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:300]}"


def many(count, form):
    """Save so many small tensors."""
    numbers = torch.arange(count * 4, dtype=torch.int32).reshape(count, 4)
    return judge(lambda: {f"layers.{i}.weight": numbers[i] for i in range(count)}, form)


def chunks(count):
    """Save a tensor in so many chunks."""
    wanted = {"w": torch.arange(count * 2, dtype=torch.int16)}
    with tempfile.TemporaryDirectory() as folder:
        shardplan.save(wanted, f"{folder}/c", planner=split_chunks(4))
        held = len(
            shardplan.open_checkpoint(f"{folder}/c").metadata.state_dict_metadata["w"].chunks
        )
        assert held == count, f"{held} chunks"
        return compare(wanted, Path(folder, "c"))


def beyond_4_gib(form):
    """Save a tensor of more than 4 GiB between two others, and read it back in place."""
    size = (1 << 32) + (1 << 20)
    large = torch.zeros(size, dtype=torch.uint8)
    places = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, size - 1])
    large[places] = torch.arange(1, 8, dtype=torch.uint8)
    small = torch.arange(5)
    with tempfile.TemporaryDirectory() as folder:
        path = target(Path(folder), form)
        shardplan.save({"a": small, "b": large, "c": small + 7}, path, format=form)
        part = shardplan.open_checkpoint(path)["b"][(1 << 32) - 2 : (1 << 32) + 2]
        assert part.tolist() == [0, 5, 6, 0], f"a slice is {part.tolist()}"
        found = {"a": small * 0, "b": large.fill_(9), "c": small * 0}
        shardplan.load(found, path)
        rest = int(torch.count_nonzero(found["b"]))
        right = found["b"][places].tolist() == [1, 2, 3, 4, 5, 6, 7] and rest == 7
        return "" if right and same(found["c"], small + 7) else "other elements"


def hold(count):
    """Save everything in every format; return a row for each format, and for what is large."""
    rows = []
    for form in FORMATS:
        found = {name: guarded(judge, make, form) for name, make in cases().items()}
        wrong = tuple(
            f"{name}: {fault}" for name, fault in found.items() if fault not in {"", REFUSED}
        )
        refused = sum(fault == REFUSED for fault in found.values())
        note = f"{refused} of them refused before anything was written"
        rows.append(Row(f"{form}, names, dtypes and kinds of tensors", len(found), wrong, note))
        rows.append(large(f"{form}, {count:,} tensors", many, count, form))
    if count >= 100_000:
        rows.append(large(f"{5 * count:,} chunks", chunks, 5 * count))
        rows += [
            large(f"{form}, a tensor of 4 GiB and 1 MiB", beyond_4_gib, form) for form in FORMATS
        ]
    return rows


def large(what, judge, *arguments):
    """Make a row of one trial."""
    fault = guarded(judge, *arguments)
    return Row(what, 1, (fault,) if fault else ())
