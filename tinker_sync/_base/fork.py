"""The objects that a child process renews after `os.fork()`, registered in one place.

A forked child has one thread and a copy of all memory. In this copy, a lock may be held by a thread that is
not in the child, and a count of work under way may include work that no thread does. The runtime of each
client registers here, and begins anew in the child with all its parts (`ClientRuntime.renew_after_fork`). So
do the objects that several clients share, and those that users hold. This module renews them in the child,
before the code that called `os.fork()` goes on there. It refers to them weakly. Any thread may register.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import weakref
from typing import Any, Final, Generic, Protocol, TypeVar

T = TypeVar("T")

# The packages of which threads of a client import modules at first use, and the longest wait for that.
_IMPORTED: Final = frozenset({"tinker_sync", "numpy", "cattrs", "requests", "urllib3", "tokenizers"})
_IMPORT_S: Final = 5.0


class Renewable(Protocol):
    """An object with locks or counts that must be replaced in a forked child."""

    def renew_after_fork(self) -> None:
        """Replace locks, and forget threads and their unfinished work. Runs in the child's only thread."""


class Members(Generic[T]):
    """A set that holds its members weakly. Thread-safe.

    It needs no lock, because adding to a set, discarding from it and copying it are atomic in the
    interpreter. So a signal handler may add a member at any point.

    >>> members = Members()
    >>> members.add(print), members.add(print), len(members.all())
    (None, None, 1)
    """

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def add(self, member: T) -> None:
        """Add a member, until it is discarded or freed."""
        self._refs.add(weakref.ref(member, self._refs.discard))

    def discard(self, member: T) -> None:
        """Remove a member, if it is one."""
        self._refs.discard(weakref.ref(member))

    def all(self) -> list[T]:
        """Return the members that still exist."""
        return [member for ref in list(self._refs) if (member := ref()) is not None]


_members: Members[Renewable] = Members()
_generation = 0  # written in a fresh child only, before it has a second thread


def renew_in_child(member: Renewable) -> None:
    """Register an object. As long as it lives, each process forked from this one calls `renew_after_fork`."""
    _members.add(member)


def generation() -> int:
    """Return the number of forks between the process that imported this module and this process."""
    return _generation


def _renew_all() -> None:
    global _generation  # noqa: PLW0603  # it belongs to the process, which is new here
    _generation += 1
    for member in _members.all():
        member.renew_after_fork()


def _await_imports() -> None:
    """Wait, before a fork, until no other thread imports one of our modules, or for a few seconds.

    The child would inherit the lock of the half-imported module without the thread that releases it, and wait
    for it for ever at its own import of the module. `os.fork` itself renews only the lock of all imports.
    """
    locks: dict[str, Any] = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", {})
    own, until_s = threading.get_ident(), time.monotonic() + _IMPORT_S
    while time.monotonic() < until_s:
        held = [lock() for name, lock in list(locks.items()) if name.partition(".")[0] in _IMPORTED]
        if all(getattr(lock, "owner", None) in (None, own) for lock in held):
            return
        time.sleep(0.001)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_await_imports, after_in_child=_renew_all)
