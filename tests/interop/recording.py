"""A server that records the requests of a client, and a form in which the requests of two clients compare.

The form leaves out permitted differences: the name of the client, the times and number of polls, the order of
concurrent requests, and requests in the background (heartbeats, telemetry).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

import numpy as np
from google.protobuf.json_format import MessageToDict
from interop.conftest import CREATION_REQUESTS, DEFAULTS
from support.tinker_stub import API, PROTO, Answer, Asked, Behaviour, Promise, Stub
from tinker.proto import tinker_public_pb2 as pb

from tinker_sync.local import tiny
from tinker_sync.wire import zstd

BACKGROUND = ("/session_heartbeat", "/telemetry")
# The comparison ignores the number of these requests and their step. Several parts of the reference client
# request the settings and tokens separately, and this package requests them once. A poll for all samples may
# last into the next step.
AT_ANY_TIME = ("/client/config", "/client/dynamic_config", "/auth/token", "/retrieve_futures")
# This package asks older servers for their features, so that it refuses missing ones instead of ignoring
# them.
NOT_COMPARED = ("/get_server_capabilities", "/openapi.json")
# This package makes these calls at the same time as that for the settings, so before it knows that the server
# exchanges keys for tokens.
BESIDE_SETTINGS = ("/client/dynamic_config", "/create_session")
TRAINING = (
    "/forward_backward", "/optim_step", "/save_weights", "/save_weights_for_sampler",
    "/save_weights_external", "/load_weights",
)  # fmt: skip
CLONE_BLOCK = 10**9

FAILURES = {
    "fail-user": {"error": "there is no room", "category": "user"},
    "fail-server": {"error": "there is no room", "category": "server"},
    "fail-moon": {"error": "there is no room", "category": "moon"},
}


class RecordingStub(Stub):
    """A deterministic stub whose answers use every field. It records marks between the steps of a script."""

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(behaviour)
        self.recorded: list[tuple[str, Asked, dict[str, Any]]] = []
        """The step, the request, and the answer if it was a JSON object."""
        self._step = "start"
        self._refusals: dict[str, int] = {}

    async def answer(self, asked: Asked) -> Answer:
        name = asked.path.removeprefix(API)
        if name.startswith("/mark/"):
            return self._mark(name.removeprefix("/mark/"))
        told: dict[str, Any] = {}
        self.recorded.append((self._step, asked, told))
        status = self._refusals.pop(name.split("/")[1], None)
        answer = Answer(status, {"detail": "not this time"}) if status else await super().answer(asked)
        if isinstance(answer.body, dict):
            told.update(answer.body)
        return answer

    def _mark(self, mark: str) -> Answer:
        kind, _, rest = mark.partition("/")
        if kind == "step":
            self._step = rest
        else:
            status, _, path = rest.partition("/")
            self._refusals[path] = int(status)
        return Answer(body={})

    # ---------------------------------------------------------------------- answers with all fields

    def on_save_weights(self, asked: Asked) -> Any:
        made = super().on_save_weights(asked)
        self._promises[made["request_id"]].failure = FAILURES.get(asked.json()["path"])
        return made

    def on_get_info(self, asked: Asked) -> Any:
        told = super().on_get_info(asked)
        # The tokenizer is a directory, so that both clients find it without a network.
        return {**told, "model_data": {**told["model_data"], "tokenizer_id": str(tiny.directory())}}

    def on_weights_info(self, asked: Asked) -> Any:
        return {
            "base_model": "stub/model",
            "is_lora": True,
            "lora_rank": 12,
            "train_mlp": False,
            "train_attn": None,
            "optimizer_config": {"type": "dimuon", "version": 1},
        }

    def on_asample(self, asked: Asked) -> Any:
        made = super().on_asample(asked)
        body = asked.json()
        promise: Promise = self._promises[made["request_id"]]
        response = pb.SampleResponse.FromString(promise.payload)
        _add_what_was_asked(response, body)
        promise.payload = response.SerializeToString()
        return made

    def on_forward_backward(self, asked: Asked) -> Any:
        made = super().on_forward_backward(asked)
        widths = _widths(pb.ForwardBackwardRequest.FromString(_octets(asked)))
        if len(widths) == 1 and None not in widths:
            promise: Promise = self._promises[made["request_id"]]
            output = pb.ForwardBackwardOutput.FromString(promise.payload)
            output.loss_fn_outputs[0].fields["logprobs"].trailing_shape.extend(widths)
            promise.payload = output.SerializeToString()
        return made

    def _passed(self, data: list[Any]) -> Any:
        made = super()._passed(data)
        promise: Promise = self._promises[made["request_id"]]
        output = pb.ForwardBackwardOutput.FromString(promise.payload)
        _add_fields(output, len(data))
        # The number depends on the request, not on its time, because chunks may arrive in any order.
        output.metrics["clock_cycle:unique"] = sum(data[0]["loss_fn_inputs"]["target_tokens"]["data"]) % 1000
        promise.payload = output.SerializeToString()
        return made


def _widths(request: Any) -> set[int | None]:
    """Return the set of widths of `target_tokens` in the data, with None for one-dimensional targets.

    The width is the number of candidates for each token.
    """
    shapes = [datum.loss_fn_inputs["target_tokens"].shape for datum in request.data]
    return {shape[1] if len(shape) == 2 else None for shape in shapes}


def _floats(values: Iterable[float]) -> bytes:
    return np.asarray(list(values), dtype="<f4").tobytes()


def _topk(rows: int, k: int) -> pb.TopkLogprobs:
    ids = np.arange(rows * k, dtype="<i4")
    return pb.TopkLogprobs(
        token_ids=ids.tobytes(), logprobs=_floats(-ids.astype("f4") / 10), k=k, length=rows
    )


def _add_what_was_asked(response: Any, body: dict[str, Any]) -> None:
    prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk.get("tokens", ())]
    response.prompt_cache_hit_tokens = len(prompt) // 2
    last_n = body.get("prompt_logprobs_last_n")
    if last_n and response.HasField("prompt_logprobs"):
        scored = np.frombuffer(response.prompt_logprobs, dtype="<f4").copy()
        scored[:-last_n] = np.nan
        response.prompt_logprobs = scored.tobytes()
    if k := body["topk_prompt_logprobs"]:
        response.topk_prompt_logprobs.CopyFrom(_topk(len(prompt), k))
    if k := body["topk_sample_logprobs"]:
        for sequence in response.sequences:
            sequence.topk_sampled_logprobs.CopyFrom(_topk(len(sequence.tokens) // 4, k))
    if targets := body.get("target_prompt_logprobs"):
        shape = targets["shape"]
        values = [0.0 if token < 0 else -token / 7 for token in targets["data"]]
        tensor = pb.Tensor(dense=_floats(values), dtype=pb.DTYPE_FLOAT32, shape=shape)
        response.target_prompt_logprobs.CopyFrom(tensor)
    if k := body["prompt_alt_tokens_k"]:
        shape = [len(prompt) - 1, k]
        count = shape[0] * k
        tokens = pb.Tensor(dense=np.arange(count, dtype="<i4").tobytes(), dtype=pb.DTYPE_INT32, shape=shape)
        scores = pb.Tensor(dense=_floats(range(-count, 0)), dtype=pb.DTYPE_FLOAT32, shape=shape)
        response.prompt_alt_tokens.CopyFrom(pb.PromptAltTokens(tokens=tokens, logprobs=scores))
    for index, sequence in enumerate(response.sequences):
        sequence.stop_reason = index % 2


def _add_fields(output: Any, count: int) -> None:
    """Add fields of bfloat16 and int32 to an output, and metrics of several reductions."""
    record = output.loss_fn_outputs[0]
    elements = np.arange(2 * count, dtype="<f4")
    record.fields["elementwise_loss"].CopyFrom(
        pb.BatchedTensor(
            data=(elements.view("<u4") >> 16).astype("<u2").tobytes(),
            offsets=np.arange(0, 4 * count + 1, 4, dtype="<i8").tobytes(),
            dtype=pb.DTYPE_BFLOAT16,
        )
    )
    record.fields["ids"].CopyFrom(
        pb.BatchedTensor(
            data=np.arange(4 * count, dtype="<i4").tobytes(),
            offsets=np.arange(0, 16 * count + 1, 16, dtype="<i8").tobytes(),
            dtype=pb.DTYPE_INT32,
            trailing_shape=[2],
        )
    )
    for name, value in {
        "a:mean": 0.1 * count,
        "b:min": -count,
        "b:max": count,
        "e:slack": count,
        "f:hash2": 2.0**63 + count,
    }.items():
        output.metrics[name] = value


# ------------------------------------------------------------------------------------ comparison


def steps(stub: RecordingStub) -> dict[str, list[Any]]:
    """Return the requests of each step, by its name, in a form that is equal for clients that behave equally.

    The list of a step has its requests, sorted by their JSON text, and then for each model the sequence
    numbers of its training requests, see `sorted_batches`. The key "any time" has the requests of
    `AT_ANY_TIME`, each only once.
    """
    labels = _labels(stub)
    made: dict[str, list[Any]] = defaultdict(list)
    any_time: set[str] = set()
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for step, asked, _ in stub.recorded:
        name = asked.path.removeprefix(API)
        if name in BACKGROUND or any(name.startswith(each) for each in CREATION_REQUESTS):
            continue
        request = _request(asked, labels)
        if name in NOT_COMPARED:
            continue
        if name in BESIDE_SETTINGS:
            del request["headers"]["x-api-key"]
        if name in AT_ANY_TIME:
            any_time.add(_text(request))
            continue
        if name != "/retrieve_future" or request not in made[step]:
            made[step].append(request)
        if name in TRAINING and "model_id" in request["body"]:
            numbers[step, request["body"]["model_id"]].append(request["body"]["seq_id"])
    ordered: dict[str, list[Any]] = {step: sorted(requests, key=_text) for step, requests in made.items()}
    for (step, model), arrived in numbers.items():
        ordered[step].append({"order of": model, "is": sorted_batches(arrived)})
    ordered["any time"] = sorted(any_time)
    return ordered


def sorted_batches(numbers: list[int]) -> list[int]:
    """Return sequence numbers in order of arrival, with those sorted whose order does not matter.

    The first chunk of a pass must arrive last. The order of its other chunks does not matter.

    >>> sorted_batches([3, 2, 4, 1, 5, 7, 6])
    [2, 3, 4, 1, 5, 7, 6]
    >>> sorted_batches([1, 3, 2])
    [1, 3, 2]
    """
    made: list[int] = []
    expected, early = min(numbers), []
    for number in numbers:
        if number == expected:
            made += [*sorted(early), number]
            expected += 1 + len(early)
            early = []
        else:
            early.append(number)
    return made + early


_IDS = ("model_id", "sampling_session_id", "session_id", "model_seq_id", "seq_id")


def _labels(stub: RecordingStub) -> dict[str, str]:
    """Return a name for each promise, by its request id. The name depends only on the promise's request."""
    labels = {}
    for _, asked, told in stub.recorded:
        if "request_id" in told:
            body = _body(asked)
            known = [f"{name}={body[name]}" for name in _IDS if name in body]
            labels[told["request_id"]] = " ".join([asked.path.removeprefix(API), *known])
    return labels


