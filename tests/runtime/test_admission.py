"""The queue of samples, without threads: the tests end the waits, and run the worker at the gate."""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable
from typing import Any

import pytest
from support.clock import FakeClock
from support.sends import HandReactor, HandWorkers, NoWorkers

from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime.admission import Admission, ModelPause, Turn
from tinker_sync.runtime.flows import Flow, Flows, Moment
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.rate_limiter import RateLimiter
from tinker_sync.transport.call import OPEN_AHEAD

MANY = 10**9


class Bench:
    def __init__(self, *, slots: int = MANY, sending_bytes: int = MANY, workers: Any = None) -> None:
        self.clock = FakeClock()
        self.reactor = HandReactor(self.clock)
        self.flows = Flows(self.reactor, NoWorkers())  # type: ignore[arg-type]  # a double
        self.workers = workers or HandWorkers()
        self.limiter = RateLimiter(clock=self.clock)
        self.gate = self.limiter.gate()
        self.admission = Admission(self.flows, self.workers, self.gate, slots, sending_bytes, self.clock)
        self.log: list[str] = []
        self.ends: dict[str, Moment] = {}
        self.turns: dict[str, Turn] = {}
        self.futures: dict[str, APIFuture[Any]] = {}
        self.pause = ModelPause()

    def put(
        self,
        names: str,
        size: int = 10,
        deadline_s: float = math.inf,
        pause: ModelPause | None = None,
        again: Callable[[Turn], bool] = lambda _: False,
    ) -> None:
        """Let samples wait for their turns. Each that is admitted holds it until `end`, or tries `again`."""

        def flow(name: str) -> Flow[None]:
            turn = self.turns[name]
            try:
                while True:
                    admitted = yield turn
                    self.log.append(name if admitted else f"{name} late")
                    if not admitted:
                        return
                    if not again(turn):
                        break
                    turn.give_back()
                yield self.ends[name]
            finally:
                turn.give_back()

        for name in names:
            deadline_at = self.clock.now() + deadline_s
            self.turns[name] = Turn(self.admission, size, deadline_at, pause or ModelPause())
            self.ends[name], self.futures[name] = Moment(), APIFuture()
            self.flows.start(flow(name), self.futures[name])

    def end(self, names: str) -> None:
        for name in names:
            self.flows.soon(self.ends[name].tell)

    @property
    def admitted(self) -> str:
        return "".join(self.log)

    @property
    def waiting(self) -> int:
        return sum(turn.task is not None for turn in self.turns.values())

    @property
    def free(self) -> tuple[int, int]:
        return self.admission.slots, self.admission.bytes


def test_samples_are_admitted_by_arrival_as_slots_become_free() -> None:
    bench = Bench(slots=2)
    bench.put("abcd")
    assert bench.admitted == "ab"
    bench.end("b")
    assert bench.admitted == "abc"
    bench.end("ca")
    assert bench.admitted == "abcd"
    bench.end("d")
    assert bench.free == (2, MANY)


def test_a_sample_larger_than_the_limit_enters_and_keeps_the_others_out() -> None:
    bench = Bench(sending_bytes=1600)
    bench.put("a", size=5000)
    bench.put("bc")
    assert bench.admitted == "a"
    bench.flows.soon(lambda _: bench.turns["a"].sent())
    assert bench.admitted == "abc"
    bench.end("abc")
    assert bench.free == (MANY, 1600)


def test_a_sample_that_is_sent_again_keeps_its_place_by_arrival() -> None:
    bench, tries = Bench(slots=1), iter([True, True])
    bench.put("a", again=lambda _: next(tries, False))
    bench.put("bc")
    assert bench.admitted == "aaa"
    bench.end("abc")
    assert bench.admitted == "aaabc"


def test_all_samples_that_were_refused_go_again_in_the_order_of_the_calls() -> None:
    bench = Bench()
    refused: list[Turn] = []

    def refuse(turn: Turn) -> bool:
        refused.append(turn)
        turn.throttled(5.0)
        return len(refused) <= 3

    bench.put("abc", again=refuse)
    assert bench.admitted == "a"  # the refusal has closed the limiter
    for _ in range(5):
        bench.workers.do_all()
    assert bench.admitted == "aaaabc"


