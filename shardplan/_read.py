"""Carry out a load plan: alone, or together with other ranks, where one reads and others receive.

In each round (see `shared_rounds`) a rank first makes ready to receive, then reads and sends, then
waits: so ranks never wait in a circle, and the bytes under way are bounded. If a checkpoint is
overwritten meanwhile, reading begins anew (`read_anew`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from shardplan.dist import Comm, LostRanksError, Pending, decode_json, encode_json, exchange
from shardplan.io import (
    BlockSums,
    FormatError,
    LoadError,
    Pool,
    Progress,
    ProgressCallback,
    StoredValue,
    Window,
    box_view,
    empty_tensor,
    flat_memory,
    load_value,
    same_dtype,
    store_values,
    torch,
)
from shardplan.io.execute import Reader, ReadStats
from shardplan.io.formats import open_source
from shardplan.io.stores import Store, StoreError
from shardplan.planning import Issue, LoadItemType, LoadPlan, Metadata, PlanError, itemsize
from shardplan.planning.columns import Ints, ReadItems, distinct, row_tuples
from shardplan.planning.storage import (
    BLOCK_BYTES,
    FAR_GAP,
    Incoming,
    Outgoing,
    ReadRegion,
    Region,
    Round,
    SharedReads,
    ValueRead,
    entries_of,
    find_chunks,
    plan_bytes,
    shared_rounds,
    value_exchange,
    value_reads,
)

from ._report import LOG, place_name

T = TypeVar("T")
ATTEMPTS: Final = 16
"""How often to begin anew with a checkpoint that is overwritten again and again."""
Bytes = npt.NDArray[np.uint8]

ROUND_BYTES: Final = 128 << 20
"""Bytes of the checkpoint that are under way between ranks at a time."""

_STOPPED: Final = (FormatError, LoadError, StoreError)  # raised when files are taken away


@attrs.frozen(eq=False)
class Opened:
    """A checkpoint as one rank has opened it; without a reader, another rank reads for it.

    ``values`` are the non-tensor values by name, if one rank has read them for all.
    """

    metadata: Metadata
    reader: Reader | None
    values: Mapping[str, StoredValue] | None = None

    @property
    def max_gap(self) -> int:
        """The largest gap between two ranges, in bytes, that is read rather than skipped."""
        return FAR_GAP if self.reader is not None and self.reader.store.staging else 0

    def value_bytes(self, name: str) -> int:
        """Return the bytes of a value in a file of its own; 0 if it is kept with the metadata."""
        return 0 if self.reader is None else self.reader.source.value_bytes(name)

    @property
    def block_bytes(self) -> int:
        """The most bytes of a block that was hashed."""
        return BLOCK_BYTES if self.reader is None else self.reader.source.block_bytes

    def files_of(self, items: ReadItems) -> Ints | None:
        """Return the file that each read is of, 0 for values; None if that is not known."""
        known = None if self.reader is None else self.reader.source.file_columns
        rows = np.flatnonzero(items.type == LoadItemType.TENSOR.value)
        if known is None or not len(rows):
            return None
        reads, files = items.take(rows), np.zeros(len(items), np.int64)
        which = known.entry[entries_of(self.metadata, reads)[0]]
        chunk = find_chunks(self.metadata, reads)
        for number in distinct(which).tolist():
            some = which == number
            files[rows[some]] = known.columns[number][chunk[some]]
        return files


@attrs.frozen(eq=False)
class Destinations:
    """The shards that a load fills, by the tensor's name in the state dict and their offset."""

    shards: Mapping[tuple[str, tuple[int, ...]], torch.Tensor]

    def of(self, items: ReadItems) -> Callable[[int], Window]:
        """Return a function from the row of a read to the box of memory that it fills."""
        names, frame, dest = items.names, items.frame, items.dest.tolist()
        anchors = row_tuples(items.dest_anchor, items.dest_ndim)
        offsets = row_tuples(items.dest_offsets, items.dest_ndim)
        lengths = row_tuples(items.dest_lengths, items.dest_ndim)
        read = row_tuples(items.lengths, items.ndim)

        def box(row: int) -> Window:
            shard = self.shards[names[dest[row]], anchors[row]]
            own = None if frame is None else frame.axes[row]
            return Window(box_view(shard, offsets[row], lengths[row]), read[row], own)

        return box


@attrs.frozen
class Outcome:
    """What one rank read: statistics, and the non-tensor values by name in the state dict."""

    stats: ReadStats
    values: Mapping[str, Any]
    sent: int = 0
    received: int = 0


