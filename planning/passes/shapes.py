"""Passes that change shapes: split, concat, stack, unstack, permute, reshape, pad, trim.

They say which box of the state dict's tensor becomes which box of the checkpoint's: nothing is
gathered and nothing copied, however the tensors are sharded. A save through them writes the new
tensors, and a load through the same planner fills the old ones.

Names are patterns. ``*`` stands for any characters, as few as possible, and ``#`` for a number;
what they matched is put into the new names, in order. Other characters stand for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import index
from typing import Any, Final, Literal, SupportsIndex

from ..columns.items import Head
from ..errors import Issue, PlanError, listed
from ..plans import SavePlan
from ..records import fill_value
from .base import Step
from .edits import Misfit, run_edits
from .keys import catalogs_of
from .moves import (
    Moved,
    concat_move,
    pad_move,
    permute_move,
    replaced,
    reshape_move,
    split_move,
    stack_move,
    trim_move,
    unstack_move,
)
from .patterns import Match, check_names, filled, matched, numbered

_NAMED: Final = 8  # missing tensors to name

Plans = tuple[SavePlan, ...]
Sizes = tuple[int, ...]


def split(
    pattern: str, into: Mapping[str, int] | Sequence[str], axis: int = 0, *, required: bool = True
) -> Step[SavePlan]:
    """Cut a tensor into several along an axis.

    Args:
        pattern: The tensors, by name.
        into: The new names, in order, each with its length along the axis; or only the names, for
            parts of equal length.
        axis: The axis; negative ones count from the end.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"0.qkv": TensorSpec((6, 2))})
    >>> split("*.qkv", into={"*.q": 4, "*.k": 1, "*.v": 1})((plan,))[0]
    SavePlan: 3 items, 48 B
    name                   type    dtype    shape   box
    0.q ← 0.qkv            TENSOR  float32  [4, 2]  [0:4, 0:2]
    0.k ← 0.qkv[4:5, 0:2]  TENSOR  float32  [1, 2]  [0:1, 0:2]
    0.v ← 0.qkv[5:6, 0:2]  TENSOR  float32  [1, 2]  [0:1, 0:2]

    Raises:
        PlanError: When run, if the lengths do not add up, or a name is taken.
    """
    check_names("split", [pattern], _names(into))
    _check_lengths("split", into)
    options = {"axis": _whole("axis", axis), "required": required}
    return Step(split, (pattern, into), options, "rank", _split, inverse=_undo_split)


def _undo_split(
    pattern: str, into: Mapping[str, int] | Sequence[str], axis: int, required: bool
) -> Step[SavePlan]:
    return concat(into, pattern, axis, required=required)


def _split(
    plans: Plans, pattern: str, into: Mapping[str, int] | Sequence[str], axis: int, required: bool
) -> Plans:
    names = _names(into)
    lengths = tuple(into.values()) if isinstance(into, Mapping) else None

    def edit(head: Head, match: Match) -> Moved:
        at = _axis(head, axis)
        parts = _equal(head, at, len(names)) if lengths is None else lengths
        if sum(parts) != head.size[at]:
            have = ", ".join(f"`{n}`: {k}" for n, k in zip(names, parts, strict=True))
            text = f"the parts have {sum(parts)} ({have}); state lengths that add up"
            raise Misfit(f"`{head.name}` has {head.size[at]} along axis {at} and {text}")
        return Moved(split_move(head.size, at, parts), tuple(filled(n, match) for n in names))

    return run_edits("split", plans, {pattern: edit}, required)


def concat(
    names: Mapping[str, int] | Sequence[str], into: str, axis: int = 0, *, required: bool = True
) -> Step[SavePlan]:
    """Join several tensors into one along an axis; they may be held by different ranks.

    Args:
        names: The tensors, in order, each with its length along the axis; or only their names, for
            lengths as the ranks hold them, which needs the plans of all ranks.
        into: The new name.
        axis: The axis; negative ones count from the end.
        required: Whether it is an error if a pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"0.w1": TensorSpec((3, 2)), "0.w3": TensorSpec((3, 2))})
    >>> concat(["*.w1", "*.w3"], into="*.w13")((plan,))[0]
    SavePlan: 2 items, 48 B
    name                    type    dtype    shape   box
    0.w13 ← 0.w1            TENSOR  float32  [6, 2]  [0:3, 0:2]
    0.w13 ← 0.w3[0:3, 0:2]  TENSOR  float32  [6, 2]  [3:6, 0:2]

    Raises:
        PlanError: When run, if the tensors do not fit together, one of them is missing, or a name
            is taken.
    """
    check_names("concat", _names(names), [into])
    _check_lengths("concat", names)
    options = {"axis": _whole("axis", axis), "required": required}
    scope: Literal["rank", "world"] = "rank" if isinstance(names, Mapping) else "world"
    return Step(concat, (names, into), options, scope, _concat, inverse=_undo_concat)


def _undo_concat(
    names: Mapping[str, int] | Sequence[str], into: str, axis: int, required: bool
) -> Step[SavePlan]:
    if not isinstance(names, Mapping):
        text = "concat has an inverse if it states the length of each part: concat({name: length})"
        raise ValueError(text)
    return split(into, names, axis, required=required)


def _concat(
    plans: Plans, names: Mapping[str, int] | Sequence[str], into: str, axis: int, required: bool
) -> Plans:
    lengths = tuple(names.values()) if isinstance(names, Mapping) else None
    patterns = _names(names)
    known = _lengths(plans, patterns, into, axis) if lengths is None else {}

    def edit(part: int, head: Head, match: Match) -> Moved:
        at = _axis(head, axis)
        own = lengths or known[match]
        if head.size[at] != own[part]:
            text = f"and not {own[part]}, as "
            text += "on another rank" if lengths is None else "concat states; state its true length"
            raise Misfit(f"`{head.name}` has {head.size[at]} along axis {at}, {text}")
        shift = replaced((0,) * len(head.size), at, sum(own[:part]))
        return Moved(concat_move(head.size, at, sum(own)), (filled(into, match),), shift)

    edits = {pattern: partial(edit, part) for part, pattern in enumerate(patterns)}
    return run_edits("concat", plans, edits, required, joins=True, everywhere=lengths is None)


def stack(
    pattern: str, into: str, axis: int = 0, *, count: int | None = None, required: bool = True
) -> Step[SavePlan]:
    """Join numbered tensors into one, along a new axis; they may be held by different ranks.

    Args:
        pattern: The tensors, by name; its last ``#`` is their number along the new axis.
        into: The new name, without that ``#``.
        axis: The new axis; negative ones count from the end.
        count: How many there are. Without it, the plans of all ranks are needed to find out.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"experts.0.w": TensorSpec((2,)), "experts.1.w": TensorSpec((2,))})
    >>> stack("experts.#.w", into="experts.w")((plan,))[0]
    SavePlan: 2 items, 16 B
    name                          type    dtype    shape   box
    experts.w ← experts.0.w[0:2]  TENSOR  float32  [2, 2]  [0:1, 0:2]
    experts.w ← experts.1.w[0:2]  TENSOR  float32  [2, 2]  [1:2, 0:2]

    Raises:
        PlanError: When run, if the tensors differ in shape or dtype, a number is missing, or a name
            is taken.
    """
    check_names("stack", [pattern], [into], more=-1)
    _check_count("stack", count)
    options = {"axis": _whole("axis", axis), "count": count, "required": required}
    scope: Literal["rank", "world"] = "world" if count is None else "rank"
    return Step(stack, (pattern, into), options, scope, _stack, inverse=_undo_stack)


def _undo_stack(
    pattern: str, into: str, axis: int, count: int | None, required: bool
) -> Step[SavePlan]:
    return unstack(into, pattern, axis, count=count, required=required)


def _stack(
    plans: Plans, pattern: str, into: str, axis: int, count: int | None, required: bool
) -> Plans:
    counts = _counted(plans, pattern, into) if count is None else {}

    def edit(head: Head, match: Match) -> Moved:
        number, rest = match.numbers[-1], match._replace(numbers=match.numbers[:-1])
        at = _axis(head, axis, more=1)
        total = counts[rest] if count is None else count
        name = filled(into, rest)
        if number >= total:
            text = f"`{head.name}` has number {number}, and there are {total} in `{name}`"
            raise Misfit(f"{text}; state a greater count")
        shift = replaced((0,) * (len(head.size) + 1), at, number)
        return Moved(stack_move(head.size, at, total), (name,), shift)

    return run_edits(
        "stack", plans, {pattern: edit}, required, joins=True, everywhere=count is None
    )


def unstack(
    pattern: str, into: str, axis: int = 0, *, count: int | None = None, required: bool = True
) -> Step[SavePlan]:
    """Cut a tensor into numbered ones along an axis, which they do not have.

    Args:
        pattern: The tensors, by name.
        into: The new name; its last ``#`` becomes the number along the axis.
        axis: The axis; negative ones count from the end.
        count: The length of the axis, which is checked.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"experts.w": TensorSpec((2, 3))})
    >>> unstack("experts.w", into="experts.#.w")((plan,))[0]
    SavePlan: 2 items, 24 B
    name                               type    dtype    shape  box
    experts.0.w ← experts.w[0:1, 0:3]  TENSOR  float32  [3]    [0:3]
    experts.1.w ← experts.w[1:2, 0:3]  TENSOR  float32  [3]    [0:3]

    Raises:
        PlanError: When run, if the axis has another length than ``count``, or a name is taken.
    """
    check_names("unstack", [pattern], [into], more=1)
    _check_count("unstack", count)
    options = {"axis": _whole("axis", axis), "count": count, "required": required}
    return Step(unstack, (pattern, into), options, "rank", _unstack, inverse=_undo_unstack)


def _undo_unstack(
    pattern: str, into: str, axis: int, count: int | None, required: bool
) -> Step[SavePlan]:
    return stack(into, pattern, axis, count=count, required=required)


def _unstack(
    plans: Plans, pattern: str, into: str, axis: int, count: int | None, required: bool
) -> Plans:
    def edit(head: Head, match: Match) -> Moved:
        at = _axis(head, axis)
        length = head.size[at]
        if length != (length if count is None else count) or not length:
            text = f"`{head.name}` has {length} along axis {at}"
            raise Misfit(f"{text}, and not {count}; state its true length" if length else text)
        names = tuple(filled(into, numbered(match, number)) for number in range(length))
        return Moved(unstack_move(head.size, at), names)

    return run_edits("unstack", plans, {pattern: edit}, required)


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

    Raises:
        ValueError: ``order`` is not an order of axes.
        PlanError: When run, if a tensor has another number of axes.
    """
    axes = _wholes("permute: the order", order)
    check_names("permute", [pattern], [pattern])
    if sorted(axes) != list(range(len(axes))):
        raise ValueError(f"permute: {axes} must name each axis from 0 to {len(axes) - 1} once")
    options = {"required": required}
    return Step(
        permute, (pattern, axes), options, "rank", _permute, keeps_names=True, inverse=_undo_permute
    )


