"""Items that lie otherwise in the state dict than in the checkpoint: records, columns and bytes."""

import pickle

import attrs
import numpy as np
import pytest

from shardplan.planning import (
    Chunk,
    CodecError,
    LoadItemType,
    LoadPlan,
    MetadataIndex,
    ReadItem,
    SavePlan,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    decode_plan,
    encode_plan,
    fingerprint,
    local_plan,
)
from shardplan.planning.columns import ReadItems, WriteItems
from shardplan.planning.columns.arrays import pack, unpack
from shardplan.planning.geometry.axes import Axes

SHARD, TENSOR, BYTES = WriteItemType.SHARD, LoadItemType.TENSOR, LoadItemType.BYTE_IO
TURN = Axes((2, 3), (1, 0))


def written(name, offsets, sizes, **frame):
    size = [o + n for o, n in zip(offsets, sizes, strict=True)]
    data = TensorWriteData(Chunk(offsets, sizes), TensorProperties(), size)
    return WriteItem(MetadataIndex(name), SHARD, data, **frame)


def source(name, *offset):
    return MetadataIndex(name, offset)


PART = written("q", (0, 2), (3, 2), source=source("qkv", 4, 0), source_box=Chunk((5, 0), (3, 2)))
TURNED = written(
    "t", (0, 0), (3, 2), source=source("w", 0, 0), source_box=Chunk((0, 0), (2, 3)), axes=TURN
)
ADDED = written("x", (1, 0, 0), (1, 2, 3), source_box=Chunk((0, 0), (2, 3)), axes=Axes((6,), (0,)))
MERGED = written("m", (3,), (6,), source_box=Chunk((0, 0, 1), (1, 2, 3)), axes=Axes((6,), (0,)))
FILL = written("p", (4, 0), (2, 3), source=MetadataIndex("embed"), fill=0.5)
PLAIN = written("b", (1,), (5,))
VALUE = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO)
WRITES = [PART, TURNED, ADDED, MERGED, FILL, PLAIN, VALUE]

READS = [
    ReadItem(TENSOR, source("w", 0, 0), (0, 1), source("t", 0, 0), (1, 0), (3, 2), (2, 3), TURN),
    ReadItem(
        TENSOR, source("x", 3), (1,), source("y", 0, 0), (1, 0), (2, 3), (6,), Axes((6,), (0,))
    ),
    ReadItem(TENSOR, source("b", 1), (0,), source("b", 0), (1,), (4,)),
    ReadItem(BYTES, MetadataIndex("s"), (0,), MetadataIndex("s"), (0,), (0,)),
]


def test_an_item_without_a_box_of_its_own_is_made_of_its_chunk():
    chunk = PLAIN.tensor_data.chunk
    assert PLAIN.source_box is None
    assert PLAIN.source_chunk == chunk
    assert written("b", (1,), (5,), source_box=chunk) == PLAIN
    moved = attrs.evolve(PLAIN, index=MetadataIndex("b"), tensor_data=FILL.tensor_data, source=None)
    assert moved.source_chunk == FILL.tensor_data.chunk
    assert FILL.source_chunk is VALUE.source_chunk is None
    assert FILL.source.offset is None


def test_a_shard_starts_where_the_box_does_unless_stated():
    assert ADDED.source.offset == (0, 0)
    assert PART.source.offset == (4, 0)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ({"source_box": Chunk((0, 0), (3, 2))}, "axes are missing"),
        ({"source_box": Chunk((0, 0), (3, 3)), "axes": TURN}, "parts"),
        ({"source_box": Chunk((0, 0), (2, 3)), "axes": Axes((4,), (0,))}, "parts"),
        ({"axes": TURN}, "belong to a source_box"),
        ({"fill": 0, "source_box": Chunk((1, 0), (2, 3))}, "a fill has a chunk"),
        ({"fill": float("nan")}, "nan"),
        ({"fill": 1 << 64}, "64 bits"),
        ({"source_box": Chunk((0,), (6,)), "axes": Axes((6,), (0,)), "source": source("w", 0, 0)},
         "source has offset"),
    ],
)  # fmt: skip
def test_boxes_that_cannot_become_the_chunk_are_refused(frame, text):
    with pytest.raises(ValueError, match=text):
        written("w", (0, 0), (2, 3), **frame)


def test_equal_arrangements_are_equal_values():
    same = attrs.evolve(TURNED, axes=Axes((2, 1, 3), (2, 1, 0)))
    assert same == TURNED
    flat = written("w", (0, 0), (2, 3), source_box=Chunk((0, 0), (2, 3)), axes=Axes((6,), (0,)))
    assert flat == written("w", (0, 0), (2, 3))


