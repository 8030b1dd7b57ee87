"""Requests and answers in the form of Anthropic's API: messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tinker_sync.errors import InvalidInputError
from tinker_sync.gateway.exchanges import Answer, Asked
from tinker_sync.gateway.openai import (
    ask_for_json,
    force_tool,
    make_call,
    read_settings,
    read_stop,
    read_text,
    read_tools,
    take,
)

_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def read_message(tree: Mapping[str, Any]) -> Asked:
    """Read a request for a message, or for its number of tokens.

    Raises:
        InvalidInputError: a message or a setting is not valid, or the sampler cannot do what it asks for.

    >>> asked = read_message({"system": "Be brief.", "messages": [{"role": "user", "content": "Hello"}]})
    >>> [message["role"] for message in asked.messages]
    ['system', 'user']
    """
    messages = tree.get("messages")
    if not isinstance(messages, list):
        raise InvalidInputError("messages: expected a list")
    asked = Asked(settings=read_settings(tree), stop=read_stop(tree.get("stop_sequences"), "stop_sequences"))
    if tree.get("system"):
        asked.messages.append({"role": "system", "content": read_text(tree["system"], "system")})
    for index, each in enumerate(messages):
        asked.messages += _read_turn(each, f"messages[{index}]")
    chosen = take(tree, "tool_choice", dict) or {}
    choice = chosen.get("type", "auto")
    if choice not in ("auto", "none", "any", "tool"):
        raise InvalidInputError(
            f"tool_choice.type: expected 'auto', 'none', 'any' or 'tool', got {choice!r:.100}"
        )
    tools = read_tools(tree)
    if tools and choice != "none":
        asked.tools = [_read_tool(each, f"tools[{index}]") for index, each in enumerate(tools)]
    if choice in ("any", "tool"):
        force_tool(asked, chosen.get("name") if choice == "tool" else None)
    if chosen.get("disable_parallel_tool_use") is True and asked.tools:
        asked.unenforced.append("disable_parallel_tool_use")
    config = take(tree, "output_config", dict) or {}
    if form := take(config, "format", dict, "output_config.") or take(tree, "output_format", dict):
        ask_for_json(asked, form.get("type"), form.get("schema"), "output_config.format")
    return asked


def _read_tool(given: Any, where: str) -> dict[str, Any]:
    name, schema = take(given, "name", str, f"{where}."), take(given, "input_schema", dict, f"{where}.")
    if not name or schema is None:
        raise InvalidInputError(f"{where}: expected a tool with a name and an input_schema")
    description = take(given, "description", str, f"{where}.") or ""
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def _read_turn(given: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield the messages for chat templates: each result of a tool is one, before the text beside it."""
    if not isinstance(given, dict) or given.get("role") not in ("user", "assistant"):
        raise InvalidInputError(f"{where}: expected a message of the user or the assistant")
    content = given.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidInputError(f"{where}.content: expected a text or a list of blocks")
    message: dict[str, Any] = {"role": given["role"], "content": ""}
    results = []
    for index, block in enumerate(content):
        result = _read_block(block, message, f"{where}.content[{index}]")
        if result is not None:
            results.append(result)
    yield from results
    if not results or message["content"]:
        yield message


def _read_block(block: Mapping[str, Any], message: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Add a block to a message, or return the message that it is by itself."""
    kind = block.get("type")
    if kind == "text":
        message["content"] += read_text([block], where)
    elif kind == "tool_use":
        name, arguments = take(block, "name", str, f"{where}."), take(block, "input", dict, f"{where}.")
        if not name:
            raise InvalidInputError(f"{where}.name: is missing")
        call = make_call(take(block, "id", str, f"{where}."), name, arguments or {})
        message.setdefault("tool_calls", []).append(call)
    elif kind == "tool_result":
        text = read_text(block.get("content"), where)
        name = take(block, "tool_use_id", str, f"{where}.")
        return {"role": "tool", "tool_call_id": name or "", "content": text}
    elif kind == "thinking":
        message["reasoning_content"] = take(block, "thinking", str, f"{where}.") or ""
    elif kind != "redacted_thinking":
        raise InvalidInputError(f"{where}: expected text or tools, got {kind!r}, which is not served")
    return None


def message(name: str, tree: Mapping[str, Any], prompt: int, answer: Answer) -> Any:
    """Return the answer as a message, or as the events of a streamed one."""
    said = answer.message
    blocks: list[dict[str, Any]] = []
    if said.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": said["reasoning_content"], "signature": ""})
    if said["content"] or not said.get("tool_calls"):
        blocks.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls") or ():
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": function["arguments"],
            }
        )
    made = {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": str(tree.get("model") or ""),
        "content": blocks,
        "stop_reason": _reason(answer),
        "stop_sequence": answer.stopped_at,
        "usage": {"input_tokens": prompt, "output_tokens": len(answer.sequence.tokens)},
    }
    return "".join(_events(made)) if tree.get("stream") else made


def _reason(answer: Answer) -> str:
    if answer.sequence.stop_reason == "length":
        return "max_tokens"
    if answer.stopped_at is not None:
        return "stop_sequence"
    return "tool_use" if answer.message.get("tool_calls") else "end_turn"


def _events(made: Mapping[str, Any]) -> Iterator[str]:
    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    usage = {**made["usage"], "output_tokens": 0}
    begun = {**made, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event("message_start", message=begun)
    for index, block in enumerate(made["content"]):
        if block["type"] == "tool_use":
            empty, delta = {**block, "input": {}}, {"partial_json": json.dumps(block["input"])}
            delta = {"type": "input_json_delta", **delta}
        else:
            part = block["type"]
            empty, delta = {**block, part: ""}, {"type": f"{part}_delta", part: block[part]}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {"stop_reason": made["stop_reason"], "stop_sequence": made["stop_sequence"]}
    yield event("message_delta", delta=ended, usage={"output_tokens": made["usage"]["output_tokens"]})
    yield event("message_stop")


def error(status: int, message: str) -> dict[str, Any]:
    """Return the body of a refusal.

    >>> error(401, "wrong key")["error"]["type"]
    'authentication_error'
    """
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
