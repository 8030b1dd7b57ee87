"""A web app that samples in its requests: one client for all threads, and errors as HTTP statuses.

`make_app` returns a WSGI app, for gunicorn or another server: GET /sample?prompt=Q:+2%2B3= answers with JSON.
In Flask, a view returns what `answer` returns: `status, body = answer(...); return body, status`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, quote

import tinker_sync as tinker

MODEL = "tinker-sync/tiny"
REQUESTS, TIMEOUT_S = 20, 30.0


def answer(sampling: tinker.SamplingClient, prompt: str) -> tuple[HTTPStatus, dict[str, str]]:
    """Return the status and the body of an answer. Any thread may call this function."""
    if not prompt:
        return HTTPStatus.BAD_REQUEST, {"error": "prompt is missing"}
    tokenizer = sampling.get_tokenizer()
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=["\n"])
    try:
        sampled = sampling.sample(
            tinker.ModelInput.from_text(prompt, tokenizer), 1, params, deadline=TIMEOUT_S
        ).result()
    except tinker.InvalidInputError as error:
        return HTTPStatus.BAD_REQUEST, {"error": str(error)}
    except tinker.TinkerError as error:
        return HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"{type(error).__name__}: try again later"}
    return HTTPStatus.OK, {"text": sampled.sequences[0].text(tokenizer).rstrip()}


def make_app(sampling: tinker.SamplingClient) -> Callable[..., Iterable[bytes]]:
    """Return the app. It shares one client, whose methods any number of threads may call."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        prompt = parse_qs(environ.get("QUERY_STRING", "")).get("prompt", [""])[0]
        status, body = answer(sampling, prompt)
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return app


def call(app: Callable[..., Iterable[bytes]], prompt: str) -> str:
    """Call the app without a socket, as its server does; return the status and the body."""
    started: list[str] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/sample", "QUERY_STRING": f"prompt={quote(prompt)}"}
    body = b"".join(app(environ, lambda status, _headers: started.append(status)))
    return f"{started[0]}  {body.decode()}"


def main() -> None:
    """Call the app from several threads, as a web server does."""
    with tinker.ServiceClient(base_url="local") as service, ThreadPoolExecutor(8) as threads:
        app = make_app(service.create_sampling_client(base_model=MODEL))
        prompts = [f"Q: {n}+{n}=" for n in range(1, REQUESTS + 1)]
        for prompt, answered in zip(prompts, threads.map(lambda each: call(app, each), prompts), strict=True):
            print(f"{prompt:10}  {answered}")
        print(f"no prompt   {call(app, '')}")


if __name__ == "__main__":
    main()
