"""Spans of calls: with a small fake of OpenTelemetry's API, and with its SDK."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from tinker_sync import MissingExtraError, types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.testing import LocalServer

MODEL = "tinker-sync/random"
PROMPT = types.ModelInput.from_ints([1, 2])
DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
SHORT = types.SamplingParams(max_tokens=2)
ADAM = types.AdamParams(learning_rate=1e-3)
SAMPLE, STEP = "SamplingClient.sample", "TrainingClient.optim_step"


class FakeSpan:
    def __init__(self, name: str, **given: Any) -> None:
        self.name, self.given = name, given
        self.events: list[tuple[str, int]] = []
        self.status: tuple[str, str] | None = None
        self.end_time = 0

    def add_event(self, name: str, *, timestamp: int) -> None:
        self.events.append((name, timestamp))

    def set_status(self, status: tuple[str, str]) -> None:
        self.status = status

    def end(self, *, end_time: int) -> None:
        self.end_time = end_time


class FakeTracer:
    def __init__(self) -> None:
        self.spans: list[FakeSpan] = []

    def start_span(self, name: str, **given: Any) -> FakeSpan:
        self.spans.append(FakeSpan(name, **given))
        return self.spans[-1]

    def of(self, method: str) -> list[FakeSpan]:
        return [span for span in self.spans if span.name == method]


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> FakeTracer:
    """Return the global tracer of a fake of the API, whose current context is "here"."""
    made = FakeTracer()
    package, trace, context = (ModuleType(f"opentelemetry{name}") for name in ("", ".trace", ".context"))
    of_trace: Any = trace
    of_trace.get_tracer = lambda name: made if name == "tinker_sync" else None
    of_trace.SpanKind = type("SpanKind", (), {"CLIENT": "client"})
    of_trace.StatusCode = type("StatusCode", (), {"ERROR": "error"})
    of_trace.Status = lambda code, words: (code, words)
    of_context: Any = context
    of_context.get_current = lambda: "here"
    for module in (package, trace, context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


@contextmanager
def served() -> Iterator[ServiceClient]:
    with LocalServer(model=MODEL) as server, server.service() as service:
        yield service


def test_each_call_has_a_span_with_its_times(tracer: FakeTracer) -> None:
    with served() as service, service.spans():
        training = service.create_lora_training_client(MODEL, rank=2).result()
        sampling = service.create_sampling_client(base_model=MODEL).result()
        training.forward_backward([DATUM], "cross_entropy").result()
        stepped = training.optim_step(ADAM)
        stepped.result()
        sampling.sample(PROMPT, 1, SHORT).result()
        model_id = training.get_info().model_id
    for method in (SAMPLE, STEP, "TrainingClient.forward_backward"):
        (span,) = tracer.of(method)
        names, times = zip(*span.events, strict=True)
        assert names[:2] == ("sending", "accepted by the server")
        moments = [span.given["start_time"], *times, span.end_time]
        assert moments == sorted(moments)
        assert span.given["context"] == "here"
        assert span.given["kind"] == "client"
        assert span.status is None
    step = tracer.of(STEP)[0].given["attributes"]
    assert step == {
        "tinker.method": STEP,
        "tinker.outcome": "ok",
        "tinker.request_id": stepped.request_id,
        "tinker.model": model_id,
    }
    assert tracer.of(SAMPLE)[0].given["attributes"]["tinker.base_model"] == MODEL


def test_a_failed_call_has_the_class_of_its_error_and_no_text(tracer: FakeTracer) -> None:
    with served() as service, service.spans():
        sampling = service.create_sampling_client(base_model=MODEL).result()
        failure = sampling.sample(types.ModelInput.from_ints([10**6]), 1, SHORT).exception()
    (span,) = tracer.of(SAMPLE)
    assert span.status == ("error", type(failure).__name__)
    assert span.given["attributes"]["error.type"] == "RequestFailedError"
    assert "token" not in repr(vars(span))


def test_spans_end_with_their_block(tracer: FakeTracer) -> None:
    with served() as service:
        sampling = service.create_sampling_client(base_model=MODEL).result()
        with service.spans() as running:
            sampling.sample(PROMPT, 1, SHORT).result()
        running.close()
        sampling.sample(PROMPT, 1, SHORT).result()
        mine = FakeTracer()
        with service.spans(mine):
            sampling.sample(PROMPT, 1, SHORT).result()
        assert len(mine.of(SAMPLE)) == len(tracer.of(SAMPLE)) == 1


def test_a_tracer_that_blocks_delays_no_call(tracer: FakeTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    go, start = threading.Event(), FakeTracer.start_span

    def blocked(self: FakeTracer, name: str, **given: Any) -> FakeSpan:
        assert go.wait(60)
        return start(self, name, **given)

    with served() as service, service.spans():
        sampling = service.create_sampling_client(base_model=MODEL).result()
        monkeypatch.setattr(FakeTracer, "start_span", blocked)
        for _ in range(3):
            sampling.sample(PROMPT, 1, SHORT).result(60)
        assert tracer.of(SAMPLE) == []
        go.set()
    assert len(tracer.of(SAMPLE)) == 3


def test_a_tracer_that_fails_disturbs_no_call(tracer: FakeTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as service, service.spans():
        sampling = service.create_sampling_client(base_model=MODEL).result()
        monkeypatch.setattr(FakeTracer, "start_span", lambda *_, **__: 1 / 0)
        futures = [sampling.sample(PROMPT, 1, SHORT) for _ in range(3)]
        assert [len(future.result().sequences) for future in futures] == [1, 1, 1]


def test_without_opentelemetry_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with served() as service, pytest.raises(MissingExtraError, match="pip install opentelemetry-api"):
        service.spans()


def test_spans_of_the_sdk_are_children_of_the_span_of_the_call() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    exporting = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(exporting.SimpleSpanProcessor(exporter))
    mine = provider.get_tracer("tests")
    with served() as service, service.spans(mine):
        sampling = service.create_sampling_client(base_model=MODEL).result()
        with mine.start_as_current_span("rollout") as rollout:
            good = sampling.sample(PROMPT, 1, SHORT)
            bad = sampling.sample(types.ModelInput.from_ints([10**6]), 1, SHORT)
        good.result()
        assert bad.exception() is not None
    finished = [span for span in exporter.get_finished_spans() if span.name == SAMPLE]
    assert [span.parent.span_id for span in finished] == [rollout.get_span_context().span_id] * 2
    assert sorted(span.status.status_code.name for span in finished) == ["ERROR", "UNSET"]
    assert all(span.start_time <= span.events[0].timestamp <= span.end_time for span in finished)
