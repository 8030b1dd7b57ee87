"""What happens to open sessions when the process ends: the server is told, and not waited for.

All sessions are finished side by side, each on the thread of its heartbeats, since a process that ends may
start no more threads (3.12). `EXIT_LIMIT_S` is the limit for all. Nothing else holds the process up: every
thread of ours is a daemon.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
import weakref
from typing import Final, Literal, Protocol

from tinker_sync import _embedded
from tinker_sync.runtime import _fork

EXIT_LIMIT_S: Final = 1.0

_log = logging.getLogger("tinker_sync.session")


class Finishable(Protocol):
    """Something that can tell the server that its session is over."""

    def finish(
        self,
        status: Literal["success", "errored", "interrupted"],
        detail: str | None,
        limit_s: float,
        *,
        quiet: bool = False,
    ) -> threading.Event | None:
        """Begin to; the event is set when it is done."""


class _Open:
    """What has to be finished. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: weakref.WeakSet[Finishable] = weakref.WeakSet()  # guarded by _lock
        _fork.renew_in_child(self)

    def add(self, member: Finishable) -> None:
        with self._lock:
            self._members.add(member)

    def discard(self, member: Finishable) -> None:
        with self._lock:
            self._members.discard(member)

    def all(self) -> list[Finishable]:
        with self._lock:
            return list(self._members)

    def renew_after_fork(self) -> None:
        """The parent's sessions are finished by the parent."""
        self._lock = threading.Lock()
        self._members = weakref.WeakSet()


class Connected(Protocol):
    """A holder of connections."""

    def forget_idle(self) -> None:
        """Close those that no request uses."""


_open = _Open()
_connected: weakref.WeakSet[Connected] = weakref.WeakSet()


def remember(member: Finishable) -> None:
    """Finish this when the process ends."""
    _open.add(member)


def forget(member: Finishable) -> None:
    """It is finished."""
    _open.discard(member)


def hang_up_at_exit(connected: Connected) -> None:
    """Close the idle connections when the process ends, so that none is left to the garbage collector."""
    _connected.add(connected)


def how_it_ended() -> Literal["success", "errored", "interrupted"]:
    """What became of the program. The interpreter leaves an exception that ended it where tracebacks are
    printed from.
    """
    error = getattr(sys, "last_value", None)
    # At a prompt that is just the last one of many.
    if error is None or hasattr(sys, "ps1"):
        return "success"
    return "errored" if isinstance(error, Exception) else "interrupted"


@atexit.register
def finish_all() -> None:
    """Finish everything, within the limit."""
    try:
        status = how_it_ended()
        under_way = [member.finish(status, None, EXIT_LIMIT_S, quiet=True) for member in _open.all()]
        give_up_at = time.monotonic() + EXIT_LIMIT_S
        for done in under_way:
            if done is not None:
                done.wait(max(give_up_at - time.monotonic(), 0.0))
        for connected in list(_connected):
            connected.forget_idle()
        _embedded.stop_server()
    except BaseException:  # noqa: BLE001  # a second Ctrl-C means now; and nobody wants to read about it
        _log.debug("the sessions could not be finished", exc_info=True)
