"""An answer that belongs to another call of the client is not taken, and the request is sent again.

A connection on which an answer arrived twice is an answer behind: each request gets the answer to the one
before it.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from support.hasty import FLAGS, hasty_service, quick_service, sampler_of, trainer_of, world
from support.tinker_stub import PROTO, Answer, Asked, Promise, Stub, StubServer

from tinker_sync import errors, types
from tinker_sync.clients.rest import RestClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import APIResponseValidationError, UnsupportedByServerError
from tinker_sync.losses import numpy_loss
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.types import SampleResponse
from tinker_sync.wire.proto import samples as proto

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
        with pytest.raises(APIResponseValidationError, match="another call"):
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


# ---- An answer with too few results, or with those of another call, fails the call that waits for it
PARAMS = types.SamplingParams(max_tokens=2)
STEP = types.AdamParams()
CHUNKS = {"fwdbwd_max_chunk_len": 4}


def data(count: int) -> list[types.Datum]:
    return [types.Datum(types.ModelInput.from_ints([n]), {"target_tokens": [n + 1]}) for n in range(count)]


def change(stub: Stub, kind: str, how: Callable[[Promise], object]) -> None:
    """Change the result of the first promise of a kind before the answer to its first poll."""
    changed: list[str] = []

    def script(asked: Asked) -> Answer | None:
        request_id = asked.json()["request_id"]
        promise = stub._promises.get(request_id)
        if promise is not None and promise.kind == kind and not changed:
            how(promise)
            changed.append(request_id)
        return None

    stub.script("/retrieve_future", *[script] * 20)


def answer_with(**fields: Any) -> Callable[[Promise], object]:
    def how(promise: Promise) -> None:
        promise.payload = json.dumps(fields).encode()

    return how


def two_of_four(promise: Promise) -> None:
    response = proto.decode_sample_response(promise.payload)
    whole = SampleResponse(response.sequences[:2], response.prompt_logprobs_np)
    promise.payload = b"".join(proto.encode_sample_response(whole))


def test_a_sample_with_too_few_sequences() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        change(stub, "sample", two_of_four)
        future = sampler.sample(PROMPT, 4, PARAMS)
        with pytest.raises(APIResponseValidationError) as failed:
            future.result(PATIENCE_S)
        assert "the result of SamplingClient.sample cannot be used" in str(failed.value)
        assert failed.value.request_id == future.request_id
        assert len(sampler.sample(PROMPT, 4, PARAMS).result(PATIENCE_S).sequences) == 4


def test_scores_that_were_not_computed() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)

        def unscored(promise: Promise) -> None:
            response = proto.decode_sample_response(promise.payload)
            promise.payload = b"".join(proto.encode_sample_response(SampleResponse(response.sequences)))

        change(stub, "sample", unscored)
        with pytest.raises(UnsupportedByServerError, match="prompt_logprobs"):
            sampler.compute_logprobs(PROMPT).result(PATIENCE_S)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("call", ["forward_backward", "forward"])
def test_a_chunk_without_outputs_shifts_nothing(call: str, parallel: bool) -> None:
    with world({**CHUNKS, "parallel_fwdbwd_chunks": parallel}) as (stub, client):
        trainer = trainer_of(client)
        change(stub, "forward_backward", lambda promise: setattr(promise, "payload", b""))
        with pytest.raises(APIResponseValidationError, match="expected 4"):
            getattr(trainer, call)(data(8), "cross_entropy").result(PATIENCE_S)
        whole = getattr(trainer, call)(data(8), "cross_entropy").result(PATIENCE_S)
        assert [row["logprobs"].data[0] for row in whole.loss_fn_outputs] == pytest.approx(
            [-(n + 1) / 100 for n in range(8)]
        )


def test_a_custom_loss_sees_no_short_forward_pass() -> None:
    seen = []

    @numpy_loss
    def loss(data: Any, logprobs: Any) -> Any:
        seen.append(len(logprobs))
        return 0.0, {}, [0 * each for each in logprobs]

    with world(CHUNKS) as (stub, client):
        trainer = trainer_of(client)
        change(stub, "forward_backward", lambda promise: setattr(promise, "payload", b""))
        with pytest.raises(APIResponseValidationError, match="got 0"):
            trainer.forward_backward_custom(data(8), loss).result(PATIENCE_S)
        assert seen == []
        trainer.forward_backward_custom(data(8), loss).result(PATIENCE_S)
        assert seen == [8]


def test_an_answer_without_a_length_is_not_taken_for_whole() -> None:
    """A protobuf answer without a length is asked for again, because a cut message may still be valid.

    JSON needs no length, because its end is visible.
    """
    with world() as (stub, client):
        trainer = trainer_of(client)

        def unbounded(asked: Asked) -> Answer | None:
            payload = stub._promises[asked.json()["request_id"]].payload
            return Answer(body=payload, content_type=PROTO, lasts_until_close=True)

        stub.script("/retrieve_future", unbounded)
        assert trainer.forward_backward(data(2), "cross_entropy").result(PATIENCE_S).metrics
        assert len(stub.asked("/retrieve_future")) == 3  # one poll for the model, two for the pass
        stub.script("/retrieve_future", *[unbounded] * 3)
        with pytest.raises(APIResponseValidationError, match="states no length"):
            trainer.forward_backward(data(2), "cross_entropy").result(PATIENCE_S)
        unbounded_json = Answer(body={"metrics": {"a:sum": 1.0}}, lasts_until_close=True)
        stub.script("/retrieve_future", unbounded_json)
        assert trainer.optim_step(types.AdamParams()).result(PATIENCE_S).metrics == {"a:sum": 1.0}


@pytest.mark.parametrize(
    ("kind", "answer", "complaint"),
    [
        ("save_weights", {"type": "save_weights"}, "path"),
        ("save_weights", {"path": ""}, "nothing that was saved"),
        ("optim_step", {"type": "load_weights", "path": "tinker://x/weights/a"}, "that of load_weights"),
        ("optim_step", {"request_id": "req-999"}, "another request"),
    ],
)
def test_results_that_say_too_little_or_belong_elsewhere(
    kind: str, answer: dict[str, Any], complaint: str
) -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        change(stub, kind, answer_with(**answer))
        future = trainer.save_state("a") if kind == "save_weights" else trainer.optim_step(types.AdamParams())
        with pytest.raises(APIResponseValidationError, match=complaint):
            future.result(PATIENCE_S)


def test_weights_saved_under_no_name_and_for_no_session() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        change(stub, "save_weights_for_sampler", answer_with(type="save_weights_for_sampler"))
        with pytest.raises(APIResponseValidationError, match="nothing that was saved"):
            trainer.save_weights_and_get_sampling_client().result(PATIENCE_S)
        assert stub.asked("/create_sampling_session") == []


def test_ids_that_are_empty_or_of_another_model() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        stub.script("/get_info", Answer(body={"model_data": {}, "model_id": "another"}))
        with pytest.raises(APIResponseValidationError, match="another model"):
            trainer.get_info()
        stub.script("/create_sampling_session", *[Answer(body={"sampling_session_id": ""})] * 3)
        with pytest.raises(APIResponseValidationError, match="sampling_session_id: is empty"):
            client.create_sampling_client(base_model="stub/model").result(PATIENCE_S)
        change(stub, "create_model", answer_with(model_id=""))
        with pytest.raises(APIResponseValidationError, match="names no model"):
            client.create_lora_training_client("stub/model").result(PATIENCE_S)


GARBLED = [Answer(body=b"<p>Welcome</p>"), Answer(body=b'{"request_id": "req-')]
CALLS = [
    *("/client/config", "/create_session", "/create_model", "/create_sampling_session"),
    *("/forward_backward", "/optim_step", "/asample", "/get_info"),
]


def use_all(stub: Stub) -> None:
    with quick_service(0.01, base_url=stub.url, api_key="tml-x") as client:  # type: ignore[attr-defined]
        make_all_calls(client)


def make_all_calls(client: ServiceClient) -> None:
    # Where the client cannot be made, no other call makes the same requests again meanwhile.
    trainer = client.create_lora_training_client("stub/model").result(PATIENCE_S)
    passed, stepped = trainer.forward_backward(data(2), "cross_entropy"), trainer.optim_step(STEP)
    sampler = client.create_sampling_client(base_model="stub/model")
    sampled = sampler.sample(PROMPT, 1, PARAMS)
    assert passed.result(PATIENCE_S).loss_fn_outputs
    assert stepped.result(PATIENCE_S).metrics
    assert sampled.result(PATIENCE_S).sequences
    assert trainer.get_info().model_id == trainer.model_id


@pytest.mark.parametrize("path", CALLS)
def test_an_answer_that_cannot_be_read_is_asked_for_again(path: str) -> None:
    """The same call is sent again under the same number and key, because a proxy may have made the answer."""
    with StubServer(config=FLAGS) as stub:
        stub.script(path, *GARBLED)
        use_all(stub)
        first, *others = stub.asked(path)[:3]
        assert len(others) == 2
        for again in others:
            assert again.body == first.body
            assert again.headers.get("x-idempotency-key") == first.headers.get("x-idempotency-key")


@pytest.mark.parametrize("path", CALLS)
def test_answers_that_can_never_be_read_fail_the_call(path: str) -> None:
    with StubServer(config=FLAGS) as stub:
        stub.script(path, *GARBLED * 2)
        with pytest.raises(APIResponseValidationError, match="cannot be read"):
            use_all(stub)
        # The step behind the pass is queued already, and has the pass sent again first.
        assert len(stub.asked(path)) in ((4, 5) if path == "/forward_backward" else (3,))


# ------ Answers that cost more than they say: small ones that unfold to much, large errors, garbage
DATA = [types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})]
MIB = 1024 * 1024

Make = Callable[[ServiceClient], Callable[[], Any]]


def sample(client: ServiceClient) -> Callable[[], Any]:
    sampler = sampler_of(client)
    return lambda: sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1))


def train(client: ServiceClient) -> Callable[[], Any]:
    trainer = trainer_of(client)
    return lambda: trainer.forward_backward(DATA, "cross_entropy")


LIMITED_CALLS: dict[str, tuple[str, Make]] = {
    "the promise of a sample": ("/asample", sample),
    "the result of a sample": ("/retrieve_future", sample),
    "the promise of a pass": ("/forward_backward", train),
    "the result of a pass": ("/retrieve_future", train),
    "a list": ("/checkpoints", lambda client: RestClient(client.holder).list_user_checkpoints),
}


@pytest.mark.parametrize("case", LIMITED_CALLS)
def test_a_bomb_fails_its_call_at_the_limit_for_that_kind_of_call(case: str) -> None:
    path, make = LIMITED_CALLS[case]
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
