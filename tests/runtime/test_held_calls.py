"""Calls on a client that is not ready: their order, the failure of the client, and forks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from support.sends import HandWorkers

from tinker_sync.errors import TinkerError
from tinker_sync.runtime.held_calls import HeldCalls

FIRST, SECOND = TinkerError("first"), TinkerError("second")


class Call:
    """A double of a call that logs its start and keeps its failure."""

    def __init__(self, log: list[str], name: str, then: Callable[[], object] = lambda: None) -> None:
        self._log, self._name, self._then = log, name, then
        self.failure: Exception | None = None

    def start(self) -> None:
        self._log.append(self._name)
        self._then()

    def fail(self, failure: Exception) -> None:
        self.failure = failure


@pytest.fixture
def workers() -> HandWorkers:
    return HandWorkers()


@pytest.fixture
def calls(workers: HandWorkers) -> HeldCalls:
    return HeldCalls(workers)  # type: ignore[arg-type]  # a double


@pytest.fixture
def log() -> list[str]:
    return []


def test_a_call_that_is_made_while_others_start_waits_behind_them(
    calls: HeldCalls, workers: HandWorkers, log: list[str]
) -> None:
    calls.hold(Call(log, "a", then=lambda: calls.hold(Call(log, "late"))))
    calls.hold(Call(log, "b"))
    calls.release()
    assert log == ["a", "b", "late"]
    assert calls.open
    calls.hold(Call(log, "c"))  # as of a thread that has looked too early
    assert not calls.open
    workers.do_all()
    assert (log[-1], calls.open) == ("c", True)


def test_a_call_that_is_added_as_the_last_one_starts_is_started_before_later_ones(
    calls: HeldCalls, workers: HandWorkers, log: list[str]
) -> None:
    seen: list[bool] = []

    class Waiting(deque[Call]):
        def popleft(self) -> Call:
            if not self and not seen:  # the thread that releases takes them for the last time
                calls.hold(Call(log, "late"))
                seen.append(calls.open)
                raise IndexError
            return super().popleft()

    calls._waiting = Waiting()  # type: ignore[assignment]
    calls.hold(Call(log, "first"))
    calls.release()
    assert (log, seen, calls.open, workers.jobs) == (["first", "late"], [False], True, [])
