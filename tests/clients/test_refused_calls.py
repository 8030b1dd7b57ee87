"""A request that the server refuses does not end a run, on any kind of server.

The next call takes the sequence number of the refused request. `test_calls_in_doubt` has the requests whose
outcome is unknown.
"""

from __future__ import annotations

from typing import Any

import pytest
from support import open_servers
from support.engine_ledger import datum_of, engine_ledger
from support.fault_world import MODEL, fault_server
from support.hasty import hasty_service, world
from support.open_servers import OpenServer
from support.raising import raising
from support.tinker_stub import Answer, StubServer

from tinker_sync import types
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import (
    APIStatusError,
    ConflictError,
    RequestFailedError,
    TinkerError,
)
from tinker_sync.testing import LocalServer

PATIENCE_S = 120.0
STEP = types.AdamParams(learning_rate=1e-3)


def data(count: int = 1) -> list[types.Datum]:
    inputs = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
    return [types.Datum(types.ModelInput.from_ints([1, 2]), inputs) for _ in range(count)]


def train(trainer: TrainingClient) -> Any:
    """Run a pass and a step, and return the result of the step. In its metrics the stub counts the steps."""
    passed = trainer.forward_backward(data(), "cross_entropy")
    stepped = trainer.optim_step(STEP)
    assert passed.result(PATIENCE_S).loss_fn_outputs
    return stepped.result(PATIENCE_S)


def test_on_the_embedded_server() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        trainer = service.create_lora_training_client(MODEL, rank=4, seed=1)
        train(trainer)
        trainer.save_state("taken").result(PATIENCE_S)
        again = trainer.save_state("taken")
        wrong_loss = trainer.forward_backward(data(), "no_such_loss")
        last = trainer.optim_step(STEP)
        with pytest.raises((ConflictError, RequestFailedError)):
            again.result(PATIENCE_S)
        with pytest.raises(TinkerError, match="no_such_loss"):
            wrong_loss.result(PATIENCE_S)
        last.result(PATIENCE_S)
        train(trainer)
        recovered = trainer.recover().result(PATIENCE_S)
        assert recovered.model_id != trainer.model_id
        train(recovered)


def test_the_chunks_of_a_pass_after_a_refused_call_are_applied_in_order() -> None:
    with engine_ledger() as ledger, fault_server(max_body_bytes=3000) as server, server.service() as service:
        trainer = service.create_lora_training_client(MODEL, rank=4, seed=1)
        with pytest.raises(APIStatusError, match="413"):
            trainer.forward_backward([datum_of(9, 800)], "cross_entropy").result(PATIENCE_S)
        marks = [1, 2, 3]
        trainer.forward_backward([datum_of(mark, 4) for mark in marks], "cross_entropy").result(PATIENCE_S)
        (run,) = ledger.with_marks(marks)
        assert [applied.marks for applied in run] == [(1, 2), (3,)]


@pytest.mark.parametrize("kind", open_servers.ALL, ids=lambda kind: kind.name)
@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422])
def test_on_open_servers(kind: type[OpenServer], status: int) -> None:
    with StubServer(kind()) as stub, hasty_service(stub, api_key="tml-open", open_server=True) as service:
        trainer = service.create_lora_training_client("stub/model").result()
        train(trainer)
        refusal = Answer(status, {"detail": "no"})
        stub.script("/save_weights", *[refusal] * (3 if status == 409 else 1))
        refused, stepped = trainer.save_state("a"), trainer.optim_step(STEP)
        with pytest.raises(APIStatusError):
            refused.result(PATIENCE_S)
        stepped.result(PATIENCE_S)
        numbers = [asked.json()["seq_id"] for asked in stub.asked("/optim_step")]
        assert numbers == [2, 3]
        train(trainer)


def test_a_pass_whose_last_chunk_cannot_be_encoded_leaves_nothing_behind() -> None:
    picture = types.ImageAssetPointerChunk(location="x", format="png")
    bad = types.Datum(types.ModelInput(chunks=[picture]), {"target_tokens": [2], "weights": [1.0]})
    with world({"fwdbwd_max_chunk_len": 1}) as (_, service):
        trainer = service.create_lora_training_client("stub/model").result()
        with pytest.raises(TinkerError, match="ImageAssetPointerChunk"):
            trainer.forward_backward([*data(3), bad], "cross_entropy")
        assert service.holder.lifecycle.unfinished == 0
        train(trainer)


def test_a_pass_that_no_thread_can_queue_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with world({"fwdbwd_max_chunk_len": 1}) as (_, service):
        trainer = service.create_lora_training_client("stub/model").result()
        with monkeypatch.context() as patch:
            patch.setattr(service.holder.server.flows, "soon", raising(RuntimeError("none")))
            with pytest.raises(TinkerError, match="no thread"):
                trainer.forward_backward(data(3), "cross_entropy")
        assert service.holder.lifecycle.unfinished == 0
        train(trainer)


def test_there_is_nothing_to_recover_from() -> None:
    with world() as (stub, service):
        trainer = service.create_lora_training_client("stub/model")
        with pytest.raises(TinkerError, match="has saved no state"):
            trainer.recover()
        loaded = service.create_training_client_from_state("tinker://run/weights/a")
        loaded.result(PATIENCE_S)
        loaded.recover().result(PATIENCE_S)
        assert [asked.json()["optimizer"] for asked in stub.asked("/load_weights")] == [False, False]


def test_a_state_can_be_recovered_as_soon_as_its_save_has_a_result() -> None:
    with world() as (stub, service):
        trainer = service.create_lora_training_client("stub/model").result(PATIENCE_S)
        path = trainer.save_state("a").result(PATIENCE_S).path
        trainer.recover().result(PATIENCE_S)
        assert [asked.json()["path"] for asked in stub.asked("/load_weights")] == [path]
