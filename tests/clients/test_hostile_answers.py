"""Answers that cost more than they say: small ones that unfold to much, large errors, garbage."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from support.hasty import FLAGS, hasty_service, sampler_of, trainer_of
from support.tinker_stub import Answer, StubServer

from tinker_sync import errors, types
from tinker_sync.clients.rest import RestClient
from tinker_sync.clients.service import ServiceClient

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
DATA = [types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})]
MIB = 1024 * 1024

Make = Callable[[ServiceClient], Callable[[], Any]]


def sample(client: ServiceClient) -> Callable[[], Any]:
    sampler = sampler_of(client)
    return lambda: sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1))


def train(client: ServiceClient) -> Callable[[], Any]:
    trainer = trainer_of(client)
    return lambda: trainer.forward_backward(DATA, "cross_entropy")


CALLS: dict[str, tuple[str, Make]] = {
    "the promise of a sample": ("/asample", sample),
    "the result of a sample": ("/retrieve_future", sample),
    "the promise of a pass": ("/forward_backward", train),
    "the result of a pass": ("/retrieve_future", train),
    "a list": ("/checkpoints", lambda client: RestClient(client.holder).list_user_checkpoints),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_bomb_fails_its_call_at_the_limit_for_that_kind_of_call(case: str) -> None:
    path, make = CALLS[case]
    # As much as the results of large requests may have; half a kilobyte on the wire.
    bomb = gzip.compress(gzip.compress(b'{"request_id": "' + b"a" * 20 * MIB + b'"}', 9), 9)
    with StubServer(config=FLAGS) as stub, hasty_service(stub) as client:
        call = make(client)
        stub.script(path, *[Answer(200, bomb, {"Content-Encoding": "gzip, gzip"})] * 3)
        future = call()
        with pytest.raises(errors.APIConnectionError, match=r"limit of \d{7} bytes \(max_body_bytes\)"):
            future.result(PATIENCE_S)


def test_a_result_may_be_as_large_as_the_request_asks_for() -> None:
    """A result of 20 MiB is refused for one token, and read for a million."""
    filler = gzip.compress(b'{"type": "try_again", "x": "' + b"a" * 20 * MIB + b'"}', 9)
    large = Answer(200, filler, {"Content-Encoding": "gzip"})
    with StubServer(config=FLAGS) as stub, hasty_service(stub) as client:
        sampler = sampler_of(client)
        for longest, fits in ((1, False), (1_000_000, True), (None, True)):
            stub.script("/retrieve_future", large)
            future = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=longest))
            if fits:
                assert future.result(PATIENCE_S).sequences
            else:
                with pytest.raises(errors.APIConnectionError, match="max_body_bytes"):
                    future.result(PATIENCE_S)


def test_a_large_error_is_quoted_and_kept_in_part() -> None:
    body = json.dumps({"detail": [{"loc": ["body"], "msg": "wrong", "input": "x" * 20 * MIB}]}).encode()
    with StubServer(config=FLAGS) as stub, hasty_service(stub) as client:
        stub.script("/checkpoints", Answer(422, body))
        with pytest.raises(errors.UnprocessableEntityError, match="wrong") as caught:
            RestClient(client.holder).list_user_checkpoints().result(PATIENCE_S)
        assert len(pickle.dumps(caught.value)) < MIB
        assert len(str(caught.value)) < 4000
        assert RestClient(client.holder).list_user_checkpoints().result(PATIENCE_S).checkpoints == []


def test_garbage_is_searched_for_secrets_around_the_quoted_part_alone() -> None:
    """A search of many megabytes would hold up all threads."""
    with StubServer(config=FLAGS) as stub, hasty_service(stub) as client:
        far, near = b"x" * 100_000 + b'"password": "hunter"', b'xx "password": "hunter"'
        for garbage, quoted in ((far, True), (near, False)):
            stub.script("/checkpoints", *[Answer(200, garbage)] * 3)
            with pytest.raises(errors.APIResponseValidationError) as caught:
                RestClient(client.holder).list_user_checkpoints().result(PATIENCE_S)
            assert ("'xxxx" in str(caught.value)) is quoted
            assert "hunter" not in str(caught.value)
