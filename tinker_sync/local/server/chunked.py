"""Bodies that come in chunks, put together. Pure; knows no connection."""

from __future__ import annotations

import re

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?")
_LINE_LIMIT_BYTES = 4096


class BadChunk(ValueError):
    """The bytes are no chunked body, or one that is too large."""

    status = 400


class ChunkedBody:
    """Collects chunks until the last one.

    >>> body = ChunkedBody(limit=100)
    >>> body.feed(bytearray(b"3\\r\\nabc\\r\\n2\\r\\nd")) is None
    True
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._left: int | None = None
        self._ended = False

    def feed(self, buffer: bytearray) -> bytes | None:
        """Take what is usable from the front of `buffer`; the whole body once it has come.

        Raises:
            BadChunk: it is malformed or larger than the limit.
        """
        while not self._ended:
            if self._left is None:
                line = _line(buffer)
                if line is None:
                    return None
                self._begin(line)
            elif not self._take(buffer, self._left):
                return None
        return self._trailers(buffer)

    def _begin(self, line: bytes) -> None:
        size = _SIZE.fullmatch(line)
        if size is None:
            raise BadChunk("a chunk has no size")
        self._left = int(size[1], 16)
        self._size += self._left
        if self._size > self._limit:
            problem = BadChunk(f"at most {self._limit} bytes are taken")
            problem.status = 413
            raise problem
        self._ended = self._left == 0

    def _take(self, buffer: bytearray, size: int) -> bool:
        if len(buffer) < size + 2:
            return False
        if buffer[size : size + 2] != b"\r\n":
            raise BadChunk("a chunk is longer than it says")
        self._parts.append(bytes(buffer[:size]))
        del buffer[: size + 2]
        self._left = None
        return True

    def _trailers(self, buffer: bytearray) -> bytes | None:
        while True:
            line = _line(buffer)
            if line is None:
                return None
            if not line:
                return b"".join(self._parts)


def _line(buffer: bytearray) -> bytes | None:
    end = buffer.find(b"\r\n")
    if end < 0:
        if len(buffer) > _LINE_LIMIT_BYTES:
            raise BadChunk("a line in a chunked body is too long")
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 2]
    return line
