"""A deterministic training server for tests, comparisons and benchmarks, whose answers a test can script.

It uses raw HTTP/1.1 on one asyncio loop, so that one core serves thousands of requests a second and a
benchmark measures the client, not the stub. An answer depends only on its request, so two clients that run
the same script get the same results. The stub has its own code for protobuf, independent of the code under
test.

In a thread:     with StubServer() as stub: ...            stub.log, stub.script("/asample", Answer(429))
As a process:    python -m support.tinker_stub --port 0    prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import struct
import threading
import zlib
from asyncio import sslproto
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

API = "/api/v1"
PATIENCE_S = 120.0
PROTO = "application/x-protobuf"
JSON = "application/json"
REASONS = {
    200: "OK",
    202: "Accepted",
    302: "Found",
    400: "Bad Request",
    404: "Not Found",
    429: "Too Many Requests",
}


@dataclass
class Answer:
    """One answer. `abort` cuts the connection instead of answering, "before" or "after" the work is done.

    `hang_up` closes the connection after the answer, without a header that announces it.
    """

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = JSON
    delay_s: float = 0.0
    abort: str = ""
    hang_up: bool = False
    lasts_until_close: bool = False
    """Send no content length, as servers of HTTP/1.0 do."""
    gate: threading.Event | None = None
    """The stub answers when this event is set."""
    usual: bool = False
    """True: send the usual answer to the request in place of this one."""
    reset: int | None = None
    """HTTP/2: reset the stream with this code instead of answering."""
    frames: Callable[[int, Any], bytes] | None = None
    """HTTP/2: send these bytes instead, made from the number of the stream and the connection."""

    def octets(self) -> bytes:
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass
class Asked:
    """A request that the stub has received."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes | bytearray
    connection: int

    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


@dataclass
class Promise:
    kind: str
    payload: bytes
    content_type: str
    ready_at: float
    seq: int = 0
    failure: dict[str, str] | None = None


Script = Answer | Callable[[Asked], Answer | None]


@dataclass
class Behaviour:
    """The properties of the server. The defaults are those of the current hosted service."""

    config: dict[str, Any] | None = field(default_factory=lambda: {"fwdbwd_max_chunk_len": 1024})
    dynamic_config: dict[str, Any] | None = field(default_factory=dict)
    proto_results: bool = True
    sequence_ids: bool = True
    latency_s: float = 0.0
    """The duration of a sample. Other results are ready at once."""
    hold_s: float = 30.0
    """The longest time for which a poll is held open."""
    metadata_over: int | None = None
    """The size above which the stub first sends the size of a result."""
    key: str | None = None
    """The only valid key; None accepts any key."""


_POSTS = (
    "/client/config", "/client/dynamic_config", "/auth/token", "/create_session", "/session_heartbeat",
    "/telemetry", "/create_sampling_session", "/join_sampling_session", "/create_model", "/forward_backward",
    "/forward", "/optim_step", "/save_weights", "/save_weights_for_sampler", "/save_weights_external",
    "/load_weights", "/create_custom_loss", "/asample", "/get_info", "/retrieve_future", "/retrieve_futures",
    "/cancel_future", "/weights_info", "/copy_weights",
)  # fmt: skip


