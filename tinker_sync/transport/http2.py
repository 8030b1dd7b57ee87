"""`Http2`: many requests on one connection, if the extra `http2` is installed and the server speaks HTTP/2.

Over HTTP/1.1, each poll that the server holds needs a connection of its own. Over HTTP/2 it is a stream, so
thousands of samples wait on some tens of connections. ALPN decides: a new TLS connection offers both
protocols, and an `Exchange` whose connection turns out to be one of HTTP/2 hands it over to `Http2`. From
then on, small requests to that server are streams, and `Http2` opens further connections when it needs them.
Large requests stay with HTTP/1.1, because most servers let 64 KB of a stream be under way, which limits an
upload to 0.8 MB/s where the server is 80 ms away.

One thread, `tinker-http2`, owns the connections: it alone reads, writes and calls the package `h2`, which
does no I/O. The thread always reads, because a server may ping or say GOAWAY while no request is under way.
Other threads append to its queue and wake it, without a lock. It reports a finished stream to the reactor or
to the thread that waits.

What happens to the streams of a connection that ends:

- GOAWAY names the last stream that the server works on. That one and those before it go on to their answers.
  Those after it begin again on another connection, once, because the server has not looked at them. So does a
  stream that the server refuses (REFUSED_STREAM).
- If the connection breaks, the fate of a request that had been sent is unknown, as over HTTP/1.1, and the
  retries decide.
- A server that breaks the rules, or asks for HTTP/1.1, gets HTTP/1.1 from then on.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, Protocol

from tinker_sync._base.clock import Clock
from tinker_sync._base.log import Log
from tinker_sync._base.numbers import numbers
from tinker_sync._base.threads import DaemonThread
from tinker_sync.transport.call import SendFailed
from tinker_sync.transport.pools import MAX_IDLE_S, ConnectFailed, Connection, Dial, Route
from tinker_sync.wire.http1.client import RECEIVE_BYTES, ReplyParser
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

MOST_BODY_BYTES: Final = 32 * 1024
"""The largest body that a stream sends: half of what a new connection lets be under way."""
# Servers allow 100 to 250. A lost connection takes at most so many requests with it.
_MOST_STREAMS: Final = 100
# What arrives is taken at once and has the limits of HTTP/1.1, so the windows need not limit it too.
_STREAM_WINDOW: Final = 2**24
_CONNECTION_WINDOW: Final = 2**30
_BUSY_BYTES: Final = 128 * 1024  # a connection with so much unsent takes no further request
_STUCK_BYTES: Final = 1024 * 1024  # a server that makes us answer frames, and does not read, is given up
_READS_AT_ONCE: Final = 32
_PAUSE_S: Final = 1.0  # after a further connection could not be opened
_LAST_STREAM: Final = 2**31 - 1
_GOAWAY: Final = 7
_HEAD_BYTES: Final = 9  # of a frame
_MOST_FRAME_BYTES: Final = _HEAD_BYTES + 2**14
_REFUSED_STREAM, _CANCEL, _HTTP_1_1_REQUIRED = 7, 8, 13
# These belong to HTTP/1.1 alone, and make a request of HTTP/2 invalid.
_OF_HTTP1: Final = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"transfer-encoding",
    b"upgrade",
    b"te",
}
# Different in each request, so they would only push the other headers out of the tables of both sides.
_DIFFERING: Final = {
    b"content-length",
    b"traceparent",
    b"x-idempotency-key",
    b"x-tinker-create-promise-roundtrip-time",
}

_log = Log(__name__)
_next_number: Final = numbers()


def is_installed() -> bool:
    """Return True if the extra `http2` is installed."""
    return find_spec("h2") is not None


class Watcher(Protocol):
    """A reactor's set of sockets, which takes the reports of streams too."""

    def report(self, numbers: Iterable[int]) -> None: ...


