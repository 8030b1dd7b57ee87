"""Clocks and waits: the present time, waits for an event with a timeout, and a signal without a lock.

Code that waits or measures takes a `Clock`, so tests can pass one that never sleeps. Each wait is for an
event, so a loop that must stop can be woken at once. Any thread may use `SYSTEM_CLOCK`.
"""

from __future__ import annotations

import sys
import threading
import time
from _thread import RLock as _RLock
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from datetime import datetime

# The longest uninterrupted wait of the main thread and of others; all systems support a day.
_SLICE_S: Final = 0.5
_LONGEST_S: Final = 86_400.0


def in_seconds(duration_s: float) -> str:
    """Format a duration for messages, with a suitable precision.

    >>> in_seconds(14.1938), in_seconds(299.9987), in_seconds(0.25), in_seconds(0)
    ('14.2 s', '300 s', '0.25 s', '0 s')
    """
    return f"{round(duration_s, 1 if duration_s >= 1 else 3):.10g} s"


def http_date(text: str | None) -> datetime | None:
    """Return the moment that a header names, in UTC if it has no time zone; None if it names no moment.

    >>> http_date("Thu, 01 Jan 1970 00:00:30 GMT").timestamp()
    30.0
    >>> http_date("Thu, 01 Jan 1970 00:00:99999999999999999999 GMT"), http_date(None)
    (None, None)
    """
    from datetime import timezone
    from email.utils import parsedate_to_datetime  # most programs read no date

    try:
        moment = parsedate_to_datetime(text or "")
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def slice_of(wait_s: float) -> float:
    """Return the length of the next part of a wait. The caller waits in such parts to the end of the wait.

    A signal interrupts a wait in progress, but not one that begins just after the signal. The main thread
    handles signals, so it waits in short slices and notices every Ctrl-C.
    """
    main = threading.current_thread() is threading.main_thread()
    return min(wait_s, _SLICE_S if main else _LONGEST_S)


class Clock(Protocol):
    """A source of time, which tests replace by one that never sleeps. Implementations are thread-safe."""

    def now(self) -> float:
        """Return monotonic seconds, for durations and deadlines; the zero point is arbitrary."""

    def time(self) -> float:
        """Return seconds since the epoch, for display and for comparison with a server's date."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set or `timeout_s` has passed; return True if the event is set."""

    def shorten(self, pause_s: float) -> float:
        """Return the length of a pause before a retry, which tests may shorten."""


class SystemClock:
    """The clock of this machine. It never changes, so any thread may use it.

    Args:
        pace: the factor for pauses. Deadlines and the silence of a server are not scaled.

    >>> SystemClock().wait(threading.Event(), 0), SystemClock(0.25).shorten(2.0)
    (False, 0.5)
    """

    def __init__(self, pace: float = 1.0) -> None:
        self._pace = pace

    # The functions of the interpreter without a wrapper: a sample reads the clock about forty times.
    now = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        while True:
            now_s = slice_of(max(timeout_s, 0.0))
            timeout_s -= now_s
            if event.wait(now_s):
                return True
            if timeout_s <= 0:
                return False

    def shorten(self, pause_s: float) -> float:
        return pause_s * self._pace


SYSTEM_CLOCK = SystemClock()


class Wake:
    """A signal that ends the next wait, or the wait under way, of one thread. Thread-safe.

    Unlike the `set` of a `threading.Event`, this one takes no lock that the thread may hold already. So
    Ctrl-C cannot leave a lock taken, and a signal handler or a finalizer may call it on top of a wait.

    >>> wake = Wake()
    >>> wake.set(), wake.set(), wake.wait(0), wake.wait(0)
    (None, None, True, False)
    """

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        """End the wait under way, or else the next one."""
        if self._lock.locked():
            try:  # noqa: SIM105  # `suppress` would be three more calls for each result
                self._lock.release()
            except RuntimeError:  # another thread has just set it
                pass

    def wait(self, timeout_s: float) -> bool:
        """Return True when `set` was called since the last wait, or False after `timeout_s`."""
        return self._lock.acquire(True, max(timeout_s, 0.0))


class _InterruptibleLock(_RLock):  # type: ignore[misc]  # final in the published types alone
    """A lock whose `with` block Ctrl-C cannot leave locked on Python 3.14.

    There, Ctrl-C may come after `with` has called a method of the interpreter that takes the lock, and before
    the block is protected. After a method in Python it does not come there, and this one gives the lock back.
    """

    def __enter__(self) -> bool:  # type: ignore[override]  # `with` passes no arguments
        try:
            self.acquire()
        except BaseException:
            with suppress(RuntimeError):  # it was not taken yet
                self.release()
            raise
        return True


def make_lock() -> Any:
    """Return a lock whose `with` block releases it even if Ctrl-C comes while it is entered.

    >>> with make_lock():
    ...     pass
    """
    return _InterruptibleLock() if sys.version_info[:2] == (3, 14) else threading.Lock()


_pace: ContextVar[float | None] = ContextVar("tinker_sync pace", default=None)

pace_of_block: Final[Callable[[], float | None]] = _pace.get
"""Return the factor of the innermost `paced` block, or None outside of one."""


@contextmanager
def paced(pace: float) -> Iterator[None]:
    """Multiply the pauses of clients that this thread makes in the block by `pace`. For tests.

    >>> with paced(0.01):
    ...     pace_of_block()
    0.01
    """
    token = _pace.set(pace)
    try:
        yield
    finally:
        _pace.reset(token)
