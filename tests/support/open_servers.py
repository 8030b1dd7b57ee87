"""Doubles of the open servers of the protocol that users run, each with the peculiarities of one server.

They are subclasses of the deterministic stub, so tests can script them, and their results are the same. The
docstring of each class has its differences. Two inputs make a promise fail: a checkpoint called `fails`, and
the token 666 in a prompt.

    with StubServer(TxLike()) as stub: ...
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

from support import open_routes
from support.tinker_stub import _POSTS, JSON, PROTO, Answer, Asked, Behaviour, Stub, _fields, _plain_body

BAD_TOKEN = 666
BAD_NAME = "fails"
_CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9_-]{1,255}")
_NUMBERED = ("/forward_backward", "/forward", "/optim_step", "/save_weights", "/save_weights_for_sampler")


class OpenServer(Stub):
    """The base of all open servers: ids have no structure, and the status of a poll is the work's outcome."""

    name = "open"
    offers_forward = True
    absent: frozenset[str] = frozenset(
        {
            *("/client/dynamic_config", "/auth/token", "/join_sampling_session", "/retrieve_futures"),
            *("/cancel_future", "/save_weights_external", "/create_custom_loss", "/copy_weights"),
        }
    )
    config: ClassVar[dict[str, Any] | None] = None
    json_bodies = True
    proto_bodies = False
    accepted_status = 200
    routes: ClassVar[open_routes.Routes] = ()
    """The routes other than those for training and sampling."""
    bodies: ClassVar[dict[str, Any]] = {}
    """The fields of bodies that the server publishes, by the name of the call."""
    publishes = True
    lists_models = ("stub/model",)
    context: int | None = None
    """The context length of its models, if it reports one."""

    def __init__(self, **behaviour: Any) -> None:
        options: dict[str, Any] = {"sequence_ids": False, "proto_results": False, "hold_s": 300.0}
        super().__init__(Behaviour(config=self.config, dynamic_config=None, **{**options, **behaviour}))
        self.samplers: dict[str, str] = {}
        """The path or the model that each sampler samples from, by the id of the sampler."""
        self.checkpoints: set[str] = set()

    def description(self) -> dict[str, Any]:
        """Return the content of `/openapi.json`, which describes this server."""
        return open_routes.describe(tuple(sorted(set(_POSTS) - self.missing())), self.routes, self.bodies)

    def missing(self) -> frozenset[str]:
        """Return the routes for training and sampling that this server lacks."""
        without_config = {"/client/config"} if self.config is None else set()
        return self.absent | without_config | (set() if self.offers_forward else {"/forward"})

    def on_capabilities(self, asked: Asked) -> Any:
        length = {} if self.context is None else {"max_context_length": self.context}
        return {"supported_models": [{"model_name": name, **length} for name in self.lists_models]}

    def on_unload_model(self, asked: Asked) -> Any:
        model_id = asked.json()["model_id"]
        del self._models[model_id]
        return self.promise("unload_model", {"model_id": model_id, "type": "unload_model"})

    async def _answer_as_usual(self, asked: Asked, name: str) -> Answer:
        if name == "/openapi.json" and self.publishes:
            return Answer(body=self.description())
        if name in self.missing():
            return Answer(404, {"detail": "Not Found"})
        if name in _POSTS and asked.method != "POST":
            return Answer(405, {"detail": "Method Not Allowed"}, headers={"Allow": "POST"})
        refusal = self.refusal(asked, name)
        if refusal is not None:
            return refusal
        answer = await super()._answer_as_usual(asked, name)
        if isinstance(answer.body, dict) and "request_id" in answer.body:
            answer.status = self.accepted_status
        return answer

    # ------------------------------------------------------------------------------- refusals

    def refusal(self, asked: Asked, name: str) -> Answer | None:
        """Return None if this server accepts a request, else the refusal of the request."""
        if asked.headers.get("content-type", "").startswith(PROTO):
            return None if self.proto_bodies else self.refuse_proto(asked)
        if name == "/forward_backward" and not self.json_bodies:
            return Answer(415, {"detail": "Content-Type must be application/x-protobuf"})
        if asked.method != "POST" or not asked.body:
            return None
        check: Callable[[dict[str, Any]], str | None] | None = getattr(self, f"check_{name.strip('/')}", None)
        body = asked.json()
        problem = check(body) if check else None
        if problem is None and name in _NUMBERED and not self.is_model(body.get("model_id")):
            return Answer(404, {"detail": "Model not found"})
        return Answer(422, {"detail": problem}) if problem else None

    def is_model(self, model_id: object) -> bool:
        return model_id in self._models

    def refuse_proto(self, asked: Asked) -> Answer:
        """Return the refusal of a protobuf body, which this server takes for JSON.

        It is a 422, which quotes the body. If the body is not UTF-8, the server fails with a 500 instead.
        """
        try:
            asked.body.decode()
        except UnicodeDecodeError:
            return Answer(
                500, b"Internal Server Error", content_type="text/plain; charset=utf-8", hang_up=True
            )
        complaint = {"type": "model_attributes_type", "loc": ["body"], "msg": "Input should be an object"}
        return Answer(422, {"detail": [complaint]})

    def check_optim_step(self, body: dict[str, Any]) -> str | None:
        return None if "adam_params" in body else "adam_params: Field required"

    def check_forward(self, body: dict[str, Any]) -> str | None:
        return self._check_data(body.get("forward_input"))

    def check_forward_backward(self, body: dict[str, Any]) -> str | None:
        return self._check_data(body.get("forward_backward_input"))

    def _check_data(self, given: Any) -> str | None:
        if not isinstance(given, dict):
            return "Field required"
        for datum in given["data"]:
            for tensor in datum["loss_fn_inputs"].values():
                if "sparse_crow_indices" in tensor or len(tensor.get("shape") or [0]) > 1:
                    return "only flat tensors"
        return None

    def check_asample(self, body: dict[str, Any]) -> str | None:
        params = body["sampling_params"]
        if params.get("max_tokens", 0) < 1:
            return "max_tokens: Input should be greater than 0"
        if isinstance(params.get("stop"), str):
            return "stop: Input should be a valid list"
        if body["sampling_session_id"] not in self.samplers:
            return "no such sampling session"
        return None

    def check_save_weights(self, body: dict[str, Any]) -> str | None:
        path = body.get("path")
        return (
            None if path is None or _CHECKPOINT_NAME.fullmatch(path) else "path: String should match pattern"
        )

    def check_save_weights_for_sampler(self, body: dict[str, Any]) -> str | None:
        return self.check_save_weights(body)

    # ------------------------------------------------------------------------------- results

    def new_model_id(self) -> str:
        return f"model_{self.count('model'):08x}"

    def new_sampler_id(self, source: str) -> str:
        sampler = f"sampling_{self.count('sampler'):08x}"
        self.samplers[sampler] = source
        return sampler

    def on_create_model(self, asked: Asked) -> Any:
        model_id = self.new_model_id()
        self._models[model_id] = asked.json()
        return self.promise("create_model", {"model_id": model_id, "type": "create_model"}, model_id=model_id)

    def on_create_sampling_session(self, asked: Asked) -> Any:
        body = asked.json()
        path = body.get("model_path")
        if path is not None and path not in self.checkpoints:
            return Answer(404, {"detail": "Checkpoint not found"})
        return {"sampling_session_id": self.new_sampler_id(path or body["base_model"])}

    def on_save_weights(self, asked: Asked) -> Any:
        body = asked.json()
        return self._saved("save_weights", body, f"tinker://{body['model_id']}/weights/{body['path']}")

    def on_save_weights_for_sampler(self, asked: Asked) -> Any:
        body = asked.json()
        if body.get("path") is None:
            return self.ephemeral(body)
        return self._saved("save_weights_for_sampler", body, self.sampler_path(body))

    def sampler_path(self, body: dict[str, Any]) -> str:
        return f"tinker://{body['model_id']}/sampler_weights/{body['path']}"

    def ephemeral(self, body: dict[str, Any]) -> Any:
        """Return the answer to a save without a name: the id of a new sampler."""
        made = {"sampling_session_id": self.new_sampler_id(body["model_id"]), "path": None}
        return self.promise("save_weights_for_sampler", made)

    def _saved(self, kind: str, body: dict[str, Any], path: str) -> Any:
        self.checkpoints.add(path)
        made = self.promise(kind, {"path": path, "type": kind})
        if body["path"] == BAD_NAME:
            self._promises[made["request_id"]].failure = self.failed("No space left")  # type: ignore[assignment]
        return made

    def on_asample(self, asked: Asked) -> Any:
        made = super().on_asample(asked)
        prompt = asked.json()["prompt"]["chunks"]
        if isinstance(made, dict) and any(BAD_TOKEN in chunk.get("tokens", ()) for chunk in prompt):
            self._promises[made["request_id"]].failure = self.failed("Token out of range")  # type: ignore[assignment]
        return made

    def failed(self, message: str) -> Answer:
        """Return the response to a poll for a promise whose work has failed."""
        return Answer(400, {"detail": message})

    def on_load_weights(self, asked: Asked) -> Any:
        body = asked.json()
        return self.promise("load_weights", {"path": body["path"], "type": "load_weights"})

    def on_other(self, asked: Asked, name: str) -> Any:
        refusal = open_routes.match(self.routes, asked.method, name)
        if refusal is not None:
            return refusal
        parts = name.strip("/").split("/")
        if parts[0] == "unload_model":
            return self.on_unload_model(asked)
        if parts[0] == "samplers" and parts[-1] not in self.samplers:
            return Answer(404, {"detail": "Sampler not found"})
        if parts[0] in ("training_runs", "models") and len(parts) > 1 and parts[1] not in self._models:
            return Answer(404, {"detail": "Model not found"})
        return super().on_other(asked, name)


