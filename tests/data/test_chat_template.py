"""Chat templates on small examples; the interop suite compares them with transformers."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2")

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from tinker_sync import InvalidInputError, MissingExtraError, Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }} !{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %} {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]


@pytest.fixture
def tokenizer() -> Tokenizer:
    words = ["?", "<s>", "[user]", "[assistant]", "a", "b", "c", "!"]
    backend: Any = Backend(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    made = Tokenizer(backend)
    made.bos_token = "<s>"
    made.chat_template = TEMPLATE
    return made


def shown(tokenizer: Tokenizer, template: str, messages: Any = CHAT, **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **options)
    return text


def test_chat_as_text_ids_and_masks(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "<s>[user] a b [assistant] c ! "
    assert tokenizer.apply_chat_template(CHAT, return_dict=False) == [1, 2, 4, 5, 3, 6, 7]
    made = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)
    assert made == {"input_ids": [1, 2, 4, 5, 3], "attention_mask": [1] * 5}
    both = tokenizer.apply_chat_template([CHAT, CHAT[:1]], return_dict=False)
    assert both == [[1, 2, 4, 5, 3, 6, 7], [1, 2, 4, 5]]


def test_options_of_transformers_are_refused_by_name(tokenizer: Tokenizer) -> None:
    for options in ({"padding": True}, {"return_tensors": "pt"}, {"return_assistant_tokens_mask": True}):
        words = rf"no argument '{next(iter(options))}' any more: get_tokenizer\(backend='transformers'\)"
        with pytest.raises(TypeError, match=words):
            tokenizer.apply_chat_template(CHAT, **options)
    nothing = {"padding": False, "truncation": False, "max_length": None, "return_tensors": None}
    assert tokenizer.apply_chat_template(CHAT, return_dict=False, **nothing) == [1, 2, 4, 5, 3, 6, 7]
    assert shown(tokenizer, "{{ padding is defined }}", padding=False) == "False"
    assert shown(tokenizer, "{{ thinking }}", thinking=False) == "False"


def test_last_message_can_stay_open(tokenizer: Tokenizer) -> None:
    options = {"tokenize": False, "continue_final_message": True}
    assert tokenizer.apply_chat_template(CHAT, **options) == "<s>[user] a b [assistant] c"
    trimming = "{% for m in messages %}{{ m.content | trim }}|{% endfor %}"
    assert shown(tokenizer, trimming, [{"role": "a", "content": " x "}], continue_final_message=True) == "x"
    thought = [{"role": "a", "reasoning": "hm", "content": "x"}]
    template = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}>{{ messages[0].content }}"
    assert shown(tokenizer, template, thought) == "hmhm>x"


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "expected at least one message"),
        ("hello", {}, "expected a list of messages, got a str"),
        (["hello"], {}, r"messages\[0\]: expected a dictionary, got a str"),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "without a generation prompt",
        ),
        (CHAT, {"continue_final_message": "thinking"}, "expected True or False, got 'thinking'"),
        ([{"role": "user", "name": "x"}], {"continue_final_message": True}, "has no 'content'"),
        ([{"role": "user", "content": [{"type": "image"}]}], {"continue_final_message": True}, "has no text"),
        (CHAT, {"tools": ["f"]}, "tools: expected JSON schemas, got a str$"),
        (CHAT, {"tools": [shown]}, r"got a function; transformers\.utils\.get_json_schema makes one of it"),
        (CHAT, {"documents": ["d"]}, "documents: expected dictionaries, got a str"),
    ],
)
def test_invalid_chats_are_refused(tokenizer: Tokenizer, messages: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        tokenizer.apply_chat_template(messages, **options)


def test_template_choice(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = {"default": "d", "tool_use": "t", "rag": "r"}
    assert tokenizer.get_chat_template() == "d"
    assert tokenizer.get_chat_template(tools=[{}]) == "t"
    assert tokenizer.get_chat_template("rag") == "r"
    assert tokenizer.get_chat_template("{{ 1 }}") == "{{ 1 }}"
    tokenizer.chat_template = {"rag": "r", "b": "x"}
    with pytest.raises(InvalidInputError, match="several and no default; name one of b, rag"):
        tokenizer.get_chat_template()
    tokenizer.chat_template = None
    with pytest.raises(InvalidInputError, match="the model's files have none"):
        tokenizer.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "chat template: access to attribute 'append'"),
        ("{{ messages[0].update(a=1) }}", "chat template"),
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("a\n{% if %}", "chat template, line 2"),
        ("{{ 1 / 0 }}", "chat template: ZeroDivisionError"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
        ("{% set n = namespace(__init__=1) %}", "leading underscore, got '__init__'"),
        ("{{ range(1000000000) | list }}", "chat template"),
        ("{{ dict.__class__ }}{{ dict.mro() }}", "chat template"),
        ("{{ strftime_now.__globals__['x'] }}", "chat template"),
        ("{{ cycler.__init__.__globals__ }}", "chat template"),
        ("{{ lipsum.__globals__.os }}", "chat template"),
        ("{{ ('%s' | format)['__class__']['x'] }}", "chat template"),
    ],
)
def test_the_sandbox(tokenizer: Tokenizer, template: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        shown(tokenizer, template)


class Kind(str, enum.Enum):
    SHORT = "short"


@dataclass
class Call:
    name: str


class Dumped:
    def model_dump(self) -> dict[str, Any]:
        return {"role": "user"}


def test_templates_see_plain_data(tokenizer: Tokenizer) -> None:
    values = [Kind.SHORT, np.float32(0.5), np.ones(3), Call("f"), Dumped(), object(), (1, {"a": True}), 2]
    text = shown(tokenizer, "{{ messages[0]['values'] }}", [{"role": "user", "values": values}])
    plain = "['short', 0.5, '<ndarray>', {'name': 'f'}, {'role': 'user'}, '<object>', (1, {'a': True}), 2]"
    assert text == plain
    parts = [{"role": "user", "content": [{"type": "text", "text": "a "}]}]
    template = "{% for m in messages %}{{ m.content[0].text }}|{% endfor %}"
    assert shown(tokenizer, template, parts, continue_final_message=True) == "a "


def test_missing_jinja_names_the_extra(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"the chat template needs .*: pip install jinja2"):
        tokenizer.apply_chat_template(CHAT)
