"""A process that writes checkpoints for a training process: `WriterProcess`, and what runs there.

The training process plans, agrees with other ranks and commits, as ever. Only the write of a rank's
part, with its checksums, is done by the writer:

1. The staged copy lies in memory that both processes map (`SharedMemory`).
2. The training process sends a request: what `Writer.write` takes, with places in that memory
   instead of tensors.
3. The writer reports its progress, and answers with a `Part`, or with an error.

The writer has a low priority, so that it takes the processor time that training leaves. It ignores
signals, which often go to a whole process group, and ends when the training process does.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from socket import socketpair
from typing import Any, Final

import attrs
import numpy as np
import torch

from shardplan.io import Pool, Progress, ValueRefusedError, sort_values
from shardplan.io.execute import remove_save
from shardplan.io.formats import Part, WriteJob, Writer
from shardplan.io.stores import Store

from ._snapshots import plain
from ._staging import SharedFile, SharedMemory, TensorPlace, map_file, tensor_at

__all__ = ["WriterProcess", "WriterProcessError", "check_portable", "serve"]

_NICENESS: Final = 5  # enough to come second, too little to starve on a busy machine
_TICK: Final = 1.0  # seconds between two looks at whether the training process lives
_END: Final = 5.0  # seconds that an idle writer may take to end
_OWN: Final = ("sd", "pool", "progress")  # what each side has of its own of a `WriteJob`
_IGNORED: Final = ("SIGINT", "SIGTERM", "SIGHUP")
_START: Final = (
    f"import json, os, sys; os.nice({_NICENESS}); sys.path[:] = json.loads(sys.argv[1]); "
    "from shardplan._writer import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)


class WriterProcessError(RuntimeError):
    """The writer process was killed, could not start, or raised an error that cannot be sent."""


def check_portable(store: Store, writer: Writer) -> None:
    """Refuse what cannot be passed to another process.

    Raises:
        TypeError: A store exists in this process only, such as ``memory://``.
    """
    for what, value in ((store.url, store), ("the writer of this format", writer)):
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"process=True: {what} cannot be passed to another process ({error}); save to a "
                "path or a URL, or in a thread (process=False)"
            ) from None


class WriterProcess:
    """The training process's side of a writer, which starts when it is first needed, and again.

    Attributes:
        memory: The memory that both map.
    """

    def __init__(self) -> None:
        self.memory = SharedMemory()
        self._running: _Running | None = None

    @property
    def pid(self) -> int | None:
        """The writer's process id, if it runs."""
        running = self._running
        return running.process.pid if running is not None and running.is_alive else None

    def start(self) -> _Running:
        """Start the writer, unless it runs; it takes a second or two until it answers."""
        if self._running is None or not self._running.is_ready:
            self._running = _Running.begin()
        return self._running

    def write(self, writer: Writer, job: WriteJob) -> Part:
        """Have the writer write one rank's part; see `Writer.write`.

        Raises:
            WriterProcessError: It is gone. Files of the save are removed.
            Exception: What `Writer.write` raised there, or ``job.progress`` here.
        """
        request, running = self._request(writer, job), self.start()
        try:
            running.share(self.memory.file)
            answer = running.ask(request, job.progress)
        except (EOFError, OSError):
            if not writer.shares_files:
                remove_save(job.store, job.save_id)
            raise WriterProcessError(running.obituary()) from None
        if answer.error is not None:
            if answer.part is not None:
                writer.discard(job.store, answer.part.report, job.save_id)
            raise answer.error
        assert answer.part is not None
        return answer.part

    def _request(self, writer: Writer, job: WriteJob) -> bytes:
        """Encode a job, with places in the shared memory instead of tensors."""
        flat, pool = plain(job.sd), (job.pool.max_workers, job.pool.max_bytes)
        names = [f.name for f in attrs.fields(WriteJob) if f.name not in _OWN]
        settings = {name: getattr(job, name) for name in names}
        try:
            return _dumps((writer, settings, pool, flat), self.memory)
        except Exception:
            refused = {name: self._refusal(name, value) for name, value in flat.items()}
            named = {name: why for name, why in refused.items() if why is not None}
            if named:
                raise ValueRefusedError(named) from None
            raise

    def _refusal(self, name: str, value: Any) -> str | None:
        """Return why a value cannot be saved or sent; None if it can."""
        try:
            _dumps(value, self.memory)
        except Exception as error:
            sent = f"cannot be passed to the writer process ({error}); save in a thread"
            return sort_values({name: value})[1].get(name, sent)
        return None


@attrs.frozen
class _Answer:
    """What came of a request: a part, or an error."""

    part: Part | None = None
    error: BaseException | None = None


