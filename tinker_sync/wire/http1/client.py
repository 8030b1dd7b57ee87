"""HTTP/1.1 for a client: a writer for the head of a request, and a parser for a response. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Final

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
_RECEIVE_BYTES: Final = 64 * 1024
_USUAL_LINE: Final = 48
_MAX_RECEIVE_BYTES: Final = 1024 * 1024

_HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
_FOLD: Final = re.compile(r"\r?\n[ \t]+")
_STATUS_LINE: Final = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\x00]*)?")
# Line ends would let a value add headers of its own; NUL ends the value in some servers.
_BAD_VALUE: Final = re.compile(r"[\r\n\x00]")
_NOT_LATIN1: Final = re.compile(r"[^\x00-\xff]")
_DIGITS: Final = re.compile(r"[0-9]{1,18}")
_TLS_HANDSHAKE, _TLS_ALERT, _TLS_MAJOR_VERSION = 0x16, 0x15, 3


class Unanswered(MalformedMessage):
    """There are no bytes at all."""


class SpeaksTls(MalformedMessage):
    """The bytes are TLS instead of HTTP."""


def request_head(method: str, target: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Write the first lines of a request, up to and including the empty line.

    Raises:
        InvalidInputError: Something in it could not go over the wire as one header; the value is not shown.

    >>> request_head("GET", "/x?a=1", [("Host", "h")])
    b'GET /x?a=1 HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n'
    """
    if not TOKEN.fullmatch(method) or not TARGET.fullmatch(target):
        raise InvalidInputError(f"{method!r} {target!r} is no request line")
    lines = list(headers)
    # All values at once; one by one only where that finds something to look at.
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
    """Where the parser stands.

    HEAD -> LENGTH | CHUNKS | UNTIL_CLOSE | DONE, and HEAD again after an interim answer;
    LENGTH -> DONE; CHUNKS -> DONE; UNTIL_CLOSE -> DONE by `eof` alone. DONE is final.
    """

    HEAD = auto()
    LENGTH = auto()
    CHUNKS = auto()
    UNTIL_CLOSE = auto()
    DONE = auto()


