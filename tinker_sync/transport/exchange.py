"""`Exchange`: a call that was sent and whose answer is still to be read; it also follows redirects.

A poller puts `fileno()` into a selector. It calls `step()` when the socket is readable or `expires_at_s` has
come. `step()` takes the bytes that have arrived without waiting for more, and returns the reply once it is
whole. After a redirect or a broken connection, `step()` connects and sends again, which may block for a
moment. `fileno()` changes then, so the poller reads it after every `step`.

If the server rejects the token of a request as invalid, the exchange gets a new token, if there is one, and
sends the same request once more, even for a call that must not be repeated. This blocks the thread that reads
the answer.

An exchange belongs to one thread at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final

from attrs import evolve

from tinker_sync._base.clock import Clock
from tinker_sync._base.secret import Secret
from tinker_sync.errors import InvalidInputError
from tinker_sync.transport import content
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.challenge import rejects_token
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.pools import ConnectFailed, Connection, Pools, Route, connect
from tinker_sync.transport.request import (
    API_KEY,
    MAX_REDIRECTS,
    REDIRECTS,
    Headers,
    Hop,
    RedirectRefused,
    RequestHeads,
    redirected,
)
from tinker_sync.transport.session import SessionRules, Way
from tinker_sync.transport.socket_line import Limits, SocketLine
from tinker_sync.wire.http1.client import ReplyParser, request_head
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

# Common Python servers close connections that were idle for 5 s. A call that must not be repeated does not
# use a connection near that age: if it broke, the fate of the call would be unknown.
_FRESH_ENOUGH_S: Final = 2.0


class Launcher:
    """A sender of requests, over idle connections or new ones. Exchanges use it. Thread-safe.

    Args:
        heads: composes the requests.
        rules: the routes, headers and cookies of the user's session.
        pools: the open connections.
        clock: the source of time.
        journal: records every request, answer and failure.
        before_connecting: called before a connection is opened; raises SendFailed if connecting is useless.
    """

    def __init__(
        self,
        heads: RequestHeads,
        rules: SessionRules,
        pools: Pools,
        clock: Clock,
        journal: Journal,
        before_connecting: Callable[[], object],
    ) -> None:
        self.clock = clock
        self.journal = journal
        self._heads = heads
        self._rules = rules
        self._pools = pools
        self._before_connecting = before_connecting
        self._direct: Route | None = None  # the route to the configured server if no proxy leads there; fixed

    def compose(self, call: Call, credential: str) -> Hop:
        """Return the first request of a call."""
        return self._heads.hop(call, credential, self._rules.headers())

    def launch(self, hop: Hop, limits: Limits, *, repeatable: bool, fresh: bool) -> SocketLine:
        """Send a request, and return the `SocketLine` that reads its answer.

        Args:
            hop: the request and its address.
            limits: the limits of time, and of the size of the answer.
            repeatable: True if the request may be sent again after its connection has broken. Other requests
                use no connection that was idle for more than 2 s.
            fresh: True to use a new connection.

        Raises:
            SendFailed: The request was not sent, or not to its end.
            ConfigurationError: A certificate file or a proxy cannot be used.
            ConfigurationError, MissingExtraError: The embedded server cannot be started.
            InvalidInputError: An array of the body has changed since an earlier try.
        """
        way = self._rules.way_to(hop.origin)
        headers = self._complete(hop, way)
        target = hop.address if way.route.forwarded else hop.target
        head = request_head(hop.method, target, headers.values())
        return self._send(way.route, hop.method, head, hop.body, limits, repeatable=repeatable, fresh=fresh)

    def launch_head(self, call: Call, head: bytes, limits: Limits, *, fresh: bool) -> SocketLine | None:
        """Send the first request of a call, whose head (request line and headers) is already encoded.

        Return None, and send nothing, if a proxy leads to the server. Then the caller must use `launch`.

        Raises:
            SendFailed, ConfigurationError, MissingExtraError, InvalidInputError: As for `launch`.
        """
        route = self._direct
        if route is None:
            route = self._rules.way_to(self._heads.origin).route
            if route.proxy is not None:
                return None
            self._direct = route
        return self._send(
            route, call.method, head, call.body, limits, repeatable=call.repeatable, fresh=fresh
        )

    def _send(
        self,
        route: Route,
        method: str,
        head: bytes,
        body: bytes | PiecedBody | None,
        limits: Limits,
        *,
        repeatable: bool,
        fresh: bool,
    ) -> SocketLine:
        connection = None
        if not fresh:
            connection = self._pools.take(route, max_idle_s=None if repeatable else _FRESH_ENOUGH_S)
        if connection is None:
            connection = self._connect(route, limits)
        line = SocketLine(connection, self._pools, self.clock, method, limits)
        line.send(head, body)
        return line

    def keep_cookies(self, hop: Hop, reply: ReplyParser) -> None:
        """Store the cookies of an answer, as a `requests.Session` does."""
        self._rules.keep_cookies(hop.address, reply.headers)

    def _complete(self, hop: Hop, way: Way) -> Headers:
        """Return all headers of a request to one address. `Host` comes first, as some servers require."""
        headers = {"host": ("Host", hop.origin.netloc), **hop.headers}
        authorization = self._rules.authorization(way) if hop.own else way.netrc
        if authorization:
            headers.setdefault("authorization", ("Authorization", authorization))
        cookies = self._rules.cookies_for(hop.address) if self._rules.has_cookies else None
        if cookies:
            headers.setdefault("cookie", ("Cookie", cookies))
        if hop.body is not None or hop.method not in ("GET", "HEAD"):
            headers["content-length"] = ("Content-Length", str(len(hop.body or b"")))
        if way.route.forwarded:
            for name, value in way.route.proxy_headers.items():
                headers[name.lower()] = (name, value)
        return headers

    def _connect(self, route: Route, limits: Limits) -> Connection:
        self._before_connecting()
        left_s = min(limits.connect_s, limits.give_up_s - self.clock.now())
        if left_s <= 0:
            raise SendFailed("no time was left to connect", maybe_received=False, timed_out=True)
        try:
            connection = connect(route, left_s if math.isfinite(left_s) else None)
        except ConnectFailed as error:
            raise SendFailed(
                str(error), maybe_received=False, timed_out=error.timed_out, final=error.final
            ) from error
        if not self._pools.adopt(connection):
            connection.close()
            raise SendFailed("the client is closed", maybe_received=False, final=True)
        return connection


class Exchange:
    """One attempt to send a call and read its answer, with redirects. `Http.open` makes it.

    For one thread at a time.
    """

    # Slots, because tens of thousands may wait for their answers.
    __slots__ = (
        "_began_s",
        "_call",
        "_credential",
        "_head",
        "_launcher",
        "_limits",
        "_line",
        "_made_hop",
        "_redirects",
        "_renew",
        "_resent",
        "_taken",
        "_told",
    )

    _line: SocketLine

    def __init__(
        self,
        call: Call,
        head: bytes | None,
        credential: str,
        limits: Limits,
        launcher: Launcher,
        renew: Callable[[Secret], Secret | None] | None,
    ) -> None:
        """Send a call.

        Args:
            head: the head of the first request if it is already written, otherwise None.
            credential: the credential of the request. A key among the user's default headers replaces it,
                and is not renewed.
            renew: returns a credential that replaces a rejected one, or None if no other exists. It may
                block, and its errors reach the reader of the answer.

        Raises:
            SendFailed, ConfigurationError, MissingExtraError, InvalidInputError: As for `Launcher.launch`.
        """
        self._credential = credential
        self._renew = renew  # None after its first call: a second rejection is final
        self._call = call
        self._head = head  # None once the request was sent
        self._made_hop: Hop | None = None
        self._limits = limits
        self._launcher = launcher
        self._began_s = launcher.clock.now()
        self._redirects = 0
        self._resent = False  # the server may have received an earlier send
        self._taken = False  # an earlier address has processed the request and redirected to a GET
        self._told = False  # this try is logged or observed
        self._begin()

    @property
    def call(self) -> Call:
        return self._call

    @property
    def _hop(self) -> Hop:
        """The request that is under way, composed when it is first needed."""
        if self._made_hop is None:
            self._made_hop = self._launcher.compose(self._call, self._credential)
        return self._made_hop

    @_hop.setter
    def _hop(self, hop: Hop) -> None:
        self._made_hop = hop

    def fileno(self) -> int:
        """Return the file descriptor of the socket to wait for, or -1 if the socket is closed."""
        return self._line.sock.fileno()

    @property
    def expires_at_s(self) -> float:
        """The moment of the clock at which to call `step` even if nothing has arrived."""
        return self._line.expires_at_s

    def step(self) -> Reply | None:
        """Take the bytes that have arrived, and return the reply if it is whole, otherwise None.

        Raises:
            SendFailed: The attempt ended without a reply.
            CredentialError: The server rejected the token, and no new token could be fetched.
            ConfigurationError: A certificate file or a proxy cannot be used for the address of a redirect.
            InvalidInputError: The request had to be sent again, but an array of its body has changed.
        """
        try:
            raw = self._line.step()
        except SendFailed as failed:
            self._replace_or_raise(failed)
            return None
        return None if raw is None else self._conclude(raw)

    def finish(self) -> Reply:
        """Wait for the reply and return it.

        Raises:
            SendFailed, CredentialError, ConfigurationError, InvalidInputError: As for `step`.
        """
        while True:
            try:
                raw = self._line.finish()
            except SendFailed as failed:
                self._replace_or_raise(failed)
            else:
                reply = self._conclude(raw)
                if reply is not None:
                    return reply

    def abort(self) -> None:
        """Give up the exchange and close its connection. Do nothing once the reply has arrived."""
        self._line.abort()

    @property
    def _repeatable(self) -> bool:
        return self._call.repeatable or (self._made_hop or self._call).method in ("GET", "HEAD")

    def _begin(self) -> None:
        try:
            self._send(fresh=self._call.fresh)
        except SendFailed as failed:
            self._replace_or_raise(failed)

    def _send(self, *, fresh: bool) -> None:
        line = None
        launcher = self._launcher
        head, self._head = self._head, None  # thousands may wait for their answers, and few are sent again
        if head is not None:
            line = launcher.launch_head(self._call, head, self._limits, fresh=fresh)
        if line is None:
            line = launcher.launch(self._hop, self._limits, repeatable=self._repeatable, fresh=fresh)
        self._line = line
        journal = launcher.journal
        self._told = bool(journal.observers) or journal.log.isEnabledFor(logging.DEBUG)
        if self._told:
            journal.sent(self._call, self._hop.headers)

    def _replace_or_raise(self, failed: SendFailed) -> None:
        """Send the request over a new connection if the server had closed the idle one. Otherwise raise.

        A call that must not be repeated is sent again only if the server certainly has not received it.

        Raises:
            SendFailed: the given failure, or that of the second send.
            InvalidInputError: an array of the body has changed since the first send.
        """
        if failed.stale and (self._repeatable or not failed.maybe_received):
            self._resent = self._resent or failed.maybe_received
            try:
                self._send(fresh=True)
            except SendFailed as again:
                failed = again
            except InvalidInputError as changed:  # raised by a body whose arrays have changed
                changed.ambiguous = self._resent
                raise
            else:
                return
        raise self._lost(failed)

    def _conclude(self, raw: ReplyParser) -> Reply | None:
        fields = raw.fields.lines
        if "set-cookie" in fields:
            self._launcher.keep_cookies(self._hop, raw)
        if raw.status in REDIRECTS and self._call.follow_redirects and (location := _location(raw)):
            self._follow(raw.status, location)
            return None
        encoding, body = "", raw.body()
        if "content-encoding" in fields:
            _, encoding = fields["content-encoding"]
        try:
            if encoding:
                body = content.decode(body, encoding, limit=raw.max_body_bytes)
        except (MalformedMessage, MessageTooLarge) as error:
            if raw.status < 400:
                final = isinstance(error, MessageTooLarge)
                raise self._lost(SendFailed(str(error), maybe_received=True, final=final)) from error
            body = f"(the body cannot be read: {error})".encode()  # the status is known all the same
        # The decoder detects an incomplete compressed body.
        may_be_cut = raw.lasts_until_close and not encoding
        reply = Reply(raw.status, raw.fields, body, resent=self._resent, may_be_cut=may_be_cut)
        if self._told:
            launcher = self._launcher
            launcher.journal.answered(self._call, reply, launcher.clock.now() - self._began_s)
        if reply.status == 401 and self._has_new_credential(reply):
            self._begin()
            return None
        return reply

    def _has_new_credential(self, reply: Reply) -> bool:
        """Put a new credential into the request if the server has rejected the credential as invalid.

        Return True if the request now carries a new one.
        """
        renew = self._renew
        if renew is None or not rejects_token(reply.headers.get("www-authenticate")):
            return False
        sent = self._hop.headers.get(API_KEY.lower())
        if sent is None or sent[1] != self._credential:
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
        self._launcher.journal.redirected(
            self._call, status, same_origin=same_origin, to=str(self._hop.origin)
        )
        self._begin()

    def _lost(self, failed: SendFailed) -> SendFailed:
        failed.maybe_received = failed.maybe_received or self._taken or self._resent
        launcher = self._launcher
        launcher.journal.lost(self._call, failed, launcher.clock.now() - self._began_s)
        return failed


def _location(raw: ReplyParser) -> str | None:
    """Return the target of a redirect, or None. Its repr is masked, because it may be a signed address."""
    return next((Secret(value).reveal() for name, value in raw.headers if name.lower() == "location"), None)
