"""What goes into the transport and what comes out: frozen values without behaviour."""

from __future__ import annotations

from typing import Any, Final, Literal

from attrs import field, fields, frozen

from tinker_sync._secret import HeaderMap, header_map
from tinker_sync.config import Timeout

__all__ = ["Call", "Reply", "SendFailed"]

_NONE: Final = HeaderMap()


@frozen(kw_only=True, repr=False)
class Call:
    """One call of the API, ready to be sent as often as it takes. Its repr shows no header and no body.

    >>> Call(method="POST", path="/api/v1/asample", body=b"{}")
    <Call POST /api/v1/asample, 2 bytes>
    """

    method: str
    path: str
    """Below the base URL, beginning with a slash, its segments percent-encoded."""
    query: str = ""
    """Encoded, without the question mark."""
    body: bytes | None = None
    headers: HeaderMap = field(default=_NONE, converter=header_map)
    """Of this call alone; they win over ours, and the user's default headers over them."""
    accept: str = "application/json"
    content_type: str = "application/json"
    """Sent with everything but GET and HEAD, also without a body."""
    sdk_method: str = ""
    """The public method that causes the call, as servers are told it; "" tells them none."""
    credential: Literal["usual", "exchange", "none"] = "usual"
    """Which key goes along: the one for ordinary calls, the long-lived one that buys a token, or none."""
    timeout: Timeout | None = None
    """None: as configured."""
    read_s: float | None = None
    """In place of the timeout's `read`, for calls that a server may hold, or that must not take long."""
    max_retries: int | None = None
    """None: as configured."""
    patient: bool = False
    """Whether tries are not counted for the first minutes, unless somebody has configured their number."""
    deadline_s: float | None = None
    """How long the call may take in all, pauses included. None: as configured."""
    repeatable: bool = True
    """Whether the call may be sent again after the server may have received it."""
    needed: bool = False
    """Whether a server's wish that it be not sent again is ignored; the status alone decides then."""
    follow_redirects: bool = True
    idempotency_key: str | None = None
    """One for each logical operation, kept over its retries. None: the retry loop makes one."""
    attempt: int = 1
    """Set by the retry loop."""
    fresh: bool = False
    """Over a new connection only; set by the retry loop where an old one is suspect."""

    def but(self, **changes: Any) -> Call:
        """The same call with some of it otherwise; the new values are taken as they are.

        >>> Call(method="GET", path="/x").but(attempt=2).attempt
        2
        """
        made = object.__new__(Call)
        for name in _CALL_FIELDS:
            object.__setattr__(made, name, changes[name] if name in changes else getattr(self, name))
        return made

    def __repr__(self) -> str:
        size = "" if self.body is None else f", {len(self.body)} bytes"
        return f"<Call {self.method} {self.path}{size}>"


_CALL_FIELDS: Final = tuple(field.name for field in fields(Call))


@frozen
class Reply:
    """A whole answer, whatever its status; the content encoding is undone.

    >>> Reply(200, {"Content-Type": "application/json"}, b"{}").headers["content-type"]
    'application/json'
    """

    status: int
    headers: HeaderMap = field(converter=header_map, repr=lambda headers: repr(list(headers)))
    """Found under any case; the values of one that came several times are joined with commas."""
    body: bytes = field(default=b"", repr=lambda body: f"<{len(body)} bytes>")
    resent: bool = field(default=False, kw_only=True, repr=False)
    """The call had been sent before, on a connection that broke, and may have been received then."""
    may_be_cut: bool = field(default=False, kw_only=True, repr=False)
    """The answer states no length: where it was cut, only its content can show it."""

    @property
    def ok(self) -> bool:
        """Any 2xx."""
        return 200 <= self.status < 300


class SendFailed(Exception):
    """One attempt ended without an answer. Never leaves the transport and the runtime.

    Args:
        message: What happened; holds no credentials.
        maybe_received: False when the server surely has not seen the whole request.
        timed_out: Silence, as opposed to an error.
        stale: The connection had been used before and said nothing to this request; most likely the server
            had closed it in the meantime.
        final: Another try would end the same way.

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
        """The exception behind it, where there is one."""
        return self.__cause__

    def __repr__(self) -> str:
        flags = [name for name in ("timed_out", "stale", "final") if getattr(self, name)]
        shown = "".join(f", {name}=True" for name in flags)
        return f"SendFailed({self.message!r}, maybe_received={self.maybe_received}{shown})"
