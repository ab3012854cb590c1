"""Object stores, through obstore: S3, Google Cloud Storage, Azure, and plain memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from html import unescape
from itertools import chain
from typing import Any, Final

from shardplan.planning import named_extras

from ..buffers import Buffer, Run, bundles, copy_into, gather, pieces, total_bytes, wanted
from ..errors import Kind, denied, listed, missing, short, taken, too_long, wrong_size
from ..pool import Pool, default_pool
from .base import Entry, Store, StoreError, check_path

with named_extras("an object store, memory:// too,"):
    import obstore
    from obstore import exceptions
    from obstore.store import MemoryStore, from_url

_PART_SIZE: Final = 8 << 20
_PARTS_IN_FLIGHT: Final = 8
_MAX_PARTS: Final = 10_000  # S3 takes no more in one upload
_BUCKET: Final = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._$-]*")
# By scheme: the variables with the credentials, and the one with the endpoint.
_SETTINGS: Final = {
    "s3": ("AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT (a file) or log in with gcloud", "GOOGLE_BASE_URL"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ENDPOINT"),
}
# Where a machine in a cloud gets credentials: asked last, if there are no others.
_NO_CREDENTIALS: Final = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_NOISE: Final = re.compile(r"^Generic \w+ error: |, max_retries: \d+, retry_timeout: \w+")

# What services send: XML, or JSON.
_MESSAGE: Final = re.compile(r'<Message>([^<]+)</Message>|"message":\s*"((?:[^"\\]|\\.)+)"')
_CODE: Final = re.compile(r"<Code>([^<]+)</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3}(?: [A-Za-z-]+)*)")
_DENIED: Final = re.compile(r"status code: 40[13]\b")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_FOR_DEVELOPERS: Final = "\n\nDebug source"

_memories: dict[str, MemoryStore] = {}
_lock = threading.Lock()


def open_objects(
    url: str, *, pool: Pool | None = None, part_size: int = _PART_SIZE, **options: Any
) -> ObjectStore:
    """Open ``s3://``, ``gs://``, ``az://`` or ``memory://``; see `open_store`.

    What follows the bucket is a name, in which no character is special: obstore does not get it.
    """
    url = url.rstrip("/") if not url.endswith("://") else url
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme.lower() == "memory":
        if options:
            raise TypeError(f"memory:// takes no options, but got {', '.join(options)}")
        with _lock:
            memory = _memories.setdefault(bucket, MemoryStore())
        return ObjectStore(memory, url, prefix=prefix, pool=pool, part_size=part_size)
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"cannot open {url}: {bucket!r} is not the name of a bucket")
    with _reported("open", url):
        inner = from_url(f"{scheme}://{bucket}", **options)
    return ObjectStore(inner, url, prefix=prefix, pool=pool, part_size=part_size)


class ObjectStore(Store):
    """A bucket, or a folder in one.

    Writes are sent in parts, several at once, and aborted on an error. A file appears when its last
    byte has arrived, so every write is atomic. A process that is killed while it sends a large file
    leaves parts behind that no listing shows and that cost money: let the bucket's lifecycle abort
    incomplete multipart uploads after a day.
    """

    url = property(lambda self: self._url)
    staging = property(lambda self: _PARTS_IN_FLIGHT * self._part_size)

    def __init__(
        self,
        inner: Any,
        url: str,
        *,
        prefix: str = "",
        pool: Pool | None = None,
        part_size: int = _PART_SIZE,
    ) -> None:
        if part_size < 1:
            raise ValueError(f"a part needs at least a byte, not {part_size}")
        self._inner, self._url, self._pool = inner, url, pool
        self._root = f"{check_path(prefix, root=url)}/" if prefix else ""
        self._part_size = part_size

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    def read(self, path: str, ranges: Sequence[tuple[int, memoryview]]) -> int:
        """Fill buffers from a file; see `Store.read`."""
        key = self._key(path)
        runs = gather(wanted(ranges), max_bytes=self._part_size, max_views=1)
        bundled = list(bundles(runs, self._part_size))

        fetch = partial(self._fetch, key, self._name(path))
        if len(bundled) == 1:
            return fetch(bundled[0])
        pool = self._pool or default_pool()
        return sum(pool.map(fetch, bundled, nbytes=lambda runs: sum(v[0].nbytes for _, v in runs)))

    def write(
        self, path: str, parts: Iterable[Buffer], *, nbytes: int | None = None, atomic: bool = False
    ) -> int:
        """Write a file whole; see `Store.write`. It is always durable and atomic."""
        key, url = self._key(path), self._name(path)
        nbytes = total_bytes(parts) if nbytes is None else nbytes
        size = max(self._part_size, -(-(nbytes or 0) // _MAX_PARTS))
        stream = _Stream(pieces(parts, size), nbytes, url)
        first = stream.take(size)
        with _reported("write", url):
            if stream.nbytes <= size:
                obstore.put(self._inner, key, b"".join(first), use_multipart=False)
            else:
                most = max(1, self.staging // size - 1)  # one more is being filled
                how = {"use_multipart": True, "chunk_size": size, "max_concurrency": most}
                obstore.put(self._inner, key, chain(first, stream), **how)
        return stream.nbytes

    def read_all(self, path: str, *, limit: int) -> bytes:
        """Return a small file whole, by a single request; see `Store.read_all`."""
        url = self._name(path)
        with _reported("read", url):
            found = obstore.get(self._inner, self._key(path))
            if found.meta["size"] > limit:
                raise too_long(url, found.meta["size"], limit)
            return bytes(found.bytes())

    def replace(self, path: str, data: bytes, *, overwrite: bool = True) -> None:
        """Write a small file by a single request; see `Store.replace`."""
        key, url = self._key(path), self._name(path)
        with _reported("replace", url, lost="unsure"):
            if not overwrite:
                try:
                    obstore.put(self._inner, key, data, use_multipart=False, mode="create")
                    return
                except exceptions.AlreadyExistsError:
                    raise taken("replace", url) from None
                except (exceptions.NotSupportedError, NotImplementedError):
                    if self.exists(path):  # the service has no conditional requests
                        raise taken("replace", url) from None
            obstore.put(self._inner, key, data, use_multipart=False)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        with _reported("measure", self._name(path)):
            return obstore.head(self._inner, self._key(path))["size"]

    def entries(self, prefix: str = "", *, recursive: bool = True) -> tuple[Entry, ...]:
        """Return the files below a folder with sizes and times; see `Store.entries`."""
        folder = self._key(prefix) if prefix else self._root.rstrip("/")
        with _reported("list", self._name(prefix)):
            if recursive:
                folders = list[str]()
                objects = [*chain.from_iterable(obstore.list(self._inner, folder or None))]
            else:
                listing = obstore.list_with_delimiter(self._inner, folder or None)
                folders, objects = [*listing["common_prefixes"]], [*listing["objects"]]
        found = [Entry(f"{name.removeprefix(self._root)}/") for name in folders]
        for meta in objects:
            when = meta["last_modified"].timestamp()
            found.append(Entry(meta["path"].removeprefix(self._root), meta["size"], when, when))
        return tuple(sorted(found, key=lambda entry: entry.name))

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; see `Store.delete`."""
        paths = tuple(paths)
        keys = [self._key(path) for path in paths]
        with _reported("delete", listed([self._name(path) for path in paths], quote="")):
            try:
                obstore.delete(self._inner, keys)
            except FileNotFoundError:  # some services then keep the others
                for key in keys:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._inner, key)

    def sync(self) -> None:
        """Do nothing: all writes are durable."""

    def _key(self, path: str) -> str:
        return self._root + check_path(path, root=self._url)

    def _name(self, path: str) -> str:
        return f"{self._url}/{path}"

    def _fetch(self, key: str, url: str, bundle: Sequence[Run]) -> int:
        """Copy a few ranges into place; neighbours share a request."""
        starts = [offset for offset, _ in bundle]
        lengths = [views[0].nbytes for _, views in bundle]
        with _reported("read", url):
            try:
                fetched = self._get(key, starts, lengths)
                if [len(data) for data in fetched] != lengths:
                    raise StoreError("read", url, "the store sent fewer bytes than it was asked")
            except (exceptions.GenericError, StoreError):  # as a range past the end gives
                size = obstore.head(self._inner, key)["size"]
                for start, length in zip(starts, lengths, strict=True):
                    if start + length > size:
                        raise short(url, start, length, size) from None
                raise
        for data, (_, views) in zip(fetched, bundle, strict=True):
            copy_into(views[0], data)
        return sum(lengths)

    def _get(self, key: str, starts: Sequence[int], lengths: Sequence[int]) -> Sequence[Any]:
        """Fetch ranges; nothing if the service sent fewer bytes than obstore can slice."""
        try:
            return obstore.get_ranges(self._inner, key, starts=starts, lengths=lengths, coalesce=0)
        except BaseException as error:  # a panic of Rust is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            return []


