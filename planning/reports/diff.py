"""What differs between two plans, between the plans of two worlds, or between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import attrs

from ..columns.arrays import Columns
from ..columns.reads import Transfer
from ..metadata import BytesMetadata, Entries, Metadata, TensorMetadata
from ..plans import LoadPlan, Plan, SavePlan
from ..records import ReadItem, TensorWriteData, WriteItem
from ..text import Printed, Sheet, listing

_SHOWN: Final = 12
_WIDE: Final = 60  # characters of a value that are shown


@attrs.frozen
class Difference:
    """One thing that is not the same on both sides."""

    rank: int | None  # whose plan it is in; None in metadata
    part: str  # the field that holds it; `order` if the same items are in another order
    fqn: str  # its name; empty if a field differs as a whole
    # Where it starts: of a write, in the checkpoint's tensor; of a read, in the state dict's.
    offset: tuple[int, ...] | None
    before: Any  # both sides; None on the side that lacks it
    after: Any

    def reverse(self) -> Difference:
        """Return the same difference, seen from the other side."""
        return attrs.evolve(self, before=self.after, after=self.before)


@attrs.frozen(repr=False)
class PlanDiff(Printed):
    """What differs between two sides; true if anything does; printed as a table."""

    added: tuple[Difference, ...] = ()  # what only the second side has
    removed: tuple[Difference, ...] = ()  # what only the first side has
    changed: tuple[Difference, ...] = ()  # what differs under the same rank, name and offset

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def reverse(self) -> PlanDiff:
        """Return what differs when the sides are swapped."""
        sides = (self.removed, self.added, self.changed)
        return PlanDiff(*(tuple(d.reverse() for d in side) for side in sides))

    @property
    def _sheet(self) -> Sheet:
        if not self:
            return Sheet("No difference")
        signs = {"+": self.added, "-": self.removed, "~": self.changed}
        rows = [(sign, difference) for sign, some in signs.items() for difference in some]
        title = "{:,} added, {:,} removed, {:,} changed".format(*map(len, signs.values()))
        head = ("", "rank", "part", "name", "offset", "before", "after")
        return listing(title, head, [_row(*row) for row in rows[:_SHOWN]], len(rows))


Side = Plan | Metadata | Sequence[SavePlan] | Sequence[LoadPlan]


def plan_diff(a: Side, b: Side) -> PlanDiff:
    """Compare two plans, the plans of all ranks twice, or the metadata of two checkpoints.

    The result is false just if the sides are equal.

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
    if isinstance(a, Metadata) or isinstance(b, Metadata):
        if not (isinstance(a, Metadata) and isinstance(b, Metadata)):
            raise TypeError("metadata can only be compared with metadata")
        found = list(_fields(None, a, b))
    else:
        pairs = zip_longest(*((s,) if isinstance(s, (SavePlan, LoadPlan)) else s for s in (a, b)))
        found = [pair for rank, sides in enumerate(pairs) for pair in _plans(rank, *sides)]
    return PlanDiff(*(tuple(d for sign, d in found if sign == s) for s in "+-~"))


def _plans(rank: int, a: Plan | None, b: Plan | None) -> Iterator[tuple[str, Difference]]:
    """Yield what differs in the plans of one rank: "+", "-" or "~", and the difference."""
    if a is None or b is None:
        yield "+" if a is None else "-", Difference(rank, "plan", "", None, a, b)
        return
    if type(a) is not type(b):
        kinds = f"a {type(a).__name__} with a {type(b).__name__}"
        raise TypeError(f"cannot compare {kinds} (rank {rank})")
    yield from _fields(rank, a, b)


def _fields(rank: int | None, a: Any, b: Any) -> Iterator[tuple[str, Difference]]:
    """Compare two records field by field: items and entries one by one, others as a whole."""
    for part in (field.name for field in attrs.fields(type(a)) if field.eq):
        old, new = getattr(a, part), getattr(b, part)
        if old == new:
            continue
        sides = _keyed(old), _keyed(new)
        for key in sorted(sides[0].keys() | sides[1].keys()):
            before, after = (side.get(key) for side in sides)
            if before != after:
                sign = "+" if key not in sides[0] else "-" if key not in sides[1] else "~"
                offset = key.offset if key.has_offset else None
                yield sign, Difference(rank, part, key.fqn, offset, before, after)
        if sides[0] == sides[1]:
            yield "~", Difference(rank, "order", part, None, old, new)


class _Key(NamedTuple):
    """What matches an item with one of the other side; sorted in this order."""

    fqn: str = ""
    offset: tuple[int, ...] = ()
    has_offset: bool = False
    target: int = -1  # the receiving rank
    number: int = 0  # of items that share all of the above


def _keyed(value: Any) -> Mapping[_Key, Any]:
    """Return the parts of a field by what matches them with those of the other side."""
    if isinstance(value, Entries):
        return {_Key(name): entry for name, entry in value.items()}
    if not isinstance(value, Columns):
        return {_Key(): value}
    shared: dict[_Key, list[Any]] = {}
    for item in value:
        shared.setdefault(_key(item), []).append(item)
    return {
        key._replace(number=number): item
        for key, group in shared.items()
        for number, item in enumerate(sorted(group, key=repr) if len(group) > 1 else group)
    }


def _key(item: WriteItem | ReadItem | Transfer) -> _Key:
    if isinstance(item, Transfer):
        return _key(item.read)._replace(target=item.target)
    if isinstance(item, WriteItem):
        return _Key(item.index.fqn, item.index.offset or (), item.index.offset is not None)
    into = item.dest_index
    at = zip(into.offset or (), item.dest_offsets, strict=into.offset is not None)
    return _Key(into.fqn, tuple(a + b for a, b in at), into.offset is not None)


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
    """Describe one side briefly."""
    match value:
        case None:
            return ""
        case WriteItem(tensor_data=None) | BytesMetadata():
            return "value"
        case WriteItem(tensor_data=TensorWriteData(chunk=chunk, properties=kind, size=size)):
            return f"{kind.dtype} {list(size)} {chunk.text}".rstrip()
        case TensorMetadata(properties=kind, size=size, chunks=chunks):
            return f"{kind.dtype} {list(size)} {chunks!r}"
        case ReadItem(storage_index=index, storage_offsets=at, lengths=lengths):
            where = "" if index.offset is None else f" {list(index.offset)} at {list(at)}"
            return f"{index.fqn}{where}, {list(lengths)}"
        case Transfer(read=read, source=source, target=target):
            return f"{_text(read)}, rank {source} to {target}"
    text = repr(value)
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}…"
