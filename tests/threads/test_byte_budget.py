from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.crowd import aside, together

from tinker_sync.errors import TinkerError
from tinker_sync.runtime.byte_budget import ByteBudget


def test_who_leaves_lets_in_who_waits() -> None:
    clock = FakeClock(automatic=False)
    budget = ByteBudget(0, clock=clock)
    budget.acquire(5)
    with aside(lambda: budget.acquire(7)) as entered:
        clock.await_waiters(1)
        budget.release(5)
    assert entered == [True]
    assert repr(budget) == "<ByteBudget -7 of 0 bytes free, 0 in line>"


def test_time_passes_by_the_clock_only() -> None:
    clock = FakeClock(automatic=False)
    budget = ByteBudget(0, clock=clock)
    budget.acquire(5)
    with aside(lambda: budget.acquire(7, timeout=30)) as entered:
        clock.await_waiters(1)
        clock.advance(31)
    assert entered == [False]


def test_first_come_first_served() -> None:
    clock = FakeClock(automatic=False)
    budget = ByteBudget(0, clock=clock)
    budget.acquire(5)
    order: list[int] = []

    def enter(number: int) -> None:
        assert budget.acquire(5)
        order.append(number)
        budget.release(5)

    jobs: list[threading.Thread] = []
    for number in range(6):
        job = threading.Thread(target=enter, args=(number,), daemon=True)
        job.start()
        jobs.append(job)
        clock.await_waiters(number + 1)
    budget.release(5)
    for job in jobs:
        job.join(PATIENCE_S)
    assert order == [0, 1, 2, 3, 4, 5]


def test_a_close_wakes_all_waiters() -> None:
    clock = FakeClock(automatic=False)
    budget = ByteBudget(0, clock=clock)
    budget.acquire(5)

    def enter() -> str:
        with pytest.raises(TinkerError) as caught:
            budget.acquire(5)
        return str(caught.value)

    with aside(*[enter] * 5) as heard:
        clock.await_waiters(5)
        budget.close(TinkerError("closed"))
    assert heard == ["closed"] * 5


def test_a_crowd_never_takes_more_than_the_rule_allows() -> None:
    limit = 100
    budget = ByteBudget(limit)
    lock = threading.Lock()
    held: list[int] = []
    broken: list[Any] = []

    def use(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(100):
            size = draw.choice([1, 10, 60, 250])
            way = draw.randrange(3)
            if way == 0 and not budget.try_acquire(size):
                continue
            if way == 1:
                assert budget.acquire(size, timeout=PATIENCE_S)
            if way == 2:
                arrived = threading.Event()
                budget.when_free(size, lambda _, arrived=arrived: arrived.set())
                assert arrived.wait(PATIENCE_S)
            with lock:
                held.append(size)
                # All but the last thread were admitted while the others did not exceed the limit.
                if sum(held) - max(held) > limit:
                    broken.append(list(held))
            with lock:
                held.remove(size)
            budget.release(size)

    together(*[lambda seed=seed: use(seed) for seed in range(16)])
    assert broken == []
    assert repr(budget) == "<ByteBudget 100 of 100 bytes free, 0 in line>"