def _undo_permute(pattern: str, order: Sizes, required: bool) -> Step[SavePlan]:
    back = sorted(range(len(order)), key=order.__getitem__)
    return permute(pattern, back, required=required)


def _permute(plans: Plans, pattern: str, order: Sizes, required: bool) -> Plans:
    def edit(head: Head, match: Match) -> Moved:
        if len(order) != len(head.size):
            text = f"`{head.name}` has shape {list(head.size)}, so {order} does not "
            raise Misfit(f"{text}order its axes; name each axis once")
        return Moved(permute_move(head.size, order), (head.name,))

    return run_edits("permute", plans, {pattern: edit}, required)


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

    Raises:
        PlanError: When run, if a tensor does not have so many elements.
    """
    check_names("reshape", [pattern], [pattern])
    after = _wholes("reshape: the shape", shape)
    if any(n < -1 for n in after) or after.count(-1) > 1:
        raise ValueError(f"reshape: {after} is not a valid shape; one length may be -1")
    options = {"of": None if of is None else _wholes("reshape: of", of), "required": required}
    return Step(
        reshape,
        (pattern, after),
        options,
        "rank",
        _reshape,
        keeps_names=True,
        inverse=_undo_reshape,
    )


def _undo_reshape(pattern: str, shape: Sizes, of: Sizes | None, required: bool) -> Step[SavePlan]:
    if of is None:
        raise ValueError("reshape has an inverse if it states the shape before: reshape(…, of=…)")
    after = _resolved(shape, of)
    if after is None:
        raise ValueError(f"reshape: a tensor of shape {of} cannot become one of {shape}")
    return reshape(pattern, of, of=after, required=required)


def _reshape(plans: Plans, pattern: str, shape: Sizes, of: Sizes | None, required: bool) -> Plans:
    def edit(head: Head, match: Match) -> Moved:
        after = _resolved(shape, head.size)
        if of is not None and head.size != of:
            text = f"`{head.name}` has shape {list(head.size)}, and not {list(of)}"
            raise Misfit(f"{text}, as `of` states; state its true shape")
        if after is None:
            text = f"`{head.name}` has shape {list(head.size)}, so {math.prod(head.size)} "
            raise Misfit(f"{text}elements, which do not fit {list(shape)}")
        try:
            return Moved(reshape_move(head.size, after), (head.name,))
        except ValueError as error:
            text = f"`{head.name}` of {list(head.size)} has too few axes in common with "
            raise Misfit(
                f"{text}{list(after)}: {error}; merge or part neighbouring axes"
            ) from error

    return run_edits("reshape", plans, {pattern: edit}, required)


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
        axis: The axis; negative ones count from the end.
        value: What is written there.
        of: The length before, which is checked; with it, the pass has an inverse.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"embed": TensorSpec((5, 2))})
    >>> [(i.tensor_data.chunk.text, i.fill) for i in pad("embed", to=8)((plan,))[0].items]
    [('0:5, 0:2', None), ('5:8, 0:2', 0)]

    Raises:
        PlanError: When run, if the axis is longer than that, or empty.
    """
    check_names("pad", [pattern], [pattern])
    options = {
        "to": _whole("to", to),
        "axis": _whole("axis", axis),
        "value": fill_value(value),
        "of": None if of is None else _whole("of", of),
        "required": required,
    }
    return Step(pad, (pattern,), options, "rank", _pad, keeps_names=True, inverse=_undo_pad)


