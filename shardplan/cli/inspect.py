"""``shardplan inspect``: what a checkpoint holds, and how it is sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shardplan.planning import counted, cut_text, human_bytes

from .names import Branch, branches
from .options import Ckpt, Debug, Json, Verbose, complete_name
from .screen import cut, print_json, record_json, safe, show, table, width

if TYPE_CHECKING:
    from .contents import Contents, Total

__all__ = ["inspect"]

_LINES: Final = 200  # lines of names or chunks without --all
_PREFIXES: Final = 12
_WIDE: Final = 100  # characters of a value
_NAME: Final = 20  # characters that names keep as long as another column can be left out
_OPTIONAL: Final = ("count", "type", "shape", "cut")  # the order in which columns are left out
_LETTERS: Final = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}

Cells = tuple[Sequence[str], list[list[str]]]
"""The head and the rows of a table."""


def inspect(
    ckpt: Ckpt,
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATTERN]",
            help="Only these names: a shell-style pattern, or a prefix such as model.layers.",
            show_default=False,
            autocompletion=complete_name,
        ),
    ] = None,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="List the chunks of each tensor, and their files.")
    ] = False,
    depth: Annotated[
        int | None,
        typer.Option("--depth", min=1, help="How deep to draw the tree.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Draw every layer by itself, however many lines.")
    ] = False,
    json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds: names as a tree, shapes, types, bytes, chunks, values.

    Layers that are alike are shown once, as layers.0–79; "count" says how many tensors a line
    stands for, "bytes" is their size together, "cut" is the number of chunks along each axis.
    Only metadata is read, without torch.

    JSON keys: path, format, save_id, created (seconds since 1970, or null), bytes, chunks, files
    (name; bytes or null), tensors (name, shape, dtype, bytes, chunks, grid: chunks per axis or
    null, files: how many, or null; with --chunks also chunk_list: offsets, sizes, bytes, file),
    values (name; value if it is small, as `cat` writes it), by_dtype and by_prefix (tensors,
    bytes).

    Example: shardplan inspect s3://bucket/step-100 'model.*norm*'
    """
    from .contents import open_contents

    contents = open_contents(ckpt).matching(pattern)
    if json:
        print_json(_json(contents, chunks))
        return
    title, *about = _head(contents)
    show(title, bold=True)
    body = _chunks(contents, everything) if chunks else _names(contents, depth, everything)
    for part in (*about, *body, *_totals(contents)):
        show(part)


def _head(contents: Contents) -> Iterator[str]:
    """Yield the path, the save and the size of a checkpoint."""
    yield safe(contents.path)
    source = contents.source
    about = [f"format {contents.source.format}"]
    if source.created is not None:
        about.append(f"save {source.save_id}")
        if source.created:
            about.append(f"{datetime.fromtimestamp(source.created, UTC):%Y-%m-%d %H:%M} UTC")
    yield safe(", ".join(about))
    parts = [counted(len(contents.tensors), "tensor")]
    if contents.values:
        parts.append(counted(len(contents.values), "value"))
    parts.append(counted(sum(map(contents.count, contents.tensors)), "chunk"))
    size = human_bytes(contents.total(contents.rows).nbytes)
    where = f"in {counted(len(contents.source.files), 'file')}"
    if len(contents.rows) < len(contents.entries):
        where = f"selected of {len(contents.entries):,} names"
    yield f"{', '.join(parts)}: {size} {where}\n"


def _names(contents: Contents, depth: int | None, everything: bool) -> Iterator[str]:
    """Draw tensors and values as two trees of names."""
    for rows, cells in ((contents.tensors, _tensors), (contents.values, _values)):
        lines = [line for line in _tree(contents, rows, everything) if line.depth < (depth or 99)]
        if not lines:
            continue
        shown = lines if everything else lines[:_LINES]
        yield table(*cells(contents, shown), right=("count", "bytes"))
        if len(lines) > len(shown):
            left = len(lines) - len(shown)
            yield f"… {left:,} more lines; give a PATTERN or --depth, or see --all"
        yield ""


