"""The command line: ``shardplan inspect | plan | verify | diff | cat | convert | prune | demo``.

Each command is a function in the module that `app` lists; its docstring is its help. A command is
imported when it is called, and torch only if it needs tensors, so that the program starts in a
tenth of a second.
"""

import gc
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the program with the arguments it was started with, and exit."""
    # Nothing here needs numpy's linear algebra, whose threads take long to start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # collecting while modules are imported takes a tenth of a short command
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
        if "inspect" not in sys.argv[1:2]:  # it ends before there is any garbage
            gc.freeze()
            gc.enable()
        app(prog_name="shardplan")
    except KeyboardInterrupt:
        sys.exit(130)
