"""The end of a process: the wait for calls that change something, then the end of sessions at the server.

The wait ends after `PENDING_LIMIT_S`, or with Ctrl-C. Then all sessions are finished at the same time, each
on the thread of its heartbeats, because a process that ends cannot start threads (since 3.12). `EXIT_LIMIT_S`
is the limit for all of them. Threads of this package do not delay the end: all are daemons.
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
from tinker_sync.runtime.pending import PENDING_LIMIT_S

EXIT_LIMIT_S: Final = 1.0

_log = logging.getLogger("tinker_sync.session")


class Finishable(Protocol):
    """A client with calls that have not ended, or with a session that the server keeps."""

    def settle(self, limit_s: float) -> None:
        """Wait for the calls that change something at the server."""

    def finish(
        self,
        status: Literal["success", "errored", "interrupted"],
        detail: str | None,
        limit_s: float,
        *,
        quiet: bool = False,
    ) -> threading.Event | None:
        """Begin to finish the session at the server. The returned event is set when that is done."""


class _Open:
    """The set of clients to settle and finish when the process ends. Thread-safe."""

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
        """Leave the parent's sessions to the parent."""
        self._lock = threading.Lock()
        self._members = weakref.WeakSet()


class Connected(Protocol):
    """A holder of connections."""

    def forget_idle(self) -> None:
        """Close the connections that no request uses."""


_open = _Open()
_connected: weakref.WeakSet[Connected] = weakref.WeakSet()


def remember(member: Finishable) -> None:
    """Settle and finish a client when the process ends."""
    _open.add(member)


def forget(member: Finishable) -> None:
    """Do not finish a client when the process ends, because it is finished already."""
    _open.discard(member)


def hang_up_at_exit(connected: Connected) -> None:
    """Close idle connections when the process ends, so that the garbage collector finds none open."""
    _connected.add(connected)


def how_it_ended() -> Literal["success", "errored", "interrupted"]:
    """Return the status of the program, from the exception that the interpreter keeps for tracebacks."""
    error = getattr(sys, "last_value", None)
    # At an interactive prompt, that exception did not end the program.
    if error is None or hasattr(sys, "ps1"):
        return "success"
    return "errored" if isinstance(error, Exception) else "interrupted"


@atexit.register
def finish_all() -> None:
    """Wait for calls that change something at a server, then finish all sessions.

    The wait and the end of the sessions have a limit each. Ctrl-C ends the wait at once.
    """
    try:
        status = how_it_ended()
        settle_until = time.monotonic() + PENDING_LIMIT_S
        for member in _open.all():
            member.settle(max(settle_until - time.monotonic(), 0.0))
        under_way = [member.finish(status, None, EXIT_LIMIT_S, quiet=True) for member in _open.all()]
        give_up_at = time.monotonic() + EXIT_LIMIT_S
        for done in under_way:
            if done is not None:
                done.wait(max(give_up_at - time.monotonic(), 0.0))
        for connected in list(_connected):
            connected.forget_idle()
        _embedded.stop_server()
    except BaseException:  # noqa: BLE001  # Ctrl-C ends the process at once, without a traceback
        _log.debug("the sessions could not be finished", exc_info=True)
