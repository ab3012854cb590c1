"""Safetensors files as Hugging Face tools want them: whole tensors, sharded by size, an index.

Several ranks write the same files, each its ranges of them, into a store whose files can be shared:
the files follow from the metadata, so one rank makes them, with headers and in full size, and sends
the others where tensors begin (`lay_out`). Elsewhere one process writes a file from end to end.

A model that fits into one file becomes ``model.safetensors``; a larger one becomes
``model-00001-of-00003.safetensors`` and so on, with ``model.safetensors.index.json``.

Commit. Files are written under names that carry the save id. Several files count only together with
the index, which is written last and replaced atomically; until then their headers say that they are
not a checkpoint. They get the usual names just before, if these are free and the store can rename;
else they keep their own, so that an older checkpoint stays whole until the new index is there. A
single file is renamed at the commit; in a store that cannot, it appears when it is complete.

Readers prefer ``model.safetensors`` to an index: where an older checkpoint was that file, it is its
removal that shows the new one. Files beside tensors are put there just before the commit if they
are new, and just after it if they replace others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Final

import attrs

from shardplan.planning import CodecError, RefusedError, SavePlan, flatten
from shardplan.planning.storage import (
    BLOCK_BYTES,
    MAX_SHARD_SIZE,
    FileTensor,
    SharedPlan,
    Spot,
    assign_shards,
    boxes_of,
    common_ties,
    lay_out_files,
    parse_size,
    place_tensors,
    refuse_split,
    shards_of,
    shared_plan,
    widest_first,
)

from ...errors import ExistsError, FormatError, ValueRefusedError
from ...execute.commit import (
    FolderWriter,
    put_file,
    put_in_place,
    remove,
    take_name,
    unsure_commit,
    write_all,
)
from ...execute.copying import STAGED, Content, FileContents, literal, threads_for, write_file
from ...execute.pieces import Piece, blocks_of, collect, joined_pieces, tied_pieces, tied_tensors
from ...pool import Progress
from ...stores.base import Store
from ...stores.local_files import TEMPORARY
from ..base import CommitJob, ExtraFiles, Part, WriteJob, check_size
from ..headers import entry_text, file_entry, framed_entries, kind_of_entry, refused_name
from .companions import read_extra
from .source import INDEX, OWN_NAME, PART_OF, RESERVED, SINGLE, TIED, read_index, uncommitted

_STRAY: Final = re.compile(rf"model\.safetensors\.[0-9a-f]+{re.escape(TEMPORARY)}")


@attrs.frozen
class _SharedFiles:
    """Files that ranks write together, and where each tensor begins."""

    names: tuple[str, ...]
    heads: tuple[int, ...]  # how many bytes the header of each has
    nbytes: int  # of the tensors of all files
    spots: Mapping[str, Spot]

    def encode(self) -> bytes:
        """Return it as bytes."""
        return json.dumps(attrs.asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> _SharedFiles:
        """Return what `encode` made bytes of."""
        found = json.loads(data)
        spots = {name: Spot(**spot) for name, spot in found["spots"].items()}
        return cls(tuple(found["names"]), tuple(found["heads"]), found["nbytes"], spots)


@attrs.frozen(eq=False)
class _File:
    """One file to write from end to end."""

    name: str
    pieces: Sequence[Piece]
    header: bytes

    @property
    def size(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)

    def write(self, store: Store, threads: int) -> None:
        contents = FileContents(
            lambda local: [literal(self.header), *map(Content, blocks_of(self.pieces, local))],
            threads,
        )
        write_file(store, self.name, contents, nbytes=self.size, atomic=self.name == SINGLE)


class HfWriter(FolderWriter):
    """Writes Hugging Face checkpoints.

    Args:
        max_shard_size: How many bytes of tensors a file holds, as a number or as ``"5GB"``.
        leave_out: Whether non-tensor values are left out; else they are refused.
        extra: Files to put beside the tensors; later ones count before earlier ones.
        tied: Names that share another's elements, and those others.
        remarks: What files say of themselves, by key.
    """

    format = "hf"
    shares_files = True

    def __init__(
        self,
        *,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        leave_out: bool = False,
        extra: Sequence[ExtraFiles] = (),
        tied: Mapping[str, str] | None = None,
        remarks: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.max_shard_size, self.leave_out = parse_size(max_shard_size), leave_out
        self._extra, self._tied, self._remarks = tuple(extra), tied or {}, remarks or {}

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a checkpoint is; see `Writer.refuse`."""
        if store.url.endswith(".safetensors"):
            raise ValueError(f"an `hf` checkpoint is a folder; {store.url} is the name of a file")
        read_extra(self._extra)
        super().refuse(store, overwrite)

    def carrying(self, tied: Mapping[str, str], remarks: Mapping[str, str]) -> HfWriter:
        """Return a writer that stores tied names once, keeps remarks, and leaves out values."""
        return self._with(leave_out=True, tied=tied, remarks=remarks)

    def with_files(self, files: ExtraFiles) -> HfWriter:
        """Return a writer that puts files beside the tensors; see `Writer.with_files`."""
        return self._with(extra=(files, *self._extra))

    def _with(self, **changes: Any) -> HfWriter:
        options: dict[str, Any] = {
            "max_shard_size": self.max_shard_size,
            "leave_out": self.leave_out,
            "extra": self._extra,
            "tied": self._tied,
            "remarks": self._remarks,
        }
        return HfWriter(**options | changes)

    def extra_names(self) -> tuple[str, ...]:
        """Name the files beside the tensors; see `Writer.extra_names`."""
        return tuple(sorted(read_extra(self._extra)))

    def write_order(self, plan: SavePlan, rank: int) -> Iterable[int]:
        """Return the widest elements first, then by name; see `Writer.write_order`."""
        order: list[int] = widest_first(plan.items).tolist()
        return order

    def write(self, job: WriteJob) -> Part:
        """Write one rank's files, or its ranges of shared ones; see `Writer.write`.

        Without shared files, several ranks need plans that `number_shards` has numbered.
        """
        if job.layout is not None:
            return self._write_ranges(job, _SharedFiles.decode(job.layout))
        plan, store, save_id = job.plan, job.store, job.save_id
        shards = shards_of(plan)
        if shards is None:
            refuse_split((plan,))
            if job.rank:
                raise RefusedError(
                    "several ranks write an `hf` checkpoint only from plans that `number_shards` "
                    "has numbered"
                )
        pieces, ties = self._collect(job.sd, plan, job.progress)
        if shards is None:
            sizes = {name: pieces[name].nbytes for name in sorted(pieces)}
            (shards,) = assign_shards([sizes], self.max_shard_size)
        own = shards.count > 1 or store.can_rename
        files = []
        for number, held in enumerate(shards.names, shards.first):
            name = _name(number, shards.count)
            name = _own_name(name, save_id) if own else name
            kept = (FileTensor(n, pieces[n].dtype, pieces[n].shape) for n in held if n in pieces)
            tensors = place_tensors(kept)
            header = self._header(name, tensors, ties, save_id if shards.count > 1 else None)
            files.append(_File(name, [pieces[tensor.name] for tensor in tensors], header))
        threads, cost = threads_for(job.pool, len(files)), STAGED + store.staging
        write = partial(_File.write, store=store, threads=threads)
        if own:
            write_all(job, {file.name: file for file in files}, write, cost)
        else:  # in place at once; if it fails, an older checkpoint stays
            job.pool.map(write, files, nbytes=cost)
        weights = {piece.name: file.name for file in files for piece in file.pieces}
        nbytes = sum(piece.nbytes for file in files for piece in file.pieces)
        report = _report([file.name for file in files], weights, nbytes)
        return Part(len(files), sum(file.size for file in files), report)

    def describe(self, job: WriteJob) -> bytes:
        """Return which tensors of a rank are the same memory as others; see `Writer.describe`."""
        flat = flatten(job.sd)[0]
        self._pieces(flat, job.plan, None)
        ties = tied_tensors(flat) if job.plan.items.frame is None else {}
        return json.dumps(ties, separators=(",", ":")).encode()

    def lay_out(self, job: CommitJob) -> bytes:
        """Make files with their headers, in full size; see `Writer.lay_out`."""
        held = [json.loads(report) for report in job.reports]
        ties = common_ties(job.metadata, job.plans, held, RESERVED)
        layout = lay_out_files(job.metadata, self.max_shard_size, ties)
        names = tuple(_own_name(_name(n, len(layout)), job.save_id) for n, _ in enumerate(layout))
        save_id = job.save_id if len(layout) > 1 else None
        heads = [self._header(*one, ties, save_id) for one in zip(names, layout, strict=True)]
        sizes = [max((tensor.end for tensor in tensors), default=0) for tensors in layout]
        spots = {
            tensor.name: Spot(number, len(head) + tensor.begin)
            for number, (head, tensors) in enumerate(zip(heads, layout, strict=True))
            for tensor in tensors
        }
        files = _SharedFiles(names, tuple(map(len, heads)), sum(sizes), spots).encode()
        try:
            for name, head, size in zip(names, heads, sizes, strict=True):
                job.store.make_file(name, head, len(head) + size)
            job.store.sync()
        except BaseException:
            self.clear(job.store, job.save_id)
            raise
        return files

    def clear(self, store: Store, save_id: str) -> None:
        """Remove the files of a save that was not committed; see `Writer.clear`."""
        if save_id not in self.unsure:
            with suppress(Exception):
                found = set(store.list(recursive=False)) - _files_of(store)
                own = (name for name in found if _STRAY.fullmatch(name) or OWN_NAME.fullmatch(name))
                store.delete(name for name in own if save_id in name)

    def _write_ranges(self, job: WriteJob, files: _SharedFiles) -> Part:
        """Write one rank's ranges of shared files, which belong to the coordinator's part."""
        pieces = self._pieces(flatten(job.sd)[0], job.plan, job.progress)
        plan = shared_plan(job.plan, files.spots, job.rank)

        def write(number: int) -> int:
            ranges = _ranges_of(plan, pieces, number)
            return job.store.write_ranges(files.names[number], ranges)

        nbytes = sum(job.pool.map(write, plan.files, nbytes=2 * BLOCK_BYTES))
        if not job.is_coordinator:
            return Part(0, nbytes, _report((), {}, 0))
        weights = {name: files.names[spot.file] for name, spot in files.spots.items()}
        report = _report(files.names, weights, files.nbytes)
        return Part(len(files.names), nbytes + sum(files.heads), report)

    def _collect(
        self, sd: Mapping[Any, Any], plan: SavePlan, progress: Progress | None
    ) -> tuple[dict[str, Piece], dict[str, str]]:
        """Return the tensors to write by name, and those that need not be: names tied to others."""
        flat = flatten(sd)[0]
        found = self._pieces(flat, plan, progress)
        order = {source: place for place, source in enumerate(flat)}
        heads, row = plan.items.catalog.heads, plan.items.row
        # In the order of the state dict, as the first of tied weights is the one that stays.
        rows = sorted(found, key=lambda item: order[heads[row[item]][1]])
        pieces = joined_pieces({item: found[item] for item in rows})
        free = {name: piece for name, piece in pieces.items() if name not in RESERVED}
        ties = tied_pieces(free) | {n: k for n, k in self._tied.items() if k in pieces}
        return {n: p for n, p in pieces.items() if n not in ties}, ties

    def _pieces(
        self, flat: Mapping[str, Any], plan: SavePlan, progress: Progress | None
    ) -> dict[int, Piece]:
        """Return the chunks to write, by item of the plan; refuse what files cannot hold."""
        found, values, refused = collect(flat, plan, refused_name, progress)
        for piece in found.values():
            if file_entry(piece.dtype, piece.shape) is None:
                refused[piece.name] = (
                    f"is {piece.dtype}, which safetensors has no name for; cast it"
                )
        if not self.leave_out:
            why = (
                "is not a tensor, and an `hf` checkpoint holds only tensors; leave it out with drop"
            )
            refused.update(dict.fromkeys(values, why))
        if refused:
            raise ValueRefusedError(refused)
        return found

    def _header(
        self, file: str, tensors: Sequence[FileTensor], ties: Mapping[str, str], save_id: str | None
    ) -> bytes:
        """Return the bytes of a file before its tensors; only one of several has a save id."""
        own: dict[str, Any] = {}
        if save_id is not None:
            own = {"file": file, "save_id": save_id, PART_OF: INDEX}
        names = {tensor.name for tensor in tensors}
        tied = {name: kept for name, kept in ties.items() if kept in names}
        if tied:
            own[TIED] = sorted(tied)
        metadata = {"format": "pt", **self._remarks, **tied}
        if own:
            metadata["shardplan"] = json.dumps({"version": 1, **own}, separators=(",", ":"))
        entries = []
        for tensor in tensors:
            kind = _kind(tensor.dtype, tensor.shape)
            entries.append(entry_text(tensor.name, kind, tensor.begin, tensor.end))
        return framed_entries(metadata, entries, file)

    def commit(self, job: CommitJob) -> tuple[str, ...]:
        """Put the tensors in place, and what belongs beside them; see `Writer.commit`."""
        store, extra = job.store, read_extra(self._extra)
        new = [name for name in extra if not store.exists(name)]
        try:
            for name in new:
                store.write(name, [extra[name]], nbytes=len(extra[name]), atomic=True)
            left = self._put_tensors(job)
        except Exception:
            if job.save_id not in self.unsure:
                with suppress(Exception):
                    store.delete(new)
            raise
        for name in extra.keys() - set(new):
            try:
                store.write(name, [extra[name]], nbytes=len(extra[name]), atomic=True)
            except Exception as error:
                doing = f"{name} was put beside a checkpoint that is there by now"
                raise unsure_commit(store, error, doing) from error
        return left

    def _put_tensors(self, job: CommitJob) -> tuple[str, ...]:
        """Put the index, or the single file, in place; then tidy up."""
        store, save_id, overwrite = job.store, job.save_id, job.overwrite
        parts = [_decode(report) for report in job.reports]
        new = {name for part in parts for name in part["files"]}
        old: set[str] = set()
        if new == {SINGLE}:  # which is in place since its last byte was written
            with suppress(Exception):  # so that nothing is known of what it replaced
                old = _files_of(store)
        else:
            old = _files_of(store)
            self.refuse(store, overwrite)
            gone = sorted(new - set(store.list(recursive=False)))
            if gone:
                raise ExistsError(
                    f"another save into {store.url} was committed meanwhile and removed {gone[0]}; "
                    "let one save at a time write there"
                )
            own = _own_name(SINGLE, save_id)
            if new == {own}:
                with self.committing(save_id):
                    put_file(store, own, SINGLE, overwrite=overwrite)
                new = {SINGLE}
            else:
                new = self._put_index(store, parts, save_id, overwrite)
        if SINGLE in old - new:  # which readers prefer to the new index
            with self.committing(save_id):
                try:
                    store.delete([SINGLE])
                except Exception as error:
                    raise unsure_commit(store, error, f"the older {SINGLE} was removed") from error
        return _tidy(store, old, new)

    def _put_index(
        self, store: Store, parts: Sequence[Mapping[str, Any]], save_id: str, overwrite: bool
    ) -> set[str]:
        """Give files their usual names, if these are free; put the index in place; name all."""
        own = [name for part in parts for name in part["files"]]
        usual = (
            {}
            if _is_taken(store, len(own))
            else {n: n.replace(f"model-{save_id}-", "model-", 1) for n in own}
        )
        taken = {name: better for name, better in usual.items() if take_name(store, name, better)}
        weights = {
            name: taken.get(file, file) for part in parts for name, file in part["weights"].items()
        }
        total = sum(part["nbytes"] for part in parts)
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        data = (json.dumps(table, indent=2) + "\n").encode()
        try:
            check_size(INDEX, len(data), "index")
            with self.committing(save_id):
                store.sync()
                put_in_place(store, INDEX, data, overwrite=overwrite)
        except Exception:
            if save_id not in self.unsure:
                with suppress(Exception):
                    store.delete(taken.values())
            raise
        return {INDEX, *(taken.get(name, name) for name in own)}

    def unneeded(self, store: Store, report: bytes, save_id: str) -> Iterable[str]:
        """Name the files that are not part of a checkpoint; see `FolderWriter.unneeded`."""
        return set(_decode(report)["files"]) - _files_of(store)


