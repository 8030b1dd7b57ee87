"""The events of requests, calls and sessions, as named tuples, and `Events`, the stream of one client.

The sender of an event calls `observe` on its own thread, never while it holds a lock, and ignores exceptions
of the observer. The records hold no header, body, query or credential, so they may be stored or shown;
`CallFailed` holds the user's own error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, get_args

from tinker_sync._base.log import Log

__all__ = [
    "CallFailed",
    "CallMade",
    "CostEstimate",
    "Event",
    "Events",
    "HeartbeatLate",
    "Limiter",
    "ModelNamed",
    "Observer",
    "Redirected",
    "ReplyReceived",
    "RequestEncoded",
    "RequestLost",
    "RequestSent",
    "RetryScheduled",
    "SessionEnded",
    "SessionLost",
    "SessionStarted",
    "TokensUsed",
]


_log: Final = Log("tinker_sync.events")
_NOBODY: Final[dict[object, Any]] = {}


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


class CallMade(NamedTuple):
    """The event that a request of the user's call has a future; the thread that makes the call causes it."""

    future: Any
    """An `APIFuture`, which has the timeline of the request when it is done."""
    line: Any = None
    """The part of a client that makes the call and knows the id of its model, once that exists; or None."""


class RequestEncoded(NamedTuple):
    """The event that the thread has encoded a request."""

    method: str
    """The public method that the request is for."""
    began_s: float
    """The time of the client's clock at which the encoding began; it ends with this event."""


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
    | CallMade
    | RequestEncoded
)


class Observer(Protocol):
    """A receiver of events, on the thread that causes the event. It must be fast and thread-safe."""

    def observe(self, event: Any) -> None:
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


class Events:
    """The stream of the events of one client: who gets them, by kind. Thread-safe.

    An observer runs on the thread that causes the event, so it must be fast; its exceptions are logged and
    otherwise ignored. An event that nobody wants need not be made.

    >>> events = Events()
    >>> bool(events.wants(TokensUsed))
    False
    """

    def __init__(self) -> None:
        # Any thread adds and removes; each is one step of the interpreter, as is a copy.
        self._observers: dict[type, dict[object, Observer]] = {}
        self.wants: Callable[[type], object] = self._observers.get
        """Returns a true value if anybody wants events of this kind; quick, because each request asks."""

    def listen(self, observer: Observer, *kinds: type) -> Callable[[], None]:
        """Add an observer of these kinds of events, or of all. Return a function that removes it.

        >>> class Printer:
        ...     def observe(self, event):
        ...         print(event)
        >>> events = Events()
        >>> stop = events.listen(Printer(), SessionStarted)
        >>> events.notify(SessionStarted("session-1"))
        SessionStarted(session_id='session-1')
        >>> stop()
        """
        entry = object()
        places = [self._observers.setdefault(kind, {}) for kind in kinds or get_args(Event)]
        for place in places:
            place[entry] = observer

        def stop() -> None:
            for place in places:
                place.pop(entry, None)

        return stop

    def notify(self, event: Any) -> None:
        """Pass an event to its observers.

        >>> Events().notify(SessionStarted("session-1"))
        """
        for observer in list(self._observers.get(type(event), _NOBODY).values()):
            try:
                observer.observe(event)
            except Exception:  # noqa: BLE001  # an observer must not disturb the client
                _log.exception("an observer raised; the call goes on")
