"""What was saved is what is loaded, bit for bit, however either side was cut."""

import collections
import os
import pickle
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan._memory import destinations
from shardplan._read import read_rank
from shardplan.io.errors import ExistsError, FormatError, LoadError, ValueRefusedError
from shardplan.io.execute import read as reading
from shardplan.io.execute.read import Reader
from shardplan.io.formats import WriteJob
from shardplan.io.formats.headers import parse_header
from shardplan.io.formats.native.write import assemble, publish, write_rank
from shardplan.io.formats.registry import open_source
from shardplan.io.pool import Pool
from shardplan.io.stores.base import StoreError, open_store
from shardplan.io.stores.testing import CountingStore
from shardplan.io.tensors import as_tensor
from shardplan.planning import (
    Chunk,
    LoadItemType,
    LoadPlan,
    MetadataIndex,
    NotFoundError,
    PlanError,
    ReadItem,
    RefusedError,
    TensorSpec,
    cast,
    chain,
    global_plan,
    load_plan,
    local_plan,
    rename,
    split_chunks,
)
from shardplan.planning.dtypes import ITEMSIZE
from shardplan.planning.testing.strategies import save_plans, tensor_specs

# torch says this once, whenever such a tensor is first copied.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


def fill(reader, state, plan):
    return read_rank(reader, plan, destinations(state, plan.items, reader))


def random_tensor(spec):
    count = int(np.prod(spec.shape, dtype=int)) * ITEMSIZE[spec.dtype]
    if not count:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    generator = np.random.default_rng([*spec.shape, len(spec.dtype)])
    raw = generator.integers(0, 2 if spec.dtype == "bool" else 256, count, np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, spec.dtype)).reshape(spec.shape)


def bits(tensor):
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).tolist()


def box(tensor, chunk):
    return tensor[tuple(slice(o, e) for o, e in zip(chunk.offsets, chunk.ends, strict=True))]


class Shards:
    """What one rank holds of a tensor, as boxes of its own memory."""

    def __init__(self, shape, dtype, parts):
        self.shape, self.dtype, self.parts = shape, dtype, parts

    def __create_chunk_list__(self):
        return list(self.parts)

    def __get_tensor_shard__(self, index):
        return next(t for c, t in self.parts.items() if c.offsets == tuple(index.offset))


def rank_state(plan, tensors, make):
    """Return the state dict of a rank that holds what its plan says."""
    parts = collections.defaultdict(dict)
    state = {}
    for item in plan.items:
        name = item.index.fqn
        if item.tensor_data is None:
            state[name] = f"value of {name}"
        else:
            chunk = item.tensor_data.chunk
            parts[name][chunk] = make(box(tensors[name], chunk))
    for name, boxes in parts.items():
        state[name] = Shards(tensors[name].shape, tensors[name].dtype, boxes)
    return state


worlds = st.dictionaries(
    st.text("abw.", min_size=1, max_size=3), tensor_specs() | st.none(), max_size=4
)


@given(st.data(), worlds, st.sampled_from([16, 1 << 24]), st.booleans())
def test_any_world_loads_what_any_other_world_saved(data, specs, block_bytes, strided):
    plans = data.draw(save_plans(tensors=specs))
    tensors = {k: random_tensor(s) for k, s in specs.items() if isinstance(s, TensorSpec)}
    store = open_store(f"memory://world-{data.draw(st.integers(0, 1 << 30))}")
    store.delete(store.list())
    final, metadata = global_plan(plans)
    written = [
        write_rank(
            WriteJob(
                store,
                rank_state(local, tensors, lambda t: t),
                plan,
                save_id="s",
                rank=rank,
            ),
            block_bytes,
        )
        for rank, (local, plan) in enumerate(zip(plans, final, strict=True))
    ]
    publish(store, assemble(metadata, final, written, save_id="s", block_bytes=block_bytes))
    reader = Reader(open_source(store))
    for plan in data.draw(save_plans(tensors=specs)):
        state = rank_state(plan, tensors, blank_strided if strided else torch.empty_like)
        done = fill(reader, state, load_plan(metadata, plan))
        stats, values = done.stats, done.values
        assert stats.bytes_read >= stats.bytes_needed
        for name, value in state.items():
            if isinstance(value, Shards):
                for chunk, shard in value.parts.items():
                    assert bits(shard) == bits(box(tensors[name], chunk))
            else:
                assert values[name] == value


