"""One poll for all samples of a session: the order of polls, and servers without such a poll."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from support.clock import FakeClock
from support.sends import HandReactor, NoWorkers

from tinker_sync.runtime.flows import CalledOff, Flow, Flows, Quota
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.polls import GoneError, Polls, Promise
from tinker_sync.runtime.session_poll import EARLY_KEPT, PATH, SessionPoll
from tinker_sync.transport.call import SendFailed

ONE = "/api/v1/retrieve_future"


class Bench:
    def __init__(self, clone_id: int = 0, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.reactor = HandReactor(self.clock)
        self.flows = Flows(self.reactor, NoWorkers())  # type: ignore[arg-type]  # a double
        polls = Polls(self.flows, Quota(10_000), NoWorkers(), clock=self.clock)
        self.together = SessionPoll(polls, "sampler-1", clone_id, clock=self.clock)

    def wait_for(
        self,
        request_id: str,
        *,
        deadline_at: float = math.inf,
        on_gone: Callable[[Exception], object] = print,
    ) -> APIFuture[Any]:
        """Fetch a sample. `on_gone` gets the error if the server has forgotten it."""

        def flow() -> Flow[Any]:
            promise = Promise(request_id, "Sample", wants_proto=True)
            try:
                return (yield from self.together.fetch(promise, future, lambda _, tree: tree, deadline_at))
            except GoneError as gone:
                on_gone(gone.error)
                raise CalledOff from None  # the future stays as it is

        future: APIFuture[Any] = APIFuture(clock=self.clock)
        self.flows.start(flow(), future)
        return future

    def announce(self, cursor: int, *request_ids: str, failed: tuple[str, ...] = ()) -> None:
        completions: list[dict[str, Any]] = [
            {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": 100}
            for request_id in request_ids
        ]
        completions += [{"state": "failed", "request_id": request_id} for request_id in failed]
        self.reactor.answer(200, {"completions": completions, "cursor": cursor}, path=PATH)

    def fetch_next(self, body: Any) -> None:
        """Answer the oldest poll for a single result."""
        self.reactor.answer(200, body, path=ONE)

    def singles(self) -> list[str]:
        return [
            asked.body["request_id"] for asked in self.reactor.requests if asked.live and asked.path == ONE
        ]

    def polls(self) -> list[Any]:
        return [asked.body for asked in self.reactor.requests if asked.path == PATH]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_samples_are_fetched_when_announced_and_reported_when_fetched(bench: Bench) -> None:
    futures = {name: bench.wait_for(name) for name in "abc"}
    assert len(bench.polls()) == 1  # one poll for all samples
    bench.announce(2, "b", "c")
    assert sorted(bench.singles()) == ["b", "c"]
    asked = [asked for asked in bench.reactor.requests if asked.live and asked.path == ONE]
    assert all(ask.body["allow_metadata_only"] is False for ask in asked)
    assert bench.polls()[1]["prev_cursor"] == 2
    bench.fetch_next({"of": "b"})
    bench.fetch_next({"of": "c"})
    assert futures["b"].result(0) == {"of": "b"}
    bench.announce(3, "a")
    assert bench.polls()[2]["retrieved_request_ids"] == ["b", "c"]
    bench.fetch_next({"of": "a"})
    assert futures["a"].result(0) == {"of": "a"}
    bench.announce(3)
    assert bench.polls()[3]["retrieved_request_ids"] == ["a"]
    bench.announce(3)
    assert len(bench.polls()) == 4  # no result is awaited, and nothing is left to report


def test_a_failed_sample_is_fetched_for_its_reason(bench: Bench) -> None:
    future = bench.wait_for("a")
    bench.announce(1, failed=("a",))
    bench.fetch_next({"error": "too long", "category": "user"})
    assert "too long" in str(future.exception(0))


def test_an_announcement_may_come_before_the_promise(bench: Bench) -> None:
    bench.wait_for("a")
    bench.announce(1, "b")
    future = bench.wait_for("b")
    assert bench.singles() == ["b"]
    bench.fetch_next({"of": "b"})
    assert future.result(0) == {"of": "b"}


def test_of_announcements_without_waiter_only_the_latest_are_kept(bench: Bench) -> None:
    bench.wait_for("a")
    bench.announce(5, "first", "second", *map(str, range(EARLY_KEPT - 1)))
    for early in ("first", "second"):
        bench.wait_for(early)
    assert bench.singles() == ["second"]


@pytest.mark.parametrize("status", [404, 405, 501, 403, 422])
def test_without_such_a_poll_samples_are_asked_for_one_by_one(bench: Bench, status: int) -> None:
    first = bench.wait_for("a")
    bench.reactor.answer(status, {"detail": "no"}, path=PATH)
    if status == 501:  # the client retries after a server error
        for _ in range(2):
            bench.reactor.pass_time()
            bench.reactor.answer(status, {"detail": "no"}, path=PATH)
    assert bench.singles() == ["a"]
    bench.fetch_next({"of": "a"})
    assert first.result(0) == {"of": "a"}
    if status != 501:
        bench.wait_for("b")
        assert bench.singles() == ["b"]
        assert len(bench.polls()) == 1


@pytest.mark.parametrize("status", [500, 503, 429, 408, 409, 402])
def test_trouble_that_passes_is_waited_out(bench: Bench, status: int) -> None:
    bench.wait_for("a")
    bench.reactor.answer(status, {"detail": "later"}, path=PATH)
    assert bench.reactor.waiting == 0
    assert bench.reactor.pass_time() > 0
    bench.announce(1, "a")
    assert bench.singles() == ["a"]


def test_lasting_trouble_releases_the_waiters(bench: Bench) -> None:
    future = bench.wait_for("a")
    for _ in range(2):
        bench.reactor.answer(503, {}, path=PATH)
        bench.reactor.pass_time()
    bench.reactor.answer(503, {}, path=PATH)
    assert bench.singles() == ["a"]
    bench.fetch_next({"of": "a"})
    assert future.result(0) == {"of": "a"}
    later = [bench.wait_for("b"), bench.wait_for("c")]
    assert bench.singles() == ["b", "c"]
    for name in "bc":
        bench.fetch_next({"of": name})
    assert [future.result(0) for future in later] == [{"of": "b"}, {"of": "c"}]
    bench.reactor.pass_time()
    bench.announce(1)  # the acknowledgement shows that the poll works again
    bench.wait_for("d")
    assert bench.singles() == []
    bench.announce(2, "d")
    assert bench.singles() == ["d"]


@pytest.mark.parametrize("failure", [500, 429, None])
def test_a_poll_that_never_works_holds_up_no_sample(bench: Bench, failure: int | None) -> None:
    futures = []
    for number in range(6):
        futures.append(bench.wait_for(f"s{number}"))
        for _ in range(4):
            while any(asked.live and asked.path == PATH for asked in bench.reactor.requests):
                if failure is None:
                    bench.reactor.next(PATH).end(SendFailed("the connection broke", maybe_received=True))
                else:
                    bench.reactor.answer(failure, {}, path=PATH)
            if any(timer.live for timer in bench.reactor.timers):
                bench.reactor.pass_time()
        assert bench.singles() == [f"s{number}"]
        bench.fetch_next({"of": number})
        assert futures[-1].result(0) == {"of": number}


def test_the_third_sample_under_one_id_waits_though_the_others_end(bench: Bench) -> None:
    futures = [bench.wait_for("a") for _ in range(3)]
    for number in range(2):
        bench.fetch_next({"sequence": number})
    assert [future.done() for future in futures] == [True, True, False]
    bench.announce(1, "a")
    bench.fetch_next({"sequence": 2})
    assert futures[2].result(0) == {"sequence": 2}


def test_a_poll_costs_the_same_however_many_samples_wait() -> None:
    looks: list[float] = []

    class CountingClock(FakeClock):
        def now(self) -> float:
            looks.append(super().now())
            return looks[-1]

    bench, costs = Bench(clock=CountingClock()), []
    for _ in range(2):
        for _ in range(500):
            bench.wait_for(f"{len(looks)}", deadline_at=bench.clock.now() + 3600.0)
        before = len(looks)
        bench.announce(0)
        bench.reactor.pass_time()  # the next poll
        costs.append(len(looks) - before)
    assert costs[0] == costs[1] < 50


def test_a_server_that_answers_at_once_without_news_is_not_asked_without_a_pause(bench: Bench) -> None:
    future = bench.wait_for("a")
    pauses = []
    for _ in range(5):
        bench.announce(0)
        assert bench.reactor.waiting == 0
        pauses.append(bench.reactor.pass_time())
    assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0]
    bench.announce(1, "a")
    bench.fetch_next({"of": "a"})
    assert future.result(0) == {"of": "a"}
    bench.wait_for("b")
    bench.clock.advance(30.0)
    bench.announce(1)  # the server holds the poll
    assert [timer for timer in bench.reactor.timers if timer.live] == []
    assert bench.reactor.waiting == 1


def test_a_deadline_is_kept_while_the_server_holds_the_poll(bench: Bench) -> None:
    future = bench.wait_for("a", deadline_at=bench.clock.now() + 3.0)
    other = bench.wait_for("b", deadline_at=bench.clock.now() + 50.0)
    assert bench.reactor.pass_time() == 3.0
    assert "deadline" in str(future.exception(0))
    bench.clock.advance(27.0)
    bench.announce(1)
    assert bench.reactor.pass_time() == 20.0  # 30 of the 50 s have passed
    assert "deadline" in str(other.exception(0))


@pytest.mark.parametrize("timed_out", [False, True])
def test_samples_that_the_server_has_forgotten_are_found(bench: Bench, timed_out: bool) -> None:
    """A server that was started anew answers polls, and announces nothing of earlier samples."""
    gone: list[str] = []
    for name in "abc":
        bench.wait_for(name, on_gone=lambda _, name=name: gone.append(name))
    for _ in range(2):
        assert bench.singles() == []
        bench.clock.advance(30.0)
        if timed_out:
            bench.reactor.lose(timed_out=True)
        else:
            bench.announce(0)
    assert bench.singles() == ["a"]
    for _ in range(3):
        bench.reactor.answer(410, {"detail": "gone"}, path=ONE)
    assert gone == ["a", "b", "c"]


def test_one_forgotten_sample_leaves_the_others_under_the_poll(bench: Bench) -> None:
    gone: list[str] = []
    bench.wait_for("a", on_gone=lambda _: gone.append("a"))
    others = [f"sample-{number}" for number in range(100)]
    for name in others:
        bench.wait_for(name)
    for _ in range(2):
        bench.clock.advance(30.0)
        bench.announce(0)
    bench.reactor.answer(410, {"detail": "gone"}, path=ONE)
    assert gone == ["a"]
    assert bench.singles() == others[:2]
    for name in others[:2]:
        bench.fetch_next({"of": name})
    bench.announce(1, "sample-99")
    bench.reactor.answer(410, {"detail": "gone"}, path=ONE)  # it was announced, and not probed
    assert bench.singles() == []


def test_forgotten_samples_that_are_sent_again_wait_under_the_poll(bench: Bench) -> None:
    def wait_again(name: str) -> None:
        bench.wait_for(name, on_gone=lambda _: wait_again(f"{name} again"))

    for number in range(100):
        wait_again(f"sample-{number}")
    for _ in range(2):
        bench.clock.advance(30.0)
        bench.announce(0)
    for _ in range(100):
        bench.reactor.answer(410, {"detail": "gone"}, path=ONE)
    assert bench.singles() == []
    assert "100 waiting" in repr(bench.together)


def test_slow_samples_are_fetched_alone_only_one_by_one(bench: Bench) -> None:
    futures = [bench.wait_for(name) for name in "abc"]
    for silent in range(4):
        bench.clock.advance(30.0)
        bench.announce(silent)
    assert bench.singles() == ["a", "b"]
    bench.announce(5, "c")
    for name in "abc":
        bench.fetch_next({"of": name})
    assert [future.result(0) for future in futures] == [{"of": name} for name in "abc"]


def test_a_poll_asks_for_an_answer_at_once_while_no_sample_waits(bench: Bench) -> None:
    bench.wait_for("a")
    bench.announce(1, "a")
    bench.fetch_next({"of": "a"})
    last = bench.reactor.next(PATH)
    assert last.body["timeout"] == 0.0
    assert last.body["prev_cursor"] == 1
    assert last.body["retrieved_request_ids"] == ["a"]
    assert last.call.read_s == 5.0
    assert "timeout" not in bench.polls()[0]


def test_an_idle_client_does_not_ask_a_server_that_ignores_the_timeout_for_ever(bench: Bench) -> None:
    bench.wait_for("a")
    bench.announce(1, "a")
    bench.fetch_next({"of": "a"})
    bench.reactor.lose(timed_out=True)
    assert bench.reactor.waiting == 0
    assert bench.reactor.timers == []
    bench.wait_for("b")
    assert bench.polls()[-1]["retrieved_request_ids"] == []  # the server has received the ids already
    assert "timeout" not in bench.polls()[-1]


def test_an_acknowledgement_that_keeps_failing_is_given_up(bench: Bench) -> None:
    bench.wait_for("a")
    bench.announce(1, "a")
    bench.fetch_next({"of": "a"})
    for _ in range(2):
        bench.reactor.answer(503, {}, path=PATH)
        bench.reactor.pass_time()
    bench.reactor.answer(503, {}, path=PATH)
    assert bench.reactor.waiting == 0
    assert [timer for timer in bench.reactor.timers if timer.live] == []


def test_the_last_call_acknowledges_and_ends_the_polling(bench: Bench) -> None:
    bench.wait_for("a")
    bench.wait_for("b")
    bench.announce(1, "a")
    bench.fetch_next({"of": "a"})
    call = bench.together.last_call()
    body = json.loads(call.body or b"")
    assert (body["timeout"], body["prev_cursor"], body["retrieved_request_ids"]) == (0.0, 1, ["a"])
    assert bench.together.last_call() is None
    polls = len(bench.polls())
    bench.announce(2, "b")
    bench.fetch_next({"of": "b"})
    assert len(bench.polls()) == polls


def test_an_answer_that_makes_no_sense_ends_the_polling(bench: Bench) -> None:
    bench.wait_for("a")
    bench.reactor.answer(200, {"completions": "none"}, path=PATH)
    assert bench.singles() == ["a"]


def test_a_forgotten_promise_is_handed_on(bench: Bench) -> None:
    gone: list[Exception] = []
    future = bench.wait_for("a", on_gone=gone.append)
    bench.announce(1, "a")
    bench.reactor.answer(410, {"detail": "forgotten"}, path=ONE)
    assert len(gone) == 1
    assert not future.done()
    assert bench.polls()[-1]["retrieved_request_ids"] == ["a"]


def test_a_deadline_is_kept_while_polls_bring_nothing(bench: Bench) -> None:
    future = bench.wait_for("a", deadline_at=bench.clock.now() + 60)
    for _ in range(2):
        bench.clock.advance(30)
        bench.announce(0)
    bench.reactor.pass_time()
    assert "deadline" in str(future.exception(0))
