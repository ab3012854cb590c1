"""Layouts, keys and dtypes that have broken checkpoints in the field, each with its public report.

PT is pytorch/pytorch, xla is pytorch/xla.
"""

import re

import numpy as np
import pytest
import torch

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    Grid,
    Mesh,
    Metadata,
    MetadataIndex,
    PlanError,
    SavePlan,
    Shard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    dedup_replicas,
    find_issues,
    find_shard,
    flatten,
    global_plan,
    is_exact_cast,
    load_plan,
    local_plan,
    resolve_overlaps,
    unflatten,
)


def shard(name, size, offsets, sizes, dtype="float32"):
    data = TensorWriteData(Chunk(offsets, sizes), TensorProperties(dtype), size)
    return WriteItem(MetadataIndex(name), WriteItemType.SHARD, data)


def world(specs, **axes):
    """Plan a state dict of specs on every rank of a mesh."""
    mesh = Mesh(**axes)
    return [local_plan(specs, mesh=mesh, rank=rank) for rank in range(len(mesh))]


def rows_held(plans):
    """Return how many rows of its one tensor each rank holds."""
    return [sum(item.tensor_data.chunk.sizes[0] for item in plan.items) for plan in plans]


def issues_of(call, *args, **options):
    with pytest.raises(PlanError) as failure:
        call(*args, **options)
    return [(issue.kind, issue.fqn) for issue in failure.value.issues]


