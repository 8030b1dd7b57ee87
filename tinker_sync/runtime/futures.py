"""`APIFuture`: the future of a call that takes time; `CombinedFuture`: one result for several requests.

An `APIFuture` is a `concurrent.futures.Future`, so `wait`, `as_completed` and `asyncio.wrap_future` work. It
adds a status, request ids and a timeline. A wait never cancels the call: after a timeout, the cancel of a
task that awaits the future, or a Ctrl-C, the work goes on and the future stays usable. Only a future of
`asyncio.wrap_future` passes its own cancel on to the call.

Callbacks: the callbacks of users run on the workers given to the constructor (`submit`), in the order of
their addition and never under a lock, also if the future has already ended. Without workers, or once the
workers are closed, they run in the thread that ends the future or adds them. The callbacks of the runtime are
added with `_when_done` and run inline, so they must be short. After a cancel they run on a thread of the
client (`soon`), because they take locks.

A failure that the user never looks at is logged once, with the name of the call and the user's line: when the
future is collected, when the process ends, or when a later call depends on the failed one (`Unread`).

Threads: any thread may wait, read or cancel, and so may a signal handler, because a future has no lock.
Whatever decides about a call is appended to one list, its story: callbacks, the mark of its begin, and
outcomes. An append is atomic in the interpreter, so all threads see one order: the first outcome that is
valid counts, and a callback after it is late and runs where it was added. One stage of the runtime at a time
reports progress, by attribute writes. This module does not depend on requests, worker threads or event loops;
only an `await` loads `asyncio`.

The base class guards its fields with a lock, which Ctrl-C may leave taken. So these fields, which take a
kilobyte, exist only in a future that functions such as `concurrent.futures.wait` look at. They are made at
this first look, and get the outcome by a callback.

The call of a `ComposedFuture`, the base class of `CombinedFuture`, consists of other calls, whose futures are
the *parts*; the composed future is the *whole*. The whole has the request ids and the moments of its parts.
When it ends, it keeps these and drops the parts with their results.

In a combined future, a callback of each part counts down the parts that are left, so no thread waits. The
thread that resolves the last part merges the results. Rules of a combined future:

- The part that fails first fails the whole at once. The other parts go on, and their results are ignored.
- A cancel of the whole cancels the parts. A training call can be cancelled until the send queue begins with
  it; a call that consists of samples, until it ends.
- A cancel of a single part makes the whole fail with `CancelledError`.
- Status, request ids and timeline come from the parts. The whole is sending from the send of the first part
  until all parts are accepted, and paused while any part is.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from tinker_sync._base import fork as _fork
from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, Wake, in_seconds, slice_of
from tinker_sync._base.displays import repr_html
from tinker_sync._base.left_out import words_on
from tinker_sync._base.log import Log
from tinker_sync._base.naming import CallSite
from tinker_sync._base.numbers import numbers
from tinker_sync.errors import ClientClosedError, EarlierCallFailedError, TinkerError

T = TypeVar("T")


class FutureState(str, Enum):
    """The state of a call.

    The usual order is queued, sending, waiting, done. Each state but the last may be left out. Waiting and
    paused alternate as the server reports them. A sample that the server refuses for now is paused and then
    sending again. A sample that the server has forgotten is sending again. A cancel leads from queued to
    done; for calls that can be cancelled until they end (see `APIFuture`), from any state. Done is final.

    >>> FutureState.QUEUED == "queued", str(FutureState.PAUSED)
    (True, 'paused')
    """

    QUEUED = "queued"
    """Not sent: it waits for earlier calls of the same client, a limit or a pause."""
    SENDING = "sending"
    """On its way to the server, possibly not for the first time."""
    WAITING = "waiting"
    """Accepted by the server."""
    PAUSED = "paused"
    """Held up by the server: accepted, but not worked on now; or, for a sample, refused for now."""
    DONE = "done"
    """Ended with a result, a failure or a cancel."""

    __str__ = str.__str__


class Status(NamedTuple):
    """The state of a call, with a reason if there is one: why it is paused, delayed, cancelled or failed.

    >>> Status(FutureState.PAUSED, "the backend is short of capacity").state
    <FutureState.PAUSED: 'paused'>
    """

    state: FutureState
    reason: str | None = None


QUEUED: Final = Status(FutureState.QUEUED)
SENDING: Final = Status(FutureState.SENDING)
WAITING: Final = Status(FutureState.WAITING)


class Timeline(NamedTuple):
    """The times at which a call reached its states, in seconds of a monotonic clock; None if not reached.

    >>> Timeline(queued=10.0, sending=10.5, accepted=11.0, completed=14.0).duration_s
    4.0
    """

    queued: float
    sending: float | None = None
    accepted: float | None = None
    completed: float | None = None

    @property
    def duration_s(self) -> float | None:
        """The time from the call to its end; None while the call goes on."""
        return None if self.completed is None else self.completed - self.queued


_OF_BASE: Final = frozenset(vars(Future()))
"""The names of the fields of every future."""


Job = Callable[[], object]
"""A function to run on a worker."""

Submit = Callable[[Job], object]
"""A function that passes a job to the workers; raises RuntimeError if they take no more jobs."""

_log = Log(__name__)
_unread_log = Log("tinker_sync.clients")
# These are not logged, because they follow from a reported failure, or from an action of the user.
_EXPECTED: Final = (CancelledError, ClientClosedError, EarlierCallFailedError)

if sys.version_info >= (3, 11):
    WaitTimeout = TimeoutError
else:

    class WaitTimeout(FutureTimeoutError, TimeoutError):
        """The error of a wait that takes too long, for Python 3.10.

        There, `concurrent.futures.TimeoutError` differs from the built-in `TimeoutError`. This class is both.
        """


# What only the runtime uses begins with an underscore, so that editors do not offer it. Completion in shells
# leaves out these names too: those of every `Future`, and the two by which a test ends a future of its own.
_NOT_FOR_USERS: Final = frozenset(
    {"fail", "resolve", "set_exception", "set_result", "set_running_or_notify_cancel"}
)
_BEGUN: Final = object()
"""The mark in the story of a call that it has begun, so that it can neither be cancelled nor expire."""


class _Outcome:
    """How a call ends, or would have ended if no other outcome had come first."""

    __slots__ = ("callbacks", "cancelled", "failure", "is_early", "result")

    def __init__(
        self,
        result: Any = None,
        failure: BaseException | None = None,
        *,
        cancelled: bool = False,
        expired: bool = False,
    ) -> None:
        self.result = result
        self.failure = failure
        self.cancelled = cancelled
        self.is_early = cancelled or expired
        """True if this outcome is valid only before the call has begun."""
        self.callbacks: list[Callable[[Any], object]] | None = None
        """The callbacks that are left to call, the last one first; None before the first one is called."""


Story = list[Any]
"""What has happened to a call, in order: callbacks, each in a tuple of its own; `_BEGUN`; outcomes."""
_OVER: Final[Any] = ()
"""The story of a call that has ended, which takes no more items."""


def _outcome_in(story: Story, before: object = None) -> _Outcome | None:
    """Return the first valid outcome in a story, up to the item `before`."""
    begun = False
    for each in story:
        if each is before:
            return None
        if each is _BEGUN:
            begun = True
        elif type(each) is _Outcome and not (begun and each.is_early):
            return each
    return None


class APIFuture(Future[T]):
    """The result of a call, available now or later. Thread-safe.

    `cancel()` works until the runtime begins to send the call. A sample, a file transfer and a call for many
    checkpoints can be cancelled until they end. Later, `cancel()` returns False and changes nothing. A
    cancelled future raises `concurrent.futures.CancelledError`, also in an `await`.

    >>> future = APIFuture()
    >>> future.status().state
    <FutureState.QUEUED: 'queued'>
    >>> future.resolve("weights")
    True
    >>> future.result(), future.status().state
    ('weights', <FutureState.DONE: 'done'>)
    """

    _advice = "; call .result() first, which waits for it"
    _foreign = "this call was made before the process was forked; its result arrives in the parent only"
    _sends_nothing = True  # see `names_requests`
    _only_reads = False
    """True if the call changes nothing at the server; the end of its client then fails the call at once."""
    _call_site: Any = None
    """The public method of the call and the user's line that called it (`naming.CallSite`), or None.

    `log_if_unread` uses this, `_overlooked` and `_looked_at`.
    """
    _overlooked: Any = None
    """The object that logs the failure of the call unless the user looks at it; None without a failure."""
    _before_end: Callable[[bool], object] | None = None
    """A function that runs once when the future ends; it gets True for a result, False otherwise.

    It runs before waiting threads wake. After a cancel, it may run later than that.
    """
    _turn_timer: Any = None
    """The timer that ends the call at its deadline; None once the call has begun."""
    _ends = False
    """True once an outcome is about to be in the story, perhaps one that is not valid."""
    _outcome: _Outcome | None = None
    _waiting: Any = ()  # a list of a `Wake` for each thread that waits
    _callbacks: _Callbacks | None = None
    _looked_at = False
    """True if the user has got the result, waits for it, or has added a callback.

    A wait that ends early, by a timeout, Ctrl-C or a cancel of the task, sets it to False.
    """

    def __init__(
        self,
        *,
        submit: Submit | None = None,
        soon: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
        when_done: tuple[Callable[[Any], object], ...] = (),
    ) -> None:
        """Make a future for work that has not begun.

        Args:
            submit: runs a job on a worker, for callbacks that users add. None: they run in the thread that
                ends the future or adds them.
            soon: runs a short job on a thread of the client, after a cancel. None: it runs in the thread that
                cancels.
            clock: measures the timeline.
            when_done: called inline, one after the other, in the thread that ends the future.
        """
        self._story: Story = list(zip(when_done))
        self._submit = submit
        self._soon = soon
        self._clock = clock
        self._generation = _fork._generation
        self._progress = QUEUED
        self._request_id: str | None = None
        self._queued_s = clock.now()
        self._sending_s: float | None = None
        self._accepted_s: float | None = None
        self._completed_s: float | None = None

    def done(self) -> bool:
        """Return True if the call has ended.

        >>> APIFuture().done()
        False
        """
        return self._outcome is not None or (self._ends and self._look() is not None)

    def running(self) -> bool:
        """Return True if the call has begun, so that it cannot be cancelled, and has not ended.

        >>> future = APIFuture()
        >>> future.running(), future._begin(), future.running()
        (False, True, True)
        """
        return not self.done() and _BEGUN in self._story

    def cancelled(self) -> bool:
        """Return True if the call was cancelled.

        >>> APIFuture().cancelled()
        False
        """
        outcome = self._look()
        return outcome is not None and outcome.cancelled

    @property
    def _ended_early(self) -> bool:
        """True if the call was cancelled, or its deadline came before it began."""
        outcome = self._look()
        return outcome is not None and outcome.is_early

    def _look(self) -> _Outcome | None:
        """Return how the call has ended, or None."""
        story, outcome = self._story, self._outcome  # in this order, because the end drops the story last
        if outcome is None and self._ends:
            outcome = _outcome_in(story)
            if outcome is not None:
                self._outcome = outcome
        return outcome

    # ---------------------------------------------------- progress

    @property
    def request_id(self) -> str | None:
        """The id of the request at the server (the first of several); None before the server accepts it.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().request_id is None
        True
        """
        return self._request_id

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the requests of the call that the server has accepted.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().request_ids
        ()
        """
        request_id = self.request_id
        return () if request_id is None else (request_id,)

    def status(self) -> Status:
        """Return the state of the call, with the reason if it is paused, delayed, cancelled or failed.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().status()
        Status(state=<FutureState.QUEUED: 'queued'>, reason=None)
        """
        if not self.done():
            return self._progress
        if self.cancelled():
            return Status(FutureState.DONE, "cancelled")
        failure = self.failure
        return Status(FutureState.DONE, None if failure is None else f"failed: {type(failure).__name__}")

    @property
    def timeline(self) -> Timeline:
        """The moments when the call was queued, sent, accepted and completed.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().timeline.completed is None
        True
        """
        return Timeline(self._queued_s, self._sending_s, self._accepted_s, self._completed_s)

    @property
    def failure(self) -> BaseException | None:
        """The failure of the call; None while the call goes on, after a success and after a cancel.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().failure is None
        True
        """
        outcome = self._outcome or self._look()
        return None if outcome is None else outcome.failure

    # ---------------------------------------------------- waiting

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it.

        Args:
            timeout: the longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: there is no result yet. The work goes on; call this again.
            concurrent.futures.CancelledError: the call was cancelled.
            TinkerError: the call failed, or the parent of this forked process made it and it has not ended.
            Exception: a function of the user in the call, such as a custom loss, raised it.

        >>> try:
        ...     APIFuture().result(timeout=0)
        ... except TimeoutError as error:
        ...     print(error)
        no result after 0 s (queued); the work goes on and may be waited for again
        """
        self._wait(timeout)
        try:
            return self._get()
        finally:
            del self  # a failure's traceback holds this frame, and the future holds the failure

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end. Return the failure, or None after a success.

        Arguments and errors are those of `result`, but a failure of the call is returned instead of raised.

        >>> future = APIFuture()
        >>> future.fail(KeyError("a"))
        True
        >>> future.exception()
        KeyError('a')
        """
        self._wait(timeout)
        if self.cancelled():
            raise CancelledError
        return self.failure

    def future(self) -> APIFuture[T]:
        """Return this future, for scripts written for a client whose futures wrap another future.

        >>> future = APIFuture()
        >>> future.future() is future
        True
        """
        return self

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the result in a running asyncio loop. Arguments and errors as in `result`.

        Other tasks of the loop get a turn, also if the call has ended.

        >>> import asyncio
        >>> future = APIFuture()
        >>> future.resolve(7)
        True
        >>> asyncio.run(future.result_async(timeout=5))
        7
        """
        self._note_look()
        self._refuse_foreign_wait()
        from tinker_sync.runtime.awaiting import AwaitTimeout, wait_for_end

        try:
            await wait_for_end(self, timeout)  # also if it has ended, so that a fast server starves no task
        finally:  # a cancel of the task may end the wait too
            self._note_look(self.done())
        if not self.done():
            raise AwaitTimeout(self._describe_wait(timeout))
        try:
            return self._get()
        finally:
            del self  # as in `result`

    def coroutine(self) -> Coroutine[Any, Any, T]:
        """Return `result_async()`, for `asyncio.create_task` and similar functions.

        >>> import asyncio
        >>> future = APIFuture()
        >>> future.resolve(7)
        True
        >>> asyncio.run(future.coroutine())
        7
        """
        return self.result_async()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result_async().__await__()

    def _refuse_foreign_wait(self) -> None:
        """Refuse to wait in a forked child for a call of the parent; only the parent can finish it."""
        if self._generation != _fork._generation and not self.done():
            raise TinkerError(self._foreign)

    def _wait(self, timeout: float | None) -> None:
        """Wait until the call ends, or raise a TimeoutError. Wait in slices, so that Ctrl-C is noticed."""
        self._note_look()
        if self.done():
            return
        self._refuse_foreign_wait()
        left_s = math.inf if timeout is None else timeout
        ended = Wake()
        vars(self).setdefault("_waiting", []).append(ended)
        try:
            while not self.done():
                if left_s <= 0:
                    raise WaitTimeout(self._describe_wait(timeout))
                now_s = slice_of(left_s)
                ended.wait(now_s)
                left_s -= now_s
        finally:  # Ctrl-C may end the wait too
            self._note_look(self.done())
            try:  # noqa: SIM105  # `suppress` would be three more calls for each result
                self._waiting.remove(ended)
            except ValueError:  # the end of the call has removed it
                pass

    def _get(self) -> T:
        outcome = self._outcome or self._look()
        assert outcome is not None  # noqa: S101
        if outcome.cancelled:
            raise CancelledError
        if outcome.failure is None:
            result: T = outcome.result
            return result
        try:
            raise outcome.failure
        finally:
            del self, outcome  # as in `result`

    def _describe_wait(self, timeout: float | None) -> str:
        about = self._describe(*(f"request {request_id}" for request_id in self.request_ids[:1]))
        waited = in_seconds(timeout or 0.0)
        return f"no result after {waited} ({about}); the work goes on and may be waited for again"

    def _note_look(self, looked: bool = True) -> None:
        """Take note that the user looks at the call, so that its failure need not be logged, or does not."""
        self._looked_at = looked
        if looked and self._overlooked is not None:
            self._overlooked.text = ""

    # ---------------------------------------------------- callbacks

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call `fn(self)` on a worker thread once the call has ended, or soon if it has already ended.

        The callbacks of one future run one after the other, in the order of their addition. An exception of a
        callback is logged and does not stop the others. If the future has no workers, or the client is
        closed, `fn` runs in the thread that ends the call or adds `fn`.

        >>> future = APIFuture()
        >>> future.add_done_callback(lambda done: print(done.result()))
        >>> future.resolve(7)
        7
        True
        """
        self._note_look()
        callbacks = vars(self).setdefault("_callbacks", _Callbacks())
        callbacks.waiting.append(fn)
        self._when_done(_hand_over)

    def _when_done(self, fn: Callable[[Any], object]) -> None:
        """Call `fn(self)` in the thread that ends the future, or now if the future has ended.

        An exception of `fn` is logged. For the runtime, not for users.
        """
        story = self._story
        if self._outcome is None:
            entry = (fn,)  # a new object, so that its place in the story can be told
            story.append(entry)
            if not self._ends or _outcome_in(story, before=entry) is None:
                return
        _call(fn, self)

    # ---------------------------------------------------- for the runtime

    def _mark_sending(self) -> None:
        """Mark the call as being sent. A repeated send keeps the moment of the first."""
        if self._sending_s is None:
            self._sending_s = self._clock.now()
        self._progress = SENDING

    def _mark_accepted(self, request_id: str) -> None:
        """Mark the call as accepted by the server under this id."""
        self._request_id = request_id
        self._accepted_s = self._clock.now()
        self._progress = WAITING

    def _mark_paused(self, reason: str | None) -> None:
        """Mark the call as paused by the server, until `_mark_waiting` or the end."""
        self._progress = Status(FutureState.PAUSED, reason)

    def _mark_waiting(self, trouble: str | None = None) -> None:
        """Mark the call as accepted by the server, which is probably working on it.

        Args:
            trouble: the reason why polls for the result fail; None if they work.
        """
        self._progress = WAITING if trouble is None else Status(FutureState.WAITING, trouble)

    def resolve(self, value: T) -> bool:
        """End this future with a result and return True. Return False if it has already ended.

        >>> future = APIFuture()
        >>> future.resolve(1), future.resolve(2), future.result()
        (True, False, 1)
        """
        return self._end(_Outcome(value))

    def fail(self, failure: BaseException) -> bool:
        """End this future with a failure and return True. Return False if it has already ended.

        >>> APIFuture().fail(KeyError())
        True
        """
        return self._end(_Outcome(failure=failure))

    def _expire(self, failure: BaseException) -> bool:
        """End a call with a failure and return True. Return False if it has begun or ended.

        >>> future = APIFuture()
        >>> future._expire(TimeoutError()), future._begin()
        (True, False)
        """
        return _BEGUN not in self._story and self._end(_Outcome(failure=failure, expired=True))

    def _begin(self) -> bool:
        """Mark the call as begun: it cannot be cancelled any more. Return False if it has already ended."""
        story = self._story
        if _BEGUN not in story and self._outcome is None:
            story.append(_BEGUN)
        begun = not self.done()
        timer = self._turn_timer
        if timer is not None:
            self._turn_timer = None
            timer.cancel()
        return begun

    def set_running_or_notify_cancel(self) -> bool:
        """Mark the call as begun, as `begin` does."""
        return self._begin()

    def cancel(self) -> bool:
        """Cancel the call, if the runtime has not begun to send it.

        A sample, a file transfer and a call for many checkpoints can be cancelled until they end. Return True
        if the call is cancelled, now or before. A forked child cannot cancel a call of its parent.

        >>> future = APIFuture()
        >>> future.cancel(), future.cancelled()
        (True, True)
        """
        if self._generation == _fork._generation and _BEGUN not in self._story:
            self._end(_Outcome(cancelled=True))
        return self.cancelled()

    def set_result(self, result: T) -> None:
        """End this future with a result, as `resolve` does; raise InvalidStateError if it has ended."""
        if not self.resolve(result):
            raise InvalidStateError(f"it has ended: {self!r}")

    def set_exception(self, exception: BaseException | None) -> None:
        """End this future with a failure, as `fail` does; raise InvalidStateError if it has ended."""
        if not self._end(_Outcome(failure=exception)):
            raise InvalidStateError(f"it has ended: {self!r}")

    def _end(self, outcome: _Outcome) -> bool:
        """End the call in this way, and return True; or return False if it has ended, or began too soon."""
        story = self._story
        if self.done():
            return False
        if not outcome.is_early:
            self._complete(succeeded=outcome.failure is None)
        try:
            self._ends = True  # before the append, so that who does not see it need not look for an outcome
            story.append(outcome)
            if _outcome_in(story) is not outcome:
                outcome.result = outcome.failure = None
                return False
            self._conclude(story, outcome)
        except KeyboardInterrupt:  # in a cancel by the main thread
            if _outcome_in(story) is outcome:
                self._conclude(story, outcome)
            raise
        return True

    def _conclude(self, story: Story, outcome: _Outcome) -> None:
        """Wake the threads that wait, and have the callbacks called. May be called again after Ctrl-C."""
        self._outcome = outcome
        waiting = self._waiting
        while waiting:
            try:
                waiting.pop().set()
            except IndexError:  # the thread has removed it
                break
        if outcome.callbacks is None:
            before = reversed(story[: story.index(outcome)])
            outcome.callbacks = [each[0] for each in before if type(each) is tuple]
        if outcome.cancelled and self._soon is not None:
            try:
                self._soon(partial(self._call_all, outcome))
            except RuntimeError:  # the client is closed
                pass
            else:
                return
        self._call_all(outcome)

    def _call_all(self, outcome: _Outcome) -> None:
        if outcome.is_early:
            self._complete(succeeded=False)
        self._story = _OVER  # the callbacks refer to the client and keep it alive
        callbacks = outcome.callbacks
        while callbacks:
            _call(callbacks.pop(), self)
        outcome.callbacks = _OVER  # scripts keep thousands of results, and each would keep an empty list

    def _make_base(self, name: str) -> Any:
        """Make the fields of the base class, because a function looks at this one. Return its value."""
        # The order matters, because another thread may look, or end the call, at any step. All functions
        # first take the lock of the base class, so one that finds the lock finds the other fields, and its
        # wait is told of the end.
        self._when_done(_publish)
        _add_base(self)
        return vars(self)[name]

    def _get_snapshot(self) -> Any:
        # How asyncio reads the outcome from Python 3.14 on. It expects a future that has ended, and another
        # thread may be about to let the base class know.
        if self.done():
            _publish(self)
        return Future._get_snapshot(self)  # type: ignore[attr-defined]  # newer than the oldest Python

    def _describe(self, *more: str) -> str:
        status = self.status()
        return ", ".join([str(status.state), *([status.reason] if status.reason else []), *more])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._describe(*self.request_ids[:1])}>"

    _repr_html_ = repr_html

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes

        def __getattr__(self, name: str) -> Any:
            # Called for missing attributes only. A half-made future has no fields at all.
            if name in _OF_BASE and "_story" in vars(self):
                return self._make_base(name)
            kind = type(self).__name__
            advice = "" if name.startswith("_") else type(self)._advice
            message = words_on(f"{kind}.{name}") or f"{kind!r} object has no attribute {name!r}{advice}"
            raise AttributeError(message, name=name, obj=self)

        def __getitem__(self, key: Any) -> Any:
            # `list(future)` and a loop over the future call this too.
            raise TypeError(f"{type(self).__name__!r} object has no items{type(self)._advice}")

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _NOT_FOR_USERS]

    def __reduce__(self) -> Any:
        raise TypeError(f"cannot pickle {type(self).__name__!r} object: its call goes on in this process")

    def _complete(self, *, succeeded: bool) -> None:
        """Store the moment of the end, and call the function in `_before_end`. Only the first call counts."""
        if self._completed_s is None:
            self._completed_s = self._clock.now()
        before_end, self._before_end = self._before_end, None
        if before_end is not None:
            before_end(succeeded)


