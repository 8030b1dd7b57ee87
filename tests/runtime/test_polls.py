"""The fetch of one result, from its first poll to the end of its future. The tests answer the polls."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.clock import FakeClock
from support.raising import raising
from support.sends import HandReactor, HandWorkers, NoWorkers

from tinker_sync import errors
from tinker_sync._base import policy
from tinker_sync._base.policy import Meaning, Rule, Stage
from tinker_sync.runtime.flows import Flows, Quota
from tinker_sync.runtime.futures import APIFuture, FutureState
from tinker_sync.runtime.polls import (
    FLOOR_S,
    LOG_EVERY_S,
    TROUBLE_LIMIT_S,
    Ask,
    Finished,
    Notices,
    Polls,
    Promise,
    QueueNotice,
    QueueReport,
    Retrieval,
    TakeBytes,
)
from tinker_sync.runtime.reactor import outcome_of
from tinker_sync.transport.call import Reply, SendFailed
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


# ---- The next action of a retrieval after each answer to a poll, without threads, sockets and pauses
NO_ANSWER = SendFailed("the connection broke", maybe_received=True)
REFUSED = SendFailed("cannot connect", maybe_received=False)
SILENCE = SendFailed("no answer came in time", maybe_received=True, timed_out=True)


def reply(status: int = 200, body: Any = None, **headers: str) -> Reply:
    octets = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, {"content-type": "application/json", **named}, octets)


TRY_AGAIN = reply(200, {"type": "try_again", "request_id": "req-1", "queue_state": "active"})


class Asking:
    """A retrieval with a clock. An answer arrives one second after its poll, or as long as a test states."""

    def __init__(self, **options: Any) -> None:
        self.notices: list[QueueNotice] = []
        self.retrieval = Retrieval("req-1", "Sample", draw=lambda: 1.0, wall=lambda: 0.0, **options)
        self.now = 100.0
        self.first = self.retrieval.ask()

    def gets(self, outcome: Reply | SendFailed, after_s: float = 1.0) -> Any:
        asked_at = self.now
        self.now += after_s
        action: Any
        try:
            action = self.retrieval.on(outcome, asked_at=asked_at, now=self.now)
        except Exception as error:  # noqa: BLE001  # the retrieval has ended with it
            action = error
        if self.retrieval.notice is not None:
            self.notices.append(self.retrieval.notice)
        return action

    def pauses(self, *outcomes: Reply | SendFailed) -> list[float | None]:
        """Return the pause after each of these answers, with None for no pause, and let the pauses pass."""
        pauses: list[float | None] = []
        for outcome in outcomes:
            action = self.gets(outcome)
            assert isinstance(action, float), action
            pauses.append(action or None)
            self.now += action
            self.retrieval.ask()
        return pauses

    def fails_with(self, outcome: Reply | SendFailed) -> Exception:
        action = self.gets(outcome)
        assert isinstance(action, Exception), action
        return action


def question(ask: Ask) -> Any:
    return json.loads(ask.body)


# ------------------------------------------------------------------------------------------ polls
def test_the_first_poll() -> None:
    ask = Asking(roundtrip_s=0.25).first
    assert question(ask) == {"request_id": "req-1", "allow_metadata_only": True}
    assert ask.headers == {
        "X-Tinker-Request-Iteration": "0",
        "X-Tinker-Request-Type": "Sample",
        "X-Tinker-Create-Promise-Roundtrip-Time": "0.25",
    }


def test_polls_after_similar_round_trips_share_their_headers() -> None:
    polls = [Asking(roundtrip_s=told_s).first for told_s in (0.2501, 0.2522)]
    assert polls[0].headers is polls[1].headers  # many thousands may be held
    assert polls[0].headers["X-Tinker-Create-Promise-Roundtrip-Time"] == "0.25"


# ------------------------------------------------------------------------------------------------ results
def test_protobuf_is_the_result() -> None:
    answer = reply(200, b"\x0a\x00", content_type="application/x-protobuf; x=y")
    assert Asking().gets(answer) == Finished(answer, None)


def test_large_results_are_announced_first() -> None:
    asking = Asking()
    announced = reply(200, {"status": "complete_metadata", "response_payload_size": 5000})
    assert asking.gets(announced) == TakeBytes(5000)
    assert question(asking.retrieval.ask()) == {"request_id": "req-1", "allow_metadata_only": False}
    assert isinstance(asking.gets(reply(200, {"a": 1})), Finished)


@pytest.mark.parametrize("size", [None, -1, "many"])
def test_an_announcement_without_a_size_counts_nothing(size: Any) -> None:
    announced = reply(200, {"status": "complete_metadata", "response_payload_size": size})
    assert Asking().gets(announced) == TakeBytes(0)


def test_a_second_announcement_is_asked_about_and_then_an_error() -> None:
    asking = Asking()
    announced = reply(200, {"status": "complete_metadata", "response_payload_size": 1})
    asking.gets(announced)
    assert asking.pauses(announced, announced) == [1.0, 2.0]
    assert isinstance(asking.fails_with(announced), errors.APIResponseValidationError)


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"7", b"null", b"", b"\xff"])
def test_what_is_no_object_is_a_typed_error_after_a_few_tries(body: bytes) -> None:
    asking = Asking()
    assert asking.pauses(reply(200, body), reply(200, body)) == [1.0, 2.0]
    error = asking.fails_with(reply(200, body))
    assert isinstance(error, errors.APIResponseValidationError)
    assert "req-1" in str(error)


@pytest.mark.parametrize(
    ("category", "expected"),
    [("user", "user"), ("server", "server"), ("martian", "unknown"), (None, "unknown"), (3, "unknown")],
)
def test_a_reported_failure(category: Any, expected: str) -> None:
    error = Asking().fails_with(reply(200, {"error": "out of memory", "category": category}))
    assert isinstance(error, errors.RequestFailedError)
    assert (error.message, error.request_id, error.category.value) == ("out of memory", "req-1", expected)


# -------------------------------------------------------------------------------------- polls that expire
def test_a_failure_as_open_servers_word_it() -> None:
    error = Asking().fails_with(reply(200, {"type": "RequestFailedResponse", "error_message": "bad data"}))
    assert isinstance(error, errors.RequestFailedError)
    assert error.message == "bad data"


def test_an_expired_poll_is_asked_again_at_once() -> None:
    paused = reply(408, {"queue_state": "paused_capacity", "queue_state_reason": "GPUs are out"})
    asking = Asking()
    assert asking.pauses(paused, TRY_AGAIN, SILENCE) == [None, None, None]
    assert asking.notices == [
        QueueNotice(QueueState.PAUSED_CAPACITY, "GPUs are out"),
        QueueNotice(QueueState.ACTIVE, None),
    ]


def test_silence_of_a_healthy_server_is_no_failure() -> None:
    asking = Asking()
    for _ in range(1000):
        asking.now += 45
        assert asking.gets(SILENCE) == 0.0


def test_polls_that_come_back_at_once_are_slowed_down() -> None:
    asking = Asking()
    pauses = []
    for _ in range(8):
        pause_s = asking.gets(reply(408, {}), after_s=0.001)
        pauses.append(pause_s)
        asking.now += pause_s
        asking.retrieval.ask()
    assert pauses == [FLOOR_S, 2 * FLOOR_S, 4 * FLOOR_S, 8 * FLOOR_S, 16 * FLOOR_S, 5.0, 5.0, 5.0]
    assert asking.gets(reply(408, {}), after_s=20.0) == 0.0
    assert asking.gets(reply(408, {}), after_s=0.001) == FLOOR_S


# ------------------------------------------------------------------------------------ trouble that passes


def test_the_servers_own_wish_is_heeded() -> None:
    asking = Asking()
    assert asking.pauses(reply(429, {}, retry_after="17"), reply(429, {}, retry_after_ms="250")) == [
        17.0,
        0.25,
    ]
    date = "Thu, 01 Jan 1970 00:01:40 GMT"
    assert asking.pauses(reply(429, {}, retry_after=date)) == [100.0]


def test_connections_that_break_back_off_up_to_half_a_minute() -> None:
    asking = Asking()
    assert asking.pauses(NO_ANSWER, REFUSED, NO_ANSWER, REFUSED, NO_ANSWER, REFUSED, REFUSED) == [
        1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (reply(503, b"x"), errors.InternalServerError),
        (reply(429, {}), errors.RateLimitError),
        (NO_ANSWER, errors.APIConnectionError),
        (REFUSED, errors.APIConnectionError),
    ],
)
def test_trouble_ends_at_its_limit_and_not_before(outcome: Any, error: type[Exception]) -> None:
    asking = Asking()
    began = asking.now + 1
    while True:
        action = asking.gets(outcome)
        if isinstance(action, Exception):
            break
        asking.now += action
        asking.retrieval.ask()
        assert asking.now - began <= TROUBLE_LIMIT_S + 1
    assert isinstance(action, error)
    assert asking.now - began >= TROUBLE_LIMIT_S - 31
    assert action.attempts == asking.retrieval.iteration  # type: ignore[attr-defined]


def test_the_size_of_a_result_is_a_good_answer() -> None:
    asking = Asking()
    assert isinstance(asking.gets(reply(503)), float)
    size = reply(200, {"status": "complete_metadata", "response_payload_size": 7})
    assert isinstance(asking.gets(size, after_s=TROUBLE_LIMIT_S - 10), TakeBytes)
    assert isinstance(asking.gets(reply(503), after_s=20.0), float)


def test_trouble_is_described_until_a_good_answer() -> None:
    asking = Asking()
    assert asking.retrieval.trouble_since is None
    asking.pauses(reply(500, {"detail": "no JSON form"}), reply(502))
    assert asking.retrieval.trouble_since == 101.0
    asking.pauses(reply(500, {"detail": "no JSON form"}))
    assert "no JSON form" in asking.retrieval.trouble
    asking.pauses(TRY_AGAIN)
    assert asking.retrieval.trouble_since is None


def test_trouble_with_good_answers_in_between_never_ends_it() -> None:
    asking = Asking()
    for _ in range(200):
        asking.pauses(reply(500, b"x"), reply(500, b"x"), TRY_AGAIN)
    assert asking.now > 100 + 2 * TROUBLE_LIMIT_S


def test_an_answer_for_which_there_is_no_memory_is_named() -> None:
    error = Asking().fails_with(outcome_of(MemoryError()))
    assert str(error).startswith("there was no memory for the result of request ")
    assert isinstance(error.__cause__, MemoryError)


def test_a_failure_that_is_final_is_not_retried() -> None:
    final = SendFailed("the certificate is not trusted", maybe_received=False, final=True)
    error = Asking().fails_with(final)
    assert isinstance(error, errors.APIConnectionError)
    assert error.__cause__ is final


def test_a_key_that_is_missing_for_a_moment_is_waited_for() -> None:
    missing = SendFailed("CredentialError: there is no new one", maybe_received=False, final=True)
    missing.__cause__ = errors.CredentialError("there is no new one")
    asking = Asking()
    asking.pauses(missing, missing)
    assert isinstance(asking.gets(reply(200, {})), Finished)
    asking = Asking()
    while isinstance(action := asking.gets(missing), float):
        asking.now += action
    assert action is missing.__cause__


# ---------------------------------------------------------------------------------------------------- 4xx
def test_bad_requests_are_asked_again_three_times_after_short_pauses() -> None:
    bad = reply(400, {"detail": "hm"})
    asking = Asking()
    assert asking.pauses(bad, bad, bad) == [0.25, 0.5, 1.0]
    assert isinstance(asking.fails_with(bad), errors.BadRequestError)
    asking = Asking()
    asking.pauses(bad, bad, bad)
    assert isinstance(asking.gets(reply(200, {})), Finished)


def test_an_expired_poll_renews_the_patience_with_bad_requests() -> None:
    bad = reply(400, {"detail": "hm"})
    asking = Asking()
    asking.pauses(bad, reply(408, {}), bad, bad, bad)
    assert isinstance(asking.gets(reply(200, {})), Finished)


def test_a_server_error_does_not() -> None:
    bad = reply(400, {"detail": "hm"})
    asking = Asking()
    asking.pauses(bad, reply(503, b"x"), bad, bad)
    assert isinstance(asking.fails_with(bad), errors.BadRequestError)


@pytest.mark.parametrize("status", [400, 422])
def test_open_servers_report_failures_as_statuses(status: int) -> None:
    asking = Asking(open_server=True)
    failed = reply(status, {"detail": "Future failed: shapes differ"})
    assert asking.pauses(failed) == [0.25]
    error = asking.fails_with(failed)
    assert isinstance(error, errors.RequestFailedError)
    assert error.request_id == "req-1"
    assert "shapes differ" in error.message
    assert isinstance(error.__cause__, errors.APIStatusError)


@pytest.mark.parametrize("meaning", [Meaning.RETRY, Meaning.UNTOUCHED, Meaning.THROTTLED])
def test_a_status_becomes_retryable_by_its_row_alone(
    meaning: Meaning, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = (Rule(meaning),) * len(Stage)
    monkeypatch.setattr(policy, "TABLE", {**policy.TABLE, 460: row})
    assert Asking().pauses(reply(460), reply(460)) == [1.0, 2.0]


def test_equal_errors_of_an_open_server_end_within_a_minute() -> None:
    asking, error = Asking(open_server=True), reply(500, {"detail": "cannot encode the result"})
    assert sum(filter(None, asking.pauses(*[error] * 7))) == 61.5
    assert isinstance(asking.fails_with(error), errors.InternalServerError)


@pytest.mark.parametrize(
    "answers",
    [
        [reply(500, {"detail": number}) for number in range(12)],
        [reply(500, b"<p>no</p>")] * 12,
        [reply(503, {"detail": "down"})] * 12,
        [*[reply(500, {"detail": "down"})] * 7, TRY_AGAIN] * 3,
    ],
    ids=["different", "a gateway's", "503", "with good answers"],
)
def test_other_errors_are_waited_out(answers: list[Reply]) -> None:
    Asking(open_server=True).pauses(*answers)


def test_the_service_may_answer_with_equal_errors_for_as_long_as_trouble_may_last() -> None:
    assert len(Asking().pauses(*[reply(500, {"detail": "down"})] * 12)) == 12


def test_a_promise_may_be_unknown_for_a_moment() -> None:
    unknown = reply(404, {"detail": "unknown"})
    asking = Asking()
    assert asking.pauses(unknown, unknown, unknown) == [0.5, 1.0, 2.0]
    assert isinstance(asking.fails_with(unknown), errors.NotFoundError)


DOUBTFUL = [reply(200, b"<html>"), reply(404, {"detail": "unknown"}), reply(400, {"detail": "odd"})]


@pytest.mark.parametrize("open_server", [False, True])
@pytest.mark.parametrize("doubtful", DOUBTFUL, ids=["unreadable", "404", "400"])
@pytest.mark.parametrize(
    "good",
    [TRY_AGAIN, reply(408, {"queue_state": "active"}), reply(425, {"detail": "not ready"})],
    ids=["try again", "408", "425"],
)
def test_doubtful_answers_hours_apart_do_not_add_up(doubtful: Reply, good: Reply, open_server: bool) -> None:
    asking = Asking(open_server=open_server)
    for _ in range(10):
        asking.pauses(doubtful)
        asking.now += 3600.0
        asking.pauses(good)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, errors.AuthenticationError),
        (403, errors.PermissionDeniedError),
        (422, errors.UnprocessableEntityError),
        (418, errors.APIStatusError),
    ],
)
def test_the_rest_fails_at_once_with_its_type(status: int, error: type[errors.APIStatusError]) -> None:
    raised = Asking().fails_with(reply(status, {"detail": "no"}))
    assert type(raised) is error
    assert raised.request_id == "req-1"
    assert (raised.method, raised.path) == ("POST", "/api/v1/retrieve_future")


def test_a_blocked_account_is_waited_for_as_long_as_allowed() -> None:
    may = [True, True, False]
    asking = Asking(may_pause_billing=lambda: may.pop(0))
    blocked = reply(402, {"detail": "pay"})
    assert asking.pauses(blocked, blocked) == [5.0, 5.0]
    assert isinstance(asking.fails_with(blocked), errors.APIStatusError)


# --------------------------------------------------------------------------------------------- last words
@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (reply(408, {"queue_state": "paused_rate_limit", "queue_state_reason": "too many"}), "too many"),
        (reply(503, b"x"), "status 503"),
        (NO_ANSWER, "the connection broke"),
        (reply(200, b"<html>"), "JSON"),
    ],
)
def test_what_was_heard_last_is_kept_for_the_deadline(outcome: Any, words: str) -> None:
    asking = Asking()
    asking.gets(outcome)
    assert words in asking.retrieval.last_words
