"""A training call that the server may have or not is sent again, as it was, before any later call.

So a client survives an outage that is longer than its patience: nothing is lost, doubled or out of order.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.crowd import until
from support.custom_losses import arrived, data, squares, world
from support.engine_ledger import datum_of, engine_ledger, step_of
from support.fault_world import MODEL, fault_server
from support.tinker_stub import Answer, Asked, Stub, StubServer

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import (
    APIError,
    APIStatusError,
    ClientClosedError,
    DeadlineError,
    EarlierCallFailedError,
    NotFoundError,
)
from tinker_sync.testing import FaultPlan, LocalServer, faults

PATIENCE_S = 120.0
STEP = types.AdamParams(learning_rate=1e-3)
NO = {"detail": "no"}
SILENT = Answer(abort="after")


class Outage:
    """The answer to every request of a path until `end`."""

    def __init__(self, stub: Stub, path: str, answer: Answer, *, after: int = 0) -> None:
        self.asked = 0
        self._over = threading.Event()
        self._answer, self._after = answer, after
        stub.script(path, *[self._next] * 10_000)

    def _next(self, _asked: Asked) -> Answer:
        self.asked += 1
        usual = self._over.is_set() or self.asked <= self._after
        return Answer(usual=True) if usual else self._answer

    def end(self) -> None:
        self._over.set()


def bodies(stub: Stub, path: str) -> list[tuple[bytes, str]]:
    return [(bytes(asked.body), asked.headers["x-idempotency-key"]) for asked in stub.asked(path)]


def in_doubt(failure: BaseException | None) -> APIError:
    assert isinstance(failure, APIError), failure
    assert failure.ambiguous
    assert "do not repeat it" in str(failure)
    return failure


PROVE_NOTHING = {
    "408": Answer(408, NO),
    "425": Answer(425, NO),
    "429": Answer(429, NO),
    "500": Answer(500, NO),
    "502": Answer(502, b"<p>bad gateway</p>", content_type="text/html"),
    "503": Answer(503, NO),
    "503 of a gateway": Answer(503, b"upstream reset"),
    "504": Answer(504),
    "no retry": Answer(503, NO, headers={"x-should-retry": "false"}),
    "empty 400": Answer(400),
    "403 of a gateway": Answer(403, b"<h1>Forbidden</h1>", content_type="text/html"),
    "no answer": SILENT,
    "unreadable": Answer(200, b"<html>"),
}


@pytest.mark.parametrize("name", PROVE_NOTHING)
def test_the_next_call_sends_it_again_first(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with world() as (stub, trainer):
        outage = Outage(stub, "/optim_step", PROVE_NOTHING[name])
        in_doubt(trainer.optim_step(STEP).exception(PATIENCE_S))
        outage.end()
        with caplog.at_level(logging.WARNING, "tinker_sync"):
            assert trainer.save_state("a").result(PATIENCE_S).path
        trainer.optim_step(STEP).result(PATIENCE_S)
        assert arrived(stub)[-3:] == ["1 step", "2 save", "3 step"]
        assert len(set(bodies(stub, "/optim_step")[:-1])) == 1  # the same bytes, number and key
        assert "optim_step (sequence number 1) was sent again" in caplog.text


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 409, 410, 413, 422])
def test_a_refusal_of_the_server_gives_the_number_back(status: int) -> None:
    with world({"billing_exception_max_pause_duration_sec": 0}) as (stub, trainer):
        outage = Outage(stub, "/optim_step", Answer(status, NO))
        failure = trainer.optim_step(STEP).exception(PATIENCE_S)
        assert isinstance(failure, APIStatusError)
        assert not failure.ambiguous
        outage.end()
        trainer.save_state("a").result(PATIENCE_S)
        assert arrived(stub)[-1] == "1 save"


def test_a_call_that_was_not_sent_in_time_gives_its_number_back() -> None:
    with world() as (stub, trainer):
        late = trainer.optim_step(STEP, deadline=0.0)
        assert isinstance(late.exception(PATIENCE_S), DeadlineError)
        trainer.save_state("a").result(PATIENCE_S)
        assert arrived(stub) == ["1 save"]


def test_calls_behind_it_fail_one_by_one_while_the_outage_lasts_and_then_go_on_in_order() -> None:
    with world() as (stub, trainer):
        outage = Outage(stub, "/optim_step", Answer(503, NO))
        release = stub.hold("/forward_backward")  # so that all calls are queued
        passed = trainer.forward_backward(data(1), "cross_entropy")
        calls = [trainer.optim_step(STEP) for _ in range(6)]
        calls[2].add_done_callback(lambda _: outage.end())
        release.set()
        passed.result(PATIENCE_S)
        in_doubt(calls[0].exception(PATIENCE_S))
        for waited in calls[1:3]:
            refusal = waited.exception(PATIENCE_S)
            assert isinstance(refusal, EarlierCallFailedError)
            assert (refusal.call, refusal.number, refusal.final) == ("optim_step", 2, False)
        # The outage may end while the next one already waits.
        done = [call for call in calls[3:] if call.exception(PATIENCE_S) is None]
        assert len(done) >= 2
        numbers = [call.result(PATIENCE_S).metrics["step:max"] for call in done]
        assert numbers == list(range(3, 3 + len(done)))


@pytest.mark.parametrize("parallel", [False, True])
def test_the_other_chunks_of_a_pass_follow(*, parallel: bool) -> None:
    flags = {"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": parallel}
    with world(flags) as (stub, trainer):
        outage = Outage(stub, "/forward_backward", Answer(503, NO), after=1)
        in_doubt(trainer.forward_backward(data(4), "cross_entropy").exception(PATIENCE_S))
        outage.end()
        count = len(stub.log)
        trainer.optim_step(STEP).result(PATIENCE_S)
        assert arrived(stub)[-1] == "5 step"
        again = [each for each in stub.log[count:] if each.path.endswith("/forward_backward")]
        # The first chunk that was sent is accepted; the pass is completed before the step.
        assert len(again) == 3
        sent = {each for each, _ in bodies(stub, "/forward_backward")}
        assert len(sent) == 4


@pytest.mark.parametrize("call", ["forward", "forward_custom", "forward_backward_custom"])
def test_a_call_whose_forward_pass_is_lost_may_be_repeated(call: str) -> None:
    """No pass with gradients has been sent, so a script that did not repeat it would step without them."""
    loss: Any = "cross_entropy" if call == "forward" else squares
    with world() as (stub, trainer):
        outage = Outage(stub, "/forward_backward", SILENT)
        failure = getattr(trainer, call)(data(1), loss).exception(PATIENCE_S)
        assert isinstance(failure, APIError)
        assert not failure.ambiguous
        assert "you may repeat your call" in str(failure)
        outage.end()
        getattr(trainer, call)(data(1), loss).result(PATIENCE_S)
        again = ["1 forward", "2 forward", "3 backward"]
        assert arrived(stub)[-3:] == (again if "backward" in call else ["1 forward", *again[:2]])


@pytest.mark.parametrize("lost", [False, True], ids=["before it was sent", "after it was sent"])
def test_the_arrays_of_a_failed_call_may_be_changed(*, lost: bool) -> None:
    """A large body consists of views of the user's arrays, until its call has failed."""
    weights = np.ones(50_000, np.float32)
    tokens = types.ModelInput.from_ints([1] * 50_000)
    big = types.Datum(tokens, {"target_tokens": np.ones(50_000, np.int64), "weights": weights})
    flags = {"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": False}
    with world(flags) as (stub, trainer):
        outage = Outage(stub, "/forward_backward", SILENT)
        given = [big] if lost else [*data(1), big]
        in_doubt(trainer.forward_backward(given, "cross_entropy").exception(PATIENCE_S))
        weights[:] = 7.0
        outage.end()
        trainer.optim_step(STEP).result(PATIENCE_S)
        sent = [body for body, _ in bodies(stub, "/forward_backward") if len(body) > 100_000]
        assert np.float32(7).tobytes() * 10 not in sent[-1]
        assert len(set(sent)) == 1