def _undo_pad(
    pattern: str, to: int, axis: int, value: float, of: int | None, required: bool
) -> Step[SavePlan]:
    if of is None:
        raise ValueError("pad has an inverse if it states the length before: pad(…, of=…)")
    return trim(pattern, to=of, axis=axis, of=to, required=required)


def _pad(
    plans: Plans, pattern: str, to: int, axis: int, value: float, of: int | None, required: bool
) -> Plans:
    def edit(head: Head, match: Match) -> Moved:
        at = _axis(head, axis)
        length = _length(head, at, of)
        if length > to:
            text = f"`{head.name}` has {length} along axis {at}, more than {to}"
            raise Misfit(f"{text}; trim shortens tensors")
        if length == 0 and to:
            text = f"`{head.name}` has none along axis {at}, so no rank holds its end"
            raise Misfit(f"{text}; drop it")
        return Moved(pad_move(head.size, at, to, value), (head.name,))

    return run_edits("pad", plans, {pattern: edit}, required)


def trim(
    pattern: str, *, to: int, axis: int = 0, of: int | None = None, required: bool = True
) -> Step[SavePlan]:
    """Shorten an axis of tensors in the checkpoint: what lies behind is neither saved nor loaded.

    Args:
        pattern: The tensors, by name.
        to: The new length of the axis.
        axis: The axis; negative ones count from the end.
        of: The length before, which is checked; with it, the pass has an inverse, if what lies
            behind is padding.
        required: Whether it is an error if the pattern matches no tensor.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = trim("embed", to=5)((local_plan({"embed": TensorSpec((8, 2))}),))[0]
    >>> [item.tensor_data.chunk.text for item in plan.items]
    ['0:5, 0:2']
    >>> [item.tensor_data.chunk.text for item in plan.left_out]
    ['5:8, 0:2']

    Raises:
        ValueError: ``to`` is less than 1.
        PlanError: When run, if the axis is shorter than that.
    """
    check_names("trim", [pattern], [pattern])
    if _whole("to", to) < 1:
        raise ValueError(f"trim: nothing is left of an axis of length {to}; drop the tensor")
    options = {
        "to": _whole("to", to),
        "axis": _whole("axis", axis),
        "of": None if of is None else _whole("of", of),
        "required": required,
    }
    return Step(trim, (pattern,), options, "rank", _trim, keeps_names=True, inverse=_undo_trim)


