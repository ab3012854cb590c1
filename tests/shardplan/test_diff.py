"""Checkpoints are equal just if their keys, shapes, dtypes and bits are, however they were cut."""

import collections
import copy
import itertools
import re
import tracemalloc

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan._diff import diff
from shardplan.io import compare
from shardplan.io.compare import same_value
from shardplan.io.errors import FormatError
from shardplan.io.formats import WriteJob
from shardplan.io.formats.native.manifest import MANIFEST, read_manifest
from shardplan.io.formats.native.write import assemble, publish, write_rank
from shardplan.io.pool import Pool
from shardplan.io.stores.base import open_store
from shardplan.io.stores.testing import CountingStore
from shardplan.planning import (
    Mesh,
    Replicate,
    Shard,
    TensorSpec,
    cast,
    global_plan,
    split_chunks,
    world_plans,
)
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.storage import Box, ComparePlan
from shardplan.planning.testing.strategies import save_plans, tensor_specs

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

COUNT = itertools.count()


class Shards:
    """What one rank holds of a tensor, as boxes of its own memory."""

    def __init__(self, tensor, chunks):
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.parts = {c: tensor[tuple(map(slice, c.offsets, c.ends))] for c in chunks}

    def __create_chunk_list__(self):
        return list(self.parts)

    def __get_tensor_shard__(self, index):
        return next(t for c, t in self.parts.items() if c.offsets == tuple(index.offset))


def save_world(plans, tensors, holding=None, **options):
    """Save tensors as the ranks of a world would, each its own part; return the store.

    ``holding`` are the plans of what ranks hold, where they write it in other pieces.
    """
    store = open_store(f"memory://diff-{next(COUNT)}")
    final, metadata = global_plan(plans)
    written = []
    for rank, (local, plan) in enumerate(zip(holding or plans, final, strict=True)):
        held = collections.defaultdict(list)
        for item in local.items:
            held[item.index.fqn].append(item.tensor_data and item.tensor_data.chunk)
        state = {
            name: Shards(tensors[name], chunks) if name in tensors else f"value of {name}"
            for name, chunks in held.items()
        }
        written.append(write_rank(WriteJob(store, state, plan, save_id="s", rank=rank), **options))
    publish(store, assemble(metadata, final, written, save_id="s", **options))
    return store


def on_mesh(tensors, mesh, *placements, **options):
    specs = {
        name: TensorSpec(t.shape, str(t.dtype).removeprefix("torch."), placements)
        for name, t in tensors.items()
    }
    return save_world(world_plans(specs, mesh), tensors, **options)


def random_tensor(spec, generator=np.random.default_rng(0)):  # noqa: B008
    count = int(np.prod(spec.shape, dtype=int)) * ITEMSIZE[spec.dtype]
    raw = torch.from_numpy(
        generator.integers(0, 2 if spec.dtype == "bool" else 256, count, np.uint8)
    )
    if not count:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    return raw.view(getattr(torch, spec.dtype)).reshape(spec.shape)


def data_bytes(store):
    """Return how many bytes were read past the headers of data files."""
    starts = {}
    for operation in store.operations:
        for start, length in operation.ranges:
            if operation.path != MANIFEST and start:
                starts[operation.path, start] = length
    return sum(starts.values())


def told(found):
    return [(c.key, c.what, c.before, c.after) for c in found.changes]


# Structure


