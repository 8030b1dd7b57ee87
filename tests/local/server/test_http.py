"""HTTP over a socket: requests that come in pieces, several at once, invalid, too large or cut off."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tinker_sync.local.server import http
from tinker_sync.local.server.http import Abort, Answer, Application, Request, ServerThread, Write
from tinker_sync.wire.http1.server import RequestParser

PATIENCE_S = 120.0
PIECES = 512  # 32 MB: more than any system keeps for a connection


class Echo(Application):
    """An application that answers with the body of the request. Some paths select other answers."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.gone = threading.Event()
        self.life: list[str] = []
        self.sent = 0

    async def __call__(self, request: Request) -> Answer:
        self.seen.append(request)
        return await getattr(self, request.path.strip("/") or "echo", self.echo)(request)

    async def startup(self) -> None:
        self.life.append("startup")

    async def shutdown(self) -> None:
        self.life.append("shutdown")

    async def echo(self, request: Request) -> Answer:
        return Answer(b"<" + request.body + b">", content_type="", headers={"x-a": "b"})

    async def flood(self, request: Request) -> Answer:
        async def stream(write: Write) -> None:
            for _ in range(PIECES):
                await write(b"x" * 65536)
                self.sent += 1

        return Answer(headers={"content-length": str(PIECES * 65536)}, stream=stream)

    async def broken(self, request: Request) -> Answer:
        raise RuntimeError("a bug")

    async def half(self, request: Request) -> Answer:
        async def stream(write: Write) -> None:
            await write(b"only this")
            raise RuntimeError("a bug in the middle")

        return Answer(headers={"content-length": "100"}, stream=stream)

    async def abort(self, request: Request) -> Answer:
        raise Abort

    async def wait(self, request: Request) -> Answer:
        assert request.gone is not None
        await request.gone
        self.gone.set()
        return Answer()


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[tuple[ServerThread, Echo]]:
    echo = Echo()
    with ServerThread(echo, **options) as thread:
        yield thread, echo
    assert echo.life == ["startup", "shutdown"]


def talk(thread: ServerThread, *pieces: bytes, until: bytes = b"") -> bytes:
    """Send pieces, each in its own packet, on a new connection. Return the bytes that the server sends back.

    Read until `until` has arrived. Without `until`, close the sending direction, and read until the end.
    """
    with socket.create_connection(("127.0.0.1", thread.port), PATIENCE_S) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            line.sendall(piece)
        if not until:
            line.shutdown(socket.SHUT_WR)
        found = b""
        while not until or until not in found:
            data = line.recv(65536)
            if not data:
                break
            found += data
        return found


GET = b"GET /echo HTTP/1.1\r\nHost: h\r\n\r\n"


def test_a_request_in_pieces() -> None:
    with serving() as (thread, echo):
        head = b"POST /echo?a=%20b HTTP/1.1\r\nHost: h\r\nX-Y:  z \r\nContent-Length: 5\r\n\r\n"
        pieces = [head[i : i + 7] for i in range(0, len(head), 7)]
        answer = talk(thread, *pieces, b"he", b"llo", until=b"<hello>")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: 7\r\n")
    seen = echo.seen[0]
    assert (seen.method, seen.path, seen.query, seen.headers["x-y"]) == ("POST", "/echo", "a=%20b", "z")


def test_a_body_in_chunks() -> None:
    head = b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving() as (thread, _):
        answer = talk(thread, head + b"3;x=y\r\nab", b"c\r\n2\r\nde\r\n0\r\nTrailer: t\r\n\r\n", until=b">")
    assert answer.endswith(b"<abcde>")


def test_an_interim_answer_asks_for_the_body() -> None:
    head = b"POST /echo HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    with serving() as (thread, _), socket.create_connection(("127.0.0.1", thread.port), PATIENCE_S) as line:
        line.sendall(head)
        assert line.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(b"ab")
        assert line.recv(1000).endswith(b"<ab>")


