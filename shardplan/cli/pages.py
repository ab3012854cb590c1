"""The screens of ``shardplan inspect``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Final

from rich.table import Table
from rich.text import Text

from shardplan.planning import counted, cut_text, human_bytes

from .contents import Contents, Total
from .screen import Lines, fits, room, safe, shape_text, table, unbroken
from .tree import Branch, branches

__all__ = ["chunk_lists", "head", "names", "totals"]

_LINES: Final = 200  # more are shown if asked for
_PREFIXES: Final = 12
_WIDE: Final = 41  # characters of a value that are shown
_NAME: Final = 20  # characters of a name that stay as long as another column can go
# From the widest to the narrowest: whether cells are short, the columns that go, and the characters
# to which names may be cut (None: they may not).
_WAYS: Final[tuple[tuple[bool, tuple[str, ...], int | None], ...]] = (
    (False, (), None),
    (True, (), None),
    (True, ("count",), _NAME),
    (True, ("count", "type"), _NAME),
    (True, ("count", "type", "shape"), _NAME),
    (True, ("count", "type", "shape", "cut"), _NAME),
)
_DIM: Final = "dim"
_LETTERS: Final = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}


def head(contents: Contents) -> Text:
    """Say which checkpoint this is, and how large."""
    source = contents.source
    about = [f"format {source.format}"]
    if source.created is not None:
        about.append(f"save {source.save_id}")
        if source.created:
            about.append(f"{datetime.fromtimestamp(source.created, UTC):%Y-%m-%d %H:%M} UTC")
    everything = contents.total(contents.rows)
    parts = [counted(len(contents.tensors), "tensor")]
    if contents.values:
        parts.append(counted(len(contents.values), "value"))
    parts.append(counted(sum(map(contents.count, contents.tensors)), "chunk"))
    of = "" if len(contents.rows) == len(contents.entries) else f" of {len(contents.entries):,}"
    where = f"{human_bytes(everything.nbytes)}{of and ' selected'}"
    files = counted(len(source.files), "file")
    size = f"{', '.join(parts)}: {where}" + (f"{of} names" if of else f" in {files}")
    return unbroken(
        (safe(contents.path), "bold"), "\n", (", ".join(map(safe, about)), _DIM), "\n", size
    )


def names(
    contents: Contents, depth: int | None, everything: bool
) -> Iterator[Table | Lines | Text]:
    """Draw the names as a tree."""
    entries = contents.entries
    rows = list(contents.rows)
    kinds = [(int(entries.prop[row]), int(entries.layout[row])) for row in rows]
    drawn = branches([entries.names[row] for row in rows], kinds, collapse=not everything)
    lines = [b for b in drawn if depth is None or b.depth < depth]
    shown = lines if everything else lines[:_LINES]
    yield _fitting(contents, shown, rows)
    if len(lines) > len(shown):
        left = len(lines) - len(shown)
        yield Text(f"… {left:,} more lines; give a PATTERN or --depth, or see --all", style=_DIM)


def _fitting(contents: Contents, shown: Sequence[Branch], rows: Sequence[int]) -> Table | Lines:
    """Make the table so that it fits: names come first, and values get the room that is left."""
    alone = [rows[branch.rows[0]] for branch in shown if len(branch.rows) == 1]
    told = contents.values_at_hand(row for row in alone if contents.entries.layout[row] < 0)
    values = {row: safe(repr(value)) for row, value in told.items()}
    for compact, without, name in _WAYS:
        bare = _tree(contents, shown, rows, compact, without, values, wide=0)
        if fits(bare, first=name):
            break
    if not values:
        return bare
    return _tree(contents, shown, rows, compact, without, values, wide=min(_WIDE, room(bare)))


def _tree(
    contents: Contents,
    shown: Sequence[Branch],
    rows: Sequence[int],
    compact: bool,
    without: Sequence[str],
    values: Mapping[int, str],
    wide: int,
) -> Table | Lines:
    """Make the table, or one for a narrow terminal, with short dtypes and without files.

    Args:
        contents: The checkpoint.
        shown: The lines.
        rows: The rows of the checkpoint that they count in.
        compact: Whether the terminal is narrow.
        without: Columns to leave out.
        values: What is known of values, by row.
        wide: How many characters of a value are shown.
    """
    last = ("type", "bytes", "cut") if compact else ("dtype", "bytes", "sharding")
    return table(
        ("name", "count", "shape", *last),
        (_line(contents, branch, rows, compact, values, wide) for branch in shown),
        right=("count", "bytes"),
        keep=("shape", *last),
        without=without,
    )


def _line(
    contents: Contents,
    branch: Branch,
    rows: Sequence[int],
    compact: bool,
    values: Mapping[int, str],
    wide: int,
) -> list[Text]:
    label = Text.assemble(
        (branch.guide, _DIM), safe(branch.label), no_wrap=True, overflow="ellipsis"
    )
    below = [rows[i] for i in branch.below]
    all_of_it = contents.total(below)
    leaves = [rows[i] for i in branch.rows]
    if not leaves:
        return [label, *_sum(all_of_it), Text("")]
    if contents.entries.layout[leaves[0]] < 0:
        value = Text(values.get(leaves[0], "") if wide else "", style=_DIM)
        value.truncate(wide, overflow="ellipsis")
        return [label, Text(""), Text("value"), Text(""), Text(""), value]
    own = contents.total(leaves)
    return [
        label,
        Text("" if own.tensors == 1 else f"{own.tensors:,}", style=_DIM),
        Text(_close(shape_text(contents.shape(leaves[0])), compact)),
        Text(_short(contents.dtype(leaves[0])) if compact else contents.dtype(leaves[0])),
        Text(human_bytes(own.nbytes)),
        Text(_close(_cut(contents, leaves, compact), compact)),
    ]


def _sum(total: Total) -> list[Text]:
    """Fill a branch's cells: count, shape, dtype, bytes."""
    size = human_bytes(total.nbytes) if total.tensors else ""
    count = f"{total.tensors:,}" if total.tensors else ""
    return [Text(count, style=_DIM), Text(""), Text(""), Text(size, style=_DIM)]