@pytest.mark.parametrize("status", [404, 409, 410])
def test_the_client_ends_only_if_the_server_denies_it(status: int) -> None:
    with world() as (stub, trainer):
        trainer.save_state("before").result(PATIENCE_S)
        outage = Outage(stub, "/optim_step", SILENT)
        in_doubt(trainer.optim_step(STEP).exception(PATIENCE_S))
        outage._answer = Answer(status, {"detail": "no such model"})
        for _ in range(2):
            refusal = trainer.save_state("a").exception(PATIENCE_S)
            assert isinstance(refusal, EarlierCallFailedError)
            assert refusal.final
        assert arrived(stub).count("2 save") == 0
        outage.end()
        recovered = trainer.recover().result(PATIENCE_S)
        assert recovered.optim_step(STEP).result(PATIENCE_S)


def test_a_key_that_is_refused_meanwhile_leaves_the_call_in_doubt() -> None:
    with world() as (stub, trainer):
        stub.script("/optim_step", SILENT, SILENT, Answer(401, NO), Answer(401, NO))
        in_doubt(trainer.optim_step(STEP).exception(PATIENCE_S))
        refusal = trainer.save_state("a").exception(PATIENCE_S)
        assert isinstance(refusal, EarlierCallFailedError)
        assert not refusal.final
        trainer.save_state("a").result(PATIENCE_S)
        assert arrived(stub)[-2:] == ["1 step", "2 save"]


