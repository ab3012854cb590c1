"""Per-rank state: random states, data loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import attrs

from shardplan.planning import Path

from ._comm import Place
from ._nested import at, put, replaced

__all__ = ["Parted", "PerRank", "part", "parted", "per_rank_names", "unpart"]

Resize = Callable[[tuple[Any, ...], int, int], Any]
"""Makes a rank's state of all saved ones, given those, by rank, and the rank and the number of
ranks that there are now."""


@attrs.frozen(eq=False)
class PerRank:
    """State that is meant to differ between ranks: each saves its own, and is given it back.

    It stands anywhere in a state dict. In the checkpoint, rank 3 of 8 has its state under the key
    ``rank_3_of_8``, so that any tool can read it, and `restore` without a target gives all of it.
    After a load, a `PerRank` with the loaded value stands in its place.

    Attributes:
        value: This rank's state: any values, tensors, or objects with ``state_dict()`` and
            ``load_state_dict()``, nested in any way.
        resize: What to do if the number of ranks has changed, which is otherwise an error. It is
            called on every rank as ``resize(values, rank, ranks)``, with the states of all ranks
            that saved, by rank (None for one that saved none), and returns this rank's state.

    >>> import tempfile
    >>> from shardplan import load, restore, save
    >>> from shardplan.dist import run_ranks
    >>> folder = tempfile.TemporaryDirectory()
    >>> def train(comm):
    ...     save({"step": 7, "seed": PerRank(100 + comm.rank)}, folder.name, comm=comm)
    ...     state = {"step": 0, "seed": PerRank(0)}
    ...     load(state, folder.name, comm=comm)
    ...     return state["seed"].value
    >>> run_ranks(2, train)
    [100, 101]
    >>> restore(folder.name)["seed"]
    {'rank_0_of_2': 100, 'rank_1_of_2': 101}
    >>> state = {"seed": PerRank(0, resize=lambda seeds, rank, ranks: sum(seeds) + rank)}
    >>> _ = load(state, folder.name)
    >>> state["seed"].value
    201
    >>> folder.cleanup()
    """

    value: Any
    resize: Resize | None = None


class Parted(dict[str, Any]):
    """What a `PerRank` is saved as: a dict with one rank's value under its label.

    Attributes:
        source: What it stands for.
        label: The label.
    """

    def __init__(self, source: PerRank, label: str) -> None:
        super().__init__({label: source.value})
        self.source, self.label = source, label


def part(state: Mapping[Any, Any], place: Place) -> Mapping[Any, Any]:
    """Return a state dict in which each `PerRank` is a dict with this rank's value.

    The very state dict comes back if it holds none.

    >>> part({"rng": PerRank(7), "step": 1}, Place(0, 2))
    {'rng': {'rank_0_of_2': 7}, 'step': 1}
    """

    def change(value: Any) -> Any:
        return Parted(value, place.label) if isinstance(value, PerRank) else value

    try:
        changed: Mapping[Any, Any] = replaced(state, change)
    except RecursionError:
        return state  # planning says what is wrong with it
    return changed


def unpart(state: Any, like: Mapping[Any, Any]) -> None:
    """Put a `PerRank` with the loaded value wherever `part` had found one, in place.

    Args:
        state: What was loaded.
        like: What `part` returned; it may be the same.

    >>> state = part({"rng": PerRank(7)}, Place(0, 2))
    >>> state["rng"]["rank_0_of_2"] = 8
    >>> unpart(state, state)
    >>> state["rng"].value
    8
    """
    for path, node in list(parted(like)):
        with suppress(LookupError, TypeError):  # it was not asked for
            put(state, path, attrs.evolve(node.source, value=at(state, path)[node.label]))


def parted(value: Any, path: Path = ()) -> Iterator[tuple[Path, Parted]]:
    """Yield each `Parted` of a state dict, and the way to it.

    >>> [(path, node.label) for path, node in parted(part({"a": [PerRank(7)]}, Place(0, 2)))]
    [((('dict', 'a'), ('list', 0)), 'rank_0_of_2')]
    """
    if isinstance(value, Parted):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from parted(inner, (*path, ("dict", key)))
    elif isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        for number, inner in enumerate(value):
            yield from parted(inner, (*path, (kind, number)))


def per_rank_names(state: Mapping[Any, Any], paths: Mapping[str, Path]) -> frozenset[str]:
    """Return which names of a state dict come from a `PerRank`.

    Args:
        state: What `part` returned.
        paths: The way to each of its values, by name; see `flatten`.

    >>> from shardplan.planning import flatten
    >>> state = part({"rng": PerRank(7), "like": {"rank_0_of_2": 7}}, Place(0, 2))
    >>> sorted(per_rank_names(state, flatten(state)[1]))
    ['rng.rank_0_of_2']
    """
    nodes = {path for path, _ in parted(state)}
    if not nodes:
        return frozenset()
    return frozenset(
        name
        for name, path in paths.items()
        if any(path[:depth] in nodes for depth in range(len(path)))
    )
