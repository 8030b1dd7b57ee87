"""An organization's usage, costs, storage and audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

import attrs

from tinker_sync.types._model import Model, model


@model
class GetBillingUsageRequest(Model):
    """A request for the usage from `starting_on` up to `ending_before`, which is excluded.

    The server accepts only full hours in UTC.

    >>> request = GetBillingUsageRequest(starting_on="2026-01-30T00:00Z", ending_before="2026-01-31T00:00Z")
    >>> request.ending_before - request.starting_on
    datetime.timedelta(days=1)
    """

    starting_on: datetime
    ending_before: datetime


@model
class TrainingBillingEvent(Model):
    """The billed tokens of forward and backward passes."""

    __response__ = True

    type: Literal["training"] = "training"
    token_count: int


@model
class SamplingPrefillBillingEvent(Model):
    """The billed tokens of prompts. Cached tokens cost less."""

    __response__ = True

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


@model
class SamplingSampleBillingEvent(Model):
    """The billed tokens that were sampled."""

    __response__ = True

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


@model
class CheckpointBillingEvent(Model):
    """The number of saved checkpoints that were billed."""

    __response__ = True

    type: Literal["checkpoint"] = "checkpoint"
    count: int


@model
class StorageBillingEvent(Model):
    """The billed storage of checkpoints.

    Attributes:
        free: True if this storage is not charged. Free and charged storage are separate events.

    >>> StorageBillingEvent(gigabyte_hours=2.5).free
    False
    """

    __response__ = True

    type: Literal["storage"] = "storage"
    free: bool = False
    gigabyte_hours: float


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)
"""The kinds of usage; distinguish them by class or by `type`."""


@model
class BillingUsageEvent(Model):
    """The usage of one kind in one hour, by one user.

    Attributes:
        session_id: a key of `BillingUsageResponse.sessions`; None for storage.
        estimated_cost_usd: the cost before credits; None without a price. Tokens cost the rate per million
            tokens x count / 1,000,000, storage the rate per gigabyte month x gigabyte hours / 720.

    >>> BillingUsageEvent(
    ...     bucket_start="2026-01-30T00:00:00Z",
    ...     bucket_end="2026-01-30T01:00:00Z",
    ...     event_info={"type": "training", "token_count": 4096},
    ... ).event_info.token_count
    4096
    """

    __response__ = True

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


@model
class BillingUsageSession(Model):
    """The metadata of a billed session."""

    __response__ = True

    user_metadata: dict[str, str] | None = None


@model
class BillingUsageResponse(Model):
    """The usage of an organization hour by hour, and the sessions that caused it.

    Attributes:
        sessions: the sessions by id.
        cost_data_through: costs before this moment come from invoices, later ones from the price list.

    >>> BillingUsageResponse(data=[], sessions={"s-1": {"user_metadata": {"team": "a"}}}).sessions["s-1"]
    BillingUsageSession(user_metadata={'team': 'a'})
    """

    __response__ = True

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = attrs.field(factory=dict)
    cost_data_through: datetime | None = None


@model
class GetCurrentCheckpointStorageUsageRequest(Model):
    """A request for the present storage of checkpoints, of one project or of all."""

    project_id: str | None = None


@model
class CurrentCheckpointStorageUsageItem(Model):
    """The present storage of one user's checkpoints in one project."""

    __response__ = True

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


@model
class CurrentCheckpointStorageUsageResponse(Model):
    """The present storage of checkpoints by user and project, and the monthly price of a gigabyte.

    >>> item = {"checkpoint_count": 2, "size_bytes": 10**9, "size_gigabytes": 1}
    >>> CurrentCheckpointStorageUsageResponse(data=[item]).data[0].size_gigabytes
    1.0
    """

    __response__ = True

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]


@model
class AuditLogEntry(Model):
    """An entry of the audit log: one event, such as "checkpoint_read".

    `event_details` describes the user and the object of the event. `model_id`, `tinker_path` and `purpose`
    are deprecated and set for checkpoints only.

    >>> AuditLogEntry(timestamp="2026-01-31T12:00:00Z", event="checkpoint_read").event_details
    {}
    """

    __response__ = True

    timestamp: datetime
    event: str
    event_details: dict[str, object] = attrs.field(factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


@model
class AuditLogResponse(Model):
    """The entries of the audit log for one day."""

    __response__ = True

    entries: list[AuditLogEntry]
