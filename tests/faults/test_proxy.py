"""Each kind of damage does what its name means, and the proxy makes the same choices in every run."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from support.crowd import until
from support.fault_proxy import LYING, PASSING, FaultProxy
from support.servers import AnsweringServer, Seen

BODY = b'{"answer": "abcdefghijklmnopqrstuvwxyz"}'


class Upstream:
    """A server that keeps the bodies of its requests, and gives each the same answer."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def __call__(self, seen: Seen) -> bytes:
        self.seen.append(seen.body)
        return b"HTTP/1.1 200 OK\r\ncontent-type: x/y\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture
def upstream() -> Iterator[tuple[Upstream, int]]:
    answers = Upstream()
    with AnsweringServer(answers) as server:
        yield answers, server.port


def ask(proxy: FaultProxy, path: str = "/a") -> tuple[int, bytes] | None:
    """Send one request. Return the status and the body, or None if no complete answer comes."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=120)
    try:
        connection.request("POST", path, b"question")
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


NOT_RECEIVED = ("refused", "reset_early", "request_cut", "busy")
NO_ANSWER = (
    *("refused", "reset_early", "request_cut", "lost_answer", "hung_up", "body_cut", "length_too_long"),
    "garbled_head",
)
OTHERS = {
    "head_cut": (200, b""),  # this simple client accepts an incomplete head
    "busy": (503, b"{}"),
    "bad_gateway": (502, b"<p>no</p>"),
    "length_too_short": (200, BODY[: len(BODY) * 2 // 3]),
    "length_left_out": (200, BODY[: len(BODY) * 2 // 3]),
    "garbled_body": (200, b"\xff" * len(BODY)),
    **{f"taken_{status}": (status, b"{}") for status in (408, 425, 429, 503)},
}


@pytest.mark.parametrize("kind", [*PASSING, *LYING])
def test_each_damage_does_what_its_name_says(kind: str, upstream: tuple[Upstream, int]) -> None:
    answers, port = upstream
    with FaultProxy(port, rate=1.0, kinds=(kind,)) as proxy:
        answer = ask(proxy)
        proxy.rate = 0.0
        received = len(answers.seen)
        assert ask(proxy) == (200, BODY)
    assert proxy.struck == {kind: 1}
    assert received == (0 if kind in NOT_RECEIVED else 2 if kind == "sent_twice" else 1)
    assert answer == (None if kind in NO_ANSWER else OTHERS.get(kind, (200, BODY)))
    assert set(answers.seen) == {b"question"}


def test_the_seed_decides(upstream: tuple[Upstream, int]) -> None:
    def struck(seed: int, paths: list[str]) -> dict[str, int]:
        with FaultProxy(upstream[1], seed=seed, rate=0.5, kinds=("busy", "bad_gateway", "hung_up")) as proxy:
            for path in paths:
                ask(proxy, path)
        return dict(proxy.struck)

    paths = ["/a", "/b"] * 10
    assert struck(1, paths) == struck(1, sorted(paths))  # the order of paths does not matter
    assert struck(1, paths) != struck(2, paths)


@pytest.mark.parametrize("kind", ["busy", "taken_503", "refused"])
def test_an_outage_strikes_every_request(kind: str, upstream: tuple[Upstream, int]) -> None:
    answers, port = upstream
    with FaultProxy(port, rate=0.0) as proxy:
        proxy.outage = kind
        seen = [ask(proxy, path) for path in ("/a", "/b", "/a")]
        proxy.outage = None
        assert ask(proxy) == (200, BODY)
    assert seen == [{"busy": (503, b"{}"), "taken_503": (503, b"{}"), "refused": None}[kind]] * 3
    assert len(answers.seen) == (4 if kind == "taken_503" else 1)


def test_a_restart_resets_connections_and_ends(upstream: tuple[Upstream, int]) -> None:
    with (
        FaultProxy(upstream[1], rate=0.0) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as old,
    ):
        old.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        assert old.recv(1000)
        proxy.restart(0.01)
        old.settimeout(120)
        with pytest.raises(ConnectionResetError):
            old.recv(1)
        until(lambda: ask(proxy) == (200, BODY))
    assert proxy.struck == {"restarted": 1}
