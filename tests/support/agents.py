"""Agents that speak to a gateway by HTTP, without any package, and a ledger of what an engine has sampled."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tinker_sync import SampledSequence, SampleResponse, get_tokenizer
from tinker_sync._base.clock import make_lock
from tinker_sync.gateway import Gateway
from tinker_sync.local.engine.host import Host

WAIT_S = 60.0


class Agent:
    """One agent with a connection of its own, for one thread."""

    def __init__(self, gateway: Gateway, label: str = "", *, key: str | None = None) -> None:
        address = urlsplit(gateway.anthropic_base_url(label))
        self._prefix = address.path
        self._connection = http.client.HTTPConnection(
            str(address.hostname), int(address.port or 0), timeout=WAIT_S
        )
        self._headers = {"Content-Type": "application/json"}
        self.headers: dict[str, str] = {}
        """The headers of the last answer."""
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the body of an answer: a tree of JSON, or the text of an event stream."""
        octets = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        self._connection.request(method, self._prefix + path, octets, {**self._headers, **headers})
        answer = self._connection.getresponse()
        self.headers = dict(answer.headers)
        read = answer.read().decode()
        return answer.status, read if "event-stream" in answer.headers["content-type"] else json.loads(read)

    def post(self, path: str, **body: Any) -> Any:
        """Return the body of an answer that is no refusal."""
        status, tree = self.call("POST", path, body)
        assert status == 200, tree
        return tree

    def chat(self, messages: list[Any], **body: Any) -> Any:
        """Return the chat completion."""
        return self.post("/v1/chat/completions", messages=messages, model="any", **body)

    def say(self, messages: list[Any], **body: Any) -> Any:
        """Return the message of the answer, which the chat has from now on."""
        message = self.chat(messages, **body)["choices"][0]["message"]
        messages.append(message)
        return message

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Scripted:
    """A sampler whose answers are these texts, sampled letter by letter."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)
        self.prompts: list[str] = []

    def sample(self, prompt: Any, *_: Any, **__: Any) -> Future[SampleResponse]:
        self.prompts.append(self.get_tokenizer().decode(prompt.to_ints()))
        tokens = [self.get_tokenizer().encode(letter)[0] for letter in next(self._texts)]
        future: Future[SampleResponse] = Future()
        future.set_result(
            SampleResponse([SampledSequence("stop", None, [*tokens, 2], [-1.0] * (len(tokens) + 1))])
        )
        return future

    def get_tokenizer(self) -> Any:
        return get_tokenizer("tinker-sync/tiny")

    def get_base_model(self) -> str:
        return "scripted"


def events(text: str) -> list[Any]:
    """Return the data of an event stream."""
    found = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    return [json.loads(each) for each in found if each != "[DONE]"]


Sampled = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""The tokens of a prompt, those of a sample, and their log-probabilities."""


@contextmanager
def sample_ledger() -> Iterator[list[Sampled]]:
    """Record what the engine of a server in this process samples. Start the server inside the block."""
    ledger: list[Sampled] = []
    lock = make_lock()
    sample = Host.sample

    def watched(host: Host, base_model: str, spec: Any) -> Any:
        handle = sample(host, base_model, spec)
        prompt = tuple(map(int, spec.prompt))

        def note(future: Any) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            for each in future.result().samples:
                with lock:
                    ledger.append((prompt, tuple(map(int, each.tokens)), tuple(map(float, each.logprobs))))

        handle.future.add_done_callback(note)
        return handle

    Host.sample = watched  # type: ignore[method-assign]
    try:
        yield ledger
    finally:
        Host.sample = sample  # type: ignore[method-assign]
