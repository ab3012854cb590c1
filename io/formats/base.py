"""What a checkpoint format is: `Source` reads one, `Writer` writes one, `Format` names both.

A checkpoint's chunks lie in files, row-major, at known places. A `Source` knows where; `Reader`
does the rest. Derive formats of your own from these classes, and pass them to `register_format`.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

import attrs

from shardplan.planning import Metadata, TensorMetadata, itemsize
from shardplan.planning.columns import Ints
from shardplan.planning.storage import BLOCK_BYTES

from ..checksums import XXH3, Checksum, Sums
from ..errors import FormatError
from ..pool import Pool, Progress, ProgressCallback, default_pool
from ..stores.base import MissingFileError, Store, StoreError

if TYPE_CHECKING:  # looking into a checkpoint needs no plans
    from shardplan.planning import Expression, Quantized, SavePlan


LIMITS: Final = {
    "manifest": 1 << 30,  # one of a million chunks has 20 MB
    "metadata": 1 << 30,  # one of a million chunks has 150 MB
    "index": 1 << 26,  # one of a million tensors has 100 bytes for each
    "config": 1 << 24,
    "header": 100_000_000,  # the safetensors library refuses longer ones, too
    "pickle": 1 << 32,  # of a `torch.save` archive; it holds what is not in tensors
    "directory": 1 << 28,  # of an archive
    "companion": 1 << 28,  # a tokenizer of 250,000 words has 35 MB
}
"""The most bytes of a file that is read whole, by kind of file."""

ExtraFiles = str | os.PathLike[str] | Store | Mapping[str, str | os.PathLike[str] | bytes]
"""Files to put beside a checkpoint: a folder that has them, or paths or contents by name."""

MAX_BYTES: Final = 1 << 60
"""Values, files and headers are smaller than this."""


def check_size(file: str, nbytes: int, what: str) -> None:
    """Refuse a file that is too large to be read whole."""
    most = LIMITS[what]
    if nbytes > most:
        reason = f"it has {nbytes:,} bytes; the limit for a file of this kind is {most:,}"
        raise FormatError(file, reason)


def read_whole(store: Store, file: str, what: str) -> bytes:
    """Read a file whole, if it is not too large."""
    try:
        return store.read_all(file, limit=LIMITS[what])
    except StoreError as error:
        if error.kind == "long":
            check_size(file, store.size(file), what)
        if error.kind in ("long", "path"):
            raise FormatError(file, error.reason) from None
        raise
    except MemoryError:
        raise FormatError(file, f"there is not enough memory to read this {what}") from None


def read_bytes(store: Store, file: str, begin: int, nbytes: int) -> bytes:
    """Return some bytes of a file."""
    data = bytearray(nbytes)
    store.read(file, [(begin, memoryview(data))])
    return bytes(data)


def read_ranges(store: Store, file: str, ranges: list[tuple[int, memoryview]]) -> None:
    """Fill buffers from a file of a checkpoint, which should have these ranges."""
    try:
        store.read(file, ranges)
    except MissingFileError:
        raise FormatError(file, "it is missing") from None
    except StoreError as error:
        if error.kind == "short":
            raise FormatError(file, error.reason) from None
        raise


class ChunkPlace(NamedTuple):  # a checkpoint has millions
    """Where one chunk lies: the number of its file, its first byte there, and how it is stored."""

    file: int
    begin: int
    dtype: str
    # The shape, as stored, of the array whose leading corner the chunk is; usually the chunk's own
    # shape.
    extents: tuple[int, ...]
    # Which of the chunk's axes each of these is; None if they are stored in order.
    axes: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes that array has."""
        return math.prod(self.extents) * itemsize(self.dtype)


@attrs.frozen(eq=False)
class FileColumns:
    """The file of every chunk of a checkpoint; entries that are cut alike share a column."""

    columns: tuple[Ints, ...]  # columns of file numbers, one number per chunk
    entry: Ints  # per entry of the metadata, which column it has; -1 for a value outside the files


FaultKind = Literal[
    "manifest",  # it cannot be read, or contradicts itself
    "missing",
    "size",  # cut short, or longer than it was
    "swapped",  # another file of this checkpoint under its name
    "foreign",  # a file of another save or program
    "header",  # damaged
    "disagrees",  # header and manifest contradict each other
    "checksum",  # a chunk's bytes were changed
    "unreadable",  # the store fails
]


@attrs.frozen
class Fault:
    """One thing that is wrong with bytes of a file; ``key`` is None where it is the whole file."""

    kind: FaultKind
    file: str
    reason: str
    key: str | None = None
    begin: int = 0
    end: int = 0


@attrs.frozen
class Findings:
    """What a check of a whole checkpoint found."""

    faults: tuple[Fault, ...]
    files: int = 0  # how many data files there should be
    chunks: int = 0  # how many fit their checksums
    nbytes: int = 0  # how many were read and checked
    notes: tuple[str, ...] = ()  # what could not be checked, and why
    unchecked: int = 0  # bytes without checksums
    lost: frozenset[str] = frozenset()  # cannot be loaded whole, beside those of the faults
    save_id: str | None = None  # the save that made the checkpoint, if known

    @property
    def keys(self) -> tuple[str, ...]:
        """Names with bytes that are damaged, lost or could not be checked, sorted."""
        # Names on which header and manifest disagree may not be names of the checkpoint at all.
        named = {f.key for f in self.faults if f.key is not None and f.kind != "disagrees"}
        return tuple(sorted(self.lost | named))


