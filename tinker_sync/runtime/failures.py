"""One failure, reported in many places, and fit for the eyes of users. A leaf; any thread may call it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

from tinker_sync._secret import Secret, mask_text, without_frames
from tinker_sync.errors import InvalidInputError, WireError

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


def hush(error: WireError | InvalidInputError, secrets: Iterable[Secret]) -> BaseException:
    """Take out of a complaint about an answer whatever the answer repeats of our secrets.

    The frames go too: those that read an answer hold all of it.

    >>> print(hush(WireError("expected a number, got 'hello hunter22'", "$.a"), [Secret("hunter22")]))
    $.a: expected a number, got 'hello ***'
    """
    known = tuple(secrets)
    error.args = tuple(mask_text(text, known) if isinstance(text, str) else text for text in error.args)
    if isinstance(error, WireError):
        error.message, error.path = mask_text(error.message, known), mask_text(error.path, known)
    else:
        error.problems = tuple(mask_text(problem, known) for problem in error.problems)
    return without_frames(error)
