"""Carry out byte plans: fetch, write, copy, commit, clean up."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .ahead import BATCH_BYTES, DEPTH, Ahead, Box, Lender
    from .commit import MIN_AGE, by_save, leftovers, strays
    from .pieces import Kept, Lazy, Piece, boxes_of, collect, reads_of
    from .read import Reader, ReadStats

__getattr__, __dir__ = door(
    __name__,
    {
        "ahead": "Ahead BATCH_BYTES Box DEPTH Lender",
        "commit": "MIN_AGE by_save leftovers strays",
        "pieces": "Kept Lazy Piece boxes_of collect reads_of",
        "read": "ReadStats Reader",
    },
)
