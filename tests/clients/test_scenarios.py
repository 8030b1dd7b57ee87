"""Scenarios that a client of this protocol must handle, each run by the whole client against a stub.

Pauses take no time, and the tests check their lengths; see `support/hasty.py`. The values of reduced metrics
are in `tests/runtime/test_merge.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any

import pytest
from support.crowd import until
from support.hasty import FLAGS, hasty_service, paused
from support.tinker_stub import Answer, Asked, Stub, StubServer, _fields

from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import (
    APIStatusError,
    BadRequestError,
    RequestErrorCategory,
    RequestFailedError,
    UnprocessableEntityError,
)
from tinker_sync.runtime.sample import SampleJob

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)


@contextmanager
def world(flags: dict[str, Any] | None = None, **behaviour: Any) -> Iterator[tuple[Stub, ServiceClient]]:
    """Yield a stub of the current service, and a client whose pauses take no time (see `support.hasty`)."""
    config = {**FLAGS, **(flags or {})}
    with StubServer(config=config, **behaviour) as stub, hasty_service(stub) as client:
        yield stub, client


def data(count: int) -> list[types.Datum]:
    return [
        types.Datum(
            types.ModelInput.from_ints([n, n + 1]), {"target_tokens": [n + 1, n + 2], "weights": [1.0, 1.0]}
        )
        for n in range(count)
    ]


def number_of(asked: Asked) -> int:
    """Return the sequence number of a training request, in either format."""
    if asked.headers["content-type"] == "application/x-protobuf":
        return int(dict(_fields(asked.body))[2])
    return int(asked.json()["seq_id"])


def training_order(stub: Stub) -> list[int]:
    names = ("/forward_backward", "/optim_step", "/save_weights")
    return [number_of(asked) for asked in list(stub.log) if asked.path.removeprefix("/api/v1") in names]


def polls(stub: Stub) -> list[Asked]:
    return stub.asked("/retrieve_future")


def iterations(asked: list[Asked]) -> list[str]:
    return [each.headers["x-tinker-request-iteration"] for each in asked]


def result_of_step(client: ServiceClient, stub: Stub, *answers: Answer) -> types.OptimStepResponse:
    """Run an optimizer step whose first polls get these answers, and return its result."""
    trainer = client.create_lora_training_client("stub/model").result()
    stub.log.clear()
    stub.script("/retrieve_future", *answers)
    return trainer.optim_step(types.AdamParams()).result(PATIENCE_S)


def sampler_of(client: ServiceClient) -> SamplingClient:
    return client.create_sampling_client(base_model="stub/model").result()


# ------------------------------------------------------------------------------------ training order


@pytest.mark.parametrize(
    ("parallel", "batches"),
    [(True, [{2, 3, 4}, {1}, {5}, {7}, {6}]), (False, [{1}, {2}, {3}, {4}, {5}, {6}, {7}])],
    ids=["parallel", "serial"],
)
def test_training_calls_arrive_in_order(parallel: bool, batches: list[set[int]]) -> None:
    """The first of parallel chunks arrives last. If chunks are serial, all numbers arrive in order."""
    with world({"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": parallel}) as (stub, client):
        trainer = client.create_lora_training_client("stub/model").result()
        seven = trainer.forward_backward(data(7), "cross_entropy")
        step = trainer.optim_step(types.AdamParams())
        three = trainer.forward(data(3), "cross_entropy")
        output = seven.result(PATIENCE_S)
        assert step.result(PATIENCE_S).metrics == {"step:max": 5.0}
        assert len(three.result(PATIENCE_S).loss_fn_outputs) == 3
        arrived = iter(training_order(stub))
        assert [{next(arrived) for _ in batch} for batch in batches] == batches
        assert [row["logprobs"].data[0] for row in output.loss_fn_outputs] == pytest.approx(
            [-(n + 1) / 100 for n in range(7)]
        )
        clocks = {name for name in output.metrics if name.startswith("clock_cycle")}
        assert clocks == {"clock_cycle:unique", *(f"clock_cycle:unique_{n}" for n in (1, 2, 3))}
        assert output.metrics["loss:sum"] == pytest.approx(sum((2 * n + 3) / 100 for n in range(7)))


def refuse_number(number: int) -> Any:
    """Return a script that refuses the first request with this number, and accepts later ones."""
    refused: list[Asked] = []

    def script(asked: Asked) -> Answer | None:
        if refused or number_of(asked) != number:
            return None
        refused.append(asked)
        return Answer(422, {"detail": "no"})

    return script


def test_after_a_refused_chunk_of_a_serial_pass_the_client_goes_on() -> None:
    with world({"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": False}) as (stub, client):
        trainer = client.create_lora_training_client("stub/model").result()
        stub.script("/forward_backward", *[refuse_number(2)] * 4)
        passed = trainer.forward_backward(data(7), "cross_entropy")
        with pytest.raises(UnprocessableEntityError, match="1 of the 4 requests of this call were accepted"):
            passed.result(PATIENCE_S)
        assert trainer.optim_step(types.AdamParams()).result(PATIENCE_S).metrics == {"step:max": 2.0}
        assert training_order(stub) == [1, 2, 2]


def test_a_refused_chunk_of_a_parallel_pass_leaves_no_hole() -> None:
    with world({"fwdbwd_max_chunk_len": 2}) as (stub, client):
        trainer = client.create_lora_training_client("stub/model").result()
        stub.script("/forward_backward", *[refuse_number(2)] * 4)
        passed = trainer.forward_backward(data(7), "cross_entropy")
        later = trainer.optim_step(types.AdamParams())
        with pytest.raises(UnprocessableEntityError):
            passed.result(PATIENCE_S)
        later.result(PATIENCE_S)
        trainer.save_state("a").result(PATIENCE_S)
        order = training_order(stub)
        assert sorted({*order}) == list(range(1, max(order) + 1))
        assert order[-2:] == [max(order) - 1, max(order)]


# ------------------------------------------------------------------------------------ results


def test_the_size_comes_first_where_results_are_large() -> None:
    with world(metadata_over=0) as (stub, client):
        result_of_step(client, stub)
        peek, payload = polls(stub)
        assert [asked.json()["allow_metadata_only"] for asked in (peek, payload)] == [True, False]
        assert iterations([peek, payload]) == ["0", "1"]


def test_too_many_polls_are_spaced_out() -> None:
    with world() as (stub, client):
        result_of_step(client, stub, Answer(429, {}), Answer(429, {}))
        first_s, second_s = paused(client)
        assert 0.75 <= first_s <= 1.0
        assert 1.5 <= second_s <= 2.0


def test_three_bad_requests_are_borne() -> None:
    with world() as (stub, client):
        result_of_step(client, stub, *[Answer(400, {"detail": "?"})] * 3)
        assert iterations(polls(stub)) == ["0", "1", "2", "3"]


def test_a_fourth_bad_request_is_one_too_many() -> None:
    with world() as (stub, client), pytest.raises(BadRequestError):
        result_of_step(client, stub, *[Answer(400, {"detail": "?"})] * 4)


@pytest.mark.parametrize(("between", "enough"), [(408, True), (503, False)])
def test_an_expired_poll_renews_the_patience_a_server_error_does_not(between: int, enough: bool) -> None:
    bad = Answer(400, {"detail": "?"})
    with world() as (stub, client):
        answers = [bad, Answer(between, {"queue_state": "active"}), bad, bad, bad]
        if enough:
            assert result_of_step(client, stub, *answers).metrics
        else:
            with pytest.raises(BadRequestError):
                result_of_step(client, stub, *answers)


def test_an_account_that_is_being_paid_for() -> None:
    with world() as (stub, client):
        assert result_of_step(client, stub, Answer(402, {"detail": "pay"})).metrics
        assert paused(client) == [5.0]


def test_a_forgotten_sample_is_submitted_anew() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/retrieve_future", Answer(410, {"detail": "gone"}))
        assert sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S).sequences[0].tokens == [6]
        assert [asked.json()["seq_id"] for asked in stub.asked("/asample")] == [0, 1]


@pytest.mark.parametrize(("told", "category"), [("user", "user"), ("server", "server"), ("moon", "unknown")])
def test_a_failure_has_a_category(told: str, category: str) -> None:
    with world() as (stub, client), pytest.raises(RequestFailedError, match="no room") as raised:
        result_of_step(client, stub, Answer(body={"error": "no room", "category": told}))
    assert raised.value.category is RequestErrorCategory(category)


# ------------------------------------------------------------------------------------ submits


@pytest.mark.parametrize(("tokens", "pause_s"), [(3, 1.0), (20_000, 5.0)])
def test_a_sample_that_comes_too_soon_keeps_its_number(tokens: int, pause_s: float) -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/asample", Answer(429), Answer(429))
        prompt = types.ModelInput.from_ints(list(range(tokens)))
        sampler.sample(prompt, 1, ONE_TOKEN).result(PATIENCE_S)
        assert [asked.json()["seq_id"] for asked in stub.asked("/asample")] == [0, 0, 0]
        assert sum(paused(client)) == pytest.approx(2 * pause_s, abs=0.1)


def test_an_admitted_sample_waits_if_the_server_refuses_another_one_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit, refused = SampleJob.submit, []

    def refuse_another_before(job: SampleJob) -> None:
        if not refused:
            refused.append(job._scheduler.gate.limiter)
            refused[0].close_for(3)
        submit(job)

    monkeypatch.setattr(SampleJob, "submit", refuse_another_before)
    with world() as (stub, client):
        sampler_of(client).sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        assert sum(paused(client)) == pytest.approx(3.0, abs=0.1)
        assert [asked.json()["seq_id"] for asked in stub.asked("/asample")] == [0]


def test_at_most_400_samples_are_being_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[SampleJob] = []
    monkeypatch.setattr(SampleJob, "_submit", lambda job: submitted.append(job))
    with world() as (_, client):
        sampler = sampler_of(client)
        futures = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(450)]
        until(lambda: len(submitted) == 401)
        until(lambda: len(submitted[0]._scheduler) == 48)  # the worker that admits has one more
        for future in futures:
            future.cancel()
        assert len(submitted) == 401


def test_a_sample_waits_for_a_blocked_account() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/asample", Answer(402, {"detail": "pay"}), Answer(402, {"detail": "pay"}))
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        assert [asked.json()["seq_id"] for asked in stub.asked("/asample")] == [0, 0, 0]
        assert sum(paused(client)) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("state", ["paused_capacity", "paused_rate_limit"])
def test_no_sample_is_sent_into_a_paused_queue(state: str) -> None:
    said = Answer(body={"type": "try_again", "queue_state": state, "queue_state_reason": "busy"})
    with world() as (stub, client):
        heard: list[Any] = []
        client.holder.notices.listen(heard.append)
        sampler = sampler_of(client)
        stub.script("/retrieve_future", said)
        first = sampler.sample(PROMPT, 1, ONE_TOKEN)
        until(lambda: heard)
        assert client.holder.server.ready().scheduler.gate.limiter._free is None
        second = sampler.sample(PROMPT, 1, ONE_TOKEN)
        assert [future.result(PATIENCE_S).sequences[0].tokens for future in (first, second)] == [[6], [6]]
        assert sum(paused(client)) > 0.999
        assert (heard[0].state, heard[0].reason, heard[0].request_type) == (state, "busy", "Sample")


def test_a_sample_the_server_stumbles_over() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/asample", *[Answer(500, {})] * 3)
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        asked = stub.asked("/asample")
        assert [each.json()["seq_id"] for each in asked] == [0] * 4
        assert len({each.headers["x-idempotency-key"] for each in asked}) == 1
        first_s, second_s, third_s = paused(client)
        assert first_s <= 0.5 < second_s <= 1.0 < third_s <= 2.0


def test_the_servers_wishes_are_heeded_in_all_forms() -> None:
    with world() as (stub, client):
        trainer = client.create_lora_training_client("stub/model").result()
        now_s = 1_700_000_000
        in_two_seconds = {
            "Date": formatdate(now_s, usegmt=True),
            "Retry-After": formatdate(now_s + 2, usegmt=True),
        }
        stub.script(
            "/get_info",
            Answer(503, headers={"Retry-After": "0.3"}),
            Answer(503, headers={"retry-after-ms": "200"}),
            Answer(503, headers=in_two_seconds),
        )
        trainer.get_info()
        for wished_s, pause_s in zip((0.3, 0.2, 2.0), paused(client), strict=True):
            assert wished_s <= pause_s <= 1.1 * wished_s
        asked = stub.asked("/get_info")
        assert [each.headers["x-retry-count"] for each in asked] == ["0", "1", "2", "3"]
        assert len({each.headers["x-idempotency-key"] for each in asked}) == 1


def test_a_proxys_empty_refusals_are_tried_on_new_connections() -> None:
    with world() as (stub, client):
        trainer = client.create_lora_training_client("stub/model").result()
        stub.script("/get_info", Answer(400), Answer(400))
        assert trainer.get_info().model_id == trainer.model_id
        first, second, third = [asked.connection for asked in stub.asked("/get_info")]
        assert len({first, second, third}) == 3
        assert len(paused(client)) == 2


# ------------------------------------------------------------------------------------ all samples in one poll


def test_one_poll_for_three_samples() -> None:
    with world({"sample_use_retrieve_futures": True}, latency_s=0.02, hold_s=1.0) as (stub, client):
        sampler = sampler_of(client)
        futures = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(3)]
        for future in futures:
            future.result(PATIENCE_S)
        ids = sorted(f"req-{n}" for n in range(3))
        told = lambda: {name for poll in stub.asked("/retrieve_futures") for name in retrieved(poll)}  # noqa: E731
        until(lambda: told() == set(ids))
        together = [asked.json() for asked in stub.asked("/retrieve_futures")]
        assert (together[0]["prev_cursor"], together[0]["retrieved_request_ids"]) == (0, [])
        target = {
            "type": "sampling_session",
            "sampling_session_id": "session-0:sample:0",
            "cloned_sampler_id": 0,
        }
        assert all(poll["target"] == target for poll in together)
        cursors = [poll["prev_cursor"] for poll in together]
        assert cursors == sorted(cursors)
        singly = [asked.json() for asked in polls(stub)]
        assert sorted(poll["request_id"] for poll in singly) == ids
        assert not any(poll["allow_metadata_only"] for poll in singly)


def retrieved(poll: Asked) -> list[str]:
    ids: list[str] = poll.json()["retrieved_request_ids"]
    return ids


def test_a_copy_numbers_its_samples_in_a_block_of_its_own() -> None:
    with world({"sample_join_sampling_session": True}) as (stub, client):
        handle = sampler_of(client).get_sampler_handle()
        copy = SamplingClient.from_sampler_handle(handle, api_key="tml-hasty")
        try:
            for _ in range(2):
                copy.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        finally:
            copy.holder.close("success").result(PATIENCE_S)
        assert [asked.json()["seq_id"] for asked in stub.asked("/asample")] == [7_000_000_000, 7_000_000_001]
        assert len(stub.asked("/join_sampling_session")) == 1


def test_a_copy_buys_tokens_of_its_own() -> None:
    with world({"pjwt_auth_enabled": True}) as (stub, client):
        handle = sampler_of(client).get_sampler_handle()
        copy = SamplingClient.from_sampler_handle(handle, api_key="tml-of-the-copy")
        try:
            copy.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        finally:
            copy.holder.close("success").result(PATIENCE_S)
        bought_with = [asked.headers["x-api-key"] for asked in stub.asked("/auth/token")]
        assert bought_with == ["tml-hasty", "tml-of-the-copy"]
        assert stub.asked("/asample")[0].headers["x-api-key"].startswith("eyJ")
        assert len(stub.asked("/client/config")) == 1


def test_a_cancelled_sample_is_cancelled_at_the_server() -> None:
    with world(dynamic_config={"sample_cancel_enabled": True}, latency_s=3600.0) as (stub, client):
        future = sampler_of(client).sample(PROMPT, 1, ONE_TOKEN)
        until(lambda: polls(stub))
        assert future.cancel()
        until(lambda: stub.asked("/cancel_future"))
        assert [asked.json() for asked in stub.asked("/cancel_future")] == [{"request_id": "req-0"}]


# ------------------------------------------------------------------------------------ the end


def finishes(stub: Stub) -> list[Any]:
    return [asked.json() for asked in list(stub.log) if asked.path.endswith("/finish")]


def test_closing_twice() -> None:
    with world() as (stub, client):
        sampler_of(client)
        first = client.close("success", "done")
        first.result(PATIENCE_S)
        assert client.close("errored") is first
        assert finishes(stub) == [{"reason": {"type": "success"}, "detail": "done"}]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "interrupted"), (SystemExit(1), "interrupted"), (KeyError("x"), "errored")],
    ids=["ctrl-c", "exit", "error"],
)
def test_leaving_a_with_block_by_an_exception(error: BaseException, reason: str) -> None:
    def leave(stub: Stub) -> None:
        with hasty_service(stub) as client:
            sampler_of(client)
            raise error

    with StubServer(config=FLAGS) as stub:
        with pytest.raises(type(error)):
            leave(stub)
        assert finishes(stub) == [{"reason": {"type": reason}, "detail": None}]


def test_a_status_that_means_no_is_an_error_of_its_own_kind() -> None:
    with world() as (stub, client), pytest.raises(APIStatusError) as raised:
        result_of_step(client, stub, Answer(410, {"detail": "gone"}))
    assert raised.value.status_code == 410
    assert raised.value.request_id == "req-1"


def test_passes_of_many_chunks_may_be_called_without_waiting() -> None:
    """More chunks than the limit of bytes under way admits at once, behind calls that are still sent."""
    datum = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    with (
        StubServer(config={"fwdbwd_max_chunk_len": 1}) as stub,
        ServiceClient(base_url=stub.url, api_key="tml-key") as service,
    ):
        trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
        calls = [trainer.forward_backward([datum] * count, "cross_entropy") for count in (1, 20, 1, 20, 20)]
        assert [len(call.result(timeout=60).loss_fn_outputs) for call in calls] == [1, 20, 1, 20, 20]
