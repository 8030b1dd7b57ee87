"""The retrieval of results. A `Fetch` polls for the result of one promise; the `Poller` sends its requests.

The first step of a fetch runs on the thread that starts it, later steps on the poller's thread or a worker
that helps it. No step waits. A fetch ends in one of three ways: it resolves or fails its future; the future
has ended already, for example by a cancel; or the server has forgotten the promise, and `on_gone` takes over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from attrs import define, field

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.secret import Secret
from tinker_sync.errors import (
    APIResponseValidationError,
    DeadlineError,
    InvalidInputError,
    TinkerError,
    WireError,
)
from tinker_sync.runtime.failures import redact_exception
from tinker_sync.runtime.naming import current
from tinker_sync.runtime.progress import FutureState
from tinker_sync.runtime.retrieval import (
    PATH,
    Action,
    Ask,
    Finished,
    Gone,
    QueueNotice,
    Retrieval,
    TakeBytes,
    Wait,
)
from tinker_sync.transport.call import ANSWER_BYTES, Call, Reply, SendFailed
from tinker_sync.transport.caller import QUIET_S, Trouble

if TYPE_CHECKING:
    from tinker_sync.runtime.byte_budget import ByteBudget
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.poller import Poller
    from tinker_sync.runtime.tickets import Ticket

T = TypeVar("T")

# The server holds a poll for about 30 s; a poll that is silent for longer than this is sent again.
POLL_TIMEOUT_S: Final = 45.0
_EARLY_S: Final = 0.001
_PROTO_FIRST: Final = "application/x-protobuf, application/json"

Decode = Callable[[Reply, Any], T]
"""A function that makes the result from a reply and its parsed JSON (None for protobuf)."""

_log = logging.getLogger(__name__)


@define
class Promise:
    """A request that the server has accepted, and what is needed to poll for its result.

    `request_type` is the name of the request in a header of the polls. `wants_proto` is True if the result
    may come as protobuf.

    >>> Promise("req-1", "OptimStep").wants_proto
    False
    """

    request_id: str
    request_type: str
    wants_proto: bool = False
    roundtrip_s: float | None = None
    """The time from the call to the receipt of the promise."""
    announced_bytes: int | None = None
    """The size of the result, if a poll for all samples (`session_poll`) has announced it, else None."""
    sdk_method: str = field(factory=current)
    """The public method of the user that the polls name in a header."""
    hold_back: Callable[[float], object] | None = None
    """For a sample: a function that sends no more samples of the same client for some seconds."""
    result_bytes: int = ANSWER_BYTES
    """The largest result that the request can have."""


class Fetcher:
    """A starter of fetches, and the objects that all of them use. One client has one fetcher. Thread-safe.

    Args:
        poller: sends the requests.
        inflight: limits the bytes of the results that are being received.
        open_server: True if a repeated 400 or 422 in answer to polls means that the request has failed.
        may_pause_billing: returns True if a poll is to be repeated after a 402.
        on_notice: called with a notice of the server's queue and the promise that it concerns.
        on_trouble: called with the request type and a description of failures, when they have lasted for two
            seconds, and then at most once a minute.
        read_timeout_s: the time that a poll may be silent before it is sent again.
        secrets: returns the values that must not appear in errors and notices.
        clock: measures time.
        pace: the factor by which the poller multiplies pauses; for deadlines, a pause counts in full.
    """

    def __init__(
        self,
        poller: Poller,
        inflight: ByteBudget,
        *,
        open_server: bool = False,
        may_pause_billing: Callable[[], bool] = lambda: False,
        on_notice: Callable[[QueueNotice, Promise], None] = lambda _notice, _promise: None,
        on_trouble: Callable[[str, str], None] = lambda _request_type, _words: None,
        read_timeout_s: float = POLL_TIMEOUT_S,
        secrets: Callable[[], Iterable[Secret]] = tuple,
        clock: Clock = SYSTEM_CLOCK,
        pace: float = 1.0,
    ) -> None:
        self.poller = poller
        self.inflight = inflight
        self.open_server = open_server
        self.may_pause_billing = may_pause_billing
        self.on_notice = on_notice
        self.on_trouble = on_trouble
        self.read_timeout_s = read_timeout_s
        self.secrets = secrets
        self.clock = clock
        self.pace = pace

    def fetch(
        self,
        promise: Promise,
        future: APIFuture[T],
        decode: Decode[T],
        *,
        deadline_at: float = math.inf,
        on_gone: Callable[[Exception], object] | None = None,
    ) -> Fetch[T]:
        """Begin to poll for the result of a promise. Return the fetch, which can be abandoned.

        The fetch resolves or fails `future`, in general later. This method does not wait.

        Args:
            promise: the promise to poll for.
            future: the future of the call.
            decode: makes the result from the answer, on the poller's thread or a worker that helps it; an
                exception that it raises fails the future.
            deadline_at: the moment of the clock at which to give up; the future then fails.
            on_gone: called with the error if the server has forgotten the promise; None to fail the future.
        """
        fetch = Fetch(self, promise, future, decode, deadline_at, on_gone)
        size = promise.announced_bytes
        if size:
            fetch._take_bytes(size)
        else:
            fetch._ask(fetch._retrieval.ask())
        return fetch


class Fetch(Generic[T]):
    """The retrieval of the result of one promise.

    Its steps follow one another; one thread at a time runs a step.
    """

    # Tens of thousands may exist at once.
    __slots__ = (
        "_asked_at",
        "_began_at",
        "_deadline_at",
        "_decode",
        "_fetcher",
        "_future",
        "_held_bytes",
        "_odd",
        "_on_gone",
        "_promise",
        "_retrieval",
        "_skipped_s",
        "_ticket",
        "_trouble",
    )

    def __init__(
        self,
        fetcher: Fetcher,
        promise: Promise,
        future: APIFuture[T],
        decode: Decode[T],
        deadline_at: float,
        on_gone: Callable[[Exception], object] | None,
    ) -> None:
        self._fetcher = fetcher
        self._promise = promise
        self._future = future
        self._decode = decode
        self._deadline_at = deadline_at
        self._on_gone = on_gone
        self._began_at = fetcher.clock.now()
        self._asked_at = self._began_at
        self._held_bytes = 0
        self._odd: Exception | None = None  # the error for a result of the wrong form, asked for again
        self._skipped_s = 0.0  # time that `pace` took off pauses; deadlines count it as waited
        self._ticket: Ticket | None = None
        self._trouble: Trouble | None = None  # the failures since the last good answer
        self._retrieval = Retrieval(
            promise.request_id,
            promise.request_type,
            wants_proto=promise.wants_proto,
            roundtrip_s=promise.roundtrip_s,
            open_server=fetcher.open_server,
            allow_metadata_only=not promise.announced_bytes,
            may_pause_billing=fetcher.may_pause_billing,
            on_notice=_Notices(fetcher, promise, future),
            secrets=fetcher.secrets,
        )

    def abandon(self) -> None:
        """Stop polling for a future that has ended. A step that runs now still ends."""
        ticket = self._ticket
        if ticket is not None and ticket.cancel():
            self._release()

    # -------------------------------------------------------------------------------------- steps

    def _ask(self, ask: Ask) -> None:
        left_s = self._deadline_at - self._now()
        if self._future.done():
            self._release()
        elif left_s <= 0:
            self._fail(self._deadline_error())
        else:
            self._asked_at = self._now()
            call = Call(
                method="POST",
                path=PATH,
                body=ask.body,
                headers=ask.headers,
                sdk_method=self._promise.sdk_method,
                accept=_PROTO_FIRST if self._promise.wants_proto else "application/json",
                read_s=self._fetcher.read_timeout_s,
                deadline_s=None if math.isinf(left_s) else left_s,
                max_retries=0,
                fresh=self._odd is not None,
                answer_bytes=self._promise.result_bytes,
            )
            self._ticket = self._fetcher.poller.start(call, self._on_outcome)

    def _ask_again(self) -> None:
        try:
            self._ask(self._retrieval.ask())
        except Exception as error:  # noqa: BLE001  # any failure must reach the future
            self._fail(error)

    def _now(self) -> float:
        return self._fetcher.clock.now() + self._skipped_s

    def _on_outcome(self, outcome: Reply | SendFailed) -> None:
        now = self._now()
        if isinstance(outcome, SendFailed) and now >= self._deadline_at:
            self._fail(self._deadline_error())
            return
        try:
            action = self._retrieval.on(outcome, asked_at=self._asked_at, now=now)
            if self._trouble is not None or self._retrieval.trouble_since is not None:
                self._show_trouble(action, now)
            self._act(action, now)
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(error)

    def _show_trouble(self, action: Action, now: float) -> None:
        """Log failures of polls that last, and show them in the status of the future while they last."""
        if self._retrieval.trouble_since is None:
            if self._trouble is not None:
                self._trouble = None
                if self._future.status().state is FutureState.WAITING:
                    self._future._mark_waiting()
        elif isinstance(action, Wait):
            self._trouble = self._trouble or Trouble()
            if self._trouble.is_due(now, action.delay_s):
                self._fetcher.on_trouble(self._promise.request_type, self._retrieval.trouble)
            if now + action.delay_s - self._retrieval.trouble_since >= QUIET_S:
                self._future._mark_waiting(self._retrieval.trouble)

    def _act(self, action: Action, now: float) -> None:
        if isinstance(action, Finished):
            self._finish(action)
        elif isinstance(action, Ask):
            self._ask(action)
        elif isinstance(action, Wait):
            self._wait(action, now)
        elif isinstance(action, TakeBytes):
            self._take_bytes(action.size)
        elif isinstance(action, Gone) and self._on_gone is not None and self._odd is None:
            self._release()
            self._on_gone(action.error)
        else:
            self._fail(self._odd or action.error)

    def _wait(self, wait: Wait, now: float) -> None:
        if now + wait.delay_s >= self._deadline_at:
            self._fail(self._deadline_error())
        else:
            self._skipped_s += wait.delay_s * (1 - self._fetcher.pace)
            self._ticket = self._fetcher.poller.after(wait.delay_s, self._ask_again)

    def _take_bytes(self, size: int) -> None:
        def go_on(granted: bool) -> None:
            # The thread that made room calls this, maybe in the middle of its own work: continue on a worker.
            if self._ticket is not None:
                self._ticket.cancel()
            if granted:
                self._held_bytes = size
                self._ticket = self._fetcher.poller.after(0.0, self._ask_again)

        budget, left_s = self._fetcher.inflight, self._deadline_at - self._now()
        try:
            if budget.try_acquire(size):
                self._held_bytes = size
                self._ask_again()
                return
            if left_s < math.inf:
                # The poller multiplies pauses by the pace, and a deadline is none.
                self._ticket = self._fetcher.poller.after(left_s / self._fetcher.pace, self._end_late)
            budget.when_free(size, go_on)
        except TinkerError as closed:
            self._fail(closed)

    # -------------------------------------------------------------------------------------- ends

    def _end_late(self) -> None:
        # The poller runs timers early if it has no thread.
        if self._deadline_at - self._now() < _EARLY_S:
            self._fail(self._deadline_error())

    def _finish(self, finished: Finished) -> None:
        try:
            value = self._decode(finished.reply, finished.tree)
        except (WireError, InvalidInputError) as error:
            first, self._odd = self._odd is None, self._odd_result(finished.reply, error)
            if first:
                # It may be the answer to another poll, on a connection that is an answer behind.
                self._ask_again()
            else:
                self._fail(self._odd)
        except Exception as error:  # noqa: BLE001  # any failure must reach the future
            self._fail(error)
        else:
            self._release()
            self._future.resolve(value)

    def _fail(self, error: Exception) -> None:
        self._release()
        self._future.fail(error)

    def _release(self) -> None:
        size, self._held_bytes = self._held_bytes, 0
        if size:
            self._fetcher.inflight.release(size)

    def _odd_result(self, reply: Reply, cause: WireError | InvalidInputError) -> Exception:
        redact_exception(cause, reply.body, self._fetcher.secrets())
        error = APIResponseValidationError(
            f"the result of {self._promise.sdk_method or self._promise.request_type} cannot be used: {cause}",
            status_code=reply.status,
            request_id=self._promise.request_id,
            method="POST",
            path=PATH,
            attempts=self._retrieval.iteration,
        )
        error.__cause__ = cause
        return error

    def _deadline_error(self) -> Exception:
        waited_s = self._fetcher.clock.now() - self._began_at
        return DeadlineError(
            f"no result of {self._promise.request_type} within the deadline",
            request_id=self._promise.request_id,
            method="POST",
            path=PATH,
            attempts=self._retrieval.iteration,
            waited_s=waited_s,
            last_words=self._retrieval.last_words,
        )


class _Notices:
    """The receiver of the server's reports on its queue, for one fetch.

    It updates the status of the future and passes the reports to `Fetcher.on_notice`. It is separate
    from the fetch: if the `Retrieval` of a fetch referred to the fetch, the two would form a cycle that only
    the garbage collector frees.
    """

    __slots__ = ("_fetcher", "_future", "_promise")  # much smaller than a partial

    def __init__(self, fetcher: Fetcher, promise: Promise, future: APIFuture[Any]) -> None:
        self._fetcher = fetcher
        self._promise = promise
        self._future = future

    def __call__(self, notice: QueueNotice) -> None:
        if notice.state.paused:
            self._future._mark_paused(notice.reason or notice.state.value)
        else:
            self._future._mark_waiting()
        try:
            self._fetcher.on_notice(notice, self._promise)
        except Exception:  # noqa: BLE001  # an exception of an observer must not fail the call
            _log.exception("a queue observer failed")
