"""`PendingTable`: the promises of the server and who waits for each.

Send workers add, the poller looks and takes, any thread closes. The table knows nothing of how answers are
fetched; what a waiter is beyond `set_exception` is the business of those who use it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from tinker_sync.errors import TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import fresh

# Completions that overtook the answer to the send which they complete. That takes milliseconds, so a few are
# enough; the bound is for servers that report ids nobody here ever asked for.
MAX_EARLY = 4096


class Waiter(Protocol):
    """Who waits for a promise; every future is one."""

    def set_exception(self, exception: BaseException, /) -> object:
        """End with a failure; `InvalidStateError` when it has ended already."""


WaiterT = TypeVar("WaiterT", bound=Waiter)


class PendingTable(Generic[WaiterT]):
    """Waiters for what the server still owes us, by request id. Thread-safe.

    >>> from concurrent.futures import Future
    >>> table = PendingTable()
    >>> future = Future()
    >>> table.add("req-1", future), table.waiting()
    (True, ['req-1'])
    >>> table.take("req-1") is future, len(table)
    (True, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, WaiterT] = {}  # guarded by _lock
        self._early: dict[str, Any] = {}  # guarded by _lock; completions by request id, oldest first
        self._failure: Exception | None = None  # guarded by _lock; set once, final
        _fork.renew_in_child(self)

    def add(self, request_id: str, waiter: WaiterT) -> bool:
        """Have `waiter` wait for this promise. False when it will not: the table is closed, or somebody waits
        for the same promise already; the waiter has failed then.

        >>> from concurrent.futures import Future
        >>> PendingTable().add("req-1", Future())
        True
        """
        with self._lock:
            failure = self._failure
            if failure is None and request_id in self._waiting:
                failure = TinkerError(f"the server gave the request id {request_id} to two requests")
            if failure is None:
                self._waiting[request_id] = waiter
        if failure is None:
            return True
        _fail(waiter, fresh(failure))
        return False

    def take(self, request_id: str) -> WaiterT | None:
        """Remove and return who waits for this promise; None when nobody does (any more).

        >>> PendingTable().take("req-1") is None
        True
        """
        with self._lock:
            return self._waiting.pop(request_id, None)

    def complete(self, request_id: str, completion: Any) -> WaiterT | None:
        """A promise is known to be fulfilled: who waits for it, to be told. If nobody does yet, the
        completion is kept for `early`; the oldest of too many are dropped, and their waiters then ask for
        themselves.

        >>> table = PendingTable()
        >>> table.complete("req-1", "finished"), table.early("req-1")
        (None, 'finished')
        """
        with self._lock:
            waiter = self._waiting.get(request_id)
            if waiter is None and self._failure is None:
                self._early[request_id] = completion
                if len(self._early) > MAX_EARLY:
                    del self._early[next(iter(self._early))]
            return waiter

    def early(self, request_id: str) -> Any:
        """Take the completion that came before its waiter; None when there was none. To be asked right after
        `add`.

        >>> PendingTable().early("req-1") is None
        True
        """
        with self._lock:
            return self._early.pop(request_id, None)

    def waiting(self) -> list[str]:
        """The request ids that are waited for, oldest first.

        >>> PendingTable().waiting()
        []
        """
        with self._lock:
            return list(self._waiting)

    def close(self, failure: Exception) -> None:
        """Fail everybody who waits, and whoever comes later, with `failure`. The first close counts.

        >>> PendingTable().close(TinkerError("closed"))
        """
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            doomed, self._waiting, self._early = list(self._waiting.values()), {}, {}
        # The lock is free: callbacks of users run in here.
        _fail_all(doomed, failure)

    def renew_after_fork(self) -> None:
        """The parent's promises are fetched by the parent."""
        self._lock = threading.Lock()
        self._waiting, self._early = {}, {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting)

    def __repr__(self) -> str:
        with self._lock:
            closed = ", closed" if self._failure is not None else ""
            return f"<PendingTable {len(self._waiting)} waiting, {len(self._early)} early{closed}>"


def _fail_all(waiters: Iterable[Waiter], failure: Exception) -> None:
    for waiter in waiters:
        _fail(waiter, fresh(failure))


def _fail(waiter: Waiter, failure: Exception) -> None:
    with suppress(InvalidStateError):  # it has ended meanwhile, most likely by a cancel
        waiter.set_exception(failure)
