"""One request on one connection, with a double of the socket."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
from support.clock import FakeClock
from support.servers import answer

from tinker_sync.config import Settings, Timeout
from tinker_sync.transport.call import Call, SendFailed
from tinker_sync.transport.http import Exchange, Http
from tinker_sync.transport.pools import Origin, Route


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
    def __init__(self, sock: HandSocket, requests: int) -> None:
        self.sock = sock
        self.requests = requests
        self.closed = False
        self.route = Route(Origin("http", "127.0.0.1", 1))
        self.nothing_yet = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def count_answer(self) -> None:
        self.requests += 1

    def close(self) -> None:
        self.closed = True


class Bench:
    """One request on a double of a connection. Its answer has 10 s to begin, and 5 s between two pieces.

    Args:
        arrivals: as for `HandSocket`, like `send_takes_s` and `room`.
        requests: the number of answers that the connection has brought before.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *arrivals: bytes | Exception,
        requests: int = 0,
        send_takes_s: float = 0.0,
        room: int = 1000,
    ) -> None:
        self.clock = FakeClock(now_s=0.0)
        self.sock = HandSocket(self.clock, list(arrivals), send_takes_s, room)
        self.connection = HandConnection(self.sock, requests)
        monkeypatch.setattr("tinker_sync.transport.http.connect", lambda *_: self.connection)
        timeout = Timeout(connect=5, read=10, idle=5)
        self._http = Http(Settings.resolve(base_url="http://127.0.0.1:1", timeout=timeout), clock=self.clock)

    def open(self, body: bytes = b"", deadline_s: float | None = None) -> Exchange:
        call = Call(method="POST", path="/x", body=body, deadline_s=deadline_s, repeatable=False)
        return self._http.open(call)

    def sent(self) -> tuple[bytes, bytes]:
        """Return the head and the body that were sent."""
        head, _, body = self.sock.sent.partition(b"\r\n\r\n")
        return head, body


def test_each_piece_of_an_upload_has_the_timeout_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, answer(b"ok"), send_takes_s=9.0)
    body = bytes(3_000_000)
    made = bench.open(body)
    assert bench.clock.now() > 100  # in all, far more than the timeout of 10 s
    assert bench.sent()[1] == body
    assert set(bench.sock.timeouts) == {0, 10.0}
    reply = made.step()
    assert reply is not None
    assert reply.body == b"ok"


def test_a_small_body_shares_a_packet_with_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.open(b"{}")
    assert bench.sent()[1] == b"{}"
    assert bench.sock.timeouts == [0]


@pytest.mark.parametrize("room", [0, 1, 100])
def test_what_does_not_fit_at_once_is_waited_for(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, room=room, send_takes_s=1.0)
    bench.open(b"{}")
    assert bench.sent()[1] == b"{}"
    assert bench.sock.timeouts == [0, 10.0]
    assert bench.clock.now() == 1.0


def test_a_deadline_cuts_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, send_takes_s=9.0)
    with pytest.raises(SendFailed) as caught:
        bench.open(bytes(3_000_000), deadline_s=30.0)
    assert (caught.value.timed_out, caught.value.maybe_received) == (True, False)


def test_silence_is_measured_from_the_last_news(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = answer(b"x" * 20)
    bench = Bench(monkeypatch, raw[:-10], BlockingIOError())
    made = bench.open()
    assert made.expires_at_s == 10.0
    bench.clock.advance(4)
    assert made.step() is None
    assert made.expires_at_s == 9.0  # 4 s and the idle timeout
    bench.clock.advance(4.5)
    assert made.step() is None
    bench.clock.advance(1)
    with pytest.raises(SendFailed, match="stopped coming") as caught:
        made.step()
    assert caught.value.timed_out


@pytest.mark.parametrize(
    ("arrivals", "stale"),
    [
        ([ConnectionResetError()], True),
        ([b""], True),
        ([b"HTTP", b""], False),
        ([TimeoutError()] * 100, False),
    ],
)
def test_only_a_used_connection_without_a_word_is_stale(
    arrivals: list[Any], stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for requests in (0, 1):
        bench = Bench(monkeypatch, *arrivals, requests=requests)
        made = bench.open()
        with pytest.raises(SendFailed) as caught:
            made.step()
        assert caught.value.stale is (stale and requests > 0)
        assert caught.value.maybe_received
        assert bench.connection.closed
