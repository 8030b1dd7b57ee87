"""A call that has been sent and whose answer has not been read yet, over all its redirects.

The seam for a poller. Put `fileno()` into a selector; when it is readable, or `expires_at_s` has come, call
`step()`: it takes what has arrived without blocking, and returns the reply once that is whole. After a
redirect or a replaced connection `fileno()` is another one (and connecting may have blocked for a moment), so
ask again after every `step`.

When the server rejects the token of a request as invalid, the exchange gets a new one and sends the same
request once more, for every kind of call. Getting one blocks the thread that reads the answer, as getting the
first one blocks the thread that sends.

An exchange belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from tinker_sync._clock import Clock
from tinker_sync._secret import Secret
from tinker_sync.transport import content
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.challenge import rejects_token
from tinker_sync.transport.headers import API_KEY
from tinker_sync.transport.hop import MAX_REDIRECTS, REDIRECTS, Hop, RedirectRefused, redirected
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.launch import Launcher
from tinker_sync.transport.socket_line import Limits, RawReply, SocketLine
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge


class Exchange:
    """One attempt of a call; `Http.open` makes it."""

    def __init__(
        self,
        call: Call,
        hop: Hop,
        limits: Limits,
        launcher: Launcher,
        clock: Clock,
        journal: Journal,
        renew: Callable[[Secret], Secret | None] | None = None,
    ) -> None:
        """Send a call.

        Args:
            renew: Exchanges a credential that the server rejected for a new one, None where there is none.
                May block, and raises what the exchange raises.
        """
        self._renew = renew  # None once it was asked: a second rejection is final
        self._call = call
        self._hop = hop
        self._limits = limits
        self._launcher = launcher
        self._clock = clock
        self._journal = journal
        self._began_s = clock.now()
        self._redirects = 0
        self._resent = False  # a send before this one may have been received
        self._taken = False  # an earlier address has processed the request and sent us on with a GET
        self._line: SocketLine
        self._begin()

    @property
    def call(self) -> Call:
        return self._call

    def fileno(self) -> int:
        """Return the socket to wait for, or -1 once the exchange is over."""
        return self._line.fileno()

    @property
    def expires_at_s(self) -> float:
        """The moment of the clock at which `step` should be called even if nothing has arrived."""
        return self._line.expires_at_s

    def step(self) -> Reply | None:
        """Take what has arrived; the reply, once it is whole.

        Raises:
            SendFailed: There will be none.
        """
        return self._ask(self._line.step)

    def finish(self) -> Reply:
        """Wait for the reply.

        Raises:
            SendFailed: There will be none.
        """
        while True:
            reply = self._ask(self._line.finish)
            if reply is not None:
                return reply

    def abort(self) -> None:
        """Give the exchange up; its connection is closed. Does nothing once the reply is there."""
        self._line.abort()

    @property
    def _repeatable(self) -> bool:
        return self._call.repeatable or self._hop.method in ("GET", "HEAD")

    def _begin(self) -> None:
        try:
            self._send(fresh=self._call.fresh)
        except SendFailed as failed:
            self._replace_or_raise(failed)

    def _send(self, *, fresh: bool) -> None:
        self._line = self._launcher.launch(self._hop, self._limits, repeatable=self._repeatable, fresh=fresh)
        self._journal.sent(self._call, self._hop.headers)

    def _ask(self, line: Callable[[], RawReply | None]) -> Reply | None:
        try:
            raw = line()
        except SendFailed as failed:
            self._replace_or_raise(failed)
            return None
        return None if raw is None else self._conclude(raw)

    def _replace_or_raise(self, failed: SendFailed) -> None:
        """Send again over a new connection where an old one has let us down and nothing can happen twice."""
        if failed.stale and (self._repeatable or not failed.maybe_received):
            self._resent = self._resent or failed.maybe_received
            try:
                self._send(fresh=True)
            except SendFailed as again:
                failed = again
            else:
                return
        raise self._lost(failed)

    def _conclude(self, raw: RawReply) -> Reply | None:
        self._launcher.keep_cookies(self._hop, raw)
        if raw.status in REDIRECTS and self._call.follow_redirects and (location := _location(raw)):
            self._follow(raw.status, location)
            return None
        try:
            encoding = raw.fields.get("content-encoding")
            body = content.decode(raw.body, encoding, limit=self._limits.max_body_bytes)
        except (MalformedMessage, MessageTooLarge) as error:
            final = isinstance(error, MessageTooLarge)
            raise self._lost(SendFailed(str(error), maybe_received=True, final=final)) from error
        # A compressed body shows a cut by itself.
        may_be_cut = raw.lasts_until_close and not encoding
        reply = Reply(raw.status, raw.fields, body, resent=self._resent, may_be_cut=may_be_cut)
        self._journal.answered(self._call, reply, self._clock.now() - self._began_s)
        if reply.status == 401 and self._has_new_credential(reply):
            self._begin()
            return None
        return reply

    def _has_new_credential(self, reply: Reply) -> bool:
        """Put a new credential into the request if the server rejected the one it carried as invalid."""
        renew, sent = self._renew, self._hop.headers.get(API_KEY.lower())
        if renew is None or sent is None or not rejects_token(reply.headers.get("www-authenticate")):
            return False
        self._renew = None
        renewed = renew(Secret(sent[1]))
        if renewed is None:
            return False
        header = {API_KEY.lower(): (API_KEY, renewed.reveal())}
        self._hop = evolve(self._hop, headers={**self._hop.headers, **header})
        return True

    def _follow(self, status: int, location: str) -> None:
        self._redirects += 1
        before = self._hop
        if self._redirects > MAX_REDIRECTS:
            problem = f"the server redirects more than {MAX_REDIRECTS} times"
            raise self._lost(SendFailed(problem, maybe_received=True, final=True))
        try:
            self._hop = redirected(before, status, location)
        except RedirectRefused as error:
            raise self._lost(SendFailed(str(error), maybe_received=True, final=True)) from error
        self._taken = self._taken or self._hop.method != before.method
        same_origin = self._hop.origin == before.origin
        self._journal.redirected(self._call, status, same_origin=same_origin, to=str(self._hop.origin))
        self._begin()

    def _lost(self, failed: SendFailed) -> SendFailed:
        failed.maybe_received = failed.maybe_received or self._taken or self._resent
        self._journal.lost(self._call, failed, self._clock.now() - self._began_s)
        return failed


def _location(raw: RawReply) -> str | None:
    """Where a redirect leads, in a form whose repr shows nothing: it may be a signed address."""
    return next((Secret(value).reveal() for name, value in raw.headers if name.lower() == "location"), None)