class Stream:
    """One request and its answer, as the thread sees it that waits for the answer.

    The thread of `Http2` writes all attributes except `watcher`, and feeds the parser, until `done` is True.
    """

    __slots__ = (
        "_event", "_owner", "body", "connection", "done", "failure", "fresh", "head", "id", "number",
        "parser", "restarted", "route", "sent", "touched_s", "watcher",
    )  # fmt: skip

    def __init__(
        self, owner: Http2, route: Route, head: bytes, body: bytes, parser: ReplyParser, *, fresh: bool
    ) -> None:
        self._owner = owner
        self._event: threading.Event | None = None
        self.route = route
        self.head = head
        self.body = body
        self.parser = parser
        self.fresh = fresh
        self.number = -2 - next(_next_number)
        """The number for a reactor. It is below -1, so that it is no descriptor of a socket."""
        self.done = False
        """True once the answer is whole, or `failure` tells why none comes."""
        self.failure: SendFailed | None = None
        self.sent = False
        """True once the whole request is on its way."""
        self.touched_s = owner.clock.now()
        """The time of the last progress: asked for, begun, sent, a part of the answer."""
        self.restarted = False
        self.connection: _Connection | None = None
        self.id = 0
        self.watcher: Watcher | None = None

    def watched_by(self, watcher: Any) -> None:
        """Report the end of the stream to `watcher` from now on; to nothing if it is None."""
        self.watcher = watcher
        if watcher is not None and self.done:  # looked at last; `end` writes it before it reads the watcher
            watcher.report((self.number,))

    def wait(self, wait_s: float) -> None:
        """Wait until the stream is done, or the time is over."""
        self._event = event = self._event or threading.Event()
        if not self.done:
            event.wait(wait_s)

    def give_up(self, *, silent: bool = False) -> None:
        """Give the stream up; if `silent`, because no answer came in time. Any thread may call this."""
        self._owner.give_up(self, silent=silent)

    def end(self, failure: SendFailed | None = None) -> None:
        """Make the stream done, unless it is."""
        if not self.done:
            self.connection, self.head, self.body = None, b"", b""
            self.failure, self.done = failure, True
            if self.watcher is not None:
                self._owner.tell(self.watcher, self.number)
            if self._event is not None:
                self._event.set()


