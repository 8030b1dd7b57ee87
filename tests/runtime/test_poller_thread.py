"""The thread of a poller: its steps, the steps that answers cause, and workers that guard and help it."""

from __future__ import annotations

import inspect
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from support.clock import PATIENCE_S
from support.crowd import until
from support.raising import raising
from support.sends import HandWorkers, NoWorkers
from support.wires import post

from tinker_sync.runtime import poller_thread
from tinker_sync.runtime.poller import Poller
from tinker_sync.runtime.tickets import SelectorReadiness
from tinker_sync.runtime.workers import Workers
from tinker_sync.transport.call import Call, Reply, SendFailed

Outcome = Reply | SendFailed


class Finished:
    """A double of an exchange whose answer has arrived. A pipe with a byte takes the place of its socket."""

    expires_at_s = float("inf")

    def __init__(self, call: Call) -> None:
        self.call = call
        self._ends: tuple[int, ...] = os.pipe()
        os.write(self._ends[1], b".")

    def fileno(self) -> int:
        return self._ends[0] if self._ends else -1

    def step(self) -> Reply:
        self.abort()  # closes the pipe
        return Reply(200, {}, self.call.body or b"")

    def abort(self) -> None:
        ends, self._ends = self._ends, ()
        for end in ends:
            os.close(end)


class Immediate:
    """A double of the transport that answers each call with the body of the call."""

    def __init__(self, *, idle: bool = False) -> None:
        self.opened: list[bytes | None] = []
        self._idle = idle

    def open(self, call: Call) -> Finished:
        self.opened.append(call.body)
        return Finished(call)

    def has_idle_connection(self) -> bool:
        return self._idle


def do_until(workers: HandWorkers, over: Callable[[], bool]) -> None:
    """Run the jobs that the poller's thread submits, as they come, until `over()` is true."""
    while not over():
        until(lambda: workers.jobs or over())
        if workers.jobs:
            workers.do()


@pytest.mark.parametrize(
    ("idle", "size", "itself"), [(True, 2, True), (True, 10**6, False), (False, 2, False)]
)
def test_the_reader_sends_what_follows_unless_that_takes_long(idle: bool, size: int, itself: bool) -> None:
    opener, workers = Immediate(idle=idle), HandWorkers()
    followed = threading.Event()
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def follow(_: Outcome) -> None:
        poller.start(post(body=b"b" * size), outcomes.put)
        poller.start(post(body=b"c" * size), outcomes.put)
        followed.set()

    with closing(Poller(opener, workers)) as poller:
        poller.start(post(body=b"a"), follow)
        assert opener.opened == []
        workers.do()  # opens the first request, whose answer the poller's thread reads
        assert followed.wait(PATIENCE_S)
        if not itself:
            sends = [job for job in workers.jobs if job != poller._guard]
            assert len(sends) == 2
            for send in sends:
                send()
        for _ in range(2):
            assert isinstance(outcomes.get(timeout=PATIENCE_S), Reply)
        assert [body and body[:1] for body in opener.opened] == [b"a", b"b", b"c"]
        assert poller.under_way == 0


def test_another_thread_takes_over_from_one_that_is_held_up() -> None:
    opener, go_on = Immediate(idle=True), threading.Event()
    with closing(Workers("fetch", 2)) as workers, closing(Poller(opener, workers)) as poller:
        seen: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

        def hold_up(_: Outcome) -> None:
            seen.put(threading.current_thread())
            assert go_on.wait(PATIENCE_S)
            poller.start(post(), lambda _: seen.put(threading.current_thread()))

        poller.start(post(), hold_up)
        first = seen.get(timeout=PATIENCE_S)
        poller.start(post(), lambda _: seen.put(threading.current_thread()))
        second = seen.get(timeout=PATIENCE_S)  # read while the first thread is held up
        assert second is not first
        go_on.set()
        assert seen.get(timeout=PATIENCE_S) is not first  # read by another thread too
        first.join(PATIENCE_S)
        assert not first.is_alive()


