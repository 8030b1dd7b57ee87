"""Short-lived tokens: their lifetime, their rejection by a server, and a cache that renews them in time.

Guarantees:

- One renewal runs at a time, for any number of threads.
- The other threads do not wait for it while the current token is good.
- No caller gets the error of a failed renewal before the current token expires or is rejected.
- Renewals ahead of time have pauses between them, even if tokens have short lives.

`fetch` must not use the cache, nor wait for a thread that does.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import random
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from attrs import evolve, frozen

from tinker_sync._base.clock import Clock, http_date
from tinker_sync._base.log import Log
from tinker_sync._base.secret import Secret, mask_text
from tinker_sync.errors import APIResponseValidationError, CredentialError, TinkerError
from tinker_sync.transport.call import Reply

_logger = Log(__name__)

# The cache renews a token ahead of time at about half of its life. The exact moment is random, so that many
# clients do not ask at once.
_RENEW_FROM: Final = 0.45
_RENEW_TO: Final = 0.55
# `get` fetches a new token if the old one has less time left: a minute, or a tenth of a short life.
_MARGIN_S: Final = 60.0
_MARGIN: Final = 0.1
# Limits of the pause between two renewals ahead of time, and between two tries of the same renewal.
_SHORTEST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 60.0
# The lifetime of a token that states none: an opaque token, or the output of a credential command.
_ASSUMED_LIFETIME_S: Final = 60.0
# The cache uses a token for this long even if the token has ended by its own claim: servers' clocks are
# inexact.
_SHORTEST_LIFETIME_S: Final = 1.0
# Sums of times have rounding errors. Without this margin, `step` could skip a token that is due in almost
# zero seconds, and its thread would call again at once.
_ROUNDING_S: Final = 0.001
# The Date header has whole seconds, and the answer needs time to arrive.
_DATE_TOLERANCE_S: Final = 5.0
# A parameter of a challenge, or a quoted text outside of any parameter. The last quote may be missing.
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"  # noqa: S105 - a class of characters
_QUOTED: Final = r'"(?:[^"\\]|\\.)*(?:"|$)'
# `re` compiles it at the first 401; most programs see none.
_PART: Final = rf"(?<!{_TOKEN})({_TOKEN}+)[ \t]*=[ \t]*({_QUOTED}|{_TOKEN}+)|{_QUOTED}"


@frozen
class Grant:
    """A received token, with the server's time at its receipt if the answer has a date."""

    token: Secret
    server_time_s: float | None = None


def read_grant(reply: Reply) -> Grant:
    """Return the token, and the date, in the answer of the call that exchanges a key for a token.

    Raises:
        APIResponseValidationError: The answer holds no token. The text does not quote the answer.

    >>> read_grant(Reply(200, {"Date": "Thu, 01 Jan 1970 00:01:40 GMT"}, b'{"jwt": "eyJ.e30.x"}'))
    Grant(token=Secret('***'), server_time_s=100.0)
    """
    token = _token_in(reply)
    if token is None:
        raise APIResponseValidationError(
            "the answer of the token exchange holds no 'jwt'",
            status_code=reply.status,
            path="/api/v1/auth/token",
        )
    return Grant(token, _date_of(reply))


def claims_of(token: Secret) -> dict[str, Any]:
    """Return the claims of a JWT without checking its signature, or an empty dict for other tokens.

    >>> claims_of(Secret("eyJhbGciOiJub25lIn0.eyJzdWIiOiAidTEifQ.")), claims_of(Secret("tml-example"))
    ({'sub': 'u1'}, {})
    """
    with suppress(ValueError, RecursionError):
        _, payload, *_ = token.reveal().split(".")
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        if isinstance(claims, dict):
            return claims
    return {}


def lifetime_s(grant: Grant, time_s: float) -> float:
    """Return the lifetime of a token from its receipt to its expiry, in seconds.

    The expiry is the token's `exp`, compared with the server's time if the answer has a date, otherwise with
    the local clock. If the token also has `iat`, its full lifetime is from `iat` to `exp`. If no time is
    left, or more than the full lifetime, a clock is wrong, and the result is the full lifetime. A token
    without `exp` counts as valid for a minute. The result is at least one second.

    Args:
        grant: the token, just received.
        time_s: the local wall clock at its receipt.
    """
    claims = claims_of(grant.token)
    ends_s, begins_s = _number(claims.get("exp")), _number(claims.get("iat"))
    if ends_s is None:
        return _ASSUMED_LIFETIME_S
    left_s = ends_s - (time_s if grant.server_time_s is None else grant.server_time_s)
    if begins_s is not None and not 0 < left_s <= ends_s - begins_s + _DATE_TOLERANCE_S:
        left_s = ends_s - begins_s
    return max(left_s, _SHORTEST_LIFETIME_S)


