"""State dicts of many ranks without a process group, and comms that count or fail."""

import math

import attrs
import torch

from shardplan.dist import Comm
from shardplan.planning import Chunk, Replicate, Shard, StridedShard
from shardplan.planning.mesh import local_chunks

WORLDS = (1, 2, 3, 4, 8)


class Shards:
    """What one rank holds of a tensor, as boxes of its own memory."""

    def __init__(self, whole, chunks, make=torch.clone):
        self.shape, self.dtype = whole.shape, whole.dtype
        self.parts = {chunk: make(box(whole, chunk)) for chunk in chunks}

    def __create_chunk_list__(self):
        return list(self.parts)

    def __get_tensor_shard__(self, index):
        return next(t for c, t in self.parts.items() if c.offsets == tuple(index.offset))


def box(tensor, chunk):
    return tensor[tuple(slice(o, e) for o, e in zip(chunk.offsets, chunk.ends, strict=True))]


def tensors(seed=0):
    """Return whole tensors of awkward shapes and several dtypes."""
    generator = torch.Generator().manual_seed(seed)

    def ints(*shape):
        return torch.randint(-1000, 1000, shape, generator=generator)

    return {
        "layers.0.w": ints(12, 8).float() / 7,
        "layers.1.w": ints(7, 5).bfloat16(),
        "few": ints(3, 3).to(torch.int32),
        "one": ints(1, 6).double(),
        "flags": ints(9) > 0,
        "scalar": ints().float(),
        "empty": torch.empty(0, 4),
        "deep": ints(4, 3, 2, 5).half(),
    }


# Layouts: which boxes of a tensor of some shape a rank holds


def _placed(shape, mesh, placements, rank):
    axes = [p for p in placements if not isinstance(p, Replicate)]
    if any(p.dim >= len(shape) for p in axes):
        placements = [Shard(0) if shape else Replicate() for _ in placements]
    at = []
    for extent in reversed(mesh):
        rank, place = divmod(rank, extent)
        at.insert(0, place)
    return local_chunks(shape, mesh, tuple(at), placements)


def _mesh(world):
    low = max(d for d in range(1, math.isqrt(world) + 1) if world % d == 0)
    return (world // low, low)


def uneven(shape, world, rank):
    """One row, then none, then the rest in parts that grow."""
    if not shape:
        return [Chunk((), ())]
    cuts = [0, *(min(shape[0], 1 + k * k // 2) for k in range(world - 1)), shape[0]]
    low, high = cuts[rank], cuts[rank + 1]
    rest = shape[1:]
    return [Chunk((low, *(0 for _ in rest)), (high - low, *rest))]


def scattered(shape, world, rank):
    """Rows dealt out one by one, each a box of its own."""
    if not shape:
        return [Chunk((), ())]
    rest = shape[1:]
    rows = range(rank, shape[0], world)
    return [Chunk((row, *(0 for _ in rest)), (1, *rest)) for row in rows]


LAYOUTS = {
    "rows": lambda shape, n, r: _placed(shape, (n,), [Shard(0)], r),
    "columns": lambda shape, n, r: _placed(shape, (n,), [Shard(1)], r),
    "grid": lambda shape, n, r: _placed(shape, _mesh(n), [Shard(0), Shard(1)], r),
    "replicated": lambda shape, n, r: _placed(shape, (n,), [Replicate()], r),
    "halves": lambda shape, n, r: _placed(shape, _mesh(n), [Shard(0), Replicate()], r),
    "uneven": uneven,
    "scattered": scattered,
    "strided": lambda shape, n, r: _placed(
        shape, _mesh(n), [StridedShard(0, _mesh(n)[1]), Shard(0)], r
    ),
}
LAYOUTS["mixed"] = lambda shape, n, r: list(LAYOUTS.values())[sum(shape) % 7](shape, n, r)


def part(whole, layout, world, rank, make=torch.clone):
    """Return a rank's part of whole tensors; values that are no tensors are on every rank."""
    place = LAYOUTS[layout]

    def held(value):
        if not isinstance(value, torch.Tensor):
            return value
        if layout == "replicated" or value.ndim == 0 or value.numel() == 0:
            return make(value)
        return Shards(value, place(tuple(value.shape), world, rank), make)

    return {name: held(value) for name, value in whole.items()}


def blank(tensor):
    """Return memory of the same kind that holds something else."""
    return torch.full_like(tensor, 77 if tensor.dtype != torch.bool else 1)


def same(state, whole):
    """Return the names of tensors that are not what they should be."""
    wrong = []
    for name, value in state.items():
        if isinstance(value, Shards):
            wrong += [
                name for c, t in value.parts.items() if not torch.equal(t, box(whole[name], c))
            ]
        elif isinstance(value, torch.Tensor):
            wrong += [] if torch.equal(value, whole[name]) else [name]
        elif value != whole[name]:
            wrong.append(name)
    return wrong


class SpyComm(Comm):
    """A comm that notes what this rank gives, and can fail.

    Attributes:
        given: Per call: the method, and how many bytes this rank gave.
        peers: The ranks that this one sent to.
        taken: How many bytes this rank was given in meetings.
        fail: Called before each call with the method's name; it may raise.
    """

    rank = ranks = coordinator = lost = None

    def __init__(self, inner, fail=lambda name: None):
        self.inner, self.fail, self.given, self.peers, self.taken = inner, fail, [], set(), 0
        self.rank, self.ranks, self.coordinator = inner.rank, inner.ranks, inner.coordinator
        self.lost = False

    def note(self, name, *data):
        self.fail(name)
        self.given.append((name, sum(map(len, data))))

    def meet(self, data, topic):
        self.note("meet", data)
        meeting = self.inner.meet(data, topic)
        self.taken += sum(map(len, meeting.gathered or [meeting.reply]))
        return attrs.evolve(meeting, comm=self)

    def answer(self, parts, topic):
        self.note("answer", *parts)
        return self.inner.answer(parts, topic)

    def send(self, place, data):
        self.note("send", data)
        self.peers.add(place)
        return self.inner.send(place, data)

    def receive(self, place, into):
        self.note("receive")
        return self.inner.receive(place, into)

    def leave(self, reason):
        self.inner.leave(reason)

    def nbytes(self, *names):
        return sum(n for name, n in self.given if not names or name in names)
