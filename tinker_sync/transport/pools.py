"""Connections to one server after another, kept open between requests.

A `Route` is the way to an origin: directly or through an HTTP proxy, and with which TLS settings. `connect`
opens a connection: a socket, with TLS of the standard library where the origin has it; urllib3 opens the
tunnels through proxies, and is imported for that alone. `Pools` keeps the idle connections of each route.
`socket_line.py` writes and reads on their sockets.

Any thread may take and give back; a connection itself belongs to the one thread that took it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urlsplit

from attrs import field, frozen

from tinker_sync._clock import Clock
from tinker_sync._secret import HeaderMap, mask_url
from tinker_sync.transport.scheme import answered_without_tls, without_tls

if TYPE_CHECKING:
    import ssl

# Enough for every long poll of a busy client to come back to its connection; idle ones cost a file each.
MAX_IDLE: Final = 1000
# Most balancers and servers drop what has been silent for a minute; a request on that would be a gamble.
MAX_IDLE_S: Final = 50.0
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_TUNNEL_REFUSED: Final = re.compile(r"Tunnel connection failed: (\d{3})")


def _socket_options() -> list[tuple[int, int, int]]:
    """No delay for small requests; and probes that notice a dead peer behind a long poll within a minute."""
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


_SOCKET_OPTIONS: Final = _socket_options()


@frozen
class Origin:
    """Scheme, host and port: what credentials are bound to.

    >>> Origin.of("HTTPS://Host/x?y"), Origin.of("https://host:443") == Origin.of("https://host")
    (Origin(scheme='https', host='host', port=443), True)
    """

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str | SplitResult) -> Origin:
        """The origin of an address.

        Raises:
            ValueError: It has no http or https scheme, no host, or an impossible port.
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
        """Host and, unless it is the usual one, port; as in a `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}"


@frozen(eq=False)
class Route:
    """How an origin is reached. Compared by identity: each is made once."""

    origin: Origin
    tls: ssl.SSLContext | None = None
    """For an https origin."""
    proxy: Origin | None = None
    """An HTTP proxy: a tunnel to https origins; for others it is asked for the whole address."""
    proxy_headers: Mapping[str, str] = field(factory=HeaderMap, converter=HeaderMap)

    @property
    def forwarded(self) -> bool:
        """Whether the proxy itself reads the requests."""
        return self.proxy is not None and self.origin.scheme == "http"


class ConnectFailed(Exception):
    """No connection came about; nothing of the request was sent."""

    def __init__(self, message: str, *, timed_out: bool = False, final: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.final = final
        """Another try would end the same way: a certificate, a proxy that refuses us."""


class Connection:
    """An open connection and what its keeper must know of it."""

    __slots__ = ("idle_since_s", "nothing_yet", "requests", "route", "sock")

    def __init__(self, route: Route, sock: socket.socket) -> None:
        self.route = route
        self.requests = 0
        """How many answers have been read from it."""
        self.idle_since_s = 0.0
        self.sock = sock
        self.nothing_yet: tuple[type[OSError], ...] = (BlockingIOError,)
        """What a read raises where it would have to wait."""
        if route.tls is not None:
            import ssl  # loaded already, with the settings of the route

            self.nothing_yet = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def close(self) -> None:
        """Close it; the other side sees the end of the connection."""
        # A TLS socket that the peer reset may raise here; it is closed all the same.
        with contextlib.suppress(OSError):
            self.sock.close()

    def interrupt(self) -> None:
        """Wake the thread that reads or writes on it; that thread closes it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def is_quiet(self) -> bool:
        """Whether nothing has come since the last answer. An idle server says nothing but goodbye."""
        try:
            if type(self.sock) is not socket.socket:  # TLS cannot peek
                return not _has_arrived(self.sock)
            never_block(self.sock)
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except (OSError, ValueError):  # closed under our hands
            return False
        return False


def _has_arrived(sock: socket.socket) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([sock], [], [], 0)[0])
    poll = select.poll()  # unlike select, it takes descriptors above 1024
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def never_block(sock: socket.socket) -> None:
    """Where it is so already, asking is cheaper than telling the system again."""
    if sock.gettimeout() != 0:
        sock.settimeout(0)


def connect(route: Route, timeout_s: float | None) -> Connection:
    """Open a connection: name, TCP, tunnel and TLS, each step within `timeout_s`.

    Raises:
        ConnectFailed: With what went wrong; the text holds no credentials.
    """
    try:
        dialled = route.proxy is None or route.forwarded
        sock = _dial(route, timeout_s) if dialled else _tunnel(route, timeout_s)
    except (OSError, ValueError) as error:
        raise _explain(error, route) from error
    return Connection(route, sock)


