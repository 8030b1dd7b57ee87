"""Samples: the life of a sample as a flow, and what the samples of one client share.

    sample     the flow: its turn, the submit, the polls; once more if the server has forgotten it
    submit     the part of it that ends when the server has accepted the sample

A sample keeps its number through every retry of its submit, so that the server recognises a repetition. When
the server has forgotten the promise, the sample gets a new number and is submitted again, a bounded number of
times.

A call of the user checks and prepares the sample (`SampleJob`), and starts the flow once the sampler exists.
The JSON bodies of the samples differ in prompt and number; `SampleBodies` encodes their other fields once.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tinker_sync._base import fork as _fork
from tinker_sync._base.clock import in_seconds
from tinker_sync._base.events import CostEstimate, Limiter, RequestEncoded, TokensUsed
from tinker_sync._base.log import Log
from tinker_sync._base.naming import carried, current, find_call_site, named
from tinker_sync._base.numbers import numbers
from tinker_sync._base.policy import BLOCKED_PAUSE_S, UNREADABLE, Ledger, Meaning, Stage, delay_s, rule_for
from tinker_sync._base.secret import HeaderMap
from tinker_sync.errors import APIError, APIResponseValidationError, DeadlineError, TinkerError
from tinker_sync.runtime.admission import ModelPause, Turn
from tinker_sync.runtime.calls import foreign_promise, read_promise
from tinker_sync.runtime.flows import CalledOff, Flow
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.lazy import HeldCalls, Lazy
from tinker_sync.runtime.polls import Decode, GoneError, Promise, poll
from tinker_sync.runtime.raw import NO_EXTRA, Extra
from tinker_sync.runtime.reactor import QUICK_BYTES
from tinker_sync.runtime.spending import Reservation, length_of
from tinker_sync.transport import retries
from tinker_sync.transport.call import ANSWER_BYTES, NO_HEADERS, PROMISE_BYTES, Call, Reply, SendFailed
from tinker_sync.transport.retries import Judge
from tinker_sync.types._structured import field_names
from tinker_sync.types.model_input import EncodedTextChunk, ModelInput
from tinker_sync.types.sampling import SampleRequest, SampleResponse, SamplingParams
from tinker_sync.types.session import JoinSamplingSessionRequest
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import (
    check_response,
    fit,
    json_body,
    name_sequences,
)
from tinker_sync.wire.dialect import Dialect
from tinker_sync.wire.proto.samples import decode_sample_response

if TYPE_CHECKING:
    from tinker_sync.runtime.client import ClientRuntime
    from tinker_sync.runtime.server import BillingPause, Machinery

PATH: Final = "/api/v1/asample"
REQUEST_TYPE: Final = "Sample"
CLONE_BLOCK: Final = 10**9
"""The size of a block of numbers. Each copy of a client numbers its samples in a block of its own."""

_HEADERS: Final = HeaderMap({"X-Tinker-Sampling-Backpressure": "1"})
_JOIN_S: Final = 300.0
# The refusal of a larger request costs so much bandwidth that the next try waits for longer.
_SMALL_BYTES: Final = 128 * 1024
_LARGE_PAUSE_S: Final = 5.0
_TOKEN_BYTES: Final = 10  # of the prompt, as decimal text
# A token or a log-probability takes some 30 bytes as JSON.
_RESULT_TOKEN_BYTES: Final = 100
# The most bytes of a result for each byte of target tokens to score.
_RESULT_FACTOR: Final = 64
# The length of a sample to which the request sets no limit.
_LONGEST_SAMPLE: Final = 1_000_000
# A token id that marks the place of the tokens in an encoded request. No other field contains it, except
# perhaps a stop text, which `_learn` notices.
_MARK: Final = 1_999_999_999
_MARKED: Final = b"[%d]" % _MARK
_PARAMS: Final = "sampling_params"
_key_of: Final = attrgetter(
    *(name for name in field_names(SampleRequest) if name not in ("prompt", _PARAMS, "seq_id")),
    *(f"{_PARAMS}.{name}" for name in field_names(SamplingParams) if name != "stop"),
)

Fetch = Callable[[Promise, APIFuture[Any], Decode[Any], float], Flow[Any]]
"""A flow that fetches the result of a promise: `polls.poll`, or one with the same arguments."""

_log = Log(__name__)


# ------------------------------------------------------------------------------------------ the flow


def sample(job: SampleJob) -> Flow[SampleResponse]:
    """The life of a sample, from its turn to its response."""
    line, future = job.line, job.future
    runtime = line.runtime
    if line.numbers.value is None:  # a copy of a client may have to ask the server for a block of numbers
        with named(job.sdk_method):
            make_numbers = carried(line.make_numbers)
        yield from runtime.server.flows.on_worker(runtime.pools.rest, make_numbers)
    bodies, fetch = line.parts.value or line.make_parts(job.machinery)
    turn = Turn(job.machinery.admission, job.size, job.deadline_at, line.pause)
    try:
        submission = 0
        while True:
            submission += 1
            # Here, because many samples wait, and a suspended `submit` would double their memory.
            if not (yield turn):
                raise job.late(turn, 0)
            promise = job.promised((yield from submit(job, turn, bodies)))
            try:
                response: SampleResponse = yield from fetch(promise, future, job.decode, job.deadline_at)
            except GoneError as gone:
                if submission >= job.max_submissions:
                    raise gone.error from None
            else:
                return response
            _log.info("the server has forgotten a sample; it is submitted again (%d)", submission)
            turn.last_words = "status 410: the server has forgotten the request"
            turn.give_back()
            yield job.in_time(delay_s(submission, draw=1.0, longest_s=10.0), turn)
    except CalledOff:
        if future.cancelled() and future.request_id is not None:
            runtime.server.abandon(future.request_id)
        raise
    finally:
        turn.give_back()


def submit(  # noqa: C901  # as `polls.poll`
    job: SampleJob, turn: Turn, bodies: SampleBodies
) -> Flow[str]:
    """Submit a sample until the server accepts it, and return its request id.

    The turn has come, and after each try that fails the sample waits for it once more. At the end it holds a
    slot.
    """
    line, future, machinery = job.line, job.future, job.machinery
    runtime = line.runtime
    number: int | None = None
    body, key, attempt = b"", "", 0
    extra = job.extra.headers
    headers = HeaderMap({**_HEADERS, **extra}) if extra is not NO_HEADERS else _HEADERS
    ledger = Ledger(Stage.SUBMIT)
    while True:
        if number is None:
            number = (line.numbers.value or line.next_number)()
            if job.size <= QUICK_BYTES:
                body = job.encode(bodies, number)
            else:
                encode = partial(job.encode, bodies, number)
                body = yield from runtime.server.flows.on_worker(runtime.pools.fetch, encode)
            key = runtime.connection.caller.next_key()
        if not turn.may_pass():  # the limiter has closed again
            turn.give_back()
            if not (yield turn):
                raise job.late(turn, attempt)
            continue
        attempt += 1
        future._mark_sending()
        call = Call(
            path=PATH,
            body=body,
            headers=headers,
            sdk_method=job.sdk_method,
            idempotency_key=key,
            attempt=attempt,
            deadline_s=job.left_s(),
            max_retries=0,
            patient=True,
            answer_bytes=PROMISE_BYTES,
        )
        outcome = yield call
        if isinstance(outcome, Reply) and 200 <= outcome.status < 300:
            turn.sent(accepted=True)
            try:
                request_id, job.sequence_ids = read_promise("asample", outcome, machinery.polls.secrets)
                if not runtime.lifecycle.accept(future, request_id):
                    raise foreign_promise("asample", outcome, request_id)
                if future._outcome is not None:  # cancelled meanwhile
                    raise CalledOff
            except APIResponseValidationError as error:
                if ledger.is_spent(UNREADABLE) or attempt >= line.max_attempts:
                    raise
                turn.last_words, pause_s = str(error), delay_s(attempt, draw=1.0)
            else:
                return request_id
        else:
            lost = isinstance(outcome, SendFailed)
            turn.last_words = str(outcome) if lost else f"status {outcome.status} on submit"
            decision = machinery.policy.decide(outcome, call, ledger, job.size, line.max_attempts)
            if isinstance(decision, Throttled):
                # This does not count as an attempt: the server asks for fewer requests of all kinds.
                attempt -= 1
                turn.throttled(decision.pause_s)
                future._mark_paused(turn.last_words)
                pause_s = 0.0
            else:
                pause_s = decision
        turn.give_back()
        if pause_s > 0:
            yield job.in_time(pause_s, turn)
        if not (yield turn):
            raise job.late(turn, attempt)


class SampleJob:
    """One sample: checked when it is made, prepared by `put`, and then carried out by the flow `sample`.

    Args:
        line: the parts that the samples of one client share.
        request: the sample; `put` adds the id of the sampler.
        deadline_at: the deadline, in seconds of the clock.
        may_forbid_retries: obey a server whose settings forbid to submit a forgotten sample again.
        extra: what the user adds to the request.

    Raises:
        InvalidInputError: the request cannot be sent.
    """

    # Slots, because there may be tens of thousands of jobs.
    __slots__ = (
        "_held",
        "_may_forbid_retries",
        "_reservation",
        "_wire_request",
        "began_at",
        "deadline_at",
        "extra",
        "future",
        "limiters",
        "line",
        "machinery",
        "max_submissions",
        "request",
        "sdk_method",
        "sequence_ids",
        "size",
    )

    _reservation: Reservation
    _wire_request: SampleRequest
    began_at: float
    future: APIFuture[SampleResponse]
    machinery: Machinery

    def __init__(
        self,
        line: SampleLine,
        request: SampleRequest,
        deadline_at: float,
        *,
        may_forbid_retries: bool,
        extra: Extra,
    ) -> None:
        request.validate()
        self.line = line
        self.extra = extra
        self.request = request
        self.deadline_at = deadline_at
        self.max_submissions = line.max_attempts
        self.sdk_method = current()
        self.size = estimate_prompt_bytes(request.prompt)
        self.limiters: tuple[Limiter, ...] | None = None
        self.sequence_ids: Any = None
        self._may_forbid_retries = may_forbid_retries
        self._held = False

    # ---------------------------------------------------------------------------------- on a user's thread

    def put(self) -> APIFuture[SampleResponse]:
        """Prepare the sample, and start its flow. Return its future.

        Raises:
            TinkerError: the server does not support the request, the client is closed, or a budget refuses
                the sample.
        """
        line, request = self.line, self.request
        runtime = line.runtime
        self.machinery = machinery = runtime.server.ready(self.deadline_at)
        if request.sampling_session_id != line.sampling_session_id:
            request = request.model_copy(update={"sampling_session_id": line.sampling_session_id})
            self.request = request
        if self._may_forbid_retries and machinery.facts.config.sample_no_retries:
            self.max_submissions = 1
        dialect = machinery.facts.dialect
        context = partial(runtime.server.published.context_length, line.base_model)
        self._wire_request = fit(request, dialect, context_length=context)
        self._reservation = runtime.spending.reserve(self._estimate_cost, self.limiters)
        try:
            if not self._held:
                self.future = runtime.lifecycle.make_future(line, only_reads=True, call_site=find_call_site())
            future = self.future
            self._reservation.follow(future)
            self.began_at = runtime.clock.now()
            self._held = False
            runtime.server.flows.start(sample(self), future)
        except BaseException:
            self._reservation.release()
            raise
        return future

    def _estimate_cost(self) -> CostEstimate:
        """Return the most tokens that the sample may use."""
        longest = self.request.sampling_params.max_tokens
        return CostEstimate(
            model=self.line.sampling_session_id,
            prompt=length_of(self.request.prompt),
            sampled=None if longest is None else longest * self.request.num_samples,
        )

    # -------------------------------------------------------------------------------------- held

    def hold(self) -> APIFuture[SampleResponse]:
        """Return the future of a sample that is held until its client is ready, or until its deadline."""
        lifecycle = self.line.runtime.lifecycle
        self.future = future = lifecycle.make_future(self.line, only_reads=True, call_site=find_call_site())
        self._held = True
        lifecycle.end_in_turn(future, self.deadline_at, "the sample", self._late_while_held)
        return future

    def _late_while_held(self) -> Exception | None:
        return self.late(None, 0) if self._held else None

    def start(self) -> None:
        """Prepare and start a sample that was held until its client was ready.

        If this raises an error, the future of the sample fails with the error.
        """
        if self.future.done():
            return
        try:
            with named(self.sdk_method):
                self.put()
        except Exception as failure:  # noqa: BLE001  # the future raises it
            self.fail(failure)

    def fail(self, error: Exception) -> None:
        """Fail a sample that is held."""
        self.future.fail(error)

    # -------------------------------------------------------------------------------------- for the flow

    def encode(self, bodies: SampleBodies, number: int) -> bytes:
        """Return the body under a number."""
        events = self.line.runtime.connection.events
        began_s = self.line.runtime.clock.now() if events.wants(RequestEncoded) else None
        body = bodies.encode(self._wire_request, number)
        if self.extra.body:
            body = self.extra.applied(body)
        if began_s is not None:
            events.notify(RequestEncoded(self.sdk_method, began_s))
        return body

    def promised(self, request_id: str) -> Promise:
        """Return the promise that the server has just made."""
        return Promise(
            request_id,
            REQUEST_TYPE,
            wants_proto=True,
            roundtrip_s=self.line.runtime.clock.now() - self.began_at,
            sdk_method=self.sdk_method,
            pause=self.line.pause,
            result_bytes=most_sample_bytes(self.request, self.size),
        )

    def decode(self, reply: Reply, tree: Any) -> SampleResponse:
        """Return the response in a reply, after counting its tokens and comparing it with the request.

        `tree` is the parsed JSON of the reply, or None if the reply is protobuf.
        """
        if tree is None:
            response = decode_sample_response(reply.body)
        else:
            response = wire_json.from_plain(tree, SampleResponse)
        request, sampled = self.request, 0
        for sequence in response.sequences:
            sampled += sequence.length
        length = length_of(request.prompt)
        cached = min(response.prompt_cache_hit_tokens, length)
        used = TokensUsed(
            model=self.line.sampling_session_id, prompt=length - cached, cached=cached, sampled=sampled
        )
        # Even if the check fails, because the server has computed it; once, also if it is asked for again.
        self._reservation.settle(used)
        return name_sequences(check_response(request, response), self.sequence_ids)

    def left_s(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None without a deadline."""
        left_s = self.deadline_at - self.line.runtime.clock.now()
        return max(left_s, 0.0) if left_s < threading.TIMEOUT_MAX else None

    def in_time(self, pause_s: float, turn: Turn) -> float:
        """Return the length of a pause, or raise the error of the deadline if the pause would outlast it."""
        left_s = self.left_s()
        if left_s is not None and pause_s >= left_s:
            raise self.late(turn, 1)
        return pause_s

    def late(self, turn: Turn | None, attempts: int) -> DeadlineError:
        """Return the error of the deadline."""
        future, runtime = self.future, self.line.runtime
        made = runtime.server.machinery.value
        words = (turn.last_words if turn is not None else "") or "it waited for its turn"
        pause_s = made.admission.gate.limiter.pause_left_s() if made is not None else 0.0
        if pause_s > 0:
            words += f"; the server has asked for a pause, of which {in_seconds(pause_s)} are left"
        done = "sent" if future.timeline.sending is None else "accepted"
        return DeadlineError(
            f"the sample was not {done} within the deadline",
            method="POST",
            path=PATH,
            attempts=attempts,
            waited_s=runtime.clock.now() - future.timeline.queued,
            last_words=words,
        )


