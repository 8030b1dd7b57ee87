"""A refusal, a cancel or an odd answer costs no other call, and what can still succeed is not given up."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.crowd import until
from support.custom_losses import data, squares
from support.hasty import number_of, paused, sampler_of, trainer_of, world
from support.tinker_stub import Answer, Asked, Stub

from tinker_sync import types
from tinker_sync.clients.sampling import RetryConfig
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import (
    APIStatusError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnprocessableEntityError,
)
from tinker_sync.runtime.futures import APIFuture

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)
STEP = types.AdamParams()


def tokens(response: types.SampleResponse) -> list[int]:
    return response.sequences[0].tokens


# ------------------------------------------------------------------------------------ ordering and futures


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_a_refused_chunk_hangs_nobody(refused: int, parallel: bool) -> None:
    met: list[Asked] = []

    def refuse(asked: Asked) -> Answer | None:
        if met or number_of(asked) != refused:
            return None
        met.append(asked)
        return Answer(422, {"detail": "no"})

    with world({"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": parallel}) as (stub, client):
        trainer = trainer_of(client)
        stub.script("/forward_backward", *[refuse] * 4)
        passed, later = trainer.forward_backward(data(7), "cross_entropy"), trainer.optim_step(STEP)
        with pytest.raises(UnprocessableEntityError):
            passed.result(PATIENCE_S)
        for following in (later, trainer.optim_step(STEP)):
            assert following.result(PATIENCE_S).metrics
        used = {
            number_of(asked) for path in ("/forward_backward", "/optim_step") for asked in stub.asked(path)
        }
        assert used == set(range(1, max(used) + 1))


def test_a_call_cancelled_in_the_queue_leaves_no_hole() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        release = stub.hold("/optim_step")
        first, second, third = [trainer.optim_step(STEP) for _ in range(3)]
        stub.await_asked("/optim_step")
        assert not first.cancel()
        assert second.cancel()
        release.set()
        assert first.result(PATIENCE_S).metrics == {"step:max": 1.0}
        assert third.result(PATIENCE_S).metrics == {"step:max": 2.0}


def test_a_pass_cancelled_in_the_queue_leaves_none_of_its_chunks() -> None:
    with world({"fwdbwd_max_chunk_len": 2}) as (stub, client):
        trainer = trainer_of(client)
        release = stub.hold("/optim_step")
        first = trainer.optim_step(STEP)
        stub.await_asked("/optim_step")
        passed = trainer.forward_backward(data(7), "cross_entropy")
        assert passed.cancel()
        release.set()
        first.result(PATIENCE_S)
        assert trainer.optim_step(STEP).result(PATIENCE_S).metrics == {"step:max": 2.0}
        until(lambda: client.holder.lifecycle.unfinished == 0)
        assert stub.asked("/forward_backward") == []


def test_what_cannot_be_built_takes_no_number() -> None:
    pointer = types.ImageAssetPointerChunk(format="png", location="s3://somewhere", expected_tokens=1)
    unsendable = types.Datum(types.ModelInput(chunks=[pointer]), {"target_tokens": [1]})
    with world() as (_, client):
        trainer = trainer_of(client)
        for wrong in ([unsendable], [*data(1), unsendable], []):
            with pytest.raises(InvalidInputError):
                trainer.forward_backward(wrong, "cross_entropy")
        assert trainer.optim_step(STEP).result(PATIENCE_S).metrics == {"step:max": 1.0}


def test_an_ephemeral_save_repeats_the_same_request() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        stub.script("/save_weights_for_sampler", Answer(503), Answer(503), Answer(abort="before"))
        sampler = trainer.save_weights_and_get_sampling_client().result()
        asked = stub.asked("/save_weights_for_sampler")
        assert len(asked) == 4
        assert len({each.body for each in asked}) == 1
        assert asked[0].json()["sampling_session_seq_id"] == 0
        assert tokens(sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)) == [6]


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("/create_session", sampler_of),
        ("/create_sampling_session", sampler_of),
        ("/create_model", trainer_of),
    ],
)
def test_what_begins_is_tried_again_too(path: str, use: Callable[[ServiceClient], Any]) -> None:
    with world() as (stub, client):
        stub.script(path, *[Answer(503)] * 4, Answer(abort="before"))
        use(client)
        asked = stub.asked(path)
        assert len(asked) == 6
        assert len({(each.body, each.headers["x-idempotency-key"]) for each in asked}) == 1


def test_a_sampler_in_the_middle_of_a_run_waits_for_a_blocked_account() -> None:
    with world() as (stub, client):
        trainer_of(client)
        stub.script("/create_sampling_session", *[Answer(402, {"detail": "pay"})] * 2)
        sampler = sampler_of(client)
        stub.script("/asample", Answer(402, {"detail": "pay"}))
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        assert paused(client) == pytest.approx([5.0] * 3)


def test_tokens_for_weights_go_as_they_were_given() -> None:
    """Four calls take the access token of another user's weights, and send it unchanged in their bodies."""
    path, foreign = "tinker://run/weights/a", "tml-foreign"
    with world({"pjwt_auth_enabled": True}) as (stub, client):
        client.create_training_client_from_state(path, weights_access_token=foreign).result()
        client.create_training_client_from_state_with_optimizer(path, weights_access_token=foreign).result()

        async def both() -> None:
            await client.create_training_client_from_state_async(path, weights_access_token=foreign)
            await client.create_training_client_from_state_with_optimizer_async(
                path, weights_access_token=foreign
            )

        asyncio.run(both())
        sent = [asked.json()["weights_access_token"] for asked in stub.asked("/load_weights")]
        assert sent == [foreign] * 4
        bought_with = {asked.headers["x-api-key"] for asked in stub.asked("/auth/token")}
        assert bought_with == {"tml-hasty", foreign}