def _call(fn: Callable[[Any], object], future: APIFuture[Any]) -> None:
    try:
        fn(future)
    except Exception:  # noqa: BLE001  # as in every `Future`
        _log.exception("a callback of %r failed", future)


def settle(future: APIFuture[T], work: Callable[[], T]) -> None:
    """End a future with the value of `work()`, or with its failure.

    >>> future = APIFuture()
    >>> settle(future, lambda: 7), future.result()
    (None, 7)
    """
    try:
        value = work()
    except BaseException as failure:  # noqa: BLE001  # raised where the future is waited for
        future.fail(failure)
    else:
        future.resolve(value)


def _add_base(future: APIFuture[Any]) -> None:
    """Add the fields of the base class that a future lacks, the lock last."""
    fields = vars(Future())
    for each in sorted(fields, key="_condition".__eq__):
        vars(future).setdefault(each, fields[each])


def _publish(future: APIFuture[Any]) -> None:
    """Let the base class know the outcome, and those who wait by its means.

    Several threads may do this at the same time; each of them finds it done at its return.
    """
    outcome, mark = future._look(), object()
    assert outcome is not None  # noqa: S101  # it has ended
    _add_base(future)
    with suppress(InvalidStateError):  # another thread was faster
        if outcome.cancelled:
            Future.cancel(future)
            if vars(future).setdefault("_notified", mark) is mark:
                Future.set_running_or_notify_cancel(future)
        elif outcome.failure is None:
            Future.set_result(future, future.result())  # not that of the outcome: a client is its own result
        else:
            Future.set_exception(future, outcome.failure)


