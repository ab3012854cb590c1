"""Passes: functions from plans to plans, and `chain`, which composes them."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .base import Pass, Passes, Stages, chain, inverse, may_see_rank, named_chain, world_pass
    from .chunks import balance, dedup_replicas, split_chunks, split_replicas
    from .keys import annotate, cast, drop, rename, select
    from .reading import Reading, dequantize, reading_of
    from .routing import on_ranks, partition, where
    from .shapes import concat, pad, permute, reshape, split, stack, trim, unstack
    from .sharing import read_on, share_reads, split_reads

__getattr__, __dir__ = door(
    __name__,
    {
        "base": "Pass Passes Stages chain inverse may_see_rank named_chain world_pass",
        "chunks": "balance dedup_replicas split_chunks split_replicas",
        "keys": "annotate cast drop rename select",
        "reading": "Reading dequantize reading_of",
        "routing": "on_ranks partition where",
        "shapes": "concat pad permute reshape split stack trim unstack",
        "sharing": "read_on share_reads split_reads",
    },
)
