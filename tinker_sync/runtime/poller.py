"""`Poller`: the holder of requests that wait for their answers, and of timers.

A request waits in the poller without a thread of its own. When its socket is readable, the poller's thread
reads the bytes that have arrived. When the answer is complete or the request has failed, the thread passes
the outcome to `on_done`, once, and sends the small requests that follow over idle connections. Workers send
most other requests, because connecting and writing may block.

`poller_thread` has the thread, its steps, and the workers that guard and help it. The thread runs the users'
listeners of queue states; workers run the callbacks of futures. The lock is held for container work only.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.numbers import numbers
from tinker_sync.runtime import _fork
from tinker_sync.runtime.poller_thread import HELD_UP_S, PollerThread
from tinker_sync.runtime.tickets import (
    Leftovers,
    Opener,
    OpenRequest,
    Outcome,
    Readiness,
    Runner,
    Ticket,
    abort,
    closed_failure,
    descriptor_of,
    files_to_use,
    outcome_of,
)
from tinker_sync.transport.call import Call, SendFailed

QUICK_BYTES: Final = 32 * 1024  # a connection takes this many without waiting for the server to read
# The heap of expiries also holds requests that are over, until it has more entries than this number plus
# twice the number of watched requests.
STALE_EXPIRIES: Final = 1024
_JOIN_S: Final = 2.0  # the longest wait of `close` for the thread

_log = logging.getLogger(__name__)


class Poller(PollerThread):
    """The holder of the requests of one client that wait for their answers, and of its timers. Thread-safe.

    Args:
        http: sends requests.
        workers: run jobs that may block (connecting, sending large requests); guard and help the thread.
        clock: measures time.
        max_open: the most requests under way; further ones wait for their turn. None stands for the result
            of `files_to_use`, about half of the files that this process may open.
        needed: returns True while the thread must not end, although it has no work.
    """

    def __init__(
        self,
        http: Opener,
        workers: Runner,
        clock: Clock = SYSTEM_CLOCK,
        *,
        max_open: int | None = None,
        needed: Callable[[], object] = lambda: False,
    ) -> None:
        super().__init__(workers, clock)
        self._http = http
        self._needed = needed
        self._max_open = max_open or files_to_use()
        self._sequence = numbers()
        _fork.renew_in_child(self)
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._backlog: deque[Ticket] = deque()  # guarded by _lock; beyond the most that may be open
        self._open = 0  # guarded by _lock
        self._watched: dict[int, Ticket] = {}  # guarded by _lock; by the number of the socket
        self._expiries: list[tuple[float, int, Ticket]] = []  # guarded by _lock; a heap
        self._arrivals: list[Ticket] = []  # guarded by _lock; the thread will watch them
        self._called_off: list[Ticket] = []  # guarded by _lock; their sockets are to be closed
        self._timers: list[tuple[float, int, Ticket]] = []  # guarded by _lock; a heap
        self._look_at = -math.inf  # guarded by _lock; when the first timer or silent request may be due

    def renew_after_fork(self) -> None:
        """Drop the parent's requests and timers in a forked child, where the parent's thread does not run."""
        inherited = Leftovers([], self._readiness)
        closed = self._closed
        self._begin()
        self._closed = closed
        # Only close the copies: to end watches would affect the parent, which shares the kernel's socket set.
        inherited.close()

    # -------------------------------------------------------------------------------------- for the runtime

    def start(self, call: Call, on_done: Callable[[Outcome], object]) -> Ticket:
        """Send a request, now or when fewer requests are under way. Return its ticket, which can cancel it.

        Args:
            call: the request.
            on_done: called once, unless the ticket is cancelled, with the answer or with the failure to get
                one; on the poller's thread or on a worker. If the poller is closed or the system gives no
                thread, it may be called on this thread, or on the thread that calls `close`.
        """
        ticket = Ticket(self, on_done, call)
        with self._lock:
            closed = self._closed
            begin = not closed and self._open < self._max_open
            if begin:
                self._open += 1
            elif not closed:
                self._backlog.append(ticket)
        if closed:
            self._end(ticket, closed_failure())
        elif begin:
            self._schedule_send(ticket)
        return ticket

    def after(self, delay_s: float, action: Callable[[], object]) -> Ticket:
        """Run `action` after a delay, unless the poller is closed by then. The ticket can cancel it.
        `action` runs on the poller's thread, or on a worker that helps it. If the thread dies or cannot
        start, `action` runs at once, on a worker if there is one.
        """
        ticket = Ticket(self, action, None)
        at = self._clock.now() + max(delay_s, 0.0)
        with self._lock:
            if self._closed:
                return ticket
            heapq.heappush(self._timers, (at, next(self._sequence), ticket))
            start = self._wanted_locked()
            wake = self._sleeps_until > at
            guard = self._needs_guard()
        self._start_or_wake(start, wake=wake, guard=guard)
        return ticket

    def pause(self, pause_s: float, action: Callable[[], object]) -> Ticket:
        """Run `action` after a pause before another try, which the clock may shorten; see `after`."""
        return self.after(self._clock.shorten(pause_s), action)

    @property
    def under_way(self) -> int:
        """The number of requests that are open or wait for their turn."""
        with self._lock:
            return self._open + len(self._backlog)

    def close(self) -> None:
        """Fail the requests, drop the timers and let the thread end. May be called twice.
        Wait up to two seconds for the end of the thread, unless the caller is the thread itself.
        """
        with self._lock:
            self._closed = True
            doomed, self._backlog = list(self._backlog), deque()
            self._timers.clear()
            guard = self._needs_guard()
        if guard:
            self._ask_for_guard()
        failure = SendFailed(
            "the client was closed while the request waited", maybe_received=False, final=True
        )
        for ticket in doomed:
            self._end(ticket, failure)
        left_s = _JOIN_S
        while (thread := self._thread) is not None and left_s > 0:
            self._wake()
            if thread is threading.current_thread():
                return
            with suppress(RuntimeError):  # not started yet; it ends when it finds the poller closed
                thread.join(HELD_UP_S)  # not for longer, because another thread may take over
            left_s -= HELD_UP_S
        if thread is None:
            with self._lock:
                leftovers = self._detach_locked()
            self._fail_leftovers(leftovers)

    def forget(self, ticket: Ticket) -> None:
        """Make the poller's thread close the socket of a ticket that was cancelled."""
        if ticket.request is not None:
            with self._lock:
                self._called_off.append(ticket)
            self._wake()

    def __repr__(self) -> str:
        with self._lock:
            timers = len(self._timers)
        return f"<Poller {self.under_way} requests, {timers} timers>"

    # ------------------------------------------------------------------------- on workers and the thread

    def _schedule_send(self, ticket: Ticket) -> None:
        steps, call = self._next.steps, ticket.call
        body, fresh = (None, False) if call is None else (call.body, call.fresh)
        quick = (not body or len(body) <= QUICK_BYTES) and not fresh and self._http.has_idle_connection()
        # A worker may also open a connection, for the first request that follows.
        if steps is not None and (quick or (not steps and steps is not self._following)):
            steps.append((self._send, ticket))
            return
        try:
            self._workers.run(partial(self.run_step, self._send, ticket))
        except RuntimeError as error:  # the pool is closed, so this thread ends the call
            self._conclude(ticket, closed_failure(error))

    def _send(self, ticket: Ticket) -> None:
        call = ticket.call
        if call is None or not ticket.reaction:
            self._release()
            return
        try:
            request = self._http.open(call)
        except SendFailed as failed:
            self._conclude(ticket, failed)
        except Exception as error:  # noqa: BLE001  # a call waits for an outcome
            self._conclude(ticket, outcome_of(error))
        else:
            ticket.request = request
            self._watch(ticket, request)

    def _watch(self, ticket: Ticket, request: OpenRequest) -> None:
        descriptor, expires_at_s = request.fileno(), request.expires_at_s
        start = readiness = None
        wake = guard = False
        with self._lock:
            closed = self._closed
            if not closed:
                guard = self._in_step and not self._guarded and self._needs_guard()
                readiness = self._readiness
                if readiness is None or not readiness.takes_effect_at_once:
                    self._arrivals.append(ticket)
                    start, wake, readiness = self._wanted_locked(), self._sleeps_until > -math.inf, None
                else:
                    self._keep_locked(ticket, descriptor, expires_at_s)
                    wake = self._sleeps_until > expires_at_s
        if closed:
            self._conclude(ticket, abort(ticket))
            return
        if readiness is not None:
            self._begin_watch(readiness, ticket, descriptor)
            if not ticket.reaction:  # cancelled meanwhile
                self.forget(ticket)
        if wake or guard or start is not None:
            self._start_or_wake(start, wake=wake, guard=guard)

    def _keep_locked(self, ticket: Ticket, descriptor: int, expires_at_s: float) -> None:
        self._watched[descriptor] = ticket
        if expires_at_s < math.inf:
            heapq.heappush(self._expiries, (expires_at_s, next(self._sequence), ticket))
            if len(self._expiries) > 2 * len(self._watched) + STALE_EXPIRIES:
                alive = set(map(id, self._watched.values()))
                self._expiries = [entry for entry in self._expiries if id(entry[2]) in alive]
                heapq.heapify(self._expiries)

    def _begin_watch(self, readiness: Readiness, ticket: Ticket, descriptor: int) -> None:
        try:
            readiness.watch(descriptor)
        except (ValueError, OSError):  # another thread closed the socket; reading it shows why
            with self._lock:
                watched = self._watched.get(descriptor) is ticket
                if watched:
                    del self._watched[descriptor]
            if watched:
                self._due.append((self._read, ticket))
                self._wake()

    def _read(self, ticket: Ticket) -> None:
        request = ticket.request
        if request is None or not ticket.reaction:
            abort(ticket)
            self._release()
            return
        try:
            reply = request.step()
        except SendFailed as failed:
            self._conclude(ticket, failed)
        except Exception as error:  # noqa: BLE001  # a call waits for an outcome
            self._conclude(ticket, outcome_of(error))
        else:
            if reply is None:
                self._watch(ticket, request)
            else:
                ticket.request = None
                self._conclude(ticket, reply)

    def _conclude(self, ticket: Ticket, outcome: Outcome) -> None:
        request, ticket.request = ticket.request, None
        if request is not None:
            request.abort()  # its answer was not read completely
        self._release()
        self._end(ticket, outcome)

    def _release(self) -> None:
        """Count a request as ended, and send the next one of the backlog, if any, in its place."""
        with self._lock:
            self._open -= 1
            if not self._backlog:
                return
            following = None
            while self._backlog and following is None:
                candidate = self._backlog.popleft()
                following = None if candidate.ended else candidate
            if following is not None:
                self._open += 1
        if following is not None:
            self._schedule_send(following)

    @staticmethod
    def _end(ticket: Ticket, *outcome: Outcome) -> None:
        action = ticket.take()
        if action is None:
            return
        try:
            action(*outcome)
        except Exception:  # noqa: BLE001  # the failure of one request must not end the worker of others
            _log.exception("a reaction to an answer failed")

    # -------------------------------------------------------------------------------------- the thread

    def _lose_thread(self, reason: str = "the client was closed") -> None:
        """Fail the requests of a thread that has died or could not start. Run its steps and timers at once.

        Workers run the steps and the timers, if the system gives workers. The next request starts another
        thread. The timers do not wait for that thread, because no thread watches the clock until it starts.
        """
        with self._lock:
            self._thread = None
            leftovers = self._detach_locked()
            timers, self._timers = self._timers, []
        self._fail_leftovers(leftovers, reason)
        self._leave_steps(*((self._end, ticket) for *_, ticket in timers))

    def step(self, timeout_s: float | None) -> bool:
        """Take one turn of the thread: wait for sockets and timers, and take the steps that are due then.

        Return False if the thread must end: no work is left, the poller is closed, or another thread runs.

        Args:
            timeout_s: the longest wait if there is no request and no timer; None: no limit.
        """
        leader, due = self._thread, self._due
        readiness = self._readiness or self._open_readiness()
        if self._arrivals:
            self._take_arrivals(readiness)
        wait_s = self._time_to_wait(timeout_s)
        ready = readiness.wait(wait_s)
        with self._lock:
            self._sleeps_until = -math.inf
            for descriptor in ready:
                ticket = self._watched.pop(descriptor, None)
                if ticket is not None:  # None if the descriptor is the one that wakes this thread
                    due.append((self._read, ticket))
            over = self._expire_locked() if self._called_off or self._clock.now() >= self._look_at else ()
            self._in_step = acts = bool(due or over)
            # A step that holds up no other work needs no guard.
            guard = acts and not self._guarded and (len(due) + len(over) > 1 or self._has_more())
            if guard:
                self._guarded = True
        for descriptor, ticket in over:
            # First, because the step closes the socket, and its number may then belong to a new one.
            readiness.forget(descriptor)
            due.append((self._read, ticket))
        if guard:
            self._begin_guard()
        idle = not due and not ready and wait_s == timeout_s
        if acts and not self._take_due(leader):
            self._wake()
            return False
        return self._go_on(idle=idle) if idle or self._closed else True

    def _has_more(self) -> bool:
        """Return True if the thread has requests or timers to look after, beside the steps that are due."""
        return bool(self._watched or self._timers or self._arrivals)

    def _take_arrivals(self, readiness: Readiness) -> None:
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        for ticket in arrivals:
            request = ticket.request  # read once: a worker may be ending it now
            if request is None or ticket.ended:  # called off since it was sent
                self._due.append((self._read, ticket))
                continue
            descriptor, expires_at_s = request.fileno(), request.expires_at_s
            with self._lock:
                self._keep_locked(ticket, descriptor, expires_at_s)
            self._begin_watch(readiness, ticket, descriptor)

    def _time_to_wait(self, timeout_s: float | None) -> float | None:
        with self._lock:
            if not self._watched:
                self._expiries.clear()  # expiries of requests that are over would keep an idle thread alive
            soonest = self._expiries[0][0] if self._expiries else math.inf
            while self._timers and self._timers[0][2].ended:  # cancelled
                heapq.heappop(self._timers)
            if self._timers and self._timers[0][0] < soonest:
                soonest = self._timers[0][0]
            self._sleeps_until = self._look_at = soonest
            # Last, because `run_soon` first adds a step, without the lock, and then looks at `_sleeps_until`.
            if self._arrivals or self._called_off or self._closed or self._due:
                self._sleeps_until = self._look_at = -math.inf
                return 0.0
            if soonest < math.inf:
                return max(soonest - self._clock.now(), 0.0)
            return None if self._watched else timeout_s

    def _expire_locked(self) -> list[tuple[int, Ticket]]:
        """Make the timers due whose time has come. Return the requests that must end, with their descriptors.
        These requests were silent for too long, or were cancelled. They are not watched any more.
        """
        now = self._clock.now()
        while self._timers and self._timers[0][0] <= now:
            self._due.append((self._end, heapq.heappop(self._timers)[2]))
        ended, self._called_off = self._called_off, []
        while self._expiries and self._expiries[0][0] <= now:
            ended.append(heapq.heappop(self._expiries)[2])
        over = []
        for ticket in ended:
            descriptor = descriptor_of(ticket)
            if self._watched.get(descriptor) is ticket:
                del self._watched[descriptor]
                over.append((descriptor, ticket))  # reading it ends it
        return over

    def _go_on(self, *, idle: bool) -> bool:
        with self._lock:
            busy = bool(self._watched or self._arrivals or self._timers)
            if self._due or (not self._closed and (busy or not idle or self._needed())):
                return True
            self._thread = None
            # Under the same lock, because another thread may take over as soon as the lock is free.
            leftovers = self._detach_locked()
        self._fail_leftovers(leftovers)
        if self._due:  # `run_soon` has added one since
            self._leave_due()
        return False

    # -------------------------------------------------------------------------------------- ends

    def _detach_locked(self) -> Leftovers:
        """Remove and return the requests and the set of sockets of the thread, so that the thread can end."""
        leftovers = Leftovers([*self._watched.values(), *self._arrivals], self._readiness)
        self._watched, self._expiries, self._arrivals = {}, [], []
        self._readiness = None
        self._sleeps_until = -math.inf
        self._in_step = False
        return leftovers

    def _fail_leftovers(self, leftovers: Leftovers, reason: str = "the client was closed") -> None:
        leftovers.close()
        for ticket in leftovers.tickets:
            self._conclude(ticket, abort(ticket, reason))
