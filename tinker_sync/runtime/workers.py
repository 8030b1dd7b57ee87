"""`Workers`: a `ThreadPoolExecutor` that does not delay the end of the program.

The interpreter joins the threads of a plain executor when it ends. So a program could not end before the
server answers, or before a callback of the user returns. `Workers` overrides the public `submit` and
`shutdown`, and has threads and a queue of its own:

- The threads are daemons, and the interpreter does not join them.
- The thread that became idle last gets the next job, and idle threads end after `idle_s`. The executor's own
  queue wakes the thread that has waited longest, which costs a sample 27 % more CPU.
- A thread that is awake and has not yet looked at the queue is enough: no other thread is woken until it has
  taken a job, and then it wakes the next one if more jobs are left. So a burst of short jobs wakes one or
  two threads, while jobs that block get a thread each. A wake for each job costs a sample 15 % more CPU.
- A forked child starts with an empty pool, without the parent's threads and jobs.
- `run` makes no future. It logs the exceptions of the job.
- `close` can wait for a bounded time.
- `reserve` starts a thread ahead of the first job. The last thread stays while `needed()` is true.

`submit` and `run` take no lock, so a signal handler may call them although it has interrupted a `submit` of
the same thread. They append the job to the queue, and then wake an idle thread or start another one. A thread
misses no job, because it looks at the queue once more after it has become idle, after it has left the pool,
and after it has declared that it runs a job. Ctrl-C may interrupt the main thread at any point of `run`. If
the job is already queued, the next free thread does it. Any thread may call any method, also a thread of the
pool.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any, Final, TypeVar

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.log import Log, hand_over_records
from tinker_sync._base.naming import carried
from tinker_sync._base.threads import DaemonThread
from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime.futures import APIFuture, Submit, settle

T = TypeVar("T")

Job = Callable[[], object]

# Longer than the pause between two training steps of most scripts.
IDLE_S: Final = 10.0

_log = Log(__name__)


# These threads send samples and read results. Sixteen suffice for thousands of requests, because none of them
# waits for an answer.
_FETCH_THREADS: Final = 16
# These threads complete the bodies of chunks, and compress them. About eight small chunks are under way at
# once (`training`), so more threads would send no faster.
_SEND_THREADS: Final = 8
# Each REST call holds one of these threads until its answer.
_REST_THREADS: Final = 8
_CALLBACK_THREADS: Final = 8
# Each loss that a user computes between two passes uses one processor.
_LOSS_THREADS: Final = 4
# Each awaited call that blocks holds one thread.
_AWAIT_THREADS: Final = 32
# Each creation under way holds one thread.
_CREATE_THREADS: Final = 32
# The calls that a client sends before it knows the server's settings; see `server`.
_AHEAD_THREADS: Final = 2


class _Entry:
    """A job in the queue of a pool, with the future that it ends, if it has one."""

    __slots__ = ("_future", "_job", "_pool")

    def __init__(self, job: Job, pool: str, future: Future[Any] | None = None) -> None:
        self._job = job
        self._pool = pool
        self._future = future

    def run(self) -> None:
        future = self._future
        if future is not None and not future.set_running_or_notify_cancel():
            return
        try:
            result = self._job()
        except BaseException as failure:  # noqa: BLE001  # even SystemExit in a job must not end the thread
            if future is None:
                _log.exception("a job of the workers %r failed", self._pool)
            else:
                future.set_exception(failure)
                del self, future  # the failure's traceback holds this frame, and the future holds the failure
        else:
            if future is not None:
                future.set_result(result)

    def cancel(self) -> None:
        if self._future is not None and self._future.cancel():
            self._future.set_running_or_notify_cancel()  # wakes those who wait for this future among others


class WorkersClosedError(RuntimeError):
    """The error of a pool that refuses a job because it was closed."""


def no_thread(error: RuntimeError) -> TinkerError:
    """Return the error of a call that no worker takes: no thread can start, or the client is closed."""
    if isinstance(error, WorkersClosedError):
        return ClientClosedError()
    return TinkerError(f"no thread for this call: {error}")


class Workers(ThreadPoolExecutor):
    """A pool of threads named `tinker-<name>-1`, `-2` and so on. Thread-safe.

    The threads do not delay the end of the program.

    >>> with Workers("demo", max_threads=2) as workers:
    ...     print(workers.submit(pow, 2, 10).result())
    1024

    Args:
        name: the part of the threads' names between "tinker-" and the number.
        max_threads: the most threads at once.
        idle_s: the time after which a thread without work ends.
        needed: returns True while the last thread must not end, although it has no work.
        clock: measures the timeout of `close`.
        log: the pool whose thread passes the records of this pool to the handlers of the log; None: this one.
    """

    def __init__(
        self,
        name: str,
        max_threads: int,
        *,
        idle_s: float = IDLE_S,
        needed: Callable[[], object] = lambda: False,
        clock: Clock = SYSTEM_CLOCK,
        log: Workers | None = None,
    ) -> None:
        super().__init__(max_threads)
        self.run_handlers: Submit = self.run if log is None else log.run
        self._name = name
        self._most = max_threads
        self._idle_s = idle_s
        self._needed = needed
        self._clock = clock
        self._closed = False  # final
        self.begin()

    def begin(self) -> None:
        """Begin without threads and jobs; in a forked child, once more, without those of the parent."""
        # Operations on these are atomic, so they need no lock.
        self._jobs: deque[_Entry] = deque()
        self._idle: list[threading.Lock] = []  # one for each idle thread, which wakes when it is released
        # `next` pops the last one and releases it in one step of the interpreter, which Ctrl-C cannot divide.
        self._waking = map(methodcaller("release"), iter(self._idle.pop, None))
        self._busy: set[int] = set()  # the threads that run jobs, each written by itself
        # Only threads of the pool take this lock, so that none blocks `submit`.
        self._membership = threading.Lock()
        self._members: frozenset[threading.Thread] = frozenset()  # written under _membership
        self._entered = 0  # guarded by _membership; the number of the thread that entered last

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `fn(*args, **kwargs)` on a thread of the pool. Return the future of its result.

        Raises:
            WorkersClosedError: the pool is closed.
            RuntimeError: the pool has no thread, and the system starts none.

        >>> with Workers("demo", max_threads=1) as workers:
        ...     workers.submit(pow, 2, 10).result()
        1024
        """
        future: Future[T] = Future()
        self._add(_Entry(partial(fn, *args, **kwargs), self._name, future))
        return future

    def run(self, job: Job) -> None:
        """Run `job()` on a thread of the pool. Drop its result and log its exception.

        Raises:
            WorkersClosedError: the pool is closed.
            RuntimeError: the pool has no thread, and the system starts none.

        >>> with Workers("demo", max_threads=1) as workers:
        ...     workers.run(lambda: print("done"))
        done
        """
        self._add(_Entry(job, self._name))

    def run_call(self, job: Job) -> None:
        """Run `job()`, which carries out a call of the user, on a thread of the pool.

        Raises:
            ClientClosedError: the pool was closed together with the client.
            TinkerError: the pool has no thread, and the system starts none.

        >>> with Workers("demo", max_threads=1) as workers:
        ...     workers.run_call(lambda: print("done"))
        done
        """
        try:
            self.run(job)
        except RuntimeError as error:
            raise no_thread(error) from error

    def reserve(self) -> None:
        """Start a thread now if the pool has none. Without this call, the first job starts it.

        >>> with Workers("demo", max_threads=1) as workers:
        ...     workers.reserve()
        """
        if not self._members and not self._closed:
            with suppress(RuntimeError):
                self._start_thread()

    def close(self, timeout: float | None = None, *, drop: bool = True) -> bool:
        """Take no more jobs, and wait up to `timeout` seconds for those that are queued or running.

        A `timeout` of None stands for no limit. After the wait, drop the jobs that have not begun, unless
        `drop` is false. May be called again, and from a job, for whose thread it does not wait.

        Returns:
            True if all other threads have ended. A job that is still running goes on in its daemon thread.

        >>> Workers("demo", max_threads=1).close(timeout=1)
        True
        """
        self.shutdown(wait=False)
        deadline_s = math.inf if timeout is None else self._clock.now() + timeout
        ended = self._await_end(deadline_s)
        if not ended and drop:
            self._drop_jobs()
        return ended

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs.

        With `wait`, wait for those that are queued or running. With `cancel_futures`, cancel the queued ones.

        >>> Workers("demo", max_threads=1).shutdown()
        """
        self._closed = True
        if cancel_futures:
            self._drop_jobs()
        with suppress(IndexError):  # until none is idle
            while True:
                next(self._waking)
        if wait:
            self._await_end(math.inf)

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<Workers {self._name!r} {len(self._members)} threads{closed}>"

    # ---------------------------------------------------- on any thread

    def _add(self, entry: _Entry) -> None:
        """Queue a job, and give it a thread."""
        try:
            self._jobs.append(entry)
            self._wake_or_start()
        except RuntimeError:
            # The system gives no more threads, or the interpreter is ending. One thread is enough.
            if not self._members and self._withdraw(entry):
                raise
        except KeyboardInterrupt:  # the job is probably queued
            self._wake_or_start()
            raise
        # Looked at last, because a thread that has seen the end of the pool takes no more jobs than it finds.
        if self._closed and self._withdraw(entry):
            raise WorkersClosedError(f"the workers {self._name!r} are closed")

    def _wake_or_start(self) -> None:
        """Wake an idle thread, or start one unless there are enough, or one is about to look at the queue."""
        if len(self._members) > len(self._busy) + len(self._idle):
            return
        try:
            next(self._waking)
        except IndexError:
            if len(self._members) < self._most and not self._closed:
                self._start_thread()

    def _start_thread(self) -> threading.Thread:
        """Start a thread, which enters the pool by itself, because Ctrl-C may interrupt the caller."""
        thread = DaemonThread(self._work, f"tinker-{self._name}")
        thread.start()
        return thread

    def _withdraw(self, entry: _Entry) -> bool:
        """Remove a job from the queue. Return False if a thread has taken it."""
        try:
            self._jobs.remove(entry)
        except ValueError:
            return False
        return True

    def _drop_jobs(self) -> None:
        with suppress(IndexError):  # until the queue is empty
            while True:
                self._jobs.popleft().cancel()

    def _await_end(self, deadline_s: float) -> bool:
        """Wait until all jobs are done and only this thread may be left. Return False at the deadline."""
        me = threading.current_thread()
        while True:
            left = bool(self._jobs)  # looked at first, because a thread enters before it takes a job
            others: frozenset[threading.Thread] = self._members - {me}
            if not others:
                if not left or me in self._members:
                    return True
                # Another thread has queued a job just before the end, and has not yet started a thread.
                try:
                    others = frozenset({self._start_thread()})
                except RuntimeError:
                    return False
            for thread in others:
                thread.join(min(max(deadline_s - self._clock.now(), 0.0), threading.TIMEOUT_MAX))
            if any(thread.is_alive() for thread in others):
                return False

    # ---------------------------------------------------- on a thread of the pool

    def _work(self) -> None:
        hand_over_records(self.run_handlers)
        me = threading.get_ident()
        while self._enter():
            while (entry := self._next_entry()) is not None:
                self._busy.add(me)
                if self._jobs:  # came while this thread seemed to be about to take them
                    with suppress(RuntimeError):  # the system starts no more threads
                        self._wake_or_start()
                entry.run()
                self._busy.discard(me)
                del entry  # keep nothing of the last job alive while the thread is idle
            if not self._jobs:  # none came from a thread that still counted on this one
                return

    def _enter(self) -> bool:
        """Make this thread a member of the pool. Return False if there are enough."""
        thread = threading.current_thread()
        with self._membership:
            if len(self._members) >= self._most:
                return False
            self._entered += 1
            thread.name = f"tinker-{self._name}-{self._entered}"
            self._members = self._members | {thread}
            return True

    def _leave(self) -> bool:
        """Make this thread leave the pool. Return False if it must stay."""
        with self._membership:
            if not self._closed and len(self._members) == 1 and self._needed():
                return False
            self._members = self._members - {threading.current_thread()}
            return True

    def _next_entry(self) -> _Entry | None:
        """Wait for the next job and return it, or return None when the thread has left the pool."""
        while True:
            closed = self._closed
            try:
                return self._jobs.popleft()
            except IndexError:
                if closed:
                    self._leave()
                    return None
            ready = threading.Lock()
            ready.acquire()
            self._idle.append(ready)
            due = bool(self._jobs) or self._closed  # came before this thread was seen to be idle
            if not due and ready.acquire(timeout=self._idle_s):
                continue
            try:
                self._idle.remove(ready)
            except ValueError:  # another thread has just woken this one
                continue
            if not due and self._leave():
                return None


class InOrder:
    """Runs jobs on workers, one after the other, in the order in which they came. Thread-safe.

    >>> in_order = InOrder()
    >>> in_order.run(lambda: print("done"))
    done

    Args:
        run: runs a job on a worker; None: jobs run on the thread that passes them.
    """

    def __init__(self, run: Submit | None = None) -> None:
        self._run = run
        self._jobs: deque[Job] = deque()
        self._turn: list[None] = [None]  # empty while a thread runs jobs

    def run(self, job: Job) -> None:
        """Run `job()` after the jobs that came before. Log its exception."""
        self._jobs.append(job)
        if self._run is not None:
            try:
                self._run(self._work)
            except RuntimeError:  # closed; nothing else would run the job
                pass
            else:
                return
        self._work()

    def _work(self) -> None:
        jobs, turn = self._jobs, self._turn
        while jobs:
            try:
                turn.pop()
            except IndexError:  # another thread runs jobs; it looks for more
                return
            try:
                while jobs:
                    jobs.popleft()()
            except Exception:  # noqa: BLE001  # a failure of one job must not stop the others
                _log.exception("a job failed")
            finally:
                turn.append(None)


class WorkerPools:
    """The pools of one client, each for one kind of job.

    A pool starts its first thread at its first job or at `reserve`.

    Args:
        needed: returns True while the last thread of each pool must not end, although it has no work.
    """

    def __init__(self, needed: Callable[[], object] = lambda: False) -> None:
        # One thread, so that the records of all threads of the client keep their order.
        self.log = log = Workers("log", 1, needed=needed)
        self.enter = Workers("enter", 1, needed=needed, log=log)
        self.create = Workers("create", _CREATE_THREADS, needed=needed, log=log)
        self.send = Workers("send", _SEND_THREADS, needed=needed, log=log)
        self.rest = Workers("rest", _REST_THREADS, needed=needed, log=log)
        self.fetch = Workers("fetch", _FETCH_THREADS, needed=needed, log=log)
        self.loss = Workers("loss", _LOSS_THREADS, needed=needed, log=log)
        self.callback = Workers("callback", _CALLBACK_THREADS, needed=needed, log=log)
        self.awaited = Workers("await", _AWAIT_THREADS, needed=needed, log=log)
        # A pool of their own, because the jobs of any other pool may wait for these calls.
        self.ahead = Workers("ahead", _AHEAD_THREADS, log=log)

    def off_main(self, work: Callable[[], T]) -> T:
        """Return `work()`. On the main thread, let a worker do the work, and wait for it.

        This is for work that takes locks or blocks in a call of the user: a signal handler, which runs on top
        of the main thread, may need the same locks, or wait for other threads that need them.

        >>> pools = WorkerPools()
        >>> pools.off_main(lambda: 7), pools.awaited.close()
        (7, True)
        """
        if threading.current_thread() is not threading.main_thread():
            return work()
        future: APIFuture[T] = APIFuture()
        try:
            self.awaited.run(partial(settle, future, carried(work)))
        except RuntimeError:  # closed, or the system starts no thread
            return work()
        return future.result()

    def reserve(self) -> None:
        """Start a thread now in each pool that has none (`Workers.reserve`)."""
        for pool in self.in_order_of_end():
            if not pool._members:
                pool.reserve()

    def in_order_of_end(self) -> tuple[Workers, ...]:
        """Return the pools in the order in which they are closed: each before the pools that its jobs use."""
        return (
            self.enter, self.create, self.ahead, self.send, self.rest, self.fetch, self.loss, self.callback,
            self.awaited, self.log,
        )  # fmt: skip
