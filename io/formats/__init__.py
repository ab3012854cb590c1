"""Checkpoint formats: reading any of them as a `Source`, writing any of them with a `Writer`."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .base import (
        ChunkPlace,
        CommitJob,
        ExtraFiles,
        Fault,
        FileColumns,
        Findings,
        Format,
        Part,
        SharedFiles,
        Source,
        WriteJob,
        Writer,
    )
    from .combined import CombinedSource
    from .quantized import read_as
    from .registry import (
        detect,
        find_any,
        find_format,
        find_writer,
        known_formats,
        locate,
        open_located,
        open_source,
        open_target,
        register_format,
    )

__getattr__, __dir__ = door(
    __name__,
    {
        "base": (
            "ChunkPlace CommitJob ExtraFiles Fault FileColumns Findings Format Part "
            "SharedFiles Source WriteJob Writer"
        ),
        "combined": "CombinedSource",
        "quantized": "read_as",
        "registry": (
            "detect find_any find_format find_writer known_formats locate open_located open_source "
            "open_target register_format"
        ),
    },
)
