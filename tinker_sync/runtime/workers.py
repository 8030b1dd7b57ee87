"""`Workers`: a named, bounded pool of daemon threads.

Why not `ThreadPoolExecutor`: the interpreter joins its threads at exit, so a program with a request under way
would end when the server answers, not when the program does. Ours are daemons that nothing joins but `close`.

- Threads are made when there is work and none is idle, up to the bound; work beyond that waits, first come
  first served.
- An idle thread ends after `idle_s`. Work goes to the thread that became idle last, so those that are not
  needed really end.
- A forked child starts with an empty pool: no thread of the parent, and none of its work.
- What a job raises is logged (`run`) or kept in its future (`submit`); the thread goes on.
- Ctrl-C may meet the main thread anywhere while it hands out work: the pool stays whole, and no other job is
  lost.

Any thread may submit and close, workers included. The pool knows nothing of what the jobs do. A thread holds
its pool, so a pool that is dropped without `close` goes when its last thread has been idle for long enough.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, ParamSpec, TypeVar

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.runtime import _fork

P = ParamSpec("P")
T = TypeVar("T")

Job = Callable[[], object]

# Long enough to bridge the pause between two training steps of most scripts.
IDLE_S: Final = 10.0

_log = logging.getLogger(__name__)


class _Call(Future[T]):
    """A job somebody wants the result of."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work: Callable[[], T] | None = work

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is None or not self.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as failure:  # noqa: BLE001  # it belongs to whoever waits for the future
            self.set_exception(failure)
        else:
            self.set_result(result)

    def drop(self) -> None:
        """End without having run, so that nobody waits in vain."""
        self._work = None
        if self.cancel():
            self.set_running_or_notify_cancel()


class _Worker:
    """One thread of the pool."""

    __slots__ = ("launched", "ready", "thread")

    def __init__(self) -> None:
        self.ready = threading.Lock()  # released when there is something to look at
        self.ready.acquire()
        self.launched = threading.Event()  # set when the thread has started, or could not
        self.thread: threading.Thread


