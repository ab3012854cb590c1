"""What the coordinator decides once every rank has said what it wants to save or load."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import attrs

from .errors import Issue, listed, span

How = Literal["alone", "cached", "derived", "gathered"]
"""How ranks get the plan of a save."""

_REMEDY: Final = (
    "make them equal, or give each rank's its own name; state that is meant to differ is saved as "
    "PerRank(value)"
)


@attrs.frozen
class SaveOffer:
    """What one rank offers before a save: fingerprints, and a name for the save."""

    save_id: str  # a name for the save
    cached: str  # the tag of the complete plan that it has in its cache; empty if there is none
    described: str  # the tag of the description of what it holds; empty if there is none
    templated: str  # likewise, with templates for names that carry the rank's number
    target: str  # the destination, as text
    passes: str  # the passes over the plans of all ranks, as text
    held: str  # the `table_tag` of the values that must be equal on all ranks that hold them


@attrs.frozen
class SaveVerdict:
    """The coordinator's decision about all offers."""

    save_id: str
    how: How
    conflict: str  # arguments that differ between ranks and must not; empty if there are none
    # If ranks hold different values: one rank per distinct table, by position.
    speakers: tuple[int, ...]
    # If plans are derived from several descriptions: one rank per distinct one, by position.
    describers: tuple[int, ...] = ()
    by_template: bool = False  # whether these are the descriptions with templates


def compare_saves(
    offers: Sequence[SaveOffer], ranks: Sequence[int], coordinator: int
) -> SaveVerdict:
    """Compare the offers of all ranks; a plan that all of them have need not travel.

    A plan is derived if descriptions are few: with more than half as many as there are ranks,
    exchanging them costs as much as gathering plans.

    >>> a = SaveOffer("x", "", "plan 1", "plan 1", "folder", "", "values 1")
    >>> verdict = compare_saves([a, attrs.evolve(a, held="values 2")], (0, 1), 0)
    >>> verdict.how, verdict.speakers
    ('derived', (0, 1))
    """
    plain, templated = [o.described for o in offers], [o.templated for o in offers]
    by_template = len({*templated}) < len({*plain})
    tags = templated if by_template else plain
    describers = tuple(map(tags.index, dict.fromkeys(tags)))
    few = len(describers) == 1 or 2 * len(describers) <= len(offers)
    ways: dict[How, bool] = {
        "cached": all(offer.cached == offers[0].cached != "" for offer in offers),
        "derived": few and "" not in tags,
        "gathered": True,
    }
    how = next(how for how, is_possible in ways.items() if is_possible)
    if how != "derived" or len(describers) == 1:
        describers = ()
    first: dict[str, int] = {}
    for place, offer in enumerate(offers):
        first.setdefault(offer.held, place)
    given = {
        "save to different places": [offer.target for offer in offers],
        "were given different passes over the plans of all ranks": [o.passes for o in offers],
    }
    apart = {what: ranks_by_value(ranks, texts) for what, texts in given.items()}
    differing = [f"ranks {what} ({who}); give all the same" for what, who in apart.items() if who]
    return SaveVerdict(
        offers[coordinator].save_id,
        how,
        "".join(differing[:1]),
        tuple(first.values()) if len(first) > 1 else (),
        describers,
        by_template,
    )


def ranks_by_value(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Return which ranks have which of several values, as text; empty if all are equal.

    >>> ranks_by_value((0, 1, 2), ("a", "a", "b"))
    'ranks 0, 1: a; rank 2: b'
    """
    sides: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        sides.setdefault(value, []).append(rank)
    texts = [f"{span(who)}: {value}" for value, who in sides.items()]
    return listed(texts, quote="", between="; ") if len(sides) > 1 else ""


# Values that several ranks hold under one name


def table_tag(table: Mapping[str, int]) -> str:
    """Return a fingerprint of a table of checksums, independent of its order.

    >>> table_tag({"a": 1, "b": 2}) == table_tag({"b": 2, "a": 1})
    True
    """
    names = sorted(table)
    sums = struct.pack(f"<{len(names)}Q", *(table[name] for name in names))
    return hashlib.blake2b(json.dumps(names).encode() + sums, digest_size=16).hexdigest()


def conflicts(
    ranks: Sequence[int], tags: Sequence[str], tables: Sequence[Mapping[str, int]]
) -> list[Issue]:
    """Return a conflict for each name under which ranks hold different data.

    Args:
        ranks: The rank numbers in the job.
        tags: The `table_tag` of each rank.
        tables: The checksums of each rank, by name; only the first rank of each tag needs any. The
            name of a part of a tensor is followed by a null character and where it starts.

    >>> print(*conflicts((0, 1, 2), ("a", "a", "b"), ({"lr": 1, "x": 5}, {}, {"lr": 2})))
    `lr` differs between ranks that save it: ranks 0, 1 against rank 2; make them equal, or give ...
    """
    holders: dict[str, list[int]] = {}
    for rank, tag in zip(ranks, tags, strict=True):
        holders.setdefault(tag, []).append(rank)
    first = dict(zip(reversed(tags), reversed(tables), strict=True))
    sides: dict[str, dict[int, list[int]]] = {}
    for tag, who in holders.items():
        for name, digest in first[tag].items():
            sides.setdefault(name, {}).setdefault(digest, []).extend(who)
    apart = {key: side.values() for key, side in sorted(sides.items()) if len(side) > 1}
    return [_conflict(*key.partition("\0")[::2], side) for key, side in apart.items()]


def _conflict(name: str, where: str, sides: Iterable[list[int]]) -> Issue:
    apart = " against ".join(span(sorted(side)) for side in sorted(sides))
    text = f"`{name}`{where} differs between ranks that save it: {apart}; {_REMEDY}"
    return Issue("conflict", name, text, sorted(rank for side in sides for rank in side))


# Loads


@attrs.frozen
class LoadOffer:
    """What one rank wants of a load."""

    save: str  # the name or the fingerprint of the checkpoint it has opened
    place: str  # where that is, as text
    unmatched: tuple[str, ...]  # patterns of `strict` that match no name on this rank


def differing_loads(offers: Sequence[LoadOffer], ranks: Sequence[int]) -> str:
    """Return which ranks opened which checkpoints, as text; empty if all opened the same.

    One checkpoint may be at several places: a disk has another name on another machine.
    """
    if len({offer.save for offer in offers}) == 1:
        return ""
    return ranks_by_value(ranks, [f"{offer.place}, save {offer.save}" for offer in offers])


def unmatched_everywhere(offers: Sequence[LoadOffer]) -> tuple[str, ...]:
    """Return the patterns that match no name on any rank.

    >>> offers = [LoadOffer("1", "a", ("x*", "y*")), LoadOffer("1", "a", ("y*",))]
    >>> unmatched_everywhere(offers)
    ('y*',)
    """
    return tuple(sorted(set.intersection(*(set(offer.unmatched) for offer in offers))))
