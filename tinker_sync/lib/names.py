"""Names of the reference client for what has another name, or no separate name, in this package.

`AwaitableConcurrentFuture` is for the doubles of clients in scripts' tests.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from tinker_sync.clients.sampling import SamplingClient as BackcompatSamplingClientFuture
from tinker_sync.clients.training import TrainingClient as BackcompatTrainingClientFuture
from tinker_sync.errors import APIConnectionError as _TransportError
from tinker_sync.runtime.answers import merge_outputs as combine_fwd_bwd_output_results
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.futures import APIFuture as _APIFuture
from tinker_sync.types._console import api_key_url as api_key_console_url
from tinker_sync.types._console import checkpoint_url as checkpoint_console_url
from tinker_sync.types._console import new_api_key_url as new_api_key_console_url
from tinker_sync.types._console import playground_url as checkpoint_playground_url
from tinker_sync.types._console import session_url as session_console_url
from tinker_sync.types._console import sessions_url as sessions_console_url
from tinker_sync.types._console import training_run_url as training_run_console_url

__all__ = [
    "AwaitableConcurrentFuture",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "_APIFuture",
    "_TransportError",
    "api_key_console_url",
    "checkpoint_console_url",
    "checkpoint_playground_url",
    "combine_fwd_bwd_output_results",
    "new_api_key_console_url",
    "session_console_url",
    "sessions_console_url",
    "training_run_console_url",
]

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