class Workers(Executor):
    """A pool of threads named `tinker-<name>-1`, `-2` and so on. Thread-safe.

    >>> with Workers("demo", max_threads=2) as workers:
    ...     print(workers.submit(pow, 2, 10).result())
    1024
    """

    def __init__(
        self, name: str, max_threads: int, *, idle_s: float = IDLE_S, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Make a pool without threads.

        Args:
            name: what the threads are called after.
            max_threads: how many there may be at once.
            idle_s: how long a thread stays without work.
            clock: what `close` measures its timeout with.
        """
        self._name = name
        self._max_threads = max_threads
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()  # guarded by _lock; all that may still take work
        self._leaving: list[threading.Thread] = []  # guarded by _lock; those that end without more work
        self._idle: list[_Worker] = []  # guarded by _lock; the last one became idle last
        self._queue: deque[Job] = deque()  # guarded by _lock; whoever is called takes from here
        self._started = 0  # guarded by _lock
        self._closed = False  # guarded by _lock
        _fork.renew_in_child(self)

    def run(self, job: Job) -> None:
        """Run `job()` on a thread of the pool; its result is dropped, what it raises is logged.

        Raises:
            RuntimeError: the pool is closed, or the system gives no first thread.

        >>> with Workers("demo", max_threads=1) as workers:
        ...     workers.run(lambda: print("done"))
        done
        """
        worker = None
        try:
            with self._lock:
                worker = self._place_locked(job)
            if worker is not None:
                self._start(worker, job)
        except BaseException:
            self._forget_unborn(worker)
            raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn(*args, **kwargs)` on a thread of the pool and return the future of its result.

        Raises:
            RuntimeError: as for `run`.

        >>> with Workers("demo", max_threads=1) as workers:
        ...     workers.submit(len, "abc").result()
        3
        """
        call = _Call(lambda: fn(*args, **kwargs))
        self.run(call)
        return call

    def close(self, timeout: float | None = None, *, drop: bool = True) -> bool:
        """Take no more work and wait for what there is, at most `timeout` seconds; then drop what has not
        begun, unless `drop` is false.

        True when all threads have ended. Jobs that run on stay behind as daemons. May be called again, and
        from a job.

        >>> Workers("demo", max_threads=1).close(timeout=1)
        True
        """
        self._refuse_more()
        ended = self._join(timeout)
        if not ended and drop:
            self._drop_queue()
        return ended

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The same for code that expects an `Executor`.

        >>> Workers("demo", max_threads=1).shutdown()
        """
        self._refuse_more()
        if cancel_futures:
            self._drop_queue()
        if wait:
            self._join(None)

    def renew_after_fork(self) -> None:
        """The parent's threads do not exist here, and its work is its own."""
        self._lock = threading.Lock()
        self._workers, self._leaving, self._idle, self._queue = set(), [], [], deque()

    def __repr__(self) -> str:
        with self._lock:
            closed = ", closed" if self._closed else ""
            counts = f"{len(self._workers)} threads, {len(self._idle)} idle, {len(self._queue)} queued"
        return f"<Workers {self._name!r} {counts}{closed}>"

    # ---------------------------------------------------- handing out work

    def _place_locked(self, job: Job) -> _Worker | None:
        """Queue the job and call somebody for it; returns a worker that must be started for that."""
        if self._closed:
            raise RuntimeError(f"the workers {self._name!r} are closed")
        # First of all: whatever Ctrl-C keeps from happening below, whoever is called next finds the job.
        self._queue.append(job)
        if self._idle:
            self._idle.pop().ready.release()
            return None
        if len(self._workers) >= self._max_threads:
            return None
        self._started += 1
        worker = _Worker()
        worker.thread = threading.Thread(
            target=self._work, args=(worker,), name=f"tinker-{self._name}-{self._started}", daemon=True
        )
        self._workers.add(worker)
        return worker

    def _start(self, worker: _Worker, job: Job) -> None:
        try:
            worker.thread.start()
        except RuntimeError:
            # The system gives no more threads, or the interpreter is ending. Fewer will do, none will not.
            with self._lock:
                self._workers.discard(worker)
                if not self._workers:
                    self._queue.remove(job)
                    raise
                if self._idle:
                    self._idle.pop().ready.release()
        finally:
            worker.launched.set()

    def _forget_unborn(self, worker: _Worker | None) -> None:
        """Ctrl-C came: if it kept a thread from starting, that one takes no place."""
        if worker is not None and worker.thread.ident is None:
            with self._lock:
                self._workers.discard(worker)

    # ---------------------------------------------------- on a thread of the pool

    def _work(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.add(worker)  # it is born, whatever others may have thought
        job = self._next_job(worker)
        while job is not None:
            try:
                job()
            except BaseException:  # noqa: BLE001  # one job's SystemExit must not cost the others a thread
                _log.exception("a job of the workers %r failed", self._name)
            job = None  # while idle, nothing of the last job stays alive
            job = self._next_job(worker)

    def _next_job(self, worker: _Worker) -> Job | None:
        """What to do next, waiting for it; None when the thread shall end."""
        while True:
            with self._lock:
                if self._queue:
                    return self._queue.popleft()
                if self._closed:
                    self._retire_locked(worker)
                    return None
                self._idle.append(worker)
            called = worker.ready.acquire(timeout=self._idle_s)
            with self._lock:
                # Whoever was called is no longer in there, and looks again even if the call is still to come.
                uncalled = worker in self._idle
                if uncalled:
                    self._idle.remove(worker)
                if uncalled and not called and not self._queue:
                    self._retire_locked(worker)
                    return None

    def _retire_locked(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        self._leaving = [*(thread for thread in self._leaving if thread.is_alive()), worker.thread]

    # ---------------------------------------------------- closing

    def _refuse_more(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.ready.release()

    def _join(self, timeout: float | None) -> bool:
        deadline_s = math.inf if timeout is None else self._clock.now() + timeout
        me = threading.current_thread()
        with self._lock:
            workers = [worker for worker in self._workers if worker.thread is not me]
            threads = [thread for thread in self._leaving if thread is not me]
        for worker in workers:
            if not self._clock.wait(worker.launched, deadline_s - self._clock.now()):
                return False
            if worker.thread.ident is not None:
                threads.append(worker.thread)
        for thread in threads:
            thread.join(min(max(deadline_s - self._clock.now(), 0.0), threading.TIMEOUT_MAX))
        return not any(thread.is_alive() for thread in threads)

    def _drop_queue(self) -> None:
        with self._lock:
            dropped, self._queue = self._queue, deque()
        for job in dropped:
            if isinstance(job, _Call):
                job.drop()
