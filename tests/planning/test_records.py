"""Records: frozen to the leaves, equal by value, small to send, and sequences like any tuple."""

import pickle
from dataclasses import dataclass

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    FrozenDict,
    KeyReport,
    LoadItemType,
    LoadPlan,
    Mesh,
    Metadata,
    MetadataIndex,
    NotFoundError,
    ReadItem,
    SavePlan,
    Shard,
    StorageMeta,
    StridedShard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    freeze,
    global_plan,
    load_plan,
    local_plan,
)
from shardplan.planning.testing.strategies import save_plans, shapes, tensor_specs, tilings

TENSORS = {"w": TensorSpec((6, 4), placements=[Shard(0)]), "b": TensorSpec((5,)), "step": 3}
MESH = Mesh(dp=2)
LOCAL = tuple(local_plan(TENSORS, mesh=MESH, rank=rank) for rank in range(2))
PLANS, METADATA = global_plan(LOCAL)
LOAD = load_plan(METADATA, LOCAL[1])
BOXES = TensorMetadata(TensorProperties(), (4,), [Chunk((2,), (2,)), Chunk((0,), (2,))])

RECORDS = {
    "chunk": Chunk((0, 1), (2, 3)),
    "index": MetadataIndex("w", (0,), 1),
    "properties": TensorProperties("int8"),
    "tensor": METADATA.state_dict_metadata["w"],
    "boxes": BOXES,
    "bytes": BytesMetadata(),
    "storage": StorageMeta("here", modules=["a"]),
    "metadata": METADATA,
    "write": PLANS[0].items[0],
    "read": LOAD.items[0],
    "save": PLANS[0],
    "load": LOAD,
    "report": KeyReport(["a"], [], []),
    "spec": TENSORS["w"],
    "frozen": FrozenDict({"a": [1, {2: "b"}]}),
    "mesh": MESH,
    "write items": PLANS[0].items,
    "read items": LOAD.items,
    "grid": METADATA.state_dict_metadata["w"].chunks,
    "box list": BOXES.chunks,
    "entries": METADATA.state_dict_metadata,
}
every_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


def field_names(record):
    if attrs.has(type(record)):
        return [field.name for field in attrs.fields(type(record))]
    return ["axes"] if isinstance(record, Mesh) else ["_dict"]


def parts(value, seen=None):
    """Yield everything that can be reached from a value through fields, items and views."""
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, (str, int, float, bytes, type)) or value is None:
        return
    seen[id(value)] = value
    yield value
    if attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from parts(getattr(value, field.name), seen)
        for name in ("offsets", "sizes", "nbytes", "numel", "itemsize", "shard_offsets"):
            yield from parts(getattr(value, name, None), seen)
    elif isinstance(value, (tuple, frozenset)):
        for inner in value:
            yield from parts(inner, seen)
    elif isinstance(value, FrozenDict):
        for key, inner in value.items():
            yield from parts((key, inner), seen)


# Frozen


@every_record
def test_no_attribute_can_be_set_or_deleted(record):
    for name in [*field_names(record), "something_new"]:
        with pytest.raises(AttributeError):
            setattr(record, name, 1)
        with pytest.raises(AttributeError):
            delattr(record, name)


@every_record
def test_no_item_can_be_set_or_deleted(record):
    with pytest.raises(TypeError):
        record[0] = 1
    with pytest.raises(TypeError):
        del record[0]


@every_record
def test_nothing_inside_a_record_is_a_list_a_dict_or_a_writable_array(record):
    for part in parts(record):
        assert not isinstance(part, (list, dict, set, bytearray))
        if isinstance(part, np.ndarray):
            assert not part.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                part[...] = 0


@given(save_plans())
def test_every_array_of_a_random_plan_is_read_only(plans):
    done, metadata = global_plan(plans)
    reads = [load_plan(metadata, plan) for plan in plans]
    arrays = [a for value in (plans, done, metadata, *reads) for a in parts(value)]
    assert all(not a.flags.writeable for a in arrays if isinstance(a, np.ndarray))


def test_lists_that_went_in_can_change_without_changing_the_record():
    offsets, items, note = [0, 0], [*PLANS[0].items], {"a": [1]}
    chunk, plan = Chunk(offsets, [1, 1]), SavePlan(items, planner_data=note)
    offsets[0] = 9
    note["a"].append(2)
    del items[:]
    assert chunk.offsets == (0, 0)
    assert plan.planner_data == {"a": (1,)}
    assert plan.items == PLANS[0].items


