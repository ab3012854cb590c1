"""Pictures say what the plans say: read back as XML, and measured."""

import math
import re
from functools import cache
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    Mesh,
    Metadata,
    NotFoundError,
    PlanError,
    Replicate,
    Shard,
    StridedShard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    global_plan,
    load_plan,
    local_plan,
    world_metadata,
    world_plans,
)
from shardplan.planning.draw import (
    Picture,
    draw_bytes,
    draw_reshard,
    draw_tiling,
    draw_traffic,
    traffic_matrix,
)
from shardplan.planning.draw import svg as drawing
from shardplan.planning.reports.origins import writers_of
from shardplan.planning.testing import strategies

SVG = "{http://www.w3.org/2000/svg}"
LIMIT = 300_000  # bytes of any picture
HOSTILE = '</title></svg><script>alert("x")</script>&amp;\x00\x1b\u202e\ud800\'"'


def plans_of(shape, mesh, placements, name="w", dtype="float32"):
    sd = {name: TensorSpec(shape, dtype, placements)}
    return [local_plan(sd, mesh=mesh, rank=rank) for rank in range(len(mesh))]


def metadata_of(shape, chunks, name="w"):
    return Metadata({name: TensorMetadata(TensorProperties(), shape, chunks)})


def parsed(picture):
    return ElementTree.fromstring(str(picture))


def boxes(picture, kind):
    """Return x, y, width, height and fill of the rects of one kind."""
    found = []
    for rect in parsed(picture).iter(f"{SVG}rect"):
        if rect.get("class") == kind:
            place = [float(rect.get(k)) for k in ("x", "y", "width", "height")]
            found.append((*place, rect.get("fill")))
    return found


def words(picture):
    return [text.text for text in parsed(picture).iter(f"{SVG}text")]


def tips(picture, kind="cell"):
    rects = [r for r in parsed(picture).iter(f"{SVG}rect") if r.get("class") == kind]
    return [rect.findtext(f"{SVG}title") for rect in rects]


def overlaps(a, b, slack=0.05):
    return all(a[i] + slack < b[i] + b[i + 2] and b[i] + slack < a[i] + a[i + 2] for i in (0, 1))


ROWS = plans_of((8, 4), Mesh(dp=4), [Shard(0)])
WRITTEN, SAVED = global_plan(plans_of((96, 40), Mesh(dp=8), [Shard(0)]))
THREE = plans_of((96, 40), Mesh(dp=3), [Shard(0)])
MANY = Mesh(dp=1024)
WRITTEN_BY_MANY, SAVED_BY_MANY = global_plan(plans_of((16384, 8192), MANY, [Shard(0)]))


def big_matrix(count):
    row, column = np.indices((count, count))
    return (row * 7919 + column * 104729) % 977 * (abs(row - column) < 40) * 2**20


