"""Send one request over an idle connection or a new one.

Any thread may enter; the line that is returned belongs to the thread that asked for it.
"""

from __future__ import annotations

import math
from typing import Final

from tinker_sync._clock import Clock
from tinker_sync.transport.call import SendFailed
from tinker_sync.transport.hop import Headers, Hop
from tinker_sync.transport.pools import ConnectFailed, Connection, Pools, Route, connect
from tinker_sync.transport.session import SessionRules, Way
from tinker_sync.transport.socket_line import Limits, RawReply, SocketLine
from tinker_sync.wire.http1.client import request_head

# The usual Python server closes what was idle for 5 s. A call that must not be repeated does not ride a
# connection near that age: if it broke, nobody could tell what happened.
_FRESH_ENOUGH_S: Final = 2.0


class Launcher:
    """Sends requests along the ways the session allows. Thread-safe."""

    def __init__(self, rules: SessionRules, pools: Pools, clock: Clock) -> None:
        self._rules = rules
        self._pools = pools
        self._clock = clock

    def launch(self, hop: Hop, limits: Limits, *, repeatable: bool, fresh: bool) -> SocketLine:
        """Send a request.

        Args:
            hop: What and where to.
            limits: How long it may take.
            repeatable: Whether it may be sent again should the connection turn out to be dead.
            fresh: Over a new connection.

        Raises:
            SendFailed: It was not sent, or not to its end.
        """
        way = self._rules.way_to(hop.origin)
        headers = self._complete(hop, way)
        target = hop.address if way.route.forwarded else hop.target
        head = request_head(hop.method, target, headers.values())
        connection = None if fresh else self._idle(way.route, repeatable)
        if connection is None:
            connection = self._connect(way.route, limits)
        line = SocketLine(connection, self._pools, self._clock, hop.method, limits)
        line.send(head, hop.body)
        return line

    def keep_cookies(self, hop: Hop, reply: RawReply) -> None:
        """Store what an answer wants remembered, as the session would."""
        if "set-cookie" in reply.fields:
            self._rules.keep_cookies(hop.address, reply.headers)

    def _complete(self, hop: Hop, way: Way) -> Headers:
        """The headers of this very hop. `Host` is first, where some servers want it."""
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

    def _idle(self, route: Route, repeatable: bool) -> Connection | None:
        return self._pools.take(route, max_idle_s=None if repeatable else _FRESH_ENOUGH_S)

    def _connect(self, route: Route, limits: Limits) -> Connection:
        left_s = min(limits.connect_s, limits.give_up_s - self._clock.now())
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
