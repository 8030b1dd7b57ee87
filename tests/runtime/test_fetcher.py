"""The fetch of one result, from its first poll to the end of its future. The tests answer the polls."""

from __future__ import annotations

from typing import Any

import pytest
from support.clock import FakeClock
from support.polls import HandPoller
from support.raising import raising

from tinker_sync import errors
from tinker_sync.runtime.byte_budget import ByteBudget
from tinker_sync.runtime.fetcher import Fetcher, Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.progress import FutureState
from tinker_sync.runtime.retrieval import QueueNotice
from tinker_sync.transport.call import Reply
from tinker_sync.types import QueueState


class Bench:
    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.poller = HandPoller(self.clock)
        self.inflight = ByteBudget(1000)
        self.told: list[tuple[QueueNotice, Promise]] = []
        self.fetcher = Fetcher(
            self.poller,  # type: ignore[arg-type]  # a double
            self.inflight,
            on_notice=lambda notice, promise: self.told.append((notice, promise)),
            clock=self.clock,
            **options,
        )

    def fetch(self, promise: Promise | None = None, **options: Any) -> APIFuture[Any]:
        future: APIFuture[Any] = APIFuture(clock=self.clock)
        options.setdefault("decode", lambda reply, tree: tree if tree is not None else reply.body)
        decode = options.pop("decode")
        self.last = self.fetcher.fetch(promise or Promise("req-1", "OptimStep"), future, decode, **options)
        return future

    @property
    def free(self) -> str:
        return repr(self.inflight)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_result(bench: Bench) -> None:
    future = bench.fetch()
    asked = bench.poller.next()
    assert asked.path == "/api/v1/retrieve_future"
    assert asked.call.accept == "application/json"
    bench.poller.answer(200, {"metrics": {"a": 1.0}})
    assert future.result(0) == {"metrics": {"a": 1.0}}


def test_protobuf_is_asked_for_where_it_may_come(bench: Bench) -> None:
    future = bench.fetch(Promise("req-1", "Sample", wants_proto=True))
    asked = bench.poller.next()
    assert asked.call.accept == "application/x-protobuf, application/json"
    asked.end(Reply(200, {"content-type": "application/x-protobuf"}, b"octets"))
    assert future.result(0) == b"octets"


def test_pauses_are_waited_out_by_the_clock(bench: Bench) -> None:
    future = bench.fetch()
    bench.poller.answer(503, {})
    assert bench.poller.waiting == 0
    assert 0.375 <= bench.poller.pass_time() <= 0.5
    bench.poller.answer(200, {"a": 1})
    assert future.result(0) == {"a": 1}


def test_the_budget_holds_a_large_result_from_the_peek_to_the_decoding(bench: Bench) -> None:
    held: list[str] = []

    def decode(reply: Reply, tree: Any) -> Any:
        held.append(bench.free)
        return tree

    future = bench.fetch(decode=decode)
    bench.poller.answer(200, {"status": "complete_metadata", "response_payload_size": 400})
    assert bench.poller.next().body == {"request_id": "req-1", "allow_metadata_only": False}
    bench.poller.answer(200, {"a": 1})
    assert future.result(0) == {"a": 1}
    assert "600 of 1000" in held[0]
    assert "1000 of 1000" in bench.free


def test_a_full_budget_makes_the_next_result_wait(bench: Bench) -> None:
    first, second = bench.fetch(), bench.fetch(Promise("req-2", "OptimStep"))
    for size in (1500, 10):
        bench.poller.answer(200, {"status": "complete_metadata", "response_payload_size": size})
    assert bench.poller.waiting == 1  # the first fetch polls, and the second waits for the byte budget
    bench.poller.answer(200, {"a": 1})
    assert first.result(0) == {"a": 1}
    assert not second.done()
    bench.poller.pass_time()
    bench.poller.answer(200, {"b": 2})
    assert second.result(0) == {"b": 2}
    assert "1000 of 1000" in bench.free


def test_a_wait_for_the_budget_ends_at_the_deadline(bench: Bench) -> None:
    assert bench.inflight.try_acquire(1500)
    promise = Promise("req-1", "Sample", announced_bytes=400)
    future = bench.fetch(promise, deadline_at=bench.clock.now() + 5.0)
    assert bench.poller.pass_time() == pytest.approx(5.0)
    assert isinstance(future.exception(0), errors.DeadlineError)
    bench.inflight.release(1500)
    bench.poller.pass_time()
    assert bench.poller.waiting == 0
    assert "1000 of 1000" in bench.free


