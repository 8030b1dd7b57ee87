"""Every call works on every kind of open server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import open_servers
from support.custom_losses import squares
from support.hasty import hasty_service, paused
from support.open_servers import BAD_NAME, BAD_TOKEN, OpenServer
from support.tinker_stub import Answer, Stub, StubServer

from tinker_sync import types
from tinker_sync._base.clock import paced
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import (
    APIConnectionError,
    ClientClosedError,
    ConflictError,
    InternalServerError,
    InvalidInputError,
    NotFoundError,
    RequestFailedError,
    UnsupportedByServerError,
)

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])


def datum(*tokens: int, weights: bool = True) -> types.Datum:
    inputs: dict[str, Any] = {"target_tokens": [*tokens[1:], 9]}
    if weights:
        inputs["weights"] = [1.0] * len(tokens)
    return types.Datum(types.ModelInput.from_ints(list(tokens)), inputs)


def service(stub: OpenServer, **options: Any) -> ServiceClient:
    return ServiceClient(base_url=stub.url, api_key="tml-open", **options)  # type: ignore[attr-defined]


@contextmanager
def training_on(
    stub: OpenServer, *, hasty: bool = False
) -> Iterator[tuple[Any, ServiceClient, TrainingClient]]:
    """Run a server, and yield it with a client and a training client of it. See `support.hasty`."""
    with (
        StubServer(stub),
        hasty_service(stub, open_server=True) if hasty else service(stub) as client,
    ):
        yield stub, client, client.create_lora_training_client("stub/model").result()


@pytest.fixture(params=open_servers.ALL, ids=lambda kind: kind.name)
def stub(request: pytest.FixtureRequest) -> Iterator[OpenServer]:
    with StubServer(request.param()) as stub:
        yield stub


def scores(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [[round(value, 6) for value in row["logprobs"].data] for row in output.loss_fn_outputs]


def test_every_call_works(stub: OpenServer) -> None:
    with service(stub) as client:
        assert client.get_server_capabilities().supported_models[0].model_name == "stub/model"
        trainer = client.create_lora_training_client("stub/model", rank=8).result()
        check_training(stub, trainer)
        check_checkpoints(client, trainer)
        check_sampling(client.create_sampling_client(base_model="stub/model").result())
        check_sampling(trainer.save_weights_and_get_sampling_client().result())


def check_training(stub: OpenServer, trainer: TrainingClient) -> None:
    data = [datum(1, 2, 3), datum(4, 5, weights=False)]
    if stub.offers_forward or stub.proto_bodies:
        assert scores(trainer.forward(data, "cross_entropy").result(PATIENCE_S)) == [
            [-0.02, -0.03, -0.09],
            [-0.05, -0.09],
        ]
    backward = trainer.forward_backward(data, "cross_entropy")
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
    output = backward.result(PATIENCE_S)
    assert scores(output) == [[-0.02, -0.03, -0.09], [-0.05, -0.09]]
    assert sum(output.metrics.values()) == pytest.approx(0.28, abs=2.0)  # the loss, under any name
    assert step.result(PATIENCE_S).metrics
    assert trainer.get_info().model_id == trainer.model_id


def check_checkpoints(client: ServiceClient, trainer: TrainingClient) -> None:
    path = trainer.save_state("step-1").result(PATIENCE_S).path
    sampler_path = trainer.save_weights_for_sampler("sampler_1").result(PATIENCE_S).path
    for again in (
        client.create_training_client_from_state(path).result(),
        client.create_training_client_from_state_with_optimizer(path).result(),
    ):
        assert again.model_id != trainer.model_id
        assert scores(again.forward_backward([datum(1, 2)], "cross_entropy").result(PATIENCE_S))
        again.optim_step(types.AdamParams()).result(PATIENCE_S)
    check_sampling(client.create_sampling_client(model_path=sampler_path).result())
    check_sampling(trainer.create_sampling_client(sampler_path).result())


def check_sampling(sampler: Any) -> None:
    params = types.SamplingParams(max_tokens=3, stop="END", temperature=0.5, seed=1)
    response = sampler.sample(PROMPT, 2, params).result(PATIENCE_S)
    assert [sequence.tokens for sequence in response.sequences] == [[6, 7, 8], [7, 8, 9]]
    assert [sequence.sequence_id for sequence in response.sequences] == [None, None]
    scored = sampler.sample(PROMPT, 1, params, include_prompt_logprobs=True).result(PATIENCE_S)
    assert scored.prompt_logprobs is not None
    assert sampler.compute_logprobs(PROMPT).result(PATIENCE_S) == pytest.approx([None, -0.02, -0.03])
    assert sampler.get_base_model() == "stub/model"


def test_failures_in_every_form_are_reported(stub: OpenServer) -> None:
    with service(stub) as client:
        trainer = client.create_lora_training_client("stub/model").result()
        with pytest.raises(RequestFailedError, match="No space left"):
            trainer.save_state(BAD_NAME).result(PATIENCE_S)
        # The call was carried out and failed, so its number is not missing.
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        sampler = client.create_sampling_client(base_model="stub/model").result()
        prompt = types.ModelInput.from_ints([1, BAD_TOKEN])
        with pytest.raises(RequestFailedError, match="Token out of range"):
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(PATIENCE_S)


def test_what_they_would_skip_is_refused_before_it_takes_a_number(stub: OpenServer) -> None:
    with service(stub) as client:
        trainer = client.create_lora_training_client("stub/model").result()
        spans = datum(1, 2).with_provenance(
            model_input=[types.PromptProvenanceSpan(sequence_id="s", length=2)],
            loss_fn_inputs=[types.SampledProvenanceSpan(sequence_id="s", length=2)],
        )
        for refused in (
            lambda: trainer.forward_backward([spans], "cross_entropy"),
            lambda: trainer.forward_backward([datum(1)], "cross_entropy", {"kind": "soft"}),
            lambda: trainer.optim_step(types.DimuonParams(learning_rate=0.1)),
            lambda: trainer.save_weights_external("export"),
        ):
            with pytest.raises(UnsupportedByServerError):
                refused()
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        assert stub.asked("/optim_step")[-1].json()["seq_id"] == 1
        sampler = client.create_sampling_client(base_model="stub/model").result()
        params = types.SamplingParams(max_tokens=1)
        for options in (
            {"topk_sample_logprobs": 2},
            {"prompt_alt_tokens_k": 1},
            {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1},
        ):
            with pytest.raises(UnsupportedByServerError):
                sampler.sample(PROMPT, 1, params, **options)
        assert stub.asked("/asample") == []


# ------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("dialect", ["auto", "json"])
def test_servers_that_do_not_keep_the_order_get_one_call_at_a_time(dialect: str) -> None:
    """The client sends one call at a time, because the server may run a step before earlier passes."""
    with StubServer(open_servers.TxLike()) as stub, service(stub, dialect=dialect) as client:
        stub.pass_s = 0.05
        trainer = client.create_lora_training_client("stub/model").result()
        steps = []
        for _ in range(3):
            trainer.forward_backward([datum(1, 2)], "cross_entropy")
            trainer.forward_backward([datum(3, 4)], "cross_entropy")
            steps.append(trainer.optim_step(types.AdamParams()))
        for step in steps:
            step.result(PATIENCE_S)
        assert stub.applied == [2, 2, 2]


def test_a_failed_call_lets_the_next_one_go_where_each_is_alone() -> None:
    with training_on(open_servers.TxLike()) as (_, _, trainer):
        failed = trainer.save_state(BAD_NAME)
        step = trainer.optim_step(types.AdamParams())
        assert step.result(PATIENCE_S).metrics
        with pytest.raises(RequestFailedError):
            failed.result(0)


def test_a_custom_loss_has_its_second_pass_before_the_next_call_where_each_is_alone() -> None:
    with StubServer(open_servers.TxLike()) as stub, service(stub) as client:
        stub.pass_s = 0.02
        trainer = client.create_lora_training_client("stub/model").result()
        loss = trainer.forward_backward_custom([datum(1, 2)], squares)
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        loss.result(PATIENCE_S)
        assert stub.applied == [2]  # the forward pass of this double counts as one


@pytest.mark.parametrize(
    "kind", [open_servers.TxLike, open_servers.SkyWithoutMetrics], ids=lambda kind: kind.name
)
def test_the_loss_is_computed_where_the_server_gives_none(kind: type[OpenServer]) -> None:
    with training_on(kind()) as (stub, _, trainer):
        tokens = types.ModelInput.from_ints([1, 2, 3])
        data = [
            types.Datum(tokens, {"target_tokens": [10, 20, 30], "weights": [0.0, 1.0, 0.5]}),
            types.Datum(tokens, {"target_tokens": [1, 1, 1]}),
        ]
        output = trainer.forward_backward(data, "cross_entropy").result(PATIENCE_S)
        assert output.metrics["loss:sum"] == pytest.approx(0.2 + 0.15 + 0.03)
        many = trainer.forward_backward(data * 600, "cross_entropy").result(PATIENCE_S)
        assert many.metrics["loss:sum"] == pytest.approx(0.38 * 600)
        assert len(stub.asked("/forward_backward")) > 2
        given = {"target_tokens": [10, 20, 30], "logprobs": [0.0] * 3, "advantages": [1.0] * 3}
        ruled = trainer.forward_backward([types.Datum(tokens, given)], "importance_sampling").result(
            PATIENCE_S
        )
        # Without `elementwise_loss`, the client cannot compute the loss.
        assert ("loss:sum" in ruled.metrics) is (kind is open_servers.TxLike)


# ------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize(
    ("kind", "content_types"),
    [
        (open_servers.TxLike, {"application/json"}),
        (open_servers.TxBehindSettings, {"application/json"}),
        (open_servers.SkyLike, {"application/x-protobuf"}),
        (open_servers.TuftLike, {"application/x-protobuf"}),
        (open_servers.OpenRlLike, {"application/json"}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_format_is_found_out_without_a_real_batch(
    kind: type[OpenServer], content_types: set[str]
) -> None:
    with training_on(kind()) as (stub, _, trainer):
        trainer.forward_backward([datum(1, 2)], "cross_entropy").result(PATIENCE_S)
        real = [asked for asked in stub.asked("/forward_backward") if b"probe" not in asked.body]
        assert {asked.headers["content-type"] for asked in real} == content_types
        assert len(real) == 1


def test_one_probe_serves_every_client_of_a_server() -> None:
    with StubServer(open_servers.OpenRlLike()) as stub:
        for _ in range(2):
            with service(stub) as client:
                client.create_lora_training_client("stub/model").result()
        assert len(stub.asked("/forward_backward")) == 1


def test_a_server_that_falls_over_the_probe_is_not_asked_for_minutes() -> None:
    with StubServer(open_servers.TxBehindSettings()) as stub, hasty_service(stub, open_server=True) as client:
        client.create_lora_training_client("stub/model").result()
        assert len(stub.asked("/forward_backward")) <= 3


def test_a_connection_dropped_without_a_word_costs_nothing() -> None:
    """The server closes the connection after an answer, unannounced. The next call is sent only once."""
    stumbled = Answer(500, b"Internal Server Error", content_type="text/plain; charset=utf-8", hang_up=True)
    with training_on(open_servers.TxLike(), hasty=True) as (stub, _, trainer):
        for _ in range(5):
            stub.script("/get_info", stumbled)
            trainer.get_info()
            stub.script("/retrieve_future", stumbled)
            trainer.forward_backward([datum(1, 2)], "cross_entropy").result(PATIENCE_S)
            trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        assert len(stub.asked("/forward_backward")) == 5


def test_no_forward_pass_where_there_is_no_call_for_it() -> None:
    with training_on(open_servers.OpenRlLike()) as (stub, _, trainer):
        for _ in range(2):
            with pytest.raises(UnsupportedByServerError, match="forward"):
                trainer.forward([datum(1, 2)], "cross_entropy")
        assert len(stub.asked("/forward")) == 1  # the call was sent once
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        assert stub.asked("/optim_step")[0].json()["seq_id"] == 1


def test_samplers_go_to_other_processes_with_what_the_server_speaks() -> None:
    with StubServer(open_servers.TxLike()) as stub, service(stub) as client:
        sampler = client.create_sampling_client(base_model="stub/model").result()
        copy = SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-open")
        try:
            params = types.SamplingParams(max_tokens=1, stop="END")  # refused by the server unless in a list
            assert copy.sample(PROMPT, 1, params).result(PATIENCE_S).sequences[0].tokens == [6]
            with pytest.raises(UnsupportedByServerError):
                copy.sample(PROMPT, 1, types.SamplingParams())
        finally:
            copy.holder.close("success").result(PATIENCE_S)


# ------------------------------------------------------------------------------------ lost answers


def lose_the_answer(stub: Stub, path: str) -> None:
    """Let the stub do the work of the next request to a path, and break the connection before it answers."""
    stub.script(path, Answer(abort="after"))


def test_a_lost_answer_is_asked_for_again_where_numbers_count() -> None:
    with training_on(open_servers.SkyLike(), hasty=True) as (stub, _, trainer):
        lose_the_answer(stub, "/forward_backward")
        lose_the_answer(stub, "/optim_step")
        trainer.forward_backward([datum(1, 2)], "cross_entropy").result(PATIENCE_S)
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        for path in ("/forward_backward", "/optim_step"):
            first, second = [asked for asked in stub.asked(path) if b"probe" not in asked.body]
            assert first.body == second.body
        assert (
            len({asked.json()["request_id"] for asked in stub.asked("/retrieve_future")}) == 3
        )  # with the model


def test_a_lost_answer_is_not_risked_where_numbers_mean_nothing() -> None:
    with training_on(open_servers.TxLike(), hasty=True) as (stub, _, trainer):
        lose_the_answer(stub, "/optim_step")
        with pytest.raises(APIConnectionError, match="could apply twice"):
            trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        assert len(stub.asked("/optim_step")) == 1
        trainer.save_state("a").result(PATIENCE_S)  # no later call depends on a number


def test_a_save_that_ends_with_an_error_of_the_server_ends_nothing() -> None:
    with training_on(open_servers.TxLike(), hasty=True) as (stub, _, trainer):
        trainer.save_state("x").result(PATIENCE_S)
        stub.script("/save_weights", Answer(500, {"detail": "the checkpoint exists"}))
        with pytest.raises(InternalServerError, match="exists") as raised:
            trainer.save_state("x").result(PATIENCE_S)
        assert raised.value.ambiguous
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        trainer.save_state("y").result(PATIENCE_S)


CONFLICT = Answer(409, {"detail": "a checkpoint of this number exists"})


@pytest.mark.parametrize("connection", ["used before", "new"])
def test_a_save_in_conflict_after_a_lost_answer_may_have_been_done(connection: str) -> None:
    with training_on(open_servers.SkyLike(), hasty=True) as (stub, client, trainer):
        if connection == "new":
            client.holder.connection.http.forget_idle()
        lose_the_answer(stub, "/save_weights")
        stub.script("/save_weights", *[CONFLICT] * 20)
        with pytest.raises(ConflictError, match="carried out") as raised:
            trainer.save_state("a").result(PATIENCE_S)
        assert raised.value.ambiguous
        assert len(stub.asked("/save_weights")) <= 4
        assert sum(paused(client)) < 10


# ------------------------------------------------------------------------------------ missing features


WITH_FIELDS = pytest.mark.parametrize(
    "kind", [open_servers.TxLike, open_servers.SkyLike], ids=lambda kind: kind.name
)


@WITH_FIELDS
def test_fields_that_would_be_dropped_are_refused_where_they_change_the_result(
    kind: type[OpenServer],
) -> None:
    with StubServer(kind()) as stub, service(stub) as client:
        for field in ("train_mlp", "train_attn"):
            with pytest.raises(UnsupportedByServerError, match=f"lora_config.{field}"):
                client.create_lora_training_client("stub/model", **{field: False}).result()
        assert stub.asked("/create_model") == []
        trainer = client.create_lora_training_client("stub/model", seed=7).result()
        with pytest.raises(UnsupportedByServerError, match=r"adam_params.grad_clip_norm of optim_step"):
            trainer.optim_step(types.AdamParams(grad_clip_norm=1.0))
        decay = types.AdamParams(weight_decay=0.1)
        if "weight_decay" in kind.bodies["optim_step"]["adam_params"]:
            trainer.optim_step(decay).result(PATIENCE_S)
        else:
            with pytest.raises(UnsupportedByServerError, match="weight_decay"):
                trainer.optim_step(decay)
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        assert stub.paths().count("/openapi.json") == 1


@WITH_FIELDS
def test_fields_that_would_be_dropped_are_reported_once_where_they_are_notes(
    kind: type[OpenServer], caplog: pytest.LogCaptureFixture
) -> None:
    with StubServer(kind()) as stub, service(stub) as client:
        trainer = client.create_lora_training_client("stub/model", user_metadata={"a": "b"}).result()
        for name in ("one", "two"):
            trainer.save_state(name, ttl_seconds=60, overwrite=True).result(PATIENCE_S)
    said = [record.getMessage() for record in caplog.records if "does not know" in record.getMessage()]
    assert sorted(text.split(" and ")[0] for text in said) == [
        "this server does not know overwrite of save_weights",
        "this server does not know ttl_seconds of save_weights",
        "this server does not know user_metadata of create_model",
    ]


def test_fields_are_sent_where_nothing_is_known_of_them() -> None:
    for kind in (open_servers.TuftLike, open_servers.OpenRlLike):
        with StubServer(kind()) as stub, service(stub) as client:
            trainer = client.create_lora_training_client("stub/model", train_mlp=False).result()
            trainer.optim_step(types.AdamParams(grad_clip_norm=1.0)).result(PATIENCE_S)
            assert stub.asked("/optim_step")[-1].json()["adam_params"]["grad_clip_norm"] == 1.0


def test_a_sampler_may_have_the_path_of_a_run() -> None:
    """Servers of older protocols have such paths; one of the current protocol has none."""
    path = "tinker://5f3d0000-0000-4000-8000-000000000000"
    with training_on(open_servers.OpenRlLike()) as (stub, client, _):
        stub.checkpoints.add(path)
        client.create_sampling_client(path).result()
        assert stub.asked("/create_sampling_session")[0].json()["model_path"] == path
    with StubServer(config={"custom_loss_server_side": False}) as newest, hasty_service(newest) as client:
        with pytest.raises(InvalidInputError, match="a path like tinker://RUN/FOLDER/NAME"):
            client.create_sampling_client(path).result()
        assert newest.asked("/create_sampling_session") == []


def test_an_unknown_base_model_is_reported(stub: OpenServer, caplog: pytest.LogCaptureFixture) -> None:
    with service(stub) as client:
        for _ in range(2):
            client.create_lora_training_client("other/model").result()
        client.create_sampling_client(base_model="stub/model").result()
    said = [text for text in caplog.messages if "does not list the base model" in text]
    assert len(said) == 1
    assert "'other/model'" in said[0]
    assert "it lists stub/model" in said[0]


def test_models_without_names_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """Some servers list their models with ids of their own and no names."""
    server = open_servers.TxLike()
    server.lists_models = (None, None)  # type: ignore[assignment]
    with StubServer(server) as stub, service(stub) as client:
        client.create_lora_training_client("stub/model").result()
        stub.await_asked("/get_server_capabilities")
    assert [text for _, level, text in caplog.record_tuples if level >= logging.WARNING] == []


@pytest.mark.parametrize("published", [True, False])
def test_a_route_that_is_missing_is_told_from_an_object(
    stub: OpenServer, published: bool, tmp_path: Path
) -> None:
    stub.publishes = published
    lacks = {
        "tx": {"list_user", "sessions", "publish", "ttl", "delete"},
        "sky": {"list_user", "sessions", "publish", "ttl"},
        "tuft": {"ttl"},
        "open-rl": {"list_user", "sessions", "publish", "ttl", "delete", "run", "archive", "download"},
    }[stub.name.removesuffix(" with settings")]
    with service(stub) as client:
        rest = client.create_rest_client()
        path = "tinker://nowhere/weights/a"
        calls: dict[str, Any] = {
            "list_user": rest.list_user_checkpoints,
            "sessions": rest.list_sessions,
            "publish": lambda: rest.publish_checkpoint_from_tinker_path(path),
            "ttl": lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 60),
            "delete": lambda: rest.delete_checkpoint_from_tinker_path(path),
            "run": lambda: rest.get_training_run("nowhere"),
            "archive": lambda: rest.get_checkpoint_archive_url("nowhere", "sampler_weights/a"),
            "download": lambda: rest.download_checkpoint(
                "tinker://nowhere/sampler_weights/a", tmp_path / "a"
            ),
        }
        for name, call in calls.items():
            error = call().exception(PATIENCE_S)
            if name in lacks:
                assert isinstance(error, UnsupportedByServerError), name
                assert "this server does not offer" in str(error)
            elif name not in ("list_user", "sessions"):
                assert isinstance(error, NotFoundError), name
    assert stub.paths().count("/openapi.json") <= 1


def test_the_base_model_is_known_without_a_description_of_samplers(
    stub: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loader would ask the hub for the files of this model.
    monkeypatch.setattr("tinker_sync.data.tokenizer.get_tokenizer", lambda model, *_, **__: f"of {model}")
    with service(stub) as client:
        trainer = client.create_lora_training_client("stub/model").result()
        path = trainer.save_weights_for_sampler("s").result(PATIENCE_S).path
        samplers = [
            client.create_sampling_client(base_model="stub/model"),
            client.create_sampling_client(path),
            trainer.save_weights_and_get_sampling_client(),
        ]
        for sampler in samplers:
            assert sampler.result().get_base_model() == "stub/model"
            assert sampler.get_tokenizer() == "of stub/model"


HAVE_UNLOAD = pytest.mark.parametrize(
    "kind", [open_servers.SkyLike, open_servers.TuftLike], ids=lambda kind: kind.name
)


@HAVE_UNLOAD
def test_a_model_is_unloaded_behind_the_calls_before(kind: type[OpenServer]) -> None:
    with training_on(kind()) as (stub, _, trainer):
        step = trainer.optim_step(types.AdamParams())
        assert trainer.unload().result(PATIENCE_S).model_id == trainer.model_id
        step.result(PATIENCE_S)
        paths = stub.paths()
        assert paths.index("/unload_model") > paths.index("/optim_step")
        assert not stub.is_model(trainer.model_id)
        assert "seq_id" not in stub.asked("/unload_model")[0].json()
        for call in (lambda: trainer.optim_step(types.AdamParams()), trainer.unload):
            with pytest.raises(ClientClosedError, match="was unloaded"):
                call()
    assert len(stub.asked("/unload_model")) == 1  # `close` unloads no model again


@HAVE_UNLOAD
def test_closing_unloads_the_models_of_the_session(kind: type[OpenServer]) -> None:
    with StubServer(kind()) as stub, service(stub) as client:
        trainers = [client.create_lora_training_client("stub/model").result() for _ in range(2)]
        models = {trainer.model_id for trainer in trainers}
        client.close().result(PATIENCE_S)
        assert {asked.json()["model_id"] for asked in stub.asked("/unload_model")} == models


def test_a_server_that_cannot_unload_is_left_as_it_is() -> None:
    with training_on(open_servers.TxLike()) as (stub, _, trainer):
        with pytest.raises(UnsupportedByServerError, match="unload_model"):
            trainer.unload()
        assert stub.asked("/unload_model") == []
        assert trainer.save_state("a").result(PATIENCE_S).path  # the model is still there


def test_the_error_of_a_missing_route_names_what_works_in_its_place() -> None:
    with StubServer(open_servers.SkyLike()) as stub, service(stub) as client:
        rest = client.create_rest_client()
        with pytest.raises(UnsupportedByServerError, match=r"iter_checkpoints\(run\)"):
            rest.list_user_checkpoints().result(PATIENCE_S)
        with pytest.raises(UnsupportedByServerError, match=r"405 and allows DELETE"):
            rest.set_checkpoint_ttl_from_tinker_path("tinker://r/weights/a", 60).result(PATIENCE_S)
        outcomes = rest.set_checkpoints_ttl(["tinker://r/weights/a"], 60).result(PATIENCE_S)
        assert isinstance(outcomes[0].error, UnsupportedByServerError)


# ------------------------------------------------------------------------------------ waiting


@pytest.mark.parametrize("kind", open_servers.ALL, ids=lambda kind: kind.name)
def test_polls_held_in_silence_are_asked_again_and_no_failure(kind: type[OpenServer]) -> None:
    """The server holds a poll without an answer. The client repeats it after 0.22 s without a pause."""
    with StubServer(kind()) as stub, paced(1e5), service(stub) as client:  # a pause would take hours
        client.holder.server.poll_s = 0.22  # a shorter poll counts as answered at once
        sampler = client.create_sampling_client(base_model="stub/model").result()
        before = len(stub.asked("/retrieve_future"))
        stub.script("/retrieve_future", Answer(0), Answer(0))
        future = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1))
        assert future.result(PATIENCE_S).sequences[0].tokens == [6]
        polls = stub.asked("/retrieve_future")[before:]
        assert [asked.headers["x-tinker-request-iteration"] for asked in polls] == ["0", "1", "2"]
        assert len(stub.asked("/asample")) == 1


def test_not_ready_is_asked_again_later(stub: OpenServer) -> None:
    with hasty_service(stub, open_server=True, api_key="tml-open") as client:
        trainer = client.create_lora_training_client("stub/model").result()
        path = trainer.save_weights_for_sampler("s").result(PATIENCE_S).path
        not_ready = Answer(425, {"detail": "not ready"})
        stub.script("/create_sampling_session", *[not_ready] * 3)
        sampler = client.create_sampling_client(path).result()
        stub.script("/retrieve_future", not_ready, not_ready)
        future = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1))
        assert future.result(PATIENCE_S).sequences[0].tokens == [6]
        assert len(stub.asked("/asample")) == 1


BROKEN = Answer(500, b"Internal Server Error", content_type="text/plain; charset=utf-8")


def test_a_result_that_ends_in_500_is_named_while_it_is_asked_for(
    stub: OpenServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While polls for a result fail with 500, the future's status and one line of the log name the error.

    Some open servers answer 500 for a result that JSON cannot hold, such as NaN, or for an unknown id.
    """
    monkeypatch.setenv("TINKER_PACE", "0.01")
    gate = threading.Event()
    with service(stub) as client:
        trainer = client.create_lora_training_client("stub/model").result()
        before = len(stub.asked("/retrieve_future"))
        stub.script("/retrieve_future", *[BROKEN] * 5, Answer(gate=gate, usual=True))
        future = trainer.optim_step(types.AdamParams())
        stub.await_asked("/retrieve_future", before + 6)
        status = future.status()
        assert status.state == "waiting"
        assert status.reason is not None
        assert "Internal Server Error" in status.reason
        gate.set()
        assert future.result(PATIENCE_S).metrics
    said = [text for text in caplog.messages if "polls for a result of OptimStep keep failing" in text]
    assert len(said) == 1


