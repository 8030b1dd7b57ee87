"""The number of a request that may have reached the server is not used again; bytes go back in any case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.crowd import until
from support.custom_losses import world
from support.engine_ledger import Ledger, engine_ledger, step_of
from support.tinker_stub import Answer

from tinker_sync import types
from tinker_sync.errors import EarlierCallFailedError, TinkerError
from tinker_sync.testing import Fault, FaultPlan, LocalServer, faults

PATIENCE_S = 120.0
SHORT_S = 2.0  # long enough for the first try, also on a busy machine


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with engine_ledger() as made:
        yield made


def marks(ledger: Ledger) -> list[int]:
    return [mark for run in ledger.with_marks(range(1, 9)) for applied in run for mark in applied.marks]


@pytest.mark.parametrize(
    ("fault", "arrives"),
    [(faults.lost_answer(), True), (faults.reset(), False), (faults.status(502, after_work=True), True)],
)
def test_a_request_without_an_answer_keeps_its_number(ledger: Ledger, fault: Fault, arrives: bool) -> None:
    plan = FaultPlan().on("optim_step", fault)
    with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4, seed=1).result()
        first = training.optim_step(step_of(1), deadline=SHORT_S)
        with pytest.raises(TinkerError):
            first.result(PATIENCE_S)
        server.forget()
        with pytest.raises(EarlierCallFailedError):
            training.optim_step(step_of(2)).result(PATIENCE_S)
        assert server.calls_to("optim_step") == []
        if arrives:  # the engine may not have finished
            until(lambda: marks(ledger) == [1])
    assert marks(ledger) == ([1] if arrives else [])


def test_a_request_that_was_not_sent_leaves_its_number(ledger: Ledger) -> None:
    plan = FaultPlan().on("optim_step", faults.status(503))  # nothing was done
    with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4, seed=1).result()
        with pytest.raises(TinkerError):
            training.optim_step(step_of(1), deadline=SHORT_S).result(PATIENCE_S)
        server.plan = FaultPlan()
        training.optim_step(step_of(2)).result(PATIENCE_S)
    assert marks(ledger) == [2]


# --------------------------------------------------------------------------------- the limit of bytes
DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})


def train_bytes(trainer: Any) -> str:
    return repr(trainer.service.holder.server.machinery.value.train_bytes)


def test_a_refused_pass_gives_its_bytes_back() -> None:
    with world() as (stub, trainer):
        stub.script("/forward_backward", Answer(422, {"detail": "no"}))
        with pytest.raises(TinkerError, match="422"):
            trainer.forward_backward([DATUM], "cross_entropy").result(PATIENCE_S)
        assert train_bytes(trainer) == "<ByteBudget 15000000 of 15000000 bytes free, 0 in line>"
