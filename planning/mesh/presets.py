"""Presets: common ways to place parameters on a mesh.

Each preset sets the placements on one mesh axis and keeps the others, so presets nest: tensor
parallelism first, then FSDP over it, as torch applies them. A preset takes plain shapes or
`TensorSpec`s and returns `TensorSpec`s with one placement per mesh axis.

>>> mesh = Mesh(pp=2, dp=2, tp=2)
>>> params = {"layers.0.up.weight": (8, 4), "layers.1.up.weight": (8, 4)}
>>> specs = fsdp(tensor_parallel(pipeline(params, mesh), mesh, {"*.up.*": "colwise"}), mesh)
>>> specs["layers.1.up.weight"].placements
(Only(coordinates=(1,)), StridedShard(dim=0, split_factor=2), Shard(dim=0))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal

import attrs

from ..errors import NotFoundError, listed, nearest_hint, nearest_names
from ..frozen import FrozenDict
from .placements import Mesh, Only, Placement, Replicate, Shard, StridedShard, TensorSpec

Params = Mapping[str, Sequence[int]] | Mapping[str, TensorSpec]
"""Parameters by name: their shapes, or specs with dtypes and earlier placements."""

Specs = FrozenDict[str, TensorSpec]

Rule = Literal["colwise", "rowwise", "replicate"] | int
"""How tensor parallelism cuts a parameter: torch's name for it, or the axis to cut."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_STATE = "optimizer.state."
_EXPERT = re.compile(r"(.*(?:^|\.)experts)\.(\d+)\.")


def fsdp(params: Params, mesh: Mesh, *, axis: str = "dp") -> Specs:
    """Cut the rows of every parameter over one mesh axis, as FSDP2 and ZeRO-3 do.

    Where a later mesh axis cuts the rows already, FSDP cuts each of its shards: the cut is strided.
    Every rank holds a tensor without axes.

    >>> fsdp({"w": (8, 4)}, Mesh(dp=4))["w"].placements
    (Shard(dim=0),)
    """
    at = _axis(mesh, axis)

    def rows(name: str, spec: TensorSpec) -> Placement:
        if not spec.shape:
            return Replicate()
        later = zip(spec.placements[at + 1 :], mesh.shape[at + 1 :], strict=True)
        factor = math.prod(ranks for placement, ranks in later if _cuts_rows(placement, spec))
        return StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)

    return _place(params, mesh, axis, rows)


def hsdp(
    params: Params, mesh: Mesh, *, replicate: str = "dp_replicate", shard: str = "dp_shard"
) -> Specs:
    """Cut rows over one mesh axis and hold copies along another, as hybrid FSDP does.

    >>> hsdp({"w": (8, 4)}, Mesh(dp_replicate=2, dp_shard=4))["w"].placements
    (Replicate(), Shard(dim=0))
    """
    return fsdp(_place(params, mesh, replicate, lambda name, spec: Replicate()), mesh, axis=shard)


def tensor_parallel(
    params: Params, mesh: Mesh, rules: Mapping[str, Rule], *, axis: str = "tp"
) -> Specs:
    """Cut parameters within layers, as torch's ``parallelize_module`` does.

    ``rules`` are patterns of names (``*.q_proj.weight``) and how to cut what they match: the first
    that matches counts, and what none matches is held by every rank. ``"colwise"`` cuts axis 0,
    ``"rowwise"`` axis 1 and leaves biases whole, ``"replicate"`` cuts nothing; a number names the
    axis.

    >>> params = {"up.weight": (16, 8), "down.weight": (8, 16), "down.bias": (8,)}
    >>> specs = tensor_parallel(params, Mesh(tp=2), {"up.*": "colwise", "down.*": "rowwise"})
    >>> [spec.placements[0] for spec in specs.values()]
    [Shard(dim=0), Shard(dim=1), Replicate()]

    Raises:
        NotFoundError: A pattern matches no name.
        ValueError: A rule is unknown, or cuts an axis that a parameter does not have.
    """
    _match_all(rules, params)

    def cut(name: str, spec: TensorSpec) -> Placement:
        rule = next((r for pattern, r in rules.items() if fnmatchcase(name, pattern)), "replicate")
        if rule == "replicate" or (rule == "rowwise" and len(spec.shape) == 1):
            return Replicate()
        dim = {"colwise": 0, "rowwise": 1}.get(rule, -1) if isinstance(rule, str) else rule
        if not 0 <= dim < len(spec.shape):
            raise ValueError(f"rule {rule!r} does not fit `{name}` of shape {spec.shape}")
        return Shard(dim)

    return _place(params, mesh, axis, cut)


