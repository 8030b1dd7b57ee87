"""Fields of a newer client change nothing: no call is refused, and each answer is the same."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.clock import FakeClock
from support.embedded import API, BASE, PROTO, Reply, Running, Wire, pass_body, running
from support.newer_fields import newer_json, newer_protobuf

from tinker_sync.types import LoraConfig
from tinker_sync.wire.endpoints import ENDPOINTS, NEWER, find

SEEDS = range(4)
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 0.5, 0.0], "dtype": "float32"},
    },
}
PASS = {"data": [DATUM, DATUM], "loss_fn": "cross_entropy"}


class Script:
    """A script that makes every call with a body, and keeps the answers without their random parts.

    Args:
        server: the server.
        spoil: changes each JSON body before it is sent.
        spoil_bytes: changes each protobuf body before it is sent.
    """

    def __init__(self, server: Running, spoil: Callable[[Any], Any], spoil_bytes: Callable[[bytes], bytes]):
        self._wire: Wire = server
        self._spoil, self._spoil_bytes = spoil, spoil_bytes
        self.answers: list[tuple[str, int, str]] = []
        self.asked: set[str] = set()
        self.ignored: set[str] = set()

    def ask(self, method: str, path: str, body: Any, **headers: str) -> Any:
        sent = self._spoil_bytes(body) if isinstance(body, bytes) else self._spoil(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = self._wire.ask(method, path, sent, named)
        while path == "/retrieve_future" and reply.status == 408:
            reply = self._wire.ask(method, path, sent, named)
        found = find(method, API + path)
        self.asked.add(found[0].name if found else path[1:].replace("/", "_"))
        self.answers.append((path, reply.status, _comparable(reply)))
        return reply.json() if reply.status == 200 else None

    def post(self, path: str, body: Any, **headers: str) -> Any:
        return self.ask("POST", path, body, **headers)

    def result(self, promise: Any) -> Any:
        return self.post("/retrieve_future", {"request_id": promise["request_id"]})

    def play(self) -> None:
        self.post("/client/config", {"sdk_version": "9.9"})
        self.post("/client/dynamic_config", {"sdk_version": "9.9"})
        self.post("/auth/token", {})
        opening = {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "9.9"}
        session = self.post("/create_session", opening)["session_id"]
        self.post("/session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
        self.post("/telemetry", {"session_id": session, "events": [], "platform": "p", "sdk_version": "9"})
        self.ask("PUT", f"/sessions/{session}/project", {"project_id": "p-1"})
        self.training(session)
        self.sampling(session)
        search = {"owner": {"type": "own"}, "limit": 5, "user_metadata": {}}
        self.post("/sessions/search", {**search, "statuses": [{"type": "active"}]})
        self.post("/checkpoints/search", search)
        self.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})

    def training(self, session: str) -> None:
        making = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "type": "create_model"}
        making |= {"lora_config": {"rank": 2, "seed": 1}, "optimizer_config": {"type": "adamw"}}
        model = self.result(self.post("/create_model", making))["model_id"]
        named = {"model_id": model}
        self.post("/get_info", {**named, "type": "get_info"})
        self.result(self.post("/forward", {**named, "forward_input": PASS, "seq_id": 1}))
        self.result(self.post("/forward_backward", {**named, "forward_backward_input": PASS, "seq_id": 2}))
        self.result(self.post("/forward_backward", pass_body(model, 3), content_type=PROTO))
        step = {**named, "adam_params": {"learning_rate": 0.01}, "seq_id": 4, "type": "optim_step"}
        self.result(self.post("/optim_step", step))
        step = {**named, "optim_params": {"type": "adamw", "learning_rate": 0.01}, "seq_id": 5}
        self.result(self.post("/optim_step", step))
        path = self.result(self.post("/save_weights", {**named, "path": "a", "seq_id": 6}))["path"]
        self.result(self.post("/save_weights_for_sampler", {**named, "path": "b", "seq_id": 7}))
        ephemeral = {**named, "sampling_session_seq_id": 9, "kind": "inflight", "seq_id": 8}
        self.result(self.post("/save_weights_for_sampler", ephemeral))
        self.result(self.post("/save_weights_external", {**named, "path": "c", "seq_id": 9}))
        self.result(self.post("/load_weights", {**named, "path": path, "optimizer": True, "seq_id": 10}))
        made = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
        self.result(self.post("/load_weights", made))
        self.post("/weights_info", {"tinker_path": path})
        self.post("/copy_weights", {"source_path": path, "destination_project_id": "p-2"})
        run, checkpoint = path.removeprefix("tinker://").split("/", 1)
        self.ask("PUT", f"/training_runs/{run}/checkpoints/{checkpoint}/ttl", {"ttl_seconds": 7200})
        upload = {"base_model": BASE, "lora_config": {"rank": 2}}
        started = self.post("/external_weights_upload_start", upload)
        self.post("/external_weights_upload_finish", {"upload_id": started["upload_id"]})
        graph = {"nodes": [{"name": "a", "op": "output", "target": "output", "args": [], "kwargs": {}}]}
        loss = {"session_id": session, "custom_loss_seq_id": 0, "name": "n", "inputs": [], "graph": graph}
        self.result(self.post("/create_custom_loss", loss))
        self.result(self.post("/unload_model", named))

    def sampling(self, session: str) -> None:
        opening = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = self.post("/create_sampling_session", opening)["sampling_session_id"]
        self.post("/join_sampling_session", {"sampling_session_id": sampler})
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        params = {"max_tokens": 5, "temperature": 1.0, "stop": ["."]}
        asked = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params, "seq_id": 0}
        promise = self.post("/asample", {**asked, "num_samples": 2, "prompt_logprobs": True})
        self.result(promise)
        self.post("/cancel_future", {"request_id": promise["request_id"]})
        target = {"type": "sampling_session", "sampling_session_id": sampler}
        self.post("/retrieve_futures", {"target": target, "timeout": 0})


def _comparable(reply: Reply) -> str:
    return re.sub(r"req-[0-9a-f]{8}-", "req-", reply.body.decode())


def played(directory: Path, rng: random.Random | None) -> Script:
    flags: dict[str, Any] = {"seed": 3, "clock": FakeClock(), "sample_use_retrieve_futures": True}
    with running(directory, **flags) as server:
        if rng is None:
            script = Script(server, lambda tree: tree, lambda data: data)
        else:
            script = Script(server, partial(newer_json, rng), partial(newer_protobuf, rng))
        script.play()
        address = f"127.0.0.1:{server.port}"  # with the host, because numbers can hold the digits of a port
        script.answers = [
            (path, status, text.replace(address, "HOST")) for path, status, text in script.answers
        ]
        script.ignored = set(server.app.service.ignored)
        return script


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return played(tmp_path_factory.mktemp("plain"), None)


def test_every_call_with_a_body_is_made(plain: Script) -> None:
    with_body = {row.name for row in (*ENDPOINTS.values(), *NEWER.values()) if row.body != "none"}
    renamed = {"checkpoints_search": "search_checkpoints"}
    assert {renamed.get(name, name) for name in plain.asked} == with_body
    refused = {(path, status) for path, status, _ in plain.answers if status != 200}
    assert refused == {("/external_weights_upload_finish", 409)}  # no file was put


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_are_the_same_with_fields_of_a_newer_client(
    plain: Script, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = played(tmp_path, random.Random(seed))
    assert newer.answers == plain.answers
    assert (plain.ignored, len(newer.ignored) > 20) == (set(), True)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# ------------------------------------------------------------------------------------------ reports
def test_each_unknown_field_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path) as server, caplog.at_level(logging.WARNING, "tinker_sync.local"):
        session = server.session(colour="red")
        for number in range(3):
            server.session(colour="blue")
            server.create_model(session, number, lora_config={"rank": 2, "taste": 1, "new\nline": 2})
        body = pass_body(f"{session}:train:0", 1) + bytes.fromhex("980101")
        assert server.post("/forward_backward", body, content_type=PROTO).status == 200
        ignored = server.get("/healthz").json()["ignored_fields"]
    names = ["CreateSessionRequest.colour", "ForwardBackwardRequest.19", "LoraConfig.taste"]
    assert ignored == sorted([*names, r"LoraConfig['new\nline']"])
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told) == [f"ignored {name}: this server does not know the field" for name in ignored]


def test_a_body_of_unknown_fields_costs_little(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.session(**{f"x{number}": number for number in range(5000)})
        assert len(server.get("/healthz").json()["ignored_fields"]) == 100
        for batch in range(30):
            server.session(**{f"y{batch}-{number}": number for number in range(100)})
        assert len(server.get("/healthz").json()["ignored_fields"]) == 1000


def test_values_of_known_fields_are_checked_as_before(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        session = server.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "colour": 1}
        reply = server.post("/create_model", {**body, "lora_config": {"rank": "many", "taste": 1}})
        assert (reply.status, "lora_config.rank" in str(reply.detail)) == (422, True)
        reply = server.post("/create_model", {**body, "optimizer_config": {"type": "sgd", "colour": 1}})
        assert (reply.status, "'sgd' is not computed" in reply.detail) == (400, True)


def test_types_stay_strict_towards_their_users() -> None:
    with pytest.raises(TypeError, match="did you mean"):
        LoraConfig(rank=1, sead=2)  # type: ignore[call-arg]  # the mistake is the point
