"""The parser reads requests that arrive in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge
from tinker_sync.wire.http1.server import RequestHead, RequestParser, parse_request_head

COUNTED = b"POST /a?b=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n"
    b"4\r\nWiki\r\n6;name=value\r\npedia \r\nA\r\nin chunks.\r\n0\r\nExpires: never\r\n\r\n"
)
EMPTY = b"GET / HTTP/1.0\r\n\r\n"


def parser() -> RequestParser:
    return RequestParser(max_head_bytes=1000, max_body_bytes=100)


def taken(parser: RequestParser, *pieces: bytes) -> list[tuple[RequestHead, bytes]]:
    """Feed the parser these pieces, and return the complete requests: pairs of head and body."""
    found = []
    for piece in pieces:
        parser.feed(piece)
        while (request := parser.take()) is not None:
            found.append(request)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_requests_may_come_in_any_pieces(size: int) -> None:
    whole, reader = COUNTED + CHUNKED + b"\r\n" + EMPTY + b"next", parser()
    found = taken(reader, *[whole[at : at + size] for at in range(0, len(whole), size)])
    assert [(head.method, head.target, head.minor, body) for head, body in found] == [
        ("POST", b"/a?b=1", 1, b"hello"),
        ("POST", b"/c", 1, b"Wikipedia in chunks."),
        ("GET", b"/", 0, b""),
    ]
    assert reader.buffered == len(b"next")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\x00\x01\r\n\r\n", 400),
        (b"HELLO\r\n\r\n", 400),
        (b"GET  /a HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 505),
        (b"GET /a HTTP/1.1\r\nName : x\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: a\nb\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 101\r\n\r\n", 413),
        (b"x" * 1001, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 1000 + b"\r\n\r\n", 431),
        *(
            (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + body, status)
            for body, status in (
                (b"xyz\r\n", 400),
                (b"\r\n", 400),
                (b"-1\r\n", 400),
                (b"1\r\nab\r\n", 400),
                (b"1" * 5000, 400),
                (b"65\r\n", 413),
            )
        ),
    ],
)
def test_a_bad_request_is_refused_with_its_status(content: bytes, status: int) -> None:
    with pytest.raises((MalformedMessage, MessageTooLarge)) as caught:
        taken(parser(), content)
    assert caught.value.status == status


@given(st.binary(max_size=200), st.integers(0, 2), st.binary(max_size=8))
def test_any_bytes_raise_only_the_errors_of_the_parser(noise: bytes, index: int, patch: bytes) -> None:
    raw = (COUNTED, CHUNKED, EMPTY)[index]
    for damaged in (noise, b"GET / HTTP/1.1\r\n" + noise, raw[: len(noise)] + patch + raw[len(noise) :]):
        try:
            bodies = [body for _, body in taken(parser(), damaged)]
        except (MalformedMessage, MessageTooLarge):
            continue
        assert all(len(body) <= 100 for body in bodies)


def test_a_client_that_waits_for_an_interim_answer_is_seen_once() -> None:
    head, body = COUNTED[:-5].replace(b"Host: h", b"Expect: 100-continue"), COUNTED[-5:]
    reader = parser()
    assert taken(reader, head[:-1]) == []
    assert not reader.wants_continue
    assert taken(reader, head[-1:]) == []
    assert reader.wants_continue
    ((_, found),) = taken(reader, body)
    assert found == body
    assert not reader.wants_continue
    eager = parser()
    assert taken(eager, head + body[:2]) == []
    assert not eager.wants_continue  # the body is on its way already


@pytest.mark.parametrize(
    ("lines", "keeps"),
    [
        (b"GET / HTTP/1.1", True),
        (b"GET / HTTP/1.1\r\nConnection: Close", False),
        (b"GET / HTTP/1.0", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive", True),
    ],
)
def test_the_head_decides_whether_the_connection_stays(lines: bytes, keeps: bool) -> None:
    assert parse_request_head(lines).keeps_alive is keeps