def fsdp_tp(
    params: Params, mesh: Mesh, rules: Mapping[str, Rule], *, dp: str = "dp", tp: str = "tp"
) -> Specs:
    """Cut by `tensor_parallel` rules, then cut the rows of what results: FSDP2 over TP.

    >>> mesh, rules = Mesh(dp=4, tp=2), {"up": "colwise", "down": "rowwise"}
    >>> specs = fsdp_tp({"up": (16, 8), "down": (8, 16)}, mesh, rules)
    >>> specs["up"].placements, specs["down"].placements
    ((StridedShard(dim=0, split_factor=2), Shard(dim=0)), (Shard(dim=0), Shard(dim=1)))
    """
    return fsdp(tensor_parallel(params, mesh, rules, axis=tp), mesh, axis=dp)


def pipeline(
    params: Params,
    mesh: Mesh,
    stages: Sequence[str | Iterable[str]] | None = None,
    *,
    axis: str = "pp",
) -> Specs:
    """Give each stage of a pipeline its own keys: a parameter gets `Only` its stage's coordinate.

    ``stages`` are the patterns of names that each coordinate of the axis holds; a name that several
    stages match is tied, and held by all of them. Without them, numbered layers (``layers.7.``) are
    spread evenly, in order; names before the first layer go to the first stage, names after it to
    the last. Adam's state goes with its parameter.

    >>> params = {"embed": (9, 4), "layers.0.w": (4, 4), "layers.1.w": (4, 4), "head": (9, 4)}
    >>> specs = pipeline(params, Mesh(pp=2))
    >>> {name: spec.placements[0].coordinates for name, spec in specs.items()}
    {'embed': (0,), 'layers.0.w': (0,), 'layers.1.w': (1,), 'head': (1,)}

    Raises:
        NotFoundError: A pattern matches no name, or a name belongs to no stage.
        ValueError: There are not as many stages, or too few layers, for the ranks of the mesh axis.
    """
    count = mesh.shape[_axis(mesh, axis)]
    if stages is None:
        at = _even_stages(params, count)
    else:
        patterns = [(s,) if isinstance(s, str) else tuple(s) for s in stages]
        if len(patterns) != count:
            raise ValueError(f"{len(patterns)} stages do not fit {mesh!r}: `{axis}` has {count}")
        _match_all([p for stage in patterns for p in stage], params)
        at = {
            name: [n for n, some in enumerate(patterns) if any(fnmatchcase(name, p) for p in some)]
            for name in params
        }
    homeless = [name for name, stages_of_name in at.items() if not stages_of_name]
    if homeless:
        raise NotFoundError(f"no stage has {listed(homeless)}; add patterns that match", homeless)
    return _place(params, mesh, axis, lambda name, spec: Only(at[name]))