# Equal by value


@every_record
def test_records_hash_and_equal_their_copies(record):
    copy = pickle.loads(pickle.dumps(record))
    assert copy == record
    assert hash(copy) == hash(record)
    assert copy is not record


@given(save_plans())
def test_items_equal_and_hash_like_a_tuple_of_the_same_records(plans):
    for plan in plans:
        records = tuple(plan.items)
        assert plan.items == records
        assert records == plan.items
        assert hash(plan.items) == hash(records)
        again = SavePlan(records)
        assert again.items == plan.items
        assert hash(again) == hash(attrs.evolve(plan))


@given(save_plans())
def test_reads_equal_and_hash_like_a_tuple_of_the_same_records(plans):
    _, metadata = global_plan(plans)
    for plan in plans:
        reads = load_plan(metadata, plan).items
        assert reads == tuple(reads)
        assert hash(reads) == hash(tuple(reads))
        assert LoadPlan(tuple(reads)).items == reads


@given(shapes().flatmap(tilings))
def test_chunks_equal_and_hash_like_a_tuple_of_the_same_records(tiling):
    assert tiling == tuple(tiling)
    assert hash(tiling) == hash(tuple(tiling))


@given(save_plans(), save_plans())
def test_plans_are_equal_exactly_where_their_records_are(a, b):
    for mine in a:
        for theirs in b:
            assert (mine.items == theirs.items) == (tuple(mine.items) == tuple(theirs.items))
    mine, theirs = (global_plan(plans)[1].state_dict_metadata for plans in (a, b))
    assert (mine == theirs) == (dict(mine) == dict(theirs))


def test_a_hint_is_no_part_of_a_name():
    assert MetadataIndex("w", (0,), 1) == MetadataIndex("w", (0,), 2)
    assert hash(MetadataIndex("w", (0,), 1)) == hash(MetadataIndex("w", (0,)))


@given(st.dictionaries(st.integers(), tensor_specs(), max_size=4))
def test_metadata_is_equal_whatever_the_order_of_its_names(specs):
    entries = {
        str(name): TensorMetadata(
            TensorProperties(s.dtype), s.shape, [Chunk([0] * len(s.shape), s.shape)]
        )
        for name, s in specs.items()
    }
    turned = dict(reversed(entries.items()))
    assert Metadata(entries) == Metadata(turned)
    assert hash(Metadata(entries)) == hash(Metadata(turned))
    assert Metadata(entries).state_dict_metadata == entries


# Sequences


@given(save_plans(), st.data())
def test_items_index_and_slice_like_a_tuple(plans, data):
    _, metadata = global_plan(plans)
    reads = load_plan(metadata, plans[0]).items
    tilings = [e.chunks for e in metadata.state_dict_metadata.values() if hasattr(e, "chunks")]
    for items in (plans[0].items, reads, *tilings):
        records = tuple(items)
        part = data.draw(st.slices(len(items)))
        assert items[part] == records[part]
        assert len(items) == len(records)
        assert list(reversed(items)) == list(reversed(records))
        for at in range(-len(items), len(items)):
            assert items[at] == records[at]
        for at in (len(items), -len(items) - 1):
            with pytest.raises(IndexError):
                items[at]
        if records:
            assert records[-1] in items
            assert items.index(records[-1]) == records.index(records[-1])
            assert items.count(records[0]) == records.count(records[0])


def test_metadata_looks_up_like_a_dict():
    entries = METADATA.state_dict_metadata
    assert list(entries) == ["b", "step", "w"]
    assert "w" in entries
    assert "v" not in entries
    assert entries.get("v") is None
    with pytest.raises(KeyError):
        entries["v"]
    with pytest.raises(NotFoundError, match="`stepp` is not in the checkpoint; nearest: step"):
        METADATA.entry("stepp")


# Small to send


@dataclass
class Box:
    offsets: tuple
    sizes: tuple


@dataclass
class Item:
    """What peers send: one object a chunk, with its own objects inside."""

    fqn: str
    offset: tuple
    chunk: Box
    dtype: str
    layout: str
    requires_grad: bool
    memory_format: str
    pin_memory: bool
    size: tuple


