"""`SendQueue`: the calls of one training client, sent one after the other under consecutive numbers.

The story of an `Entry`, which is one call with one or more requests:

1. `put` fixes its turn. Until it leaves the queue, it can be cancelled or reach its deadline; then the
   entries behind it move up, and no number is used. An entry whose requests are not known yet keeps its
   place: the entries behind it wait until `fill` brings the requests or its future ends.
2. It leaves the queue and gets its numbers in one step under the lock. On the wire they are 1, 2, 3 ...
   without a gap: that of a request is the count of the requests before it plus one. So all of a body but
   the number is encoded before, and each try sends the same bytes.
3. Its requests are sent, in one of two ways. Serial: each when the one before it is accepted. Parallel: all
   but the first at once, and the first when the server has accepted the others; the server holds back
   requests that it cannot run yet, so it sees the batch as a whole. An entry that begins with the number of
   a refused request is always serial, because the server does not wait for such a number.
4. When the server has accepted all of them, the next entry leaves the queue. Results are not waited for,
   except behind an entry that is `alone`.

What may go wrong, with the consequence for the entries behind:

- The server refuses a request. The entry fails as a whole, and no more of it is sent. The next entry gets
  the number. Unused numbers before an accepted request are filled with requests without effect, so that no
  later entry runs in the middle of this one.
- A request stays unanswered: the server may have it or not, so no later number can be right yet. The entry
  is in doubt. Its future fails with the cause, and the queue keeps a copy of the bodies that are left of it.
  The entry behind it, now or later, waits while the unanswered requests are sent again, with the same bytes,
  numbers and idempotency keys, and then the requests that were not sent. So the call is done as a whole and
  once, though its future has failed, and the queue goes on in order. If a request stays unanswered once
  more, only the entry that has waited for it fails, with an `EarlierCallFailedError` that names the request;
  the next one tries again.
- The server denies a request that it may have, for example because it has lost the model. The queue is
  broken: all its futures and those of later calls fail at once with an `EarlierCallFailedError` that is
  `final`, because a gap in the numbers cannot be repaired.

Threads: any thread may put, fill and cancel, which only append and wake. The flow that sends the entries
(see `flows`) runs while there is something to send. Futures end, and their callbacks run, with the lock free.
In a forked child the copy refuses work until `take_over`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from attrs import define

from tinker_sync._base.api_errors import copy_exception
from tinker_sync._base.log import Log
from tinker_sync.errors import ClientClosedError, EarlierCallFailedError, TinkerError, with_words
from tinker_sync.runtime.flows import CalledOff, Flow, Flows, Moment
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.workers import Workers

_INHERITED: Final = (
    "this training client belongs to the parent process of a fork: two copies would send different calls "
    "under the same numbers. Call training.take_over() in this process if no other one uses it any more, or "
    "make a training client here"
)
_NO_MODEL: Final = (404, 410)

_log: Final = Log(__name__)


class NotTaken(Exception):
    """A failure of a request that the server has not accepted, and will not. `__cause__` is the reason.

    With `used`, the server may count the number of the request as used. The number is then filled with a
    request without effect, because no other call may get it.
    """

    def __init__(self, cause: BaseException | None = None, *, used: bool = False) -> None:
        """Store the reason."""
        super().__init__()
        self.__cause__ = cause
        self.used = used


class Unanswered(Exception):
    """A failure of a request that the server may have or not. `__cause__` is the reason.

    The same bytes may be sent again under the same number.
    """

    def __init__(self, cause: BaseException) -> None:
        """Store the reason."""
        super().__init__()
        self.__cause__ = cause


class QueuedRequest(Protocol):
    """One request of an entry, encoded except for its number."""

    @property
    def future(self) -> APIFuture[Any]:
        """The future that ends with the answer to this request."""

    def hold(self, number: int) -> object:
        """Keep a copy of the body, to send it once more after the future has failed.

        Raises:
            TinkerError: the same bytes cannot be sent again.
            MemoryError: there is no memory for the copy.
        """


RequestT = TypeVar("RequestT", bound=QueuedRequest)


@define(eq=False)
class Entry(Generic[RequestT]):
    """One training call in the send queue: a name for errors, its requests, and the future of the user.

    `future` combines the futures of the requests, or is that of the only one. `parallel` and `alone` are
    described above; servers that do not keep the order of the calls that they have accepted get each entry
    `alone`.
    """

    name: str
    requests: Sequence[RequestT]
    future: APIFuture[Any]
    parallel: bool = False
    alone: bool = False

    def fail(self, failure: Exception) -> None:
        """Fail the futures of the requests and the future of the call."""
        for request in self.requests:
            request.future.fail(copy_exception(failure))
        self.future.fail(copy_exception(failure))


def stages(count: int, *, parallel: bool) -> list[Sequence[int]]:
    """Return the indices of an entry's requests in stages. The requests of a stage are sent together.

    >>> [list(stage) for stage in stages(4, parallel=True)]
    [[1, 2, 3], [0]]
    >>> [list(stage) for stage in stages(3, parallel=False)]
    [[0], [1], [2]]
    """
    if parallel and count > 1:
        return [range(1, count), range(1)]
    return [range(index, index + 1) for index in range(count)]


class SendQueue(Generic[RequestT]):
    """A queue that sends the entries of one training client in order. Thread-safe.

    Args:
        flows: runs the flow of the queue.
        send: a flow that sends a request under a number, again and again if need be, with the same bytes. It
            returns when the server has accepted the request; other code then waits for the result. When its
            turn to send comes, it asks the function that it gets, and returns without sending if that returns
            False. It raises `NotTaken` if the server has not accepted the request and will not, `Unanswered`
            if that is not known, and another exception if the request cannot be sent again.
        make_filler: returns a request without effect, to send under an unused number; None if the server does
            not wait for missing numbers. It may block, so a worker calls it.
        workers: call `make_filler`.
        waits: takes an entry that waits for its turn, to end it at its deadline.
    """

    def __init__(
        self,
        flows: Flows,
        send: Callable[[RequestT, int, Callable[[], bool]], Flow[None]],
        make_filler: Callable[[], RequestT | None],
        workers: Workers,
        *,
        waits: Callable[[Entry[RequestT]], object] = lambda _entry: None,
    ) -> None:
        self._flows = flows
        self._send = send
        self._make_filler = make_filler
        self._workers = workers
        self._waits = waits
        self._lock = threading.Lock()
        # Any thread appends without a lock; _lock guards the rest, which the flow and its steps change.
        self._put: deque[tuple[Entry[RequestT], ...]] = deque()
        self._queue: deque[Entry[RequestT]] = deque()
        self._next_number = 1
        self._unused_number = 1  # the smallest number that was never used
        self._sending: _Sending[RequestT] | None = None  # the entry that has left the queue; also in doubt
        self._flowing = False
        self._refusal: Exception | None = None  # the failure of new calls
        self._broken = False
        self._inherited = False  # in a forked child that has not taken over

    # ---------------------------------------------------- on any thread

    def put(self, *entries: Entry[RequestT]) -> None:
        """Append entries to the queue, atomically even under Ctrl-C, and send them in their turn.

        Once the queue is broken, the futures of the entries fail, and this raises nothing. So a script that
        makes several calls and then asks for their results gets the first failure first.

        Args:
            entries: one entry; or two, of which the second gets its requests by `fill`. Both at once, because
                the first may end before this thread could append the second.

        Raises:
            RuntimeError: the client is closed, or there is no thread. The entries are to be failed; a later
                call then passes over them.
        """
        self._put.append(entries)
        self._flows.soon(self._take_in)

    def fill(self, entry: Entry[RequestT], requests: Sequence[RequestT]) -> None:
        """Add the requests of a queued entry, or cancel them if the entry has left the queue."""
        assert requests, "an entry without requests"  # noqa: S101
        self._flows.soon(self._fill, (entry, requests))

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
            if self._broken:
                cause = "the process was forked while calls were under way"
                refusal = EarlierCallFailedError("a call of the parent process", None, cause)
            self._refusal = refusal
        if refusal is not None:
            raise copy_exception(refusal)

    def renew_after_fork(self) -> None:
        """Refuse work in a forked child until `take_over`, because two queues would use the same numbers."""
        changing, self._lock = self._lock.locked(), threading.Lock()
        if self._refusal is None:
            # A request in doubt stays with the parent, which may send it again. While another thread changes
            # the queue, an entry may be in none of the attributes.
            self._broken = bool(changing or self._flowing or self._sending or self._put or self._queue)
            self._refusal, self._inherited = TinkerError(_INHERITED), True
        self._put, self._queue, self._sending, self._flowing = deque(), deque(), None, False

    def __repr__(self) -> str:
        with self._lock:
            state = "broken" if self._broken else "idle"
            if self._sending is not None:
                state = "in doubt" if self._sending.failed else "sending"
            return f"<SendQueue {state}, {len(self._queue)} queued, next number {self._next_number}>"

    # ---------------------------------------------------- on the thread of the flows

    def _take_in(self, _: object = None) -> None:
        """Queue the entries that `put` has received."""
        with self._lock:
            refusal = self._refusal
            added = [each for _ in range(len(self._put)) for each in self._put.popleft()]
            if refusal is None:
                self._queue.extend(added)
        for each in added:
            if refusal is not None:
                each.fail(refusal)
                continue
            # A function, because a bound method would be one object more for each queued call.
            each.future._when_done(partial(SendQueue._note_end, self, each))
            if each.requests:
                self._waits(each)
        self._advance()

    def _fill(self, filled: tuple[Entry[RequestT], Sequence[RequestT]]) -> None:
        entry, requests = filled
        if entry in self._queue:
            entry.requests = requests
            self._advance()
        else:
            for request in requests:
                request.future.cancel()

    def _note_end(self, entry: Entry[RequestT], future: APIFuture[Any]) -> None:
        """Let go of an entry that was cancelled, has expired, or has no requests. On any thread."""
        if future._ended_early or not entry.requests:
            with suppress(RuntimeError):  # the client is closed
                self._flows.soon(self._forget, entry)

    def _forget(self, entry: Entry[RequestT]) -> None:
        with self._lock:
            if entry in self._queue:
                self._queue.remove(entry)
        self._advance()  # the other entries may have waited for this one

    def _advance(self) -> None:
        """Start the flow, unless it runs or the first entry has no requests yet."""
        if not self._flowing and self._find_next() is not None:
            with self._lock:
                self._flowing = True
            self._flows.start(self._send_all())

    def _find_next(self) -> Entry[RequestT] | None:
        """Return the first entry if its requests are known. Drop those that have ended."""
        with self._lock:
            while self._queue and (first := self._queue[0]).requests:
                if not first.future.done():
                    return first
                self._queue.popleft()  # failed by the end of the client, for example
        return None

    # ---------------------------------------------------- the flow

    def _send_all(self) -> Flow[None]:
        """Send the entries in order, until none is left whose requests are known."""
        try:
            while (entry := self._find_next()) is not None:
                if (doubt := self._sending) is not None:
                    yield from self._deliver(doubt)
                    # Unless it was cancelled meanwhile: the one behind it has not waited as long.
                    if self._sending is doubt and self._find_next() is entry:
                        entry.fail(doubt.consequence)
                # `_begin` may cancel a timer, which takes a lock, so `_lock` is free here.
                elif entry.future._begin():
                    yield from self._deliver(self._take(entry))
        finally:
            with self._lock:
                self._flowing = False

    def _take(self, entry: Entry[RequestT]) -> _Sending[RequestT]:
        """Take an entry out of the queue and give it its numbers, in one step."""
        with self._lock:
            self._queue.popleft()
            reused = self._next_number < self._unused_number
            self._sending = sending = _Sending(entry, self._next_number, parallel=not reused)
            self._next_number += len(entry.requests)
            self._unused_number = max(self._unused_number, self._next_number)
        return sending

    def _deliver(self, sending: _Sending[RequestT]) -> Flow[None]:
        """Send what is left of an entry, until the server has all of it or a request has failed."""
        while not sending.refused and (stage := sending.next_stage()):
            yield from self._send_together(sending, stage)
            if sending.denied is not None:
                self._break(sending, *sending.denied)
                return
            if sending.doubtful:
                self._keep_in_doubt(sending, *next(iter(sending.doubtful.items())))
                return
        if sending.refused:
            sending.fail_refused()
            if not (yield from self._fill_numbers(sending)):
                return
        elif sending.entry.alone:
            ended = Moment()
            sending.entry.future._when_done(lambda _: self._flows.soon(ended.tell))
            yield ended
        with self._lock:
            self._sending = None
            if sending.refused:
                self._next_number = sending.first_number + sending.numbers_used
        if sending.failed and not sending.refused:
            _log.warning(
                "%s (sequence number %d) was sent again, and the server has it: it counts as done once, "
                "though its future has failed",
                sending.entry.name,
                sending.first_number,
            )

    def _fill_numbers(self, sending: _Sending[RequestT]) -> Flow[bool]:
        """Send requests without effect under the unused numbers of an entry. Return False if one failed."""
        index, failure = next(iter(sending.refused.items()))
        for hole in sending.holes():
            unfilled = yield from _failure_of(self._fill_number(sending, hole))
            status = getattr(unfilled.__cause__, "status_code", None) if unfilled else None
            refused = isinstance(unfilled, NotTaken)
            if unfilled is None or (refused and status == 409):  # another request has the number
                sending.taken.add(hole)
            elif isinstance(unfilled, Unanswered) or (refused and status not in _NO_MODEL):
                self._keep_in_doubt(sending, index, unfilled.__cause__ or unfilled)
                return False
            else:
                _log.debug("the number of a refused request could not be filled", exc_info=unfilled)
                self._break(sending, index, failure)
                return False
        return True

    def _fill_number(self, sending: _Sending[RequestT], index: int) -> Flow[None]:
        filler = sending.fillers.pop(index, None)
        if filler is None:
            filler = yield from self._flows.on_worker(self._workers, self._make_filler)
        if filler is None:
            return
        try:
            yield from self._send(filler, sending.first_number + index, lambda: True)
        except Unanswered:
            sending.fillers[index] = filler  # the same bytes are sent the next time
            raise

    def _send_together(self, sending: _Sending[RequestT], stage: Sequence[int]) -> Flow[None]:
        if len(stage) == 1:
            yield from self._send_one(sending, stage[0])
            return
        tasks = [self._flows.start(self._send_one(sending, index)) for index in stage]
        for task in tasks:  # noqa: UP028  # each is waited for, not delegated to
            yield task

    def _send_one(self, sending: _Sending[RequestT], index: int) -> Flow[None]:
        request, number = sending.entry.requests[index], sending.first_number + index
        failure = yield from _failure_of(self._send(request, number, partial(sending.may_send, index)))
        sending.note_end(index, failure)

    def _keep_in_doubt(self, sending: _Sending[RequestT], index: int, cause: BaseException) -> None:
        """Keep an entry of which the server may have a request, to send it again when another one waits.

        Its futures fail the first time.
        """
        sending.consequence = sending.consequence_of(index, cause, final=False)
        if sending.failed:
            return
        try:
            for each in sending.unsent():
                sending.entry.requests[each].hold(sending.first_number + each)
        except Exception as unkept:  # noqa: BLE001  # no failure may leave the entries behind waiting
            _log.debug("an unanswered request cannot be kept", exc_info=unkept)
            self._break(sending, index, cause)
        else:
            sending.fail_in_doubt()

    def _break(self, sending: _Sending[RequestT], index: int, failure: BaseException) -> None:
        # The cause first, because a combined future keeps the first failure that it gets.
        sending.entry.requests[index].future.fail(failure)
        refusal = sending.consequence_of(index, failure)
        with self._lock:
            self._sending, self._broken, self._refusal = None, True, refusal
            doomed, self._queue = [sending.entry, *self._queue], deque()
        for each in doomed:
            each.fail(refusal)


class _Sending(Generic[RequestT]):
    """An entry that has left the queue, and what is known of its requests, by their indices."""

    def __init__(self, entry: Entry[RequestT], first_number: int, *, parallel: bool) -> None:
        self.entry = entry
        self.first_number = first_number
        self.stages = deque(stages(len(entry.requests), parallel=entry.parallel and parallel))
        self.taken: set[int] = set()
        """Those that the server has accepted, and those whose numbers were filled."""
        self.refused: dict[int, BaseException] = {}  # in the order of the refusals
        self.used: set[int] = set()
        """The refused ones whose numbers the server may count as used; no other call may get them."""
        self.doubtful: dict[int, BaseException] = {}
        """Those that the server may have or not, with the reasons."""
        self.fillers: dict[int, RequestT] = {}
        """The requests without effect that the server may have under unused numbers."""
        self.denied: tuple[int, BaseException] | None = None
        """The first one that cannot be sent again, with the reason."""
        self.left: set[int] = set()
        """Those that were not sent in their stage, because another one had failed."""
        self.failed = False
        """True once the futures have failed; what is left of the entry is sent all the same."""
        self.consequence: TinkerError
        """The failure of the requests that were not sent, and of an entry that has waited in vain."""

    def next_stage(self) -> Sequence[int]:
        """Return the requests to send now, together; an empty sequence if all have been sent."""
        if self.doubtful:
            return sorted(self.doubtful)
        if self.left:
            left, self.left = sorted(self.left), set()
            return left
        return self.stages.popleft() if self.stages else ()

    def may_send(self, index: int) -> bool:
        """Return False if a request whose turn has come is to stay here, because another one has failed."""
        if index in self.doubtful or not (self.refused or self.doubtful or self.denied):
            return True
        self.left.add(index)
        return False

    def note_end(self, index: int, failure: BaseException | None) -> None:
        """Take note of the end of a send."""
        cause = failure if failure is None else failure.__cause__ or failure
        if cause is None:
            self.doubtful.pop(index, None)
            if index not in self.left:
                self.taken.add(index)
        elif isinstance(failure, NotTaken) and (failure.used or index not in self.doubtful):
            self.doubtful.pop(index, None)
            self.refused[index] = cause
            if failure.used:
                self.used.add(index)
            if self.failed:  # its future has promised that it would be done
                _log.warning(
                    "%s (sequence number %d) was sent again, and the server has refused it: %s",
                    self.entry.name,
                    self.first_number + index,
                    cause,
                )
        elif isinstance(failure, (NotTaken, Unanswered)):
            # One that was unanswered before stays so unless the server itself settles it.
            self.doubtful[index] = cause
        elif self.denied is None:
            self.denied = index, cause

    def unsent(self) -> list[int]:
        """Return those that are still to be sent, again or for the first time."""
        rest = () if self.refused else (*self.left, *(index for stage in self.stages for index in stage))
        return sorted({*self.doubtful, *rest})

    def holes(self) -> list[int]:
        """Return those whose numbers are to be filled: up to the last used one, without the accepted ones."""
        return [index for index in range(self.numbers_used) if index not in self.taken]

    @property
    def numbers_used(self) -> int:
        """How many numbers the entry has used."""
        return max(self.taken | self.used, default=-1) + 1

    # ---------------------------------------------------- its failures

    def consequence_of(self, index: int, failure: BaseException, *, final: bool = True) -> TinkerError:
        """Return the error for other requests that fail because this one has failed.

        With `final`, no later call sends this one again.
        """
        if isinstance(failure, ClientClosedError):
            return failure  # they have failed for the same reason, and not because of this one
        words = str(failure).rstrip(".") or type(failure).__name__
        refusal = EarlierCallFailedError(self.entry.name, self.first_number + index, words, final=final)
        refusal.__cause__ = failure
        return refusal

    def fail_in_doubt(self) -> None:
        """Fail the futures of an entry of which the server may have a request."""
        for index, cause in self.doubtful.items():
            self.entry.requests[index].future.fail(self._in_doubt(cause))
        self._fail_others()

    def _in_doubt(self, failure: BaseException) -> BaseException:
        """Return the failure of a request that the server may have, with words on what follows."""
        if not isinstance(failure, TinkerError):
            return failure
        name, failure = self.entry.name, copy_exception(failure)
        # The first pass of a loss of the user's has this name too. The call as a whole is then not done.
        failure.ambiguous = name != "forward"
        advice = "so do not repeat it"
        if not failure.ambiguous:
            advice = "a forward pass changes nothing, so you may repeat your call"
        with_words(
            failure,
            f"the server may have this {name} or not: the next call of this training client sends the "
            f"same request again first and then counts it as done once; {advice}",
        )
        return failure

    def fail_refused(self) -> None:
        """Fail the futures of an entry of which a request was refused, unless they have failed."""
        if self.failed:
            return
        index, failure = next(iter(self.refused.items()))
        if self.taken and isinstance(failure, TinkerError):
            failure = self.refused[index] = copy_exception(failure)
            with_words(
                failure,
                f"{len(self.taken)} of the {len(self.entry.requests)} requests of this call were accepted; "
                "where they are backward passes, their gradients stay accumulated",
            )
        self.entry.requests[index].future.fail(failure)
        self.consequence = self.consequence_of(index, failure)
        self._fail_others()

    def _fail_others(self) -> None:
        # The causes come first, because a combined future keeps the first failure that it gets.
        for index, cause in self.refused.items():
            self.entry.requests[index].future.fail(copy_exception(cause))
        for index, request in enumerate(self.entry.requests):
            if index not in self.taken:
                request.future.fail(copy_exception(self.consequence))
        self.failed = True


def _failure_of(send: Flow[None]) -> Flow[BaseException | None]:
    """Return how a flow that sends has failed, or None."""
    try:
        yield from send
    except (CalledOff, GeneratorExit):
        raise
    except BaseException as failure:  # noqa: BLE001  # any failure must end the futures
        for each in (failure, failure.__cause__):
            if isinstance(each, TinkerError):
                each.__traceback__ = (
                    None  # it holds the frames of the flow, and those all that the flow knows
                )
        return failure
    return None