@frozen
class _Moment:
    monotonic_s: float
    wall_s: float


@frozen
class _Held:
    """The current token and the times that decide when it is renewed."""

    token: Secret
    received: _Moment
    lifetime_s: float
    renew_at: float
    """The fraction of the token's life after which `step` renews it, but not within 5 s of its receipt."""

    def age_s(self, now: _Moment) -> float:
        """Return the seconds since the receipt, by the clock that advanced more.

        The monotonic clock stops while the machine is suspended.
        """
        return max(now.monotonic_s - self.received.monotonic_s, now.wall_s - self.received.wall_s)

    def left_s(self, now: _Moment) -> float:
        return self.lifetime_s - self.age_s(now)

    def renew_in_s(self, now: _Moment) -> float:
        return max(self.renew_at * self.lifetime_s, _SHORTEST_PAUSE_S) - self.age_s(now)

    def is_fresh(self, now: _Moment) -> bool:
        return self.left_s(now) > min(_MARGIN_S, _MARGIN * self.lifetime_s)


class _Flight:
    """A renewal under way. Its thread alone writes; other threads read after `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.failure: Exception | None = None
        self.thread = threading.get_ident()


class TokenCache:
    """A cache of the current token. Thread-safe.

    The cache has no thread of its own. `get` renews a token that expires soon. A thread that calls `step`
    after every `next_step_in_s` renews it ahead of time.

    Args:
        fetch: gets a new token; it blocks, and limits its own time.
        clock: the source of time.
        draw: returns random numbers from 0 to 1, for the moment of a renewal.
    """

    def __init__(
        self, fetch: Callable[[], Grant], clock: Clock, draw: Callable[[], float] = random.random
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._held: _Held | None = None  # guarded by _lock
        self._before: Secret | None = None  # guarded by _lock; calls under way may still carry it
        self._flight: _Flight | None = None  # guarded by _lock
        self._quiet_until_s = -math.inf  # guarded by _lock; no early renewal before this after a failure

    def renew_after_fork(self) -> None:
        """Replace the lock, in a forked child, and forget the parent's renewal; the token stays."""
        self._lock = threading.Lock()
        self._flight = None

    @property
    def known(self) -> tuple[Secret, ...]:
        """The current token and the previous one, without those that do not exist."""
        with self._lock:
            tokens = (self._held.token if self._held else None, self._before)
        return tuple(token for token in tokens if token)

    def get(self) -> Secret:
        """Return the current token; fetch a new one first if it expires soon.

        While another thread fetches, or if the fetch fails, return the old token until it expires.

        Raises:
            CredentialError: The old token has ended and its renewal failed, or `fetch` has called `get`.
            Exception: The first token could not be fetched; this is the error of `fetch`.
        """
        while True:
            now = self._now()
            with self._lock:
                held, flight = self._held, self._flight
                if held is not None and self._is_good_locked(held, now):
                    return held.token
                begins = flight is None
                if flight is None:
                    flight = self._flight = _Flight()
            if begins:
                return self._renew(flight)
            _refuse_reentry(flight)
            flight.over.wait()
            if flight.failure is not None:
                raise _for_user(_twin(flight.failure), held)
            # Either the renewal succeeded, or an interrupt ended it and another thread has to renew.

    def renewed(self, rejected: Secret) -> Secret:
        """Return the current token if it is not the rejected one, otherwise fetch and return a new token.

        Threads that call at the same time share one fetch. `get` no longer returns the rejected token.

        Raises:
            CredentialError: The renewal failed.
        """
        with self._lock:
            held = self._held
            if held is not None and held.token == rejected:
                self._held = evolve(held, lifetime_s=0.0)
        return self.get()

    def step(self) -> None:
        """Renew the token if it is due, and log a failure. For a thread that renews ahead of time."""
        now = self._now()
        with self._lock:
            idle = self._flight is None
            if self._held is None or not idle or self._next_locked(self._held, now) > _ROUNDING_S:
                return
            flight = self._flight = _Flight()
        try:
            self._renew(flight)
        except Exception as error:  # noqa: BLE001 - `get` raises when no good token is left
            _logger.warning("there is no new token: %s", mask_text(str(error)))

    def next_step_in_s(self) -> float | None:
        """Return the seconds until the next call of `step`, or None if there is no token to renew."""
        now = self._now()
        with self._lock:
            if self._flight is not None:
                return _SHORTEST_PAUSE_S
            return None if self._held is None else max(0.0, self._next_locked(self._held, now))

    def _renew(self, flight: _Flight) -> Secret:
        try:
            grant = self._fetch()
            now = self._now()
            renew_at = _RENEW_FROM + (_RENEW_TO - _RENEW_FROM) * self._draw()
            held = _Held(grant.token, now, lifetime_s(grant, now.wall_s), renew_at)
        except Exception as error:  # noqa: BLE001 - any failure counts, and is raised or logged
            return self._keep_or_raise(flight, error)
        except BaseException:
            self._land(flight, None, None)
            raise
        self._land(flight, held, None)
        return held.token

    def _keep_or_raise(self, flight: _Flight, error: Exception) -> Secret:
        held = self._land(flight, None, error)
        left_s = held.left_s(self._now()) if held else 0.0
        if held is None or left_s <= 0:
            raise _for_user(error, held)
        _logger.warning(
            "there is no new token yet, the old one is good for another %.0f s: %s",
            left_s,
            mask_text(str(error)),
        )
        return held.token

    def _land(self, flight: _Flight, held: _Held | None, failure: Exception | None) -> _Held | None:
        """End a renewal: keep its token or note its failure, and wake the threads that wait for it.

        Returns:
            The current token, new or old; None if there has been none.
        """
        now = self._now()
        with self._lock:
            if held is not None:
                self._before = self._held.token if self._held else None
                self._held, self._quiet_until_s = held, -math.inf
            if failure is not None:
                left_s = self._held.left_s(now) if self._held else 0.0
                pause_s = max(_SHORTEST_PAUSE_S, left_s / 4) if left_s > 0 else _LONGEST_PAUSE_S
                self._quiet_until_s = now.monotonic_s + min(pause_s, _LONGEST_PAUSE_S)
            if self._flight is flight:
                self._flight = None
            at_hand = self._held
        flight.failure = failure
        flight.over.set()
        return at_hand

    def _is_good_locked(self, held: _Held, now: _Moment) -> bool:
        """Return True if the token is fresh, or still good while a renewal runs or has just failed."""
        waiting = self._flight is not None or now.monotonic_s < self._quiet_until_s
        return held.is_fresh(now) or (waiting and held.left_s(now) > 0)

    def _next_locked(self, held: _Held, now: _Moment) -> float:
        return max(held.renew_in_s(now), self._quiet_until_s - now.monotonic_s)

    def _now(self) -> _Moment:
        return _Moment(self._clock.now(), self._clock.time())


