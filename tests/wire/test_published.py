"""Published descriptions of servers: their routes, the fields of bodies, and content of any other form."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tinker_sync import types
from tinker_sync.wire.endpoints import ENDPOINTS
from tinker_sync.wire.published import PublishedApi, used_fields

STEP = ENDPOINTS["optim_step"]
CLIP = ("adam_params", "grad_clip_norm")


def api_with(schema: Any, **schemas: Any) -> PublishedApi:
    body = {"content": {"application/json": {"schema": schema}}}
    paths = {"/api/v1/optim_step": {"post": {"requestBody": body}}}
    found = PublishedApi.read(json.dumps({"paths": paths, "components": {"schemas": schemas}}).encode())
    assert found is not None
    return found


def reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


ADAM = {"properties": {"learning_rate": {}}}


@pytest.mark.parametrize(
    ("schema", "drops"),
    [
        ({"properties": {"adam_params": ADAM}}, True),
        ({"properties": {"adam_params": reference("Adam")}}, True),
        ({"properties": {"adam_params": {"anyOf": [reference("Adam"), {"type": "null"}]}}}, True),
        ({"properties": {}}, True),
        ({"properties": {"adam_params": {"properties": {"grad_clip_norm": {}}}}}, False),
        ({"properties": {"adam_params": {**ADAM, "additionalProperties": False}}}, False),  # it refuses
        ({"properties": {"adam_params": {"anyOf": [reference("Adam"), {"type": "string"}]}}}, False),
        ({"type": "object", "additionalProperties": True}, False),
        (reference("Itself"), False),
        (reference("Nothing"), False),
        (None, False),
        ([], False),
    ],
    ids=str,
)
def test_fields_that_a_body_drops(schema: Any, drops: bool) -> None:
    api = api_with(schema, Adam=ADAM, Itself=reference("Itself"))
    assert api.drops(STEP, CLIP) is drops
    assert not api.drops(ENDPOINTS["save_weights"], ("ttl_seconds",))


@pytest.mark.parametrize(
    ("path", "method", "name", "offers"),
    [
        ("/api/v1/training_runs/{unique_id}/checkpoints/{checkpoint_path}", "delete", "delete_checkpoint", 1),
        ("/api/v1/training_runs/{unique_id}/checkpoints/{checkpoint_path}", "get", "delete_checkpoint", 0),
        ("/api/v1/training_runs/{id}/checkpoints/{id}/archive", "get", "get_checkpoint_archive", 1),
        ("/api/v1/checkpoints", "get", "list_user_checkpoints", 1),
        ("/api/v1/checkpoints", "parameters", "list_user_checkpoints", 0),
    ],
)
def test_routes_are_compared_by_their_form(path: str, method: str, name: str, offers: int) -> None:
    api = PublishedApi.read(json.dumps({"paths": {path: {method: {}}}}).encode())
    assert api.offers(ENDPOINTS[name]) is bool(offers)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"{}", b'{"paths": []}', b'{"paths": {"/": {}}}', b'{"paths": null}']
)
def test_content_of_another_form_describes_nothing(body: bytes) -> None:
    assert PublishedApi.read(body) is None


def test_routes_are_read_in_linear_time() -> None:
    """A path of 100 kB stopped all threads of the process for three seconds, one of 1 MB for minutes."""
    begin = time.process_time()
    api = PublishedApi.read(json.dumps({"paths": {"/api/v1/" + "{" * 100_000: {}}}).encode())
    assert api is not None
    assert time.process_time() - begin < 1.0


def test_only_values_with_an_effect_are_looked_up() -> None:
    assert (
        used_fields("optim_step", types.OptimStepRequest(model_id="m", optim_params=types.AdamParams())) == []
    )
    clipped = types.OptimStepRequest(
        model_id="m", optim_params=types.AdamParams(grad_clip_norm=0.5, weight_decay=0.1)
    )
    assert [field.name for field in used_fields("optim_step", clipped)] == [
        "adam_params.grad_clip_norm",
        "adam_params.weight_decay",
    ]
    saved = types.SaveWeightsRequest(model_id="m", path="a", overwrite=True)
    assert [field.name for field in used_fields("save_weights", saved)] == ["overwrite"]
