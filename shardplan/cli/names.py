"""Names of tensors and values: patterns, completion, and a tree in which like layers are one line.

``layers.0.w`` to ``layers.79.w`` become ``layers.0–79.w`` if all below them is alike: the same
names, shapes, dtypes and tilings.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Final

import attrs

from shardplan.planning import nearest_hint, nearest_names, runs_text

__all__ = ["Branch", "branches", "choose", "continuations", "hint"]

_HARMLESS: Final = re.compile(r"[\w.][\w.,/@%+=:-]*")
_DEEPEST: Final = 32  # steps of a name; deeper ones stay in one piece


def choose(pattern: str, names: Sequence[str]) -> list[int]:
    """Return the positions of the names that a pattern matches.

    A pattern is a name, the start of names up to a dot, or else a shell-style pattern.

    >>> names = ["w", "w[0]", "layers.0.w", "layers.1.w"]
    >>> choose("w[0]", names), choose("layers.1", names), choose("*.w", names)
    ([1], [3], [2, 3])
    """
    start = f"{pattern.rstrip('.')}."
    rows = [row for row, n in enumerate(names) if n == pattern or n.startswith(start)]
    return rows or [row for row, name in enumerate(names) if fnmatchcase(name, pattern)]


def continuations(start: str, names: Iterable[str]) -> list[str]:
    """Return how a shell can complete the start of a name, up to the next dot.

    >>> continuations("la", ["layers.0.w", "layers.1.w", "step"])
    ['layers']
    >>> continuations("layers.", ["layers.0.w", "layers.1.w", "step"])
    ['layers.0', 'layers.1']

    A shell treats an offer as if it had been typed, and anyone may have chosen the names: those
    with characters that mean something to a shell are not offered.

    >>> continuations("", ["step", "$(reboot)", "a b", "-x"])
    ['step']
    """
    steps = start.count(".") + 1
    found = (name for name in names if name.startswith(start))
    offers = dict.fromkeys(".".join(name.split(".")[:steps]) for name in found)
    return [offer for offer in offers if _HARMLESS.fullmatch(offer)]


def hint(pattern: str, names: Sequence[str]) -> str:
    """Return the end of a message about a pattern without a match: similar names and starts.

    >>> hint("model.layerz", ["model.layers.0.w", "step"])
    '; nearest: model.layers, model.layers.0, model.layers.0.w'
    """
    known = dict.fromkeys(names)
    for name in names:
        known |= dict.fromkeys(accumulate(name.split("."), "{}.{}".format))
    return nearest_hint(nearest_names(pattern.strip("*."), known))


@attrs.frozen
class Branch:
    """One line of a tree of names.

    Attributes:
        depth: How deep it lies; 0 at the top.
        label: Lines that lead to it, and its part of the name.
        rows: The positions of the names that end here: several if like ones share the line.
        below: The positions of all names that end here or below.
    """

    depth: int
    label: str
    rows: tuple[int, ...]
    below: tuple[int, ...]


@attrs.frozen(eq=False)
class _Node:
    """One step of a name, and all below it.

    Attributes:
        row: The position of the name that ends here, if one does.
        children: The nodes below, by step.
        kind: Equal for nodes under which everything is alike.
    """

    row: int | None
    children: dict[str, _Node]
    kind: Hashable

    def below(self) -> Iterator[int]:
        """Yield the positions of all names that end here or below."""
        if self.row is not None:
            yield self.row
        for child in self.children.values():
            yield from child.below()


def branches(
    names: Sequence[str], kinds: Sequence[Hashable], *, collapse: bool = True
) -> Iterator[Branch]:
    """Arrange names as a tree, and yield its lines from top to bottom.

    Args:
        names: The names, with a dot between steps.
        kinds: Per name, a value that is equal for names that are alike.
        collapse: Whether to draw like numbered branches as one.

    >>> names = ["layers.0.w", "layers.1.w", "layers.2.w", "out.b", "out.w"]
    >>> for branch in branches(names, "aaaba"):
    ...     print(branch.label, *branch.rows)
    layers.0–2.w 0 1 2
    out
    ├ b 3
    └ w 4
    """
    paths = [(row, name.split(".", _DEEPEST)) for row, name in enumerate(names)]
    yield from _below([_node(paths, 0, kinds)], collapse)


def _node(
    paths: Sequence[tuple[int, Sequence[str]]], depth: int, kinds: Sequence[Hashable]
) -> _Node:
    """Build the node that some names share after `depth` steps."""
    groups: dict[str, list[tuple[int, Sequence[str]]]] = {}
    own = None
    for row, steps in paths:
        if len(steps) > depth:
            groups.setdefault(steps[depth], []).append((row, steps))
        else:
            own = row
    children = {step: _node(group, depth + 1, kinds) for step, group in groups.items()}
    inner = tuple((step, child.kind) for step, child in sorted(children.items()))
    return _Node(own, children, (None if own is None else kinds[own], inner))


def _below(
    nodes: Sequence[_Node], collapse: bool, depth: int = 0, stem: str = ""
) -> Iterator[Branch]:
    """Draw what lies below some nodes that are alike."""
    groups = list(_groups(nodes, collapse))
    for number, (label, members) in enumerate(groups, start=1):
        while members[0].row is None:  # a step with one branch below shares its line
            inner = list(_groups(members, collapse))
            if len(inner) != 1:
                break
            label, members = f"{label}.{inner[0][0]}", inner[0][1]
        last = number == len(groups)
        guide = ("└ " if last else "├ ") if depth else ""
        rows = tuple(node.row for node in members if node.row is not None)
        below = tuple(row for node in members for row in node.below())
        yield Branch(depth, f"{stem}{guide}{label}", rows, below)
        further = ("  " if last else "│ ") if depth else ""
        yield from _below(members, collapse, depth + 1, stem + further)


def _groups(nodes: Sequence[_Node], collapse: bool) -> Iterator[tuple[str, list[_Node]]]:
    """Group the children of nodes that are alike: numbered ones together if they are alike, too."""
    children = nodes[0].children
    numbered = sorted(filter(_is_number, children), key=int)
    groups: dict[object, list[str]] = {s: [s] for s in children if not _is_number(s)}
    for step in numbered:
        groups.setdefault(children[step].kind if collapse else step, []).append(step)
    for group in groups.values():
        label = runs_text([*map(int, group)], ",") if len(group) > 1 else group[0]
        yield label, [node.children[step] for node in nodes for step in group]


def _is_number(step: str) -> bool:
    return step.isascii() and step.isdecimal() and str(int(step)) == step
