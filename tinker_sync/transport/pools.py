"""Connections to servers, kept open between requests.

A `Route` describes the way to an origin: direct or through an HTTP proxy, and the TLS settings. A `Dial`
opens a connection step by step without waiting, so that one thread opens hundreds at once; `connect` does the
same and waits. `Pools` keeps the idle connections of each route. `http.py` writes and reads on their sockets.

Any thread may take a connection and give it back. Only one thread at a time uses a connection.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import socket
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from attrs import field, frozen

from tinker_sync._base.clock import Clock, slice_of
from tinker_sync._base.secret import HeaderMap, mask_url
from tinker_sync.wire.http1.client import request_head

if TYPE_CHECKING:
    import ssl

# Enough for every long poll of a busy client to reuse its connection. Each idle one costs a file descriptor.
MAX_IDLE: Final = 1000
# Servers close idle connections after 5 s to an hour, and that is noticed before the next use. Until then a
# new burst needs no handshakes. What drops silent connections on the way sees probes of TCP (below).
MAX_IDLE_S: Final = 600.0
_LOOK_EVERY_S: Final = 1.0
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# The names in various versions of OpenSSL for an answer that is not TLS.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
_idle_since_s: Final = attrgetter("idle_since_s")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.\d (\d{3})\b")
_NO_ANSWER: Final = "the proxy did not answer the request for a tunnel"
_TUNNEL_HEAD_BYTES: Final = 64 * 1024
# One lookup of a name serves all connections of a burst, and not those of the next minute.
_LOOKUP_S: Final = 10.0
# An address that is silent for so long gives way to the next one, and gets its full time after the others.
_NEXT_ADDRESS_S: Final = 0.3

Address = tuple[int, Any]
"""A family of addresses, and an address as sockets take it."""


def _socket_options() -> list[tuple[int, int, int]]:
    """Return the options of new sockets: small requests go out at once, and silent connections are probed.

    Within a minute, the probes notice that the other side of a long poll is gone.
    """
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


_SOCKET_OPTIONS: Final = _socket_options()


class Origin(NamedTuple):
    """The scheme, host and port of a server; credentials are bound to an origin.

    >>> Origin.of("HTTPS://Host/x?y"), Origin.of("https://host:443") == Origin.of("https://host")
    (Origin(scheme='https', host='host', port=443), True)
    """

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str | SplitResult) -> Origin:
        """Return the origin of an address.

        Raises:
            ValueError: The address has no http or https scheme, no host, or an impossible port.
        """
        parts = urlsplit(url) if isinstance(url, str) else url
        scheme = parts.scheme.lower()
        if scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError("not an http or https address")
        host = parts.hostname
        if not host.isascii():
            host = host.encode("idna").decode("ascii")
        return cls(scheme, host, parts.port or _DEFAULT_PORTS[scheme])

    @property
    def netloc(self) -> str:
        """The host, and the port unless it is the scheme's default, as in a `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}"


class Known:
    """What connections have learnt about a route, for those that are opened later.

    Any thread may read and replace the attributes.
    """

    __slots__ = ("addresses", "http2", "session", "streams", "until_s")

    def __init__(self) -> None:
        self.addresses: tuple[Address, ...] = ()
        """Those of the peer. The one that was reached last is the first."""
        self.until_s = -math.inf
        """The time of the system's clock until which the addresses count."""
        self.session: ssl.SSLSession | None = None
        """That of the newest connection, or of one that was opened at the same time.

        To resume it costs fewer bytes and less CPU than a new handshake.
        """
        self.http2: bool | None = None
        """True if the server chose HTTP/2 for the newest connection, which offered it; False if not."""

        self.streams = 10
        """How many requests a connection of HTTP/2 carries at once. The server tells after the first ones."""

    def hold(self) -> None:
        """Take the addresses as new: a connection to one of them is open."""
        self.until_s = max(self.until_s, time.monotonic() + _LOOKUP_S)


