"""A session at the server: made once, kept alive by heartbeats, told when it is over.

An owned session is created and finished by us. A joined one was created elsewhere, in the process that sent
its sampler here: it gets heartbeats from us too, and is never finished by us.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import APIStatusError, TinkerError
from tinker_sync.runtime.calls import make_call
from tinker_sync.runtime.heartbeat import Heartbeat
from tinker_sync.runtime.numbers import numbers
from tinker_sync.types.session import CreateSessionRequest, SessionHeartbeatRequest

if TYPE_CHECKING:
    from tinker_sync.config import Settings
    from tinker_sync.runtime.core import Core
    from tinker_sync.transport.caller import Caller

# Servers that know no such call; there is nothing to finish there.
_UNKNOWN_CALL: Final = (404, 405, 501)

_log = logging.getLogger("tinker_sync.session")


class Session:
    """What a session is created with, and its heart. `open` is called once, the rest from anywhere.

    Args:
        user_metadata: the user's own words about it.
        project_id: the project it belongs to.
        display_name: how it is listed.
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
        self._session_id = joined
        self._settings: Settings | None = None
        self._heartbeat: Heartbeat | None = None
        self.owned = joined is None
        self.lost: TinkerError | None = None
        """Why the server has forgotten it, once it has."""
        self.next_model_seq_id: Callable[[], int] = numbers()
        self.next_sampling_session_seq_id: Callable[[], int] = numbers()
        self.next_custom_loss_seq_id: Callable[[], int] = numbers()

    def open(self, core: Core) -> str:
        """Create it, unless it exists, and begin its heartbeats."""
        session_id = self._session_id or self._create(core)
        self._session_id = session_id
        self._settings = core.settings
        self._heartbeat = Heartbeat(_upkeep(weakref.ref(core), session_id), self._on_lost, clock=core.clock)
        self._heartbeat.start()
        return session_id

    def _create(self, core: Core) -> str:
        created = core.call(
            "create_session",
            CreateSessionRequest(
                tags=list(core.settings.tags),
                user_metadata=self._user_metadata,
                sdk_version=core.settings.sdk_version,
                project_id=self._project_id,
                display_name=self._display_name,
            ),
        )
        for level, message in (
            (logging.INFO, created.info_message),
            (logging.WARNING, created.warning_message),
            (logging.ERROR, created.error_message),
        ):
            if message:
                _log.log(level, "%s", message)
        session_id: str = created.session_id
        return session_id

    def finish(self, caller: Caller, status: str, detail: str | None, limit_s: float) -> None:
        """Tell the server that it is over, if it is ours and the server knows such a call."""
        if self._session_id is None or self._settings is None or not self.owned:
            return
        call = make_call(
            "finish_session",
            self._settings,
            {"reason": {"type": status}, "detail": detail},
            path={"session": self._session_id},
            deadline_s=limit_s,
        )
        try:
            caller.call(call)
        except APIStatusError as error:
            if error.status_code not in _UNKNOWN_CALL:
                raise

    def stop_heartbeat(self) -> None:
        """No more heartbeats."""
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def renew_after_fork(self) -> None:
        """The heartbeats are the parent's business, and so is the end of the session."""
        self._heartbeat = None
        self.owned = False

    def _on_lost(self, error: TinkerError) -> None:
        self.lost = error
        _log.error("the server no longer knows session %s: %s", self._session_id, error)


def _upkeep(core_ref: weakref.ref[Core], session_id: str) -> Callable[[], None]:
    """One heartbeat, and what else is due. Holds the core only while it works."""
    request = SessionHeartbeatRequest(session_id=session_id)

    def beat() -> None:
        core = core_ref()
        if core is not None and not core.closed:
            core.caller.call(make_call("session_heartbeat", core.settings, request))
            core.upkeep()

    return beat
