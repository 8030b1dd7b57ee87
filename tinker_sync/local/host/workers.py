"""The two threads that compute. What they are given is a queue; what they answer are futures.

The trainer does one job after another. The sampler owns a `Sampler` for each base model: whatever has come
in meanwhile joins those under way at the next token, so requests of all clients are computed together. Both
sleep while there is nothing to do. The engine works outside of Python's lock for most of the time, so the
two get in each other's way little.
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
    """The host computes no more."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@attrs.frozen(eq=False)
class _Job:
    future: Future[Any]
    work: Callable[[], Any]


class Worker(ABC):
    """A thread and the queue it works off. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False  # guarded by _lock
        self._started = False  # guarded by _lock

    def _put(self, order: Any) -> bool:
        """Queue something, unless it is over; the thread is started by the first order."""
        with self._lock:
            if self._closed:
                return False
            if not self._started:
                self._started = True
                self._thread.start()
            self._queue.put(order)
        return True

    def close(self) -> None:
        """Fail what waits, let go what is being computed, and join the thread."""
        with self._lock:
            self._closed = True
            started = self._started
            self._queue.put(None)
        if started:
            self._thread.join(JOIN_S)

    @abstractmethod
    def _run(self) -> None:
        """Work until None comes out of the queue."""


class TrainWorker(Worker):
    """Does jobs in the order they come.

    >>> worker = TrainWorker("tinker-engine-train")
    >>> worker.submit(lambda: 6 * 7).result(timeout=5)
    42
    >>> worker.close()
    """

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do a job after those that wait."""
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
                _settle(job.future, job.work)
            # A job's arrays must not live on in this frame until the next one comes.
            del job


@attrs.define(eq=False)
class SampleOrder:
    """A request of the sampler; what `sample` gives, and `cancel` takes."""

    model: BaseModel
    spec: SampleSpec
    future: Future[SampleResult] = attrs.Factory(Future)
    ticket: int | None = None


@attrs.frozen(eq=False)
class _Cancel:
    order: SampleOrder


@attrs.frozen(eq=False)
class _Forget:
    params: LoraParams


class SampleWorker(Worker):
    """Samples for everybody, one sampler for each base model."""

    def __init__(self, name: str, *, max_rows: int = 256) -> None:
        super().__init__(name)
        self._max_rows = max_rows
        # All below: the thread's own.
        self._samplers: dict[str, Sampler] = {}
        self._orders: dict[tuple[str, int], SampleOrder] = {}

    def submit(self, model: BaseModel, spec: SampleSpec) -> SampleOrder:
        """Sample; the order's future has the result, or a ValueError that says what cannot be computed."""
        order = SampleOrder(model, spec)
        if not self._put(order):
            order.future.set_exception(HostClosed())
        return order

    def cancel(self, order: SampleOrder) -> None:
        """Stop computing for an order; its future is cancelled, unless it is already done."""
        self._put(_Cancel(order))

    def forget(self, params: LoraParams) -> None:
        """Drop what is remembered of an adapter."""
        self._put(_Forget(params))

    def _run(self) -> None:
        while self._take(wait=not self._orders):
            for name, sampler in list(self._samplers.items()):
                if sampler.busy:
                    self._step(name, sampler)
        for order in self._orders.values():
            _fail(order.future, HostClosed())
        self._orders.clear()

    def _take(self, *, wait: bool) -> bool:
        """Take in all that has come; False when it is time to end."""
        try:
            while True:
                order = self._queue.get(block=wait)
                if order is None:
                    return False
                self._take_one(order)
                wait = False
        except queue.Empty:
            return True

    def _take_one(self, order: Any) -> None:
        if isinstance(order, SampleOrder):
            self._add(order)
        elif isinstance(order, _Cancel):
            self._drop(order.order)
        else:
            for sampler in self._samplers.values():
                sampler.forget(order.params)

    def _add(self, order: SampleOrder) -> None:
        if not order.future.set_running_or_notify_cancel():
            return
        try:
            order.ticket = self._sampler(order.model).add(order.spec)
        except Exception as problem:  # noqa: BLE001  # it is the answer
            order.future.set_exception(problem)
            return
        self._orders[order.model.name, order.ticket] = order

    def _drop(self, order: SampleOrder) -> None:
        if order.ticket is None:
            order.future.cancel()
        elif self._orders.pop((order.model.name, order.ticket), None) is not None:
            self._samplers[order.model.name].cancel(order.ticket)
            order.future.set_exception(Cancelled())

    def _sampler(self, model: BaseModel) -> Sampler:
        if model.name not in self._samplers:
            decode = model.decode if model.has_tokenizer else None
            self._samplers[model.name] = Sampler(model.weights, decode=decode, max_rows=self._max_rows)
        return self._samplers[model.name]

    def _step(self, name: str, sampler: Sampler) -> None:
        try:
            finished = sampler.step()
        except Exception as problem:
            # What state it is in nobody knows: those under way fail, the next ones get a new one.
            logger.exception("sampling from %s failed", name)
            del self._samplers[name]
            for key in [key for key in self._orders if key[0] == name]:
                _fail(self._orders.pop(key).future, problem)
            return
        for ticket, result in finished:
            self._orders.pop((name, ticket)).future.set_result(result)


class Cancelled(RuntimeError):
    """Somebody asked for this not to be computed."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as problem:  # noqa: BLE001  # it is the answer
        future.set_exception(problem)
    else:
        future.set_result(result)


def _fail(future: Future[Any], problem: Exception) -> None:
    if not future.done():
        future.set_exception(problem)