@pytest.mark.parametrize(
    "add",
    [
        lambda poller, job: poller.run_soon(job),
        lambda poller, job: poller.after(0.0, job),
        lambda poller, job: poller.start(post(), lambda _: job()),
    ],
    ids=["a job", "a timer", "a request"],
)
def test_work_does_not_wait_for_a_step(add: Callable[[Poller, Callable[[], object]], object]) -> None:
    opener, go_on = Immediate(idle=True), threading.Event()
    with closing(Workers("fetch", 2)) as workers, closing(Poller(opener, workers)) as poller:
        held_up, done = threading.Event(), threading.Event()

        def hold_up(_: Outcome) -> None:
            held_up.set()
            assert go_on.wait(PATIENCE_S)

        poller.start(post(), hold_up)
        assert held_up.wait(PATIENCE_S)
        assert not poller._guarded  # nothing waits yet
        add(poller, done.set)
        assert done.wait(PATIENCE_S)
        go_on.set()


def test_ctrl_c_leaves_no_mark_of_a_guard_that_does_not_exist() -> None:
    class Interrupted(HandWorkers):
        def run(self, job: Callable[[], object]) -> None:
            raise KeyboardInterrupt

    poller = Poller(Immediate(), Interrupted())
    poller._thread, poller._in_step = threading.Thread(), True
    with pytest.raises(KeyboardInterrupt):
        poller.run_soon(lambda: None)
    assert not poller._guarded
    poller._thread = None


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_that_follows_is_guarded_if_other_work_waits_behind_it(waits: bool) -> None:
    opener, workers = Immediate(idle=True), HandWorkers()
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def follow(_: Outcome) -> None:
        poller.start(post(), outcomes.put)
        if waits:
            poller.start(post(), outcomes.put)

    with closing(Poller(opener, workers)) as poller:
        poller.start(post(), follow)
        workers.do()
        for _ in range(2 if waits else 1):
            assert isinstance(outcomes.get(timeout=PATIENCE_S), Reply)
        assert [job == poller._guard for job in workers.jobs] == ([True] if waits else [])
    workers.jobs.clear()


def test_the_guard_ends_when_nothing_is_read_and_begins_again() -> None:
    opener = Immediate(idle=True)
    with closing(Workers("fetch", 2)) as workers, closing(Poller(opener, workers)) as poller:
        poller.after(10 * PATIENCE_S, lambda: None)  # it waits behind every step
        for _ in range(2):
            outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
            poller.start(post(), outcomes.put)
            outcomes.get(timeout=PATIENCE_S)
            until(lambda: not poller._guarded)


def test_a_step_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    opener = Immediate(idle=True)
    with closing(Workers("fetch", 2)) as workers, closing(Poller(opener, workers)) as poller:
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        poller.reserve()
        assert poller.run_soon(lambda: sys.exit("a job"))
        poller.start(post(), outcomes.put)
        assert isinstance(outcomes.get(timeout=PATIENCE_S), Reply)
    assert "a step of the poller failed" in caplog.text


def test_a_job_runs_soon_only_where_there_is_a_thread() -> None:
    with closing(Workers("fetch", 2)) as workers:
        poller = Poller(Immediate(), workers)
        assert not poller.run_soon(lambda: pytest.fail("there is no thread"))
        poller.reserve()
        done = threading.Event()
        assert poller.run_soon(done.set)
        assert done.wait(PATIENCE_S)
        poller.close()
        assert not poller.run_soon(lambda: pytest.fail("it is closed"))


