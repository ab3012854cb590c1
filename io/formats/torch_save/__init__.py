"""Files of `torch.save`."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .source import find
    from .write import TorchWriter

__getattr__, __dir__ = door(
    __name__,
    {
        "source": "find",
        "write": "TorchWriter",
    },
)