def _without_first_logprob(stub: Stub, made: Any) -> Any:
    """Remove the first prompt score from a sample's result. Some servers leave it out, because it is null."""
    promise = stub._promises[made["request_id"]]
    if promise.content_type == JSON:
        payload = json.loads(promise.payload)
        if payload.get("prompt_logprobs"):
            payload["prompt_logprobs"] = payload["prompt_logprobs"][1:]
            promise.payload = json.dumps(payload).encode()
    return made


class TxLike(OpenServer):
    """A server of JSON only, without a settings call.

    It ignores sequence numbers, and its results of passes have more fields.
    """

    name = "tx"
    routes = open_routes.TX
    bodies = open_routes.TX_BODIES
    pass_s = 0.0
    """The duration of a pass."""

    def __init__(self, **behaviour: Any) -> None:
        super().__init__(**behaviour)
        self.applied: list[int] = []
        """For each `optim_step`, the number of passes whose gradients it applied."""
        self._ends: list[float] = []

    def _passed(self, data: list[Any]) -> Any:
        made = super()._passed(data)
        promise = self._promises[made["request_id"]]
        promise.ready_at += self.pass_s
        self._ends.append(promise.ready_at)
        payload = json.loads(promise.payload)
        for output in payload["loss_fn_outputs"]:
            scores = output["logprobs"]
            losses = [-value for value in scores["data"]]
            output["elementwise_loss"] = {"data": losses, "dtype": "float32", "shape": scores["shape"]}
        payload["loss_fn_output_type"] = "scalar"
        payload["metrics"] = {"total_loss:sum": payload["metrics"]["loss:sum"]}
        promise.payload = json.dumps(payload).encode()
        return made

    def on_optim_step(self, asked: Asked) -> Any:
        """Apply the gradients of the passes that have ended, and ignore those of waiting passes."""
        now = asyncio.get_running_loop().time()
        ready = [end for end in self._ends if end <= now]
        self._ends = [end for end in self._ends if end > now]
        self.applied.append(len(ready))
        return self.promise("optim_step", {"metrics": {"grad_norm": 0.5, "learning_rate": 1e-4}})

    def on_asample(self, asked: Asked) -> Any:
        return _without_first_logprob(self, super().on_asample(asked))


