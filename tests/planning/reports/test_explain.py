"""What plans cost, why a byte is read and what differs, each against counting by hand."""

import itertools
import math
from html.parser import HTMLParser

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    LoadItemType,
    LoadPlan,
    Mesh,
    Metadata,
    MetadataIndex,
    NotFoundError,
    PlanError,
    Replicate,
    SavePlan,
    Shard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    dedup_replicas,
    global_plan,
    itemsize,
    load_plan,
    local_plan,
    read_on,
    resolve_overlaps,
    share_reads,
    traffic_matrix,
    world_metadata,
    world_plans,
)
from shardplan.planning.reports import CostModel, FileCost, RankCost, explain
from shardplan.planning.reports.diff import PlanDiff, plan_diff
from shardplan.planning.reports.origins import why, writers_of
from shardplan.planning.reports.traffic import count_runs
from shardplan.planning.testing.strategies import (
    chunks,
    meshes,
    placements,
    save_plans,
    shapes,
    tensor_specs,
    tilings,
)

CONTENTS = st.dictionaries(
    st.text("abw.", min_size=1, max_size=3), tensor_specs() | st.none(), max_size=3
)


@st.composite
def worlds(draw):
    """What a world wrote, the checkpoint, and what another world holds of the same tensors."""
    tensors = draw(CONTENTS)
    saved, metadata = global_plan(draw(save_plans(tensors=tensors)))
    return saved, metadata, draw(save_plans(tensors=tensors))


@st.composite
def windows(draw):
    """A checkpoint of one tensor, and boxes of it that ranks want, which may overlap in part."""
    shape = draw(shapes(min_side=1, max_side=4))
    metadata = Metadata(
        {"w": TensorMetadata(TensorProperties("float16"), shape, draw(tilings(shape)))}
    )
    boxes = st.lists(chunks(shape), max_size=2, unique_by=lambda box: box.offsets)
    return metadata, draw(st.lists(boxes, max_size=3))


@st.composite
def placed_worlds(draw):
    """The same tensors and values placed on two meshes, and what the first one wrote."""
    sizes = draw(st.dictionaries(st.sampled_from("abcde"), shapes(max_side=5), max_size=4))
    kinds = {name: draw(st.sampled_from(["float32", "bfloat16", "int8"])) for name in sizes}
    found = []
    for _ in range(2):
        mesh = draw(meshes())
        specs = {
            name: TensorSpec(shape, kinds[name], draw(placements(mesh, shape)))
            for name, shape in sizes.items()
        }
        found.append(world_plans({**specs, "step": 7}, mesh))
    saved, metadata = global_plan(found[0])
    return saved, metadata, found[0], found[1]


def address(position, sizes):
    """Where an element lies in a row-major array."""
    return int(np.ravel_multi_index(position, sizes)) if sizes else 0


def box_addresses(offsets, lengths, sizes):
    steps = itertools.product(*map(range, lengths))
    return {address([o + s for o, s in zip(offsets, step, strict=True)], sizes) for step in steps}


def runs(addresses):
    return sum(1 for a in addresses if a - 1 not in addresses)


def writer_by_hand(saved, index):
    ranks = [r for r, plan in enumerate(saved) if index in [i.index for i in plan.items]]
    return min(ranks)


def count_by_hand(metadata, loads, shard_sizes, saved=None):
    """Count everything, one element at a time."""
    entries = metadata.state_dict_metadata
    nothing = {"nbytes": 0, "requests": 0, "elements": 0, "peak_buffer": 0}
    ranks = [{**nothing, "peers": set()} for _ in loads]
    files, touched, whole = {}, {}, 0
    for rank, load in enumerate(loads):
        for read in load.items:
            index, cost = read.storage_index, ranks[rank]
            elements = itemsize = 0
            requests = 1
            if read.type is LoadItemType.TENSOR:
                entry = entries[index.fqn]
                (chunk,) = [c for c in entry.chunks if c.offsets == index.offset]
                itemsize = entry.properties.itemsize
                source = box_addresses(read.storage_offsets, read.lengths, chunk.sizes)
                into = shard_sizes(rank, read.dest_index)
                dest = box_addresses(read.dest_offsets, read.lengths, into)
                elements, requests = len(source), runs(source)
                whole += chunk.numel * itemsize
                touched.setdefault((index.fqn, index.offset, itemsize), set()).update(source)
                if runs(dest) > 1:
                    cost["peak_buffer"] = max(cost["peak_buffer"], elements * itemsize)
            cost["nbytes"] += elements * itemsize
            cost["requests"] += requests
            cost["elements"] += elements
            if saved is not None:
                writer = writer_by_hand(saved, index)
                cost["peers"].add(writer)
                file = files.setdefault(writer, {"nbytes": 0, "requests": 0, "readers": set()})
                file["nbytes"] += elements * itemsize
                file["requests"] += requests
                file["readers"].add(rank)
    unique = sum(len(found) * itemsize for (_, _, itemsize), found in touched.items())
    return ranks, files, unique, whole


