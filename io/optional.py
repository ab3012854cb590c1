"""Torch, or what stands for it where it is not installed: nothing is a tensor of it then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

__all__ = ["HAS_TORCH", "torch"]


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
