"""HTTP/1.1 for an application, on asyncio and nothing else.

A connection is a protocol object of a few hundred bytes and, during a request, one task. A held poll has no
thread and no buffer, so thousands of them cost little. The application gets a request when it is complete.
The server refuses a request that is too large as soon as it knows the size: at once if the head has it.
The bodies of requests whose head the application refuses are dropped as they come.

An `Application` is called with a `Request` and returns an `Answer`, whole or as a function that writes the
body in pieces. It raises `Abort` to cut the connection instead, which tests use as a fault. An application
that wraps another one sees the same requests and answers.

`run` starts the application, listens, waits for the signal to stop, and shuts down. `ServerThread` does so in
a thread, for tests and short programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import signal
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import attrs

from tinker_sync._base.threads import DaemonThread
from tinker_sync.wire.endpoints import JSON
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge
from tinker_sync.wire.http1.server import RequestHead, RequestParser, status_line

# ------------------------------------------------------------------------------------- requests and answers


@attrs.frozen(eq=False)
class Request:
    """A complete request. `path` and `query` are as they were sent; names of headers are in lower case."""

    method: str
    path: str
    query: str = attrs.field(default="", repr=False)
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    body: bytes = attrs.field(default=b"", repr=False)
    gone: asyncio.Future[None] | None = attrs.field(default=None, repr=False)
    """Done when the client has closed the connection. It is shared, so nobody may cancel it."""

    @classmethod
    def of(cls, head: RequestHead, body: bytes = b"", gone: asyncio.Future[None] | None = None) -> Request:
        """Return the request with this head and body."""
        return cls(head.method, head.path, head.query, head.headers, body, gone)


Write: TypeAlias = Callable[[bytes], Awaitable[None]]


@attrs.frozen(eq=False)
class Answer:
    """The response to a request. Names of headers are in lower case, and win over `content_type`."""

    body: bytes = b""
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = attrs.Factory(dict)
    stream: Callable[[Write], Awaitable[None]] | None = None
    """A function that writes the body in pieces, in place of `body`. Its argument writes one piece.

    `headers` must then have the content length."""


class Abort(Exception):
    """Raised by an application in place of an answer, or in the middle of one: cut the connection.

    Attributes:
        reset: True: reset it; False: close it in order, after the bytes that were sent.
    """

    def __init__(self, *, reset: bool = True) -> None:
        super().__init__()
        self.reset = reset


# ----------------------------------------------------------------------------------------------- connections


HEAD_LIMIT_BYTES = 64 * 1024
IDLE_S = 120.0
"""The time after which an idle connection is closed. Clients reconnect without an error."""
STALL_S = 60.0
"""The longest silence in the middle of a request; after that the connection is cut."""

WAITING_CONNECTIONS = 4096
"""The connections that the system holds until they are accepted; thousands of clients may connect at once."""
ACCEPTED_AT_ONCE = 1
"""The connections that the event loop accepts in one step. While no file is free, asyncio reports each one
as an error and goes on to the next."""

_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NOTE_EVERY_S = 60.0
_CLOSING_ROUNDS = 3

logger = logging.getLogger(__name__)


class Application:
    """What a server runs: it answers requests, and has a start and an end.

    Attributes:
        max_body_bytes: the application refuses larger bodies.
    """

    max_body_bytes: int = 1 << 30

    async def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        raise NotImplementedError

    def keeps_body(self, request: Request) -> bool:  # noqa: ARG002  # for subclasses
        """Return False if the application answers a request without its body, which the server then drops.

        `request` has no body yet.
        """
        return True

    async def startup(self) -> None:
        """Prepare for requests. The server calls this before it listens."""

    async def shutdown(self) -> None:
        """Answer held polls, and clean up. The server calls this before it closes the connections."""


class ClientConnection(asyncio.Protocol):
    """The connection of one client. It passes the requests to the application one after another."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set when it is made
        self._parser = RequestParser(
            max_head_bytes=HEAD_LIMIT_BYTES, max_body_bytes=server.max_body_bytes, keeps_body=self._keeps_body
        )
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None
        self._ending = False

    # ------------------------------------------------------------------------------- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport
        self._server.connections.add(self)
        self._limit(IDLE_S)

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        if self._exchange is None:
            self._limit(STALL_S)
            self._advance()
        elif self._parser.buffered > HEAD_LIMIT_BYTES:
            self._transport.pause_reading()  # the rest of the next request stays in the socket

    def eof_received(self) -> bool:
        # Most clients have closed the connection. A client that closed only its sending side still reads the
        # answer.
        self._ending = True
        if self._exchange is not None:
            self._exchange.leave()
        return self._exchange is not None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio calls it
        self._server.connections.discard(self)
        self._limit(None)
        self.resume_writing()
        if self._exchange is not None:
            self._exchange.leave()

    def pause_writing(self) -> None:
        self._writable = self._server.loop.create_future()

    def resume_writing(self) -> None:
        waiting, self._writable = self._writable, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    # ------------------------------------------------------------------------------------- requests

    def _advance(self) -> None:
        """Pass the next request to the application if it is complete; refuse one that is malformed."""
        try:
            request = self._parser.take()
        except (MalformedMessage, MessageTooLarge) as problem:
            self._refuse(problem.status, str(problem))
            return
        if request is not None:
            self._start(*request)
        elif self._parser.wants_continue:
            self._parser.wants_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _keeps_body(self, head: RequestHead) -> bool:
        return self._server.app.keeps_body(Request.of(head))

    def _start(self, head: RequestHead, body: bytes) -> None:
        self._limit(None)
        self._exchange = Exchange(self, head, self._server.loop.create_future())
        self._server.spawn(self._exchange.run(self._server.app, body))

    def finished(self, *, keep_alive: bool) -> None:
        """End the exchange, and continue with the next request or close the connection."""
        self._exchange = None
        if not keep_alive or self._ending or self._transport.is_closing():
            self._transport.close()
            return
        self._transport.resume_reading()
        self._limit(IDLE_S)
        if self._parser.buffered:
            self._advance()

    def _refuse(self, status: int, detail: str) -> None:
        body = json.dumps({"detail": detail}).encode()
        head = status_line(status).encode() + b"content-type: application/json\r\nconnection: close\r\n"
        self._transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self._transport.close()

    # -------------------------------------------------------------------------------------- answers

    async def write(self, data: bytes) -> None:
        """Send bytes. Wait while the send buffer is full, so that a slow client slows the application."""
        if not self._transport.is_closing():
            self._transport.write(data)
        if self._writable is not None:
            await self._writable

    def abort(self) -> None:
        """Cut the connection, with a reset where the system has one."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def end(self) -> None:
        """Close the connection, after the answer under way if there is one."""
        self._ending = True
        if self._exchange is None:
            self._transport.close()

    def _limit(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = self._server.loop
        self._timer = None if seconds is None else loop.call_later(seconds, self._transport.abort)


class Exchange:
    """One request and its answer."""

    def __init__(self, connection: ClientConnection, head: RequestHead, gone: asyncio.Future[None]) -> None:
        self._connection = connection
        self._head = head
        self._gone = gone
        self._sent_head = False

    async def run(self, app: Application, body: bytes) -> None:
        """Run the application. If it raises before it has sent the head of the answer, send status 500."""
        complete = False
        try:
            await self._send(await app(Request.of(self._head, body, self._gone)))
            complete = True
        except Abort as cut:
            if cut.reset:  # else it is closed in order below
                self._connection.abort()
        except Exception:
            logger.exception("the application failed")
            if not self._sent_head:
                await self._send(Answer(b'{"detail":"internal error"}', 500))
                complete = True
        self._connection.finished(keep_alive=complete and self._head.keeps_alive)

    def leave(self) -> None:
        """Note that the client sends no more or that the connection has ended."""
        if not self._gone.done():
            self._gone.set_result(None)

    async def _send(self, answer: Answer) -> None:
        head = self._encode_head(answer)
        self._sent_head = True
        if self._head.method == "HEAD" or answer.stream is None:
            await self._connection.write(head if self._head.method == "HEAD" else head + answer.body)
        else:
            await self._connection.write(head)
            await answer.stream(self._connection.write)

    def _encode_head(self, answer: Answer) -> bytes:
        headers = {"content-type": answer.content_type} if answer.content_type else {}
        headers.update(answer.headers)
        if answer.stream is None:
            headers["content-length"] = str(len(answer.body))
        if not self._head.keeps_alive:
            headers["connection"] = "close"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{status_line(answer.status)}{lines}\r\n".encode("latin-1")


class HttpServer:
    """A server that accepts connections and passes requests to one application.

    It belongs to the event loop on which `start` is called. It refuses bodies over `max_body_bytes`.
    """

    def __init__(self, app: Application, *, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.connections: set[ClientConnection] = set()
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # set by start
        self._listening: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_note_s = 0.0  # when the loop may log again that it cannot accept connections

    async def start(self, host: str, port: int, listening: socket.socket | None = None) -> int:
        """Start to listen, and return the port.

        Args:
            host: the address to listen on.
            port: the port, or 0 for a free one.
            listening: a bound socket, in place of `host` and `port`.

        Raises:
            OSError: the address cannot be used.
        """
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._note_exception)
        where = {"host": host, "port": port} if listening is None else {"sock": listening}
        make = partial(self.loop.create_server, lambda: ClientConnection(self), backlog=ACCEPTED_AT_ONCE)
        self._listening = await make(**where)
        ports = [sock.getsockname()[1] for sock in self._listening.sockets]
        if len({*ports}) > 1:  # "localhost" may be several addresses, each of which has got a port of its own
            self._listening.close()
            self._listening = await make(host=host, port=ports[0])
        for sock in self._listening.sockets:
            with sock.dup() as same:
                same.listen(WAITING_CONNECTIONS)
        return int(ports[0])

    def _note_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception of the event loop; one line a minute while it cannot accept connections."""
        problem = context.get("exception")
        if not isinstance(problem, OSError) or problem.errno not in _NO_ROOM:
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_note_s:
            self._next_note_s = loop.time() + _NOTE_EVERY_S
            logger.error(
                "no connection can be accepted: %s; %d are open, and new ones wait until some of them end "
                "(`ulimit -n` sets the number of open files)",
                problem.strerror,
                len(self.connections),
            )

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop listening, wait at most `grace_s` for the answers under way, and close all connections."""
        if self._listening is not None:
            self._listening.close()
        for connection in list(self.connections):
            connection.end()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(_CLOSING_ROUNDS):  # so that transports close their sockets
            await asyncio.sleep(0)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)

    def spawn(self, work: Any) -> None:
        """Run a coroutine in a task, and keep the task until it is done."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# -------------------------------------------------------------------------------------------- start and stop


