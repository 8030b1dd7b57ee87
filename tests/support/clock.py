"""A clock that tests advance."""

from __future__ import annotations

import threading

# The longest time for which a test waits for another thread before it fails.
PATIENCE_S = 120.0
# A waiting thread checks its event and the clock this often, because it cannot wait for both.
_LOOK_S = 0.002


class FakeClock:
    """A `Clock` that never sleeps. Thread-safe.

    By default, `wait` advances the clock by its whole timeout and returns, so a retry loop runs at full
    speed, and `waits` has the timeouts. With `automatic=False`, `wait` blocks until `advance` reaches the end
    of its timeout or its event is set; `await_waiters` returns when a thread is in `wait`.

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
        """The timeouts of all calls of `wait`, in order."""
        with self._changed:
            return list(self._waits)

    def advance(self, seconds: float) -> None:
        """Advance both `now` and `time`. Threads in `wait` return if their timeout is over."""
        with self._changed:
            self._advance_locked(seconds)

    def shift_date(self, seconds: float) -> None:
        """Advance `time` alone, as if somebody set the clock of the machine."""
        with self._changed:
            self._time_s += seconds

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

    def shorten(self, pause_s: float) -> float:
        return pause_s

    def await_waiters(self, count: int = 1) -> None:
        """Return when `count` threads are in `wait`. Use it with `automatic=False`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._parked >= count, PATIENCE_S):
                raise AssertionError(f"{count} waiters expected, {self._parked} came")

    def _advance_locked(self, seconds: float) -> None:
        self._now_s += seconds
        self._time_s += seconds
        self._changed.notify_all()


class QuickClock(FakeClock):
    """A clock that makes pauses a hundred times shorter."""

    def shorten(self, pause_s: float) -> float:
        return pause_s / 100