def test_ids_of_sequences_are_optional() -> None:
    with world(sequence_ids=False) as (_, client):
        response = sampler_of(client).sample(PROMPT, 2, ONE_TOKEN).result(PATIENCE_S)
        assert [sequence.sequence_id for sequence in response.sequences] == [None, None]


# ------------------------------------------------------------------------------------ retries and load


def test_failures_of_results_have_types() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        stub.script("/retrieve_future", *[Answer(404, {"detail": "no"})] * 5)
        with pytest.raises(NotFoundError, match="no") as raised:
            trainer.optim_step(STEP).result(PATIENCE_S)
        assert raised.value.request_id == "req-1"


def test_servers_are_believed_when_they_ask_for_more_than_a_minute() -> None:
    wish = {"Retry-After": "90"}
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/asample", Answer(429, headers=wish))
        stub.script("/retrieve_future", Answer(429, headers=wish))
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        assert 180 <= sum(paused(client)) <= 185
        stub.script("/create_sampling_session", Answer(503, headers=wish))
        sampler_of(client)
        assert 270 <= sum(paused(client)) <= 280


def test_samples_are_not_submitted_anew_for_ever() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/retrieve_future", *[Answer(410, {"detail": "gone"})] * 50)
        with pytest.raises(APIStatusError, match="gone"):
            sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        numbers = [asked.json()["seq_id"] for asked in stub.asked("/asample")]
        assert numbers == list(range(10))


def test_one_late_sample_fails_alone_with_the_last_notice() -> None:
    paused_queue = Answer(
        body={"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "busy"}
    )

    def hold_the_first(asked: Asked) -> Answer | None:
        return paused_queue if asked.json()["request_id"] == "req-0" else None

    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/retrieve_future", *[hold_the_first] * 500)
        late = sampler.sample(PROMPT, 1, ONE_TOKEN, deadline=30.0)
        with pytest.raises(DeadlineError, match="paused_capacity: busy"):
            late.result(PATIENCE_S)
        assert tokens(sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)) == [6]


@pytest.mark.parametrize("status", [404, 403, 500])
def test_samples_arrive_without_the_poll_for_all(status: int) -> None:
    with world({"sample_use_retrieve_futures": True}) as (stub, client):
        stub.script("/retrieve_futures", *[Answer(status, {"detail": "no"})] * 50)
        sampler = sampler_of(client)
        futures = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(5)]
        assert [tokens(future.result(PATIENCE_S)) for future in futures] == [[6]] * 5


