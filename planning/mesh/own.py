"""State that each rank has under a name of its own, as of random states: names as templates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import attrs

from ..frozen import FrozenDict
from ..tree import Path
from .placements import TensorSpec

_RUN: Final = re.compile("[0-9]+")


@attrs.frozen
class OwnKey:
    """A key with a rank's number in it: text, or, without text around it, perhaps a number."""

    before: str
    width: int  # digits, with zeros in front
    after: str
    is_text: bool

    def of(self, rank: int) -> Any:
        """Return the key of a rank."""
        return f"{self.before}{rank:0{self.width}}{self.after}" if self.is_text else rank


@attrs.frozen
class OwnLeaf:
    """A tensor or a value that each rank has under a name of its own."""

    path: tuple[tuple[str, Any], ...]  # with an `OwnKey`
    spec: TensorSpec | None  # None for a value
    is_empty: bool  # whether it is an empty dict

    def on(self, rank: int) -> OwnLeaf:
        """Return the leaf of a rank, with its own path."""
        path = tuple((kind, k.of(rank) if isinstance(k, OwnKey) else k) for kind, k in self.path)
        return OwnLeaf(path, self.spec, self.is_empty)

    @property
    def name(self) -> str:
        """The flattened key."""
        return ".".join([str(key) for _, key in self.path])


def nesting_of(leaves: Mapping[str, OwnLeaf]) -> FrozenDict[str, Any]:
    """Return the ``planner_data`` of leaves, by name."""
    nested = {n: leaf.path for n, leaf in leaves.items() if leaf.path != (("dict", n),)}
    empty = tuple(sorted(name for name, leaf in leaves.items() if leaf.is_empty))
    return FrozenDict.of_frozen({"paths": FrozenDict.of_frozen(nested), "empty": empty})


def own_paths(paths: Mapping[str, Path], names: Iterable[str], rank: int) -> dict[str, Path]:
    """Return the templates of those names that carry a rank's number, by name.

    The number of a layer does not count: other layers have the same name but for it.

    >>> paths = {name: (("dict", name),) for name in ("a.3.w", "a.4.w", "seed.3")}
    >>> [*own_paths(paths, paths, 3)]
    ['seed.3']
    """
    alike = Counter(chain.from_iterable(map(_skeletons, paths)))
    found = {}
    for name in names:
        runs = [run for run in _RUN.finditer(name) if int(run[0]) == rank]
        if len(runs) == 1 and alike[name[: runs[0].start()], name[runs[0].end() :]] == 1:
            found[name] = tuple((kind, _own_key(key, rank)) for kind, key in paths[name])
    return found


def _skeletons(name: str) -> Iterator[tuple[str, str]]:
    """Yield what stands around each number in a name."""
    return ((name[: run.start()], name[run.end() :]) for run in _RUN.finditer(name))


def _own_key(key: Any, rank: int) -> Any:
    text = str(key)
    run = next((run for run in _RUN.finditer(text) if int(run[0]) == rank), None)
    if run is None or type(key) not in (int, str):
        return key
    width = len(run[0]) if run[0].startswith("0") else 1
    return OwnKey(text[: run.start()], width, text[run.end() :], isinstance(key, str))
