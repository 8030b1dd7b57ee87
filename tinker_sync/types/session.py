"""Sessions and the sampling sessions in them: creation, heartbeats, and use by several processes."""

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


@model
class CreateSamplingSessionRequest(Model):
    """A request for a sampling session on a base model or a checkpoint.

    `sampling_session_seq_id` is the number of the sampling session among those of its session. Saves for
    sampling without a name create sampling sessions too, and take their numbers from the same count.
    """

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


@model
class CreateSamplingSessionResponse(Model):
    """The id of a new sampling session."""

    __response__ = True

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


@model
class JoinSamplingSessionRequest(Model):
    """A request of a process to share a sampling session that another process has created."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


@model
class JoinSamplingSessionResponse(Model):
    """The number that distinguishes this process's samples from those of others in a sampling session."""

    __response__ = True

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int
