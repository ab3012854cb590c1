"""What a load asks for and does not get is refused, or reported: nothing is left out in silence."""

import itertools

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    BytesMetadata,
    Chunk,
    Mesh,
    Metadata,
    MetadataIndex,
    PlanError,
    Shard,
    TensorMetadata,
    TensorProperties,
    TensorSpec,
    cast,
    chain,
    concat,
    dedup_replicas,
    drop,
    global_plan,
    load_plan,
    loads_into,
    local_plan,
    on_ranks,
    pad,
    permute,
    rename,
    reshape,
    resolve_overlaps,
    trim,
    world_plans,
)
from shardplan.planning.testing.strategies import (
    assert_read_once,
    cells,
    chunks,
    save_plans,
    shapes,
    tilings,
    trace_reads,
)


def saved(**tensors):
    """Metadata of whole tensors, or of values that are none."""
    return global_plan([local_plan(tensors)])[1]


def refused(metadata, plan, **options):
    with pytest.raises(PlanError) as caught:
        load_plan(metadata, plan, **options)
    return caught.value


def entry(size, boxes, dtype="float32"):
    return TensorMetadata(TensorProperties(dtype), size, boxes)


# Coverage


@given(shapes(min_side=1, max_side=5), st.data())
def test_a_half_covered_target_is_refused_with_exactly_what_is_missing(shape, data):
    tiling = list(data.draw(tilings(shape)))
    lost = data.draw(st.sets(st.sampled_from(range(len(tiling))), min_size=1))
    kept = [chunk for number, chunk in enumerate(tiling) if number not in lost]
    metadata = Metadata({"w": entry(shape, kept)})
    wanted = data.draw(chunks(shape))
    missing = set(cells(wanted)) - {e for chunk in kept for e in cells(chunk)}
    if not missing:
        assert_read_once(metadata, {"w": [wanted]}, resolve_overlaps(metadata, {"w": [wanted]}))
        return
    with pytest.raises(PlanError) as caught:
        resolve_overlaps(metadata, {"w": [wanted]})
    issues = caught.value.issues
    assert {(i.kind, i.fqn) for i in issues} == {("uncovered", "w")}
    told = {e for i in issues for e in cells(Chunk(*i.region))}
    assert told == missing if len(issues) < 8 else told <= missing


def test_a_gap_is_told_in_words_with_the_remedy():
    metadata = Metadata({"w": entry((8, 2), [Chunk((0, 0), (4, 2))])})
    error = refused(metadata, local_plan({"w": TensorSpec((8, 2))}))
    (issue,) = error.issues
    assert issue.region == ((4, 0), (4, 2))
    assert "saved chunks of `w` leave rows 4 to 8 uncovered" in str(error)
    assert "strict=False" in str(error)


def test_gaps_that_are_accepted_are_reported_and_the_rest_is_read():
    metadata = Metadata({"w": entry((16,), [Chunk((0,), (4,)), Chunk((12,), (4,))])})
    target = local_plan({"w": TensorSpec((16,))})
    plan = load_plan(metadata, target, strict=False)
    (issue,) = plan.report.mismatched
    assert (issue.kind, issue.fqn, issue.region) == ("uncovered", "w", ((4,), (8,)))
    trace = trace_reads(metadata, target, plan)[MetadataIndex("w", (0,))]
    assert [len(trace[(i,)]) for i in range(16)] == [1] * 4 + [0] * 8 + [1] * 4


def test_saved_chunks_that_collide_are_refused_rather_than_read_twice():
    metadata = Metadata({"w": entry((4,), [Chunk((0,), (3,)), Chunk((2,), (2,))])})
    (issue,) = refused(metadata, local_plan({"w": TensorSpec((4,))})).issues
    assert (issue.kind, issue.fqn, issue.region) == ("overlap", "w", ((2,), (1,)))


# Strictness


WANTED = local_plan({"model": {"w": TensorSpec((2,)), "b": TensorSpec((3,))}, "step": 1})


def test_missing_names_are_refused_with_the_nearest_ones():
    metadata = saved(**{"model.ww": TensorSpec((2,)), "model.b": TensorSpec((3,)), "step": 1})
    error = refused(metadata, WANTED)
    assert [(i.kind, i.fqn) for i in error.issues] == [("missing", "model.w")]
    assert "`model.w` is not in the checkpoint; nearest: model.ww" in str(error)


