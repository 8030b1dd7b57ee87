"""What a client consists of that has to be ended, held apart from the client so that its end can be noticed.

Three ways lead here: `close`, the end of the process, and a client that was simply dropped. Any thread may
enter; each part ends once, whoever comes first.
"""

from __future__ import annotations

import _thread
import logging
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from tinker_sync._observe import CallFailed, Event, Observer
from tinker_sync.errors import ClientClosedError, EarlierCallFailedError, TinkerError
from tinker_sync.runtime import exits
from tinker_sync.runtime.naming import carried
from tinker_sync.runtime.unfinished import Unfinished

if TYPE_CHECKING:
    from tinker_sync.config import Settings
    from tinker_sync.runtime.poller import Poller
    from tinker_sync.runtime.session import Session
    from tinker_sync.runtime.workers import Workers
    from tinker_sync.transport.call import Call
    from tinker_sync.transport.caller import Caller
    from tinker_sync.transport.http import Http

# Consequences of another failure, which has been told, or of the user's own doing.
_NO_NEWS: Final = (EarlierCallFailedError, ClientClosedError)
# Neither those who watch nor a courtesy to the server hold up the end for longer.
_COMPANION_LIMIT_S: Final = 1.0
_ACKNOWLEDGE_LIMIT_S: Final = 1.0
_JOIN_S: Final = 0.5

_log = logging.getLogger("tinker_sync.session")


class Companion(Observer, Protocol):
    """Watches a client and ends with it."""

    def close(self, limit_s: float) -> None:
        """Deliver within `limit_s` what there is to deliver, then stop. Never raises."""


class Closable(Protocol):
    """Something that fails whoever waits in it."""

    def close(self, failure: Exception, /) -> object: ...


class Acknowledging(Protocol):
    """Something that owes the server an acknowledgement at the end."""

    def last_call(self) -> Call | None:
        """Return the call that makes it; None where there is nothing to acknowledge."""


class Parts:
    """The parts of one client. Thread-safe."""

    def __init__(
        self, settings: Settings, caller: Caller, poller: Poller, http: Http, pools: tuple[Workers, ...]
    ) -> None:
        self.settings = settings
        self.caller = caller
        self.closing = threading.Event()
        self.session: Session | None = None
        self.companion: Companion | None = None
        self.observers: tuple[Observer, ...] = ()
        """Who else watches; replaced, never changed."""
        self.asked_to_end: tuple[str, str | None] | None = None
        """How the user said that it ended, once he has; whoever finishes the session says so too."""
        self.waits: tuple[Closable, ...] = ()
        """Where calls wait for their turn."""
        self.unfinished = Unfinished(self.report)
        self._lock = threading.Lock()
        self._acknowledging: weakref.WeakSet[Acknowledging] = weakref.WeakSet()  # guarded by _lock
        self._poller = poller
        self._http = http
        self._pools = pools

    # -------------------------------------------------------------------------------------- news

    def tell(self, event: Event) -> None:
        """Tell who watches. What it raises is logged and harms nothing."""
        observers = self.observers if self.companion is None else (*self.observers, self.companion)
        for observer in observers:
            try:
                observer.observe(event)
            except Exception:  # noqa: BLE001  # watching must not change what is watched
                _log.debug("an observer failed", exc_info=True)

    def report(self, failure: BaseException) -> None:
        """A call of the user has failed."""
        if isinstance(failure, _NO_NEWS):
            return
        if self.session is not None:
            self.session.look_after(failure)
        self.tell(CallFailed(error=failure))

    # -------------------------------------------------------------------------------------- the end

    def finish(
        self, status: str, detail: str | None, limit_s: float, *, quiet: bool = False
    ) -> threading.Event | None:
        """Begin to tell the server that the session is over; the event is set when that is done.

        It happens on the thread of the heartbeats. So it is bounded for whoever waits, even where looking up
        a name is not, and works at the end of a process, when there are no new threads any more.
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
        """Fail whoever waits for a result or for a turn."""
        self.closing.set()
        failure = ClientClosedError()
        self.unfinished.close(failure)
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
        self._http.close()
        # With everything closed threads come home at once, but for those in a callback of the user. What is
        # left to do is done all the same: callbacks have somebody who counts on them.
        for pool in self._pools:
            pool.close(timeout=_JOIN_S, drop=False)
        if self.session is not None:
            self.session.join(_JOIN_S)

    def renew_after_fork(self) -> None:
        """In the child nobody waits for the end; what is ended stays so."""
        self._lock = threading.Lock()
        self._acknowledging = weakref.WeakSet()
        ended, self.closing = self.closing.is_set(), threading.Event()
        if ended:
            self.closing.set()


def shut_elsewhere(parts: Any) -> None:
    """For finalizers, which may run in any thread, between any two steps, with any lock held: have everything
    shut by a thread that holds none.

    Starting a `threading.Thread` takes locks of its own, so even that is left to the new one.
    """
    with suppress(RuntimeError):  # the process ends anyway
        _thread.start_new_thread(_start_shutting, (parts,))


def _start_shutting(parts: Parts) -> None:
    with suppress(RuntimeError):
        threading.Thread(target=parts.shut, name="tinker-close", daemon=True).start()
