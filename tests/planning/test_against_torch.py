"""Where torch plans right, our plan is the same; where it does not, both answers are pinned."""

import math
import tracemalloc

import attrs
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner as torch_planner
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_plans
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import placement_types
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    Mesh,
    Metadata,
    MetadataIndex,
    PlanError,
    Replicate,
    SavePlan,
    Shard,
    StridedShard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    dedup_replicas,
    find_issues,
    fingerprint,
    global_plan,
    load_plan,
    local_chunks,
    local_plan,
    resolve_overlaps,
)

# Random worlds


@st.composite
def mesh_shapes(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    assume(math.prod(shape) <= 16)
    return tuple(shape)


def tensor_shapes():
    few = st.lists(st.integers(0, 17), max_size=2)
    many = st.lists(st.integers(0, 6), min_size=3, max_size=4)
    return st.one_of(few, many).map(tuple)


@st.composite
def placements(draw, axes, ndim):
    """Draw one placement per mesh axis, in any order and combination, strided ones included."""
    kinds = [st.just(Replicate())]
    if ndim:
        dims = st.integers(0, ndim - 1)
        kinds.append(st.builds(Shard, dims))
        kinds.append(st.builds(StridedShard, dims, st.integers(1, 4)))
    return tuple(draw(st.lists(st.one_of(kinds), min_size=axes, max_size=axes)))


@st.composite
def layouts(draw):
    mesh, shape = draw(mesh_shapes()), draw(tensor_shapes())
    return mesh, shape, draw(placements(len(mesh), len(shape)))


@st.composite
def worlds(draw):
    """Draw what every rank of one mesh holds: tensors of mixed layouts and dtypes, and values."""
    shape = draw(mesh_shapes())
    specs = {}
    for number in range(draw(st.integers(1, 4))):
        size = draw(tensor_shapes())
        placed = draw(st.one_of(st.just(()), placements(len(shape), len(size))))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
        specs[f"t{number}"] = TensorSpec(size, dtype, placed)
    if draw(st.booleans()):
        specs["step"] = 7
    mesh = Mesh({f"axis{i}": n for i, n in enumerate(shape)})
    return tuple(local_plan(specs, mesh=mesh, rank=rank) for rank in range(len(mesh)))


@st.composite
def cuttings(draw, shape):
    """Draw boxes that fill a shape without overlap, in any order: cut in two, again and again."""
    boxes = [Chunk((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [axis for axis, size in enumerate(box.sizes) if size > 1]
        if not wide:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(wide))
        at = draw(st.integers(1, box.sizes[axis] - 1))
        low, high, rest = list(box.sizes), list(box.offsets), list(box.sizes)
        low[axis], high[axis], rest[axis] = at, box.offsets[axis] + at, box.sizes[axis] - at
        boxes += [Chunk(box.offsets, low), Chunk(high, rest)]
    return tuple(draw(st.permutations(boxes)))


# From our records to torch's, field by field


def torch_placement(placement):
    if isinstance(placement, Replicate):
        return placement_types.Replicate()
    if isinstance(placement, Shard):
        return placement_types.Shard(placement.dim)
    return placement_types._StridedShard(placement.dim, split_factor=placement.split_factor)


def torch_chunk(chunk):
    return torch_metadata.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def torch_item(item):
    kind = torch_plans.WriteItemType[item.type.name]
    data = item.tensor_data
    if data is None:
        return torch_plans.WriteItem(torch_metadata.MetadataIndex(item.index.fqn), kind)
    properties = torch_metadata.TensorProperties(dtype=getattr(torch, data.properties.dtype))
    return torch_plans.WriteItem(
        torch_metadata.MetadataIndex(item.index.fqn, data.chunk.offsets),
        kind,
        tensor_data=torch_plans.TensorWriteData(
            torch_chunk(data.chunk), properties, torch.Size(data.size)
        ),
    )


def torch_plan(plan):
    return torch_plans.SavePlan([torch_item(item) for item in plan.items])


def torch_entry(size, chunks, dtype=torch.float32):
    return torch_metadata.TensorStorageMetadata(
        torch_metadata.TensorProperties(dtype=dtype),
        torch.Size(size),
        list(map(torch_chunk, chunks)),
    )


def entry(size, chunks, dtype="float32"):
    return TensorMetadata(TensorProperties(dtype), size, chunks)


def shard(name, size, offsets, sizes, dtype="float32"):
    data = TensorWriteData(Chunk(offsets, sizes), TensorProperties(dtype), size)
    return WriteItem(MetadataIndex(name), WriteItemType.SHARD, data)


def plan_of(*items):
    return SavePlan(items)


# What both say, as plain values


def summary(metadata):
    """Describe each entry of torch's metadata or of ours."""
    told = {}
    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, (BytesMetadata, torch_metadata.BytesStorageMetadata)):
            told[name] = "value"
            continue
        boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in value.chunks]
        assert len(set(boxes)) == len(boxes)
        dtype = str(value.properties.dtype).removeprefix("torch.")
        told[name] = dtype, tuple(value.size), frozenset(boxes)
    return told


def names_and_offsets(plan):
    keys = [
        (i.index.fqn, None if i.index.offset is None else tuple(i.index.offset)) for i in plan.items
    ]
    assert len(set(keys)) == len(keys)
    return set(keys)


def read(item):
    """List the fields of a read item, hints included."""
    indices = [
        (i.fqn, None if i.offset is None else tuple(i.offset), i.index)
        for i in (item.dest_index, item.storage_index)
    ]
    boxes = [tuple(b) for b in (item.dest_offsets, item.storage_offsets, item.lengths)]
    return item.type.name, *indices, *boxes


# (a) The same chunks


def torch_indices(shape, mesh, coordinate, placed):
    """Return the global positions that a rank holds: torch splits an arange, axis by axis."""
    held = torch.arange(math.prod(shape)).reshape(shape)
    for parts, ours, placement in zip(mesh, coordinate, placed, strict=True):
        if not isinstance(placement, Replicate):
            split, _ = torch_placement(placement)._split_tensor(
                held, parts, with_padding=False, contiguous=False
            )
            held = split[ours]
    return held


def our_indices(shape, chunks):
    """Return the global positions that chunks hold."""
    cells = np.arange(math.prod(shape)).reshape(shape)
    held = [
        cells[tuple(slice(o, e) for o, e in zip(c.offsets, c.ends, strict=True))] for c in chunks
    ]
    return [int(i) for box in held for i in box.ravel()]


@given(layouts())
def test_a_rank_holds_exactly_the_elements_that_torch_splits_off_for_it(layout):
    mesh, shape, placed = layout
    for coordinate in np.ndindex(*mesh):
        chunks = local_chunks(shape, mesh, coordinate, placed)
        expected = torch_indices(shape, mesh, coordinate, placed)
        assert sorted(our_indices(shape, chunks)) == sorted(expected.flatten().tolist())


@given(layouts())
def test_a_rank_holds_the_one_box_that_torch_computes_wherever_its_elements_form_one(layout):
    mesh, shape, placed = layout
    theirs = [torch_placement(p) for p in placed]
    for coordinate in np.ndindex(*mesh):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), theirs
        )
        chunks = local_chunks(shape, mesh, coordinate, placed)
        assert sum(c.numel for c in chunks) == math.prod(sizes)
        if len(chunks) == 1:
            assert chunks[0] == Chunk(offsets, sizes)


