"""Models that accelerate prepared, with DDP and FSDP2, on ranks of gloo."""

import pytest
import torch
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_prepared_run_resumes_on_another_number_of_ranks(torchrun, tmp_path, kind):
    torchrun("accel.py", 2, tmp_path, "save", kind)
    torchrun("accel.py", 3, tmp_path, "load", kind)
    saved = torch.load(tmp_path / "save-0.pt")
    for rank in range(3):
        loaded = torch.load(tmp_path / f"load-{rank}.pt")
        assert loaded["lr"] == saved["lr"]
        assert loaded["seen"] == 7
        assert loaded["whole"].keys() == saved["whole"].keys()
        assert all(torch.equal(t, saved["whole"][name]) for name, t in loaded["whole"].items())
        pairs = zip(loaded["moments"], saved["moments"], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        same = torch.load(tmp_path / f"save-{rank % 2}.pt")["drawn"]
        assert torch.equal(loaded["drawn"], same)  # random numbers go on from the rank's own state
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert all(torch.equal(t, saved["whole"][name]) for name, t in model.state_dict().items())
