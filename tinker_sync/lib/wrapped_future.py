"""`AwaitableConcurrentFuture`: an `APIFuture` over a standard future, for the doubles of clients in tests."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from tinker_sync.runtime.futures import APIFuture

T = TypeVar("T")


class AwaitableConcurrentFuture(APIFuture[T]):
    """An `APIFuture` that ends as another future does. A cancel is passed on to that future. Thread-safe.

    The calls of this package return an `APIFuture` that wraps no other future. Code that stands in for a
    client, such as a fake in a test, makes its results with this class.

    >>> from concurrent.futures import Future
    >>> answer = Future()
    >>> future = AwaitableConcurrentFuture(answer)
    >>> answer.set_result(7)
    >>> future.result(), future.future() is answer
    (7, True)
    """

    def __init__(self, future: Future[T]) -> None:
        """Make a future that follows `future`, which may have ended already."""
        super().__init__()
        self._future = future
        future.add_done_callback(self._end_as)

    def _end_as(self, ended: Future[T]) -> None:
        if ended.cancelled():
            super().cancel()
        elif (failure := ended.exception()) is not None:
            self.fail(failure)
        else:
            self.resolve(ended.result())

    def future(self) -> Future[T]:  # type: ignore[override]  # the base class returns itself, an `APIFuture`
        """Return the wrapped future."""
        return self._future

    def running(self) -> bool:
        """Return True if the wrapped future is running."""
        return self._future.running()

    def cancel(self) -> bool:
        """Cancel the wrapped future, and so this one. Return False if it is running or has a result."""
        return self._future.cancel()
