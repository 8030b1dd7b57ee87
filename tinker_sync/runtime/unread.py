"""Failures that the user never looks at, logged once with the name of the call and the user's line.

A call stores the line that made it. If it fails, its future gets an `Unread`. This logs the failure when the
future is collected, when the process ends, or when a later call depends on the failed one. If the user looks
at the future first, nothing is logged. Any thread may call the functions.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from concurrent.futures import CancelledError
from types import CodeType
from typing import Any, Final

from tinker_sync.errors import ClientClosedError, EarlierCallFailedError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import current

Asked = tuple[str, CodeType, int]
"""The public method of a call, and the code and line of the user that called it."""

_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# These follow from a failure that is reported already, or from an action of the user.
_EXPECTED: Final = (CancelledError, ClientClosedError, EarlierCallFailedError)

_log = logging.getLogger("tinker_sync.clients")


def asked_here() -> Asked:
    """Return the public method that runs in this thread, and the line outside of this package that called it.

    Thousands of samples call this, so it only walks up the frames.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return current(), frame.f_code, frame.f_lineno


class Unread:
    """A failure that the user has not looked at yet.

    Args:
        text: the text to log; "" once there is nothing to log.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._generation = _fork.generation()

    def log(self) -> None:
        """Log the failure, unless the user has seen it, it was logged, or it is from the parent process."""
        text, self.text = self.text, ""
        if text and self._generation == _fork.generation():
            _log.warning("%s", text)


def watch(future: APIFuture[Any], asked: Asked) -> None:
    """Arrange that a failure of a call is logged if the user never looks at it."""
    future.asked = asked
    future.when_done(note_failure)


def note_failure(future: APIFuture[Any]) -> None:
    """Keep the failure of an ended future until the user looks at it."""
    failure, asked = future.failure, future.asked
    if failure is None or asked is None or isinstance(failure, _EXPECTED):
        return
    if future.looked_at or future.overlooked is not None:
        return
    name, code, line = asked
    call = name.rpartition(".")[2] or "a call"
    place = f"{os.path.basename(code.co_filename)}:{line}"
    words = f"{type(failure).__name__}: {failure}"
    unread = Unread(f"{call} at {place} failed, and its result was never looked at: {words}")
    future.overlooked = unread
    weakref.finalize(future, unread.log)
