"""The way of a sample: queued, admitted, submitted, and handed to a fetch that brings its result home.

Admission is first come first served: the rate limiter, the bytes being sent, and how many samples the server
takes at once. Whoever admits is one worker at a time, and only while something waits; a closed limiter holds
that one worker and nobody's call. `put` never waits and takes the lane's lock for an append only.

A sample keeps its number through every retry of its submit, so the server can tell a repetition; when the
server has forgotten the promise it gets a new one and is submitted anew, a bounded number of times.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from attrs import frozen

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync._secret import HeaderMap
from tinker_sync.errors import DeadlineError, TinkerError, UnsupportedByServerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.calls import read_reply
from tinker_sync.runtime.fetcher import Fetcher, Promise
from tinker_sync.runtime.rate_limiter import Gate, Permit
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.sampling import SampleRequest, SampleResponse
from tinker_sync.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_sync.runtime.byte_budget import ByteBudget
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.tickets import Ticket
    from tinker_sync.runtime.workers import Workers

PATH: Final = "/api/v1/asample"
REQUEST_TYPE: Final = "Sample"
MAX_ATTEMPTS: Final = 10
"""How often one submit is tried, and how often a sample is submitted anew after the server forgot it."""

# After a refusal a large prompt weighs this much more, so that few of them go at once.
_WEIGHT_AFTER_REFUSAL: Final = 20
_HEADERS: Final = HeaderMap({"X-Tinker-Sampling-Backpressure": "1"})

_log = logging.getLogger(__name__)


@frozen
class SampleOrder:
    """What one sample asks for, beside its request.

    Args:
        request: complete but for its number.
        next_number: draws a number in the sampling session.
        estimate_bytes: the weight of the prompt.
        deadline_at: the moment of the clock at which to give up.
        decode: makes the response of a reply; runs on a worker.
        encode: makes the body of the request, which lacks only its number; runs on a worker.
        fetch: starts the retrieval; None: the lane's fetcher asks for this promise alone.
        abandoned: told the request id of a sample whose user cancelled it.
    """

    request: SampleRequest
    next_number: Callable[[], int]
    estimate_bytes: int
    deadline_at: float
    decode: Callable[[Reply, Any], SampleResponse]
    encode: Callable[[SampleRequest], bytes] = wire_json.encode
    max_attempts: int = MAX_ATTEMPTS
    fetch: Callable[..., Abandonable] | None = None
    abandoned: Callable[[str], object] | None = None


class Abandonable(Protocol):
    """A retrieval under way."""

    def abandon(self) -> None:
        """Nobody waits any more."""


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
        judge: Judge,
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
        self._queue: deque[_Sample] = deque()  # guarded by _lock
        self._admitting = False  # guarded by _lock
        self._failure: Exception | None = None  # guarded by _lock; final
        self._keys = _unique_keys()
        _fork.renew_in_child(self)

    def put(self, order: SampleOrder, future: APIFuture[SampleResponse]) -> None:
        """Queue a sample; `future` is resolved or failed in time."""
        sample = _Sample(self, order, future)
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

    def _enqueue(self, sample: _Sample, *, first: bool) -> None:
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

    def _next(self) -> _Sample | None:
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


@frozen
class Retry:
    """Submit again after a pause."""

    delay_s: float


@frozen
class Throttled:
    """The server asks for less; submit again when the limiter lets us, which closes for so long."""

    delay_s: float


@frozen
class Refused:
    """There is no point in trying again."""

    error: Exception


Judge = Callable[[Reply | SendFailed, Call, int, int], "Retry | Throttled | Refused"]
"""What to do about an outcome that is no promise: (outcome, call, estimate of the prompt, most attempts)."""


class _Sample:
    """One sample on its way. Its steps follow each other; only `on_future_done` may come from anywhere."""

    # There may be tens of thousands.
    __slots__ = (
        "_attempt",
        "_began_at",
        "_body",
        "_call",
        "_fetch",
        "_future",
        "_held",
        "_key",
        "_lane",
        "_last_words",
        "_number",
        "_order",
        "_resubmits",
        "_sequence_ids",
        "_ticket",
    )

    def __init__(self, lane: SampleLane, order: SampleOrder, future: APIFuture[SampleResponse]) -> None:
        self._lane = lane
        self._order = order
        self._future = future
        self._began_at = lane.clock.now()
        self._number: int | None = None
        self._body = b""
        self._key = ""
        self._call: Call | None = None
        self._attempt = 0
        self._resubmits = 0
        self._sequence_ids: Sequence[str] | None = None
        self._last_words = ""
        # What it holds, by kind. A cancel may come from any thread while a worker is at it: whoever pops an
        # entry, which is one step, gives it back.
        self._held: dict[str, Any] = {}
        self._ticket: Ticket | None = None
        self._fetch: Abandonable | None = None

    @property
    def over(self) -> bool:
        return self._future.done()

    # -------------------------------------------------------------------------------------- admission

    def admit(self) -> bool:
        """Wait for room and take the number; whether it is to be submitted. Runs on the one worker that
        admits.
        """
        try:
            admitted = self._take_place() and self._take_bytes() and self._take_permit()
            if self._is_called_off():
                return False
            if not admitted:
                self.fail(self._deadline_error())
            elif self._number is None:
                self._number = self._order.next_number()
        except Exception as error:  # noqa: BLE001  # it is this sample's; the next may fare better
            self.fail(error)
            return False
        return admitted

    def submit(self) -> None:
        """Send it. Runs on a worker."""
        try:
            if not self._is_called_off():
                self._submit()
        except Exception as error:  # noqa: BLE001  # whatever it was, somebody waits for the sample
            self.fail(error)

    def _is_called_off(self) -> bool:
        """Whether it is over already; then it gives back what it holds."""
        over = self.over
        if over:
            self._give_back_permit(success=False)
            self._give_back_sending()
            self._give_back_place()
        return over

    def _take_place(self) -> bool:
        if "place" in self._held:
            return True
        if not self._lane.places.acquire(1, self._left_s()):
            return False
        self._held["place"] = True
        return True

    def _take_bytes(self) -> bool:
        weight = self._order.estimate_bytes
        if self._lane.gate.limiter.recently_closed():
            weight *= _WEIGHT_AFTER_REFUSAL
        if not self._lane.sending_bytes.acquire(weight, self._left_s()):
            return False
        self._held["bytes"] = weight
        return True

    def _take_permit(self) -> bool:
        permit = self._lane.gate.acquire(self._left_s())
        if permit is None:
            return False
        self._held["permit"] = permit
        return True

    def _left_s(self) -> float | None:
        left_s = self._order.deadline_at - self._lane.clock.now()
        return max(left_s, 0.0) if left_s < threading.TIMEOUT_MAX else None

    def _submit(self) -> None:
        assert self._number is not None  # noqa: S101  # drawn when it was admitted
        if not self._body:
            self._body = wire_json.with_number(self._order.encode(self._order.request), self._number)
            self._key = self._lane.next_key()
        self._attempt += 1
        self._future.mark_sending()
        left_s = self._left_s()
        self._call = call = Call(
            method="POST",
            path=PATH,
            body=self._body,
            headers=_HEADERS,
            idempotency_key=self._key,
            attempt=self._attempt,
            deadline_s=left_s,
            max_retries=0,
        )
        self._ticket = self._lane.poller.start(call, self._on_outcome)

    # -------------------------------------------------------------------------------------- the answer

    def _on_outcome(self, outcome: Reply | SendFailed) -> None:
        call = self._call
        if call is None or (isinstance(outcome, Reply) and outcome.ok):
            self._on_promise(cast("Reply", outcome))
            return
        self._last_words = (
            str(outcome) if isinstance(outcome, SendFailed) else f"status {outcome.status} on submit"
        )
        order = self._order
        verdict = self._lane.judge(outcome, call, order.estimate_bytes, order.max_attempts)
        if isinstance(verdict, Throttled):
            # Not an attempt: the server did not refuse this sample, it asked everybody to slow down.
            self._attempt -= 1
            permit: Permit | None = self._held.pop("permit", None)
            if permit is not None:
                self._lane.gate.throttled(permit, verdict.delay_s)
            self._give_back_sending()
            self._future.mark_paused(self._last_words)
            self._lane._enqueue(self, first=True)
            return
        self._give_back_permit(success=False)
        self._give_back_sending()
        if isinstance(verdict, Refused):
            self.fail(verdict.error)
        elif self._left_s() is not None and verdict.delay_s >= (self._left_s() or 0.0):
            self.fail(self._deadline_error())
        else:
            self._ticket = self._lane.poller.after(verdict.delay_s, self._again)

    def _again(self) -> None:
        self._lane._enqueue(self, first=True)

    def _on_promise(self, reply: Reply) -> None:
        self._give_back_permit(success=True)
        self._give_back_sending()
        try:
            promise: UntypedAPIFuture = read_reply("asample", reply, self._lane.fetcher.secrets)
        except TinkerError as error:
            self.fail(error)
            return
        if self.over:
            if self._order.abandoned is not None:
                self._order.abandoned(promise.request_id)
            return
        self._future.mark_accepted(promise.request_id)
        # It may take hours from here; only a submission under a new number would need these again.
        self._body, self._call, self._ticket = b"", None, None
        self._sequence_ids = promise.sample_sequence_ids
        fetch = self._order.fetch or self._lane.fetcher.fetch
        self._fetch = fetch(
            Promise(
                promise.request_id,
                REQUEST_TYPE,
                wants_proto=True,
                roundtrip_s=self._lane.clock.now() - self._began_at,
            ),
            self._future,
            self._decode,
            deadline_at=self._order.deadline_at,
            on_gone=self._on_gone,
        )

    def _decode(self, reply: Reply, tree: Any) -> SampleResponse:
        return named(self._order.decode(reply, tree), self._sequence_ids)

    def _on_gone(self, error: Exception) -> None:
        """The server has forgotten the promise: once more, as a new sample."""
        self._resubmits += 1
        if self._resubmits >= self._order.max_attempts:
            self.fail(error)
            return
        _log.info("the server has forgotten a sample; it is submitted again (%d)", self._resubmits)
        self._last_words = "status 410: the server has forgotten the request"
        self._number = None
        self._attempt = 0
        pause_s = min(0.5 * 2.0 ** (self._resubmits - 1), 10.0)
        self._ticket = self._lane.poller.after(pause_s, self._again)

    # -------------------------------------------------------------------------------------- ends

    def fail(self, error: Exception) -> None:
        """End without a result."""
        self._give_back_permit(success=False)
        self._give_back_sending()
        self._future.fail(error)

    def on_future_done(self, future: APIFuture[SampleResponse]) -> None:
        """It has its result or failure, or its user has cancelled it."""
        if future.cancelled():
            ticket, fetch = self._ticket, self._fetch
            if fetch is not None:
                fetch.abandon()
            elif ticket is not None and ticket.cancel():
                self._give_back_permit(success=False)
                self._give_back_sending()
            if self._order.abandoned is not None and future.request_id is not None:
                self._order.abandoned(future.request_id)
        # They know this sample: together they would wait for the garbage collector, client and all.
        self._fetch = self._ticket = None
        self._give_back_place()

    def _give_back_permit(self, *, success: bool) -> None:
        permit: Permit | None = self._held.pop("permit", None)
        if permit is not None:
            (self._lane.gate.succeeded if success else self._lane.gate.failed)(permit)

    def _give_back_sending(self) -> None:
        weight = self._held.pop("bytes", None)
        if weight is not None:
            self._lane.sending_bytes.release(weight)

    def _give_back_place(self) -> None:
        if self._held.pop("place", None):
            self._lane.places.release(1)

    def _deadline_error(self) -> Exception:
        return DeadlineError(
            "the sample was not accepted within the deadline",
            method="POST",
            path=PATH,
            attempts=self._attempt,
            waited_s=self._lane.clock.now() - self._began_at,
            last_words=self._last_words or "it waited for its turn",
        )


def named(response: SampleResponse, sequence_ids: Sequence[str] | None) -> SampleResponse:
    """The response with the ids its promise gave to its sequences, where the server gives any.

    >>> from tinker_sync.types.sampling import SampledSequence
    >>> named(SampleResponse([SampledSequence("stop")]), ["seq-1"]).sequences[0].sequence_id
    'seq-1'
    """
    if sequence_ids is None or len(sequence_ids) != len(response.sequences):
        return response
    pairs = zip(response.sequences, sequence_ids, strict=True)
    return response._with(sequences=[sequence._with(sequence_id=name) for sequence, name in pairs])


def check_response(request: SampleRequest, response: SampleResponse) -> SampleResponse:
    """The response with a place for each prompt token; refused where the server skipped what was asked.

    Raises:
        UnsupportedByServerError: something asked for is missing.
    """
    if request.prompt_alt_tokens_k > 0 and response.prompt_alt_tokens is None:
        raise UnsupportedByServerError(
            "the server ignored prompt_alt_tokens_k", feature="prompt_alt_tokens_k"
        )
    last_n = request.prompt_logprobs_last_n
    scored = response.prompt_logprobs_np
    if last_n is not None and scored is not None and not _only_last(scored, last_n):
        raise UnsupportedByServerError(
            "the server ignored prompt_logprobs_last_n", feature="prompt_logprobs_last_n"
        )
    if scored is not None and len(scored) + 1 == request.prompt.known_length():
        # Some servers leave out the first token, which has no score.
        return response.model_copy(update={"prompt_logprobs_np": np.concatenate([_NO_SCORE, scored])})
    return response


_NO_SCORE: Final = np.array([np.nan], dtype=np.float32)


def _only_last(scored: Any, last_n: int) -> bool:
    early = scored[: max(len(scored) - last_n, 0)]
    return bool((early != early).all())  # NaN, which equals nothing, stands where nothing was scored
