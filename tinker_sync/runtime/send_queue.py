"""`SendQueue`: the calls of one training client, sent one after the other under consecutive numbers.

Guarantees

- Operations are sent in the order of the calls of `append` or `put`, from any number of threads.
- Sequence numbers on the wire are 1, 2, 3 ... without a gap. The number of a request is the count of the
  requests sent before it plus one. It is fixed when its operation leaves the queue, in the same step that
  makes the operation the one being sent. Until then the operation can be cancelled, and the operations behind
  it move up. So all of a body but the number is encoded before `append`, and `bytes_for(number)` completes
  it.
- At most one operation is in its send phase. It consists of one or more requests with consecutive numbers,
  which are sent in one of two ways. Serial: each request is sent when the one before it is accepted.
  Parallel: all requests but the first are sent at once, and the first when all the others are accepted. The
  server holds back requests that it cannot run yet, so it sees the batch as a whole. An operation that begins
  with the number of a refused request is always sent in the serial way.
- An operation whose requests are not known yet keeps its place: the operations behind it wait until `fill`
  brings the requests. It uses no number before that. It uses none at all if its future ends first; then the
  operations behind it move up.
- A request that the server refuses uses no number: the next operation gets the number, and the queue goes on.
  The operation fails as a whole, and no more of it is sent. Its unused numbers before an accepted request are
  filled with requests without effect, so that no later operation runs in the middle of this one.
- If it is unknown whether the server has accepted a request, no later number can be right. The future of the
  request fails with the cause. All other futures of the operation, of the queue and of later calls fail at
  once with an `EarlierCallFailedError` that names it.

Assumptions

- `send(part, number, ended)` calls `ended(None)` when the server has accepted the request; other code then
  waits for the result. It calls `ended` with `NotTaken` if the server certainly has not accepted the request,
  and with another failure if that is not known, or raises it. It repeats a request itself, with the same
  bytes. `ended` may be called on any thread; only its first call counts.
- `submit(job)` runs a job on another thread or inline, or raises RuntimeError. It runs every job that it
  accepts.

Threads: any thread may append, cancel and close; sends run on the workers. A queue has no thread of its own,
and no thread waits for its turn: the end of each send starts the next one. Futures are ended and callbacks
run with the lock free. In a forked child the copy refuses work until `take_over`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from attrs import define

from tinker_sync.errors import EarlierCallFailedError, TinkerError, with_words
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import copy_exception
from tinker_sync.runtime.futures import APIFuture, Job, Submit
from tinker_sync.transport.body import PiecedBody

_INHERITED: Final = (
    "this training client belongs to the parent process of a fork: two copies would send different calls "
    "under the same numbers. Call training.take_over() in this process if no other one uses it any more, or "
    "make a training client here"
)

_log: Final = logging.getLogger(__name__)


class Part(Protocol):
    """One request of an operation, encoded except for its number. The queue owns it once it is appended."""

    @property
    def future(self) -> APIFuture[Any]:
        """The future that ends with the answer to this request."""

    def bytes_for(self, number: int) -> bytes | PiecedBody:
        """Return the body with a sequence number. The sender calls this once, and repeats the same bytes."""


PartT = TypeVar("PartT", bound=Part)

Ended = Callable[["BaseException | None"], object]
"""A function that takes the end of a send: None if the server has accepted the request, else the failure."""


@define(eq=False)
class Operation(Generic[PartT]):
    """One call of the user: a name for errors, its requests, and the future that the user holds.

    With a single part `future` is the future of that part; with several parts it combines theirs. `parallel`
    chooses the order of sending. An operation without parts keeps a place in the queue; only the queue sets
    its parts.

    `alone` is for servers that do not keep the order of the calls that they have accepted: the queue sends
    the next operation only when `future` has ended.
    """

    name: str
    parts: Sequence[PartT]
    future: APIFuture[Any]
    parallel: bool = False
    alone: bool = False


class NotTaken(Exception):
    """A failure of a request that the server certainly has not accepted. `__cause__` is the reason."""


class QueueState(Enum):
    """The state of a send queue.

    IDLE -> SENDING      an operation leaves the queue
    SENDING -> IDLE      all its requests are accepted, one is refused, or it was cancelled before; an
                         operation that is `alone` has ended as well
    SENDING -> BROKEN    the server may or may not have one of its requests
    any -> BROKEN        in a forked child, if calls of the parent were under way
    any -> CLOSED        `close`

    Illegal: all moves out of CLOSED; BROKEN -> IDLE or SENDING, because a gap in the numbers cannot be
    repaired; SENDING -> SENDING, because at most one operation is in its send phase.
    """

    IDLE = "idle"
    SENDING = "sending"
    BROKEN = "broken"
    CLOSED = "closed"


# By value, because an enum hashes slowly.
_MOVES = {
    "idle": (QueueState.SENDING, QueueState.CLOSED),
    "sending": (QueueState.IDLE, QueueState.BROKEN, QueueState.CLOSED),
    "broken": (QueueState.CLOSED,),
    "closed": (),
}


def stages(count: int, *, parallel: bool) -> list[Sequence[int]]:
    """Return the indices of an operation's parts, grouped into stages.

    The parts of a stage are sent together.

    >>> [list(stage) for stage in stages(4, parallel=True)]
    [[1, 2, 3], [0]]
    >>> [list(stage) for stage in stages(3, parallel=False)]
    [[0], [1], [2]]
    """
    if parallel and count > 1:
        return [range(1, count), range(1)]
    return [range(index, index + 1) for index in range(count)]


class _Sending(Generic[PartT]):
    """The operation in its send phase. The queue's lock guards all attributes that change."""

    __slots__ = ("first_number", "operation", "refused", "stages", "taken", "under_way")

    def __init__(self, operation: Operation[PartT], first_number: int, *, reused: bool = False) -> None:
        self.operation = operation
        self.first_number = first_number
        # A server does not wait for a number that it has refused before, so the first part has to go first.
        self.stages = deque(stages(len(operation.parts), parallel=operation.parallel and not reused))
        self.under_way: set[int] = set()
        self.taken: set[int] = set()
        self.refused: dict[int, BaseException] = {}  # in the order of the refusals

    def next_stage(self) -> Sequence[int]:
        """Return the indices of the parts to send now; an empty sequence if all have been sent."""
        stage = self.stages.popleft() if self.stages else ()
        self.under_way = set(stage)
        return stage

    def holes(self) -> list[int]:
        """Return the indices of the parts that the server has not accepted, up to the last accepted part."""
        return [index for index in range(max(self.taken, default=0)) if index not in self.taken]