def _ranges_of(
    plan: SharedPlan, pieces: Mapping[int, Piece], number: int
) -> Iterator[tuple[int, memoryview]]:
    """Yield what a rank writes into one shared file, and where."""
    for item in plan.rows(number):
        piece, most = pieces[item], plan.block_bytes(item)
        boxes = boxes_of(piece.shape, piece.dtype, most) if piece.nbytes else ()
        blocks = piece.blocks(most) if piece.nbytes else ()
        for (offsets, sizes), view in zip(boxes, blocks, strict=True):
            found = plan.ranges(item, offsets, sizes)
            columns = (found.start.tolist(), found.into.tolist(), found.length.tolist())
            for start, into, length in zip(*columns, strict=True):
                yield start, view[into : into + length]


def _name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _own_name(name: str, save_id: str) -> str:
    """Return the name of a file that no other save uses, and no reader takes for a checkpoint."""
    if name == SINGLE:
        return f"{SINGLE}.{save_id}{TEMPORARY}"
    return name.replace("model-", f"model-{save_id}-", 1)


def _is_taken(store: Store, count: int) -> bool:
    """Return whether a checkpoint may be using some of the names that a new one would have."""
    if store.exists(INDEX) or store.exists(SINGLE):
        return True
    names = (_name(number, count) for number in range(count))
    return any(store.exists(name) and not uncommitted(store, name) for name in names)


