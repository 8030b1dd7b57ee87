"""Threads for tests: what they raise reaches the test, and none is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from support.clock import PATIENCE_S


def together(*jobs: Callable[[], Any], patience_s: float = PATIENCE_S) -> list[Any]:
    """Run every job in a thread of its own, all starting at the same moment; results in order."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        start.wait(patience_s)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(patience_s) for future in [pool.submit(run, job) for job in jobs]]


@contextmanager
def aside(*jobs: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run every job in a thread of its own beside the `with` block; yields the list of their results."""
    results: list[Any] = []
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job) for job in jobs]
        yield results
        results += [future.result(PATIENCE_S) for future in futures]


def let_others_run() -> None:
    """Give up the interpreter for a moment, so that threads meet which would otherwise run one by one."""
    threading.Event().wait(1e-6)


def until(condition: Callable[[], Any]) -> None:
    """Let others run until `condition()` holds: for states that announce themselves to nobody."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it never came to that")
