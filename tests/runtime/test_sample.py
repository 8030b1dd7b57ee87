"""A sample gives back its place, its bytes and its permit, no matter how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest
from support.crowd import until
from support.hasty import FLAGS, hasty_service
from support.raising import raising
from support.tinker_stub import Answer, Stub, StubServer
from support.wires import Notebook

from tinker_sync import types
from tinker_sync._base.events import TokensUsed
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.errors import APIResponseValidationError, APIStatusError, DeadlineError
from tinker_sync.runtime.sample import SampleJob
from tinker_sync.transport.call import Reply

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)
PLACES = 2
# More samples than places, so that samples that keep their places stop those behind them.
ROUNDS = PLACES + 2


@pytest.fixture
def stub() -> Iterator[Stub]:
    with StubServer(config={**FLAGS, "sample_max_concurrent_requests": PLACES}) as stub:
        yield stub


@pytest.fixture
def sampler(stub: Stub) -> Iterator[SamplingClient]:
    with hasty_service(stub) as service:
        yield service.create_sampling_client(base_model="stub/model").result(PATIENCE_S)


def sample(sampler: SamplingClient, **options: Any) -> Any:
    return sampler.sample(PROMPT, 1, PARAMS, **options)


def succeed(_: Stub, sampler: SamplingClient) -> None:
    assert sample(sampler).result(PATIENCE_S).sequences


def be_refused(stub: Stub, sampler: SamplingClient) -> None:
    stub.script("/asample", Answer(400, {"detail": "no"}))
    with pytest.raises(APIStatusError):
        sample(sampler).result(PATIENCE_S)


def fail_later(stub: Stub, sampler: SamplingClient) -> None:
    stub.script("/retrieve_future", Answer(403, {"detail": "no"}))
    with pytest.raises(APIStatusError):
        sample(sampler).result(PATIENCE_S)


def be_tried_again(stub: Stub, sampler: SamplingClient) -> None:
    stub.script("/asample", Answer(503), Answer(429, {}, {"retry-after": "0.01"}), Answer(body=b"?"))
    before = len(stub.asked("/asample"))
    assert sample(sampler).result(PATIENCE_S).sequences
    tries = stub.asked("/asample")[before:]
    assert len(tries) == 4
    assert len({one.body for one in tries}) == len({one.headers["x-idempotency-key"] for one in tries}) == 1


def be_late(stub: Stub, sampler: SamplingClient) -> None:
    stub.script("/asample", Answer(503, {}, {"retry-after": "1000"}))
    with pytest.raises(DeadlineError):
        sample(sampler, deadline=30.0).result(PATIENCE_S)


def be_cancelled(_: Stub, sampler: SamplingClient) -> None:
    future = sample(sampler)
    if future.cancel():
        with pytest.raises(CancelledError):
            future.result(PATIENCE_S)
    else:
        assert future.result(PATIENCE_S).sequences


@pytest.mark.parametrize("end", [succeed, be_refused, fail_later, be_tried_again, be_late, be_cancelled])
def test_the_next_sample_gets_the_place(
    stub: Stub, sampler: SamplingClient, end: Callable[[Stub, SamplingClient], None]
) -> None:
    for _ in range(ROUNDS):
        end(stub, sampler)
    assert sample(sampler, deadline=PATIENCE_S).result(PATIENCE_S).sequences


@pytest.mark.parametrize("failure", [503, 429, 410])
def test_samples_sent_again_need_no_other_place(stub: Stub, sampler: SamplingClient, failure: int) -> None:
    """All samples that have places are sent again while others wait for a place, and all succeed."""
    release = threading.Event()
    path = "/retrieve_future" if failure == 410 else "/asample"
    stub.script(path, *[Answer(failure, {}, gate=release)] * PLACES)
    futures = [sample(sampler) for _ in range(PLACES + 2)]
    stub.await_asked(path, PLACES)
    until(lambda: sampler.holder.server.machinery.value.scheduler.places._line)
    release.set()
    for future in futures:
        assert future.result(PATIENCE_S).sequences


def test_a_sample_that_is_sent_again_goes_before_those_that_wait() -> None:
    release = threading.Event()
    one_at_a_time = {**FLAGS, "sample_dispatch_bytes_semaphore_size": 0}
    with StubServer(config=one_at_a_time) as stub, hasty_service(stub) as service:
        sampler = service.create_sampling_client(base_model="stub/model").result(PATIENCE_S)
        stub.script("/asample", Answer(429, {}, {"retry-after": "0.01"}, gate=release))
        futures = [sample(sampler) for _ in range(4)]
        stub.await_asked("/asample")
        until(lambda: sampler.holder.server.machinery.value.scheduler.sending_bytes._line)
        release.set()
        for future in futures:
            assert future.result(PATIENCE_S).sequences
        numbers = [asked.json()["seq_id"] for asked in stub.asked("/asample")]
    assert sorted(numbers) == sorted([*set(numbers), numbers[0]])
    # The second sample may have been the next to go already when the first came back.
    assert numbers[:3].count(numbers[0]) == 2


def test_a_sample_that_is_cancelled_while_it_is_sent_gives_everything_back_at_once(
    stub: Stub, sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted, gate = threading.Event(), threading.Event()
    submit = SampleJob._submit

    def submit_and_note(job: SampleJob) -> None:
        submit(job)
        submitted.set()

    monkeypatch.setattr(SampleJob, "_submit", submit_and_note)
    stub.script("/asample", Answer(usual=True, gate=gate))
    future = sample(sampler)
    assert submitted.wait(PATIENCE_S)
    machinery = sampler.holder.server.machinery.value
    assert machinery is not None
    assert future.cancel()
    free = (f"{PLACES - 1} of {PLACES - 1}", "10485760 of 10485760")
    wanted = [f"<ByteBudget {each} bytes free, 0 in line>" for each in free]
    scheduler = machinery.scheduler
    # A thread of the client gives them back; the server has not answered yet.
    until(lambda: [repr(scheduler.places), repr(scheduler.sending_bytes)] == wanted)
    gate.set()


def test_a_call_that_is_interrupted_reserves_no_tokens(
    sampler: SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[object] = []
    limiter: Any = SimpleNamespace(
        hold=lambda _: held.append("key"), release=lambda _: held.clear(), settle=lambda *_, last: None
    )
    sample(sampler).result(PATIENCE_S)
    sampler.holder.spending.attach(limiter)
    machinery = sampler.holder.server.machinery.value
    assert machinery is not None
    monkeypatch.setattr(machinery.scheduler, "put", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        sample(sampler)
    assert held == []


def test_a_sample_that_is_cancelled_as_its_promise_arrives_is_given_up_at_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept = SampleJob._on_promise

    def cancel_first(job: SampleJob, reply: Reply) -> None:
        assert job._future is not None
        assert job._future.cancel()
        accept(job, reply)

    monkeypatch.setattr(SampleJob, "_on_promise", cancel_first)
    flags = {"sample_cancel_enabled": True}
    with StubServer(config=FLAGS, dynamic_config=flags) as stub, hasty_service(stub) as service:
        sampler = service.create_sampling_client(base_model="stub/model").result(PATIENCE_S)
        future = sample(sampler)
        until(lambda: stub.asked("/cancel_future"))
        assert future.cancelled()
        assert stub.asked("/retrieve_future") == []


def test_tokens_of_a_response_that_does_not_fit_the_request_count(
    stub: Stub, sampler: SamplingClient
) -> None:
    notebook = Notebook()
    sampler.holder.lifecycle.add_observer(notebook)
    one = {"tokens": [1, 2], "logprobs": [-0.5, -0.5], "stop_reason": "length"}
    stub.script("/retrieve_future", *[Answer(body={"type": "sample", "sequences": [one, one]})] * 2)
    with pytest.raises(APIResponseValidationError):
        sample(sampler).result(PATIENCE_S)
    assert [event.sampled for event in notebook.events if isinstance(event, TokensUsed)] == [4]