def cells(offsets, sizes):
    """Return the positions of a box as a set."""
    axes = (range(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    return set(map(tuple, np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(sizes))))


def assert_read_exactly_once(reads, name, wanted):
    """Check that reads fill chunks cell by cell, each from the cell it was saved in."""
    filled = {chunk: [] for chunk in wanted}
    by_offset = {chunk.offsets: chunk for chunk in wanted}
    for item in reads:
        if item.dest_index.fqn != name:
            continue
        chunk = by_offset[item.dest_index.offset]
        to = [a + b for a, b in zip(item.dest_offsets, chunk.offsets, strict=True)]
        source = item.storage_index.offset
        assert to == [a + b for a, b in zip(item.storage_offsets, source, strict=True)]
        filled[chunk] += cells(to, item.lengths)
    for chunk, got in filled.items():
        assert len(got) == len(set(got))
        assert set(got) == cells(chunk.offsets, chunk.sizes)


def assert_loads_as(metadata, specs, **axes):
    """Check that every rank of another mesh reads each of its cells exactly once."""
    for plan in world(specs, **axes):
        reads = load_plan(metadata, plan).items
        for name in specs:
            chunks = [i.tensor_data.chunk for i in plan.items if i.index.fqn == name]
            assert_read_exactly_once(reads, name, chunks)


# Shapes


def test_six_rows_on_four_ranks_leave_the_last_one_empty_handed():
    """Rows [2, 2, 2, 0] (PT#108869)."""
    specs = {"w": TensorSpec((6, 3), "float32", [Shard(0)])}
    plans = world(specs, dp=4)
    assert rows_held(plans) == [2, 2, 2, 0]
    assert len(plans[3].items) == 0
    _, metadata = global_plan(plans)
    assert len(metadata.state_dict_metadata["w"].chunks) == 3
    for ranks in (1, 2, 3, 5):
        assert_loads_as(metadata, specs, dp=ranks)


@pytest.mark.parametrize("empty_first", [True, False])
def test_an_empty_shard_that_shares_an_offset_with_a_real_one_changes_nothing(empty_first):
    """PT PR#150862."""
    plans = [SavePlan([shard("w", (4,), (0,), (0,))]), SavePlan([shard("w", (4,), (0,), (4,))])]
    plans = plans if empty_first else plans[::-1]
    assert find_issues(plans) == ()
    _, metadata = global_plan(plans)
    assert metadata.state_dict_metadata["w"].chunks == (Chunk((0,), (4,)),)


@pytest.mark.parametrize("shape", [(1, 7, 5), (1, 5)])
def test_a_tensor_of_one_row_lies_whole_on_the_first_of_many_ranks(shape):
    """(1, N, D) and (1, D) on many ranks (PT PR#163480)."""
    specs = {"w": TensorSpec(shape, "float32", [Shard(0)])}
    plans = world(specs, dp=64)
    assert [len(p.items) for p in plans] == [1] + [0] * 63
    _, metadata = global_plan(plans)
    assert metadata.state_dict_metadata["w"].chunks == (Chunk((0,) * len(shape), shape),)
    assert_loads_as(metadata, {"w": TensorSpec(shape, "float32", [Shard(1)])}, tp=3)


def test_a_linear_of_one_is_saved_by_one_rank_and_loaded_by_one():
    """Linear(1, 1) under FSDP (PT#132366)."""
    specs = {
        "weight": TensorSpec((1, 1), "float32", [Shard(0)]),
        "bias": TensorSpec((1,), "float32", [Shard(0)]),
    }
    plans = world(specs, dp=2)
    written, metadata = global_plan(plans)
    assert [p.nbytes for p in written] == [8, 0]
    assert [len(load_plan(metadata, p).items) for p in plans] == [2, 0]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_an_axis_shorter_than_the_mesh_gives_a_row_each_to_the_first_ranks(rows):
    """Dim 0 smaller than the mesh (PT PR#121108)."""
    specs = {"w": TensorSpec((rows, 2), "float32", [Shard(0)])}
    plans = world(specs, dp=8)
    assert rows_held(plans) == [1] * rows + [0] * (8 - rows)
    _, metadata = global_plan(plans)
    assert_loads_as(metadata, specs, dp=2)


def test_a_coordinator_that_owns_nothing_still_plans_for_the_others():
    """Rank 0 is on no tensor's mesh (PT PR#79109)."""
    held = [SavePlan([shard("w", (4,), (at,), (2,))]) for at in (0, 2)]
    written, metadata = global_plan([SavePlan([]), *held])
    assert [len(p.items) for p in written] == [0, 1, 1]
    assert metadata.state_dict_metadata["w"].size == (4,)
    assert load_plan(metadata, SavePlan([])).items == ()


def test_ten_rows_on_four_ranks_are_cut_as_three_three_three_one():
    """Rows [3, 3, 3, 1] of a [10, 2] tensor (PT#110762)."""
    specs = {"w": TensorSpec((10, 2), "float32", [Shard(0)])}
    plans = world(specs, dp=4)
    assert rows_held(plans) == [3, 3, 3, 1]
    _, metadata = global_plan(plans)
    assert [c.offsets for c in metadata.state_dict_metadata["w"].chunks] == [
        (0, 0),
        (3, 0),
        (6, 0),
        (9, 0),
    ]
    for ranks in (1, 2, 3, 10):
        assert_loads_as(metadata, specs, dp=ranks)


def test_pieces_with_a_hole_between_them_are_not_saved_as_a_tensor():
    """Pieces at 0 and 12, of length 4, of a tensor of 16 (PT PR#189945)."""
    plans = [SavePlan([shard("w", (16,), (at,), (4,))]) for at in (0, 12)]
    with pytest.raises(PlanError) as failure:
        global_plan(plans)
    (issue,) = failure.value.issues
    assert (issue.kind, issue.fqn, issue.region) == ("gap", "w", ((4,), (8,)))


def test_pieces_with_a_hole_between_them_load_where_they_are_and_are_told_where_they_are_not():
    """The same, met in a checkpoint that someone else wrote."""
    saved = TensorMetadata(TensorProperties(), (16,), [Chunk((0,), (4,)), Chunk((12,), (4,))])
    metadata = Metadata({"w": saved})
    wanted = {"w": [Chunk((0,), (4,)), Chunk((13,), (2,))]}
    assert_read_exactly_once(resolve_overlaps(metadata, wanted), "w", wanted["w"])

    plan = local_plan({"w": TensorSpec((16,))})
    with pytest.raises(PlanError) as failure:
        load_plan(metadata, plan)
    assert [(i.kind, i.region) for i in failure.value.issues] == [("uncovered", ((4,), (8,)))]
    partly = load_plan(metadata, plan, strict=False)
    assert [item.lengths for item in partly.items] == [(4,), (4,)]
    assert [i.region for i in partly.report.mismatched] == [((4,), (8,))]


def test_a_grid_of_32_by_32_chunks_is_one_grid_and_reloads_in_any_other():
    """PT#166941."""
    specs = {"w": TensorSpec((64, 96), "float32", [Shard(0), Shard(1)])}
    _, metadata = global_plan(world(specs, rows=32, columns=32))
    chunks = metadata.state_dict_metadata["w"].chunks
    assert isinstance(chunks, Grid)
    assert len(chunks) == 1024
    assert_loads_as(metadata, specs, rows=3, columns=1)
    assert_loads_as(metadata, specs, rows=1, columns=5)


def boxes_of_interval(start, end, shape):
    """Cut a stretch of a row-major matrix into boxes: a row's end, whole rows, a row's start."""
    columns = shape[1]
    pieces = []
    while start < end:
        row, column = divmod(start, columns)
        if column == 0 and end - start >= columns:
            rows = (end - start) // columns
            pieces.append(((row, 0), (rows, columns)))
            start += rows * columns
        else:
            length = min(end - start, columns - column)
            pieces.append(((row, column), (1, length)))
            start += length
    return pieces


def test_a_flat_interval_that_crosses_rows_is_several_boxes_and_together_they_fill():
    """Flat shards of a [5, 4] tensor: 20 elements on 3 ranks as 7, 7 and 6."""
    shape = (5, 4)
    cuts = [(0, 7), (7, 14), (14, 20)]
    pieces = [boxes_of_interval(*cut, shape) for cut in cuts]
    assert pieces[1] == [((1, 3), (1, 1)), ((2, 0), (1, 4)), ((3, 0), (1, 2))]
    plans = [SavePlan([shard("w", shape, *box) for box in boxes]) for boxes in pieces]
    written, metadata = global_plan(plans)
    assert [p.nbytes for p in written] == [4 * (high - low) for low, high in cuts]
    assert_loads_as(metadata, {"w": TensorSpec(shape, "float32", [Shard(1)])}, tp=2)

    _, rows = global_plan(world({"w": TensorSpec(shape, "float32", [Shard(0)])}, dp=2))
    for plan in plans:
        chunks = [item.tensor_data.chunk for item in plan.items]
        assert_read_exactly_once(load_plan(rows, plan).items, "w", chunks)


@pytest.mark.parametrize(("saved", "wanted"), [(10, 16), (16, 10)])
def test_a_padded_vocabulary_fills_the_rows_that_both_have_only_if_asked_to(saved, wanted):
    """Vocabulary padding: 10 rows, padded to 16, and back."""
    _, metadata = global_plan(
        world({"embedding": TensorSpec((saved, 2), "float32", [Shard(0)])}, tp=4)
    )
    specs = {"embedding": TensorSpec((wanted, 2), "float32", [Shard(0)])}
    filled = set()
    for plan in world(specs, tp=2):
        assert issues_of(load_plan, metadata, plan) == [("shape", "embedding")]
        done = load_plan(metadata, plan, shape="overlap")
        assert [i.kind for i in done.report.mismatched] == ["shape"]
        for item in done.items:
            start = item.dest_index.offset[0] + item.dest_offsets[0]
            rows = range(start, start + item.lengths[0])
            assert start == item.storage_index.offset[0] + item.storage_offsets[0]
            assert not filled & set(rows)
            filled |= set(rows)
    assert filled == set(range(min(saved, wanted)))


def test_a_padded_vocabulary_still_needs_every_row_that_was_saved():
    """Padding excuses rows past the saved ones, not a hole among them."""
    saved = TensorMetadata(TensorProperties(), (10, 2), [Chunk((0, 0), (4, 2))])
    plan = local_plan({"embedding": TensorSpec((16, 2))})
    with pytest.raises(PlanError) as failure:
        load_plan(Metadata({"embedding": saved}), plan, shape="overlap")
    assert [(i.kind, i.region) for i in failure.value.issues] == [("uncovered", ((4, 0), (6, 2)))]


# Replicas and keys


def test_replicas_with_other_values_are_planned_on_a_rank_that_can_be_told_beforehand():
    """Same key and offset, other values (PT#120356): planning sees no values, so it names who."""
    plans = [local_plan({"w": np.full(4, rank, np.float32)}) for rank in range(3)]
    assert plans[0] == plans[1] == plans[2]
    written, _ = global_plan(plans, dedup_replicas(prefer="lowest_rank"))
    assert [len(p.items) for p in written] == [1, 0, 0]
    again, _ = global_plan(plans)
    assert again == global_plan(plans)[0]


def test_the_same_key_and_offset_with_another_size_is_a_conflict_that_names_both_ranks():
    plans = [SavePlan([shard("w", (4,), (0,), (n,))]) for n in (4, 2)]
    with pytest.raises(PlanError) as failure:
        global_plan(plans)
    (issue,) = failure.value.issues
    assert (issue.kind, issue.fqn, issue.ranks) == ("conflict", "w", (0, 1))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (TensorSpec((4,)), TensorSpec((2, 2))),
        (TensorSpec((4,)), TensorSpec((5,))),
        (TensorSpec((4,)), TensorSpec((4,), "float64")),
        (TensorSpec((4,)), "a value"),
    ],
)
def test_the_same_key_for_another_shape_dtype_or_kind_is_a_conflict(left, right):
    plans = [local_plan({"w": left}), local_plan({"w": right})]
    assert issues_of(global_plan, plans) == [("conflict", "w")]


