"""Decoders for the content encoding of a body, with a limit on their output.

Pure functions; any thread may call them. A few hundred bytes can unfold to gigabytes, so every step has a
limit on its output.
"""

from __future__ import annotations

import zlib
from typing import Final

from tinker_sync.wire import zstd
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

# Legitimate answers stack no more than two encodings.
_MAX_CODINGS: Final = 3
# Each member of a gzip body costs a copy of the bytes that follow it.
_MAX_MEMBERS: Final = 100
_GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP: Final = 31
_ZLIB: Final = 15
_RAW_DEFLATE: Final = -15


def accepted_encodings() -> str:
    """Return the value of `Accept-Encoding`: the encodings that `decode` can undo in this installation.

    >>> accepted_encodings().startswith("gzip, deflate")
    True
    """
    return "gzip, deflate, zstd" if zstd.is_available() else "gzip, deflate"


def decode(body: bytes, encoding: str | None, *, limit: int) -> bytes:
    """Return a body without the encodings that its `Content-Encoding` header names.

    Raises:
        MalformedMessage: The body does not fit its encoding, ends too early, has an encoding that the request
            did not accept, or has more than three encodings.
        MessageTooLarge: The output exceeds `limit` bytes.

    >>> import gzip
    >>> decode(gzip.compress(b"hello"), "gzip", limit=100)
    b'hello'
    """
    if not encoding:
        return body
    codings = [name.strip().lower() for name in encoding.split(",")]
    if len(codings) > _MAX_CODINGS:
        raise MalformedMessage(f"{len(codings)} content encodings on top of each other")
    for coding in reversed(codings):
        body = _undo(body, coding, limit)
    return body


def _undo(body: bytes, coding: str, limit: int) -> bytes:
    if coding in ("", "identity"):
        return body
    if not body:  # an empty answer may keep the header
        return body
    if coding in ("gzip", "x-gzip"):
        return _undo_zlib(body, _GZIP, limit)
    if coding == "deflate":
        # The name stands for zlib's wrapping, but some servers send the bare stream.
        return _undo_zlib(body, _ZLIB if _has_zlib_header(body) else _RAW_DEFLATE, limit)
    if coding == "zstd" and zstd.is_available():
        return zstd.decompress(body, limit=limit)
    raise MalformedMessage(f"content encoding {coding[:20]!r} was not asked for")


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _undo_zlib(body: bytes, window_bits: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    room = limit
    rest = body
    try:
        for _ in range(_MAX_MEMBERS):
            member = zlib.decompressobj(window_bits)
            pieces.append(member.decompress(rest, room + 1))
            room -= len(pieces[-1])
            _check(room, limit, ended=member.eof)
            rest = member.unused_data
            if not rest.startswith(_GZIP_MAGIC):  # some servers add padding; only gzip has further members
                return b"".join(pieces)
    except zlib.error as error:
        raise MalformedMessage(f"the compressed body is damaged: {error}") from error
    raise MalformedMessage(f"the compressed body has over {_MAX_MEMBERS} members")


def _check(room: int, limit: int, *, ended: bool) -> None:
    if room < 0:
        raise MessageTooLarge(f"the body unfolds to more than the limit of {limit} bytes (max_body_bytes)")
    if not ended:
        raise MalformedMessage("the compressed body ends too early")