def _tree(contents: Contents, rows: Sequence[int], everything: bool) -> Iterator[Branch]:
    """Yield the lines of a tree of names, each with the rows of the entries it stands for."""
    entries = contents.entries
    kinds = [(int(entries.prop[row]), int(entries.layout[row])) for row in rows]
    for branch in branches([entries.names[row] for row in rows], kinds, collapse=not everything):
        own, below = (tuple(rows[i] for i in found) for found in (branch.rows, branch.below))
        yield Branch(branch.depth, branch.label, own, below)


def _tensors(contents: Contents, lines: Sequence[Branch]) -> Cells:
    """Return the head and the rows of the table of tensors, as wide as the terminal."""
    cells = []
    for line in lines:
        total = contents.total(line.rows or line.below)
        count = "" if len(line.rows) == 1 else f"{total.tensors:,}"
        shape = dtype = pieces = ""
        if line.rows:
            row = line.rows[0]
            chunks, grid = contents.count(row), contents.grid(row)
            parts = f"{chunks:,} boxes" if grid is None else _tight(grid)
            pieces = parts if chunks > 1 else cut_text(chunks, None)
            shape, dtype = _tight(contents.shape(row)), _short(contents.dtype(row))
        cells.append([line.label, count, shape, dtype, human_bytes(total.nbytes), pieces])
    return _fitting(("name", "count", "shape", "type", "bytes", "cut"), cells)


def _fitting(head: Sequence[str], cells: list[list[str]]) -> Cells:
    """Leave out columns and cut names until the table fits the terminal."""
    widths = {
        name: max(map(len, (name, *column))) + 2 if any(column) else 0
        for name, column in zip(head, zip(*cells, strict=True), strict=True)
    }
    names = widths.pop("name") - 2
    for name in _OPTIONAL:
        if width() - sum(widths.values()) >= min(names, _NAME):
            break
        widths.pop(name)
    room = width() - sum(widths.values())
    kept = [i for i, name in enumerate(head) if name in widths]
    rows = [[cut(safe(row[0]), room), *(row[i] for i in kept)] for row in cells]
    return ["name", *(head[i] for i in kept)], rows


def _values(contents: Contents, lines: Sequence[Branch]) -> Cells:
    """Return the head and the rows of the table of values."""
    rows = [line.rows[0] if len(line.rows) == 1 else None for line in lines]
    small = contents.small_values(row for row in rows if row is not None)
    texts = [safe(repr(small[row])) if row in small else "" for row in rows]
    room = max(width() - max(len(line.label) for line in lines) - 2, _NAME)
    cells = [
        [line.label, cut(text, min(room, _WIDE))] for line, text in zip(lines, texts, strict=True)
    ]
    return ("name", "value"), cells


