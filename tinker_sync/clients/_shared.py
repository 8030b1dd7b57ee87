"""Cores that several clients of one process share, by a key such as the address of the server."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping

from tinker_sync.runtime import _fork
from tinker_sync.runtime.core import Core
from tinker_sync.runtime.once import Shared


class SharedCores:
    """A table with one open core for each place, which is a key such as address and API key. Thread-safe.

    Args:
        cores: the mapping that holds the cores; a dictionary keeps them, and a weak mapping drops those that
            no client uses.
    """

    def __init__(self, cores: MutableMapping[Hashable, Core]) -> None:
        self._shared = Shared(
            cores, is_usable=lambda core: not core.closed, discard=lambda core: core.close()
        )

    def get(self, place: Hashable, make: Callable[[], Core]) -> Core:
        """Return the open core of a place. Call `make`, which sends no request, if no core is open."""
        return self._shared.get((place, _fork.generation()), make)
