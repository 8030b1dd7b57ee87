"""What a server has and knows: runs, sessions, samplers, its own health, and who the caller is."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from tinker_sync._base.displays import to_pandas
from tinker_sync.types._model import Model, model
from tinker_sync.types.checkpoint import Checkpoint, Cursor


@model
class TrainingRun(Model):
    """One training run and its latest checkpoints.

    Attributes:
        model_owner: the user who created the run.
        corrupted: True if the server lost part of the state of the run.
        lora_rank: None unless `is_lora`.
        last_request_time: the moment of the last request for the run.

    >>> TrainingRun(
    ...     training_run_id="run-1",
    ...     base_model="org/base",
    ...     model_owner="user-1",
    ...     is_lora=True,
    ...     lora_rank=32,
    ...     last_request_time="2026-01-31T12:00:00Z",
    ... ).corrupted
    False
    """

    __response__ = True

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


@model
class TrainingRunsResponse(Model):
    """A page of training runs.

    >>> page = TrainingRunsResponse(training_runs=[], cursor={"offset": 0, "limit": 20, "total_count": 0})
    >>> page.cursor.total_count
    0
    """

    __response__ = True

    training_runs: list[TrainingRun]
    cursor: Cursor

    to_pandas = to_pandas


@model
class GetSamplerResponse(Model):
    """The description of a sampler: its base model, and the path of its checkpoint if it has one.

    >>> GetSamplerResponse(sampler_id="s-1:sample:0", base_model="org/base").model_path is None
    True
    """

    __response__ = True

    sampler_id: str
    base_model: str
    model_path: str | None = None


@model
class GetSamplerResponseInternal(GetSamplerResponse):
    """The description of a sampler with the name of its tokenizer, which only some servers send.

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


@model
class HealthResponse(Model):
    """The answer to a health check: the service is running."""

    __response__ = True

    status: Literal["ok"]


@model
class WhoamiResponse(Model):
    """The caller's identity: user, organization and, for people, an email address.

    >>> WhoamiResponse(user_urn="user-1", org_urn="org-1").email is None
    True
    """

    __response__ = True

    user_urn: str
    org_urn: str
    email: str | None = None
