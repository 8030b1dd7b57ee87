"""The client: the parts that the clients of one service share, its unfinished calls, and its end.

`ClientRuntime` makes the parts in order, closes them, and begins anew with them in a forked child:

- `Connection`: the address, the keys and the sockets.
- `pools`, `reactor`: the threads.
- `Lifecycle`: the calls that have not ended, and the end of all parts.
- `server`: the server's settings, the session there, and the calls whose callers wait for the answer.

A client does not use the network before its first call that needs the server. Calls under way keep a client
alive. It ends in one of three ways: by `close`, by the end of the process, or by garbage collection. The
lifecycle is an object of its own, so that it can end the threads of a client that was garbage-collected. The
end waits for calls that change something at the server (`PendingChanges`), for a bounded time.

The end of the process (`finish_all`) waits for these calls at most `PENDING_LIMIT_S`, or
`INTERRUPTED_LIMIT_S` if Ctrl-C ended the program. Then all sessions are finished at the same time, each on
the thread of its heartbeats, because a process that ends cannot start threads (since Python 3.12).
`EXIT_LIMIT_S` is the limit for all of them. After a Ctrl-C in these steps, the remaining ones are left out.

Any thread may call all of this. Sets and dicts of calls have no lock: adding a call, removing it and copying
are atomic in the interpreter.
"""

from __future__ import annotations

import _thread
import atexit
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from tinker_sync import _embedded
from tinker_sync._base import fork as _fork
from tinker_sync._base.api_errors import copy_exception
from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, SystemClock, Wake, make_lock
from tinker_sync._base.events import CallFailed, CallMade, Events
from tinker_sync._base.log import Log
from tinker_sync._base.naming import CallSite, carried, current
from tinker_sync._base.secret import Secret
from tinker_sync._base.threads import DaemonThread
from tinker_sync.config import Settings
from tinker_sync.errors import ClientClosedError, DeadlineError, EarlierCallFailedError, TinkerError
from tinker_sync.runtime.flows import Flows
from tinker_sync.runtime.futures import APIFuture, attach_unread
from tinker_sync.runtime.handshake import ServerFacts
from tinker_sync.runtime.polls import Notices
from tinker_sync.runtime.rate_limiter import RateLimiter
from tinker_sync.runtime.reactor import Reactor
from tinker_sync.runtime.server import Server
from tinker_sync.runtime.session import Session
from tinker_sync.runtime.spending import SpendGuard
from tinker_sync.runtime.workers import WorkerPools
from tinker_sync.transport.auth import KeyRing
from tinker_sync.transport.http import Http
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.retries import Caller

if TYPE_CHECKING:
    from tinker_sync.runtime.rate_limiter import Gate
    from tinker_sync.runtime.workers import Workers
    from tinker_sync.transport.call import Call


FinishStatus = Literal["success", "errored", "interrupted"]

CLOSE_LIMIT_S: Final = 10.0
PENDING_LIMIT_S: Final = 60.0
"""The longest wait for calls that change something, unless `close` gets another time."""
EXIT_LIMIT_S: Final = 1.0
INTERRUPTED_LIMIT_S: Final = 0.5
"""The longest wait for calls under way after Ctrl-C: the user wants to leave, and learns what may be lost."""
NOTICE_AFTER_S: Final = 2.0
_LOOK_S: Final = 1.0
# These are not reported, because they follow from a reported failure, or from `close` by the user.
_NO_NEWS: Final = (EarlierCallFailedError, ClientClosedError)
# The last calls delay the end by at most this time.
_LAST_CALLS_LIMIT_S: Final = 1.0
_JOIN_S: Final = 0.5
# Calls with later deadlines get no timer.
_WATCHED_S: Final = 3600.0
_EARLY_S: Final = 0.001

_log = Log("tinker_sync.session")


