"""Values that are no tensors, as torch.distributed.checkpoint passes them on: torch.save's bytes.

They are only taken if they load without running code.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from shardplan.io.errors import FormatError
from shardplan.io.torchzip import refuse_bombs

__all__ = ["UnsafeValueError", "dump_value", "load_value", "safe_dump"]


class UnsafeValueError(TypeError):
    """A value that cannot be loaded without running code; its message goes after the key."""


def dump_value(value: Any) -> io.BytesIO:
    """Return what `torch.save` makes of a value, rewound."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def load_value(buffer: io.BytesIO) -> Any:
    """Return the value that `torch.save` was given, if it is one that is safe to load.

    >>> load_value(dump_value({"lr": 0.1}))
    {'lr': 0.1}

    Raises:
        UnsafeValueError: It is not, or these bytes are something else.
    """
    try:
        refuse_bombs(buffer.getvalue(), "")
    except FormatError as error:
        raise UnsafeValueError(f"cannot be loaded: {error.reason}") from None
    buffer.seek(0)
    try:
        return torch.load(buffer, weights_only=True)
    except Exception as error:  # torch.load fails in many ways
        raise UnsafeValueError(
            f"cannot be loaded without running code ({_reason(buffer, error)}); save plain values "
            "or tensors instead"
        ) from None


def _reason(buffer: io.BytesIO, error: Exception) -> str:
    """Say which classes a value would need; torch's own message is a page of advice."""
    buffer.seek(0)
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    except Exception:  # these bytes may be anything
        unsafe = []
    if unsafe:
        return f"it needs {', '.join(sorted(unsafe)[:8])}"
    return str(error).partition("\n")[0][:200] or type(error).__name__


def safe_dump(value: Any) -> io.BytesIO:
    """Return what `torch.save` makes of a value, having made sure that `load_value` reads it.

    Raises:
        UnsafeValueError: It does not, or the value cannot be pickled.
    """
    what = f"is a {type(value).__module__}.{type(value).__qualname__}, which"
    try:
        buffer = dump_value(value)
    except Exception as error:  # pickling may fail in any way that a class thinks of
        raise UnsafeValueError(f"{what} cannot be stored ({error})") from None
    try:
        load_value(buffer)
    except UnsafeValueError as error:
        raise UnsafeValueError(f"{what} {error}") from None
    buffer.seek(0)
    return buffer
