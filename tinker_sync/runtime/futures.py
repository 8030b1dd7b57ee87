"""`APIFuture`: the future of a call that takes time.

It is a `concurrent.futures.Future`, so `wait`, `as_completed` and `asyncio.wrap_future` work. It adds a
status, request ids and a timeline. A wait never cancels the call: after a timeout, the cancel of a task that
awaits the future, or a Ctrl-C, the work goes on and the future stays usable. Only a future of
`asyncio.wrap_future` passes its own cancel on to the call.

Callbacks: the callbacks of users run on the workers given to the constructor (`submit`), in the order of
their addition and never under a lock, also if the future has already ended. Without workers, or once the
workers are closed, they run in the thread that ends the future or adds them. The callbacks of the runtime are
added with `when_done` and run inline, so they must be short. After a cancel they run on a thread of the
client (`soon`), because they take locks.

Threads: any thread may wait, read or cancel, also in a signal handler or a finalizer on top of one of these
methods. So none of them holds the lock that ends the future while a signal may be handled. What happens to a
call is decided by the first append to the list `_claims`, a single step of the interpreter. One stage of the
runtime at a time reports progress, by attribute writes that need no lock. This module does not depend on
requests, worker threads or event loops; only an `await` loads `asyncio`.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Final, TypeVar

from tinker_sync._clock import SYSTEM_CLOCK, Clock, SafeCondition, Wake, in_seconds, slice_of
from tinker_sync.errors import TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.progress import QUEUED, ProgressFuture

T = TypeVar("T")

Job = Callable[[], object]
"""A function to run on a worker."""

Submit = Callable[[Job], object]
"""A function that passes a job to the workers; raises RuntimeError if they take no more jobs."""

_log = logging.getLogger(__name__)

if sys.version_info >= (3, 11):
    WaitTimeout = TimeoutError
else:

    class WaitTimeout(FutureTimeoutError, TimeoutError):
        """The error of a wait that takes too long, for Python 3.10.

        There, `concurrent.futures.TimeoutError` differs from the built-in `TimeoutError`. This class is both.
        """


# Completion in shells and notebooks leaves these out, because only the runtime uses them.
_NOT_FOR_USERS: Final = frozenset(
    {"before_end", "call_site", "expired", "looked_at", "only_reads", "overlooked", "refuse_foreign_wait"}
    | {"begin", "expire", "fail", "resolve", "set_exception", "set_result", "set_running_or_notify_cancel"}
    | {"mark_accepted", "mark_paused", "mark_sending", "mark_waiting", "turn_timer", "when_done"}
)
_ENDED: Final = frozenset({"CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED"})


class APIFuture(ProgressFuture[T]):
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

    _foreign = "this call was made before the process was forked; its result arrives in the parent only"
    only_reads = False
    """True if the call changes nothing at the server; the end of its client then fails the call at once."""
    call_site: Any = None
    """The public method of the call and the user's line that called it (`naming.CallSite`), or None.

    `runtime.naming` uses this, `overlooked` and `looked_at` to log a failure that the user never looks at.
    """
    overlooked: Any = None
    """The object that logs the failure of the call unless the user looks at it; None without a failure."""
    before_end: Callable[[bool], object] | None = None
    """A function that runs once when the future ends; it gets True for a result, False otherwise.

    It runs before waiting threads wake. After a cancel, it may run later than that.
    """
    expired = False
    """True if the deadline of the call came before the call began."""
    turn_timer: Any = None
    """The timer that ends the call at its deadline; None once the call has begun."""
    # Made when they are needed, because no thread waits for most futures, and few have callbacks of users.
    _wakes: Sequence[Wake] = ()
    _callbacks: Sequence[Callable[[Any], object]] = ()
    looked_at = False
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
        # The fields of a `Future`, without the condition that its own constructor makes.
        self._condition = SafeCondition()  # type: ignore[assignment]  # it has all that a future uses
        self._state = "PENDING"
        self._result: T | None = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Any], object]] = [*when_done]
        self._submit = submit
        self._soon = soon
        self._claims: list[str] = []  # the first entry counts: "begun", "cancelled", "expired" or "ended"
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
        return self._state in _ENDED or self.cancelled()

    def cancelled(self) -> bool:
        """Return True if the call was cancelled.

        >>> APIFuture().cancelled()
        False
        """
        claims = self._claims
        return bool(claims) and claims[0] == "cancelled"

    def running(self) -> bool:
        """Return True if the runtime has begun to send the call, and the call has not ended.

        >>> APIFuture().running()
        False
        """
        claims = self._claims
        return bool(claims) and claims[0] == "begun" and self._state not in _ENDED

    def set_running_or_notify_cancel(self) -> bool:
        """Mark the call as begun, as `begin` does, and return True. Return False if it has ended."""
        return self.begin()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _NOT_FOR_USERS]

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
            return self._outcome()
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
        return super().exception()

    def future(self) -> APIFuture[T]:
        """Return this future, for scripts written for a client whose futures wrap another future.

        >>> future = APIFuture()
        >>> future.future() is future
        True
        """
        return self

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the result in a running asyncio loop. Arguments and errors as in `result`.

        >>> import asyncio
        >>> future = APIFuture()
        >>> future.resolve(7)
        True
        >>> asyncio.run(future.result_async(timeout=5))
        7
        """
        self._note_look()
        if not self.done():
            self.refuse_foreign_wait()
            from tinker_sync.runtime.awaiting import AwaitTimeout, wait_for_end

            try:
                await wait_for_end(self, timeout)
            finally:  # a cancel of the task may end the wait too
                self._note_look(self.done())
            if not self.done():
                raise AwaitTimeout(self._describe_wait(timeout))
        try:
            return self._outcome()
        finally:
            del self  # as in `result`

    def _outcome(self) -> T:
        try:
            if self.cancelled():
                raise CancelledError
            return super().result()
        finally:
            del self

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

    def refuse_foreign_wait(self) -> None:
        """Refuse to wait in a forked child for a call of the parent; only the parent can finish it."""
        if self._generation != _fork._generation and not self.done():
            raise TinkerError(self._foreign)

    def _wait(self, timeout: float | None) -> None:
        """Wait until the call ends, or raise a TimeoutError. Wait in slices, so that Ctrl-C is noticed."""
        self._note_look()
        if self.done():
            return
        self.refuse_foreign_wait()
        left_s = math.inf if timeout is None else timeout
        try:
            wake, wakes = Wake(), self.__dict__.setdefault("_wakes", [])
            wakes.append(
                wake
            )  # before the look at the end: the thread that ends the future wakes after the end
            while not self.done():
                if left_s <= 0:
                    raise WaitTimeout(self._describe_wait(timeout))
                now_s = slice_of(left_s)
                wake.wait(now_s)
                left_s -= now_s
            wakes.remove(wake)
        finally:  # Ctrl-C may end the wait too
            self._note_look(self.done())

    def _describe_wait(self, timeout: float | None) -> str:
        about = self._describe(*(f"request {request_id}" for request_id in self.request_ids[:1]))
        waited = in_seconds(timeout or 0.0)
        return f"no result after {waited} ({about}); the work goes on and may be waited for again"

    def _note_look(self, looked: bool = True) -> None:
        """Take note that the user looks at the call, so that its failure need not be logged, or does not."""
        self.looked_at = looked
        if looked and self.overlooked is not None:
            self.overlooked.text = ""

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
        callbacks = self.__dict__.setdefault("_callbacks", [])
        callbacks.append(fn)
        self.when_done(_hand_over_callbacks)

    def when_done(self, fn: Callable[[Any], object]) -> None:
        """Call `fn(self)` in the thread that ends the future, or now if the future has ended.

        An exception of `fn` is logged. For the runtime, not for users.
        """
        # This first adds the callback and then looks at the end. The thread that ends the future first writes
        # the end and then takes the callbacks. So one of them takes this one.
        self._done_callbacks.append(fn)
        if self._state in _ENDED:
            self._invoke_callbacks()

    def _hand_over(self) -> None:
        job = partial(_call_each, self)
        if self._submit is not None:
            try:
                self._submit(job)
            except RuntimeError:
                # The workers are closed, but a thread may still wait for the effect of these callbacks.
                _log.debug("callbacks of %r run where it ended: the workers are closed", self)
            else:
                return
        job()

    # ---------------------------------------------------- for the runtime

    def resolve(self, value: T) -> bool:
        """End this future with a result and return True. Return False if it has already ended.

        >>> future = APIFuture()
        >>> future.resolve(1), future.resolve(2), future.result()
        (True, False, 1)
        """
        try:
            self.set_result(value)
        except InvalidStateError:
            return False
        return True

    def fail(self, failure: BaseException) -> bool:
        """End this future with a failure and return True. Return False if it has already ended.

        >>> APIFuture().fail(KeyError())
        True
        """
        try:
            self.set_exception(failure)
        except InvalidStateError:
            return False
        return True

    def expire(self, failure: BaseException) -> bool:
        """End a call with a failure and return True. Return False if it has begun or ended.

        >>> future = APIFuture()
        >>> future.expire(TimeoutError()), future.begin()
        (True, False)
        """
        if self._claim("expired") != "expired":
            return False
        self.expired = True
        return self.fail(failure)

    def cancel(self) -> bool:
        """Cancel the call, if the runtime has not begun to send it.

        A sample, a file transfer and a call for many checkpoints can be cancelled until they end. Return True
        if the call is cancelled, now or before. A forked child cannot cancel a call of its parent.

        >>> future = APIFuture()
        >>> future.cancel(), future.cancelled()
        (True, True)
        """
        if self._generation != _fork._generation or self._claim("cancelled") != "cancelled":
            return self.cancelled()
        try:
            self._publish_cancel()
        except KeyboardInterrupt:  # it may have come before the effect; a second call does no harm
            self._publish_cancel()
            raise
        return True

    def set_result(self, result: T) -> None:
        """End this future with a result, as `resolve` does; raise InvalidStateError if it has ended."""
        self._refuse_cancelled()
        self._complete(succeeded=True)
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """End this future with a failure, as `fail` does; raise InvalidStateError if it has ended."""
        self._refuse_cancelled()
        self._complete(succeeded=False)
        super().set_exception(exception)

    def _refuse_cancelled(self) -> None:
        if self._claim("ended") == "cancelled":
            raise InvalidStateError("the call was cancelled")

    def _publish_cancel(self) -> None:
        """Wake the threads that wait for this future, and run its callbacks, where locks may be taken."""
        self._wake_all()
        if self._soon is not None:
            try:
                self._soon(self._end_cancelled)
            except RuntimeError:  # the client is closed
                pass
            else:
                return
        self._end_cancelled()

    def _end_cancelled(self) -> None:
        self._complete(succeeded=False)
        this = object()
        if self.__dict__.setdefault("_ends_cancelled", this) is this:  # a second call would be an error
            super().cancel()
            super().set_running_or_notify_cancel()  # wakes threads in `concurrent.futures.wait`

    def _wake_all(self) -> None:
        for wake in list(self._wakes):
            wake.set()

    def _invoke_callbacks(self) -> None:
        """Wake the threads that wait, and run each callback once: the thread that takes it runs it.

        The callbacks are dropped then, because they refer to the client and keep it alive.
        """
        self._wake_all()
        callbacks = self._done_callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:
                return
            try:
                callback(self)
            except Exception:  # noqa: BLE001  # as in every `Future`
                _log.exception("a callback of %r failed", self)

    def _complete(self, *, succeeded: bool) -> None:
        """Store the moment of the end, and call the function in `before_end`. Only the first call counts."""
        if self._completed_s is None:
            self._completed_s = self._clock.now()
        before_end, self.before_end = self.before_end, None
        if before_end is not None:
            before_end(succeeded)


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


def _hand_over_callbacks(future: APIFuture[Any]) -> None:
    if future._callbacks:
        future._hand_over()


def _call_each(future: APIFuture[Any]) -> None:
    """Call the callbacks of users one after the other, unless another thread does this now.

    That thread looks for more callbacks after it has written that it is not at work any more.
    """
    this = object()
    callbacks: list[Callable[[Any], object]] = future.__dict__["_callbacks"]
    while callbacks and future.__dict__.setdefault("_caller", this) is this:
        try:
            _call_all(future, callbacks)
        finally:
            del future.__dict__["_caller"]


def _call_all(future: APIFuture[Any], callbacks: list[Callable[[Any], object]]) -> None:
    while callbacks:
        callback = callbacks.pop(0)
        try:
            callback(future)
        except BaseException as failure:  # even a callback's SystemExit must not end the worker
            if (
                isinstance(failure, KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
                raise
            _log.exception("a callback of %r failed", future)
