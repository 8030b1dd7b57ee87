"""The two computing threads and those for files, with queues of work; results go to futures.

The training thread does one job after another. The sampling thread owns a `Sampler` for each base model: new
requests join those in progress at the next token if there is room, so requests of all clients are computed
together. Both threads block while their queues are empty. numpy releases Python's interpreter lock in large
products, so the two threads compute in parallel most of the time.

These are no executors of the standard library, which take no work at the end of a program: a client in the
same process then still ends its session at the server.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs

from tinker_sync.local.engine.lora import LoraParams
from tinker_sync.local.engine.sample_spec import SampleResult, SampleSpec
from tinker_sync.local.engine.sampler import Sampler
from tinker_sync.local.host.base_model import BaseModel

T = TypeVar("T")

JOIN_S = 30.0

logger = logging.getLogger(__name__)


class HostClosed(RuntimeError):
    """An error for work that a closed host does not do."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@attrs.frozen(eq=False)
class _Job:
    future: Future[Any]
    work: Callable[[], Any]


class Worker(ABC):
    """The base of all workers: threads with a queue of work. Thread-safe."""

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False  # guarded by _lock
        self._started = False  # guarded by _lock

    def _put(self, handle: Any) -> bool:
        """Queue an item. The first item starts the threads. Return False if the worker is closed."""
        with self._lock:
            if self._closed:
                return False
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            self._queue.put(handle)
        return True

    def close(self) -> None:
        """End the threads after their present job or step, and wait for each at most `JOIN_S`.

        Unfinished work fails with `HostClosed`.
        """
        with self._lock:
            self._closed = True
            started = self._started
            for _ in self._threads:
                self._queue.put(None)
        if started:
            for thread in self._threads:
                thread.join(JOIN_S)

    @abstractmethod
    def _run(self) -> None:
        """Work until the queue yields None."""


class JobWorker(Worker):
    """A worker that begins jobs in the order of submission.

    >>> worker = JobWorker("tinker-engine-train")
    >>> worker.submit(lambda: 6 * 7).result(timeout=5)
    42
    >>> worker.close()
    """

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a job, and return the future of its result."""
        future: Future[T] = Future()
        if not self._put(_Job(future, work)):
            future.set_exception(HostClosed())
        return future

    def _run(self) -> None:
        while True:
            job: _Job | None = self._queue.get()
            if job is None:
                break
            if self._closed:
                _fail(job.future, HostClosed())
            elif job.future.set_running_or_notify_cancel():
                _resolve(job.future, job.work)
            # Free the job's arrays before waiting for the next job.
            del job


@attrs.define(eq=False)
class SampleHandle:
    """A submitted sample request and its future. `Host.sample` returns it, and `Host.cancel` accepts it.

    `ticket` is the number of the request in the sampler, once the sampling thread has added it.
    """

    model: BaseModel
    spec: SampleSpec
    future: Future[SampleResult] = attrs.Factory(Future)
    ticket: int | None = None


@attrs.frozen(eq=False)
class _Cancel:
    handle: SampleHandle


@attrs.frozen(eq=False)
class _Forget:
    params: LoraParams


class SampleWorker(Worker):
    """A worker that computes all sample requests, with one `Sampler` for each base model."""

    def __init__(self, name: str, *, max_rows: int = 256) -> None:
        super().__init__(name)
        self._max_rows = max_rows
        # Used by this worker's thread only.
        self._samplers: dict[str, Sampler] = {}
        self._handles: dict[tuple[str, int], SampleHandle] = {}

    def submit(self, model: BaseModel, spec: SampleSpec) -> SampleHandle:
        """Queue a sample request. Its future gets the result, or a ValueError for a bad request."""
        handle = SampleHandle(model, spec)
        if not self._put(handle):
            handle.future.set_exception(HostClosed())
        return handle

    def cancel(self, handle: SampleHandle) -> None:
        """Stop computing a request; its future fails with `Cancelled` unless the future is done."""
        self._put(_Cancel(handle))

    def forget(self, params: LoraParams) -> None:
        """Drop cached prompts of an adapter."""
        self._put(_Forget(params))

    def _run(self) -> None:
        while self._take(wait=not self._handles):
            for name, sampler in list(self._samplers.items()):
                if sampler.busy:
                    self._step(name, sampler)
        for handle in self._handles.values():
            _fail(handle.future, HostClosed())
        self._handles.clear()

    def _take(self, *, wait: bool) -> bool:
        """Process all items in the queue; wait for the first one if `wait` is set.

        Returns:
            False if the worker must end.
        """
        try:
            while True:
                handle = self._queue.get(block=wait)
                if handle is None:
                    return False
                self._take_one(handle)
                wait = False
        except queue.Empty:
            return True

    def _take_one(self, handle: Any) -> None:
        if isinstance(handle, SampleHandle):
            self._add(handle)
        elif isinstance(handle, _Cancel):
            self._drop(handle.handle)
        else:
            for sampler in self._samplers.values():
                sampler.forget(handle.params)

    def _add(self, handle: SampleHandle) -> None:
        if not handle.future.set_running_or_notify_cancel():
            return
        try:
            handle.ticket = self._sampler(handle.model).add(handle.spec)
        except Exception as problem:  # noqa: BLE001  # the future carries it
            handle.future.set_exception(problem)
            return
        self._handles[handle.model.name, handle.ticket] = handle

    def _drop(self, handle: SampleHandle) -> None:
        if handle.ticket is None:
            handle.future.cancel()
        elif self._handles.pop((handle.model.name, handle.ticket), None) is not None:
            self._samplers[handle.model.name].cancel(handle.ticket)
            handle.future.set_exception(Cancelled())

    def _sampler(self, model: BaseModel) -> Sampler:
        if model.name not in self._samplers:
            decode = model.decode if model.has_tokenizer else None
            self._samplers[model.name] = Sampler(model.weights, decode=decode, max_rows=self._max_rows)
        return self._samplers[model.name]

    def _step(self, name: str, sampler: Sampler) -> None:
        try:
            finished = sampler.step()
        except Exception as problem:
            # The sampler's state is unknown, so its requests fail, and later ones get a new sampler.
            logger.exception("sampling from %s failed", name)
            del self._samplers[name]
            for key in [key for key in self._handles if key[0] == name]:
                _fail(self._handles.pop(key).future, problem)
            return
        for ticket, result in finished:
            self._handles.pop((name, ticket)).future.set_result(result)


class Cancelled(RuntimeError):
    """The error of a sample request that was cancelled."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


def _resolve(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as problem:  # noqa: BLE001  # the future carries it
        future.set_exception(problem)
    else:
        future.set_result(result)


def _fail(future: Future[Any], problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)