class Stub:
    """The state and the handlers of the stub.

    They run on the thread of the loop; any thread may read `log`.
    """

    validates = True
    """False: trust the headers of HTTP/2, which takes less CPU."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.log: list[Asked] = []
        self.keep_log = True
        self.connections = 0
        """How many connections have been opened."""
        # A buffer for arriving bytes, which all connections share: a connection takes its bytes out at once.
        self.scratch = memoryview(bytearray(256 * 1024))
        self._arrived = threading.Condition()
        self._watchers = 0  # guarded by _arrived
        self._lock = threading.Lock()
        self._scripts: dict[str, deque[Script]] = defaultdict(deque)  # guarded by _lock
        self._promises: dict[str, Promise] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._finished: dict[str, list[str]] = defaultdict(list)
        self._news: dict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._counters: dict[str, int] = defaultdict(int)
        self._models: dict[str, dict[str, Any]] = {}
        self._held: dict[str, set[str]] = defaultdict(set)
        self.counts: dict[str, int] = defaultdict(int)
        self.http2: list[Any] = []  # the connections of HTTP/2
        self.http2_settings: dict[int, int] = {}
        self.broken: list[Exception] = []  # breaches of HTTP/2 by the client
        self._routes: dict[tuple[str, str], Callable[[Asked], Any]] = {
            ("POST", name): getattr(self, f"on_{name.strip('/').replace('/', '_')}") for name in _POSTS
        }
        self._routes["GET", "/get_server_capabilities"] = self.on_capabilities

    # --------------------------------------------------------------------------------- for tests

    def script(self, path: str, *answers: Script) -> None:
        """Send these answers to the next requests of a path, such as "/asample".

        Later requests are answered as usual.
        """
        with self._lock:
            self._scripts[path].extend(answers)

    def hold(self, path: str, count: int = 1) -> threading.Event:
        """Hold the next requests of a path until the test sets the returned event. Then answer as usual."""
        release = threading.Event()
        self.script(path, *[Answer(gate=release, usual=True)] * count)
        return release

    def asked(self, path: str) -> list[Asked]:
        """Return the requests of one path so far, in order of arrival."""
        return [asked for asked in list(self.log) if asked.path == API + path]

    def await_asked(self, path: str, count: int = 1, *, where: Callable[[Asked], Any] = bool) -> list[Asked]:
        """Wait until there are `count` requests of a path for which `where` is true, and return them."""
        found: list[Asked] = []

        def enough() -> bool:
            found[:] = [asked for asked in self.asked(path) if where(asked)]
            return len(found) >= count

        with self._arrived:
            self._watchers += 1
            try:
                in_time = self._arrived.wait_for(enough, PATIENCE_S)
            finally:
                self._watchers -= 1
        assert in_time, f"{count} requests of {path} expected, {len(found)} came, after {self.paths()[-20:]}"
        return found

    def paths(self) -> list[str]:
        return [asked.path.removeprefix(API) for asked in list(self.log)]

    # --------------------------------------------------------------------------------- dispatch

    async def answer_always(self, asked: Asked) -> Answer:
        """Answer a request, also if `answer` fails: the test that made it fail must see that."""
        try:
            return await self.answer(asked)
        except Exception as error:  # noqa: BLE001
            return Answer(500, {"detail": f"stub: {error!r}"})

    async def answer(self, asked: Asked) -> Answer:
        if self.keep_log:
            self.log.append(asked)
            if self._watchers:
                with self._arrived:
                    self._arrived.notify_all()
        name = asked.path.removeprefix(API)
        self.counts[name] += 1
        scripted = self._next_script(name, asked)
        if scripted is not None:
            if scripted.abort == "after":
                await self._answer_as_usual(asked, name)
            if scripted.delay_s:
                await asyncio.sleep(scripted.delay_s)
            if scripted.gate is not None:
                await asyncio.get_running_loop().run_in_executor(None, scripted.gate.wait, PATIENCE_S)
            if not scripted.usual:
                return scripted
        return await self._answer_as_usual(asked, name)

    def _next_script(self, name: str, asked: Asked) -> Answer | None:
        with self._lock:
            queue = self._scripts.get(name) or self._scripts.get("*")
            script = queue.popleft() if queue else None
        if script is None or isinstance(script, Answer):
            return script
        return script(asked)

    async def _answer_as_usual(self, asked: Asked, name: str) -> Answer:
        key = self.behaviour.key
        if key is not None and asked.headers.get("x-api-key") != key:
            return Answer(401, {"detail": "no such key"})
        route = self._routes.get((asked.method, name))
        made = route(asked) if route else self.on_other(asked, name)
        if asyncio.iscoroutine(made):
            made = await made
        return made if isinstance(made, Answer) else Answer(body=made)

    def on_other(self, asked: Asked, name: str) -> Any:
        """Answer requests whose paths contain ids, and refuse unknown paths."""
        parts = [unquote(part) for part in name.strip("/").split("/")]
        if parts[0] == "samplers" and len(parts) == 2:
            return {"sampler_id": parts[1], "base_model": "stub/model"}
        if parts[0] == "sessions" and parts[-1] == "finish":
            return {}
        if parts[0] in ("training_runs", "checkpoints", "sessions"):
            return self.rest(asked, parts)
        return Answer(404, {"detail": "Not Found"})

    def rest(self, asked: Asked, parts: list[str]) -> Any:
        cursor = {"offset": 0, "limit": 20, "total_count": 0}
        if parts == ["training_runs"]:
            return {"training_runs": [], "cursor": cursor}
        if parts == ["checkpoints"] or parts[-1] == "checkpoints":
            return {"checkpoints": [], "cursor": cursor}
        if parts == ["sessions"]:
            return {"sessions": []}
        if parts[0] == "sessions" and len(parts) == 2:
            return {"training_run_ids": [], "sampler_ids": []}
        if parts[0] == "training_runs" and len(parts) == 2:
            return {
                "training_run_id": parts[1],
                "base_model": "stub/model",
                "model_owner": "someone",
                "is_lora": True,
                "last_request_time": "2026-01-01T00:00:00Z",
            }
        return {}

    def count(self, name: str) -> int:
        """Return the number of earlier calls with this name."""
        value = self._counters[name]
        self._counters[name] += 1
        return value

    # --------------------------------------------------------------------------------- service

    def on_client_config(self, asked: Asked) -> Any:
        config = self.behaviour.config
        return Answer(404, {"detail": "Not Found"}) if config is None else config

    def on_client_dynamic_config(self, asked: Asked) -> Any:
        config = self.behaviour.dynamic_config
        return Answer(404, {"detail": "Not Found"}) if config is None else config

    def on_auth_token(self, asked: Asked) -> Any:
        return {"jwt": "eyJhbGciOiJub25lIn0.eyJleHAiOjk5OTk5OTk5OTl9.c2ln"}

    def on_create_session(self, asked: Asked) -> Any:
        return {"session_id": f"session-{self.count('session')}", "type": "create_session"}

    def on_session_heartbeat(self, asked: Asked) -> Any:
        return {"type": "session_heartbeat"}

    def on_telemetry(self, asked: Asked) -> Any:
        return {"status": "accepted"}

    def on_create_sampling_session(self, asked: Asked) -> Any:
        body = asked.json()
        sampler = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        return {"sampling_session_id": sampler, "type": "create_sampling_session"}

    def on_join_sampling_session(self, asked: Asked) -> Any:
        return {"client_counter": 7 + self.count("join"), "type": "join_sampling_session"}

    def on_capabilities(self, asked: Asked) -> Any:
        model = {
            "model_name": "stub/model",
            "max_context_length": 4096,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def on_get_info(self, asked: Asked) -> Any:
        data = {"arch": "stub", "model_name": "stub/model", "tokenizer_id": "stub/tokenizer"}
        model_id = asked.json()["model_id"]
        return {"type": "get_info", "model_data": data, "model_id": model_id, "is_lora": True, "lora_rank": 8}

    def on_weights_info(self, asked: Asked) -> Any:
        return {"base_model": "stub/model", "is_lora": True, "lora_rank": 8}

    def on_copy_weights(self, asked: Asked) -> Any:
        return {"tinker_path": "tinker://copy/weights/" + asked.json()["source_path"].rsplit("/", 1)[-1]}

    def on_cancel_future(self, asked: Asked) -> Any:
        return {}

    # --------------------------------------------------------------------------------- promises

    def promise(
        self, kind: str, payload: Any, *, latency_s: float = 0.0, content_type: str = JSON, **more: Any
    ) -> dict[str, Any]:
        octets = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        request_id = f"req-{self.count('promise')}"
        loop = asyncio.get_running_loop()
        self._promises[request_id] = Promise(kind, octets, content_type, loop.time() + latency_s)
        return {"request_id": request_id, **more}

    def on_create_model(self, asked: Asked) -> Any:
        body = asked.json()
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        self._models[model_id] = body
        return self.promise("create_model", {"model_id": model_id, "type": "create_model"}, model_id=model_id)

    def on_optim_step(self, asked: Asked) -> Any:
        return self.promise("optim_step", {"metrics": {"step:max": float(asked.json()["seq_id"])}})

    def on_save_weights(self, asked: Asked) -> Any:
        body = asked.json()
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        return self.promise("save_weights", {"path": path, "type": "save_weights"})

    def on_save_weights_for_sampler(self, asked: Asked) -> Any:
        body = asked.json()
        if body.get("path") is None:
            session = body["model_id"].split(":")[0]
            made: dict[str, Any] = {
                "sampling_session_id": f"{session}:sample:{body['sampling_session_seq_id']}"
            }
        else:
            made = {"path": f"tinker://{body['model_id']}/sampler_weights/{body['path']}"}
        return self.promise("save_weights_for_sampler", {**made, "type": "save_weights_for_sampler"})

    def on_save_weights_external(self, asked: Asked) -> Any:
        body = asked.json()
        path = f"tinker://{body['model_id']}/external_weights/{body['path']}"
        return self.promise(
            "save_weights_external", {"path": path, "size_bytes": 10, "type": "save_weights_external"}
        )

    def on_load_weights(self, asked: Asked) -> Any:
        body = asked.json()
        model_id = body.get("model_id") or f"{body['session_id']}:train:{body['model_seq_id']}"
        return self.promise(
            "load_weights", {"path": body["path"], "model_id": model_id, "type": "load_weights"}
        )

    def on_create_custom_loss(self, asked: Asked) -> Any:
        return self.promise(
            "create_custom_loss", {"loss_id": f"loss-{self.count('loss')}", "type": "create_custom_loss"}
        )

    def on_forward(self, asked: Asked) -> Any:
        return self._passed(asked.json()["forward_input"]["data"])

    def on_forward_backward(self, asked: Asked) -> Any:
        if asked.headers.get("content-type", "").startswith(PROTO):
            return self._passed(list(_proto_data(_plain_body(asked))))
        return self._passed(asked.json()["forward_backward_input"]["data"])

    def _passed(self, data: list[Any]) -> Any:
        """Return the result of a pass. The log-probability of a token is minus a hundredth of its id."""
        rows, loss = [], 0.0
        for datum in data:
            inputs = datum["loss_fn_inputs"]
            targets = inputs["target_tokens"]["data"]
            weights = inputs["weights"]["data"] if "weights" in inputs else [1.0] * len(targets)
            rows.append([-token / 100 for token in targets])
            loss += sum(token / 100 * weight for token, weight in zip(targets, weights, strict=False))
        metrics = {"loss:sum": loss, "clock_cycle:unique": float(self.count("clock"))}
        if self.behaviour.proto_results:
            return self.promise("forward_backward", _pass_output(rows, metrics), content_type=PROTO)
        outputs = [{"logprobs": {"data": row, "dtype": "float32", "shape": [len(row)]}} for row in rows]
        payload = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": metrics}
        return self.promise("forward_backward", payload)

    def on_asample(self, asked: Asked) -> Any:
        body = asked.json()
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk.get("tokens", ())]
        count, length = body.get("num_samples", 1), body["sampling_params"].get("max_tokens") or 1
        first = sum(prompt) % 1000
        sequences = [[(first + index + offset) % 1000 for offset in range(length)] for index in range(count)]
        prompt_logprobs = (
            [None, *(-token / 100 for token in prompt[1:])] if body.get("prompt_logprobs") else None
        )
        sampler, seq_id = body.get("sampling_session_id"), body.get("seq_id", 0)
        more: dict[str, Any] = {}
        if self.behaviour.sequence_ids:
            more["sample_sequence_ids"] = [f"{sampler}:{seq_id}:{index}" for index in range(count)]
        if self.behaviour.proto_results:
            payload: Any = _sample_output(sequences, prompt_logprobs)
        else:
            payload = _sample_json(sequences, prompt_logprobs)
        made = self.promise(
            "sample",
            payload,
            latency_s=self.behaviour.latency_s,
            content_type=PROTO if self.behaviour.proto_results else JSON,
            **more,
        )
        if sampler is not None:
            self._announce_later(sampler, made["request_id"])
        return made

    def _announce_later(self, sampler: str, request_id: str) -> None:
        def finished() -> None:
            self._finished[sampler].append(request_id)
            waiting, self._news[sampler] = self._news[sampler], []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

        asyncio.get_running_loop().call_later(self.behaviour.latency_s, finished)

    async def on_retrieve_future(self, asked: Asked) -> Any:
        body = asked.json()
        promise = self._promises.get(body["request_id"])
        if promise is None:
            return Answer(404, {"detail": "unknown request"})
        wait_s = promise.ready_at - asyncio.get_running_loop().time()
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, self.behaviour.hold_s))
            if wait_s > self.behaviour.hold_s:
                return Answer(408, {"queue_state": "active"})
        if promise.failure is not None:
            return promise.failure
        limit = self.behaviour.metadata_over
        if limit is not None and body.get("allow_metadata_only") and len(promise.payload) > limit:
            return {"status": "complete_metadata", "response_payload_size": len(promise.payload)}
        return Answer(body=promise.payload, content_type=promise.content_type)

    async def on_retrieve_futures(self, asked: Asked) -> Any:
        body = asked.json()
        sampler, cursor = body["target"]["sampling_session_id"], body["prev_cursor"]
        self._held[sampler].difference_update(body["retrieved_request_ids"])
        finished = self._finished[sampler]
        if len(finished) <= cursor:
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._news[sampler].append(news)
            with suppress(asyncio.TimeoutError):
                longest_s = body.get("timeout")
                await asyncio.wait_for(news, self.behaviour.hold_s if longest_s is None else longest_s)
        fresh = finished[cursor:]
        completions = [
            {
                "state": "finished",
                "request_id": request_id,
                "response_payload_uncompressed_size": len(self._promises[request_id].payload),
            }
            for request_id in fresh
        ]
        return {"completions": completions, "cursor": cursor + len(fresh)}


# ------------------------------------------------------------------------------------ protobuf


def _varint(number: int) -> bytes:
    octets = bytearray()
    while number > 0x7F:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)


def _field(number: int, octets: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(octets)) + octets


def _sample_output(sequences: list[list[int]], prompt_logprobs: list[float | None] | None) -> bytes:
    parts = []
    for tokens in sequences:
        ids = struct.pack(f"<{len(tokens)}i", *tokens)
        logprobs = struct.pack(f"<{len(tokens)}f", *(-token / 100 for token in tokens))
        parts.append(_field(1, b"\x08\x01" + _field(2, ids) + _field(3, logprobs)))
    if prompt_logprobs is not None:
        values = [float("nan") if value is None else value for value in prompt_logprobs]
        parts.append(_field(2, struct.pack(f"<{len(values)}f", *values)))
    return b"".join(parts)


def _sample_json(sequences: list[list[int]], prompt_logprobs: list[float | None] | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {"stop_reason": "length", "tokens": tokens, "logprobs": [-token / 100 for token in tokens]}
            for tokens in sequences
        ],
    }
    if prompt_logprobs is not None:
        made["prompt_logprobs"] = prompt_logprobs
    return made


def _pass_output(rows: list[list[float]], metrics: dict[str, float]) -> bytes:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + 4 * len(row))
    flat = [value for row in rows for value in row]
    tensor = (
        _field(1, struct.pack(f"<{len(flat)}f", *flat))
        + _field(2, struct.pack(f"<{len(offsets)}q", *offsets))
        + b"\x18\x01"
    )
    record = _field(2, _field(1, b"logprobs") + _field(2, tensor)) + b"\x18" + _varint(len(rows))
    parts = [_field(1, b"stub:ArrayRecord"), _field(2, record)]
    for name, value in metrics.items():
        parts.append(_field(3, _field(1, name.encode()) + b"\x11" + struct.pack("<d", value)))
    return b"".join(parts)


def _read_varint(octets: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        octet = octets[at]
        at += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, at
        shift += 7


def _fields(octets: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a message whose fields are varints, doubles or bytes."""
    at = 0
    while at < len(octets):
        tag, at = _read_varint(octets, at)
        if tag & 7 == 0:
            value, at = _read_varint(octets, at)
            yield tag >> 3, value
        elif tag & 7 == 1:
            yield tag >> 3, octets[at : at + 8]
            at += 8
        else:
            length, at = _read_varint(octets, at)
            yield tag >> 3, octets[at : at + length]
            at += length


