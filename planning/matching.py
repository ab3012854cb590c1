"""Matching of what is wanted with what was saved: names, kinds, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from .columns.arrays import Ints
from .columns.catalog import Catalog
from .dtypes import is_exact_cast
from .errors import Issue, nearest_hint, nearest_names
from .metadata import BytesMetadata, Entries, Metadata, TensorMetadata
from .prefixes import Renames, find_renames
from .records import TensorProperties
from .tree import Path, is_tensor

__all__ = ["Match", "explain_missing", "match_entries", "whole_names"]

_SUGGESTED: Final = 8  # missing names that get a "nearest" hint
_LEAVE: Final = "strict=False leaves it as it is"


@attrs.frozen(eq=False)
class Match:
    """How a catalog and a checkpoint fit.

    Attributes:
        entry: Which entry fills each row of the catalog (-1: none does).
        issues: What does not fit.
        notes: What does not fit and was asked for.
        shared: Per row, the shape that saved and wanted tensor share, if only that is to be filled.
    """

    entry: Ints
    issues: list[Issue]
    notes: list[Issue]
    shared: dict[int, tuple[int, ...]]


def match_entries(
    entries: Entries,
    catalog: Catalog,
    rows: Ints,
    dtype: str,
    shape: str,
    unneeded: Container[str] = (),
) -> Match:
    """Compare what is wanted with what is there, tensor by tensor; some names need not be there."""
    match = Match(np.full(len(catalog), -1, np.int64), [], [], {})
    layouts, props = entries.layout.tolist(), entries.prop.tolist()
    fitting: set[tuple[Any, ...]] = set()  # pairs of tensors that fit: most are alike
    for row in rows.tolist():
        name, _, _, properties, size = catalog.heads[row]
        at = entries.row_of.get(name, -1)
        if at < 0 and name in unneeded:
            continue
        if at < 0:
            text = f"`{name}` is not in the checkpoint"
            match.issues.append(Issue("missing", name, text, remedy=_LEAVE))
            continue
        pair = (layouts[at], props[at], id(properties), size)
        if pair in fitting:
            match.entry[row] = at
            continue
        saved = entries.record(at)
        issue = _misfit(name, saved, properties, size, dtype)
        if issue is None:
            match.entry[row] = at
            losses = list(_losses(name, saved, properties))
            match.notes.extend(losses)
            if not losses:
                fitting.add(pair)
        elif shape == "same" or issue.kind != "shape" or (both := _shared(saved, size)) is None:
            match.issues.append(issue)
        else:
            match.entry[row] = at
            match.notes.append(issue)
            match.shared[row] = both
    return match


def explain_missing(
    issues: Sequence[Issue], entries: Entries, catalog: Catalog, dtype: str
) -> list[Issue]:
    r"""Say what may have been meant by missing names.

    Those that the checkpoint has under another prefix get one summary, with the `rename` to use.

    Args:
        issues: What does not fit.
        entries: What the checkpoint has.
        catalog: What is wanted.
        dtype: Whether another dtype fits, see `load_plan`.

    >>> from shardplan.planning import local_plan
    >>> catalog = local_plan({"module": {"a": 1, "b": 2}}).items.catalog
    >>> issues = [Issue("missing", name, "…") for name in catalog.names]
    >>> entries = Entries.of({"a": BytesMetadata(), "b": BytesMetadata()})
    >>> print(*dict.fromkeys(map(str, explain_missing(issues, entries, catalog, "same"))))
    2 names are not in the checkpoint, which has them under another prefix: `module.a` as `a`, and
    so on; pass planner=rename([(r"^module\.", "")])
    """
    saved = entries.row_of
    missing = [issue.fqn for issue in issues if issue.kind == "missing"]
    wanted = {head.name: head for head in catalog.heads}

    def fits(name: str, other: str) -> bool:
        head = wanted[name]
        saved_as = entries.record(saved[other])
        return _misfit(name, saved_as, head.properties, head.size, dtype) is None

    fitting = [name for name in catalog.names if name in saved]
    ways = find_renames(missing, saved, fitting, fits=fits) if missing else ()
    found = ways[0].names if ways else {}
    renamed = catalog.sources is not catalog.names
    summary, remedy = (_prefix_text(ways), _prefix_remedy(ways, renamed)) if ways else ("", "")
    known, left = sorted(saved), [name for name in missing if name not in found]
    hints = {name: nearest_names(name, known) for name in left[:_SUGGESTED]}
    values = {head.name for head in catalog.heads if head.properties is None}
    explained = []
    for issue in issues:
        if issue.kind == "missing" and issue.fqn in found:
            issue = attrs.evolve(issue, summary=summary, remedy=remedy)
        elif issue.kind == "missing" and issue.fqn in hints:
            issue = _with_hint(issue, hints[issue.fqn], issue.fqn in values)
        explained.append(issue)
    return explained


def _with_hint(issue: Issue, near: Sequence[str], is_value: bool) -> Issue:
    """Say which names resemble a missing one, or lie below it."""
    below = [name for name in near if is_value and name.startswith(f"{issue.fqn}.")]
    if not below:
        return attrs.evolve(issue, message=f"{issue.message}{nearest_hint(near)}")
    text = (
        f"`{issue.fqn}` is empty or a single value here, and the checkpoint has more below "
        f"({below[0]}, …); nest it alike. If it is an optimizer's, that has no state before its "
        "first step: use torch's get_state_dict, or take a step, then load"
    )
    return attrs.evolve(issue, message=text, remedy="")


def _prefix_text(ways: Sequence[Renames]) -> str:
    names = ways[0].names
    first = next(iter(names))
    places = " or ".join(f"`{way.names[first]}`" for way in ways if first in way.names)
    if len(names) == 1:
        return f"`{first}` is not in the checkpoint, which has {places}"
    prefix = "another prefix" if len(ways) == 1 else "several prefixes"
    return (
        f"{len(names):,} names are not in the checkpoint, which has them under {prefix}: "
        f"`{first}` as {places}, and so on"
    )


def _prefix_remedy(ways: Sequence[Renames], renamed: bool) -> str:
    way, *others = ways
    if others:
        return "only you can know which are meant: rename to these in the planner"
    use = f"add {way} to the planner" if renamed else f"pass planner={way}"
    leave = "strict=False leaves them as they are"
    return use if way.sure else f"{use}, if these are the same tensors; {leave}"


def _losses(
    name: str, saved: TensorMetadata | BytesMetadata, properties: TensorProperties | None
) -> Iterator[Issue]:
    """Say so where a cast that was asked for cannot keep every value."""
    if isinstance(saved, BytesMetadata) or properties is None:
        return
    was, now = saved.properties.dtype, properties.dtype
    if not is_exact_cast(was, now):
        text = f"`{name}` is cast from {was} to {now}, which cannot hold every value"
        yield Issue("lossy", name, text)


def _shared(saved: TensorMetadata | BytesMetadata, size: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that a saved tensor has in common with one of shape ``size``."""
    if isinstance(saved, BytesMetadata) or len(saved.size) != len(size):
        return None
    return tuple(map(min, saved.size, size))


