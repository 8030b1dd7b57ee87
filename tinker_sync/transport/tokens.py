"""Short-lived tokens: how long one lasts, and a cache that renews it in time.

Guarantees: one renewal at a time, whatever the number of threads; nobody waits for it while the token at hand
is good; a failed renewal hurts nobody before the token's end; however short tokens live, there are pauses.
Assumes that `fetch` neither takes a token from this cache nor waits for a thread that does.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
import math
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final

from attrs import evolve, frozen

from tinker_sync._clock import Clock
from tinker_sync._secret import Secret, mask_text
from tinker_sync.errors import APIResponseValidationError, CredentialError, TinkerError
from tinker_sync.transport.call import Reply

_logger = logging.getLogger(__name__)

# A token is renewed ahead at about half of its life, so that many clients do not ask at the same moment.
_RENEW_FROM: Final = 0.45
_RENEW_TO: Final = 0.55
# Whoever needs a token fetches a new one when this little is left: a minute, or a tenth of a short life.
_MARGIN_S: Final = 60.0
_MARGIN: Final = 0.1
# Between two renewals ahead, and between two tries of one.
_SHORTEST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 60.0
# Of a token that does not tell: opaque ones, and what credential commands print.
_ASSUMED_LIFETIME_S: Final = 60.0
# A token is used for this long even if it claims to be over: clocks of servers are not perfect.
_SHORTEST_LIFETIME_S: Final = 1.0
# Sums of times come out a little off; without this a thread would come back after a pause of nothing.
_ROUNDING_S: Final = 0.001
# The Date header has whole seconds, and the answer took a while to come.
_DATE_TOLERANCE_S: Final = 5.0


@frozen
class Grant:
    """A token as it was received, and the server's time at that moment if it told."""

    token: Secret
    server_time_s: float | None = None


def read_grant(reply: Reply) -> Grant:
    """Take the token out of the answer of the token exchange.

    Raises:
        APIResponseValidationError: It holds none. The text does not quote it.

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
    """Read what a JWT says about itself, without checking its signature; nothing for other tokens.

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
    """How long a token lasts from its receipt.

    By the server's clock where it is known; by ours where that fits what the token says of its own life (our
    clock may be wrong by any amount); else the whole life that the token claims.

    Args:
        grant: The token, just received.
        time_s: Our wall clock at its receipt.
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
    """A token at hand."""

    token: Secret
    received: _Moment
    lifetime_s: float
    renew_at: float
    """The part of its life after which it is renewed ahead."""

    def age_s(self, now: _Moment) -> float:
        """By the clock that went further: a suspended machine stops the monotonic one."""
        return max(now.monotonic_s - self.received.monotonic_s, now.wall_s - self.received.wall_s)

    def left_s(self, now: _Moment) -> float:
        return self.lifetime_s - self.age_s(now)

    def renew_in_s(self, now: _Moment) -> float:
        return max(self.renew_at * self.lifetime_s, _SHORTEST_PAUSE_S) - self.age_s(now)

    def is_fresh(self, now: _Moment) -> bool:
        return self.left_s(now) > min(_MARGIN_S, _MARGIN * self.lifetime_s)


class _Flight:
    """One renewal under way. Its fetcher alone writes; the others read after `over`."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.failure: Exception | None = None
        self.thread = threading.get_ident()
        self.process = os.getpid()


