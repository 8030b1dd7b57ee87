"""What waits until something exists: values that are made on first use, and calls on a client in the making.

`Lazy` holds one value, `Shared` one for each key; no lock is held while a value is made. `HeldCalls` keeps
the calls in order until the client is ready or fails. Any thread may call the methods.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, MutableMapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from tinker_sync._base import fork as _fork
from tinker_sync._base.api_errors import copy_exception
from tinker_sync._base.clock import make_lock
from tinker_sync.errors import APIConnectionError, DeadlineError, TinkerError

if TYPE_CHECKING:
    from tinker_sync.runtime.workers import Workers

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class _Try(NamedTuple):
    """A try to make a value: the future that ends with the try, and the time at which the try gives up."""

    ended: Future[None]
    deadline_at: float


class Lazy(Generic[T]):
    """A holder of a value, never None, that is made on first use. Thread-safe.

    A failure is not stored: the next call tries again.

    >>> lazy = Lazy()
    >>> lazy.value, lazy.get(lambda: 7), lazy.get(lambda: 8), lazy.value
    (None, 7, 7, 7)

    Args:
        now: returns the time of the clock to which deadlines belong.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # The try under way, by the generation of the process: a forked child has no thread that ends its
        # parent's. One thread at a time makes the value: the one whose `setdefault` has stored its try.
        self._flights: dict[int, _Try] = {}
        self.value: T | None = None
        """The value, or None before it is made. Reading it never waits."""

    def get(self, make: Callable[[], T], *, deadline_at: float = math.inf) -> T:
        """Return the value. The first thread that calls this makes it; other threads wait for that.

        Args:
            make: makes the value; must not call `get` of the same object.
            deadline_at: the time at which this method gives up the wait for another thread. If this thread
                makes the value, `make` must give up at that time itself.

        Raises:
            Exception: the exception of `make`, in every thread that waited for this try. After an
                `APIConnectionError`, a thread with a later deadline tries to make the value instead.
            DeadlineError: another thread had not made the value in time.
        """
        began_at = self._now()
        while self.value is None:
            mine = _Try(Future(), deadline_at)
            # Ctrl-C may interrupt this block at any point. The try under way must end in every case.
            try:
                flight = self._flights.setdefault(_fork.generation(), mine)
                if flight is mine:
                    if self.value is None:  # another try may have ended since the last look
                        self.value = make()
                    self._land(mine, None)
            except BaseException as failure:
                self._land(mine, failure)
                raise
            if flight is not mine:
                self._await(flight, began_at, deadline_at)
        return self.value

    def _land(self, flight: _Try, failure: BaseException | None) -> None:
        if self._flights.get(_fork.generation()) is flight:
            del self._flights[_fork.generation()]
        if flight.ended.done():
            return
        if failure is None:
            flight.ended.set_result(None)
        else:
            flight.ended.set_exception(failure)

    def _await(self, flight: _Try, began_at: float, deadline_at: float) -> None:
        left_s = max(deadline_at - self._now(), 0.0)
        try:
            failure = flight.ended.exception(left_s if math.isfinite(left_s) else None)
        except FutureTimeoutError:
            raise DeadlineError(
                "the client was not ready within the deadline",
                waited_s=deadline_at - began_at,
                last_words="another thread was still setting it up",
            ) from None
        # If Ctrl-C interrupted the thread that was making the value, one of the waiting threads takes over.
        # So does a thread that has more time than a try that found no answer in its time.
        more_time = isinstance(failure, APIConnectionError) and deadline_at > flight.deadline_at
        if isinstance(failure, Exception) and not more_time:
            raise copy_exception(failure)


class Shared(Generic[K, T]):
    """A holder of one value for each key. Thread-safe.

    Threads that ask for a missing value at the same time each make one. All of them get the first one stored.

    >>> shared = Shared({})
    >>> shared.get("a", lambda: 1), shared.get("a", lambda: 2)
    (1, 1)

    Args:
        values: the dictionary of the values; a weak dictionary keeps a value as long as it is used.
        is_usable: returns False for a value that must be replaced; called under the lock.
        discard: receives a value that was made but is not used.
    """

    def __init__(
        self,
        values: MutableMapping[K, T],
        *,
        is_usable: Callable[[T], bool] = lambda _: True,
        discard: Callable[[T], object] = lambda _: None,
    ) -> None:
        self._lock = make_lock()
        self._values = values  # guarded by _lock
        self._is_usable = is_usable
        self._discard = discard
        _fork.renew_in_child(self)

    def get(self, key: K, make: Callable[[], T]) -> T:
        """Return the value of a key; call `make` if the key has no usable value."""
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
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = make_lock()


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
