"""The board of a cluster, used in this process: processes join, learn of refusals, and leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="no Ray: pip install 'tinker-sync[ray]'")

from tinker_sync import ray as sharing
from tinker_sync.ray import Board
from tinker_sync.runtime.rate_limiter import RateLimiter

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
    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=lambda: 100.0))
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
    monkeypatch.setattr(sharing, "_FORGET_S", 0.0)
    assert board.follow("server", "b", version=0, hold_s=0).processes == 1


def test_a_process_that_leaves_has_the_whole_rate_again() -> None:
    limiter = RateLimiter()
    limits = sharing.SharedLimits("server", limiter)
    limits.apply(sharing.News(version=1, delay_s=0.0, processes=5, rank=0))
    limits.stop()
    limiter.follow(2.0)
    assert repr(limiter) == "<RateLimiter closed, 50 a second>"
