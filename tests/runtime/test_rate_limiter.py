from __future__ import annotations

import gc
import heapq
import math
import random
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.clock import FakeClock

from tinker_sync.errors import TinkerError
from tinker_sync.runtime.rate_limiter import (
    FIRST_RATE,
    Gate,
    Permit,
    RateLimiter,
    key_fingerprint,
    shared_rate_limiter,
)


def limiter_and_gate() -> tuple[FakeClock, RateLimiter, Gate]:
    clock = FakeClock(now_s=0.0)
    limiter = RateLimiter(clock=clock)
    return clock, limiter, limiter.gate()


def take_all(clock: FakeClock, gate: Gate, seconds: float = 1.0) -> list[Permit]:
    """Acquire each permit as soon as it is available, for some seconds, and return the permits."""
    permits = []
    for _ in range(round(seconds * 1000)):
        while (permit := gate.try_acquire()) is not None:
            permits.append(permit)
            assert len(permits) < 5000, "open"
        clock.advance(0.001)
    return permits


def accept_all(clock: FakeClock, gate: Gate, seconds: float = 1.0) -> int:
    """Send requests for some seconds, as fast as the limiter allows. The server accepts each at once."""
    accepted = 0
    for _ in range(round(seconds * 1000)):
        while (permit := gate.try_acquire()) is not None and permit.counted:
            gate.succeeded(permit)
            accepted += 1
        clock.advance(0.001)
    return accepted


def a_second(limiter: RateLimiter) -> float:
    """Return the rate of a limiter. Its repr has it in whole requests."""
    return limiter._rate.a_second


def refuse(gate: Gate, delay_s: float) -> None:
    gate.throttled(gate.acquire(), delay_s)


def throttled_once() -> tuple[FakeClock, RateLimiter, Gate]:
    """Return a clock, a limiter that has just reopened after a refusal, and its gate."""
    clock, limiter, gate = limiter_and_gate()
    refuse(gate, delay_s=1)
    clock.advance(1)
    return clock, limiter, gate


class Bucket:
    """A server that accepts `rate` requests a second, and `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst, self._tokens, self._at_s = rate, burst, burst, 0.0

    def refuses_for_s(self, now_s: float) -> float:
        """Return 0 if it accepts a request; else the seconds until it may accept one."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._tokens < 1:
            return (1 - self._tokens) / self._rate
        self._tokens -= 1
        return 0.0

    def end(self) -> None:
        """Note that a sample has ended."""


class Windows(Bucket):
    """A server that accepts `most` requests in each window of `length_s`."""

    def __init__(self, most: int, length_s: float) -> None:
        self._most, self._length_s, self._ends_s, self._taken = most, length_s, 0.0, 0

    def refuses_for_s(self, now_s: float) -> float:
        if now_s >= self._ends_s:
            self._ends_s, self._taken = now_s + self._length_s, 0
        self._taken += 1
        return 0.0 if self._taken <= self._most else self._ends_s - now_s


class Places(Bucket):
    """A server that works on `most` samples at a time."""

    def __init__(self, most: int) -> None:
        self._free = most

    def refuses_for_s(self, now_s: float) -> float:
        if not self._free:
            return 1.0
        self._free -= 1
        return 0.0

    def end(self) -> None:
        self._free += 1


class Chance(Bucket):
    """A server one of whose machines refuses all it gets, whatever the rate."""

    def __init__(self, share: float) -> None:
        self._share, self._draw = share, random.Random(1).random

    def refuses_for_s(self, now_s: float) -> float:
        return 1.0 if self._draw() < self._share else 0.0


def send_all(server: Bucket, count: int, work_s: float, *, named: bool) -> tuple[float, int]:
    """Send `count` samples, each until it is accepted; return the seconds until all have ended, and the
    refusals. An answer takes 4 ms. With `named`, refusals name the time to wait, in whole seconds.
    """
    clock, _, gate = limiter_and_gate()
    answers: list[tuple[float, int, Permit, float]] = []  # heaps: by the time
    ends: list[float] = []
    refused = sent = 0
    while count or answers or ends:
        while answers and answers[0][0] <= clock.now():
            _, _, permit, wait_s = heapq.heappop(answers)
            if wait_s:
                refused, count = refused + 1, count + 1
                gate.throttled(permit, float(math.ceil(wait_s)) if named else None)
            else:
                gate.succeeded(permit)
        while ends and ends[0] <= clock.now():
            heapq.heappop(ends)
            server.end()
        while count and len(answers) < gate.limiter.sent_at_once and (new := gate.try_acquire()) is not None:
            sent, count, wait_s = sent + 1, count - 1, server.refuses_for_s(clock.now())
            heapq.heappush(answers, (clock.now() + 0.004, sent, new, wait_s))
            if not wait_s:
                heapq.heappush(ends, clock.now() + work_s)
        clock.advance(0.002)
        assert clock.now() < 500
    return clock.now(), refused


