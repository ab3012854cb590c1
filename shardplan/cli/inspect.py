"""``shardplan inspect``: show what a checkpoint holds, and how it is sharded.

Names are drawn as a tree in which equal layers are one line: ``layers.0.w`` to ``layers.79.w``
become ``layers.0–79.w`` if all below them is equal: names, shapes, dtypes and tilings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import attrs
from typer import Argument, Option

from shardplan.planning import counted, cut_text, human_bytes, runs_text

from .screen import (
    Ckpt,
    Json,
    cut,
    print_json,
    record_json,
    safe,
    show,
    table,
    width,
)

if TYPE_CHECKING:
    from .contents import Contents, Total

_LINES: Final = 200  # lines of names or chunks without --all
_WIDE: Final = 100  # characters of a value
_NAME: Final = 20  # characters that names keep, however narrow the terminal is
_DEEPEST: Final = 32  # steps of a name; deeper ones stay in one piece
_LETTERS: Final = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}
_ONLY: Final = "Only these names: a shell-style pattern, or a prefix such as model.layers."

Cells = tuple[Sequence[str], list[tuple[str, ...]]]
"""The head and the rows of a table."""


def inspect(
    ckpt: Ckpt,
    pattern: Annotated[str | None, Argument(metavar="[PATTERN]", help=_ONLY)] = None,
    chunks: Annotated[
        bool, Option("--chunks", help="List the chunks of each tensor, and their files.")
    ] = False,
    depth: Annotated[int | None, Option(min=1, help="How deep to draw the tree.")] = None,
    everything: Annotated[
        bool, Option("--all", help="Draw every layer by itself, however many lines.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint holds: names as a tree, shapes, types, bytes, chunks, values.

    Layers that are alike are shown once, as layers.0–79; "count" says how many tensors a line
    stands for, "bytes" is their size together, "cut" is the number of chunks along each axis.
    Only metadata is read, without torch.

    JSON keys: path, format, save_id, created (seconds since 1970, or null), bytes, chunks, files
    (name; bytes or null; shared: whether an earlier checkpoint has it, too), tensors (name, shape,
    dtype, bytes, chunks, grid: chunks per axis or null, files: how many, or null; with --chunks
    also chunk_list: offsets, sizes, bytes, file), values (name; value if it is small, as `cat`
    writes it), by_dtype (tensors, bytes).

    Example: shardplan inspect s3://bucket/step-100 'model.*norm*'
    """
    from .contents import open_contents

    contents = open_contents(ckpt).matching(pattern)
    if json:
        print_json(_json(contents, chunks))
        return
    show(safe(contents.path), bold=True)
    body = _chunks(contents, everything) if chunks else _names(contents, depth or 99, everything)
    for part in (*_head(contents), *_totals(contents), *body):
        show(part)


def _head(contents: Contents) -> Iterator[str]:
    """Yield the save and the size of a checkpoint."""
    source = contents.source
    about = [f"format {source.format}"]
    if source.created is not None:
        about.append(f"save {source.save_id}")
        if source.created:
            about.append(f"{datetime.fromtimestamp(source.created, UTC):%Y-%m-%d %H:%M} UTC")
    yield safe(", ".join(about))
    parts = [counted(len(contents.tensors), "tensor")]
    if contents.values:
        parts.append(counted(len(contents.values), "value"))
    parts.append(counted(contents.chunks, "chunk"))
    where = f"in {counted(len(source.files), 'file')}"
    if source.shared_files:
        where += f", {len(source.shared_files):,} of them shared with an earlier checkpoint"
    if len(contents.rows) < len(contents.entries):
        where = f"selected of {len(contents.entries):,} names"
    yield f"{', '.join(parts)}: {human_bytes(contents.total(contents.rows).nbytes)} {where}"


def _names(contents: Contents, depth: int, everything: bool) -> Iterator[str]:
    """Draw tensors and values as two trees of names."""
    entries = contents.entries
    for rows, cells in ((contents.tensors, _tensors), (contents.values, _values)):
        kinds = {row: (int(entries.prop[row]), int(entries.layout[row])) for row in rows}
        tree = branches({row: entries.names[row] for row in rows}, kinds, collapse=not everything)
        lines = [line for line in tree if line.depth < depth]
        if not lines:
            continue
        shown = lines if everything else lines[:_LINES]
        yield ""
        yield table(*cells(contents, shown))
        if left := len(lines) - len(shown):
            yield f"… {left:,} more lines; give a PATTERN or --depth, or see --all"