def test_equal_fills_are_alike():
    fills = [written("p", (0,), (2,), fill=value) for value in (0, 0.0, -0.0, False)]
    assert {fingerprint(SavePlan([item])) for item in fills} == {fingerprint(SavePlan(fills[:1]))}
    low = written("p", (0,), (2,), fill=float("-inf"))
    assert decode_plan(encode_plan(SavePlan([low]))).items[0].fill == float("-inf")


def test_columns_give_the_records_back():
    for records, columns in ((WRITES, WriteItems), (READS, ReadItems)):
        made = columns.of(records)
        assert list(made) == records
        assert list(made.take([3, 0])) == [records[3], records[0]]
        assert list(made.take(slice(1, 3))) == records[1:3]
        assert made == columns.of(records)
        assert pickle.loads(pickle.dumps(made)) == made
        for cut in range(len(records) + 1):
            parts = [columns.of(records[:cut]), columns.of(records[cut:])]
            assert list(columns.concat(parts)) == records
            assert columns.concat(parts) == made


def test_plans_with_frames_arrive_equal_and_have_one_fingerprint():
    plans = [
        SavePlan(WRITES, held=local_plan({"w": np.zeros(4)}).items, left_out=[PLAIN]),
        LoadPlan(READS),
    ]
    for plan in plans:
        back = decode_plan(encode_plan(plan))
        assert back == plan
        assert encode_plan(back) == encode_plan(plan)
        assert fingerprint(back) == fingerprint(attrs.evolve(plan, items=list(plan.items)))
        parts = attrs.evolve(plan, items=type(plan.items).concat([plan.items[:2], plan.items[2:]]))
        assert fingerprint(parts) == fingerprint(plan)
        # A part without frames has the fingerprint of one that never had any.
        half = attrs.evolve(plan, items=plan.items[-2:])
        assert fingerprint(half) == fingerprint(attrs.evolve(plan, items=list(half.items)))
    assert list(decode_plan(encode_plan(plans[0])).left_out) == [PLAIN]


def test_each_part_of_a_frame_counts_for_equality_and_fingerprint():
    others = [
        written("t", (0, 0), (3, 2), source=source("w", 0, 0)),
        attrs.evolve(TURNED, source=source("w", 1, 0)),
        attrs.evolve(TURNED, source_box=Chunk((1, 0), (2, 3))),
        attrs.evolve(TURNED, source_box=None, axes=None, fill=1),
        attrs.evolve(TURNED, source_box=None, axes=None, fill=2),
    ]
    plans = [SavePlan([item]) for item in (TURNED, *others)]
    assert len({fingerprint(plan) for plan in plans}) == len(set(plans)) == 1 + len(others)
    square = attrs.evolve(READS[0], lengths=(2, 2), dest_lengths=(2, 2), axes=Axes((2, 2), (1, 0)))
    changed = [READS[1], attrs.evolve(READS[1], dest_index=source("x", 4)), square]
    changed.append(attrs.evolve(square, axes=None))
    reads = [LoadPlan([item]) for item in (READS[0], *changed)]
    assert len({fingerprint(plan) for plan in reads}) == len(set(reads)) == 5


def damaged(change):
    """Return the bytes of a plan with frames, after a change of its items' arrays or header."""
    header, parts = unpack(encode_plan(SavePlan(WRITES)))
    inner, arrays = unpack(parts["items"])
    arrays = {k: v if isinstance(v, bytes) else v.copy() for k, v in arrays.items()}
    change(inner, arrays)
    return pack(header, {**parts, "items": pack(inner, arrays)})


def put(key, row, value):
    def change(header, arrays):
        arrays[key][row] = value

    return change


def say(key, value):
    return lambda header, arrays: header.__setitem__(key, value)


@pytest.mark.parametrize(
    "change",
    [
        put("box.ndim", 0, 9),
        put("box.ndim", 4, 1),
        put("box.sizes", 0, 7),
        put("box.sizes", 1, 7),
        put("box.offsets", 6, 1),
        put("axes", 5, 1),
        put("axes", 1, 0),
        put("axes", 1, 9),
        put("axes", 6, 1),
        put("fill", 4, 9),
        put("fill", 4, 0),
        put("fill", 6, 1),
        put("source_offsets", 4, 1),
        say("axes", [[[1 << 62, 2], [1, 0]], [[6], [0]]]),
        say("axes", [[[2, 3], [0, 0]], [[6], [0]]]),
        say("axes", [[[2, 3], [1, 0]]]),
        say("fills", ["nan"]),
        say("fills", ["0" * 5_000]),
        say("fills", [5]),
        say("fills", ["1e", "x"]),
    ],
)
def test_frames_that_do_not_fit_are_refused(change):
    with pytest.raises(CodecError):
        decode_plan(damaged(change))