def test_a_strided_uneven_shard_is_one_wrong_box_in_torch_and_two_right_ones_here():
    """13 rows on dp 3 × tp 2: a rank holds rows 6 and 11, which torch records as rows 6 and 7."""
    shape, mesh, placed = (13,), (3, 2), (StridedShard(0, split_factor=2), Shard(0))
    assert torch_indices(shape, mesh, (2, 0), placed).tolist() == [6, 11]

    theirs = [torch_placement(p) for p in placed]
    assert _compute_local_shape_and_global_offset(shape, mesh, [2, 0], theirs) == ((2,), (6,))
    boxes = [
        _compute_local_shape_and_global_offset(shape, mesh, list(at), theirs)
        for at in np.ndindex(*mesh)
    ]
    recorded = [row for (size,), (start,) in boxes for row in range(start, start + size)]
    assert recorded.count(7) == 2
    assert recorded.count(11) == 0

    assert local_chunks(shape, mesh, (2, 0), placed) == (Chunk((6,), (1,)), Chunk((11,), (1,)))
    ours = [
        i
        for at in np.ndindex(*mesh)
        for i in our_indices(shape, local_chunks(shape, mesh, at, placed))
    ]
    assert sorted(ours) == list(range(13))


def test_an_empty_shard_is_a_box_past_the_end_in_torch_and_nothing_here():
    """6 rows on 4 ranks: torch gives the last rank an empty box to write (PT#108869)."""
    shard_rows = [placement_types.Shard(0)]
    assert _compute_local_shape_and_global_offset((6, 2), (4,), [3], shard_rows) == ((0, 2), (6, 0))
    assert local_chunks((6, 2), (4,), (3,), [Shard(0)]) == ()