def blank_strided(tensor):
    """Make an empty tensor whose elements lie apart and, where it can be, transposed."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    wide = torch.zeros((*reversed(tensor.shape), 2), dtype=torch.uint8).repeat_interleave(
        tensor.dtype.itemsize, -1
    )
    flat = wide.contiguous().view(tensor.dtype)[..., 0]
    return flat.permute(tuple(reversed(range(tensor.ndim))))


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape):
    tensor = random_tensor(TensorSpec(shape, dtype))
    shardplan.save({"w": tensor}, tmp_path)
    target = {"w": torch.empty_like(tensor)}
    shardplan.load(target, tmp_path)
    found = shardplan.restore(tmp_path)["w"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert bits(found) == bits(target["w"]) == bits(tensor)


def test_views_save_their_elements_and_not_their_buffers(tmp_path):
    base = torch.arange(1_000_000, dtype=torch.float32)
    sd = {"part": base[10:20], "step": base[::100_000], "wide": base[:6].reshape(2, 3).t()}
    sd |= {"conj": torch.tensor([1 + 2j]).conj(), "neg": torch.tensor([1 + 2j]).conj().imag}
    sd |= {"expanded": torch.ones(1).expand(4), "parameter": torch.nn.Parameter(base[:3])}
    report = shardplan.save(sd, tmp_path)
    assert report.nbytes < 4_000
    found = shardplan.restore(tmp_path)
    assert all(torch.equal(found[name], sd[name].detach()) for name in sd)


def test_loads_fill_views_and_parameters_in_place(tmp_path):
    shardplan.save({"a": torch.arange(6.0).reshape(2, 3), "p": torch.ones(2)}, tmp_path)
    base = torch.zeros(3, 4)
    parameter = torch.nn.Parameter(torch.zeros(2))
    shardplan.load({"a": base.t()[:2, :], "p": parameter}, tmp_path)
    assert base.t()[:2].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert base.sum() == 15
    assert parameter.tolist() == [1, 1]


def test_numpy_arrays_of_any_layout_are_saved_and_plain_ones_filled(tmp_path):
    sd = {"r": np.arange(6)[::-1], "f": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    sd |= {"b": np.arange(3, dtype=">i4")}
    shardplan.save(sd, tmp_path)
    target = {"r": np.zeros(6, int), "f": np.zeros((2, 3)), "b": np.zeros(3, "i4")}
    shardplan.load(target, tmp_path)
    assert all(np.array_equal(target[name], sd[name]) for name in sd)
    frozen = np.zeros(6, int)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        shardplan.load({"r": frozen}, tmp_path)


def test_nested_state_is_filled_in_place_to_the_leaves(tmp_path):
    pair = collections.namedtuple("Pair", "x y")
    saved = {"a": [{"t": torch.ones(2)}, 5], "b": (torch.ones(1), {"c": 7}), 3: pair(1, {"d": 2})}
    shardplan.save(saved, tmp_path)
    target = {
        "a": [{"t": torch.zeros(2)}, 0],
        "b": (torch.zeros(1), {"c": 0}),
        3: pair(0, {"d": 0}),
    }
    inner = target["a"]
    shardplan.load(target, tmp_path)
    assert target["a"] is inner
    assert (inner[0]["t"].tolist(), inner[1], target["b"][1], target[3]) == (
        [1, 1],
        5,
        {"c": 7},
        pair(1, {"d": 2}),
    )
    assert shardplan.restore(tmp_path)["a"][1] == 5


def test_one_planner_customises_both_directions(tmp_path):
    planner = chain(rename(lambda k: k.removeprefix("_orig_mod.")), cast("bfloat16"))
    sd = {"_orig_mod.w": torch.randn(40, 30), "_orig_mod.n": torch.arange(3)}
    shardplan.save(sd, tmp_path, planner=chain(planner, split_chunks(64)))
    target = {k: torch.zeros_like(v) for k, v in sd.items()}
    shardplan.load(target, tmp_path, planner=planner)
    assert torch.equal(target["_orig_mod.w"], sd["_orig_mod.w"].bfloat16().float())
    assert torch.equal(target["_orig_mod.n"], sd["_orig_mod.n"])
    assert shardplan.open_checkpoint(tmp_path)["w"].dtype == torch.bfloat16


def test_another_dtype_is_an_error_unless_a_cast_is_asked_for(tmp_path):
    shardplan.save({"w": torch.tensor([1.5, 2.5])}, tmp_path)
    target = {"w": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(PlanError, match="float32"):
        shardplan.load(target, tmp_path)
    shardplan.load(target, tmp_path, dtype="cast")
    assert target["w"].tolist() == [1.5, 2.5]


def test_the_report_tells_what_did_not_fit(tmp_path):
    shardplan.save({"a": torch.ones(4), "b": torch.ones(2), "c": 1}, tmp_path)
    target = {"a": torch.zeros(6), "x": torch.zeros(1), "c": 0}
    report = shardplan.load(target, tmp_path, strict=False, shape="overlap")
    assert (report.missing, report.unexpected) == (("x",), ("b",))
    assert [issue.fqn for issue in report.mismatched] == ["a"]
    assert (target["a"].tolist(), target["c"]) == ([1, 1, 1, 1, 0, 0], 1)
    assert report.bytes_read == report.bytes_needed == 16
    assert "1 missing" in repr(report)
    with pytest.raises(PlanError):
        shardplan.load(target, tmp_path, strict=["x*"])


def test_restore_makes_what_it_is_asked_for(tmp_path):
    sd = {"m": {"w": torch.randn(3, 2), "b": torch.randn(2)}, "o": {"w": torch.randn(3)}, "n": 1}
    shardplan.save(sd, tmp_path)
    assert list(shardplan.restore(tmp_path, keys="m.*")) == ["m"]
    with pytest.raises(NotFoundError, match="nearest"):
        shardplan.restore(tmp_path, keys=["m.ww"])
    target = {"m": {"w": torch.empty(3, 2, device="meta")}, "n": None}
    found = shardplan.restore(tmp_path, target)
    assert torch.equal(found["m"]["w"], sd["m"]["w"])
    assert found["n"] == 1
    wide = {"o": {"w": TensorSpec((3,), "float64")}}
    assert torch.equal(
        shardplan.restore(tmp_path, wide, dtype="cast")["o"]["w"], sd["o"]["w"].double()
    )


indices = st.slices(7) | st.integers(-7, 6)


@given(st.tuples(indices, st.slices(5) | st.integers(-5, 4)), st.booleans())
def test_a_saved_tensor_is_indexed_like_an_array(index, dots):
    array = np.arange(35).reshape(7, 5)
    store = open_store("memory://indexing")
    if not store.list():
        shardplan.save({"w": torch.from_numpy(array)}, store, planner=split_chunks(64))
    saved = shardplan.open_checkpoint(store)["w"]
    index = (index[0], ..., index[1]) if dots else index
    assert np.array_equal(saved[index].numpy(), array[index])


def test_a_saved_tensor_is_an_array(tmp_path):
    shardplan.save({"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(2)}, tmp_path)
    checkpoint = shardplan.open_checkpoint(tmp_path)
    saved = checkpoint["w"]
    assert (saved.shape, saved.dtype, saved.ndim, len(saved)) == ((2, 3), torch.float32, 2, 2)
    assert np.array_equal(np.asarray(saved), np.arange(6.0).reshape(2, 3))
    assert checkpoint["s"].read() == 2
    assert saved[1].tolist() == saved[-1, ...].tolist() == [3, 4, 5]
    assert "[2, 3]" in repr(saved)
    for wrong, error in ((5, IndexError), ((0, 0, 0), IndexError), ([0], TypeError)):
        with pytest.raises(error):
            saved[wrong]
    with pytest.raises(KeyError, match="nearest"):
        checkpoint["ww"]


def test_bytes_read_are_the_bytes_needed(tmp_path):
    tensor = torch.arange(1000 * 300, dtype=torch.float32).reshape(1000, 300)
    shardplan.save({"w": tensor, "other": torch.zeros(1000)}, tmp_path, planner=split_chunks(10**5))
    store = CountingStore(open_store(tmp_path))
    saved = shardplan.open_checkpoint(store)["w"]
    saved[0]
    for index in (
        (slice(10, 20), ...),
        (slice(None), slice(7, 10)),
        (slice(500, 900, 100), slice(0, 200)),
        (-1, -1),
    ):
        saved[index]  # reads the headers
        store.clear()
        assert torch.equal(saved[index], tensor[index])
        assert store.bytes_read() == tensor[index].numel() * 4


def test_only_the_files_that_are_touched_are_opened(tmp_path):
    sd = {"w": torch.arange(100.0)}
    shardplan.save(sd, tmp_path, planner=split_chunks(40))
    store = CountingStore(open_store(tmp_path))
    assert shardplan.open_checkpoint(store)["w"][5:8].tolist() == [5, 6, 7]
    assert len({o.path for o in store.operations if o.name == "read"}) == 2


@pytest.mark.parametrize("columns", [1, 3, 1500])
@pytest.mark.parametrize("dtype", ["same", "cast"])
def test_large_tensors_are_read_in_blocks_wherever_they_lie(tmp_path, columns, dtype):
    tensor = torch.randn(3000, 1600)
    shardplan.save({"w": tensor}, tmp_path, planner=split_chunks(1 << 23))
    wide = torch.zeros(3000, 1600, dtype=torch.float64 if dtype == "cast" else torch.float32)
    shardplan.load({"w": wide}, tmp_path, dtype=dtype)
    assert torch.equal(wide.float(), tensor)
    across = torch.zeros(1600, 3000).t()
    shardplan.load({"w": across}, tmp_path)
    assert torch.equal(across, tensor)
    saved = shardplan.open_checkpoint(tmp_path)["w"]
    assert torch.equal(saved[:, 5 : 5 + columns], tensor[:, 5 : 5 + columns])


def test_a_small_budget_of_memory_is_enough(tmp_path):
    tensor = torch.randn(2000, 5000)
    with Pool(max_workers=2, max_bytes=1 << 20) as pool:
        shardplan.save({"w": tensor.t()}, tmp_path, pool=pool)
        target = {"w": torch.zeros(5000, 2000)}
        report = shardplan.load(target, tmp_path, pool=pool)
    assert torch.equal(target["w"], tensor.t())
    assert report.verified == 1


def halves(tensor, row, make):
    """Return blank memory for a tensor's rows before and from ``row`` on, in two shards."""
    low = Chunk((0, 0), (row, tensor.shape[1]))
    high = Chunk((row, 0), (tensor.shape[0] - row, tensor.shape[1]))
    parts = {chunk: make(box(tensor, chunk)) for chunk in (low, high)}
    return Shards(tensor.shape, tensor.dtype, parts)


