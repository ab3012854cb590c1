"""What users get wrong, and what they are told: one error that says what to do instead."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan.dist import run_ranks
from shardplan.dist.errors import LostRanksError
from shardplan.io.errors import FormatError
from shardplan.planning import (
    LoadPlan,
    PlanError,
    Shard,
    TensorProperties,
    TensorSpec,
    cast,
    chain,
    dtype_name,
    global_load_plan,
    global_plan,
    is_exact_cast,
    itemsize,
    load_plan,
    local_plan,
    matching,
    metadata_of,
    rename,
    world_plans,
)
from shardplan.planning.mesh import llama3_8b


def stored_dtypes(planner, sd):
    (plan,) = planner((local_plan(sd),))
    return {item.index.fqn: item.tensor_data.properties.dtype for item in plan.items}


@pytest.mark.parametrize("dtype", [torch.bfloat16, "torch.bfloat16", "bfloat16"], ids=str)
def test_a_torch_dtype_is_taken_wherever_a_dtype_is(dtype):
    sd = {"w": torch.ones(2), "b": torch.ones(2)}
    assert stored_dtypes(cast(dtype), sd) == {"w": "bfloat16", "b": "bfloat16"}
    assert stored_dtypes(cast({"w": dtype, "b": np.float64}), sd) == {
        "w": "bfloat16",
        "b": "float64",
    }
    assert cast(dtype) == cast("bfloat16")
    assert repr(cast({"w": dtype})) == "cast({'w': 'bfloat16'})"
    assert TensorSpec((2,), dtype) == TensorSpec((2,), "bfloat16")
    assert TensorProperties(dtype) == TensorProperties("bfloat16")
    assert itemsize(dtype) == 2
    assert is_exact_cast(dtype, torch.float32)
    assert llama3_8b(dtype) == llama3_8b()


def test_a_checkpoint_saved_with_a_torch_dtype_loads_back(tmp_path):
    planner = cast(torch.bfloat16)
    shardplan.save({"w": torch.arange(4.0)}, tmp_path, planner=planner)
    assert shardplan.open_checkpoint(tmp_path)["w"].dtype == torch.bfloat16
    sd = {"w": torch.zeros(4)}
    shardplan.load(sd, tmp_path, planner=planner)
    assert sd["w"].tolist() == [0, 1, 2, 3]
    target = {"w": TensorSpec((4,), torch.float32)}
    assert shardplan.restore(tmp_path, target, dtype="cast")["w"].dtype == torch.float32


@pytest.mark.parametrize(("wrong", "right"), [("bf16", "bfloat16"), ("flaot32", "float32")])
def test_a_misspelt_dtype_is_told_the_nearest_one(wrong, right):
    with pytest.raises(ValueError, match=f"unknown dtype '{wrong}'; nearest: {right}"):
        dtype_name(wrong)


def test_cast_by_dtype_is_told_that_it_goes_by_names():
    with pytest.raises(TypeError, match=r"by pattern of names, not by \[torch\.float32\]"):
        cast({torch.float32: torch.bfloat16})


@pytest.mark.parametrize("function", ["load", "restore"])
def test_a_dtype_to_load_as_is_asked_for_by_the_tensors(function, tmp_path):
    shardplan.save({"w": torch.ones(2)}, tmp_path)
    arguments = ({"w": torch.ones(2)}, tmp_path) if function == "load" else (tmp_path,)
    with pytest.raises(ValueError, match=r'"cast" to convert to the dtypes of the tensors'):
        getattr(shardplan, function)(*arguments, dtype=torch.bfloat16)


SD = {"w": torch.ones(2)}
SWAPPED = r"the path is a (dict|Linear): are the arguments swapped\? It is save\(state_dict, path\)"


@pytest.mark.parametrize("state", [SD, torch.nn.Linear(2, 2)], ids=["dict", "module"])
@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_swapped_arguments_are_told_in_one_line(state, format, tmp_path):
    folder = str(tmp_path / "run")
    for call in (
        lambda: shardplan.save(folder, state, format=format),
        lambda: shardplan.async_save(folder, state, format=format).result(),
        lambda: shardplan.load(folder, state, format=format),
        lambda: shardplan.restore(state, format=format),
        lambda: shardplan.convert(state, folder, format=format),
        lambda: shardplan.verify(state),
        lambda: shardplan.open_checkpoint(state),
    ):
        with pytest.raises(TypeError, match=SWAPPED) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_none_is_named(tmp_path):
    shardplan.save(SD, tmp_path / "a")
    for call in (
        lambda: shardplan.save(SD, None),
        lambda: shardplan.save(SD, None, format="torch"),
        lambda: shardplan.async_save(SD, None).result(),
        lambda: shardplan.load(SD, shardplan.latest(tmp_path / "new run")),
        lambda: shardplan.restore(None),
        lambda: shardplan.convert(None, tmp_path / "b"),
        lambda: shardplan.convert(tmp_path / "a", None),
        lambda: shardplan.diff(None, tmp_path / "a"),
        lambda: shardplan.latest(None),
        lambda: shardplan.prune(None, keep_last=1),
    ):
        with pytest.raises(TypeError, match=r"the path is None \(`latest` returns None"):
            call()


def test_a_swapped_argument_of_a_background_save_is_named_by_its_type(tmp_path):
    with pytest.raises(TypeError, match=SWAPPED):
        shardplan.async_save(str(tmp_path), {"w": torch.ones(100_000)})


def test_other_things_than_paths_are_refused(tmp_path):
    for wrong in (7, 1.5, [str(tmp_path)], torch.ones(2)):
        with pytest.raises(
            TypeError, match=r"a path is text, an os.PathLike or an open store, not"
        ):
            shardplan.save(SD, wrong)


def test_a_tilde_is_not_taken_for_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"pass os\.path\.expanduser\('~/run'\)"):
        shardplan.save(SD, "~/run")
    assert list(tmp_path.iterdir()) == []
    shardplan.save(SD, "./~/run")


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_latest_of_a_run_that_has_not_begun_is_none(place, tmp_path):
    folder = tmp_path / "new" / "run" if place == "disk" else "memory://mistakes/new/run"
    assert shardplan.latest(folder) is None
    assert not (tmp_path / "new").exists()
    shardplan.save(SD, f"{folder}/step-1")
    assert str(shardplan.latest(folder)).endswith("new/run/step-1")


def test_latest_of_a_file_is_refused(tmp_path):
    torch.save(SD, tmp_path / "model.pt")
    for function in (shardplan.latest, lambda path: shardplan.prune(path, keep_last=1)):
        with pytest.raises(
            OSError, match="it is a file; give the folder that holds the checkpoints"
        ):
            function(tmp_path / "model.pt")


def trained():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_module_or_an_optimizer_can_be_saved_and_loaded_by_itself(tmp_path):
    model, optimizer = trained()
    shardplan.save(model, tmp_path / "model")
    shardplan.async_save(optimizer, tmp_path / "optimizer").result()
    other, others = trained()
    shardplan.load(other, tmp_path / "model")
    shardplan.load(others, tmp_path / "optimizer")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert torch.equal(
        others.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    restored = shardplan.restore(tmp_path / "model", torch.nn.Linear(3, 2))
    assert torch.equal(restored["weight"], model.weight)


@pytest.mark.parametrize("many", [1, 2])
def test_a_module_is_saved_by_many_ranks_as_well(many, tmp_path):
    model, _ = trained()

    def work(comm):
        shardplan.save(model, tmp_path, comm=comm)
        mine = torch.nn.Linear(3, 2)
        shardplan.load(mine, tmp_path, comm=comm)
        return torch.equal(mine.weight, model.weight)

    assert run_ranks(many, work) == [True] * many


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (torch.nn.Linear(2, 2), r"not a Linear; pass the Linear's state_dict\(\)"),
        (torch.nn.Linear(2, 2).state_dict, r"not a method; call it"),
        ([1], r"not a list$"),
    ],
    ids=["module", "method", "list"],
)
def test_what_is_not_a_state_dict_is_told_what_to_pass(wrong, remedy):
    with pytest.raises(TypeError, match=f"a state dict is a mapping .*{remedy}"):
        local_plan(wrong)


def test_one_plan_in_the_place_of_a_list_is_told_how_to_pass_it():
    with pytest.raises(TypeError, match=r"for one rank: global_plan\(\[plan\]\)"):
        global_plan(local_plan(SD))
    with pytest.raises(TypeError, match=r"for one rank: global_plan\(\[local_plan\(sd\)\]\)"):
        global_plan(SD)
    with pytest.raises(TypeError, match=r"for one rank: global_load_plan\(\[plan\]\)"):
        global_load_plan(LoadPlan([]))


def test_what_cannot_be_saved_is_named_inside_of_a_module_too(tmp_path):
    class Odd(torch.nn.Module):
        def get_extra_state(self):
            return len

        def set_extra_state(self, state):
            pass

    for state in (Odd(), {"model": Odd(), "w": torch.ones(1)}):
        with pytest.raises(TypeError, match=r"^`(model\.)?_extra_state` is a builtin_function"):
            shardplan.save(state, tmp_path / "x")


LAYERS = [f"layers.{i}.{part}" for i in range(12) for part in ("attn.w", "attn.b", "norm")]
BARE = [*LAYERS, "embed.w", "norm.w"]


def put_in(step, name):
    """Put a step between a layer's number and what is inside of it."""
    return re.sub(r"^(layers\.\d+)\.", rf"\1.{step}.", name)


