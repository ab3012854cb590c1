"""The errors of stores: a `StoreError` says what was tried, where, why it failed, what to do."""

from __future__ import annotations

import errno as codes
from typing import Any, Final, Literal

__all__ = [
    "Kind",
    "MissingFileError",
    "StoreError",
    "a_folder",
    "denied",
    "from_os_error",
    "missing",
    "no_bucket",
    "no_file",
    "short",
    "taken",
    "too_long",
    "wrong_size",
]

Kind = Literal[
    "missing", "exists", "denied", "full", "short", "long", "path", "unsure", "stopped", "other"
]

_MISSING: Final = "check the name and its folder"
_DENIED: Final = "check who owns the folder, or the credentials in use"
_FULL: Final = "free some space, or save elsewhere; what was half written has been removed"


class StoreError(OSError):
    """A store that could not do what was asked.

    Attributes:
        operation: What was tried, such as ``read``.
        url: The file or folder concerned.
        reason: What went wrong.
        remedy: What to try next; may be empty.
        kind: ``missing``, ``exists`` (the name is taken), ``denied`` (no permission), ``full`` (no
            space), ``short`` (the file ends too early), ``long`` (it is larger than allowed),
            ``path`` (a name that no store accepts, or that of what is no file), ``unsure`` (it may
            have been done all the same), ``stopped`` (a fault that a test injected), or ``other``.

    >>> print(StoreError("read", "s3://bucket/a", "no such file", remedy="check the name"))
    cannot read s3://bucket/a: no such file; check the name
    """

    def __init__(
        self,
        operation: str,
        url: str,
        reason: str,
        *,
        remedy: str = "",
        kind: Kind = "other",
        errno: int | None = None,
    ) -> None:
        super().__init__(errno, reason, url)
        self.operation, self.url, self.reason = operation, url, reason
        self.remedy, self.kind = remedy, kind

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"cannot {self.operation} {self.url}: {self.reason}{remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._again, (
            (self.operation, self.url, self.reason, self.remedy, self.kind, self.errno),
        )

    @classmethod
    def _again(cls, state: tuple[Any, ...]) -> StoreError:
        operation, url, reason, remedy, kind, errno = state
        return cls(operation, url, reason, remedy=remedy, kind=kind, errno=errno)


class MissingFileError(StoreError, FileNotFoundError):
    """A file that is not there; its ``kind`` is ``missing``."""


def missing(operation: str, url: str) -> MissingFileError:
    """Make the error for a file that is not there."""
    return MissingFileError(
        operation, url, "no such file", remedy=_MISSING, kind="missing", errno=codes.ENOENT
    )


def no_bucket(operation: str, url: str, reason: str) -> MissingFileError:
    """Make the error for a bucket that is not there."""
    remedy = "check its name and the endpoint in use, or make the bucket first"
    return MissingFileError(
        operation, url, reason, remedy=remedy, kind="missing", errno=codes.ENOENT
    )


def taken(operation: str, url: str) -> StoreError:
    """Make the error for a name that must not be taken and is."""
    return StoreError(operation, url, "the file exists", kind="exists", errno=codes.EEXIST)


def a_folder(operation: str, url: str) -> StoreError:
    """Make the error for a folder where a file should be."""
    reason, remedy = "a folder has that name", "move the folder away, or choose another place"
    return StoreError(operation, url, reason, remedy=remedy, kind="path", errno=codes.EISDIR)


def no_file(operation: str, url: str) -> StoreError:
    """Make the error for a pipe, a socket or a device where a file should be."""
    reason, remedy = "it is a pipe, a socket or a device, and no file", "move it away"
    return StoreError(operation, url, reason, remedy=remedy, kind="path", errno=codes.EINVAL)


def too_long(url: str, size: int, limit: int) -> StoreError:
    """Make the error for a file that is too large to be read whole."""
    reason = f"it has {size:,} bytes, and at most {limit:,} are read"
    return StoreError("read", url, reason, kind="long", errno=codes.EFBIG)


def denied(operation: str, url: str, reason: str) -> StoreError:
    """Make the error for what this user may not do."""
    reason = f"permission denied ({reason})"
    return StoreError(operation, url, reason, remedy=_DENIED, kind="denied", errno=codes.EACCES)


def short(url: str, offset: int, length: int, size: int) -> StoreError:
    """Make the error for a range that reaches past the end of its file.

    >>> print(short("a.bin", offset=90, length=20, size=100))
    cannot read a.bin: bytes 90 to 110 were asked for, but the file has 100; it was cut short, or
    replaced since the plan was made: verify the checkpoint
    """
    reason = f"bytes {offset} to {offset + length} were asked for, but the file has {size}"
    remedy = "it was cut short, or replaced since the plan was made: verify the checkpoint"
    return StoreError("read", url, reason, remedy=remedy, kind="short")


def wrong_size(url: str, expected: int, written: int) -> StoreError:
    """Make the error for parts that add up to another size than was announced."""
    reason = f"{expected} bytes were announced, but the parts have {written}"
    return StoreError("write", url, reason, remedy="correct `nbytes` or the parts")


def from_os_error(operation: str, url: str, error: OSError) -> StoreError:
    """Say in our words what the operating system reported.

    >>> error = from_os_error("write", "/ckpt/a.bin", OSError(codes.ENOSPC, "No space left"))
    >>> error.kind
    'full'
    >>> print(error)
    cannot write /ckpt/a.bin: disk full (No space left); free some space, or save elsewhere; ...
    """
    if isinstance(error, StoreError):
        return error
    text = error.strerror or str(error) or type(error).__name__
    match error.errno:
        case codes.ENOENT:
            return missing(operation, url)
        case codes.ENOTDIR:
            reason, remedy = "a file is where a folder should be", "check the path"
            return StoreError(operation, url, reason, remedy=remedy, kind="path", errno=error.errno)
        case codes.EACCES | codes.EPERM | codes.EROFS:
            return denied(operation, url, text)
        case codes.ENOSPC | codes.EDQUOT:
            reason, code = f"disk full ({text})", error.errno
            return StoreError(operation, url, reason, remedy=_FULL, kind="full", errno=code)
        case code:
            return StoreError(operation, url, text, errno=code)
