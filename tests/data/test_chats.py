"""Chats: hand-made masks, by tags and by growth, and the templates of which nothing can be known."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jinja2")

from support.vocabularies import CHAT_TEMPLATE, byte_level

from tinker_sync import Datum, InvalidInputError, Tokenizer
from tinker_sync.data import from_chat

UNTAGGED = CHAT_TEMPLATE.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello world"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "the quick brown fox"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(byte_level(tmp_path_factory.mktemp("tokenizer")))


def trained(datum: Datum, tokenizer: Tokenizer) -> list[str]:
    """The runs of text that are trained on."""
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    weights = datum.loss_fn_inputs["weights"].tolist()
    assert set(weights) <= {0.0, 1.0}
    runs: list[list[int]] = []
    before = 0.0
    for token, weight in zip(targets, weights, strict=True):
        if weight and not before:
            runs.append([])
        if weight:
            runs[-1].append(token)
        before = weight
    return [tokenizer.decode(run) for run in runs]


def whole(datum: Datum) -> list[int]:
    """The row of tokens again; fails unless it was shifted by one."""
    read, said = datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    assert read[1:] == said[:-1]
    return [*read, said[-1]]


SAID = ["hello world<|im_end|>", "the quick brown fox<|im_end|>"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNTAGGED, CHATML], ids=["tags", "growth", "newline"])
def test_what_the_assistant_says_is_trained_up_to_the_end_of_its_turn(
    tokenizer: Tokenizer, template: str
) -> None:
    datum = from_chat(CHAT, tokenizer, chat_template=template)
    assert trained(datum, tokenizer) == SAID
    assert whole(datum) == tokenizer.apply_chat_template(CHAT, chat_template=template, return_dict=False)
    datum.validate()
    last = from_chat(CHAT, tokenizer, chat_template=template, train_on="last")
    assert trained(last, tokenizer) == SAID[1:]
    assert whole(last) == whole(datum)


def test_one_turn_by_hand(tokenizer: Tokenizer) -> None:
    start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    prompt = [start, *ids("user\na"), end, *ids("\n"), start, *ids("assistant\n")]
    said = [*ids("b"), end]
    row = [*prompt, *said, *ids("\n")]
    datum = from_chat(chat, tokenizer, chat_template=CHATML)
    assert datum.model_input.to_ints() == row[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == row[1:]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(said) + [0.0]
    assert datum.loss_fn_inputs["weights"].tolist() == weights


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNTAGGED])
def test_tools_thoughts_and_calls_are_the_assistants(tokenizer: Tokenizer, template: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat = [
        {"role": "user", "content": "what is it?"},
        {
            "role": "assistant",
            "reasoning_content": "let me see",
            "content": "wait",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "it is 5"},
        {"role": "user", "content": "thanks"},
    ]
    datum = from_chat(chat, tokenizer, tools=[tool], chat_template=template)
    call = '<think>let me see</think>wait\n<tool_call>f {\n  "x": 1\n}<|im_end|>'
    assert trained(datum, tokenizer) == [call, "it is 5<|im_end|>"]
    assert tokenizer.decode(whole(datum)).startswith("<|im_start|>system\n# Tools")


def test_what_the_tokenizer_was_made_of_does_not_matter(tokenizer: Tokenizer) -> None:
    class Other:
        """A tokenizer of another make, with the methods that count."""

        def __init__(self) -> None:
            self.all_special_ids = tokenizer.all_special_ids
            self.added_tokens_decoder = tokenizer.added_tokens_decoder

        apply_chat_template = staticmethod(tokenizer.apply_chat_template)
        get_chat_template = staticmethod(tokenizer.get_chat_template)
        encode = staticmethod(tokenizer.encode)
        decode = staticmethod(tokenizer.decode)

    assert from_chat(CHAT, Other(), chat_template=UNTAGGED) == from_chat(
        CHAT, tokenizer, chat_template=UNTAGGED
    )
    with pytest.raises(InvalidInputError, match="generation tags are read by this package's own"):
        from_chat(CHAT, Other(), chat_template=CHAT_TEMPLATE)


SHOW = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        # Earlier answers are shortened when more follows.
        (
            (
                "{% for m in messages %}<|im_start|>{{ m.role }}\n"
                "{{ m.content if loop.last or m.role == 'user' else m.content[:3] }}<|im_end|>{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
            ),
            r"messages\[2\]: the template writes it otherwise .* train_on='last'",
        ),
        # The prompt opens a thought that the finished text does not have.
        (
            SHOW + "{% if add_generation_prompt %}assistant: <think>{% endif %}",
            "does not begin with the prompt",
        ),
        # No prompt at all, and a heading that the model would be taught to write.
        (SHOW, r"messages\[2\]: the template has no generation prompt and writes a heading"),
        # The prompt ends within a token: " hello" is one.
        (SHOW + PROMPT, "no boundary of tokens, between"),
        # Tags whose content is changed by what stands around them.
        (
            (
                "{% for m in messages %}{% set s %}{% generation %}{{ m.content }}{% endgeneration %}"
                "{% endset %}{{ s | length }}{% endfor %}"
            ),
            "works on what stands between its generation tags",
        ),
        (
            "{{ messages | length }}{% if false %}{% generation %}x{% endgeneration %}{% endif %}",
            "nothing stands",
        ),
    ],
    ids=["rewritten", "opened", "heading", "inside a token", "measured", "nothing"],
)
def test_what_cannot_be_known_is_refused(tokenizer: Tokenizer, template: str, words: str) -> None:
    chat = [message | {"content": message["content"].strip()} for message in CHAT]
    with pytest.raises(InvalidInputError, match=words):
        from_chat(chat, tokenizer, chat_template=template)


def test_a_template_without_headings_needs_no_prompt(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
        "{% else %}<|im_start|>{{ m.content }}<|im_start|>{% endif %}{% endfor %}"
    )
    assert trained(from_chat(CHAT, tokenizer, chat_template=template), tokenizer) == SAID


def test_white_space_is_trained_where_it_is_what_ends_a_turn(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert trained(from_chat(chat, tokenizer, chat_template=template), tokenizer) == ["hello\n\n"]


@pytest.mark.parametrize(
    ("chat", "options", "words"),
    [
        ([{"role": "user", "content": "hi"}], {}, "the assistant says nothing"),
        ([{"role": "assistant", "content": "hi"}], {}, r"messages\[0\]: nothing comes before it"),
        (CHAT, {"train_on": "some"}, "train_on: expected 'all' or 'last'"),
        ([*CHAT, {"role": "user", "content": "\ufdd0"}], {"chat_template": CHAT_TEMPLATE}, "U\\+FDD0"),
    ],
)
def test_chats_that_are_no_examples(tokenizer: Tokenizer, chat: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        from_chat(chat, tokenizer, **{"chat_template": UNTAGGED, **options})


def test_an_assistant_that_speaks_first_is_found_by_tags(tokenizer: Tokenizer) -> None:
    chat = [{"role": "assistant", "content": "hello"}]
    assert trained(from_chat(chat, tokenizer, chat_template=CHAT_TEMPLATE), tokenizer) == ["hello<|im_end|>"]
