"""The retry loop, with scripted answers and a clock that never sleeps."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.servers import AnsweringServer, Peer, ScriptedServer, answer, resets, silent
from support.wires import KEY, Notebook, heard_by, http_for, post, settings_for

from tinker_sync import errors
from tinker_sync._base.policy import Ledger, Stage
from tinker_sync._base.secret import Secret
from tinker_sync.config import Settings
from tinker_sync.errors import APIConnectionError, APIStatusError, APITimeoutError
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.retries import PATIENCE_S as CALLERS_PATIENCE_S
from tinker_sync.transport.retries import Caller, Fatal, Judge, Retry, Verdict, retry_after_s

Outcome = Reply | Exception

OK = Reply(200, {}, b"{}")
REFUSED = SendFailed("refused", maybe_received=False)
RESET = SendFailed("reset", maybe_received=True)
SILENCE = SendFailed("silence", maybe_received=True, timed_out=True)


def status(code: int, **headers: str) -> Reply:
    return Reply(
        code, {name.replace("_", "-"): value for name, value in headers.items()}, b'{"detail": "why"}'
    )


class ScriptedHttp:
    """A double of `Http` that returns or raises given outcomes, repeats the last one, and records calls."""

    def __init__(self, *outcomes: Outcome, takes_s: float = 0.0, clock: FakeClock | None = None) -> None:
        self._outcomes = list(outcomes)
        self._takes_s = takes_s
        self._clock = clock
        self.calls: list[Call] = []

    def send(self, call: Call) -> Reply:
        self.calls.append(call)
        if self._clock:
            self._clock.advance(self._takes_s)
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def caller_for(http: ScriptedHttp, clock: FakeClock | None = None, **options: Any) -> Caller:
    journal = options.pop("journal", None)
    settings = settings_for("http://h", api_key=KEY, **options)
    return Caller(http, settings, clock=clock or FakeClock(), draw=lambda: 1.0, journal=journal)


def waits_of(*outcomes: Outcome, call: Call | None = None, **options: Any) -> Sequence[float]:
    """Return the pauses, in seconds, of a call whose tries have these outcomes. The last is a success."""
    clock = FakeClock()
    reply = caller_for(ScriptedHttp(*outcomes), clock, **options).call(call or post())
    assert reply.status == 200
    return clock.waits


def test_pauses_grow_and_have_an_end() -> None:
    assert waits_of(status(503), status(500), status(502), REFUSED, RESET, status(429), status(408), OK) == [
        0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0,
    ]  # fmt: skip


def test_the_servers_wish_is_honoured_however_long() -> None:
    now = "Thu, 01 Jan 1970 00:16:40 GMT"
    later = "Thu, 01 Jan 1970 00:16:42 GMT"
    assert waits_of(
        status(503, retry_after="0.3"),
        status(503, retry_after_ms="200"),
        status(503, retry_after=later, date=now),
        status(429, retry_after="100"),
        OK,
    ) == pytest.approx([0.33, 0.22, 2.2, 101.0])


def test_a_retry_after_beyond_the_deadline_ends_the_call_at_once() -> None:
    """If the wanted pause would end after the deadline, the call fails without a pause."""
    clock = FakeClock()
    caller = caller_for(ScriptedHttp(status(429, retry_after="3600")), clock)
    with pytest.raises(errors.RateLimitError) as caught:
        caller.call(post(deadline_s=60))
    assert caught.value.retry_after_s == 120
    assert clock.waits == []


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("wish", ["3600000", "1e308", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_an_absurd_wish_is_cut(code: int, wish: str) -> None:
    assert waits_of(status(code, retry_after=wish), OK) == [121.0]


def test_one_key_for_all_tries() -> None:
    http = ScriptedHttp(status(503), REFUSED, OK)
    caller = caller_for(http)
    caller.call(post())
    caller.call(post())
    keys = [call.idempotency_key for call in http.calls]
    assert keys[0]
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]
    assert [call.attempt for call in http.calls] == [1, 2, 3, 1]


@pytest.mark.parametrize("code", [400, 401, 402, 403, 404, 405, 410, 422, 501])
def test_a_final_refusal_is_not_retried(code: int) -> None:
    http = ScriptedHttp(status(code))
    with pytest.raises(APIStatusError) as caught:
        caller_for(http).call(post())
    assert len(http.calls) == 1
    assert (caught.value.status_code, caught.value.method, caught.value.path) == (code, "POST", "/api/v1/x")
    assert (caught.value.attempts, caught.value.message) == (1, "why")


def test_retries_are_counted() -> None:
    http = ScriptedHttp(status(503))
    with pytest.raises(errors.InternalServerError) as caught:
        caller_for(http, max_retries=3).call(post())
    assert (len(http.calls), caught.value.attempts) == (4, 4)
    for call in (post(max_retries=0), post(max_retries=1)):
        http = ScriptedHttp(REFUSED)
        with pytest.raises(APIConnectionError):
            caller_for(http).call(call)
        assert len(http.calls) == 1 + (call.max_retries or 0)


def test_a_patient_call_outlives_minutes_of_outage() -> None:
    clock = FakeClock()
    began = clock.now()

    class Down(ScriptedHttp):
        def send(self, call: Call) -> Reply:
            self.calls.append(call)
            if clock.now() - began < CALLERS_PATIENCE_S - 60:
                raise REFUSED
            return OK

    http = Down(OK)
    assert caller_for(http, clock).call(post(patient=True, deadline_s=7200.0)) is OK
    assert len(http.calls) > 11
    with pytest.raises(APIConnectionError):  # this call has no longer time for retries
        caller_for(ScriptedHttp(REFUSED)).call(post(deadline_s=7200.0))


@pytest.mark.parametrize("outcome", [REFUSED, status(500), status(503)], ids=["refused", "500", "503"])
def test_failures_are_named_after_two_seconds_and_once_a_minute(
    outcome: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    assert sum(waits_of(outcome, outcome, OK)) < 2
    assert not caplog.records
    pauses = waits_of(*[outcome] * 9, OK, call=post(needed=True))
    assert 60 < sum(pauses) < 122
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all(record.getMessage().endswith("Still trying.") for record in caplog.records)
    assert caplog.text.count("POST /api/v1/x") == 2
    assert KEY not in caplog.text


def test_an_ordinary_500_is_final_after_a_few_tries_unless_training_needs_the_call() -> None:
    http = ScriptedHttp(status(500))
    with pytest.raises(errors.InternalServerError):
        caller_for(http).call(post())
    assert len(http.calls) == 5
    assert len(waits_of(*[status(500)] * 9, OK, call=post(needed=True))) == 9
    wish = {"x_should_retry": "true"}
    assert len(waits_of(*[status(500, **wish)] * 9, OK)) == 9


def test_a_patient_call_gives_up_after_all() -> None:
    clock = FakeClock()
    began = clock.now()
    with pytest.raises(APIConnectionError):
        caller_for(ScriptedHttp(REFUSED), clock).call(post(patient=True, deadline_s=7200.0))
    assert CALLERS_PATIENCE_S - 60 < clock.now() - began <= CALLERS_PATIENCE_S


def test_max_retries_of_ten_differs_from_the_default_of_ten() -> None:
    for settings in (settings_for("http://h", max_retries=10), Settings(max_retries=10)):
        chosen = pickle.loads(pickle.dumps(settings))
        http = ScriptedHttp(REFUSED)
        with pytest.raises(APIConnectionError):
            Caller(http, chosen, clock=FakeClock(), draw=lambda: 1.0).call(post(patient=True))
        assert len(http.calls) == 11
    for settings in (settings_for("http://h"), Settings()):
        nobody_chose = pickle.loads(pickle.dumps(settings))
        http = ScriptedHttp(REFUSED)
        with pytest.raises(APIConnectionError):
            Caller(http, nobody_chose, clock=FakeClock(), draw=lambda: 1.0).call(post(patient=True))
        assert len(http.calls) > 11  # retries go on for five minutes
        assert "max_retries=10," in repr(nobody_chose)


@pytest.mark.parametrize(("configured", "of_call"), [(3, None), (10, 3)])
def test_a_chosen_number_of_retries_limits_patient_calls_too(configured: int, of_call: int | None) -> None:
    http = ScriptedHttp(REFUSED)
    with pytest.raises(APIConnectionError):
        caller_for(http, max_retries=configured).call(post(patient=True, max_retries=of_call))
    assert len(http.calls) == 4


def test_without_a_deadline_no_new_try_begins_after_some_minutes() -> None:
    clock = FakeClock()
    http = ScriptedHttp(SILENCE, takes_s=60, clock=clock)
    began = clock.now()
    with pytest.raises(APITimeoutError):
        caller_for(http, clock, max_retries=1000).call(post())
    assert 240 < clock.now() - began <= CALLERS_PATIENCE_S + 60
    assert all(call.deadline_s is None for call in http.calls)


def test_a_deadline_is_handed_on_and_kept() -> None:
    clock = FakeClock()
    http = ScriptedHttp(status(503), takes_s=2, clock=clock)
    began = clock.now()
    with pytest.raises(errors.InternalServerError):
        caller_for(http, clock, deadline_s=100.0).call(post(deadline_s=10.0))
    assert clock.now() - began <= 10 + 2  # a real connection would have ended the last try at the deadline
    assert [call.deadline_s for call in http.calls] == [10.0, 7.5, 4.5, 0.5]
    http = ScriptedHttp(OK)
    caller_for(http, deadline_s=100.0).call(post())
    assert http.calls[0].deadline_s == 100.0


def test_what_may_have_been_received_is_sent_again_only_if_that_is_safe() -> None:
    for lost in (RESET, SILENCE, status(500), status(502), status(504)):
        http = ScriptedHttp(lost, OK)
        with pytest.raises(errors.APIError):
            caller_for(http).call(post(repeatable=False))
        assert len(http.calls) == 1
    for harmless in (REFUSED, status(503), status(429), status(425), Reply(400, {}, b"")):
        assert len(waits_of(harmless, OK, call=post(repeatable=False))) == 1


def test_an_answer_that_cannot_be_read_is_asked_for_again_only_if_that_is_safe() -> None:
    def read(_: Reply) -> None:
        raise errors.APIResponseValidationError("no request_id")

    for repeatable, tries in ((True, 3), (False, 1)):
        http = ScriptedHttp(OK)
        with pytest.raises(errors.APIResponseValidationError) as caught:
            caller_for(http).read(post(repeatable=repeatable), read)
        assert len(http.calls) == tries
        assert caught.value.ambiguous


def test_an_empty_400_is_tried_a_few_times_over_new_connections() -> None:
    http = ScriptedHttp(Reply(400, {"content-length": "0"}, b""))
    with pytest.raises(errors.BadRequestError):
        caller_for(http).call(post())
    assert len(http.calls) == 5
    assert [call.fresh for call in http.calls] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("before", "ambiguous"),
    [
        ([], False),
        ([REFUSED], False),
        ([status(503)], True),
        ([status(429)], True),
        ([RESET], True),
        ([SILENCE], True),
        ([status(502)], True),
        ([RESET, status(503)], True),
        ([status(409)], False),
    ],
    ids=repr,
)
def test_a_conflict_after_a_try_that_was_lost_may_be_of_our_own_making(
    before: list[Outcome], ambiguous: bool
) -> None:
    with pytest.raises(errors.ConflictError) as raised:
        caller_for(ScriptedHttp(*before, status(409))).call(post())
    assert raised.value.ambiguous is ambiguous
    assert ("may have been carried out" in str(raised.value)) is ambiguous


def test_a_conflict_after_a_connection_was_replaced_may_be_too() -> None:
    resent = Reply(409, {}, b"", resent=True)
    with pytest.raises(errors.ConflictError) as raised:
        caller_for(ScriptedHttp(resent, status(409))).call(post())
    assert raised.value.ambiguous


@pytest.mark.parametrize("failed", [REFUSED, RESET, SILENCE])
def test_a_close_keeps_in_mind_what_the_server_may_have(failed: SendFailed) -> None:
    class Closing(ScriptedHttp):
        def send(self, call: Call) -> Reply:
            caller.close()
            return super().send(call)

    caller = caller_for(Closing(failed))
    with pytest.raises(APIConnectionError, match="closed") as caught:
        caller.call(post())
    assert caught.value.ambiguous is failed.maybe_received


def test_closing_wakes_a_pause_and_refuses_what_follows() -> None:
    clock = FakeClock(automatic=False)
    caller = caller_for(ScriptedHttp(status(503)), clock)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(caller.call, post()) for _ in range(2)]
        clock.await_waiters(2)
        caller.close()
        caller.close()
        for future in futures:
            error = future.exception(PATIENCE_S)
            assert isinstance(error, APIConnectionError)
            assert "closed" in str(error)
    with pytest.raises(APIConnectionError, match="closed"):
        caller.call(post())


def test_a_child_has_keys_of_its_own_and_a_closed_caller_stays_closed() -> None:
    caller = caller_for(ScriptedHttp(OK))
    of_parent = caller.next_key()
    caller.renew_after_fork()
    assert caller.next_key().rpartition("-")[0] != of_parent.rpartition("-")[0]
    assert caller.call(post()).status == 200
    caller.close()
    caller.renew_after_fork()
    with pytest.raises(APIConnectionError, match="closed"):
        caller.call(post())


def test_a_call_that_close_interrupts_names_the_close() -> None:
    with ScriptedServer(silent) as server:
        http = http_for(server)
        caller = Caller(http, settings_for(server))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(caller.call, post())
            server.await_seen(1)
            caller.close()
            http.close()
            error = future.exception(PATIENCE_S)
    assert isinstance(error, APIConnectionError)
    assert "closed" in str(error)


def test_pauses_are_reported() -> None:
    notebook = Notebook()
    caller_for(ScriptedHttp(status(503), REFUSED, OK), journal=Journal(heard_by(notebook))).call(post())
    assert [(e.attempt, e.delay_s, e.reason) for e in notebook.events] == [  # type: ignore[union-attr]
        (1, 0.5, "503"),
        (2, 1.0, "APIConnectionError"),
    ]


def test_deprecation_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    note = status(200, x_deprecation_note=f"use v2 instead of {KEY}")
    grave = status(200, x_deprecation_note="gone soon", x_deprecation_level="Error")
    caller = caller_for(ScriptedHttp(note, note, grave))
    for _ in range(4):
        caller.call(post())
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert "use v2" in caplog.text
    assert "marked" not in caplog.text


def test_a_key_among_the_headers_of_a_call_is_the_only_one() -> None:
    with AnsweringServer() as server, http_for(server) as http:
        caller = Caller(http, settings_for(server))
        caller.call(post(headers={"X-Idempotency-Key": "mine"}))
        caller.call(post(headers={"X-Idempotency-Key": "mine"}, attempt=2))
    assert [seen.header("x-idempotency-key") for seen in server.seen] == ["mine"] * 2


def test_over_real_sockets() -> None:
    """A call is repeated after a 503 with a `Retry-After`, a reset and a closed connection, and succeeds."""

    def busy(peer: Peer) -> None:
        peer.read_request()
        peer.send(answer(b"", status=503, headers={"Retry-After": "0.3", "Connection": "close"}))

    clock = FakeClock()
    with ScriptedServer(
        busy,
        resets,
        lambda peer: (peer.read_request(), peer.close())[0],
        lambda peer: (peer.read_request(), peer.send(answer(b"done")), peer.wait_gone())[0],
    ) as server:
        http = http_for(server)
        caller = Caller(http, settings_for(server), clock=clock, draw=lambda: 1.0)
        assert caller.call(post()).body == b"done"
        http.close()
    assert clock.waits == pytest.approx([0.33, 1.0, 2.0])
    assert [seen.header("x-retry-count") for seen in server.seen] == ["0", "1", "2", "3"]
    assert len({seen.header("x-idempotency-key") for seen in server.seen}) == 1


# ------------------------------------------------------ The decision after every status and failure
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
