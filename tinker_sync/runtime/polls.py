"""Polls for results: the flow `poll`, and what becomes of the server's reports on its queues.

    value = yield from poll(polls, promise, future, decode, deadline_at)

A `Retrieval` makes the polls for one promise, and decides what follows from each answer. It does no I/O: it
has no socket, thread or clock. The flow sends the polls, waits, holds the bytes of a large result, and marks
the progress of the future.

A retrieval ends with the result, a failure that the server reports, a status that refuses the poll or means
that the promise is forgotten, a few invalid answers, a connection failure that a retry cannot mend, failures
that last longer than `TROUBLE_LIMIT_S`, or the deadline, which `poll` keeps. A long poll that expires and a
paused queue do not end it.

The log gets the reports of paused queues: at most one line a minute for each kind of request and state,
however many requests wait. Listeners get every report, in order, on workers.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from json.encoder import encode_basestring_ascii
from typing import Any, Final, NamedTuple, TypeVar

from attrs import define, field

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.events import Events
from tinker_sync._base.log import Log
from tinker_sync._base.naming import current
from tinker_sync._base.policy import (
    BLOCKED_PAUSE_S,
    EMPTY_400,
    EQUAL_ERRORS,
    FIRST_S,
    UNREADABLE,
    Ledger,
    Meaning,
    Stage,
    delay_s,
    rule_for,
)
from tinker_sync._base.secret import HeaderMap, Secret, mask_text
from tinker_sync.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    CredentialError,
    DeadlineError,
    InvalidInputError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
    WireError,
)
from tinker_sync.runtime.admission import ModelPause
from tinker_sync.runtime.calls import redact_exception
from tinker_sync.runtime.flows import Flow, Flows, Quota, Task
from tinker_sync.runtime.futures import APIFuture, FutureState, Submit
from tinker_sync.runtime.workers import InOrder, Workers
from tinker_sync.transport.call import ANSWER_BYTES, Call, Reply, SendFailed
from tinker_sync.transport.retries import QUIET_S, Trouble, retry_after_s
from tinker_sync.types.future import QueueState
from tinker_sync.wire import json as wire_json

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

PATH: Final = "/api/v1/retrieve_future"

# Templates are faster than encoding the whole body for each of the many polls: only the id is encoded.
_METADATA_TOO: Final = b'{"request_id":%b,"allow_metadata_only":true}'
_RESULT_ONLY: Final = b'{"request_id":%b,"allow_metadata_only":false}'
# Trouble is measured from the first failure since the last good answer, so healthy polls do not count.
TROUBLE_LIMIT_S: Final = 300.0
# A server that answers faster does not hold the poll. Without a pause the client would ask thousands of times
# a second.
FLOOR_S: Final = 0.2
_LONGEST_QUICK_PAUSE_S: Final = 5.0
_NOT_READY_PAUSE_S: Final = 1.0
_BAD_POLL_PAUSE_S: Final = 0.25
_COMPARED_BYTES: Final = 4096

_log = Log("tinker_sync.queue")


class Ask(NamedTuple):
    """A poll: a request with these headers and this body."""

    headers: HeaderMap
    body: bytes


class TakeBytes(NamedTuple):
    """The action to reserve `size` bytes of the budget for answers, and then to poll again."""

    size: int


@define
class Finished:
    """The end of a retrieval with a result. `tree` is its parsed JSON, or None if it is protobuf."""

    reply: Reply
    tree: Any = field(repr=False)


class GoneError(Exception):
    """The server has forgotten a promise, so only a new submission can help. `error` is for the user."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class QueueNotice(NamedTuple):
    """The state of the queue of a request that is not done, with the server's reason if it gave one."""

    state: QueueState
    reason: str | None


