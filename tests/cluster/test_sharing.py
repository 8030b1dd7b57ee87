"""`SharedLimits` without a cluster: groups that reopen after a refusal, and a lost board."""

from __future__ import annotations

import types
from typing import Any

import pytest
from support.clock import FakeClock
from support.limits import closed_s

pytest.importorskip("ray", reason="no Ray: pip install 'tinker-sync[ray]'")

from ray.exceptions import RayActorError

from tinker_sync import ray as sharing
from tinker_sync.errors import TinkerError
from tinker_sync.insight.meter import TokenCounts
from tinker_sync.ray import News
from tinker_sync.runtime.rate_limiter import RateLimiter


def test_many_processes_begin_again_in_turns() -> None:
    opens_in_s = []
    for rank in (0, 9, 10, 25):
        limiter = RateLimiter(clock=FakeClock())
        member = sharing.SharedLimits("server", limiter)
        member.apply(News(version=1, delay_s=5.0, processes=30, rank=rank))
        opens_in_s.append(closed_s(limiter))
        assert "1.67 a second>" in repr(limiter)
    assert opens_in_s == [5.0, 5.0, 6.0, 7.0]


def test_without_a_board_a_process_has_the_whole_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = RateLimiter(clock=FakeClock())
    limiter.count_sharers(5)
    seen: list[str] = []

    def connect() -> Any:
        """Fail as if the actor that shares refusals were gone; record the limiter's state at that moment."""
        limiter.follow(5.0)
        seen.append(repr(limiter))
        member.stop()
        raise ConnectionError("there is no board")

    def get(*_: object, timeout: float) -> Any:
        raise ConnectionError(f"no answer in {timeout} s")

    monkeypatch.setattr(sharing, "ray", types.SimpleNamespace(get=get, is_initialized=lambda: True))
    monkeypatch.setattr(sharing, "_RETRY_S", 0.0)
    member = sharing.SharedLimits("server", limiter, connect=connect)
    member._board = types.SimpleNamespace(follow=types.SimpleNamespace(remote=lambda *_: None))
    member._follow()
    assert len(seen) == 1
    assert "50 a second>" in seen[0]


def test_a_process_that_is_refused_before_it_knows_of_the_others_begins_with_its_part() -> None:
    limiter = RateLimiter(clock=FakeClock())
    gate = limiter.gate()
    permit = gate.try_acquire()
    assert permit is not None
    gate.throttled(permit, 5.0)
    assert "50 a second>" in repr(limiter)
    sharing.SharedLimits("server", limiter).apply(News(version=2, delay_s=0.0, processes=5, rank=1))
    assert "10 a second>" in repr(limiter)


@pytest.mark.parametrize("losses", [1, 9])
def test_the_usage_is_asked_again_when_the_board_was_lost(
    losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [RayActorError() for _ in range(losses)]

    def get(group: str) -> Any:
        if lost:
            raise lost.pop()
        return {group: TokenCounts(sampled=2)}

    monkeypatch.setattr(sharing, "ray", types.SimpleNamespace(get=get))
    monkeypatch.setattr(sharing, "_RETRY_S", 0.0)
    board = types.SimpleNamespace(usage=types.SimpleNamespace(remote=lambda group: group))
    member = sharing.SharedLimits("server", RateLimiter(clock=FakeClock()), connect=lambda: board)
    if losses == 1:
        assert member.usage() == {"server": TokenCounts(sampled=2)}
    else:
        with pytest.raises(TinkerError, match="cannot be reached"):
            member.usage()
