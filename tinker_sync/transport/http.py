"""`Http`: one attempt to send a `Call`, which ends with a `Reply` or with `SendFailed`.

The retries are in `retries.py`. `Http.open` sends a request over an idle connection or a new one, and returns
an `Exchange`, which reads the answer. `Http.send` waits for it. `Http.open_ahead` opens a connection for a
request that follows.

    exchange = http.open(call)      # connects and sends, which may block
    exchange.fileno()               # a reactor puts it into a selector, to wait for a write if `writing`
    reply = exchange.step()         # when it is ready, or `expires_at_s` has come: the reply, or None

With `wait=False`, `open` only begins to connect, and `step` goes on with that. `step` takes the bytes that
have arrived without waiting for more, so one thread can open connections and read answers for many calls;
`finish` waits. Both use the same parser, so a thread may call `finish` after `step`.

An exchange follows redirects. If the server has closed an idle connection in the meantime, the exchange sends
again over a new one, unless this could repeat a call that must not be repeated. If the server rejects the
token of a request as invalid, the exchange gets a new token, if there is one, and sends the same request once
more, even for a call that must not be repeated. In these three cases `step` sends, which may block for a
moment, and `fileno` changes, so a reactor reads it after every `step`.

An exchange belongs to one thread at a time.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Final, NoReturn, Protocol

from attrs import evolve

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, slice_of
from tinker_sync._base.events import ReplyReceived
from tinker_sync._base.secret import Secret
from tinker_sync._embedded import hold_server
from tinker_sync.config import Settings
from tinker_sync.config.settings import DefaultInt
from tinker_sync.errors import APIConnectionError, InvalidInputError
from tinker_sync.transport.body import BLOCK_BYTES, PiecedBody
from tinker_sync.transport.call import NO_HEADERS, OPEN_AHEAD, Call, Reply, SendFailed
from tinker_sync.transport.http2 import MOST_BODY_BYTES, Http2, Stream, is_installed
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.pools import (
    MAX_IDLE,
    ConnectFailed,
    Connection,
    Dial,
    Pools,
    Route,
    connect,
    has_arrived,
)
from tinker_sync.transport.request import (
    MAX_REDIRECTS,
    REDIRECTS,
    Hop,
    RedirectRefused,
    RequestHeads,
    key_header,
    redirected,
)
from tinker_sync.transport.session import SessionRules
from tinker_sync.transport.tokens import rejects_token
from tinker_sync.wire.http1 import content
from tinker_sync.wire.http1.client import (
    RECEIVE_BYTES,
    ReplyParser,
    SpeaksTls,
    request_head,
)
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

__all__ = ["Call", "Credentials", "Exchange", "Http", "Reply", "SendFailed"]

# Common Python servers close connections that were idle for 5 s. A call that must not be repeated does not
# use a connection near that age: if it broke, the fate of the call would be unknown.
_FRESH_ENOUGH_S: Final = 2.0
# A socket's timeout covers one whole `sendall`. Sending in pieces limits each piece, not the whole upload.
_SEND_BYTES: Final = BLOCK_BYTES


class Credentials(Protocol):
    """A source of the credentials that `Http` sends, such as `KeyRing`."""

    def credential(self) -> str: ...
    def for_exchange(self) -> str: ...
    def renewed(self, rejected: Secret) -> Secret | None: ...


class Http:
    """A sender of calls to one base URL. Thread-safe.

    Args:
        settings: the address, timeouts, headers, and the user's session.
        keys: the source of credentials, read at each attempt; None sends none.
        clock: the source of time.
        journal: records every request, answer and failure.
        max_idle: the most idle connections to keep.
    """

    def __init__(
        self,
        settings: Settings,
        keys: Credentials | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        journal: Journal | None = None,
        max_idle: int = MAX_IDLE,
    ) -> None:
        self.settings = settings
        self._keys = keys
        self.clock = clock
        self.journal = journal or Journal()
        self._heads = RequestHeads(settings)
        self._embedded = hold_server(settings.base_url, settings.api_key)
        self.http2: Http2 | None = None
        """The connections of HTTP/2, if the extra is installed and the settings allow it."""
        if settings.http2 and self._heads.origin.scheme == "https" and is_installed():
            self.http2 = Http2(clock, settings.timeout.connect)
            weakref.finalize(self, self.http2.close, wait=False).atexit = False
        self._rules = SessionRules(
            settings.session,
            direct=self._embedded is not None or settings.api_key_source == "local",
            http2=self.http2 is not None,
        )
        self.pools = Pools(clock, max_idle=max_idle)
        self._usual: Route | None = None  # the route of the last connection to the configured server
        self._direct: Route | None = None  # to the configured server if no proxy leads there; fixed
        self.kind_limits_answer = isinstance(settings.max_body_bytes, DefaultInt)
        """True if the kind of a call limits its answer too; False if the user has set the limit."""

    def send(self, call: Call) -> Reply:
        """Make one attempt to send a call, and return the answer of any status.

        Raises:
            SendFailed: No answer came.
            CredentialError: The call needs a key and none is usable.
            TinkerError: The exchange of the key for the first token failed.
            ConfigurationError: A certificate file or a proxy cannot be used.
            ConfigurationError, MissingExtraError: The embedded server cannot be started.
            InvalidInputError: An array of the body has changed since an earlier try.
        """
        return self.open(call).finish()

    def open(self, call: Call, *, wait: bool = True) -> Exchange:
        """Send a call and return the exchange that reads its answer. Connecting and sending may block.

        Args:
            call: the call.
            wait: False to return before a new connection is open. Then this blocks only if `opens_at_once`
                returns False, or the body is large.

        Raises:
            SendFailed: The call could not be sent.
            TinkerError: As for `send`.
        """
        credential, renewer = "", None
        if self._keys is not None and call.credential == "usual":
            credential = self._keys.credential()
            renewer = self._keys if credential else None
        elif self._keys is not None and call.credential == "exchange":
            credential = self._keys.for_exchange()
        head = self._heads.write(call, credential) if self._rules.adds_nothing else None
        return Exchange(self, call, head, credential, renewer, wait=wait)

    def open_ahead(self) -> Opening:
        """Begin to open a connection for a request that follows. This does not wait.

        Raises:
            SendFailed: No connection can be opened, or not without waiting.
            ConfigurationError: A certificate file or a proxy cannot be used.
        """
        route = self.route()
        if self._embedded is not None or not route.looked_up:
            raise SendFailed("the address of the server is not known", maybe_received=False)
        return Opening(self, route)

    def opens_at_once(self) -> bool:
        """Return True if the next request probably has a connection, or begins to open one without waiting.

        This method takes no lock, so the answer may lag by a moment.
        """
        if self.pools.has_idle() or self.multiplexes:
            return True
        return self._usual is not None and self._embedded is None and self._usual.looked_up

    @property
    def multiplexes(self) -> bool:
        """True if small requests share connections at the moment."""
        return self.http2 is not None and self.http2.is_open

    def start_server(self) -> None:
        """Start the embedded server if these calls go to it and it is not running.

        Raises:
            SendFailed: The server has ended by itself.
            ConfigurationError: Its directory or its model cannot be used.
            MissingExtraError: A package that it needs is not installed.
        """
        if self._embedded is None:
            return
        try:
            self._embedded.start()
        except APIConnectionError as error:
            raise SendFailed(str(error), maybe_received=False, final=True) from error

    def route(self) -> Route:
        """Return the route of requests to the configured server.

        Raises:
            ConfigurationError: A certificate file or a proxy cannot be used.
        """
        return self._rules.route_to(self._heads.origin)

    def forget_idle(self) -> None:
        """Close the idle connections, so that the next requests use new ones."""
        self.pools.forget_idle()
        if self.http2 is not None:
            self.http2.forget_idle()

    def close(self) -> None:
        """Close all connections, and release the hold that keeps the embedded server running.

        Requests under way fail. May be called twice, from any thread.
        """
        self.pools.close()
        if self.http2 is not None:
            self.http2.close()
        self._rules.close()
        if self._embedded is not None:
            self._embedded.release()

    @property
    def closed(self) -> bool:
        return self.pools.closed

    @property
    def embedded(self) -> bool:
        """True if the calls go to the embedded server of this process."""
        return self._embedded is not None

    def renew_after_fork(self) -> None:
        """Drop the copies of the parent's connections, in a forked child."""
        self.pools.renew_after_fork()
        if self.http2 is not None:
            self.http2.renew_after_fork()
        self._rules.renew_after_fork()

    def __repr__(self) -> str:
        return f"<Http {self.settings.base_url} {self.pools!r}>"

    # ---------------------------------------------------- for exchanges

    def compose(self, call: Call, credential: str) -> Hop:
        """Return the first request of a call."""
        return self._heads.hop(call, credential, self._rules.headers())

    def direct_route(self) -> Route | None:
        """Return the route to the configured server, or None if a proxy leads there."""
        if self._direct is None:
            route = self.route()
            if route.proxy is not None:
                return None
            self._direct = route
        return self._direct

    def write(self, hop: Hop) -> tuple[Route, bytes]:
        """Return the route and the whole head of a request. `Host` comes first, as some servers require.

        Raises:
            ConfigurationError: A certificate file or a proxy cannot be used.
        """
        route = self._rules.route_to(hop.origin)
        headers = {"host": ("Host", hop.origin.netloc), **hop.headers}
        authorization = self._rules.authorization(route) if hop.own else route.netrc
        if authorization:
            headers.setdefault("authorization", ("Authorization", authorization))
        cookies = self._rules.cookies_for(hop.address) if self._rules.has_cookies else None
        if cookies:
            headers.setdefault("cookie", ("Cookie", cookies))
        if hop.body is not None or hop.method not in ("GET", "HEAD"):
            headers["content-length"] = ("Content-Length", str(len(hop.body or b"")))
        if route.forwarded:
            for name, value in route.proxy_headers.items():
                headers[name.lower()] = (name, value)
        target = hop.address if route.forwarded else hop.target
        return route, request_head(hop.method, target, headers.values())

    def connect(self, route: Route, call: Call, give_up_s: float) -> Connection:
        """Open a connection for a request that must be over at the moment `give_up_s` of the clock.

        Raises:
            SendFailed: There is no connection.
            ConfigurationError, MissingExtraError: The embedded server cannot be started.
        """
        limit_s = self._connect_s(route, call, give_up_s)
        try:
            connection = connect(route, limit_s if math.isfinite(limit_s) else None)
        except ConnectFailed as error:
            raise _not_connected(error) from error
        return self.adopt(connection)

    def dial(self, route: Route, call: Call, give_up_s: float) -> Dial:
        """Begin to open a connection; see `connect`."""
        limit_s = self._connect_s(route, call, give_up_s)
        try:
            return Dial(route, limit_s, give_up_s, self.clock.now)
        except ConnectFailed as error:
            raise _not_connected(error) from error

    def adopt(self, connection: Connection) -> Connection:
        """Count a new connection as in use, and return it. One of HTTP/2 goes to `http2`.

        Raises:
            SendFailed: The client is closed; the connection is closed too.
        """
        if connection.multiplexed and self.http2 is not None:
            self.http2.adopt(connection)
        elif not self.pools.adopt(connection):
            connection.close()
            raise SendFailed("the client is closed", maybe_received=False, final=True)
        return connection

    def without_http2(self, route: Route) -> Route:
        """Return the route that leads the same way and offers HTTP/1.1 alone."""
        return self._rules.without_http2(route)

    def _connect_s(self, route: Route, call: Call, give_up_s: float) -> float:
        self.start_server()
        if route.origin == self._heads.origin:
            self._usual = route
        left_s = min((call.timeout or self.settings.timeout).connect, give_up_s - self.clock.now())
        if left_s <= 0:
            raise SendFailed("no time was left to connect", maybe_received=False, timed_out=True)
        return left_s

    def keep_cookies(self, hop: Hop, reply: ReplyParser) -> None:
        """Store the cookies of an answer, as a `requests.Session` does."""
        self._rules.keep_cookies(hop.address, reply.headers)