def test_a_result_that_got_its_bytes_in_time_is_asked_for(bench: Bench) -> None:
    assert bench.inflight.try_acquire(1500)
    promise = Promise("req-1", "Sample", announced_bytes=400)
    future = bench.fetch(promise, deadline_at=bench.clock.now() + 5.0)
    bench.inflight.release(1500)
    assert bench.poller.pass_time() == 0.0
    bench.poller.answer(200, {"a": 1})
    assert future.result(0) == {"a": 1}


def test_an_announced_result_is_asked_for_whole(bench: Bench) -> None:
    bench.fetch(Promise("req-1", "Sample", announced_bytes=400))
    assert bench.poller.next().body == {"request_id": "req-1", "allow_metadata_only": False}


@pytest.mark.parametrize("ending", ["decode", "failure", "status", "lost", "abandoned"])
def test_the_budget_gets_its_bytes_back_however_it_ends(ending: str) -> None:
    bench = Bench()

    future = bench.fetch(
        Promise("req-1", "Sample", announced_bytes=400), decode=raising(errors.WireError("odd", "$.a"))
    )
    assert "600 of 1000" in bench.free
    if ending == "decode":
        bench.poller.answer(200, {"a": 1})
        bench.poller.answer(200, {"a": 1})
    elif ending == "failure":
        bench.poller.answer(200, {"error": "x", "category": "user"})
    elif ending == "status":
        bench.poller.answer(403, {"detail": "no"})
    elif ending == "lost":
        bench.poller.lose(final=True)
    else:
        future.cancel()
        bench.last.abandon()
    assert future.done()
    assert "1000 of 1000" in bench.free


def test_failures_are_the_futures(bench: Bench) -> None:
    failed, refused = bench.fetch(), bench.fetch()
    bench.poller.answer(200, {"error": "out of memory", "category": "server"})
    bench.poller.answer(403, {"detail": "no"})
    assert isinstance(failed.exception(0), errors.RequestFailedError)
    assert isinstance(refused.exception(0), errors.APIStatusError)


def test_a_result_that_cannot_be_read_names_its_request(bench: Bench) -> None:
    future = bench.fetch(decode=raising(errors.WireError("expected a number", "$.metrics.a")))
    bench.poller.answer(200, {"metrics": {"a": "x"}})
    assert not future.done()
    bench.poller.answer(200, {"metrics": {"a": "x"}})
    error = future.exception(0)
    assert isinstance(error, errors.APIResponseValidationError)
    assert "req-1" in str(error)
    assert "$.metrics.a" in str(error)


@pytest.mark.parametrize("status", [403, 410])
def test_a_result_that_is_gone_when_it_is_asked_for_again_has_the_first_error(
    bench: Bench, status: int
) -> None:
    future = bench.fetch(decode=raising(errors.WireError("odd", "$.a")), on_gone=raising(RuntimeError()))
    bench.poller.answer(200, {"a": 1})
    bench.poller.answer(status, {"detail": "gone"})
    with pytest.raises(errors.APIResponseValidationError, match=r"\$\.a: odd"):
        future.result(0)


def test_a_decoder_that_fails_otherwise_fails_the_future(bench: Bench) -> None:
    future = bench.fetch(decode=lambda reply, tree: 1 / 0)
    bench.poller.answer(200, {})
    assert isinstance(future.exception(0), ZeroDivisionError)


def test_a_step_that_breaks_fails_the_future(bench: Bench) -> None:
    future = bench.fetch(on_gone=raising(RuntimeError("no way on")))
    bench.poller.answer(410, {"detail": "gone"})
    with pytest.raises(RuntimeError, match="no way on"):
        future.result(0)


