from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import FakeClock

from tinker_sync.errors import TinkerError
from tinker_sync.runtime.byte_budget import ByteBudget


def test_enters_while_the_balance_is_not_negative() -> None:
    budget = ByteBudget(100)
    assert [budget.try_acquire(size) for size in (60, 40, 1, 1)] == [True, True, True, False]
    assert repr(budget) == "<ByteBudget -1 of 100 bytes free, 0 in line>"


def test_one_larger_than_the_budget_passes_and_keeps_others_out() -> None:
    budget = ByteBudget(100)
    assert budget.try_acquire(1000)
    assert not budget.try_acquire(0)
    budget.release(1000)
    assert budget.try_acquire(1000)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=60), st.integers(0, 100))
def test_a_hold_is_allowed_while_the_limit_is_not_exceeded(steps: list[tuple[bool, int]], limit: int) -> None:
    budget, held = ByteBudget(limit), []
    for enters, size in steps:
        if enters:
            assert budget.try_acquire(size) == (sum(held) <= limit)
            if sum(held) <= limit:
                held.append(size)
        elif held:
            budget.release(held.pop())


def test_more_must_not_come_back_than_was_taken() -> None:
    budget = ByteBudget(100)
    with pytest.raises(AssertionError, match="more came back"):
        budget.release(1)


def test_a_child_has_the_whole_budget() -> None:
    budget = ByteBudget(100)
    assert budget.try_acquire(500)
    budget.when_free(1, lambda _: pytest.fail("the parent waits for it"))
    budget.renew_after_fork()
    assert repr(budget) == "<ByteBudget 100 of 100 bytes free, 0 in line>"
    budget.close(TinkerError("closed"))


class TestTimeout:
    def test_runs_out_by_the_clock(self) -> None:
        clock = FakeClock()
        budget = ByteBudget(0, clock=clock)
        assert budget.acquire(1)
        assert not budget.acquire(1, timeout=2.5)
        assert clock.waits == [2.5]
        assert repr(budget) == "<ByteBudget -1 of 0 bytes free, 0 in line>"

    def test_one_who_gave_up_gets_nothing_later(self) -> None:
        budget = ByteBudget(0, clock=FakeClock())
        budget.acquire(5)
        budget.acquire(5, timeout=1)
        budget.release(5)
        assert repr(budget) == "<ByteBudget 0 of 0 bytes free, 0 in line>"

    def test_who_was_let_in_at_the_last_moment_is_in(self) -> None:
        budget: ByteBudget

        class LateClock(FakeClock):
            def wait(self, event: threading.Event, timeout_s: float) -> bool:
                budget.release(5)
                return False  # the deadline passes anyway

        budget = ByteBudget(0, clock=LateClock())
        budget.acquire(5)
        assert budget.acquire(7, timeout=1)
        assert repr(budget) == "<ByteBudget -7 of 0 bytes free, 0 in line>"

    @pytest.mark.parametrize("granted", [False, True])
    def test_an_interrupted_wait_holds_nothing(self, granted: bool) -> None:
        budget: ByteBudget

        class Interrupted(FakeClock):
            def wait(self, event: threading.Event, timeout_s: float) -> bool:
                if granted:
                    budget.release(5)
                raise KeyboardInterrupt

        budget = ByteBudget(0, clock=Interrupted())
        budget.acquire(5)
        with pytest.raises(KeyboardInterrupt):
            budget.acquire(7)
        free = 0 if granted else -5
        assert repr(budget) == f"<ByteBudget {free} of 0 bytes free, 0 in line>"


class TestWhenFree:
    def test_in_the_order_they_came_and_taken_before_they_hear(self) -> None:
        budget = ByteBudget(0)
        seen: list[tuple[str, str]] = []

        def note(name: str) -> Any:
            return lambda granted: seen.append((f"{name} {granted}", repr(budget)))

        for name, size in (("a", 5), ("b", 7), ("c", 1)):
            budget.when_free(size, note(name))
        budget.release(5)
        budget.release(7)
        assert seen == [
            ("a True", "<ByteBudget -5 of 0 bytes free, 0 in line>"),
            ("b True", "<ByteBudget -7 of 0 bytes free, 1 in line>"),
            ("c True", "<ByteBudget -1 of 0 bytes free, 0 in line>"),
        ]

    def test_one_release_lets_in_as_many_as_the_rule_allows(self) -> None:
        budget = ByteBudget(10)
        seen: list[str] = []
        budget.acquire(30)
        for name in "abcd":
            budget.when_free(6, lambda _, name=name: seen.append(name))
        budget.release(30)  # 10, 4, -2
        assert seen == ["a", "b"]

    def test_a_newcomer_does_not_overtake(self) -> None:
        budget = ByteBudget(0)
        seen: list[bool] = []
        budget.acquire(5)
        budget.when_free(5, seen.append)
        budget.release(5)
        assert not budget.try_acquire(0)
        assert seen == [True]

    def test_a_close_calls_back_with_false(self) -> None:
        budget = ByteBudget(0)
        seen: list[bool] = []
        budget.acquire(5)
        budget.when_free(5, seen.append)
        budget.close(TinkerError("closed"))
        assert seen == [False]
        budget.release(5)
        assert seen == [False]


class TestClose:
    def test_refuses_newcomers_and_takes_back_what_is_out(self) -> None:
        budget = ByteBudget(10)
        budget.acquire(4)
        budget.close(TinkerError("first"))
        budget.close(TinkerError("second"))
        for enter in (budget.try_acquire, budget.acquire, lambda size: budget.when_free(size, print)):
            with pytest.raises(TinkerError, match="first"):
                enter(1)
        budget.release(4)
        assert repr(budget) == "<ByteBudget 10 of 10 bytes free, 0 in line, closed>"

    def test_each_waiter_gets_an_exception_of_its_own(self) -> None:
        budget = ByteBudget(10)
        budget.close(TinkerError("closed"))
        errors = []
        for _ in range(2):
            with pytest.raises(TinkerError) as caught:
                budget.acquire(1)
            errors.append(caught.value)
        assert errors[0] is not errors[1]
