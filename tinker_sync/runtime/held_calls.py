"""Calls made on a client that is not ready: kept in order, started when it is, failed when it fails."""

from __future__ import annotations

import threading
from typing import Protocol

from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import fresh


class HeldCall(Protocol):
    """A call that has its future and waits for its client."""

    def start(self) -> object:
        """Go on; a failure goes into the future."""

    def fail(self, failure: Exception) -> object:
        """End the future."""


class HeldCalls:
    """The calls of one client until it is ready. Thread-safe.

    A call made while earlier ones are being started waits behind them, so each thread's calls start in the
    order it made them. Calls are started and failed with the lock free.

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
        """True once calls need not be held; never waits."""
        self._lock = threading.Lock()
        self._waiting: list[HeldCall] = []  # guarded by _lock
        self._failure: Exception | None = None  # guarded by _lock; final
        _fork.renew_in_child(self)

    def hold(self, call: HeldCall) -> bool:
        """Keep a call. Return False when the client is ready: the caller starts the call itself."""
        with self._lock:
            failure = self._failure
            if self.open:
                return False
            if failure is None:
                self._waiting.append(call)
        if failure is not None:
            call.fail(fresh(failure))
        return True

    def release(self) -> None:
        """Start the calls in order; from then on none is held."""
        while True:
            with self._lock:
                calls, self._waiting = self._waiting, []
                if not calls:
                    self.open = self._failure is None
                    return
            for call in calls:
                call.start()

    def fail(self, failure: Exception) -> int:
        """Fail the calls and all later ones; return how many there were. The first failure counts."""
        with self._lock:
            self._failure = self._failure or failure
            doomed, self._waiting = self._waiting, []
        for call in doomed:
            call.fail(fresh(failure))
        return len(doomed)

    def renew_after_fork(self) -> None:
        """Drop the calls of the parent: they go on there."""
        self._lock = threading.Lock()
        self._waiting = []