# (b) The same metadata


@given(worlds())
def test_the_metadata_is_the_same_as_torch_s(plans):
    _, ours = global_plan(plans)
    deduped = dedup_save_plans([torch_plan(p) for p in plans])
    written, theirs = torch_planner.create_default_global_save_plan(deduped)
    assert summary(ours) == summary(theirs)
    assert torch_planner._validate_global_plan(written, theirs) == []


@given(worlds())
def test_with_the_lowest_rank_preferred_every_rank_writes_what_torch_has_it_write(plans):
    ours, _ = global_plan(plans, dedup_replicas(prefer="lowest_rank"))
    theirs = dedup_save_plans([torch_plan(p) for p in plans], save_to_lowest_rank=True)
    assert list(map(names_and_offsets, ours)) == list(map(names_and_offsets, theirs))


@given(worlds())
def test_a_hint_numbers_the_chunk_it_names_in_torch_s_metadata_as_in_ours(plans):
    deduped = dedup_save_plans([torch_plan(p) for p in plans])
    for written, metadata in (
        global_plan(plans),
        torch_planner.create_default_global_save_plan(deduped),
    ):
        for item in (item for plan in written for item in plan.items if item.tensor_data):
            chunks = metadata.state_dict_metadata[item.index.fqn].chunks
            assert chunks[item.index.index] == item.tensor_data.chunk


def test_torch_weighs_a_chunk_as_its_whole_tensor_and_we_weigh_the_chunk():
    item = shard("w", (100, 4), (10, 0), (5, 4))
    assert torch_item(item).tensor_storage_size() == 100 * 4 * 4
    assert item.nbytes == 5 * 4 * 4


def test_torch_leaves_a_rank_idle_that_it_takes_for_loaded_and_we_share_the_work():
    """Rank 0 alone holds one element of a long tensor; two others are on ranks 0 and 1."""
    plans = [
        plan_of(
            shard("a", (1024,), (0,), (1,)),
            shard("b", (512,), (0,), (512,)),
            shard("c", (512,), (0,), (512,)),
        ),
        plan_of(shard("b", (512,), (0,), (512,)), shard("c", (512,), (0,), (512,))),
        plan_of(shard("a", (1024,), (1,), (1023,))),
    ]
    theirs = dedup_save_plans([torch_plan(p) for p in plans])
    assert [[i.index.fqn for i in p.items] for p in theirs] == [["a"], ["b", "c"], ["a"]]
    ours, _ = global_plan(plans)
    assert [p.nbytes for p in ours] == [4 + 2048, 2048, 4 * 1023]


def test_torch_lets_an_empty_shard_swallow_a_real_one_and_we_drop_the_empty_one():
    """Keyed on name and offset only, the empty chunk on rank 0 stands for both (PT PR#150862)."""
    plans = [plan_of(shard("w", (4,), (0,), (0,))), plan_of(shard("w", (4,), (0,), (4,)))]
    theirs = dedup_save_plans([torch_plan(p) for p in plans])
    assert [[tuple(i.tensor_data.chunk.sizes) for i in p.items] for p in theirs] == [[(0,)], []]
    with pytest.raises(ValueError, match="invalid fill"):
        torch_planner.DefaultSavePlanner(flatten_state_dict=False).create_global_plan(
            [torch_plan(p) for p in plans]
        )

    ours, metadata = global_plan(plans)
    written = [i.tensor_data.chunk for p in ours for i in p.items if i.tensor_data.chunk.numel]
    assert written == [Chunk((0,), (4,))]
    assert metadata.state_dict_metadata["w"] == entry((4,), [Chunk((0,), (4,))])


