"""The objects that a child process renews after `os.fork()`, registered in one place.

A forked child has one thread and a copy of all memory: locks may be held by threads that do not exist there,
and work may be counted as under way that no thread does. Objects with locks or counts register here and are
renewed in the child before any of its own code runs. Registration holds an object weakly; any thread may
register.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Renewable(Protocol):
    """An object whose state a forked child must not inherit as it is."""

    def renew_after_fork(self) -> None:
        """Replace locks, forget threads and what only they could do. Runs in the child's only thread."""


_lock = threading.Lock()
_members: weakref.WeakSet[Renewable] = weakref.WeakSet()  # guarded by _lock
_generation = 0  # written in a fresh child only, before it has a second thread


def renew_in_child(member: Renewable) -> None:
    """Have `member.renew_after_fork()` called in every process forked from this one."""
    with _lock:
        _members.add(member)


def generation() -> int:
    """Return the number of forks between the first process and this one."""
    return _generation


def _renew_all() -> None:
    global _lock, _generation  # noqa: PLW0603  # the process itself has changed
    _lock = threading.Lock()
    _generation += 1
    for member in list(_members):
        member.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
