"""Adapters to torch.distributed.checkpoint: records, planners and storage.

`to_torch` and `from_torch` convert plans and metadata. `as_torch_save_planner` and
`as_torch_load_planner` run a pipeline of passes inside ``torch.distributed.checkpoint.save`` and
``load``; `as_torch_storage_writer` and `as_torch_storage_reader` give torch's planners our storage.
"""

from shardplan.planning import named_extras

with named_extras("shardplan.torch_dcp", with_torch=True):
    from .planners import as_torch_load_planner, as_torch_save_planner
    from .records import from_torch, to_torch
    from .storage import as_torch_storage_reader, as_torch_storage_writer

__all__ = [
    "as_torch_load_planner",
    "as_torch_save_planner",
    "as_torch_storage_reader",
    "as_torch_storage_writer",
    "from_torch",
    "to_torch",
]