class Connection:
    """The address, the keys and the sockets of one client. Thread-safe.

    Args:
        settings: the address, the key and everything else that the user has configured.
        clock: measures time.
    """

    def __init__(self, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.settings = settings
        self.clock = clock
        self.keys = KeyRing(settings, clock=clock)
        self.secrets = secrets = _secrets_of(self.keys)
        """A function that returns the values that must not appear in logs, errors and notices."""
        self.events = Events()
        """The stream of the events of the client."""
        self.journal = journal = Journal(
            self.events, base_url=settings.base_url, as_curl=settings.log_curl, secrets=secrets
        )
        self.http = Http(settings, self.keys, clock=clock, journal=journal)
        _connected.add(self.http)
        _fork.renew_in_child(self.http)
        self.caller = Caller(self.http, settings, clock=clock, journal=journal, secrets=secrets)

    def mask(self, text: str | None) -> str | None:
        """Return `text`, a secret of the user such as an access token, as a `str` whose repr hides it.

        From now on, the client masks the secret in logs and errors. It forgets the oldest of more than 100
        such secrets. Return None without a text.
        """
        if not text:
            return None
        secret = Secret(text)
        self.keys.keep(secret)
        return secret.reveal()

    def renew_after_fork(self) -> None:
        """Replace the locks in a forked child. The sockets renew themselves, also those of a lost client."""
        self.caller.renew_after_fork()
        self.keys.renew_after_fork()


def _secrets_of(keys: KeyRing) -> Callable[[], tuple[Secret, ...]]:
    # The function refers only to the key ring: other objects keep it, and must not keep the client alive.
    return lambda: keys.secrets


class PendingChanges:
    """The calls of one client that change something at the server and have not ended. Thread-safe.

    >>> changes = PendingChanges()
    >>> changes.add(APIFuture(), "save_state"), changes.add(APIFuture(), "optim_step")
    (None, None)
    >>> changes.describe()
    'save_state, optim_step'
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._names: dict[APIFuture[Any], str] = {}
        self._news = Wake()
        self._given_up = False
        self._now = now

    def add(self, future: APIFuture[Any], name: str = "") -> None:
        """Keep a call among the pending ones until its future ends.

        Args:
            future: the future of the call.
            name: the name of the call; "" stands for the public method that runs in this thread.
        """
        self._names[future] = name or current().rpartition(".")[2] or "a call"
        future._when_done(self._on_ended)

    def __len__(self) -> int:
        return len(self._names)

    def under_way(self) -> bool:
        """Return True if a call has not ended.

        This looks at the newest calls first, because thousands may wait. It forgets the ended calls that it
        meets; a Ctrl-C in `add` may have left them here.
        """
        names = self._names
        while names:
            try:
                newest = next(reversed(names))
            except (RuntimeError, StopIteration):  # another thread has changed the names in between
                continue
            if not newest.done():
                return True
            names.pop(newest, None)
        return False

    def describe(self) -> str:
        """Return the names of the calls, each with its count if that is not 1."""
        counts = Counter(list(self._names.values()))
        return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())

    def wait(self, limit_s: float) -> None:
        """Wait until no call is left, the time is up, or `give_up` was called.

        After two seconds, name the calls in a line on stderr. At the end, log the calls that are left, and
        forget them.

        Args:
            limit_s: the longest time.
        """
        try:
            self._wait(limit_s)
        finally:  # Ctrl-C may end the wait
            self._report()

    def _wait(self, limit_s: float) -> None:
        began_at = self._now()
        noticed = False
        while self._names and not self._given_up:
            waited_s = self._now() - began_at
            if waited_s >= limit_s:
                break
            if not noticed and waited_s >= NOTICE_AFTER_S:
                noticed = True
                self._notify(limit_s)
            next_s = limit_s if noticed else min(limit_s, NOTICE_AFTER_S)
            self._news.wait(min(next_s - waited_s, _LOOK_S))
            self._forget_ended()

    def give_up(self) -> None:
        """Make `wait` return at once, also if it is called later."""
        self._given_up = True
        self._news.set()

    def forget(self) -> None:
        """Drop the calls in a forked child, because they belong to the parent."""
        self._names, self._news, self._given_up = {}, Wake(), False

    def _forget_ended(self) -> None:
        """Remove ended calls that have no callback to remove them, because Ctrl-C interrupted `add`."""
        for future in [each for each in list(self._names) if each.done()]:
            self._names.pop(future, None)

    def _on_ended(self, future: APIFuture[Any]) -> None:
        self._names.pop(future, None)
        self._news.set()

    def _notify(self, limit_s: float) -> None:
        text = f"tinker_sync: waiting for {self.describe()}, {limit_s:.0f} s at most; Ctrl-C leaves at once\n"
        with suppress(OSError, ValueError, AttributeError):  # a closed or missing stderr
            sys.stderr.write(text)
            sys.stderr.flush()

    def _report(self) -> None:
        names = self.describe()
        if names:
            self._names = {}
            _log.warning("the client ends before the server has answered, so these may be lost: %s", names)


class HasLastCall(Protocol):
    """An object with a last call to the server, which is sent before the session is finished."""

    def last_call(self) -> Call | None:
        """Return the last call, or None if there is nothing to send."""


class Lifecycle:
    """The unfinished calls and the end of one client. Thread-safe.

    The set of unfinished futures needs no lock; the docstring of `tinker_sync.runtime` has the reason. A
    future that is added while the client closes fails in any case: it is in the copy of the set that
    `fail_calls` uses, or `_track` finds the failure that `fail_calls` has stored.
    """

    def __init__(
        self, connection: Connection, flows: Flows, pools: WorkerPools, pending: PendingChanges
    ) -> None:
        self.leaving = False
        """True from the first `close` of the client on; final. New calls of the user are refused."""
        self.closed = False
        """True once the `close` of the client has waited for calls that change something; final."""
        self.pending = pending
        self.closing = threading.Event()
        self.session: Session | None = None
        self.asked_to_end: tuple[str, str | None] | None = None
        """The status and the detail that were given to the `close` of the client; None before it."""
        self.gate: Gate | None = None
        """The gate to the shared rate limiter, where a worker may wait; None before the start."""
        self._lock = make_lock()
        self._last_calls: _fork.Members[HasLastCall] = _fork.Members()
        self._unfinished: set[APIFuture[Any]] = set()
        # The unfinished calls that the server has accepted. As above, each step is one of the interpreter.
        self._promised: dict[str, APIFuture[Any]] = {}
        self._failure: Exception | None = None  # set once, final
        self.connection = connection
        """The connection of the client; it is open until `shut`."""
        self.events = connection.events
        self.notify = self.events.notify
        self._flows = flows
        self._reactor = flows.reactor
        self._pools = pools
        # Bound once, because tens of thousands of futures may refer to them.
        self._run_callback = pools.callback.run
        self.run_soon: Callable[[Callable[[], object]], object] = partial(
            _run_soon, flows.reactor, pools.enter
        )
        """Queues a short step, which never waits, for a thread of the client (`_run_soon`)."""

    # -------------------------------------------------------------------------------------- calls

    def report(self, failure: BaseException) -> None:
        """Report the failure of a call of the user to the session and the observers.

        A failure that follows from a reported one, or from `close`, is not reported.
        """
        if isinstance(failure, _NO_NEWS):
            return
        if self.session is not None:
            self.session.beat_if_suspicious(failure)
        self.notify(CallFailed(error=failure))

    def make_future(
        self, line: object = None, *, only_reads: bool = False, call_site: CallSite | None = None
    ) -> APIFuture[Any]:
        """Return a future for a call of the user; the future ends when the client is closed, at the latest.

        A failure of the call goes to `report`. Observers get `line`, the calls of the client.

        Args:
            line: the part of a client that makes the call, if it has one.
            only_reads: True if the call changes nothing at the server.
            call_site: the line of the user, for the log of a failure that the user never looks at.
        """
        made: APIFuture[Any] = APIFuture(
            submit=self._run_callback,
            soon=self.run_soon,
            clock=self.connection.clock,
            when_done=(self.on_ended,),
        )
        if only_reads:
            made._only_reads = True
        made._call_site = call_site
        self._track(made)
        if self.events.wants(CallMade):
            self.events.notify(CallMade(made, line))
        return made

    def refuse_if_leaving(self) -> None:
        """Raise an error if `close` was called.

        Raises:
            ClientClosedError: the client is closed.
        """
        if self.leaving:
            raise ClientClosedError

    def end_with_client(self, future: APIFuture[Any]) -> None:
        """Register the future of a call. It fails when the client is closed, unless it has ended before.

        A failure of the future goes to `report`.
        """
        future._when_done(self.on_ended)
        if not future.done():
            self._track(future)

    def end_in_turn(
        self,
        future: APIFuture[Any],
        deadline_at: float,
        name: str,
        late_error: Callable[[], Exception | None] | None = None,
    ) -> None:
        """Fail a call at its deadline while it waits for its client or for its turn.

        From its send phase on, a call watches its deadline itself. So does a call with a late deadline, such
        as the default one, when its turn comes: a timer for each of thousands of calls would cost memory.

        Args:
            future: the future of the call.
            deadline_at: the time of the clock at which to give up.
            name: the name of the call, for its error.
            late_error: called at the deadline; returns the error of a call that may wait for its turn more
                than once, or None while the call does not wait. None: a call waits until it is sent.
        """
        clock = self.connection.clock
        began_at = clock.now()
        if deadline_at > began_at + _WATCHED_S or future._turn_timer is not None:
            return
        ref = weakref.ref(future)

        def expire() -> None:
            call = ref()
            # The reactor runs timers early if it has no thread.
            if call is None or clock.now() < deadline_at - _EARLY_S:
                return
            failure: Exception | None = None
            if late_error is not None:
                failure = late_error()
            elif call.status().state == "queued":
                words = f"{name} was not sent within the deadline"
                waited_s = clock.now() - began_at
                failure = DeadlineError(words, waited_s=waited_s, last_words="it waited for its turn")
            if failure is not None:
                call._expire(failure)

        def begin() -> None:
            call = ref()
            if call is None or call.done() or call._turn_timer is not None:
                return
            call._turn_timer = timer = self._reactor.after(deadline_at - clock.now(), expire)
            call._when_done(lambda _: timer.cancel())
            if call.running():  # begun meanwhile
                timer.cancel()

        with suppress(RuntimeError):  # closed, which ends the call
            self.run_soon(begin)

    def _track(self, future: APIFuture[Any]) -> None:
        """Add a new future to the unfinished calls, which fail when the client is closed.

        The future must have `on_ended` among its callbacks.
        """
        self._unfinished.add(future)
        if self._failure is not None:
            future.fail(copy_exception(self._failure))

    def accept(self, future: APIFuture[Any], request_id: str) -> bool:
        """Mark a call as accepted by the server under this id, and return True.

        Return False, and do nothing, if another unfinished call has the id: the answer was that call's. The
        idle connections are then closed, because the answers on one of them may belong to earlier requests.
        """
        owner = self._promised.setdefault(request_id, future)
        if owner is not future:
            if not owner.done():
                self.connection.http.forget_idle()
                return False
            self._promised[request_id] = future
        if future._request_id is not None and future._request_id != request_id:
            self._promised.pop(future._request_id, None)  # it was submitted again
        future._mark_accepted(request_id)
        if future.done():
            self._promised.pop(request_id, None)
        return True

    @property
    def unfinished(self) -> int:
        """The number of calls that have not ended."""
        return len(self._unfinished)

    def on_ended(self, future: APIFuture[Any]) -> None:
        """Forget a future that has ended. Report its failure, and log it if the user never looks."""
        self._unfinished.discard(future)
        if future._request_id is not None:
            self._promised.pop(future._request_id, None)
        failure = future.failure
        if failure is not None:
            attach_unread(future)
            self.report(failure)

    # -------------------------------------------------------------------------------------- the end

    def note_change(self, future: APIFuture[Any]) -> None:
        """Register a call that changes something at the server. The end of the client waits for the call.

        If no other such call is under way, start the threads that these calls need: from Python 3.12 on, none
        can start while the process ends.
        """
        first = not self.pending.under_way()
        self.pending.add(future)
        if first:
            self._reactor.reserve()
            self._pools.reserve()
        self.finish_at_exit()

    def finish_at_exit(self) -> None:
        """Make the end of the process wait for changes, and end the session (`finish_all`)."""
        _open.add(self)

    def leave_out_at_exit(self) -> None:
        """Take the client out of those that the end of the process finishes, because it is closed."""
        _open.discard(self)

    def wait_for_changes(self, limit_s: float) -> None:
        """Wait at most `limit_s` for the calls that change something at the server.

        If there are such calls, first fail those that only read, such as samples.
        """
        if self.pending:
            for future in list(self._unfinished):
                if future._only_reads:
                    future.fail(ClientClosedError())
            self.pending.wait(limit_s)

    def finish(
        self, status: str, detail: str | None, limit_s: float, *, quiet: bool = False
    ) -> threading.Event | None:
        """Begin to finish the session at the server. Return an event that is set when this is done.

        Return None if there is no session. Before the session is finished, send the last calls. Only the
        first call has an effect.

        The thread of the heartbeats does the work. So the caller can limit its wait, even while the lookup of
        a host name has no limit. This also works at the end of a process, when no new thread can start.

        Args:
            status, detail: those of the session, unless others were given to the `close` of the client.
            limit_s: the longest time to finish the session.
            quiet: log a failure at the debug level.
        """
        session = self.session
        if session is None:
            return None
        if self.asked_to_end is not None:  # the process may end before `tinker-close` has begun
            status, detail = self.asked_to_end

        def last() -> None:
            self._send_last_calls(min(limit_s / 4, _LAST_CALLS_LIMIT_S))
            session.finish(self, status, detail, limit_s, quiet=quiet)

        return session.end(carried(last))

    def register_last_call(self, source: HasLastCall) -> None:
        """Register an object whose last call to the server must be sent before the connections are closed.

        The object is held weakly.
        """
        self._last_calls.add(source)

    def _send_last_calls(self, limit_s: float) -> None:
        """Send the last calls of the registered objects, within `limit_s` in all. Only log their failures."""
        calls = [call for each in self._last_calls.all() if (call := each.last_call()) is not None]
        for call in calls:
            try:
                self.connection.caller.call(call.but(deadline_s=limit_s / len(calls)))
            except TinkerError as error:
                _log.debug("the last call %s could not be sent: %s", call.path, error)

    def fail_calls(self) -> None:
        """Fail the calls that wait for a result or for their turn, and all later ones."""
        self.closing.set()
        failure = self._failure = self._failure or ClientClosedError()
        for future in list(self._unfinished):
            future.fail(copy_exception(failure))
        if self.gate is not None:
            self.gate.close(failure)

    def shut(self) -> None:
        """End the threads and the connections of the client. Calls under way fail.

        Queued callbacks of the user still run. A thread in a callback ends after it.
        """
        self.leave_out_at_exit()
        self.fail_calls()
        if self.session is not None:
            self.session.end()
        self.connection.caller.close()
        self._flows.close()
        self._reactor.close()
        self.connection.http.close()
        # With everything closed, the threads end at once, except those in a callback of the user. The workers
        # still do the jobs that are left, because users rely on their callbacks.
        for pool in self._pools.in_order_of_end():
            pool.close(timeout=_JOIN_S, drop=False)
        if self.session is not None:
            self.session.join(_JOIN_S)

    def renew_after_fork(self) -> None:
        """Drop the parent's calls in a forked child; the parent ends them. A closed client stays closed."""
        self._lock = make_lock()
        self._last_calls = _fork.Members()
        self._unfinished, self._promised, self.gate = set(), {}, None
        self.pending.forget()
        ended, self.closing = self.closing.is_set(), threading.Event()
        if ended:
            self.closing.set()


def _run_soon(reactor: Reactor, workers: Workers, step: Callable[[], object]) -> None:
    """Queue a short step, which never waits, for the reactor's thread; if that does not run, for a worker.

    This is for steps that take locks, or that Ctrl-C must not leave half done, because a signal interrupts
    the main thread alone, and its handler may make the same call. Steps may run in another order than that
    in which they were queued.

    Raises:
        WorkersClosedError: the client is closed.
        RuntimeError: there is no thread for the step, and the system starts none.
    """
    if not reactor.run_soon(step):
        workers.run(step)


def shut_elsewhere(lifecycle: Any) -> None:
    """Call `lifecycle.shut` on a new thread, which holds no lock. For a client that was garbage-collected.

    The finalizer of the client may run in any thread, between any two steps, with any lock held. The start of
    a `threading.Thread` takes locks too, so a thread from `_thread` starts it. If the process ends and starts
    no thread, nothing happens.
    """
    with suppress(RuntimeError):  # the process ends anyway
        _thread.start_new_thread(_start_shutting, (lifecycle,))


def _start_shutting(lifecycle: Lifecycle) -> None:
    with suppress(RuntimeError):
        DaemonThread(lifecycle.shut, "tinker-close").start()


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
        self.reactor = Reactor(
            connection.http,
            pools.fetch,
            clock,
            max_open=settings.max_connections,
            needed=pending.under_way,
        )
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
        thread = DaemonThread(
            carried(self._close), "tinker-close", (mine, status, detail, limit_s, pending_s)
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
        first call (`Server.start`). The connections drop themselves, also those of a lost client.
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


# ------------------------------------------------------------------------------ the end of the process


class _Open(_fork.Members[Lifecycle]):
    """The clients that the end of the process finishes. A forked child leaves them to its parent."""

    def renew_after_fork(self) -> None:
        self._refs = set()


_open = _Open()
_fork.renew_in_child(_open)
# Their idle connections are closed at the end, because the garbage collector would find them open and warn.
_connected: _fork.Members[Http] = _fork.Members()


def find_status() -> FinishStatus:
    """Return how the program has ended: with success, by an error, or by an interrupt such as Ctrl-C.

    The interpreter keeps the exception that ended the program in `sys.last_value`. It keeps no `SystemExit`,
    so a program that ends by `sys.exit` counts as a success. An interactive session does too.
    """
    error = getattr(sys, "last_value", None)
    # At an interactive prompt, that exception did not end the program.
    if error is None or hasattr(sys, "ps1"):
        return "success"
    return "errored" if isinstance(error, Exception) else "interrupted"


@atexit.register
def finish_all() -> None:
    """Wait for calls that change something at a server, then finish all sessions.

    The wait and the end of the sessions have a limit each. After them, close the idle connections, and stop
    the embedded server if this process has started one. Ctrl-C ends this function at once.
    """
    try:
        status = find_status()
        pending_s = INTERRUPTED_LIMIT_S if status == "interrupted" else PENDING_LIMIT_S
        wait_until = time.monotonic() + pending_s
        for member in _open.all():
            member.wait_for_changes(max(wait_until - time.monotonic(), 0.0))
        under_way = [member.finish(status, None, EXIT_LIMIT_S, quiet=True) for member in _open.all()]
        give_up_at = time.monotonic() + EXIT_LIMIT_S
        for done in under_way:
            if done is not None:
                done.wait(max(give_up_at - time.monotonic(), 0.0))
        for connected in _connected.all():
            connected.forget_idle()
        _embedded.stop_server()
    except BaseException:  # noqa: BLE001  # Ctrl-C ends the process at once, without a traceback
        _log.debug("the sessions could not be finished", exc_info=True)
