from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
from support.clock import FakeClock
from support.limits import closed_s

from tinker_sync.errors import TinkerError
from tinker_sync.runtime.rate_limiter import (
    Gate,
    LimiterState,
    RateLimiter,
    key_fingerprint,
    shared_rate_limiter,
)
from tinker_sync.runtime.rate_window import (
    FIRST_WINDOW,
    OPEN_WINDOW,
    RECENT_S,
    Permit,
    RateWindow,
    default_delay_s,
)


def limiter_and_gate() -> tuple[FakeClock, RateLimiter, Gate]:
    clock = FakeClock(now_s=0.0)
    limiter = RateLimiter(clock=clock)
    return clock, limiter, limiter.gate()


def take_all(gate: Gate) -> list[Permit]:
    """Acquire all permits that are available now, and return them."""
    permits = []
    while (permit := gate.try_acquire()) is not None:
        permits.append(permit)
        assert len(permits) < 5000, "open"
    return permits


def refuse(gate: Gate, delay_s: float) -> None:
    gate.throttled(gate.acquire(), delay_s)


def throttled_once() -> tuple[FakeClock, RateLimiter, Gate]:
    """Return a clock, a limiter that has just reopened after a refusal, and its gate."""
    clock, limiter, gate = limiter_and_gate()
    refuse(gate, delay_s=5)
    clock.advance(5)
    return clock, limiter, gate


class TestOpen:
    def test_every_call_passes_and_nothing_is_counted(self) -> None:
        _, limiter, gate = limiter_and_gate()
        permits = [gate.acquire() for _ in range(1000)]
        assert None not in permits
        assert repr(limiter) == f"<RateLimiter open, window {OPEN_WINDOW}, 0 in flight, 0 in line>"

    def test_the_way_through_takes_no_lock(self) -> None:
        _, limiter, gate = limiter_and_gate()
        with limiter._lock:  # a call that takes the lock would hang
            permit = gate.acquire()
            gate.succeeded(permit)
            gate.failed(permit)
            assert limiter.state() is LimiterState.OPEN
            assert not limiter.recently_closed()

    def test_successes_and_failures_change_nothing(self) -> None:
        _, limiter, gate = limiter_and_gate()
        for end in (gate.succeeded, gate.failed):
            permit = gate.acquire()
            end(permit)
        assert repr(limiter) == f"<RateLimiter open, window {OPEN_WINDOW}, 0 in flight, 0 in line>"


