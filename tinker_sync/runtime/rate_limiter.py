"""`RateLimiter`: slows down the clients of one server and key when the server asks for fewer requests.

One limiter belongs to a base URL and a key; `shared_rate_limiter` returns the same one to all clients of this
process that use both. Each client has a `Gate` of its own, which it can close without closing the others.

    permit = gate.acquire(timeout)      # waits while the limiter is closed or paces the requests
    ... send ...
    gate.succeeded(permit)              # or gate.throttled(permit, delay_s); neither, if the request failed

While the limiter is open, a request passes after one look at an attribute, and nothing is counted. After a
refusal (429) the limiter closes for a while. Then it lets requests pass at a rate, which `SendRate` sets:
further refusals lower it and successes raise it, until it limits nothing.

The requests that wait form one line. The thread of the first one watches the time. The others sleep until
they are admitted or come first, so the end of a pause wakes one thread, not all. Any thread may use all of
this. The limiter does not see the requests themselves.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, in_seconds
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import copy_exception
from tinker_sync.runtime.lazy import Shared

FIRST_RATE: Final = 50.0
"""The requests a second after the first refusal: between the limits of slow and fast servers."""
# Faster than one process sends, so a higher rate limits nothing.
_OPEN_RATE: Final = 3000.0
# The growth with each success, so the growth a second as a share of the rate: doubled each second while the
# limit is unknown, then slowly, because each refusal may cost a pause of a second.
_FAST: Final = 0.7
_SLOW: Final = 0.05
# A refusal lowers the rate by what the pauses cost: more than half of the time, or more than a third. Rarer
# refusals may come from other clients or from one bad machine, and then a lower rate would help nobody.
_FAR_TOO_HIGH: Final = 0.5
_TOO_HIGH: Final = 0.8
_WORTH_IT: Final = 2.0  # times as long between pauses as within them
_KEPT: Final = 0.7  # the weight of the time before the latest refusal
# After this time without a refusal the limit may have changed; after the second one it is forgotten.
RECENT_S: Final = 10.0
_FORGET_S: Final = 60.0
# The pauses after refusals that name no time: they double until the server accepts a request.
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 2.0
# A thread that wakes this much too late makes up for the requests that it would have sent.
_CREDIT_S: Final = 0.01
_WORTH_A_LINE_S: Final = 10.0
_SENT_AT_FIRST: Final = 16
_SENT_AT_ONCE: Final = 400

_log = logging.getLogger("tinker_sync.queue")


def key_fingerprint(key: str) -> str:
    """Return a hash that identifies a key to the limiters of this process; the key cannot be read from it.

    >>> key_fingerprint("tml-example") == key_fingerprint("tml-example")
    True
    """
    return f"{hash(key) & 0xFFFF_FFFF_FFFF_FFFF:016x}"  # hashlib would load OpenSSL


class LimiterState(Enum):
    """The state of a limiter: all requests pass, none passes, or they pass at a rate.

    OPEN -> CLOSED             a refusal or a pause
    CLOSED -> CLOSED           another refusal or pause: the later end counts
    CLOSED -> REOPENING        the pause is over
    REOPENING -> CLOSED        a refusal or a pause
    REOPENING -> OPEN          the rate limits nothing and no request waits

    Illegal: CLOSED -> OPEN, which would let all waiting requests go at once, and OPEN -> REOPENING, since
    only a refusal or a pause sets a rate.
    """

    OPEN = "open"
    CLOSED = "closed"
    REOPENING = "reopening"


class Permit:
    """A permission to send one request. A `counted` one was given while a rate limited the requests."""

    __slots__ = ("counted", "epoch")

    def __init__(self, epoch: int, counted: bool) -> None:
        self.epoch = epoch
        self.counted = counted


class SendRate:
    """The rate at which a limiter lets requests pass, and the pause during which it lets none pass.

    Servers limit the rate of requests, their number in a window of time, or the work under way. All of them
    refuse alike, so this class does not ask which it is: it looks for the rate at which refusals cost little
    time.
    Refusals of requests that were under way together count once, and so do those without a success in
    between: they lengthen the pause, because they say nothing about the rate.

    Arithmetic without a lock: the limiter holds its lock when it calls a method, except for `is_closed`.

    Args:
        clock: measures time.
        pace: the factor by which pauses are multiplied.
    """

    def __init__(self, clock: Clock, pace: float) -> None:
        self._clock = clock
        self._pace = pace
        self.a_second = math.inf
        """The requests that pass in a second, once the pause is over."""
        self.epoch = 0
        """Grows with each refusal that counts; a permit of an earlier epoch says nothing about the rate."""
        self.closed_until_s = -math.inf
        """The end of the latest pause; it may be in the past."""
        self._first = FIRST_RATE
        self._next_s = -math.inf  # when the next request may pass
        self._growth = _FAST
        self._accepted = False  # since the last refusal
        self._reported = False  # a report has closed the limiter, and nothing was accepted since
        self._pause_s = _FIRST_PAUSE_S
        self._paused_s = self._sent_s = 0.0  # the time within and between the latest pauses
        self._refused_s = -math.inf  # when the latest pause began

    def is_closed(self) -> bool:
        """Return True during a pause."""
        return self._clock.now() < self.closed_until_s

    def passes_in_s(self) -> float:
        """Return the seconds until the next request may pass; 0 if one may pass now."""
        now = self._clock.now()
        if now > self.closed_until_s + _FORGET_S:
            self.a_second, self._reported = math.inf, False
        next_s = -math.inf if math.isinf(self.a_second) else self._next_s
        return max(self.closed_until_s - now, next_s - now, 0.0)

    def count(self) -> Permit:
        """Return a permit for a request that passes now."""
        self._next_s = max(self._next_s, self._clock.now() - _CREDIT_S) + 1 / self.a_second
        return Permit(self.epoch, counted=True)

    def note_success(self, permit: Permit) -> None:
        """Raise the rate, because the server has accepted a request that was sent after the last refusal."""
        if permit.epoch != self.epoch:
            return
        self._accepted, self._reported, self._pause_s = True, False, _FIRST_PAUSE_S
        if self._clock.now() > self.closed_until_s + RECENT_S:
            self._growth = _FAST
        self.a_second += self._growth
        if self.a_second >= _OPEN_RATE:
            self.a_second = math.inf

    def refuse(self, permit: Permit, delay_s: float | None) -> bool:
        """Close for `delay_s`, because the server has refused a request; None if it has named no time.

        Refusals of requests that were under way together count as one. Return True for the first of them.
        """
        first = permit.epoch == self.epoch
        if first:
            self._lower()
            if delay_s is None:
                delay_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.close(delay_s or 0.0)
        return first

    def follow(self, delay_s: float) -> None:
        """Close for `delay_s`, because the server has refused a request of another process."""
        if math.isinf(self.a_second) or not self.is_closed():
            self._lower()
        self.close(delay_s)

    def pause(self, delay_s: float) -> None:
        """Close for `delay_s`, and then let requests pass at a rate."""
        if math.isinf(self.a_second):
            self._lower()
        self.close(delay_s)

    def hear_report(self) -> bool:
        """Return True if something was accepted since the last report, so that this one counts.

        Each request that waits at the server repeats the report with each of its polls.
        """
        heard, self._reported = self._reported, True
        return not heard

    def share_among(self, processes: int) -> None:
        """Divide the first rate after a refusal among the processes that share the server's limit."""
        self._first = FIRST_RATE / max(1, processes)
        if self.is_closed():
            self.a_second = min(self.a_second, self._first)

    def close(self, delay_s: float) -> None:
        """Let no request pass for `delay_s`. The later end of two pauses counts."""
        self.closed_until_s = max(self.closed_until_s, self._clock.now() + max(delay_s, 0.0) * self._pace)

    def _lower(self) -> None:
        self.epoch += 1
        if not (self._accepted or math.isinf(self.a_second)):
            return  # refused again: the pause goes on
        now = self._clock.now()
        if math.isinf(self.a_second):
            self.a_second, self._growth, self._pause_s = self._first, _FAST, _FIRST_PAUSE_S
            self._paused_s = self._sent_s = 0.0
        else:
            self._paused_s = _KEPT * self._paused_s + self.closed_until_s - self._refused_s
            self._sent_s = _KEPT * self._sent_s + max(now - self.closed_until_s, 0.0)
            if self._sent_s < _WORTH_IT * self._paused_s:
                self.a_second *= _FAR_TOO_HIGH if self._sent_s < self._paused_s else _TOO_HIGH
                self._growth = _SLOW
            elif self._sent_s > 2 * _WORTH_IT * self._paused_s:
                self._growth = _FAST
        self._refused_s, self._accepted = now, False


