"""Functions that fail, and threads that do not start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """Return a function of any arguments that raises this error.

    >>> raising(KeyError("a"))(1, b=2)
    Traceback (most recent call last):
        ...
    KeyError: 'a'
    """

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


def refuse_threads(patch: pytest.MonkeyPatch, prefix: str) -> None:
    """Let no thread start whose name begins with `prefix`, as if the system had no thread left for it."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(prefix):
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)