def assert_counted(report, ranks, files, unique, whole):
    for cost, expected in zip(report.ranks, ranks, strict=True):
        for field in ("nbytes", "requests", "elements", "peak_buffer"):
            assert getattr(cost, field) == expected[field], field
        assert cost.peers == (None if report.files is None else len(expected["peers"]))
    if report.files is not None:
        for cost in report.files:
            expected = files.get(cost.file, {"nbytes": 0, "requests": 0, "readers": ()})
            assert (cost.nbytes, cost.requests) == (expected["nbytes"], expected["requests"])
            assert cost.readers == len(expected["readers"])
        assert set(files) <= {cost.file for cost in report.files}
    totals = report.totals
    assert (totals.unique, totals.whole_chunks) == (unique, whole)
    assert totals.nbytes == totals.needed == sum(r["nbytes"] for r in ranks)
    assert totals.requests == sum(r["requests"] for r in ranks)


# What a load costs


@given(worlds())
def test_figures_of_a_load_are_those_counted_element_by_element(world):
    saved, metadata, wanted = world
    sizes = [
        {i.source: i.tensor_data.chunk.sizes for i in p.items if i.tensor_data} for p in wanted
    ]
    loads = [load_plan(metadata, plan) for plan in wanted]
    by_hand = count_by_hand(metadata, loads, lambda rank, index: sizes[rank][index], saved)
    assert_counted(explain(metadata, loads, writers=saved), *by_hand)
    assert_counted(explain(metadata, loads), *by_hand)


@given(windows())
def test_a_byte_that_several_reads_share_in_part_is_unique_once(world):
    metadata, wanted = world
    loads = [LoadPlan(resolve_overlaps(metadata, {"w": boxes})) for boxes in wanted]
    sizes = [{box.offsets: box.sizes for box in boxes} for boxes in wanted]
    by_hand = count_by_hand(metadata, loads, lambda rank, index: sizes[rank][index.offset])
    assert_counted(explain(metadata, loads), *by_hand)


@given(shapes(max_side=4).flatmap(lambda s: st.tuples(st.just(s), chunks(s, allow_empty=True))))
def test_runs_are_stretches_of_byte_addresses(given_):
    shape, box = given_
    lengths, extents = (np.array([v], np.int64).reshape(1, len(shape)) for v in (box.sizes, shape))
    expected = runs(box_addresses(box.offsets, box.sizes, shape)) if box.numel else 0
    assert count_runs(lengths, extents).tolist() == [expected]


def test_a_load_plan_without_hints_costs_the_same():
    sd = {"w": TensorSpec((6, 4), "float32", [Shard(0)])}
    saved, metadata = global_plan(world_plans(sd, Mesh(dp=3)))
    loads = [load_plan(metadata, plan) for plan in world_plans(sd, Mesh(dp=2))]
    bare = [LoadPlan([attrs.evolve(r, storage_index=MetadataIndex("w", r.storage_index.offset))
                      for r in load.items]) for load in loads]  # fmt: skip
    a, b = (explain(metadata, plans, writers=saved) for plans in (loads, bare))
    assert (a.ranks, a.files, a.totals) == (b.ranks, b.files, b.totals)


def test_an_empty_saved_chunk_does_not_hide_the_real_one_at_its_offset():
    pieces = [Chunk((0,), (0,)), Chunk((0,), (4,))]
    metadata = Metadata({"w": TensorMetadata(TensorProperties(), (4,), pieces)})
    load = LoadPlan([attrs.evolve(r, storage_index=MetadataIndex("w", (0,)))
                     for r in resolve_overlaps(metadata, {"w": [Chunk((1,), (2,))]})])  # fmt: skip
    assert explain(metadata, [load]).totals.whole_chunks == 16


