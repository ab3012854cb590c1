r"""A restricted unpickler: it calls only functions from a table, and bounds what they cost.

A name in a pickle is looked up in a table, which holds a constant or a `Call`: a function of ours
that returns a plain value or a *stand-in*, a sealed record that describes an object instead of
being it. Nothing else is called. Memory and time are bounded by the pickle's own length, which
Python's unpickler cannot be restricted to, as it hashes a key before its cost is known:

1. A length that reaches past the pickle's end is an error. Other operations make one small object.
2. There is a budget of work, proportional to the length. Whatever is passed to a `Call`, or becomes
   a key, is charged before as if all of it were copied and hashed.
3. Few keys of one collection may have the same hash.
4. What is taken from the memo again is charged for all its parts, as often as each occurs: a walk
   over the result visits no more than that.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import attrs


class PickleError(ValueError):
    """A pickle that is damaged, or asks for something that is not allowed."""


class RefusedName(PickleError):
    """A class or function that a pickle names and may not use."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"it names `{name}`, which is not allowed there")


def require(valid: bool, reason: str) -> None:
    """Raise a `PickleError` unless a condition holds."""
    if not valid:
        raise PickleError(reason)


class StandIn:
    """A sealed description of an object: what a pickle gets in place of it."""

    __slots__ = ()
    needs_torch: ClassVar[bool] = False

    parts: Sequence[Any] = ()  # everything that it holds

    def build(self, builder: Any) -> Any:
        """Return the object; ``builder`` is a `standins.Builder`."""
        raise PickleError(f"it holds a {type(self).__name__} as a value")


class StatefulStandIn(StandIn):
    """A stand-in to which the pickle may give state; None if it gave none."""

    __slots__ = ("state",)
    state: Any

    def __init__(self) -> None:
        self.state = None

    @property
    def parts(self) -> Sequence[Any]:  # type: ignore[override]
        """Everything that it holds."""
        return (self.state,)


class Sealed(StatefulStandIn):
    """An object of a class that is not allowed; what the pickle puts into it is dropped."""

    __slots__ = ("name",)

    def __init__(self, name: str, *_: Any) -> None:
        super().__init__()
        self.name = name

    def build(self, builder: Any) -> Any:
        """Refuse to build it."""
        raise RefusedName(self.name)


@attrs.frozen(eq=False)
class Call:
    """A function that a pickle may call; ``free`` if its arguments are not charged."""

    name: str
    make: Callable[..., Any]
    free: bool = False
    new: Callable[..., Any] = attrs.Factory(lambda call: call.make, takes_self=True)


def calls(table: Mapping[str, Callable[..., Any]]) -> dict[str, Call]:
    """Return a table of names for `load_pickle`, given the function of each."""
    return {name: Call(name, make) for name, make in table.items()}


_DICTS: Final = (dict, OrderedDict, Counter)
_GROUPS: Final = frozenset((tuple, list, set, frozenset, *_DICTS))
_TEXTS: Final = (str, bytes, bytearray)
_FIXED: Final = frozenset((float, bool, complex, type(None), Call))  # types of one size
_ALONE: Final = _FIXED | {str, int, bytes}  # those that hold no others and are never copied
_SHARED: Final = 1 << 19  # parts that may be shared in any case
_WORK: Final = 1 << 18  # bytes that may be copied or hashed in any case
_PART: Final = 8  # bytes that an element of a collection is charged for
_SHORT: Final = 256  # characters of a key that need not be charged
_ALIKE: Final = 40  # keys of one collection that may have the same hash; floats reach 34


