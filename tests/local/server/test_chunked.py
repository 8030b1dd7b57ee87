"""Chunked bodies in every possible pieces."""

from __future__ import annotations

import pytest

from tinker_sync.local.server.chunked import BadChunk, ChunkedBody

WHOLE = b"4\r\nWiki\r\n6;name=value\r\npedia \r\nA\r\nin chunks.\r\n0\r\nExpires: never\r\n\r\nnext"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_pieces_of_any_size(size: int) -> None:
    body, buffer = ChunkedBody(limit=100), bytearray()
    found = None
    for start in range(0, len(WHOLE), size):
        buffer += WHOLE[start : start + size]
        found = body.feed(buffer) if found is None else found
    assert found == b"Wikipedia in chunks."
    assert buffer == b"next"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"xyz\r\n", 400),
        (b"\r\n", 400),
        (b"1\r\nab\r\n", 400),
        (b"65\r\n", 413),
        (b"1" * 5000, 400),
        (b"-1\r\n", 400),
    ],
)
def test_what_is_wrong(content: bytes, status: int) -> None:
    with pytest.raises(BadChunk) as caught:
        ChunkedBody(limit=100).feed(bytearray(content))
    assert caught.value.status == status
