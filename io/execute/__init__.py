"""Carry out byte plans: fetch, write, copy, commit, clean up."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .commit import MIN_AGE, by_save, leftovers, remove_save, strays
    from .mapping import map_tensors
    from .pieces import Kept, Lazy, Piece, collect
    from .read import Reader, ReadStats
    from .streaming import Copied, Copies, stored_chunks, write_copies

__getattr__, __dir__ = door(
    __name__,
    {
        "commit": "MIN_AGE by_save leftovers remove_save strays",
        "mapping": "map_tensors",
        "pieces": "Kept Lazy Piece collect",
        "read": "ReadStats Reader",
        "streaming": "Copied Copies stored_chunks write_copies",
    },
)
