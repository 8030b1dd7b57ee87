"""Connections of agents and others by raw sockets: who has no key, who is slow, and who takes much."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import urlsplit

import pytest
import requests
from support.agents import WAIT_S
from support.values import for_each

from tinker_sync import SamplingClient
from tinker_sync.gateway import Gateway
from tinker_sync.gateway import http as gateway_http

CHAT = "/v1/chat/completions"
KEY = "a key of sixteen or more"


class Peer:
    """One side of a connection to a gateway."""

    def __init__(self, sock: socket.socket, file: IO[bytes]) -> None:
        self.socket, self._file = sock, file

    def send(self, *lines: str, body: bytes = b"") -> None:
        """Send a head of these lines, and the beginning of a body."""
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Return the status, the headers and the body of the next answer; the status is 0 at the end."""
        line = self._file.readline()
        if not line:
            return 0, {}, None
        headers = dict(iter(lambda: self._file.readline().decode().strip().partition(": ")[::2], ("", "")))
        size = int(headers.get("content-length", "0"))
        return int(line.split()[1]), headers, json.loads(self._file.read(size)) if size else None


@contextmanager
def connect(gateway: Gateway) -> Iterator[Peer]:
    address = urlsplit(gateway.url)
    with (
        socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as sock,
        sock.makefile("rb") as file,
    ):
        yield Peer(sock, file)


@pytest.fixture
def locked(sampling: SamplingClient) -> Iterator[Gateway]:
    with sampling.endpoint(key=KEY) as serving:
        yield serving


def test_without_the_key_no_body_is_awaited(locked: Gateway) -> None:
    for expect in ("accept: */*", "expect: 100-continue"):
        with connect(locked) as peer:
            peer.send(f"POST {CHAT} HTTP/1.1", expect, "x-api-key: wrong", "content-length: 50000000")
            status, headers, body = peer.answer()
            assert (status, headers["connection"], headers["x-should-retry"]) == (401, "close", "false")
            assert body["error"]["type"] == "authentication_error"
            assert peer.answer()[0] == 0


def test_who_sends_a_long_body_without_the_key_learns_why_it_fails(locked: Gateway) -> None:
    url = f"{locked.openai_base_url()}/chat/completions"
    for _ in range(3):
        assert requests.post(url, b" " * 20_000_000, timeout=WAIT_S).status_code == 401


def test_a_body_that_is_not_needed_is_left_out(gateway: Gateway) -> None:
    with connect(gateway) as peer:
        for _ in range(2):
            peer.send("POST /v1/embeddings HTTP/1.1", "content-length: 4", body=b"GET ")
        peer.send("GET /v1/models HTTP/1.1")
        assert [peer.answer()[0] for _ in range(3)] == [404, 404, 200]


def test_requests_that_come_together_are_answered_in_order(gateway: Gateway) -> None:
    bodies = [json.dumps({"prompt": [5], "max_tokens": n, "return_token_ids": True}).encode() for n in (1, 2)]
    head = "POST /v1/completions HTTP/1.1\r\ncontent-length: {}\r\n\r\n"
    whole = b"".join(head.format(len(body)).encode() + body for body in bodies)
    with connect(gateway) as peer:
        peer.socket.sendall(whole)
        assert [len(peer.answer()[2]["choices"][0]["token_ids"]) for _ in bodies] == [1, 2]
        for place in range(len(whole)):  # in parts of one octet
            peer.socket.sendall(whole[place : place + 1])
        assert [len(peer.answer()[2]["choices"][0]["token_ids"]) for _ in bodies] == [1, 2]


def test_bodies_that_arrive_at_once_have_a_limit(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": [5], "max_tokens": 1}).encode()
    monkeypatch.setattr(gateway_http, "_MOST_BYTES_AT_ONCE", len(body) + 1)
    head = ("POST /v1/completions HTTP/1.1", f"content-length: {len(body)}")
    with connect(gateway) as first:
        first.send(*head, "expect: 100-continue")
        assert first.answer()[0] == 100  # so it has its room
        with connect(gateway) as second:
            second.send(*head)
            status, headers, _ = second.answer()
            assert (status, headers["x-should-retry"]) == (503, "true")
        first.socket.sendall(body)
        assert first.answer()[0] == 200
        with connect(gateway) as third:
            third.send(*head, body=body)
            assert third.answer()[0] == 200


@for_each(
    ("octets", "status"),
    [
        (b"", 0),
        (b"\r\n", 0),
        (b"POST /v1/comp", 408),
        (b"POST /v1/completions HTTP/1.1\r\na: b\r\n", 408),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\n{", 408),
    ],
)
def test_a_request_that_does_not_arrive_in_time_ends(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, octets: bytes, status: int
) -> None:
    monkeypatch.setattr(gateway_http, "_HEAD_S", 0.05)
    with connect(gateway) as peer:
        peer.socket.sendall(octets)
        assert peer.answer()[0] == status
        assert peer.answer()[0] == 0


def test_a_connection_that_nobody_uses_ends(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_http, "_IDLE_S", 0.05)
    with connect(gateway) as peer:
        peer.send("GET /v1/models HTTP/1.1")
        assert peer.answer()[0] == 200
        assert peer.answer()[0] == 0


def test_connections_have_a_limit(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_http, "_MOST_CONNECTIONS", 1)
    with connect(gateway) as first:
        first.send("GET /v1/models HTTP/1.1")
        assert first.answer()[0] == 200
        with connect(gateway) as waiting:
            waiting.send("GET /v1/models HTTP/1.1")
            waiting.socket.settimeout(0.2)
            with pytest.raises(TimeoutError):
                waiting.socket.recv(1)
            waiting.socket.settimeout(WAIT_S)
            first.socket.shutdown(socket.SHUT_RDWR)
            assert waiting.socket.recv(12) == b"HTTP/1.1 200"
    [said] = [record.getMessage() for record in caplog.records]
    assert "others wait" in said


@for_each(
    ("host", "status"),
    [
        ("example.org", 403),
        ("127.0.0.1.example.org:80", 403),
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("host.docker.internal:8000", 200),
        ("gateway:8000", 200),
        ("my-machine.local", 200),
    ],
)
def test_a_page_cannot_give_this_machine_its_own_name(gateway: Gateway, host: str, status: int) -> None:
    with connect(gateway) as peer:
        peer.send("GET /v1/models HTTP/1.1", f"host: {host}")
        assert peer.answer()[0] == status


def test_with_the_key_an_endpoint_has_any_name(locked: Gateway) -> None:
    with connect(locked) as peer:
        peer.send("GET /v1/models HTTP/1.1", "host: example.org", f"authorization: Bearer {KEY}")
        assert peer.answer()[0] == 200
