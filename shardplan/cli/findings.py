"""What did `verify` and `diff` find? Their answers, as screens and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import attrs
from rich.text import Text

from shardplan.planning import counted, human_bytes, human_seconds, listed

from .screen import fits, plain, print_json, safe, shape_text, show, table, unbroken

if TYPE_CHECKING:
    from shardplan._diff import Change, CheckpointDiff
    from shardplan._verify import VerifyReport
    from shardplan.io.formats import Fault

__all__ = ["print_diff", "print_verified", "show_diff", "show_verified"]

_SHOWN: Final = 50  # faults or changes that are listed
_WIDE: Final = 40  # characters of a value that are shown


def print_verified(report: VerifyReport) -> None:
    """Answer `verify` in JSON."""
    print_json(
        {
            "path": report.path,
            "format": report.format,
            "ok": report.ok,
            "verdict": report.verdict,
            "faults": [attrs.asdict(fault) for fault in report.faults],
            "keys": list(report.keys),
            "leftovers": list(report.leftovers),
            "files": report.files,
            "chunks": report.chunks,
            "bytes": report.nbytes,
            "unchecked": report.unchecked,
            "seconds": report.seconds,
            "notes": list(report.notes),
        }
    )


def show_verified(report: VerifyReport) -> None:
    """Answer `verify` on a terminal."""
    style = "bold red" if report.faults else "bold yellow" if report.unchecked else "bold green"
    speed = f"{human_bytes(report.nbytes / report.seconds)}/s" if report.seconds else ""
    checked = f"{counted(report.files, 'file')}, {counted(report.chunks, 'sound chunk')}"
    parts: list[Any] = [
        unbroken((report.verdict, style), f"  {safe(report.path)}"),
        Text(
            f"{checked}, {human_bytes(report.nbytes)} checked in "
            f"{human_seconds(report.seconds)} ({speed})"
        ),
    ]
    if report.faults:
        rows = [(fault.kind, _fault(fault)) for fault in report.faults[:_SHOWN]]
        parts += ["", table(("fault", "where"), rows, keep=("fault",))]
        parts += [_more(len(report.faults))] if len(report.faults) > _SHOWN else []
    if report.keys:
        count = counted(len(report.keys), "name")
        parts += [
            "",
            Text.assemble(
                f"{count} cannot be loaded whole: ", (safe(listed(report.keys, quote="")), "bold")
            ),
        ]
    if report.leftovers:
        left = counted(len(report.leftovers), "file")
        parts.append(Text(f"{left} of a killed save, or of one under way; `prune` removes them"))
    parts += [Text(note) for note in report.notes]
    show(*parts)


def _fault(fault: Fault) -> Text:
    """Say in two lines what is wrong, and where: names of files are long."""
    what = f"{safe(fault.key)}: {fault.reason}" if fault.key else fault.reason
    span = f", bytes {fault.begin:,} to {fault.end:,}" if fault.end else ""
    return Text.assemble(safe(what), (f"\n{safe(fault.file)}{span}", "dim"))


def _more(count: int) -> Text:
    return Text(f"… {count - _SHOWN:,} more; see --json", style="dim")


def print_diff(found: CheckpointDiff) -> None:
    """Answer `diff` in JSON."""
    print_json(
        {
            "a": found.a,
            "b": found.b,
            "equal": not found,
            "keys": found.keys,
            "changes": [
                {
                    "key": change.key,
                    "what": change.what,
                    "before": plain(change.before),
                    "after": plain(change.after),
                    "elements": change.elements,
                    "first": None if change.first is None else list(change.first),
                    "chunks": change.chunks,
                }
                for change in found.changes
            ],
            "by_checksum": found.by_checksum,
            "bytes_read": found.bytes_read,
            "seconds": found.seconds,
        }
    )


def show_diff(found: CheckpointDiff) -> None:
    """Answer `diff` on a terminal."""
    from shardplan._diff import taken_on_trust

    cost = f"{human_bytes(found.bytes_read)} read in {human_seconds(found.seconds)}"
    how = taken_on_trust(found)
    look = "; --read reads them" if found.by_checksum else ""
    told = [Text(f"{how}{look}", style="dim")] if how else []
    if not found:
        same = f"  {counted(found.keys, 'name')}; {cost}"
        show(Text.assemble(("no difference", "bold green"), same), *told)
        return
    changed = len({change.key for change in found.changed})
    parts: list[Any] = [
        Text.assemble(
            (f"{len(found.added):,} added", "green" if found.added else "dim"),
            ", ",
            (f"{len(found.removed):,} removed", "red" if found.removed else "dim"),
            ", ",
            (f"{changed:,} changed", "yellow" if changed else "dim"),
            f", {found.keys - changed:,} equal; {cost}",
        ),
        *told,
        unbroken((f"before: {safe(found.a)}\nafter:  {safe(found.b)}", "dim")),
        "",
    ]
    changes = found.changes[:_SHOWN]
    head = ("", "key", "what", "before", "after", "where")
    made = table(head, map(_change, changes), keep=("", "what"))
    parts.append(made if fits(made) else table(("", "key"), map(_stacked, changes), keep=("",)))
    parts += [_more(len(found.changes))] if len(found.changes) > _SHOWN else []
    show(*parts)


def _stacked(change: Change) -> Iterator[object]:
    """Say the same in two lines, for a narrow terminal."""
    sign, key, what, before, after, where = _change(change)
    yield sign
    sides = " → ".join(str(side) for side in (before, after) if side)
    told = ", ".join(str(part) for part in (sides, where) if part)
    yield Text.assemble(safe(key), (f"\n{what}: {safe(told)}", "dim"))


def _change(change: Change) -> Iterator[object]:
    sign, style = {"added": ("+", "green"), "removed": ("-", "red")}.get(
        change.what, ("~", "yellow")
    )
    yield Text(sign, style=style)
    yield change.key
    yield change.what
    for side in (change.before, change.after):
        yield _side(side, change)
    yield _where(change)


def _side(side: Any, change: Change) -> str:
    if side is None and (change.chunks or change.what in ("added", "removed")):
        return ""
    if change.what == "shape":
        return shape_text(side)
    if change.what != "values":
        return str(side)
    text = repr(side)
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}…"


def _where(change: Change) -> str:
    if not change.chunks:
        return ""
    if change.elements is None or change.first is None:
        return f"{counted(change.chunks, 'chunk')}, by checksum"
    many = f"{change.elements:,} elements, first" if change.elements > 1 else "1 element"
    return f"{many} at {list(change.first)}"