@attrs.define(eq=False)
class _Running:
    """A running writer: the process, the connection to it, and the memory that it has mapped."""

    process: subprocess.Popen[bytes]
    connection: Connection
    owner: int
    shared: SharedFile | None = None

    @classmethod
    def begin(cls) -> _Running:
        """Start a writer."""
        ours, theirs = socketpair()
        arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        running = cls(process, Connection(ours.detach()), os.getpid())
        weakref.finalize(running, _end, process, running.connection, os.getpid())
        return running

    @property
    def is_alive(self) -> bool:
        """Whether it runs, and is this process's own."""
        return self.owner == os.getpid() and self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it runs and has sent nothing; between requests, it sends only its end."""
        return self.is_alive and not self.connection.poll()

    def share(self, file: SharedFile | None) -> None:
        """Have the writer map memory, unless it has."""
        if file is not None and file is not self.shared:
            self.connection.send_bytes(pickle.dumps(("memory", file.nbytes)))
            send_handle(self.connection, file.descriptor, self.process.pid)
            self.shared = file

    def ask(self, request: bytes, progress: Progress | None) -> _Answer:
        """Send a request, and return the answer.

        Raises:
            EOFError, OSError: The writer is gone.
        """
        self.connection.send_bytes(pickle.dumps(("write", None)))
        self.connection.send_bytes(request)
        failure: BaseException | None = None
        while True:
            kind, content = pickle.loads(self.connection.recv_bytes())
            if kind == "answer":
                answer: _Answer = content
                return attrs.evolve(answer, error=failure or answer.error)
            if progress is not None and failure is None:
                try:
                    progress.add(content)
                except BaseException as error:  # of the caller's function: it stops the save
                    failure = error
                    self.connection.send_bytes(pickle.dumps(("stop", None)))

    def obituary(self) -> str:
        """Return how the writer ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END)
        code, pid = self.process.returncode, self.process.pid
        if code is None:
            return f"the writer process {pid} closed its connection"
        if code >= 0:
            return f"the writer process {pid} ended with code {code}; its standard error says why"
        name = signal.Signals(-code).name
        why = "; the system may be out of memory" if name == "SIGKILL" else ""
        return f"the writer process {pid} was killed by {name}{why}"


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    """End a writer that is no longer needed, or has no work when the interpreter exits."""
    connection.close()
    if owner == os.getpid():
        try:
            process.wait(_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# Requests: places in the shared memory stand for tensors and arrays that lie there


def _dumps(value: Any, memory: SharedMemory) -> bytes:
    file = io.BytesIO()
    _Pickler(file, memory).dump(value)
    return file.getvalue()


@attrs.frozen
class _Place:
    """A tensor in shared memory, or an array, given its dtype and shape."""

    tensor: TensorPlace
    dtype: Any = None
    shape: tuple[int, ...] = ()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, memory: SharedMemory) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._memory = memory

    def persistent_id(self, value: Any) -> _Place | None:
        if isinstance(value, torch.Tensor):
            place = self._memory.place_of(value)
            return None if place is None else _Place(place)
        if type(value) is np.ndarray and value.size and value.flags.c_contiguous:
            if value.dtype.hasobject or not value.flags.writeable:
                return None
            place = self._memory.place_of(torch.from_numpy(value.reshape(-1).view(np.uint8)))
            return None if place is None else _Place(place, value.dtype, value.shape)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, mapped: Any) -> None:
        super().__init__(io.BytesIO(data))
        self._mapped = mapped
        self._tensors: dict[TensorPlace, torch.Tensor] = {}  # tied ones stay one

    def persistent_load(self, place: _Place) -> Any:
        if place.tensor not in self._tensors:
            self._tensors[place.tensor] = tensor_at(self._mapped, place.tensor)
        tensor = self._tensors[place.tensor]
        if place.dtype is None:
            return tensor
        return tensor.numpy().view(place.dtype).reshape(place.shape)


# In the writer process


def serve(descriptor: int, parent: int) -> None:
    """Carry out requests until the training process, whose id is given, ends."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    service = _Service(Connection(descriptor), parent)
    threading.Thread(target=service.listen, daemon=True).start()
    service.work()


class _Service:
    """The writer's side: a thread listens, and the main thread writes.

    Attributes:
        requests: What to write, and the memory to find it in.
        stop: Set when the training process wants no more of the current request.
    """

    def __init__(self, connection: Connection, parent: int) -> None:
        self.connection, self.parent = connection, parent
        self.requests: SimpleQueue[tuple[bytes, Any]] = SimpleQueue()
        self.stop = threading.Event()
        self._sending = threading.Lock()

    def listen(self) -> None:
        """Receive requests; end the process at once when there is nobody to serve."""
        mapped = None
        try:
            while True:
                while not wait([self.connection], _TICK):
                    if os.getppid() != self.parent:
                        os._exit(1)
                kind, content = pickle.loads(self.connection.recv_bytes())
                if kind == "memory":
                    mapped = map_file(recv_handle(self.connection), content)
                elif kind == "write":
                    self.stop.clear()
                    self.requests.put((self.connection.recv_bytes(), mapped))
                else:
                    self.stop.set()
        except (EOFError, OSError):
            os._exit(0)

    def work(self) -> None:
        """Carry out requests, one after the other."""
        while True:
            data, mapped = self.requests.get()
            try:
                answer = _Answer(self.write(data, mapped))
            except BaseException as error:
                answer = _Answer(error=_portable(error))
            del data, mapped
            self.send("answer", answer)

    def write(self, data: bytes, mapped: Any) -> Part:
        """Carry out one request."""
        writer, settings, (workers, nbytes), flat = _Unpickler(data, mapped).load()
        with Pool(max_workers=workers, max_bytes=nbytes) as pool:
            part: Part = writer.write(
                WriteJob(sd=flat, pool=pool, progress=_Sent(self), **settings)
            )
        return part

    def send(self, kind: str, content: object) -> None:
        """Send a message; any thread may."""
        with self._sending:
            self.connection.send_bytes(pickle.dumps((kind, content)))


class _Sent(Progress):
    """Progress that the training process counts."""

    def __init__(self, service: _Service) -> None:
        self._service = service

    def add(self, nbytes: int) -> None:
        """Report bytes as written; raise if the training process has stopped the save."""
        if self._service.stop.is_set():
            raise RuntimeError("the training process stopped the save")
        self._service.send("wrote", nbytes)


def _portable(error: BaseException) -> BaseException:
    """Return an error that can be sent: itself, or one with its text."""
    with suppress(Exception):
        copied = pickle.loads(pickle.dumps(error))
        if type(copied) is type(error) and str(copied) == str(error):
            return error
    return WriterProcessError(f"{type(error).__name__}: {error}")
