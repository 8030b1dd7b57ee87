"""The order of samples: queued, and admitted one after the other.

Admission is first come first served: the rate limiter, the bytes being sent, and how many samples the server
takes at once. Whoever admits is one worker at a time, and only while something waits; a closed limiter holds
that one worker and nobody's call. `put` never waits and takes the lane's lock for an append only.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.fetcher import Fetcher
from tinker_sync.runtime.rate_limiter import Gate
from tinker_sync.runtime.sample import Sample, SampleOrder
from tinker_sync.types.sampling import SampleResponse

if TYPE_CHECKING:
    from tinker_sync.runtime.byte_budget import ByteBudget
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.sample_verdict import Decide
    from tinker_sync.runtime.workers import Workers


class SampleLane:
    """Admits the samples of one client, in order. Thread-safe.

    Args:
        fetcher: brings results home; its poller carries the submits too.
        workers: run the admission.
        gate: the way through the shared rate limiter.
        sending_bytes: bounds the prompts being sent.
        places: bounds the samples under way.
        judge: what to do about a submit that was not taken.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        workers: Workers,
        gate: Gate,
        sending_bytes: ByteBudget,
        places: ByteBudget,
        judge: Decide,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.fetcher = fetcher
        self.poller = fetcher.poller
        self.gate = gate
        self.sending_bytes = sending_bytes
        self.places = places
        self.judge = judge
        self.clock = clock
        self._workers = workers
        self._lock = threading.Lock()
        self._queue: deque[Sample] = deque()  # guarded by _lock
        self._admitting = False  # guarded by _lock
        self._failure: Exception | None = None  # guarded by _lock; final
        self._keys = _unique_keys()
        _fork.renew_in_child(self)

    def put(self, order: SampleOrder, future: APIFuture[SampleResponse]) -> None:
        """Queue a sample; `future` is resolved or failed in time."""
        sample = Sample(self, order, future)
        future.when_done(sample.on_future_done)
        self._enqueue(sample, first=False)

    def close(self, failure: Exception) -> None:
        """Fail what is queued; what is under way ends with the poller."""
        with self._lock:
            self._failure = failure
            doomed, self._queue = self._queue, deque()
        self.gate.close(failure)
        self.sending_bytes.close(failure)
        self.places.close(failure)
        for sample in doomed:
            sample.fail(failure)

    def renew_after_fork(self) -> None:
        """The parent's samples are its own."""
        self._lock = threading.Lock()
        self._queue = deque()
        self._admitting = False
        self._keys = _unique_keys()

    def next_key(self) -> str:
        """A key no other submit has; by it the server tells a repeated one."""
        return next(self._keys)

    def __len__(self) -> int:
        """How many wait for admission."""
        with self._lock:
            return len(self._queue)

    def _enqueue(self, sample: Sample, *, first: bool) -> None:
        start = False
        try:
            with self._lock:
                failure = self._failure
                if failure is None:
                    (self._queue.appendleft if first else self._queue.append)(sample)
                start = failure is None and not self._admitting
                self._admitting = self._admitting or start
            if start:
                self._start_admitting()
        except BaseException:
            # Ctrl-C: it is unknown whether anybody admits now. The next sample sees to that; two do no harm.
            if start:
                with self._lock:
                    self._admitting = False
            raise
        if failure is not None:
            sample.fail(failure)

    def _start_admitting(self) -> None:
        try:
            self._workers.run(self._admit)
        except RuntimeError as error:
            self.close(TinkerError(f"the client is closed: {error}"))

    def _admit(self) -> None:
        """Let samples through until none waits. Only one worker is ever in here.

        Submitting is for other workers, for that may take as long as a connection does; but a sample that
        nobody waits behind goes from here, once somebody else may come in.
        """
        while (sample := self._next()) is not None:
            if not sample.admit():
                continue
            if self._leave():
                self.poller.step_on_worker(sample.submit)
                return
            try:
                self._workers.run(partial(self.poller.step_on_worker, sample.submit))
            except RuntimeError as error:
                sample.fail(TinkerError(f"the client is closed: {error}"))

    def _leave(self) -> bool:
        """Stop admitting, if nobody waits."""
        with self._lock:
            self._admitting = bool(self._queue)
            return not self._admitting

    def _next(self) -> Sample | None:
        with self._lock:
            while self._queue:
                sample = self._queue.popleft()
                if not sample.over:
                    return sample
            self._admitting = False
            return None


def _unique_keys() -> Iterator[str]:
    """Any thread may draw the next: a step of `map` over a count is indivisible."""
    return map(f"{uuid.uuid4()}-{{}}".format, itertools.count())
