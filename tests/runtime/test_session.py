"""Sessions without clients: their owner, the numbers that they draw, and the request that finishes them."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from support.clock import FakeClock
from support.crowd import until
from support.forks import in_child
from support.raising import raising, refuse_threads
from support.tinker_stub import Answer, Stub

from tinker_sync._base.events import HeartbeatLate, SessionEnded, SessionLost, SessionStarted
from tinker_sync.config import Settings
from tinker_sync.errors import APIConnectionError, APIStatusError, SessionLostError, TinkerError
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.runtime.session import PERIOD_S, Heartbeat, Session

FINISH = "/sessions/session-0/finish"


class Bench:
    """A runtime with one session, on a fake clock, and the events that the runtime reports."""

    def __init__(self, stub: Stub, **of_session: Any) -> None:
        self.clock = FakeClock(automatic=False)
        self.session = Session(**of_session)
        settings = Settings.resolve(base_url=stub.url, api_key="tml-x", tags=["a", "b"], environ={})
        self.runtime = ClientRuntime(settings, session=self.session, clock=self.clock)
        self.events: list[object] = []
        self.runtime.connection.events.listen(self, SessionStarted, SessionEnded, SessionLost, HeartbeatLate)

    def observe(self, event: object) -> None:
        self.events.append(event)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close("success").result(120)


def numbers(session: Session) -> list[list[int]]:
    draws = (session.next_model_seq_id, session.next_sampling_session_seq_id, session.next_custom_loss_seq_id)
    return [[draw() for _ in range(3)] for draw in draws]


def test_what_a_session_is_made_with(stub: Stub) -> None:
    with Bench(stub, user_metadata={"a": "b"}, project_id="p-1", display_name="mine") as bench:
        assert bench.runtime.server.known_session_id is None
        assert bench.runtime.server.open_session() == bench.runtime.server.open_session() == "session-0"
        assert bench.runtime.server.known_session_id == "session-0"
    (asked,) = stub.asked("/create_session")
    assert asked.json() == {
        "tags": ["a", "b"],
        "user_metadata": {"a": "b"},
        "sdk_version": "0.38.0",
        "project_id": "p-1",
        "display_name": "mine",
        "type": "create_session",
    }


def test_a_joined_session_is_neither_made_nor_finished(stub: Stub) -> None:
    with Bench(stub, joined="session-0") as bench:
        assert bench.session.needs_heartbeat
        assert bench.runtime.server.open_session() == "session-0"
        assert not bench.session.needs_heartbeat
        (models, *_) = numbers(bench.session)
        assert models[0] >= 10**6
        assert models == list(range(models[0], models[0] + 3))
    assert stub.asked("/create_session") == stub.asked(FINISH) == []
    assert bench.events == []


def test_a_child_takes_the_facts_from_its_parent_and_asks_for_later_ones_itself(stub: Stub) -> None:
    stub.behaviour.dynamic_config = {"refresh_interval_sec": 60}
    with Bench(stub) as bench:
        bench.runtime.server.ready()
        release = stub.hold("/client/dynamic_config")
        bench.clock.advance(60.0)
        bench.runtime.server.refresh_if_due()
        stub.await_asked("/client/dynamic_config", 2)  # a worker of the parent waits for the answer

        def work() -> None:
            assert bench.runtime.server.dynamic.refresh_interval_sec == 60
            bench.runtime.server.ready()
            bench.clock.advance(60.0)
            bench.runtime.server.refresh_if_due()
            until(lambda: bench.runtime.server.dynamic.refresh_interval_sec == 61)
            bench.runtime.close("success").result(120)

        stub.behaviour.dynamic_config = {"refresh_interval_sec": 61}
        in_child(work)
        release.set()
    assert len(stub.asked("/client/config")) == 1


def test_a_child_that_had_no_session_makes_its_own(stub: Stub) -> None:
    with Bench(stub) as bench:

        def work() -> None:
            assert bench.runtime.server.open_session() == "session-0"
            assert numbers(bench.session)[0] == [0, 1, 2]
            bench.runtime.close("success").result(120)

        in_child(work)
    assert len(stub.asked(FINISH)) == 1


def test_a_lost_session_is_refused_with_an_error_of_ones_own(stub: Stub) -> None:
    with Bench(stub) as bench:
        bench.runtime.server.open_session()
        bench.session.on_lost(APIStatusError.from_reply(410, {}, b'{"detail": "too late"}'))
        caught = []
        for _ in range(2):
            with pytest.raises(SessionLostError, match="410 Gone: too late") as error:
                bench.session.refuse_lost()
            caught.append(error.value)
        assert caught[0] is not caught[1]
        bench.session.on_found()
        bench.session.refuse_lost()


@pytest.mark.parametrize(
    ("error", "asks"), [(404, True), (401, True), (410, True), (400, False), (500, False), (None, False)]
)
def test_which_failures_hint_at_a_loss(stub: Stub, error: int | None, asks: bool) -> None:
    failure = TinkerError("m") if error is None else APIStatusError.from_reply(error, {}, b"")
    with Bench(stub) as bench:
        bench.session.beat_if_suspicious(failure)  # without a session there is nothing to lose
        bench.runtime.server.open_session()
        bench.clock.await_waiters()
        bench.clock.advance(5.0)
        bench.session.beat_if_suspicious(failure)
        if asks:
            stub.await_asked("/session_heartbeat")
        bench.clock.await_waiters()
    assert len(stub.asked("/session_heartbeat")) == asks


def test_an_old_server_is_not_asked_to_finish(stub: Stub) -> None:
    stub.behaviour.config = None
    with Bench(stub) as bench:
        bench.runtime.server.open_session()
    assert stub.asked(FINISH) == []
    assert bench.events[-1] == SessionEnded(session_id="session-0", status="success")


def test_a_session_whose_id_fits_no_address_ends(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    """The thread of the heartbeats died with a traceback, which would fail this test."""
    stub.script("/create_session", Answer(body={"session_id": ".."}))
    with Bench(stub) as bench:
        bench.runtime.server.open_session()
    assert bench.events[-1] == SessionEnded(session_id="..", status="success")
    assert "session .. is over: '..' cannot be part of an address" in caplog.text


def test_an_open_that_fails_halfway_is_taken_up_again(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is open at the server, but whose heartbeats could not start, is used again.

    The next use starts the heartbeats, and opens no second session.
    """
    with Bench(stub) as bench:
        with monkeypatch.context() as patch:
            refuse_threads(patch, "tinker-heartbeat")
            with pytest.raises(TinkerError, match="can't start"):
                bench.runtime.server.open_session()
        assert bench.runtime.server.open_session() == "session-0"
        assert not bench.session.needs_heartbeat
        until(lambda: bench.events)
    assert len(stub.asked("/create_session")) == 1