def read_rank(
    reader: Reader,
    plan: LoadPlan,
    into: Destinations,
    *,
    verify: bool = True,
    sums: BlockSums | None = None,
    progress: ProgressCallback | None = None,
) -> Outcome:
    """Read all of one rank's load plan from storage.

    ``sums`` gets the checksums of whole blocks, of chunks that are read in part.
    """
    names = value_reads(plan.items)
    values = reader.values(names, verify=verify)
    stats = values_read(reader, [name for _, name in names], verify=verify)
    counter = Progress(plan_bytes(plan, reader.metadata), progress)
    dest = into.of(plan.items)
    filled = reader.fill(plan.items, dest, verify=verify, sums=sums, progress=counter)
    counter.finish()
    return Outcome(stats + filled, values)


def values_read(reader: Reader, names: Sequence[str], *, verify: bool = True) -> ReadStats:
    """Return what it took to read some values once; those kept with the metadata took nothing.

    Before they are read, ``unverified`` is too large.
    """
    source = reader.source
    sizes = {name: size for name in names if (size := source.value_bytes(name))}
    total = sum(sizes.values())
    checked = sum(size for name, size in sizes.items() if verify and source.has_value_sum(name))
    return ReadStats(total, total, len(sizes), 0, total - checked)


def encode_values(stored: Mapping[str, StoredValue]) -> dict[str, tuple[str, bytes]]:
    """Return stored values as plain data that can be sent."""
    return {  # JSON that is sent as such would arrive frozen
        name: (v.kind, json.dumps(v.data).encode() if v.kind == "inline" else bytes(v.data))
        for name, v in stored.items()
    }


def decode_values(sent: Mapping[str, tuple[Any, bytes]]) -> dict[str, StoredValue]:
    """Undo `encode_values`."""
    return {
        name: StoredValue(kind, json.loads(data) if kind == "inline" else data)
        for name, (kind, data) in sent.items()
    }


def read_shared(
    comm: Comm,
    opened: Opened,
    shared: SharedReads,
    into: Destinations,
    *,
    verify: bool,
    sums: BlockSums,
    progress: ProgressCallback | None,
    place: str,
) -> Outcome:
    """Carry out one rank's part of a load in which ranks read for each other; see `read_rank`.

    If anything but the sending fails here, others still get as many bytes as they wait for. Then
    this raises, and the step that it is part of fails on all ranks. ``place`` names the checkpoint
    in errors.
    """
    attempts, window = _Attempts(), into.of(shared.reads)
    share = _SharedRead(comm, opened, shared, verify, sums, place, attempts, window)
    sizes = {"block_bytes": opened.block_bytes, "max_gap": opened.max_gap}
    rounds = shared_rounds(shared, opened.metadata, comm.rank, **sizes)
    counter = attempts.run(lambda: Progress(rounds.read + rounds.received, progress), Progress(0))
    with leaving(comm, "load"):
        values = share.exchange_values()
        moved = [share.move_tensors(one, counter) for one in rounds.rounds]
    if attempts.error is not None:
        raise attempts.error
    items = shared.reads.take(np.array(rounds.rest, np.int64))  # what no other rank needs
    rest = share.fill(items, lambda row: window(rounds.rest[row]), counter)
    counter.finish()
    sent, received = values.sent + rounds.sent, values.received + rounds.received
    return Outcome(sum([*moved, rest], values.stats), values.values, sent, received)


@contextmanager
def leaving(comm: Comm, what: str) -> Iterator[None]:
    """Leave the comm when an error is raised: others would wait for bytes that never come."""
    try:
        yield
    except LostRanksError:
        raise
    except Exception as error:
        comm.leave(f"left the {what}: {type(error).__name__}: {error}")
        raise


class _Attempts:
    """The work of a rank until its first error; then it only serves other ranks."""

    error: Exception | None = None

    def run(self, work: Callable[[], T], otherwise: T) -> T:
        """Return what ``work`` returns; ``otherwise`` if that raises, or anything has before."""
        if self.error is None:
            try:
                return work()
            except Exception as error:
                self.error = error
        return otherwise