@pytest.mark.parametrize("swapped", [False, True], ids=["wanted has it", "saved has it"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"model.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"a-b c.0.{name}",
        lambda name: f'we"ird\\d.{name}',
        lambda name: put_in("_checkpoint_wrapped_module", name),
    ],
)
@pytest.mark.parametrize("rest", [[], ["step", "optim.lr"]], ids=["all", "but a few"])
def test_names_with_another_prefix_are_told_the_rename_that_works(wrap, rest, swapped, tmp_path):
    sides = [*map(wrap, BARE), *rest], [*BARE, *rest]
    wanted, there = sides[::-1] if swapped else sides
    number = {name: float(n) for n, name in enumerate(there)}
    shardplan.save({name: torch.tensor(n) for name, n in number.items()}, tmp_path)
    sd = {name: torch.zeros(()) for name in wanted}
    with pytest.raises(PlanError) as caught:
        shardplan.load(sd, tmp_path)
    changed = sum(a != b for a, b in zip(*sides, strict=True))
    text = str(caught.value)
    assert re.match(f"{changed} names are not in the checkpoint, .* under another prefix: `", text)
    assert "strict=False" not in text
    assert "\n" not in text
    assert len(caught.value.issues) == changed
    code = re.search(r"pass planner=(rename\(.*\))$", text)[1]
    shardplan.load(sd, tmp_path, planner=eval(code, {"rename": rename}))
    assert [sd[name].item() for name in wanted] == [number[name] for name in there]


