"""The creation of sampling sessions, and their use by several processes."""

from __future__ import annotations

from typing import Literal

from tinker_sync.types._model import Model, model


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