def test_equal_checkpoints_have_no_difference(tmp_path):
    sd = {"m": {"w": torch.randn(4, 3), "e": torch.zeros(0)}, "step": 7, "dtype": torch.float32}
    shardplan.save(sd, tmp_path / "a")
    shardplan.save(sd, tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert not found
    assert (found.changes, found.added, found.removed, found.changed) == ((), (), (), ())
    assert found.keys == 4
    assert "No difference: 4 keys" in repr(found)


def test_keys_shapes_dtypes_and_kinds_that_differ_are_told(tmp_path):
    old = {
        "gone": torch.ones(2),
        "w": torch.ones(3),
        "v": torch.ones(3),
        "k": 1,
        "both": torch.ones(2),
    }
    new = {"new": 5, "w": torch.ones(4), "v": torch.ones(3).half(), "k": torch.ones(1)}
    shardplan.save(old, tmp_path / "a")
    shardplan.save(new | {"both": torch.ones(3).int()}, tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found
    assert (found.added, found.removed) == (("new",), ("gone",))
    assert told(found) == [
        ("both", "shape", (2,), (3,)),
        ("both", "dtype", "float32", "int32"),
        ("gone", "removed", "float32 [2]", None),
        ("k", "type", "value", "float32 [1]"),
        ("new", "added", None, "value"),
        ("v", "dtype", "float32", "float16"),
        ("w", "shape", (3,), (4,)),
    ]
    text, html = repr(found), found._repr_html_()
    assert "1 added, 1 removed, 4 changed, 0 equal" in text
    assert all(change.key in text and change.key in html for change in found.changes)


def test_values_that_are_no_tensors_are_compared_with_their_types(tmp_path):
    nan = float("nan")
    old = {"int": 1, "pair": (1, 2), "nan": nan, "same": {"set": {1, 2}}, "long": "x" * 100_000}
    new = {"int": 1.0, "pair": [1, 2], "nan": nan, "same": {"set": {2, 1}}, "long": "y" * 100_000}
    old |= {"dtype": torch.float32, "zero": 0}
    new |= {"dtype": torch.float16, "zero": False}
    for name, sd in (("a", old), ("b", new)):
        shardplan.save(
            {k: v if k != "pair" else frozenset(v) for k, v in sd.items()}, tmp_path / name
        )
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [c.key for c in found.changes] == ["dtype", "int", "long", "zero"]
    assert told(found)[1] == ("int", "values", 1, 1.0)
    assert diff(tmp_path / "a", tmp_path / "b", values=False).changes == ()


# Checksums


def test_the_same_bytes_in_a_file_are_a_difference_if_they_mean_something_else(tmp_path):
    text = b'"' + b"x" * 100_000 + b'"'
    for name, value in [("bytes", text), ("array", bytearray(text)), ("str", "x" * 100_000)]:
        shardplan.save({"v": value}, tmp_path / name)
    for a, b in itertools.permutations(["bytes", "array", "str"], 2):
        assert [change.key for change in diff(tmp_path / a, tmp_path / b).changes] == ["v"]
    assert not diff(tmp_path / "array", tmp_path / "array")


def test_checkpoints_that_were_cut_alike_are_compared_without_reading_a_tensor():
    tensors = {"w": torch.randn(8, 6), "v": torch.randn(12)}
    one = on_mesh(tensors, Mesh(dp=4), Shard(0))
    tensors["w"][5, 2] += 1
    two = on_mesh(tensors, Mesh(dp=4), Shard(0))
    stores = CountingStore(one), CountingStore(two)
    assert not diff(stores[0], stores[0])
    found = diff(*stores)
    assert [(c.key, c.what, c.chunks, c.elements) for c in found.changes] == [
        ("w", "values", 1, None)
    ]
    assert "in 1 chunk, by checksum" in repr(found)
    assert found.bytes_read == 0
    for store in stores:
        manifest = read_manifest(store.inner)
        heads = dict(zip(manifest.files.names, manifest.files.headers.tolist(), strict=True))
        reads = [(o.path, o.ranges) for o in store.operations if o.name == "read"]
        assert {path for path, _ in reads} == {MANIFEST, *heads}
        assert all(sum(n for _, n in ranges) == heads[p] for p, ranges in reads if p in heads)


def test_locating_reads_just_the_chunks_that_differ():
    tensors = {"w": torch.arange(48.0).reshape(8, 6)}
    one = on_mesh(tensors, Mesh(dp=4), Shard(0))
    tensors["w"][5, 2:] = -1
    two = on_mesh(tensors, Mesh(dp=4), Shard(0))
    stores = CountingStore(one), CountingStore(two)
    (change,) = diff(*stores, locate=True).changes
    assert change == attrs.evolve(
        change, elements=4, first=(5, 2), before=32.0, after=-1.0, chunks=1
    )
    assert [data_bytes(store) for store in stores] == [48, 48]


def test_chunks_that_both_sides_share_are_not_read_though_others_are_cut_otherwise():
    tensors = {"w": torch.zeros(8, 6), "v": torch.zeros(4, 4)}
    plans = world_plans({"w": TensorSpec((8, 6), "float32", [Shard(0)])}, Mesh(dp=2))
    one = CountingStore(save_world(plans, tensors))
    halves = world_plans({"w": TensorSpec((8, 6), "float32", [Shard(0)])}, Mesh(dp=2))
    cut = (halves[0], *split_chunks(48)((halves[1],)))
    two = CountingStore(save_world(cut, tensors, holding=halves))
    assert not diff(one, two)
    assert data_bytes(one) == data_bytes(two) == 4 * 6 * 4


@pytest.mark.parametrize("locate", [False, True])
def test_other_block_sizes_hash_otherwise_and_are_no_difference(locate):
    tensors = {"w": torch.arange(100.0), "v": torch.arange(4.0)}
    one = on_mesh(tensors, Mesh(dp=2), Shard(0), block_bytes=32)
    two = CountingStore(on_mesh(tensors, Mesh(dp=2), Shard(0), block_bytes=64))
    assert not diff(one, two, locate=locate)
    assert data_bytes(two) == 400  # all of w, nothing of v


# Bits


MESHES = [
    (Mesh(dp=1), (Replicate(),)),
    (Mesh(dp=4), (Shard(0),)),
    (Mesh(tp=3), (Shard(1),)),
    (Mesh(dp=2, tp=3), (Shard(0), Shard(1))),
    (Mesh(dp=3, tp=2), (Shard(0), Shard(0))),
    (Mesh(dp=2, tp=2), (Replicate(), Shard(1))),
]


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(MESHES, 2)))
def test_a_single_element_is_found_however_both_sides_are_sharded(one, two):
    tensors = {"w": torch.arange(13 * 7.0).reshape(13, 7), "v": torch.ones(6, 6)}
    first = on_mesh(tensors, one[0], *one[1])
    assert not diff(first, on_mesh(tensors, two[0], *two[1]))
    tensors["w"][9, 4] = 0.5
    (change,) = diff(first, on_mesh(tensors, two[0], *two[1]), locate=True).changes
    assert (change.key, change.what, change.elements, change.first) == ("w", "values", 1, (9, 4))
    assert (change.before, change.after, change.chunks) == (67.0, 0.5, 1)


