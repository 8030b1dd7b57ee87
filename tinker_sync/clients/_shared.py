"""Cores that several clients of one process share, found by what they have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, MutableMapping

from tinker_sync.runtime import _fork
from tinker_sync.runtime.core import Core


class SharedCores:
    """One core for each place; a forked child makes its own. Thread-safe.

    Args:
        cores: where they are kept: a dictionary keeps them for ever, a weak one as long as they are used.
    """

    def __init__(self, cores: MutableMapping[Hashable, Core]) -> None:
        self._lock = threading.Lock()
        self._cores = cores  # guarded by _lock
        _fork.renew_in_child(self)

    def get(self, place: Hashable, make: Callable[[], Core]) -> Core:
        """The open core of a place; `make` makes one, without asking anybody anything."""
        with self._lock:
            core = self._cores.get((place, _fork.generation()))
            if core is None or core.closed:
                core = self._cores[place, _fork.generation()] = make()
            return core

    def renew_after_fork(self) -> None:
        """The lock may be held by a thread that only the parent has."""
        self._lock = threading.Lock()
