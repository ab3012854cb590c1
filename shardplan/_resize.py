"""Per-rank state that was saved on another number of ranks than it is loaded on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import attrs

from shardplan.io.execute import Reader
from shardplan.planning import (
    Issue,
    Metadata,
    Path,
    PlanError,
    SavePlan,
    Strict,
    strict_patterns,
    unflatten,
)

from ._checkpoint import Checkpoint, SavedTensor
from ._comm import Place
from ._read import Opened
from ._state import Parted, at, parted, put

_LABEL: Final = re.compile(r"(?:^|\.)rank_(\d+)_of_(\d+)(?=\.|$)")


@attrs.frozen
class Resized:
    """Per-rank state that was made of what other ranks had saved.

    Attributes:
        values: This rank's states, by path.
        names: The names that the states' parts would have in a checkpoint of as many ranks.
    """

    values: Mapping[Path, Any]
    names: frozenset[str]

    def put(self, state: Any) -> None:
        """Put the states in their places, in what was loaded."""
        for path, value in self.values.items():
            put(state, path, value)


def resize(
    state: Mapping[Any, Any],
    plan: SavePlan,
    opened: Opened,
    place: Place,
    *,
    strict: Strict,
    verify: bool,
) -> Resized:
    """Make this rank's state of all ranks' where the number of ranks has changed.

    Args:
        state: What `part` returned.
        plan: The plan of it, after any passes.
        opened: The checkpoint.
        place: Where this rank is.
        strict: What must be filled; see `load_plan`.
        verify: Whether to check what is read against its checksums.
    """
    values: dict[Path, Any] = {}
    names: set[str] = set()
    issues: list[Issue] = []
    for moved in _moved(state, plan, opened.metadata):
        if moved.node.source.resize is not None and opened.reader is not None:
            values[moved.path] = _resized(moved, opened.reader, place, verify)
            names.update(moved.names)
        elif _is_needed(moved.names, strict):
            issues.append(_refusal(moved, place))
    if issues:
        raise PlanError(issues)
    return Resized(values, frozenset(names))


def without_other_ranks(names: Iterable[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """Leave out saved names that are other ranks' parts of what is wanted.

    >>> without_other_ranks(["rng.rank_1_of_2.pos", "a.rank_1_of_2"], ["rng.rank_0_of_2.pos"])
    ('a.rank_1_of_2',)
    """
    bases = {base for base, _ in _labels(wanted)}
    return tuple(n for n in names if not any(base in bases for base, _ in _labels([n])))


def _labels(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield what comes before each label ``rank_0_of_2``, and its number of ranks."""
    for match in filter(None, map(_LABEL.search, names)):
        yield match.string[: match.start()], int(match[2])


@attrs.frozen(eq=False)
class _Moved:
    """Per-rank state that was saved on another number of ranks.

    Attributes:
        path: The path to it in the state dict.
        node: What stands there.
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
    """Yield the per-rank state that was saved on another number of ranks."""
    catalog = plan.items.catalog
    for path, node in parted(state):
        prefix = ".".join([*(str(key) for _, key in path), node.label])
        pairs = zip(catalog.names, catalog.sources, strict=True)
        names = [name for name, source in pairs if f"{source}.".startswith(f"{prefix}.")]
        bases = {base for base, _ in _labels(names)}
        if len(bases) != 1:
            continue  # a planner has given it other names
        (base,) = bases
        saved = _labels(metadata.state_dict_metadata)
        worlds = {ranks for labelled, ranks in saved if labelled == base}
        if worlds and int(node.label.rpartition("_")[2]) not in worlds:
            yield _Moved((*path, ("dict", node.label)), node, base, tuple(names), max(worlds))


def _is_needed(names: Iterable[str], strict: Strict) -> bool:
    if isinstance(strict, (bool, int)):
        return bool(strict)
    patterns = strict_patterns(strict)
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _refusal(moved: _Moved, place: Place) -> Issue:
    text = (
        f"`{moved.name}` was saved by each of {moved.ranks} ranks, and is loaded on {place.ranks}"
    )
    remedy = (
        "pass PerRank(value, resize=...), a function of all saved values, the rank and the number "
        "of ranks, which returns this rank's value; strict=False leaves what is there"
    )
    if moved.node.source.resize is not None:
        remedy = "of a file of torch.save only one rank reads it: convert the file first"
    return Issue("missing", moved.name, f"{text}; {remedy}", [place.rank])


def _resized(moved: _Moved, reader: Reader, place: Place, verify: bool) -> Any:
    """Call the user's function with the states of all ranks that saved."""
    assert moved.node.source.resize is not None
    checkpoint = Checkpoint(reader, verify=verify)
    labels = [Place(rank, moved.ranks).label for rank in range(moved.ranks)]
    states = tuple(_state(moved.name, label, checkpoint) for label in labels)
    return moved.node.source.resize(states, place.rank, place.ranks)


def _state(base: str, label: str, checkpoint: Checkpoint) -> Any:
    """Read one rank's state, nested as it was saved; None if it saved none."""
    prefix = f"{base}.{label}".lstrip(".")
    names = [name for name in checkpoint if f"{name}.".startswith(f"{prefix}.")]
    values = {name: checkpoint[name] for name in names}
    flat = {n: v.read() if isinstance(v, SavedTensor) else v for n, v in values.items()}
    if prefix in flat or not flat:
        return flat.get(prefix)
    data = checkpoint.metadata.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    first = paths.get(names[0], ())
    depth = next((n for n, (_, key) in enumerate(first, 1) if key == label), 0)
    if not depth:  # it was saved flat
        return {name.removeprefix(f"{prefix}."): value for name, value in flat.items()}
    return at(unflatten(flat, paths), first[:depth])
