"""Pickles that others wrote, read without running code: what they may name is listed, and no more.

A pickle is walked over once before it is read, so that it cannot ask for memory that its own
length does not justify. Whatever a pickle names is then one of our own stand-ins, which are sealed:
a pickle cannot change them. Those that copy what they are given are counted, since they may be
given one large object again and again. Nothing here needs torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = [
    "Copies",
    "CutShort",
    "PickleError",
    "RefusedName",
    "Sealed",
    "load_pickle",
    "pickle_end",
]


class PickleError(ValueError):
    """A pickle that is damaged, or asks for what it may not have."""


class CutShort(PickleError):
    """A pickle that goes on where what was read of it ends."""

    def __init__(self) -> None:
        super().__init__("it is cut short")


class RefusedName(PickleError):
    """A class or function that a pickle names and may not use.

    Attributes:
        name: Its full name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"it names `{name}`, which is not allowed there")

    def __reduce__(self) -> tuple[Any, ...]:
        return RefusedName, (self.name,)


class Sealed(type):
    """The type of classes that a pickle may be given: nothing can be set on them."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise PickleError(f"it tries to change a class, {cls.__name__}")


class Copies:
    """Something that a pickle may be given which copies its argument: what it makes is counted.

    Args:
        make: What makes the copy.
    """

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class _Counted:
    """What a pickle gets for a `Copies`: it cannot change this."""

    __slots__ = ("_add", "_make")
    _add: Callable[[int], None]
    _make: Callable[..., Any]

    def __init__(self, make: Callable[..., Any], add: Callable[[int], None]) -> None:
        object.__setattr__(self, "_make", make)
        object.__setattr__(self, "_add", add)

    def __setattr__(self, name: str, value: object) -> None:
        raise PickleError("it tries to change a function")

    def __call__(self, *args: Any) -> Any:
        made = self._make(*args)
        self._add(len(made))
        return made


# How many bytes an operation takes, its own included; or, if only its data tells, one of these.
_END, _SHORT, _LONG, _LONGER, _LINES, _SLOT, _REFUSED = 0, -1, -4, -8, -2, -3, -9


def _widths() -> tuple[int, ...]:
    plain = [
        *(b"(", b"0", b"1", b"N", b"\x88", b"\x89", b"]", b"}", b")", b"\x8f", b"\x91", b"a"),
        *(b"e", b"s", b"u", b"\x90", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b", b"\x81"),
        *(b"\x92", b"\x93", b"\x94", b"Q"),
    ]
    known = dict.fromkeys(plain, 1)
    known |= {b"\x80": 2, b"K": 2, b"h": 2, b"q": 2, b"M": 3, b"J": 5, b"j": 5, b"G": 9}
    known |= {b"\x95": 9, b"r": _SLOT, b"c": _LINES, b".": _END}
    known |= dict.fromkeys([b"\x8a", b"\x8c", b"C", b"U"], _SHORT)
    known |= dict.fromkeys([b"\x8b", b"X", b"B", b"T"], _LONG)
    known |= dict.fromkeys([b"\x8d", b"\x8e", b"\x96"], _LONGER)
    return tuple(known.get(bytes([code]), _REFUSED) for code in range(256))


_WIDTHS: Final = _widths()


def pickle_end(data: bytes, begin: int = 0) -> int:
    """Say where a pickle ends: its operations must be known, and promise no more than is there.

    >>> two = pickle.dumps("one") + pickle.dumps("two")
    >>> load_pickle(two[pickle_end(two) :], {})
    'two'

    Raises:
        CutShort: The end is not there.
        PickleError: It is damaged.
    """
    at, end, widths = begin, len(data), _WIDTHS
    while at < end:
        width = widths[data[at]]
        if width > 0:
            at += width
        elif width == _END:
            return at + 1
        elif width == _SHORT:
            at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
        elif width == _SLOT:
            if int.from_bytes(data[at + 1 : at + 5], "little") > end:
                raise PickleError("it numbers more objects than it can hold")
            at += 5
        elif width == _LINES:
            for _ in range(2):
                at = data.find(b"\n", at + 1)
                if at < 0:
                    raise CutShort
            at += 1
        elif width == _REFUSED:
            raise PickleError(f"it uses operation {data[at]:#04x} at byte {at:,}")
        else:
            at += 1 - width + int.from_bytes(data[at + 1 : at + 1 - width], "little")
    raise CutShort


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        classes: Mapping[str, Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._classes, self._persistent = classes, persistent
        self._left = len(data)  # each element that is copied takes a byte of the pickle at least

    def find_class(self, module: str, name: str) -> Any:
        found = self._classes.get(f"{module}.{name}")
        if found is None:
            raise RefusedName(f"{module}.{name}")
        return _Counted(found.make, self._count) if isinstance(found, Copies) else found

    def _count(self, elements: int) -> None:
        self._left -= elements
        if self._left < 0:
            raise PickleError("it makes more copies than its own length justifies")

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise RefusedName("persistent_load")
        return self._persistent(pid)


def load_pickle(
    data: bytes, classes: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    r"""Read a pickle.

    Args:
        data: The pickle.
        classes: What it may name, by full name, and what it gets instead: an immutable built-in,
            an immutable value, a class whose type is `Sealed`, or a `Copies`.
        persistent: What turns a persistent id into an object.

    >>> load_pickle(pickle.dumps([1, {"a": (2.5, b"x")}]), {})
    [1, {'a': (2.5, b'x')}]
    >>> load_pickle(b"cposix\nsystem\n(X\x04\x00\x00\x00echotR.", {})
    Traceback (most recent call last):
    shardplan.io.pickles.RefusedName: it names `posix.system`, which is not allowed there

    Raises:
        RefusedName: It names something else; nothing of it was called.
        PickleError: It is damaged.
    """
    pickle_end(data)
    unpickler = _Unpickler(data, classes, persistent)
    try:
        return unpickler.load()
    except PickleError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        reason = str(error) or type(error).__name__
        raise PickleError(f"it is damaged: {reason[:200]}") from error
    finally:
        unpickler.memo = {}  # it refers to itself there, and would keep all that it read