class TestOpen:
    def test_every_call_passes_and_nothing_is_counted(self) -> None:
        _, limiter, gate = limiter_and_gate()
        permits = [gate.acquire() for _ in range(1000)]
        assert None not in permits
        assert repr(limiter) == "<RateLimiter open, inf a second>"


class TestClosed:
    def test_no_call_passes_until_the_time_is_over(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        refuse(gate, delay_s=5)
        assert limiter.state() == "closed"
        assert limiter.pause_left_s() == 5.0
        clock.advance(4.999)
        assert gate.try_acquire() is None
        clock.advance(0.001)
        assert limiter.state() == "reopening"
        assert limiter.pause_left_s() == 0.0
        assert gate.try_acquire() is not None

    def test_a_wait_may_run_out_before(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        limiter.close_for(5)
        assert gate.acquire(timeout=2) is None
        assert clock.waits == [2]
        assert gate.acquire(timeout=0) is None
        assert repr(limiter) == "<RateLimiter closed, 50 a second>"

    @pytest.mark.parametrize(("delays", "end_s"), [((5, 2), 5), ((2, 5), 5), ((5, 0), 5), ((5, -3), 5)])
    def test_the_later_end_counts(self, delays: tuple[float, float], end_s: float) -> None:
        _, limiter, gate = limiter_and_gate()
        permits = [gate.acquire(), gate.acquire()]
        for permit, delay_s in zip(permits, delays, strict=True):
            gate.throttled(permit, delay_s)
        assert limiter.pause_left_s() == end_s

    def test_recently(self) -> None:
        clock, limiter, _ = limiter_and_gate()
        limiter.close_for(5)
        assert limiter.recently_closed()
        clock.advance(14.9)
        assert limiter.recently_closed()
        clock.advance(0.2)
        assert not limiter.recently_closed()


class TestReports:
    """Reports that the account's queue is paused, which the server repeats with each poll."""

    def test_however_many_come_the_limiter_reopens(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        for _ in range(100):
            limiter.close_for(1.0, reported=True)
            clock.advance(0.05)
        assert limiter.state() == "reopening"
        assert gate.try_acquire() is not None

    def test_one_that_comes_after_a_success_counts_again(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        limiter.close_for(1.0, reported=True)
        clock.advance(1.0)
        gate.succeeded(gate.acquire())
        limiter.close_for(1.0, reported=True)
        assert limiter.pause_left_s() == 1.0

    def test_one_that_comes_after_the_rate_was_forgotten_counts_again(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        limiter.close_for(1.0, reported=True)
        clock.advance(62.0)
        for _ in range(3):  # uncounted, because nothing limits them any more
            gate.succeeded(gate.acquire())
        limiter.close_for(1.0, reported=True)
        assert limiter.pause_left_s() == 1.0

    def test_they_do_not_lower_the_rate(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        for _ in range(10):
            limiter.close_for(1.0, reported=True)
            clock.advance(1.0)
            gate.succeeded(gate.acquire())
        assert len(take_all(clock, gate)) >= FIRST_RATE


def test_clients_share_what_they_may_send_at_once() -> None:
    _, limiter, gate = limiter_and_gate()
    assert limiter.sent_at_once == 64
    others = [limiter.gate() for _ in range(3)]
    assert limiter.sent_at_once == 64 / 4
    for each in (gate, *others) * 10:
        each.succeeded(each.acquire())
    assert limiter.sent_at_once == (64 + 40) / 4
    crowd = [limiter.gate() for _ in range(96)]
    assert limiter.sent_at_once == 16  # one of them may be the only one that sends
    del crowd
    del others, each
    gate.succeeded(gate.acquire())
    assert limiter.sent_at_once == 64 + 41


def test_a_permit_from_before_a_refusal_lets_no_request_pass() -> None:
    clock, _, gate = limiter_and_gate()
    first, second = gate.acquire(), gate.acquire()
    assert first is not None
    assert second is not None
    assert gate.lets_pass(second)
    gate.throttled(first, delay_s=1)
    assert not gate.lets_pass(second)
    clock.advance(1)
    assert not gate.lets_pass(second)  # only a few new permits let requests pass
    third = gate.try_acquire()
    assert third is not None
    assert gate.lets_pass(third)


def test_nor_does_one_from_before_a_late_refusal() -> None:
    """A refusal of a request that was sent before an earlier refusal closes the limiter once more."""
    clock, limiter, gate = limiter_and_gate()
    late = gate.acquire()
    refuse(gate, delay_s=1)
    clock.advance(1)
    accept_all(clock, gate, 10)
    assert limiter.state() == "open"
    permit = gate.acquire()
    gate.throttled(late, delay_s=1)
    clock.advance(1)
    assert permit is not None
    assert not gate.lets_pass(permit)


def test_a_child_keeps_the_pause_and_the_rate_and_forgets_the_line() -> None:
    clock, limiter, gate = limiter_and_gate()
    refuse(gate, delay_s=5)
    limiter.renew_after_fork()
    assert repr(limiter) == "<RateLimiter closed, 50 a second>"
    clock.advance(5)
    assert len(take_all(clock, gate)) == pytest.approx(FIRST_RATE, abs=2)


class TestReopening:
    def test_at_a_rate_first(self) -> None:
        clock, _, gate = throttled_once()
        permits = take_all(clock, gate, 2.0)
        assert len(permits) == pytest.approx(2 * FIRST_RATE, abs=2)

    def test_idle_time_saves_up_no_burst(self) -> None:
        clock, _, gate = throttled_once()
        clock.advance(5)
        burst = 0
        while gate.try_acquire() is not None:
            burst += 1
        assert burst <= 2

    def test_several_times_as_fast_each_second_until_the_next_refusal(self) -> None:
        clock, _, gate = throttled_once()
        first, second = accept_all(clock, gate), accept_all(clock, gate)
        assert first > 1.5 * FIRST_RATE
        assert second > 3 * first

    def test_and_slowly_after_it(self) -> None:
        clock, limiter, gate = throttled_once()
        accept_all(clock, gate, 0.5)
        refuse(gate, delay_s=1)
        clock.advance(1)
        rates = [a_second(limiter)]
        for seconds in (7, 7, 7):
            accept_all(clock, gate, seconds)
            rates.append(a_second(limiter))
        assert rates[0] < rates[1] < 1.06 * rates[0]
        assert rates[1] < 1.1 * rates[1] < rates[2] < 1.2 * rates[2] < rates[3]  # faster and faster

    def test_a_rate_is_forgotten_after_a_minute_without_a_refusal(self) -> None:
        clock, limiter, gate = throttled_once()
        clock.advance(61)
        assert gate.try_acquire() is not None
        assert limiter.state() == "open"

    def test_the_next_refusal_lowers_the_rate(self) -> None:
        clock, limiter, gate = throttled_once()
        accept_all(clock, gate, 1.5)
        before = a_second(limiter)
        refuse(gate, delay_s=1)
        assert a_second(limiter) == pytest.approx(0.7 * before)
        refuse(gate, delay_s=1)
        assert a_second(limiter) == pytest.approx(0.63 * before)

    def test_one_takes_the_more_of_the_rate_the_sooner_it_follows_a_pause_that_the_server_named(self) -> None:
        clock, limiter, gate = throttled_once()
        accept_all(clock, gate, 0.5)
        refuse(gate, delay_s=1)
        kept = []
        for seconds in (0.1, 2.0, 10.0):
            clock.advance(1)
            accept_all(clock, gate, seconds)
            before = a_second(limiter)
            refuse(gate, delay_s=1)
            kept.append(a_second(limiter) / before)
        assert kept == pytest.approx([0.7, (2 / 3) ** (1 / 3), (10 / 11) ** (1 / 3)], abs=0.01)

    def test_one_request_asks_for_all_while_the_server_refuses_again_and_again(self) -> None:
        clock, _, gate = limiter_and_gate()
        for _ in range(2):
            gate.throttled(gate.acquire())
            clock.advance(1)
        asks = gate.try_acquire()
        assert asks is not None
        assert gate.try_acquire() is None
        assert take_all(clock, gate, 0.09) == []  # one that waits for its answer
        gate.succeeded(asks)
        assert len(take_all(clock, gate)) == pytest.approx(FIRST_RATE, abs=10)

    def test_another_asks_if_the_first_gets_no_answer(self) -> None:
        clock, _, gate = limiter_and_gate()
        for _ in range(2):
            gate.throttled(gate.acquire())
            clock.advance(1)
        assert len(take_all(clock, gate)) == pytest.approx(10, abs=1)

    def test_refusals_of_one_crowd_count_once(self) -> None:
        clock, limiter, gate = throttled_once()
        accept_all(clock, gate, 1.0)
        before, crowd = a_second(limiter), take_all(clock, gate, 0.5)
        for permit in crowd:
            gate.throttled(permit, delay_s=1)
        assert a_second(limiter) == pytest.approx(0.7 * before)

    def test_they_lengthen_a_pause_that_the_server_does_not_name(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        pauses_s = []
        for _ in range(10):
            gate.throttled(gate.acquire())
            pauses_s.append(limiter.pause_left_s())
            clock.advance(pauses_s[-1])
        assert pauses_s[0] == pytest.approx(2 / FIRST_RATE)
        assert pauses_s[1] > 1.5 * pauses_s[0]
        assert pauses_s[-2:] == pytest.approx([1.0] * 2)
        clock.advance(2)
        gate.succeeded(gate.acquire())
        clock.advance(2)
        gate.throttled(gate.acquire())
        assert limiter.pause_left_s() == pytest.approx(2 / a_second(limiter))

    def test_thousands_without_a_success_leave_a_rate(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        for _ in range(5000):
            gate.throttled(gate.acquire())
            clock.advance(1)
        gate.succeeded(gate.acquire())
        assert limiter.state() == "reopening"

    def test_successes_from_before_do_not_raise_the_rate(self) -> None:
        clock, limiter, gate = throttled_once()
        first, *rest = take_all(clock, gate)
        gate.throttled(first, delay_s=1)
        clock.advance(1.5)  # the rate grows from the end of the pause on
        for permit in rest:
            gate.succeeded(permit)
        assert a_second(limiter) == pytest.approx(0.9 * FIRST_RATE)

    def test_a_refusal_after_it_has_opened_starts_anew(self) -> None:
        clock, limiter, gate = throttled_once()
        accept_all(clock, gate, 10)
        refuse(gate, delay_s=1)
        assert "50 a second" in repr(limiter)


def test_a_long_pause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    _, _, gate = limiter_and_gate()
    permits = [gate.acquire() for _ in range(20)]
    for permit in permits:
        gate.throttled(permit, 45.0)
    assert [record.message for record in caplog.records] == [
        "samples pause for 45 s, because the server asks for it"
    ]


class TestClose:
    def test_of_a_gate_leaves_the_others_open(self) -> None:
        _, limiter, gate = limiter_and_gate()
        other = limiter.gate()
        gate.close(TinkerError("first"))
        gate.close(TinkerError("second"))
        for enter in (gate.acquire, gate.try_acquire):
            with pytest.raises(TinkerError, match="first"):
                enter()
        assert other.acquire() is not None


def test_an_interrupted_wait_takes_no_permit() -> None:
    class Interrupted(FakeClock):
        def wait(self, event: threading.Event, timeout_s: float) -> bool:
            raise KeyboardInterrupt

    clock = Interrupted()
    limiter = RateLimiter(clock=clock)
    gate = limiter.gate()
    limiter.close_for(1)
    with pytest.raises(KeyboardInterrupt):
        gate.acquire()
    clock.advance(1)
    assert gate.try_acquire() is not None


class TestShared:
    def test_one_for_each_server_and_key(self) -> None:
        one, two = key_fingerprint("tml-one"), key_fingerprint("tml-two")
        shared = shared_rate_limiter("https://host/api", one)
        assert shared_rate_limiter("https://host/api/", one) is shared
        assert shared_rate_limiter("https://host/api", two) is not shared
        assert shared_rate_limiter("https://other/api", one) is not shared
        assert RateLimiter() is not shared

    def test_goes_with_the_last_client(self) -> None:
        shared = shared_rate_limiter("https://host/api", key_fingerprint("tml-gone"))
        gone = weakref.ref(shared)
        gate: Any = shared.gate()
        del shared
        assert gone() is not None
        gc.disable()
        try:
            del gate
            assert gone() is None
        finally:
            gc.enable()

    def test_a_key_cannot_be_read_from_its_fingerprint(self) -> None:
        fingerprint = key_fingerprint("tml-planted-key")
        assert len(fingerprint) == 16
        assert "planted" not in fingerprint
        assert key_fingerprint("") != fingerprint


class TestSharing:
    """Tests of limiters that share their refusals between processes."""

    def test_one_refusal_of_many_requests_is_announced_once(self) -> None:
        _, limiter, gate = limiter_and_gate()
        announced: list[float] = []
        limiter.share(announced.append)
        permits = [gate.acquire() for _ in range(50)]
        for permit in permits:
            gate.throttled(permit, delay_s=5)
        assert announced == [5]

    def test_what_another_process_met_closes_this_one_and_is_not_announced_again(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        announced: list[float] = []
        limiter.share(announced.append)
        limiter.follow(5)
        clock.advance(4.9)
        assert gate.try_acquire() is None
        clock.advance(0.1)
        assert gate.try_acquire() is not None
        assert announced == []

    @pytest.mark.parametrize("processes", [1, 2, 5, 10, 50])
    def test_processes_share_the_first_rate(self, processes: int) -> None:
        for refused in ("here", "elsewhere"):
            clock, limiter, gate = limiter_and_gate()
            limiter.count_sharers(processes)
            if refused == "here":
                refuse(gate, delay_s=1)
            else:
                limiter.follow(1)
            clock.advance(1)
            assert len(take_all(clock, gate)) == pytest.approx(FIRST_RATE / processes, abs=2)

    def test_a_refusal_elsewhere_lowers_a_rate_that_grows(self) -> None:
        clock, limiter, gate = throttled_once()
        accept_all(clock, gate, 1.5)
        before = a_second(limiter)
        limiter.follow(1)
        assert a_second(limiter) == pytest.approx(0.7 * before)

    def test_refusals_of_one_storm_lower_the_rate_once(self) -> None:
        clock, limiter, gate = throttled_once()
        accept_all(clock, gate, 1.5)
        before = a_second(limiter)
        refuse(gate, delay_s=2)
        limiter.follow(2)
        limiter.follow(2)
        assert a_second(limiter) == pytest.approx(0.7 * before)


class TestLimits:
    """How near to the limit of a server the rate keeps, and how much it asks the server to refuse."""

    @pytest.mark.parametrize("named", [False, True])
    @pytest.mark.parametrize(
        ("limit", "count", "work_s", "ideal_s", "most_refused"),
        [
            (partial(Bucket, 50, 10), 1000, 0.1, 19.9, 0.3),
            (partial(Bucket, 50, 10), 1000, 5.0, 24.8, 0.3),
            (partial(Windows, 300, 10.0), 1300, 0.1, 40.1, 0.3),
            (partial(Windows, 300, 10.0), 1300, 5.0, 45.0, 0.3),
            (partial(Windows, 50, 1.0), 1000, 0.1, 19.1, 0.3),
            (partial(Places, 20), 2000, 0.1, 10.0, 0.3),
            (partial(Places, 20), 160, 5.0, 40.0, 0.6),
            (partial(Places, 100), 5000, 0.1, 5.0, 0.3),
            (partial(Places, 100), 800, 5.0, 40.0, 0.3),
        ],
    )
    def test_of_all_kinds(
        self,
        limit: Callable[[], Bucket],
        count: int,
        work_s: float,
        ideal_s: float,
        most_refused: float,
        named: bool,
    ) -> None:
        seconds, refused = send_all(limit(), count, work_s, named=named)
        # Each pause of a second costs a server that ends a thousand samples in a second a fifth of the ideal.
        assert seconds < (1.85 if named and ideal_s == 5.0 else 1.45) * ideal_s
        assert refused < most_refused * count

    @pytest.mark.parametrize(
        ("share", "named", "longest_s"),
        [(0.02, False, 4.0), (0.15, False, 12.0), (0.02, True, 40.0), (0.15, True, 130.0)],
    )
    def test_refusals_that_do_not_depend_on_the_rate_starve_nobody(
        self, share: float, named: bool, longest_s: float
    ) -> None:
        seconds, _ = send_all(Chance(share), 600, 0.05, named=named)
        assert seconds < longest_s
