"""`SampleJob`: one sample, from the call of the user to its result.

The steps of a job, in order, each a method:

    SampleJob()    check the request, and refuse one that no server accepts
    put            prepare and queue it once the sampler exists: on the caller's thread if it exists already
    admit          take places under the limits and a number, on the one thread that admits
    submit         send the request: on the poller's thread if that takes no time, else on a worker
    _on_promise    poll for the result, because the server has accepted the sample
    _decode        read the result, count its tokens, and compare it with the request
    _on_done       give back the place; after a cancel, also stop the request that is under way

A job keeps its number through every retry of its submit, so the server recognises a repetition. When the
server has forgotten the promise, the job gets a new number and is submitted again, a bounded number of times.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.clock import in_seconds
from tinker_sync._base.events import TokensUsed
from tinker_sync._base.policy import UNREADABLE_ANSWERS, delay_s
from tinker_sync._base.secret import HeaderMap
from tinker_sync.errors import APIResponseValidationError, DeadlineError
from tinker_sync.runtime.byte_budget import estimate_prompt_bytes, most_sample_bytes
from tinker_sync.runtime.calls import foreign_promise, read_promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import carried, current, find_call_site, named
from tinker_sync.runtime.polls import Promise
from tinker_sync.runtime.sample_scheduler import Holdings, Refused, Throttled
from tinker_sync.runtime.spending import CostEstimate, Limiter, length_of
from tinker_sync.transport.call import PROMISE_BYTES, Call, Reply, SendFailed
from tinker_sync.types.sampling import SampleRequest, SampleResponse
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import (
    check_response,
    name_sequences,
    normalise_sample_request,
    refuse_unsupported,
)
from tinker_sync.wire.proto.samples import decode_sample_response

if TYPE_CHECKING:
    from tinker_sync.runtime.sample_line import SampleLine
    from tinker_sync.runtime.sample_scheduler import SampleScheduler
    from tinker_sync.runtime.server import Machinery
    from tinker_sync.runtime.spending import Reservation
    from tinker_sync.runtime.tickets import Ticket

PATH: Final = "/api/v1/asample"
REQUEST_TYPE: Final = "Sample"
MAX_ATTEMPTS: Final = 10
"""By default, the most tries of one submit, and the most submissions of a sample that the server forgets."""

_HEADERS: Final = HeaderMap({"X-Tinker-Sampling-Backpressure": "1"})

_log = logging.getLogger(__name__)


def _no_time() -> float:
    return 0.0


class SampleJob:
    """The work for one sample, from the user's call to its result.

    The steps run one after the other, except `_on_done`, which any thread may call at any time.

    Args:
        line: the parts that the samples of one client share.
        request: the sample; `put` adds the id of the sampler.
        deadline_at: the time of the clock at which to give up.
        may_forbid_retries: obey a server whose settings forbid to submit a forgotten sample again.

    Raises:
        InvalidInputError: the request cannot be sent.
    """

    # Slots, because there may be tens of thousands of jobs.
    __slots__ = (
        "_attempt",
        "_began_at",
        "_body",
        "_call",
        "_fetch",
        "_future",
        "_held",
        "_key",
        "_last_words",
        "_line",
        "_machinery",
        "_max_submissions",
        "_may_forbid_retries",
        "_number",
        "_request",
        "_reservation",
        "_resubmits",
        "_scheduler",
        "_sdk_method",
        "_sequence_ids",
        "_ticket",
        "_wire_request",
        "deadline_at",
        "estimate_bytes",
        "limiters",
        "turn",
    )

    _machinery: Machinery
    _reservation: Reservation
    _scheduler: SampleScheduler

    def __init__(
        self, line: SampleLine, request: SampleRequest, deadline_at: float, *, may_forbid_retries: bool
    ) -> None:
        request.validate()
        self._line = line
        self._request = self._wire_request = request
        self._may_forbid_retries = may_forbid_retries
        self._max_submissions = line.max_attempts
        self._sdk_method = current()
        self.deadline_at = deadline_at
        self.estimate_bytes = estimate_prompt_bytes(request.prompt)
        self.limiters: tuple[Limiter, ...] | None = None
        self.turn: int | None = None
        """The position among the samples of the scheduler, by the order of the calls; None until queued."""
        self._future: APIFuture[SampleResponse] | None = None
        self._number: int | None = None
        self._body = b""
        self._key = ""
        self._call: Call | None = None
        self._attempt = self._resubmits = 0
        self._began_at = 0.0
        self._sequence_ids: Sequence[str] | None = None
        self._last_words = ""
        self._held = Holdings()
        self._ticket: Ticket | None = None
        self._fetch: object = None

    # -------------------------------------------------------------------------------------- to the scheduler

    def put(self) -> APIFuture[SampleResponse]:
        """Prepare and queue the sample. Return its future.

        Raises:
            TinkerError: the server does not support the request, the client is closed, or a budget refuses
                the sample.
        """
        line, request = self._line, self._request
        runtime = line.runtime
        self._machinery = machinery = runtime.server.ready(self.deadline_at)
        self._scheduler = self._held.scheduler = machinery.scheduler
        if request.sampling_session_id != line.sampling_session_id:
            request = request.model_copy(update={"sampling_session_id": line.sampling_session_id})
            self._request = request
        if self._may_forbid_retries and machinery.facts.config.sample_no_retries:
            self._max_submissions = 1
        dialect = machinery.facts.dialect
        refuse_unsupported(request, dialect)
        context = partial(runtime.server.published.context_length, self._line.base_model)
        self._wire_request = normalise_sample_request(request, dialect, context)
        self._reservation = runtime.spending.reserve(self._estimate_cost, self.limiters)
        try:
            future = self._future or self.make_future()
            self._reservation.follow(future)
            self._began_at = runtime.clock.now()
            if line.numbers.value is not None:
                self._scheduler.put(self)
            else:
                runtime.pools.rest.run_call(carried(self._put_numbered))
        except BaseException:
            self._reservation.release()
            raise
        return future

    def make_future(self) -> APIFuture[SampleResponse]:
        """Make and return the future that the user holds."""
        lifecycle = self._line.runtime.lifecycle
        self._future = future = lifecycle.make_future(self._on_done)
        future._only_reads, future._call_site = True, find_call_site()
        lifecycle.end_in_turn(future, self.deadline_at, "the sample", self._late_error)
        return future

    def start(self) -> None:
        """Prepare and queue a sample that was held until its client was ready.

        If this raises an error, the future of the sample fails with the error.
        """
        if self.over:
            return
        try:
            with named(self._sdk_method):
                self.put()
        except Exception as failure:  # noqa: BLE001  # the future raises it
            self._fail_future(failure)

    def _put_numbered(self) -> None:
        """Get a block of sample numbers for this client, and queue the sample.

        A copy of a client (made from the id of an existing sampler, or by a fork) needs a block of its own.
        This runs on a worker, because the first sample of a copy may ask the server for the block.
        """
        try:
            self._line.make_numbers()
        except Exception as error:  # noqa: BLE001  # the future raises it
            self._fail_future(error)
        else:
            self._scheduler.put(self)

    def _estimate_cost(self) -> CostEstimate:
        """Return the most tokens that the sample may use."""
        longest = self._request.sampling_params.max_tokens
        return CostEstimate(
            model=self._line.sampling_session_id,
            prompt=length_of(self._request.prompt),
            sampled=None if longest is None else longest * self._request.num_samples,
        )

    # -------------------------------------------------------------------------------------- admission

    @property
    def over(self) -> bool:
        """True if the future has ended."""
        return self._future is not None and self._future.done()

    def is_set_aside(self) -> bool:
        """Return True if the server has no capacity for the model now; the sample is queued again later."""
        aside = self._line.set_aside(self)
        if aside:
            self._last_words = "the server has no capacity for the model"
        return aside

    def admit(self, *, may_wait: bool = True) -> bool | None:
        """Take places under the limits, and a number. Return True if the sample is to be submitted now.

        Return False if the sample has ended. With `may_wait`, wait for the places until the deadline, and
        fail the sample then. Without it, return None if a limit does not allow the sample now. The sample
        then holds no place and no bytes, so the next call begins anew.
        """
        try:
            admitted = self._held.take(self.estimate_bytes, self._left_s if may_wait else _no_time)
            if self._is_called_off():
                return False
            if not admitted:
                if not may_wait:
                    # A sample that is sent again may go before this one, and needs a place too.
                    self._held.give_back()
                    return None
                self.fail(self._deadline_error())
            elif self._number is None:
                draw = self._line.numbers.value or self._line.next_number
                self._number = draw()
        except Exception as error:  # noqa: BLE001  # it fails this sample only
            self.fail(error)
            return False
        return admitted

    def submit(self) -> None:
        """Send the request. If the rate limiter has closed since `admit`, queue the sample again instead."""
        try:
            may_pass = self._held.may_pass()
            if self._is_called_off():
                return
            if may_pass:
                self._submit()
            else:
                self.queue_again()
        except Exception as error:  # noqa: BLE001  # the sample must end in any case
            self.fail(error)

    def _is_called_off(self) -> bool:
        """Return True if the sample has ended. In this case, also give its places back."""
        over = self.over
        if over:
            self._held.give_back()
        return over

    def _left_s(self) -> float | None:
        left_s = self.deadline_at - self._scheduler.clock.now()
        return max(left_s, 0.0) if left_s < threading.TIMEOUT_MAX else None

    # -------------------------------------------------------------------------------------- the request

    def _submit(self) -> None:
        assert self._number is not None and self._future is not None  # noqa: S101, PT018  # it was admitted
        if not self._body:
            runtime = self._line.runtime
            began_s = runtime.clock.now() if runtime.lifecycle.stopwatches else 0.0
            bodies, _ = self._line.parts.value or self._line.make_parts(self._machinery)
            self._body = bodies.encode(self._wire_request, self._number)
            if runtime.lifecycle.stopwatches:
                runtime.lifecycle.note_encoded(self._sdk_method, began_s)
            self._key = self._scheduler.next_key()
        self._attempt += 1
        self._future._mark_sending()
        self._call = call = Call(
            method="POST",
            path=PATH,
            body=self._body,
            headers=_HEADERS,
            sdk_method=self._sdk_method,
            idempotency_key=self._key,
            attempt=self._attempt,
            deadline_s=self._left_s(),
            max_retries=0,
            patient=True,
            answer_bytes=PROMISE_BYTES,
        )
        self._ticket = self._scheduler.poller.start(call, self._on_outcome)

    def _on_outcome(self, outcome: Reply | SendFailed) -> None:
        if isinstance(outcome, Reply) and 200 <= outcome.status < 300:
            self._on_promise(outcome)
            return
        call, scheduler = self._call, self._scheduler
        assert call is not None and self._future is not None  # noqa: S101, PT018  # it was submitted
        self._last_words = (
            str(outcome) if isinstance(outcome, SendFailed) else f"status {outcome.status} on submit"
        )
        decision = scheduler.policy.decide(outcome, call, self.estimate_bytes, self._line.max_attempts)
        if isinstance(decision, Throttled):
            # This does not count as an attempt: the server asks for fewer requests of all kinds.
            self._attempt -= 1
            self._held.end_sending(refused=decision)
            self._future._mark_paused(self._last_words)
            self.queue_again()
            return
        self._held.end_sending()
        if isinstance(decision, Refused):
            self.fail(decision.error)
        else:
            self._queue_after(decision.delay_s)

    def _queue_after(self, pause_s: float) -> None:
        left_s = self._left_s()
        if left_s is not None and pause_s >= left_s:
            self.fail(self._deadline_error())
        else:
            self._ticket = self._scheduler.poller.pause(pause_s, self.queue_again)

    def queue_again(self) -> None:
        """Wait for admission once more, at the place of the call in the order, and hold nothing meanwhile."""
        # The one thread that admits may wait for a place, and cannot admit this sample before it has one.
        self._held.give_back()
        self._ticket = self._fetch = None
        if self._left_s() == 0.0:
            self.fail(self._deadline_error())
        else:
            self._scheduler.put(self)

    def _on_promise(self, reply: Reply) -> None:
        self._held.end_sending(accepted=True)
        line, scheduler, future = self._line, self._scheduler, self._future
        assert future is not None  # noqa: S101  # it was submitted
        try:
            request_id, self._sequence_ids = read_promise("asample", reply, scheduler.polls.secrets)
            if not future.done() and not line.runtime.lifecycle.accept(future, request_id):
                raise foreign_promise("asample", reply, request_id)
        except APIResponseValidationError as error:
            if self._attempt < min(UNREADABLE_ANSWERS, line.max_attempts):
                self._last_words = str(error)
                self._queue_after(delay_s(self._attempt, draw=1.0))
            else:
                self.fail(error)
            return
        if future.done():
            line.runtime.server.abandon(request_id)
            return
        # The result may take hours. The body and the call are not needed again, except after a submission
        # under a new number.
        self._body, self._call, self._ticket = b"", None, None
        _, fetch = line.parts.value or line.make_parts(self._machinery)
        self._fetch = fetch(
            Promise(
                request_id,
                REQUEST_TYPE,
                wants_proto=True,
                roundtrip_s=scheduler.clock.now() - self._began_at,
                sdk_method=self._sdk_method,
                hold_back=line.hold_back,
                result_bytes=most_sample_bytes(self._request, self.estimate_bytes),
            ),
            future,
            self._decode,
            deadline_at=self.deadline_at,
            on_gone=self._on_gone,
        )

    def _on_gone(self, error: Exception) -> None:
        """Submit the request again under a new number, because the server has forgotten the promise.

        Fail the sample if that has happened too often.
        """
        self._resubmits += 1
        if self._resubmits >= self._max_submissions:
            self.fail(error)
            return
        _log.info("the server has forgotten a sample; it is submitted again (%d)", self._resubmits)
        self._last_words = "status 410: the server has forgotten the request"
        self._number = None
        self._attempt = 0
        self._queue_after(delay_s(self._resubmits, draw=1.0, longest_s=10.0))

    # -------------------------------------------------------------------------------------- the result

    def _decode(self, reply: Reply, tree: Any) -> SampleResponse:
        """Return the response in a reply, after counting its tokens and comparing it with the request.

        `tree` is the parsed JSON of the reply, or None if the reply is protobuf.
        """
        if tree is None:
            response = decode_sample_response(reply.body)
        else:
            response = wire_json.from_plain(tree, SampleResponse)
        request, sampled = self._request, 0
        for sequence in response.sequences:
            sampled += sequence.length
        length = length_of(request.prompt)
        cached = min(response.prompt_cache_hit_tokens, length)
        used = TokensUsed(
            model=self._line.sampling_session_id, prompt=length - cached, cached=cached, sampled=sampled
        )
        # Even if the check fails, because the server has computed it; once, also if it is asked for again.
        self._reservation.settle(used)
        return name_sequences(check_response(request, response), self._sequence_ids)

    def fail(self, error: Exception) -> None:
        """Fail the sample with `error`, and give its places under the limits back."""
        self._held.end_sending()
        self._fail_future(error)

    def _fail_future(self, error: Exception) -> None:
        if self._future is not None:
            self._future.fail(error)

    def _on_done(self, future: APIFuture[SampleResponse]) -> None:
        """Give the place of the sample back when its future ends. After a cancel, also stop its requests."""
        if future.cancelled():
            ticket = self._ticket
            if ticket is not None and ticket.cancel():
                self._held.end_sending()
            if future.request_id is not None:
                self._line.runtime.server.abandon(future.request_id)
        # The fetch and the ticket refer to this job. The cycle would keep the client alive until a garbage
        # collection.
        self._fetch = self._ticket = None
        self._held.give_back_place()

    def _late_error(self) -> Exception | None:
        """Return the error of a deadline that comes now; None if a request under way watches the deadline."""
        return self._deadline_error() if self._ticket is None and self._fetch is None else None

    def _deadline_error(self) -> Exception:
        future, clock = self._future, self._line.runtime.clock
        assert future is not None  # noqa: S101  # it is made before the sample waits
        sent = future.timeline.sending is not None
        made, words = self._line.runtime.server.machinery.value, self._last_words or "it waited for its turn"
        pause_s = made.scheduler.gate.limiter.pause_left_s() if made is not None else 0.0
        if pause_s > 0:
            words += f"; the server has asked for a pause, of which {in_seconds(pause_s)} are left"
        return DeadlineError(
            f"the sample was not {'accepted' if sent else 'sent'} within the deadline",
            method="POST",
            path=PATH,
            attempts=self._attempt,
            waited_s=clock.now() - future.timeline.queued,
            last_words=words,
        )