def test_a_blocked_account_is_no_proof_for_an_earlier_try() -> None:
    with world() as (stub, trainer):
        stub.script("/optim_step", SILENT, SILENT, Answer(402, NO), Answer(401, NO))
        in_doubt(trainer.optim_step(STEP).exception(PATIENCE_S))
        trainer.save_state("a").result(PATIENCE_S)
        assert arrived(stub)[-2:] == ["1 step", "2 save"]
        assert len(set(bodies(stub, "/optim_step"))) == 1


@pytest.mark.parametrize("earlier", [[], [Answer(503, NO)], [SILENT, SILENT]], ids=["none", "503", "lost"])
def test_bytes_that_the_server_refuses_do_not_stay_in_doubt(earlier: list[Answer]) -> None:
    """Their number may be used or not. If an earlier try is unknown, a request without effect gets it."""
    with world() as (stub, trainer):
        stub.script("/optim_step", *earlier, Answer(422, NO))
        failure = trainer.optim_step(STEP).exception(PATIENCE_S)
        assert isinstance(failure, APIStatusError)
        assert failure.ambiguous is bool(earlier)
        trainer.save_state("a").result(PATIENCE_S)
        filled = ["1 forward", "2 save"] if earlier else ["1 save"]
        assert arrived(stub)[-len(filled) :] == filled