class _Turn:
    """The place of a waiting request in the line. The limiter's lock guards all attributes but the event."""

    __slots__ = ("event", "gate", "permit")

    def __init__(self, gate: Gate) -> None:
        self.event = threading.Event()
        self.gate = gate
        self.permit: Permit | None = None


def _wake(*turns: _Turn | None) -> None:
    for turn in turns:
        if turn is not None:
            turn.event.set()


class RateLimiter:
    """A limiter of the requests to one server with one API key. Thread-safe.

    >>> limiter = RateLimiter()
    >>> gate = limiter.gate()
    >>> gate.throttled(gate.acquire(), delay_s=2)
    >>> limiter.state(), gate.try_acquire() is None
    (<LimiterState.CLOSED: 'closed'>, True)
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, pace: float = 1.0) -> None:
        self._clock = clock
        # The permit while open, else None; written under _lock, read without.
        self._free: Permit | None = Permit(0, counted=False)
        self._lock = threading.Lock()
        self._rate = SendRate(clock, pace)  # guarded by _lock, except where its attributes differ
        self._line: deque[_Turn] = deque()  # guarded by _lock
        self._announce: Callable[[float], None] | None = None  # written once
        self._accepted = 0  # up to _SENT_AT_ONCE; not exact, because it is counted without the lock
        _fork.renew_in_child(self)

    def gate(self) -> Gate:
        """Return a new gate, through which one client uses this limiter."""
        return Gate(self)

    def state(self) -> LimiterState:
        """Return the current state."""
        if self._free is not None:
            return LimiterState.OPEN
        return LimiterState.CLOSED if self._rate.is_closed() else LimiterState.REOPENING

    def close_for(self, delay_s: float, *, reported: bool = False) -> None:
        """Let no request pass for `delay_s`, and few afterwards, because the server has paused the account.

        Args:
            delay_s: the length of the pause.
            reported: True for a report that the server repeats. It has no effect unless a request was
                accepted since the last one, because the limiter would never open again.

        >>> limiter = RateLimiter()
        >>> limiter.close_for(5)
        >>> limiter.state()
        <LimiterState.CLOSED: 'closed'>
        """
        with self._lock:
            closes = not reported or self._rate.hear_report()
            if closes:
                self._rate.pause(delay_s)
                self._free = None
        if closes:
            self._tell(delay_s)

    def share(self, announce: Callable[[float], None]) -> None:
        """Set a function that passes the delay of each refusal or pause to the limiters of other processes.
        Refusals of requests that were under way together count as one. No lock is held during the call.

        >>> limiter, heard = RateLimiter(), []
        >>> limiter.share(heard.append)
        >>> limiter.close_for(5)
        >>> heard
        [5]
        """
        self._announce = announce

    def count_sharers(self, processes: int) -> None:
        """Divide the first rate after a refusal among the processes that share the server's limit.
        A closed limiter reopens with a rate of at most that size.

        >>> limiter = RateLimiter()
        >>> limiter.follow(2)
        >>> limiter.count_sharers(4)
        >>> limiter
        <RateLimiter closed, 12.5 a second, 0 in line>
        """
        with self._lock:
            self._rate.share_among(processes)

    def follow(self, delay_s: float) -> None:
        """Close for `delay_s`, because the server has refused a request of another process.
        Refusals that arrive while the limiter is closed count as one: they only extend the time.

        >>> limiter = RateLimiter()
        >>> limiter.follow(5)
        >>> limiter.state()
        <LimiterState.CLOSED: 'closed'>
        """
        with self._lock:
            self._rate.follow(delay_s)
            self._free = None

    @property
    def sent_at_once(self) -> int:
        """The most requests of a client in their send phase: few at first, more as the server accepts them.

        So a server with a low limit, which nobody knows before its first refusal, does not refuse hundreds.

        >>> RateLimiter().sent_at_once
        16
        """
        return min(_SENT_AT_FIRST + 2 * self._accepted, _SENT_AT_ONCE)

    def recently_closed(self) -> bool:
        """Return True if the limiter is closed, or was closed within the last `RECENT_S` seconds."""
        return self._clock.now() < self._rate.closed_until_s + RECENT_S

    def pause_left_s(self) -> float:
        """Return the seconds until the present pause is over; 0 without a pause."""
        return max(self._rate.closed_until_s - self._clock.now(), 0.0)

    def renew_after_fork(self) -> None:
        """In a forked child, keep the pause and the rate, and forget the requests of the parent."""
        self._lock = threading.Lock()
        self._line = deque()

    def __repr__(self) -> str:
        state = self.state()
        with self._lock:
            return (
                f"<RateLimiter {state.value}, {self._rate.a_second:.3g} a second, {len(self._line)} in line>"
            )

    # ---------------------------------------------------- for gates

    def _enter_locked(self, gate: Gate, turn: _Turn | None) -> Permit | None:
        """Return a permit if there is one now. Else put the turn, if given, into the line and return None.
        If the gate is closed, return None and do not use the line.
        """
        if gate._failure is not None:
            return None
        if not self._line:
            self._open_locked()
            if self._free is not None:
                return self._free
            if self._rate.passes_in_s() <= 0:
                return self._rate.count()
        if turn is not None:
            self._line.append(turn)
        return None

    def _open_locked(self) -> None:
        """Open the limiter if the rate limits nothing and no request waits."""
        rate = self._rate
        if self._free is None and not self._line and rate.passes_in_s() <= 0 and math.isinf(rate.a_second):
            self._free = Permit(rate.epoch, counted=False)

    def _admit_locked(self) -> list[_Turn]:
        """Admit turns in order while they may pass. Return those whose threads must wake: the admitted ones,
        and the one that now comes first.
        """
        admitted = []
        while self._line and self._rate.passes_in_s() <= 0:
            turn = self._line.popleft()
            turn.permit = self._rate.count()
            admitted.append(turn)
        self._open_locked()
        return [*admitted, self._line[0]] if admitted and self._line else admitted

    def _leave_locked(self, turns: list[_Turn]) -> _Turn | None:
        """Remove turns from the line. Return the new first turn if its thread must now watch the time."""
        if not turns:
            return None
        watched = self._line[0] in turns
        self._line = deque(turn for turn in self._line if turn not in turns)
        return self._line[0] if watched and self._line else None

    def _tell(self, delay_s: float) -> None:
        if delay_s >= _WORTH_A_LINE_S:
            _log.warning("samples pause for %s, because the server asks for it", in_seconds(delay_s))
        if self._announce is not None:
            self._announce(delay_s)


class Gate:
    """The access of one client to a rate limiter: it gives out permits and takes them back. Thread-safe.

    >>> gate = RateLimiter().gate()
    >>> permit = gate.acquire(timeout=1)
    >>> gate.succeeded(permit)
    """

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        # Written under the limiter's lock, read without; set once, final.
        self._failure: Exception | None = None

    def try_acquire(self, turn: _Turn | None = None) -> Permit | None:
        """Return a permit if there is one now, else None.

        Args:
            turn: put into the line if there is no permit; for the methods of this class.

        Raises:
            Exception: the gate is closed; a copy of the failure given to `close`.
        """
        limiter = self.limiter
        free = limiter._free
        if free is not None and self._failure is None:
            return free
        with limiter._lock:
            permit = limiter._enter_locked(self, turn)
        if permit is None and self._failure is not None:
            raise copy_exception(self._failure)
        return permit

    def acquire(self, timeout: float | None = None) -> Permit | None:
        """Wait for a permit and return it, or None if no permit comes within `timeout` seconds.
        A `timeout` of None stands for no limit.

        Raises:
            Exception: the gate is closed, now or during the wait; a copy of the failure given to `close`.
        """
        permit = self.try_acquire()
        if permit is not None:
            return permit
        turn = _Turn(self)
        permit = self.try_acquire(turn)
        return permit if permit is not None else self._wait(turn, math.inf if timeout is None else timeout)

    def lets_pass(self, permit: Permit) -> bool:
        """Return True if a request with this permit may still be sent.
        The sender asks right before it sends, because the limiter may have closed since it gave the permit.

        >>> gate = RateLimiter().gate()
        >>> permit = gate.acquire()
        >>> gate.limiter.close_for(5)
        >>> gate.lets_pass(permit)
        False
        """
        limiter = self.limiter
        if limiter._free is not None:
            return True
        rate = limiter._rate
        return permit.counted and permit.epoch == rate.epoch and not rate.is_closed()

    def succeeded(self, permit: Permit) -> None:
        """Note that the server has accepted the request, which raises a rate that limits the requests."""
        limiter = self.limiter
        if limiter._accepted < _SENT_AT_ONCE:
            limiter._accepted += 1
        if permit.counted:
            with limiter._lock:
                limiter._rate.note_success(permit)

    def throttled(self, permit: Permit, delay_s: float | None = None) -> None:
        """Close the limiter for a time, because the server asks for fewer requests.

        Args:
            permit: the permit of the refused request.
            delay_s: the time that the server has named; None if it has named none.

        >>> gate = RateLimiter().gate()
        >>> gate.throttled(gate.acquire(), 1.0)
        >>> gate.limiter
        <RateLimiter closed, 50 a second, 0 in line>
        """
        limiter = self.limiter
        with limiter._lock:
            first = limiter._rate.refuse(permit, delay_s)
            limiter._free = None
        if first:
            limiter._tell(limiter.pause_left_s())

    def close(self, failure: Exception) -> None:
        """Close the gate: waiting and later calls of `acquire` raise a copy of `failure`.
        Permits may still be given back.

        >>> gate = RateLimiter().gate()
        >>> gate.close(RuntimeError("closed"))
        >>> gate.acquire()
        Traceback (most recent call last):
            ...
        RuntimeError: closed
        """
        limiter = self.limiter
        with limiter._lock:
            if self._failure is None:
                self._failure = failure
            own = [turn for turn in limiter._line if turn.gate is self]
            watch = limiter._leave_locked(own)
        _wake(*own, watch)

    def _wait(self, turn: _Turn, timeout_s: float) -> Permit | None:
        clock = self.limiter._clock
        deadline_s = clock.now() + timeout_s
        try:
            while True:
                permit, sleep_s = self._look(turn)
                left_s = deadline_s - clock.now()
                if permit is not None or left_s <= 0:
                    return permit or self._leave(turn)
                clock.wait(turn.event, min(sleep_s, left_s))
        except BaseException:
            self._leave(turn)
            raise

    def _look(self, turn: _Turn) -> tuple[Permit | None, float]:
        """Admit turns while there is room. Return the permit of `turn`, or None, and the longest time that
        its thread may sleep.
        """
        limiter = self.limiter
        turn.event.clear()
        with limiter._lock:
            admitted = limiter._admit_locked()
            permit = turn.permit
            first = bool(limiter._line) and limiter._line[0] is turn
            sleep_s = limiter._rate.passes_in_s() if first else math.inf
        _wake(*admitted)
        if permit is None and self._failure is not None:
            raise copy_exception(self._failure)
        return permit, sleep_s

    def _leave(self, turn: _Turn) -> Permit | None:
        """Stop waiting. Return the permit if the turn was admitted just before, else None."""
        limiter = self.limiter
        with limiter._lock:
            watch = limiter._leave_locked([turn]) if turn in limiter._line else None
        _wake(watch)
        return turn.permit


_limiters: Final[Shared[tuple[str, str], RateLimiter]] = Shared(weakref.WeakValueDictionary())


def shared_rate_limiter(
    base_url: str, fingerprint: str, *, clock: Clock = SYSTEM_CLOCK, pace: float = 1.0
) -> RateLimiter:
    """Return the limiter of this process for a server and a key. It lives as long as it is in use.

    Args:
        base_url: the address of the server.
        fingerprint: the fingerprint of the key, from `key_fingerprint`.
        clock: the clock of the limiter, if this call makes it.
        pace: the factor for the pauses of the limiter, if this call makes it.

    >>> fingerprint = key_fingerprint("tml-example")
    >>> one = shared_rate_limiter("https://host/", fingerprint)
    >>> one is shared_rate_limiter("https://host", fingerprint)
    True
    """
    return _limiters.get((base_url.rstrip("/"), fingerprint), lambda: RateLimiter(clock=clock, pace=pace))
