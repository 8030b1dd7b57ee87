"""Conversations with sampled answers: no token differs between what was sampled and what is trained."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from support.chat_templates import ADD, FAMILIES, HEADED, TAGGED, THINKING
from support.vocabularies import text as random_text

from tinker_sync import InvalidInputError, SampledSequence, Tokenizer, get_tokenizer
from tinker_sync.data import Conversation, Turn, from_sample

CONVERSATIONS = int(os.environ.get("CONVERSATIONS", "60"))
"""Random conversations in each template."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return get_tokenizer("tinker-sync/tiny")


def sequence(tokens: Any, reason: Any = "stop", name: str | None = None) -> SampledSequence:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return SampledSequence(reason, name, np.array(tokens, np.int32), logprobs)


def answered(chat: Conversation, text: str, tokenizer: Tokenizer, **options: Any) -> dict[str, Any]:
    """Let the chat have this answer, sampled letter by letter, which is not how a tokenizer splits it."""
    tokens = [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
    return chat.add_sampled(sequence([*tokens, *chat.stop[:1]]), **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def random_answer(rng: random.Random, tokenizer: Tokenizer, end: int) -> list[int]:
    """Return tokens as a model might sample them: any at all, calls of tools, reasoning, spaces around."""
    texts = [
        "", " ", "<think>\nhm\n</think>\n\nyes", "<think>never", "\n\n 42 \n", random_text(rng),
        '<tool_call>{"name":  "add", "arguments": {"b":1,"a": 2}}</tool_call>',
        'so <tool_call>{"name": "add", "arguments": {}}</tool_call>', "<tool_call>{</tool_call>",
        '{"name": "add", "parameters": {"a": 1}}', '{"name": "other"}',
    ]  # fmt: skip
    tokens: list[int] = []
    for _ in range(rng.randrange(3)):
        piece = tokenizer.encode(rng.choice(texts), add_special_tokens=False)
        tokens += [token for token in piece if token != end]
        tokens += rng.choices(range(3, len(tokenizer)), k=rng.randrange(5))
    ended = rng.random() < 0.8
    return [*tokens, end] if ended or not tokens else tokens


def test_turns_that_extend_each_other_share_the_memory_of_their_prompts(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, [user("What is 2+3?")], chat_template=FAMILIES["tagged"])
    prompts = []
    for turn in range(5):
        prompts.append(chat.prompt().to_ints())
        other = chat.fork()
        chat.add_sampled(sequence([5 + turn, *chat.stop]))
        other.add_sampled(sequence([6 + turn, *chat.stop]))
        chat.add(user("Sure?"))
    assert [turn.prompt.tolist() for turn in chat.turns] == prompts
    assert all(np.shares_memory(turn.prompt, chat.turns[-1].prompt) for turn in chat.turns)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_what_was_sampled(family: str, tokenizer: Tokenizer) -> None:
    rng = random.Random(family)
    whole = 0
    for number in range(CONVERSATIONS):
        tools = [ADD] if rng.random() < 0.7 else None
        chat = Conversation(tokenizer, [user(random_text(rng))], tools=tools, chat_template=FAMILIES[family])
        [end] = chat.stop
        sampled = []
        for turn in range(rng.randrange(1, 6)):
            prompt = chat.prompt().to_ints()
            tokens = random_answer(rng, tokenizer, end)
            message = chat.add_sampled(sequence(tokens, name=f"seq-{number}-{turn}"))
            sampled.append((prompt, tokens))
            if message.get("tool_calls"):
                chat.add({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"})
            else:
                chat.add(user(random_text(rng)))
        advantages = [float(turn + 1) for turn in range(len(sampled))]
        data = chat.data(advantages)
        whole += len(data) == 1
        trained = []
        for datum in data:
            row = [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])]
            assert datum.loss_fn_inputs["target_tokens"].tolist() == row[1:]
            weights = [0.0, *datum.loss_fn_inputs["advantages"].tolist()]
            logprobs = [0.0, *datum.loss_fn_inputs["logprobs"].tolist()]
            for turn in sorted({int(weight) for weight in weights if weight}):
                places = [place for place, weight in enumerate(weights) if weight == turn]
                prompt, tokens = sampled[turn - 1]
                # The answer has the place in the row that it had after its prompt.
                assert row[: len(prompt)] == prompt
                assert places == list(range(len(prompt), len(prompt) + len(tokens)))
                assert [row[place] for place in places] == tokens
                assert [logprobs[place] for place in places] == [-1.0 - n for n in range(len(tokens))]
                trained.append(turn - 1)
            assert all(not logprob for logprob, weight in zip(logprobs, weights, strict=True) if not weight)
            datum.validate()
        assert trained == [turn for turn, (_, tokens) in enumerate(sampled) if tokens]
    # Only reasoning that is left out later splits a conversation.
    assert whole == CONVERSATIONS if family != "thinking" else 0 < whole < CONVERSATIONS


def test_the_next_prompt_is_what_the_template_renders(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, [user("2 + 3?")], tools=[ADD], chat_template=TAGGED)
    first = chat.prompt().to_ints()
    message = answered(chat, '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>', tokenizer)
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    chat.add({"role": "tool", "content": "5"})
    row, after = chat.turns[0].row.tolist(), chat.prompt().to_ints()
    assert row[: len(first)] == first
    assert after[: len(row)] == row
    assert tokenizer.decode(after[len(row) :]) == (
        "\n<|im_start|>user\n<tool_response>5</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_was_cut_gets_its_end(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, [user("a")], chat_template=TAGGED)
    chat.add_sampled(sequence(tokenizer.encode("never end"), "length"))
    chat.add(user("b"))
    row = chat.turns[0].row.tolist()
    assert tokenizer.decode(chat.prompt().to_ints()[len(row) :]).startswith("<|im_end|>\n<|im_start|>user\nb")


def test_reasoning_that_the_template_drops_begins_another_datum(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, [user("2 + 3?")], tools=[ADD], chat_template=THINKING)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    message = answered(chat, f"<think>\nI should add.\n</think>\n\n{call}", tokenizer)
    assert message["reasoning_content"] == "I should add."
    chat.add({"role": "tool", "content": "5"})
    answered(chat, "<think>\nDone.\n</think>\n\n5", tokenizer)  # the reasoning stays until the user speaks
    assert chat.turns[-1].extends
    chat.add(user("Sure?"))
    assert "I should add" not in tokenizer.decode(chat.prompt().to_ints())
    answered(chat, "Yes", tokenizer)
    assert not chat.turns[-1].extends
    data = chat.data([1.0, 2.0, 3.0])
    assert [sorted({*datum.loss_fn_inputs["advantages"].tolist()}) for datum in data] == [[0, 1, 2], [0, 3]]
    with pytest.raises(InvalidInputError, match="2 data"):
        chat.datum(1.0)


def test_an_answer_that_a_text_ended_begins_another_datum(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, [user("a")], chat_template=TAGGED)
    message = chat.add_sampled(sequence(tokenizer.encode("Act: look\nObs:")), stop=["Obs:"])
    assert message["content"] == "Act: look\n"
    assert chat.turns[0].stopped_at == "Obs:"
    chat.add(user("Obs: a door"))
    assert tokenizer.decode(chat.prompt().to_ints()).count("Obs:") == 1
    answered(chat, "open it", tokenizer)
    assert len(chat.data(1.0)) == 2


def test_a_fork_goes_on_by_itself(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, [user("a")], chat_template=HEADED)
    forks = [chat.fork() for _ in range(2)]
    for number, fork in enumerate(forks):
        answered(fork, f"answer {number}", tokenizer)
    assert [fork.messages[-1]["content"] for fork in forks] == ["answer 0", "answer 1"]
    assert not chat.turns
    assert len(chat.messages) == 1


def test_one_turn_is_what_from_sample_makes(tokenizer: Tokenizer) -> None:
    chat = Conversation(tokenizer, [user("a")])
    prompt, sampled = chat.prompt(), sequence([5, 6, 2], name="seq-1")
    chat.add_sampled(sampled)
    assert chat.datum([[1.0, 2.0, 3.0]]) == from_sample(prompt, sampled, [1.0, 2.0, 3.0])


def test_the_origin_of_each_token() -> None:
    turns = [
        Turn([1, 2], sequence([3, 4], name="a")),
        Turn([1, 2, 3, 4, 5, 6, 7], sequence([8], name="b"), extends=True),
    ]
    chat = Conversation(get_tokenizer("tinker-sync/tiny"))
    chat.turns += turns
    datum = chat.datum(1.0)
    assert datum.model_input_spans is not None
    assert datum.loss_fn_input_spans is not None
    shown = [
        (type(span).__name__[0], span.sequence_id, span.offset, span.length)
        for span in [*datum.model_input_spans, *datum.loss_fn_input_spans]
    ]
    assert shown == [
        ("P", "a", 0, 2), ("S", "a", 0, 2), ("P", "b", 4, 3),
        ("P", "a", 1, 1), ("S", "a", 0, 2), ("P", "b", 4, 3), ("S", "b", 0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("turns", "advantages", "problem"),
    [
        ([], 1.0, "nothing was sampled"),
        ([Turn([1], sequence([2]))], [1.0, 2.0], "one for each turn, got 2"),
        ([Turn([1], sequence([2]))], [[1.0, 2.0]], r"turns\[0\]: advantages"),
        ([Turn([1], SampledSequence("stop", None, [2]))], 1.0, r"turns\[0\]: sequence: has no log-prob"),
    ],
)
def test_what_cannot_be_trained_is_refused(turns: list[Turn], advantages: Any, problem: str) -> None:
    chat = Conversation(get_tokenizer("tinker-sync/tiny"))
    chat.turns += turns
    with pytest.raises(InvalidInputError, match=problem):
        chat.data(advantages)


def test_an_answer_without_tokens_is_left_out() -> None:
    chat = Conversation(get_tokenizer("tinker-sync/tiny"))
    chat.turns += [
        Turn([1], sequence([2])), Turn([3], sequence([])), Turn([3, 4], sequence([5]), extends=True),
        Turn([6], sequence([])),
    ]  # fmt: skip
    assert [datum.model_input.to_ints() for datum in chat.data([1.0, 2.0, 3.0, 4.0])] == [[1], [3, 4]]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": [ADD]}, "shows the model no tools"),
        (
            {"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"},
            "no special token",
        ),
        ({"messages": ["a"]}, r"messages\[0\]"),
    ],
)
def test_a_chat_that_cannot_be_is_refused(options: Any, problem: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        Conversation(tokenizer, **options)
    with pytest.raises(InvalidInputError, match="no message yet"):
        Conversation(tokenizer).prompt()
