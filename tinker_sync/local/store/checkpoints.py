"""The table of checkpoints, with their files. A base class of `Store`.

Saving writes and flushes the files to a folder with a new random name, then commits the row. Overwriting and
deleting remove the row before the files. So a row always refers to a complete folder.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar

from tinker_sync.local.store import peft, safetensors
from tinker_sync.local.store.buffer import PendingWrites, UsageKey, hour_of
from tinker_sync.local.store.database import from_json, json_or_none, moment_or_none, to_json, to_moment
from tinker_sync.local.store.errors import StoreError
from tinker_sync.local.store.folders import Content, FileFact, FolderStore, StoredFile
from tinker_sync.local.store.names import check_kind, check_name
from tinker_sync.local.store.rows import DEFAULT_PROJECT, CheckpointKind, CheckpointRow, StorageRow
from tinker_sync.local.store.safetensors import Array
from tinker_sync.local.store.tables import Tables, require

OPTIMIZER_FILE: Final = "optimizer.safetensors"
INFO_FILE: Final = "checkpoint.json"
_LONGEST_TTL_S: Final = 1e11
"""Three thousand years; a longer time to live means never."""

T = TypeVar("T")
Facts: TypeAlias = Mapping[str, FileFact]

_SELECT_ALL: Final = """
SELECT checkpoints.*, runs.project_id, runs.base_model FROM checkpoints JOIN runs ON runs.id = run_id
"""
_SELECT: Final = f"{_SELECT_ALL} WHERE (expires IS NULL OR expires > :now)"
_OF_PROJECT: Final = (
    f"{_SELECT} AND (:project IS NULL OR coalesce(runs.project_id, '{DEFAULT_PROJECT}') = :project)"
)
_STORAGE: Final = f"""
SELECT project_id, count(*) AS count, sum(size_bytes) AS size FROM ({_OF_PROJECT})
GROUP BY project_id ORDER BY project_id
"""  # noqa: S608  # nothing in it is from outside
_ONE: Final = f"{_SELECT} AND run_id = :run AND kind = :kind AND name = :name"


class Checkpoints(Tables):
    """The methods of `Store` for checkpoints.

    A name is unique within a kind and run. Expired checkpoints are treated as deleted.
    """

    _folders: FolderStore

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
    ) -> CheckpointRow:
        """Save a checkpoint; it is on the disk when this method returns.

        Args:
            run_id: the run that owns the checkpoint.
            kind: `training`, `sampler` or `external`.
            name: 1 to 255 letters, digits and . _ -
            arrays: the arrays of `LoraParams.named()`, `<module>.lora_A` and `<module>.lora_B`; `training`
                takes others too, such as the optimizer's. They must not change during the call.
            info: further data, as JSON types.
            ttl_s: seconds until the checkpoint expires; None means never.
            overwrite: replace a checkpoint of the same kind and name, which stays until the new one is
                complete.
            user_metadata: the client's own metadata.

        Raises:
            StoreError: of the kind `exists`, `bad_name`, `not_found` for the run, `full` or `unwritable`.
                Stored checkpoints stay unchanged.
            ValueError: the arrays are not an adapter, or have a type that the file format lacks.

        >>> import numpy as np
        >>> from tinker_sync.local.engine.lora import LoraSettings
        >>> from tinker_sync.local.store import Store
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> store = Store(Path(folder.name))
        >>> session = store.add_session("s-1")
        >>> lora = LoraSettings(rank=1)
        >>> run = store.add_run("r-1", session_id="s-1", model_seq_id=0, base_model="org/base", lora=lora)
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
        key = {"run": run_id, "kind": check_kind(kind), "name": check_name(name)}
        text = to_json(dict(info))
        with self._database.read(what) as connection:
            base_model = require(connection, "runs", run_id)["base_model"]
            if not overwrite:
                self._refuse_taken(connection, key)
        contents = _contents(kind, arrays, base_model, {**key, "base_model": base_model, "info": dict(info)})
        folder, facts = self._folders.put(contents, what)
        try:
            with self._write(what) as connection:
                replaced = self._place(connection, key, overwrite)
                saved = self._insert(connection, key, folder, facts, text, user_metadata, ttl_s)
        except BaseException as problem:
            # After a disk error it is unknown if the row exists. The next start keeps or removes the folder.
            if not (isinstance(problem, StoreError) and problem.kind == "unwritable"):
                self._folders.discard(folder)
            raise
        if replaced is not None:
            self._folders.discard(replaced)
        return saved

    def load_checkpoint(
        self, run_id: str, kind: CheckpointKind, name: str
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return the `info` and the arrays of a checkpoint, exactly as they were saved.

        Raises:
            StoreError: `not_found` if it does not exist or has expired; `damaged` if its files are gone,
                unreadable or changed.
        """

        def take(row: sqlite3.Row, facts: Facts) -> dict[str, Array]:
            arrays: dict[str, Array] = {}
            for file in (peft.ADAPTER_FILE, OPTIMIZER_FILE):
                if file not in facts:
                    continue
                read = safetensors.read(self._folders.take(row["folder"], file, facts[file]))
                arrays |= peft.from_file(read) if file == peft.ADAPTER_FILE else read
            return arrays

        row, arrays = self._reading(run_id, kind, name, take)
        return from_json(row["info"]), arrays

    def checkpoint(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRow:
        """Return the record of a checkpoint.

        Raises:
            StoreError: of the kind `not_found`.
        """
        return _checkpoint(self._row(run_id, kind, name))

    def checkpoint_info(self, run_id: str, kind: CheckpointKind, name: str) -> dict[str, Any]:
        """Return the `info` of a checkpoint, without reading its arrays.

        Raises:
            StoreError: of the kind `not_found`.
        """
        info: dict[str, Any] = from_json(self._row(run_id, kind, name)["info"])
        return info

    def checkpoint_files(self, run_id: str, kind: CheckpointKind, name: str) -> dict[str, StoredFile]:
        """Return the files of a checkpoint, by their names in an archive.

        The files never change. Deleting or overwriting the checkpoint removes them; a file that is open then
        stays readable.

        Raises:
            StoreError: of the kind `not_found`.
        """
        row = self._row(run_id, kind, name)
        return {
            name: StoredFile(self._folders.path(row["folder"], name), fact.size_bytes, fact.sha256)
            for name, fact in _facts(row).items()
        }

    def list_checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """Return all checkpoints of a run, the newest first.

        Raises:
            StoreError: of the kind `not_found` for the run.
        """
        with self._database.read("checkpoints could not be listed") as connection:
            require(connection, "runs", run_id)
            rows = connection.execute(
                f"{_SELECT} AND run_id = :run ORDER BY number DESC", {"now": self._now(), "run": run_id}
            )
            return [_checkpoint(row) for row in rows]

    def list_user_checkpoints(
        self, limit: int, offset: int, project_id: str | None = None
    ) -> tuple[list[CheckpointRow], int]:
        """Return a page of a project's checkpoints (None: all), the newest first, and their total number."""
        values = {"now": self._now(), "project": project_id, "limit": limit, "offset": offset}
        with self._database.read("checkpoints could not be listed") as connection:
            rows = connection.execute(
                f"{_OF_PROJECT} ORDER BY number DESC LIMIT :limit OFFSET :offset", values
            )
            found = [_checkpoint(row) for row in rows]
            (total,) = connection.execute(f"SELECT count(*) FROM ({_OF_PROJECT})", values).fetchone()  # noqa: S608  # ours
        return found, total

    def delete_checkpoint(self, run_id: str, kind: CheckpointKind, name: str) -> None:
        """Delete a checkpoint with its files.

        Raises:
            StoreError: of the kind `not_found`, or a failure of the disk.
        """
        with self._write(f"{name!s:.255} could not be deleted") as connection:
            row = self._raw(connection, {"run": run_id, "kind": kind, "name": name})
            self._drop(connection, row)
        self._folders.discard(row["folder"])

    def set_published(self, run_id: str, kind: CheckpointKind, name: str, published: bool) -> None:
        """Make a checkpoint public or private.

        Raises:
            StoreError: of the kind `not_found`, or a failure of the disk.
        """
        self._change(run_id, kind, name, "published", int(published))

    def set_ttl(self, run_id: str, kind: CheckpointKind, name: str, ttl_s: float | None) -> None:
        """Let a checkpoint expire `ttl_s` seconds from now; None means never.

        Raises:
            StoreError: of the kind `not_found`, or a failure of the disk.
        """
        self._change(run_id, kind, name, "expires", self._expiry(ttl_s))

    def sweep_expired(self) -> int:
        """Delete expired checkpoints and write pending data. The server calls this regularly.

        Returns:
            The number of deleted checkpoints.

        Raises:
            StoreError: a failure of the disk.
        """
        with self._write("expired checkpoints could not be deleted") as connection:
            rows = connection.execute(
                "SELECT * FROM checkpoints WHERE expires <= ?", (self._now(),)
            ).fetchall()
            for row in rows:
                self._drop(connection, row)
        for row in rows:
            self._folders.discard(row["folder"])
        return len(rows)

    def prune(self, most_bytes: int) -> int:
        """Delete the oldest checkpoints until the others have at most `most_bytes` bytes together.

        Returns:
            The number of deleted checkpoints.

        Raises:
            StoreError: a failure of the disk.
        """
        doomed, left = [], most_bytes
        with self._write("old checkpoints could not be deleted") as connection:
            for row in connection.execute("SELECT * FROM checkpoints ORDER BY number DESC").fetchall():
                left -= row["size_bytes"]
                if left < 0:
                    doomed.append(row)
                    self._drop(connection, row)
        for row in doomed:
            self._folders.discard(row["folder"])
        return len(doomed)

    def storage_now(self, project_id: str | None = None) -> list[StorageRow]:
        """Return the present storage of each project, or only of `project_id`."""
        with self._database.read("storage could not be summed up") as connection:
            rows = connection.execute(_STORAGE, {"now": self._now(), "project": project_id})
            return [
                StorageRow(
                    project_id=row["project_id"], checkpoint_count=row["count"], size_bytes=row["size"]
                )
                for row in rows
            ]

    def _row(self, run_id: str, kind: CheckpointKind, name: str) -> sqlite3.Row:
        with self._database.read("the checkpoint could not be read") as connection:
            return self._raw(connection, {"run": run_id, "kind": kind, "name": name})

    # --------------------------------------------------------------------------------- in transactions

    def _raw(self, connection: sqlite3.Connection, key: Mapping[str, str]) -> sqlite3.Row:
        row: sqlite3.Row | None = connection.execute(_ONE, {**key, "now": self._now()}).fetchone()
        if row is None:
            raise StoreError(
                "not_found",
                f"run {key['run']!s:.255} has no {key['kind']!s:.20} checkpoint {key['name']!s:.255}",
            )
        return row

    def _newest(
        self, connection: sqlite3.Connection, run_id: str, kind: CheckpointKind
    ) -> CheckpointRow | None:
        row = connection.execute(
            f"{_SELECT} AND run_id = :run AND kind = :kind ORDER BY number DESC LIMIT 1",
            {"now": self._now(), "run": run_id, "kind": kind},
        ).fetchone()
        return None if row is None else _checkpoint(row)

    def _refuse_taken(self, connection: sqlite3.Connection, key: Mapping[str, str]) -> None:
        if connection.execute(_ONE, {**key, "now": self._now()}).fetchone() is not None:
            raise StoreError(
                "exists",
                f"run {key['run']} already has a {key['kind']} checkpoint {key['name']}; "
                "replace it with overwrite=True, or give another name",
            )

    def _place(self, connection: sqlite3.Connection, key: Mapping[str, str], overwrite: bool) -> str | None:
        """Delete the row that a new checkpoint replaces. Return its folder, or None if there is no row.

        Raises:
            StoreError: of the kind `exists`, for a row that has not expired if `overwrite` is not set.
        """
        if not overwrite:
            self._refuse_taken(connection, key)
        row = connection.execute(
            "SELECT * FROM checkpoints WHERE run_id = :run AND kind = :kind AND name = :name", key
        ).fetchone()
        if row is None:
            return None
        self._drop(connection, row)
        folder: str = row["folder"]
        return folder

    def _insert(
        self,
        connection: sqlite3.Connection,
        key: Mapping[str, str],
        folder: str,
        facts: Facts,
        info: str,
        user_metadata: Mapping[str, Any] | None,
        ttl_s: float | None,
    ) -> CheckpointRow:
        now, metadata = self._now(), json_or_none(user_metadata)
        size = sum(fact.size_bytes for fact in facts.values())
        files = to_json({name: [fact.size_bytes, fact.sha256] for name, fact in facts.items()})
        run = require(connection, "runs", key["run"])
        number = connection.execute(
            "INSERT INTO checkpoints (run_id, kind, name, created, expires, user_metadata, info, folder,"
            " files, size_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*key.values(), now, self._expiry(ttl_s), metadata, info, folder, files, size),
        ).lastrowid
        connection.execute(
            "INSERT INTO stored VALUES (?, ?, ?, ?, NULL)", (number, run["project_id"], size, now)
        )
        usage = UsageKey(hour_of(now), run["session_id"], key["run"], run["base_model"], "checkpoint")
        PendingWrites(usage={usage: 1}).store(connection)
        # _SELECT would miss a checkpoint that has already expired.
        return _checkpoint(connection.execute(f"{_SELECT_ALL} WHERE number = ?", (number,)).fetchone())

    def _drop(self, connection: sqlite3.Connection, row: sqlite3.Row) -> None:
        """Delete a row. Its storage counts until now, or until its expiry if that was earlier."""
        until = min(self._now(), row["expires"] or self._now())
        connection.execute("UPDATE stored SET until = ? WHERE checkpoint = ?", (until, row["number"]))
        connection.execute("DELETE FROM checkpoints WHERE number = ?", (row["number"],))

    def _change(
        self,
        run_id: str,
        kind: CheckpointKind,
        name: str,
        column: Literal["published", "expires"],
        value: int | None,
    ) -> None:
        with self._write(f"{name!s:.255} could not be changed") as connection:
            row = self._raw(connection, {"run": run_id, "kind": kind, "name": name})
            connection.execute(
                f"UPDATE checkpoints SET {column} = ? WHERE number = ?",  # noqa: S608  # one of two
                (value, row["number"]),
            )

    def _expiry(self, ttl_s: float | None) -> int | None:
        # SQLite's integers cannot hold a larger value, so it means never.
        return None if ttl_s is None or ttl_s > _LONGEST_TTL_S else self._now() + int(ttl_s * 1_000_000)

    def _reading(
        self, run_id: str, kind: CheckpointKind, name: str, take: Callable[[sqlite3.Row, Facts], T]
    ) -> tuple[sqlite3.Row, T]:
        """Return the row of a checkpoint and the result of `take`, which reads the files of the row.

        Read both again if another thread has overwritten the checkpoint meanwhile.
        """
        key = {"run": run_id, "kind": kind, "name": name}
        missing = ""
        while True:
            with self._database.read("the checkpoint could not be read") as connection:
                row = self._raw(connection, key)
            if row["folder"] == missing:
                raise StoreError("damaged", f"the files of {row['kind']} checkpoint {name} are gone")
            try:
                return row, take(row, _facts(row))
            except FileNotFoundError:
                missing = row["folder"]
            except ValueError as problem:
                raise StoreError("damaged", f"{name}: {problem}") from problem


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


def _facts(row: sqlite3.Row) -> Facts:
    return {name: FileFact(*fact) for name, fact in from_json(row["files"]).items()}


def _checkpoint(row: sqlite3.Row) -> CheckpointRow:
    return CheckpointRow(
        run_id=row["run_id"],
        kind=row["kind"],
        name=row["name"],
        created_at=to_moment(row["created"]),
        size_bytes=row["size_bytes"],
        expires_at=moment_or_none(row["expires"]),
        published=bool(row["published"]),
        user_metadata=from_json(row["user_metadata"]),
        project_id=row["project_id"],
        base_model=row["base_model"],
        number=row["number"],
    )
