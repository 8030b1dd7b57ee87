"""`Workers`: a `ThreadPoolExecutor` that does not delay the end of the program.

The interpreter joins the threads of a plain executor when it ends. So a program could not end before the
server answers, or before a callback of the user returns. `Workers` makes these changes:

- The threads are daemons, and the interpreter does not join them.
- The thread that became idle last gets the next job, and idle threads end after `idle_s`. The executor's own
  queue wakes the thread that has waited longest, which costs a sample 27 % more CPU.
- A forked child starts with an empty pool, without the parent's threads and jobs.
- `run` makes no future. It logs the exceptions of the job.
- `close` can wait for a bounded time.
- `reserve` starts a thread ahead of the first job. The last thread stays while `needed()` is true.

Ctrl-C may interrupt the main thread at any point of `run`. If the job is already queued, the next free thread
does it. Any thread may call any method, also a thread of the pool.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime import _fork

Job = Callable[[], object]

# Longer than the pause between two training steps of most scripts.
IDLE_S: Final = 10.0

_log = logging.getLogger(__name__)


# These threads send samples and read results. Sixteen suffice for thousands of requests, because none of them
# waits for an answer.
_FETCH_THREADS: Final = 16
# These threads send the chunks of training passes: they wait for room among the bytes under way, connect and
# write. About eight small chunks are under way at once (`training_part`), so more threads would send no
# faster.
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


class _Entry:
    """A job in the executor's queue, in place of a work item with a future."""

    __slots__ = ("_job", "_pool")

    def __init__(self, job: Job, pool: str) -> None:
        self._job: Job | None = job
        self._pool = pool

    def run(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job()
        except BaseException:  # noqa: BLE001  # even SystemExit in a job must not end the thread
            _log.exception("a job of the workers %r failed", self._pool)

    @property
    def future(self) -> _Entry:
        return self

    def cancel(self) -> None:
        self._job = None


class _Entries(deque[Any]):
    """A replacement of the executor's queue, in which no thread waits. Guarded by the executor's lock."""

    put = deque.append

    def get_nowait(self) -> Any:
        """Remove and return the first entry. `shutdown` calls this to cancel the remaining jobs."""
        if not self:
            raise queue.Empty
        return self.popleft()


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
    """

    # Private attributes of the executor, which have no published types.
    _work_queue: _Entries  # type: ignore[assignment]  # the part of a queue that the executor uses
    _shutdown_lock: threading.Lock
    _threads: set[threading.Thread]  # replaced, never changed: `shutdown` iterates over it without the lock
    _shutdown: bool

    def __init__(
        self,
        name: str,
        max_threads: int,
        *,
        idle_s: float = IDLE_S,
        needed: Callable[[], object] = lambda: False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(max_threads)
        self._name = name
        self._idle_s = idle_s
        self._needed = needed
        self._clock = clock
        self._started = 0  # guarded by _shutdown_lock
        self._work_queue = _Entries()
        self._idle: list[threading.Lock] = []  # guarded by _shutdown_lock; released to wake a thread
        _fork.renew_in_child(self)

    def run(self, job: Job) -> None:
        """Run `job()` on a thread of the pool. Drop its result and log its exception.

        Raises:
            WorkersClosedError: the pool is closed.
            RuntimeError: the pool has no thread, and the system starts none.

        >>> with Workers("demo", max_threads=1) as workers:
        ...     workers.run(lambda: print("done"))
        done
        """
        with self._shutdown_lock:
            if self._shutdown:
                raise WorkersClosedError(f"the workers {self._name!r} are closed")
            self._work_queue.put(_Entry(job, self._name))
            self._adjust_thread_count()

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
        ...     print(workers)
        <Workers 'demo' 1 threads>
        """
        if self._threads:
            return
        with self._shutdown_lock, suppress(RuntimeError):
            if not self._threads and not self._shutdown:
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
        threads = self._threads - {threading.current_thread()}
        deadline_s = math.inf if timeout is None else self._clock.now() + timeout
        for thread in threads:
            thread.join(min(max(deadline_s - self._clock.now(), 0.0), threading.TIMEOUT_MAX))
        ended = not any(thread.is_alive() for thread in threads)
        if not ended and drop:
            self.shutdown(wait=False, cancel_futures=True)
        return ended

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs.

        With `wait`, wait for those that are queued or running. With `cancel_futures`, cancel the queued ones.

        >>> Workers("demo", max_threads=1).shutdown()
        """
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        with self._shutdown_lock:
            idle, self._idle = self._idle, []
        for ready in idle:
            ready.release()
        if wait:
            for thread in self._threads:
                thread.join()

    def renew_after_fork(self) -> None:
        """Drop the parent's threads and jobs in a forked child, and replace the lock that they may hold."""
        self._shutdown_lock = threading.Lock()
        self._work_queue, self._idle, self._threads = _Entries(), [], set()

    def __repr__(self) -> str:
        closed = ", closed" if self._shutdown else ""
        return f"<Workers {self._name!r} {len(self._threads)} threads{closed}>"

    # ---------------------------------------------------- of the executor; `_shutdown_lock` is held

    def _adjust_thread_count(self) -> None:
        """Wake an idle thread for the job that was queued last, or start a thread unless there are enough."""
        if self._idle:
            self._idle.pop().release()
            return
        if len(self._threads) >= self._max_workers:
            return
        try:
            self._start_thread()
        except RuntimeError:
            # The system gives no more threads, or the interpreter is ending. One thread is enough.
            if not self._threads:
                self._work_queue.pop()
                raise

    def _start_thread(self) -> None:
        self._started += 1
        thread = threading.Thread(target=self._work, name=f"tinker-{self._name}-{self._started}", daemon=True)
        self._threads = {*self._threads, thread}
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:
                self._threads = self._threads - {thread}
            raise

    # ---------------------------------------------------- on a thread of the pool

    def _work(self) -> None:
        ready = threading.Lock()
        ready.acquire()
        while (entry := self._next_entry(ready)) is not None:
            entry.run()
            del entry  # keep nothing of the last job alive while the thread is idle

    def _next_entry(self, ready: threading.Lock) -> Any:
        """Wait for the next entry and return it, or return None when the thread has left the pool."""
        while True:
            with self._shutdown_lock:
                while self._work_queue:
                    entry = self._work_queue.popleft()
                    if entry is not None:  # None is the executor's mark for the end
                        return entry
                if self._shutdown:
                    return self._leave()
                self._idle.append(ready)
            if ready.acquire(timeout=self._idle_s):
                continue
            with self._shutdown_lock:
                if ready not in self._idle:
                    # Another thread woke this one just after the timeout: consume the wake-up and look again.
                    ready.acquire(blocking=False)
                    continue
                self._idle.remove(ready)
                kept = len(self._threads) == 1 and self._needed()
                if not self._work_queue and not kept:
                    return self._leave()

    def _leave(self) -> None:
        self._threads = self._threads - {threading.current_thread()}


class WorkerPools:
    """The pools of one client, each for one kind of job.

    A pool starts its first thread at its first job or at `reserve`.

    Args:
        needed: returns True while the last thread of each pool must not end, although it has no work.
    """

    def __init__(self, needed: Callable[[], object] = lambda: False) -> None:
        self.enter = Workers("enter", 1, needed=needed)
        self.create = Workers("create", _CREATE_THREADS, needed=needed)
        self.send = Workers("send", _SEND_THREADS, needed=needed)
        self.rest = Workers("rest", _REST_THREADS, needed=needed)
        self.fetch = Workers("fetch", _FETCH_THREADS, needed=needed)
        self.loss = Workers("loss", _LOSS_THREADS, needed=needed)
        self.callback = Workers("callback", _CALLBACK_THREADS, needed=needed)
        self.awaited = Workers("await", _AWAIT_THREADS, needed=needed)

    def in_order_of_end(self) -> tuple[Workers, ...]:
        """Return the pools in the order in which they are closed: each before the pools that its jobs use."""
        return (
            self.enter, self.create, self.send, self.rest, self.fetch, self.loss, self.callback, self.awaited,
        )  # fmt: skip
