"""Meshes, placements and the plans of a whole world of ranks, without hardware."""

from typing import TYPE_CHECKING

from ..door import door

if TYPE_CHECKING:  # the same names as below, by module
    # isort: off
    from .derive import DerivedPlans, derive_plans, world_metadata
    from .descriptions import Description, JoinedPlans, derive_joined, describe
    from .keys import layout_key, on_meta
    from .placements import (
        Mesh, Only, Placement, Replicate, Shard, StridedShard, TensorSpec, as_mesh, local_chunks,
    )  # fmt: skip
    from .models import (
        deepseek, deepseek_v3, kimi_k2, llama, llama3_8b, llama3_405b, qwen3_235b, qwen3_moe,
    )  # fmt: skip
    from .presets import (
        LLAMA_TP, Rule, adam, expert_parallel, fsdp, fsdp_tp, hsdp, pipeline, tensor_parallel,
    )  # fmt: skip
    from .layouts import SpecLayout
    from .worlds import WorldPlans, world_plans
    # isort: on

__getattr__, __dir__ = door(
    __name__,
    {
        "derive": "DerivedPlans derive_plans world_metadata",
        "descriptions": "Description JoinedPlans derive_joined describe",
        "keys": "layout_key on_meta",
        "placements": (
            "Mesh Only Placement Replicate Shard StridedShard TensorSpec as_mesh local_chunks"
        ),
        "models": ("deepseek deepseek_v3 kimi_k2 llama llama3_405b llama3_8b qwen3_235b qwen3_moe"),
        "presets": (
            "LLAMA_TP Rule adam expert_parallel fsdp fsdp_tp hsdp pipeline tensor_parallel"
        ),
        "layouts": "SpecLayout",
        "worlds": "WorldPlans world_plans",
    },
)
