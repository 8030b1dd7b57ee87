"""Sending of telemetry: batches, refusals, pauses, and no delay for the user."""

from __future__ import annotations

import json
import logging
import platform
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.crowd import until
from support.isolation import our_threads
from support.raising import raising
from support.tinker_stub import Answer, Stub, StubServer

from tinker_sync import types
from tinker_sync._base.events import CallFailed, HeartbeatLate, SessionEnded, SessionStarted
from tinker_sync.clients.service import ServiceClient
from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, InternalServerError, TinkerError
from tinker_sync.telemetry.reports import EventBuffer
from tinker_sync.telemetry.sender import BATCH, FLUSH_S, Telemetry
from tinker_sync.transport.call import Call, Reply

FULL = {"custom_loss_server_side": False}
PROMPT, PARAMS = types.ModelInput.from_ints([314159, 41, 59]), types.SamplingParams(max_tokens=2)
ACCEPTED = Reply(200, {}, b'{"status": "accepted"}')


class Post:
    """A double of the caller with scripted answers, which records its calls."""

    def __init__(self, *answers: Reply | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[Call] = []
        self.came = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def call(self, call: Call) -> Reply:
        self.calls.append(call)
        self.came.set()
        assert self.gate.wait(PATIENCE_S)
        answer = self.answers.pop(0) if self.answers else ACCEPTED
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(call.body or b"") for call in self.calls]

    @property
    def events(self) -> list[list[str]]:
        return [[event["event"] for event in body["events"]] for body in self.bodies]


class Bench:
    def __init__(self, *answers: Reply | Exception) -> None:
        self.post = Post(*answers)
        self.clock = FakeClock(time_s=1_750_000_000.0, automatic=False)
        self.buffer = EventBuffer()
        settings = Settings.resolve(base_url="http://127.0.0.1:9", environ={})
        self.telemetry = Telemetry(self.post, settings, buffer=self.buffer, clock=self.clock)  # type: ignore[arg-type]

    def quietly(self) -> Bench:
        """Let the sender start no thread, because the test calls `step` itself. Return this bench."""
        self.telemetry._running = True
        return self

    def blocked(self) -> Bench:
        """Let the sender wait for the answer to a batch, with an event in its queue. Return this bench."""
        self.post.gate.clear()
        self.fail(1)
        self.clock.await_waiters()
        self.clock.advance(FLUSH_S)
        assert self.post.came.wait(PATIENCE_S)
        self.fail(2)
        return self

    def fail(self, number: int = 0) -> None:
        error = APIStatusError("m", status_code=500, request_id=f"r-{number}")
        self.telemetry.observe(CallFailed(error=error))


@pytest.fixture
def stub() -> Iterator[Stub]:
    with StubServer(config=FULL) as stub:
        yield stub


def sent(stub: Stub) -> list[Any]:
    return [event for asked in stub.asked("/telemetry") for event in asked.json()["events"]]


def refusal(status: int) -> APIStatusError:
    return APIStatusError.from_reply(status, {}, b"")


# ---------------------------------------------------------------------------------------------- shapes
def test_session_from_start_to_end() -> None:
    bench = Bench().quietly()
    bench.telemetry.observe(SessionStarted(session_id="session-0"))
    bench.clock.advance(65.25)
    bench.telemetry.observe(SessionEnded(session_id="session-0", status="success"))
    bench.telemetry.observe(HeartbeatLate(delay_s=12.0, reason="not for the service"))
    assert bench.telemetry.step()
    (body,) = bench.post.bodies
    ids = [event.pop("event_id") for event in body["events"]]
    assert len(set(ids)) == 2
    assert len(body.pop("process_uuid")) == 36
    assert body == {
        "events": [
            {
                "event": "SESSION_START",
                "event_session_index": 0,
                "severity": "INFO",
                "timestamp": "2025-06-15T15:06:40Z",
            },
            {
                "event": "SESSION_END",
                "event_session_index": 1,
                "severity": "INFO",
                "timestamp": "2025-06-15T15:07:45.250000Z",
                "duration": "0:01:05.250000",
            },
        ],
        "platform": platform.system(),
        "sdk_version": "0.38.0",
        "session_id": "session-0",
    }
    (call,) = bench.post.calls
    assert (call.path, call.max_retries, call.deadline_s) == ("/api/v1/telemetry", 0, 5.0)


def test_events_before_a_session_are_sessionless() -> None:
    bench = Bench().quietly()
    bench.fail()
    bench.telemetry.step()
    (body,) = bench.post.bodies
    assert body["session_id"].startswith("sessionless-")
    assert body["events"][0]["event"] == "UNHANDLED_EXCEPTION"
    assert body["events"][0]["error_message"] == "status 500, request r-0"
    assert "traceback" not in body["events"][0]  # null fields are left out


