"""The commands that run one function and print what it returns: all but inspect and plan."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Container, Sequence
from contextlib import redirect_stdout
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Argument, Option

from shardplan.planning import counted, human_bytes, shape_text
from shardplan.planning.geometry import Axis, selection_of

from .passes import Cast, Drop, PlannerName, Rename, Select, parse_passes
from .screen import (
    FOUND,
    Ckpt,
    Json,
    Placements,
    checkpoint,
    counting,
    parse_bytes,
    print_json,
    record_json,
    safe,
    show,
    waiting,
    width,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from shardplan._checkpoint import SavedTensor

_INDEXED: Final = re.compile(r"(.+)\[([^\[\]]*)\]", re.DOTALL)
_EDGE: Final = 3  # elements shown at each end of a long axis
_WHOLE: Final = 1000  # the most elements shown in full
_KEY: Final = "A name, with an index or without."


def verify(ckpt: Ckpt, json: Json = False) -> None:
    """Check every byte of a checkpoint, and report all damage.

    The check does not stop at the first fault. Exits with 1 if there is any. Files of other tools
    may have no checksums; then only their headers are checked, and the verdict says so.

    JSON keys: path, format, ok, verdict, faults (kind, file, key or null, begin, end, reason), keys
    (names that cannot be loaded whole), leftovers (files of killed saves), files, chunks, bytes
    (that were checked), unchecked (bytes that have no checksums), seconds, notes.

    Example: shardplan verify s3://bucket/step-100 && echo fine
    """
    from shardplan._verify import verify as check

    with counting("verify") as progress:
        report = check(ckpt, progress=progress)
    if json:
        print_json(record_json(report) | {"ok": report.ok, "verdict": report.verdict})
    else:
        _show(str(report), "red" if report.faults else "yellow" if report.unchecked else "green")
    if not report.ok:
        raise typer.Exit(FOUND)


def diff(
    a: Annotated[str, checkpoint("A", "The first.")],
    b: Annotated[str, checkpoint("B", "The second.")],
    values: Annotated[
        bool, Option("--values/--no-values", help="Compare values, or names and shapes only.")
    ] = True,
    locate: Annotated[
        bool, Option("--locate", help="Read tensors that differ, to find where.")
    ] = False,
    read: Annotated[
        bool, Option("--read", help="Read everything from both; trust no checksum.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare two checkpoints by name: shapes, dtypes and values, however each was sharded.

    Where both have the same chunks, the checksums recorded at save time are compared and no bytes
    are read; the answer says so. Other tensors are read, a few megabytes at a time. --read reads
    everything. Exits with 1 if anything differs.

    JSON keys: a, b, equal, keys (that both have), changes (key, what: added, removed, type, shape,
    dtype or values, before, after, elements, first, chunks), by_checksum (how many keys were
    compared by recorded checksums, at least in part), bytes_read, seconds, values (whether values
    were compared).

    Example: shardplan diff step-100 step-200 --locate
    """
    from shardplan._diff import diff as compare

    with counting("diff") as progress:
        report = compare(a, b, values=values, locate=locate, read=read, progress=progress)
    if json:
        print_json(record_json(report) | {"equal": not report})
    else:
        _show(str(report), "yellow" if report else "green")
        if report.by_checksum:
            show("pass --read to read them", dim=True)
    if report:
        raise typer.Exit(FOUND)


def _show(report: str, color: str) -> None:
    """Print a report, with its first line in color."""
    title, *rest = report.split("\n", 1)
    show(title, bold=True, fg=color)
    for text in rest:
        show(text)


class Format(StrEnum):
    """A format that can be written."""

    safetensors = "safetensors"
    dcp = "dcp"
    hf = "hf"
    torch = "torch"


