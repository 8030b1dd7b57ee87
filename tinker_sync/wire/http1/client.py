"""HTTP/1.1 for a client: a writer for the head of a request, and a parser for a response. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Final, cast

from tinker_sync._base.secret import HeaderMap, header_pair
from tinker_sync.errors import InvalidInputError
from tinker_sync.wire.http1.framing import (
    MAX_HEAD_BYTES,
    TARGET,
    TOKEN,
    ChunkedBody,
    MalformedMessage,
    MessageTooLarge,
)

# Interim answers (1xx) are rare; a server that sends a hundred is not going to answer.
_MAX_INTERIM: Final = 100
RECEIVE_BYTES: Final = 64 * 1024
_USUAL_LINE: Final = 48
_MAX_RECEIVE_BYTES: Final = 1024 * 1024
# A body of this size is received into one block of memory, without a copy. A server may announce more than it
# sends, so the block begins with this many bytes at most, and doubles.
_LARGE_BYTES: Final = 256 * 1024
_FIRST_BLOCK_BYTES: Final = 16 * 1024 * 1024
# Errors quote and keep the beginning of a body. The search for secrets in 20 MB takes seconds.
_MAX_ERROR_BYTES: Final = 256 * 1024
_FIRST_ERROR: Final = 400

_HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
_FOLD: Final = re.compile(r"\r?\n[ \t]+")
_NO_FIELDS: Final = HeaderMap()
_STATUS_LINE: Final = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\x00]*)?")
# Line ends would let a value add headers of its own; NUL ends the value in some servers.
_BAD_VALUE: Final = re.compile(r"[\r\n\x00]")
_NOT_LATIN1: Final = re.compile(r"[^\x00-\xff]")
_DIGITS: Final = re.compile(r"[0-9]{1,18}")
_TLS_HANDSHAKE, _TLS_ALERT, _TLS_MAJOR_VERSION = 0x16, 0x15, 3


class SpeaksTls(MalformedMessage):
    """The error for an answer that is TLS instead of HTTP."""


def request_head(method: str, target: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the encoded request line and headers, up to and including the empty line.

    Raises:
        InvalidInputError: the method, the target, a name or a value is not valid in HTTP. The message does
            not show the value.

    >>> request_head("GET", "/x?a=1", [("Host", "h")])
    b'GET /x?a=1 HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n'
    """
    if not TOKEN.fullmatch(method) or not TARGET.fullmatch(target):
        raise InvalidInputError(f"{method!r} {target!r} is no request line")
    lines = list(headers)
    # Check all values at once, and one by one only if that finds a problem.
    if not (all(_is_name(name) for name, _ in lines) and _is_plain("".join([value for _, value in lines]))):
        for name, value in lines:
            _check_line(name, value)
    return "".join(
        [f"{method} {target} HTTP/1.1\r\n", *[f"{name}: {value}\r\n" for name, value in lines], "\r\n"]
    ).encode("latin-1")


@lru_cache(maxsize=256)
def _is_name(name: str) -> bool:
    return TOKEN.fullmatch(name) is not None


def _is_plain(text: str) -> bool:
    return text.isascii() and not ("\r" in text or "\n" in text or "\0" in text)


def _check_line(name: str, value: str) -> None:
    if not _is_name(name):
        raise InvalidInputError(f"{name!r} is no header name")
    if _BAD_VALUE.search(value):
        raise InvalidInputError(f"header {name}: the value holds a line end or NUL")
    if _NOT_LATIN1.search(value):
        raise InvalidInputError(f"header {name}: the value holds characters outside latin-1")


class _State(Enum):
    """The state of a `ReplyParser`: the part of the answer that it reads next.

    The body has a stated LENGTH, or is in CHUNKS, or lasts UNTIL_CLOSE of the connection.

    HEAD -> LENGTH | CHUNKS | UNTIL_CLOSE | DONE, and HEAD again after an interim answer;
    LENGTH -> DONE; CHUNKS -> DONE; UNTIL_CLOSE -> DONE by `eof` alone. DONE is final.
    """

    HEAD = auto()
    LENGTH = auto()
    CHUNKS = auto()
    UNTIL_CLOSE = auto()
    DONE = auto()


