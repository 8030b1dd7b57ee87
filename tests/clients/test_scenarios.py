"""Scenarios that a client of this protocol must handle, each run by the whole client against a stub.

Pauses take no time, and the tests check their lengths; see `support/hasty.py`. The values of reduced metrics
are in `tests/runtime/test_answers.py`.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.crowd import until
from support.hasty import number_of, paused, sampler_of, trainer_of, world
from support.raising import room_for
from support.tinker_stub import Answer, Asked, Stub, StubServer

from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import (
    DeadlineError,
    UnprocessableEntityError,
)
from tinker_sync.runtime.admission import Turn

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)


def data(count: int) -> list[types.Datum]:
    return [
        types.Datum(
            types.ModelInput.from_ints([n, n + 1]), {"target_tokens": [n + 1, n + 2], "weights": [1.0, 1.0]}
        )
        for n in range(count)
    ]


def training_order(stub: Stub) -> list[int]:
    names = ("/forward_backward", "/optim_step", "/save_weights")
    return [number_of(asked) for asked in list(stub.log) if asked.path.removeprefix("/api/v1") in names]


def polls(stub: Stub) -> list[Asked]:
    return stub.asked("/retrieve_future")


# ------------------------------------------------------------------------------------ training order


@pytest.mark.parametrize(
    ("parallel", "batches"),
    [(True, [{2, 3, 4}, {1}, {5}, {7}, {6}]), (False, [{1}, {2}, {3}, {4}, {5}, {6}, {7}])],
    ids=["parallel", "serial"],
)
def test_training_calls_arrive_in_order(parallel: bool, batches: list[set[int]]) -> None:
    """The first of parallel chunks arrives last. If chunks are serial, all numbers arrive in order."""
    with world({"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": parallel}) as (stub, client):
        trainer = trainer_of(client)
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
        trainer = trainer_of(client)
        stub.script("/forward_backward", *[refuse_number(2)] * 4)
        passed = trainer.forward_backward(data(7), "cross_entropy")
        with pytest.raises(UnprocessableEntityError, match="1 of the 4"):
            passed.result(PATIENCE_S)
        assert trainer.optim_step(types.AdamParams()).result(PATIENCE_S).metrics == {"step:max": 2.0}
        assert training_order(stub) == [1, 2, 2]


# ------------------------------------------------------------------------------------ results


# ------------------------------------------------------------------------------------ submits


@pytest.mark.parametrize(("tokens", "pauses_s"), [(3, 0.04 + 0.07), (20_000, 5.0 + 5.0)])
def test_a_sample_that_comes_too_soon_keeps_its_number(tokens: int, pauses_s: float) -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/asample", Answer(429), Answer(429))
        prompt = types.ModelInput.from_ints(list(range(tokens)))
        sampler.sample(prompt, 1, ONE_TOKEN).result(PATIENCE_S)
        assert [asked.json()["seq_id"] for asked in stub.asked("/asample")] == [0, 0, 0]
        assert sum(paused(client)) == pytest.approx(pauses_s, abs=0.05)


def test_an_admitted_sample_waits_if_the_server_refuses_another_one_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_pass, refused = Turn.may_pass, []

    def refuse_another_before(turn: Turn) -> bool:
        if not refused:
            refused.append(turn._admission.gate.limiter)
            refused[0].close_for(3)
        return may_pass(turn)

    monkeypatch.setattr(Turn, "may_pass", refuse_another_before)
    with world() as (stub, client):
        sampler_of(client).sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        assert sum(paused(client)) == pytest.approx(3.0, abs=0.1)
        assert [asked.json()["seq_id"] for asked in stub.asked("/asample")] == [0]


def test_few_samples_are_sent_at_first_and_at_most_400_at_once() -> None:
    with room_for(1000), world() as (stub, client):
        sampler = sampler_of(client)
        release = stub.hold("/asample", 100)
        first = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(500)]
        until(lambda: sum(future.status().state == "queued" for future in first) == 436)
        assert len(stub.await_asked("/asample", 64)) == 64
        release.set()
        for future in first:
            future.result(PATIENCE_S)
        stub.script("/asample", *[Answer(status=0)] * 450)
        more = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(450)]
        until(lambda: sum(future.status().state == "queued" for future in more) == 50)
        assert len(stub.await_asked("/asample", 900)) == 900


def queue_paused(state: str) -> Answer:
    return Answer(body={"type": "try_again", "queue_state": state, "queue_state_reason": "busy"})


@pytest.mark.parametrize("state", ["paused_capacity", "paused_rate_limit"])
def test_no_sample_is_sent_into_a_paused_queue(state: str) -> None:
    with world() as (stub, client):
        heard: list[Any] = []
        client.holder.notices.listen(heard.append)
        sampler = sampler_of(client)
        stub.script("/retrieve_future", queue_paused(state))
        first = sampler.sample(PROMPT, 1, ONE_TOKEN)
        until(lambda: heard)
        second = sampler.sample(PROMPT, 1, ONE_TOKEN)
        assert [future.result(PATIENCE_S).sequences[0].tokens for future in (first, second)] == [[6], [6]]
        assert sum(paused(client)) > 0.999
        assert (heard[0].state, heard[0].reason, heard[0].request_type) == (state, "busy", "Sample")


@pytest.mark.parametrize("state", ["paused_capacity", "paused_rate_limit"])
def test_samples_in_a_paused_queue_do_not_starve_those_of_another_model(state: str) -> None:
    """The server reports the pause to each of 40 samples with each poll, and never works on them."""
    release, stuck_ids, count = threading.Event(), set(), 40

    def poll(asked: Asked) -> Answer | None:
        request_id = asked.json()["request_id"]
        if not release.is_set():
            stuck_ids.add(request_id)
        if request_id not in stuck_ids:
            return None
        said = queue_paused(state)
        said.gate, said.delay_s = release, 0.25
        return said

    with StubServer() as stub, ServiceClient(base_url=stub.url, api_key="tml-x") as client:  # type: ignore[attr-defined]
        sampler, other = sampler_of(client), sampler_of(client)
        other.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        heard: list[Any] = []
        client.holder.notices.listen(heard.append)
        stub.script("/retrieve_future", *[poll] * 100_000)
        stuck = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(count)]
        until(lambda: len(stuck_ids) == count)
        release.set()
        until(lambda: len(heard) >= count)
        for _ in range(2):
            assert other.sample(PROMPT, 1, ONE_TOKEN).result(20.0).sequences[0].tokens == [6]
        for future in stuck:
            future.cancel()


def test_a_paused_model_holds_its_own_samples_back_and_sends_them_in_order_afterwards() -> None:
    with StubServer() as stub, ServiceClient(base_url=stub.url, api_key="tml-x") as client:  # type: ignore[attr-defined]
        sampler, other = sampler_of(client), sampler_of(client)
        other.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        line = sampler._line
        line.pause.begin(client.holder.clock, 3600.0)
        held = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(10)]
        late = sampler.sample(PROMPT, 1, ONE_TOKEN, deadline=0.05)
        other.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        with pytest.raises(DeadlineError, match="no capacity"):
            late.result(PATIENCE_S)
        assert len(stub.asked("/asample")) == 2
        line.pause.begin(client.holder.clock, 0.0)
        machinery = client.holder.server.ready()
        client.holder.server.flows.soon(machinery.admission._end_pause, line.pause)
        for future in held:
            future.result(PATIENCE_S)


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


# ------------------------------------------------------------------------------------ progress


@pytest.mark.parametrize("parallel", [False, True])
def test_the_status_of_a_call_is_that_of_its_requests(parallel: bool) -> None:
    ready = threading.Event()
    polled: list[str] = []

    def poll(asked: Asked) -> Answer:
        polled.append(asked.headers["x-tinker-request-type"])
        first = polled[-1] == "ForwardBackward" and polled.count("ForwardBackward") == 1
        return queue_paused("paused_capacity") if first else Answer(usual=True, gate=ready)

    with world({"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": parallel}) as (stub, client):
        trainer = trainer_of(client)
        before, last = stub.hold("/optim_step"), threading.Event()
        stepped = trainer.optim_step(types.AdamParams())
        passed = trainer.forward_backward(data(2), "cross_entropy")
        stub.await_asked("/optim_step")
        assert (stepped.status().state, passed.status().state) == ("sending", "queued")
        assert (passed.request_id, passed.request_ids, passed.timeline.sending) == (None, (), None)
        stub.script("/retrieve_future", *[poll] * 9)
        stub.script("/forward_backward", Answer(usual=True), Answer(usual=True, gate=last))
        before.set()
        stub.await_asked("/forward_backward", 2)
        until(lambda: polled.count("ForwardBackward") == 2)
        assert stepped.status().state == "waiting"
        assert (passed.status().state, passed.status().reason) == ("paused", "busy")
        assert (len(passed.request_ids), passed.timeline.accepted) == (1, None)
        last.set()
        until(lambda: len(passed.request_ids) == 2)
        with pytest.raises(TimeoutError, match="paused, busy"):
            passed.result(0)
        ready.set()
        passed.result(PATIENCE_S)
        assert (stepped.result(PATIENCE_S).metrics, stepped.status().state) == ({"step:max": 1.0}, "done")
        assert passed.status().state == "done"
        assert passed.request_id == passed.request_ids[0]
        times = passed.timeline
        moments = [times.queued, times.sending, times.accepted, times.completed]
        assert moments == sorted(moments)  # type: ignore[type-var]
        assert times.duration_s == times.completed - times.queued  # type: ignore[operator]
