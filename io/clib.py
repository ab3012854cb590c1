"""Functions of Linux's C library."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


@cache
def c_function(name: str, *types: Any) -> Any:
    """Return a function of Linux's C library, or None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function
