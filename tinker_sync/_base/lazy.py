"""Modules that are imported when one of their attributes is first read.

This module imports no other module of the package. Any thread may use it; the import system does the locking.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A placeholder for a module. It imports the module when one of its attributes is first read.

    >>> LazyModule("math").sqrt(4)
    2.0
    """

    # A class with `__getattr__` calls that of modules for each read, which takes more than twice as long.
    __getattribute__ = object.__getattribute__

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)  # the next read finds it without this method
        return value


def lazy_names(
    package: str, homes: Mapping[str, str], *, other_paths: str = "", moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package whose public names live in other modules.

    The `__init__.pyi` beside the package has the same names as imports, for type checkers.

    Args:
        package: `__name__` of the package.
        homes: maps the full name of a module to its public names, separated by spaces. The entry of the
            package itself lists modules in it. All named modules directly in the package become lazy
            attributes too.
        other_paths: names of modules from which scripts for the reference client import. Each becomes another
            name of the package itself, so every public name can be imported from it.
        moved: maps the name of a module in an earlier version to the full name of its successor.

    >>> import tinker_sync
    >>> tinker_sync.AdamParms
    Traceback (most recent call last):
    AttributeError: module 'tinker_sync' has no attribute 'AdamParms', did you mean 'AdamParams'?
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    inside = f"{package}."
    children = {*homes.get(package, "").split()}
    children |= {home.removeprefix(inside) for home in homes if home.rpartition(".")[0] == package}
    # After importing the package, the import system reads `sys.modules` again and uses these entries.
    others: dict[str, ModuleType] = dict.fromkeys(other_paths.split(), sys.modules[package])
    for name, home in (moved or {}).items():
        others[name] = LazyModule(home)
        others[name].__path__ = []  # its modules have moved too: `_LastFinder` finds them
        _moved[inside + name] = home
    sys.modules.update({inside + path: module for path, module in others.items()})
    other_names = {path.rpartition(".")[2]: module for path, module in others.items()}

    def lookup(name: str) -> Any:
        home = home_of.get(name)
        if home is not None and home != package:
            value: Any = getattr(importlib.import_module(home), name)
        elif name in children:
            value = importlib.import_module(inside + name)
        elif name in other_names:
            value = other_names[name]
        else:
            # Without `obj`: otherwise the interpreter adds a second suggestion to tracebacks.
            raise AttributeError(_describe_unknown(package, name, [*home_of, *children]), name=name)
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *children})

    return lookup, listing, sorted(home_of)


_moved: dict[str, str] = {}
"""The full names of packages in earlier versions, and the present ones."""


class _FormerName:
    """A loader that puts a module of a moved package under its former name."""

    @staticmethod
    def create_module(_: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        parent, _, name = module.__name__.rpartition(".")
        sys.modules[module.__name__] = importlib.import_module(f"{_moved[parent]}.{name}")


class _LastFinder:
    """A finder that is asked after all others: for former names of modules, and for modules left out."""

    @staticmethod
    def find_spec(name: str, *_path_and_target: object) -> ModuleSpec | None:
        if name.rpartition(".")[0] in _moved:
            return ModuleSpec(name, _FormerName)  # type: ignore[arg-type]  # its methods are static
        if name.startswith("tinker_sync."):
            importlib.import_module("tinker_sync._base.left_out").refuse(name)
        return None


sys.meta_path.append(_LastFinder)


def _describe_unknown(package: str, name: str, known: list[str]) -> str:
    message = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):  # the interpreter probes for such names, and for private modules
        return message
    path = f"{package}.{name}".partition(".")[2]
    left_out: str | None = importlib.import_module("tinker_sync._base.left_out").words_on(path)
    if left_out is not None:
        return left_out
    import difflib  # slow to import, needed only for a misspelt name

    close = difflib.get_close_matches(name, known, n=1)
    return f"{message}, did you mean {close[0]!r}?" if close else message
