"""What a server needs of HTTP/1.1: a parser for requests, and the first line of an answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

from tinker_sync.wire.http1.framing import TARGET, TOKEN, ChunkedBody, MalformedMessage, MessageTooLarge

_MOST_HEADERS: Final = 200
_FIRST: Final = re.compile(rf"({TOKEN.pattern}) ({TARGET.pattern}) HTTP/([0-9]\.[0-9])\r?\n")
# Nothing in it can match in two ways, so that the time for a head grows with its length alone.
_HEADER: Final = re.compile(rf"^({TOKEN.pattern}):([^\r\n\0]*)\r?\n", re.MULTILINE)
_END: Final = re.compile(rb"\n\r?\n")
_DIGITS: Final = re.compile(r"[0-9]+")
_MOST_DIGITS: Final = 18
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}
_NOT_HTTP: Final = "this server speaks HTTP/1.1; begin its address with http://"


class RequestHead(NamedTuple):
    """The request line and the headers of a request, with header names in lower case.

    `path` and `query` are as they were sent. `minor` is the second number of the version: 1 for HTTP/1.1.
    Commas separate the values of headers that have the same name.
    """

    method: str
    path: str
    query: str
    minor: int
    headers: Mapping[str, str]

    @property
    def keeps_alive(self) -> bool:
        """True if another request may follow on the connection."""
        connection = self.headers.get("connection", "").lower()
        return "close" not in connection and (self.minor == 1 or "keep-alive" in connection)

    @property
    def expects_continue(self) -> bool:
        """True if the client may wait for an interim answer before it sends the body."""
        return self.headers.get("expect", "").lower() == "100-continue"


def status_line(status: int) -> str:
    """Return the first line of an answer. A status that no standard names has no phrase.

    >>> status_line(404), status_line(499)
    ('HTTP/1.1 404 Not Found\\r\\n', 'HTTP/1.1 499 \\r\\n')
    """
    return f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n"


class RequestParser:
    """A parser for the requests of one connection, one after another. For one thread at a time.

    A server that looks at the head before it reads the body calls `take_head` and then `take_body`.

    Args:
        max_head_bytes: the limit for a head.
        max_body_bytes: the limit for a body.
        keeps_body: called with each head; for False the body is read and dropped, and `take` returns an
            empty one, so that the request takes no memory.

    >>> parser = RequestParser(max_head_bytes=1000, max_body_bytes=100)
    >>> parser.feed(b"POST /a HTTP/1.1\\r\\nContent-Length: 3\\r\\n\\r\\nabcGET /")
    >>> head, body = parser.take()
    >>> head.method, head.path, body, parser.take(), parser.buffered
    ('POST', '/a', b'abc', None, 5)
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
        self._searched = 0  # up to here the buffer has no end of a head
        self._head: RequestHead | None = None
        self._dropping = False
        self._chunks: ChunkedBody | None = None
        self.length = 0
        """The bytes that the head announces for the body, without those that were dropped."""
        self.wants_continue = False
        """True if the client waits for an interim answer before it sends the body."""

    @property
    def buffered(self) -> int:
        """The number of received bytes that are not used yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the connection to those that will be parsed."""
        self._buffer += data

    def take(self) -> tuple[RequestHead, bytes] | None:
        """Return the next request, or None if it is incomplete.

        Raises:
            MalformedMessage: the bytes are not a request, or the length of its body is ambiguous.
            MessageTooLarge: the request is larger than allowed, or states a larger length.
        """
        head = self.take_head()
        body = None if head is None else self.take_body()
        return None if head is None or body is None else (head, body)

    def take_head(self) -> RequestHead | None:
        """Return the head of the next request, or None if it is incomplete. Its body must be taken next.

        Raises:
            MalformedMessage: the bytes are not a request, or the length of its body is ambiguous.
            MessageTooLarge: the head is larger than allowed, or states a larger length of the body.
        """
        if self._head is None:
            self._read_head()
        return self._head

    def _read_head(self) -> None:
        buffer = self._buffer
        if buffer.startswith((b"\r", b"\n")):
            self._buffer = buffer = buffer.lstrip(b"\r\n")
            self._searched = 0
        if buffer and not buffer[:1].isalpha():  # such as the beginning of TLS
            raise MalformedMessage(_NOT_HTTP)
        found = _END.search(buffer, self._searched)
        size = len(buffer) if found is None else found.start()
        if size > self._max_head_bytes:
            raise MessageTooLarge("the head of the request is too large", 431)
        if found is None:
            self._searched = max(size - 2, 0)
            return
        head = parse_request_head(bytes(buffer[:size]))
        del buffer[: found.end()]
        self._searched = 0
        length = head.headers.get("content-length", "0")
        self.length = self._max_body_bytes + 1 if len(length) > _MOST_DIGITS else int(length)
        if self.length > self._max_body_bytes:
            raise MessageTooLarge(f"the body is over the limit of {self._max_body_bytes} bytes")
        if "transfer-encoding" in head.headers:
            self._chunks = ChunkedBody(self._max_body_bytes)
        self.wants_continue = head.expects_continue and not buffer
        self._head = head
        self._dropping = self._keeps_body is not None and not self._keeps_body(head)

    def take_body(self) -> bytes | None:
        """Return the body of the request whose head was taken, or None if it is incomplete.

        It is empty if the body was taken before.

        Raises:
            MalformedMessage: the bytes are no chunks.
            MessageTooLarge: the body is larger than allowed.
        """
        if self._head is None:
            return b""
        body = self._read_body()
        if body is not None:
            self._head, self._chunks, self.length, self.wants_continue = None, None, 0, False
        return body

    def _read_body(self) -> bytes | None:
        if self._chunks is not None:
            used = self._chunks.feed(bytes(self._buffer), 0)
            del self._buffer[:used]
            if self._dropping:
                self._chunks.pieces.clear()
            return b"".join(self._chunks.pieces) if self._chunks.done else None
        if self._dropping:
            dropped = min(len(self._buffer), self.length)
            del self._buffer[:dropped]
            self.length -= dropped
        if len(self._buffer) < self.length:
            return None
        body = bytes(memoryview(self._buffer)[: self.length]) if self.length else b""
        del self._buffer[: self.length]
        return body