# The headers that a server of this protocol reads, and those of the user.
_HEADERS = (
    "content-type", "content-encoding", "x-api-key", "x-tinker-request-type",
    "x-tinker-sampling-backpressure", "x-of-mine", "x-tinker-other", "cf-access-client-id",
    "cf-access-client-secret",
)  # fmt: skip


def _request(asked: Asked, labels: dict[str, str]) -> dict[str, Any]:
    name = asked.path.removeprefix(API)
    headers = {each: asked.headers[each] for each in _HEADERS if each in asked.headers}
    # This package accepts JSON too, because older servers send it. Only the acceptance of protobuf is
    # compared.
    headers["accept"] = "protobuf" if PROTO in asked.headers["accept"] else asked.headers["accept"]
    body = _body(asked)
    if name == "/retrieve_futures":
        body = {"target": body["target"]}
    if "tags" in body:
        body["tags"] = sorted(body["tags"])  # the reference client sends them in random order
    if isinstance(body.get("request_id"), str):
        body["request_id"] = labels.get(body["request_id"], "unknown")
    return {
        "method": asked.method,
        "path": unquote(name),
        "query": asked.query,
        "headers": headers,
        "body": body,
    }


def _body(asked: Asked) -> dict[str, Any]:
    if not asked.body:
        return {}
    if not asked.headers.get("content-type", "").startswith(PROTO):
        tree: dict[str, Any] = without_chance(json.loads(asked.body))
        # The clients announce different versions.
        return {
            name: value
            for name, value in tree.items()
            if name != "sdk_version" and DEFAULTS.get(name) != value
        }
    message = pb.ForwardBackwardRequest.FromString(_octets(asked))
    return MessageToDict(message, preserving_proto_field_name=True)


