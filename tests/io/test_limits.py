"""Limits of what is read, and that writers keep to them: nothing is saved that cannot be read."""

import os

import attrs
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardplan
from shardplan.io.errors import FormatError
from shardplan.io.formats import base as limits
from shardplan.io.formats import headers
from shardplan.io.formats.base import LIMITS
from shardplan.planning import (
    Chunk,
    PlanError,
    TensorMetadata,
    TensorProperties,
    find_issues,
    global_plan,
    local_plan,
)
from shardplan.planning.errors import RefusedError
from shardplan.planning.geometry.tilings import MAX_AXES, MAX_NUMEL
from shardplan.planning.tree import flatten

FORMATS = ["safetensors", "dcp", "torch", "hf"]
DTYPES = [torch.float32, torch.bool, torch.float8_e5m2, torch.uint16, torch.complex64]


def place(folder, format):
    return folder / ("x.pt" if format == "torch" else "x")


def check_round_trip(sd, path, format):
    """Save, and use what was saved in all ways."""
    shardplan.save(sd, path, format=format)
    found = shardplan.restore(path)
    blank = {name: torch.zeros_like(tensor) for name, tensor in sd.items()}
    shardplan.load(blank, path)
    opened = shardplan.open_checkpoint(path)
    for name, tensor in sd.items():
        for got in (found[name], blank[name], opened[name][...]):
            assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)) or not tensor.ndim
    assert shardplan.verify(path).ok
    again = path.parent / "again"
    shardplan.convert(path, again, format="safetensors")
    assert shardplan.verify(again).ok
    assert shardplan.prune(path.parent, keep_last=1)
    assert shardplan.verify(again).ok


