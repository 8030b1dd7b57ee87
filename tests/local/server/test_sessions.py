"""Sessions over HTTP, and the memory that they use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.embedded import BASE, Running, alive, running
from support.raising import raising
from support.stores import START

from tinker_sync.local.engine.lora import LoraParams
from tinker_sync.local.engine.training import AdapterTrainer
from tinker_sync.local.server import training
from tinker_sync.local.server.promises import Promise
from tinker_sync.local.server.state import CustomLoss, LiveModel, LiveSampler, LiveSession, Upload
from tinker_sync.types import ForwardBackwardOutput, SampleResponse


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, seed=1, hold_s=0.3, release_s=0.01, sweep_s=0.05) as made:
        yield made


def settled(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            return False
        threading.Event().wait(0.002)
    return True


def loss_of(session: str) -> dict[str, object]:
    """Return the body of a request that uploads a custom loss."""
    reference = {"ref": "logprobs"}
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        {"op": "call_method", "name": "total", "target": "sum", "args": [reference], "kwargs": {}},
    ]
    pair = {"tuple": [{"ref": "total"}, {"dict": {"custom/x:sum": {"ref": "total"}}}]}
    nodes.append({"op": "output", "name": "output", "target": "output", "args": [pair], "kwargs": {}})
    inputs, graph = [{"name": "logprobs", "rank": 1}], {"format": 1, "nodes": nodes}
    return {"session_id": session, "custom_loss_seq_id": 0, "name": "x", "inputs": inputs, "graph": graph}


def finish(server: Running, session: str, reason: str, detail: str | None = None) -> int:
    body = {"reason": {"type": reason}, "detail": detail}
    return server.post(f"/sessions/{session}/finish", body).status


def test_the_first_end_counts(server: Running) -> None:
    session = server.session(user_metadata={"a": 1, "b": {"c": 2}}, display_name="mine")
    assert server.ok("/session_heartbeat", {"session_id": session}) == {"type": "session_heartbeat"}
    assert finish(server, session, "errored", "it broke") == 200
    assert finish(server, session, "success") == 200
    found = server.ok("/sessions/search", {"session_id": session})["sessions"][0]
    assert found["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "it broke"}
    assert found["user_metadata"] == {"a": "1", "b": '{"c":2}'}
    assert server.post("/session_heartbeat", {"session_id": session}).status == 410
    assert (
        server.post("/create_model", {"session_id": session, "model_seq_id": 0, "base_model": BASE}).status
        == 410
    )
    assert server.sampler(session).status == 410


def test_invalid_ends_are_refused(server: Running) -> None:
    session = server.session()
    assert finish(server, session, "bored") == 422
    assert finish(server, "nobody", "success") == 404
    assert server.post(f"/sessions/{session}/finish", {}).status == 422
    assert server.post("/session_heartbeat", {"session_id": "nobody"}).status == 404


def test_a_repeated_request_opens_one_session(server: Running) -> None:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.36.0"}
    one, two = (server.ok("/create_session", body, X_Idempotency_Key="k") for _ in range(2))
    other = server.ok("/create_session", body, X_Idempotency_Key="other")
    assert one == two != other


def test_a_session_belongs_to_a_project(server: Running) -> None:
    session = server.session()
    model = server.model(session)
    assert server.ask("PUT", f"/sessions/{session}/project", {"project_id": "p-1"}).status == 200
    assert server.ask("PUT", f"/sessions/{session}/project", {"project_id": None}).status == 400
    assert server.ask("PUT", "/sessions/nobody/project", {"project_id": "p-1"}).status == 404
    runs = server.get("/training_runs?project_id=p-1").json()["training_runs"]
    assert [each["training_run_id"] for each in runs] == [model]


def test_an_ended_session_loses_its_models_samplers_and_results(server: Running) -> None:
    session, other = server.session(), server.session()
    model, kept = server.model(session), server.model(other)
    promise = server.pass_(model, 1).json()["request_id"]
    server.output(promise)
    body = {"model_id": model, "sampling_session_seq_id": 0, "seq_id": 2}
    sampler = server.result_of("/save_weights_for_sampler", body)["sampling_session_id"]
    server.sampled(sampler, 0)
    finish(server, session, "success")
    assert settled(lambda: server.retrieve(promise).status == 410)
    assert "not in memory" in server.pass_(model, 3).detail
    again = {"sampling_session_id": sampler, "prompt": {"chunks": []}, "sampling_params": {}}
    assert "never saved" in server.post("/asample", again).detail
    assert server.pass_(kept, 1).status == 200


def test_an_abandoned_session_is_let_go_but_not_ended(tmp_path: Path) -> None:
    clock = FakeClock()
    with running(tmp_path, clock=clock, abandoned_after_s=100, sweep_s=0.005) as server:
        silent, active = server.session(), server.session()
        models = [server.model(each) for each in (silent, active)]
        promise = server.pass_(models[0], 1).json()["request_id"]
        server.output(promise)
        clock.advance(90)
        server.ok("/session_heartbeat", {"session_id": active})
        clock.advance(20)
        assert settled(lambda: server.retrieve(promise).status == 410)
        # A client that comes back finds the session, but not the model.
        assert server.post("/session_heartbeat", {"session_id": silent}).status == 200
        assert "not in memory" in server.pass_(models[0], 1).detail
        assert server.pass_(models[1], 1).status == 200


# What a server has in memory for its sessions.
KINDS = (
    AdapterTrainer, CustomLoss, ForwardBackwardOutput, LiveModel, LiveSampler, LiveSession, LoraParams,
    Promise, SampleResponse, Upload,
)  # fmt: skip


def test_nothing_of_ended_and_abandoned_sessions_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "compile_custom_loss", lambda *_: None)
    clock, settings = FakeClock(), {"url_life_s": 50.0, "abandoned_after_s": 100.0, "release_s": 0.01}
    before = alive(*KINDS)  # what other tests hold
    with running(tmp_path, clock=clock, sweep_s=0.005, **settings) as server:
        for number in range(6):
            session = server.session()
            model, dropped = server.model(session, 0), server.model(session, 1)
            server.passed(model, 1)
            server.pass_(model, 2)
            saved = {"model_id": model, "path": "latest"}
            path = server.result_of("/save_weights_for_sampler", {**saved, "seq_id": 3})["path"]
            trained = server.result_of("/save_weights", {**saved, "seq_id": 4})["path"]
            unsaved = {"model_id": model, "sampling_session_seq_id": 0, "seq_id": 5, "kind": "inflight"}
            server.sampled(server.result_of("/save_weights_for_sampler", unsaved)["sampling_session_id"], 1)
            for place, source in enumerate(({"model_path": path}, {"base_model": BASE}), start=1):
                sampler = server.sampler(session, place, **source).json()["sampling_session_id"]
                server.sampled(sampler, 1)
                server.sample(sampler, 2)
            server.pass_(model, 9)  # waits for those before it
            server.ok("/unload_model", {"model_id": dropped})
            load = {"session_id": session, "model_seq_id": 2, "path": trained, "optimizer": False}
            server.result_of("/load_weights", {**load, "weights_access_token": "tml-wrong"})
            server.ok("/create_custom_loss", loss_of(session))
            server.ok("/external_weights_upload_start", {"base_model": BASE, "lora_config": {"rank": 2}})
            if number % 2:
                finish(server, session, "success")
        assert set(KINDS) <= alive(*KINDS).keys()
        clock.advance(101)
        assert settled(lambda: alive(*KINDS) <= before), alive(*KINDS) - before


def test_a_trace_lists_the_work(server: Running) -> None:
    session = server.session()
    model = server.model(session)
    server.passed(model, 1)
    server.result(server.optim(model, 2, learning_rate=-1.0).json()["request_id"])
    told = server.get(f"/sessions/{session}/trace_export").json()
    assert told["status"] == "ready"
    path = told["url"].partition(str(server.port))[2]
    spans = server.ask("GET", path, None, {"X-API-Key": ""}).json()["traceEvents"]
    assert [(each["name"], each["args"]["failed"]) for each in spans] == [
        ("CreateModel", False),
        ("ForwardBackward", False),
        ("OptimStep", True),
    ]
    assert server.get("/sessions/nobody/trace_export").status == 404


def test_what_is_used_is_on_the_bill(server: Running) -> None:
    session = server.session(user_metadata={"team": "a"})
    model = server.model(session)
    server.passed(model, 1, [1, 2, 3, 4, 5])
    server.passed(model, 2, [1, 2, 3], forward_only=True)
    failed = server.pass_(model, 3, [1, 10**6]).json()["request_id"]
    assert "error" in server.result(failed)
    server.result_of("/save_weights", {"model_id": model, "path": "a", "seq_id": 4})
    sampler = server.sampler(session).json()["sampling_session_id"]
    for number in range(2):
        sampled = {"max_tokens": 5, "stop": []}
        server.sampled(sampler, number, [1, 2, 3, 4], params=sampled, num_samples=2)
    hour = int(time.time()) // 3600 * 3600
    moments = [time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(hour + 3600 * n)) for n in (-1, 2)]
    query = f"starting_on={moments[0]}&ending_before={moments[1]}"
    usage = server.get(f"/billing/usage/events?{query}").json()
    found: dict[tuple[str, bool], int] = {}
    for event in usage["data"]:
        info = event["event_info"]
        name = info["type"], info.get("cached", False)
        found[name] = found.get(name, 0) + info.get("token_count", info.get("count"))
        assert event["session_id"] == session
    assert found == {
        ("training", False): 4 + 2,
        ("sampling_prefill", False): 4 + 1,
        ("sampling_prefill", True): 3,
        ("sampling_sample", False): 2 * 2 * 5,
        ("checkpoint", False): 1,
    }
    assert usage["sessions"] == {session: {"user_metadata": {"team": "a"}}}
    storage = server.get("/billing/usage/checkpoints/current").json()["data"]
    assert [each["checkpoint_count"] for each in storage] == [1]
    wrong = (
        "starting_on=2026-01-01T00:30:00Z&ending_before=2026-01-01T02:00:00Z",
        "starting_on=2026-01-01T00:00:00Z&ending_before=2026-02-01T00:00:00Z",
        "starting_on=2026-01-02T00:00:00Z&ending_before=2026-01-01T00:00:00Z",
    )
    assert [server.get(f"/billing/usage/events?{each}").status for each in wrong] == [400] * 3
    assert server.get("/billing/usage/events?starting_on=now").status == 422


def test_the_bill_is_by_the_hour_and_the_last_request_is_known(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with running(tmp_path, clock=clock) as server:
        session = server.session(project_id="p-1")
        model = server.model(session)
        server.passed(model, 1, [1, 2, 3])
        server.passed(model, 2, [1, 2])
        clock.advance(3600)
        server.passed(model, 3, [1, 2, 3, 4])
        hours = [time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(START + 3600 * n)) for n in range(4)]
        for first, last, tokens in ((0, 3, [3, 3]), (0, 1, [3]), (1, 2, [3]), (2, 3, [])):
            query = f"starting_on={hours[first]}&ending_before={hours[last]}"
            events = server.get(f"/billing/usage/events?{query}").json()["data"]
            assert [each["event_info"]["token_count"] for each in events] == tokens
            assert {each["project_id"] for each in events} <= {"p-1"}
        [run] = server.get("/training_runs").json()["training_runs"]
        assert run == server.get(f"/training_runs/{model}").json()
        seen = datetime.fromisoformat(run["last_request_time"].replace("Z", "+00:00"))
        assert seen.timestamp() == START + 3600


def test_a_full_disk_is_no_fault_of_the_user(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tinker_sync.local.store import StoreError

    model = server.model(server.session())

    monkeypatch.setattr(server.store, "save_checkpoint", raising(StoreError("full", "the disk is full")))
    save = {"model_id": model, "path": "a", "seq_id": 1}
    failed = server.result_of("/save_weights", save)
    assert failed == {"error": "the disk is full", "category": "server"}
    assert "the disk is full" in caplog.text
    monkeypatch.undo()
    again = {"model_id": model, "path": "a", "seq_id": 2}
    assert server.result_of("/save_weights", again)["path"].endswith("/weights/a")
