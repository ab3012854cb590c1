"""torchtitan's own optimizers, schedulers and checkpoint manager, on ranks of gloo."""

import shardplan


def test_a_run_resumes_on_another_number_of_ranks(torchrun, tmp_path):
    torchrun("titan.py", 2, tmp_path, "save")
    kept = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert kept == ["step-4", "step-6", "step-7"]  # the last of the run is beside those it keeps
    final = shardplan.open_checkpoint(tmp_path / "checkpoint/step-7")
    assert sorted(final) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    torchrun("titan.py", 3, tmp_path, "resume")


def test_a_checkpoint_of_torchtitan_s_own_manager_resumes(torchrun, tmp_path):
    torchrun("titan.py", 2, tmp_path, "theirs-to-ours")


def test_torchtitan_s_own_manager_resumes_from_the_format_dcp(torchrun, tmp_path):
    torchrun("titan.py", 2, tmp_path, "ours-to-theirs")


def test_the_last_checkpoint_in_the_format_of_hugging_face_starts_another_run(torchrun, tmp_path):
    torchrun("titan.py", 2, tmp_path, "hf")
    names = sorted(path.name for path in (tmp_path / "checkpoint/step-1").iterdir())
    assert "sharded" not in names
    assert any(name.endswith(".safetensors") for name in names)