PICTURES = {
    "rows on 4": lambda: draw_tiling(ROWS, "w"),
    "grid": lambda: draw_tiling(plans_of((8, 12), Mesh(dp=2, tp=2), [Shard(0), Shard(1)]), "w"),
    "one axis": lambda: draw_tiling(plans_of((100,), Mesh(dp=8), [Shard(0)]), "w"),
    "no axis": lambda: draw_tiling(plans_of((), Mesh(dp=2), [Replicate()]), "w"),
    "empty": lambda: draw_tiling(plans_of((0, 4), Mesh(dp=2), [Replicate()]), "w"),
    "replicated": lambda: draw_tiling(plans_of((64, 64), Mesh(dp=4), [Replicate()]), "w"),
    "strided": lambda: draw_tiling(
        plans_of((13, 8), Mesh(dp=3, tp=2), [StridedShard(0, 2), Shard(0)]), "w"
    ),
    "three axes": lambda: draw_tiling(
        plans_of((8, 6, 4), Mesh(a=2, b=2, c=2), [Shard(0), Shard(1), Shard(2)]), "w"
    ),
    "long and thin": lambda: draw_tiling(plans_of((10**9, 2), Mesh(dp=16), [Shard(0)]), "w"),
    "short and wide": lambda: draw_tiling(plans_of((2, 10**9), Mesh(dp=16), [Shard(1)]), "w"),
    "metadata": lambda: draw_tiling(SAVED, "w"),
    "hostile name": lambda: draw_tiling(
        plans_of((4, 4), Mesh(dp=2), [Shard(0)], name=HOSTILE), HOSTILE
    ),
    "long name": lambda: draw_tiling(
        plans_of((4, 4), Mesh(dp=2), [Shard(0)], name="layer." * 999), "layer." * 999
    ),
    "grid on 1,024": lambda: draw_tiling(
        plans_of((16384, 8192), Mesh(dp=32, tp=32), [Shard(0), Shard(1)]), "w"
    ),
    "rows on 1,024": lambda: draw_tiling(WRITTEN_BY_MANY, "w"),
    "one axis on 1,024": lambda: draw_tiling(plans_of((2**20,), MANY, [Shard(0)]), "w"),
    "reshard": lambda: draw_reshard(SAVED, THREE, "w", WRITTEN),
    "reshard, nobody known": lambda: draw_reshard(SAVED, THREE, "w"),
    "reshard to columns": lambda: draw_reshard(
        SAVED, plans_of((96, 40), Mesh(tp=4), [Shard(1)]), "w", WRITTEN
    ),
    "reshard of one axis": lambda: draw_reshard(
        metadata_of((6,), [Chunk((0,), (3,)), Chunk((3,), (3,))]),
        [Chunk((i,), (2,)) for i in (0, 2, 4)],
        "w",
    ),
    "reshard on 1,024": lambda: draw_reshard(
        SAVED_BY_MANY, plans_of((16384, 8192), Mesh(tp=384), [Shard(0)]), "w", WRITTEN_BY_MANY
    ),
    "reshard to columns on 1,024": lambda: draw_reshard(
        SAVED_BY_MANY, plans_of((16384, 8192), MANY, [Shard(1)]), "w", WRITTEN_BY_MANY
    ),
    "traffic": lambda: draw_traffic([[8, 4, 0], [0, 4, 8]]),
    "traffic of files": lambda: draw_traffic(
        [[1, 2], [3, 4]], source="file", source_names=[HOSTILE, "a" * 999], title=HOSTILE
    ),
    "no traffic": lambda: draw_traffic([[0, 0]]),
    "traffic on 1,024": lambda: draw_traffic(big_matrix(1024)),
    "bytes": lambda: draw_bytes([3 * 2**30, 2**31, 2**30, 0]),
    "bytes of one": lambda: draw_bytes([7]),
    "no bytes": lambda: draw_bytes([0, 0]),
    "bytes on 1,024": lambda: draw_bytes([(rank * 7919) % 977 for rank in range(1024)]),
}
every_picture = pytest.mark.parametrize("name", PICTURES)


@cache
def shown(name):
    return PICTURES[name]()


# What holds for every picture


@every_picture
def test_a_picture_is_a_scalable_and_accessible_document(name):
    root = parsed(shown(name))
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root[0].tag == f"{SVG}title"
    assert root[0].text
    assert root[1].tag == f"{SVG}desc"
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"


@every_picture
def test_everything_that_is_drawn_lies_on_the_paper(name):
    root = parsed(shown(name))
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
        assert min(x, y, w, h) >= 0
        assert x + w <= width + 0.01
        assert y + h <= height + 0.01
    for line in root.iter(f"{SVG}line"):
        assert all(0 <= float(line.get(k)) <= width for k in ("x1", "x2"))
        assert all(0 <= float(line.get(k)) <= height for k in ("y1", "y2"))


@every_picture
def test_no_words_are_cut_off_at_the_edge_of_the_paper(name):
    root = parsed(shown(name))
    width = float(root.get("width"))
    for text in root.iter(f"{SVG}text"):
        if text.get("transform"):
            continue  # turned: runs along a side
        size = float(text.get("font-size", 11))
        length = drawing.width_of(text.text, size)
        x, anchor = float(text.get("x")), text.get("text-anchor", "start")
        left = x - length * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        assert left >= 0, text.text
        assert left + length <= width, text.text
        assert 0 < float(text.get("y")) < float(root.get("height"))


@every_picture
def test_the_same_input_gives_the_same_bytes_and_few_of_them(name):
    once, twice = PICTURES[name](), shown(name)
    assert str(once) == str(twice)
    assert once == twice
    assert hash(once) == hash(twice)
    assert len(str(once).encode()) < LIMIT


