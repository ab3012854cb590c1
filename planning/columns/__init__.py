"""Columns behind plans: millions of items in read-only numpy arrays."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .arrays import (  # isort: skip
        DAMAGE, Ints, column, distinct, numbered, pack, padded, readonly, row_tuples,
        unpack, within,
    )  # fmt: skip
    from .items import Catalog, Head, WriteItems, merge_catalogs
    from .reads import ReadItems
    from .runs import decode_columns, decode_runs, encode_runs

__getattr__, __dir__ = door(
    __name__,
    {
        "arrays": (
            "DAMAGE Ints column distinct numbered pack padded readonly row_tuples unpack within"
        ),
        "items": "Catalog Head WriteItems merge_catalogs",
        "reads": "ReadItems",
        "runs": "decode_columns decode_runs encode_runs",
    },
)
