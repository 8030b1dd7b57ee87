"""Known weak points of the reference client: a test for each, named by its number.

W13, W17 and W27 are in `tests/runtime/test_retrieval.py`. Weak points of decoders, the transport, sessions,
telemetry, types and custom losses are in the folders of these.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.crowd import until
from support.hasty import FLAGS, hasty_service, paused
from support.tinker_stub import PROTO, Answer, Asked, Behaviour, Stub, StubServer, _fields, _pass_output

from tinker_sync import types
from tinker_sync.clients.retry_config import RetryConfig
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import (
    APIConnectionError,
    APIStatusError,
    AuthenticationError,
    BillingError,
    DeadlineError,
    InternalServerError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    TinkerError,
    UnprocessableEntityError,
)

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)
STEP = types.AdamParams()


@contextmanager
def world(
    flags: dict[str, Any] | None = None, kind: type[Stub] = Stub, **behaviour: Any
) -> Iterator[tuple[Stub, ServiceClient]]:
    """Yield a stub of the current service, and a client whose pauses take no time (see `support.hasty`)."""
    stub = kind(Behaviour(config={**FLAGS, **(flags or {})}, **behaviour))
    with StubServer(stub), hasty_service(stub) as client:
        yield stub, client


def data(count: int) -> list[types.Datum]:
    return [
        types.Datum(types.ModelInput.from_ints([n, n + 1]), {"target_tokens": [n + 1, n + 2]})
        for n in range(count)
    ]


def trainer_of(client: ServiceClient) -> TrainingClient:
    return client.create_lora_training_client("stub/model").result(PATIENCE_S)


def sampler_of(client: ServiceClient, **options: Any) -> SamplingClient:
    return client.create_sampling_client(base_model="stub/model", **options).result(PATIENCE_S)


def tokens(response: types.SampleResponse) -> list[int]:
    return response.sequences[0].tokens


def number_of(asked: Asked) -> int:
    if asked.headers["content-type"] == PROTO:
        return int(dict(_fields(asked.body))[2])
    return int(asked.json()["seq_id"])


class Gated(Stub):
    """A stub that holds optimizer steps and saves for samplers until the test sets its event."""

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(behaviour)
        self.gate = threading.Event()

    async def on_optim_step(self, asked: Asked) -> Any:
        await self._wait()
        return super().on_optim_step(asked)

    async def on_save_weights_for_sampler(self, asked: Asked) -> Any:
        await self._wait()
        return super().on_save_weights_for_sampler(asked)

    async def _wait(self) -> None:
        while not self.gate.is_set():
            await asyncio.sleep(0.001)


# ------------------------------------------------------------------------------------ ordering and futures


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_w01_a_refused_chunk_hangs_nobody(refused: int, parallel: bool) -> None:
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


def test_w02_a_call_cancelled_in_the_queue_leaves_no_hole() -> None:
    with world(kind=Gated) as (stub, client):
        assert isinstance(stub, Gated)
        trainer = trainer_of(client)
        first, second, third = [trainer.optim_step(STEP) for _ in range(3)]
        until(lambda: stub.asked("/optim_step"))
        assert not first.cancel()
        assert second.cancel()
        stub.gate.set()
        assert first.result(PATIENCE_S).metrics == {"step:max": 1.0}
        assert third.result(PATIENCE_S).metrics == {"step:max": 2.0}


def test_w03_what_cannot_be_built_takes_no_number() -> None:
    pointer = types.ImageAssetPointerChunk(format="png", location="s3://somewhere", expected_tokens=1)
    unsendable = types.Datum(types.ModelInput(chunks=[pointer]), {"target_tokens": [1]})
    with world() as (_, client):
        trainer = trainer_of(client)
        for wrong in ([unsendable], [*data(1), unsendable], []):
            with pytest.raises(InvalidInputError):
                trainer.forward_backward(wrong, "cross_entropy")
        assert trainer.optim_step(STEP).result(PATIENCE_S).metrics == {"step:max": 1.0}


def test_w04_waiting_never_cancels() -> None:
    with world(kind=Gated) as (stub, client):
        assert isinstance(stub, Gated)
        future = trainer_of(client).optim_step(STEP)
        with pytest.raises(TimeoutError):
            future.result(0.01)
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(future.result_async(0.01))
        stub.gate.set()
        assert future.result(PATIENCE_S).metrics == {"step:max": 1.0}
        assert future.result() is future.result()


def test_w05_an_ephemeral_save_repeats_the_same_request() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        stub.script("/save_weights_for_sampler", Answer(503), Answer(503), Answer(abort="before"))
        sampler = trainer.save_weights_and_get_sampling_client().result()
        asked = stub.asked("/save_weights_for_sampler")
        assert len(asked) == 4
        assert len({each.body for each in asked}) == 1
        assert asked[0].json()["sampling_session_seq_id"] == 0
        assert tokens(sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)) == [6]


class OddMetrics(Stub):
    """A stub whose answer to each chunk of a pass has different metrics, some with unknown reductions."""

    def _passed(self, given: list[Any]) -> Any:
        number = self.count("odd")
        rows = [[-1.0] * len(datum["loss_fn_inputs"]["target_tokens"]["data"]) for datum in given]
        metrics = {
            "loss": 1.0 + number,
            "a:b:c": 2.0,
            "x:sum": 3.0,
            f"only_{number}:mean": 4.0,
            "new:median": 5.0,
        }
        return self.promise("forward_backward", _pass_output(rows, metrics), content_type=PROTO)


def test_w08_no_metric_costs_a_result() -> None:
    with world({"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": False}, kind=OddMetrics) as (_, client):
        output = trainer_of(client).forward_backward(data(2), "cross_entropy").result(PATIENCE_S)
        assert len(output.loss_fn_outputs) == 2
        assert output.metrics["x:sum"] == 6.0
        assert (output.metrics["loss"], output.metrics["loss_1"]) == (1.0, 2.0)
        assert {"a:b:c", "new:median", "only_0:mean", "only_1:mean"} <= set(output.metrics)


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("/create_session", sampler_of),
        ("/create_sampling_session", sampler_of),
        ("/create_model", trainer_of),
    ],
)
def test_w09_what_begins_is_tried_again_too(path: str, use: Callable[[ServiceClient], Any]) -> None:
    with world() as (stub, client):
        stub.script(path, *[Answer(503)] * 4, Answer(abort="before"))
        use(client)
        asked = stub.asked(path)
        assert len(asked) == 6
        assert len({(each.body, each.headers["x-idempotency-key"]) for each in asked}) == 1


def test_w09_a_sampler_in_the_middle_of_a_run_waits_for_a_blocked_account() -> None:
    with world() as (stub, client):
        trainer_of(client)
        stub.script("/create_sampling_session", *[Answer(402, {"detail": "pay"})] * 2)
        sampler_of(client)
        assert paused(client) == [5.0, 5.0]


@pytest.mark.parametrize("path", ["/create_session", "/create_model"])
def test_w09_a_blocked_account_is_reported_before_any_work(path: str) -> None:
    with world() as (stub, client):
        stub.script(path, Answer(402, {"detail": "no credit left"}))
        with pytest.raises(BillingError, match="no credit left"):
            trainer_of(client)
        assert paused(client) == []


def test_w10_tokens_for_weights_go_as_they_were_given() -> None:
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


def test_w12_ids_of_sequences_are_optional() -> None:
    with world(sequence_ids=False) as (_, client):
        response = sampler_of(client).sample(PROMPT, 2, ONE_TOKEN).result(PATIENCE_S)
        assert [sequence.sequence_id for sequence in response.sequences] == [None, None]


# ------------------------------------------------------------------------------------ retries and load


def test_w16_results_are_not_asked_for_without_pause_or_end() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        stub.log.clear()
        stub.script("/retrieve_future", *[Answer(503)] * 200)
        with pytest.raises(InternalServerError):
            trainer.optim_step(STEP).result(PATIENCE_S)
        assert len(stub.asked("/retrieve_future")) < 25
        assert 200 < sum(paused(client)) <= 300


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AuthenticationError),
        (403, PermissionDeniedError),
        (404, NotFoundError),
        (410, APIStatusError),
        (422, UnprocessableEntityError),
    ],
)
def test_w18_failures_of_results_have_types(status: int, kind: type[APIStatusError]) -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        stub.script("/retrieve_future", *[Answer(status, {"detail": "no"})] * 5)
        with pytest.raises(kind, match="no") as raised:
            trainer.optim_step(STEP).result(PATIENCE_S)
        assert raised.value.status_code == status
        assert raised.value.request_id == "req-1"
        assert isinstance(raised.value, TinkerError)


def test_w19_servers_are_believed_when_they_ask_for_more_than_a_minute() -> None:
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


@pytest.fixture
def nobody() -> Iterator[str]:
    """Yield an address that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_w20_failing_takes_no_longer_than_one_wants(nobody: str) -> None:
    with StubServer() as stub:
        stub.url = nobody  # type: ignore[attr-defined]
        for options, most_s in (({"max_retries": 0}, 0.0), ({"deadline": 20.0}, 20.0)):
            with pytest.raises(APIConnectionError), hasty_service(stub, start=False, **options) as client:
                client.get_server_capabilities()
            assert sum(paused(client)) <= most_s