def test_plans_that_do_not_fit_the_metadata_are_refused_by_name():
    plan = local_plan({"w": TensorSpec((4,)), "step": 7})
    _, metadata = global_plan([plan])
    load = load_plan(metadata, plan)
    with pytest.raises(NotFoundError, match="`w` is not in the checkpoint"):
        explain(Metadata({"step": BytesMetadata()}), [load])
    halves = [Chunk((1,), (3,)), Chunk((0,), (1,))]
    other = {"w": TensorMetadata(TensorProperties(), (4,), halves[:1]), "step": BytesMetadata()}
    with pytest.raises(NotFoundError, match=r"read by rank 0, has no saved chunk at \(0,\)"):
        explain(Metadata(other), [load])
    with pytest.raises(PlanError, match="read as a tensor by rank 0"):
        explain(Metadata({"w": BytesMetadata(), "step": BytesMetadata()}), [load])
    with pytest.raises(TypeError, match=r"\['LoadPlan', 'SavePlan'\]"):
        explain(metadata, [plan, load])


def test_no_ranks_and_empty_plans_cost_nothing():
    metadata = Metadata({})
    assert explain(metadata, []).totals.slowest is None
    assert explain(metadata, [LoadPlan([])]).totals.amplification == 1.0
    assert explain(metadata, [SavePlan([])]).totals.imbalance == 1.0
    assert "0 ranks" in repr(explain(metadata, []))


# What a save costs


@given(save_plans())
def test_figures_of_a_save_are_those_of_its_items(plans):
    saved, metadata = global_plan(plans)
    for written in (saved, plans):
        report = explain(metadata, written)
        for cost, file, plan in zip(report.ranks, report.files, written, strict=True):
            items = [i for i in plan.items if i.tensor_data is None or i.nbytes]
            assert cost.nbytes == file.nbytes == sum(i.nbytes for i in items)
            assert cost.requests == file.requests == len(items)
            assert (cost.peers, file.readers, cost.peak_buffer) == (None, 0, 0)
        assert report.totals.unique == sum(plan.nbytes for plan in saved)
    assert explain(metadata, saved).totals.amplification == 1.0


def test_replicas_that_would_be_written_twice_are_warned_about():
    plan = local_plan({"w": TensorSpec((1024,))})
    _, metadata = global_plan([plan, plan])
    assert any(
        "4.0 KiB would be written more than once" in w
        for w in explain(metadata, [plan] * 2).warnings
    )


def test_a_chunk_that_is_not_contiguous_in_its_shard_is_staged():
    plan = local_plan({"w": TensorSpec((4, 4))})
    halves = [attrs.evolve(plan.items[0], index=MetadataIndex("w"), tensor_data=attrs.evolve(
        plan.items[0].tensor_data, chunk=Chunk((0, at), (4, 2)))) for at in (0, 2)]  # fmt: skip
    saved, metadata = global_plan([SavePlan(halves)])
    assert explain(metadata, saved).ranks[0].peak_buffer == 32


# What a reshard costs, without plans


@given(placed_worlds())
def test_a_world_costs_what_the_load_plans_of_its_ranks_cost(worlds):
    saved, metadata, _, wanted = worlds
    loads = [load_plan(metadata, plan) for plan in wanted]
    for writers in (saved, None):
        lazy = explain(metadata, wanted, writers=writers)
        eager = explain(metadata, loads, writers=writers)
        assert (lazy.kind, eager.kind) == ("reshard", "load")
        assert lazy.ranks == eager.ranks
        assert lazy.files == eager.files
        assert lazy.totals == eager.totals


@given(placed_worlds())
def test_small_blocks_give_the_same_sums(worlds):
    from shardplan.planning.reports import reshard

    saved, metadata, _, wanted = worlds
    expected = explain(metadata, wanted, writers=saved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard, "_BLOCK", 2)
        patch.setattr(reshard, "_alike", lambda tiling, boxes, _: (np.arange(len(boxes)),) * 2)
        assert explain(metadata, wanted, writers=saved) == expected


@given(placed_worlds())
def test_counting_one_of_many_boxes_that_look_alike_gives_the_same_sums(worlds):
    from shardplan.planning.reports import reshard

    saved, metadata, _, wanted = worlds
    expected = explain(metadata, wanted, writers=saved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard, "_BLOCK", 0)  # boxes are grouped however few there are
        assert explain(metadata, wanted, writers=saved) == expected


