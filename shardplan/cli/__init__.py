"""The command line: ``shardplan inspect | plan | verify | diff | cat | convert | prune | demo``.

- Which commands are there? `app`; one module each: `inspecting`, `plans`, `checking` (verify and
  diff), `reading` (cat), `converting`, `pruning`, `demos`
- What do they share? `options`, `screen` (tables and JSON), `waiting` (progress), `failing` (errors
  and exit codes), `placing` (meshes and placements as text), `contents` (any checkpoint, without
  torch), `tree` (names, like layers together)
- How are answers drawn? `pages` (inspect), `costs` (plan), `findings` (verify, diff), `elements`
  (cat); `deleting` counts what `prune` removes

Starting costs a tenth of a second: a command imports what it needs when it runs, and torch only if
it touches tensors.
"""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the program with the arguments it was started with, and exit."""
    # Nothing here needs numpy's linear algebra, whose threads take long to start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        try:
            from .app import app
        except ModuleNotFoundError as error:
            if error.name not in ("typer", "rich"):
                raise
            sys.exit("shardplan: error: the command line needs more: pip install 'shardplan[cli]'")
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without × shows a question mark
        app(prog_name="shardplan")
    except KeyboardInterrupt:
        sys.exit(130)
