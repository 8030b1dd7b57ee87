"""Renewals begin when they are due, never overlap, and change nothing when they fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.clock import FakeClock
from support.raising import raising

from tinker_sync.runtime.connection import SHORTEST_REFRESH_S, Refresher
from tinker_sync.types.service import ClientDynamicConfigResponse


class Bench:
    """A `Refresher` (the renewal of the token and the server's settings) under the control of a test.

    Its clock and keys are doubles, and its answers are scripted. Its jobs wait in `jobs` until the test runs
    them, in place of a worker.
    """

    def __init__(self) -> None:
        self.clock = FakeClock(automatic=False)
        self.jobs: list[Callable[[], object]] = []
        self.token_in_s: float | None = None
        self.renewed = 0
        self.answers: list[ClientDynamicConfigResponse | Exception] = []
        self.refresher = Refresher(self, self.fetch, self.jobs.append, self.clock)

    def step(self) -> None:
        self.renewed += 1

    def next_refresh_in_s(self) -> float | None:
        return self.token_in_s

    def fetch(self) -> ClientDynamicConfigResponse:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def know(self, interval_s: float) -> None:
        self.refresher.know(ClientDynamicConfigResponse(refresh_interval_sec=interval_s))

    def beat(self) -> int:
        """Begin the renewals that are due, as each heartbeat does. Return the number of new jobs."""
        before = len(self.jobs)
        self.refresher.begin_if_due()
        return len(self.jobs) - before


def settings(batch: int) -> ClientDynamicConfigResponse:
    return ClientDynamicConfigResponse(refresh_interval_sec=60, sample_cancel_max_batch_size=batch)


def test_refreshes_have_a_shortest_interval() -> None:
    bench = Bench()
    bench.know(0)
    bench.clock.advance(SHORTEST_REFRESH_S - 0.5)
    assert bench.beat() == 0
    bench.clock.advance(1)
    assert bench.beat() == 1


def test_a_bug_in_a_refresh_does_not_stop_later_ones() -> None:
    bench = Bench()
    bench.refresher.know(settings(7))
    bench.clock.advance(60)
    bench.answers = [KeyError("a"), settings(8)]
    assert bench.beat() == 1
    with pytest.raises(KeyError):
        bench.jobs.pop()()
    assert bench.beat() == 1
    bench.jobs.pop()()
    assert bench.refresher.settings == settings(8)


def test_a_closed_pool_is_no_reason_to_raise() -> None:
    bench = Bench()
    bench.token_in_s = 0.0
    refresher = Refresher(bench, bench.fetch, raising(RuntimeError("the workers are closed")), bench.clock)
    refresher.begin_if_due()
    refresher.begin_if_due()
