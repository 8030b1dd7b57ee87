"""The tables of sessions and samplers. A base class of `Store`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tinker_sync.local.store.database import from_json, json_or_none, texts, to_json, to_micros, to_moment
from tinker_sync.local.store.errors import StoreError
from tinker_sync.local.store.names import check_id
from tinker_sync.local.store.rows import DEFAULT_PROJECT, SamplerRow, SessionRow
from tinker_sync.local.store.tables import Tables, require
from tinker_sync.types.search import SessionSearchCursor, SessionSearchRequest, SessionStatusQuery

_SELECT: Final = """
SELECT sessions.*, count(checkpoints.number) AS checkpoints_count,
    coalesce(sum(checkpoints.size_bytes), 0) AS checkpoints_bytes
FROM sessions
LEFT JOIN runs ON runs.session_id = sessions.id
LEFT JOIN checkpoints ON checkpoints.run_id = runs.id
    AND (checkpoints.expires IS NULL OR checkpoints.expires > :now)
"""


class Sessions(Tables):
    """The methods of `Store` for sessions and samplers."""

    def add_session(
        self,
        session_id: str,
        *,
        tags: Iterable[str] = (),
        user_metadata: Mapping[str, Any] | None = None,
        sdk_version: str | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> SessionRow:
        """Open a session.

        Raises:
            StoreError: of the kind `exists`, `bad_name`, or a failure of the disk.
        """
        now = self._now()
        with self._write(f"session {session_id} could not be opened") as connection:
            connection.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    check_id(session_id, "a session"),
                    now,
                    now,
                    to_json(list(tags)),
                    json_or_none(user_metadata),
                    sdk_version,
                    project_id,
                    display_name,
                    to_json({"type": "active"}),
                ),
            )
        return self.session(session_id)

    def session(self, session_id: str) -> SessionRow:
        """Return a session.

        Raises:
            StoreError: of the kind `not_found`.
        """
        self._flush_if_possible()
        with self._database.read("the session could not be read") as connection:
            row = connection.execute(
                f"{_SELECT} WHERE sessions.id = :id GROUP BY sessions.id",
                {"id": session_id, "now": self._now()},
            ).fetchone()
        if row is None:
            raise StoreError("not_found", f"there is no session {session_id[:255]}")
        return _session(row)

    def touch_session(self, session_id: str) -> None:
        """Record that the session is in use now.

        This method does not touch the disk and ignores unknown sessions.
        """
        self._buffer.touch("sessions", session_id, self._now())

    def finish_session(self, session_id: str, reason: str, detail: str | None = None) -> None:
        """Record that the client has finished a session. A session that has already ended keeps its status.

        Args:
            session_id: the session.
            reason: `success`, `errored` or `interrupted`.
            detail: the client's own text.

        Raises:
            StoreError: of the kind `not_found`, or a failure of the disk.
        """
        self.set_session_status(
            session_id, {"type": "client_finished", "reason": {"type": reason}, "detail": detail}
        )

    def set_session_status(self, session_id: str, status: Mapping[str, Any]) -> None:
        """Record the end of a session. A session that has already ended keeps its status.

        Args:
            session_id: the session.
            status: the status in the protocol's form; its `type` is not "active".

        Raises:
            StoreError: of the kind `not_found`, or a failure of the disk.
        """
        with self._write(f"session {session_id} could not be ended") as connection:
            require(connection, "sessions", session_id)
            connection.execute(
                "UPDATE sessions SET status = ?, seen = ? WHERE id = ? AND status = ?",
                (to_json(dict(status)), self._now(), session_id, to_json({"type": "active"})),
            )

    def set_session_project(self, session_id: str, project_id: str | None) -> None:
        """Move the session and its runs to a project.

        Raises:
            StoreError: of the kind `not_found`, or a failure of the disk.
        """
        with self._write(f"session {session_id} could not be moved") as connection:
            require(connection, "sessions", session_id)
            connection.execute("UPDATE sessions SET project_id = ? WHERE id = ?", (project_id, session_id))
            connection.execute(
                "UPDATE runs SET project_id = ? WHERE session_id = ?", (project_id, session_id)
            )

    def list_sessions(self, limit: int, offset: int) -> tuple[list[SessionRow], int]:
        """Return a page of sessions, the newest first, and the number of all sessions."""
        self._flush_if_possible()
        with self._database.read("sessions could not be listed") as connection:
            rows = connection.execute(
                f"{_SELECT} GROUP BY sessions.id ORDER BY sessions.created DESC, sessions.id DESC"
                " LIMIT :limit OFFSET :offset",
                {"now": self._now(), "limit": limit, "offset": offset},
            ).fetchall()
            (total,) = connection.execute("SELECT count(*) FROM sessions").fetchone()
        return [_session(row) for row in rows], total

    def search_sessions(
        self, request: SessionSearchRequest
    ) -> tuple[list[SessionRow], SessionSearchCursor | None]:
        """Return a page of the sessions that match a request, the newest first, and the next page's cursor.

        The cursor is None if this is the last page. This server has one user, so it ignores the owner in the
        request.
        """
        self._flush_if_possible()
        with self._database.read("sessions could not be searched") as connection:
            rows = connection.execute(
                f"{_SELECT} WHERE (sessions.created, sessions.id) < (:created, :id) GROUP BY sessions.id"
                " ORDER BY sessions.created DESC, sessions.id DESC",
                {"now": self._now(), **_after(request.cursor)},
            )
            # One row more than a page shows that there is a next page.
            found: list[SessionRow] = []
            for row in rows:
                session = _session(row)
                if _fits(session, request):
                    found.append(session)
                if len(found) > request.limit:
                    break
            rows.close()
        page = found[: request.limit]
        if len(found) == len(page):
            return page, None
        last = page[-1]
        return page, SessionSearchCursor(last_created_at=last.created_at, last_session_id=last.session_id)

    def session_runs(self, session_id: str) -> list[str]:
        """Return the ids of a session's runs, in the order of their numbers."""
        with self._database.read("runs could not be listed") as connection:
            rows = connection.execute(
                "SELECT id FROM runs WHERE session_id = ? ORDER BY model_seq_id, created", (session_id,)
            )
            return [row["id"] for row in rows]

    def session_samplers(self, session_id: str) -> list[str]:
        """Return the ids of a session's samplers, the oldest first."""
        with self._database.read("samplers could not be listed") as connection:
            rows = connection.execute(
                "SELECT id FROM samplers WHERE session_id = ? ORDER BY created, id", (session_id,)
            )
            return [row["id"] for row in rows]

    def add_sampler(
        self,
        sampler_id: str,
        *,
        session_id: str,
        base_model: str,
        model_path: str | None = None,
        checkpoint: int | None = None,
    ) -> SamplerRow:
        """Add a sampler.

        Args:
            sampler_id: the id of the sampler.
            session_id: the session that it belongs to.
            base_model: the model that it samples from.
            model_path: the path of the checkpoint with the adapter, `unsaved:` and the id of the run for
                weights that no checkpoint contains, or None for the base model itself.
            checkpoint: the number of the save under `model_path`. A later save under this path has another.

        Raises:
            StoreError: `exists`, `bad_name`, `not_found` for the session, or a failure of the disk.
        """
        # Stored in one column with the path, which cannot contain "#".
        source = model_path if checkpoint is None else f"{model_path}#{checkpoint}"
        with self._write(f"sampler {sampler_id} could not be added") as connection:
            require(connection, "sessions", session_id)
            connection.execute(
                "INSERT INTO samplers VALUES (?, ?, ?, ?, ?)",
                (check_id(sampler_id, "a sampler"), session_id, base_model, source, self._now()),
            )
        return self.sampler(sampler_id)

    def sampler(self, sampler_id: str) -> SamplerRow:
        """Return a sampler.

        Raises:
            StoreError: of the kind `not_found`.
        """
        with self._database.read("the sampler could not be read") as connection:
            row = connection.execute("SELECT * FROM samplers WHERE id = ?", (sampler_id,)).fetchone()
        if row is None:
            raise StoreError("not_found", f"there is no sampler {sampler_id[:255]}")
        path, _, number = (row["model_path"] or "").partition("#")
        return SamplerRow(
            sampler_id=row["id"],
            session_id=row["session_id"],
            base_model=row["base_model"],
            model_path=path or None,
            checkpoint=int(number) if number else None,
            created_at=to_moment(row["created"]),
        )


