"""`SamplerPool`: worker processes that sample for the driver.

The driver is the process that made the pool. While a worker has samples to take, one thread of the driver
serves it: the thread sends prompts, waits for responses, and sends new prompts in their place, so a slow
sample delays no other. No prompt waits for a worker that has not started. Each reply of a worker lists the
samples under way. Ray restarts a worker that dies, on another machine if needed. The new worker does not list
the samples of the old one, so the thread sends their prompts again. If Ray gives a worker up, the other
workers take its prompts. Each prompt has one future in the driver, so it gets one result.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import ray
from attrs import frozen
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from tinker_sync._base.events import TokensUsed
from tinker_sync._base.numbers import numbers
from tinker_sync.batch.samples import Order, Window, map_samples
from tinker_sync.errors import ClientClosedError, InvalidInputError, TinkerError
from tinker_sync.ray.asking import RayConnection
from tinker_sync.ray.sharing import find_board
from tinker_sync.ray.worker import PoolWorker, SampleCall, pack
from tinker_sync.runtime.spending import CostEstimate, Reservation, SpendGuard, length_of
from tinker_sync.runtime.workers import Workers

if TYPE_CHECKING:
    from tinker_sync.batch.item import BatchItem
    from tinker_sync.batch.samples import Prompt
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.types import ModelInput, SampleResponse, SamplingParams

# The longest wait for the first sample to end. It is shorter while the worker could take more prompts.
_HOLD_S: Final = 1.0
_BRIEF_HOLD_S: Final = 0.1
_REPORT_S: Final = 1.0
_PER_WORKER: Final = 256


@frozen
class _Waiting:
    call: SampleCall
    future: Future[SampleResponse]

    def claim(self) -> bool:
        """Return False if the user has cancelled the future; otherwise it can no longer be cancelled."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


class _Reports:
    """The usage reports of one worker, on their way to the board. For one thread.

    The board is the actor that adds up the usage of all processes (`tinker_sync.ray.sharing`). It gets the
    last report of each process of the worker, usually at most once a second. A worker that Ray has restarted
    is a new process.
    """

    def __init__(self, connection: RayConnection) -> None:
        self._connection = connection
        self._by_process: dict[str, tuple[str, str, Any]] = {}
        self._passed_on_s = -math.inf

    def add(self, usage: tuple[str, str, Any], *, at_once: bool) -> None:
        """Keep a report in place of the earlier one of its process.

        Send all kept reports if the last sending was more than one second ago. Reports are kept after they
        are sent, also those of processes that have died, because a board that replaces a lost one needs them
        all.

        Args:
            usage: the arguments of `Board.record_usage`.
            at_once: send now, even if the last sending was more recent.
        """
        self._by_process[usage[1]] = usage
        if at_once or time.monotonic() > self._passed_on_s + _REPORT_S:
            self.pass_on()

    def pass_on(self) -> None:
        """Send the last report of each process to the board, and ignore errors."""
        self._passed_on_s = time.monotonic()
        with suppress(Exception):  # without a board nothing is counted
            self._connection.check()
            board = find_board()
            for usage in self._by_process.values():
                board.record_usage.remote(*usage)