def _for_user(error: Exception, held: _Held | None) -> Exception:
    """Return the `CredentialError` to raise after a failed renewal.

    If there was no token before, return `error` itself: it names the cause best, such as a wrong key.
    """
    if held is None:
        return error
    wrapped = CredentialError(f"the token is over and there is no new one: {mask_text(str(error))}")
    wrapped.__cause__ = error
    return wrapped


def _twin(error: Exception) -> Exception:
    """Return a copy of an error for another thread, or a `CredentialError` for an error of another package.

    If many threads raised the same error object, its traceback would show frames of all of them.
    """
    if not isinstance(error, TinkerError):
        return CredentialError(f"no token is to be had: {mask_text(str(error)) or type(error).__name__}")
    twin = copy.copy(error)
    twin.__cause__ = error.__cause__
    return twin


def _refuse_reentry(flight: _Flight) -> None:
    if flight.thread == threading.get_ident():
        raise CredentialError("the token exchange asked for a token; it must use the long-lived credential")


def _token_in(reply: Reply) -> Secret | None:
    """Return the token in an answer, or None.

    This function does not raise, so that no traceback contains a frame that saw the token.
    """
    try:
        tree = json.loads(reply.body)
    except (ValueError, RecursionError):
        return None
    token = tree.get("jwt") if isinstance(tree, dict) else None
    if not isinstance(token, str) or not token or not all("!" <= character <= "~" for character in token):
        return None
    return Secret(token)


def _date_of(reply: Reply) -> float | None:
    date = http_date(reply.headers.get("date"))
    return None if date is None else date.timestamp()


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
    return float(value) if good else None


def rejects_token(header: str | None) -> bool:
    """Return True if the server rejects the credential as an invalid token, so that a new one may help.

    Args:
        header: the value of `WWW-Authenticate`; commas separate several challenges.

    >>> rejects_token('Basic realm="x", Bearer Error = INVALID_TOKEN')
    True
    >>> rejects_token('Bearer error_description="not error=invalid_token", error="insufficient_scope"')
    False
    """
    return any(
        (found[1] or "").lower() == "error" and _unquoted(found[2]).lower() == "invalid_token"
        for found in re.finditer(_PART, header or "", re.DOTALL)
    )


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:].removesuffix('"')) if value.startswith('"') else value
