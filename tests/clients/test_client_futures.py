"""Clients that are created in the background: one object is the client and its future."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.crowd import until
from support.tinker_stub import Answer, Asked, Stub, StubServer

import tinker_sync as tinker
from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import (
    APITimeoutError,
    BadRequestError,
    BudgetExceededError,
    ClientClosedError,
    InvalidInputError,
    NotFoundError,
    UnsupportedByServerError,
)
from tinker_sync.runtime.futures import APIFuture

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)
STEP = types.AdamParams()
PATH = "tinker://run-1/weights/a"
SAMPLER_PATH = "tinker://run-1/sampler_weights/a"
V36 = {"custom_loss_server_side": False, "create_model_via_load_weights": False}
V38 = {"custom_loss_server_side": False}

Make = Callable[[ServiceClient], Any]

WAYS: dict[str, tuple[str, Make]] = {
    "new model": ("/create_model", lambda service: service.create_lora_training_client("stub/model")),
    "from state": ("/load_weights", lambda service: service.create_training_client_from_state(PATH)),
    "from state with optimizer": (
        "/load_weights",
        lambda service: service.create_training_client_from_state_with_optimizer(PATH),
    ),
    "sampler": (
        "/create_sampling_session",
        lambda service: service.create_sampling_client(base_model="stub/model"),
    ),
    "sampler of a training client": (
        "/create_sampling_session",
        lambda service: service.create_lora_training_client("stub/model").create_sampling_client(
            SAMPLER_PATH
        ),
    ),
    "saved sampler": (
        "/save_weights_for_sampler",
        lambda service: service.create_lora_training_client(
            "stub/model"
        ).save_weights_and_get_sampling_client(),
    ),
}
every_way = pytest.mark.parametrize(("path", "make"), WAYS.values(), ids=WAYS)


@contextmanager
def world(config: dict[str, Any] | None = None) -> Iterator[tuple[Stub, ServiceClient]]:
    with StubServer(config=config or V38) as stub, connected(stub) as service:
        yield stub, service


def connected(stub: Stub) -> ServiceClient:
    url: str = stub.url  # type: ignore[attr-defined]
    return ServiceClient(base_url=url, api_key="tml-x", max_retries=0)


@contextmanager
def held(stub: Stub, path: str, answer: Answer | None = None) -> Iterator[threading.Event]:
    """Hold the next request to a path until the block ends, or until the test sets the yielded event."""
    gate = threading.Event()
    script = answer or Answer(usual=True)
    script.gate = gate
    stub.script(path, script)
    try:
        yield gate
    finally:
        gate.set()


def datum(first: int = 1) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints([first, first + 1]), {"target_tokens": [2, 3]})


class TestAtOnce:
    @every_way
    def test_it_is_the_client_and_a_future(self, path: str, make: Make) -> None:
        with world() as (stub, service), held(stub, path) as gate:
            client = make(service)
            kind = SamplingClient if "sampl" in path else TrainingClient
            assert isinstance(client, kind)
            assert isinstance(client, APIFuture)
            assert isinstance(client, concurrent.futures.Future)
            stub.await_asked(path)
            assert not client.done()
            with pytest.raises(TimeoutError):
                client.result(timeout=0)
            gate.set()
            assert client.result(PATIENCE_S) is client
            assert client.future() is client
            assert client.exception() is None

    def test_a_wait_that_runs_out_names_the_request(self) -> None:
        with world() as (stub, service):
            client = service.create_lora_training_client("stub/model").result(PATIENCE_S)
            with held(stub, "/retrieve_future"):
                stepped = client.optim_step(STEP)
                until(lambda: stepped.status().state == "waiting")
                with pytest.raises(TimeoutError, match=rf"\(waiting, request {stepped.request_id}\)"):
                    stepped.result(timeout=0)

    def test_six_creations_are_under_way_together(self) -> None:
        everybody = threading.Event()
        seen: list[int] = []

        def hold(asked: Asked) -> Answer:
            seen.append(asked.json()["model_seq_id"])
            if len(seen) == 6:
                everybody.set()
            return Answer(usual=True, gate=everybody)

        with world() as (stub, service):
            stub.script("/create_model", *[hold] * 6)
            clients = [service.create_lora_training_client("stub/model") for _ in range(6)]
            ids = [client.result(PATIENCE_S).model_id for client in clients]
        assert sorted(seen) == list(range(6))
        assert ids == [f"session-0:train:{number}" for number in range(6)]

    def test_every_way_to_wait(self) -> None:
        async def main(service: ServiceClient) -> list[Any]:
            make = service.create_lora_training_client
            return [
                await make("stub/model"),
                *await asyncio.gather(make("stub/model"), service.create_sampling_client(SAMPLER_PATH)),
                await asyncio.create_task(make("stub/model").coroutine()),
                await make("stub/model").result_async(PATIENCE_S),
                await asyncio.wrap_future(make("stub/model")),
                await service.create_lora_training_client_async("stub/model"),
                await service.create_sampling_client_async(base_model="stub/model"),
            ]

        with world() as (_, service):
            for client in asyncio.run(main(service)):
                assert isinstance(client, (TrainingClient, SamplingClient))
                assert client.done()

    def test_standard_futures_can_be_waited_for_together(self) -> None:
        called: list[Any] = []
        with world() as (_, service):
            clients = [service.create_lora_training_client("stub/model") for _ in range(3)]
            clients[0].add_done_callback(called.append)
            done, waiting = concurrent.futures.wait(clients, PATIENCE_S)
            assert (done, waiting) == (set(clients), set())
            assert {one.result() for one in concurrent.futures.as_completed(clients)} == set(clients)
            # As `asyncio` looks from Python 3.15 on, past the methods of the client.
            assert [concurrent.futures.Future.result(one, 0) for one in clients] == clients
            until(lambda: called == [clients[0]])

    def test_ids_handles_and_pickles_wait_for_the_client(self) -> None:
        with world() as (stub, service), held(stub, "/create_sampling_session") as gate:
            client = service.create_sampling_client(base_model="stub/model")
            stub.await_asked("/create_sampling_session")
            with concurrent.futures.ThreadPoolExecutor() as pool:
                asked = [
                    pool.submit(lambda: client.sampling_session_id),
                    pool.submit(client.get_base_model),
                    pool.submit(pickle.dumps, client),
                ]
                assert concurrent.futures.wait(asked, 0).done == set()
                gate.set()
                assert asked[0].result(PATIENCE_S) == "session-0:sample:0"
                assert asked[1].result(PATIENCE_S) == "stub/model"
                assert client.get_sampler_handle().encode() in asked[2].result(PATIENCE_S)

    def test_numbers_are_drawn_in_the_order_of_the_calls(self) -> None:
        with world() as (stub, service):
            first = service.create_lora_training_client("stub/one")
            second = service.create_lora_training_client("stub/two")
            samplers = [
                first.save_weights_and_get_sampling_client(),
                service.create_sampling_client(SAMPLER_PATH),
            ]
            ids = [client.sampling_session_id for client in samplers]
            second.result(PATIENCE_S)
            numbers = {
                asked.json()["base_model"]: asked.json()["model_seq_id"]
                for asked in stub.asked("/create_model")
            }
        assert numbers == {"stub/one": 0, "stub/two": 1}
        assert ids == ["session-0:sample:0", "session-0:sample:1"]


class TestCallsBefore:
    def test_training_calls_are_sent_in_order_once_there_is_a_model(self) -> None:
        with world({**V38, "fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": False}) as (stub, service):
            with held(stub, "/create_model"):
                trainer = service.create_lora_training_client("stub/model")
                passed = trainer.forward_backward([datum(n) for n in range(3)], "cross_entropy")
                stepped = trainer.optim_step(STEP)
                saved = trainer.save_state("a")
                sampler = trainer.save_weights_and_get_sampling_client()
                sampled = sampler.sample(PROMPT, 1, ONE_TOKEN)
                scored = sampler.compute_logprobs(PROMPT)
                stub.await_asked("/create_model")
                assert not [future for future in (passed, stepped, saved, sampler, sampled) if future.done()]
            assert len(passed.result(PATIENCE_S).loss_fn_outputs) == 3
            assert stepped.result(PATIENCE_S).metrics == {"step:max": 3.0}
            assert saved.result(PATIENCE_S).path
            assert sampled.result(PATIENCE_S).sequences
            assert len(scored.result(PATIENCE_S)) == 3
            sent = [
                path
                for path in stub.paths()
                if path in ("/forward_backward", "/optim_step") or "save" in path
            ]
        assert sent == ["/forward_backward"] * 2 + [
            "/optim_step",
            "/save_weights",
            "/save_weights_for_sampler",
        ]

    def test_a_custom_loss_is_computed_when_there_is_a_model(self) -> None:
        from tinker_sync.losses import numpy_loss

        @numpy_loss
        def loss(_: Any, logprobs: Any) -> Any:
            return 1.0, {}, [entry * 0 for entry in logprobs]

        with world() as (stub, service):
            with held(stub, "/create_model"):
                trainer = service.create_lora_training_client("stub/model")
                passed = trainer.forward_backward_custom([datum()], loss)
                stepped = trainer.optim_step(STEP)
            assert passed.result(PATIENCE_S).metrics["loss:sum"] == 1.0
            assert stepped.result(PATIENCE_S).metrics == {"step:max": 3.0}

    def test_samples_go_in_the_order_of_the_calls(self) -> None:
        with world() as (stub, service):
            with held(stub, "/create_sampling_session"):
                sampler = service.create_sampling_client(base_model="stub/model")
                early = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=n)) for n in (1, 2, 3)]
            sampler.result(PATIENCE_S)
            late = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4))
            concurrent.futures.wait([*early, late], PATIENCE_S)
            sent = {
                asked.json()["seq_id"]: asked.json()["sampling_params"]["max_tokens"]
                for asked in stub.asked("/asample")
            }
        assert sent == {0: 1, 1: 2, 2: 3, 3: 4}

    def test_a_cancelled_one_takes_no_number(self) -> None:
        with world() as (stub, service):
            with held(stub, "/create_model"):
                trainer = service.create_lora_training_client("stub/model")
                passed = trainer.forward_backward([datum()], "cross_entropy")
                stepped = trainer.optim_step(STEP)
                assert passed.cancel()
            assert stepped.result(PATIENCE_S).metrics == {"step:max": 1.0}
            assert not stub.asked("/forward_backward")

    def test_one_that_the_server_cannot_do_leaves_those_behind_it_alone(self) -> None:
        with world({"fwdbwd_max_chunk_len": 8}) as (stub, service):
            with held(stub, "/create_model"):
                trainer = service.create_lora_training_client("stub/model")
                refused = trainer.save_weights_external("a")
                stepped = trainer.optim_step(STEP)
            assert isinstance(refused.exception(PATIENCE_S), UnsupportedByServerError)
            assert stepped.result(PATIENCE_S).metrics == {"step:max": 1.0}

    def test_a_budget_in_force_at_the_call_counts(self) -> None:
        with world() as (stub, service), held(stub, "/create_sampling_session") as gate:
            sampler = service.create_sampling_client(base_model="stub/model")
            with service.budget(tokens=10):
                affordable = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4))
                refused = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4))
            gate.set()
            assert affordable.result(PATIENCE_S).sequences
            assert isinstance(refused.exception(PATIENCE_S), BudgetExceededError)


class TestBadArguments:
    def test_calls_on_a_client_that_is_not_ready(self) -> None:
        with world() as (stub, service), held(stub, "/create_model"):
            trainer = service.create_lora_training_client("stub/model")
            for call in (trainer.forward, trainer.forward_backward):
                with pytest.raises(InvalidInputError, match="is empty"):
                    call([], "cross_entropy")
            with pytest.raises(TypeError, match="AdamParams"):
                trainer.optim_step()
            with pytest.raises(InvalidInputError, match="inflight"):
                trainer.save_weights_and_get_sampling_client(kind="other")  # type: ignore[arg-type]


class TestFailures:
    @every_way
    def test_the_class_of_the_error_and_the_line_of_the_call(self, path: str, make: Make) -> None:
        with world() as (stub, service):
            stub.script(path, Answer(404, {"detail": "no such thing"}))
            client = make(service)
            line = make.__code__.co_firstlineno
            with pytest.raises(NotFoundError, match="no such thing") as caught:
                client.result(PATIENCE_S)
            assert "client created at test_client_futures.py:" in str(caught.value)
            assert int(str(caught.value).partition("futures.py:")[2].partition(")")[0]) - line in (0, 2)

    def test_a_thread_without_code_of_the_user_names_no_line(self) -> None:
        with world() as (stub, service), concurrent.futures.ThreadPoolExecutor() as pool:
            stub.script("/create_model", Answer(404, {"detail": "no such thing"}))
            client = pool.submit(service.create_lora_training_client, "stub/model")
            with pytest.raises(NotFoundError, match="no such thing") as caught:
                client.result(PATIENCE_S).result(PATIENCE_S)
            assert "client created at" not in str(caught.value)
            assert "created at" not in repr(client.result())

    def test_calls_made_before_fail_through_their_futures_and_later_ones_raise(self) -> None:
        with world() as (stub, service):
            with held(stub, "/create_model", Answer(400, {"detail": "no such model"})):
                trainer = service.create_lora_training_client("stub/model")
                passed = trainer.forward_backward([datum()], "cross_entropy")
                sampler = trainer.save_weights_and_get_sampling_client()
                sampled = sampler.sample(PROMPT, 1, ONE_TOKEN)
            for future in (passed, sampler, sampled):
                failure = future.exception(PATIENCE_S)
                assert isinstance(failure, BadRequestError)
                assert "created at test_client_futures.py" in str(failure)
            for call in (
                lambda: trainer.optim_step(STEP),
                lambda: trainer.save_state("a"),
                trainer.save_weights_and_get_sampling_client,
                trainer.get_info,
                lambda: trainer.model_id,
                lambda: sampler.sample(PROMPT, 1, ONE_TOKEN),
                sampler.get_base_model,
            ):
                with pytest.raises(BadRequestError, match="no such model"):
                    call()

    def test_a_creation_does_not_fail_with_one_that_had_less_time(self) -> None:
        """Two creations wait for one exchange with the server, which the first has begun.

        The deadline of the first creation ends. The second one has more time, and succeeds.
        """
        with world() as (stub, service):
            with held(stub, "/client/config"):
                hurried = service.create_lora_training_client("stub/model", deadline=0.5)
                until(lambda: bool(stub.asked("/client/config")))
                patient = service.create_lora_training_client("stub/model")
                assert isinstance(hurried.exception(PATIENCE_S), APITimeoutError)
            assert patient.result(PATIENCE_S).model_id

    def test_closing_ends_a_creation(self) -> None:
        with StubServer(config=V38) as stub, held(stub, "/create_model"):
            service = connected(stub)
            trainer = service.create_lora_training_client("stub/model")
            passed = trainer.forward_backward([datum()], "cross_entropy")
            stub.await_asked("/create_model")
            service.close().result(PATIENCE_S)
            for future in (trainer, passed):
                assert isinstance(future.exception(PATIENCE_S), ClientClosedError)
            for make in (
                lambda: service.create_lora_training_client("stub/model"),
                lambda: service.create_training_client_from_state(PATH),
            ):
                with pytest.raises(ClientClosedError):
                    make()
            with pytest.raises(ClientClosedError, match="cannot be entered"):
                service.__enter__()

    def test_a_cancelled_creation_is_given_up(self) -> None:
        with world() as (stub, service), held(stub, "/create_model"):
            trainer = service.create_lora_training_client("stub/model")
            stub.await_asked("/create_model")
            assert not trainer.cancel()  # it is being sent
            sampler = trainer.save_weights_and_get_sampling_client()
            sampled = sampler.sample(PROMPT, 1, ONE_TOKEN)
            assert sampler.cancel()
            assert isinstance(sampled.exception(PATIENCE_S), concurrent.futures.CancelledError)
            for call in (
                lambda: sampler.sample(PROMPT, 1, ONE_TOKEN),
                lambda: sampler.compute_logprobs(PROMPT),
            ):
                with pytest.raises(concurrent.futures.CancelledError):
                    call()

    def test_one_that_is_never_looked_at_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        gc.collect()  # frees clients that other tests of this file left
        with world() as (stub, service), caplog.at_level(logging.WARNING, "tinker_sync.clients"):
            stub.script("/create_model", *[Answer(404, {"detail": "no such model"})] * 2)
            looked_at = service.create_lora_training_client("stub/model")
            assert isinstance(looked_at.exception(PATIENCE_S), NotFoundError)
            client = service.create_lora_training_client("stub/model")
            until(client.done)
            seen = weakref.ref(client)
            del client, looked_at
            until(lambda: gc.collect() >= 0 and seen() is None)
            # Clients that other tests left may be collected here too.
            (text,) = [text for text in caplog.messages if "test_client_futures.py:" in text]
            assert "no such model (client created at test_client_futures.py:" in text

    def test_a_client_that_is_dropped_while_it_is_made_leaves_nothing(self) -> None:
        with world() as (stub, service):
            with held(stub, "/create_model"):
                seen = weakref.ref(service.create_lora_training_client("stub/model"))
                stub.await_asked("/create_model")
            until(lambda: gc.collect() >= 0 and seen() is None)
            assert service.holder.lifecycle.unfinished == 0


class TestCheckpoints:
    @pytest.mark.parametrize(
        ("config", "at_once"),
        [
            ({**V36, "create_model_via_load_weights": True}, True),
            (V36, False),
            (V38, True),
            ({"fwdbwd_max_chunk_len": 8}, False),
        ],
        ids=["flag", "no flag", "0.38", "before"],
    )
    def test_a_model_from_a_checkpoint_takes_one_request_or_three(
        self, config: dict[str, Any], at_once: bool
    ) -> None:
        with world(config) as (stub, service):
            trainer = service.create_training_client_from_state(PATH, weights_access_token="token-of-another")
            assert trainer.model_id == "session-0:train:0"
            body = stub.asked("/load_weights")[0].json()
            assert body["weights_access_token"] == "token-of-another"
            assert (body.get("model_seq_id"), body.get("model_id")) == (
                (0, None) if at_once else (None, "session-0:train:0")
            )
            made = [path for path in stub.paths() if path in ("/weights_info", "/create_model")]
            assert made == ([] if at_once else ["/weights_info", "/create_model"])
            assert "/get_info" not in stub.paths()
            numbers = trainer.optim_step(STEP).result(PATIENCE_S).metrics
            assert numbers == {"step:max": 1.0 if at_once else 2.0}

    @pytest.mark.parametrize(
        ("told", "sent"),
        [
            ({"is_lora": True, "lora_rank": 8, "train_mlp": False}, {"rank": 8, "train_mlp": False}),
            ({"is_lora": True}, {"rank": 32, "train_mlp": True}),
            ({"is_lora": False, "lora_rank": 0}, {"rank": 0, "train_mlp": True}),
            ({"is_lora": False}, None),
        ],
    )
    def test_a_checkpoint_is_restored_as_what_it_was(
        self, told: dict[str, Any], sent: dict[str, Any] | None
    ) -> None:
        with world(V36) as (stub, service):
            stub.script("/weights_info", Answer(200, {"base_model": "stub/model", **told}))
            service.create_training_client_from_state(PATH).result(PATIENCE_S)
            given = stub.asked("/create_model")[0].json().get("lora_config")
            assert given == (sent and {"train_attn": True, "train_unembed": True, **sent})

    @pytest.mark.parametrize("rank", [0, None])
    def test_a_request_to_train_all_weights_is_sent(self, rank: int | None) -> None:
        with world() as (stub, service):
            service.create_lora_training_client("stub/model", rank=rank).result(PATIENCE_S)
            given = stub.asked("/create_model")[0].json().get("lora_config")
            assert (given and given["rank"]) == rank

    @pytest.mark.parametrize("status", [400, 422])
    def test_a_server_that_asks_for_a_model_gets_three_requests(self, status: int) -> None:
        with world() as (stub, service):
            stub.script("/load_weights", Answer(status, {"detail": "model_id: field required"}))
            trainer = service.create_training_client_from_state(PATH)
            assert trainer.model_id == "session-0:train:0"
            made = ["/load_weights", "/weights_info", "/create_model", "/load_weights"]
            assert [path for path in stub.paths() if path in made] == made

    def test_another_refusal_is_the_failure(self) -> None:
        with world() as (stub, service):
            stub.script("/load_weights", Answer(400, {"detail": "no such checkpoint"}))
            assert isinstance(
                service.create_training_client_from_state(PATH).exception(PATIENCE_S), BadRequestError
            )
            assert "/create_model" not in stub.paths()

    def test_the_servers_name_for_the_model_counts(self) -> None:
        class Naming(Stub):
            def on_load_weights(self, asked: Asked) -> Any:
                return self.promise("load_weights", {"path": PATH}, model_id="other-id")

        stub = Naming()
        stub.behaviour.config = V38
        with StubServer(stub), connected(stub) as service:
            assert service.create_training_client_from_state(PATH).model_id == "other-id"


class TestKinds:
    def test_each_server_gets_the_field_it_knows(self) -> None:
        for config, sent in ((V38, {"kind": "snapshot"}), (V36, {})):
            with world(config) as (stub, service):
                trainer = service.create_lora_training_client("stub/model")
                trainer.save_weights_and_get_sampling_client().result(PATIENCE_S)
                body = stub.asked("/save_weights_for_sampler")[0].json()
                assert {name: value for name, value in body.items() if name == "kind"} == sent

    def test_inflight_where_it_is_known(self) -> None:
        with world() as (stub, service):
            trainer = service.create_lora_training_client("stub/model")
            trainer.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE_S)
            assert stub.asked("/save_weights_for_sampler")[0].json()["kind"] == "inflight"
        with world(V36) as (_, service):
            trainer = service.create_lora_training_client("stub/model").result(PATIENCE_S)
            with pytest.raises(UnsupportedByServerError, match="inflight sampling clients"):
                trainer.save_weights_and_get_sampling_client(kind="inflight")


# ----- Clients of models and sampling sessions that exist, which scripts make with the constructors
DATUM = tinker.Datum(tinker.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
PARAMS = tinker.SamplingParams(max_tokens=4)


def test_a_training_client_of_an_existing_model() -> None:
    with StubServer() as stub, tinker.ServiceClient(base_url=stub.url, api_key="tml-key") as service:
        first = service.create_lora_training_client("stub/model", rank=4)
        model_id = first._guaranteed_model_id()
        assert model_id == first.model_id
        client = tinker.TrainingClient(service.holder, model_id=model_id)
        assert client.done()
        assert client.model_id == model_id
        passed = client.forward_backward([DATUM], "cross_entropy")
        stepped = client.optim_step(tinker.AdamParams())
        assert len(passed.result().loss_fn_outputs) == 1
        assert stepped.exception() is None
        again = tinker.TrainingClient(holder=service.holder, model_seq_id=0, model_id="another")
        assert again.model_id == "another"


def test_a_training_client_needs_a_model() -> None:
    with (
        StubServer() as stub,
        tinker.ServiceClient(base_url=stub.url, api_key="tml-key") as service,
        pytest.raises(tinker.InvalidInputError, match="model_id"),
    ):
        tinker.TrainingClient(service.holder)


def test_a_sampling_client_of_an_existing_session() -> None:
    with StubServer() as stub, tinker.ServiceClient(base_url=stub.url, api_key="tml-key") as service:
        first = service.create_sampling_client(base_model="stub/model")
        session_id = first.sampling_session_id
        second = tinker.SamplingClient(
            service.holder, sampling_session_id=session_id, base_model="stub/model"
        )
        assert second.done()
        assert second.sampling_session_id == session_id
        for client in (first, second):
            assert len(client.sample(PROMPT, 1, PARAMS).result().sequences) == 1
        assert second.get_base_model() == "stub/model"
        first_number, second_number = (asked.json()["seq_id"] for asked in stub.asked("/asample"))
        assert (first_number, second_number >= 10**9) == (
            0,
            True,
        )  # the server takes an equal one for a retry
