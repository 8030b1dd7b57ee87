"""Connections to servers, kept open between requests.

A `Route` describes the way to an origin: direct or through an HTTP proxy, and the TLS settings. `connect`
opens a connection: a socket, with TLS of the standard library for an https origin. urllib3 opens the tunnels
through proxies, and is imported for them alone. `Pools` keeps the idle connections of each route.
`http.py` writes and reads on their sockets.

Any thread may take a connection and give it back. Only one thread at a time uses a connection.
"""

from __future__ import annotations

import contextlib
import math
import re
import select
import socket
import threading
import traceback
from bisect import bisect_left
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from attrs import field, frozen

from tinker_sync._base.clock import Clock
from tinker_sync._base.secret import HeaderMap, mask_url

if TYPE_CHECKING:
    import ssl

# Enough for every long poll of a busy client to reuse its connection. Each idle one costs a file descriptor.
MAX_IDLE: Final = 1000
# Most balancers and servers drop connections that are silent for a minute; a request on one could be lost.
MAX_IDLE_S: Final = 50.0
_LOOK_EVERY_S: Final = 1.0
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
# The names in various versions of OpenSSL for an answer that is not TLS.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
_idle_since_s: Final = attrgetter("idle_since_s")
_TUNNEL_REFUSED: Final = re.compile(r"Tunnel connection failed: (\d{3})")


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

    __slots__ = ("idle_since_s", "nothing_yet", "requests", "route", "sock", "watcher")

    def __init__(self, route: Route, sock: socket.socket) -> None:
        self.route = route
        self.requests = 0
        """The number of answers that were read from the connection."""
        self.idle_since_s = 0.0
        self.sock = sock
        self.watcher: object = None
        """What watches the socket for answers, from the first request on."""
        self.nothing_yet: tuple[type[OSError], ...] = (BlockingIOError,)
        """The exceptions by which a read on a non-blocking socket reports that it would have to wait."""
        if route.tls is not None:
            import ssl  # already loaded with the settings of the route

            self.nothing_yet = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

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
        try:
            if type(self.sock) is not socket.socket:  # TLS cannot peek, and has its own buffer
                return not self.sock.pending() and not has_arrived(self.sock)  # type: ignore[attr-defined]
            never_block(self.sock)
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except (OSError, ValueError):  # the socket was reset, or closed by another thread
            return False
        return False


def has_arrived(sock: socket.socket, wait_s: float = 0.0) -> bool:
    """Wait at most `wait_s` seconds for bytes. Return True if a read would not block."""
    descriptor = sock.fileno()
    if descriptor < 0:  # closed by another thread, so that a read fails at once
        return True
    if not hasattr(select, "poll"):
        return bool(select.select([sock], [], [], wait_s)[0])
    poll = select.poll()  # unlike select, it takes descriptors above 1024
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(wait_s * 1000)))


def never_block(sock: socket.socket) -> None:
    """Make a socket non-blocking, unless it is already: the check is cheaper than a system call."""
    if sock.gettimeout() != 0:
        sock.settimeout(0)


def connect(route: Route, timeout_s: float | None) -> Connection:
    """Open a connection.

    Args:
        route: the way to the server.
        timeout_s: the limit for each step: TCP to one address, the tunnel of a proxy, TLS. The name lookup
            has no limit here. None means no limit.

    Raises:
        ConnectFailed: No connection was opened. The text names the cause and holds no credentials.
    """
    try:
        dialled = route.proxy is None or route.forwarded
        sock = _dial(route, timeout_s) if dialled else _tunnel(route, timeout_s)
    except (OSError, ValueError) as error:
        failed = _explain(error, route)
        if not _TUNNEL_REFUSED.search(str(error)):
            raise failed from error
    else:
        return Connection(route, sock)
    raise failed  # without the cause, because the status line of a proxy may repeat the password


def _dial(route: Route, timeout_s: float | None) -> socket.socket:
    """Open a socket to the origin, or to a proxy that forwards to it."""
    peer = route.proxy or route.origin
    host: str | bytes = peer.host
    if all(0 < len(label) < 64 for label in peer.host.split(".")):
        host = peer.host.encode("ascii")  # a str would load the codec for international names
    sock = socket.create_connection((host, peer.port), timeout_s)  # type: ignore[arg-type]  # takes both
    try:
        for option in _SOCKET_OPTIONS:
            sock.setsockopt(*option)
        if route.tls is None or route.proxy is not None:
            return sock
        return route.tls.wrap_socket(sock, server_hostname=peer.host.rstrip("."))
    except BaseException:  # Ctrl-C too
        sock.close()
        raise


def _tunnel(route: Route, timeout_s: float | None) -> socket.socket:
    """Open a socket to the origin through a proxy."""
    from http.client import HTTPException

    from urllib3.connection import HTTPSConnection
    from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

    assert route.proxy is not None  # noqa: S101  # the caller checks this
    http = HTTPSConnection(
        route.proxy.host,
        route.proxy.port,
        ssl_context=route.tls,
        timeout=timeout_s,
        socket_options=[*_SOCKET_OPTIONS],
    )
    http.set_tunnel(route.origin.host, route.origin.port, headers=dict(route.proxy_headers))
    try:
        http.connect()
        # Thousands of connections may be open, so each keeps its socket and drops the rest.
        sock, http.sock = http.sock, None
    except Exception as error:
        # The frames hold the answer of a proxy that refused, and with it the socket.
        traceback.clear_frames(error.__traceback__)
        # NewConnectionError is a subclass of the timeout in urllib3.
        if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
            raise TimeoutError(_reason(error)) from error
        if isinstance(error, HTTPError):
            raise OSError(_reason(error)) from error
        if isinstance(error, HTTPException):
            raise OSError(str(error)) from error
        raise
    finally:
        http.close()
    return sock


def _explain(error: Exception, route: Route) -> ConnectFailed:
    refused = _TUNNEL_REFUSED.search(str(error))
    if refused:
        status = int(refused[1])
        hint = ": it asks for a user name and password" if status == 407 else ""
        return ConnectFailed(
            f"the proxy {route.proxy} refused the tunnel with status {status}{hint}",
            final=400 <= status < 500,
        )
    if route.tls is not None:
        import ssl

        if isinstance(error, ssl.SSLCertVerificationError):
            return ConnectFailed(
                f"the certificate of {route.origin} is not trusted: {error.verify_message}", final=True
            )
        if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
            netloc = route.origin.netloc
            return ConnectFailed(
                f"the server at {netloc} does not speak TLS; begin its address with http://, or name another "
                "port",
                final=True,
            )
    where = f"the proxy {route.proxy}" if route.proxy else str(route.origin)
    return ConnectFailed(
        f"cannot connect to {where}: {mask_url(str(error) or type(error).__name__)}",
        timed_out=isinstance(error, TimeoutError),
        final=isinstance(error, ValueError),  # a host that no resolver accepts
    )


def _reason(error: Exception) -> str:
    """Return the text of a urllib3 error without the address of a Python object at its beginning."""
    return str(error).rpartition(": ")[2] or type(error).__name__


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
        idle for too long.
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
        for old in expired if keep else [connection, *expired]:
            old.close()

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
