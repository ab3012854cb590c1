"""A checkpoint of any format, seen as metadata and places of bytes: `Source` and `open_source`.

Whatever wrote it, a checkpoint's chunks lie in files, row-major, at known places. A `Source` says
where; `Reader` does the rest, alike for all formats. Nothing here needs torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, Protocol

import attrs

from shardplan.planning import Metadata, itemsize, nearest_hint, nearest_names
from shardplan.planning.storage import save_id_of

from ..checksums import Checksum, Sums
from ..errors import FormatError, listed
from ..pool import Pool
from ..stores.base import Store, open_store
from .native.manifest import MANIFEST

__all__ = ["FORMATS", "Source", "Spot", "detect", "locate", "open_located", "open_source"]


@attrs.frozen
class Spot:
    """Where one chunk lies.

    Attributes:
        file: The number of its file, in `Source.files`.
        begin: Where its first element lies there, in bytes.
        dtype: What it is stored as.
        extents: The sizes of the row-major array that it is the first corner of, in elements and
            in the order in which its axes are stored; mostly the chunk's own sizes.
        axes: Which of the chunk's axes each of these is; None if they are stored in order.
    """

    file: int
    begin: int
    dtype: str
    extents: tuple[int, ...]
    axes: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes that array has."""
        return math.prod(self.extents) * itemsize(self.dtype)


class Source(Protocol):
    """A checkpoint that can be read.

    Attributes:
        format: What wrote it: a key of `FORMATS`.
        store: Where its files are.
        files: Their names there.
        metadata: What it holds.
        block_bytes: The most bytes of a block that was hashed; see `planning.storage`.
    """

    @property
    def format(self) -> str:
        """What wrote it."""

    @property
    def store(self) -> Store:
        """Where its files are."""

    @property
    def files(self) -> Sequence[str]:
        """Their names there."""

    @property
    def metadata(self) -> Metadata:
        """What it holds."""

    @property
    def block_bytes(self) -> int:
        """The most bytes of a block."""

    def spots(self, chunks: Sequence[tuple[str, int]]) -> list[Spot]:
        """Find chunks, each given by its tensor's name and its number among the tensor's chunks.

        Raises:
            FormatError: What the files say of themselves does not fit the metadata.
        """

    def sums_of(self, name: str) -> Sums | None:
        """Return the checksum of each chunk of one entry, as far as is known without any reading.

        None if there are no checksums; no rows for a value that is not stored in a file.
        """

    @property
    def checksum(self) -> Checksum:
        """How the checksums of its chunks are made."""

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each chunk, None where there is none; see `spots`.

        A few bytes of each may have to be read. These checksums are for comparing with the bytes
        that lie where `spots` says, in their order.
        """

    def has_value_sum(self, name: str) -> bool:
        """Return True if a value that was read has a checksum, or is known without reading."""

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a value that is no tensor.

        Raises:
            FormatError: It is damaged, or of a type that is not safe to load.
        """

    def value_bytes(self, name: str) -> int:
        """Return how many bytes `value` reads; 0 for one that is known once this is opened."""

    def value_cost(self, name: str) -> int:
        """Return about how many bytes of memory `value` takes, beside what is held already."""


FORMATS: Final[dict[str, str]] = {
    "safetensors": "shardplan.io.formats.native.source",
    "hf": "shardplan.io.formats.hf.source",
    "dcp": "shardplan.io.formats.dcp.source",
    "torch": "shardplan.io.formats.torch_save.source",
}
"""The formats, and the module of each.

A module's ``find(store, name)`` says whether a checkpoint of its format is there; its
``source(store, name, pool)`` returns the `Source`. ``name`` is empty for a folder, or the name of a
single file in the store.
"""

_MARKS: Final = (
    "shardplan.json",
    "model.safetensors.index.json",
    "model.safetensors",
    ".metadata",
    "__0.metadata",
)


def open_source(
    path: str | os.PathLike[str] | Store, *, format: str | None = None, pool: Pool | None = None
) -> Source:
    """Open a checkpoint of any format, reading only what describes it.

    Args:
        path: Its folder, or its file if it is a single one.
        format: What wrote it; found out if left out.
        pool: The threads and the memory budget to use.

    Raises:
        FormatError: There is no checkpoint, or what describes it is damaged.
    """
    return open_located(*locate(path), format=format, pool=pool)


def open_located(
    store: Store, name: str, *, format: str | None = None, pool: Pool | None = None
) -> Source:
    """Open a checkpoint, given what `locate` has found; see `open_source`."""
    module = import_module(FORMATS[detect(store, name) if format is None else _known(format)])
    source: Source = module.source(store, name, pool)
    return source


def detect(store: Store, name: str = "") -> str:
    """Tell the format of the checkpoint in a folder, or of a single file.

    Raises:
        FormatError: There is none.
    """
    for format, home in FORMATS.items():
        if import_module(home).find(store, name):
            return format
    if name:
        raise FormatError(name, _no_checkpoint(store, name))
    found = store.list(recursive=False)
    inside = [folder for folder in found if folder.endswith("/") and _is_ours(store, folder)]
    if inside:
        url = store.url.rstrip("/")
        these = listed([f"{url}/{folder.rstrip('/')}" for folder in inside], quote="")
        raise FormatError(
            store.url, f"there is no checkpoint in it, but in folders of it; give one: {these}"
        )
    raise FormatError(store.url, _no_folder(store.url) if not found else _nothing_in(found))


def _nothing_in(found: Sequence[str]) -> str:
    return (
        f"there is no checkpoint: no save was ever committed in this folder, and it holds none of "
        f"another format ({', '.join(FORMATS)}); it holds {listed(found, quote='')}"
    )


def _no_folder(url: str) -> str:
    """Say that a folder is empty; or, if it is not on the disk at all, which ones are."""
    if "://" in url:
        return "there is no checkpoint: nothing has this prefix; check the URL"
    if os.path.isdir(url):
        return "there is no checkpoint: the folder is empty"
    parent, name = os.path.split(url.rstrip("/"))
    if not os.path.isdir(parent):
        return f"there is no checkpoint: {parent} does not exist; check the path"
    near = nearest_hint(nearest_names(name, sorted(os.listdir(parent))))
    return f"there is no checkpoint: the folder does not exist{near}"


def _no_checkpoint(store: Store, name: str) -> str:
    if save_id_of(name) is not None:
        if store.exists(MANIFEST):
            return f"it is a part of a checkpoint; give the folder: {store.url}"
        return "it is a part of no checkpoint: the save that wrote it was never committed"
    return f"it is no checkpoint of a known format ({', '.join(FORMATS)})"


def _is_ours(store: Store, folder: str) -> bool:
    """Say whether a folder of a store surely is a checkpoint: by a file, so that it is cheap."""
    return any(store.exists(f"{folder}{mark}") for mark in _MARKS)


def _known(format: str) -> str:
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known are {', '.join(FORMATS)}")
    return format


def locate(path: str | os.PathLike[str] | Store) -> tuple[Store, str]:
    """Return the store to look in, and the name of a single file there; empty for a folder.

    >>> locate("memory://runs/step-1")[1]
    ''
    """
    if not isinstance(path, (str, os.PathLike)):
        return open_store(path), ""
    path = os.fspath(path)
    if "://" not in path:
        if os.path.isfile(path):
            head, tail = os.path.split(path)
            return open_store(head or "."), tail
        return open_store(path), ""
    head, _, tail = path.rstrip("/").rpartition("/")
    if os.path.splitext(tail)[1] and not head.endswith(":/"):
        store = open_store(head)
        if store.exists(tail):
            return store, tail
    return open_store(path), ""