def _dial(route: Route, timeout_s: float | None) -> socket.socket:
    """Open a socket to the origin, or to a proxy that forwards to it."""
    peer = route.proxy or route.origin
    host: str | bytes = peer.host
    if all(0 < len(label) < 64 for label in peer.host.split(".")):
        host = peer.host.encode("ascii")  # a text loads the codec for international names
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

    assert route.proxy is not None  # noqa: S101  # the caller's condition
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
        # Thousands may be open; of each only the socket is kept.
        sock, http.sock = http.sock, None
    except NewConnectionError as error:  # urllib3 makes it a kind of timeout
        raise OSError(_reason(error)) from error
    except ConnectTimeoutError as error:
        raise TimeoutError(_reason(error)) from error
    except HTTPError as error:
        raise OSError(_reason(error)) from error
    except HTTPException as error:
        raise OSError(str(error)) from error
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
        if answered_without_tls(error):
            return ConnectFailed(without_tls(route.origin.netloc), final=True)
    where = f"the proxy {route.proxy}" if route.proxy else str(route.origin)
    return ConnectFailed(
        f"cannot connect to {where}: {mask_url(str(error) or type(error).__name__)}",
        timed_out=isinstance(error, TimeoutError),
        final=isinstance(error, ValueError),  # a host no resolver takes
    )


def _reason(error: Exception) -> str:
    """Return the text without the address of a Python object that urllib3 puts before it."""
    return str(error).rpartition(": ")[2] or type(error).__name__


class Pools:
    """Open connections by route, idle ones to be taken again. Thread-safe.

    A forked child starts with none: it closes its copies of the parent's on first use, which the parent's own
    and the server do not notice.
    """

    def __init__(self, clock: Clock, *, max_idle: int = MAX_IDLE, max_idle_s: float = MAX_IDLE_S) -> None:
        self._clock = clock
        self._max_idle = max_idle
        self._max_idle_s = max_idle_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: dict[Route, deque[Connection]] = {}  # guarded by _lock; the last used is last
        self._idle_count = 0  # guarded by _lock
        self._busy: set[Connection] = set()  # guarded by _lock
        self._closed = False  # guarded by _lock; final

    def take(self, route: Route, *, max_idle_s: float | None = None) -> Connection | None:
        """An idle connection the server has not closed, or None. Whoever takes one gives it back.

        Args:
            route: Where to.
            max_idle_s: Not one that has been idle for longer than this.
        """
        self._notice_fork()
        allowed_s = self._max_idle_s if max_idle_s is None else min(max_idle_s, self._max_idle_s)
        oldest_s = self._clock.now() - allowed_s
        while True:
            with self._lock:
                idle = self._idle.get(route)
                if not idle or self._closed:
                    return None
                if idle[-1].idle_since_s < oldest_s:  # the others are older still
                    return None
                connection = idle.pop()
                self._idle_count -= 1
                self._busy.add(connection)
            if connection.is_quiet():
                return connection
            self.discard(connection)

    def has_idle(self) -> bool:
        """Return True if connections are idle. Takes no lock: the answer may be late by a moment."""
        return self._idle_count > 0

    def adopt(self, connection: Connection) -> bool:
        """Count a new connection as taken. False when the pools are closed: then nobody wants it."""
        self._notice_fork()
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
            return not self._closed

    def give_back(self, connection: Connection) -> None:
        """Take a connection whose answer was read to its end."""
        now_s = self._clock.now()
        connection.idle_since_s = now_s
        with self._lock:
            ours = connection in self._busy  # not so after a fork, or once closed
            self._busy.discard(connection)
            keep = ours and not self._closed and self._idle_count < self._max_idle
            if keep:
                self._idle.setdefault(connection.route, deque()).append(connection)
                self._idle_count += 1
            expired = self._expired_locked(now_s - self._max_idle_s)
        for old in expired if keep else [connection, *expired]:
            old.close()

    def discard(self, connection: Connection) -> None:
        """Close a connection that is fit for nothing more."""
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def forget_idle(self) -> None:
        """Close what is idle, so that the next requests go over new connections."""
        self._notice_fork()
        with self._lock:
            idle = self._take_all_idle_locked()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close what is idle and interrupt what is under way. May be called twice, from any thread."""
        self._notice_fork()
        with self._lock:
            self._closed = True
            idle = self._take_all_idle_locked()
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
        """Start without connections, in a child process; its only thread calls this, or nobody does."""
        inherited = [*self._busy, *(c for idle in self._idle.values() for c in idle)]
        self._pid = os.getpid()
        self._lock = threading.Lock()  # the old one may be held by a thread that only the parent has
        self._idle, self._idle_count, self._busy = {}, 0, set()
        for connection in inherited:
            connection.close()

    def __repr__(self) -> str:
        with self._lock:
            state = "closed" if self._closed else "open"
            return f"<Pools {state}, {self._idle_count} idle, {len(self._busy)} busy>"

    def _notice_fork(self) -> None:
        if self._pid != os.getpid():
            self.renew_after_fork()

    def _take_all_idle_locked(self) -> list[Connection]:
        taken = [connection for idle in self._idle.values() for connection in idle]
        self._idle, self._idle_count = {}, 0
        return taken

    def _expired_locked(self, limit_s: float) -> list[Connection]:
        expired = []
        for idle in self._idle.values():
            while idle and idle[0].idle_since_s < limit_s:
                expired.append(idle.popleft())
        self._idle_count -= len(expired)
        return expired
