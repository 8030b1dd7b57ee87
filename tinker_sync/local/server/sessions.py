"""Calls that open, keep alive, end and look up sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.problems import Refused
from tinker_sync.local.server.service import LiveSession
from tinker_sync.types.described import GetSessionResponse, ListSessionsResponse
from tinker_sync.types.search import SessionSearchRequest, SessionSearchResponse
from tinker_sync.types.session import (
    CreateSessionRequest,
    CreateSessionResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)

if TYPE_CHECKING:
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import Service

calls = Calls()

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
