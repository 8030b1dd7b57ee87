"""Heartbeats, step by step: the meaning of each answer, late heartbeats, and the end of the thread."""

from __future__ import annotations

import logging
import threading

import pytest
from support.clock import FakeClock
from support.crowd import until
from support.raising import raising

from tinker_sync.errors import APIConnectionError, APIStatusError, TinkerError
from tinker_sync.runtime.heartbeat import PERIOD_S, Heartbeat


def status(code: int) -> APIStatusError:
    return APIStatusError.from_reply(code, {}, b'{"detail": "words"}')


class Bench:
    """A heartbeat whose answers are scripted, and the counts and reports of its steps."""

    def __init__(self, *answers: Exception | None, always_offered: bool = True) -> None:
        self.clock = FakeClock(automatic=False)
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
    bench = Bench(None, status(410))
    assert bench.steps(4) == [True] * 4
    assert (bench.beats, bench.refresh_if_dues) == (2, 4)
    assert bench.said == [("lost", 410)]


@pytest.mark.parametrize("code", [401, 404])
def test_a_refusal_that_stays_is_a_loss(code: int) -> None:
    bench = Bench(None, *[status(code)] * 3)
    bench.steps(2)
    assert bench.said == []  # the refusal may have come from a proxy
    bench.steps(2)
    assert bench.said == [("lost", code)]  # reported once
    assert bench.beats == 4


def test_one_refusal_alone_is_no_loss() -> None:
    bench = Bench(status(404), None, status(404), status(500), status(404))
    bench.steps(5)
    assert bench.said == []


@pytest.mark.parametrize("code", [404, 405, 501])
def test_a_server_that_never_had_heartbeats_gets_none(code: int) -> None:
    bench = Bench(status(code), always_offered=False)
    bench.steps(5)
    assert (bench.beats, bench.refresh_if_dues, bench.said) == (1, 5, [])


def test_a_server_that_once_had_heartbeats_means_its_404() -> None:
    bench = Bench(None, *[status(404)] * 2, always_offered=False)
    bench.steps(3)
    assert bench.said == [("lost", 404)]


def test_trouble_is_logged_after_two_minutes_and_then_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(*[APIConnectionError()] * 30)
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
    bench = Bench(KeyError("a"), None)
    assert bench.steps(2) == [True, True]
    assert bench.beats == 2


# ---------------------------------------------------------------------------------------------- late ones
def late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, now_s: float, wall_s: float, cpu_s: float
) -> list[object]:
    """Run a heartbeat, let these times pass on the clock, the date and the CPU, and run another one.

    Return the reports.
    """
    bench.heartbeat.step()
    now, wall = bench.clock.now(), bench.clock.time()
    monkeypatch.setattr(bench.clock, "now", lambda: now + now_s)
    monkeypatch.setattr(bench.clock, "time", lambda: wall + wall_s)
    bench.cpu_s += cpu_s
    bench.heartbeat.step()
    return bench.said


def test_late_because_of_the_interpreter_lock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = late(Bench(), monkeypatch, now_s=22.0, wall_s=22.0, cpu_s=12.0)
    assert said == [("late", 12.0, "this process held the interpreter lock for 12 s")]
    assert "a heartbeat is 12 s late: this process held the interpreter lock for 12 s" in caplog.text


def test_late_because_it_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said = late(Bench(), monkeypatch, now_s=40.0, wall_s=40.0, cpu_s=0.1)
    assert said == [("late", 30.0, "this process did not run for 30 s: it was stopped, or swapped out")]


def test_late_because_the_machine_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    said = late(Bench(), monkeypatch, now_s=10.0, wall_s=3610.0, cpu_s=0.1)
    assert said == [("late", 3600.0, "this machine was asleep for 3600 s, or its clock was set")]


def test_a_slow_answer_is_no_lateness() -> None:
    bench = Bench()
    bench.beat = lambda: bench.clock.advance(30.0)  # type: ignore[method-assign]
    bench.heartbeat = Heartbeat(bench.beat, bench, clock=bench.clock, cpu=lambda: 0.0)
    bench.steps(3)
    assert bench.said == []


# ---------------------------------------------------------------------------------------------- the thread


def test_a_hint_brings_the_next_heartbeat_now_but_not_a_storm_of_them() -> None:
    bench = Bench()
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


def test_a_stop_that_comes_as_the_thread_wakes_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    beats = bench.heartbeat
    monkeypatch.setattr(beats, "_thread", threading.current_thread())
    clear = beats._wake.clear

    def stop_first() -> None:
        beats.stop()
        clear()

    monkeypatch.setattr(beats._wake, "clear", stop_first)
    beats._wake.set()
    assert not beats._await_turn()


def test_the_thread_calls_the_function_passed_to_stop() -> None:
    bench = Bench()
    done: list[str] = []
    bench.heartbeat.start()
    bench.heartbeat.stop(lambda: done.append(threading.current_thread().name))
    bench.heartbeat.stop(lambda: done.append("the first call counts"))
    assert bench.heartbeat.ended.wait(120)
    bench.heartbeat.join(120)
    assert done == ["tinker-heartbeat"]


def test_without_a_thread_the_last_thing_is_done_by_the_thread_that_stops_it() -> None:
    bench = Bench()
    done: list[str] = []
    for _ in range(2):
        bench.heartbeat.stop(lambda: done.append(threading.current_thread().name))
    assert done == ["MainThread"]
    assert bench.heartbeat.ended.is_set()


def test_a_system_without_threads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    with pytest.raises(TinkerError, match="no thread for this call: can't start new thread"):
        Bench().heartbeat.start()