@frozen(eq=False)
class Route:
    """The way to an origin: direct or through a proxy, with TLS settings.

    Routes compare by identity, because `session.SessionRules` makes one for each origin.
    """

    origin: Origin
    tls: ssl.SSLContext | None = None
    """The TLS settings for an https origin, otherwise None."""
    proxy: Origin | None = None
    """An HTTP proxy: it opens a tunnel to an https origin, and forwards requests to an http origin."""
    proxy_headers: Mapping[str, str] = field(factory=HeaderMap, converter=HeaderMap)
    options: Mapping[str, Any] = field(factory=dict, repr=False)
    """`proxies`, `verify` and `cert`, for transfers of files, which use the session's own adapter."""
    netrc: str | None = None
    """The `Authorization` from the user's netrc file; its repr is masked."""
    known: Known = field(factory=Known, repr=False)
    offers_http2: bool = False
    """True if the TLS settings offer HTTP/2 beside HTTP/1.1."""

    @property
    def peer(self) -> Origin:
        """The server that the socket is connected to."""
        return self.proxy or self.origin

    @property
    def looked_up(self) -> bool:
        """True if a new connection needs no lookup of the peer's name."""
        return self.known.until_s > time.monotonic()

    @property
    def forwarded(self) -> bool:
        """True if a proxy reads the requests and forwards them; False for a tunnel or no proxy."""
        return self.proxy is not None and self.origin.scheme == "http"


