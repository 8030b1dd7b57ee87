"""Writing request heads and reading answers, byte by byte."""

from __future__ import annotations

import http.client
import io
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers import answer, chunked

from tinker_sync.errors import InvalidInputError
from tinker_sync.wire.http1.client import ReplyParser, request_head
from tinker_sync.wire.http1.framing import MAX_HEAD_BYTES, MalformedMessage, MessageTooLarge
from tinker_sync.wire.http1.server import RequestHead, RequestParser, parse_request_head


def parsed(*pieces: bytes, method: str = "GET", limit: int = 10_000_000, closes: bool = False) -> ReplyParser:
    parser = ReplyParser(method, max_body_bytes=limit)
    for piece in pieces:
        parser.feed(piece)
    if closes:
        parser.eof()
    return parser


def whole(*pieces: bytes, **options: Any) -> bytes:
    parser = parsed(*pieces, **options)
    assert parser.done
    return parser.body()


ANSWERS = {
    "counted": answer(b"hello world"),
    "empty": answer(b""),
    "chunked": chunked(b"hello", b" ", b"world"),
    "extended chunks": answer(b"", headers={"Transfer-Encoding": "chunked"}, length=None)
    + b'5;name="x"\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: t\r\n\r\n',
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 11\n\nhello world",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    + answer(b"hello world"),
    "no reason": b"HTTP/1.1 200\r\nContent-Length: 11\r\n\r\nhello world",
    "folded header": b"HTTP/1.1 200 OK\r\nX-Long: a\r\n b\r\n\tc\r\nContent-Length: 11\r\n\r\nhello world",
    "same length twice": b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nContent-Length: 11\r\n\r\nhello world",
}


@pytest.mark.parametrize("raw", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_may_be_cut_anywhere(raw: bytes) -> None:
    expected = whole(raw)
    assert expected in (b"hello world", b"")
    for cut in range(1, len(raw)):
        parser = ReplyParser("GET", max_body_bytes=100)
        parser.feed(raw[:cut])
        assert not parser.done
        parser.feed(raw[cut:])
        assert parser.done
        assert parser.body() == expected
    assert whole(*(raw[at : at + 1] for at in range(len(raw)))) == expected


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 40)), st.booleans())
def test_what_is_written_is_read(parts: list[bytes], cuts: list[int], in_chunks: bool) -> None:
    raw = chunked(*filter(None, parts)) if in_chunks else answer(b"".join(parts))
    parser = ReplyParser("POST", max_body_bytes=10_000)
    for cut in cuts:
        parser.feed(raw[:cut]) if raw[:cut] else None
        raw = raw[cut:]
    if raw:
        parser.feed(raw)
    assert parser.done
    assert parser.body() == b"".join(parts)


@given(st.binary(max_size=200), st.integers(0, 8), st.binary(max_size=8))
def test_any_bytes_raise_only_the_errors_of_the_parser(noise: bytes, index: int, patch: bytes) -> None:
    raw = list(ANSWERS.values())[index]
    for damaged in (noise, b"HTTP/1.1 200 OK\r\n" + noise, raw[: len(noise)] + patch + raw[len(noise) :]):
        parser = ReplyParser("GET", max_body_bytes=1000)
        try:
            parser.feed(damaged)
            parser.eof()
        except (MalformedMessage, MessageTooLarge):
            continue
        assert len(parser.body()) <= 1000


def test_agrees_with_the_standard_library() -> None:
    class FakeSocket:
        def __init__(self, raw: bytes) -> None:
            self.raw = raw

        def makefile(self, mode: str) -> io.BytesIO:
            return io.BytesIO(self.raw)

    for raw in ANSWERS.values():
        if b"103" in raw[:40]:
            continue  # http.client returns a 103 as the answer
        response = http.client.HTTPResponse(FakeSocket(raw), method="GET")  # type: ignore[arg-type]
        response.begin()
        ours = parsed(raw)
        assert (ours.status, ours.body()) == (response.status, response.read())


@pytest.mark.parametrize(
    ("head", "keep"),
    [
        ("HTTP/1.1 200 OK\r\nContent-Length: 0", True),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close", False),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: foo, Close", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive", True),
        ("HTTP/1.1 204 No Content", True),
        ("HTTP/1.1 304 Not Modified\r\nContent-Length: 99", True),
    ],
)
def test_when_a_connection_may_be_used_again(head: str, keep: bool) -> None:
    parser = parsed(f"{head}\r\n\r\n".encode())
    assert parser.done
    assert parser.keep_alive is keep


def test_without_a_length_the_body_lasts_until_the_end() -> None:
    raw = answer(b"hello", length=None)
    parser = parsed(raw)
    assert not parser.done
    parser.eof()
    assert (parser.done, parser.body(), parser.keep_alive) == (True, b"hello", False)


def test_bytes_behind_the_answer_spoil_the_connection() -> None:
    parser = parsed(answer(b"hi") + b"HTTP/1.1 200 OK\r\n")
    assert parser.done
    assert parser.body() == b"hi"
    assert not parser.keep_alive


def test_two_lengths_spoil_the_connection() -> None:
    raw = chunked(b"hi", headers={"Content-Length": "99"})
    parser = parsed(raw)
    assert parser.body() == b"hi"
    assert not parser.keep_alive


