"""`RateLimiter`: when the server asks for less, everybody in the process hears it.

One limiter belongs to a base URL and a key; `shared_rate_limiter` hands out the same one to all clients of
both. A client goes through a `Gate` of its own, which it can close without closing those of others.

    permit = gate.acquire(timeout)      # waits while the limiter is closed or its window is full
    ... send ...
    gate.succeeded(permit)              # or gate.throttled(permit, delay_s), or gate.failed(permit): each
    permit once

While nothing was ever refused the way through is one `Event.is_set()`, and nothing is counted. A refusal
(429), or a queue that the server reports as paused, closes the limiter for a time: neither those who wait nor
newcomers pass. Then it reopens for a few, and for one more with each of them that succeeds; a further refusal
halves the window. Only when the window is wider than all that can be in their send phase and nobody waits is
it open again: a crowd that gathered meanwhile never goes all at once.

Those who wait stand in one line. The first in line watches the time while the limiter is closed; the others
sleep until they are let in, so the end of a pause wakes one thread, not all. Any thread may use anything
here. The limiter knows no requests.
"""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import fresh
from tinker_sync.runtime.once import Shared

# As many as the reference client lets go at once after a refusal.
FIRST_WINDOW: Final = 10
# As many samples as are ever in their send phase at once; a wider window limits nothing.
OPEN_WINDOW: Final = 400
# For so long after a pause large prompts are weighed more heavily.
RECENT_S: Final = 10.0

_SMALL_BYTES: Final = 128 * 1024


def default_delay_s(size_bytes: int) -> float:
    """How long to back off when the server does not say: a second, for a large request five.

    >>> default_delay_s(1000), default_delay_s(1_000_000)
    (1.0, 5.0)
    """
    return 1.0 if size_bytes <= _SMALL_BYTES else 5.0


def key_fingerprint(key: str) -> str:
    """What a limiter knows a key by; the key cannot be read from it.

    >>> key_fingerprint("tml-example") == key_fingerprint("tml-example")
    True
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class LimiterState(Enum):
    """What a limiter does with who comes.

    OPEN -> CLOSED             a refusal or a pause
    CLOSED -> CLOSED           another one: the later end counts
    CLOSED -> REOPENING        the time is over
    REOPENING -> CLOSED        a refusal or a pause
    REOPENING -> OPEN          the window is wide and nobody waits

    Illegal: CLOSED -> OPEN, which would let a crowd through, and OPEN -> REOPENING, since only a refusal sets
    a window.
    """

    OPEN = "open"
    CLOSED = "closed"
    REOPENING = "reopening"


class Permit:
    """Leave to send one request. `counted` ones take a place in the window until they are given back."""

    __slots__ = ("counted", "epoch")

    def __init__(self, epoch: int, counted: bool) -> None:
        self.epoch = epoch
        self.counted = counted


class _Turn:
    """A place in the line. All but the event is guarded by the limiter's lock."""

    __slots__ = ("event", "gate", "permit")

    def __init__(self, gate: Gate) -> None:
        self.event = threading.Event()
        self.gate = gate
        self.permit: Permit | None = None