def test_rows_read_as_columns_by_twelve_thousand_ranks_are_not_looked_at_one_by_one():
    rows, columns = (TensorSpec((16384, 36864), "bfloat16", [Shard(axis)]) for axis in (0, 1))
    saved = world_plans({"w": rows}, Mesh(dp=16_384))
    metadata = world_metadata(saved)
    wanted = world_plans({"w": columns}, Mesh(dp=12_288))  # three columns each
    report = explain(metadata, wanted, writers=writers_of(saved, metadata))
    one = RankCost(7, 98_304, 16_384, 49_152, 16_384, 0, 0, 0, report.ranks[7].seconds)
    assert report.ranks[7] == one
    assert set(report.ranks.nbytes.tolist()) == {98_304}
    assert report.files[7] == FileCost(7, 73_728, 12_288, 12_288)
    assert report.totals.whole_chunk_amplification == 12_288


def test_a_cast_is_staged_where_the_plans_show_it():
    mesh = Mesh(dp=2)
    metadata = world_metadata(world_plans({"w": TensorSpec((4, 4), "float32", [Shard(0)])}, mesh))
    wanted = world_plans({"w": TensorSpec((4, 4), "bfloat16", [Shard(0)])}, mesh)
    assert [cost.peak_buffer for cost in explain(metadata, wanted).ranks] == [32, 32]


def test_a_world_that_the_checkpoint_cannot_fill_is_refused_with_every_reason():
    mesh = Mesh(dp=2)
    saved = {"a": TensorSpec((4,)), "b": TensorSpec((4,)), "c": 1, "d": TensorSpec((4,))}
    metadata = world_metadata(world_plans(saved, mesh))
    wanted = {"a": TensorSpec((5,)), "bb": TensorSpec((4,)), "c": TensorSpec((4,)), "d": 1}
    with pytest.raises(PlanError) as error:
        explain(metadata, world_plans(wanted, mesh))
    assert [(i.kind, i.fqn) for i in error.value.issues] == [
        ("shape", "a"), ("missing", "bb"), ("type", "c"), ("type", "d")
    ]  # fmt: skip
    holes = {"a": TensorMetadata(TensorProperties(), (4,), [Chunk((0,), (3,))])}
    with pytest.raises(PlanError, match="rows 3 to 4 uncovered"):
        explain(Metadata(holes), world_plans({"a": TensorSpec((4,))}, mesh))


@pytest.mark.slow
def test_405_billion_parameters_are_explained_without_making_plans():
    from shardplan.planning.mesh import LLAMA_TP, adam, fsdp_tp, llama3_405b

    params = llama3_405b()
    before, after = Mesh(dp=2048, tp=8), Mesh(dp=1536, tp=8)
    saved = world_plans(adam(fsdp_tp(params, before, LLAMA_TP)), before)
    wanted = world_plans(adam(fsdp_tp(params, after, LLAMA_TP)), after)
    metadata = world_metadata(saved)
    report = explain(metadata, wanted, writers=writers_of(saved, metadata))
    assert (len(report.ranks), len(report.files)) == (12_288, 16_384)
    assert report.totals.unique == sum(spec.nbytes for spec in wanted.specs.values())
    elements = [int(layout.sizes.prod(axis=1).sum()) for layout in wanted.layouts]
    held = ((spec.dtype, elements[wanted.layout_of[name]]) for name, spec in wanted.specs.items())
    assert report.totals.nbytes == sum(itemsize(dtype) * count for dtype, count in held)
    assert int(report.files.nbytes.sum()) == report.totals.nbytes
    one = explain(metadata, [load_plan(metadata, wanted[5000])]).ranks[0]
    same = ("nbytes", "requests", "elements", "peak_buffer")
    assert all(getattr(report.ranks[5000], f) == getattr(one, f) for f in same)


# Who wrote what


