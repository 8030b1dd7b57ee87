"""`SampleScheduler`, which admits samples in order, and `SubmitPolicy`, which decides about failed submits.

A `ServiceClient` and the clients that it makes share one scheduler.
Samples are admitted first come, first served. Three limits apply: the samples under way, the bytes being
sent, and the rate limiter. The poller's thread admits the samples that need not wait. At the first one that
must wait, one worker takes over, so a closed limiter holds that one worker and no caller. `put` never waits
and takes no lock, so a signal handler may call it on top of any other step of its thread.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.numbers import numbers, unique_keys
from tinker_sync._base.policy import Meaning, Stage, delay_s, rule_for
from tinker_sync.errors import APIError, TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.billing import BillingPause
from tinker_sync.runtime.poller import QUICK_BYTES
from tinker_sync.runtime.polls import Polls
from tinker_sync.runtime.rate_limiter import Gate
from tinker_sync.runtime.workers import no_thread
from tinker_sync.transport import verdict
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.verdict import Judge

if TYPE_CHECKING:
    from tinker_sync.runtime.byte_budget import ByteBudget
    from tinker_sync.runtime.rate_limiter import Permit
    from tinker_sync.runtime.sample import SampleJob
    from tinker_sync.runtime.workers import Workers


# For a while after a refusal the weight of a prompt is multiplied by this, so that few large ones go at once.
_WEIGHT_AFTER_REFUSAL: Final = 20
# The refusal of a larger request costs so much bandwidth that the next try waits for longer.
_SMALL_BYTES: Final = 128 * 1024
_LARGE_PAUSE_S: Final = 5.0
_BILLING_PAUSE_S: Final = 1.0
# The most samples admitted at once on the poller's thread, which reads no answers meanwhile.
_ADMITTED_AT_ONCE: Final = 16


class SampleScheduler:
    """A scheduler that admits and submits the samples of the clients of one service in order. Thread-safe.

    Args:
        polls: polls for results; its poller sends the submits too.
        workers: run the admissions that must wait, and the submits that may take long.
        gate: the gate to the shared rate limiter.
        sending_bytes: bounds the bytes of the prompts being sent.
        places: bounds the samples under way.
        policy: decides about a submit that the server did not accept.
        has_idle_connection: returns True if a submit can use an open connection.
        clock: measures time.
    """

    def __init__(
        self,
        polls: Polls,
        workers: Workers,
        gate: Gate,
        sending_bytes: ByteBudget,
        places: ByteBudget,
        policy: SubmitPolicy,
        *,
        has_idle_connection: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.polls = polls
        self.poller = polls.flows.poller
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
        self._added: deque[SampleJob] = deque()  # any thread appends without a lock
        self._queue: list[tuple[int, SampleJob]] = []  # guarded by _lock; a heap, by the order of the calls
        self._admitting = False  # written under _lock
        self._begun = 0  # written under _lock; how often a thread has begun to admit, or found that one does
        self._asked = -1  # the value of _begun when a thread was last asked to begin
        self._failure: Exception | None = None  # guarded by _lock; final
        self._next_turn = numbers().__next__
        self.next_key = unique_keys().__next__
        """Returns a key that no other submit has, so that the server recognises a repetition."""

    def put(self, job: SampleJob) -> None:
        """Queue a sample by its turn, which it keeps when it is sent again. After `close`, fail it.

        This first adds the sample, and then looks whether samples are being admitted. The thread that admits
        first writes that it stops, and then looks for samples. So one of them sees the other. One request to
        begin is enough for many samples; it is noted only after it was made, because a signal handler may
        come in between.
        """
        if self._failure is not None:
            job.fail(self._failure)
            return
        self._added.append(job)
        begun = self._begun
        if not self._admitting and self._asked != begun:
            try:
                if not self.poller.run_soon(self._begin_at_once):
                    self._workers.run(self._begin_patiently)
            except RuntimeError as error:
                with suppress(ValueError):  # another thread has taken it in
                    self._added.remove(job)
                job.fail(no_thread(error))
            else:
                self._asked = begun

    def close(self, failure: Exception) -> None:
        """Fail the queued samples and all later ones. The samples under way fail when the poller closes."""
        with self._lock:
            self._failure = failure
            self._take_in_locked()
            doomed, self._queue = sorted(self._queue), []
        self.gate.close(failure)
        self.sending_bytes.close(failure)
        self.places.close(failure)
        for _, job in doomed:
            job.fail(failure)

    def renew_after_fork(self) -> None:
        """Drop the parent's samples in a forked child."""
        failure = self._failure
        self._begin()
        self._failure = failure

    def __len__(self) -> int:
        """Return the number of samples that wait for admission."""
        with self._lock:
            self._take_in_locked()
            return len(self._queue)

    # ------------------------------------------------------------------- on workers and the poller's thread

    def _begin_at_once(self) -> None:
        if self._begin_admitting():
            self._admit_at_once()

    def _begin_patiently(self) -> None:
        if self._begin_admitting():
            self._admit()

    def _begin_admitting(self) -> bool:
        with self._lock:
            self._begun += 1
            begin, self._admitting = not self._admitting, True
        return begin

    def _start_admitting(self) -> None:
        if not self.poller.run_soon(self._admit_at_once):
            self._admit_patiently()

    def _admit_patiently(self) -> None:
        try:
            self._workers.run(self._admit)
        except RuntimeError as error:
            with self._lock:
                refused, self._queue = sorted(self._queue), []
                self._admitting = False
            for _, job in refused:
                job.fail(no_thread(error))

    def _admit_at_once(self) -> None:
        """Admit a few samples on the poller's thread, then the next few after the answers that have arrived.

        A worker takes over at the first sample that must wait.
        """
        for _ in range(_ADMITTED_AT_ONCE):
            job = self._next()
            if job is None:
                return
            admitted = job.admit(may_wait=False)
            if admitted is None:
                with self._lock:
                    self._enter_locked(job)
                self._admit_patiently()
                return
            if admitted and self._is_quick(job):
                job.submit()  # here, because this runs within a step of the poller
            elif admitted:
                self._submit_elsewhere(job)
        self._start_admitting()  # after the answers that have arrived meanwhile

    def _admit(self) -> None:
        """Admit samples until none waits. One worker at a time runs this method.

        The worker itself submits a sample that it can send without waiting, and the last sample, after it has
        stopped admitting. Other workers submit the rest, because opening a connection takes a while.
        """
        while (job := self._next()) is not None:
            if not job.admit():
                continue
            if self._is_overtaken(job):
                job.queue_again()
                continue
            if self._leave():
                self.poller.run_step(job.submit)
                return
            if self._is_quick(job):
                self.poller.run_step(job.submit)
            else:
                self._submit_elsewhere(job)

    def _is_quick(self, job: SampleJob) -> bool:
        """Return True if the sample can probably be sent without waiting."""
        return job.estimate_bytes <= QUICK_BYTES and self._has_idle_connection()

    def _submit_elsewhere(self, job: SampleJob) -> None:
        try:
            self._workers.run(partial(self.poller.run_step, job.submit))
        except RuntimeError as error:
            job.fail(no_thread(error))

    def _leave(self) -> bool:
        """Stop admitting and return True if no sample waits."""
        with self._lock:
            self._admitting = False
            self._take_in_locked()
            self._admitting = bool(self._queue)
            return not self._admitting

    def _take_in_locked(self) -> None:
        while self._added:
            self._enter_locked(self._added.popleft())

    def _enter_locked(self, job: SampleJob) -> None:
        if job.turn is None:
            job.turn = self._next_turn()
        heapq.heappush(self._queue, (job.turn, job))

    def _is_overtaken(self, job: SampleJob) -> bool:
        """Return True if an earlier sample, which is sent again, came back while this one was admitted."""
        assert job.turn is not None  # noqa: S101  # it was queued
        with self._lock:
            self._take_in_locked()
            return bool(self._queue) and self._queue[0][0] < job.turn

    def _next(self) -> SampleJob | None:
        job = self._pop()
        while job is not None and job.is_set_aside():
            job = self._pop()
        return job

    def _pop(self) -> SampleJob | None:
        with self._lock:
            while True:
                self._take_in_locked()
                while self._queue:
                    job = heapq.heappop(self._queue)[1]
                    if not job.over:
                        return job
                self._admitting = False
                if not self._added:
                    return None
                self._admitting = True