def test_what_need_not_be_filled_is_reported_and_left_alone():
    metadata = saved(**{"model.b": TensorSpec((4,)), "other": 1})
    plan = load_plan(metadata, WANTED, strict=False)
    assert plan.report.missing == ("model.w", "step")
    assert plan.report.unexpected == ("other",)
    assert [(i.kind, i.fqn) for i in plan.report.mismatched] == [("shape", "model.b")]
    assert len(plan.items) == 0


@pytest.mark.parametrize(
    ("strict", "fatal"),
    [
        (True, {"model.w", "model.b", "step"}),
        (["model.*"], {"model.w", "model.b"}),
        (["*.b", "st?p"], {"model.b", "step"}),
        ("model.*", {"model.w", "model.b"}),
        ([], set()),
        (False, set()),
    ],
)
def test_patterns_say_which_names_must_be_filled(strict, fatal):
    metadata = saved(**{"model.b": TensorSpec((3,), "int8")})
    if fatal:
        assert {i.fqn for i in refused(metadata, WANTED, strict=strict).issues} == fatal
    else:
        report = load_plan(metadata, WANTED, strict=strict).report
        assert report.missing == ("model.w", "step")
        assert [i.fqn for i in report.mismatched] == ["model.b"]


def test_a_strict_pattern_that_matches_nothing_is_no_way_to_switch_strictness_off():
    with pytest.raises(PlanError, match=r"strict: 'optim.\*' matches no wanted name"):
        load_plan(saved(step=1), WANTED, strict=["model.*", "optim.*"])


def test_a_state_dict_in_place_of_a_plan_is_told_how_to_become_one():
    with pytest.raises(TypeError, match=r"such as local_plan\(sd\); not a Metadata and a dict"):
        load_plan(saved(step=1), {"step": 1})


def test_names_that_are_not_wanted_are_never_an_error():
    metadata = saved(
        **{"model.w": TensorSpec((2,)), "model.b": TensorSpec((3,)), "step": 1, "x": 2}
    )
    assert load_plan(metadata, WANTED).report.unexpected == ("x",)


@given(save_plans(), st.data())
def test_what_is_there_is_read_whatever_else_is_missing(plans, data):
    _, metadata = global_plan(plans)
    entries = dict(metadata.state_dict_metadata)
    gone = data.draw(st.sets(st.sampled_from(sorted(entries)))) if entries else set()
    rest = Metadata({name: e for name, e in entries.items() if name not in gone})
    for target in plans:
        plan = load_plan(rest, target, strict=False)
        held = {item.index.fqn for item in target.items}
        assert set(plan.report.missing) == gone & held
        kept = attrs.evolve(
            target, items=[item for item in target.items if item.index.fqn not in gone]
        )
        assert_read_once(rest, kept, plan)


# Dtypes, shapes, kinds


def test_another_dtype_is_refused_unless_a_cast_is_asked_for():
    metadata = saved(w=TensorSpec((2,), "float32"))
    target = local_plan({"w": TensorSpec((2,), "bfloat16")})
    error = refused(metadata, target)
    assert [(i.kind, i.fqn) for i in error.issues] == [("dtype", "w")]
    assert "saved as float32 and is wanted as bfloat16" in str(error)
    assert 'dtype="cast"' in str(error)
    plan = load_plan(metadata, target, dtype="cast")
    assert_read_once(metadata, target, plan)
    assert resolve_overlaps(metadata, target) == plan.items


def test_another_shape_is_refused_unless_the_overlap_is_asked_for():
    metadata = saved(w=TensorSpec((6, 2)))
    target = local_plan({"w": TensorSpec((8, 2))})
    error = refused(metadata, target)
    assert [(i.kind, i.fqn) for i in error.issues] == [("shape", "w")]
    assert "saved with shape [6, 2] and is wanted with [8, 2]" in str(error)
    assert 'shape="overlap"' in str(error)
    plan = load_plan(metadata, target, shape="overlap")
    assert [(i.kind, i.fqn) for i in plan.report.mismatched] == [("shape", "w")]


