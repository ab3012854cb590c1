"""Print one table of what was tried, how often, and what was found.

Run as ``run.py SECTION=COUNT ...``: each section is the module of that name, and runs in a process
of its own; how much a count is, its ``hold`` says. ``COUNTS`` are those of ``make hold``.
"""

import importlib
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import attrs

COUNTS = {
    "kills": 1000,
    "corruption": 5000,
    "fuzzing": 1_000_000,
    "ranks": 251,
    "concurrency": 200,
    "soak": 500,
    "sizes": 100_000,
    "objects": 300,
}


def section(name, count):
    """Run one section here; print its rows as JSON, last."""
    warnings.simplefilter("ignore")
    rows = importlib.import_module(name).hold(count)
    print(json.dumps([attrs.asdict(row) for row in rows]))


def collect(name, count):
    """Run one section in a process of its own; return its rows, and the seconds it took."""
    command = [sys.executable, "-W", "ignore", __file__, "--rows", name, str(count)]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.monotonic() - begun
    try:
        return json.loads(done.stdout.splitlines()[-1]), seconds
    except (IndexError, ValueError):
        fault = f"the section itself failed ({done.returncode}):\n{done.stderr[-3000:]}"
        return [{"what": name, "tried": 0, "wrong": [fault], "note": ""}], seconds


def main(arguments):
    """Print the table, and what was found; return True if that is anything."""
    chosen = dict(argument.split("=") for argument in arguments) or COUNTS
    print(f"{'section':<12} {'what was tried':<44} {'how often':>10} {'wrong':>6}", flush=True)
    faults = []
    for name, count in chosen.items():
        rows, seconds = collect(name, int(count))
        for row in rows:
            note = f"  {row['note']}" if row["note"] else ""
            print(
                f"{name:<12} {row['what']:<44} {row['tried']:>10,} {len(row['wrong']):>6}{note}",
                flush=True,
            )
            faults += [f"{name}, {row['what']}: {fault}" for fault in row["wrong"]]
        total = sum(row["tried"] for row in rows)
        print(f"{name:<12} {'in all':<44} {total:>10,}         {seconds:.0f} s", flush=True)
    print(*faults[:20], sep="\n\n")
    return bool(faults)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # the sections import each other
    if sys.argv[1:2] == ["--rows"]:
        section(sys.argv[2], int(sys.argv[3]))
        sys.exit()
    sys.exit(main(sys.argv[1:]))
