"""Functions that fail, threads that do not start, and a higher limit of open files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


# ------------- A higher limit of open files, for tests that need more than the system's usual limit
_OTHERS = 256


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Raise the limit of open files by `count` for the block, or skip the test if that is not allowed."""
    import resource  # not on Windows; such tests do not run there

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHERS
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"the system allows {hard} open files")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
