"""Tensors and samples as JSON, in the answers of older servers and of an embedded server."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from support.json_cases import Codec, random_answer
from support.values import for_each

from tinker_sync import types
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.types import ForwardBackwardOutput, SampleResponse, TensorData

FLOAT32 = np.float32(0.1)


def refusal(body: dict[str, Any], cls: Any, codec: Codec) -> WireError:
    with pytest.raises(WireError) as caught:
        codec.decode(json.dumps(body).encode(), cls)
    return caught.value


# ------------------------------------------------------------------------------------------------ training
def test_an_output_as_older_servers_write_it(codec: Codec) -> None:
    body = {
        "loss_fn_output_type": "scalar",
        "loss_fn_outputs": [
            {
                "elementwise_loss": {"data": [0.0, 1.5], "dtype": "float32", "shape": [2]},
                "logprobs": {"data": [-0.1, None], "dtype": "float32"},
            },
            {"ids": {"data": [7, 2**62], "dtype": "int64", "shape": [2, 1]}},
        ],
        "metrics": {"total_loss:sum": 3, "grad_norm": None},
    }
    output = codec.decode(json.dumps(body).encode(), ForwardBackwardOutput)
    assert output.loss_fn_output_type == "scalar"
    first, second = output.loss_fn_outputs
    assert first["elementwise_loss"] == TensorData([0.0, 1.5], "float32", [2])
    logprobs = first["logprobs"].to_numpy()
    assert logprobs.dtype == np.float32
    assert logprobs[0] == np.float32(-0.1)
    assert np.isnan(logprobs[1])
    assert second["ids"].to_numpy().tolist() == [[7], [2**62]]
    assert output.metrics["total_loss:sum"] == 3.0
    assert math.isnan(output.metrics["grad_norm"])


def test_an_output_there_and_back(codec: Codec) -> None:
    sparse = TensorData([5, 6], "int64", [2, 3], [0, 1, 2], [2, 0])
    nothing = TensorData([], "float32", [0])
    tensors = {"a": TensorData(np.array([FLOAT32, np.nan]), "float32"), "b": sparse, "c": nothing}
    output = ForwardBackwardOutput("scalar", [tensors, {}], {"loss:sum": 0.1, "odd": math.inf})
    encoded = codec.encode(output)
    assert json.loads(encoded)["loss_fn_outputs"][0]["a"]["data"] == [float(FLOAT32), None]
    decoded = codec.decode(encoded, ForwardBackwardOutput)
    assert decoded.loss_fn_outputs == output.loss_fn_outputs
    # Values that JSON lacks arrive as NaN, not as other numbers.
    assert decoded.metrics["loss:sum"] == 0.1
    assert math.isnan(decoded.metrics["odd"])


@pytest.mark.parametrize("cls", [types.ForwardBackwardRequest, types.ForwardRequest])
def test_a_training_request_there_and_back(cls: Any, codec: Codec) -> None:
    inputs = {
        "target_tokens": TensorData([1, 2, 3], "int64", [3, 4], [0, 1, 2, 3], [0, 1, 2]),
        "weights": np.array([[0.1, 0.2], [1, 2], [3, 4]], dtype=np.float32),
    }
    datum = types.Datum(types.ModelInput.from_ints(np.array([1, 2, 3])), inputs)
    request = cls(
        types.ForwardBackwardInput([datum], "ppo", {"clip": 0.2, "mode": "x", "text": "1.5"}), "model-1", 4
    )
    assert codec.decode(codec.encode(request), cls) == request


def test_arrays_of_a_request_must_be_finite(codec: Codec) -> None:
    inputs = {"custom": np.array([[0.5, 1.0], [np.nan, 2.0]], dtype=np.float32)}
    request = types.ForwardBackwardInput([types.Datum(types.ModelInput.from_ints([1]), inputs)], "custom")
    with pytest.raises(InvalidInputError) as caught:
        codec.encode(request)
    assert str(caught.value) == (
        "$.data[0].loss_fn_inputs.custom.data[2]: expected a number that JSON has, got nan (float)"
    )


BAD_TENSORS: list[tuple[dict[str, Any], str, str]] = [
    ({"data": None}, ".data", "expected a list of numbers, got null"),
    ({"data": "12"}, ".data", "expected a list of numbers, got '12' (str)"),
    ({"data": [1, "x"]}, ".data[1]", "expected a number"),
    ({"data": [1, {}]}, ".data[1]", "expected a number"),
    ({"data": [[1, 2], [3, 4]]}, ".data", "expected a flat list of numbers, got lists in it"),
    ({"data": [1, [2]]}, ".data[1]", "is a row"),
    ({"data": [1.5], "dtype": "int64"}, ".data[0]", "expected a whole number, got 1.5"),
    ({"data": [None], "dtype": "int64"}, ".data[0]", "expected a whole number"),
    ({"data": [2**64], "dtype": "int64"}, ".data[0]", "expected a whole number"),
    ({"data": [0.5, 1e300]}, ".data[1]", "is too large for float32"),
    ({"dtype": "float64"}, ".dtype", "expected one of 'int64', 'float32', got 'float64' (str)"),
    ({"dtype": None}, ".dtype", "expected one of 'int64', 'float32', got null"),
    ({"shape": [3]}, ".shape", "2 values do not fill the shape [3]"),
    ({"shape": [2.5]}, ".shape[0]", "expected a whole number, got 2.5 (float)"),
    ({"shape": "2"}, ".shape", "expected a list, got '2' (str)"),
    ({"shape": [1, 2], "sparse_crow_indices": [0, 2]}, "", "sparse_col_indices"),
    (
        {"shape": [1, 2], "sparse_crow_indices": [0, 2], "sparse_col_indices": [0, 2]},
        ".sparse_col_indices",
        "0 … 1",
    ),
    (
        {"shape": [1, 2], "sparse_crow_indices": [0, "x"], "sparse_col_indices": []},
        ".sparse_crow_indices[1]",
        "expected a whole number",
    ),
]  # fmt: skip


@for_each(("change", "place", "reason"), BAD_TENSORS)
def test_bad_tensors_are_refused(change: dict[str, Any], place: str, reason: str, codec: Codec) -> None:
    tensor = {"data": [0.5, 1.0], "dtype": "float32", **change}
    body = {"loss_fn_output_type": "t", "loss_fn_outputs": [{"a b": tensor}]}
    error = refusal(body, ForwardBackwardOutput, codec)
    assert error.path == f"$.loss_fn_outputs[0]['a b']{place}"
    assert reason in error.message


# ------------------------------------------------------------------------------------------------ sampling
def test_samples_as_older_servers_write_them(codec: Codec) -> None:
    body = {
        "sequences": [
            {"stop_reason": "length", "tokens": [1, 2], "logprobs": [-0.5, None]},
            {"stop_reason": "stop", "tokens": [], "logprobs": None, "sequence_id": "seq-2"},
            {"stop_reason": "stop", "topk_logprobs": [[[7, -0.5], [8, -1]], None, [["9", -2]], []]},
        ],
        "prompt_logprobs": [None, -0.25, "-0.5"],
        "topk_prompt_logprobs": [None, [[5, -0.1]]],
        "target_prompt_logprobs": {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2, 1]},
        "prompt_alt_tokens": {
            "tokens": {"data": [3], "dtype": "int64", "shape": [1, 1]},
            "logprobs": {"data": [-1], "dtype": "float32", "shape": [1, 1]},
        },
        "type": "sample",
    }
    response = codec.decode(json.dumps(body).encode(), SampleResponse)
    first, second, third = response.sequences
    assert (first.stop_reason, first.sequence_id, first.tokens) == ("length", None, [1, 2])
    assert first.tokens_np.dtype == np.int32
    assert first.logprobs_np.dtype == np.float32
    assert first.logprobs_np[0] == -0.5
    assert np.isnan(first.logprobs_np[1])
    assert (second.tokens, second.logprobs, second.sequence_id) == ([], None, "seq-2")
    assert third.tokens == []
    assert third.topk_logprobs == [[(7, -0.5), (8, -1.0)], None, [(9, -2.0)], None]
    assert third.topk_logprobs_np.token_ids.dtype == np.int32
    assert third.topk_logprobs_np.logprobs.tolist()[2] == [-2.0, -99999.0]
    assert response.prompt_logprobs == [None, -0.25, -0.5]
    assert response.topk_prompt_logprobs == [None, [(5, np.float32(-0.1))]]
    assert response.target_prompt_logprobs == TensorData([-1, -2], "float32", [2, 1])
    assert response.prompt_alt_tokens.tokens.tolist() == [[3]]
    assert response.prompt_cache_hit_tokens == 0


def test_samples_there_and_back(codec: Codec) -> None:
    rng = np.random.default_rng(3)
    topk = types.TopkLogprobs(
        rng.integers(1, 1000, (4, 3)).astype(np.int32), -rng.random((4, 3)).astype(np.float32)
    )
    topk.token_ids[1], topk.logprobs[1] = 0, -99999.0
    topk.token_ids[2, 2], topk.logprobs[2, 2] = 0, -99999.0
    tokens, logprobs = np.array([1, 2, 3, 4], dtype=np.int32), -rng.random(4).astype(np.float32)
    response = SampleResponse(
        [
            types.SampledSequence("stop", "seq-1", tokens, logprobs, topk),
            types.SampledSequence("length", None, tokens),
        ],
        np.array([np.nan, -0.5], dtype=np.float32),
        topk,
        TensorData([0.5], "float32", [1, 1]),
        7,
        types.PromptAltTokens(TensorData([1], "int64", [1, 1]), TensorData([-1], "float32", [1, 1])),
    )
    encoded = codec.encode(response)
    assert json.loads(encoded)["prompt_logprobs"] == [None, -0.5]
    assert json.loads(encoded)["sequences"][1] == {"stop_reason": "length", "tokens": [1, 2, 3, 4]}
    assert list(json.loads(encoded))[-1] == "type"
    assert codec.decode(encoded, SampleResponse) == response


BAD_SAMPLES: list[tuple[dict[str, Any], str, str]] = [
    ({"stop_reason": None}, ".stop_reason", "expected one of 'length', 'stop', got null"),
    ({"tokens": {}}, ".tokens", "expected a list of token ids, got an object of 0 fields"),
    ({"tokens": [1, None]}, ".tokens[1]", "expected a token id"),
    ({"tokens": [2**31]}, ".tokens[0]", "does not fit int32"),
    ({"tokens": [0, 1.5]}, ".tokens[1]", "expected a token id"),
    ({"logprobs": 1}, ".logprobs", "expected a list of numbers, got 1 (int)"),
    ({"logprobs": [0, "x"]}, ".logprobs[1]", "expected a number"),
    ({"logprobs": [1e39]}, ".logprobs[0]", "too large for float32"),
    ({"topk_logprobs": {}}, ".topk_logprobs", "expected a list of positions"),
    ({"topk_logprobs": [[], 1]}, ".topk_logprobs[1]", "expected a list of [token id"),
    ({"topk_logprobs": [[[1, -1]], [1]]}, ".topk_logprobs[1][0]", "expected a pair"),
    ({"topk_logprobs": [[[1, -1], [1, 2, 3]]]}, ".topk_logprobs[0][1]", "expected a pair"),
    ({"topk_logprobs": [[["x", -1]]]}, ".topk_logprobs[0][0][0]", "expected a token id"),
    ({"topk_logprobs": [[[1.5, -1]]]}, ".topk_logprobs[0][0][0]", "expected a token id"),
    ({"topk_logprobs": [[[None, -1]]]}, ".topk_logprobs[0][0][0]", "expected a token id"),
    ({"topk_logprobs": [[[1, "x"]]]}, ".topk_logprobs[0][0][1]", "expected a number"),
    ({"topk_logprobs": [[{"token_id": 1}]]}, ".topk_logprobs[0][0]", "expected a pair"),
]  # fmt: skip


@for_each(("change", "place", "reason"), BAD_SAMPLES)
def test_bad_samples_are_refused(change: dict[str, Any], place: str, reason: str, codec: Codec) -> None:
    error = refusal({"sequences": [{"stop_reason": "stop", **change}]}, SampleResponse, codec)
    assert error.path == f"$.sequences[0]{place}"
    assert reason in error.message


def test_random_samples_and_outputs_there_and_back(codec: Codec) -> None:
    rng = random.Random(11)
    for cls in (SampleResponse, ForwardBackwardOutput):
        for _ in range(200):
            first = codec.decode(json.dumps(random_answer(rng, cls)).encode(), cls)
            encoded = codec.encode(first)
            # Twice, because NaN in a mapping of metrics is not equal to itself.
            assert codec.encode(codec.decode(encoded, cls)) == encoded
