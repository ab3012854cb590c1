"""What do the pickles in `torch.save` archives say? Read without torch, and without running code.

Here are the records that describe a tensor (which storage, from where on, in which shape), and
pickles of plain values. Tensors among values are the affair of `torchnested`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import attrs

from shardplan.planning.dtypes import ITEMSIZE

from .pickles import Copies, PickleError, Sealed, load_pickle

__all__ = [
    "PLAIN",
    "STORAGES",
    "StorageRef",
    "StoredTensor",
    "load_plain",
    "stored_tensor",
]


@attrs.frozen(getstate_setstate=False)  # so that a pickle cannot change what was made
class StorageRef:
    """The bytes that a tensor is a view of.

    Attributes:
        key: Its name: the record is ``data/<key>``.
        dtype: What its elements are, by name; ``"uint8"`` if that is left to the tensor.
        numel: How many there are.
        first: Where it begins in what is stored under its name, in bytes.
    """

    key: str
    dtype: str
    numel: int
    first: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.numel * ITEMSIZE[self.dtype]


@attrs.frozen(getstate_setstate=False)
class StoredTensor:
    """A tensor as a pickle describes it.

    Attributes:
        storage: What it is a view of.
        dtype: What its elements are, by name.
        offset: Where in the storage it starts, in elements.
        size, stride: Its shape, and how far apart its elements lie, in elements.
        conj, neg: Whether its elements are the conjugates, or the negatives, of what is stored.
    """

    storage: StorageRef
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def span(self) -> int:
        """How many elements lie between its first and its last, both included."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    def fault(self) -> str | None:
        """Say why it cannot be; None if it can."""
        numbers = (self.offset, *self.size, *self.stride)
        if len(self.size) != len(self.stride) or min(numbers) < 0 or self.storage.numel < 0:
            return f"shape {self.size} and strides {self.stride} from {self.offset} on"
        if self.span and (self.offset + self.span) * ITEMSIZE[self.dtype] > self.storage.nbytes:
            return f"shape {self.size} in a storage of {self.storage.nbytes:,} bytes"
        return None


def _ints(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(n) is int for n in value):
        raise PickleError(f"a shape is a {type(value).__name__}, not a tuple of whole numbers")
    return value


def stored_tensor(
    storage: Any, dtype: Any, offset: Any, size: Any, stride: Any, extra: Any
) -> StoredTensor:
    """Make a tensor of what a pickle says of it, which may be anything.

    Raises:
        PickleError: There can be no such tensor.
    """
    if not isinstance(storage, StorageRef) or type(offset) is not int or type(dtype) is not str:
        raise PickleError("a tensor is made of something else than a storage")
    if not isinstance(extra, (dict, type(None))):
        raise PickleError("a tensor's flags are no dict")
    flags = {k: bool(v) for k, v in (extra or {}).items() if type(k) is str}
    if len(flags) < len(extra or {}) or not flags.keys() <= {"conj", "neg"}:
        raise PickleError(f"a tensor has unknown flags, such as {', '.join(flags)[:80]}")
    made = StoredTensor(storage, dtype, offset, _ints(size), _ints(stride), **flags)
    why = made.fault()
    if why is not None:
        raise PickleError(f"a tensor cannot have {why}")
    return made


class _Encode(metaclass=Sealed):
    """How protocol 2 writes bytes: as text of which each character is one."""

    def __new__(cls, text: Any, codec: Any = None) -> Any:
        if type(text) is not str or codec != "latin1":
            raise PickleError("bytes are encoded in an unknown way")
        return text.encode("latin1")


class _Bytearray(metaclass=Sealed):
    """A bytearray of what is there; the type itself would make one of any length that is named."""

    def __new__(cls, data: Any = b"", codec: Any = "latin-1") -> Any:
        if type(data) is bytes:
            return bytearray(data)
        if type(data) is not str or codec != "latin-1":
            raise PickleError("a bytearray is encoded in an unknown way")
        return bytearray(data, "latin-1")


STORAGES: Final = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
"""The dtypes of torch's kinds of storages."""

PLAIN: Final[Mapping[str, Any]] = {
    "collections.OrderedDict": Copies(OrderedDict),
    "_codecs.encode": Copies(_Encode),
    "builtins.bytearray": Copies(_Bytearray),
    "__builtin__.bytearray": Copies(_Bytearray),
    "builtins.set": Copies(set),
    "__builtin__.set": Copies(set),
    "builtins.complex": complex,
    "__builtin__.complex": complex,
}
"""What pickles of plain values name, and what they get instead."""


def load_plain(data: bytes) -> Any:
    """Read the pickle of an archive that holds plain values and nothing else.

    >>> import pickle
    >>> load_plain(pickle.dumps({"lr": 0.1, "raw": b"x", "seen": {1}}, protocol=2))
    {'lr': 0.1, 'raw': b'x', 'seen': {1}}

    Raises:
        RefusedName: It names something else, such as a tensor: see what `torch.load` says.
        PickleError: It is damaged.
    """
    return load_pickle(data, PLAIN)
