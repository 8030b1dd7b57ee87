from __future__ import annotations

import threading
from itertools import chain
from typing import Any

from support.clock import PATIENCE_S
from support.crowd import aside, together, until
from support.steps import Steps

from tinker_sync.runtime.workers import Workers


class HeldPool(Workers):
    """A pool whose threads, when idle for long enough, stop before they say so."""

    def __init__(self, steps: Steps) -> None:
        super().__init__("send", max_threads=1, idle_s=0)
        self._steps = steps
        self.holds = True

    def _next_job(self, worker: Any) -> Any:
        if self.holds:
            self.holds = False
            pool, real = self, worker.ready

            class Ready:
                def acquire(self, *args: Any, **kwargs: Any) -> bool:
                    if "timeout" not in kwargs:
                        return real.acquire(*args, **kwargs)
                    with pool._steps("idle time is over"):
                        in_time = real.acquire(*args, **kwargs)
                    with pool._steps("look for work"):
                        worker.ready = real
                        return in_time

                def release(self) -> None:
                    real.release()

            worker.ready = Ready()
        return super()._next_job(worker)


def test_work_that_comes_when_the_idle_time_is_over_is_done() -> None:
    """The thread gives up waiting, a job is handed to it, and only then it looks: it must find it."""
    steps = Steps("idle time is over", "hand over", "look for work")
    pool = HeldPool(steps)
    first = pool.submit(threading.current_thread)
    with steps("hand over"):
        assert repr(pool) == "<Workers 'send' 1 threads, 1 idle, 0 queued>"
        second = pool.submit(threading.current_thread)
        pool._idle_s = 3600
    thread = first.result(PATIENCE_S)
    assert second.result(PATIENCE_S) is thread
    for _ in range(3):  # and it is a member of the pool as before
        until(lambda: repr(pool) == "<Workers 'send' 1 threads, 1 idle, 0 queued>")
        assert pool.submit(threading.current_thread).result(PATIENCE_S) is thread
    assert steps.left() == []
    assert pool.close(PATIENCE_S)


def test_nothing_is_lost_when_threads_come_and_go() -> None:
    """Without idle time every thread ends after each job that has no successor, so all the edges are met."""
    for _ in range(20):
        pool = Workers("send", max_threads=4, idle_s=0)

        def use(offset: int, pool: Workers = pool) -> list[int]:
            futures = [pool.submit(lambda value: value, offset + number) for number in range(50)]
            return [future.result(PATIENCE_S) for future in futures]

        results = together(*[lambda offset=offset: use(offset) for offset in range(0, 400, 50)])
        assert sorted(chain.from_iterable(results)) == list(range(400))
        assert pool.close(PATIENCE_S)
        assert repr(pool) == "<Workers 'send' 0 threads, 0 idle, 0 queued, closed>"


def test_a_close_from_many_threads() -> None:
    for _ in range(20):
        pool = Workers("send", max_threads=4)
        futures = [pool.submit(pow, 2, number) for number in range(20)]
        assert together(*[lambda pool=pool: pool.close(PATIENCE_S)] * 4) == [True] * 4
        assert [future.result(0) for future in futures] == [2**number for number in range(20)]


def test_submitting_races_with_closing() -> None:
    """A job is either refused or done."""
    for _ in range(50):
        pool, refused = Workers("send", max_threads=2), threading.Event()

        def submit(pool: Workers = pool, refused: threading.Event = refused) -> int:
            done = 0
            try:
                for _ in range(20):
                    done += pool.submit(lambda: 1).result(PATIENCE_S)
            except RuntimeError:
                refused.set()
            return done

        with aside(submit, submit) as counts:
            assert pool.close(PATIENCE_S)
        assert refused.is_set() == (sum(counts) < 40)
