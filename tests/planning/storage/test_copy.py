"""Write plans and copy plans, against enumerating every byte of small tensors and files."""

import json
from itertools import product

import attrs
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from shardplan.planning import (
    ChunkPlaces,
    Mesh,
    Metadata,
    Shard,
    StoredChunks,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    cast,
    copy_plan,
    global_plan,
    local_plan,
    split_chunks,
    write_plan,
)
from shardplan.planning.storage import (
    begun_chunks,
    compare_plan,
    cut_blocks,
    plan_target,
    share_plans,
    written_bytes,
)
from shardplan.planning.testing.strategies import shapes, tilings

DTYPES = {"uint8": 1, "int16": 2, "float64": 8}


# ---- writing


@st.composite
def save_plans(draw):
    """A rank's plan: tensors of several widths, cut or not, and values."""
    sd = {}
    for n in range(draw(st.integers(0, 5))):
        sd[f"t{n}"] = TensorSpec(draw(shapes(max_dims=3)), draw(st.sampled_from([*DTYPES])))
    for n in range(draw(st.integers(0, 2))):
        sd[f"v{n}"] = n
    return split_chunks(draw(st.integers(8, 40)))((local_plan(sd),))[0]


@given(save_plans(), st.integers(1, 30), st.integers(0, 9))
def test_every_byte_of_every_file_is_written_exactly_once(plan, limit, value):
    values = {"v0": value}
    written = write_plan(plan, 3, "5f3a", value_bytes=values, block_bytes=limit)
    assert sorted(written.order.tolist()) == list(range(len(plan.items)))
    for number in range(len(written.names)):
        at, names = 0, []
        for row in written.rows(number).tolist():
            item = plan.items[row]
            names.append(item.index.fqn)
            data = item.tensor_data
            if data is None:
                assert written.nbytes[row] == values.get(item.index.fqn, 0)
            else:
                width = DTYPES[data.properties.dtype]
                cells = np.full([*data.chunk.sizes, *[1] * (3 - len(data.chunk.sizes))], -1)
                blocks = written.blocks(np.array([row]))
                assert (blocks.sizes.prod(axis=1) * width <= max(limit, width)).all()
                for block, place in enumerate(zip(blocks.offsets, blocks.sizes, strict=True)):
                    box = tuple(slice(o, o + n) for o, n in zip(*place, strict=True))
                    assert (cells[box] == -1).all()
                    cells[box] = block
                # Blocks follow each other in the file: row-major, each is one range.
                assert (np.diff(cells.reshape(-1)) >= 0).all()
                assert (cells >= 0).all()
                assert written.nbytes[row] == data.chunk.numel * width
                if data.chunk.numel:
                    assert written.begin[row] % width == 0 or values["v0"]
            assert written.begin[row] == at
            at += int(written.nbytes[row])
        assert len(set(names)) == len(names)


def test_files_lie_as_they_were_planned(tmp_path):
    sd = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    shardplan.save(sd, tmp_path, planner=split_chunks(24))
    (plan,) = split_chunks(24)((local_plan(sd),))
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    planned = write_plan(plan, 0, names[0].removesuffix(".safetensors").rpartition("-")[2])
    assert list(planned.names) == names
    for number, name in enumerate(names):
        data = (tmp_path / name).read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for row in planned.rows(number).tolist():
            begin, end = header[plan.items[row].index.fqn]["data_offsets"]
            assert (begin, end - begin) == (planned.begin[row], planned.nbytes[row])


def test_a_write_plan_prints_as_a_table_of_its_first_items():
    plan = local_plan({f"t{n:02}": TensorSpec((2,)) for n in range(30)} | {"v": 1})
    lines = repr(write_plan(plan, value_bytes={"v": 3})).splitlines()
    assert lines[0] == "write 243 B of 31 items to 1 file"
    assert lines[2].split()[1:] == ["t00", "0", "8", "1"]
    assert lines[-1] == "… 11 more"
    assert "<table" in write_plan(plan)._repr_html_()


# ---- copying


@attrs.frozen
class Holds:
    """A format that holds anything, or only whole tensors in one file."""

    whole_tensors: bool = False
    name: str = "toy"
    is_file: bool = True
    has_values: bool = True
    reserved: tuple = ()


@attrs.frozen
class Saved:
    """A small checkpoint, byte by byte: each file's bytes, and each tensor's bytes by cell."""

    metadata: Metadata
    stored: StoredChunks
    files: list
    tensors: dict