class _Callbacks:
    """The callbacks of users of one future that have not run."""

    __slots__ = ("turn", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Callable[[Any], object]] = []
        self.turn: list[None] = [None]  # empty while a thread runs callbacks


def _hand_over(future: APIFuture[Any]) -> None:
    """Let a worker run the callbacks of users, or run them here without workers."""
    if future._submit is not None:
        try:
            future._submit(partial(_run_callbacks, future))
        except RuntimeError:
            # The workers are closed, but a thread may still wait for the effect of these callbacks.
            _log.debug("callbacks of %r run where it ended: the workers are closed", future)
        else:
            return
    _run_callbacks(future)


def _run_callbacks(future: APIFuture[Any]) -> None:
    """Run the callbacks of users in order, unless another thread does; that one looks for more of them."""
    callbacks = future._callbacks
    assert callbacks is not None  # noqa: S101
    while callbacks.waiting:
        try:
            callbacks.turn.pop()
        except IndexError:
            return
        try:
            while callbacks.waiting:
                _call_back(future, callbacks.waiting.pop(0))
        finally:
            callbacks.turn.append(None)


def _call_back(future: APIFuture[Any], callback: Callable[[Any], object]) -> None:
    try:
        callback(future)
    except BaseException as failure:  # even a callback's SystemExit must not end the worker
        if isinstance(failure, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        _log.exception("a callback of %r failed", future)


PartT = TypeVar("PartT")
WholeT = TypeVar("WholeT")


class ComposedFuture(APIFuture[WholeT], Generic[PartT, WholeT]):
    """The future of a call that consists of other calls, whose futures are its parts. Thread-safe.

    A subclass adds the parts and decides on the result.
    """

    def __init__(
        self, *, submit: Submit | None = None, soon: Submit | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(submit=submit, soon=soon, clock=clock)
        # Empty before the parts are known, and after the end of the whole.
        self._parts: tuple[APIFuture[PartT], ...] = ()
        self._ended_ids: tuple[str, ...] = ()
        self._when_done(_let_go_of_parts)
        self._when_done(attach_unread)

    def _add(self, *parts: APIFuture[PartT]) -> bool:
        """Add parts and return True. Return False, and add none, if this future has ended.

        One thread at a time calls this. It takes no lock, because Ctrl-C may come at any point.
        """
        self._parts = (*self._parts, *parts)
        if self.done():  # the thread that ended this future may have missed them
            self._parts = ()
            return False
        return True

    @property
    def request_id(self) -> str | None:
        """The first of `request_ids`; None before the server accepts a request.

        >>> CombinedFuture([APIFuture()], merge=list).request_id is None
        True
        """
        return next(iter(self.request_ids), None)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all requests that the server accepted, in the order of the parts.

        >>> part = APIFuture()
        >>> part._mark_accepted("req-1")
        >>> CombinedFuture([part, APIFuture()], merge=list).request_ids
        ('req-1',)
        """
        parts = self._parts
        return _ids(parts) if parts else self._ended_ids

    @property
    def timeline(self) -> Timeline:
        """The moments of the call: sent when its first part is sent, accepted when its last part is accepted.

        >>> CombinedFuture([APIFuture()], merge=list).timeline.sending is None
        True
        """
        parts = self._parts
        if not parts:
            return super().timeline
        sending, accepted = self._moments(parts)
        return Timeline(self._queued_s, sending, accepted, self._completed_s)

    def _moments(self, parts: Sequence[APIFuture[PartT]]) -> tuple[float | None, float | None]:
        """Return the moments at which the first part was sent and the last part was accepted.

        The first is None if no part was sent. The second is None if one of the parts was not accepted.
        """
        timelines = [part.timeline for part in parts]
        sent = [moments.sending for moments in timelines if moments.sending is not None]
        accepted = [moments.accepted for moments in timelines if moments.accepted is not None]
        return min(sent, default=None), max(accepted, default=None) if len(accepted) == len(parts) else None

    def _cancels_parts(self) -> bool:
        """Return True if this future, which has ended, is to cancel those parts that can be cancelled."""
        return self._ended_early


def _let_go_of_parts(whole: ComposedFuture[PartT, WholeT]) -> None:
    parts = whole._parts
    whole._ended_ids = _ids(parts)
    whole._sending_s, whole._accepted_s = whole._moments(parts)
    whole._parts = ()
    if whole._cancels_parts():
        for part in parts:
            part.cancel()


def _ids(parts: Sequence[APIFuture[Any]]) -> tuple[str, ...]:
    return tuple(request_id for part in parts for request_id in part.request_ids)


class CombinedFuture(ComposedFuture[PartT, WholeT]):
    """A future for the merged result of several futures, its parts. Thread-safe.

    It fails as soon as a part fails.

    >>> halves = [APIFuture(), APIFuture()]
    >>> whole = CombinedFuture(halves, merge=sum)
    >>> halves[1].resolve(30), whole.done(), halves[0].resolve(12), whole.result()
    (True, False, True, 42)
    """

    def __init__(
        self,
        parts: Sequence[APIFuture[PartT]],
        merge: Callable[[list[PartT]], WholeT],
        *,
        submit: Submit | None = None,
        soon: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Make a future for the merged result of `parts`.

        Args:
            parts: the futures to wait for, in the order of the results that `merge` receives; empty if
                `follow` is called with them later.
            merge: makes one result from the results of the parts; an exception that it raises becomes the
                failure.
            submit, soon, clock: as in `APIFuture`.
        """
        super().__init__(submit=submit, soon=soon, clock=clock)
        self._merge = merge
        self._expected = 0  # the number of parts
        self._arrived = numbers(1)
        if parts:
            self.follow(parts)

    def follow(self, parts: Sequence[APIFuture[PartT]]) -> None:
        """Set the parts of a future that was made without any. Cancel them if it was cancelled or expired.

        >>> whole = CombinedFuture([], merge=sum)
        >>> whole.follow([APIFuture()]), whole.status().state
        (None, <FutureState.QUEUED: 'queued'>)
        """
        assert parts, "nothing to combine"  # noqa: S101
        self._expected = len(parts)
        added = self._add(*parts)
        for part in parts:
            if added:
                part._when_done(self._part_ended)
            elif self._cancels_parts():
                part.cancel()

    def status(self) -> Status:
        """Return the status of the call: paused if any part is paused, and queued if all parts are queued.

        In other cases it is sending until the server has accepted all parts, then waiting, and done at the
        end. While it is waiting, it has the reason of the first part that is delayed.

        >>> CombinedFuture([APIFuture()], merge=list).status().state
        <FutureState.QUEUED: 'queued'>
        """
        parts = self._parts
        if self.done() or not parts:
            return super().status()
        statuses = [part.status() for part in parts]
        states = {status.state for status in statuses}
        if FutureState.PAUSED in states:
            return next(status for status in statuses if status.state is FutureState.PAUSED)
        if states == {FutureState.QUEUED}:
            return Status(FutureState.QUEUED)
        if {FutureState.QUEUED, FutureState.SENDING} & states:
            return Status(FutureState.SENDING)
        delayed = (each for each in statuses if each.state is FutureState.WAITING and each.reason)
        return next(delayed, Status(FutureState.WAITING))

    def _part_ended(self, part: APIFuture[PartT]) -> None:
        if part.cancelled():
            self.fail(CancelledError())
            return
        failure = part.exception()
        if failure is not None:
            self.fail(failure)
            return
        # After this future has failed or was cancelled, it has no parts.
        if next(self._arrived) == self._expected and (parts := self._parts):
            self._merge_all(parts)

    def _merge_all(self, parts: tuple[APIFuture[PartT], ...]) -> None:
        try:
            whole = self._merge([part.result(timeout=0) for part in parts])
        except Exception as failure:  # noqa: BLE001  # any failure must reach the threads that wait
            self.fail(failure)
        else:
            self.resolve(whole)


# ------------------------------------------------------------------------------------------ unread failures


class Unread:
    """The failure of a call, to be logged unless the user looks at the call first.

    Args:
        text: the text to log; set to "" when it is logged, or when the user looks at the call.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._generation = _fork.generation()

    def log(self) -> None:
        """Log the failure once, unless the user has looked at the call.

        A forked child does not log the failures that its parent noted before the fork.
        """
        text, self.text = self.text, ""
        if text and self._generation == _fork.generation():
            _unread_log.warning("%s", text)


def log_if_unread(future: APIFuture[Any], site: CallSite) -> None:
    """Store `site`, the public method and the line that made a call, in the future of the call.

    If the call fails and the user never looks at it, an `Unread` logs the failure. `attach_unread` must be
    among the callbacks of the future.
    """
    future._call_site = site
    if future.done():  # perhaps that callback found no `site`
        attach_unread(future)


def attach_unread(future: APIFuture[Any]) -> None:
    """Attach an `Unread` to a future that has failed, unless the user has looked at the future already.

    The `Unread` logs the failure when the future is collected or the process ends. A cancel gets no `Unread`,
    nor does a failure that follows from an earlier failure or from `close`.
    """
    failure, site = future.failure, future._call_site
    if failure is None or site is None or isinstance(failure, _EXPECTED):
        return
    if future._looked_at or future._overlooked is not None:
        return
    name, code, line = site
    call = name.rpartition(".")[2] or "a call"
    place = f"{os.path.basename(code.co_filename)}:{line}"
    words = f"{type(failure).__name__}: {failure}"
    overlook(future, f"{call} at {place} failed, and its result was never looked at: {words}")


def overlook(future: APIFuture[Any], text: str) -> None:
    """Log `text` when a failed future is collected or the process ends, unless the user looks at it first.

    The user may be waiting for the future already.
    """
    future._overlooked = unread = Unread(text)
    if future._looked_at:
        unread.text = ""
    weakref.finalize(future, unread.log)
