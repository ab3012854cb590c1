"""Columns behind plans: how a million items are held, in numpy arrays that are read-only."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .arrays import DAMAGE, Ints, distinct, numbered, pack, readonly, unpack
    from .catalog import Catalog, Head, column, padded, within
    from .items import WriteItems
    from .reads import ReadItems, Transfer, Transfers
    from .world import World

__getattr__, __dir__ = door(
    __name__,
    {
        "arrays": "DAMAGE Ints distinct numbered pack readonly unpack",
        "catalog": "Catalog Head column padded within",
        "items": "WriteItems",
        "reads": "ReadItems Transfer Transfers",
        "world": "World",
    },
)