# Until Python 3.12, to read a member from its class takes longer than to call a function.
_HEAD, _LENGTH, _CHUNKS, _UNTIL_CLOSE, _DONE = _State


class ReplyParser:
    """A parser for one answer, which may arrive in pieces of any size. For one thread at a time.

    The body of an error status (400 and above) is cut at 256 KiB.

    Args:
        method: the method of the request; an answer to HEAD has no body.
        max_body_bytes: the limit for a body.

    >>> parser = ReplyParser("GET", max_body_bytes=100)
    >>> parser.feed(b"HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\nhel")
    >>> parser.done
    False
    >>> parser.feed(b"lo")
    >>> parser.done, parser.status, parser.body()
    (True, 200, b'hello')
    """

    def __init__(self, method: str, *, max_body_bytes: int) -> None:
        self.status = 0
        self.fields = _NO_FIELDS
        """The headers, several lines of one name joined."""
        self.keep_alive = False
        """True if the connection may carry another request after this answer."""
        self.lasts_until_close = False
        """True if the answer states no length.

        Such an answer ends with the connection, and the loss of its last part is not noticed.
        """
        self.started = False
        """True once a byte of the answer has arrived."""
        self.max_body_bytes = max_body_bytes
        """The limit for the body, lower for an error status."""
        self._method = method
        self.done = False
        """True once the answer is whole."""
        self._state = _HEAD
        self._lines: list[str] = []
        self._text = bytearray()  # an unfinished head
        self._chunks: ChunkedBody | None = None
        self._interim = 0
        self._remaining = 0  # of a body of known length
        self._size = 0
        self._pieces: list[bytes] = []
        self._block: bytearray | None = None  # a large body
        self._step: Any = ReplyParser._take_head

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The name and the value of each header line, in the order of the lines."""
        return [_read_line(line)[1] for line in self._lines]

    @property
    def wants(self) -> int:
        """The most bytes to request from the socket for the next `feed`."""
        if self._state is _HEAD:
            return RECEIVE_BYTES
        remaining = self._remaining if self._chunks is None else self._chunks.remaining
        return min(max(remaining, RECEIVE_BYTES), _MAX_RECEIVE_BYTES)

    def room(self) -> memoryview | None:
        """Return the memory to receive a large body of known length into; None if `feed` takes the bytes.

        The caller receives bytes into this memory, releases the view, and calls `fill`.
        """
        block = self._block
        if block is None:
            if self._state is not _LENGTH or self._remaining < _LARGE_BYTES:
                return None
            self._block = block = bytearray(min(_FIRST_BLOCK_BYTES, self._size + self._remaining))
            block[: self._size] = b"".join(self._pieces)
        elif self._size == len(block):
            block += bytes(min(self._size, self._remaining))
        with memoryview(block) as whole:
            return whole[self._size :]

    def fill(self, count: int) -> None:
        """Note that `count` bytes were received into the memory of `room`.

        0 means that the server has closed the connection, and raises `MalformedMessage`.
        """
        if not count:
            self.eof()
        self._size += count
        self._remaining -= count
        if not self._remaining:
            self._enter(_DONE)

    def body(self) -> bytes:
        """Return the received body without the framing of chunks. Its content encoding is still in place.

        A body for which `room` gave memory is a `bytearray`, so that the arrays decoded from it can use this
        memory.
        """
        if self._block is not None:
            return cast("bytes", self._block)  # it has the methods of bytes
        pieces = self._pieces if self._chunks is None else self._chunks.pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the connection.

        Bytes after the end of the answer set `keep_alive` to False.

        Raises:
            MalformedMessage: no answer can begin with the bytes so far.
            MessageTooLarge: the head or the body is larger than allowed, or the head states a larger length.
        """
        self.started = True
        at, size = 0, len(data)
        while at < size:
            if self.done:
                self.keep_alive = False
                return
            at = self._step(self, data, at)

    def eof(self) -> None:
        """Note that the server has closed the connection.

        An answer that states no length is complete then.

        Raises:
            MalformedMessage: the answer is unfinished, or nothing has arrived.
        """
        if self._state is _UNTIL_CLOSE:
            self._enter(_DONE)
        elif not self.done:
            raise MalformedMessage(f"the connection was closed {self._place()}")

    def _place(self) -> str:
        if not self.started:
            return "without an answer"
        if self._state is _HEAD:
            return "within the head of the answer"
        if self._state is _LENGTH:
            return f"after {self._size} of {self._size + self._remaining} bytes"
        size = self._size if self._chunks is None else self._chunks.size
        return f"after {size} bytes of a chunked answer, before its end"

    def _take_head(self, data: bytes, at: int) -> int:
        if not self._text and data.startswith(b"HTTP/", at):
            # Nearly every head arrives in one piece.
            end = data.find(b"\r\n\r\n", at)
            if 0 <= end - at <= MAX_HEAD_BYTES and data.find(b"\n\n", at, end) < 0:
                self._begin(data[at:end].decode("latin-1"))
                return end + 4
        text = self._text
        searched = max(0, len(text) - 3)  # the empty line may have begun in the piece before
        text += data[at:]
        if _begins_as_tls(text):
            raise SpeaksTls(f"the answer is not HTTP, it begins with {bytes(text[:12])!r}")
        if not text.startswith(b"HTTP/"[: len(text)]):
            raise MalformedMessage(f"the answer is not HTTP, it begins with {bytes(text[:12])!r}")
        found = _HEAD_END.search(text, searched)
        if (found.start() if found else len(text)) > MAX_HEAD_BYTES:
            raise MessageTooLarge(f"the head of the answer is over {MAX_HEAD_BYTES} bytes")
        if found is None:
            return len(data)
        self._text = bytearray()
        self._begin(text[: found.start()].decode("latin-1"))
        return len(data) - (len(text) - found.end())

    def begin(self, status: str, lines: list[str]) -> None:
        """Take a head that came apart from the body, as in HTTP/2. `feed` takes the body, and `eof` ends it.

        Raises:
            MalformedMessage: the status or a line is none.

        >>> parser = ReplyParser("GET", max_body_bytes=100)
        >>> parser.begin("200", ["content-type: text/plain"]), parser.feed(b"hello"), parser.eof()
        (None, None, None)
        >>> parser.done, parser.status, parser.body()
        (True, 200, b'hello')
        """
        self.started = True
        if any("\n" in line or "\r" in line or "\0" in line for line in lines):
            raise MalformedMessage("a header of the answer holds a line end or NUL")
        if self._take_lines(_read_status(f"HTTP/1.1 {status}")[1], lines):
            self._enter(_UNTIL_CLOSE)

    def _begin(self, head: str) -> None:
        """Parse a whole head, and determine the end of the body (RFC 9112, section 6.3)."""
        if "\n " in head or "\n\t" in head:  # the obsolete form of long values
            head = _FOLD.sub(" ", head)
        first, *lines = head.split("\n")
        old, status = _read_status(first)
        if self._take_lines(status, lines):
            fields = self.fields.lines
            connection = _tokens(fields["connection"][1]) if "connection" in fields else ()
            self.keep_alive = "keep-alive" in connection if old else "close" not in connection
            self._enter(self._framing(fields))

    def _take_lines(self, status: int, lines: list[str]) -> bool:
        """Take the status and the lines of a head. Return False for an interim answer."""
        self.status = status
        if status >= _FIRST_ERROR:
            self.max_body_bytes = min(self.max_body_bytes, _MAX_ERROR_BYTES)
        if 100 <= status < 200:
            self._skip_interim()
            return False
        self._lines = lines
        fields: dict[str, tuple[str, str]] = {}
        for line in lines:
            key, pair = (_read_known_line if len(line) <= _USUAL_LINE else _read_line)(line)
            fields[key] = pair if key not in fields else header_pair(pair[0], f"{fields[key][1]}, {pair[1]}")
        self.fields = HeaderMap.of_lines(fields)
        return True

    def _enter(self, state: _State) -> None:
        self._state = state
        if state is _DONE:
            self.done = True
        else:
            self._step = ReplyParser._take_counted if state is _LENGTH else _STEPS[state]

    def _skip_interim(self) -> None:
        self._interim += 1
        if self.status == 101 or self._interim > _MAX_INTERIM:
            raise MalformedMessage(f"interim answers ({self.status}) in place of an answer")

    def _framing(self, fields: Mapping[str, tuple[str, str]]) -> _State:
        if self._method == "HEAD" or self.status in (204, 304):
            return _DONE
        _, length = fields.get("content-length", ("", ""))
        coding = fields.get("transfer-encoding")
        lengths = {length} if length.isdigit() else set(_tokens(length))
        if coding is not None:
            codings = [name for name in _tokens(coding[1]) if name != "identity"]
            if codings:
                if codings != ["chunked"]:
                    problem = f"transfer coding {', '.join(codings)[:40]!r} was not asked for"
                    raise MalformedMessage(problem)
                if lengths:
                    self.keep_alive = False  # two lengths: a proxy in between may have used the other one
                self._chunks = ChunkedBody(self.max_body_bytes)
                return _CHUNKS
        if not lengths:
            self.keep_alive = False
            self.lasts_until_close = True
            return _UNTIL_CLOSE
        if len(lengths) > 1 or not _DIGITS.fullmatch(only := lengths.pop()):
            raise MalformedMessage("the answer has no sensible Content-Length")
        self._remaining = int(only)
        if self._remaining > self.max_body_bytes:
            self._cut_or_refuse()
            self._remaining = self.max_body_bytes
        return _LENGTH if self._remaining else _DONE

    def _cut_or_refuse(self) -> None:
        """Give up the connection after an error status, whose body is cut; refuse any other answer."""
        if self.status < _FIRST_ERROR:
            limit = f"the limit of {self.max_body_bytes} bytes (max_body_bytes)"
            raise MessageTooLarge(f"the answer is over {limit}")
        self.keep_alive = False

    def _take_counted(self, data: bytes, at: int) -> int:
        piece = data[at : at + self._remaining]  # no copy if it is the whole
        self._pieces.append(piece)
        size = len(piece)
        self._size += size
        self._remaining -= size
        if not self._remaining:
            self._state, self.done = _DONE, True
        return at + size

    def _take_all(self, data: bytes, at: int) -> int:
        piece = data[at : at + self.max_body_bytes - self._size]
        self._size += len(piece)
        self._pieces.append(piece)
        if at + len(piece) < len(data):
            self._cut_or_refuse()
            self._enter(_DONE)
        return len(data)

    def _take_chunks(self, data: bytes, at: int) -> int:
        chunks = self._chunks
        assert chunks is not None  # noqa: S101  # made with the state
        try:
            end = chunks.feed(data, at)
        except MessageTooLarge:
            self._cut_or_refuse()
            end = len(data)
            self._enter(_DONE)
        if chunks.done:
            self._enter(_DONE)
        return end


