"""Sums of checkpoints: which tensors of which checkpoints make up each tensor of the result.

An `Expression` is what arithmetic with checkpoints makes: ``0.7 * a + 0.3 * b``. Every tensor of
floats is a sum of terms, and each term is a number times a saved tensor (`Weighted`), or times the
product of two saved matrices (`Product`, as LoRA adapters have them). All other tensors and values
are those of the first checkpoint.

1. `expression_of` describes one checkpoint: every term has the weight 1.
2. `scaled` multiplies the weights; `added` puts the terms of two expressions together.
3. `with_adapter` adds a product of matrices to the tensors that an adapter names.
4. `result_of` says what the tensors are afterwards, `term_boxes` what is read for a box of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from .dtypes import Dtype, dtype_name
from .errors import RefusedError
from .frozen import FrozenDict
from .metadata import Entries, Metadata, TensorMetadata
from .storage.copy import Box

_FLOATS: Final = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_WIDE: Final = {"float64": "float64", "complex64": "complex64", "complex128": "complex128"}
_ADAPTED: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")


@attrs.frozen
class Weighted:
    """A number times a tensor of one of the checkpoints."""

    weight: float
    source: int  # the number of the checkpoint
    name: str


@attrs.frozen
class Product:
    """A number times the product of two matrices of one of the checkpoints."""

    weight: float
    source: int  # the number of the checkpoint
    up: str  # the left matrix; as many rows as the result has
    down: str  # the right one


Term = Weighted | Product


def _frozen(terms: Mapping[str, tuple[Term, ...]]) -> Mapping[str, tuple[Term, ...]]:
    return FrozenDict(terms)


@attrs.frozen
class Expression:
    """A sum of checkpoints, which are numbered.

    Attributes:
        metadata: The contents of each checkpoint.
        terms: By name, what each tensor of floats is the sum of.
        dtype: What these tensors become; None if they keep the first checkpoint's dtypes.
    """

    metadata: tuple[Metadata, ...]
    terms: Mapping[str, tuple[Term, ...]] = attrs.field(converter=_frozen)
    dtype: str | None = None

    @property
    def first(self) -> Metadata:
        """The checkpoint that names, shapes and all other values come from."""
        return self.metadata[0]

    def cast(self, dtype: Dtype) -> Expression:
        """Return the same sum in another dtype."""
        name = dtype_name(dtype)
        if name not in _FLOATS:
            raise ValueError(f"a sum of checkpoints is one of {', '.join(_FLOATS)}, not {name}")
        return attrs.evolve(self, dtype=name)


def expression_of(metadata: Metadata) -> Expression:
    """Return one checkpoint as a sum.

    >>> from shardplan.planning import TensorSpec, metadata_of
    >>> expression_of(metadata_of({"w": TensorSpec((2,)), "step": 7})).terms
    FrozenDict({'w': (Weighted(weight=1.0, source=0, name='w'),)})
    """
    terms = {name: (Weighted(1.0, 0, name),) for name in _floats(metadata)}
    return Expression((metadata,), terms)


def _floats(metadata: Metadata) -> Iterator[str]:
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorMetadata) and entry.properties.dtype in _FLOATS:
            yield name


def scaled(expression: Expression, weight: float) -> Expression:
    """Multiply a sum by a number."""
    terms = {
        name: tuple(attrs.evolve(term, weight=term.weight * weight) for term in each)
        for name, each in expression.terms.items()
    }
    return attrs.evolve(expression, terms=terms)


def added(a: Expression, b: Expression, *, partial: bool = False) -> Expression:
    """Add two sums; with ``partial``, the second one need not have all tensors of the first.

    >>> from shardplan.planning import TensorSpec, metadata_of
    >>> one = expression_of(metadata_of({"w": TensorSpec((2,))}))
    >>> added(scaled(one, 0.5), scaled(one, 2.0)).terms["w"]
    (Weighted(weight=0.5, source=0, name='w'), Weighted(weight=2.0, source=1, name='w'))

    Raises:
        RefusedError: Names or shapes differ; it names all of them.
    """
    wrong = [*_differences(a.first, b.first, partial)]
    if wrong:
        raise RefusedError(*wrong)
    shift = len(a.metadata)
    terms = {
        name: each + tuple(attrs.evolve(t, source=t.source + shift) for t in b.terms.get(name, ()))
        for name, each in a.terms.items()
    }
    return Expression((*a.metadata, *b.metadata), terms, a.dtype)


def _differences(a: Metadata, b: Metadata, partial: bool) -> Iterator[str]:
    """Say why two checkpoints cannot be added."""
    entries, others = a.state_dict_metadata, b.state_dict_metadata
    for name in sorted(entries.keys() | others.keys()):
        mine, theirs = entries.get(name), others.get(name)
        if theirs is None and partial:
            continue
        if mine is None or theirs is None:
            yield f"`{name}` is only in the {'first' if theirs is None else 'second'} checkpoint"
        elif isinstance(mine, TensorMetadata) != isinstance(theirs, TensorMetadata):
            yield f"`{name}` is a tensor in one checkpoint and another value in the other"
        elif isinstance(mine, TensorMetadata) and isinstance(theirs, TensorMetadata):
            kinds = [entry.properties.dtype for entry in (mine, theirs)]
            if mine.size != theirs.size:
                shapes = f"{list(mine.size)} in one, {list(theirs.size)} in the other"
                yield f"`{name}` has shape {shapes}"
            elif (kinds[0] in _FLOATS) != (kinds[1] in _FLOATS):
                yield f"`{name}` is {kinds[0]} in one checkpoint and {kinds[1]} in the other"


def with_adapter(base: Expression, adapter: Metadata, scale: float) -> Expression:
    """Add ``scale * B @ A`` to each weight of which a LoRA adapter has the matrices.

    >>> from shardplan.planning import TensorSpec, metadata_of
    >>> base = expression_of(metadata_of({"up.weight": TensorSpec((6, 4))}))
    >>> sizes = {"up.lora_A.weight": TensorSpec((2, 4)), "up.lora_B.weight": TensorSpec((6, 2))}
    >>> with_adapter(base, metadata_of(sizes), 0.5).terms["up.weight"][1]
    Product(weight=0.5, source=1, up='up.lora_B.weight', down='up.lora_A.weight')

    Raises:
        RefusedError: The adapter has tensors that belong to none of the base's; it names all.
    """
    halves: dict[str, dict[str, str]] = {}
    wrong = list[str]()
    for name in adapter.state_dict_metadata:
        found = _ADAPTED.fullmatch(name)
        if found is None:
            wrong.append(f"`{name}` of the adapter is neither a lora_A nor a lora_B weight")
        else:
            halves.setdefault(f"{found[1]}.weight", {})[found[2]] = name
    number, terms = len(base.metadata), dict(base.terms)
    for target, pair in halves.items():
        fault = _adapter_fault(base, adapter, target, pair)
        if fault is None:
            terms[target] += (Product(scale, number, pair["B"], pair["A"]),)
        else:
            wrong.append(fault)
    if wrong:
        raise RefusedError(*wrong)
    return Expression((*base.metadata, adapter), terms, base.dtype)


def _adapter_fault(
    base: Expression, adapter: Metadata, target: str, pair: Mapping[str, str]
) -> str | None:
    """Say why a pair of matrices cannot be added to a weight."""
    entry = base.first.state_dict_metadata.get(target)
    if target not in base.terms or not isinstance(entry, TensorMetadata):
        return f"the adapter has matrices for `{target}`, and the base has no such tensor of floats"
    if len(pair) < 2:
        return f"the adapter has only one of the two matrices for `{target}`"
    shapes = []
    for half in "BA":
        matrix = adapter.state_dict_metadata[pair[half]]
        shapes.append(matrix.size if isinstance(matrix, TensorMetadata) else ())
    up, down = shapes
    if len(up) != 2 or len(down) != 2 or up[1] != down[0] or (up[0], down[1]) != entry.size:
        return (
            f"the matrices for `{target}` have shapes {list(up)} and {list(down)}, whose product "
            f"is not of shape {list(entry.size)}"
        )
    return None


def result_of(expression: Expression) -> Metadata:
    """Describe the checkpoint that a sum makes; it is cut as the first one is."""
    entries = dict(expression.first.state_dict_metadata)
    for name in expression.terms if expression.dtype is not None else ():
        entry = entries[name]
        assert isinstance(entry, TensorMetadata)
        assert expression.dtype is not None
        properties = attrs.evolve(entry.properties, dtype=expression.dtype)
        entries[name] = attrs.evolve(entry, properties=properties)
    nesting = expression.first.planner_data
    return Metadata(Entries.of(entries), planner_data=nesting)


def terms_of(expression: Expression, name: str) -> tuple[Term, ...]:
    """Return the terms of a tensor; one that is not of floats is the first checkpoint's."""
    return expression.terms.get(name) or (Weighted(1.0, 0, name),)


