"""The program `shardplan`: its commands, its error messages and its exit codes."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any, Final

import typer
from typer import Option
from typer.core import TyperGroup

from shardplan.planning import EXTRAS

from .screen import BAD

_INTERRUPTED: Final = 130
_NO_READER: Final = 141
_EXIT_CODES: Final = (
    "Exit codes: 0 fine; 1 diff found differences, or verify damage; 2 wrong usage, bad input, or "
    "it could not be done; 130 interrupted."
)
# The commands, in the order of the help, each with its module and a short description.
_COMMANDS: Final = {
    "inspect": ("inspect", "Show what a checkpoint holds."),
    "plan": ("plan", "Show what loading it on other ranks would cost."),
    "explore": ("explore", "Write a page that shows it from every side."),
    "verify": ("actions", "Check every byte."),
    "diff": ("actions", "Compare two checkpoints."),
    "cat": ("actions", "Show elements of a tensor, or a value."),
    "convert": ("actions", "Write another format, or shard in another way."),
    "prune": ("actions", "Remove all but the newest checkpoints."),
    "demo": ("actions", "Train, save, reshard, convert and verify a small model."),
}
_EVERYWHERE: Final = ("verbose", "debug")  # options of every command, and of the program
_COMPLETIONS: Final = ("--install-completion", "--show-completion")
# Arguments in messages of the library, and the options that stand for them here.
_OPTIONS: Final = {
    "overwrite=True": "--overwrite",
    "`mesh`": "--mesh",
    "mesh exclude": "--mesh exclude",
    "max_shard_size": "--max-shard-size",
    "max_memory": "--max-memory",
    "`placements`": "--placements",
    "`planner`": "--planner",
    "required=False allows that": "leave the option out if that is fine",
    "lossy=True allows it": "a --planner can allow it",
}
_WORDS: Final = re.compile("|".join(rf"(?<![\w.]){re.escape(word)}" for word in _OPTIONS))
_SHOWN: Final = 3  # reasons of one error that fit a line
# Typer's base class of all usage errors, wherever the installed version keeps it.
_USAGE: Final[Any] = typer.BadParameter.__mro__[2]


class _Program(TyperGroup):
    """The program; it turns any exception into one line on stderr and an exit code."""

    commands: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build a command only now, since that takes long; its docstring is its help."""
        if cmd_name not in _COMMANDS:
            return None
        module, short = _COMMANDS[cmd_name]
        run = getattr(import_module(f".{module}", __package__), cmd_name)
        alone = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        alone.command(cmd_name, short_help=short, help=f"{getdoc(run)}\n\n{_EXIT_CODES}")(run)
        command: Any = typer.main.get_command(alone)
        command.params += [param for param in self.params if param.name in _EVERYWHERE]
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments before the command; a shell may follow a completion option."""
        with _exit_codes(ctx):
            if len(args) > 1 and args[0] in _COMPLETIONS and not args[1].startswith("-"):
                _complete(ctx, *args)
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _exit_codes(ctx):
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done


def _complete(ctx: Any, option: str, shell: str, *rest: str) -> None:
    """Install or show completion for a named shell; typer only guesses the current one."""
    completion: Any = import_module("typer.completion")
    shells = [known.value for known in completion.Shells]
    if shell not in shells or rest:
        names = f"{', '.join(shells[:-1])} or {shells[-1]}"
        raise ValueError(f"{option} takes {names}; without one, it detects your shell")
    does = completion.install_callback if "install" in option else completion.show_callback
    does(ctx, None, shell)


@contextmanager
def _exit_codes(ctx: Any) -> Iterator[None]:
    """Turn exceptions into a line on stderr and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # the reader is gone: discard the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_NO_READER) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if ctx.meta.get("shardplan.debug"):
            traceback.print_exc()
            print(getattr(error, "tracebacks", ""), end="", file=sys.stderr)  # of other ranks
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
        usage: Any = error
        text = " ".join(usage.format_message().split()).rstrip(".")
        ctx = getattr(error, "ctx", None)
        return f"{text}; see {ctx.command_path} --help" if ctx is not None else text
    issues = list(dict.fromkeys(map(str, getattr(error, "issues", ()))))
    if len(issues) > 1:
        more = f"; and {len(issues) - _SHOWN:,} more" if len(issues) > _SHOWN else ""
        text = f"{len(issues):,} reasons: {'; '.join(issues[:_SHOWN])}{more}"
    elif isinstance(error, KeyError) and error.args:
        text = str(error.args[0])  # str() of a KeyError is a repr
    else:
        text = str(error) or type(error).__name__
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    text = _WORDS.sub(lambda found: _OPTIONS[found[0]], " ".join(text.split()))
    if isinstance(error, ModuleNotFoundError) and "pip " not in text:
        extra = EXTRAS.get(package := (error.name or "").partition(".")[0])
        return f"this needs {package}: pip install '{extra}'" if extra else text
    known = (ValueError, OSError, LookupError, TypeError, ImportError)
    if isinstance(error, known) or type(error).__module__.startswith("shardplan."):
        return text
    return f"unexpected {type(error).__name__}: {text} (--debug shows where)"


app = typer.Typer(
    name="shardplan",
    cls=_Program,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Inspect, verify, compare, convert and plan sharded checkpoints.\n\n"
        "Any format, on a disk or in s3://, gs:// and az://. Answers go to stdout, the rest to "
        f"stderr; --json is for programs; NO_COLOR and COLUMNS count.\n\n{_EXIT_CODES}"
    ),
)


def _debug(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta["shardplan.debug"] = True


def _verbose(value: bool) -> None:
    if value:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger = logging.getLogger("shardplan")
        logger.handlers = [handler]
        logger.setLevel(logging.DEBUG)


def _version(value: bool) -> None:
    if value:
        import shardplan

        print(f"shardplan {shardplan.__version__}")
        raise typer.Exit


def _flag(*names: str, about: str, callback: Callable[..., None]) -> Any:
    """Return an option whose callback does all the work."""
    return Option(*names, help=about, callback=callback, is_eager=True, expose_value=False)


_LOG: Final = "Log what happens to stderr (logger 'shardplan')."
_Debug = _flag("--debug", about="Show the traceback of an error.", callback=_debug)
_Verbose = _flag("--verbose", "-v", about=_LOG, callback=_verbose)
_Version = _flag("--version", about="Show the version.", callback=_version)


@app.callback()
def _everything(
    ctx: typer.Context,
    version: Annotated[bool, _Version] = False,
    verbose: Annotated[bool, _Verbose] = False,
    debug: Annotated[bool, _Debug] = False,
) -> None:
    """Handle the options before the command."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(BAD)