specs = st.dictionaries(st.text("abw.", min_size=1, max_size=3), tensor_specs(), max_size=3)


@given(st.data(), specs)
def test_differences_are_those_that_a_plain_comparison_finds(data, specs):
    tensors = {name: random_tensor(spec) for name, spec in specs.items()}
    others = {name: tensor.clone() for name, tensor in tensors.items()}
    expected = {}
    for name, tensor in others.items():
        rows = data.draw(st.sets(st.integers(0, max(tensor.numel() - 1, 0)), max_size=3))
        if tensor.numel() and rows:
            raw = tensor.reshape(-1).view(torch.uint8).reshape(tensor.numel(), -1)
            raw[sorted(rows), -1] ^= 1
            first = np.unravel_index(min(rows), tensor.shape)
            expected[name] = (len(rows), tuple(int(i) for i in first))
    plans = data.draw(save_plans(tensors=specs)), data.draw(save_plans(tensors=specs))
    sides = save_world(plans[0], tensors), save_world(plans[1], others)
    found = diff(*sides, locate=True)
    assert {c.key: (c.elements, c.first) for c in found.changes} == expected
    assert {c.key for c in diff(*sides).changes} == expected.keys()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({1: 2}, {True: 2}),
        ({(1, 2): 3}, {(1.0, 2): 3}),
        ({0.0: 1}, {-0.0: 1}),
        ({"x": 0.0}, {"x": -0.0}),
        (0j, -0j),
        ([1], [True]),
        ({1}, {1.0}),
        ({(0.0,)}, {(-0.0,)}),
        (np.float32(0), np.float32(-0.0)),
        (np.float32(1), np.float64(1)),
        (np.array(["a"]), np.array(["b"])),
        (torch.zeros(1), -torch.zeros(1)),
        ({"a": 1}, {"b": 1}),
    ],
    ids=repr,
)
def test_values_differ_if_any_type_or_bit_does(a, b):
    assert not same_value(a, b)
    assert not same_value({"in": [a]}, {"in": [b]})
    assert same_value(copy.deepcopy(a), copy.deepcopy(a))


