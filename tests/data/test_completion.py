"""`from_completion`: examples, images, invalid arguments, and the shift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinker_sync import Datum, EncodedTextChunk, ImageChunk, InvalidInputError, ModelInput
from tinker_sync.data import from_completion
from tinker_sync.data.completion import shift

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


def test_shift_is_one_position_for_any_split() -> None:
    row = list(range(10, 20))
    for cut in range(len(row)):
        shifted = shift(ModelInput.from_ints(row[:cut]), row[cut:])
        assert shifted.model_input.to_ints() == row[:-1]
        assert shifted.targets.tolist() == row[1:]
        assert shifted.row(0, 1).tolist() == [float(position >= cut - 1) for position in range(9)]