@pytest.mark.parametrize(
    "head", [b"GET /echo HTTP/1.0\r\n\r\n", b"GET /echo HTTP/1.1\r\nConnection: close\r\n\r\n"]
)
def test_connections_end_on_request_and_for_http_1_0(head: bytes) -> None:
    with serving() as (thread, _):
        answer = talk(thread, head, until=b"never")  # returns because the server closes
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"HELLO\r\n\r\n", 400),
        (b"GET /a HTTP/2.0\r\n\r\n", 505),
        (b"POST /a HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n", 413),
        (b"GET /a HTTP/1.1\r\nX: " + b"y" * 70000, 431),
    ],
)
def test_what_is_no_request_is_refused(request_bytes: bytes, status: int) -> None:
    with serving() as (thread, echo):
        answer = talk(thread, request_bytes, until=b"never")
        assert talk(thread, GET, until=b"<>")  # others are served as before
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert len(echo.seen) == 1


def test_bugs_are_answered_and_do_not_spread() -> None:
    with serving() as (thread, _):
        assert talk(thread, b"GET /broken HTTP/1.1\r\n\r\n", until=b"}").startswith(b"HTTP/1.1 500 ")
        assert talk(thread, b"GET /half HTTP/1.1\r\n\r\n", until=b"never").endswith(b"only this")
        assert talk(thread, GET, until=b"<>")


def test_a_connection_can_be_cut() -> None:
    with serving() as (thread, _), pytest.raises(ConnectionResetError):
        talk(thread, b"GET /abort HTTP/1.1\r\n\r\n", until=b"never")


def test_an_application_learns_of_a_disconnect() -> None:
    with serving() as (thread, echo):
        with socket.create_connection(("127.0.0.1", thread.port), PATIENCE_S) as line:
            line.sendall(b"GET /wait HTTP/1.1\r\n\r\n")
            while not echo.seen:
                threading.Event().wait(0.002)
        assert echo.gone.wait(PATIENCE_S)


def test_a_slow_reader_is_waited_for() -> None:
    with (
        serving() as (thread, echo),
        socket.create_connection(("127.0.0.1", thread.port), PATIENCE_S) as line,
    ):
        line.sendall(b"GET /flood HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert talk(thread, GET, until=b"<>")  # meanwhile others are served
        assert echo.sent < PIECES
        found = 0
        while data := line.recv(1 << 20):
            found += len(data)
    assert found > PIECES * 65536


def test_a_request_that_stalls_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_S", 0.05)
    with serving() as (thread, _), socket.create_connection(("127.0.0.1", thread.port), PATIENCE_S) as line:
        line.sendall(b"POST /echo HTTP/1.1\r\nContent-")
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(100) == b""


def test_the_end_does_not_wait_for_idle_connections() -> None:
    """A server that is stopped closes an idle connection at once."""
    with (
        serving() as (thread, echo),
        socket.create_connection(("127.0.0.1", thread.port), PATIENCE_S) as idle,
    ):
        idle.sendall(GET)
        assert idle.recv(1000).endswith(b"<>")
        thread.stop()
        assert idle.recv(1000) == b""
    assert echo.life == ["startup", "shutdown"]


@pytest.mark.parametrize(
    ("head", "pieces"),
    [
        (b"Content-Length: 1000003\r\n", [b"abc", b"x" * 1_000_000]),
        (b"Transfer-Encoding: chunked\r\n", [b"3\r\nabc\r\nf4240\r\n", b"x" * 1_000_000, b"\r\n0\r\n\r\n"]),
    ],
)
def test_the_application_chooses_by_the_head_whose_body_is_dropped(head: bytes, pieces: list[bytes]) -> None:
    parser = RequestParser(
        max_head_bytes=1000, max_body_bytes=10_000_000, keeps_body=lambda head: head.path != "/no"
    )
    for path, kept in (("/no", 0), ("/yes", 1_000_003), ("/no", 0)):
        parser.feed(b"POST " + path.encode() + b" HTTP/1.1\r\n" + head + b"\r\n")
        for piece in pieces[:-1]:
            assert parser.take() is None
            parser.feed(piece)
            assert parser.take() is None
            assert kept or parser.buffered == 0
        parser.feed(pieces[-1])
        taken = parser.take()
        assert taken is not None
        assert (taken[0].path, len(taken[1])) == (path, kept)
        assert parser.buffered == 0