def test_torch_keeps_either_of_two_chunks_of_other_sizes_and_we_report_both_ranks():
    """Ranks 0 and 1 cut rows 0 to 4 differently; torch saves rank 0's rows, whatever rank 1 has."""
    plans = [
        plan_of(shard("w", (4,), (0,), (2,)), shard("w", (4,), (2,), (2,))),
        plan_of(shard("w", (4,), (0,), (4,))),
    ]
    planner = torch_planner.DefaultSavePlanner(
        flatten_state_dict=False, dedup_save_to_lowest_rank=True
    )
    theirs, _ = planner.create_global_plan([torch_plan(p) for p in plans])
    assert [len(p.items) for p in theirs] == [2, 0]

    with pytest.raises(PlanError) as failure:
        global_plan(plans)
    assert ("conflict", "w", (0, 1)) in {(i.kind, i.fqn, i.ranks) for i in failure.value.issues}


def test_torch_saves_one_of_two_different_tensors_of_one_name_and_we_report_both():
    """Each rank holds its half under the same name, whole in its own eyes (PT#156002)."""
    plans = [local_plan({"w": torch.zeros(n)}) for n in (4, 8)]
    planner = torch_planner.DefaultSavePlanner(flatten_state_dict=False)
    theirs, metadata = planner.create_global_plan([torch_plan(p) for p in plans])
    assert [len(p.items) for p in theirs] == [1, 0]
    assert metadata.state_dict_metadata["w"].size == torch.Size([4])

    with pytest.raises(
        PlanError, match=r"rank 0: float32 of shape \[4\]; rank 1: float32 of shape \[8\]"
    ):
        global_plan(plans)


def test_torch_saves_one_of_two_dtypes_of_one_name_and_we_report_both():
    plans = [local_plan({"w": torch.zeros(4, dtype=d)}) for d in (torch.int8, torch.float32)]
    planner = torch_planner.DefaultSavePlanner(flatten_state_dict=False)
    _, metadata = planner.create_global_plan([torch_plan(p) for p in plans])
    assert summary(metadata)["w"][0] in ("int8", "float32")

    with pytest.raises(PlanError, match="int8") as failure:
        global_plan(plans)
    assert [(i.kind, i.ranks) for i in failure.value.issues] == [("conflict", (0, 1))]


def test_torch_accepts_a_hole_when_there_is_one_rank_and_we_never_do():
    """Torch compares volumes only where several plans come in."""
    plan = plan_of(shard("w", (8,), (0,), (4,)))
    planner = torch_planner.DefaultSavePlanner(flatten_state_dict=False)
    _, metadata = planner.create_global_plan([torch_plan(plan)])
    assert summary(metadata)["w"][2] == {((0,), (4,))}

    with pytest.raises(PlanError) as failure:
        global_plan([plan])
    assert [(i.kind, i.region) for i in failure.value.issues] == [("gap", ((4,), (4,)))]


# Validation: what it costs


def rows_of_bricks(count):
    """Return ``count`` rows, each cut once, at a place of its own, so that they form no grid."""
    size = (count, 4 * count)
    boxes = []
    for row in range(count):
        at = 1 + row
        boxes += [Chunk((row, 0), (1, at)), Chunk((row, at), (1, size[1] - at))]
    return entry(size, boxes)


def peak_bytes(call):
    tracemalloc.start()
    try:
        assert call() == ()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_torch_compares_every_pair_of_shards_unless_the_longest_axis_is_the_sharded_one(
    monkeypatch,
):
    """Its sweep runs along the longest axis, where row shards of a wide tensor all coincide."""
    compared = []
    real = torch_planner._check_box_overlap
    monkeypatch.setattr(
        torch_planner, "_check_box_overlap", lambda a, b: compared.append(1) or real(a, b)
    )

    def comparisons(shape, boxes):
        compared.clear()
        metadata = torch_metadata.Metadata({"w": torch_entry(shape, boxes)})
        assert torch_planner._validate_global_plan([None, None], metadata) == []
        return len(compared)

    count = 64
    rows = [Chunk((row, 0), (1, 2 * count)) for row in range(count)]
    assert comparisons((count, 2 * count), rows) == count * (count - 1) // 2
    assert comparisons((count, 1), [Chunk((row, 0), (1, 1)) for row in range(count)]) == 0


def test_what_our_check_keeps_in_memory_grows_with_the_shards_and_not_with_their_pairs():
    """Bytes, not seconds: all pairs of 1,024 boxes would be 64 times those of 128."""
    few, many = (Metadata({"w": rows_of_bricks(n)}) for n in (64, 512))
    find_issues(few)  # whatever is made once is made now
    small, large = (peak_bytes(lambda m=m: find_issues(m)) for m in (few, many))
    assert large < 16 * small


