"""Requests are converted for older servers, and refused if the conversion would lose something."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tinker_sync import types
from tinker_sync.errors import InvalidInputError, UnsupportedByServerError
from tinker_sync.wire.adapt import fit, json_body
from tinker_sync.wire.dialect import Dialect, decide

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
    with pytest.raises(InvalidInputError, match="3 tokens leave no room in the context of 3"):
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
    with pytest.raises(InvalidInputError, match="this server takes 1 to 255 letters"):
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