def test_w21_one_key_for_a_call_however_often_it_is_tried() -> None:
    with world() as (stub, client):
        trainer = trainer_of(client)
        stub.script("/save_weights", *[Answer(503)] * 5, Answer(abort="before"))
        trainer.save_state("a").result(PATIENCE_S)
        trainer.save_state("b").result(PATIENCE_S)
        keys = [asked.headers["x-idempotency-key"] for asked in stub.asked("/save_weights")]
        assert len(keys) == 8
        assert len(set(keys[:-1])) == 1
        assert keys[-1] != keys[0]


def test_w22_a_known_promise_is_asked_again_and_not_bought_twice() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/retrieve_future", *[Answer(abort="before")] * 5)
        assert tokens(sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)) == [6]
        assert len(stub.asked("/asample")) == 1


def test_w22_samples_are_not_submitted_anew_for_ever() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/retrieve_future", *[Answer(410, {"detail": "gone"})] * 50)
        with pytest.raises(APIStatusError, match="gone"):
            sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        numbers = [asked.json()["seq_id"] for asked in stub.asked("/asample")]
        assert numbers == list(range(10))


def test_w23_one_late_sample_fails_alone_with_the_last_notice() -> None:
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
def test_w24_samples_arrive_without_the_poll_for_all(status: int) -> None:
    with world({"sample_use_retrieve_futures": True}) as (stub, client):
        stub.script("/retrieve_futures", *[Answer(status, {"detail": "no"})] * 50)
        sampler = sampler_of(client)
        futures = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(5)]
        assert [tokens(future.result(PATIENCE_S)) for future in futures] == [[6]] * 5


