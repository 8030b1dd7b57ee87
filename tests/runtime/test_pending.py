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


def test_nothing_to_wait_for(caplog: pytest.LogCaptureFixture) -> None:
    PendingChanges().wait(60.0)
    assert caplog.records == []


def test_the_last_call_ends_it(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    changes = PendingChanges()
    futures: list[APIFuture[Any]] = [APIFuture() for _ in range(3)]
    for future in futures:
        changes.add(future, "optim_step")
    waiting = threading.Thread(target=changes.wait, args=(60.0,))
    waiting.start()
    futures[0].resolve(None)
    futures[1].fail(KeyError("refused"))
    assert waiting.is_alive()
    futures[2].cancel()
    waiting.join(120)
    assert not waiting.is_alive()
    assert (caplog.records, capsys.readouterr().err) == ([], "")


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


def test_ended_calls_are_not_under_way() -> None:
    changes = PendingChanges()
    assert not changes.under_way()
    first, last = APIFuture[Any](), APIFuture[Any]()
    changes.add(first, "save_state")
    changes.add(last, "optim_step")
    assert changes.under_way()
    last.resolve(None)
    assert changes.under_way()
    first.resolve(None)
    assert not changes.under_way()


def test_ended_calls_that_were_left_behind_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = PendingChanges()
    waiting, ended = APIFuture[Any](), APIFuture[Any]()
    changes.add(waiting, "save_state")
    monkeypatch.setattr(APIFuture, "_when_done", lambda *_: None)  # as if Ctrl-C had come before it
    changes.add(ended, "optim_step")
    ended.resolve(None)
    assert changes.under_way()
    assert changes.describe() == "save_state"


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


def test_giving_up_ends_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    changes = PendingChanges()
    changes.add(APIFuture(), "delete_checkpoint")
    waiting = threading.Thread(target=changes.wait, args=(60.0,))
    waiting.start()
    changes.give_up()
    waiting.join(120)
    assert not waiting.is_alive()
    assert "delete_checkpoint" in caplog.messages[0]
    changes.wait(60.0)
    assert len(caplog.records) == 1


def test_the_end_of_a_call_wakes_the_wait() -> None:
    changes = PendingChanges()
    future: APIFuture[Any] = APIFuture()
    changes.add(future, "save_state")
    future.resolve(None)
    assert changes._news.wait(0.0)


def test_an_ended_call_whose_addition_was_interrupted_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = PendingChanges(Clock(0.0, 0.5, 60.0))
    future: APIFuture[Any] = APIFuture()
    changes._names[future] = "save_state"  # Ctrl-C came before the callback was added
    future.resolve(None)
    changes._news.set()
    changes.wait(60.0)
    assert caplog.records == []


def test_a_forked_child_waits_for_nothing_of_its_parent() -> None:
    changes = PendingChanges()
    changes.add(APIFuture(), "save_state")
    changes.give_up()
    changes.forget()
    assert not changes
    assert not changes._given_up
