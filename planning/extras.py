"""Packages that not every installation has, and the extra of shardplan that brings each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["EXTRAS", "named_extras"]

EXTRAS: Final = {
    "torch": "shardplan[torch]",
    "xxhash": "shardplan[io]",
    "obstore": "shardplan[objects]",
    "rich": "shardplan[cli]",
    "typer": "shardplan[cli]",
    "hypothesis": "shardplan[hypothesis]",
    "safetensors": "safetensors",
}
"""What to ask pip for, by package."""


@contextmanager
def named_extras(what: str, *, with_torch: bool = False) -> Iterator[None]:
    """Say what to install if an import fails for want of a package.

    Args:
        what: What needs the package.
        with_torch: Whether it needs torch as well: the extra for that brings both.

    >>> with named_extras("shardplan.save"):
    ...     raise ModuleNotFoundError("No module named 'torch'", name="torch")
    Traceback (most recent call last):
    ModuleNotFoundError: shardplan.save needs torch: pip install 'shardplan[torch]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extra = EXTRAS["torch" if with_torch and error.name == "xxhash" else error.name]
        text = f"{what} needs {error.name}: pip install '{extra}'"
        raise ModuleNotFoundError(text, name=error.name) from None