def _close(text: str, compact: bool) -> str:
    return text.replace(" × ", "×") if compact else text


def _short(dtype: str) -> str:
    """Abbreviate a dtype.

    >>> _short("bfloat16"), _short("uint8"), _short("bool")
    ('bf16', 'u8', 'bool')
    """
    for word, letter in _LETTERS.items():
        if dtype.startswith(word):
            return letter + dtype.removeprefix(word)
    return dtype


def _cut(contents: Contents, rows: Sequence[int], compact: bool) -> str:
    """Say in words how tensors that are alike were cut."""
    count, grid = contents.count(rows[0]), contents.grid(rows[0])
    cells = cut_text(count, grid)
    if count < 2:
        return cells
    if compact and grid is not None:
        return shape_text(grid)
    found = {contents.files(row) for row in rows}
    counts = [n for n in found if n is not None]
    if not counts:
        return cells
    few, many = min(counts), max(counts)
    return f"{cells}, {counted(many, 'file') if few == many else f'{few:,}–{many:,} files'}"


def totals(contents: Contents) -> Iterator[Table | Lines | Text | str]:
    """Add up by dtype and by the start of names."""
    if not contents.tensors:
        return
    yield _totals("dtype", contents.by_dtype)
    prefixes = contents.by_prefix
    if len(prefixes) > 1 and not all(name.rpartition(".")[2].isdecimal() for name in prefixes):
        yield ""
        yield _totals("prefix", dict(islice(prefixes.items(), _PREFIXES)))
        if len(prefixes) > _PREFIXES:
            yield Text(f"… {len(prefixes) - _PREFIXES:,} more", style=_DIM)


def _totals(what: str, totals: dict[str, Total]) -> Table | Lines:
    everything = sum(total.nbytes for total in totals.values()) or 1
    rows = [
        (name, f"{t.tensors:,}", human_bytes(t.nbytes), f"{t.nbytes / everything:.1%}")
        for name, t in totals.items()
    ]
    head = (what, "tensors", "bytes", "share")
    return table(head, rows, right=head[1:])


def chunk_lists(contents: Contents, everything: bool) -> Iterator[Table | Lines | Text]:
    """List the chunks of every tensor."""
    rows: list[tuple[object, ...]] = []
    left = 0
    for row in contents.tensors:
        if len(rows) >= _LINES and not everything:
            left += contents.count(row)
            continue
        rows += _chunks(contents, row)
    if not everything and len(rows) > _LINES:
        left += len(rows) - _LINES
        del rows[_LINES:]
    yield table(("name", "chunk", "bytes", "file"), rows, right=("bytes",), keep=("chunk",))
    if _ending(contents):
        yield Text(f"all files end with {_ending(contents)}", style=_DIM)
    if left:
        yield Text(f"… {left:,} more chunks; give a PATTERN, or see --all", style=_DIM)


def _chunks(contents: Contents, row: int) -> Iterator[tuple[object, ...]]:
    tiling = contents.entries.layouts[contents.entries.layout[row]].tiling
    width = contents.entries.props[contents.entries.prop[row]].itemsize
    files = contents.file_names(row) or [""] * len(tiling)
    ending = _ending(contents)
    name = safe(contents.entries.names[row])
    for number, (chunk, file) in enumerate(zip(tiling, files, strict=True)):
        spans = (f"{o}:{o + n}" for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        box = f"[{', '.join(spans)}]"
        yield (
            name if not number else "",
            box,
            human_bytes(chunk.numel * width),
            file.removesuffix(ending),
        )


def _ending(contents: Contents) -> str:
    """Return what the names of all files of a save end with."""
    ending = f"-{contents.source.save_id}.safetensors"
    return ending if all(file.endswith(ending) for file in contents.source.files) else ""
