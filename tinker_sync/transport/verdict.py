"""The decision about the answer of a call, or about the failure to get one, by the policy in `_base.policy`.

`Judge` turns an answer or a `SendFailed` into `Retry` (wait, then send again), `Fatal` (raise), or None (keep
the answer). The caller of `Judge` carries the decision out. Pure except for the clock, so any thread may call
it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from tinker_sync._base.clock import Clock, http_date, in_seconds
from tinker_sync._base.policy import EMPTY_400, Ledger, Meaning, rule_for
from tinker_sync._base.secret import Secret, mask_text
from tinker_sync.errors import APIConnectionError, APIError, APIStatusError, APITimeoutError, RequestInfo
from tinker_sync.transport.call import Call, Reply, SendFailed

LONGEST_HINT_S: Final = 120.0
"""The longest pause that a server gets by asking for it: a wrong header must not stop a client for hours."""

_log = logging.getLogger(__name__)


class Retry(NamedTuple):
    """The decision to send again after a pause."""

    error: APIError
    """The error to raise if no tries are left."""
    after_s: float | None = None
    """The pause that the server asked for."""
    fresh: bool = False
    """True to send over a new connection."""


class Fatal(NamedTuple):
    """The decision to give up: another try would end the same way, or might apply the call twice.

    The server can also ask for no retry.
    """

    error: APIError


Verdict = Retry | Fatal


class Judge:
    """A judge that decides if a call is sent again after an answer or a failure.

    Immutable; any thread may call it.

    Args:
        base_url: the base of the addresses in errors.
        clock: the local time, with which the date in a `Retry-After` is compared.
        secrets: returns the values to mask in an error.
    """

    def __init__(
        self, base_url: str, clock: Clock, secrets: Callable[[], Iterable[Secret]] = lambda: ()
    ) -> None:
        self._base_url = base_url
        self._clock = clock
        self._secrets = secrets

    def reply(self, reply: Reply, call: Call, ledger: Ledger) -> Verdict | None:
        """Return the verdict on an answer, or None for a 2xx or a redirect that the call does not follow.

        The header `x-should-retry` with "true" or "false" overrides the policy. Only the policy's limits of
        the retries after a 4xx still hold. A "false" has no effect on a `patient` call: servers and proxies
        send it with failures that pass, and a script would end at the first one.

        Args:
            reply: the answer.
            call: the call that was sent; its `attempt` counts the tries so far.
            ledger: counts the failures of the call.
        """
        if reply.ok or (300 <= reply.status < 400 and not call.follow_redirects):
            return None
        after_s = retry_after_s(reply.headers, self._clock.time())
        error = self._status_error(reply, call, after_s)
        wish = reply.headers.get("x-should-retry", "").strip().lower()
        if wish == "false" and not call.patient:
            return Fatal(error)
        status = EMPTY_400 if _is_empty_400(reply) else reply.status
        rule = rule_for(status, ledger.stage)
        if (
            rule.passes
            and ledger.is_spent(status)
            and not (status >= 500 and (call.needed or wish == "true"))
        ):
            return Fatal(error)
        if wish == "true":
            return Retry(error, after_s)
        safe = rule.meaning in (Meaning.UNTOUCHED, Meaning.THROTTLED) or call.repeatable
        if not rule.passes or rule.meaning is Meaning.BLOCKED or not safe:
            return Fatal(error)
        return Retry(error, after_s, fresh=status == EMPTY_400)

    def failure(self, failed: SendFailed, call: Call) -> Verdict:
        """Return the verdict on an attempt without an answer."""
        error = self._connection_error(failed, call)
        if failed.final or (failed.maybe_received and not call.repeatable):
            return Fatal(error)
        return Retry(error)

    def _request(self, call: Call) -> RequestInfo:
        query = f"?{call.query}" if call.query else ""
        return RequestInfo(method=call.method, url=self._base_url + call.path + query, headers=call.headers)

    def _status_error(self, reply: Reply, call: Call, after_s: float | None) -> APIStatusError:
        return APIStatusError.from_reply(
            reply.status,
            reply.headers,
            reply.body,
            request=self._request(call),
            attempts=call.attempt,
            path=call.path,
            retry_after_s=after_s,
            secrets=self._secrets(),
        )

    def _connection_error(self, failed: SendFailed, call: Call) -> APIConnectionError:
        kind = APITimeoutError if failed.timed_out else APIConnectionError
        text = mask_text(failed.message, self._secrets())
        if failed.maybe_received and not call.repeatable:
            text += "; the server may have received the call, so it is not sent again: it could apply twice"
        error = kind(
            f"{text[:1].upper()}{text[1:]}.", self._request(call), path=call.path, attempts=call.attempt
        )
        error.__cause__ = failed
        error.ambiguous = failed.maybe_received
        return error


def _is_empty_400(reply: Reply) -> bool:
    length = reply.headers.get("content-length", "0").strip()
    return reply.status == 400 and length == "0" and not reply.body


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Return the pause that a server asks for, at most `LONGEST_HINT_S`, or None.

    A longer pause is logged once. The headers are `retry-after-ms`, or `retry-after` with seconds or a date.

    Args:
        headers: the answer's headers, by lower-case name, or a mapping that ignores case.
        now_s: the local time, in seconds since the epoch. If the answer has a `Date`, that counts instead:
            the same clock set both dates, and the local one may be wrong.

    >>> retry_after_s({"retry-after": "1.5"}, 0), retry_after_s({"retry-after-ms": "200"}, 0)
    (1.5, 0.2)
    >>> retry_after_s({"retry-after": "Thu, 01 Jan 1970 00:00:30 GMT"}, 10)
    20.0
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return _usable(milliseconds / 1000)
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None:
        return _usable(seconds)
    moment = _moment(value)
    if moment is None:
        return None
    servers_now = _moment(headers.get("date"))
    return _usable(moment - (now_s if servers_now is None else servers_now))


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _moment(text: str | None) -> float | None:
    date = http_date(text)
    return None if date is None else date.timestamp()


def _usable(seconds: float) -> float | None:
    if seconds > LONGEST_HINT_S:
        _log_cut(in_seconds(seconds))
    return min(seconds, LONGEST_HINT_S) if seconds > 0 else None


@lru_cache(maxsize=256)  # each text once, though thousands of answers may carry it
def _log_cut(wish: str) -> None:
    wait = in_seconds(LONGEST_HINT_S)
    _log.warning("the server asks for a pause of %s; this client asks again after %s", wish, wait)
