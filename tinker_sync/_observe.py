"""What may be watched while requests go over the network: frozen records, and who receives them.

A leaf without behaviour. Whoever sends calls `observe` on the thread that sends, never while holding a
lock, and goes on when it raises. The records hold no header, no body, no query and no credential, so they may
be stored or shown.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

__all__ = ["Event", "Observer", "Redirected", "ReplyReceived", "RequestLost", "RequestSent", "RetryScheduled"]


@frozen(kw_only=True)
class RequestSent:
    """One attempt of a call has left.

    >>> RequestSent(method="POST", path="/api/v1/asample", attempt=1, size_bytes=310)
    RequestSent(method='POST', path='/api/v1/asample', attempt=1, size_bytes=310)
    """

    method: str
    path: str
    attempt: int
    """1 for the first."""
    size_bytes: int
    """Length of the body."""


@frozen(kw_only=True)
class ReplyReceived:
    """A whole answer is here, whatever its status."""

    method: str
    path: str
    attempt: int
    status: int
    size_bytes: int
    """Length of the body after undoing its content encoding."""
    duration_s: float
    """From before the request was sent, connecting included."""


@frozen(kw_only=True)
class RequestLost:
    """An attempt ended without an answer."""

    method: str
    path: str
    attempt: int
    reason: str
    """Name of the exception's class."""
    maybe_received: bool
    """False when the server surely has not seen the whole request."""
    duration_s: float


@frozen(kw_only=True)
class RetryScheduled:
    """The call will be tried again after a pause."""

    method: str
    path: str
    attempt: int
    """The attempt that failed."""
    delay_s: float
    reason: str
    """A status, or the name of an exception's class."""


@frozen(kw_only=True)
class Redirected:
    """The server sent the request elsewhere and it is followed there."""

    method: str
    path: str
    status: int
    same_origin: bool
    """False: credentials stay behind."""


Event = RequestSent | ReplyReceived | RequestLost | RetryScheduled | Redirected


class Observer(Protocol):
    """Receives what happens to requests, on the thread it happens on. Be quick; expect several threads."""

    def observe(self, event: Event) -> None:
        """Take note of an event. What it raises is logged and otherwise ignored."""