@pytest.mark.parametrize(
    "raw",
    [
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname : value\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        b"HTTP/1.1 102 Processing\r\n\r\n" * 101,
    ],
)
def test_what_is_no_answer_is_refused_at_once(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parsed(raw)


@pytest.mark.parametrize("raw", [*ANSWERS.values()], ids=ANSWERS)
def test_an_answer_cut_short_is_no_answer(raw: bytes) -> None:
    for cut in range(len(raw)):
        with pytest.raises(MalformedMessage):
            parsed(*([raw[:cut]] if cut else []), closes=True)


def test_the_error_of_a_truncated_body_has_its_length() -> None:
    with pytest.raises(MalformedMessage, match="after 3 of 10 bytes"):
        parsed(answer(b"abc", length=10), closes=True)


def test_announced_and_actual_sizes_are_limited() -> None:
    with pytest.raises(MessageTooLarge):
        parsed(answer(b"", length=11), limit=10)
    with pytest.raises(MessageTooLarge):
        parsed(chunked(b"x" * 6, b"x" * 6), limit=10)
    with pytest.raises(MessageTooLarge):
        parsed(
            answer(b"", headers={"Transfer-Encoding": "chunked"}, length=None) + b"fffffffffff\r\n", limit=10
        )
    with pytest.raises(MessageTooLarge):
        parsed(answer(b"x" * 11, length=None), limit=10)
    assert whole(answer(b"x" * 10), limit=10) == b"x" * 10


def test_heads_are_limited() -> None:
    large = b"HTTP/1.1 200 OK\r\nX: " + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\nContent-Length: 0\r\n\r\n"
    assert parsed(large).done
    with pytest.raises(MessageTooLarge):
        parsed(b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES)
    trailer = chunked(b"hi")[:-2] + b"X: " + b"x" * 4000 + b"\r\n"
    with pytest.raises(MessageTooLarge):
        parsed(trailer, *[b"X: " + b"x" * 4000 + b"\r\n"] * 70)


def test_a_head_in_single_bytes_costs_no_more_than_its_length() -> None:
    def seconds(size: int) -> float:
        raw = b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n z\r\n" * (size // 10) + b"Content-Length: 0\r\n\r\n"
        began = time.process_time()
        assert parsed(*(raw[at : at + 1] for at in range(len(raw)))).done
        return time.process_time() - began

    # Quadratic work would take 64 times as long for 8 times the bytes.
    assert seconds(160_000) < 30 * seconds(20_000) + 0.05


def test_a_body_in_tiny_chunks_takes_little_more_than_its_size() -> None:
    """A body of 9 MB took 270 MB: each chunk of two bytes was kept alone."""
    head = answer(b"", headers={"Transfer-Encoding": "chunked"}, length=None)
    parser = parsed(head, limit=1_000_000)
    chunks = b"2\r\nab\r\n" * 1000
    tracemalloc.start()
    try:
        for _ in range(10):
            parser.feed(chunks)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    parser.feed(b"0\r\n\r\n")
    assert parser.body() == b"ab" * 10_000


def test_it_asks_for_as_much_as_is_missing() -> None:
    parser = parsed(answer(b"", length=500_000))
    assert parser.wants == 500_000
    assert parsed(answer(b"", length=9_000_000)).wants == 1024 * 1024
    assert parsed(b"HTTP").wants == 65536


def test_headers_keep_their_order_and_repetitions() -> None:
    parser = parsed(
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nX:  v \r\nSet-Cookie: b=2\r\nContent-Length: 0\r\n\r\n"
    )
    assert parser.headers[:3] == [("Set-Cookie", "a=1"), ("X", "v"), ("Set-Cookie", "b=2")]


def test_a_head_is_what_http_says() -> None:
    head = request_head("POST", "/a?b=c", [("Host", "h"), ("X-Name", "ü")])
    assert head == b"POST /a?b=c HTTP/1.1\r\nHost: h\r\nX-Name: \xfc\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "target", "name", "value"),
    [
        ("GET /", "/", "a", "b"), ("GET", "/ x", "a", "b"), ("GET", "/\r\nX: y", "a", "b"),
        ("GET", "/ü", "a", "b"), ("GET", "/", "a b", "b"), ("GET", "/", "a:", "b"), ("GET", "/", "", "b"),
        ("GET", "/", "a", "hidden\r\nX: y"), ("GET", "/", "a", "hidden\nX: y"),
        ("GET", "/", "a", "hidden\0"), ("GET", "/", "a", "hidden €"),
    ],
)  # fmt: skip
def test_nothing_can_add_lines_to_a_head(method: str, target: str, name: str, value: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        request_head(method, target, [(name, value)])
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


# ---------------------------------------------- The parser reads requests that arrive in any pieces
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
    assert [(head.method, head.path, head.query, head.minor, body) for head, body in found] == [
        ("POST", "/a", "b=1", 1, b"hello"),
        ("POST", "/c", "", 1, b"Wikipedia in chunks."),
        ("GET", "/", "", 0, b""),
    ]
    assert reader.buffered == len(b"next")


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\x00\x01\r\n\r\n", 400),
        (b"HELLO\r\n\r\n", 400),
        (b"GET  /a HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"\x16\x03", 400),  # TLS, whose client would wait for an answer
        (b"GET /a HTTP/1.1\r\nX: a\r\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nX: a\r\n b\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nX: a\0b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"a:b\n" * 201 + b"\r\n", 431),
        (b"GET /a HTTP/1.1\r\nName : x\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: a\nb\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
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
def test_any_request_raises_only_the_errors_of_the_parser(noise: bytes, index: int, patch: bytes) -> None:
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
        (b"GET / HTTP/1.1\r\nConnection: close\r\nconnection: keep-alive", False),
        (b"GET / HTTP/1.0", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive", True),
    ],
)
def test_the_head_decides_whether_the_connection_stays(lines: bytes, keeps: bool) -> None:
    assert parse_request_head(lines).keeps_alive is keeps
