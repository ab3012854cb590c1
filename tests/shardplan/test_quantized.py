"""Checkpoints of block-quantised tensors, read as what they stand for."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import shardplan
from shardplan.cli.app import app
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import FormatError, Pool
from shardplan.io.execute import dequantize as reading
from shardplan.planning import (
    Mesh,
    PlanError,
    RefusedError,
    Shard,
    TensorSpec,
    chain,
    concat,
    dequantize,
    global_plan,
    local_plan,
    permute,
    rename,
    where,
    world_plans,
)
from shardplan.planning.testing.strategies import chunks

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def fp8(rows, columns, block, seed=0):
    """Return elements, scales, and, element by element, what they stand for."""
    torch.manual_seed(seed)
    values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(math.ceil(rows / block[0]), math.ceil(columns / block[1])) + 0.1
    whole = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            whole[i, j] = values[i, j].float() * scales[i // block[0], j // block[1]]
    return values, scales, whole


def mxfp4(experts, rows, groups):
    """Return bytes, exponents, and, element by element, what they stand for."""
    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (experts, rows, groups), dtype=torch.uint8)
    whole = torch.empty(experts, groups * 32, rows)
    for e in range(experts):
        for r in range(rows):
            for k in range(groups * 32):
                byte = int(blocks[e, r, k // 32, k % 32 // 2])
                number = FP4[byte >> 4 if k % 2 else byte & 15]
                whole[e, k, r] = number * 2.0 ** (int(scales[e, r, k // 32]) - 127)
    return blocks, scales, whole


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a folder with a quantised model, and what its tensors stand for."""
    folder = tmp_path_factory.mktemp("quantised")
    values, scales, whole = fp8(19, 23, (4, 8))
    blocks, exponents, experts = mxfp4(3, 5, 2)
    norm = torch.randn(7).bfloat16()
    first = {"layer.weight": values, "experts.up_scales": exponents, "norm": norm}
    second = {"layer.weight_scale_inv": scales, "experts.up_blocks": blocks}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weights = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    config = {"quantization_config": {"weight_block_size": [4, 8]}, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "tiny"}))
    return folder, {"layer.weight": whole, "experts.up": experts, "norm": norm}


def blank(expected, dtype):
    return {
        name: torch.zeros(t.shape, dtype=t.dtype if name == "norm" else dtype)
        for name, t in expected.items()
    }


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_quantised_model_is_loaded_as_what_it_stands_for(model, dtype):
    folder, expected = model
    state = blank(expected, getattr(torch, dtype))
    report = shardplan.load(state, folder, planner=dequantize(dtype))
    same(state, expected)
    assert not report.unexpected  # scales are no tensors that nobody wants
    assert not report.missing


def test_mxfp4_is_what_transformers_makes_of_it(model):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, expected = model
    stored = shardplan.restore(folder)
    theirs = convert_moe_packed_tensors(stored["experts.up_blocks"], stored["experts.up_scales"])
    state = {"experts.up": torch.zeros(expected["experts.up"].shape, dtype=torch.bfloat16)}
    shardplan.load(state, folder, planner=[dequantize()])
    assert torch.equal(state["experts.up"], theirs)


def test_fp8_is_what_transformers_makes_of_it(tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values, scales, _ = fp8(256, 128, (128, 128))
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(256, 128)}
    shardplan.load(state, tmp_path, planner=dequantize("float32"))
    assert torch.equal(state["w"], Fp8Dequantize(None)._dequantize_one(values, scales))


def test_without_the_pass_what_is_stored_is_loaded(model):
    folder, _ = model
    stored = shardplan.restore(folder)
    assert stored["layer.weight"].dtype == torch.float8_e4m3fn
    assert set(stored) > {"layer.weight_scale_inv", "experts.up_blocks", "experts.up_scales"}
    with pytest.raises(PlanError, match=r"layer\.weight"):
        shardplan.load({"layer.weight": torch.zeros(19, 23)}, folder)


class Boxes:
    """What one rank holds of a tensor: boxes of its own memory."""

    def __init__(self, shape, dtype, held):
        self.shape, self.dtype = shape, dtype
        self.parts = {chunk: torch.zeros(chunk.sizes, dtype=dtype) for chunk in held}

    def __create_chunk_list__(self):
        return list(self.parts)

    def __get_tensor_shard__(self, index):
        return next(t for c, t in self.parts.items() if c.offsets == tuple(index.offset))

    def check(self, whole):
        for chunk, part in self.parts.items():
            places = zip(chunk.offsets, chunk.sizes, strict=True)
            assert torch.equal(
                part, whole[tuple(slice(o, o + n) for o, n in places)].to(part.dtype)
            )