def convert(
    source: Annotated[str, checkpoint("SRC", "A checkpoint of any format.")],
    destination: Annotated[str, Argument(metavar="DST", help="Where to write.")],
    placements: Placements,
    format: Annotated[Format, Option("--format", help="What to write.")],
    selects: Select,
    drops: Drop,
    renames: Rename,
    casts: Cast,
    planner: PlannerName = None,
    mesh: Annotated[
        str | None, Option(metavar="AXIS=N,…", help="Shard for these ranks: dp=8,tp=2.")
    ] = None,
    max_memory: Annotated[
        str | None, Option(metavar="SIZE", help="The most bytes to hold: 1GiB, 500MB.")
    ] = None,
    max_shard_size: Annotated[
        str | None, Option(metavar="SIZE", help="The most bytes of a file: 5GB.")
    ] = None,
    config_from: Annotated[
        str | None,
        Option(metavar="DIR", help="For hf: copy the config and tokenizer of this model."),
    ] = None,
    dequantize: Annotated[
        bool, Option("--dequantize", help="Read quantised tensors as bfloat16.")
    ] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace what is there.")] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint in another format, or shard it in another way, within a memory budget.

    With --mesh, the new checkpoint is sharded as those ranks would save it; --placements are those
    of `shardplan plan`. Without it, tensors keep their chunks, or become whole where the format
    requires that. The new checkpoint appears whole or not at all. From hf to hf, the config, the
    tokenizer and their like are carried over.

    --select, --drop, --rename and --cast run in this order, then --planner: a planner, or a
    function without arguments that returns one, in a module that Python finds in the working
    directory or on PYTHONPATH. They may be given several times, except for --planner.

    JSON keys: path, format, tensors, values, files, bytes_read, bytes_written, verified (chunks
    that fit their checksums), seconds (by phase), left_out (values that the format cannot carry),
    tied (names that share elements), notes, leftovers, dropped (names that passes left out),
    carried (files that were put beside the tensors).

    Example: shardplan convert step-100 exported --format hf --select 'model.*' --cast bfloat16
    """
    passes = parse_passes(selects, drops, renames, casts, planner)
    sizes = {"max_memory": max_memory, "max_shard_size": max_shard_size}
    options: dict[str, Any] = {k: parse_bytes(size) for k, size in sizes.items() if size}
    if placements and mesh is None:
        raise ValueError("--placements needs --mesh: say which ranks there are")
    if mesh is not None:
        from .contents import open_contents
        from .plan import fitting, parse_mesh, parse_placements, place

        ranks = parse_mesh(mesh)
        placed = place(open_contents(source).entries, parse_placements(placements, ranks))
        options |= {"mesh": ranks, "placements": lambda name, shape: fitting(placed[name], shape)}
    from shardplan._convert import convert as run
    from shardplan.dist import solo

    if dequantize:
        from shardplan.planning.passes import dequantize as reading

        passes = (reading(), *passes)
    if config_from is not None:
        options["extra_files"] = config_from
    options |= {"format": format.value, "overwrite": overwrite, "planner": passes or None}
    with counting("convert") as progress:  # one process, even inside a job
        report = run(source, destination, progress=progress, comm=solo(), **options)
    if json:
        answer = record_json(report)
        del answer["trace"]  # `shardplan plan` shows what passes do
        print_json(answer)
    else:
        print(report)


def prune(
    folder: Annotated[
        str, Argument(metavar="DIR", help="A folder that holds checkpoints, one each.")
    ],
    keep_last: Annotated[int, Option(min=1, metavar="N", help="How many stay.")],
    min_age: Annotated[
        float,
        Option(
            min=0,
            metavar="SECONDS",
            help="How long ago the last file of a killed save was written, at least.",
        ),
    ] = 3600,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    verify: Annotated[
        bool,
        Option(
            "--verify/--no-verify",
            help="Check every byte of those that stay, or only that their files are there.",
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Remove all but the newest checkpoints of a folder, and what killed saves left behind.

    Only whole checkpoints count: a damaged one is never removed, and never kept in the place of an
    intact one. So before any is removed, every byte of those that stay is checked; with
    --no-verify, only the presence and sizes of their files. Checkpoints of other formats are left
    alone. Files of a save in progress look just like those of a killed one: young ones are spared.

    JSON keys: path, dry_run, removed, kept, damaged, replaced (by another save meanwhile, so they
    stay), ignored (of other formats), denied (folders that may not be read), checked ("bytes" or
    "sizes": how those that are kept were), leftovers (files of killed saves that were removed),
    spared (such files that are too young), files and bytes (how much was removed).

    Example: shardplan prune runs/llama --keep-last 3 --dry-run
    """
    from shardplan._retention import prune as remove

    options: dict[str, Any] = {"keep_last": keep_last, "min_age": min_age, "dry_run": dry_run}
    with counting("check what stays") as progress:
        report = remove(folder, verify=verify, progress=progress, **options)
    listed = (report.removed, report.kept, report.damaged, report.leftovers, report.spared)
    if not any((*listed, report.replaced, report.ignored)):
        raise LookupError(f"there is no checkpoint below {folder}")
    if json:
        print_json({"path": folder} | record_json(report))
        return
    show(str(report))
    size = f"{counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    show(f"{size} {'would be removed' if report.dry_run else 'removed'}")
    how = {"bytes": "every byte was checked", "sizes": "presence and sizes of files were checked"}
    show(f"of those that stay, {how[report.checked]}")


def demo(
    folder: Annotated[
        Path, Argument(metavar="[DIR]", help="Where checkpoints and pictures go: a new folder.")
    ] = Path("build/demo"),
    json: Json = False,
) -> None:
    """Train a small transformer on 4 local ranks, and show what can be done with its checkpoint.

    It is saved on 4 ranks (FSDP2 × TP), inspected and planned for 3, loaded on 2 and on 1 with all
    bits compared, trained on, converted to Hugging Face's format and torch.save's, verified,
    damaged and verified again, and timed beside torch DCP; then a model of 405B is planned for
    12,288 ranks. Takes about a minute, and needs torch. DIR must be new, or an earlier demo's.
    Exits with 1 if any check failed.

    JSON keys: folder, ok, failed (checks that failed), seconds (by step, torch's own too).

    Example: shardplan demo build/demo
    """
    import_module("torch")  # or say that it is missing, before any rank is started
    from shardplan.demo import Demo

    with redirect_stdout(sys.stderr if json else sys.stdout):
        run = Demo(folder)
        ok = run.run()
    if json:
        answer = {"folder": str(folder), "ok": ok, "failed": run.failed}
        print_json(answer | {"seconds": run.seconds})
    if not ok:
        raise typer.Exit(FOUND)


def cat(
    ckpt: Ckpt,
    key: Annotated[str, Argument(metavar="KEY", help=_KEY)],
    everything: Annotated[bool, Option("--all", help="Show all elements, however many.")] = False,
    precision: Annotated[int, Option(min=0, help="Digits shown.")] = 4,
    json: Json = False,
) -> None:
    """Show elements of a tensor as numpy prints them, or a non-tensor value.

    KEY may end with an index of whole numbers, slices and ..., as in 'model.w[0:2, :5]': only those
    elements are read. Of a large tensor only the corners are read and shown; --all shows all.

    JSON keys: key, index (or null), type (tensor or value), dtype, shape, values (nested lists; NaN
    and infinities as text, complex numbers as pairs). For a value: key, type, value (bytes as an
    object with the key base64).

    Example: shardplan cat step-100 'model.w[0:2, :5]'
    """
    from .contents import hint, open_contents

    contents = open_contents(ckpt)
    names = contents.entries
    name, index = parse_key(key, names)
    if name not in names:
        below = [known for known in names if known.startswith(f"{name}.")]
        if below:
            many = counted(len(below), "name")
            raise ValueError(f"`{name}` is the start of {many}, such as {below[0]}; give one")
        raise ValueError(f"`{name}` is not in {ckpt}{hint(name, list(names))}")
    is_tensor = names.layout[names.row_of[name]] >= 0
    if index is not None and not is_tensor:
        raise ValueError(f"`{name}` is not a tensor, and takes no index")
    from shardplan._checkpoint import Checkpoint
    from shardplan.io.execute import Reader

    with waiting(f"reading {key}"):
        if is_tensor:
            saved = Checkpoint(Reader(contents.source))[name]
            shape, array = _read(saved, ... if index is None else index, everything or json)
        else:
            value = Reader(contents.source).value(name)
    if not is_tensor:
        if json:
            print_json({"key": name, "type": "value", "value": value})
        else:
            print(pformat(value, width=min(width(), 120)))
        return
    dtype, where = str(saved.dtype).removeprefix("torch."), key.removeprefix(name).strip()
    if json:
        head = {"key": name, "index": where or None, "type": "tensor", "dtype": dtype}
        print_json(head | {"shape": shape, "values": array.tolist()})
        return
    show(f"{safe(name + where)}: {shape_text(shape)} {dtype}", bold=True)
    print(_text(array, precision, array.shape == shape))


def parse_key(key: str, names: Container[str]) -> tuple[str, Any]:
    """Split a key into name and index; the index is None if there is none.

    >>> parse_key("model.w[0:2, -1, ...]", {"model.w"})
    ('model.w', (slice(0, 2, None), -1, Ellipsis))
    >>> parse_key("groups[0]", {"groups[0]"})  # a name that looks like one with an index
    ('groups[0]', None)

    Raises:
        ValueError: The index is malformed.
    """
    match = None if key in names else _INDEXED.fullmatch(key)
    if match is None or not match[2].strip():
        return key, None
    return match[1].rstrip(), tuple(_part(part.strip(), key) for part in match[2].split(","))


def _part(text: str, key: str) -> Any:
    if text == "...":
        return ...
    try:
        numbers = [int(number) if number.strip() else None for number in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if 2 <= len(numbers) <= 3:
        return slice(*numbers)
    raise ValueError(f"{key!r}: {text!r} is not an index; write whole numbers, slices (0:2) or ...")


def _read(
    saved: SavedTensor, index: Any, everything: bool
) -> tuple[tuple[int, ...], npt.NDArray[Any]]:
    """Return the shape of the indexed part, and its elements, or the corners of many."""
    chosen = selection_of(index, saved.shape)
    if everything or math.prod(chosen.shape) <= _WHOLE:
        return chosen.shape, _array(saved[index])
    import numpy as np

    corners = np.block(_nested(saved, [_ends(axis) for axis in chosen.axes], ()))
    return chosen.shape, corners[tuple(0 if axis.dropped else slice(None) for axis in chosen.axes)]


def _nested(saved: SavedTensor, ends: Sequence[Sequence[slice]], at: tuple[slice, ...]) -> Any:
    """Return the corners as nested lists of arrays, one level per axis, as `numpy.block` takes."""
    if not ends:
        return _array(saved[at])
    return [_nested(saved, ends[1:], (*at, end)) for end in ends[0]]


def _ends(axis: Axis) -> list[slice]:
    """Return what to read of an axis: all of a short one; of a long one both ends and one more."""
    parts = [(0, axis.count)]
    if axis.count > 2 * _EDGE + 1:
        parts = [(0, _EDGE + 1), (axis.count - _EDGE, axis.count)]
    edges = [[axis.start + i * axis.step for i in part] for part in parts]
    return [slice(first, stop if stop >= 0 else None, axis.step) for first, stop in edges]


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor as a numpy array; small floats that numpy lacks become float32."""
    import numpy as np

    from shardplan.io import to_numpy
    from shardplan.planning import dtype_name

    known = dtype_name(tensor.dtype) in np.sctypeDict
    return to_numpy(tensor, None if known else np.float32)


def _text(array: npt.NDArray[Any], precision: int, whole: bool) -> str:
    """Write elements as numpy does; corners leave out the element between them."""
    import numpy as np

    return np.array2string(
        array,
        max_line_width=min(width(), 10_000),
        precision=precision,
        threshold=sys.maxsize if whole else 0,
        edgeitems=_EDGE,
        separator=", ",
    )
