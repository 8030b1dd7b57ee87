"""Sampling parameters, checks of requests, and responses with arrays and lists."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import for_each
from support.listing import long_lists
from support.refusals import refusal

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import SampledSequence, SampleResponse, SamplingParams, TensorData, TopkLogprobs

EMPTY = -99999.0


# -------------------------------------------------------------------------------------------- parameters
def test_parameters_have_the_defaults_of_the_protocol() -> None:
    defaults = {"max_tokens": None, "seed": None, "stop": None, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    assert SamplingParams().model_dump() == defaults


def test_a_mistyped_name_is_refused() -> None:
    for wrong in ("max_token", "temprature"):
        with pytest.raises(TypeError, match=wrong):
            SamplingParams(**{wrong: 3})
    with pytest.raises(TypeError):
        SamplingParams(16)
    with pytest.raises(InvalidInputError, match="max_token'"):
        SamplingParams.model_validate({"max_token": 3})


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


def test_a_list_of_stops_is_copied() -> None:
    words = ["a"]
    params = SamplingParams(stop=words)
    words.append("b")
    assert params.stop == ["a"]


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


@for_each(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in (0, "16", np.int64(3))],
        *[("temperature", value) for value in (0, 50)],
        *[("top_p", value) for value in (1, 5e-324)],
        *[("top_k", value) for value in (0, -5)],
        *[("seed", value) for value in (-1, 2**64)],
    ],
)
def test_unusual_parameters_are_accepted(name: str, value: Any) -> None:
    assert float(getattr(SamplingParams(**{name: value}), name)) == float(value)


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


def test_all_problems_are_reported_at_once() -> None:
    wrong = request(num_samples=0, topk_sample_logprobs=-2, prompt_logprobs_last_n=0)
    with pytest.raises(InvalidInputError) as caught:
        wrong.validate()
    assert len(caught.value.problems) == 4


# --------------------------------------------------------------------------------------------- top k
def test_topk_converts_to_lists() -> None:
    ids = np.array([[5, 6, 7], [5, 6, 0], [0, 0, 0], [0, 8, 0], [0, 0, 9]], dtype=np.int32)
    logprobs = np.array(
        [[-1, -2, -3], [-1, -2, EMPTY], [EMPTY] * 3, [-0.5, -1, EMPTY], [-0.5, EMPTY, -9]], dtype=np.float32
    )
    assert TopkLogprobs(ids, logprobs).to_lists() == [
        [(5, -1.0), (6, -2.0), (7, -3.0)],
        [(5, -1.0), (6, -2.0)],
        None,
        [(0, -0.5), (8, -1.0)],
        [(0, -0.5), (0, EMPTY), (9, -9.0)],
    ]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_matrix_is_an_empty_list(shape: tuple[int, int]) -> None:
    assert TopkLogprobs(np.zeros(shape), np.zeros(shape)).to_lists() == []


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


def test_sequences_from_lists_keep_them() -> None:
    sequence = SampledSequence(
        "length", "s", _tokens_list=[5], _logprobs_list=[-1.0], _topk_logprobs_list=[None, [(5, -1.0)]]
    )
    assert (sequence.tokens, sequence.logprobs) == ([5], [-1.0])
    assert sequence.topk_logprobs == [None, [(5, -1.0)]]
    assert (sequence.tokens_np, sequence.logprobs_np) == (None, None)


def test_given_lists_take_precedence_over_arrays() -> None:
    topk = TopkLogprobs(np.array([[5]]), np.array([[-1.0]]))
    sequence = SampledSequence("stop", "s", np.array([5]), np.array([-1.0]), topk, [6], [-2.0], [None])
    assert (sequence.tokens, sequence.logprobs, sequence.topk_logprobs) == ([6], [-2.0], [None])
    response = SampleResponse(
        [], np.array([0.5]), topk, _prompt_logprobs_list=[None], _topk_prompt_logprobs_list=[None, None]
    )
    assert (response.prompt_logprobs, response.topk_prompt_logprobs) == ([None], [None, None])


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


def test_responses_have_lists() -> None:
    response = SampleResponse(
        [SampledSequence("stop", "s", np.array([5]))],
        np.array([np.nan, -0.5, np.inf, np.nan], dtype=np.float32),
        TopkLogprobs(np.array([[0], [4]]), np.array([[EMPTY], [-1.0]])),
        TensorData([[0.5]], "float32"),
        3,
        types.PromptAltTokens(TensorData([[7]], "int64"), TensorData([[-1]], "float32")),
    )
    assert response.prompt_logprobs == [None, -0.5, np.inf, None]
    assert response.topk_prompt_logprobs == [None, [(4, -1.0)]]
    assert response.prompt_logprobs is response.prompt_logprobs
    assert response.topk_prompt_logprobs is response.topk_prompt_logprobs
    assert response.prompt_alt_tokens.tokens.tolist() == [[7]]
    assert SampleResponse([]).prompt_logprobs is None
    listed = SampleResponse([], _prompt_logprobs_list=[None, -0.5], _topk_prompt_logprobs_list=[None])
    assert (listed.prompt_logprobs, listed.topk_prompt_logprobs) == ([None, -0.5], [None])


def test_unknown_fields_of_responses_are_ignored() -> None:
    assert SampleResponse.model_validate({"sequences": [], "new": 1}) == SampleResponse([])


def test_reprs_show_tokens_and_omit_arrays() -> None:
    topk = TopkLogprobs(np.array([[5]]), np.array([[-1.0]]))
    sequence = SampledSequence("stop", "s", np.array([5]), np.array([-1.0]), topk, [6], [-2.0], [None])
    assert repr(sequence) == "SampledSequence(stop_reason='stop', sequence_id='s', tokens=[6])"
    assert repr(topk) == "TopkLogprobs(token_ids=array([1, 1], int64), logprobs=array([1, 1], float64))"
    assert repr(SampleResponse([sequence], np.array([0.5]), topk, _prompt_logprobs_list=[None])) == (
        f"SampleResponse(sequences=[{sequence!r}], target_prompt_logprobs=None, prompt_cache_hit_tokens=0, "
        "prompt_alt_tokens=None)"
    )


def test_bad_responses_are_refused() -> None:
    assert refusal(SampledSequence, "eos").startswith(
        "SampledSequence.stop_reason: expected one of 'length', 'stop'"
    )
    assert refusal(SampleResponse, [5]).startswith("SampleResponse.sequences[0]: expected SampledSequence")
    with pytest.raises(TypeError):
        SampledSequence("stop", token=[5])
    with pytest.raises(TypeError):
        SampledSequence("stop", _views={})


def big_response() -> SampleResponse:
    tokens = np.arange(10**6, dtype=np.int32)
    logprobs = np.zeros(10**6, dtype=np.float32)
    topk = TopkLogprobs(tokens.reshape(-1, 2), logprobs.reshape(-1, 2))
    return SampleResponse([SampledSequence("stop", "s", tokens, logprobs, topk)] * 20, logprobs, topk)


def test_lists_are_created_on_first_access() -> None:
    with long_lists() as made:
        response = big_response()
        assert len(repr(response)) < 2000
        assert response == big_response()
        assert hash(response.sequences[0]) == hash(big_response().sequences[0])
        assert response.model_copy() == response
        assert made == []
        assert len(response.sequences[0].tokens) == 10**6
        assert response.sequences[0].tokens[-1] == 10**6 - 1
    assert made == [10**6]


def test_two_threads_get_one_list() -> None:
    for _ in range(20):
        sequence = SampledSequence("stop", "s", np.arange(50_000))
        together = threading.Barrier(4)

        def look(sequence: SampledSequence = sequence, together: threading.Barrier = together) -> list[int]:
            together.wait(120)
            return sequence.tokens

        with ThreadPoolExecutor(4) as pool:
            seen = [future.result(120) for future in [pool.submit(look) for _ in range(4)]]
        assert all(tokens is seen[0] for tokens in seen)


def test_a_changed_copy_has_new_lists() -> None:
    sequence = SampledSequence("stop", "s", np.array([5, 6]))
    assert sequence.tokens == [5, 6]
    changed = sequence.model_copy(update={"tokens_np": np.array([7])})
    assert changed.tokens == [7]
    assert sequence.tokens == [5, 6]
    response = SampleResponse([], np.array([0.5]))
    assert response.prompt_logprobs == [0.5]
    assert response.model_copy(update={"prompt_logprobs_np": None}).prompt_logprobs is None


def test_a_pickle_omits_the_lists() -> None:
    sequence = SampledSequence("stop", "s", np.arange(2048, dtype=np.int32), np.zeros(2048, dtype=np.float32))
    response = SampleResponse([sequence], np.zeros(2048, dtype=np.float32))
    before = len(pickle.dumps(response))
    assert sequence.tokens[:2] == [0, 1]
    assert sequence.logprobs is not None
    assert response.prompt_logprobs is not None
    assert len(pickle.dumps(response)) == before
    for twin in (pickle.loads(pickle.dumps(response)), copy.deepcopy(response)):
        assert twin.sequences[0].tokens == sequence.tokens
        assert twin.sequences[0].tokens is not sequence.tokens
        assert twin == response


# ------------------------------------------------------------------------------------------ being a value
def test_equal_models_share_a_hash() -> None:
    ids = np.array([5, 6])
    pairs = [
        (
            SampledSequence("stop", "s", ids, ids / -3),
            SampledSequence("stop", "s", ids.astype("i4"), ids / -3),
        ),
        (SampledSequence("stop", "s", [5, 6]), SampledSequence("stop", "s", ids.astype(">i2"))),
        (TopkLogprobs([[0]], [[-0.0]]), TopkLogprobs(np.array([[0]]), np.array([[0.0]]))),
        (TopkLogprobs([[0]], [[np.nan]]), TopkLogprobs(np.array([[0]]), np.array([[-np.nan]], dtype="f4"))),
        (SamplingParams(stop=("a",)), SamplingParams(stop=("a",), temperature=True)),
    ]
    for one, other in pairs:
        assert one == other
        assert hash(one) == hash(other)


def test_dumps_use_the_names_of_fields() -> None:
    dumped = SampledSequence("stop", "s", np.array([5])).model_dump(exclude_none=True)
    assert dumped == {"stop_reason": "stop", "sequence_id": "s", "tokens_np": [5]}
    assert types.EncodedTextChunk(tokens=[1]).model_dump_json() == '{"tokens":[1],"type":"encoded_text"}'


# -------------------------------------------------------------------------------------- other parameters


def test_settings_of_other_engines_are_ignored_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="stop_token_ids, min_p ignored") as caught:
        params = SamplingParams(max_tokens=5, stop_token_ids=[1, 2], min_p=0.1)  # type: ignore[call-arg]
    assert params == SamplingParams(max_tokens=5)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


def test_a_misspelt_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="no parameter 'max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=5, stop_token_ids=[1])  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["max_new_tokens", "max_completion_tokens"])
def test_the_limit_of_another_engine_is_no_setting_to_ignore(name: str) -> None:
    with pytest.raises(TypeError, match=f"no parameter '{name}'; did you mean 'max_tokens'"):
        SamplingParams(**{name: 5})  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=f"{name} ignored"):
        assert SamplingParams(**{"max_tokens": 5, name: 7}).max_tokens == 5  # type: ignore[arg-type]


def test_a_sequence_may_be_made_of_lists() -> None:
    older: dict[str, Any] = {"tokens": [5, 6], "logprobs": [-1.0, -2.0]}
    made = SampledSequence(stop_reason="stop", **older)
    assert (made.tokens, made.logprobs, made.length) == ([5, 6], [-1.0, -2.0], 2)
    made = SampledSequence("length", "seq-1", tokens=[7])  # type: ignore[call-arg]
    assert made.logprobs is None
    with pytest.raises(TypeError, match="SampledSequence has no parameter 'ids'"):
        SampledSequence("stop", tokens=[5], ids=[5])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="stop_reason"):
        SampledSequence(tokens=[5])  # type: ignore[call-arg]