@pytest.mark.parametrize("make", [torch.empty_like, blank_strided])
@pytest.mark.parametrize("rows", [9, 6000])  # of 4 KiB: less than a block, and more
@pytest.mark.parametrize("wrap", [lambda store: store, CountingStore])
def test_a_chunk_that_several_reads_fill_is_verified(tmp_path, rows, make, wrap):
    tensor = random_tensor(TensorSpec((rows, 1024), "int32"))
    shardplan.save({"w": tensor}, tmp_path)
    target = halves(tensor, rows // 2, make)
    assert shardplan.load({"w": target}, wrap(open_store(tmp_path))).verified == 1
    for chunk, shard in target.parts.items():
        assert torch.equal(shard, box(tensor, chunk))
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    for place in (-1, -rows * 2048, -rows * 2048 - 1):  # at the end, and where the halves meet
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(FormatError, match="checksums do not fit: `w`"):
            shardplan.load({"w": target}, wrap(open_store(tmp_path)))
        data[place] ^= 1


def test_a_chunk_that_is_read_in_part_or_twice_is_not_taken_for_whole(tmp_path):
    tensor = random_tensor(TensorSpec((8, 4), "int32"))
    shardplan.save({"w": tensor}, tmp_path)
    low, high = Chunk((0, 0), (4, 4)), Chunk((4, 0), (4, 4))
    left, right = Chunk((0, 0), (8, 2)), Chunk((0, 2), (8, 2))
    for chunks in ([low], [high], [left, right]):
        parts = {chunk: torch.empty(chunk.sizes, dtype=torch.int32) for chunk in chunks}
        report = shardplan.load({"w": Shards((8, 4), torch.int32, parts)}, tmp_path)
        assert report.verified == 0
        assert all(torch.equal(shard, box(tensor, chunk)) for chunk, shard in parts.items())


def test_small_neighbours_are_read_by_one_call(tmp_path, monkeypatch):
    dtypes = ("float32", "bfloat16", "complex64", "bool", "float8_e4m3fn")
    specs = {f"w{i}": TensorSpec((i % 3 + 1, 5), dtypes[i % 5]) for i in range(2000)}
    saved = {name: random_tensor(spec) for name, spec in specs.items()}
    shardplan.save(saved, tmp_path)
    calls, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(args) or preadv(*args))
    target = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    report = shardplan.load(target, tmp_path)
    assert report.verified == 2000
    assert len(calls) < 20
    assert all(bits(target[name]) == bits(saved[name]) for name in saved)


