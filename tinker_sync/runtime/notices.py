"""What servers say of their queues, told to whoever asked to hear it.

One log line a minute for each kind of request and state, whatever the number of requests that wait; observers
hear every notice, on a worker thread, never under a lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from attrs import frozen

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.runtime import _fork
from tinker_sync.runtime.retrieval import QueueNotice

LOG_EVERY_S: Final = 60.0
_NO_REASON: Final = {
    "paused_rate_limit": "too many requests of this kind are under way for your account",
    "paused_capacity": "the service is short of capacity at the moment",
}

_log = logging.getLogger("tinker_sync.queue")


@frozen
class QueueState:
    """The server's word on a request that is not done.

    >>> QueueState("paused_capacity", None, "Sample", "req-1").state
    'paused_capacity'
    """

    state: str
    """"active", "paused_capacity", "paused_rate_limit", or what a newer server says."""
    reason: str | None
    request_type: str
    request_id: str


Listener = Callable[[QueueState], object]


class Notices:
    """Passes queue states on. Thread-safe."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._logged_at: dict[tuple[str, str], float] = {}  # guarded by _lock
        self._listeners: tuple[Listener, ...] = ()  # replaced, never changed
        _fork.renew_in_child(self)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with every queue state; call what is returned to stop that."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(kept for kept in self._listeners if kept is not listener)

        return stop

    def publish(self, notice: QueueNotice, request_type: str, request_id: str) -> None:
        """Tell everybody. What a listener raises is logged and harms nothing."""
        state = QueueState(notice.state, notice.reason, request_type, request_id)
        if notice.paused:
            self._log(state)
        for listener in self._listeners:
            try:
                listener(state)
            except Exception:  # noqa: BLE001  # it is a user's
                _log.exception("an observer of queue states failed")

    def _log(self, state: QueueState) -> None:
        key, now = (state.request_type, state.state), self._clock.now()
        with self._lock:
            logged_at = self._logged_at.get(key)
            if logged_at is not None and now - logged_at < LOG_EVERY_S:
                return
            self._logged_at[key] = now
        reason = state.reason or _NO_REASON.get(state.state, "the server gave no reason")
        _log.warning("%s requests are paused (%s): %s; waiting", state.request_type, state.state, reason)

    def renew_after_fork(self) -> None:
        """The lock may have been held in the parent."""
        self._lock = threading.Lock()
