"""Fetch plans, against enumerating every byte of small files."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import Access, BoxReads, ChunkPlaces, FetchPlan, fetch_plan
from shardplan.planning.storage import cut_blocks
from shardplan.planning.testing.strategies import chunks, shapes, tilings

AXES = 3


def rows(values, fill):
    return np.array([[*v, *[fill] * (AXES - len(v))] for v in values], np.int64).reshape(-1, AXES)


@st.composite
def loads(draw):
    """Chunks in two files, and boxes of them: some tile their chunk, others are anything."""
    files, places, reads = [0, 0], [], []
    for number in range(draw(st.integers(1, 4))):
        extents = draw(shapes(min_dims=1, max_dims=AXES, min_side=1, max_side=5))
        width, file = draw(st.sampled_from([1, 2, 8])), draw(st.integers(0, 1))
        begin = files[file] + draw(st.integers(0, 9))
        files[file] = begin + int(np.prod(extents)) * width
        places.append((file, begin, width, extents, draw(st.booleans())))
        if draw(st.booleans()):
            boxes = [box for box in draw(tilings(extents)) if box.numel]
        else:
            boxes = draw(st.lists(chunks(extents), max_size=3))
        for box in boxes:
            step = draw(st.sampled_from([1, 1, 1, 2]))
            reads.append((number, box.offsets, box.sizes, step, draw(st.booleans())))
    if not reads:
        reads.append((0, [0] * len(places[0][3]), places[0][3], 1, True))
    return places, draw(st.permutations(reads))


def planned(case, access, **options):
    places, reads = case
    file, begin, width, extents, summed = zip(*places, strict=True)
    where = ChunkPlaces(*map(np.array, (file, begin, width)), rows(extents, 1), np.array(summed))
    chunk, offsets, lengths, step, direct = zip(*reads, strict=True)
    lengths, step = rows(lengths, 1), np.repeat(np.array(step)[:, None], AXES, 1)
    lengths = -(-lengths // step)
    step = np.where(lengths == 1, 1, step)
    boxes = BoxReads(np.array(chunk), rows(offsets, 0), lengths, step, np.array(direct))
    return fetch_plan(where, boxes, access, **options)


def bytes_of(plan, read):
    """Return the file and the bytes of a read, one by one, in the order of its box."""
    chunk = plan.reads.chunk[read]
    width, extents = plan.places.itemsize[chunk], plan.places.extents[chunk]
    every = plan.places.begin[chunk] + np.arange(extents.prod() * width).reshape(*extents, width)
    columns = (plan.reads.offsets[read], plan.reads.lengths[read], plan.reads.step[read])
    box = tuple(slice(o, o + n * s, s) for o, n, s in zip(*columns, strict=True))
    return int(plan.places.file[chunk]), every[box]


def delivered(plan, block, fetched):
    """Return the bytes of a block, in the order of its box, out of those that were fetched."""
    read = plan.blocks.box[block]
    width, sizes = plan.places.itemsize[plan.reads.chunk[read]], plan.blocks.sizes[block]
    strides = np.array([*plan.staged_strides(block), 1])
    strides[:-1] *= width
    return np.lib.stride_tricks.as_strided(fetched, (*sizes, width), strides * fetched.itemsize)


accesses = st.builds(
    Access,
    is_far=st.booleans(),
    is_local=st.booleans(),
    page_bytes=st.sampled_from([0, 8]),
    threads=st.sampled_from([1, 2]),
)
limits = st.sampled_from([1, 7, 32, 1 << 20])


@given(loads(), accesses, limits, st.booleans())
def test_every_byte_is_fetched_once_and_delivered_to_the_right_place(case, access, limit, parts):
    plan = planned(case, access, block_bytes=limit, hash_parts=parts)
    got = [np.full(bytes_of(plan, n)[1].shape, -1) for n in range(len(plan.reads.chunk))]
    assert sorted(np.concatenate(plan.tasks).tolist()) == list(range(len(plan.blocks)))
    for task in plan.tasks:
        (file,) = {int(f) for f in plan.file[task]}
        wanted = plan.request(task)
        fetched = [np.full(int(plan.span[b] * plan.ranges[b]), -1) for b in task]
        columns = (wanted.block, wanted.start, wanted.length, wanted.into)
        for block, start, length, into in zip(*columns, strict=True):
            here = fetched[block][into : into + length]
            assert (here == -1).all()
            here[:] = np.arange(start, start + length)
        for block, found in zip(task.tolist(), fetched, strict=True):
            read = plan.blocks.box[block]
            assert bytes_of(plan, read)[0] == file
            place = (plan.blocks.offsets[block], plan.blocks.sizes[block])
            box = tuple(slice(o, o + n) for o, n in zip(*place, strict=True))
            assert (got[read][box] == -1).all()
            got[read][box] = delivered(plan, block, found)
    for read, found in enumerate(got):
        assert found.tolist() == bytes_of(plan, read)[1].tolist()


@given(loads(), accesses, limits)
def test_a_plain_block_is_one_range_of_its_file_and_one_of_its_box(case, access, limit):
    plan = planned(case, access, block_bytes=limit)
    for block in np.flatnonzero(plan.plain).tolist():
        read, size, into = plan.blocks.box[block], int(plan.nbytes[block]), int(plan.into[block])
        assert plan.reads.direct[read]
        wanted = bytes_of(plan, read)[1].reshape(-1)[into : into + size]
        assert wanted.tolist() == list(range(plan.start[block], plan.start[block] + size))


@given(loads(), accesses, limits, st.booleans())
def test_units_are_the_blocks_of_chunks_with_checksums_each_hashed_once(case, access, limit, parts):
    plan = planned(case, access, block_bytes=limit, hash_parts=parts)
    hashed = plan.hashed[plan.blocks.box]
    for number in range(len(plan.places.file)):
        extents, width = plan.places.extents[[number]], plan.places.itemsize[[number]]
        whole = cut_blocks(extents, width, limit)
        assert plan.chunk_blocks[number] == len(whole)
        mine = np.flatnonzero(hashed & (plan.chunk == number))
        if not plan.places.summed[number]:
            assert not len(mine)
        _, every = 0, plan.places.begin[number] + np.arange(extents.prod() * width[0])
        every = every.reshape(*extents[0], width[0])
        for block in set(plan.blocks.number[mine].tolist()):
            rows = mine[plan.blocks.number[mine] == block]
            assert len(set(plan.unit[rows].tolist())) == 1
            # The unit's parts, in order of place, are just the bytes of the chunk's block.
            spans = sorted((int(plan.start[r]), int(plan.nbytes[r])) for r in rows)
            seen = [byte for start, size in spans for byte in range(start, start + size)]
            place = (whole.offsets[block], whole.sizes[block])
            box = tuple(slice(o, o + n) for o, n in zip(*place, strict=True))
            assert seen == every[box].reshape(-1).tolist()
        blocks = set(plan.blocks.number[mine].tolist())
        assert not blocks or parts or len(blocks) == len(whole)


@given(loads(), accesses, limits)
def test_blocks_of_one_unit_are_in_one_task_in_order_of_place(case, access, limit):
    plan = planned(case, access, block_bytes=limit)
    task_of = {b: n for n, task in enumerate(plan.tasks) for b in task.tolist()}
    for block, unit in enumerate(plan.unit.tolist()):
        assert task_of[block] == task_of[unit]
    for task in plan.tasks:
        together = np.flatnonzero(np.diff(plan.unit[task]) == 0)
        assert (np.diff(plan.start[task])[together] > 0).all()


@given(loads(), accesses, limits)
def test_gaps_are_read_over_only_within_a_request(case, access, limit):
    plan = planned(case, access, block_bytes=limit)
    for task in plan.tasks:
        wanted = plan.request(task)
        assert (np.diff(wanted.start) >= 0).all()
        assert (np.diff(wanted.request) >= 0).all()
        exact = plan.byte_ranges(task)
        assert sorted(zip(exact.start, exact.length, strict=True)) == sorted(
            zip(wanted.start, wanted.length, strict=True)
        )


def test_a_plan_prints_as_a_table_of_its_first_tasks():
    case = [(0, 0, 1, (4,), True)] * 30, [(n, (0,), (4,), 1, True) for n in range(30)]
    far = [(n, 0, 1, (4,), True) for n in range(30)]  # each in a file of its own
    plan = planned((far, case[1]), Access())
    assert isinstance(plan, FetchPlan)
    lines = repr(plan).splitlines()
    assert lines[0] == "fetch 120 B in 30 blocks, 30 ranges, 30 tasks"
    assert lines[-1] == "… 10 more"
    assert len(lines) == 23
    assert "<table" in plan._repr_html_()
