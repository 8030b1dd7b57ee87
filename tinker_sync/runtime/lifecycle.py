"""`Lifecycle`: the observers of a client, its calls that have not ended, and its end, in order.

It is held apart from the client, so that the end of a client that was dropped can be noticed. Three ways lead
to the end: `close`, the end of the process, and a client that the garbage collector finds. Any thread may
enter; each part ends once.
"""

from __future__ import annotations

import _thread
import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from tinker_sync._observe import CallFailed, Event, Observer
from tinker_sync.errors import ClientClosedError, EarlierCallFailedError, TinkerError
from tinker_sync.runtime import exits
from tinker_sync.runtime.failures import fresh
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import carried
from tinker_sync.runtime.pending import PendingChanges
from tinker_sync.runtime.unread import note_failure

if TYPE_CHECKING:
    from tinker_sync.config import Settings
    from tinker_sync.journal.record import RunJournal
    from tinker_sync.runtime.connection import Connection
    from tinker_sync.runtime.poller import Poller
    from tinker_sync.runtime.session import Session
    from tinker_sync.runtime.workers import Workers
    from tinker_sync.transport.call import Call
    from tinker_sync.transport.caller import Caller

# They follow from a failure that was reported, or from the user's own `close`.
_NO_NEWS: Final = (EarlierCallFailedError, ClientClosedError)
# Observers and courtesies to the server delay the end by this much at most.
_COMPANION_LIMIT_S: Final = 1.0
_ACKNOWLEDGE_LIMIT_S: Final = 1.0
_JOIN_S: Final = 0.5

_log = logging.getLogger("tinker_sync.session")


class Companion(Observer, Protocol):
    """An observer of a client that ends with it."""

    def close(self, limit_s: float) -> None:
        """Deliver within `limit_s` what is left to deliver, then stop. Never raises."""


class Closable(Protocol):
    """A place where calls wait; its close fails them."""

    def close(self, failure: Exception, /) -> object: ...


class Acknowledging(Protocol):
    """A part that owes the server an acknowledgement at the end."""

    def last_call(self) -> Call | None:
        """Return the call that makes it; None where there is nothing to acknowledge."""


