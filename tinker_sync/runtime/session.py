"""A session at the server: created once, kept alive by heartbeats, finished at the end.

This process creates an owned session and finishes it. Another process has created a joined session: the
process that sent its sampler here, or the parent of a fork. This process sends heartbeats for a joined
session too, but the process that created the session finishes it.

The thread `tinker-heartbeat` sends the heartbeats; its loop calls `Heartbeat.step` when one is due. The
functions given to `Heartbeat` should refer to the client weakly, so that the heartbeats end with a client
that is garbage-collected. The last job of the thread is the function given to `stop`. This works at the end
of a process too, when no new thread may start.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from tinker_sync._base.api_errors import copy_exception
from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.events import HeartbeatLate, SessionEnded, SessionLost, SessionStarted
from tinker_sync._base.log import Log
from tinker_sync._base.numbers import numbers
from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync._base.secret import mask_text
from tinker_sync._base.threads import DaemonThread
from tinker_sync.errors import APIStatusError, SessionLostError, TinkerError
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.runtime.handshake import Ahead, ServerFacts, outcome_of_ahead
from tinker_sync.runtime.workers import no_thread
from tinker_sync.types.session import CreateSessionRequest, SessionHeartbeatRequest
from tinker_sync.wire.adapt import json_body
from tinker_sync.wire.json import encode

if TYPE_CHECKING:
    from tinker_sync._base.events import Event
    from tinker_sync.config import Settings
    from tinker_sync.runtime.client import Lifecycle
    from tinker_sync.runtime.server import Server
    from tinker_sync.wire.dialect import Dialect

# They may mean that the server has lost the session.
_SUSPICIOUS: Final = (401, 404, 410)
# Numbers in a session count from 0. A process that shares a session with another process, and cannot ask it
# for its numbers, starts far from 0.
_FAR: Final = 10**6
_FARTHEST: Final = 2**31

PERIOD_S: Final = 10.0
WARN_AFTER_S: Final = 120.0
_WARN_EVERY_S: Final = 60.0
# A delay that the network cannot explain: this process did not let the thread run.
STALLED_S: Final = 5.0
# A 410 certainly means that the session is gone. The doubtful statuses may come from a proxy or from a new
# machine of the server, so they count only if the server repeats them a while later.
_GONE: Final = 410
_DOUBTFUL: Final = (401, 404)
_CERTAIN_AFTER_S: Final = 5.0
# The shortest time between heartbeats, even if many failures ask for one.
_SOONEST_S: Final = 1.0

_log = Log("tinker_sync.session")


class Session:
    """One session and its heartbeats. One thread at a time calls `open`; any thread calls the other methods.

    Args:
        user_metadata: the user's own data about the session.
        project_id: the project that the session belongs to.
        display_name: the name of the session in lists.
        joined: the id of a session that exists already.
    """

    def __init__(
        self,
        *,
        user_metadata: Mapping[str, Any] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        joined: str | None = None,
    ) -> None:
        self._user_metadata = dict(user_metadata or {})
        self._project_id = project_id
        self._display_name = display_name
        self.session_id = joined
        """The id of the session; None before it is created."""
        self.owned = joined is None
        self._heartbeat: Heartbeat | None = None
        self._asked: Ahead[Any] = None
        self._finish_offered = False
        self._lost: SessionLostError | None = None
        # Weak, because the thread of the heartbeats refers to the session, and must not keep a client alive.
        self._server: weakref.ref[Server] | None = None
        self._number_from(0 if self.owned else _somewhere_far())

    def _number_from(self, first: int) -> None:
        self.next_model_seq_id: Callable[[], int] = numbers(first).__next__
        self.next_custom_loss_seq_id: Callable[[], int] = numbers(first).__next__
        self.next_sampling_session_seq_id: Callable[[], int] = numbers(first).__next__

    @property
    def needs_heartbeat(self) -> bool:
        """True if the session exists and this process sends no heartbeats for it."""
        return self._heartbeat is None and self.session_id is not None

    # -------------------------------------------------------------------------------------- its life

    def ask_ahead(self, begin: Callable[[Callable[..., Any]], Ahead[Any]]) -> None:
        """Let `begin` ask for the session before the server's settings are known, unless its id is known."""
        asked = self._asked
        if self.session_id is None and (asked is None or (asked.done() and asked.exception() is not None)):
            self._asked = begin(self._ask)

    def open(self, server: Server, facts: ServerFacts, deadline_at: float) -> None:
        """Create the session, unless its id is known. Start its heartbeats.

        Raises:
            TinkerError: the session cannot be created.
        """
        connection = server.connection
        session_id = self.session_id or self._create(server, facts, deadline_at)
        self.session_id, self._finish_offered = session_id, facts.dialect.offers("finish_session")
        self._server = weakref.ref(server)
        beats = Heartbeat(
            self.beat,
            self,
            refresh_if_due=self.refresh_if_due,
            always_offered=connection.settings.is_vendor_host,
            period_s=PERIOD_S,
            clock=connection.clock,
        )
        beats.start()
        self._heartbeat = beats
        if self.owned:
            server.lifecycle.notify(SessionStarted(session_id=session_id))

    def _create(self, server: Server, facts: ServerFacts, deadline_at: float) -> str:
        connection, asked = server.connection, self._asked
        self._asked = None

        def would_differ() -> bool:
            request = self._request(connection.settings)
            return facts.config.pjwt_auth_enabled or json_body(request, facts.dialect) != encode(request)

        created = outcome_of_ahead(
            asked, partial(self._ask, server, deadline_at, facts.dialect), would_differ
        )
        for level, message in (
            (logging.INFO, created.info_message),
            (logging.WARNING, created.warning_message),
            (logging.ERROR, created.error_message),
        ):
            if message:
                _log.log(level, "%s", mask_text(message, connection.secrets()))
        session_id: str = created.session_id
        return session_id

    def _ask(self, server: Server, deadline_at: float, dialect: Dialect | None = None) -> Any:
        if deadline_at == math.inf:
            deadline_at = server.give_up_at(None, math.inf)
        connection = server.connection
        request = self._request(connection.settings)
        call = make_call("create_session", connection.settings, request, dialect=dialect)
        read = partial(read_reply, "create_session", secrets=connection.secrets)
        # An account that cannot pay gets the error at once, because it has no work under way.
        return server.send(call, read, deadline_at, pause_billing=False)

    def _request(self, settings: Settings) -> CreateSessionRequest:
        return CreateSessionRequest(
            tags=list(settings.tags),
            user_metadata=self._user_metadata,
            sdk_version=settings.sdk_version,
            project_id=self._project_id,
            display_name=self._display_name,
        )

    def end(self, last: Callable[[], object] | None = None) -> threading.Event | None:
        """End the heartbeats. Their thread calls `last`, then sets the event that this method returns.

        Return None, and do not call `last`, if there are no heartbeats.
        """
        beats = self._heartbeat
        if beats is None:
            return None
        beats.stop(last)
        return beats.ended

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the heartbeat thread, if there is one, for at most `timeout_s`."""
        if self._heartbeat is not None:
            self._heartbeat.join(timeout_s)

    def finish(
        self, lifecycle: Lifecycle, status: str, detail: str | None, limit_s: float, *, quiet: bool = False
    ) -> None:
        """Finish an owned session at a server that has a call for this. Never raise.

        Args:
            lifecycle: makes the call.
            status: success, errored or interrupted.
            detail: the user's description of the end.
            limit_s: the longest time for the call.
            quiet: log a failure at the debug level.
        """
        session_id = self.session_id
        if session_id is None or not self.owned:
            return
        lifecycle.notify(SessionEnded(session_id=session_id, status=status))
        if not self._finish_offered or self._lost is not None:
            return
        try:
            call = make_call(
                "finish_session",
                lifecycle.connection.settings,
                {"reason": {"type": status}, "detail": detail},
                path={"session": session_id},
                deadline_s=limit_s,
            )
            lifecycle.connection.caller.call(call)
        except Exception as error:  # noqa: BLE001  # a failure must not prevent the end of the client
            if not (isinstance(error, APIStatusError) and error.status_code in NO_SUCH_CALL):
                level = logging.DEBUG if quiet else logging.WARNING
                _log.log(level, "the server was not told that session %s is over: %s", session_id, error)

    def renew_after_fork(self) -> None:
        """Continue the parent's session in a forked child. The parent alone finishes the session."""
        self._heartbeat = self._asked = None
        if self.session_id is not None:
            self.owned = False
            self._number_from(_somewhere_far())

    # -------------------------------------------------------------------------------------- its heartbeats

    def beat(self) -> None:
        """Send one heartbeat, unless the client is closed or was garbage-collected.

        Raises:
            TinkerError: the server refuses the heartbeat, or cannot be reached.
        """
        server, session_id = self._find_server(), self.session_id
        if server is not None and session_id is not None and not server.lifecycle.closed:
            connection, request = server.connection, SessionHeartbeatRequest(session_id=session_id)
            connection.caller.call(make_call("session_heartbeat", connection.settings, request))

    def refresh_if_due(self) -> bool:
        """Begin to renew the token and the server's settings, if they are due.

        Return False if the client was garbage-collected.
        """
        server = self._find_server()
        if server is not None:
            server.refresh_if_due()
        return server is not None

    # -------------------------------------------------------------------------------------- its loss

    def refuse_lost(self) -> None:
        """Raise if the server has lost the session.

        Raises:
            SessionLostError: the server has lost it.
        """
        lost = self._lost
        if lost is not None:
            raise copy_exception(lost)

    def beat_if_suspicious(self, error: BaseException) -> None:
        """Let the heartbeat thread send a heartbeat now if a failure may mean that the session is lost.

        Do nothing if the thread has just sent one.
        """
        beats = self._heartbeat
        suspicious = isinstance(error, APIStatusError) and error.status_code in _SUSPICIOUS
        if suspicious and beats is not None:
            beats.beat_soon()

    def on_lost(self, error: TinkerError) -> None:
        """Log the loss of the session, report it to the observers, and store the error for later calls."""
        lost = SessionLostError(str(self.session_id), str(error))
        lost.__cause__ = error
        self._lost = lost
        _log.error("%s", lost)
        self._notify(SessionLost(session_id=lost.session_id, reason=lost.reason))

    def on_found(self) -> None:
        """Clear and log the loss, because the server knows the session again."""
        self._lost = None
        _log.warning("the server knows session %s again", self.session_id)

    def on_late(self, delay_s: float, reason: str) -> None:
        """Report to the observers a heartbeat that this process sent too late."""
        self._notify(HeartbeatLate(delay_s=delay_s, reason=reason))

    def _notify(self, event: Event) -> None:
        server = self._find_server()
        if server is not None:
            server.lifecycle.notify(event)

    def _find_server(self) -> Server | None:
        """Return the server; None if the client was garbage-collected or the session was never opened."""
        return self._server() if self._server is not None else None


