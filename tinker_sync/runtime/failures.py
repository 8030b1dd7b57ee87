"""One failure, reported in many places. A leaf; any thread may call it."""

from __future__ import annotations

import copy
from typing import TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


def fresh(failure: ErrorT) -> ErrorT:
    """A copy of an exception for one more future or thread; the exception itself where it cannot be copied.

    Each raise adds its frames to the traceback of the object raised, so a shared one grows into a page of
    strangers' frames and keeps their local variables alive.

    >>> first = KeyError("a")
    >>> second = fresh(first)
    >>> second is first, repr(second)
    (False, "KeyError('a')")
    """
    try:
        made = copy.copy(failure)
    except Exception:  # noqa: BLE001  # constructors of foreign exceptions may do anything
        return failure
    if type(made) is not type(failure):
        return failure
    made.__cause__ = failure.__cause__
    made.__context__ = failure.__context__
    made.__suppress_context__ = failure.__suppress_context__
    return made.with_traceback(None)