class Exchange:
    """One attempt to send a call and read its answer, with redirects. `Http.open` makes it.

    At the end of a request, the exchange returns the connection to the pools, or closes it if it cannot be
    used again. For one thread at a time.
    """

    # Slots, because tens of thousands may wait for their answers.
    __slots__ = (
        "_began_s",
        "_connection",
        "_credential",
        "_dial",
        "_give_up_s",
        "_head",
        "_http",
        "_idle_s",
        "_made_hop",
        "_made_parser",
        "_over",
        "_read_s",
        "_redirects",
        "_renewer",
        "_resent",
        "_sent",
        "_stream",
        "_taken",
        "_told",
        "_unsent",
        "_wait",
        "call",
        "expires_at_s",
        "writing",
    )

    _connection: Connection

    def __init__(
        self,
        http: Http,
        call: Call,
        head: bytes | None,
        credential: str,
        renewer: Credentials | None,
        *,
        wait: bool = True,
    ) -> None:
        """Send a call.

        Args:
            http: the sender.
            call: the call.
            head: the head of the first request if it is already written, otherwise None.
            credential: the credential of the request. A key among the user's default headers replaces it,
                and is not renewed.
            renewer: renews a rejected credential; None if it must not be renewed. It may block, and its
                errors reach the reader of the answer.
            wait: False to return before a new connection is open.

        Raises:
            SendFailed: The request was not sent, or not to its end.
            ConfigurationError: A certificate file or a proxy cannot be used.
            ConfigurationError, MissingExtraError: The embedded server cannot be started.
            InvalidInputError: An array of the body has changed since an earlier try.
        """
        self._http = http
        self.call = call
        self._head = head  # None once the request was sent
        self._credential = credential
        self._renewer = renewer  # None after its first use: a second rejection is final
        self._made_hop: Hop | None = None
        self._made_parser: ReplyParser | None = None
        timeout = call.timeout or http.settings.timeout
        # The first one also limits each piece of the request; the other is that between pieces of the answer.
        self._read_s = read_s = call.read_s or timeout.read
        self._idle_s = timeout.idle or read_s
        self._began_s = http.clock.now()
        # The moment of the clock at which the request must be over.
        self._give_up_s = math.inf if call.deadline_s is None else self._began_s + call.deadline_s
        self.expires_at_s = self._give_up_s
        """The moment of the clock at which to call `step` even if nothing has arrived."""
        self.writing = False
        """True if the next step needs a socket that can be written, not one that can be read."""
        self._redirects = 0
        self._sent = False  # the whole request under way
        self._over = True  # no request is under way
        self._resent = False  # the server may have received an earlier send
        self._taken = False  # an earlier address has processed the request and redirected to a GET
        self._told = False  # this try is logged or observed
        self._wait = wait
        self._stream: Stream | None = None  # the request that is under way, if it goes over HTTP/2
        self._dial: Dial | None = None  # opens the connection of the request that is under way
        self._unsent: tuple[bytes, bytes | PiecedBody | None] | None = None  # that request, until it is sent
        self._begin()

    def fileno(self) -> int:
        """Return the file descriptor of the socket to wait for, or -1 if the socket is closed.

        A stream of HTTP/2 has no socket of its own; it has a number below -1.
        """
        stream = self._stream  # read once: another thread may go on with the exchange
        if stream is not None:
            return stream.number
        dial = self._dial
        return (self._connection if dial is None else dial).sock.fileno()

    def watched_by(self, watcher: object) -> bool:
        """Note that `watcher`, or nothing if it is None, watches the connection from now on.

        Return True if it watched the connection for an earlier request too.
        """
        stream = self._stream
        if stream is not None:
            stream.watched_by(watcher)
            return True
        if self._dial is not None:  # the connection is not open yet
            self._dial.watcher = watcher
            return False
        before, self._connection.watcher = self._connection.watcher, watcher
        return before is watcher

    def step(self) -> Reply | None:
        """Take the bytes that have arrived, and return the reply if it is whole, otherwise None.

        Raises:
            SendFailed: The attempt ended without a reply.
            CredentialError: The server rejected the token, and no new token could be fetched.
            ConfigurationError: A certificate file or a proxy cannot be used for the address of a redirect.
            InvalidInputError: The request had to be sent again, but an array of its body has changed.
        """
        try:
            if self._dial is not None:
                self._go_on_connecting(self._dial)
                return None
            stream = self._stream
            raw = self._take_arrived() if stream is None else self._take_answer(stream)
        except SendFailed as failed:
            self._replace_or_raise(failed)
            return None
        return None if raw is None else self._conclude(raw)

    def finish(self) -> Reply:
        """Wait for the reply and return it.

        Raises:
            SendFailed, CredentialError, ConfigurationError, InvalidInputError: As for `step`.
        """
        try:
            while True:
                self._await_bytes()
                reply = self.step()
                if reply is not None:
                    return reply
        except BaseException:  # Ctrl-C leaves half an answer on the connection
            self.abort()
            raise

    def abort(self) -> None:
        """Give up the exchange and close its connection. Do nothing once the reply has arrived."""
        if not self._over:
            self._over = True
            if self._stream is not None:
                self._stream.give_up()
            elif self._dial is None:
                self._http.pools.discard(self._connection)
            else:
                self._dial.abort()

    # ---------------------------------------------------- requests

    @property
    def _hop(self) -> Hop:
        """The request that is under way, composed when it is first needed."""
        if self._made_hop is None:
            self._made_hop = self._http.compose(self.call, self._credential)
        return self._made_hop

    @property
    def _repeatable(self) -> bool:
        return self.call.repeatable or (self._made_hop or self.call).method in ("GET", "HEAD")

    def _begin(self) -> None:
        try:
            self._send(fresh=self.call.fresh)
        except SendFailed as failed:
            self._replace_or_raise(failed)

    def _send(self, *, fresh: bool) -> None:
        http, call = self._http, self.call
        head, self._head = self._head, None  # thousands may wait for their answers, and few are sent again
        route = None if head is None else http.direct_route()
        body = call.body
        if route is None or head is None:
            route, head = http.write(self._hop)
            body = self._hop.body
        connection = None
        if route.offers_http2 and route.known.http2 is not False:
            if self._is_stream(route, body):
                if route.known.http2:
                    self._begin_stream(route, head, body, fresh=fresh)
                    return
            else:
                route = http.without_http2(route)
        if not fresh:
            connection = http.pools.take(route, max_idle_s=None if self._repeatable else _FRESH_ENOUGH_S)
        if connection is None and not self._wait:
            self._dial, self._unsent = http.dial(route, call, self._give_up_s), (head, body)
            self._over = False
            self._go_on_connecting(self._dial)
            return
        self._write(connection or http.connect(route, call, self._give_up_s), head, body)

    def _is_stream(self, route: Route, body: bytes | PiecedBody | None) -> bool:
        """Return True if the request goes over HTTP/2 if the server speaks it."""
        http2 = self._http.http2
        return http2 is not None and http2.takes(route) and len(body or b"") <= MOST_BODY_BYTES

    def _begin_stream(
        self, route: Route, head: bytes, body: bytes | PiecedBody | None, *, fresh: bool
    ) -> None:
        """Send the request as a stream of HTTP/2.

        Raises:
            SendFailed: No connection could be opened.
            InvalidInputError: An array of the body has changed since an earlier try.
        """
        http, http2 = self._http, self._http.http2
        assert http2 is not None  # noqa: S101  # only then a connection is one of HTTP/2
        if isinstance(body, PiecedBody):
            try:
                body = b"".join(body.to_send())
            except InvalidInputError as changed:
                changed.ambiguous = self._resent
                raise
        dial = None if http2.serves(route) else http.dial(route, self.call, math.inf)
        self._made_parser, self._over = None, False
        self._begin_silence(self._read_s)
        self._stream = http2.send(route, head, body or b"", self._parser, fresh=fresh, dial=dial)
        if self.call.on_sent is not None:
            self.call.on_sent()
        self._tell_sent()

    def _take_answer(self, stream: Stream) -> ReplyParser | None:
        """Return the answer of a stream if it is whole, else None."""
        if not stream.done:
            limit_s = self._idle_s if stream.parser.started else self._read_s
            self.expires_at_s = min(stream.touched_s + limit_s, self._give_up_s)
            if self._http.clock.now() < self.expires_at_s:
                return None
            stream.give_up(silent=True)
            self._stream, self._over = None, True
            raise SendFailed(
                "the answer stopped coming" if stream.parser.started else "no answer came in time",
                maybe_received=stream.sent,
                timed_out=True,
            )
        self._stream, self._over = None, True
        if stream.failure is not None:
            raise stream.failure
        return stream.parser

    def _go_on_connecting(self, dial: Dial) -> None:
        """Go on to open the connection, and send the request if it is open.

        Raises:
            SendFailed, InvalidInputError: As for `_write`; or the connection cannot be opened.
        """
        try:
            opened = dial.step()
            if opened is not None and opened.multiplexed and dial.watcher is not None:
                dial.watcher.forget(opened.sock.fileno())  # `http2` reads it from now on
            connection = None if opened is None else self._http.adopt(opened)
        except ConnectFailed as error:
            self._over = True
            raise _not_connected(error) from error
        except SendFailed:
            self._over = True
            raise
        self.expires_at_s, self.writing = dial.expires_at_s, dial.writing and connection is None
        if connection is None:
            return
        # In this order, because another thread may ask for `fileno`.
        self._connection = connection
        (head, body), self._dial, self._unsent = self._unsent or (b"", None), None, None
        self._write(connection, head, body)

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
            else:
                return
        raise self._lost(failed)

    def _conclude(self, raw: ReplyParser) -> Reply | None:
        fields = raw.fields.lines
        if "set-cookie" in fields:
            self._http.keep_cookies(self._hop, raw)
        if raw.status in REDIRECTS and self.call.follow_redirects and (location := _location(raw)):
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
            http = self._http
            http.journal.answered(self.call, reply, http.clock.now() - self._began_s)
        if reply.status == 401 and self._has_new_credential(reply):
            self._begin()
            return None
        return reply

    def _has_new_credential(self, reply: Reply) -> bool:
        """Put a new credential into the request if the server has rejected the credential as invalid.

        Return True if the request now carries a new one.
        """
        renewer = self._renewer
        if renewer is None or not rejects_token(reply.headers.get("www-authenticate")):
            return False
        if not key_header(self._credential).items() <= self._hop.headers.items():
            return False
        self._renewer = None
        renewed = renewer.renewed(Secret(self._credential))
        if renewed is None:
            return False
        self._made_hop = evolve(self._hop, headers={**self._hop.headers, **key_header(renewed.reveal())})
        return True

    def _follow(self, status: int, location: str) -> None:
        self._redirects += 1
        before = self._hop
        if self._redirects > MAX_REDIRECTS:
            problem = f"the server redirects more than {MAX_REDIRECTS} times"
            raise self._lost(SendFailed(problem, maybe_received=True, final=True))
        try:
            self._made_hop = redirected(before, status, location)
        except RedirectRefused as error:
            raise self._lost(SendFailed(str(error), maybe_received=True, final=True)) from error
        self._taken = self._taken or self._hop.method != before.method
        same_origin = self._hop.origin == before.origin
        self._http.journal.redirected(self.call, status, same_origin=same_origin, to=str(self._hop.origin))
        self._begin()

    def _lost(self, failed: SendFailed) -> SendFailed:
        failed.maybe_received = failed.maybe_received or self._taken or self._resent
        http = self._http
        http.journal.lost(self.call, failed, http.clock.now() - self._began_s)
        return failed

    # ---------------------------------------------------- bytes

    @property
    def _parser(self) -> ReplyParser:
        """The parser of the answer, made when it is first needed."""
        if self._made_parser is None:
            method = (self._made_hop or self.call).method
            most_bytes = self._http.settings.max_body_bytes
            if self._http.kind_limits_answer:
                most_bytes = min(most_bytes, self.call.answer_bytes)
            self._made_parser = ReplyParser(method, max_body_bytes=most_bytes)
        return self._made_parser

    def _write(self, connection: Connection, head: bytes, body: bytes | PiecedBody | None) -> None:
        """Send the request. Return early if the server has answered before the end of the request.

        Raises:
            SendFailed: The connection broke or stalled before the end of the request, so the server has not
                received the whole.
            InvalidInputError: An array of the body has changed since an earlier try.
        """
        if connection.multiplexed:
            self._begin_stream(connection.route, head, body, fresh=True)
            return
        self._connection, self._made_parser, self._sent, self._over = connection, None, False, False
        try:
            if isinstance(body, PiecedBody):
                self._send_pieces(chain((head,), body.to_send()))
            elif not body or len(body) <= _SEND_BYTES:
                self._send_piece(head + body if body else head)  # a small body shares the packet of its head
            else:
                view = memoryview(body)
                blocks = (view[at : at + _SEND_BYTES] for at in range(0, len(view), _SEND_BYTES))
                self._send_pieces(chain((head,), blocks))
            self._sent = True
            if self.call.on_sent is not None:
                self.call.on_sent()
        except OSError as error:
            if not self._answered_early():
                self._fail(error)
        except InvalidInputError as changed:  # raised by a body whose arrays have changed
            changed.ambiguous = self._resent
            self.abort()
            raise
        except BaseException:
            self.abort()
            raise
        self._tell_sent()

    def _tell_sent(self) -> None:
        journal = self._http.journal
        self._told = bool(journal.events.wants(ReplyReceived)) or journal.log.isEnabledFor(logging.DEBUG)
        if self._told:
            journal.sent(self.call, self._hop.headers)

    def _send_piece(self, piece: bytes | memoryview) -> None:
        """Send a piece.

        First send as much as the socket takes without blocking, which is the whole of most pieces. Then block
        for what is left, with a timeout.
        """
        sock, now_s = self._connection.sock, self._http.clock.now()
        self.expires_at_s = min(now_s + self._read_s, self._give_up_s)
        if self.expires_at_s <= now_s:
            raise TimeoutError("timed out")
        try:
            at = sock.send(piece)
        except self._connection.nothing_yet:
            at = 0
        if at < len(piece):
            left_s = self.expires_at_s - now_s
            sock.settimeout(left_s if math.isfinite(left_s) else None)
            try:
                sock.sendall(memoryview(piece)[at:])
            finally:
                sock.settimeout(0)
            self._begin_silence(self._read_s)

    def _send_pieces(self, pieces: Iterator[bytes | memoryview]) -> None:
        """Send the pieces of a request. Keep the last one back if bytes have arrived on a used connection.

        The server has not read the request by then, so the bytes belong to the answer of an earlier one, as
        when a proxy sends an answer twice. Or they refuse this request; a new connection will show that.
        """
        last = next(pieces)
        for piece in pieces:
            self._send_piece(last)
            last = piece
        connection = self._connection
        if connection.requests and not connection.is_quiet():
            raise SendFailed(
                "bytes came on the connection before the request was sent",
                maybe_received=False,
                stale=not self._http.pools.closed,
                final=self._http.pools.closed,
            )
        self._send_piece(last)

    def _await_bytes(self) -> None:
        """Wait until `step` makes progress, or until `expires_at_s`."""
        stream = self._stream
        if stream is not None:
            stream.wait(slice_of(max(self.expires_at_s - self._http.clock.now(), 0.0)))
            return
        done = self._dial is None and self._parser.done
        left_s = 0.0 if done else self.expires_at_s - self._http.clock.now()
        sock = (self._dial or self._connection).sock
        while left_s > 0 and not has_arrived(sock, slice_of(left_s), writing=self.writing):
            left_s -= slice_of(left_s)

    def _take_arrived(self) -> ReplyParser | None:
        """Take the bytes that have arrived. Return the answer if it is whole, else None."""
        connection, parser = self._connection, self._parser
        try:
            self._read(parser)
        except connection.nothing_yet:
            if self._http.clock.now() >= self.expires_at_s:
                self._fail(TimeoutError("timed out"))
            return None
        except (OSError, MalformedMessage, MessageTooLarge) as error:
            self._fail(error)
        if not self._over:
            self._over = True
            connection.count_answer()
            # After a 5xx, servers often close the connection without announcing it in the answer. The next
            # call on it may be one that must not be repeated.
            if parser.keep_alive and parser.status < 500:
                self._http.pools.give_back(connection)
            else:
                self._http.pools.discard(connection)
        return parser

    def _begin_silence(self, limit_s: float) -> None:
        self.expires_at_s = min(self._http.clock.now() + limit_s, self._give_up_s)

    def _read(self, parser: ReplyParser) -> None:
        """Read until the answer is whole, without waiting for bytes."""
        sock = self._connection.sock
        while not parser.done:
            room = parser.room() if parser.started else None
            if room is not None:
                with room:
                    count = sock.recv_into(room)
                parser.fill(count)
            elif data := sock.recv(parser.wants if parser.started else RECEIVE_BYTES):
                parser.feed(data)
            else:
                parser.eof()
            if not parser.done:
                self._begin_silence(self._idle_s)

    def _answered_early(self) -> bool:
        """Return True if the whole answer has arrived, though the request was not sent to its end.

        A server may refuse a large body before it has read the whole.
        """
        try:
            self._read(self._parser)
        except (OSError, MalformedMessage, MessageTooLarge):
            return False
        self._parser.keep_alive = False
        return True

    def _fail(self, error: Exception) -> NoReturn:
        self.abort()
        timed_out = isinstance(error, TimeoutError)
        unheard = not self._parser.started and not timed_out
        if isinstance(error, SpeaksTls):
            # The server cannot read plain HTTP at this port, so it has not received the request.
            netloc = self._connection.route.origin.netloc
            message = (
                f"the server at {netloc} speaks TLS; begin its address with https://, or name another port"
            )
            raise SendFailed(message, maybe_received=False, final=True) from error
        raise SendFailed(
            self._describe(error),
            maybe_received=self._sent,
            timed_out=timed_out,
            stale=unheard and self._connection.requests > 0 and not self._http.pools.closed,
            final=isinstance(error, MessageTooLarge) or self._http.pools.closed,
        ) from error

    def _describe(self, error: Exception) -> str:
        if self._http.pools.closed:
            return "the client was closed while the request was under way"
        started = self._parser.started
        if isinstance(error, TimeoutError):
            if not self._sent:
                return "the server stopped reading the request"
            return "the answer stopped coming" if started else "no answer came in time"
        text = str(error)
        if isinstance(error, OSError):
            text = f"the connection broke: {error.strerror or error}"
        connection = self._connection
        if not (started or connection.requests) and connection.route.origin.scheme == "http":
            text += "; if the server speaks TLS, its address begins with https://"
        return text


