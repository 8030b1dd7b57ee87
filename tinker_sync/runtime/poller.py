"""One thread that holds every request under way, by the readiness of its socket, and every timer.

A request is opened on a worker (connecting and writing may block), then waits here without a thread of its
own. When its socket is readable a worker takes what has come; a whole answer, or the failure to get one, is
handed to `on_done` on that worker, exactly once. An answer that is not whole yet comes back here.

The thread is called `tinker-poll`. It starts with the first request and ends after `IDLE_S` without any. It
never runs code of users, never connects, reads or decodes, and holds the lock for container work only.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.runtime import _fork
from tinker_sync.runtime.tickets import (
    Opener,
    Outcome,
    Runner,
    Ticket,
    aborted,
    closed_failure,
    descriptor_of,
    outcome_of,
    wrapped,
)
from tinker_sync.transport.call import Call, SendFailed

IDLE_S: Final = 5.0
# Each open request is a file; the rest of the program needs some too.
_SHARE_OF_FILES: Final = 0.5
_FEWEST_OPEN: Final = 16
_UNLIMITED_FILES: Final = 65536
# Ready sockets are handed over in batches: one queue operation for several short reads.
_BATCH: Final = 8
# Requests that are over stay in the heap of expiries; above this many more than are alive, they go.
_STALE_EXPIRIES: Final = 1024

_log = logging.getLogger(__name__)


class _Hand(threading.local):
    """What the worker we are on will send itself once its present step is done."""

    busy = False
    ticket: Ticket | None = None


class Poller:
    """Every request under way and every timer of one client. Thread-safe.

    Args:
        http: sends requests.
        workers: run what may block: sending, reading, callbacks.
        clock: what time it is.
        max_open: how many requests may be under way; more wait their turn. None: half of the files this
            process may open.
        pace: what the pauses of `after` are multiplied by.
    """

    def __init__(
        self,
        http: Opener,
        workers: Runner,
        clock: Clock = SYSTEM_CLOCK,
        *,
        max_open: int | None = None,
        pace: float = 1.0,
    ) -> None:
        self._http = http
        self._workers = workers
        self._clock = clock
        self._pace = pace
        self._max_open = max_open or _files_to_use()
        self._sequence = itertools.count()
        self._hand = _Hand()
        _fork.renew_in_child(self)
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._backlog: deque[Ticket] = deque()  # guarded by _lock; more than may be open
        self._open = 0  # guarded by _lock
        self._arrivals: deque[Ticket] = deque()  # guarded by _lock; opened, not yet watched
        self._called_off: list[Ticket] = []  # guarded by _lock; their sockets are to be closed
        self._timers: list[tuple[float, int, Ticket]] = []  # guarded by _lock; a heap
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._asleep = False  # guarded by _lock; the thread waits and must be woken
        self._closed = False  # guarded by _lock; final
        # Only the thread touches these; `step` is the thread in tests.
        self._watched: dict[int, Ticket] = {}
        self._expiries: list[tuple[float, int, Ticket]] = []
        self._selector: selectors.BaseSelector | None = None
        self._wake_in, self._wake_out = -1, -1

    def renew_after_fork(self) -> None:
        """The parent's thread does not exist here, and its requests are its own."""
        inherited = _Leftovers({}, [], self._selector, (self._wake_in, self._wake_out))
        closed = self._closed
        self._begin()
        self._closed = closed
        # Closing is safe, unregistering is not: epoll shares its set of sockets with the parent.
        inherited.close()

    # -------------------------------------------------------------------------------------- for the runtime

    def start(self, call: Call, on_done: Callable[[Outcome], object]) -> Ticket:
        """Send a request; `on_done` gets its answer, or the reason why there is none, on a worker."""
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
            self._have_sent(ticket)
        return ticket

    def after(self, delay_s: float, action: Callable[[], object]) -> Ticket:
        """Run `action` on a worker once this much time has gone by. Not at all once the poller is closed."""
        ticket = Ticket(self, action, None)
        entry = (self._clock.now() + max(delay_s, 0.0) * self._pace, next(self._sequence), ticket)
        with self._lock:
            if self._closed:
                return ticket
            heapq.heappush(self._timers, entry)
            first = self._timers[0] is entry
            start = self._wanted_locked()
        self._start_or_wake(start, wake=first)
        return ticket

    def step_on_worker(self, step: Callable[[], object]) -> None:
        """Call `step()`, and then send the first request it has started, from this thread, a worker's.

        For short steps that end where they start a request: no other worker need wake up for it, and the
        connection whose answer led to it is at hand.
        """
        hand = self._hand
        if hand.busy:
            step()
            return
        hand.busy = True
        try:
            step()
            while (ticket := hand.ticket) is not None:
                hand.ticket = None
                self._send(ticket)
        finally:
            hand.busy = False
            ticket, hand.ticket = hand.ticket, None
            if ticket is not None:
                self._have_sent(ticket)

    @property
    def under_way(self) -> int:
        """How many requests are open or wait for their turn."""
        with self._lock:
            return self._open + len(self._backlog)

    def close(self) -> None:
        """End everything: requests fail, timers are dropped, the thread goes. May be called twice."""
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
                with suppress(RuntimeError):  # about to be started; it will see that this is closed
                    thread.join(2.0)

    def __repr__(self) -> str:
        with self._lock:
            timers = len(self._timers)
        return f"<Poller {self.under_way} requests, {timers} timers>"

    # -------------------------------------------------------------------------------------- on workers

    def _have_sent(self, ticket: Ticket) -> None:
        hand = self._hand
        if hand.busy and hand.ticket is None:
            hand.ticket = ticket
            return
        self._on_worker(ticket, partial(self._send, ticket))

    def _on_worker(self, ticket: Ticket, step: Callable[[], object]) -> None:
        try:
            self._workers.run(partial(self.step_on_worker, step))
        except RuntimeError as error:
            # The pool is closed: whoever waits must hear of it, on whichever thread is at hand.
            self._conclude(ticket, closed_failure(error))

    def _send(self, ticket: Ticket) -> None:
        call = ticket.call
        if call is None or ticket.ended:
            self._release()
            return
        try:
            exchange = self._http.open(call)
        except SendFailed as failed:
            self._conclude(ticket, failed)
            return
        except Exception as error:  # noqa: BLE001  # whatever it was, somebody waits for an outcome
            self._conclude(ticket, wrapped(error))
            return
        ticket.exchange = exchange
        self._watch(ticket)

    def _watch(self, ticket: Ticket) -> None:
        start = None
        with self._lock:
            closed = self._closed
            if not closed:
                self._arrivals.append(ticket)
                start = self._wanted_locked()
        if closed:
            self._conclude(ticket, aborted(ticket))
        else:
            self._start_or_wake(start, wake=True)

    def _read_batch(self, batch: list[Ticket]) -> None:
        for ticket in batch:
            self.step_on_worker(partial(self._read, ticket))

    def _read(self, ticket: Ticket) -> None:
        exchange = ticket.exchange
        if exchange is None or ticket.ended:
            aborted(ticket)
            self._release()
            return
        outcome = outcome_of(exchange.step)
        if outcome is None:
            self._watch(ticket)
        else:
            self._conclude(ticket, outcome)

    def _conclude(self, ticket: Ticket, outcome: Outcome) -> None:
        exchange, ticket.exchange = ticket.exchange, None
        if exchange is not None:
            exchange.abort()  # of no effect where the answer is whole; else nobody will read on
        self._release()
        self._end(ticket, outcome)

    def _release(self) -> None:
        """A request is over: the next one's turn."""
        with self._lock:
            self._open -= 1
            following = None
            while self._backlog and following is None:
                candidate = self._backlog.popleft()
                following = None if candidate.ended else candidate
            if following is not None:
                self._open += 1
        if following is not None:
            self._have_sent(following)

    @staticmethod
    def _end(ticket: Ticket, *outcome: Outcome) -> None:
        action = ticket.take()
        if action is None:
            return
        try:
            action(*outcome)
        except Exception:  # noqa: BLE001  # one request's trouble must not cost the others their worker
            _log.exception("a reaction to an answer failed")

    def forget(self, ticket: Ticket) -> None:
        """A ticket was called off: have its socket closed soon."""
        if ticket.exchange is not None:
            with self._lock:
                self._called_off.append(ticket)
            self._wake()

    # -------------------------------------------------------------------------------------- the thread

    def _wanted_locked(self) -> threading.Thread | None:
        """A thread to start, if there is none."""
        if self._thread is not None:
            return None
        self._thread = threading.Thread(target=self._loop, name="tinker-poll", daemon=True)
        return self._thread

    def _start_or_wake(self, start: threading.Thread | None, *, wake: bool) -> None:
        if start is not None:
            start.start()
        elif wake:
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            asleep, self._asleep = self._asleep, False
            descriptor = self._wake_out
        if asleep and descriptor >= 0:
            with suppress(OSError):  # full: it will wake anyway; closed: it has gone
                os.write(descriptor, b".")

    def _loop(self) -> None:
        try:
            while self.step(IDLE_S):
                pass
        except BaseException:
            # A loop that dies fails everyone who waits on it; the next request starts another. Who waits for
            # a time goes on at once, or might never: without a request there is nobody to watch the clock.
            _log.exception("the poller failed")
            with self._lock:
                self._thread = None
                leftovers = self._detach_locked()
                timers, self._timers = self._timers, []
            self._fail_leftovers(leftovers)
            for *_, ticket in timers:
                if not ticket.ended:
                    self._run_timer(ticket)
            raise

    def step(self, timeout_s: float | None) -> bool:
        """One turn: take arrivals, wait for sockets and timers, hand over what is ready.

        False: nothing is left, and the thread's things are put away.

        Args:
            timeout_s: wait at most so long when there is nothing to wait for.
        """
        selector = self._selector or self._open_selector()
        self._take_arrivals(selector)
        wait_s = self._time_to_wait(timeout_s)
        ready = selector.select(wait_s)
        with self._lock:
            self._asleep = False
        self._hand_over(selector, [key.data for key, _ in ready])
        self._expire(selector)
        self._fire_timers()
        return self._go_on(idle=not ready and wait_s == timeout_s)

    def _open_selector(self) -> selectors.BaseSelector:
        selector = self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        selector.register(self._wake_in, selectors.EVENT_READ, None)
        return selector

    def _take_arrivals(self, selector: selectors.BaseSelector) -> None:
        with self._lock:
            arrivals, self._arrivals = self._arrivals, deque()
        for ticket in arrivals:
            descriptor = descriptor_of(ticket)
            if ticket.ended:  # called off between being sent and coming here
                self._have_read([ticket])
                continue
            try:
                selector.register(descriptor, selectors.EVENT_READ, ticket)
            except (ValueError, KeyError, OSError):  # closed under our hands; reading it will say why
                self._have_read([ticket])
                continue
            self._watched[descriptor] = ticket
            expiry = ticket.exchange.expires_at_s if ticket.exchange else math.inf
            if math.isfinite(expiry):
                heapq.heappush(self._expiries, (expiry, next(self._sequence), ticket))

    def _time_to_wait(self, timeout_s: float | None) -> float | None:
        now = self._clock.now()
        if not self._watched:
            self._expiries.clear()  # those of requests that are over would keep an idle thread
        with self._lock:
            soonest = [heap[0][0] for heap in (self._timers, self._expiries) if heap]
            self._asleep = not (self._arrivals or self._called_off or self._closed)
            if not self._asleep:
                return 0.0
        if not soonest:
            return None if self._watched else timeout_s
        return max(min(soonest) - now, 0.0)

    def _hand_over(self, selector: selectors.BaseSelector, ready: list[Ticket | None]) -> None:
        tickets = []
        for ticket in ready:
            if ticket is None:
                with suppress(BlockingIOError):
                    os.read(self._wake_in, 4096)
            else:
                tickets.append(ticket)
        for ticket in tickets:
            self._unwatch(selector, ticket)
        size = max(1, min(_BATCH, len(tickets) // 4))
        for at in range(0, len(tickets), size):
            self._have_read(tickets[at : at + size])

    def _have_read(self, batch: list[Ticket]) -> None:
        """Let a worker read these; nobody watches them meanwhile."""
        try:
            self._workers.run(partial(self._read_batch, batch))
        except RuntimeError as error:
            for ticket in batch:
                self._conclude(ticket, closed_failure(error))

    def _unwatch(self, selector: selectors.BaseSelector, ticket: Ticket) -> None:
        descriptor = descriptor_of(ticket)
        if self._watched.pop(descriptor, None) is not None:
            with suppress(KeyError, ValueError, OSError):
                selector.unregister(descriptor)

    def _expire(self, selector: selectors.BaseSelector) -> None:
        """Hand over what has been silent for too long, reading it will say so; and what was called off."""
        now = self._clock.now()
        with self._lock:
            over, self._called_off = self._called_off, []
        while self._expiries and self._expiries[0][0] <= now:
            over.append(heapq.heappop(self._expiries)[2])
        for ticket in over:
            if self._is_watched(ticket):
                self._unwatch(selector, ticket)
                self._have_read([ticket])
        if len(self._expiries) > 2 * len(self._watched) + _STALE_EXPIRIES:
            self._expiries = [entry for entry in self._expiries if self._is_watched(entry[2])]
            heapq.heapify(self._expiries)

    def _is_watched(self, ticket: Ticket) -> bool:
        return self._watched.get(descriptor_of(ticket)) is ticket

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
            self._workers.run(partial(self.step_on_worker, partial(self._end, ticket)))
        except RuntimeError:
            _log.debug("a timer came after the workers had gone")

    def _go_on(self, *, idle: bool) -> bool:
        with self._lock:
            busy = bool(self._watched or self._arrivals or self._timers)
            if not self._closed and (busy or not idle):
                return True
            self._thread = None
            # In the same moment: another thread may take over as soon as the lock is free.
            leftovers = self._detach_locked()
        self._fail_leftovers(leftovers)
        return False

    def _detach_locked(self) -> _Leftovers:
        """Take everything the thread works with, so that it ends with nothing in its hands."""
        leftovers = _Leftovers(
            self._watched, list(self._arrivals), self._selector, (self._wake_in, self._wake_out)
        )
        self._watched, self._expiries = {}, []
        self._arrivals.clear()
        self._selector = None
        self._wake_in, self._wake_out = -1, -1
        self._asleep = False
        return leftovers

    def _fail_leftovers(self, leftovers: _Leftovers) -> None:
        leftovers.close()
        for ticket in leftovers.tickets():
            self._conclude(ticket, aborted(ticket))


class _Leftovers:
    """What a poller's thread leaves when it ends."""

    def __init__(
        self,
        watched: dict[int, Ticket],
        arrivals: list[Ticket],
        selector: selectors.BaseSelector | None,
        descriptors: tuple[int, int],
    ) -> None:
        self._watched = watched
        self._arrivals = arrivals
        self._selector = selector
        self._descriptors = descriptors

    def tickets(self) -> list[Ticket]:
        return [*self._watched.values(), *self._arrivals]

    def close(self) -> None:
        if self._selector is not None:
            self._selector.close()
        for descriptor in self._descriptors:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)


def _files_to_use() -> int:
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return 1024
    if soft == resource.RLIM_INFINITY or soft > _UNLIMITED_FILES:
        soft = _UNLIMITED_FILES
    return max(_FEWEST_OPEN, int(soft * _SHARE_OF_FILES))
