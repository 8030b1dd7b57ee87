"""`from_chat`: masks from generation tags or from rendering message by message, and refused templates."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

pytest.importorskip("jinja2")

import pytest
from support.vocabularies import CHAT_TEMPLATE, KINDS, PLAIN_TEMPLATE, byte_level
from support.vocabularies import text as random_text

from tinker_sync import AdamParams, Datum, InvalidInputError, ModelInput, SamplingParams, Tokenizer, data
from tinker_sync.data import from_chat
from tinker_sync.local import tiny
from tinker_sync.testing import LocalServer

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
    """Return the texts of the runs of tokens with weight 1, in order."""
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
    """Return all tokens of a datum. Its targets must be its input shifted by one."""
    read, after = datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    assert read[1:] == after[:-1]
    return [*read, after[-1]]


TURNS = ["hello world<|im_end|>", "the quick brown fox<|im_end|>"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNTAGGED, CHATML], ids=["tags", "growth", "newline"])
def test_turns_are_trained_to_their_end(tokenizer: Tokenizer, template: str) -> None:
    datum = from_chat(CHAT, tokenizer, chat_template=template)
    assert trained(datum, tokenizer) == TURNS
    assert whole(datum) == tokenizer.apply_chat_template(CHAT, chat_template=template, return_dict=False)
    datum.validate()
    last = from_chat(CHAT, tokenizer, chat_template=template, train_on="last")
    assert trained(last, tokenizer) == TURNS[1:]
    assert whole(last) == whole(datum)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNTAGGED])
def test_reasoning_and_tool_calls_are_trained(tokenizer: Tokenizer, template: str) -> None:
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


SHOW = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        # The template shortens earlier answers when more messages follow.
        (
            (
                "{% for m in messages %}<|im_start|>{{ m.role }}\n"
                "{{ m.content if loop.last or m.role == 'user' else m.content[:3] }}<|im_end|>{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
            ),
            r"messages\[2\]: the template changes it .* train_on='last'",
        ),
        # The prompt opens a tag that the finished text lacks.
        (
            SHOW + "{% if add_generation_prompt %}assistant: <think>{% endif %}",
            "does not begin with the template's",
        ),
        # There is no prompt, and the model would learn to write the heading.
        (SHOW, r"messages\[2\]: the template has no generation prompt and writes a heading"),
        # The prompt ends inside the token " hello".
        (SHOW + PROMPT, "inside a token, between"),
        # The template changes the text between its tags.
        (
            (
                "{% for m in messages %}{% set s %}{% generation %}{{ m.content }}{% endgeneration %}"
                "{% endset %}{{ s | length }}{% endfor %}"
            ),
            "changes the text between its generation tags",
        ),
        (
            "{{ messages | length }}{% if false %}{% generation %}x{% endgeneration %}{% endif %}",
            "no text between",
        ),
    ],
    ids=["rewritten", "opened", "heading", "inside a token", "measured", "nothing"],
)
def test_uncertain_masks_are_refused(tokenizer: Tokenizer, template: str, words: str) -> None:
    chat = [message | {"content": message["content"].strip()} for message in CHAT]
    with pytest.raises(InvalidInputError, match=words):
        from_chat(chat, tokenizer, chat_template=template)


@pytest.mark.parametrize(
    ("chat", "options", "words"),
    [
        ([{"role": "user", "content": "hi"}], {}, "no message of the assistant"),
        ([{"role": "assistant", "content": "hi"}], {}, r"messages\[0\]: no message before it"),
        (CHAT, {"train_on": "some"}, "train_on: expected 'all' or 'last'"),
        ([*CHAT, {"role": "user", "content": "\ufdd0"}], {"chat_template": CHAT_TEMPLATE}, "U\\+FDD0"),
    ],
)
def test_invalid_chats_are_refused(tokenizer: Tokenizer, chat: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        from_chat(chat, tokenizer, **{"chat_template": UNTAGGED, **options})


def test_tags_find_a_first_message_of_the_assistant(tokenizer: Tokenizer) -> None:
    chat = [{"role": "assistant", "content": "hello"}]
    assert trained(from_chat(chat, tokenizer, chat_template=CHAT_TEMPLATE), tokenizer) == ["hello<|im_end|>"]


class Whole(Tokenizer):
    """A tokenizer without offsets: the text before each turn is then encoded from its beginning."""

    is_fast = False  # type: ignore[misc]  # what the base class says of itself


TEMPLATES = [
    CHAT_TEMPLATE,
    UNTAGGED,
    CHATML,
    PLAIN_TEMPLATE,
    SHOW + PROMPT,
    (
        "{% for m in messages %}[{{ m.role }}]¶ {{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}[assistant]¶{% endif %}"
    ),
    (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<eot>\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_that_are_encoded_from_a_special_token_on_have_the_same_tokens(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    folder = KINDS[kind](tmp_path_factory.mktemp("kind"))
    tokenizer, whole = Tokenizer.from_directory(folder), Whole.from_directory(folder)
    rng = random.Random(int(os.environ.get("SEED", "16")))
    found = refused = 0
    for _ in range(int(os.environ.get("EXAMPLES", "60"))):
        chat = [
            {"role": role, "content": random_text(rng)}
            for _ in range(rng.randrange(1, 5))
            for role in ("user", "assistant")
        ]
        for template in TEMPLATES:
            options: Any = {"chat_template": template, "train_on": rng.choice(["all", "last"])}
            outcomes: list[Any] = []
            for each in (tokenizer, whole):
                try:
                    outcomes.append(from_chat(chat, each, **options))
                except InvalidInputError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1], (template, chat)
            found += isinstance(outcomes[0], Datum)
            refused += isinstance(outcomes[0], str)
    assert found
    assert refused


def test_a_long_chat_is_encoded_in_parts_of_a_few_turns(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To encode each turn from the beginning of the chat took 38 seconds for 200 turns."""
    turns = 40
    chat = [{"role": role, "content": "hello world"} for _ in range(turns) for role in ("user", "assistant")]
    lengths: list[int] = []
    encode = tokenizer.encode

    def counting(text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counting)
    assert len(trained(from_chat(chat, tokenizer, chat_template=CHATML), tokenizer)) == turns
    assert sum(lengths) < 200 * turns


