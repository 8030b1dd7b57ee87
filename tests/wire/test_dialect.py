"""The dialect of a server is decided from its recorded answers."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from tinker_sync import types
from tinker_sync.config import Settings
from tinker_sync.errors import ConfigurationError, InvalidInputError, UnsupportedByServerError
from tinker_sync.runtime.calls import make_call
from tinker_sync.wire.adapt import fit, json_body
from tinker_sync.wire.dialect import (
    CURRENT,
    FEATURES,
    Dialect,
    DialectCache,
    NeedsProbe,
    decide,
    read_probe,
)
from tinker_sync.wire.endpoints import ENDPOINTS, Endpoint
from tinker_sync.wire.published import PublishedApi, used_fields

# The settings that servers of each kind send.
FOUR_FLAGS = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "sample_dispatch_bytes_semaphore_size": 10485760,
    "inflight_response_bytes_semaphore_size": 52428800,
}
V25 = {**FOUR_FLAGS, "proto_compress_fwdbwd": False, "fwdbwd_max_chunk_len": 1024}
V36 = {
    **V25,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}


def decided(status: int, config: object, **options: Any) -> Dialect:
    found = decide(status, config, **options)
    assert isinstance(found, Dialect)
    return found


@pytest.mark.parametrize("status", [404, 405, 501])
def test_no_client_config_means_an_old_json_server(status: int) -> None:
    dialect = decided(status, None)
    assert (dialect.protobuf, dialect.forward_only, dialect.client_config) == (False, False, False)
    assert not dialect.offers("auth_token")
    assert not dialect.offers("finish_session")
    assert dialect.offers("get_checkpoint_archive")


def test_chunk_settings_mean_protobuf() -> None:
    dialect = decided(200, V25)
    assert (dialect.protobuf, dialect.forward_only, dialect.zstd) == (True, True, False)
    assert dialect.version == (0, 25)


def test_versions_that_no_server_speaks_are_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedByServerError, match=r"0\.19 to 0\.24 .*dialect='json'"):
        decide(200, {**FOUR_FLAGS, "proto_write_fwdbwd": False})
    newer = {**V25, "proto_write_fwdbwd": True, "create_model_via_load_weights": False}
    assert decided(200, newer).version == (0, 25)  # a setting may stay when others come


@pytest.mark.parametrize("config", [FOUR_FLAGS, {"pjwt_auth_enabled": False}, {}, None, []])
def test_settings_without_an_age_ask_for_a_probe(config: object) -> None:
    assert decide(200, config) == NeedsProbe()
    assert decided(200, config, probe="json").protobuf is False
    assert decided(200, config, probe="protobuf").protobuf is True


def test_a_probed_server_is_never_asked_to_train_by_mistake() -> None:
    # A server with protobuf and without `forward_only` would accumulate gradients in a forward pass.
    assert decided(200, FOUR_FLAGS, probe="protobuf").forward_only is False


def complaint(place: list[object], kind: str) -> bytes:
    return json.dumps({"detail": [{"loc": place, "type": kind, "msg": "m", "input": "\n\x05probe"}]}).encode()


@pytest.mark.parametrize(
    ("status", "body", "spoken"),
    [
        (422, complaint(["body"], "model_attributes_type"), "json"),
        (422, complaint(["body"], "type_error.dict"), "json"),
        (422, complaint(["body", 0], "json_invalid"), "json"),
        (415, b"", "json"),
        (500, b"Internal Server Error", "json"),
        (422, complaint(["body", "forward_backward_input"], "missing"), "protobuf"),
        (422, b'{"detail": "unknown model probe"}', "protobuf"),
        (404, b'{"detail": "Model not found"}', "protobuf"),
        (400, b"<html>", "protobuf"),
        (200, b'{"request_id": "r"}', "protobuf"),
        (202, b"{}", "protobuf"),
        (401, b"{}", None),
        (429, b"", None),
        (503, b"", None),
    ],
)
def test_reading_the_answer_to_the_probe(status: int, body: bytes, spoken: str | None) -> None:
    assert read_probe(status, body) == spoken


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'{"detail": []}', b'{"detail": [1]}', b'{"detail": [{"loc": 3}]}', b"[" * 100_000],
)
def test_odd_answers_to_the_probe_do_not_break_it(body: bytes) -> None:
    assert read_probe(422, body) == "protobuf"


def test_what_dynamic_config_adds() -> None:
    old = decided(200, V25)
    assert old.dynamic_config is None
    assert old.offers("dynamic_config")
    missing = old.after_dynamic_config(404, None)
    assert missing.dynamic_config is False
    assert not missing.offers("dynamic_config")
    newer = old.after_dynamic_config(200, {"refresh_interval_sec": 300, "sample_cancel_enabled": True})
    assert newer.dynamic_config is True
    assert newer.version == (0, 26)
    assert old.after_dynamic_config(503, None) is old
    assert decided(200, V36).after_dynamic_config(200, {"refresh_interval_sec": 1}).version == CURRENT


@pytest.mark.parametrize("feature", FEATURES)
def test_features_belong_to_versions(feature: str) -> None:
    assert Dialect.of_vendor().knows(feature)
    assert decided(200, V36).knows(feature)
    assert not decided(404, None).knows(feature)
    assert not decided(200, FOUR_FLAGS, probe="protobuf").knows(feature)


def repeatable(row: Endpoint, dialect: Dialect | None) -> bool:
    settings = Settings.resolve(base_url="http://h", api_key="tml-test", environ={})
    return make_call(row.name, settings, {}, dialect=dialect).repeatable


def test_only_servers_that_keep_numbers_get_numbered_calls_twice() -> None:
    optim_step, asample = ENDPOINTS["optim_step"], ENDPOINTS["asample"]
    assert not optim_step.repeatable
    assert repeatable(optim_step, decided(200, V36))
    assert not repeatable(optim_step, decided(404, None))
    assert not repeatable(optim_step, None)
    assert repeatable(asample, decided(404, None))
    assert repeatable(ENDPOINTS["retrieve_future"], decided(404, None))


def test_the_dialect_can_be_forced() -> None:
    assert Dialect.forced("json").protobuf is False
    assert Dialect.forced("proto").forward_only is True
    mine = Dialect(version=(0, 18), protobuf=True)
    assert Dialect.forced(mine) is mine
    with pytest.raises(ConfigurationError):
        Dialect.forced("auto")


def test_what_was_found_can_be_forgotten() -> None:
    cache = DialectCache()
    cache.keep("http://h", Dialect.of_vendor())
    cache.clear()
    assert cache.get("http://h") is None


# ----- Requests are converted for older servers, and refused if the conversion would lose something
OLD = Dialect.forced("json")
NEW = Dialect.of_vendor()
TUFT = decide(200, {"fwdbwd_max_chunk_len": 1024})
assert isinstance(TUFT, Dialect)


def sample(**fields: Any) -> types.SampleRequest:
    fields.setdefault("sampling_params", types.SamplingParams(max_tokens=4))
    return types.SampleRequest(prompt=types.ModelInput.from_ints([1, 2, 3]), **fields)


def examples(*inputs: dict[str, Any], **fields: Any) -> types.ForwardBackwardInput:
    data = [types.Datum(types.ModelInput.from_ints([1, 2, 3, 4]), each) for each in inputs]
    return types.ForwardBackwardInput(data, "cross_entropy", **fields)


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"topk_sample_logprobs": 3}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": types.TensorData([1, 2], "int64", [2, 1])}, "target_prompt_logprobs"),
    ],
)
def test_sampling_features_that_would_vanish_are_refused(fields: dict[str, Any], feature: str) -> None:
    for dialect in (OLD, TUFT):
        with pytest.raises(UnsupportedByServerError) as caught:
            fit(sample(**fields), dialect)
        assert caught.value.feature == feature
    fit(sample(**fields), NEW)


def test_text_in_the_loss_config_is_refused() -> None:
    given = examples({"target_tokens": [1, 2, 3, 4]}, loss_fn_config={"reduction": "mean"})
    with pytest.raises(UnsupportedByServerError, match="text in loss_fn_config"):
        fit(given, TUFT)
    fit(given, NEW)
    fit(examples({"target_tokens": [1, 2, 3, 4]}, loss_fn_config={"clip": 0.2}), OLD)


def test_newer_optimizers_and_ways_of_loading_are_refused() -> None:
    requests = [
        types.OptimStepRequest(optim_params=types.DimuonParams(learning_rate=0.1), model_id="m", seq_id=1),
        types.CreateModelRequest(
            session_id="s", model_seq_id=0, base_model="b", optimizer_config=types.DimuonOptimizerConfig()
        ),
        types.LoadWeightsRequest(session_id="s", model_seq_id=0, path="p", optimizer=True),
    ]
    for request in requests:
        with pytest.raises(UnsupportedByServerError):
            fit(request, OLD)
        fit(request, NEW)
    fit(types.OptimStepRequest(optim_params=types.AdamParams(), model_id="m"), OLD)
    fit(types.LoadWeightsRequest(model_id="m", seq_id=1, path="p", optimizer=False), OLD)


def test_a_stop_text_travels_in_a_list_to_older_servers() -> None:
    request = sample(sampling_params=types.SamplingParams(max_tokens=4, stop="END"))
    assert fit(request, OLD).sampling_params.stop == ["END"]
    assert fit(request, NEW) is request
    listed = sample(sampling_params=types.SamplingParams(max_tokens=4, stop=[5]))
    assert fit(listed, OLD) is listed


def test_older_servers_need_max_tokens() -> None:
    request = sample(sampling_params=types.SamplingParams())
    with pytest.raises(UnsupportedByServerError, match="max_tokens"):
        fit(request, OLD)
    assert fit(request, NEW) is request
    assert fit(request, OLD, context_length=lambda: 4).sampling_params.max_tokens == 1
    with pytest.raises(InvalidInputError, match="no room"):
        fit(request, OLD, context_length=lambda: 3)


def test_sparse_and_shaped_tensors_become_flat() -> None:
    dense = np.array([[0.0, 0.0, 2.0, 0.0]], dtype=np.float32)
    sparse = types.TensorData(
        data=[2.0], dtype="float32", shape=[1, 4], sparse_crow_indices=[0, 1], sparse_col_indices=[2]
    )
    given = examples(
        {"target_tokens": types.TensorData([[1, 2, 3, 4]], "int64", [1, 4]), "weights": sparse},
        {"target_tokens": [1, 2, 3, 4]},
    )
    flat = fit(given, OLD)
    weights = flat.data[0].loss_fn_inputs["weights"]
    assert (weights.is_sparse, weights.shape, weights.data) == (False, [4], dense.reshape(-1).tolist())
    assert flat.data[0].loss_fn_inputs["target_tokens"].shape == [4]
    assert flat.data[1] is given.data[1]
    assert fit(given, NEW) is given


def test_two_real_dimensions_are_refused_with_their_place() -> None:
    given = examples({"target_tokens": np.ones((4, 2), dtype=np.int64)})
    with pytest.raises(UnsupportedByServerError, match=r"data\[0\]\.loss_fn_inputs\['target_tokens'\]"):
        fit(given, OLD)


def save(name: str | None) -> types.SaveWeightsRequest:
    return types.SaveWeightsRequest(model_id="m", path=name)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ü", "x" * 256, "a\n"])
def test_names_that_older_servers_refuse(name: str) -> None:
    with pytest.raises(InvalidInputError, match="1 to 255"):
        fit(save(name), OLD)
    assert fit(save(name), NEW).path == name


@pytest.mark.parametrize("name", ["step-0001_final", None])
def test_usual_names_pass(name: str | None) -> None:
    assert fit(save(name), OLD).path == name


def test_calls_that_the_server_lacks_are_refused() -> None:
    request = types.SaveWeightsExternalRequest(model_id="m", path="a")
    with pytest.raises(UnsupportedByServerError, match="does not offer save_weights_external") as caught:
        fit(request, OLD, call="save_weights_external")
    assert caught.value.feature == "save_weights_external"
    assert fit(request, NEW, call="save_weights_external") is request


def body(request: Any, dialect: Dialect) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json_body(request, dialect))
    return tree


def test_json_bodies_of_older_servers() -> None:
    given = examples({"target_tokens": [1, 2, 3, 4]}, loss_fn_config={"clip": 0.2})
    tree = body(types.ForwardBackwardRequest(given, "m", 7), OLD)
    assert set(tree) == {"model_id", "seq_id", "forward_backward_input"}
    assert set(tree["forward_backward_input"]) == {"data", "loss_fn", "loss_fn_config"}
    assert set(tree["forward_backward_input"]["data"][0]) == {"model_input", "loss_fn_inputs"}
    assert set(body(types.ForwardRequest(given, "m", 7), OLD)) == {"model_id", "seq_id", "forward_input"}


def test_fields_unknown_to_older_servers_stay_at_home() -> None:
    new = body(sample(), NEW)
    old = body(sample(), OLD)
    # Neither includes `record_stability_info`, which is unset here.
    assert set(new) - set(old) == {"topk_sample_logprobs", "prompt_alt_tokens_k"}
    create = types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b")
    assert set(body(create, NEW)) - set(body(create, OLD)) == {"optimizer_config"}
    retrieve = types.FutureRetrieveRequest(request_id="r", allow_metadata_only=True)
    assert body(retrieve, OLD) == {"request_id": "r"}
    assert body(retrieve, NEW) == {"request_id": "r", "allow_metadata_only": True}
    step = types.OptimStepRequest(optim_params=types.AdamParams(), model_id="m", seq_id=2)
    assert set(body(step, OLD)) == {"model_id", "seq_id", "type", "adam_params"}


# ---- Published descriptions of servers: their routes, the fields of bodies, and content of any other form
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
