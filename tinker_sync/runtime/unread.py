"""Failures that are never looked at: logged once, with the name of the call and the user's line.

A call notes where it was made. When it fails, its future gets an `Unread`, which logs the failure when the
future is collected, when the process ends, or when a later call depends on the failed one. A look at the
future silences it. Any thread may enter.
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
# They follow from a failure that was reported, or from the user's own doing.
_EXPECTED: Final = (CancelledError, ClientClosedError, EarlierCallFailedError)

_log = logging.getLogger("tinker_sync.clients")


def asked_here() -> Asked:
    """Return the call under way, and the line outside of this package that made it.

    Samples pass here by the thousand, so this only walks up the frames.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return current(), frame.f_code, frame.f_lineno


class Unread:
    """A failure that may never be looked at.

    Args:
        text: what to log; "" once there is nothing to log.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._generation = _fork.generation()

    def log(self) -> None:
        """Log the failure, unless it was looked at, was logged, or belongs to the parent process."""
        text, self.text = self.text, ""
        if text and self._generation == _fork.generation():
            _log.warning("%s", text)


def watch(future: APIFuture[Any], asked: Asked) -> None:
    """Have the failure of a call logged if it is never looked at."""
    future.asked = asked
    future.when_done(note_failure)


def note_failure(future: APIFuture[Any]) -> None:
    """Keep the failure of a future that has ended until it is looked at."""
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