class _Stream:
    """Pieces to send, counted, and checked against the announced size."""

    def __init__(self, pieces: Iterable[memoryview], expected: int | None, url: str) -> None:
        self._pieces, self._expected, self._url = iter(pieces), expected, url
        self.nbytes = 0

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        piece = next(self._pieces, None)
        if piece is None:
            if self._expected not in {None, self.nbytes}:
                raise wrong_size(self._url, self._expected or 0, self.nbytes)
            raise StopIteration
        self.nbytes += piece.nbytes
        return piece

    def take(self, nbytes: int) -> list[memoryview]:
        """Return the next pieces, until more than ``nbytes`` have been taken or all have."""
        taken = []
        while self.nbytes <= nbytes and (piece := next(self, None)) is not None:
            taken.append(piece)
        return taken


@contextmanager
def _reported(operation: str, url: str, *, lost: Kind = "other") -> Iterator[None]:
    """Turn errors of obstore into `StoreError`; ``lost`` is the kind of unknown ones."""
    try:
        yield
    except StoreError:
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise denied(operation, url, _answer(error)) from error
    except (FileNotFoundError, exceptions.BaseError) as error:
        if any(code in str(error) for code in _NO_BUCKET):
            raise missing(operation, url, bucket=_answer(error)) from error
        if isinstance(error, FileNotFoundError):
            raise missing(operation, url) from error
        if _DENIED.search(str(error)):  # a refused listing is not a PermissionDeniedError
            raise denied(operation, url, _answer(error)) from error
        reason, remedy = _in_words(error, url, operation)
        raise StoreError(operation, url, reason, remedy=remedy, kind=lost) from error


