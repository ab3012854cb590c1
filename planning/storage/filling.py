"""What a load can fill: memory whose elements meet, and states that other ranks saved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, TypeVar

import attrs
import numpy as np

from ..columns.reads import ReadItems
from ..load import Strict, strict_patterns
from ..metadata import Metadata
from ..plans import SavePlan

RANK_LABEL: Final = re.compile(r"(?:^|\.)rank_(\d+)_of_(\d+)(?=\.|$)")

K = TypeVar("K")


def is_folded(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return True if elements of a strided array share memory, as those of a repeated row do.

    >>> is_folded((0, 1), (3, 2)), is_folded((2, 1), (3, 2)), is_folded((2, 3), (4, 3))
    (True, False, True)
    """
    if 0 in sizes:
        return False
    axes = sorted(axis for axis in zip(strides, sizes, strict=True) if axis[1] > 1)
    reach = 0  # from the first element to the last, along the axes so far
    for stride, size in axes:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    if axes[0][0] == 0:
        return True
    places = np.zeros(1, np.int64)  # of all elements: strides that interleave may not meet
    for stride, size in axes:
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return len(np.unique(places)) < len(places)


def meeting(spans: Mapping[K, tuple[int, int]]) -> Iterator[tuple[K, K]]:
    """Yield the spans, from a start to an end, that overlap, in pairs; the first starts first.

    >>> list(meeting({"b": (4, 9), "a": (0, 6), "c": (9, 12)}))
    [('a', 'b')]
    """
    table = np.array(list(spans.values()), np.uint64).reshape(-1, 2)
    table = table[np.argsort(table[:, 0], kind="stable")]
    if (table[1:, 0] >= np.maximum.accumulate(table[:, 1])[:-1]).all():
        return
    ends: dict[K, int] = {}  # of earlier spans that reach as far as the current one
    for key, (start, end) in sorted(spans.items(), key=lambda pair: pair[1][0]):
        ends = {other: known for other, known in ends.items() if known > start}
        for other in ends:
            yield other, key
        ends[key] = end


def partly_filled(plan: SavePlan, reads: ReadItems) -> frozenset[str]:
    """Return the names, in the state dict, of tensors that are read in part.

    >>> from shardplan.planning import TensorSpec, global_plan, load_plan, local_plan, trim
    >>> a, b = (local_plan({"w": TensorSpec((n,))}) for n in (3, 4))
    >>> plan = trim("w", axis=0, to=3)((b,))[0]
    >>> partly_filled(plan, load_plan(global_plan([a])[1], plan).items)
    frozenset({'w'})
    """
    got, held = Counter[str](), Counter[str]()
    for name, numel in zip(reads.dest.tolist(), reads.numel.tolist(), strict=True):
        got[reads.names[name]] += numel
    holds = plan.holds
    for row, numel in zip(holds.row.tolist(), holds.box_sizes.prod(axis=1).tolist(), strict=True):
        held[holds.catalog.sources[row]] += numel
    return frozenset(name for name, numel in got.items() if 0 < numel < held[name])


@attrs.frozen
class SavedElsewhere:
    """Per-rank state that was saved on another number of ranks."""

    name: str  # its name in the checkpoint, without a label
    names: tuple[str, ...]  # the names of its parts as they would be on these ranks
    ranks: int  # on how many it was saved


def saved_elsewhere(
    prefix: str, ranks: int, plan: SavePlan, metadata: Metadata
) -> SavedElsewhere | None:
    """Return what other ranks saved of a rank's state; None if as many as these ``ranks`` did.

    ``prefix`` is where the state lies in the state dict, with its label; ``plan`` is the plan of
    that, after any passes. If passes gave the state other names, nothing is known of it.
    """
    catalog = plan.items.catalog
    pairs = zip(catalog.names, catalog.sources, strict=True)
    names = tuple(name for name, source in pairs if f"{source}.".startswith(f"{prefix}."))
    bases = {base for base, _ in _labels(names)}
    if len(bases) != 1:
        return None
    (base,) = bases
    saved = _labels(metadata.state_dict_metadata)
    worlds = {world for labelled, world in saved if labelled == base}
    if not worlds or ranks in worlds:
        return None
    return SavedElsewhere(base, names, max(worlds))


def without_other_ranks(names: Iterable[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """Leave out saved names that are other ranks' parts of what is wanted.

    >>> without_other_ranks(["rng.rank_1_of_2.pos", "a.rank_1_of_2"], ["rng.rank_0_of_2.pos"])
    ('a.rank_1_of_2',)
    """
    bases = {base for base, _ in _labels(wanted)}
    return tuple(n for n in names if not any(base in bases for base, _ in _labels([n])))


def _labels(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield what comes before each label ``rank_0_of_2``, and its number of ranks."""
    for match in filter(None, map(RANK_LABEL.search, names)):
        yield match.string[: match.start()], int(match[2])


def is_needed(names: Iterable[str], strict: Strict) -> bool:
    """Return True if any of some names must be filled.

    >>> is_needed(["a.w", "b"], ["a.*"]), is_needed(["b"], ["a.*"]), is_needed(["b"], True)
    (True, False, True)
    """
    if isinstance(strict, (bool, int)):
        return bool(strict)
    patterns = strict_patterns(strict)
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
