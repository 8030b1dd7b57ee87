"""Requests of public methods: the method name in their header, and a rejected token."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.hasty import FLAGS, quick_service
from support.tinker_stub import Answer, Asked, Behaviour, Stub, StubServer

from tinker_sync import types
from tinker_sync.clients.rest import RestClient
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import AuthenticationError

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)
DATA = [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
UNNAMED = {
    *("/client/config", "/client/dynamic_config", "/create_session", "/session_heartbeat"),
    *("/telemetry", "/retrieve_futures", "/cancel_future"),
}
REJECTED = {"WWW-Authenticate": 'Bearer realm="tinker", error="invalid_token"'}


class Rejecting(Stub):
    """A stub that exchanges keys for numbered tokens, and rejects the tokens that the test has revoked."""

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(behaviour)
        self.exchanges = 0
        self.revoked = 0
        """Tokens up to this number are rejected."""
        self.revoke_after = ""
        """The path after whose next answer all tokens are revoked."""

    def on_auth_token(self, asked: Asked) -> Any:
        self.exchanges += 1
        claims = json.dumps({"exp": 9_999_999_999, "iat": 1_700_000_000, "number": self.exchanges})
        return {"jwt": f"eyJ.{base64.urlsafe_b64encode(claims.encode()).decode().rstrip('=')}.sig"}

    def number_of(self, asked: Asked) -> int:
        _, claims, *_ = [*asked.headers.get("x-api-key", "").split("."), "", ""]
        if not claims:
            return 10**9  # the request has the key in place of a token
        number: int = json.loads(base64.urlsafe_b64decode(claims + "=="))["number"]
        return number

    def revoke(self) -> None:
        self.revoked = self.exchanges

    async def _answer_as_usual(self, asked: Asked, name: str) -> Answer:
        if self.number_of(asked) <= self.revoked:
            return Answer(401, {"detail": "the token is over"}, headers=REJECTED)
        answer = await super()._answer_as_usual(asked, name)
        if name == self.revoke_after:
            self.revoke_after = ""
            self.revoke()
        return answer


@contextmanager
def world(
    flags: dict[str, Any] | None = None, kind: type[Stub] = Stub, **behaviour: Any
) -> Iterator[tuple[Any, ServiceClient]]:
    stub = kind(Behaviour(config={**FLAGS, **(flags or {})}, **behaviour))
    with StubServer(stub), quick_service(base_url=stub.url, api_key="tml-requests") as client:  # type: ignore[attr-defined]
        yield stub, client


def sampler_of(client: ServiceClient) -> SamplingClient:
    return client.create_sampling_client(base_model="stub/model").result()


# ------------------------------------------------------------------------------------ names


def names(stub: Stub, since: int = 0) -> set[tuple[str, str]]:
    """Return the pairs of a request's path and the public method in its header, from request `since` on."""
    return {
        (asked.path.removeprefix("/api/v1"), asked.headers.get("x-sdk-method", ""))
        for asked in list(stub.log)[since:]
    }


def test_every_request_names_the_public_method_that_causes_it() -> None:
    with world() as (stub, client):
        trainer = client.create_lora_training_client("stub/model").result()
        sampler = sampler_of(client)
        stub.await_asked("/get_server_capabilities")  # whether it lists the model, in the background
        assert names(stub) >= {
            *((path, "") for path in ("/client/config", "/client/dynamic_config", "/create_session")),
            ("/create_model", "ServiceClient.create_lora_training_client"),
            ("/retrieve_future", "ServiceClient.create_lora_training_client"),
            ("/create_sampling_session", "ServiceClient.create_sampling_client"),
        }
        assert {name for path, name in names(stub) if path not in UNNAMED} == {
            "ServiceClient.create_lora_training_client",
            "ServiceClient.create_sampling_client",
        }
        for call, path, name in (
            (
                lambda: trainer.forward_backward(DATA, "cross_entropy"),
                "/forward_backward",
                "TrainingClient.forward_backward",
            ),
            (lambda: trainer.optim_step(types.AdamParams()), "/optim_step", "TrainingClient.optim_step"),
            (lambda: trainer.save_state("a"), "/save_weights", "TrainingClient.save_state"),
            (lambda: sampler.sample(PROMPT, 1, ONE_TOKEN), "/asample", "SamplingClient.sample"),
        ):
            since = len(stub.log)
            call().result(PATIENCE_S)
            assert names(stub, since) == {(path, name), ("/retrieve_future", name)}
        assert {asked.headers.get("x-sdk-version") for asked in stub.asked("/asample")} == {"0.38.0"}


