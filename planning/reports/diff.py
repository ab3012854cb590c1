"""What changed? Two plans, the plans of two worlds, or two checkpoints, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Final

import attrs

from ..columns import Columns
from ..items import ReadItem, TensorWriteData, WriteItem
from ..metadata import BytesMetadata, Entries, Metadata, TensorMetadata
from ..reads import Transfer
from ..records import LoadPlan, Plan, SavePlan
from ..sheet import Sheet, Table

__all__ = ["Difference", "PlanDiff", "plan_diff"]

_SHOWN: Final = 12
_WIDE: Final = 60  # characters of a value that are shown


@attrs.frozen
class Difference:
    """One thing that is not the same on both sides.

    Attributes:
        rank: Whose plan it is in; None in metadata.
        part: The field that holds it: ``items``, ``transfers``, ``state_dict_metadata``, … Where
            items are all the same, but in another order, it is ``order``.
        fqn: The name it goes by; empty where a field differs as a whole.
        offset: Where it starts: of a write, in the checkpoint's tensor; of a read, in the state
            dict's. None for what has no place.
        before, after: Both sides; None on the side that lacks it.
    """

    rank: int | None
    part: str
    fqn: str
    offset: tuple[int, ...] | None
    before: Any
    after: Any

    def reverse(self) -> Difference:
        """Return the same difference, seen from the other side."""
        return attrs.evolve(self, before=self.after, after=self.before)


@attrs.frozen(repr=False)
class PlanDiff:
    """What differs between two sides; true if anything does; printed as a table.

    Attributes:
        added: What only the second side has.
        removed: What only the first side has.
        changed: What both have, under the same rank, name and offset, but not the same.
    """

    added: tuple[Difference, ...] = ()
    removed: tuple[Difference, ...] = ()
    changed: tuple[Difference, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def reverse(self) -> PlanDiff:
        """Return what differs when the sides are swapped."""
        sides = (self.removed, self.added, self.changed)
        return PlanDiff(*(tuple(d.reverse() for d in side) for side in sides))

    def __repr__(self) -> str:
        return _sheet(self).text()

    def _repr_html_(self) -> str:
        return _sheet(self).html()


Side = Plan | Metadata | Sequence[SavePlan] | Sequence[LoadPlan]


def plan_diff(a: Side, b: Side) -> PlanDiff:
    """Compare two plans, the plans of all ranks twice, or the metadata of two checkpoints.

    Args:
        a: The first side.
        b: The second side, of the same kind.

    Returns:
        What differs; it is empty, and false, just if the sides are equal.

    >>> from shardplan.planning import TensorSpec, local_plan
    >>> plan = local_plan({"w": TensorSpec((4,)), "b": TensorSpec((2,))})
    >>> bool(plan_diff(plan, plan))
    False
    >>> plan_diff(plan, local_plan({"w": TensorSpec((4,), "float16"), "c": TensorSpec((2,))}))
    1 added, 1 removed, 1 changed
       rank  part   name  offset  before           after
    +  0     items  c     [0]                      float32 [2] 0:2
    -  0     items  b     [0]     float32 [2] 0:2
    ~  0     items  w     [0]     float32 [4] 0:4  float16 [4] 0:4

    Raises:
        TypeError: The sides are not of the same kind.
    """
    if isinstance(a, Metadata) and isinstance(b, Metadata):
        return _collect(_compare_metadata(a, b))
    if isinstance(a, Metadata) or isinstance(b, Metadata):
        raise TypeError("metadata can only be compared with metadata")
    return _collect(_compare_plans(_sequence(a), _sequence(b)))


def _sequence(plans: Plan | Sequence[SavePlan] | Sequence[LoadPlan]) -> Sequence[Plan]:
    return (plans,) if isinstance(plans, (SavePlan, LoadPlan)) else plans


# What was found: "+", "-" or "~", and the difference.
_Found = tuple[str, Difference]


def _collect(found: Iterable[_Found]) -> PlanDiff:
    signs: dict[str, list[Difference]] = {"+": [], "-": [], "~": []}
    for sign, difference in found:
        signs[sign].append(difference)
    return PlanDiff(*(tuple(listed) for listed in signs.values()))


def _compare_plans(a: Sequence[Plan], b: Sequence[Plan]) -> Iterator[_Found]:
    for rank, (old, new) in enumerate(zip_longest(a, b)):
        if old is None or new is None:
            sign = "+" if old is None else "-"
            yield sign, Difference(rank, "plan", "", None, old, new)
            continue
        if type(old) is not type(new):
            kinds = f"a {type(old).__name__} with a {type(new).__name__}"
            raise TypeError(f"cannot compare {kinds} (rank {rank})")
        for field in attrs.fields(type(old)):
            sides = getattr(old, field.name), getattr(new, field.name)
            yield from _compare_fields(rank, field.name, *sides)


def _compare_metadata(a: Metadata, b: Metadata) -> Iterator[_Found]:
    for field in attrs.fields(Metadata):
        old, new = getattr(a, field.name), getattr(b, field.name)
        if field.name != "state_dict_metadata":
            yield from _compare_fields(None, field.name, old, new)
        elif old != new:
            yield from _compare_keyed(None, field.name, _by_name(old), _by_name(new))


def _by_name(entries: Entries) -> dict[_Key, Any]:
    return {((name, None, -1), 0): entry for name, entry in entries.items()}


def _compare_fields(rank: int | None, part: str, a: Any, b: Any) -> Iterator[_Found]:
    """Compare a field: items one by one, anything else as a whole."""
    if a == b:
        return
    if not isinstance(a, Columns):
        yield "~", Difference(rank, part, "", None, a, b)
        return
    found = list(_compare_keyed(rank, part, _keyed(a), _keyed(b)))
    yield from found or [("~", Difference(rank, "order", part, None, a, b))]


_Place = tuple[str, tuple[int, ...] | None, int]
_Key = tuple[_Place, int]


def _keyed(items: Columns[Any]) -> dict[_Key, Any]:
    """Return items by their place, and a number that tells apart those that share one."""
    shared: dict[_Place, list[Any]] = {}
    for item in items:
        shared.setdefault(_place(item), []).append(item)
    return {
        (place, number): item
        for place, group in shared.items()
        for number, item in enumerate(sorted(group, key=repr) if len(group) > 1 else group)
    }


def _place(item: WriteItem | ReadItem | Transfer) -> _Place:
    """Return the name, the offset and the receiving rank (-1: none) by which sides are matched."""
    if isinstance(item, WriteItem):
        return item.index.fqn, item.index.offset, -1
    if isinstance(item, Transfer):
        return (*_place(item.read)[:2], item.target)
    into = item.dest_index
    if into.offset is None:
        return into.fqn, None, -1
    return into.fqn, tuple(a + b for a, b in zip(into.offset, item.dest_offsets, strict=True)), -1


def _compare_keyed(
    rank: int | None, part: str, a: dict[_Key, Any], b: dict[_Key, Any]
) -> Iterator[_Found]:
    for key in sorted(a.keys() | b.keys(), key=_order):
        old, new = a.get(key), b.get(key)
        if old != new:
            sign = "+" if key not in a else "-" if key not in b else "~"
            yield sign, Difference(rank, part, key[0][0], key[0][1], old, new)


def _order(key: _Key) -> tuple[Any, ...]:
    (fqn, offset, target), number = key
    return fqn, offset or (), target, number


def _sheet(diff: PlanDiff) -> Sheet:
    listed = [("+", d) for d in diff.added] + [("-", d) for d in diff.removed]
    listed += [("~", d) for d in diff.changed]
    if not listed:
        return Sheet("No difference")
    counts = (len(diff.added), len(diff.removed), len(diff.changed))
    title = "{:,} added, {:,} removed, {:,} changed".format(*counts)
    head = ("", "rank", "part", "name", "offset", "before", "after")
    rows = [_row(sign, difference) for sign, difference in listed[:_SHOWN]]
    more = len(listed) - _SHOWN
    return Sheet(title, [Table(head, rows)], [f"… {more:,} more"] if more > 0 else [])


def _row(sign: str, found: Difference) -> tuple[str, ...]:
    sides = _text(found.before), _text(found.after)
    if sides[0] == sides[1]:  # they differ in what the short form leaves out
        sides = repr(found.before), repr(found.after)
    if found.part == "order":
        sides = "", "in another order"
    rank = "" if found.rank is None else str(found.rank)
    offset = "" if found.offset is None else str(list(found.offset))
    return sign, rank, found.part, found.fqn, offset, *sides


def _text(value: Any) -> str:
    """Say shortly what is on one side."""
    match value:
        case None:
            return ""
        case WriteItem(tensor_data=None) | BytesMetadata():
            return "value"
        case WriteItem(tensor_data=TensorWriteData(chunk=chunk, properties=kind, size=size)):
            box = ", ".join(f"{o}:{e}" for o, e in zip(chunk.offsets, chunk.ends, strict=True))
            return f"{kind.dtype} {list(size)} {box}".rstrip()
        case TensorMetadata(properties=kind, size=size, chunks=chunks):
            return f"{kind.dtype} {list(size)} {chunks!r}"
        case ReadItem(storage_index=index, storage_offsets=at, lengths=lengths):
            where = "" if index.offset is None else f" {list(index.offset)} at {list(at)}"
            return f"{index.fqn}{where}, {list(lengths)}"
        case Transfer(read=read, source=source, target=target):
            return f"{_text(read)}, rank {source} to {target}"
    text = repr(value)
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}…"
