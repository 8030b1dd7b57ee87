"""Verification of checkpoints by the loss of a probe, and by a step without gradients in a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import open_servers
from support.tinker_stub import StubServer

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
from tinker_sync.local.engine.training import AdapterTrainer
from tinker_sync.local.store import Store
from tinker_sync.loop import verify_checkpoint
from tinker_sync.testing import LocalServer
from tinker_sync.types import ForwardBackwardOutput, TensorData

MODEL = "tinker-sync/random"
PATIENCE_S = 120.0
PROBE = [
    Datum(ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}),
    Datum(ModelInput.from_ints([9, 10]), {"target_tokens": [10, 11]}),
]
STEP = AdamParams(learning_rate=1e-3)


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with LocalServer(model=MODEL, hold_s=1.0) as running:
        yield running


@pytest.fixture
def service(server: LocalServer) -> Iterator[ServiceClient]:
    with server.service() as made:
        yield made


def saved(service: ServiceClient) -> tuple[TrainingClient, str, ForwardBackwardOutput]:
    """Train a model, save it, and return its client, the checkpoint, and the pass of the probe."""
    training = service.create_lora_training_client(MODEL, rank=4, seed=1)
    for _ in range(2):
        training.forward_backward(PROBE, "cross_entropy")
        training.optim_step(STEP)
    before = training.forward(PROBE, "cross_entropy").result(PATIENCE_S)
    return training, training.save_state("a").result(PATIENCE_S).path, before


@pytest.mark.parametrize("json_only", [False, True])
def test_a_good_checkpoint_passes_and_the_copy_alone_takes_a_step(json_only: bool) -> None:
    with LocalServer(model=MODEL, json_only=json_only, hold_s=1.0) as server, server.service() as service:
        training, path, before = saved(service)
        server.forget()
        verify_checkpoint(service, path, PROBE, before, step=STEP)
        [call] = server.calls_to("optim_step")
        assert (call.ids.get("model") or call.body["model_id"]) != training.model_id
        assert len(server.calls_to("unload_model")) == 1
        again = training.forward(PROBE, "cross_entropy").result(PATIENCE_S)
        assert again.loss_fn_outputs == before.loss_fn_outputs


def test_a_dropped_optimizer_state_is_found(service: ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path, before = saved(service)
    restore = AdapterTrainer.restore
    monkeypatch.setattr(AdapterTrainer, "restore", lambda run, flat, _: restore(run, flat, None))
    with pytest.raises(VerificationError, match="restores the weights, but with a new optimizer"):
        verify_checkpoint(service, path, PROBE, before, step=STEP)


def test_other_weights_are_found(
    server: LocalServer, service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, before = saved(service)
    load = Store.load_checkpoint

    def damaged(*args: Any) -> Any:
        info, arrays = load(*args)
        return info, {name: array * 3 if "lora_B" in name else array for name, array in arrays.items()}

    monkeypatch.setattr(Store, "load_checkpoint", damaged)
    with pytest.raises(VerificationError, match="does not restore the weights that were saved"):
        verify_checkpoint(service, path, PROBE, before, tolerance=1e-9)
    assert len(server.calls_to("unload_model")) == 1


def test_a_later_step_of_the_saved_model_shows(service: ServiceClient) -> None:
    training, path, _ = saved(service)
    training.forward_backward(PROBE, "cross_entropy")
    training.optim_step(AdamParams(learning_rate=0.1))
    after = training.forward(PROBE, "cross_entropy").result(PATIENCE_S)
    with pytest.raises(VerificationError, match="does not restore the weights that were saved"):
        verify_checkpoint(service, path, PROBE, after)


def test_a_server_that_cannot_unload_keeps_the_copy() -> None:
    with (
        StubServer(open_servers.TxLike()) as stub,
        ServiceClient(base_url=stub.url, api_key="tml-x") as service,
    ):
        training = service.create_lora_training_client("stub/model")
        before = training.forward_backward(PROBE, "cross_entropy").result(PATIENCE_S)
        path = training.save_state("a").result(PATIENCE_S).path
        verify_checkpoint(service, path, PROBE, before)
        assert stub.asked("/unload_model") == []


def test_the_metrics_count_where_there_are_no_log_probabilities(service: ServiceClient) -> None:
    _, path, before = saved(service)
    with pytest.raises(UnsupportedByServerError, match="returns no usable loss of a forward pass"):
        verify_checkpoint(service, path, PROBE, ForwardBackwardOutput("scalar", [{}], {}))
    loss = TensorData(data=[1e9], dtype="float32", shape=[1])
    with pytest.raises(VerificationError, match=r"was -1e\+09 before the save"):
        verify_checkpoint(service, path, PROBE, ForwardBackwardOutput("x", [{"logprobs": loss}], {}))
    metrics = {"loss:sum": -sum(sum(each["logprobs"].data) for each in before.loss_fn_outputs)}
    verify_checkpoint(service, path, PROBE, ForwardBackwardOutput("scalar", [], metrics))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "yes", None])
def test_a_wrong_tolerance_is_refused(wrong: Any) -> None:
    nothing: Any = None
    with pytest.raises(InvalidInputError, match="tolerance: expected a number between 0 and 1"):
        verify_checkpoint(nothing, "tinker://r/weights/a", PROBE, nothing, tolerance=wrong)