@lru_cache(maxsize=1024)
def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    entry = file_entry(dtype, shape)
    assert entry is not None
    return kind_of_entry(*entry)


def _report(files: Sequence[str], weights: Mapping[str, str], nbytes: int) -> bytes:
    return json.dumps({"files": files, "weights": weights, "nbytes": nbytes}).encode()


def _decode(report: bytes) -> dict[str, Any]:
    try:
        found = json.loads(report)
        return {key: found[key] for key in ("files", "weights", "nbytes")}
    except (ValueError, LookupError, TypeError) as error:
        raise CodecError(f"a rank's report of what it wrote is damaged: {error}") from error


def _files_of(store: Store) -> set[str]:
    """Name the files of the checkpoints that are there, as far as they name them themselves."""
    found = {name for name in (SINGLE, INDEX) if store.exists(name)}
    if INDEX in found:
        with suppress(FormatError):  # what a damaged index names is left alone
            found |= set(read_index(store, INDEX).values())
    return found


def _tidy(store: Store, old: set[str], new: set[str]) -> tuple[str, ...]:
    """Remove what the older checkpoint and killed saves left; return what could not be."""
    try:
        strays = _strays(store)
        # Another save may have been committed since: what its index names is not ours to remove.
        kept = _files_of(store) if INDEX in new else set()
    except Exception:  # a store may fail as it likes: the checkpoint is committed
        return tuple(sorted(old - new))
    doomed = (old | strays) - new - kept - {SINGLE}
    # The index goes first: without it, the files that it names are not missed.
    if INDEX in doomed and remove(store, [INDEX]):
        return tuple(sorted(doomed))
    return remove(store, sorted(doomed - {INDEX}))


def _strays(store: Store) -> set[str]:
    return {
        name
        for name in store.list(recursive=False)
        if _STRAY.fullmatch(name) or (OWN_NAME.fullmatch(name) and uncommitted(store, name))
    }