@pytest.mark.parametrize("inner", ["_checkpoint_wrapped_module", "_orig_mod"])
def test_names_with_several_wrappers_are_told_the_rename_that_works(inner, tmp_path):
    shardplan.save({name: torch.full((), float(n)) for n, name in enumerate(BARE)}, tmp_path)
    sd = {f"_orig_mod.{put_in(inner, name)}": torch.zeros(()) for name in BARE}
    with pytest.raises(PlanError) as caught:
        shardplan.load(sd, tmp_path)
    code = re.search(r"pass planner=(rename\(.*\))$", str(caught.value))[1]
    shardplan.load(sd, tmp_path, planner=eval(code, {"rename": rename}))
    assert [value.item() for value in sd.values()] == list(range(len(BARE)))


def test_nested_state_under_another_prefix_is_told_the_rename_that_works(tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    shardplan.save({"model": {"module": model.state_dict()}, "step": 7}, tmp_path, format="dcp")
    sd = {"model": other, "step": 0}
    with pytest.raises(PlanError) as caught:
        shardplan.load(sd, tmp_path)
    code = re.search(r"pass planner=(rename\(.*\))$", str(caught.value))[1]
    shardplan.load(sd, tmp_path, planner=eval(code, {"rename": rename}))
    assert torch.equal(model.weight, other.weight)
    assert sd["step"] == 7


def test_a_target_with_another_prefix_is_told_the_rename_that_works(tmp_path):
    shardplan.save({name: torch.ones(2) for name in BARE}, tmp_path)
    target = {f"module.{name}": torch.zeros(2) for name in BARE}
    with pytest.raises(PlanError) as caught:
        shardplan.restore(tmp_path, target)
    code = re.search(r"; pass planner=(rename\(.*\))$", str(caught.value))[1]
    restored = shardplan.restore(tmp_path, target, planner=eval(code, {"rename": rename}))
    assert restored.keys() == target.keys()
    assert all(tensor.eq(1).all() for tensor in restored.values())


def test_names_that_are_really_missing_are_told_apart_from_those_with_a_prefix(tmp_path):
    shardplan.save({name: torch.zeros(()) for name in BARE}, tmp_path)
    sd = {f"_orig_mod.{name}": torch.zeros(()) for name in BARE} | {"new.w": torch.zeros(())}
    with pytest.raises(PlanError) as caught:
        shardplan.load(sd, tmp_path)
    prefix, missing = sorted(str(caught.value).splitlines())
    assert prefix.startswith(f"- {len(BARE)} names are not in the checkpoint")
    assert missing.startswith("- `new.w` is not in the checkpoint; nearest: norm.w")
    assert missing.endswith("strict=False leaves it as it is")


def test_of_two_prefixes_in_the_checkpoint_both_are_named_and_none_is_recommended(tmp_path):
    saved = {f"{copy}.{name}": torch.zeros(()) for copy in ("ema", "model") for name in BARE}
    shardplan.save(saved, tmp_path)
    with pytest.raises(PlanError) as caught:
        shardplan.load({name: torch.zeros(()) for name in BARE}, tmp_path)
    assert "as `ema.embed.w` or `model.embed.w`, and so on" in str(caught.value)
    assert "rename([" not in str(caught.value)
    assert "choose one, and rename to it" in str(caught.value)


def test_of_two_prefixes_the_one_whose_shapes_fit_is_recommended(tmp_path):
    sizes = {"large": 3, "small": 2}
    saved = {f"{copy}.{name}": torch.zeros(n) for copy, n in sizes.items() for name in BARE}
    shardplan.save(saved, tmp_path)
    with pytest.raises(PlanError, match=r'pass planner=rename\(\[\("\^", "small\."\)\]\)'):
        shardplan.load({name: torch.zeros(2) for name in BARE}, tmp_path)


@pytest.mark.parametrize("end", ["", ".weight", ".lin.weight", ".lin.0.weight"])
@pytest.mark.parametrize("parts", [("qkvo", "qkvo"), ("qkvo", "k"), ("q", "qk"), ("qk", "kq")])
def test_no_rename_is_recommended_that_could_permute_weights(parts, end, tmp_path):
    """Layers have other names, and what is inside of them has, too: any pairs would fit."""
    wanted = [f"encoder.layers.{n}.{p}{end}" for n in range(6) for p in parts[0]]
    saved = [f"decoder.blocks.{n}.w{p}{end}" for n in range(6) for p in parts[1]]
    shardplan.save({name: torch.zeros(2) for name in saved}, tmp_path)
    with pytest.raises(PlanError, match="is not in the checkpoint; nearest: ") as caught:
        shardplan.load({name: torch.zeros(2) for name in wanted}, tmp_path)
    assert "rename" not in str(caught.value)


def test_another_name_for_a_prefix_gets_similar_names_and_no_rename(tmp_path):
    """It could be another tensor."""
    shardplan.save({f"backbone.{name}": torch.zeros(()) for name in BARE}, tmp_path)
    with pytest.raises(PlanError, match=r"nearest: backbone\.embed\.w;") as caught:
        shardplan.load({f"encoder.{name}": torch.zeros(()) for name in BARE}, tmp_path)
    assert "rename" not in str(caught.value)


def test_a_rename_is_added_to_a_planner_that_renames_already(tmp_path):
    shardplan.save({"model.w": torch.ones(2), "model.b": torch.ones(2)}, tmp_path)
    sd, own = {"x": torch.zeros(2), "b": torch.zeros(2)}, rename({"x": "w"})
    with pytest.raises(PlanError) as caught:
        shardplan.load(sd, tmp_path, planner=own)
    code = re.search(r"add (rename\(.*\)) to the planner$", str(caught.value))[1]
    shardplan.load(sd, tmp_path, planner=chain(own, eval(code, {"rename": rename})))
    assert sd["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("wanted", "saved"),
    [
        (["wieght"], ["weight"]),
        (["a.weight"], ["b.weight"]),
        (["a.k.w", "a.v.w"], ["a.q.w"]),
        (["x", "y"], []),
        ([f"new.{i}" for i in range(100)], ["model.new.3"]),
    ],
)
def test_names_that_only_resemble_are_not_taken_for_a_prefix(wanted, saved, tmp_path):
    shardplan.save({name: torch.ones(2) for name in saved}, tmp_path)
    with pytest.raises(PlanError, match="strict=False leaves it as it is") as caught:
        shardplan.load({name: torch.ones(2) for name in wanted}, tmp_path)
    assert "rename" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "saved"),
    [
        ("_orig_mod.layers.{}.weight", "layers.{}.weight"),
        ("a.{}.x.weight", "b.{}.y.weight"),
        ("a.{}.lin.weight", "b{}.lin.weight"),
        ("a{}.q.lin.weight", "b.c.b{}.lin.weight"),
        ("a{}.weight", "b{}.weight"),
        ("w{0}", "b{0}.w{0}"),
    ],
)
def test_explaining_missing_names_looks_at_each_a_few_times(wanted, saved, monkeypatch):
    count, looked, compared = 20_000, [], []
    apply, ending = matching.Rule.apply, matching._ending

    def counted(rule, names):
        looked.append(len(names))
        return apply(rule, names)

    def counted_too(steps, tail, names):
        compared.append(len(names))
        return ending(steps, tail, names)

    monkeypatch.setattr(matching.Rule, "apply", counted)
    monkeypatch.setattr(matching, "_ending", counted_too)
    names = ([form.format(i) for i in range(count)] for form in (wanted, saved))
    ways = matching.find_renames(*names)
    assert [len(way.names) for way in ways] == [count] * wanted.startswith("_orig_mod")
    assert sum(looked) < 6 * count
    assert sum(compared) < 40 * count