def _tensors(contents: Contents, lines: Sequence[Branch]) -> Cells:
    """Return the table of tensors, without the columns for which the terminal is too narrow."""
    cells = []
    for line in lines:
        total = contents.total(line.rows or line.below)
        count = "" if len(line.rows) == 1 else f"{total.tensors:,}"
        shape = dtype = pieces = ""
        if line.rows:
            row = line.rows[0]
            chunks, grid = len(contents.tiling(row)), contents.grid(row)
            parts = f"{chunks:,} boxes" if grid is None else _tight(grid)
            pieces = parts if chunks > 1 else cut_text(chunks, None)
            shape, dtype = _tight(contents.shape(row)), _short(contents.dtype(row))
        cells.append((line.label, count, shape, dtype, human_bytes(total.nbytes), pieces))
    head = ("name", "count", "shape", "type", "bytes", "cut")
    columns = zip(head, *cells, strict=True)
    _, *others = (max(map(len, column)) + 2 for column in columns if any(column[1:]))
    room = max(width() - sum(others), _NAME)
    return head, [(cut(safe(name), room), *rest) for name, *rest in cells]


def _values(contents: Contents, lines: Sequence[Branch]) -> Cells:
    """Return the table of values."""
    rows = [line.rows[0] if len(line.rows) == 1 else None for line in lines]
    small = contents.small_values(row for row in rows if row is not None)
    texts = [safe(repr(small[row])) if row in small else "" for row in rows]
    room = min(_WIDE, max(width() - max(len(line.label) for line in lines) - 2, _NAME))
    pairs = zip(lines, texts, strict=True)
    return ("name", "value"), [(line.label, cut(text, room)) for line, text in pairs]


