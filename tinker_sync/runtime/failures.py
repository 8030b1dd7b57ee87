"""One failure, reported in many places, and fit for the eyes of users. A leaf; any thread may call it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Final, TypeVar

from tinker_sync._secret import Secret
from tinker_sync.errors import InvalidInputError, WireError

ErrorT = TypeVar("ErrorT", bound=BaseException)


def fresh(failure: ErrorT) -> ErrorT:
    """A copy of an exception for one more future or thread; the exception itself where it cannot be copied.

    Each raise adds its frames to the traceback of the object raised, so a shared one grows into a page of
    frames of other threads and keeps their local variables alive.

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


_UNQUOTED: Final = "it does not have the expected form; it is not quoted, because it repeats a secret"


def hush(error: WireError | InvalidInputError, content: bytes, secrets: Iterable[Secret]) -> BaseException:
    """Take out of a complaint about an answer whatever the answer repeats of our secrets.

    Complaints quote pieces, so looking for secrets in their words would not find one that was cut in two.

    Args:
        error: the complaint.
        content: the answer.
        secrets: ours.

    >>> print(hush(WireError("expected a number, got 'hello hunt…'", "$.a"), b"hello hunter22", []))
    $.a: expected a number, got 'hello hunt…'
    >>> print(hush(WireError("expected …", "$.a"), b"hello hunter22", [Secret("hunter22")]))
    it does not have the expected form; it is not quoted, because it repeats a secret
    """
    if any(secret.reveal().encode("utf-8", "surrogatepass") in content for secret in secrets):
        error.args = (_UNQUOTED,)
        if isinstance(error, WireError):
            error.message, error.path = _UNQUOTED, ""
        else:
            error.problems = (_UNQUOTED,)
    return error
