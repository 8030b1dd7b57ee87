"""`SamplerPool`: worker processes that sample for the driver.

The threads of the driver send the waiting prompts in lots to free workers. The size of a lot is limited by
`max_in_flight` divided by the number of lots. Ray restarts a worker that dies, on another machine if needed,
and runs its prompts again. Each prompt has one future in the driver, so it gets one result.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

import ray
from attrs import frozen
from ray.exceptions import RayError, RayTaskError

from tinker_sync.batch.samples import Order, Window, map_samples
from tinker_sync.errors import ClientClosedError, InvalidInputError, TinkerError
from tinker_sync.ray.sharing import share_limits

if TYPE_CHECKING:
    from tinker_sync.batch.item import BatchItem
    from tinker_sync.batch.samples import Prompt
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.types import ModelInput, SampleResponse, SamplingParams

# Two lots of prompts at each worker: one is sampled while the answers of the other travel.
_LOTS: Final = 2


@frozen
class _Call:
    """The arguments of one `sample`."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    options: Mapping[str, Any]


@frozen
class _Waiting:
    call: _Call
    future: Future[SampleResponse]


class _Worker:
    """A sampler in a process of its own. Runs as an actor."""

    def __init__(self, sampling: SamplingClient) -> None:
        self._sampling = sampling
        self._shared = share_limits(sampling)

    def place(self) -> tuple[str, int]:
        """Return the id of this machine, and that of this process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def sample_all(self, packed: bytes) -> bytes:
        """Sample the prompts of a list of calls at once. Return a list of responses and errors."""
        calls: list[_Call] = pickle.loads(packed)  # noqa: S301  # from the driver
        sample = self._sampling.sample
        started = [
            _outcome_of(lambda call=call: sample(call.prompt, call.num_samples, call.params, **call.options))
            for call in calls
        ]
        outcomes = [
            _outcome_of(each.result) if isinstance(each, Future) else each  # a refused prompt has no future
            for each in started
        ]
        self._shared.report_usage()
        return _pack(outcomes)


def _pack(values: list[Any]) -> bytes:
    """Pickle values. Ray's own pickler takes twice the time, and is needed only for foreign errors."""
    try:
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001  # any class may refuse
        return bytes(ray.cloudpickle.dumps(values))


def _outcome_of(call: Any) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001  # the error of one prompt
        return error


