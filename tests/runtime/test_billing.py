"""After a 402, a client retries for the time of the server's setting, and logs a line once a minute."""

from __future__ import annotations

import logging

import pytest
from support.clock import FakeClock
from support.crowd import together

from tinker_sync._base.policy import BLOCKED_PAUSE_S
from tinker_sync.runtime.billing import BillingPause


def test_it_pauses_for_as_long_as_the_server_allows(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    billing = BillingPause(20, clock=clock)
    paused = []
    with caplog.at_level(logging.WARNING, "tinker_sync.billing"):
        for _ in range(6):
            paused.append(billing.may_pause())
            clock.advance(BLOCKED_PAUSE_S)
    assert paused == [True, True, True, True, False, False]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the account is blocked; waiting up to 20 s for that to change"),
        ("ERROR", "the account is still blocked after 20 s; not waiting any longer"),
        ("ERROR", "the account is still blocked after 25 s; not waiting any longer"),
    ]


def test_it_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    billing = BillingPause(3600, clock=clock)
    with caplog.at_level(logging.WARNING, "tinker_sync.billing"):
        for _ in range(25):
            assert billing.may_pause()
            clock.advance(BLOCKED_PAUSE_S)
    assert len(caplog.records) == 3


def test_after_five_quiet_minutes_it_is_another_incident() -> None:
    clock = FakeClock()
    billing = BillingPause(10, clock=clock)
    assert billing.may_pause()
    clock.advance(20)
    assert not billing.may_pause()
    clock.advance(301)
    assert billing.may_pause()


def test_no_pause_at_all() -> None:
    assert not BillingPause(0, clock=FakeClock()).may_pause()


def test_many_who_meet_it_at_once_make_one_line(caplog: pytest.LogCaptureFixture) -> None:
    billing = BillingPause(3600, clock=FakeClock())
    with caplog.at_level(logging.WARNING, "tinker_sync.billing"):
        assert together(*[billing.may_pause] * 32) == [True] * 32
    assert len(caplog.records) == 1


def test_a_child_does_not_inherit_a_held_lock() -> None:
    billing = BillingPause(3600, clock=FakeClock())
    billing._lock.acquire()
    billing.renew_after_fork()
    assert billing.may_pause()
