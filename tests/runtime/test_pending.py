"""The wait for pending calls that change something, without a client and on a fake clock."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import named
from tinker_sync.runtime.pending import PendingChanges


class Clock:
    """A clock that returns the given times, one at each call, and then the last one again and again."""

    def __init__(self, *moments: float) -> None:
        self._moments = list(moments)

    def __call__(self) -> float:
        return self._moments.pop(0) if len(self._moments) > 1 else self._moments[0]


def test_a_line_after_two_seconds_and_one_warning_at_the_limit(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = PendingChanges(Clock(0.0, 2.5, 60.0))
    futures: list[APIFuture[Any]] = [APIFuture() for _ in range(3)]
    with named("TrainingClient.save_state"):
        changes.add(futures[0])
    for future in futures[1:]:
        changes.add(future, "optim_step")
    futures[0]._when_done(lambda _: None)
    waiting = threading.Thread(target=changes.wait, args=(60.0,))
    with caplog.at_level(logging.WARNING):
        waiting.start()
        changes._news.set()
        while waiting.is_alive():
            changes._news.set()
    assert "waiting for save_state, 2 optim_step, 60 s at most" in capsys.readouterr().err
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].endswith("may be lost: save_state, 2 optim_step")


def test_calls_may_end_while_another_thread_looks() -> None:
    changes = PendingChanges()
    keep = APIFuture[Any]()
    changes.add(keep, "save_state")
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            future = APIFuture[Any]()
            changes.add(future, "optim_step")
            future.resolve(None)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert all(changes.under_way() for _ in range(5000))
    finally:
        stop.set()
        thread.join(120)
    keep.resolve(None)
    assert not changes.under_way()