@given(save_plans())
def test_writers_name_the_rank_whose_plan_holds_the_chunk(plans):
    saved, metadata = global_plan(plans)
    writers = writers_of(saved, metadata)
    listed = {item.index: rank for rank, plan in enumerate(saved) for item in plan.items
              if item.tensor_data is None or item.nbytes or 0 in item.tensor_data.size}  # fmt: skip
    assert dict(writers) == listed == writers
    assert len(writers) == len(listed)
    bare = [
        SavePlan([attrs.evolve(i, index=MetadataIndex(i.index.fqn)) for i in p.items])
        for p in saved
    ]
    assert writers_of(bare, metadata) == writers
    assert hash(writers_of(bare, metadata)) == hash(writers)
    assert MetadataIndex("no such name") not in writers


@given(placed_worlds())
def test_writers_of_a_world_are_the_lowest_ranks_that_hold_a_chunk(worlds):
    _, _, world, _ = worlds
    saved, metadata = global_plan(world, [dedup_replicas(prefer="lowest_rank")])
    assert (
        writers_of(world, metadata)
        == writers_of(saved, metadata)
        == writers_of(list(world), metadata)
    )


def test_equal_columns_of_writers_are_held_once():
    sd = {f"layer.{i}": TensorSpec((8,), "float32", [Shard(0)]) for i in range(50)}
    assert len(writers_of(*global_plan(world_plans(sd, Mesh(dp=4)))).columns) == 1


def test_unwritten_chunks_and_unlisted_writes_are_reported():
    sd = {"w": TensorSpec((4,), "float32", [Shard(0)])}
    saved, metadata = global_plan(world_plans(sd, Mesh(dp=2)))
    with pytest.raises(PlanError, match="no plan writes some chunks of `w`"):
        writers_of(saved[:1], metadata)
    with pytest.raises(NotFoundError, match=r"`w` has no saved chunk at \(2,\)"):
        writers_of(saved, global_plan([local_plan({"w": TensorSpec((4,))})])[1])
    with pytest.raises(NotFoundError, match="`w` is not in the checkpoint"):
        writers_of(saved, Metadata({}))


# Sharing reads


@given(worlds())
def test_shared_reads_need_the_same_bytes_and_send_what_they_do_not_read(world):
    saved, metadata, wanted = world
    loads = tuple(load_plan(metadata, plan) for plan in wanted)
    alone = explain(metadata, loads, writers=saved)
    shared = share_reads(metadata, min_bytes=1)(loads)
    report = explain(metadata, shared, writers=saved)
    sent = [0] * len(loads)
    received = [0] * len(loads)
    for rank, plan in enumerate(shared):
        for transfer in plan.transfers:
            if transfer.target == rank and transfer.read.type is LoadItemType.TENSOR:
                entry = metadata.entry(transfer.read.storage_index.fqn)
                nbytes = math.prod(transfer.read.lengths) * entry.properties.itemsize
                sent[transfer.source] += nbytes
                received[rank] += nbytes
    assert ([c.sent for c in report.ranks], [c.received for c in report.ranks]) == (sent, received)
    assert report.totals.sent == sum(sent)
    assert report.totals.needed == alone.totals.nbytes
    assert report.totals.unique == report.totals.nbytes == alone.totals.unique


@given(worlds())
def test_the_matrix_counts_what_is_read_for_others_too(world):
    saved, metadata, wanted = world
    loads = tuple(load_plan(metadata, plan) for plan in wanted)
    shared = read_on(0)(loads) if loads else loads
    report = explain(metadata, shared, writers=saved)
    matrix = traffic_matrix(shared, saved)
    assert matrix.sum(axis=0).tolist() == [cost.nbytes for cost in report.ranks]
    nbytes = {cost.file: cost.nbytes for cost in report.files}
    assert matrix.sum(axis=1).tolist() == [nbytes.get(rank, 0) for rank in range(len(saved))]


# Times and warnings


def test_time_follows_the_stated_model():
    plan = local_plan({"w": TensorSpec((1000,), "int8")})
    _, metadata = global_plan([plan])
    loads = [load_plan(metadata, plan)] * 4
    model = CostModel(
        storage_bandwidth=100, storage_total=1e9, request_latency=3, parallel_requests=2
    )
    report = explain(metadata, loads, model=model)
    assert [cost.seconds for cost in report.ranks] == [1000 / 100 + 3] * 4  # one round
    assert report.totals.seconds == 13
    narrow = explain(metadata, loads, model=attrs.evolve(model, storage_total=200))
    assert narrow.totals.seconds == 4000 / 200
    with pytest.raises(ValueError, match="'storage_total' must be > 0"):
        CostModel(storage_total=0)


