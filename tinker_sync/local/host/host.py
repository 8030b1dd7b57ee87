"""Everything that computes: base models, the runs in memory, and the threads that work on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.engine.sample_spec import SampleSpec
from tinker_sync.local.engine.training import TrainingRun
from tinker_sync.local.host.base_model import BaseModel
from tinker_sync.local.host.blas import ONE_THREAD, SMALL
from tinker_sync.local.host.workers import SampleOrder, SampleWorker, TrainWorker

T = TypeVar("T")


class UnknownRun(KeyError):
    """There is no such run in memory."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return f"model {self.run_id!r} is not in memory"


class Host:
    """Trains and samples. Thread-safe; the threads start with the first work and end with `close`.

    Args:
        models: What can be trained and sampled.
        max_rows: How many samples of one base model are continued at once.
    """

    def __init__(self, models: Iterable[BaseModel], *, max_rows: int = 256) -> None:
        self.models = {model.name: model for model in models}
        self._trainer = TrainWorker("tinker-engine-train")
        self._sampler = SampleWorker("tinker-engine-sample", max_rows=max_rows)
        self._runs: dict[str, TrainingRun] = {}  # the trainer's own
        self._small = all(model.config.hidden_size <= SMALL for model in self.models.values())
        self._lock = threading.Lock()
        self._quiet = False  # guarded by _lock

    def create(self, run_id: str, base_model: str, settings: LoraSettings) -> Future[None]:
        """Make a run in memory, as a new adapter. One of the same name is replaced."""

        def make() -> None:
            self._runs[run_id] = TrainingRun(self.models[base_model].weights, settings)

        self._begin()
        return self._trainer.submit(make)

    def train(self, run_id: str, job: Callable[[TrainingRun], T]) -> Future[T]:
        """Do something with a run, after all that was asked of the trainer before.

        The future fails with `UnknownRun` if there is no such run, and with whatever the job raises.
        """

        def work() -> T:
            run = self._runs.get(run_id)
            if run is None:
                raise UnknownRun(run_id)
            return job(run)

        return self._trainer.submit(work)

    def unload(self, run_id: str) -> Future[bool]:
        """Drop a run; whether there was one."""
        return self._trainer.submit(lambda: self._runs.pop(run_id, None) is not None)

    def sample(self, base_model: str, spec: SampleSpec) -> SampleOrder:
        """Sample, together with everybody else's requests; the order's future has the result."""
        self._begin()
        return self._sampler.submit(self.models[base_model], spec)

    def cancel(self, order: SampleOrder) -> None:
        """Stop computing for an order."""
        self._sampler.cancel(order)

    def forget(self, params: LoraParams) -> None:
        """Drop what the samplers remember of an adapter that nobody will ask for again."""
        self._sampler.forget(params)

    def close(self) -> None:
        """End both threads; what waits for them fails. May be called more than once."""
        self._trainer.close()
        self._sampler.close()
        self._runs.clear()
        with self._lock:
            quiet, self._quiet, self._small = self._quiet, False, False
        if quiet:
            ONE_THREAD.release()

    def _begin(self) -> None:
        """Something will be computed: small models on one thread each."""
        with self._lock:
            begins = self._small and not self._quiet
            self._quiet = self._quiet or begins
        if begins:
            ONE_THREAD.acquire()