class SendQueue(Generic[PartT]):
    """A queue that sends the operations of one training client in order. Thread-safe.

    >>> from types import SimpleNamespace
    >>> queue = SendQueue(lambda part, number, ended: ended(print("sent", number)), submit=lambda job: job())
    >>> part = SimpleNamespace(future=APIFuture())
    >>> queue.append(Operation("optim_step", [part], part.future))
    sent 1
    >>> queue
    <SendQueue idle, 0 queued, next number 2>
    """

    def __init__(
        self,
        send: Callable[[PartT, int, Ended], object],
        submit: Submit,
        send_nothing: Callable[[int, Ended], object] = lambda _, ended: ended(None),
        follow: Callable[[PartT, Job], bool] = lambda _part, _job: False,
    ) -> None:
        """Make an empty queue.

        Args:
            send: sends a part under a number.
            submit: runs a job on a worker.
            send_nothing: sends a request without effect under a number, in the same way.
            follow: takes a job that sends a part, to run it soon on this thread; returns False if it does not
                take the job.
        """
        self._send = send
        self._submit = submit
        self._send_nothing = send_nothing
        self._follow = follow
        self._lock = threading.Lock()
        self._state = QueueState.IDLE  # guarded by _lock
        self._put: deque[tuple[Operation[PartT], ...]] = (
            deque()
        )  # any thread appends; guarded by _lock beyond
        self._queue: deque[Operation[PartT]] = deque()  # guarded by _lock
        self._sending: _Sending[PartT] | None = None  # guarded by _lock; with its numbers settled
        self._next_number = 1  # guarded by _lock
        self._unused_number = 1  # guarded by _lock; the smallest number that was never used
        self._refusal: Exception | None = (
            None  # guarded by _lock; the failure of new calls, once the queue is broken or closed
        )
        self._inherited = False  # guarded by _lock; in a forked child that has not taken over
        _fork.renew_in_child(self)

    def append(self, operation: Operation[PartT], place: Operation[PartT] | None = None) -> None:
        """Add an operation, and send it when its turn comes.

        This never raises: after a failure or a close the futures of the operation fail. So a script that
        makes several calls and then asks for their results gets the first failure first.

        Args:
            operation: the operation, with its requests.
            place: a second operation, queued right behind the first; its requests are not known yet. Later
                operations wait until `fill` brings its requests, or its future ends.
        """
        assert operation.parts, "an operation without requests"  # noqa: S101
        assert place is None or not place.parts, "nothing to wait for"  # noqa: S101
        self.put(operation, place)
        self.take_in()

    def put(self, operation: Operation[PartT], place: Operation[PartT] | None = None) -> None:
        """Fix the turn of an operation, in one step that Ctrl-C cannot split. `take_in` does the rest.

        Arguments as in `append`.
        """
        # Both in one step, because the first may end before the next step of this thread.
        self._put.append((operation,) if place is None else (operation, place))

    def take_in(self) -> None:
        """Add the operations that were put, and send the first when its turn comes. Never raises."""
        with self._lock:
            refusal, added = (
                self._refusal,
                [each for _ in range(len(self._put)) for each in self._put.popleft()],
            )
            if refusal is None:
                self._queue.extend(added)
        for each in added:
            if refusal is None:
                # A function, because a bound method would be one object more for each queued call.
                each.future.when_done(partial(SendQueue._forget_ended, self, each))
            else:
                _fail(each, refusal)
        if added and refusal is None:
            self._advance()

    def fill(self, operation: Operation[PartT], parts: Sequence[PartT]) -> None:
        """Add the requests of an operation that was queued without any.

        If the operation has left the queue, cancel the requests.
        """
        assert parts, "an operation without requests"  # noqa: S101
        with self._lock:
            kept = operation in self._queue
            if kept:
                operation.parts = parts
        if kept:
            self._advance()
        else:
            for part in parts:
                part.future.cancel()

    @property
    def next_number(self) -> int:
        """The number of the next request that leaves the queue."""
        with self._lock:
            return self._next_number

    def close(self, failure: Exception) -> None:
        """Send nothing more. Fail the queued operations and all later ones with `failure`.

        Only the first call has an effect. Requests that are being sent go on. Their operation also goes on,
        unless it has requests that are still to be sent.
        """
        with self._lock:
            if self._state is QueueState.CLOSED:
                return
            self._move_locked(QueueState.CLOSED)
            self._refusal = failure
            doomed, self._queue = list(self._queue), deque()
            if self._sending is not None and self._sending.stages:
                doomed.insert(0, self._sending.operation)
            self._sending = None
        for operation in doomed:
            _fail(operation, failure)

    def renew_after_fork(self) -> None:
        """Refuse work in a forked child until `take_over`, because two queues would use the same numbers."""
        self._lock = threading.Lock()
        if self._refusal is None:
            if self._state is not QueueState.IDLE or self._queue:
                self._state = QueueState.BROKEN
            self._refusal, self._inherited = TinkerError(_INHERITED), True
        self._put, self._queue, self._sending = deque(), deque(), None

    def refuse_inherited(self) -> None:
        """Raise an error in a forked child that has not called `take_over`.

        Raises:
            TinkerError: the queue belongs to the parent process.
        """
        if self._inherited:
            raise TinkerError(_INHERITED)

    def take_over(self) -> None:
        """Go on with the numbers of the parent process, which must not use them any more.

        Raises:
            EarlierCallFailedError: calls were under way when the process was forked.
        """
        with self._lock:
            if not self._inherited:
                return
            if self._state is QueueState.BROKEN:
                cause = "the process was forked while calls were under way"
                self._refusal = EarlierCallFailedError("a call of the parent process", None, cause)
                self._inherited = False
                refusal = copy_exception(self._refusal)
            else:
                self._refusal, self._inherited = None, False
                return
        raise refusal

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<SendQueue {self._state.value}, {len(self._queue)} queued, next number {self._next_number}>"
            )

    # ---------------------------------------------------- one after the other

    def _advance(self) -> None:
        """Begin the next operation, unless one is being sent or the next one has no requests yet."""
        while (operation := self._take_next()) is not None:
            # `begin` takes the future's lock, so `_lock` is free here. The state keeps other threads out.
            if operation.future.begin():
                self._begin(operation)
                return
            self._pass_over()

    def _take_next(self) -> Operation[PartT] | None:
        with self._lock:
            if self._state is not QueueState.IDLE or not self._queue or not self._queue[0].parts:
                return None
            self._move_locked(QueueState.SENDING)
            return self._queue.popleft()

    def _pass_over(self) -> None:
        """Drop an operation that was cancelled. It gets no number."""
        with self._lock:
            if self._state is QueueState.SENDING:
                self._move_locked(QueueState.IDLE)

    def _begin(self, operation: Operation[PartT]) -> None:
        with self._lock:
            refusal = self._refusal  # set if the queue was closed meanwhile
            reused = self._next_number < self._unused_number
            sending = _Sending(operation, self._next_number, reused=reused)
            stage = sending.next_stage()
            if refusal is None:
                self._sending = sending
                self._next_number += len(operation.parts)
                self._unused_number = max(self._unused_number, self._next_number)
        if refusal is not None:
            _fail(operation, refusal)
        else:
            self._launch(sending, stage)

    def _launch(self, sending: _Sending[PartT], stage: Sequence[int]) -> None:
        for index in stage:
            try:
                job = partial(self._send_one, sending, index)
                # Of several parts on one thread, one that waits for room would hold up the others, which
                # have taken the room.
                if len(stage) > 1 or not self._follow(sending.operation.parts[index], job):
                    self._submit(job)
            except RuntimeError as failure:  # the workers take no more jobs
                self._break(sending, index, failure)

    def _send_one(self, sending: _Sending[PartT], index: int) -> None:
        """Send one part, on a worker."""
        with self._lock:
            # Another part failed, or the queue was closed, before this part was sent.
            refusal = None if self._sending is sending else self._refusal
            stays = bool(sending.refused)
        if refusal is not None:
            _fail(sending.operation, refusal)
            return
        if stays:
            self._end_send(sending, index, None, stays=True)
            return
        part = sending.operation.parts[index]
        part.future.mark_sending()
        ended = partial(self._end_send, sending, index)
        _run(partial(self._send, part, sending.first_number + index), ended)

    def _end_send(
        self, sending: _Sending[PartT], index: int, failure: BaseException | None, *, stays: bool = False
    ) -> None:
        """Record the end of one send. After the last send of a stage, begin the next stage."""
        if failure is not None and not isinstance(failure, NotTaken):
            self._break(sending, index, failure)
            return
        with self._lock:
            if index not in sending.under_way:
                return
            sending.under_way.discard(index)
            if failure is not None:
                sending.refused[index] = failure.__cause__ or failure
            elif not stays:
                sending.taken.add(index)
            over = self._sending is not sending
            last = not sending.under_way
        if over and failure is not None:
            sending.operation.parts[index].future.fail(failure.__cause__ or failure)
        elif last and not over:
            self._end_stage(sending)

    def _end_stage(self, sending: _Sending[PartT]) -> None:
        with self._lock:
            stage = () if sending.refused else sending.next_stage()
        if sending.refused:
            self._take_back(sending)
        elif stage:
            self._launch(sending, stage)
        elif sending.operation.alone:
            sending.operation.future.when_done(lambda _: self._conclude(sending))
        else:
            self._conclude(sending)

    def _conclude(self, sending: _Sending[PartT]) -> None:
        """End the send phase of an operation, and begin the next one."""
        with self._lock:
            if self._sending is not sending:
                return
            self._sending = None
            if sending.refused:
                self._next_number = sending.first_number + max(sending.taken, default=-1) + 1
            self._move_locked(QueueState.IDLE)
        self._advance()

    def _take_back(self, sending: _Sending[PartT]) -> None:
        """Fail an operation that was refused, and leave its unused numbers to the next one."""
        operation = sending.operation
        index, failure = next(iter(sending.refused.items()))
        if sending.taken:
            failure = _partly(failure, len(sending.taken), len(operation.parts))
        self._fill(sending, index, failure, sending.holes(), None)

    def _fill(
        self,
        sending: _Sending[PartT],
        index: int,
        failure: BaseException,
        holes: Sequence[int],
        unfilled: BaseException | None,
    ) -> None:
        """Fill the unused numbers before an accepted request, one by one. Then begin the next operation."""
        if unfilled is not None:
            _log.debug("the number of a refused request could not be filled", exc_info=unfilled)
            self._break(sending, index, failure)
        elif holes:
            number = sending.first_number + holes[0]
            _run(
                partial(self._send_nothing, number),
                partial(self._fill, sending, index, failure, holes[1:]),
            )
        else:
            self._leave_numbers(sending, index, failure)

    def _leave_numbers(self, sending: _Sending[PartT], index: int, failure: BaseException) -> None:
        operation = sending.operation
        operation.parts[index].future.fail(failure)
        for other, cause in sending.refused.items():
            operation.parts[other].future.fail(copy_exception(cause))
        consequence = _consequence(operation, sending.first_number + index, failure)
        for other, part in enumerate(operation.parts):
            if other not in sending.taken:
                part.future.fail(copy_exception(consequence))
        self._conclude(sending)

    def _break(self, sending: _Sending[PartT], index: int, failure: BaseException) -> None:
        operation, number = sending.operation, sending.first_number + index
        # Fail this part with the cause first. A combined future keeps the first failure that it gets, and
        # after the next lines any other part may fail with the consequence.
        operation.parts[index].future.fail(failure)
        refusal = _consequence(operation, number, failure)
        doomed: list[Operation[PartT]] = []
        with self._lock:
            if self._sending is sending:
                self._sending = None
                self._move_locked(QueueState.BROKEN)
                self._refusal = refusal
                doomed, self._queue = [operation, *self._queue], deque()
        for each in doomed:
            _fail(each, refusal)

    def _forget_ended(self, operation: Operation[PartT], future: APIFuture[Any]) -> None:
        """Drop a queued operation and its bodies at once if it was cancelled, or ended without requests."""
        cancelled = future.cancelled()
        with self._lock:
            if not (cancelled or not operation.parts) or operation not in self._queue:
                return
            self._queue.remove(operation)
        self._advance()  # the other operations may have waited for this one

    def _move_locked(self, state: QueueState) -> None:
        before, self._state = self._state, state
        legal = state in _MOVES[before.value]
        assert legal, f"{before} -> {state}"  # noqa: S101


def _run(send: Callable[[Ended], object], ended: Ended) -> None:
    try:
        send(ended)
    except BaseException as failure:  # noqa: BLE001  # any failure must end the futures
        ended(failure)


def _fail(operation: Operation[PartT], failure: Exception) -> None:
    for part in operation.parts:
        part.future.fail(copy_exception(failure))
    operation.future.fail(copy_exception(failure))


def _consequence(operation: Operation[Any], number: int, failure: BaseException) -> EarlierCallFailedError:
    refusal = EarlierCallFailedError(operation.name, number, _words(failure))
    refusal.__cause__ = failure
    return refusal


def _partly(failure: BaseException, taken: int, count: int) -> BaseException:
    """Return a failure whose text also states that the server has a part of the call."""
    if not isinstance(failure, TinkerError):
        return failure
    failure = copy_exception(failure)
    with_words(
        failure,
        f"{taken} of the {count} requests of this call were accepted; where they are backward passes, their "
        "gradients stay accumulated",
    )
    return failure


def _words(failure: BaseException) -> str:
    return str(failure).rstrip(".") or type(failure).__name__
