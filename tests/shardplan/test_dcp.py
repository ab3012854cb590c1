"""shardplan.dcp in place of torch.distributed.checkpoint, and the other way round."""

import inspect
import io
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import Future
from difflib import ndiff
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torchs
from torch.distributed.checkpoint import _extension, format_utils

import shardplan.dcp as dcp
from shardplan.io.errors import ExistsError, ValueRefusedError
from shardplan.planning import PlanError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:The argument order of:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*_state_dict. is deprecated:FutureWarning"),
]

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def back_to_dcp():
    yield
    dcp.use("dcp")


@pytest.fixture
def torch_works(monkeypatch):
    """Return a list of the functions of torch that were called."""
    called = []
    for module in (dcp.state_dict_saver._torchs, dcp.state_dict_loader._torchs):
        for name in ("save", "load", "async_save", "save_state_dict", "load_state_dict"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, _noting(called, name, getattr(module, name)))
    return called


def _noting(called, name, function):
    def call(*args, **kwargs):
        called.append(name)
        return function(*args, **kwargs)

    return call


def state(scale=1):
    return {"model": {"w": scale * torch.arange(6.0).reshape(2, 3)}, "step": 7 * scale}


def same(one, other):
    return torch.equal(one["model"]["w"], other["model"]["w"]) and one["step"] == other["step"]


