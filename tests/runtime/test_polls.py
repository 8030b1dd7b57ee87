"""The fetch of one result, from its first poll to the end of its future. The tests answer the polls."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.clock import FakeClock
from support.polls import HandReactor
from support.raising import raising
from support.sends import HandWorkers, NoWorkers

from tinker_sync import errors
from tinker_sync.runtime.flows import Flows, Quota
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.polls import LOG_EVERY_S, Notices, Polls, Promise, QueueReport
from tinker_sync.runtime.progress import FutureState
from tinker_sync.runtime.retrieval import QueueNotice
from tinker_sync.transport.call import Reply
from tinker_sync.types import QueueState

PAUSED = QueueNotice(QueueState.PAUSED_CAPACITY, None)


class Bench:
    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.reactor = HandReactor(self.clock)
        self.room = Quota(1000)
        self.workers: Any = HandWorkers()
        self.workers.run_call = self.workers.run
        self.told: list[tuple[QueueNotice, Promise]] = []
        self.polls = Polls(
            Flows(self.reactor, NoWorkers()),  # type: ignore[arg-type]  # a double
            self.room,
            self.workers,
            on_notice=lambda notice, promise: self.told.append((notice, promise)),
            clock=self.clock,
            **options,
        )

    def fetch(self, promise: Promise | None = None, **options: Any) -> APIFuture[Any]:
        future: APIFuture[Any] = APIFuture(clock=self.clock)
        options.setdefault("decode", lambda reply, tree: tree if tree is not None else reply.body)
        decode = options.pop("decode")
        self.polls.fetch(promise or Promise("req-1", "OptimStep"), future, decode, **options)
        return future

    @property
    def free(self) -> int:
        return self.room.free

    def fill(self) -> None:
        """Overdraw the quota of bytes by half of its size."""
        self.room.free -= 1500


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_protobuf_is_asked_for_where_it_may_come(bench: Bench) -> None:
    future = bench.fetch(Promise("req-1", "Sample", wants_proto=True))
    asked = bench.reactor.next()
    assert asked.call.accept == "application/x-protobuf, application/json"
    asked.end(Reply(200, {"content-type": "application/x-protobuf"}, b"octets"))
    assert future.result(0) == b"octets"


def test_the_budget_holds_a_large_result_from_the_peek_to_the_decoding(bench: Bench) -> None:
    held: list[int] = []

    def decode(reply: Reply, tree: Any) -> Any:
        held.append(bench.free)
        return tree

    future = bench.fetch(decode=decode)
    bench.reactor.answer(200, {"status": "complete_metadata", "response_payload_size": 400})
    assert bench.reactor.next().body == {"request_id": "req-1", "allow_metadata_only": False}
    bench.reactor.answer(200, {"a": 1})
    assert future.result(0) == {"a": 1}
    assert held == [600]
    assert bench.free == 1000


def test_a_full_budget_makes_the_next_result_wait(bench: Bench) -> None:
    first, second = bench.fetch(), bench.fetch(Promise("req-2", "OptimStep"))
    for size in (1500, 10):
        bench.reactor.answer(200, {"status": "complete_metadata", "response_payload_size": size})
    assert bench.reactor.waiting == 1  # the first fetch polls, and the second waits for the byte budget
    bench.reactor.answer(200, {"a": 1})
    assert first.result(0) == {"a": 1}
    assert not second.done()
    bench.reactor.answer(200, {"b": 2})
    assert second.result(0) == {"b": 2}
    assert bench.free == 1000


def test_a_wait_for_the_budget_ends_at_the_deadline(bench: Bench) -> None:
    bench.fill()
    promise = Promise("req-1", "Sample", announced_bytes=400)
    future = bench.fetch(promise, deadline_at=bench.clock.now() + 5.0)
    assert bench.reactor.pass_time() == pytest.approx(5.0)
    assert isinstance(future.exception(0), errors.DeadlineError)
    bench.room.give_back(1500)
    assert bench.reactor.waiting == 0
    assert bench.free == 1000


@pytest.mark.parametrize("ending", ["decode", "failure", "status", "lost", "abandoned"])
def test_the_budget_gets_its_bytes_back_however_it_ends(ending: str) -> None:
    bench = Bench()

    future = bench.fetch(
        Promise("req-1", "Sample", announced_bytes=400), decode=raising(errors.WireError("odd", "$.a"))
    )
    assert bench.free == 600
    if ending == "decode":
        bench.reactor.answer(200, {"a": 1})
        bench.reactor.answer(200, {"a": 1})
    elif ending == "failure":
        bench.reactor.answer(200, {"error": "x", "category": "user"})
    elif ending == "status":
        bench.reactor.answer(403, {"detail": "no"})
    elif ending == "lost":
        bench.reactor.lose(final=True)
    else:
        future.cancel()
    assert future.done()
    assert bench.free == 1000


def test_a_result_that_cannot_be_read_names_its_request(bench: Bench) -> None:
    future = bench.fetch(decode=raising(errors.WireError("expected a number", "$.metrics.a")))
    bench.reactor.answer(200, {"metrics": {"a": "x"}})
    assert not future.done()
    bench.reactor.answer(200, {"metrics": {"a": "x"}})
    error = future.exception(0)
    assert isinstance(error, errors.APIResponseValidationError)
    assert "req-1" in str(error)
    assert "$.metrics.a" in str(error)


@pytest.mark.parametrize("broken", [False, True])
def test_a_large_answer_is_read_by_workers_while_other_results_arrive(bench: Bench, broken: bool) -> None:
    decode: Any = raising(errors.WireError("odd", "$.a")) if broken else lambda _, tree: len(tree["a"])
    large, small = bench.fetch(decode=decode), bench.fetch()
    bench.reactor.answer(200, {"a": "x" * 300_000})
    bench.reactor.answer(200, {"b": 1})
    assert small.result(0) == {"b": 1}
    assert not large.done()
    bench.workers.do_all()
    if broken:
        bench.reactor.answer(200, {"a": "x" * 300_000})
        bench.workers.do_all()
        with pytest.raises(errors.APIResponseValidationError):
            large.result(0)
    else:
        assert large.result(0) == 300_000


@pytest.mark.parametrize("status", [403, 410])
def test_a_result_that_is_gone_when_it_is_asked_for_again_has_the_first_error(
    bench: Bench, status: int
) -> None:
    future = bench.fetch(decode=raising(errors.WireError("odd", "$.a")))
    bench.reactor.answer(200, {"a": 1})
    bench.reactor.answer(status, {"detail": "gone"})
    with pytest.raises(errors.APIResponseValidationError, match=r"\$\.a: odd"):
        future.result(0)


def test_a_paused_queue_shows_in_the_status_and_is_reported(bench: Bench) -> None:
    future = bench.fetch()
    bench.clock.advance(30)
    bench.reactor.answer(408, {"queue_state": "paused_capacity", "queue_state_reason": "no GPUs"})
    assert future.status().state is FutureState.PAUSED
    assert future.status().reason == "no GPUs"
    assert bench.told == [(QueueNotice(QueueState.PAUSED_CAPACITY, "no GPUs"), Promise("req-1", "OptimStep"))]
    bench.clock.advance(30)
    bench.reactor.answer(408, {"queue_state": "active"})
    assert future.status().state is FutureState.WAITING


# ------------------------------------------------------------------------------------- deadlines
def test_a_deadline_between_polls(bench: Bench) -> None:
    future = bench.fetch(deadline_at=bench.clock.now() + 60)
    bench.clock.advance(59)
    bench.reactor.answer(408, {"queue_state": "paused_rate_limit", "queue_state_reason": "too many"})
    assert not future.done()
    bench.clock.advance(2)
    bench.reactor.answer(408, {"queue_state": "paused_rate_limit", "queue_state_reason": "too many"})
    error = future.exception(0)
    assert isinstance(error, errors.DeadlineError)
    assert (error.request_id, error.attempts, error.waited_s) == ("req-1", 3, 61.0)
    assert "too many" in error.last_words
    assert "too many" in str(error)


@pytest.mark.parametrize("end", [{"timed_out": True}, {"final": True}])
def test_a_poll_is_not_waited_for_beyond_the_deadline(bench: Bench, end: dict[str, bool]) -> None:
    future = bench.fetch(deadline_at=bench.clock.now() + 10)
    asked = bench.reactor.next()
    assert asked.call.deadline_s == 10.0
    bench.clock.advance(10)
    bench.reactor.lose(**end)
    assert isinstance(future.exception(0), errors.DeadlineError)


def test_a_pause_that_would_outlast_the_deadline_is_not_begun(bench: Bench) -> None:
    future = bench.fetch(deadline_at=bench.clock.now() + 10)
    bench.reactor.answer(429, {}, retry_after="3600")
    assert isinstance(future.exception(0), errors.DeadlineError)
    assert bench.reactor.timers == []


# ------------------------------------------------------------------------------------- giving up


def test_a_cancelled_future_ends_the_asking_in_a_pause(bench: Bench) -> None:
    future = bench.fetch()
    bench.reactor.answer(503, {})
    assert future.cancel()
    assert not bench.reactor.timers[0].live
    assert bench.reactor.waiting == 0


def test_every_listener_gets_every_notice() -> None:
    notices, heard = Notices(FakeClock()), [[], []]  # type: ignore[var-annotated]
    stop = notices.listen(heard[0].append)
    notices.listen(heard[1].append)
    notices.publish(PAUSED, "Sample", "req-1")
    notices.publish(QueueNotice(QueueState.ACTIVE, "soon"), "Sample", "req-1")
    stop()
    stop()
    notices.publish(PAUSED, "Sample", "req-2")
    first = [
        QueueReport(QueueState.PAUSED_CAPACITY, None, "Sample", "req-1"),
        QueueReport(QueueState.ACTIVE, "soon", "Sample", "req-1"),
    ]
    assert heard == [first, [*first, QueueReport(QueueState.PAUSED_CAPACITY, None, "Sample", "req-2")]]


# ------------------------------------------------------------------------------------- notices


def test_an_exception_of_a_listener_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    notices, heard = Notices(FakeClock()), []  # type: ignore[var-annotated]
    notices.listen(lambda _: 1 / 0)
    notices.listen(heard.append)
    notices.publish(PAUSED, "Sample", "req-1")
    assert len(heard) == 1
    assert "an observer of queue states failed" in caplog.text


def test_listeners_are_called_without_the_lock() -> None:
    notices, heard = Notices(FakeClock()), []  # type: ignore[var-annotated]
    notices.listen(lambda _: notices.listen(heard.append))  # would hang
    for request_id in ("req-1", "req-2"):
        notices.publish(PAUSED, "Sample", request_id)
    assert [report.request_id for report in heard] == ["req-2"]


def test_one_line_a_minute_for_each_kind_and_state(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    notices = Notices(clock)
    with caplog.at_level(logging.WARNING, "tinker_sync.queue"):
        for number in range(100):
            notices.publish(PAUSED, "Sample", f"req-{number}")
        assert len(caplog.messages) == 1
        notices.publish(QueueNotice(QueueState.PAUSED_RATE_LIMIT, "ten at a time"), "Sample", "req-1")
        notices.publish(PAUSED, "OptimStep", "req-2")
        assert len(caplog.messages) == 3
        clock.advance(LOG_EVERY_S - 1)
        notices.publish(PAUSED, "Sample", "req-1")
        assert len(caplog.messages) == 3
        clock.advance(1)
        notices.publish(PAUSED, "Sample", "req-1")
    short = "the service is short of capacity at the moment"
    assert caplog.messages == [
        f"Sample requests are paused (paused_capacity): {short}; waiting",
        "Sample requests are paused (paused_rate_limit): ten at a time; waiting",
        f"OptimStep requests are paused (paused_capacity): {short}; waiting",
        f"Sample requests are paused (paused_capacity): {short}; waiting",
    ]


def test_a_paused_training_request_is_reported_though_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    notices, heard = Notices(FakeClock()), []  # type: ignore[var-annotated]
    notices.listen(heard.append)
    with caplog.at_level(logging.WARNING, "tinker_sync.queue"):
        notices.publish(QueueNotice(QueueState.ACTIVE, None), "ForwardBackward", "req-1")
        notices.publish(PAUSED, "ForwardBackward", "req-2")
    assert len(caplog.messages) == 1  # the first line comes at once
    assert [(state.request_id, state.state) for state in heard] == [
        ("req-1", "active"),
        ("req-2", "paused_capacity"),
    ]