def estimate_prompt_bytes(prompt: ModelInput) -> int:
    """Return the estimated size of a prompt in a sampling request. A text token counts as 10 bytes.

    >>> estimate_prompt_bytes(ModelInput.from_ints([1, 2, 3]))
    30
    """
    return prompt._estimate_bytes(_TOKEN_BYTES)


def most_sample_bytes(request: SampleRequest, prompt_bytes: int) -> int:
    """Return an upper bound for the size of a sampling request's result.

    >>> from tinker_sync.types import SampleRequest, SamplingParams
    >>> prompt, settings = ModelInput.from_ints([1]), SamplingParams(max_tokens=5)
    >>> most_sample_bytes(SampleRequest(prompt=prompt, sampling_params=settings), 10) // 2**20
    8
    """
    longest = request.sampling_params.max_tokens
    sampled = request.num_samples * (_LONGEST_SAMPLE if longest is None else longest)
    most_bytes = ANSWER_BYTES + sampled * _RESULT_TOKEN_BYTES * (1 + request.topk_sample_logprobs)
    scores = 1 + request.topk_prompt_logprobs + request.prompt_alt_tokens_k
    most_bytes += prompt_bytes // _TOKEN_BYTES * _RESULT_TOKEN_BYTES * scores
    if request.target_prompt_logprobs is not None:
        most_bytes += request.target_prompt_logprobs.nbytes * _RESULT_FACTOR
    return most_bytes


