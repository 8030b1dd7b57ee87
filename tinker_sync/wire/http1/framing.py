"""The parts of HTTP/1.1 that client and server share: errors, limits, patterns, and the chunked coding."""

from __future__ import annotations

import re
from typing import Final

# Signed redirect addresses and security policies make heads of 20 KB; this limit is far above that.
MAX_HEAD_BYTES: Final = 256 * 1024
_MAX_CHUNK_LINE_BYTES: Final = 4096
_JOINED_BYTES: Final = 1024

TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
TARGET: Final = re.compile(r"[\x21-\x7e]+")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")


class MalformedMessage(Exception):
    """The error for bytes that are not a valid or complete HTTP message.

    Attributes:
        status: the status with which a server answers such a request.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class MessageTooLarge(Exception):
    """The error for a message that exceeds a limit, or that announces a length beyond the limit.

    Attributes:
        status: the status with which a server answers such a request.
    """

    def __init__(self, message: str, status: int = 413) -> None:
        super().__init__(message)
        self.status = status


class ChunkedBody:
    """A parser for a body in the chunked coding of HTTP, trailer included. For one thread at a time.

    Args:
        max_bytes: the limit for the body.

    >>> body = ChunkedBody(100)
    >>> body.feed(b"3\\r\\nabc\\r\\n2\\r\\nde\\r\\n0\\r\\n\\r\\nnext", 0)
    20
    >>> body.done, b"".join(body.pieces)
    (True, b'abcde')
    """

    def __init__(self, max_bytes: int) -> None:
        self.done = False
        self.pieces: list[bytes] = []
        self.size = 0
        """The bytes so far."""
        self.remaining = 0
        """The missing bytes of the present chunk."""
        self._max_bytes = max_bytes
        self._step = ChunkedBody._take_size  # a bound method would be a reference cycle
        self._text = bytearray()  # an unfinished line
        self._trailer_bytes = 0

    def feed(self, data: bytes, at: int) -> int:
        """Parse `data` from index `at` on. Return the index of the first byte that was not used.

        This is the first byte after the body, or the length of `data` while the body is incomplete.

        Raises:
            MalformedMessage: the bytes are no chunks.
            MessageTooLarge: the body is larger than allowed, or announces a larger size.
        """
        while at < len(data) and not self.done:
            at = self._step(self, data, at)
        return at

    def _take_size(self, data: bytes, at: int) -> int:
        line, at = self._line(data, at)
        if line is None:
            return at
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise MalformedMessage("a chunk begins with something else than its size")
        self.remaining = int(match[1], 16)
        if self.size + self.remaining > self._max_bytes:
            raise MessageTooLarge(f"the body is over the limit of {self._max_bytes} bytes")
        self._step = ChunkedBody._take_data if self.remaining else ChunkedBody._take_trailer
        return at

    def _take_data(self, data: bytes, at: int) -> int:
        end = min(at + self.remaining, len(data))
        piece = data if end - at == len(data) else data[at:end]
        # Each piece takes some fifty bytes more than its content, so small ones are joined.
        if self.pieces and len(self.pieces[-1]) + len(piece) <= _JOINED_BYTES:
            self.pieces[-1] += piece
        else:
            self.pieces.append(piece)
        self.size += end - at
        self.remaining -= end - at
        if not self.remaining:
            self._step = ChunkedBody._take_end
        return end

    def _take_end(self, data: bytes, at: int) -> int:
        line, at = self._line(data, at)
        if line:
            raise MalformedMessage("a chunk is longer than its size")
        if line is not None:
            self._step = ChunkedBody._take_size
        return at

    def _take_trailer(self, data: bytes, at: int) -> int:
        begin = at
        line, at = self._line(data, at)
        self._trailer_bytes += at - begin
        if self._trailer_bytes > MAX_HEAD_BYTES:
            raise MessageTooLarge(f"the trailer is over {MAX_HEAD_BYTES} bytes")
        self.done = line == b""
        return at

    def _line(self, data: bytes, at: int) -> tuple[bytes | None, int]:
        """Return the next line without its line end, or None if it is incomplete, and the index behind it."""
        found = data.find(b"\n", at)
        end = found if found >= 0 else len(data)
        self._text += data[at:end]
        if len(self._text) > _MAX_CHUNK_LINE_BYTES:
            raise MalformedMessage("a line between chunks does not end")
        if found < 0:
            return None, end
        line, self._text = bytes(self._text), bytearray()
        return line.rstrip(b"\r"), end + 1
