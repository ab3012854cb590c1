"""Which names belong together? A tree of names, in which like layers are one branch.

``layers.0.w`` to ``layers.79.w`` become ``layers.0–79.w`` where everything below is alike: same
names, shapes, dtypes and cuts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final

import attrs

__all__ = ["Branch", "branches", "runs_text"]

_DEEPEST: Final = 32  # steps of a name; what is deeper stays in one piece
_RUNS: Final = 4  # runs of numbers that a label lists


@attrs.frozen
class Branch:
    """One line of the tree.

    Attributes:
        depth: How deep it lies.
        last: Per level below the top, whether this is the last branch there.
        label: Its part of the name.
        rows: The tensors that it stands for, if it is a leaf; alike, one or many.
        below: All tensors that lie at it and below it.
    """

    depth: int
    last: tuple[bool, ...]
    label: str
    rows: tuple[int, ...]
    below: tuple[int, ...]

    @property
    def guide(self) -> str:
        """Lines that lead to it."""
        if not self.last:
            return ""
        stems = "".join("  " if last else "│ " for last in self.last[:-1])
        return stems + ("└ " if self.last[-1] else "├ ")


@attrs.define(eq=False)
class _Node:
    """One step of a name, with all that lies below it."""

    row: int | None = None
    children: dict[str, _Node] = attrs.Factory(dict)
    kind: int = 0
    rows: tuple[int, ...] = ()


def branches(
    names: Sequence[str], kinds: Sequence[Hashable], *, collapse: bool = True
) -> Iterator[Branch]:
    """Arrange names as a tree, and give its lines from top to bottom.

    Args:
        names: The names, with a dot between steps.
        kinds: What makes leaves alike, per name.
        collapse: Whether to draw like numbered branches as one.

    >>> names = ["layers.0.w", "layers.1.w", "layers.2.w", "out.b", "out.w"]
    >>> for branch in branches(names, "aaaba"):
    ...     print(branch.guide + branch.label, *branch.rows)
    layers.0–2.w 0 1 2
    out
    ├ b 3
    └ w 4
    """
    root = _Node()
    for row, name in enumerate(names):
        node = root
        for step in name.split(".", _DEEPEST):
            child = node.children.get(step)
            if child is None:
                child = node.children[step] = _Node()
            node = child
        node.row = row
    numbers: dict[Hashable, int] = {}
    _number(root, kinds, numbers)
    yield from _below([root], collapse)


def _number(node: _Node, kinds: Sequence[Hashable], numbers: dict[Hashable, int]) -> None:
    """Give like nodes the same number, from the leaves up."""
    for child in node.children.values():
        _number(child, kinds, numbers)
    below = tuple((step, child.kind) for step, child in sorted(node.children.items()))
    key = (None if node.row is None else kinds[node.row], below)
    node.kind = numbers.setdefault(key, len(numbers))
    own = () if node.row is None else (node.row,)
    node.rows = own + tuple(row for child in node.children.values() for row in child.rows)


def _below(
    nodes: Sequence[_Node], collapse: bool, depth: int = 0, last: tuple[bool, ...] = ()
) -> Iterator[Branch]:
    """Draw what lies below some nodes that are alike."""
    groups = list(_groups(nodes, collapse))
    for number, (label, members) in enumerate(groups):
        while members[0].row is None:  # a step that leads to one branch only is no branch
            inner = list(_groups(members, collapse))
            if len(inner) != 1:
                break
            label, members = f"{label}.{inner[0][0]}", inner[0][1]
        here = (*last, number == len(groups) - 1) if depth else ()
        rows = tuple(node.row for node in members if node.row is not None)
        below = tuple(row for node in members for row in node.rows)
        yield Branch(depth, here, label, rows, below)
        yield from _below(members, collapse, depth + 1, here)


def _groups(nodes: Sequence[_Node], collapse: bool) -> Iterator[tuple[str, list[_Node]]]:
    """Group the children of nodes that are alike: numbered ones together if they are alike, too."""
    children = nodes[0].children
    steps = list(children)
    numbered = sorted((step for step in steps if _is_number(step)), key=int)
    alike: dict[object, list[str]] = {}
    for step in (*(s for s in steps if not _is_number(s)), *numbered):
        joins = collapse and _is_number(step)
        alike.setdefault(children[step].kind if joins else step, []).append(step)
    for group in alike.values():
        label = runs_text(map(int, group)) if len(group) > 1 else group[0]
        yield label, [node.children[step] for node in nodes for step in group]


def _is_number(step: str) -> bool:
    return step.isascii() and step.isdecimal() and str(int(step)) == step


def runs_text(numbers: Iterable[int]) -> str:
    """Name numbers the short way.

    >>> runs_text([0, 1, 2, 5]), runs_text(range(0, 80, 2)), runs_text([3, 7])
    ('0–2,5', '0,2,…,78', '3,7')
    """
    values = list(numbers)
    step = values[1] - values[0] if len(values) > 1 else 0
    if len(values) > _RUNS and step > 1 and values == list(range(values[0], values[-1] + 1, step)):
        return f"{values[0]},{values[1]},…,{values[-1]}"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    if len(texts) > _RUNS:
        texts = [*texts[: _RUNS - 1], "…", texts[-1]]
    return ",".join(texts)
