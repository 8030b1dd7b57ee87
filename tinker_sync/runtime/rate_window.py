"""`RateWindow`: the number of requests that a rate limiter lets pass, and the time when it lets none pass.

While the limiter is open, no permit is counted. A refusal (429), or a queue that the server reports as
paused, closes the window for a time: no request passes. Then it reopens for a small number of requests. The
number grows by one with each request that succeeds; a further refusal halves the number. The limiter opens
when the window covers all requests that can be in their send phase (until the server accepts or refuses
them), and no request waits. So the requests that gathered meanwhile never go all at once.

A server often refuses because it works on as many requests as it can hold. So a refusal also bounds the work:
the requests that the server has accepted and not finished. The bound is about the work that the server held
when it refused; there is no bound if that was less than `FIRST_WINDOW` requests. While the bound lasts, a
request passes when another one ends, so the server need not refuse. `RECENT_S` after the pause the bound
ends, and a small window finds out what the server holds by then.

A refusal that names no time closes the window for a default time. When half of the bounded work has ended,
the server has room, so the window reopens before the time is over. A server that refuses the first requests
after that had another reason, and the next pause lasts for its whole time. If a limiter shares its pauses
with other processes, all its pauses last for their whole time.

This is arithmetic without a lock. The limiter holds its lock when it calls a method, except for `is_closed`,
which only reads.
"""

from __future__ import annotations

import math
from typing import Final

from tinker_sync._clock import Clock

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


class Permit:
    """A permission to send one request. A `counted` one uses a place in the window until it is given back."""

    __slots__ = ("counted", "epoch")

    def __init__(self, epoch: int, counted: bool) -> None:
        self.epoch = epoch
        self.counted = counted


