"""Passes that change shapes, cell by cell against numpy on whole tensors."""

import itertools
import math
import pickle

import attrs
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardplan.planning import (
    Mesh,
    PlanError,
    Shard,
    TensorSpec,
    cast,
    chain,
    concat,
    dedup_replicas,
    global_plan,
    inverse,
    load_plan,
    local_plan,
    on_ranks,
    pad,
    permute,
    rename,
    reshape,
    select,
    split,
    stack,
    trim,
    unstack,
    where,
    world_pass,
    world_plans,
)
from shardplan.planning.passes.base import Stages, run_pass, scope_of
from shardplan.planning.sources import with_replicas
from shardplan.planning.testing.frames import assert_accounted, filled, written
from shardplan.planning.testing.strategies import meshes, placements, save_plans

# ---- The oracle: whole tensors, and cells that items carry.


def tensors_of(shapes):
    """Number all elements of all tensors, from 1."""
    ends = list(itertools.accumulate((math.prod(s) for s in shapes.values()), initial=1))
    return {
        name: np.arange(low, high).reshape(shape)
        for (name, shape), (low, high) in zip(shapes.items(), itertools.pairwise(ends), strict=True)
    }


def at(box):
    return (*(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True)), ...)


def carried(plans, tensors):
    """Return the checkpoint that items make of tensors; each element comes from one place."""
    saved, seen = {}, {}
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            name = item.index.fqn
            array = saved.setdefault(name, np.full(data.size, -1))
            assert array.shape == data.size, name
            key = name, data.chunk
            if item.fill is not None:
                chunk = np.full(data.chunk.sizes, item.fill)
            else:
                chunk = tensors[item.source.fqn][at(item.source_chunk)]
                if item.axes is not None:
                    chunk = chunk.reshape(item.axes.split).transpose(item.axes.order)
                    chunk = chunk.reshape(data.chunk.sizes)
            assert chunk.shape == data.chunk.sizes
            if key in seen:
                assert (seen[key] == chunk).all()  # a replica
            else:
                assert (array[at(data.chunk)] == -1).all(), f"{name} is written twice"
            seen[key] = chunk
            array[at(data.chunk)] = chunk
    assert all((array >= 0).all() for array in saved.values()), "not all is written"
    return saved


def assert_all_moved(before, after):
    """Each rank moves, or leaves out, each element that it holds, once, from the right shard."""
    for held, plan in zip(before, after, strict=True):
        counts = {}
        for item in held.items:
            if item.tensor_data is not None:
                key = item.source.fqn, item.source.offset
                counts.setdefault(key, np.full(item.tensor_data.size, 1))
                counts[key][at(item.tensor_data.chunk)] -= 1
        for item in [*plan.items, *(plan.left_out or ())]:
            if item.source_chunk is not None:
                counts[item.source.fqn, item.source.offset][at(item.source_chunk)] += 1
        assert all((count == 1).all() for count in counts.values())


def assert_equals(step, plans, tensors, wanted):
    """A pass makes of the plans what numpy makes of whole tensors."""
    after = run_pass(step, plans)
    saved = carried(after, tensors)
    # Tensors without elements may have no items, and then nothing says that they exist.
    assert saved.keys() <= wanted.keys()
    for name, array in wanted.items():
        assert name in saved or not array.size
        if name in saved:
            assert saved[name].shape == array.shape
            assert (saved[name] == array).all()
    assert_all_moved(plans, after)
    if scope_of(step) == "rank":
        for rank, plan in enumerate(plans):
            (alone,) = run_pass(step, (attrs.evolve(plan, rank=rank, world_size=len(plans)),))
            assert alone == after[rank]
            assert alone.left_out == after[rank].left_out
    assert pickle.loads(pickle.dumps(step)) == step
    assert after == run_pass(eval(repr(step)), plans)  # it prints as it was written
    return after


# ---- Worlds: any shapes, meshes and placements; and passes, with what they mean.

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=3).map(tuple)


