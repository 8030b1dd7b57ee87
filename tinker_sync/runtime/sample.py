"""One sample on its way: admitted, submitted, and handed to a fetch that brings its result home.

It keeps its number through every retry of its submit, so the server can tell a repetition; when the server
has forgotten the promise it gets a new one and is submitted anew, a bounded number of times.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from tinker_sync._policy import delay_s
from tinker_sync._secret import HeaderMap
from tinker_sync.errors import DeadlineError, TinkerError
from tinker_sync.runtime.calls import read_reply
from tinker_sync.runtime.fetcher import Promise
from tinker_sync.runtime.rate_limiter import Permit
from tinker_sync.runtime.sample_response import named
from tinker_sync.runtime.sample_verdict import Refused, Throttled
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.sampling import SampleRequest, SampleResponse
from tinker_sync.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.sample_lane import SampleLane
    from tinker_sync.runtime.tickets import Ticket

PATH: Final = "/api/v1/asample"
REQUEST_TYPE: Final = "Sample"
MAX_ATTEMPTS: Final = 10
"""How often one submit is tried, and how often a sample is submitted anew after the server forgot it."""

# After a refusal a large prompt weighs this much more, so that few of them go at once.
_WEIGHT_AFTER_REFUSAL: Final = 20
_HEADERS: Final = HeaderMap({"X-Tinker-Sampling-Backpressure": "1"})

_log = logging.getLogger(__name__)


class Abandonable(Protocol):
    """A retrieval under way."""

    def abandon(self) -> None:
        """Nobody waits any more."""


class SampleOrder(Protocol):
    """What one sample asks for. Its methods run on workers."""

    @property
    def request(self) -> SampleRequest:
        """The request, complete but for its number."""

    @property
    def estimate_bytes(self) -> int:
        """The weight of the prompt."""

    @property
    def deadline_at(self) -> float:
        """The moment of the clock at which to give up."""

    @property
    def max_attempts(self) -> int:
        """How often one submit is tried."""

    @property
    def max_submissions(self) -> int:
        """How often the sample is submitted, each time under a new number."""

    @property
    def sdk_method(self) -> str:
        """The public method that asks for it."""

    def next_number(self) -> int:
        """Draw a number in the sampling session."""

    def encode(self, request: SampleRequest) -> bytes:
        """Return the body of the request, which lacks only its number."""

    def fetch(self, *promise: Any, **options: Any) -> Abandonable:
        """Start the retrieval of the result."""

    def decode(self, reply: Reply, tree: Any) -> SampleResponse:
        """Return the response that a reply holds."""

    def abandoned(self, request_id: str) -> object:
        """Take note that the user has cancelled a sample that the server has."""


class Sample:
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
            sdk_method=self._order.sdk_method,
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
            self._order.abandoned(promise.request_id)
            return
        self._future.mark_accepted(promise.request_id)
        # It may take hours from here; only a submission under a new number would need these again.
        self._body, self._call, self._ticket = b"", None, None
        self._sequence_ids = promise.sample_sequence_ids
        self._fetch = self._order.fetch(
            Promise(
                promise.request_id,
                REQUEST_TYPE,
                wants_proto=True,
                roundtrip_s=self._lane.clock.now() - self._began_at,
                sdk_method=self._order.sdk_method,
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
        if self._resubmits >= self._order.max_submissions:
            self.fail(error)
            return
        _log.info("the server has forgotten a sample; it is submitted again (%d)", self._resubmits)
        self._last_words = "status 410: the server has forgotten the request"
        self._number = None
        self._attempt = 0
        pause_s = delay_s(self._resubmits, draw=1.0, longest_s=10.0)
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
            if future.request_id is not None:
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
