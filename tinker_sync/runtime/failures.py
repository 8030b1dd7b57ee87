"""The log of failures that the user never looks at, and errors without secrets. Any thread may call this.

Failures that the user never looks at are logged once with the name of the call and the user's line. A call
stores the line that made it. If it fails, its future gets an `Unread`. This logs the failure when the future
is collected, when the process ends, or when a later call depends on the failed one. If the user looks at the
future first, nothing is logged.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from concurrent.futures import CancelledError
from typing import Any, Final

from tinker_sync._base import fork as _fork
from tinker_sync._base.log import Log
from tinker_sync._base.naming import CallSite
from tinker_sync._base.secret import Secret
from tinker_sync.errors import ClientClosedError, EarlierCallFailedError, InvalidInputError, WireError
from tinker_sync.runtime.futures import APIFuture

# These are not logged, because they follow from a reported failure, or from an action of the user.
_EXPECTED: Final = (CancelledError, ClientClosedError, EarlierCallFailedError)

_log = Log("tinker_sync.clients")


class Unread:
    """The failure of a call, to be logged unless the user looks at the call first.

    Args:
        text: the text to log; set to "" when it is logged, or when the user looks at the call.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._generation = _fork.generation()

    def log(self) -> None:
        """Log the failure once, unless the user has looked at the call.

        A forked child does not log the failures that its parent noted before the fork.
        """
        text, self.text = self.text, ""
        if text and self._generation == _fork.generation():
            _log.warning("%s", text)


def log_if_unread(future: APIFuture[Any], site: CallSite) -> None:
    """Store `site`, the public method and the line that made a call, in the future of the call.

    If the call fails and the user never looks at it, an `Unread` logs the failure.
    """
    future._call_site = site
    future._when_done(attach_unread)


def attach_unread(future: APIFuture[Any]) -> None:
    """Attach an `Unread` to a future that has failed, unless the user has looked at the future already.

    The `Unread` logs the failure when the future is collected or the process ends. A cancel gets no `Unread`,
    nor does a failure that follows from an earlier failure or from `close`.
    """
    failure, site = future.failure, future._call_site
    if failure is None or site is None or isinstance(failure, _EXPECTED):
        return
    if future._looked_at or future._overlooked is not None:
        return
    name, code, line = site
    call = name.rpartition(".")[2] or "a call"
    place = f"{os.path.basename(code.co_filename)}:{line}"
    words = f"{type(failure).__name__}: {failure}"
    overlook(future, f"{call} at {place} failed, and its result was never looked at: {words}")


def overlook(future: APIFuture[Any], text: str) -> None:
    """Log `text` when a failed future is collected or the process ends, unless the user looks at it first.

    The user may be waiting for the future already.
    """
    future._overlooked = unread = Unread(text)
    if future._looked_at:
        unread.text = ""
    weakref.finalize(future, unread.log)


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
