"""Plans of faults, the calls that they select, and recorded calls, which hold no credential."""

from __future__ import annotations

import copy
import gzip
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import tinker_sync
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.testing import FaultPlan, RecordedCall, faults
from tinker_sync.testing._scene import Scene
from tinker_sync.types import ForwardBackwardInput, ForwardBackwardRequest, OptimStepRequest
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.endpoints import ENDPOINTS
from tinker_sync.wire.proto.requests import encode_forward_backward_request


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


# ------------------------------------------------------------------------------------------ latency


def test_the_arguments_and_names_of_earlier_versions_say_what_to_use() -> None:
    from tinker_sync import testing

    with pytest.raises(TypeError, match="takes a number of seconds"):
        FaultPlan(seed=3)
    with pytest.raises(AttributeError, match="takes a number of seconds"):
        testing.latency  # noqa: B018
    with pytest.raises(TypeError, match="unexpected keyword argument 'rule'"):
        FaultPlan(rule=())


KEY = "tml-a-secret-key-of-a-user"


def record(
    content: bytes = b"", *, path: str = "/asample", method: str = "POST", query: str = "", **headers: str
) -> RecordedCall:
    named: Mapping[str, str] = {name.replace("_", "-"): value for name, value in headers.items()}
    scene = Scene(FaultPlan())
    scene.enter(method=method, path=f"/api/v1{path}", query=query, headers=named.items(), content=content)
    return scene.calls[0]


def datum() -> tinker_sync.Datum:
    return tinker_sync.Datum(
        tinker_sync.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]}
    )


def test_a_known_path_has_an_endpoint_and_ids() -> None:
    call = record(method="DELETE", path="/training_runs/r%201/checkpoints/weights/a", query="a=1&b=&c=x%20y")
    assert call.endpoint == "delete_checkpoint"
    assert call.ids == {"run": "r 1", "checkpoint": "weights/a"}
    assert call.query == {"a": "1", "b": "", "c": "x y"}
    assert (call.order, call.number, call.status, call.fault, call.body) == (1, 1, None, None, None)


def test_a_json_body_as_data_and_as_a_value() -> None:
    call = record(
        b'{"model_id": "m", "seq_id": 3, "adam_params": {"learning_rate": 0.5}, "type": "optim_step"}',
        path="/optim_step",
    )
    assert call.body["adam_params"] == {"learning_rate": 0.5}
    assert isinstance(call.request, OptimStepRequest)
    assert (call.request.seq_id, call.request.optim_params.learning_rate) == (3, 0.5)


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_protobuf_body_as_json_data(forward_only: bool) -> None:
    request = ForwardBackwardRequest(ForwardBackwardInput([datum()], "cross_entropy"), "m", 4)
    content = encode_forward_backward_request(request, forward_only=forward_only).join()
    call = record(content, path="/forward_backward", content_type="application/x-protobuf")
    assert isinstance(call.request, ForwardBackwardRequest)
    assert call.request.seq_id == 4
    assert call.body["forward_only"] is forward_only
    shown = call.body["forward_backward_input"]["data"][0]
    expected = wire_json.loads(wire_json.encode(request))["forward_backward_input"]["data"][0]
    assert list(np.asarray(shown["model_input"]["chunks"][0]["tokens"])) == [1, 2, 3]
    weights = shown["loss_fn_inputs"]["weights"]
    assert list(np.asarray(weights["data"])) == expected["loss_fn_inputs"]["weights"]["data"] == [0, 1, 0.5]
    assert call.body["forward_backward_input"]["loss_fn"] == "cross_entropy"


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(b"{}" * 1000)], ids=["damaged", "too large"])
def test_a_body_that_cannot_be_decompressed_does_not_fit_its_call(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_sync.testing.calls._LARGEST_BODY", 100)
    call = record(content, path="/optim_step", content_encoding="gzip")
    for name in ("body", "request", "unknown_fields"):
        with pytest.raises(WireError, match="the body cannot be decoded as 'gzip'"):
            getattr(call, name)


def test_credentials_are_masked() -> None:
    call = record(
        b'{"path": "tinker://r/weights/a", "weights_access_token": "hidden-token", "optimizer": true,'
        b' "model_id": "m", "seq_id": 1, "user_metadata": {"note": "key is %b"}}' % KEY.encode(),
        path="/load_weights",
        query=f"api_key={KEY}&token=hidden-token&limit=3",
        x_api_key=KEY,
        authorization="Bearer hidden-token",
        cf_access_client_secret="hidden-token",
        accept="text/x",
    )
    shown = f"{call!r} {call.headers!r} {dict(call.headers)} {call.query} {call.body}"
    assert KEY not in shown
    assert "hidden-token" not in shown
    assert call.headers["X-API-KEY"] == "***"
    assert call.headers["accept"] == "text/x"
    assert call.query["limit"] == "3"
    assert call.body["weights_access_token"] == call.request.weights_access_token == "***"
    assert call.request.path == "tinker://r/weights/a"


@pytest.mark.parametrize("body", [b"\xff{", b'{"note": "key is %b"' % KEY.encode(), b"[" * 100_000])
def test_a_body_that_is_no_json_does_not_fit_its_call(body: bytes) -> None:
    call = record(body, path="/optim_step")
    for name in ("request", "unknown_fields"):
        with pytest.raises(WireError, match="the body cannot be read as JSON") as refused:
            getattr(call, name)
        assert "user" not in str(refused.value)


def test_fields_that_a_server_does_not_know_are_listed() -> None:
    call = record(
        b'{"model_id": "m", "adam_params": {"learning_rate": 0.5, "warmth": 1}, "colour": "red"}',
        path="/optim_step",
    )
    assert call.unknown_fields == ("AdamParams.warmth", "OptimStepRequest.colour")
    assert call.request.optim_params.learning_rate == 0.5
    assert record(b'{"model_id": "m", "adam_params": {}}', path="/optim_step").unknown_fields == ()


@pytest.mark.parametrize("fault", [faults.reset, 503])
def test_a_fault_must_be_a_fault(fault: Any) -> None:
    with pytest.raises(InvalidInputError, match="is not a fault"):
        FaultPlan().on("asample", fault)