_STEPS: Final = {
    _HEAD: ReplyParser._take_head,
    _LENGTH: ReplyParser._take_counted,
    _CHUNKS: ReplyParser._take_chunks,
    _UNTIL_CLOSE: ReplyParser._take_all,
}


def _begins_as_tls(answer: bytes | bytearray) -> bool:
    """Return True if these first bytes are those of TLS.

    >>> _begins_as_tls(bytes([0x15, 3, 1, 0, 2])), _begins_as_tls(b"HTTP/1.1 200")
    (True, False)
    """
    return len(answer) > 1 and answer[0] in (_TLS_HANDSHAKE, _TLS_ALERT) and answer[1] == _TLS_MAJOR_VERSION


@lru_cache(maxsize=64)
def _read_status(line: str) -> tuple[bool, int]:
    """Parse a status line. Return True for HTTP/1.0 or False for HTTP/1.1, and the status."""
    match = _STATUS_LINE.fullmatch(line.rstrip("\r"))
    if match is None:
        raise MalformedMessage(f"no status line: {line[:12]!r}")
    return match[1] == "0", int(match[2])


def _read_line(line: str) -> tuple[str, tuple[str, str]]:
    """Return the lower-case name of a header, and the pair of its name and value.

    The repr of a secret value is masked.
    """
    name, colon, value = line.partition(":")
    if not colon or not TOKEN.fullmatch(name):
        raise MalformedMessage("a line of the head is no header")
    return name.lower(), header_pair(name, value.strip(" \t\r"))


# A server repeats most header lines in every answer, so short lines are cached. Lines with secrets are long.
_read_known_line: Final = lru_cache(maxsize=256)(_read_line)


def _tokens(value: str | None) -> list[str]:
    if not value:
        return []
    return [token.strip().lower() for token in value.split(",") if token.strip()]