class Lifecycle:
    """The life of one client. Thread-safe.

    The futures that have not ended are kept without a lock; see "Threads" in the package's docstring. A
    future that is added while the client is closed is in the copy that `refuse` goes through, or sees the
    failure.
    """

    def __init__(self, connection: Connection, poller: Poller, pools: Sequence[Workers]) -> None:
        self.leaving = False
        """True from the first `close` on; final. Calls of the user are refused."""
        self.closed = False
        """True when the calls that change something have ended, or are given up; final."""
        self.pending = PendingChanges()
        self.closing = threading.Event()
        self.session: Session | None = None
        self.journal: RunJournal | None = None
        """The journal of the client; its file is closed last."""
        self.companion: Companion | None = None
        self.observers: tuple[Observer, ...] = ()
        """The observers that do not end with the client; replaced, never changed."""
        self.asked_to_end: tuple[str, str | None] | None = None
        """The status and the detail that the user gave to `close`."""
        self.waits: tuple[Closable, ...] = ()
        """The places where calls wait for their turn."""
        self._lock = threading.Lock()
        self._acknowledging: weakref.WeakSet[Acknowledging] = weakref.WeakSet()  # guarded by _lock
        self._unfinished: set[APIFuture[Any]] = set()
        self._failure: Exception | None = None  # set once, final
        self._connection = connection
        self._poller = poller
        self._pools = pools

    @property
    def settings(self) -> Settings:
        """The settings of the client."""
        return self._connection.settings

    @property
    def caller(self) -> Caller:
        """Makes calls until the client is shut."""
        return self._connection.caller

    # -------------------------------------------------------------------------------------- news

    def tell(self, event: Event) -> None:
        """Pass an event to the observers. An observer that raises is logged and harms nothing."""
        observers = self.observers if self.companion is None else (*self.observers, self.companion)
        for observer in observers:
            try:
                observer.observe(event)
            except Exception:  # noqa: BLE001  # watching must not change what is watched
                _log.debug("an observer failed", exc_info=True)

    def report(self, failure: BaseException) -> None:
        """Pass on the failure of a call of the user."""
        if isinstance(failure, _NO_NEWS):
            return
        if self.session is not None:
            self.session.look_after(failure)
        self.tell(CallFailed(error=failure))

    # -------------------------------------------------------------------------------------- calls

    def end_with_client(self, future: APIFuture[Any]) -> None:
        """End a future when the client is closed, at the latest, and report its failure."""
        future.when_done(self.on_ended)
        if not future.done():
            self.keep(future)

    def keep(self, future: APIFuture[Any]) -> None:
        """Do the same with a new future, which calls `on_ended` when it ends."""
        self._unfinished.add(future)
        if self._failure is not None:
            future.fail(fresh(self._failure))

    @property
    def unfinished(self) -> int:
        """The number of calls that have not ended."""
        return len(self._unfinished)

    def on_ended(self, future: APIFuture[Any]) -> None:
        """Forget a future that has ended, and report its failure."""
        self._unfinished.discard(future)
        failure = future.failure
        if failure is not None:
            note_failure(future)
            self.report(failure)

    # -------------------------------------------------------------------------------------- the end

    def note_change(self, future: APIFuture[Any], name: str = "") -> None:
        """Have the end of the client wait for a call that changes something at the server."""
        self.pending.add(future, name)
        exits.remember(self)

    def settle(self, limit_s: float) -> None:
        """Wait for the calls that change something; end those that only read."""
        if self.pending:
            for future in list(self._unfinished):
                if future.only_reads:
                    future.fail(ClientClosedError())
            self.pending.wait(limit_s)

    def finish(
        self, status: str, detail: str | None, limit_s: float, *, quiet: bool = False
    ) -> threading.Event | None:
        """Begin to finish the session at the server; the event is set when that is done.

        It happens on the thread of the heartbeats. So the wait for it is bounded, even where looking up a
        name is not, and it works at the end of a process, when there are no new threads any more.
        """
        session = self.session
        if session is None:
            return None
        if self.asked_to_end is not None:  # the process may end before the thread that closes has begun
            status, detail = self.asked_to_end

        def last() -> None:
            self._acknowledge(min(limit_s / 4, _ACKNOWLEDGE_LIMIT_S))
            session.finish(self, status, detail, limit_s, quiet=quiet)
            if self.companion is not None:
                self.companion.close(min(limit_s, _COMPANION_LIMIT_S))

        return session.end(carried(last))

    def owe(self, acknowledging: Acknowledging) -> None:
        """Send its last call before the connections are closed. Held weakly."""
        with self._lock:
            self._acknowledging.add(acknowledging)

    def _acknowledge(self, limit_s: float) -> None:
        """Send what is owed, within `limit_s` for all of it. Never raises."""
        with self._lock:
            owing = list(self._acknowledging)
        calls = [call for each in owing if (call := each.last_call()) is not None]
        for call in calls:
            try:
                self.caller.call(call.but(deadline_s=limit_s / len(calls)))
            except TinkerError as error:
                _log.debug("retrieved samples could not be acknowledged: %s", error)

    def refuse(self) -> None:
        """Fail the calls that wait for a result or for a turn, and all later ones."""
        self.closing.set()
        failure = self._failure = self._failure or ClientClosedError()
        for future in list(self._unfinished):
            future.fail(fresh(failure))
        for wait in self.waits:
            wait.close(failure)

    def shut(self) -> None:
        """End every thread and connection; calls under way fail."""
        exits.forget(self)
        self.refuse()
        if self.session is not None:
            self.session.end()
        if self.companion is not None:
            self.companion.close(0.0)
        self.caller.close()
        self._poller.close()
        self._connection.http.close()
        # With everything closed threads come home at once, but for those in a callback of the user. Jobs that
        # are left are done all the same: users count on their callbacks.
        for pool in self._pools:
            pool.close(timeout=_JOIN_S, drop=False)
        if self.session is not None:
            self.session.join(_JOIN_S)
        if self.journal is not None:
            self.journal.close()

    def renew_after_fork(self) -> None:
        """Leave the parent's calls to the parent, in a forked child; what is closed stays closed."""
        self._lock = threading.Lock()
        self._acknowledging = weakref.WeakSet()
        self._unfinished = set()
        self.pending.forget()
        ended, self.closing = self.closing.is_set(), threading.Event()
        if ended:
            self.closing.set()


def shut_elsewhere(lifecycle: Any) -> None:
    """Have everything shut by a thread that holds no lock.

    For finalizers, which may run in any thread, between any two steps, with any lock held. Starting a
    `threading.Thread` takes locks of its own, so even that is left to the new thread.
    """
    with suppress(RuntimeError):  # the process ends anyway
        _thread.start_new_thread(_start_shutting, (lifecycle,))


def _start_shutting(lifecycle: Lifecycle) -> None:
    with suppress(RuntimeError):
        threading.Thread(target=lifecycle.shut, name="tinker-close", daemon=True).start()
