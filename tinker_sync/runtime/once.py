"""A value that is made on first use, by one thread while the others wait for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, TypeVar

from tinker_sync.errors import DeadlineError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import fresh

T = TypeVar("T")


class Once(Generic[T]):
    """Holds a value, not None, from its first use on. A failure is not remembered: the next call tries again.
    Thread-safe.

    >>> once = Once()
    >>> once.made, once.get(lambda: 7), once.get(lambda: 8), once.made
    (None, 7, 7, 7)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flight: Future[None] | None = None  # guarded by _lock; the try under way
        self.made: T | None = None
        """The value, or None before there is one; never waits."""
        _fork.renew_in_child(self)

    def get(self, make: Callable[[], T], *, limit_s: float = math.inf) -> T:
        """The value; whoever comes first makes it, whoever comes meanwhile waits.

        Args:
            make: makes it; must not come here again.
            limit_s: how long to wait for another thread that makes it.

        Raises:
            Exception: what `make` raised, to all who waited for this try.
            DeadlineError: another thread was not done in time.
        """
        while self.made is None:
            mine: Future[None] = Future()
            # Ctrl-C may come anywhere in here; whatever it leaves, the flight must not stay open.
            try:
                with self._lock:
                    flight = self._flight = self._flight or mine
                if flight is mine:
                    self.made = make()
                    self._land(mine, None)
            except BaseException as failure:
                self._land(mine, failure)
                raise
            if flight is not mine:
                self._await(flight, limit_s)
        return self.made

    def _land(self, flight: Future[None], failure: BaseException | None) -> None:
        with self._lock:
            if self._flight is flight:
                self._flight = None
        if flight.done():
            return
        if failure is None:
            flight.set_result(None)
        else:
            flight.set_exception(failure)

    @staticmethod
    def _await(flight: Future[None], limit_s: float) -> None:
        try:
            failure = flight.exception(limit_s if math.isfinite(limit_s) else None)
        except FutureTimeoutError:
            raise DeadlineError(
                "the client was not ready within the deadline",
                waited_s=limit_s,
                last_words="another thread was still setting it up",
            ) from None
        # When Ctrl-C met the thread that made it, that is no answer for others: one of them takes over.
        if isinstance(failure, Exception):
            raise fresh(failure)

    def renew_after_fork(self) -> None:
        """Nobody finishes in a child what the parent had begun; what it had made is good."""
        self._lock = threading.Lock()
        self._flight = None
