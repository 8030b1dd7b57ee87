"""Plans: the calls they select, the values they refuse, and that they are immutable."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from tinker_sync.errors import InvalidInputError
from tinker_sync.testing import FaultPlan, faults
from tinker_sync.testing._scene import Scene
from tinker_sync.wire.endpoints import ENDPOINTS


def struck(plan: FaultPlan, calls: list[str], *, scene: Scene | None = None) -> list[int]:
    """Make calls of these endpoints, and return the positions, from 1, of those that get a fault."""
    scene = scene or Scene(plan)
    return [number for number, name in enumerate(calls, 1) if ask(scene, name) is not None]


def ask(scene: Scene, name: str, body: bytes = b"{}") -> faults.Fault | None:
    ids = {slot: f"{slot}-1" for slot in ENDPOINTS[name].path.names}
    decision = scene.enter(
        method=ENDPOINTS[name].method,
        path=ENDPOINTS[name].path_for(**ids),
        query="",
        headers=[],
        content=body,
    )
    return decision.fault


@pytest.mark.parametrize(
    ("nth", "expected"),
    [
        (None, [1, 2, 3, 4, 5, 6]),
        (1, [1]),
        (6, [6]),
        (range(2, 4), [2, 3]),
        (range(1, 100, 2), [1, 3, 5]),
        ((2, 5), [2, 5]),
        ([5, 2], [2, 5]),
        ({3}, [3]),
    ],
)
def test_nth_selects_calls(nth: Any, expected: list[int]) -> None:
    plan = FaultPlan().on("asample", faults.reset(), nth=nth)
    assert struck(plan, ["asample"] * 6) == expected


def test_calls_of_other_endpoints_do_not_count() -> None:
    plan = FaultPlan().on("asample", faults.reset(), nth=2)
    assert struck(plan, ["asample", "optim_step", "optim_step", "asample", "asample"]) == [4]


def test_a_star_matches_every_call() -> None:
    plan = FaultPlan().on("*", faults.reset(), nth=3)
    assert struck(plan, ["asample", "optim_step", "healthz", "asample"]) == [3]


def test_nth_counts_only_calls_that_a_predicate_accepts() -> None:
    plan = FaultPlan().on("optim_step", faults.reset(), nth=2, when=lambda call: call.body["seq_id"] % 2)
    scene = Scene(plan)
    bodies = [b'{"seq_id": %d}' % number for number in (1, 2, 3, 4, 5)]
    assert [ask(scene, "optim_step", body) is not None for body in bodies] == [0, 0, 1, 0, 0]


def test_an_exception_of_a_predicate_is_kept() -> None:
    scene = Scene(FaultPlan().on("optim_step", faults.reset(), when=lambda call: call.body["typo"]))
    assert ask(scene, "optim_step", b'{"seq_id": 1}') is None
    [failure] = scene.failures
    assert isinstance(failure, KeyError)


def test_the_first_matching_rule_decides() -> None:
    plan = (
        FaultPlan()
        .on("asample", faults.status(503), nth=1)
        .on("asample", faults.status(500), nth=(1, 2))
        .on("*", faults.status(404), nth=3)
    )
    scene = Scene(plan)
    statuses = [getattr(ask(scene, "asample"), "status", 200) for _ in range(4)]
    assert statuses == [503, 500, 404, 200]
    assert scene.pending == ()


def test_unused_rules_are_pending() -> None:
    plan = FaultPlan().on("asample", faults.reset(), nth=2).on("optim_step", faults.reset(), nth=1)
    scene = Scene(plan)
    assert scene.pending == plan.rules
    ask(scene, "asample")
    ask(scene, "optim_step")
    assert scene.pending == plan.rules[:1]
    ask(scene, "asample")
    assert scene.pending == ()


def test_a_new_plan_counts_from_one() -> None:
    plan = FaultPlan().on("asample", faults.reset(), nth=2)
    scene = Scene(plan)
    assert struck(plan, ["asample"] * 3, scene=scene) == [2]
    scene.follow(plan)
    assert struck(plan, ["asample"] * 3, scene=scene) == [2]
    assert [call.number for call in scene.calls] == [1, 2, 3, 4, 5, 6]
    assert [call.order for call in scene.calls] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("assample", "'asample'"),
        ("forward_backwards", "'forward_backward'"),
        ("retreive_future", "'retrieve_future' or 'retrieve_futures'"),
        ("/api/v1/asample", "'asample'"),
        ("ASAMPLE", "'asample'"),
        ("qqqq", "there are client_config, dynamic_config"),
    ],
)
def test_a_mistyped_endpoint_gets_a_suggestion(name: str, near: str) -> None:
    for refused in (lambda: FaultPlan().on(name, faults.reset()), lambda: FaultPlan().latency(name, 1.0)):
        with pytest.raises(InvalidInputError, match="no call is named") as caught:
            refused()
        assert near in str(caught.value)


@pytest.mark.parametrize(
    "nth", [0, -1, True, (1, 0), [2.5], {"1"}, range(3), range(3, 3), 2.5, "x", object()]
)
def test_an_impossible_nth_is_refused(nth: Any) -> None:
    with pytest.raises(InvalidInputError):
        FaultPlan().on("asample", faults.reset(), nth=nth)


@pytest.mark.parametrize("fault", [faults.reset, 503])
def test_a_fault_must_be_a_fault(fault: Any) -> None:
    with pytest.raises(InvalidInputError, match="is not a fault"):
        FaultPlan().on("asample", fault)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: faults.status(99),
        lambda: faults.status(600),
        lambda: faults.too_many_requests(-1),
        lambda: faults.too_many_requests(float("nan")),
        lambda: faults.too_many_requests(float("inf")),
        lambda: faults.too_many_requests(1, form="hours"),  # type: ignore[arg-type]
        lambda: faults.truncated(1.0),
        lambda: faults.truncated(-0.1),
        lambda: faults.slow(1, pieces=1),
        lambda: faults.slow(-1),
        lambda: FaultPlan().latency("asample", -1),
        lambda: FaultPlan().latency("asample", float("nan")),
        lambda: FaultPlan().latency("asample", lambda _: 1.0),  # type: ignore[arg-type]
        lambda: FaultPlan().latency("asample", "1"),  # type: ignore[arg-type]
    ],
)
def test_invalid_values_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInputError):
        wrong()


def test_a_plan_is_immutable() -> None:
    empty = FaultPlan()
    numbers = [1]
    plan = empty.on("asample", faults.reset(), nth=numbers)
    assert empty == FaultPlan()
    assert plan != empty
    numbers.append(2)
    assert plan.rules[0].nth == (1,)
    with pytest.raises(AttributeError):
        plan.rules = ()  # type: ignore[misc]
    assert plan == FaultPlan().on("asample", faults.reset(), nth=[1])
    assert hash(plan) == hash(FaultPlan().on("asample", faults.reset(), nth=[1]))
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)


def test_repr_shows_values_that_differ_from_the_default() -> None:
    plan = FaultPlan().on("asample", faults.too_many_requests(2, form="date"), nth=2)
    assert repr(plan.rules[0].fault) == (
        'FixedReply(status=429, body=b\'{"detail": "too many requests"}\', '
        "retry_after_s=2, retry_after_form='date')"
    )
    assert "nth=2" in repr(plan)


# ------------------------------------------------------------------------------------------ latency
def test_the_first_matching_latency_applies() -> None:
    plan = FaultPlan().latency("asample", 2.0).latency("*", 1.0)
    assert (plan.latency_of("asample"), plan.latency_of("optim_step")) == (2.0, 1.0)
    assert FaultPlan().latency("asample", 2.0).latency_of("optim_step") == 0.0


def test_the_arguments_and_names_of_earlier_versions_say_what_to_use() -> None:
    from tinker_sync import testing

    with pytest.raises(TypeError, match="takes a number of seconds"):
        FaultPlan(seed=3)
    with pytest.raises(AttributeError, match="takes a number of seconds"):
        testing.latency  # noqa: B018
    with pytest.raises(TypeError, match="unexpected keyword argument 'rule'"):
        FaultPlan(rule=())
