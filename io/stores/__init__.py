"""Stores: local files, object stores, and stores for tests."""

from typing import TYPE_CHECKING

from shardplan.planning.door import door

if TYPE_CHECKING:
    from .base import Entry, MissingFileError, Store, StoreError, open_store
    from .folders import FolderStore

__getattr__, __dir__ = door(
    __name__,
    {"base": "Entry MissingFileError Store StoreError open_store", "folders": "FolderStore"},
)
