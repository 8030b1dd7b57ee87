"""A session at the server: created once, kept alive by heartbeats, finished at the end.

This process creates an owned session and finishes it. Another process has created a joined session: the
process that sent its sampler here, or the parent of a fork. This process sends heartbeats for a joined
session too, but the process that created the session finishes it.
"""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.api_errors import copy_exception
from tinker_sync._base.events import HeartbeatLate, SessionEnded, SessionLost, SessionStarted
from tinker_sync._base.log import Log
from tinker_sync._base.numbers import numbers
from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync._base.secret import mask_text
from tinker_sync.errors import APIStatusError, SessionLostError, TinkerError
from tinker_sync.runtime import heartbeat
from tinker_sync.runtime.calls import make_call
from tinker_sync.types.session import CreateSessionRequest, SessionHeartbeatRequest

if TYPE_CHECKING:
    from tinker_sync._base.events import Event
    from tinker_sync.runtime.lifecycle import Lifecycle
    from tinker_sync.runtime.server import Server
    from tinker_sync.wire.dialect import Dialect

# They may mean that the server has lost the session.
_SUSPICIOUS: Final = (401, 404, 410)
# Numbers in a session count from 0. A process that shares a session with another process, and cannot ask it
# for its numbers, starts far from 0.
_FAR: Final = 10**6
_FARTHEST: Final = 2**31

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
        self._heartbeat: heartbeat.Heartbeat | None = None
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

    def open(self, server: Server, dialect: Dialect, deadline_at: float) -> None:
        """Create the session, unless its id is known. Start its heartbeats.

        Raises:
            TinkerError: the session cannot be created.
        """
        connection = server.connection
        session_id = self.session_id or self._create(server, deadline_at)
        self.session_id, self._finish_offered = session_id, dialect.offers("finish_session")
        self._server = weakref.ref(server)
        beats = heartbeat.Heartbeat(
            self.beat,
            self,
            refresh_if_due=self.refresh_if_due,
            always_offered=connection.settings.is_vendor_host,
            period_s=heartbeat.PERIOD_S,
            clock=connection.clock,
        )
        beats.start()
        self._heartbeat = beats
        if self.owned:
            server.lifecycle.notify(SessionStarted(session_id=session_id))

    def _create(self, server: Server, deadline_at: float) -> str:
        connection = server.connection
        created = server.call(
            "create_session",
            CreateSessionRequest(
                tags=list(connection.settings.tags),
                user_metadata=self._user_metadata,
                sdk_version=connection.settings.sdk_version,
                project_id=self._project_id,
                display_name=self._display_name,
            ),
            deadline_at=deadline_at,
            # An account that cannot pay gets the error at once, because it has no work under way.
            pause_billing=False,
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
        self._heartbeat = None
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
