"""`RateLimiter`: slows down all clients of the process when the server asks for fewer requests.

One limiter belongs to a base URL and a key; `shared_rate_limiter` returns the same one to all clients that
use both. Each client goes through a `Gate` of its own, which it can close without closing those of other
clients.

    permit = gate.acquire(timeout)      # waits while the limiter is closed or its window is full
    ... send ...
    gate.succeeded(permit)              # or gate.throttled(permit, delay_s) or gate.failed(permit), once

While the limiter is open, a request passes after one look at an attribute, and nothing is counted. A refusal
(429), or a queue that the server reports as paused, closes the limiter for a time: no request passes. Then it
reopens for a small window of requests. The window grows by one with each request that succeeds; a further
refusal halves it. The limiter opens when the window covers all requests that can be in their send phase, and
no request waits. So the requests that gathered meanwhile never go all at once.

A server often refuses because it works on as many requests as it can hold. So a refusal also bounds the work:
the requests that the server has accepted and not finished. The bound is the work that the server held when it
refused. While it lasts, a request passes when another one ends, and the server refuses no more. After
`RECENT_S` the bound ends, and a small window finds out what the server holds by then.

A refusal that names no time closes the limiter for a time of our own. When half of that work has ended, the
server has room, so the limiter reopens for its small window without waiting for the rest of the time. A
server that refuses the first requests after that had another reason, and the next pause is whole. A limiter
that shares its pauses with other processes always waits for their end.

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

# The reference client sends this many requests at once after a refusal.
FIRST_WINDOW: Final = 10
# At most this many samples are in their send phase at once, so a wider window limits nothing.
OPEN_WINDOW: Final = 400
# For this time after a pause, a prompt counts as several times its size in the limit on bytes.
RECENT_S: Final = 10.0

# The bound is smaller than the work at a refusal by one part in this many.
_SPARE: Final = 32
_SMALL_BYTES: Final = 128 * 1024


def default_delay_s(size_bytes: int) -> float:
    """Return the pause after a refusal that names no time: one second, or five for a large request.

    >>> default_delay_s(1000), default_delay_s(1_000_000)
    (1.0, 5.0)
    """
    return 1.0 if size_bytes <= _SMALL_BYTES else 5.0


def key_fingerprint(key: str) -> str:
    """Return a hash that identifies a key to the limiters of this process; the key cannot be read from it.

    >>> key_fingerprint("tml-example") == key_fingerprint("tml-example")
    True
    """
    return f"{hash(key) & 0xFFFF_FFFF_FFFF_FFFF:016x}"  # hashlib would load OpenSSL


class LimiterState(Enum):
    """The state of a limiter: all requests pass, none passes, or a window of them passes.

    OPEN -> CLOSED             a refusal or a pause
    CLOSED -> CLOSED           another refusal or pause: the later end counts
    CLOSED -> REOPENING        the time is over
    REOPENING -> CLOSED        a refusal or a pause
    REOPENING -> OPEN          the window is wide and no request waits

    Illegal: CLOSED -> OPEN, which would let all waiting requests go at once, and OPEN -> REOPENING, since
    only a refusal or a pause sets a window.
    """

    OPEN = "open"
    CLOSED = "closed"
    REOPENING = "reopening"


class Permit:
    """A permission to send one request. A `counted` one uses a place in the window until it is given back."""

    __slots__ = ("counted", "epoch")

    def __init__(self, epoch: int, counted: bool) -> None:
        self.epoch = epoch
        self.counted = counted


class _Turn:
    """The place of a waiting request in the line. The limiter's lock guards all attributes but the event."""

    __slots__ = ("event", "gate", "permit")

    def __init__(self, gate: Gate) -> None:
        self.event = threading.Event()
        self.gate = gate
        self.permit: Permit | None = None