class Counter:
    """An object that keeps its own state."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


# Names and signatures

OURS = ("save", "load", "async_save", "save_state_dict", "load_state_dict")


@pytest.mark.parametrize("name", OURS)
def test_a_signature_is_torch_s_and_at_most_a_format(name):
    mine, theirs = (inspect.signature(getattr(m, name)).parameters for m in (dcp, torchs))
    more = [own for own in mine if own not in theirs]
    assert more == (["format"] if name in ("save", "async_save") else [])
    for key, parameter in theirs.items():
        assert (mine[key].kind, mine[key].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("name", format_utils.__all__)
def test_conversion_has_the_parameters_of_torch(name):
    mine, theirs = (getattr(m, name) for m in (dcp.format_utils, format_utils))
    assert list(inspect.signature(mine).parameters) == list(inspect.signature(theirs).parameters)


def test_every_public_name_of_torch_is_there_and_torch_s_unless_it_is_ours():
    replaced = {*OURS, "state_dict_loader", "state_dict_saver", "format_utils"}
    names = [name for name in dir(torchs) if not name.startswith("_")]
    assert len(names) > 30
    assert [n for n in names if getattr(dcp, n) is not getattr(torchs, n)] == sorted(
        replaced & {*names}
    )
    with pytest.raises(AttributeError, match="nothing"):
        _ = dcp.nothing


@pytest.mark.parametrize("name", ["state_dict", "planner", "metadata", "filesystem", "stateful"])
def test_a_submodule_that_is_not_replaced_is_torch_s_own(name):
    theirs = import_module(f"torch.distributed.checkpoint.{name}")
    assert import_module(f"shardplan.dcp.{name}") is theirs is getattr(dcp, name)


def test_a_replaced_submodule_has_torch_s_other_names():
    from shardplan.dcp.state_dict_loader import _load_state_dict_from_keys, load
    from shardplan.dcp.state_dict_saver import AsyncSaveResponse, save

    assert (save, load) == (dcp.save, dcp.load)
    assert AsyncSaveResponse is torchs.state_dict_saver.AsyncSaveResponse
    assert _load_state_dict_from_keys is torchs.state_dict_loader._load_state_dict_from_keys


# There and back


def test_torch_reads_what_it_wrote_and_it_reads_what_torch_wrote(tmp_path, torch_works):
    dcp.save(state(), checkpoint_id=tmp_path / "ours")
    assert torch_works == []
    torchs.save(state(), checkpoint_id=tmp_path / "theirs")
    for load, name in ((torchs.load, "ours"), (dcp.load, "theirs"), (dcp.load, "ours")):
        got = state(0)
        load(got, checkpoint_id=tmp_path / name)
        assert same(got, state())


def test_a_save_returns_torch_s_metadata(tmp_path):
    mine = dcp.save(state() | {"betas": [1, (2, {})]}, checkpoint_id=tmp_path / "ours")
    theirs = torchs.save(state() | {"betas": [1, (2, {})]}, checkpoint_id=tmp_path / "theirs")
    assert isinstance(mine, torchs.Metadata)
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.version == theirs.version
    assert mine.planner_data == theirs.planner_data
    flat = dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "flat")
    assert flat.planner_data == {"w": ("w",)}


def test_tensors_are_filled_in_place_and_cast_and_values_are_replaced(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path)
    got = {"model": {"w": torch.zeros(2, 3, dtype=torch.float64)}, "step": None}
    inner, tensor = got["model"], got["model"]["w"]
    assert dcp.load(got, checkpoint_id=tmp_path) is None
    assert got["model"] is inner
    assert inner["w"] is tensor
    assert torch.equal(tensor, state()["model"]["w"].double())
    assert got["step"] == 7


def test_objects_get_their_state_in_order_of_their_keys(tmp_path):
    class Noted(Counter):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            order.append(self.number)

    order = []
    dcp.save({"b": Noted(2), "a": Noted(1)}, checkpoint_id=tmp_path)
    got = {"b": Noted(0), "a": Noted(0)}
    dcp.load(got, checkpoint_id=tmp_path)
    assert order == [1, 2]
    assert isinstance(got["b"], Noted)


def test_what_the_checkpoint_has_beyond_the_state_dict_is_ignored(tmp_path):
    dcp.save(state() | {"more": 1}, checkpoint_id=tmp_path)
    got = state(0)
    dcp.load(got, checkpoint_id=tmp_path)
    assert same(got, state())


def test_the_storage_may_come_second_and_be_reset_to_another_place(tmp_path, torch_works):
    writer, reader = dcp.FileSystemWriter(tmp_path / "a"), dcp.FileSystemReader(tmp_path / "a")
    with pytest.warns(UserWarning, match="argument order"):
        dcp.save(state(), writer)
    dcp.save(state(2), storage_writer=writer, checkpoint_id=tmp_path / "b")
    one, other = state(0), state(0)
    dcp.load(one, reader)
    dcp.load(other, storage_reader=reader, checkpoint_id=tmp_path / "b")
    assert same(one, state())
    assert same(other, state(2))
    assert torch_works == []


def test_the_ids_of_a_save_are_the_writer_s(tmp_path):
    writer, reader = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)
    returned = dcp.save(state(), storage_writer=writer)
    found = reader.read_metadata().storage_meta
    assert str(found.checkpoint_id) == str(tmp_path) == returned.storage_meta.checkpoint_id
    assert found.save_id == writer.save_id == returned.storage_meta.save_id


def test_the_deprecated_functions_work_and_warn(tmp_path, torch_works):
    writer, reader = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)
    with pytest.warns(FutureWarning, match="save_state_dict"):
        metadata = dcp.save_state_dict(state(), writer, no_dist=True)
    got = state(0)
    with pytest.warns(FutureWarning, match="load_state_dict"):
        dcp.load_state_dict(got, reader, no_dist=True)
    assert same(got, state())
    assert isinstance(metadata, torchs.Metadata)
    assert torch_works == []


def test_a_background_save_returns_a_future_of_the_metadata(tmp_path, torch_works):
    saved = state()
    future = dcp.async_save(saved, checkpoint_id=tmp_path)
    saved["model"]["w"].zero_()
    assert isinstance(future, Future)
    assert not future.cancel()
    assert set(future.result().state_dict_metadata) == {"model.w", "step"}
    got = state(0)
    torchs.load(got, checkpoint_id=tmp_path)
    assert same(got, state())
    assert torch_works == []


def test_a_planner_that_is_given_knows_the_metadata_after_a_load(tmp_path, torch_works):
    dcp.save(state(), checkpoint_id=tmp_path)
    planner = dcp.DefaultLoadPlanner()
    dcp.load(state(0), checkpoint_id=tmp_path, planner=planner)
    assert set(planner.metadata.state_dict_metadata) == {"model.w", "step"}
    assert torch_works == []


# Formats


def test_another_format_is_written_if_it_is_asked_for_and_any_is_read(tmp_path):
    dcp.use("safetensors")
    dcp.save(state(), checkpoint_id=tmp_path / "used")
    dcp.use("dcp")
    dcp.save(state(), checkpoint_id=tmp_path / "given", format="safetensors")
    dcp.async_save(state(), checkpoint_id=tmp_path / "async", format="safetensors").result()
    for name in ("used", "given", "async"):
        assert (tmp_path / name / "shardplan.json").exists()
        got = state(0)
        dcp.load(got, checkpoint_id=tmp_path / name)
        assert same(got, state())


def test_an_unknown_format_is_refused_at_once():
    with pytest.raises(ValueError, match="nonsense"):
        dcp.use("nonsense")
    assert dcp._calls.used_format() == "dcp"


def test_a_bucket_that_torch_cannot_open_is_ours(monkeypatch):
    monkeypatch.setattr(dcp._calls, "_storage_setup", _refuse_all)
    assert dcp._calls.find_place(None, "s3://bucket/a", reader=True).path == "s3://bucket/a"
    with pytest.raises(RuntimeError, match="Cannot detect"):
        dcp.save({}, checkpoint_id="abc://a/b")
    with pytest.raises(RuntimeError, match="Cannot detect"):
        dcp.load({})


def _refuse_all(*args, **kwargs):
    raise RuntimeError("Cannot detect")


# Errors


def test_a_missing_key_and_another_size_are_torch_s_errors_and_carry_ours(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path)
    wanted = {"model": {"w": torch.zeros(3, 3)}, "other": 0}
    with pytest.raises(torchs.CheckpointException) as caught:
        dcp.load(wanted, checkpoint_id=tmp_path)
    text = str(caught.value)
    assert "Missing key in checkpoint state_dict: other." in text
    sizes = "saved torch.Size([2, 3]) and current: torch.Size([3, 3]) for model.w"
    assert f"Size mismatch between {sizes}" in text
    ours = caught.value.__cause__
    assert isinstance(ours, PlanError)
    assert {issue.fqn for issue in ours.issues} == {"model.w", "other"}


@pytest.mark.parametrize(
    "wanted",
    [{"modle": {"w": torch.zeros(2, 3)}}, {"model": 0}, {"x": {"y": torch.zeros(2, 3)}}, {"v": 1}],
)
def test_whatever_our_message_suggests_a_missing_key_is_called_so(tmp_path, wanted):
    dcp.save(state(), checkpoint_id=tmp_path)
    with pytest.raises(torchs.CheckpointException, match="Missing key in checkpoint"):
        dcp.load(wanted, checkpoint_id=tmp_path)


def test_a_partial_load_leaves_what_is_missing(tmp_path, torch_works):
    dcp.save(state(), checkpoint_id=tmp_path)
    got = state(0) | {"other": 5}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(got, checkpoint_id=tmp_path, planner=planner)
    assert same(got, state())
    assert got["other"] == 5
    assert torch_works == []


def test_a_checkpoint_is_replaced_unless_the_writer_says_no(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path)
    dcp.save(state(2), checkpoint_id=tmp_path)
    with pytest.raises(torchs.CheckpointException, match="Checkpoint already exists") as caught:
        dcp.save(state(3), storage_writer=dcp.FileSystemWriter(tmp_path, overwrite=False))
    assert isinstance(caught.value.__cause__, ExistsError)
    got = state(0)
    dcp.load(got, checkpoint_id=tmp_path)
    assert same(got, state(2))


def test_a_value_that_would_run_code_when_it_is_loaded_is_refused(tmp_path):
    with pytest.raises(torchs.CheckpointException, match="counter") as caught:
        dcp.save({"counter": Counter}, checkpoint_id=tmp_path)
    assert isinstance(caught.value.__cause__, ValueRefusedError)


def test_an_error_in_the_background_is_the_future_s(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(torchs.CheckpointException):
        dcp.async_save(state(), checkpoint_id=tmp_path / "file" / "a").result()


def test_no_place_to_save_is_torch_s_error():
    with pytest.raises(RuntimeError, match="checkpoint_id"):
        dcp.save({})
    with pytest.raises(RuntimeError, match="checkpoint_id"):
        dcp.async_save({})


# What torch carries out


class Doubling(dcp.DefaultSavePlanner):
    def lookup_object(self, index):
        return super().lookup_object(index) * 2


class Halving(dcp.DefaultLoadPlanner):
    def commit_tensor(self, read_item, tensor):
        tensor.div_(2)

    def load_bytes(self, read_item, value):
        halved = io.BytesIO()
        torch.save(torch.load(value) // 2, halved)
        super().load_bytes(read_item, io.BytesIO(halved.getvalue()))


class Writer(dcp.FileSystemWriter):
    pass


class Reader(dcp.FileSystemReader):
    pass


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_planners_of_the_caller_s_own_keep_working(tmp_path, torch_works, format):
    dcp.use(format)
    dcp.save(state(), checkpoint_id=tmp_path, planner=Doubling())
    doubled, got = state(0), state(0)
    dcp.load(doubled, checkpoint_id=tmp_path)
    dcp.load(got, checkpoint_id=tmp_path, planner=Halving())
    assert same(doubled, state(2))
    assert same(got, state())
    assert torch_works == ["save", "load"]
    assert (tmp_path / "shardplan.json").exists() == (format == "safetensors")


def test_a_format_that_torch_s_planners_cannot_write_is_refused(tmp_path):
    with pytest.raises(ValueError, match="convert"):
        dcp.save(state(), checkpoint_id=tmp_path, planner=Doubling(), format="hf")


def test_storage_of_the_caller_s_own_keeps_working(tmp_path, torch_works):
    dcp.save(state(), storage_writer=Writer(tmp_path))
    got = state(0)
    dcp.load(got, storage_reader=Reader(tmp_path))
    assert same(got, state())
    dcp.save_state_dict(state(), Writer(tmp_path), no_dist=True)
    dcp.load_state_dict(got, Reader(tmp_path), no_dist=True)
    future = dcp.async_save(state(), storage_writer=Writer(tmp_path))
    future.result()
    functions = ["save", "load", "save_state_dict", "load_state_dict", "async_save"]
    assert torch_works[:5] == functions  # and the last one calls save in its thread


@pytest.mark.parametrize(
    "writer",
    [
        {"single_file_per_rank": False},
        {"sync_files": False},
        {"serialization_format": dcp.filesystem.SerializationFormat.SAFETENSORS},
    ],
)
def test_options_that_change_the_files_are_torch_s_to_carry_out(tmp_path, torch_works, writer):
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path, **writer))
    assert torch_works == ["save"]


def test_options_for_speed_are_not(tmp_path, torch_works):
    writer = dcp.FileSystemWriter(tmp_path, thread_count=4, per_thread_copy_ahead=0)
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state(), storage_writer=writer, planner=planner)
    assert torch_works == []


def test_planners_with_other_options_are_torch_s_to_carry_out(tmp_path, torch_works):
    flat = {"w": torch.ones(2)}
    for planner in (
        dcp.DefaultSavePlanner(flatten_state_dict=False),
        dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    ):
        dcp.save(flat, checkpoint_id=tmp_path, planner=planner)
    planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
    dcp.load(flat, checkpoint_id=tmp_path, planner=planner)
    assert torch_works == ["save", "save", "load"]


class Flipping(_extension.StreamTransformExtension):
    """An extension of torch's files: every byte is flipped."""

    @staticmethod
    def registry_name():
        return "stream.flip"

    @staticmethod
    def from_descriptor(version):
        return Flipping()

    def get_descriptor(self):
        return f"{self.registry_name()}/1"

    def transform_to(self, output):
        return _Flipped(output)

    def transform_from(self, input):
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