def _octets(asked: Asked) -> bytes:
    if asked.headers.get("content-encoding") == "zstd":
        return zstd.decompress(asked.body, limit=1 << 30)
    return bytes(asked.body)


def without_chance(tree: Any) -> Any:
    """Return a request or result in which numbers of a randomly drawn block are positions in the block."""
    if isinstance(tree, dict):
        return {name: without_chance(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [without_chance(value) for value in tree]
    if isinstance(tree, int) and not isinstance(tree, bool) and tree >= 100 * CLONE_BLOCK:
        return f"some block + {tree % CLONE_BLOCK}"
    if isinstance(tree, str):
        return _SEQUENCE_ID.sub(lambda found: f":some block + {int(found[1]) % CLONE_BLOCK}:", tree)
    return tree


_SEQUENCE_ID = re.compile(r":(\d{12,}):")


def _text(tree: Any) -> str:
    """Return JSON text with sorted names, in which 1 and 1.0 differ."""
    return json.dumps(tree, sort_keys=True)


def own_rules_broken(stub: RecordingStub) -> Iterator[str]:
    """Yield a description of each breach of the rules about idempotency keys and about headers of polls."""
    iterations: dict[str, list[str]] = defaultdict(list)
    keys: dict[str, str] = {}
    for step, asked, _ in stub.recorded:
        name = asked.path.removeprefix(API)
        if name == "/retrieve_future":
            iteration = asked.headers.get("x-tinker-request-iteration", "none")
            iterations[asked.json()["request_id"]].append(iteration)
            timed = "x-tinker-create-promise-roundtrip-time" in asked.headers
            if timed != (iteration == "0"):
                yield f"{step}: round trip reported at iteration {iteration}"
        elif asked.method != "GET" and name not in (*BACKGROUND, "/retrieve_futures"):
            key = asked.headers.get("x-idempotency-key", "")
            if not key:
                yield f"{step}: {name} without an idempotency key"
            elif keys.setdefault(key, asked.path + str(asked.body)) != asked.path + str(asked.body):
                yield f"{step}: one idempotency key for two requests: {name}"
    for request_id, seen in iterations.items():
        if seen != [str(number) for number in range(len(seen))]:
            yield f"{request_id}: iterations {seen}"
