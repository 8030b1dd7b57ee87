"""Calls about the service: its settings, keys, health, models, usage and audit log."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import WireError
from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.problems import Refused
from tinker_sync.local.server.signing import USER
from tinker_sync.local.store.database import texts
from tinker_sync.types.billing import (
    AuditLogEntry,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointBillingEvent,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    StorageBillingEvent,
    TrainingBillingEvent,
)
from tinker_sync.types.capabilities import GetServerCapabilitiesResponse, SupportedModel
from tinker_sync.types.service import ClientConfigRequest
from tinker_sync.wire import json as json_codec

if TYPE_CHECKING:
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import Service
    from tinker_sync.local.store.rows import AuditRow, HourlyUsageRow
    from tinker_sync.types.billing import BillingEventInfo

calls = Calls()

_GIGABYTE: Final = 10**9
_LONGEST: Final = timedelta(days=14)
_SUBJECTS: Final = {"checkpoints": "checkpoint_", "projects": "session_project_"}
_EVENT_TYPES: Final = ("all", "checkpoints", "projects", "teams", "organizations")


@calls.of("client_config")
async def client_config(service: Service, ask: Ask) -> Any:
    """Return the settings that a client reads once."""
    ask.read(ClientConfigRequest)
    settings: dict[str, Any] = json_codec.to_plain(service.flags.client)
    if not service.flags.client.create_model_via_load_weights:
        del settings["create_model_via_load_weights"]  # servers of protocol version 0.38 lack this setting
    return settings


@calls.of("dynamic_config")
async def dynamic_config(service: Service, ask: Ask) -> Any:
    """Return the settings that may change while a client runs."""
    ask.read(ClientConfigRequest)
    return service.flags.dynamic


@calls.of("auth_token")
async def auth_token(service: Service, ask: Ask) -> Any:
    """Return a short-lived token in place of the key."""
    ask.tree()
    return {"jwt": service.signer.token(service.flags.token_life_s)}


@calls.of("get_api_key")
async def get_api_key(service: Service, ask: Ask) -> Any:  # noqa: ARG001
    """Return the name and the owner of the key."""
    return {
        "key_id": 1,
        "name": "local",
        "note": None,
        "details": {"org_details": {"name": "local"}, "user_details": {"email": "local@localhost"}},
    }


@calls.of("revoke_api_key")
async def revoke_api_key(service: Service, ask: Ask) -> Any:  # noqa: ARG001
    """Refuse, because the key of this server is valid until the server ends."""
    raise Refused(403, "the key of a local server ends with the server and cannot be revoked")


@calls.of("healthz")
async def healthz(service: Service, ask: Ask) -> Any:
    """Report that the server is up. A client with the key also gets the unknown fields of all requests."""
    if service.ignored and service.signer.knows(ask.credential):
        return {"status": "ok", "ignored_fields": sorted(service.ignored)}
    return {"status": "ok"}


@calls.of("telemetry")
async def telemetry(service: Service, ask: Ask) -> Any:  # noqa: ARG001
    """Accept the telemetry of a client and discard it."""
    ask.tree("session_id", "platform", "sdk_version", "events")
    return {"status": "accepted"}


@calls.of("get_server_capabilities")
async def get_server_capabilities(service: Service, ask: Ask) -> Any:  # noqa: ARG001
    """Return the base models that the server offers."""
    models = [
        SupportedModel(
            model_name=model.name,
            max_context_length=model.config.max_positions,
            trainable=True,
            sampleable=True,
        )
        for model in service.host.models.values()
    ]
    return GetServerCapabilitiesResponse(supported_models=models)


# ------------------------------------------------------------------------------------------ usage


@calls.of("get_billing_usage")
async def get_billing_usage(service: Service, ask: Ask) -> Any:
    """Return the usage of each hour between two moments."""
    window = _window(ask)
    rows = await service.on_disk(service.store.usage, window.starting_on, window.ending_before)
    sessions: dict[str, BillingUsageSession] = {}
    for session_id in {row.session_id for row in rows if row.session_id}:
        found = await service.on_disk(service.store.session, session_id)
        sessions[session_id] = BillingUsageSession(user_metadata=texts(found.user_metadata))
    return BillingUsageResponse(data=[_event(row) for row in rows], sessions=sessions)


def _window(ask: Ask) -> GetBillingUsageRequest:
    try:
        window = json_codec.from_plain(
            {name: ask.query.get(name) for name in ("starting_on", "ending_before")}, GetBillingUsageRequest
        )
    except WireError as problem:
        raise Refused(422, [{"loc": ["query"], "msg": str(problem), "type": "value_error"}]) from None
    try:
        moments = [_in_utc(window.starting_on), _in_utc(window.ending_before)]
    except OverflowError:
        raise Refused(400, "starting_on and ending_before must be between the years 1 and 9999") from None
    if any((moment.minute, moment.second, moment.microsecond) != (0, 0, 0) for moment in moments):
        raise Refused(400, "starting_on and ending_before must be on the hour")
    if not timedelta(0) < moments[1] - moments[0] <= _LONGEST:
        raise Refused(400, f"the window must be longer than nothing and at most {_LONGEST.days} days")
    return GetBillingUsageRequest(starting_on=moments[0], ending_before=moments[1])


def _in_utc(moment: datetime) -> datetime:
    return moment.astimezone(timezone.utc) if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _event(row: HourlyUsageRow) -> BillingUsageEvent:
    return BillingUsageEvent(
        bucket_start=row.bucket_start,
        bucket_end=row.bucket_start + timedelta(hours=1),
        base_model=row.base_model,
        user_id=USER,
        user_name="local",
        session_id=row.session_id,
        project_id=row.project_id,
        estimated_cost_usd=0.0,
        event_info=_event_info(row),
    )


def _event_info(row: HourlyUsageRow) -> BillingEventInfo:
    count = int(row.amount)
    if row.kind == "training":
        return TrainingBillingEvent(token_count=count)
    if row.kind in ("prefill", "prefill_cached"):
        return SamplingPrefillBillingEvent(cached=row.kind == "prefill_cached", token_count=count)
    if row.kind == "sample":
        return SamplingSampleBillingEvent(token_count=count)
    if row.kind == "checkpoint":
        return CheckpointBillingEvent(count=count)
    return StorageBillingEvent(gigabyte_hours=row.amount)


@calls.of("get_checkpoint_storage_usage")
async def get_checkpoint_storage_usage(service: Service, ask: Ask) -> Any:
    """Return the storage that the checkpoints of each project, or of a requested one, use now."""
    rows = await service.on_disk(service.store.storage_now, ask.query.get("project_id"))
    items = [
        CurrentCheckpointStorageUsageItem(
            project_id=row.project_id,
            org_user_urn=USER,
            user_email="local@localhost",
            user_name="local",
            checkpoint_count=row.checkpoint_count,
            size_bytes=row.size_bytes,
            size_gigabytes=row.size_bytes / _GIGABYTE,
            estimated_monthly_cost_usd=0.0,
        )
        for row in rows
    ]
    return CurrentCheckpointStorageUsageResponse(effective_rate_usd_per_gigabyte_month=0.0, data=items)


@calls.of("get_audit_log")
async def get_audit_log(service: Service, ask: Ask) -> Any:
    """Return the audit log of one day in UTC, today by default, for one type of events or for all."""
    kind, day = ask.query.get("event_type", "all"), ask.query.get("day")
    if kind not in _EVENT_TYPES:
        raise Refused(422, f"event_type must be one of {', '.join(_EVENT_TYPES)}")
    try:
        wanted = None if day is None else date.fromisoformat(day)
    except ValueError:
        raise Refused(422, "day must be YYYY-MM-DD") from None
    rows = await service.on_disk(service.store.audit_log, wanted)
    start = "" if kind == "all" else _SUBJECTS.get(kind, "nothing of this kind happens here")
    return {"entries": [_entry(row) for row in rows if row.event.startswith(start)]}


def _entry(row: AuditRow) -> AuditLogEntry:
    return AuditLogEntry(
        timestamp=row.at,
        event=row.event,
        event_details={"actor": USER, **row.detail},
        model_id=row.detail.get("training_run_id"),
        tinker_path=row.detail.get("tinker_path"),
        purpose=row.detail.get("purpose"),
    )
