"""An answer that belongs to another call of the client is not taken, and the request is sent again.

A connection on which an answer arrived twice is an answer behind: each request gets the answer to the one
before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.hasty import sampler_of, trainer_of, world
from support.tinker_stub import Answer, Asked, Stub

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import APIResponseValidationError
from tinker_sync.runtime.futures import APIFuture

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE = types.SamplingParams(max_tokens=1)
Call = Callable[[], APIFuture[Any]]


def steps_of(client: ServiceClient) -> Call:
    trainer = trainer_of(client)
    return lambda: trainer.optim_step(types.AdamParams())


def samples_of(client: ServiceClient) -> Call:
    sampler = sampler_of(client)
    return lambda: sampler.sample(PROMPT, 1, ONE)


KINDS: Any = pytest.mark.parametrize(
    ("path", "calls_of"), [("/optim_step", steps_of), ("/asample", samples_of)], ids=["step", "sample"]
)


def accepted(call: Call, stub: Stub) -> APIFuture[Any]:
    """Make a call that the server accepts, and whose result it holds back."""
    made = call()
    stub.await_asked("/retrieve_future", where=lambda asked: asked.json()["request_id"] == made.request_id)
    return made


@KINDS
def test_the_promise_of_another_call_is_not_taken(path: str, calls_of: Callable[[Any], Call]) -> None:
    with world() as (stub, client):
        call = calls_of(client)
        release = stub.hold("/retrieve_future")
        first = accepted(call, stub)
        stub.script(path, Answer(body={"request_id": first.request_id}))
        second = call()
        result = second.result(PATIENCE_S)
        assert second.request_id != first.request_id
        assert not first.done()
        release.set()
        if path == "/optim_step":
            assert (first.result(PATIENCE_S).metrics, result.metrics) == ({"step:max": 1}, {"step:max": 2})
        first.result(PATIENCE_S)
        wrong, again = stub.asked(path)[1:]
        assert (wrong.body, wrong.headers["x-idempotency-key"]) == (
            again.body,
            again.headers["x-idempotency-key"],
        )
        assert wrong.connection != again.connection
        assert client.holder.lifecycle._promised == {}


@KINDS
def test_a_server_that_gives_two_calls_one_promise_is_an_error(
    path: str, calls_of: Callable[[Any], Call]
) -> None:
    with world() as (stub, client):
        call = calls_of(client)
        release = stub.hold("/retrieve_future")
        first = accepted(call, stub)
        stub.script(path, *[Answer(body={"request_id": first.request_id})] * 3)
        with pytest.raises(APIResponseValidationError, match="is the request of another call"):
            call().result(PATIENCE_S)
        release.set()
        assert first.result(PATIENCE_S)
        assert call().result(PATIENCE_S)


@KINDS
def test_a_repeated_request_may_get_its_promise_again(path: str, calls_of: Callable[[Any], Call]) -> None:
    """A server that recognises the repetition of a request whose answer was lost gives the same promise."""
    with world() as (stub, client):
        call = calls_of(client)
        kept: list[Answer] = []

        def lost(_: Asked) -> Answer:
            return Answer(abort="after")

        def same(_: Asked) -> Answer:
            kept.append(Answer(body={"request_id": f"req-{stub._counters['promise'] - 1}"}))
            return kept[0]

        stub.script(path, lost, lost, same)
        assert call().result(PATIENCE_S)
        assert len(kept) == 1


@KINDS
def test_a_result_of_the_wrong_form_is_asked_for_once_more(
    path: str, calls_of: Callable[[Any], Call]
) -> None:
    del path
    with world() as (stub, client):
        call = calls_of(client)
        wrong = Answer(body={"path": "tinker://run/weights/a", "type": "save_weights"})
        stub.script("/retrieve_future", wrong)
        count = len(stub.asked("/retrieve_future"))
        assert call().result(PATIENCE_S)
        first, second = stub.asked("/retrieve_future")[count:]
        assert first.json()["request_id"] == second.json()["request_id"]
        assert first.connection != second.connection
        stub.script("/retrieve_future", wrong, wrong)
        with pytest.raises(APIResponseValidationError, match="cannot be used"):
            call().result(PATIENCE_S)
        assert call().result(PATIENCE_S)
