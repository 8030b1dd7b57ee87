"""`APIFuture`: what every call that takes its time returns.

A real `concurrent.futures.Future`, so `wait`, `as_completed` and `asyncio.wrap_future` work, with more to ask
it. One rule holds for every way to wait: waiting never cancels. A wait that runs out, an awaiting task that
is cancelled and a Ctrl-C leave the work going on and the future usable.

Callbacks: those that users add run on the workers given to the constructor, in the order they were added and
never under a lock; also when they are added to a finished future. Where there are no workers, or none any
more, they run in the thread that finishes the future or adds them. The runtime's own go through `when_done`
and run inline, so they must be short.

Threads: anybody may wait, look or cancel. One stage of the runtime at a time reports progress, by attribute
writes that need no lock. This module knows nothing of requests, threads that do them or event loops;
`asyncio` is loaded only by an `await`.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tinker_sync._clock import SYSTEM_CLOCK, Clock, in_seconds, slice_of
from tinker_sync._display import repr_html
from tinker_sync.errors import TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.progress import FutureState, Status, Timeline

T = TypeVar("T")

Job = Callable[[], object]
"""Something to run on a worker."""

Submit = Callable[[Job], object]
"""How a job reaches the workers; raises RuntimeError when they take no more."""

_log = logging.getLogger(__name__)

if sys.version_info >= (3, 11):
    _WaitTimeout = TimeoutError
else:

    class _WaitTimeout(FutureTimeoutError, TimeoutError):
        """Before 3.11 there were two exceptions of this name; whichever a script catches, it catches this."""


# Completion in shells and notebooks leaves these out: the runtime calls them.
_NOT_FOR_USERS: Final = frozenset(
    {"asked", "looked_at", "only_reads", "overlooked"}
    | {"begin", "fail", "resolve", "set_exception", "set_result", "set_running_or_notify_cancel", "when_done"}
    | {"mark_accepted", "mark_paused", "mark_sending", "mark_waiting"}
)

# How soon a cell of a notebook that awaits a future can be interrupted.
_WAKE_S: Final = 0.25

_QUEUED = Status(FutureState.QUEUED)
_SENDING = Status(FutureState.SENDING)
_WAITING = Status(FutureState.WAITING)


class APIFuture(Future[T]):
    """The result of a call, now or later. Thread-safe.

    `cancel()` works until the call is being sent, and for samples until they are done; after that it returns
    False and changes nothing. Cancelled futures raise `concurrent.futures.CancelledError`, also where they
    are awaited.

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
    """The call changes nothing at the server, so the end of its client does not wait for it."""
    asked: Any = None
    """Where the user made the call; set by `unread`, as are the next two."""
    overlooked: Any = None
    """Logs the failure of the call unless it is looked at."""
    looked_at = False
    """The user has asked for the result or waits for it, or has added a callback."""

    def __init__(
        self,
        *,
        submit: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
        when_done: tuple[Callable[[Any], object], ...] = (),
    ) -> None:
        """Make a future of work that has not begun.

        Args:
            submit: runs a job on a worker; used for callbacks that users add.
            clock: measures the timeline.
            when_done: called inline, one after the other, in the thread that ends the future.
        """
        super().__init__()
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
        # Both guarded by the condition that guards the rest of a Future; its lock is reentrant.
        self._callbacks: list[Callable[[Any], object]] | None = None
        self._cancel_notified = False

    # ---------------------------------------------------- looking

    @property
    def request_id(self) -> str | None:
        """The id the server gave the request (the first of several); None before it took it.

        >>> APIFuture().request_id is None
        True
        """
        return self._request_id

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all requests the call was split into, as far as the server took them.

        >>> APIFuture().request_ids
        ()
        """
        request_id = self.request_id
        return () if request_id is None else (request_id,)

    def status(self) -> Status:
        """Where the call is and, if it is paused or ended badly, why.

        >>> APIFuture().status()
        Status(state=<FutureState.QUEUED: 'queued'>, reason=None)
        """
        return Status(FutureState.DONE, self._ending()) if self.done() else self._progress

    @property
    def timeline(self) -> Timeline:
        """When the call was queued, sent, accepted and completed.

        >>> APIFuture().timeline.completed is None
        True
        """
        return Timeline(self._queued_s, self._sending_s, self._accepted_s, self._completed_s)

    def __repr__(self) -> str:
        status = self.status()
        about = [str(status.state), *([status.reason] if status.reason else []), *self.request_ids[:1]]
        return f"<{type(self).__name__} {', '.join(about)}>"

    _repr_html_ = repr_html

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _NOT_FOR_USERS]

    if not TYPE_CHECKING:  # checkers shall go on to find what is not there

        def __getattr__(self, name: str) -> Any:
            # Only asked for what is not there; half-made futures have no field that it could look at.
            advice = "" if name.startswith("_") else type(self)._advice
            message = f"{type(self).__name__!r} object has no attribute {name!r}{advice}"
            raise AttributeError(message, name=name, obj=self)

        def __getitem__(self, key: Any) -> Any:
            # Also what `list(future)` and a loop over it come to.
            raise TypeError(f"{type(self).__name__!r} object has no items{type(self)._advice}")

    # ---------------------------------------------------- waiting

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: at most so many seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it is not there yet. The work goes on, ask again.
            concurrent.futures.CancelledError: it was cancelled.
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
            # The failure of the call may itself be a timeout; and the result may have come just now.
            self.looked_at = False
            if self.done():
                return super().result()
            raise _WaitTimeout(self._still_going(timeout)) from None
        finally:
            del self  # a failure's traceback holds this frame, and the future holds the failure

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the failure, None after a success. Arguments and errors as in `result`.

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
        """This future itself, for scripts that ask a client's future for the one below it.

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
        """The same as `result_async()`, for `asyncio.create_task` and its like.

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
        """A future of the running loop that is done when this one is or the time is up."""
        import asyncio

        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def announce(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(arrive)

        if timeout is not None:
            timer = loop.call_later(timeout, arrive)
            arrived.add_done_callback(lambda _: timer.cancel())
        if "ipykernel" in sys.modules and threading.current_thread() is threading.main_thread():
            _pulses.setdefault(loop, _Pulse()).follow(loop, arrived)
        self.when_done(announce)
        return arrived

    def _refuse_foreign_wait(self) -> None:
        """In a forked child nobody is left to finish what the parent began."""
        if self._generation != _fork._generation and not self.done():
            raise TinkerError(
                "this call was made before the process was forked; its result arrives in the parent only"
            )

    def _rest_of(self, timeout: float | None) -> float | None:
        """Wait for the end, a slice at a time; what is left of the time for the last one."""
        left_s = math.inf if timeout is None else timeout
        while not self.done() and (now_s := slice_of(left_s)) < left_s:
            with suppress(FutureTimeoutError, CancelledError):
                super().exception(now_s)
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
        """The failure of a call that has failed; None while it goes on, after a success and after a cancel.

        >>> APIFuture().failure is None
        True
        """
        return self._exception

    def _note_look(self) -> None:
        """Take note that the user learns of a failure, if there is one."""
        self.looked_at = True
        if self.overlooked is not None:
            self.overlooked.text = ""

    # ---------------------------------------------------- callbacks

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Have `fn(self)` called on a worker thread once the call has ended; soon, if it has ended already.

        Callbacks of one future run one after the other in the order they were added. What one raises is
        logged and keeps nothing else from running.

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
        """For the runtime: like `add_done_callback`, but inline, in whichever thread ends the future.

        >>> future = APIFuture()
        >>> future.when_done(lambda done: print("done"))
        >>> future.resolve(None)
        done
        True
        """
        super().add_done_callback(fn)

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
                # The workers have gone home; somebody may be waiting for this call in another way.
                _log.debug("callbacks of %r run where it ended: the workers are closed", self)
            else:
                return
        job()

    # ---------------------------------------------------- for the runtime

    def begin(self) -> bool:
        """From here on `cancel()` returns False. False when the future has already ended.

        >>> future = APIFuture()
        >>> future.begin(), future.cancel()
        (True, False)
        """
        with self._condition:
            return not self.done() and (self.running() or super().set_running_or_notify_cancel())

    def mark_sending(self) -> None:
        """The call is on its way; a repeated send keeps the first moment.

        >>> future = APIFuture()
        >>> future.mark_sending()
        >>> future.status().state
        <FutureState.SENDING: 'sending'>
        """
        if self._sending_s is None:
            self._sending_s = self._clock.now()
        self._progress = _SENDING

    def mark_accepted(self, request_id: str) -> None:
        """The server has the call, under this id.

        >>> future = APIFuture()
        >>> future.mark_accepted("req-1")
        >>> future
        <APIFuture waiting, req-1>
        """
        self._request_id = request_id
        self._accepted_s = self._clock.now()
        self._progress = _WAITING

    def mark_paused(self, reason: str | None) -> None:
        """The server does not work on it for now; until `mark_waiting`.

        >>> future = APIFuture()
        >>> future.mark_paused("rate limit")
        >>> future.status().reason
        'rate limit'
        """
        self._progress = Status(FutureState.PAUSED, reason)

    def mark_waiting(self, trouble: str | None = None) -> None:
        """The server has it, and works on it as far as is known.

        Args:
            trouble: the reason for which there is no news of it.

        >>> future = APIFuture()
        >>> future.mark_waiting()
        >>> future.status().state
        <FutureState.WAITING: 'waiting'>
        """
        self._progress = _WAITING if trouble is None else Status(FutureState.WAITING, trouble)

    def resolve(self, value: T) -> bool:
        """End with a result, unless it has ended already, by a cancel for instance; says whether it did.

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
        """End with a failure, unless it has ended already; says whether it did.

        >>> APIFuture().fail(KeyError())
        True
        """
        try:
            self.set_exception(failure)
        except InvalidStateError:
            return False
        return True

    def cancel(self) -> bool:
        """Give the call up if it has not been sent. True when it is cancelled, now or before.

        >>> future = APIFuture()
        >>> future.cancel(), future.cancelled()
        (True, True)
        """
        if not super().cancel():
            return False
        self._complete()
        with self._condition:
            first, self._cancel_notified = not self._cancel_notified, True
            if first:
                # Nobody else would wake those in `concurrent.futures.wait`; a second call would be an error.
                super().set_running_or_notify_cancel()
        return True

    def set_result(self, result: T) -> None:
        """Like `resolve`, but an error when the future has ended already.

        >>> APIFuture().set_result(7)
        """
        self._complete()
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """Like `fail`, but an error when the future has ended already.

        >>> APIFuture().set_exception(KeyError())
        """
        self._complete()
        super().set_exception(exception)

    def _invoke_callbacks(self) -> None:
        """Run the callbacks, and drop them: they hold the runtime's parts, and through them the client.

        Only the thread that ended the future comes here. Dropping them anywhere else, say at the end of
        `cancel`, would let a second cancel take them away from the first, which has not run them yet.
        """
        super()._invoke_callbacks()  # type: ignore[misc]  # not in typeshed, in every Python from 3.2 on
        self._done_callbacks = []

    def _complete(self) -> None:
        """Note when it ended; the first to say so counts."""
        if self._completed_s is None:
            self._completed_s = self._clock.now()


class _Pulse:
    """Wakes the loop of a notebook now and then while futures are awaited in it.

    The kernel cancels a cell from a signal handler, which a sleeping loop does not notice by itself. Only the
    thread of the loop comes here.
    """

    def __init__(self) -> None:
        self._awaited = 0
        self._beats = False

    def follow(self, loop: Any, arrived: Any) -> None:
        """Wake the loop until a future of it is done or cancelled."""
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
        except BaseException as failure:  # even a callback's SystemExit is not ours to obey
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
