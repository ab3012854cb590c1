"""Hugging Face files that several ranks write together."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import shardplan
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import StoreError, open_store
from shardplan.io.stores.local import LocalStore
from shardplan.planning import Mesh, Shard, TensorSpec, cast, where, world_plans
from shardplan.planning.testing.strategies import meshes, placements, shapes

SCRIPT = Path(__file__).parents[1] / "ranks" / "hugging.py"
INDEX = "model.safetensors.index.json"
ROWS, COLUMNS = [Shard(0)], [Shard(1)]


class Shards:
    """What one rank holds of a tensor, as boxes of its own memory."""

    def __init__(self, whole, chunks):
        self.shape, self.dtype = whole.shape, whole.dtype
        self.parts = {chunk: box(whole, chunk).clone() for chunk in chunks}

    def __create_chunk_list__(self):
        return list(self.parts)

    def __get_tensor_shard__(self, index):
        return next(t for c, t in self.parts.items() if c.offsets == tuple(index.offset))


def box(tensor, chunk):
    return tensor[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]


def rank_states(tensors, specs, mesh):
    """Return what each rank of a mesh holds."""
    states = []
    for plan in world_plans(specs, mesh):
        chunks = {}
        for item in plan.items:
            chunks.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
        states.append({name: Shards(tensors[name], held) for name, held in chunks.items()})
    return states


def example(ranks=2):
    """Return tensors cut in all ways, and the state of each rank."""
    torch.manual_seed(0)
    tensors = {
        "columns": torch.randn(6, 8),
        "rows": torch.randn(7, 3).bfloat16(),
        "whole": torch.randn(5, dtype=torch.float64),
        "number": torch.tensor(7),
    }
    cut = {"columns": COLUMNS, "rows": ROWS}
    specs = {
        name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."), cut.get(name, ()))
        for name, t in tensors.items()
    }
    return tensors, rank_states(tensors, specs, Mesh(tp=ranks))


def save(states, path, **options):
    def one(comm):
        return shardplan.save(states[comm.rank], path, format="hf", comm=comm, **options)

    return run_ranks(len(states), one)


def contents(folder):
    """Return all tensors of a folder, as the safetensors library reads them."""
    files = [name for name in os.listdir(folder) if name.endswith(".safetensors")]
    return {k: v for name in files for k, v in load_file(folder / name).items()}


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def small_files(monkeypatch):
    """Let a file hold 100 bytes of tensors."""
    from shardplan.io.formats.hf.write import HfWriter

    made = HfWriter.__init__

    def limited(self, **options):
        made(self, **options)
        self.max_shard_size = 100

    monkeypatch.setattr(HfWriter, "__init__", limited)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_write_the_file_that_one_rank_would_write(tmp_path, ranks):
    tensors, states = example(ranks)
    shardplan.save(tensors, tmp_path / "one", format="hf")
    reports = save(states, tmp_path / "many")
    assert os.listdir(tmp_path / "many") == ["model.safetensors"]
    one, many = (tmp_path / name / "model.safetensors" for name in ("one", "many"))
    assert many.read_bytes() == one.read_bytes()
    assert {report.files for report in reports} == {1}
    assert {report.nbytes for report in reports} == {one.stat().st_size}
    same(contents(tmp_path / "many"), tensors)


def test_ranks_write_the_several_files_that_one_rank_would_write(tmp_path, small_files):
    tensors, states = example()
    shardplan.save(tensors, tmp_path / "one", format="hf")
    save(states, tmp_path / "many")
    names = sorted(os.listdir(tmp_path / "many"))
    assert names == sorted(os.listdir(tmp_path / "one"))
    assert len(names) == 3
    for name in names:  # the save's id apart, which is of the same length
        one, many = ((tmp_path / way / name).read_bytes() for way in ("one", "many"))
        pattern = rb'[0-9a-f]{12}(?=-|\\")'
        assert re.sub(pattern, b"-", many) == re.sub(pattern, b"-", one)
    same(contents(tmp_path / "many"), tensors)
    assert shardplan.verify(tmp_path / "many").ok


@given(st.data())
def test_whatever_the_sharding_the_tensors_come_out_whole(tmp_path_factory, data):
    mesh = data.draw(meshes(max_ranks=4))
    tensors, specs = {}, {}
    for name in data.draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3)):
        shape = data.draw(shapes())
        dtype = data.draw(st.sampled_from(["int8", "bfloat16", "float32"]))
        specs[name] = TensorSpec(shape, dtype, data.draw(placements(mesh, shape)))
        tensors[name] = (torch.rand(shape) * 100).to(getattr(torch, dtype))
    folder = tmp_path_factory.mktemp("any")
    states = rank_states(tensors, specs, mesh)
    for state in states:  # a plan has no item without elements
        state |= {name: t for name, t in tensors.items() if not t.numel()}
    save(states, folder)
    same(contents(folder), tensors)


def test_what_is_cast_or_not_contiguous_is_written_as_its_plan_says(tmp_path):
    tensors, states = example()
    save(states, tmp_path, planner=where("columns", cast("float16")))
    same(contents(tmp_path), tensors | {"columns": tensors["columns"].half()})
    w = torch.arange(24.0).reshape(4, 6)
    save([{"w": w.t()}, {"w": w.t().clone()}], tmp_path / "turned")
    same(contents(tmp_path / "turned"), {"w": w.t().contiguous()})


def test_a_tensor_that_is_tied_on_all_ranks_is_stored_once(tmp_path):
    tensors, states = example()
    for state in states:
        state["again"] = state["whole"] = tensors["whole"]
    save(states, tmp_path / "tied")
    same(contents(tmp_path / "tied"), tensors)
    same(shardplan.restore(tmp_path / "tied"), tensors | {"again": tensors["whole"]})
    states[1]["again"] = tensors["whole"].clone()
    save(states, tmp_path / "apart")
    same(contents(tmp_path / "apart"), tensors | {"again": tensors["whole"]})


def test_values_are_refused_on_all_ranks_before_anything_is_written(tmp_path):
    _, states = example()
    with pytest.raises(CheckpointError, match=r"`step`.*holds only tensors"):
        save([state | {"step": 7} for state in states], tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_stores_that_write_files_whole_are_refused_with_the_advice_to_convert():
    _, states = example()
    with pytest.raises(CheckpointError, match=r"memory://hf-ranks.*`convert`"):
        save(states, "memory://hf-ranks")


def test_a_background_save_of_several_ranks_writes_the_same(tmp_path):
    tensors, states = example()

    def one(comm):
        state = {name: t.parts.popitem()[1] for name, t in states[comm.rank].items()}
        kept = {name: state[name] for name in ("whole", "number")}
        return shardplan.async_save(kept, tmp_path, format="hf", comm=comm).result()

    run_ranks(2, one)
    same(contents(tmp_path), {name: tensors[name] for name in ("whole", "number")})


# ---- failures


class Failing(LocalStore):
    """A disk that fails at one of its changes; as if killed, it changes nothing any more then."""

    def __init__(self, root, fail_at=None, stays=False):
        super().__init__(root)
        self.changes, self.fail_at, self.stays = 0, fail_at, stays

    def _count(self):
        number, self.changes = self.changes, self.changes + 1
        if self.fail_at is not None and (
            number == self.fail_at or (self.stays and number > self.fail_at)
        ):
            kind = "other" if self.stays else "denied"  # which surely changed nothing
            raise StoreError("write", self.url, "the test wants it", kind=kind)


def _failing(name):
    def method(self, *args, **options):
        self._count()
        return getattr(LocalStore, name)(self, *args, **options)

    return method


for _name in ("make_file", "write_ranges", "replace", "rename", "link", "delete", "sync"):
    setattr(Failing, _name, _failing(_name))


def stores(path, victim, fail_at, stays):
    return [Failing(path, fail_at if rank == victim else None, stays) for rank in (0, 1)]


def save_each(states, places, **options):
    def one(comm):
        place = places[comm.rank]
        return shardplan.save(states[comm.rank], place, format="hf", comm=comm, **options)

    return run_ranks(len(states), one)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("files", ["one", "several"])
def test_whatever_fails_the_old_or_the_new_checkpoint_loads(
    tmp_path, victim, stays, files, request
):
    if files == "several":
        request.getfixturevalue("small_files")
    tensors, states = example()
    old = {"old": torch.ones(40), "whole": torch.zeros(30)}

    def attempt(folder, fail_at):
        shardplan.save(old, folder, format="hf")
        places = stores(folder, victim, fail_at, stays)
        sure = False
        try:
            save_each(states, places, overwrite=True)
        except CheckpointError as error:
            sure = "UnsureCommitError" not in str(error)
        found = shardplan.restore(folder)
        if sure and not stays:  # nothing of the failed save is left
            left = set(os.listdir(folder)) - {"model.safetensors", INDEX}
            named = set()
            if (folder / INDEX).exists():
                named = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            assert left == named
        with suppress(AssertionError):
            return same(found, old), places[victim].changes
        same(found, tensors)
        save_each(states, [folder, folder], overwrite=True)  # leftovers do not hinder the next
        assert shardplan.verify(folder).ok
        return None, places[victim].changes

    (tmp_path / "count").mkdir()
    _, count = attempt(tmp_path / "count", None)
    assert count >= 1
    for number in range(count):
        attempt(tmp_path / str(number), number)


def test_a_failing_rank_leaves_nothing_of_a_first_save(tmp_path):
    _, states = example()
    for victim in (0, 1):
        folder = tmp_path / str(victim)
        with pytest.raises(CheckpointError, match="the test wants it"):
            save_each(states, stores(folder, victim, 0, False))
        assert not folder.exists() or os.listdir(folder) == []


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path):
    _, states = example()
    with pytest.raises(CheckpointError, match="rank 1"):
        save_each(states, [tmp_path / "a", open_store(tmp_path / "b")])


# ---- real models


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Run the script that saves models from four processes; return the folder that it fills."""
    folder = tmp_path_factory.mktemp("models")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", SCRIPT, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", ["apart", "tied", "background"])
def test_transformers_loads_what_four_ranks_saved_of_a_sharded_model(models, case):
    from transformers import AutoModelForCausalLM

    expected = torch.load(models / f"{case}.pt")
    model, told = AutoModelForCausalLM.from_pretrained(models / case, output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        assert torch.equal(model(expected["tokens"]).logits, expected["logits"])
    assert ("lm_head.weight" in contents(models / case)) == (case != "tied")
    assert shardplan.verify(models / case).ok


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_if_a_rank_exits_while_all_write_the_old_checkpoint_stays(models, victim):
    folder = models / f"exit-{victim}"
    for rank in {0, 1, 2, 3} - {victim}:
        assert f"rank {victim}" in (models / f"exit-{victim}.told-{rank}").read_text()
    same(shardplan.restore(folder), {"w": torch.zeros(8, 4)})
    shardplan.save({"w": torch.ones(8, 4)}, folder, format="hf", overwrite=True)
    same(shardplan.restore(folder), {"w": torch.ones(8, 4)})
    assert os.listdir(folder) == ["model.safetensors"]  # what was left behind is gone