def test_one_worker_waits_at_the_closed_gate_and_its_permit_goes_to_the_first_by_arrival() -> None:
    bench = Bench()
    bench.put("a")
    bench.flows.soon(lambda _: bench.turns["a"].throttled(5.0))
    bench.put("bcd")
    assert bench.admitted == "a"
    assert len(bench.workers.jobs) == 1
    assert bench.futures["b"].cancel()
    bench.workers.do_all()
    assert bench.admitted == "acd"
    bench.end("acd")
    assert bench.free == (MANY, MANY)


def test_deadlines_end_waits_on_time_whatever_is_waited_for() -> None:
    bench = Bench()
    bench.limiter.close_for(600.0)
    bench.put("a", deadline_s=9.0)
    bench.put("b")
    bench.put("c", deadline_s=4.0)
    bench.put("d", deadline_s=90.0)
    assert bench.reactor.pass_time() == 4.0
    assert bench.log == ["c late"]
    assert bench.reactor.pass_time() == 5.0
    assert bench.log == ["c late", "a late"]
    assert bench.reactor.pass_time() == 60.0  # so that a timer does not keep the thread for long
    assert bench.reactor.pass_time() == 21.0
    assert bench.log == ["c late", "a late", "d late"]
    assert not any(timer.live for timer in bench.reactor.timers)
    assert not bench.futures["b"].done()
    assert bench.free == (MANY, MANY)


def test_deadlines_of_samples_that_come_back_often_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    heapify = heapq.heapify
    monkeypatch.setattr(heapq, "heapify", lambda heap: (heapify(heap), kept.append(len(heap))))
    bench = Bench()
    bench.limiter.close_for(5.0)
    tries = iter(range(3000))

    def refused(turn: Turn) -> bool:
        turn.throttled(1.0)
        return next(tries, None) is not None

    bench.pause.until_s = bench.clock.now() + 36000.0
    bench.put("b", pause=bench.pause)  # waits all the time
    bench.put("a", deadline_s=36000.0, again=refused)
    bench.workers.do_all()
    assert bench.admitted == "a" * 3001
    assert kept
    assert max(kept) < 20


def test_the_queue_lets_go_of_samples_that_have_had_their_turn() -> None:
    bench = Bench(slots=1)
    bench.pause.until_s = bench.clock.now() + 8.0
    bench.put("a")
    bench.put("bc", deadline_s=3600.0)
    bench.put("d", pause=bench.pause, deadline_s=9.0)
    bench.end("abc")
    assert bench.admitted == "abc"
    assert bench.reactor.pass_time() == 8.0
    assert bench.admitted == "abcd"
    turns = list(bench.turns.values())
    assert not [each for turn in turns for each in gc.get_referrers(turn) if isinstance(each, tuple)]