def _tight(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _short(dtype: str) -> str:
    """Abbreviate a dtype: ``bfloat16`` to ``bf16``."""
    word = next(filter(dtype.startswith, _LETTERS), "")
    return _LETTERS.get(word, "") + dtype.removeprefix(word)


def _chunks(contents: Contents, everything: bool) -> Iterator[str]:
    """List the chunks of every tensor."""
    source = contents.source
    ending = "" if source.created is None else f"-{source.save_id}.safetensors"
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
    yield ""
    yield table(("name", "chunk", "bytes", "file"), shown)
    if ending:
        yield f"all files end with {ending}"
    if left := contents.chunks - len(shown):
        yield f"… {left:,} more chunks; give a PATTERN, or see --all"


def _chunk_list(contents: Contents, row: int) -> list[dict[str, Any]]:
    """Return the offsets, sizes, bytes and file of each chunk of a tensor."""
    tiling, names = contents.tiling(row), contents.source.files
    width = contents.entries.props[contents.entries.prop[row]].itemsize
    numbers = contents.source.file_numbers(contents.entries.names[row])
    files = [None] * len(tiling) if numbers is None else [names[number] for number in numbers]
    nbytes = tiling.sizes.prod(axis=1) * width
    columns = tiling.offsets.tolist(), tiling.sizes.tolist(), nbytes.tolist(), files
    keys = ("offsets", "sizes", "bytes", "file")
    return [dict(zip(keys, chunk, strict=True)) for chunk in zip(*columns, strict=True)]


def _by_dtype(contents: Contents) -> dict[str, Total]:
    """Return the totals of each dtype, the largest first."""
    groups: dict[str, list[int]] = {}
    for row in contents.tensors:
        groups.setdefault(contents.dtype(row), []).append(row)
    totals = {key: contents.total(rows) for key, rows in groups.items()}
    return dict(sorted(totals.items(), key=lambda pair: (-pair[1].nbytes, pair[0])))


def _totals(contents: Contents) -> Iterator[str]:
    """Yield the totals by dtype."""
    totals = _by_dtype(contents)
    everything = sum(total.nbytes for total in totals.values()) or 1
    rows = [
        (name, f"{t.tensors:,}", human_bytes(t.nbytes), f"{t.nbytes / everything:.1%}")
        for name, t in totals.items()
    ]
    if rows:
        yield ""
        yield table(("dtype", "tensors", "bytes", "share"), rows)


def _json(contents: Contents, chunks: bool) -> dict[str, Any]:
    """Return everything as plain data."""
    source, sizes, names = contents.source, contents.file_sizes(), contents.entries.names
    small = contents.small_values(contents.values)
    shared = set(source.shared_files)
    return {
        "path": contents.path,
        "format": source.format,
        "save_id": None if source.created is None else source.save_id,
        "created": source.created or None,
        "bytes": contents.total(contents.rows).nbytes,
        "chunks": contents.chunks,
        "files": [
            {"name": name, "bytes": sizes.get(name), "shared": name in shared}
            for name in source.files
        ],
        "tensors": [_tensor_json(contents, row, chunks) for row in contents.tensors],
        "values": [
            {"name": names[row]} | ({"value": small[row]} if row in small else {})
            for row in contents.values
        ],
        "by_dtype": {key: record_json(total) for key, total in _by_dtype(contents).items()},
    }


def _tensor_json(contents: Contents, row: int, chunks: bool) -> dict[str, Any]:
    name = contents.entries.names[row]
    numbers = contents.source.file_numbers(name)
    described: dict[str, Any] = {
        "name": name,
        "shape": contents.shape(row),
        "dtype": contents.dtype(row),
        "bytes": int(contents.nbytes[row]),
        "chunks": len(contents.tiling(row)),
        "grid": contents.grid(row),
        "files": None if numbers is None else len(set(numbers)),
    }
    return described | ({"chunk_list": _chunk_list(contents, row)} if chunks else {})


@attrs.frozen
class Branch:
    """One line of a tree of names."""

    depth: int  # its depth; 0 at the top
    label: str  # the lines of the tree, and its part of the name
    # The rows of the names that end here; several if equal ones share the line.
    rows: tuple[int, ...]
    below: tuple[int, ...]  # the rows of all names that end here or below


@attrs.frozen(eq=False)
class _Node:
    """One step of a name, the row of the name that ends here, and everything below.

    ``kind`` is equal for nodes with equal contents.
    """

    row: int | None
    children: dict[str, _Node]
    kind: Hashable

    def below(self) -> Iterator[int]:
        """Yield the rows of all names that end here or below."""
        if self.row is not None:
            yield self.row
        for child in self.children.values():
            yield from child.below()


def branches(
    names: Mapping[int, str], kinds: Mapping[int, Hashable], *, collapse: bool = True
) -> Iterator[Branch]:
    """Arrange names as a tree, and yield its lines from top to bottom.

    Args:
        names: The name of each row, with a dot between steps.
        kinds: Per row, a value that is equal for names to be shown as one.
        collapse: Whether to draw equal numbered branches as one.

    >>> names = ["layers.0.w", "layers.1.w", "layers.2.w", "out.b", "out.w"]
    >>> for branch in branches(dict(enumerate(names)), dict(enumerate("aaaba"))):
    ...     print(branch.label, *branch.rows)
    layers.0–2.w 0 1 2
    out
    ├ b 3
    └ w 4
    """
    paths = {row: name.split(".", _DEEPEST) for row, name in names.items()}
    yield from _below([_node(paths, 0, kinds)], collapse)


def _node(paths: Mapping[int, Sequence[str]], depth: int, kinds: Mapping[int, Hashable]) -> _Node:
    """Build the node of names that share their first ``depth`` steps."""
    groups: dict[str, dict[int, Sequence[str]]] = {}
    own = None
    for row, steps in paths.items():
        if len(steps) > depth:
            groups.setdefault(steps[depth], {})[row] = steps
        else:
            own = row
    children = {step: _node(group, depth + 1, kinds) for step, group in groups.items()}
    inner = tuple((step, child.kind) for step, child in sorted(children.items()))
    return _Node(own, children, (None if own is None else kinds[own], inner))


def _below(
    nodes: Sequence[_Node], collapse: bool, depth: int = 0, stem: str = ""
) -> Iterator[Branch]:
    """Draw everything below some equal nodes."""
    groups = list(_groups(nodes, collapse))
    for label, members in groups:
        is_last = members is groups[-1][1]
        while members[0].row is None:  # a step with one branch below shares its line
            inner = list(_groups(members, collapse))
            if len(inner) != 1:
                break
            label, members = f"{label}.{inner[0][0]}", inner[0][1]
        guide, further = ("└ ", "  ") if is_last else ("├ ", "│ ")
        rows = tuple(node.row for node in members if node.row is not None)
        below = tuple(row for node in members for row in node.below())
        yield Branch(depth, f"{stem}{guide if depth else ''}{label}", rows, below)
        yield from _below(members, collapse, depth + 1, stem + further if depth else "")


def _groups(nodes: Sequence[_Node], collapse: bool) -> Iterator[tuple[str, list[_Node]]]:
    """Group the children of equal nodes; equal numbered children go together."""
    children = nodes[0].children
    numbered = [s for s in children if s.isascii() and s.isdecimal() and str(int(s)) == s]
    groups: dict[object, list[str]] = {s: [s] for s in children if s not in numbered}
    for step in sorted(numbered, key=int):
        groups.setdefault(children[step].kind if collapse else step, []).append(step)
    for group in groups.values():
        label = runs_text([*map(int, group)], ",") if len(group) > 1 else group[0]
        yield label, [node.children[step] for node in nodes for step in group]