@every_picture
def test_a_picture_needs_nothing_from_elsewhere_and_runs_nothing(name):
    root = parsed(shown(name))
    allowed = {"svg", "title", "desc", "rect", "text", "line"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    for element in root.iter():
        assert not [key for key in element.attrib if key.startswith("on") or "href" in key]
        assert "id" not in element.attrib, "ids of two pictures on a page would collide"
        assert "url(" not in " ".join(element.attrib.values())


@every_picture
def test_numbers_are_rounded(name):
    assert not re.search(r"\d\.\d{3}", re.sub(r">[^<]*<", "><", str(shown(name))))


@every_picture
def test_a_picture_brings_its_own_paper(name):
    root = parsed(shown(name))
    paper = next(root.iter(f"{SVG}rect"))
    assert paper.get("fill") == "#ffffff"
    assert float(paper.get("width")) >= float(root.get("width")) - 1
    assert float(paper.get("height")) >= float(root.get("height")) - 1


@every_picture
def test_labels_on_colours_can_be_read(name):
    """Each label in a box has at least the contrast that WCAG AA asks for."""
    root = list(parsed(shown(name)))
    kinds = ("cell", "piece", "field")
    drawn = []
    for element in root:
        if element.tag == f"{SVG}rect" and element.get("class") in kinds:
            drawn.append(element)
        if element.tag != f"{SVG}text" or element.get("fill") not in ("#000000", "#ffffff"):
            continue
        x, y = float(element.get("x")), float(element.get("y")) - 4
        under = [r for r in drawn if holds(r, x, y)]
        assert under, element.text
        assert contrast(under[-1].get("fill"), element.get("fill")) >= 4.5


def holds(rect, x, y):
    left, top, width, height = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
    return left <= x <= left + width and top - 1 <= y <= top + height + 1


def contrast(a, b):
    low, high = sorted((drawing.luminance(a), drawing.luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_jupyter_is_given_the_svg():
    picture = draw_tiling(ROWS, "w")
    assert isinstance(picture, Picture)
    assert picture._repr_svg_() == str(picture) == picture.svg
    assert repr(picture) == "Picture: w. Colour and number: the rank that holds each chunk."


def test_hostile_names_are_text_and_nothing_else():
    picture = draw_tiling(plans_of((4, 4), Mesh(dp=2), [Shard(0)], name=HOSTILE), HOSTILE)
    root = parsed(picture)
    assert root[0].text.startswith('</title></svg><script>alert("x")</script>&amp;')
    assert "<script" not in str(picture)
    assert not re.search("[\x00-\x1f\u202e\ud800]", str(picture))


# Tilings


def test_each_chunk_is_one_box_labelled_with_its_rank():
    picture = draw_tiling(ROWS, "w")
    assert len(boxes(picture, "cell")) == 4
    assert {"rank 0", "rank 1", "rank 2", "rank 3"} <= set(words(picture))
    assert tips(picture)[1] == "rank 1: [2:4, 0:4]"


def test_cuts_are_written_along_both_axes():
    picture = draw_tiling(plans_of((9, 10), Mesh(dp=3, tp=2), [Shard(0), Shard(1)]), "w")
    assert {"0", "3", "6", "9", "5", "10", "axis 0", "axis 1"} <= set(words(picture))


def test_replicas_are_one_box_that_names_all_its_holders():
    picture = draw_tiling(plans_of((8, 4), Mesh(dp=2, fs=4), [Replicate(), Shard(0)]), "w")
    assert len(boxes(picture, "cell")) == 4
    assert {"ranks 0, 4", "ranks 1, 5", "ranks 2, 6", "ranks 3, 7"} <= set(words(picture))
    assert "copy" in picture.caption
    assert "copy" not in draw_tiling(ROWS, "w").caption


def test_a_rank_has_one_colour_wherever_it_holds_something():
    picture = draw_tiling(plans_of((13, 8), Mesh(dp=3, tp=2), [StridedShard(0, 2), Shard(0)]), "w")
    fills = dict(zip(tips(picture), [box[4] for box in boxes(picture, "cell")], strict=True))
    assert fills["rank 4: [6:7, 0:8]"] == fills["rank 4: [11:12, 0:8]"]
    assert len(set(fills.values())) == 6


def test_the_plans_of_a_world_are_drawn_like_a_list_of_them():
    spec = TensorSpec((13, 8), "float32", [StridedShard(0, 2), Shard(0)])
    world = world_plans({"w": spec}, Mesh(dp=3, tp=2))
    assert draw_tiling(world, "w") == draw_tiling(list(world), "w")
    assert draw_tiling(world, "w") == draw_tiling(
        plans_of((13, 8), world.mesh, spec.placements), "w"
    )


def test_metadata_is_coloured_by_chunk():
    picture = draw_tiling(SAVED, "w")
    assert {f"chunk {i}" for i in range(8)} <= set(words(picture))
    assert len({box[4] for box in boxes(picture, "cell")}) == 8
    assert "metadata" in picture.caption


placements = st.sampled_from([Shard(0), Shard(1), Replicate()])


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(placements, placements),
)
def test_areas_are_proportional_to_elements_and_boxes_do_not_overlap(shape, mesh, placed):
    plans = plans_of(shape, Mesh(dp=mesh[0], tp=mesh[1]), placed)
    chunks = {(i.tensor_data.chunk) for plan in plans for i in plan.items}
    found = [box[:4] for box in boxes(draw_tiling(plans, "w"), "cell")]
    assert len(found) == len(chunks)
    total = sum(w * h for _, _, w, h in found)
    share = sorted(w * h / total for _, _, w, h in found)
    expected = sorted(chunk.numel / math.prod(shape) for chunk in chunks)
    assert share == pytest.approx(expected, abs=2e-3)
    assert not [1 for i, a in enumerate(found) for b in found[:i] if overlaps(a, b)]


def test_both_axes_have_one_scale_unless_the_caption_says_otherwise():
    picture = draw_tiling(plans_of((60, 20), Mesh(dp=2), [Shard(0)]), "w")
    (_, _, width, height, _), _ = boxes(picture, "cell")
    assert height / 30 == pytest.approx(width / 20, rel=1e-3)
    assert "scale" not in picture.caption
    thin = draw_tiling(plans_of((10**6, 20), Mesh(dp=2), [Shard(0)]), "w")
    assert boxes(thin, "cell")[0][2] >= 60
    assert "The axes do not have the same scale." in thin.caption


def test_tensors_of_many_axes_show_the_first_two_that_are_cut():
    mesh = Mesh(a=2, b=2)
    picture = draw_tiling(plans_of((5, 8, 3, 6), mesh, [Shard(1), Shard(3)]), "w")
    assert "Axes 1 and 3 of 4 are shown; no other axis is cut." in picture.caption
    assert {"axis 1", "axis 3"} <= set(words(picture))
    assert len(boxes(picture, "cell")) == 4


def test_chunks_behind_each_other_are_one_box_and_the_caption_says_so():
    mesh = Mesh(a=2, b=2, c=2)
    picture = draw_tiling(plans_of((8, 8, 8), mesh, [Shard(0), Shard(1), Shard(2)]), "w")
    assert len(boxes(picture, "cell")) == 4
    assert "chunks cut along axis 2 lie behind each other" in picture.caption
    assert tips(picture)[0] == "ranks 0–1: 2 chunks, [0:4, 0:4]"


def test_tensors_without_axes_and_without_elements_are_drawn():
    assert "ranks 0–1" in words(shown("no axis"))
    assert "The tensor is empty." in shown("empty").caption


@st.composite
def loose_chunks(draw, shape):
    """Return chunks of a shape in any arrangement: gaps and overlaps included."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        low = [draw(st.integers(0, n)) for n in shape]
        sizes = [draw(st.integers(0, n - o)) for n, o in zip(shape, low, strict=True)]
        found.append(Chunk(low, sizes))
    return found


shapes = st.lists(st.integers(0, 9) | st.sampled_from([97, 10**6, 2**40]), max_size=4)


@given(st.data(), shapes)
def test_any_chunks_at_all_can_be_drawn(data, shape):
    saved, wanted = data.draw(loose_chunks(shape)), data.draw(loose_chunks(shape))
    metadata = metadata_of(shape, saved)
    for picture in (draw_tiling(metadata, "w"), draw_reshard(metadata, wanted, "w")):
        root = parsed(picture)
        width, height = float(root.get("width")), float(root.get("height"))
        for x, y, w, h, _ in boxes(picture, "cell") + boxes(picture, "piece"):
            assert min(x, y, w, h) >= 0
            assert x + w <= width
            assert y + h <= height


def test_the_caption_names_gaps_and_overlaps():
    holed = metadata_of((8, 4), [Chunk((0, 0), (3, 4)), Chunk((4, 0), (4, 4))])
    assert "leave gaps or overlap" in draw_tiling(holed, "w").caption
    assert "leave gaps or overlap" not in draw_tiling(ROWS, "w").caption


@pytest.mark.parametrize(
    ("shape", "mesh", "placed"),
    [
        ((16384, 8192), Mesh(dp=1024), [Shard(0)]),
        ((16384, 8192), Mesh(dp=1024), [Shard(1)]),
        ((16384, 8192), Mesh(dp=32, tp=32), [Shard(0), Shard(1)]),
        ((2**20,), Mesh(dp=1024), [Shard(0)]),
        ((13_000, 7), Mesh(dp=512, tp=2), [StridedShard(0, 2), Shard(0)]),
    ],
)
def test_a_thousand_ranks_are_drawn_in_blocks_and_the_caption_says_of_how_many(shape, mesh, placed):
    picture = draw_tiling(plans_of(shape, mesh, placed), "w")
    cells = boxes(picture, "cell")
    assert 4 <= len(cells) <= 400
    count = int(re.search(r"each cell up to ([\d,]+) chunks", picture.caption)[1].replace(",", ""))
    assert count * len(cells) >= 1000
    assert all(width >= 12 and height >= 8 for _, _, width, height, _ in cells)
    assert [w for w in words(picture) if re.search(r"\d(–| … )\d", w)]


def test_cells_too_small_for_a_label_get_a_legend():
    picture = draw_tiling(plans_of((6400,), Mesh(dp=40), [Shard(0)]), "w")
    assert len(boxes(picture, "cell")) == 40
    assert {"rank 0", "rank 39"} <= set(words(picture))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(NotFoundError, match=r"`weigth` is in none of the 4 plans; nearest: weight"):
        draw_tiling(plans_of((8,), Mesh(dp=4), [Shard(0)], name="weight"), "weigth")
    with pytest.raises(NotFoundError, match="nearest: w"):
        draw_tiling(SAVED, "ww")


def test_a_non_tensor_value_is_refused():
    with pytest.raises(ValueError, match="non-tensor value"):
        draw_tiling(Metadata({"step": BytesMetadata()}), "step")
    with pytest.raises(ValueError, match="non-tensor value"):
        draw_tiling(local_plan({"step": 7}), "step")


def test_ranks_that_disagree_are_not_drawn():
    plans = [local_plan({"w": TensorSpec((n,))}) for n in (4, 5)]
    with pytest.raises(PlanError, match="not the same tensor"):
        draw_tiling(plans, "w")


# Resharding


def test_every_piece_is_drawn_once_between_its_saved_and_its_wanted_chunk():
    picture = draw_reshard(SAVED, THREE, "w", WRITTEN)
    assert len(boxes(picture, "cell")) == 8 + 3
    assert len(boxes(picture, "piece")) == len(boxes(picture, "field")) == 10
    assert "8 saved chunks fill 3 wanted chunks in 10 pieces." in picture.caption
    assert tips(picture, "piece")[2:4] == [
        "rank 2 → rank 0: [24:32, 0:40]",
        "rank 2 → rank 1: [32:36, 0:40]",
    ]


def test_a_piece_has_the_colour_of_its_writer_and_its_field_that_of_its_reader():
    picture = draw_reshard(SAVED, THREE, "w", WRITTEN)
    fills = {tip: box[4] for tip, box in zip(tips(picture), boxes(picture, "cell"), strict=True)}
    colour_of = {tip.split(":")[0]: fill for tip, fill in fills.items()}
    pairs = zip(
        tips(picture, "piece"), boxes(picture, "piece"), boxes(picture, "field"), strict=True
    )
    for tip, piece, field in pairs:
        origin, goal = tip.split(":")[0].split(" → ")
        assert (piece[4], field[4]) == (colour_of[origin], colour_of[goal])


def test_pieces_lie_where_they_lie_in_both_tilings():
    picture = draw_reshard(SAVED, plans_of((96, 40), Mesh(tp=4), [Shard(1)]), "w", WRITTEN)
    cells, found = boxes(picture, "cell"), boxes(picture, "piece")
    assert len(found) == 8 * 4
    rows = {(y, h) for _, y, _, h, _ in cells[:8]}
    assert {(y, h) for _, y, _, h, _ in found} == rows
    assert len({w for _, _, w, _, _ in found}) <= 2  # equal but for rounding


def test_without_writers_saved_chunks_are_numbered_and_grey():
    picture = draw_reshard(SAVED, THREE, "w")
    assert {f"chunk {i}" for i in range(8)} <= set(words(picture))
    assert {box[4] for box in boxes(picture, "piece")} == set(drawing.GREYS)
    assert "the saved chunk it comes from" in picture.caption


def test_writers_may_come_as_plans_or_as_a_table():
    table = writers_of(WRITTEN, SAVED)
    assert draw_reshard(SAVED, THREE, "w", table) == draw_reshard(SAVED, THREE, "w", WRITTEN)


def test_one_axis_is_drawn_as_bars_below_each_other():
    picture = shown("reshard of one axis")
    saved, wanted = boxes(picture, "cell")[:2], boxes(picture, "cell")[2:]
    found = boxes(picture, "piece")
    assert len(found) == 4
    assert max(y for _, y, *_ in saved) < found[0][1] < wanted[0][1]
    assert sorted({x for x, *_ in found}) == sorted({x for x, *_ in [*saved, *wanted]})


def test_another_shape_is_drawn_to_the_same_scale():
    wanted = plans_of((128, 40), Mesh(dp=2), [Shard(0)])
    picture = draw_reshard(SAVED, wanted, "w", WRITTEN)
    cells = boxes(picture, "cell")
    assert cells[0][3] / 12 == pytest.approx(cells[8][3] / 64, rel=1e-2)
    assert "→ [128, 40] in 2 chunks" in parsed(picture)[1].text


def test_another_number_of_axes_is_refused():
    with pytest.raises(ValueError, match="another number of axes"):
        draw_reshard(SAVED, plans_of((96,), Mesh(dp=2), [Shard(0)]), "w")
    with pytest.raises(ValueError, match="do not fit"):
        draw_reshard(SAVED, [Chunk((0,), (4,))], "w")


def test_load_plans_in_place_of_save_plans_are_refused():
    loads = [load_plan(SAVED, plan) for plan in THREE]
    for draw in (lambda: draw_reshard(SAVED, loads, "w"), lambda: draw_tiling(loads, "w")):
        with pytest.raises(TypeError, match=r"expected the save plans .* not \['LoadPlan'\]"):
            draw()


def test_resharding_a_thousand_ranks_is_drawn_in_blocks():
    picture = shown("reshard on 1,024")
    assert "in 1,382 pieces" in picture.caption
    assert "Neighbours are drawn together" in picture.caption
    assert 4 <= len(boxes(picture, "piece")) <= 400


# Traffic and bytes


def brute_traffic(loads, writers, itemsize=4):
    owner = {}
    for rank, plan in enumerate(writers):
        for item in plan.items:
            owner.setdefault((item.index.fqn, item.index.offset), rank)
    matrix = np.zeros((len(writers), len(loads)), int)
    for reader, plan in enumerate(loads):
        for read in plan.items:
            writer = owner[read.storage_index.fqn, read.storage_index.offset]
            matrix[writer, reader] += math.prod(read.lengths) * itemsize
    return matrix


@given(st.integers(1, 5), st.integers(1, 5), st.permutations([Shard(0), Shard(1), Replicate()]))
def test_the_matrix_counts_what_each_rank_reads_of_each_writer(before, after, placed):
    def world(count, some):
        sd = {"a": TensorSpec((7, 5), "float32", some[:1]), "b": TensorSpec((6, 9), "float32")}
        return [local_plan({**sd, "n": 1}, mesh=Mesh(x=count), rank=r) for r in range(count)]

    writers, metadata = global_plan(world(before, placed))
    loads = [load_plan(metadata, plan) for plan in world(after, placed[1:])]
    expected = brute_traffic(loads, writers)
    assert np.array_equal(traffic_matrix(loads, writers), expected)
    table = traffic_matrix(loads, writers_of(writers, metadata))
    assert np.array_equal(table, expected[: len(table)])
    assert not expected[len(table) :].any()


def test_the_heat_map_has_a_cell_for_each_pair_and_writes_bytes_in_it():
    loads = [load_plan(SAVED, plan) for plan in THREE]
    picture = draw_traffic(loads, WRITTEN)
    assert len(boxes(picture, "cell")) == 8 * 3
    assert words(picture).count("640 B") == 2
    assert "15.0 KiB in all; 10 of 24 pairs share bytes" in picture.caption
    assert {"from rank", "to rank", "none"} <= set(words(picture))


def test_more_bytes_are_darker():
    fills = [box[4] for box in boxes(draw_traffic([[1, 2, 5, 9]]), "cell")]
    lights = [drawing.luminance(fill) for fill in fills]
    assert lights == sorted(lights, reverse=True)


def test_the_heat_map_of_a_thousand_ranks_adds_up_blocks():
    matrix = big_matrix(1024)
    picture = draw_traffic(matrix)
    assert len(boxes(picture, "cell")) == 32 * 32
    assert "Each cell adds up 32 ranks × 32 ranks." in picture.caption
    corner = drawing.byte_tick(int(matrix[:32, :32].sum()))
    assert tips(picture)[0] == f"rank 0–31 → rank 0–31: {corner}"


def test_files_are_named():
    names = ["a.safetensors", "b.safetensors"]
    picture = draw_traffic([[1, 2], [3, 4]], source="file", source_names=names)
    assert {*names, "from file"} <= set(words(picture))
    assert "b.safetensors → rank 1 the most (4 B)" in picture.caption


@pytest.mark.parametrize("matrix", [[], [1, 2], [[1], [-1]], np.zeros((0, 3))])
def test_anything_but_a_matrix_of_bytes_is_refused(matrix):
    with pytest.raises(ValueError, match="one row a source and one column a reader"):
        draw_traffic(matrix)


def test_load_plans_without_writers_are_refused():
    loads = [load_plan(SAVED, plan) for plan in THREE]
    with pytest.raises(ValueError, match="pass writers="):
        draw_traffic(loads)
    with pytest.raises(ValueError, match="nobody wrote a chunk that is read: `w`, read by rank 1"):
        traffic_matrix(loads, WRITTEN[:3])


def test_names_that_are_not_as_many_as_rows_are_refused():
    with pytest.raises(ValueError, match="1 names do not fit 2 rows"):
        draw_traffic([[1], [2]], source_names=["a"])


def test_bars_are_as_high_as_their_bytes():
    values = [4, 3, 8, 0]
    picture = draw_bytes(values)
    heights = [height for _, _, _, height, _ in boxes(picture, "bar")]
    assert heights == pytest.approx([v / 8 * max(heights) for v in values], abs=0.02)
    assert {"3 B", "8 B", "mean 4 B", "rank"} <= set(words(picture))
    assert "max/mean 2.13" in picture.caption


def test_the_largest_bar_stands_out_unless_all_are_equal():
    assert len({box[4] for box in boxes(draw_bytes([1, 2, 1]), "bar")}) == 2
    assert len({box[4] for box in boxes(draw_bytes([2, 2, 2]), "bar")}) == 1


def test_the_largest_bar_s_colour_is_explained():
    assert "(rank 1, orange)" in draw_bytes([1, 2, 1]).caption
    assert "orange" not in draw_bytes([2, 2, 2]).caption


def test_the_mean_does_not_strike_through_a_bar_s_label():
    picture = draw_bytes([100, 95, 105, 100])
    (mean,) = (float(e.get("y1")) for e in parsed(picture).iter() if e.get("stroke-dasharray"))
    labels = [float(e.get("y")) for e in parsed(picture).iter() if e.get("font-size") == "10"]
    assert len(labels) == 4
    assert min(labels) > max(y + height for _, y, _, height, _ in boxes(picture, "bar")) > mean


def test_the_ranks_below_bars_are_evenly_spaced():
    names = [int(word) for word in words(draw_bytes(range(190))) if word.isdecimal()]
    assert len({b - a for a, b in pairwise(names)}) == 1


def test_plans_are_taken_for_their_bytes():
    assert draw_bytes(WRITTEN) == draw_bytes([plan.nbytes for plan in WRITTEN])


def test_bars_of_a_thousand_ranks_are_means_of_blocks():
    picture = draw_bytes(range(1024))
    heights = [height for _, _, _, height, _ in boxes(picture, "bar")]
    assert len(heights) == 64
    assert heights[-1] / heights[0] == pytest.approx(1015.5 / 7.5, rel=0.02)
    assert "Each bar: the mean of 16 ranks" in picture.caption
    assert "max/mean 2.00" in picture.caption


@pytest.mark.parametrize("values", [[], [1, -1]])
def test_no_bars_and_negative_bars_are_refused(values):
    with pytest.raises(ValueError, match="at least one number of bytes"):
        draw_bytes(values)


# The parts


def test_every_colour_of_palette_and_ramp_carries_a_label():
    colours = [*drawing.PALETTE, *drawing.GREYS, *(drawing.ramp(i / 200) for i in range(201))]
    assert min(contrast(colour, drawing.ink_on(colour)) for colour in colours) >= 4.5


def test_the_palette_is_that_of_okabe_and_ito():
    known = {"#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"}
    assert set(drawing.PALETTE[:7]) == known


@given(st.text(), st.floats(0, 400))
def test_shortened_words_fit_and_are_printable(name, width):
    short = drawing.elide(name, width, 11)
    assert short == "…" or drawing.width_of(short, 11) <= width
    assert short.isprintable()
    ElementTree.fromstring(drawing.tag("title", name))


@given(st.integers(1, 5000), st.integers(1, 64))
def test_blocks_leave_no_more_than_asked_for(count, most):
    size = drawing.block(count, most)
    assert -(-count // size) <= most


@given(st.lists(st.floats(0, 1000), max_size=40), st.floats(1, 50))
def test_thinned_places_keep_their_distance_and_both_ends(places, gap):
    places = sorted(places)
    kept = [places[i] for i in drawing.thin(places, gap)]
    assert kept[:1] + kept[-1:] == places[:1] + places[-1:]
    assert all(b - a >= gap for a, b in pairwise(kept[:-1]))
    assert len(kept) < 3 or kept[-1] - kept[-2] >= gap


@st.composite
def reshards(draw):
    """Generate a world that saves two tensors, and another that wants them."""
    tensors = {name: draw(strategies.shapes(min_side=1)) for name in ("a", "b")}
    kinds = {name: draw(st.sampled_from(["float32", "int8"])) for name in tensors}
    worlds = []
    for _ in range(2):
        mesh = draw(strategies.meshes())
        specs = {
            name: TensorSpec(shape, kinds[name], draw(strategies.placements(mesh, shape)))
            for name, shape in tensors.items()
        }
        worlds.append(world_plans({**specs, "step": 7}, mesh))
    return worlds


@given(reshards())
def test_a_worlds_traffic_is_that_of_its_load_plans(worlds):
    saved, wanted = worlds
    writes, metadata = global_plan(saved)
    writers = writers_of(writes, metadata)
    loads = [load_plan(metadata, plan) for plan in wanted]
    assert np.array_equal(traffic_matrix(wanted, writers), traffic_matrix(loads, writers))
    assert draw_traffic(wanted, writers) == draw_traffic(loads, writers)


def large(before, after):
    spec = TensorSpec((16384, 53248), "bfloat16", [Shard(0), Shard(1)])
    saved, wanted = (world_plans({"w": spec}, mesh) for mesh in (before, after))
    metadata = world_metadata(saved)
    return metadata, wanted, writers_of(saved, metadata)


def test_the_traffic_of_a_large_world_is_added_up_in_blocks():
    _, wanted, writers = large(Mesh(dp=256, tp=8), Mesh(dp=192, tp=8))
    picture = draw_traffic(wanted, writers)
    dense = draw_traffic(traffic_matrix(wanted, writers))
    assert boxes(picture, "cell") == boxes(dense, "cell")
    assert tips(picture) == tips(dense)
    assert picture.caption == (
        "1.6 GiB in all, ranks 0–63 → ranks 0–47 the most (52.0 MiB). "
        "Each cell adds up 64 ranks × 48 ranks."
    )


def test_a_worlds_traffic_needs_writers_that_wrote_it():
    _, wanted, writers = large(Mesh(dp=4, tp=2), Mesh(dp=3, tp=2))
    with pytest.raises(TypeError, match="pass writers_of"):
        traffic_matrix(wanted, list(wanted))
    with pytest.raises(TypeError, match="pass writers_of"):
        draw_traffic(wanted)
    other = world_plans({"v": TensorSpec((4,))}, Mesh(dp=2))
    with pytest.raises(PlanError, match="`v` is not in the checkpoint"):
        traffic_matrix(other, writers)


def test_columns_with_room_for_a_number_are_not_drawn_together():
    _, wanted, _ = large(Mesh(dp=128, tp=8), Mesh(dp=192, tp=8))
    cells = boxes(draw_tiling(wanted, "w"), "cell")
    assert len({x for x, *_ in cells}) == 8
    labels = set(words(draw_tiling(wanted, "w")))
    for rank in range(8):  # a column's first cell holds every eighth rank, 0 to 56 for the first
        assert labels & {f"{rank} … {rank + 56}", f"{rank}, {rank + 8}, …, {rank + 56}"}


def test_pieces_of_many_ranks_say_which_come_first():
    metadata, wanted, writers = large(Mesh(dp=2048, tp=8), Mesh(dp=1536, tp=8))
    picture = draw_reshard(metadata, wanted, "w", writers=writers)
    labels = [w for w in words(picture) if re.fullmatch(r"\d+…", w)]
    assert len(labels) == 2 * len(boxes(picture, "piece")) > 0


def test_writers_are_found_whatever_the_order_of_the_chunks():
    metadata, wanted, writers = large(Mesh(dp=4, tp=2), Mesh(dp=3, tp=2))
    (entry,) = metadata.state_dict_metadata.values()
    order = [*entry.chunks[4:], *entry.chunks[:4]]
    shuffled = Metadata({"w": TensorMetadata(entry.properties, entry.size, order)})
    pictures = {draw_reshard(m, wanted, "w", writers=writers) for m in (metadata, shuffled)}
    assert len(pictures) == 1


def test_the_ends_of_an_axis_are_labelled_even_if_no_chunk_reaches_them():
    holed = metadata_of((9, 7), [Chunk((2, 1), (5, 4))])
    assert {"0", "1", "2", "5", "7", "9"} <= set(words(draw_tiling(holed, "w")))


def test_a_card_is_as_wide_as_its_subtitle():
    _, wanted, _ = large(Mesh(dp=2048, tp=8), Mesh(dp=1536, tp=8))
    about = words(draw_tiling(wanted, "w"))[1]
    assert about == "bfloat16 [16384, 53248] · 1.6 GiB · 11,920 chunks on 11,920 ranks"
