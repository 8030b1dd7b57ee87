"""HTTP/1.1 for a gateway: a thread for each connection, and one that accepts them.

The gateway answers for the head of a request before the body is read, so that who has no key costs no memory.
A request must arrive in time, and all bodies that arrive at once have a limit.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from tinker_sync._base.clock import make_lock
from tinker_sync._base.log import Log
from tinker_sync._base.threads import DaemonThread
from tinker_sync.errors import ConfigurationError
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge
from tinker_sync.wire.http1.server import RequestHead, RequestParser, status_line

T = TypeVar("T")
_log = Log("tinker_sync.gateway")

_MOST_BODY_BYTES: Final = 64 * 1024 * 1024
_MOST_BYTES_AT_ONCE: Final = 4 * _MOST_BODY_BYTES
_MOST_HEAD_BYTES: Final = 64 * 1024
_RECEIVED_BYTES: Final = 32 * 1024
_HEAD_S: Final = 30.0
"""How long a head may take, so that connections which say nothing do not keep their threads."""
_BODY_BYTES_PER_S: Final = 256 * 1024
"""How fast a body must arrive after the first `_HEAD_S`."""
_IDLE_S: Final = 600.0
"""How long a connection may wait for its next request; agents keep theirs between turns."""
_LINGER_S: Final = 1.0
_MOST_CONNECTIONS: Final = 4096
_LOOK_EVERY_S: Final = 1.0
"""How often a wait for a sample looks whether the agent has gone."""
_WAITING_CONNECTIONS: Final = 4096
_END_S: Final = 5.0
_NO_WAIT: Final = int(getattr(socket, "MSG_DONTWAIT", 0))  # Windows has no such flag
_PEEK: Final = int(socket.MSG_PEEK) | _NO_WAIT
_LATE: Final = "the request did not arrive in time"

PASSING: Final = (408, 503)
"""Statuses of refusals after which the same request may be served."""
EVENTS: Final = "text/event-stream; charset=utf-8"


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


class Room:
    """The memory for bodies that arrive at the same time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = make_lock()
        self._taken = 0  # guarded by _lock

    def take(self, size_bytes: int) -> None:
        """Take memory for a body.

        Raises:
            Refusal: other bodies need it now.
        """
        with self._lock:
            if self._taken + size_bytes <= _MOST_BYTES_AT_ONCE:
                self._taken += size_bytes
                return
        raise Refusal(503, "too many long requests arrive at once; try again in a moment")

    def give(self, size_bytes: int) -> None:
        """Give the memory of a body back."""
        with self._lock:
            self._taken -= size_bytes


