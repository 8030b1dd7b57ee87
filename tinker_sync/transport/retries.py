"""The retries of calls: a `Call` becomes a `Reply`, or one of the public errors.

A *try* is one attempt to send a call. `Judge` decides about its answer, or about the failure to get one, by
the policy in `_base.policy`: `Retry` (wait, then send again), `Fatal` (raise), or None (keep the answer).
`Tries` counts the tries of a call and carries the decisions out. `Caller` sends the tries of a blocking call;
the reactor sends the requests of training clients, with `Tries` too, and those of samples. All tries of a
call carry the same idempotency key; a GET and a HEAD get none. Each try carries the number of earlier tries.
If the server may have carried out a call, the call is repeated only if it is marked as repeatable or the
server asks for the retry. `Caller.close` interrupts a pause at once.

Many threads may call at the same time. Each waits in its own call and holds no lock meanwhile.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeVar

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, http_date, in_seconds
from tinker_sync._base.log import Log
from tinker_sync._base.numbers import unique_keys
from tinker_sync._base.policy import (
    EMPTY_400,
    UNREADABLE,
    Ledger,
    Meaning,
    Stage,
    delay_s,
    proves_refusal,
    rule_for,
)
from tinker_sync._base.secret import Secret, mask_text
from tinker_sync.config import Settings
from tinker_sync.config.settings import DefaultInt
from tinker_sync.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    RequestInfo,
    TinkerError,
)
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.request import IDEMPOTENCY_KEY

LONGEST_HINT_S: Final = 120.0
"""The longest pause that a server gets by asking for it: a wrong header must not stop a client for hours."""
# If neither the call nor the settings have a deadline, no new try begins after this time. A try under way
# ends by its own timeouts. Servers that restart are back within this time, so patient calls use all of it.
PATIENCE_S: Final = 300.0
_MAX_NOTES: Final = 100
ErrorT = TypeVar("ErrorT", bound=TinkerError)
T = TypeVar("T")
# A call that fails for longer than this is logged, because minutes of silence look like a hang.
QUIET_S: Final = 2.0
NAME_EVERY_S: Final = 60.0
_logger: Final = Log(__name__)


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
    _logger.warning("the server asks for a pause of %s; this client asks again after %s", wish, wait)


# ---------------------------------------------------- the tries


class Sender(Protocol):
    """An object that makes one attempt to send a call, such as `Http`."""

    def send(self, call: Call) -> Reply: ...


class Caller:
    """A sender of calls that repeats a failed call if another try may succeed. Thread-safe.

    Args:
        http: sends each try.
        settings: the number of retries and the deadline, for calls that set none.
        clock: the source of time; it also waits for the pauses.
        draw: returns random numbers from 0 to 1, for the jitter of pauses.
        journal: records the pauses.
        secrets: returns the values to mask in errors.
    """

    def __init__(
        self,
        http: Sender,
        settings: Settings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        draw: Callable[[], float] = random.random,
        journal: Journal | None = None,
        secrets: Callable[[], Iterable[Secret]] | None = None,
    ) -> None:
        self._http = http
        self._settings = settings
        self._clock = clock
        self._draw = draw
        self._journal = journal or Journal()
        self._secrets = secrets or (lambda: settings.secrets)
        self.judge = Judge(settings.base_url, clock, self._secrets)
        """The judge that decides about retries, for code that sends the requests itself."""
        self._closing = threading.Event()
        self.next_key = unique_keys().__next__
        """Returns a new idempotency key, by which the server recognises the tries of one call."""
        self._notes_lock = threading.Lock()
        self._notes: set[str] = set()  # guarded by _notes_lock; deprecation notes already logged

    def call(self, call: Call) -> Reply:
        """Send a call, repeat it after a failure that may pass, and return the good answer.

        An answer is good if it is a 2xx, or a redirect that the call does not follow.

        Raises:
            APIStatusError: The server refused the call, or asked the client to try later for too long.
            APIConnectionError: No answer came, or the client was closed meanwhile.
            CredentialError: The call needs a key and none is usable.
            TinkerError: Another error of `Http.send`, such as a certificate file that cannot be used.
        """
        return self.read(call, lambda reply: reply)

    def read(self, call: Call, read: Callable[[Reply], T]) -> T:
        """Send a call, and return what `read` makes of the good answer (see `call`).

        The call is repeated after a failure that may pass, and if `read` cannot read the answer.

        Raises:
            APIResponseValidationError: `read` raised it, and the call must not be repeated or no try is left.
            TinkerError: As for `call`.
        """
        tries = self.tries(call)
        while True:
            found = tries.after(self._attempt(tries))
            if isinstance(found, Reply):
                try:
                    return read(found)
                except APIResponseValidationError as error:
                    found = tries.after_unreadable(error)
            self._clock.wait(self._closing, self._clock.shorten(found))

    def tries(self, call: Call) -> Tries:
        """Return a `Tries` for a call, for code that sends the requests itself."""
        return Tries(self, call, self._settings, self._clock)

    def _attempt(self, tries: Tries) -> Reply | SendFailed:
        call = tries.next_try()
        try:
            if self._closing.is_set():
                raise _closed(call)
            try:
                return self._http.send(call)
            except SendFailed as failed:
                if not self._closing.is_set():
                    return failed
                closed = _closed(call)
                closed.ambiguous = failed.maybe_received
                raise closed from failed
        except TinkerError as error:
            tries.explained(error)
            raise

    def pause_s(self, verdict: Retry, call: Call) -> float:
        """Return the pause before the next try of a call."""
        return delay_s(call.attempt, hint_s=verdict.after_s, draw=self._draw())

    def note_pause(self, call: Call, pause_s: float, error: APIError) -> None:
        """Record the pause before the next try of a call."""
        reason = str(error.status_code) if isinstance(error, APIStatusError) else type(error).__name__
        self._journal.retrying(call, pause_s, reason)

    def close(self) -> None:
        """Fail every call that waits for its next try, and every later call. May be called twice."""
        self._closing.set()

    def renew_after_fork(self) -> None:
        """Replace the locks, in a forked child: threads that only the parent has may hold them."""
        closing, self._closing = self._closing.is_set(), threading.Event()
        if closing:
            self._closing.set()
        self.next_key = unique_keys().__next__
        self._notes_lock = threading.Lock()

    def note_deprecation(self, reply: Reply, call: Call) -> None:
        """Log the server's note that a call is deprecated: each text once, and at most 100 texts."""
        note = reply.headers.get("x-deprecation-note")
        if not note:
            return
        note = mask_text(note, self._secrets())
        with self._notes_lock:
            new = note not in self._notes and len(self._notes) < _MAX_NOTES
            if new:
                self._notes.add(note)
        if new:  # logged once: some servers put it on every answer
            severe = reply.headers.get("x-deprecation-level", "").strip().lower() == "error"
            level = logging.ERROR if severe else logging.WARNING
            _logger.log(level, "%s %s: %s", call.method, call.path, note)


