"""Threads for tests, and a fixed order of their steps.

A test gets the exceptions of its threads, and fails if one of them hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from support.clock import PATIENCE_S


def start(job: Callable[[], Any]) -> Future[Any]:
    """Run `job` in a daemon thread, and return a future of its result.

    A job that hangs does not keep pytest from going on, because the thread is a daemon.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = job()
        except BaseException as failure:  # noqa: BLE001  # it is raised where the future is asked
            future.set_exception(failure)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return future


def together(*jobs: Callable[[], Any], patience_s: float = PATIENCE_S) -> list[Any]:
    """Run each job in a thread; all begin at the same moment. Return results in the order of the jobs."""
    line_up = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        line_up.wait(patience_s)
        return job()

    return [future.result(patience_s) for future in [start(lambda job=job: run(job)) for job in jobs]]


@contextmanager
def aside(*jobs: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run each job in a thread beside the `with` block. Yield a list; after the block it has the results."""
    results: list[Any] = []
    futures = [start(job) for job in jobs]
    yield results
    results += [future.result(PATIENCE_S) for future in futures]


def let_others_run() -> None:
    """Let other threads run for a moment, so that their steps interleave with those of this thread."""
    threading.Event().wait(1e-6)


def until(condition: Callable[[], Any]) -> None:
    """Let other threads run until `condition()` is true. Use it for states without an event to wait for."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it never came to that")


# ---------------------------------------------- A fixed order for blocks of code in several threads
class Steps:
    """An order of named steps: `with steps("a"):` in any thread waits until all steps before "a" have ended.

    A block that raises breaks the order, and fails all waits for later steps at once.

    >>> steps = Steps("first", "second")
    >>> with steps("first"):
    ...     pass
    >>> steps.left()
    ['second']
    """

    def __init__(self, *names: str) -> None:
        if len(set(names)) != len(names):
            raise ValueError("each step needs a name of its own")
        self._names = names
        self._turn = threading.Condition()
        self._over = 0  # guarded by _turn; the number of steps that have ended
        self._broken: str | None = None  # guarded by _turn; the step that raised

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        place = self._names.index(name)
        with self._turn:
            if not self._turn.wait_for(lambda: self._over >= place or self._broken, PATIENCE_S):
                raise AssertionError(f"{name!r} never got its turn; next was {self._names[self._over]!r}")
            if self._broken:
                raise AssertionError(f"{name!r} cannot come: {self._broken!r} failed")
        try:
            yield
        except BaseException:
            self._end(place, broken=name)
            raise
        self._end(place)

    def left(self) -> list[str]:
        """The steps that have not ended."""
        with self._turn:
            return list(self._names[self._over :])

    def _end(self, place: int, broken: str | None = None) -> None:
        with self._turn:
            assert self._over == place, f"{self._names[place]!r} ran twice"
            self._over += broken is None
            self._broken = broken
            self._turn.notify_all()
