"""Requests and answers in the form of OpenAI's API: chat completions, completions and models. Pure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from tinker_sync.errors import InvalidInputError
from tinker_sync.gateway.exchanges import Answer, Asked
from tinker_sync.types import ModelInput

T = TypeVar("T")

_KIND_NAMES: Final[dict[type, str]] = {dict: "an object", list: "a list", str: "a text"}
# Arguments with which chats are rendered, which are no variables of a template.
_TAKEN: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "return_dict",
        "tokenize",
        "tokenizer",
        "tools",
    }
)
_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}
# What the sampler cannot do, with the values that ask for nothing.
_UNSERVED: Final = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "suffix": ("",),
}
_MOST_TOPK: Final = 20
# Vocabularies spell an octet as <0xE2>, or as a letter: a printable one as itself, the others from U+0100 on.
_OCTET: Final = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS: Final = sorted(set(range(256)).difference(_PRINTABLE))
_SPELLED: Final = {
    **{chr(octet): octet for octet in _PRINTABLE},
    **{chr(256 + place): octet for place, octet in enumerate(_OTHERS)},
}
_SETTINGS: Final = ("temperature", "top_p", "top_k", "seed")


def take(tree: Mapping[str, Any], name: str, kind: type[T], where: str = "") -> T | None:
    """Return a field of a request, or None if it is not set.

    Raises:
        InvalidInputError: it is of another kind.

    >>> take({"tools": []}, "tools", list), take({"tools": None}, "tools", list)
    ([], None)
    """
    value = tree.get(name)
    if value is None:
        return None
    if not isinstance(value, kind):
        raise InvalidInputError(f"{where}{name}: expected {_KIND_NAMES[kind]}, got {value!r:.100}")
    return value


def read_tools(tree: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a request.

    >>> read_tools({"tools": [{"type": "function"}]})
    [{'type': 'function'}]
    """
    tools = take(tree, "tools", list)
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise InvalidInputError(f"tools[{index}]: expected an object, got {tool!r:.100}")
    return tools or None