def _somewhere_far() -> int:
    return _FAR + uuid.uuid4().int % (_FARTHEST - _FAR)


class Listener(Protocol):
    """A receiver of the events of a session, called on the thread of its heartbeats."""

    def on_lost(self, error: TinkerError) -> None:
        """Take note that the server has dropped the session."""

    def on_found(self) -> None:
        """Take note that the server keeps the session after all."""

    def on_late(self, delay_s: float, reason: str) -> None:
        """Take note that a heartbeat is `delay_s` seconds late, for a reason given in words."""


class Heartbeat:
    """The heartbeats of one session. One thread calls `step`; any thread may call the other methods.

    Args:
        beat: sends a heartbeat; raises the error of the server or the network.
        listener: receives the events of the session.
        refresh_if_due: begins the other periodic work; returns False when the client is gone, which ends the
            thread.
        always_offered: True if the server certainly offers heartbeats; if False, a 404, 405 or 501 before the
            first success means that the server has no such call.
        period_s: the time between two heartbeats.
        clock: measures time.
        cpu: returns the seconds of processor time that this process has used.
    """

    def __init__(
        self,
        beat: Callable[[], object],
        listener: Listener,
        *,
        refresh_if_due: Callable[[], bool] = lambda: True,
        always_offered: bool = True,
        period_s: float = PERIOD_S,
        clock: Clock = SYSTEM_CLOCK,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._beat = beat
        self._listener = listener
        self._refresh_if_due = refresh_if_due
        self._period_s = period_s
        self._clock = clock
        self._watch = _DelayDetector(clock, cpu)
        # Only the heartbeat thread uses these attributes.
        self._beating = True
        self._known = always_offered
        self._last_success_s = clock.now()
        self._warned_s: float | None = None
        self._refused_s: float | None = None
        self._lost = False
        # Any thread may use these attributes.
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._stopping = False  # written under _lock, read without
        self._last: Callable[[], object] | None = None  # guarded by _lock
        self._asked_s = clock.now()
        self._thread: threading.Thread | None = None
        self.ended = threading.Event()
        """Set when the heartbeats have ended and the function given to `stop` has returned."""

    def start(self) -> None:
        """Start the thread. If the process is ending and allows no new thread, send no heartbeats.

        Raises:
            TinkerError: the system gives no more threads.
        """
        thread = DaemonThread(self._loop, "tinker-heartbeat")
        try:
            thread.start()
        except RuntimeError as error:
            if threading.main_thread().is_alive():
                raise no_thread(error) from error
        else:
            self._thread = thread

    def stop(self, last: Callable[[], object] | None = None) -> None:
        """End the heartbeats. The thread then calls `last`; without a thread, this method does.

        Only the first call has an effect.
        """
        with self._lock:
            first = not self._stopping
            if first:
                self._last = last
                self._stopping = True
        self._wake.set()
        if first and self._thread is None:
            self._end()

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of the thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def beat_soon(self) -> None:
        """Make the thread send the next heartbeat now, unless the last one is less than a second old.

        For a failed call, which may mean that the session is lost.
        """
        now = self._clock.now()
        if now - self._asked_s >= _SOONEST_S:
            self._asked_s = now
            self._wake.set()

    def step(self) -> bool:
        """Send a heartbeat, if the server still takes them, and begin the other periodic work.

        Before that, report a delay of more than `STALLED_S`.

        Return False if the client is gone, so that the thread ends.
        """
        delay_s, reason = self._watch.look()
        if reason:
            _log.warning(
                "a heartbeat is %.0f s late: %s; the server ends sessions that stay silent", delay_s, reason
            )
            self._listener.on_late(delay_s, reason)
        if self._beating:
            self._asked_s = self._clock.now()
            self._send()
        go_on = self._refresh_if_due()
        self._watch.expect_in(self._period_s)
        return go_on

    # -------------------------------------------------------------------------------------- one heartbeat

    def _send(self) -> None:
        try:
            self._beat()
        except APIStatusError as error:
            self._refused(error)
        except TinkerError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001  # an error in this package must not end the session
            _log.debug("a heartbeat could not be sent", exc_info=True)
            self._failed(error)
        else:
            self._succeeded()

    def _succeeded(self) -> None:
        self._known = True
        self._last_success_s = self._clock.now()
        self._refused_s = self._warned_s = None
        if self._lost:
            self._lost = False
            self._listener.on_found()

    def _refused(self, error: APIStatusError) -> None:
        if not self._known and error.status_code in NO_SUCH_CALL:
            _log.debug("this server knows no heartbeats: %s", error)
            self._beating = False
        elif error.status_code == _GONE:
            self._beating = False
            self._lose(error)
        elif error.status_code in _DOUBTFUL:
            now = self._clock.now()
            self._refused_s = now if self._refused_s is None else self._refused_s
            if now - self._refused_s >= _CERTAIN_AFTER_S:
                self._lose(error)
        else:
            self._failed(error)

    def _lose(self, error: TinkerError) -> None:
        if not self._lost:
            self._lost = True
            self._listener.on_lost(error)

    def _failed(self, error: Exception) -> None:
        now = self._clock.now()
        self._refused_s = None
        silent_s = now - self._last_success_s
        due = self._warned_s is None or now - self._warned_s >= _WARN_EVERY_S
        if silent_s > WARN_AFTER_S and due:
            self._warned_s = now
            _log.warning("no heartbeat has reached the server for %.0f s: %s", silent_s, error)
        else:
            _log.debug("a heartbeat failed: %s", error)

    # -------------------------------------------------------------------------------------- the thread

    def _loop(self) -> None:
        try:
            self._watch.expect_in(self._period_s)
            while self._await_turn() and self.step():
                pass
        finally:
            self._end()

    def _end(self) -> None:
        try:
            with self._lock:
                last, self._last = self._last, None
            if last is not None:
                last()
        finally:
            self.ended.set()

    def _await_turn(self) -> bool:
        """Sleep until the next heartbeat is due. Return False if no more heartbeats follow."""
        self._clock.wait(self._wake, self._period_s)
        self._wake.clear()
        # This read follows the clearing of `_wake`; `stop` sets `_stopping` before it sets `_wake`.
        return not self._stopping


class _DelayDetector:
    """A detector of delays of the heartbeat thread, and of the reasons of the delays. For one thread."""

    def __init__(self, clock: Clock, cpu: Callable[[], float]) -> None:
        self._clock = clock
        self._cpu = cpu
        self.expect_in(0.0)

    def expect_in(self, period_s: float) -> None:
        """Expect the next `look` in `period_s` seconds."""
        self._now_s, self._time_s, self._cpu_s = self._clock.now(), self._clock.time(), self._cpu()
        self._due_s = self._now_s + period_s

    def look(self) -> tuple[float, str]:
        """Return the delay and its reason; the reason is empty for a delay of at most `STALLED_S`."""
        now_s = self._clock.now()
        late_s = now_s - self._due_s
        # On most systems the monotonic clock stops while the machine sleeps; the wall clock does not.
        asleep_s = (self._clock.time() - self._time_s) - (now_s - self._now_s)
        if asleep_s > STALLED_S:
            return asleep_s, f"this machine was asleep for {asleep_s:.0f} s, or its clock was set"
        if late_s <= STALLED_S:
            return late_s, ""
        busy_s = self._cpu() - self._cpu_s
        if busy_s >= late_s / 2:
            return late_s, f"this process held the interpreter lock for {late_s:.0f} s"
        return late_s, f"this process did not run for {late_s:.0f} s: it was stopped, or swapped out"
