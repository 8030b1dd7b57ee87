"""Values that are made on first use: `Once` holds one, `Shared` one for each key.

Any thread may ask. No lock is held while a value is made.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, MutableMapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Generic, TypeVar

from tinker_sync.errors import DeadlineError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import fresh

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


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


class Shared(Generic[K, T]):
    """One value for each key. Threads that ask for a missing value at once each make one; the first to be
    stored is returned to all of them. Thread-safe.

    >>> shared = Shared({})
    >>> shared.get("a", lambda: 1), shared.get("a", lambda: 2)
    (1, 1)

    Args:
        values: holds the values; a weak dictionary keeps a value as long as it is used.
        is_usable: return False for a value that has to be replaced. It is called under the lock.
        discard: receives a value that was made for nothing.
    """

    def __init__(
        self,
        values: MutableMapping[K, T],
        *,
        is_usable: Callable[[T], bool] = lambda _: True,
        discard: Callable[[T], object] = lambda _: None,
    ) -> None:
        self._lock = threading.Lock()
        self._values = values  # guarded by _lock
        self._is_usable = is_usable
        self._discard = discard
        _fork.renew_in_child(self)

    def get(self, key: K, make: Callable[[], T]) -> T:
        """Return the value of a key; `make` makes it where there is none yet."""
        value = self._find_or_keep(key, None)
        if value is not None:
            return value
        made = make()
        value = self._find_or_keep(key, made)
        assert value is not None  # noqa: S101  # a value was offered
        if value is not made:
            self._discard(made)
        return value

    def _find_or_keep(self, key: K, made: T | None) -> T | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None and self._is_usable(value):
                return value
            if made is not None:
                self._values[key] = made
            return made

    def renew_after_fork(self) -> None:
        """Replace the lock: a thread of the parent may hold it."""
        self._lock = threading.Lock()