class Source(Protocol):
    """A checkpoint that can be read."""

    format: str
    store: Store
    files: Sequence[str]
    metadata: Metadata
    block_bytes: int = BLOCK_BYTES  # the most that were hashed together; see `planning.storage`
    checksum: Checksum = XXH3
    has_sums: bool = True  # whether chunks may have one; if False, conversions ask for none
    created: float | None = None  # in seconds since 1970
    remarks: Mapping[str, str] = {}  # text about the model that files of some formats carry
    notes: tuple[str, ...] = ()  # what is odd about it and yet no error
    file_columns: FileColumns | None = None  # None if not recorded in one place
    beside: ExtraFiles | None = None  # what a conversion to the same format carries over
    quantized: Mapping[str, Quantized] = {}  # what is dequantised as it is read
    shared_files: Sequence[str] = ()  # those that an earlier checkpoint had, too
    parts: Sequence[Source] = ()  # the checkpoints that its tensors are those of, or sums of
    expression: Expression | None = None  # how tensors are added up as they are read
    text: bytes | None = None  # what another rank can open it from; see `Format.open_text`

    @property
    def stored(self) -> Source:
        """The checkpoint as it is stored: another one, if this one dequantises."""
        return self

    @abstractmethod
    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Find chunks, each given by its tensor's name and its number among the tensor's chunks.

        Raises:
            FormatError: What the files say of themselves does not fit the metadata.
        """
        ...

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value.

        Raises:
            FormatError: It is damaged, or of a type that is not safe to load.
        """
        raise FormatError(self.store.url, f"`{name}` is not there: {self.format} has only tensors")

    # What follows need not be written for a new format.

    def checksum_in(self, file: int) -> Checksum:
        """Return how chunks in one of the files are summed, if they are."""
        return self.checksum

    def checksum_of(self, name: str) -> Checksum:
        """Return how chunks of one tensor are summed, if they are."""
        return self.checksum

    @property
    def save_id(self) -> str | None:
        """The save that made it; None if it does not say."""
        meta = self.metadata.storage_meta
        return None if meta is None else meta.save_id

    @property
    def file_sizes(self) -> Mapping[str, int]:
        """The size of each file when it was saved, in bytes, as far as that is recorded."""
        return {}

    def file_numbers(self, name: str) -> Sequence[int] | None:
        """Return the file of each chunk of a tensor, in `files`; None if that is not known."""
        entry = self.metadata.state_dict_metadata[name]
        count = len(entry.chunks) if isinstance(entry, TensorMetadata) else 0
        return [
            place.file for place in self.find_chunks([(name, number) for number in range(count)])
        ]

    def sums_of(self, name: str) -> Sums | None:
        """Return the checksum of each chunk of an entry; headers of its files may be read."""
        return None

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of the bytes where `find_chunks` says; None where there is none."""
        return [None] * len(chunks)

    def has_value_sum(self, name: str) -> bool:
        """Return True if a value that was read has a checksum, or is known without reading."""
        return False

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads; 0 for one that is known once this is opened."""
        return 0

    def value_cost(self, name: str) -> int:
        """Return about how many bytes of memory `value` takes, beside what is held already."""
        return 0

    def plain_value(self, name: str) -> Any:
        """Return a non-tensor value; raise a `ValueError` if it takes torch, or is damaged."""
        return self.value(name)

    def value_key(self, name: str) -> object:
        """Return what only values of the same bytes have in common, if known without reading."""
        return None

    def missing(self) -> Sequence[Fault]:
        """Return what is missing or was cut short, by the sizes of its files; none is read."""
        return ()


@attrs.frozen
class Part:
    """What one rank wrote: how many files and bytes, and its report for `Writer.commit`."""

    files: int
    nbytes: int
    report: bytes


def _given_pool(pool: Pool | None) -> Pool:
    return pool or default_pool()


@attrs.frozen(eq=False)
class WriteJob:
    """One rank's part of a save: what to write of its state dict."""

    store: Store
    sd: Mapping[Any, Any]
    plan: SavePlan
    save_id: str  # the same on all ranks
    rank: int = 0
    pool: Pool = attrs.field(default=None, converter=_given_pool)
    progress: Progress | None = None  # counts the bytes of tensors as they are written
    layout: bytes | None = None  # what `Writer.lay_out` returned, if ranks share files
    is_coordinator: bool = True  # whether this rank laid them out


@attrs.frozen(eq=False)
class SharedFiles:
    """Files of an earlier checkpoint that are a part of a new one, too.

    Attributes:
        source: That checkpoint.
        unused: The numbers of the files in `Source.files`, and how many bytes of each the new
            checkpoint has no use for.
        chunks: By tensor, the numbers of the chunks in them that are as they were.
    """

    source: Source
    unused: Mapping[int, int]
    chunks: Mapping[str, Sequence[int]]