@st.composite
def worlds(draw, shapes=None, how=None):
    """The plans of a world, and its tensors."""
    if shapes is None:
        names = ["a", "b", "e.0.w", "e.1.w"]
        one, two = draw(SHAPES), draw(SHAPES)
        shapes = dict(zip(names, [one, draw(st.sampled_from([one, two])), two, two], strict=True))
    if draw(st.booleans()):
        plans = draw(save_plans(tensors={n: TensorSpec(s) for n, s in shapes.items()}))
    else:
        mesh = draw(meshes())
        specs = {n: TensorSpec(s, "float32", draw(placements(mesh, s))) for n, s in shapes.items()}
        plans = tuple(world_plans(specs, mesh))
    return plans, tensors_of(shapes)


def axes_of(array):
    return st.integers(-array.ndim, array.ndim - 1)


@st.composite
def cuts(draw, length):
    """Lengths that add up."""
    inner = draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=2))
    edges = [0, *sorted(n for n in inner if n < length), length]
    return [high - low for low, high in itertools.pairwise(edges)]


def sharing(array, axis, tensors):
    """Names of tensors that can be joined with another along an axis."""
    rest = [n for at, n in enumerate(array.shape) if at != axis]
    return [
        name
        for name, other in tensors.items()
        if other.ndim == array.ndim
        and [n for at, n in enumerate(other.shape) if at != axis] == rest
    ]


