"""Sums of checkpoints: equal to torch's on whole tensors, whatever the checkpoints are cut into."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan import convert, open_checkpoint, restore, save
from shardplan.dist import run_ranks
from shardplan.io import FormatError
from shardplan.merging import apply, delta, lerp, mean, merge, merge_lora
from shardplan.planning import Mesh, RefusedError, cast, rename
from shardplan.planning.testing.strategies import shapes

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def wide(tensor):
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def pair(folder, a, b, format="safetensors"):
    for name, state in (("a", a), ("b", b)):
        save(state, folder / name, format=format)
    return open_checkpoint(folder / "a"), open_checkpoint(folder / "b")


@settings(max_examples=12)
@given(
    data=st.data(),
    shape=shapes(min_side=1),
    dtype=DTYPES,
    weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
    meshes=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_a_sum_is_torchs_whatever_the_meshes(tmp_path_factory, data, shape, dtype, weights, meshes):
    folder = tmp_path_factory.mktemp("sum")
    states = [{"w": torch.randn(shape).to(dtype), "step": n} for n in range(2)]
    for number, state in enumerate(states):
        save(state, folder / f"whole-{number}")
        convert(folder / f"whole-{number}", folder / f"{number}", mesh=Mesh(dp=meshes[number]))
    total = merge([open_checkpoint(folder / f"{n}") for n in range(2)], weights)
    convert(total, folder / "sum", mesh=Mesh(dp=meshes[2]))
    made = restore(folder / "sum")
    expected = wide(states[0]["w"]) * weights[0] + wide(states[1]["w"]) * weights[1]
    assert made["step"] == 0
    torch.testing.assert_close(made["w"], expected.to(dtype), rtol=0, atol=0, equal_nan=True)
    if shape:
        row = data.draw(st.integers(0, shape[0] - 1))
        assert torch.equal(total["w"][row], made["w"][row])


def test_a_mean_of_bfloat16_is_rounded_once(tmp_path):
    values = [torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0])]
    parts = []
    for number, value in enumerate(values):
        save({"w": value.bfloat16()}, tmp_path / str(number))
        parts.append(open_checkpoint(tmp_path / str(number)))
    assert mean(*parts)["w"].item() == 86.0  # in bfloat16 256 + 1 + 1 is 256, whose third is 85.5
    assert mean(*parts).to(torch.float32)["w"].dtype == torch.float32


def test_what_changed_can_be_saved_and_applied_to_another(tmp_path):
    old, new = (
        {"w": torch.randn(9), "frozen": torch.ones(2)},
        {"w": torch.randn(9), "frozen": torch.ones(2)},
    )
    a, b = pair(tmp_path, old, new)
    convert(delta(b, a), tmp_path / "change", planner=lambda plans: plans)
    change = open_checkpoint(tmp_path / "change")
    assert torch.equal(change["w"][:], new["w"] - old["w"])
    assert torch.equal(apply(a, change, 0.5)["w"][:], old["w"] + (new["w"] - old["w"]) * 0.5)
    save({"w": torch.ones(9)}, tmp_path / "part")
    only = apply(a, open_checkpoint(tmp_path / "part"))
    assert torch.equal(only["w"][:], old["w"] + 1)
    assert torch.equal(only["frozen"][:], old["frozen"])


def test_lerp_and_operators_agree(tmp_path):
    a, b = pair(tmp_path, {"w": torch.randn(5, 3)}, {"w": torch.randn(5, 3)})
    assert torch.equal(lerp(a, b, 0.25)["w"][:], (0.75 * a + b / 4)["w"][:])
    assert torch.equal((a - b)["w"][:], a["w"][:] - b["w"][:])
    with pytest.raises(TypeError):
        a + 1


def test_the_dtype_is_that_of_the_sum_not_of_a_planner(tmp_path):
    a, b = pair(tmp_path, {"w": torch.tensor([1.0]).bfloat16()}, {"w": torch.tensor([2**-9])})
    convert((a + b).to("float32"), tmp_path / "c", planner=cast("float64"))
    assert restore(tmp_path / "c")["w"].item() == 1 + 2**-9


def test_checkpoints_that_do_not_fit_are_refused_with_every_name(tmp_path):
    a, b = pair(
        tmp_path,
        {"w": torch.ones(3), "x": torch.ones(2), "step": 1, "n": torch.ones(2)},
        {"w": torch.ones(4), "y": torch.ones(2), "step": 2, "n": torch.ones(2, dtype=torch.int64)},
    )
    with pytest.raises(RefusedError) as info:
        a + b
    for text in (
        "`w` has shape [3]",
        "`x` is only in the first",
        "`y` is only in the second",
        "`n`",
    ):
        assert text in str(info.value)
    with pytest.raises(ValueError, match="one of float16"):
        a.to("int64")
    seen = open_checkpoint(tmp_path / "a", planner=rename({"v": "w"}))
    with pytest.raises(ValueError, match="opened with a planner"):
        seen * 2


def test_a_sum_cannot_be_written_over_what_it_is_made_of(tmp_path):
    a, b = pair(tmp_path, {"w": torch.ones(3)}, {"w": torch.ones(3)})
    with pytest.raises(ValueError, match="into itself"):
        convert(a + b, tmp_path / "b", overwrite=True)


@pytest.mark.parametrize("other", ["safetensors", "dcp", "hf"])
@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_damage_of_any_part_is_noticed(tmp_path, format, other):
    sd = {"w": torch.ones(3000)}
    save(sd, tmp_path / "b", format=format)
    save(sd, tmp_path / "a", format=other)
    (file,) = [*(tmp_path / "b").glob("*.safetensors"), *(tmp_path / "b").glob("*.distcp")]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    a, b = (open_checkpoint(tmp_path / name) for name in ("a", "b"))
    for one in (a + b, b + a):
        with pytest.raises(FormatError, match="checksums do not fit"):
            one["w"][:]
        with pytest.raises(FormatError, match="checksums do not fit"):
            convert(one, tmp_path / "c")


def test_damage_of_a_large_tensor_of_a_narrower_dtype_is_noticed(tmp_path):
    save({"w": torch.ones(9 << 20, dtype=torch.bfloat16)}, tmp_path / "b")  # 18 MiB: two blocks
    save({"w": torch.ones(9 << 20)}, tmp_path / "a")
    (file,) = (tmp_path / "b").glob("*.safetensors")
    with open(file, "r+b") as opened:
        opened.seek(-100, 2)
        opened.write(b"\x12\x41")
    a, b = (open_checkpoint(tmp_path / name) for name in ("a", "b"))
    with pytest.raises(FormatError, match="checksums do not fit"):
        (a + b)["w"][:]
    assert (a + b)["w"][:8].tolist() == [2.0] * 8  # of a part, only whole blocks are checked


def test_ranks_write_a_sum_together(tmp_path):
    one, two = {"w": torch.randn(16, 4)}, {"w": torch.randn(16, 4)}
    pair(tmp_path, one, two)

    def work(comm):
        a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
        return convert(mean(a, b), tmp_path / "mean", mesh=Mesh(dp=4), comm=comm).files

    assert run_ranks(2, work) == [4, 4]
    assert torch.equal(restore(tmp_path / "mean")["w"], one["w"] * 0.5 + two["w"] * 0.5)


def adapter(folder, config=None):
    up, down = torch.randn(40, 8), torch.randn(8, 24)
    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    save({name.format("A"): down, name.format("B"): up}, folder, format="hf")
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return up @ down


def test_an_adapter_is_merged_as_its_config_says(tmp_path):
    weight, product = torch.randn(40, 24), adapter(tmp_path / "lora", {"lora_alpha": 32, "r": 8})
    save({"layers.0.q_proj.weight": weight, "norm": torch.ones(4)}, tmp_path / "base", format="hf")
    base, lora = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "lora")
    convert(merge_lora(base, lora), tmp_path / "merged", format="hf")
    merged = restore(tmp_path / "merged")
    torch.testing.assert_close(merged["layers.0.q_proj.weight"], weight + 4 * product)
    assert torch.equal(merged["norm"], torch.ones(4))
    part = merge_lora(base, lora)["layers.0.q_proj.weight"][7:9, 3]
    torch.testing.assert_close(part, (weight + 4 * product)[7:9, 3])


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (None, ValueError, "pass scale="),
        ({"r": 8}, FormatError, "lora_alpha"),
        ({"lora_alpha": 8, "r": 8, "use_dora": True}, ValueError, "use_dora"),
    ],
)
def test_an_adapter_without_a_usable_config_is_refused(tmp_path, config, error, text):
    adapter(tmp_path / "lora", config)
    save({"layers.0.q_proj.weight": torch.ones(40, 24)}, tmp_path / "base")
    with pytest.raises(error, match=text):
        merge_lora(open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "lora"))


def test_an_adapter_that_fits_no_weight_is_refused(tmp_path):
    adapter(tmp_path / "lora")
    save({"layers.0.q_proj.weight": torch.ones(24, 40)}, tmp_path / "base")
    with pytest.raises(RefusedError, match=r"shapes \[40, 8\] and \[8, 24\]"):
        merge_lora(open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "lora"), 1.0)


def test_an_open_checkpoint_is_converted_as_its_path_is(tmp_path):
    save({"w": torch.arange(6.0), "step": 3}, tmp_path / "a")
    convert(open_checkpoint(tmp_path / "a"), tmp_path / "b", mesh=Mesh(dp=2))
    made = restore(tmp_path / "b")
    assert torch.equal(made["w"], torch.arange(6.0))
    assert made["step"] == 3
