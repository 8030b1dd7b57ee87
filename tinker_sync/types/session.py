"""Sessions: creation, heartbeats, sampling sessions and descriptions."""

from __future__ import annotations

from typing import Any, Literal

from tinker_sync.types._model import Model, model


@model
class CreateSessionRequest(Model):
    """A request to open a session; `sdk_version` is the version of the client's protocol.

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
    """The new session, with the service's messages for its user."""

    __response__ = True

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


@model
class SessionHeartbeatRequest(Model):
    """A heartbeat, which keeps a session alive."""

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

    `sampling_session_seq_id` counts these requests, and unnamed saves to sample from, from 0 in a session.
    """

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


@model
class CreateSamplingSessionResponse(Model):
    """The new sampling session."""

    __response__ = True

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


@model
class JoinSamplingSessionRequest(Model):
    """A request to share a sampling session of another process."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


@model
class JoinSamplingSessionResponse(Model):
    """The number that distinguishes this process's samples from those of others in the session."""

    __response__ = True

    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


@model
class GetSamplerResponse(Model):
    """The base model of a sampler, and its checkpoint if it has one.

    >>> GetSamplerResponse(sampler_id="s-1:sample:0", base_model="org/base").model_path is None
    True
    """

    __response__ = True

    sampler_id: str
    base_model: str
    model_path: str | None = None


@model
class GetSamplerResponseInternal(GetSamplerResponse):
    """A sampler with its tokenizer, which servers such as the embedded one send.

    >>> GetSamplerResponseInternal(sampler_id="s-1:sample:0", base_model="org/base").tokenizer_id is None
    True
    """

    __response__ = True

    tokenizer_id: str | None = None


@model
class GetSessionResponse(Model):
    """The training runs and samplers of a session.

    >>> GetSessionResponse(training_run_ids=["s-1:train:0"], sampler_ids=[]).training_run_ids
    ['s-1:train:0']
    """

    __response__ = True

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


@model
class ListSessionsResponse(Model):
    """A page of session ids.

    >>> ListSessionsResponse(sessions=["s-1", "s-2"]).sessions
    ['s-1', 's-2']
    """

    __response__ = True

    sessions: list[str]
