"""A parser for the requests that a server receives on a connection."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from tinker_sync.wire.http1.framing import TARGET, TOKEN, ChunkedBody, MalformedMessage, MessageTooLarge

_TOKEN: Final = re.compile(TOKEN.pattern.encode())
_TARGET: Final = re.compile(TARGET.pattern.encode())
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")
_BAD_VALUE: Final = re.compile(rb"[\r\n\x00]")


class RequestHead(NamedTuple):
    """The request line and the headers of a request, with header names in lower case.

    `minor` is the second number of the version: 1 for HTTP/1.1.
    """

    method: str
    target: bytes
    minor: int
    headers: list[tuple[bytes, bytes]]

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of a header, given its name in lower case."""
        return [value for each, value in self.headers if each == name]

    @property
    def keeps_alive(self) -> bool:
        """True if another request may follow on the connection."""
        connection = b",".join(self.values(b"connection")).lower()
        return b"close" not in connection and (self.minor == 1 or b"keep-alive" in connection)


class RequestParser:
    """A parser for the requests of one connection, one after another. For one thread at a time.

    Args:
        max_head_bytes: the limit for a head.
        max_body_bytes: the limit for a body.
        keeps_body: called with each head; for False the body is read and dropped, and `take` returns an
            empty one, so that the request takes no memory.

    >>> parser = RequestParser(max_head_bytes=1000, max_body_bytes=100)
    >>> parser.feed(b"POST /a HTTP/1.1\\r\\nContent-Length: 3\\r\\n\\r\\nabcGET /")
    >>> head, body = parser.take()
    >>> head.method, head.target, body, parser.take(), parser.buffered
    ('POST', b'/a', b'abc', None, 5)
    """

    def __init__(
        self,
        *,
        max_head_bytes: int,
        max_body_bytes: int,
        keeps_body: Callable[[RequestHead], bool] | None = None,
    ) -> None:
        self._keeps_body = keeps_body
        self._max_head_bytes = max_head_bytes
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()
        self._head: RequestHead | None = None
        self._length = 0  # of the body, without the bytes that were dropped
        self._dropping = False
        self._chunks: ChunkedBody | None = None
        self.wants_continue = False
        """True if the client waits for an interim answer before it sends the body."""

    @property
    def buffered(self) -> int:
        """The number of received bytes that `take` has not used yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the connection to those that `take` will parse."""
        self._buffer += data

    def take(self) -> tuple[RequestHead, bytes] | None:
        """Return the next request, or None if it is incomplete.

        Raises:
            MalformedMessage: the bytes are not a request, or the length of its body is ambiguous.
            MessageTooLarge: the request is larger than allowed, or states a larger length.
        """
        if self._head is None and not self._take_head():
            return None
        assert self._head is not None  # noqa: S101  # just read
        body = self._take_body()
        if body is None:
            return None
        head, self._head, self._chunks, self.wants_continue = self._head, None, None, False
        return head, body

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if (end < 0 and len(self._buffer) > self._max_head_bytes) or end > self._max_head_bytes:
            raise MessageTooLarge("the head of the request is too large", 431)
        if end < 0:
            return False
        head = parse_request_head(bytes(self._buffer[:end]).lstrip(b"\r\n"))
        del self._buffer[: end + 4]
        self._length = int(next(iter(head.values(b"content-length")), b"0"))
        if self._length > self._max_body_bytes:
            raise MessageTooLarge(f"the body is over the limit of {self._max_body_bytes} bytes")
        if head.values(b"transfer-encoding"):
            self._chunks = ChunkedBody(self._max_body_bytes)
        self.wants_continue = b"100-continue" in head.values(b"expect") and not self._buffer
        self._head = head
        self._dropping = self._keeps_body is not None and not self._keeps_body(head)
        return True

    def _take_body(self) -> bytes | None:
        if self._chunks is not None:
            used = self._chunks.feed(bytes(self._buffer), 0)
            del self._buffer[:used]
            if self._dropping:
                self._chunks.pieces.clear()
            return b"".join(self._chunks.pieces) if self._chunks.done else None
        if self._dropping:
            dropped = min(len(self._buffer), self._length)
            del self._buffer[:dropped]
            self._length -= dropped
        if len(self._buffer) < self._length:
            return None
        body = bytes(memoryview(self._buffer)[: self._length]) if self._length else b""
        del self._buffer[: self._length]
        return body


def parse_request_head(raw: bytes) -> RequestHead:
    """Parse the request line and the headers of a request.

    Raises:
        MalformedMessage: the lines are not a head of HTTP/1.x, or the length of the body is ambiguous.

    >>> parse_request_head(b"POST /a?b=1 HTTP/1.1\\r\\nContent-Length: 3")
    RequestHead(method='POST', target=b'/a?b=1', minor=1, headers=[(b'content-length', b'3')])
    """
    first, *lines = raw.split(b"\r\n")
    parts = first.split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise MalformedMessage("the first line is no request")
    if parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise MalformedMessage("this server speaks HTTP/1.1", 505)
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or _BAD_VALUE.search(value):
            raise MalformedMessage("a header is malformed")
        headers.append((name.lower(), value.strip(b" \t")))
    head = RequestHead(parts[0].decode("ascii"), parts[1], int(parts[2][-1:]), headers)
    lengths, codings = set(head.values(b"content-length")), head.values(b"transfer-encoding")
    if codings and (lengths or [coding.lower() for coding in codings] != [b"chunked"]):
        raise MalformedMessage("the end of the body is unclear")
    if len(lengths) > 1 or any(not _DIGITS.fullmatch(length) for length in lengths):
        raise MalformedMessage("content-length is malformed")
    return head
