"""What may be watched while requests go over the network and sessions live: frozen records, and who receives
them.

A leaf without behaviour. Whoever sends calls `observe` on the thread that sends, never while holding a
lock, and goes on when it raises. The records hold no header, no body, no query and no credential, so they may
be stored or shown; what `CallFailed` holds is the very error the user gets.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

__all__ = [
    "CallFailed",
    "Event",
    "HeartbeatLate",
    "ModelNamed",
    "Observer",
    "Redirected",
    "ReplyReceived",
    "RequestLost",
    "RequestSent",
    "RetryScheduled",
    "SessionEnded",
    "SessionLost",
    "SessionStarted",
    "TokensUsed",
]


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


@frozen(kw_only=True)
class SessionStarted:
    """The server has made a session for this client."""

    session_id: str


@frozen(kw_only=True)
class SessionLost:
    """The server has told a heartbeat that it no longer keeps the session."""

    session_id: str
    reason: str


@frozen(kw_only=True)
class HeartbeatLate:
    """A heartbeat could not be sent when it was due.

    >>> HeartbeatLate(delay_s=12.0, reason="this process held the interpreter lock").delay_s
    12.0
    """

    delay_s: float
    reason: str


@frozen(kw_only=True)
class SessionEnded:
    """The client is being closed, or the program ends."""

    session_id: str
    status: str
    """success, errored or interrupted."""


@frozen(kw_only=True)
class CallFailed:
    """A call of the user has failed for good."""

    error: BaseException


@frozen(kw_only=True)
class TokensUsed:
    """The result of a pass or a sample is here; what it took. Told before whoever waits sees the result.

    >>> TokensUsed(model="s:train:0", trained=12).sampled
    0
    """

    model: str
    """The id of the model or sampler."""
    trained: int = 0
    prompt: int = 0
    """Of the prompt, without what the server still had."""
    cached: int = 0
    sampled: int = 0


@frozen(kw_only=True)
class ModelNamed:
    """A model or sampler has been made: what it is based on, as far as that is known."""

    model: str
    base_model: str | None = None
    like: str | None = None
    """It has the base model of this one."""


Event = (
    RequestSent
    | ReplyReceived
    | RequestLost
    | RetryScheduled
    | Redirected
    | SessionStarted
    | SessionLost
    | HeartbeatLate
    | SessionEnded
    | CallFailed
    | TokensUsed
    | ModelNamed
)


class Observer(Protocol):
    """Receives what happens to requests, on the thread it happens on. Be quick; expect several threads."""

    def observe(self, event: Event) -> None:
        """Take note of an event. What it raises is logged and otherwise ignored."""