@attrs.frozen(eq=False)
class _SharedRead:
    """One rank's part of a shared load; ``window`` is the memory that a row of it fills."""

    comm: Comm
    opened: Opened
    shared: SharedReads
    verify: bool
    sums: BlockSums
    place: str
    attempts: _Attempts
    window: Callable[[int], Window]

    def exchange_values(self) -> Outcome:
        """Read non-tensor values, send those that others need, and receive others."""
        reader, known, nothing = self.opened.reader, self.opened.values, dict[str, Any]()
        part = value_exchange(self.shared, self.comm.rank, self.opened.value_bytes)
        if reader is None or known is not None:  # one rank has read them for all
            values = self.attempts.run(lambda: self._load(known or nothing, part.wanted), nothing)
            return Outcome(ReadStats(), values)
        pairs = [(name, name) for name in part.read]
        stored = self.attempts.run(
            lambda: store_values(reader.values(pairs, verify=self.verify)), nothing
        )
        messages = {
            target: encode_json(encode_values({n: stored[n] for n in names})) if stored else b""
            for target, names in part.send.items()
        }
        arrived = exchange(self.comm, messages, part.sources)
        for data in filter(None, arrived):
            stored = {**stored, **decode_values(decode_json(data))}
        together = [read for read in part.wanted if read.name in stored]  # all, if no rank failed
        values = self.attempts.run(
            lambda: reader.values(part.alone, verify=self.verify) | self._load(stored, together),
            nothing,
        )
        names = [*(read.name for read in part.alone), *part.read]
        stats = values_read(reader, names, verify=self.verify)
        return Outcome(stats, values, sum(map(len, messages.values())), sum(map(len, arrived)))

    def _load(
        self, stored: Mapping[str, StoredValue], names: Sequence[ValueRead]
    ) -> dict[str, Any]:
        """Make values of what is stored, by name in the state dict; a new one for each name."""
        return {dest: load_value(stored[name], self.place, name) for dest, name in names}

    def move_tensors(self, one: Round, progress: Progress) -> ReadStats:
        """Take part in a round: read, send and receive."""
        incoming, relayed = map(self._expected, (one.incoming, one.relayed))
        sizes = zip(one.reads.lengths.tolist(), one.reads.ndim.tolist(), one.dtypes, strict=True)
        staged = [empty_tensor(lengths[:axes], dtype) for lengths, axes, dtype in sizes]
        stats = self.attempts.run(
            lambda: self.fill(one.reads, lambda row: Window.of(staged[row]), progress), ReadStats()
        )
        held = [_view_of(staged[piece.read], piece) for piece in one.pieces]
        sending = self._sent(one, one.outgoing, held)
        for piece, view in zip(one.pieces, held, strict=True):
            self.attempts.run(partial(self._fill_rows, piece, view), None)
        held += self._arrived(incoming, progress)
        sending += self._sent(one, one.passed_on, held)
        self._arrived(relayed, progress)
        for sent in sending:
            sent.wait()
        return stats

    def _sent(
        self, one: Round, messages: Sequence[Outgoing], held: Sequence[Bytes]
    ) -> list[Pending]:
        """Begin to send messages, each packed once."""
        pending = []
        for message in messages:
            data = _packed([held[number] for number in message.regions], one.starts(message))
            pending += [self.comm.send(target, data) for target in message.targets]
        return pending

    def _expected(self, messages: Sequence[Incoming]) -> list[_Arriving]:
        return [self._expect(message) for message in messages]

    def _arrived(self, messages: Sequence[_Arriving], progress: Progress) -> list[Bytes]:
        """Wait for messages, and copy what they bring to where it belongs; return their regions."""
        regions = []
        for arrived in messages:
            arrived.pending.wait()
            self.attempts.run(partial(self._deliver, arrived, progress), None)
            regions += arrived.regions
        return regions

    def fill(
        self, reads: ReadItems, dest: Callable[[int], Window], progress: Progress
    ) -> ReadStats:
        """Fill memory straight from storage."""
        reader = self.opened.reader
        if reader is None or not len(reads):
            return ReadStats()
        return reader.fill(reads, dest, verify=self.verify, sums=self.sums, progress=progress)

    def _expect(self, message: Incoming) -> _Arriving:
        """Make ready to receive a message: a single region into its place, if that is possible."""
        view, (first, *more) = None, message.regions
        if not more and len(first.rows) == 1 and self.shared.inner(first.rows[0]) is None:
            tensor = self.window(first.rows[0]).tensor
            if tensor is not None and same_dtype(tensor, first.dtype):
                view = flat_memory(tensor)
        staged = np.empty(message.starts[-1] if view is None else 0, np.uint8)
        data = staged if view is None else np.frombuffer(view, np.uint8)
        return _Arriving(self.comm.receive(message.source, data.data), message, data, view is None)

    def _deliver(self, arrived: _Arriving, progress: Progress) -> None:
        """Copy what a message brought to where it belongs, unless it came there."""
        for region, data in zip(arrived.message.regions, arrived.regions, strict=True):
            if arrived.is_staged:
                self._fill_rows(region, data)
            progress.add(region.nbytes)

    def _fill_rows(self, region: Region, data: Bytes) -> None:
        """Copy a region to where this rank needs it."""
        for row in region.rows:
            part = self.shared.inner(row)
            mine = data if part is None else _part_of(data, region, part)
            self.window(row).fill_all(mine, region.dtype)


