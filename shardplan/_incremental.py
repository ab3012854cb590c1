"""What an incremental save shares with an earlier checkpoint instead of writing it.

1. Each rank hashes the chunks that the earlier checkpoint has, too, and compares checksums.
2. The coordinator chooses the files in which enough is unchanged (`files_to_share`), and gives them
   a second name in the new checkpoint's folder. So each checkpoint has all of its files, and
   removing one harms no other.
3. Each rank writes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import attrs

from shardplan.dist import Comm, Turn, take_step
from shardplan.io import FormatError, Pool, StoreError, combine, default_pool, hash_views
from shardplan.io.execute import collect
from shardplan.io.formats import SharedFiles, Source, open_source
from shardplan.io.formats.native import NativeSource
from shardplan.io.stores import Store
from shardplan.planning import SavePlan, TensorMetadata, flatten
from shardplan.planning.columns import Ints, column
from shardplan.planning.storage import comparable, files_to_share, without_shared

_OWN: Final = "safetensors"


@attrs.frozen(eq=False)
class Base:
    """The earlier checkpoint that a save is based on.

    Attributes:
        choose: Called on the coordinator, returns its name.
        open: Called on every rank with that name, opens it; None if there is nothing to share.
    """

    choose: Callable[[], str]
    open: Callable[[str], NativeSource | None]


def base_of(path: Any, format: str) -> Base | None:
    """Return what the ``base`` of a save stands for."""
    if path is None:
        return None
    if format != _OWN:
        raise ValueError(f"base is for checkpoints of our own format, not for {format!r}")
    if isinstance(path, Base):
        return path

    def opened(_: str) -> NativeSource:
        source = open_source(path)
        if source.format != _OWN:
            raise ValueError(f"base must be a checkpoint of our own format, not {source.format!r}")
        return cast("NativeSource", source)

    return Base(lambda: "", opened)


def run_base(store: Store, newest: Callable[[], str]) -> Base:
    """Return the newest checkpoint of a run as a base; it may be removed meanwhile."""

    def opened(name: str) -> NativeSource | None:
        with suppress(FormatError, StoreError):
            source = open_source(store.folder(name)) if name else None
            is_own = source is not None and source.format == _OWN
            return cast("NativeSource", source) if is_own else None
        return None

    return Base(newest, opened)


@attrs.frozen(eq=False)
class Sharing:
    """What a save shares.

    Attributes:
        chunks: By tensor, the numbers of this rank's chunks that are not written.
        files: What all ranks share; None except on the coordinator, or if that is nothing.
        made: The names that were given to files for it, on the coordinator.
    """

    chunks: Mapping[str, Sequence[int]]
    files: SharedFiles | None = None
    made: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """How many bytes all ranks together need not write."""
        if self.files is None:
            return 0
        return sum(
            int(_chunk_bytes(self.files.source, name)[list(numbers)].sum())
            for name, numbers in self.files.chunks.items()
        )

    def left_of(self, plan: SavePlan) -> SavePlan:
        """Return what this rank has to write."""
        return without_shared(plan, self.chunks)

    def left_of_all(self, plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
        """Return what all ranks have to write."""
        if self.files is None:
            return plans
        return [without_shared(plan, self.files.chunks) for plan in plans]

    def undo(self, store: Store) -> None:
        """Remove the names that were given to files, after a save that surely failed."""
        with suppress(Exception):
            store.delete(self.made)


NOTHING_SHARED: Final = Sharing({})


def share(
    comm: Comm, source: NativeSource | None, state: Mapping[Any, Any], plan: SavePlan, store: Store
) -> Sharing:
    """Find what is unchanged since an earlier checkpoint, and share the files that have it.

    A rank that has opened another save than the coordinator shares nothing.
    """
    own_id = "" if source is None else source.save_id

    def compare() -> Turn[dict[str, list[int]]]:
        found = {} if source is None else unchanged_chunks(source, state, plan, default_pool())
        return Turn(found, (own_id, found))

    def choose(ranks: Sequence[Any]) -> Turn[Sharing]:
        merged: dict[str, list[int]] = {}
        for found in (found for save_id, found in ranks if save_id == own_id):
            for name, numbers in found.items():
                merged.setdefault(name, []).extend(numbers)
        sharing = _shared(source, merged, store)
        numbers = [] if sharing.files is None else sorted(sharing.files.unused)
        return Turn(sharing, (own_id, numbers))

    done = take_step(comm, "compare with the earlier checkpoint", compare, choose)
    save_id, shared = done.reply
    if source is None or save_id != own_id:
        return NOTHING_SHARED
    mine = _in_files(source, done.mine, set(shared))
    return attrs.evolve(done.whole or NOTHING_SHARED, chunks=mine)


def unchanged_chunks(
    source: NativeSource, state: Mapping[Any, Any], plan: SavePlan, pool: Pool
) -> dict[str, list[int]]:
    """Return the chunks of a plan that are as an earlier checkpoint has them, by tensor.

    If that cannot be read any more, nothing counts as unchanged.
    """
    rows = column([*comparable(plan, source.metadata)])
    plan = attrs.evolve(plan, items=plan.items.take(rows))
    pieces, _, _ = collect(flatten(state)[0], plan)
    keys = {row: key for row, key in comparable(plan, source.metadata).items() if row in pieces}
    try:
        sums = source.chunk_sums([*keys.values()]) if keys else []
    except (FormatError, StoreError):
        return {}

    def own(row: int) -> int:
        return combine([hash_views([block]) for block in pieces[row].blocks(source.block_bytes)])

    found: dict[str, list[int]] = {}
    for (name, number), known, mine in zip(keys.values(), sums, pool.map(own, keys), strict=True):
        if known == mine:
            found.setdefault(name, []).append(number)
    return found


def _shared(
    source: NativeSource | None, unchanged: Mapping[str, Sequence[int]], store: Store
) -> Sharing:
    """Choose files to share, and give them a name in the new checkpoint's folder."""
    if source is None:
        return NOTHING_SHARED
    files = source.manifest.files
    chosen = files_to_share(
        unchanged,
        {name: source.manifest.files_of(name) for name in unchanged},
        {name: _chunk_bytes(source, name) for name in unchanged},
        files.sizes - files.headers,
    )
    made, given = list[str](), dict[int, int]()
    for number, unused in chosen.items():
        name = files.names[number]
        if number in files.tables:
            continue  # its checksums are in a file of their own
        is_new = not store.exists(name)
        if store.share(source.store, name):
            given[number] = unused
            made += [name] if is_new else []
    if not given:
        return NOTHING_SHARED
    chunks = _in_files(source, unchanged, given.keys())
    return Sharing({}, SharedFiles(source, given, chunks), tuple(made))


def _in_files(
    source: NativeSource, chunks: Mapping[str, Sequence[int]], files: Collection[int]
) -> dict[str, list[int]]:
    """Return those of some chunks that lie in some files."""
    found: dict[str, list[int]] = {}
    for name, numbers in chunks.items():
        place = source.manifest.files_of(name)
        kept = [number for number in numbers if int(place[number]) in files]
        if kept:
            found[name] = kept
    return found


def _chunk_bytes(source: Source, name: str) -> Ints:
    entry = source.metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorMetadata)
    nbytes: Ints = entry.chunks.sizes.prod(axis=1) * entry.properties.itemsize
    return nbytes