def test_what_our_check_keeps_in_memory_does_not_depend_on_which_axis_is_sharded():
    bricks = rows_of_bricks(512)
    flipped = entry(
        bricks.size[::-1], [Chunk(c.offsets[::-1], c.sizes[::-1]) for c in bricks.chunks]
    )
    find_issues(Metadata({"w": bricks}))
    first, second = (
        peak_bytes(lambda m=m: find_issues(m))
        for m in (Metadata({"w": bricks}), Metadata({"w": flipped}))
    )
    assert second < 2 * first
    assert first < 2 * second


# (c) The same reads


@st.composite
def reshards(draw):
    """Draw a shape, how it was saved, and the chunks that one rank wants."""
    shape = draw(tensor_shapes().filter(all))
    saved = draw(cuttings(shape))
    wanted = draw(st.lists(cuttings(shape), min_size=1, max_size=2))
    chunks = [chunk for cutting in wanted for chunk in cutting]
    return shape, saved, draw(st.lists(st.sampled_from(chunks), min_size=1, unique=True))


@given(reshards())
def test_the_reads_are_the_same_as_torch_s(case):
    shape, saved, wanted = case
    metadata = Metadata({"w": entry(shape, saved)})
    in_our_order = list(metadata.state_dict_metadata["w"].chunks)
    theirs = create_read_items_for_chunk_list(
        "w", torch_entry(shape, in_our_order), [torch_chunk(c) for c in wanted]
    )
    ours = resolve_overlaps(metadata, {"w": wanted})
    assert len(ours) == len(theirs)
    assert {read(item) for item in ours} == {read(item) for item in theirs}


@given(layouts(), st.data())
def test_the_reads_between_two_meshes_are_the_same_as_torch_s(layout, data):
    mesh, shape, placed = layout
    assume(all(shape))
    target = data.draw(mesh_shapes())
    target_placed = data.draw(placements(len(target), len(shape)))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in target)
    saved = dict.fromkeys(
        c for coordinate in np.ndindex(*mesh) for c in local_chunks(shape, mesh, coordinate, placed)
    )
    wanted = local_chunks(shape, target, at, target_placed)
    metadata = Metadata({"w": entry(shape, list(saved))})
    theirs = create_read_items_for_chunk_list(
        "w", torch_entry(shape, list(saved)), [torch_chunk(c) for c in wanted]
    )
    ours = resolve_overlaps(metadata, {"w": wanted})
    assert len(ours) == len(theirs)
    assert {read(item) for item in ours} == {read(item) for item in theirs}


def test_torch_half_fills_a_target_in_silence_and_we_name_what_is_missing():
    saved = [Chunk((0,), (4,))]
    target = {"w": torch.zeros(8)}
    theirs = torch_planner.create_default_local_load_plan(
        target, torch_metadata.Metadata({"w": torch_entry((8,), saved)})
    )
    assert [tuple(item.lengths) for item in theirs.items] == [(4,)]

    with pytest.raises(PlanError, match="rows 4 to 8") as failure:
        load_plan(Metadata({"w": entry((8,), saved)}), local_plan(target))
    assert [(i.kind, i.region) for i in failure.value.issues] == [("uncovered", ((4,), (4,)))]


def test_torch_reads_an_element_twice_where_saved_chunks_overlap_and_we_refuse():
    saved = [Chunk((0,), (5,)), Chunk((3,), (5,))]
    target = {"w": torch.zeros(8)}
    theirs = torch_planner.create_default_local_load_plan(
        target, torch_metadata.Metadata({"w": torch_entry((8,), saved)})
    )
    assert sum(math.prod(item.lengths) for item in theirs.items) == 10

    with pytest.raises(PlanError, match="share rows 3 to 5"):
        load_plan(Metadata({"w": entry((8,), saved)}), local_plan(target))


def test_torch_plans_a_read_of_nothing_for_an_empty_target_and_we_plan_none():
    saved, wanted = [Chunk((0,), (8,))], [Chunk((4,), (0,))]
    theirs = create_read_items_for_chunk_list(
        "w", torch_entry((8,), saved), [torch_chunk(c) for c in wanted]
    )
    assert [tuple(item.lengths) for item in theirs] == [(0,)]
    assert len(resolve_overlaps(Metadata({"w": entry((8,), saved)}), {"w": wanted})) == 0


