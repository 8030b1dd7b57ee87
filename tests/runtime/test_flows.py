"""Flows: how they wait, how they end, and what comes back. The tests end the waits."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
from support.clock import FakeClock
from support.forks import in_child
from support.sends import HandReactor, HandWorkers, NoWorkers

from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime import flows as flows_module
from tinker_sync.runtime.flows import CalledOff, Flow, Flows, Moment, Quota
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.reactor import Reactor
from tinker_sync.runtime.workers import Workers
from tinker_sync.transport.call import Call, Reply, SendFailed

CALL = Call(method="POST", path="/api/v1/x", body=b"{}")


class Bench:
    """Flows over a double of the reactor. `run` counts how often `finally` of the flow `hold` has run."""

    def __init__(self) -> None:
        self.reactor = HandReactor(FakeClock())
        self.flows = Flows(self.reactor, NoWorkers())  # type: ignore[arg-type]  # a double
        self.quota = Quota(10)
        self.log: list[object] = []

    def start(self, flow: Flow[Any]) -> APIFuture[Any]:
        future: APIFuture[Any] = APIFuture()
        self.task = self.flows.start(flow, future)
        return future


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_flow_gets_the_outcome_of_each_wait(bench: Bench) -> None:
    moment = Moment()

    def flow() -> Flow[list[Any]]:
        outcome = yield CALL
        lost = yield CALL
        passed = yield 2.5
        told = yield moment
        told_before = yield moment
        return [outcome.status, lost.timed_out, passed, told, told_before]

    future = bench.start(flow())
    bench.reactor.answer(200)
    bench.reactor.lose(timed_out=True)
    assert bench.reactor.pass_time() == 2.5
    assert not future.done()
    bench.flows.soon(moment.tell, "now")
    assert future.result(0) == [200, True, None, "now", "now"]


def test_a_wait_that_cannot_begin_raises_in_the_flow(bench: Bench) -> None:
    def flow() -> Flow[str]:
        try:
            yield "no wait"
        except AttributeError:
            return "seen"

    assert bench.start(flow()).result(0) == "seen"


def test_a_flow_waits_for_others_and_gets_their_values_and_failures(bench: Bench) -> None:
    def child(number: int) -> Flow[int]:
        yield float(number)
        if number == 2:
            raise KeyError(number)
        return number

    def parent() -> Flow[list[Any]]:
        children = [bench.flows.start(child(number)) for number in (1, 2, 3)]
        ends: list[Any] = []
        for each in children:
            try:
                ends.append((yield each))
            except KeyError as failure:
                ends.append(failure.args)
        return ends

    future = bench.start(parent())
    for _ in range(3):
        bench.reactor.pass_time()
    assert future.result(0) == [1, (2,), 3]


def test_a_failure_that_nobody_waits_for_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def flow() -> Flow[None]:
        yield 1.0
        raise KeyError("lost")

    bench.flows.start(flow())
    bench.reactor.pass_time()
    assert "a flow failed" in caplog.text


def test_thousands_of_flows_that_end_at_once_do_not_recurse(bench: Bench) -> None:
    """Each flow that ends lets the next one in, which ends at once."""
    quota = Quota(0)

    def flow() -> Flow[None]:
        yield from quota.take(1)
        quota.give_back(1)

    quota.free = -1
    futures = [bench.start(flow()) for _ in range(5000)]
    assert not any(future.done() for future in futures)
    bench.flows.soon(quota.give_back, 1)
    assert all(future.done() for future in futures)
    assert quota.free == 0


def test_a_step_that_fails_does_not_stop_the_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        bench.flows.soon(bench.log.append, "later")
        raise KeyError("a step")

    bench.flows.soon(fail)
    assert bench.log == ["later"]
    assert "a step of a flow failed" in caplog.text


def test_work_on_a_worker_gives_its_value_or_its_failure(bench: Bench) -> None:
    workers: Any = HandWorkers()
    workers.run_call = workers.run

    def flow() -> Flow[list[Any]]:
        value = yield from bench.flows.on_worker(workers, lambda: 7)
        try:
            yield from bench.flows.on_worker(workers, {}.popitem)
        except KeyError:
            return [value, "empty"]
        return []

    future = bench.start(flow())
    assert not future.done()
    workers.do_all()
    assert future.result(0) == [7, "empty"]


# ------------------------------------------------------------------------------------------ the end
def hold(bench: Bench, moment: Moment) -> Flow[str]:
    """Wait in every way, and hold something meanwhile."""
    yield from bench.quota.take(3)
    try:
        yield CALL
        yield 1.0
        yield moment
        yield bench.flows.start(pause())
        yield from bench.quota.take(20)
        bench.quota.give_back(20)
    finally:
        bench.quota.give_back(3)
        bench.log.append("given back")
    return "value"


def pause() -> Flow[None]:
    yield 0.25


def advance(bench: Bench, moment: Moment, steps: int) -> None:
    """End the first waits of `hold`, as many as `steps`."""
    ends: list[Callable[[], object]] = [
        bench.reactor.answer,
        bench.reactor.pass_time,
        lambda: bench.flows.soon(moment.tell, 1),
        bench.reactor.pass_time,
    ]
    for end in ends[:steps]:
        end()


WAITS = range(5)


@pytest.mark.parametrize("end", ["cancel", "fail", "call off"])
@pytest.mark.parametrize("steps", WAITS)
def test_a_flow_that_is_ended_at_any_wait_gives_back_what_it_holds(
    bench: Bench, steps: int, end: str
) -> None:
    moment = Moment()
    future = bench.start(hold(bench, moment))
    if steps == 4:
        bench.quota.free = -1  # so that the last wait is one for the quota
    advance(bench, moment, steps)
    assert not future.done()
    if end == "cancel":
        assert future.cancel()
    elif end == "fail":
        future.fail(ClientClosedError())
    else:
        bench.task.call_off()
    assert bench.task.ended
    assert bench.log == ["given back"]
    assert bench.quota.free == (10 if steps < 4 else 2)
    assert not any(started.live for started in bench.reactor.requests)
    if end == "call off":
        assert not future.done()  # whoever calls the flow off ends the future
    bench.task.call_off()
    assert bench.log == ["given back"]


@pytest.mark.parametrize("first", ["cancel", "answer"])
def test_an_outcome_that_is_on_its_way_reaches_a_flow_that_is_called_off(bench: Bench, first: str) -> None:
    """The request has been answered when the cancel takes effect, so the flow learns of the answer."""
    seen: list[Any] = []

    def flow() -> Flow[None]:
        seen.append((yield CALL))
        try:
            yield 2.0
        except CalledOff:
            seen.append("called off")
            raise

    future = bench.start(flow())

    def race(_: object) -> None:  # runs before the steps that it causes
        if first == "cancel":
            future.cancel()
        bench.reactor.answer(200)
        future.cancel()

    bench.flows.soon(race)
    assert [type(seen[0]), seen[1]] == [Reply, "called off"]
    assert [timer.live for timer in bench.reactor.timers] == ([] if first == "cancel" else [False])
    with pytest.raises(CancelledError):
        future.result(0)


# ------------------------------------------------------------------------------------------ the quota
def test_a_quota_lets_in_by_arrival_while_its_balance_is_not_negative(bench: Bench) -> None:
    def flow(name: str, size: int) -> Flow[bool]:
        taken = yield from bench.quota.take(size, 60.0 if name == "late" else float("inf"))
        bench.log.append((name, taken))
        return bool(taken)

    for name, size in [("a", 15), ("b", 1), ("late", 1), ("c", 2), ("d", 3)]:
        bench.start(flow(name, size))
    assert bench.log == [("a", True)]
    assert bench.reactor.pass_time() == 60.0
    assert bench.log[1:] == [("late", False)]
    bench.flows.soon(bench.quota.give_back, 15)
    assert bench.log[2:] == [("b", True), ("c", True), ("d", True)]
    assert bench.quota.free == 4


# ------------------------------------------------------------------------------------------ real threads
class Silent:
    """A sender that never gets an answer."""

    def open(self, call: Call, *, wait: bool = True) -> Any:
        raise SendFailed("no server", maybe_received=False)

    multiplexes = False

    def opens_at_once(self) -> bool:
        return False


def test_one_thread_at_a_time_resumes_the_flows_and_never_that_of_the_user() -> None:
    workers = Workers("flows-test", 4)
    reactor = Reactor(Silent(), workers)
    flows = Flows(reactor, workers)
    inside: list[str] = []
    most: list[int] = []

    def flow() -> Flow[str]:
        for _ in range(5):
            inside.append(threading.current_thread().name)
            most.append(len(inside))
            inside.pop()
            yield CALL
            yield 0.0
        return threading.current_thread().name

    try:
        futures: list[APIFuture[str]] = [APIFuture() for _ in range(200)]
        for future in futures:
            flows.start(flow(), future)
        names = {future.result(60) for future in futures}
    finally:
        reactor.close()
        workers.close()
    assert set(most) == {1}
    assert all(name.startswith("tinker-") for name in names)


def test_no_flow_can_start_without_a_thread() -> None:
    reactor: Any = HandReactor(FakeClock())
    reactor.run_soon = lambda _: False
    flows = Flows(reactor, NoWorkers())
    future: APIFuture[Any] = APIFuture()
    flows.start(pause(), future)
    assert isinstance(future.exception(0), TinkerError)
    reactor.run_soon = lambda job: job() is None
    later: APIFuture[Any] = APIFuture()
    flows.start(pause(), later)
    assert len(reactor.timers) == 1  # the first one does not begin later


def test_a_step_is_taken_though_the_one_before_was_taken_before_a_thread_was_asked() -> None:
    """The thread that is asked then finds no step, and the next step needs another one."""
    reactor: Any = HandReactor(FakeClock())
    asked: list[Callable[[], object]] = []
    reactor.run_soon = lambda job: asked.append(job) is None
    flows = Flows(reactor, NoWorkers())
    log: list[int] = []

    class Overtaken(deque[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            flows.run()  # as another thread does, right after the step was added

    flows._ready = Overtaken()
    flows.soon(log.append, 1)
    flows._ready = deque()
    asked.pop()()
    flows.soon(log.append, 2)
    asked.pop()()
    assert log == [1, 2]


def test_the_garbage_collector_ends_no_flow(bench: Bench) -> None:
    bench.flows.start(hold(bench, Moment()))
    bench.reactor.requests.clear()  # nothing else knows the flow
    gc.collect()
    assert bench.log == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_flows_of_its_parent_alone(bench: Bench) -> None:
    moment = Moment()
    future = bench.start(hold(bench, moment))
    held = bench.quota.free

    def work() -> None:
        bench.flows.renew_after_fork()
        bench.reactor.requests.clear()
        bench.reactor.timers.clear()
        del bench.task
        gc.collect()
        mine = bench.start(pause())
        bench.reactor.pass_time()
        assert bench.log == []
        assert bench.quota.free == held
        assert mine.result(0) is None
        assert not flows_module._under_way

    in_child(work)
    advance(bench, moment, 4)
    bench.flows.soon(bench.quota.give_back, 0)
    assert future.result(0) == "value"
    assert bench.quota.free == 10
