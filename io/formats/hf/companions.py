"""Files without which tools load no model: its config, its tokenizer, how it generates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from ...stores.base import Store, check_path, open_store
from ..base import ExtraFiles, read_whole
from ..registry import locate

__all__ = ["find_companions", "read_extra"]

_PATTERNS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "sentencepiece*.model",
    "spiece.model",
    "chat_template*",
    "*processor_config.json",  # of images, sound and video
    "configuration_*.py",  # code of models that transformers has none for, which config.json names
    "modeling_*.py",
    "tokenization_*.py",
    "*processing_*.py",
)


def find_companions(store: Store) -> tuple[str, ...]:
    """Name the files of a folder that belong beside a model's tensors.

    >>> store = open_store("memory://companions")
    >>> for name in ("config.json", "tokenizer_config.json", "notes.txt", "model.safetensors"):
    ...     _ = store.write(name, [b"{}"])
    >>> find_companions(store)
    ('config.json', 'tokenizer_config.json')
    """
    found = store.list(recursive=False)
    files = [name for name in found if not name.endswith("/")]
    return tuple(name for name in files if any(fnmatchcase(name, p) for p in _PATTERNS))


def read_extra(extra: Sequence[ExtraFiles]) -> dict[str, bytes]:
    """Read files to put beside tensors, by name; of two with one name, the later one counts."""
    return {name: data for files in extra for name, data in _read(files).items()}


def _read(files: ExtraFiles) -> dict[str, bytes]:
    if isinstance(files, Mapping):
        return {_checked(name): _data(file) for name, file in files.items()}
    store = open_store(files)
    names = find_companions(store)
    if not names:
        raise ValueError(
            f"{store.url} has no config.json, nor any other file that belongs beside a model; give "
            "its folder, or the files by name: extra_files={'config.json': path}"
        )
    return {name: read_whole(store, name, "companion") for name in names}


def _checked(name: str) -> str:
    if ".safetensors" in check_path(name):
        raise ValueError(f"extra_files cannot have {name}: such names are those of the tensors")
    return name


def _data(file: str | os.PathLike[str] | bytes) -> bytes:
    if isinstance(file, bytes):
        return file
    store, name = locate(file)
    if not name:
        raise ValueError(f"extra_files: {os.fspath(file)} is not a file")
    return read_whole(store, name, "companion")
