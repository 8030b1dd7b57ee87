"""`RateLimiter`: slows down the clients of one server and key when the server asks for fewer requests.

One limiter belongs to a base URL and a key; `shared_rate_limiter` returns the same one to all clients of this
process that use both. Each client has a `Gate` of its own, which it can close without closing the others.

    permit = gate.acquire(timeout)      # waits while the limiter is closed or its window is full
    ... send ...
    gate.succeeded(permit)              # or gate.throttled(permit, delay_s) or gate.failed(permit), once

While the limiter is open, a request passes after one look at an attribute, and nothing is counted. A
`RateWindow` decides when and how far a refusal closes the limiter, and when it opens again.

The requests that wait form one line. The thread of the first one watches the time while the limiter is
closed. The others sleep until they are admitted, so the end of a pause wakes one thread, not all. Any thread
may use all of this. The limiter does not see the requests themselves.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import copy_exception
from tinker_sync.runtime.lazy import Shared
from tinker_sync.runtime.rate_window import RECENT_S, Permit, RateWindow


def key_fingerprint(key: str) -> str:
    """Return a hash that identifies a key to the limiters of this process; the key cannot be read from it.

    >>> key_fingerprint("tml-example") == key_fingerprint("tml-example")
    True
    """
    return f"{hash(key) & 0xFFFF_FFFF_FFFF_FFFF:016x}"  # hashlib would load OpenSSL


class LimiterState(Enum):
    """The state of a limiter: all requests pass, none passes, or as many as its window allows.

    OPEN -> CLOSED             a refusal or a pause
    CLOSED -> CLOSED           another refusal or pause: the later end counts
    CLOSED -> REOPENING        the pause is over
    REOPENING -> CLOSED        a refusal or a pause
    REOPENING -> OPEN          the window limits nothing and no request waits

    Illegal: CLOSED -> OPEN, which would let all waiting requests go at once, and OPEN -> REOPENING, since
    only a refusal or a pause sets a window.
    """

    OPEN = "open"
    CLOSED = "closed"
    REOPENING = "reopening"


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
        self._window = RateWindow(clock, pace)  # guarded by _lock, except where its attributes differ
        self._line: deque[_Turn] = deque()  # guarded by _lock
        self._announce: Callable[[float], None] | None = None  # written once
        _fork.renew_in_child(self)

    def gate(self) -> Gate:
        """Return a new gate, through which one client uses this limiter."""
        return Gate(self)

    def state(self) -> LimiterState:
        """Return the current state."""
        if self._free is not None:
            return LimiterState.OPEN
        return LimiterState.CLOSED if self._window.is_closed() else LimiterState.REOPENING

    def close_for(self, delay_s: float) -> None:
        """Let no request pass for `delay_s`, and few afterwards, because the server has paused the queue.

        >>> limiter = RateLimiter()
        >>> limiter.close_for(5)
        >>> limiter.state()
        <LimiterState.CLOSED: 'closed'>
        """
        with self._lock:
            self._window.pause(delay_s, was_open=self._shut_locked())
            watch = self._first_locked()
        _wake(watch)
        if self._announce is not None:
            self._announce(delay_s)

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
        """Divide the first window after a refusal among the processes that share the server's limit.
        The part of a process is at least 1. A closed limiter reopens with a window of at most that size.

        >>> limiter = RateLimiter()
        >>> limiter.follow(2)
        >>> limiter.count_sharers(4)
        >>> limiter
        <RateLimiter closed, window 2, 0 in flight, 0 in line>
        """
        with self._lock:
            self._window.share_among(processes)

    def follow(self, delay_s: float) -> None:
        """Close for `delay_s`, because the server has refused a request of another process.
        Refusals that arrive while the limiter is closed count as one: they only extend the time.

        >>> limiter = RateLimiter()
        >>> limiter.follow(5)
        >>> limiter.state()
        <LimiterState.CLOSED: 'closed'>
        """
        with self._lock:
            self._window.follow(delay_s, was_open=self._shut_locked())
            watch = self._first_locked()
        _wake(watch)

    def recently_closed(self) -> bool:
        """Return True if the limiter is closed, or was closed within the last `RECENT_S` seconds."""
        return self._clock.now() < self._window.closed_until_s + RECENT_S

    def renew_after_fork(self) -> None:
        """In a forked child, keep the pause and the window, and forget the requests of the parent."""
        self._lock = threading.Lock()
        self._window.forget_requests()
        self._line = deque()

    def __repr__(self) -> str:
        state = self.state()
        with self._lock:
            window = self._window
            counts = f"window {window.size}, {window.in_flight} in flight, {len(self._line)} in line"
        return f"<RateLimiter {state.value}, {counts}>"

    # ---------------------------------------------------- for gates

    def _shut_locked(self) -> bool:
        """Make each request ask the window from now on. Return True if the limiter was open.

        Call this before the window counts the requests that the server works on. From then on, `begin_work`
        takes the lock and, during a pause, makes the window count again. So no request is missed.
        """
        was_open, self._free = self._free is not None, None
        return was_open

    def _first_locked(self) -> _Turn | None:
        """Return the first turn in line, or None. The caller wakes its thread to watch the end of a pause."""
        return self._line[0] if self._line else None

    def _enter_locked(self, gate: Gate, turn: _Turn | None) -> Permit | None:
        """Return a permit if there is one now. Else put the turn, if given, into the line and return None.
        If the gate is closed, return None and do not use the line.
        """
        if gate._failure is not None:
            return None
        if self._free is not None:
            return self._free
        if not self._line and self._window.has_room():
            return self._window.count()
        if turn is not None:
            self._line.append(turn)
        return None

    def _admit_locked(self) -> list[_Turn]:
        """Admit turns in order while there is room, and return them. Open the limiter if the window limits
        nothing and the line is empty.
        """
        admitted, window = [], self._window
        while self._line and window.has_room():
            turn = self._line.popleft()
            turn.permit = window.count()
            admitted.append(turn)
        if self._free is None and not self._line and window.limits_nothing():
            self._free = Permit(window.epoch, counted=False)
        return admitted

    def _watch_s_locked(self, turn: _Turn) -> float:
        """Return how long the thread of a turn may sleep at most; infinity unless the turn is the first."""
        return self._window.changes_in_s() if self._first_locked() is turn else math.inf

    def _leave_locked(self, turns: list[_Turn]) -> _Turn | None:
        """Remove turns from the line. Return the new first turn if its thread must now watch the time."""
        if not turns:
            return None
        watched = self._line[0] in turns
        self._line = deque(turn for turn in self._line if turn not in turns)
        return self._first_locked() if watched else None

    def _end(self, permit: Permit, *, success: bool) -> None:
        with self._lock:
            self._window.end(permit, success=success)
            admitted = self._admit_locked()
        _wake(*admitted)

    def _refuse(self, permit: Permit, delay_s: float, *, named: bool) -> None:
        early = not named and self._announce is None
        with self._lock:
            self._shut_locked()
            first = self._window.refuse(permit, delay_s, may_end_early=early)
            watch = self._first_locked()
        _wake(watch)
        if first and self._announce is not None:
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
        window = limiter._window
        return permit.counted and permit.epoch == window.epoch and not window.is_closed()

    def succeeded(self, permit: Permit) -> None:
        """Give the permit back, because the server has accepted the request.
        This widens the window by one if the limiter gave the permit after the last refusal and counted it.
        """
        if permit.counted:
            self.limiter._end(permit, success=True)

    def failed(self, permit: Permit) -> None:
        """Give the permit back; the server neither accepted the request nor asked for fewer requests."""
        if permit.counted:
            self.limiter._end(permit, success=False)

    def begin_work(self, work: object) -> None:
        """Note that the server works on a request from now on. Call this before `succeeded`.

        Args:
            work: an object that stands for the request.

        >>> gate = RateLimiter().gate()
        >>> gate.begin_work("sample 1")
        >>> gate.end_work("sample 1")
        """
        limiter = self.limiter
        window = limiter._window
        if not window.work:
            window.has_ended = False
        window.work.add(work)
        if limiter._free is None:
            with limiter._lock:
                if window.is_closed():
                    window.bound_work()  # the request was under way when the server refused others

    def end_work(self, work: object) -> None:
        """Note that the server has finished a request, or that its result is not needed any more."""
        limiter = self.limiter
        limiter._window.work.discard(work)
        limiter._window.has_ended = True
        if limiter._free is None:
            with limiter._lock:
                limiter._window.end_work()
                admitted = limiter._admit_locked()
            _wake(*admitted)

    def throttled(self, permit: Permit, delay_s: float, *, named: bool = True) -> None:
        """Give the permit back and close the limiter for `delay_s`: the server asks for fewer requests.

        Args:
            permit: the permit of the refused request.
            delay_s: the length of the pause.
            named: True if the pause must last for the whole time, such as a time that the server has named.
                With False, the pause may end when the server has finished half of its requests.

        >>> gate = RateLimiter().gate()
        >>> gate.throttled(gate.acquire(), 1.0)
        >>> gate.limiter
        <RateLimiter closed, window 10, 0 in flight, 0 in line>
        """
        self.limiter._refuse(permit, delay_s, named=named)

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
            permit = self._leave(turn)
            if permit is not None:
                self.failed(permit)
            raise

    def _look(self, turn: _Turn) -> tuple[Permit | None, float]:
        """Admit turns while there is room. Return the permit of `turn`, or None, and the longest time that
        its thread may sleep.
        """
        limiter = self.limiter
        turn.event.clear()
        with limiter._lock:
            admitted = limiter._admit_locked()
            permit, sleep_s = turn.permit, limiter._watch_s_locked(turn)
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