class ReplyParser:
    """One answer, in whatever pieces it arrives. For one thread at a time.

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
        self.headers: list[tuple[str, str]] = []
        self.fields: dict[str, str] = {}
        """The headers by lower-case name, several lines of one name joined."""
        self.keep_alive = False
        """Whether the connection may carry another request once this answer is done."""
        self.lasts_until_close = False
        """True if the answer states no length: it ends with the connection, and a cut does not show."""
        self.started = False
        """Whether a single byte of an answer has come."""
        self._method = method
        self._max_body_bytes = max_body_bytes
        self.done = False
        """True once the answer is whole."""
        self._state = _State.HEAD
        self._text = bytearray()  # an unfinished head
        self._chunks: ChunkedBody | None = None
        self._interim = 0
        self._remaining = 0  # of a body of known length
        self._size = 0
        self._pieces: list[bytes] = []
        self._step: Any = ReplyParser._take_head

    @property
    def wants(self) -> int:
        """How many bytes a receive should ask for."""
        if self._state is _State.HEAD:
            return _RECEIVE_BYTES
        remaining = self._remaining if self._chunks is None else self._chunks.remaining
        return min(max(remaining, _RECEIVE_BYTES), _MAX_RECEIVE_BYTES)

    def body(self) -> bytes:
        """The body as received, its content encoding not undone."""
        pieces = self._pieces if self._chunks is None else self._chunks.pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the connection; what comes after the answer makes it unfit for another.

        Raises:
            MalformedMessage: No answer can begin with the bytes so far.
            MessageTooLarge: The head or the body is larger than allowed, or announces to be.
        """
        self.started = True
        at = 0
        while at < len(data):
            if self.done:
                self.keep_alive = False
                return
            at = self._step(self, data, at)

    def eof(self) -> None:
        """The other side has closed. Ends an answer that lasts until then, and breaks every other."""
        if self._state is _State.UNTIL_CLOSE:
            self._enter(_State.DONE)
        elif not self.done:
            kind = MalformedMessage if self.started else Unanswered
            raise kind(f"the connection was closed {self._place()}")

    def _place(self) -> str:
        if not self.started:
            return "without an answer"
        if self._state is _State.HEAD:
            return "within the head of the answer"
        if self._state is _State.LENGTH:
            return f"after {self._size} of {self._size + self._remaining} bytes"
        size = self._size if self._chunks is None else self._chunks.size
        return f"after {size} bytes of a chunked answer, before its end"

    def _take_head(self, data: bytes, at: int) -> int:
        if not self._text and data.startswith(b"HTTP/", at):
            # Nearly every head comes whole.
            found = _HEAD_END.search(data, at)
            if found is not None and found.start() - at <= MAX_HEAD_BYTES:
                self._begin(data[at : found.start()].decode("latin-1"))
                return found.end()
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

    def _begin(self, head: str) -> None:
        """Read a whole head and decide how the body ends (RFC 9112, section 6.3)."""
        if "\n " in head or "\n\t" in head:  # the obsolete way of breaking long values
            head = _FOLD.sub(" ", head)
        first, *lines = head.split("\n")
        old, self.status = _read_status(first)
        if 100 <= self.status < 200:
            self._skip_interim()
            return
        headers, fields = self.headers, self.fields
        for line in lines:
            name, key, value = (_read_known_line if len(line) <= _USUAL_LINE else _read_line)(line)
            headers.append((name, value))
            fields[key] = f"{fields[key]}, {value}" if key in fields else value
        connection = _tokens(fields["connection"]) if "connection" in fields else ()
        self.keep_alive = "keep-alive" in connection if old else "close" not in connection
        self._enter(self._framing())

    def _enter(self, state: _State) -> None:
        self._state = state
        if state is _State.DONE:
            self.done = True
        else:
            self._step = ReplyParser._take_counted if state is _State.LENGTH else _STEPS[state]

    def _skip_interim(self) -> None:
        self._interim += 1
        if self.status == 101 or self._interim > _MAX_INTERIM:
            raise MalformedMessage(f"interim answers ({self.status}) in place of an answer")

    def _framing(self) -> _State:
        if self._method == "HEAD" or self.status in (204, 304):
            return _State.DONE
        fields = self.fields
        length = fields.get("content-length", "")
        if "transfer-encoding" not in fields and _DIGITS.fullmatch(length):
            return self._known_length({length})
        lengths = set(_tokens(fields.get("content-length")))
        if lengths and "transfer-encoding" not in fields:
            return self._known_length(lengths)
        codings = [coding for coding in _tokens(self.fields.get("transfer-encoding")) if coding != "identity"]
        if codings:
            if codings != ["chunked"]:
                raise MalformedMessage(f"transfer coding {', '.join(codings)[:40]!r} was not asked for")
            if lengths:
                self.keep_alive = False  # two lengths: a proxy in between may have used the other one
            self._chunks = ChunkedBody(self._max_body_bytes)
            return _State.CHUNKS
        if lengths:
            return self._known_length(lengths)
        self.keep_alive = False
        self.lasts_until_close = True
        return _State.UNTIL_CLOSE

    def _known_length(self, lengths: set[str]) -> _State:
        (length, *others) = lengths
        if others or not _DIGITS.fullmatch(length):
            raise MalformedMessage("the answer has no sensible Content-Length")
        self._remaining = int(length)
        self._refuse_over(self._remaining)
        return _State.LENGTH if self._remaining else _State.DONE

    def _refuse_over(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise MessageTooLarge(f"the answer is over the limit of {self._max_body_bytes} bytes")

    def _keep(self, data: bytes, at: int, end: int) -> int:
        end = min(end, len(data))
        self._size += end - at
        self._refuse_over(self._size)
        self._pieces.append(data if end - at == len(data) else data[at:end])
        return end

    def _take_counted(self, data: bytes, at: int) -> int:
        end = self._keep(data, at, at + self._remaining)
        self._remaining -= end - at
        if not self._remaining:
            self._enter(_State.DONE)
        return end

    def _take_all(self, data: bytes, at: int) -> int:
        return self._keep(data, at, len(data))

    def _take_chunks(self, data: bytes, at: int) -> int:
        chunks = self._chunks
        assert chunks is not None  # noqa: S101  # made with the state
        end = chunks.feed(data, at)
        if chunks.done:
            self._enter(_State.DONE)
        return end


_STEPS: Final = {
    _State.HEAD: ReplyParser._take_head,
    _State.LENGTH: ReplyParser._take_counted,
    _State.CHUNKS: ReplyParser._take_chunks,
    _State.UNTIL_CLOSE: ReplyParser._take_all,
}


def _begins_as_tls(answer: bytes | bytearray) -> bool:
    """Return True if these first bytes are those of TLS.

    >>> _begins_as_tls(bytes([0x15, 3, 1, 0, 2])), _begins_as_tls(b"HTTP/1.1 200")
    (True, False)
    """
    return len(answer) > 1 and answer[0] in (_TLS_HANDSHAKE, _TLS_ALERT) and answer[1] == _TLS_MAJOR_VERSION


@lru_cache(maxsize=64)
def _read_status(line: str) -> tuple[bool, int]:
    """Return whether an answer is of HTTP/1.0, and its status."""
    match = _STATUS_LINE.fullmatch(line.rstrip("\r"))
    if match is None:
        raise MalformedMessage(f"no status line: {line[:12]!r}")
    return match[1] == "0", int(match[2])


def _read_line(line: str) -> tuple[str, str, str]:
    """Return the name, the lower-case name and the value of a header."""
    name, colon, value = line.partition(":")
    if not colon or not TOKEN.fullmatch(name):
        raise MalformedMessage("a line of the head is no header")
    return name, name.lower(), value.strip(" \t\r")


# A server repeats most of its lines in every answer. Those that hold a secret are long.
_read_known_line: Final = lru_cache(maxsize=256)(_read_line)


def _tokens(value: str | None) -> list[str]:
    if not value:
        return []
    return [token.strip().lower() for token in value.split(",") if token.strip()]
