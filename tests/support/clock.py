"""A clock that tests turn by hand."""

from __future__ import annotations

import threading

# How long a test may wait for a thread to arrive somewhere before we call it a hang.
PATIENCE_S = 120.0
# A thread cannot wait for two things; a parked waiter looks this often for its event and for `advance`.
_LOOK_S = 0.002


class FakeClock:
    """A `Clock` that never sleeps. Thread-safe.

    By default `wait` advances the clock by the whole timeout and returns, so a retry loop runs at full speed
    and `waits` lists how long it would have slept. With `automatic=False` a waiter parks until `advance`
    reaches its deadline or its event is set; `await_waiters` returns when it has arrived.

    >>> clock = FakeClock()
    >>> clock.wait(threading.Event(), 2.5), clock.now(), clock.waits
    (False, 1002.5, [2.5])
    """

    def __init__(
        self, now_s: float = 1000.0, time_s: float = 1_750_000_000.0, *, automatic: bool = True
    ) -> None:
        self.automatic = automatic
        self._changed = threading.Condition()
        self._now_s = now_s  # guarded by _changed
        self._time_s = time_s  # guarded by _changed
        self._parked = 0  # guarded by _changed
        self._waits: list[float] = []  # guarded by _changed

    def now(self) -> float:
        with self._changed:
            return self._now_s

    def time(self) -> float:
        with self._changed:
            return self._time_s

    @property
    def waits(self) -> list[float]:
        """The timeouts asked for, in order."""
        with self._changed:
            return list(self._waits)

    def advance(self, seconds: float) -> None:
        """Move both clocks forward; parked waiters whose time has come return."""
        with self._changed:
            self._advance_locked(seconds)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        with self._changed:
            self._waits.append(timeout_s)
            if event.is_set():
                return True
            if self.automatic:
                self._advance_locked(max(timeout_s, 0.0))
                return False
            deadline_s = self._now_s + timeout_s
            self._parked += 1
            self._changed.notify_all()
        try:
            while not event.wait(_LOOK_S):
                if self.now() >= deadline_s:
                    return event.is_set()
            return True
        finally:
            with self._changed:
                self._parked -= 1
                self._changed.notify_all()

    def await_waiters(self, count: int = 1) -> None:
        """Return once `count` threads are parked in `wait` (only with `automatic=False`)."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._parked >= count, PATIENCE_S):
                raise AssertionError(f"{count} waiters expected, {self._parked} came")

    def _advance_locked(self, seconds: float) -> None:
        self._now_s += seconds
        self._time_s += seconds
        self._changed.notify_all()