LONG = (1 << 29, 1 << 28)  # axes whose product is the most that there may be, but for one
SHAPES = {
    "as many axes as can be": (2, *(1,) * (MAX_AXES - 1)),
    "without elements, as many axes as can be": (0,) * MAX_AXES,
    "without elements, a long axis": (0, 1 << 40),
    "without elements, a long first axis": (1 << 31, 0),
    "without elements, the longest axis": (0, MAX_NUMEL - 1),
    "without elements, in the middle": (LONG[0], 0, LONG[1]),
    "without elements, short": (3, 0, 5),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_tensor_of_the_most_axes_or_the_longest_is_saved_and_read(tmp_path, kind, format):
    sd = {f"t{i}": torch.zeros(SHAPES[kind], dtype=dtype) for i, dtype in enumerate(DTYPES)}
    check_round_trip({**sd, "w": torch.ones(2)}, place(tmp_path, format), format)


IMPOSSIBLE = {
    "one axis more": ((1,) * (MAX_AXES + 1), "64 axes"),
    "an axis of 2^60": ((0, 1 << 60), "2\\^59"),
    "an axis of 2^62": ((0, 1 << 62), "2\\^59"),
    "a product that is too large": ((1 << 30, 0, 1 << 29), "2\\^59"),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_tensor_that_could_not_be_read_is_refused_before_anything_is_written(
    tmp_path, kind, format
):
    shape, reason = IMPOSSIBLE[kind]
    with pytest.raises(RefusedError, match=f"`a` has .*{reason}"):
        shardplan.save({"a": torch.zeros(shape)}, place(tmp_path, format), format=format)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_pass_cannot_make_a_tensor_that_could_not_be_read(kind):
    shape, reason = IMPOSSIBLE[kind]
    plan = local_plan({"a": np.zeros((0,) * min(len(shape), 2), np.float32)})
    items = plan.items
    wide = shape if 0 in shape else (0, *shape[1:])
    catalog = attrs.evolve(items.catalog, ndim=np.array([len(wide)]), size=np.array([wide]))
    column = np.array([wide])
    made = attrs.evolve(items, catalog=catalog, offsets=np.zeros_like(column), sizes=column)
    plan = attrs.evolve(plan, items=made)
    with pytest.raises(PlanError, match=reason):
        global_plan([plan], ())
    assert any(issue.kind == "too_large" for issue in find_issues(plan))


def test_metadata_refuses_a_tensor_of_too_many_axes_by_name(tmp_path):
    dcp.save({"a": torch.ones((1,) * (MAX_AXES + 1))}, checkpoint_id=tmp_path, no_dist=True)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    with pytest.raises(RefusedError, match=r"`a`: a tensor has 64 axes, .* at most 63"):
        shardplan.from_torch(theirs)
    shape = (1,) * (MAX_AXES + 1)
    whole = Chunk((0,) * len(shape), shape)
    with pytest.raises(ValueError, match=r"a tensor has 64 axes, .* at most 63"):
        TensorMetadata(TensorProperties("float32"), shape, [whole])


def test_nesting_has_a_limit_that_every_format_reads(tmp_path):
    def nested(levels, make):
        value = 1
        for _ in range(levels):
            value = make(value)
        return value

    kinds = [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: [{"k": v}]]
    for number, make in enumerate(kinds):
        levels = 64 if number == 3 else 127
        for format in FORMATS[:3]:
            path = place(tmp_path / f"{number}-{format}", format)
            path.parent.mkdir()
            shardplan.save({"v": nested(levels, make)}, path, format=format)
            assert shardplan.restore(path)["v"] == nested(levels, make)
            for deep in (140, 600, 5000):
                with pytest.raises(RefusedError, match=r"`v` .*too deeply"):
                    shardplan.save({"v": nested(deep, make)}, path, format=format, overwrite=True)
            assert shardplan.restore(path)["v"] == nested(levels, make)


def test_a_list_of_more_tensors_than_can_be_put_together_again_is_refused():
    many = [np.zeros(())] * (1 << 20)
    assert len(flatten({"a": many})[0]) == 1 << 20
    with pytest.raises(RefusedError, match=r"`a` is a list of 1,048,577"):
        flatten({"a": [*many, many[0]]})


# Files that are read whole


@pytest.mark.parametrize(
    ("format", "what", "name"),
    [
        ("safetensors", "manifest", "shardplan.json"),
        ("dcp", "metadata", r"\.metadata"),
        ("torch", "pickle", r"x\.pt"),
        ("torch", "directory", r"x\.pt"),
        ("safetensors", "header", r"\.safetensors"),
        ("hf", "header", r"\.safetensors"),
        ("hf", "index", r"model\.safetensors\.index\.json"),
    ],
)
def test_no_writer_writes_more_than_readers_read(tmp_path, monkeypatch, format, what, name):
    old, new = {"a": torch.zeros(2)}, {f"tensor {n}": torch.ones(2) for n in range(300)}
    options = {"max_shard_size": 64} if what == "index" else {}
    path = place(tmp_path, format)
    shardplan.save(old, path, format=format)
    files = sorted(tmp_path.rglob("*"))

    def limit(nbytes):
        monkeypatch.setitem(LIMITS, what, nbytes)
        if what == "header":
            monkeypatch.setattr(headers, "MAX_HEADER", nbytes)

    if what == "index":
        shardplan.save(new, tmp_path / "source")

        def save():
            shardplan.convert(tmp_path / "source", path, format="hf", overwrite=True, **options)
    else:

        def save():
            shardplan.save(new, path, format=format, overwrite=True)

    limit(4000)
    with pytest.raises(FormatError, match=rf"{name}.*4,000"):
        save()
    assert torch.equal(shardplan.restore(path)["a"], old["a"])  # and what was there is there still
    assert [file for file in sorted(tmp_path.rglob("*")) if "source" not in str(file)] == files
    low, high = 4000, 200_000
    while high - low > 1:  # the least limit with which it is saved
        middle = (low + high) // 2
        limit(middle)
        try:
            save()
            high = middle
        except FormatError:
            low = middle
    limit(high + 40)  # the time of a save takes some digits more or less
    save()
    assert shardplan.restore(path).keys() == new.keys()
    assert shardplan.verify(path).ok
    limit(high - 40)
    with pytest.raises(FormatError, match=name):
        shardplan.restore(path)


def test_the_table_of_limits_is_complete():
    assert {*LIMITS} == {
        *("manifest", "metadata", "index", "config", "companion"),
        *("header", "pickle", "directory"),
    }
    assert limits.MAX_BYTES == 1 << 60
