"""The command line: ``shardplan inspect | plan | verify | diff | cat | convert | prune | demo``.

- Which commands are there? `app`; one module each: `inspecting`, `plans`, `checking` (verify and
  diff), `reading` (cat), `converting`, `pruning`, `demos`
- What do they share? `options`, `screen` (tables and JSON), `waiting` (progress), `failing` (errors
  and exit codes), `placing` (meshes and placements as text), `contents` (any checkpoint, without
  torch), `choosing` (names by pattern), `tree` (names, like layers together)
- How are answers drawn? `pages` (inspect), `costs` (plan), `findings` (verify, diff), `elements`
  (cat)

Starting costs a tenth of a second: a command is made when it is asked for, imports what it needs
when it runs, and torch only if it touches tensors.
"""

import gc
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the program with the arguments it was started with, and exit."""
    # Nothing here needs numpy's linear algebra, whose threads take long to start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # modules stay: to look for garbage in them takes a tenth of a short command
    try:
        try:
            from .app import app
        except ModuleNotFoundError as error:
            if error.name not in ("typer", "rich"):
                raise
            package = f"needs {error.name}: pip install 'shardplan[cli]'"
            sys.exit(f"shardplan: error: the command line {package}")
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without × shows a question mark
        if "inspect" not in sys.argv[1:2]:  # which is over before there is any garbage
            gc.freeze()
            gc.enable()
        app(prog_name="shardplan")
    except KeyboardInterrupt:
        sys.exit(130)
