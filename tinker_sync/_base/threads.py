"""`DaemonThread`: a thread that Ctrl-C and signal handlers cannot prevent from running once it has started.

`threading.Thread.start` waits for the new thread with a `threading.Event`. If a KeyboardInterrupt leaves that
wait at the wrong moment, the lock of the event stays taken, and the new thread blocks for ever, before its
first step. Only the main thread gets signals, so another thread calls `start` in its place.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Iterable
from typing import Any


class DaemonThread(threading.Thread):
    """A thread for which the end of the process does not wait, and which is safe to start on any thread.

    >>> thread = DaemonThread(print, "greeter", ["hello"])
    >>> thread.start(), thread.join()
    hello
    (None, None)

    Args:
        target: the function that the thread calls.
        name: the name of the thread.
        args: the arguments of `target`.
    """

    def __init__(self, target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until it runs. If Ctrl-C ends this wait, the thread may start later.

        Raises:
            RuntimeError: the system starts no more threads, or the process is ending.
        """
        if threading.get_ident() != threading.main_thread().ident:
            super().start()
            return
        failures: list[BaseException] = []
        over = allocate_lock()
        over.acquire()

        def start() -> None:
            try:
                super(DaemonThread, self).start()
            except BaseException as failure:  # noqa: BLE001  # belongs to the thread that waits
                failures.append(failure)
            finally:
                over.release()

        start_new_thread(start, ())  # one step of the interpreter, which takes no lock in Python
        over.acquire()
        if failures:
            raise failures.pop()
