"""The calls on a client that is not ready yet. They are kept in order until the client is ready or fails."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from tinker_sync._base.api_errors import copy_exception
from tinker_sync.errors import TinkerError

if TYPE_CHECKING:
    from tinker_sync.runtime.workers import Workers


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

    `hold` and `open` take no lock, because a signal handler may call them at any point. `hold` first adds a
    call and then looks whether `release` is at work; `release` first writes that it is not and then looks for
    calls. So one of them sees the other.

    Args:
        workers: start a call that comes when the client has just become ready.

    >>> from types import SimpleNamespace
    >>> calls = HeldCalls(workers=None)
    >>> calls.hold(SimpleNamespace(start=lambda: print("started")))
    >>> calls.open
    False
    >>> calls.release()
    started
    >>> calls.open
    True
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._waiting: deque[HeldCall] = deque()
        self._failure: Exception | None = None  # final
        self._ready = False  # final
        self._lock = threading.Lock()
        self._releasing = False  # set under _lock; one thread starts calls

    @property
    def open(self) -> bool:
        """True once calls need not be held."""
        # In this order: a call that does not wait any more was taken by a thread that is at work or done.
        return not self._waiting and not self._releasing and self._ready

    def hold(self, call: HeldCall) -> None:
        """Keep a call until the client is ready. If the client has failed, fail the call.

        Raises:
            TinkerError: the client has just become ready, and no worker can start the call, which fails.
        """
        self._waiting.append(call)
        if self._failure is not None:
            self.fail(self._failure)
        if self._ready and not self._releasing:
            try:
                self._workers.run_call(self.release)
            except TinkerError as failure:
                call.fail(failure)  # so that no later call starts it
                raise

    def release(self) -> None:
        """Start the held calls in order. Later calls are not held; if the client has failed, they fail."""
        while self._begin():
            while (call := self._take()) is not None:
                call.start()
            self._ready = self._failure is None
            self._releasing = False
            if not self._waiting:
                return

    def fail(self, failure: Exception) -> int:
        """Fail the held calls and return their number. Calls made later fail at once."""
        self._failure = failure = self._failure or failure
        count = 0
        while (call := self._take()) is not None:
            call.fail(copy_exception(failure))
            count += 1
        return count

    def _begin(self) -> bool:
        with self._lock:
            begin, self._releasing = not self._releasing, True
        return begin

    def _take(self) -> HeldCall | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def renew_after_fork(self) -> None:
        """Drop the calls of the parent in a forked child; the parent starts them."""
        self._waiting, self._lock, self._releasing = deque(), threading.Lock(), False