def _undo_trim(pattern: str, to: int, axis: int, of: int | None, required: bool) -> Step[SavePlan]:
    if of is None:
        raise ValueError("trim has an inverse if it states the length before: trim(…, of=…)")
    return pad(pattern, to=of, axis=axis, of=to, required=required)


def _trim(plans: Plans, pattern: str, to: int, axis: int, of: int | None, required: bool) -> Plans:
    def edit(head: Head, match: Match) -> Moved:
        at = _axis(head, axis)
        length = _length(head, at, of)
        if length < to:
            text = f"`{head.name}` has {length} along axis {at}, less than {to}"
            raise Misfit(f"{text}; pad lengthens tensors")
        return Moved(trim_move(head.size, at, to), (head.name,))

    return run_edits("trim", plans, {pattern: edit}, required)


# What the parts of joined tensors are, over all ranks.


def _lengths(
    plans: Plans, patterns: Sequence[str], into: str, axis: int
) -> dict[Match, tuple[int, ...]]:
    """Return how long the parts of each joined tensor are; refuse those that lack one."""
    groups: dict[Match, dict[int, Head]] = {}
    for head in _tensors(plans):
        for part, pattern in enumerate(patterns):
            match = matched(pattern, head.name)
            if match is not None:
                groups.setdefault(match, {})[part] = head
    lacking = {
        filled(into, match): [
            filled(pattern, match) for part, pattern in enumerate(patterns) if part not in heads
        ]
        for match, heads in groups.items()
    }
    _refuse_lacking("concat", lacking)
    lengths = {}
    for match, heads in groups.items():
        parts = [heads[part] for part in range(len(patterns))]
        axes = [axis % len(head.size) if head.size else 0 for head in parts]
        pairs = zip(parts, axes, strict=True)
        lengths[match] = tuple(head.size[at] if at < len(head.size) else 0 for head, at in pairs)
    return lengths