def test_a_call_inside_a_public_method_does_not_change_the_name() -> None:
    with world() as (stub, client):
        since = len(stub.log)
        RestClient(client.holder).get_checkpoint_archive_url_from_tinker_path(
            "tinker://run/weights/a"
        ).exception(PATIENCE_S)
        asked = {each for each in names(stub, since) if each[1]}
        assert {name for _, name in asked} == {"RestClient.get_checkpoint_archive_url_from_tinker_path"}


def test_twins_keep_their_own_name() -> None:
    with world() as (stub, client):

        async def main() -> None:
            trainer = await client.create_lora_training_client_async("stub/model")
            sampler = await client.create_sampling_client_async(base_model="stub/model")
            await sampler.sample_async(PROMPT, 1, ONE_TOKEN)
            await (await trainer.optim_step_async(types.AdamParams()))
            await RestClient(client.holder).get_session_async("session-0")

        asyncio.run(main())
        assert {
            ("/create_model", "ServiceClient.create_lora_training_client_async"),
            ("/create_sampling_session", "ServiceClient.create_sampling_client_async"),
            ("/asample", "SamplingClient.sample_async"),
            ("/retrieve_future", "SamplingClient.sample_async"),
            ("/optim_step", "TrainingClient.optim_step_async"),
            ("/sessions/session-0", "RestClient.get_session_async"),
        } <= names(stub)


def test_both_passes_of_a_custom_loss_bear_its_name() -> None:
    from tinker_sync.losses import numpy_loss

    @numpy_loss
    def loss(data: Any, logprobs: Any) -> Any:
        return 0.0, {}, [0 * each for each in logprobs]

    with world() as (stub, client):
        trainer = client.create_lora_training_client("stub/model").result()
        stub.await_asked("/get_server_capabilities")  # whether it lists the model, in the background
        since = len(stub.log)
        trainer.forward_backward_custom(DATA, loss).result(PATIENCE_S)
        name = "TrainingClient.forward_backward_custom"
        assert names(stub, since) == {("/forward_backward", name), ("/retrieve_future", name)}
        assert len(stub.asked("/forward_backward")) == 2


def test_what_the_client_does_by_itself_bears_no_name() -> None:
    with world({"sample_use_retrieve_futures": True}) as (stub, client):
        sampler_of(client).sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        stub.await_asked("/retrieve_futures")
    assert {path for path, name in names(stub) if not name} <= UNNAMED
    assert {path for path, name in names(stub) if name} & UNNAMED == set()
    finished = [name for path, name in names(stub) if path.endswith("/finish")]
    assert finished == ["ServiceClient.close"]


# ------------------------------------------------------------------------------------ rejected tokens

TOKENS = {"pjwt_auth_enabled": True}
Act = Callable[[ServiceClient, TrainingClient, SamplingClient], Any]
ACTS: list[tuple[str, Act]] = [
    ("/forward_backward", lambda _s, t, _m: t.forward_backward(DATA, "cross_entropy")),
    ("/optim_step", lambda _s, t, _m: t.optim_step(types.AdamParams())),
    ("/save_weights", lambda _s, t, _m: t.save_state("a")),
    ("/asample", lambda _s, _t, m: m.sample(PROMPT, 1, ONE_TOKEN)),
    ("/sessions/session-0", lambda s, _t, _m: RestClient(s.holder).get_session("session-0")),
]


@pytest.mark.parametrize(("path", "act"), ACTS, ids=[path for path, _ in ACTS])
def test_a_call_whose_token_is_rejected_is_sent_once_more(path: str, act: Act) -> None:
    with world(TOKENS, Rejecting) as (stub, client):
        trainer, sampler = client.create_lora_training_client("stub/model").result(), sampler_of(client)
        assert stub.exchanges == 1
        stub.revoke()
        act(client, trainer, sampler).result(PATIENCE_S)
        first, second = stub.asked(path)
        assert first.body == second.body  # the same number
        assert first.headers.get("x-idempotency-key") == second.headers.get("x-idempotency-key")
        assert first.headers["x-retry-count"] == second.headers["x-retry-count"] == "0"
        assert stub.exchanges == 2


