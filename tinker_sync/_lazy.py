"""Modules that are imported when something in them is first used.

A leaf: it imports no other module of the package. Any thread may enter; the import system does the locking.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for a module, and imports it when an attribute is first read.

    >>> LazyModule("math").sqrt(4)
    2.0
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)  # the next read finds it without this method
        return value


def lazy_names(
    package: str, homes: Mapping[str, Iterable[str]], *, other_paths: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose public names live in other modules.

    Args:
        package: `__name__` of the package.
        homes: The public names of each module, by the module's full name. A module directly inside
            the package is a lazy attribute of it as well.
        other_paths: Names of modules that scripts import from instead of the package. Each becomes another
            name of the package itself, so every public name can be imported from it.

    >>> import tinker_sync
    >>> tinker_sync.AdamParms
    Traceback (most recent call last):
    AttributeError: module 'tinker_sync' has no attribute 'AdamParms', did you mean 'AdamParams'?
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    inside = f"{package}."
    submodules = {
        module[len(inside) :]: module
        for module in homes
        if module.startswith(inside) and "." not in module[len(inside) :]
    }

    for path in other_paths:
        # The import system looks here again after it has imported the package, and takes what it finds.
        sys.modules[inside + path] = sys.modules[package]
    other_names = {path.rpartition(".")[2] for path in other_paths}

    def lookup(name: str) -> Any:
        if name in home_of:
            value = getattr(importlib.import_module(home_of[name]), name)
        elif name in submodules:
            value = importlib.import_module(submodules[name])
        elif name in other_names:
            value = sys.modules[package]
        else:
            # Without `obj`: otherwise the interpreter adds a second suggestion to tracebacks.
            raise AttributeError(_describe_unknown(package, name, [*home_of, *submodules]), name=name)
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *submodules})

    return lookup, listing


def _describe_unknown(package: str, name: str, known: list[str]) -> str:
    message = f"module {package!r} has no attribute {name!r}"
    if name.startswith("__"):  # the interpreter and tools probe for many such names
        return message
    import difflib  # slow to import, needed only for a misspelt name

    close = difflib.get_close_matches(name, known, n=1)
    return f"{message}, did you mean {close[0]!r}?" if close else message
