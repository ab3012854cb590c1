"""Values that are no tensors, as torch.distributed.checkpoint passes them on: torch.save's bytes.

They are only taken if they load without running code.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from shardplan.io import FormatError
from shardplan.io.formats.torch_save import (
    PickleError,
    RefusedName,
    explain_name,
    in_memory,
    load_archive,
    read_archive,
)

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
        return load_archive(read_archive(in_memory(buffer.getvalue(), "")))
    except RefusedName as error:
        why = f"cannot be loaded without running code: it {explain_name(error.name)}"
        raise UnsafeValueError(why) from None
    except (PickleError, FormatError) as error:
        reason = error.reason if isinstance(error, FormatError) else error
        raise UnsafeValueError(f"cannot be loaded: {reason}") from None


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