@pytest.mark.parametrize(("path", "act"), ACTS[:4], ids=[path for path, _ in ACTS[:4]])
def test_a_poll_whose_token_is_rejected_is_sent_once_more(path: str, act: Act) -> None:
    with world(TOKENS, Rejecting) as (stub, client):
        trainer, sampler = client.create_lora_training_client("stub/model").result(), sampler_of(client)
        polls = len(stub.asked("/retrieve_future"))
        stub.revoke_after = path
        act(client, trainer, sampler).result(PATIENCE_S)
        assert len(stub.asked(path)) == 1
        first, second = stub.asked("/retrieve_future")[polls:]
        assert first.body == second.body
        assert stub.exchanges == 2


@pytest.mark.parametrize("kind", [Rejecting, Stub], ids=["other tokens", "the same token again"])
@pytest.mark.parametrize(("path", "act"), ACTS[-2:], ids=[path for path, _ in ACTS[-2:]])
def test_a_call_whose_new_token_is_rejected_too_fails(kind: type[Stub], path: str, act: Act) -> None:
    with world(TOKENS, kind) as (stub, client):
        trainer, sampler = client.create_lora_training_client("stub/model").result(), sampler_of(client)
        challenge = {"www-authenticate": 'Bearer error="invalid_token"'}
        stub.script(path, *[Answer(401, {"detail": "no"}, headers=challenge)] * 5)
        assert isinstance(act(client, trainer, sampler).exception(PATIENCE_S), AuthenticationError)
        assert len(stub.asked(path)) == 2


def test_samples_with_a_rejected_token_share_one_exchange() -> None:
    """Twenty samples are sent with a revoked token. The client exchanges its key only once more."""
    with world(TOKENS, Rejecting) as (stub, client):
        sampler = sampler_of(client)
        stub.revoke()
        futures = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(20)]
        for future in futures:
            future.result(PATIENCE_S)
        assert stub.exchanges == 2


# ------------------------------------------------------------------------------------ retries


def test_a_training_call_goes_on_though_the_server_asks_for_no_retry() -> None:
    unwished = {"x-should-retry": "false"}
    with world() as (stub, client):
        trainer = client.create_lora_training_client("stub/model").result()
        stub.script("/optim_step", *[Answer(503, {"detail": "soon"}, headers=unwished)] * 3)
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        assert len(stub.asked("/optim_step")) == 4


def test_creations_go_on_though_the_server_asks_for_no_retry() -> None:
    unwished = {"x-should-retry": "false"}
    with world() as (stub, client):
        for path in ("/create_session", "/create_model"):
            stub.script(path, Answer(500, {"detail": "soon"}, headers=unwished))
        client.create_lora_training_client("stub/model").result()
        assert len(stub.asked("/create_session")) == len(stub.asked("/create_model")) == 2


def test_no_single_failure_ends_a_client_though_the_server_asks_for_no_retry() -> None:
    once = Answer(500, {"detail": "soon"}, headers={"x-should-retry": "false"})
    stub = Stub(Behaviour(config=FLAGS))
    for path in ("/client/config", "/create_sampling_session", "/asample", "/checkpoints", "/copy_weights"):
        stub.script(path, once)
    with StubServer(stub), quick_service(base_url=stub.url, api_key="tml-requests") as client:  # type: ignore[attr-defined]
        sampler_of(client).sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        rest = client.create_rest_client()
        rest.list_user_checkpoints().result(PATIENCE_S)
        rest.copy_weights("tinker://run-1/weights/a", "p-1").result(PATIENCE_S)
    for path in ("/client/config", "/create_sampling_session", "/asample", "/checkpoints", "/copy_weights"):
        assert len(stub.asked(path)) == 2


