"""`Poller`: one thread that watches the sockets of all requests under way, and all timers.

A worker opens a request, because connecting and writing may block. The request then waits in the poller
without a thread of its own. When its socket is readable, a worker reads the bytes that have arrived. If the
answer is complete or has failed, that worker passes it to `on_done`, exactly once. If it is not complete, the
request goes back to the poller. Few workers, at first one, read the answers that are readable at the same
time, one after the other.

The thread is called `tinker-poll`. It starts with the first request and ends after `IDLE_S` without any. It
never runs code of users, and it never connects, reads or decodes. The lock is held for container work only.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.runtime import _fork
from tinker_sync.runtime.tickets import (
    Drain,
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
    make_readiness,
    outcome_of,
)
from tinker_sync.transport.call import Call, SendFailed

IDLE_S: Final = 5.0
# A connection takes this many bytes at once, without waiting for the server to read.
QUICK_BYTES: Final = 32 * 1024
# A large answer, or the renewal of a token, may hold up a worker that reads. After this time another worker
# takes over the answers that wait behind it.
_HELD_UP_S: Final = 0.02
# Requests that are over stay in the heap of expiries until there are this many more entries than twice the
# watched requests.
_STALE_EXPIRIES: Final = 1024
# The longest wait for a worker that starts the thread ahead.
_RESERVE_S: Final = 1.0

_log = logging.getLogger(__name__)


class _NextOnThisWorker(threading.local):
    """The jobs that the current worker does itself after its current step."""

    jobs: deque[Callable[[], object]] | None = None  # None outside of a step


class Poller:
    """The holder of every request under way and every timer of one client. Thread-safe.

    Args:
        http: sends requests.
        workers: run the jobs that may block: sending, reading, callbacks.
        clock: measures time.
        max_open: the most requests under way; further ones wait for their turn. None stands for half of the
            files that this process may open.
        pace: a factor for the pauses of `after`.
        needed: returns True while the thread must not end, although it has no work.
    """

    def __init__(
        self,
        http: Opener,
        workers: Runner,
        clock: Clock = SYSTEM_CLOCK,
        *,
        max_open: int | None = None,
        pace: float = 1.0,
        needed: Callable[[], object] = lambda: False,
    ) -> None:
        self._http = http
        self._workers = workers
        self._clock = clock
        self._pace = pace
        self._needed = needed
        self._max_open = max_open or files_to_use()
        self._sequence = itertools.count()
        self._next = _NextOnThisWorker()
        _fork.renew_in_child(self)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._backlog: deque[Ticket] = deque()  # guarded by _lock; beyond the most that may be open
        self._open = 0  # guarded by _lock
        self._watched: dict[int, Ticket] = {}  # guarded by _lock; by the number of the socket
        self._expiries: list[tuple[float, int, Ticket]] = []  # guarded by _lock; a heap
        self._arrivals: list[Ticket] = []  # guarded by _lock; the thread will watch them
        self._called_off: list[Ticket] = []  # guarded by _lock; their sockets are to be closed
        self._timers: list[tuple[float, int, Ticket]] = []  # guarded by _lock; a heap
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._sleeps_until = -math.inf  # guarded by _lock; -inf while the thread does not sleep
        self._closed = False  # guarded by _lock; final
        self._readiness: Readiness | None = None  # written under _lock
        self._wake_in, self._wake_out = -1, -1
        self._readable = Drain(self._workers, self._handle_readable, self._refuse_readable)

    def renew_after_fork(self) -> None:
        """Drop the parent's requests in a forked child, where the parent's thread does not exist."""
        inherited = Leftovers([], self._readiness, (self._wake_in, self._wake_out))
        closed = self._closed
        self._begin()
        self._closed = closed
        # Only close: the parent shares the kernel's set of sockets, so ending watches would affect it.
        inherited.close()

    # -------------------------------------------------------------------------------------- for the runtime

    def start(self, call: Call, on_done: Callable[[Outcome], object]) -> Ticket:
        """Send a request. A worker calls `on_done` with the answer or with the failure to get one."""
        ticket = Ticket(self.forget, on_done, call)
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
        """Run `action` on a worker after a delay, unless the poller is closed by then."""
        ticket = Ticket(self.forget, action, None)
        at = self._clock.now() + max(delay_s, 0.0) * self._pace
        with self._lock:
            if self._closed:
                return ticket
            heapq.heappush(self._timers, (at, next(self._sequence), ticket))
            start = self._wanted_locked()
            wake = self._wakes_locked(at)
        self._start_or_wake(start, wake=wake)
        return ticket

    def reserve(self) -> None:
        """Start the thread if there is none, and wait for that. Without it, the first request starts it.

        A worker starts the thread: in the main thread, Ctrl-C could come between the note of the thread and
        its start.
        """
        if self._thread is not None:
            return
        started = threading.Event()
        try:
            self._workers.run(partial(self._start_ahead, started))
        except RuntimeError:  # closed, or the system gives no thread; a request shows why
            return
        started.wait(_RESERVE_S)

    def _start_ahead(self, started: threading.Event) -> None:
        try:
            with self._lock:
                start = None if self._closed else self._wanted_locked()
            self._start_or_wake(start, wake=False)
        finally:
            started.set()

    def step_on_worker(self, step: Callable[..., object], *given: Any) -> None:
        """Call `step(*given)` on this worker thread, and then do the short jobs that follow from it.

        This is for short steps that end by starting requests. No other worker has to wake up for the
        requests, and they can use the connection whose answer led to them.
        """
        following = self._next
        if following.jobs is not None:
            step(*given)
            return
        jobs = following.jobs = deque()
        try:
            step(*given)
            while jobs:
                jobs.popleft()()
        finally:
            following.jobs = None
            for job in jobs:
                try:
                    self._workers.run(partial(self.step_on_worker, job))
                except RuntimeError:  # the pool is closed, so the job fails at once
                    job()

    def follow(self, job: Callable[[], object]) -> bool:
        """Do a short job on this worker after its current step. Return False if this thread is in no step."""
        jobs = self._next.jobs
        if jobs is not None:
            jobs.append(job)
        return jobs is not None

    @property
    def under_way(self) -> int:
        """Return the number of requests that are open or wait for their turn."""
        with self._lock:
            return self._open + len(self._backlog)

    def close(self) -> None:
        """Fail the requests, drop the timers and end the thread. May be called twice."""
        with self._lock:
            self._closed = True
            doomed, self._backlog = list(self._backlog), deque()
            self._timers.clear()
            thread = self._thread
        failure = SendFailed(
            "the client was closed while the request waited", maybe_received=False, final=True
        )
        for ticket in doomed:
            self._end(ticket, failure)
        if thread is None:
            with self._lock:
                leftovers = self._detach_locked()
            self._fail_leftovers(leftovers)
        else:
            self._wake()
            if thread is not threading.current_thread():
                with suppress(RuntimeError):  # not started yet; it ends when it finds the poller closed
                    thread.join(2.0)

    def forget(self, ticket: Ticket) -> None:
        """Let the thread close the socket of a ticket that was called off."""
        if ticket.request is not None:
            with self._lock:
                self._called_off.append(ticket)
            self._wake()

    def __repr__(self) -> str:
        with self._lock:
            timers = len(self._timers)
        return f"<Poller {self.under_way} requests, {timers} timers>"

    # -------------------------------------------------------------------------------------- on workers

    def _schedule_send(self, ticket: Ticket) -> None:
        jobs = self._next.jobs
        if jobs is not None and (not jobs or self._is_quick(ticket)):
            jobs.append(partial(self._send, ticket))
            return
        try:
            self._workers.run(partial(self.step_on_worker, self._send, ticket))
        except RuntimeError as error:
            # The pool is closed, so this thread ends the call.
            self._conclude(ticket, closed_failure(error))

    def _is_quick(self, ticket: Ticket) -> bool:
        """Return True if the request can probably be sent without waiting."""
        body = None if ticket.call is None else ticket.call.body
        return (body is None or len(body) <= QUICK_BYTES) and self._http.has_idle_connection()

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
        wake = False
        with self._lock:
            closed = self._closed
            if not closed:
                readiness = self._readiness
                if readiness is None or not readiness.takes_effect_at_once:
                    self._arrivals.append(ticket)
                    start, wake, readiness = self._wanted_locked(), self._wakes_locked(-math.inf), None
                else:
                    self._keep_locked(ticket, descriptor, expires_at_s)
                    wake = self._wakes_locked(expires_at_s)
        if closed:
            self._conclude(ticket, abort(ticket))
            return
        if readiness is not None:
            self._begin_watch(readiness, ticket, descriptor)
            if not ticket.reaction:  # called off meanwhile
                self.forget(ticket)
        self._start_or_wake(start, wake=wake)

    def _keep_locked(self, ticket: Ticket, descriptor: int, expires_at_s: float) -> None:
        self._watched[descriptor] = ticket
        if expires_at_s < math.inf:
            heapq.heappush(self._expiries, (expires_at_s, next(self._sequence), ticket))
            if len(self._expiries) > 2 * len(self._watched) + _STALE_EXPIRIES:
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
                self._readable.add([ticket])

    def _handle_readable(self, ticket: Ticket) -> None:
        self.step_on_worker(self._read, ticket)

    def _refuse_readable(self, ticket: Ticket, error: Exception) -> None:
        self._conclude(ticket, closed_failure(error))

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
        """Give the place of a request that is over to the next one in the backlog."""
        with self._lock:
            self._open -= 1
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

    def _wanted_locked(self) -> threading.Thread | None:
        """Return a new thread for the caller to start, or None if there is a thread already."""
        if self._thread is not None:
            return None
        self._thread = threading.Thread(target=self._loop, name="tinker-poll", daemon=True)
        return self._thread

    def _wakes_locked(self, at: float) -> bool:
        """Return True if the thread sleeps beyond `at`. Then this caller alone must wake it."""
        if self._sleeps_until <= at:
            return False
        self._sleeps_until = -math.inf
        return True

    def _start_or_wake(self, start: threading.Thread | None, *, wake: bool) -> None:
        if start is not None:
            self._start(start)
        elif wake:
            self._write_wake()

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads, or the interpreter is ending
            self._lose_thread(f"no thread could be started ({error})")

    def _wake(self) -> None:
        with self._lock:
            wake = self._wakes_locked(-math.inf)
        if wake:
            self._write_wake()

    def _write_wake(self) -> None:
        descriptor = self._wake_out
        if descriptor >= 0:
            with suppress(OSError):  # if the pipe is full, the thread wakes anyway; if closed, it has ended
                os.write(descriptor, b".")

    def _loop(self) -> None:
        try:
            while self.step(IDLE_S):
                pass
        except BaseException:
            _log.exception("the poller failed")
            self._lose_thread()
            raise

    def _lose_thread(self, reason: str = "the client was closed") -> None:
        """Fail the requests that a loop holds which has died or could not start.

        The next request starts another loop. The actions of the timers run at once: without a request no
        thread would watch the clock for them.

        Args:
            reason: the reason for the failure of the requests.
        """
        with self._lock:
            self._thread = None
            leftovers = self._detach_locked()
            timers, self._timers = self._timers, []
        self._fail_leftovers(leftovers, reason)
        for *_, ticket in timers:
            if not ticket.ended:
                self._run_timer(ticket)

    def step(self, timeout_s: float | None) -> bool:
        """Take one turn: take arrivals, wait for sockets and timers, pass on what is ready.

        Return False if nothing is left and the sockets of the thread are closed.

        Args:
            timeout_s: the longest wait if there is no request and no timer.
        """
        readiness = self._readiness or self._open_readiness()
        self._take_arrivals(readiness)
        first = self._readable.first if self._readable.items else None
        wait_s = self._time_to_wait(timeout_s)
        if first is not None:
            wait_s = _HELD_UP_S if wait_s is None else min(wait_s, _HELD_UP_S)
        ready = readiness.wait(wait_s)
        with self._lock:
            self._sleeps_until = -math.inf
            tickets = [
                ticket for descriptor in ready if (ticket := self._watched.pop(descriptor, None)) is not None
            ]
        if len(tickets) < len(ready):  # one may be the pipe that wakes this thread
            with suppress(BlockingIOError):
                os.read(self._wake_in, 4096)
            readiness.watch(self._wake_in)
        if tickets or first is not None:
            self._readable.add(tickets, held_up=not tickets and self._readable.first is first)
        self._expire(readiness)
        self._fire_timers()
        return self._go_on(idle=not ready and first is None and wait_s == timeout_s)

    def _open_readiness(self) -> Readiness:
        readiness = make_readiness()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        readiness.watch(self._wake_in)
        with self._lock:
            self._readiness = readiness
        return readiness

    def _take_arrivals(self, readiness: Readiness) -> None:
        with self._lock:
            if not self._arrivals:
                return
            arrivals, self._arrivals = self._arrivals, []
        for ticket in arrivals:
            request = ticket.request  # read once: a worker may be ending it now
            if request is None or ticket.ended:  # called off since it was sent
                self._readable.add([ticket])
                continue
            descriptor, expires_at_s = request.fileno(), request.expires_at_s
            with self._lock:
                self._keep_locked(ticket, descriptor, expires_at_s)
            self._begin_watch(readiness, ticket, descriptor)

    def _time_to_wait(self, timeout_s: float | None) -> float | None:
        now = self._clock.now()
        with self._lock:
            if not self._watched:
                self._expiries.clear()  # expiries of requests that are over would keep an idle thread alive
            if self._arrivals or self._called_off or self._closed:
                return 0.0
            soonest = min([heap[0][0] for heap in (self._timers, self._expiries) if heap], default=math.inf)
            self._sleeps_until = math.inf if self._watched or timeout_s is None else now + timeout_s
            self._sleeps_until = min(self._sleeps_until, soonest)
            watched = bool(self._watched)
        if soonest < math.inf:
            return max(soonest - now, 0.0)
        return None if watched else timeout_s

    def _expire(self, readiness: Readiness) -> None:
        """Pass requests that were silent for too long, or were called off, to workers, which end them."""
        now = self._clock.now()
        over: list[tuple[int, Ticket]] = []
        with self._lock:
            if not self._called_off and not (self._expiries and self._expiries[0][0] <= now):
                return
            ended, self._called_off = self._called_off, []
            while self._expiries and self._expiries[0][0] <= now:
                ended.append(heapq.heappop(self._expiries)[2])
            for ticket in ended:
                descriptor = descriptor_of(ticket)
                if self._watched.get(descriptor) is ticket:
                    del self._watched[descriptor]
                    over.append((descriptor, ticket))
        for descriptor, _ in over:
            readiness.forget(descriptor)
        self._readable.add([ticket for _, ticket in over])

    def _fire_timers(self) -> None:
        now = self._clock.now()
        due = []
        with self._lock:
            while self._timers and self._timers[0][0] <= now:
                due.append(heapq.heappop(self._timers)[2])
        for ticket in due:
            if not ticket.ended:
                self._run_timer(ticket)

    def _run_timer(self, ticket: Ticket) -> None:
        try:
            self._workers.run(partial(self.step_on_worker, self._end, ticket))
        except RuntimeError:
            _log.debug("a timer came after the workers had gone")

    def _go_on(self, *, idle: bool) -> bool:
        with self._lock:
            busy = bool(self._watched or self._arrivals or self._timers or self._readable.items)
            if not self._closed and (busy or not idle or self._needed()):
                return True
            self._thread = None
            # Under the same lock, because another thread may take over as soon as the lock is free.
            leftovers = self._detach_locked()
        self._fail_leftovers(leftovers)
        return False

    def _detach_locked(self) -> Leftovers:
        """Remove and return everything that the thread works with, so that it can end."""
        tickets = [*self._watched.values(), *self._arrivals]
        leftovers = Leftovers(tickets, self._readiness, (self._wake_in, self._wake_out))
        self._watched, self._expiries, self._arrivals = {}, [], []
        self._readiness = None
        self._wake_in, self._wake_out = -1, -1
        self._sleeps_until = -math.inf
        return leftovers

    def _fail_leftovers(self, leftovers: Leftovers, reason: str = "the client was closed") -> None:
        leftovers.close()
        for ticket in leftovers.tickets:
            self._conclude(ticket, abort(ticket, reason))
