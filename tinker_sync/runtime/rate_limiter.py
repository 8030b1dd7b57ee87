"""`RateLimiter`: slows down the clients of one server and key when the server asks for fewer requests.

One limiter belongs to a base URL and a key; `shared_rate_limiter` returns the same one to all clients of this
process that use both. Each client has a `Gate` of its own, which it can close without closing the others.

    permit = gate.acquire(timeout)      # waits while the limiter is closed or paces the requests
    ... send ...
    gate.succeeded(permit)              # or gate.throttled(permit, delay_s); neither, if the request failed

While the limiter is open, a request passes after one look at an attribute, and nothing is counted. After a
refusal (429) the limiter closes for a while. Then it lets requests pass at a rate, which `SendRate` sets:
further refusals lower it and successes raise it, until it limits nothing.

A thread that must wait sleeps on the limiter's event until its next look is due; the event ends the sleep
early when a gate closes. A client has one such thread at most, so there is no line: the requests of a client
wait in the order of its own queue. The limiter does not see the requests themselves. Thread-safe.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Final

from tinker_sync._base import fork as _fork
from tinker_sync._base.api_errors import copy_exception
from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, in_seconds
from tinker_sync._base.log import Log
from tinker_sync.runtime.lazy import Shared

FIRST_RATE: Final = 50.0
"""The requests a second after the first refusal: between the limits of slow and fast servers."""
# Faster than one process sends, so a higher rate limits nothing.
_OPEN_RATE: Final = 3000.0
# The growth in a second until the next refusal shows where the limit is, as a share of the rate.
_FAST: Final = 2.5
# From then on, if the server names no time, the pause is as long as two requests take. A refusal takes a
# tenth of the rate, which is back when requests have passed for twice as long: such pauses cost little, and
# the server refuses one request in five. To aim at a lower share would let refusals that do not depend on the
# rate, such as those of one bad machine among many, lower it again and again.
_SLOW: Final = 0.05
_FIRST_DROP: Final = 0.7
_DROP: Final = 0.9
# A pause that the server names costs more, because nothing passes for a second or longer. So a refusal takes
# more of the rate the sooner it follows the last pause, and the rate grows the faster the longer the server
# accepts all: by 5 % until seven times the length of the pause has passed, so that pauses take an eighth of
# the time where the limit stays. At a low rate even such a pause costs few requests, so it falls no further.
_SLOW_IF_NAMED: Final = 0.002
_LEAST_IF_NAMED: Final = 30.0
_PAUSED_REQUESTS: Final = 2.0
_MOST_AT_ONCE: Final = 0.1  # the growth with one success, because few of them after a long time prove little
# The pauses after refusals that name no time. They grow until the server accepts a request, slowly, because
# on average the client asks too late by a part of the time for which the server refuses.
_LONGER: Final = 1.5
_SHORTEST_PAUSE_S: Final = 0.02
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 1.0
# While the server accepts nothing, one request asks for all, and the next follows if no answer comes so soon.
_ASKED_AGAIN_S: Final = 0.1
# After this time without a refusal the limit may have changed; after the second one it is forgotten.
RECENT_S: Final = 10.0
_FORGET_S: Final = 60.0
# A thread that wakes this much too late makes up for the requests that it would have sent, so it need not
# wake for each of them.
_CREDIT_S: Final = 0.01
_SHORTEST_WAIT_S: Final = 0.004
_WORTH_A_LINE_S: Final = 10.0
# Each doubling costs a round trip, so a burst of 400 takes three. More at first would break the bound on the
# refusals of a server with a low limit. Clients share them, because they share the limit; the share of one
# among many does not fall below the last number, because the others may send nothing.
_SENT_AT_FIRST: Final = 64
_LEAST_SENT_AT_FIRST: Final = 16
SENT_AT_ONCE: Final = 400

_log = Log("tinker_sync.queue")


def key_fingerprint(key: str) -> str:
    """Return a hash that identifies a key to the limiters of this process; the key cannot be read from it.

    >>> key_fingerprint("tml-example") == key_fingerprint("tml-example")
    True
    """
    return f"{hash(key) & 0xFFFF_FFFF_FFFF_FFFF:016x}"  # hashlib would load OpenSSL


class Permit:
    """A permission to send one request. A `counted` one was given while a rate limited the requests."""

    __slots__ = ("counted", "epoch")

    def __init__(self, epoch: int, counted: bool) -> None:
        self.epoch = epoch
        self.counted = counted


class SendRate:
    """The rate at which a limiter lets requests pass, and the pause during which it lets none pass.

    Servers limit the rate of requests, their number in a window of time, or the work under way. All of them
    refuse alike, so this class does not ask which it is. It paces the requests near the rate at which the
    server refuses some: a refusal lowers the rate a little, and it grows again while the server accepts all.
    Refusals of requests that were under way together count once.

    Arithmetic without a lock: the limiter holds its lock when it calls a method, except for `is_closed`.

    Args:
        clock: measures time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.a_second = math.inf
        """The requests that pass in a second, once the pause is over."""
        self.epoch = 0
        """Grows with each refusal that counts; a permit of an earlier epoch says nothing about the rate."""
        self.closed_until_s = -math.inf
        """The end of the latest pause; it may be in the past."""
        self._first = FIRST_RATE
        self._next_s = -math.inf  # when the next request may pass
        self._grown_s = -math.inf  # until when the growth is counted
        self._found = False  # a refusal after a success has shown where the limit is
        self._named_s: float | None = None  # the pause that the server has named last
        self._pauses = 1.0  # the factor of the next pause whose length it does not name; 1 after a success
        self._reported = False  # a report has closed the limiter, and nothing was accepted since

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
        apart_s = _ASKED_AGAIN_S if self._pauses > _LONGER else 1 / self.a_second
        self._next_s = max(self._next_s, self._clock.now() - _CREDIT_S) + apart_s
        return Permit(self.epoch, counted=True)

    def note_success(self, permit: Permit) -> None:
        """Raise the rate, because the server has accepted a request that was sent after the last refusal."""
        if permit.epoch != self.epoch:
            return
        now = self._clock.now()
        if self._pauses > _LONGER:
            self._next_s = now
        self._pauses, self._reported = 1.0, False
        passed_s = now - max(self._grown_s, self.closed_until_s)
        self._grown_s = now
        self.a_second *= 1 + min(self._growth(now) * max(passed_s, 0.0), _MOST_AT_ONCE)
        if self.a_second >= _OPEN_RATE:
            self.a_second = math.inf

    def refuse(self, permit: Permit, delay_s: float | None) -> bool:
        """Close for `delay_s`, because the server has refused a request; None if it has named no time.

        Refusals of requests that were under way together count as one. Return True for the first of them.
        """
        first = permit.epoch == self.epoch
        if first:
            delay_s = self._lower(delay_s)
        self.close(delay_s or 0.0)
        return first

    def follow(self, delay_s: float) -> None:
        """Close for `delay_s`, because the server has refused a request of another process."""
        if math.isinf(self.a_second) or not self.is_closed():
            self._lower(delay_s)
        self.close(delay_s)

    def pause(self, delay_s: float) -> None:
        """Close for `delay_s`, and then let requests pass at a rate."""
        if math.isinf(self.a_second):
            self._lower(delay_s)
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
        self.closed_until_s = max(
            self.closed_until_s, self._clock.now() + self._clock.shorten(max(delay_s, 0.0))
        )

    def _growth(self, now: float) -> float:
        """Return the growth of the rate in a second, as a share of it."""
        if not self._found:
            return _FAST
        if self._named_s is None:
            return _SLOW / self._short_pause_s()
        return _SLOW_IF_NAMED * (now - self.closed_until_s) / max(self._named_s, self._short_pause_s()) ** 2

    def _short_pause_s(self) -> float:
        return min(max(_PAUSED_REQUESTS / self.a_second, _SHORTEST_PAUSE_S), _FIRST_PAUSE_S)

    def _lower(self, named_s: float | None) -> float:
        """Lower the rate, and return the length of the pause."""
        self.epoch += 1
        self._named_s, accepted = named_s, self._pauses == 1.0
        if math.isinf(self.a_second):
            self.a_second, self._found, self._pauses = self._first, False, 1.0
        else:
            kept = _FIRST_DROP if accepted and not self._found else _DROP
            if named_s is not None:
                if accepted and self._found:
                    passed_s = max(self._clock.now() - self.closed_until_s, _SHORTEST_PAUSE_S)
                    kept = max((passed_s / (passed_s + named_s)) ** (1 / 3), _FIRST_DROP)
                kept = max(kept, min(_LEAST_IF_NAMED / max(named_s, 1.0) / self.a_second, 1.0))
            self.a_second *= kept
            self._found = self._found or accepted
        pauses, self._pauses = self._pauses, self._pauses * _LONGER
        return min(self._short_pause_s() * pauses, _LONGEST_PAUSE_S) if named_s is None else named_s


