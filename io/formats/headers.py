"""Safetensors headers: eight bytes with a length, then JSON that says what lies where.

Each file says which bytes are which chunk, where the chunk starts in its tensor (in torch's own
words, ``DCP_SHARDING_INFO``), and which save wrote it under which name. Dtypes that safetensors has
no name for are stored as ``U8`` with one more axis; the header says so, under ``encoded``.

The checksums of its chunks come first, sixteen digits each, in the order of their bytes: how long a
header is does not depend on them, so it may be written last. Where a store writes files from front
to back, they are in a file of their own instead; see `native.write`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import attrs

from shardplan.planning import itemsize
from shardplan.planning.geometry import shape_fault

from ..checksums import Sums, sums_from_hex, sums_to_hex
from ..errors import FormatError
from ..stores.base import Store
from .base import LIMITS, read_bytes

if TYPE_CHECKING:
    from ..execute.pieces import Piece

MAX_HEADER: Final = LIMITS["header"]

# safetensors' name of a dtype to ours.
TORCH_NAMES: Final[dict[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
_FILE_NAMES: Final = {ours: theirs for theirs, ours in TORCH_NAMES.items()}
_PACKED: Final = {"F4": 2}  # elements of the file that one of ours holds, along the last axis
_ALIGN: Final = 64  # where data begins; memory does so, too, and copies between them are fast
_FIRST: Final = 1 << 16  # bytes that are read of a file at first: most headers fit
_MAX_NUMBER: Final = 1 << 62
_WHOLE: Final = frozenset((int,))
_RESERVED: Final = "__metadata__"
_SUMS: Final = "xxh3_64"
_SUMS_BEGIN: Final = f'{{"{_RESERVED}":{{"{_SUMS}":"'.encode()  # where checksums begin


Sizes = tuple[int, ...]
Kind = tuple[str, Sizes, Sizes]
"""Dtype, shape and offsets of a chunk."""


class Slot(NamedTuple):  # a file may have a hundred thousand
    """One chunk in a file: its place in the global tensor, and its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def place(self) -> Kind:
        """What the manifest must agree with."""
        return self.dtype, self.shape, self.offsets


@attrs.frozen
class Header:
    """What a file says about itself."""

    file: str
    slots: Mapping[str, Slot]  # its chunks by name, in order of their bytes
    length: int  # where data begins, in bytes from the file's start
    save_id: str | None  # the save that wrote it; None for files of other programs
    name: str | None  # the name under which that save wrote it
    metadata: Mapping[str, str]
    sums: Sums | None = None  # of its chunks, in order of their bytes; None if elsewhere


def file_entry(dtype: str, shape: Sequence[int]) -> tuple[str, list[int]] | None:
    """Return safetensors' name of a dtype, and the shape it has there; None if it has no name.

    >>> file_entry("bfloat16", (2, 3)), file_entry("float4_e2m1fn_x2", (2, 3))
    (('BF16', [2, 3]), ('F4', [2, 6]))
    >>> file_entry("float4_e2m1fn_x2", ()), file_entry("complex128", (2,))
    (None, None)
    """
    name = _FILE_NAMES.get(dtype)
    if name is None or (name in _PACKED and not shape):
        return None
    return name, _scaled(shape, _PACKED.get(name, 1))


def _scaled(numbers: Sequence[int], factor: int) -> list[int]:
    """Multiply the last of some numbers, if there is any."""
    return [*numbers[:-1], *(n * factor for n in numbers[-1:])]


class _Words(NamedTuple):
    """What a header says of all chunks of one dtype, shape and place, as JSON."""

    kind: str
    start: str
    nbytes: int
    is_encoded: bool

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], offsets: tuple[int, ...]) -> _Words:
        width, own = itemsize(dtype), file_entry(dtype, shape)
        name, sizes = own or ("U8", [*shape, width])
        start = [*offsets, *(0 for _ in sizes[len(shape) :])]
        place = {"saved_offsets": _scaled(start, _PACKED.get(name, 1))}
        return cls(kind_of_entry(name, sizes), dump(place), math.prod(shape) * width, own is None)


def kind_of_entry(dtype: str, shape: Sequence[int]) -> str:
    """Return the JSON of a header's entry up to where its tensor lies; see `entry_text`."""
    return dump({"dtype": dtype, "shape": shape})[:-1]


def entry_text(name: str, kind: str, begin: int, end: int) -> str:
    """Return a header's entry of one tensor as JSON."""
    return f'{encode_basestring(name)}:{kind},"data_offsets":[{begin},{end}]}}'


