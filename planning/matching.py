"""Does what is wanted fit what was saved? Tensor by tensor: name, kind, shape, dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
import numpy as np

from .catalog import Catalog
from .dtypes import is_exact_cast
from .errors import Issue, nearest_hint, nearest_names
from .items import TensorProperties
from .metadata import BytesMetadata, Entries, TensorMetadata
from .packing import Ints

__all__ = ["Match", "match_entries"]

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


def match_entries(entries: Entries, catalog: Catalog, rows: Ints, dtype: str, shape: str) -> Match:
    """Compare what is wanted with what is there, tensor by tensor."""
    match = Match(np.full(len(catalog), -1, np.int64), [], [], {})
    layouts, props = entries.layout.tolist(), entries.prop.tolist()
    fitting: set[tuple[Any, ...]] = set()  # pairs of tensors that fit, of which most are alike
    for row in rows.tolist():
        name, _, _, properties, size = catalog.heads[row]
        at = entries.row_of.get(name, -1)
        if at < 0:
            near = nearest_names(name, entries.names) if len(match.issues) < _SUGGESTED else ()
            hint = nearest_hint(near)
            text, remedy = f"`{name}` is not in the checkpoint{hint}", _LEAVE
            below = properties is None and [n for n in near if n.startswith(f"{name}.")]
            if below:
                text = (
                    f"`{name}` is empty or a single value here, and the checkpoint has more below "
                    f"({below[0]}, …); nest it alike. If it is an optimizer's, that has no state "
                    "before its first step: use torch's get_state_dict, or take a step, then load"
                )
                remedy = ""
            match.issues.append(Issue("missing", name, text, remedy=remedy))
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
        kinds = ("a tensor", "a value that is no tensor")
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
        return Issue("shape", name, f'{text}; shape="overlap" fills what both have')
    return None
