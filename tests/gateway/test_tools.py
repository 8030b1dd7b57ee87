"""A model that calls a tool, in each form of the endpoint; the data is what it sampled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from support.agents import Agent, Sampled, events
from support.chat_templates import ADD

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
