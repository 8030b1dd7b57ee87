"""`Store`: the durable state of one directory.

Saving a checkpoint writes and flushes its files to a folder with a new random name, then commits the row.
Overwriting and deleting remove the row before the files. So a row always refers to a complete folder.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from attrs import asdict

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.local.engine import safetensors
from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.safetensors import Array
from tinker_sync.local.store import peft
from tinker_sync.local.store.database import (
    Database,
    StoreError,
    json_or_none,
    texts,
    to_json,
    to_micros,
    to_moment,
    translate_errors,
)
from tinker_sync.local.store.folders import Content, DirectoryLock, FolderStore, SizeAndSum, StoredFile
from tinker_sync.types.billing import CurrentCheckpointStorageUsageItem
from tinker_sync.types.checkpoint import Checkpoint
from tinker_sync.types.described import TrainingRun
from tinker_sync.types.search import (
    CheckpointSearchCursor,
    CheckpointSearchRequest,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSummary,
)

CheckpointKind = Literal["training", "sampler", "external"]
FOLDERS: Final[Mapping[CheckpointKind, str]] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
"""The folder of each kind in `tinker://` paths."""
USER: Final = "tml:organization_user:local"
"""The user to whom everything belongs."""
USER_NAME: Final = "local"
USER_EMAIL: Final = "local@localhost"
DEFAULT_PROJECT: Final = "default"
"""The project under which the server shows, lists and finds what is in no project."""

OPTIMIZER_FILE: Final = "optimizer.safetensors"
INFO_FILE: Final = "checkpoint.json"
_LONGEST_TTL_S: Final = 1e11
"""Three thousand years; a longer time to live means never."""
_GIGABYTE: Final = 10**9
_ACTIVE: Final = to_json({"type": "active"})
_ADAMW: Final = to_json({"type": "adamw"})

# Names from clients never become part of a path on the disk; the rules keep `tinker://` paths unambiguous.
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
_ID: Final = re.compile(r"[A-Za-z0-9._:@+-]{1,255}")

_SESSIONS: Final = """
SELECT sessions.*, count(checkpoints.number) AS checkpoints_count,
    coalesce(sum(checkpoints.size_bytes), 0) AS checkpoints_bytes
FROM sessions
LEFT JOIN runs ON runs.session_id = sessions.id
LEFT JOIN checkpoints ON checkpoints.run_id = runs.id
    AND (checkpoints.expires IS NULL OR checkpoints.expires > :now)