@pytest.mark.parametrize(
    ("idle", "size", "alone"), [(True, 2, True), (True, 10**6, False), (False, 2, False)]
)
def test_a_worker_sends_all_requests_that_cannot_hold_it_up(idle: bool, size: int, alone: bool) -> None:
    opener, workers = Immediate(idle=idle), HandWorkers()

    def start_both() -> None:
        poller.start(post(body=b"a"), lambda _: None)
        poller.start(post(body=b"b" * size), lambda _: None)

    with closing(Poller(opener, workers)) as poller:
        poller.run_step(start_both)
        assert len(opener.opened) == (2 if alone else 1)
        if not alone:
            until(lambda: len(workers.jobs) >= 1)  # a job that sends `b`
    workers.jobs.clear()


def test_a_job_is_not_lost_if_neither_thread_nor_worker_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    poller, done = Poller(Immediate(), NoWorkers()), threading.Event()
    with poller._lock:
        thread = poller._wanted_locked()
    assert thread is not None
    assert poller.run_soon(done.set)  # before the other call finds that the thread cannot start
    monkeypatch.setattr(thread, "start", raising(RuntimeError("can't start new thread")))
    poller._start(thread)
    assert done.is_set()


def test_a_job_follows_the_step_of_a_worker() -> None:
    done: list[str] = []

    def step() -> None:
        assert poller.follow(lambda: done.append("job"))
        done.append("step")

    with closing(Poller(Immediate(), HandWorkers())) as poller:
        assert not poller.follow(lambda: done.append("lost"))
        poller.run_step(step)
    assert done == ["step", "job"]


def test_a_long_chain_of_answers_does_not_lie_on_one_stack() -> None:
    workers = HandWorkers()
    depths: list[int] = []

    def follow(_: Outcome) -> None:
        depths.append(len(inspect.stack(0)))
        if len(depths) < 20:
            poller.start(post(), follow)

    with closing(Poller(Immediate(), workers)) as poller:
        poller.start(post(), follow)
        do_until(workers, lambda: len(depths) == 20)
    assert len(set(depths)) == 1


def test_a_request_that_a_worker_can_no_longer_send_is_sent_by_another() -> None:
    opener, workers = Immediate(), HandWorkers()
    outcomes: list[Outcome] = []

    def stop() -> None:
        poller.start(post(), outcomes.append)
        raise SystemExit

    with closing(Poller(opener, workers)) as poller:
        with pytest.raises(SystemExit):
            poller.run_step(stop)
        assert opener.opened == []
        do_until(workers, lambda: bool(outcomes))
    assert len(opener.opened) == len(outcomes) == 1


def test_a_step_outside_of_workers_leaves_sending_to_them() -> None:
    opener, workers = Immediate(), HandWorkers()
    poller = Poller(opener, workers)
    poller.start(post(), lambda _: None)
    assert opener.opened == []
    assert len(workers.jobs) == 1


# ------------------------------------------------------------------------------------------- help
def test_workers_help_a_thread_that_gets_on_slowly_while_many_steps_are_due() -> None:
    workers, taken = HandWorkers(), []
    poller = Poller(Immediate(), workers)
    poller._thread = threading.current_thread()
    for number in range(6):
        assert poller.run_soon(lambda number=number: taken.append(number))
    poller._call_helpers(taken=100, elapsed_s=0.02, due=6)
    assert not workers.jobs  # the thread is fast enough
    poller._call_helpers(taken=10, elapsed_s=0.02, due=0)
    assert not workers.jobs  # no step is due, so the thread may have slept
    for _ in range(2):
        poller._call_helpers(taken=10, elapsed_s=0.02, due=6)
    assert len(workers.jobs) == 2  # the second call adds no helpers
    workers.do()
    assert taken == [0, 1, 2, 3, 4, 5]
    workers.do()
    assert len(taken) == 6
    assert poller._helping == 0
    poller._thread = None
    poller.close()


def test_a_failing_step_of_a_helper_loses_no_other_step() -> None:
    workers, taken = HandWorkers(), []
    poller = Poller(Immediate(), workers)
    poller._thread = threading.current_thread()
    for job in (sys.exit, *[lambda: taken.append("step")] * 5):
        assert poller.run_soon(job)
    poller._call_helpers(taken=1, elapsed_s=1.0, due=6)
    workers.do()
    assert taken == ["step"] * 5
    workers.do()
    assert poller._helping == 0
    poller._thread = None
    poller.close()