def build_header(
    file: str, slots: Iterable[Slot | Piece], save_id: str, *, summed: bool = False
) -> bytes:
    """Return the header of a file in which chunks lie one after the other, in the order given.

    With ``summed``, there is room for their checksums, which are zero; see `with_sums`.
    """
    kinds = ((slot.name, (slot.dtype, slot.shape, slot.offsets)) for slot in slots)
    return header_of(file, kinds, save_id, summed=summed)


def header_of(
    file: str, slots: Iterable[tuple[str, Kind]], save_id: str, *, summed: bool = False
) -> bytes:
    """Return the header of a file, given the name and the kind of each chunk, in order."""
    known: dict[Kind, _Words] = {}
    tensors, sharding, encoded = list[str](), list[str](), dict[str, str]()
    at = 0
    for name, key in slots:
        words = known.get(key) or known.setdefault(key, _Words.of(*key))
        end = at + words.nbytes
        tensors.append(entry_text(name, words.kind, at, end))
        sharding.append(f"{encode_basestring(name)}:{words.start}")
        at = end
        if words.is_encoded:
            encoded[name] = key[0]
    metadata = {
        **({_SUMS: "0" * 16 * len(tensors)} if summed else {}),
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": f"{{{','.join(sharding)}}}",
        "shardplan": dump({"version": 1, "file": file, "save_id": save_id, "encoded": encoded}),
    }
    return framed_entries(metadata, tensors, file)


def without_sums(header: bytes, count: int) -> tuple[bytes, Sums]:
    """Return a header with zeros in place of so many checksums, and these; see `with_sums`."""
    start = 8 + len(_SUMS_BEGIN)
    end = start + 16 * count
    sums = sums_from_hex(header[start:end].decode())
    return b"".join([header[:start], b"0" * (16 * count), header[end:]]), sums


def framed_entries(metadata: Mapping[str, str], entries: Sequence[str], file: str) -> bytes:
    """Return a header, given what it says of the file and the JSON of each entry."""
    text = ",".join([f'"{_RESERVED}":{dump(metadata)}', *entries])
    return framed_header(f"{{{text}}}".encode(), file)


def with_sums(header: bytes, sums: Sums) -> bytes:
    """Put checksums into a header that has room for them."""
    start = 8 + len(_SUMS_BEGIN)
    text = sums_to_hex(sums).encode()
    assert header[8:start] == _SUMS_BEGIN
    return b"".join([header[:start], text, header[start + len(text) :]])


