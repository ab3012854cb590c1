"""The native format: safetensors files and one manifest."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .encoding import decode_manifest
    from .manifest import find_manifest
    from .record import MANIFEST
    from .source import NativeSource

__getattr__, __dir__ = door(
    __name__,
    {
        "encoding": "decode_manifest",
        "manifest": "find_manifest",
        "record": "MANIFEST",
        "source": "NativeSource",
    },
)
