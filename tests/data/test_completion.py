"""`from_completion` and `from_samples`: examples, images, provenance spans, and invalid arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinker_sync import (
    Datum,
    EncodedTextChunk,
    ImageChunk,
    InvalidInputError,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
)
from tinker_sync.data import from_completion, from_sample, from_samples

IMAGE = ImageChunk(data=b"...", format="png", expected_tokens=3)


class Letters:
    """A tokenizer whose ids are positions in the alphabet. It adds 90 before a text; 91 is the end token."""

    eos_token_id: int | None = 91

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [90] * add_special_tokens + [ord(letter) - 96 for letter in text]


def parts(datum: Datum) -> tuple[list[int], list[int], list[float]]:
    inputs = datum.loss_fn_inputs
    datum.validate()
    return datum.model_input.to_ints(), inputs["target_tokens"].tolist(), inputs["weights"].tolist()


@pytest.mark.parametrize(
    ("prompt", "completion", "options", "expected"),
    [
        ([1, 2, 3], [4, 5], {}, ([1, 2, 3, 4], [2, 3, 4, 5], [0, 0, 1, 1])),
        ([1], [2], {}, ([1], [2], [1])),
        ([], [1, 2, 3], {}, ([1, 2], [2, 3], [1, 1])),
        (np.array([1, 2]), range(3, 5), {}, ([1, 2, 3], [2, 3, 4], [0, 1, 1])),
        (ModelInput.from_ints([1]).append_int(2), (3,), {}, ([1, 2], [2, 3], [0, 1])),
        ("ab", "cd", {}, ([90, 1, 2, 3], [1, 2, 3, 4], [0, 0, 1, 1])),
        ("ab", "c", {"add_special_tokens": False}, ([1, 2], [2, 3], [0, 1])),
        ("", "cd", {}, ([90, 3], [3, 4], [1, 1])),
        ("a", "b", {"append_eos": True}, ([90, 1, 2], [1, 2, 91], [0, 1, 1])),
        ([1, 2], [3, 4], {"prompt_weight": 0.5}, ([1, 2, 3], [2, 3, 4], [0.5, 1, 1])),
        ([1, 2], [3, 4], {"weights": 0.25}, ([1, 2, 3], [2, 3, 4], [0, 0.25, 0.25])),
        ([1, 2], [3, 4], {"weights": [0.5, 2]}, ([1, 2, 3], [2, 3, 4], [0, 0.5, 2])),
        ([1], "b", {"append_eos": True, "weights": np.array([1, 3])}, ([1, 2], [2, 91], [1, 3])),
        # No position predicts the first token of a completion without a prompt, so its weight is not used.
        ([], [1, 2, 3], {"weights": [7, 8, 9]}, ([1, 2], [2, 3], [8, 9])),
    ],
)
def test_examples(prompt: Any, completion: Any, options: Any, expected: Any) -> None:
    datum = from_completion(prompt, completion, Letters(), **options)
    assert parts(datum) == expected
    assert len(datum.model_input.chunks) == 1
    assert (datum.loss_fn_inputs["target_tokens"].dtype, datum.loss_fn_inputs["weights"].dtype) == (
        "int64",
        "float32",
    )


def test_images_are_not_predicted() -> None:
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2]), IMAGE, EncodedTextChunk(tokens=[3])])
    datum = from_completion(prompt, [4, 5])
    #        reads     1  2  i  i  i  3  4
    #        predicts  2  i  i  i  3  4  5
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [2, 0, 0, 0, 3, 4, 5]
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 0, 0, 0, 0, 1, 1]
    weighted = from_completion(prompt, [4, 5], prompt_weight=1)
    assert weighted.loss_fn_inputs["weights"].tolist() == [1, 0, 0, 0, 1, 1, 1]
    assert datum.model_input.chunks == [*prompt.chunks, EncodedTextChunk(tokens=[4])]
    assert datum.model_input.length == 7
    last = from_completion(ModelInput(chunks=[IMAGE]), [4])
    assert last.model_input.chunks == [IMAGE]
    assert last.loss_fn_inputs["target_tokens"].tolist() == [0, 0, 4]


@pytest.mark.parametrize(
    ("prompt", "completion", "options", "words"),
    [
        ([1], [], {}, "completion: is empty"),
        ([], [1], {}, "nothing to predict"),
        ("a", [1], {"tokenizer": None}, "prompt: needs a tokenizer"),
        ([1], "a", {"tokenizer": None}, "completion: needs a tokenizer"),
        ([1], [1], {"tokenizer": None, "append_eos": True}, "append_eos: needs a tokenizer"),
        ([1], [2, 3], {"weights": [1.0]}, r"weights: expected 2, one for each token, got shape \[1\]"),
        ([1], [2, 3], {"weights": [[1.0, 2.0]]}, r"weights: expected 2, .* got shape \[1, 2\]"),
        ([1], [2, 3], {"weights": "heavy"}, "weights: expected numbers"),
        ([1], [2], {"weights": float("nan")}, "expected a finite number, got nan"),
        ([1.5], [2], {}, r"^prompt\[0\]"),
        ([1], [2, -1.5], {}, r"^completion\[1\]"),
        (ModelInput(chunks=[ImageChunk(data=b"", format="png")]), [2], {}, "set expected_tokens"),
    ],
)
def test_invalid_arguments_are_refused(prompt: Any, completion: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        from_completion(prompt, completion, options.pop("tokenizer", Letters()), **options)


def test_append_eos_needs_an_end_token() -> None:
    letters = Letters()
    letters.eos_token_id = None
    with pytest.raises(InvalidInputError, match="append_eos: the tokenizer has no end token"):
        from_completion("a", "b", letters, append_eos=True)


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


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="prompt: is empty"):
        from_sample([], sampled([1, 2], [-1.0, -1.0]), 1.0)
