"""Stores: local files, object stores, and stores for tests."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .base import (  # isort: skip
        Entry, FolderStore, Location, MissingFileError, Store, StoreError, open_store,
    )  # fmt: skip

__getattr__, __dir__ = door(
    __name__, {"base": "Entry FolderStore Location MissingFileError Store StoreError open_store"}
)