@given(
    st.integers(0, 3).flatmap(lambda n: st.tuples(*[shapes(min_dims=n, max_dims=n)] * 2)), st.data()
)
def test_an_overlap_fills_exactly_the_elements_that_both_shapes_have(pair, data):
    was, now = pair
    _, metadata = global_plan(data.draw(save_plans(tensors={"w": TensorSpec(was)})))
    both = set(itertools.product(*(range(min(a, b)) for a, b in zip(was, now, strict=True))))
    for target in data.draw(save_plans(tensors={"w": TensorSpec(now)})):
        plan = load_plan(metadata, target, shape="overlap")
        for elements in trace_reads(metadata, target, plan).values():
            for element, origins in elements.items():
                assert len(origins) == (element in both)
                if origins:
                    _, number, position = origins[0]
                    start = metadata.state_dict_metadata["w"].chunks[number].offsets
                    assert element == tuple(a + b for a, b in zip(start, position, strict=True))


def test_an_overlap_still_refuses_holes_inside_what_both_have():
    metadata = Metadata({"w": entry((6,), [Chunk((0,), (2,)), Chunk((4,), (2,))])})
    (issue,) = refused(metadata, local_plan({"w": TensorSpec((8,))}), shape="overlap").issues
    assert (issue.kind, issue.region) == ("uncovered", ((2,), (2,)))


@pytest.mark.parametrize(
    ("was", "wanted", "kind", "message"),
    [
        (
            TensorSpec((2,)),
            3,
            "type",
            "saved as a tensor and is wanted as a non-tensor value",
        ),
        (
            3,
            TensorSpec((2,)),
            "type",
            "saved as a non-tensor value and is wanted as a tensor",
        ),
        (TensorSpec((2,)), TensorSpec((2, 1)), "shape", "another number of axes"),
    ],
)
def test_another_kind_of_value_is_refused_whatever_the_policies(was, wanted, kind, message):
    error = refused(saved(w=was), local_plan({"w": wanted}), dtype="cast", shape="overlap")
    assert [(i.kind, i.fqn) for i in error.issues] == [(kind, "w")]
    assert message in str(error)


def test_every_reason_is_told_at_once():
    metadata = Metadata(
        {
            "dtype": entry((2,), [Chunk((0,), (2,))], "int8"),
            "gap": entry((2,), [Chunk((0,), (1,))]),
            "shape": entry((3,), [Chunk((0,), (3,))]),
            "type": BytesMetadata(),
        }
    )
    names = ("dtype", "gap", "missing", "shape", "type")
    error = refused(metadata, local_plan({name: TensorSpec((2,)) for name in names}))
    assert {(i.fqn, i.kind) for i in error.issues} == {
        ("dtype", "dtype"),
        ("gap", "uncovered"),
        ("missing", "missing"),
        ("shape", "shape"),
        ("type", "type"),
    }
    assert all(f"`{name}`" in str(error) for name in names)


def test_a_policy_that_does_not_exist_is_refused():
    for options in ({"dtype": "any"}, {"shape": "any"}):
        with pytest.raises(ValueError, match="any"):
            load_plan(Metadata({}), WANTED, **options)


def test_the_read_of_a_value_is_the_same_beside_any_tensors():
    alone, beside = {"step": 3}, {"step": 3, "w": TensorSpec((2, 2))}
    reads = [load_plan(saved(**sd), local_plan(sd)).items[0] for sd in (alone, beside)]
    assert reads[0] == reads[1]


def test_saved_chunks_that_collide_are_left_alone_even_where_gaps_are_accepted():
    chunks = [Chunk((0,), (4,)), Chunk((2,), (4,))]
    metadata = Metadata({"w": TensorMetadata(TensorProperties(), (6,), chunks)})
    plan = load_plan(metadata, local_plan({"w": TensorSpec((6,))}), strict=False)
    assert len(plan.items) == 0
    assert [issue.kind for issue in plan.report.mismatched] == ["overlap"]


def test_saved_chunks_of_other_axes_than_their_tensor_are_no_answer():
    metadata = Metadata({"w": TensorMetadata(TensorProperties(), (6,), [Chunk((0, 0), (6, 2))])})
    with pytest.raises(PlanError, match="lies outside shape"):
        load_plan(metadata, local_plan({"w": TensorSpec((6,))}))


def test_a_cast_that_loses_a_digit_says_so():
    metadata = saved(n=TensorSpec((2,), "int32"))
    plan = load_plan(metadata, local_plan({"n": TensorSpec((2,), "float32")}), dtype="cast")
    (note,) = plan.report.mismatched
    assert note.message == "`n` is cast from int32 to float32, which cannot hold every value"