class _Flipped(io.RawIOBase):
    def __init__(self, output):
        self.output = output

    def writable(self):
        return True

    def write(self, data):
        self.output.write(bytes(255 - byte for byte in bytes(data)))
        return len(data)


def test_extensions_of_torch_s_files_keep_working(tmp_path, torch_works, monkeypatch):
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[Flipping()]))
    registry = _extension.ExtensionRegistry()
    registry.register(Flipping)
    given, default = state(0), state(0)
    reader = dcp.FileSystemReader(tmp_path, _extension_registry=registry)
    dcp.load(given, storage_reader=reader)
    register = _extension.ExtensionRegistry.__init__
    monkeypatch.setattr(
        _extension.ExtensionRegistry,
        "__init__",
        lambda self: (register(self), self.register(Flipping))[0],
    )
    dcp.load(default, checkpoint_id=tmp_path)  # found to be written so
    assert same(given, state())
    assert same(default, state())
    assert torch_works == ["save", "load", "load"]


def test_a_save_by_each_rank_for_itself_is_torch_s_to_carry_out(tmp_path, torch_works):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, use_collectives=False)
    got = {"w": torch.zeros(2)}
    dcp.load(got, checkpoint_id=tmp_path)
    assert torch_works == ["save"]
    assert torch.equal(got["w"], torch.ones(2))


