"""Passes: functions from plans to plans, and `chain`, which composes them."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:
    from .base import (
        Pass,
        Passes,
        Stages,
        chain,
        may_see_rank,
        named_chain,
        partition,
        world_pass,
    )
    from .chunks import dedup_replicas, split_chunks, split_replicas
    from .keys import annotate, cast, drop, rename, select
    from .sharing import read_on, share_reads, split_reads

__getattr__, __dir__ = door(
    __name__,
    {
        "base": "Pass Passes Stages chain may_see_rank named_chain partition world_pass",
        "chunks": "dedup_replicas split_chunks split_replicas",
        "keys": "annotate cast drop rename select",
        "sharing": "read_on share_reads split_reads",
    },
)
