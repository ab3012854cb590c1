"""The command line, as ``python -m shardplan``."""

from shardplan.cli import main

if __name__ == "__main__":
    main()
