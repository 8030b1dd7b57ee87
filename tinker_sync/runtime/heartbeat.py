"""The heartbeats that keep a session alive, sent by a thread that does nothing else.

`step` does once what is due. The thread is `tinker-heartbeat`. What it calls should hold the client weakly,
so that the heartbeats of a dropped client end too. The thread ends with the job that is given to `stop`: when
a process ends, no new thread may start, but this one exists.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync._policy import NO_SUCH_CALL
from tinker_sync.errors import APIStatusError, TinkerError

PERIOD_S: Final = 10.0
WARN_AFTER_S: Final = 120.0
_WARN_EVERY_S: Final = 60.0
# So late that the thread cannot have been waiting for the network: this process did not let it run.
STALLED_S: Final = 5.0
# A 410 is certain. The others may come from a proxy, or from a machine that is new, so they count only if the
# server repeats them a while later.
_GONE: Final = 410
_DOUBTFUL: Final = (401, 404)
_CERTAIN_AFTER_S: Final = 5.0
# Not more often than this, however many failures ask for it.
_SOONEST_S: Final = 1.0

_log = logging.getLogger("tinker_sync.session")


class Listener(Protocol):
    """Receives news of a session, on the thread of its heartbeats."""

    def on_lost(self, error: TinkerError) -> None:
        """Take note that the server does not keep the session any more."""

    def on_found(self) -> None:
        """Take note that the server keeps the session after all."""

    def on_late(self, delay_s: float, reason: str) -> None:
        """Take note that a heartbeat was not sent when it was due."""


class Heartbeat:
    """The heartbeats of one session. `step` belongs to one thread, the rest to any.

    Args:
        beat: sends one; raises the error of the server or the network.
        listener: receives news of the session.
        upkeep: what else is due from time to time; False when the client is gone, which ends the thread.
        always_offered: whether the server surely has such a call; on another one, a 404 to the very first
            heartbeat only means that there is none.
        clock: what time it is.
        cpu: seconds of processor time this process has used.
    """

    def __init__(
        self,
        beat: Callable[[], object],
        listener: Listener,
        *,
        upkeep: Callable[[], bool] = lambda: True,
        always_offered: bool = True,
        period_s: float = PERIOD_S,
        clock: Clock = SYSTEM_CLOCK,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._beat = beat
        self._listener = listener
        self._upkeep = upkeep
        self._period_s = period_s
        self._clock = clock
        self._watch = _Watch(clock, cpu)
        # These belong to the thread.
        self._beating = True
        self._known = always_offered
        self._last_success_s = clock.now()
        self._warned_s: float | None = None
        self._refused_s: float | None = None
        self._lost = False
        # These belong to every thread.
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False  # written under _lock, read without
        self._last: Callable[[], object] | None = None  # guarded by _lock
        self._asked_s = clock.now()
        self._thread: threading.Thread | None = None
        self.ended = threading.Event()
        """Set when the thread has done all it will do."""

    def start(self) -> None:
        """Begin on a thread of its own."""
        self._thread = threading.Thread(target=self._loop, name="tinker-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, last: Callable[[], object] | None = None) -> None:
        """End the heartbeats, and run `last` on their thread. The first call counts."""
        with self._lock:
            if not self._stopping:
                self._last = last
                self._stopping = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def ask_soon(self) -> None:
        """Send the next heartbeat now, because a failure hints at the end of the session."""
        now = self._clock.now()
        if now - self._asked_s >= _SOONEST_S:
            self._asked_s = now
            self._wake.set()

    def step(self) -> bool:
        """Send a heartbeat and do what else is due. Return False when there will be no more."""
        delay_s, reason = self._watch.look()
        if reason:
            _log.warning(
                "a heartbeat is %.0f s late: %s; the server ends sessions that stay silent", delay_s, reason
            )
            self._listener.on_late(delay_s, reason)
        if self._beating:
            self._asked_s = self._clock.now()
            self._send()
        go_on = self._upkeep()
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
        except Exception as error:  # noqa: BLE001  # our own mistake must not end the session
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
            with self._lock:
                last, self._last = self._last, None
            if last is not None:
                last()
        finally:
            self.ended.set()

    def _await_turn(self) -> bool:
        """Sleep until the next heartbeat is due. Return False when there will be none."""
        self._clock.wait(self._wake, self._period_s)
        self._wake.clear()
        # Read after the flag is cleared: `stop` sets this one before it sets the flag again.
        return not self._stopping


class _Watch:
    """Notices that a thread did not run when it should have, and finds out why. For one thread."""

    def __init__(self, clock: Clock, cpu: Callable[[], float]) -> None:
        self._clock = clock
        self._cpu = cpu
        self.expect_in(0.0)

    def expect_in(self, period_s: float) -> None:
        """Expect the next `look` in so many seconds."""
        self._now_s, self._time_s, self._cpu_s = self._clock.now(), self._clock.time(), self._cpu()
        self._due_s = self._now_s + period_s

    def look(self) -> tuple[float, str]:
        """Return the delay and its reason; the reason is empty when `look` comes in time."""
        now_s = self._clock.now()
        late_s = now_s - self._due_s
        # The monotonic clock of most systems stands still while the machine sleeps, the other does not.
        asleep_s = (self._clock.time() - self._time_s) - (now_s - self._now_s)
        if asleep_s > STALLED_S:
            return asleep_s, f"this machine was asleep for {asleep_s:.0f} s, or its clock was set"
        if late_s <= STALLED_S:
            return late_s, ""
        busy_s = self._cpu() - self._cpu_s
        if busy_s >= late_s / 2:
            return late_s, f"this process held the interpreter lock for {late_s:.0f} s"
        return late_s, f"this process did not run for {late_s:.0f} s: it was stopped, or swapped out"
