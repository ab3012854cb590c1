"""Pickles that others wrote, read without running code: what they may name is listed, and no more.

A pickle is walked over once before it is read, so that it cannot ask for memory or time that its
own length does not justify. Whatever a pickle names is then one of our own stand-ins, which are
sealed: a pickle cannot change them. Those that copy what they are given are counted, since they may
be given one large object again and again. Nothing here needs torch.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = [
    "Copies",
    "CutShort",
    "PickleError",
    "RefusedName",
    "Sealed",
    "Unsound",
    "check_parts",
    "check_pickle",
    "load_pickle",
    "pickle_end",
]


class PickleError(ValueError):
    """A pickle that is damaged, or asks for what it may not have."""


class Unsound(PickleError):
    """A pickle that nobody should read: not whole, or made to use up memory or time."""


class CutShort(Unsound):
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
_END, _SHORT, _LONG, _LONGER, _LINES, _REFUSED = 0, -1, -4, -8, -2, -9
_MEMOIZE, _PUT, _GET = -11, -12, -13  # what numbers objects, and takes them up again


def _widths() -> tuple[int, ...]:
    plain = [
        *(b"(", b"0", b"1", b"N", b"\x88", b"\x89", b"]", b"}", b")", b"\x8f", b"\x91", b"a"),
        *(b"e", b"s", b"u", b"\x90", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b", b"\x81"),
        *(b"\x92", b"\x93", b"Q"),
    ]
    known = dict.fromkeys(plain, 1)
    known |= {b"\x80": 2, b"K": 2, b"M": 3, b"J": 5, b"G": 9, b"\x95": 9}
    known |= {b"\x94": _MEMOIZE, b"q": _PUT, b"r": _PUT, b"h": _GET, b"j": _GET}
    known |= {b"c": _LINES, b".": _END}
    known |= dict.fromkeys([b"\x8a", b"\x8c", b"C", b"U"], _SHORT)
    known |= dict.fromkeys([b"\x8b", b"X", b"B", b"T"], _LONG)
    known |= dict.fromkeys([b"\x8d", b"\x8e", b"\x96"], _LONGER)
    return tuple(known.get(bytes([code]), _REFUSED) for code in range(256))


_WIDTHS: Final = _widths()
# Operations that leave an object on top which is certainly no tuple or frozenset with parts.
_NO_TUPLE: Final = b"NK\x88\x89]})\x8fMJGRQ\x81\x92\x93cX\x8c\x8dCB\x8eUT\x96\x8a\x8b"
_MAYBE: Final = bytes(code not in _NO_TUPLE for code in range(256))
_FEW: Final = 8  # tuples that are taken up again can at worst multiply work by as much
_PARTS: Final = 1 << 24  # what may be visited in any case, being the work of a second
_OFTEN: Final = 16  # times that an honest pickle's parts are there on average, and more
_MAKER, _NAME, _NUMBER = 1, 2, 4  # what an object is: the type bytearray, its name, holds a number


def pickle_end(data: bytes, begin: int = 0) -> int:
    """Say where a pickle ends: its operations must be known, and promise no more than is there.

    >>> two = pickle.dumps("one") + pickle.dumps("two")
    >>> load_pickle(two[pickle_end(two) :], {})
    'two'

    Raises:
        CutShort: The end is not there.
        Unsound: It is damaged.
    """
    return _walk(data, begin)[0]


def check_pickle(data: bytes, begin: int = 0) -> int:
    """Say where a pickle ends, and refuse one that would take all memory or time to read.

    Raises:
        Unsound: It would, or is damaged.
    """
    end, again = _walk(data, begin)
    if again > _FEW:
        _weigh(data[begin:end])
    if data.find(b"bytearray", begin, end) >= 0:
        _refuse_lengths(data[begin:end])
    return end


def _walk(data: bytes, begin: int) -> tuple[int, int]:
    """Return where a pickle ends, and how often at most it takes up a tuple once more."""
    at, end, widths, maybe, before = begin, len(data), _WIDTHS, _MAYBE, 0
    made = bytearray()  # which of the objects that are numbered may be tuples
    memoized = put = again = 0
    while at < end:
        code = data[at]
        width = widths[code]
        if width > 0:
            at += width
        elif width == _MEMOIZE:
            made.append(maybe[before])
            memoized = at = at + 1
        elif width <= _PUT:
            wide = at + (2 if code in b"hq" else 5)
            number = int.from_bytes(data[at + 1 : wide], "little")
            if width == _GET:
                again += made[number] if number < len(made) else 0
            elif number > end:
                raise Unsound("it numbers more objects than it can hold")
            else:
                if number >= len(made):
                    made.extend(bytes(number + 1 - len(made)))
                made[number], put = maybe[before], 1
            at = wide
        elif width == _SHORT:
            at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
        elif width == _END:  # nobody numbers objects in both ways; then no number is certain
            return at + 1, end if memoized and put else again
        else:
            at = _skip(data, at, width)
        before = code
    raise CutShort


def _skip(data: bytes, at: int, width: int) -> int:
    """Return where the next operation begins."""
    if width == _REFUSED:
        raise Unsound(f"it uses operation {data[at]:#04x} at byte {at:,}")
    if width != _LINES:
        return at + 1 - width + int.from_bytes(data[at + 1 : at + 1 - width], "little")
    for _ in range(2):
        at = data.find(b"\n", at + 1)
        if at < 0:
            raise CutShort
    return at + 1


def _weigh(data: bytes) -> None:
    """Refuse a pickle that takes up tuples again and again which hold tuples again and again.

    Python hashes a tuple, and compares it, part by part, however often a part is there.
    """
    left = [_allowed(len(data))]

    def make(code: pickletools.OpcodeInfo, _: Any, parts: list[int]) -> int:
        whole = code.name.startswith("TUPLE") or code.name == "FROZENSET"
        return 1 + sum(parts) if whole else max(parts, default=1)

    def again(parts: int) -> None:
        left[0] -= parts
        if left[0] < 0:
            raise Unsound("it holds more tuples in tuples than its own length justifies")

    _simulate(data, make, again)


def _refuse_lengths(data: bytes) -> None:
    """Refuse a pickle that makes a bytearray of a number: torch would make one of any length."""

    def make(code: pickletools.OpcodeInfo, argument: Any, parts: list[int]) -> int:
        if code.name == "GLOBAL" and argument.endswith(" bytearray"):
            return _MAKER
        if code.name == "STACK_GLOBAL" and parts[-1] & _NAME:
            return _MAKER
        if code.name in ("REDUCE", "NEWOBJ") and parts[0] & _MAKER and parts[1] & _NUMBER:
            raise Unsound("it makes a bytearray of a mere number")
        if argument == "bytearray":
            return _NAME
        number = _NUMBER if isinstance(argument, int) else 0
        return number | (_NUMBER if any(part & _NUMBER for part in parts) else 0)

    _simulate(data, make, lambda _: None)


def _simulate(
    data: bytes,
    make: Callable[[pickletools.OpcodeInfo, Any, list[int]], int],
    again: Callable[[int], None],
) -> None:
    """Follow a pickle without making anything of it, but for a number that describes each object.

    Args:
        data: The pickle.
        make: Describes what an operation makes, given its argument and what it takes.
        again: Is told the description of what is taken up again.
    """
    stack, marks, memo = list[int](), list[int](), dict[Any, int]()
    try:
        for code, number, _ in pickletools.genops(data):
            name, takes = code.name, code.stack_before
            if name == "MARK":
                marks.append(len(stack))
            elif name.endswith("GET"):
                again(memo[number])
                stack.append(memo[number])
            elif name == "MEMOIZE" or name.endswith("PUT"):
                memo[len(memo) if number is None else number] = stack[-1]
            elif name == "POP" and marks[-1:] == [len(stack)]:
                marks.pop()
            else:
                sliced = pickletools.stackslice in takes
                first = marks.pop() - len(takes) + 2 if sliced else len(stack) - len(takes)
                parts = stack[max(first, 0) :]
                del stack[max(first, 0) :]
                if code.stack_after:
                    stack.append(make(code, number, parts))
    except (IndexError, KeyError, ValueError) as error:
        if isinstance(error, Unsound):
            raise
        raise Unsound("it is damaged") from None


def _allowed(nbytes: int) -> int:
    """Return how many parts of a pickle of this length may be visited: some are there often."""
    return max(_PARTS, _OFTEN * nbytes)


def check_parts(value: Any, nbytes: int) -> None:
    """Refuse a value of dicts, lists and tuples whose parts cannot be visited one by one.

    Args:
        value: What a pickle held.
        nbytes: How long the pickle was.

    Raises:
        Unsound: It holds itself, or parts of it so often that there is no end of them, or too deep.
    """
    try:
        parts = _parts(value, {})
    except RecursionError:
        raise Unsound("it is nested too deeply") from None
    if parts > _allowed(nbytes):
        raise Unsound("it holds itself, or its parts more often than its own length justifies")


def _parts(value: Any, known: dict[int, float]) -> float:
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [*value]
    else:
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf  # for as long as its parts are counted
        known[id(value)] = 1 + sum(_parts(part, known) for part in parts)
    return known[id(value)]


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
            raise Unsound("it makes more copies than its own length justifies")

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
            an immutable value, a class whose type is `Sealed`, or a `Copies`. None may return a
            tuple that holds tuples.
        persistent: What turns a persistent id into an object.

    >>> load_pickle(pickle.dumps([1, {"a": (2.5, b"x")}]), {})
    [1, {'a': (2.5, b'x')}]
    >>> load_pickle(b"cposix\nsystem\n(X\x04\x00\x00\x00echotR.", {})
    Traceback (most recent call last):
    shardplan.io.pickles.RefusedName: it names `posix.system`, which is not allowed there

    Raises:
        RefusedName: It names something else; nothing of it was called.
        Unsound: It would take all memory or time to read, or is damaged.
        PickleError: It is damaged.
    """
    check_pickle(data)
    unpickler = _Unpickler(data, classes, persistent)
    try:
        found = unpickler.load()
        check_parts(found, len(data))
        return found
    except PickleError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        reason = str(error) or type(error).__name__
        raise PickleError(f"it is damaged: {reason[:200]}") from error
    finally:
        unpickler.memo = {}  # it refers to itself there, and would keep all that it read
