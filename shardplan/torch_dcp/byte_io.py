"""Non-tensor values as torch.distributed.checkpoint exchanges them: as bytes of `torch.save`.

They are accepted only if they load without running code.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from shardplan.io import FormatError
from shardplan.io.formats.torch_save import (
    PickleError,
    RefusedName,
    explain,
    in_memory,
    load_archive,
    read_archive,
)

__all__ = ["UnsafeValueError", "dump_value", "load_value", "safe_dump"]


class UnsafeValueError(TypeError):
    """A value that cannot be loaded without running code; its message goes after the key."""


def dump_value(value: Any) -> io.BytesIO:
    """Return the bytes that `torch.save` makes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def load_value(buffer: io.BytesIO) -> Any:
    """Return the value that `torch.save` was given, or raise UnsafeValueError."""
    try:
        return load_archive(read_archive(in_memory(buffer.getvalue(), "")))
    except RefusedName as error:
        why = f"cannot be loaded without running code: it {explain(error)}"
        raise UnsafeValueError(why) from None
    except (PickleError, FormatError) as error:
        raise UnsafeValueError(explain(error)) from None


def safe_dump(value: Any) -> io.BytesIO:
    """Return the bytes that `torch.save` makes of a value, if `load_value` accepts them."""
    what = f"is a {type(value).__module__}.{type(value).__qualname__}, which"
    try:
        buffer = dump_value(value)
    except Exception as error:  # a class may raise anything when it is pickled
        raise UnsafeValueError(f"{what} cannot be stored ({error})") from None
    try:
        load_value(buffer)
    except UnsafeValueError as error:
        raise UnsafeValueError(f"{what} {error}") from None
    buffer.seek(0)
    return buffer
