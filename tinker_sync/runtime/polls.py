"""Polls for results: the flow `poll`, and what becomes of the server's reports on its queues.

    value = yield from poll(polls, promise, future, decode, deadline_at)

`retrieval` decides what follows from each answer, and this flow does it: it sends the polls, waits, holds the
bytes of a large result, and marks the progress of the future.

The log gets the reports of paused queues: at most one line a minute for each kind of request and state,
however many requests wait. Listeners get every report, in order, on workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from attrs import define, field

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.events import Events
from tinker_sync._base.log import Log
from tinker_sync._base.naming import current
from tinker_sync._base.secret import Secret
from tinker_sync.errors import APIResponseValidationError, DeadlineError, InvalidInputError, WireError
from tinker_sync.runtime.admission import ModelPause
from tinker_sync.runtime.failures import redact_exception
from tinker_sync.runtime.flows import Flow, Flows, Quota, Task
from tinker_sync.runtime.futures import APIFuture, Submit
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
from tinker_sync.runtime.workers import InOrder, Workers
from tinker_sync.transport.call import ANSWER_BYTES, Call, Reply, SendFailed
from tinker_sync.transport.retries import QUIET_S, Trouble
from tinker_sync.types.future import QueueState

T = TypeVar("T")

# The server holds a poll for about 30 s; a poll that is silent for longer than this is sent again.
POLL_TIMEOUT_S: Final = 45.0
# It takes milliseconds to read a larger answer, and all flows of the client would wait.
_LARGE_BYTES: Final = 256 * 1024
_PROTO_FIRST: Final = "application/x-protobuf, application/json"
LOG_EVERY_S: Final = 60.0
_NO_REASON: Final = {
    QueueState.PAUSED_RATE_LIMIT: "too many requests of this kind are under way for your account",
    QueueState.PAUSED_CAPACITY: "the service is short of capacity at the moment",
}

_log = Log("tinker_sync.queue")

Decode = Callable[[Reply, Any], T]
"""A function that makes the result from a reply and its parsed JSON (None for protobuf)."""


@define(weakref_slot=False)
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
    pause: ModelPause | None = None
    """For a sample: the pause of its model."""
    result_bytes: int = ANSWER_BYTES
    """The largest result that the request can have."""


class GoneError(Exception):
    """The server has forgotten a promise, so only a new submission can help. Its cause is for the user."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Polls:
    """What all polls of one client use.

    Args:
        flows: runs the polls.
        room: limits the bytes of the results that are being received.
        workers: read large answers, because all flows of the client would wait for that.
        open_server: True if a repeated 400 or 422 in answer to polls means that the request has failed.
        may_pause_billing: returns True if a poll is to be repeated after a 402.
        on_notice: called with a notice of the server's queue and the promise that it concerns; must be short.
        on_trouble: called with the request type and a description of failures, when they have lasted for two
            seconds, and then at most once a minute.
        read_timeout_s: the time that a poll may be silent before it is sent again.
        secrets: returns the values that must not appear in errors and notices.
        clock: measures time.
    """

    def __init__(
        self,
        flows: Flows,
        room: Quota,
        workers: Workers,
        *,
        open_server: bool = False,
        may_pause_billing: Callable[[], bool] = lambda: False,
        on_notice: Callable[[QueueNotice, Promise], None] = lambda _notice, _promise: None,
        on_trouble: Callable[[str, str], None] = lambda _request_type, _words: None,
        read_timeout_s: float = POLL_TIMEOUT_S,
        secrets: Callable[[], Iterable[Secret]] = tuple,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.flows = flows
        self.room = room
        self.workers = workers
        self.open_server = open_server
        self.may_pause_billing = may_pause_billing
        self.on_notice = on_notice
        self.on_trouble = on_trouble
        self.read_timeout_s = read_timeout_s
        self.secrets = secrets
        self.clock = clock

    def fetch(
        self,
        promise: Promise,
        future: APIFuture[T],
        decode: Decode[T],
        *,
        deadline_at: float = math.inf,
    ) -> Task:
        """Begin to poll for the result of a promise, which ends `future`. Return the task of the polls.

        Any thread may call this method, which does not wait.

        Args:
            promise: the promise to poll for.
            future: the future of the call.
            decode: makes the result from the answer, on the thread of the reactor or a worker that helps it;
                an exception that it raises fails the future.
            deadline_at: the deadline, in seconds of the clock; the future then fails.
        """
        return self.flows.start(_fetch(self, promise, future, decode, deadline_at), future)


def _fetch(
    polls: Polls,
    promise: Promise,
    future: APIFuture[T],
    decode: Decode[T],
    deadline_at: float,
) -> Flow[T]:
    try:
        return (yield from poll(polls, promise, future, decode, deadline_at))
    except GoneError as gone:
        raise gone.error from None


def poll(  # noqa: C901  # a life from beginning to end is easier to read in one piece
    polls: Polls,
    promise: Promise,
    future: APIFuture[Any],
    decode: Decode[T],
    deadline_at: float = math.inf,
) -> Flow[T]:
    """Poll until the server has the result of a promise, and return the result. The flow of one call.

    Args:
        polls: what the polls of the client share.
        promise: the promise.
        future: shows the progress.
        decode: makes the result. If it finds the result odd, it is asked for once more, on a new connection:
            it may be the answer to another poll, on a connection that is an answer behind.
        deadline_at: the deadline, in seconds of the clock.

    Raises:
        GoneError: the server has forgotten the promise.
        TinkerError: there is no result.
    """
    clock, room = polls.clock, polls.room
    began_at = asked_at = clock.now()
    held_bytes: int | None = None
    odd: Exception | None = None
    large = False  # the last answer
    trouble: Trouble | None = None  # the failures since the last good answer
    announced = promise.announced_bytes
    retrieval = Retrieval(
        promise.request_id,
        promise.request_type,
        wants_proto=promise.wants_proto,
        roundtrip_s=promise.roundtrip_s,
        open_server=polls.open_server,
        allow_metadata_only=not announced,
        may_pause_billing=polls.may_pause_billing,
        secrets=polls.secrets,
    )

    action: Action = TakeBytes(announced) if announced else retrieval.ask()
    try:
        while True:
            if isinstance(action, Ask):
                asked_at = clock.now()
                left_s = deadline_at - asked_at
                if left_s <= 0:
                    raise _late(retrieval, clock.now() - began_at)
                outcome = yield Call(
                    path=PATH,
                    body=action.body,
                    headers=action.headers,
                    sdk_method=promise.sdk_method,
                    accept=_PROTO_FIRST if promise.wants_proto else "application/json",
                    read_s=polls.read_timeout_s,
                    deadline_s=None if left_s == math.inf else left_s,
                    max_retries=0,
                    fresh=odd is not None,
                    answer_bytes=promise.result_bytes,
                )
                now = clock.now()
                if isinstance(outcome, SendFailed) and now >= deadline_at:
                    raise _late(retrieval, clock.now() - began_at)
                large = isinstance(outcome, Reply) and len(outcome.body) > _LARGE_BYTES
                if large:
                    read = partial(retrieval.on, outcome, asked_at=asked_at, now=now)
                    action = yield from polls.flows.on_worker(polls.workers, read)
                else:
                    action = retrieval.on(outcome, asked_at=asked_at, now=now)
                if retrieval.notice is not None:
                    _pass_on(retrieval.notice, polls, promise, future)
                if trouble is not None or retrieval.trouble_since is not None:
                    trouble = _show_trouble(retrieval, action, trouble, polls, promise, future, now)
            elif isinstance(action, Finished):
                try:
                    if large:
                        make = partial(decode, action.reply, action.tree)
                        return (yield from polls.flows.on_worker(polls.workers, make))
                    return decode(action.reply, action.tree)
                except (WireError, InvalidInputError) as cause:
                    first, odd = (
                        odd is None,
                        _odd_result(promise, retrieval, action.reply, cause, polls.secrets),
                    )
                if not first:
                    raise odd
                action = retrieval.ask()
            elif isinstance(action, Wait):
                if clock.now() + clock.shorten(action.delay_s) >= deadline_at:
                    raise _late(retrieval, clock.now() - began_at)
                yield action.delay_s
                action = retrieval.ask()
            elif isinstance(action, TakeBytes):
                if not (yield from room.take(action.size, deadline_at - clock.now())):
                    raise _late(retrieval, clock.now() - began_at)
                held_bytes = action.size
                action = retrieval.ask()
            elif isinstance(action, Gone) and odd is None:
                raise GoneError(action.error)
            else:
                raise odd or action.error
    finally:
        if held_bytes is not None:
            room.give_back(held_bytes)


def _pass_on(notice: QueueNotice, polls: Polls, promise: Promise, future: APIFuture[Any]) -> None:
    """Show a report on the queue of the server in the status of the future, and pass it on."""
    if notice.state.paused:
        future._mark_paused(notice.reason or notice.state.value)
    else:
        future._mark_waiting()
    polls.on_notice(notice, promise)


def _show_trouble(
    retrieval: Retrieval,
    action: object,
    trouble: Trouble | None,
    polls: Polls,
    promise: Promise,
    future: APIFuture[Any],
    now: float,
) -> Trouble | None:
    """Log failures of polls that last, and show them in the status of the future while they last."""
    if retrieval.trouble_since is None:
        if future.status().state is FutureState.WAITING:
            future._mark_waiting()
        return None
    if isinstance(action, Wait):
        trouble = trouble or Trouble()
        if trouble.is_due(now, action.delay_s):
            polls.on_trouble(promise.request_type, retrieval.trouble)
        if now + action.delay_s - retrieval.trouble_since >= QUIET_S:
            future._mark_waiting(retrieval.trouble)
    return trouble


def _late(retrieval: Retrieval, waited_s: float) -> DeadlineError:
    return DeadlineError(
        f"no result of {retrieval.request_type} within the deadline",
        request_id=retrieval.request_id,
        method="POST",
        path=PATH,
        attempts=retrieval.iteration,
        waited_s=waited_s,
        last_words=retrieval.last_words,
    )


def _odd_result(
    promise: Promise,
    retrieval: Retrieval,
    reply: Reply,
    cause: WireError | InvalidInputError,
    secrets: Callable[[], Iterable[Secret]],
) -> Exception:
    redact_exception(cause, reply.body, secrets())
    error = APIResponseValidationError(
        f"the result of {promise.sdk_method or promise.request_type} cannot be used: {cause}",
        status_code=reply.status,
        request_id=promise.request_id,
        method="POST",
        path=PATH,
        attempts=retrieval.iteration,
    )
    error.__cause__ = cause
    return error


# ------------------------------------------------------------------------------------------ notices


class QueueReport(NamedTuple):
    """A report of the server on the queue of a request that is not done.

    >>> QueueReport(QueueState.PAUSED_CAPACITY, None, "Sample", "req-1").state.paused
    True
    """

    state: QueueState
    reason: str | None
    """The reason in the server's words, or the name of a state that this package does not know."""
    request_type: str
    request_id: str


Listener = Callable[[QueueReport], object]


class Notices:
    """A distributor of reports on queues to the log and to listeners. Thread-safe.

    Args:
        clock: measures time.
        run: runs a job on a worker; None: listeners run on the thread that publishes.
        events: the stream of the client, which also gets the reports.
    """

    def __init__(
        self, clock: Clock = SYSTEM_CLOCK, run: Submit | None = None, events: Events | None = None
    ) -> None:
        self._clock = clock
        self._events = events or Events()
        self._run = run
        self._to_tell = InOrder(run)
        # For the thread that resumes the flows.
        self._logged_at: dict[tuple[str, QueueState | None], float] = {}
        # Any thread adds and removes; each is one step of the interpreter, as is a copy.
        self._listeners: dict[object, Listener] = {}

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Add a listener that gets every report. Return a function that removes it."""
        key = object()
        self._listeners[key] = listener

        def stop() -> None:
            self._listeners.pop(key, None)

        return stop

    def publish(self, notice: QueueNotice, request_type: str, request_id: str) -> None:
        """Pass a report to every listener, on a worker.

        If the queue is paused, also log the report, at most once a minute for each kind of request and state.
        An exception of a listener is logged and not raised.
        """
        report = QueueReport(notice.state, notice.reason, request_type, request_id)
        if report.state.paused:
            self._log(report)
        self._events.notify(report)
        for listener in list(self._listeners.values()):
            self._to_tell.run(partial(_tell, listener, report))

    def log_trouble(self, request_type: str, words: str) -> None:
        """Log that polls for results keep failing, at most once a minute for each kind of request."""
        if self._is_due((request_type, None)):
            _log.warning("polls for a result of %s keep failing: %s; still trying", request_type, words)

    def _is_due(self, key: tuple[str, QueueState | None]) -> bool:
        now = self._clock.now()
        due = now - self._logged_at.get(key, -math.inf) >= LOG_EVERY_S
        if due:
            self._logged_at[key] = now
        return due

    def _log(self, report: QueueReport) -> None:
        if not self._is_due((report.request_type, report.state)):
            return
        reason = report.reason or _NO_REASON.get(report.state, "the server gave no reason")
        _log.warning("%s requests are paused (%s): %s; waiting", report.request_type, report.state, reason)

    def renew_after_fork(self) -> None:
        """Drop the reports that a worker of the parent passes on."""
        self._to_tell = InOrder(self._run)


def _tell(listener: Listener, report: QueueReport) -> None:
    try:
        listener(report)
    except Exception:  # noqa: BLE001  # the listener is the user's code
        _log.exception("an observer of queue states failed")
