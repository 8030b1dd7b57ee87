"""The embedded server for tests, in a thread, with a directory that tests choose.

with running(tmp_path, hold_s=0.2) as server: ...      server.url, server.key, server.post("/asample", {...})
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.local import tiny
from tinker_sync.local.engine.host import BaseModel, Host
from tinker_sync.local.server.app import App, build
from tinker_sync.local.server.http import Application, ServerThread
from tinker_sync.local.server.state import Flags
from tinker_sync.local.store import Store
from tinker_sync.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ModelInput,
)
from tinker_sync.wire.proto.outputs import decode_forward_backward_output
from tinker_sync.wire.proto.requests import encode_forward_backward_request

KEY = "tml-of-these-tests"
API = "/api/v1"
BASE = tiny.NAME
PROTO = "application/x-protobuf"


@cache
def base_model() -> BaseModel:
    """Return the built-in model, which is read once for all tests, because its weights cannot change."""
    return BaseModel(tiny.NAME, tiny.directory())


def alive(*kinds: type) -> Counter[type]:
    """Return the numbers of objects of these classes in this process."""
    gc.collect()
    # `type`, because other objects warn when their `__class__` is read.
    return Counter(type(each) for each in gc.get_objects() if type(each) in kinds)


class Reply:
    """An answer of the server."""

    def __init__(self, raw: http.client.HTTPResponse) -> None:
        self.status = raw.status
        self.headers = {name.lower(): value for name, value in raw.getheaders()}
        self.body = raw.read()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def detail(self) -> Any:
        return self.json()["detail"]

    def __repr__(self) -> str:
        return f"<{self.status} {self.body[:200]!r}>"


class Wire:
    """A sender of HTTP requests to a server, without a client of this package."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.url, self.key = url, key
        self.port = int(url.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request on a new connection, and return the reply. Bodies other than bytes become JSON."""
        sent = {"X-API-Key": self.key, **(headers or {})}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            target = path if path.startswith(API) else API + path
            connection.request(method, target, body, {name: v for name, v in sent.items() if v})
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, {} if body is None else body, named)

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, None, {name.replace("_", "-"): v for name, v in headers.items()})

    # ------------------------------------------------------------------------------------ usual requests

    def ok(self, path: str, body: Any = None, **headers: str) -> Any:
        reply = self.post(path, body, **headers)
        assert reply.status == 200, reply
        return reply.json()

    def session(self, **more: Any) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session", **more}
        made: str = self.ok("/create_session", body)["session_id"]
        return made

    def create_model(self, session: str, number: int = 0, **more: Any) -> Any:
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": BASE,
            "lora_config": {"rank": 2, "seed": 1},
            "type": "create_model",
            **more,
        }
        return self.ok("/create_model", body)

    def model(self, session: str, number: int = 0, **more: Any) -> str:
        promise = self.create_model(session, number, **more)
        model_id: str = self.result(promise["request_id"])["model_id"]
        return model_id

    def sampler(self, session: str, number: int = 0, **more: Any) -> Reply:
        source = more or {"base_model": BASE}
        body = {"session_id": session, "sampling_session_seq_id": number, **source}
        return self.post("/create_sampling_session", body)

    def pass_(self, model: str, seq_id: int, tokens: list[int] | None = None, **more: Any) -> Reply:
        """Send a pass over one datum, in protobuf."""
        return self.post("/forward_backward", pass_body(model, seq_id, tokens, **more), content_type=PROTO)

    def optim(self, model: str, seq_id: int, **params: Any) -> Reply:
        body = {"model_id": model, "seq_id": seq_id, "adam_params": params, "type": "optim_step"}
        return self.post("/optim_step", body)

    def sample(self, sampler: str, seq_id: int | None, tokens: list[int] | None = None, **more: Any) -> Any:
        params = {"max_tokens": 4, **more.pop("params", {})}
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens or [1, 2, 3]}]},
            "sampling_params": params,
            **more,
        }
        return self.ok("/asample", {name: value for name, value in body.items() if value is not None})

    def retrieve(self, request_id: str, **headers: str) -> Reply:
        """Poll once for a result."""
        return self.post("/retrieve_future", {"request_id": request_id}, **headers)

    def result(self, request_id: str) -> Any:
        """Poll until a promise is done. Return the JSON of its result, or of its failure."""
        while True:
            reply = self.retrieve(request_id)
            if reply.status != 408:
                assert reply.status == 200, reply
                return reply.json()

    def result_of(self, path: str, body: Any, **headers: str) -> Any:
        """Make a call that has a promise as its answer, and return its result or its failure."""
        return self.result(self.ok(path, body, **headers)["request_id"])

    def sampled(self, sampler: str, seq_id: int | None, tokens: list[int] | None = None, **more: Any) -> Any:
        """Return the result of a sample."""
        return self.result(self.sample(sampler, seq_id, tokens, **more)["request_id"])

    def passed(self, model: str, seq_id: int, tokens: list[int] | None = None, **more: Any) -> Any:
        """Return the output of a pass over one datum."""
        return self.output(self.pass_(model, seq_id, tokens, **more).json()["request_id"])

    def output(self, request_id: str) -> ForwardBackwardOutput:
        reply = self.retrieve(request_id, accept=PROTO)
        while reply.status == 408:
            reply = self.retrieve(request_id, accept=PROTO)
        assert (reply.status, reply.headers["content-type"]) == (200, PROTO), reply
        return decode_forward_backward_output(reply.body)


def pass_body(
    model: str, seq_id: int, tokens: list[int] | None = None, *, forward_only: bool = False, loss: str = ""
) -> bytes:
    ids = tokens or [5, 6, 7, 8]
    datum = Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]})
    given = ForwardBackwardInput([datum], loss or "cross_entropy")
    request = ForwardBackwardRequest(given, model, seq_id)
    return encode_forward_backward_request(request, forward_only=forward_only).join()


class Running(Wire):
    """A sender of requests to a server in this process, with that server's thread, application and store."""

    def __init__(self, thread: ServerThread, app: App, store: Store) -> None:
        super().__init__(thread.url)
        self.thread, self.app, self.store = thread, app, store


@contextlib.contextmanager
def running(
    directory: Path,
    *,
    clock: Clock = SYSTEM_CLOCK,
    around: Callable[[Application], Application] = lambda app: app,
    **flags: Any,
) -> Iterator[Running]:
    """Run a server with this directory until the end of the block; `around` may wrap its application."""
    chosen = Flags.of(**{"hold_s": 5.0, **flags})
    with Store(directory, clock=clock) as store:
        app = build(store, Host([base_model()]), key=KEY, flags=chosen, clock=clock)
        with ServerThread(around(app), key=KEY) as thread:
            yield Running(thread, app, store)
