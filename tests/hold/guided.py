"""Fuzz one case of `fuzzing` guided by coverage; needs atheris.

Run as ``guided.py KIND CASE RUNS FOLDER``.
"""

import sys
import warnings
from pathlib import Path

import atheris


def main(kind, number, runs, folder):
    """Fuzz; atheris ends the process, with an error if a fault is found."""
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=["shardplan"], enable_loader_override=False):
        import fuzzing

        case = fuzzing.cases_of(kind, folder)[number]
        case.take(case.seed)  # what it imports is instrumented, too
    seeds = Path(folder, "seeds")
    seeds.mkdir()
    for i, data in enumerate([case.seed, *fuzzing.corpus_of(kind, number)]):
        (seeds / str(i)).write_bytes(data)

    def take(data):
        with fuzzing.kept(kind, number, [data]):
            case.take(data)

    settled = [f"-runs={runs}", "-rss_limit_mb=0", "-max_len=8192", "-verbosity=0"]
    settled.append(f"-artifact_prefix={folder}/")
    atheris.Setup([sys.argv[0], *settled, str(seeds)], take)
    fuzzing.watch(folder)
    fuzzing.limit_memory()
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
