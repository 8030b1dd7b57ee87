"""The host: base models, the training runs in memory, and the two threads that compute them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.engine.sample_spec import SampleSpec
from tinker_sync.local.engine.training import AdapterTrainer
from tinker_sync.local.host.base_model import BaseModel
from tinker_sync.local.host.blas import ONE_BLAS_THREAD, SMALL_WIDTH
from tinker_sync.local.host.workers import JobWorker, SampleHandle, SampleWorker

T = TypeVar("T")


class UnknownRun(KeyError):
    """An error for a run that is not in memory."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return f"model {self.run_id!r} is not in memory"


class Host:
    """The base models, the training runs in memory, and the two threads that compute them. Thread-safe.

    The threads start with the first work and end with `close`.

    Args:
        models: The models to train and to sample.
        max_rows: The largest number of samples of one base model in progress at once.
    """

    def __init__(self, models: Iterable[BaseModel], *, max_rows: int = 256) -> None:
        self.models = {model.name: model for model in models}
        self._trainer = JobWorker("tinker-engine-train")
        self._sampler = SampleWorker("tinker-engine-sample", max_rows=max_rows)
        self._runs: dict[str, AdapterTrainer] = {}  # used by the training thread only
        self._small = all(model.config.hidden_size <= SMALL_WIDTH for model in self.models.values())
        self._lock = threading.Lock()
        self._limits_blas = False  # guarded by _lock

    def create(self, run_id: str, base_model: str, settings: LoraSettings) -> Future[None]:
        """Create a run with a new adapter, after all earlier jobs. The run replaces one with the same id.

        The future ends when the run is in memory. It fails if the host does not have the base model or cannot
        read its weights.
        """

        def make() -> None:
            self._runs[run_id] = AdapterTrainer(self.models[base_model].weights, settings)

        self._begin()
        return self._trainer.submit(make)

    def train(self, run_id: str, job: Callable[[AdapterTrainer], T]) -> Future[T]:
        """Run a job with the trainer of a run, after all earlier jobs, and return the future of its result.

        The future fails with `UnknownRun` if the run is then not in memory, or with the exception of the job.
        """

        def work() -> T:
            run = self._runs.get(run_id)
            if run is None:
                raise UnknownRun(run_id)
            return job(run)

        return self._trainer.submit(work)

    def unload(self, run_id: str) -> Future[bool]:
        """Drop a run after all earlier jobs. The future has True if the run was in memory."""
        return self._trainer.submit(lambda: self._runs.pop(run_id, None) is not None)

    def sample(self, base_model: str, spec: SampleSpec) -> SampleHandle:
        """Queue a sample request, and return a `SampleHandle` with the future of its result.

        Raises:
            KeyError: the host does not have the base model.
        """
        self._begin()
        return self._sampler.submit(self.models[base_model], spec)

    def cancel(self, handle: SampleHandle) -> None:
        """Stop computing a request; its future fails with `Cancelled` unless the future is done."""
        self._sampler.cancel(handle)

    def forget(self, params: LoraParams) -> None:
        """Drop the cached prompts of an adapter that is no longer used."""
        self._sampler.forget(params)

    def close(self) -> None:
        """End both threads after their present job or step. Unfinished work fails with `HostClosed`.

        Wait for each thread at most `JOIN_S` (`workers`). Idempotent.
        """
        self._trainer.close()
        self._sampler.close()
        self._runs.clear()
        with self._lock:
            limits, self._limits_blas, self._small = self._limits_blas, False, False
        if limits:
            ONE_BLAS_THREAD.release()

    def _begin(self) -> None:
        """Limit BLAS to one thread before the first computation of small models."""
        with self._lock:
            begins = self._small and not self._limits_blas
            self._limits_blas = self._limits_blas or begins
        if begins:
            ONE_BLAS_THREAD.acquire()
