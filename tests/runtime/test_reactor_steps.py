"""The reactor step by step: the test is its thread and its workers, so nothing here runs at the same time."""

from __future__ import annotations

import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.sends import HandWorkers, NoWorkers
from support.wires import post

from tinker_sync.runtime.reactor import Reactor
from tinker_sync.transport.call import Call, Reply, SendFailed

Outcome = Reply | SendFailed
SILENT = SendFailed("nothing has arrived", maybe_received=True, timed_out=True)


class Request:
    """A double of a request under way, over a socket of its own. `step` returns or raises `outcome`."""

    def __init__(self, outcome: Outcome | Exception = SILENT, expires_at_s: float = math.inf) -> None:
        self.outcome = outcome
        self.expires_at_s = expires_at_s
        self.writing = False
        self.sock, self.peer = socket.socketpair()

    def fileno(self) -> int:
        return self.sock.fileno()

    def watched_by(self, watcher: object) -> bool:
        return False

    def step(self) -> Reply:
        if isinstance(self.outcome, Reply):
            self.abort()
            return self.outcome
        raise self.outcome

    def abort(self) -> None:
        self.sock.close()
        self.peer.close()

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0


class Line:
    """A double of the transport: each call takes the next request. `on_open` is called before that."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.opened = 0
        self.on_open: Callable[[], object] = lambda: None

    def open(self, call: Call, *, wait: bool = True) -> Request:
        self.on_open()
        self.opened += 1
        return self.requests[self.opened - 1]

    def opens_at_once(self) -> bool:
        return False


class Bench:
    """A reactor whose thread is that of the test, with its transport, its workers and the outcomes."""

    def __init__(self, clock: FakeClock, **options: Any) -> None:
        self.line, self.workers, self.clock = Line(), HandWorkers(), clock
        self.reactor = Reactor(self.line, self.workers, clock, **options)
        self.readiness = self.reactor._open_readiness()
        self.reactor._thread = threading.current_thread()
        self.outcomes: list[Outcome] = []

    def start(self, *requests: Request) -> Any:
        """Start calls that take these requests. Return the ticket of the last one."""
        self.line.requests += requests
        tickets = [self.reactor.start(post(), self.outcomes.append) for _ in requests]
        return tickets[-1]

    def send(self, *requests: Request) -> Any:
        """Start calls, and let the workers send them."""
        ticket = self.start(*requests)
        self.workers.do_all()
        return ticket

    def failures(self) -> list[bool]:
        """Return the `maybe_received` of each outcome; all must be failures."""
        return [outcome.maybe_received for outcome in self.outcomes if isinstance(outcome, SendFailed)]

    def sleep(self) -> None:
        """Let the reactor believe that its thread sleeps without a limit."""
        self.reactor._sleeps_until = math.inf

    def was_woken(self) -> bool:
        return bool(self.readiness.wait(0))

    def end(self) -> None:
        """Let the reactor end as if its thread had found it closed."""
        self.reactor._thread = None
        self.reactor.close()
        for request in self.line.requests:
            request.abort()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def bench(clock: FakeClock) -> Iterator[Bench]:
    bench = Bench(clock)
    yield bench
    bench.end()


# ------------------------------------------------------------------------------------------- sending


def test_a_request_called_off_while_it_is_sent_is_closed(bench: Bench) -> None:
    request = Request()
    ticket = bench.start(request)
    bench.line.on_open = ticket.cancel
    bench.workers.do_all()
    bench.reactor.step(0.0)
    assert request.closed
    assert (bench.reactor.under_way, bench.outcomes) == (0, [])


def test_a_request_that_is_sent_while_the_reactor_closes_is_closed(bench: Bench) -> None:
    request = Request()
    bench.line.on_open = bench.reactor.close
    bench.send(request)
    assert request.closed
    assert (bench.reactor.under_way, bench.failures()) == (0, [True])


def test_a_request_that_no_worker_sends_fails() -> None:
    outcomes: list[Outcome] = []
    reactor = Reactor(Line(), NoWorkers())
    reactor.start(post(), outcomes.append)
    (failed,) = outcomes
    assert isinstance(failed, SendFailed)
    assert (failed.final, failed.maybe_received, reactor.under_way) == (True, False, 0)


def test_a_socket_that_another_thread_has_closed_wakes_the_thread(bench: Bench) -> None:
    request = Request()
    request.abort()
    bench.sleep()
    bench.send(request)
    assert bench.was_woken()
    bench.reactor.step(0.0)
    assert bench.outcomes == [SILENT]


# ------------------------------------------------------------------------------------------- silence
@pytest.mark.parametrize(("expires_at_s", "woken"), [(math.inf, False), (1005.0, True)])
def test_a_request_wakes_the_thread_if_it_expires_before_the_thread_wakes(
    bench: Bench, expires_at_s: float, woken: bool
) -> None:
    bench.sleep()
    bench.send(Request(expires_at_s=expires_at_s))
    assert bench.was_woken() is woken


@pytest.mark.parametrize("wake", ["after", "run_soon"])
def test_timers_and_jobs_wake_the_thread(bench: Bench, wake: str) -> None:
    bench.sleep()
    if wake == "after":
        bench.reactor.after(5.0, lambda: None)
    else:
        bench.reactor.run_soon(lambda: None)
    assert bench.was_woken()


def test_a_silent_request_is_not_watched_any_more(bench: Bench, clock: FakeClock) -> None:
    bench.send(Request(expires_at_s=1005.0))
    clock.advance(5.0)
    bench.reactor.step(0.0)
    assert bench.outcomes == [SILENT]
    assert not bench.reactor._has_more()


# ------------------------------------------------------------------------------------------- the end


def test_after_the_close_no_timer_fires(bench: Bench, clock: FakeClock) -> None:
    fired: list[str] = []
    bench.reactor.after(1.0, lambda: fired.append("late"))
    bench.reactor.close()
    clock.advance(1.0)
    assert not bench.reactor.step(0.0)
    assert fired == []


def test_a_step_that_is_due_at_the_close_is_taken(bench: Bench) -> None:
    done: list[str] = []

    def close() -> None:
        assert bench.reactor.run_soon(lambda: done.append("later"))
        bench.reactor.close()

    assert bench.reactor.run_soon(close)
    assert bench.reactor.step(0.0)
    assert not bench.reactor.step(0.0)
    assert done == ["later"]


def test_steps_that_follow_run_at_once_if_no_worker_takes_them() -> None:
    reactor, done = Reactor(Line(), NoWorkers()), []

    def stop() -> None:
        assert reactor.follow(lambda: done.append("follows"))
        raise SystemExit

    with pytest.raises(SystemExit):
        reactor._run_step(stop)
    assert done == ["follows"]


# ------------------------------------------------------------------------------------------- no thread


# ------------------------------------------------------------------------------------------- races
@pytest.mark.parametrize("workers", [HandWorkers(), NoWorkers()], ids=["worker", "no worker"])
def test_a_job_added_while_the_thread_ends_is_done(workers: HandWorkers | NoWorkers) -> None:
    reactor, done = Reactor(Line(), workers), []

    class Due(deque[Any]):
        def append(self, step: Any) -> None:
            assert not reactor.step(0.0)  # the thread ends between the two steps of `run_soon`
            super().append(step)

    reactor._thread, reactor._due = threading.current_thread(), Due()
    assert reactor.run_soon(lambda: done.append("job"))
    if isinstance(workers, HandWorkers):
        workers.do()
    assert done == ["job"]
    assert not reactor.run_soon(done.clear)


def test_a_job_added_while_the_thread_falls_asleep_wakes_it() -> None:
    reactor, done = Reactor(Line(), HandWorkers()), []

    class Due(deque[Any]):
        def __bool__(self) -> bool:
            found = len(self) > 0
            if not done:  # after this look, the thread goes to sleep
                done.append(reactor.run_soon(lambda: done.append("job")))
            return found

    reactor._thread, reactor._due = threading.current_thread(), Due()
    reactor.step(PATIENCE_S)  # without a wake, it would sleep
    reactor.step(0.0)
    assert done == [True, "job"]
    reactor._thread = None
    reactor.close()


def test_the_watch_of_a_silent_request_ends_before_another_thread_can_close_its_socket(
    bench: Bench, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a socket is closed, its number may belong to a new socket, whose watch would end in its place."""
    due: list[int] = []
    forget = bench.readiness.forget
    monkeypatch.setattr(
        bench.readiness, "forget", lambda number: (due.append(len(bench.reactor._due)), forget(number))
    )
    bench.send(Request(expires_at_s=1005.0))
    clock.advance(5.0)
    bench.reactor.step(0.0)
    assert (due[0], bench.outcomes) == (0, [SILENT])


# ------------------------------------------------------------------------------------------- forks