class RateLimiter:
    """A limiter of the requests to one server under one key. Thread-safe.

    >>> limiter = RateLimiter()
    >>> gate = limiter.gate()
    >>> gate.throttled(gate.acquire(), delay_s=2)
    >>> limiter.state(), gate.try_acquire() is None
    (<LimiterState.CLOSED: 'closed'>, True)
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, pace: float = 1.0) -> None:
        self._clock = clock
        self._pace = pace  # pauses are multiplied by this
        # The permit while open, else None; written under _lock, read without.
        self._free: Permit | None = Permit(0, counted=False)
        self._lock = threading.Lock()
        self._closed_until_s = -math.inf  # written under _lock, read without
        self._epoch = 0  # guarded by _lock; the number of times that a window was set
        self._window = OPEN_WINDOW  # guarded by _lock
        self._in_flight = 0  # guarded by _lock; counted permits not given back
        self._line: deque[_Turn] = deque()  # guarded by _lock
        self._work: set[object] = set()  # what the server works on; one operation at a time, without _lock
        self._most_work = math.inf  # guarded by _lock; the bound
        self._may_hold_more = False  # guarded by _lock; no work has ended since the refusal
        self._ends_with_work = False  # guarded by _lock; the pause may end before its time
        self._has_ended = False  # some work has ended since there was none; written without _lock
        self._first_window = FIRST_WINDOW  # written under _lock
        self._announce: Callable[[float], None] | None = None  # written once
        _fork.renew_in_child(self)

    def gate(self) -> Gate:
        """Return a gate for one client.

        >>> RateLimiter().gate().acquire() is None
        False
        """
        return Gate(self)

    def state(self) -> LimiterState:
        """Return the current state.

        >>> RateLimiter().state()
        <LimiterState.OPEN: 'open'>
        """
        if self._free is not None:
            return LimiterState.OPEN
        return LimiterState.CLOSED if self._clock.now() < self._closed_until_s else LimiterState.REOPENING

    def close_for(self, delay_s: float) -> None:
        """Let no request pass for `delay_s`, and few afterwards, because the server has paused the queue.

        >>> limiter = RateLimiter()
        >>> limiter.close_for(5)
        >>> limiter.state()
        <LimiterState.CLOSED: 'closed'>
        """
        with self._lock:
            if self._free is not None:
                self._epoch += 1
            self._window = min(self._window, self._first_window)
            self._ends_with_work = False
            watch = self._close_locked(delay_s)
        if watch is not None:
            watch.event.set()
        if self._announce is not None:
            self._announce(delay_s)

    def share(self, announce: Callable[[float], None]) -> None:
        """Set a function that passes the delay of each refusal to the limiters of other processes.

        The limiter calls it with no lock held.

        >>> limiter, heard = RateLimiter(), []
        >>> limiter.share(heard.append)
        >>> limiter.close_for(5)
        >>> heard
        [5]
        """
        self._announce = announce

    def count_sharers(self, processes: int) -> None:
        """Divide the first window by the number of processes that share it.

        The part of a process is at least 1. A closed limiter reopens with a window of at most that size.

        >>> limiter = RateLimiter()
        >>> limiter.follow(2)
        >>> limiter.count_sharers(4)
        >>> limiter
        <RateLimiter closed, window 2, 0 in flight, 0 in line>
        """
        with self._lock:
            self._first_window = max(1, FIRST_WINDOW // max(1, processes))
            if self._clock.now() < self._closed_until_s:
                self._window = min(self._window, self._first_window)

    def follow(self, delay_s: float) -> None:
        """Close for `delay_s`, because the server has refused a request of another process.

        Refusals that arrive while the limiter is closed count as one: they only extend the time.

        >>> limiter = RateLimiter()
        >>> limiter.follow(5)
        >>> limiter.state()
        <LimiterState.CLOSED: 'closed'>
        """
        with self._lock:
            if self._free is not None:
                self._epoch += 1
                self._window = self._first_window
            elif self._clock.now() >= self._closed_until_s:
                self._epoch += 1
                self._window = max(1, self._window // 2)
            self._ends_with_work = False
            watch = self._close_locked(delay_s)
        if watch is not None:
            watch.event.set()

    def recently_closed(self) -> bool:
        """Return True if the limiter is closed, or was closed within the last `RECENT_S` seconds.

        >>> RateLimiter().recently_closed()
        False
        """
        return self._clock.now() < self._closed_until_s + RECENT_S

    def opens_in_s(self) -> float:
        """Return the seconds until a request may pass: 0 for now, inf if another request must end first.

        >>> RateLimiter().opens_in_s()
        0.0
        """
        with self._lock:
            if self._free is not None:
                return 0.0
            closed_s = self._closed_until_s - self._clock.now()
            if closed_s > 0:
                return closed_s
            return 0.0 if self._has_room_locked() else math.inf

    def renew_after_fork(self) -> None:
        """In a forked child, keep the pause and the window, and forget the requests of the parent."""
        self._lock = threading.Lock()
        self._in_flight = 0
        self._line = deque()
        self._work = set()

    def __repr__(self) -> str:
        state = self.state()
        with self._lock:
            counts = f"window {self._window}, {self._in_flight} in flight, {len(self._line)} in line"
        return f"<RateLimiter {state.value}, {counts}>"

    # ---------------------------------------------------- for gates

    def _close_locked(self, delay_s: float, *, late: bool = False) -> _Turn | None:
        """Close for `delay_s`. Return the turn whose thread must be woken to watch the time, or None.

        Args:
            delay_s: the length of the pause.
            late: True for the refusal of a request that was sent before the last pause began.
        """
        self._free = None
        # The refusals of one storm arrive one after the other, while work ends. The first one counts.
        if not late and self._clock.now() >= self._closed_until_s:
            self._may_hold_more = True
            self._most_work = math.inf
        self._bound_work_locked()
        self._closed_until_s = max(self._closed_until_s, self._clock.now() + max(delay_s, 0.0) * self._pace)
        return self._line[0] if self._line else None

    def _enter_locked(self, gate: Gate, turn: _Turn | None) -> Permit | None:
        """Return a permit if there is one now. Else put the turn, if given, into the line and return None."""
        if gate._failure is not None:
            return None
        if self._free is not None:
            return self._free
        if not self._line and self._has_room_locked():
            return self._count_locked()
        if turn is not None:
            self._line.append(turn)
        return None

    def _has_room_locked(self) -> bool:
        if math.isfinite(self._most_work) and not self.recently_closed():
            self._most_work = math.inf
            self._window = min(self._window, self._first_window)
        if self._in_flight >= self._window or self._in_flight + len(self._work) >= self._most_work:
            return False
        return self._clock.now() >= self._closed_until_s

    def _bound_work_locked(self) -> None:
        """Bound the work by what the server holds, as far as this client knows.

        The server ends work some time before this client has the result. So once some work has ended, the
        bound is a little less. A server that refuses while it works on few requests has another reason.
        """
        work = len(self._work)
        if self._may_hold_more and work >= FIRST_WINDOW:
            self._most_work = work - work // _SPARE if self._has_ended else work

    def _end_work_locked(self) -> None:
        """Take note that the server has room for more, and end a pause that waits for that alone."""
        self._may_hold_more = False
        if self._ends_with_work and 2 * len(self._work) <= self._most_work < math.inf:
            self._ends_with_work = False
            self._closed_until_s = min(self._closed_until_s, self._clock.now())

    def _count_locked(self) -> Permit:
        self._in_flight += 1
        return Permit(self._epoch, counted=True)

    def _admit_locked(self) -> list[_Turn]:
        """Admit turns in order while there is room. Open if the window is wide and the line is empty."""
        admitted = []
        while self._line and self._has_room_locked():
            turn = self._line.popleft()
            turn.permit = self._count_locked()
            admitted.append(turn)
        wide = self._window >= OPEN_WINDOW and not self._line and math.isinf(self._most_work)
        if wide and self._free is None and self._clock.now() >= self._closed_until_s:
            self._free = Permit(self._epoch, counted=False)
        return admitted

    def _watch_s_locked(self, turn: _Turn) -> float:
        """Return the longest time that the thread of a turn may sleep.

        Only the first in line watches the time.
        """
        if self._line and self._line[0] is turn:
            closed_s = self._closed_until_s - self._clock.now()
            if closed_s > 0:
                return closed_s
            if math.isfinite(self._most_work):
                return closed_s + RECENT_S
        return math.inf

    def _leave_locked(self, turns: list[_Turn]) -> _Turn | None:
        """Remove turns from the line.

        Return the turn that is first now, if its thread must be woken to watch the time.
        """
        if not turns:
            return None
        watched = self._line[0] in turns
        self._line = deque(turn for turn in self._line if turn not in turns)
        return self._line[0] if watched and self._line else None

    def _end(self, permit: Permit, *, success: bool) -> None:
        with self._lock:
            self._in_flight -= 1
            # A request sent before the last refusal proves nothing about the time after it.
            if success and permit.epoch == self._epoch:
                self._window += 1
            admitted = self._admit_locked()
        for turn in admitted:
            turn.event.set()

    def _refused(self, permit: Permit, delay_s: float, *, named: bool) -> None:
        with self._lock:
            if permit.counted:
                self._in_flight -= 1
            # The server refuses the requests that are under way together; this counts as one refusal.
            first = permit.epoch == self._epoch
            if first:
                accepted = not permit.counted or self._window > self._first_window
                self._ends_with_work = accepted and self._announce is None
                self._epoch += 1
                self._window = max(1, self._window // 2) if permit.counted else self._first_window
            self._ends_with_work = self._ends_with_work and not named
            watch = self._close_locked(delay_s, late=not first)
        if watch is not None:
            watch.event.set()
        if first and self._announce is not None:
            self._announce(delay_s)


class Gate:
    """The access of one client to a limiter. Thread-safe.

    >>> gate = RateLimiter().gate()
    >>> permit = gate.acquire(timeout=1)
    >>> gate.succeeded(permit)
    """

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self._failure: Exception | None = (
            None  # written under the limiter's lock, read without; set once, final
        )

    def try_acquire(self, turn: _Turn | None = None) -> Permit | None:
        """Return a permit if there is one now, else None.

        Args:
            turn: put into the line if there is no permit; for the methods of this class.

        Raises:
            Exception: the failure given to `close`.

        >>> RateLimiter().gate().try_acquire() is None
        False
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

        Raises:
            Exception: the failure given to `close`, also in threads that are waiting.

        >>> RateLimiter().gate().acquire(timeout=1) is None
        False
        """
        permit = self.try_acquire()
        if permit is not None:
            return permit
        turn = _Turn(self)
        permit = self.try_acquire(turn)
        return permit if permit is not None else self._wait(turn, math.inf if timeout is None else timeout)

    def lets_pass(self, permit: Permit) -> bool:
        """Return True if the limiter has not closed since it gave this permit.

        The sender of a request calls this right before it sends.

        >>> gate = RateLimiter().gate()
        >>> permit = gate.acquire()
        >>> gate.limiter.close_for(5)
        >>> gate.lets_pass(permit)
        False
        """
        limiter = self.limiter
        if limiter._free is not None:
            return True
        closed = limiter._clock.now() < limiter._closed_until_s
        return permit.counted and permit.epoch == limiter._epoch and not closed

    def succeeded(self, permit: Permit) -> None:
        """Give the permit back and widen the window by one, because the server has accepted the request.

        >>> gate = RateLimiter().gate()
        >>> gate.succeeded(gate.acquire())
        """
        if permit.counted:
            self.limiter._end(permit, success=True)

    def failed(self, permit: Permit) -> None:
        """Give the permit back; the server neither accepted the request nor asked for fewer requests.

        >>> gate = RateLimiter().gate()
        >>> gate.failed(gate.acquire())
        """
        if permit.counted:
            self.limiter._end(permit, success=False)

    def begin_work(self, work: object) -> None:
        """Note that the server works on a request from now on. Call this before `succeeded`.

        >>> gate = RateLimiter().gate()
        >>> gate.begin_work("sample 1")
        >>> gate.end_work("sample 1")
        """
        limiter = self.limiter
        if not limiter._work:
            limiter._has_ended = False
        limiter._work.add(work)
        if limiter._free is None:
            with limiter._lock:
                if limiter._clock.now() < limiter._closed_until_s:
                    limiter._bound_work_locked()  # the request was under way when the server refused others

    def end_work(self, work: object) -> None:
        """Note that the server has finished a request, or that its result is not needed any more."""
        limiter = self.limiter
        limiter._work.discard(work)
        limiter._has_ended = True
        if limiter._free is None:
            with limiter._lock:
                limiter._end_work_locked()
                admitted = limiter._admit_locked()
            for turn in admitted:
                turn.event.set()

    def throttled(self, permit: Permit, delay_s: float, *, named: bool = True) -> None:
        """Give the permit back and close the limiter for `delay_s`: the server asks for fewer requests.

        Args:
            permit: the permit of the refused request.
            delay_s: the length of the pause.
            named: True if the pause must be kept to its end: the server has named its length, or waits for
                something else than the end of work.

        >>> gate = RateLimiter().gate()
        >>> gate.throttled(gate.acquire(), default_delay_s(1000))
        >>> gate.limiter
        <RateLimiter closed, window 10, 0 in flight, 0 in line>
        """
        self.limiter._refused(permit, delay_s, named=named)

    def close(self, failure: Exception) -> None:
        """Close the gate: waiting and later calls of `acquire` raise `failure`.

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
        for turn in own if watch is None else [*own, watch]:
            turn.event.set()

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
        """Admit turns while there is room.

        Return the permit of `turn`, or None, and the longest time that its thread may sleep.
        """
        limiter = self.limiter
        turn.event.clear()
        with limiter._lock:
            admitted = limiter._admit_locked()
            permit, sleep_s = turn.permit, limiter._watch_s_locked(turn)
        for other in admitted:
            other.event.set()
        if permit is None and self._failure is not None:
            raise copy_exception(self._failure)
        return permit, sleep_s

    def _leave(self, turn: _Turn) -> Permit | None:
        """Stop waiting. Return the permit if the turn was admitted just before, else None."""
        limiter = self.limiter
        with limiter._lock:
            watch = limiter._leave_locked([turn]) if turn in limiter._line else None
        if watch is not None:
            watch.event.set()
        return turn.permit


_limiters: Final[Shared[tuple[str, str], RateLimiter]] = Shared(weakref.WeakValueDictionary())


def shared_rate_limiter(
    base_url: str, fingerprint: str, *, clock: Clock = SYSTEM_CLOCK, pace: float = 1.0
) -> RateLimiter:
    """Return the limiter of this process for a server and a key. It lives as long as a reference to it.

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
