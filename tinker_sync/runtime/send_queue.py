"""`SendQueue`: the calls of one training client, sent one after the other under consecutive numbers.

Guarantees

- Operations are sent in the order of the calls of `put`, from any number of threads.
- Sequence numbers on the wire are 1, 2, 3 ... without a gap. The number of a request is the count of the
  requests sent before it plus one. It is fixed when its operation leaves the queue, in the same step that
  makes the operation the one being sent. Until then the operation can be cancelled, and the operations behind
  it move up. So all of a body but the number is encoded before `put` or `fill`, and `bytes_for(number)`
  completes the body.
- At most one operation is in its send phase. It consists of one or more requests with consecutive numbers,
  which are sent in one of two ways. Serial: each request is sent when the one before it is accepted.
  Parallel: all requests but the first are sent at once, and the first when all the others are accepted. The
  server holds back requests that it cannot run yet, so it sees the batch as a whole. An operation that begins
  with the number of a refused request is always sent in the serial way.
- An operation whose requests are not known yet keeps its place: the operations behind it wait until `fill`
  brings the requests. If its future ends before that, it uses no number, and the operations behind move up.
- A request that the server refuses uses no number: the next operation gets the number, and the queue goes on.
  The operation fails as a whole, and no more of it is sent. Its unused numbers before an accepted request are
  filled with requests without effect, so that no later operation runs in the middle of this one.
- If a request stays unanswered, the server may have it or not, so no later number can be right yet. The
  operation is in doubt: its future fails with the cause, and the queue keeps a copy of the bodies that are
  left of it. The operation behind it, now or later, waits while the unanswered requests are sent again, with
  the same bytes, numbers and idempotency keys, and then the requests of the operation that were not sent. So
  the operation is done as a whole and once, though its future has failed, and the queue goes on in order.
  If a request stays unanswered once more, only the operation that has waited for it fails, with an
  `EarlierCallFailedError` that names the request; the next one tries again.
- If the server denies such a request, for example because it has lost the model, the queue is broken. All
  futures of the queue and of later calls fail at once with an `EarlierCallFailedError` that is `final`.

Assumptions

- `send(part, number, ended)` calls `ended(None)` when the server has accepted the request; other code then
  waits for the result. It calls `ended` with `NotTaken` if the server has not accepted the request and will
  not, with `Unanswered` if that is not known, and with another failure, or raises it, if the request cannot
  be sent again. It repeats a request itself, with the same bytes. `ended` may be called on any thread; only
  its first call counts.
- `submit(job)` runs a job on another thread or inline, or raises TinkerError, which counts as a refusal of
  the request. It runs every job that it accepts.

Threads: any thread may put and cancel. Sends run on workers, or on the poller's thread after its current step
(`follow`). A queue has no thread of its own, and no thread waits for its turn: the end of each send starts
the next one. Futures are ended and callbacks run with the lock free. In a forked child the copy refuses work
until `take_over`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, Generic

from tinker_sync.errors import APIStatusError, EarlierCallFailedError, TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import copy_exception
from tinker_sync.runtime.futures import APIFuture, Job, Submit
from tinker_sync.runtime.operation import (
    Ended,
    NotTaken,
    Operation,
    PartT,
    Sending,
    Unanswered,
)

_INHERITED: Final = (
    "this training client belongs to the parent process of a fork: two copies would send different calls "
    "under the same numbers. Call training.take_over() in this process if no other one uses it any more, or "
    "make a training client here"
)

_NO_MODEL: Final = (404, 410)

_log: Final = logging.getLogger(__name__)


class SendQueueState(Enum):
    """The state of a send queue.

    IDLE -> SENDING      an operation leaves the queue
    SENDING -> IDLE      all its requests are accepted, one is refused, or it was cancelled before; an
                         operation that is `alone` has ended as well
    SENDING -> IN_DOUBT  the server may or may not have one of its requests
    IN_DOUBT -> SENDING  another operation waits, so what is left of this one is sent again
    SENDING -> BROKEN    the server may or may not have one of its requests, and it cannot be sent again
    any -> BROKEN        in a forked child, if calls of the parent were under way or in doubt

    Illegal: BROKEN -> IDLE or SENDING, because a gap in the numbers cannot be repaired; SENDING -> SENDING,
    because at most one operation is in its send phase; IN_DOUBT -> IDLE, because the next number is unknown.
    """

    IDLE = "idle"
    SENDING = "sending"
    IN_DOUBT = "in doubt"
    BROKEN = "broken"


# By value, because an enum hashes slowly.
_MOVES = {
    "idle": (SendQueueState.SENDING,),
    "sending": (SendQueueState.IDLE, SendQueueState.IN_DOUBT, SendQueueState.BROKEN),
    "in doubt": (SendQueueState.SENDING,),
    "broken": (),
}


class SendQueue(Generic[PartT]):
    """A queue that sends the operations of one training client in order. Thread-safe.

    >>> from types import SimpleNamespace
    >>> queue = SendQueue(lambda part, number, ended: ended(print("sent", number)), submit=lambda job: job())
    >>> part = SimpleNamespace(future=APIFuture())
    >>> queue.put(Operation("optim_step", [part], part.future))
    >>> queue.take_in()
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
        waits: Callable[[Operation[PartT]], object] = lambda _operation: None,
    ) -> None:
        """Make an empty queue.

        Args:
            send: sends a part under a number.
            submit: runs a job on a worker.
            send_nothing: sends a request without effect under a number, in the same way.
            follow: takes a part and a job that sends it, to run the job soon on this thread; returns False if
                it does not take the job.
            waits: takes an operation that waits behind others, to end it at its deadline.
        """
        self._send = send
        self._submit = submit
        self._send_nothing = send_nothing
        self._follow = follow
        self._waits = waits
        self._lock = threading.Lock()
        self._state = SendQueueState.IDLE  # guarded by _lock
        # Any thread appends without a lock; _lock guards the rest.
        self._put: deque[tuple[Operation[PartT], ...]] = deque()
        self._queue: deque[Operation[PartT]] = deque()  # guarded by _lock
        # Guarded by _lock; with its numbers settled. It stays here while it is in doubt.
        self._sending: Sending[PartT] | None = None
        self._next_number = 1  # guarded by _lock
        self._unused_number = 1  # guarded by _lock; the smallest number that was never used
        self._refusal: Exception | None = None  # guarded by _lock; the failure of new calls
        self._inherited = False  # guarded by _lock; in a forked child that has not taken over
        _fork.renew_in_child(self)

    def put(self, operation: Operation[PartT], place: Operation[PartT] | None = None) -> None:
        """Fix the turn of an operation, in one step that Ctrl-C cannot split. `take_in` then queues it.

        Args:
            operation: the operation, with its requests.
            place: a second operation, queued right behind the first; its requests are not known yet. Later
                operations wait until `fill` brings its requests, or its future ends.
        """
        # Both in one step, because the first may end before the next step of this thread.
        self._put.append((operation,) if place is None else (operation, place))

    def take_in(self) -> None:
        """Queue the operations that `put` has received, and begin to send if no operation is being sent.

        This never raises: once the queue is broken, the futures of the operations fail. So a script that
        makes several calls and then asks for their results gets the first failure first.
        """
        with self._lock:
            refusal = self._refusal
            added = [each for _ in range(len(self._put)) for each in self._put.popleft()]
            if refusal is None:
                self._queue.extend(added)
        for each in added:
            if refusal is None:
                # A function, because a bound method would be one object more for each queued call.
                each.future._when_done(partial(SendQueue._forget_ended, self, each))
            else:
                each.fail(refusal)
        if added and refusal is None:
            self._advance()
            for each in added:
                if each.parts and not each.future.running():
                    self._waits(each)

    def fill(self, operation: Operation[PartT], parts: Sequence[PartT]) -> None:
        """Add the requests of a queued operation, or cancel them if the operation has left the queue."""
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

    def renew_after_fork(self) -> None:
        """Refuse work in a forked child until `take_over`, because two queues would use the same numbers."""
        changing, self._lock = self._lock.locked(), threading.Lock()
        if self._refusal is None:
            # A request in doubt stays with the parent, which may send it again. While another thread changes
            # the queue, an operation may be in none of the attributes.
            if changing or self._state is not SendQueueState.IDLE or self._put or self._queue:
                self._state = SendQueueState.BROKEN
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
        """In a forked child, go on with the numbers of the parent, which must not use them any more.

        Raises:
            EarlierCallFailedError: calls were under way when the process was forked.
        """
        with self._lock:
            if not self._inherited:
                return
            self._inherited, refusal = False, None
            if self._state is SendQueueState.BROKEN:
                cause = "the process was forked while calls were under way"
                refusal = EarlierCallFailedError("a call of the parent process", None, cause)
            self._refusal = refusal
        if refusal is not None:
            raise copy_exception(refusal)

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"<SendQueue {self._state.value}, {len(self._queue)} queued, next number {self._next_number}>"
            )

    # ---------------------------------------------------- one after the other

    def _advance(self) -> None:
        """Begin the next operation, unless one is being sent or the next one has no requests yet.

        Go on with the one after it if that operation has ended meanwhile. If an operation is in doubt, first
        send again what is left of it; the next one stays in the queue, so that it can be cancelled.
        """
        while (found := self._take_next()) is not None:
            if isinstance(found, Sending):
                self._resume(found)
            # `_begin` may cancel a timer, which takes a lock, so `_lock` is free here. The state keeps other
            # threads out.
            elif found.future._begin():
                self._begin(found)
            else:
                with self._lock:  # it was cancelled, so it gets no number
                    self._move_locked(SendQueueState.IDLE)

    def _take_next(self) -> Operation[PartT] | Sending[PartT] | None:
        """Return the next operation, or the one in doubt if another one waits for it; else None."""
        with self._lock:
            doubt = self._sending if self._state is SendQueueState.IN_DOUBT else None
            while doubt and self._queue and self._queue[0].future.done():
                self._queue.popleft()  # failed by the end of the client, for example
            ready = self._state is SendQueueState.IDLE or doubt is not None
            if not ready or not self._queue or not self._queue[0].parts:
                return None
            self._move_locked(SendQueueState.SENDING)
            if doubt is None:
                return self._queue.popleft()
            doubt.blocked, doubt.beginning = self._queue[0], True
            return doubt

    def _resume(self, sending: Sending[PartT]) -> None:
        """Send the unanswered requests of an operation again, and then what is left of it."""
        with self._lock:
            stage = sending.next_stage() if sending.doubtful else ()
        try:
            if stage:
                self._launch(sending, stage)
            else:  # only numbers are to be filled
                self._end_stage(sending)
        finally:
            with self._lock:
                sending.beginning = False

    def _begin(self, operation: Operation[PartT]) -> None:
        # Only this thread changes the number now: the state keeps others out.
        with self._lock:
            reused = self._next_number < self._unused_number
            self._sending = sending = Sending(operation, self._next_number, reused=reused)
            stage = sending.next_stage()
            self._next_number += len(operation.parts)
            self._unused_number = max(self._unused_number, self._next_number)
        try:
            self._launch(sending, stage)
        finally:  # Ctrl-C in a cancel may interrupt this thread
            with self._lock:
                sending.beginning = False

    def _launch(self, sending: Sending[PartT], stage: Sequence[int]) -> None:
        for index in stage:
            try:
                job = partial(self._send_one, sending, index)
                # Of several parts on one thread, one that waits for room would hold up the others, which
                # have taken the room.
                if len(stage) > 1 or not self._follow(sending.operation.parts[index], job):
                    self._submit(job)
            except TinkerError as failure:  # no worker takes the job, so nothing was sent
                self._end_send(sending, index, NotTaken(failure))

    def _send_one(self, sending: Sending[PartT], index: int) -> None:
        """Send one part, unless another part of its operation has failed or was refused."""
        with self._lock:
            # Another part failed before this part was sent.
            refusal = None if self._sending is sending else self._refusal
            stays = sending.stays(index)
        if refusal is not None:
            sending.operation.fail(refusal)
            return
        if stays:
            self._end_send(sending, index, None, stays=True)
            return
        part = sending.operation.parts[index]
        part.future._mark_sending()
        ended = partial(self._end_send, sending, index)
        _run(partial(self._send, part, sending.first_number + index), ended)

    def _end_send(
        self, sending: Sending[PartT], index: int, failure: BaseException | None, *, stays: bool = False
    ) -> None:
        """Record the end of one send. With `stays`, the part was not sent. After the last one, end the stage.

        Break the queue if the server may have the part, and it cannot be sent again.
        """
        if failure is not None and not isinstance(failure, (NotTaken, Unanswered)):
            self._break(sending, index, failure)
            return
        with self._lock:
            if index not in sending.under_way:
                return
            sending.under_way.discard(index)
            cause = None if failure is None else failure.__cause__ or failure
            if cause is None:
                sending.doubtful.pop(index, None)
                (sending.left if stays else sending.taken).add(index)
            elif isinstance(failure, NotTaken) and (failure.used or index not in sending.doubtful):
                sending.doubtful.pop(index, None)
                sending.refused[index] = cause
                if failure.used:
                    sending.used.add(index)
            else:  # a request that was unanswered before stays so unless the server itself settles it
                sending.doubtful[index] = cause
            over = self._sending is not sending
            last = not sending.under_way
            was_refused = index in sending.refused
        if was_refused and sending.failed:  # its future has promised that it would be done
            _log.warning(
                "%s (sequence number %d) was sent again, and the server has refused it: %s",
                sending.operation.name,
                sending.first_number + index,
                cause,
            )
        if over and cause is not None:
            sending.operation.parts[index].future.fail(cause)
        elif last and not over:
            self._end_stage(sending)

    def _end_stage(self, sending: Sending[PartT]) -> None:
        with self._lock:
            stage = () if sending.refused or sending.doubtful else sending.next_stage()
        if sending.doubtful:
            index, cause = next(iter(sending.doubtful.items()))
            self._doubt(sending, index, cause)
        elif sending.refused:
            self._take_back(sending)
        elif stage:
            self._launch(sending, stage)
        elif sending.operation.alone:
            sending.operation.future._when_done(lambda _: self._conclude(sending))
        else:
            self._conclude(sending)

    def _conclude(self, sending: Sending[PartT]) -> None:
        """End the send phase of an operation, and begin the next one."""
        with self._lock:
            if self._sending is not sending:
                return
            self._sending = None
            if sending.refused:
                self._next_number = sending.first_number + sending.numbers_used
            self._move_locked(SendQueueState.IDLE)
            beginning = sending.beginning
        if sending.failed and not sending.refused:
            _log.warning(
                "%s (sequence number %d) was sent again, and the server has it: it counts as done once, "
                "though its future has failed",
                sending.operation.name,
                sending.first_number,
            )
        if not beginning:
            self._advance()

    def _doubt(self, sending: Sending[PartT], index: int, cause: BaseException) -> None:
        """Keep an operation whose part `index` the server may have, until another operation waits for it.

        The first time, its futures fail. Later, the operation fails that has waited for it meanwhile.
        """
        consequence = sending.operation.consequence_of(sending.first_number + index, cause, final=False)
        if not sending.failed:
            try:
                self._hold(sending)
            except (TinkerError, MemoryError) as unkept:
                _log.debug("an unanswered request cannot be kept", exc_info=unkept)
                self._break(sending, index, cause)
                return
            self._fail_in_doubt(sending, consequence)
        with self._lock:
            blocked, sending.blocked = sending.blocked, None
            if blocked is not None and self._queue and blocked is self._queue[0]:
                self._queue.popleft()
            else:  # it was cancelled, or its deadline came; the next one has not waited as long
                blocked = None
        if blocked is not None:
            blocked.fail(consequence)
        with self._lock:
            if self._sending is not sending:
                return
            self._move_locked(SendQueueState.IN_DOUBT)
            beginning = sending.beginning
        if not beginning:
            self._advance()

    def _hold(self, sending: Sending[PartT]) -> None:
        """Keep copies of the bodies that are still to be sent.

        Raises:
            TinkerError: an unanswered request cannot be sent again as it was.
            MemoryError: there is no memory for the copies.
        """
        for index in sending.unsent():
            sending.operation.parts[index].hold(sending.first_number + index)

    def _fail_in_doubt(self, sending: Sending[PartT], consequence: EarlierCallFailedError) -> None:
        operation = sending.operation
        # The cause comes first, because a combined future keeps the first failure that it gets.
        for index, cause in {**sending.doubtful, **sending.refused}.items():
            doubtful = index in sending.doubtful
            operation.parts[index].future.fail(operation.failure_in_doubt(cause) if doubtful else cause)
        for index, part in enumerate(operation.parts):
            if index not in sending.taken:
                part.future.fail(copy_exception(consequence))
        sending.failed = True

    def _take_back(self, sending: Sending[PartT]) -> None:
        """Fail an operation of which a part was refused, and fill its unused numbers."""
        operation, failed = sending.operation, sending.failed
        index, failure = next(iter(sending.refused.items()))
        if not failed:
            failure = operation.failure_after(failure, len(sending.taken))
            operation.parts[index].future.fail(failure)
            for other, cause in sending.refused.items():
                operation.parts[other].future.fail(copy_exception(cause))
            consequence = operation.consequence_of(sending.first_number + index, failure)
            for other, part in enumerate(operation.parts):
                if other not in sending.taken:
                    part.future.fail(copy_exception(consequence))
            sending.failed = True
        self._fill(sending, index, failure)

    def _fill(self, sending: Sending[PartT], index: int, failure: BaseException) -> None:
        """Fill the unused numbers before the last used one, one by one. Then begin the next operation.

        Args:
            index: the index of the part that was refused first.
            failure: the failure of that part.
        """
        holes = sending.holes()
        if not holes:
            self._conclude(sending)
            return
        with self._lock:
            sending.under_way = set(holes[:1])

        def end(unfilled: BaseException | None) -> None:
            cause = unfilled.__cause__ if isinstance(unfilled, NotTaken) else None
            status = cause.status_code if isinstance(cause, APIStatusError) else None
            filled = unfilled is None or status == 409  # after a 409, another request has the number
            with self._lock:
                if not sending.under_way:
                    return
                sending.under_way = set()
                sending.taken.update(holes[:1] if filled else ())
            if filled:
                self._fill(sending, index, failure)
            elif isinstance(unfilled, (NotTaken, Unanswered)) and status not in _NO_MODEL:
                self._doubt(sending, index, unfilled.__cause__ or unfilled)
            else:
                _log.debug("the number of a refused request could not be filled", exc_info=unfilled)
                self._break(sending, index, failure)

        _run(partial(self._send_nothing, sending.first_number + holes[0]), end)

    def _break(self, sending: Sending[PartT], index: int, failure: BaseException) -> None:
        operation, number = sending.operation, sending.first_number + index
        # Fail this part with the cause first. A combined future keeps the first failure that it gets, and
        # after the next lines any other part may fail with the consequence.
        operation.parts[index].future.fail(failure)
        refusal = operation.consequence_of(number, failure)
        doomed: list[Operation[PartT]] = []
        with self._lock:
            if self._sending is sending:
                self._sending = None
                self._move_locked(SendQueueState.BROKEN)
                self._refusal = refusal
                doomed, self._queue = [operation, *self._queue], deque()
        for each in doomed:
            each.fail(refusal)

    def _forget_ended(self, operation: Operation[PartT], future: APIFuture[Any]) -> None:
        """Drop a queued operation and its bodies at once if it was cancelled, expired or has no requests."""
        left = future.cancelled() or future._expired
        with self._lock:
            if not (left or not operation.parts) or operation not in self._queue:
                return
            self._queue.remove(operation)
        self._advance()  # the other operations may have waited for this one

    def _move_locked(self, state: SendQueueState) -> None:
        assert state in _MOVES[self._state.value], f"{self._state} -> {state}"  # noqa: S101
        self._state = state


def _run(send: Callable[[Ended], object], ended: Ended) -> None:
    try:
        send(ended)
    except BaseException as failure:  # noqa: BLE001  # any failure must end the futures
        ended(failure)
