"""Reports on the server's queues, for the log and for listeners.

The log gets the reports of paused queues: at most one line a minute for each kind of request and state,
however many requests wait. Listeners get every report, on the poller's thread or on a worker that helps it,
with no lock held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.runtime import _fork
from tinker_sync.runtime.retrieval import QueueNotice
from tinker_sync.types.future import QueueState

LOG_EVERY_S: Final = 60.0
_NO_REASON: Final = {
    QueueState.PAUSED_RATE_LIMIT: "too many requests of this kind are under way for your account",
    QueueState.PAUSED_CAPACITY: "the service is short of capacity at the moment",
}

_log = logging.getLogger("tinker_sync.queue")


class QueueReport(NamedTuple):
    """A report of the server on the queue of a request that is not done.

    >>> QueueReport(QueueState.PAUSED_CAPACITY, None, "Sample", "req-1").state.paused
    True
    """

    state: QueueState
    reason: str | None
    """The reason in the server's words, or the name of a state that this package does not know."""
    request_type: str
    request_id: str


Listener = Callable[[QueueReport], object]


class Notices:
    """A distributor of reports on queues to the log and to listeners. Thread-safe."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_at: dict[tuple[str, QueueState | None], float] = {}  # guarded by _lock
        self._listeners: tuple[Listener, ...] = ()  # replaced, never changed
        _fork.renew_in_child(self)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Add a listener that gets every report. Return a function that removes it."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(kept for kept in self._listeners if kept is not listener)

        return stop

    def publish(self, notice: QueueNotice, request_type: str, request_id: str) -> None:
        """Pass a report to every listener.

        If the queue is paused, also log the report, at most once a minute for each kind of request and state.
        An exception of a listener is logged and not raised.
        """
        report = QueueReport(notice.state, notice.reason, request_type, request_id)
        if report.state.paused:
            self._log(report)
        for listener in self._listeners:
            try:
                listener(report)
            except Exception:  # noqa: BLE001  # the listener is the user's code
                _log.exception("an observer of queue states failed")

    def log_trouble(self, request_type: str, words: str) -> None:
        """Log that polls for results keep failing, at most once a minute for each kind of request."""
        if self._is_due((request_type, None)):
            _log.warning("polls for a result of %s keep failing: %s; still trying", request_type, words)

    def _is_due(self, key: tuple[str, QueueState | None]) -> bool:
        now = self._clock.now()
        with self._lock:
            logged_at = self._logged_at.get(key)
            if logged_at is not None and now - logged_at < LOG_EVERY_S:
                return False
            self._logged_at[key] = now
        return True

    def _log(self, report: QueueReport) -> None:
        if not self._is_due((report.request_type, report.state)):
            return
        reason = report.reason or _NO_REASON.get(report.state, "the server gave no reason")
        _log.warning("%s requests are paused (%s): %s; waiting", report.request_type, report.state, reason)

    def renew_after_fork(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()
