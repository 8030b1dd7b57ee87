"""Large bodies in pieces: the sent bytes, retries, and arrays that change between tries."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from support.authority import Authority
from support.hasty import quick_service
from support.servers import AnsweringServer, Peer, ScriptedServer, answer, redirect
from support.tinker_stub import Answer, Asked, StubServer, _plain_body
from support.wires import http_for, post

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import EarlierCallFailedError, InvalidInputError
from tinker_sync.transport.body import PiecedBody
from tinker_sync.wire import zstd
from tinker_sync.wire.http1.content import accepted_encodings, decode
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge
from tinker_sync.wire.proto.requests import decode_forward_backward_request

KEY = "tml-test-key-of-some-length"
TOKENS = 20_000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def random_pieces(seed: int) -> list[bytes | memoryview]:
    """Return pieces of many sizes, also empty ones. They are too many for a single system call."""
    draw = random.Random(seed)
    sizes = [draw.choice((0, 1, 7, 30, 5120, 5121)) for _ in range(1500)] + [draw.randrange(900_000)]
    draw.shuffle(sizes)
    return [
        memoryview(draw.randbytes(size)) if draw.random() < 0.5 else draw.randbytes(size) for size in sizes
    ]


@pytest.mark.parametrize("seed", range(3))
def test_pieces_arrive_in_order_and_whole(seed: int) -> None:
    pieces = random_pieces(seed)
    body = PiecedBody(pieces)
    with AnsweringServer(lambda _: answer(b"ok")) as server, http_for(server.url) as http:
        assert http.send(post(body=body)).status == 200
        assert http.send(post(body=body)).status == 200
    whole = b"".join(pieces)
    assert [seen.body for seen in server.seen] == [whole, whole]
    assert server.seen[0].header("content-length") == str(len(whole)) == str(len(body))


def test_pieces_go_through_tls(authority: Authority) -> None:
    pieces = random_pieces(9)
    with (
        AnsweringServer(lambda _: answer(b"ok"), tls=authority.server_context()) as server,
        requests.Session() as session,
    ):
        session.verify = authority.ca_file
        http = http_for(server, session=session)
        assert http.send(post(body=PiecedBody(pieces))).status == 200
        http.close()
    assert server.seen[0].body == b"".join(pieces)


def test_pieces_follow_a_redirect_to_another_server() -> None:
    with (
        AnsweringServer(lambda _: answer(b"ok")) as there,
        AnsweringServer(lambda _: redirect(there.url + "/y")) as here,
        http_for(here.url) as http,
    ):
        assert http.send(post(body=PiecedBody([b"a" * 9000, b"b"]))).status == 200
    assert there.seen[0].body == b"a" * 9000 + b"b"


def test_a_dead_connection_is_replaced_only_for_the_same_bytes() -> None:
    array = np.zeros(4000)
    body = PiecedBody([array.data.cast("B")])

    def then_hang_up(peer: Peer) -> None:
        peer.read_request()
        peer.send(answer(b"ok"))
        peer.read_request()
        array[77] = 1
        peer.close()

    with ScriptedServer(then_hang_up) as server, http_for(server.url) as http:
        assert http.send(post(body=b"{}")).status == 200
        with pytest.raises(InvalidInputError, match="an array has changed") as refused:
            http.send(post(body=body))
        assert refused.value.ambiguous  # the server may have the first bytes


# ------------------------------------------------------------------------------------- in a training pass


def arrays() -> dict[str, Any]:
    return {"target_tokens": np.arange(TOKENS), "weights": np.ones(TOKENS, dtype="float32")}


def test_a_second_try_sends_the_same_bytes() -> None:
    bodies: list[bytes] = []

    def overloaded(asked: Asked) -> Answer:
        bodies.append(bytes(asked.body))
        return Answer(503, {})

    with StubServer() as stub, quick_service(base_url=stub.url, api_key=KEY) as service:
        trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
        stub.script("/forward_backward", overloaded, overloaded)
        datum = types.Datum(types.ModelInput.from_ints(np.arange(TOKENS)), arrays())
        trainer.forward_backward([datum], "cross_entropy").result(timeout=120)
        bodies += [bytes(asked.body) for asked in stub.asked("/forward_backward")]
    assert len(set(bodies)) == 1
    (sent,) = decode_forward_backward_request(bodies[0])[0].forward_backward_input.data
    assert sent == datum


def test_an_array_that_changes_before_a_second_try_is_named() -> None:
    inputs = arrays()

    def overloaded(_: Asked) -> Answer:
        inputs["weights"][TOKENS // 2] = 0
        return Answer(503, {})

    with StubServer() as stub, quick_service(base_url=stub.url, api_key=KEY) as service:
        trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
        stub.script("/forward_backward", overloaded)
        datum = types.Datum(types.ModelInput.from_ints(np.arange(TOKENS)), inputs)
        failed = trainer.forward_backward([datum], "cross_entropy")
        with pytest.raises(InvalidInputError, match="an array has changed"):
            failed.result(timeout=120)
        # The server may have the request, and nobody can send it again.
        with pytest.raises(EarlierCallFailedError, match="an array has changed") as refused:
            trainer.forward_backward([datum], "cross_entropy").result(timeout=120)
        assert refused.value.final


@pytest.mark.parametrize("compressed", [False, True])
def test_the_bytes_are_those_of_a_joined_body(*, compressed: bool) -> None:
    if compressed and not zstd.is_available():
        pytest.skip("neither Python nor a package has zstd")
    config = {"fwdbwd_max_chunk_len": 1024, "proto_compress_fwdbwd": compressed}
    with StubServer(config=config) as stub, ServiceClient(base_url=stub.url, api_key=KEY) as service:
        trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
        datum = types.Datum(types.ModelInput.from_ints(np.arange(TOKENS)), arrays())
        trainer.forward_backward([datum] * 3, "cross_entropy").result(timeout=120)
        (asked,) = stub.asked("/forward_backward")
    if compressed:
        assert asked.headers["content-encoding"] == "zstd"
        assert asked.body[4] >> 6  # the frame tells the size of its content
    assert decode_forward_backward_request(_plain_body(asked))[0].forward_backward_input.data == [datum] * 3


def test_a_body_is_sent_without_a_copy() -> None:
    array = np.zeros(4_000_000, dtype="uint8")
    scratch = bytearray(64 * 1024)

    def drop_bodies(peer: Peer) -> None:
        peer.read_request()
        peer.send(answer(b"ok"))
        head = peer.read_head()
        left = int(head.header("content-length") or 0) - len(peer.take_rest())
        while left:
            left -= peer.sock.recv_into(scratch, min(left, len(scratch)))
        peer.send(answer(b"ok"))

    with ScriptedServer(drop_bodies) as server:
        http = http_for(server.url)
        http.send(post())
        tracemalloc.start()
        try:
            assert http.send(post(body=PiecedBody([b"head", array.data.cast("B")]))).status == 200
            most_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            http.close()
    assert most_bytes < array.nbytes / 8


# ----------------------------- Compressed answers are decompressed within limits of size and memory
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