def expert_parallel(
    params: Params, mesh: Mesh, experts: str = "*experts*", *, axis: str = "ep"
) -> Specs:
    """Distribute the experts of a mixture over one mesh axis; other names do not change.

    Experts stacked in one tensor are cut along its leading axis. Experts with keys of their own
    (``experts.7.w1``) are each held by `Only` one coordinate, that of row 7 in a stack.

    >>> params = {"experts.w1": (4, 8, 8), "moe.experts.0.w": (8, 8), "moe.experts.1.w": (8, 8)}
    >>> [spec.placements for spec in expert_parallel(params, Mesh(ep=2)).values()]
    [(Shard(dim=0),), (Only(coordinates=(0,)),), (Only(coordinates=(1,)),)]

    Raises:
        NotFoundError: The pattern matches no name.
    """
    _match_all([experts], params)
    ranks = mesh.shape[_axis(mesh, axis)]
    counts: dict[str, int] = {}
    for match in filter(None, map(_EXPERT.match, params)):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)

    def deal(name: str, spec: TensorSpec) -> Placement:
        if not fnmatchcase(name, experts):
            return Replicate()
        match = _EXPERT.match(name)
        return Only(int(match[2]) // -(-counts[match[1]] // ranks)) if match else Shard(0)

    return _place(params, mesh, axis, deal)


def adam(params: Params) -> Specs:
    """Add Adam's state: per parameter two float32 moments with the same placements, and a step.

    The step is a float32 scalar on every rank that holds the parameter.

    >>> for name in adam({"w": (8, 4)}):
    ...     print(name)
    w
    optimizer.state.w.exp_avg
    optimizer.state.w.exp_avg_sq
    optimizer.state.w.step
    """
    specs = _as_specs(params)
    state: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        moment = attrs.evolve(spec, dtype="float32")
        state[f"{_STATE}{name}.exp_avg"] = moment
        state[f"{_STATE}{name}.exp_avg_sq"] = moment
        where = [p if isinstance(p, Only) else Replicate() for p in spec.placements]
        everywhere = Replicate() in where and len(set(where)) == 1
        step = TensorSpec((), "float32", () if everywhere else where)
        state[f"{_STATE}{name}.step"] = step
    return FrozenDict({**specs, **state})


def _as_specs(params: Params) -> dict[str, TensorSpec]:
    return {k: s if isinstance(s, TensorSpec) else TensorSpec(s) for k, s in params.items()}


def _axis(mesh: Mesh, axis: str) -> int:
    if axis not in mesh.axes:
        raise ValueError(f"{mesh!r} has no axis `{axis}`; name one of {', '.join(mesh.names)}")
    return mesh.names.index(axis)


def _place(
    params: Params, mesh: Mesh, axis: str, choose: Callable[[str, TensorSpec], Placement]
) -> Specs:
    """Set the placement of every parameter on one mesh axis, which must not be set yet."""
    at = _axis(mesh, axis)
    placed = {}
    for name, spec in _as_specs(params).items():
        placements = [*(spec.placements or [Replicate()] * len(mesh.shape))]
        if len(placements) != len(mesh.shape):
            raise ValueError(
                f"`{name}` has {len(placements)} placements, which do not fit {mesh!r}"
            )
        if not isinstance(placements[at], Replicate):
            raise ValueError(f"`{name}` is placed on `{axis}` already: {placements[at]!r}")
        placements[at] = choose(name, attrs.evolve(spec, placements=placements))
        placed[name] = attrs.evolve(spec, placements=placements)
    return FrozenDict(placed)


def _cuts_rows(placement: object, spec: TensorSpec) -> bool:
    if not isinstance(placement, (Shard, StridedShard)):
        return False
    return placement.dim % len(spec.shape) == 0


def _match_all(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise unless every pattern matches a name, so that typos are noticed."""
    known = list(names)
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]
    if idle:
        near = nearest_names(idle[0], known)
        raise NotFoundError(f"no parameter matches {listed(idle)}{nearest_hint(near)}", near)


def _even_stages(names: Iterable[str], stages: int) -> dict[str, list[int]]:
    """Assign numbered layers evenly, in order; other names go to the first or last stage."""
    layer_of = {name: int(f[1]) for name in names if (f := _LAYER.search(name))}
    layers = sorted(set(layer_of.values()))
    if len(layers) < stages:
        raise ValueError(f"{len(layers)} numbered layers do not fill {stages} stages; pass stages=")
    stage_of = {layer: number * stages // len(layers) for number, layer in enumerate(layers)}
    at: dict[str, list[int]] = {}
    other = 0
    for name in names:
        if name in layer_of:
            at[name], other = [stage_of[layer_of[name]]], stages - 1
        else:  # the state of a parameter follows it
            param = name.removeprefix(_STATE).rpartition(".")[0]
            at[name] = at.get(param, [other])
    return at


LLAMA_TP: Final[FrozenDict[str, Rule]] = FrozenDict(
    {
        "*.embed_tokens.weight": 0,
        "*.[qkv]_proj.weight": "colwise",
        "*.o_proj.weight": "rowwise",
        "*.gate_proj.weight": "colwise",
        "*.up_proj.weight": "colwise",
        "*.down_proj.weight": "rowwise",
        "lm_head.weight": "colwise",
    }
)
"""How tensor parallelism cuts a Llama: the rules that `tensor_parallel` takes."""