# ------------------------------------------------------------------------------------------ the policy


class Throttled(NamedTuple):
    """The decision to close the limiter for a time, and then to submit again."""

    pause_s: float | None = None
    """The time that the server has named; None to let the limiter decide."""


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
        self, outcome: Reply | SendFailed, call: Call, ledger: Ledger, size: int, max_attempts: int
    ) -> float | Throttled:
        """Return the pause before the next submit, or `Throttled`, after an outcome that is not a promise.

        Args:
            outcome: the answer, or the failure to get one.
            call: the request; its `attempt` counts the tries so far.
            ledger: counts the failures of the sample.
            size: the estimated size of the prompt.
            max_attempts: the most tries.

        Raises:
            Exception: another try would end the same way, or no try is left.
        """
        meaning = None
        if isinstance(outcome, SendFailed):
            if isinstance(outcome.__cause__, TinkerError):
                raise outcome.__cause__  # such as a missing key; nothing was sent
            found: retries.Verdict | None = self._judge.failure(outcome, call)
        else:
            meaning = rule_for(outcome.status, Stage.SUBMIT).meaning
            if meaning is Meaning.BLOCKED and self._billing.may_pause():
                return Throttled(BLOCKED_PAUSE_S)
            found = self._judge.reply(outcome, call, ledger)
        if found is None:
            raise APIError(
                "the server sent us elsewhere", method=call.method, path=call.path, attempts=call.attempt
            )
        if isinstance(found, retries.Fatal):
            raise found.error
        if meaning is Meaning.THROTTLED:
            large = found.after_s is None and size > _SMALL_BYTES
            return Throttled(_LARGE_PAUSE_S if large else found.after_s)
        if call.attempt >= max_attempts:
            raise found.error
        return delay_s(call.attempt, hint_s=found.after_s, draw=self._draw())


