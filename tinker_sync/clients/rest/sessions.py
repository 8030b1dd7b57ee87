"""Calls about sessions: get, list, search, move to a project, and export the timeline as a trace file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from tinker_sync._base.secret import Secret, mask_text
from tinker_sync.clients._async import async_result
from tinker_sync.clients._base import REST_S
from tinker_sync.clients.rest._base import AccessScope, RestBase, checked_id, checked_scope, warn_experimental
from tinker_sync.clients.rest.listing import Listing, Page
from tinker_sync.errors import TinkerError, WireError
from tinker_sync.runtime.calls import make_call, odd_answer
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.transport.call import Reply
from tinker_sync.types._structured import short_repr
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.types import (
        GetSessionResponse,
        ListSessionsResponse,
        SessionSearchRequest,
        SessionSearchResponse,
    )

_TRACE_POLL_S: Final = 5.0
# Exports take minutes; the server has forgotten one that takes longer than this.
_TRACE_LIMIT_S: Final = 3600.0

_log = logging.getLogger(__name__)


class _TraceFailed(TinkerError, RuntimeError):
    """The error for a trace that the server could not write.

    It is also a RuntimeError, which the reference client raises.
    """


class SessionCalls(RestBase):
    """The part of a REST client with calls about sessions."""

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """Return a session with its runs and samplers.

        Args:
            session_id: the id of the session.
            access_scope: "accessible" also finds shared sessions of other users.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     session = service.create_rest_client().get_session(session_id).result()
        ...     session.training_run_ids == [training.model_id]
        True
        """
        return self._call(
            "get_session",
            path={"session": checked_id("session_id", session_id)},
            query={"access_scope": checked_scope(access_scope)},
        )

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """Return a page of session ids.

        Args:
            limit: the largest number of entries.
            offset: the number of entries before the page.
            access_scope: "accessible" also lists shared sessions of other users.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     session_id in service.create_rest_client().list_sessions(limit=5).result().sessions
        True
        """
        return self._call(
            "list_sessions",
            query={"limit": limit, "offset": offset, "access_scope": checked_scope(access_scope)},
        )

    def iter_sessions(self, *, limit: int | None = None, access_scope: AccessScope = "owned") -> Listing[str]:
        """Iterate over the ids of all sessions. The next page is fetched while you use the present one.

        No id comes twice, also if sessions appear or vanish meanwhile. The service does not give the number
        of sessions, so `total` of the iterator stays None.

        Args:
            limit: the largest number of entries; None: all.
            access_scope: "accessible" also lists shared sessions of other users.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     session_id in list(service.create_rest_client().iter_sessions())
        True
        """
        checked_scope(access_scope)
        return Listing(
            lambda size, offset: self.list_sessions(size, offset, access_scope),
            lambda answer: Page(answer.sessions),
            str,
            limit=limit,
        )

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Return a page of the sessions that match a request. Experimental: the service may change this call.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", tinker_sync.ExperimentalWarning)
        >>> with tinker_sync.ServiceClient(base_url="local", display_name="a search") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4).result()
        ...     request = tinker_sync.types.SessionSearchRequest(display_name="a search")
        ...     found = service.create_rest_client().search_sessions(request).result()
        >>> {session.display_name for session in found.sessions}
        {'a search'}
        """
        warn_experimental("search_sessions")
        return self._call("search_sessions", request)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session to a project.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     service.create_rest_client().assign_session_project(session_id, "project-2").result()
        """
        return self._call(
            "assign_session_project",
            {"project_id": project_id},
            path={"session": checked_id("session_id", session_id)},
        )

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """Let the server write the timeline of a session as a Perfetto trace. Return the trace's address.

        This takes minutes; after an hour the client gives up. If the server could not write the trace, the
        future fails with a TinkerError that is also a RuntimeError.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     url = service.create_rest_client().export_session_trace(session_id).result()
        >>> url.startswith("http")
        True
        """
        call = make_call(
            "export_session_trace",
            self._runtime.settings,
            path={"session": checked_id("session_id", session_id)},
            deadline_s=REST_S,
        )
        runtime = self._runtime

        def export() -> str:
            give_up_at = runtime.clock.now() + _TRACE_LIMIT_S
            said = False
            while runtime.clock.now() < give_up_at:
                reply = runtime.connection.caller.call(call)
                url = _trace_url(reply, runtime.connection.secrets)
                if url is not None:
                    return url
                if not said:
                    _log.warning("the trace of session %s is being written; this takes minutes", session_id)
                    said = True
                runtime.clock.wait(threading.Event(), _TRACE_POLL_S)
            raise TinkerError(f"the trace of session {session_id} was not written within an hour")

        return self._later(export)

    get_session_async = async_result(get_session)
    list_sessions_async = async_result(list_sessions)
    search_sessions_async = async_result(search_sessions)
    assign_session_project_async = async_result(assign_session_project)
    export_session_trace_async = async_result(export_session_trace)


def _trace_url(reply: Reply, secrets: Callable[[], Iterable[Secret]]) -> str | None:
    """Return the address of a trace, or None while the server writes it."""
    row = ENDPOINTS["export_session_trace"]
    try:
        tree = wire_json.loads(reply.body)
    except WireError as error:
        raise odd_answer(row, reply, error, secrets) from error
    state = tree.get("status") if isinstance(tree, dict) else None
    if state == "ready" and isinstance(tree.get("url"), str):
        url: str = tree["url"]
        return url
    if state == "pending":
        return None
    if state == "failed":
        why = mask_text(str(tree.get("error") or "no reason given"), secrets())
        raise _TraceFailed(f"the server could not write the trace: {why}")
    odd = WireError(f"unknown state of a trace: {short_repr(state)}", path="$.status")
    raise odd_answer(row, reply, odd, secrets) from odd