class Http2:
    """The HTTP/2 connections of one `Http`. Thread-safe.

    Args:
        clock: the source of time.
        connect_s: the limit for each step of opening a connection.
    """

    def __init__(self, clock: Clock, connect_s: float) -> None:
        self.clock = clock
        self.connect_s = connect_s
        self._closed = False  # final
        self._avoided: set[Route] = set()  # with servers that get HTTP/1.1
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._over = self._closed  # the thread has ended, so other threads do the jobs; final
        self._jobs: deque[Callable[[], object]] = deque()
        self._asleep = False  # who adds a job rings the bell
        self._ends: tuple[socket.socket, ...] = ()  # the thread's end of the bell, and that of the others
        self._selector: selectors.BaseSelector | None = None
        self._served: set[Route] = set()  # with a connection that is open or being opened
        # For the thread alone.
        self._hosts: dict[Route, _Host] = {}
        self._finished: list[tuple[Watcher, int]] = []

    # ---------------------------------------------------- on any thread

    def takes(self, route: Route) -> bool:
        """Return False if requests of a route must go over HTTP/1.1."""
        return not self._over and route not in self._avoided

    def serves(self, route: Route) -> bool:
        """Return True if a connection is open or being opened. The answer may lag by a moment."""
        return route in self._served

    @property
    def is_open(self) -> bool:
        """True if there is a connection to any server."""
        return bool(self._served)

    def adopt(self, connection: Connection) -> None:
        """Take a new connection over."""
        self._start(connection.route, partial(self._take, connection))

    def send(
        self,
        route: Route,
        head: bytes,
        body: bytes,
        parser: ReplyParser,
        *,
        fresh: bool,
        dial: Dial | None = None,
    ) -> Stream:
        """Send a request as soon as a connection has room for it, and return its stream.

        Args:
            route: the way to the server.
            head: the head of the request, in HTTP/1.1.
            body: the body.
            parser: the parser of the answer.
            fresh: True if the request was sent before, on a connection that was lost then.
            dial: opens a connection; None if the route has one (see `serves`).
        """
        stream = Stream(self, route, head, body, parser, fresh=fresh)
        if dial is None:
            self._add(partial(self._queue, stream))
        else:
            self._start(route, partial(self._queue, stream, dial))
        return stream

    def give_up(self, stream: Stream, *, silent: bool) -> None:
        """Give a stream up; see `Stream.give_up`."""
        self._add(partial(self._drop, stream, silent))

    def forget_idle(self) -> None:
        """Close the connections without requests; wait for that for a second at most."""
        done = threading.Event()
        self._add(partial(self._close_idle, done))
        if self._thread is not None:
            done.wait(1.0)

    def close(self, *, wait: bool = True) -> None:
        """Fail the requests under way, close the connections, and end the thread. May be called twice.

        Args:
            wait: True to wait a second at most for the thread; a finalizer must not wait.
        """
        self._closed = True
        self._add(lambda: None)
        thread = self._thread
        if wait and thread is not None and thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # not started yet
                thread.join(1.0)

    def renew_after_fork(self) -> None:
        """Drop the copies of the parent's connections, in a forked child."""
        selector, inherited = self._selector, list(self._ends)
        inherited += [each.sock for host in self._hosts.values() for each in host.connections]
        self._begin()
        if selector is not None:
            selector.close()  # without ending watches, because the parent shares the kernel's set
        for sock in inherited:
            with contextlib.suppress(OSError):
                sock.close()

    def _add(self, job: Callable[[], object]) -> None:
        # First the job, then the look at the thread, which does this the other way round: one sees the other.
        self._jobs.append(job)
        if self._over:
            self._do_jobs()
        elif self._asleep:
            with contextlib.suppress(OSError):  # it is full of rings, or the thread has closed it
                self._ends[1].send(b".")

    def _start(self, route: Route, job: Callable[[], object]) -> None:
        self._served.add(route)
        with self._lock:
            starts = self._thread is None and not self._over
            if starts:
                self._thread = DaemonThread(self._run, "tinker-http2")
        if starts and self._thread is not None:
            try:
                self._thread.start()
            except BaseException as error:  # the system gives no thread, or Ctrl-C
                self._over = True
                if not isinstance(error, RuntimeError):
                    raise
        self._add(job)

    # ---------------------------------------------------- on the thread

    def _run(self) -> None:
        selector = self._selector = selectors.DefaultSelector()
        self._ends = socket.socketpair()
        try:
            for end in self._ends:
                end.setblocking(False)
            selector.register(self._ends[0], selectors.EVENT_READ, self._hear)
            while not (self._closed or self._over):
                self._turn(selector)
        except BaseException:
            _log.exception("the thread of HTTP/2 failed")
            raise
        finally:
            self._end()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        """Wait for sockets, jobs and the time of a host; then do what is to be done."""
        until_s = min((host.look_at_s() for host in self._hosts.values()), default=math.inf)
        wait_s = None if until_s == math.inf else max(until_s - self.clock.now(), 0.0)
        self._asleep = True
        ready = selector.select(0.0 if self._jobs or self._closed else wait_s)
        self._asleep = False
        for key, _ in ready:
            key.data()
        self._do_jobs()
        for route, host in list(self._hosts.items()):
            host.go_on(self.clock.now())
            if host.connections:
                self._served.add(route)
            else:  # `go_on` has failed the requests that waited
                self.lose(route)
                del self._hosts[route]
        finished, self._finished = self._finished, []
        for watcher in {each for each, _ in finished}:
            watcher.report([number for each, number in finished if each is watcher])

    def _end(self) -> None:
        self._over = True
        self._served.clear()
        hosts, self._hosts = list(self._hosts.values()), {}
        for host in hosts:
            host.close()
        self._do_jobs()
        for watcher, number in self._finished:
            watcher.report((number,))
        for each in self._ends:
            each.close()
        if self._selector is not None:
            self._selector.close()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ends[0].recv(4096)

    # ---------------------------------------------------- jobs: on the thread, or after its end on any

    def _do_jobs(self) -> None:
        with contextlib.suppress(IndexError):  # until there is none
            while True:
                self._jobs.popleft()()

    def _host(self, route: Route) -> _Host:
        assert self._selector is not None  # noqa: S101  # the thread runs
        host = self._hosts.get(route)
        if host is None:
            host = self._hosts[route] = _Host(self, route, self._selector)
        return host

    def _take(self, connection: Connection) -> None:
        if self._over:
            connection.close()
        else:
            self._host(connection.route).take(connection)

    def _queue(self, stream: Stream, dial: Dial | None = None) -> None:
        if self._over:
            if dial is not None:
                dial.abort()
            stream.end(self.ended(stream))
            return
        host = self._host(stream.route)
        if dial is not None:
            host.take(dial)
        host.waiting.append(stream)

    def _drop(self, stream: Stream, silent: bool) -> None:
        connection = stream.connection
        stream.end(SendFailed("the request was given up", maybe_received=stream.sent))
        if connection is not None:
            connection.drop(stream, silent=silent)

    def _close_idle(self, done: threading.Event) -> None:
        for host in self._hosts.values():
            host.close_idle(math.inf)
        done.set()

    def tell(self, watcher: Watcher, number: int) -> None:
        """Report a stream to its watcher, at the end of the turn and together with others."""
        if self._over:
            watcher.report((number,))
        else:
            self._finished.append((watcher, number))

    def ended(self, stream: Stream) -> SendFailed:
        """Return the failure of a stream that was under way when the thread ended."""
        cause = "the client was closed" if self._closed else "the thread of HTTP/2 failed"
        text = f"{cause} while the request was under way"
        return SendFailed(text, maybe_received=stream.sent, final=self._closed)

    def lose(self, route: Route) -> None:
        """Note that there is no connection, so that the next request opens one."""
        self._served.discard(route)

    def avoid(self, route: Route) -> None:
        """Use HTTP/1.1 for a route from now on."""
        self._avoided.add(route)


