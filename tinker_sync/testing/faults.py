"""The faults of one call, as values: an unexpected or slow reply, part of a reply, or no reply.

Pure, immutable data that any thread may use; `_middleware` carries a fault out. A function of this module
creates each kind of fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from email.utils import formatdate
from typing import Any, Final, Literal

from attrs import NOTHING, fields, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.types.future import QueueState

RetryAfterForm = Literal["seconds", "date", "milliseconds"]
"""The header that gives the retry delay: `retry-after` in seconds or as a date, or `retry-after-ms`."""

_FORMS: Final = ("seconds", "date", "milliseconds")
_JSON: Final = "application/json"
# The reply of a misconfigured proxy.
_GARBAGE: Final = b"<html><body><h1>It works!</h1></body></html>"


@frozen(repr=False)
class Fault:
    """The base class of the faults. The functions of this module create them."""

    def __repr__(self) -> str:
        values = ((a.name, getattr(self, a.name), a.default) for a in fields(type(self)))
        shown = (f"{name}={value!r}" for name, value, usual in values if usual is NOTHING or value != usual)
        return f"{type(self).__name__}({', '.join(shown)})"


@frozen(repr=False)
class FixedReply(Fault):
    """A fault that replies with given values in place of the server's own reply."""

    status: int
    body: bytes = b""
    content_type: str = _JSON
    headers: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None
    retry_after_form: RetryAfterForm = "seconds"
    after_work: bool = False
    """True: the server does the work first, and only its reply is replaced."""

    def headers_at(self, time_s: float) -> list[tuple[str, str]]:
        """Return the headers of a reply that is sent at `time_s`, in seconds since 1970.

        >>> too_many_requests(2, form="date").headers_at(0.0)
        [('content-type', 'application/json'), ('retry-after', 'Thu, 01 Jan 1970 00:00:02 GMT')]
        """
        made = [("content-type", self.content_type)] if self.body else []
        if self.retry_after_s is not None:
            made.append(_make_retry_after(self.retry_after_s, self.retry_after_form, time_s))
        return [*made, *self.headers]


@frozen(repr=False)
class Cut(Fault):
    """A fault that ends the connection without a reply."""

    after_work: bool
    """True: the server does the work first."""
    reset: bool
    """True: a TCP reset, as from a crashed server; False: an orderly close, as from a restarted one."""


@frozen(repr=False)
class Truncated(Fault):
    """A fault that sends only the beginning of the server's reply; its header has the length of the whole."""

    keep: float
    """The share of the body that arrives."""


@frozen(repr=False)
class Slow(Fault):
    """A fault that sends the server's reply slowly, in pieces."""

    seconds: float
    pieces: int


@frozen(repr=False)
class SessionExpired(Fault):
    """A fault that replies 410 and expires all present sessions: their further calls also get a 410."""


def status(
    code: int,
    *,
    detail: str | None = None,
    headers: Mapping[str, str] | None = None,
    retry_after: float | None = None,
    form: RetryAfterForm = "seconds",
    after_work: bool = False,
) -> Fault:
    """Return a fault that replies with a status, such as 401, 402, 404, 410 or 503.

    Args:
        code: the HTTP status.
        detail: the error text in the body; None: the text "status" with the code.
        headers: additional headers.
        retry_after: the retry delay in seconds; None: no such header.
        form: the form of that header: "seconds", "date" or "milliseconds".
        after_work: let the server do the work first, so that a retry finds it done.

    Raises:
        InvalidInputError: `code` is not an HTTP status, or `retry_after` or `form` is not valid.

    >>> status(503, retry_after=2)
    FixedReply(status=503, body=b'{"detail": "status 503"}', retry_after_s=2)
    """
    if not 100 <= code <= 599:
        raise InvalidInputError(f"{code!r} is not an HTTP status: use 100 to 599")
    return FixedReply(
        code,
        _encode({"detail": detail or f"status {code}"}),
        headers=tuple((headers or {}).items()),
        retry_after_s=_check_seconds(retry_after, "retry_after"),
        retry_after_form=_check_form(form),
        after_work=after_work,
    )


def too_many_requests(retry_after: float | None = None, *, form: RetryAfterForm = "seconds") -> Fault:
    """Return a fault that replies 429.

    Args:
        retry_after: the retry delay in seconds; None: no such header.
        form: the form of that header: "seconds", "date" or "milliseconds".

    Raises:
        InvalidInputError: `retry_after` or `form` is not valid.

    >>> too_many_requests(0.2, form="milliseconds").headers_at(0.0)[-1]
    ('retry-after-ms', '200')
    """
    return status(429, detail="too many requests", retry_after=retry_after, form=form)