class Opening:
    """The opening of a connection before the request that needs it, for which the pools then keep it.

    For a reactor it is a request, whose reply is empty. For one thread at a time.

    Raises:
        SendFailed: There is no connection.
    """

    __slots__ = ("_dial", "_http")

    def __init__(self, http: Http, route: Route) -> None:
        self._http = http
        self._dial = http.dial(route, OPEN_AHEAD, math.inf)

    @property
    def expires_at_s(self) -> float:
        """The moment of the clock at which to call `step` even if the socket is not ready."""
        return self._dial.expires_at_s

    @property
    def writing(self) -> bool:
        """True if the next step needs a socket that can be written, not one that can be read."""
        return self._dial.writing

    def fileno(self) -> int:
        """Return the file descriptor of the socket to wait for, or -1 if the socket is closed."""
        return self._dial.sock.fileno()

    def watched_by(self, _watcher: object) -> bool:
        """Return False, because nothing has watched the connection for an earlier request."""
        return False

    def step(self) -> Reply | None:
        """Go on with the opening. Return an empty reply once the pools have the connection.

        Raises:
            SendFailed: There is no connection.
        """
        try:
            opened = self._dial.step()
        except ConnectFailed as error:
            raise _not_connected(error) from error
        if opened is None:
            return None
        self._http.adopt(opened)
        if not opened.multiplexed:
            self._http.pools.give_back(opened)
        return Reply(200, NO_HEADERS)

    def abort(self) -> None:
        """Close the socket."""
        self._dial.abort()


def _not_connected(error: ConnectFailed) -> SendFailed:
    return SendFailed(str(error), maybe_received=False, timed_out=error.timed_out, final=error.final)


def _location(raw: ReplyParser) -> str | None:
    """Return the target of a redirect, or None. Its repr is masked, because it may be a signed address."""
    return next((Secret(value).reveal() for name, value in raw.headers if name.lower() == "location"), None)
