"""The host: base models, the training runs in memory, and the two threads that compute them.

The training thread does one job after another. The sampling thread owns a `Sampler` for each base model: new
requests join those in progress at the next token if there is room, so requests of all clients are computed
together. Both threads block while their queues are empty. numpy releases Python's interpreter lock in large
products, so the two threads compute in parallel most of the time.

These are no executors of the standard library, which take no work at the end of a program: a client in the
same process then still ends its session at the server.

numpy's BLAS splits products among all cores. For the small matrices of the built-in model this gains nothing,
and on busy cores its threads wait for each other at every product: on two busy cores, a pass over one short
datum took 20 to 110 ms with two threads and 3.5 ms with one. So BLAS has one thread from the first
computation of a host of small models until the host is closed. The host's own two threads still use two
cores.

The limit works with OpenBLAS, which numpy's wheels include. With another BLAS it has no effect.

Base models go by name: the built-in one, a random one for tests, and Hugging Face directories. The servers of
a process share the weights of a model, which are read on first use.
"""

from __future__ import annotations

import ctypes
import json
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import numpy as np

from tinker_sync._base.threads import DaemonThread
from tinker_sync.errors import InvalidInputError
from tinker_sync.local import tiny
from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.engine.model import ModelConfig, Weights, load_config, load_weights, random_weights
from tinker_sync.local.engine.sampling import Sampler, SampleResult, SampleSpec
from tinker_sync.local.engine.training import AdapterTrainer

# ----------------------------------------------------------------------------------------------- base models


class BaseModel:
    """A base model that the server trains adapters of and samples from. Thread-safe.

    Args:
        name: The name of the model in requests.
        directory: The folder of `config.json`, safetensors files and `tokenizer.json`.

    Raises:
        ValueError: `config.json` or `generation_config.json` is damaged, or the engine does not compute this
            kind of model.
        OSError: the directory is missing, or has no `config.json`.
    """

    def __init__(self, name: str, directory: str | Path) -> None:
        self.name = name
        self.directory = Path(directory)
        self.config: ModelConfig = load_config(self.directory)
        self.end_tokens = _end_tokens(self.directory)
        self._lock = threading.Lock()
        self._weights: Weights | None = None  # guarded by _lock
        self._tokenizer: Any = None  # guarded by _lock

    @property
    def arch(self) -> str:
        """The model family: "qwen3", which normalizes queries and keys in its attention, or "llama"."""
        return "qwen3" if self.config.qk_norm else "llama"

    @property
    def weights(self) -> Weights:
        """The weights, read on first use. Raises as `load_weights` does."""
        # The lock is held while reading, so that two threads never hold the weights twice.
        with self._lock:
            if self._weights is None:
                self._weights = load_weights(self.directory)
            return self._weights

    @property
    def tokenizer_id(self) -> str:
        """The directory, where clients on this machine find the tokenizer; without one, the model's name."""
        return str(self.directory) if self.has_tokenizer else self.name

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer, which stop texts need."""
        return (self.directory / "tokenizer.json").exists()

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special tokens included. Call this only if `has_tokenizer` is True."""
        text: str = self._load_tokenizer().decode(tokens, skip_special_tokens=False)
        return text

    def _load_tokenizer(self) -> Any:
        with self._lock:
            if self._tokenizer is None:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
            return self._tokenizer

    def __repr__(self) -> str:
        return f"BaseModel({self.name!r})"


