"""`Lazy`: one thread makes the value for all; after a failure or an interrupt, another thread makes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from support.crowd import until
from support.forks import in_child
from support.raising import raising
from support.signals import at_every_moment

from tinker_sync._base.api_errors import copy_exception
from tinker_sync.errors import APIStatusError, DeadlineError
from tinker_sync.runtime.lazy import Lazy, Shared


class Flight:
    """A `Lazy` whose value one thread makes until the test calls `land`, while other threads wait for it."""

    def __init__(self, **options: Any) -> None:
        self.lazy: Lazy[int] = Lazy(self._now)
        self._reads = 0
        self.ending: Callable[[], int] = lambda: 1
        self._begun, self._land = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self.first = self._pool.submit(self.lazy.get, self._make, **options)
        assert self._begun.wait(120)

    def _make(self) -> int:
        self._begun.set()
        assert self._land.wait(120)
        return self.ending()

    def _now(self) -> float:
        """Return the time of a clock that stands still, and count how often it was read."""
        self._reads += 1
        return 0.0

    def wait(self, make: Callable[[], int], **options: Any) -> Any:
        """Call `get` in another thread. When the call waits or has ended, return its future."""
        # A call reads the clock when it begins, and again when it joins a try of another thread.
        waits = self._reads + 2
        future = self._pool.submit(self.lazy.get, make, **options)
        until(lambda: self._reads >= waits or future.done())
        return future

    def land(self, ending: Callable[[], int]) -> None:
        self.ending = ending
        self._land.set()
        self._pool.shutdown()


def never() -> int:
    raise AssertionError("another thread was making the value")


def test_the_value_is_made_once_at_whatever_moment_another_one_asks() -> None:
    """A session got second heartbeats, which nothing ended, when a thread asked while another one ended."""
    lazies: list[Lazy[int]] = []
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return 7

    def call() -> int:
        lazies[:], made[:] = [Lazy()], []
        return lazies[0].get(make)

    def ask() -> None:
        if lazies:
            with suppress(DeadlineError):  # the outer call makes the value
                assert lazies[0].get(make, deadline_at=0.0) == 7

    def check(value: int, moment: str) -> None:
        assert (value, made) == (7, [1]), moment

    assert at_every_moment(call, ask, check) > 20


def test_threads_that_come_meanwhile_wait() -> None:
    flight = Flight()
    lazy = flight.lazy
    waiting = [flight.wait(never) for _ in range(3)]
    assert lazy.value is None
    flight.land(lambda: 7)
    assert [future.result(120) for future in (flight.first, *waiting)] == [7] * 4
    assert (lazy.value, lazy.get(never)) == (7, 7)


def test_a_failure_goes_to_all_who_waited_and_is_not_remembered() -> None:
    flight = Flight()
    lazy = flight.lazy
    waiting = [flight.wait(never) for _ in range(3)]
    flight.land(raising(KeyError("first")))
    failures = [future.exception(120) for future in (flight.first, *waiting)]
    assert [repr(failure) for failure in failures] == ["KeyError('first')"] * 4
    assert len({id(failure) for failure in failures}) == 4  # each thread gets its own exception
    assert lazy.get(lambda: 7) == 7


def test_ctrl_c_in_one_thread_is_no_answer_for_the_others() -> None:
    flight = Flight()
    waiting = flight.wait(lambda: 7)
    flight.land(raising(KeyboardInterrupt()))
    assert isinstance(flight.first.exception(120), KeyboardInterrupt)
    assert waiting.result(120) == 7


def test_waiting_has_a_limit() -> None:
    flight = Flight()
    lazy = flight.lazy
    with pytest.raises(DeadlineError, match="setting it up"):
        lazy.get(never, deadline_at=0.01)
    flight.land(lambda: 7)
    assert lazy.get(never, deadline_at=0.0) == 7


@pytest.mark.parametrize("failure", [DeadlineError("out of time"), KeyError("refused")])
def test_a_thread_with_more_time_makes_the_value_itself(failure: Exception) -> None:
    flight = Flight(deadline_at=60.0)
    same, more = flight.wait(never, deadline_at=60.0), flight.wait(lambda: 7, deadline_at=90.0)
    flight.land(raising(failure))
    assert [type(future.exception(120)) for future in (flight.first, same)] == [type(failure)] * 2
    if isinstance(failure, DeadlineError):
        assert more.result(120) == 7
    else:
        assert isinstance(more.exception(120), KeyError)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_what_only_the_parent_does() -> None:
    flight = Flight()

    def work() -> None:
        assert flight.lazy.get(lambda: 8) == 8
        assert flight.lazy.get(never) == 8

    in_child(work)
    flight.land(lambda: 7)
    assert flight.first.result(120) == 7


# ------------------------------------------------------------------------------------------- one for each key
def test_of_two_values_for_one_key_the_second_is_discarded() -> None:
    discarded: list[str] = []
    shared: Shared[str, str] = Shared({}, discard=discarded.append)

    def make() -> str:
        assert shared.get("key", lambda: "another thread's") == "another thread's"
        return "mine"

    assert shared.get("key", make) == "another thread's"
    assert discarded == ["mine"]


def test_a_value_that_cannot_be_used_is_replaced() -> None:
    closed: set[str] = set()
    shared: Shared[str, str] = Shared({}, is_usable=lambda value: value not in closed)
    assert shared.get("key", lambda: "first") == "first"
    closed.add("first")
    assert shared.get("key", lambda: "second") == "second"
    assert shared.get("key", lambda: "third") == "second"


# ----------------------------------------------------------------------------------------- failures
class Stubborn(Exception):
    """An exception that cannot be created again from its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001
        return caught


def test_a_copy_has_everything_but_the_traceback() -> None:
    error = APIStatusError.from_reply(429, {"x-request-id": "r-1"}, b"slow down", attempts=3)
    error.__cause__ = KeyError("a")
    copied = copy_exception(raised(error))
    assert copied is not error
    assert (type(copied), str(copied), copied.attempts) == (type(error), str(error), 3)
    assert copied.__cause__ is error.__cause__
    assert error.__traceback__ is not None
    assert copied.__traceback__ is None


def test_what_cannot_be_copied_is_passed_on() -> None:
    error = Stubborn("a", "b")
    assert copy_exception(error) is error


def test_a_copy_of_another_kind_is_no_copy() -> None:
    class Disguised(Exception):
        def __reduce__(self) -> tuple[type[Exception], tuple[str]]:
            return KeyError, ("a",)

    error = Disguised()
    assert copy_exception(error) is error
