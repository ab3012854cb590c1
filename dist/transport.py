"""What one process sends another directly, over a TCP connection of their own, in CPU memory.

A rank that receives listens, and leaves its address in the store; who sends it something connects
to it. So ranks that exchange nothing are not connected. A thread for each peer and direction moves
the bytes, while the caller can be interrupted; `Worker` does the same for other calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import attrs

T = TypeVar("T")

_STEP: Final = 4 << 20  # bytes that are handed to the system at a time
_HELLO: Final = struct.Struct("<16sI")  # the receiver's token, and the sender's place
_SIZE: Final = struct.Struct("<Q")  # before each message
_PATIENCE: Final = 20.0  # seconds for a connection to be made, and to introduce itself


class StuckError(TimeoutError):
    """A call that did not return in time; it may still be running."""


@attrs.define(eq=False)
class Job:
    """A function to call, and its outcome once it is done."""

    function: Callable[[], Any]
    done: threading.Event = attrs.field(factory=threading.Event)
    value: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Call the function, and note the outcome."""
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        """Return or raise what the function did, once that is done."""
        if self.error is not None:
            raise self.error
        return self.value


class Worker:
    """A thread that makes calls which may block for ever, while the caller waits in Python.

    There, Ctrl-C works and timeouts are kept. `busy` is true until a call has returned.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False

    def call(
        self, function: Callable[[], T], limit: float, alive: Callable[[], float] = lambda: 0.0
    ) -> T:
        """Return or raise what ``function`` does, or raise StuckError after ``limit`` seconds.

        ``alive`` returns the monotonic time of the last sign of life: the limit counts from there.
        """
        call, start = self.begin(function), time.monotonic()
        while (left := max(start, alive()) + limit - time.monotonic()) > 0:
            if call.done.wait(left):
                result: T = call.result()
                return result
        raise StuckError(f"no reply in {limit:g} s")

    def begin(self, function: Callable[[], object]) -> Job:
        """Have ``function`` called after the calls made so far, and return the call."""
        if self._thread is None:
            self._thread = _start(self._serve)
        call = Job(function)
        self.busy = True
        self._calls.put(call)
        return call

    def post(self, function: Callable[[], object]) -> None:
        """Have ``function`` called after the calls made so far, and ignore its outcome."""
        self._calls.put(Job(function))

    def close(self) -> None:
        """Let the thread end after the calls it was given."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self.busy = True
            call.run()
            self.busy = False
            call.done.set()
            del call


@attrs.frozen
class Trouble:
    """Why a message was not sent or received, as text."""

    text: str
    broken: bool  # the connection is gone; otherwise the other side took too long


@attrs.define(eq=False)
class Delivery:
    """Memory that is being sent to, or filled by, another place; a `Pending`."""

    wire: Wire
    place: int
    memory: memoryview
    gone: Callable[[Mapping[int, Trouble]], Exception]  # returns the error for a lost place
    done: threading.Event = attrs.field(factory=threading.Event)
    error: Exception | None = None

    def wait(self) -> None:
        """Return once the transfer is done."""
        try:
            trouble = self._outcome()
            if trouble is not None:
                raise self.gone({self.place: trouble})
        except BaseException:
            self.wire.close()  # the comm is lost, and nothing may use the memory any more
            raise

    def _outcome(self) -> Trouble | None:
        # Half as long as for a collective, where this rank would else be missed by all others.
        limit, pause = self.wire.timeout / 2, 0.1
        end = time.monotonic() + limit
        while not self.done.wait(min(pause, max(end - time.monotonic(), 0))):
            if time.monotonic() >= end:
                return Trouble(f"sent or took nothing: no reply in {limit:g} s", broken=False)
            self.wire.meanwhile()
            pause = min(2 * pause, 2.0)
        return None if self.error is None else Trouble(f"is lost: {self.error}", broken=True)


