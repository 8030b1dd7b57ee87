"""The wait for a call in an asyncio loop. The first `await` of a call loads this module.

Threads: the thread of the loop runs all of this, except that the thread that ends a call wakes the loop.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.runtime.futures import WaitTimeout

if TYPE_CHECKING:
    from tinker_sync.runtime.futures import APIFuture

# The longest delay before an interrupt reaches a notebook cell that awaits a future.
_WAKE_S: Final = 0.25

if sys.version_info >= (3, 11):
    AwaitTimeout = TimeoutError
else:

    class AwaitTimeout(WaitTimeout, asyncio.TimeoutError):
        """The error of an `await` that takes too long, for Python 3.10.

        There, asyncio has a timeout exception of its own. This class is that exception and `WaitTimeout`.
        """


async def wait_for_end(future: APIFuture[Any], timeout: float | None) -> None:
    """Return when a call has ended or the time is over, after a turn of the other tasks of the loop.

    Args:
        future: the future of the call.
        timeout: the longest wait in seconds; None for no limit.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()

    def arrive() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def announce(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no task waits there
            loop.call_soon_threadsafe(arrive)

    if timeout is not None:
        timer = loop.call_later(timeout, arrive)
        arrived.add_done_callback(lambda _: timer.cancel())
    if "ipykernel" in sys.modules and threading.current_thread() is threading.main_thread():
        _pulses.setdefault(loop, _Pulse()).follow(loop, arrived)
    future._when_done(announce)
    await arrived


class _Pulse:
    """A timer that wakes the loop of a notebook regularly while its main thread awaits futures.

    The kernel cancels a cell from a signal handler, which a sleeping loop does not notice by itself. Only the
    thread of the loop uses this object.
    """

    def __init__(self) -> None:
        self._awaited = 0
        self._beats = False

    def follow(self, loop: Any, arrived: Any) -> None:
        """Wake the loop regularly until the future `arrived` is done or cancelled."""
        self._awaited += 1
        arrived.add_done_callback(self._leave)
        if not self._beats:
            self._beats = True
            loop.call_later(_WAKE_S, self._beat, loop)

    def _leave(self, _: Any) -> None:
        self._awaited -= 1

    def _beat(self, loop: Any) -> None:
        self._beats = self._awaited > 0
        if self._beats:
            loop.call_later(_WAKE_S, self._beat, loop)


_pulses: Final[weakref.WeakKeyDictionary[Any, _Pulse]] = weakref.WeakKeyDictionary()
