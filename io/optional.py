"""What a machine may lack: torch, for which a class stands then, and functions of Linux."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

__all__ = ["HAS_TORCH", "c_function", "torch"]


class _Absent:
    """Stands for torch; whatever needs it says what to install."""

    class Tensor:
        """A class without objects."""

    @staticmethod
    @contextmanager
    def no_grad() -> Iterator[None]:
        """Do nothing; as a decorator, too."""
        yield

    def __getattr__(self, name: str) -> Any:
        raise ModuleNotFoundError(
            f"torch.{name} needs torch: pip install 'shardplan[torch]'", name="torch"
        )


if TYPE_CHECKING:
    import torch as torch
else:
    try:
        import torch as torch
    except ModuleNotFoundError:
        torch = _Absent()

HAS_TORCH: Final = not isinstance(torch, _Absent)


@cache
def c_function(name: str, *types: Any) -> Any:
    """Return a function of Linux's C library, or None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function