class Holdings:
    """The places that one sample holds under the limits of its scheduler.

    Any thread may cancel the sample while another thread takes a step of it, and both may try to give a place
    back. To pop an entry is one operation of the interpreter; only the thread that pops it gives it back.
    """

    __slots__ = ("_held", "scheduler")

    scheduler: SampleScheduler
    """Set before the first place is taken."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}  # by kind: "place", "bytes", "permit"

    def take(self, estimate_bytes: int, left_s: Callable[[], float | None]) -> bool:
        """Take the places that the sample does not hold yet. Return False if one of them is not free in time.

        The sample keeps the places that were free. After the close of the client, the limits raise an error.

        Args:
            estimate_bytes: the size of the request.
            left_s: returns the longest time that a wait may take now; None: without a limit.
        """
        held, scheduler = self._held, self.scheduler
        if "place" not in held:
            if not (scheduler.places.try_acquire(1) or scheduler.places.acquire(1, left_s())):
                return False
            held["place"] = 1
        if "bytes" not in held:
            budget = scheduler.sending_bytes
            if scheduler.gate.limiter.recently_closed():
                estimate_bytes *= _WEIGHT_AFTER_REFUSAL
            weight = max(estimate_bytes, budget.limit_bytes // scheduler.gate.limiter.sent_at_once)
            if not (budget.try_acquire(weight) or budget.acquire(weight, left_s())):
                return False
            held["bytes"] = weight
        permit = scheduler.gate.try_acquire() or scheduler.gate.acquire(left_s())
        if permit is None:
            return False
        held["permit"] = permit
        return True

    def may_pass(self) -> bool:
        """Return True if the rate limiter still lets the sample pass. Ask this right before sending."""
        permit: Permit | None = self._held.get("permit")
        return permit is None or self.scheduler.gate.lets_pass(permit)

    def end_sending(self, *, accepted: bool = False, refused: Throttled | None = None) -> None:
        """Give back the permit and the bytes of the send phase.

        Args:
            accepted: True if the server has accepted the sample.
            refused: the decision, if the server has asked for fewer requests.
        """
        permit: Permit | None = self._held.pop("permit", None)
        if permit is not None:
            gate = self.scheduler.gate
            if refused is not None:
                gate.throttled(permit, refused.delay_s)
            elif accepted:
                gate.succeeded(permit)
        weight = self._held.pop("bytes", None)
        if weight is not None:
            self.scheduler.sending_bytes.release(weight)

    def give_back_place(self) -> None:
        """Give back the place among the samples under way."""
        if self._held.pop("place", None):
            self.scheduler.places.release(1)

    def give_back(self) -> None:
        """Give back the place, the permit and the bytes of a sample that the server has not accepted."""
        self.end_sending()
        self.give_back_place()


# -------------------------------------------------------------------------------------------- the policy


class Resubmit(NamedTuple):
    """The decision to submit again after a pause."""

    delay_s: float


class Throttled(NamedTuple):
    """The decision to close the limiter for a time, and then to submit again."""

    delay_s: float | None = None
    """The time that the server has named; None to let the limiter decide."""


class Refused(NamedTuple):
    """The decision to fail the sample: another try would end the same way, or no try is left."""

    error: Exception


class SubmitPolicy:
    """A policy for submits that the server did not accept. For any thread.

    A 429, and a 402 that is to be waited out, concern all samples, so the limiter closes. Other failures are
    tried again a bounded number of times, if `tinker_sync._base.policy` counts them as temporary.
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
        """Return the decision about an outcome that is not a promise.

        Args:
            outcome: the answer, or the failure to get one.
            call: the request; its `attempt` counts the tries so far.
            estimate_bytes: the size of the prompt.
            max_attempts: the most tries.
        """
        meaning = None
        if isinstance(outcome, SendFailed):
            if isinstance(outcome.__cause__, TinkerError):
                return Refused(outcome.__cause__)  # such as a missing key; nothing was sent
            found: verdict.Verdict | None = self._judge.failure(outcome, call)
        else:
            meaning = rule_for(outcome.status, Stage.SUBMIT).meaning
            if meaning is Meaning.BLOCKED and self._billing.may_pause():
                return Throttled(_BILLING_PAUSE_S)
            found = self._judge.reply(outcome, call, Stage.SUBMIT)
        if found is None or isinstance(found, verdict.Fatal):
            return Refused(_error_of(found, call))
        if meaning is Meaning.THROTTLED:
            if found.after_s is None and estimate_bytes > _SMALL_BYTES:
                return Throttled(_LARGE_PAUSE_S)
            return Throttled(found.after_s)
        if call.attempt >= (max_attempts if found.limit is None else min(max_attempts, found.limit + 1)):
            return Refused(found.error)
        return Resubmit(delay_s(call.attempt, hint_s=found.after_s, draw=self._draw()))


def _error_of(found: verdict.Fatal | None, call: Call) -> Exception:
    if found is not None:
        return found.error
    return APIError("the server sent us elsewhere", method=call.method, path=call.path, attempts=call.attempt)
