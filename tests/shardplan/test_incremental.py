"""Incremental saves: what is unchanged is shared, and no checkpoint needs another."""

import json
import math
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import shardplan
from shardplan import Checkpoints, Keep, open_checkpoint, prune, restore, save, verify
from shardplan.cli.app import app
from shardplan.dist import CheckpointError, run_ranks
from shardplan.io import FormatError, open_store
from shardplan.planning import Chunk


class Rows:
    """Some rows of a tensor, as one rank holds them."""

    def __init__(self, whole, low, high):
        self.shape, self.dtype = whole.shape, whole.dtype
        self.rows, self.low = whole[low:high].clone(), low

    def __create_chunk_list__(self):
        return [Chunk((self.low, 0), tuple(self.rows.shape))]

    def __get_tensor_shard__(self, index):
        return self.rows


def part(state, comm):
    """Return what a rank holds: every matrix is cut by rows."""
    made = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.ndim == 2:
            edges = [len(value) * n // comm.world_size for n in range(comm.world_size + 1)]
            made[name] = Rows(value, edges[comm.rank], edges[comm.rank + 1])
        else:
            made[name] = value
    return made


def same(path, state):
    found = restore(path)
    assert found.keys() == state.keys()
    for name, value in state.items():
        equal = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert equal, name
    return verify(path).ok


def start(**more):
    return {"frozen": torch.randn(400, 30), "trained": torch.zeros(3, 5), "step": 1, **more}


def files(path):
    return {file.name: file for file in path.glob("*.safetensors")}


CHANGES = st.lists(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 7)), max_size=6), max_size=4
)


@settings(max_examples=15)
@given(CHANGES, st.lists(st.integers(1, 3), min_size=5, max_size=5), st.data())
def test_any_chain_of_saves_restores_what_was_saved(tmp_path_factory, changes, ranks, data):
    root = tmp_path_factory.mktemp("chain")
    state = {name: torch.randn(8, 4) for name in "abc"} | {"d": torch.randn(8), "step": 0}
    saved = []
    for number, touched in enumerate([[], *changes]):
        for name, row in touched:
            state[name] = state[name].clone()
            state[name][row] += 1
        state["step"] = number
        base = data.draw(st.sampled_from([None, *range(len(saved))])) if saved else None

        def work(comm, state=state, number=number, base=base):
            based = None if base is None else root / str(base)
            return save(part(state, comm), root / str(number), base=based, comm=comm)

        run_ranks(ranks[number], work)
        saved.append(dict(state))
        assert same(root / str(number), state)
    gone = data.draw(st.sets(st.integers(0, len(saved) - 1)))
    for number in gone:
        shutil.rmtree(root / str(number))
    for number, state in enumerate(saved):
        if number not in gone:
            assert same(root / str(number), state)


def test_only_what_changed_is_written(tmp_path):
    state = start()
    save(state, tmp_path / "1")
    state |= {"trained": torch.ones(3, 5), "step": 2}
    report = save(state, tmp_path / "2", base=tmp_path / "1")
    assert report.shared == 4 * 400 * 30
    assert report.nbytes < 3_000
    assert "46.9 KiB shared" in str(report)
    (shared,) = files(tmp_path / "2").keys() & files(tmp_path / "1").keys()
    assert files(tmp_path / "2")[shared].samefile(files(tmp_path / "1")[shared])
    assert same(tmp_path / "1", start() | restore(tmp_path / "1"))
    assert same(tmp_path / "2", state)


def test_each_rank_leaves_out_what_is_unchanged(tmp_path):
    state = start()

    def work(comm):
        save(part(state, comm), tmp_path / "1", comm=comm)
        changed = state | {"trained": torch.ones(3, 5)}
        return save(part(changed, comm), tmp_path / "2", base=tmp_path / "1", comm=comm).shared

    assert run_ranks(3, work) == [4 * 400 * 30] * 3
    assert same(tmp_path / "2", state | {"trained": torch.ones(3, 5)})