# ---- Heartbeats, step by step: the meaning of each answer, late heartbeats, and the end of the thread
def status(code: int) -> APIStatusError:
    return APIStatusError.from_reply(code, {}, b'{"detail": "words"}')


class HeartbeatBench:
    """A heartbeat whose answers are scripted, and the counts and reports of its steps."""

    def __init__(
        self, *answers: Exception | None, always_offered: bool = True, clock: FakeClock | None = None
    ) -> None:
        self.clock = clock or FakeClock(automatic=False)
        self.answers = list(answers)
        self.cpu_s = 0.0
        self.beats = 0
        self.refresh_if_dues = 0
        self.said: list[object] = []
        self.heartbeat = Heartbeat(
            self.beat,
            self,
            refresh_if_due=self.refresh_if_due,
            always_offered=always_offered,
            clock=self.clock,
            cpu=lambda: self.cpu_s,
        )

    def beat(self) -> None:
        self.beats += 1
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            raise answer

    def refresh_if_due(self) -> bool:
        self.refresh_if_dues += 1
        return True

    def on_lost(self, error: TinkerError) -> None:
        self.said.append(("lost", getattr(error, "status_code", None)))

    def on_found(self) -> None:
        self.said.append("found")

    def on_late(self, delay_s: float, reason: str) -> None:
        self.said.append(("late", delay_s, reason))

    def steps(self, count: int) -> list[bool]:
        """Run `count` steps of the heartbeat, one in each period. Return their results."""
        going = []
        for _ in range(count):
            going.append(self.heartbeat.step())
            self.clock.advance(PERIOD_S)
        return going


# ---------------------------------------------------------------------------------------------- answers


def test_410_is_the_end_of_the_session_but_not_of_the_refresh_if_due() -> None:
    bench = HeartbeatBench(None, status(410))
    assert bench.steps(4) == [True] * 4
    assert (bench.beats, bench.refresh_if_dues) == (2, 4)
    assert bench.said == [("lost", 410)]


@pytest.mark.parametrize("code", [401, 404])
def test_a_refusal_that_stays_is_a_loss(code: int) -> None:
    bench = HeartbeatBench(None, *[status(code)] * 3)
    bench.steps(2)
    assert bench.said == []  # the refusal may have come from a proxy
    bench.steps(2)
    assert bench.said == [("lost", code)]  # reported once
    assert bench.beats == 4


def test_one_refusal_alone_is_no_loss() -> None:
    bench = HeartbeatBench(status(404), None, status(404), status(500), status(404))
    bench.steps(5)
    assert bench.said == []


@pytest.mark.parametrize("code", [404, 405, 501])
def test_a_server_that_never_had_heartbeats_gets_none(code: int) -> None:
    bench = HeartbeatBench(status(code), always_offered=False)
    bench.steps(5)
    assert (bench.beats, bench.refresh_if_dues, bench.said) == (1, 5, [])