class TxBehindSettings(TxLike):
    """A `TxLike` that answers 500 to protobuf, and whose settings do not show this."""

    name = "tx with settings"
    config: ClassVar[dict[str, Any] | None] = {"pjwt_auth_enabled": False}

    def refuse_proto(self, asked: Asked) -> Answer:
        return Answer(500, b"Internal Server Error", content_type="text/plain; charset=utf-8", hang_up=True)


class SkyLike(OpenServer):
    """A server that takes JSON and protobuf, and whose settings do not show this.

    It accepts only one body under a sequence number, and loads weights into a model only before other calls.
    """

    name = "sky"
    routes = open_routes.SKY
    bodies = open_routes.SKY_BODIES
    config: ClassVar[dict[str, Any] | None] = {"pjwt_auth_enabled": False}
    proto_bodies = True

    def __init__(self, **behaviour: Any) -> None:
        super().__init__(**behaviour)
        self._by_number: dict[tuple[str, int], tuple[str, Answer]] = {}

    async def _answer_as_usual(self, asked: Asked, name: str) -> Answer:
        counts = asked.method == "POST" and name in (*_NUMBERED, "/load_weights")
        number = self._number(asked) if counts else None
        if number is None:
            return await super()._answer_as_usual(asked, name)
        digest = hashlib.sha256(asked.body).hexdigest()
        known = self._by_number.get(number)
        if known is not None:
            return known[1] if known[0] == digest else Answer(409, {"detail": "seq_id was used before"})
        answer = await super()._answer_as_usual(asked, name)
        if answer.status < 300:
            self._by_number[number] = (digest, answer)
        return answer

    def _number(self, asked: Asked) -> tuple[str, int] | None:
        if asked.headers.get("content-type", "").startswith(PROTO):
            fields = dict(_fields(_plain_body(asked)))
            model_id, seq_id = fields.get(1, b"").decode(), fields.get(2)
        else:
            body = asked.json()
            model_id, seq_id = body.get("model_id"), body.get("seq_id")
        return None if model_id is None or seq_id is None else (model_id, seq_id)

    def refusal(self, asked: Asked, name: str) -> Answer | None:
        if asked.headers.get("content-type", "").startswith(PROTO):
            number = self._number(asked)
            if number is None or not self.is_model(number[0]):
                return Answer(404, {"detail": "Model not found"})
        return super().refusal(asked, name)

    def on_load_weights(self, asked: Asked) -> Any:
        body = asked.json()
        if any(model_id == body["model_id"] for model_id, _ in self._by_number):
            return Answer(400, {"detail": "load_weights must be the first request of a model"})
        return super().on_load_weights(asked)

    async def on_retrieve_future(self, asked: Asked) -> Any:
        answer = await super().on_retrieve_future(asked)
        if (
            isinstance(answer, Answer)
            and answer.content_type == PROTO
            and PROTO not in asked.headers["accept"]
        ):
            return Answer(406, {"detail": "this result comes as protobuf"})
        return answer

    def on_asample(self, asked: Asked) -> Any:
        return _without_first_logprob(self, super().on_asample(asked))


