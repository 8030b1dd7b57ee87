from __future__ import annotations

import math
import random
import threading
from functools import partial
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.crowd import aside, let_others_run, together, until

from tinker_sync.errors import TinkerError
from tinker_sync.runtime import rate_limiter
from tinker_sync.runtime.rate_limiter import (
    FIRST_RATE,
    Gate,
    Permit,
    RateLimiter,
    SendRate,
    key_fingerprint,
    shared_rate_limiter,
)


def closed_limiter(delay_s: float = 5) -> tuple[FakeClock, RateLimiter, Gate]:
    clock = FakeClock(now_s=0.0, automatic=False)
    limiter = RateLimiter(clock=clock)
    limiter.close_for(delay_s)
    return clock, limiter, limiter.gate()


class Crowd:
    """Threads that each acquire a permit. `permits` has the permits so far."""

    def __init__(self, size: int, gate: Gate) -> None:
        self._lock = threading.Lock()
        self.permits: list[object] = []
        self._threads = [threading.Thread(target=self._enter, args=(gate,), daemon=True) for _ in range(size)]

    def start(self, clock: FakeClock) -> None:
        """Start the threads one after the other."""
        for number, thread in enumerate(self._threads):
            thread.start()
            clock.await_waiters(number + 1)

    def _enter(self, gate: Gate) -> None:
        permit = gate.acquire()
        with self._lock:
            self.permits.append(permit)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_64_threads_get_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(RateLimiter):
        """A limiter whose constructor lets other threads run, so that they find no limiter yet."""

        def __init__(self, **options: Any) -> None:
            let_others_run()
            super().__init__(**options)

    monkeypatch.setattr(rate_limiter, "RateLimiter", Slow)
    for number in range(20):
        fingerprint = key_fingerprint(f"tml-{number}")
        limiters = together(*[lambda f=fingerprint: shared_rate_limiter("https://host", f)] * 64)
        assert len({id(limiter) for limiter in limiters}) == 1


CROWD = 12


def test_a_closed_gate_holds_its_waiters_and_an_open_one_lets_them_go_one_by_one() -> None:
    clock, limiter, gate = closed_limiter(5)
    crowd = Crowd(CROWD, gate)
    crowd.start(clock)
    clock.advance(4.9)
    assert crowd.permits == []
    clock.advance(0.1)
    for count in range(1, CROWD + 1):
        until(lambda count=count: len(crowd.permits) == count)
        clock.await_waiters(CROWD - count)
        assert len(crowd.permits) == count
        clock.advance(1.01 / FIRST_RATE)
    crowd.join()
    assert limiter.state() == "reopening"


def test_a_close_wakes_those_of_its_gate_only() -> None:
    clock, limiter, gate = closed_limiter(5)
    other = limiter.gate()

    def enter() -> str:
        with pytest.raises(TinkerError) as caught:
            gate.acquire()
        return str(caught.value)

    with aside(*[enter] * 5) as heard:
        clock.await_waiters(5)
        crowd = Crowd(1, other)
        crowd._threads[0].start()
        clock.await_waiters(6)
        gate.close(TinkerError("closed"))
        clock.await_waiters(1)
    assert heard == ["closed"] * 5
    assert crowd.permits == []
    clock.advance(5)
    crowd.join()
    assert len(crowd.permits) == 1


class PassingClock(FakeClock):
    """A clock on which a wait with a timeout ends at once. A wait without a timeout takes real time."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if timeout_s < math.inf:
            return super().wait(event, timeout_s)
        assert event.wait(PATIENCE_S), "nobody let this one in"
        return True


class WatchedRate(SendRate):
    """A rate that records at each permit the time since the end of the pause."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.since_closed_s: list[float] = []  # guarded by the lock of the limiter

    def count(self) -> Permit:
        self.since_closed_s.append(self._clock.now() - self.closed_until_s)
        return super().count()


def test_a_crowd_passes_and_nobody_during_a_pause() -> None:
    """32 threads send to a server that refuses one in three requests."""
    clock = PassingClock()
    limiter = RateLimiter(clock=clock)
    limiter._rate = rate = WatchedRate(clock)
    gate = limiter.gate()

    def send(draw: random.Random) -> bool:
        permit = gate.acquire()
        assert permit is not None
        let_others_run()
        if draw.random() < 1 / 3:
            gate.throttled(permit, delay_s=draw.random())
            return False
        gate.succeeded(permit)
        return True

    def work(seed: int) -> int:
        draw = random.Random(seed)
        sent = 0
        while sent < 20:
            sent += send(draw)
        return sent

    # An open limiter does not count its permits, so close it once.
    limiter.close_for(1)
    assert together(*[partial(work, seed) for seed in range(32)], patience_s=60) == [20] * 32
    assert min(rate.since_closed_s) >= 0
