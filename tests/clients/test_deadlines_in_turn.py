"""Calls end at their deadlines while they wait for a client, earlier calls or a limit. They use no number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.crowd import until
from support.custom_losses import squares
from support.tinker_stub import Answer, Stub

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import DeadlineError
from tinker_sync.runtime.futures import APIFuture

PATIENCE_S = 120.0
SOON_S = 0.05
STEP = types.AdamParams()
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)


def data(count: int = 1) -> list[types.Datum]:
    inputs: dict[str, Any] = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
    return [types.Datum(PROMPT, inputs) for _ in range(count)]


CALLS: dict[str, Callable[[Any], APIFuture[Any]]] = {
    "optim_step": lambda trainer: trainer.optim_step(STEP, deadline=SOON_S),
    "forward": lambda trainer: trainer.forward(data(), "cross_entropy", deadline=SOON_S),
    "forward_backward in chunks": lambda trainer: trainer.forward_backward(
        data(2000), "cross_entropy", deadline=SOON_S
    ),
    "forward_backward_custom": lambda trainer: trainer.forward_backward_custom(
        data(), squares, deadline=SOON_S
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_at_its_deadline_behind_one_that_is_being_sent(
    stub: Stub, service: ServiceClient, call: str
) -> None:
    trainer = service.create_lora_training_client("stub/model").result(PATIENCE_S)
    release = stub.hold("/optim_step")
    first = trainer.optim_step(STEP)
    stub.await_asked("/optim_step")
    late, last = CALLS[call](trainer), trainer.optim_step(STEP)
    with pytest.raises(DeadlineError, match=r"was not sent within the deadline.* it waited for its turn"):
        late.result(PATIENCE_S)
    assert not first.done()
    release.set()
    first.result(PATIENCE_S), last.result(PATIENCE_S)
    assert [asked.json()["seq_id"] for asked in stub.asked("/optim_step")] == [1, 2]
    assert len(stub.asked("/forward")) == len(stub.asked("/forward_backward")) == 0


@pytest.mark.parametrize("kind", ["sample", *CALLS])
def test_a_call_ends_at_its_deadline_before_its_client_is_ready(
    stub: Stub, service: ServiceClient, kind: str
) -> None:
    release = [stub.hold(path) for path in ("/create_model", "/create_sampling_session")]
    trainer = service.create_lora_training_client("stub/model")
    sampler = service.create_sampling_client(base_model="stub/model")
    late = sampler.sample(PROMPT, 1, PARAMS, deadline=SOON_S) if kind == "sample" else CALLS[kind](trainer)
    with pytest.raises(DeadlineError, match="was not sent within the deadline"):
        late.result(PATIENCE_S)
    assert not trainer.done()
    for each in release:
        each.set()
    trainer.optim_step(STEP).result(PATIENCE_S)
    sampler.sample(PROMPT, 1, PARAMS).result(PATIENCE_S)
    assert len(stub.asked("/asample")) == 1
    assert [asked.json()["seq_id"] for asked in stub.asked("/optim_step")] == [1]


def test_a_call_that_is_being_sent_is_not_ended_by_the_timer_of_its_turn(
    stub: Stub, service: ServiceClient
) -> None:
    trainer = service.create_lora_training_client("stub/model").result(PATIENCE_S)
    future: APIFuture[Any] = APIFuture()
    assert future._begin()
    service.holder.lifecycle.end_in_turn(future, service.holder.clock.now(), "a call")
    trainer.optim_step(STEP).result(PATIENCE_S)  # the reactor has run the timer by then
    assert not future.done()


def test_a_sample_ends_at_its_deadline_behind_others_at_a_limit(stub: Stub, service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="stub/model").result(PATIENCE_S)
    stub.script("/asample", Answer(429, {"detail": "slow down"}, {"retry-after": "3600000"}))
    refused = sampler.sample(PROMPT, 1, PARAMS)
    until(lambda: refused.status().state == "paused")
    first = sampler.sample(PROMPT, 1, PARAMS)
    late = [sampler.sample(PROMPT, 1, PARAMS, deadline=SOON_S) for _ in range(3)]
    for each in late:
        with pytest.raises(
            DeadlineError,
            match=r"was not sent within the deadline.* asked for a pause, of which 1\S+ s are left",
        ):
            each.result(PATIENCE_S)
    assert not refused.done()
    assert not first.done()
    assert len(stub.asked("/asample")) == 1


def test_a_refused_sample_ends_at_its_deadline_behind_others(stub: Stub, service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="stub/model").result(PATIENCE_S)
    release = threading.Event()
    stub.script("/asample", *[Answer(429, {"detail": "slow"}, {"retry-after": "60"}, gate=release)] * 2)
    first = sampler.sample(PROMPT, 1, PARAMS)
    stub.await_asked("/asample")
    late = sampler.sample(PROMPT, 1, PARAMS, deadline=1.0)
    stub.await_asked("/asample", 2)
    release.set()
    with pytest.raises(DeadlineError, match=r"was not accepted within the deadline.*status 429"):
        late.result(PATIENCE_S)
    assert not first.done()
    assert len(stub.asked("/asample")) == 2
