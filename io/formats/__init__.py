"""Checkpoint formats: reading any of them as a `Source`, writing any of them with a `Writer`."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .foreign import Foreign, check_foreign, check_headers, lost_parts
    from .sources import Source, Spot, detect, locate, open_located, open_source
    from .writers import NativeWriter, Part, Writer, open_target

__getattr__, __dir__ = door(
    __name__,
    {
        "foreign": "Foreign check_foreign check_headers lost_parts",
        "sources": "Source Spot detect locate open_located open_source",
        "writers": "NativeWriter Part Writer open_target",
    },
)