def test_the_order_of_a_dict_or_set_is_no_difference():
    nan = float("nan")
    assert same_value({"a": nan, "b": {1, 2}}, {"b": {2, 1}, "a": nan})
    assert same_value({nan: 1}, {float("nan"): 1})
    assert same_value(np.array(["a"]), np.array(["a"]))


def test_a_chunk_that_is_compared_in_many_pieces_counts_once(monkeypatch):
    monkeypatch.setattr(compare, "_BATCH", 64)
    tensors = {"w": torch.zeros(4, 100)}
    one = on_mesh(tensors, Mesh(dp=2), Shard(0))
    tensors["w"][:2] = 1
    two = on_mesh(tensors, Mesh(dp=2), Shard(0))
    (change,) = diff(one, two, locate=True).changes
    assert (change.chunks, change.elements, change.first) == (1, 200, (0, 0))


def test_pieces_are_added_up_in_time_and_memory_that_grow_with_their_number():
    count = 20_000
    boxes = tuple(Box("w", (n,), (1,)) for n in range(count))
    plan = ComparePlan(boxes, tuple(range(count)), (4,) * count, (range(count),))
    diffs = {n: compare.TensorDiff(1, 1, (n,)) for n in range(count)}
    tracemalloc.start()
    assert compare._merge(plan, diffs)["w"].chunks == count
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_nans_are_compared_as_bits():
    quiet = torch.tensor([0x7FC00000, 0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00000, 0x7FC00002, -(2**31)], dtype=torch.int32).view(torch.float32)
    one = on_mesh({"w": quiet}, Mesh(dp=1), Replicate())
    assert not diff(one, on_mesh({"w": quiet}, Mesh(dp=3), Shard(0)))
    (change,) = diff(one, on_mesh({"w": other}, Mesh(dp=3), Shard(0))).changes
    assert (change.elements, change.first) == (2, (1,))  # and a zero of the other sign


def test_large_tensors_are_compared_within_a_small_budget(tmp_path):
    tensor = torch.randn(4000, 3000)
    with Pool(max_workers=2, max_bytes=40 << 20) as pool:
        shardplan.save({"w": tensor}, tmp_path / "a")
        tensor[3999, 2999] += 1
        shardplan.save({"w": tensor}, tmp_path / "b", planner=split_chunks(5 << 20))
        found = diff(tmp_path / "a", tmp_path / "b", pool=pool)
    assert [(c.elements, c.first) for c in found.changes] == [(1, (3999, 2999))]
    assert pool.peak_bytes <= 40 << 20
    assert found.bytes_read == 2 * tensor.nbytes


def test_a_planner_that_casts_makes_a_difference_of_dtype(tmp_path):
    shardplan.save({"w": torch.ones(3)}, tmp_path / "a")
    shardplan.save({"w": torch.ones(3)}, tmp_path / "b", planner=cast("bfloat16"))
    assert told(diff(tmp_path / "a", tmp_path / "b")) == [("w", "dtype", "float32", "bfloat16")]


@pytest.mark.parametrize("cut", [8, 48])
def test_progress_starts_at_nothing_never_goes_back_and_ends_at_all(cut):
    tensors = {f"w{i}": torch.arange(12.0) for i in range(5)}
    calls = []
    one = on_mesh(tensors, Mesh(dp=1), Replicate())
    two = open_store(f"memory://diff-{next(COUNT)}")
    shardplan.save(tensors, two, planner=split_chunks(cut))
    diff(one, two, progress=lambda *call: calls.append(call))
    total = 240 if cut == 8 else 0
    assert (calls[0], calls[-1]) == ((0, total), (total, total))
    assert calls == sorted(calls)