def test_a_file_of_which_little_is_unchanged_is_not_shared(tmp_path):
    state = start()
    save(state, tmp_path / "1")
    state["frozen"] = state["frozen"] + 1
    assert save(state, tmp_path / "2", base=tmp_path / "1").shared == 0
    assert json.loads((tmp_path / "2/shardplan.json").read_bytes())["version"] == 3
    assert same(tmp_path / "2", state)


def test_another_dtype_shape_or_tiling_counts_as_changed(tmp_path):
    state = {
        "a": torch.ones(64),
        "b": torch.ones(64),
        "c": torch.ones(8, 8),
        "keep": torch.ones(999),
    }
    save(state, tmp_path / "1")
    state |= {"a": torch.ones(64).double(), "b": torch.ones(32, 2)}
    assert save(state, tmp_path / "2", base=tmp_path / "1").shared == 4 * (64 + 999)
    assert same(tmp_path / "2", state)

    def work(comm):
        return save(part(state, comm), tmp_path / "3", base=tmp_path / "2", comm=comm).shared

    run_ranks(2, work)
    assert same(tmp_path / "3", state)


def test_a_save_over_its_own_base_keeps_what_it_shares(tmp_path):
    state = start()
    save(state, tmp_path / "1")
    state["trained"] = torch.ones(3, 5)
    save(state, tmp_path / "1", base=tmp_path / "1", overwrite=True)
    assert len(files(tmp_path / "1")) == 2
    assert same(tmp_path / "1", state)


def test_a_save_that_fails_leaves_no_names_behind(tmp_path):
    state = start()
    save(state, tmp_path / "1")

    def work(comm):
        mine = part(state, comm) | {"trained": torch.ones(3, 5)}
        if comm.rank == 1:
            mine["bad"] = torch.ones(2).to_sparse()
        save(mine, tmp_path / "2", base=tmp_path / "1", comm=comm)

    with pytest.raises(CheckpointError):
        run_ranks(2, work)
    with pytest.raises(RuntimeError, match="full"):
        save(state, tmp_path / "2", base=tmp_path / "1", progress=full)
    assert not (tmp_path / "2").exists() or not files(tmp_path / "2")
    assert same(tmp_path / "1", state)


def full(done, total):
    raise RuntimeError("full")


def test_names_that_a_killed_save_left_are_pruned(tmp_path):
    state = start()
    save(state, tmp_path / "1")
    (tmp_path / "2").mkdir()
    (name,) = files(tmp_path / "1")
    os.link(tmp_path / "1" / name, tmp_path / "2" / name)
    assert prune(tmp_path, keep_last=1).spared == (f"2/{name}",)
    assert prune(tmp_path, keep_last=1, min_age=0).leftovers == (f"2/{name}",)
    assert same(tmp_path / "1", state)


def test_damage_and_strange_files_are_found_in_what_is_shared(tmp_path):
    state = start()
    save(state, tmp_path / "1")
    state["trained"] = torch.ones(3, 5)
    save(state, tmp_path / "2", base=tmp_path / "1")
    (shared,) = files(tmp_path / "2").keys() & files(tmp_path / "1").keys()
    path = tmp_path / "2" / shared
    good = path.read_bytes()
    path.unlink()
    assert [fault.kind for fault in verify(tmp_path / "2").faults] == ["missing"]
    path.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])  # what is not used may differ
    assert verify(tmp_path / "2").ok
    assert same(tmp_path / "2", state)
    path.write_bytes(good[:9000] + bytes([good[9000] ^ 1]) + good[9001:])
    assert [fault.kind for fault in verify(tmp_path / "2").faults] == ["checksum"]
    with pytest.raises(FormatError, match="checksum"):
        restore(tmp_path / "2")
    other = start()
    save(other, tmp_path / "3")
    shutil.copy(next(iter(files(tmp_path / "3").values())), path)
    assert [fault.kind for fault in verify(tmp_path / "2").faults] == ["foreign"]


