"""`ClientRuntime`: the parts of one client, which it makes in order and connects.

- `connection`: the address, the keys and the sockets.
- `server`: the server's settings, asked for once, and the calls, schedulers and limits that depend on them.
- `pools`, `poller`: the threads.
- `session`: the session at the server, if the client has one.
- `lifecycle`: the observers, the calls that have not ended, and the end of all parts above.

A core uses the network only when a call needs it. A core that is dropped, closed or forked leaves no thread
behind. Calls under way keep it alive.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync._observe import Event, Observer, Stopwatch
from tinker_sync.config import Settings
from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime import _fork, exits, training_part
from tinker_sync.runtime.connection import Connection
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.handshake import ServerFacts
from tinker_sync.runtime.lazy import Lazy
from tinker_sync.runtime.lifecycle import Acknowledging, Companion, Lifecycle, shut_elsewhere
from tinker_sync.runtime.naming import carried
from tinker_sync.runtime.notices import Notices
from tinker_sync.runtime.operation import Ended
from tinker_sync.runtime.pending import PENDING_LIMIT_S, PendingChanges
from tinker_sync.runtime.poller import QUICK_BYTES, Poller
from tinker_sync.runtime.rate_limiter import RateLimiter
from tinker_sync.runtime.server import Machinery, Server, finite
from tinker_sync.runtime.session import Session
from tinker_sync.runtime.spending import SpendGuard
from tinker_sync.runtime.workers import WorkerPools
from tinker_sync.types.service import ClientDynamicConfigResponse

FinishStatus = Literal["success", "errored", "interrupted"]

CLOSE_LIMIT_S: Final = 10.0

_log = logging.getLogger("tinker_sync.session")


class ClientRuntime:
    """The parts that a client consists of: connection, threads, session, server settings. Thread-safe.

    Args:
        settings: the settings of the user.
        session: the session to open; None for a client that needs none.
        limiter: a rate limiter for this client alone; None for the one that all clients of this base URL and
            key share.
        facts: the settings and the dialect of the server, if another process has fetched them already.
        clock: measures time.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        session: Session | None = None,
        limiter: RateLimiter | None = None,
        facts: ServerFacts | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.notices = Notices(clock)
        self.connection = connection = Connection(settings, clock)
        self.keys, self.secrets = connection.keys, connection.secrets
        self.http, self.caller = connection.http, connection.caller
        pending = PendingChanges()
        self.pools = pools = WorkerPools(pending.under_way)
        self.send_pool, self.fetch_pool = pools.send, pools.fetch
        self.loss_pool, self.callback_pool = pools.loss, pools.callback
        self.poller = Poller(
            connection.http, pools.fetch, clock, pace=settings.pace, needed=pending.under_way
        )
        self.lifecycle = Lifecycle(connection, self.poller, pools.in_order_of_end(), pending)
        self.server = Server(
            connection, self.poller, pools, self.lifecycle, self.notices, facts=facts, limiter=limiter
        )
        self.hide = connection.mask
        """Mask a secret of the user; see `Connection.mask`."""
        self.spending = SpendGuard(self.lifecycle.tell)
        """The limiters: asked before a pass or a sample is sent, and informed of the tokens that it used."""
        self.stopwatches: tuple[Stopwatch, ...] = ()
        """The recordings under way; replaced, never changed."""
        # Bound once, because tens of thousands of futures may refer to them.
        self._run_callback, self._on_ended = self.callback_pool.run, self.lifecycle.on_ended
        self._session = session
        self.lifecycle.journal = session.journal if session is not None else None
        self._opened: Lazy[Session] = Lazy(clock.now)
        self._close_lock = threading.Lock()
        self._closed: APIFuture[None] | None = None  # guarded by _close_lock
        self._finalizer = weakref.finalize(self, shut_elsewhere, self.lifecycle)
        self._finalizer.atexit = False
        _fork.renew_in_child(self)

    # -------------------------------------------------------------------------------------- the server

    def start(self, deadline_at: float = math.inf) -> Machinery:
        """Return the parts that depend on the server's settings. The first call asks the server for them.

        Args:
            deadline_at: the moment of the clock at which to give up.

        Raises:
            ClientClosedError: the client is closed.
            TinkerError: the server cannot be reached, or refuses the client. The next call tries again.
        """
        made = self.server.made.value
        if made is None or self.lifecycle.closed:
            made = self.server.start(deadline_at)
        if self._opened.value is None and self._session is not None and self._session.heartless:
            self._begin_heartbeats(deadline_at)
        return made

    def ready(self, deadline_at: float = math.inf) -> Machinery:
        """Do the same as `start`, for a call that needs the session. Refuse the call if the session is lost.

        Raises:
            SessionLostError: the server has dropped the session.
        """
        made = self.start(deadline_at)
        session = self._session
        if session is not None and session._lost is not None:
            session.refuse_lost()
        return made

    @property
    def dynamic(self) -> ClientDynamicConfigResponse:
        """The newest version of the server's settings that may change."""
        return self.server.dynamic

    def upkeep(self) -> None:
        """Begin to renew the token and the settings that are due. Every heartbeat calls this."""
        if not self.lifecycle.closed:
            self.server.refresh()

    def call(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, object] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        usual_s: float | None = None,
        pause_billing: bool = True,
    ) -> Any:
        """Make one call of the API and wait for its answer; see `Server.call`.

        Args:
            deadline_s: the time that the call may take in all; None for that of the settings.
            usual_s: the time if the settings have none either.
            pause_billing: wait out a 402 for as long as the server allows.

        Raises:
            ClientClosedError: the client is closed, or was closed during the call.
            TinkerError: the call fails.
        """
        give_up_at = self.give_up_at(deadline_s, math.inf if usual_s is None else usual_s)
        self.start(give_up_at)
        return self.server.call(
            name,
            request,
            path=path,
            query=query,
            headers=headers,
            deadline_at=give_up_at,
            pause_billing=pause_billing,
        )

    def give_up_at(self, deadline_s: float | None, usual_s: float) -> float:
        """Return the moment of the clock at which a call gives up.

        The first of these times that is set counts: `deadline_s` of the call, the deadline of the settings,
        `usual_s`.
        """
        if deadline_s is None:
            deadline_s = self.settings.deadline_s
        limit_s = usual_s if deadline_s is None else deadline_s
        return self.clock.now() + limit_s if math.isfinite(limit_s) else math.inf

    # -------------------------------------------------------------------------------------- jobs

    def future(self, *when_done: Callable[[APIFuture[Any]], object]) -> APIFuture[Any]:
        """Return a future for a call of the user; the future ends when the client is closed, at the latest.

        Args:
            when_done: called inline, one after the other, when the future ends.
        """
        made: APIFuture[Any] = APIFuture(
            submit=self._run_callback, clock=self.clock, when_done=(self._on_ended, *when_done)
        )
        self.lifecycle.keep(made)
        for stopwatch in self.stopwatches:
            stopwatch.follow(made)
        return made

    def note_encoded(self, method: str, began_s: float) -> None:
        """Report to recordings that this thread encoded a request from the moment `began_s` until now."""
        for stopwatch in self.stopwatches:
            stopwatch.encoded(method, began_s)

    def end_with_this(self, future: APIFuture[Any]) -> None:
        """Fail a future when the client is closed, unless it has ended before.

        If the future fails, for this or another reason, the failure is reported to the observers.
        """
        self.lifecycle.end_with_client(future)

    def enter(self, step: Callable[[], object]) -> None:
        """Run `step` on the thread `tinker-enter`, in the order of the calls.

        Ctrl-C may interrupt the main thread between any two lines. On this thread it cannot separate lines
        that must run together.

        Raises:
            ClientClosedError: the client is closed.
        """
        self.server.refuse_closed()
        self.pools.enter.run_call(step)

    def run_soon(self, step: Callable[[], object]) -> None:
        """Run a short step, which never waits, on the poller's thread; without that thread, as `enter` does.

        Steps may run in any order.

        Raises:
            ClientClosedError: the client is closed.
        """
        if self.lifecycle.closed:
            raise ClientClosedError
        if not self.poller.run_soon(step):
            self.enter(step)

    def run_awaited(self, job: Callable[[], object]) -> None:
        """Run a blocking call on a worker while the user awaits it.

        Raises:
            ClientClosedError: the client is closed.
        """
        self.refuse_closed()
        self.pools.awaited.run_call(job)

    def run_creating(self, job: Callable[[], object]) -> None:
        """Run a job that creates a client on a worker; the job may block.

        Raises:
            ClientClosedError: the client is closed.
        """
        self.server.refuse_closed()
        self.pools.create.run_call(job)

    def run_sending(self, job: Callable[[], object]) -> None:
        """Run a job that sends a training request on a worker.

        The same worker sends the first poll for the result.
        """
        self.send_pool.run(partial(self.poller.run_step, job))

    def follow_sending(self, part: training_part.TrainingPart, job: Callable[[], object]) -> bool:
        """Run a job that sends a small training request on this worker, after its current step.

        Return False, and do not run the job, if the request is large, if sending it may block, or if this
        thread is not a worker within a step.
        """
        made = self.server.made.value
        quick = part.size <= QUICK_BYTES and made is not None and made.train_bytes.has_room
        return quick and self.poller.follow(job)

    def training_sender(self) -> Callable[[training_part.TrainingPart, int, Ended], None]:
        """Return the function that sends the requests of one training client."""
        return training_part.PartSender(self.server, self._session).send

    # -------------------------------------------------------------------------------------- observers

    def watch(self, companion: Companion) -> None:
        """Set the observer that is closed together with the client."""
        self.lifecycle.companion = companion

    @property
    def companion(self) -> Companion | None:
        """The observer that is closed together with the client."""
        return self.lifecycle.companion

    def listen(self, observer: Observer) -> None:
        """Add an observer that stays open when the client is closed."""
        self.lifecycle.observers = (*self.lifecycle.observers, observer)

    def owe(self, acknowledging: Acknowledging) -> None:
        """Register an object whose last call to the server must be sent before the connections are closed."""
        self.lifecycle.owe(acknowledging)

    def tell(self, event: Event) -> None:
        """Pass an event to the observers."""
        self.lifecycle.tell(event)

    # -------------------------------------------------------------------------------------- the session

    def session_id(self, deadline_at: float = math.inf) -> str:
        """Return the id of the session, which the first call creates.

        Args:
            deadline_at: the moment of the clock at which to give up.
        """
        self.server.refuse_closed()
        session = self.session
        session.refuse_lost()
        if session.session_id is None or session.heartless:
            self._begin_heartbeats(deadline_at)
        assert session.session_id is not None  # noqa: S101  # `open` has set it
        return session.session_id

    def get_session_id(self) -> str:
        """Return the id of the session, under the name that existing scripts use."""
        return self.session_id()

    @property
    def known_session_id(self) -> str | None:
        """The id of the session, or None before it is created. This never asks the server."""
        return self._session.session_id if self._session is not None else None

    @property
    def session(self) -> Session:
        """The session at the server."""
        if self._session is None:
            raise TinkerError("this client has no session; make a ServiceClient for that")
        return self._session

    def _begin_heartbeats(self, deadline_at: float) -> None:
        self._opened.get(lambda: self._open_session(deadline_at), deadline_at=deadline_at)

    def _open_session(self, deadline_at: float) -> Session:
        session, server = self.session, self.server
        dialect = server.start(deadline_at).facts.dialect
        session.open(self, dialect, finite(server.left_s(deadline_at)))
        self.lifecycle.session = session
        if session.owned:
            exits.remember(self.lifecycle)
        if self.lifecycle.closed:  # closed while the session was created: nothing else would end it
            self.lifecycle.shut()
            self.server.refuse_closed()
        return session

    # -------------------------------------------------------------------------------------- the end

    def close(
        self,
        status: FinishStatus = "success",
        detail: str | None = None,
        *,
        limit_s: float = CLOSE_LIMIT_S,
        pending_s: float = PENDING_LIMIT_S,
    ) -> APIFuture[None]:
        """End the session and all calls under way. The first call counts; later ones return its future.

        Args:
            status: success, errored or interrupted.
            detail: the user's comment on the status.
            limit_s: the longest time to try to finish the session at the server.
            pending_s: the longest time to wait for calls that change something at the server.
        """
        with self._close_lock:
            if self._closed is not None:
                return self._closed
            future = self._closed = APIFuture(clock=self.clock)
            self.lifecycle.leaving = True
            self.lifecycle.closed = not self.lifecycle.pending
            self.lifecycle.asked_to_end = (status, detail)
        thread = threading.Thread(
            target=carried(self._close),
            args=(future, status, detail, limit_s, pending_s),
            name="tinker-close",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # the process is ending and starts no more threads
            self._close(future, status, detail, limit_s, pending_s)
        return future

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self.lifecycle.leaving

    def _close(
        self,
        future: APIFuture[None],
        status: FinishStatus,
        detail: str | None,
        limit_s: float,
        pending_s: float,
    ) -> None:
        try:
            self._finalizer.detach()
            self.lifecycle.settle(pending_s)
            self.lifecycle.closed = True
            self.lifecycle.refuse()
            finished = self.lifecycle.finish(status, detail, limit_s)
            if finished is not None:
                self.clock.wait(finished, limit_s)
        except Exception:  # noqa: BLE001  # no failure may prevent the end
            _log.exception("the client could not be closed in order")
        finally:
            try:
                self.lifecycle.shut()
            finally:
                future.resolve(None)

    def refuse_closed(self) -> None:
        """Raise an error if `close` was called.

        Raises:
            ClientClosedError: the client is closed.
        """
        if self.lifecycle.leaving:
            raise ClientClosedError

    def renew_after_fork(self) -> None:
        """In a forked child, keep the facts about the server, and replace connections and locks.

        Heartbeats start again when the session is needed.
        """
        self._close_lock = threading.Lock()
        if self._closed is not None and not self._closed.done():
            self._closed = APIFuture(clock=self.clock)  # the child's client is closed already
            self._closed.resolve(None)
        self.lifecycle.renew_after_fork()
        self.connection.renew_after_fork()
        if self._session is not None:
            self._session.renew_after_fork()
        self._opened = Lazy(self.clock.now)

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.known_session_id or "not started"
        return f"<{type(self).__name__} {self.settings.base_url} {state}>"