def test_all_shards_of_a_key_may_lie_in_one_plan():
    """One process that drives many devices (xla#7919)."""
    items = [shard("w", (8, 2), (row, 0), (2, 2)) for row in (4, 0, 6, 2)]
    written, metadata = global_plan([SavePlan(items)])
    assert written[0].items == SavePlan(items).items
    assert len(metadata.state_dict_metadata["w"].chunks) == 4
    wanted = [Chunk((1, 0), (6, 1))]
    assert_read_exactly_once(resolve_overlaps(metadata, {"w": wanted}), "w", wanted)


def test_pipeline_stages_may_have_no_key_in_common():
    stages = [
        {f"layers.{2 * stage + i}.w": TensorSpec((4,)) for i in range(2)} for stage in range(3)
    ]
    plans = [local_plan(stage) for stage in stages]
    written, metadata = global_plan(plans)
    assert [[i.index.fqn for i in p.items] for p in written] == [list(s) for s in stages]
    assert len(metadata.state_dict_metadata) == 6
    for plan, stage in zip(plans, stages, strict=True):
        loaded = load_plan(metadata, plan)
        assert len(loaded.items) == 2
        assert set(loaded.report.unexpected) == metadata.state_dict_metadata.keys() - stage.keys()


@pytest.mark.parametrize("step", [7, torch.tensor(7.0), np.array(7.0)])
def test_a_replicated_scalar_step_is_written_once_and_read_by_all(step):
    plans = [local_plan({"step": step}) for _ in range(4)]
    written, metadata = global_plan(plans)
    assert sum(len(p.items) for p in written) == 1
    for plan in plans:
        (item,) = load_plan(metadata, plan).items
        assert item.dest_index.fqn == "step"