def _counted(plans: Plans, pattern: str, into: str) -> dict[Match, int]:
    """Return how many tensors each stack has; refuse gaps in their numbers."""
    groups: dict[Match, set[int]] = {}
    for head in _tensors(plans):
        match = matched(pattern, head.name)
        if match is not None:
            rest = match._replace(numbers=match.numbers[:-1])
            groups.setdefault(rest, set()).add(match.numbers[-1])
    lacking = {
        filled(into, rest): [
            filled(pattern, numbered(rest, number)) for number in islice(_gaps(numbers), _NAMED)
        ]
        for rest, numbers in groups.items()
    }
    _refuse_lacking("stack", lacking)
    return {rest: len(numbers) for rest, numbers in groups.items()}


def _gaps(numbers: Collection[int]) -> Iterator[int]:
    """Yield the numbers below the largest that are missing; there may be very many."""
    return (number for number in range(max(numbers)) if number not in numbers)


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


def _names(names: Mapping[str, int] | Sequence[str]) -> tuple[Any, ...]:
    """Return the names of parts; anything else than a collection is refused as one of them."""
    single = isinstance(names, str) or not isinstance(names, Iterable)
    return (names,) if single else tuple(names)


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


def _check_lengths(what: str, lengths: object) -> None:
    values = lengths.items() if isinstance(lengths, Mapping) else ()
    for name, length in values:
        if _whole(f"{what}: the length of `{name}`", length) < 1:
            raise ValueError(f"{what}: `{name}` has length {length}; leave it out")


def _check_count(what: str, count: int | None) -> None:
    if count is not None and _whole(f"{what}: count", count) < 1:
        raise ValueError(f"{what}: count must be at least 1, not {count}")


def _resolved(shape: Sizes, before: Sizes) -> Sizes | None:
    """Return a shape without -1; None if it does not fit."""
    numel, rest = math.prod(before), math.prod(n for n in shape if n != -1)
    if -1 not in shape:
        return shape if rest == numel else None
    if not rest or numel % rest:
        return None
    return tuple(numel // rest if n == -1 else n for n in shape)
