"""`Reactor`: the thread of a client that reads answers and runs timers, and resumes the flows.

A request waits in the reactor without a thread of its own. When its socket is readable, the reactor's thread,
`tinker-poll`, reads the bytes that have arrived. When the answer is complete or the request has failed, the
thread passes the outcome to `on_done`, once, and sends the small requests that follow. It opens connections
for them too, as many at once as there are requests, and goes on with each when its socket is ready. Workers
send large requests and look up names, because both may block.

A step is a function with its arguments, such as the reading of one answer. The thread takes the steps that
are due, one after the other. After each one it takes the short steps that follow from it, so an answer, and
the request that it leads to, cost no change of threads. Workers take steps in the same way (`_run_step`).

A step may take long all the same: a large answer, a renewed token, a server that has closed its connections.
While the thread takes steps and other work waits behind them, one worker guards it, and looks at it every
`HELD_UP_S`:

- If one step holds the thread up, another thread takes its place, and the first one ends after its step.
- If the thread gets on slowly although many steps are due, workers take some of them. The thread is slow
  while another thread computes: at each call of the system, the other thread takes the interpreter's lock
  and keeps it for 5 ms. Several threads together get more of the lock than one: with 400 samples in flight
  beside a thread that computes, a sample takes twice as long without these workers.

The thread starts with the first request or timer, or at `reserve`, and ends after `IDLE_S` without work. The
lock is held for container work only.
"""

from __future__ import annotations

import heapq
import math
import os
import select
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, Final, Protocol

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, Wake
from tinker_sync._base.log import Log, hand_over_records
from tinker_sync._base.numbers import numbers
from tinker_sync._base.threads import DaemonThread
from tinker_sync.errors import TinkerError
from tinker_sync.runtime.workers import WorkersClosedError
from tinker_sync.transport.call import OPEN_AHEAD, Call, Reply, SendFailed

QUICK_BYTES: Final = 32 * 1024  # a connection takes this many without waiting for the server to read
# The heap of expiries also holds requests that are over, until there are more of them than this number plus a
# quarter of the watched requests.
STALE_EXPIRIES: Final = 1024
IDLE_S: Final = 5.0  # the thread ends after this time without work
# The time between two looks of the guard. A large answer, or the renewal of a token, may take longer.
HELD_UP_S: Final = 0.02
# Workers help when a step takes longer than this in the mean. It takes a third of that on a slow processor,
# and more than that beside a thread that computes.
SLOW_STEP_S: Final = 0.0005
# Workers help when more than this many steps are due at two looks.
FEW_STEPS: Final = 4
# The most workers that help at once. A third one saves no time.
_HELPERS: Final = 2
# The longest wait for a worker that starts the thread ahead, and of `close` for the thread.
_RESERVE_S: Final = 1.0
_JOIN_S: Final = 2.0
# Each open request uses a file of the process; the rest of the program needs some too.
_SHARE_OF_FILES: Final = 0.5
_FEWEST_OPEN: Final = 16
_REQUESTS_A_FILE: Final = 100  # over HTTP/2
_UNLIMITED_FILES: Final = 65536

_MANY_OPEN: Final = (
    "%d requests are under way, and others wait for a connection; TINKER_MAX_CONNECTIONS sets the most, "
    "which otherwise is half of the files that the process may open (ulimit -n)"
)

_descriptor_in: Final = itemgetter(0)  # of an event of epoll

Step = tuple[Any, ...]
"""A function and its arguments."""

_log = Log(__name__)

Outcome = Reply | SendFailed
"""An answer, or the failure to get one.

The failure is passed on as a value and not raised, because the code that needs it runs on another thread.
"""


