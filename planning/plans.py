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

_SHOWN: Final = 12


def _write_items(items: Iterable[WriteItem]) -> WriteItems:
    return WriteItems.of(items)


def _held_items(items: Iterable[WriteItem] | None) -> WriteItems | None:
    return None if items is None else WriteItems.of(items)


def _read_items(items: Iterable[ReadItem]) -> ReadItems:
    return ReadItems.of(items)


def _transfers(transfers: Iterable[Transfer]) -> Transfers:
    return Transfers.of(transfers)


@attrs.frozen(repr=False)
class SavePlan(Printed):
    """What one rank holds, or, after `global_plan`, what it writes.

    ``==`` and ``hash`` ignore a plan's origin: ``rank``, ``world_size``, ``held``, ``left_out``.

    Attributes:
        items: An immutable sequence of `WriteItem`, given as any iterable.
        storage_data: Data of the storage layer, frozen.
        planner_data: Data of planners, frozen. `local_plan` puts the paths of nested keys there,
            under ``"paths"``, and the names of empty dicts, under ``"empty"``.
        rank: The plan's rank among the ranks that save or load; None if unknown.
        world_size: The number of ranks; None if unknown.
        held: The items before any pass, all of which must be saved or filled; None means ``items``.
        left_out: Boxes of ``held`` that passes leave out of tensors whose other parts they move,
            as `trim` does: items as in ``held``, so in the state dict's frame; None if there are
            none.
    """

    items: WriteItems = attrs.field(converter=_write_items)
    storage_data: Any = attrs.field(default=None, converter=freeze)
    planner_data: Any = attrs.field(default=None, converter=freeze)
    rank: int | None = attrs.field(default=None, eq=False)
    world_size: int | None = attrs.field(default=None, eq=False)
    held: WriteItems | None = attrs.field(default=None, eq=False, converter=_held_items)
    left_out: WriteItems | None = attrs.field(default=None, eq=False, converter=_held_items)

    @property
    def holds(self) -> WriteItems:
        """What the rank holds, before any pass."""
        return self.items if self.held is None else self.held

    def following(self, before: SavePlan) -> SavePlan:
        """Return this plan with the rank, world size and held items of the plan ``before``.

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
        items: An immutable sequence of `ReadItem`, given as any iterable.
        storage_data: Data of the storage layer, frozen.
        planner_data: Data of planners, frozen.
        report: How the state dict and the checkpoint agree.
        transfers: What this rank reads for others and others for it, in addition to ``items``: an
            immutable sequence of `Transfer`.
        rank, world_size: As in `SavePlan`; ignored by ``==`` and ``hash``.
    """

    items: ReadItems = attrs.field(converter=_read_items)
    storage_data: Any = attrs.field(default=None, converter=freeze)
    planner_data: Any = attrs.field(default=None, converter=freeze)
    report: KeyReport = attrs.field(factory=KeyReport)
    transfers: Transfers = attrs.field(factory=lambda: Transfers.of(()), converter=_transfers)
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
        elements = self.items.volume()
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
    if item.fill is not None:
        name = f"{name} ← {item.fill}"
    elif item.source.fqn != name or item.source_box is not None:
        box = "" if item.source_box is None else f"[{item.source_box.text}]"
        name = f"{name} ← {item.source.fqn}{box}"
    data = item.tensor_data
    if data is None:
        return name, item.type.name, "", "", ""
    shape, box = str(list(data.size)), f"[{data.chunk.text}]"
    return name, item.type.name, data.properties.dtype, shape, box


def _read_row(item: ReadItem) -> tuple[str, ...]:
    source, dest = item.storage_index, item.dest_index
    name = source.fqn if source.fqn == dest.fqn else f"{source.fqn} → {dest.fqn}"
    if item.type is LoadItemType.BYTE_IO:
        return name, "value", "", "", "", ""
    boxes = (source.offset, item.storage_offsets, dest.offset, item.dest_offsets, item.lengths)
    cells = [str(list(box or ())) for box in boxes]
    if item.dest_lengths is not None:
        cells[-1] += f" → {list(item.dest_lengths)}"
    return name, *cells
