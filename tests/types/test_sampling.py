"""Sampling parameters, checks of requests, and responses with arrays and lists."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.values import refusal

from tinker_sync import types
from tinker_sync.types import SampledSequence, SampleResponse, SamplingParams, TensorData, TopkLogprobs

EMPTY = -99999.0


# -------------------------------------------------------------------------------------------- parameters
def test_parameters_have_the_defaults_of_the_protocol() -> None:
    defaults = {"max_tokens": None, "seed": None, "stop": None, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    assert SamplingParams().model_dump() == defaults


@pytest.mark.parametrize(
    ("given_stop", "kept"),
    [
        (None, None),
        ("END", "END"),
        ("", ""),
        ([], []),
        ((), ()),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ("a", "b")),
        (["4"], ["4"]),
        (deque(["a"]), ["a"]),
        (np.array(["a", "b"]), ["a", "b"]),
        ([1, 2], [1, 2]),
        ((1, 2), (1, 2)),
        (range(1, 3), [1, 2]),
        (np.array([1, 2]), [1, 2]),
        (np.array([1.0, 2.0]), [1, 2]),
        ([np.int64(1), 2.0, "3", True], [1, 2, 3, 1]),
        (b"END", "END"),
        ([b"a", "b"], ["a", "b"]),
    ],
)
def test_stop_keeps_its_form(given_stop: Any, kept: Any) -> None:
    found = SamplingParams(stop=given_stop).stop
    assert found == kept
    assert type(found) is type(kept)
    if not isinstance(found, (str, type(None))):
        assert {type(item) for item in found} <= {str, int}
        assert {type(item) for item in found} == {type(item) for item in kept}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (5, "SamplingParams.stop: expected text, a list of texts or a list of token ids, got 5 (int)"),
        (1.5, "SamplingParams.stop: expected text"),
        ({"a"}, "SamplingParams.stop: expected text"),
        ({"a": 1}, "SamplingParams.stop: expected text"),
        (np.array(5), "SamplingParams.stop: expected text"),
        ((word for word in ["a"]), "SamplingParams.stop: expected text"),
        (["a", 1], "SamplingParams.stop[0]: expected a token id like the others, got 'a' (str)"),
        ([1, "a"], "SamplingParams.stop[1]: expected a token id like the others, got 'a' (str)"),
        ([1, None], "SamplingParams.stop[1]: expected a token id like the others, got None (NoneType)"),
        ([1, 1.5], "SamplingParams.stop[1]: expected a token id like the others, got 1.5 (float)"),
        ([[1]], "SamplingParams.stop[0]: expected a token id like the others, got [1] (list)"),
        ([["a"]], "SamplingParams.stop[0]: expected a token id like the others, got ['a'] (list)"),
        (b"\xff", "SamplingParams.stop: expected text"),
    ],
)
def test_bad_stops_are_refused(wrong: Any, message: str) -> None:
    assert refusal(SamplingParams, stop=wrong).startswith(message)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": -1}, "SamplingParams.max_tokens: expected 0 or more, got -1"),
        ({"max_tokens": 1.5}, "SamplingParams.max_tokens: expected a whole number, got 1.5 (float)"),
        ({"top_p": 0}, "SamplingParams.top_p: expected more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.0000001}, "SamplingParams.top_p: expected more than 0"),
        ({"top_p": -0.1}, "SamplingParams.top_p: expected more than 0"),
        ({"top_p": float("nan")}, "SamplingParams.top_p: expected more than 0"),
        ({"temperature": -0.1}, "SamplingParams.temperature: expected 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "SamplingParams.temperature: expected 0 or more, got nan"),
        ({"temperature": float("inf")}, "SamplingParams.temperature: expected 0 or more, got inf"),
        ({"temperature": "hot"}, "SamplingParams.temperature: expected a number, got 'hot' (str)"),
        ({"seed": "x"}, "SamplingParams.seed: expected a whole number"),
        ({"top_k": 1.5}, "SamplingParams.top_k: expected a whole number"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong: Any, message: str) -> None:
    assert refusal(SamplingParams, **wrong).startswith(message)


# -------------------------------------------------------------------------------------------- requests
PROMPT = types.ModelInput.from_ints([1, 2, 3])


def request(**fields: Any) -> types.SampleRequest:
    return types.SampleRequest(
        **{"prompt": PROMPT, "sampling_params": SamplingParams(max_tokens=4), **fields}
    )


def test_a_request_has_defaults() -> None:
    assert request().model_dump(exclude_none=True) == {
        "num_samples": 1,
        "prompt": PROMPT.model_dump(),
        "sampling_params": SamplingParams(max_tokens=4).model_dump(exclude_none=True),
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "type": "sample",
    }
    with pytest.raises(TypeError, match="num_sample"):
        request(num_sample=1)
    assert request(sampling_params={"max_tokens": 4}) == request()
    assert refusal(request, sampling_params=None).startswith(
        "SampleRequest.sampling_params: expected SamplingParams"
    )
    assert refusal(request, type="other").startswith("SampleRequest.type: ")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_samples": 64},
        {"prompt": types.ModelInput.empty()},
        {"prompt": types.ModelInput.from_ints([1])},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        {
            "prompt": PROMPT.append(types.ImageChunk(data=b"", format="png")),
            "prompt_logprobs": 1,
            "prompt_logprobs_last_n": 99,
        },
        {"target_prompt_logprobs": TensorData([1, 2], "int64", [2, 1])},
        {"target_prompt_logprobs": TensorData([[1, -1], [2, 5]], "int64")},
        {"target_prompt_logprobs": TensorData([7], "int64", [2, 9], [0, 0, 1], [4])},
        {
            "prompt": PROMPT.append(types.ImageChunk(data=b"", format="png", expected_tokens=1)),
            "target_prompt_logprobs": TensorData([1] * 9, "int64", [9, 1]),
        },
    ],
)
def test_valid_requests_pass(fields: Any) -> None:
    assert request(**fields).validate() is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_samples", 0, "expected 1 or more, got 0"),
        ("topk_prompt_logprobs", -1, "expected 0 or more, got -1"),
        ("topk_sample_logprobs", -1, "expected 0 or more, got -1"),
        ("prompt_alt_tokens_k", -1, "expected 0 or more, got -1"),
        ("prompt_logprobs_last_n", 0, "expected 1 or more, got 0"),
        ("prompt_logprobs_last_n", 3, "expected at most 2 for a prompt of 3, got 3"),
        (
            "target_prompt_logprobs",
            TensorData([1.0, 2.0], "float32", [2, 1]),
            "expected int64 token ids, got float32",
        ),
        ("target_prompt_logprobs", TensorData([1, 2], "int64"), "expected two dimensions, got shape [2]"),
        (
            "target_prompt_logprobs",
            TensorData([1, 2, 3], "int64", [3, 1]),
            "expected 2 rows, one for each prompt token after the first, got 3",
        ),
    ],
)
def test_invalid_requests_are_refused(name: str, value: Any, message: str) -> None:
    assert refusal(request(prompt_logprobs=True, **{name: value}).validate) == f"{name}: {message}"


def test_last_log_probabilities_need_log_probabilities() -> None:
    assert refusal(request(prompt_logprobs_last_n=1).validate) == (
        "prompt_logprobs_last_n: needs prompt log-probabilities; set include_prompt_logprobs=True"
    )


# --------------------------------------------------------------------------------------------- top k


@pytest.mark.parametrize("shapes", [((2, 3), (2, 2)), ((2, 3), (3, 2)), ((6,), (6,)), ((1, 2, 3), (1, 2, 3))])
def test_matrices_of_different_shapes_are_refused(shapes: Any) -> None:
    assert "two matrices of one shape" in refusal(TopkLogprobs(*map(np.zeros, shapes)).to_lists)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-1.0, -0.5])), min_size=1, max_size=3)
        | st.none()
    )
)
def test_padding_of_topk_is_removed(rows: Any) -> None:
    ids = np.zeros((len(rows), 3), dtype=np.int32)
    logprobs = np.full((len(rows), 3), EMPTY, dtype=np.float32)
    for index, row in enumerate(rows):
        for column, (token, logprob) in enumerate(row or ()):
            ids[index, column], logprobs[index, column] = token, logprob
    assert TopkLogprobs(ids, logprobs).to_lists() == rows


# ------------------------------------------------------------------------------------------- responses
def test_sequences_from_arrays_have_lists() -> None:
    tokens, logprobs = np.array([5, 6], dtype=np.int32), np.array([-1, -0.5], dtype=np.float32)
    topk = TopkLogprobs(np.array([[5], [6]]), np.array([[-1.0], [-0.5]]))
    sequence = SampledSequence("stop", "s-1", tokens, logprobs, topk)
    assert sequence.tokens_np is tokens
    assert sequence.logprobs_np is logprobs
    assert (sequence.tokens, sequence.logprobs) == ([5, 6], [-1.0, -0.5])
    assert sequence.topk_logprobs == [[(5, -1.0)], [(6, -0.5)]]
    for name in ("tokens", "logprobs", "topk_logprobs"):
        assert getattr(sequence, name) is getattr(sequence, name)


def test_absent_and_empty_arrays_differ() -> None:
    nothing = SampledSequence("length")
    assert (nothing.sequence_id, nothing.tokens, nothing.logprobs, nothing.topk_logprobs) == (
        None,
        [],
        None,
        None,
    )
    empty = SampledSequence("length", "s", np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
    assert (empty.tokens, empty.logprobs) == ([], [])
    assert empty.logprobs_np is not None
    response = SampleResponse(
        [empty], np.empty(0, dtype=np.float32), TopkLogprobs(np.empty((0, 2)), np.empty((0, 2)))
    )
    assert (response.prompt_logprobs, response.topk_prompt_logprobs) == ([], [])


def test_bad_responses_are_refused() -> None:
    assert refusal(SampledSequence, "eos").startswith(
        "SampledSequence.stop_reason: expected one of 'length', 'stop'"
    )
    assert refusal(SampleResponse, [5]).startswith("SampleResponse.sequences[0]: expected SampledSequence")
    with pytest.raises(TypeError):
        SampledSequence("stop", token=[5])
    with pytest.raises(TypeError):
        SampledSequence("stop", _views={})


# ------------------------------------------------------------------------------------------ being a value


# -------------------------------------------------------------------------------------- other parameters


def test_settings_of_other_engines_are_ignored_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="stop_token_ids, min_p ignored") as caught:
        params = SamplingParams(max_tokens=5, stop_token_ids=[1, 2], min_p=0.1)  # type: ignore[call-arg]
    assert params == SamplingParams(max_tokens=5)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


def test_a_misspelt_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        SamplingParams(max_token=5, stop_token_ids=[1])  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["max_new_tokens", "max_completion_tokens"])
def test_the_limit_of_another_engine_is_no_setting_to_ignore(name: str) -> None:
    with pytest.raises(TypeError, match=f"'{name}'.*'max_tokens'"):
        SamplingParams(**{name: 5})  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=f"{name} ignored"):
        assert SamplingParams(**{"max_tokens": 5, name: 7}).max_tokens == 5  # type: ignore[arg-type]


def test_a_sequence_may_be_made_of_lists() -> None:
    older: dict[str, Any] = {"tokens": [5, 6], "logprobs": [-1.0, -2.0]}
    made = SampledSequence(stop_reason="stop", **older)
    assert (made.tokens, made.logprobs, made.length) == ([5, 6], [-1.0, -2.0], 2)
    made = SampledSequence("length", "seq-1", tokens=[7])  # type: ignore[call-arg]
    assert made.logprobs is None
    with pytest.raises(TypeError, match="no parameter 'ids'"):
        SampledSequence("stop", tokens=[5], ids=[5])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="stop_reason"):
        SampledSequence(tokens=[5])  # type: ignore[call-arg]
