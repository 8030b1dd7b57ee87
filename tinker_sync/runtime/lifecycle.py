"""`Lifecycle`: the observers of a client, its unfinished calls, and its end, in order.

This object is separate from the client, so that it outlives a client that was dropped. A client ends in one
of three ways: by `close`, by the end of the process, or by garbage collection. Any thread may call the
methods; each part ends once.
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
from tinker_sync.runtime.failures import copy_exception
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import carried, note_failure
from tinker_sync.runtime.pending import PendingChanges

if TYPE_CHECKING:
    from tinker_sync.config import Settings
    from tinker_sync.journal.record import RunJournal
    from tinker_sync.runtime.connection import Connection
    from tinker_sync.runtime.poller import Poller
    from tinker_sync.runtime.session import Session
    from tinker_sync.runtime.workers import Workers
    from tinker_sync.transport.call import Call
    from tinker_sync.transport.caller import Caller

# These are not reported, because they follow from a reported failure, or from `close` by the user.
_NO_NEWS: Final = (EarlierCallFailedError, ClientClosedError)
# Observers and acknowledgements delay the end by at most these times.
_COMPANION_LIMIT_S: Final = 1.0
_ACKNOWLEDGE_LIMIT_S: Final = 1.0
_JOIN_S: Final = 0.5

_log = logging.getLogger("tinker_sync.session")


class Companion(Observer, Protocol):
    """An observer that is closed together with its client."""

    def close(self, limit_s: float) -> None:
        """Deliver the remaining events within `limit_s`, then stop. Never raises."""


class Closable(Protocol):
    """A place where calls wait; its close fails them."""

    def close(self, failure: Exception, /) -> object: ...


class Acknowledging(Protocol):
    """An object with a last call to the server, which is sent when the client ends."""

    def last_call(self) -> Call | None:
        """Return the last call, or None if there is nothing to send."""


class Lifecycle:
    """The observers, the unfinished calls and the end of one client. Thread-safe.

    The set of unfinished futures has no lock; see "Threads" in the package's docstring. A future that is
    added while the client closes fails in any case: it is in the copy of the set that `refuse` uses, or
    `keep` finds the failure.
    """

    def __init__(
        self, connection: Connection, poller: Poller, pools: Sequence[Workers], pending: PendingChanges
    ) -> None:
        self.leaving = False
        """True from the first `close` on; final. Calls of the user are refused."""
        self.closed = False
        """True when the calls that change something have ended or are given up; final."""
        self.pending = pending
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
        """The caller of the client; it makes calls until `shut`."""
        return self._connection.caller

    # -------------------------------------------------------------------------------------- news

    def tell(self, event: Event) -> None:
        """Pass an event to the observers. An exception of an observer is logged and has no other effect."""
        observers = self.observers if self.companion is None else (*self.observers, self.companion)
        for observer in observers:
            try:
                observer.observe(event)
            except Exception:  # noqa: BLE001  # an observer must not disturb the client
                _log.debug("an observer failed", exc_info=True)

    def report(self, failure: BaseException) -> None:
        """Report the failure of a call of the user to the session and the observers."""
        if isinstance(failure, _NO_NEWS):
            return
        if self.session is not None:
            self.session.look_after(failure)
        self.tell(CallFailed(error=failure))

    # -------------------------------------------------------------------------------------- calls

    def end_with_client(self, future: APIFuture[Any]) -> None:
        """Fail a future when the client is closed, unless it has ended before.

        If the future fails, for this or another reason, report the failure to the observers.
        """
        future.when_done(self.on_ended)
        if not future.done():
            self.keep(future)

    def keep(self, future: APIFuture[Any]) -> None:
        """Add a new future to the unfinished calls, which fail when the client is closed.

        The future must have `on_ended` among its callbacks.
        """
        self._unfinished.add(future)
        if self._failure is not None:
            future.fail(copy_exception(self._failure))

    @property
    def unfinished(self) -> int:
        """The number of calls that have not ended."""
        return len(self._unfinished)

    def on_ended(self, future: APIFuture[Any]) -> None:
        """Forget a future that has ended, and report its failure."""
        self._unfinished.discard(future)
        failure = future._exception
        if failure is not None:
            note_failure(future)
            self.report(failure)

    # -------------------------------------------------------------------------------------- the end

    def note_change(self, future: APIFuture[Any], name: str = "") -> None:
        """Make the end of the client wait for a call that changes something at the server.

        The threads that the call needs start now: from Python 3.12 on, none can start while the process ends.
        """
        first = not self.pending.under_way()
        self.pending.add(future, name)
        if first:
            self._poller.reserve()
            for pool in self._pools:
                pool.reserve()
        exits.remember(self)

    def settle(self, limit_s: float) -> None:
        """Wait for the calls that change something; fail the calls that only read."""
        if self.pending:
            for future in list(self._unfinished):
                if future.only_reads:
                    future.fail(ClientClosedError())
            self.pending.wait(limit_s)

    def finish(
        self, status: str, detail: str | None, limit_s: float, *, quiet: bool = False
    ) -> threading.Event | None:
        """Begin to finish the session at the server. The returned event is set when that is done.

        The thread of the heartbeats does the work. So the caller can limit its wait, even while the lookup of
        a host name has no limit. This also works at the end of a process, when no new thread can start.
        """
        session = self.session
        if session is None:
            return None
        if self.asked_to_end is not None:  # the process may end before `tinker-close` has begun
            status, detail = self.asked_to_end

        def last() -> None:
            self._acknowledge(min(limit_s / 4, _ACKNOWLEDGE_LIMIT_S))
            session.finish(self, status, detail, limit_s, quiet=quiet)
            if self.companion is not None:
                self.companion.close(min(limit_s, _COMPANION_LIMIT_S))

        return session.end(carried(last))

    def owe(self, acknowledging: Acknowledging) -> None:
        """Register an object whose last call to the server must be sent before the connections are closed.

        The object is held weakly.
        """
        with self._lock:
            self._acknowledging.add(acknowledging)

    def _acknowledge(self, limit_s: float) -> None:
        """Send the last calls of the registered objects, within `limit_s` for all of them. Never raises."""
        with self._lock:
            owing = list(self._acknowledging)
        calls = [call for each in owing if (call := each.last_call()) is not None]
        for call in calls:
            try:
                self.caller.call(call.but(deadline_s=limit_s / len(calls)))
            except TinkerError as error:
                _log.debug("retrieved samples could not be acknowledged: %s", error)

    def refuse(self) -> None:
        """Fail the calls that wait for a result or for their turn, and all later ones."""
        self.closing.set()
        failure = self._failure = self._failure or ClientClosedError()
        for future in list(self._unfinished):
            future.fail(copy_exception(failure))
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
        # With everything closed, the threads end at once, except those in a callback of the user. The workers
        # still do the jobs that are left, because users rely on their callbacks.
        for pool in self._pools:
            pool.close(timeout=_JOIN_S, drop=False)
        if self.session is not None:
            self.session.join(_JOIN_S)
        if self.journal is not None:
            self.journal.close()

    def renew_after_fork(self) -> None:
        """Leave the parent's calls to the parent, in a forked child. A closed client stays closed."""
        self._lock = threading.Lock()
        self._acknowledging = weakref.WeakSet()
        self._unfinished = set()
        self.pending.forget()
        ended, self.closing = self.closing.is_set(), threading.Event()
        if ended:
            self.closing.set()
        if self.journal is not None:
            self.journal.renew_after_fork()


def shut_elsewhere(lifecycle: Any) -> None:
    """Shut a client on a thread that holds no lock.

    Finalizers call this. They may run in any thread, between any two steps, with any lock held. The start of
    a `threading.Thread` takes locks too, so a thread from `_thread` starts it.
    """
    with suppress(RuntimeError):  # the process ends anyway
        _thread.start_new_thread(_start_shutting, (lifecycle,))


def _start_shutting(lifecycle: Lifecycle) -> None:
    with suppress(RuntimeError):
        threading.Thread(target=lifecycle.shut, name="tinker-close", daemon=True).start()