def _tight(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _short(dtype: str) -> str:
    """Abbreviate a dtype.

    >>> _short("bfloat16"), _short("uint8"), _short("bool")
    ('bf16', 'u8', 'bool')
    """
    for word, letter in _LETTERS.items():
        if dtype.startswith(word):
            return letter + dtype.removeprefix(word)
    return dtype


def _chunks(contents: Contents, everything: bool) -> Iterator[str]:
    """List the chunks of every tensor."""
    ending = ""
    if contents.source.created is not None:
        ending = f"-{contents.source.save_id}.safetensors"
    rows: list[tuple[str, ...]] = []
    for row in contents.tensors:
        if len(rows) >= _LINES and not everything:
            break
        name = contents.entries.names[row]
        for chunk in _chunk_list(contents, row):
            edges = zip(chunk["offsets"], chunk["sizes"], strict=True)
            box = ", ".join(f"{at}:{at + size}" for at, size in edges)
            file = (chunk["file"] or "").removesuffix(ending)
            rows.append((name, f"[{box}]", human_bytes(chunk["bytes"]), file))
            name = ""
    shown = rows if everything else rows[:_LINES]
    yield table(("name", "chunk", "bytes", "file"), shown, right=("bytes",))
    if ending:
        yield f"all files end with {ending}"
    left = sum(map(contents.count, contents.tensors)) - len(shown)
    if left:
        yield f"… {left:,} more chunks; give a PATTERN, or see --all"
    yield ""


def _chunk_list(contents: Contents, row: int) -> list[dict[str, Any]]:
    """Return the offsets, sizes, bytes and file of each chunk of a tensor."""
    tiling = contents.entries.layouts[contents.entries.layout[row]].tiling
    width = contents.entries.props[contents.entries.prop[row]].itemsize
    numbers, names = contents.file_numbers(row), contents.source.files
    files = [None] * len(tiling) if numbers is None else [names[number] for number in numbers]
    offsets, sizes = tiling.offsets.tolist(), tiling.sizes.tolist()
    nbytes = (tiling.sizes.prod(axis=1) * width).tolist()
    return [
        {"offsets": at, "sizes": size, "bytes": count, "file": file}
        for at, size, count, file in zip(offsets, sizes, nbytes, files, strict=True)
    ]


def _by_dtype(contents: Contents) -> dict[str, Total]:
    """Return the totals of each dtype, the largest first."""
    return _grouped(contents, [contents.dtype(row) for row in contents.tensors])


def _by_prefix(contents: Contents) -> dict[str, Total]:
    """Return the totals of each start of a name, where names first differ; the largest first."""
    names = [contents.entries.names[row].split(".") for row in contents.tensors]
    shared = 0
    while names and all(len(n) > shared + 1 and n[shared] == names[0][shared] for n in names):
        shared += 1
    return _grouped(contents, [".".join(steps[: shared + 1]) for steps in names])


def _grouped(contents: Contents, keys: Sequence[str]) -> dict[str, Total]:
    groups: dict[str, list[int]] = {}
    for row, key in zip(contents.tensors, keys, strict=True):
        groups.setdefault(key, []).append(row)
    totals = {key: contents.total(rows) for key, rows in groups.items()}
    return dict(sorted(totals.items(), key=lambda pair: (-pair[1].nbytes, pair[0])))


def _totals(contents: Contents) -> Iterator[str]:
    """Add up by dtype and by the start of names."""
    if not contents.tensors:
        return
    yield _total_table("dtype", _by_dtype(contents))
    prefixes = _by_prefix(contents)
    if len(prefixes) > 1 and not all(name.rpartition(".")[2].isdecimal() for name in prefixes):
        yield "\n" + _total_table("prefix", prefixes)
        if len(prefixes) > _PREFIXES:
            yield f"… {len(prefixes) - _PREFIXES:,} more"


def _total_table(what: str, totals: Mapping[str, Total]) -> str:

    everything = sum(total.nbytes for total in totals.values()) or 1
    rows = [
        (name, f"{t.tensors:,}", human_bytes(t.nbytes), f"{t.nbytes / everything:.1%}")
        for name, t in islice(totals.items(), _PREFIXES)
    ]
    head = (what, "tensors", "bytes", "share")
    return table(head, rows, right=head[1:])


def _json(contents: Contents, chunks: bool) -> dict[str, Any]:
    """Return everything as plain data."""
    source, sizes = contents.source, contents.file_sizes()
    small = contents.small_values(contents.values)
    names = contents.entries.names
    return {
        "path": contents.path,
        "format": contents.source.format,
        "save_id": None if source.created is None else source.save_id,
        "created": source.created or None,
        "bytes": contents.total(contents.rows).nbytes,
        "chunks": sum(map(contents.count, contents.tensors)),
        "files": [{"name": name, "bytes": sizes.get(name)} for name in contents.source.files],
        "tensors": [_tensor_json(contents, row, chunks) for row in contents.tensors],
        "values": [
            {"name": names[row]} | ({"value": small[row]} if row in small else {})
            for row in contents.values
        ],
        "by_dtype": {key: record_json(total) for key, total in _by_dtype(contents).items()},
        "by_prefix": {key: record_json(total) for key, total in _by_prefix(contents).items()},
    }


def _tensor_json(contents: Contents, row: int, chunks: bool) -> dict[str, Any]:
    numbers = contents.file_numbers(row)
    described: dict[str, Any] = {
        "name": contents.entries.names[row],
        "shape": contents.shape(row),
        "dtype": contents.dtype(row),
        "bytes": int(contents.nbytes[row]),
        "chunks": contents.count(row),
        "grid": contents.grid(row),
        "files": None if numbers is None else len(set(numbers)),
    }
    return described | ({"chunk_list": _chunk_list(contents, row)} if chunks else {})
