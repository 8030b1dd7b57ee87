"""Functions that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


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