class ConnectFailed(Exception):
    """A connection could not be opened, so no part of the request was sent."""

    def __init__(self, message: str, *, timed_out: bool = False, final: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.final = final
        """True if another try would end the same way, as with a bad certificate or a proxy that refuses."""


class Connection:
    """An open socket to a server or proxy, with its route and the data that decide on its reuse."""

    __slots__ = (
        "_known_session",
        "idle_since_s",
        "multiplexed",
        "nothing_yet",
        "requests",
        "route",
        "sock",
        "watcher",
    )

    def __init__(self, route: Route, sock: socket.socket) -> None:
        self.route = route
        self.requests = 0
        """The number of answers that were read from the connection."""
        self.idle_since_s = 0.0
        self.sock = sock  # never blocks, except while a large piece of a request is sent
        self._known_session = route.known.session
        self.watcher: object = None
        """What watches the socket for answers, from the first request on."""
        self.nothing_yet: tuple[type[OSError], ...] = (BlockingIOError,)
        """The exceptions by which a read on a non-blocking socket reports that it would have to wait."""
        self.multiplexed = False
        """True if the server has chosen HTTP/2: the connection carries many requests at once."""
        if route.offers_http2:
            self.multiplexed = sock.selected_alpn_protocol() == "h2"  # type: ignore[attr-defined]
            route.known.http2 = self.multiplexed
        if route.tls is not None:
            import ssl  # already loaded with the settings of the route

            self.nothing_yet = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def count_answer(self) -> None:
        """Count an answer that was read to its end."""
        self.requests += 1
        if self.requests == 1 and self.route.tls is not None:
            known = self.route.known
            if known.session is self._known_session:
                # The first connection of a burst does this for all, because a copy takes half the CPU of a
                # handshake. Tickets of TLS 1.3 follow the handshake, so they come with the first answer.
                known.session = getattr(self.sock, "session", None)

    def close(self) -> None:
        """Close the connection. The other side sees this, unless another process has a copy of the socket."""
        # A TLS socket that the peer has reset may raise here, but is closed.
        with contextlib.suppress(OSError):
            self.sock.close()

    def interrupt(self) -> None:
        """Wake the thread that reads or writes on the connection; that thread closes it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def is_quiet(self) -> bool:
        """Return True if the connection can be reused: nothing has arrived since the last answer."""
        sock = self.sock
        try:
            if type(sock) is not socket.socket:  # TLS has its own buffer
                if not self.requests:
                    sock.recv(1)  # takes in the tickets that follow the handshake
                    return False
                if sock.pending():  # type: ignore[attr-defined]
                    return False
            return not has_arrived(sock)  # which is cheaper than to peek, because it raises nothing
        except self.nothing_yet:
            return True
        except (OSError, ValueError):  # the socket was reset, or closed by another thread
            return False


def has_arrived(sock: socket.socket, wait_s: float = 0.0, *, writing: bool = False) -> bool:
    """Wait at most `wait_s` seconds for bytes, or to write. Return True if a call would not block."""
    descriptor = sock.fileno()
    if descriptor < 0:  # closed by another thread, so that a read fails at once
        return True
    if not hasattr(select, "poll"):
        reads, writes = ([], [sock]) if writing else ([sock], [])
        return any(select.select(reads, writes, [], wait_s))
    poll = select.poll()  # unlike select, it takes descriptors above 1024
    poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
    return bool(poll.poll(math.ceil(wait_s * 1000)))


def connect(route: Route, timeout_s: float | None) -> Connection:
    """Open a connection.

    Args:
        route: the way to the server.
        timeout_s: the limit for each step: TCP to one address, the tunnel of a proxy, TLS. The name lookup
            has no limit here. None means no limit.

    Raises:
        ConnectFailed: No connection was opened. The text names the cause and holds no credentials.
    """
    dial = Dial(route, math.inf if timeout_s is None else timeout_s)
    try:
        while (connection := dial.step()) is None:
            left_s = dial.expires_at_s - time.monotonic()
            while left_s > 0 and not has_arrived(dial.sock, slice_of(left_s), writing=dial.writing):
                left_s -= slice_of(left_s)
    except BaseException:  # Ctrl-C too
        dial.abort()
        raise
    return connection


class Dial:
    """The opening of one connection, which waits for nothing but the lookup of a name.

    For one thread at a time.

        dial = Dial(route, 10.0)                    # looks the name up
        while (connection := dial.step()) is None:
            ...                                     # wait until `sock` can be read, or written if `writing`

    The addresses of a name are tried one after the other.

    Args:
        route: the way to the server.
        timeout_s: the limit for each step: TCP to one address, the tunnel of a proxy, TLS.
        give_up_s: the time of the clock at which all of it must be over.
        now: returns the time of the clock.

    Raises:
        ConnectFailed: as for `connect`.
    """

    __slots__ = (
        "_address",
        "_addresses",
        "_give_up_s",
        "_heard",
        "_now",
        "_route",
        "_stage",
        "_timeout_s",
        "expires_at_s",
        "sock",
        "watcher",
        "writing",
    )

    sock: socket.socket

    def __init__(
        self,
        route: Route,
        timeout_s: float,
        give_up_s: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._route = route
        self._timeout_s = timeout_s
        self._give_up_s = give_up_s
        self._now = now
        self._heard = b""
        self._stage: Callable[[Dial], bool] = Dial._connect
        self.watcher: Any = None
        """What watches the socket."""
        self.writing = True
        """True if the next step needs a socket that can be written."""
        self.expires_at_s = math.inf
        """The time of the clock at which to call `step` even if the socket is not ready."""
        try:
            *others, last = _look_up(route)
            # An address that is slow comes again, with its full time, after the others.
            self._addresses = deque((address, min(timeout_s, _NEXT_ADDRESS_S)) for address in others)
            self._addresses.append((last, timeout_s))
            self._call()
        except (OSError, ValueError) as error:
            raise _explain(error, route) from error

    def step(self) -> Connection | None:
        """Go on as far as possible. Return the connection if it is open, otherwise None.

        Raises:
            ConnectFailed: as for `connect`.
        """
        try:
            while not self._stage(self):
                if self._now() < self.expires_at_s:
                    return None
                self._be_late()
        except (OSError, ValueError) as error:
            self.abort()
            raise _explain(error, self._route, behind_proxy=self._stage is Dial._shake_hands) from error
        except BaseException:
            self.abort()
            raise
        return Connection(self._route, self.sock)

    def abort(self) -> None:
        """Close the socket."""
        with contextlib.suppress(OSError):
            self.sock.close()

    # ---------------------------------------------------- TCP

    def _call(self) -> None:
        """Begin to connect to the next address.

        Raises:
            OSError: no address is left; the reason is that of the last one.
        """
        while True:
            self._address = (family, address), limit_s = self._addresses.popleft()
            self._limit(limit_s)
            self.sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                self.sock.setblocking(False)
                for option in _SOCKET_OPTIONS:
                    self.sock.setsockopt(*option)
                self.sock.connect(address)
            except BlockingIOError:
                return
            except OSError as error:
                self._give_way(error)
            except BaseException:
                self.abort()
                raise
            else:
                return

    def _give_way(self, error: OSError) -> None:
        """Close the socket, and raise the error if no other address is left."""
        self.abort()
        if not self._addresses:
            self._route.known.until_s = -math.inf  # look the name up again
            raise error

    def _be_late(self) -> None:
        address, limit_s = self._address
        if self._stage is not Dial._connect or self._now() >= self._give_up_s:
            raise TimeoutError("timed out")
        if limit_s < self._timeout_s:
            self._addresses.append((address, self._timeout_s))
        self._give_way(TimeoutError("timed out"))
        self._call()

    def _limit(self, limit_s: float) -> None:
        self.expires_at_s = min(self._now() + limit_s, self._give_up_s)

    # ---------------------------------------------------- the stages; True at the end of the last one

    def _connect(self) -> bool:
        number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._give_way(OSError(number, os.strerror(number)))
            self._call()
            return False
        try:
            self.sock.getpeername()
        except OSError:  # not yet
            return False
        route, (address, _) = self._route, self._address
        if route.known.addresses[0] != address:
            others = (each for each in route.known.addresses if each != address)
            route.known.addresses = (address, *others)
        if route.proxy is not None and not route.forwarded:
            return self._ask_for_tunnel()
        return self._begin_tls()

    def _ask_for_tunnel(self) -> bool:
        host, port = self._route.origin.host, self._route.origin.port
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        headers = {"Host": target, **self._route.proxy_headers}
        self.sock.send(request_head("CONNECT", target, headers.items()))
        self._stage, self.writing = Dial._hear_of_tunnel, False
        self._limit(self._timeout_s)
        return self._stage(self)

    def _hear_of_tunnel(self) -> bool:
        while b"\r\n\r\n" not in self._heard:
            try:
                octets = self.sock.recv(4096)
            except BlockingIOError:
                return False
            self._heard += octets
            if not octets or len(self._heard) > _TUNNEL_HEAD_BYTES:
                raise OSError(_NO_ANSWER)
        found = _STATUS_LINE.match(self._heard)
        if found is None:
            raise OSError(_NO_ANSWER)
        status = int(found[1])
        if not 200 <= status < 300:
            hint = ": it asks for a user name and password" if status == 407 else ""
            # Without the text of the status line, because it may repeat the password.
            raise ConnectFailed(
                f"the proxy {self._route.proxy} refused the tunnel with status {status}{hint}",
                final=400 <= status < 500,
            )
        return self._begin_tls()

    def _begin_tls(self) -> bool:
        route = self._route
        self.writing = False
        if route.tls is None or route.forwarded:
            return True
        self.sock = route.tls.wrap_socket(
            self.sock,
            server_hostname=route.origin.host.rstrip("."),
            do_handshake_on_connect=False,
            session=route.known.session,
        )
        self._stage = Dial._shake_hands
        self._limit(self._timeout_s)
        return self._stage(self)

    def _shake_hands(self) -> bool:
        import ssl

        sock = self.sock
        assert isinstance(sock, ssl.SSLSocket)  # noqa: S101  # made by `_begin_tls`
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            self.writing = False
            return False
        except ssl.SSLWantWriteError:
            self.writing = True
            return False
        return True


def _look_up(route: Route) -> tuple[Address, ...]:
    """Return the addresses of a route's peer, at least one.

    Raises:
        OSError, ValueError: there are none.
    """
    known, peer = route.known, route.peer
    if route.looked_up:
        return known.addresses
    host: str | bytes = peer.host
    if all(0 < len(label) < 64 for label in peer.host.split(".")):
        host = peer.host.encode("ascii")  # a str would load the codec for international names
    found = socket.getaddrinfo(host, peer.port, type=socket.SOCK_STREAM)
    addresses = [(family, address) for family, _, _, _, address in found]
    if not addresses:
        raise OSError("the name has no address")
    addresses.sort(key=known.addresses[:1].__contains__, reverse=True)
    known.addresses = tuple(addresses)
    is_number = addresses[0][1][0] == peer.host
    known.until_s = math.inf if is_number else time.monotonic() + _LOOKUP_S
    return known.addresses


def _explain(error: Exception, route: Route, *, behind_proxy: bool = False) -> ConnectFailed:
    """Return the failure to open a connection; `behind_proxy` if the proxy, if any, has let us pass."""
    if route.tls is not None:
        import ssl

        # Once the server has been reached, something else answers for a while, such as the login page of a
        # wireless network.
        final = route.known.session is None
        if isinstance(error, ssl.SSLCertVerificationError):
            return ConnectFailed(
                f"the certificate of {route.origin} is not trusted: {error.verify_message}", final=final
            )
        if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
            netloc = route.origin.netloc
            return ConnectFailed(
                f"the server at {netloc} does not speak TLS; begin its address with http://, or name another "
                "port",
                final=final,
            )
    where = str(route.origin)
    if route.proxy is not None:
        where = f"{where} through the proxy {route.proxy}" if behind_proxy else f"the proxy {route.proxy}"
    return ConnectFailed(
        f"cannot connect to {where}: {mask_url(str(error) or type(error).__name__)}",
        timed_out=isinstance(error, TimeoutError),
        final=isinstance(error, ValueError),  # a host that no resolver accepts
    )


class Pools:
    """The open connections of each route, idle ones for reuse. Thread-safe.

    A forked child starts without connections. When the child first uses the pools, it closes its copies of
    the parent's connections. This has no effect on the parent or the server.
    """

    def __init__(self, clock: Clock, *, max_idle: int = MAX_IDLE, max_idle_s: float = MAX_IDLE_S) -> None:
        self._clock = clock
        self._max_idle = max_idle
        self._max_idle_s = max_idle_s
        self._lock = threading.Lock()
        self._idle: list[Connection] = []  # guarded by _lock; in the order of their last use
        self._busy: set[Connection] = set()  # guarded by _lock
        self._closed = False  # guarded by _lock; final
        self._look_at_s = -math.inf  # guarded by _lock; when to look for expired connections

    def take(self, route: Route, *, max_idle_s: float | None = None) -> Connection | None:
        """Return an idle connection that the server has not closed, or None.

        The caller must later pass the connection to `give_back` or `discard`.

        Args:
            route: the route of the connection.
            max_idle_s: the longest idle time of the connection; None means the limit of the pools.
        """
        allowed_s = self._max_idle_s if max_idle_s is None else min(max_idle_s, self._max_idle_s)
        oldest_s = self._clock.now() - allowed_s
        while True:
            with self._lock:
                connection = None if self._closed else self._newest_locked(route, oldest_s)
                if connection is None:
                    return None
                self._busy.add(connection)
            if connection.is_quiet():
                return connection
            self.discard(connection)

    def has_idle(self) -> bool:
        """Return True if the next request can probably use an idle connection.

        This method takes no lock, so the answer may lag by a moment.
        """
        return bool(self._idle)

    def adopt(self, connection: Connection) -> bool:
        """Count a new connection as in use, and return True.

        If the pools are closed, return False; the caller must then close the connection.
        """
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
            return not self._closed

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for reuse, after its answer was read to the end.

        Close it if the pools are full or closed. About once a second, also close the connections that were
        idle for too long, or that the server has closed.
        """
        now_s = self._clock.now()
        connection.idle_since_s = now_s
        with self._lock:
            ours = connection in self._busy  # False after a fork or `discard`
            self._busy.discard(connection)
            keep = ours and not self._closed and len(self._idle) < self._max_idle
            if keep:
                self._idle.append(connection)
                if now_s < self._look_at_s:
                    return
            self._look_at_s = now_s + _LOOK_EVERY_S
            fresh = bisect_left(self._idle, now_s - self._max_idle_s, key=_idle_since_s)
            expired, self._idle = self._idle[:fresh], self._idle[fresh:]
            # A look at a TLS connection that was opened ahead reads, and only its user may do that.
            others = [each for each in self._idle[:-1] if each.requests or each.route.tls is None]
        for old in expired if keep else [connection, *expired]:
            old.close()
        # Servers close those first that were idle for longest.
        self._drop_idle(list(takewhile(lambda idle: not idle.is_quiet(), others)))

    def _drop_idle(self, connections: list[Connection]) -> None:
        """Close those of these connections that are still idle."""
        if not connections:
            return
        with self._lock:
            dropped = [each for each in self._idle if each in connections]
            self._idle = [each for each in self._idle if each not in connections]
        for connection in dropped:
            connection.close()

    def discard(self, connection: Connection) -> None:
        """Close a connection that cannot be used again."""
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def forget_idle(self) -> None:
        """Close the idle connections, so that the next requests use new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close idle connections and interrupt busy ones. May be called twice, from any thread."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.interrupt()

    @property
    def closed(self) -> bool:
        with self._lock:
            return self._closed

    def renew_after_fork(self) -> None:
        """Drop all connections, in a forked child, before a second thread of the child uses the pools."""
        inherited = [*self._busy, *self._idle]
        self._lock = threading.Lock()  # a thread of the parent may hold the old one
        self._idle, self._busy = [], set()
        for connection in inherited:
            connection.close()

    def __repr__(self) -> str:
        with self._lock:
            state = "closed" if self._closed else "open"
            return f"<Pools {state}, {len(self._idle)} idle, {len(self._busy)} busy>"

    def _newest_locked(self, route: Route, oldest_s: float) -> Connection | None:
        """Take and return the idle connection of a route that was used last, or None."""
        for index in range(len(self._idle) - 1, -1, -1):
            connection = self._idle[index]
            if connection.idle_since_s < oldest_s:  # the others are older
                break
            if connection.route is route:
                return self._idle.pop(index)
        return None
