"""Writing a `torch.save` file: one archive, streamed, put in place when it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch

from shardplan.planning import Metadata, SavePlan, flatten, unflatten

from ...errors import ExistsError, ValueRefusedError
from ...execute.commit import tidy
from ...execute.copying import FileContents, threads_for, write_file
from ...execute.pieces import Lazy, Piece, blocks_of, collect, tied_pieces
from ...limits import check_size
from ...pool import Pool, Progress, default_pool
from ...stores.base import Store
from ...tensors import box_view, empty_tensor, tensor_bytes
from ...tensors import fill_from_bytes as fill
from ..base import Part, Writer
from ..registry import known_formats
from .torch_values import Leaf, explain_refusal, explain_value, pickle_nested, why_unsafe
from .zip_write import lay_out

_TAKEN: Final = (".safetensors", ".safetensors.index.json", ".distcp")  # endings of others' files


class TorchWriter(Writer):
    """Writes files that `torch.load` reads with ``weights_only=True``.

    A file has one writer, so this format is for a single process. The file appears when it is
    complete: what was there before is there until then.

    Attributes:
        file: The file's name in the store; see `open_target`.
    """

    max_ranks = 1

    def __init__(self) -> None:
        self.file: str = ""
        self.tied: Mapping[str, str] = {}

    def refuse(self, store: Store, overwrite: bool) -> None:
        """Refuse to save where a file is; see `Writer.refuse`."""
        if not self.file:
            raise ValueError("a torch checkpoint is a file: open it with `open_target`")
        marks = {mark for format in known_formats() for mark in format.marks}
        if self.file in marks or self.file.endswith(_TAKEN):
            raise ValueError(
                f"a torch checkpoint called {self.file} would be taken for one of another format; "
                "call it model.pt, say"
            )
        if not overwrite and store.exists(self.file):
            raise ExistsError(f"{store.url} holds a file {self.file}", can_overwrite=True)

    def prepare(self, plans: Sequence[SavePlan]) -> tuple[SavePlan, ...]:
        """Return the plan as it is, if there is but one; see `Writer.prepare`."""
        if len(plans) != 1:
            raise _too_many()
        return tuple(plans)

    def carry_over(self, tied: Mapping[str, str], remarks: Mapping[str, str]) -> None:
        """Store tied names once; see `Writer.carry_over`."""
        self.tied = tied

    def write_order(self, plan: SavePlan, rank: int) -> Iterable[int]:
        """Return the items in order, without names that are tied; see `Writer.write_order`."""
        names, rows = plan.items.catalog.names, plan.items.row.tolist()
        return [item for item, row in enumerate(rows) if names[row] not in self.tied]

    def write(
        self,
        store: Store,
        sd: Mapping[Any, Any],
        plan: SavePlan,
        *,
        save_id: str,
        rank: int,
        pool: Pool | None = None,
        progress: Progress | None = None,
    ) -> Part:
        """Write the file; see `Writer.write`. It is in place at once, being the only part."""
        if rank != 0:
            raise _too_many()
        flat, _ = flatten(sd)
        pieces, values, refused = collect(flat, plan, progress=progress)
        tensors = _whole(pieces)
        ties = tied_pieces(tensors) | {n: k for n, k in self.tied.items() if k in tensors}
        stored = {name: piece for name, piece in tensors.items() if name not in ties}
        leaves = _leaves(flat, plan, tensors, ties, list(stored))
        pickle, hidden = _pickle(flat, plan, leaves, values, refused)
        held = [*stored.values(), *map(_storage_piece, hidden)]
        layout = lay_out(pickle, [piece.nbytes for piece in held])
        contents = FileContents(
            lambda local: layout.contents(blocks_of(held, local)),
            threads_for(pool or default_pool(), 1),
        )
        size = layout.size
        check_size(self.file, len(pickle), "pickle")
        check_size(self.file, layout.directory_size, "directory")
        write_file(store, self.file, contents, nbytes=size, atomic=True)
        return Part(1, size, b"")

    def commit(
        self,
        store: Store,
        metadata: Metadata,
        plans: Sequence[SavePlan],
        reports: Sequence[bytes],
        *,
        save_id: str,
        overwrite: bool,
    ) -> tuple[str, ...]:
        """See that there was one part only; see `Writer.commit`."""
        if len(reports) != 1:
            raise _too_many()
        tidy(store, file=self.file)
        return ()

    def discard(self, store: Store, report: bytes, save_id: str) -> None:
        """Leave the file as it is: it was complete when it appeared."""


def _too_many() -> ValueError:
    return ValueError(
        "a torch checkpoint is one file, which one process writes; save in another format and "
        "`convert` that to a file"
    )


def _leaves(
    flat: Mapping[str, Any],
    plan: SavePlan,
    tensors: Mapping[str, Piece],
    ties: Mapping[str, str],
    stored: Sequence[str],
) -> dict[str, Leaf]:
    """Say how each tensor is pickled; names that are tied have one storage."""
    number = {name: str(key) for key, name in enumerate(stored)}
    leaves = {}
    for name, source, _, properties, _ in plan.items.catalog.heads:
        piece = tensors.get(name)
        if piece is None or properties is None:
            continue
        leaves[name] = Leaf(
            number[ties.get(name, name)],
            piece.dtype,
            piece.shape,
            properties.requires_grad,
            isinstance(flat[source], torch.nn.Parameter),
        )
    return leaves


def _storage_piece(storage: Any) -> Piece:
    """Return a storage as a tensor of its bytes."""
    data = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
    size = (data.numel(),)
    return Piece("", "uint8", (0,), size, size, data, (0,))


def _pickle(
    flat: Mapping[str, Any],
    plan: SavePlan,
    leaves: Mapping[str, Leaf],
    values: Mapping[str, Any],
    refused: Mapping[str, str],
) -> tuple[bytes, list[torch.UntypedStorage]]:
    """Return the pickle of the nested state dict, having made sure that it is safe to load.

    Storages of tensors that hide in values come with it.
    """
    data = plan.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    place = {name: at for at, name in enumerate(flat)}
    heads = plan.items.catalog.heads
    order = {head[0]: place.get(head[1], len(place)) for head in heads}
    names = sorted([*leaves, *values], key=lambda name: order[name])
    found = {name: leaves[name] if name in leaves else values[name] for name in names}
    first = len({leaf.key for leaf in leaves.values()})
    try:
        pickled, hidden = pickle_nested(unflatten(found, paths), first)
        why = why_unsafe(pickled)
    except Exception as error:  # pickling may fail in any way that a class thinks of
        pickled, hidden, why = b"", [], explain_refusal(error)
    unsafe = {} if why is None else _unsafe(values) or {"keys": f"of the state dict: it {why}"}
    if refused or unsafe:
        raise ValueRefusedError({**refused, **unsafe})
    return pickled, hidden


def _unsafe(values: Mapping[str, Any]) -> dict[str, str]:
    """Return, by key, why torch would not load some values with ``weights_only=True``."""
    reasons = {}
    for key, value in values.items():
        try:
            why = why_unsafe(pickle_nested(value)[0])
        except Exception as error:  # pickling may fail in any way that a class thinks of
            why = explain_refusal(error)
        if why is not None:
            reasons[key] = explain_value(value, why)
    return reasons


def _whole(pieces: Mapping[int, Piece]) -> dict[str, Piece]:
    """Return one piece a tensor, putting those together that a plan cuts up."""
    parts: dict[str, list[Piece]] = {}
    for piece in pieces.values():
        parts.setdefault(piece.name, []).append(piece)
    return {name: found[0] if len(found) == 1 else _join(found) for name, found in parts.items()}


def _join(parts: list[Piece]) -> Piece:
    first = parts[0]
    origin = (0,) * len(first.size)
    joined = _Joined(first.size, first.dtype, parts)
    return attrs.evolve(first, offsets=origin, shape=first.size, source=joined, start=origin)


@attrs.frozen(eq=False)
class _Joined(Lazy):
    """A tensor whose elements lie in several pieces."""

    shape: tuple[int, ...]
    dtype: str
    parts: list[Piece]

    def read_box(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box of it, put together from the pieces that it touches."""
        box = empty_tensor(sizes, self.dtype)
        low, high = np.array(offsets), np.array(offsets) + np.array(sizes)
        for part in self.parts:
            begin = np.maximum(low, part.offsets)
            lengths = np.minimum(high, np.add(part.offsets, part.shape)) - begin
            if (lengths <= 0).any():
                continue
            inner = (begin - part.offsets + part.start).tolist()
            if isinstance(part.source, torch.Tensor):
                found = box_view(part.source, inner, lengths.tolist())
            else:
                found = part.source.read_box(inner, lengths.tolist())
            data = np.frombuffer(tensor_bytes(found, self.dtype), np.uint8)
            fill(box_view(box, (begin - low).tolist(), lengths.tolist()), data, self.dtype)
        return box