class SamplerPool:
    """A pool of worker processes with copies of a sampling client. Any thread may use it.

    `sample` and `map` work like those of the client. Leaving the `with` block ends the workers.

    Args:
        sampling: the client to copy. Its copies find their key in `TINKER_API_KEY` of the workers.
        workers: the number of processes.
        max_in_flight: the most prompts under way at once, over all workers.
        ray_options: options of the actors, such as ``{"num_cpus": 1}``. A worker reserves no CPU by default,
            because it waits most of the time.

    Raises:
        InvalidInputError: an argument is not valid.
        ConfigurationError: Ray was not started.
    """

    def __init__(
        self,
        sampling: SamplingClient,
        *,
        workers: int = 2,
        max_in_flight: int = 256,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("workers", workers), ("max_in_flight", max_in_flight)):
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"SamplerPool: {name}: expected 1 or more, got {value!r}")
        self._sampling = sampling
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()  # guarded by _lock
        self._lots = 0  # guarded by _lock; threads that take prompts
        self._closed = False  # guarded by _lock
        self._most_lots = workers * _LOTS
        self._most_calls = max(1, -(-max_in_flight // self._most_lots))
        self.max_in_flight = max_in_flight
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
            "max_concurrency": _LOTS,
            **(ray_options or {}),
        }
        actor = ray.remote(_Worker).options(**options)
        # Pass the client by value: a worker that restarts later cannot fetch an object of this process.
        self._workers: list[Any] = [actor.remote(sampling) for _ in range(workers)]
        self._idle = deque(self._workers * _LOTS)  # guarded by _lock; one for each lot not under way
        self._threads = ThreadPoolExecutor(self._most_lots, "tinker-ray")

    # -------------------------------------------------------------------------------------- sampling

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, **options: Any
    ) -> Future[SampleResponse]:
        """Sample continuations of a prompt in one of the workers.

        Args:
            prompt: the input of the model.
            num_samples: the number of continuations.
            sampling_params: length, temperature, stops and so on.
            options: further arguments of `SamplingClient.sample`.

        Raises:
            ClientClosedError: the pool is closed.
        """
        future: Future[SampleResponse] = Future()
        waiting = _Waiting(_Call(prompt, num_samples, sampling_params, options), future)
        with self._lock:
            if self._closed:
                raise ClientClosedError("the pool of samplers is closed")
            self._waiting.append(waiting)
            start = self._lots < self._most_lots
            self._lots += start
        if start:
            self._threads.submit(self._carry_lots)
        return future

    def map(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        ordered: bool = True,
        on_error: Literal["return", "raise"] = "return",
        save_to: str | os.PathLike[str] | None = None,
        progress: bool = True,
        total: int | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> Generator[BatchItem, None, None]:
        """Sample continuations of many prompts, and yield an item for each; see `SamplingClient.map`."""
        order = Order(self, sampling_params, num_samples, options, tokenizer)
        window = Window(self.max_in_flight, ordered, on_error)
        return map_samples(prompts, order, window, save_to=save_to, progress=progress, total=total)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model, loaded in this process."""
        return self._sampling.get_tokenizer()

    def process_ids(self) -> list[int]:
        """Return the process id of each worker, on its machine."""
        return [process for _, process in self._places()]

    def node_ids(self) -> list[str]:
        """Return the id of the machine of each worker, as Ray names it."""
        return [node for node, _ in self._places()]

    def _places(self) -> list[tuple[str, int]]:
        places: list[tuple[str, int]] = ray.get([worker.place.remote() for worker in self._workers])
        return places

    def close(self) -> None:
        """End the workers. Samples under way fail with `ClientClosedError`."""
        with self._lock:
            self._closed = True
            doomed, self._waiting = self._waiting, deque()
        for each in doomed:
            if each.future.set_running_or_notify_cancel():
                each.future.set_exception(ClientClosedError("the pool of samplers was closed"))
        for worker in self._workers:
            ray.kill(worker)
        self._threads.shutdown()

    def __enter__(self) -> SamplerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------------------- on the threads

    def _carry_lots(self) -> None:
        """Send the waiting prompts to workers, lot by lot, until no prompt waits."""
        while (taken := self._take_lot()) is not None:
            worker, lot = taken
            try:
                packed = ray.get(worker.sample_all.remote(_pack([each.call for each in lot])))
                outcomes = pickle.loads(packed)  # noqa: S301  # from a worker
            except Exception as error:  # noqa: BLE001  # it becomes the error of each prompt
                outcomes = [self._explain(error)] * len(lot)
            with self._lock:
                self._idle.append(worker)
            for each, outcome in zip(lot, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    each.future.set_exception(outcome)
                else:
                    each.future.set_result(outcome)

    def _take_lot(self) -> tuple[Any, list[_Waiting]] | None:
        lot: list[_Waiting] = []
        while not lot:
            with self._lock:
                count = min(len(self._waiting), self._most_calls)
                if not count:
                    self._lots -= 1
                    return None
                taken = [self._waiting.popleft() for _ in range(count)]
            lot = [each for each in taken if each.future.set_running_or_notify_cancel()]
        with self._lock:
            return self._idle.popleft(), lot

    def _explain(self, error: Exception) -> Exception:
        with self._lock:
            closed = self._closed
        if closed:
            return ClientClosedError("the pool of samplers was closed")
        if isinstance(error, RayTaskError) and isinstance(error.cause, TinkerError):
            return error.cause
        if isinstance(error, RayError):
            return TinkerError(
                f"a worker of the pool failed: {error}; workers need a key in TINKER_API_KEY, and a network "
                "path to the server"
            )
        return error


def map(  # noqa: A001  # the name of `SamplingClient.map`
    sampling: SamplingClient,
    prompts: Iterable[Prompt],
    sampling_params: SamplingParams,
    num_samples: int = 1,
    *,
    workers: int = 2,
    max_in_flight: int = 256,
    ray_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Generator[BatchItem, None, None]:
    """Sample continuations of many prompts in worker processes, and yield a `BatchItem` for each.

    It takes the arguments of `SamplingClient.map`, `save_to` included, and those of `SamplerPool`. The
    workers start with the first item and end with the last, or when the loop is left.

    Args:
        sampling: the client to copy.
        prompts: inputs of the model, rows of token ids, texts or chats; a list or a generator.
        sampling_params: length, temperature, stops and so on.
        num_samples: the number of continuations of each prompt.
        workers: the number of processes.
        max_in_flight: the most prompts that are pulled ahead.
        ray_options: options of the actors.
        options: further arguments of `SamplingClient.map`.
    """
    with SamplerPool(sampling, workers=workers, max_in_flight=max_in_flight, ray_options=ray_options) as pool:
        yield from pool.map(prompts, sampling_params, num_samples, **options)
