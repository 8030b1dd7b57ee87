"""The system clock, the fake clock of the tests, and numbers that threads draw."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.crowd import start, together

from tinker_sync._base import clock, numbers
from tinker_sync._base.clock import SYSTEM_CLOCK, http_date


@pytest.mark.parametrize("text", [None, "", "x", "0", "Mon, 32 Jan 2024 00:00:00 GMT", "Jan " + "9" * 30])
def test_what_is_no_date_names_no_moment(text: str | None) -> None:
    assert http_date(text) is None


def test_a_date_without_a_time_zone_is_in_utc() -> None:
    date = http_date("Thu, 01 Jan 1970 00:00:30 -0000")
    assert date is not None
    assert date.timestamp() == 30.0


def test_every_timeout_is_accepted() -> None:
    event = threading.Event()
    assert SYSTEM_CLOCK.wait(event, -1) is False
    event.set()
    assert SYSTEM_CLOCK.wait(event, math.inf) is True


def test_setting_the_event_ends_a_wait() -> None:
    event = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(SYSTEM_CLOCK.wait, event, math.inf)
        event.set()
        assert waiting.result(PATIENCE_S) is True


def test_a_fake_clock_wakes_waits_that_are_over() -> None:
    clock, event = FakeClock(automatic=False), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        short, long = pool.submit(clock.wait, event, 5.0), pool.submit(clock.wait, event, 50.0)
        clock.await_waiters(2)
        clock.advance(10)
        assert short.result(PATIENCE_S) is False
        assert not long.done()
        event.set()
        assert long.result(PATIENCE_S) is True
    assert sorted(clock.waits) == [5.0, 50.0]


def test_ctrl_c_right_after_a_lock_was_taken_gives_it_back() -> None:
    class Interrupted(clock._InterruptibleLock):
        def acquire(self, *given: Any, **options: Any) -> bool:
            super().acquire(*given, **options)
            raise KeyboardInterrupt

    lock = Interrupted()
    with pytest.raises(KeyboardInterrupt), lock:
        pass
    assert start(lambda: super(Interrupted, lock).acquire(False)).result(PATIENCE_S)


# ----- Numbers that threads draw
@pytest.mark.parametrize("atomic", [numbers._ATOMIC, False])
def test_each_thread_draws_other_numbers(monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    monkeypatch.setattr(numbers, "_ATOMIC", atomic)
    drawn, keys = numbers.numbers(3), numbers.unique_keys()
    together_drawn = together(*[lambda: list(zip(islice(drawn, 2000), keys, strict=False))] * 4)
    found = sorted(chain.from_iterable(together_drawn))
    assert [number for number, _ in found] == list(range(3, 8003))
    assert len({key for _, key in found}) == 8000