LOOPBACK = "127.0.0.1"
START_S = 60.0
STOP_S = 30.0
_SPARE_BYTES = 256 * 1024 * 1024
"""The most bytes by which bodies that the server receives may exceed the application's limit, so that a
client whose body is too large reads the refusal. Beyond it, the connection ends while the client sends."""


Stop = Callable[[], None]


def run(
    app: Application,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    listening: socket.socket | None = None,
    ready: Callable[[int], None],
    begun: Callable[[Stop], object] | None = None,
) -> None:
    """Serve an application until SIGTERM, Ctrl-C, or a call of the function that `begun` receives.

    Then let it answer held polls, and close the connections. Signals stop the application only if the main
    thread calls this function.

    Args:
        app: the application.
        host: the address to listen on.
        port: the port, or 0 for a free one.
        listening: a bound socket to use instead of `host` and `port`.
        ready: called with the port when the server accepts requests.
        begun: called before the server listens, with a function that stops the server. Any thread may call
            that function at any time.

    Raises:
        OSError: the address cannot be used.
        Exception: what the application raises at its start-up or shutdown.
    """

    async def main() -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stopped.set)

        if threading.current_thread() is threading.main_thread():
            _stop_on_signals(loop, stop)
        if begun is not None:
            begun(stop)
        await app.startup()
        server = HttpServer(app, max_body_bytes=app.max_body_bytes + _SPARE_BYTES)
        try:
            ready(await server.start(host, port, listening))
            await stopped.wait()
        finally:
            await app.shutdown()
            await server.stop()

    asyncio.run(main())