def test_a_missing_name_is_told_even_if_nothing_of_it_is_wanted():
    with pytest.raises(PlanError, match="`nope` is not in the checkpoint"):
        resolve_overlaps(saved(step=1), {"nope": []})


@pytest.mark.parametrize("held", [None, {}, 7])
def test_what_is_no_dict_here_and_one_in_the_checkpoint_is_told_with_both_remedies(held):
    saved = {"opt": {"state": {"w": TensorSpec((2,))}, "groups": [1]}}
    _, metadata = global_plan([local_plan(saved)])
    wanted = local_plan({"opt": {"state": held, "groups": [1]}})
    told = r"more below \(opt.state.w, .*nest it alike.*get_state_dict"
    with pytest.raises(PlanError, match=told):
        load_plan(metadata, wanted)


# What passes need of a checkpoint that they are to change


def read_boxes(loads):
    return [
        [(r.storage_index.fqn, r.storage_offsets, r.lengths) for r in load.items] for load in loads
    ]


def test_passes_need_what_they_leave_of_a_checkpoint_as_it_lies_there():
    mesh = Mesh(dp=2)
    specs = {"w": TensorSpec((4, 2), "float32", [Shard(0)]), "b": TensorSpec((2,)), "tmp": None}
    plans = world_plans(specs, mesh)
    _, metadata = global_plan(plans)
    whole = [("b", (0,), (2,)), ("w", (0, 0), (2, 2))]
    for passes in (
        [drop("tmp"), rename({"w": "v"}), cast("float16")],
        [drop("tmp"), permute("w", (1, 0)), dedup_replicas()],
        [drop("tmp"), pad("w", axis=0, to=9)],
    ):
        assert read_boxes(loads_into(passes, plans, metadata)) == [whole, whole]
    rows = [drop("tmp", "b"), trim("w", axis=0, to=3)]
    assert read_boxes(loads_into(rows, plans, metadata)) == [
        [("w", (0, 0), (2, 2))],
        [("w", (0, 0), (1, 2))],
    ]
    one = on_ranks([1], drop("b", "tmp"))
    assert [len(load.items) for load in loads_into(one, plans, metadata)] == [3, 1]


@pytest.mark.parametrize(
    ("saved_shape", "state", "planner"),
    [
        ((2, 6), {"a": (2, 4), "b": (2, 4)}, concat({"a": 4, "b": 4}, into="w", axis=1)),
        ((2, 6), {"a": (2, 4)}, pad("a", to=8, of=4, axis=1)),
        ((5, 4), {"w": (4, 6)}, permute("w", (1, 0))),
        ((3, 5), {"w": (4, 3)}, reshape("w", (2, 6))),
    ],
)
def test_an_overlap_is_refused_where_passes_move_elements(saved_shape, state, planner):
    metadata = saved(w=TensorSpec(saved_shape), other=TensorSpec((2,)))
    specs = {name: TensorSpec(shape) for name, shape in state.items()}
    target = local_plan(specs | {"other": TensorSpec((3,))})
    (plan,) = chain(planner, rename({"a": "w"}, required=False))((target,))
    error = refused(metadata, plan, shape="overlap")
    assert [(i.kind, i.fqn) for i in error.issues] == [("shape", "w")]
    assert "would misplace them" in str(error)
    left = load_plan(metadata, plan, shape="overlap", strict=False)
    assert {read.storage_index.fqn for read in left.items} == {"other"}
    assert [(i.kind, i.fqn) for i in left.report.mismatched] == [("shape", "w"), ("shape", "other")]


def test_an_overlap_is_refused_on_a_rank_that_holds_only_the_first_of_joined_tensors():
    joined = concat({"a": 4, "b": 4}, into="w", axis=1, required=False)
    (plan,) = joined((local_plan({"a": TensorSpec((2, 4))}),))
    error = refused(saved(w=TensorSpec((2, 6))), plan, shape="overlap")
    assert [(i.kind, i.fqn) for i in error.issues] == [("shape", "w")]


def test_an_overlap_goes_through_passes_that_leave_elements_in_place():
    metadata = saved(w=TensorSpec((6, 2)))
    (plan,) = chain(rename({"v": "w"}))((local_plan({"v": TensorSpec((8, 2))}),))
    assert [read.lengths for read in load_plan(metadata, plan, shape="overlap").items] == [(6, 2)]
