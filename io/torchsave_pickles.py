"""What does the pickle of a `torch.save` file say, and where do its storages lie?

It is read without torch if it names nothing unusual; else as torch reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final

import attrs

from .errors import FormatError
from .pickles import (
    CutShort,
    PickleError,
    RefusedName,
    Unsound,
    check_parts,
    load_pickle,
    pickle_end,
)
from .stores import Store
from .torchnested import Storages, TensorLeaf, load_nested
from .torchvalues import explain_name
from .torchzip import LEGACY_PICKLES, Archive, read_ranges

__all__ = ["Pickled", "read_legacy", "read_zip"]

_PROTOCOL: Final = 1001  # of files of the older kind; their magic number was seen already
_FIRST: Final = 1 << 16
_MAX_PICKLES: Final = 1 << 30


@attrs.frozen(eq=False)
class Pickled:
    """What a file holds.

    Attributes:
        data: The pickle.
        nested: What was saved; its tensors have no elements.
        storages: Where the storages of these tensors lie.
        leaf: What says where a tensor of ``nested`` lies, or raises ValueError.
        by_torch: Whether torch made it, not we; then it is what `load_bare` returns.
    """

    data: bytes
    nested: Any
    storages: Storages
    leaf: Callable[[Any], TensorLeaf]
    by_torch: bool = False


def _load(data: bytes, file: str) -> Pickled:
    storages = Storages()
    try:
        return Pickled(data, load_nested(data, storages), storages, lambda leaf: leaf)
    except Unsound as error:  # which torch would try to read all the same
        raise FormatError(file, f"its state dict cannot be loaded: {error}") from None
    except PickleError as error:
        if not _has_torch():
            why = "cannot be loaded: "
            why = explain_name(error.name) if isinstance(error, RefusedName) else f"{why}{error}"
            raise FormatError(file, f"its state dict {why}; torch is not installed") from None
    from .torchbare import load_bare

    nested, bare = load_bare(data, file)
    try:
        check_parts(nested, len(data))
    except Unsound as error:
        raise FormatError(file, f"its state dict cannot be loaded: {error}") from None
    return Pickled(data, nested, bare, bare.leaf, by_torch=True)


def _has_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except ValueError:  # it was made unavailable in this process
        return False


def read_zip(pickle: bytes, archive: Archive, file: str) -> Pickled:
    """Read the pickle of an archive.

    Raises:
        FormatError: It is damaged or not safe to read, or a storage is not there.
    """
    pickled = _load(pickle, file)
    for key, nbytes in pickled.storages.nbytes.items():
        record = archive.records.get(f"data/{key}")
        if record is None or record.nbytes != nbytes:
            found = "none" if record is None else f"{record.nbytes:,}"
            raise FormatError(file, f"storage {key} should have {nbytes:,} bytes, and has {found}")
    return pickled


def read_legacy(store: Store, file: str, size: int) -> Pickled:
    """Read the pickles of a file of the older kind; see `read_zip`."""
    (_, protocol, system, state, listed), end = _split(store, file, size)
    if _plain(protocol, file) != _PROTOCOL:
        told = str(_plain(protocol, file))[:80]
        raise FormatError(file, f"it is of version {told}; only {_PROTOCOL} is known")
    machine = _plain(system, file)
    if not isinstance(machine, Mapping) or machine.get("little_endian") is not True:
        raise FormatError(file, "it was written on a machine of another byte order")
    pickled, keys = _load(state, file), _plain(listed, file)
    keys = [str(key) for key in keys] if isinstance(keys, list) else []
    if set(keys) != pickled.storages.nbytes.keys():
        raise FormatError(file, "its list of storages is damaged")
    _place(store, file, size, keys, pickled.storages, end)
    return pickled


def _split(store: Store, file: str, size: int) -> tuple[list[bytes], int]:
    """Return the pickles that come first in a file, and where the last one ends."""
    data, at = b"", 0
    found: list[bytes] = []
    while len(found) < LEGACY_PICKLES:
        try:
            end = pickle_end(data, at)
        except CutShort:
            more = min(size, _MAX_PICKLES, max(_FIRST, 2 * len(data)))
            if more == len(data):
                reason = "its state dict cannot be loaded: the file ends within it, being cut short"
                raise FormatError(file, reason) from None
            rest = bytearray(more - len(data))
            read_ranges(store, file, [(len(data), memoryview(rest))])
            data += rest
        except PickleError as error:
            raise FormatError(file, f"its state dict cannot be loaded: {error}") from None
        else:
            found.append(data[at:end])
            at = end
    return found, at


def _plain(data: bytes, file: str) -> Any:
    try:
        return load_pickle(data, {})
    except PickleError as error:
        raise FormatError(file, f"what precedes its state dict is damaged: {error}") from None


def _place(
    store: Store, file: str, size: int, keys: list[str], storages: Storages, at: int
) -> None:
    """Find storages that follow one another, each after its count of elements."""
    counts = memoryview(bytearray(8 * len(keys)))
    ranges = []
    for number, key in enumerate(keys):
        ranges.append((at, counts[8 * number : 8 * number + 8]))
        storages.begin[key] = at + 8
        at += 8 + storages.nbytes[key]
    if at > size:
        raise FormatError(file, f"it should have {at:,} bytes and has {size:,}: it was cut short")
    read_ranges(store, file, ranges)
    for number, key in enumerate(keys):
        count = int.from_bytes(counts[8 * number : 8 * number + 8], "little")
        nbytes = storages.nbytes[key]
        if nbytes % max(count, 1) or (count == 0) != (nbytes == 0):
            raise FormatError(file, f"storage {key} has {count:,} elements and {nbytes:,} bytes")
