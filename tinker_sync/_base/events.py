"""The events of requests and sessions, as named tuples, and the protocols of those who get or limit them.

This module has no behaviour. The sender of an event calls `observe` on its own thread, never while it holds a
lock, and ignores exceptions of the observer. The records hold no header, body, query or credential, so they
may be stored or shown; `CallFailed` holds the user's own error.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

__all__ = [
    "CallFailed",
    "CostEstimate",
    "Event",
    "HeartbeatLate",
    "Limiter",
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
    "Stopwatch",
    "TokensUsed",
]


class RequestSent(NamedTuple):
    """The event that a request was sent. An attempt of a call may send several requests, as after a redirect.

    >>> RequestSent(method="POST", path="/api/v1/asample", attempt=1, size_bytes=310)
    RequestSent(method='POST', path='/api/v1/asample', attempt=1, size_bytes=310)
    """

    method: str
    path: str
    attempt: int
    """The number of the attempt, from 1."""
    size_bytes: int
    """The length of the body."""


class ReplyReceived(NamedTuple):
    """The event that a complete answer of any status has arrived, except a redirect that is followed."""

    method: str
    path: str
    attempt: int
    status: int
    size_bytes: int
    """The length of the decoded body."""
    duration_s: float
    """The time since the start of the attempt, connecting included."""


class RequestLost(NamedTuple):
    """The event that an attempt has ended without an answer."""

    method: str
    path: str
    attempt: int
    reason: str
    """The name of the exception's class."""
    maybe_received: bool
    """False if the server cannot have received the whole request."""
    duration_s: float


class RetryScheduled(NamedTuple):
    """The event that a call will be repeated after a pause."""

    method: str
    path: str
    attempt: int
    """The attempt that failed."""
    delay_s: float
    reason: str
    """The status, or the name of the exception's class."""


class Redirected(NamedTuple):
    """The event that a request follows a redirect of the server."""

    method: str
    path: str
    status: int
    same_origin: bool
    """False if the new origin differs; it then receives no credentials."""


class SessionStarted(NamedTuple):
    """The event that the server has created a session for this client."""

    session_id: str


class SessionLost(NamedTuple):
    """The event that the server has lost a session, as its answer to a heartbeat states."""

    session_id: str
    reason: str


class HeartbeatLate(NamedTuple):
    """The event that a heartbeat could not be sent when it was due.

    >>> HeartbeatLate(delay_s=12.0, reason="this process held the interpreter lock").delay_s
    12.0
    """

    delay_s: float
    reason: str


class SessionEnded(NamedTuple):
    """The event that a session has ended, because the client closes or the program ends."""

    session_id: str
    status: str
    """`success`, `errored` or `interrupted`."""


class CallFailed(NamedTuple):
    """The event that a call of the user has failed."""

    error: BaseException


class TokensUsed(NamedTuple):
    """The event that a sample, or a `forward` or `forward_backward` call, has used tokens.

    Observers get it before the user's future resolves.

    >>> TokensUsed(model="s:train:0", trained=12).sampled
    0
    """

    model: str
    """The id of the model or sampler."""
    trained: int = 0
    prompt: int = 0
    """Prompt tokens without the cached ones."""
    cached: int = 0
    sampled: int = 0


class ModelNamed(NamedTuple):
    """The event that a model or sampler was created, with its base model, if known."""

    model: str
    base_model: str | None = None
    like: str | None = None
    """The id of a model or sampler with the same base model."""


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
    """A receiver of events, on the thread that causes the event. It must be fast and thread-safe."""

    def observe(self, event: Event) -> None:
        """Handle an event. Exceptions are logged and otherwise ignored."""


class CostEstimate(NamedTuple):
    """The numbers of tokens that a call may use at most.

    >>> CostEstimate(model="s:train:0", trained=12).sampled
    0
    """

    model: str
    """The id of the model or sampler."""
    trained: int = 0
    prompt: int = 0
    sampled: int | None = 0
    """The most tokens the call may sample; None if that is unknown."""


class Limiter(Protocol):
    """A limit on the tokens that calls use. Every sample and every pass asks it for a reservation."""

    def hold(self, plan: CostEstimate) -> object:
        """Reserve the tokens that a call may use, and return a key of the reservation.

        Raise an error to refuse the call.
        """

    def settle(self, key: object, used: TokensUsed, *, last: bool) -> None:
        """Record the tokens that a result of the call used; `last` is True for the last result."""

    def release(self, key: object) -> None:
        """Free what is left of a reservation, because its call has ended. May be called again."""


class Stopwatch(Protocol):
    """A recording of the time that the user's calls take, such as that of `ServiceClient.explain`."""

    def follow(self, future: Any) -> None:
        """Record a call of the user when its future ends. The thread that makes the call calls this."""

    def encoded(self, method: str, began_s: float) -> None:
        """Record that this thread has encoded a request of a public method, from `began_s` until now."""
