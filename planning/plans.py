"""SavePlan and LoadPlan: what one rank writes, and what one rank reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs

from .columns.items import WriteItems
from .columns.reads import ReadItems, Transfers
from .frozen import freeze
from .records import KeyReport, LoadItemType, ReadItem, Transfer, WriteItem
from .text import Printed, Sheet, counted, human_bytes, listing

__all__ = ["LoadPlan", "Plan", "SavePlan"]

_SHOWN: Final = 12


def _write_items(items: Iterable[WriteItem]) -> WriteItems:
    return WriteItems.of(items)


def _held_items(items: Iterable[WriteItem] | None) -> WriteItems | None:
    return None if items is None else WriteItems.of(items)


def _read_items(items: Iterable[ReadItem]) -> ReadItems:
    return ReadItems.of(items)


def _transfers(transfers: Iterable[Transfer]) -> Transfers:
    return Transfers.of(transfers)


def _no_transfers() -> Transfers:
    return Transfers.of(())


@attrs.frozen(repr=False)
class SavePlan(Printed):
    """What one rank holds, or, after `global_plan`, what it writes.

    Where a plan comes from (its rank, the number of ranks, what was held before any pass) takes no
    part in ``==`` and ``hash``.

    Attributes:
        items: An immutable sequence of `WriteItem`, given as any iterable of them.
        storage_data: What storage adds for itself, frozen.
        planner_data: What planners add for themselves, frozen. `local_plan` puts the nested keys'
            paths there, under ``"paths"``, and the names of empty dicts, under ``"empty"``.
        rank: Whose plan this is: its place among the ranks that save or load. None if unknown.
        world_size: How many ranks there are. None if unknown.
        held: The items that `local_plan` made, before any pass: what must be saved or filled. None
            if unknown: then it is ``items``.
    """

    items: WriteItems = attrs.field(converter=_write_items)
    storage_data: Any = attrs.field(default=None, converter=freeze)
    planner_data: Any = attrs.field(default=None, converter=freeze)
    rank: int | None = attrs.field(default=None, eq=False)
    world_size: int | None = attrs.field(default=None, eq=False)
    held: WriteItems | None = attrs.field(default=None, eq=False, converter=_held_items)

    @property
    def holds(self) -> WriteItems:
        """What the rank holds, whatever passes made of it."""
        return self.items if self.held is None else self.held

    def following(self, before: SavePlan) -> SavePlan:
        """Return this plan with all that no pass changes, as it was in the plan ``before``.

        >>> plan = SavePlan([], rank=1, world_size=4)
        >>> SavePlan([]).following(plan).rank
        1
        """
        held = None if self.items is before.holds and before.held is None else before.holds
        origin = (before.rank, before.world_size)
        if self.held is held and (self.rank, self.world_size) == origin:
            return self
        return attrs.evolve(self, rank=origin[0], world_size=origin[1], held=held)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks in the checkpoint."""
        return int(self.items.nbytes.sum())

    @property
    def _sheet(self) -> Sheet:
        rows = [_write_row(item) for item in self.items[:_SHOWN]]
        title = f"SavePlan: {counted(len(self.items), 'item')}, {human_bytes(self.nbytes)}"
        return listing(title, ("name", "type", "dtype", "shape", "box"), rows, len(self.items))


@attrs.frozen(repr=False)
class LoadPlan(Printed):
    """What one rank reads.

    Attributes:
        items: An immutable sequence of `ReadItem`, given as any iterable of them.
        storage_data: What storage adds for itself, frozen.
        planner_data: What planners add for themselves, frozen.
        report: How the state dict and the checkpoint agree.
        transfers: What this rank reads for others, and others for it, beside ``items``: an
            immutable sequence of `Transfer`.
        rank, world_size: As in `SavePlan`; they take no part in ``==`` and ``hash``.
    """

    items: ReadItems = attrs.field(converter=_read_items)
    storage_data: Any = attrs.field(default=None, converter=freeze)
    planner_data: Any = attrs.field(default=None, converter=freeze)
    report: KeyReport = attrs.field(factory=KeyReport)
    transfers: Transfers = attrs.field(factory=_no_transfers, converter=_transfers)
    rank: int | None = attrs.field(default=None, eq=False)
    world_size: int | None = attrs.field(default=None, eq=False)

    def following(self, before: LoadPlan) -> LoadPlan:
        """Return this plan with the rank and world size of the plan ``before``."""
        if (self.rank, self.world_size) == (before.rank, before.world_size):
            return self
        return attrs.evolve(self, rank=before.rank, world_size=before.world_size)

    @property
    def _sheet(self) -> Sheet:
        rows = [_read_row(item) for item in self.items[:_SHOWN]]
        keys = self.report
        elements = int(self.items.numel.sum())
        title = (
            f"LoadPlan: {counted(len(self.items), 'read')}, {counted(elements, 'element')}; "
            f"{len(keys.missing):,} missing, {len(keys.unexpected):,} unexpected, "
            f"{len(keys.mismatched):,} mismatched; {len(self.transfers):,} transfers"
        )
        head = ("name", "saved chunk", "at", "into", "at", "lengths")
        return listing(title, head, rows, len(self.items))


Plan = SavePlan | LoadPlan


def _write_row(item: WriteItem) -> tuple[str, ...]:
    name = item.index.fqn
    if item.source.fqn != name:
        name = f"{name} ← {item.source.fqn}"
    data = item.tensor_data
    if data is None:
        return name, item.type.name, "", "", ""
    box = ", ".join(f"{o}:{e}" for o, e in zip(data.chunk.offsets, data.chunk.ends, strict=True))
    return name, item.type.name, data.properties.dtype, str(list(data.size)), f"[{box}]"


def _read_row(item: ReadItem) -> tuple[str, ...]:
    source, dest = item.storage_index, item.dest_index
    name = source.fqn if source.fqn == dest.fqn else f"{source.fqn} → {dest.fqn}"
    if item.type is LoadItemType.BYTE_IO:
        return name, "value", "", "", "", ""
    boxes = (source.offset, item.storage_offsets, dest.offset, item.dest_offsets, item.lengths)
    return name, *(str(list(box or ())) for box in boxes)