def test_it_is_refused_where_it_has_no_meaning(tmp_path):
    save(start(), tmp_path / "dcp", format="dcp")
    with pytest.raises(ValueError, match="base must be a checkpoint of our own format"):
        save(start(), tmp_path / "1", base=tmp_path / "dcp")
    with pytest.raises(ValueError, match="not for 'hf'"):
        save({"w": torch.ones(2)}, tmp_path / "1", base=tmp_path / "dcp", format="hf")
    with pytest.raises(ValueError, match="not for 'dcp'"):
        Checkpoints(tmp_path, format="dcp", incremental=True)
    with pytest.raises(FormatError, match="no checkpoint"):
        save(start(), tmp_path / "1", base=tmp_path / "none")


def test_a_store_without_links_has_all_written(tmp_path):
    store, state = open_store("memory://incremental"), start()
    save(state, store.folder("1"))
    assert save(state, store.folder("2"), base=store.folder("1")).shared == 0
    assert verify(store.folder("2")).ok


def test_a_run_shares_with_its_newest_checkpoint(tmp_path):
    state, shares = start(), []
    for background in (False, True):
        run = Checkpoints(
            tmp_path, every=1, keep=Keep(last=2), incremental=True, background=background
        )
        for step in range(run.restore(state, default=1), run.restore(state, default=1) + 3):
            state |= {"trained": torch.full((3, 5), float(step)), "step": step}
            done = run.save(step, state)
            shares.append((done.result() if background else done).shared)
        run.wait()
    assert shares == [0] + [4 * 400 * 30] * 5
    assert run.steps() == (5, 6)
    assert same(tmp_path / "step-5", state | {"trained": torch.full((3, 5), 5.0), "step": 5})
    assert same(tmp_path / "step-6", state)


def test_inspect_says_what_is_shared_and_convert_makes_it_stand_alone(tmp_path):
    state = start()
    save(state, tmp_path / "1")
    state["trained"] = torch.ones(3, 5)
    save(state, tmp_path / "2", base=tmp_path / "1")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "2")]).stdout
    assert "in 2 files, 1 of them shared with an earlier checkpoint" in shown
    as_json = CliRunner().invoke(app, ["inspect", str(tmp_path / "2"), "--json"]).stdout
    assert sorted(file["shared"] for file in json.loads(as_json)["files"]) == [False, True]
    shardplan.convert(tmp_path / "2", tmp_path / "alone")
    assert not open_checkpoint(tmp_path / "alone").reader.source.shared_files
    assert all(file.stat().st_nlink == 1 for file in files(tmp_path / "alone").values())
    assert same(tmp_path / "alone", state)


def test_large_chunks_of_several_blocks_are_compared(tmp_path):
    state = {"w": torch.zeros(9 << 20), "step": 0}  # 36 MiB
    save(state, tmp_path / "1")
    assert save(state, tmp_path / "2", base=tmp_path / "1").shared == 36 << 20
    state["w"][-1] = math.pi
    assert save(state, tmp_path / "3", base=tmp_path / "1").shared == 0
    assert restore(tmp_path / "3")["w"][-1] == torch.tensor(math.pi)


def test_a_save_in_which_nothing_has_changed_is_pointed_out(tmp_path, caplog):
    state = start()
    run = Checkpoints(tmp_path, every=1, incremental=True, background=False)
    run.save(1, state)
    run.save(2, state | {"trained": torch.ones(3, 5)})
    assert "has changed" not in caplog.text
    run.save(3, state | {"trained": torch.ones(3, 5), "step": 3})
    assert f"no tensor of {tmp_path}/step-3 has changed since save" in caplog.text


def test_damage_that_restore_found_is_not_shared(tmp_path):
    frozen = torch.randn(30, 1000)
    run = Checkpoints(tmp_path, every=1, incremental=True, background=False)
    for step in (1, 2):
        run.save(step, {"frozen": frozen, "adapter": torch.full((8,), float(step))})
    for file in (tmp_path / "step-2").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.unlink()  # step-1 keeps what it has
        file.write_bytes(data)
    into = {"frozen": torch.zeros(30, 1000), "adapter": torch.zeros(8)}
    with pytest.warns(UserWarning, match="step-2 is damaged"):
        assert run.restore(into) == 2
    report = run.save(3, {**into, "adapter": torch.ones(8) * 3})
    assert report.shared == frozen.nbytes  # with step-1
    assert verify(tmp_path / "step-3").ok