def test_two_keys_that_flatten_to_one_name_are_both_told():
    """{'a': {'b': 1}, 'a.b': 2}."""
    with pytest.raises(PlanError) as failure:
        local_plan({"a": {"b": 1}, "a.b": 2})
    (issue,) = failure.value.issues
    assert (issue.kind, issue.fqn) == ("conflict", "a.b")
    assert "['a']['b']" in issue.message
    assert "['a.b']" in issue.message.replace("['a']['b']", "")


def test_two_ranks_whose_keys_flatten_to_one_name_are_told_as_well():
    """The same, with one of the two on each rank."""
    plans = [local_plan({"a": {"b": TensorSpec((2,))}}), local_plan({"a.b": TensorSpec((2,))})]
    assert issues_of(global_plan, plans) == [("conflict", "a.b")]


def test_a_dotted_key_is_kept_apart_from_a_nested_one():
    sd = {"a": {"b": 1}, "a.c": 2}
    assert unflatten(*flatten(sd)) == sd


# Dtypes

DTYPES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@pytest.mark.parametrize(("dtype", "width"), DTYPES.items())
def test_a_tensor_of_any_dtype_is_planned_in_its_own_width(dtype, width):
    sd = {"w": torch.zeros((3, 2), dtype=getattr(torch, dtype))}
    plan = local_plan(sd)
    assert plan.items[0].tensor_data.properties.dtype == dtype
    assert plan.nbytes == 6 * width
    assert find_shard(sd, plan.items[0].source) is sd["w"]
    _, metadata = global_plan([plan])
    (item,) = load_plan(metadata, plan).items
    assert item.lengths == (3, 2)