def test_w25_a_blocked_account_is_reported_at_the_start() -> None:
    with StubServer(config=FLAGS) as stub, hasty_service(stub, start=False) as client:
        stub.script("/client/config", Answer(402, {"detail": "no credit left"}))
        with pytest.raises(BillingError, match="no credit left"):
            client.get_server_capabilities()
        # The failure is not remembered.
        assert client.get_server_capabilities().supported_models


def test_w26_a_session_that_cannot_be_finished_hides_no_error() -> None:
    def leave(stub: Stub) -> None:
        with hasty_service(stub) as client:
            sampler_of(client)
            raise KeyError("mine")

    for status in (404, 400, 403):
        with StubServer(config=FLAGS) as stub:
            stub.script("/sessions/session-0/finish", Answer(status, {"detail": "?"}))
            with pytest.raises(KeyError, match="mine"):
                leave(stub)
            assert any(path.endswith("/finish") for path in stub.paths())


# ------------------------------------------------------------------------------------ secrets


def test_w33_nothing_secret_travels_with_a_sampler() -> None:
    headers = {"Authorization": "Bearer secret-1", "X-Internal-Token": "secret-2", "X-Team": "blue"}
    with StubServer(config=FLAGS) as stub, hasty_service(stub, default_headers=headers) as client:
        sampler = sampler_of(client)
        handle = sampler.get_sampler_handle()
        pickled = pickle.dumps(sampler)
        assert handle.encode() in pickled  # so the check of the handle covers the pickle
        for octets in (pickled, base64.urlsafe_b64decode(handle)):
            for secret in (b"tml-hasty", b"secret-1", b"secret-2"):
                assert secret not in octets
        state = json.loads(base64.urlsafe_b64decode(handle))
        assert state["holder"]["api_key"] is None
        assert state["holder"]["default_headers_overrides"] == {"X-Team": "blue"}
        asked_for = json.loads(base64.urlsafe_b64decode(sampler.get_sampler_handle(include_api_key=True)))
        assert asked_for["holder"]["api_key"] == "tml-hasty"


