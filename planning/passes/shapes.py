"""Passes that change shapes: split, concat, stack, unstack, permute, reshape, pad, trim.

They say which box of the state dict's tensor becomes which box of the checkpoint's: nothing is
gathered and nothing copied, however the tensors are sharded. A save through them writes the new
tensors, and a load through the same planner fills the old ones.

Names are patterns. ``*`` stands for any characters, as few as possible, and ``#`` for a number;
what they matched is put into the new names, in order. Other characters stand for themselves.

All of them raise a PlanError when run if a tensor does not fit or a new name is taken, and, unless
``required=False``, if a pattern matches no tensor. Negative axes count from the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import index
from typing import Any, Final, SupportsIndex

from ..columns.items import Head
from ..errors import Issue, PlanError, listed
from ..plans import SavePlan
from ..records import fill_value
from .base import Step, frozen
from .edits import (
    Edit,
    Misfit,
    NameMatch,
    applied,
    check_names,
    matched,
    run_edits,
    with_number,
)
from .keys import catalogs_of

from .moves import (  # isort: skip
    Moved,
    concat_move,
    pad_move,
    permute_move,
    with_length,
    reshape_move,
    split_move,
    stack_move,
    trim_move,
    unstack_move,
)  # fmt: skip

_NAMED: Final = 8  # missing tensors to name

Plans = tuple[SavePlan, ...]
Sizes = tuple[int, ...]
Lengths = Mapping[str, int] | Sequence[str]
Undo = Callable[[], Step[SavePlan]] | str


def split(pattern: str, into: Lengths, axis: int = 0, *, required: bool = True) -> Step[SavePlan]:
    """Cut a tensor into several along an axis.

    Args:
        pattern: The tensors, by name.
        into: The new names, in order, each with its length along the axis; or only the names, for
            parts of equal length.
        axis: The axis.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"0.qkv": TensorSpec((6, 2))})
    >>> split("*.qkv", into={"*.q": 4, "*.k": 1, "*.v": 1})((plan,))[0]
    SavePlan: 3 items, 48 B
    name                   type    dtype    shape   box
    0.q ← 0.qkv            TENSOR  float32  [4, 2]  [0:4, 0:2]
    0.k ← 0.qkv[4:5, 0:2]  TENSOR  float32  [1, 2]  [0:1, 0:2]
    0.v ← 0.qkv[5:6, 0:2]  TENSOR  float32  [1, 2]  [0:1, 0:2]
    """
    names = _part_names(into)
    check_names("split", [pattern], names)
    lengths, into = _part_lengths("split", into), frozen(into)

    def edit(head: Head, match: NameMatch) -> Moved:
        at = _axis(head, axis)
        parts = lengths or _equal(head, at, len(names))
        if sum(parts) != head.size[at]:
            have = ", ".join(f"`{n}`: {k}" for n, k in zip(names, parts, strict=True))
            text = f"the parts have {sum(parts)} ({have}); state lengths that add up"
            raise Misfit(f"`{head.name}` has {head.size[at]} along axis {at} and {text}")
        return Moved(split_move(head.size, at, parts), tuple(applied(n, match) for n in names))

    options = {"axis": _whole("axis", axis), "required": required}
    undo = partial(concat, into, pattern, axis, required=required)
    run = partial(run_edits, "split", {pattern: edit}, required)
    return Step(split, (pattern, into), options, "rank", run, undo)


def concat(names: Lengths, into: str, axis: int = 0, *, required: bool = True) -> Step[SavePlan]:
    """Join several tensors into one along an axis; they may be held by different ranks.

    Args:
        names: The tensors, in order, each with its length along the axis; or only their names, for
            lengths as the ranks hold them, which needs the plans of all ranks.
        into: The new name.
        axis: The axis.
        required: Whether it is an error if a pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"0.w1": TensorSpec((3, 2)), "0.w3": TensorSpec((3, 2))})
    >>> concat(["*.w1", "*.w3"], into="*.w13")((plan,))[0]
    SavePlan: 2 items, 48 B
    name                    type    dtype    shape   box
    0.w13 ← 0.w1            TENSOR  float32  [6, 2]  [0:3, 0:2]
    0.w13 ← 0.w3[0:3, 0:2]  TENSOR  float32  [6, 2]  [3:6, 0:2]
    """
    patterns = _part_names(names)
    check_names("concat", patterns, [into])
    lengths, names = _part_lengths("concat", names), frozen(names)

    def edit(of: Mapping[NameMatch, Sizes], part: int, head: Head, match: NameMatch) -> Moved:
        at, own = _axis(head, axis), lengths or of[match]
        if head.size[at] != own[part]:
            why = "as concat states; state its true length" if lengths else "as on another rank"
            text = f"`{head.name}` has {head.size[at]} along axis {at}, and not {own[part]}"
            raise Misfit(f"{text}, {why}")
        shift = with_length((0,) * len(head.size), at, sum(own[:part]))
        return Moved(concat_move(head.size, at, sum(own)), (applied(into, match),), shift)

    def run(plans: Plans) -> Plans:
        of = {} if lengths else _lengths(plans, patterns, into, axis)
        edits = {pattern: partial(edit, of, part) for part, pattern in enumerate(patterns)}
        return run_edits("concat", edits, required, plans, joins=True, everywhere=not lengths)

    options = {"axis": _whole("axis", axis), "required": required}
    undo: Undo = "it must state the length of each part: concat({name: length})"
    if lengths:
        undo = partial(split, into, names, axis, required=required)
    return Step(concat, (names, into), options, "rank" if lengths else "world", run, undo)


def stack(
    pattern: str, into: str, axis: int = 0, *, count: int | None = None, required: bool = True
) -> Step[SavePlan]:
    """Join numbered tensors into one, along a new axis; they may be held by different ranks.

    Args:
        pattern: The tensors, by name; its last ``#`` is their number along the new axis.
        into: The new name, without that ``#``.
        axis: The new axis.
        count: How many there are. Without it, the plans of all ranks are needed to find out.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"experts.0.w": TensorSpec((2,)), "experts.1.w": TensorSpec((2,))})
    >>> stack("experts.#.w", into="experts.w")((plan,))[0]
    SavePlan: 2 items, 16 B
    name                          type    dtype    shape   box
    experts.w ← experts.0.w[0:2]  TENSOR  float32  [2, 2]  [0:1, 0:2]
    experts.w ← experts.1.w[0:2]  TENSOR  float32  [2, 2]  [1:2, 0:2]
    """
    check_names("stack", [pattern], [into], more=-1)

    def edit(counts: Mapping[NameMatch, int], head: Head, match: NameMatch) -> Moved:
        number, rest = match.numbers[-1], match._replace(numbers=match.numbers[:-1])
        at, name = _axis(head, axis, more=1), applied(into, rest)
        total = counts[rest] if count is None else count
        if number >= total:
            text = f"`{head.name}` has number {number}, and there are {total} in `{name}`"
            raise Misfit(f"{text}; state a greater count")
        shift = with_length((0,) * (len(head.size) + 1), at, number)
        return Moved(stack_move(head.size, at, total), (name,), shift)

    def run(plans: Plans) -> Plans:
        edits = {pattern: partial(edit, _counted(plans, pattern, into) if count is None else {})}
        return run_edits("stack", edits, required, plans, joins=True, everywhere=count is None)

    options = _counting("stack", axis, count, required)
    undo = partial(unstack, into, pattern, **options)
    return Step(stack, (pattern, into), options, "world" if count is None else "rank", run, undo)


def unstack(
    pattern: str, into: str, axis: int = 0, *, count: int | None = None, required: bool = True
) -> Step[SavePlan]:
    """Cut a tensor into numbered ones along an axis, which they do not have.

    Args:
        pattern: The tensors, by name.
        into: The new name; its last ``#`` becomes the number along the axis.
        axis: The axis.
        count: The length of the axis, which is checked.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"experts.w": TensorSpec((2, 3))})
    >>> unstack("experts.w", into="experts.#.w")((plan,))[0]
    SavePlan: 2 items, 24 B
    name                               type    dtype    shape  box
    experts.0.w ← experts.w[0:1, 0:3]  TENSOR  float32  [3]    [0:3]
    experts.1.w ← experts.w[1:2, 0:3]  TENSOR  float32  [3]    [0:3]
    """
    check_names("unstack", [pattern], [into], more=1)

    def edit(head: Head, match: NameMatch) -> Moved:
        at = _axis(head, axis)
        length = head.size[at]
        if length != (length if count is None else count) or not length:
            text = f"`{head.name}` has {length} along axis {at}"
            raise Misfit(f"{text}, and not {count}; state its true length" if length else text)
        names = tuple(applied(into, with_number(match, number)) for number in range(length))
        return Moved(unstack_move(head.size, at), names)

    options = _counting("unstack", axis, count, required)
    undo = partial(stack, into, pattern, **options)
    run = partial(run_edits, "unstack", {pattern: edit}, required)
    return Step(unstack, (pattern, into), options, "rank", run, undo)


def permute(pattern: str, order: Sequence[int], *, required: bool = True) -> Step[SavePlan]:
    """Put the axes of tensors into another order, as numpy's ``transpose`` does.

    Args:
        pattern: The tensors, by name.
        order: For each axis in the checkpoint, which axis of the tensor it is.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((4, 2))})
    >>> item = permute("w", (1, 0))((plan,))[0].items[0]
    >>> item.tensor_data.chunk.sizes, item.source_box.sizes
    ((2, 4), (4, 2))
    """
    axes = _wholes("permute: the order", order)
    axes = tuple(axis + len(axes) if axis < 0 else axis for axis in axes)
    if sorted(axes) != list(range(len(axes))):
        raise ValueError(f"permute: {axes} must name each axis from 0 to {len(axes) - 1} once")

    def edit(head: Head, match: NameMatch) -> Moved:
        if len(axes) != len(head.size):
            text = f"`{head.name}` has shape {list(head.size)}, so {axes} does not "
            raise Misfit(f"{text}order its axes; name each axis once")
        return Moved(permute_move(head.size, axes), (head.name,))

    back = sorted(range(len(axes)), key=axes.__getitem__)
    undo = partial(permute, pattern, back, required=required)
    return _reshaping(permute, (pattern, axes), {"required": required}, edit, undo)


def reshape(
    pattern: str, shape: Sequence[int], *, of: Sequence[int] | None = None, required: bool = True
) -> Step[SavePlan]:
    """Give tensors another shape, as numpy's ``reshape`` does: merge and part axes.

    Args:
        pattern: The tensors, by name.
        shape: The new shape; one length may be -1, for what is left.
        of: The shape before, which is checked; with it, the pass has an inverse.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"q.weight": TensorSpec((6, 5))})
    >>> item = reshape("*.weight", (2, 3, -1))((plan,))[0].items[0]
    >>> item.tensor_data.chunk.sizes, item.source_box.sizes
    ((2, 3, 5), (6, 5))
    """
    wanted = _wholes("reshape: the shape", shape)
    if any(n < -1 for n in wanted) or wanted.count(-1) > 1:
        raise ValueError(f"reshape: {wanted} is not a valid shape; one length may be -1")
    before = None if of is None else _wholes("reshape: of", of)

    def edit(head: Head, match: NameMatch) -> Moved:
        after, have = _resolved(wanted, head.size), f"`{head.name}` has shape {list(head.size)}"
        if before is not None and head.size != before:
            raise Misfit(f"{have}, and not {list(before)}, as `of` states; state its true shape")
        if after is None:
            count = math.prod(head.size)
            raise Misfit(f"{have}, so {count} elements, which do not fit {list(wanted)}")
        try:
            return Moved(reshape_move(head.size, after), (head.name,))
        except ValueError as error:
            text = f"`{head.name}` of {list(head.size)} has too few axes in common with "
            text += f"{list(after)}: {error}; merge or part neighbouring axes"
            raise Misfit(text) from error

    def undo() -> Step[SavePlan]:
        if before is None:
            raise ValueError("reshape has an inverse if it states the shape before: of=…")
        after = _resolved(wanted, before)
        if after is None:
            raise ValueError(f"reshape: a tensor of shape {before} cannot become one of {wanted}")
        return reshape(pattern, before, of=after, required=required)

    options = {"of": before, "required": required}
    return _reshaping(reshape, (pattern, wanted), options, edit, undo)


def pad(
    pattern: str,
    *,
    to: int,
    axis: int = 0,
    value: float = 0,
    of: int | None = None,
    required: bool = True,
) -> Step[SavePlan]:
    """Lengthen an axis of tensors in the checkpoint; a load ignores the padding.

    Args:
        pattern: The tensors, by name.
        to: The new length of the axis.
        axis: The axis; it must not be empty.
        value: What is written there.
        of: The length before, which is checked; with it, the pass has an inverse.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"embed": TensorSpec((5, 2))})
    >>> [(i.tensor_data.chunk.text, i.fill) for i in pad("embed", to=8)((plan,))[0].items]
    [('0:5, 0:2', None), ('5:8, 0:2', 0)]
    """
    fill = fill_value(value)

    def edit(head: Head, match: NameMatch) -> Moved:
        at = _axis(head, axis)
        length = _length(head, at, of)
        if length > to:
            text = f"`{head.name}` has {length} along axis {at}, more than {to}"
            raise Misfit(f"{text}; trim shortens tensors")
        if length == 0 and to:
            text = f"`{head.name}` has none along axis {at}, so no rank holds its end"
            raise Misfit(f"{text}; drop it")
        return Moved(pad_move(head.size, at, to, fill), (head.name,))

    lengths = _to_and_of(to, axis, of)
    options = {**lengths, "value": fill, "required": required}
    return _reshaping(pad, (pattern,), options, edit, _undo_length(trim, pattern, options))


def trim(
    pattern: str, *, to: int, axis: int = 0, of: int | None = None, required: bool = True
) -> Step[SavePlan]:
    """Shorten an axis of tensors in the checkpoint: what lies behind is neither saved nor loaded.

    Args:
        pattern: The tensors, by name.
        to: The new length of the axis, at least 1.
        axis: The axis.
        of: The length before, which is checked; with it, the pass has an inverse, if what lies
            behind is padding.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = trim("embed", to=5)((local_plan({"embed": TensorSpec((8, 2))}),))[0]
    >>> [item.tensor_data.chunk.text for item in plan.items]
    ['0:5, 0:2']
    >>> [item.tensor_data.chunk.text for item in plan.left_out]
    ['5:8, 0:2']
    """
    options = {**_to_and_of(to, axis, of), "required": required}
    if to < 1:
        raise ValueError(f"trim: nothing is left of an axis of length {to}; drop the tensor")

    def edit(head: Head, match: NameMatch) -> Moved:
        at = _axis(head, axis)
        length = _length(head, at, of)
        if length < to:
            text = f"`{head.name}` has {length} along axis {at}, less than {to}"
            raise Misfit(f"{text}; pad lengthens tensors")
        return Moved(trim_move(head.size, at, to), (head.name,))

    return _reshaping(trim, (pattern,), options, edit, _undo_length(pad, pattern, options))


def _reshaping(
    factory: Any, args: tuple[Any, ...], options: Mapping[str, Any], edit: Edit, undo: Undo
) -> Step[SavePlan]:
    """Return a pass that edits the tensors of one pattern and keeps their names."""
    what, pattern = factory.__name__, args[0]
    check_names(what, [pattern], [pattern])
    run = partial(run_edits, what, {pattern: edit}, options["required"])
    return Step(factory, args, options, "rank", run, undo, keeps_names=True)


def _undo_length(back: Any, pattern: str, options: Mapping[str, Any]) -> Undo:
    """Return how a pass is undone that changes the length of an axis."""
    if options["of"] is None:
        return "it does not state the length before: of=…"
    turned = {**options, "to": options["of"], "of": options["to"]}
    turned.pop("value", None)
    return partial(back, pattern, **turned)


def _to_and_of(to: int, axis: int, of: int | None) -> dict[str, Any]:
    of = None if of is None else _whole("of", of)
    return {"to": _whole("to", to), "axis": _whole("axis", axis), "of": of}


def _counting(what: str, axis: int, count: int | None, required: bool) -> dict[str, Any]:
    if count is not None and _whole(f"{what}: count", count) < 1:
        raise ValueError(f"{what}: count must be at least 1, not {count}")
    return {"axis": _whole("axis", axis), "count": count, "required": required}


# What the parts of joined tensors are, over all ranks.


def _lengths(plans: Plans, patterns: Sequence[str], into: str, axis: int) -> dict[NameMatch, Sizes]:
    """Return how long the parts of each joined tensor are; refuse those that lack one."""
    groups: dict[NameMatch, dict[int, Head]] = {}
    for head in _tensors(plans):
        for part, pattern in enumerate(patterns):
            match = matched(pattern, head.name)
            if match is not None:
                groups.setdefault(match, {})[part] = head
    lacking = {
        applied(into, match): [applied(p, match) for n, p in enumerate(patterns) if n not in heads]
        for match, heads in groups.items()
    }
    _refuse_lacking("concat", lacking)
    return {
        match: tuple(_length_along(heads[part], axis) for part in range(len(patterns)))
        for match, heads in groups.items()
    }


def _length_along(head: Head, axis: int) -> int:
    """Return the length of an axis; 0 if there is none, which is refused later."""
    at = axis % len(head.size) if head.size else 0
    return head.size[at] if at < len(head.size) else 0


def _counted(plans: Plans, pattern: str, into: str) -> dict[NameMatch, int]:
    """Return how many tensors each stack has; refuse gaps in their numbers."""
    groups: dict[NameMatch, set[int]] = {}
    for head in _tensors(plans):
        match = matched(pattern, head.name)
        if match is not None:
            rest = match._replace(numbers=match.numbers[:-1])
            groups.setdefault(rest, set()).add(match.numbers[-1])
    lacking = {
        applied(into, rest): [applied(pattern, with_number(rest, n)) for n in _gaps(numbers)]
        for rest, numbers in groups.items()
    }
    _refuse_lacking("stack", lacking)
    return {rest: len(numbers) for rest, numbers in groups.items()}


def _gaps(numbers: Collection[int]) -> Iterator[int]:
    """Yield a few numbers below the largest that are missing; there may be very many."""
    return islice((n for n in range(max(numbers)) if n not in numbers), _NAMED)


def _refuse_lacking(what: str, lacking: Mapping[str, Sequence[str]]) -> None:
    issues = [
        Issue("missing", name, f"{what}: `{name}` needs {listed(names)}, which no rank has")
        for name, names in lacking.items()
        if names
    ]
    if issues:
        raise PlanError(issues)


def _tensors(plans: Plans) -> Iterator[Head]:
    """Yield the tensors of all ranks; ranks share catalogs."""
    for catalog in catalogs_of(plans).values():
        yield from (head for head in catalog.heads if head.properties is not None)


def _axis(head: Head, axis: int, more: int = 0) -> int:
    """Return the number of an axis of a tensor; ``more`` is how many axes it gets."""
    ndim = len(head.size) + more
    if not -ndim <= axis < ndim:
        text = f"`{head.name}` has shape {list(head.size)}, so no axis {axis}"
        raise Misfit(f"{text}; axes are {-ndim} to {ndim - 1}" if ndim else text)
    return axis % ndim


def _length(head: Head, axis: int, of: int | None) -> int:
    """Return the length of an axis, which must be ``of``."""
    length = head.size[axis]
    if length != (length if of is None else of):
        text = f"`{head.name}` has {length} along axis {axis}, and not {of}, as `of` states"
        raise Misfit(f"{text}; state its true length")
    return length


def _equal(head: Head, axis: int, count: int) -> Sizes:
    """Return the lengths of equal parts."""
    length, rest = divmod(head.size[axis], count)
    if rest:
        text = f"`{head.name}` has {head.size[axis]} along axis {axis}, which {count} do not divide"
        raise Misfit(f"{text}; state the length of each part")
    return (length,) * count


def _part_names(names: Lengths) -> tuple[Any, ...]:
    """Return the names of parts; anything else than a collection is refused as one of them."""
    single = isinstance(names, str) or not isinstance(names, Iterable)
    return (names,) if single else tuple(names)


def _part_lengths(what: str, parts: Lengths) -> Sizes | None:
    """Return the lengths of parts, if they are stated."""
    if not isinstance(parts, Mapping):
        return None
    for name, length in parts.items():
        if _whole(f"{what}: the length of `{name}`", length) < 1:
            raise ValueError(f"{what}: `{name}` has length {length}; leave it out")
    return tuple(parts.values())


def _whole(what: str, value: Any) -> int:
    """Return a whole number, or raise in words."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} must be a whole number, not {value!r}")
    return index(value)


def _wholes(what: str, values: Any) -> Sizes:
    """Return a tuple of whole numbers, or raise in words."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a tuple of whole numbers, not {values!r}")
    return tuple(_whole(f"each number of {what}", value) for value in values)


def _resolved(shape: Sizes, before: Sizes) -> Sizes | None:
    """Return a shape without -1; None if it does not fit."""
    numel, rest = math.prod(before), math.prod(n for n in shape if n != -1)
    if -1 not in shape:
        return shape if rest == numel else None
    if not rest or numel % rest:
        return None
    return tuple(numel // rest if n == -1 else n for n in shape)
