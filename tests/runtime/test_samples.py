"""A sample gives back its place, its bytes and its permit, no matter how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock
from support.crowd import until
from support.hasty import FLAGS, hasty_service
from support.raising import raising
from support.tinker_stub import Answer, Stub, StubServer
from support.wires import Notebook

from tinker_sync import types
from tinker_sync._base.events import TokensUsed
from tinker_sync._base.policy import Ledger, Stage
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.errors import (
    APIResponseValidationError,
    APIStatusError,
    DeadlineError,
)
from tinker_sync.runtime.admission import Admission
from tinker_sync.runtime.client import Lifecycle
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.samples import SampleBodies, SubmitPolicy
from tinker_sync.runtime.server import BillingPause
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.retries import Judge
from tinker_sync.types import (
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    SampleRequest,
    SamplingParams,
    TensorData,
)
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import json_body
from tinker_sync.wire.dialect import Dialect

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


def admission_of(sampler: SamplingClient) -> Admission:
    machinery = sampler.holder.server.machinery.value
    assert machinery is not None
    return machinery.admission


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
    until(lambda: sum(future.status().state == "queued" for future in futures) == 2)
    release.set()
    for future in futures:
        assert future.result(PATIENCE_S).sequences


def test_a_sample_that_is_cancelled_while_it_is_sent_gives_everything_back_at_once(
    stub: Stub, sampler: SamplingClient
) -> None:
    gate = threading.Event()
    stub.script("/asample", Answer(usual=True, gate=gate))
    future = sample(sampler)
    stub.await_asked("/asample")
    assert future.cancel()
    admission = admission_of(sampler)
    # A thread of the client gives them back; the server has not answered yet.
    until(lambda: (admission.slots, admission.bytes) == (PLACES, 10_485_760))
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
    monkeypatch.setattr(sampler.holder.server.flows, "start", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        sample(sampler)
    assert held == []


def test_a_sample_that_is_cancelled_as_its_promise_arrives_is_given_up_at_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept = Lifecycle.accept

    def cancel_first(lifecycle: Lifecycle, future: APIFuture[Any], request_id: str) -> bool:
        assert future.cancel()
        return accept(lifecycle, future, request_id)

    monkeypatch.setattr(Lifecycle, "accept", cancel_first)
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
    sampler.holder.connection.events.listen(notebook)
    one = {"tokens": [1, 2], "logprobs": [-0.5, -0.5], "stop_reason": "length"}
    stub.script("/retrieve_future", *[Answer(body={"type": "sample", "sequences": [one, one]})] * 2)
    with pytest.raises(APIResponseValidationError):
        sample(sampler).result(PATIENCE_S)
    assert [event.sampled for event in notebook.events if isinstance(event, TokensUsed)] == [4]


# ------------------------------------------------------------------------------------------- the policy
def policy(*, billing_s: float = 0.0) -> SubmitPolicy:
    clock = FakeClock(automatic=False)
    judge = Judge("http://127.0.0.1:1", clock, tuple)
    return SubmitPolicy(judge, BillingPause(billing_s, clock=clock), draw=lambda: 1.0)


def decide(
    outcome: Reply | SendFailed,
    *,
    attempt: int = 1,
    ledger: Ledger | None = None,
    size: int = 10,
    max_attempts: int = 3,
    **options: Any,
) -> Any:
    call = Call(method="POST", path="/api/v1/asample", body=b"{}", attempt=attempt)
    ledger = ledger or Ledger(Stage.SUBMIT)
    return policy(**options).decide(outcome, call, ledger, size, max_attempts)


def test_trouble_that_passes_is_tried_again_a_number_of_times() -> None:
    assert [decide(Reply(503, {}), attempt=attempt) for attempt in (1, 2)] == [0.5, 1.0]
    with pytest.raises(APIStatusError):
        decide(Reply(503, {}), attempt=3)


def test_a_conflict_is_tried_again_twice_at_most() -> None:
    options: Any = {"ledger": Ledger(Stage.SUBMIT), "max_attempts": 10}
    assert [decide(Reply(409, {}), attempt=attempt, **options) for attempt in (1, 2)] == [0.5, 1.0]
    with pytest.raises(APIStatusError):
        decide(Reply(409, {}), attempt=3, **options)


# ------ The bodies of samples that are spliced from cached parts are the same as fully encoded ones
VENDOR = Dialect.of_vendor()
TWO = ModelInput.from_ints([1, 2])


def request(prompt: ModelInput = TWO, **given: object) -> SampleRequest:
    params = given.pop("params", SamplingParams(max_tokens=8, temperature=0.5))
    return SampleRequest(prompt=prompt, sampling_params=params, sampling_session_id="s:1", **given)  # type: ignore[arg-type]


def whole(sample: SampleRequest, number: int, dialect: Dialect = VENDOR) -> bytes:
    return wire_json.with_number(json_body(sample, dialect), number)


@pytest.mark.parametrize(
    "prompt",
    [
        ModelInput.from_ints([]),
        ModelInput.from_ints([5]),
        ModelInput(chunks=[EncodedTextChunk(tokens=(1, 2, 3))]),
        ModelInput(chunks=[EncodedTextChunk(tokens=range(4))]),
        ModelInput(chunks=[EncodedTextChunk(tokens=np.arange(3))]),
        ModelInput(chunks=[EncodedTextChunk(tokens=[1]), EncodedTextChunk(tokens=[2])]),
        ModelInput(
            chunks=[EncodedTextChunk(tokens=[1]), ImageChunk(data=b"x", format="png", expected_tokens=2)]
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dialect", [VENDOR, Dialect.forced("json")], ids=["vendor", "json"])
def test_every_prompt_gives_the_body_that_is_written_whole(prompt: ModelInput, dialect: Dialect) -> None:
    bodies = SampleBodies(dialect)
    for number in (0, 7):
        sample = request(prompt)
        assert bodies.encode(sample, number) == whole(sample, number, dialect)


def test_a_field_that_changes_is_noticed() -> None:
    bodies = SampleBodies(VENDOR)
    samples = [
        request(),
        request(num_samples=2),
        request(prompt_logprobs=True, prompt_logprobs_last_n=1),
        request(params=SamplingParams(max_tokens=8, seed=3, stop=["a"])),
        request(params=SamplingParams(max_tokens=8, seed=3, stop=("a",))),
        request(params=SamplingParams(max_tokens=8, seed=3, stop=[4])),
        request(target_prompt_logprobs=TensorData.from_numpy(np.array([[1]]))),
    ]
    for number, sample in enumerate(samples * 2):
        assert bodies.encode(sample, number) == whole(sample, number)


def test_a_list_of_stops_that_its_user_changes_is_noticed() -> None:
    params = SamplingParams(max_tokens=8, stop=["a"])
    bodies = SampleBodies(VENDOR)
    bodies.encode(request(params=params), 0)
    assert isinstance(params.stop, list)
    params.stop.append("b")
    assert bodies.encode(request(params=params), 1) == whole(request(params=params), 1)


def test_a_stop_text_that_looks_like_the_mark_does_no_harm() -> None:
    sample = request(params=SamplingParams(max_tokens=8, stop="[1999999999]"))
    bodies = SampleBodies(VENDOR)
    assert bodies.encode(sample, 0) == bodies.encode(sample, 0) == whole(sample, 0)
