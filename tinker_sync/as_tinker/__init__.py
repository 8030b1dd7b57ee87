"""Runs code that says `import tinker` with this package in its place.

    python -m tinker_sync.as_tinker script.py --steps 3      a script
    python -m tinker_sync.as_tinker -m pytest -n 4 tests     a module, with the processes that it starts

In a notebook or a `conftest.py`, import this module before anything imports `tinker`:

    import tinker_sync.as_tinker
    import tinker                    # is tinker_sync

Both ways put the folder `path` of this package at the front of the module search path. The folder has a
package `tinker`, which replaces itself with `tinker_sync`, and the metadata of the version of the reference
client that this package follows, so that `importlib.metadata.version("tinker")` answers. The command sets
`PYTHONPATH`, so every Python process that the program starts finds the folder too. The import changes
`sys.path` of its own process, which `multiprocessing` copies to its workers. Neither changes anything that
outlives the program.

A module `tinker` beside the script is still found first, because Python looks there before `PYTHONPATH`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

import tinker_sync

FOLDER: Final = str(Path(__file__).with_name("path"))
"""The folder to put on the module search path."""

_NAME: Final = "tinker"
_OURS: Final = tinker_sync.__name__


class _Alias(MetaPathFinder, Loader):
    """Finds `tinker.types.datum` as another name of the module `tinker_sync.types.datum`, and so on."""

    def find_spec(self, fullname: str, *_path_and_target: object) -> ModuleSpec | None:
        if fullname != _NAME and not fullname.startswith(f"{_NAME}."):
            return None
        found = _find(fullname)
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what it finds here afterwards. So both names stand for one module, which
        # keeps its own name and spec.
        sys.modules[module.__name__] = importlib.import_module(_our_name(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module, for `python -m tinker`."""
        found = _find(fullname)
        code: CodeType | None = None if found is None else found.loader.get_code(found.name)  # type: ignore[union-attr]
        return code


def _our_name(fullname: str) -> str:
    return _OURS + fullname.removeprefix(_NAME)


def _find(fullname: str) -> ModuleSpec | None:
    name = _our_name(fullname)
    # A module under several names has the spec of its first name.
    loaded = sys.modules.get(name)
    return importlib.util.find_spec(name) if loaded is None else loaded.__spec__


def _install() -> None:
    """Let `import tinker` mean this package in this process, and in the workers of `multiprocessing`.

    Raises:
        ImportError: another module `tinker` is already imported.
    """
    present = sys.modules.get(_NAME, tinker_sync)
    place = getattr(present, "__file__", None)
    if present is not tinker_sync and (place is None or not Path(place).is_relative_to(FOLDER)):
        raise ImportError(
            f"`tinker` is already imported, from {place or 'an unknown place'}. Import tinker_sync.as_tinker "
            "before anything imports `tinker` (in a notebook: restart the kernel first), or start the "
            "program with `python -m tinker_sync.as_tinker`.",
            name=_NAME,
        )
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    sys.modules[_NAME] = tinker_sync


_install()
