"""The decision after every status and failure."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from support.clock import FakeClock

from tinker_sync import errors
from tinker_sync._base.policy import Ledger, Stage
from tinker_sync._base.secret import Secret
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.retries import Fatal, Judge, Retry, Verdict, retry_after_s

URL = "https://h/pre"
CLOCK = FakeClock(time_s=1000.0)
JUDGE = Judge(URL, CLOCK, lambda: [Secret("opaque-marked")])


def call(**fields: Any) -> Call:
    return Call(**{"method": "POST", "path": "/api/v1/x", **fields})


def judged(
    status: int, answered: dict[str, str] | None = None, body: bytes = b"x", **options: Any
) -> Verdict | None:
    return JUDGE.reply(Reply(status, answered or {}, body), call(**options), Ledger(Stage.CALL))


def test_a_redirect_is_an_answer_only_when_not_to_be_followed() -> None:
    assert judged(302, follow_redirects=False) is None
    assert isinstance(judged(304), Fatal)


# For each status, the decision for a call that may be repeated, and for one that may not.
TABLE = {
    400: (Fatal, Fatal),
    401: (Fatal, Fatal),
    402: (Fatal, Fatal),
    403: (Fatal, Fatal),
    404: (Fatal, Fatal),
    405: (Fatal, Fatal),
    408: (Retry, Retry),
    409: (Retry, Fatal),
    410: (Fatal, Fatal),
    415: (Fatal, Fatal),
    422: (Fatal, Fatal),
    425: (Retry, Retry),
    429: (Retry, Retry),
    500: (Retry, Fatal),
    501: (Fatal, Fatal),
    502: (Retry, Fatal),
    503: (Retry, Retry),
    504: (Retry, Fatal),
    505: (Fatal, Fatal),
    520: (Retry, Fatal),
    599: (Retry, Fatal),
}


@pytest.mark.parametrize(("status", "kinds"), TABLE.items())
def test_every_status_has_a_verdict(status: int, kinds: tuple[type, type]) -> None:
    assert type(judged(status)) is kinds[0]
    assert type(judged(status, repeatable=False)) is kinds[1]


@pytest.mark.parametrize("status", [400, 401, 409, 429, 500, 501])
def test_the_server_may_overrule_it(status: int) -> None:
    assert isinstance(judged(status, {"X-Should-Retry": "true"}, repeatable=False), Retry)
    assert isinstance(judged(status, {"x-should-retry": "False"}), Fatal)


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_patient_calls_are_sent_again_against_the_wish_of_a_server(status: int) -> None:
    unwished = {"x-should-retry": "false"}
    assert isinstance(judged(status, unwished), Fatal)
    against, alone = judged(status, unwished, patient=True), judged(status, patient=True)
    assert isinstance(against, Retry)
    assert isinstance(alone, Retry)
    assert against.after_s == alone.after_s


@pytest.mark.parametrize("status", [400, 401, 404, 501])
def test_patience_does_not_change_what_is_final(status: int) -> None:
    assert isinstance(judged(status, {"x-should-retry": "false"}, patient=True), Fatal)


def test_a_call_that_may_not_be_repeated_is_not_repeated_because_it_is_needed() -> None:
    unwished = {"x-should-retry": "false"}
    assert isinstance(judged(500, unwished, needed=True, patient=True, repeatable=False), Fatal)


def test_the_error_has_status_call_and_attempts() -> None:
    verdict = judged(429, {"retry-after": "7", "x-request-id": "r-1"}, b'{"detail": "slow down"}', attempt=3)
    assert isinstance(verdict, Retry)
    assert verdict.after_s == 7.0
    error = verdict.error
    assert isinstance(error, errors.RateLimitError)
    assert (error.status_code, error.method, error.path) == (429, "POST", "/api/v1/x")
    assert (error.attempts, error.request_id, error.retry_after_s) == (3, "r-1", 7.0)
    assert error.request is not None
    assert error.request.url == "https://h/pre/api/v1/x"
    assert "slow down" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("failed", "repeatable", "kind"),
    [
        (SendFailed("refused", maybe_received=False), True, Retry),
        (SendFailed("refused", maybe_received=False), False, Retry),
        (SendFailed("reset", maybe_received=True), True, Retry),
        (SendFailed("reset", maybe_received=True), False, Fatal),
        (SendFailed("silence", maybe_received=True, timed_out=True), True, Retry),
        (SendFailed("silence", maybe_received=True, timed_out=True), False, Fatal),
        (SendFailed("certificate", maybe_received=False, final=True), True, Fatal),
    ],
)
def test_failures(failed: SendFailed, repeatable: bool, kind: type) -> None:
    verdict = JUDGE.failure(failed, call(repeatable=repeatable, attempt=2))
    assert type(verdict) is kind
    expected = errors.APITimeoutError if failed.timed_out else errors.APIConnectionError
    assert type(verdict.error) is expected
    assert verdict.error.__cause__ is failed
    assert verdict.error.attempts == 2


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after-ms": "200"}, 0.2),
        ({"retry-after-ms": "200", "retry-after": "9"}, 0.2),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "0.3"}, 0.3),
        ({"retry-after": "120"}, 120.0),
        ({"retry-after": "3600000"}, 120.0),
        ({"retry-after": "1e308"}, 120.0),
        ({"retry-after-ms": "1e308"}, 120.0),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, 120.0),
        ({"retry-after": " 5 "}, 5.0),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        # 1000 s after the epoch is 00:16:40.
        ({"retry-after": "Thu, 01 Jan 1970 00:17:00 GMT"}, 20.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:16:00 GMT"}, None),
        ({"retry-after": "Thu, 99 Jan 1970 00:16:00 GMT"}, None),
        # The server's clock is an hour ahead, so its `Date` header counts.
        ({"retry-after": "Thu, 01 Jan 1970 01:17:00 GMT", "date": "Thu, 01 Jan 1970 01:16:45 GMT"}, 15.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:17:00 GMT", "date": "yesterday"}, 20.0),
    ],
)
def test_retry_after_in_its_three_forms(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, 1000.0) == expected


def test_a_pause_that_is_cut_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        assert retry_after_s({"retry-after": "86400.5"}, 0.0) == 120.0
    assert [record.getMessage() for record in caplog.records] == [
        "the server asks for a pause of 86400.5 s; this client asks again after 120 s"
    ]
