"""The state of one request on one connection, with a double of the socket."""

from __future__ import annotations

import math
import ssl
from typing import Any

import pytest
from support.clock import FakeClock
from support.servers import answer

from tinker_sync.transport.call import SendFailed
from tinker_sync.transport.pools import Pools
from tinker_sync.transport.socket_line import Limits, SocketLine

HEAD = b"POST / HTTP/1.1\r\n\r\n"


class HandSocket:
    """A double of a socket that records its timeouts.

    Args:
        clock: the clock, which `sendall` advances.
        arrivals: the bytes or exceptions of the next calls of `recv`.
        send_takes_s: the seconds that a `sendall` takes.
        room: the number of bytes that a single `send` takes.
    """

    def __init__(
        self, clock: FakeClock, arrivals: list[bytes | Exception], send_takes_s: float, room: int
    ) -> None:
        self.clock = clock
        self.arrivals = arrivals
        self.send_takes_s = send_takes_s
        self.room = room
        self.timeouts: list[float | None] = []
        self.sent = b""

    def settimeout(self, seconds: float | None) -> None:
        self.timeouts.append(seconds)

    def gettimeout(self) -> float | None:
        return self.timeouts[-1] if self.timeouts else None

    def send(self, data: Any) -> int:
        """Take as many bytes as there is room for, without waiting. Return their number."""
        assert self.gettimeout() == 0
        taken = bytes(data)[: self.room]
        self.sent += taken
        if not taken:
            raise BlockingIOError
        return len(taken)

    def sendall(self, data: Any) -> None:
        self.clock.advance(self.send_takes_s)
        self.sent += bytes(data)

    def recv(self, size: int) -> bytes:
        if not self.arrivals:
            raise BlockingIOError
        arrival = self.arrivals.pop(0)
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    def fileno(self) -> int:
        return 99


class HandConnection:
    def __init__(self, sock: HandSocket) -> None:
        self.sock = sock
        self.requests = 0
        self.closed = False
        self.route = None
        self.nothing_yet = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def close(self) -> None:
        self.closed = True


def line(
    *arrivals: bytes | Exception,
    send_takes_s: float = 0.0,
    room: int = 1000,
    read_s: float = 10,
    idle_s: float = 5,
    until_s: float = math.inf,
) -> tuple[SocketLine, HandConnection, FakeClock]:
    clock = FakeClock(now_s=0.0)
    connection = HandConnection(HandSocket(clock, list(arrivals), send_takes_s, room))
    limits = Limits(connect_s=5, read_s=read_s, idle_s=idle_s, give_up_s=until_s, max_body_bytes=1000)
    pools = Pools(clock)
    assert pools.adopt(connection)  # type: ignore[arg-type]  # a double
    return SocketLine(connection, pools, clock, "POST", limits), connection, clock  # type: ignore[arg-type]


def test_each_piece_of_an_upload_has_the_timeout_for_itself() -> None:
    made, connection, clock = line(answer(b"ok"), send_takes_s=9.0)
    body = bytes(3_000_000)
    made.send(HEAD, body)
    assert clock.now() > 100  # in all, far more than the timeout of 10 s
    assert connection.sock.sent == HEAD + body
    assert set(connection.sock.timeouts) == {0, 10.0}
    assert made.finish().body() == b"ok"


def test_a_small_body_shares_a_packet_with_its_head() -> None:
    made, connection, _ = line()
    made.send(HEAD, b"{}")
    assert connection.sock.sent == HEAD + b"{}"
    assert connection.sock.timeouts == [0]


@pytest.mark.parametrize("room", [0, 1, len(HEAD), len(HEAD) + 1])
def test_what_does_not_fit_at_once_is_waited_for(room: int) -> None:
    made, connection, clock = line(room=room, send_takes_s=1.0)
    made.send(HEAD, b"{}")
    assert connection.sock.sent == HEAD + b"{}"
    assert connection.sock.timeouts == [0, 10.0]
    assert clock.now() == 1.0


def test_a_deadline_cuts_an_upload() -> None:
    made, _, _ = line(send_takes_s=9.0, until_s=30.0)
    with pytest.raises(SendFailed) as caught:
        made.send(HEAD, bytes(3_000_000))
    assert (caught.value.timed_out, caught.value.maybe_received) == (True, False)


def test_silence_is_measured_from_the_last_news() -> None:
    raw = answer(b"x" * 20)
    made, _, clock = line(raw[:-10], BlockingIOError())
    made.send(HEAD, None)
    assert made.expires_at_s == 10.0
    clock.advance(4)
    assert made.step() is None
    assert made.expires_at_s == 9.0  # 4 s and the idle timeout
    clock.advance(4.5)
    assert made.step() is None
    clock.advance(1)
    with pytest.raises(SendFailed, match="stopped coming") as caught:
        made.step()
    assert caught.value.timed_out


def test_step_gives_the_answer_once_it_is_whole() -> None:
    raw = answer(b"hello")
    made, connection, _ = line(raw[:5], BlockingIOError(), raw[5:-1], BlockingIOError(), raw[-1:])
    made.send(HEAD, None)
    assert made.step() is None
    assert made.step() is None
    reply = made.step()
    assert reply is not None
    assert reply.body() == b"hello"
    assert set(connection.sock.timeouts) == {0}
    assert connection.requests == 1
    assert not connection.closed


def test_step_and_finish_may_be_mixed() -> None:
    raw = answer(b"hello")
    made, _, _ = line(raw[:-2], BlockingIOError(), raw[-2:])
    made.send(HEAD, None)
    assert made.step() is None
    assert made.finish().body() == b"hello"


@pytest.mark.parametrize(
    ("arrivals", "stale"),
    [
        ([ConnectionResetError()], True),
        ([b""], True),
        ([b"HTTP", b""], False),
        ([TimeoutError()] * 100, False),
    ],
)
def test_only_a_used_connection_without_a_word_is_stale(arrivals: list[Any], stale: bool) -> None:
    for requests in (0, 1):
        made, connection, _ = line(*arrivals)
        connection.requests = requests
        made.send(HEAD, None)
        with pytest.raises(SendFailed) as caught:
            made.finish()
        assert caught.value.stale is (stale and requests > 0)
        assert caught.value.maybe_received
        assert connection.closed


def test_a_line_given_up_closes_its_connection_once() -> None:
    made, connection, _ = line()
    made.send(HEAD, None)
    made.abort()
    made.abort()
    assert connection.closed
    assert made.sock.fileno() == 99
