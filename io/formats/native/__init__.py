"""The native format: safetensors files and one manifest."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .manifest import MANIFEST, FileTable, Manifest, decode_manifest
    from .scan import Fault
    from .source import NativeSource
    from .verify import Findings, check_files, check_manifest

__getattr__, __dir__ = door(
    __name__,
    {
        "manifest": "FileTable MANIFEST Manifest decode_manifest",
        "scan": "Fault",
        "source": "NativeSource",
        "verify": "Findings check_files check_manifest",
    },
)