def framed_header(text: bytes, file: str) -> bytes:
    r"""Return a header with its length before it, and spaces after it so that data is aligned."""
    text += b" " * (-(8 + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER:
        need = f"its header would take {len(text):,} bytes, and {MAX_HEADER:,} are the most"
        raise FormatError(file, f"{need}; save fewer keys in one file")
    return len(text).to_bytes(8, "little") + text


def header_length(first: bytes, file: str, size: int) -> int:
    """Return where a file's data begins, given its first eight bytes and its size."""
    if len(first) < 8:
        raise FormatError(file, f"it has {size} bytes, too few for a safetensors header")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER or length + 8 > size:
        raise FormatError(
            file, f"its header would take {length:,} bytes and the file has {size:,}; it is damaged"
        )
    return length + 8


def read_header(store: Store, file: str) -> Header:
    """Read and check the header of a file."""
    size = store.size(file)
    return parse_header(read_header_text(store, file, size), file, size)


def read_header_text(store: Store, file: str, size: int) -> bytes:
    """Read a header of a file of so many bytes, in one request if it is short."""
    data = read_bytes(store, file, 0, min(size, _FIRST))
    length = header_length(data[:8], file, size)
    if length > len(data):
        data += read_bytes(store, file, len(data), length - len(data))
    return data[:length]


def parse_header(data: bytes, file: str, size: int) -> Header:
    """Read a header and check all that it says against the file's size."""
    length = header_length(data[:8], file, size)
    table = _objects(_load(data[8:length], file, "its header"), file, "its header")
    raw = _objects(table.pop(_RESERVED, {}), file, "its `__metadata__`")
    metadata = {str(k): str(v) for k, v in raw.items()}
    sharding = _section(metadata, "DCP_SHARDING_INFO", file)
    own = _section(metadata, "shardplan", file)
    encoded = _objects(own.get("encoded", {}), file, "encoded")
    kinds: dict[Any, tuple[Kind, int]] = {}
    found = []
    for name, entry in table.items():
        try:
            kind, nbytes = _kind(name, entry, sharding, encoded, kinds)
            begin, end = _numbers(entry["data_offsets"])
            if end - begin != nbytes:
                what = f"{entry['dtype']} of shape {entry['shape']}"
                raise ValueError(f"{end - begin} bytes do not hold {what}")
            found.append((length + begin, nbytes, Slot(name, *kind, length + begin)))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            reason = f"its header's entry for `{name}` is damaged: {error}"
            raise FormatError(file, reason) from None
    found.sort()
    _check_cover(found, file, length, size)
    slots = [slot for _, _, slot in found]
    ids = (own.get("save_id"), own.get("file"))
    save_id, written_as = (None if i is None else str(i) for i in ids)
    sums = _sums(metadata.pop(_SUMS, None), len(slots), file)
    return Header(file, {s.name: s for s in slots}, length, save_id, written_as, metadata, sums)


def _sums(text: str | None, count: int, file: str) -> Sums | None:
    if text is None:
        return None
    if len(text) != 16 * count:
        raise FormatError(file, f"it has {count} tensors, and {len(text)} digits of checksums")
    try:
        return sums_from_hex(text)
    except ValueError:
        raise FormatError(file, "its checksums are not hexadecimal numbers") from None


def _kind(
    name: str,
    entry: Any,
    sharding: Mapping[str, Any],
    encoded: Mapping[str, Any],
    kinds: dict[Any, tuple[Kind, int]],
) -> tuple[Kind, int]:
    """Return what one entry is, and its bytes, or raise any of the errors that damage leads to.

    ``kinds`` remembers what was read before, as most entries are alike.
    """
    shape = _numbers(entry["shape"])
    offsets = _numbers(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(shape)
    inner = str(encoded[name]) if name in encoded else None
    key = entry["dtype"], shape, offsets, inner
    if key not in kinds:
        kind = _checked_kind(entry["dtype"], shape, offsets, inner)
        kinds[key] = kind, math.prod(kind[1]) * itemsize(kind[0])
    return kinds[key]


def _checked_kind(stored: Any, shape: Sizes, offsets: Sizes, inner: str | None) -> Kind:
    if stored not in TORCH_NAMES:
        raise ValueError(f"unknown dtype {stored!r}")
    dtype = TORCH_NAMES[stored]
    if len(offsets) != len(shape):
        raise ValueError(f"it starts at {offsets}, which does not fit its shape {shape}")
    if inner is not None:
        if dtype != "uint8" or not shape or shape[-1] != itemsize(inner):
            raise ValueError(f"{stored} of shape {shape} does not encode {inner}")
        dtype, shape, offsets = inner, shape[:-1], offsets[:-1]
    factor = _PACKED.get(stored, 1)
    if factor > 1:
        shape, offsets = _unpacked(shape, factor), _unpacked(offsets, factor)
    fault = shape_fault(shape)
    if fault is not None:
        raise ValueError(f"it {fault}")
    return dtype, shape, offsets


def _unpacked(numbers: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Divide the last of some numbers of a packed dtype, which must go up."""
    if not numbers or numbers[-1] % factor:
        raise ValueError(f"{list(numbers)} ends within a byte")
    return (*numbers[:-1], numbers[-1] // factor)


def _check_cover(found: Sequence[tuple[int, int, Slot]], file: str, length: int, size: int) -> None:
    """Refuse tensors that overlap, leave holes or do not end where the file ends."""
    at = length
    for begin, nbytes, slot in found:
        if begin != at:
            what = "overlap" if begin < at else "leave a hole"
            raise FormatError(file, f"its tensors {what} at byte {begin:,}, `{slot.name}`")
        at += nbytes
    if at != size:
        what = "it is cut short" if at > size else "it runs on"
        raise FormatError(file, f"its tensors end at byte {at:,} and the file at {size:,}: {what}")


def _numbers(values: Any) -> tuple[int, ...]:
    whole = isinstance(values, list) and _WHOLE.issuperset(map(type, values))
    if not whole or (values and not 0 <= min(values) <= max(values) < _MAX_NUMBER):
        raise ValueError(f"expected a list of whole numbers, not {str(values)[:80]}")
    return tuple(values)


def _section(metadata: Mapping[str, str], key: str, file: str) -> dict[str, Any]:
    text = metadata.get(key)
    return {} if text is None else _objects(_load(text.encode(), file, key), file, key)


def _objects(value: Any, file: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(file, f"{what} is not a JSON object but {str(value)[:80]!r}")
    return value


def _load(text: bytes, file: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(file, f"{what} is not JSON: {error}") from None


def dump(value: Any) -> str:
    """Return JSON as headers have it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def refused_name(name: str) -> str | None:
    """Return why a tensor cannot have this name in a safetensors file; None if it can."""
    if name == _RESERVED:
        return "is a name that safetensors keeps for itself; rename it"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "has a lone surrogate in its name, which UTF-8 cannot carry; rename it"
    return None