# ----------------------------------------------------------------------------------- what samples share


class SampleBodies:
    """An encoder of the JSON bodies of one client's samples. Thread-safe.

    For a prompt that is a single `EncodedTextChunk`, it encodes the fields other than the number and the
    tokens once, and reuses them while they stay the same. It encodes other requests whole.

    >>> params = SamplingParams(max_tokens=4)
    >>> request = SampleRequest(prompt=ModelInput.from_ints([1, 2]), sampling_params=params)
    >>> bodies = SampleBodies(Dialect.of_vendor())
    >>> bodies.encode(request, 0) == bodies.encode(request, 0), bodies.encode(request, 7)[:12]
    (True, b'{"seq_id":7,')

    Args:
        dialect: the dialect of the server.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        # The fields of the last request, and its text before and after the tokens; replaced as a whole.
        self._last: tuple[Any, bytes, bytes] = (None, b"", b"")

    def encode(self, request: SampleRequest, number: int) -> bytes:
        """Return the JSON body of a request with its sample number.

        The caller has already adapted the request to the dialect.
        """
        chunks = request.prompt.chunks
        if len(chunks) != 1 or type(chunks[0]) is not EncodedTextChunk or request.target_prompt_logprobs:
            return self._encode_whole(request, number)
        stop = request.sampling_params.stop
        key = _key_of(request), tuple(stop) if type(stop) is list else stop
        last: tuple[Any, bytes, bytes] | None = self._last
        if self._last[0] != key:
            last = self._learn(request, key)
        if last is None:
            return self._encode_whole(request, number)
        listed = chunks[0].listed()
        return b'{"seq_id":%d,%b%b%b' % (number, last[1], wire_json.DEFAULT.write(listed), last[2])

    def _learn(self, request: SampleRequest, key: Any) -> tuple[Any, bytes, bytes] | None:
        """Keep and return the encoded text before and after the tokens of a request.

        Return None if the place of the tokens in the text is ambiguous.
        """
        marked = request.model_copy(update={"prompt": ModelInput.from_ints([_MARK])})
        before, *others = self._body(marked)[1:].split(_MARKED)
        if len(others) != 1:
            return None
        last = self._last = key, before, others[0]
        return last

    def _encode_whole(self, request: SampleRequest, number: int) -> bytes:
        return wire_json.with_number(self._body(request), number)

    def _body(self, request: SampleRequest) -> bytes:
        return json_body(request, self._dialect)


class SampleLine:
    """The samples of one client: held until the sampler exists, then started. Thread-safe.

    Args:
        runtime: the parts that the clients of a service share.
        max_attempts: the most tries of one submit.
        copied: True for a copy, a client made from the id of an existing sampler. Other copies may be in use,
            so each numbers its samples from a separate block.
    """

    def __init__(self, runtime: ClientRuntime, max_attempts: int, *, copied: bool = False) -> None:
        self.runtime = runtime
        self.max_attempts = max_attempts
        self.held = HeldCalls(runtime.pools.enter)
        self.sampling_session_id = ""
        """The id of the sampler; empty until the sampler exists. Set once."""
        self.run_id = ""
        """The training run of the weights; empty if it is not known. Set once."""
        self.base_model: str | None = None
        """The base model; None if it is not known. Set once."""
        # The original counts from 0 without asking the server. A copy first needs a block of its own.
        self.numbers: Lazy[Callable[[], int]] = Lazy()
        """The function that draws numbers, once it is known. A copy may have to ask the server."""
        if not copied:
            self.numbers.get(lambda: numbers().__next__)
        self.parts: Lazy[tuple[SampleBodies, Fetch]] = Lazy()
        """The encoder of the bodies and the flow that fetches a result, once `make_parts` was called."""
        self._clone_id = 0
        self.pause = ModelPause()
        _fork.renew_in_child(self)

    def submit(
        self,
        request: SampleRequest,
        deadline_at: float,
        *,
        may_forbid_retries: bool = False,
        extra: Extra = NO_EXTRA,
    ) -> APIFuture[SampleResponse]:
        """Schedule a sample, or hold it until the sampler exists. Return its future at once.

        Args:
            request: the sample; a client that is not ready adds the sampler later.
            deadline_at: the deadline, in seconds of the clock.
            may_forbid_retries: obey a server whose settings forbid to submit a forgotten sample again.
            extra: what the user adds to the request.

        Raises:
            InvalidInputError: the request cannot be sent; nothing was sent.
            TinkerError: the client is closed; or, if the sampler exists, the server does not support the
                request or a budget refuses it.
        """
        job = SampleJob(self, request, deadline_at, may_forbid_retries=may_forbid_retries, extra=extra)
        self.runtime.lifecycle.refuse_if_leaving()
        if self.held.open:
            return job.put()
        job.limiters = self.runtime.spending.limiters
        future = job.hold()
        self.held.hold(job)
        return future

    def make_numbers(self) -> None:
        """Prepare the sample numbers. The first call in a copy of a client may block to ask the server.

        Raises:
            TinkerError: the server cannot be asked, or has dropped the session.
        """
        self.numbers.get(self._join)
        self.runtime.server.ready()

    def next_number(self) -> int:
        """Return the number of the next sample. The first call in a copy of a client may ask the server.

        Raises:
            TinkerError: the server cannot be asked, or has dropped the session.
        """
        return self.numbers.get(self._join)()

    def make_parts(self, machinery: Machinery) -> tuple[SampleBodies, Fetch]:
        """Return the encoder of the bodies and the flow that fetches a result.

        A copy of a client must have its sample numbers before this call.
        """
        return self.parts.get(lambda: (SampleBodies(machinery.facts.dialect), self._choose_poll(machinery)))

    def number_as_copy(self) -> None:
        """Number the samples from a separate block from now on, as a copy of a client does."""
        self.numbers = Lazy()

    def renew_after_fork(self) -> None:
        """Forget the numbers in a forked child, which needs its own block, as a copy of a client does."""
        self.number_as_copy()
        self.parts = Lazy()
        self.pause = ModelPause()
        self.held.renew_after_fork()

    def _choose_poll(self, machinery: Machinery) -> Fetch:
        """Return the flow that fetches a result: `poll`, or `SessionPoll.fetch` if the server wants that."""
        if not machinery.facts.config.sample_use_retrieve_futures:
            return partial(poll, machinery.polls)
        from tinker_sync.runtime.session_poll import SessionPoll

        together = SessionPoll(
            machinery.polls, self.sampling_session_id, self._clone_id, clock=self.runtime.clock
        )
        self.runtime.lifecycle.register_last_call(together)
        return together.fetch

    def _join(self) -> Callable[[], int]:
        """Return a function that draws numbers from a block for this copy of the client. May block.

        The server assigns the block, if it lets copies join a sampler. Otherwise the block is random.
        """
        runtime = self.runtime
        if runtime.server.ready().facts.config.sample_join_sampling_session:
            joined = runtime.server.call(
                "join_sampling_session",
                JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id),
                usual_s=_JOIN_S,
            )
            clone = joined.client_counter
        else:
            clone = uuid.uuid4().int % CLONE_BLOCK + 1
        self._clone_id = clone
        return numbers(clone * CLONE_BLOCK).__next__
