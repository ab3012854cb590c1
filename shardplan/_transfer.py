"""Transfer tensors from ranks to ranks, with no storage in between.

1. Local plans: each rank describes what it gives and what it wants (`_Ends`).
2. Global plan: one rank runs the passes of both sides, and plans what each sends to each.
3. Move: each rank sends, receives and copies its part, round by round (`Moving`).
4. Finish: once all ranks have what they want, values are put in their places; ranks report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast

import attrs

from shardplan.dist import Comm, Turn, take_step
from shardplan.io import LoadError
from shardplan.planning import (
    LoadPlan,
    Passes,
    SavePlan,
    Strict,
    TransferPlan,
    decode_plans,
    encode_metadata,
    encode_plan,
    flatten,
    human_bytes,
    listed,
    local_plan,
    transfer_plan,
    with_replicas,
)
from shardplan.planning.columns import pack, unpack
from shardplan.planning.passes import Stages
from shardplan.planning.storage import plan_bytes

from ._comm import as_comm, place_of
from ._content_hash import content_hash
from ._moving import Filled, Moving
from ._passes import run_passes
from ._report import Stopwatch, Timed, logged
from ._state import State, expand, give_back, part, put, unpart

__all__ = ["TransferReport", "transfer"]

T = TypeVar("T")


@attrs.frozen(repr=False)
class TransferReport(Timed):
    """What one rank did in a transfer.

    Attributes:
        bytes_needed: Bytes of the elements that this rank wanted.
        bytes_sent, bytes_received: Bytes of tensors that it sent to other ranks, and received.
        bytes_copied: Bytes that it had itself.
        messages: The number of messages that it sent and received.
        missing: Wanted names that no source has.
        unexpected: Names of the sources that this rank did not want.
        dropped: This rank's wanted keys that the planner left out; they were not filled.
        seconds: Seconds by phase: plan, exchange, move, wait (for the other ranks), verify.
    """

    bytes_needed: int
    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    messages: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    dropped: tuple[str, ...]
    seconds: Mapping[str, float]
    trace = None

    _verb = "filled"

    @property
    def _title(self) -> str:
        sizes = (self.bytes_needed, self.bytes_received, self.bytes_copied, self.bytes_sent)
        needed, received, copied, sent = map(human_bytes, sizes)
        return f"transferred {needed}: received {received}, copied {copied}, sent {sent}"


def transfer(
    source: State | None,
    target: State | None,
    *,
    planner: Passes[SavePlan] | None = None,
    target_planner: Passes[SavePlan] | None = None,
    strict: Strict = True,
    dtype: Literal["same", "cast"] = "same",
    verify: bool = False,
    comm: Comm | None = None,
) -> TransferReport:
    """Fill the tensors of some ranks from those of others, or of the same, in place.

    Every rank calls this, with what it gives, what it wants, or both: trainers that update
    inference ranks, or ranks whose mesh changes. Each element comes from one rank that holds it,
    over the network only if the rank that wants it does not hold it. Ranks that hold replicas
    share the sending. Messages go straight from and into contiguous tensor memory; others are
    batched. About 256 MiB each way are in memory at a time.

    Args:
        source: What this rank gives, as in `save`; None if nothing.
        target: What this rank wants filled, as in `load`; None if nothing. It must not share memory
            with ``source``.
        planner: Passes over what the sources hold, as in `save`: renaming, casting, fusing, …
        target_planner: Passes over what the targets hold, as in `load`. After the passes, both
            sides have the same names. All passes run on one rank, over the plans of the sources,
            or of the targets; all ranks pass the same ones.
        strict: As in `load`.
        dtype: As in `load`.
        verify: Whether to prove afterwards, by `content_hash`, that the targets hold the same bits
            as the sources: a pass over all tensors on both sides, each of which must hold whole
            tensors together. Not with planners or casts, which change names and bits.
        comm: The ranks of both sides; by default all of torch's process group.

    Returns:
        What this rank sent, received and copied.

    >>> import torch
    >>> from shardplan.dist import run_ranks
    >>> def update(comm):
    ...     w = torch.full((2,), float(comm.rank))
    ...     if comm.rank == 0:  # the trainer
    ...         return transfer({"model": {"w": w + 7}}, None, comm=comm).bytes_sent
    ...     _ = transfer(None, {"model": {"w": w}}, comm=comm)
    ...     return w.tolist()
    >>> run_ranks(2, update)
    [8, [7.0, 7.0]]

    Raises:
        PlanError: What a target wants is not there, or differs; nothing was changed.
        ValueRefusedError: Some tensors cannot be sent or filled; nothing was changed.
        LoadError: With ``verify``, both sides differ.
        CheckpointError: On many ranks, any error, with that of each rank. If a rank is lost while
            tensors move, the contents of targets are undefined.
    """
    comm, watch = as_comm(comm), Stopwatch()
    if verify and (planner is not None or target_planner is not None or dtype != "same"):
        raise ValueError("verify compares names and bits, which planners and casts change")
    # Passes that only choose who writes are left out: any holder of a replica may send it.
    planners = {
        "given": Stages.of(planner, load=True),
        "wanted": Stages.of(target_planner, load=True),
    }
    with watch.phase("exchange"):
        planned = take_step(
            comm,
            "plan the transfer",
            lambda: _offered(_Ends.of(source, target, comm), planners),
            partial(_plan_all, comm, planners, strict, dtype),
            each=True,
        )
        ends = planned.mine
        found = partial(Moving.of, comm, ends.source, ends.target, planned.reply)
        moving = _together(comm, "find the tensors", found)
    with watch.phase("wait"):  # for the other ranks
        values = _together(comm, "transfer", partial(moving.move, watch))
    _together(comm, "finish the transfer", partial(ends.finish, target, values))
    if verify:
        with watch.phase("verify"):
            _compare(comm, source, target)
    return logged(_report(moving, watch), loud=comm.rank == comm.coordinator)


def _together(comm: Comm, step: str, work: Callable[[], T]) -> T:
    """Do some work on all ranks; if any fails, all raise."""
    return take_step(comm, step, lambda: Turn(work(), None), lambda nothing: Turn(None, None)).mine


def _compare(comm: Comm, source: State | None, target: State | None) -> None:
    """Raise, on all ranks, if the targets differ from the sources in any bit."""
    given, filled = (
        content_hash({} if state is None else state, by="tensor", comm=comm)
        for state in (source, target)
    )
    wrong = sorted(name for name in given.keys() & filled.keys() if given[name] != filled[name])
    if wrong:
        text = f"the targets do not hold what the sources hold: {listed(wrong)} differ"
        raise LoadError(text, filled.keys() - wrong, wrong)


def _report(moving: Moving, watch: Stopwatch) -> TransferReport:
    rounds, keys = moving.rounds, moving.plan.report
    sent = sum(parcel.nbytes for one in rounds for parcel in one.sends)
    received = sum(parcel.nbytes for one in rounds for parcel in one.receives)
    copied = plan_bytes(moving.plan, moving.metadata)
    messages = sum(len(one.sends) + len(one.receives) for one in rounds)
    return TransferReport(
        copied + received,
        sent,
        received,
        copied,
        messages,
        keys.missing,
        keys.unexpected,
        keys.dropped,
        watch.seconds,
    )


@attrs.frozen(eq=False)
class _Ends:
    """What one rank gives, flattened, and what it wants, with their plans; None if nothing."""

    source: Mapping[str, Any] | None
    target: Filled | None
    plans: Mapping[str, SavePlan]

    @classmethod
    def of(cls, source: State | None, target: State | None, comm: Comm) -> _Ends:
        """Describe what a rank gives and wants."""
        give, want = (
            None if state is None else part(expand(state), place_of(comm))
            for state in (source, target)
        )
        plans = {"given": give, "wanted": want}
        return cls(
            None if give is None else flatten(give)[0],
            None if want is None else Filled(want, *flatten(want)),
            {end: local_plan(state) for end, state in plans.items() if state is not None},
        )

    def finish(self, target: State | None, values: Mapping[str, Any]) -> None:
        """Put non-tensor values in their places, and hand stateful objects their state."""
        if target is None or self.target is None:
            return
        state = self.target.state
        for name, value in values.items():
            put(state, self.target.paths[name], value)
        if state is not target:
            unpart(state, state)
            give_back(target, state)


_Planners = Mapping[str, Stages[SavePlan]]  # of what is given, and of what is wanted


def _offered(ends: _Ends, planners: _Planners) -> Turn[_Ends]:
    header = {end: len(stages.own) + len(stages.rest) for end, stages in planners.items()}
    return Turn(ends, pack(header, {end: encode_plan(plan) for end, plan in ends.plans.items()}))


def _plan_all(
    comm: Comm,
    planners: _Planners,
    strict: Strict,
    dtype: Literal["same", "cast"],
    offers: Sequence[bytes],
) -> Turn[TransferPlan]:
    """Plan for all ranks, on the coordinator; the reply has each rank's part."""
    headers, sides = zip(*map(unpack, offers), strict=True)
    for end, what in (("given", "planner"), ("wanted", "target_planner")):
        counts = [header[end] for header in headers]
        if len(set(counts)) > 1:
            raise ValueError(
                f"all ranks must pass the same planners; the numbers of passes in {what} are, by "
                f"rank, {counts}"
            )
    given, givers = _after(planners["given"], sides, "given")
    wanted, takers = _after(planners["wanted"], sides, "wanted")
    plan = transfer_plan(
        given, wanted, source_ranks=givers, target_ranks=takers, strict=strict, dtype=dtype
    )
    own = dict(zip(givers, given, strict=True))
    metadata, replies = encode_metadata(plan.metadata), []
    for rank in range(comm.world_size):
        mine = plan.part(rank) if rank < plan.ranks else LoadPlan([])
        parts = {"plan": encode_plan(mine), "metadata": metadata}
        if rank in own:
            parts["given"] = encode_plan(attrs.evolve(own[rank], held=None, left_out=None))
        replies.append(pack({"peers": plan.peers}, parts))
    return Turn(plan, replies)


def _after(
    stages: Stages[SavePlan], sides: Sequence[Mapping[str, bytes]], end: str
) -> tuple[tuple[SavePlan, ...], list[int]]:
    """Return the plans of one end after its passes, and their ranks."""
    ranks = [rank for rank, side in enumerate(sides) if end in side]
    decoded = cast("tuple[SavePlan, ...]", decode_plans(sides[rank][end] for rank in ranks))
    before = tuple(
        attrs.evolve(plan, rank=number, world_size=len(ranks))
        for number, plan in enumerate(decoded)
    )
    after = run_passes((*stages.own, *stages.rest), before, trace=False).plans
    return with_replicas(after, before), ranks
