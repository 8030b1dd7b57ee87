"""What can go wrong with one call, as values: an odd answer, half an answer, none at all.

Pure data; `_middleware` does what they say. Each is made by a function, so that a test reads like a sentence.
Immutable; any thread may use them.
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
"""How a server may say when to come again: `retry-after` with a number or a date, or `retry-after-ms`."""

_FORMS: Final = ("seconds", "date", "milliseconds")
_JSON: Final = "application/json"
# What a proxy says that has lost the server behind it.
_GARBAGE: Final = b"<html><body><h1>It works!</h1></body></html>"


@frozen(repr=False)
class Fault:
    """Something that goes wrong with one call. The functions of this module make them."""

    def __repr__(self) -> str:
        said = ((a.name, getattr(self, a.name), a.default) for a in fields(type(self)))
        shown = (f"{name}={value!r}" for name, value, usual in said if usual is NOTHING or value != usual)
        return f"{type(self).__name__}({', '.join(shown)})"


@frozen(repr=False)
class Answered(Fault):
    """Another answer than the server's own."""

    status: int
    body: bytes = b""
    content_type: str = _JSON
    headers: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None
    retry_after_form: RetryAfterForm = "seconds"
    after_work: bool = False
    """Whether the server has done what was asked, and only says otherwise."""

    def headers_at(self, time_s: float) -> list[tuple[str, str]]:
        """The headers, for an answer at this moment: a date in them is counted from there.

        >>> too_many_requests(2, form="date").headers_at(0.0)
        [('content-type', 'application/json'), ('retry-after', 'Thu, 01 Jan 1970 00:00:02 GMT')]
        """
        made = [("content-type", self.content_type)] if self.body else []
        if self.retry_after_s is not None:
            made.append(_retry_after(self.retry_after_s, self.retry_after_form, time_s))
        return [*made, *self.headers]


@frozen(repr=False)
class Cut(Fault):
    """The connection ends in place of an answer."""

    after_work: bool
    """Whether the server has done what was asked."""
    reset: bool
    """By a reset, as from a crashed server; else in order, as from one that is being restarted."""


@frozen(repr=False)
class Truncated(Fault):
    """The server's answer, announced in full; the connection ends in the middle of it."""

    keep: float
    """The share of the body that arrives."""


@frozen(repr=False)
class Slow(Fault):
    """The server's answer, in pieces over some time."""

    seconds: float
    pieces: int


@frozen(repr=False)
class SessionExpired(Fault):
    """Every session there is so far is gone: its calls and heartbeats are answered 410 from now on."""


def status(
    code: int,
    *,
    detail: str | None = None,
    headers: Mapping[str, str] | None = None,
    retry_after: float | None = None,
    form: RetryAfterForm = "seconds",
    after_work: bool = False,
) -> Fault:
    """Answer with a status, such as 401, 402, 404, 410 or 503.

    Args:
        code: the status.
        detail: what is wrong, in the server's words.
        headers: more headers.
        retry_after: seconds after which to come again.
        form: how that is said.
        after_work: do what was asked first, so that a second try meets what the first has done.

    >>> status(503, retry_after=2)
    Answered(status=503, body=b'{"detail": "status 503"}', retry_after_s=2)
    """
    if not 100 <= code <= 599:
        raise InvalidInputError(f"{code!r} is no status of HTTP")
    return Answered(
        code,
        _encoded({"detail": detail or f"status {code}"}),
        headers=tuple((headers or {}).items()),
        retry_after_s=_seconds(retry_after, "retry_after"),
        retry_after_form=_form(form),
        after_work=after_work,
    )


def too_many_requests(retry_after: float | None = None, *, form: RetryAfterForm = "seconds") -> Fault:
    """Answer 429.

    Args:
        retry_after: seconds after which to come again; None: nothing is said of that.
        form: how that is said: "seconds", "date" or "milliseconds".

    >>> too_many_requests(0.2, form="milliseconds").headers_at(0.0)[-1]
    ('retry-after-ms', '200')
    """
    return status(429, detail="too many requests", retry_after=retry_after, form=form)


