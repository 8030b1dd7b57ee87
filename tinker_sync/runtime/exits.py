"""The end of a process: the wait for calls that change something, then the end of sessions at the server.

The wait takes at most `PENDING_LIMIT_S`, or `INTERRUPTED_LIMIT_S` if Ctrl-C ended the program. Then all
sessions are finished at the same time, each on the thread of its heartbeats, because a process that ends
cannot start threads (since Python 3.12). `EXIT_LIMIT_S` is the limit for all of them. After a Ctrl-C in these
steps, the remaining ones are left out. Threads of this package do not delay the end: all are daemons.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import Final, Literal, Protocol

from tinker_sync import _embedded
from tinker_sync._base import fork as _fork
from tinker_sync._base.log import Log

FinishStatus = Literal["success", "errored", "interrupted"]

PENDING_LIMIT_S: Final = 60.0
"""The longest wait for calls that change something, unless `close` gets another time."""
EXIT_LIMIT_S: Final = 1.0
INTERRUPTED_LIMIT_S: Final = 0.5
"""The longest wait for calls under way after Ctrl-C: the user wants to leave, and learns what may be lost."""

_log = Log("tinker_sync.session")


class Finishable(Protocol):
    """A client for which the end of the process waits, because of its calls or its session at the server."""

    def wait_for_changes(self, limit_s: float) -> None:
        """Wait at most `limit_s` for the calls that change something at the server."""

    def finish(
        self, status: FinishStatus, detail: str | None, limit_s: float, *, quiet: bool = False
    ) -> threading.Event | None:
        """Begin to finish the session at the server. Return an event that is set when this is done.

        Return None if there is no session. With `quiet`, log a failure at the debug level.
        """


class Connected(Protocol):
    """An object with connections to servers, of which some may be idle."""

    def forget_idle(self) -> None:
        """Close the connections that no request uses."""

    def renew_after_fork(self) -> None:
        """Drop the copies of the parent's connections. The parent's stay open."""


class _Open(_fork.Members[Finishable]):
    """The clients that the end of the process finishes. A forked child leaves them to its parent."""

    def renew_after_fork(self) -> None:
        self._refs = set()


_open = _Open()
_fork.renew_in_child(_open)
_connected: _fork.Members[Connected] = _fork.Members()


def finish_at_exit(member: Finishable) -> None:
    """Register a client. When the process ends, `finish_all` waits for its changes and ends the session."""
    _open.add(member)


def forget(member: Finishable) -> None:
    """Remove a client, which is closed already, from those that `finish_all` finishes."""
    _open.discard(member)


def hang_up_at_exit(connected: Connected) -> None:
    """Register an object whose idle connections are closed when the process ends.

    Otherwise the garbage collector would find them open and warn. A forked child drops its copies of them.
    """
    _connected.add(connected)
    _fork.renew_in_child(connected)


def find_status() -> FinishStatus:
    """Return how the program has ended: with success, by an error, or by an interrupt such as Ctrl-C.

    The interpreter keeps the exception that ended the program in `sys.last_value`. It keeps no `SystemExit`,
    so a program that ends by `sys.exit` counts as a success. An interactive session does too.
    """
    error = getattr(sys, "last_value", None)
    # At an interactive prompt, that exception did not end the program.
    if error is None or hasattr(sys, "ps1"):
        return "success"
    return "errored" if isinstance(error, Exception) else "interrupted"


@atexit.register
def finish_all() -> None:
    """Wait for calls that change something at a server, then finish all sessions.

    The wait and the end of the sessions have a limit each. After them, close the idle connections, and stop
    the embedded server if this process has started one. Ctrl-C ends this function at once.
    """
    try:
        status = find_status()
        pending_s = INTERRUPTED_LIMIT_S if status == "interrupted" else PENDING_LIMIT_S
        wait_until = time.monotonic() + pending_s
        for member in _open.all():
            member.wait_for_changes(max(wait_until - time.monotonic(), 0.0))
        under_way = [member.finish(status, None, EXIT_LIMIT_S, quiet=True) for member in _open.all()]
        give_up_at = time.monotonic() + EXIT_LIMIT_S
        for done in under_way:
            if done is not None:
                done.wait(max(give_up_at - time.monotonic(), 0.0))
        for connected in _connected.all():
            connected.forget_idle()
        _embedded.stop_server()
    except BaseException:  # noqa: BLE001  # Ctrl-C ends the process at once, without a traceback
        _log.debug("the sessions could not be finished", exc_info=True)
