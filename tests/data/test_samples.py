"""`from_sample` and `from_samples`: examples, provenance spans, and invalid arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinker_sync import (
    EncodedTextChunk,
    ImageChunk,
    InvalidInputError,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
)
from tinker_sync.data import from_sample, from_samples


def sampled(tokens: list[int], logprobs: Any, sequence_id: str | None = "seq-1") -> SampledSequence:
    return SampledSequence(
        "stop",
        sequence_id,
        np.array(tokens, dtype=np.int32),
        None if logprobs is None else np.array(logprobs, dtype=np.float32),
    )


def test_one_advantage() -> None:
    datum = from_sample(ModelInput.from_ints([1, 2, 3]), sampled([4, 5], [-0.5, -0.25]), 2)
    inputs = datum.loss_fn_inputs
    assert datum.model_input.to_ints() == [1, 2, 3, 4]
    assert inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert inputs["logprobs"].tolist() == [0, 0, -0.5, -0.25]
    assert inputs["advantages"].tolist() == [0, 0, 2, 2]
    assert sorted(inputs) == ["advantages", "logprobs", "target_tokens"]
    assert {name: inputs[name].dtype for name in inputs} == {
        "target_tokens": "int64",
        "logprobs": "float32",
        "advantages": "float32",
    }
    # The input has three prompt tokens and a sampled one, the targets two of each.
    assert datum.model_input_spans == [
        PromptProvenanceSpan(sequence_id="seq-1", length=3),
        SampledProvenanceSpan(sequence_id="seq-1", length=1),
    ]
    assert datum.loss_fn_input_spans == [
        PromptProvenanceSpan(sequence_id="seq-1", offset=1, length=2),
        SampledProvenanceSpan(sequence_id="seq-1", length=2),
    ]
    datum.validate()


def test_advantages_for_each_token_and_plain_lists() -> None:
    sequence = SampledSequence("length", "s", _tokens_list=[3, 4, 5], _logprobs_list=[-1.0, -2.0, -3.0])
    datum = from_sample([1, 2], sequence, [0.5, 0.0, -0.5])
    assert datum.model_input.to_ints() == [1, 2, 3, 4]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert datum.loss_fn_inputs["logprobs"].tolist() == [0, -1, -2, -3]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0, 0.5, 0, -0.5]


def test_shortest_sample_has_no_empty_spans() -> None:
    datum = from_sample([1], sampled([2], [-1.0]), 1.0)
    assert datum.model_input_spans == [PromptProvenanceSpan(sequence_id="seq-1", length=1)]
    assert datum.loss_fn_input_spans == [SampledProvenanceSpan(sequence_id="seq-1", length=1)]
    datum.validate()


def test_spans_need_a_sequence_id_and_the_option() -> None:
    assert from_sample([1], sampled([2], [-1.0], None), 1.0).model_input_spans is None
    assert from_sample([1], sampled([2], [-1.0]), 1.0, provenance=False).loss_fn_input_spans is None


def test_images_in_the_prompt_have_no_advantage() -> None:
    image = ImageChunk(data=b"...", format="png", expected_tokens=2)
    prompt = ModelInput(chunks=[image, EncodedTextChunk(tokens=[7])])
    datum = from_sample(prompt, sampled([8, 9], [-1.0, -2.0]), 3.0)
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [0, 7, 8, 9]
    assert datum.loss_fn_inputs["advantages"].tolist() == [0, 0, 3, 3]
    assert [span.length for span in datum.model_input_spans or ()] == [3, 1]
    assert [span.length for span in datum.loss_fn_input_spans or ()] == [2, 2]


@pytest.mark.parametrize(
    ("sequence", "advantages", "problems"),
    [
        (sampled([], []), 1.0, ["sequence: has no tokens"]),
        (sampled([1], None), 1.0, ["sequence: has no log-probabilities; the server gave none"]),
        (sampled([1, 2], [-1.0]), 1.0, ["sequence: has 2 tokens and log-probabilities of shape [1]"]),
        (sampled([1, 2], [-1.0, 0.5]), 1.0, ["sequence: logprobs[1] is 0.5, which is not a log-probability"]),
        (sampled([1], [float("nan")]), 1.0, ["sequence: logprobs[0] is nan, which is not a log-probability"]),
        (
            sampled([1, 2], [-1.0, float("-inf")]),
            [1.0, float("inf"), 2.0],
            [
                "sequence: logprobs[1] is -inf, which is not a log-probability",
                "advantages: expected one number or 2, one for each sampled token, got shape [3]",
                "advantages: expected finite numbers, got inf",
            ],
        ),
        (sampled([1], [-1.0]), "much", None),
    ],
)
def test_problems_are_listed(sequence: SampledSequence, advantages: Any, problems: list[str] | None) -> None:
    with pytest.raises(InvalidInputError) as caught:
        from_sample([1, 2], sequence, advantages)
    if problems is not None:
        assert list(caught.value.problems) == problems


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="prompt: is empty"):
        from_sample([], sampled([1, 2], [-1.0, -1.0]), 1.0)


def test_rounding_above_zero_is_accepted() -> None:
    from_sample([1], sampled([1], [1e-7]), 1.0)


def test_group_of_samples() -> None:
    response = SampleResponse([sampled([3], [-1.0], "a"), sampled([4, 5], [-1.0, -2.0], "b")])
    first, second = from_samples([1, 2], response, np.array([0.5, -0.5]))
    assert first.loss_fn_inputs["advantages"].tolist() == [0, 0.5]
    assert second.loss_fn_inputs["advantages"].tolist() == [0, -0.5, -0.5]
    assert second.model_input_spans[0].sequence_id == "b"
    ragged = from_samples([1, 2], response.sequences, [[1.0], [2.0, 3.0]])
    assert ragged[1].loss_fn_inputs["advantages"].tolist() == [0, 2, 3]
    assert from_samples([1], [], []) == []


@pytest.mark.parametrize(
    ("advantages", "words"),
    [
        ([1.0], "advantages: expected 2, one for each sequence, got 1"),
        (1.0, "advantages: expected 2, one for each sequence, got one number"),
        (np.float32(1.0), "got one number"),
        ([1.0, [1.0, 2.0]], r"sequences\[1\]: advantages: expected one number or 1"),
    ],
)
def test_invalid_groups_are_refused(advantages: Any, words: str) -> None:
    group = [sampled([3], [-1.0]), sampled([4], [-1.0])]
    with pytest.raises(InvalidInputError, match=words):
        from_samples([1], group, advantages)
