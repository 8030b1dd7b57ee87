"""The creation of sessions, and their heartbeats."""

from __future__ import annotations

from typing import Any, Literal

from tinker_sync.types._model import Model, model


@model
class CreateSessionRequest(Model):
    """A request to open a session. `sdk_version` is the version of the protocol that the client uses.

    >>> request = CreateSessionRequest(tags=["night-run"], user_metadata={}, sdk_version="0.36.0")
    >>> request.display_name is None
    True
    """

    tags: list[str]
    user_metadata: dict[str, Any] | None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


@model
class CreateSessionResponse(Model):
    """The id of a new session, with the service's messages for the user."""

    __response__ = True

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


@model
class SessionHeartbeatRequest(Model):
    """A heartbeat: a request that keeps a session alive."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


@model
class SessionHeartbeatResponse(Model):
    """The answer to a heartbeat."""

    __response__ = True

    type: Literal["session_heartbeat"] = "session_heartbeat"