def test_torch_reads_another_dtype_in_silence_and_we_ask():
    """Sizes are checked, dtypes are not (PT#187138)."""
    saved, target = [Chunk((0,), (4,))], {"w": torch.zeros(4, dtype=torch.int32)}
    theirs = torch_planner.create_default_local_load_plan(
        target, torch_metadata.Metadata({"w": torch_entry((4,), saved, torch.float32)})
    )
    assert len(theirs.items) == 1

    metadata = Metadata({"w": entry((4,), saved, "float32")})
    with pytest.raises(PlanError, match="saved as float32 and is wanted as int32"):
        load_plan(metadata, local_plan(target))
    assert len(load_plan(metadata, local_plan(target), dtype="cast").items) == 1


def test_torch_plans_to_read_a_value_into_a_tensor_and_we_refuse():
    """Saved as bytes, wanted as a tensor (PT#143972)."""
    target = {"step": torch.zeros(())}
    theirs = torch_planner.create_default_local_load_plan(
        target, torch_metadata.Metadata({"step": torch_metadata.BytesStorageMetadata()})
    )
    assert [item.type.name for item in theirs.items] == ["BYTE_IO"]

    with pytest.raises(PlanError) as failure:
        load_plan(Metadata({"step": BytesMetadata()}), local_plan(target))
    assert [(i.kind, i.fqn) for i in failure.value.issues] == [("type", "step")]


# Plans as values


def test_torch_s_plans_are_frozen_but_hold_lists_and_ours_are_immutable_to_the_leaves():
    plan = local_plan({"w": torch.zeros(4)})
    theirs = torch_plan(plan)
    with pytest.raises(TypeError, match="unhashable"):
        hash(theirs)
    theirs.items.clear()
    assert theirs == torch_plans.SavePlan([])

    assert hash(plan) == hash(local_plan({"w": torch.zeros(4)}))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan.items = ()
    with pytest.raises(AttributeError):
        plan.items.clear()
    with pytest.raises(TypeError):
        plan.items[0] = plan.items[0]
    for array in (plan.items.row, plan.items.offsets, plan.items.sizes):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_torch_s_metadata_can_change_under_its_reader_and_ours_cannot():
    theirs = torch_metadata.Metadata({"w": torch_entry((4,), [Chunk((0,), (4,))])})
    theirs.state_dict_metadata["w"].chunks.clear()
    theirs.state_dict_metadata["w"].size = torch.Size([5])
    assert summary(theirs)["w"] == ("float32", (5,), frozenset())

    ours = Metadata({"w": entry((4,), [Chunk((0,), (4,))])})
    assert hash(ours) == hash(Metadata({"w": entry((4,), [Chunk((0,), (4,))])}))
    with pytest.raises(TypeError):
        ours.state_dict_metadata["w"] = BytesMetadata()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ours.state_dict_metadata["w"].size = (5,)
    with pytest.raises(ValueError, match="read-only"):
        ours.state_dict_metadata["w"].chunks.offsets[:] = 1


_CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


@pytest.fixture
def torch_plan_caches(monkeypatch):
    """Give torch's planners fresh class-level caches, and their own ones back afterwards."""
    for name in _CACHES:
        assert isinstance(getattr(torch_plans.SavePlanner, name), dict)
        monkeypatch.setattr(torch_plans.SavePlanner, name, {})


@pytest.mark.usefixtures("torch_plan_caches")
def test_torch_s_plan_cache_outlives_its_planner_and_goes_stale_and_our_fingerprint_differs():
    """Two planners, two models: the second, of another dtype, gets the first one's metadata."""

    def plan_as_torch_does(sd):
        planner = torch_planner.DefaultSavePlanner(enable_plan_caching=True)
        planner.set_up_planner(sd, is_coordinator=True)
        local = planner.create_local_plan()
        (scattered,), metadata = planner.create_global_plan([local])
        planner.finish_plan(scattered)
        return metadata

    first, second = {"w": torch.zeros(4)}, {"w": torch.zeros(4, dtype=torch.bfloat16)}
    assert summary(plan_as_torch_does(first))["w"][0] == "float32"
    assert summary(plan_as_torch_does(second))["w"][0] == "float32"  # it is bfloat16

    plans = [local_plan(first), local_plan(second)]
    assert fingerprint(plans[0]) != fingerprint(plans[1])
    assert [summary(global_plan([p])[1])["w"][0] for p in plans] == ["float32", "bfloat16"]
