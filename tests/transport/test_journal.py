"""The log and the observer get every event, and their failures have no effect."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.wires import KEY, Notebook, post

from tinker_sync._base.events import Redirected, ReplyReceived, RequestLost, RequestSent, RetryScheduled
from tinker_sync._base.secret import Secret
from tinker_sync.transport.call import Reply, SendFailed
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.request import by_name

CALL = post(body=b'{"weights_access_token": "marked-token", "a": 1}', attempt=2)
REPLY = Reply(
    200, {"content-type": "application/json", "set-cookie": "marked"}, b'{"jwt": "marked-jwt-token"}'
)


def everything(journal: Journal) -> None:
    journal.sent(CALL, by_name({"X-API-Key": KEY, "Accept": "*/*"}))
    journal.redirected(CALL, 307, same_origin=False, to="https://other")
    journal.redirected(CALL, 307, same_origin=True, to="https://h")
    journal.answered(CALL, REPLY, 0.5)
    journal.lost(CALL, SendFailed(f"bad {KEY}", maybe_received=True), 0.25)
    journal.retrying(CALL, 1.5, "503")


def test_the_observer_receives_all_of_it() -> None:
    notebook = Notebook()
    everything(Journal(notebook))
    common = {"method": "POST", "path": "/api/v1/x"}
    assert notebook.events == [
        RequestSent(**common, attempt=2, size_bytes=len(CALL.body or b"")),
        Redirected(**common, status=307, same_origin=False),
        Redirected(**common, status=307, same_origin=True),
        ReplyReceived(**common, attempt=2, status=200, size_bytes=27, duration_s=0.5),
        RequestLost(**common, attempt=2, reason="SendFailed", maybe_received=True, duration_s=0.25),
        RetryScheduled(**common, attempt=2, delay_s=1.5, reason="503"),
    ]


def test_no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tinker_sync")
    everything(Journal(base_url="https://h", as_curl=True, secrets=lambda: [Secret(KEY)]))
    assert "POST /api/v1/x, attempt 2, 48 bytes" in caplog.text
    assert "-X POST https://h/api/v1/x" in caplog.text
    assert "200 in 0.500 s" in caplog.text
    assert "redirected to https://other, without credentials" in caplog.text
    assert "again in 1.50 s (503)" in caplog.text
    assert "marked" not in caplog.text


def test_without_debug_nothing_is_formatted(caplog: pytest.LogCaptureFixture) -> None:
    def never() -> list[Secret]:
        raise AssertionError("nobody listens")

    caplog.set_level(logging.INFO, "tinker_sync")
    everything(Journal(secrets=never))
    assert len(caplog.records) == 1  # a warning, because the request was redirected without its credentials


def test_an_observer_that_raises_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def observe(self, event: object) -> None:
            raise RuntimeError("mine")

    everything(Journal(Broken()))
    assert caplog.text.count("an observer raised") == 6


def test_observers_that_many_threads_add_and_remove_are_all_kept_and_all_gone() -> None:
    journal = Journal()
    stops: list[Callable[[], None]] = []
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            stops += pool.map(journal.listen, (Notebook() for _ in range(2000)))
            assert len(journal.observers) == 2000
            list(pool.map(lambda stop: stop(), stops))
    finally:
        sys.setswitchinterval(usual_s)
    stops[0]()
    assert len(journal.observers) == 0
