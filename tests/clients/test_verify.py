"""Verification of checkpoints by the loss of a test pass, and by a step without gradients in a copy."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
from support.tinker_stub import Answer, Asked, StubServer

from tinker_sync import (
    AdamParams,
    Datum,
    InvalidInputError,
    ModelInput,
    RateLimitError,
    RequestFailedError,
    ServiceClient,
    TrainingClient,
    UnsupportedByServerError,
    VerificationError,
)
from tinker_sync.clients import _verify
from tinker_sync.local.engine.training import AdapterTrainer
from tinker_sync.local.server import weights
from tinker_sync.testing import FaultPlan, LocalServer, faults
from tinker_sync.types import DimuonParams, ForwardBackwardOutput, OptimParamsBase, TensorData

MODEL = "tinker-sync/random"
PATIENCE_S = 120.0
DATUM = Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]})


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with LocalServer(model=MODEL, hold_s=1.0) as running:
        yield running


@pytest.fixture
def service(server: LocalServer) -> Iterator[ServiceClient]:
    with server.service() as made:
        yield made


def trained(service: ServiceClient, steps: int = 2) -> TrainingClient:
    training = service.create_lora_training_client(MODEL, rank=4, seed=1)
    for _ in range(steps):
        training.forward_backward([DATUM], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-3)).result(PATIENCE_S)
    return training


def test_a_good_checkpoint_is_saved_and_the_model_stays_as_it_is(
    server: LocalServer, service: ServiceClient
) -> None:
    training, other = trained(service), trained(service)
    server.forget()
    path = training.save_state("good", verify=True, user_metadata={"mine": "yes"}).result(PATIENCE_S).path
    costs = {
        name: len(server.calls_to(name))
        for name in ("save_weights", "load_weights", "forward_backward", "optim_step", "unload_model")
    }
    assert costs == {
        "save_weights": 1,
        "load_weights": 1,
        "forward_backward": 4,  # three of them forward passes
        "optim_step": 1,
        "unload_model": 1,
    }
    assert [call.ids.get("model") or call.body["model_id"] for call in server.calls_to("optim_step")] != [
        training.model_id
    ]
    plain = other.save_state("plain").result(PATIENCE_S).path
    mine, its = state_of(server, path), state_of(server, plain)
    assert all(np.array_equal(mine[name], its[name]) for name in mine.keys() | its.keys())

    again = service.create_training_client_from_state_with_optimizer(path, verify=True)
    assert again.result(PATIENCE_S) is again
    [listed] = service.create_rest_client().list_checkpoints(training.model_id).result().checkpoints
    assert (listed.user_metadata or {})["mine"] == "yes"


def test_a_server_of_the_older_dialect() -> None:
    with LocalServer(model=MODEL, json_only=True, hold_s=1.0) as server, server.service() as service:
        path = trained(service).save_state("old", verify=True).result(PATIENCE_S).path
        service.create_training_client_from_state_with_optimizer(path, verify=True).result(PATIENCE_S)


def test_gradients_that_wait_for_their_step_stay_as_they_are(
    server: LocalServer, service: ServiceClient
) -> None:
    states = []
    for verify in (True, False):
        training = trained(service)
        training.forward_backward([DATUM], "cross_entropy")
        training.save_state("between", verify=verify)
        training.optim_step(AdamParams(learning_rate=1e-3))
        states.append(state_of(server, training.save_state("after").result(PATIENCE_S).path))
    verified, plain = states
    assert all(np.array_equal(verified[name], plain[name]) for name in verified.keys() | plain.keys())


def state_of(server: LocalServer, path: str) -> dict[str, Any]:
    backend: Any = server._backend
    run, _, name = path.removeprefix("tinker://").split("/")
    arrays: dict[str, Any] = backend.app.service.store.load_checkpoint(run, "training", name)[1]
    return arrays


def test_a_dropped_optimizer_state_fails_the_save_and_the_restore(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(service)
    good = training.save_state("before", verify=True).result(PATIENCE_S).path
    restore = AdapterTrainer.restore
    monkeypatch.setattr(AdapterTrainer, "restore", lambda run, flat, _: restore(run, flat, None))
    saved = training.save_state("cold", verify=True)
    with pytest.raises(VerificationError, match="restores the weights, but with a new optimizer"):
        saved.result(PATIENCE_S)
    again = service.create_training_client_from_state_with_optimizer(good, verify=True)
    with pytest.raises(VerificationError, match="restores the weights, but with a new optimizer"):
        again.result(PATIENCE_S)
    assert training.optim_step(AdamParams()).result(PATIENCE_S)  # the model itself goes on


def test_other_weights_fail_the_save_and_the_restore(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(service)
    good = training.save_state("whole", verify=True).result(PATIENCE_S).path
    read = weights.read_checkpoint

    async def damaged(*args: Any) -> Any:
        info, arrays = await read(*args)
        return info, {name: array * 3 if "lora_B" in name else array for name, array in arrays.items()}

    monkeypatch.setattr(weights, "read_checkpoint", damaged)
    with pytest.raises(VerificationError, match="does not restore the weights that were saved"):
        training.save_state("other", verify=1e-9).result(PATIENCE_S)
    with pytest.raises(VerificationError, match="does not restore the weights that were saved"):
        service.create_training_client_from_state_with_optimizer(good, verify=1e-9).result(PATIENCE_S)


def test_a_verification_that_fails_unread_is_logged_once(
    server: LocalServer, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    training = trained(service)
    server.plan = FaultPlan().on("load_weights", faults.status(422))
    verified = training.save_state("a", verify=True)
    wait([verified], PATIENCE_S)
    assert "never looked at" not in caplog.text
    del verified
    gc.collect()
    [message] = [each for each in caplog.messages if "never looked at" in each]
    assert message.startswith("save_state at test_verify.py:")


def test_a_verified_save_that_fails_is_not_logged_where_it_was_looked_at(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    training = trained(service)
    training.save_state("a").result(PATIENCE_S)
    again = training.save_state("a", verify=True)
    assert isinstance(again.exception(PATIENCE_S), RequestFailedError)
    del again
    gc.collect()
    assert "never looked at" not in caplog.text


def test_a_save_that_is_not_verified_any_more_is_named(
    server: LocalServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_verify, "prove", lambda runtime, *_: runtime.lifecycle.closing.wait(PATIENCE_S))
    with server.service() as service:
        trained(service).save_state("a", verify=True)
    assert "weights/a is saved, but not verified: the client was closed before" in caplog.text


def test_the_deadline_of_a_verified_save_holds_for_the_copy(
    server: LocalServer, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    training = trained(service)
    server.plan = FaultPlan().on("forward_backward", faults.too_many_requests(1e6), nth=range(2, 9))
    saved = training.save_state("late", verify=True, deadline=60.0)
    with pytest.raises(RateLimitError, match="asks to wait"):
        saved.result(PATIENCE_S)
    service.close().result(PATIENCE_S)
    del saved
    gc.collect()
    assert "never looked at" not in caplog.text  # the passes of the copy are calls of the client itself


def test_a_new_model_has_no_optimizer_state_to_verify(server: LocalServer, service: ServiceClient) -> None:
    training = trained(service, steps=0)
    training.optim_step(AdamParams()).result(PATIENCE_S)  # without gradients
    server.forget()
    path = training.save_state("new", verify=True).result(PATIENCE_S).path
    assert server.calls_to("optim_step") == []
    service.create_training_client_from_state_with_optimizer(path, verify=True).result(PATIENCE_S)


def test_a_checkpoint_without_a_probe_is_not_restored_as_verified(service: ServiceClient) -> None:
    path = trained(service).save_state("unverified").result(PATIENCE_S).path
    again = service.create_training_client_from_state_with_optimizer(path, verify=True)
    with pytest.raises(VerificationError, match=r"saved without save_state\(verify=True\)"):
        again.result(PATIENCE_S)


def test_a_checkpoint_of_another_account_is_verified_with_the_key_that_may_read_it() -> None:
    path = "tinker://run-1/weights/a"
    listed = {
        "checkpoint_id": "weights/a",
        "checkpoint_type": "training",
        "time": "2026-01-01T00:00:00Z",
        "tinker_path": path,
        "user_metadata": {"tinker_sync_probe": "1.52 new"},  # the loss of every model of the stub
    }

    def checkpoints(asked: Asked) -> Answer:
        if asked.headers["x-api-key"] != "tml-theirs":
            return Answer(404, {"detail": "no such run"})
        return Answer(body={"checkpoints": [listed]})

    with StubServer() as stub, ServiceClient(base_url=stub.url, api_key="tml-mine") as service:
        stub.script("/training_runs/run-1/checkpoints", checkpoints)
        again = service.create_training_client_from_state_with_optimizer(
            path, weights_access_token="tml-theirs", verify=True
        )
        assert again.result(PATIENCE_S) is again
        tokens = [asked.json()["weights_access_token"] for asked in stub.asked("/load_weights")]
        assert tokens == ["tml-theirs"] * 2  # for the copy, and for the model


def test_without_a_usable_loss_nothing_is_saved(
    server: LocalServer, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(service)
    monkeypatch.setattr(training, "forward", lambda *_, **__: _Answer())
    server.forget()
    with pytest.raises(UnsupportedByServerError, match="no usable loss of a forward pass, and nothing was"):
        training.save_state("never", verify=True)
    assert server.calls_to("save_weights") == []


class _Answer:
    def result(self) -> ForwardBackwardOutput:
        return ForwardBackwardOutput("scalar", [{}], {})


def test_the_loss_comes_from_log_probabilities_or_from_metrics() -> None:
    logprobs = TensorData(data=[-1.0, -0.5], dtype="float32", shape=[2])
    passed = ForwardBackwardOutput("ArrayRecord", [{"logprobs": logprobs}], {})
    assert _verify._loss_of(passed, "") == 1.5
    assert _verify._loss_of(ForwardBackwardOutput("scalar", [], {"loss:sum": 2.0}), "") == 2.0


def test_losses_of_zero_are_equal_and_nan_equals_no_loss() -> None:
    assert not _verify._differ(0.0, 0.0, _verify.TOLERANCE)
    assert _verify._differ(2.5, float("nan"), _verify.TOLERANCE)


@pytest.mark.parametrize(
    "step",
    [
        None,
        AdamParams(),
        DimuonParams(learning_rate=0.02, beta1=0.5),
        OptimParamsBase(type="muon", learning_rate=0.02, momenta=["a b"]),
    ],
)
def test_a_verified_restore_takes_a_step_of_the_optimizer_that_trained(step: Any) -> None:
    metadata = _verify.Measured(2.5, step).metadata()
    found = _verify.Measured.of({**metadata, "mine": "yes"}, _verify.TOLERANCE)
    assert found is not None
    assert found.loss == 2.5
    assert (found.step and found.step.model_dump()) == (step and step.model_dump())


@pytest.mark.parametrize("damaged", ["", "2.5 {", '2.5 {"learning_rate": 1}', "high trained"])
def test_damaged_metadata_have_no_loss(damaged: str) -> None:
    assert _verify.Measured.of({"tinker_sync_probe": damaged}, _verify.TOLERANCE) is None


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "yes", None])
def test_a_wrong_tolerance_is_refused(service: ServiceClient, wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match="verify: expected True, False, or a tolerance"):
        trained(service, steps=0).save_state("wrong", verify=wrong)


def test_it_does_not_block_a_loop(service: ServiceClient) -> None:
    async def save(training: TrainingClient) -> str:
        return (await (await training.save_state_async("awaited", verify=True))).path

    assert asyncio.run(save(trained(service))).endswith("/weights/awaited")