def reshard(shape, before, after, dtype="int8"):
    """Explain how a tensor goes from one mesh and placement to another."""
    (mesh, placement), (other, wanted) = before, after
    saved, metadata = global_plan(world_plans({"w": TensorSpec(shape, dtype, placement)}, mesh))
    return explain(
        metadata, world_plans({"w": TensorSpec(shape, dtype, wanted)}, other), writers=saved
    )


ONE, TWO, EIGHT = Mesh(dp=1), Mesh(dp=2), Mesh(dp=8)
ROWS, COLUMNS, ALL = [Shard(0)], [Shard(1)], [Replicate()]


@pytest.mark.parametrize(
    ("shape", "before", "after", "text"),
    [
        ((9,), (ONE, ROWS), (EIGHT, ALL), "A byte is read 8.0 times on average"),
        ((9,), (ONE, ROWS), (EIGHT, ALL), "The file of rank 0 is read by all 8 ranks"),
        ((16,), (TWO, ROWS), (EIGHT, ALL), "The files of ranks 0, 1 are read by all 8 ranks"),
        ((3,), (ONE, ROWS), (TWO, ROWS), "Rank 0 reads 2 B, 1.33 times the mean"),
        ((2000, 2), (ONE, ROWS), (TWO, COLUMNS), "rank 0: 2,000 of 1 B each"),
    ],
)
def test_what_is_worth_a_second_look_is_said(shape, before, after, text):
    assert any(text in warning for warning in reshard(shape, before, after).warnings)


def test_what_is_fine_is_not_warned_about():
    assert reshard((16,), (ONE, ROWS), (TWO, ROWS)).warnings == ()


# How it looks


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


HOSTILE = "<script>alert('&\"')</script>\n\x1b[31m\ud800"


def hostile_values():
    plan = local_plan({HOSTILE: TensorSpec((4,)), "w": TensorSpec((4,))})
    saved, metadata = global_plan([plan])
    report = explain(metadata, [load_plan(metadata, plan)], writers=saved)
    return [
        why(report, HOSTILE, (1,)),
        plan_diff(plan, SavePlan([])),
        plan_diff(metadata, Metadata({})),
    ]


@pytest.mark.parametrize("value", hostile_values(), ids=lambda value: type(value).__name__)
def test_hostile_names_stay_text(value):
    html = value._repr_html_()
    parsed = Tags()
    parsed.feed(html)
    assert {tag for tag, _ in parsed.tags} <= {
        "div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "caption", "ul", "li"
    }  # fmt: skip
    assert "<script>alert('&\"')</script>\\n\\x1b[31m\\ud800" in "".join(parsed.text)
    html.encode()
    repr(value).encode()
    assert "\x1b" not in repr(value)


def test_html_is_self_contained_and_sets_no_colour():
    report = reshard((9, 4), (Mesh(dp=3), [Shard(0)]), (Mesh(dp=2), [Shard(1)]))
    parsed = Tags()
    parsed.feed(report._repr_html_())
    assert all(set(attributes) <= {"style"} for _, attributes in parsed.tags)
    assert not any(
        "url(" in a.get("style", "") or "#" in a.get("style", "") for _, a in parsed.tags
    )
    assert "Reshard: 2 ranks read 36 B in" in parsed.text[0]


def test_a_thousand_ranks_print_as_a_page():
    report = reshard((4096, 4), (Mesh(dp=1024), [Shard(0)]), (Mesh(dp=512), [Shard(0)]))
    assert len(repr(report).splitlines()) < 45
    assert "The 6 slowest and 3 fastest of 512 ranks:" in repr(report)
    assert len(report._repr_html_()) < 20_000


def test_what_is_not_known_is_said():
    plan = local_plan({"w": TensorSpec((4,))})
    _, metadata = global_plan([plan])
    report = explain(metadata, [load_plan(metadata, plan)])
    assert report.files is None
    assert report.ranks[0].peers is None
    assert "pass writers= to see files and writers" in repr(report)
    assert "writer unknown" in repr(why(report, "w", (0,)))


# Why