def test_a_pickled_plan_takes_less_than_half_of_one_object_per_chunk():
    specs = {
        f"layers.{i}.mlp.weight": TensorSpec((64, 8), placements=[Shard(0)]) for i in range(500)
    }
    plan = local_plan(specs, mesh=Mesh(dp=8), rank=3)
    objects = [
        Item(i.index.fqn, i.index.offset, Box(*attrs.astuple(i.tensor_data.chunk)),
             *attrs.astuple(i.tensor_data.properties), i.tensor_data.size)
        for i in plan.items
    ]  # fmt: skip
    ours, theirs = len(pickle.dumps(plan)), len(pickle.dumps(objects))
    assert ours < theirs / 2
    assert ours / len(plan.items) < 40  # bytes a tensor, of which the name takes 22


@given(save_plans())
def test_pickles_of_plans_and_metadata_come_back_equal(plans):
    done, metadata = global_plan(plans)
    loads = tuple(load_plan(metadata, plan) for plan in plans)
    for value in (plans, done, metadata, loads):
        assert pickle.loads(pickle.dumps(value)) == value


def test_metadata_pickles_equal_tilings_once():
    chunks = [Chunk((i,), (1,)) for i in (1, 0, *range(2, 100))]
    entry = TensorMetadata(TensorProperties(), (100,), chunks)
    sizes = [len(pickle.dumps(Metadata({f"{i}": entry for i in range(n)}))) for n in (1, 101)]
    assert sizes[1] - sizes[0] < 100 * 20


# Invariants are checked on construction


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chunk((0,), (1, 2)), "other rank"),
        (lambda: Chunk((-1,), (1,)), "negative"),
        (lambda: Chunk((0,), (-1,)), "negative"),
        (lambda: TensorProperties("float33"), "unknown dtype 'float33'; nearest: float32"),
        (lambda: TensorWriteData(Chunk((0,), (1,)), TensorProperties(), (1, 1)), "does not fit a"),
        (lambda: WriteItem(MetadataIndex("w"), WriteItemType.SHARD), "`w`: a SHARD item needs"),
        (
            lambda: WriteItem(
                MetadataIndex("w", (3,)),
                WriteItemType.SHARD,
                TensorWriteData(Chunk((0,), (1,)), TensorProperties(), (1,)),
            ),
            r"`w`: index has offset \(3,\), its chunk \(0,\)",
        ),
        (
            lambda: ReadItem(
                LoadItemType.TENSOR, MetadataIndex("w"), (0,), MetadataIndex("w"), (0, 0), (1,)
            ),
            "`w`: offsets .* do not fit lengths",
        ),
        (
            lambda: ReadItem(
                LoadItemType.BYTE_IO, MetadataIndex("w", (0,)), (0,), MetadataIndex("w"), (0,), (0,)
            ),
            "BYTE_IO read has no offset",
        ),
        (
            lambda: ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex("w", (0, 0)),
                (0,),
                MetadataIndex("w"),
                (0,),
                (1,),
            ),
            "`w`",
        ),
        (
            lambda: WriteItem(
                MetadataIndex("w"),
                WriteItemType.BYTE_IO,
                source=MetadataIndex("v", (0,)),
            ),
            "`v`",
        ),
        (
            lambda: WriteItem(
                MetadataIndex("w"),
                WriteItemType.SHARD,
                TensorWriteData(Chunk((0,), (1,)), TensorProperties(), (1,)),
                MetadataIndex("v", (0, 0)),
            ),
            "`v`",
        ),
        (lambda: Mesh(dp=0), "at least one rank"),
        (lambda: StridedShard(0, split_factor=0), "at least 1, not 0"),
        (lambda: TensorSpec((2, -1)), "an axis is negative"),
        (lambda: MESH.coordinate(2), "rank 2 is not on Mesh"),
    ],
)
def test_an_impossible_record_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match="`flatten` makes them so"):
        MetadataIndex(3)


def test_bytes_of_an_item_are_those_of_its_chunk_not_of_the_tensor():
    item = LOCAL[0].items[2]
    assert (item.tensor_data.size, item.tensor_data.chunk.sizes) == ((6, 4), (3, 4))
    assert item.nbytes == 3 * 4 * 4
    assert LOCAL[0].nbytes == sum(i.nbytes for i in LOCAL[0].items)


def test_freeze_reaches_every_depth():
    frozen = freeze({"a": [{"b": {1, 2}}, bytearray(b"x")]})
    assert frozen == {"a": ({"b": frozenset({1, 2})}, b"x")}
    assert hash(frozen) == hash(freeze({"a": [{"b": {2, 1}}, b"x"]}))