def failed_load(ranks, sd, path, **options):
    """Return what each of several ranks is told of a load that fails."""

    def work(comm):
        with pytest.raises(shardplan.CheckpointError) as caught:
            shardplan.load(dict(sd), path, comm=comm, **options)
        return caught.value

    return run_ranks(ranks, work)


def test_a_misspelt_key_is_told_once_however_many_ranks_have_it(tmp_path):
    shardplan.save({"weight": torch.ones(2)}, tmp_path)
    for error in failed_load(4, {"wieght": torch.ones(2)}, tmp_path):
        assert str(error).splitlines() == [
            "failed on ranks 0-3 of the job",
            "ranks 0-3, plan: PlanError: `wieght` is not in the checkpoint; nearest: weight; "
            f"strict=False leaves it as it is; the checkpoint is {tmp_path}",
        ]
        assert all("Traceback" in failure.traceback for failure in error.failures)
        assert error.tracebacks.count("--- ranks 0-3 ---") == 1


def test_ranks_are_told_the_rename_that_works(tmp_path):
    shardplan.save({name: torch.ones(2) for name in BARE}, tmp_path)
    sd = {f"_orig_mod.{name}": torch.zeros(2) for name in BARE}
    for error in failed_load(3, sd, tmp_path):
        assert str(error).count("\n") == 1
        assert r'pass planner=rename([(r"^_orig_mod\.", "")])' in str(error)