class _Host:
    """The connections to one server, and the requests that wait for one. For the thread of `Http2`."""

    def __init__(self, owner: Http2, route: Route, selector: selectors.BaseSelector) -> None:
        self.owner = owner
        self.route = route
        self.selector = selector
        self.clock = owner.clock
        self.waiting: deque[Stream] = deque()
        self.connections: list[_Connection] = []
        self._dial_at_s = -math.inf  # not before

    def look_at_s(self) -> float:
        """Return the time of the clock at which to call `go_on`, even if nothing has happened."""
        soonest = min((each.look_at_s() for each in self.connections), default=math.inf)
        return min(soonest, self._dial_at_s) if self.waiting and self._needs() > 0 else soonest

    def go_on(self, now_s: float) -> None:
        """Start the requests that wait, open connections for those that have none, and send."""
        for connection in list(self.connections):
            if connection.look_at_s() <= now_s:
                connection.step()
        for connection in self.connections:
            while self.waiting and connection.has_room():
                stream = self.waiting.popleft()
                if not stream.done:  # not given up
                    connection.start(stream)
        if not self.connections:
            self.fail_waiting("the connection was closed", stale=True)
        elif self.waiting and now_s >= self._dial_at_s:
            self._dial()
        for connection in list(self.connections):
            connection.flush()
        self.close_idle(now_s - MAX_IDLE_S)

    def _needs(self) -> int:
        """Return the number of connections to open for the requests that wait."""
        opening = sum(connection.opens for connection in self.connections)
        return math.ceil(len(self.waiting) / self.route.known.streams) - opening

    def _dial(self) -> None:
        # This thread must not wait for a lookup, and the server is connected, so its addresses are right.
        self.route.known.hold()
        try:
            for _ in range(self._needs()):
                self.take(Dial(self.route, self.owner.connect_s, now=self.clock.now))
        except ConnectFailed:
            self.miss()

    def take(self, new: Dial | Connection) -> None:
        self.connections.append(_Connection(self, new))

    def miss(self) -> None:
        """Wait a moment after a connection could not be opened."""
        self._dial_at_s = self.clock.now() + _PAUSE_S

    def fail_waiting(self, text: str, *, error: ConnectFailed | None = None, stale: bool = False) -> None:
        """Fail the requests that wait. Those that are `stale` are sent again at once, unless they were."""
        waiting, self.waiting = self.waiting, deque()
        self.owner.lose(self.route)  # before the first one is sent again
        for stream in waiting:
            failure = SendFailed(text, maybe_received=False, stale=stale and not stream.fresh)
            if error is not None:
                failure.timed_out, failure.final, failure.__cause__ = error.timed_out, error.final, error
            stream.end(failure)

    def restart(self, stream: Stream) -> None:
        """Let a stream that the server has not looked at begin again, once."""
        stream.connection, stream.sent = None, False
        if stream.restarted:
            stream.end(SendFailed("the server refuses the request for now", maybe_received=False))
        else:
            stream.restarted = True
            self.waiting.appendleft(stream)

    def close_idle(self, since_s: float) -> None:
        """Close the connections without a request since a time."""
        for connection in list(self.connections):
            if not connection.opens and not connection.streams and connection.idle_since_s <= since_s:
                connection.hang_up()

    def close(self) -> None:
        for stream in (*self.waiting, *(one for each in self.connections for one in each.streams.values())):
            stream.end(self.owner.ended(stream))
        for connection in list(self.connections):
            connection.streams = {}
            connection.hang_up()