class OpenRequest(Protocol):
    """A request whose connection is being opened, or whose answer has not been read completely.

    `step` goes on to open the connection, and sends the request once it is open. Later, `step` reads the
    bytes that have arrived. It returns the answer if that is complete, else None. It raises `SendFailed` if
    the request has failed, also by silence until `expires_at_s`. After a redirect, a broken connection or a
    rejected token, it may send the request again, which may block for a moment. `writing` is True if the
    next step needs a socket that can be written, not one that can be read. `abort` closes the socket.
    """

    @property
    def expires_at_s(self) -> float: ...
    @property
    def writing(self) -> bool: ...
    def fileno(self) -> int: ...
    def watched_by(self, watcher: object) -> bool:
        """Note that `watcher`, or nothing if it is None, watches the connection from now on.

        Return True if it watched the connection for an earlier request too.
        """

    def step(self) -> Reply | None: ...
    def abort(self) -> None: ...


class Opener(Protocol):
    """An object that sends requests without waiting for the answers, such as `Http`.

    With `wait=False`, `open` does not wait for a new connection either. It may still block if the body is
    large, or if `opens_at_once` returns False. `open_ahead` only opens a connection.
    """

    def open(self, call: Call, *, wait: bool = True) -> OpenRequest: ...
    def open_ahead(self) -> OpenRequest: ...
    def opens_at_once(self) -> bool: ...
    @property
    def multiplexes(self) -> bool: ...


class Runner(Protocol):
    """A pool that runs jobs on workers.

    `run` raises RuntimeError if the pool is closed or the system gives no thread.
    """

    def run(self, job: Callable[[], object]) -> None: ...

    @property
    def run_handlers(self) -> Callable[[Callable[[], object]], object]: ...


class Ticket:
    """A request or a timer that a reactor holds. Any thread may cancel it.

    The thread that takes the action ends the ticket.
    """

    __slots__ = ("_reactor", "call", "reaction", "request")

    def __init__(self, reactor: Reactor, action: Callable[..., object], call: Call | None) -> None:
        self._reactor = reactor
        self.reaction = [action]
        """The action, which the thread that ends the ticket pops in one step. Empty after that."""
        self.call = call
        """The request to send; None for a timer.

        Also None once the ticket has ended, because the reactor may keep the ticket for longer.
        """
        self.request: OpenRequest | None = None

    def cancel(self) -> bool:
        """Cancel the ticket, so that its action is never called. Return False if it has already ended."""
        if self.take() is None:
            return False
        self._reactor._forget(self)
        return True

    @property
    def ended(self) -> bool:
        """True if the ticket is done or cancelled."""
        return not self.reaction

    def take(self) -> Callable[..., object] | None:
        """End the ticket. Return the action to the first caller, and None to later ones."""
        try:
            action = self.reaction.pop()
        except IndexError:
            return None
        self.call = None
        return action


# ------------------------------------------------------------------------------------------ outcomes


def descriptor_of(ticket: Ticket) -> int:
    """Return the descriptor of a request's socket, or -1 if the request is not under way."""
    request = ticket.request  # read once: a worker may be ending it now
    return -1 if request is None else request.fileno()


def _is_small(call: Call) -> bool:
    """Return True if a connection takes the whole request without waiting for the server to read."""
    return not call.body or len(call.body) <= QUICK_BYTES


def outcome_of(error: Exception) -> SendFailed:
    """Return the outcome of a request that has ended with an error other than `SendFailed`."""
    failed = SendFailed(f"{type(error).__name__}: {error}", maybe_received=True, final=True)
    failed.__cause__ = error
    return failed


def own_failure(outcome: Outcome) -> TinkerError | None:
    """Return the `TinkerError` that `outcome_of` has put into an outcome, or None for any other outcome."""
    if not isinstance(outcome, SendFailed) or not (outcome.final and outcome.maybe_received):
        return None
    return outcome.__cause__ if isinstance(outcome.__cause__, TinkerError) else None


def closed_failure(error: Exception | None = None) -> SendFailed:
    """Return the outcome of a request that was not sent: the client is closed, or has no thread for it.

    Args:
        error: the error of the workers that refused the request; None: the client is closed.
    """
    closed = error is None or isinstance(error, WorkersClosedError)
    text = "the client is closed" if closed else f"no thread for the request: {error}"
    failed = SendFailed(text, maybe_received=False, final=True)
    failed.__cause__ = error
    return failed


