"""The calls of one client that have not ended: whoever closes the client ends them, so that nobody waits for
ever, and whoever wants to know hears which of them failed.

Without a lock: adding to a set, taking from it and copying it are each one step of the interpreter. What is
added while the client is being closed is either in the copy or sees the failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import fresh
from tinker_sync.runtime.futures import APIFuture


class Unfinished:
    """Futures that are to end with their client. Thread-safe.

    >>> from tinker_sync.errors import ClientClosedError
    >>> unfinished = Unfinished(report=lambda failure: print(type(failure).__name__))
    >>> future = APIFuture()
    >>> unfinished.add(future)
    >>> unfinished.close(ClientClosedError())
    ClientClosedError
    >>> future.done(), len(unfinished)
    (True, 0)
    """

    def __init__(self, report: Callable[[BaseException], object] = lambda _: None) -> None:
        """Begin with none.

        Args:
            report: told of each failure, inline; must be quick and not raise.
        """
        self._report = report
        self._futures: set[APIFuture[Any]] = set()
        self._failure: Exception | None = None  # set once, final
        _fork.renew_in_child(self)

    def add(self, future: APIFuture[Any]) -> None:
        """Look after a future until it ends."""
        self._futures.add(future)
        future.when_done(self._ended)
        if self._failure is not None:
            future.fail(fresh(self._failure))

    def close(self, failure: Exception) -> None:
        """Fail all there are, and whatever comes later. The first close counts."""
        if self._failure is None:
            self._failure = failure
        for future in list(self._futures):
            future.fail(fresh(self._failure))

    def renew_after_fork(self) -> None:
        """The parent's calls end in the parent."""
        self._futures = set()

    def __len__(self) -> int:
        return len(self._futures)

    def _ended(self, future: APIFuture[Any]) -> None:
        self._futures.discard(future)
        if not future.cancelled():
            failure = future.exception()
            if failure is not None:
                self._report(failure)