def read_settings(tree: Mapping[str, Any], limit: str = "max_tokens") -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a request sets.

    >>> read_settings({"temperature": 0.5, "max_tokens": 4, "model": "any"})
    {'temperature': 0.5, 'max_tokens': 4}
    """
    given = {name: tree[name] for name in _SETTINGS if tree.get(name) is not None}
    most = tree.get(limit) if tree.get(limit) is not None else tree.get("max_tokens")
    for name, value in (*given.items(), (limit, most)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise InvalidInputError(f"{name}: expected a number, got {value!r}")
    return given if most is None else {**given, "max_tokens": most}


def read_stop(given: Any, name: str = "stop") -> list[str]:
    """Return the texts at which an answer ends.

    >>> read_stop("."), read_stop(None)
    (['.'], [])
    """
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidInputError(f"{name}: expected texts that are not empty, got {given!r}")
    return texts


def _read_common(tree: Mapping[str, Any], limit: str) -> Asked:
    for name in _UNSERVED.keys() & tree.keys():
        if tree[name] is not None and tree[name] not in _UNSERVED[name]:
            raise InvalidInputError(f"{name}: the sampler has no such setting; leave it out")
    n = 1 if tree.get("n") is None else tree["n"]
    if type(n) is not int or n < 1:
        raise InvalidInputError(f"n: expected 1 or more, got {n!r}")
    return Asked(n=n, stop=read_stop(tree.get("stop")), settings=read_settings(tree, limit))


def _topk(given: Any, name: str) -> int:
    if given is None or given is False:
        return 0
    if type(given) is not int or not 0 <= given <= _MOST_TOPK:
        raise InvalidInputError(f"{name}: expected 0 to {_MOST_TOPK}, got {given!r}")
    return given


# ------------------------------------------------------------------------------------------- chats


def read_chat(tree: Mapping[str, Any]) -> Asked:
    """Read a request for a chat completion.

    Raises:
        InvalidInputError: a message or a setting is not valid, or the sampler cannot do what it asks for.

    >>> asked = read_chat({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4})
    >>> asked.messages, asked.settings
    ([{'role': 'user', 'content': 'Hello'}], {'max_tokens': 4})
    """
    asked = _read_common(tree, "max_completion_tokens")
    messages = tree.get("messages")
    if not isinstance(messages, list):
        raise InvalidInputError("messages: expected a list")
    asked.messages = [_read_message(each, f"messages[{index}]") for index, each in enumerate(messages)]
    choice = tree.get("tool_choice")
    named = take(choice, "function", dict, "tool_choice.") if isinstance(choice, dict) else None
    if named is None and choice not in (None, "auto", "none", "required"):
        raise InvalidInputError(f"tool_choice: expected a word or a function, got {choice!r:.100}")
    asked.tools = read_tools(tree) if choice != "none" else None
    if named is not None or choice == "required":
        force_tool(asked, None if named is None else named.get("name"))
    if tree.get("parallel_tool_calls") is False and asked.tools:
        asked.unenforced.append("parallel_tool_calls")
    if form := take(tree, "response_format", dict):
        inner = take(form, "json_schema", dict, "response_format.") or {}
        ask_for_json(asked, form.get("type"), inner.get("schema"), "response_format")
    asked.topk = _topk(tree.get("top_logprobs"), "top_logprobs") if tree.get("logprobs") else 0
    asked.variables = dict(take(tree, "chat_template_kwargs", dict) or {})
    if effort := take(tree, "reasoning_effort", str):
        asked.variables.setdefault("reasoning_effort", effort)
    taken = sorted(asked.variables.keys() & _TAKEN)
    if taken:
        raise InvalidInputError(f"chat_template_kwargs: {', '.join(taken)} cannot be set by a request")
    take(tree, "stream_options", dict)
    return asked


def force_tool(asked: Asked, name: Any = None) -> None:
    """Note that the agent wants a call of a tool: of this one, or of any.

    Raises:
        InvalidInputError: there is no such tool.

    >>> asked = Asked(tools=[{"type": "function", "function": {"name": "add"}}])
    >>> force_tool(asked, "add"); asked.unenforced
    ['tool_choice']
    """
    if not asked.tools:
        raise InvalidInputError("tool_choice: a call needs tools")
    functions = [tool.get("function") for tool in asked.tools]
    if name is not None and name not in [each.get("name") for each in functions if isinstance(each, dict)]:
        raise InvalidInputError(f"tool_choice: tools has no {name!r:.100}")
    asked.unenforced.append("tool_choice")


def ask_for_json(asked: Asked, kind: Any, schema: Any, where: str) -> None:
    """Note that the agent wants JSON. Only the prompt can tell the model of its schema.

    Raises:
        InvalidInputError: the format is not known, or there is no schema.

    >>> asked = Asked([{"role": "user", "content": "2 + 3?"}])
    >>> ask_for_json(asked, "json_schema", {"type": "integer"}, "response_format")
    >>> print(asked.messages[0]["content"])
    Answer with JSON alone, which fits this schema:
    {"type": "integer"}
    """
    if kind == "text":
        return
    if kind not in ("json_object", "json_schema"):
        raise InvalidInputError(f"{where}.type: expected 'text' or JSON, got {kind!r:.100}")
    asked.unenforced.append(where)
    if kind == "json_object":  # the messages say so themselves, because OpenAI's API demands it
        return
    if not isinstance(schema, dict):
        raise InvalidInputError(f"{where}: expected a schema, got {schema!r:.100}")
    wish = f"Answer with JSON alone, which fits this schema:\n{json.dumps(schema, ensure_ascii=False)}"
    if asked.messages and asked.messages[0]["role"] == "system":
        first = asked.messages[0]
        asked.messages[0] = {**first, "content": f"{first['content']}\n\n{wish}".lstrip()}
    else:
        asked.messages.insert(0, {"role": "system", "content": wish})


def _read_message(given: Any, where: str) -> dict[str, Any]:
    """Return a message in the form that chat templates read: text as one text, arguments as an object."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise InvalidInputError(f"{where}: expected an object with a role")
    role = "system" if given["role"] == "developer" else given["role"]
    message: dict[str, Any] = {"role": role, "content": read_text(given.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := take(given, name, str, f"{where}."):
            message[name] = value
    if calls := take(given, "tool_calls", list, f"{where}."):
        message["tool_calls"] = [
            _read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return message


def read_text(content: Any, where: str) -> str:
    """Return the content of a message as one text.

    >>> read_text([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "messages[0]")
    'ab'
    """
    if content is None or isinstance(content, str):
        return content or ""
    pieces = []
    for part in content if isinstance(content, list) else [None]:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(content).__name__
            raise InvalidInputError(f"{where}.content: expected text, got {kind!r}, which is not served")
        pieces.append(text)
    return "".join(pieces)


def _read_call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    arguments: Any = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str) and arguments:
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(arguments or {}, dict)
    ):
        raise InvalidInputError(
            f"{where}: expected a function with a name, and arguments that are an object of JSON"
        )
    return make_call(take(given, "id", str, f"{where}."), function["name"], arguments or {})


def make_call(name: str | None, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call in the form that chat templates read.

    >>> make_call("call-1", "add", {"a": 1})
    {'id': 'call-1', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    """
    called = {"name": function, "arguments": arguments}
    return {"id": name or "", "type": "function", "function": called}


def chat(
    name: str, tree: Mapping[str, Any], prompt: ModelInput, answers: Sequence[Answer], tokenizer: Any
) -> Any:
    """Return the answers as a chat completion, or as the events of a streamed one."""
    choices = []
    for index, answer in enumerate(answers):
        choice: dict[str, Any] = {"index": index, "message": _write_message(answer.message)}
        choice["finish_reason"] = _reason(answer)
        choice["logprobs"] = {"content": _scores(answer, tokenizer)} if tree.get("logprobs") else None
        if tree.get("return_token_ids"):
            choice["token_ids"] = answer.sequence.tokens
        choices.append(choice)
    usage = _usage(prompt.length, answers)
    head = {"id": name, "created": int(time.time()), "model": str(tree.get("model") or "")}
    if tree.get("stream"):
        return "".join(_chat_events(head, tree, choices, usage))
    done = {**head, "object": "chat.completion", "choices": choices, "usage": usage}
    return {**done, "prompt_token_ids": prompt.to_ints()} if tree.get("return_token_ids") else done


def _write_message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    content = message["content"]
    made = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
    if "reasoning_content" in message:
        made["reasoning_content"] = message["reasoning_content"]
    return {**made, "tool_calls": calls} if calls else made


def _reason(answer: Answer) -> str:
    if answer.sequence.stop_reason == "length":
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def _usage(prompt: int, answers: Sequence[Answer]) -> dict[str, int]:
    sampled = sum(len(answer.sequence.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _scores(answer: Answer, tokenizer: Any) -> list[dict[str, Any]]:
    sequence = answer.sequence
    rows: Sequence[Any] = sequence.topk_logprobs or [()] * len(sequence.tokens)

    def score(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": _octets_of(token, text, tokenizer)}

    return [
        {**score(token, logprob), "top_logprobs": [score(*each) for each in row or ()]}
        for token, logprob, row in zip(sequence.tokens, sequence.logprobs or (), rows, strict=True)
    ]


def _octets_of(token: int, text: str, tokenizer: Any) -> list[int] | None:
    """Return the octets of a token, which may be a part of a character, or None if they are not known."""
    if "\ufffd" not in text:
        return list(text.encode())
    spelled = str(tokenizer.convert_ids_to_tokens(token))
    if found := _OCTET.fullmatch(spelled):
        return [int(found[1], 16)]
    octets = [_SPELLED[letter] for letter in spelled if letter in _SPELLED]
    return octets if len(octets) == len(spelled) else None


def _chat_events(
    head: Mapping[str, Any], tree: Mapping[str, Any], choices: Sequence[Any], usage: Any
) -> Iterator[str]:
    def event(**fields: Any) -> str:
        return f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', **fields})}\n\n"

    for choice in choices:
        message, index = choice["message"], choice["index"]
        delta = {name: value for name, value in message.items() if value is not None}
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(delta["tool_calls"])
            ]
        piece = {"index": index, "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
        yield event(choices=[piece])
        yield event(choices=[{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}])
    if (tree.get("stream_options") or {}).get("include_usage"):
        yield event(choices=[], usage=usage)
    yield "data: [DONE]\n\n"


# ------------------------------------------------------------------------------------------- completions


def read_completion(tree: Mapping[str, Any]) -> tuple[Asked, list[str | list[int]]]:
    """Read a request for completions; return its prompts too.

    >>> read_completion({"prompt": [1, 2, 3]})[1], read_completion({"prompt": ["a", "b"]})[1]
    ([[1, 2, 3]], ['a', 'b'])
    """
    asked = _read_common(tree, "max_tokens")
    asked.topk = _topk(tree.get("logprobs"), "logprobs")
    prompt = tree.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
        prompt = [prompt]
    if (
        not isinstance(prompt, list)
        or not prompt
        or not all(isinstance(each, (str, list)) and each for each in prompt)
    ):
        raise InvalidInputError("prompt: expected a text, a list of token ids, or a list of these")
    return asked, prompt


def completion(
    name: str,
    tree: Mapping[str, Any],
    prompts: Sequence[ModelInput],
    answers: Sequence[Answer],
    tokenizer: Any,
) -> Any:
    """Return the answers as a completion, or as the events of a streamed one."""
    choices = []
    for index, answer in enumerate(answers):
        choice: dict[str, Any] = {"index": index, "text": answer.message["content"]}
        choice["finish_reason"] = answer.sequence.stop_reason
        choice["logprobs"] = None if tree.get("logprobs") is None else _rows(answer, tokenizer)
        if tree.get("return_token_ids"):
            choice["token_ids"] = answer.sequence.tokens
        choices.append(choice)
    head = {
        "id": name,
        "object": "text_completion",
        "created": int(time.time()),
        "model": str(tree.get("model") or ""),
    }
    done = {**head, "choices": choices, "usage": _usage(sum(each.length for each in prompts), answers)}
    if not tree.get("stream"):
        return done
    return f"data: {json.dumps(done)}\n\ndata: [DONE]\n\n"


def _rows(answer: Answer, tokenizer: Any) -> dict[str, Any]:
    scores, offsets, place = _scores(answer, tokenizer), [], 0
    for score in scores:
        offsets.append(place)
        place += len(score["token"])
    return {
        "tokens": [score["token"] for score in scores],
        "token_logprobs": [score["logprob"] for score in scores],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in score["top_logprobs"]} for score in scores
        ],
        "text_offset": offsets,
    }


# ------------------------------------------------------------------------------------------- the rest


def model(name: str) -> dict[str, Any]:
    """Return the description of a model, with the fields of both APIs.

    >>> model("tiny")["object"]
    'model'
    """
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "tinker",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def models(name: str) -> dict[str, Any]:
    """Return the list of the one model, with the fields of both APIs.

    >>> [each["id"] for each in models("tiny")["data"]]
    ['tiny']
    """
    return {"object": "list", "data": [model(name)], "has_more": False, "first_id": name, "last_id": name}


def error(status: int, message: str) -> dict[str, Any]:
    """Return the body of a refusal.

    >>> error(404, "no such path")["error"]["type"]
    'not_found_error'
    """
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
