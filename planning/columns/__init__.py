"""Columns behind plans: millions of items in read-only numpy arrays."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .arrays import (  # isort: skip
        DAMAGE, Ints, column, distinct, numbered, pack, padded, readonly, row_tuples,
        unpack, within,
    )  # fmt: skip
    from .cuts import cut_items, cut_reads
    from .frames import Coded, SourceFrame, TargetFrame
    from .items import Catalog, Head, WriteItems, merge_catalogs
    from .reads import ReadItems, Transfer, Transfers
    from .runs import decode_columns, decode_runs, encode_runs
    from .world import World

__getattr__, __dir__ = door(
    __name__,
    {
        "arrays": (
            "DAMAGE Ints column distinct numbered pack padded readonly row_tuples unpack within"
        ),
        "cuts": "cut_items cut_reads",
        "frames": "Coded SourceFrame TargetFrame",
        "items": "Catalog Head WriteItems merge_catalogs",
        "reads": "ReadItems Transfer Transfers",
        "runs": "decode_columns decode_runs encode_runs",
        "world": "World",
    },
)