def _end_tokens(directory: Path) -> frozenset[int]:
    """Return the ids of the tokens that end a text.

    They are in `generation_config.json` or else in `config.json`. If neither lists them, the result is empty.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.exists():
            continue
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"{path}: must hold an object")  # noqa: TRY004  # damage in a file
        ids = tree.get("eos_token_id")
        if ids is not None:
            return frozenset(int(token) for token in (ids if isinstance(ids, list) else [ids]))
    return frozenset()


RANDOM: Final = "tinker-sync/random"


@lru_cache(maxsize=8)
def load_base_model(name: str) -> BaseModel:
    """Return the base model with a name. Later calls return the same object for the eight names used last.

    Args:
        name: "tinker-sync/tiny", "tinker-sync/random" (some 27,000 random weights, which compute nonsense
            quickly), or a Hugging Face directory; the model then has the name of the directory.

    Raises:
        InvalidInputError: there is no such model, or its configuration cannot be used. Its weights are read
            later, on first use.

    >>> load_base_model("tinker-sync/random").config.vocab_size
    256
    >>> load_base_model("tinker-sync/random") is load_base_model("tinker-sync/random")
    True
    """
    if name == RANDOM:
        return _RandomModel()
    if name == tiny.NAME:
        return BaseModel(tiny.NAME, tiny.directory())
    directory = Path(name).expanduser().absolute()
    if not (directory / "config.json").exists():
        raise InvalidInputError(
            f"there is no model in {directory}; give {tiny.NAME}, {RANDOM}, or a directory with a config.json"
        )
    try:
        return BaseModel(directory.name, directory)
    except (OSError, ValueError) as problem:
        raise InvalidInputError(f"there is no model in {directory}: {problem}") from problem


class _RandomModel(BaseModel):
    """The model `RANDOM`: it needs no files, because its weights are random."""

    def __init__(self) -> None:
        self.name = RANDOM
        self.config = ModelConfig(
            vocab_size=256, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_size=64
        )
        self.end_tokens: frozenset[int] = frozenset()
        self._random_weights = random_weights(self.config, seed=0, scale=0.1)

    @property
    def weights(self) -> Weights:
        return self._random_weights

    @property
    def has_tokenizer(self) -> bool:
        return False


# --------------------------------------------------------------------------------------------------- workers


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
        self._threads = [DaemonThread(self._run, name) for _ in range(threads)]
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
        if not self._put(lambda: self._add(handle)):
            handle.future.set_exception(HostClosed())
        return handle

    def cancel(self, handle: SampleHandle) -> None:
        """Stop computing a request; its future fails with `Cancelled` unless the future is done."""
        self._put(lambda: self._drop(handle))

    def forget(self, params: LoraParams) -> None:
        """Drop cached prompts of an adapter."""
        self._put(lambda: self._forget(params))

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
                work = self._queue.get(block=wait)
                if work is None:
                    return False
                work()
                wait = False
        except queue.Empty:
            return True

    def _forget(self, params: LoraParams) -> None:
        for sampler in self._samplers.values():
            sampler.forget(params)

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


# ------------------------------------------------------------------------------------------------------ BLAS


SMALL_WIDTH: Final = 1024
"""A host whose models have at most this hidden size limits BLAS to one thread."""

_PREFIXES: Final = ("scipy_openblas", "openblas")
_SUFFIXES: Final = ("64_", "")


class BlasThreadGuard:
    """A limit of one BLAS thread, in force while anyone holds it. Thread-safe.

    A holder has called `acquire` and has not called `release` yet.

    >>> guard = BlasThreadGuard()
    >>> guard.acquire(); guard.release()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0  # guarded by _lock
        self._before = 0  # guarded by _lock

    def acquire(self) -> None:
        """Add a holder; the first one sets the limit."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = count_threads()
                set_threads(1)

    def release(self) -> None:
        """Remove a holder; the last one restores the number of threads."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before:
                set_threads(self._before)


ONE_BLAS_THREAD: Final = BlasThreadGuard()
"""The guard of this process."""


def count_threads() -> int:
    """Return the number of BLAS threads, or 0 if numpy's BLAS is not OpenBLAS."""
    get = _find_function("get_num_threads")
    return int(get()) if get is not None else 0


def set_threads(count: int) -> None:
    """Set the number of BLAS threads if numpy's BLAS is OpenBLAS."""
    change = _find_function("set_num_threads")
    if change is not None:
        change(ctypes.c_int(count))


@cache
def _find_function(name: str) -> Callable[..., Any] | None:
    """Return a function of numpy's OpenBLAS, or None if there is no OpenBLAS.

    `name` lacks the prefix and the suffix, which depend on the build of the library.
    """
    numpy = Path(np.__file__).parent
    for folder in (numpy.parent / "numpy.libs", numpy / ".dylibs", numpy / ".libs"):
        for path in sorted(folder.glob("*openblas*")):
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue
            for prefix in _PREFIXES:
                for suffix in _SUFFIXES:
                    found: Callable[..., Any] | None = getattr(library, f"{prefix}_{name}{suffix}", None)
                    if found is not None:
                        return found
    return None


# -------------------------------------------------------------------------------------------------- the host


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

        Wait for each thread at most `JOIN_S`. Idempotent.
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