class SamplerPool:
    """A pool of worker processes with copies of a sampling client. Any thread may use it.

    `sample` and `map` work like those of the client. Leaving the `with` block ends the workers; so does the
    end of the process. A pool connects to the cluster of `ray.init`; without that call, Ray starts with its
    defaults.

    Args:
        sampling: the client to copy. Its copies find their key in `TINKER_API_KEY` of the workers.
        workers: the number of processes.
        max_in_flight: the most prompts under way at once over all workers, which get equal shares, rounded
            up; None for 256 in each.
        ray_options: options of the actors, such as ``{"num_cpus": 1}``. A worker reserves no CPU by default,
            because it waits most of the time.

    Raises:
        InvalidInputError: an argument is not valid.
    """

    def __init__(
        self,
        sampling: SamplingClient,
        *,
        workers: int = 2,
        max_in_flight: int | None = None,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (
            ("workers", workers),
            ("max_in_flight", 1 if max_in_flight is None else max_in_flight),
        ):
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"SamplerPool: {name}: expected 1 or more, got {value!r}")
        self._sampling = sampling
        # This process makes the board, so that the board does not end with a worker.
        find_board()
        self._connection = RayConnection()
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._numbers = numbers()
        self.max_in_flight = workers * _PER_WORKER if max_in_flight is None else max_in_flight
        self._share = -(-self.max_in_flight // workers)
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": -1,
            "max_concurrency": 2,  # so that `place` does not wait for `exchange`
            **(ray_options or {}),
        }
        actor = ray.remote(PoolWorker).options(**options)
        # Pass the client by value: a worker that restarts later cannot fetch an object of this process.
        self._workers: list[Any] = [actor.remote(sampling) for _ in range(workers)]
        self._idle: deque[Any] = deque()  # guarded by _lock; started, without a thread that serves them
        self._alive = workers  # guarded by _lock; the workers that Ray has not given up
        self._threads = Workers("ray", workers)
        self._process = os.getpid()
        _pools.add(self)
        for worker in self._workers:
            self._threads.run_call(partial(self._serve, worker))

    # -------------------------------------------------------------------------------------- sampling

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, **options: Any
    ) -> Future[SampleResponse]:
        """Sample continuations of a prompt in one of the workers, and return the future of the response.

        A prompt waits in this process until a worker has room for it.

        Args:
            prompt: the input of the model.
            num_samples: the number of continuations.
            sampling_params: length, temperature, stops and so on.
            options: further arguments of `SamplingClient.sample`.

        Raises:
            ClientClosedError: the pool is closed.
            BudgetExceededError: the sample could exceed a budget of the service client of this process.
            ConfigurationError: such a budget limits dollars, and a price is unknown.
            TinkerError: the system gives no thread.
        """
        future: Future[SampleResponse] = Future()
        waiting = _Waiting(SampleCall(prompt, num_samples, sampling_params, options), future)
        self._reserve(waiting)
        with self._lock:
            closed = self._closed
            woken = []
            if not closed:
                self._waiting.append(waiting)
                woken = [self._idle.popleft()] if self._idle else []
        if closed:
            future.cancel()
            raise ClientClosedError("the pool of samplers is closed")
        try:
            self._wake(woken)
        except TinkerError:
            future.cancel()
            raise
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
        """Sample continuations of many prompts, and yield a `BatchItem` for each.

        The arguments are those of `SamplingClient.map`, except `max_in_flight`, which the pool sets.
        """
        order = Order(self, sampling_params, num_samples, options, tokenizer)
        window = Window(self.max_in_flight, ordered, on_error)
        return map_samples(prompts, order, window, save_to=save_to, progress=progress, total=total)

    def _reserve(self, waiting: _Waiting) -> None:
        """Reserve the tokens of a sample in the budgets of this process; the workers know no budgets."""
        limiters = self._sampling.holder.spending.limiters
        if limiters:
            call, most = waiting.call, waiting.call.params.max_tokens
            plan = CostEstimate(
                model=self._sampling.sampling_session_id,
                prompt=length_of(call.prompt),
                sampled=None if most is None else most * call.num_samples,
            )
            # The workers count the tokens, so this admission reports none.
            reservation = SpendGuard(lambda _: None).reserve(lambda: plan, limiters)
            waiting.future.add_done_callback(partial(_settle, reservation, plan))

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model, loaded in this process."""
        return self._sampling.get_tokenizer()

    def process_ids(self) -> list[int]:
        """Return the process id that each worker has on its machine."""
        return [process for _, process in self._places()]

    def node_ids(self) -> list[str]:
        """Return the id of the machine of each worker, as Ray names it."""
        return [node for node, _ in self._places()]

    def _places(self) -> list[tuple[str, int]]:
        places: list[tuple[str, int]] = ray.get([worker.place.remote() for worker in self._workers])
        return places

    def close(self) -> None:
        """End the workers. Samples that have not ended fail with `ClientClosedError`."""
        with self._lock:
            self._closed = True
            doomed, self._waiting = self._waiting, deque()
        for each in doomed:
            if each.claim():
                each.future.set_exception(ClientClosedError("the pool of samplers was closed"))
        for worker in self._workers:
            with suppress(Exception):  # the worker belongs to a Ray that has ended, and has ended with it
                self._connection.check()
                ray.kill(worker)
        self._threads.shutdown()

    def __enter__(self) -> SamplerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------- on the threads

    def _serve(self, worker: Any) -> None:
        """Send prompts to a worker and resolve their futures, until no prompt waits and none is under way.

        Before that, wait until the worker has started.
        """
        try:
            self._connection.ask(worker.place, meanwhile=self._wake_another)
        except Exception as error:  # noqa: BLE001  # of the last worker: the exchange fails with it too
            if self._give_up(error, ()):
                return
        held: dict[int, _Waiting] = {}
        lost: list[int] = []
        reports = _Reports(self._connection)
        while (taken := self._take(worker, len(held))) is not None:
            new = [(next(self._numbers), each) for each in taken if each.claim()]
            held.update(new)
            calls = [(number, held[number].call) for number in (*lost, *(number for number, _ in new))]
            if not held:
                continue
            hold_s = _HOLD_S if len(held) >= self._share else _BRIEF_HOLD_S
            try:
                reply = self._connection.ask(
                    worker.exchange, pack(calls), hold_s, meanwhile=self._wake_another
                )
                outcomes, under_way, usage = pickle.loads(reply)  # noqa: S301  # from a worker
            except Exception as error:  # noqa: BLE001  # it becomes the error of each prompt
                reports.pass_on()
                if self._give_up(error, held.values()):
                    return
                explained = self._explain(error)
                outcomes, under_way = [(number, explained) for number in held], ()
            else:
                reports.add(usage, at_once=len(outcomes) == len(held))
            for number, outcome in outcomes:
                # A reply that was lost on its way can bring an outcome twice.
                if (each := held.pop(number, None)) is not None:
                    _resolve(each.future, outcome)
            lost = [number for number in held if number not in under_way]

    def _take(self, worker: Any, held: int) -> list[_Waiting] | None:
        """Return waiting prompts for a worker with `held` samples under way.

        If the worker has nothing to do, return None; a later `sample` then starts a thread for it.
        """
        with self._lock:
            count = min(len(self._waiting), self._share - held)
            if not count and not held:
                self._idle.append(worker)
                return None
            return [self._waiting.popleft() for _ in range(count)]

    def _give_up(self, error: Exception, held: Collection[_Waiting]) -> bool:
        """Give the prompts of a worker to the others if Ray has given the worker up.

        Return False if Ray has not, or if no other worker is left: then the prompts fail with the error.
        """
        if not isinstance(error, ActorDiedError):
            return False
        with self._lock:
            if self._closed or self._alive == 1:
                return False
            self._alive -= 1
            self._waiting.extendleft(reversed(tuple(held)))
            woken, self._idle = self._idle, deque()
        self._wake(woken)
        return True

    def _wake_another(self) -> None:
        """Let an idle worker take the prompts that wait, because that of this thread does not answer."""
        with self._lock:
            woken = [self._idle.popleft()] if self._waiting and self._idle else []
        self._wake(woken)

    def _wake(self, workers: Iterable[Any]) -> None:
        """Let threads serve idle workers. If the pool closes meanwhile, `close` fails the prompts."""
        for worker in workers:
            try:
                self._threads.run_call(partial(self._serve, worker))
            except ClientClosedError:
                return
            except TinkerError:
                with self._lock:
                    self._idle.append(worker)
                raise

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


def _settle(reservation: Reservation, plan: CostEstimate, ended: Future[SampleResponse]) -> None:
    """Replace the reservation of an ended sample by the tokens that it used. A failed sample used none."""
    if not ended.cancelled() and ended.exception() is None:
        response = ended.result()
        cached = min(response.prompt_cache_hit_tokens, plan.prompt)
        sampled = sum(sequence.length for sequence in response.sequences)
        reservation.settle(
            TokensUsed(model=plan.model, prompt=plan.prompt - cached, cached=cached, sampled=sampled)
        )
    reservation.release()


def _resolve(future: Future[SampleResponse], outcome: SampleResponse | Exception) -> None:
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def map(  # noqa: A001  # the name of `SamplingClient.map`
    sampling: SamplingClient,
    prompts: Iterable[Prompt],
    sampling_params: SamplingParams,
    num_samples: int = 1,
    *,
    workers: int = 2,
    max_in_flight: int | None = None,
    ray_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Generator[BatchItem, None, None]:
    """Sample continuations of many prompts in worker processes, and yield a `BatchItem` for each.

    It takes the arguments of `SamplingClient.map`, `save_to` included, and those of `SamplerPool`. It checks
    them, and starts the workers, when the first item is asked for. The workers end with the last item, or
    when the loop is left.

    Args:
        sampling: the client to copy.
        prompts: inputs of the model, rows of token ids, texts or chats; a list or a generator.
        sampling_params: length, temperature, stops and so on.
        num_samples: the number of continuations of each prompt.
        workers: the number of processes.
        max_in_flight: the most prompts under way at once over all workers; None for 256 in each.
        ray_options: options of the actors.
        options: further arguments of `SamplingClient.map`.
    """
    with SamplerPool(sampling, workers=workers, max_in_flight=max_in_flight, ray_options=ray_options) as pool:
        yield from pool.map(prompts, sampling_params, num_samples, **options)


_pools: Final[weakref.WeakSet[SamplerPool]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the pools of this process before Ray ends, so that they do not delay the end of the process."""
    for pool in list(_pools):
        if pool._process == os.getpid():  # a forked child leaves the workers of its parent alone
            pool.close()
