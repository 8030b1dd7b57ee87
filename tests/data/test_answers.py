"""Sampled answers as messages, in the forms in which models call tools."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_templates import ADD

from tinker_sync.data.answers import read_answer

SAY = {"function": {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}}}}
CALL = ("add", {"a": 2, "b": 3})
JSON = '{"a": 2, "b": 3}'
TEXT = '{"text": "5"}'
SECTION, CALL_BEGIN, CALL_END = "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
TALK = "<|start|>assistant<|channel|>commentary to=functions."


def lines(*pieces: str) -> str:
    return "\n".join(pieces)


# Of each form, a mark of its templates, and an answer with two calls, most with a text before them.
FORMS = {
    "json between tags": (
        "<tool_call>",
        lines(
            "Let me see.",
            "<tool_call>",
            f'{{"name": "add", "arguments": {JSON}}}',
            "</tool_call>",
            '<tool_call>{"name":"say","arguments":"{\\"text\\": \\"5\\"}"}</tool_call>',
        ),
    ),
    "elements": (
        "<tool_call><function=",
        lines(
            "Let me see.",
            "<tool_call>",
            "<function=add>",
            "<parameter=a>",
            "2",
            "</parameter>",
            "<parameter=b>",
            "3",
            "</parameter>",
            "</function>",
            "</tool_call>",
            "<tool_call><function=say><parameter=text>5</parameter></function></tool_call>",
        ),
    ),
    "pairs": (
        "<tool_call> <arg_key>",
        lines(
            "Let me see.<tool_call>add",
            "<arg_key>a</arg_key>",
            "<arg_value>2</arg_value>",
            "<arg_key>b</arg_key>",
            "<arg_value>3</arg_value>",
            "</tool_call><tool_call>say",
            "<arg_key>text</arg_key><arg_value>5</arg_value></tool_call>",
        ),
    ),
    "bare": (
        "<|python_tag|>",
        f'<|python_tag|>{{"name": "add", "parameters": {JSON}}}; {{"name": "say", "parameters": {TEXT}}}',
    ),
    "a list": (
        "[TOOL_CALLS]",
        (f'Let me see.[TOOL_CALLS][{{"name": "add", "arguments": {JSON}}}, '
        f'{{"name": "say", "arguments": {TEXT}}}]'),
    ),
    "named lists": (
        "[TOOL_CALLS] [ARGS]",
        f"Let me see.[TOOL_CALLS]add[ARGS]{JSON}[TOOL_CALLS]say{TEXT}",
    ),
    "sections": (
        f"{SECTION}{CALL_BEGIN}",
        (f"Let me see.{SECTION}{CALL_BEGIN}functions.add:0<|tool_call_argument_begin|>{JSON}{CALL_END}"
        f"{CALL_BEGIN}functions.say:1<|tool_call_argument_begin|>{TEXT}{CALL_END}<|tool_calls_section_end|>"),
    ),
    "separated": (
        BEGIN,
        ("Let me see.<｜tool▁calls▁begin｜>"  # noqa: RUF001
        f"{BEGIN}add{SEP}{JSON}{END}{BEGIN}function{SEP}say\n```json\n{TEXT}\n```{END}"
        "<｜tool▁calls▁end｜>"),  # noqa: RUF001
    ),
    "channels": (
        "<|channel|>",
        (f"<|channel|>analysis<|message|>Two.<|end|>{TALK}add <|constrain|>json<|message|>{JSON}<|call|>"
        f"{TALK}say<|message|>{TEXT}"),
    ),
}  # fmt: skip


def called(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], function["arguments"]) for function in functions]


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_found(form: str) -> None:
    template, text = FORMS[form]
    message = read_answer(text, template, tools=[ADD, SAY])
    assert called(message) == [CALL, ("say", {"text": "5"})]
    assert message["content"] == ("Let me see." if text.startswith("Let") else "")
    names = [call["id"] for call in message["tool_calls"]]
    assert all(names)
    assert len({*names}) == 2


@pytest.mark.parametrize("form", FORMS)
def test_without_tools_there_are_no_calls(form: str) -> None:
    template, text = FORMS[form]
    message = read_answer(text, template)
    assert "tool_calls" not in message
    assert form == "channels" or message["content"] == text


@pytest.mark.parametrize("form", FORMS)
def test_half_a_call_is_text(form: str) -> None:
    """Wherever an answer breaks off, it has calls that are whole, or it is text."""
    template, text = FORMS[form]
    for end in range(len(text)):
        message = read_answer(text[:end], template, tools=[ADD, SAY])
        calls = called(message)
        assert calls in ([], [CALL], [CALL, ("say", {"text": "5"})]), text[:end]
        assert calls or form == "channels" or message["content"] == text[:end]


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\n5", "", "hm", "5"),
        ("hm\n</think>\n5", "<|im_start|>assistant\n<think>\n", "hm", "5"),
        ("hm", "<think>\n", "hm", ""),
        ("<think>hm", "", "hm", ""),
        ("<think></think>5", "", None, "5"),
        (" 5 ", "", None, " 5 "),
    ],
)
def test_reasoning(text: str, prompt: str, reasoning: str | None, content: str) -> None:
    message = read_answer(text, "<think>{{ a }}</think>", prompt=prompt)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert read_answer(text, "{{ a }}")["content"] == text


def test_channels_are_reasoning_and_text() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>5"
    message = read_answer(text, "<|channel|>")
    assert (message["reasoning_content"], message["content"]) == ("hm", "5")
    assert read_answer("5", "<|channel|>")["content"] == "5"


def test_an_answer_in_json_is_no_call_unless_a_tool_has_its_name() -> None:
    text = '{"name": "Ada", "arguments": {"age": 36}}'
    assert read_answer(text, "ipython", tools=[ADD]) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("arguments", ["[1]", '"[1]"', "null", "3"])
def test_arguments_are_an_object(arguments: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    message = read_answer(text, "<tool_call>", tools=[ADD])
    assert message["content"] == text or called(message) == [("add", {})]


def test_values_are_read_as_their_tool_declares_them() -> None:
    values = "<parameter=text>007</parameter><parameter=n>7</parameter>"
    text = f"<tool_call><function=say>{values}</function></tool_call>"
    [(_, arguments)] = called(read_answer(text, "<function=", tools=[SAY]))
    assert arguments == {"text": "007", "n": 7}
