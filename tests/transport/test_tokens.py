"""The lifetime and renewal of tokens, with a fake clock."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.crowd import start, together, until
from support.servers import AnsweringServer, Seen, answer
from support.wires import KEY, Keys, http_for, post

from tinker_sync._base.secret import Secret
from tinker_sync.errors import (
    APIConnectionError,
    APIResponseValidationError,
    AuthenticationError,
    CredentialError,
)
from tinker_sync.transport.call import Reply
from tinker_sync.transport.tokens import Grant, TokenCache, claims_of, lifetime_s, read_grant, rejects_token

MARK = "planted-token-0123456789"
NOW_S = 1_750_000_000.0


def jwt(mark: str = MARK, **claims: Any) -> str:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part(claims)}.{mark}"


class Exchange:
    """A scripted token exchange. Each fetch takes the next step of the script; the last step is repeated.

    A step is the lifetime of the new token in seconds, an exception to raise, or a function that returns one
    of these.
    """

    def __init__(self, clock: FakeClock, *script: float | Exception | Callable[[], Any]) -> None:
        self.clock = clock
        self.script = list(script)
        self.count = 0

    def __call__(self) -> Grant:
        self.count += 1
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(step):
            step = step()
        if isinstance(step, Exception):
            raise step
        now = self.clock.time()
        return Grant(Secret(jwt(f"token-{self.count}", iat=now, exp=now + step)), now)


def cache(*script: float | Exception | Callable[[], Any]) -> tuple[TokenCache, Exchange, FakeClock]:
    clock = FakeClock(time_s=NOW_S)
    exchange = Exchange(clock, *script)
    return TokenCache(exchange, clock, lambda: 0.5), exchange, clock


def waiting(tokens: TokenCache) -> int:
    """Return the number of threads that wait for the fetch under way."""
    flight = tokens._flight
    return 0 if flight is None else len(flight.over._cond._waiters)  # type: ignore[attr-defined]


class Held:
    """A step of an exchange that begins, and ends with `outcome` when the test releases it."""

    def __init__(self, outcome: float | BaseException) -> None:
        self.outcome = outcome
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self) -> float | BaseException:
        self.begun.set()
        assert self.released.wait(PATIENCE_S)
        if not isinstance(self.outcome, (float, Exception)):
            raise self.outcome
        return self.outcome

    def await_begun(self) -> None:
        assert self.begun.wait(PATIENCE_S)

    def release_when(self, tokens: TokenCache, count: int) -> None:
        """Release the step when `count` threads wait for it."""
        self.await_begun()
        until(lambda: waiting(tokens) == count)
        self.released.set()


def number(token: Secret) -> int:
    return int(token.reveal().rpartition("-")[2])


# -------------------------------------------------------------------------------------- reading tokens


@pytest.mark.parametrize(
    "text",
    ["", "tml-key", "a.b.c", "eyJ.%%%.x", "eyJ", "a.", "ü.ü.ü", "a.WzFd.c", "a." + "W" * 7 + ".c", "." * 5],
)
def test_unreadable_tokens_have_no_claims(text: str) -> None:
    assert claims_of(Secret(text)) == {}


def test_claims_nested_deeper_than_the_stack() -> None:
    payload = base64.urlsafe_b64encode(b"[" * 200_000).decode()
    assert claims_of(Secret(f"a.{payload}.c")) == {}


@pytest.mark.parametrize(
    ("claims", "server_time_s", "lifetime"),
    [
        ({"exp": NOW_S + 3600, "iat": NOW_S}, None, 3600),
        ({"exp": NOW_S + 3600}, None, 3600),
        # The server sends a token that it made half an hour ago, and the local clock agrees.
        ({"exp": NOW_S + 1800, "iat": NOW_S - 1800}, None, 1800),
        # The local clock is a day behind, or ahead: the lifetime in the token counts.
        ({"exp": NOW_S + 86400 + 600, "iat": NOW_S + 86400}, None, 600),
        ({"exp": NOW_S - 86400 + 600, "iat": NOW_S - 86400}, None, 600),
        # If the server's clock is known, only that clock counts.
        ({"exp": NOW_S + 86400 + 600, "iat": NOW_S + 86400 - 3000}, NOW_S + 86400, 600),
        ({"exp": NOW_S - 86400 + 600}, NOW_S - 86400, 600),
        # The `Date` header of a proxy cannot be right.
        ({"exp": NOW_S + 600, "iat": NOW_S}, NOW_S - 86400, 600),
        ({"exp": NOW_S + 600, "iat": NOW_S}, NOW_S + 86400, 600),
        # A difference of a second may come from rounding.
        ({"exp": NOW_S + 600, "iat": NOW_S}, NOW_S - 1, 601),
        # An expired token is used once anyway.
        ({"exp": NOW_S - 5}, None, 1),
        ({"exp": NOW_S - 5, "iat": NOW_S - 5}, None, 1),
        # Tokens without a lifetime.
        ({}, None, 60),
        ({"exp": "soon"}, None, 60),
        ({"exp": True}, None, 60),
        ({"exp": 1e300}, None, 60),
        ({"exp": NOW_S + 60.5, "iat": "x"}, None, 60.5),
    ],
)
def test_lifetime(claims: dict[str, Any], server_time_s: float | None, lifetime: float) -> None:
    assert lifetime_s(Grant(Secret(jwt(**claims)), server_time_s), NOW_S) == pytest.approx(lifetime)


def test_a_grant_is_read_from_the_answer() -> None:
    token = jwt(exp=1)
    reply = Reply(
        200, {"Date": formatdate(NOW_S, usegmt=True)}, json.dumps({"jwt": token, "more": 1}).encode()
    )
    grant = read_grant(reply)
    assert (grant.token.reveal(), grant.server_time_s) == (token, NOW_S)
    assert MARK not in repr(grant)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json " + MARK.encode(),
        b'{"token": "%s"}' % MARK.encode(),
        b'{"jwt": ""}',
        b'{"jwt": null}',
        b'{"jwt": ["%s"]}' % MARK.encode(),
        b'["%s"]' % MARK.encode(),
        b'{"jwt": "%s\\r\\nX: y"}' % MARK.encode(),
        b'{"jwt": "%s \\u00fc"}' % MARK.encode(),
        b"[" * 200_000,
    ],
)
def test_an_answer_without_a_token(body: bytes) -> None:
    with pytest.raises(APIResponseValidationError, match="holds no 'jwt'") as caught:
        read_grant(Reply(200, {}, body))
    assert caught.value.status_code == 200
    assert MARK not in str(caught.value)
    assert caught.value.__context__ is None


# ------------------------------------------------------------------------------------- without threads


def test_one_token_serves_until_a_minute_is_left() -> None:
    tokens, exchange, clock = cache(3600.0)
    assert exchange.count == 0
    assert number(tokens.get()) == 1
    clock.advance(3539)
    assert (number(tokens.get()), exchange.count) == (1, 1)
    clock.advance(2)
    assert (number(tokens.get()), exchange.count) == (2, 2)


def test_ahead_of_time_it_is_renewed_at_half_of_its_life() -> None:
    tokens, exchange, clock = cache(3600.0)
    assert tokens.next_step_in_s() is None
    tokens.step()
    assert exchange.count == 0
    tokens.get()
    assert tokens.next_step_in_s() == pytest.approx(1800)
    clock.advance(1799)
    tokens.step()
    assert exchange.count == 1
    clock.advance(1)
    assert tokens.next_step_in_s() == 0
    tokens.step()
    assert exchange.count == 2
    assert tokens.next_step_in_s() == pytest.approx(1800)


@pytest.mark.parametrize(("draw", "at_s"), [(0.0, 450.0), (1.0, 550.0)])
def test_the_moment_of_a_renewal_is_drawn(draw: float, at_s: float) -> None:
    clock = FakeClock(time_s=NOW_S)
    tokens = TokenCache(Exchange(clock, 1000.0), clock, lambda: draw)
    tokens.get()
    assert tokens.next_step_in_s() == pytest.approx(at_s)


@pytest.mark.parametrize(("lifetime", "exchanges"), [(60.0, 1), (45.0, 1), (2.0, 2)])
def test_short_lived_tokens_are_not_exchanged_for_every_request(lifetime: float, exchanges: int) -> None:
    tokens, exchange, clock = cache(lifetime)
    for _ in range(10):  # ten calls in two seconds
        tokens.get()
        clock.advance(0.2)
    assert exchange.count == exchanges


# -------------------------------------------------------------------------------------- rejected tokens


def test_a_rejection_of_an_older_token_costs_no_exchange() -> None:
    tokens, exchange, _ = cache(3600.0)
    first = tokens.get()
    second = tokens.renewed(first)
    assert tokens.renewed(first) == second
    assert exchange.count == 2


def test_a_rejected_token_is_not_used_again_when_the_exchange_fails() -> None:
    tokens, exchange, _ = cache(3600.0, APIConnectionError("no route"), 3600.0)
    first = tokens.get()
    with pytest.raises(CredentialError, match="no new one: no route"):
        tokens.renewed(first)
    assert number(tokens.get()) == 3
    assert exchange.count == 3


@pytest.mark.parametrize("lifetime", [-50.0, 0.0, 0.1, 1.0, 4.0, 60.0, 300.0, 301.0])
def test_short_lives_leave_pauses(lifetime: float) -> None:
    tokens, exchange, clock = cache(lifetime)
    tokens.get()
    for _ in range(100):
        pause_s = tokens.next_step_in_s()
        assert pause_s is not None
        assert pause_s >= 5.0
        clock.advance(pause_s)
        tokens.step()
    assert exchange.count == 101


@pytest.mark.parametrize(("lifetime", "at_most"), [(0.0, 1200), (10.0, 120), (100.0, 12)])
def test_busy_callers_do_not_fetch_more_than_short_lives_need(lifetime: float, at_most: int) -> None:
    tokens, exchange, clock = cache(lifetime)
    for _ in range(10_000):  # a call every 0.1 s for 1000 s
        tokens.get()
        clock.advance(0.1)
    assert exchange.count <= at_most


def test_a_failed_renewal_keeps_the_old_token_and_does_not_hammer(caplog: pytest.LogCaptureFixture) -> None:
    failure = APIConnectionError(f"no route, sent {jwt()}")
    tokens, exchange, clock = cache(1000.0, failure)
    tokens.get()
    clock.advance(950)
    with caplog.at_level(logging.WARNING):
        assert number(tokens.get()) == 1
    assert "the old one is good for another 50 s: no route, sent ***" in caplog.text
    assert MARK not in caplog.text
    for _ in range(120):  # 12 s
        assert number(tokens.get()) == 1
        clock.advance(0.1)
    assert exchange.count == 2
    clock.advance(1)
    assert number(tokens.get()) == 1
    assert exchange.count == 3


def test_an_expired_token_without_a_new_one_is_an_error_with_its_reason() -> None:
    failure = APIConnectionError("no route")
    tokens, exchange, clock = cache(1000.0, failure)
    tokens.get()
    clock.advance(1000)
    for fetched in (2, 3):
        with pytest.raises(CredentialError, match=r"token is over.*no route") as caught:
            tokens.get()
        assert caught.value.__cause__ is failure
        assert exchange.count == fetched


def test_failed_steps_are_logged_and_come_back_with_pauses(caplog: pytest.LogCaptureFixture) -> None:
    tokens, exchange, clock = cache(1000.0, APIConnectionError("no route"))
    tokens.get()
    pauses = []
    for _ in range(40):
        pause_s = tokens.next_step_in_s()
        assert pause_s is not None
        pauses.append(pause_s)
        clock.advance(pause_s)
        tokens.step()
    assert pauses[0] == pytest.approx(500)
    assert all(5 <= pause_s <= 60 for pause_s in pauses[1:])
    assert exchange.count == 41
    assert "good for another 500 s" in caplog.text
    assert "there is no new token: the token is over" in caplog.text


def test_a_suspended_machine_wakes_with_an_old_token() -> None:
    tokens, _, clock = cache(3600.0)
    tokens.get()
    clock.shift_date(7200)  # the wall clock advances, and the monotonic clock does not
    assert tokens.next_step_in_s() == 0
    assert number(tokens.get()) == 2


def test_a_wall_clock_set_back_does_not_prolong_a_token() -> None:
    tokens, _, clock = cache(3600.0)
    tokens.get()
    clock.shift_date(-86400)
    clock.advance(3600)
    assert number(tokens.get()) == 2


def test_the_exchange_itself_must_not_ask_for_a_token() -> None:
    clock = FakeClock()

    def fetch() -> Grant:
        return Grant(tokens.get())

    tokens = TokenCache(fetch, clock)
    with pytest.raises(CredentialError, match="long-lived"):
        tokens.get()


# ---------------------------------------------------------------------------------------- with threads


def test_many_threads_share_one_fetch() -> None:
    slow = Held(1000.0)
    tokens, exchange, _ = cache(slow)
    *results, _ = together(*[tokens.get] * 8, lambda: slow.release_when(tokens, 7))
    assert {number(token) for token in results} == {1}
    assert exchange.count == 1


def test_no_caller_waits_while_the_old_token_is_good() -> None:
    slow = Held(1000.0)
    tokens, exchange, clock = cache(1000.0, slow)
    tokens.get()
    clock.advance(950)
    renewing = start(tokens.get)
    slow.await_begun()
    assert number(tokens.get()) == 1  # a wait would hang here
    assert tokens.next_step_in_s() == 5.0
    tokens.step()
    slow.released.set()
    assert number(renewing.result(PATIENCE_S)) == 2
    assert exchange.count == 2


def test_a_failure_reaches_every_waiting_thread_as_an_error_of_its_own() -> None:
    failure = AuthenticationError("bad key")
    failure.__cause__ = cause = ValueError("below")
    slow = Held(failure)
    tokens, exchange, _ = cache(slow)

    def attempt() -> Exception:
        with pytest.raises(AuthenticationError) as caught:
            tokens.get()
        return caught.value

    *errors, _ = together(*[attempt] * 4, lambda: slow.release_when(tokens, 3))
    assert len({id(error) for error in errors}) == 4
    assert {str(error) for error in errors} == {str(failure)}
    assert all(error.__cause__ is cause for error in errors)
    assert exchange.count == 1


def test_foreign_failures_reach_the_others_without_their_text_of_keys() -> None:
    slow = Held(RuntimeError(f"odd {jwt()}"))
    tokens, _, _ = cache(slow)

    def attempt() -> Exception:
        with pytest.raises((RuntimeError, CredentialError)) as caught:
            tokens.get()
        return caught.value

    *errors, _ = together(attempt, attempt, lambda: slow.release_when(tokens, 1))
    assert [str(error) for error in errors if isinstance(error, CredentialError)] == [
        "no token is to be had: odd ***"
    ]


def test_an_interrupted_fetch_is_taken_over() -> None:
    slow = Held(KeyboardInterrupt())
    tokens, exchange, _ = cache(slow, 1000.0)

    def first() -> None:
        with pytest.raises(KeyboardInterrupt):
            tokens.get()

    def second() -> Secret:
        slow.await_begun()
        return tokens.get()

    _, token, _ = together(first, second, lambda: slow.release_when(tokens, 1))
    assert number(token) == 2
    assert exchange.count == 2


def test_a_forked_child_does_not_wait_for_its_parents_fetch() -> None:
    slow = Held(1000.0)
    tokens, _, _ = cache(slow, 1000.0)
    fetching = start(tokens.get)
    slow.await_begun()
    tokens.renew_after_fork()  # in a child, whose memory says that a fetch is under way
    assert number(tokens.get()) == 2
    slow.released.set()
    fetching.result(PATIENCE_S)


# -------------- A 401 with a rejected token, and the one repetition of the request with a new token
@pytest.mark.parametrize("header", [None, "", '"', "error=", '\\"' * 3000, "e" * 100_000, ",=,=", 'error="'])
def test_nonsense_rejects_no_token(header: str | None) -> None:
    assert not rejects_token(header)


class Rotating(Keys):
    """A double of the source of credentials that renews a rejected key: "key-1", then "key-2" and so on."""

    def __init__(self) -> None:
        super().__init__("key-1")
        self.rejected: list[Secret] = []

    def renewed(self, rejected: Secret) -> Secret:
        self.rejected.append(rejected)
        self._key = Secret(f"key-{len(self.rejected) + 1}")
        return self._key


def refuses(*keys: str, challenge: str = 'Bearer error="invalid_token"') -> Any:
    """Return a function for `AnsweringServer` that answers 401 to requests with these keys, else 200."""

    def respond(seen: Seen) -> bytes:
        if seen.header("x-api-key") in keys:
            return answer(b"{}", status=401, headers={"WWW-Authenticate": challenge})
        return answer()

    return respond


@pytest.mark.parametrize(
    "challenge",
    [
        "Bearer error=invalid_token",
        'Bearer realm="x, error=none", ERROR = "Invalid_Token"',
        'Basic realm="a", Bearer scope="all", error="invalid_token", Digest nonce="b"',
        'Bearer error="invalid\\_token"',
    ],
)
def test_every_way_to_write_an_invalid_token_is_understood(challenge: str) -> None:
    with AnsweringServer(refuses("key-1", challenge=challenge)) as server:
        http = http_for(server, keys=Rotating())
        assert http.send(post()).status == 200
        http.close()


@pytest.mark.parametrize(
    "challenge",
    ["Bearer", "", 'Bearer error="insufficient_scope"', 'Bearer error_description="error=invalid_token"'],
)
def test_other_rejections_are_not_sent_again(challenge: str) -> None:
    keys = Rotating()
    with AnsweringServer(refuses("key-1", challenge=challenge)) as server:
        http = http_for(server, keys=keys)
        assert http.send(post()).status == 401
        http.close()
    assert (len(server.seen), keys.rejected) == (1, [])


def test_a_key_among_the_default_headers_is_not_renewed() -> None:
    keys = Rotating()
    with AnsweringServer(refuses("of the user")) as server:
        http = http_for(server, keys=keys, default_headers={"X-API-Key": "of the user"})
        assert http.send(post()).status == 401
        http.close()
    assert (len(server.seen), keys.rejected) == (1, [])


def test_a_token_rejected_behind_a_redirect_is_renewed_there() -> None:
    def respond(seen: Seen) -> bytes:
        if seen.target.endswith("/there"):
            return refuses("key-1")(seen)
        return answer(status=307, headers={"Location": "/there"})

    with AnsweringServer(respond) as server, http_for(server, keys=Rotating()) as http:
        assert http.send(post()).status == 200
    assert [seen.target.rpartition("/")[2] for seen in server.seen[1:]] == ["there", "there"]


def test_an_exchange_that_fails_is_raised_instead_of_the_rejection() -> None:
    class Failing(Keys):
        def renewed(self, rejected: Secret) -> Secret | None:
            raise CredentialError("no new one")

    with (
        AnsweringServer(refuses(KEY)) as server,
        http_for(server, keys=Failing()) as http,
        pytest.raises(CredentialError, match="no new one"),
    ):
        http.send(post())
