"""What can be wrong with files, as errors that name the file and the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardplan.planning import listed

from .stores.base import StoreError

__all__ = [
    "ExistsError",
    "FormatError",
    "LoadError",
    "UnsureCommitError",
    "ValueRefusedError",
    "listed",
]


class FormatError(ValueError):
    """A file that is not what it should be: damaged, cut short, missing, or of a newer version.

    Attributes:
        file: Its name inside the checkpoint.
        folder: The checkpoint, where several are read; else empty.
        reason: What is wrong with it.
        filled: If a load was stopped by it: keys that were filled entirely before.
        touched: Keys of which some elements may have been overwritten. All others are as they were.

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
        """Return the error with the checkpoint's name, and without what a load has filled.

        >>> print(FormatError("a.bin", "it is cut short", filled="w").within("run/step-7"))
        run/step-7/a.bin: it is cut short
        """
        return FormatError(self.file, self.reason, folder=folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return _format_error, (self.file, self.reason, self.filled, self.touched, self.folder)


class LoadError(RuntimeError):
    """A load that something other than a bad file stopped half way: see its ``__cause__``.

    Attributes:
        filled: Keys of the state dict that were filled entirely, and verified if that was asked.
        touched: Keys of which some elements may have been overwritten. All others are as they were.
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
    """Values of a state dict that no checkpoint can carry.

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
    """A checkpoint that is already there, and was not to be overwritten.

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
        return _exists_error, (self.reason, self.can_overwrite)


class UnsureCommitError(StoreError):
    """A commit of which nobody can tell whether it happened, or still will; see its ``__cause__``.

    Its files are left alone, for the checkpoint may come to need them; if it does not, `prune`
    removes them. Open the checkpoint to see which one is there.
    """


def _exists_error(reason: str, can_overwrite: bool) -> ExistsError:
    return ExistsError(reason, can_overwrite=can_overwrite)


def _format_error(
    file: str, reason: str, filled: tuple[str, ...], touched: tuple[str, ...], folder: str
) -> FormatError:
    return FormatError(file, reason, filled=filled, touched=touched, folder=folder)


def _progress(filled: tuple[str, ...], touched: tuple[str, ...]) -> str:
    if not filled and not touched:
        return ""
    return (
        f"; filled before that: {listed(filled)}; possibly overwritten in part: "
        f"{listed(touched)}; all other keys are as they were"
    )