class RateLimiter:
    """A limiter of the requests to one server with one API key. Thread-safe.

    >>> limiter = RateLimiter()
    >>> gate = limiter.gate()
    >>> gate.throttled(gate.acquire(), delay_s=2)
    >>> limiter.state(), gate.try_acquire() is None
    ('closed', True)
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        # The permit while open, else None; written under _lock, read without.
        self._free: Permit | None = Permit(0, counted=False)
        self._lock = threading.Lock()
        self._rate = SendRate(clock)  # guarded by _lock, except where its attributes differ
        self._changed = threading.Event()  # set, after a new one has taken its place, when a gate has closed
        self._announce: Callable[[float], None] | None = None  # written once
        self._accepted = 0  # not exact, because it is counted without the lock
        self._gates: weakref.WeakSet[Gate] = weakref.WeakSet()
        self.sent_at_once = _SENT_AT_FIRST
        """The most requests of a client in their send phase: few at first, more as the server accepts them.

        So a server with a low limit, which nobody knows before its first refusal, does not refuse hundreds.
        """
        _fork.renew_in_child(self)

    def gate(self) -> Gate:
        """Return a new gate, through which one client uses this limiter."""
        gate = Gate(self)
        self._gates.add(gate)
        self._share_growth()
        return gate

    def state(self) -> str:
        """Return "open" if all requests pass, "closed" during a pause, "reopening" if a rate paces them."""
        if self._free is not None:
            return "open"
        return "closed" if self._rate.is_closed() else "reopening"

    def close_for(self, delay_s: float, *, reported: bool = False) -> None:
        """Let no request pass for `delay_s`, and few afterwards, because the server has paused the account.

        Args:
            delay_s: the length of the pause.
            reported: True for a report that the server repeats. It has no effect unless a request was
                accepted since the last one, because the limiter would never open again.

        >>> limiter = RateLimiter()
        >>> limiter.close_for(5)
        >>> limiter.state()
        'closed'
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
        <RateLimiter closed, 12.5 a second>
        """
        with self._lock:
            self._rate.share_among(processes)

    def follow(self, delay_s: float) -> None:
        """Close for `delay_s`, because the server has refused a request of another process.
        Refusals that arrive while the limiter is closed count as one: they only prolong the pause.

        >>> limiter = RateLimiter()
        >>> limiter.follow(5)
        >>> limiter.state()
        'closed'
        """
        with self._lock:
            self._rate.follow(delay_s)
            self._free = None

    def _share_growth(self) -> None:
        share = (_SENT_AT_FIRST + self._accepted) // max(len(self._gates), 1)
        self.sent_at_once = min(max(share, _LEAST_SENT_AT_FIRST), SENT_AT_ONCE)

    def recently_closed(self) -> bool:
        """Return True if the limiter is closed, or was closed within the last `RECENT_S` seconds."""
        return self._clock.now() < self._rate.closed_until_s + RECENT_S

    def pause_left_s(self) -> float:
        """Return the seconds until the present pause is over; 0 without a pause."""
        return max(self._rate.closed_until_s - self._clock.now(), 0.0)

    def renew_after_fork(self) -> None:
        """In a forked child, keep the pause and the rate, and forget the threads and gates of the parent."""
        self._lock, self._changed, self._gates = threading.Lock(), threading.Event(), weakref.WeakSet()
        self._share_growth()

    def __repr__(self) -> str:
        return f"<RateLimiter {self.state()}, {self._rate.a_second:.3g} a second>"

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
        self._failure: Exception | None = None  # set once, final

    def try_acquire(self) -> Permit | None:
        """Return a permit if there is one now, else None.

        Raises:
            Exception: the gate is closed; a copy of the failure given to `close`.
        """
        return self._look()[0]

    def acquire(self, timeout: float | None = None) -> Permit | None:
        """Wait for a permit and return it, or None if no permit comes within `timeout` seconds.
        A `timeout` of None stands for no limit.

        Raises:
            Exception: the gate is closed, now or during the wait; a copy of the failure given to `close`.
        """
        clock = self.limiter._clock
        deadline_s = math.inf if timeout is None else clock.now() + timeout
        while True:
            changed = self.limiter._changed  # before the look, so that no close is missed
            permit, wait_s = self._look()
            left_s = deadline_s - clock.now()
            if permit is not None or left_s <= 0:
                return permit
            clock.wait(changed, min(max(wait_s, _SHORTEST_WAIT_S), left_s))

    def _look(self) -> tuple[Permit | None, float]:
        """Return a permit, or None and the seconds until there may be one."""
        if self._failure is not None:
            raise copy_exception(self._failure)
        limiter, rate = self.limiter, self.limiter._rate
        free = limiter._free
        if free is not None:
            return free, 0.0
        with limiter._lock:
            wait_s = rate.passes_in_s()
            if wait_s > 0:
                return None, wait_s
            if math.isfinite(rate.a_second):
                return rate.count(), 0.0
            limiter._free = free = Permit(rate.epoch, counted=False)
            return free, 0.0

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
        limiter._accepted += 1
        if limiter.sent_at_once < SENT_AT_ONCE:
            limiter._share_growth()
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
        <RateLimiter closed, 50 a second>
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
            self._failure = self._failure or failure
            changed, limiter._changed = limiter._changed, threading.Event()
        changed.set()


_limiters: Final[Shared[tuple[str, str], RateLimiter]] = Shared(weakref.WeakValueDictionary())


def shared_rate_limiter(base_url: str, fingerprint: str, *, clock: Clock = SYSTEM_CLOCK) -> RateLimiter:
    """Return the limiter of this process for a server and a key. It lives as long as it is in use.

    Args:
        base_url: the address of the server.
        fingerprint: the fingerprint of the key, from `key_fingerprint`.
        clock: the clock of the limiter, if this call makes it.

    >>> fingerprint = key_fingerprint("tml-example")
    >>> one = shared_rate_limiter("https://host/", fingerprint)
    >>> one is shared_rate_limiter("https://host", fingerprint)
    True
    """
    return _limiters.get((base_url.rstrip("/"), fingerprint), lambda: RateLimiter(clock=clock))
