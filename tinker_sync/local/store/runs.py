"""The table of training runs. A base class of `Store`."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any, Final

from attrs import asdict

from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.store.checkpoints import Checkpoints
from tinker_sync.local.store.database import from_json, json_or_none, to_json, to_moment
from tinker_sync.local.store.names import check_id
from tinker_sync.local.store.rows import DEFAULT_PROJECT, RunRow
from tinker_sync.local.store.tables import require

_ADAMW: Final[Mapping[str, Any]] = {"type": "adamw"}
_DELETE_UNUSED: Final = """
DELETE FROM runs WHERE id = :run AND seen = created
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE run_id = :run)
"""


class Runs(Checkpoints):
    """The methods of `Store` for training runs."""

    def add_run(
        self,
        run_id: str,
        *,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: LoraSettings,
        optimizer_config: Mapping[str, Any] = _ADAMW,
        user_metadata: Mapping[str, Any] | None = None,
        project_id: str | None = None,
    ) -> RunRow:
        """Add a training run. It replaces a run of this id that was never used, as one left by a crash.

        Raises:
            StoreError: `exists`, `bad_name`, `not_found` for the session, or a failure of the disk.
        """
        now = self._now()
        with self._write(f"training run {run_id} could not be added") as connection:
            require(connection, "sessions", session_id)
            connection.execute(_DELETE_UNUSED, {"run": run_id})
            connection.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                (
                    check_id(run_id, "a training run"),
                    session_id,
                    model_seq_id,
                    base_model,
                    to_json(asdict(lora)),
                    to_json(dict(optimizer_config)),
                    json_or_none(user_metadata),
                    project_id,
                    now,
                    now,
                ),
            )
        return self.run(run_id)

    def run(self, run_id: str) -> RunRow:
        """Return a training run.

        Raises:
            StoreError: of the kind `not_found`.
        """
        self._flush_if_possible()
        with self._database.read("the training run could not be read") as connection:
            return self._run(connection, require(connection, "runs", run_id))

    def touch_run(self, run_id: str) -> None:
        """Record that the run is in use now. This method does not touch the disk and ignores unknown runs."""
        self._buffer.touch("runs", run_id, self._now())

    def set_run_corrupted(self, run_id: str) -> None:
        """Mark a run as corrupted: it cannot be continued.

        Raises:
            StoreError: of the kind `not_found`, or a failure of the disk.
        """
        with self._write(f"training run {run_id} could not be marked") as connection:
            require(connection, "runs", run_id)
            connection.execute("UPDATE runs SET corrupted = 1 WHERE id = ?", (run_id,))

    def list_runs(self, limit: int, offset: int, project_id: str | None = None) -> tuple[list[RunRow], int]:
        """Return a page of a project's training runs, the newest first, and their total number.

        Args:
            limit: the size of the page.
            offset: the number of runs to skip.
            project_id: the project to list; None means all.
        """
        self._flush_if_possible()
        where = f"WHERE :project IS NULL OR coalesce(project_id, '{DEFAULT_PROJECT}') = :project"
        values = {"project": project_id, "limit": limit, "offset": offset}
        with self._database.read("training runs could not be listed") as connection:
            rows = connection.execute(
                f"SELECT * FROM runs {where} ORDER BY created DESC, id DESC LIMIT :limit OFFSET :offset",  # noqa: S608  # ours
                values,
            ).fetchall()
            (total,) = connection.execute(f"SELECT count(*) FROM runs {where}", values).fetchone()  # noqa: S608  # ours
            return [self._run(connection, row) for row in rows], total

    def _run(self, connection: sqlite3.Connection, row: sqlite3.Row) -> RunRow:
        return RunRow(
            run_id=row["id"],
            session_id=row["session_id"],
            model_seq_id=row["model_seq_id"],
            base_model=row["base_model"],
            lora=LoraSettings(**from_json(row["lora"])),
            optimizer_config=from_json(row["optimizer_config"]),
            user_metadata=from_json(row["user_metadata"]),
            project_id=row["project_id"],
            created_at=to_moment(row["created"]),
            seen_at=to_moment(row["seen"]),
            corrupted=bool(row["corrupted"]),
            last_checkpoint=self._newest(connection, row["id"], "training"),
            last_sampler_checkpoint=self._newest(connection, row["id"], "sampler"),
        )
