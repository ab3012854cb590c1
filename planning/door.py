"""Doors of folders: names that are loaded from their modules when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def door(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package that loads its modules on demand.

    Args:
        package: The package's `__name__`.
        homes: The names that the package offers, separated by spaces, by the module they live in.

    A name must not be that of a module: loading the module would give it the name.

    Returns:
        The two functions, to be assigned in the package's `__init__`.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name in homes:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        vars(import_module(package))[name] = value
        return value

    def names() -> list[str]:
        return sorted({*vars(import_module(package)), *home_of})

    return load, names