def test_batches_are_small() -> None:
    bench = Bench().quietly()
    for number in range(BATCH + 20):
        bench.fail(number)
    while bench.telemetry.step():
        pass
    assert [len(events) for events in bench.post.events] == [BATCH, 20]


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("status", [401, 403, 404, 405, 501])
def test_refusing_server_is_asked_once(status: int) -> None:
    bench = Bench(refusal(status)).quietly()
    bench.fail(1)
    assert not bench.telemetry.step()
    bench.fail(2)
    assert not bench.telemetry.step()
    assert (len(bench.post.calls), len(bench.buffer)) == (1, 0)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_rejected_batch_is_dropped(status: int) -> None:
    bench = Bench(refusal(status)).quietly()
    bench.fail(1)
    assert bench.telemetry.step()
    bench.fail(2)
    assert bench.telemetry.step()
    assert [body["events"][0]["error_message"] for body in bench.post.bodies] == [
        "status 500, request r-1",
        "status 500, request r-2",
    ]


@pytest.mark.parametrize(
    "failure", [refusal(500), refusal(429), TinkerError("no network"), KeyError("our mistake")], ids=repr
)
def test_other_failures_keep_the_events(failure: Exception) -> None:
    bench = Bench(failure).quietly()
    bench.fail()
    assert not bench.telemetry.step()
    assert bench.telemetry.step()
    first, second = bench.post.bodies
    assert first == second  # with the same ids


def test_a_batch_that_keeps_failing_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(*[refusal(503)] * 12).quietly()
    for number in (1, 2):
        bench.fail(number)
        for _ in range(6):
            assert len(bench.buffer) == 1
            assert not bench.telemetry.step()
        assert len(bench.buffer) == 0
    assert len(bench.post.calls) == 12
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage()[:40] for record in warnings] == ["telemetry could not be sent and is dropp"]


# ---------------------------------------------------------------------------------------------- the thread
def test_thread_sends_and_ends() -> None:
    bench = Bench()
    bench.fail(1)
    bench.fail(2)
    bench.clock.await_waiters()
    assert {thread.name for thread in our_threads()} == {"tinker-telemetry"}
    bench.clock.advance(FLUSH_S)
    until(lambda: our_threads() == set())
    assert bench.post.events == [["UNHANDLED_EXCEPTION"] * 2]
    bench.fail(3)
    bench.clock.await_waiters()
    bench.clock.advance(FLUSH_S)
    until(lambda: our_threads() == set())
    assert len(bench.post.calls) == 2


def test_pauses_grow_after_failures() -> None:
    bench = Bench(*[InternalServerError("m")] * 5)
    bench.fail()
    for _ in range(6):
        bench.clock.await_waiters()
        bench.clock.advance(300.0)
        calls = len(bench.post.calls)
        until(lambda calls=calls: len(bench.post.calls) > calls or not our_threads())
    until(lambda: our_threads() == set())
    assert bench.clock.waits == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0]


def test_close_sends_within_its_limit() -> None:
    bench = Bench()
    bench.fail()
    bench.clock.await_waiters()
    bench.telemetry.close(0.5)
    assert len(bench.post.calls) == 1
    assert bench.post.calls[0].deadline_s == 0.5
    bench.telemetry.close(0.5)
    bench.fail(2)
    until(lambda: our_threads() == set())
    assert len(bench.post.calls) == 1


def test_close_gives_up_after_a_failure() -> None:
    bench = Bench(TinkerError("no network"))
    bench.fail()
    bench.telemetry.close(0.5)
    assert (len(bench.post.calls), len(bench.buffer)) == (1, 0)
    until(lambda: our_threads() == set())


def test_close_does_not_wait_for_a_blocked_batch() -> None:
    bench = Bench().blocked()
    bench.telemetry.close(0.05)
    bench.post.gate.set()
    until(lambda: our_threads() == set())
    assert len(bench.post.calls) == 1


def test_the_limit_of_close_includes_the_wait_for_a_batch_under_way() -> None:
    bench = Bench().blocked()
    closing = threading.Thread(target=bench.telemetry.close, args=(PATIENCE_S,))
    closing.start()
    until(lambda: bench.telemetry._closed)
    bench.clock.advance(PATIENCE_S)
    bench.post.gate.set()
    closing.join(PATIENCE_S)
    assert len(bench.post.calls) == 1
    until(lambda: our_threads() == set())


def test_close_without_time_sends_nothing() -> None:
    bench = Bench().quietly()
    bench.fail()
    bench.telemetry.close(0.0)
    assert bench.post.calls == []


def test_close_sends_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        bench.fail()
    bench.telemetry.close(0.5)
    assert len(bench.post.calls) == 1


def test_child_process_sends_its_own_events() -> None:
    bench = Bench().quietly()
    bench.fail(1)
    parent = bench.telemetry._process_uuid
    bench.telemetry._turn.acquire()
    bench.telemetry.renew_after_fork()
    bench.quietly()
    bench.fail(2)
    bench.telemetry.close(0.5)
    (body,) = bench.post.bodies
    assert [event["error_message"] for event in body["events"]] == ["status 500, request r-2"]
    assert body["process_uuid"] != parent