@st.composite
def checkpoints(draw):
    entries, tensors, first = {}, {}, {}
    files, rows = [[], []], []
    axes = 3
    for n in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_dims=axes, min_side=1, max_side=5))
        dtype = draw(st.sampled_from([*DTYPES]))
        width, name = DTYPES[dtype], f"t{n}"
        chunks = draw(tilings(shape))
        entries[name] = TensorMetadata(TensorProperties(dtype), shape, chunks)
        count = int(np.prod(shape)) * width
        # No byte of any tensor equals another's.
        tensors[name] = (n * 10_000 + np.arange(count)).reshape(*shape, width)
        first[name] = len(rows)
        for chunk in chunks:
            file = draw(st.integers(0, 1))
            files[file] += [-1] * draw(st.integers(0, 3))
            box = tuple(slice(o, e) for o, e in zip(chunk.offsets, chunk.ends, strict=True))
            extents = [*chunk.sizes, *[1] * (axes - len(shape))]
            rows.append((file, len(files[file]), width, extents, draw(st.integers(0, 5)) > 0))
            files[file] += tensors[name][box].reshape(-1).tolist()
    file, begin, width, extents, movable = zip(*rows, strict=True)
    places = ChunkPlaces(
        *(np.array(c, np.int64) for c in (file, begin, width)),
        np.array(extents, np.int64),
        np.zeros(len(rows), bool),
    )
    stored = StoredChunks(places, first, np.array(movable))
    return Saved(Metadata(entries), stored, [np.array(f, np.int64) for f in files], tensors)


def last_axis(name, shape):
    return [Shard(len(shape) - 1)] if shape else ()


@st.composite
def conversions(draw):
    saved = draw(checkpoints())
    options = dict(
        draw(
            st.sampled_from(
                [
                    {},
                    {"into": Holds(whole_tensors=True)},
                    {"mesh": Mesh(dp=2)},
                    {"mesh": Mesh(tp=3), "placements": last_axis},
                    {"planner": split_chunks(9)},
                    {"planner": cast({"t0": "float64"})},
                ]
            )
        )
    )
    into = options.pop("into", Holds())
    return saved, plan_target(saved.metadata, into, saved.stored, **options).plans


def window(array, offsets, sizes):
    return array[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=False))]


def read_through_memory(saved, plan, number):
    """Carry out the reads of one box, cell by cell."""
    box, reads = plan.boxes[number], plan.reads
    width = saved.tensors[box.name].shape[-1]
    got = np.full((*box.sizes, width), -1)
    for row in plan.rows(number):
        item = reads[row]
        axes = len(item.lengths)
        chunk = saved.metadata.state_dict_metadata[box.name].chunks[item.storage_index.index]
        place = saved.stored.first[box.name] + item.storage_index.index
        begin = int(saved.stored.places.begin[place])
        count = chunk.numel * width
        file = saved.files[saved.stored.places.file[place]]
        held = file[begin : begin + count].reshape(*chunk.sizes, width)
        target = window(got, item.dest_offsets, item.lengths)
        assert (target == -1).all()
        target[...] = window(held, item.storage_offsets, item.lengths[:axes])
    return got


def copy_ranges(saved, plan, number):
    """Carry out the byte ranges of one box, byte by byte."""
    got = np.full(int(plan.nbytes[number]), -1)
    for row in plan.rows(number):
        begin, length, into = (int(c[row]) for c in (plan.begin, plan.length, plan.into))
        assert (got[into : into + length] == -1).all()
        got[into : into + length] = saved.files[plan.file[row]][begin : begin + length]
    return got


@given(conversions(), st.sampled_from([1, 10, 1 << 24]))
def test_a_copy_is_a_read_then_a_write_byte_by_byte(case, limit):
    saved, plans = case
    for target in plans:
        order = write_plan(target).order
        plan = copy_plan(saved.metadata, target, order, saved.stored, block_bytes=limit)
        for number, box in enumerate(plan.boxes):
            wanted = window(saved.tensors[box.name], box.offsets, box.sizes)
            assert read_through_memory(saved, plan, number).tolist() == wanted.tolist()
            if plan.copied[number]:
                assert copy_ranges(saved, plan, number).tolist() == wanted.reshape(-1).tolist()
        # Every element that an item writes is in one box, in the order in which it is written.
        assert _cells(saved, plan) == _cells_written(saved, target, order)


def _cells(saved, plan):
    found = {}
    for box in plan.boxes:
        cells = window(saved.tensors[box.name], box.offsets, box.sizes)[..., 0]
        found.setdefault(box.name, []).extend(cells.reshape(-1).tolist())
    return found


def _cells_written(saved, target, order):
    found = {}
    for row in order.tolist():
        item = target.items[row]
        chunk, name = item.tensor_data.chunk, item.index.fqn
        cells = window(saved.tensors[name], chunk.offsets, chunk.sizes)[..., 0]
        if cells.size:
            found.setdefault(name, []).extend(cells.reshape(-1).tolist())
    return found


@given(conversions())
def test_what_is_cast_or_cannot_be_moved_is_not_copied_as_it_is(case):
    saved, plans = case
    for target in plans:
        plan = copy_plan(saved.metadata, target, None, saved.stored)
        stored = saved.metadata.state_dict_metadata
        dtypes = {i.index.fqn: i.tensor_data.properties.dtype for i in target.items}
        for number, box in enumerate(plan.boxes):
            if plan.copied[number]:
                assert dtypes[box.name] == stored[box.name].properties.dtype
                for row in plan.rows(number):
                    chunk = plan.reads[row].storage_index.index
                    assert saved.stored.movable[saved.stored.first[box.name] + chunk]
        assert not copy_plan(saved.metadata, target).copied.any()