class _Connection:
    """One connection, which may still have to be opened, and its streams. For the thread of `Http2`."""

    def __init__(self, host: _Host, new: Dial | Connection) -> None:
        self._host = host
        self._dial: Dial | None = None
        self._opened: Connection
        self._h2: Any = None
        self.streams: dict[int, Stream] = {}
        self.idle_since_s = self._heard_s = host.clock.now()
        self._unread = False  # bytes may have arrived that the socket does not show
        self._leaving = False  # takes no further request
        self._unsent_bodies: dict[int, bytes] = {}
        self._out = bytearray()
        self._received = bytearray()  # less than a frame
        self._watched: tuple[int, int] | None = None  # the descriptor, and the events
        if isinstance(new, Dial):
            self._dial = new
            self._watch()
        else:
            self._begin(new)

    @property
    def opens(self) -> bool:
        """True while the connection is being opened."""
        return self._dial is not None

    @property
    def sock(self) -> socket.socket:
        return self._opened.sock if self._dial is None else self._dial.sock

    def look_at_s(self) -> float:
        """Return the time of the clock at which to call `step`, even if the socket is not ready."""
        if self._dial is not None:
            return self._dial.expires_at_s
        return -math.inf if self._unread else math.inf if self.streams else self.idle_since_s + MAX_IDLE_S

    def step(self) -> None:
        """Go on to open the connection, or take what has arrived."""
        if self._dial is None:
            self._read()
            return
        try:
            opened = self._dial.step()
        except ConnectFailed as error:
            self._close()
            self._host.miss()
            if not self._host.connections:
                self._host.fail_waiting(str(error), error=error)
            return
        if opened is None:
            self._watch()
        elif opened.multiplexed:
            self._dial = None
            self._begin(opened)
        else:  # the server has stopped to speak HTTP/2
            self._host.owner.avoid(self._host.route)
            self._close()
            self._host.fail_waiting("the server speaks HTTP/1.1 now", stale=True)

    def _begin(self, opened: Connection) -> None:
        # Loaded when the first server has chosen HTTP/2.
        from h2.config import H2Configuration
        from h2.connection import H2Connection
        from h2.settings import SettingCodes, Settings
        from hpack import NeverIndexedHeaderTuple

        self._opened = opened
        self._unindexed = NeverIndexedHeaderTuple
        # Our own checks hold: of a request where its head is written, of an answer in the parser.
        checks = ("validate_outbound", "normalize_outbound", "validate_inbound", "normalize_inbound")
        left_out = {f"{check}_headers": False for check in checks}
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None, **left_out))
        self._h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            },
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW)
        self._unread = True
        self._watch()

    def _watch(self) -> None:
        """Watch the socket; while the connection is being opened, it may be another one after each step."""
        writing = bool(self._out) if self._dial is None else self._dial.writing
        events = selectors.EVENT_WRITE if writing else 0
        if not writing or self._dial is None:
            events |= selectors.EVENT_READ
        wanted = self.sock.fileno(), events
        if wanted != self._watched:
            self._unwatch()
            self._host.selector.register(wanted[0], events, self.step)
            self._watched = wanted

    def _unwatch(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            self._host.selector.unregister(watched[0])

    # ---------------------------------------------------- requests

    def has_room(self) -> bool:
        """Return True if another request may begin here."""
        if self._leaving or self._dial is not None or len(self._out) >= _BUSY_BYTES:
            return False
        # A new connection has not heard the server's limit yet, so that of the others holds.
        limit: int = min(self._h2.remote_settings.max_concurrent_streams, self._host.route.known.streams)
        return len(self.streams) < limit

    def start(self, stream: Stream) -> None:
        """Begin a request."""
        number = self._h2.get_next_available_stream_id()
        self._leaving = number + 2 > _LAST_STREAM
        stream.connection, stream.id, stream.touched_s = self, number, self._host.clock.now()
        self.streams[number] = stream
        fields = list(_fields(stream.head, self._unindexed))
        self._h2.send_headers(number, fields, end_stream=not stream.body)
        self._unsent_bodies[number] = stream.body
        self._send_body(number)

    def _send_body(self, number: int) -> None:
        """Send as much of a body as the windows of the server allow."""
        rest, stream = self._unsent_bodies.pop(number), self.streams[number]
        while rest:
            size = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
            if size <= 0:
                self._unsent_bodies[number] = rest
                return
            piece, rest = rest[:size], rest[size:]
            self._h2.send_data(number, piece, end_stream=not rest)
        stream.sent, stream.touched_s = True, self._host.clock.now()

    def drop(self, stream: Stream, *, silent: bool) -> None:
        """Tell the server that nobody waits for a stream.

        If nothing has arrived since the request was sent, the connection takes no further one.
        """
        if self.streams.get(stream.id) is stream:
            self._leaving = self._leaving or (silent and self._heard_s < stream.touched_s)
            self._forget(stream.id)
            self._reset(stream.id)

    def _reset(self, number: int) -> None:
        with contextlib.suppress(Exception):  # the server has ended it
            self._h2.reset_stream(number, _CANCEL)

    def _forget(self, number: int) -> Stream | None:
        self._unsent_bodies.pop(number, None)
        self.idle_since_s = self._host.clock.now()
        return self.streams.pop(number, None)

    # ---------------------------------------------------- bytes

    def _read(self) -> None:
        self._unread = False
        try:
            for _ in range(_READS_AT_ONCE):
                data = self.sock.recv(RECEIVE_BYTES)
                if not data:
                    self._lose("the connection was closed without an answer")
                    return
                self._heard_s = self._host.clock.now()
                try:
                    events = self._h2.receive_data(self._without_goaway(data))
                except Exception as error:  # noqa: BLE001  # whatever a hostile server makes `h2` raise
                    self._host.owner.avoid(self._host.route)
                    # Without the text of the error, which may quote headers.
                    self._lose(f"the server broke the rules of HTTP/2 ({type(error).__name__})")
                    return
                for event in events:
                    handle = _HANDLERS.get(type(event).__name__)
                    if handle is not None:
                        handle(self, event)
            self._unread = True  # TLS may hold more than the socket shows
        except self._opened.nothing_yet:
            pass
        except OSError as error:
            self._lose(f"the connection broke: {error.strerror or error}")

    def flush(self) -> None:
        """Send what the socket takes. Close a connection that is of no more use."""
        if self._dial is not None:
            return
        if self._leaving and not self.streams:
            self.hang_up()
            return
        self._out += self._h2.data_to_send()
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except self._opened.nothing_yet:
            if len(self._out) > _STUCK_BYTES:
                self._lose("the server stopped reading")
                return
        except OSError as error:
            self._lose(f"the connection broke: {error.strerror or error}")
            return
        self._watch()

    def hang_up(self) -> None:
        """Say GOAWAY on a connection without streams, and close it."""
        with contextlib.suppress(Exception):  # the server has closed it, or it is not open yet
            self._h2.close_connection()
            self.sock.send(self._out + self._h2.data_to_send())
        self._close()

    def _lose(self, text: str) -> None:
        self._close()
        used = self._opened.requests > 0
        for stream in self.streams.values():
            stale = used and not (stream.fresh or stream.parser.started)
            stream.end(SendFailed(text, maybe_received=stream.sent, stale=stale))
        self.streams = {}

    def _close(self) -> None:
        self._host.connections.remove(self)
        self._unwatch()
        if self._dial is None:
            self._opened.close()
        else:
            self._dial.abort()

    def _without_goaway(self, data: bytes) -> bytes:
        """Return the whole frames that have arrived, without those of GOAWAY, which are handled here.

        After one, `h2` refuses every frame, and so the answers that the server still sends.
        """
        received, passed, at = self._received, bytearray(), 0
        received += data
        while len(received) - at >= _HEAD_BYTES:
            end = at + _HEAD_BYTES + int.from_bytes(received[at : at + 3], "big")
            if end - at > _MOST_FRAME_BYTES:
                raise MalformedMessage("a frame is too large")
            if end > len(received):
                break
            if received[at + 3] == _GOAWAY:
                self._go_away(int.from_bytes(received[at + 9 : at + 13], "big") & _LAST_STREAM)
            else:
                passed += received[at:end]
            at = end
        del received[:at]
        return bytes(passed)

    # ---------------------------------------------------- what the server says

    def _go_away(self, last: int) -> None:
        self._leaving = True
        for number in [number for number in self.streams if number > last]:
            stream = self._forget(number)
            if stream is not None:
                self._host.restart(stream)

    def _on_head(self, event: Any) -> None:
        status, *lines = (
            f"{name.decode('latin-1')}: {value.decode('latin-1')}" for name, value in event.headers
        )
        self._feed(event, lambda parser: parser.begin(status.removeprefix(":status: "), lines))

    def _on_data(self, event: Any) -> None:
        self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self._feed(event, lambda parser: parser.feed(event.data))

    def _on_end(self, event: Any) -> None:
        self._feed(event, ReplyParser.eof)

    def _feed(self, event: Any, feed: Callable[[ReplyParser], None]) -> None:
        """Pass a part of the answer to the parser. End the stream if the answer is whole, or wrong."""
        stream, failure = self.streams.get(event.stream_id), None
        if stream is None:
            return
        stream.touched_s = self._heard_s
        try:
            feed(stream.parser)
            if not stream.parser.done:
                return
            self._opened.count_answer()
        except (MalformedMessage, MessageTooLarge) as error:
            final = isinstance(error, MessageTooLarge)
            failure = SendFailed(str(error), maybe_received=True, final=final)
            failure.__cause__ = error
        self._forget(stream.id)
        stream.end(failure)
        if not stream.sent or getattr(event, "stream_ended", True) is None:
            self._reset(stream.id)  # the server need not read or send the rest

    def _on_reset(self, event: Any) -> None:
        stream = self._forget(event.stream_id)
        if stream is None:
            return
        if event.error_code == _REFUSED_STREAM:
            self._host.restart(stream)
            return
        name = getattr(event.error_code, "name", event.error_code)
        failure = SendFailed(f"the server ended the request ({name})", maybe_received=stream.sent)
        if event.error_code == _HTTP_1_1_REQUIRED:
            self._host.owner.avoid(self._host.route)
            failure.maybe_received, failure.stale = False, True
        stream.end(failure)

    def _on_window(self, _: Any) -> None:
        for number in list(self._unsent_bodies):
            self._send_body(number)

    def _on_settings(self, event: Any) -> None:
        limit = min(self._h2.remote_settings.max_concurrent_streams, _MOST_STREAMS)
        self._host.route.known.streams = max(limit, 1)
        self._on_window(event)


_HANDLERS: Final[dict[str, Callable[[_Connection, Any], None]]] = {
    "ResponseReceived": _Connection._on_head,
    "InformationalResponseReceived": _Connection._on_head,
    "DataReceived": _Connection._on_data,
    "StreamEnded": _Connection._on_end,
    "StreamReset": _Connection._on_reset,
    "WindowUpdated": _Connection._on_window,
    "RemoteSettingsChanged": _Connection._on_settings,
}


def _fields(
    head: bytes, unindexed: Callable[[bytes, bytes], tuple[bytes, bytes]]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers of a request for HTTP/2, made from its head in HTTP/1.1, in which `Host` is first.

    >>> head = b"GET /x HTTP/1.1\\r\\nHost: h\\r\\nX-A: 1\\r\\nConnection: close\\r\\n\\r\\n"
    >>> list(_fields(head, lambda name, value: (name, value)))[2:]
    [(b':authority', b'h'), (b':path', b'/x'), (b'x-a', b'1')]
    """
    first, host, *lines = head[:-4].split(b"\r\n")
    method, target, _ = first.split(b" ")
    yield b":method", method
    yield b":scheme", b"https"
    yield b":authority", host[6:]
    yield b":path", target
    for line in lines:
        name, _, value = line.partition(b": ")
        name = name.lower()
        if name in _DIFFERING:
            yield unindexed(name, value)
        elif name not in _OF_HTTP1:
            yield name, value
