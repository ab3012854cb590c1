"""Values in archives of `torch.save`, read without running code, and without torch if possible."""

from __future__ import annotations

from typing import Any, Final

from ...errors import FormatError
from .objects import Storages, load_nested
from .standins import build_value
from .unpickler import PickleError, RefusedName
from .zip_read import Archive, in_memory, read_archive

__all__ = ["explain_name", "explain_refusal", "load_archive", "load_torch"]

_DANGEROUS: Final = frozenset(
    (
        *("os", "posix", "nt", "builtins", "__builtin__", "subprocess", "sys", "shutil", "pty"),
        *("importlib", "runpy", "socket", "ctypes", "webbrowser", "code", "commands", "pickle"),
    )
)


def load_torch(data: bytes, file: str, name: str) -> Any:
    """Return a value that `torch.save` wrote.

    Args:
        data: What it wrote.
        file: Where that was found, for errors.
        name: The value's name, for errors.

    Raises:
        FormatError: It is damaged, or not safe to load; then it says how to allow it.
    """
    try:
        return load_archive(read_archive(in_memory(data, file)))
    except RefusedName as error:
        raise FormatError(file, f"the value of `{name}` {explain_name(error.name)}") from None
    except (PickleError, FormatError) as error:
        reason = error.reason if isinstance(error, FormatError) else error
        raise FormatError(file, f"the value of `{name}` cannot be loaded: {reason}") from None


def load_archive(archive: Archive) -> Any:
    """Return the value that an archive of `torch.save` holds.

    Raises:
        FormatError: The archive is damaged.
        RefusedName: The value needs a class or function that is not allowed.
        PickleError: The value is damaged.
    """
    if archive.packed:
        raise PickleError("its records are compressed, which torch.save never does")
    if "byteorder" in archive.records and archive.read("byteorder", 8) != b"little":
        raise PickleError("it was written on a machine of another byte order")
    storages, limit = Storages(), archive.window.length
    nested = load_nested(archive.read("data.pkl", limit), storages)
    archive.check_storages(storages.nbytes)
    return build_value(
        nested, lambda key: memoryview(bytearray(archive.read(f"data/{key}", limit)))
    )


def explain_refusal(error: Exception) -> str:
    """Say why a value cannot be stored, given what went wrong as it was pickled or read back."""
    if isinstance(error, RefusedName):
        return explain_name(error.name)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"cannot be loaded: {(lines or [type(error).__name__])[-1][:300]}"


def explain_name(kind: str) -> str:
    """Say why a class or function that a pickle names is refused, and how to allow it."""
    if kind.partition(".")[0] in _DANGEROUS:
        return f"needs `{kind}`, which no checkpoint does: it may be malicious; none of it ran"
    return (
        f"needs `{kind}`, which is not safe to load unasked; if you trust it, allow it with "
        f"torch.serialization.add_safe_globals([{kind}]) and load again"
    )
