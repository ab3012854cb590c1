"""Open, verify and restore files that must be refused, under a limit of memory and of time."""

import sys
import time

from common import DOCUMENTED
from fuzzing import limit_memory

import shardplan


def main(paths):
    limit_memory()
    for path in paths:
        for action in (shardplan.open_checkpoint, shardplan.verify, shardplan.restore):
            begun = time.monotonic()
            try:
                action(path)
                assert action is not shardplan.restore, f"{path} was restored"
            except DOCUMENTED as error:
                print(path, action.__name__, str(error)[:200])
            assert time.monotonic() - begun < 10, f"{action.__name__} of {path} took too long"
    print("all refused cheaply")


if __name__ == "__main__":
    main(sys.argv[1:])
