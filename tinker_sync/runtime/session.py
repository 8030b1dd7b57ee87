"""A session at the server: created once, kept alive by heartbeats, finished at the end.

This process creates and finishes an owned session. Another process has created a joined session: the process
that sent its sampler here, or the parent of a fork. This process sends heartbeats for a joined session too,
but the process that created it finishes it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._observe import HeartbeatLate, SessionEnded, SessionLost, SessionStarted
from tinker_sync._policy import NO_SUCH_CALL
from tinker_sync._secret import mask_text
from tinker_sync.errors import APIStatusError, SessionLostError, TinkerError
from tinker_sync.runtime import heartbeat
from tinker_sync.runtime.calls import make_call
from tinker_sync.runtime.failures import copy_exception
from tinker_sync.types.future import FutureRetrieveRequest
from tinker_sync.types.session import CreateSessionRequest, SessionHeartbeatRequest

if TYPE_CHECKING:
    from tinker_sync._observe import Event
    from tinker_sync.journal.record import RunJournal
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.runtime.keeper import Keeper
    from tinker_sync.runtime.lifecycle import Lifecycle
    from tinker_sync.wire.dialect import Dialect

# A 408 means that a result is not ready. The suspicious statuses may mean that the server has lost the
# session.
_NOT_READY: Final = 408
_SUSPICIOUS: Final = (401, 404, 410)
# Numbers in a session count from 0. A process that shares a session with another process, and cannot ask it
# for its numbers, starts far from 0.
_FAR: Final = 10**6
_FARTHEST: Final = 2**31

_log = logging.getLogger("tinker_sync.session")


class Session:
    """One session and its heartbeats. One thread at a time calls `open`; any thread calls the other methods.

    Args:
        user_metadata: the user's own data about the session.
        project_id: the project that the session belongs to.
        display_name: the name of the session in lists.
        joined: the id of a session that exists already.
        journal: records the session, and holds the id of a session to continue.
        keeper_s: how long a keeper process sends heartbeats after the death of this process; None: no keeper.
    """

    def __init__(
        self,
        *,
        user_metadata: Mapping[str, Any] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        joined: str | None = None,
        journal: RunJournal | None = None,
        keeper_s: float | None = None,
    ) -> None:
        self.journal = journal
        self._keeper_s = keeper_s
        self._user_metadata = dict(user_metadata or {})
        self._project_id = project_id
        self._display_name = display_name
        self.session_id = joined
        """The id of the session; None before it is created."""
        self.owned = joined is None
        self._heartbeat: heartbeat.Heartbeat | None = None
        self._finish_offered = False
        self._lost: SessionLostError | None = None
        self._runtime: weakref.ref[ClientRuntime] | None = None
        self._number_from(0 if self.owned else _somewhere_far())

    def _number_from(self, first: int) -> None:
        self.next_model_seq_id: Callable[[], int] = itertools.count(first).__next__
        self.next_sampling_session_seq_id: Callable[[], int] = itertools.count(first).__next__
        self.next_custom_loss_seq_id: Callable[[], int] = itertools.count(first).__next__

    def next_side_model_seq_id(self) -> int:
        """Return a number for a model that the script does not ask for, such as a copy.

        A journal identifies the models of a script by consecutive numbers. With a journal, other models get
        random numbers far away, so that they leave no gap.
        """
        return self.next_model_seq_id() if self.journal is None else _somewhere_far()

    @property
    def heartless(self) -> bool:
        """True if the session exists and this process sends no heartbeats for it."""
        return self._heartbeat is None and self.session_id is not None

    # -------------------------------------------------------------------------------------- its life

    def open(self, runtime: ClientRuntime, dialect: Dialect, deadline_s: float | None = None) -> None:
        """Create the session unless it exists, and start its heartbeats."""
        session_id = self.session_id or self._go_on(runtime) or self._create(runtime, deadline_s)
        self.session_id, self._finish_offered = session_id, dialect.offers("finish_session")
        self._runtime = weakref.ref(runtime)
        beats = heartbeat.Heartbeat(
            _beat(self._runtime, session_id),
            self,
            refresh_if_due=_upkeep(self._runtime),
            always_offered=runtime.settings.is_vendor_host,
            keeper=self._start_keeper(runtime, session_id),
            period_s=heartbeat.PERIOD_S,
            clock=runtime.clock,
        )
        beats.start()
        self._heartbeat = beats
        if self.owned:
            runtime.tell(SessionStarted(session_id=session_id))

    def _start_keeper(self, runtime: ClientRuntime, session_id: str) -> Keeper | None:
        """Start the keeper of an owned session, if the user wants one."""
        if self._keeper_s is None or not self.owned:
            return None
        from tinker_sync.runtime.keeper import Keeper

        settings, http, runtime_ref = runtime.settings, runtime.http, weakref.ref(runtime)
        call = make_call("session_heartbeat", settings, SessionHeartbeatRequest(session_id=session_id))

        def headers() -> dict[str, str] | None:
            alive = runtime_ref()
            return None if alive is None else alive.http.headers_of(call)

        keeper = Keeper(
            headers,
            http.describe(call),
            {**heartbeat.policy(), "always_offered": settings.is_vendor_host},
            period_s=heartbeat.PERIOD_S,
            # The embedded server of this process dies with it.
            outlive_s=0.0 if http.serves_itself else self._keeper_s,
        )
        keeper.start()
        return keeper

    def _create(self, runtime: ClientRuntime, deadline_s: float | None) -> str:
        created = runtime.call(
            "create_session",
            CreateSessionRequest(
                tags=list(runtime.settings.tags),
                user_metadata=self._user_metadata,
                sdk_version=runtime.settings.sdk_version,
                project_id=self._project_id,
                display_name=self._display_name,
            ),
            deadline_s=deadline_s,
            # An account that cannot pay gets the error at once, because it has no work under way.
            pause_billing=False,
        )
        for level, message in (
            (logging.INFO, created.info_message),
            (logging.WARNING, created.warning_message),
            (logging.ERROR, created.error_message),
        ):
            if message:
                _log.log(level, "%s", mask_text(message, runtime.secrets()))
        session_id: str = created.session_id
        if self.journal is not None:
            self.journal.begin(session_id)
        return session_id

    def _go_on(self, runtime: ClientRuntime) -> str | None:
        """Return the id of the journal's session if the server still has the session and its models."""
        journal = self.journal
        if journal is None or journal.session_id is None:
            return None
        sign_of_life = SessionHeartbeatRequest(session_id=journal.session_id)
        if not _is_known(runtime, "session_heartbeat", sign_of_life):
            return None
        for request_id in journal.last_requests:
            if not _is_known(runtime, "retrieve_future", FutureRetrieveRequest(request_id=request_id)):
                return None
        journal.resume()
        if not journal.replays:
            self._number_from(_somewhere_far())
        return journal.session_id

    def end(self, last: Callable[[], object] | None = None) -> threading.Event | None:
        """End the heartbeats. Their thread runs `last` and ends; return the event that is set then."""
        beats = self._heartbeat
        if beats is None:
            return None
        beats.stop(last)
        return beats.ended

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the heartbeat thread."""
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
        if self.journal is not None:
            if status != "success":
                # The next run continues the session.
                _log.warning("session %s stays open at the server for the next run", session_id)
                return
            self.journal.end(status)
        lifecycle.tell(SessionEnded(session_id=session_id, status=status))
        if not self._finish_offered or self._lost is not None:
            return
        call = make_call(
            "finish_session",
            lifecycle.settings,
            {"reason": {"type": status}, "detail": detail},
            path={"session": session_id},
            deadline_s=limit_s,
        )
        try:
            lifecycle.caller.call(call)
        except Exception as error:  # noqa: BLE001  # a failure must not prevent the end of the client
            if not (isinstance(error, APIStatusError) and error.status_code in NO_SUCH_CALL):
                level = logging.DEBUG if quiet else logging.WARNING
                _log.log(level, "the server was not told that session %s is over: %s", session_id, error)

    def renew_after_fork(self) -> None:
        """Continue the parent's session in a forked child. The parent alone finishes the session."""
        if self._heartbeat is not None:
            self._heartbeat.leave_to_parent()
        self._heartbeat = None
        if self.session_id is not None:
            self.owned = False
            self._number_from(_somewhere_far())

    # -------------------------------------------------------------------------------------- its loss

    def refuse_lost(self) -> None:
        """Raise if the server has lost the session.

        Raises:
            SessionLostError: the server has lost it.
        """
        lost = self._lost
        if lost is not None:
            raise copy_exception(lost)

    def look_after(self, error: BaseException) -> None:
        """Send a heartbeat at once if a failure may come from the loss of the session."""
        beats = self._heartbeat
        suspicious = isinstance(error, APIStatusError) and error.status_code in _SUSPICIOUS
        if suspicious and beats is not None:
            beats.beat_soon()

    def on_lost(self, error: TinkerError) -> None:
        """Log the loss of the session, and store the error for later calls."""
        lost = SessionLostError(str(self.session_id), str(error))
        lost.__cause__ = error
        self._lost = lost
        _log.error("%s", lost)
        self._tell(SessionLost(session_id=lost.session_id, reason=lost.reason))

    def on_found(self) -> None:
        """Clear the loss, because the server has the session again."""
        self._lost = None
        _log.warning("the server knows session %s again", self.session_id)

    def on_late(self, delay_s: float, reason: str) -> None:
        """Report a heartbeat that this process sent too late."""
        self._tell(HeartbeatLate(delay_s=delay_s, reason=reason))

    def _tell(self, event: Event) -> None:
        runtime = self._runtime() if self._runtime is not None else None
        if runtime is not None:
            runtime.tell(event)


