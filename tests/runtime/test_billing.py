"""After a 402, a client retries for the time of the server's setting, and logs a line once a minute."""

from __future__ import annotations

import logging

import pytest
from support.clock import FakeClock

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


def test_after_five_quiet_minutes_it_is_another_incident() -> None:
    clock = FakeClock()
    billing = BillingPause(10, clock=clock)
    assert billing.may_pause()
    clock.advance(20)
    assert not billing.may_pause()
    clock.advance(301)
    assert billing.may_pause()
