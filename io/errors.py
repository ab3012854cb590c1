"""The errors of reading and writing: each names the file, the reason and what to try."""

from __future__ import annotations

import errno as codes
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, Literal

from shardplan.planning import listed

Kind = Literal[
    "missing", "exists", "denied", "full", "short", "long", "path", "unsure", "stopped", "other"
]


class StoreError(OSError):
    """An operation on a store that failed.

    Attributes:
        operation: What was tried, such as ``read``.
        url: The file or folder.
        reason: What went wrong.
        remedy: What to try next; may be empty.
        kind: ``missing``, ``exists`` (the name is taken), ``denied`` (no permission), ``full`` (no
            space), ``short`` (the file ends too early), ``long`` (it is larger than allowed),
            ``path`` (not a valid name, or not the name of a file), ``unsure`` (it may have been
            done all the same), ``stopped`` (a fault that a test injected), or ``other``.

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
        make = partial(type(self), remedy=self.remedy, kind=self.kind, errno=self.errno)
        return make, (self.operation, self.url, self.reason)


class MissingFileError(StoreError, FileNotFoundError):
    """A missing file; its ``kind`` is ``missing``."""


_DENIED: Final = "check who owns the folder, or the credentials in use"
_FULL: Final = "free some space, or save elsewhere; what was half written has been removed"


def missing(operation: str, url: str, bucket: str = "") -> MissingFileError:
    """Return the error for a missing file; ``bucket`` is the reason if its bucket is missing."""
    reason, remedy, code = "no such file", "check the name and its folder", codes.ENOENT
    if bucket:
        reason = bucket
        remedy = "check its name and the endpoint in use, or make the bucket first"
    return MissingFileError(operation, url, reason, remedy=remedy, kind="missing", errno=code)


def taken(operation: str, url: str) -> StoreError:
    """Return the error for a name that is taken and must not be."""
    return StoreError(operation, url, "the file exists", kind="exists", errno=codes.EEXIST)


def not_a_file(operation: str, url: str, *, is_folder: bool) -> StoreError:
    """Return the error for a folder, or for a pipe or a device, where a file should be."""
    if is_folder:
        reason, remedy = "a folder has that name", "move the folder away, or choose another place"
    else:
        reason, remedy = "it is a pipe, a socket or a device, not a file", "move it away"
    code = codes.EISDIR if is_folder else codes.EINVAL
    return StoreError(operation, url, reason, remedy=remedy, kind="path", errno=code)


def too_long(url: str, size: int, limit: int) -> StoreError:
    """Return the error for a file that is too large to be read whole."""
    reason = f"it has {size:,} bytes, and at most {limit:,} are read"
    return StoreError("read", url, reason, kind="long", errno=codes.EFBIG)


def denied(operation: str, url: str, reason: str) -> StoreError:
    """Return the error for missing permission."""
    reason = f"permission denied ({reason})"
    return StoreError(operation, url, reason, remedy=_DENIED, kind="denied", errno=codes.EACCES)


def short(url: str, offset: int, length: int, size: int) -> StoreError:
    """Return the error for a range that reaches past the end of its file."""
    reason = f"bytes {offset} to {offset + length} were asked for, but the file has {size}"
    remedy = "it was cut short, or replaced since the plan was made: verify the checkpoint"
    return StoreError("read", url, reason, remedy=remedy, kind="short")


def wrong_size(url: str, expected: int, written: int) -> StoreError:
    """Return the error for parts that add up to another size than was announced."""
    reason = f"{expected} bytes were announced, but the parts have {written}"
    return StoreError("write", url, reason, remedy="correct `nbytes` or the parts")


def from_os_error(operation: str, url: str, error: OSError) -> StoreError:
    """Return the `StoreError` for an error of the operating system."""
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


class FormatError(ValueError):
    """A bad file: damaged, cut short, missing, or of a newer version.

    Attributes:
        file: Its name inside the checkpoint.
        folder: The checkpoint, where several are read; else empty.
        reason: What is wrong with it.
        filled: If it stopped a load: keys that were filled entirely before.
        touched: Keys that may have been overwritten in part. All others are unchanged.

    >>> raise FormatError("shardplan.json", "it is not JSON")
    Traceback (most recent call last):
    shardplan.io.errors.FormatError: shardplan.json: it is not JSON
    """

    def __init__(
        self,
        file: str,
        reason: str,
        *,
        filled: Iterable[str] = (),
        touched: Iterable[str] = (),
        folder: str = "",
    ) -> None:
        self.file = file
        self.folder = folder
        self.reason = reason
        self.filled = tuple(sorted(filled))
        self.touched = tuple(sorted(touched))
        super().__init__(file, reason)

    def __str__(self) -> str:
        inner = self.folder and not self.file.startswith(self.folder)
        file = f"{self.folder.rstrip('/')}/{self.file}" if inner else self.file
        return f"{file}: {self.reason}{_progress(self.filled, self.touched)}"

    def within(self, folder: str) -> FormatError:
        """Return the error with the checkpoint's name, and without what a load has filled."""
        return FormatError(self.file, self.reason, folder=folder)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(FormatError, filled=self.filled, touched=self.touched, folder=self.folder)
        return make, (self.file, self.reason)


class LoadError(RuntimeError):
    """A load that was stopped half way, not by a bad file: see its ``__cause__``.

    Attributes:
        filled: Keys of the state dict that were filled entirely, and verified if that was asked.
        touched: Keys that may have been overwritten in part. All others are unchanged.
    """

    def __init__(self, message: str, filled: Iterable[str], touched: Iterable[str]) -> None:
        self.filled = tuple(sorted(filled))
        self.touched = tuple(sorted(touched))
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.args[0]}{_progress(self.filled, self.touched)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadError, (self.args[0], self.filled, self.touched)


class ValueRefusedError(TypeError):
    """Values of a state dict that cannot be saved.

    Attributes:
        reasons: Key to reason, for every value refused.
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = dict(reasons)
        texts = [f"`{key}` {why}" for key, why in sorted(reasons.items())]
        super().__init__(listed(texts, quote="", between="; ", attribute="reasons"))

    def __reduce__(self) -> tuple[Any, ...]:
        return ValueRefusedError, (self.reasons,)


class ExistsError(FileExistsError):
    """A checkpoint that exists already, and must not be overwritten.

    Attributes:
        reason: What is where.
        can_overwrite: Whether it could be replaced, if that were asked for.

    >>> raise ExistsError("step-7 holds a checkpoint", can_overwrite=True)
    Traceback (most recent call last):
    shardplan.io.errors.ExistsError: step-7 holds a checkpoint; pass overwrite=True to replace it
    """

    def __init__(self, reason: str, *, can_overwrite: bool = False) -> None:
        self.reason = reason
        self.can_overwrite = can_overwrite
        super().__init__(reason)

    def __str__(self) -> str:
        return self.reason + ("; pass overwrite=True to replace it" if self.can_overwrite else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ExistsError, can_overwrite=self.can_overwrite), (self.reason,)


class UnsureCommitError(StoreError):
    """A commit that may or may not have happened, or may still happen; see its ``__cause__``.

    Its files are kept, because the checkpoint may need them; if not, `prune` removes them. Open the
    checkpoint to see which one is there.
    """


def _progress(filled: tuple[str, ...], touched: tuple[str, ...]) -> str:
    if not filled and not touched:
        return ""
    return (
        f"; filled before that: {listed(filled)}; possibly overwritten in part: "
        f"{listed(touched)}; all other keys are as they were"
    )