class RateWindow:
    """The window of one limiter: how many requests may pass, how many the server may work on, and the pause.

    Not thread-safe: the limiter guards it with a lock.

    Args:
        clock: measures time.
        pace: the factor by which pauses are multiplied.
    """

    def __init__(self, clock: Clock, pace: float) -> None:
        self._clock = clock
        self._pace = pace
        self.size = OPEN_WINDOW
        """The most requests in their send phase, once the pause is over."""
        self.epoch = 0
        """Grows with each refusal that the window counts; a permit of an earlier epoch does not widen it."""
        self.in_flight = 0
        """The number of counted permits that were not given back."""
        self.work: set[object] = set()
        """The requests that the server works on. Any thread may add or discard one, without the lock."""
        self.has_ended = False
        """True if some work has ended since there was none; set without the lock."""
        self._first_size = FIRST_WINDOW
        self.closed_until_s = -math.inf
        """The end of the latest pause; it may be in the past."""
        self._most_work = math.inf  # the bound
        self._may_hold_more = False  # no work has ended since the refusal
        self._ends_with_work = False  # the pause may end before its time

    def is_closed(self) -> bool:
        """Return True during a pause."""
        return self._clock.now() < self.closed_until_s

    def limits_nothing(self) -> bool:
        """Return True if no request has to wait for this window."""
        return self.size >= OPEN_WINDOW and math.isinf(self._most_work) and not self.is_closed()

    def changes_in_s(self) -> float:
        """Return the seconds until a request may pass just because time has gone by.

        Return infinity if a request may pass only when another one ends.
        """
        closed_s = self.closed_until_s - self._clock.now()
        if closed_s > 0:
            return closed_s
        return closed_s + RECENT_S if math.isfinite(self._most_work) else math.inf

    # ---------------------------------------------------- requests

    def has_room(self) -> bool:
        """Return True if a request may pass now."""
        if math.isfinite(self._most_work) and self._clock.now() >= self.closed_until_s + RECENT_S:
            self._most_work = math.inf
            self.size = min(self.size, self._first_size)
        if self.in_flight >= self.size or self.in_flight + len(self.work) >= self._most_work:
            return False
        return not self.is_closed()

    def count(self) -> Permit:
        """Return a permit for a request that passes, and count it."""
        self.in_flight += 1
        return Permit(self.epoch, counted=True)

    def end(self, permit: Permit, *, success: bool) -> None:
        """Take a counted permit back. A success since the last refusal makes the window wider by one."""
        self.in_flight -= 1
        # A request sent before the last refusal proves nothing about the time after it.
        if success and permit.epoch == self.epoch:
            self.size += 1

    def bound_work(self) -> None:
        """Limit the requests that the server works on to the number that it works on now.

        The limit is a little lower if a request has ended since the server last worked on none. The server
        finishes a request some time before this client has the result, so some of the work may be over. This
        method changes nothing if the server works on few requests, because its refusal then has another
        reason, nor if a request has ended since the refusal.
        """
        work = len(self.work)
        if self._may_hold_more and work >= FIRST_WINDOW:
            self._most_work = work - work // _SPARE if self.has_ended else work

    def end_work(self) -> None:
        """Take note that the server has finished a request.

        If the pause may end early, end it once half of the bounded work has ended.
        """
        self._may_hold_more = False
        if self._ends_with_work and 2 * len(self.work) <= self._most_work < math.inf:
            self._ends_with_work = False
            self.closed_until_s = min(self.closed_until_s, self._clock.now())

    # ---------------------------------------------------- pauses

    def pause(self, delay_s: float, *, was_open: bool) -> None:
        """Close for `delay_s`, because the server has paused the queue.

        Then reopen for at most `FIRST_WINDOW` requests, or for this process's part of them (`share_among`).
        `was_open` is True if the limiter was open.
        """
        if was_open:
            self.epoch += 1
        self.size = min(self.size, self._first_size)
        self._ends_with_work = False
        self._close(delay_s)

    def follow(self, delay_s: float, *, was_open: bool) -> None:
        """Close for `delay_s`, because the server has refused a request of another process.

        If the limiter `was_open`, then reopen for `FIRST_WINDOW` requests, or for this process's part of them
        (`share_among`). If it was reopening, halve the size. A refusal during a pause only extends the pause.
        """
        if was_open:
            self.epoch += 1
            self.size = self._first_size
        elif not self.is_closed():
            self.epoch += 1
            self.size = max(1, self.size // 2)
        self._ends_with_work = False
        self._close(delay_s)

    def refuse(self, permit: Permit, delay_s: float, *, may_end_early: bool) -> bool:
        """Take back the permit of a refused request, and close for `delay_s`.

        Refusals of requests that were under way together count as one. Return True for the first of them.

        Args:
            permit: the permit of the refused request.
            delay_s: the length of the pause.
            may_end_early: True if the pause may end when half of the work has ended.
        """
        if permit.counted:
            self.in_flight -= 1
        first = permit.epoch == self.epoch
        if first:
            self._ends_with_work = not permit.counted or self.size > self._first_size
            self.epoch += 1
            self.size = max(1, self.size // 2) if permit.counted else self._first_size
        self._ends_with_work = self._ends_with_work and may_end_early
        self._close(delay_s, late=not first)
        return first

    def share_among(self, processes: int) -> None:
        """Divide `FIRST_WINDOW`, the size after a refusal, among the processes that share the server's limit.

        The part of a process is at least 1. A closed window reopens with at most the part of this process.
        """
        self._first_size = max(1, FIRST_WINDOW // max(1, processes))
        if self.is_closed():
            self.size = min(self.size, self._first_size)

    def forget_requests(self) -> None:
        """Forget the requests of the parent in a forked child."""
        self.in_flight = 0
        self.work = set()

    def _close(self, delay_s: float, *, late: bool = False) -> None:
        # The refusals of one storm arrive one after the other, while work ends. The first one counts.
        if not late and not self.is_closed():
            self._may_hold_more = True
            self._most_work = math.inf
        self.bound_work()
        self.closed_until_s = max(self.closed_until_s, self._clock.now() + max(delay_s, 0.0) * self._pace)
