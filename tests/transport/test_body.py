"""Large bodies in pieces: the sent bytes, retries, and arrays that change between tries."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import requests
from support.authority import Authority
from support.pacing import quick_service
from support.servers import AnsweringServer, Peer, ScriptedServer, answer, redirect
from support.tinker_stub import Answer, Asked, StubServer, _plain_body
from support.wires import http_for, post

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import EarlierCallFailedError, InvalidInputError
from tinker_sync.transport.body import PiecedBody
from tinker_sync.wire import zstd
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
