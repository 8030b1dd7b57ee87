"""Cores that several clients of one process share, found by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping

from tinker_sync.runtime import _fork
from tinker_sync.runtime.core import Core
from tinker_sync.runtime.once import Shared


class SharedCores:
    """One open core for each place; a forked child makes its own. Thread-safe.

    Args:
        cores: holds the cores: a dictionary for ever, a weak one as long as they are used.
    """

    def __init__(self, cores: MutableMapping[Hashable, Core]) -> None:
        self._shared = Shared(
            cores, is_usable=lambda core: not core.closed, discard=lambda core: core.close()
        )

    def get(self, place: Hashable, make: Callable[[], Core]) -> Core:
        """Return the open core of a place; `make` makes one without a request to the server."""
        return self._shared.get((place, _fork.generation()), make)
