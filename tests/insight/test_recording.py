"""Recordings of real calls, their advice, and their traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.insight.recording import Recording
from tinker_sync.losses import CrossEntropy
from tinker_sync.testing import FaultPlan, LocalServer, faults

MODEL = "tinker-sync/random"
DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
PROMPT = types.ModelInput.from_ints([1, 2])
SHORT = types.SamplingParams(max_tokens=2)
ADAM = types.AdamParams(learning_rate=1e-3)


def train(service: ServiceClient, *, wait: bool) -> None:
    training = service.create_lora_training_client(MODEL, rank=2).result()
    for _ in range(6):
        passed = training.forward_backward([DATUM], "cross_entropy")
        if wait:
            passed.result()
        training.optim_step(ADAM).result()


def test_waiting_for_a_pass_before_the_step_is_noticed() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        with service.explain() as waiting:
            train(service, wait=True)
        with service.explain() as ahead:
            train(service, wait=False)
    assert "you wait for forward_backward before optim_step, 6 times of 6" in str(waiting)
    assert "wait for forward_backward" not in str(ahead)
    assert len([call for call in waiting.calls if call.method == "TrainingClient.forward_backward"]) == 6


def test_samples_one_by_one_are_noticed() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        sampling = service.create_sampling_client(base_model=MODEL).result()
        with service.explain() as alone:
            for _ in range(12):
                sampling.sample(PROMPT, 1, SHORT).result()
        server.plan = FaultPlan().latency("retrieve_future", 50)  # half a second here, more than in the queue
        with service.explain() as together:
            for future in [sampling.sample(PROMPT, 1, SHORT) for _ in range(12)]:
                future.result()
    assert any(line.startswith("you wait for each sample") for line in alone.advice)
    assert together.advice == []
    # Every sample has all phases, in order.
    for call in alone.calls:
        moments = [call.queued_s, call.sending_s, call.accepted_s, call.decoding_s, call.completed_s]
        assert None not in moments
        assert moments == sorted(moments)  # type: ignore[type-var]
    assert sum(span.kind == "encode" for span in alone.spans) == 12
    assert alone.polls >= 12


def test_a_custom_loss_has_a_request_for_each_of_its_passes() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=2).result()
        with service.explain() as recording:
            training.forward_backward_custom([DATUM], CrossEntropy()).result()
    assert [(call.method, call.outcome) for call in recording.calls] == [
        ("TrainingClient.forward_backward_custom", "ok")
    ] * 2
    assert "Requests without a result" not in str(recording)


def test_failed_attempts_and_pauses_are_shown() -> None:
    plan = FaultPlan().on("asample", faults.status(503), nth=(1, 2))
    plan = plan.on("retrieve_future", faults.queue_paused(reason="all machines are busy"), nth=1)
    with LocalServer(plan, model=MODEL) as server, server.service() as service:
        sampling = service.create_sampling_client(base_model=MODEL).result()
        with service.explain() as recording:
            sampling.sample(PROMPT, 1, SHORT).result()
            with pytest.raises(TinkerError):
                sampling.sample(types.ModelInput.from_ints([10**6]), 1, SHORT).result()
    shown = str(recording)
    assert "Attempts that failed: 503 (2)" in shown
    assert "all machines are busy (1)" in shown
    assert "Requests without a result: " in shown


def test_a_trace_is_written_when_the_client_closes(tmp_path: Path) -> None:
    place = tmp_path / "t.json"
    with LocalServer(model=MODEL) as server, server.service() as service:
        recording = service.trace(place)
        train(service, wait=False)
        assert not place.exists()
    events = json.loads(place.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"TrainingClient.forward_backward", "queue", "upload", "server", "decode"} <= names
    begun = sorted((event["id"], event["name"]) for event in events if event["ph"] == "b")
    ended = sorted((event["id"], event["name"]) for event in events if event["ph"] == "e")
    assert begun == ended
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert any(event["ph"] == "M" and "tinker-" in event["args"]["name"] for event in events)
    with pytest.raises(ClientClosedError):
        service.explain()
    assert recording.ended_s == recording.ended_s


def test_a_block_ends_closed_although_a_trace_cannot_be_written(tmp_path: Path) -> None:
    stepped = []

    def step(service: ServiceClient) -> None:
        with service:
            for name in ("good", "bad", "good too"):
                service.trace(tmp_path / name)
            (tmp_path / "bad").mkdir()
            stepped.append(service.create_lora_training_client(MODEL, rank=4).optim_step(ADAM))

    with LocalServer(model=MODEL) as server:
        with pytest.raises(IsADirectoryError):
            step(server.service())
        assert stepped[0].exception(0) is None
        assert len(server.calls_to("finish_session")) == 1
    assert (tmp_path / "good").is_file()
    assert (tmp_path / "good too").is_file()


def test_nothing_is_added_after_the_end() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        with service.explain() as recording:
            assert "no request has ended" in str(recording)
        service.create_rest_client().list_sessions().result()
        assert recording.calls == []


def test_a_full_recording_counts_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.insight.recording.MOST_RECORDS", 2)
    with LocalServer(model=MODEL) as server, server.service() as service:
        with service.explain() as recording:
            for _ in range(4):
                service.create_rest_client().list_sessions().result()
        assert isinstance(recording, Recording)
        assert len(recording.calls) == 2
        assert recording.dropped >= 2
        assert "which is full" in str(recording)