def test_loads_into_plain_memory_reserve_none_beside_it(tmp_path):
    tensor = torch.randn(2000, 5000)
    shardplan.save({"w": tensor}, tmp_path)
    with Pool(max_workers=2) as pool:
        shardplan.load({"w": torch.zeros(2000, 5000)}, tmp_path, pool=pool)
        assert pool.peak_bytes < 1 << 20  # headers
        shardplan.load({"w": torch.zeros(5000, 2000).t()}, tmp_path, pool=pool)
        assert pool.peak_bytes > 1 << 20


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_large_transposed_tensor_is_filled_by_several_threads(tmp_path, monkeypatch):
    tensor = torch.randn(4096, 4096)  # four blocks
    shardplan.save({"w": tensor}, tmp_path)
    both, store = threading.Barrier(2, timeout=60), reading.Window.fill
    monkeypatch.setattr(reading.Window, "fill", lambda *args: (both.wait(), store(*args)))
    target = torch.zeros(4096, 4096).t()
    assert shardplan.load({"w": target}, tmp_path).verified == 1
    assert torch.equal(target, tensor)


def test_a_checkpoint_is_not_overwritten_unless_asked(tmp_path):
    shardplan.save({"w": torch.zeros(2)}, tmp_path)
    with pytest.raises(ExistsError, match="overwrite=True"):
        shardplan.save({"w": torch.ones(2)}, tmp_path)
    before = set(tmp_path.iterdir())
    shardplan.save({"w": torch.ones(2)}, tmp_path, overwrite=True)
    assert shardplan.restore(tmp_path)["w"].tolist() == [1, 1]
    assert len(set(tmp_path.iterdir())) == len(before) == 2


def test_optimizer_state_comes_back(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    sd = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    shardplan.save(sd, tmp_path)
    found = shardplan.restore(tmp_path)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)


