"""How does a command fail? One line that a person can act on, and an exit code for scripts."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import typer
from typer.core import TyperGroup

from shardplan.planning import EXTRAS

__all__ = ["BAD", "EXIT_CODES", "FOUND", "Group", "message", "told"]

FOUND: Final = 1
BAD: Final = 2
_INTERRUPTED: Final = 130
_NO_READER: Final = 141

EXIT_CODES: Final = (
    "Exit codes: 0 fine; 1 diff found differences, or verify damage; 2 wrong usage, bad input, or "
    "it could not be done; 130 interrupted."
)
# What the library calls its arguments, and what they are called here.
_OPTIONS: Final = {
    "overwrite=True": "--overwrite",
    "`mesh`": "--mesh",
    "mesh exclude": "--mesh exclude",
    "max_shard_size": "--max-shard-size",
    "max_memory": "--max-memory",
    "`placements`": "--placements",
}
_WORDS: Final = re.compile("|".join(rf"(?<![\w.]){re.escape(word)}" for word in _OPTIONS))
_SHOWN: Final = 3  # reasons of one error that fit a line
# Typer's base of all errors about arguments, wherever this version of it keeps that.
_USAGE: Final[Any] = typer.BadParameter.__mro__[2]


class Group(TyperGroup):
    """The commands; whatever goes wrong in one becomes a line on stderr and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments before the command."""
        with told(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with told(ctx):
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done


@contextmanager
def told(ctx: Any) -> Iterator[None]:
    """Turn what goes wrong into a line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # whoever read this has gone: write the rest to nobody
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_NO_READER) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if ctx.meta.get("shardplan.debug"):
            traceback.print_exc()
            print(getattr(error, "tracebacks", ""), end="", file=sys.stderr)  # those of other ranks
        print(f"shardplan: error: {message(error)}", file=sys.stderr)
        raise typer.Exit(BAD) from None


def message(error: Exception) -> str:
    r"""Return an error's message as one line.

    >>> message(ValueError("no such mesh:\n  dp"))
    'no such mesh: dp'
    >>> message(ZeroDivisionError("division by zero"))
    'unexpected ZeroDivisionError: division by zero (--debug shows where)'
    >>> message(ValueError("there is one; pass overwrite=True to replace it"))
    'there is one; pass --overwrite to replace it'
    >>> message(ModuleNotFoundError("No module named 'torch'", name="torch"))
    "this needs torch: pip install 'shardplan[torch]'"
    """
    if isinstance(error, _USAGE):
        return _usage(error)
    issues = list(dict.fromkeys(map(str, getattr(error, "issues", ()))))
    if len(issues) > 1:
        more = f"; and {len(issues) - _SHOWN:,} more" if len(issues) > _SHOWN else ""
        text = f"{len(issues):,} reasons: {'; '.join(issues[:_SHOWN])}{more}"
    elif isinstance(error, KeyError) and error.args:
        text = str(error.args[0])  # its str() is a repr
    else:
        text = str(error) or type(error).__name__
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    text = _WORDS.sub(lambda found: _OPTIONS[found[0]], " ".join(text.split()))
    if isinstance(error, ImportError):
        return _needed(error, text)
    if isinstance(error, (ValueError, OSError, LookupError, TypeError)):
        return text
    if type(error).__module__.startswith("shardplan."):
        return text
    return f"unexpected {type(error).__name__}: {text} (--debug shows where)"


def _needed(error: ImportError, text: str) -> str:
    """Say which package is missing, and how to get it."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS or not isinstance(error, ModuleNotFoundError) or "pip " in text:
        return text
    return f"this needs {package}: pip install '{EXTRAS[package]}'"


def _usage(error: Any) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    ctx = getattr(error, "ctx", None)
    return f"{text}; see {ctx.command_path} --help" if ctx is not None else text
