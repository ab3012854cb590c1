"""Files that ranks write together: the ranges of all ranks tile them, byte by byte."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import Mesh, Shard, TensorSpec, global_plan, itemsize, world_plans
from shardplan.planning.storage import Spot, common_ties, lay_out_files, shared_plan
from shardplan.planning.testing.strategies import meshes, placements, shapes


@st.composite
def worlds(draw):
    """The specs of a few tensors on a mesh, and the most bytes of a file."""
    mesh = draw(meshes())
    specs = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5)):
        shape = draw(shapes())
        dtype = draw(st.sampled_from(["int8", "bfloat16", "float32", "float64"]))
        specs[name] = TensorSpec(shape, dtype, draw(placements(mesh, shape)))
    return mesh, specs, draw(st.integers(1, 200))


def byte_owners(metadata, layout):
    """Return, for every byte of every file, the tensor, the element and the byte of it."""
    owners = {}
    for number, tensors in enumerate(layout):
        for tensor in tensors:
            at = tensor.begin
            for cell in itertools.product(*map(range, tensor.shape)):
                for byte in range(itemsize(tensor.dtype)):
                    owners[number, at] = (tensor.name, cell, byte)
                    at += 1
    return owners


@given(worlds())
def test_the_ranges_of_all_ranks_tile_the_files_and_bring_every_byte_to_its_place(world):
    mesh, specs, limit = world
    plans, metadata = global_plan(world_plans(specs, mesh))
    layout = lay_out_files(metadata, limit)
    owners = byte_owners(metadata, layout)
    spots = {t.name: Spot(n, t.begin) for n, held in enumerate(layout) for t in held}
    written = {}
    for rank, plan in enumerate(plans):
        shared = shared_plan(plan, spots, rank)
        assert sorted(shared.files) == sorted(set(shared.file.tolist()))
        rows = [(file, row) for file in shared.files for row in shared.rows(file)]
        assert sorted(row for _, row in rows) == list(range(len(plan.items)))
        for file, row in rows:
            item = plan.items[row]
            chunk, name = item.tensor_data.chunk, item.index.fqn
            width = item.tensor_data.properties.itemsize
            cells = itertools.product(
                *(range(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            )
            data = [(name, cell, byte) for cell in cells for byte in range(width)]
            found = shared.ranges(row, [0] * len(chunk.sizes), chunk.sizes)
            columns = found.start.tolist(), found.into.tolist(), found.length.tolist()
            for start, into, length in zip(*columns, strict=True):
                for byte in range(length):
                    assert (file, start + byte) not in written
                    written[file, start + byte] = data[into + byte]
    assert written == owners


@given(worlds())
def test_every_tensor_is_in_one_file_aligned_and_files_are_no_larger_than_they_may_be(world):
    mesh, specs, limit = world
    _, metadata = global_plan(world_plans(specs, mesh))
    layout = lay_out_files(metadata, limit)
    assert sorted(tensor.name for held in layout for tensor in held) == sorted(specs)
    for held in layout:
        assert len(held) <= 1 or held[-1].end <= limit
        assert [t.begin for t in held] == [0, *(t.end for t in held)][: len(held)]
        assert all(tensor.begin % itemsize(tensor.dtype) == 0 for tensor in held)


@given(worlds(), st.data())
def test_a_box_of_a_chunk_takes_the_bytes_that_are_its_own(world, data):
    mesh, specs, _ = world
    plans, _ = global_plan(world_plans(specs, mesh))
    spots = {name: Spot(0, 1000) for name in specs}
    for plan in plans:
        shared = shared_plan(plan, spots)
        for row, item in enumerate(plan.items):
            chunk, size = item.tensor_data.chunk, item.tensor_data.size
            if 0 in chunk.sizes:
                continue
            low = [data.draw(st.integers(0, n - 1)) for n in chunk.sizes]
            sizes = [
                data.draw(st.integers(1, n - o)) for o, n in zip(low, chunk.sizes, strict=True)
            ]
            width = item.tensor_data.properties.itemsize
            first = [o + at for o, at in zip(chunk.offsets, low, strict=True)]
            expected = [
                1000 + width * sum(c * math.prod(size[a + 1 :]) for a, c in enumerate(cell)) + byte
                for cell in itertools.product(
                    *(range(o, o + n) for o, n in zip(first, sizes, strict=True))
                )
                for byte in range(width)
            ]
            found = shared.ranges(row, low, sizes)
            pairs = zip(found.start.tolist(), found.length.tolist(), strict=True)
            assert [at + byte for at, n in pairs for byte in range(n)] == expected


def test_ranks_begin_with_different_files():
    half = TensorSpec((2, 4), "int8", [Shard(0)])
    plans, metadata = global_plan(world_plans(dict.fromkeys("abc", half), Mesh(dp=2)))
    layout = lay_out_files(metadata, 8)
    spots = {t.name: Spot(n, t.begin) for n, held in enumerate(layout) for t in held}
    orders = [shared_plan(plan, spots, rank).files for rank, plan in enumerate(plans)]
    assert orders == [[0, 1, 2], [1, 2, 0]]


def test_names_are_tied_only_if_all_ranks_that_write_them_say_so():
    half, other = TensorSpec((4,), "float32", [Shard(0)]), TensorSpec((4,), "int32", [Shard(0)])
    specs = {"a": half, "b": half, "c": half, "d": other}
    plans, metadata = global_plan(world_plans(specs, Mesh(dp=2)))
    three = {"b": "a", "c": "a"}
    assert common_ties(metadata, plans, [three, three]) == three
    assert common_ties(metadata, plans, [three, {"b": "a"}]) == {"b": "a"}
    assert common_ties(metadata, plans, [three, {}]) == {}
    assert common_ties(metadata, plans, [{"d": "a"}] * 2) == {}  # it is stored otherwise
    assert common_ties(metadata, plans, [three, three], ["b"]) == {"c": "a"}
    # Ranks may hold the names in different orders.
    assert common_ties(metadata, plans, [{"b": "a"}, {"a": "b"}]) == {"b": "a"}