def test_importing_the_package_loads_no_torch():
    code = "import shardplan, sys; assert not {'torch', 'numpy'} & set(sys.modules); shardplan.save"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def test_headers_and_manifest_need_no_torch():
    code = (
        "import sys; from shardplan.io.formats import headers, native; native.manifest\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def test_on_s3_only_the_bytes_asked_for_are_fetched(s3):
    tensor = torch.arange(200_000, dtype=torch.int32).reshape(1000, 200)
    store = open_store(f"s3://{s3.bucket}/reads", **s3.options)
    shardplan.save({"w": tensor, "step": 3}, store, planner=split_chunks(1 << 18))
    target = {"w": torch.zeros_like(tensor), "step": 0}
    shardplan.load(target, store)
    assert torch.equal(target["w"], tensor)
    assert target["step"] == 3
    counting = CountingStore(store)
    saved = shardplan.open_checkpoint(counting)["w"]
    saved[:10]
    counting.clear()
    s3.requests.clear()
    assert torch.equal(saved[500:510], tensor[500:510])
    assert counting.bytes_read() <= 1.1 * 10 * 200 * 4
    shardplan.save({"w": tensor + 1}, store, overwrite=True)
    assert torch.equal(shardplan.restore(store)["w"], tensor + 1)
    assert len(store.list()) == 2


def test_half_a_million_chunks_open_at_once(tmp_path):
    # 512 ranks and 1,000 tensors, written down without their data.
    import time

    from shardplan.io.formats.native.manifest import decode_manifest, encode_manifest
    from shardplan.io.formats.native.write import Written, WrittenFile, assemble
    from shardplan.planning import Mesh, Shard, derive_plans, world_plans

    ranks, count = 512, 1000
    spec = TensorSpec((ranks, 8), "float32", [Shard(0)])
    specs = {f"layers.{i}.weight": spec for i in range(count)}
    plans, metadata = derive_plans(world_plans(specs, Mesh(dp=ranks)))
    size = 8 + 32 * count
    names = [f"shard-{i}.safetensors" for i in range(ranks)]
    written = [Written((WrittenFile(0, name, size, 8, 7),), {}) for name in names]
    data = encode_manifest(assemble(metadata, plans, written, save_id="s"))
    start = time.process_time()
    manifest = decode_manifest(data)
    assert time.process_time() - start < 0.1
    assert manifest.files_of("layers.999.weight").tolist() == list(range(ranks))
    assert (list(manifest.files.names), set(manifest.files.sizes.tolist())) == (names, {size})
    assert len(data) < 100_000


# Plans from anywhere


def reads(*pieces):
    """A plan of reads of `w`: where the chunk starts, its hint, where to, how many."""
    return LoadPlan(
        [
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex("w", (0,)),
                (into,),
                MetadataIndex("w", (at,), hint),
                (0,),
                (count,),
            )
            for at, hint, into, count in pieces
        ]
    )


@pytest.mark.parametrize("hints", [(None, None), (1, 0), (7, 7), (0, 1)])
def test_a_chunk_is_found_by_where_it_starts_whatever_the_hint(tmp_path, hints):
    shardplan.save({"w": torch.arange(8.0)}, tmp_path, planner=split_chunks(16))
    reader, target = Reader(open_source(tmp_path)), {"w": torch.zeros(8)}
    stats = fill(reader, target, reads((0, hints[0], 0, 4), (4, hints[1], 4, 4))).stats
    assert (target["w"].tolist(), stats.verified) == (list(range(8)), 2)


@pytest.mark.parametrize("piece", [(2, None, 0, 2), (3, 0, 0, 1), (4, 1, 0, 5)])
def test_a_read_of_no_saved_chunk_is_refused_before_anything_is_read(tmp_path, piece):
    shardplan.save({"w": torch.arange(8.0)}, tmp_path, planner=split_chunks(16))
    reader, target = Reader(open_source(tmp_path)), {"w": torch.zeros(8)}
    with pytest.raises(PlanError, match="the checkpoint has no such chunk"):
        fill(reader, target, reads((0, 0, 0, 4), piece))
    assert not target["w"].any()


