"""`PollerThread`: the thread of a poller, its steps, and the workers that guard and help it.

A poller (`poller`) holds the requests of a client that wait for their answers, and its timers.

A step is a function with its arguments, such as the reading of one answer. The thread takes the steps that
are due, one after the other. After each one it takes the short steps that follow from it, so an answer, and
the request that it leads to, cost no change of threads. Workers take steps in the same way (`run_step`).

A step may take long: a large answer, a renewed token, a listener, a server that has closed its connections.
While the thread takes steps and other work waits behind them, one worker guards it, and looks at it every
`HELD_UP_S`:

- If one step holds the thread up, another thread takes its place, and the first one ends after its step.
- If the thread gets on slowly although many steps are due, workers take some of them. The thread is slow
  while another thread computes: at each call of the system, the other thread takes the interpreter's lock
  and keeps it for 5 ms. Several threads together get more of the lock than one.

The thread is called `tinker-poll`. It starts with the first request or timer, or at `reserve`, and ends when
`step` returns False. A subclass defines `step`, in which the thread also sleeps. The lock is held for
container work only.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from tinker_sync._base.clock import Clock
from tinker_sync.runtime.tickets import Readiness, Runner, make_readiness

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
# The longest wait for a worker that starts the thread ahead.
_RESERVE_S: Final = 1.0

Step = tuple[Any, ...]
"""A function and its arguments."""

_log = logging.getLogger(__name__)


class _NextOnThisThread(threading.local):
    """The queue, one for each thread, of the steps that this thread takes after its current step."""

    steps: deque[Step] | None = None  # None outside of a step; always `_following` on the poller's thread


class PollerThread(ABC):
    """The thread of a poller, which takes steps. Thread-safe.

    If the thread is slow, workers help it. If one step holds it up, a new thread replaces it.

    Args:
        workers: guard the thread and help it; take its steps if it is lost.
        clock: measures time.
    """

    def __init__(self, workers: Runner, clock: Clock) -> None:
        self._workers = workers
        self._clock = clock

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._next = _NextOnThisThread()
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._closed = False  # guarded by _lock; final
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

    @abstractmethod
    def step(self, timeout_s: float | None) -> bool:
        """Take one turn of the thread: sleep until steps are due, and take them.

        Return False if the calling thread must end.

        Args:
            timeout_s: the longest sleep if there is no request and no timer; None: no limit.
        """

    @abstractmethod
    def _has_more(self) -> bool:
        """Return True if the thread has more to look after than the steps that are due."""

    @abstractmethod
    def _lose_thread(self, reason: str = "the client was closed") -> None:
        """End the work that waits for a thread that has died or could not start."""

    # ------------------------------------------------------------------------- on workers and the thread

    def run_soon(self, job: Callable[[], object]) -> bool:
        """Run a short job, which never waits, on the poller's thread.

        Return False, without running the job, if there is no thread or the poller is closed.

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
            self._take_step(deque([(self.run_step, *step)]))

    def run_step(self, step: Callable[..., object], *given: Any) -> None:
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
                    self._workers.run(partial(self.run_step, *left))
                except RuntimeError:  # the pool is closed, so the step fails at once
                    left[0](*left[1:])

    def follow(self, job: Callable[[], object]) -> bool:
        """Do a short job on this thread after its current step.

        Return False, without doing the job, if this thread is in no step.
        """
        steps = self._next.steps
        if steps is not None:
            steps.append((job,))
        return steps is not None

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
            _log.exception("a step of the poller failed")

    def _leave_steps(self, *more: Step) -> None:
        """Leave the steps of the thread, and `more`, to workers, because there is no thread for them.

        Take them on this thread if the workers refuse them.
        """
        steps: list[Step] = []
        for left in (self._following, self._due):
            with suppress(IndexError):  # until it is empty; a worker that helps may take steps too
                while True:
                    steps.append(left.popleft())
        for step in (*steps, *more):
            try:
                self._workers.run(partial(self.run_step, *step))
            except RuntimeError:  # closed, or the system gives no thread; a sample may wait for the step
                self._take_step(deque([(self.run_step, *step)]))

    # -------------------------------------------------------------------------------------- the thread

    def reserve(self) -> None:
        """Start the thread `tinker-poll` now, if it does not run. Wait up to a second until it does.

        Without this call, the first request or timer starts the thread. A worker starts it here, because
        Ctrl-C could interrupt the main thread between storing the thread and starting it.
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

    def _wanted_locked(self) -> threading.Thread | None:
        """Return a new thread for the caller to start, or None if there is a thread already."""
        if self._thread is not None:
            return None
        self._thread = threading.Thread(target=self._loop, name="tinker-poll", daemon=True)
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
        try:
            while self.step(IDLE_S):
                pass
        except BaseException:
            _log.exception("the poller failed")
            if self._thread is threading.current_thread():
                self._lose_thread()
            raise

    # -------------------------------------------------------------------------------------- the guard

    def _needs_guard(self) -> bool:
        """Return True if the poller's thread takes a step without a guard, and the caller is another thread.

        The work that the caller adds then waits behind that step.
        """
        alone = self._in_step and not self._guarded
        return alone and self._thread is not threading.current_thread()

    def _ask_for_guard(self) -> None:
        """Let a worker guard the poller's thread, unless another worker guards the thread by then.

        The worker itself notes that the thread is guarded, because Ctrl-C may interrupt the caller.
        """
        with suppress(RuntimeError):  # the workers are closed, or the system gives no thread
            self._workers.run(self._guard_unless_guarded)

    def _guard_unless_guarded(self) -> None:
        with self._lock:
            begin, self._guarded = not self._guarded, True
        if begin:
            self._guard()

    def _guard_rest(self) -> None:
        """Let a worker guard this thread, the poller's, because work waits behind the next step."""
        with self._lock:
            begin, self._guarded = not self._guarded, True
        if begin:
            self._begin_guard()

    def _begin_guard(self) -> None:
        try:
            self._workers.run(self._guard)
        except RuntimeError:  # the workers are closed, and soon the poller
            with self._lock:
                self._guarded = False

    def _guard(self) -> None:
        """Watch the poller's thread until it takes no steps.

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
                successor = threading.Thread(
                    target=self._take_over, args=now, name="tinker-poll", daemon=True
                )
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
        """Replace `leader`, which is held up, by this new thread, and run the loop of the poller here.

        Do nothing if `leader` has gone on since it had taken `taken` steps.
        """
        with self._lock:
            if self._thread is not leader or self._taken != taken or not self._in_step:
                return
            self._thread = threading.current_thread()
            self._in_step = False
        self._loop()
