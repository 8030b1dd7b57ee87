"""What stops a transfer: somebody gave it up, or closed the client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tinker_sync._clock import Clock
from tinker_sync.errors import TransferError
from tinker_sync.transfer.signed import Answer


class Control:
    """Whether a transfer goes on. Thread-safe.

    >>> control = Control()
    >>> control.stop()
    >>> control.refuse_stopped()
    Traceback (most recent call last):
        ...
    tinker_sync.errors.TransferError: the transfer was stopped; the same call goes on from here
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._reading: set[Answer] = set()  # guarded by _lock

    def stop(self) -> None:
        """End it soon. May be called twice."""
        self._stopped.set()
        with self._lock:
            reading = list(self._reading)
        for answer in reading:
            answer.interrupt()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def refuse_stopped(self) -> None:
        """Raise when `stop` was called.

        Raises:
            TransferError: that is so.
        """
        if self._stopped.is_set():
            raise TransferError("the transfer was stopped; the same call goes on from here")

    def pause(self, clock: Clock, seconds: float) -> None:
        """Wait, but not beyond a stop."""
        clock.wait(self._stopped, seconds)

    @contextmanager
    def reading(self, answer: Answer) -> Iterator[Answer]:
        """Have an answer interrupted by a stop while it is read; it is closed at the end."""
        with self._lock:
            self._reading.add(answer)
        try:
            with answer:
                yield answer
        finally:
            with self._lock:
                self._reading.discard(answer)
