"""What the endpoint answers: settings, other routes, refusals, broken HTTP, and agents that leave."""

from __future__ import annotations

import copy
import socket
import threading
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.agents import WAIT_S, Agent, events
from support.chat_templates import ADD, TAGGED
from support.raising import refuse_threads
from support.values import for_each

from tinker_sync import (
    InvalidInputError,
    SampledSequence,
    SampleResponse,
    SamplingClient,
    SamplingParams,
    get_tokenizer,
)
from tinker_sync.gateway import Gateway
from tinker_sync.testing import FaultPlan, LocalServer, faults

SUM = [{"role": "user", "content": "What is 23+45?"}]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def test_settings_reach_the_sampler(gateway: Gateway) -> None:
    with Agent(gateway) as agent:
        options = {"temperature": 1.5, "seed": 7, "max_completion_tokens": 3, "return_token_ids": True}
        first, again = (agent.chat(SUM, **options, logprobs=True, top_logprobs=2) for _ in range(2))
        [choice] = first["choices"]
        assert choice["token_ids"] == again["choices"][0]["token_ids"]
        assert choice["finish_reason"] == "length"
        assert first["usage"] == {
            "prompt_tokens": len(first["prompt_token_ids"]),
            "completion_tokens": 3,
            "total_tokens": 3 + len(first["prompt_token_ids"]),
        }
        [turn, _] = [exchange.turn for exchange in gateway.exchanges()]
        assert turn.prompt.tolist() == first["prompt_token_ids"]
        assert turn.tokens.tolist() == choice["token_ids"]
        scores = choice["logprobs"]["content"]
        assert [score["logprob"] for score in scores] == turn.sequence.logprobs
        assert all(len(score["top_logprobs"]) == 2 for score in scores)
        assert b"".join(bytes(score["bytes"]) for score in scores).decode() == choice["message"]["content"]


def test_scores_have_the_octets_of_a_character_that_is_split_over_tokens() -> None:
    text = "\u00e9\U0001f600"
    with Gateway(Encoded(text)) as gateway, Agent(gateway) as agent:
        [choice] = agent.chat(SUM, logprobs=True)["choices"]
        assert choice["message"]["content"] == text
        octets = [bytes(score["bytes"]) for score in choice["logprobs"]["content"][:-1]]
        assert len(octets) > 2
        assert b"".join(octets).decode() == text
        shown = events(agent.chat(SUM, stream=True))[0]["choices"][0]["delta"]
        assert shown["content"] == text


def test_an_answer_ends_before_a_text(gateway: Gateway) -> None:
    with Agent(gateway) as agent:
        [choice] = agent.chat(SUM, temperature=0, stop=["=", "8"])["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("23+45", "stop")
        said = agent.post(MESSAGES, messages=SUM, temperature=0, max_tokens=12, stop_sequences=["="])
        assert said["content"] == [{"type": "text", "text": "23+45"}]
        assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "=")
        said = agent.post(MESSAGES, messages=SUM, temperature=0, max_tokens=2)
        assert (said["stop_reason"], said["usage"]["output_tokens"]) == ("max_tokens", 2)


def test_the_gateway_has_settings_for_requests_without_them(sampling: SamplingClient) -> None:
    defaults = SamplingParams(max_tokens=12, temperature=0.0, stop="=")
    with sampling.endpoint(sampling_params=defaults) as gateway, Agent(gateway) as agent:
        assert agent.chat(SUM)["choices"][0]["message"]["content"] == "23+45"
        assert agent.chat(SUM, stop="5")["choices"][0]["message"]["content"] == "23+4"
        assert agent.post("/v1/completions", prompt="Q: 23+")["choices"][0]["text"] == "4"
    with pytest.raises(InvalidInputError, match="expected texts"):
        sampling.endpoint(sampling_params=SamplingParams(stop=[2]))


def test_the_system_speaks_first(gateway: Gateway) -> None:
    brief = {"type": "text", "text": "Be brief."}
    with Agent(gateway) as agent:
        agent.post(MESSAGES, messages=SUM, max_tokens=2, system=[brief])
        agent.chat([{"role": "developer", "content": [brief]}, *SUM], max_tokens=2)
    first, second = (each.turns[0].prompt.tolist() for each in gateway.trajectories())
    assert first == second
    assert (
        get_tokenizer("tinker-sync/tiny").decode(first).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    )


def test_completions(gateway: Gateway) -> None:
    tokens = get_tokenizer("tinker-sync/tiny").encode("Q: 23+45=")
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    with Agent(gateway) as agent:
        both = agent.post("/v1/completions", prompt=["Q: 23+45=", tokens], logprobs=1, **options)
        assert [choice["text"] for choice in both["choices"]] == ["68", "68"]
        scores = both["choices"][0]["logprobs"]
        assert (scores["tokens"], scores["text_offset"]) == (["6", "8"], [0, 1])
        assert [list(each) for each in scores["top_logprobs"]] == [["6"], ["8"]]
        assert both["usage"]["total_tokens"] == 2 * (len(tokens) + 2)
        streamed = agent.post("/v1/completions", prompt=tokens, stream=True, stop="8", **options)
        assert [event["choices"][0]["text"] for event in events(streamed)] == ["6"]
    exchanges = gateway.exchanges()
    assert [exchange.turn.prompt.tolist() for exchange in exchanges] == [tokens] * 3
    assert [len(each.turns) for each in gateway.trajectories()] == [1, 1, 1]