class TestClosed:
    def test_no_call_passes_until_the_time_is_over(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        refuse(gate, delay_s=5)
        assert limiter.state() is LimiterState.CLOSED
        assert closed_s(limiter) == 5.0
        clock.advance(4.999)
        assert gate.try_acquire() is None
        clock.advance(0.001)
        assert limiter.state() is LimiterState.REOPENING
        assert closed_s(limiter) == 0.0
        assert gate.try_acquire() is not None

    def test_who_waits_is_let_in_when_it_is_over(self) -> None:
        clock, _, gate = limiter_and_gate()
        refuse(gate, delay_s=5)
        assert gate.acquire() is not None
        assert clock.waits == [5.0]

    def test_a_wait_may_run_out_before(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        limiter.close_for(5)
        assert gate.acquire(timeout=2) is None
        assert clock.waits == [2]
        assert gate.acquire(timeout=0) is None
        assert repr(limiter) == f"<RateLimiter closed, window {FIRST_WINDOW}, 0 in flight, 0 in line>"

    @pytest.mark.parametrize(("delays", "end_s"), [((5, 2), 5), ((2, 5), 5), ((5, 0), 5), ((5, -3), 5)])
    def test_the_later_end_counts(self, delays: tuple[float, float], end_s: float) -> None:
        _, limiter, gate = limiter_and_gate()
        permits = [gate.acquire(), gate.acquire()]
        for permit, delay_s in zip(permits, delays, strict=True):
            gate.throttled(permit, delay_s)
        assert closed_s(limiter) == end_s

    def test_a_pause_closes_like_a_refusal(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        limiter.close_for(3)
        assert gate.try_acquire() is None
        clock.advance(3)
        assert len(take_all(gate)) == FIRST_WINDOW

    def test_other_gates_hear_of_it(self) -> None:
        _, limiter, gate = limiter_and_gate()
        other = limiter.gate()
        refuse(gate, delay_s=5)
        assert other.try_acquire() is None

    def test_recently(self) -> None:
        clock, limiter, _ = limiter_and_gate()
        limiter.close_for(5)
        assert limiter.recently_closed()
        clock.advance(14.9)
        assert limiter.recently_closed()
        clock.advance(0.2)
        assert not limiter.recently_closed()


def refused_at_work(
    count: int, *, ended: int = 0, named: bool = True, passed_s: float = 1.0
) -> tuple[FakeClock, RateLimiter, Gate]:
    """Return a clock, a limiter and its gate some time after a refusal.

    The server refused while it worked on `count` requests, and still works on them.

    Args:
        count: the number of requests that the server works on.
        ended: the number of requests whose work has ended before the refusal.
        named: whether the server has named the length of the pause, one second.
        passed_s: the time since the refusal.
    """
    clock, limiter, gate = limiter_and_gate()
    for number in range(ended):
        gate.begin_work(("ended", number))
    if ended:
        gate.begin_work(0)
    for number in range(ended):
        gate.end_work(("ended", number))
    permits = [gate.acquire() for _ in range(count + 1)]
    for number, permit in enumerate(permits):
        if number < count:
            gate.begin_work(number)
            gate.succeeded(permit)
        else:
            gate.throttled(permit, delay_s=1, named=named)
    clock.advance(passed_s)
    return clock, limiter, gate


def accept_all(gate: Gate, name: str) -> int:
    """Let requests pass until the limiter admits none. The server accepts all. Return their number."""
    accepted = 0
    while permits := take_all(gate):
        for permit in permits:
            gate.begin_work((name, accepted))
            gate.succeeded(permit)
            accepted += 1
    return accepted


class TestWork:
    def test_the_server_gets_no_more_work_than_it_held_when_it_refused(self) -> None:
        _, limiter, gate = refused_at_work(64)
        assert accept_all(gate, "more") == 0
        for number in range(20):
            gate.end_work(number)
        assert accept_all(gate, "next") == 20
        assert limiter.state() is LimiterState.REOPENING

    def test_some_room_stays_free_if_the_server_may_have_ended_work_before_it_refused(self) -> None:
        _, limiter, gate = refused_at_work(64, ended=3)
        assert accept_all(gate, "more") == 0
        for number in range(20):
            gate.end_work(number)
        assert accept_all(gate, "next") == 18  # one in 32 of the 64 places stays free
        assert limiter.state() is LimiterState.REOPENING

    def test_no_room_stays_free_for_work_that_ended_before_this_work_began(self) -> None:
        clock, _, gate = limiter_and_gate()
        gate.begin_work("earlier")
        gate.end_work("earlier")
        for number in range(64):
            gate.begin_work(number)
        refuse(gate, delay_s=1)
        clock.advance(1)
        for number in range(20):
            gate.end_work(number)
        assert accept_all(gate, "next") == 20

    def test_requests_accepted_after_the_first_refusal_count_until_work_ends(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        permits = [gate.acquire() for _ in range(70)]
        gate.throttled(permits[0], delay_s=1)
        for number in range(64):
            gate.begin_work(number)
        gate.end_work(0)
        gate.begin_work(64)  # the server may have accepted it in the place of the first one
        clock.advance(1)
        assert limiter.state() is LimiterState.REOPENING
        assert accept_all(gate, "more") == 0
        for number in range(1, 65):
            gate.end_work(number)
        assert accept_all(gate, "next") == 64

    def test_a_server_with_little_work_has_another_reason(self) -> None:
        _, limiter, gate = refused_at_work(FIRST_WINDOW - 1)
        permits = take_all(gate)
        for number, permit in enumerate(permits):
            gate.begin_work(("more", number))
            gate.succeeded(permit)
        assert len(take_all(gate)) == 2 * FIRST_WINDOW
        assert limiter.state() is LimiterState.REOPENING

    def test_the_bound_ends_after_a_while_and_a_few_go_first(self) -> None:
        clock, limiter, gate = refused_at_work(64)
        assert gate.acquire(timeout=RECENT_S + 1) is not None  # the first in line watches the time
        assert sum(clock.waits) == pytest.approx(RECENT_S)
        assert len(take_all(gate)) == FIRST_WINDOW - 1
        assert limiter.state() is LimiterState.REOPENING

    def test_the_end_of_work_lets_the_next_one_in(self) -> None:
        _, _, gate = refused_at_work(64)
        gate.end_work(0)
        gate.end_work(1)
        permits: list[Permit | None] = []
        waiting = threading.Thread(target=lambda: permits.append(gate.acquire(timeout=120)))
        waiting.start()
        gate.end_work(2)
        waiting.join(120)
        assert len(permits) == 1
        assert permits[0] is not None

    @pytest.mark.parametrize(("named", "early"), [(False, True), (True, False)])
    def test_a_pause_without_a_stated_time_ends_with_half_of_the_work(self, named: bool, early: bool) -> None:
        _, limiter, gate = refused_at_work(64, named=named, passed_s=0.5)
        for number in range(31):
            gate.end_work(number)
        assert limiter.state() is LimiterState.CLOSED
        assert take_all(gate) == []
        gate.end_work(31)
        assert (limiter.state() is LimiterState.REOPENING) is early
        assert len(take_all(gate)) == (FIRST_WINDOW if early else 0)

    def test_the_next_pause_is_whole_if_the_server_refuses_the_few(self) -> None:
        clock, limiter, gate = refused_at_work(64, named=False, passed_s=0.5)
        for number in range(32):
            gate.end_work(number)
        few = take_all(gate)
        for permit in few[1:]:
            gate.failed(permit)
        gate.throttled(few[0], delay_s=1, named=False)
        for number in range(32, 64):
            gate.end_work(number)
        assert limiter.state() is LimiterState.CLOSED
        assert closed_s(limiter) == 1.0
        clock.advance(1)
        assert len(take_all(gate)) == FIRST_WINDOW // 2

    def test_a_pause_that_processes_share_is_whole(self) -> None:
        clock = FakeClock(now_s=0.0)
        limiter = RateLimiter(clock=clock)
        gate, heard = limiter.gate(), []
        limiter.share(heard.append)
        permits = [gate.acquire() for _ in range(65)]
        for number, permit in enumerate(permits[1:]):
            gate.begin_work(number)
            gate.succeeded(permit)
        gate.throttled(permits[0], delay_s=1, named=False)
        for number in range(64):
            gate.end_work(number)
        assert heard == [1]
        assert closed_s(limiter) == 1.0

    @pytest.mark.parametrize("pause", ["close_for", "follow"])
    def test_a_pause_of_the_queue_or_of_another_process_is_whole(self, pause: str) -> None:
        _, limiter, gate = refused_at_work(64, named=False, passed_s=0.5)
        getattr(limiter, pause)(2)
        for number in range(64):
            gate.end_work(number)
        assert closed_s(limiter) == 2.0

    def test_a_late_refusal_does_not_lower_the_bound(self) -> None:
        clock, _, gate = limiter_and_gate()
        permits = [gate.acquire() for _ in range(66)]
        for number, permit in enumerate(permits[2:]):
            gate.begin_work(number)
            gate.succeeded(permit)
        first, last = permits[:2]
        assert first is not None
        gate.throttled(first, delay_s=1, named=False)
        for number in range(40):
            gate.end_work(number)
        gate.throttled(last, delay_s=1, named=False)
        assert take_all(gate) == []
        clock.advance(1)
        assert accept_all(gate, "next") == 40

    def test_the_limiter_is_closed_when_the_work_is_counted(self) -> None:
        """Otherwise work that begins just after the count would not be bounded."""
        _, limiter, gate = limiter_and_gate()
        free: list[Permit | None] = []

        class Watched(RateWindow):
            def bound_work(self) -> None:
                free.append(limiter._free)

        limiter._window = Watched(limiter._clock, pace=1.0)
        for close in (limiter.close_for, limiter.follow, partial(gate.throttled, Permit(0, counted=False))):
            limiter._free = Permit(0, counted=False)
            close(1.0)
        assert free == [None] * 3

    def test_work_takes_no_lock_while_open(self) -> None:
        _, limiter, gate = limiter_and_gate()
        with limiter._lock:  # a call that takes the lock would hang
            gate.begin_work(1)
            gate.end_work(1)


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
    few = take_all(gate)
    assert all(map(gate.lets_pass, few))


def test_nor_does_one_that_was_counted_before_a_later_refusal() -> None:
    clock, _, gate = throttled_once()
    first, second = gate.acquire(), gate.acquire()
    assert first is not None
    assert second is not None
    gate.throttled(first, delay_s=1)
    clock.advance(1)
    assert not gate.lets_pass(second)


def test_nor_does_one_from_before_a_late_refusal() -> None:
    """A refusal of a request that was sent before an earlier refusal closes the limiter once more."""
    clock, limiter, gate = limiter_and_gate()
    late = gate.acquire()
    refuse(gate, delay_s=1)
    clock.advance(1)
    for _ in range(OPEN_WINDOW):
        gate.succeeded(gate.acquire())
    assert limiter.state() is LimiterState.OPEN
    permit = gate.acquire()
    gate.throttled(late, delay_s=1)
    clock.advance(1)
    assert permit is not None
    assert not gate.lets_pass(permit)


def test_a_child_keeps_the_pause_and_the_window_and_forgets_the_requests() -> None:
    _, limiter, gate = refused_at_work(64)
    gate.end_work(0)
    assert len(take_all(gate)) == 1
    limiter.renew_after_fork()
    assert repr(limiter) == "<RateLimiter reopening, window 10, 0 in flight, 0 in line>"
    assert limiter.recently_closed()
    assert len(take_all(gate)) == FIRST_WINDOW


class TestReopening:
    def test_a_few_first(self) -> None:
        _, _, gate = throttled_once()
        assert len(take_all(gate)) == FIRST_WINDOW

    def test_one_more_with_each_success(self) -> None:
        _, _, gate = throttled_once()
        for window in (10, 20, 40, 80, 160, 320):
            permits = take_all(gate)
            assert len(permits) == window
            for permit in permits:
                gate.succeeded(permit)

    def test_none_more_with_a_failure(self) -> None:
        _, _, gate = throttled_once()
        for _ in range(3):
            permits = take_all(gate)
            assert len(permits) == FIRST_WINDOW
            for permit in permits:
                gate.failed(permit)

    def test_the_next_refusal_halves_it(self) -> None:
        clock, _, gate = throttled_once()
        for window in (10, 5, 2, 1, 1):
            permits = take_all(gate)
            assert len(permits) == window
            for permit in permits[1:]:
                gate.failed(permit)
            gate.throttled(permits[0], delay_s=1)
            clock.advance(1)

    def test_refusals_of_one_crowd_count_once(self) -> None:
        clock, _, gate = throttled_once()
        for permit in take_all(gate):
            gate.throttled(permit, delay_s=1)
        clock.advance(1)
        assert len(take_all(gate)) == FIRST_WINDOW // 2

    def test_stragglers_from_before_do_not_halve_it(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        permits = [gate.acquire() for _ in range(300)]
        for permit in permits[:-1]:
            gate.throttled(permit, delay_s=1)
        clock.advance(1)
        few = take_all(gate)
        assert len(few) == FIRST_WINDOW
        gate.throttled(permits[-1], delay_s=2)  # a late refusal, whose delay counts anyway
        assert closed_s(limiter) == 2
        for permit in few:
            gate.failed(permit)
        clock.advance(2)
        assert len(take_all(gate)) == FIRST_WINDOW

    def test_stragglers_from_before_a_pause_neither(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        straggler = gate.acquire()
        assert straggler is not None
        limiter.close_for(1)
        clock.advance(1)
        for permit in take_all(gate):
            gate.succeeded(permit)
        gate.throttled(straggler, delay_s=1)
        clock.advance(1)
        assert len(take_all(gate)) == 2 * FIRST_WINDOW

    def test_successes_from_before_do_not_widen_it(self) -> None:
        clock, limiter, gate = throttled_once()
        first, *rest = take_all(gate)
        gate.throttled(first, delay_s=1)
        for permit in rest:
            gate.succeeded(permit)
        clock.advance(1)
        assert repr(limiter) == "<RateLimiter reopening, window 5, 0 in flight, 0 in line>"

    def test_those_still_under_way_take_their_places(self) -> None:
        clock, _, gate = throttled_once()
        few = take_all(gate)
        gate.throttled(few[0], delay_s=1)
        clock.advance(1)
        assert take_all(gate) == []  # 9 under way, 5 allowed
        for permit in few[1:7]:
            gate.failed(permit)
        assert len(take_all(gate)) == 2

    def test_a_pause_narrows_it_to_a_few(self) -> None:
        clock, limiter, gate = throttled_once()
        for _ in range(2):
            for permit in take_all(gate):
                gate.succeeded(permit)
        limiter.close_for(1)
        clock.advance(1)
        assert len(take_all(gate)) == FIRST_WINDOW

    def test_opens_when_the_window_limits_nothing_any_more(self) -> None:
        _, limiter, gate = throttled_once()
        for _ in range(OPEN_WINDOW - FIRST_WINDOW):
            assert limiter.state() is LimiterState.REOPENING
            permit = gate.try_acquire()
            gate.succeeded(permit)
        assert limiter.state() is LimiterState.OPEN
        assert repr(limiter) == f"<RateLimiter open, window {OPEN_WINDOW}, 0 in flight, 0 in line>"

    def test_a_refusal_after_that_starts_anew(self) -> None:
        clock, _, gate = throttled_once()
        for _ in range(OPEN_WINDOW - FIRST_WINDOW):
            permit = gate.try_acquire()
            gate.succeeded(permit)
        permit = gate.try_acquire()
        gate.throttled(permit, delay_s=1)
        clock.advance(1)
        assert len(take_all(gate)) == FIRST_WINDOW


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

    def test_permits_may_still_be_given_back(self) -> None:
        _, limiter, gate = throttled_once()
        first, *rest = take_all(gate)
        gate.close(TinkerError("closed"))
        gate.succeeded(first)
        for permit in rest:
            gate.failed(permit)
        assert repr(limiter) == "<RateLimiter reopening, window 11, 0 in flight, 0 in line>"


class TestInterruptedWait:
    @pytest.mark.parametrize("granted", [False, True])
    def test_holds_no_place(self, granted: bool) -> None:
        few: list[Permit] = []
        gate: Gate

        class Interrupted(FakeClock):
            def wait(self, event: threading.Event, timeout_s: float) -> bool:
                if granted:
                    gate.failed(few[0])
                raise KeyboardInterrupt

        clock = Interrupted()
        limiter = RateLimiter(clock=clock)
        gate = limiter.gate()
        limiter.close_for(1)
        clock.advance(1)
        few += take_all(gate)
        with pytest.raises(KeyboardInterrupt):
            gate.acquire()
        in_flight = FIRST_WINDOW - granted
        assert repr(limiter) == f"<RateLimiter reopening, window 10, {in_flight} in flight, 0 in line>"


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

    def test_delays(self) -> None:
        assert [default_delay_s(size) for size in (0, 128 * 1024, 128 * 1024 + 1)] == [1.0, 1.0, 5.0]


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

    def test_an_announcement_holds_no_lock(self) -> None:
        _, limiter, gate = limiter_and_gate()
        seen: list[str] = []
        limiter.share(lambda _: seen.append(repr(limiter)))  # would hang
        refuse(gate, delay_s=5)
        limiter.close_for(5)
        assert seen == [f"<RateLimiter closed, window {FIRST_WINDOW}, 0 in flight, 0 in line>"] * 2

    def test_what_another_process_met_closes_this_one_and_is_not_announced_again(self) -> None:
        clock, limiter, gate = limiter_and_gate()
        announced: list[float] = []
        limiter.share(announced.append)
        limiter.follow(5)
        clock.advance(4.9)
        assert gate.try_acquire() is None
        clock.advance(0.1)
        assert len(take_all(gate)) == FIRST_WINDOW
        assert announced == []

    @pytest.mark.parametrize(("processes", "window"), [(1, 10), (2, 5), (3, 3), (10, 1), (100, 1)])
    def test_processes_share_the_first_window(self, processes: int, window: int) -> None:
        for refuse in ("here", "elsewhere"):
            clock, limiter, gate = limiter_and_gate()
            limiter.count_sharers(processes)
            permit = gate.acquire()
            assert permit is not None
            if refuse == "here":
                gate.throttled(permit, delay_s=1)
            else:
                limiter.follow(1)
            clock.advance(1)
            assert len(take_all(gate)) == window

    def test_refusals_of_one_storm_halve_the_window_once(self) -> None:
        clock, limiter, gate = throttled_once()
        permits = take_all(gate)
        gate.throttled(permits[0], delay_s=2)
        limiter.follow(2)
        limiter.follow(2)
        for permit in permits[1:]:
            gate.failed(permit)
        clock.advance(2)
        assert len(take_all(gate)) == FIRST_WINDOW // 2

    def test_a_refusal_elsewhere_halves_a_window_that_is_opening(self) -> None:
        clock, limiter, gate = throttled_once()
        for permit in take_all(gate):
            gate.succeeded(permit)
        limiter.follow(1)
        clock.advance(1)
        assert len(take_all(gate)) == FIRST_WINDOW