def expected_reads(loads, fqn, element):
    """Give who reads an element and how, by walking every element of every read."""
    for rank, load in enumerate(loads):
        for read in load.items:
            if read.storage_index.fqn != fqn or read.type is LoadItemType.BYTE_IO:
                continue
            for step in itertools.product(*map(range, read.lengths)):
                source = tuple(a + s for a, s in zip(read.storage_offsets, step, strict=True))
                place = tuple(a + s for a, s in zip(read.storage_index.offset, source, strict=True))
                dest = tuple(a + s for a, s in zip(read.dest_offsets, step, strict=True))
                if place == element:
                    yield rank, read, source, dest


def assert_explained(found, metadata, saved, loads):
    entry = metadata.entry(found.fqn)
    (chunk,) = [c for c in entry.chunks if found.element in itertools.product(
        *(range(o, e) for o, e in zip(c.offsets, c.ends, strict=True)))]  # fmt: skip
    inside = [i - o for i, o in zip(found.element, chunk.offsets, strict=True)]
    assert found.chunk == chunk
    assert found.byte_offset == address(inside, chunk.sizes) * entry.properties.itemsize
    assert found.writers == (writer_by_hand(saved, MetadataIndex(found.fqn, chunk.offsets)),)
    got = [(r.rank, r.read, r.storage_offsets, r.dest_offsets) for r in found.reads]
    assert got == list(expected_reads(loads, found.fqn, found.element))
    assert f"`{found.fqn}`" in repr(found)


def elements_of(metadata):
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorMetadata):
            for element in itertools.product(*map(range, entry.size)):
                yield name, element


@given(worlds())
def test_why_finds_every_element_of_a_load(world):
    saved, metadata, wanted = world
    loads = [load_plan(metadata, plan) for plan in wanted]
    report = explain(metadata, loads, writers=saved)
    for name, element in elements_of(metadata):
        assert_explained(why(report, name, element), metadata, saved, loads)


@given(placed_worlds())
def test_why_finds_every_element_of_a_world(worlds):
    saved, metadata, _, wanted = worlds
    report = explain(metadata, wanted, writers=saved)
    loads = [load_plan(metadata, plan) for plan in wanted]
    for name, element in elements_of(metadata):
        assert_explained(why(report, name, element), metadata, saved, loads)
    found = why(report, "step")
    items = [[r for r in load.items if r.storage_index.fqn == "step"] for load in loads]
    assert [[r.read] for r in found.reads] == items


@given(worlds())
def test_why_names_the_ranks_that_write_an_element(world):
    _, metadata, plans = world
    report = explain(metadata, plans)
    for name, element in elements_of(metadata):
        holders = [
            rank for rank, plan in enumerate(plans) for item in plan.items
            if item.index.fqn == name and all(
                o <= i < e for i, o, e in zip(element, item.tensor_data.chunk.offsets,
                                              item.tensor_data.chunk.ends, strict=True))
        ]  # fmt: skip
        assert list(why(report, name, element).writers) == holders
        assert why(report, name, element).reads == ()


def test_why_names_the_rank_that_passes_an_element_on():
    plan = local_plan({"w": TensorSpec((4,)), "step": 7})
    saved, metadata = global_plan([plan])
    loads = share_reads(metadata, min_bytes=1)((load_plan(metadata, plan),) * 2)
    report = explain(metadata, loads, writers=saved)
    for fqn, element in (("w", (2,)), ("step", ())):
        reads = why(report, fqn, element).reads
        assert [read.rank for read in reads] == [0, 1]
        assert sorted(read.via for read in reads if read.via is not None) in ([0], [1])


def test_why_refuses_what_is_not_there():
    plan = local_plan({"w": TensorSpec((4, 2)), "step": 7})
    _, metadata = global_plan([plan])
    report = explain(metadata, [load_plan(metadata, plan)])
    with pytest.raises(NotFoundError, match="`v` is not in the checkpoint"):
        why(report, "v", (0,))
    for element in ((0,), (4, 0), (0, -1), (0, 0, 0)):
        with pytest.raises(IndexError, match=r"shape \[4, 2\]"):
            why(report, "w", element)
    with pytest.raises(IndexError, match="`step` is a non-tensor value"):
        why(report, "step", (0,))
    holes = Metadata({"w": TensorMetadata(TensorProperties(), (4, 2), [Chunk((0, 0), (3, 2))])})
    with pytest.raises(NotFoundError, match=r"no saved chunk of `w` holds element \[3, 0\]"):
        why(explain(holes, [LoadPlan([])]), "w", (3, 0))