class RateLimiter:
    """Says when requests of one kind may go. Thread-safe.

    >>> limiter = RateLimiter()
    >>> gate = limiter.gate()
    >>> gate.throttled(gate.acquire(), delay_s=2)
    >>> limiter.state(), gate.try_acquire() is None
    (<LimiterState.CLOSED: 'closed'>, True)
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, pace: float = 1.0) -> None:
        self._clock = clock
        self._pace = pace  # pauses are multiplied by this
        # Set and cleared under _lock, read without. Its own lock is never held by anybody who wants ours.
        self._open = threading.Event()
        self._open.set()
        self._free = Permit(0, counted=False)  # what passes while open; replaced under _lock, read without
        self._lock = threading.Lock()
        self._closed_until_s = -math.inf  # written under _lock, read without
        self._epoch = 0  # guarded by _lock; how often a window was set
        self._window = OPEN_WINDOW  # guarded by _lock
        self._in_flight = 0  # guarded by _lock; counted permits not given back
        self._line: deque[_Turn] = deque()  # guarded by _lock
        self._first_window = FIRST_WINDOW  # written under _lock
        self._announce: Callable[[float], None] | None = None  # written once
        _fork.renew_in_child(self)

    def gate(self) -> Gate:
        """A way through for one client.

        >>> RateLimiter().gate().acquire() is None
        False
        """
        return Gate(self)

    def state(self) -> LimiterState:
        """What it does now.

        >>> RateLimiter().state()
        <LimiterState.OPEN: 'open'>
        """
        if self._open.is_set():
            return LimiterState.OPEN
        return LimiterState.CLOSED if self._clock.now() < self._closed_until_s else LimiterState.REOPENING

    def close_for(self, delay_s: float) -> None:
        """Let nobody through for `delay_s`, and few afterwards: the server has paused the queue.

        >>> limiter = RateLimiter()
        >>> limiter.close_for(5)
        >>> limiter.state()
        <LimiterState.CLOSED: 'closed'>
        """
        with self._lock:
            if self._open.is_set():
                self._epoch += 1
            self._window = min(self._window, self._first_window)
            watch = self._close_locked(delay_s)
        if watch is not None:
            watch.event.set()
        if self._announce is not None:
            self._announce(delay_s)

    def share(self, announce: Callable[[float], None]) -> None:
        """Call `announce` with the delay of each refusal, for limiters of other processes; no lock is held.

        >>> limiter, heard = RateLimiter(), []
        >>> limiter.share(heard.append)
        >>> limiter.close_for(5)
        >>> heard
        [5]
        """
        self._announce = announce

    def count_sharers(self, processes: int) -> None:
        """Take one of `processes` equal parts of the first window, and at least 1.

        >>> limiter = RateLimiter()
        >>> limiter.count_sharers(4)
        >>> limiter.follow(2)
        >>> limiter
        <RateLimiter closed, window 2, 0 in flight, 0 in line>
        """
        with self._lock:
            self._first_window = max(1, FIRST_WINDOW // max(1, processes))

    def follow(self, delay_s: float) -> None:
        """Close for `delay_s`, because the server refused a request of another process.

        Refusals that arrive while the limiter is closed belong together: they extend the time only.

        >>> limiter = RateLimiter()
        >>> limiter.follow(5)
        >>> limiter.state()
        <LimiterState.CLOSED: 'closed'>
        """
        with self._lock:
            if self._open.is_set():
                self._epoch += 1
                self._window = self._first_window
            elif self._clock.now() >= self._closed_until_s:
                self._epoch += 1
                self._window = max(1, self._window // 2)
            watch = self._close_locked(delay_s)
        if watch is not None:
            watch.event.set()

    def recently_closed(self) -> bool:
        """Whether it is closed, or was within the last ten seconds.

        >>> RateLimiter().recently_closed()
        False
        """
        return self._clock.now() < self._closed_until_s + RECENT_S

    def opens_in_s(self) -> float:
        """In how many seconds somebody may pass: 0 for now, inf when places must come back first.

        >>> RateLimiter().opens_in_s()
        0.0
        """
        with self._lock:
            if self._open.is_set():
                return 0.0
            closed_s = self._closed_until_s - self._clock.now()
            if closed_s > 0:
                return closed_s
            return 0.0 if self._in_flight < self._window else math.inf

    def renew_after_fork(self) -> None:
        """Keep what the server asked for, forget who waits and what the parent has under way."""
        self._lock = threading.Lock()
        was_open, self._open = self._open.is_set(), threading.Event()
        if was_open:
            self._open.set()
        self._in_flight = 0
        self._line = deque()

    def __repr__(self) -> str:
        state = self.state()
        with self._lock:
            counts = f"window {self._window}, {self._in_flight} in flight, {len(self._line)} in line"
        return f"<RateLimiter {state.value}, {counts}>"

    # ---------------------------------------------------- for gates

    def _close_locked(self, delay_s: float) -> _Turn | None:
        """Close until then; returns who must be woken to watch the time."""
        self._open.clear()
        self._closed_until_s = max(self._closed_until_s, self._clock.now() + max(delay_s, 0.0) * self._pace)
        return self._line[0] if self._line else None

    def _enter_locked(self, gate: Gate, turn: _Turn | None) -> Permit | None:
        """A permit; or a place in the line if there is a `turn` for it."""
        if gate._failure is not None:
            return None
        if self._open.is_set():
            return self._free
        if not self._line and self._has_room_locked():
            return self._count_locked()
        if turn is not None:
            self._line.append(turn)
        return None

    def _has_room_locked(self) -> bool:
        return self._in_flight < self._window and self._clock.now() >= self._closed_until_s

    def _count_locked(self) -> Permit:
        self._in_flight += 1
        return Permit(self._epoch, counted=True)

    def _admit_locked(self) -> list[_Turn]:
        """Let in who is first, as many as there is room for, and open if that was all."""
        admitted = []
        while self._line and self._has_room_locked():
            turn = self._line.popleft()
            turn.permit = self._count_locked()
            admitted.append(turn)
        wide = self._window >= OPEN_WINDOW and not self._line
        if wide and not self._open.is_set() and self._clock.now() >= self._closed_until_s:
            self._free = Permit(self._epoch, counted=False)
            self._open.set()
        return admitted

    def _watch_s_locked(self, turn: _Turn) -> float:
        """How long this turn may sleep; only the first in line has to look at the time."""
        if self._line and self._line[0] is turn:
            closed_s = self._closed_until_s - self._clock.now()
            if closed_s > 0:
                return closed_s
        return math.inf

    def _leave_locked(self, turns: list[_Turn]) -> _Turn | None:
        """Take turns out of the line; returns who must be woken to watch the time in place of the first."""
        if not turns:
            return None
        watched = self._line[0] in turns
        self._line = deque(turn for turn in self._line if turn not in turns)
        return self._line[0] if watched and self._line else None

    def _end(self, permit: Permit, *, success: bool) -> None:
        with self._lock:
            self._in_flight -= 1
            # What was sent before the last refusal says nothing about the time after it.
            if success and permit.epoch == self._epoch:
                self._window += 1
            admitted = self._admit_locked()
        for turn in admitted:
            turn.event.set()

    def _refused(self, permit: Permit, delay_s: float) -> None:
        with self._lock:
            if permit.counted:
                self._in_flight -= 1
            # All that were under way together are refused together; that counts as one refusal.
            first = permit.epoch == self._epoch
            if first:
                self._epoch += 1
                self._window = max(1, self._window // 2) if permit.counted else self._first_window
            watch = self._close_locked(delay_s)
        if watch is not None:
            watch.event.set()
        if first and self._announce is not None:
            self._announce(delay_s)


class Gate:
    """One client's way through a limiter. Thread-safe.

    >>> gate = RateLimiter().gate()
    >>> permit = gate.acquire(timeout=1)
    >>> gate.succeeded(permit)
    """

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self._failure: Exception | None = (
            None  # written under the limiter's lock, read without; set once, final
        )

    def try_acquire(self) -> Permit | None:
        """A permit if there is one now.

        Raises:
            Exception: the failure given to `close`.

        >>> RateLimiter().gate().try_acquire() is None
        False
        """
        return self._acquire(None)

    def acquire(self, timeout: float | None = None) -> Permit | None:
        """A permit, waiting at most `timeout` seconds; None when there was none in time.

        Raises:
            Exception: the failure given to `close`, also to those who are waiting.

        >>> RateLimiter().gate().acquire(timeout=1) is None
        False
        """
        permit = self._acquire(None)
        if permit is not None:
            return permit
        turn = _Turn(self)
        permit = self._acquire(turn)
        return permit if permit is not None else self._wait(turn, math.inf if timeout is None else timeout)

    def succeeded(self, permit: Permit) -> None:
        """The server took the request: give the permit back, and let one more go.

        >>> gate = RateLimiter().gate()
        >>> gate.succeeded(gate.acquire())
        """
        if permit.counted:
            self.limiter._end(permit, success=True)

    def failed(self, permit: Permit) -> None:
        """Neither taken nor refused for being too much: give the permit back.

        >>> gate = RateLimiter().gate()
        >>> gate.failed(gate.acquire())
        """
        if permit.counted:
            self.limiter._end(permit, success=False)

    def throttled(self, permit: Permit, delay_s: float) -> None:
        """The server asks for less: give the permit back, and close for `delay_s`.

        >>> gate = RateLimiter().gate()
        >>> gate.throttled(gate.acquire(), default_delay_s(1000))
        >>> gate.limiter
        <RateLimiter closed, window 10, 0 in flight, 0 in line>
        """
        self.limiter._refused(permit, delay_s)

    def close(self, failure: Exception) -> None:
        """Let nobody through here any more: who waits or comes later gets `failure`. Permits may still be
        given back.

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

    def _acquire(self, turn: _Turn | None) -> Permit | None:
        limiter = self.limiter
        if self._failure is None and limiter._open.is_set():
            return limiter._free
        with limiter._lock:
            permit = limiter._enter_locked(self, turn)
        if permit is None and self._failure is not None:
            raise fresh(self._failure)
        return permit

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
        """What there is for the turn now, else how long it may sleep. Lets others in too, if it is their
        time.
        """
        limiter = self.limiter
        turn.event.clear()
        with limiter._lock:
            admitted = limiter._admit_locked()
            permit, sleep_s = turn.permit, limiter._watch_s_locked(turn)
        for other in admitted:
            other.event.set()
        if permit is None and self._failure is not None:
            raise fresh(self._failure)
        return permit, sleep_s

    def _leave(self, turn: _Turn) -> Permit | None:
        """Stop waiting; returns the permit that came just now."""
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
    """The limiter of this process for a server and a key; it lives as long as somebody holds it.

    Args:
        base_url: the server.
        fingerprint: of the key, from `key_fingerprint`.
        clock: what a limiter that must be made waits with.
        pace: what the pauses of such a limiter are multiplied by.

    >>> fingerprint = key_fingerprint("tml-example")
    >>> one = shared_rate_limiter("https://host/", fingerprint)
    >>> one is shared_rate_limiter("https://host", fingerprint)
    True
    """
    return _limiters.get((base_url.rstrip("/"), fingerprint), lambda: RateLimiter(clock=clock, pace=pace))