# Conversion


def test_files_of_torch_save_are_converted_both_ways(tmp_path):
    torch.save(state(), tmp_path / "a.pt")
    assert dcp.format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "b") is None
    got = state(0)
    torchs.load(got, checkpoint_id=tmp_path / "b")
    assert same(got, state())
    assert dcp.format_utils.dcp_to_torch_save(tmp_path / "b", tmp_path / "c.pt") is None
    assert same(torch.load(tmp_path / "c.pt"), state())
    with pytest.raises(torchs.CheckpointException):
        dcp.format_utils.dcp_to_torch_save(tmp_path / "nothing", tmp_path / "d.pt")


def test_a_file_of_torch_save_is_loaded_with_all_of_its_values(tmp_path, torch_works):
    torch.save(state(), tmp_path / "a.pt")
    got = state(0)
    dcp.load(
        got,
        storage_reader=dcp.format_utils.BroadcastingTorchSaveReader(),
        planner=dcp.format_utils.DynamicMetaLoadPlanner(),
        checkpoint_id=tmp_path / "a.pt",
    )
    assert same(got, state())
    assert torch_works == []


# Many ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Run every case on four real ranks; return, per case, what each rank found."""
    folder = tmp_path_factory.mktemp("dropin")
    command = [sys.executable, "-P", TESTS / "ranks" / "dropin.py"]
    run([[*command, str(rank), "4", folder / "store", folder] for rank in range(4)])
    ranks = [json.loads((folder / f"told-{rank}").read_text()) for rank in range(4)]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def run(commands, **environment):
    """Run processes at the same time; return what each printed."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment
    processes = [
        subprocess.Popen(
            [*map(str, command)],
            env=os.environ | environment | {"RANK": str(rank), "WORLD_SIZE": str(len(commands))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        printed = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(commands), printed
    return [out for out, _ in printed]


@pytest.mark.slow
def test_ranks_exchange_checkpoints_with_torch_under_any_sharding(told):
    for rank in told["to_and_from_torch"]:
        assert rank["differ"] == []
        ours, theirs = rank["metadata"]
        assert ours == theirs == told["to_and_from_torch"][0]["metadata"][0]


@pytest.mark.slow
def test_a_sharded_tensor_is_saved_and_loaded_under_another_sharding(told):
    assert told["sharded_tensors"] == [[True, True], [True, True], [True], [True]]


@pytest.mark.slow
def test_ranks_save_in_the_background(told):
    assert [rank["differ"] for rank in told["in_the_background"]] == [[]] * 4
    assert len({rank["metadata"] for rank in told["in_the_background"]}) == 1


@pytest.mark.slow
def test_a_group_of_ranks_saves_by_itself_and_any_of_them_coordinates(told):
    first, second, third, fourth = told["by_some_ranks"]
    assert first is third is None
    assert second == fourth
    assert second["differ"] == []


@pytest.mark.slow
def test_without_dist_each_rank_saves_its_own(told):
    assert told["each_alone"] == [True] * 4


@pytest.mark.slow
def test_a_failure_of_one_rank_is_raised_alike_on_all_in_torch_s_words(told):
    for rank in told["failures"]:
        assert rank["kinds"] == {"2": "RuntimeError"}
        assert rank["ranks"] == [2]
        assert "Missing key in checkpoint state_dict: other." in rank["text"]
        assert "Size mismatch between saved torch.Size([3])" in rank["text"]


@pytest.mark.slow
def test_planners_of_the_caller_s_own_keep_working_on_many_ranks(told):
    assert told["with_a_planner_of_ones_own"] == [{"dcp": True, "safetensors": True}] * 4


# A training script that changes over

SCRIPTS = TESTS / "training"


def train(script, ranks, *arguments):
    """Run a training script; return the losses that it printed, by step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", SCRIPTS / f"{script}.py", *arguments]
    printed = run([command] * ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    lines = [line.split() for line in printed[0].splitlines()]
    return {int(step): float(loss) for step, loss in lines}


def test_a_training_script_changes_over_in_one_line():
    before, after = (
        (SCRIPTS / f"{name}.py").read_text().splitlines()
        for name in ("with_torch", "with_shardplan")
    )
    changed = [line for line in ndiff(before, after) if line[0] in "+-"]
    assert changed == [
        "- import torch.distributed.checkpoint as dcp",
        "+ import shardplan.dcp as dcp",
    ]


@pytest.mark.slow
def test_training_that_resumes_on_half_of_the_ranks_has_the_same_losses(tmp_path):
    theirs = train("with_torch", 4, tmp_path / "theirs")
    ours = train("with_shardplan", 4, tmp_path / "ours")
    assert ours == theirs
    assert list(ours) == list(range(6))
    later = {step: loss for step, loss in ours.items() if step >= 3}
    for script, folder in (("with_shardplan", "ours"), ("with_torch", "ours")):
        assert train(script, 2, tmp_path / folder, "resume") == pytest.approx(later, rel=1e-5)
    resumed = train("with_shardplan", 2, tmp_path / "theirs", "resume")
    assert resumed == pytest.approx(later, rel=1e-5)
