"""`APIFuture`: the future of a call that takes time.

It is a `concurrent.futures.Future`, so `wait`, `as_completed` and `asyncio.wrap_future` work. It adds a
status, request ids and a timeline. A wait never cancels the call: after a timeout, the cancel of a task that
awaits the future, or a Ctrl-C, the work goes on and the future stays usable. Only a future of
`asyncio.wrap_future` passes its own cancel on to the call.

Callbacks: the callbacks of users run on the workers given to the constructor (`submit`), in the order of
their addition and never under a lock, also if the future has already ended. Without workers, or once the
workers are closed, they run in the thread that ends the future or adds them. The callbacks of the runtime are
added with `when_done` and run inline, so they must be short.

Threads: any thread may wait, read or cancel. One stage of the runtime at a time reports progress, by
attribute writes that need no lock. This module does not depend on requests, worker threads or event
loops; only an `await` loads `asyncio`.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Final, TypeVar

from tinker_sync._clock import SYSTEM_CLOCK, Clock, SafeCondition, in_seconds, slice_of
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
    looked_at = False
    """True if the user has got the result, waits for it, or has added a callback.

    A wait that ends early, by a timeout, Ctrl-C or a cancel of the task, sets it to False.
    """

    def __init__(
        self,
        *,
        submit: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
        when_done: tuple[Callable[[Any], object], ...] = (),
    ) -> None:
        """Make a future for work that has not begun.

        Args:
            submit: runs a job on a worker, for callbacks that users add. None: they run in the thread that
                ends the future or adds them.
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
        self._clock = clock
        self._generation = _fork._generation
        self._progress = QUEUED
        self._request_id: str | None = None
        self._queued_s = clock.now()
        self._sending_s: float | None = None
        self._accepted_s: float | None = None
        self._completed_s: float | None = None
        # Both are guarded by the condition that guards the other fields of a Future; its lock is reentrant.
        self._callbacks: list[Callable[[Any], object]] | None = None
        self._cancel_notified = False

    def done(self) -> bool:
        """Return True if the call has ended. A single read needs no lock.

        >>> APIFuture().done()
        False
        """
        return self._state in _ENDED

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
            return super().result()
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
            return super().result()
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

    def refuse_foreign_wait(self) -> None:
        """Refuse to wait in a forked child for a call of the parent; only the parent can finish it."""
        if self._generation != _fork._generation and not self.done():
            raise TinkerError(self._foreign)

    def _wait(self, timeout: float | None) -> None:
        """Wait until the call ends, or raise a TimeoutError. Wait in slices, so that Ctrl-C is noticed."""
        self._note_look()
        if self._state in _ENDED:
            return
        self.refuse_foreign_wait()
        left_s = math.inf if timeout is None else timeout
        try:
            while self._state not in _ENDED:
                if left_s <= 0:
                    raise WaitTimeout(self._describe_wait(timeout))
                now_s = slice_of(left_s)
                with self._condition:
                    if self._state not in _ENDED:
                        self._condition.wait(now_s)
                left_s -= now_s
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
        with self._condition:
            # Also after the end, if earlier callbacks still wait for the worker: they run first.
            kept = self._callbacks is not None or not self.done()
            if kept:
                if self._callbacks is None:
                    self._callbacks = []
                    self._done_callbacks.append(_hand_over_callbacks)
                self._callbacks.append(fn)
        if not kept:
            self._hand_over([fn])

    def when_done(self, fn: Callable[[Any], object]) -> None:
        """Call `fn(self)` in the thread that ends the future, or now if the future has ended.

        An exception of `fn` is logged. For the runtime, not for users.
        """
        with self._condition:
            if self._state not in _ENDED:
                self._done_callbacks.append(fn)
                return
        try:
            fn(self)
        except Exception:  # noqa: BLE001  # as in every `Future`
            _log.exception("a callback of %r failed", self)

    def _hand_over(self, callbacks: list[Callable[[Any], object]]) -> None:
        job = partial(_call_each, self, callbacks)
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
        with self._condition:
            if self._state != "PENDING":
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
        if self._generation != _fork._generation or not super().cancel():
            return self.cancelled()
        self._complete(succeeded=False)
        with self._condition:
            first, self._cancel_notified = not self._cancel_notified, True
            if first:
                # This wakes threads in `concurrent.futures.wait`. A second call would be an error.
                super().set_running_or_notify_cancel()
        return True

    def set_result(self, result: T) -> None:
        """End this future with a result, as `resolve` does; raise InvalidStateError if it has ended."""
        self._complete(succeeded=True)
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """End this future with a failure, as `fail` does; raise InvalidStateError if it has ended."""
        self._complete(succeeded=False)
        super().set_exception(exception)

    def _invoke_callbacks(self) -> None:
        """Run the callbacks, and then drop them, because they refer to the client and keep it alive.

        Only the thread that ended the future calls this. If `cancel` itself dropped the callbacks, a second
        cancel could drop them before the first one has run them.
        """
        super()._invoke_callbacks()  # type: ignore[misc]  # not in typeshed, in every Python from 3.2 on
        self._done_callbacks = ()  # type: ignore[assignment]  # an ended future takes no more

    def _complete(self, *, succeeded: bool) -> None:
        """Store the moment of the end, and call the function in `before_end`. Only the first call counts."""
        if self._completed_s is None:
            self._completed_s = self._clock.now()
        before_end, self.before_end = self.before_end, None
        if before_end is not None:
            before_end(succeeded)


def _hand_over_callbacks(future: APIFuture[Any]) -> None:
    with future._condition:
        waiting, future._callbacks = future._callbacks, None
    if waiting:
        future._hand_over(waiting)


def _call_each(future: APIFuture[Any], callbacks: list[Callable[[Any], object]]) -> None:
    for callback in callbacks:
        try:
            callback(future)
        except BaseException as failure:  # even a callback's SystemExit must not end the worker
            if (
                isinstance(failure, KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread()
            ):
                raise
            _log.exception("a callback of %r failed", future)