def _misfit(
    name: str,
    saved: TensorMetadata | BytesMetadata,
    properties: TensorProperties | None,
    size: tuple[int, ...],
    dtype: str,
) -> Issue | None:
    """Say in which way a saved tensor is not the wanted one."""
    if isinstance(saved, BytesMetadata) or properties is None:
        if isinstance(saved, BytesMetadata) and properties is None:
            return None
        kinds = ("a tensor", "a non-tensor value")
        was, wanted = kinds if properties is None else kinds[::-1]
        return Issue("type", name, f"`{name}` was saved as {was} and is wanted as {wanted}")
    if len(saved.size) != len(size):
        text = f"`{name}` was saved with shape {list(saved.size)} and is wanted with {list(size)}"
        return Issue("shape", name, f"{text}, which has another number of axes")
    if saved.properties.dtype != properties.dtype and dtype == "same":
        text = f"`{name}` was saved as {saved.properties.dtype} and is wanted as {properties.dtype}"
        return Issue("dtype", name, f'{text}; pass dtype="cast", or a cast(...) pass, to convert')
    if saved.size != size:
        text = f"`{name}` was saved with shape {list(saved.size)} and is wanted with {list(size)}"
        return Issue("shape", name, text, remedy='shape="overlap" fills what both have')
    return None


def whole_names(
    flat: Mapping[str, object], paths: Mapping[str, Path], metadata: Metadata
) -> frozenset[str]:
    """Name what is one value in a checkpoint, though a state dict opens it, or has a tensor there.

    torch before 2.4 kept dicts without tensors so, and planners that do not flatten still do. All
    versions keep tuples, with or without tensors, and numpy arrays. A dict that holds a tensor
    here, and a container of a name that the checkpoint has, are not among them.

    Args:
        flat: What `flatten` returned.
        paths: The way to each leaf.
        metadata: The checkpoint.

    >>> from shardplan.planning import BytesMetadata, flatten
    >>> whole_names(*flatten({"a": {"b": 1}, "c": 2}), Metadata({"a": BytesMetadata()}))
    frozenset({'a'})
    """
    entries = metadata.state_dict_metadata
    known, layout = entries.row_of, entries.layout
    lost = [name for name in flat if name not in known]
    values = {holder for name in lost for holder in _holders(paths[name]) if holder in known}
    opened: set[str] = set()
    if values:
        others = flat.keys() - set(lost)
        opened = {holder for name in others for holder in _holders(paths[name])}
        tensors = [paths[name] for name in lost if is_tensor(flat[name])]
        opened |= {holder for path in tensors for holder in _holders(path, "dict")}
    arrays = {n for n, leaf in flat.items() if isinstance(leaf, np.ndarray) and n in known}
    return frozenset(n for n in (values - opened) | arrays if layout[known[n]] < 0)


def _holders(path: Path, kind: str = "") -> list[str]:
    """Return the names of the containers that a leaf lies in, or of those of one kind."""
    keys = [str(key) for _, key in path]
    depths = [depth for depth in range(1, len(keys)) if path[depth][0] == (kind or path[depth][0])]
    return [".".join(keys[:depth]) for depth in depths]