def _is_known(runtime: ClientRuntime, name: str, request: Any) -> bool:
    """Return True if the server knows the object that a request names. Ask it once."""
    try:
        runtime.caller.call(make_call(name, runtime.settings, request))
    except APIStatusError as error:
        if error.status_code in (404, 410):
            return False
        if error.status_code != _NOT_READY:
            raise
    return True


def _somewhere_far() -> int:
    return _FAR + uuid.uuid4().int % (_FARTHEST - _FAR)


def _beat(runtime_ref: weakref.ref[ClientRuntime], session_id: str) -> Callable[[], None]:
    """Return a function that sends one heartbeat. It refers to the core only while it runs."""
    request = SessionHeartbeatRequest(session_id=session_id)

    def beat() -> None:
        runtime = runtime_ref()
        if runtime is not None and not runtime.lifecycle.closed:
            runtime.caller.call(make_call("session_heartbeat", runtime.settings, request))

    return beat


def _upkeep(runtime_ref: weakref.ref[ClientRuntime]) -> Callable[[], bool]:
    """Return a function that calls `ClientRuntime.upkeep`, and returns False once the core is gone."""

    def upkeep() -> bool:
        runtime = runtime_ref()
        if runtime is not None:
            runtime.upkeep()
        return runtime is not None

    return upkeep
