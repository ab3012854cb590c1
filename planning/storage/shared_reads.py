"""Who reads what, and for whom, when many ranks load together.

1. Each rank sorts its reads into classes, by how their tensors are cut: `wants_of`. Of a small
   chunk it wants all, as reading it costs no more than reading a part.
2. Ranks that want the same of a class are replicas, and form a group: `replica_groups`.
3. Which rank of a group reads which block is a formula of both: `turns_of`. So every rank knows by
   itself what it reads, sends and receives: `shared_by_rule`.
4. Where ranks need the same bytes though their classes differ, the coordinator plans transfers with
   `share_reads`, as long as there are few enough reads: `shared_by_transfers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from ..columns.arrays import Ints, column, group_rows, padded, readonly
from ..columns.reads import ReadItems
from ..metadata import Metadata
from ..plans import LoadPlan
from ..records import LoadItemType
from .blocks import locate_reads
from .wants import Wants, read_widths

RUN_BYTES: Final = 1 << 20
"""Bytes that lie together and that one rank of a group reads, if there are as many."""

MOST_PEERS: Final = 32
"""The largest group whose ranks all send to each other; larger ones pass reads on."""

_VALUE: Final = LoadItemType.BYTE_IO.value


class Turns(NamedTuple):
    """In which round each block is read, and by which member of the group."""

    round: Ints
    member: Ints


def turns_of(nbytes: Ints, members: int, round_bytes: int, run_bytes: int = RUN_BYTES) -> Turns:
    """Return when each block of a group is read, and by which member; blocks are in order of place.

    Rounds take about ``round_bytes`` each. Within a round, members read runs of equal length, of at
    least ``run_bytes``: small blocks that lie together are read together. If a round has fewer
    blocks than members, the next one begins with others.

    >>> turns_of(np.array([4, 4, 4, 4]), 2, 8, 1)
    Turns(round=array([0, 0, 1, 1]), member=array([0, 1, 1, 0]))
    >>> turns_of(np.array([4, 4, 4, 4]), 2, 16, 8).member.tolist()
    [0, 0, 1, 1]
    """
    ends = np.cumsum(nbytes)
    total = int(ends[-1]) if len(ends) else 0
    span = max(-(-total // max(-(-total // round_bytes), 1)), 1)
    middle = ends - (nbytes + 1) // 2
    run = max(-(-span // members), run_bytes)
    number = middle // span
    return Turns(number, (middle % span // run + number) % members)


class Audience(NamedTuple):
    """The ranks that this one sends what it reads, and those that it then passes reads on to."""

    near: tuple[int, ...] = ()
    far: tuple[int, ...] = ()
    everyone: tuple[int, ...] = ()  # who wants it; values go to all of them at once


class Lines(NamedTuple):
    """How the reads of a large group travel: members stand in lines of ``width``.

    Each sends what it reads to its line. Then one member of a line passes all of it on to each
    member of the others, which so connects to few ranks.
    """

    members: int
    width: int

    @classmethod
    def of(cls, members: int, most_peers: int = MOST_PEERS) -> Lines:
        """Make one line of few members, and about as many lines of many as each has members."""
        return cls(members, members if members <= most_peers else math.isqrt(members - 1) + 1)

    def source(self, reader: Ints, member: int) -> Ints:
        """Return the member that gives another one what some readers read.

        >>> Lines.of(10, 4).source(np.arange(10), 3).tolist()  # lines 0 to 3, 4 to 7, 8 to 9
        [0, 1, 2, 3, 7, 7, 7, 7, 9, 9]
        """
        line, width = reader // self.width, self.width
        room = np.minimum(width, self.members - line * width)
        relay = line * width + member % width % room
        return np.where(line == member // width, reader, relay)

    def audience(self, member: int) -> Audience:
        """Return which members one sends what it reads, and which it passes its line's reads on to.

        >>> Lines.of(10, 4).audience(9)
        Audience(near=(8,), far=(1, 3, 5, 7), everyone=(0, 1, 2, 3, 4, 5, 6, 7, 8))
        """
        line, everyone = member // self.width, range(self.members)
        near = tuple(m for m in everyone if m // self.width == line and m != member)
        room = min(self.width, self.members - line * self.width)
        place = member - line * self.width
        far = (m for m in everyone if m // self.width != line and m % self.width % room == place)
        return Audience(near, tuple(far), tuple(m for m in everyone if m != member))


@attrs.frozen(eq=False)
class SharedReads:
    """What one rank reads for itself and for others, and what others read for it.

    Columns have one row per read.
    """

    reads: ReadItems
    offsets: Ints  # where the box begins that travels, relative to the chunk; see `Wants`
    lengths: Ints
    reader: Ints  # the rank that reads it
    source: Ints  # the rank that this one gets it from: the reader, or one that passes it on
    is_near: npt.NDArray[np.bool_]  # whether that is the reader; else it is passed on in a line
    audience: Ints  # a number in `audiences`
    audiences: tuple[Audience, ...]
    own: npt.NDArray[np.bool_]  # whether it fills memory of this rank
    turn: Ints  # the round in which it is read, -1 for none; all ranks order rounds alike

    @property
    def is_value(self) -> npt.NDArray[np.bool_]:
        """Whether each read is of a non-tensor value."""
        is_value: npt.NDArray[np.bool_] = self.reads.type == _VALUE
        return is_value

    def inner(self, row: int) -> tuple[slice, ...] | None:
        """Return which part of the box that travels a read is; None if it is all of it."""
        axes = int(self.reads.ndim[row])
        low = (self.reads.storage_offsets[row] - self.offsets[row])[:axes]
        size = self.reads.lengths[row, :axes]
        if np.array_equal(size, self.lengths[row, :axes]):
            return None
        return tuple(slice(a, a + n) for a, n in zip(low.tolist(), size.tolist(), strict=True))


def shared_by_rule(
    wants: Wants,
    metadata: Metadata,
    rank: int,
    groups: Sequence[Sequence[int]],
    files: Ints | None = None,
    *,
    round_bytes: int,
    block_bytes: int,
    most_peers: int = MOST_PEERS,
) -> SharedReads:
    """Share reads among replicas: each block is read by one of them, and sent to the others.

    Args:
        wants: What this rank wants.
        metadata: The checkpoint.
        rank: The rank.
        groups: The ranks of each class of the reads; see `replica_groups`.
        files: The file of each read, if it is known.
        round_bytes: Bytes of a group that are in memory at a time.
        block_bytes: The most bytes of a block that the checkpoint was hashed with.
        most_peers: The largest group whose ranks all send to each other.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan
    >>> from shardplan.planning.storage import wants_of
    >>> plan = local_plan({"a": TensorSpec((1 << 18,)), "b": TensorSpec((1 << 18,))})
    >>> metadata, block = global_plan([plan])[1], {"block_bytes": 1 << 20}
    >>> wants = wants_of(load_plan(metadata, plan).items, metadata, 2, **block)
    >>> at = {"round_bytes": 1 << 21, **block}
    >>> shared_by_rule(wants, metadata, 5, [range(4, 6)], **at).reader.tolist()
    [4, 5]
    """
    reads = wants.reads
    reader, turn = np.full(len(reads), rank, np.int64), np.full(len(reads), -1, np.int64)
    block = _blocks_by_place(reads, metadata, files, block_bytes)
    boxes = [reads.storage_anchor + wants.offsets, wants.lengths]
    first, box = group_rows([block, *boxes])  # boxes of a block follow one another
    nbytes = wants.lengths[first].prod(axis=1) * read_widths(reads, metadata)[first]
    classes: dict[tuple[int, ...], list[int]] = {}  # of each group
    for which in sorted(range(len(groups)), key=wants.digests.__getitem__):
        classes.setdefault(tuple(groups[which]), []).append(which)
    source, is_near = reader.copy(), np.zeros(len(reads), bool)
    audience, audiences = np.zeros(len(reads), np.int64), [Audience()]
    before = 0  # rounds of other groups
    for group, numbers in classes.items():
        if len(group) < 2:
            continue
        mine = np.flatnonzero(np.isin(wants.of_row[first], numbers))
        number = np.cumsum(np.diff(block[first[mine]], prepend=-1) != 0) - 1
        turns = turns_of(
            np.bincount(number, nbytes[mine]).astype(np.int64), len(group), round_bytes
        )
        of_box = np.zeros(len(first), np.int64)
        of_box[mine] = number
        rows = np.flatnonzero(np.isin(wants.of_row, numbers))
        here, member = of_box[box[rows]], group.index(rank)
        lines, ranks, readers = Lines.of(len(group), most_peers), column(group), turns.member[here]
        reader[rows], source[rows] = ranks[readers], ranks[lines.source(readers, member)]
        is_near[rows] = readers // lines.width == member // lines.width
        turn[rows], audience[rows] = before + turns.round[here], len(audiences)
        places = lines.audience(member)
        audiences.append(Audience(*(tuple(group[place] for place in some) for some in places)))
        before += int(turns.round[-1]) + 1
    return SharedReads(
        reads,
        wants.offsets,
        wants.lengths,
        readonly(reader),
        readonly(source),
        is_near,
        readonly(audience),
        tuple(audiences),
        np.ones(len(reads), bool),
        readonly(turn),
    )


def _blocks_by_place(
    reads: ReadItems, metadata: Metadata, files: Ints | None, block_bytes: int
) -> Ints:
    """Number the blocks that are read as files hold them: widest elements first, then by name."""
    located, width = locate_reads(metadata, reads, block_bytes), read_widths(reads, metadata)
    by_name = metadata.state_dict_metadata.name_order
    file = np.zeros(len(reads), np.int64) if files is None else files
    keys = [file, -width, by_name[located.entry], located.chunk, located.number]
    return group_rows(keys)[1]


def shared_by_transfers(
    plan: LoadPlan, metadata: Metadata, rank: int, *, round_bytes: int
) -> SharedReads:
    """Share reads as the transfers of a plan say, which the coordinator made; see `share_reads`.

    All tensors of the checkpoint are thought to lie end to end, in order of their names, and are
    cut into rounds.
    """
    moves, own = plan.transfers, len(plan.items)
    reads = ReadItems.concat([moves.reads, plan.items])
    targets, to = np.unique(moves.target, return_inverse=True)
    reader = np.concatenate([moves.source, np.full(own, rank, np.int64)])
    return SharedReads(
        reads,
        reads.storage_offsets,
        reads.lengths,
        reader,
        reader,
        np.ones(len(reads), bool),
        np.concatenate([to, np.full(own, len(targets), np.int64)]),
        (*(Audience((int(t),), (), (int(t),)) for t in targets), Audience()),
        np.concatenate([moves.target == rank, np.ones(own, bool)]),
        _rounds_by_name(reads, metadata, round_bytes),
    )


def _rounds_by_name(reads: ReadItems, metadata: Metadata, round_bytes: int) -> Ints:
    """Return the round of each read, by where it lies in the checkpoint."""
    entries, axes = metadata.state_dict_metadata, reads.lengths.shape[1]
    located = locate_reads(metadata, reads)
    shapes = [*(layout.size for layout in entries.layouts), ()]
    sizes = column([math.prod(shape) for shape in shapes])[entries.layout] * entries.itemsize
    by_name = np.argsort(entries.name_order)
    start = np.empty_like(sizes)
    start[by_name] = np.cumsum(sizes[by_name]) - sizes[by_name]
    extent = padded(shapes, 1, axes)[entries.layout[located.entry]]
    offsets = reads.storage_anchor + located.start[:, :axes]
    place = np.zeros(len(reads), np.int64)
    for axis in range(axes):
        place = place * extent[:, axis] + offsets[:, axis]
    rounds: Ints = (start[located.entry] + place * read_widths(reads, metadata)) // round_bytes
    return rounds
