"""Errors without secrets. Any thread may call the functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tinker_sync._base.api_errors import copy_exception as copy_exception
from tinker_sync._base.secret import Secret
from tinker_sync.errors import InvalidInputError, WireError

_UNQUOTED: Final = "it does not have the expected form; it is not quoted, because it repeats a secret"


def redact_exception(
    error: WireError | InvalidInputError, content: bytes, secrets: Iterable[Secret]
) -> BaseException:
    """If an answer contains a secret, replace the text of `error`, which quotes the answer. Return `error`.

    The error quotes pieces of the answer. A piece may end in the middle of a secret, and a search for the
    secret in the message would not find that.

    Args:
        error: the error, which is returned; its text is replaced in place.
        content: the answer.
        secrets: the secrets of the client.

    >>> error = WireError("expected a number, got 'hello hunt…'", "$.a")
    >>> print(redact_exception(error, b"hello hunter22", []))
    $.a: expected a number, got 'hello hunt…'
    >>> print(redact_exception(error, b"hello hunter22", [Secret("hunter22")]))
    it does not have the expected form; it is not quoted, because it repeats a secret
    """
    if any(secret.reveal().encode("utf-8", "surrogatepass") in content for secret in secrets):
        error.args = (_UNQUOTED,)
        if isinstance(error, WireError):
            error.message, error.path = _UNQUOTED, ""
        else:
            error.problems = (_UNQUOTED,)
    return error
