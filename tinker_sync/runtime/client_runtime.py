"""`ClientRuntime`: the parts of a service client. It makes and closes them in order.

- `connection`: the address, the keys and the sockets.
- `pools`, `reactor`: the threads.
- `lifecycle`: the observers, the calls that have not ended, and the end of all parts.
- `server`: the server's settings, the session there, and the calls whose callers wait for the answer.

A client does not use the network before its first call that needs the server. Calls under way keep a client
alive. When the client is closed or garbage-collected, its threads end.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final

from tinker_sync._base import fork as _fork
from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, SystemClock
from tinker_sync._base.log import Log
from tinker_sync._base.naming import carried
from tinker_sync.config import Settings
from tinker_sync.runtime.connection import Connection
from tinker_sync.runtime.exits import FinishStatus
from tinker_sync.runtime.flows import Flows
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.handshake import ServerFacts
from tinker_sync.runtime.lifecycle import Lifecycle, shut_elsewhere
from tinker_sync.runtime.pending import PENDING_LIMIT_S, PendingChanges
from tinker_sync.runtime.polls import Notices
from tinker_sync.runtime.rate_limiter import RateLimiter
from tinker_sync.runtime.reactor import Reactor
from tinker_sync.runtime.server import Server
from tinker_sync.runtime.session import Session
from tinker_sync.runtime.spending import SpendGuard
from tinker_sync.runtime.workers import WorkerPools

CLOSE_LIMIT_S: Final = 10.0

_log = Log("tinker_sync.session")


class ClientRuntime:
    """The parts of one client: connection, threads, session, server settings. Thread-safe.

    A service client shares them with the clients that it creates.

    Args:
        settings: the settings of the user.
        session: the session to open; None for a client that needs none.
        limiter: a rate limiter for this client alone; None for the one that all clients of this base URL and
            key share.
        facts: the settings and the dialect of the server, if another process has fetched them already; None
            to ask the server.
        clock: measures time; None for the clock of this machine, with the pace of the settings.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        session: Session | None = None,
        limiter: RateLimiter | None = None,
        facts: ServerFacts | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        if clock is None:
            clock = SYSTEM_CLOCK if settings.pace == 1 else SystemClock(settings.pace)
        self.clock = clock
        self.connection = connection = Connection(settings, clock)
        pending = PendingChanges()
        self.pools = pools = WorkerPools(pending.under_way)
        self.notices = Notices(clock, pools.callback.run, connection.events)
        self.reactor = Reactor(connection.http, pools.fetch, clock, needed=pending.under_way)
        flows = Flows(self.reactor, pools.fetch)
        self.lifecycle = Lifecycle(connection, flows, pools, pending)
        self.server = Server(
            connection,
            flows,
            pools,
            self.lifecycle,
            self.notices,
            session=session,
            facts=facts,
            limiter=limiter,
        )
        self.spending = SpendGuard(self.lifecycle.notify, pools.off_main)
        """The limiters: asked before a pass or a sample is sent, and informed of the tokens that it used."""
        self._closed: dict[str, APIFuture[None]] = {}  # "future": that of `close`, once it was called
        self._finalizer = weakref.finalize(self, shut_elsewhere, self.lifecycle)
        self._finalizer.atexit = False
        _fork.renew_in_child(self)

    def get_session_id(self) -> str:
        """Return the id of the session. The first call opens the session. Existing scripts use this name.

        Raises:
            TinkerError: as for `Server.open_session`.
        """
        return self.server.open_session()

    # -------------------------------------------------------------------------------------- the end

    def close(
        self,
        status: FinishStatus = "success",
        detail: str | None = None,
        *,
        limit_s: float = CLOSE_LIMIT_S,
        pending_s: float = PENDING_LIMIT_S,
    ) -> APIFuture[None]:
        """Begin to close the client. Return a future that ends when the client is closed.

        A new thread waits for calls that change something at the server, fails the calls that are left, and
        finishes the session (`Session.finish`). While the process ends and allows no new thread, this method
        does the work itself. Only the first call has an effect. Later calls return the same future.

        Args:
            status: success, errored or interrupted.
            detail: the user's comment on the status.
            limit_s: the longest time to try to finish the session at the server.
            pending_s: the longest time to wait for calls that change something at the server.
        """
        mine: APIFuture[None] = APIFuture(clock=self.clock)
        thread = threading.Thread(
            target=carried(self._close),
            args=(mine, status, detail, limit_s, pending_s),
            name="tinker-close",
            daemon=True,
        )
        # Without a lock, because a signal handler may close the client on top of this method.
        future = self._closed.setdefault("future", mine)
        if future is not mine:
            return future
        try:
            self.lifecycle.leaving = True
            self.lifecycle.asked_to_end = (status, detail)
            self.lifecycle.closed = not self.lifecycle.pending
            thread.start()
        except RuntimeError:  # the process is ending and starts no more threads
            self._close(future, status, detail, limit_s, pending_s)
        except KeyboardInterrupt:
            if thread.ident is None:  # perhaps it has not started; to close twice does no harm
                self._closed.clear()
            raise
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
            self.lifecycle.wait_for_changes(pending_s)
            self.lifecycle.closed = True
            self.lifecycle.fail_calls()
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

    def renew_after_fork(self) -> None:
        """Begin anew in a forked child, in one place for all parts of the client.

        The child keeps the settings, the keys, the observers, the facts about the server and the id of the
        session. It drops the threads, connections, calls and numbers of its parent, and the locks that its
        threads may hold. The parts that depend on the facts, such as the admission, are made again by the
        first call (`Server.start`); `exits` drops the connections, also those of a lost client.
        """
        if self._closed:
            closed = self._closed["future"] = APIFuture(clock=self.clock)
            closed.resolve(None)  # the child's client is closed already
        for pool in self.pools.in_order_of_end():
            pool.begin()
        self.reactor.renew_after_fork()
        self.server.flows.renew_after_fork()
        self.notices.renew_after_fork()
        self.lifecycle.renew_after_fork()
        self.connection.renew_after_fork()
        self.server.renew_after_fork()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.server.known_session_id or "not started"
        return f"<{type(self).__name__} {self.settings.base_url} {state}>"
