"""Queue states: the observers that get them, and the frequency of log lines."""

from __future__ import annotations

import logging
import threading

import pytest
from support.clock import FakeClock

from tinker_sync.runtime.notices import LOG_EVERY_S, Notices, QueueReport
from tinker_sync.runtime.retrieval import QueueNotice
from tinker_sync.types import QueueState

PAUSED = QueueNotice(QueueState.PAUSED_CAPACITY, None)


def test_every_listener_gets_every_notice() -> None:
    notices, heard = Notices(FakeClock()), [[], []]  # type: ignore[var-annotated]
    stop = notices.listen(heard[0].append)
    notices.listen(heard[1].append)
    notices.publish(PAUSED, "Sample", "req-1")
    notices.publish(QueueNotice(QueueState.ACTIVE, "soon"), "Sample", "req-1")
    stop()
    stop()
    notices.publish(PAUSED, "Sample", "req-2")
    first = [
        QueueReport(QueueState.PAUSED_CAPACITY, None, "Sample", "req-1"),
        QueueReport(QueueState.ACTIVE, "soon", "Sample", "req-1"),
    ]
    assert heard == [first, [*first, QueueReport(QueueState.PAUSED_CAPACITY, None, "Sample", "req-2")]]


def test_an_exception_of_a_listener_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    notices, heard = Notices(FakeClock()), []  # type: ignore[var-annotated]
    notices.listen(lambda _: 1 / 0)
    notices.listen(heard.append)
    notices.publish(PAUSED, "Sample", "req-1")
    assert len(heard) == 1
    assert "an observer of queue states failed" in caplog.text


def test_listeners_are_called_without_the_lock() -> None:
    notices, heard = Notices(FakeClock()), []  # type: ignore[var-annotated]
    notices.listen(lambda _: notices.listen(heard.append))  # would hang
    for request_id in ("req-1", "req-2"):
        notices.publish(PAUSED, "Sample", request_id)
    assert [report.request_id for report in heard] == ["req-2"]


def test_one_line_a_minute_for_each_kind_and_state(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    notices = Notices(clock)
    with caplog.at_level(logging.WARNING, "tinker_sync.queue"):
        for number in range(100):
            notices.publish(PAUSED, "Sample", f"req-{number}")
        assert len(caplog.messages) == 1
        notices.publish(QueueNotice(QueueState.PAUSED_RATE_LIMIT, "ten at a time"), "Sample", "req-1")
        notices.publish(PAUSED, "OptimStep", "req-2")
        assert len(caplog.messages) == 3
        clock.advance(LOG_EVERY_S - 1)
        notices.publish(PAUSED, "Sample", "req-1")
        assert len(caplog.messages) == 3
        clock.advance(1)
        notices.publish(PAUSED, "Sample", "req-1")
    short = "the service is short of capacity at the moment"
    assert caplog.messages == [
        f"Sample requests are paused (paused_capacity): {short}; waiting",
        "Sample requests are paused (paused_rate_limit): ten at a time; waiting",
        f"OptimStep requests are paused (paused_capacity): {short}; waiting",
        f"Sample requests are paused (paused_capacity): {short}; waiting",
    ]


def test_a_paused_training_request_is_reported_though_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    notices, heard = Notices(FakeClock()), []  # type: ignore[var-annotated]
    notices.listen(heard.append)
    with caplog.at_level(logging.WARNING, "tinker_sync.queue"):
        notices.publish(QueueNotice(QueueState.ACTIVE, None), "ForwardBackward", "req-1")
        notices.publish(PAUSED, "ForwardBackward", "req-2")
    assert len(caplog.messages) == 1  # the first line comes at once
    assert [(state.request_id, state.state) for state in heard] == [
        ("req-1", "active"),
        ("req-2", "paused_capacity"),
    ]


def test_an_active_queue_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tinker_sync.queue"):
        Notices(FakeClock()).publish(QueueNotice(QueueState.ACTIVE, None), "Sample", "req-1")
    assert caplog.messages == []


def test_a_child_does_not_inherit_a_held_lock() -> None:
    notices = Notices(FakeClock())
    notices._lock.acquire()
    notices.renew_after_fork()
    done = threading.Event()
    notices.listen(lambda _: done.set())
    notices.publish(PAUSED, "Sample", "req-1")
    assert done.is_set()