def test_what_was_filled_before_a_failure_was_verified(tmp_path):
    shardplan.save({name: torch.ones(5 << 20) for name in "ab"}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    header = parse_header(file.read_bytes(), file.name, file.stat().st_size)
    with open(file, "r+b") as damaged:
        damaged.seek(header.slots["a"].begin)
        damaged.write(b"oops")
    second = header.slots["b"].begin
    first_read = threading.Event()

    class Cut(CountingStore):
        def read(self, path, ranges):
            if ranges[0][0] >= second:
                first_read.wait(10)
                time.sleep(0.1)
                raise StoreError("read", path, "network gone")
            done = super().read(path, ranges)
            if ranges[-1][0] + ranges[-1][1].nbytes >= second:
                first_read.set()
            return done

    target = {name: torch.zeros(5 << 20) for name in "ab"}
    with pytest.raises(LoadError, match="network gone") as caught:
        shardplan.load(target, Cut(open_store(tmp_path)))
    assert "a" not in caught.value.filled
    assert "a" in caught.value.touched


# Memory that destinations share


def test_destinations_that_overlap_themselves_are_refused_by_key(tmp_path):
    shardplan.save({"w": torch.arange(12.0).reshape(3, 4), "v": torch.ones(2)}, tmp_path)
    good = torch.zeros(2)
    for folded in (
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(6).as_strided((3, 4), (1, 1)),
        torch.zeros(()).expand(3, 4),
    ):
        with pytest.raises(ValueRefusedError, match="`w` has elements that share memory"):
            shardplan.load({"v": good, "w": folded}, tmp_path)
    assert not good.any()
    sparse = torch.zeros(30).as_strided((3, 4), (2, 7))  # interleaved, yet no two are one
    shardplan.load({"w": sparse}, tmp_path)
    assert torch.equal(sparse, torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("planner", [None, split_chunks(16)])
def test_tied_weights_load_if_they_were_saved_alike(tmp_path, format, planner):
    weight, tied = torch.arange(10.0), torch.zeros(10)
    place = tmp_path / "alike"
    shardplan.save({"emb": weight, "head": weight.clone()}, place, format=format, planner=planner)
    shardplan.load({"emb": tied, "head": tied}, place)
    assert torch.equal(tied, weight)
    other = tmp_path / "other"
    shardplan.save({"emb": weight, "head": weight + 1}, other, format=format, planner=planner)
    tied = torch.zeros(10)
    with pytest.raises(ValueRefusedError, match=r"`emb` shares memory with `head`.*different"):
        shardplan.load({"emb": tied, "head": tied}, other)
    assert not tied.any()


def test_views_of_one_buffer_load_unless_they_overlap(tmp_path):
    shardplan.save({"q": torch.ones(4, 2), "k": torch.full((4, 2), 2.0)}, tmp_path)
    fused = torch.zeros(4, 4)
    shardplan.load({"q": fused[:, :2], "k": fused[:, 2:]}, tmp_path)
    assert fused.tolist() == [[1, 1, 2, 2]] * 4
    with pytest.raises(ValueRefusedError, match="`q` shares memory with `k`"):
        shardplan.load({"q": fused[:, :2], "k": fused[:, 1:3]}, tmp_path)
    assert fused.tolist() == [[1, 1, 2, 2]] * 4


def test_a_state_dict_that_cannot_change_is_refused_before_anything_is_read(tmp_path):
    shardplan.save({"w": torch.ones(2), "in": {"step": 3}}, tmp_path)
    tensor = torch.zeros(2)
    for fixed in (
        {"w": tensor, "in": MappingProxyType({"step": 0})},
        MappingProxyType({"w": tensor, "in": MappingProxyType({"step": 0})}),
    ):
        with pytest.raises(ValueRefusedError, match=r"`in\.step` lies in a mappingproxy"):
            shardplan.load(fixed, tmp_path)
    assert not tensor.any()
    model = torch.nn.Linear(1, 1)
    shardplan.save({"m": model, "step": 3}, tmp_path / "m")
    with pytest.raises(ValueRefusedError, match="`step` lies in a mappingproxy"):
        shardplan.load(MappingProxyType({"m": model, "step": 0}), tmp_path / "m")
    shardplan.load(MappingProxyType({"w": tensor, "in": {"step": 0}}), tmp_path)  # nothing to set
    assert tensor.all()


# What is made, and where


def test_restore_makes_dtensors_like_its_target(tmp_path):
    code = (
        "import sys, torch, shardplan, torch.distributed as dist\n"
        "from torch.distributed.tensor import DTensor, Shard, distribute_tensor, empty\n"
        "from torch.distributed.tensor import init_device_mesh\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[1] + '/meet', rank=0,"
        " world_size=1)\n"
        "mesh, w = init_device_mesh('cpu', (1,)), torch.arange(12.0).reshape(4, 3)\n"
        "shardplan.save({'w': w}, sys.argv[1] + '/a')\n"
        "real = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)])\n"
        "meta = DTensor.from_local(torch.empty(4, 3, device='meta'), mesh, [Shard(0)])\n"
        "for target in (real, meta):\n"
        "    found = shardplan.restore(sys.argv[1] + '/a', {'w': target})['w']\n"
        "    assert type(found) is DTensor and found.placements == target.placements, found\n"
        "    assert torch.equal(found.to_local(), w) and found.device.type == 'cpu'\n"
        "assert not real.to_local().any()\n"
        "dist.destroy_process_group()\n"
    )
    run = [sys.executable, "-P", "-W", "ignore", "-c", code, str(tmp_path)]
    subprocess.run(run, check=True, timeout=120)


def test_restore_onto_the_meta_device_is_refused_with_the_remedy(tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(ValueError, match=r"meta device holds no elements.*open_checkpoint"):
        shardplan.restore(tmp_path, device="meta")


def test_reading_while_another_process_overwrites_reads_one_save_or_the_other(tmp_path):
    def state(n):
        return {"w": torch.full((50_000,), float(n)), "n": n}

    shardplan.save(state(0), tmp_path)
    code = (
        "import sys, time, torch, shardplan\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    time.sleep(0.005)\n"  # or a reader that is kept waiting gives up, sixteen saves later
        "    sd = {'w': torch.full((50_000,), float(n)), 'n': n}\n"
        "    shardplan.save(sd, sys.argv[1], overwrite=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-P", "-c", code, str(tmp_path)])
    try:
        seen, end = set(), time.time() + 60
        while len(seen) < 20 and time.time() < end:
            found = shardplan.restore(tmp_path)
            assert (found["w"] == found["n"]).all()
            target = state(-1)
            shardplan.load(target, tmp_path)
            assert (target["w"] == target["n"]).all()
            seen |= {found["n"], target["n"]}
        assert len(seen) >= 20
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize("read", ["load", "restore"])
def test_a_save_that_comes_between_is_read_instead(tmp_path, monkeypatch, read):
    from shardplan.io.formats.native import source as native

    shardplan.save({"w": torch.zeros(3), "n": 0}, tmp_path)
    spots, times = native.NativeSource.find_chunks, [3]

    def late(self, chunks):
        if times[0]:
            times[0] -= 1
            n = 3 - times[0]
            shardplan.save({"w": torch.full((3,), float(n)), "n": n}, tmp_path, overwrite=True)
        return spots(self, chunks)

    monkeypatch.setattr(native.NativeSource, "find_chunks", late)
    target = {"w": torch.full((3,), -1.0), "n": -1}
    if read == "load":
        shardplan.load(target, tmp_path)
    else:
        target = shardplan.restore(tmp_path)
    assert (target["w"].tolist(), target["n"]) == ([3, 3, 3], 3)


def test_a_file_that_is_gone_for_good_is_still_an_error(tmp_path):
    shardplan.save({"w": torch.zeros(3)}, tmp_path)
    next(tmp_path.glob("*.safetensors")).unlink()
    for read in (lambda: shardplan.restore(tmp_path), lambda: shardplan.load({"w": 1}, tmp_path)):
        with pytest.raises((FormatError, PlanError)):
            read()


# What cannot be saved


def test_fields_of_records_are_saved_and_refused_as_destinations(tmp_path):
    records = np.zeros(3, [("a", "i1"), ("b", "f4")])
    records["b"] = [1, 2, 3]
    shardplan.save({"w": records["b"]}, tmp_path)
    assert shardplan.restore(tmp_path)["w"].tolist() == [1, 2, 3]
    with pytest.raises(ValueRefusedError, match=r"`w` is a numpy array .* not aligned"):
        shardplan.load({"w": records["b"]}, tmp_path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_a_shape_and_values_without_an_end_are_refused_by_key(tmp_path):
    endless = [torch.ones(1)]
    endless.append(endless)
    inside = {}
    inside["self"] = inside
    parts = [torch.ones(2), torch.ones(3)]
    for value, why in (
        (torch.nested.nested_tensor(parts), "nested tensor; save the parts"),
        (torch.nested.nested_tensor(parts, layout=torch.jagged), "nested tensor; save the parts"),
        (torch.nn.parameter.UninitializedParameter(), "has no shape"),
        (endless, "contains itself"),
        (inside, "contains itself"),
    ):
        with pytest.raises(RefusedError, match=f"`w` .*{why}"):
            shardplan.save({"ok": torch.ones(1), "w": value}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("wrong", [[1, 2], None, torch.ones(1), 7])
def test_what_is_no_mapping_is_no_state_dict(tmp_path, wrong):
    with pytest.raises(TypeError, match="a state dict is a mapping"):
        shardplan.save(wrong, tmp_path / "x")
    shardplan.save({"w": torch.ones(1)}, tmp_path)
    with pytest.raises(TypeError, match="a state dict is a mapping"):
        shardplan.load(wrong, tmp_path)


def test_all_that_cannot_be_saved_is_told_at_once(tmp_path):
    bad = {
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(1, device="meta"),
        "value": {"f": len},
        "twice": {1: 1, "1": 2},
        "fine": torch.ones(1),
    }
    with pytest.raises(ValueRefusedError) as caught:
        shardplan.save(bad, tmp_path / "x")
    assert set(caught.value.reasons) == {"sparse", "meta", "value.f", "twice.1"}
    for one in ("sparse", "meta", "value", "twice"):  # alone, each is told as ever
        with pytest.raises((RefusedError, ValueRefusedError, PlanError)):
            shardplan.save({one: bad[one]}, tmp_path / "x")


@pytest.mark.parametrize("local", [True, False])
def test_files_that_stage_little_are_written_at_once(tmp_path, local):
    together = threading.Barrier(4, timeout=20)

    class Meeting(CountingStore):
        def write(self, path, parts, **options):
            together.wait()
            return super().write(path, parts, **options)

    inner = open_store(tmp_path if local else "memory://at-once")
    inner.delete(inner.list())
    pool = Pool(max_workers=4, max_bytes=8 << 20)
    shardplan.save({"w": torch.arange(32.0)}, Meeting(inner), planner=split_chunks(32), pool=pool)
    assert len([name for name in inner.list() if name.startswith("shard-")]) == 4


def test_small_tensors_by_the_thousand_are_planned_in_little_time():
    sd = {"layers": {str(i): {"w": torch.ones(8)} for i in range(10_000)}}
    start = time.process_time()
    plan = local_plan(sd)
    assert time.process_time() - start < 1
    assert len(plan.items) == 10_000


def held_arrays(folder):
    rows = np.arange(3 << 20, dtype=np.float32).reshape(-1, 1024)
    np.save(folder / "a.npy", rows)
    return {
        "read-only": np.load(folder / "a.npy", mmap_mode="r"),
        "reversed": rows[::-1],
        "foreign": rows.astype(rows.dtype.newbyteorder()),
    }


@pytest.mark.parametrize("kind", ["read-only", "reversed", "foreign"])
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_an_array_is_not_copied_once_for_each_of_its_chunks(tmp_path, format, kind):
    array = held_arrays(tmp_path)[kind]
    shardplan.save({"warm": array[:1]}, tmp_path / "warm", format=format)
    tracemalloc.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardplan.save({"w": array}, tmp_path / "a", format=format, planner=split_chunks(1 << 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * array.nbytes  # a copy a chunk would be twelve times as much
    assert np.array_equal(shardplan.restore(tmp_path / "a")["w"].numpy(), array)


def test_a_read_only_array_is_saved_from_its_own_memory(tmp_path):
    array = held_arrays(tmp_path)["read-only"]
    assert as_tensor(array).data_ptr() == array.ctypes.data
    assert as_tensor(array[5:, ::2]).numpy().ctypes.data == array[5:, ::2].ctypes.data


Pair = collections.namedtuple("Pair", "a b")


class Names(list):
    pass


@pytest.mark.parametrize("inside", [3, torch.ones(1)], ids=["value", "tensor"])
@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda x: Pair(x, 3), tuple),
        (lambda x: Names([x, 3]), list),
        (lambda x: collections.OrderedDict(a=x), dict),
        (lambda x: collections.defaultdict(list, a=x), dict),
        (lambda x: [Pair(x, 3)], list),
    ],
    ids=["named", "list", "ordered", "default", "nested"],
)
def test_containers_of_other_types_come_back_plain_whatever_is_inside(make, plain, inside):
    value, store = make(inside), open_store(f"memory://{os.urandom(6).hex()}")
    shardplan.save({"x": value}, store)
    found = shardplan.restore(store)["x"]
    assert type(found) is plain
    assert found == value


def test_values_that_are_read_keep_to_the_budget():
    store = open_store(f"memory://{os.urandom(6).hex()}")
    values = {f"b{i}": os.urandom(1 << 17) for i in range(4)}
    shardplan.save(values, store)
    with Pool(max_workers=4, max_bytes=1 << 20) as pool:
        assert shardplan.restore(store, pool=pool) == values
        assert 1 << 17 <= pool.peak_bytes <= 1 << 20


def test_an_error_tells_programs_whether_to_overwrite(tmp_path):
    shardplan.save({"step": 1}, tmp_path)
    with pytest.raises(ExistsError) as caught:
        shardplan.save({"step": 2}, tmp_path)
    again = pickle.loads(pickle.dumps(caught.value))
    for error in (caught.value, again):
        assert (error.reason, error.can_overwrite) == (f"{tmp_path} holds a checkpoint", True)
        assert str(error) == f"{tmp_path} holds a checkpoint; pass overwrite=True to replace it"


@pytest.mark.parametrize("ranks", ["", "1000"])
def test_one_thread_reads_large_blocks_in_one_go_and_holds_no_more_of_others(
    tmp_path, monkeypatch, ranks
):
    plans, real = [], reading.fetch_plan

    def spy(*args, **options):
        plans.append(real(*args, **options))
        return plans[-1]

    monkeypatch.setattr(reading, "fetch_plan", spy)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)  # so many that each has one thread
    size, limit = (2048, 3072), 16 << 20  # 6 MiB each, and what a task has before the last block
    sd = {f"{n}{kind}": torch.full(size, n, dtype=torch.uint8) for n in range(6) for kind in "pt"}
    shardplan.save(sd, tmp_path)
    target = {name: torch.zeros_like(tensor) for name, tensor in sd.items()}
    target |= {name: tensor.T.contiguous().T for name, tensor in target.items() if "t" in name}
    shardplan.load(target, tmp_path)
    assert all(torch.equal(target[name], tensor) for name, tensor in sd.items())
    (plan,) = plans
    assert (plan.access.is_single, len(plan.tasks)) == ((True, 2) if ranks else (False, 5))
    for task in plan.tasks:
        mine = np.zeros(len(plan.blocks), bool)
        mine[task] = True
        held = mine & ~plan.large if ranks else mine
        assert 0 < plan.nbytes[held].sum() <= limit + 6 * 2**20
    assert plan.large.sum() == 6
