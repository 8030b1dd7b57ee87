"""`PoolWorker`: a worker process of a `SamplerPool`, an actor of Ray with a copy of the sampling client."""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import ray
from attrs import frozen

from tinker_sync.ray.sharing import share_limits

if TYPE_CHECKING:
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.types import ModelInput, SampleResponse, SamplingParams

# A call of Ray takes as much CPU as some samples. So a worker replies when half of its samples have ended, or
# this long after the first one.
_GATHER_S: Final = 0.25


@frozen
class SampleCall:
    """The arguments of one call of `sample`, as a worker gets them."""

    prompt: ModelInput
    num_samples: int
    params: SamplingParams
    options: Mapping[str, Any]


class PoolWorker:
    """One worker process of a pool, with a copy of the sampling client. Runs as an actor of Ray."""

    def __init__(self, sampling: SamplingClient) -> None:
        self._sampling = sampling
        self._shared = share_limits(sampling)
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._under_way: set[int] = set()
        self._enough = 1  # written by `exchange` only
        self._plenty = threading.Event()

    def place(self) -> tuple[str, int]:
        """Return the id of this machine, and the id of this process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def exchange(self, packed: bytes, hold_s: float) -> bytes:
        """Start samples, and wait for outcomes of these or of earlier samples.

        Args:
            packed: a pickled list of pairs: the driver's number of a sample, and its call.
            hold_s: the longest wait for the first outcome; the wait for more takes up to 0.25 s longer.

        Returns:
            A pickled triple: a list of pairs of a number and an outcome, which may be empty; the numbers of
            the samples still under way; and the usage report of this process.
        """
        for number, call in pickle.loads(packed):  # noqa: S301  # from the driver
            self._under_way.add(number)
            self._start(number, call)
        outcomes = self._gather(hold_s)
        self._under_way.difference_update(number for number, _ in outcomes)
        return pack((outcomes, self._under_way, self._shared.own_usage()))

    def _start(self, number: int, call: SampleCall) -> None:
        try:
            future = self._sampling.sample(call.prompt, call.num_samples, call.params, **call.options)
        except Exception as error:  # noqa: BLE001  # the error of one prompt
            self._done.put((number, error))
        else:
            future.add_done_callback(partial(self._hand_over, number))

    def _hand_over(self, number: int, ended: Future[SampleResponse]) -> None:
        try:
            self._done.put((number, ended.result()))
        except Exception as error:  # noqa: BLE001  # the error of one prompt
            self._done.put((number, error))
        if self._done.qsize() >= self._enough:
            self._plenty.set()

    def _gather(self, hold_s: float) -> list[tuple[int, Any]]:
        """Return the outcomes that have arrived, with their numbers.

        Wait up to `hold_s` for one outcome, then until half of the samples have ended or 0.25 s have passed
        (`_GATHER_S`). Without an outcome, return an empty list.
        """
        self._plenty.clear()
        self._enough = len(self._under_way) // 2
        try:
            outcomes = [self._done.get(timeout=hold_s)]
        except queue.Empty:
            return []
        if self._done.qsize() < self._enough:
            self._plenty.wait(_GATHER_S)
        with suppress(queue.Empty):
            while True:
                outcomes.append(self._done.get_nowait())
        return outcomes


def pack(values: Any) -> bytes:
    """Pickle values. Use Ray's own pickler, which takes twice the time, only where `pickle` fails."""
    try:
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001  # any class may refuse
        return bytes(ray.cloudpickle.dumps(values))