def test_a_500_to_a_call_that_reads_is_final_after_a_few_tries(
    stub: OpenServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TINKER_PACE", "0.01")
    with service(stub) as client:
        stub.script("/training_runs/r", *[BROKEN] * 50)
        with pytest.raises(InternalServerError):
            client.create_rest_client().get_training_run("r").result(PATIENCE_S)
        assert len(stub.asked("/training_runs/r")) == 5
        stub.script("/optim_step", *[Answer(500, {"detail": "busy"})] * 5)
        trainer = client.create_lora_training_client("stub/model").result()
        if stub.proto_bodies:  # at other servers the client repeats no training call, which might run twice
            trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
            assert len(stub.asked("/optim_step")) == 6
    assert any("GET /api/v1/training_runs/r" in text and "Still trying" in text for text in caplog.messages)


# ------------------------------------------------------------------------------------ particulars


@pytest.mark.parametrize("kind", [open_servers.TxLike, open_servers.SkyLike], ids=lambda kind: kind.name)
def test_checkpoint_names_are_checked_before_they_take_a_number(kind: type[OpenServer]) -> None:
    with training_on(kind()) as (stub, _, trainer):
        for save in (trainer.save_state, trainer.save_weights_for_sampler):
            with pytest.raises(InvalidInputError, match="step 1"):
                save("step 1")
        trainer.save_state("step-1").result(PATIENCE_S)
        assert stub.asked("/save_weights")[0].json()["seq_id"] == 1


def test_the_rest_of_the_context_is_the_default_of_max_tokens_where_it_is_known() -> None:
    with StubServer(open_servers.SkyLike()) as stub, service(stub) as client:
        stub.context = 16
        trainer = client.create_lora_training_client("stub/model").result()
        for sampler in (
            client.create_sampling_client(base_model="stub/model"),
            trainer.save_weights_and_get_sampling_client(),
        ):
            response = sampler.result().sample(PROMPT, 1, types.SamplingParams()).result(PATIENCE_S)
            assert len(response.sequences[0].tokens) == 13
            with pytest.raises(InvalidInputError, match="leave no room"):
                sampler.sample(types.ModelInput.from_ints(range(16)), 1, types.SamplingParams())
        assert len(stub.asked("/get_server_capabilities")) == 1