def load_pickle(
    data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    r"""Return the value of a pickle.

    >>> import pickle
    >>> load_pickle(pickle.dumps([1, {"a": (2.5, b"x")}]), {})
    [1, {'a': (2.5, b'x')}]
    >>> load_pickle(b"cposix\nsystem\n(X\x04\x00\x00\x00echotR.", {})
    Traceback (most recent call last):
    shardplan.io.formats.torch_save.unpickler.RefusedName: it names `posix.system`, which ...

    Raises:
        RefusedName: It names something else; nothing of it was called.
        PickleError: It is damaged, or would take more memory or time than its length justifies.
    """
    machine = _Machine(data, names, persistent)
    try:
        value = machine.run()
        machine.check_shared()
    except PickleError:
        raise
    except RecursionError:
        raise PickleError("it is nested too deeply") from None
    except Exception as error:  # a damaged pickle may pass anything to a `Call`
        reason = str(error) or type(error).__name__
        raise PickleError(f"it is damaged: {reason[:200]}") from error
    return value


class _Machine:
    def __init__(
        self, data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        self._data, self._names, self._persistent = data, names, persistent
        self._again: list[Any] = []  # objects taken from the memo, once for each time
        self._hashes: dict[int, tuple[Any, Counter[int]]] = {}  # by the id of a collection
        self._work = _WORK + _PART * len(data)

    def run(self) -> Any:
        """Run the pickle in one loop, frequent operations first: metadata has millions of them."""
        data, size, alone, again = self._data, len(self._data), _ALONE, self._again
        number4, marked, memo = _U4, _MARKED, dict[int, Any]()
        marks, stack = list[list[Any]](), list[Any]()
        push, pos = stack.append, 0
        try:
            while True:
                op = data[pos]
                pos += 1
                if op == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                elif op == 0x68:  # BINGET
                    push(found := memo[data[pos]])
                    pos += 1
                    if type(found) not in alone:
                        again.append(found)
                elif op == 0x6A:  # LONG_BINGET
                    push(found := memo[number4(data, pos)[0]])
                    pos += 4
                    if type(found) not in alone:
                        again.append(found)
                elif op == 0x4B:  # BININT1
                    push(data[pos])
                    pos += 1
                elif op == 0x72:  # LONG_BINPUT
                    memo[number4(data, pos)[0]] = stack[-1]
                    pos += 4
                elif op == 0x28:  # MARK
                    marks.append(stack)
                    stack = []
                    push = stack.append
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x81 or op == 0x52:  # NEWOBJ, REDUCE
                    args, call = stack.pop(), stack[-1]
                    if type(call) is not Call or type(args) is not tuple:
                        raise PickleError("it calls what is not a function, or without a tuple")
                    if args and not call.free:
                        self._charge(args)
                    make = call.new if op == 0x81 else call.make
                    stack[-1] = make(*args)
                elif op in marked:
                    items, stack = stack, marks.pop()
                    push = stack.append
                    if op == 0x75:  # SETITEMS
                        self._set_items(stack[-1], items)
                    elif op == 0x74:  # TUPLE
                        push(tuple(items))
                    elif op == 0x65:  # APPENDS
                        _expect(stack[-1], list).extend(items)
                    elif op == 0x90:  # ADDITEMS
                        found = _expect(stack[-1], set)
                        self._check_keys(found, items)
                        found.update(items)
                    else:  # FROZENSET
                        self._charge(*items)
                        check_alike(items)
                        push(frozenset(items))
                elif op == 0x62:  # BUILD
                    state, found = stack.pop(), stack[-1]
                    if isinstance(found, StatefulStandIn):
                        if type(state) is tuple:
                            self._charge(state)
                        found.state = state
                    elif type(found) is not OrderedDict:  # its attributes are dropped
                        kind = type(found).__name__
                        raise PickleError(f"it is damaged: it gives state to a {kind}")
                elif op in _EMPTY:
                    push(_EMPTY[op]())
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif op == 0x86:  # TUPLE2
                    found = stack.pop()
                    stack[-1] = (stack[-1], found)
                elif op == 0x8C or op == 0x58:  # SHORT_BINUNICODE, BINUNICODE
                    short = op == 0x8C
                    begin = pos + (1 if short else 4)
                    pos = begin + (data[pos] if short else number4(data, pos)[0])
                    push(str(data[begin:pos], "utf-8", "surrogatepass"))
                    if pos > size:
                        raise PickleError(_CUT)
                elif op == 0x71:  # BINPUT
                    memo[data[pos]] = stack[-1]
                    pos += 1
                elif op in _NUMBERS:
                    push(_NUMBERS[op].unpack_from(data, pos)[0])
                    pos += _NUMBERS[op].size
                elif op == 0x51:  # BINPERSID
                    stack[-1] = self._refer(stack[-1])
                elif op in _CONSTANTS:
                    push(_CONSTANTS[op])
                elif op == 0x61:  # APPEND
                    found = stack.pop()
                    _expect(stack[-1], list).append(found)
                elif op == 0x73:  # SETITEM
                    items = stack[-2:]
                    del stack[-2:]
                    self._set_items(stack[-1], items)
                elif op == 0x87:  # TUPLE3
                    items = stack[-3:]
                    del stack[-2:]
                    stack[-1] = tuple(items)
                elif op in _LENGTHS:
                    pos, found = _sized(data, pos, op)
                    push(found)
                elif op == 0x63:  # GLOBAL
                    end = data.index(b"\n", data.index(b"\n", pos) + 1)
                    module, name = str(data[pos:end], "utf-8").split("\n")
                    push(self._find(module, name))
                    pos = end + 1
                elif op == 0x93:  # STACK_GLOBAL
                    name = _expect(stack.pop(), str)
                    stack[-1] = self._find(_expect(stack[-1], str), name)
                elif op == 0x30:  # POP
                    stack.pop()
                elif op == 0x80:  # PROTO
                    if data[pos] > 5:
                        raise PickleError(f"it is of protocol {data[pos]}; 0 to 5 are known")
                    pos += 1
                elif op == 0x95:  # FRAME
                    pos += 8
                elif op == 0x2E:  # STOP
                    return stack.pop()
                else:
                    raise PickleError(f"it uses operation {op:#04x} at byte {pos - 1:,}")
        except struct.error:
            raise PickleError(_CUT) from None
        except LookupError:  # of the data at its end, of the memo, or of a stack
            raise PickleError(_CUT if pos >= size else "it is damaged") from None

    def _find(self, module: str, name: str) -> Any:
        self._charge(module, name)
        full = f"{_RENAMED.get(module, module)}.{name}"
        found = self._names.get(full)
        if found is None:
            raise RefusedName(full[:200])
        return found

    def _refer(self, pid: Any) -> Any:
        if self._persistent is None:
            raise RefusedName("persistent_load")
        self._charge(pid)
        return self._persistent(pid)

    def _charge(self, *values: Any) -> None:
        """Charge for copying, hashing and comparing values."""
        self._work -= _cost(values, self._work)
        if self._work < 0:
            raise PickleError("it copies or hashes more than its own length justifies")

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is Sealed:
            return
        keys = items[::2]
        if type(target) not in _DICTS or len(items) % 2:
            raise PickleError("it is damaged: it fills something that is not a dict")
        odd = [key for key in keys if type(key) is not str or len(key) > _SHORT]
        if odd:
            self._check_keys(target, odd)
        if type(target) is dict:
            target.update(zip(keys, items[1::2], strict=True))
            return
        for key, value in zip(keys, items[1::2], strict=True):
            target[key] = value

    def _check_keys(self, target: Any, keys: Sequence[Any]) -> None:
        """Charge for keys that are added, and check their hashes if the collection is large."""
        self._charge(*keys)
        if len(target) + len(keys) > _ALIKE:
            check_alike(keys, self._hashes.setdefault(id(target), (target, Counter()))[1])

    def check_shared(self) -> None:
        """Refuse objects that occur so often that walking over all parts would take too long."""
        left = _SHARED + _PART * len(self._data)
        times = Counter(map(id, self._again))
        for shared in {id(shared): shared for shared in self._again}.values():
            left -= times[id(shared)] * _cost([shared], left, walk=True)
            if left < 0:
                text = "it holds itself, or its parts more often than its length justifies"
                raise PickleError(text)


def _cost(values: Iterable[Any], most: int, walk: bool = False) -> int:
    """Return what it costs to copy and hash values: each part counts as often as it occurs.

    Counting stops at ``most``. With ``walk``, count what it costs to walk over them: stand-ins are
    entered, and text is not copied.
    """
    cost, todo = 0, list(values)
    skipped, each = (_ALONE - {bytes}, 1) if walk else (_FIXED, _PART)
    while todo and cost <= most:
        part = todo.pop()
        kind = type(part)
        cost += 1
        if kind in _TEXTS:
            cost += len(part)
        elif kind is int:
            cost += part.bit_length() >> 3
        elif kind in _GROUPS or (walk and isinstance(part, StandIn)):
            inner = part if kind in _GROUPS else part.parts
            if kind in _DICTS:
                inner = [*part, *part.values()]
            cost += _PART + each * len(inner)
            if cost <= most:
                todo += [value for value in inner if type(value) not in skipped]
    return cost


def check_alike(keys: Iterable[Any], known: Counter[int] | None = None) -> None:
    """Refuse keys of one collection that have the same hash: each is compared with all others."""
    known = Counter() if known is None else known
    for key in {id(key): key for key in keys if type(key) not in _TEXTS}.values():
        known[code := hash(key)] += 1
        if known[code] > _ALIKE:
            raise PickleError("it holds a collection with many keys of the same hash")


def _expect(value: Any, kind: type) -> Any:
    if type(value) is Sealed:
        return kind()  # which takes what would be put into the object, and is dropped
    if type(value) is not kind:
        raise PickleError(f"it is damaged: it takes a {type(value).__name__} for a {kind.__name__}")
    return value


def _sized(data: bytes, pos: int, op: int) -> tuple[int, Any]:
    """Read a value that follows its length; return where it ends, too."""
    width, make = _LENGTHS[op]
    begin = pos + width
    end = begin + int.from_bytes(data[pos:begin], "little")
    require(end <= len(data), _CUT)
    return end, make(data[begin:end])


_CUT: Final = "it is cut short"
_U4: Final = struct.Struct("<I").unpack_from
_NUMBERS: Final = {k: struct.Struct(f) for k, f in ((0x4D, "<H"), (0x4A, "<i"), (0x47, ">d"))}
_MARKED: Final = frozenset((0x75, 0x74, 0x65, 0x90, 0x91))  # operations on all since a mark
_whole: Final = partial(int.from_bytes, byteorder="little", signed=True)
_EMPTY: Final = {0x7D: dict, 0x5D: list, 0x8F: set}  # EMPTY_DICT, EMPTY_LIST, EMPTY_SET
_CONSTANTS: Final = {0x4E: None, 0x88: True, 0x89: False}  # NONE, NEWTRUE, NEWFALSE
_RENAMED: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # since Python 2
_LENGTHS: Final[dict[int, tuple[int, Callable[[bytes], Any]]]] = {
    0x8D: (8, lambda data: str(data, "utf-8", "surrogatepass")),  # BINUNICODE8
    0x43: (1, bytes),  # SHORT_BINBYTES
    0x42: (4, bytes),  # BINBYTES
    0x8E: (8, bytes),  # BINBYTES8
    0x96: (8, bytearray),  # BYTEARRAY8
    0x8A: (1, _whole),  # LONG1
    0x8B: (4, _whole),  # LONG4
}
