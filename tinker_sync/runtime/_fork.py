"""The objects that a child process renews after `os.fork()`, registered in one place.

A forked child has one thread and a copy of all memory. In this copy, a lock may be held by a thread that does
not exist in the child, and a count of work under way may include work that no thread does. Objects with locks
or counts register here. This module renews them in the child, before the code that called `os.fork()` goes on
there. It refers to them weakly. Any thread may register an object.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Renewable(Protocol):
    """An object with locks or counts that must be replaced in a forked child."""

    def renew_after_fork(self) -> None:
        """Replace locks, and forget threads and their unfinished work. Runs in the child's only thread."""


_lock = threading.Lock()
_members: weakref.WeakSet[Renewable] = weakref.WeakSet()  # guarded by _lock
_generation = 0  # written in a fresh child only, before it has a second thread


def renew_in_child(member: Renewable) -> None:
    """Register an object. As long as it lives, each process forked from this one calls `renew_after_fork`."""
    with _lock:
        _members.add(member)


def generation() -> int:
    """Return the number of forks between the process that imported this module and this process."""
    return _generation


def _renew_all() -> None:
    global _lock, _generation  # noqa: PLW0603  # both belong to the process, which is new here
    _lock = threading.Lock()
    _generation += 1
    for member in list(_members):
        member.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