def queue_paused(state: QueueState | str = QueueState.PAUSED_CAPACITY, reason: str | None = None) -> Fault:
    """Answer 408 with the state of a queue, as the service does to those who wait for a result.

    Args:
        state: a `QueueState`, or a text that stands for a state of a newer server.
        reason: the reason that the server gives.

    >>> queue_paused(reason="all machines are busy").body
    b'{"queue_state": "paused_capacity", "queue_state_reason": "all machines are busy"}'
    """
    tree = {"queue_state": str(state)} | ({} if reason is None else {"queue_state_reason": reason})
    return Answered(408, _encoded(tree))


def promise_failed(message: str, category: Literal["user", "server", "unknown"] = "server") -> Fault:
    """Answer that the work was taken and has failed. For `retrieve_future`.

    Args:
        message: why.
        category: whose mistake it was.

    >>> promise_failed("out of memory").body
    b'{"error": "out of memory", "category": "server"}'
    """
    return Answered(200, _encoded({"error": message, "category": category}))


def empty_bad_request() -> Fault:
    """Answer 400 without a word, as a proxy does that dislikes a connection.

    >>> empty_bad_request()
    Answered(status=400)
    """
    return Answered(400)


def garbage(body: bytes = _GARBAGE, content_type: str = "text/html") -> Fault:
    """Answer 200 with something that makes no sense.

    Args:
        body: the something.
        content_type: what it is said to be.

    >>> garbage(b"{]", "application/json")
    Answered(status=200, body=b'{]')
    """
    return Answered(200, body, content_type)


def truncated(keep: float = 0.5) -> Fault:
    """Send the head of the server's answer and a share of its body, then close the connection.

    Args:
        keep: the share that arrives, from 0 to less than 1.

    >>> truncated()
    Truncated(keep=0.5)
    """
    if not 0 <= keep < 1:
        raise InvalidInputError(f"keep is a share from 0 to less than 1, not {keep!r}")
    return Truncated(keep)


def slow(seconds: float, pieces: int = 5) -> Fault:
    """Send the server's answer in pieces, spread over some seconds.

    Args:
        seconds: from the first piece to the last.
        pieces: how many.

    >>> slow(2)
    Slow(seconds=2, pieces=5)
    """
    if pieces < 2:
        raise InvalidInputError(f"a slow answer comes in two pieces or more, not {pieces!r}")
    wanted = _seconds(seconds, "seconds")
    return Slow(wanted or 0.0, pieces)


def reset(*, after_work: bool = False) -> Fault:
    """Reset the connection in place of an answer.

    Args:
        after_work: do what was asked first, so that only the answer is lost.

    >>> reset()
    Cut(after_work=False, reset=True)
    """
    return Cut(after_work, reset=True)


def hang_up(*, after_work: bool = False) -> Fault:
    """Close the connection in place of an answer, in order and without a word.

    Args:
        after_work: do what was asked first, so that only the answer is lost.

    >>> hang_up(after_work=True)
    Cut(after_work=True, reset=False)
    """
    return Cut(after_work, reset=False)


def lost_answer() -> Fault:
    """Do what was asked, then reset the connection: the client cannot know that it was done.

    >>> lost_answer() == reset(after_work=True)
    True
    """
    return reset(after_work=True)


def session_expired() -> Fault:
    """Forget every session there is so far: its calls and heartbeats are answered 410 from now on.

    >>> session_expired()
    SessionExpired()
    """
    return SessionExpired()


def _encoded(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _retry_after(seconds: float, form: RetryAfterForm, time_s: float) -> tuple[str, str]:
    if form == "milliseconds":
        return "retry-after-ms", f"{seconds * 1000:g}"
    if form == "date":
        # A date has whole seconds; never say earlier than was meant.
        return "retry-after", formatdate(math.ceil(time_s + seconds), usegmt=True)
    return "retry-after", f"{seconds:g}"


def _form(form: RetryAfterForm) -> RetryAfterForm:
    if form not in _FORMS:
        raise InvalidInputError(f"form is one of {', '.join(_FORMS)}, not {form!r}")
    return form


def _seconds(value: float | None, name: str) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise InvalidInputError(f"{name} is a number of seconds from 0, not {value!r}")
    return value