# ------------------------------------------------------------------------------------ secrets


def test_a_copy_finds_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as (stub, client):
        monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-other-process")
        copy = pickle.loads(pickle.dumps(sampler_of(client)))
        try:
            copy.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        finally:
            copy.holder.close("success").result(PATIENCE_S)
        assert stub.asked("/asample")[0].headers["x-api-key"] == "tml-of-the-other-process"


# ------------------------------------------------------------------------------------ life


def test_a_copy_keeps_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-hasty")
    with world() as (stub, client):
        sampler = sampler_of(client, retry_config=RetryConfig(max_attempts=2))
        copy = pickle.loads(pickle.dumps(sampler))
        try:
            stub.script("/retrieve_future", *[Answer(410, {"detail": "gone"})] * 50)
            with pytest.raises(APIStatusError, match="gone"):
                copy.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        finally:
            copy.holder.close("success").result(PATIENCE_S)
        assert len(stub.asked("/asample")) == 2


def test_connections_a_proxy_disliked_are_not_kept_for_ever() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        for _ in range(5):
            stub.script("/get_info", Answer(400), Answer(400))
            trainer.get_info()
        assert "0 busy" in repr(client.holder.connection.http)
        client.close("success").result(PATIENCE_S)
        assert "closed, 0 idle, 0 busy" in repr(client.holder.connection.http)


@pytest.mark.parametrize(
    ("variable", "sent"), [("", []), ("one", ["one"]), ("b,,a, b ,c", ["b", "a", "c"])], ids=repr
)
def test_tags_in_order_once_and_none_empty(
    variable: str, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TAGS", variable)
    with world() as (stub, client):
        sampler_of(client)
        assert stub.asked("/create_session")[0].json()["tags"] == sent


def test_the_round_trip_of_a_sample_is_measured() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/asample", Answer(429, headers={"Retry-After": "3"}))
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        told_s = float(stub.asked("/retrieve_future")[0].headers["x-tinker-create-promise-roundtrip-time"])
        assert 3.0 <= told_s < 10.0


@pytest.mark.parametrize("name", ["load_state", "load_state_with_optimizer"])
def test_deprecated_methods_work_and_warn(name: str) -> None:
    with world() as (_, client):
        trainer = trainer_of(client)
        with pytest.warns(FutureWarning, match="create_training_client_from_state") as warned:
            future = getattr(trainer, name)("tinker://run/weights/a")
        assert [each.filename for each in warned] == [__file__]
        assert future.result(PATIENCE_S).path == "tinker://run/weights/a"
        with (
            pytest.warns(FutureWarning),
            pytest.raises(InvalidInputError, match=f"{name}: .*sampling only.*save_state"),
        ):
            getattr(trainer, name)("tinker://run/sampler_weights/a")


# ---- Calls end at their deadlines while they wait for a client, earlier calls or a limit. They use no number
SOON_S = 0.05
PARAMS = types.SamplingParams(max_tokens=2)


def data_in_turn(count: int = 1) -> list[types.Datum]:
    inputs: dict[str, Any] = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
    return [types.Datum(PROMPT, inputs) for _ in range(count)]


CALLS: dict[str, Callable[[Any], APIFuture[Any]]] = {
    "optim_step": lambda trainer: trainer.optim_step(STEP, deadline=SOON_S),
    "forward": lambda trainer: trainer.forward(data_in_turn(), "cross_entropy", deadline=SOON_S),
    "forward_backward in chunks": lambda trainer: trainer.forward_backward(
        data_in_turn(2000), "cross_entropy", deadline=SOON_S
    ),
    "forward_backward_custom": lambda trainer: trainer.forward_backward_custom(
        data_in_turn(), squares, deadline=SOON_S
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
    with pytest.raises(DeadlineError, match=r"not sent.*its turn"):
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
    with pytest.raises(DeadlineError, match="not sent"):
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
    assert future.set_running_or_notify_cancel()
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
            match=r"not sent.*1\S+ s are left",
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
    with pytest.raises(DeadlineError, match=r"not accepted.*429"):
        late.result(PATIENCE_S)
    assert not first.done()
    assert len(stub.asked("/asample")) == 2
