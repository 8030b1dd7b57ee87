"""Calls about the service (settings, keys, health, models, usage, events), and about sessions."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import WireError
from tinker_sync.local.server.calls import Calls, Refused
from tinker_sync.local.server.state import LiveSession
from tinker_sync.local.store.store import USER, USER_EMAIL, USER_NAME
from tinker_sync.types.billing import (
    AuditLogResponse,
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointBillingEvent,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    TrainingBillingEvent,
)
from tinker_sync.types.described import GetSessionResponse, ListSessionsResponse
from tinker_sync.types.search import SessionSearchRequest, SessionSearchResponse
from tinker_sync.types.service import ClientConfigRequest, GetServerCapabilitiesResponse, SupportedModel
from tinker_sync.types.session import (
    CreateSessionRequest,
    CreateSessionResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)
from tinker_sync.wire import json as json_codec

if TYPE_CHECKING:
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.state import Service, UsageKind
    from tinker_sync.types.search import SessionSummary

calls = Calls()


# ----------------------------------------------------------------------------------------------- the service


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
        "details": {"org_details": {"name": "local"}, "user_details": {"email": USER_EMAIL}},
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
    found: dict[str, SessionSummary] = {}
    events = []
    for (hour, session_id, base_model, kind), amount in sorted(service.usage.items()):
        start = datetime.fromtimestamp(hour * 3600, timezone.utc)
        if not window.starting_on <= start < window.ending_before:
            continue
        if session_id not in found:
            found[session_id] = await service.on_disk(service.store.session, session_id)
        events.append(
            BillingUsageEvent(
                bucket_start=start,
                bucket_end=start + timedelta(hours=1),
                base_model=base_model,
                user_id=USER,
                user_name=USER_NAME,
                session_id=session_id,
                project_id=found[session_id].project_id,
                estimated_cost_usd=0.0,
                event_info=_event_info(kind, amount),
            )
        )
    sessions = {
        name: BillingUsageSession(user_metadata=session.user_metadata) for name, session in found.items()
    }
    return BillingUsageResponse(data=events, sessions=sessions)


def _event_info(kind: UsageKind, amount: int) -> BillingEventInfo:
    if kind == "training":
        return TrainingBillingEvent(token_count=amount)
    if kind == "sample":
        return SamplingSampleBillingEvent(token_count=amount)
    if kind == "checkpoint":
        return CheckpointBillingEvent(count=amount)
    return SamplingPrefillBillingEvent(cached=kind == "prefill_cached", token_count=amount)


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


@calls.of("get_checkpoint_storage_usage")
async def get_checkpoint_storage_usage(service: Service, ask: Ask) -> Any:
    """Return the storage that the checkpoints of each project, or of a requested one, use now."""
    items = await service.on_disk(service.store.storage_now, ask.query.get("project_id"))
    return CurrentCheckpointStorageUsageResponse(effective_rate_usd_per_gigabyte_month=0.0, data=items)


@calls.of("get_audit_log")
async def get_audit_log(service: Service, ask: Ask) -> Any:
    """Return the events of one day in UTC since the start of the server, of one type or of all.

    The day is today by default.
    """
    kind, day = ask.query.get("event_type", "all"), ask.query.get("day")
    if kind not in _EVENT_TYPES:
        raise Refused(422, f"event_type must be one of {', '.join(_EVENT_TYPES)}")
    try:
        wanted = service.moment().date() if day is None else date.fromisoformat(day)
    except ValueError:
        raise Refused(422, "day must be YYYY-MM-DD") from None
    start = "" if kind == "all" else _SUBJECTS.get(kind, "nothing of this kind happens here")
    return AuditLogResponse(
        entries=[
            each
            for each in list(service.events)  # other threads add to it
            if each.timestamp.date() == wanted and each.event.startswith(start)
        ]
    )


# -------------------------------------------------------------------------------------------------- sessions


_REASONS: Final = ("success", "errored", "interrupted")


@calls.of("create_session")
async def create_session(service: Service, ask: Ask) -> Any:
    """Open a session. A repeated request, recognised by its idempotency key, gets the same session."""
    request, session_id = ask.read(CreateSessionRequest), service.new_id()
    await service.on_disk(
        service.store.add_session,
        session_id,
        tags=request.tags,
        user_metadata=request.user_metadata,
        sdk_version=request.sdk_version,
        project_id=request.project_id,
        display_name=request.display_name,
    )
    service.sessions[session_id] = LiveSession(session_id, service.clock.now())
    return CreateSessionResponse(session_id=session_id)


@calls.of("session_heartbeat")
async def session_heartbeat(service: Service, ask: Ask) -> Any:
    """Note that a session is still in use. Refuse if it has ended."""
    request = ask.read(SessionHeartbeatRequest)
    await service.session(request.session_id)
    return SessionHeartbeatResponse()


@calls.of("finish_session")
async def finish_session(service: Service, ask: Ask) -> Any:
    """End a session. A session that has already ended keeps its status.

    The models and samplers of the session leave memory `Flags.release_s` seconds after its end.
    """
    tree, session_id = ask.tree("reason", "detail"), ask.ids["session"]
    reason, detail = tree.get("reason"), tree.get("detail")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in _REASONS or not (detail is None or isinstance(detail, str)):
        raise Refused(422, f"reason.type must be one of {', '.join(_REASONS)}, detail text or null")
    await service.on_disk(service.store.finish_session, session_id, kind, detail)
    live = service.sessions.get(session_id)
    if live is not None and not live.finished:
        live.finished = True
        service.later(service.flags.release_s, lambda: service.release(session_id))
    return {}


@calls.of("get_session")
async def get_session(service: Service, ask: Ask) -> Any:
    """Return the metadata of a session and the ids of its runs and samplers."""
    store, session_id = service.store, ask.ids["session"]
    session = await service.on_disk(store.session, session_id)
    return GetSessionResponse(
        training_run_ids=await service.on_disk(store.session_runs, session_id),
        sampler_ids=await service.on_disk(store.session_samplers, session_id),
        user_metadata=session.user_metadata,
        display_name=session.display_name,
    )


@calls.of("list_sessions")
async def list_sessions(service: Service, ask: Ask) -> Any:
    """Return a page of session ids, the newest session first."""
    limit, offset = ask.number("limit", 20, least=1), ask.number("offset", 0, most=1 << 40)
    return ListSessionsResponse(
        sessions=(await service.on_disk(service.store.list_sessions, limit, offset))[0]
    )


@calls.of("search_sessions")
async def search_sessions(service: Service, ask: Ask) -> Any:
    """Return a page of the sessions that match a search, the newest first."""
    request = ask.read(SessionSearchRequest)
    sessions, cursor = await service.on_disk(service.store.search_sessions, request)
    return SessionSearchResponse(sessions=sessions, next_cursor=cursor)


@calls.of("assign_session_project")
async def assign_session_project(service: Service, ask: Ask) -> Any:
    """Move a session and its runs to a project."""
    project_id, session_id = ask.tree("project_id").get("project_id"), ask.ids["session"]
    if not isinstance(project_id, str) or not project_id:
        raise Refused(400, "project_id must be text")
    await service.on_disk(service.store.set_session_project, session_id, project_id)
    service.note_event("session_project_assigned", session_id=session_id, project_id=project_id)
    return {}
