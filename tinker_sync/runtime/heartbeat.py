"""The heartbeats that keep a session alive, and the thread that sends them.

The thread is `tinker-heartbeat`; its loop calls `step` when a heartbeat is due. The functions given to
`Heartbeat` should refer to the client weakly, so that the heartbeats end with a client that is
garbage-collected. The last job of the thread is the function given to `stop`. This works at the end of a
process too, when no new thread may start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.log import Log
from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync.errors import APIStatusError, TinkerError
from tinker_sync.runtime.workers import no_thread

PERIOD_S: Final = 10.0
WARN_AFTER_S: Final = 120.0
_WARN_EVERY_S: Final = 60.0
# A delay that the network cannot explain: this process did not let the thread run.
STALLED_S: Final = 5.0
# A 410 certainly means that the session is gone. The doubtful statuses may come from a proxy or from a new
# machine of the server, so they count only if the server repeats them a while later.
_GONE: Final = 410
_DOUBTFUL: Final = (401, 404)
_CERTAIN_AFTER_S: Final = 5.0
# The shortest time between heartbeats, even if many failures ask for one.
_SOONEST_S: Final = 1.0

_log = Log("tinker_sync.session")


class Listener(Protocol):
    """A receiver of the events of a session, called on the thread of its heartbeats."""

    def on_lost(self, error: TinkerError) -> None:
        """Take note that the server has dropped the session."""

    def on_found(self) -> None:
        """Take note that the server keeps the session after all."""

    def on_late(self, delay_s: float, reason: str) -> None:
        """Take note that a heartbeat is `delay_s` seconds late, for a reason given in words."""


class Heartbeat:
    """The heartbeats of one session. One thread calls `step`; any thread may call the other methods.

    Args:
        beat: sends a heartbeat; raises the error of the server or the network.
        listener: receives the events of the session.
        refresh_if_due: begins the other periodic work; returns False when the client is gone, which ends the
            thread.
        always_offered: True if the server certainly offers heartbeats; if False, a 404, 405 or 501 before the
            first success means that the server has no such call.
        period_s: the time between two heartbeats.
        clock: measures time.
        cpu: returns the seconds of processor time that this process has used.
    """

    def __init__(
        self,
        beat: Callable[[], object],
        listener: Listener,
        *,
        refresh_if_due: Callable[[], bool] = lambda: True,
        always_offered: bool = True,
        period_s: float = PERIOD_S,
        clock: Clock = SYSTEM_CLOCK,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._beat = beat
        self._listener = listener
        self._refresh_if_due = refresh_if_due
        self._period_s = period_s
        self._clock = clock
        self._watch = _DelayDetector(clock, cpu)
        # Only the heartbeat thread uses these attributes.
        self._beating = True
        self._known = always_offered
        self._last_success_s = clock.now()
        self._warned_s: float | None = None
        self._refused_s: float | None = None
        self._lost = False
        # Any thread may use these attributes.
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False  # written under _lock, read without
        self._last: Callable[[], object] | None = None  # guarded by _lock
        self._asked_s = clock.now()
        self._thread: threading.Thread | None = None
        self.ended = threading.Event()
        """Set when the heartbeats have ended and the function given to `stop` has returned."""

    def start(self) -> None:
        """Start the thread. If the process is ending and allows no new thread, send no heartbeats.

        Raises:
            TinkerError: the system gives no more threads.
        """
        thread = threading.Thread(target=self._loop, name="tinker-heartbeat", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if threading.main_thread().is_alive():
                raise no_thread(error) from error
        else:
            self._thread = thread

    def stop(self, last: Callable[[], object] | None = None) -> None:
        """End the heartbeats. The thread then calls `last`; without a thread, this method does.

        Only the first call has an effect.
        """
        with self._lock:
            first = not self._stopping
            if first:
                self._last = last
                self._stopping = True
        self._wake.set()
        if first and self._thread is None:
            self._end()

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of the thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def beat_soon(self) -> None:
        """Make the thread send the next heartbeat now, unless the last one is less than a second old.

        For a failed call, which may mean that the session is lost.
        """
        now = self._clock.now()
        if now - self._asked_s >= _SOONEST_S:
            self._asked_s = now
            self._wake.set()

    def step(self) -> bool:
        """Send a heartbeat, if the server still takes them, and begin the other periodic work.

        Before that, report a delay of more than `STALLED_S`.

        Return False if the client is gone, so that the thread ends.
        """
        delay_s, reason = self._watch.look()
        if reason:
            _log.warning(
                "a heartbeat is %.0f s late: %s; the server ends sessions that stay silent", delay_s, reason
            )
            self._listener.on_late(delay_s, reason)
        if self._beating:
            self._asked_s = self._clock.now()
            self._send()
        go_on = self._refresh_if_due()
        self._watch.expect_in(self._period_s)
        return go_on

    # -------------------------------------------------------------------------------------- one heartbeat

    def _send(self) -> None:
        try:
            self._beat()
        except APIStatusError as error:
            self._refused(error)
        except TinkerError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001  # an error in this package must not end the session
            _log.debug("a heartbeat could not be sent", exc_info=True)
            self._failed(error)
        else:
            self._succeeded()

    def _succeeded(self) -> None:
        self._known = True
        self._last_success_s = self._clock.now()
        self._refused_s = self._warned_s = None
        if self._lost:
            self._lost = False
            self._listener.on_found()

    def _refused(self, error: APIStatusError) -> None:
        if not self._known and error.status_code in NO_SUCH_CALL:
            _log.debug("this server knows no heartbeats: %s", error)
            self._beating = False
        elif error.status_code == _GONE:
            self._beating = False
            self._lose(error)
        elif error.status_code in _DOUBTFUL:
            now = self._clock.now()
            self._refused_s = now if self._refused_s is None else self._refused_s
            if now - self._refused_s >= _CERTAIN_AFTER_S:
                self._lose(error)
        else:
            self._failed(error)

    def _lose(self, error: TinkerError) -> None:
        if not self._lost:
            self._lost = True
            self._listener.on_lost(error)

    def _failed(self, error: Exception) -> None:
        now = self._clock.now()
        self._refused_s = None
        silent_s = now - self._last_success_s
        due = self._warned_s is None or now - self._warned_s >= _WARN_EVERY_S
        if silent_s > WARN_AFTER_S and due:
            self._warned_s = now
            _log.warning("no heartbeat has reached the server for %.0f s: %s", silent_s, error)
        else:
            _log.debug("a heartbeat failed: %s", error)

    # -------------------------------------------------------------------------------------- the thread

    def _loop(self) -> None:
        try:
            self._watch.expect_in(self._period_s)
            while self._await_turn() and self.step():
                pass
        finally:
            self._end()

    def _end(self) -> None:
        try:
            with self._lock:
                last, self._last = self._last, None
            if last is not None:
                last()
        finally:
            self.ended.set()

    def _await_turn(self) -> bool:
        """Sleep until the next heartbeat is due. Return False if no more heartbeats follow."""
        self._clock.wait(self._wake, self._period_s)
        self._wake.clear()
        # This read follows the clearing of `_wake`; `stop` sets `_stopping` before it sets `_wake`.
        return not self._stopping


class _DelayDetector:
    """A detector of delays of the heartbeat thread, and of the reasons of the delays. For one thread."""

    def __init__(self, clock: Clock, cpu: Callable[[], float]) -> None:
        self._clock = clock
        self._cpu = cpu
        self.expect_in(0.0)

    def expect_in(self, period_s: float) -> None:
        """Expect the next `look` in `period_s` seconds."""
        self._now_s, self._time_s, self._cpu_s = self._clock.now(), self._clock.time(), self._cpu()
        self._due_s = self._now_s + period_s

    def look(self) -> tuple[float, str]:
        """Return the delay and its reason; the reason is empty for a delay of at most `STALLED_S`."""
        now_s = self._clock.now()
        late_s = now_s - self._due_s
        # On most systems the monotonic clock stops while the machine sleeps; the wall clock does not.
        asleep_s = (self._clock.time() - self._time_s) - (now_s - self._now_s)
        if asleep_s > STALLED_S:
            return asleep_s, f"this machine was asleep for {asleep_s:.0f} s, or its clock was set"
        if late_s <= STALLED_S:
            return late_s, ""
        busy_s = self._cpu() - self._cpu_s
        if busy_s >= late_s / 2:
            return late_s, f"this process held the interpreter lock for {late_s:.0f} s"
        return late_s, f"this process did not run for {late_s:.0f} s: it was stopped, or swapped out"