@attrs.frozen(eq=False)
class CommitJob:
    """All ranks' parts of a save; ``reports`` (of each `Part`) and ``plans`` are in rank order.

    For `Writer.lay_out`, ``reports`` are what `Writer.describe` returned.
    """

    store: Store
    metadata: Metadata
    plans: Sequence[SavePlan]
    reports: Sequence[bytes]
    save_id: str
    overwrite: bool = False
    shared: SharedFiles | None = None  # what is not written, as an earlier checkpoint has it


class Writer(Protocol):
    """Writes checkpoints of one format; writers derive from this class.

    If ``shares_files``, ranks write parts of the same files: several ranks save only where
    `Store.can_share_files`; all `describe`, one rank calls `lay_out`, all `write`.
    """

    file: str | None = None  # the name of a checkpoint that is a single file
    max_ranks: int | None = None  # how many ranks may save
    shares_files: bool = False

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Raise an `ExistsError` if a checkpoint is there that must not be replaced."""

    @abstractmethod
    def write(self, job: WriteJob) -> Part:
        """Write one rank's part, which does not count as a checkpoint until it is committed.

        If it fails, what it wrote is removed again.
        """
        ...

    @abstractmethod
    def commit(self, job: CommitJob) -> tuple[str, ...]:
        """Make a checkpoint of what all ranks wrote: it exists from one instant on.

        Returns the files of an older checkpoint that could not be removed. Raises an `ExistsError`,
        or an `UnsureCommitError` if it may have happened nevertheless, or may still.
        """
        ...

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Remove one rank's part, unless it was committed after all, or may have been.

        Call it on no rank after an `UnsureCommitError` of any.
        """
        return

    # What follows need not be written for a new format.

    def describe(self, job: WriteJob) -> bytes:
        """Return what laying out shared files must know of a rank; refuse what it cannot save."""
        return b""

    def lay_out(self, job: CommitJob) -> bytes:
        """Make shared files, without their tensors; return what ranks need to know of them."""
        return b""

    def clear(self, store: Store, save_id: str) -> None:
        """Remove the files that `lay_out` made, unless this writer may have committed them."""
        return

    def carrying(self, tied: Mapping[str, str], remarks: Mapping[str, str]) -> Writer:
        """Return a writer that knows what a conversion does: tied names, and `Source.remarks`."""
        return self

    def with_files(self, files: ExtraFiles) -> Writer:
        """Return a writer that also puts files beside the checkpoint; see `Source.beside`."""
        return self

    def extra_names(self) -> tuple[str, ...]:
        """Name the files that `commit` puts beside the checkpoint."""
        return ()

    def write_order(self, plan: SavePlan, rank: int) -> Iterable[int]:
        """Return the order in which `write` asks for the items of a plan."""
        return range(len(plan.items))


class Format(Protocol):
    """A checkpoint format: how to detect, open, write and verify it."""

    name: str  # what users call it: ``format="hf"``
    marks: tuple[str, ...] = ()  # files that the commit puts in place, and only such folders have
    is_file: bool = False  # whether a checkpoint is a single file, not a folder
    whole_tensors: bool = False  # whether every tensor lies in one piece
    has_values: bool = True  # whether it can hold non-tensor values
    reserved: tuple[str, ...] = ()  # names whose tensors are never tied to another's

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether a checkpoint of this format is in a folder, or is the file of a name."""
        ...

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> Source:
        """Open a checkpoint, reading only what describes it; see `detect`."""
        ...

    # What follows need not be written for a new format.

    def open_text(self, store: Store, text: bytes, pool: Pool | None = None) -> Source:
        """Open a checkpoint from the `Source.text` of another rank; nothing is read."""
        raise ValueError(f"the format {self.name!r} is opened by each rank for itself")

    def writer(self, *_: Any, **options: Any) -> Writer:
        """Return what writes this format; options are keyword arguments of its own.

        A format whose checkpoints are files takes the option ``file``, the name of one.
        """
        raise ValueError(f"the format {self.name!r} can be read, but not written")

    def verify(
        self,
        store: Store,
        name: str = "",
        *,
        progress: ProgressCallback | None = None,
        pool: Pool | None = None,
    ) -> Findings:
        """Check all that can be checked of a checkpoint.

        ``progress`` is called with the bytes done and the bytes in all.
        """
        source = self.open(store, name, pool)
        Progress(0, progress)
        faults, nbytes = tuple(source.missing()), int(sum(source.file_sizes.values()))
        note = "this format has no check of its own: only what describes it was read"
        found = Findings(faults, len(source.files), notes=(note,), unchecked=nbytes)
        return attrs.evolve(found, save_id=source.save_id)

    def made(self, store: Store) -> float | None:
        """Return when the checkpoint in a folder was made, if it is a step of a run; cheaply."""
        return None

    def save_of(self, file: str) -> str | None:
        """Return which save wrote a file, by the file's name; None if the name does not say."""
        return None
