"""`APIFuture`: the result of every call that takes time.

It is a `concurrent.futures.Future`, so `wait`, `as_completed` and `asyncio.wrap_future` work. It adds a
status, request ids and a timeline. One rule holds for every way to wait: waiting never cancels. After a
timeout, the cancel of an awaiting task or a Ctrl-C, the work goes on and the future stays usable.

Callbacks: the callbacks of users run on the workers given to the constructor, in the order of their addition
and never under a lock, also if the future has already finished. Without workers, or once the workers are
closed, they run in the thread that finishes the future or adds them. The callbacks of the runtime are added
with `when_done` and run inline, so they must be short.

Threads: any thread may wait, read or cancel. One stage of the runtime at a time reports progress, by
attribute writes that need no lock. This module does not depend on requests, worker threads or event
loops; only an `await` loads `asyncio`.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tinker_sync._clock import SYSTEM_CLOCK, Clock, SafeCondition, in_seconds, slice_of
from tinker_sync._display import repr_html
from tinker_sync.errors import TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.progress import FutureState, Status, Timeline

T = TypeVar("T")

Job = Callable[[], object]
"""A function to run on a worker."""

Submit = Callable[[Job], object]
"""A function that passes a job to the workers; raises RuntimeError if they take no more jobs."""

_log = logging.getLogger(__name__)

if sys.version_info >= (3, 11):
    _WaitTimeout = TimeoutError
else:

    class _WaitTimeout(FutureTimeoutError, TimeoutError):
        """A timeout of a wait. Before 3.11 there were two exceptions of this name; this one is both."""


# Completion in shells and notebooks leaves these out, because only the runtime uses them.
_NOT_FOR_USERS: Final = frozenset(
    {"asked", "before_end", "looked_at", "only_reads", "overlooked"}
    | {"begin", "fail", "resolve", "set_exception", "set_result", "set_running_or_notify_cancel", "when_done"}
    | {"mark_accepted", "mark_paused", "mark_sending", "mark_waiting"}
)

# The longest delay before an interrupt reaches a notebook cell that awaits a future.
_WAKE_S: Final = 0.25

_ENDED: Final = frozenset({"CANCELLED", "CANCELLED_AND_NOTIFIED", "FINISHED"})
_QUEUED = Status(FutureState.QUEUED)
_SENDING = Status(FutureState.SENDING)
_WAITING = Status(FutureState.WAITING)


class APIFuture(Future[T]):
    """The result of a call, available now or later. Thread-safe.

    `cancel()` works until the runtime begins to send the call, and for samples until they are done. After
    that it returns False and changes nothing. A cancelled future raises `concurrent.futures.CancelledError`,
    also in an `await`.

    >>> future = APIFuture()
    >>> future.status().state
    <FutureState.QUEUED: 'queued'>
    >>> future.resolve("weights")
    True
    >>> future.result(), future.status().state
    ('weights', <FutureState.DONE: 'done'>)
    """

    _advice = "; call .result() first, which waits for it"

    only_reads = False
    """True if the call changes nothing at the server; then the end of its client does not wait for it."""
    asked: Any = None
    """The place in the user's code that made the call.

    `runtime.naming` logs failures with this and the next two attributes.
    """
    overlooked: Any = None
    """The object that logs the failure of the call unless the user looks at the call."""
    before_end: Callable[[bool], object] | None = None
    """Called once at the end of the call, with True for a result.

    The call is made before waiting threads wake, or after a cancel.
    """
    looked_at = False
    """True if the user has asked for the result, waits for it, or has added a callback."""

    def __init__(
        self,
        *,
        submit: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
        when_done: tuple[Callable[[Any], object], ...] = (),
    ) -> None:
        """Make a future for work that has not begun.

        Args:
            submit: runs a job on a worker; used for callbacks that users add.
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
        self._progress = _QUEUED
        self._request_id: str | None = None
        self._queued_s = clock.now()
        self._sending_s: float | None = None
        self._accepted_s: float | None = None
        self._completed_s: float | None = None
        # Both are guarded by the condition that guards the other fields of a Future; its lock is reentrant.
        self._callbacks: list[Callable[[Any], object]] | None = None
        self._cancel_notified = False

    # ---------------------------------------------------- looking

    @property
    def request_id(self) -> str | None:
        """The id of the request at the server (the first of several); None before the server accepts it.

        >>> APIFuture().request_id is None
        True
        """
        return self._request_id

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the requests of the call that the server has accepted.

        >>> APIFuture().request_ids
        ()
        """
        request_id = self.request_id
        return () if request_id is None else (request_id,)

    def status(self) -> Status:
        """Return the state of the call, with the reason if it is paused, delayed, cancelled or failed.

        >>> APIFuture().status()
        Status(state=<FutureState.QUEUED: 'queued'>, reason=None)
        """
        return Status(FutureState.DONE, self._ending()) if self.done() else self._progress

    @property
    def timeline(self) -> Timeline:
        """The moments when the call was queued, sent, accepted and completed.

        >>> APIFuture().timeline.completed is None
        True
        """
        return Timeline(self._queued_s, self._sending_s, self._accepted_s, self._completed_s)

    def done(self) -> bool:
        """Return True if the call has ended. A single read needs no lock.

        >>> APIFuture().done()
        False
        """
        return self._state in _ENDED

    def __repr__(self) -> str:
        status = self.status()
        about = [str(status.state), *([status.reason] if status.reason else []), *self.request_ids[:1]]
        return f"<{type(self).__name__} {', '.join(about)}>"

    _repr_html_ = repr_html

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _NOT_FOR_USERS]

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes

        def __getattr__(self, name: str) -> Any:
            # Called for missing attributes only; uses no fields, because a half-made future has none.
            advice = "" if name.startswith("_") else type(self)._advice
            message = f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            raise AttributeError(message, name=name, obj=self)

        def __getitem__(self, key: Any) -> Any:
            # `list(future)` and a loop over the future call this too.
            raise TypeError(f"{type(self).__name__!r} object has no items{type(self)._advice}")

    # ---------------------------------------------------- waiting

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: the longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: there is no result yet. The work goes on; call this again.
            concurrent.futures.CancelledError: the call was cancelled.
            TinkerError: the call failed.

        >>> try:
        ...     APIFuture().result(timeout=0)
        ... except TimeoutError as error:
        ...     print(error)
        no result after 0 s (queued); the work goes on and may be waited for again
        """
        self._refuse_foreign_wait()
        self._note_look()
        try:
            return super().result(self._rest_of(timeout))
        except FutureTimeoutError:
            # The failure of the call may itself be a timeout, or the result may have arrived just now.
            self.looked_at = False
            if self.done():
                return super().result()
            raise _WaitTimeout(self._still_going(timeout)) from None
        finally:
            del self  # a failure's traceback holds this frame, and the future holds the failure

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end. Return the failure, or None after a success. Arguments and errors as in `result`.

        >>> future = APIFuture()
        >>> future.fail(KeyError("a"))
        True
        >>> future.exception()
        KeyError('a')
        """
        self._refuse_foreign_wait()
        self._note_look()
        try:
            return super().exception(self._rest_of(timeout))
        except FutureTimeoutError:
            self.looked_at = False
            if self.done():
                return super().exception()
            raise _WaitTimeout(self._still_going(timeout)) from None

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
            self._refuse_foreign_wait()
            await self._arrival(timeout)
            if not self.done():
                self.looked_at = False
                raise _async_timeout()(self._still_going(timeout))
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

    def _arrival(self, timeout: float | None) -> Awaitable[None]:
        """Return a future of the running loop that is done when this future is done or the time is over."""
        import asyncio

        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def announce(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no task waits there
                loop.call_soon_threadsafe(arrive)

        if timeout is not None:
            timer = loop.call_later(timeout, arrive)
            arrived.add_done_callback(lambda _: timer.cancel())
        if "ipykernel" in sys.modules and threading.current_thread() is threading.main_thread():
            _pulses.setdefault(loop, _Pulse()).follow(loop, arrived)
        self.when_done(announce)
        return arrived

    def _refuse_foreign_wait(self) -> None:
        """Refuse to wait in a forked child for a call of the parent; only the parent can finish it."""
        if self._generation != _fork._generation and not self.done():
            raise TinkerError(
                "this call was made before the process was forked; its result arrives in the parent only"
            )

    def _rest_of(self, timeout: float | None) -> float | None:
        """Wait in slices until the call ends or one slice of the timeout is left.

        Return the length of that slice.
        """
        left_s = math.inf if timeout is None else timeout
        while not self.done() and (now_s := slice_of(left_s)) < left_s:
            with self._condition:
                if self._state not in _ENDED:
                    self._condition.wait(now_s)
            left_s -= now_s
        return None if timeout is None else left_s

    def _still_going(self, timeout: float | None) -> str:
        status = self.status()
        about = [str(status.state), *([status.reason] if status.reason else [])]
        about += [f"request {request_id}" for request_id in self.request_ids[:1]]
        waited = in_seconds(timeout or 0.0)
        return f"no result after {waited} ({', '.join(about)}); the work goes on and may be waited for again"

    def _ending(self) -> str | None:
        if self.cancelled():
            return "cancelled"
        failure = super().exception()
        return None if failure is None else f"failed: {type(failure).__name__}"

    @property
    def failure(self) -> BaseException | None:
        """The failure of the call; None while it goes on, after a success and after a cancel.

        >>> APIFuture().failure is None
        True
        """
        return self._exception

    def _note_look(self) -> None:
        """Take note that the user looks at the call, so that its failure need not be logged."""
        self.looked_at = True
        if self.overlooked is not None:
            self.overlooked.text = ""

    # ---------------------------------------------------- callbacks

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call `fn(self)` on a worker thread once the call has ended, or soon if it has already ended.

        The callbacks of one future run one after the other, in the order of their addition. An exception of a
        callback is logged and does not stop the others.

        >>> future = APIFuture()
        >>> future.add_done_callback(lambda done: print(done.result()))
        >>> future.resolve(7)
        7
        True
        """
        self._note_look()
        with self._condition:
            if self._callbacks is not None:
                self._callbacks.append(fn)
                return
            ended = self.done()
            if not ended:
                self._callbacks = [fn]
        if ended:
            self._hand_over([fn])
        else:
            self.when_done(_hand_over_callbacks)

    def when_done(self, fn: Callable[[Any], object]) -> None:
        """Call `fn(self)` inline, in the thread that ends the future. For the runtime, not for users.

        >>> future = APIFuture()
        >>> future.when_done(lambda done: print("done"))
        >>> future.resolve(None)
        done
        True
        """
        with self._condition:
            if self._state not in _ENDED:
                self._done_callbacks.append(fn)
                return
        try:
            fn(self)
        except Exception:  # noqa: BLE001  # as in every `Future`
            _log.exception("a callback of %r failed", self)

    def _hand_over_all(self) -> None:
        with self._condition:
            waiting, self._callbacks = self._callbacks, None
        if waiting:
            self._hand_over(waiting)

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

    def begin(self) -> bool:
        """Make `cancel()` return False from now on. Return False if the future has already ended.

        >>> future = APIFuture()
        >>> future.begin(), future.cancel()
        (True, False)
        """
        with self._condition:
            return not self.done() and (self.running() or super().set_running_or_notify_cancel())

    def mark_sending(self) -> None:
        """Mark the call as being sent. A repeated send keeps the moment of the first.

        >>> future = APIFuture()
        >>> future.mark_sending()
        >>> future.status().state
        <FutureState.SENDING: 'sending'>
        """
        if self._sending_s is None:
            self._sending_s = self._clock.now()
        self._progress = _SENDING

    def mark_accepted(self, request_id: str) -> None:
        """Mark the call as accepted by the server under this id.

        >>> future = APIFuture()
        >>> future.mark_accepted("req-1")
        >>> future
        <APIFuture waiting, req-1>
        """
        self._request_id = request_id
        self._accepted_s = self._clock.now()
        self._progress = _WAITING

    def mark_paused(self, reason: str | None) -> None:
        """Mark the call as paused by the server, until `mark_waiting`.

        >>> future = APIFuture()
        >>> future.mark_paused("rate limit")
        >>> future.status().reason
        'rate limit'
        """
        self._progress = Status(FutureState.PAUSED, reason)

    def mark_waiting(self, trouble: str | None = None) -> None:
        """Mark the call as accepted and, as far as is known, in work at the server.

        Args:
            trouble: the reason why polls for the result fail; None if they work.

        >>> future = APIFuture()
        >>> future.mark_waiting()
        >>> future.status().state
        <FutureState.WAITING: 'waiting'>
        """
        self._progress = _WAITING if trouble is None else Status(FutureState.WAITING, trouble)

    def resolve(self, value: T) -> bool:
        """End this future with a result and return True.

        Return False if it has already ended, for example by a cancel.

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

    def cancel(self) -> bool:
        """Cancel the call, if it is not being sent yet. A sample can be cancelled until it is done.

        Return True if the call is cancelled, now or before.

        >>> future = APIFuture()
        >>> future.cancel(), future.cancelled()
        (True, True)
        """
        if not super().cancel():
            return False
        self._complete(succeeded=False)
        with self._condition:
            first, self._cancel_notified = not self._cancel_notified, True
            if first:
                # This wakes threads in `concurrent.futures.wait`. A second call would be an error.
                super().set_running_or_notify_cancel()
        return True

    def set_result(self, result: T) -> None:
        """End this future with a result, as `resolve` does, but raise an error if it has already ended.

        >>> APIFuture().set_result(7)
        """
        self._complete(succeeded=True)
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """End this future with a failure, as `fail` does, but raise an error if it has already ended.

        >>> APIFuture().set_exception(KeyError())
        """
        self._complete(succeeded=False)
        super().set_exception(exception)

    def _invoke_callbacks(self) -> None:
        """Run the callbacks and drop them, because they hold parts of the runtime and so the client.

        Only the thread that ended the future calls this. If `cancel` dropped them at its end, a second cancel
        could remove them before the first has run them.
        """
        super()._invoke_callbacks()  # type: ignore[misc]  # not in typeshed, in every Python from 3.2 on
        self._done_callbacks = ()  # type: ignore[assignment]  # an ended future takes no more

    def _complete(self, *, succeeded: bool) -> None:
        """Note the moment of the end, and call `before_end`. The first call counts."""
        if self._completed_s is None:
            self._completed_s = self._clock.now()
        before_end, self.before_end = self.before_end, None
        if before_end is not None:
            before_end(succeeded)


class _Pulse:
    """A timer that wakes the loop of a notebook regularly while futures are awaited in it.

    The kernel cancels a cell from a signal handler, which a sleeping loop does not notice by itself. Only the
    thread of the loop uses this object.
    """

    def __init__(self) -> None:
        self._awaited = 0
        self._beats = False

    def follow(self, loop: Any, arrived: Any) -> None:
        """Wake the loop until one of its futures, `arrived`, is done or cancelled."""
        self._awaited += 1
        arrived.add_done_callback(self._leave)
        if not self._beats:
            self._beats = True
            loop.call_later(_WAKE_S, self._beat, loop)

    def _leave(self, _: Any) -> None:
        self._awaited -= 1

    def _beat(self, loop: Any) -> None:
        self._beats = self._awaited > 0
        if self._beats:
            loop.call_later(_WAKE_S, self._beat, loop)


_pulses: Final[weakref.WeakKeyDictionary[Any, _Pulse]] = weakref.WeakKeyDictionary()


def _hand_over_callbacks(future: APIFuture[Any]) -> None:
    future._hand_over_all()


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


@lru_cache(maxsize=1)
def _async_timeout() -> type[TimeoutError]:
    import asyncio

    theirs: Any = asyncio.TimeoutError
    return (
        theirs if issubclass(theirs, _WaitTimeout) else type("_AsyncWaitTimeout", (_WaitTimeout, theirs), {})
    )