# What differs


@given(worlds(), worlds())
def test_a_diff_is_empty_just_if_the_sides_are_equal_and_reverses(one, other):
    (saved, metadata, wanted), (saved2, metadata2, wanted2) = one, other
    loads, loads2 = (
        tuple(load_plan(m, p) for p in w) for m, w in ((metadata, wanted), (metadata2, wanted2))
    )
    pairs = [(saved, saved2), (wanted, wanted2), (loads, loads2), (metadata, metadata2)]
    for a, b in [*pairs, (saved[0], saved2[0]), (loads[0], loads2[0])]:
        assert not plan_diff(a, a)
        assert plan_diff(a, a) == PlanDiff()
        assert bool(plan_diff(a, b)) == (a != b)
        assert plan_diff(b, a) == plan_diff(a, b).reverse()
        assert plan_diff(a, b)._repr_html_().startswith("<div")


@given(save_plans(), save_plans())
def test_a_diff_leads_from_one_side_to_the_other(a, b):
    a, b = a[0], b[0]
    diff = plan_diff(a, b)
    items = {item.index: item for item in a.items}
    for gone in diff.removed:
        assert items.pop(MetadataIndex(gone.fqn, gone.offset)) == gone.before
    for changed in diff.changed:
        if changed.part == "items":
            assert items[MetadataIndex(changed.fqn, changed.offset)] == changed.before
            items[MetadataIndex(changed.fqn, changed.offset)] = changed.after
    for new in diff.added:
        assert MetadataIndex(new.fqn, new.offset) not in items
        items[MetadataIndex(new.fqn, new.offset)] = new.after
    assert items == {item.index: item for item in b.items}


def test_fields_ranks_and_order_are_differences_too():
    plan = local_plan({"a": TensorSpec((4,)), "b": TensorSpec((4,))})
    assert [d.part for d in plan_diff(plan, attrs.evolve(plan, planner_data=1)).changed] == [
        "planner_data"
    ]
    turned = attrs.evolve(plan, items=plan.items[::-1])
    assert [d.part for d in plan_diff(plan, turned).changed] == ["order"]
    assert [(d.rank, d.part) for d in plan_diff([plan], [plan, plan]).added] == [(1, "plan")]
    _, metadata = global_plan([plan])
    assert [d.part for d in plan_diff(metadata, attrs.evolve(metadata, version="2")).changed] == [
        "version"
    ]
    assert "No difference" in repr(plan_diff(plan, plan))
    loads = (load_plan(metadata, plan),) * 3
    shared = share_reads(metadata, min_bytes=1)(loads)
    assert {d.part for d in plan_diff(loads, shared).added} == {"transfers"}
    assert {d.part for d in plan_diff(loads, shared).removed} == {"items"}


def test_sides_that_differ_only_in_what_the_short_form_leaves_out_print_differently():
    a, b = (global_plan([local_plan({"w": np.zeros(2, np.float32)})])[1] for _ in range(2))
    entry = attrs.evolve(b.entry("w"), properties=TensorProperties(requires_grad=True))
    assert "requires_grad=True" in repr(plan_diff(a, Metadata({"w": entry})))


def test_sides_of_different_kinds_are_refused():
    plan = local_plan({"w": TensorSpec((4,))})
    _, metadata = global_plan([plan])
    with pytest.raises(TypeError, match="metadata can only be compared with metadata"):
        plan_diff(plan, metadata)
    with pytest.raises(TypeError, match="a SavePlan with a LoadPlan"):
        plan_diff(plan, load_plan(metadata, plan))


def test_large_replicas_count_for_the_ranks_that_write_their_parts():
    specs = {"w": TensorSpec((2048, 4096), "float32", [Replicate()]), "b": TensorSpec((4,))}
    world = world_plans({**specs, "step": 7}, Mesh(dp=4))
    metadata = world_metadata(world)
    assert len(metadata.entry("w").chunks) > 1
    found, expected = writers_of(world, metadata), writers_of(*global_plan(world))
    parts = [index for index in found if index.fqn == "w"]
    assert {index: found[index] for index in parts} == {index: expected[index] for index in parts}
    (whole,) = global_plan(world, [dedup_replicas()])[1].entry("b").chunks
    assert found[MetadataIndex("b", whole.offsets)] == 0
    assert explain(metadata, world, writers=found).files is not None
