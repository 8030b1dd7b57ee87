"""Models with arrays are values: they compare and hash by content, and cannot be changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinker_sync import types
from tinker_sync.types import Datum, ModelInput, SampledSequence, SampleResponse, TensorData

NAN = float("nan")
PROMPT = ModelInput.from_ints([1, 2, 3])


def datums() -> list[Any]:
    run = [types.SampledProvenanceSpan(sequence_id="s", length=3)]
    return [
        Datum(PROMPT),
        Datum(ModelInput.from_ints([1, 2])),
        Datum(PROMPT, {"weights": [1, 1, 1]}),
        Datum(PROMPT, {"advantages": [1, 1, 1]}),
        Datum(PROMPT, {"weights": [1, 1, 0]}),
        Datum(PROMPT, {"weights": np.array([1, 1, 1])}),
        Datum(PROMPT, {"weights": [1, 1, 1]}, run, run),
        Datum(PROMPT, {"weights": [1, 1, 1]}, [], run),
        Datum(PROMPT, {"weights": [NAN]}),
    ]


def inputs() -> list[Any]:
    return [
        ModelInput.empty(),
        ModelInput.from_ints([]),
        ModelInput.from_ints([1, 2]),
        ModelInput.from_ints([1, 3]),
        ModelInput.from_ints([1]).append_int(2),
        ModelInput.from_ints(np.arange(40)),
        ModelInput.from_ints([*range(39), 0]),
        ModelInput(chunks=[types.ImageChunk(data=b"a", format="png")]),
        ModelInput(chunks=[types.ImageChunk(data=b"a", format="jpeg")]),
        ModelInput(chunks=[types.ImageChunk(data=b"a", format="png", expected_tokens=1)]),
        ModelInput(chunks=[types.ImageAssetPointerChunk(location="a", format="png")]),
        ModelInput(chunks=[types.DmelChunk(dmel=b"a")]),
        *ModelInput.from_ints([1]).chunks,
    ]


def tensors() -> list[Any]:
    return [
        TensorData([1, 2, 3, 4], "int64"),
        TensorData([1, 2, 3, 4], "int64", [2, 2]),
        TensorData([1, 2, 3, 4], "float32"),
        TensorData([1, 2, 3, 5], "int64"),
        TensorData([1, 2, 3], "int64"),
        TensorData([], "int64"),
        TensorData([], "float32"),
        TensorData([], "float32", [0, 3]),
        TensorData([NAN], "float32"),
        TensorData([0.0], "float32"),
        TensorData(1, "int64"),
        TensorData([1], "int64"),
        TensorData([7], "int64", [2, 9], [0, 0, 1], [4]),
        TensorData([7], "int64", [2, 9], [0, 1, 1], [4]),
        TensorData([7], "int64", [2, 9], [0, 0, 1], [5]),
        TensorData([7], "int64", [2, 8], [0, 0, 1], [4]),
        TensorData([8], "int64", [2, 9], [0, 0, 1], [4]),
    ]


def samples() -> list[Any]:
    floats, matrix = np.array([np.nan, -0.0]), np.array([[1, 2]])
    request = types.SampleRequest(prompt=PROMPT, sampling_params=types.SamplingParams(max_tokens=4))
    return [
        types.SamplingParams(),
        types.SamplingParams(stop=[]),
        types.SamplingParams(stop=["a"]),
        types.SamplingParams(temperature=0.5),
        types.TopkLogprobs(matrix, matrix.astype(float)),
        types.TopkLogprobs(matrix, np.array([[np.nan, 2]])),
        types.TopkLogprobs(matrix.T, matrix.T.astype(float)),
        SampledSequence("stop"),
        SampledSequence("length"),
        SampledSequence("stop", "s"),
        SampledSequence("stop", "s", np.array([1, 2])),
        SampledSequence("stop", "s", np.array([1, 3])),
        SampledSequence("stop", "s", np.array([1, 2]), floats),
        SampledSequence("stop", "s", _tokens_list=[1, 2]),
        types.PromptAltTokens(TensorData([1], "int64"), TensorData([NAN], "float32")),
        types.PromptAltTokens(TensorData([1], "int64"), TensorData([0.0], "float32")),
        SampleResponse([]),
        SampleResponse([], floats),
        SampleResponse([], prompt_cache_hit_tokens=1),
        SampleResponse([SampledSequence("stop", "s", np.array([1, 2]), floats)]),
        request,
        request.model_copy(update={"num_samples": 2}),
        request.model_copy(update={"target_prompt_logprobs": TensorData([1], "int64")}),
    ]


def passes() -> list[Any]:
    good = Datum(PROMPT, {"target_tokens": [2, 3, 4]})
    work = types.ForwardBackwardInput([good], "ppo", {"clip": 0.2})
    return [
        work,
        types.ForwardBackwardInput([good, good], "ppo", {"clip": 0.2}),
        types.ForwardBackwardInput([good], "grpo", {"clip": 0.2}),
        types.ForwardBackwardInput([good], "ppo"),
        types.ForwardBackwardRequest(work, "m", 1),
        types.ForwardBackwardRequest(work, "m", 2),
        types.ForwardRequest(work, "m", 1),
        types.ForwardBackwardOutput("A", [{"x": TensorData([NAN], "float32")}], {"loss:sum": 1.0}),
        types.ForwardBackwardOutput("A", [{"x": TensorData([0.0], "float32")}], {"loss:sum": 1.0}),
    ]


every_family = pytest.mark.parametrize("make", [datums, inputs, tensors, samples, passes])
"""Each function returns models of which no two are equal."""


def hash_or_none(value: object) -> int | None:
    try:
        return hash(value)
    except TypeError:
        return None


@every_family
def test_models_compare_and_hash_by_value(make: Callable[[], list[Any]]) -> None:
    twins = make()
    for index, one in enumerate(make()):
        assert [one == twin for twin in twins] == [index == at for at in range(len(twins))]
        assert [one != twin for twin in twins] == [index != at for at in range(len(twins))]
        assert hash_or_none(one) == hash_or_none(twins[index])
        assert one not in ([1], "TensorData", None)


@every_family
def test_copies_and_pickles_are_equal(make: Callable[[], list[Any]]) -> None:
    for one in make():
        copies = [copy.copy(one), copy.deepcopy(one), one.model_copy(), one.model_copy(deep=True)]
        copies += [pickle.loads(pickle.dumps(one, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)]
        for twin in copies:
            assert (type(twin), twin, repr(twin)) == (type(one), one, repr(one))
            assert hash_or_none(twin) == hash_or_none(one)


@every_family
def test_models_are_immutable(make: Callable[[], list[Any]]) -> None:
    for one in make():
        for name in [*type(one).__slots__, "tokens", "length", "nbytes", "colour"]:
            with pytest.raises(AttributeError):
                setattr(one, name, None)
            with pytest.raises(AttributeError):
                delattr(one, name)
        assert type(one).__dictoffset__ == 0