def _session(row: sqlite3.Row) -> SessionRow:
    return SessionRow(
        session_id=row["id"],
        created_at=to_moment(row["created"]),
        seen_at=to_moment(row["seen"]),
        tags=tuple(from_json(row["tags"])),
        user_metadata=from_json(row["user_metadata"]),
        sdk_version=row["sdk_version"],
        project_id=row["project_id"],
        display_name=row["display_name"],
        status=from_json(row["status"]),
        checkpoints_count=row["checkpoints_count"],
        checkpoints_bytes=row["checkpoints_bytes"],
    )


def _after(cursor: SessionSearchCursor | None) -> dict[str, Any]:
    if cursor is None:
        return {"created": 1 << 62, "id": ""}
    return {"created": to_micros(cursor.last_created_at), "id": cursor.last_session_id}


def _fits(session: SessionRow, request: SessionSearchRequest) -> bool:
    metadata = texts(session.user_metadata) or {}
    return (
        (request.project_ids is None or (session.project_id or DEFAULT_PROJECT) in request.project_ids)
        and all(metadata.get(key) == value for key, value in request.user_metadata.items())
        and _is_called(session, request)
        and (request.statuses is None or any(_is_in(session.status, query) for query in request.statuses))
    )


def _is_called(session: SessionRow, request: SessionSearchRequest) -> bool:
    """Return True if a session has the id, or all words of the display name, that a request asks for.

    A request that asks for neither fits every session.
    """
    asked = []
    if request.session_id is not None:
        asked.append(session.session_id == request.session_id)
    if request.display_name is not None:
        name = (session.display_name or "").casefold()
        asked.append(all(word in name for word in request.display_name.casefold().split()))
    return any(asked) if asked else True


def _is_in(status: Mapping[str, Any], query: SessionStatusQuery) -> bool:
    if status["type"] != query.type:
        return False
    reasons = getattr(query, "reasons", None)
    return reasons is None or status["reason"]["type"] in reasons