def test_damage_that_is_met_is_an_error_and_no_difference(tmp_path):
    tensor = torch.arange(8.0)
    shardplan.save({"w": tensor}, tmp_path / "a")
    shardplan.save({"w": tensor}, tmp_path / "b", planner=split_chunks(16))
    (file,) = (tmp_path / "a").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(FormatError, match="checksum"):
        diff(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FormatError, match="no checkpoint"):
        diff(tmp_path / "a", tmp_path / "nowhere")


@pytest.mark.parametrize("fault", ["missing", "longer", "shorter"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_file_that_is_missing_or_of_another_size_is_no_checkpoint_to_compare(
    tmp_path, fault, side
):
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        shardplan.save({"w": torch.ones(3)}, place)
    (file,) = places[side].glob("*.safetensors")
    data = file.read_bytes()
    file.unlink()
    if fault != "missing":
        file.write_bytes(data + b"x" if fault == "longer" else data[:-1])
    for values in (True, False):
        with pytest.raises(FormatError, match=file.name) as caught:
            diff(*places, values=values)
        assert str(places[side]) in str(caught.value)
    store = CountingStore(open_store(places[1 - side]))
    diff(store, store)
    assert [o.name for o in store.operations].count("list") == 2


def test_a_side_that_is_overwritten_meanwhile_is_compared_as_it_is_now(tmp_path):
    w = torch.arange(6.0)
    for name in "ab":
        shardplan.save({"w": w}, tmp_path / name)
    shardplan.save({"w": w + 1}, tmp_path / "b", planner=split_chunks(8), overwrite=True)
    calls = []

    def tell(done, total):
        calls.append(done)
        if len(calls) == 1:
            shardplan.save({"w": w}, tmp_path / "b", planner=split_chunks(8), overwrite=True)

    assert not shardplan.diff(tmp_path / "a", tmp_path / "b", progress=tell)
    assert calls.count(0) == 2


def flip_last(folder):
    """Change one bit of the last tensor, whatever its checksum was."""
    (file,) = folder.glob("shard-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_was_only_compared_by_checksum_is_told(tmp_path):
    sd = {"w": torch.arange(6.0), "kind": torch.float32, "step": 7}
    shardplan.save(sd, tmp_path / "a")
    shardplan.save(sd, tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.by_checksum, found.bytes_read) == (2, 0)
    assert repr(found).endswith(
        "2 of 3 keys compared by recorded checksums: their bytes were not read"
    )
    found = diff(tmp_path / "a", tmp_path / "b", read=True)
    assert (bool(found), found.by_checksum, found.bytes_read) == (False, 0, 48)
    assert "checksum" not in repr(found)
    assert "values were not compared: only names, shapes and dtypes" in repr(
        diff(tmp_path / "a", tmp_path / "b", values=False)
    )


def test_a_damaged_copy_is_found_by_reading_it(tmp_path):
    sd = {"w": torch.arange(6.0)}
    shardplan.save(sd, tmp_path / "a")
    shardplan.save(sd, tmp_path / "b")
    flip_last(tmp_path / "b")
    assert not diff(tmp_path / "a", tmp_path / "b")
    with pytest.raises(FormatError, match="`w`") as caught:
        diff(tmp_path / "a", tmp_path / "b", read=True)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/b/shard-")
    assert text.endswith("this copy is damaged: use another, and see what verify says of it")
    assert not re.search("filled|overwritten|load", text)


@pytest.mark.parametrize("side", [0, 1])
def test_what_stops_a_comparison_names_the_side(tmp_path, side):
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        shardplan.save({"w": torch.ones(8), "value": b"x" * 100_000}, place)
    bad = places[side]
    (file,) = bad.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"xxxx", b"xyxx", 1))
    with pytest.raises(FormatError, match=rf"^{bad}/shard-.*`value`"):
        diff(*places, read=True)
    file.write_bytes(data)
    (bad / "shardplan.json").write_text("{}")
    with pytest.raises(FormatError, match=rf"^{bad}/shardplan\.json"):
        diff(*places)
    (bad / "shardplan.json").unlink()
    with pytest.raises(FormatError, match=rf"^{bad}: there is no checkpoint"):
        diff(*places)