def test_every_dtype_of_torch_has_torch_s_width_or_is_none_that_is_stored_by_element():
    """Left out are quantized dtypes, which need a scale, and those narrower than a byte."""
    left_out = re.compile(r"q\w+|bits\w+|u?int[1-7]")
    known = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    for name, dtype in known.items():
        name = name.removeprefix("torch.")
        if left_out.fullmatch(name):
            with pytest.raises(ValueError, match="unknown dtype"):
                TensorSpec((2,), name)
        else:
            assert local_plan({"w": TensorSpec((2,), name)}).nbytes == 2 * dtype.itemsize


def test_another_dtype_is_cast_only_if_asked_to():
    """fp32 saved, bf16 wanted."""
    _, metadata = global_plan([local_plan({"w": torch.zeros(4)})])
    wanted = local_plan({"w": torch.zeros(4, dtype=torch.bfloat16)})
    assert issues_of(load_plan, metadata, wanted) == [("dtype", "w")]
    assert len(load_plan(metadata, wanted, dtype="cast").items) == 1


def test_a_cast_that_loses_a_digit_can_be_told_from_one_that_does_not():
    """int32 16777217 has one digit more than float32 holds; torch rounds it in silence."""
    assert torch.tensor(16777217, dtype=torch.int32).to(torch.float32).item() == 16777216
    assert not is_exact_cast("int32", "float32")
    assert is_exact_cast("int32", "float64")
    assert is_exact_cast("int16", "float32")


FINITE = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def extremes(dtype):
    """Return values that a narrower dtype loses: the ends of the range, and the finest digits."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([info.min, info.max, info.max - 1, 1], dtype=dtype)
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps  # the smallest number above zero
    exact = [info.max, info.min, 1 + info.eps, tiny]
    return torch.tensor(exact, dtype=torch.float64).to(dtype)


def numbers(tensor):
    """Return the values as Python's numbers, which compare exactly, whole against fraction too."""
    return (tensor.double() if tensor.is_floating_point() else tensor).tolist()


@pytest.mark.parametrize("target", FINITE, ids=str)
@pytest.mark.parametrize("source", FINITE, ids=str)
def test_a_cast_is_called_exact_where_torch_s_keeps_every_number_and_nowhere_else(source, target):
    values = extremes(source)
    names = [str(d).removeprefix("torch.") for d in (source, target)]
    assert is_exact_cast(*names) == (numbers(values.to(target)) == numbers(values))


def test_saved_as_a_value_and_wanted_as_a_tensor_is_refused_by_name():
    """PT#143972."""
    metadata = Metadata({"step": BytesMetadata()})
    plan = local_plan({"step": torch.zeros(())})
    assert issues_of(load_plan, metadata, plan) == [("type", "step")]
    lenient = load_plan(metadata, plan, strict=False)
    assert len(lenient.items) == 0
    assert [i.fqn for i in lenient.report.mismatched] == ["step"]


def test_saved_as_a_tensor_and_wanted_as_a_value_is_refused_by_name():
    """PT#143972, the reverse."""
    _, metadata = global_plan([local_plan({"step": torch.zeros(())})])
    plan = local_plan({"step": 7})
    assert issues_of(load_plan, metadata, plan) == [("type", "step")]
    lenient = load_plan(metadata, plan, strict=False)
    assert len(lenient.items) == 0
    assert [i.fqn for i in lenient.report.mismatched] == ["step"]


def test_the_bytes_of_all_ranks_add_up_to_the_bytes_of_the_tensors():
    """Whatever the layout, nothing is counted twice and nothing is left out."""
    specs = {
        "a": TensorSpec((7, 5), "bfloat16", [Shard(0), Shard(1)]),
        "b": TensorSpec((3,), "complex64", [Shard(0), Shard(0)]),
        "c": TensorSpec((), "int64"),
    }
    written, _ = global_plan(world(specs, dp=3, tp=2))
    assert sum(p.nbytes for p in written) == sum(s.nbytes for s in specs.values())
    assert sum(s.nbytes for s in specs.values()) == 35 * 2 + 3 * 8 + 8