@given(st.data())
def test_any_box_is_read_with_the_scales_that_concern_it(model, data):
    folder, expected = model
    part = data.draw(st.sampled_from([7, 100, 1 << 20]))
    state = {}
    for name in ("layer.weight", "experts.up"):
        shape = tuple(expected[name].shape)
        state[name] = Boxes(shape, torch.bfloat16, [data.draw(chunks(shape))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PART", part)
        shardplan.load(state, folder, planner=dequantize())
    for name, boxes in state.items():
        boxes.check(expected[name])


@pytest.mark.parametrize("share", [True, False])
def test_ranks_read_their_parts_and_may_read_for_each_other(model, share):
    folder, expected = model
    specs = {
        "layer.weight": TensorSpec((19, 23), "bfloat16", [Shard(1)]),
        "experts.up": TensorSpec((3, 64, 5), "bfloat16", [Shard(1)]),
        "norm": TensorSpec((7,), "bfloat16"),
    }
    plans = world_plans(specs, Mesh(tp=3))

    def one(comm):
        state = {"norm": torch.zeros(7, dtype=torch.bfloat16)}
        for item in plans[comm.rank].items:
            if item.index.fqn != "norm":
                chunk, size = item.tensor_data.chunk, item.tensor_data.size
                state[item.index.fqn] = Boxes(size, torch.bfloat16, [chunk])
        shardplan.load(state, folder, planner=dequantize(), comm=comm, share_reads=share)
        return state

    for state in run_ranks(3, one):
        assert torch.equal(state["norm"], expected["norm"])
        state["layer.weight"].check(expected["layer.weight"])
        state["experts.up"].check(expected["experts.up"])


@pytest.mark.parametrize("part", [50, 1 << 20])
def test_an_open_checkpoint_shows_and_reads_what_the_tensors_stand_for(model, part, monkeypatch):
    folder, expected = model
    monkeypatch.setattr(reading, "PART", part)
    same(shardplan.restore(folder, planner=dequantize("float32")), expected)
    checkpoint = shardplan.open_checkpoint(folder, planner=dequantize("float32"))
    assert list(checkpoint) == sorted(expected)
    for index in [(slice(None, None, 3), 4), (slice(2, 17, 5), slice(1, None, 4)), -1]:
        wanted = expected["layer.weight"][index]
        assert torch.equal(checkpoint["layer.weight"][index], wanted)
    wanted = expected["experts.up"][1, ::7, ::2]
    assert torch.equal(checkpoint["experts.up"][1, ::7, ::2], wanted)


def test_parts_of_a_quantised_tensor_are_told_apart_by_shape_passes(model, tmp_path):
    folder, expected = model
    state = {"x": torch.zeros(4, 23).bfloat16(), "y": torch.zeros(23, 15).bfloat16()}
    planner = [
        permute("y", (1, 0)),
        concat({"x": 4, "y": 15}, into="layer.weight"),
        dequantize(),
    ]
    shardplan.load(state, folder, planner=planner)
    whole = expected["layer.weight"].bfloat16()
    same(state, {"x": whole[:4], "y": whole[4:].t()})
    back = [dequantize(), permute("experts.up", (2, 0, 1))]
    shardplan.convert(folder, tmp_path / "b", planner=back)
    found = shardplan.restore(tmp_path / "b")["experts.up"]
    assert torch.equal(found, expected["experts.up"].permute(2, 0, 1).bfloat16())


def test_other_passes_see_what_the_tensors_stand_for(model):
    folder, expected = model
    state = {"w": torch.zeros(19, 23, dtype=torch.bfloat16)}
    shardplan.load(state, folder, planner=[rename({"w": "layer.weight"}), dequantize()])
    assert torch.equal(state["w"], expected["layer.weight"].bfloat16())


def test_other_dtypes_and_devices_are_cast_as_from_any_checkpoint(model):
    folder, expected = model
    state = {"layer.weight": torch.zeros(23, 19, dtype=torch.float64).t()}
    shardplan.load(state, folder, planner=dequantize(), dtype="cast")
    assert torch.equal(state["layer.weight"], expected["layer.weight"].bfloat16().double())


# ---- conversions


@pytest.mark.parametrize("processes", [1, 2])
def test_a_conversion_writes_what_tensors_stand_for_and_a_config_that_says_so(
    model, tmp_path, processes
):
    folder, expected = model

    def one(comm):
        return shardplan.convert(
            folder, tmp_path / "b", format="hf", planner=dequantize(), comm=comm, max_shard_size=500
        )

    reports = run_ranks(processes, one)
    found = shardplan.restore(tmp_path / "b")
    same(found, expected)
    assert found["layer.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config == {"model_type": "tiny", "torch_dtype": "bfloat16"}
    assert reports[0].tensors == 3


def test_a_conversion_shards_casts_and_renames(model, tmp_path):
    folder, expected = model
    planner = [
        dequantize("float32"),
        shardplan.planning.select("layer.*"),
        rename({"layer.weight": "a.weight"}),
    ]
    shardplan.convert(folder, tmp_path / "b", planner=planner, mesh=Mesh(dp=3))
    checkpoint = shardplan.open_checkpoint(tmp_path / "b")
    assert list(checkpoint) == ["a.weight"]
    assert len(checkpoint.metadata.state_dict_metadata["a.weight"].chunks) == 3
    assert torch.equal(checkpoint["a.weight"].read(), expected["layer.weight"])


def test_a_checkpoint_that_was_converted_quantised_is_dequantised_later(model, tmp_path):
    folder, expected = model
    shardplan.convert(folder, tmp_path / "b", mesh=Mesh(dp=2))
    state = {"experts.up": torch.zeros(expected["experts.up"].shape, dtype=torch.bfloat16)}
    state["layer.weight"] = torch.zeros(19, 23, dtype=torch.bfloat16)
    with pytest.raises(RefusedError, match=r"dequantize\(block="):
        shardplan.load(state, tmp_path / "b", planner=dequantize())
    report = shardplan.load(state, tmp_path / "b", planner=dequantize(block=(4, 8)))
    same(state, {name: expected[name] for name in state})
    assert report.bytes_unverified == 0  # nor of a row of scales that concerns two chunks


@pytest.mark.parametrize("key", ["layer.weight", "experts.up_blocks", "experts.up_scales"])
def test_a_conversion_checks_every_chunk_that_it_reads(model, tmp_path, key, monkeypatch):
    folder, expected = model
    shardplan.convert(folder, tmp_path / "b", mesh=Mesh(dp=2))
    monkeypatch.setattr(reading, "PART", 50)
    planner = dequantize(block=(4, 8))
    report = shardplan.convert(tmp_path / "b", tmp_path / "c", format="hf", planner=planner)
    same(shardplan.restore(tmp_path / "c"), expected)
    assert report.verified == 10  # two of each tensor that is stored
    damage(tmp_path / "b", key)
    with pytest.raises(FormatError, match="checksum"):
        shardplan.convert(tmp_path / "b", tmp_path / "d", format="hf", planner=planner)


def damage(folder, key):
    """Change the last byte of a tensor in one of the files that hold it."""
    files = (f for f in folder.iterdir() if f.suffix == ".safetensors")
    file = next(f for f in files if key in load_file(f))
    data = bytearray(file.read_bytes())
    stored = load_file(file)[key].view(torch.uint8).numpy().tobytes()
    data[bytes(data).index(stored) + len(stored) - 1] ^= 1
    file.write_bytes(data)


def test_memory_is_bounded_however_large_a_tensor_is(tmp_path, monkeypatch):
    values = torch.ones(1024, 1024).to(torch.float8_e4m3fn)
    save_file({"w": values, "w_scale_inv": torch.full((8, 8), 0.5)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(reading, "PART", 1 << 14)
    monkeypatch.setattr(reading, "PART_BYTES", 16 << 14)
    made = []
    whole = reading.dequantized_part
    monkeypatch.setattr(
        reading, "dequantized_part", lambda *args: made.append(whole(*args)) or made[-1]
    )
    state = {"w": torch.zeros(1024, 1024, dtype=torch.bfloat16)}
    with Pool(max_bytes=1 << 19) as pool:
        shardplan.load(state, tmp_path, planner=dequantize(), pool=pool)
        assert pool.peak_bytes <= 1 << 19
    assert torch.equal(state["w"], torch.full((1024, 1024), 0.5).bfloat16())
    assert len(made) == 64
    assert max(part.numel() for part in made) <= 1 << 14


def test_progress_ends_with_all_bytes_as_they_are_wanted(model):
    folder, expected = model
    told = []
    state = blank(expected, torch.bfloat16)
    shardplan.load(state, folder, planner=dequantize(), progress=lambda *n: told.append(n))
    assert told[-1] == (sum(t.nbytes for t in state.values()),) * 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_the_command_line_converts_it_with_the_config_of_another_model(model, tmp_path):
    folder, expected = model
    (tmp_path / "config.json").write_text("{}")
    command = ["convert", str(folder), str(tmp_path / "b"), "--format", "hf", "--dequantize"]
    done = CliRunner().invoke(app, [*command, "--config-from", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["carried"] == ["config.json"]
    assert (tmp_path / "b/config.json").read_text() == "{}"
    same(shardplan.restore(tmp_path / "b"), expected)


# ---- refusals


def test_a_checkpoint_without_quantised_tensors_is_refused(tmp_path):
    shardplan.save({"w": torch.ones(3)}, tmp_path)
    with pytest.raises(RefusedError, match="no tensors to dequantise"):
        shardplan.load({"w": torch.ones(3)}, tmp_path, planner=dequantize())


def test_scales_of_another_block_size_are_refused_by_name(model, tmp_path):
    values, scales, _ = fp8(19, 23, (4, 8))
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    with pytest.raises(RefusedError, match=r"`w_scale_inv` has shape \[5, 3\].*\[128, 128\]"):
        shardplan.convert(tmp_path, tmp_path / "b", planner=dequantize())
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": "x"}}')
    with pytest.raises(FormatError, match="weight_block_size"):
        shardplan.convert(tmp_path, tmp_path / "b", planner=dequantize())


def test_where_it_means_nothing_it_is_refused(model, tmp_path):
    sd = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match="pass it to load or convert"):
        shardplan.save(sd, tmp_path / "b", planner=dequantize())
    with pytest.raises(ValueError, match="nor inside where"):
        shardplan.load(sd, model[0], planner=where("w", dequantize()))
    with pytest.raises(ValueError, match="once is enough"):
        shardplan.load(sd, model[0], planner=[dequantize(), dequantize("float32")])
    with pytest.raises(ValueError, match="no inverse"):
        shardplan.planning.inverse(dequantize())


def test_a_damaged_file_is_reported_with_the_keys_that_it_touches(model, tmp_path):
    folder, _ = model
    shardplan.convert(folder, tmp_path / "b")
    damage(tmp_path / "b", "layer.weight")
    state = {"layer.weight": torch.zeros(19, 23, dtype=torch.bfloat16)}
    (tmp_path / "b/config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FormatError, match="checksum") as caught:
        shardplan.load(state, tmp_path / "b", planner=dequantize())
    assert caught.value.touched == ("layer.weight",)


def test_all_ranks_learn_that_there_is_nothing_to_dequantise(tmp_path):
    sd = {"w": torch.ones(3)}
    shardplan.save(sd, tmp_path)
    with pytest.raises(CheckpointError, match="no tensors to dequantise"):
        run_ranks(2, lambda comm: shardplan.load(sd, tmp_path, planner=dequantize(), comm=comm))


def test_planning_sees_it_as_a_value():
    assert dequantize() == dequantize(torch.bfloat16)
    assert repr([dequantize("float32")]) == "[dequantize(dtype='float32')]"
    with pytest.raises(ValueError, match="pass it to load or convert"):
        global_plan([local_plan({"w": TensorSpec((2,))})], dequantize())
    with pytest.raises(ValueError, match="pass it to load or convert"):
        chain(permute("w", (1, 0)), dequantize())((local_plan({"w": TensorSpec((2, 2))}),))


def turn_a_bit(folder, back):
    """Change one bit of the only file of tensors, so many bytes from its end."""
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-back] ^= 0x40
    path.write_bytes(data)


READS = {
    "restore": lambda path, planner: shardplan.restore(path, planner=planner),
    "open": lambda path, planner: shardplan.open_checkpoint(path, planner=planner)["w"].read(),
    "load": lambda path, planner: shardplan.load(
        {"w": torch.zeros(1024, 512)}, path, planner=planner
    ),
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("damaged", ["values", "scales"])
def test_chunks_that_are_read_whole_in_parts_are_checked(tmp_path, monkeypatch, how, damaged):
    monkeypatch.setattr(reading, "PART", 1 << 15)
    values, scales = torch.ones(1024, 512).to(torch.float8_e4m3fn), torch.ones(8, 4)
    shardplan.save({"w": values, "w_scale_inv": scales}, tmp_path)
    planner = dequantize("float32")
    READS[how](tmp_path, planner)
    turn_a_bit(tmp_path, 5 if damaged == "values" else values.numel() + 5)
    with pytest.raises(FormatError, match="checksums do not fit"):
        READS[how](tmp_path, planner)


def test_large_chunks_are_read_by_the_blocks_of_their_checksums(tmp_path):
    values = torch.ones(5000, 4096).to(torch.float8_e4m3fn)
    shardplan.save({"w": values, "w_scale_inv": torch.ones(40, 32)}, tmp_path)
    state = {"w": torch.zeros(5000, 4096)}
    report = shardplan.load(state, tmp_path, planner=dequantize("float32"))
    assert bool((state["w"] == 1).all())
    assert (report.verified, report.bytes_unverified) == (2, 0)
    assert report.bytes_read <= values.numel() + 3 * 40 * 32 * 4  # the elements only once
    turn_a_bit(tmp_path, 5)
    with pytest.raises(FormatError, match="checksums do not fit"):
        shardplan.load(state, tmp_path, planner=dequantize("float32"))