def test_w33_a_copy_finds_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as (stub, client):
        monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-other-process")
        copy = pickle.loads(pickle.dumps(sampler_of(client)))
        try:
            copy.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        finally:
            copy.holder.close("success").result(PATIENCE_S)
        assert stub.asked("/asample")[0].headers["x-api-key"] == "tml-of-the-other-process"


def test_w35_ids_stay_in_their_segment_of_the_path() -> None:
    odd = "a/../b?c#d e"
    with world() as (stub, client):
        stub.script("/create_sampling_session", Answer(body={"sampling_session_id": odd}))
        assert sampler_of(client).get_base_model() == "stub/model"
        assert stub.log[-1].path == "/api/v1/samplers/a%2F..%2Fb%3Fc%23d%20e"


# ------------------------------------------------------------------------------------ life


def test_w44_a_copy_keeps_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_w45_an_awaited_save_lets_the_loop_run() -> None:
    with world(kind=Gated) as (stub, client):
        assert isinstance(stub, Gated)
        trainer = trainer_of(client)

        async def main() -> SamplingClient:
            saving = asyncio.ensure_future(trainer.save_weights_and_get_sampling_client_async())
            while not stub.asked("/save_weights_for_sampler"):
                await asyncio.sleep(0.001)
            stub.gate.set()  # this line is reached only if the event loop is not blocked
            return await saving

        assert tokens(asyncio.run(main()).sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)) == [6]


def test_w46_connections_a_proxy_disliked_are_not_kept_for_ever() -> None:
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
def test_w47_tags_in_order_once_and_none_empty(
    variable: str, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TAGS", variable)
    with world() as (stub, client):
        sampler_of(client)
        assert stub.asked("/create_session")[0].json()["tags"] == sent


def test_w48_the_round_trip_of_a_sample_is_measured() -> None:
    with world() as (stub, client):
        sampler = sampler_of(client)
        stub.script("/asample", Answer(429, headers={"Retry-After": "3"}))
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        told_s = float(stub.asked("/retrieve_future")[0].headers["x-tinker-create-promise-roundtrip-time"])
        assert 3.0 <= told_s < 10.0


@pytest.mark.parametrize("name", ["load_state", "load_state_with_optimizer"])
def test_w49_deprecated_methods_work_and_warn(name: str) -> None:
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


def test_w59_futures_of_rest_calls_are_standard_futures() -> None:
    with world() as (_, client):
        rest = client.create_rest_client()
        futures = [rest.list_sessions(), rest.get_server_capabilities()]
        done, left = concurrent.futures.wait(futures, timeout=PATIENCE_S)
        assert (done, left) == (set(futures), set())
        assert all(future.done() and future.exception() is None for future in futures)

        async def await_one() -> object:
            return await rest.list_sessions()

        assert asyncio.run(await_one()) == futures[0].result()


def test_w60_a_callback_that_waits_for_a_result_stops_no_other_call() -> None:
    """A call ends, although all workers for callbacks wait in callbacks for results that do not come."""
    with world() as (stub, client):
        sampler, rest = sampler_of(client), client.create_rest_client()
        release = threading.Event()
        stub.script("/sessions", *[Answer(gate=release, usual=True)] * 8)
        waited: list[object] = []
        for _ in range(8):
            sample = sampler.sample(PROMPT, 1, ONE_TOKEN)
            sample.add_done_callback(lambda _: waited.append(rest.list_sessions().result(PATIENCE_S)))
        stub.await_asked("/sessions", 8)
        assert tokens(sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)) == [6]
        release.set()
        until(lambda: len(waited) == 8)
