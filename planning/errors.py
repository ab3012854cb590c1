"""Issues, the errors that carry them, and helpers that format their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import attrs

from .text import runs

_SHOWN = 8
_COMPARED = 2000  # names compared in a search for similar ones


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(int, values))


@attrs.frozen
class Issue:
    """One fault of a plan or a checkpoint."""

    # `overlap`, `gap`, `out_of_bounds`, `conflict`, `too_large`, `missing`, `uncovered`, `shape`,
    # `dtype`, `type`, `lossy`, `unmatched` (a pattern) or `label` (of a partition).
    kind: str
    fqn: str  # the name of the tensor or value in the checkpoint
    message: str  # a sentence for people: what was expected, what came, what to try
    # The ranks concerned, ascending; empty if the fault is not specific to ranks.
    ranks: tuple[int, ...] = attrs.field(default=(), converter=_ints)
    # The elements concerned, as `(offsets, sizes)` in the tensor's global frame.
    region: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    remedy: str = ""  # an argument to try, printed after the message; may be empty
    # A sentence printed once, instead of the messages of all issues that share it.
    summary: str = ""

    def __str__(self) -> str:
        text = self.summary or self.message
        return f"{text}; {self.remedy}" if self.remedy else text


class PlanError(ValueError):
    """A plan that must not be executed; ``issues`` holds every reason found, not only the first."""

    def __init__(self, issues: Iterable[Issue]) -> None:
        self.issues: tuple[Issue, ...] = tuple(issues)
        super().__init__(self.issues)

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence per issue, or per group of issues with the same summary."""
        return tuple(dict.fromkeys(map(str, self.issues)))

    def __str__(self) -> str:
        if len(self.reasons) == 1:
            return self.reasons[0]
        return "- " + listed(self.reasons, quote="", between="\n- ", attribute="issues")


class RefusedError(TypeError):
    """Values that have no correct plan, such as a DTensor with a partial sum.

    Attributes:
        reasons: One sentence each; the text of the error has only the first ones.
    """

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        super().__init__(*reasons)

    def __str__(self) -> str:
        return listed(self.reasons, quote="", between="; ", attribute="reasons")


class NotFoundError(LookupError):
    """A name or an offset that does not exist; ``nearest`` holds similar ones."""

    def __init__(self, message: str, nearest: Sequence[str] = ()) -> None:
        self.nearest: tuple[str, ...] = tuple(nearest)
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0])


class CodecError(ValueError):
    """Bytes that do not decode, or a value that cannot be encoded without running code."""


def listed(
    names: Sequence[str], *, quote: str = "`", between: str = ", ", attribute: str = ""
) -> str:
    """List a few names; of more, their number and the ``attribute`` of the error that has all.

    >>> listed(["a", "b"]), listed([]), listed("abcdefghij", quote="")
    ('`a`, `b`', 'none', 'a, b, c, d, e, f, g, h and 2 more')
    >>> print(listed("abcdefghij", quote="", between="; ", attribute="reasons"))
    a; b; c; d; e; f; g; h; and 2 more: this error's `reasons` has all
    """
    shown = [f"{quote}{name}{quote}" for name in names[:_SHOWN]]
    if len(names) <= _SHOWN:
        return between.join(shown) or "none"
    where = f": this error's `{attribute}` has all" if attribute else ""
    last = " and " if between == ", " else f"{between}and "
    return f"{between.join(shown)}{last}{len(names) - _SHOWN:,} more{where}"


def nearest_names(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return up to three of ``names`` that resemble ``name``, most similar first."""
    known = list(names)
    if len(known) > _COMPARED:  # comparing is slow; similar names often share a suffix
        known = [n for n in known if n[:8] == name[:8] or n[-12:] == name[-12:]][:_COMPARED]
    return tuple(difflib.get_close_matches(name, known, n=3, cutoff=0.5))


def nearest_hint(near: Sequence[str]) -> str:
    """Return the end of a message that suggests similar names, if there are any."""
    return f"; nearest: {', '.join(near)}" if near else ""


def span(ranks: Sequence[int], most: int = _SHOWN) -> str:
    """Format rank numbers as runs, at most ``most`` of them.

    >>> span([0, 1, 2, 5])
    'ranks 0-2 and 5'
    >>> span([3]), span([0, 2, 3])
    ('rank 3', 'ranks 0, 2 and 3')
    >>> span([0, 2, 4, 6, 7], most=2)
    'ranks 0, 2 and 3 more'
    """
    found = runs(sorted(set(ranks)))
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in found]
    if len(words) > most:
        left = sum(b - a + 1 for a, b in found[most:])
        words = [*words[:most], f"{left:,} more"]
    if len(words) > 1:
        words[-1:] = words[-1].split(", ")
    listing = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"rank {listing}" if len(set(ranks)) == 1 else f"ranks {listing}"


def region_text(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Describe a box inside a tensor in words.

    >>> region_text((4, 0), (4, 16), (8, 16))
    'rows 4 to 8'
    >>> region_text((4, 2), (4, 3), (8, 16))
    'elements [4:8, 2:5]'
    """
    if not offsets:
        return "its only element"
    if tuple(sizes[1:]) == tuple(shape[1:]):
        return f"rows {offsets[0]} to {offsets[0] + sizes[0]}"
    parts = ", ".join(f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True))
    return f"elements [{parts}]"


def renumbered(issues: Sequence[Issue], ranks: Sequence[int]) -> list[Issue]:
    """Add rank numbers of the job to issues that name ranks of a smaller group.

    >>> str(*renumbered([Issue("gap", "w", "rank 1 lacks `w`", [1])], [4, 6]))
    'rank 1 lacks `w` (rank 1 of this group is rank 6 of the job)'
    """
    if list(ranks) == list(range(len(ranks))):
        return list(issues)
    changed = []
    for issue in issues:
        places = (issue.ranks or range(len(ranks)))[:_SHOWN]
        pairs = ", ".join(f"rank {place} of this group is rank {ranks[place]}" for place in places)
        text = f"{issue.message} ({pairs} of the job)"
        job_ranks = [ranks[place] for place in issue.ranks]
        changed.append(attrs.evolve(issue, message=text, ranks=job_ranks))
    return changed


EXTRAS: Final = {
    "torch": "shardplan[torch]",
    "xxhash": "shardplan[io]",
    "obstore": "shardplan[objects]",
    "rich": "shardplan[cli]",
    "typer": "shardplan[cli]",
    "hypothesis": "shardplan[hypothesis]",
    "safetensors": "safetensors",
}
"""What to ask pip for, by package."""


@contextmanager
def named_extras(what: str, *, with_torch: bool = False) -> Iterator[None]:
    """Raise a failed import again with the extra to install for a feature.

    ``with_torch`` selects the extra that also brings torch.

    >>> with named_extras("shardplan.save"):
    ...     raise ModuleNotFoundError("No module named 'torch'", name="torch")
    Traceback (most recent call last):
    ModuleNotFoundError: shardplan.save needs torch: pip install 'shardplan[torch]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extra = EXTRAS["torch" if with_torch and error.name == "xxhash" else error.name]
        text = f"{what} needs {error.name}: pip install '{extra}'"
        raise ModuleNotFoundError(text, name=error.name) from None
