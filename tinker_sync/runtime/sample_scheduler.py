"""`SampleScheduler`: the order of the samples of one client, and what follows when one is not taken.

Samples are admitted first come first served: by how many the server takes at once, by the bytes being sent,
and by the rate limiter. One worker at a time admits, and only while samples wait, so a closed limiter holds
that one worker and no caller. `put` never waits and takes the scheduler's lock for an append only.
"""

from __future__ import annotations

import itertools
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import frozen

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync._policy import Meaning, Stage, delay_s, rule_for
from tinker_sync.errors import APIError, TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.billing import BillingPause
from tinker_sync.runtime.fetcher import Fetcher
from tinker_sync.runtime.rate_limiter import Gate, default_delay_s
from tinker_sync.transport import verdict
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.verdict import Judge

if TYPE_CHECKING:
    from tinker_sync.runtime.byte_budget import ByteBudget
    from tinker_sync.runtime.sample import SampleJob
    from tinker_sync.runtime.workers import Workers

# What a new connection takes at once, without waiting for the server to read.
_QUICK_BYTES: Final = 32 * 1024


class SampleScheduler:
    """Admits and submits the samples of one client, in order. Thread-safe.

    Args:
        fetcher: polls for results; its poller carries the submits too.
        workers: run the admission and the submits.
        gate: the way through the shared rate limiter.
        sending_bytes: bounds the prompts being sent.
        places: bounds the samples under way.
        policy: decides about a submit that was not taken.
        has_idle_connection: returns True if a submit need not open a connection.
        clock: measures time.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        workers: Workers,
        gate: Gate,
        sending_bytes: ByteBudget,
        places: ByteBudget,
        policy: SubmitPolicy,
        *,
        has_idle_connection: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.fetcher = fetcher
        self.poller = fetcher.poller
        self.gate = gate
        self.sending_bytes = sending_bytes
        self.places = places
        self.policy = policy
        self.clock = clock
        self._workers = workers
        self._has_idle_connection = has_idle_connection
        self._begin()
        _fork.renew_in_child(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[SampleJob] = deque()  # guarded by _lock
        self._admitting = False  # guarded by _lock
        self._failure: Exception | None = None  # guarded by _lock; final
        self._keys = _unique_keys()

    def put(self, job: SampleJob, *, first: bool = False) -> None:
        """Queue a sample, behind the others or before them."""
        start = False
        try:
            with self._lock:
                failure = self._failure
                if failure is None:
                    (self._queue.appendleft if first else self._queue.append)(job)
                    start = not self._admitting
                    self._admitting = True
            if start:
                self._start_admitting()
        except BaseException:
            # Ctrl-C: it is unknown whether a worker admits now. The next sample starts one; two do no harm.
            if start:
                with self._lock:
                    self._admitting = False
            raise
        if failure is not None:
            job.fail(failure)

    def close(self, failure: Exception) -> None:
        """Fail what is queued; what is under way ends with the poller."""
        with self._lock:
            self._failure = failure
            doomed, self._queue = self._queue, deque()
        self.gate.close(failure)
        self.sending_bytes.close(failure)
        self.places.close(failure)
        for job in doomed:
            job.fail(failure)

    def renew_after_fork(self) -> None:
        """Leave the parent's samples to the parent, in a forked child."""
        failure = self._failure
        self._begin()
        self._failure = failure

    def next_key(self) -> str:
        """Return a key that no other submit has; by it the server recognises a repetition."""
        return next(self._keys)

    def __len__(self) -> int:
        """The number of samples that wait for admission."""
        with self._lock:
            return len(self._queue)

    # -------------------------------------------------------------------------------------- on workers

    def _start_admitting(self) -> None:
        try:
            self._workers.run(self._admit)
        except RuntimeError as error:
            self.close(TinkerError(f"the client is closed: {error}"))

    def _admit(self) -> None:
        """Admit samples until none waits. One worker at a time is in here.

        It submits what it can send without waiting, and the last sample, once another worker may come in.
        The others are submitted by other workers, because opening a connection takes a while.
        """
        while (job := self._next()) is not None:
            if not job.admit():
                continue
            if self._leave():
                self.poller.step_on_worker(job.submit)
                return
            if job.estimate_bytes <= _QUICK_BYTES and self._has_idle_connection():
                self.poller.step_on_worker(job.submit)
                continue
            try:
                self._workers.run(partial(self.poller.step_on_worker, job.submit))
            except RuntimeError as error:
                job.fail(TinkerError(f"the client is closed: {error}"))

    def _leave(self) -> bool:
        """Stop admitting, if no sample waits."""
        with self._lock:
            self._admitting = bool(self._queue)
            return not self._admitting

    def _next(self) -> SampleJob | None:
        with self._lock:
            while self._queue:
                job = self._queue.popleft()
                if not job.over:
                    return job
            self._admitting = False
            return None


def _unique_keys() -> Iterator[str]:
    """Any thread may draw the next: see "Threads" in the package's docstring."""
    return map(f"{uuid.uuid4()}-{{}}".format, itertools.count())


# -------------------------------------------------------------------------------------------- the policy


@frozen
class Resubmit:
    """Submit again after a pause."""

    delay_s: float


@frozen
class Throttled:
    """The server asks for less: the limiter closes for so long, and then the sample is submitted again."""

    delay_s: float


@frozen
class Refused:
    """Another try would end the same way."""

    error: Exception


class SubmitPolicy:
    """Decides about submits that were not taken. Immutable; any thread may ask.

    A 429, and a 402 that is to be waited out, concern every sample: the limiter closes. What else the common
    table calls passing is tried again, a bounded number of times.
    """

    def __init__(
        self, judge: Judge, billing: BillingPause, draw: Callable[[], float] = random.random
    ) -> None:
        self._judge = judge
        self._billing = billing
        self._draw = draw

    def decide(
        self, outcome: Reply | SendFailed, call: Call, estimate_bytes: int, max_attempts: int
    ) -> Resubmit | Throttled | Refused:
        """Return what to do about an outcome that is no promise.

        Args:
            outcome: the answer, or the lack of one.
            call: the request; its `attempt` counts the tries so far.
            estimate_bytes: the size of the prompt.
            max_attempts: the most tries.
        """
        meaning = None
        if isinstance(outcome, SendFailed):
            if isinstance(outcome.__cause__, TinkerError):
                return Refused(outcome.__cause__)  # such as a missing key: it was never sent
            found: verdict.Verdict | None = self._judge.failure(outcome, call)
        else:
            meaning = rule_for(outcome.status, Stage.SUBMIT).meaning
            if meaning is Meaning.BLOCKED and self._billing.may_pause():
                return Throttled(default_delay_s(estimate_bytes))
            found = self._judge.reply(outcome, call, Stage.SUBMIT)
        if found is None or isinstance(found, verdict.Fatal):
            return Refused(_error_of(found, call))
        if meaning is Meaning.THROTTLED:
            return Throttled(default_delay_s(estimate_bytes) if found.after_s is None else found.after_s)
        if call.attempt >= (max_attempts if found.limit is None else min(max_attempts, found.limit + 1)):
            return Refused(found.error)
        return Resubmit(delay_s(call.attempt, hint_s=found.after_s, draw=self._draw()))


def _error_of(found: verdict.Fatal | None, call: Call) -> Exception:
    if found is not None:
        return found.error
    return APIError("the server sent us elsewhere", method=call.method, path=call.path, attempts=call.attempt)