class SkyWithoutMetrics(SkyLike):
    """A `SkyLike` of the newest version, whose results have no metrics."""

    name = "sky without metrics"

    def _passed(self, data: list[Any]) -> Any:
        made = super()._passed(data)
        promise = self._promises[made["request_id"]]
        promise.payload = json.dumps({**json.loads(promise.payload), "metrics": {}}).encode()
        return made


class TuftLike(OpenServer):
    """A server like TuFT, with the schema of version 0.25 of the hosted service.

    It takes only bodies in protobuf, needs a key, and answers 202 to accepted requests.
    """

    name = "tuft"
    routes = open_routes.TUFT
    json_bodies = False
    proto_bodies = True
    offers_forward = False
    accepted_status = 202
    config: ClassVar[dict[str, Any] | None] = {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        "sample_dispatch_bytes_semaphore_size": 10_485_760,
        "inflight_response_bytes_semaphore_size": 52_428_800,
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_len": 1024,
        "fwdbwd_max_chunk_bytes_count": 5_000_000,
    }

    def __init__(self, **behaviour: Any) -> None:
        self.lists_openly = behaviour.pop("lists_openly", False)
        super().__init__(**{"proto_results": True, "key": "tml-open", **behaviour})

    async def _answer_as_usual(self, asked: Asked, name: str) -> Answer:
        if self.lists_openly and name == "/get_server_capabilities":
            return Answer(body=self.on_capabilities(asked))
        return await super()._answer_as_usual(asked, name)

    def failed(self, message: str) -> Answer:
        return Answer(422, {"detail": f"Future failed: {message}"})

    def check_asample(self, body: dict[str, Any]) -> str | None:
        return None if body["sampling_session_id"] in self.samplers else "no such sampling session"


class OpenRlLike(OpenServer):
    """A server that takes only JSON, and has four settings.

    Its ids are UUIDs, and sampler paths have one or two segments.
    """

    name = "open-rl"
    routes = open_routes.OPEN_RL
    offers_forward = False
    config: ClassVar[dict[str, Any] | None] = {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        "sample_dispatch_bytes_semaphore_size": 10_485_760,
        "inflight_response_bytes_semaphore_size": 52_428_800,
    }

    def new_model_id(self) -> str:
        return f"5f3d0000-0000-4000-8000-{self.count('model'):012x}"

    def new_sampler_id(self, source: str) -> str:
        model = source.removeprefix("tinker://").split("/")[0]
        sampler = f"{model}-samp-{self.count('sampler')}"
        self.samplers[sampler] = source
        return sampler

    def sampler_path(self, body: dict[str, Any]) -> str:
        return f"tinker://{body['model_id']}/{body['path']}"

    def ephemeral(self, body: dict[str, Any]) -> Any:
        path = f"tinker://{body['model_id']}"
        self.checkpoints.add(path)
        return self.promise("save_weights_for_sampler", {"path": path})

    def failed(self, message: str) -> Answer:
        return Answer(400, {"type": "RequestFailedResponse", "error_message": message})


ALL = (TxLike, TxBehindSettings, SkyLike, TuftLike, OpenRlLike)