def test_a_poll_that_cannot_be_sent_fails_the_future(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    future = bench.fetch()
    bench.poller.answer(503, {})
    monkeypatch.setattr(bench.poller, "start", raising(RuntimeError("no poller")))
    bench.poller.pass_time()
    with pytest.raises(RuntimeError, match="no poller"):
        future.result(0)


def test_a_410_is_left_to_on_gone(bench: Bench) -> None:
    gone: list[Exception] = []
    future = bench.fetch(on_gone=gone.append)
    bench.poller.answer(410, {"detail": "forgotten"})
    assert not future.done()
    assert isinstance(gone[0], errors.APIStatusError)
    other = bench.fetch()
    bench.poller.answer(410, {"detail": "forgotten"})
    assert isinstance(other.exception(0), errors.APIStatusError)


def test_a_paused_queue_shows_in_the_status_and_is_reported(bench: Bench) -> None:
    future = bench.fetch()
    bench.clock.advance(30)
    bench.poller.answer(408, {"queue_state": "paused_capacity", "queue_state_reason": "no GPUs"})
    assert future.status().state is FutureState.PAUSED
    assert future.status().reason == "no GPUs"
    assert bench.told == [(QueueNotice(QueueState.PAUSED_CAPACITY, "no GPUs"), Promise("req-1", "OptimStep"))]
    bench.clock.advance(30)
    bench.poller.answer(408, {"queue_state": "active"})
    assert future.status().state is FutureState.WAITING


def test_an_observer_that_fails_harms_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.fetcher.on_notice = lambda notice, promise: 1 / 0  # type: ignore[assignment,return-value]
    future = bench.fetch()
    bench.poller.answer(408, {"queue_state": "paused_capacity"})
    assert "a queue observer failed" in caplog.text
    bench.poller.pass_time()
    bench.poller.answer(200, {"a": 1})
    assert future.result(0) == {"a": 1}


# ------------------------------------------------------------------------------------- deadlines
def test_a_deadline_between_polls(bench: Bench) -> None:
    future = bench.fetch(deadline_at=bench.clock.now() + 60)
    bench.clock.advance(59)
    bench.poller.answer(408, {"queue_state": "paused_rate_limit", "queue_state_reason": "too many"})
    assert not future.done()
    bench.clock.advance(2)
    bench.poller.answer(408, {"queue_state": "paused_rate_limit", "queue_state_reason": "too many"})
    error = future.exception(0)
    assert isinstance(error, errors.DeadlineError)
    assert (error.request_id, error.attempts, error.waited_s) == ("req-1", 3, 61.0)
    assert "too many" in error.last_words
    assert "too many" in str(error)


@pytest.mark.parametrize("end", [{"timed_out": True}, {"final": True}])
def test_a_poll_is_not_waited_for_beyond_the_deadline(bench: Bench, end: dict[str, bool]) -> None:
    future = bench.fetch(deadline_at=bench.clock.now() + 10)
    asked = bench.poller.next()
    assert asked.call.deadline_s == 10.0
    bench.clock.advance(10)
    bench.poller.lose(**end)
    assert isinstance(future.exception(0), errors.DeadlineError)


def test_a_pause_that_would_outlast_the_deadline_is_not_begun(bench: Bench) -> None:
    future = bench.fetch(deadline_at=bench.clock.now() + 10)
    bench.poller.answer(429, {}, retry_after="3600")
    assert isinstance(future.exception(0), errors.DeadlineError)
    assert bench.poller.timers == []


# ------------------------------------------------------------------------------------- giving up
def test_an_abandoned_fetch_asks_no_more(bench: Bench) -> None:
    future = bench.fetch()
    asked = bench.poller.next()
    assert future.cancel()
    bench.last.abandon()
    assert not asked.live
    assert bench.poller.waiting == 0


def test_a_cancelled_future_ends_the_asking_after_a_pause(bench: Bench) -> None:
    future = bench.fetch()
    bench.poller.answer(503, {})
    assert future.cancel()
    bench.poller.pass_time()
    assert bench.poller.waiting == 0


def test_a_future_that_ends_before_its_bytes_are_used_gives_them_back(bench: Bench) -> None:
    assert bench.inflight.try_acquire(1500)
    future = bench.fetch(Promise("req-1", "Sample", announced_bytes=400))
    bench.inflight.release(1500)
    assert "600 of 1000" in bench.free
    assert future.cancel()
    bench.poller.pass_time()
    assert bench.poller.waiting == 0
    assert "1000 of 1000" in bench.free


def test_a_forgotten_promise_gives_its_bytes_back(bench: Bench) -> None:
    free: list[str] = []
    promise = Promise("req-1", "Sample", announced_bytes=400)
    bench.fetch(promise, on_gone=lambda _: free.append(bench.free))
    bench.poller.answer(410, {"detail": "forgotten"})
    assert "1000 of 1000" in free[0]


def test_a_closed_budget_fails_who_wants_room(bench: Bench) -> None:
    future = bench.fetch()
    bench.inflight.close(errors.APIConnectionError("The client was closed."))
    bench.poller.answer(200, {"status": "complete_metadata", "response_payload_size": 400})
    assert isinstance(future.exception(0), errors.APIConnectionError)