def test_a_server_that_once_had_heartbeats_means_its_404() -> None:
    bench = HeartbeatBench(None, *[status(404)] * 2, always_offered=False)
    bench.steps(3)
    assert bench.said == [("lost", 404)]


def test_trouble_is_logged_after_two_minutes_and_then_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    bench = HeartbeatBench(*[APIConnectionError()] * 30)
    with caplog.at_level(logging.WARNING, "tinker_sync.session"):
        bench.steps(13)
        assert caplog.messages == []
        bench.steps(1)
        assert len(caplog.messages) == 1
        bench.steps(5)
        assert len(caplog.messages) == 1
        bench.steps(1)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "no heartbeat has reached the server for 130 s",
        "no heartbeat has reached the server for 190 s",
    ]
    assert bench.said == []


def test_our_own_mistake_does_not_end_the_heartbeats() -> None:
    bench = HeartbeatBench(KeyError("a"), None)
    assert bench.steps(2) == [True, True]
    assert bench.beats == 2


# ---------------------------------------------------------------------------------------------- late ones
def late(*, now_s: float, wall_s: float, cpu_s: float) -> list[object]:
    """Run a heartbeat, let these times pass on the clock, the date and the CPU, and run another one.

    Return the reports.
    """
    bench = HeartbeatBench()
    bench.heartbeat.step()
    bench.clock.advance(now_s)
    bench.clock.shift_date(wall_s - now_s)
    bench.cpu_s += cpu_s
    bench.heartbeat.step()
    return bench.said


def test_late_because_of_the_interpreter_lock(caplog: pytest.LogCaptureFixture) -> None:
    said = late(now_s=22.0, wall_s=22.0, cpu_s=12.0)
    assert said == [("late", 12.0, "this process held the interpreter lock for 12 s")]
    assert "a heartbeat is 12 s late: this process held the interpreter lock for 12 s" in caplog.text


def test_late_because_it_did_not_run() -> None:
    said = late(now_s=40.0, wall_s=40.0, cpu_s=0.1)
    assert said == [("late", 30.0, "this process did not run for 30 s: it was stopped, or swapped out")]


def test_late_because_the_machine_slept() -> None:
    said = late(now_s=10.0, wall_s=3610.0, cpu_s=0.1)
    assert said == [("late", 3600.0, "this machine was asleep for 3600 s, or its clock was set")]


def test_a_slow_answer_is_no_lateness() -> None:
    bench = HeartbeatBench()
    bench.beat = lambda: bench.clock.advance(30.0)  # type: ignore[method-assign]
    bench.heartbeat = Heartbeat(bench.beat, bench, clock=bench.clock, cpu=lambda: 0.0)
    bench.steps(3)
    assert bench.said == []


# ---------------------------------------------------------------------------------------------- the thread


def test_a_hint_brings_the_next_heartbeat_now_but_not_a_storm_of_them() -> None:
    bench = HeartbeatBench()
    bench.heartbeat.start()
    bench.clock.await_waiters()
    bench.heartbeat.beat_soon()  # the session was opened a moment ago
    bench.clock.advance(2.0)
    bench.heartbeat.beat_soon()
    until(lambda: bench.beats == 1)
    bench.clock.await_waiters()
    for _ in range(100):
        bench.heartbeat.beat_soon()
    bench.clock.await_waiters()
    bench.heartbeat.stop()
    bench.heartbeat.join(120)
    assert bench.beats == 1


def test_a_stop_that_comes_as_the_thread_wakes_is_not_lost() -> None:
    class StoppingClock(FakeClock):
        def wait(self, event: threading.Event, timeout_s: float) -> bool:
            bench.heartbeat.stop()  # before the thread clears the event
            return True

    bench = HeartbeatBench(clock=StoppingClock())
    bench.heartbeat.start()
    bench.heartbeat.join(120)
    assert bench.heartbeat.ended.is_set()
    assert bench.beats == 0


def test_the_thread_calls_the_function_passed_to_stop() -> None:
    bench = HeartbeatBench()
    done: list[str] = []
    bench.heartbeat.start()
    bench.heartbeat.stop(lambda: done.append(threading.current_thread().name))
    bench.heartbeat.stop(lambda: done.append("the first call counts"))
    assert bench.heartbeat.ended.wait(120)
    bench.heartbeat.join(120)
    assert done == ["tinker-heartbeat"]


def test_without_a_thread_the_last_thing_is_done_by_the_thread_that_stops_it() -> None:
    bench = HeartbeatBench()
    done: list[str] = []
    for _ in range(2):
        bench.heartbeat.stop(lambda: done.append(threading.current_thread().name))
    assert done == ["MainThread"]
    assert bench.heartbeat.ended.is_set()


def test_a_system_without_threads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    with pytest.raises(TinkerError, match="no thread"):
        HeartbeatBench().heartbeat.start()
