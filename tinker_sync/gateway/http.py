"""HTTP/1.1 for a gateway: a thread for each connection, and one that accepts them.

The request handler of the standard library parses headers as those of mail, which costs more than the rest of
a request. This one reads what agents send: a method, a path, headers, and a body with its length.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar

from tinker_sync._base.clock import make_lock
from tinker_sync._base.threads import DaemonThread
from tinker_sync.errors import ConfigurationError

T = TypeVar("T")

_MOST_BODY_BYTES: Final = 64 * 1024 * 1024
_MOST_LINE_BYTES: Final = 64 * 1024
_MOST_HEADERS: Final = 200
_NO_WAIT: Final = int(getattr(socket, "MSG_DONTWAIT", 0))  # Windows has no such flag
_LOOK_EVERY_S: Final = 1.0
"""How often a wait for a sample looks whether the agent has gone."""
_WAITING_CONNECTIONS: Final = 4096
_END_S: Final = 5.0

EVENTS: Final = "text/event-stream; charset=utf-8"


class Request(NamedTuple):
    """A request, with header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Reply(NamedTuple):
    """An answer: a tree to send as JSON, or the text of an event stream."""

    content: Any
    status: int = 200
    headers: Mapping[str, str] = {}


class Refusal(Exception):
    """The end of a request that is refused, with the status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gone(Exception):
    """The end of a request whose agent has closed the connection."""


class Connection:
    """The connection of one agent. Its own thread uses it; `close` may be called by any thread."""

    def __init__(self, sock: socket.socket, answer: Callable[[Request, Connection], Reply]) -> None:
        self._socket = sock
        self._answer = answer
        self._file = sock.makefile("rb")

    def run(self) -> None:
        """Answer requests until one side closes the connection."""
        with suppress(OSError, Gone), self._socket, self._file:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while True:
                try:
                    request = self._read()
                except Refusal as problem:
                    refused = Reply({"error": {"message": str(problem)}}, problem.status)
                    self._socket.sendall(_encode(refused, keep=False))
                    return
                if request is None:
                    return
                keep = request.headers.get("connection", "").lower() != "close"
                reply = self._answer(request, self)
                self._socket.sendall(_encode(reply, keep=keep, body=request.method != "HEAD"))
                if not keep:
                    return

    def wait(self, future: Future[T]) -> T:
        """Return the result of a future, or cancel it if the agent closes the connection.

        Raises:
            Gone: the agent has closed the connection.
        """
        while True:
            try:
                result = future.result(_LOOK_EVERY_S)
            except (TimeoutError, FutureTimeoutError):  # one class from Python 3.11 on
                if future.done():  # the failure of the call
                    raise
                if self._has_gone():
                    future.cancel()
                    raise Gone from None
                continue
            if self._has_gone():
                raise Gone
            return result

    def close(self) -> None:
        """End the connection, also while its thread waits."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Close the connection in place of `run`."""
        with self._socket, self._file:
            pass

    def _has_gone(self) -> bool:
        try:
            if not _NO_WAIT:
                self._socket.setblocking(False)
            return self._socket.recv(1, socket.MSG_PEEK | _NO_WAIT) == b""
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        finally:
            if not _NO_WAIT:
                with suppress(OSError):
                    self._socket.setblocking(True)

    def _read(self) -> Request | None:
        """Return the next request; None at the end of the connection."""
        first = self._file.readline(_MOST_LINE_BYTES)
        while first in (b"\r\n", b"\n"):
            first = self._file.readline(_MOST_LINE_BYTES)
        if not first:
            return None
        words = first.decode("latin-1").split()
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise Refusal(400, "this endpoint speaks HTTP/1.1; begin its address with http://")
        headers = self._read_headers()
        if words[2] == "HTTP/1.0":
            headers.setdefault("connection", "close")
        if "transfer-encoding" in headers:
            raise Refusal(411, "send the body with its length (content-length)")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise Refusal(400, "content-length is malformed")
        if int(length) > _MOST_BODY_BYTES:
            raise Refusal(413, f"the body is over the limit of {_MOST_BODY_BYTES} bytes")
        if headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._file.read(int(length)) if length != "0" else b""
        return Request(words[0], words[1], headers, body) if len(body) == int(length) else None

    def _read_headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        for _ in range(_MOST_HEADERS):
            line = self._file.readline(_MOST_LINE_BYTES)
            if line in (b"\r\n", b"\n"):
                return headers
            name, colon, value = line.decode("latin-1").partition(":")
            name = name.lower()
            if not colon or not line.endswith(b"\n") or (name == "content-length" and name in headers):
                raise Refusal(400, "a header is malformed")
            headers[name] = value.strip()
        raise Refusal(431, "there are too many headers")


def _encode(reply: Reply, *, keep: bool, body: bool = True) -> bytes:
    stream = isinstance(reply.content, str)
    octets = (reply.content if stream else json.dumps(reply.content)).encode()
    kind = EVENTS if stream else "application/json"
    head = f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\ncontent-type: {kind}\r\n"
    for name, value in reply.headers.items():
        head += f"{name}: {value}\r\n"
    if not keep:
        head += "connection: close\r\n"
    return f"{head}content-length: {len(octets)}\r\n\r\n".encode("latin-1") + (octets if body else b"")


class Server:
    """A listening socket, and the connections that it has accepted. Thread-safe.

    Args:
        answer: called on the thread of a connection with each request.
        host: the address to listen on.
        port: the port, or 0 for a free one.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """

    def __init__(self, answer: Callable[[Request, Connection], Reply], host: str, port: int) -> None:
        self._answer = answer
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_WAITING_CONNECTIONS)
        except (OSError, OverflowError) as problem:
            raise ConfigurationError(f"{host}:{port} cannot be listened on: {problem}") from problem
        self.port = int(self._socket.getsockname()[1])
        self._host = host
        self._lock = make_lock()
        self._open: dict[threading.Thread, Connection] = {}  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._thread = DaemonThread(self._accept, "tinker-gateway")
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end the connections, and wait a moment for their threads. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
            connections = list(self._open.items())
        if not closed:
            # A thread in `accept` wakes for a connection on every system, and not for a closed socket.
            host = self._host if ipaddress_of(self._host) else "127.0.0.1"
            with suppress(OSError):
                socket.create_connection((host, self.port), timeout=1.0).close()
        for _, connection in connections:
            connection.close()
        for thread in (self._thread, *(thread for thread, _ in connections)):
            if thread is not threading.current_thread():
                thread.join(_END_S)

    def _accept(self) -> None:
        with self._socket:
            while True:
                try:
                    accepted, _ = self._socket.accept()
                except OSError:
                    # No file is free, or the peer has gone already.
                    if self._pause():
                        return
                    continue
                connection = Connection(accepted, self._answer)
                thread = DaemonThread(self._run, "tinker-gateway-agent", [connection])
                with self._lock:
                    closed = self._closed
                    if not closed:
                        self._open[thread] = connection
                if closed:
                    connection.drop()
                    return
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread; the agent may try again
                    connection.drop()
                    self._forget(thread)

    def _pause(self) -> bool:
        """Wait a moment, and return True if the server is closed."""
        threading.Event().wait(0.05)
        with self._lock:
            return self._closed

    def _run(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            self._forget(threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._open.pop(thread, None)


def ipaddress_of(host: str) -> str | None:
    """Return a host that is the address of one interface, or None for a name and for all interfaces.

    >>> ipaddress_of("127.0.0.1"), ipaddress_of("0.0.0.0")
    ('127.0.0.1', None)
    """
    with suppress(ValueError):
        return None if ipaddress.ip_address(host).is_unspecified else host
    return None