class Connection:
    """The connection of one agent. Its own thread uses it; `close` may be called by any thread."""

    def __init__(
        self, sock: socket.socket, answer: Callable[[RequestHead, Connection], Reply], room: Room
    ) -> None:
        self._socket = sock
        self._answer = answer
        self._room = room
        self._parser = RequestParser(max_head_bytes=_MOST_HEAD_BYTES, max_body_bytes=_MOST_BODY_BYTES)

    def run(self) -> None:
        """Answer requests until one side closes the connection."""
        with suppress(OSError, Gone, Refusal), self._socket:
            _limit_waits(self._socket, min(_HEAD_S, _IDLE_S))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            keep, idle_s = True, _HEAD_S
            while keep:
                try:
                    request = self._read_head(time.monotonic() + idle_s)
                except (Refusal, MalformedMessage, MessageTooLarge) as problem:
                    refused = Reply({"error": {"message": str(problem)}}, problem.status)
                    self._socket.sendall(_encode(refused, keep=False))
                    break
                reply = self._answer(request, self)
                keep = self._skip_body() and request.keeps_alive
                self._socket.sendall(_encode(reply, keep=keep, body=request.method != "HEAD"))
                idle_s = _IDLE_S
            self._linger()

    def read_json(self, request: RequestHead) -> Any:
        """Read the body of a request, and return what it says.

        Raises:
            Refusal: the body is not JSON, or arrives too slowly, or others take the memory.
            Gone: the agent has closed the connection.
        """
        if "transfer-encoding" in request.headers:
            raise Refusal(411, "send the body with its length (content-length)")
        size = self._parser.length
        self._room.take(size)
        try:
            if request.expects_continue:
                self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            return json.loads(self._read_body(size))
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not JSON: {error}") from None
        finally:
            self._room.give(size)

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
        self._socket.close()

    def _has_gone(self) -> bool:
        try:
            if not _NO_WAIT:
                self._socket.setblocking(False)
            return self._socket.recv(1, _PEEK) == b""
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        finally:
            if not _NO_WAIT:
                with suppress(OSError):
                    self._socket.setblocking(True)

    def _receive(self, deadline_s: float, late: Exception) -> bytes:
        """Return what the agent has sent next. Raise `late` if nothing came in time.

        Raises:
            Gone: the agent has closed the connection.
        """
        while True:
            try:
                received = self._socket.recv(_RECEIVED_BYTES)
            except (BlockingIOError, TimeoutError):  # the system's timeout, see `_limit_waits`
                received = None
            if received == b"":
                raise Gone
            if time.monotonic() >= deadline_s:
                raise late
            if received:
                return received

    def _read_head(self, idle_until_s: float) -> RequestHead:
        """Return the head of the next request, which must begin in this time.

        Raises:
            MalformedMessage: the bytes are not a request.
            MessageTooLarge: the head is too long, or announces a body that is.
            Refusal: the head is too late.
            Gone: the agent has closed the connection, or has not used it for long.
        """
        deadline_s: float | None = None  # once it has begun
        while (head := self._parser.take_head()) is None:
            if not self._parser.buffered:
                self._parser.feed(self._receive(idle_until_s, Gone()))
                continue
            deadline_s = deadline_s or time.monotonic() + _HEAD_S
            self._parser.feed(self._receive(deadline_s, Refusal(408, _LATE)))
        return head

    def _read_body(self, size: int) -> bytes:
        deadline_s = time.monotonic() + _HEAD_S + size / _BODY_BYTES_PER_S
        while (body := self._parser.take_body()) is None:
            self._parser.feed(self._receive(deadline_s, Refusal(408, _LATE)))
        return body

    def _skip_body(self) -> bool:
        """Leave out a body that was not read. Return False if it has not come, which ends the connection."""
        try:
            return self._parser.take_body() is not None
        except (MalformedMessage, MessageTooLarge):
            return False

    def _linger(self) -> None:
        """Read on for a moment, because a system may drop the answer if octets are left when it closes."""
        self._socket.shutdown(socket.SHUT_WR)
        _limit_waits(self._socket, _LINGER_S)
        deadline_s = time.monotonic() + _LINGER_S
        while True:  # until the agent has closed the connection, or the time is over
            self._receive(deadline_s, Gone())


def _limit_waits(sock: socket.socket, limit_s: float) -> None:
    """Let the system end each wait of a socket, because Python's timeouts take five more system calls."""
    if sys.platform == "win32":
        limit = struct.pack("I", max(int(limit_s * 1000), 1))
    else:
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        with suppress(OSError):  # a system with another form of the limit has none, and serves all the same
            sock.setsockopt(socket.SOL_SOCKET, option, limit)


def _encode(reply: Reply, *, keep: bool, body: bool = True) -> bytes:
    stream = isinstance(reply.content, str)
    octets = (reply.content if stream else json.dumps(reply.content)).encode()
    kind = EVENTS if stream else "application/json"
    head = f"{status_line(reply.status)}content-type: {kind}\r\n"
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

    def __init__(self, answer: Callable[[RequestHead, Connection], Reply], host: str, port: int) -> None:
        self._answer = answer
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_WAITING_CONNECTIONS)
        except (OSError, OverflowError) as problem:
            raise ConfigurationError(f"{host}:{port} cannot be listened on: {problem}") from problem
        self.port = int(self._socket.getsockname()[1])
        self._host = host
        self._room = Room()
        self._lock = make_lock()
        self._open: dict[threading.Thread, Connection] = {}  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._said = False  # guarded by _lock
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
                if self._is_full():  # the system keeps others waiting
                    if self._pause("as many as it takes"):
                        return
                    continue
                try:
                    accepted, _ = self._socket.accept()
                except OSError as problem:
                    # No file is free, or the peer has gone already.
                    if self._pause(str(problem) if problem.errno in (errno.EMFILE, errno.ENFILE) else None):
                        return
                    continue
                connection = Connection(accepted, self._answer, self._room)
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

    def _is_full(self) -> bool:
        with self._lock:
            return len(self._open) >= _MOST_CONNECTIONS

    def _pause(self, reason: str | None) -> bool:
        """Wait a moment, and return True if the server is closed. Say once why agents wait."""
        with self._lock:
            count, said = len(self._open), self._said
            self._said = said or reason is not None
        if reason is not None and not said:
            _log.warning("%d agents are connected (%s); others wait until one disconnects", count, reason)
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