def sum_dtype(expression: Expression, name: str) -> str:
    """Return the dtype in which a tensor is added up: float32, or a wider one that it has.

    >>> from shardplan.planning import TensorSpec, metadata_of
    >>> one = expression_of(metadata_of({"w": TensorSpec((2,), "bfloat16")}))
    >>> sum_dtype(one, "w"), sum_dtype(one.cast("float64"), "w")
    ('float32', 'float64')
    """
    kinds = [expression.dtype or "float32"]
    for term in terms_of(expression, name):
        for part in (term.name,) if isinstance(term, Weighted) else (term.up, term.down):
            entry = expression.metadata[term.source].state_dict_metadata[part]
            assert isinstance(entry, TensorMetadata)
            if entry.properties.dtype not in _FLOATS:
                return entry.properties.dtype
            kinds.append(entry.properties.dtype)
    wide = [_WIDE[kind] for kind in kinds if kind in _WIDE]
    return max(wide, key=[*_WIDE.values()].index, default="float32")


def joined_name(source: int, name: str) -> str:
    """Return the name of a tensor among those of all checkpoints of a sum."""
    return f"{source}/{name}"


def joined_metadata(parts: Sequence[Metadata]) -> Metadata:
    """Describe all tensors and values of several checkpoints together."""
    return Metadata(
        {
            joined_name(number, name): entry
            for number, one in enumerate(parts)
            for name, entry in one.state_dict_metadata.items()
        }
    )


def term_boxes(term: Term, offsets: Sequence[int], sizes: Sequence[int], rank: int) -> list[Box]:
    """Return what is read for a box of a tensor; ``rank`` is that of a product.

    >>> term_boxes(Product(1.0, 0, "B", "A"), (2, 1), (3, 4), rank=8)
    [Box(name='0/B', offsets=(2, 0), sizes=(3, 8)), Box(name='0/A', offsets=(0, 1), sizes=(8, 4))]
    """
    if isinstance(term, Weighted):
        return [Box(joined_name(term.source, term.name), tuple(offsets), tuple(sizes))]
    up, down = (joined_name(term.source, half) for half in (term.up, term.down))
    return [
        Box(up, (offsets[0], 0), (sizes[0], rank)),
        Box(down, (0, offsets[1]), (rank, sizes[1])),
    ]
