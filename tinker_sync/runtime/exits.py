"""What happens to open sessions when the process ends: the server is told, and not waited for.

All sessions are finished side by side, within `EXIT_LIMIT_S` in all. Nothing else holds the process up: every
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

EXIT_LIMIT_S: Final = 1.0

_log = logging.getLogger("tinker_sync.session")


class Finishable(Protocol):
    """Something that can tell the server that its session is over."""

    def finish(
        self, status: Literal["success", "errored", "interrupted"], detail: str | None, limit_s: float
    ) -> None: ...


_lock = threading.Lock()
_open: weakref.WeakSet[Finishable] = weakref.WeakSet()  # guarded by _lock


def remember(session: Finishable) -> None:
    """Finish this session when the process ends."""
    with _lock:
        _open.add(session)


def forget(session: Finishable) -> None:
    """It is finished."""
    with _lock:
        _open.discard(session)


def _how_it_ended() -> Literal["success", "errored", "interrupted"]:
    """The interpreter leaves an exception that ended the program where tracebacks are printed from."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "success"
    return "errored" if isinstance(error, Exception) else "interrupted"


@atexit.register
def _finish_all() -> None:
    with _lock:
        sessions = list(_open)
    status = _how_it_ended()
    threads = []
    for session in sessions:
        thread = threading.Thread(
            target=session.finish, args=(status, None, EXIT_LIMIT_S), name="tinker-exit", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # too late for threads; the server notices by itself
            return
        threads.append(thread)
    give_up_at = time.monotonic() + EXIT_LIMIT_S
    for thread in threads:
        thread.join(max(give_up_at - time.monotonic(), 0.0))