def test_several_mistakes_are_all_in_the_message_of_many_ranks(tmp_path):
    shardplan.save({}, tmp_path)
    for error in failed_load(2, {f"key{i}": torch.ones(2) for i in range(20)}, tmp_path):
        lines = str(error).splitlines()
        assert [f"`key{i}`" in str(error) for i in (0, 1, 10, 11, 12, 13, 14, 15)] == [True] * 8
        assert "- and 12 more: this error's `issues` has all" in str(error)
        assert len(lines) < 12
        assert len(error.own.issues) == 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "bf16"}, 'dtype must be "same"'),
        ({"format": "safetensor"}, "unknown format 'safetensor'"),
        ({"strict": "modle.*"}, "'modle.*' matches no name"),
    ],
)
def test_a_wrong_argument_is_told_many_ranks_without_a_traceback(options, says, tmp_path):
    shardplan.save(SD, tmp_path)
    for error in failed_load(2, SD, tmp_path, **options):
        assert says in str(error)
        assert "Traceback" not in str(error)
        assert ".py" not in str(error)


def test_what_a_users_own_pass_raises_is_told_with_its_line(tmp_path):
    shardplan.save(SD, tmp_path)

    def broken(plans):
        return plans[0].no_such_thing  # the line to look for

    for error in failed_load(2, SD, tmp_path, planner=broken):
        assert "# the line to look for" in str(error)
        assert len(str(error).splitlines()) < 16