@pytest.mark.parametrize("workers", [HandWorkers(), NoWorkers()], ids=["worker", "no worker"])
def test_a_job_added_while_the_thread_ends_is_done(workers: HandWorkers | NoWorkers) -> None:
    poller, done = Poller(Immediate(), workers), []

    class Due(deque[Any]):
        def append(self, step: Any) -> None:
            assert not poller.step(0.0)  # the thread ends between the two steps of `run_soon`
            super().append(step)

    poller._thread, poller._due = threading.current_thread(), Due()
    assert poller.run_soon(lambda: done.append("job"))
    if isinstance(workers, HandWorkers):
        workers.do()
    assert done == ["job"]
    assert not poller.run_soon(done.clear)


def test_a_job_added_while_the_thread_falls_asleep_wakes_it() -> None:
    poller, done = Poller(Immediate(), HandWorkers()), []

    class Due(deque[Any]):
        def __bool__(self) -> bool:
            found = len(self) > 0
            if not done:  # after this look, the thread goes to sleep
                done.append(poller.run_soon(lambda: done.append("job")))
            return found

    poller._thread, poller._due = threading.current_thread(), Due()
    poller.step(PATIENCE_S)  # without a wake, it would sleep
    poller.step(0.0)
    assert done == [True, "job"]
    poller._thread = None
    poller.close()


def test_help_keeps_every_answer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(poller_thread, "SLOW_STEP_S", 0.0)
    monkeypatch.setattr(poller_thread, "FEW_STEPS", -1)
    monkeypatch.setattr(poller_thread, "HELD_UP_S", 1e-4)
    helped = threading.Event()
    with closing(Workers("fetch", 4)) as workers, closing(Poller(Immediate(idle=True), workers)) as poller:
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        help_out = poller._help

        def help_and_note() -> None:
            helped.set()
            help_out()

        monkeypatch.setattr(poller, "_help", help_and_note)
        sent = 0
        while not helped.is_set() or sent < 500:
            for _ in range(50):
                poller.start(post(body=b"%d" % sent), outcomes.put)
                sent += 1
            bodies = [outcomes.get(timeout=PATIENCE_S) for _ in range(50)]
            assert all(isinstance(one, Reply) for one in bodies)
            assert {int(one.body) for one in bodies if isinstance(one, Reply)} == set(range(sent - 50, sent))
        assert outcomes.empty()
        assert poller.under_way == 0
    assert not [record for record in caplog.records if record.name.startswith("tinker_sync.runtime.poller")]


def test_no_thread_takes_over_between_two_turns() -> None:
    with closing(Poller(Immediate(), HandWorkers())) as poller:
        seen: list[bool] = []
        poller._due.append((lambda: seen.append(poller._in_step),))
        assert poller.step(0)
        assert (seen, poller._in_step) == ([True], False)


def test_the_watch_of_a_silent_request_ends_before_another_thread_can_close_its_socket() -> None:
    """Once a socket is closed, its number may belong to a new socket, whose watch would end in its place."""
    due: list[int] = []

    class Recording(SelectorReadiness):
        def forget(self, descriptor: int) -> None:
            due.append(len(poller._due))
            super().forget(descriptor)

    class Silent(Finished):
        expires_at_s = 0.0  # in the past

    class Transport(Immediate):
        def open(self, call: Call) -> Finished:
            request = Silent(call)
            os.read(request.fileno(), 1)
            return request

    workers, outcomes = HandWorkers(), queue.SimpleQueue[Outcome]()
    with closing(Poller(Transport(), workers)) as poller:
        poller._readiness = Recording()
        poller.start(post(), outcomes.put)
        workers.do()
        assert poller.step(0)
        assert (due[0], outcomes.qsize(), poller.under_way) == (0, 1, 0)