def test_models(gateway: Gateway) -> None:
    with Agent(gateway) as agent:
        _, listed = agent.call("GET", "/v1/models")
        assert [model["id"] for model in listed["data"]] == ["tinker-sync/tiny"]
        assert agent.call("GET", "/v1/models/org%2Fany")[1]["id"] == "org/any"


HELLO = {"messages": [{"role": "user", "content": "a"}]}


@for_each(
    ("path", "body", "problem"),
    [
        (CHAT, {}, "messages: expected a list"),
        (CHAT, {"messages": []}, "messages: is empty"),
        (CHAT, {"messages": ["a"]}, "messages[0]"),
        (
            CHAT,
            {"messages": [*SUM, {"role": "assistant", "content": "b"}]},
            "the last one is the assistant's",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        (CHAT, {**HELLO, "n": 0}, "n: expected 1 or more"),
        (CHAT, {**HELLO, "n": True}, "n: expected"),
        (CHAT, {**HELLO, "stop": [""]}, "stop: expected texts"),
        (CHAT, {**HELLO, "temperature": "hot"}, "temperature: expected a number"),
        (CHAT, {**HELLO, "temperature": -1}, "temperature: expected 0 or more"),
        (CHAT, {**HELLO, "max_tokens": 10**9}, "max_tokens"),
        (CHAT, {**HELLO, "tools": [ADD]}, "shows the model no tools"),
        (CHAT, {**HELLO, "tool_choice": "required"}, "a call needs tools"),
        (CHAT, {**HELLO, "tool_choice": "must"}, "tool_choice: expected"),
        (CHAT, {**HELLO, "tools": [ADD], "tool_choice": {"function": {"name": "sub"}}}, "no 'sub'"),
        (CHAT, {**HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {**HELLO, "response_format": {"type": "json_schema"}}, "response_format: expected a schema"),
        (CHAT, {**HELLO, "logit_bias": {"5": 1}}, "logit_bias"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs: expected 0 to 20"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}, *SUM]}, "messages[0].tool_calls[0]"),
        (CHAT, b"{", "not JSON"),
        (CHAT, b"[]", "not a JSON object"),
        ("/v1/completions", {}, "prompt: expected"),
        ("/v1/completions", {"prompt": []}, "prompt: expected"),
        ("/v1/completions", {"prompt": [1, -2]}, "-2"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        (MESSAGES, {"messages": [{"role": "system", "content": "a"}]}, "messages[0]"),
        (MESSAGES, {**HELLO, "tools": [{"name": "a"}]}, "tools[0]"),
        (MESSAGES, {**HELLO, "tool_choice": {"type": "any"}}, "a call needs tools"),
        (MESSAGES, {**HELLO, "tool_choice": {"type": "must"}}, "tool_choice.type"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        (MESSAGES, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    gateway: Gateway, path: str, body: Any, problem: str
) -> None:
    with Agent(gateway) as agent:
        status, refused = agent.call("POST", path, body)
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert problem in refused["error"]["message"]
        assert ("type" in refused) == (path == MESSAGES)
        assert agent.call("GET", "/v1/models")[0] == 200  # on the same connection
    assert gateway.exchanges() == []


@for_each(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404), ("POST", "/completions", 404),
        ("POST", "/v1/models", 404), ("PUT", MESSAGES, 405), ("OPTIONS", CHAT, 405),
    ],
)  # fmt: skip
def test_other_routes(gateway: Gateway, method: str, path: str, status: int) -> None:
    with Agent(gateway) as agent:
        assert agent.call(method, path, {})[0] == status
        # Without these, a browser shows no answer to a page, and sends no JSON for it.
        assert not [name for name in agent.headers if name.lower().startswith("access-control")]


@for_each(
    ("octets", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xa5\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"GET /v1/models HTTP/1.1\r\na: " + b"b" * 100_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length : 2\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}", 100),
        (b"\r\nGET /v1/models HTTP/1.0\r\n\r\n", 200),
        (b"GET /v1/models HTTP/1.1\nconnection: close\n\n", 200),
    ],
)
def test_broken_http_ends_with_a_status(gateway: Gateway, octets: bytes, status: int) -> None:
    address = urlsplit(gateway.url)
    with socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as client:
        client.sendall(octets)
        client.shutdown(socket.SHUT_WR)
        with client.makefile("rb") as file:
            assert file.readline().startswith(b"HTTP/1.1 %d " % status)


def test_an_agent_without_a_thread_leaves_the_endpoint_open_for_others(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = urlsplit(gateway.url)
    with monkeypatch.context() as patch:
        refuse_threads(patch, "tinker-gateway-agent")
        with socket.create_connection((address.hostname, address.port), timeout=WAIT_S) as client:
            assert client.recv(1) == b""
    with Agent(gateway) as agent:
        assert agent.call("GET", "/v1/models")[0] == 200


class Slow:
    """A sampler whose samples never end by themselves."""

    def __init__(self) -> None:
        self.asked: Future[SampleResponse] = Future()
        self.ready = threading.Event()

    def sample(self, *_: Any, **__: Any) -> Future[SampleResponse]:
        self.ready.set()
        return self.asked

    def get_tokenizer(self) -> Any:
        return get_tokenizer("tinker-sync/tiny")

    def get_base_model(self) -> str:
        return "slow"


class Encoded(Slow):
    """A sampler whose answers are this text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        tokens = [*self.get_tokenizer().encode(text), 2]
        self.asked.set_result(SampleResponse([SampledSequence("stop", None, tokens, [-1.0] * len(tokens))]))


def leave(gateway: Gateway, slow: Slow, agent: Agent) -> None:
    agent.close()


def close(gateway: Gateway, slow: Slow, agent: Agent) -> None:
    gateway.close()


@pytest.mark.parametrize("end", [leave, close])
def test_a_sample_ends_with_its_agent(end: Any) -> None:
    slow, ended = Slow(), threading.Event()
    slow.asked.add_done_callback(lambda _: ended.set())
    with Gateway(slow) as gateway:
        agent = Agent(gateway)
        agent._connection.request("POST", CHAT, '{"messages": [{"role": "user", "content": "a"}]}')
        assert slow.ready.wait(WAIT_S)
        end(gateway, slow, agent)
        assert ended.wait(WAIT_S)
        agent.close()
    assert slow.asked.cancelled()
    assert gateway.exchanges() == []


@for_each(
    ("call", "fault", "status"),
    [
        ("retrieve_future", faults.promise_failed("no", "user"), 400),
        ("asample", faults.status(413), 413),
        ("asample", faults.status(404), 404),
        ("asample", faults.status(499), 499),  # which no standard names
    ],
)
def test_a_failed_sample_is_an_answer_that_is_not_repeated(call: str, fault: Any, status: int) -> None:
    plan = FaultPlan().on(call, fault)
    with LocalServer(plan) as server, server.service() as service:
        sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        with sampling.endpoint() as gateway, Agent(gateway) as agent:
            assert agent.call("POST", "/v1/completions", {"prompt": [1]})[0] == status
            assert agent.headers["x-should-retry"] == "false"
            assert gateway.exchanges() == []


def test_an_agent_may_ask_again_after_a_failure(server: LocalServer, gateway: Gateway) -> None:
    with Agent(gateway) as agent:
        chat: list[Any] = list(SUM)
        agent.say(chat)
        server.plan = FaultPlan().on("retrieve_future", faults.promise_failed("no", "user"), nth=1)
        chat.append({"role": "user", "content": "Sure?"})
        assert agent.call("POST", CHAT, {"messages": chat})[0] == 400
        agent.say(chat)
    [trajectory] = gateway.trajectories()
    assert len(trajectory.turns) == 2


JUNK = [
    *(None, True, 0, -1, 1.5, 10**30, "", "a", "\ud800", "none", "[1]"),
    *([], [[]], [None], {}, {"type": "text"}, {"a": None}),
]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USE = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
TOOL = {"name": "add", "description": "a", "input_schema": {"type": "object", "properties": {}}}
WHOLE: dict[str, Any] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "a", "name": "b"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [ADD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "chat_template_kwargs": {"thinking": True},
        "n": 2,
        "stop": ["b"],
        "logprobs": True,
        "top_logprobs": 1,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 2,
        "seed": 1,
        "max_tokens": 1,
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {
        "prompt": ["a", [1, 2]],
        "logprobs": 1,
        "stop": "b",
        "max_tokens": 1,
        "stream": False,
    },
    MESSAGES: {
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, USE]},
            {"role": "user", "content": [RESULT]},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stop_sequences": ["b"],
        "max_tokens": 1,
        "temperature": 1,
        "stream": True,
    },
}


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return each part of a tree, as the part that has it and its place there."""
    pairs = list(
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else []
    )
    return [(tree, place) for place, _ in pairs] + [each for _, part in pairs for each in places(part)]


@pytest.mark.parametrize("path", WHOLE)
def test_no_body_is_an_error_of_the_gateway(path: str) -> None:
    sampler, count = Slow(), 1 if path == MESSAGES else 2
    sampler.asked.set_result(SampleResponse([SampledSequence("length", None, [5], [-1.0])] * count))
    with Gateway(sampler, chat_template=TAGGED) as gateway, Agent(gateway) as agent:
        assert agent.call("POST", path, WHOLE[path])[0] == 200
        for index in range(len(places(WHOLE[path]))):
            for junk in JUNK:
                body = copy.deepcopy(WHOLE[path])
                part, place = places(body)[index]
                part[place] = junk
                status, answer = agent.call("POST", path, body)
                assert status in (200, 400), (place, junk, answer)
                if path == MESSAGES:
                    counted, answer = agent.call("POST", f"{path}/count_tokens", body)
                    assert counted in (200, status), (place, junk, answer)