class Trouble:
    """A schedule of log lines about a call that keeps failing. For one thread at a time.

    >>> trouble = Trouble()
    >>> [trouble.is_due(now_s, pause_s=1.0) for now_s in (10.0, 11.0, 12.0, 70.0, 71.0)]
    [False, True, False, False, True]
    """

    __slots__ = ("_named_s", "since_s")

    def __init__(self) -> None:
        self.since_s: float | None = None
        """The moment of the first failure."""
        self._named_s: float | None = None

    def is_due(self, now_s: float, pause_s: float) -> bool:
        """Return True if a failure at `now_s`, before a pause of `pause_s`, is to be logged.

        A failure is not logged if its pause ends less than 2 s after the first failure. Of the others, at
        most one a minute is logged.
        """
        if self.since_s is None:
            self.since_s = now_s
        if now_s + pause_s - self.since_s < QUIET_S:
            return False
        if self._named_s is not None and now_s - self._named_s < NAME_EVERY_S:
            return False
        self._named_s = now_s
        return True


class Tries:
    """The tries of one call, and the decision after each. For one thread at a time.

    The owner sends the call that `next_try` returns, passes the outcome to `after`, and waits for the pause
    that `after` returns.
    """

    __slots__ = (
        "_began_s",
        "_call",
        "_caller",
        "_clock",
        "_cuts_tries",
        "_ledger",
        "_lost",
        "_patience_s",
        "_paused_s",
        "_retries",
        "_trouble",
        "_until_s",
    )

    def __init__(self, caller: Caller, call: Call, settings: Settings, clock: Clock) -> None:
        deadline_s = settings.deadline_s if call.deadline_s is None else call.deadline_s
        counted = call.max_retries is not None or not isinstance(settings.max_retries, DefaultInt)
        now_s = clock.now()
        self._caller = caller
        self._call = _keyed(call)
        self._clock = clock
        self._retries = settings.max_retries if call.max_retries is None else call.max_retries
        # For so long, a try may begin even if no retries are left. A clock may shorten pauses; they count in
        # full, so that the number of tries stays the same.
        self._patience_s = PATIENCE_S if call.patient and not counted else 0.0
        self._began_s, self._paused_s = now_s, 0.0
        # No try begins after this moment of the clock. A deadline also ends a try under way.
        self._until_s = now_s + (PATIENCE_S if deadline_s is None else deadline_s)
        self._cuts_tries = deadline_s is not None
        self._ledger = Ledger(Stage.CALL)
        self._lost = False  # the server may have carried out a try whose answer did not arrive
        self._trouble: Trouble | None = None

    def next_try(self) -> Call:
        """Return the call to send now. It carries the time left until the deadline, if there is one."""
        if not self._cuts_tries or (self._call.attempt == 1 and self._call.deadline_s is not None):
            return self._call
        return self._call.but(deadline_s=max(self._until_s - self._clock.now(), 0.0))

    def after(self, outcome: Reply | SendFailed) -> Reply | float:
        """Return the answer if the call succeeded, else the seconds to wait before the next try.

        Raises:
            APIError: The call has failed, or no try is left.
        """
        caller, call = self._caller, self._call
        if isinstance(outcome, SendFailed):
            found: Verdict = caller.judge.failure(outcome, call)
        else:
            caller.note_deprecation(outcome, call)
            if 200 <= outcome.status < 300:
                return outcome
            judged = caller.judge.reply(outcome, call, self._ledger)
            if judged is None:
                return outcome
            found = judged
            if outcome.resent:
                found.error.ambiguous = True
                found.error.attempts = call.attempt + 1
        if isinstance(found, Fatal):
            raise self.explained(found.error)
        return self._pause_before(found)

    def after_unreadable(self, error: APIResponseValidationError) -> float:
        """Return the seconds to wait before the next try, after an answer that could not be read.

        Raises:
            APIResponseValidationError: the given error, if the call must not be repeated or no try is left.
        """
        error.ambiguous = True  # the server has answered, so it may have carried out the call
        if not self._call.repeatable or self._ledger.is_spent(UNREADABLE):
            raise error
        # On a connection that is an answer behind, every answer belongs to an earlier request.
        return self._pause_before(Retry(error, fresh=True))

    def _pause_before(self, found: Retry) -> float:
        """Count a retry, report it, and return the seconds to wait before it."""
        caller, call = self._caller, self._call
        pause_s = caller.pause_s(found, call)
        now_s = self._clock.now()
        self._spend(found, now_s, pause_s)
        caller.note_pause(call, pause_s, found.error)
        self._trouble = self._trouble or Trouble()
        if self._trouble.is_due(now_s, pause_s):
            _logger.warning("%s Still trying.", found.error)
        self._call = call.but(attempt=call.attempt + 1, fresh=call.fresh or found.fresh)
        return pause_s

    def explained(self, error: ErrorT) -> ErrorT:
        """Return the error. Set its `ambiguous` to True if the server may have carried out an earlier try."""
        error.ambiguous = error.ambiguous or self._lost
        return error

    def _spend(self, verdict: Retry, now_s: float, pause_s: float) -> None:
        """Count a retry that begins after a pause.

        Raises:
            APIError: the error of `verdict`, because no retry or no time is left.
        """
        waited_s = max(now_s - self._began_s, self._paused_s) + pause_s
        spent = self._retries <= 0 and waited_s >= self._patience_s
        if spent or now_s + self._clock.shorten(pause_s) >= self._until_s:
            raise self.explained(verdict.error)
        self._paused_s += pause_s
        self._lost = self._lost or _may_have_been_done(verdict.error)
        self._retries -= 1


def _may_have_been_done(error: APIError) -> bool:
    cause = error.__cause__
    if isinstance(cause, SendFailed):
        return cause.maybe_received
    if isinstance(error, APIStatusError) and not error.ambiguous:
        return not proves_refusal(error.status_code, error.body)
    return error.ambiguous


def _keyed(call: Call) -> Call:
    """Return the call with an idempotency key. A call that has one, a GET and a HEAD stay as they are."""
    named = IDEMPOTENCY_KEY.lower() in call.headers.lines
    if call.idempotency_key or named or call.method in ("GET", "HEAD"):
        return call
    return call.but(idempotency_key=str(uuid.uuid4()))


def _closed(call: Call) -> APIConnectionError:
    return APIConnectionError(
        "The client was closed.", method=call.method, path=call.path, attempts=call.attempt
    )
