"""Time as an argument: what is it now, and wait for something at most so long.

Everything that waits or measures takes a `Clock`, so a test can hand in one that never sleeps. Waiting is
always waiting *for an event*: a loop that must stop can then be woken at once. Any thread may use
`SYSTEM_CLOCK`.
"""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

# What the main thread waits for at once, and what others do: as much as any system can.
_SLICE_S: Final = 0.5
_LONGEST_S: Final = 86_400.0


def in_seconds(duration_s: float) -> str:
    """A duration as texts say it: as exact as helps.

    >>> in_seconds(14.1938), in_seconds(299.9987), in_seconds(0.25), in_seconds(0)
    ('14.2 s', '300 s', '0.25 s', '0 s')
    """
    return f"{round(duration_s, 1 if duration_s >= 1 else 3):.10g} s"


def slice_of(wait_s: float) -> float:
    """How much of a wait to do at once; the caller comes back for the rest.

    A signal interrupts only what is under way: one that comes just before a wait begins would not be noticed
    before its end. The main thread, which alone is told of signals, waits in slices, so no Ctrl-C is lost.
    """
    main = threading.current_thread() is threading.main_thread()
    return min(wait_s, _SLICE_S if main else _LONGEST_S)


class Clock(Protocol):
    """A source of time.  Implementations are thread-safe."""

    def now(self) -> float:
        """Monotonic seconds, for durations and deadlines; the zero point means nothing."""

    def time(self) -> float:
        """Seconds since the epoch, for what is shown or compared with a server's date."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set or `timeout_s` has passed; True when the event is set."""


class SystemClock:
    """The clock of this machine.  Has no state, so any thread may use it.

    >>> SystemClock().wait(threading.Event(), 0)
    False
    """

    def now(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        while True:
            now_s = slice_of(max(timeout_s, 0.0))
            timeout_s -= now_s
            if event.wait(now_s):
                return True
            if timeout_s <= 0:
                return False


SYSTEM_CLOCK = SystemClock()
