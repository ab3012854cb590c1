"""The native format: safetensors files and one manifest."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .encoding import decode_manifest
    from .manifest import find_manifest, read_manifest
    from .record import MANIFEST, Manifest
    from .source import NativeSource
    from .write import NativeWriter

__getattr__, __dir__ = door(
    __name__,
    {
        "write": "NativeWriter",
        "encoding": "decode_manifest",
        "manifest": "find_manifest read_manifest",
        "record": "MANIFEST Manifest",
        "source": "NativeSource",
    },
)
