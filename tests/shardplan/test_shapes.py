"""Planners that change shapes, carried out: bits against torch's operations on whole tensors."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import shardplan
from shardplan._offers import PlanCache
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import Pool, ValueRefusedError, Window
from shardplan.io.errors import FormatError
from shardplan.io.execute import streaming
from shardplan.io.execute.pieces import Origin, Piece
from shardplan.io.stores.base import open_store
from shardplan.planning import (
    Mesh,
    PlanError,
    RefusedError,
    TensorSpec,
    cast,
    chain,
    concat,
    flatten,
    inverse,
    load_plan,
    local_plan,
    pad,
    permute,
    reshape,
    split_chunks,
    stack,
    trim,
)
from shardplan.planning.geometry import Axes, Cut
from shardplan.planning.passes.base import run_pass
from shardplan.planning.storage import BLOCK_BYTES, split_tensors
from shardplan.planning.testing.strategies import save_plans

TESTS = Path(__file__).parents[1]
FORMATS = ["safetensors", "dcp", "hf", "torch"]


def script(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), TESTS / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


planning, parts = script("planning/passes/test_shapes"), script("ranks/parts")


def fresh(name):
    store = open_store(f"memory://shapes/{name}")
    store.delete(store.list())
    return store


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def as_torch(arrays, dtype):
    return {name: torch.from_numpy(np.array(array)).to(dtype) for name, array in arrays.items()}


@st.composite
def planners(draw, tensors, most=3):
    """A chain of passes, and the tensors after it; those without elements are left out."""
    passes, wanted = [], tensors
    for number in range(draw(st.integers(1, most))):
        step, wanted = draw(planning.steps(wanted, number))
        passes.append(step)
    return chain(*passes), wanted


def strided(tensor, order):
    """Return equal elements in memory whose axes lie in another order."""
    order = [axis for axis in order if axis < tensor.ndim]
    back = sorted(range(tensor.ndim), key=order.__getitem__)
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


WHOLE = st.fixed_dictionaries(dict.fromkeys(["a", "b", "e.0.w", "e.1.w"], planning.SHAPES)).map(
    lambda shapes: shapes | {"e.1.w": shapes["e.0.w"]}
)


# ---- One process


@given(st.data(), st.sampled_from(FORMATS))
@settings(deadline=None)
def test_a_save_and_a_load_are_operations_on_whole_tensors(data, format):
    arrays = planning.tensors_of(data.draw(WHOLE))
    planner, wanted = data.draw(planners(arrays))
    dtype = data.draw(st.sampled_from([torch.int16, torch.float32, torch.bfloat16]))
    order = data.draw(st.permutations(range(3)))
    state = {n: strided(t, order) for n, t in as_torch(arrays, dtype).items()}
    (plan,) = run_pass(planner, (local_plan(state),))
    assume(format not in FORMATS[2:] or not split_tensors(plan))  # cut, and put together again
    store = fresh("whole") if format != "torch" else fresh("whole").url + "/x.pt"
    shardplan.save(state, store, planner=planner, format=format, overwrite=True)
    assert_same(flatten(shardplan.restore(store))[0], as_torch(wanted, dtype))

    expected = as_torch(planning.held_values(plan, arrays), dtype)
    order = data.draw(st.permutations(range(3)))
    got = {name: strided(torch.full_like(t, -1), order) for name, t in state.items()}
    needed = load_plan(shardplan.open_checkpoint(store).metadata, plan).items.numel.sum()
    report = shardplan.load(got, store, planner=planner)
    assert_same(got, expected)
    assert report.bytes_needed == needed * dtype.itemsize
    assert report.bytes_unverified == 0 or format in ("dcp", "hf", "torch") or len(expected)

    cast_to = {name: torch.full_like(t, -1, dtype=torch.float64) for name, t in got.items()}
    shardplan.load(cast_to, store, planner=planner, dtype="cast")
    assert_same(cast_to, {name: t.to(torch.float64) for name, t in expected.items()})


@given(st.data(), st.sampled_from(FORMATS), st.sampled_from(FORMATS))
@settings(deadline=None)
def test_a_conversion_through_a_planner_is_a_save_through_it(data, format, other):
    arrays = planning.tensors_of(data.draw(WHOLE))
    planner, wanted = data.draw(planners(arrays))
    state = as_torch(arrays, torch.float32)
    ends = {"torch": "/x.pt"}
    a, b = (fresh(n).url + ends.get(f, "") for n, f in (("from", format), ("into", other)))
    (plan,) = run_pass(planner, (local_plan(state),))
    assume(other not in FORMATS[2:] or not split_tensors(plan))
    cut = split_chunks(data.draw(st.sampled_from([8, 64]))) if format in FORMATS[:2] else None
    shardplan.save(state, a, format=format, planner=cut)
    mesh = data.draw(st.sampled_from([None, Mesh(dp=2)])) if other in FORMATS[:2] else None
    wide = data.draw(st.sampled_from([None, "float64", "bfloat16"]))
    casting = [planner] if wide is None else [planner, cast(wide)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "read_boxes", out_of_turn)
        report = shardplan.convert(a, b, format=other, planner=casting, mesh=mesh)
    dtype = torch.float32 if wide is None else getattr(torch, wide)
    assert_same(flatten(shardplan.restore(b))[0], as_torch(wanted, dtype))
    moved = load_plan_bytes(state, planner)
    if format == "safetensors":
        assert report.bytes_read >= moved


def out_of_turn(metadata, boxes):
    """What a conversion calls for boxes that its plan does not have."""
    raise AssertionError(f"{boxes} were not planned")


def load_plan_bytes(state, planner):
    (plan,) = run_pass(planner, (local_plan(state),))
    items = plan.items.take(~plan.items.is_fill)
    return int(items.box_sizes.prod(axis=1).sum()) * 4


@given(st.data())
@settings(deadline=None)
def test_a_checkpoint_is_seen_as_the_state_dict_that_its_planner_saved(data):
    arrays = planning.tensors_of(data.draw(WHOLE))
    planner, _ = data.draw(planners(arrays))
    try:
        back = inverse(planner)
    except ValueError:
        assume(False)
    state = as_torch(arrays, torch.float32) | {"step": 7}
    store = fresh("seen")
    shardplan.save(state, store, planner=planner)
    (plan,) = run_pass(planner, (local_plan(state),))
    assume(plan.left_out is None)
    assert "chain" in repr(back)
    seen = shardplan.open_checkpoint(store, planner=planner)
    assert set(seen) == set(state)
    assert seen["step"] == 7
    assert_same({name: seen[name].read() for name in arrays}, as_torch(arrays, torch.float32))
    for name, tensor in as_torch(arrays, torch.float32).items():
        if tensor.ndim:
            axis = data.draw(st.integers(0, tensor.ndim - 1))
            low, high = sorted(data.draw(st.tuples(*[st.integers(0, tensor.shape[axis])] * 2)))
            index = (*[slice(None)] * axis, slice(low, high, data.draw(st.integers(1, 3))))
            assert torch.equal(seen[name][index], tensor[index])
    restored = shardplan.restore(store, planner=planner)
    assert restored.pop("step") == 7
    assert_same(flatten(restored)[0], as_torch(arrays, torch.float32))


@given(st.data())
@settings(deadline=None)
def test_any_block_of_a_piece_has_the_elements_of_the_operation(data):
    """However small blocks are, and whether strides can say where the elements are or not."""
    box = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(box))))
    shape = planning.merged(data.draw, [box[axis] for axis in order])
    array = torch.arange(float(torch.Size(box).numel())).reshape(box)
    wanted = array.permute(order).reshape(shape)
    memory = strided(array, data.draw(st.permutations(range(len(box)))))
    where = Cut((0,) * len(box), box, Axes(box, order), (0,) * len(shape), shape)
    piece = Piece("w", "float32", where.chunk_offsets, shape, shape, (Origin(memory, where),))
    nbytes = 4 * data.draw(st.integers(1, 12))
    assert b"".join(piece.blocks(nbytes)) == wanted.numpy().tobytes()
    target = strided(torch.zeros(box), data.draw(st.permutations(range(len(box)))))
    window = Window(target, shape, where.axes)
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = [data.draw(st.integers(1, n - a)) for n, a in zip(shape, low, strict=True)]
    inside = tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))
    window.fill(
        low, size, np.frombuffer(wanted[inside].numpy().tobytes(), np.uint8).copy(), "float32"
    )
    expected = torch.zeros(shape)
    expected[inside] = wanted[inside]
    assert torch.equal(target.permute(order).reshape(shape), expected)


# ---- Many ranks


def held_by(plan, tensors, make=torch.clone):
    """Return the state dict of a rank that holds what its plan says."""
    chunks = {}
    for item in plan.items:
        chunks.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
    return {name: parts.Shards(tensors[name], held, make) for name, held in chunks.items()}


@given(st.data(), st.sampled_from(FORMATS[:2]), st.sampled_from([True, False, "auto"]))
@settings(deadline=None)
def test_any_world_saves_and_any_other_loads_through_a_planner(data, format, share):
    arrays = planning.tensors_of(data.draw(WHOLE))
    planner, wanted = data.draw(planners(arrays))
    specs = {name: TensorSpec(array.shape) for name, array in arrays.items()}
    ours, theirs = data.draw(save_plans(tensors=specs)), data.draw(save_plans(tensors=specs))
    caches = [PlanCache() for _ in ours]
    order = data.draw(st.permutations(range(3)))
    store = fresh("ranks")

    def save(comm, tensors):
        mine = held_by(ours[comm.rank], tensors, lambda part: strided(part, order))
        options = {"planner": planner, "format": format, "comm": comm, "overwrite": True}
        return shardplan.save(mine, store, cache=caches[comm.rank], **options)

    def load(comm, tensors, expected):
        mine = held_by(theirs[comm.rank], tensors, lambda part: strided(part * 0 - 1, order))
        options = {"planner": planner, "comm": comm, "share_reads": share}
        report = shardplan.load(mine, store, **options)
        for name, held in mine.items():
            for chunk, part in held.parts.items():
                assert torch.equal(part, parts.box(expected[comm.rank][name], chunk))
        return report

    after = run_pass(planner, theirs)
    for scale in (1, 2):  # the second time, the plan is known
        tensors = {name: scale * tensor for name, tensor in as_torch(arrays, torch.float32).items()}
        expected = [
            as_torch(planning.held_values(plan, tensors_as_arrays(tensors)), torch.float32)
            for plan in after
        ]
        done = run_ranks(len(ours), lambda comm, tensors=tensors: save(comm, tensors), timeout=60)
        assert scale == 1 or len(ours) == 1 or {report.how for report in done} == {"cached"}
        saved = flatten(shardplan.restore(store))[0]
        assert saved.keys() == wanted.keys()
        for name, array in as_torch(wanted, torch.float32).items():
            is_padding = array == 7  # and maybe an element that is 7
            assert torch.equal(saved[name][~is_padding], (array * scale)[~is_padding])
        run_ranks(
            len(theirs),
            lambda comm, tensors=tensors, expected=expected: load(comm, tensors, expected),
            timeout=60,
        )


def tensors_as_arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


# ---- Cases


def rotary(name, heads, half, width):
    """Lay the rows of each head half by half instead of in pairs."""
    rows = (heads * 2 * half, width)
    return chain(
        reshape(name, (heads, half, 2, width), of=rows),
        permute(name, (0, 2, 1, 3)),
        reshape(name, rows, of=(heads, 2, half, width)),
    )


LARGE = {  # several blocks of 16 MiB each, which no strides describe in two cases
    "transposed": (permute("w", (1, 0)), lambda w: w.T),
    "rotary": (
        rotary("w", 3, 700, 1201),
        lambda w: w.view(3, 700, 2, 1201).transpose(1, 2).reshape(w.shape),
    ),
    "flattened": (
        [permute("w", (1, 0)), reshape("w", (-1,), of=(1201, 4200))],
        lambda w: w.T.reshape(-1),
    ),
}


@pytest.mark.parametrize("case", LARGE)
@pytest.mark.parametrize("format", FORMATS)
def test_large_tensors_pass_block_by_block(tmp_path, case, format):
    planner, operation = LARGE[case]
    tensor = torch.arange(4200.0 * 1201).view(4200, 1201)
    path = tmp_path / ("x.pt" if format == "torch" else "x")
    shardplan.save({"w": tensor}, path, planner=planner, format=format)
    assert torch.equal(shardplan.restore(path)["w"], operation(tensor))
    got = {"w": torch.zeros_like(tensor)}
    with Pool(max_workers=2) as pool:
        report = shardplan.load(got, path, planner=planner, pool=pool)
        assert pool.peak_bytes <= 5 * BLOCK_BYTES
    assert torch.equal(got["w"], tensor)
    assert report.verified == (format != "hf")


@pytest.mark.parametrize("case", LARGE)
def test_a_conversion_reads_each_block_of_the_old_checkpoint_once(tmp_path, case):
    planner, operation = LARGE[case]
    tensor = torch.arange(4200.0 * 1201).view(4200, 1201)
    shardplan.save({"w": tensor, "b": tensor[:9]}, tmp_path / "a")
    for format in FORMATS[:3]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streaming, "read_boxes", out_of_turn)
            path = tmp_path / format
            report = shardplan.convert(tmp_path / "a", path, planner=planner, format=format)
        assert torch.equal(shardplan.restore(path)["w"], operation(tensor))
        assert report.verified == 2


def test_damage_is_found_in_a_chunk_that_is_read_with_other_axes(tmp_path):
    tensor = torch.arange(4200.0 * 1201).view(4200, 1201)
    for case, (planner, _) in LARGE.items():
        shardplan.save({"w": tensor}, tmp_path / case, planner=planner)
        (file,) = (tmp_path / case).glob("shard-*")
        data = bytearray(file.read_bytes())
        data[-5000] ^= 1
        file.write_bytes(data)
        with pytest.raises(FormatError, match="checksum"):
            shardplan.load({"w": torch.zeros_like(tensor)}, tmp_path / case, planner=planner)


def test_fused_and_stacked_tensors_are_whole_in_formats_that_need_it(tmp_path):
    state = {f"{n}.w": torch.full((2, 3), float(n)) for n in range(3)} | {"v": torch.ones(4, 3)}
    planner = [
        stack("#.w", into="w", axis=1),
        reshape("w", (6, 3)),
        concat(["w", "v"], into="wv"),
    ]
    expected = torch.cat(
        [torch.stack([state[f"{n}.w"] for n in range(3)], 1).view(6, 3), state["v"]]
    )
    for path in (tmp_path / "x.pt", tmp_path / "hf"):
        shardplan.save(state, path, planner=planner, format="torch" if path.suffix else "hf")
        assert torch.equal(shardplan.restore(path)["wv"], expected)
    assert torch.equal(torch.load(tmp_path / "x.pt", weights_only=True)["wv"], expected)
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("wv"), expected)
    with pytest.raises(RefusedError, match="`v` would be split"):
        shardplan.save(state, tmp_path / "cut", planner=split_chunks(8), format="hf")


def test_tied_tensors_stay_one_if_they_are_changed_alike(tmp_path):
    tied = torch.arange(6.0).view(2, 3)
    state = {"embed": tied, "head": tied, "other": tied}
    both = [permute("embed", (1, 0)), permute("head", (1, 0))]
    shardplan.save(state, tmp_path / "a", planner=both, format="hf")
    with safe_open(tmp_path / "a/model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["embed", "other"]
    assert torch.equal(shardplan.restore(tmp_path / "a")["head"], tied.T)
    shardplan.save(state, tmp_path / "t.pt", format="torch")
    report = shardplan.convert(tmp_path / "t.pt", tmp_path / "b", format="hf", planner=both)
    assert report.tied == {"head": "embed"}
    assert torch.equal(shardplan.restore(tmp_path / "b")["other"], tied)


def test_tied_tensors_are_filled_by_the_one_that_was_saved(tmp_path):
    planner = [permute("embed", (1, 0)), permute("head", (1, 0))]
    shardplan.save({"embed": torch.arange(6.0).view(2, 3)}, tmp_path, planner=planner[0])
    memory = torch.zeros(2, 3)
    report = shardplan.load({"embed": memory, "head": memory}, tmp_path, planner=planner)
    assert report.tied == {"head": "embed"}
    assert memory.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    meta = torch.zeros(2, 3, device="meta")
    restored = shardplan.restore(tmp_path, {"embed": meta, "head": meta}, planner=planner)
    assert restored["embed"] is restored["head"]


def test_memory_that_is_shared_needs_equal_elements(tmp_path):
    w = torch.arange(6.0).view(2, 3)
    planner = [permute("a", (1, 0)), permute("b", (1, 0))]
    shardplan.save({"a": w, "b": w.clone()}, tmp_path / "same", planner=planner)
    shardplan.save({"a": w, "b": w + 1}, tmp_path / "other", planner=planner)
    memory = torch.zeros(2, 3)
    shardplan.load({"a": memory, "b": memory}, tmp_path / "same", planner=planner)
    assert torch.equal(memory, w)
    with pytest.raises(ValueRefusedError, match="shares memory"):
        shardplan.load({"a": memory, "b": memory}, tmp_path / "other", planner=planner)


def test_a_tensor_without_memory_is_not_filled_in_part(tmp_path):
    planner = trim("w", to=2, of=3)
    shardplan.save({"w": torch.arange(3.0)}, tmp_path, planner=planner)
    assert shardplan.restore(tmp_path)["w"].tolist() == [0, 1]
    filled = {"w": torch.full((3,), 9.0)}
    shardplan.load(filled, tmp_path, planner=planner)
    assert filled["w"].tolist() == [0, 1, 9]
    meta = {"w": torch.zeros(3, device="meta")}
    with pytest.raises(ValueRefusedError, match="only a part"):
        shardplan.load(meta, tmp_path, planner=planner)
    for target in (None, meta):
        with pytest.raises(PlanError, match="`w` would be filled only in part"):
            shardplan.restore(tmp_path, target, planner=planner)
    seen = shardplan.open_checkpoint(tmp_path, planner=planner)["w"]
    assert seen[:2].tolist() == [0, 1]
    with pytest.raises(PlanError, match="leaves out a part of `w`"):
        seen.read()


def test_a_planner_without_an_inverse_asks_for_a_target(tmp_path):
    shardplan.save(
        {"a": torch.ones(2), "b": torch.ones(3)}, tmp_path, planner=concat(["a", "b"], "ab")
    )
    with pytest.raises(ValueError, match=r"concat\(\{name: length\}\); or pass a target"):
        shardplan.restore(tmp_path, planner=concat(["a", "b"], "ab"))
    target = {"a": TensorSpec((2,)), "b": TensorSpec((3,))}
    found = shardplan.restore(tmp_path, target, planner=concat(["a", "b"], "ab"))
    assert found["b"].tolist() == [1, 1, 1]


def test_a_background_save_and_a_comparison_of_replicas_know_both_frames(tmp_path):
    planner = chain(permute("w", (1, 0)), pad("w", axis=0, to=4))

    def save(comm, scale):
        state = {"w": torch.arange(6.0).view(2, 3) * scale(comm.rank)}
        options = {"planner": planner, "comm": comm, "verify_replicas": True}
        return shardplan.async_save(state, tmp_path, overwrite=True, **options).result()

    run_ranks(2, lambda comm: save(comm, lambda rank: 1), timeout=60)
    assert shardplan.restore(tmp_path)["w"].tolist() == [[0, 3], [1, 4], [2, 5], [0, 0]]
    with pytest.raises(CheckpointError, match="`w`"):
        run_ranks(2, lambda comm: save(comm, lambda rank: 1 + rank), timeout=60)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float8_e4m3fn", "complex64"])
def test_padding_has_any_dtype(tmp_path, dtype):
    tensor = torch.ones(2).to(getattr(torch, dtype))
    for format in FORMATS[:2]:
        path = tmp_path / f"{format}-{dtype}"
        shardplan.save({"w": tensor}, path, planner=pad("w", to=4, value=1), format=format)
        found = shardplan.restore(path)["w"]
        assert found.dtype == tensor.dtype
        assert found.to(torch.complex64).tolist() == [1, 1, 1, 1]


# ---- Real ranks


@pytest.mark.slow
def test_on_four_ranks_fused_models_load_and_save_unfused_checkpoints(tmp_path):
    """FSDP2 with tensor parallelism; parts on different ranks; torch's own save and load."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", TESTS / "ranks/shapes.py"]
    logs = [(tmp_path / f"log-{rank}").open("w+") for rank in range(4)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "4", tmp_path / "store", tmp_path],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    assert codes == [0] * 4, "\n".join((tmp_path / f"log-{r}").read_text() for r in range(4))
    for rank in range(4):
        told = json.loads((tmp_path / f"told-{rank}").read_text())
        wrong = {(case, what): names for case, all in told.items() for what, names in all.items()}
        assert len(wrong) == 15
        assert not any(wrong.values()), wrong