# ---------------------------------------------------------------------------------------------- with a client
def service_of(stub: Stub, **options: Any) -> ServiceClient:
    return ServiceClient(base_url=stub.url, api_key="tml-planted-key-0123456789", **options)


def test_other_servers_get_no_telemetry(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    with service_of(stub) as service:
        service.create_sampling_client(base_model="stub/model").result()
    assert sent(stub) == []


def test_other_servers_get_telemetry_on_request(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with service_of(stub, telemetry=True) as service:
        service.create_sampling_client(base_model="stub/model").result()
    assert [event["event"] for event in sent(stub)] == ["SESSION_START", "SESSION_END"]
    for thread in our_threads():
        if thread.name == "tinker-telemetry":  # about to end
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(("value", "on"), [(None, True), ("1", True), ("0", False), ("off", False)])
def test_vendor_follows_the_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    if value is not None:
        monkeypatch.setenv("TINKER_TELEMETRY", value)
    service = ServiceClient(api_key="tml-x")
    assert (service.holder.lifecycle.owned_observer is not None) is on
    service.close().result(120)


def test_failures_are_reported_without_content(stub: Stub) -> None:
    with service_of(stub, telemetry=True) as service:
        sampler = service.create_sampling_client(base_model="stub/model").result()
        trainer = service.create_lora_training_client("stub/model").result()
        echo = {"detail": [{"loc": ["body"], "input": {"tokens": [314159, 41, 59]}, "msg": "planted words"}]}
        stub.script("/asample", Answer(422, echo))
        stub.script("/get_info", Answer(501, {"detail": "planted words"}))
        stub.script("/retrieve_future", Answer(body={"error": "planted words 314159", "category": "server"}))
        stub.script("/optim_step", Answer(400, echo))
        for call in (
            lambda: sampler.sample(PROMPT, 1, PARAMS).result(120),
            trainer.get_info,
            lambda: sampler.sample(PROMPT, 1, PARAMS).result(120),
        ):
            with pytest.raises(TinkerError):
                call()
        assert trainer.optim_step(types.AdamParams()).exception(120) is not None
        reporter: Any = service.holder.lifecycle.owned_observer
        until(lambda: len(reporter._buffer) == 5)  # an event may follow the result of its call
    events = sent(stub)
    found = [(event["event"], event.get("event_name"), event.get("error_type")) for event in events]
    assert (found[0][0], found[-1][0]) == ("SESSION_START", "SESSION_END")
    assert sorted(found[1:-1], key=repr) == [
        ("GENERIC_EVENT", "user_error", None),
        ("GENERIC_EVENT", "user_error", None),
        ("UNHANDLED_EXCEPTION", None, "InternalServerError"),
        ("UNHANDLED_EXCEPTION", None, "RequestFailedError"),
    ]
    text = json.dumps(events).lower()
    for secret in ("planted", "tml-", "314159", "x-api-key", "authorization", "tests/"):
        assert secret not in text
    assert [event["event_session_index"] for event in events] == list(range(6))


@pytest.mark.parametrize("answer", [Answer(status=0), Answer(404), Answer(500)], ids=["silent", "404", "500"])
def test_failures_and_close_do_not_wait(stub: Stub, answer: Answer) -> None:
    stub.script("/telemetry", *[answer] * 50)
    service = service_of(stub, telemetry=True)
    sampler = service.create_sampling_client(base_model="stub/model").result()
    stub.script("/asample", Answer(422, {"detail": "no"}))
    began = time.monotonic()
    with pytest.raises(TinkerError):
        sampler.sample(PROMPT, 1, PARAMS).result(120)
    assert time.monotonic() - began < 5  # a post may take 5
    service.close().result(120)
    assert time.monotonic() - began < 20
    assert len(stub.asked("/sessions/session-0/finish")) == 1


def test_session_end_is_reported_once(stub: Stub) -> None:
    service = service_of(stub, telemetry=True)
    sampler = service.create_sampling_client(base_model="stub/model").result()
    stub.script("/asample", Answer(422, {"detail": "no"}))
    with pytest.raises(TinkerError):
        sampler.sample(PROMPT, 1, PARAMS).result(120)
    service.close().result(120)
    assert [event["event"] for event in sent(stub)].count("SESSION_END") == 1
    assert sent(stub)[0]["event"] == "SESSION_START"


def test_dropped_client_drops_its_telemetry(stub: Stub) -> None:
    service = service_of(stub, telemetry=True)
    service.create_sampling_client(base_model="stub/model").result()
    assert {"tinker-telemetry", "tinker-heartbeat"} <= {thread.name for thread in our_threads()}
    del service
    until(lambda: our_threads() == set())
    assert sent(stub) == []
