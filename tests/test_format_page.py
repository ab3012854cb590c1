"""The reader on the page about the format reads every version of it, with numpy alone."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import shardplan
from shardplan.dist import run_ranks
from shardplan.planning import Chunk, flatten

ROOT = Path(__file__).parents[1]
GOLDEN = sorted(path for path in (ROOT / "tests/golden").glob("v*") if path.is_dir())


class Rows:
    """Three rows of a tensor, as one rank holds them."""

    def __init__(self, whole, first):
        self.shape, self.dtype, self.first = whole.shape, whole.dtype, first
        self.rows = whole[first : first + 3]

    def __create_chunk_list__(self):
        return [Chunk((self.first, 0), tuple(self.rows.shape))]

    def __get_tensor_shard__(self, index):
        return self.rows


def reader():
    page = (ROOT / "docs/format.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(code.strip().splitlines()) < 70
    names = {}
    exec(code, names)
    return names["read"]


def assert_reads(folder):
    found, expected = reader()(folder), flatten(shardplan.restore(folder))[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            assert found[name].tobytes() == raw, name
            assert found[name].shape[: value.ndim] == tuple(value.shape)
        elif type(value) in (int, str):
            assert found[name] == value


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_the_reader_of_the_page_reads_a_kept_checkpoint_of(folder):
    assert_reads(folder)


def test_the_reader_of_the_page_reads_what_is_written_now(tmp_path):
    whole = torch.arange(96.0).reshape(12, 8)

    def save(comm):
        state = {
            "w": Rows(whole, 3 * comm.rank),
            f"layers.{comm.rank}": torch.full((3,), comm.rank, dtype=torch.bfloat16),
            "b": torch.arange(4),
            "step": 7,
            "raw": b"x" * 100_000,
        }
        shardplan.save(state, tmp_path, comm=comm)

    run_ranks(4, save)
    assert_reads(tmp_path)
    np.testing.assert_array_equal(reader()(tmp_path)["w"], whole.numpy())


def test_the_reader_of_the_page_reads_shared_files(tmp_path):
    state = {"frozen": torch.arange(60_000.0), "trained": torch.zeros(9), "raw": b"x" * 100_000}
    shardplan.save(state, tmp_path / "a")
    state |= {"trained": torch.ones(9), "frozen": torch.cat([state["frozen"], torch.ones(9)])}
    shardplan.save(state, tmp_path / "b", base=tmp_path / "a")
    state |= {"trained": torch.full((9,), 2.0), "raw": b"y"}
    report = shardplan.save(state, tmp_path / "c", base=tmp_path / "b")
    assert report.shared == 4 * 60_009
    assert_reads(tmp_path / "c")