def test_a_damaged_file_is_told_many_ranks_without_a_traceback(tmp_path):
    shardplan.save(SD, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"oops")
    for error in failed_load(2, {"w": torch.zeros(2)}, tmp_path):
        assert "checksum" in str(error)
        assert ".py" not in str(error)


@pytest.mark.parametrize(
    ("value", "kind", "attribute"),
    [
        (len, "ValueRefusedError", "reasons"),
        (torch.eye(2).to_sparse(), "RefusedError", "reasons"),
        (torch.empty(2, device="meta"), "ValueRefusedError", "reasons"),
    ],
    ids=["function", "sparse", "meta"],
)
def test_a_thousand_refused_values_are_cut_to_a_readable_length(value, kind, attribute, tmp_path):
    with pytest.raises(TypeError) as caught:
        shardplan.save({f"key{i:04}": value for i in range(1234)}, tmp_path / "x", format="hf")
    text = str(caught.value)
    assert type(caught.value).__name__ == kind
    assert "`key0007` " in text
    assert "`key0008` " not in text
    assert text.endswith(f"; and 1,226 more: this error's `{attribute}` has all")
    assert len(getattr(caught.value, attribute)) == 1234


def test_a_thousand_missing_keys_are_cut_to_a_readable_length(tmp_path):
    shardplan.save({}, tmp_path)
    with pytest.raises(PlanError) as caught:
        shardplan.load({f"key{i:04}": torch.ones(1) for i in range(1234)}, tmp_path)
    assert len(str(caught.value).splitlines()) == 9
    assert str(caught.value).endswith("\n- and 1,226 more: this error's `issues` has all")
    assert len(caught.value.issues) == 1234


def test_a_thousand_keys_that_one_name_would_get_are_cut_to_a_readable_length():
    with pytest.raises(PlanError, match=r"`key0007` and 1,226 more one name: `x`") as caught:
        rename(lambda name: "x")((local_plan({f"key{i:04}": 1 for i in range(1234)}),))
    assert len(str(caught.value)) < 300


def test_thousands_of_lost_ranks_are_told_in_a_line():
    lost = LostRanksError(dict.fromkeys(range(1, 4096), "did not come to gather within 5 s"))
    assert str(lost) == "each of ranks 1-4095 did not come to gather within 5 s"


def test_a_folder_that_is_not_there_is_told_the_nearest(tmp_path):
    shardplan.save(SD, tmp_path / "run" / "step-1")
    (tmp_path / "empty").mkdir()
    for path, says in {
        "run/setp-1": "the folder does not exist; nearest: step-1",
        "rum/step-1": f"{tmp_path}/rum does not exist; check the path",
        "empty": "the folder is empty",
        "run": f"but in folders of it; give one: {tmp_path}/run/step-1",
    }.items():
        for read in (shardplan.restore, shardplan.verify, lambda path: shardplan.load(SD, path)):
            with pytest.raises(FormatError, match=rf"there is no checkpoint.*{says}(\n|$)"):
                read(tmp_path / path)
    with pytest.raises(FormatError, match="nothing has this prefix; check the URL"):
        shardplan.restore("memory://mistakes/nowhere")


def test_a_url_with_one_slash_is_not_taken_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"cannot open s3:/bucket/x: write s3://bucket/x"):
        shardplan.save(SD, "s3:/bucket/x")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="a file is where a folder should be; check the path"):
        shardplan.save(SD, tmp_path / "file" / "step-1")