def _proto_data(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the data of a forward_backward request in their JSON form, as far as the stub reads them."""
    for number, datum in _fields(body):
        if number == 3:
            inputs = dict(_proto_input(entry) for field_number, entry in _fields(datum) if field_number == 2)
            yield {"loss_fn_inputs": inputs}


def _proto_input(entry: bytes) -> tuple[str, dict[str, Any]]:
    parts = dict(_fields(entry))
    tensor = dict(_fields(parts[2]))
    octets = tensor.get(1, b"")
    kind, size = ("q", 8) if tensor.get(3) == 2 else ("f", 4)
    return parts[1].decode(), {"data": list(struct.unpack(f"<{len(octets) // size}{kind}", octets))}


def _plain_body(asked: Asked) -> bytes:
    coding = asked.headers.get("content-encoding", "")
    if coding == "zstd":
        from tinker_sync.wire import zstd

        return zstd.decompress(asked.body, limit=1 << 30)
    return zlib.decompress(asked.body, 31) if coding == "gzip" else asked.body


# ------------------------------------------------------------------------------------ HTTP


# A buffer of this size, filled with zeros, for each TLS connection; asyncio would take 256 KB.
sslproto.SSLProtocol.max_size = 32 * 1024  # type: ignore[misc]


@lru_cache(maxsize=1024)  # most lines come again and again
def _header(line: bytes) -> tuple[str, str]:
    name, _, value = line.decode("latin-1").partition(":")
    return name.strip().lower(), value.strip()


class _Connection(asyncio.BufferedProtocol):
    """One keep-alive connection; requests are answered one after another.

    The bytes of a large body are received directly into its own buffer, so that the stub takes little CPU.
    """

    _count = 0

    def __init__(self, stub: Stub, tasks: set[asyncio.Task[None]]) -> None:
        self._stub = stub
        self._tasks = tasks
        self._received = bytearray()
        self._wanted = 0  # the size of the arriving request, when its head has arrived
        self._body: tuple[bytes, dict[str, str], bytearray] | None = None  # a large body, with its request
        self._scratch = self._room = stub.scratch
        self._busy = False
        stub.connections += 1
        _Connection._count += 1
        self._number = _Connection._count

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, count: int) -> None:
        if self._body is not None:
            self._room = self._room[count:]
            if not len(self._room):
                self._next()
            return
        self._received += self._scratch[:count]
        if len(self._received) >= self._wanted:
            self._next()

    def _next(self) -> None:
        if self._busy:
            return
        asked = self._take_request()
        if asked is None:
            return
        self._busy = True
        task = asyncio.get_running_loop().create_task(self._serve(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_request(self) -> Asked | None:
        if self._body is not None:
            first, headers, body = self._body
            self._body, self._room = None, self._scratch
            return self._asked(first, headers, body)
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return None
        first, *lines = bytes(self._received[:end]).split(b"\r\n")
        headers = dict(map(_header, lines))
        length = int(headers.get("content-length", 0))
        self._wanted = end + 4 + length
        if len(self._received) < self._wanted:
            if length > len(self._scratch):
                self._expect(first, headers, bytes(self._received[end + 4 :]), length)
            return None
        body = bytes(self._received[end + 4 : self._wanted])
        del self._received[: self._wanted]
        self._wanted = 0
        return self._asked(first, headers, body)

    def _expect(self, first: bytes, headers: dict[str, str], beginning: bytes, length: int) -> None:
        """Receive the rest of a large body into its own buffer."""
        body = bytearray(length)
        body[: len(beginning)] = beginning
        self._body, self._room = (first, headers, body), memoryview(body)[len(beginning) :]
        self._received, self._wanted = bytearray(), 0

    def _asked(self, first: bytes, headers: dict[str, str], body: bytes | bytearray) -> Asked:
        method, target, _ = first.decode("latin-1").split(" ", 2)
        url = urlsplit(target)
        query = parse_qs(url.query) if url.query else {}
        return Asked(method, url.path, query, headers, body, self._number)

    async def _serve(self, asked: Asked) -> None:
        answer = await self._stub.answer_always(asked)
        if answer.abort:
            self._transport.abort()
            return
        if answer.status == 0:
            return  # send nothing until the client gives up
        octets = answer.octets()
        head = [
            f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Status')}",
            *([] if answer.lasts_until_close else [f"Content-Length: {len(octets)}"]),
            f"Content-Type: {answer.content_type}",
            *(f"{name}: {value}" for name, value in answer.headers.items()),
        ]
        self._transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + octets)
        if answer.hang_up or answer.lasts_until_close:
            self._transport.close()
            return
        self._busy = False
        self._next()


class StubServer:
    """A stub in its own thread, on a free loopback port, which stops at the end of the `with` block."""

    def __init__(
        self,
        stub: Stub | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        http2: bool = False,
        **behaviour: Any,
    ) -> None:
        self.stub = stub or Stub(Behaviour(**behaviour))
        self._tls = tls
        self._http2 = http2
        self._loop = asyncio.new_event_loop()
        self._started: Future[int] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="stub-server")

    def __enter__(self) -> Stub:
        self._thread.start()
        self.port = self._started.result(120)
        scheme = "https" if self._tls else "http"
        self.url = self.stub.url = f"{scheme}://127.0.0.1:{self.port}"  # type: ignore[attr-defined]
        return self.stub

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await serve(self.stub, 0, self._started.set_result, self._stop, self._tls, http2=self._http2)


async def serve(
    stub: Stub,
    port: int,
    started: Callable[[int], object],
    stop: asyncio.Event,
    tls: ssl.SSLContext | None = None,
    *,
    http2: bool = False,
) -> None:
    """Serve until `stop`, then drop every connection. With `http2`, offer HTTP/2 beside HTTP/1.1 over TLS."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    connections: set[Any] = set()

    def connect() -> Any:
        connection = _Connection(stub, tasks)
        connections.add(connection)
        if not http2:
            return connection
        from support.http2_stub import ByProtocol

        return ByProtocol(stub, connection, tasks)

    if http2 and tls is not None:
        tls.set_alpn_protocols(["h2", "http/1.1"])
    server = await loop.create_server(connect, "127.0.0.1", port, backlog=4096, ssl=tls)
    started(server.sockets[0].getsockname()[1])
    await stop.wait()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(3):  # new connections need some turns of the loop before they can be closed
        await asyncio.sleep(0)
    server.close()
    stopping = list(tasks)
    for task in stopping:
        task.cancel()
    await asyncio.gather(*stopping, return_exceptions=True)
    for connection in (*connections, *stub.http2):
        if hasattr(connection, "_transport"):
            connection._transport.abort()
    await asyncio.sleep(0)


def main(kind: type[Stub] = Stub) -> None:
    parser = argparse.ArgumentParser(description="A deterministic training server on loopback.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds a sample takes")
    parser.add_argument("--hold", type=float, default=30.0, help="seconds a long poll is held")
    parser.add_argument("--config", default="{}", help="flags of client/config, as JSON")
    parser.add_argument("--tls", help="speak TLS with the certificate and key in this file")
    parser.add_argument("--http2", action="store_true", help="offer HTTP/2 over TLS")
    options = parser.parse_args()
    config = {"fwdbwd_max_chunk_len": 1024, **json.loads(options.config)}
    stub = kind(Behaviour(config=config, latency_s=options.latency, hold_s=options.hold))
    stub.keep_log = False
    tls = None
    if options.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.tls)

    async def run() -> None:
        stop = asyncio.Event()
        parent = os.getppid()

        async def follow_parent() -> None:
            while os.getppid() == parent:
                await asyncio.sleep(1)
            stop.set()

        following = asyncio.ensure_future(follow_parent())
        await serve(stub, options.port, say, stop, tls, http2=options.http2)
        following.cancel()

    asyncio.run(run())


def say(port: int) -> None:
    print(port, flush=True)  # noqa: T201  # to the process that started this one


if __name__ == "__main__":
    main()
