"""Which commands are there? The program `shardplan`, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from .failing import BAD, EXIT_CODES, Group, told
from .options import Debug, Verbose

__all__ = ["app"]

# The module of each command, what its help is called there, and what it does in a line.
_COMMANDS: Final = {
    "inspect": ("inspecting", "HELP", "Show what a checkpoint holds."),
    "plan": ("plans", "HELP", "What would loading it on other ranks cost?"),
    "verify": ("checking", "VERIFY_HELP", "Check every byte."),
    "diff": ("checking", "DIFF_HELP", "Compare two checkpoints."),
    "cat": ("reading", "HELP", "Show elements of a tensor, or a value."),
    "convert": ("converting", "HELP", "Write another format, or cut in another way."),
    "prune": ("pruning", "HELP", "Remove all but the newest checkpoints."),
    "demo": ("demos", "HELP", "See what this is about."),
}
_COMPLETIONS: Final = ("--install-completion", "--show-completion")


@cache
def _command(name: str) -> Any:
    """Make one command."""
    home, text, short = _COMMANDS[name]
    module = import_module(f".{home}", __package__)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    text = f"{getattr(module, text)}\n\n{EXIT_CODES}"
    alone.command(name, short_help=short, help=text)(getattr(module, name))
    return typer.main.get_command(alone)


def _complete(ctx: Any, option: str, shell: str, *rest: str) -> None:
    """Install or show completion for a shell by name: typer takes none, and guesses the shell."""
    completion: Any = import_module("typer.completion")
    *most, last = (known.value for known in completion.Shells)
    if shell not in (*most, last) or rest:
        shells = f"{', '.join(most)} or {last}"
        raise ValueError(f"{option} takes {shells}, or nothing: your shell is found")
    does = completion.install_callback if "install" in option else completion.show_callback
    does(ctx, None, shell)


class _Commands(Mapping[str, Any]):
    """The commands by name, each made when it is asked for: typer takes a while to make one."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Program(Group):
    """The program, which knows its commands' names without making them."""

    commands: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments before the command; a shell may follow what installs completion."""
        if len(args) > 1 and args[0] in _COMPLETIONS and not args[1].startswith("-"):
            with told(ctx):
                _complete(ctx, *args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the commands, in the order in which help shows them."""
        return list(self.commands)


app = typer.Typer(
    name="shardplan",
    cls=_Program,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Look into, check, compare, convert and plan sharded checkpoints.\n\n"
        "Any format, on a disk or in s3://, gs:// and az://. Answers go to stdout, the rest to "
        f"stderr; --json is for programs; NO_COLOR and COLUMNS count.\n\n{EXIT_CODES}"
    ),
)


def _version(value: bool) -> None:
    if value:
        import shardplan

        print(f"shardplan {shardplan.__version__}")
        raise typer.Exit


@app.callback()
def _everything(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Take the options that stand before the command."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit(BAD)
