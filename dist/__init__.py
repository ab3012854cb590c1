"""Ranks: collectives that survive a failing rank, and name it.

A `Comm` is a group of ranks that exchange bytes: `solo()` is a group of one, `torch_comm()` a
process group of torch.distributed, and `run_ranks` runs ranks as threads. On top of it, a step
(`take_step`, and its simple forms `reduce_scatter`, `all_reduce`, `all_gather` and `broadcast`)
either succeeds on every rank or raises the same `CheckpointError` on every rank. Torch is
imported only by `torch_comm`.

- `comm`: a group of ranks and its meetings; `threads` and `processes` implement it
- `steps`: what ranks do together; `exchange`: messages between any two of them
- `rendezvous`: how processes meet and notice that one is gone; `transport`: their messages
- `errors`: what can go wrong

>>> from shardplan.dist import all_reduce, run_ranks
>>> run_ranks(4, lambda comm: all_reduce(comm, "add up", lambda: comm.rank, sum))
[6, 6, 6, 6]
"""

from .comm import Comm, Meeting, Pending, Reduce, solo
from .errors import CheckpointError, Failure, LostRanksError
from .exchange import exchange, swap
from .processes import torch_comm
from .steps import (
    StepResult,
    Turn,
    all_gather,
    all_keys,
    all_reduce,
    broadcast,
    decode_json,
    encode_json,
    fail_alike,
    reduce_scatter,
    take_step,
)
from .threads import run_ranks

__all__ = [
    # who
    "Comm",
    "Meeting",
    "Pending",
    "Reduce",
    "solo",
    "torch_comm",
    "run_ranks",
    # what they do together
    "StepResult",
    "Turn",
    "take_step",
    "fail_alike",
    "reduce_scatter",
    "all_reduce",
    "all_gather",
    "broadcast",
    "all_keys",
    "exchange",
    "swap",
    "encode_json",
    "decode_json",
    # what can go wrong
    "CheckpointError",
    "Failure",
    "LostRanksError",
]
