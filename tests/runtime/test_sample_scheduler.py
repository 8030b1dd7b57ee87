"""The order of samples, without threads: the tests run the workers and answer the requests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.clock import FakeClock
from support.polls import HandPoller
from support.raising import raising
from support.sends import HandWorkers

from tinker_sync.errors import APIConnectionError, APIStatusError, ClientClosedError, TinkerError
from tinker_sync.runtime.billing import BillingPause
from tinker_sync.runtime.byte_budget import ByteBudget
from tinker_sync.runtime.flows import Flows, Quota
from tinker_sync.runtime.polls import Polls
from tinker_sync.runtime.rate_limiter import RateLimiter
from tinker_sync.runtime.sample_scheduler import (
    Holdings,
    Refused,
    Resubmit,
    SampleScheduler,
    SubmitPolicy,
    Throttled,
)
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.verdict import Judge


class Job:
    """A double of a sample that logs each call of the scheduler.

    Args:
        log: gets a line for each call.
        name: the name in these lines.
        size: the estimated bytes.
        admit: the result of `admit`.
        waits: True if the sample can be admitted only after a wait.
    """

    def __init__(
        self, log: list[str], name: str, *, size: int = 10, admit: bool = True, waits: bool = False
    ) -> None:
        self.estimate_bytes = size
        self.over = False
        self.turn: int | None = None
        self.failure: Exception | None = None
        self._log, self._name, self._admits, self._waits = log, name, admit, waits
        self.then: Callable[[], object] = lambda: None
        self.queue_again: Callable[[], object] = lambda: None

    def is_set_aside(self) -> bool:
        return False

    def admit(self, *, may_wait: bool = True) -> bool | None:
        if not may_wait and self._waits:
            return None
        self._log.append(f"admit {self._name}")
        self.then()
        return self._admits

    def submit(self) -> None:
        self._log.append(f"submit {self._name}")

    def fail(self, error: Exception) -> None:
        self.failure = error


class Bench:
    def __init__(self, *, idle: bool = True, watched: bool = False) -> None:
        """Make a scheduler whose workers the test runs.

        Args:
            idle: True if the pool has an idle connection.
            watched: True if the poller has a thread, whose jobs `soon` then has.
        """
        self.soon: list[Callable[[], object]] = []
        self.watched = watched
        self.log: list[str] = []
        self.idle = idle
        self.workers = HandWorkers()
        clock = FakeClock(automatic=False)
        poller: Any = HandPoller(clock)
        poller.run_step = lambda step: step()
        poller.run_soon = self._run_soon
        judge: Any = None
        workers: Any = self.workers
        self.scheduler = SampleScheduler(
            Polls(Flows(poller, workers), Quota(10**6), clock=clock),
            workers,
            RateLimiter(clock=clock).gate(),
            ByteBudget(10**6),
            ByteBudget(10**6),
            judge,
            has_idle_connection=lambda: self.idle,
            clock=clock,
        )

    def _run_soon(self, job: Callable[[], object]) -> bool:
        if self.watched:
            self.soon.append(job)
        return self.watched

    def filled_with(self, names: str) -> Bench:
        for name in names:
            self.put(name)
        return self

    def put(self, name: str, **options: Any) -> Job:
        job = Job(self.log, name, **options)
        self.put_again(job)
        return job

    def put_again(self, job: Job) -> None:
        sample: Any = job
        self.scheduler.put(sample)


def test_samples_go_in_the_order_of_the_calls() -> None:
    bench = Bench().filled_with("abc")
    assert bench.log == []  # `put` leaves everything to a worker
    bench.workers.do_all()
    assert [line for line in bench.log if line.startswith("admit")] == ["admit a", "admit b", "admit c"]
    assert [line for line in bench.log if line.startswith("submit")] == ["submit a", "submit b", "submit c"]


def test_samples_that_are_submitted_again_keep_their_places() -> None:
    bench = Bench()
    first, second = bench.put("a"), bench.put("b")
    bench.workers.do_all()
    bench.log.clear()
    bench.put("c")
    bench.put_again(second)
    bench.put_again(first)
    bench.workers.do_all()
    assert [line for line in bench.log if line.startswith("admit")] == ["admit a", "admit b", "admit c"]


def test_an_earlier_sample_that_comes_back_during_an_admission_goes_first() -> None:
    bench = Bench()
    first = bench.put("a")
    bench.workers.do_all()
    bench.log.clear()
    second, back = bench.put("b"), [first]
    second.queue_again = lambda: bench.put_again(second)
    second.then = lambda: back and bench.put_again(back.pop())
    bench.workers.do_all()
    assert [line for line in bench.log if line.startswith("submit")] == ["submit a", "submit b"]


def test_only_one_worker_admits() -> None:
    bench = Bench().filled_with("abc")
    assert len(bench.workers.jobs) == 1


def test_over_idle_connections_one_worker_submits_everything() -> None:
    bench = Bench(idle=True).filled_with("abc")
    bench.workers.do()
    assert bench.log[-1] == "submit c"
    assert not bench.workers.jobs


def test_where_connections_must_be_opened_each_submit_gets_a_worker() -> None:
    bench = Bench(idle=False).filled_with("abc")
    bench.workers.do()
    assert len(bench.workers.jobs) == 2
    assert bench.log == ["admit a", "admit b", "admit c", "submit c"]  # it submits the last one itself
    bench.workers.do_all()
    assert sorted(bench.log[4:]) == ["submit a", "submit b"]


def test_large_prompts_do_not_hold_up_the_others() -> None:
    bench = Bench(idle=True)
    bench.put("large", size=10**6)
    bench.put("small")
    bench.workers.do()
    assert bench.log == ["admit large", "admit small", "submit small"]


def test_samples_that_are_over_are_passed_over() -> None:
    bench = Bench()
    jobs = [bench.put(name) for name in "ab"]
    jobs[0].over = True
    bench.workers.do_all()
    assert bench.log == ["admit b", "submit b"]


def test_one_that_is_not_admitted_does_not_stop_the_next() -> None:
    bench = Bench()
    bench.put("a", admit=False)
    bench.put("b")
    bench.workers.do_all()
    assert bench.log == ["admit a", "admit b", "submit b"]


def test_a_sample_that_comes_during_an_admission_is_admitted_by_the_same_worker() -> None:
    bench = Bench()
    first = bench.put("a")
    first.then = lambda: bench.put("b")
    bench.workers.do_all()
    assert bench.log == ["admit a", "submit a", "admit b", "submit b"]


def test_the_thread_of_the_poller_admits_and_submits_what_need_not_wait() -> None:
    bench = Bench(watched=True).filled_with("abc")
    (job,) = bench.soon
    job()
    assert bench.log == ["admit a", "submit a", "admit b", "submit b", "admit c", "submit c"]
    bench.put("d")
    assert len(bench.soon) == 2
    assert not bench.workers.jobs


def test_a_sample_that_must_wait_is_left_to_a_worker_before_those_behind_it() -> None:
    bench = Bench(watched=True)
    bench.put("a")
    bench.put("b", waits=True)
    bench.put("c")
    bench.soon.pop()()
    assert bench.log == ["admit a", "submit a"]
    bench.put("d")
    assert not bench.soon  # the worker admits
    bench.workers.do_all()
    assert bench.log[2:] == ["admit b", "submit b", "admit c", "submit c", "admit d", "submit d"]


def test_the_thread_of_the_poller_opens_no_connection() -> None:
    bench = Bench(idle=False, watched=True)
    bench.put("a")
    bench.soon.pop()()
    assert bench.log == ["admit a"]
    bench.workers.do_all()
    assert bench.log == ["admit a", "submit a"]


def test_closing_fails_what_is_queued_and_what_comes_later() -> None:
    bench = Bench()
    before = bench.put("a")
    bench.scheduler.close(ClientClosedError())
    after = bench.put("b")
    assert [type(job.failure) for job in (before, after)] == [ClientClosedError] * 2
    bench.workers.do_all()
    assert bench.log == []


def test_the_close_ends_waits_for_the_limits() -> None:
    scheduler = Bench().scheduler
    scheduler.close(ClientClosedError())
    for limit in (scheduler.places, scheduler.sending_bytes):
        with pytest.raises(ClientClosedError):
            limit.try_acquire(1)
    with pytest.raises(ClientClosedError):
        scheduler.gate.try_acquire()


def test_samples_that_no_worker_admits_do_not_stop_later_ones() -> None:
    bench = Bench()
    run = bench.workers.run
    bench.workers.run = raising(RuntimeError("can't start new thread"))  # type: ignore[method-assign]
    assert isinstance(bench.put("a").failure, TinkerError)
    bench.workers.run = run  # type: ignore[method-assign]
    bench.put("b")
    bench.workers.do_all()
    assert bench.log == ["admit b", "submit b"]


def test_many_samples_are_admitted_in_several_turns_of_the_poller() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    bench = Bench(watched=True).filled_with(names)
    turns = 0
    while bench.soon:
        bench.soon.pop()()
        turns += 1
    assert turns > 1
    assert [line for line in bench.log if line.startswith("admit")] == [f"admit {name}" for name in names]


def test_ctrl_c_in_a_call_does_not_stop_later_samples() -> None:
    bench = Bench()
    run = bench.workers.run
    bench.workers.run = raising(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.put("a")
    bench.workers.run = run  # type: ignore[method-assign]
    bench.put("b")
    bench.workers.do_all()
    assert [line for line in bench.log if line.startswith("admit")] == ["admit a", "admit b"]


def test_a_sample_that_comes_before_the_worker_leaves_needs_no_other() -> None:
    bench = Bench()

    def put_two() -> None:
        bench.put("b").then = lambda: bench.put("c")

    bench.put("a").then = put_two
    bench.workers.do()
    assert bench.log == [f"{step} {name}" for name in "abc" for step in ("admit", "submit")]
    assert bench.workers.jobs == []


def test_a_closed_scheduler_stays_closed_in_a_child() -> None:
    bench = Bench()
    bench.scheduler.close(ClientClosedError())
    bench.scheduler.renew_after_fork()
    assert isinstance(bench.put("a").failure, ClientClosedError)


def test_closed_workers_close_the_scheduler() -> None:
    bench = Bench()

    bench.workers.run = raising(RuntimeError("closed"))  # type: ignore[method-assign]
    assert isinstance(bench.put("a").failure, TinkerError)


def test_a_child_begins_with_an_empty_queue() -> None:
    bench = Bench()
    bench.put("a")
    bench.scheduler.renew_after_fork()
    assert len(bench.scheduler) == 0
    bench.put("b")
    bench.workers.do_all()
    assert bench.log == ["admit b", "submit b"]


def test_keys_are_unique() -> None:
    scheduler = Bench().scheduler
    assert len({scheduler.next_key() for _ in range(100)}) == 100


# ------------------------------------------------------------------------------------------- the policy
def policy(*, billing_s: float = 0.0) -> SubmitPolicy:
    clock = FakeClock(automatic=False)
    judge = Judge("http://127.0.0.1:1", clock, tuple)
    return SubmitPolicy(judge, BillingPause(billing_s, clock=clock), draw=lambda: 1.0)


def decide(
    outcome: Reply | SendFailed, *, attempt: int = 1, size: int = 10, max_attempts: int = 3, **options: Any
) -> Any:
    call = Call(method="POST", path="/api/v1/asample", body=b"{}", attempt=attempt)
    return policy(**options).decide(outcome, call, size, max_attempts)


@pytest.mark.parametrize(("size", "pause_s"), [(10, None), (128 * 1024, None), (128 * 1024 + 1, 5.0)])
def test_a_429_closes_the_limiter_for_longer_after_a_large_prompt(size: int, pause_s: float | None) -> None:
    assert decide(Reply(429, {}), size=size) == Throttled(pause_s)


def test_a_429_with_a_wish() -> None:
    assert decide(Reply(429, {"Retry-After": "7"})) == Throttled(7.0)


def test_a_402_is_waited_out_while_the_server_allows() -> None:
    assert decide(Reply(402, {}), billing_s=100.0) == Throttled(1.0)
    assert isinstance(decide(Reply(402, {})), Refused)


def test_trouble_that_passes_is_tried_again_a_number_of_times() -> None:
    decisions = [decide(Reply(503, {}), attempt=attempt) for attempt in (1, 2, 3)]
    assert [type(decision) for decision in decisions] == [Resubmit, Resubmit, Refused]
    assert [decision.delay_s for decision in decisions[:2]] == [0.5, 1.0]
    assert isinstance(decisions[2].error, APIStatusError)


def test_a_conflict_is_tried_again_twice_at_most() -> None:
    decisions = [decide(Reply(409, {}), attempt=attempt, max_attempts=10) for attempt in (1, 2, 3)]
    assert [type(decision) for decision in decisions] == [Resubmit, Resubmit, Refused]


def test_a_refusal_is_final() -> None:
    decision = decide(Reply(422, {}, b'{"detail": "no"}'))
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, APIStatusError)


def test_no_answer_is_tried_again_unless_it_would_end_the_same_way() -> None:
    assert isinstance(decide(SendFailed("broken", maybe_received=True)), Resubmit)
    decision = decide(SendFailed("no certificate", maybe_received=False, final=True))
    assert isinstance(decision, Refused)
    assert isinstance(decision.error, APIConnectionError)


def test_an_error_of_the_client_itself_stays_what_it_is() -> None:
    failed, cause = SendFailed("no key", maybe_received=False), TinkerError("no key")
    failed.__cause__ = cause
    assert decide(failed) == Refused(cause)


class FullLimit:
    """A limit that lets every sample pass, but only after a wait. It keeps the longest time of each wait."""

    limit_bytes = 1000
    limiter = SimpleNamespace(recently_closed=lambda: False, sent_at_once=400)

    def __init__(self, waits: list[float | None]) -> None:
        self._waits = waits

    def try_acquire(self, *_: object) -> None:
        return None

    def acquire(self, *given: Any) -> bool:
        self._waits.append(given[-1])
        return True


def test_each_wait_of_a_sample_has_the_time_that_the_others_have_left() -> None:
    waits: list[float | None] = []
    limit = FullLimit(waits)
    holdings = Holdings()
    holdings.scheduler = SimpleNamespace(places=limit, sending_bytes=limit, gate=limit)  # type: ignore[assignment]
    assert holdings.take(10, iter([3.0, 2.0, 1.0]).__next__)
    assert waits == [3.0, 2.0, 1.0]


def test_bytes_go_back_though_the_sample_got_no_permit() -> None:
    scheduler = Bench().scheduler
    scheduler.gate.limiter.close_for(60.0)
    holdings = Holdings()
    holdings.scheduler = scheduler
    assert not holdings.take(10, lambda: 0.0)
    holdings.give_back()
    for limit in (scheduler.places, scheduler.sending_bytes):
        assert repr(limit) == "<ByteBudget 1000000 of 1000000 bytes free, 0 in line>"
