"""Conversions of types from and to text: `from_chat`, `text`, `trained_tokens`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tinker_sync
from tinker_sync import Datum, InvalidInputError, ModelInput, SampledSequence
from tinker_sync.types.datum import count_trained

CHAT = [{"role": "user", "content": "2 + 3?"}]


def tokenizer() -> tinker_sync.Tokenizer:
    return tinker_sync.get_tokenizer("tinker-sync/tiny")


def test_a_chat_becomes_a_prompt_for_the_next_turn() -> None:
    prompt = ModelInput.from_chat(CHAT, tokenizer())
    assert tokenizer().decode(prompt.to_ints()).endswith("<|im_start|>assistant\n")
    whole = ModelInput.from_chat(CHAT, tokenizer(), add_generation_prompt=False)
    assert prompt.to_ints()[: whole.length] == whole.to_ints()
    assert prompt.length > whole.length


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages: is empty"),
        ("2 + 3?", "messages: expected a list of dictionaries with role and content, got str"),
        ({"role": "user", "content": "a"}, r"expected a list of messages, got one; write \[message\]"),
        (["2 + 3?"], r"messages\[0\]: expected a dictionary with role and content, got a str"),
        (
            [*CHAT, {"from": "gpt", "value": "5"}],
            r"messages\[1\]: has no 'role'; rename 'from' to 'role', 'value' to 'content', and 'gpt' to 'as",
        ),
        ([{"role": "user", "value": "5"}], r"messages\[0\]: has no 'content'; rename 'value' to 'content'"),
        ([{"content": "5"}], r"has no 'role'; a message is \{'role': 'user', 'content': '\.\.\.'\}"),
        ([{"role": 1, "content": "5"}], r"messages\[0\]\['role'\]: expected text, got 1"),
    ],
)
def test_what_is_no_chat_is_refused_with_the_remedy(messages: Any, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        ModelInput.from_chat(messages, tokenizer())
    with pytest.raises(InvalidInputError, match=complaint):
        tinker_sync.data.from_chat(messages, tokenizer())


def test_a_chat_to_train_on_needs_an_answer() -> None:
    with pytest.raises(
        InvalidInputError, match="no message of the assistant to train on, only of role 'user'"
    ):
        tinker_sync.data.from_chat(CHAT, tokenizer())


def test_the_text_of_a_sample() -> None:
    ids = tokenizer().encode("5<|im_end|>")
    sequence = SampledSequence("stop", tokens_np=np.array(ids, dtype=np.int32))
    assert sequence.text(tokenizer()) == "5"
    assert sequence.text(tokenizer(), skip_special_tokens=False) == "5<|im_end|>"


@pytest.mark.parametrize(
    ("inputs", "trained"),
    [
        ({"target_tokens": [2, 3, 4]}, [2, 3, 4]),
        ({"target_tokens": [2, 3, 4], "weights": [0, 0.5, 1]}, [3, 4]),
        ({"target_tokens": [2, 3, 4], "advantages": [0, -1, 0]}, [3]),
        ({"target_tokens": [2, 3, 4], "weights": [1, 0, 0], "advantages": [0, 1, 1]}, [2]),
        ({"target_tokens": [[2, 3], [4, 5], [6, 7]], "weights": [0, 1, 0]}, [4, 5]),
        ({"target_tokens": [[2, 3], [4, 5]], "weights": [[0, 1], [1, 0]]}, [3, 4]),
        ({}, []),
    ],
)
def test_trained_tokens(inputs: Any, trained: list[int]) -> None:
    assert Datum(ModelInput.from_ints([1, 2, 3]), inputs).trained_tokens == trained


@pytest.mark.parametrize("name", ["weights", "advantages"])
@pytest.mark.parametrize("targets", [[7], [7, 8], [[7, 8], [9, 10]]])
def test_a_scalar_decides_for_all_targets(name: str, targets: Any) -> None:
    for value, counted in ((0.5, np.ravel(targets).tolist()), (0.0, [])):
        inputs = {"target_tokens": targets, name: np.array(value, dtype=np.float32)}
        datum = Datum(ModelInput.from_ints(range(len(targets))), inputs)
        assert (datum.problems(), datum.trained_tokens) == ([], counted)
        assert count_trained([datum]) == (datum.model_input.length if counted else 0)


def test_trained_tokens_of_a_chat_are_those_of_the_assistant() -> None:
    datum = tinker_sync.data.from_chat([*CHAT, {"role": "assistant", "content": "5"}], tokenizer())
    assert tokenizer().decode(datum.trained_tokens) == "5<|im_end|>"


def test_weights_that_do_not_fit_are_named() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1, 1, 1]})
    with pytest.raises(InvalidInputError, match="there are 2 targets and 3 weights or advantages"):
        datum.trained_tokens  # noqa: B018
