"""Oracles and Hypothesis strategies, for the tests of this library and of others."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .oracles import assert_all_saved, assert_read_once, assert_written_once

__getattr__, __dir__ = door(
    __name__,
    {
        "oracles": "assert_all_saved assert_read_once assert_written_once",
    },
)
