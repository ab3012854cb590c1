"""Writing a `torch.save` file: one archive, streamed, put in place when it is complete.

Values are pickled as torch does it, and only if they can be loaded again without running code.
"""

from __future__ import annotations

import io
import math
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final

import attrs
import torch
from torch import _weights_only_unpickler

from shardplan.planning import RefusedError, SavePlan, flatten, listed, unflatten
from shardplan.planning.storage import split_tensors

from ...errors import ExistsError, ValueRefusedError
from ...execute.commit import tidy
from ...execute.copying import FileContents, threads_for, write_file
from ...execute.pieces import Origin, Piece, blocks_of, collect, joined_pieces, tied_pieces
from ...stores.base import Store
from ..base import CommitJob, Part, WriteJob, Writer, check_size
from ..registry import known_formats
from .archive import in_memory, lay_out, read_archive, zip_bytes
from .names import explain_name, fault_of, load_archive, load_nested
from .standins import row_major

_TAKEN: Final = (".safetensors", ".safetensors.index.json", ".distcp")  # endings of others' files
_SCALARS: Final = (bool, float, type(None))
_SMALL_INT: Final = 1 << 31
_NAMESPACES: Final = (Namespace, SimpleNamespace)


class TorchWriter(Writer):
    """Writes files that `torch.load` reads with ``weights_only=True``, from a single process.

    The file appears when it is complete. ``tied`` are names that share another's elements, and
    those others.
    """

    max_ranks = 1

    def __init__(self, file: str, tied: Mapping[str, str] | None = None) -> None:
        self.file: str = file
        self.tied: Mapping[str, str] = tied or {}

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

    def carrying(self, tied: Mapping[str, str], remarks: Mapping[str, str]) -> TorchWriter:
        """Return a writer that stores tied names once; see `Writer.carrying`."""
        return TorchWriter(self.file, tied)

    def write_order(self, plan: SavePlan, rank: int) -> Iterable[int]:
        """Return the items in order, without names that are tied; see `Writer.write_order`."""
        names, rows = plan.items.catalog.names, plan.items.row.tolist()
        return [item for item, row in enumerate(rows) if names[row] not in self.tied]

    def write(self, job: WriteJob) -> Part:
        """Write the file; see `Writer.write`. It is in place at once, being the only part."""
        if job.rank:
            raise ValueError(
                "a torch checkpoint is one file, which one process writes; save in another format "
                "and `convert` that to a file"
            )
        plan, (flat, _) = job.plan, flatten(job.sd)
        pieces, values, refused = collect(flat, plan, progress=job.progress)
        cut = sorted({*split_tensors(plan)})
        if cut:
            raise RefusedError(
                f"a torch checkpoint holds tensors whole, and {listed(cut)} would be split; leave "
                "out the pass that splits, or save in another format and `convert` that to a file"
            )
        tensors = joined_pieces(pieces)
        ties = tied_pieces(tensors) | {n: k for n, k in self.tied.items() if k in tensors}
        stored = {name: piece for name, piece in tensors.items() if name not in ties}
        number = {name: at for at, name in enumerate(stored)}
        number |= {name: number[kept] for name, kept in ties.items()}
        leaves = _leaves(flat, plan, tensors, number)
        values = {n: _plain(v) if type(v) in _NAMESPACES else v for n, v in values.items()}
        pickle, hidden = _pickle(flat, plan, leaves, values, refused)
        held = [*stored.values(), *map(_storage_piece, hidden)]
        layout = lay_out(pickle, [piece.nbytes for piece in held])
        contents = FileContents(
            lambda local: layout.contents(blocks_of(held, local)), threads_for(job.pool, 1)
        )
        check_size(self.file, len(pickle), "pickle")
        check_size(self.file, layout.directory_size, "directory")
        write_file(job.store, self.file, contents, nbytes=layout.size, atomic=True)
        return Part(1, layout.size, b"")

    def commit(self, job: CommitJob) -> tuple[str, ...]:
        """Tidy up: the file is in place; see `Writer.commit`."""
        tidy(job.store, file=self.file)
        return ()


def _leaves(
    flat: Mapping[str, Any], plan: SavePlan, tensors: Mapping[str, Piece], number: Mapping[str, int]
) -> dict[str, Leaf]:
    """Say how each tensor is pickled, given the number of its storage."""
    leaves = {}
    for name, source, _, properties, _ in plan.items.catalog.heads:
        if name in tensors and properties is not None:
            piece, is_parameter = tensors[name], isinstance(flat.get(source), torch.nn.Parameter)
            grad = properties.requires_grad
            leaves[name] = Leaf(str(number[name]), piece.dtype, piece.shape, grad, is_parameter)
    return leaves


def _pickle(
    flat: Mapping[str, Any],
    plan: SavePlan,
    leaves: Mapping[str, Leaf],
    values: Mapping[str, Any],
    refused: Mapping[str, str],
) -> tuple[bytes, list[torch.UntypedStorage]]:
    """Return the pickle of the nested state dict, safe to load, and storages hidden in values."""
    data = plan.planner_data
    paths = data.get("paths", {}) if isinstance(data, Mapping) else {}
    place = {name: at for at, name in enumerate(flat)}
    order = {head[0]: place.get(head[1], len(place)) for head in plan.items.catalog.heads}
    held = {**leaves, **values}
    nested = unflatten({name: held[name] for name in sorted(held, key=order.__getitem__)}, paths)
    # Tensors that are alike are pickled alike: one of each kind is looked at.
    kinds = {(leaf.dtype, leaf.parameter, leaf.requires_grad): leaf for leaf in leaves.values()}
    keys = [key for path in paths.values() for _, key in path if type(key) not in (str, int)]
    count = len({leaf.key for leaf in leaves.values()})
    reasons, why = dict(refused), _why_unsafe([*kinds.values(), *values.values(), keys], count)
    if why is not None:
        whys = {key: (value, _why_unsafe(value)) for key, value in values.items()}
        unsafe = {key: _explain_value(value, why) for key, (value, why) in whys.items() if why}
        reasons |= unsafe or {"keys": f"of the state dict: it {why}"}
    if reasons:
        raise ValueRefusedError(reasons)
    return pickle_nested(nested, count)


