"""`Retrieval`: makes the polls for the result of one promise, and decides on the action after each answer.

It does no I/O: it has no socket, thread or clock. `Retrieval.ask` returns the request to send. `Retrieval.on`
takes the outcome and returns the next action. The flow `polls.poll` sends and waits.

A retrieval ends with the result, a failure that the server reports, a status that refuses the poll or means
that the promise is forgotten, a few invalid answers, a connection failure that a retry cannot mend, failures
that last longer than `TROUBLE_LIMIT_S`, or the deadline, which `polls.poll` keeps. A long poll that expires
and a paused queue do not end it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attrs import define, field

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
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
    WireError,
)
from tinker_sync.runtime.failures import redact_exception
from tinker_sync.transport.call import Reply, SendFailed
from tinker_sync.transport.retries import retry_after_s
from tinker_sync.types.future import QueueState
from tinker_sync.wire import json as wire_json

if TYPE_CHECKING:
    from typing import TypeAlias

PATH: Final = "/api/v1/retrieve_future"

# Templates are faster than encoding the whole body for each of the many polls: only the id is encoded.
_METADATA_TOO: Final = b'{"request_id":%b,"allow_metadata_only":true}'
_RESULT_ONLY: Final = b'{"request_id":%b,"allow_metadata_only":false}'
_ROUNDTRIP: Final = "X-Tinker-Create-Promise-Roundtrip-Time"
# Trouble is measured from the first failure since the last good answer, so healthy polls do not count.
TROUBLE_LIMIT_S: Final = 300.0
# A server that answers faster does not hold the poll. Without a pause the client would ask thousands of times
# a second.
FLOOR_S: Final = 0.2
_LONGEST_QUICK_PAUSE_S: Final = 5.0
_NOT_READY_PAUSE_S: Final = 1.0
_BAD_POLL_PAUSE_S: Final = 0.25
_COMPARED_BYTES: Final = 4096


class Ask(NamedTuple):
    """The action to poll now: to send a request with these headers and this body."""

    headers: HeaderMap
    body: bytes


class Wait(NamedTuple):
    """The action to back off for a time, and then to poll again."""

    delay_s: float
    why: str


class TakeBytes(NamedTuple):
    """The action to reserve `size` bytes of the budget for answers, and then to poll again."""

    size: int


@define
class Finished:
    """The end of a retrieval with a result. `tree` is its parsed JSON, or None if it is protobuf."""

    reply: Reply
    tree: Any = field(repr=False)


class Failed(NamedTuple):
    """The end of a retrieval without a result."""

    error: Exception


class Gone(NamedTuple):
    """The end of a retrieval whose promise the server has forgotten; only a new submission can help."""

    error: Exception


Action: TypeAlias = "Ask | Wait | TakeBytes | Finished | Failed | Gone"


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
        lines = _usual_lines(self.iteration, self.request_type)
        if self.iteration == 0 and self.roundtrip_s is not None:
            lines = {**lines, "x-tinker-create-promise-roundtrip-time": (_ROUNDTRIP, repr(self.roundtrip_s))}
        self.iteration += 1
        body = _METADATA_TOO if self.allow_metadata_only else _RESULT_ONLY
        return Ask(HeaderMap.of_lines(lines), body % encode_basestring_ascii(self.request_id).encode("ascii"))

    def on(self, outcome: Reply | SendFailed, *, asked_at: float, now: float) -> Action:
        """Return the action that follows from an answer or a failure to get one.

        Args:
            outcome: the answer, or the failure of the transport.
            asked_at: the time at which the request was sent, by the clock of `now`.
            now: the time at which the answer came.
        """
        self.notice = None
        if isinstance(outcome, SendFailed):
            return self._on_no_answer(outcome, asked_at, now)
        if 200 <= outcome.status < 300:
            return self._on_success(outcome, asked_at, now)
        return self._on_status(outcome, asked_at, now)

    # -------------------------------------------------------------------------------------- no answer

    def _on_no_answer(self, failed: SendFailed, asked_at: float, now: float) -> Action:
        self.last_words = str(failed)
        if failed.timed_out and failed.maybe_received:
            # The server has the poll and holds it longer than the read timeout. Nothing is wrong.
            return self._poll_again(asked_at, now)
        cause = failed.__cause__
        if isinstance(cause, CredentialError):
            # The submission had a key, so a new key may be available soon.
            return self._back_off_connection(now, lambda: cause)
        if failed.final:
            return Failed(self._connection_error(failed))
        return self._back_off_connection(now, lambda: self._connection_error(failed))

    def _back_off_connection(self, now: float, error: Callable[[], Exception]) -> Action:
        self._connection_failures += 1
        pause_s = delay_s(self._connection_failures, draw=self.draw(), first_s=1.0)
        return self._wait_out(now, pause_s, "no answer", error)

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

    def _wait_out(self, now: float, pause_s: float, why: str, error: Callable[[], Exception]) -> Action:
        if self.trouble_since is None:
            self.trouble_since = now
        found = error()
        # A clock may shorten pauses; they count in full, so that the number of polls stays the same.
        if max(now - self.trouble_since, self._paused_s) + pause_s > TROUBLE_LIMIT_S:
            return Failed(found)
        self._paused_s += pause_s
        self.trouble = str(found)
        return Wait(pause_s, why)

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

    def _poll_again(self, asked_at: float, now: float) -> Action:
        """Return the action of a new poll: at once if the server held the last one, else after a pause."""
        self._forget_trouble()
        if now - asked_at >= FLOOR_S:
            self._quick_polls = 0
            return self.ask()
        self._quick_polls += 1
        pause_s = delay_s(
            self._quick_polls, draw=self.draw(), first_s=FLOOR_S, longest_s=_LONGEST_QUICK_PAUSE_S
        )
        return Wait(pause_s, "the long poll came back at once")

    # -------------------------------------------------------------------------------------- 2xx

    def _on_success(self, reply: Reply, asked_at: float, now: float) -> Action:
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
        return self._failure_in(tree) or Finished(reply, tree)

    def _on_metadata(self, reply: Reply, tree: dict[str, Any], now: float) -> Action:
        if not self.allow_metadata_only:
            return self._on_odd(reply, now, "the size of the result, once more, in place of the result")
        self.allow_metadata_only = False
        self._forget_doubts()
        size = tree.get("response_payload_size")
        return TakeBytes(size if isinstance(size, int) and size > 0 else 0)

    def _failure_in(self, tree: dict[str, Any]) -> Action | None:
        message = tree.get("error")
        if message is None and tree.get("type") == "RequestFailedResponse":
            message = tree.get("error_message") or "the server gave no reason"
        if message is None:
            return None
        category = tree.get("category")
        return Failed(self._request_failed(str(message), category if isinstance(category, str) else None))

    def _request_failed(self, message: str, category: str | None) -> RequestFailedError:
        return RequestFailedError(
            self._mask(message), self.request_id, RequestErrorCategory(category or "unknown")
        )

    def _on_odd(self, reply: Reply, now: float, what: str) -> Action:
        """Return the action after an invalid answer: poll a few more times, then fail.

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
            return Failed(error)
        pause_s = delay_s(self._ledger.count(UNREADABLE), draw=self.draw(), first_s=1.0)
        return self._wait_out(now, pause_s, what, lambda: error)

    def _notice(self, tree: Mapping[str, Any]) -> None:
        name, reason = tree.get("queue_state"), tree.get("queue_state_reason")
        state = QueueState(name)
        if state is QueueState.UNKNOWN and isinstance(name, str) and not isinstance(reason, str):
            reason = name  # a state of a newer server
        self.notice = notice = QueueNotice(state, self._mask(reason) if isinstance(reason, str) else None)
        self.last_words = f"queue {notice.state.value}" + (f": {notice.reason}" if notice.reason else "")

    # -------------------------------------------------------------------------------------- other statuses

    def _on_status(self, reply: Reply, asked_at: float, now: float) -> Action:
        self.last_words = f"status {reply.status}"
        status = EMPTY_400 if reply.status == 400 and not reply.body else reply.status
        rule = rule_for(status, Stage.RETRIEVE)
        if rule.meaning is Meaning.BLOCKED:
            failed = not self.may_pause_billing()
            return Failed(self._status_error(reply)) if failed else Wait(BLOCKED_PAUSE_S, "billing")
        if rule.meaning is Meaning.NO_NEWS:
            return self._on_expired_poll(reply, asked_at, now)
        if rule.passes:
            spent = self._ledger.is_spent(status)
            return Failed(self._status_error(reply)) if spent else self._on_passing(reply, now)
        if rule.meaning is Meaning.SUSPECT:
            return self._on_suspect(reply)
        if rule.meaning is Meaning.FORGOTTEN:
            return Gone(self._status_error(reply))
        if rule.meaning is Meaning.NOT_READY:
            self._forget_trouble()
            self._forget_doubts()
            return Wait(delay_s(1, draw=self.draw(), first_s=_NOT_READY_PAUSE_S), "not ready")
        return Failed(self._status_error(reply))

    def _on_expired_poll(self, reply: Reply, asked_at: float, now: float) -> Action:
        try:
            tree = wire_json.loads(reply.body)
        except WireError:
            tree = None
        if tree is not None:
            self._forget_doubts()
        if isinstance(tree, dict):
            self._notice(tree)
        return self._poll_again(asked_at, now)

    def _on_passing(self, reply: Reply, now: float) -> Action:
        wish_s = retry_after_s(reply.headers, self.wall()) if reply.status == 429 else None
        if wish_s is not None:
            # The server asks for this pause, so it is not trouble, however long. A deadline may end it.
            return Wait(wish_s, "status 429")
        if reply.status < 500:
            return self._back_off_connection(now, lambda: self._status_error(reply))
        self._failures += 1
        last, self._last_error = self._last_error, bytes(reply.body[:_COMPARED_BYTES])
        self._equal_errors = self._equal_errors + 1 if self._last_error == last else 1
        if self.open_server and reply.status == 500 and self._equal_errors >= EQUAL_ERRORS:
            error = self._status_error(reply)
            if isinstance(error.body, dict):
                return Failed(error)
        pause_s = delay_s(self._failures, draw=self.draw())
        return self._wait_out(now, pause_s, f"status {reply.status}", lambda: self._status_error(reply))

    def _on_suspect(self, reply: Reply) -> Action:
        """Return the action after a doubtful status: poll a few more times, then fail.

        An open server reports a failed request by a repeated 400 or 422. For other servers, the first 422
        ends the retrieval.
        """
        reports = reply.status in (400, 422)
        if reply.status == 422 and not self.open_server:
            return Failed(self._status_error(reply))
        spent = self._ledger.is_spent(reply.status)
        count = self._ledger.count(400, 422) if reports else self._ledger.count(reply.status)
        if reports and self.open_server and count > 1:
            return Failed(self._reported_failure(reply))
        if spent:
            return Failed(self._status_error(reply))
        first_s = _BAD_POLL_PAUSE_S if reports else FIRST_S
        return Wait(delay_s(count, draw=self.draw(), first_s=first_s), f"status {reply.status}")

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


@lru_cache(maxsize=64)
def _usual_lines(iteration: int, request_type: str) -> Mapping[str, tuple[str, str]]:
    """Return the headers of a poll, (name, value) by lower-case name. Equal arguments share one mapping."""
    return {
        "x-tinker-request-iteration": ("X-Tinker-Request-Iteration", str(iteration)),
        "x-tinker-request-type": ("X-Tinker-Request-Type", request_type),
    }
