"""Plans for saving and loading sharded checkpoints, as plain values.

The front door. Planning itself lives in `shardplan.planning`, which needs numpy and attrs only;
importing this package loads neither torch nor any of its subpackages.
"""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("shardplan")
