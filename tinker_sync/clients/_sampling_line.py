"""The calls of a sampling client: each an object that is checked, prepared and put into the lane.

`SamplingLine` holds what a client's samples have in common: the sampler, its numbers, and the calls that are
held until there is one. A `SampleCall` is one sample; its methods are what the lane asks of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._observe import TokensUsed
from tinker_sync.clients import _deadlines
from tinker_sync.runtime import _fork
from tinker_sync.runtime.admission import Limiter, Plan, Pledge, length_of
from tinker_sync.runtime.chunking import estimate_prompt_bytes
from tinker_sync.runtime.fetcher import decode_with
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.held_calls import HeldCalls
from tinker_sync.runtime.naming import carried, current, named
from tinker_sync.runtime.numbers import numbers
from tinker_sync.runtime.once import Once
from tinker_sync.runtime.sample_response import check_response
from tinker_sync.types import JoinSamplingSessionRequest, SampleRequest, SampleResponse
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import json_body, normalise_sample_request, refuse_unsupported
from tinker_sync.wire.proto.samples import decode_sample_response

if TYPE_CHECKING:
    from tinker_sync.runtime.core import Core
    from tinker_sync.runtime.server import Machinery
    from tinker_sync.transport.call import Reply

CLONE_BLOCK: Final = 10**9
"""Each copy of a client numbers its samples in a block of its own."""

_read_response: Final = decode_with(
    decode_sample_response, lambda tree: wire_json.from_plain(tree, SampleResponse)
)


class SamplingLine:
    """The way of one client's samples: held until the sampler exists, then put into the lane. Thread-safe.

    Args:
        core: the shared parts.
        max_attempts: how often one submit is tried.
        copied: other copies of the client may be in use, so the numbers come from a block of its own.
    """

    def __init__(self, core: Core, max_attempts: int, *, copied: bool = False) -> None:
        self.core = core
        self.max_attempts = max_attempts
        self.held = HeldCalls()
        self.sampling_session_id = ""
        """Empty until the sampler exists; set once."""
        self.run_id = ""
        """The training run of the weights; empty where it is not known. Set once."""
        # The original counts from 0 and asks no server; a copy first needs a block of its own.
        self._numbers: Once[Callable[[], int]] = Once()
        if not copied:
            self._numbers.get(numbers)
        self._poll_for_all: Once[Callable[..., Any]] = Once()
        self._clone_id = 0
        _fork.renew_in_child(self)

    def submit(
        self, request: SampleRequest, deadline_at: float, *, may_forbid_retries: bool = False
    ) -> APIFuture[SampleResponse]:
        """Put a sample into the lane, or hold it. Return its future at once.

        Args:
            request: the sample; a client that is not ready adds the sampler later.
            deadline_at: the moment of the clock at which to give up.
            may_forbid_retries: obey a server that wants each sample submitted under one number only.

        Raises:
            InvalidInputError: the request cannot be sent; nothing was.
            TinkerError: the server cannot do it, or the client is closed.
        """
        call = SampleCall(self, request, deadline_at, may_forbid_retries=may_forbid_retries)
        if not self.held.open:
            self.core.refuse_closed()
            call.limiters = self.core.admission.limiters
            future = call.future = self.core.future()
            if not self.held.hold(call):
                call.start()
            return future
        return call.put()

    def put_numbered(self, call: SampleCall, future: APIFuture[SampleResponse]) -> None:
        """Ask for the numbers of a copy before its first sample; on a worker, so that no caller waits."""
        try:
            self._numbers.get(self._join)
            lane = self.core.ready().lane
        except Exception as error:  # noqa: BLE001  # it belongs to the sample
            future.fail(error)
        else:
            lane.put(call, future)

    @property
    def numbered(self) -> bool:
        """Whether the numbers are known."""
        return self._numbers.made is not None

    def next_number(self) -> int:
        """Draw the number of a sample."""
        return self._numbers.get(self._join)()

    def fetch(self, machinery: Machinery, *promise: Any, **options: Any) -> Any:
        """Start a retrieval. How is decided with the first promise: by then a copy has its numbers."""
        made = self._poll_for_all.made
        if made is None:
            made = self._poll_for_all.get(lambda: self._session_poll(machinery))
        return made(*promise, **options)

    def renew_after_fork(self) -> None:
        """Begin as a copy: the child is one, and needs numbers of its own."""
        self._numbers = Once()
        self._poll_for_all = Once()

    def _session_poll(self, machinery: Machinery) -> Callable[..., Any]:
        """Return what waits for results: together where the server offers that, else one by one."""
        if not machinery.facts.config.sample_use_retrieve_futures:
            return machinery.fetcher.fetch
        from tinker_sync.runtime.session_poll import SessionPoll

        poll = SessionPoll(machinery.fetcher, self.sampling_session_id, self._clone_id, clock=self.core.clock)
        self.core.owe(poll)
        return poll.fetch

    def _join(self) -> Callable[[], int]:
        """Return numbers from a block that no other copy uses."""
        core = self.core
        if core.ready().facts.config.sample_join_sampling_session:
            joined = core.call(
                "join_sampling_session",
                JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id),
                usual_s=_deadlines.REST_S,
            )
            clone = joined.client_counter
        else:
            clone = uuid.uuid4().int % CLONE_BLOCK + 1
        self._clone_id = clone
        return numbers(clone * CLONE_BLOCK)


class SampleCall:
    """One sample: an order for the lane. Checked when it is made, prepared when its sampler exists.

    Raises:
        InvalidInputError: it cannot be sent.
    """

    __slots__ = (
        "_machinery",
        "_may_forbid_retries",
        "_pledge",
        "_whole",
        "deadline_at",
        "estimate_bytes",
        "future",
        "limiters",
        "line",
        "max_attempts",
        "max_submissions",
        "request",
        "sdk_method",
    )

    _machinery: Machinery
    _pledge: Pledge

    def __init__(
        self, line: SamplingLine, request: SampleRequest, deadline_at: float, *, may_forbid_retries: bool
    ) -> None:
        request.validate()
        self.sdk_method = current()
        self._may_forbid_retries = may_forbid_retries
        self.line = line
        self.deadline_at = deadline_at
        self.max_attempts = self.max_submissions = line.max_attempts
        self.request = self._whole = request
        self.estimate_bytes = estimate_prompt_bytes(request.prompt)
        self.limiters: tuple[Limiter, ...] | None = None
        self.future: APIFuture[SampleResponse] | None = None

    # -------------------------------------------------------------------------------------- its way there

    def put(self) -> APIFuture[SampleResponse]:
        """Prepare it and put it into the lane. Return its future.

        Raises:
            TinkerError: the server cannot do it, the client is closed, or there is not so much left to spend.
        """
        core, whole = self.line.core, self._whole
        self._machinery = machinery = core.ready(self.deadline_at)
        if whole.sampling_session_id != self.line.sampling_session_id:
            self._whole = whole = whole.model_copy(
                update={"sampling_session_id": self.line.sampling_session_id}
            )
        if self._may_forbid_retries and machinery.facts.config.sample_no_retries:
            self.max_submissions = 1
        dialect = machinery.facts.dialect
        refuse_unsupported(whole, dialect)
        self.request = normalise_sample_request(whole, dialect)
        with core.admission.admitted(self._plan, self.limiters) as self._pledge:
            future = self.future or core.future()
            self._pledge.follow(future)
            if self.line.numbered:
                machinery.lane.put(self, future)
            else:
                core.send_pool.run(carried(lambda: self.line.put_numbered(self, future)))
        return future

    def start(self) -> None:
        """Go on after the wait for the sampler."""
        future = self.future
        if future is None or future.done():
            return
        try:
            with named(self.sdk_method):
                self.put()
        except Exception as failure:  # noqa: BLE001  # it belongs to the future
            future.fail(failure)

    def fail(self, failure: Exception) -> None:
        """End the future of a call that was held."""
        if self.future is not None:
            self.future.fail(failure)

    def _plan(self) -> Plan:
        """Return what the sample takes at most."""
        longest = self._whole.sampling_params.max_tokens
        return Plan(
            model=self.line.sampling_session_id,
            prompt=length_of(self._whole.prompt),
            sampled=None if longest is None else longest * self._whole.num_samples,
        )

    # -------------------------------------------------------------------------------------- for the lane

    def next_number(self) -> int:
        """Draw its number."""
        return self.line.next_number()

    def encode(self, request: SampleRequest) -> bytes:
        """Return the body, which lacks only its number."""
        core = self.line.core
        began_s = core.clock.now() if core.stopwatches else 0.0
        body = json_body(request, self._machinery.facts.dialect)
        if core.stopwatches:
            core.note_encoded(self.sdk_method, began_s)
        return body

    def fetch(self, *promise: Any, **options: Any) -> Any:
        """Start the retrieval of the result."""
        return self.line.fetch(self._machinery, *promise, **options)

    def abandoned(self, request_id: str) -> None:
        """Send the server word that its result is not wanted any more."""
        self.line.core.server.abandon(request_id)

    def decode(self, reply: Reply, tree: Any) -> SampleResponse:
        """Read the response, and count it before the user sees it."""
        response = _read_response(reply, tree)
        length = length_of(self._whole.prompt)
        cached = min(response.prompt_cache_hit_tokens, length)
        used = TokensUsed(
            model=self.line.sampling_session_id,
            prompt=length - cached,
            cached=cached,
            sampled=sum(sequence.length for sequence in response.sequences),
        )
        self._pledge.settle(used)  # also where the check finds something amiss: it was computed
        return check_response(self._whole, response)