def _stop_on_signals(loop: asyncio.AbstractEventLoop, stop: Stop) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stop)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: stop())


class ServerThread:
    """A server in a thread of this process. Thread-safe; `stop` may be called more than once.

    Args:
        app: the application.
        key: the key for clients, as an attribute for tests.
        host: the address to listen on.
        port: the port, or 0 for a free one.

    Example::

        with ServerThread(build(store, host, key="tml-test"), key="tml-test") as server:
            client = ServiceClient(base_url=server.url, api_key=server.key)
    """

    def __init__(self, app: Application, *, key: str = "", host: str = LOOPBACK, port: int = 0) -> None:
        self.key = key
        self.port = port
        self._app = app
        self._host = host
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._stop: Stop | None = None
        self._thread = DaemonThread(self._run, "tinker-server")

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://{self._host}:{self.port}"

    def start(self) -> ServerThread:
        """Start the server, and return when it accepts requests. Call this once.

        Raises:
            OSError: the port is taken.
            Exception: what the application raises at its start-up.
            TimeoutError: the server does not listen within `START_S`.
        """
        self._thread.start()
        if not self._ready.wait(START_S):
            raise TimeoutError("the server did not start")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def stop(self) -> None:
        """Stop the server: close its connections and end its thread. Wait for this at most `STOP_S`."""
        if self._stop is not None:
            self._stop()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            run(self._app, host=self._host, port=self.port, ready=self._listening, begun=self._begun)
        except BaseException as failure:  # noqa: BLE001  # `start` raises it
            self._failure = failure
        finally:
            self._ready.set()

    def _begun(self, stop: Stop) -> None:
        self._stop = stop

    def _listening(self, port: int) -> None:
        self.port = port
        self._ready.set()

    def __enter__(self) -> ServerThread:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