def parse_request_head(raw: bytes) -> RequestHead:
    """Parse the request line and the headers of a request, without the line end after the last one.

    Raises:
        MalformedMessage: the lines are not a head of HTTP/1.x, or the length of the body is ambiguous.
        MessageTooLarge: there are too many headers.

    >>> parse_request_head(b"POST /a?b=1 HTTP/1.1\\r\\nContent-Length: 3")
    RequestHead(method='POST', path='/a', query='b=1', minor=1, headers={'content-length': '3'})
    """
    text = raw.decode("latin-1") + "\n"
    first = _FIRST.match(text)
    if first is None:
        raise MalformedMessage(f"the first line is no request: {_NOT_HTTP}")
    method, target, version = first.groups()
    if version not in ("1.1", "1.0"):
        raise MalformedMessage(_NOT_HTTP, 505)
    found = _HEADER.findall(text, first.end())
    # A proxy may read such a line in another way, and see other requests on the connection than this server.
    if len(found) != text.count("\n") - 1:
        raise MalformedMessage("a header is malformed")
    if len(found) > _MOST_HEADERS:
        raise MessageTooLarge("there are too many headers", 431)
    pairs = [(name.lower(), value.strip(" \t")) for name, value in found]
    headers = dict(pairs)
    if len(headers) < len(pairs):
        headers = {name: ", ".join(value for each, value in pairs if each == name) for name in headers}
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None and (length is not None or coding.lower() != "chunked"):
        raise MalformedMessage("the end of the body is unclear")
    if length is not None and not _DIGITS.fullmatch(length):
        raise MalformedMessage("content-length is malformed")
    path, _, query = target.partition("?")
    return RequestHead(method, path, query, int(version[-1]), headers)