def _storage_piece(storage: Any) -> Piece:
    data = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
    size = (data.numel(),)
    return Piece("", "uint8", (0,), size, size, (Origin.whole(data),))


# Values


def dump_values(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Encode every value as `torch.save` does."""
    dumped: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for key, value in values.items():
        try:
            dumped[key] = dump_value(value)
        except Exception as error:  # a class may fail to pickle in any way
            refused[key] = _explain_value(value, fault_of(error))
    if refused:
        raise ValueRefusedError(refused)
    return dumped


def _plain(value: Any) -> Any:
    """Return what is in a namespace without namespaces and enums, which torch does not load."""
    if type(value) in _NAMESPACES:
        return {name: _plain(part) for name, part in vars(value).items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.value if isinstance(value, Enum) else value


def _explain_value(value: Any, why: str) -> str:
    return f"is a {type(value).__module__}.{type(value).__qualname__}, which {why}"


def dump_value(value: Any) -> bytes:
    """Return what `torch.save` makes of a value, having checked that we read it back."""
    if type(value) in _SCALARS or (type(value) is int and abs(value) < _SMALL_INT):
        return zip_bytes(pickle.dumps(value, protocol=2))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getvalue()
    load_archive(read_archive(in_memory(data, "")))
    return data


def _why_unsafe(value: Any, first: int = 0) -> str | None:
    """Return why torch would not load a value with ``weights_only=True``; None if it would."""
    try:
        names = load_nested(pickle_nested(value, first)[0]).names
    except Exception as error:  # pickling may fail in any way that a class thinks of
        return fault_of(error)
    allowed: Any = _weights_only_unpickler
    known = {**allowed._get_allowed_globals(), **allowed._get_user_allowed_globals()}
    return next((explain_name(name) for name in names if name not in known), None)


# Pickles


@attrs.frozen
class Leaf:
    """A row-major tensor's place in a nested state dict that is to be pickled."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False


@attrs.frozen
class _Storage:
    kind: Any  # its type in torch
    key: str
    numel: int


_SIMPLE: Final = frozenset((str, int, tuple, bool, dict, list, OrderedDict))


class _Pickler(pickle.Pickler):
    """Writes leaves the way torch writes tensors, so that `torch.load` makes tensors of them."""

    def __init__(self, file: io.BytesIO, first: int) -> None:
        super().__init__(file, protocol=2)
        self._first, self._keys = first, dict[int, str]()
        self.storages: list[torch.UntypedStorage] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _SIMPLE:
            return None
        if type(obj) is _Storage:
            return "storage", obj.kind, obj.key, "cpu", obj.numel
        if isinstance(obj, torch.UntypedStorage):
            kind, numel, bare = torch.UntypedStorage, obj.nbytes(), obj
        elif isinstance(obj, torch.storage.TypedStorage):  # its public methods warn: deprecated
            typed: Any = obj
            kind, bare = getattr(torch, typed._pickle_storage_type()), typed._untyped_storage
            numel = typed._size()
        else:
            return None
        if bare._cdata not in self._keys:
            self._keys[bare._cdata] = str(self._first + len(self.storages))
            self.storages.append(bare)
        return "storage", kind, self._keys[bare._cdata], "cpu", numel

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Leaf:
            return _rebuild(obj)
        if type(obj) is OrderedDict and not obj:
            return OrderedDict, ()  # faster than Python's own way, once for every tensor
        return NotImplemented


def _rebuild(leaf: Leaf) -> tuple[Any, ...]:
    """Return the function of torch that makes a tensor, and its arguments."""
    hooks: OrderedDict[Any, Any] = OrderedDict()
    if leaf.parameter:
        data = attrs.evolve(leaf, parameter=False, requires_grad=False)
        return torch._utils._rebuild_parameter, (data, leaf.requires_grad, hooks)
    dtype, numel = getattr(torch, leaf.dtype), math.prod(leaf.shape)
    kind = _storage_types().get(dtype)
    place = 0, leaf.shape, row_major(leaf.shape), leaf.requires_grad, hooks
    if kind is None:
        storage = _Storage(torch.UntypedStorage, leaf.key, numel * dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, *place, dtype)
    storage = _Storage(getattr(torch, kind), leaf.key, numel)
    return torch._utils._rebuild_tensor_v2, (storage, *place)


@lru_cache(maxsize=1)
def _storage_types() -> Mapping[Any, str]:
    """Return the dtypes that have a storage class of their own, and its name."""
    kinds = torch.storage._dtype_to_storage_type_map()
    new = torch.storage._new_dtypes()
    return {dtype: kind for dtype, kind in kinds.items() if dtype not in new}


def pickle_nested(nested: Any, first: int = 0) -> tuple[bytes, list[torch.UntypedStorage]]:
    """Return a pickle, and the storages of tensors inside values, numbered from ``first`` on."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, first)
    pickler.dump(nested)
    return buffer.getvalue(), pickler.storages


@lru_cache(maxsize=4096)
def pickle_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of one tensor, whose storage is ``data/0``."""
    return pickle_nested(Leaf("0", dtype, shape))[0]
