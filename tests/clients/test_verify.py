"""Verification of checkpoints by the loss of a test pass, and by a step without gradients in a copy."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinker_sync import (
    AdamParams,
    Datum,
    InvalidInputError,
    ModelInput,
    ServiceClient,
    TrainingClient,
    UnsupportedByServerError,
    VerificationError,
)
from tinker_sync.clients import _verify
from tinker_sync.local.server import weights
from tinker_sync.testing import LocalServer
from tinker_sync.types import ForwardBackwardOutput, TensorData

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
    restore = weights._restore

    def without_optimizer(run: Any, info: Any, arrays: Any, *, optimizer: bool) -> None:
        del optimizer
        restore(run, info, arrays, optimizer=False)

    monkeypatch.setattr(weights, "_restore", without_optimizer)
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


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "yes", None])
def test_a_wrong_tolerance_is_refused(service: ServiceClient, wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match="verify: expected True, False, or a tolerance"):
        trained(service, steps=0).save_state("wrong", verify=wrong)


def test_it_does_not_block_a_loop(service: ServiceClient) -> None:
    async def save(training: TrainingClient) -> str:
        return (await (await training.save_state_async("awaited", verify=True))).path

    assert asyncio.run(save(trained(service))).endswith("/weights/awaited")


def test_a_verified_save_with_a_journal_is_repeated_like_any_call(
    server: LocalServer, tmp_path: Path
) -> None:
    journal = tmp_path / "run.journal"

    def script(status: Any) -> str:
        service = server.service(journal=journal)
        training = trained(service)
        path = training.save_state("journaled", verify=True).result(PATIENCE_S).path
        second = trained(service)  # its number does not depend on the copy
        second.optim_step(AdamParams()).result(PATIENCE_S)
        service.close(status).result(PATIENCE_S)
        return path

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert script("errored") == script("success")