@define(eq=False, weakref_slot=False)
class Retrieval:
    """A state machine that polls for the result of one promise. For one thread at a time.

    Args:
        request_id: the id of the promise.
        request_type: the server's name of the request in a header, such as "Sample".
        wants_proto: True if the result may come as protobuf.
        roundtrip_s: the time from the call to the receipt of the promise, sent to the server once.
        open_server: True for a server that reports a failed request by a 400 or 422.
        allow_metadata_only: True if the server may answer with the size of the result in place of the
            result; set to False once it has done so.
        may_pause_billing: returns True if the poll is to be repeated after a 402; called at each 402.
        draw: returns the jitter, from 0 to 1.
        wall: returns the seconds since the epoch, for a pause until a date.
        secrets: returns the secrets to mask in errors and notices, because the server may repeat them.

    >>> retrieval = Retrieval("req-1", "OptimStep")
    >>> retrieval.ask().body
    b'{"request_id":"req-1","allow_metadata_only":true}'
    """

    request_id: str
    request_type: str
    wants_proto: bool = field(default=False, kw_only=True)
    roundtrip_s: float | None = field(default=None, kw_only=True)
    open_server: bool = field(default=False, kw_only=True)
    allow_metadata_only: bool = field(default=True, kw_only=True)
    may_pause_billing: Callable[[], bool] = field(default=lambda: False, kw_only=True)
    draw: Callable[[], float] = field(default=random.random, kw_only=True)
    wall: Callable[[], float] = field(default=time.time, kw_only=True)
    secrets: Callable[[], Iterable[Secret]] = field(default=tuple, kw_only=True)

    iteration: int = field(default=0, init=False)
    """The number of polls so far."""
    last_words: str = field(default="", init=False)
    """The last report of the server or of a failure to reach it, for the error of a deadline."""
    trouble_since: float | None = field(default=None, init=False)
    """The time of the first failure since the last good answer; None if there was none."""
    trouble: str = field(default="", init=False)
    """The text of the newest of these failures; of use only while `trouble_since` is not None."""
    notice: QueueNotice | None = field(default=None, init=False)
    """The report of the latest answer on the queue of the server; None if it had none."""
    _paused_s: float = field(default=0.0, init=False)  # the pauses since `trouble_since`
    _failures: int = field(default=0, init=False)
    _connection_failures: int = field(default=0, init=False)
    _equal_errors: int = field(default=0, init=False)
    _last_error: bytes = field(default=b"", init=False)
    _quick_polls: int = field(default=0, init=False)
    _doubts: Ledger | None = field(default=None, init=False)  # none is made for most results

    def ask(self) -> Ask:
        """Return the next poll, and count it."""
        roundtrip_s = self.roundtrip_s if self.iteration == 0 else None
        # Two digits, so that thousands of polls that are held share few maps of headers.
        rounded = "" if roundtrip_s is None else f"{roundtrip_s:.2g}"
        headers = _headers(self.iteration, self.request_type, rounded)
        self.iteration += 1
        body = _METADATA_TOO if self.allow_metadata_only else _RESULT_ONLY
        return Ask(headers, body % encode_basestring_ascii(self.request_id).encode("ascii"))

    def on(self, outcome: Reply | SendFailed, *, asked_at: float, now: float) -> Finished | TakeBytes | float:
        """Return what follows from an answer or a failure to get one: the result, or bytes to reserve, or the
        pause before the next poll.

        Args:
            outcome: the answer, or the failure of the transport.
            asked_at: the time at which the request was sent, by the clock of `now`.
            now: the time at which the answer came.

        Raises:
            GoneError: the server has forgotten the promise.
            TinkerError: there is no result.
        """
        self.notice = None
        if isinstance(outcome, SendFailed):
            return self._on_no_answer(outcome, asked_at, now)
        if 200 <= outcome.status < 300:
            return self._on_success(outcome, asked_at, now)
        return self._on_status(outcome, asked_at, now)

    # -------------------------------------------------------------------------------------- no answer

    def _on_no_answer(self, failed: SendFailed, asked_at: float, now: float) -> float:
        self.last_words = str(failed)
        if failed.timed_out and failed.maybe_received:
            # The server has the poll and holds it longer than the read timeout. Nothing is wrong.
            return self._poll_again(asked_at, now)
        cause = failed.__cause__
        if isinstance(cause, CredentialError):
            # The submission had a key, so a new key may be available soon.
            return self._back_off_connection(now, lambda: cause)
        if failed.final:
            raise self._connection_error(failed)
        return self._back_off_connection(now, lambda: self._connection_error(failed))

    def _back_off_connection(self, now: float, error: Callable[[], Exception]) -> float:
        self._connection_failures += 1
        pause_s = delay_s(self._connection_failures, draw=self.draw(), first_s=1.0)
        return self._wait_out(now, pause_s, error)

    def _connection_error(self, failed: SendFailed) -> Exception:
        if isinstance(failed.__cause__, MemoryError):
            no_memory = TinkerError(f"there was no memory for the result of request {self.request_id}")
            no_memory.__cause__ = failed.__cause__
            return no_memory
        why = self._mask(str(failed))
        error = APIConnectionError(
            f"no answer while waiting for the result of request {self.request_id}: {why}",
            request_id=self.request_id,
            method="POST",
            path=PATH,
            attempts=self.iteration,
        )
        error.__cause__ = failed
        return error

    def _wait_out(self, now: float, pause_s: float, error: Callable[[], Exception]) -> float:
        if self.trouble_since is None:
            self.trouble_since = now
        found = error()
        # A clock may shorten pauses; they count in full, so that the number of polls stays the same.
        if max(now - self.trouble_since, self._paused_s) + pause_s > TROUBLE_LIMIT_S:
            raise found
        self._paused_s += pause_s
        self.trouble = str(found)
        return pause_s

    def _forget_trouble(self) -> None:
        self.trouble_since, self._paused_s = None, 0.0
        self._connection_failures = self._failures = self._equal_errors = 0

    def _forget_doubts(self) -> None:
        """Forget earlier doubtful answers, because the server has just shown that it works on the promise.

        A call of hours may meet a bad page of a proxy now and then.
        """
        self._doubts = None

    @property
    def _ledger(self) -> Ledger:
        if self._doubts is None:
            self._doubts = Ledger(Stage.RETRIEVE)
        return self._doubts

    def _poll_again(self, asked_at: float, now: float) -> float:
        """Return the pause before a new poll: 0 if the server held the last one."""
        self._forget_trouble()
        if now - asked_at >= FLOOR_S:
            self._quick_polls = 0
            return 0.0
        self._quick_polls += 1
        return delay_s(self._quick_polls, draw=self.draw(), first_s=FLOOR_S, longest_s=_LONGEST_QUICK_PAUSE_S)

    # -------------------------------------------------------------------------------------- 2xx

    def _on_success(self, reply: Reply, asked_at: float, now: float) -> Finished | TakeBytes | float:
        if "application/x-protobuf" in reply.headers.get("content-type", "").lower():
            if reply.may_be_cut:
                # A protobuf message that is cut between two fields is still a valid message.
                return self._on_odd(reply, now, "it states no length, so it may have been cut")
            return Finished(reply, None)
        try:
            tree = wire_json.loads(reply.body)
        except WireError as error:
            return self._on_odd(reply, now, str(redact_exception(error, reply.body, self.secrets())))
        if not isinstance(tree, dict):
            return self._on_odd(reply, now, f"expected an object, got {type(tree).__name__}")
        if tree.get("request_id", self.request_id) != self.request_id:
            return self._on_odd(reply, now, "it is the result of another request")
        self._forget_trouble()
        if tree.get("type") == "try_again":
            self._forget_doubts()
            self._notice(tree)
            return self._poll_again(asked_at, now)
        if tree.get("status") == "complete_metadata":
            return self._on_metadata(reply, tree, now)
        self._raise_failure(tree)
        return Finished(reply, tree)

    def _on_metadata(self, reply: Reply, tree: dict[str, Any], now: float) -> TakeBytes | float:
        if not self.allow_metadata_only:
            return self._on_odd(reply, now, "the size of the result, once more, in place of the result")
        self.allow_metadata_only = False
        self._forget_doubts()
        size = tree.get("response_payload_size")
        return TakeBytes(size if isinstance(size, int) and size > 0 else 0)

    def _raise_failure(self, tree: dict[str, Any]) -> None:
        message = tree.get("error")
        if message is None and tree.get("type") == "RequestFailedResponse":
            message = tree.get("error_message") or "the server gave no reason"
        if message is not None:
            category = tree.get("category")
            raise self._request_failed(str(message), category if isinstance(category, str) else None)

    def _request_failed(self, message: str, category: str | None) -> RequestFailedError:
        return RequestFailedError(
            self._mask(message), self.request_id, RequestErrorCategory(category or "unknown")
        )

    def _on_odd(self, reply: Reply, now: float, what: str) -> float:
        """Return the pause after an invalid answer: poll a few more times, then fail.

        The answer may come from a proxy.
        """
        self.last_words = what
        error = APIResponseValidationError(
            f"the result of request {self.request_id} does not have the expected form: {what}",
            response=None,
            status_code=reply.status,
            request_id=self.request_id,
            method="POST",
            path=PATH,
            attempts=self.iteration,
        )
        if self._ledger.is_spent(UNREADABLE):
            raise error
        pause_s = delay_s(self._ledger.count(UNREADABLE), draw=self.draw(), first_s=1.0)
        return self._wait_out(now, pause_s, lambda: error)

    def _notice(self, tree: Mapping[str, Any]) -> None:
        name, reason = tree.get("queue_state"), tree.get("queue_state_reason")
        state = QueueState(name)
        if state is QueueState.UNKNOWN and isinstance(name, str) and not isinstance(reason, str):
            reason = name  # a state of a newer server
        self.notice = notice = QueueNotice(state, self._mask(reason) if isinstance(reason, str) else None)
        self.last_words = f"queue {notice.state.value}" + (f": {notice.reason}" if notice.reason else "")

    # -------------------------------------------------------------------------------------- other statuses

    def _on_status(self, reply: Reply, asked_at: float, now: float) -> float:
        self.last_words = f"status {reply.status}"
        status = EMPTY_400 if reply.status == 400 and not reply.body else reply.status
        rule = rule_for(status, Stage.RETRIEVE)
        if rule.meaning is Meaning.BLOCKED:
            if self.may_pause_billing():
                return BLOCKED_PAUSE_S
        elif rule.meaning is Meaning.NO_NEWS:
            return self._on_expired_poll(reply, asked_at, now)
        elif rule.passes:
            if not self._ledger.is_spent(status):
                return self._on_passing(reply, now)
        elif rule.meaning is Meaning.SUSPECT:
            return self._on_suspect(reply)
        elif rule.meaning is Meaning.FORGOTTEN:
            raise GoneError(self._status_error(reply))
        elif rule.meaning is Meaning.NOT_READY:
            self._forget_trouble()
            self._forget_doubts()
            return delay_s(1, draw=self.draw(), first_s=_NOT_READY_PAUSE_S)
        raise self._status_error(reply)

    def _on_expired_poll(self, reply: Reply, asked_at: float, now: float) -> float:
        try:
            tree = wire_json.loads(reply.body)
        except WireError:
            tree = None
        if tree is not None:
            self._forget_doubts()
        if isinstance(tree, dict):
            self._notice(tree)
        return self._poll_again(asked_at, now)

    def _on_passing(self, reply: Reply, now: float) -> float:
        wish_s = retry_after_s(reply.headers, self.wall()) if reply.status == 429 else None
        if wish_s is not None:
            # The server asks for this pause, so it is not trouble, however long. A deadline may end it.
            return wish_s
        if reply.status < 500:
            return self._back_off_connection(now, lambda: self._status_error(reply))
        self._failures += 1
        last, self._last_error = self._last_error, bytes(reply.body[:_COMPARED_BYTES])
        self._equal_errors = self._equal_errors + 1 if self._last_error == last else 1
        if self.open_server and reply.status == 500 and self._equal_errors >= EQUAL_ERRORS:
            error = self._status_error(reply)
            if isinstance(error.body, dict):
                raise error
        pause_s = delay_s(self._failures, draw=self.draw())
        return self._wait_out(now, pause_s, lambda: self._status_error(reply))

    def _on_suspect(self, reply: Reply) -> float:
        """Return the pause after a doubtful status: poll a few more times, then fail.

        An open server reports a failed request by a repeated 400 or 422. For other servers, the first 422
        ends the retrieval.
        """
        reports = reply.status in (400, 422)
        if reply.status == 422 and not self.open_server:
            raise self._status_error(reply)
        spent = self._ledger.is_spent(reply.status)
        count = self._ledger.count(400, 422) if reports else self._ledger.count(reply.status)
        if reports and self.open_server and count > 1:
            raise self._reported_failure(reply)
        if spent:
            raise self._status_error(reply)
        first_s = _BAD_POLL_PAUSE_S if reports else FIRST_S
        return delay_s(count, draw=self.draw(), first_s=first_s)

    def _reported_failure(self, reply: Reply) -> Exception:
        """Return the error for a failure that an open server reports by a status. Its category is unknown."""
        error = self._status_error(reply)
        failed = self._request_failed(error.message, None)
        failed.__cause__ = error
        return failed

    def _status_error(self, reply: Reply) -> APIStatusError:
        return APIStatusError.from_reply(
            reply.status,
            dict(reply.headers),
            reply.body,
            request_id=self.request_id,
            method="POST",
            path=PATH,
            attempts=self.iteration,
            secrets=self.secrets(),
        )

    def _mask(self, text: str) -> str:
        return mask_text(text, self.secrets())


