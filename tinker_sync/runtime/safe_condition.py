"""`SafeCondition`: a condition that Ctrl-C cannot leave locked. Futures use it.

`with` on a `threading.Condition` calls a Python method that takes the lock. Ctrl-C may interrupt that method
after it has taken the lock, and then the main thread holds the lock for ever. Here the method that takes the
lock is that of the lock itself, which no signal interrupts. Any thread may call the methods.
"""

from __future__ import annotations

from _thread import RLock, allocate_lock
from collections import deque
from typing import Any


class SafeCondition(RLock):  # type: ignore[misc]  # final in the published types alone
    """The part of a `threading.Condition` that futures use.

    >>> with SafeCondition() as held:
    ...     held
    True
    """

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()  # guarded by the lock itself

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until `notify_all` is called. Return False if the time is over before that.

        Args:
            timeout: the longest wait in seconds; None for no limit.
        """
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        saved = self._release_save()  # type: ignore[attr-defined]  # not in the published types
        woken = False
        try:
            woken = waiter.acquire(True, -1 if timeout is None else max(timeout, 0.0))
        finally:
            self._acquire_restore(saved)  # type: ignore[attr-defined]
            if not woken and waiter in self._waiters:
                self._waiters.remove(waiter)
        return woken

    def notify_all(self) -> None:
        """Wake the threads that wait."""
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            waiter.release()