def test_latest_of_a_checkpoint_is_refused_rather_than_none(tmp_path):
    shardplan.save(SD, tmp_path / "step-1")
    with pytest.raises(ValueError, match="is a checkpoint; latest takes the folder that holds"):
        shardplan.latest(tmp_path / "step-1")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"strict": None}, TypeError, "strict is True, False, a pattern of names, or a list"),
        ({"strict": [1]}, TypeError, "strict is True, False, a pattern of names, or a list"),
        ({"strict": "ww*"}, PlanError, r"'ww\*' matches no wanted name"),
        ({"strict": "modle.*"}, PlanError, r"'modle\.\*' matches .*; nearest: model.w"),
        ({"comm": torch.distributed}, TypeError, "comm is a module; for a process group, pass"),
        ({"progress": True}, TypeError, "progress is called with the bytes done and in all"),
        ({"planner": "bfloat16"}, TypeError, "a pass is a function .* not 'bfloat16'"),
        ({"planner": [None]}, TypeError, "a pass is a function .* not None"),
        ({"planner": lambda plans: None}, ValueError, "returned None: is its `return` missing"),
        ({"planner": lambda plans: list(plans)}, ValueError, "a tuple of 1 .* returned a list$"),
        ({"planner": cast}, TypeError, "a dtype is a name .* not a tuple"),
    ],
)
def test_a_wrong_argument_of_load_is_told_what_was_expected(options, error, says, tmp_path):
    shardplan.save({"model.w": torch.ones(2)}, tmp_path)
    sd = {"model.w": torch.zeros(2)}
    with pytest.raises(error, match=says):
        shardplan.load(sd, tmp_path, **options)
    assert sd["model.w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mesh": {"dp": 2}}, r"expected a mesh, such as Mesh\(dp=2\), not \{'dp': 2\}"),
        ({"mesh": 2}, r"expected a mesh, such as Mesh\(dp=8\), not 2"),
        ({"max_memory": "much"}, "'much' is not a size; write '5GB'"),
    ],
)
def test_a_wrong_argument_of_convert_is_told_what_was_expected(options, says, tmp_path):
    shardplan.save(SD, tmp_path / "a")
    with pytest.raises((TypeError, ValueError), match=says):
        shardplan.convert(tmp_path / "a", tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_the_memory_of_a_conversion_can_be_said_with_a_unit(tmp_path):
    shardplan.save(SD, tmp_path / "a")
    assert shardplan.convert(tmp_path / "a", tmp_path / "b", max_memory="1GiB").tensors == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rename(("model.", "")), "rename takes a function, a mapping .* not \\('model"),
        (lambda: rename("model."), "rename takes a function, a mapping .* not 'model.'"),
        (lambda: rename([("model.(", "")]), r"'model\.\(' is not a regular expression: missing \)"),
        (lambda: TensorSpec(4), "a shape is a tuple of whole numbers, one for each axis; not 4"),
        (lambda: TensorSpec((4,), "float32", Shard(0)), r"placements are a list.*\[Shard\("),
        (lambda: world_plans({}, 4), r"expected a mesh, such as Mesh\(dp=8\), not 4"),
        (lambda: load_plan(local_plan({}), metadata_of({})), "not a SavePlan and a Metadata"),
        (lambda: load_plan(metadata_of({}), {}), r"such as local_plan\(sd\); not a Metadata and"),
    ],
)
def test_a_wrong_argument_of_planning_is_told_what_was_expected(make, says):
    with pytest.raises((TypeError, ValueError), match=says):
        make()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, not 0$"),
        ({"keep_last": -3}, "keep_last must be at least 1, not -3$"),
        ({"keep_last": 1, "min_age": -1}, "min_age must be at least 0 seconds, not -1$"),
    ],
)
def test_a_wrong_argument_of_prune_is_told_by_itself(options, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        shardplan.prune(tmp_path, **options)


def test_keys_to_restore_are_patterns(tmp_path):
    shardplan.save(SD, tmp_path)
    with pytest.raises(TypeError, match=r"keys are patterns of names.* not \[1\]"):
        shardplan.restore(tmp_path, keys=[1])


STEPS = st.sampled_from(
    ["a", "b", "layers", "0", "1", "_orig_mod", "module", "w", "x.y", "a\\b", ""]
)
NAMES = st.sets(st.lists(STEPS, min_size=1, max_size=4).map(".".join), max_size=8)


@given(wanted=NAMES, saved=NAMES)
def test_a_rename_that_is_advised_finds_what_it_says_and_changes_nothing_that_fits(wanted, saved):
    missing, fitting = sorted(wanted - saved), sorted(wanted & saved)
    for way in matching.find_renames(missing, saved, fitting):
        assert way.names
        planner = eval(str(way), {"rename": rename})
        (plan,) = planner((local_plan(dict.fromkeys(wanted, 1)),))
        new = {item.source.fqn: item.index.fqn for item in plan.items}
        assert len(set(new.values())) == len(new)
        assert {name: new[name] for name in way.names} == way.names
        assert {new[name] for name in way.names} <= saved
        assert {name: new[name] for name in fitting} == {name: name for name in fitting}
