"""Recorded calls: names, ids, bodies and outcomes, and no credential."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import tinker_sync
from tinker_sync.errors import WireError
from tinker_sync.testing import RecordedCall, faults
from tinker_sync.testing._scene import Scene
from tinker_sync.testing.plan import FaultPlan
from tinker_sync.types import ForwardBackwardInput, ForwardBackwardRequest, OptimStepRequest
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.proto.requests import encode_forward_backward_request

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


def test_an_unknown_path_has_no_endpoint() -> None:
    call = record(path="/favicon.ico")
    assert (call.endpoint, call.request, repr(call)) == ("", None, "</api/v1/favicon.ico 1: under way>")


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


def test_a_compressed_body_is_decompressed() -> None:
    call = record(gzip.compress(b'{"a": [1]}'), content_encoding="gzip")
    assert call.body == {"a": [1]}


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


def test_an_unreadable_body_raises_when_it_is_read() -> None:
    call = record(b"\xff{", path="/asample")
    assert call.endpoint == "asample"
    with pytest.raises(ValueError, match=r"decode|Expecting"):
        call.body  # noqa: B018  # the access is the test


@pytest.mark.parametrize("body", [b"\xff{", b'{"note": "key is %b"' % KEY.encode(), b"[" * 100_000])
def test_a_body_that_is_no_json_does_not_fit_its_call(body: bytes) -> None:
    call = record(body, path="/optim_step")
    for name in ("request", "unknown_fields"):
        with pytest.raises(WireError, match="the body cannot be read as JSON") as refused:
            getattr(call, name)
        assert "user" not in str(refused.value)


def test_repr_shows_the_outcome() -> None:
    scene = Scene(FaultPlan().on("asample", faults.reset(), nth=1))
    for status in (None, 200):
        entered: Any = scene.enter(method="POST", path="/api/v1/asample", query="", headers=[], content=b"")
        assert "under way" in repr(entered.call)
        entered.call.status = status
        entered.call.over.set()
    assert [repr(call) for call in scene.calls] == [
        "<asample 1: cut off, Cut(after_work=False, reset=True)>",
        "<asample 2: 200>",
    ]


def test_wait_until_returns_when_the_condition_is_true() -> None:
    scene = Scene(FaultPlan())
    waiting, answers = threading.Event(), []

    def wait() -> None:
        waiting.set()
        answers.append(scene.wait_until(lambda calls: len(calls) == 2, 20))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(120)
    for _ in range(2):
        scene.enter(method="GET", path="/api/v1/healthz", query="", headers=[], content=b"")
    thread.join(120)
    assert answers == [True]
    assert not scene.wait_until(lambda calls: len(calls) == 3, 0.0)


def test_fields_that_a_server_does_not_know_are_listed() -> None:
    call = record(
        b'{"model_id": "m", "adam_params": {"learning_rate": 0.5, "warmth": 1}, "colour": "red"}',
        path="/optim_step",
    )
    assert call.unknown_fields == ("AdamParams.warmth", "OptimStepRequest.colour")
    assert call.request.optim_params.learning_rate == 0.5
    assert record(b'{"model_id": "m", "adam_params": {}}', path="/optim_step").unknown_fields == ()


def test_unknown_fields_of_a_protobuf_body_are_listed_by_number() -> None:
    request = ForwardBackwardRequest(ForwardBackwardInput([datum()], "cross_entropy"), "m", 3)
    content = encode_forward_backward_request(request).join()
    call = record(
        content + bytes.fromhex("980101"), path="/forward_backward", content_type="application/x-protobuf"
    )
    assert call.unknown_fields == ("ForwardBackwardRequest.19",)
    assert call.request == request
