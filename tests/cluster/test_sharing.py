"""Shared limits without a cluster: the board, groups that reopen after a refusal, and a lost board."""

from __future__ import annotations

import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.clock import FakeClock

pytest.importorskip("ray", reason="no Ray: pip install 'tinker-sync[ray]'")

from ray.exceptions import RayActorError

from tinker_sync import ray as sharing
from tinker_sync.errors import TinkerError
from tinker_sync.insight.meter import TokenCounts
from tinker_sync.ray import Board, News
from tinker_sync.runtime.rate_limiter import RateLimiter


def test_many_processes_begin_again_in_turns() -> None:
    opens_in_s = []
    for rank in (0, 9, 10, 25):
        limiter = RateLimiter(clock=FakeClock())
        member = sharing.SharedLimits("server", limiter)
        member.apply(News(version=1, delay_s=5.0, processes=30, rank=rank))
        opens_in_s.append(limiter.pause_left_s())
        assert "1.67 a second>" in repr(limiter)
    assert opens_in_s == [5.0, 5.0, 6.0, 7.0]


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


PATIENCE_S = 120.0


def test_a_process_that_leaves_while_it_waits_is_gone() -> None:
    board = Board()
    joined = board.follow("server", "a", version=0, hold_s=0)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(board.follow, "server", "a", joined.version, PATIENCE_S)
        board.leave("server", "a")
        assert waiting.result(PATIENCE_S).version >= joined.version
    assert board.follow("server", "b", version=0, hold_s=0).processes == 1


def test_a_refusal_ends_the_wait_of_the_others() -> None:
    board = Board()
    versions = [board.follow("server", process, version=0, hold_s=0).version for process in ("a", "b")]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(board.follow, "server", "a", versions[-1], PATIENCE_S)
        board.announce("server", "b", 30.0)
        news = waiting.result(PATIENCE_S)
    assert news.delay_s > 0
    assert board.follow("server", "b", version=0, hold_s=0).delay_s == 0


def test_a_shorter_refusal_does_not_release_its_process_from_the_longer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    board = Board()
    delays_s = []
    for process, delay_s in (("a", 60.0), ("b", 1.0), ("c", 90.0)):
        board.announce("server", process, delay_s)
        delays_s.append([board.follow("server", each, version=0, hold_s=0).delay_s for each in "abc"])
    assert delays_s == [[0.0, 60.0, 60.0], [0.0, 60.0, 60.0], [90.0, 90.0, 0.0]]


def test_a_process_that_died_is_no_longer_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    for process in ("a", "b"):
        board.follow("server", process, version=0, hold_s=0)
    assert board.follow("server", "b", version=0, hold_s=0).processes == 2
    later_s = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert board.follow("server", "b", version=0, hold_s=0).processes == 1