class TokenCache:
    """The token of the moment. Thread-safe.

    Args:
        fetch: Gets a new token; blocks as long as it takes, and limits its own time.
        clock: The time.
        draw: Random numbers from 0 to 1, for the moment of a renewal.

    Nothing is renewed by itself: `get` does it when it must, and a thread that calls `step` after every
    `next_step_in_s` does it ahead of time.
    """

    def __init__(
        self, fetch: Callable[[], Grant], clock: Clock, draw: Callable[[], float] = random.random
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._held: _Held | None = None  # guarded by _lock
        self._before: Secret | None = None  # guarded by _lock; some calls under way still carry it
        self._flight: _Flight | None = None  # guarded by _lock
        self._quiet_until_s = -math.inf  # guarded by _lock; after a failure no early renewal before this

    def renew_after_fork(self) -> None:
        """Replace the lock, in a forked child, and forget the parent's renewal; the token stays good."""
        self._lock = threading.Lock()
        self._flight = None

    @property
    def known(self) -> tuple[Secret, ...]:
        """The token at hand and the one before it."""
        with self._lock:
            tokens = (self._held.token if self._held else None, self._before)
        return tuple(token for token in tokens if token)

    def get(self) -> Secret:
        """Give a token that is good for a while, renewing it first if need be.

        Raises:
            CredentialError: The old one is over and there was no new one.
            Exception: Whatever `fetch` raised, when there never was a token.
        """
        while True:
            now = self._now()
            with self._lock:
                held, flight = self._held, self._flight_locked()
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
            # Either there is a new token now, or its fetcher was interrupted and someone else has to do it.

    def renewed(self, rejected: Secret) -> Secret:
        """Give another token than the one the server rejected; the first thread that asks renews it.

        Raises:
            CredentialError: There is no new one. The rejected one is not used again.
        """
        with self._lock:
            held = self._held
            if held is not None and held.token == rejected:
                self._held = evolve(held, lifetime_s=0.0)
        return self.get()

    def step(self) -> None:
        """Renew the token if it is time to; a failure is logged. For a thread that does it ahead of time."""
        now = self._now()
        with self._lock:
            idle = self._flight_locked() is None
            if self._held is None or not idle or self._next_locked(self._held, now) > _ROUNDING_S:
                return
            flight = self._flight = _Flight()
        try:
            self._renew(flight)
        except Exception as error:  # noqa: BLE001 - whoever needs a token and has none gets the error
            _logger.warning("there is no new token: %s", mask_text(str(error)))

    def next_step_in_s(self) -> float | None:
        """When to call `step` next; None before the first token was fetched."""
        now = self._now()
        with self._lock:
            if self._flight_locked() is not None:
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
        """End a renewal: keep its token or note its failure, and let the others go on.

        Returns:
            The token now at hand, new or old.
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

    def _flight_locked(self) -> _Flight | None:
        """The renewal under way; in a forked child the parent's does not count, its thread is not here."""
        if self._flight is not None and self._flight.process != os.getpid():
            self._flight = None
        return self._flight

    def _is_good_locked(self, held: _Held, now: _Moment) -> bool:
        """Fresh; or still good, and a new one under way or just refused."""
        waiting = self._flight is not None or now.monotonic_s < self._quiet_until_s
        return held.is_fresh(now) or (waiting and held.left_s(now) > 0)

    def _next_locked(self, held: _Held, now: _Moment) -> float:
        return max(held.renew_in_s(now), self._quiet_until_s - now.monotonic_s)

    def _now(self) -> _Moment:
        return _Moment(self._clock.now(), self._clock.time())


def _for_user(error: Exception, held: _Held | None) -> Exception:
    """The error itself says most when there never was a token: a wrong key, no network."""
    if held is None:
        return error
    wrapped = CredentialError(f"the token is over and there is no new one: {mask_text(str(error))}")
    wrapped.__cause__ = error
    return wrapped


def _twin(error: Exception) -> Exception:
    """The same error for another thread: the traceback of one raised in many would be of no use to any."""
    if not isinstance(error, TinkerError):
        return CredentialError(f"no token is to be had: {mask_text(str(error)) or type(error).__name__}")
    twin = copy.copy(error)
    twin.__cause__ = error.__cause__
    return twin


def _refuse_reentry(flight: _Flight) -> None:
    if flight.thread == threading.get_ident():
        raise CredentialError("the token exchange asked for a token; it must use the long-lived credential")


def _token_in(reply: Reply) -> Secret | None:
    """Not raising keeps the frames that saw the token out of every traceback."""
    try:
        tree = json.loads(reply.body)
    except (ValueError, RecursionError):
        return None
    token = tree.get("jwt") if isinstance(tree, dict) else None
    if not isinstance(token, str) or not token or not all("!" <= character <= "~" for character in token):
        return None
    return Secret(token)


def _date_of(reply: Reply) -> float | None:
    try:
        return parsedate_to_datetime(reply.headers["Date"]).timestamp()
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
    return float(value) if good else None
