"""The training loop of the README, as a new user would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import shardplan

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def torchrun(folder, ranks):
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_training_loop_saves_resumes_on_fewer_ranks_and_exports(tmp_path):
    (code,) = re.findall(r"^```python\n(# train.py.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert code.count(", 11)") == 1
    (tmp_path / "train.py").write_text(code.replace(", 11)", ", 7)"))
    torchrun(tmp_path, 4)
    early = tmp_path / "runs/a/step-5/shardplan.json"
    manifest = early.read_bytes()
    (tmp_path / "train.py").write_text(code)
    torchrun(tmp_path, 2)
    assert early.read_bytes() == manifest  # it was not trained and saved again
    late = shardplan.open_checkpoint(tmp_path / "runs/a/step-10")
    steps = {float(late[name]) for name in late if name.endswith(".step")}
    assert steps == {11.0}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, late[f"model.{name}"][...].bfloat16()), name
