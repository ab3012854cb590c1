"""State by rank that was saved on another number of ranks than it is loaded on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import attrs

from shardplan.io.execute import Reader
from shardplan.planning import Issue, Metadata, Path, PlanError, SavePlan, Strict, unflatten

from ._checkpoint import Checkpoint, SavedTensor
from ._comm import Place
from ._nested import at, put
from ._state import Parted, parted

__all__ = ["Resized", "resize", "without_other_ranks"]

_LABEL: Final = re.compile(r"(?:^|\.)rank_(\d+)_of_(\d+)(?=\.|$)")


@attrs.frozen
class Resized:
    """State by rank that was made of what other ranks had saved.

    Attributes:
        values: This rank's states, and the way to each.
        names: The names that the states' parts would have in a checkpoint of as many ranks.
    """

    values: tuple[tuple[Path, Any], ...]
    names: frozenset[str]

    def put(self, state: Any) -> None:
        """Put the states in their places, in what was loaded."""
        for path, value in self.values:
            put(state, path, value)


def resize(
    state: Mapping[Any, Any],
    plan: SavePlan,
    metadata: Metadata,
    reader: Reader | None,
    place: Place,
    *,
    strict: Strict,
    verify: bool,
) -> Resized:
    """Make this rank's state of all ranks' where the number of ranks has changed.

    Args:
        state: What `part` returned.
        plan: The plan of it, after any passes.
        metadata: What the checkpoint holds.
        reader: Reads from it; None on a rank that cannot.
        place: Where this rank is.
        strict: What must be filled; see `load_plan`.
        verify: Whether to check what is read against its checksums.

    Raises:
        PlanError: State that must be filled was saved on another number of ranks, and nothing says
            what to do about that; all of it is named.
    """
    moved = list(_moved(state, plan, metadata))
    able = [one for one in moved if one.node.source.resize is not None and reader is not None]
    issues = [
        _refusal(one, place) for one in moved if one not in able and _is_needed(one.names, strict)
    ]
    if issues:
        raise PlanError(issues)
    values = [(one.path, _made(one, reader, place, verify)) for one in able]
    return Resized(tuple(values), frozenset(name for one in able for name in one.names))


def without_other_ranks(names: Iterable[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """Leave out saved names that are other ranks' parts of what is wanted.

    >>> without_other_ranks(["rng.rank_1_of_2.pos", "a.rank_1_of_2"], ["rng.rank_0_of_2.pos"])
    ('a.rank_1_of_2',)
    """
    bases = {base for base, *_ in _labels(wanted)}
    others = {name for name in names for base, *_ in _labels([name]) if base in bases}
    return tuple(name for name in names if name not in others)


def _labels(names: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Yield what comes before the label, the rank and the number of ranks, where there is one.

    >>> list(_labels(["rng.rank_0_of_2.a", "w"]))
    [('rng', 0, 2)]
    """
    for name in names:
        match = _LABEL.search(name)
        if match is not None:
            yield name[: match.start()], int(match[1]), int(match[2])


@attrs.frozen
class _Moved:
    """State by rank that was saved on another number of ranks.

    Attributes:
        path: The way to it.
        node: Where it goes.
        name: Its name in the checkpoint, without a label.
        names: The names of its parts as they would be on these ranks.
        ranks: On how many it was saved.
    """

    path: Path
    node: Parted
    name: str
    names: tuple[str, ...]
    ranks: int


def _moved(state: Mapping[Any, Any], plan: SavePlan, metadata: Metadata) -> Iterator[_Moved]:
    """Yield what is wanted by rank, and was saved on another number of ranks."""
    catalog = plan.items.catalog
    heads = list(zip(catalog.names, catalog.sources, strict=True))
    for path, node in parted(state):
        prefix = ".".join([*(str(key) for _, key in path), node.label])
        names = [name for name, source in heads if f"{source}.".startswith(f"{prefix}.")]
        bases = {base for base, *_ in _labels(names)}
        if len(bases) != 1:
            continue  # a planner has given it other names
        (base,) = bases
        saved = _labels(metadata.state_dict_metadata)
        worlds = {ranks for other, _, ranks in saved if other == base}
        if worlds and int(node.label.rpartition("_")[2]) not in worlds:
            yield _Moved((*path, ("dict", node.label)), node, base, tuple(names), max(worlds))


def _is_needed(names: Iterable[str], strict: Strict) -> bool:
    if isinstance(strict, (bool, int)):
        return bool(strict)
    patterns = (strict,) if isinstance(strict, str) else strict
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _refusal(one: _Moved, place: Place) -> Issue:
    text = f"`{one.name}` was saved by each of {one.ranks} ranks, and is loaded on {place.ranks}"
    remedy = (
        "pass PerRank(value, resize=...), a function of all saved values, the rank and the number "
        "of ranks, which returns this rank's value; strict=False leaves what is there"
    )
    if one.node.source.resize is not None:
        remedy = "of a file of torch.save only one rank reads it: convert the file first"
    return Issue("missing", one.name, f"{text}; {remedy}", [place.rank])


def _made(one: _Moved, reader: Reader | None, place: Place, verify: bool) -> Any:
    """Make this rank's state of all ranks' states, as the user's function says."""
    assert reader is not None
    assert one.node.source.resize is not None
    checkpoint = Checkpoint(reader, verify=verify)
    labels = [Place(rank, one.ranks).label for rank in range(one.ranks)]
    states = tuple(_state(one.name, label, checkpoint) for label in labels)
    return one.node.source.resize(states, place.rank, place.ranks)


def _state(base: str, label: str, checkpoint: Checkpoint) -> Any:
    """Read one rank's state, nested as it was saved; None if it saved none."""
    prefix = f"{base}.{label}".lstrip(".")
    names = [name for name in checkpoint if f"{name}.".startswith(f"{prefix}.")]
    flat = {name: _read(checkpoint[name]) for name in names}
    if prefix in flat or not flat:
        return flat.get(prefix)
    data = checkpoint.metadata.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    first = paths.get(names[0], ())
    depth = next((n for n, (_, key) in enumerate(first, 1) if key == label), 0)
    if not depth:  # it was saved flat
        return {name.removeprefix(f"{prefix}."): value for name, value in flat.items()}
    return at(unflatten(flat, paths), first[:depth])


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, SavedTensor) else value
