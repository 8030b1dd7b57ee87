"""The client under faults: training gives the same numbers as without faults.

Every kind of fault meets every kind of call once. Then a few random plans run; `TINKER_FAULT_PLANS=200` runs
200 of them.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from support.training_job import MODEL, train

from tinker_sync.errors import APIStatusError, AuthenticationError, RequestFailedError
from tinker_sync.testing import Fault, FaultPlan, LocalServer, faults

pytestmark = pytest.mark.usefixtures("quiet_logs")

PLANS = int(os.environ.get("TINKER_FAULT_PLANS", "3"))
# The steps of a long training, in which lost or repeated work changes the numbers.
LONG = 10

# All calls of the job except the retrieval of results, which has its own rules.
CALLS = (
    *("client_config", "dynamic_config", "create_session", "create_model", "forward_backward", "optim_step"),
    *("save_weights_for_sampler", "asample", "save_weights"),
)
WITH_BILLING = ("forward_backward", "optim_step", "save_weights_for_sampler", "asample", "save_weights")

KINDS: dict[str, Fault] = {
    "429 with seconds": faults.too_many_requests(2),
    "429 with a date": faults.too_many_requests(2, form="date"),
    "429 with milliseconds": faults.too_many_requests(0.5, form="milliseconds"),
    "429 without": faults.too_many_requests(),
    "408": faults.status(408),
    "408 with a queue state": faults.queue_paused("paused_rate_limit", "busy"),
    "500": faults.status(500),
    "502 after the work": faults.status(502, after_work=True),
    "503 with seconds": faults.status(503, retry_after=2),
    "an empty 400": faults.empty_bad_request(),
    "a truncated answer": faults.truncated(),
    "a slow answer": faults.slow(2),
    "a reset": faults.reset(),
    "a lost answer": faults.lost_answer(),
    "a hang-up": faults.hang_up(),
    "a hang-up after the work": faults.hang_up(after_work=True),
}
# Faults that mean something else for the retrieval of results.
_SPECIAL = (
    *("429 with a date", "429 without", "408 with a queue state", "500", "an empty 400"),
    *("a truncated answer", "a slow answer", "a reset", "a hang-up after the work"),
)
RESULTS: dict[str, Fault] = {
    **{kind: KINDS[kind] for kind in _SPECIAL},
    "402": faults.status(402),
    "404": faults.status(404),
    "garbage": faults.garbage(),
    "half an object": faults.garbage(b'{"metrics": {', "application/json"),
}


def run(plan: FaultPlan, **options: Any) -> tuple[dict[str, Any], LocalServer]:
    with LocalServer(plan, model=MODEL, **options) as server, server.service() as service:
        return train(service), server


@pytest.fixture(scope="module")
def quiet() -> dict[str, Any]:
    return run(FaultPlan())[0]


@pytest.mark.parametrize("kind", KINDS)
def test_calls_survive_a_fault(kind: str, quiet: dict[str, Any]) -> None:
    plan = FaultPlan()
    for call in CALLS:
        plan = plan.on(call, KINDS[kind], nth=2 if call in ("forward_backward", "asample") else 1)
    outcome, server = run(plan)
    assert outcome == quiet
    assert server.pending_faults == ()


@pytest.mark.parametrize("kind", RESULTS)
def test_results_survive_a_fault(kind: str, quiet: dict[str, Any]) -> None:
    # The first result is of the creation of the model, the last of the checkpoint.
    outcome, server = run(FaultPlan().on("retrieve_future", RESULTS[kind], nth=(1, 4, 8)))
    assert outcome == quiet
    assert server.pending_faults == ()


def test_a_billing_pause_is_waited_out(quiet: dict[str, Any]) -> None:
    plan = FaultPlan()
    for call in WITH_BILLING:
        plan = plan.on(call, faults.status(402), nth=1)
    outcome, server = run(plan)
    assert outcome == quiet
    assert server.pending_faults == ()


def test_a_sample_with_a_lost_promise_is_submitted_again(quiet: dict[str, Any]) -> None:
    def is_sample(call: Any) -> bool:
        return call.headers["x-tinker-request-type"] == "Sample"

    # After the work, because the last bits of a sample depend on those that the engine computes with it.
    lost = faults.status(410, after_work=True)
    plan = FaultPlan().on("retrieve_future", lost, nth=(1, 2), when=is_sample)
    outcome, server = run(plan)
    assert outcome == quiet
    assert server.pending_faults == ()
    numbers = [call.body["seq_id"] for call in server.calls_to("asample")]
    assert len(numbers) == len(set(numbers)) == 3 + 2


def test_the_json_protocol_survives_faults() -> None:
    plan = FaultPlan()
    for call in ("forward_backward", "optim_step", "asample", "retrieve_future"):
        plan = plan.on(call, faults.too_many_requests(1), nth=2).on(call, faults.status(503), nth=3)
    outcome, server = run(plan, json_only=True)
    assert outcome == run(FaultPlan(), json_only=True)[0]
    assert len(server.calls_to("client_config")) >= 1
    assert all("protobuf" not in call.headers["content-type"] for call in server.calls_to("forward_backward"))


# ------------------------------------------------------------------------------------------ the loss curve
def random_plan(seed: int) -> FaultPlan:
    """Return a plan of faults, which the client survives, for nearly half of the calls of a training."""
    chance = random.Random(seed)
    lost = faults.lost_answer()
    plan = FaultPlan().on("forward_backward", lost, nth=3).on("optim_step", lost, nth=2)
    for name in (
        "create_session",
        "create_model",
        "forward_backward",
        "optim_step",
        "asample",
        "save_weights",
    ):
        for number in range(1, 3 * LONG):
            if chance.random() < 0.45:
                plan = plan.on(name, chance.choice(list(KINDS.values())), nth=number)
    kinds = [fault for name, fault in RESULTS.items() if name not in ("404", "garbage", "half an object")]
    for number in range(1, 6 * LONG):
        if chance.random() < 0.45:
            plan = plan.on("retrieve_future", chance.choice(kinds), nth=number)
    return plan


@pytest.fixture(scope="module")
def quiet_curve() -> dict[str, Any]:
    with LocalServer(model=MODEL) as server, server.service() as service:
        return train(service, steps=LONG)


@pytest.mark.parametrize("seed", range(PLANS))
def test_training_under_random_faults_has_the_same_curve(seed: int, quiet_curve: dict[str, Any]) -> None:
    plan = random_plan(seed)
    with LocalServer(plan, model=MODEL, pace=0.001) as server, server.service() as service:
        outcome = train(service, steps=LONG)
        struck = [call for call in server.calls if call.fault is not None]
    assert outcome == quiet_curve
    # Several kinds of calls got faults, and some replies were lost after the work was done.
    assert len(struck) >= 12
    assert len({call.endpoint for call in struck} & {"forward_backward", "optim_step", "retrieve_future"}) > 1
    lost = [call for call in struck if getattr(call.fault, "after_work", False)]
    assert lost


# ------------------------------------------------------------------------------------------ fatal faults
@pytest.mark.parametrize(
    ("call", "fault", "error"),
    [
        ("optim_step", faults.status(401), AuthenticationError),
        ("forward_backward", faults.status(410), APIStatusError),
        ("retrieve_future", faults.promise_failed("out of memory"), RequestFailedError),
        ("asample", faults.session_expired(), APIStatusError),
    ],
)
def test_fatal_faults_raise(call: str, fault: Fault, error: type[Exception]) -> None:
    plan = FaultPlan().on(call, fault, nth=1)
    with LocalServer(plan, model=MODEL) as server, server.service() as service, pytest.raises(error):
        train(service)


def test_an_expired_session_fails_and_a_new_client_works() -> None:
    plan = FaultPlan().on("optim_step", faults.session_expired(), nth=1)
    with LocalServer(plan, model=MODEL) as server:
        with server.service() as service, pytest.raises(APIStatusError, match="the session has expired"):
            train(service)
        with server.service() as another:
            assert train(another)["losses"]
