"""Reading `torch.save` files: their pickle says where the elements of every tensor lie.

A tensor may be a view of its storage whose axes nest, in any order and with gaps: a box of a
row-major array. Any other view (every second column, a repeated row) is refused when asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from shardplan.planning import (
    ITEMSIZE,
    Metadata,
    PlanError,
    RefusedError,
    flatten,
    global_plan,
    is_tensor,
    local_plan,
)

from ...checksums import CRC32
from ...errors import FormatError, listed
from ...pool import Pool
from ...stores.base import MissingFileError, Store, StoreError
from ..base import LIMITS, ChunkPlace, Findings, Format, Source, read_bytes, read_ranges
from .archive import Archive, FileWindow, read_archive
from .names import Nested, explain_name, fault_of, load_nested
from .standins import (
    Later,
    Named,
    OddTensor,
    StoredTensor,
    TensorLeaf,
    build_value,
    needs_torch,
    sealed_name,
)
from .unpickler import PickleError, Sealed
from .verify import Stored, check_archives

if TYPE_CHECKING:
    from .write import TorchWriter

_ZIP: Final = b"PK\3\4"
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickle: torch's magic number
_SPAN: Final = 64 << 20  # bytes of a storage that one thread reads


class TorchFormat(Format):
    """Files that `torch.save` writes."""

    name = "torch"
    is_file = True
    whole_tensors = True

    def detect(self, store: Store, name: str = "") -> bool:
        """Return whether a file begins as `torch.save` has it; see `Format.detect`."""
        return bool(name) and _head(store, name).startswith((_ZIP, _LEGACY))

    def open(self, store: Store, name: str = "", pool: Pool | None = None) -> TorchSource:
        """Open a file; only its pickle is read. See `Format.open`."""
        return open_file(store, name)

    def writer(self, *, file: str = "") -> TorchWriter:
        """Return what writes this format; see `Format.writer`."""
        from .write import TorchWriter  # which needs torch

        return TorchWriter(file)

    def verify(self, store: Store, name: str = "", **options: Any) -> Findings:
        """Compare every record with its checksum; see `Format.verify`."""
        opened = self.open(store, name)
        whole = Stored(name, 0, store.size(name), tensors=opened.tensors_by_record())
        return attrs.evolve(check_archives(store, [whole], **options), files=1)


def open_file(store: Store, name: str, *, sealed: bool = False) -> TorchSource:
    """Open a file; see `load_nested` for ``sealed``."""
    if not name:
        raise FormatError(store.url, "a torch checkpoint is a file, and this is a folder")
    if _head(store, name).startswith(_LEGACY):
        raise FormatError(
            name,
            "it is of the kind that torch.save wrote before version 1.6, which cannot be read "
            "in place; load it with torch.load(..., weights_only=True) and save it again",
        )
    try:
        archive = read_archive(FileWindow(store, name, 0, store.size(name)))
    except MissingFileError:
        raise FormatError(name, "it is missing") from None
    if "constants.pkl" in archive.records:
        raise FormatError(name, "it is a TorchScript archive, not a state dict; use torch.jit.load")
    try:
        nested = load_nested(archive.pickle(LIMITS["pickle"]), sealed=sealed)
    except PickleError as error:
        raise FormatError(name, f"its state dict {fault_of(error)}") from None
    archive.check_storages(nested.storages)
    return TorchSource(store, name, archive, nested)


def _head(store: Store, name: str) -> bytes:
    try:
        return read_bytes(store, name, 0, min(len(_LEGACY), store.size(name)))
    except StoreError:
        return b""


class TorchSource(Source):
    """A `torch.save` file; a `Source`."""

    format = "torch"
    checksum = CRC32

    def __init__(self, store: Store, file: str, archive: Archive, saved: Nested) -> None:
        nested = saved.value
        if not isinstance(nested, Mapping):
            kind = "tensor" if is_tensor(nested) else type(nested).__name__
            raise FormatError(file, f"it holds a {kind}, not a state dict: a dict by name")
        self.store, self.files, self.archive = store, (file,), archive
        self._storages = saved.storages
        self._found: dict[str, ChunkPlace] = {}
        try:
            self._flat, paths = flatten(nested)
            keys = {key for path in paths.values() for _, key in path}
            odd = [key.name for key in keys if isinstance(key, (Named, Later, Sealed))]
            if odd:
                raise RefusedError(f"its state dict has keys that are not plain, such as {odd[0]}")
            self._tensors = _find_tensors(self._flat)
            self.metadata: Metadata = global_plan((local_plan(nested),))[1]
        except (PlanError, RefusedError) as error:
            raise FormatError(file, str(error)) from None

    def find_chunks(self, chunks: Sequence[tuple[str, int]]) -> list[ChunkPlace]:
        """Find tensors, which are one chunk each; see `Source.find_chunks`."""
        odd = []
        for name in {name for name, _ in chunks} - self._found.keys():
            stored = self._tensors[name].stored
            begin = self.archive.begin(f"data/{stored.storage.key}")
            try:
                self._found[name] = place_view(0, begin, stored)
            except PickleError as error:
                odd.append(f"`{name}`: {error}")
        if odd:
            raise FormatError(self.files[0], listed(sorted(odd), quote="", between="; "))
        return [self._found[name] for name, _ in chunks]

    def tensors_by_record(self) -> dict[str, list[str]]:
        """Name the tensors whose elements lie in each record of the archive."""
        found = defaultdict[str, list[str]](list)
        for name, leaf in self._tensors.items():
            found[f"data/{leaf.stored.storage.key}"].append(name)
        return found

    def file_numbers(self, name: str) -> Sequence[int]:
        """Return the one file, for the one chunk of a tensor; see `Source.file_numbers`."""
        return [0]

    def chunk_sums(self, chunks: Sequence[tuple[str, int]]) -> list[int | None]:
        """Return the checksum of each tensor that fills its record; see `Source.chunk_sums`."""
        if not self.archive.is_summed:
            return [None] * len(chunks)
        sums: list[int | None] = []
        for (name, _), place in zip(chunks, self.find_chunks(chunks), strict=True):
            stored = self._tensors[name].stored
            record = self.archive.records[f"data/{stored.storage.key}"]
            whole = place.nbytes == record.nbytes and not stored.offset
            sums.append(record.crc if whole else None)
        return sums

    def has_value_sum(self, name: str) -> bool:
        """Return True: values are known once the file is opened; see `Source.has_value_sum`."""
        return True

    def value(self, name: str, *, verify: bool = True) -> Any:
        """Return a non-tensor value; see `Source.value`."""
        try:
            return build_value(self._flat[name], self._read_storage)
        except PickleError as error:
            remedy = f"convert leaves it out with drop({name!r}), and restore with keys=[...]"
            raise FormatError(self.files[0], f"`{name}` {fault_of(error)}; {remedy}") from None

    def plain_value(self, name: str) -> Any:
        """Return a non-tensor value that needs no torch; see `Source.plain_value`."""
        if needs_torch(self._flat[name]):
            raise PickleError(f"the value of `{name}` needs torch")
        return self.value(name)

    def refused_values(self) -> dict[str, str]:
        """Return why some values can only be refused, by name."""
        found = {name: sealed_name(leaf) for name, leaf in self._flat.items()}
        return {name: explain_name(kind) for name, kind in found.items() if kind is not None}

    def _read_storage(self, key: str) -> memoryview:
        nbytes, begin = self._storages[key], self.archive.begin(f"data/{key}")
        data = memoryview(bytearray(nbytes))
        ranges = [(begin + at, data[at : at + _SPAN]) for at in range(0, nbytes, _SPAN)]
        read_ranges(self.store, self.files[0], ranges)
        return data


def _find_tensors(flat: Mapping[str, Any]) -> dict[str, TensorLeaf]:
    odd = [f"`{name}` {leaf.why}" for name, leaf in flat.items() if isinstance(leaf, OddTensor)]
    if odd:
        raise RefusedError(listed(odd, quote="", between="; "))
    return {name: leaf for name, leaf in flat.items() if isinstance(leaf, TensorLeaf)}


# Views


def place_view(file: int, begin: int, tensor: StoredTensor) -> ChunkPlace:
    """Return where a view lies, given where its storage begins, or raise a `PickleError`."""
    nested = nest(tensor.size, tensor.stride)
    if nested is None:
        raise PickleError(
            f"it is a view of shape {list(tensor.size)} with strides {list(tensor.stride)}, which "
            "cannot be read in place; load it with torch.load(..., weights_only=True), and save "
            "its contiguous()"
        )
    first = begin + tensor.offset * ITEMSIZE[tensor.dtype]
    return ChunkPlace(file, first, tensor.dtype, *nested)


def nest(
    size: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """Return a row-major array whose first corner is a view; None if there is none.

    The array is given by its sizes, in the order in which its axes are stored, and the view's axis
    that each is (None if they are in order).

    >>> nest((2, 3), (3, 1)), nest((2, 3), (1, 2)), nest((4, 3), (6, 1))
    (((2, 3), None), ((3, 2), (1, 0)), ((4, 6), None))
    >>> nest((4, 1), (6, 1)), nest((4, 3), (6, 2)), nest((4, 3), (0, 1))
    (((4, 6), None), None, None)
    """
    if 0 in size:
        return tuple(size), None
    long = [axis for axis in range(len(size)) if size[axis] > 1]  # the others stay where they are
    short = [axis for axis in range(len(size)) if size[axis] == 1]
    if long and short and min(stride[axis] for axis in long) > 1:  # such as a column of a matrix
        stride = [1 if axis == short[-1] else stride[axis] for axis in range(len(size))]
        long = sorted([*long, short[-1]])
    widest_first = sorted(long, key=lambda axis: -stride[axis])
    order = list(range(len(size)))
    for place, axis in zip(long, widest_first, strict=True):
        order[place] = axis
    extents = [size[axis] for axis in order]
    inner, step = -1, 1  # the place of the next axis inwards, and its stride
    for place in reversed(long):
        wide = stride[order[place]]
        if inner < 0 and wide != 1:
            return None
        if inner >= 0:
            if wide % step or wide // step < extents[inner]:
                return None
            extents[inner] = wide // step
        inner, step = place, wide
    return tuple(extents), None if order == sorted(order) else tuple(order)