def test_a_server_that_forbids_retries_gets_each_sample_under_one_number() -> None:
    with world({"sample_no_retries": True}) as (stub, client):
        sampler = sampler_of(client)
        stub.script("/retrieve_future", Answer(410, {"detail": "gone"}))
        assert getattr(sampler.sample(PROMPT, 1, ONE_TOKEN).exception(PATIENCE_S), "status_code", 0) == 410
        assert len(stub.asked("/asample")) == 1
        stub.script("/retrieve_future", Answer(410, {"detail": "gone"}))
        sampler.compute_logprobs(PROMPT).exception(PATIENCE_S)
        assert len(stub.asked("/asample")) == 3  # requests for scores are repeated


# ------------------------------------------------------------------------------------ the end


def test_retrieved_samples_are_acknowledged_before_the_client_closes() -> None:
    with world({"sample_use_retrieve_futures": True}, latency_s=3600.0) as (stub, client):
        sampler = sampler_of(client)
        pending = sampler.sample(PROMPT, 1, ONE_TOKEN)
        stub.await_asked("/retrieve_futures")  # so the stub has read the time that the sample takes
        stub.behaviour.latency_s = 0.0
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        stub.await_asked("/retrieve_futures", 2)
        retrieved = json.loads(stub.asked("/retrieve_future")[0].body)["request_id"]
        client.close().result(PATIENCE_S)
        assert pending.exception(PATIENCE_S) is not None
    acknowledged = [asked.json() for asked in stub.asked("/retrieve_futures") if "timeout" in asked.json()]
    assert acknowledged[-1]["timeout"] == 0.0
    assert retrieved in acknowledged[-1]["retrieved_request_ids"]
    last = max(at for at, path in enumerate(stub.paths()) if path == "/retrieve_futures")
    assert stub.paths()[last + 1].endswith("/finish")


def test_a_client_sends_nothing_but_calls() -> None:
    with ServiceClient(api_key="tml-requests") as hosted:
        assert hosted.get_telemetry() is None  # type: ignore[func-returns-value]


# ------------------------------------------------------------------------------------ handles


def decoded(handle: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(handle))


def test_a_handle_names_the_base_model_of_the_run_where_the_server_describes_no_samplers() -> None:
    with world() as (stub, client):
        sampler = client.create_sampling_client(model_path="tinker://run/sampler_weights/a").result()
        stub.script("/samplers/session-0:sample:0", Answer(404, {"detail": "no"}))
        assert decoded(sampler.get_sampler_handle())["base_model"] == "stub/model"


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_handle_names_no_base_model_where_the_server_has_no_such_call(status: int) -> None:
    with world() as (stub, client):
        sampler = client.create_sampling_client(model_path="tinker://run/sampler_weights/a").result()
        for path in ("/samplers/session-0:sample:0", "/training_runs/run", "/get_info"):
            stub.script(path, *[Answer(status, {"detail": "no"})] * 2)
        assert decoded(sampler.get_sampler_handle())["base_model"] == ""
        copy = SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-requests")
        copy.holder.close("success").result(PATIENCE_S)


def test_handles_of_every_version_are_read() -> None:
    with world() as (_, client):
        ours = decoded(sampler_of(client).get_sampler_handle())
        without = {name: value for name, value in ours.items() if name != "base_model"}
        for state in (ours, without, {**ours, "base_model": None}, {**ours, "of tomorrow": [1]}):
            handle = base64.urlsafe_b64encode(json.dumps(state).encode()).decode()
            copy = SamplingClient.from_sampler_handle(handle, api_key="tml-requests")
            try:
                assert copy.sampling_session_id == "session-0:sample:0"
                assert decoded(copy.get_sampler_handle())["base_model"] == "stub/model"
            finally:
                copy.holder.close("success").result(PATIENCE_S)


# ------------------------------------------------------------------------------------ prompts


def test_a_prompt_of_plain_data_after_a_model_input_is_sent_like_it() -> None:
    plain: Any = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    with world() as (stub, client):
        sampler = sampler_of(client)
        for prompt in (PROMPT, plain, PROMPT):
            sampler.sample(prompt, 1, ONE_TOKEN).result(PATIENCE_S)
        assert [asked.json()["prompt"] for asked in stub.asked("/asample")] == [plain] * 3