"""
_ALL_CHECKPOINTS: Final = """
SELECT checkpoints.*, runs.project_id, runs.base_model FROM checkpoints JOIN runs ON runs.id = run_id
"""
_CHECKPOINTS: Final = f"{_ALL_CHECKPOINTS} WHERE (expires IS NULL OR expires > :now)"
_ONE_CHECKPOINT: Final = f"{_CHECKPOINTS} AND run_id = :run AND kind = :kind AND name = :name"
_OF_PROJECT: Final = f"(:project IS NULL OR coalesce(runs.project_id, '{DEFAULT_PROJECT}') = :project)"
_STORAGE: Final = f"""
SELECT project_id, count(*) AS count, sum(size_bytes) AS size FROM ({_CHECKPOINTS} AND {_OF_PROJECT})
GROUP BY project_id ORDER BY project_id
"""  # noqa: S608  # nothing in it is from outside
_DELETE_UNUSED: Final = """
DELETE FROM runs WHERE id = :run AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE run_id = :run)
"""


class StoredSampler(NamedTuple):
    """The record of a sampler.

    Attributes:
        source: the save from which it samples, see `Store.save_id`; `unsaved:` and the id of the run for
            weights that no checkpoint contains; None for the base model itself.
    """

    sampler_id: str
    session_id: str
    base_model: str
    source: str | None


class StoredCheckpoint(NamedTuple):
    """A checkpoint with what the store alone knows of it.

    Attributes:
        described: the checkpoint as clients see it.
        save_id: its path and the number of its save, which a later save changes, with a "#" between them,
            which no path contains.
        info: what was saved as `info`.
        files: the files by their names in an archive.
    """

    described: Checkpoint
    save_id: str
    info: dict[str, Any]
    files: dict[str, StoredFile]


class Store:
    """Sessions, runs, samplers and checkpoints of one directory. Thread-safe.

    Writing calls return when their data is on the disk. Failures of the disk and of the database are
    `StoreError`s, and so are the kinds `not_found`, `exists` and `bad_name` for what a call names.

    Args:
        directory: the data directory, created if it is missing. One process at a time may use it.
        clock: the source of the present time.

    Raises:
        StoreError: of the kind `locked`, `unwritable`, `full`, `damaged`, or `too_new`.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Store(Path(folder.name) / "data") as store:
    ...     store.add_session("s-1", display_name="night")
    >>> with Store(Path(folder.name) / "data") as store:
    ...     store.session("s-1").display_name
    'night'
    >>> folder.cleanup()
    """

    def __init__(self, directory: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.directory = Path(directory)
        self._clock = clock
        with translate_errors(f"{directory} cannot be used"):
            try:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            except FileExistsError as problem:
                raise NotADirectoryError(problem.errno, "it is not a directory") from problem
        self._lock = DirectoryLock(self.directory)
        try:
            self._folders = FolderStore(self.directory)
            self._database = Database(self.directory / "state.sqlite")
            try:
                self._sweep_unknown()
            except BaseException:
                self._database.close()
                raise
        except BaseException:
            self._lock.release()
            raise

    def _sweep_unknown(self) -> None:
        """Remove the folders without a checkpoint, which a crash may have left."""
        with self._database.read("checkpoints could not be listed") as connection:
            known = {row["folder"] for row in connection.execute("SELECT folder FROM checkpoints")}
        with translate_errors(f"{self.directory} could not be swept"):
            self._folders.sweep(known)

    def close(self) -> None:
        """Write pending data if the disk allows it, and release the directory. Idempotent."""
        self._database.close()
        self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now(self) -> int:
        return int(self._clock.time() * 1_000_000)

    # ------------------------------------------------------------------------------------------ sessions

    def add_session(
        self,
        session_id: str,
        *,
        tags: Iterable[str] = (),
        user_metadata: Mapping[str, Any] | None = None,
        sdk_version: str | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> None:
        """Open a session."""
        now = self._now()
        with self._database.write(f"session {session_id} could not be opened") as connection:
            connection.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    _check_id(session_id, "a session"),
                    now,
                    now,
                    to_json(list(tags)),
                    json_or_none(user_metadata),
                    sdk_version,
                    project_id,
                    display_name,
                    _ACTIVE,
                ),
            )

    def session(self, session_id: str) -> SessionSummary:
        """Return a session."""
        with self._database.read("the session could not be read") as connection:
            _require(connection, "sessions", session_id)
            row = connection.execute(
                f"{_SESSIONS} WHERE sessions.id = :id GROUP BY sessions.id",
                {"id": session_id, "now": self._now()},
            ).fetchone()
        return _session(row)

    def finish_session(self, session_id: str, reason: str, detail: str | None = None) -> None:
        """Record that the client has finished a session. A session that has already ended keeps its status.

        Args:
            session_id: the session.
            reason: `success`, `errored` or `interrupted`.
            detail: the client's own text.
        """
        status = {"type": "client_finished", "reason": {"type": reason}, "detail": detail}
        with self._database.write(f"session {session_id} could not be ended") as connection:
            _require(connection, "sessions", session_id)
            connection.execute(
                "UPDATE sessions SET status = ?, seen = ? WHERE id = ? AND status = ?",
                (to_json(status), self._now(), session_id, _ACTIVE),
            )

    def set_session_project(self, session_id: str, project_id: str) -> None:
        """Move the session and its runs to a project."""
        with self._database.write(f"session {session_id} could not be moved") as connection:
            _require(connection, "sessions", session_id)
            connection.execute("UPDATE sessions SET project_id = ? WHERE id = ?", (project_id, session_id))
            connection.execute(
                "UPDATE runs SET project_id = ? WHERE session_id = ?", (project_id, session_id)
            )

    def list_sessions(self, limit: int, offset: int) -> tuple[list[str], int]:
        """Return a page of the ids of sessions, the newest first, and the number of all sessions."""
        with self._database.read("sessions could not be listed") as connection:
            rows = connection.execute(
                "SELECT id FROM sessions ORDER BY created DESC, id DESC LIMIT ? OFFSET ?", (limit, offset)
            ).fetchall()
            (total,) = connection.execute("SELECT count(*) FROM sessions").fetchone()
        return [row["id"] for row in rows], total

    def search_sessions(
        self, request: SessionSearchRequest
    ) -> tuple[list[SessionSummary], SessionSearchCursor | None]:
        """Return a page of the sessions that match a request, the newest first, and the next page's cursor.

        The cursor is None if this is the last page. This server has one user, so it ignores the owner in the
        request.
        """
        after: dict[str, Any] = {"created": 1 << 62, "id": ""}
        if request.cursor is not None:
            after["created"] = to_micros(request.cursor.last_created_at)
            after["id"] = request.cursor.last_session_id
        with self._database.read("sessions could not be searched") as connection:
            rows = connection.execute(
                f"{_SESSIONS} WHERE (sessions.created, sessions.id) < (:created, :id) GROUP BY sessions.id"
                " ORDER BY sessions.created DESC, sessions.id DESC",
                {"now": self._now(), **after},
            )
            # One session more than a page shows that there is a next page.
            found: list[SessionSummary] = []
            for row in rows:
                session = _session(row)
                if _session_fits(session, request):
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

    # ------------------------------------------------------------------------------------------ samplers

    def add_sampler(
        self, sampler_id: str, *, session_id: str, base_model: str, source: str | None = None
    ) -> None:
        """Add a sampler, see `StoredSampler`."""
        with self._database.write(f"sampler {sampler_id} could not be added") as connection:
            _require(connection, "sessions", session_id)
            connection.execute(
                "INSERT INTO samplers VALUES (?, ?, ?, ?, ?)",
                (_check_id(sampler_id, "a sampler"), session_id, base_model, source, self._now()),
            )

    def sampler(self, sampler_id: str) -> StoredSampler:
        """Return a sampler."""
        with self._database.read("the sampler could not be read") as connection:
            row = _require(connection, "samplers", sampler_id)
        return StoredSampler(row["id"], row["session_id"], row["base_model"], row["model_path"])

    # ------------------------------------------------------------------------------------------ runs

    def add_run(
        self,
        run_id: str,
        *,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: LoraSettings,
        user_metadata: Mapping[str, Any] | None = None,
        project_id: str | None = None,
    ) -> None:
        """Add a training run. It replaces a run of this id without checkpoints, as one left by a crash.

        Without a project, the run is in that of its session.
        """
        now = self._now()
        with self._database.write(f"training run {run_id} could not be added") as connection:
            session = _require(connection, "sessions", session_id)
            connection.execute(_DELETE_UNUSED, {"run": run_id})
            connection.execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                (
                    _check_id(run_id, "a training run"),
                    session_id,
                    model_seq_id,
                    base_model,
                    to_json(asdict(lora)),
                    _ADAMW,
                    json_or_none(user_metadata),
                    project_id or session["project_id"],
                    now,
                    now,
                ),
            )

    def run(self, run_id: str) -> TrainingRun:
        """Return a training run."""
        with self._database.read("the training run could not be read") as connection:
            return self._run(connection, _require(connection, "runs", run_id))

    def run_session(self, run_id: str) -> str:
        """Return the id of the session of a training run."""
        with self._database.read("the training run could not be read") as connection:
            session_id: str = _require(connection, "runs", run_id)["session_id"]
        return session_id

    def set_run_corrupted(self, run_id: str) -> None:
        """Mark a run as corrupted: it cannot be continued."""
        with self._database.write(f"training run {run_id} could not be marked") as connection:
            _require(connection, "runs", run_id)
            connection.execute("UPDATE runs SET corrupted = 1 WHERE id = ?", (run_id,))

    def list_runs(
        self, limit: int, offset: int, project_id: str | None = None
    ) -> tuple[list[TrainingRun], int]:
        """Return a page of a project's training runs (None: all), the newest first, and their number."""
        values = {"project": project_id, "limit": limit, "offset": offset}
        with self._database.read("training runs could not be listed") as connection:
            rows = connection.execute(
                f"SELECT * FROM runs WHERE {_OF_PROJECT} ORDER BY created DESC, id DESC"  # noqa: S608  # ours
                " LIMIT :limit OFFSET :offset",
                values,
            ).fetchall()
            total = connection.execute(f"SELECT count(*) FROM runs WHERE {_OF_PROJECT}", values)  # noqa: S608  # ours
            return [self._run(connection, row) for row in rows], total.fetchone()[0]

    def _run(self, connection: sqlite3.Connection, row: sqlite3.Row) -> TrainingRun:
        return TrainingRun(
            training_run_id=row["id"],
            base_model=row["base_model"],
            model_owner=USER,
            is_lora=True,
            corrupted=bool(row["corrupted"]),
            lora_rank=json.loads(row["lora"])["rank"],
            last_request_time=to_moment(row["seen"]),
            last_checkpoint=self._newest(connection, row["id"], "training"),
            last_sampler_checkpoint=self._newest(connection, row["id"], "sampler"),
            user_metadata=texts(row["user_metadata"]),
        )

    def _newest(self, connection: sqlite3.Connection, run_id: str, kind: CheckpointKind) -> Checkpoint | None:
        row = connection.execute(
            f"{_CHECKPOINTS} AND run_id = :run AND kind = :kind ORDER BY number DESC LIMIT 1",
            {"now": self._now(), "run": run_id, "kind": kind},
        ).fetchone()
        return None if row is None else _checkpoint(row)

    # ------------------------------------------------------------------------------------------ saving

    def save_checkpoint(
        self,
        run_id: str,
        kind: CheckpointKind,
        name: str,
        arrays: Mapping[str, Array],
        info: Mapping[str, Any],
        *,
        ttl_s: float | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Save a checkpoint; it is on the disk when this method returns.

        Args:
            run_id: the run that owns the checkpoint.
            kind: `training`, `sampler` or `external`. A name is unique within a kind and run.
            name: 1 to 255 letters, digits and . _ -
            arrays: the arrays of `LoraParams.named()`, `<module>.lora_A` and `<module>.lora_B`; `training`
                takes others too, such as the optimizer's. They must not change during the call.
            info: further data, as JSON types.
            ttl_s: seconds until the checkpoint expires, and is then treated as deleted; None means never.
            overwrite: replace a checkpoint of the same kind and name, which stays until the new one is
                complete.
            user_metadata: the client's own metadata.

        Raises:
            StoreError: of the kind `exists`, `bad_name`, `not_found` for the run, `full` or `unwritable`.
                Stored checkpoints stay unchanged.
            ValueError: the arrays are not an adapter, or have a type that the file format lacks.

        >>> import numpy as np
        >>> from tinker_sync.local.engine.lora import LoraSettings
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> store = Store(Path(folder.name))
        >>> store.add_session("s-1")
        >>> lora = LoraSettings(rank=1)
        >>> store.add_run("r-1", session_id="s-1", model_seq_id=0, base_model="org/base", lora=lora)
        >>> arrays = {"lm_head.lora_A": np.ones((1, 2)), "lm_head.lora_B": np.ones((3, 1))}
        >>> arrays["steps"] = np.array(7)
        >>> store.save_checkpoint("r-1", "training", "first", arrays, {"note": "mine"}).tinker_path
        'tinker://r-1/weights/first'
        >>> info, loaded = store.load_checkpoint("r-1", "training", "first")
        >>> info, int(loaded["steps"]), loaded["lm_head.lora_A"].tolist()
        ({'note': 'mine'}, 7, [[1.0, 1.0]])
        >>> store.close(); folder.cleanup()
        """
        what = f"{name!s:.255} could not be saved"
        key = {"run": run_id, "kind": _check_kind(kind), "name": _check_name(name)}
        text = to_json(dict(info))
        with self._database.read(what) as connection:
            base_model = _require(connection, "runs", run_id)["base_model"]
            if not overwrite:
                self._refuse_taken(connection, key)
        contents = _contents(kind, arrays, base_model, {**key, "base_model": base_model, "info": dict(info)})
        folder, files = self._folders.put(contents, what)
        try:
            with self._database.write(what) as connection:
                if not overwrite:  # another thread may have saved one meanwhile
                    self._refuse_taken(connection, key)
                same = "FROM checkpoints WHERE run_id = :run AND kind = :kind AND name = :name"
                replaced = connection.execute(f"SELECT folder {same}", key).fetchall()
                connection.execute(f"DELETE {same}", key)
                saved = self._insert(connection, key, folder, files, text, user_metadata, ttl_s)
        except BaseException as problem:
            # After a disk error it is unknown if the row exists. The next start keeps or removes the folder.
            if not (isinstance(problem, StoreError) and problem.kind == "unwritable"):
                self._folders.discard(folder)
            raise
        for row in replaced:
            self._folders.discard(row["folder"])
        return saved

    def _refuse_taken(self, connection: sqlite3.Connection, key: Mapping[str, str]) -> None:
        if connection.execute(_ONE_CHECKPOINT, {**key, "now": self._now()}).fetchone() is not None:
            raise StoreError(
                "exists",
                f"run {key['run']} already has a {key['kind']} checkpoint {key['name']}; "
                "replace it with overwrite=True, or give another name",
            )

    def _insert(
        self,
        connection: sqlite3.Connection,
        key: Mapping[str, str],
        folder: str,
        files: Mapping[str, SizeAndSum],
        info: str,
        user_metadata: Mapping[str, Any] | None,
        ttl_s: float | None,
    ) -> Checkpoint:
        now, metadata = self._now(), json_or_none(user_metadata)
        size = sum(size_bytes for size_bytes, _ in files.values())
        _require(connection, "runs", key["run"])
        number = connection.execute(
            "INSERT INTO checkpoints (run_id, kind, name, created, expires, user_metadata, info, folder,"
            " files, size_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*key.values(), now, self._expiry(ttl_s), metadata, info, folder, to_json(files), size),
        ).lastrowid
        connection.execute("UPDATE runs SET seen = ? WHERE id = ?", (now, key["run"]))
        # _CHECKPOINTS would miss a checkpoint that has already expired.
        return _checkpoint(connection.execute(f"{_ALL_CHECKPOINTS} WHERE number = ?", (number,)).fetchone())

    # ------------------------------------------------------------------------------------------ checkpoints

    def load_checkpoint(
        self, run_id: str, kind: CheckpointKind, name: str
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return the `info` and the arrays of a checkpoint, exactly as they were saved.

        Raises:
            StoreError: `not_found` if it does not exist or has expired; `damaged` if its files are gone,
                unreadable or changed.
        """
        missing = ""
        while True:
            row = self._row(run_id, kind, name)
            if row["folder"] == missing:
                raise StoreError("damaged", f"the files of {row['kind']} checkpoint {name} are gone")
            try:
                return json.loads(row["info"]), self._read_arrays(row)
            except FileNotFoundError:  # unless another thread has overwritten the checkpoint meanwhile
                missing = row["folder"]
            except ValueError as problem:
                raise StoreError("damaged", f"{name}: {problem}") from problem

    def _read_arrays(self, row: sqlite3.Row) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for name, file in self._files(row).items():
            if name in (peft.ADAPTER_FILE, OPTIMIZER_FILE):
                read = safetensors.read(self._folders.take(file))
                arrays |= peft.from_file(read) if name == peft.ADAPTER_FILE else read
        return arrays

    def checkpoint(self, run_id: str, kind: CheckpointKind, name: str) -> StoredCheckpoint:
        """Return a checkpoint, without reading its arrays.

        Its files never change. Deleting or overwriting the checkpoint removes them.
        """
        row = self._row(run_id, kind, name)
        save_id = f"{_path(row)}#{row['number']}"
        return StoredCheckpoint(_checkpoint(row), save_id, json.loads(row["info"]), self._files(row))

    def _files(self, row: sqlite3.Row) -> dict[str, StoredFile]:
        return {
            name: StoredFile(self._folders.path(row["folder"], name), *size_and_sum)
            for name, size_and_sum in json.loads(row["files"]).items()
        }

    def _row(self, run_id: str, kind: CheckpointKind, name: str) -> sqlite3.Row:
        with self._database.read("the checkpoint could not be read") as connection:
            return self._raw(connection, run_id, kind, name)

    def _raw(self, connection: sqlite3.Connection, run_id: str, kind: str, name: str) -> sqlite3.Row:
        row: sqlite3.Row | None = connection.execute(
            _ONE_CHECKPOINT, {"run": run_id, "kind": kind, "name": name, "now": self._now()}
        ).fetchone()
        if row is None:
            raise StoreError("not_found", f"run {run_id!s:.255} has no {kind!s:.20} checkpoint {name!s:.255}")
        return row

    def list_checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Return all checkpoints of a run, the newest first."""
        with self._database.read("checkpoints could not be listed") as connection:
            _require(connection, "runs", run_id)
            rows = connection.execute(
                f"{_CHECKPOINTS} AND run_id = :run ORDER BY number DESC", {"now": self._now(), "run": run_id}
            )
            return [_checkpoint(row) for row in rows]

    def list_user_checkpoints(self, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        """Return a page of all checkpoints, the newest first, and their total number."""
        values = {"now": self._now(), "limit": limit, "offset": offset}
        with self._database.read("checkpoints could not be listed") as connection:
            rows = connection.execute(
                f"{_CHECKPOINTS} ORDER BY number DESC LIMIT :limit OFFSET :offset", values
            )
            found = [_checkpoint(row) for row in rows]
            (total,) = connection.execute(f"SELECT count(*) FROM ({_CHECKPOINTS})", values).fetchone()  # noqa: S608  # ours
        return found, total

    def search_checkpoints(
        self, request: CheckpointSearchRequest
    ) -> tuple[list[Checkpoint], CheckpointSearchCursor | None]:
        """Return a page of the checkpoints that match a request, the newest first, and the next cursor.

        The cursor is None if this is the last page. If the checkpoint in the cursor of the request no longer
        exists, the page begins with those that are older than it was.
        """
        with self._database.read("checkpoints could not be searched") as connection:
            rows = connection.execute(f"{_CHECKPOINTS} ORDER BY number DESC", {"now": self._now()}).fetchall()
        if request.cursor is not None:
            paths = [_path(row) for row in rows]
            if request.cursor.last_checkpoint_uuid in paths:
                rows = rows[paths.index(request.cursor.last_checkpoint_uuid) + 1 :]
            else:
                rows = [row for row in rows if row["created"] < to_micros(request.cursor.last_created_at)]
        found = [_checkpoint(row) for row in rows if _checkpoint_fits(row, request)]
        page = found[: request.limit]
        if len(found) == len(page):
            return page, None
        last = page[-1]
        return page, CheckpointSearchCursor(last_created_at=last.time, last_checkpoint_uuid=last.tinker_path)

    def delete_checkpoint(self, run_id: str, kind: CheckpointKind, name: str) -> None:
        """Delete a checkpoint with its files."""
        with self._database.write(f"{name!s:.255} could not be deleted") as connection:
            row = self._raw(connection, run_id, kind, name)
            connection.execute("DELETE FROM checkpoints WHERE number = ?", (row["number"],))
        self._folders.discard(row["folder"])

    def set_published(self, run_id: str, kind: CheckpointKind, name: str, published: bool) -> None:
        """Make a checkpoint public or private."""
        with self._changing(run_id, kind, name) as (connection, number):
            connection.execute(
                "UPDATE checkpoints SET published = ? WHERE number = ?", (int(published), number)
            )

    def set_ttl(self, run_id: str, kind: CheckpointKind, name: str, ttl_s: float | None) -> None:
        """Let a checkpoint expire `ttl_s` seconds from now; None means never."""
        with self._changing(run_id, kind, name) as (connection, number):
            connection.execute(
                "UPDATE checkpoints SET expires = ? WHERE number = ?", (self._expiry(ttl_s), number)
            )

    @contextmanager
    def _changing(self, run_id: str, kind: str, name: str) -> Iterator[tuple[sqlite3.Connection, int]]:
        with self._database.write(f"{name!s:.255} could not be changed") as connection:
            yield connection, self._raw(connection, run_id, kind, name)["number"]

    def _expiry(self, ttl_s: float | None) -> int | None:
        # SQLite's integers cannot hold a larger value, so it means never.
        return None if ttl_s is None or ttl_s > _LONGEST_TTL_S else self._now() + int(ttl_s * 1_000_000)

    def sweep_expired(self) -> int:
        """Delete expired checkpoints and write pending data. The server calls this regularly.

        Returns:
            The number of deleted checkpoints.
        """
        now = (self._now(),)
        with self._database.write("expired checkpoints could not be deleted") as connection:
            rows = connection.execute("SELECT folder FROM checkpoints WHERE expires <= ?", now).fetchall()
            connection.execute("DELETE FROM checkpoints WHERE expires <= ?", now)
        for row in rows:
            self._folders.discard(row["folder"])
        return len(rows)

    def prune(self, most_bytes: int) -> int:
        """Delete the oldest checkpoints until the others have at most `most_bytes` bytes together.

        Returns:
            The number of deleted checkpoints.
        """
        doomed, left = [], most_bytes
        with self._database.write("old checkpoints could not be deleted") as connection:
            for row in connection.execute("SELECT * FROM checkpoints ORDER BY number DESC").fetchall():
                left -= row["size_bytes"]
                if left < 0:
                    doomed.append(row["folder"])
                    connection.execute("DELETE FROM checkpoints WHERE number = ?", (row["number"],))
        for folder in doomed:
            self._folders.discard(folder)
        return len(doomed)

    # ---------------------------------------------------------------------------------------- storage

    def storage_now(self, project_id: str | None = None) -> list[CurrentCheckpointStorageUsageItem]:
        """Return the present storage of each project, or only of `project_id`."""
        with self._database.read("storage could not be summed up") as connection:
            rows = connection.execute(_STORAGE, {"now": self._now(), "project": project_id})
            return [
                CurrentCheckpointStorageUsageItem(
                    project_id=row["project_id"],
                    org_user_urn=USER,
                    user_email=USER_EMAIL,
                    user_name=USER_NAME,
                    checkpoint_count=row["count"],
                    size_bytes=row["size"],
                    size_gigabytes=row["size"] / _GIGABYTE,
                    estimated_monthly_cost_usd=0.0,
                )
                for row in rows
            ]


# ------------------------------------------------------------------------------------------ names


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or not name.strip("."):
        raise StoreError(
            "bad_name", f"{name[:80]!r} cannot name a checkpoint: use 1 to 255 letters, digits and . _ -"
        )
    return name


def _check_id(value: str, what: str) -> str:
    if not _ID.fullmatch(value) or not value.strip("."):
        raise StoreError("bad_name", f"{value[:80]!r} cannot be the id of {what}")
    return value


def _check_kind(kind: str) -> str:
    if kind not in get_args(CheckpointKind):
        raise StoreError("bad_name", f"{str(kind)[:80]!r} is not a kind of checkpoint")
    return kind


def _require(
    connection: sqlite3.Connection, table: Literal["sessions", "runs", "samplers"], one: str
) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute(f"SELECT * FROM {table} WHERE id = ?", (one,)).fetchone()  # noqa: S608  # one of three
    if row is None:
        noun = "training run" if table == "runs" else table[:-1]
        raise StoreError("not_found", f"there is no {noun} {one[:255]}")
    return row


# ------------------------------------------------------------------------------------------ rows


def _session(row: sqlite3.Row) -> SessionSummary:
    return SessionSummary(
        session_id=row["id"],
        created_at=to_moment(row["created"]),
        owner=USER,
        project_id=row["project_id"] or DEFAULT_PROJECT,
        status=json.loads(row["status"]),
        checkpoints_count=row["checkpoints_count"],
        display_name=row["display_name"],
        user_metadata=texts(row["user_metadata"]),
        checkpoint_storage_bytes=row["checkpoints_bytes"],
    )


def _session_fits(session: SessionSummary, request: SessionSearchRequest) -> bool:
    metadata = session.user_metadata or {}
    return (
        (request.project_ids is None or session.project_id in request.project_ids)
        and all(metadata.get(key) == value for key, value in request.user_metadata.items())
        and _is_called(session, request)
        and (request.statuses is None or any(_is_in(session.status, query) for query in request.statuses))
    )


def _is_called(session: SessionSummary, request: SessionSearchRequest) -> bool:
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


def _is_in(status: Any, query: Any) -> bool:
    reasons = getattr(query, "reasons", None)
    return bool(status.type == query.type and (reasons is None or status.reason.type in reasons))


def _path(row: sqlite3.Row) -> str:
    return f"tinker://{row['run_id']}/{FOLDERS[row['kind']]}/{row['name']}"


def _checkpoint(row: sqlite3.Row) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=f"{FOLDERS[row['kind']]}/{row['name']}",
        checkpoint_type=row["kind"],
        time=to_moment(row["created"]),
        tinker_path=_path(row),
        size_bytes=row["size_bytes"],
        public=bool(row["published"]),
        user_metadata=texts(row["user_metadata"]),
        expires_at=None if row["expires"] is None else to_moment(row["expires"]),
        base_model=row["base_model"],
    )


def _checkpoint_fits(row: sqlite3.Row, request: CheckpointSearchRequest) -> bool:
    metadata = texts(row["user_metadata"]) or {}
    return (
        (request.project_ids is None or (row["project_id"] or DEFAULT_PROJECT) in request.project_ids)
        and all(metadata.get(name) == value for name, value in request.user_metadata.items())
        and (request.checkpoint_type is None or row["kind"] == request.checkpoint_type)
        and (request.base_models is None or row["base_model"] in request.base_models)
    )


def _contents(
    kind: CheckpointKind, arrays: Mapping[str, Array], base_model: str, about: Mapping[str, Any]
) -> dict[str, Content]:
    """Return the files of a new checkpoint, by name."""
    adapter = {key: array for key, array in arrays.items() if peft.is_adapter(key)}
    others = {key: array for key, array in arrays.items() if key not in adapter}
    if others and kind != "training":
        raise ValueError(f"a {kind} checkpoint cannot hold {', '.join(sorted(others))}")
    config = peft.config(adapter, base_model)
    contents: dict[str, Content] = {
        peft.ADAPTER_FILE: partial(safetensors.pieces, peft.to_file(adapter), {"format": "pt"}),
        peft.CONFIG_FILE: lambda: [config],
    }
    if kind == "training":
        described = json.dumps(about, indent=2).encode() + b"\n"
        contents[OPTIMIZER_FILE] = partial(safetensors.pieces, others)
        contents[INFO_FILE] = lambda: [described]
    return contents