def test_a_refusal_of_a_call_that_is_sent_again_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Its error has said that it would be done."""
    with world() as (stub, trainer):
        outage = Outage(stub, "/optim_step", Answer(503, NO))
        in_doubt(trainer.optim_step(STEP).exception(PATIENCE_S))
        outage._answer = Answer(422, NO)
        trainer.save_state("a").result(PATIENCE_S)
        said = "optim_step (sequence number 1) was sent again, and the server has refused it: 422"
        assert said in caplog.text
        assert arrived(stub)[-2:] == ["1 forward", "2 save"]
        caplog.clear()
        assert trainer.optim_step(STEP).exception(PATIENCE_S) is not None
        assert "was sent again" not in caplog.text


@pytest.mark.parametrize("call", ["save_state", "save_weights_for_sampler", "forward"])
def test_an_error_of_the_server_in_a_call_that_changes_no_model_ends_nothing(call: str) -> None:
    path = {"save_state": "/save_weights", "forward": "/forward_backward"}.get(call, f"/{call}")
    with world() as (stub, trainer):
        outage = Outage(stub, path, Answer(500, NO))
        given: Any = (data(1), "cross_entropy") if call == "forward" else ("a",)
        failed = getattr(trainer, call)(*given)
        assert isinstance(failed.exception(PATIENCE_S), APIStatusError)
        if call == "forward":  # the request that fills the number goes the same way
            refusal = trainer.save_state("a").exception(PATIENCE_S)
            assert isinstance(refusal, EarlierCallFailedError)
            assert not refusal.final
            outage.end()
        trainer.optim_step(STEP).result(PATIENCE_S)
        assert arrived(stub)[-2:] == ["1 forward", "2 step"]


def test_a_call_that_waits_can_be_cancelled() -> None:
    with world() as (stub, trainer):
        outage = Outage(stub, "/optim_step", SILENT)
        in_doubt(trainer.optim_step(STEP).exception(PATIENCE_S))
        gate = threading.Event()
        outage._answer = Answer(503, NO, gate=gate)
        cancelled = trainer.save_state("b")
        assert cancelled.cancel()
        outage.end()
        gate.set()
        trainer.save_state("c").result(PATIENCE_S)
        assert [json.loads(body)["path"] for body, _ in bodies(stub, "/save_weights")] == ["c"]
        assert arrived(stub)[-1] == "2 save"


def test_a_call_that_waits_ends_at_its_deadline() -> None:
    gate = threading.Event()
    # On the system's clock: on the hasty one, a timer is due before the time of the deadline.
    with StubServer() as stub, ServiceClient(base_url=stub.url, api_key="tml-doubt") as service:
        trainer = service.create_lora_training_client("stub/model").result(PATIENCE_S)
        outage = Outage(stub, "/optim_step", SILENT)
        in_doubt(trainer.optim_step(STEP, deadline=1.0).exception(PATIENCE_S))
        outage._answer = Answer(503, NO, gate=gate)
        late = trainer.save_state("a", deadline=0.1)
        assert isinstance(late.exception(PATIENCE_S), DeadlineError)
        outage.end()
        gate.set()
        trainer.save_state("b").result(PATIENCE_S)
        assert [json.loads(body)["path"] for body, _ in bodies(stub, "/save_weights")] == ["b"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_budget_counts_a_pass_that_is_sent_again_once(count: int) -> None:
    flags = {"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": False}
    with world(flags) as (stub, trainer), trainer.service.budget(tokens=100) as budget:
        outage = Outage(stub, "/forward_backward", SILENT, after=count // 2)
        in_doubt(trainer.forward_backward(data(count), "cross_entropy").exception(PATIENCE_S))
        assert budget.spent_tokens <= 2 * (count // 2)
        outage.end()
        trainer.optim_step(STEP).result(PATIENCE_S)
        until(lambda: budget.spent_tokens == 2 * count)
        trainer.save_state("a").result(PATIENCE_S)
        assert budget.spent_tokens == 2 * count


def test_a_budget_that_is_used_up_does_not_end_a_client() -> None:
    """A request without effect, which fills a number, takes a token that no call of the user asks for."""
    with world() as (stub, trainer), trainer.service.budget(tokens=2) as budget:
        trainer.forward_backward(data(1), "cross_entropy").result(PATIENCE_S)
        stub.script("/optim_step", Answer(503, NO), Answer(422, NO))
        assert isinstance(trainer.optim_step(STEP).exception(PATIENCE_S), APIStatusError)
        trainer.save_state("a").result(PATIENCE_S)
        assert arrived(stub)[-2:] == ["2 forward", "3 save"]
        assert budget.spent_tokens == 2


@pytest.mark.parametrize("waiting", [0, 3])
def test_a_client_can_be_closed(waiting: int) -> None:
    with world() as (stub, trainer):
        outage = Outage(stub, "/optim_step", SILENT)
        in_doubt(trainer.optim_step(STEP).exception(PATIENCE_S))
        outage._answer = Answer(503, NO, gate=threading.Event())
        calls = [trainer.forward(data(1), "cross_entropy") for _ in range(waiting)]
        trainer.service.close("success").result(PATIENCE_S)
        for call in calls:
            assert isinstance(call.exception(PATIENCE_S), (ClientClosedError, EarlierCallFailedError))
        outage._answer.gate.set()  # type: ignore[union-attr]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_cannot_take_over_a_call_in_doubt() -> None:
    with world() as (stub, trainer):
        outage = Outage(stub, "/optim_step", SILENT)
        in_doubt(trainer.optim_step(STEP).exception(PATIENCE_S))
        outage.end()
        pid = os.fork()
        if not pid:
            try:
                trainer.take_over()
            except EarlierCallFailedError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        trainer.save_state("a").result(PATIENCE_S)
        assert arrived(stub)[-2:] == ["1 step", "2 save"]


# ------------------------------------------------------------------------------------------------ the engine
ALL: dict[str, Callable[[], Any]] = {
    "408": lambda: faults.status(408, after_work=True),
    "425": lambda: faults.status(425, after_work=True),
    "429": lambda: faults.status(429, after_work=True),
    "503": lambda: faults.status(503, after_work=True),
    "503 at once": lambda: faults.status(503),
    "502": lambda: faults.status(502, after_work=True),
    "reset": faults.lost_answer,
}


@pytest.mark.parametrize("name", ALL)
def test_the_engine_does_each_call_once_and_in_order(name: str) -> None:
    plan = FaultPlan().on("forward_backward", ALL[name]())
    with engine_ledger() as ledger, fault_server(plan=plan) as server, server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        lost = training.forward_backward([datum_of(mark) for mark in (1, 2, 3)], "cross_entropy", deadline=2)
        in_doubt(lost.exception(PATIENCE_S))
        server.plan = FaultPlan()
        training.optim_step(step_of(4)).result(PATIENCE_S)
        training.save_state("five").result(PATIENCE_S)
        (run,) = ledger.with_marks([1])
        assert [mark for applied in run for mark in applied.marks] == [1, 2, 3, 4, "five"]


def test_a_model_that_the_server_has_lost_cannot_go_on() -> None:
    plan = FaultPlan().on("optim_step", faults.status(503))
    with LocalServer(plan, model=MODEL) as server, server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        in_doubt(training.optim_step(STEP, deadline=2).exception(PATIENCE_S))
        server.plan = FaultPlan().on("optim_step", faults.status(404, detail="no such model"))
        refusal = training.save_state("a").exception(PATIENCE_S)
        assert isinstance(refusal, EarlierCallFailedError)
        assert refusal.final
        assert isinstance(refusal.__cause__, NotFoundError)