class Wire:
    """Sends and receives bytes between ranks that may die.

    Args:
        store: Where ranks find each other's addresses.
        rank: This rank's place.
        timeout: Seconds that a message may take, twice.
        meanwhile: Called now and then while a message takes time; may raise.
    """

    def __init__(
        self, store: Any, rank: int, timeout: float, meanwhile: Callable[[], None]
    ) -> None:
        self.timeout, self.meanwhile = timeout, meanwhile
        self._store, self._rank, self._token = store, rank, secrets.token_bytes(16)
        self._lock, self._closed = threading.Lock(), False
        self._listener: socket.socket | None = None
        self._lines: dict[tuple[int, bool], SimpleQueue[Delivery | None]] = {}
        self._came: defaultdict[int, SimpleQueue[socket.socket | None]] = defaultdict(SimpleQueue)
        self._sockets: list[socket.socket] = []

    def post(
        self,
        place: int,
        memory: memoryview,
        gone: Callable[[Mapping[int, Trouble]], Exception],
        *,
        sends: bool,
    ) -> Delivery:
        """Begin to send memory to one place, or to receive into it; any thread may do so.

        The memory must not change until the transfer is done.
        """
        transfer = Delivery(self, place, memory.cast("B") if memory.nbytes else memory, gone)
        with self._lock:
            line = self._lines.get((place, sends))
            if line is None and not self._closed:
                line = self._lines[place, sends] = SimpleQueue()
                connect = partial(self._connect if sends else self._accepted, place)
                _start(partial(_serve, line, connect, _send if sends else _receive))
                if not sends and self._listener is None:
                    self._listener = _listen()
                    _start(partial(self._accept, self._listener))
        if line is None:
            transfer.error = ConnectionError("this comm was lost before")
            transfer.done.set()
        else:
            line.put(transfer)
        return transfer

    def close(self) -> None:
        """End all threads and connections."""
        with self._lock:
            self._closed = True
            for line in self._lines.values():
                line.put(None)
            for place, _ in self._lines:
                self._came[place].put(None)
            for one in (*self._sockets, *([self._listener] if self._listener else [])):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
                one.close()

    def _keep(self, one: socket.socket) -> socket.socket:
        """Have a connection closed with all others."""
        one.settimeout(None)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._closed:
                one.close()
            self._sockets.append(one)
        return one

    def _connect(self, place: int) -> socket.socket:
        """Connect to a rank, once it has left its address."""
        key, end, pause = f"address/{place}", time.monotonic() + self.timeout, 1e-3
        while not self._store.check([key]):
            if self._closed or time.monotonic() > end:
                raise ConnectionError("it left no address")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.2)
        address = json.loads(self._store.get(key))
        is_here = address["network"] == _network()
        for host in ["localhost"] if is_here else address["hosts"]:
            with contextlib.suppress(OSError):
                made = socket.create_connection((host, address["port"]), _PATIENCE)
                made.sendall(_HELLO.pack(bytes.fromhex(address["token"]), self._rank))
                return self._keep(made)
        raise ConnectionError(f"no connection to {', '.join(address['hosts'])}")

    def _accepted(self, place: int) -> socket.socket:
        """Return the connection that a rank has made."""
        with self._lock:
            came = self._came[place]
        one = came.get()
        if one is None:
            raise ConnectionError("this comm was lost before")
        return one

    def _accept(self, listener: socket.socket) -> None:
        """Leave this rank's address, and take the connections that come, until it is closed."""
        address = {
            "hosts": _own_hosts(self._store),
            "network": _network(),
            "port": listener.getsockname()[1],
            "token": self._token.hex(),
        }
        with contextlib.suppress(OSError, RuntimeError):
            self._store.set(f"address/{self._rank}", json.dumps(address))
            while True:
                one, _ = listener.accept()
                _start(partial(self._greet, one))

    def _greet(self, one: socket.socket) -> None:
        hello = bytearray(_HELLO.size)
        with contextlib.suppress(OSError):
            one.settimeout(_PATIENCE)
            _receive_into(one, memoryview(hello))
            token, place = _HELLO.unpack(hello)
            if secrets.compare_digest(token, self._token):
                self._keep(one)
                with self._lock:
                    self._came[place].put(one)
                return
        one.close()


def _serve(
    line: SimpleQueue[Delivery | None],
    connect: Callable[[], socket.socket],
    move: Callable[[socket.socket, memoryview], None],
) -> None:
    """Carry out transfers with one peer in one direction; after an error, all later ones fail."""
    connection: socket.socket | None = None
    failed: Exception | None = None
    while (transfer := line.get()) is not None:
        try:
            if failed is None:
                connection = connection or connect()
                move(connection, transfer.memory)
        except Exception as error:
            failed = error
        transfer.error = failed
        transfer.done.set()
        del transfer


def _send(connection: socket.socket, memory: memoryview) -> None:
    connection.sendall(_SIZE.pack(memory.nbytes))
    for part in _parts(memory):
        connection.sendall(part)


def _receive(connection: socket.socket, memory: memoryview) -> None:
    size = bytearray(_SIZE.size)
    _receive_into(connection, memoryview(size))
    (nbytes,) = _SIZE.unpack(size)
    if nbytes != memory.nbytes:
        raise ConnectionError(f"it sent {nbytes} bytes where {memory.nbytes} were expected")
    for part in _parts(memory):
        _receive_into(connection, part)


def _parts(memory: memoryview) -> Iterator[memoryview]:
    return (memory[start : start + _STEP] for start in range(0, memory.nbytes, _STEP))


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    while memory.nbytes:
        came = connection.recv_into(memory)
        if not came:
            raise ConnectionError("connection closed by peer")
        memory = memory[came:]


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="shardplan-comm", daemon=True)
    thread.start()
    return thread


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        options: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True}
        return socket.create_server(("", 0), backlog=4096, **options)
    return socket.create_server(("", 0), backlog=4096)


def _network() -> str:
    """Return a text that is equal for processes which reach each other as localhost."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _own_hosts(store: Any) -> list[str]:
    """Return the addresses at which other machines may reach this one, the likeliest first.

    That is the one from which this machine reaches the store.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    hosts = [_address_of(named)] if named else []
    for host in (getattr(store, "host", ""), "192.0.2.1", "2001:db8::1"):
        hosts += _way_to(host) if host else []
    found = list(dict.fromkeys(host for host in hosts if host))
    return [h for h in found if not h.startswith("127.") and h != "::1"] or [socket.gethostname()]


def _way_to(host: str) -> list[str]:
    """Return the address from which this machine would reach another; nothing is sent."""
    found = []
    with contextlib.suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                found.append(str(probe.getsockname()[0]))
    return found


def _address_of(interface: str) -> str:
    """Return the address of a network interface, as gloo's environment variable names it."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        name = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, name)[20:24])  # SIOCGIFADDR
    return ""
