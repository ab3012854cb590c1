"""Run the demo: ``python -m shardplan.demo [folder]``."""

import sys

from shardplan.demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
