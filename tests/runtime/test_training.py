"""The number of a request that may have reached the server stays its own; bytes go back in any case."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.crowd import until
from support.custom_losses import arrived, world
from support.engine_ledger import Ledger, engine_ledger, step_of
from support.raising import raising
from support.tinker_stub import Answer

from tinker_sync import types
from tinker_sync.errors import ClientClosedError, ConfigurationError, TinkerError
from tinker_sync.runtime import flows
from tinker_sync.runtime.training import TrainingRequest
from tinker_sync.testing import Fault, FaultPlan, LocalServer, faults
from tinker_sync.transport.http import Http

PATIENCE_S = 120.0
SHORT_S = 2.0  # long enough for the first try, also on a busy machine


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with engine_ledger() as made:
        yield made


def marks(ledger: Ledger) -> list[int]:
    return [mark for run in ledger.with_marks(range(1, 9)) for applied in run for mark in applied.marks]


@pytest.mark.parametrize(
    "fault", [faults.lost_answer(), faults.reset(), faults.status(502, after_work=True), faults.status(503)]
)
def test_a_request_without_an_answer_keeps_its_number(ledger: Ledger, fault: Fault) -> None:
    plan = FaultPlan().on("optim_step", fault)
    with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4, seed=1).result()
        first = training.optim_step(step_of(1), deadline=SHORT_S)
        with pytest.raises(TinkerError):
            first.result(PATIENCE_S)
        server.plan = FaultPlan()
        training.optim_step(step_of(2)).result(PATIENCE_S)
    assert marks(ledger) == [1, 2]


def test_a_request_that_was_refused_leaves_its_number(ledger: Ledger) -> None:
    plan = FaultPlan().on("optim_step", faults.status(422))
    with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4, seed=1).result()
        with pytest.raises(TinkerError):
            training.optim_step(step_of(1), deadline=SHORT_S).result(PATIENCE_S)
        server.plan = FaultPlan()
        training.optim_step(step_of(2)).result(PATIENCE_S)
    assert marks(ledger) == [2]


# --------------------------------------------------------------------------------- the limit of bytes
DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (TrainingRequest, "bytes_for", MemoryError("no memory")),  # while the body is made
        (Http, "open", ConfigurationError("a certificate cannot be used")),
    ],
)
def test_a_request_that_could_not_be_made_fails_alone_and_as_it_is(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception
) -> None:
    with world() as (stub, trainer):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(error))
            failed = trainer.optim_step(types.AdamParams())
            assert failed.exception(PATIENCE_S) is error
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        assert arrived(stub) == ["1 step"]


# --------------------------------------------------------------------------------- the end of the client


@pytest.mark.parametrize(
    ("path", "count"), [("/forward_backward", 0), ("/forward_backward", 2), ("/optim_step", 0)]
    + [("/retrieve_future", count) for count in range(4)]
)  # fmt: skip
def test_a_client_that_is_closed_at_any_request_leaves_no_call_and_no_bytes(path: str, count: int) -> None:
    """The client is closed while the server holds a request of a pass in three chunks, or of a step."""
    with world({"fwdbwd_max_chunk_len": 1}) as (stub, trainer):
        service = trainer.service  # type: ignore[attr-defined]
        room = service.holder.server.machinery.value.train_bytes
        release = threading.Event()
        stub.script(path, *[Answer(usual=True)] * count, Answer(gate=release, usual=True))
        passed = trainer.forward_backward([DATUM] * 3, "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams())
        stub.await_asked(path, count + 1)
        service.close(pending=0.0).result(PATIENCE_S)
        for future in (passed, stepped):
            assert isinstance(future.exception(PATIENCE_S), (ClientClosedError, type(None)))
        until(lambda: room.free == 15_000_000)
        until(lambda: service.holder.server.flows not in {task._flows for task in list(flows._under_way)})
        release.set()
