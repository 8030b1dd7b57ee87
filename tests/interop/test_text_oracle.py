"""Encoding, decoding and chats agree with transformers: five kinds of tokenizers, texts of every script.

`TEXT_ROUNDS` sets the number of texts; the default is 10000.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

import numpy as np
import transformers
from support.vocabularies import CHAT_TEMPLATE, KINDS, PLAIN_TEMPLATE, text, texts

from tinker_sync import InvalidInputError, Tokenizer
from tinker_sync.data.chat_template import ChatTemplate

COUNT = int(os.environ.get("TEXT_ROUNDS", "10000"))
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of transformers

Pair = tuple[Tokenizer, Any]


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = KINDS[request.param](tmp_path_factory.mktemp("models") / request.param)
    return Tokenizer.from_directory(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def many() -> list[str]:
    return texts(COUNT)


def test_the_same_vocabulary_and_special_tokens(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.get_vocab() == theirs.get_vocab()
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert list(ours.special_tokens_map) == list(theirs.special_tokens_map)
    assert ours.extra_special_tokens == theirs.extra_special_tokens
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    for index, token in theirs.added_tokens_decoder.items():
        assert ours.added_tokens_decoder[index].__getstate__() == token.__getstate__()
    for name in theirs.SPECIAL_TOKENS_ATTRIBUTES:
        for each in (name, f"{name}_id"):
            assert getattr(ours, each, None) == getattr(theirs, each, None), each
    assert (ours.model_max_length, ours.is_fast) == (theirs.model_max_length, theirs.is_fast)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_every_text_encodes_alike(pair: Pair, many: list[str], add_special_tokens: bool) -> None:
    ours, theirs = pair
    expected = theirs(many, add_special_tokens=add_special_tokens, return_token_type_ids=False)
    made = ours(many, add_special_tokens=add_special_tokens)
    assert dict(made) == dict(expected)
    # Encode single texts too, which both libraries do in another code path.
    for index in range(0, len(many), 7):
        assert ours.encode(many[index], add_special_tokens=add_special_tokens) == expected["input_ids"][index]
    assert theirs.encode(many[-1], add_special_tokens=add_special_tokens) == expected["input_ids"][-1]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_every_text_decodes_alike(pair: Pair, many: list[str], skip_special_tokens: bool) -> None:
    ours, theirs = pair
    rng = random.Random(2)
    ids = ours(many)["input_ids"]
    ids += [[rng.randrange(len(ours)) for _ in range(rng.randrange(20))] for _ in range(len(many) // 4)]
    expected = [theirs.decode(row, skip_special_tokens=skip_special_tokens) for row in ids]
    assert [ours.decode(row, skip_special_tokens=skip_special_tokens) for row in ids] == expected
    assert ours.batch_decode(ids, skip_special_tokens=skip_special_tokens) == expected
    rows = ids[:50]
    for clean in (True, False):
        assert ours.batch_decode(rows, clean_up_tokenization_spaces=clean)[:5] == [
            ours.decode(row, clean_up_tokenization_spaces=clean) for row in rows[:5]
        ]
    assert ours.decode(rows) == theirs.decode(rows)
    assert ours.decode(ids[3][:1][0] if ids[3] else 5) == theirs.decode(ids[3][:1][0] if ids[3] else 5)
    row = next(row for row in ids if len(row) > 3)
    assert ours.decode(np.array(row)) == theirs.decode(np.array(row)) == ours.decode(tuple(row))


# ------------------------------------------------------------------------------------------- chats
SCHEMA = {
    "type": "function",
    "function": {
        "name": "f",
        "description": 'über <b> & "c"',
        "parameters": {"type": "object", "properties": {}},
    },
}


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        made.append({"role": "system", "content": text(rng)})
    for _ in range(rng.randrange(1, 4)):
        parts = [{"type": "text", "text": text(rng)}, {"type": "image", "image": object()}]
        made.append({"role": "user", "content": rng.choice([text(rng), parts]), "name": None})
        answer: dict[str, Any] = {"role": "assistant", "content": text(rng)}
        if rng.random() < 0.3:
            answer[rng.choice(["reasoning_content", "thinking", "reasoning"])] = text(rng)
        if rng.random() < 0.3:
            call = {"function": {"name": "f", "arguments": {"größe": [1, 2.5, None, True], "t": text(rng)}}}
            answer |= {"content": rng.choice([None, ""]), "tool_calls": [call]}
            made.append(answer)
            answer = {"role": "tool", "content": text(rng)}
        made.append(answer)
    return made[: len(made) - rng.randrange(2)] or made


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = KINDS["chat"](tmp_path_factory.mktemp("models") / "chat")
    return Tokenizer.from_directory(folder), transformers.AutoTokenizer.from_pretrained(folder)


def test_chats_render_and_encode_alike(chatting: Pair) -> None:
    ours, theirs = chatting
    assert ours.chat_template == theirs.chat_template == {"default": CHAT_TEMPLATE, "plain": PLAIN_TEMPLATE}
    rng = random.Random(4)
    for round_ in range(COUNT // 10):
        messages = conversation(rng)
        options: dict[str, Any] = {
            "tools": rng.choice([None, [SCHEMA], [SCHEMA, SCHEMA]]),
            "add_generation_prompt": rng.random() < 0.5,
        }
        if rng.random() < 0.3:
            options["enable_thinking"] = rng.random() < 0.5
        shown = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.apply_chat_template(messages, tokenize=False, **options) == shown, round_
        expected = theirs.apply_chat_template(messages, **options)
        made = ours.apply_chat_template(messages, **options)
        assert dict(made) == dict(expected)
        ids = ours.apply_chat_template(messages, return_dict=False, **options)
        assert ids == expected["input_ids"]
        marked = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, **options)
        whole = ChatTemplate.of(ours, None, options.pop("tools"), None, options)
        spans = whole.find_generated(messages, whole.render(messages))
        offsets = ours(shown, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        mask = [int(any(one < end and start < two for one, two in spans)) for start, end in offsets]
        assert mask == marked["assistant_masks"], round_


def test_named_given_and_batched_templates_alike(chatting: Pair) -> None:
    ours, theirs = chatting
    rng = random.Random(5)
    chats = [
        [{"role": "user", "content": text(rng)}, {"role": "assistant", "content": text(rng)}]
        for _ in range(40)
    ]
    for template in ("plain", PLAIN_TEMPLATE, "{{ bos_token }}{{ messages | length }}{{ image_token }}"):
        for tokenize in (True, False):
            options = {"chat_template": template, "tokenize": tokenize}
            made = ours.apply_chat_template(chats, **options)
            expected = theirs.apply_chat_template(chats, **options)
            assert (dict(made) if tokenize else made) == (dict(expected) if tokenize else expected)
    assert ours.get_chat_template("plain") == theirs.get_chat_template("plain")
    assert ours.get_chat_template() == theirs.get_chat_template()


REFUSED = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% set n = namespace(_x=1) %}{{ n }}",
    "{% set n = namespace() %}{% set n._x = 1 %}",
    "{{ raise_exception('no') }}",
    "{% for x in range(10**9) %}{% endfor %}",
    "{{ messages[0].content.missing.more }}",
    "{% if %}",
]
HARMLESS = [
    "{% for x in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ x.role }}{% endfor %}",
    "{{ dict(a=1, b=2) | tojson(sort_keys=True, separators=(',', ':')) }}",
    "{{ {'é': '<b>'} | tojson }}{{ {'é': 1} | tojson(ensure_ascii=True) }}",
    "{% set n = namespace(self=1, x=2) %}{% set n.x = 5 %}{{ n.x }}{{ n.self }}",
    "  {% if true %}\n  x\n  {% endif %}\n y \n",
    "{{ messages[0].undefined }}|{{ undefined }}|{{ tools }}|{{ documents }}|{{ add_generation_prompt }}",
    "{{ strftime_now('%Y') }}{{ messages[0].content.split('i') }}{{ messages[0].items() | list }}",
    "{{ messages.__init__ }}{{ messages[0].__class__ }}",
    "{{ dict.fromkeys([1, 2]) }}{{ messages[0].content is mapping }}",
]


@pytest.mark.parametrize("template", HARMLESS)
def test_the_language_of_templates_alike(chatting: Pair, template: str) -> None:
    ours, theirs = chatting
    messages = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "yes"}]
    options = {"chat_template": template, "tokenize": False}
    assert ours.apply_chat_template(messages, **options) == theirs.apply_chat_template(messages, **options)


@pytest.mark.parametrize("template", REFUSED)
def test_templates_are_refused_alike(chatting: Pair, template: str) -> None:
    ours, theirs = chatting
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(Exception):  # noqa: B017  # of whatever class
        theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    with pytest.raises(InvalidInputError, match="chat template"):
        ours.apply_chat_template(messages, chat_template=template, tokenize=False)