@lru_cache(maxsize=512)
def _headers(iteration: int, request_type: str, roundtrip_s: str) -> HeaderMap:
    """Return the headers of a poll. Equal arguments share one map."""
    headers = {"X-Tinker-Request-Iteration": str(iteration), "X-Tinker-Request-Type": request_type}
    if roundtrip_s:
        headers["X-Tinker-Create-Promise-Roundtrip-Time"] = roundtrip_s
    return HeaderMap(headers)


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
    began_at = clock.now()
    held_bytes: int | None = None
    odd: Exception | None = None
    trouble: Trouble | None = None  # the failures since the last good answer
    announced = promise.announced_bytes or None  # to be reserved before the next poll
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

    pause_s = 0.0
    try:
        while True:
            if announced is not None:
                if not (yield from room.take(announced, deadline_at - clock.now())):
                    raise _late(retrieval, clock.now() - began_at)
                held_bytes, announced = announced, None
            if pause_s > 0:
                if clock.now() + clock.shorten(pause_s) >= deadline_at:
                    raise _late(retrieval, clock.now() - began_at)
                yield pause_s
            headers, body = retrieval.ask()
            asked_at = clock.now()
            left_s = deadline_at - asked_at
            if left_s <= 0:
                raise _late(retrieval, clock.now() - began_at)
            outcome = yield Call(
                path=PATH,
                body=body,
                headers=headers,
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
            try:
                if large:
                    read = partial(retrieval.on, outcome, asked_at=asked_at, now=now)
                    found = yield from polls.flows.on_worker(polls.workers, read)
                else:
                    found = retrieval.on(outcome, asked_at=asked_at, now=now)
            except Exception:
                if odd is not None:
                    raise odd from odd.__cause__
                raise
            pause_s = 0.0 if isinstance(found, (Finished, TakeBytes)) else found
            if retrieval.notice is not None:
                _pass_on(retrieval.notice, polls, promise, future)
            if trouble is not None or retrieval.trouble_since is not None:
                trouble = _show_trouble(retrieval, pause_s, trouble, polls, promise, future, now)
            if isinstance(found, TakeBytes):
                announced = found.size
            elif isinstance(found, Finished):
                try:
                    if large:
                        make = partial(decode, found.reply, found.tree)
                        return (yield from polls.flows.on_worker(polls.workers, make))
                    return decode(found.reply, found.tree)
                except (WireError, InvalidInputError) as cause:
                    if odd is not None:
                        raise _odd_result(promise, retrieval, found.reply, cause, polls.secrets)  # noqa: B904
                    odd = _odd_result(promise, retrieval, found.reply, cause, polls.secrets)
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
    pause_s: float,
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
    if pause_s > 0:
        trouble = trouble or Trouble()
        if trouble.is_due(now, pause_s):
            polls.on_trouble(promise.request_type, retrieval.trouble)
        if now + pause_s - retrieval.trouble_since >= QUIET_S:
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
