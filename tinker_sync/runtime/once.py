"""A value that is made on first use, by one thread while the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import fresh

T = TypeVar("T")


class Once(Generic[T]):
    """Holds what `make` made. A failure is not remembered: the next call tries again. Thread-safe.

    >>> once = Once(lambda: 7)
    >>> once.made, once.get(), once.made
    (None, 7, 7)
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._flight: Future[T] | None = None  # guarded by _lock; who makes it, or has made it
        self.made: T | None = None
        """The value, or None before there is one; never waits."""
        _fork.renew_in_child(self)

    def get(self) -> T:
        """The value; whoever comes first makes it, whoever comes meanwhile waits.

        Raises:
            Exception: what `make` raised, to all who waited for this try.
        """
        with self._lock:
            mine = self._flight is None
            flight = self._flight = self._flight or Future()
        if mine:
            return self._fly(flight)
        return self._wait(flight)

    @staticmethod
    def _wait(flight: Future[T]) -> T:
        failure = flight.exception()
        if failure is None:
            return flight.result()
        raise fresh(failure)

    def _fly(self, flight: Future[T]) -> T:
        try:
            value = self._make()
        except BaseException as failure:
            with self._lock:
                self._flight = None
            flight.set_exception(failure)
            raise
        self.made = value
        flight.set_result(value)
        return value

    def renew_after_fork(self) -> None:
        """Nobody finishes in a child what the parent had begun; what it had made is good."""
        self._lock = threading.Lock()
        if self._flight is not None and not self._flight.done():
            self._flight = None
