"""A Flask app that samples in its requests: one client for all threads, and errors as statuses.

GET /sample?prompt=Q:+2%2B3= answers with JSON. Without Flask the same app runs as plain WSGI.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, quote

import tinker_sync as tinker
from tinker_sync.examples._shared import connect, draw, parse, write

TIMEOUT_S = 30.0


def answer(sampling: tinker.SamplingClient, prompt: str) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body of an answer. Any thread may call this function."""
    if not prompt:
        return 400, {"error": "prompt is missing"}
    tokenizer = sampling.get_tokenizer()
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=["\n"])
    try:
        sampled = sampling.sample(
            tinker.ModelInput.from_text(prompt, tokenizer), 1, params, deadline=TIMEOUT_S
        ).result()
    except tinker.InvalidInputError as error:
        return 400, {"error": str(error)}
    except tinker.TinkerError as error:
        return 503, {"error": f"{type(error).__name__}: try again later"}
    return 200, {"text": sampled.sequences[0].text(tokenizer).rstrip()}


def make_app(sampling: tinker.SamplingClient) -> Any:
    """Return a Flask app, or a plain WSGI app if Flask is not installed."""
    try:
        flask: Any = importlib.import_module("flask")
    except ImportError:
        return make_wsgi(sampling)
    app = flask.Flask("samples")

    def sample() -> Any:
        status, body = answer(sampling, flask.request.args.get("prompt", ""))
        return body, status

    app.get("/sample")(sample)
    return app


def make_wsgi(sampling: tinker.SamplingClient) -> Callable[..., Iterable[bytes]]:
    """Return the app without Flask."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        prompt = parse_qs(environ.get("QUERY_STRING", "")).get("prompt", [""])[0]
        status, body = answer(sampling, prompt)
        start_response(f"{status} .", [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return app


def call(app: Any, prompt: str) -> tuple[int, dict[str, Any]]:
    """Call an app without a socket, as servers such as gunicorn do; return the status and the body."""
    got: list[str] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/sample", "QUERY_STRING": f"prompt={quote(prompt)}"}
    environ |= {"SERVER_NAME": "localhost", "SERVER_PORT": "80", "wsgi.url_scheme": "http"}
    body = b"".join(app(environ, lambda status, _headers, _info=None: got.append(status)))
    return int(got[0].split()[0]), json.loads(body)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Call the app from several threads, as a web server does. Return 1.0 for each right answer, else 0.0."""
    options = parse(argv, __doc__, steps=20)
    with connect(options) as service, ThreadPoolExecutor(8) as threads:
        app = make_app(service.create_sampling_client(base_model=options.model))
        write(f"the app is made with {type(app).__module__.partition('.')[0]}")
        answers = list(threads.map(lambda n: call(app, f"Q: {n}+{n}="), range(1, options.steps + 1)))
        write(f"20 is {call(app, 'Q: 10+10=')[1]['text']}; without a prompt: {call(app, '')}")
    right = [float(body.get("text") == str(2 * n)) for n, (_, body) in enumerate(answers, 1)]
    draw("right answers, request by request", [sum(right[:n]) / n for n in range(1, len(right) + 1)])
    return right


if __name__ == "__main__":
    main()
