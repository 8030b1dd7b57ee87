"""A model that calls a tool, in each form of the endpoint; the data is what it sampled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.agents import Agent, Sampled, Scripted, events
from support.chat_templates import ADD, TAGGED

from tinker_sync.gateway import Gateway

QUESTION, RESULT = "What is 3+4?", "7"
TOOL = {
    "name": "add",
    "description": ADD["function"]["description"],
    "input_schema": ADD["function"]["parameters"],
}


def by_openai(agent: Agent) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    said = agent.say(messages, tools=[ADD])
    assert said["content"] is None
    [call] = said["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "b": 4}
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
    answer = agent.chat(messages, tools=[ADD])
    assert answer["choices"][0]["finish_reason"] == "stop"
    return str(answer["choices"][0]["message"]["content"])


def by_openai_streamed(agent: Agent) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
    first, end, usage = events(agent.chat(messages, **options))
    [call] = first["choices"][0]["delta"]["tool_calls"]
    assert call["index"] == 0
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["completion_tokens"] > 10
    del call["index"]
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
    answer = agent.chat(messages, **options)
    assert answer.endswith("data: [DONE]\n\n")
    return "".join(each["choices"][0]["delta"].get("content", "") for each in events(answer)[:2])


def by_anthropic(agent: Agent) -> str:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    options: dict[str, Any] = {"model": "any", "tools": [TOOL], "max_tokens": 90}
    said = agent.post("/v1/messages", messages=messages, **options)
    assert said["stop_reason"] == "tool_use"
    [call] = said["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 3, "b": 4})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": RESULT}]}
    messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    counted = agent.post("/v1/messages/count_tokens", messages=messages, **options)
    answer = agent.post("/v1/messages", messages=messages, **options)
    assert answer["stop_reason"] == "end_turn"
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] > said["usage"]["input_tokens"]
    return str(answer["content"][0]["text"])


def by_anthropic_streamed(agent: Agent) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"model": "any", "tools": [TOOL], "max_tokens": 90, "stream": True}
    shown = events(agent.post("/v1/messages", messages=messages, **options))
    assert [each["type"] for each in shown] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    call = shown[1]["content_block"]
    call["input"] = json.loads(shown[2]["delta"]["partial_json"])
    assert shown[4]["delta"]["stop_reason"] == "tool_use"
    messages.append({"role": "assistant", "content": [call]})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT}
    messages.append({"role": "user", "content": [result]})
    answer = events(agent.post("/v1/messages", messages=messages, **options))
    return "".join(each["delta"]["text"] for each in answer if each["type"] == "content_block_delta")


FORMS: dict[str, Callable[[Agent], str]] = {
    "openai": by_openai,
    "openai streamed": by_openai_streamed,
    "anthropic": by_anthropic,
    "anthropic streamed": by_anthropic_streamed,
}


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
FORCED: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    (
        "chat/completions",
        {
            "tools": [ADD],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "parallel_tool_calls": False,
        },
        "tool_choice, parallel_tool_calls",
    ),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}},
        "response_format",
    ),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format",
    ),
]


def test_what_nothing_enforces_is_left_to_the_model(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Scripted(*["7"] * (len(FORCED) + 3))
    with Gateway(sampler, chat_template=TAGGED) as gateway, Agent(gateway) as agent:
        for route, settings, named in FORCED:
            agent.post(f"/v1/{route}", **PLAIN, **settings)
            assert agent.headers["x-not-enforced"] == named
            asked_for_json = json.dumps(SCHEMA) in sampler.prompts[-1]
            assert asked_for_json == ("schema" in json.dumps(settings) and "tools" not in settings)
        agent.post("/v1/chat/completions", **PLAIN, tools=[ADD], tool_choice="none")
        assert "add" not in sampler.prompts[-1]
        assert "x-not-enforced" not in agent.headers
        # The schema is a part of the system's message, and the turns stay one datum.
        chat: list[Any] = [{"role": "system", "content": "Be brief."}, *PLAIN["messages"]]
        for _ in range(2):
            agent.say(chat, response_format=FORCED[3][1]["response_format"])
            chat.append({"role": "user", "content": "Sure?"})
        assert sampler.prompts[-1].count("Be brief.") == sampler.prompts[-1].count("<|im_start|>system") == 1
        [trajectory] = [each for each in gateway.trajectories() if len(each.turns) == 2]
        trajectory.datum(1.0)
    noted = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert noted == ["tool_choice", "parallel_tool_calls", "response_format", "output_config.format"]


def test_a_tool_is_used_in_each_form(tool_user: Gateway, ledger: list[Sampled]) -> None:
    for name, converse in FORMS.items():
        ledger.clear()
        with Agent(tool_user, name) as agent:
            assert converse(agent).strip() == RESULT
        [trajectory] = tool_user.trajectories(name)
        assert [(turn.prompt.tolist(), turn.tokens.tolist()) for turn in trajectory.turns] == [
            (list(prompt), list(tokens)) for prompt, tokens, _ in ledger
        ]
        assert [message["role"] for message in trajectory.messages] == [
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        datum = trajectory.datum(1.0)  # one, so the call was not encoded again
        weights = datum.loss_fn_inputs["advantages"].to_numpy()
        assert weights.sum() == sum(len(turn.tokens) for turn in trajectory.turns)
