"""Compressed answers are decompressed within limits of size and memory."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync.transport.content import accepted_encodings, decode
from tinker_sync.wire import zstd
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

needs_zstd = pytest.mark.skipif(not zstd.is_available(), reason="neither Python nor a package has zstd")
MEGABYTE = 1024 * 1024


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "GZIP ": gzip.compress,
    "gzip, identity": gzip.compress,
    "deflate,gzip": lambda data: gzip.compress(zlib.compress(data)),
}


@given(st.binary(max_size=3000), st.sampled_from(list(PACKERS)))
def test_what_was_packed_is_unpacked(data: bytes, encoding: str) -> None:
    assert decode(PACKERS[encoding](data), encoding, limit=3000) == data


@given(st.binary(max_size=3000))
def test_deflate_without_its_wrapping(data: bytes) -> None:
    assert decode(raw_deflate(data), "deflate", limit=3000) == data


@needs_zstd
@given(st.binary(max_size=3000))
def test_zstd(data: bytes) -> None:
    packed = zstd.compress([data], len(data))
    assert decode(packed, "zstd", limit=3000) == data
    assert decode(packed + packed, "zstd", limit=6000) == data + data
    assert "zstd" in accepted_encodings()


def test_without_an_encoding_nothing_happens() -> None:
    body = b"x" * 100
    assert decode(body, None, limit=1) is body
    assert decode(b"", "gzip", limit=1) == b""


@pytest.mark.parametrize("encoding", ["br", "zstandard", "gzip, br", "gzip," * 3 + "gzip"])
def test_an_unrequested_coding_is_refused(encoding: str) -> None:
    with pytest.raises(MalformedMessage):
        decode(gzip.compress(b"x"), encoding, limit=100)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", pytest.param("zstd", marks=needs_zstd)])
def test_damage_and_truncation_are_seen(encoding: str) -> None:
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding)
    packed = pack(b"hello" * 50) if pack else zstd.compress([b"hello"] * 50, 250)
    for cut in range(1, len(packed)):
        with pytest.raises(MalformedMessage):
            decode(packed[:cut], encoding, limit=1000)
    with pytest.raises(MalformedMessage):
        decode(b"not compressed at all", encoding, limit=1000)


def bomb(encoding: str, size: int) -> bytes:
    if encoding == "gzip":
        return gzip.compress(bytes(size))
    if encoding == "deflate":
        return zlib.compress(bytes(size))
    return zstd.compress([bytes(size)], size)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", pytest.param("zstd", marks=needs_zstd)])
def test_a_bomb_costs_no_more_than_the_limit(encoding: str) -> None:
    packed = bomb(encoding, 60 * MEGABYTE)
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLarge):
            decode(packed, encoding, limit=MEGABYTE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # zstd has no limit of output, so some steps of 128 KiB are added.
    assert peak < 40 * MEGABYTE
    assert len(decode(bomb(encoding, MEGABYTE), encoding, limit=MEGABYTE)) == MEGABYTE


def test_a_million_empty_members_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="members"):
        decode(gzip.compress(b"") * 1000, "gzip", limit=1000)


def test_no_more_than_three_codings_are_undone() -> None:
    body = gzip.compress(gzip.compress(gzip.compress(b"x")))
    assert decode(body, "gzip, gzip, gzip", limit=100) == b"x"
    with pytest.raises(MalformedMessage, match="4 content encodings"):
        decode(gzip.compress(body), "gzip, gzip, gzip, gzip", limit=100)


@needs_zstd
def test_zstd_frames_of_others() -> None:
    """Frames without their size, and with a checksum, are decompressed; a huge window is refused."""
    plain = bytes.fromhex("28b52ffd04584100006162636465666768b734465b")
    assert decode(plain, "zstd", limit=100) == b"abcdefgh"
    with pytest.raises(MalformedMessage):
        decode(bytes.fromhex("28b52ffd0088410000") + b"abcdefgh", "zstd", limit=100)


@pytest.mark.usefixtures("without_zstd")
def test_zstd_is_only_asked_for_where_it_can_be_undone() -> None:
    assert accepted_encodings() == "gzip, deflate"
    with pytest.raises(MalformedMessage):
        decode(b"x", "zstd", limit=10)