def queue_paused(state: QueueState | str = QueueState.PAUSED_CAPACITY, reason: str | None = None) -> Fault:
    """Return a fault that replies 408 with a queue state, as the service does to a poll for a result.

    Args:
        state: a `QueueState`, or a text that stands for a state of a newer server.
        reason: the explanation in the body.

    >>> queue_paused(reason="all machines are busy").body
    b'{"queue_state": "paused_capacity", "queue_state_reason": "all machines are busy"}'
    """
    body = {"queue_state": str(state)} | ({} if reason is None else {"queue_state_reason": reason})
    return FixedReply(408, _encode(body))


def promise_failed(message: str, category: Literal["user", "server", "unknown"] = "server") -> Fault:
    """Return a fault for `retrieve_future`: the reply that the promised request has failed.

    Args:
        message: the error text.
        category: the side that caused the failure.

    >>> promise_failed("out of memory").body
    b'{"error": "out of memory", "category": "server"}'
    """
    return FixedReply(200, _encode({"error": message, "category": category}))


def empty_bad_request() -> Fault:
    """Return a fault that replies 400 with an empty body, as some proxies do.

    >>> empty_bad_request()
    FixedReply(status=400)
    """
    return FixedReply(400)


def garbage(body: bytes = _GARBAGE, content_type: str = "text/html") -> Fault:
    """Return a fault that replies 200 with a body that clients cannot read.

    Args:
        body: the bytes.
        content_type: the content type in the header.

    >>> garbage(b"{]", "application/json")
    FixedReply(status=200, body=b'{]')
    """
    return FixedReply(200, body, content_type)


def truncated(keep: float = 0.5) -> Fault:
    """Return a fault that sends the server's reply up to a share of its body, then closes the connection.

    Args:
        keep: the share that arrives, at least 0 and less than 1.

    Raises:
        InvalidInputError: `keep` is outside this range.

    >>> truncated()
    Truncated(keep=0.5)
    """
    if not 0 <= keep < 1:
        raise InvalidInputError(f"keep must be at least 0 and less than 1, not {keep!r}")
    return Truncated(keep)


def slow(seconds: float, pieces: int = 5) -> Fault:
    """Return a fault that sends the server's reply in pieces.

    Args:
        seconds: the time from the first piece to the last.
        pieces: the number of pieces, at least 2.

    Raises:
        InvalidInputError: the time is negative or infinite, or there are fewer pieces.

    >>> slow(2)
    Slow(seconds=2, pieces=5)
    """
    if pieces < 2:
        raise InvalidInputError(f"pieces must be 2 or more, not {pieces!r}")
    wanted = _check_seconds(seconds, "seconds")
    return Slow(wanted or 0.0, pieces)


def reset(*, after_work: bool = False) -> Fault:
    """Return a fault that resets the connection without a reply.

    Args:
        after_work: let the server do the work first, so that only the reply is lost.

    >>> reset()
    Cut(after_work=False, reset=True)
    """
    return Cut(after_work, reset=True)


def hang_up(*, after_work: bool = False) -> Fault:
    """Return a fault that closes the connection in the regular way, with a FIN, without a reply.

    Args:
        after_work: let the server do the work first, so that only the reply is lost.

    >>> hang_up(after_work=True)
    Cut(after_work=True, reset=False)
    """
    return Cut(after_work, reset=False)


def lost_answer() -> Fault:
    """Return a fault that resets the connection after the work, so that only the reply is lost.

    >>> lost_answer() == reset(after_work=True)
    True
    """
    return reset(after_work=True)


def session_expired() -> Fault:
    """Return a fault that replies 410 and expires all present sessions.

    The further calls and heartbeats of these sessions also get a 410.

    >>> session_expired()
    SessionExpired()
    """
    return SessionExpired()


def _encode(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _make_retry_after(seconds: float, form: RetryAfterForm, time_s: float) -> tuple[str, str]:
    if form == "milliseconds":
        return "retry-after-ms", f"{seconds * 1000:g}"
    if form == "date":
        # A date has whole seconds; rounded up, so that the delay is never too short.
        return "retry-after", formatdate(math.ceil(time_s + seconds), usegmt=True)
    return "retry-after", f"{seconds:g}"


def _check_form(form: RetryAfterForm) -> RetryAfterForm:
    if form not in _FORMS:
        raise InvalidInputError(f"form must be one of {', '.join(_FORMS)}, not {form!r}")
    return form


def _check_seconds(value: float | None, name: str) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise InvalidInputError(f"{name} must be a number of seconds from 0, not {value!r}")
    return value
