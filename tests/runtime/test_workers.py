from __future__ import annotations

import concurrent.futures
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import pytest
from support.clock import PATIENCE_S
from support.crowd import Steps, aside, start, until
from support.raising import raising
from support.signals import at_every_moment

import tinker_sync.runtime.workers
from tinker_sync.runtime.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers("send", max_threads=3) as pool:
        yield pool


class Held:
    """A job that waits until the test lets it end."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)
        self.threads: list[threading.Thread] = []

    def __call__(self) -> None:
        self.threads.append(threading.current_thread())
        self.begun.release()
        assert self.go_on.wait(PATIENCE_S)

    def await_begun(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=PATIENCE_S)


def threads_now() -> int:
    """Return the number of threads of the workers, which all tests of this file call `send`."""
    return sum(thread.name.startswith("tinker-send-") for thread in threading.enumerate())


def idle_threads(workers: Workers) -> int:
    return len(workers._idle)


class TestThreads:
    def test_are_named_daemons(self, workers: Workers) -> None:
        held = Held()
        for _ in range(3):
            workers.run(held)
        held.await_begun(3)
        assert sorted(thread.name for thread in held.threads) == [
            "tinker-send-1",
            "tinker-send-2",
            "tinker-send-3",
        ]
        assert all(thread.daemon for thread in held.threads)
        held.go_on.set()

    def test_never_more_than_the_bound(self, workers: Workers) -> None:
        held = Held()
        for _ in range(10):
            workers.run(held)
        held.await_begun(3)
        assert threads_now() == 3
        held.go_on.set()
        held.await_begun(7)
        assert len(set(held.threads)) == 3

    def test_an_idle_one_is_used_before_a_new_one_starts(self, workers: Workers) -> None:
        for _ in range(20):
            name = workers.submit(lambda: threading.current_thread().name).result(PATIENCE_S)
            assert name == "tinker-send-1"
            until(lambda: idle_threads(workers) == 1)

    def test_jobs_that_wait_for_each_other_get_one_each(self, workers: Workers) -> None:
        for _ in range(300):
            together = threading.Barrier(3)
            futures = [workers.submit(together.wait, PATIENCE_S) for _ in range(3)]
            assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1, 2]

    def test_an_idle_one_ends_in_time(self) -> None:
        with Workers("send", max_threads=2, idle_s=0) as pool:
            thread = pool.submit(threading.current_thread).result(PATIENCE_S)
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
            assert threads_now() == 0
            assert pool.submit(pow, 2, 3).result(PATIENCE_S) == 8  # a new thread starts

    def test_the_last_one_stays_while_it_is_needed(self) -> None:
        asked, needed = threading.Semaphore(0), threading.Event()
        needed.set()

        def is_needed() -> bool:
            asked.release()
            return needed.is_set()

        with Workers("send", max_threads=2, idle_s=0.001, needed=is_needed) as pool:
            pool.reserve()
            pool.reserve()
            for _ in range(3):
                assert asked.acquire(timeout=PATIENCE_S)
            assert threads_now() == 1
            needed.clear()
            until(lambda: threads_now() == 0)
        pool.reserve()
        assert threads_now() == 0

    def test_a_dropped_pool_goes_when_its_threads_do(self) -> None:
        pool = Workers("send", max_threads=2, idle_s=0)
        thread = pool.submit(threading.current_thread).result(PATIENCE_S)
        gone = weakref.ref(pool)
        thread.join(PATIENCE_S)
        del pool, thread
        gc.collect()
        assert gone() is None


class TestJobs:
    @pytest.mark.parametrize("failure", [KeyError("a"), SystemExit(3)], ids=["Exception", "SystemExit"])
    def test_a_failure_belongs_to_the_future(self, workers: Workers, failure: BaseException) -> None:
        assert workers.submit(raising(failure)).exception(PATIENCE_S) is failure
        assert workers.submit(threading.current_thread).result(PATIENCE_S).name == "tinker-send-1"

    @pytest.mark.parametrize("failure", [KeyError("a"), SystemExit(3)], ids=["Exception", "SystemExit"])
    def test_unseen_failure_is_logged(self, caplog: pytest.LogCaptureFixture, failure: BaseException) -> None:
        with caplog.at_level(logging.ERROR, logger="tinker_sync"), Workers("send", max_threads=1) as pool:
            pool.run(raising(failure))
            assert pool.submit(pow, 2, 3).result(PATIENCE_S) == 8
        (record,) = caplog.records
        assert record.getMessage() == "a job of the workers 'send' failed"
        assert record.exc_info[1] is failure

    def test_a_cancelled_one_is_not_done(self) -> None:
        held, done = Held(), []
        with Workers("send", max_threads=1) as pool:
            pool.run(held)
            cancelled = pool.submit(done.append, 1)
            assert cancelled.cancel()
            last = pool.submit(done.append, 2)
            held.go_on.set()
            last.result(PATIENCE_S)
        assert done == [2]
        assert concurrent.futures.wait([cancelled], timeout=0).done == {cancelled}


class TestClose:
    def test_finishes_what_there_is_and_takes_no_more(self) -> None:
        held = Held()
        pool = Workers("send", max_threads=1)
        pool.run(held)
        last = pool.submit(pow, 2, 3)
        closing = start(lambda: pool.close(PATIENCE_S))
        until(lambda: "closed" in repr(pool))
        with pytest.raises(RuntimeError, match="closed"):
            pool.run(held)
        with pytest.raises(RuntimeError, match="closed"):
            pool.submit(held)
        held.go_on.set()
        assert closing.result(PATIENCE_S)
        assert last.result(0) == 8
        until(lambda: threads_now() == 0)

    def test_is_bounded_in_time_and_drops_what_has_not_begun(self) -> None:
        held = Held()
        pool = Workers("send", max_threads=1)
        pool.run(held)
        dropped = pool.submit(pow, 2, 3)
        held.await_begun(1)
        assert not pool.close(timeout=0)
        assert dropped.cancelled()
        held.go_on.set()
        assert pool.close(PATIENCE_S)

    def test_from_one_of_its_own_threads(self) -> None:
        pool = Workers("send", max_threads=2)
        assert pool.submit(pool.close, PATIENCE_S).result(PATIENCE_S)
        assert pool.close(PATIENCE_S)

    def test_shutdown_as_executors_have_it(self) -> None:
        held = Held()
        pool = Workers("send", max_threads=1)
        pool.run(held)
        dropped = pool.submit(pow, 2, 3)
        held.await_begun(1)
        pool.shutdown(wait=False)
        assert not dropped.done()
        pool.shutdown(wait=False, cancel_futures=True)
        assert dropped.cancelled()
        held.go_on.set()
        pool.shutdown()
        assert not any(thread.is_alive() for thread in held.threads)


class TestCtrlC:
    """Tests of `run` when Ctrl-C interrupts it."""

    @pytest.mark.parametrize("born", [False, True])
    def test_while_a_thread_is_started(self, monkeypatch: pytest.MonkeyPatch, born: bool) -> None:
        real_start = threading.Thread.start

        def interrupted(thread: threading.Thread) -> None:
            if born:
                real_start(thread)
            raise KeyboardInterrupt

        seen: list[int] = []
        with Workers("send", max_threads=1) as pool:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    pool.run(lambda: seen.append(1))
            pool.submit(seen.append, 2).result(PATIENCE_S)
            assert seen == [1, 2]
            until(lambda: threads_now() == 1)

    def test_at_any_moment_of_the_start_of_a_thread(self) -> None:
        """No lock stays taken that the new thread needs before its first step."""

        def call() -> Workers:
            pools.append(Workers("send", max_threads=1))
            pools[-1].run(lambda: None)
            return pools[-1]

        def interrupt() -> None:
            raise KeyboardInterrupt

        def check(_: object, moment: str) -> None:
            if pools:  # empty if Ctrl-C came before the call
                pool = pools.pop()
                assert pool.submit(pow, 2, 3).result(PATIENCE_S) == 8, moment
                assert pool.close(PATIENCE_S), moment

        pools: list[Workers] = []
        assert at_every_moment(call, interrupt, check) > 40
        pools.pop().close()

    @pytest.mark.parametrize("idle", [False, True], ids=["without a thread", "with an idle thread"])
    def test_at_any_point(self, idle: bool) -> None:
        """The interrupted job is done or was not queued, and the pool goes on, wherever Ctrl-C comes."""
        point = 0
        while start(partial(_interrupt_at, point, idle)).result(PATIENCE_S):
            point += 1
        assert point > 10


def _interrupt_at(point: int, idle: bool) -> bool:
    seen: list[int] = []
    with Workers("send", max_threads=1, idle_s=3600) as pool:
        if idle:
            pool.submit(pow, 2, 3).result(PATIENCE_S)
            until(lambda: idle_threads(pool) == 1)
        job = partial(seen.append, 1)
        with suppress(KeyboardInterrupt), at_opcode(point, raising(KeyboardInterrupt)) as reached:
            pool.run(job)
        pool.submit(seen.append, 2).result(PATIENCE_S)
        assert seen in ([1, 2], [2])
        assert threads_now() == 1
    return bool(reached)


@pytest.mark.parametrize("idle", [False, True], ids=["without a thread", "with an idle thread"])
def test_a_signal_handler_may_submit_at_any_point_of_a_submit(idle: bool) -> None:
    point = 0
    while start(partial(_submit_at, point, idle)).result(PATIENCE_S):
        point += 1
    assert point > 10


def _submit_at(point: int, idle: bool) -> bool:
    seen: list[int] = []
    with Workers("send", max_threads=1, idle_s=3600) as pool:
        if idle:
            pool.submit(pow, 2, 3).result(PATIENCE_S)
            until(lambda: idle_threads(pool) == 1)
        with at_opcode(point, lambda: pool.submit(seen.append, 1).result(PATIENCE_S)) as reached:
            interrupted = pool.submit(seen.append, 2)
        interrupted.result(PATIENCE_S)
        assert sorted(seen) == [1, 2][1 - len(reached) :]
    return bool(reached)


@contextmanager
def at_opcode(number: int, handler: Callable[[], object]) -> Iterator[list[int]]:
    """Call `handler`, as a signal would, before the opcode with this number that `workers` runs in the block.

    The list has an item if there is such an opcode. Use it in a thread of its own: an exception that a trace
    function raises in an `except` block may stay the current one of the thread.
    """
    counted, reached = count(), []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != tinker_sync.runtime.workers.__file__:
            return None
        frame.f_trace = trace  # from Python 3.13 on, the next line has no effect without it
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and next(counted) == number:
            reached.append(number)
            sys.settrace(None)
            handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(before)


def test_a_thread_that_is_woken_as_its_time_ends_takes_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    real_lock, held, over = threading.Lock, Held(), threading.Event()
    jobs = [over.set]

    class Ready:
        """A lock whose wait runs out just before another thread releases it."""

        def __init__(self) -> None:
            self.lock = real_lock()

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            if timeout >= 0 and jobs:
                pool.run(jobs.pop())
                return False
            return self.lock.acquire(blocking, timeout)

        def release(self) -> None:
            self.lock.release()

    with Workers("send", max_threads=1) as pool:
        pool.run(held)
        held.await_begun(1)
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Lock", Ready)  # the thread of the pool alone makes one
            held.go_on.set()
            assert over.wait(PATIENCE_S)
        assert pool.submit(threading.current_thread).result(PATIENCE_S) is held.threads[0]


def test_a_job_that_comes_while_the_last_thread_leaves_is_done() -> None:
    """A thread that leaves looks for jobs once more, because a caller may still have counted on it."""

    late: list[concurrent.futures.Future[int]] = []

    class Leaving(Workers):
        def _leave(self) -> bool:
            if not late:
                late.append(self.submit(pow, 2, 3))  # finds the pool full
            return super()._leave()

    pool = Leaving("send", max_threads=1, idle_s=0)
    pool.submit(pow, 2, 2).result(PATIENCE_S)
    until(lambda: late)
    assert late[0].result(PATIENCE_S) == 8
    assert pool.close(PATIENCE_S)


def test_close_does_a_job_whose_thread_has_yet_to_start() -> None:
    steps = Steps("queued", "closed", "started")

    class Late(Workers):
        def _start_thread(self) -> threading.Thread:
            if threading.current_thread() is not threading.main_thread():
                with steps("queued"):
                    pass
                with steps("started"):
                    return super()._start_thread()
            return super()._start_thread()

    pool, seen = Late("send", max_threads=1), []
    with aside(lambda: pool.run(lambda: seen.append(1))):
        with steps("closed"):
            assert pool.close(PATIENCE_S)
        assert seen == [1]


class TestSystemWithoutThreads:
    def test_no_first_thread_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = Workers("send", max_threads=2)
        monkeypatch.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.run(lambda: pytest.fail("it was refused"))
        monkeypatch.undo()
        assert pool.submit(pow, 2, 3).result(PATIENCE_S) == 8  # the thread that did not start is not counted
        pool.close()

    def test_the_existing_threads_do_the_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held = Held()
        pool = Workers("send", max_threads=2)
        pool.run(held)
        held.await_begun(1)
        monkeypatch.setattr(threading.Thread, "start", _no_thread)
        job = pool.submit(pow, 2, 3)
        monkeypatch.undo()
        held.go_on.set()
        assert job.result(PATIENCE_S) == 8
        pool.close()


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def run_script(code: str, *, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == expect, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "raise KeyboardInterrupt", "1 / 0"])
def test_a_process_ends_with_hundreds_of_jobs_under_way(end: str) -> None:
    """A process ends although 400 of its jobs never end, because it does not join its workers."""
    code = (
        "import sys, threading\n"
        "from tinker_sync.runtime.workers import Workers\n"
        "begun = threading.Semaphore(0)\n"
        "def job():\n"
        "    begun.release()\n"
        "    threading.Event().wait()\n"
        "for name in ('send', 'fetch'):\n"
        "    pool = Workers(name, max_threads=100)\n"
        "    for _ in range(200):\n"
        "        pool.submit(job)\n"
        "for _ in range(200):\n"
        "    begun.acquire()\n"
        f"{end}\n"
    )
    expect = {"pass": 0, "sys.exit(0)": 0, "1 / 0": 1}.get(end, -2)
    said = run_script(code, expect=expect)
    assert "Fatal" not in said
    assert expect or said == ""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_forked_child_starts_clean() -> None:
    run_script(
        "import os, threading, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from tinker_sync.runtime.workers import Workers\n"
        "pool = Workers('send', max_threads=2)\n"
        "go_on, begun = threading.Event(), threading.Semaphore(0)\n"
        "def job():\n"
        "    begun.release()\n"
        "    go_on.wait()\n"
        "mine = [pool.submit(job) for _ in range(4)]\n"
        "begun.acquire(), begun.acquire()\n"
        "pool._membership.acquire()  # as if a thread were just entering\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    pool.begin()\n"
        "    ok = threading.active_count() == 1\n"
        "    ok = ok and pool.submit(pow, 2, 3).result(120) == 8\n"
        "    os._exit(0 if ok and pool.close(10) else 1)\n"
        "pool._membership.release()\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "go_on.set()\n"
        "for future in mine:\n"
        "    future.result(120)\n"
        "assert pool.close(10)\n"
    )
