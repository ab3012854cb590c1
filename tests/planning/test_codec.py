"""Plans and metadata travel as bytes: equal on arrival, or refused, never anything else."""

import base64
import json
import math
import zlib
from pathlib import Path

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    CodecError,
    Issue,
    KeyReport,
    LoadItemType,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    StorageMeta,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    decode_metadata,
    decode_plan,
    decode_plans,
    encode_metadata,
    encode_plan,
    fingerprint,
    global_plan,
    load_plan,
    local_plan,
)
from shardplan.planning.columns.arrays import pack, unpack
from shardplan.planning.frozen import from_json, to_json
from shardplan.planning.testing.frames import framed
from shardplan.planning.testing.strategies import (
    framings,
    save_plans,
    shapes,
    state_dicts,
    values,
)

NOTES = st.recursive(
    values() | st.sets(st.integers()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab$", max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=5,
)
MAGIC = b"SPLN1\n"


@st.composite
def load_plans(draw):
    saved = draw(save_plans())
    _, metadata = global_plan(saved)
    plan = load_plan(metadata, saved[0], strict=False)
    return attrs.evolve(plan, planner_data=draw(NOTES), storage_data=draw(NOTES))


def everything_in(value):
    """Make every record, so that nothing damaged can hide behind columns."""
    repr(value)
    if isinstance(value, Metadata):
        records = list(value.state_dict_metadata.values())
        return [list(r.chunks) for r in records if isinstance(r, TensorMetadata)]
    return list(value.items)


# Round trips


@given(save_plans(), NOTES, NOTES)
def test_a_save_plan_arrives_equal(plans, note, other):
    for plan in (*plans, *global_plan(plans)[0]):
        noted = attrs.evolve(plan, planner_data=note, storage_data=other)
        back = decode_plan(encode_plan(noted))
        assert back == noted
        assert tuple(back.items) == tuple(plan.items)
        assert [i.index.index for i in back.items] == [i.index.index for i in plan.items]
        assert encode_plan(back) == encode_plan(noted)


@given(state_dicts())
def test_the_paths_of_nested_keys_arrive_equal(sd):
    plan = local_plan(sd)
    assert decode_plan(encode_plan(plan)) == plan


@given(load_plans())
def test_a_load_plan_arrives_equal(plan):
    back = decode_plan(encode_plan(plan))
    assert back == plan
    assert tuple(back.items) == tuple(plan.items)
    assert back.report == plan.report


def test_a_report_arrives_with_its_issues():
    issue = Issue("dtype", "w", "was int8", (0, 3), ((0, 1), (2, 2)))
    plan = LoadPlan([], report=KeyReport(["a"], ["b", "c"], [issue]))
    assert decode_plan(encode_plan(plan)) == plan


@given(save_plans(), NOTES, st.none() | st.builds(StorageMeta, st.text(), st.text()))
def test_metadata_arrives_equal(plans, note, where):
    metadata = attrs.evolve(
        global_plan(plans)[1], planner_data=note, storage_data=note, storage_meta=where, version="2"
    )
    back = decode_metadata(encode_metadata(metadata))
    assert back == metadata
    assert dict(back.state_dict_metadata) == dict(metadata.state_dict_metadata)


@given(st.lists(save_plans(), max_size=3))
def test_many_plans_arrive_together_as_one_by_one(worlds):
    plans = [plan for world in worlds for plan in world]
    blobs = [encode_plan(plan) for plan in plans]
    assert decode_plans(blobs) == tuple(map(decode_plan, blobs)) == tuple(plans)


@given(NOTES)
def test_notes_survive_json(note):
    frozen = SavePlan([], planner_data=note).planner_data
    assert from_json(json.loads(json.dumps(to_json(frozen)))) == frozen


def test_numbers_that_json_lacks_survive():
    back = decode_plan(encode_plan(SavePlan([], planner_data=(math.inf, -math.inf, math.nan))))
    assert back.planner_data[:2] == (math.inf, -math.inf)
    assert math.isnan(back.planner_data[2])


def test_what_only_pickle_could_carry_is_refused_by_name():
    plan = SavePlan([], planner_data={"lr": [1, object()]})
    with pytest.raises(CodecError, match=r"planner_data\['lr'\]\[1\] is a object"):
        encode_plan(plan)


def test_a_thousand_layers_cut_alike_are_encoded_as_one_layout():
    chunks = [Chunk((i, 0), (1, 64)) for i in (1, 0, *range(2, 64))]
    entry = TensorMetadata(TensorProperties(), (64, 64), chunks)
    few, many = (
        len(encode_metadata(Metadata({f"{i:04d}": entry for i in range(count)})))
        for count in (10, 1_010)
    )
    assert (many - few) / 1_000 < 8  # a name of four letters, its length, two numbers


ENCODINGS = json.loads(Path(__file__).with_name("encodings.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ENCODINGS)
def test_plans_are_encoded_as_they_always_were(name):
    known = ENCODINGS[name]
    blob = zlib.decompress(base64.b64decode(known["zlib"]))
    plan = decode_plan(blob)
    assert str(plan).splitlines() == known["text"]
    assert fingerprint(plan) == known["fingerprint"]
    assert encode_plan(plan) == blob
    assert attrs.evolve(plan, items=tuple(plan.items)) == plan


# Fingerprints


@given(save_plans())
def test_plans_made_again_of_the_same_records_have_equal_fingerprints(plans):
    for plan in plans:
        again = SavePlan(list(plan.items), plan.storage_data, plan.planner_data)
        assert fingerprint(again) == fingerprint(plan)


@given(save_plans(), save_plans())
def test_fingerprints_are_equal_only_for_equal_plans(a, b):
    for mine, theirs in zip(a, b, strict=False):
        assert (fingerprint(mine) == fingerprint(theirs)) <= (mine == theirs)


def test_a_changed_offset_dtype_name_or_note_changes_the_fingerprint():
    plan = local_plan({"w": TensorSpec((4, 2))})
    others = [
        local_plan({"w": TensorSpec((2, 4))}),
        local_plan({"w": TensorSpec((4, 2), "int32")}),
        local_plan({"v": TensorSpec((4, 2))}),
        local_plan({"w": 3}),
        attrs.evolve(plan, planner_data=1),
        attrs.evolve(plan, storage_data=1),
    ]
    assert len({fingerprint(p) for p in (plan, *others)}) == 7


# Damage


@st.composite
def blobs(draw):
    """The bytes of something valid, and how to decode them."""
    kind = draw(st.sampled_from(["save", "load", "metadata", "framed"]))
    if kind == "framed":
        shape = draw(shapes(min_dims=1, min_side=1))
        plans = draw(save_plans(tensors={"w": TensorSpec(shape)}))
        framing = draw(framings(shape))
        after = [framed(plan, {"w": framing}) for plan in plans]
        load = load_plan(global_plan(after)[1], after[0])
        return encode_plan(draw(st.sampled_from([after[0], load]))), decode_plan
    if kind == "load":
        return encode_plan(draw(load_plans())), decode_plan
    plans = draw(save_plans())
    if kind == "save":
        plan = attrs.evolve(draw(st.sampled_from(plans)), planner_data=draw(NOTES))
        return encode_plan(plan), decode_plan
    return encode_metadata(attrs.evolve(global_plan(plans)[1], planner_data=draw(NOTES))), (
        decode_metadata
    )


def decodes_or_is_refused(decode, data):
    try:
        value = decode(data)
    except CodecError:
        return
    everything_in(value)


@given(blobs(), st.data())
def test_truncated_bytes_are_refused(case, data):
    blob, decode = case
    cut = data.draw(st.integers(0, len(blob) - 1))
    with pytest.raises(CodecError):
        decode(blob[:cut])


@given(blobs(), st.binary(min_size=1, max_size=9))
def test_bytes_that_run_on_are_refused(case, more):
    blob, decode = case
    with pytest.raises(CodecError):
        decode(blob + more)


@given(blobs(), st.data())
def test_flipped_bits_are_refused_or_decode(case, data):
    blob, decode = case
    flips = st.integers(0, 8 * len(blob) - 1)
    for _ in range(20):
        damaged = bytearray(blob)
        for bit in data.draw(st.lists(flips, min_size=1, max_size=2)):
            damaged[bit // 8] ^= 1 << bit % 8
        decodes_or_is_refused(decode, bytes(damaged))


@given(
    st.binary(max_size=60), st.binary(max_size=60), st.sampled_from([decode_plan, decode_metadata])
)
@example(b"", b"", decode_plan)
def test_random_bytes_are_refused(head, body, decode):
    for data in (head, MAGIC + head, MAGIC + len(head).to_bytes(8, "little") + head + body):
        with pytest.raises(CodecError):
            decode(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.text("$flobapytems", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$float", "$bytes", "$map", "$set", "x"]), inner)
    ),
    max_leaves=4,
)


def places(tree, path=()):
    yield path
    inner = (
        enumerate(tree)
        if isinstance(tree, list)
        else tree.items()
        if isinstance(tree, dict)
        else ()
    )
    for key, value in inner:
        yield from places(value, (*path, key))


def planted(tree, path, value):
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = planted(tree[path[0]], path[1:], value)
    return copy


def with_head(blob, change):
    """Rewrite a packed buffer's JSON header, its bytes left alone."""
    start = len(MAGIC) + 8
    end = start + int.from_bytes(blob[len(MAGIC) : start], "little")
    head = json.dumps(change(json.loads(blob[start:end]))).encode()
    return MAGIC + len(head).to_bytes(8, "little") + head + blob[end:]


@given(blobs(), st.data())
def test_a_header_that_lies_is_refused_or_decodes(case, data):
    blob, decode = case

    def lie(head):
        path = data.draw(st.sampled_from(list(places(head))))
        return planted(head, path, data.draw(JSON))

    for _ in range(10):
        decodes_or_is_refused(decode, with_head(blob, lie))


@given(blobs(), st.data())
def test_parts_that_do_not_fit_each_other_are_refused_or_decode(case, data):
    def tampered(blob, depth):
        """Change one number, array or note, at any depth of buffers inside buffers."""
        header, parts = unpack(blob)
        name = data.draw(st.sampled_from(sorted(parts)))
        part = parts[name]
        if isinstance(part, bytes) and part.startswith(MAGIC) and data.draw(st.booleans()):
            parts[name] = tampered(part, depth + 1)
        elif name == "data":
            tree = json.loads(part)
            path = data.draw(st.sampled_from(list(places(tree))))
            parts[name] = json.dumps(planted(tree, path, data.draw(JSON))).encode()
        elif isinstance(part, bytes) or not part.size or data.draw(st.booleans()):
            other = data.draw(st.sampled_from(sorted(parts)))
            parts[name] = parts[other]
        else:
            part = part.copy()
            part.flat[data.draw(st.integers(0, part.size - 1))] = data.draw(
                st.sampled_from([0, 1, 2, 3, 7, 200, -1, 1 << 40, (1 << 63) - 1, -(1 << 63)])
            )
            parts[name] = part
        return pack(header, parts)

    blob, decode = case
    for _ in range(10):
        decodes_or_is_refused(decode, tampered(blob, 0))


def plan_with(**parts):
    items = pack({}, {})
    return pack({"plan": "load"}, {"items": items, "data": b"{}", **parts})


@pytest.mark.parametrize(
    "data",
    [
        plan_with(),
        plan_with(data=b"[]"),
        plan_with(data=b'{"$float":null}'),
        plan_with(data=b'{"$map":[3]}'),
        plan_with(data=b"[" * 100_000),
        pack({"plan": "save"}, {}),
        pack({"plan": []}, {}),
        with_head(pack({}, {}), lambda head: [{}, [["a", "<i8", [0, 1 << 80]]]]),
        with_head(pack({}, {}), lambda head: [{}, [["a", "|u1", [1] * 99]]]) + b"x",
        MAGIC + (200_000).to_bytes(8, "little") + b"[" * 200_000,
        MAGIC + b"\xff" * 8,
    ],
    ids=range(11),
)
def test_nonsense_is_refused(data):
    for decode in (decode_plan, decode_metadata):
        with pytest.raises(CodecError):
            decode(data)


def test_plans_do_not_decode_as_metadata_nor_the_reverse():
    plan, metadata = SavePlan([]), Metadata({"a": BytesMetadata()})
    with pytest.raises(CodecError, match="not metadata"):
        decode_metadata(encode_plan(plan))
    with pytest.raises(CodecError, match="not a plan"):
        decode_plan(encode_metadata(metadata))


def test_reads_of_records_arrive_equal():
    index = MetadataIndex("w", (4, 0), 3)
    reads = [
        ReadItem(LoadItemType.TENSOR, index, (0, 1), MetadataIndex("v", (0, 0)), (2, 2), (1, 3)),
        ReadItem(LoadItemType.BYTE_IO, MetadataIndex("s"), (0,), MetadataIndex("s"), (0,), (0,)),
        ReadItem(LoadItemType.TENSOR, MetadataIndex("z", ()), (), MetadataIndex("z", ()), (), ()),
    ]
    back = decode_plan(encode_plan(LoadPlan(reads)))
    assert list(back.items) == reads
    assert back.items[0].dest_index.index == 3


@given(save_plans())
def test_equal_plans_have_equal_fingerprints_however_they_were_made(plans):
    done, metadata = global_plan(plans)
    for plan in (*plans, *done):
        again = SavePlan(tuple(plan.items), plan.storage_data, plan.planner_data)
        assert again == plan
        assert fingerprint(again) == fingerprint(plan)
        half = SavePlan(plan.items[::2])
        assert fingerprint(half) == fingerprint(SavePlan(tuple(half.items)))
    reads = load_plan(metadata, plans[0])
    assert fingerprint(reads) == fingerprint(LoadPlan(tuple(reads.items), report=reads.report))


@given(save_plans())
def test_metadata_in_another_order_of_names_has_the_same_fingerprint(plans):
    metadata = global_plan(plans)[1]
    entries = metadata.state_dict_metadata
    turned = Metadata(
        {name: entries[name] for name in reversed(entries.names)}, metadata.planner_data
    )
    assert turned == metadata
    assert fingerprint(turned) == fingerprint(metadata)