@st.composite
def steps(draw, tensors, number):
    """A pass that the tensors allow, and the tensors after it."""
    name = draw(st.sampled_from(sorted(tensors)))
    array, rest = tensors[name], {n: t for n, t in tensors.items() if n != name}
    kinds = ["reshape"]
    if array.ndim:
        kinds += ["split", "equal", "unstack", "permute", "pad", "trim", "concat", "known"]
    numbered = [n.removesuffix(".0.w") for n in tensors if n.endswith(".0.w")]
    if numbered:
        kinds += ["stack", "stack"]
    kind = draw(st.sampled_from(kinds))
    axis = draw(axes_of(array)) if array.ndim else 0
    length = array.shape[axis] if array.ndim else 0
    new = f"n{number}"
    if kind in ("split", "equal"):
        lengths = draw(cuts(length)) if kind == "split" else [1] * length
        names = [f"{new}.{at}" for at in range(len(lengths))]
        into = dict(zip(names, lengths, strict=True)) if kind == "split" else names
        parts = np.split(array, np.cumsum(lengths)[:-1], axis)
        return split(name, into, axis, required=False), {
            **rest,
            **dict(zip(names, parts, strict=True)),
        }
    if kind == "unstack":
        count = draw(st.sampled_from([None, length]))
        parts = {f"{new}.{at}.w": np.take(array, at, axis) for at in range(length)}
        return unstack(name, f"{new}.#.w", axis, count=count, required=False), {**rest, **parts}
    if kind == "permute":
        order = tuple(draw(st.permutations(range(array.ndim))))
        return permute(name, order, required=False), {**rest, name: array.transpose(order)}
    if kind == "reshape":
        factors = [2] * [k for k in range(12) if array.size % 2**k == 0][-1]
        odd = array.size >> len(factors)
        factors += [3] * [k for k in range(8) if odd % 3**k == 0][-1]
        shape = merged(draw, [*draw(st.permutations(factors)), array.size // math.prod(factors)])
        of = draw(st.sampled_from([None, array.shape]))
        return reshape(name, shape, of=of, required=False), {**rest, name: array.reshape(shape)}
    if kind == "pad":
        more = draw(st.integers(0, 2))
        widths = [(0, more if at == axis % array.ndim else 0) for at in range(array.ndim)]
        step = pad(name, to=length + more, axis=axis, value=7, of=length, required=False)
        return step, {**rest, name: np.pad(array, widths, constant_values=7)}
    if kind == "trim":
        to = draw(st.integers(1, length))
        return trim(name, to=to, axis=axis, required=False), {
            **rest,
            name: np.take(array, range(to), axis),
        }
    if kind == "stack":
        base = draw(st.sampled_from(numbered))
        names = [n for at in range(99) if (n := f"{base}.{at}.w") in tensors]
        assume(names[-1] == f"{base}.{len(names) - 1}.w")  # without gaps
        assume(len({tensors[n].shape for n in names}) == 1)
        axis = draw(st.integers(-1 - tensors[names[0]].ndim, tensors[names[0]].ndim))
        count = draw(st.sampled_from([None, len(names)]))
        rest = {n: t for n, t in tensors.items() if n not in names}
        joined = np.stack([tensors[n] for n in names], axis)
        return stack(f"{base}.#.w", new, axis, count=count, required=False), {**rest, new: joined}
    names = sharing(array, axis % array.ndim, tensors)
    names = draw(st.permutations(names))[: draw(st.integers(1, len(names)))]
    rest = {n: t for n, t in tensors.items() if n not in names}
    lengths = {n: tensors[n].shape[axis] for n in names}
    joined = np.concatenate([tensors[n] for n in names], axis)
    given = lengths if kind == "known" else list(names)
    return concat(given, new, axis, required=False), {**rest, new: joined}


def merged(draw, sizes):
    shape = []
    for size in sizes:
        if shape and draw(st.booleans()):
            shape[-1] *= size
        else:
            shape.append(size)
    return tuple(shape)


@given(st.data())
@settings(deadline=None)
def test_each_pass_is_the_operation_on_whole_tensors(data):
    plans, tensors = data.draw(worlds())
    step, wanted = data.draw(steps(tensors, 0))
    assert_equals(step, plans, tensors, wanted)


@given(st.data())
@settings(deadline=None)
def test_chains_of_passes_are_chains_of_operations(data):
    plans, tensors = data.draw(worlds())
    wanted, passes = tensors, []
    for number in range(data.draw(st.integers(2, 5))):
        step, wanted = data.draw(steps(wanted, number))
        passes.append(step)
    assert_equals(chain(*passes), plans, tensors, wanted)


def held_values(plan, tensors):
    """Return what a rank's tensors hold after a load; -1 where nothing is read."""
    values = {}
    for items, is_read in ((plan.holds, True), (plan.left_out or (), False)):
        for item in items:
            name, box = item.source.fqn, at(item.source_chunk)
            values.setdefault(name, np.full(tensors[name].shape, -1.0))
            values[name][box] = tensors[name][box] if is_read else -1
    return values


@given(st.data())
@settings(deadline=None)
def test_a_planner_saves_and_loads_between_any_two_worlds(data):
    plans, tensors = data.draw(worlds())
    wanted, passes = tensors, []
    for number in range(data.draw(st.integers(1, 3))):
        step, wanted = data.draw(steps(wanted, number))
        passes.append(step)
    saved, metadata = global_plan(plans, [*passes, dedup_replicas()])
    checkpoint = written(saved, tensors)
    assert {name: array.tolist() for name, array in checkpoint.items()} == {
        name: array.tolist() for name, array in wanted.items()
    }
    shapes = {name: array.shape for name, array in tensors.items()}
    others, _ = data.draw(worlds(shapes))
    after = run_pass(chain(*passes), others)
    assert_accounted(after)
    for before, plan in zip(others, after, strict=True):
        reads = load_plan(metadata, plan, strict=False)
        assert not reads.report.missing
        values = filled(reads, checkpoint, before)
        for name, array in held_values(plan, tensors).items():
            assert (values[name] == array).all()


@world_pass
def others_spare_the_first(plans):
    """Take from the first rank what any other writes too."""

    def same(item):
        return item.index.fqn, item.tensor_data, item.fill

    elsewhere = {same(item) for plan in plans[1:] for item in plan.items}
    rest = [item for item in plans[0].items if same(item) not in elsewhere]
    return attrs.evolve(plans[0], items=rest), *plans[1:]


@given(st.data())
@settings(deadline=None)
def test_a_load_fills_what_a_world_pass_had_others_write(data):
    """Wherever it stands among passes that change shapes, pad and trim."""
    plans, tensors = data.draw(worlds())
    wanted, passes = tensors, []
    for number in range(data.draw(st.integers(0, 3))):
        step, wanted = data.draw(steps(wanted, number))
        passes.append(step)
    passes.insert(data.draw(st.integers(0, len(passes))), others_spare_the_first)
    saved, metadata = global_plan(plans, [*passes, dedup_replicas()])
    checkpoint, stages = written(saved, tensors), Stages.of(passes, load=True)
    entering = run_pass(chain(*stages.own), plans)
    loading = with_replicas(run_pass(chain(*stages.rest), entering), entering)
    for held, plan in zip(plans, loading, strict=True):
        values = filled(load_plan(metadata, plan), checkpoint, held)
        for name, array in held_values(plan, tensors).items():
            assert (values[name] == array).all()


@given(st.data())
@settings(deadline=None)
def test_the_inverse_of_a_pass_leads_back(data):
    plans, tensors = data.draw(worlds())
    before, known = chain(), tensors
    if data.draw(st.booleans()):  # the frames differ already
        before, known = data.draw(steps(tensors, 0))
    step, _ = data.draw(steps(known, 1))
    if step.factory is trim or (step.factory is concat and isinstance(step.args[0], tuple)):
        return  # what it leaves out is lost; the lengths are unknown
    if step.factory is reshape and step.options["of"] is None:
        return
    back = inverse(step)
    if step.options.get("value", 0) == 0 and scope_of(back) == "rank":
        assert inverse(back) == step
    start = run_pass(before, plans)
    there = run_pass(step, start)
    after = assert_equals(chain(before, step, back), plans, tensors, known)
    if len(there) == len(start) and all(
        len(a.items) == len(b.items) for a, b in zip(there, start, strict=True)
    ):  # no box was cut
        ordered = [sorted(p.items, key=repr) for p in after]
        assert ordered == [sorted(p.items, key=repr) for p in start]


# ---- What is written of passes, and what they refuse.


def planned(**shapes):
    return (local_plan({name: TensorSpec(shape) for name, shape in shapes.items()}),)


def refused(step, plans):
    with pytest.raises(PlanError) as error:
        run_pass(step, plans)
    return str(error.value)


def test_passes_print_compare_and_have_inverses():
    parts = {"*.q": 4, "*.k": 1, "*.v": 1}
    text = "split('*.qkv', {'*.q': 4, '*.k': 1, '*.v': 1})"
    assert repr(split("*.qkv", into=parts)) == text
    assert inverse(split("*.qkv", parts, 1)) == concat(parts, "*.qkv", 1)
    assert inverse(concat(parts, "*.qkv", 1)) == split("*.qkv", parts, 1)
    assert inverse(stack("e.#.w", "e.w", count=2)) == unstack("e.w", "e.#.w", count=2)
    assert inverse(unstack("e.w", "e.#.w", 1)) == stack("e.#.w", "e.w", 1)
    assert inverse(permute("w", (2, 0, 1))) == permute("w", (1, 2, 0))
    assert permute("w", (-1, 0, -2)) == permute("w", (2, 0, 1))
    assert inverse(reshape("w", (2, -1), of=(6,))) == reshape("w", (6,), of=(2, 3))
    assert inverse(pad("w", to=8, of=5)) == trim("w", to=5, of=8)
    assert inverse(trim("w", to=5, of=8)) == pad("w", to=8, of=5)
    assert repr(pad("w", to=8, axis=1)) == "pad('w', to=8, axis=1)"
    assert len({split("a", ["b", "c"]), split("a", ["b", "c"]), split("a", ["b", "d"])}) == 2
    for step, hint in [
        (concat(["a", "b"], "c"), "state the length of each part"),
        (reshape("w", (2, 3)), "of="),
        (pad("w", to=3), "of="),
        (trim("w", to=3), "of="),
    ]:
        with pytest.raises(ValueError, match=hint):
            inverse(step)


def test_only_passes_that_need_all_plans_are_world_passes():
    known = concat({"a": 1, "b": 2}, "c"), stack("e.#", "e", count=3)
    assert [scope_of(step) for step in known] == ["rank", "rank"]
    assert scope_of(concat(["a", "b"], "c")) == scope_of(stack("e.#", "e")) == "world"


def test_several_wildcards_are_carried_in_order():
    (plan,) = run_pass(
        stack("layers.#.*.experts.#.*", "*.#.experts.*"),
        planned(**{"layers.3.moe.experts.0.w": (2,), "layers.3.moe.experts.1.w": (2,)}),
    )
    assert {item.index.fqn for item in plan.items} == {"moe.3.experts.w"}


def test_a_number_has_no_leading_zeros():
    names = {"e.00": (2,), "e.0": (2,)}
    (plan,) = run_pass(stack("e.#", "s"), planned(**names))
    assert sorted(item.index.fqn for item in plan.items) == ["e.00", "s"]


def test_experts_on_different_ranks_become_one_tensor():
    plans = tuple(
        local_plan({f"e.{n}.w": TensorSpec((2, 3)) for n in range(2 * r, 2 * r + 2)})
        for r in range(3)
    )
    tensors = tensors_of({f"e.{n}.w": (2, 3) for n in range(6)})
    wanted = {"e.w": np.stack([tensors[f"e.{n}.w"] for n in range(6)])}
    assert_equals(stack("e.#.w", "e.w"), plans, tensors, wanted)
    assert_equals(stack("e.#.w", "e.w", count=6), plans, tensors, wanted)


def test_catalogs_are_edited_once_and_shared():
    specs = {f"{n}.w": TensorSpec((8, 4), "float32", [Shard(0)]) for n in range(3)}
    plans = tuple(world_plans(specs, Mesh(dp=4)))
    for step in (permute("*.w", (1, 0)), split("*.w", ["*.a", "*.b"]), stack("#.w", "w")):
        after = run_pass(step, plans)
        assert len({id(plan.items.catalog) for plan in after}) == 1
    assert run_pass(permute("x", (1, 0), required=False), plans)[0].items is plans[0].items


def test_chunks_that_cross_a_seam_become_several():
    specs = {"qkv": TensorSpec((6, 2), "float32", [Shard(0)])}
    plans = tuple(world_plans(specs, Mesh(dp=2)))
    after = run_pass(split("qkv", {"q": 4, "k": 1, "v": 1}), plans)
    rows = [[(i.index.fqn, i.tensor_data.chunk.text) for i in plan.items] for plan in after]
    assert rows == [
        [("q", "0:3, 0:2")],
        [("q", "3:4, 0:2"), ("k", "0:1, 0:2"), ("v", "0:1, 0:2")],
    ]


def test_the_rotary_order_is_one_item_for_each_shard_of_whole_heads():
    specs = {"wq": TensorSpec((8 * 6, 5), "float32", [Shard(0)])}
    plans = tuple(world_plans(specs, Mesh(dp=4)))
    step = chain(reshape("wq", (8, 3, 2, 5)), permute("wq", (0, 2, 1, 3)), reshape("wq", (48, 5)))
    assert [len(plan.items) for plan in run_pass(step, plans)] == [1, 1, 1, 1]


def test_padding_joins_the_chunks_that_touch_the_end():
    specs = {"w": TensorSpec((5, 4), "float32", [Shard(0), Shard(1)])}
    plans = tuple(world_plans(specs, Mesh(dp=2, tp=2)))
    after = run_pass(pad("w", to=8, value=0.5), plans)
    fills = [[i.tensor_data.chunk.text for i in p.items if i.fill is not None] for p in after]
    assert fills == [[], [], ["5:8, 0:2"], ["5:8, 2:4"]]
    assert {item.fill for plan in after for item in plan.items} == {None, 0.5}


def test_what_was_trimmed_is_stated_in_the_frame_of_the_state_dict():
    (plan,) = run_pass(chain(permute("w", (1, 0)), trim("w", to=3)), planned(w=(2, 5)))
    (lost,) = plan.left_out
    assert lost.source_chunk.text == "0:2, 3:5"
    assert lost.tensor_data.size == (2, 5)
    (plan,) = run_pass(trim("w", to=1, axis=1), (plan,))
    assert [item.source_chunk.text for item in plan.left_out] == ["0:2, 3:5", "1:2, 0:3"]


def test_a_load_leaves_out_what_others_trimmed_in_a_rank_s_place():
    """Two ranks hold the same; one of them writes it, after a part was left out on both."""
    plans = run_pass(trim("w", to=4), planned(w=(5,)) * 2)
    passes = [others_spare_the_first, trim("w", to=3, required=False)]
    _, metadata = global_plan(plans, passes)
    for plan in with_replicas(run_pass(chain(passes), plans), plans):
        assert [(item.index.fqn, item.source_chunk.text) for item in plan.items] == [("w", "0:3")]
        assert sorted(item.source_chunk.text for item in plan.left_out) == ["3:4", "4:5"]
        assert load_plan(metadata, plan).items.numel.tolist() == [3]


def test_trimming_padding_leaves_nothing_out():
    (plan,) = run_pass(chain(pad("w", to=8, of=5), trim("w", to=5, of=8)), planned(w=(5,)))
    assert plan.left_out is None
    assert plan.items == planned(w=(5,))[0].items


def test_passes_run_where_names_match_and_after_others():
    plans = planned(**{"a.w": (4, 2), "b.w": (4, 2)})
    step = where("a.*", chain(permute("*.w", (1, 0)), cast("bfloat16")))
    (plan,) = run_pass(chain(step, rename({"a.w": "c"}), select("c")), plans)
    (item,) = plan.items
    assert item.tensor_data.size == (2, 4)
    assert item.tensor_data.properties.dtype == "bfloat16"
    (plan,) = run_pass(on_ranks([0], split("a.w", ["x", "y"])), plans)
    assert [item.index.fqn for item in plan.items] == ["x", "y", "b.w"]


def test_paths_of_nested_keys_go_with_the_keys():
    plan = local_plan({"m": {"a.w": TensorSpec((4, 2)), "b": TensorSpec((2,))}})
    after = permute("m.a.w", (1, 0))((plan,))[0]
    assert after.planner_data == plan.planner_data
    after = split("m.a.w", ["m.x", "m.y"])((plan,))[0]
    assert set(after.planner_data["paths"]) == {"m.b"}


def test_tensors_without_elements_change_shape_too():
    plans = planned(a=(0, 4), b=(2, 4))
    for step, shape in [
        (permute("a", (1, 0)), (4, 0)),
        (reshape("a", (0, 7)), (0, 7)),
        (pad("a", to=6, axis=1), (0, 6)),
        (trim("a", to=3, axis=1), (0, 3)),
    ]:
        (item, _) = run_pass(step, plans)[0].items
        assert item.tensor_data.size == shape
        assert item.tensor_data.chunk.numel == 0
        assert item.source_chunk.sizes == (0, 4)
    (plan,) = run_pass(concat(["a", "b"], "c"), plans)
    assert {item.tensor_data.size for item in plan.items} == {(2, 4)}


@pytest.mark.parametrize(
    ("step", "texts"),
    [
        (split("w", {"a": 3, "b": 2}), ["`w` has 6 along axis 0", "the parts have 5", "add up"]),
        (split("w", ["a", "b", "c", "d"]), ["which 4 do not divide", "state the length"]),
        (split("w", ["a", "b"], 2), ["`w` has shape [6, 4], so no axis 2", "-2 to 1"]),
        (split("w", ["v", "b"]), ["gives", "`v`", "one name"]),
        (split("x", ["a", "b"]), ["'x' matches nothing", "required=False"]),
        (split("*", ["*.a", "*.b"], 1), ["`b` has shape [6], so no axis 1"]),
        (concat(["w", "v"], "c", 1), ["do not fit", "`w` makes it", "`v` makes it", "[5, 8]"]),
        (concat(["w", "h"], "c"), ["float32 of shape", "float16 of shape", "cast"]),
        (concat({"w": 6, "u": 7}, "c"), ["`u` has 6 along axis 0", "and not 7"]),
        (concat(["w", "u"], "v"), ["gives", "one name: `v`"]),
        (concat(["w", "b"], "c"), ["do not fit", "[12, 4]", "[12]"]),
        (concat(["e.*.w", "e.*.x"], "e.*"), ["`e.0` needs `e.0.x`", "no rank has"]),
        (stack("e.#.w", "e"), ["`e` needs `e.1.w`", "no rank has"]),
        (stack("e.#.w", "e", count=2), ["number 2", "there are 2", "greater count"]),
        (stack("e.#.w", "e", 3, count=3), ["`e.0.w` has shape [2]", "no axis 3"]),
        (unstack("w", "w.#", count=5), ["`w` has 6 along axis 0", "and not 5"]),
        (unstack("s", "s.#"), ["`s` has shape [], so no axis 0"]),
        (permute("w", (0, 2, 1)), ["`w` has shape [6, 4]", "does not order its axes"]),
        (reshape("w", (5, -1)), ["24 elements", "do not fit [5, -1]"]),
        (reshape("w", (24,), of=(4, 6)), ["`w` has shape [6, 4]", "not [4, 6]", "`of`"]),
        (reshape("big", (100001, 100000)), ["too few axes in common", "the most is 65,536"]),
        (pad("w", to=5), ["6 along axis 0, more than 5", "trim"]),
        (pad("w", to=8, of=5), ["6 along axis 0, and not 5"]),
        (pad("none", to=8), ["no rank holds its end"]),
        (trim("w", to=7), ["less than 7", "pad"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(step, texts):
    shapes = {
        "w": (6, 4),
        "v": (5, 4),
        "u": (6, 4),
        "b": (6,),
        "s": (),
        "none": (0, 3),
        "e.0.w": (2,),
        "e.2.w": (2,),
        "big": (100000, 100001),
    }
    specs = {name: TensorSpec(shape) for name, shape in shapes.items()}
    plan = local_plan({**specs, "h": TensorSpec((6, 4), "float16"), "value": 3})
    message = refused(step, (plan,))
    for text in texts:
        assert text in message, message


def test_all_that_does_not_fit_is_listed():
    message = refused(split("*", ["*.x", "*.y"]), planned(a=(3,), b=(2,), c=(5, 2)))
    assert "`a` has 3" in message
    assert "`c` has 5" in message


def test_numbers_of_a_stack_must_be_complete_over_all_ranks():
    plans = planned(**{"e.0": (2,)}) + planned(**{"e.2": (3,)})
    assert "`e` needs `e.1`" in refused(stack("e.#", "e"), plans)
    assert "do not fit" in refused(stack("e.#", "e"), planned(**{"e.0": (2,), "e.1": (3,)}))
    far = planned(**{"e.0": (2,)}) + planned(**{"e.1": (3,)})
    assert "do not fit" in refused(stack("e.#", "e"), far)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: split("*.a", ["b", "c"]), "as many"),
        (lambda: split("a", ["b", "b"]), "names that differ"),
        (lambda: split("a", []), "several names"),
        (lambda: split("a", {"b": 0, "c": 2}), "length 0"),
        (lambda: stack("e.w", "e"), "as many"),
        (lambda: stack("e.#.#", "e"), "as many"),
        (lambda: unstack("e.#", "e.#"), "as many"),
        (lambda: stack("e.#", "e", count=0), "at least 1"),
        (lambda: permute("w", (0, 2)), "must name each axis"),
        (lambda: reshape("w", (-1, -1)), "one length may be -1"),
        (lambda: trim("w", to=0), "drop the tensor"),
        (lambda: pad("w", to=3, value=math.nan), "nan"),
    ],
)
def test_arguments_without_meaning_are_refused_at_once(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_tensor_that_two_patterns_match_is_refused():
    assert "matches" in refused(concat(["a*", "*a"], "c*"), planned(a=(3,)))


def test_a_shard_that_would_fall_into_too_many_boxes_is_refused_by_name():
    specs = {"w": TensorSpec((1 << 10, 1 << 7, 3), "float32", [Shard(2)])}
    plans = tuple(world_plans(specs, Mesh(tp=3)))
    assert len(run_pass(reshape("w", (1 << 17, 3)), plans)[0].items) == 1
    message = refused(reshape("w", (3 << 17,)), plans)
    assert "`w` cannot change shape as its shards lie" in message


@pytest.mark.parametrize("parts", [2, None, [1, 2]])
def test_parts_that_are_not_names_are_refused_at_once(parts):
    with pytest.raises(TypeError, match="split takes names as strings"):
        split("w", parts)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: split("*.w", {"*.x": 1.5, "*.y": 1}), "whole number, not 1.5"),
        (lambda: split("*.w", {"*.x": "3"}), "whole number, not '3'"),
        (lambda: split("*.w", ["*.x", "*.y"], axis="0"), "axis must be a whole number"),
        (lambda: permute("w", "10"), "tuple of whole numbers, not '10'"),
        (lambda: reshape("w", 6), "tuple of whole numbers, not 6"),
        (lambda: pad("w", to="8"), "to must be a whole number"),
    ],
)
def test_what_should_be_numbers_and_is_not_is_refused_in_words(make, text):
    with pytest.raises(TypeError, match=text):
        make()


def test_a_stack_with_a_huge_gap_in_its_numbers_is_refused_at_once():
    names = ["e.0.w", "e.99999999999999999999999.w"]
    (plan,) = planned(**dict.fromkeys(names, (2,)))
    issues = refused(stack("e.#.w", "e.w"), (plan,))
    assert "e.1.w" in str(issues)
