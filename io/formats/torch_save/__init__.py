"""Files of `torch.save`, and the archives, pickles and views that DCP files are made of too."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .archive import in_memory, read_archive
    from .names import fault_of, load_archive
    from .unpickler import PickleError, RefusedName

__getattr__, __dir__ = door(
    __name__,
    {
        "archive": "in_memory read_archive",
        "names": "fault_of load_archive",
        "unpickler": "PickleError RefusedName",
    },
)
