"""Telling the server that a session is alive, on a thread that does nothing else.

`step` sends one heartbeat and says whether there will be another. The thread is `tinker-heartbeat`; what it
calls should hold the client weakly, so that a client that is dropped ends its session's heartbeats too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import APIStatusError, TinkerError

PERIOD_S: Final = 10.0
WARN_AFTER_S: Final = 120.0
# So late that the thread cannot have been waiting for the network: this process did not let it run.
_STALLED_S: Final = 5.0
_LOST: Final = (401, 404, 410)

_log = logging.getLogger("tinker_sync.session")


class Heartbeat:
    """The heartbeats of one session. `step` belongs to one thread, the rest to any.

    Args:
        beat: sends one; raises what the server or the network had to say.
        on_lost: told, once, that the session is gone and why.
        clock: what time it is.
    """

    def __init__(
        self,
        beat: Callable[[], object],
        on_lost: Callable[[TinkerError], object],
        *,
        period_s: float = PERIOD_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._beat = beat
        self._on_lost = on_lost
        self._period_s = period_s
        self._clock = clock
        self._last_success_s = clock.now()
        self._due_s = clock.now() + period_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin on a thread of its own."""
        self._thread = threading.Thread(target=self._loop, name="tinker-heartbeat", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 0.0) -> None:
        """End; a heartbeat under way ends with its connection."""
        self._stop.set()
        thread = self._thread
        if timeout_s and thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def step(self) -> bool:
        """One heartbeat; False when there will be no more."""
        late_s = self._clock.now() - self._due_s
        if late_s > _STALLED_S:
            _log.warning(
                "a heartbeat is %.0f s late: this process was stopped, asleep, or held the interpreter lock; "
                "the server ends sessions that stay silent",
                late_s,
            )
        try:
            self._beat()
        except APIStatusError as error:
            if error.status_code in _LOST:
                self._on_lost(error)
                return False
            self._failed(error)
        except TinkerError as error:
            self._failed(error)
        else:
            self._last_success_s = self._clock.now()
        self._due_s = self._clock.now() + self._period_s
        return True

    def _failed(self, error: TinkerError) -> None:
        silent_s = self._clock.now() - self._last_success_s
        if silent_s > WARN_AFTER_S:
            _log.warning("no heartbeat has reached the server for %.0f s: %s", silent_s, error)
        else:
            _log.debug("a heartbeat failed: %s", error)

    def _loop(self) -> None:
        while not self._clock.wait(self._stop, self._period_s):
            if not self.step():
                return
