"""Archives of `torch.save`, which DCP files are made of too: zip, pickle, values."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .archived import explain_name, load_archive
    from .unpickler import PickleError, RefusedName
    from .zip_read import in_memory, read_archive

__getattr__, __dir__ = door(
    __name__,
    {
        "archived": "explain_name load_archive",
        "unpickler": "PickleError RefusedName",
        "zip_read": "in_memory read_archive",
    },
)
