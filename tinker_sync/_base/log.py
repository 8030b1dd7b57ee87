"""`Log`: a logger whose handlers, which are code of the user, can neither disturb nor hold up the client.

A handler may raise, block, exit, or call the client and wait for the result. So no exception of a handler or
filter reaches the code that logs. The threads of a client serve many calls, so they hand their records over,
and one thread passes them to the handlers, in order. Other threads call the handlers themselves.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

_this_thread = threading.local()  # .hand_over: see `hand_over_records`
if hasattr(os, "register_at_fork"):  # the thread that takes the records stays with the parent
    os.register_at_fork(after_in_child=lambda: vars(_this_thread).clear())


def hand_over_records(run: Callable[[Callable[[], object]], object]) -> None:
    """Let `run` call the handlers for the records that this thread makes from now on."""
    _this_thread.hand_over = run


class Log(logging.Logger):
    """The logger of a name, for code of this package. Thread-safe.

    Users find the logger that has the level, the filters and the handlers with `logging.getLogger`.

    >>> Log("tinker_sync.queue").isEnabledFor(logging.DEBUG)
    False
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._users = logging.getLogger(name)
        # Bound, because each request asks for it, and usually it is all that a record costs.
        self.isEnabledFor = self._users.isEnabledFor  # type: ignore[method-assign]

    def handle(self, record: logging.LogRecord) -> None:
        """Pass a record to the filters and handlers, or hand it over to the thread that does.

        >>> Log("tinker_sync.queue").handle(logging.makeLogRecord({"levelno": 0}))
        """
        hand_over = getattr(_this_thread, "hand_over", None)
        if hand_over is not None:
            try:
                hand_over(partial(self._pass_on, record))
            except RuntimeError:  # the client is closed, or the system gives no thread
                pass
            else:
                return
        self._pass_on(record)

    def _pass_on(self, record: logging.LogRecord) -> None:
        try:
            self._users.handle(record)
        except BaseException as failure:
            if (
                isinstance(failure, KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
                raise
            if logging.raiseExceptions and sys.stderr is not None:  # as `logging.Handler.handleError` does
                with suppress(Exception):
                    traceback.print_exc()