@attrs.frozen(eq=False)
class _Arriving:
    """A message that is being received, into memory of its own or straight into its place."""

    pending: Pending
    message: Incoming
    data: Bytes
    is_staged: bool

    @property
    def regions(self) -> list[Bytes]:
        """The bytes of each region."""
        pairs = zip(self.message.regions, self.message.starts, strict=False)
        return [self.data[start : start + region.nbytes] for region, start in pairs]


def _part_of(data: Bytes, region: Region, part: tuple[slice, ...]) -> Bytes:
    """Return the bytes of a part of a region."""
    elements = data.view(f"V{itemsize(region.dtype)}").reshape(region.sizes)
    return np.ascontiguousarray(elements[part]).reshape(-1).view(np.uint8)


def _view_of(staged: torch.Tensor, piece: ReadRegion) -> Bytes:
    """Return the bytes of a piece of what was read."""
    view = flat_memory(box_view(staged, piece.offsets, piece.sizes).contiguous())
    assert view is not None
    return np.frombuffer(view, np.uint8)


def _packed(views: Sequence[Bytes], starts: Sequence[int]) -> memoryview:
    """Return a message that holds some pieces, each from its start on."""
    if len(views) == 1:
        return views[0].data
    data = np.empty(starts[-1], np.uint8)
    for view, start in zip(views, starts, strict=False):
        data[start : start + len(view)] = view
    return data.data


# Errors of reading: they name the checkpoint, and say what was changed


def read_anew(open: Callable[[], tuple[Reader, ...]], work: Callable[..., T]) -> T:
    """Open some checkpoints and work on them; if one is overwritten meanwhile, begin anew."""
    for _ in range(ATTEMPTS - 1):
        readers = open()
        try:
            return work(*readers)
        except _STOPPED:
            replaced = next(filter(_was_replaced, readers), None)
            if replaced is None:
                raise
            url = replaced.store.url
            LOG.warning("%s was overwritten while it was read; reading begins anew", url)
    return work(*open())


def is_another(
    store: Store, known: str | None, format: str | None = None, pool: Pool | None = None
) -> bool:
    """Return True if a folder holds another save than the known one."""
    if known is None:
        return False
    try:
        now = open_source(store, format=format, pool=pool).save_id
    except (FormatError, StoreError):
        return False  # it is gone, and nothing is there in its place
    return now != known


def _was_replaced(reader: Reader) -> bool:
    source = reader.source
    return is_another(reader.store, source.save_id, source.format, reader.pool)


@contextmanager
def naming_place(place: object) -> Iterator[None]:
    """Add the name of the checkpoint to errors about it."""
    try:
        yield
    except (FormatError, LoadError, PlanError) as error:
        error.add_note(f"the checkpoint is {place_name(place)}")
        raise


def touching(error: Exception, items: ReadItems, *, together: bool) -> Exception:
    """Return an error that says that any tensor of some reads may be overwritten in part.

    ``together`` adds that other ranks are in the same state.
    """
    tensors = items.type == LoadItemType.TENSOR.value
    keys = [items.names[number] for number in distinct(items.dest[tensors]).tolist()]
    more = ""
    if together:
        more = "; ranks load together: on each of them, any key of the load may be overwritten"
    if isinstance(error, FormatError):
        return FormatError(error.file, f"{error.reason}{more}", touched=keys)
    text = error.args[0] if isinstance(error, LoadError) else f"the load failed: {error}"
    return LoadError(f"{text}{more}", (), keys)


@contextmanager
def plain_errors(reader: Reader) -> Iterator[None]:
    """Drop from errors what means nothing for new memory: keys filled, and how to accept gaps."""
    try:
        yield
    except PlanError as error:
        raise PlanError(map(_without_arguments, error.issues)) from None
    except _STOPPED as error:
        if _was_replaced(reader):
            reason = "it was overwritten while it was open: open it again"
            raise FormatError(reader.store.url, reason) from error
        if isinstance(error, FormatError) and (error.filled or error.touched):
            raise FormatError(error.file, error.reason) from error.__cause__
        if isinstance(error, LoadError):
            raise LoadError(str(error.args[0]), (), ()) from error.__cause__
        raise


def _without_arguments(issue: Issue) -> Issue:
    """Leave out the argument to try, which only `load` has, unless it is a planner."""
    has_prefix = issue.kind == "missing" and issue.summary
    return issue if has_prefix else attrs.evolve(issue, remedy="")
