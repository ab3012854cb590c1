"""The native format: safetensors files and one manifest."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .manifest import MANIFEST, Manifest, decode_manifest, find_manifest, read_manifest
    from .source import NativeSource
    from .write import NativeWriter

__getattr__, __dir__ = door(
    __name__,
    {
        "write": "NativeWriter",
        "manifest": "MANIFEST Manifest decode_manifest find_manifest read_manifest",
        "source": "NativeSource",
    },
)