def abort(ticket: Ticket, reason: str = "the client was closed") -> SendFailed:
    """Close the socket of a request that is under way, and return the failure that is its outcome.

    Args:
        ticket: the request.
        reason: the beginning of the text of the failure.
    """
    if ticket.request is not None:
        ticket.request.abort()
    return SendFailed(f"{reason} while the request was under way", maybe_received=True, final=True)


def files_to_use() -> int:
    """Return the number of requests that may be open at once: half of the files that the process may open.

    The result is at least 16 and at most 32768; it is 1024 if the system states no number of files.
    """
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return 1024
    if soft == resource.RLIM_INFINITY or soft > _UNLIMITED_FILES:
        soft = _UNLIMITED_FILES
    return max(_FEWEST_OPEN, int(soft * _SHARE_OF_FILES))


class Readiness(Protocol):
    """A set of sockets that are watched until they are readable, or writable.

    One thread waits. Other threads may begin watches if a watch `takes_effect_at_once`.
    """

    takes_effect_at_once: bool
    """False if the waiting thread must be woken to notice a new watch."""
    goes_on: bool
    """True if a watch goes on after its notification: later bytes are reported too."""

    def watch(self, descriptor: int, *, writing: bool = False) -> None:
        """Watch a socket until it is readable; or, if `writing`, until it is writable.

        Raises:
            OSError, ValueError: the socket or this set is closed.
        """

    def forget(self, descriptor: int) -> None:
        """End the watch of a socket."""

    def wake(self) -> None:
        """End the wait of the thread that waits, or the next wait if no thread waits now.

        The wait returns a descriptor that belongs to no watched socket.
        """

    def report(self, numbers: Iterable[int]) -> None:
        """End the wait, as `wake` does. It returns these numbers too: those of streams that are done."""

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait for a socket that is ready or `wake`; return the descriptors of the sockets that are ready.

        After `wake`, the list also has a descriptor that belongs to no watched socket.

        Args:
            timeout_s: the longest wait; None: no limit.
        """

    def close(self) -> None:
        """End all watches, and close this set."""


class EpollReadiness:
    """The edge-triggered `Readiness` of Linux. A socket stays registered; each arrival is reported once."""

    takes_effect_at_once = True
    goes_on = True

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._never = select.EPOLLONESHOT
        self._each = select.EPOLLIN | select.EPOLLET
        self._once_writable = select.EPOLLOUT | select.EPOLLONESHOT
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reported: deque[int] = deque()
        # With EPOLLET each write is news, so no read is needed.
        self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)

    def watch(self, descriptor: int, *, writing: bool = False) -> None:
        events = self._once_writable if writing else self._each
        try:
            self._epoll.modify(descriptor, events)  # reports bytes that have arrived before, too
        except FileNotFoundError:
            self._epoll.register(descriptor, events)

    def forget(self, descriptor: int) -> None:
        with suppress(OSError, ValueError):
            self._epoll.modify(descriptor, self._never)

    def wake(self) -> None:
        with suppress(OSError):  # if it is closed, the thread has ended
            os.eventfd_write(self._bell, 1)

    def report(self, numbers: Iterable[int]) -> None:
        self._reported.extend(numbers)
        self.wake()

    def wait(self, timeout_s: float | None) -> list[int]:
        ready = list(map(_descriptor_in, self._epoll.poll(timeout_s)))
        if self._reported:
            ready += _take_all(self._reported)
        return ready

    def close(self) -> None:
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
        self._epoll.close()


class SelectorReadiness:
    """The `Readiness` of systems without `epoll` or `eventfd`, made with `selectors`."""

    goes_on = False

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        # A selector with a descriptor keeps its set of sockets in the kernel.
        self.takes_effect_at_once = hasattr(self._selector, "fileno")
        self._reported: deque[int] = deque()
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._bell, False)
        self._selector.register(self._ear, selectors.EVENT_READ)

    def watch(self, descriptor: int, *, writing: bool = False) -> None:
        events = selectors.EVENT_WRITE if writing else selectors.EVENT_READ
        try:
            self._selector.register(descriptor, events)
        except KeyError:
            self.forget(descriptor)
            self._selector.register(descriptor, events)

    def forget(self, descriptor: int) -> None:
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(descriptor)

    def wake(self) -> None:
        with suppress(OSError):  # if the pipe is full, the thread wakes anyway; if closed, it has ended
            os.write(self._bell, b".")

    def report(self, numbers: Iterable[int]) -> None:
        self._reported.extend(numbers)
        self.wake()

    def wait(self, timeout_s: float | None) -> list[int]:
        ready = [key.fd for key, _ in self._selector.select(timeout_s)]
        for descriptor in ready:
            if descriptor != self._ear:
                self.forget(descriptor)
                continue
            with suppress(BlockingIOError):
                os.read(self._ear, 4096)
        return ready + _take_all(self._reported)

    def close(self) -> None:
        self._selector.close()
        ends, self._ear, self._bell = (self._ear, self._bell), -1, -1
        for end in ends:
            if end >= 0:
                os.close(end)


def _take_all(queue: deque[int]) -> list[int]:
    return [queue.popleft() for _ in range(len(queue))]


make_readiness: Callable[[], Readiness] = (
    EpollReadiness if hasattr(select, "epoll") and hasattr(os, "eventfd") else SelectorReadiness
)


# ------------------------------------------------------------------------------------------ the reactor


class _NextOnThisThread(threading.local):
    """The queue, one for each thread, of the steps that this thread takes after its current step."""

    steps: deque[Step] | None = None  # None outside of a step; always `_following` on the reactor's thread


class Reactor:
    """The holder of the requests of one client that wait for their answers, and of its timers. Thread-safe.

    Args:
        http: sends requests.
        workers: run jobs that may block (looking up a name, sending large requests); guard and help the
            thread.
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
        self._http = http
        self._workers = workers
        self._clock = clock
        self._needed = needed
        self._max_open = max_open or files_to_use()
        # Requests that share a connection share its file.
        self._max_multiplexed = max_open or self._max_open * _REQUESTS_A_FILE
        self._has_told = False  # that requests wait
        self._sequence = numbers()
        self._closed = False  # guarded by _lock; final
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._next = _NextOnThisThread()
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._readiness: Readiness | None = None  # written under _lock; the thread sleeps in it
        # Guarded by _lock; -inf while the thread does not sleep. Who adds work for an earlier time wakes it.
        self._sleeps_until = -math.inf
        # The steps to take now; a thread takes the first one atomically.
        self._due: deque[Step] = deque()
        self._following: deque[Step] = deque()  # those that follow from the step that was taken last
        self._taken = 0  # the number of steps that the thread has taken; written by the thread alone
        self._in_step = False  # guarded by _lock; True while the thread takes steps
        self._guarded = False  # written under _lock; True while a worker guards the thread
        self._helping = 0  # guarded by _lock; the number of workers that help
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
        inherited = self._readiness
        self._begin()
        # Only close the copy: to end watches would affect the parent, which shares the kernel's socket set.
        if inherited is not None:
            inherited.close()

    # -------------------------------------------------------------------------------------- for the runtime

    def start(self, call: Call, on_done: Callable[[Outcome], object]) -> Ticket:
        """Send a request, now or when fewer requests are under way. Return its ticket, which can cancel it.

        Args:
            call: the request.
            on_done: called once, unless the ticket is cancelled, with the answer or with the failure to get
                one; on the reactor's thread or on a worker. If the reactor is closed or the system gives no
                thread, it may be called on this thread, or on the thread that calls `close`.
        """
        ticket = Ticket(self, on_done, call)
        limit = self._max_open
        if self._open >= limit and self._http.multiplexes:
            limit = self._max_multiplexed
        with self._lock:
            closed = self._closed
            begin = not closed and self._open < limit
            if begin:
                self._open += 1
            elif not closed:
                self._backlog.append(ticket)
        if closed:
            self._end(ticket, closed_failure())
        elif begin:
            self._schedule_send(ticket)
        elif not self._has_told:
            self._has_told = True
            _log.warning(_MANY_OPEN, self._max_open)
        return ticket

    def after(self, delay_s: float, action: Callable[[], object]) -> Ticket:
        """Run `action` after a delay, unless the reactor is closed by then. The ticket can cancel it.
        `action` runs on the reactor's thread, or on a worker that helps it. If the thread dies or cannot
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

    def run_soon(self, job: Callable[[], object]) -> bool:
        """Run a short job, which never waits, on the reactor's thread.

        Return False, without running the job, if there is no thread or the reactor is closed.

        A worker that helps the thread may run the job in its place. If Ctrl-C interrupts this method, the job
        may wait for the next turn of the thread.

        This takes no lock, because it may run in a signal handler or a finalizer, on top of any step of the
        same thread. It first adds the job and then looks at the thread. The thread first writes that it
        sleeps, or that it has ended, and then looks for jobs. So one of them sees the other.
        """
        thread = self._thread
        if thread is None or self._closed:
            return False
        self._due.append((job,))
        if self._thread is None:  # it has ended, perhaps without the job
            self._leave_due()
        elif self._sleeps_until > -math.inf:
            self._write_wake()
        elif self._needs_guard():
            self._ask_for_guard()
        return True

    def follow(self, job: Callable[[], object]) -> bool:
        """Do a short job on this thread after its current step.

        Return False, without doing the job, if this thread is in no step.
        """
        steps = self._next.steps
        if steps is not None:
            steps.append((job,))
        return steps is not None

    def reserve(self) -> None:
        """Start the thread `tinker-poll` now, if it does not run. Wait up to a second until it does.

        Without this call, the first request or timer starts the thread. A worker starts it here, because
        Ctrl-C could interrupt the main thread between storing the thread and starting it.
        """
        if self._thread is not None:
            return
        started = Wake()
        try:
            self._workers.run(partial(self._start_ahead, started))
        except RuntimeError:  # closed, or the system gives no thread; a request shows why
            return
        started.wait(_RESERVE_S)

    @property
    def room(self) -> int:
        """How many more requests may open a connection; 0 if they share connections."""
        return 0 if self._http.multiplexes else self._max_open - self._open

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
            with suppress(RuntimeError):  # not started yet; it ends when it finds the reactor closed
                thread.join(HELD_UP_S)  # not for longer, because another thread may take over
            left_s -= HELD_UP_S
        if thread is None:
            with self._lock:
                leftovers = self._detach_locked()
            self._fail_leftovers(leftovers)

    def _forget(self, ticket: Ticket) -> None:
        """Make the reactor's thread close the socket of a ticket that was cancelled."""
        if ticket.request is not None:
            with self._lock:
                self._called_off.append(ticket)
            self._wake()

    def __repr__(self) -> str:
        with self._lock:
            timers = len(self._timers)
        return f"<Reactor {self.under_way} requests, {timers} timers>"

    # ------------------------------------------------------------------------- on workers and the thread

    def _schedule_send(self, ticket: Ticket) -> None:
        steps, call = self._next.steps, ticket.call
        quick = call is None or (_is_small(call) and self._http.opens_at_once())
        # A worker may also send a large request, or look a name up, for the first request that follows.
        if steps is not None and (quick or (not steps and steps is not self._following)):
            steps.append((self._send, ticket))
            return
        try:
            self._workers.run(partial(self._run_step, self._send, ticket))
        except RuntimeError as error:  # the pool is closed, so this thread ends the call
            self._conclude(ticket, closed_failure(error))

    def _send(self, ticket: Ticket) -> None:
        call = ticket.call
        if call is None or not ticket.reaction:
            self._release()
            return
        try:
            if call is OPEN_AHEAD:
                request = self._http.open_ahead()
            else:
                request = self._http.open(call, wait=not _is_small(call))
        except SendFailed as failed:
            self._conclude(ticket, failed)
        except Exception as error:  # noqa: BLE001  # a call waits for an outcome
            self._conclude(ticket, outcome_of(error))
        else:
            ticket.request = request
            self._watch(ticket, request, sent=True)

    def _watch(self, ticket: Ticket, request: OpenRequest, *, sent: bool = False) -> None:
        """Watch the socket of a request.

        Args:
            ticket: the ticket of the request.
            request: the request.
            sent: nothing of its answer has been read, and before it was sent nothing was there to read.
        """
        # Before the watch, because another thread may go on with the request as soon as it is watched.
        descriptor, expires_at_s, writing = request.fileno(), request.expires_at_s, request.writing
        start = readiness = None
        wake = guard = False
        with self._lock:
            closed = self._closed
            if not closed:
                me = threading.current_thread()
                guard = self._in_step and not self._guarded and self._thread is not me
                readiness = self._readiness
                if readiness is None or not readiness.takes_effect_at_once:
                    self._arrivals.append(ticket)
                    start, wake, readiness = self._wanted_locked(), self._sleeps_until > -math.inf, None
                else:
                    self._keep_locked(ticket, descriptor, expires_at_s)
                    wake = self._sleeps_until > expires_at_s
                    # Only this thread takes reports, so it has not missed one since the request was sent.
                    sent = sent and readiness.goes_on and self._thread is me
        if closed:
            self._conclude(ticket, abort(ticket))
            return
        if readiness is not None:
            if not (request.watched_by(readiness) and sent):
                self._begin_watch(readiness, ticket, descriptor, writing=writing)
            if not ticket.reaction:  # cancelled meanwhile
                self._forget(ticket)
        if wake or guard or start is not None:
            self._start_or_wake(start, wake=wake, guard=guard)

    def _keep_locked(self, ticket: Ticket, descriptor: int, expires_at_s: float) -> None:
        self._watched[descriptor] = ticket
        if expires_at_s < math.inf:
            heapq.heappush(self._expiries, (expires_at_s, next(self._sequence), ticket))
            if len(self._expiries) > 1.25 * len(self._watched) + STALE_EXPIRIES:
                alive = set(map(id, self._watched.values()))
                self._expiries = [entry for entry in self._expiries if id(entry[2]) in alive]
                heapq.heapify(self._expiries)

    def _begin_watch(self, readiness: Readiness, ticket: Ticket, descriptor: int, *, writing: bool) -> None:
        if descriptor < -1:  # a stream of HTTP/2 has no socket of its own, and reports its end itself
            if (request := ticket.request) is not None:
                request.watched_by(readiness)
            return
        try:
            readiness.watch(descriptor, writing=writing)
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

    # -------------------------------------------------------------------------------------- steps

    def _leave_due(self) -> None:
        """Let a worker take the steps that were added while the thread ended, or take them here."""
        try:
            self._workers.run(self._take_left)
        except RuntimeError:  # closed, or the system gives no thread
            self._take_left()

    def _take_left(self) -> None:
        """Take the steps that are due until no step is left."""
        while True:
            try:
                step = self._due.popleft()
            except IndexError:  # another thread took the last one
                return
            self._take_step(deque([(self._run_step, *step)]))

    def _run_step(self, step: Callable[..., object], *given: Any) -> None:
        """Call `step(*given)` on this thread, and then take the steps that follow from it.

        If a step raises an exception, workers take the remaining ones. Within another step, this only calls
        `step`; the steps that follow from it come after the other step.

        This is for short steps that end by starting requests. No worker has to wake up for the requests, and
        they can use the connection whose answer led to them.
        """
        following = self._next
        if following.steps is not None:
            step(*given)
            return
        steps = following.steps = deque([(step, *given)])
        try:
            while steps:
                function, *arguments = steps.popleft()
                function(*arguments)
        finally:
            following.steps = None
            for left in steps:
                try:
                    self._workers.run(partial(self._run_step, *left))
                except RuntimeError:  # the pool is closed, so the step fails at once
                    left[0](*left[1:])

    def _take_due(self, leader: threading.Thread | None) -> bool:
        """Take the steps that are due. Return False if another thread has replaced this one, the `leader`."""
        for _ in range(len(self._due)):
            self._taken += 1
            self._take_step(self._due)
            # At once, so that the server works on what follows from an answer while the next one is read.
            while self._following:
                if not self._guarded and (len(self._following) > 1 or self._has_more()):
                    self._guard_rest()
                self._taken += 1
                self._take_step(self._following)
            if self._thread is not leader:  # held up
                return False
        with self._lock:
            self._in_step = False  # from here on, no other thread takes over
            return self._thread is leader

    def _take_step(self, steps: deque[Step]) -> None:
        try:
            function, *arguments = steps.popleft()
        except IndexError:  # a worker that helps has taken it
            return
        try:
            function(*arguments)
        except BaseException:  # noqa: BLE001  # the failure of one step must not end those of others
            _log.exception("a step of the reactor failed")

    # -------------------------------------------------------------------------------------- the thread

    def _start_ahead(self, started: Wake) -> None:
        try:
            with self._lock:
                start = None if self._closed else self._wanted_locked()
            self._start_or_wake(start, wake=False)
        finally:
            started.set()

    def _wanted_locked(self) -> threading.Thread | None:
        """Return a new thread for the caller to start, or None if there is a thread already."""
        if self._thread is not None:
            return None
        self._thread = DaemonThread(self._loop, "tinker-poll")
        return self._thread

    def _start_or_wake(self, start: threading.Thread | None, *, wake: bool, guard: bool = False) -> None:
        if start is not None:
            self._start(start)
        elif wake:
            self._write_wake()
        if guard:
            self._ask_for_guard()

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads, or the interpreter is ending
            self._lose_thread(f"no thread could be started ({error})")

    def _open_readiness(self) -> Readiness:
        readiness = make_readiness()
        with self._lock:
            self._readiness = readiness
        return readiness

    def _wake(self) -> None:
        with self._lock:
            wake = self._sleeps_until > -math.inf
        if wake:
            self._write_wake()

    def _write_wake(self) -> None:
        readiness = self._readiness
        if readiness is not None:
            readiness.wake()

    def _loop(self) -> None:
        self._next.steps = self._following
        hand_over_records(self._workers.run_handlers)
        try:
            while self.step(IDLE_S):
                pass
        except BaseException:
            _log.exception("the reactor failed")
            if self._thread is threading.current_thread():
                self._lose_thread()
            raise

    def step(self, timeout_s: float | None) -> bool:
        """Take one turn of the thread: wait for sockets and timers, and take the steps that are due then.

        Return False if the thread must end: no work is left, the reactor is closed, or another thread runs.

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
        for descriptor, ticket in over:
            # First, because the step closes the socket, and its number may then belong to a new one.
            readiness.forget(descriptor)
            request = ticket.request  # read once: a worker may be ending it now
            if request is not None:  # its answer may be there by now, and the connection go on
                request.watched_by(None)
            due.append((self._read, ticket))
        # A step that holds up no other work needs no guard.
        if acts and not self._guarded and (len(due) > 1 or self._has_more()):
            self._guard_rest()
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
            descriptor, expires_at_s, writing = request.fileno(), request.expires_at_s, request.writing
            with self._lock:
                self._keep_locked(ticket, descriptor, expires_at_s)
            self._begin_watch(readiness, ticket, descriptor, writing=writing)

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

    # -------------------------------------------------------------------------------------- the guard

    def _needs_guard(self) -> bool:
        """Return True if the reactor's thread takes a step without a guard, and the caller is another thread.

        The work that the caller adds then waits behind that step.
        """
        alone = self._in_step and not self._guarded
        return alone and self._thread is not threading.current_thread()

    def _ask_for_guard(self) -> None:
        """Let a worker guard the reactor's thread, unless another worker guards the thread by then.

        The worker itself notes that the thread is guarded, because Ctrl-C may interrupt the caller.
        """
        with suppress(RuntimeError):  # the workers are closed, or the system gives no thread
            self._workers.run(self._guard_unless_guarded)

    def _guard_unless_guarded(self) -> None:
        if self._claim_guard():
            self._guard()

    def _guard_rest(self) -> None:
        """Let a worker guard this thread, the reactor's, because work waits behind the next step."""
        if not self._claim_guard():
            return
        try:
            self._workers.run(self._guard)
        except RuntimeError:  # the workers are closed, and soon the reactor
            with self._lock:
                self._guarded = False

    def _claim_guard(self) -> bool:
        with self._lock:
            claimed, self._guarded = not self._guarded, True
        return claimed

    def _guard(self) -> None:
        """Watch the reactor's thread until it takes no steps.

        Replace the thread if one step holds it up. Let workers help it if it is slow.
        """
        pause = threading.Lock()
        pause.acquire()
        before, due, looked_at_s = None, 0, self._clock.now()
        while True:
            with self._lock:
                now = self._thread, self._taken
                in_step = self._in_step
                were_due, due = due, len(self._due)
                if now == before and not in_step:
                    self._guarded = False
                    return
            if now == before:
                successor = DaemonThread(self._take_over, "tinker-poll", now)
                with suppress(RuntimeError):  # the system gives no thread, or the interpreter is ending
                    successor.start()
            elif before is not None:
                taken, elapsed_s = now[1] - before[1], self._clock.now() - looked_at_s
                self._call_helpers(taken, elapsed_s, min(were_due, due))
            before, looked_at_s = now, self._clock.now()
            pause.acquire(timeout=HELD_UP_S)

    def _call_helpers(self, taken: int, elapsed_s: float, due: int) -> None:
        """Let workers help if the thread has taken few steps for the time, although more were due.

        Args:
            taken: the number of steps that the thread has taken between two looks of the guard.
            elapsed_s: the time between the looks.
            due: the smaller of the numbers of steps that were due at the two looks. If it is 0, the thread
                may have slept.
        """
        if taken * SLOW_STEP_S >= elapsed_s or due <= FEW_STEPS:
            return
        with self._lock:
            more, self._helping = _HELPERS - self._helping, _HELPERS
        for _ in range(more):
            try:
                self._workers.run(self._help)
            except RuntimeError:  # the workers are closed, or the system gives no more threads
                with self._lock:
                    self._helping -= 1

    def _help(self) -> None:
        """Take the steps that are due until no step is left."""
        try:
            self._take_left()
        finally:
            with self._lock:
                self._helping -= 1

    def _take_over(self, leader: threading.Thread | None, taken: int) -> None:
        """Replace `leader`, which is held up, by this new thread, and run the loop of the reactor here.

        Do nothing if `leader` has gone on since it had taken `taken` steps.
        """
        with self._lock:
            if self._thread is not leader or self._taken != taken or not self._in_step:
                return
            self._thread = threading.current_thread()
            self._in_step = False
        self._loop()

    # -------------------------------------------------------------------------------------- ends

    def _detach_locked(self) -> tuple[list[Ticket], Readiness | None]:
        """Remove and return the requests and the set of sockets of the thread, so that the thread can end."""
        leftovers = [*self._watched.values(), *self._arrivals], self._readiness
        self._watched, self._expiries, self._arrivals = {}, [], []
        self._readiness = None
        self._sleeps_until = -math.inf
        self._in_step = False
        return leftovers

    def _fail_leftovers(
        self, leftovers: tuple[list[Ticket], Readiness | None], reason: str = "the client was closed"
    ) -> None:
        tickets, readiness = leftovers
        if readiness is not None:
            readiness.close()  # the sockets themselves stay open
        for ticket in tickets:
            self._conclude(ticket, abort(ticket, reason))

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
        self._due.extendleft(reversed(self._following))
        self._following.clear()
        self._due.extend((self._end, ticket) for *_, ticket in timers)
        if self._due:  # a sample may wait for the step
            self._leave_due()