def _in_words(error: BaseException, url: str, operation: str = "") -> tuple[str, str]:
    """Return what went wrong, and which settings to check.

    >>> _in_words(OSError("Error performing PUT http://169.254.169.254/latest"), "s3://b/a")[0]
    'no credentials were found'
    >>> _in_words(OSError("error sending request"), "s3://b/a")[1]
    'check the network, and AWS_ENDPOINT'
    """
    reason = _answer(error)
    settings = _SETTINGS.get(url.partition("://")[0].lower())
    if settings is None:
        return reason, ""
    who, where = settings
    if any(sign in reason for sign in _NO_CREDENTIALS):
        return "no credentials were found", f"set {who}; {where} for a service of your own"
    if "error sending request" in reason or "connect" in reason.lower():
        return f"it cannot be reached ({reason})", f"check the network, and {where}"
    return reason, f"set {who}" if operation == "open" else ""  # which depends on settings only


def _answer(error: BaseException) -> str:
    """Return the reason that the service gave; if none, that of obstore.

    >>> xml = "<Code>NoSuchBucket</Code><Message>The bucket does not exist.</Message>"
    >>> _answer(OSError(f"Error … 404 Not Found: <?xml …?><Error>{xml}</Error>"))
    'The bucket does not exist (NoSuchBucket)'
    >>> _answer(OSError('Error … 404 Not Found: {"error": {"code": 404, "message": "No such."}}'))
    'No such'
    >>> _answer(OSError("Error … - Server returned non-2xx status code: 403 Forbidden: "))
    'the service answered 403 Forbidden'
    """
    text = str(error).partition(_FOR_DEVELOPERS)[0]
    said, code, status = (p.search(text) for p in (_MESSAGE, _CODE, _STATUS))
    if said is not None:
        name = f" ({code[1]})" if code is not None else ""
        return unescape(said[1] or said[2]).strip().rstrip(".") + name
    if status is not None:
        return f"the service answered {status[1]}"
    return _NOISE.sub("", str(error).strip().partition("\n")[0]).rstrip(".")
