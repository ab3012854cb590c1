"""What would a checkpoint hold that keeps each tensor in one piece? For files that do not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .errors import RefusedError
from .geometry.tilings import Chunk
from .mesh.placements import TensorSpec
from .metadata import BytesMetadata, Metadata, TensorMetadata
from .tensors import held
from .tree import flatten, is_tensor, nesting_data

__all__ = ["metadata_of"]


def metadata_of(sd: Mapping[Any, Any]) -> Metadata:
    """Describe the checkpoint that holds all of a state dict, every tensor in one chunk.

    So do files that hold a state dict and say nothing of it, such as those of ``torch.save``: this
    is their metadata, read off a state dict of the same keys. Where the state dict is sharded, its
    tensors count with their global shapes, so `load_plan` finds what each rank needs of the file.

    Args:
        sd: A state dict, nested or flat, of tensors, meta tensors, `TensorSpec`s and other values.

    >>> from shardplan.planning import TensorSpec
    >>> metadata_of({"model": {"w": TensorSpec((4, 2), "bfloat16")}, "step": 7})
    Metadata: 2 entries, 16 B
    name     dtype     shape   chunks
    model.w  bfloat16  [4, 2]  Grid(0:4, 0:2)
    step     value

    Raises:
        PlanError: Two keys flatten to the same name.
        RefusedError: A tensor is none that a checkpoint can carry; every such key is named.
    """
    flat, paths = flatten(sd)
    entries: dict[str, TensorMetadata | BytesMetadata] = {}
    refused = []
    for name in sorted(flat):
        value = flat[name]
        if not is_tensor(value):
            entries[name] = BytesMetadata()
            continue
        whole = attrs.evolve(value, placements=()) if isinstance(value, TensorSpec) else value
        try:
            here = held(name, whole)
        except RefusedError as error:
            refused.append(str(error))
            continue
        everything = Chunk([0] * len(here.size), here.size)
        entries[name] = TensorMetadata(here.properties, here.size, [everything])
    if refused:
        raise RefusedError(*refused)
    return Metadata(entries, planner_data=nesting_data(flat, paths))
