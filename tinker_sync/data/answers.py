"""Sampled answers as messages: the text, the reasoning and the tool calls in what a model wrote.

A model writes tool calls in the form that its chat template shows it, so the template's text tells the form.
An answer with a malformed call is all text, because half a call would be a guess.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

THINK: Final = ("<think>", "</think>")
_DECODER: Final = json.JSONDecoder()
_ID_LETTERS: Final = string.ascii_letters + string.digits


class Call(NamedTuple):
    """A tool call in an answer. `id` is None unless the model wrote one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Malformed(ValueError):
    """The text of a tool call is not of its form."""


def read_answer(
    text: str, template: str, *, prompt: str = "", tools: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return an answer as a message of the assistant, in the form that chat templates read.

    Args:
        text: the answer, without the token that ends it.
        template: the chat template.
        prompt: the rendered prompt; one that ends with ``<think>`` lets the answer begin with reasoning.
        tools: the tools that were offered; without any, no calls are looked for.

    >>> text = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    >>> message = read_answer(text, "... <tool_call> ...", tools=[{"name": "add"}])
    >>> message["content"], message["tool_calls"][0]["function"]
    ('Let me see.', {'name': 'add', 'arguments': {'a': 1}})
    """
    message: dict[str, Any] = {"role": "assistant"}
    reasoning, content = _split_reasoning(text, template, prompt)
    if "<|channel|>" in template:
        reasoning, content = _read_channels(text)
    calls: list[Call] = []
    read = _reader_of(template) if tools else None
    if read is not None:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            before, calls = read(content if "<|channel|>" not in template else text, tools or ())
            content = before if calls else content
    message["content"] = content.strip() if calls else content
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id or _new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


def _new_id() -> str:
    # Some templates accept ids of nine letters and digits alone.
    return "".join(random.choices(_ID_LETTERS, k=9))  # noqa: S311  # no secret


def _split_reasoning(text: str, template: str, prompt: str) -> tuple[str, str]:
    begin, end = THINK
    opened = prompt.rstrip().endswith(begin)
    if not opened and end not in template:
        return "", text
    reasoning, closed, content = text.partition(end)
    if not closed:
        cut = opened or text.lstrip().startswith(
            begin
        )  # by the limit of tokens, in the middle of the thought
        return (text.lstrip().removeprefix(begin).strip("\n"), "") if cut else ("", text)
    return reasoning.lstrip().removeprefix(begin).strip("\n"), content.lstrip("\n")


# ------------------------------------------------------------------------------------------- forms of calls

Reader = Callable[[str, Sequence[Mapping[str, Any]]], "tuple[str, list[Call]]"]


def _reader_of(template: str) -> Reader | None:
    return next((read for mark, read in _READERS if mark in template), None)


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise Malformed
    return value


def _call_of(tree: Any) -> Call:
    """Return the call in an object with a name, and arguments under one of two names."""
    name = tree["name"]
    return Call(
        _name(name), _object(tree["arguments"] if "arguments" in tree else tree.get("parameters") or {})
    )


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Malformed
    return value.strip()


def _between(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Return the text before the first `begin`, and what is between each `begin` and the next `end`."""
    before, *parts = text.split(begin)
    if any(end not in part for part in parts):
        raise Malformed
    return before, [part.partition(end)[0] for part in parts]


def _read_tagged(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    before, parts = _between(text, "<tool_call>", "</tool_call>")
    return before, [_call_of(json.loads(part)) for part in parts]


_FUNCTION: Final = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read_elements(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    before, parts = _between(text, "<tool_call>", "</tool_call>")
    calls = []
    for part in parts:
        found = _FUNCTION.search(part)
        if found is None:
            raise Malformed
        pairs = _PARAMETER.findall(found[2])
        calls.append(Call(found[1], {name: _typed(value, found[1], name, tools) for name, value in pairs}))
    return before, calls


_PAIR: Final = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_pairs(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    before, parts = _between(text, "<tool_call>", "</tool_call>")
    calls = []
    for part in parts:
        name = _name(part.partition("<arg_key>")[0])
        pairs = [(key.strip(), value) for key, value in _PAIR.findall(part)]
        calls.append(Call(name, {key: _typed(value, name, key, tools) for key, value in pairs}))
    return before, calls


def _typed(value: str, function: str, parameter: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Return a value that was written as text, as its tool declares it: text, or else JSON."""
    for tool in tools:
        inner = tool.get("function", tool)
        if inner.get("name") == function:
            declared = (inner.get("parameters") or {}).get("properties", {}).get(parameter, {})
            if declared.get("type") == "string":
                return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _read_bare(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """Read calls that are the whole answer, as JSON objects, with ``<|python_tag|>`` before them or not."""
    rest, calls = text.strip().removeprefix("<|python_tag|>").strip(), []
    if not rest.startswith("{"):
        return text, []
    while rest:
        tree, end = _DECODER.raw_decode(rest)
        calls.append(_call_of(tree))
        rest = rest[end:].lstrip("; \n")
    known = {tool.get("function", tool).get("name") for tool in tools}
    # An answer in JSON that has a name is not a call, unless a tool has that name.
    return ("", calls) if all(call.name in known for call in calls) else (text, [])


def _read_bracketed(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    before, *parts = text.split("[TOOL_CALLS]")
    calls = []
    for part in parts:
        if part.lstrip().startswith("["):
            calls += [_call_of(tree) for tree in json.loads(part)]
        else:
            name, found, arguments = part.partition("[ARGS]")
            if not found:
                name, brace, arguments = part.partition("{")
                arguments = brace + arguments
            calls.append(Call(_name(name), _object(arguments)))
    return before, calls


def _read_deep(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    before, parts = _between(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
    calls = []
    for part in parts:
        name, rest = part.split("<｜tool▁sep｜>", 1)  # noqa: RUF001
        if name.strip() == "function":  # an older form: the name, and the arguments in a block of code
            name, rest = rest.split("\n", 1)
            rest = rest.strip().removeprefix("```json").removesuffix("```")
        calls.append(Call(_name(name), _object(rest.strip())))
    return before.replace("<｜tool▁calls▁begin｜>", ""), calls  # noqa: RUF001


def _read_section(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    before, parts = _between(text, "<|tool_call_begin|>", "<|tool_call_end|>")
    calls = []
    for part in parts:
        written, found, arguments = part.partition("<|tool_call_argument_begin|>")
        if not found:
            raise Malformed
        name = written.strip().removeprefix("functions.").rpartition(":")[0]
        calls.append(Call(_name(name), _object(arguments), written.strip()))
    return before.replace("<|tool_calls_section_begin|>", ""), calls


_CHANNEL: Final = re.compile(r"(.*?)<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL)


def _channels(text: str) -> list[tuple[str, str]]:
    """Return the heading and the text of each part of an answer that consists of channels."""
    return [(heading, body) for heading, body in _CHANNEL.findall(text)]


def _read_channels(text: str) -> tuple[str, str]:
    parts = _channels(text)
    if not parts:
        return "", text
    shown = [body for heading, body in parts if "analysis" not in heading and "to=" not in heading]
    return "\n".join(body for heading, body in parts if "analysis" in heading), "".join(shown)


def _read_called(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    calls = []
    for heading, body in _channels(text):
        named = re.search(r"to=(?:functions\.)?([\w.-]+)", heading)
        if named:
            calls.append(Call(named[1], _object(body)))
    return _read_channels(text)[1], calls


# A mark that only the templates of a form have, before marks that other forms have too.
_READERS: Final[tuple[tuple[str, Reader], ...]] = (
    ("<|channel|>", _read_called),
    ("<|tool_call_begin|>", _read_section),
    ("<｜tool▁call▁begin｜>", _read_deep),  # noqa: RUF001
    ("[TOOL_CALLS]", _read_bracketed),
    ("<arg_key>", _read_pairs),
    ("<function=", _read_elements),
    ("<tool_call>", _read_tagged),
    ("<|python_tag|>", _read_bare),
    ("ipython", _read_bare),
)
