"""The calls on a client that is not ready yet. They are kept in order until the client is ready or fails."""

from __future__ import annotations

import threading
from typing import Protocol

from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import copy_exception


class HeldCall(Protocol):
    """A call that waits until its client is ready. Its future already exists."""

    def start(self) -> object:
        """Start the call; a failure goes into its future."""

    def fail(self, failure: Exception) -> object:
        """Fail the future of the call."""


class HeldCalls:
    """A queue that keeps the calls on one client until the client is ready. Thread-safe.

    A call made while earlier calls are being started waits behind them. So the calls of each thread start in
    the order in which the thread made them. No lock is held while a call starts or fails.

    >>> from types import SimpleNamespace
    >>> calls = HeldCalls()
    >>> calls.hold(SimpleNamespace(start=lambda: print("started"))), calls.open
    (True, False)
    >>> calls.release()
    started
    >>> calls.hold(SimpleNamespace()), calls.open
    (False, True)
    """

    def __init__(self) -> None:
        self.open = False
        """True once calls need not be held; read without a lock."""
        self._lock = threading.Lock()
        self._waiting: list[HeldCall] = []  # guarded by _lock
        self._failure: Exception | None = None  # guarded by _lock; final
        _fork.renew_in_child(self)

    def hold(self, call: HeldCall) -> bool:
        """Keep a call until the client is ready, and return True.

        If the client has failed, fail the call and return True. If the client is ready, return False; the
        caller then starts the call itself.
        """
        with self._lock:
            failure = self._failure
            if self.open:
                return False
            if failure is None:
                self._waiting.append(call)
        if failure is not None:
            call.fail(copy_exception(failure))
        return True

    def release(self) -> None:
        """Start the held calls in order. Later calls are not held; if the client has failed, they fail."""
        while True:
            with self._lock:
                calls, self._waiting = self._waiting, []
                if not calls:
                    self.open = self._failure is None
                    return
            for call in calls:
                call.start()

    def fail(self, failure: Exception) -> int:
        """Fail the held calls and return their number. Calls made later fail at once."""
        with self._lock:
            self._failure = self._failure or failure
            doomed, self._waiting = self._waiting, []
        for call in doomed:
            call.fail(copy_exception(failure))
        return len(doomed)

    def renew_after_fork(self) -> None:
        """Drop the calls of the parent in a forked child; the parent starts them."""
        self._lock = threading.Lock()
        self._waiting = []