@given(conversions())
def test_batches_hold_boxes_in_order_and_only_so_many_bytes(case):
    saved, plans = case
    for target in plans:
        plan = copy_plan(saved.metadata, target, None, saved.stored)
        held = [number for batch in plan.batches for number in batch.tolist()]
        assert held == list(range(len(plan.boxes)))
        for batch in plan.batches:
            assert plan.nbytes[batch].sum() <= 16 << 20 or len(batch) == 1
            assert len(batch) <= 2048


@given(conversions(), st.sampled_from([1, 10, 1 << 24]))
def test_a_copied_block_is_named_by_its_number_and_every_chunk_is_begun_once(case, limit):
    saved, plans = case
    stored = attrs.evolve(saved.stored, block_bytes=limit)
    begun = []
    for target in plans:
        plan = copy_plan(saved.metadata, target, None, stored)
        begun += begun_chunks(plan.reads)
        for row, read in enumerate(plan.reads):
            chunk = stored.first[read.storage_index.fqn] + read.storage_index.index
            extents, width = stored.places.extents[chunk], stored.places.itemsize[chunk]
            cut = cut_blocks(extents[None], width[None], limit)
            blocks = [*zip(cut.offsets.tolist(), cut.sizes.tolist(), strict=True)]
            more = len(extents) - len(read.lengths)
            own = ([*read.storage_offsets, *[0] * more], [*read.lengths, *[1] * more])
            assert plan.block[row] == (blocks.index(own) if own in blocks else -1)
            assert plan.blocks[row] == len(blocks)
    assert len(begun) == len(set(begun))


@given(checkpoints(), st.sampled_from([1, 50, 1 << 24]), st.randoms(use_true_random=False))
def test_what_is_compared_are_all_elements_of_the_chunks_once_in_small_batches(saved, limit, rng):
    entries = saved.metadata.state_dict_metadata
    chunks = {
        name: np.array([n for n in range(len(entry.chunks)) if rng.random() < 0.7], np.int64)
        for name, entry in entries.items()
    }
    plan = compare_plan(saved.metadata, chunks, limit)
    found, wanted = set(), set()
    for box, number in zip(plan.boxes, plan.chunk, strict=True):
        cells = {(box.name, number, *at) for at in cells_of(box.offsets, box.sizes)}
        assert cells
        assert not cells & found
        found |= cells
    for name, numbers in chunks.items():
        for number in numbers.tolist():
            chunk = entries[name].chunks[number]
            wanted |= {(name, number, *at) for at in cells_of(chunk.offsets, chunk.sizes)}
    assert found == wanted
    assert [row for batch in plan.batches for row in batch] == list(range(len(plan.boxes)))
    for batch in plan.batches:
        assert sum(plan.nbytes[row] for row in batch) <= limit or len(batch) == 1


def cells_of(offsets, sizes):
    return product(*(range(low, low + size) for low, size in zip(offsets, sizes, strict=True)))


@given(checkpoints(), st.integers(1, 60), st.integers(1, 3))
def test_split_plans_hold_every_item_once_and_files_stay_apart(saved, limit, processes):
    parts = plan_target(
        saved.metadata, Holds(), saved.stored, max_shard_size=limit, processes=processes
    ).plans
    items = [item for part in parts for item in part.items]
    chunks = sorted((i.index.fqn, i.tensor_data.chunk.offsets) for i in items)
    entries = saved.metadata.state_dict_metadata
    assert chunks == sorted((n, c.offsets) for n in entries for c in entries[n].chunks)
    for part in parts:
        assert written_bytes(part) <= limit or len(part.items) == 1 or _largest(part) > limit
        files = {
            int(saved.stored.places.file[saved.stored.first[i.index.fqn] + n])
            for i in part.items
            for n, chunk in enumerate(saved.metadata.state_dict_metadata[i.index.fqn].chunks)
            if chunk == i.tensor_data.chunk
        }
        assert len(files) == 1
    shares = share_plans(parts, processes)
    assert sorted(n for share in shares for n in share) == list(range(len(parts)))


def _largest(part):
    return max(i.nbytes for i in part.items)


def test_a_copy_plan_prints_as_a_table_of_its_batches():
    plan = local_plan({f"t{n}": TensorSpec((1 << 20,), "float64") for n in range(60)})
    metadata = global_plan([plan])[1]
    lines = repr(copy_plan(metadata, plan)).splitlines()
    assert lines[0] == "copy 480.0 MiB in 60 boxes, 0 B from file to file"
    assert lines[2].split() == ["0", "t0", "2", "16,777,216", "0", "2"]
    assert lines[-1] == "… 10 more"
    assert "<table" in copy_plan(metadata, plan)._repr_html_()