def test_chat_training_learns() -> None:
    with LocalServer() as server, server.service() as service:
        training = service.create_lora_training_client(tiny.NAME, rank=4).result()
        tokenizer = training.get_tokenizer()
        assert isinstance(tokenizer, Tokenizer)
        assert tokenizer.name_or_path == str(tiny.directory())

        sampling = service.create_sampling_client(base_model=tiny.NAME).result()
        assert sampling.get_tokenizer() is tokenizer  # loaded once for both clients

        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": "purple"},
        ]
        datum = data.from_chat(chat, tokenizer)
        losses = []
        for _ in range(3):
            passed = training.forward_backward([datum], "cross_entropy")
            training.optim_step(AdamParams(learning_rate=1e-2))
            losses.append(passed.result(120).metrics["loss:sum"])
        assert losses[2] < losses[1] < losses[0]

        ids = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        prompt = ModelInput.from_ints(ids)
        sampled = sampling.sample(prompt, 2, SamplingParams(max_tokens=4, seed=1)).result(120)
        assert all(tokenizer.decode(sequence.tokens) for sequence in sampled.sequences)
        group = data.from_samples(prompt, sampled, [1.0, -1.0])
        outcome = training.forward_backward(group, "importance_sampling").result(120)
        assert len(outcome.loss_fn_outputs) == 2


def test_other_tokenizer_classes(tokenizer: Tokenizer) -> None:
    class Other:
        """A tokenizer of another class with the same methods."""

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
    with pytest.raises(InvalidInputError, match="generation tags needs this package's"):
        from_chat(CHAT, Other(), chat_template=CHAT_TEMPLATE)