def test_the_deadlines_of_many_samples_that_stand_aside_are_looked_through_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at all of them for each new one would take seconds of ten thousand."""
    looks: list[int] = []
    heapify = heapq.heapify
    monkeypatch.setattr(heapq, "heapify", lambda heap: (looks.append(len(heap)), heapify(heap))[1])
    bench = Bench()
    bench.pause.until_s = bench.clock.now() + 8.0
    for _ in range(5000):
        bench.put("a", pause=bench.pause, deadline_s=3600.0)
    assert len(looks) < 5


def test_samples_of_a_model_without_capacity_stand_aside() -> None:
    bench = Bench()
    bench.pause.until_s = bench.clock.now() + 8.0
    bench.put("a", pause=bench.pause)
    bench.put("b")
    bench.put("c", pause=bench.pause)
    bench.put("d", pause=bench.pause, deadline_s=3.0)
    assert bench.admitted == "b"
    assert bench.turns["a"].last_words == "the server has no capacity for the model"
    assert bench.reactor.pass_time() == 3.0
    assert bench.log == ["b", "d late"]
    bench.pause.until_s += 2.0  # another report
    bench.clock.advance(5.0)
    bench.reactor.timers[0].end()
    assert bench.log == ["b", "d late"]
    assert bench.futures["c"].cancel()
    assert bench.reactor.pass_time() == 2.0
    assert bench.log == ["b", "d late", "a"]
    assert bench.waiting == 0


def test_large_prompts_weigh_more_after_a_refusal() -> None:
    bench = Bench(sending_bytes=10_000)
    bench.put("a", size=2000)
    bench.flows.soon(lambda _: bench.turns["a"].throttled(0.0))
    bench.end("a")
    bench.put("bc", size=2000)
    bench.workers.do_all()
    assert bench.admitted == "ab"


def test_the_thread_reads_answers_while_it_admits_many() -> None:
    bench = Bench(slots=0)
    for _ in range(200):  # so that the limiter lets many be sent at once
        bench.gate.succeeded(bench.gate.acquire())  # type: ignore[arg-type]
    bench.put("abcdefghijklmnopqrstuvwxyz")
    soon: list[Callable[[], object]] = []
    bench.reactor.run_soon = lambda job: soon.append(job) is None  # type: ignore[method-assign]
    bench.admission.slots = MANY
    bench.flows.act(bench.admission.pump)
    first = bench.admitted
    assert 0 < len(first) < 26
    while soon:
        soon.pop(0)()
    assert bench.admitted == "abcdefghijklmnopqrstuvwxyz"


def accept(bench: Bench, count: int) -> None:
    """Let the server accept the first `count` samples that are in their send phase."""
    sending = [turn for turn in bench.turns.values() if turn.may_pass()]
    for turn in sending[:count]:
        bench.flows.soon(lambda _, turn=turn: turn.sent(accepted=True))


def names(count: int) -> str:
    """Return one-letter names of so many samples."""
    return "".join(map(chr, range(0x100, 0x100 + count)))


def test_each_accepted_sample_lets_two_go() -> None:
    bench = Bench()
    bench.put(names(500))
    for admitted in (64, 64 + 128, 64 + 128 + 256):
        assert len(bench.admitted) == admitted
        accept(bench, 500)
    assert bench.admitted == names(500)


def test_connections_are_opened_for_a_burst_that_a_distant_server_has_not_accepted_yet() -> None:
    bench = Bench(slots=150)
    bench.put(names(100))
    assert bench.reactor.waiting == 0
    bench.reactor.pass_time()
    assert bench.reactor.waiting == 36
    assert all(started.call is OPEN_AHEAD for started in bench.reactor.requests)
    bench.put(names(700)[100:])
    bench.reactor.pass_time()
    assert bench.reactor.waiting == 150 - 64  # the slots allow no more
    bench.reactor.lose()  # no failure of these is told
    assert len(bench.admitted) == 64


def test_no_connections_are_opened_ahead_if_the_server_is_near_or_refuses() -> None:
    near, strict, full = Bench(), Bench(), Bench()
    for bench in (near, strict, full):
        bench.put(names(300))
    accept(near, 1)
    strict.turns[names(1)].throttled(5.0)
    full.reactor.room = 0
    for bench in (near, strict, full):
        bench.reactor.pass_time()
        assert bench.reactor.waiting == 0


def test_large_prompts_that_wait_for_bytes_need_no_connections_ahead() -> None:
    bench = Bench(sending_bytes=10_000)
    bench.put(names(50), size=2000)
    assert len(bench.admitted) == 6
    assert bench.reactor.timers == []


def test_without_a_worker_at_the_gate_the_samples_fail_and_later_ones_do_not() -> None:
    bench = Bench(workers=NoWorkers())
    bench.limiter.close_for(5.0)
    bench.put("ab")
    assert all(isinstance(bench.futures[name].exception(0), TinkerError) for name in "ab")
    bench.clock.advance(600.0)
    bench.put("c")
    assert bench.admitted == "c"


def test_the_close_of_the_gate_ends_the_worker_that_waits() -> None:
    bench = Bench()
    bench.limiter.close_for(5.0)
    bench.put("a")
    bench.gate.close(ClientClosedError())
    bench.workers.do_all()
    assert bench.admitted == ""
    bench.put("b")
    for name in "ab":
        bench.futures[name].fail(ClientClosedError())
    assert bench.waiting == 0
