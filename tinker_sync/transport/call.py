"""The values that enter and leave the transport: a call, its reply, and the failure to get one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from attrs import define, field

from tinker_sync._base.secret import HeaderMap, header_map
from tinker_sync.config import Timeout
from tinker_sync.transport.body import PiecedBody

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Required, Unpack

__all__ = ["NO_HEADERS", "OPEN_AHEAD", "Call", "Reply", "SendFailed"]

NO_HEADERS: Final = HeaderMap()
_MIB: Final = 1024 * 1024
# Without low limits, a few hundred compressed bytes cost seconds of parsing, in which no other thread runs. A
# promise usually has a kilobyte, other answers have some.
PROMISE_BYTES: Final = 1 * _MIB
ANSWER_BYTES: Final = 8 * _MIB


class _CallFields(TypedDict, total=False):
    """The keyword arguments of `Call`, for type checkers."""

    path: Required[str]
    method: str
    query: str
    body: bytes | PiecedBody | None
    headers: Mapping[str, str]
    accept: str
    content_type: str
    sdk_method: str
    credential: Literal["usual", "exchange", "none"]
    timeout: Timeout | None
    read_s: float | None
    max_retries: int | None
    patient: bool
    deadline_s: float | None
    repeatable: bool
    needed: bool
    follow_redirects: bool
    idempotency_key: str | None
    attempt: int
    fresh: bool
    answer_bytes: int
    on_sent: Callable[[], object] | None


class Call:
    """One call of the API, which can be sent repeatedly. Its repr shows no header and no body.

    The defaults of the fields are attributes of the class, so a call stores only the fields that it sets.

    >>> Call(method="POST", path="/api/v1/asample", body=b"{}")
    <Call POST /api/v1/asample, 2 bytes>
    """

    path: str
    """The path below the base URL, with a slash in front and percent-encoded segments."""
    method: str = "POST"
    query: str = ""
    """The encoded query, without the question mark."""
    body: bytes | PiecedBody | None = None
    headers: HeaderMap = NO_HEADERS
    """Headers of this call alone. They replace the client's, and the user's default headers."""
    accept: str = "application/json"
    content_type: str = "application/json"
    """Sent with every method except GET and HEAD, also without a body."""
    sdk_method: str = ""
    """The public method that causes the call, for the header `X-SDK-Method`; "" omits the header."""
    credential: Literal["usual", "exchange", "none"] = "usual"
    """The key to send: the one for ordinary calls, the one that is exchanged for a token, or none."""
    timeout: Timeout | None = None
    """The timeout; None means the configured one."""
    read_s: float | None = None
    """Replaces the timeout's `read`, for calls that a server may hold, or that must not take long."""
    max_retries: int | None = None
    """The most retries; None means the configured number."""
    patient: bool = False
    """True to retry in the first five minutes even after the default number of retries is used up, unless the
    call or the user sets that number. A server's wish for no retry has no effect then.
    """
    deadline_s: float | None = None
    """The limit of the whole call, pauses included. None means the configured one."""
    repeatable: bool = True
    """True if the call may be sent again after the server may have received it."""
    needed: bool = False
    """True to ignore any limit that the policy sets for the retries after a 5xx, because training cannot
    continue without the call.
    """
    follow_redirects: bool = True
    idempotency_key: str | None = None
    """One key for each logical operation, kept over its retries. If it is None, the retry loop makes one, but
    not for a GET or HEAD.
    """
    attempt: int = 1
    """The number of the try, from 1; set by the retry loop."""
    fresh: bool = False
    """True to use a new connection; set by the retry loop if an old one is suspect."""
    answer_bytes: int = ANSWER_BYTES
    """The largest answer of this kind of call. A `max_body_bytes` that the user sets replaces it."""
    on_sent: Callable[[], object] | None = None
    """Called each time the whole request has been sent, before there is an answer. It must not wait."""

    def __init__(self, **given: Unpack[_CallFields]) -> None:
        fields = self.__dict__
        fields.update(given)
        if type(fields.get("headers", NO_HEADERS)) is not HeaderMap:
            fields["headers"] = header_map(fields["headers"])

    def but(self, **changes: Any) -> Call:
        """Return a copy of the call with some fields changed. The new values are not converted.

        >>> Call(method="GET", path="/x").but(attempt=2).attempt
        2
        """
        made = object.__new__(Call)
        made.__dict__.update(self.__dict__)
        made.__dict__.update(changes)
        return made

    def __repr__(self) -> str:
        size = "" if self.body is None else f", {len(self.body)} bytes"
        return f"<Call {self.method} {self.path}{size}>"


@define
class Reply:
    """A whole answer of any status, with its content encoding undone.

    >>> Reply(200, {"Content-Type": "application/json"}, b"{}").headers["content-type"]
    'application/json'
    """

    status: int
    headers: HeaderMap = field(converter=header_map, repr=lambda headers: repr(list(headers)))
    """Headers by name in any case; commas join the values of a header that came several times."""
    body: bytes = field(default=b"", repr=lambda body: f"<{len(body)} bytes>")
    """The decoder of a result may keep and change a large body: it is a `bytearray`."""
    resent: bool = field(default=False, kw_only=True, repr=False)
    """True if the call was sent before on a connection that broke, and may have been received then."""
    may_be_cut: bool = field(default=False, kw_only=True, repr=False)
    """True if the answer states no length, so that only its content can show that it is incomplete."""

    @property
    def ok(self) -> bool:
        """True if the status is 2xx."""
        return 200 <= self.status < 300


OPEN_AHEAD: Final = Call(path="")
"""No request: it only opens a connection, for a request that follows."""


class SendFailed(Exception):
    """One attempt to send a call has ended without an answer. Users get a `TinkerError` instead.

    Args:
        message: the description of the failure, without credentials.
        maybe_received: False if the server has certainly not received the whole request.
        timed_out: True if the attempt ended because a limit of time was over.
        stale: True if the connection had been used before and returned nothing for this request; most
            likely the server had closed it in the meantime.
        final: True if another try would end the same way.

    >>> SendFailed("connection refused", maybe_received=False)
    SendFailed('connection refused', maybe_received=False)
    """

    def __init__(
        self,
        message: str,
        *,
        maybe_received: bool,
        timed_out: bool = False,
        stale: bool = False,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.maybe_received = maybe_received
        self.timed_out = timed_out
        self.stale = stale
        self.final = final

    @property
    def cause(self) -> BaseException | None:
        """The exception that caused the failure, or None."""
        return self.__cause__

    def __repr__(self) -> str:
        flags = [name for name in ("timed_out", "stale", "final") if getattr(self, name)]
        shown = "".join(f", {name}=True" for name in flags)
        return f"SendFailed({self.message!r}, maybe_received={self.maybe_received}{shown})"
