"""The SQLite file: its schema, transactions that commit whole or leave nothing, and the errors of both.

The process has one connection and locks the database exclusively. SQLite then keeps the index of its
write-ahead log in memory. With a shared memory-mapped file instead, a full disk would crash the process. Any
thread may use the database; a lock admits one at a time.
"""

from __future__ import annotations

import errno
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final, Literal

from tinker_sync.errors import TinkerError

# The steps from one version of the schema to the next. A released step never changes; a new one is appended.
# Moments are whole microseconds since 1970, lists and objects are JSON.
MIGRATIONS: Final = (
    """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    created INTEGER NOT NULL,
    seen INTEGER NOT NULL,
    tags TEXT NOT NULL,
    user_metadata TEXT,
    sdk_version TEXT,
    project_id TEXT,
    display_name TEXT,
    status TEXT NOT NULL
);
CREATE INDEX sessions_by_time ON sessions (created, id);
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions (id),
    model_seq_id INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    lora TEXT NOT NULL,
    optimizer_config TEXT NOT NULL,
    user_metadata TEXT,
    project_id TEXT,
    created INTEGER NOT NULL,
    seen INTEGER NOT NULL,
    corrupted INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX runs_by_time ON runs (created, id);
CREATE INDEX runs_by_session ON runs (session_id, model_seq_id);
CREATE TABLE samplers (
    id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions (id),
    base_model TEXT NOT NULL,
    model_path TEXT,
    created INTEGER NOT NULL
);
CREATE INDEX samplers_by_session ON samplers (session_id, created);
CREATE TABLE checkpoints (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL REFERENCES runs (id),
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    created INTEGER NOT NULL,
    expires INTEGER,
    published INTEGER NOT NULL DEFAULT 0,
    user_metadata TEXT,
    info TEXT NOT NULL,
    folder TEXT NOT NULL UNIQUE,
    files TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    UNIQUE (run_id, kind, name)
);
CREATE INDEX checkpoints_by_expiry ON checkpoints (expires) WHERE expires IS NOT NULL;
CREATE TABLE stored (
    checkpoint INTEGER PRIMARY KEY,
    project_id TEXT,
    size_bytes INTEGER NOT NULL,
    since INTEGER NOT NULL,
    until INTEGER
);
CREATE TABLE usage (
    hour INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    base_model TEXT NOT NULL,
    kind TEXT NOT NULL,
    amount INTEGER NOT NULL,
    PRIMARY KEY (hour, session_id, run_id, base_model, kind)
) WITHOUT ROWID;
CREATE TABLE audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    event TEXT NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX audit_by_time ON audit (at);
""",
    # The hours of storage are no longer billed, and the audit log is of one start of the server.
    "DROP TABLE stored; DROP TABLE audit;",
    # So is the usage.
    "DROP TABLE usage;",
)

StoreErrorKind = Literal[
    "not_found", "exists", "bad_name", "full", "unwritable", "locked", "damaged", "too_new", "closed"
]

_FULL: Final = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
# Phrases in SQLite's messages; the exception carries its error code only since Python 3.11.
_SQLITE_PHRASES: Final[Mapping[str, StoreErrorKind]] = {
    "full": "full",
    "not a database": "damaged",
    "malformed": "damaged",
    "locked": "locked",
    "FOREIGN KEY": "not_found",
    "UNIQUE": "exists",
    "closed database": "closed",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND: Final = timedelta(microseconds=1)


class StoreError(TinkerError):
    """The error of a failed operation of the store, with its cause.

    Attributes:
        kind: the cause. `not_found`, `exists`, `bad_name`: the request. `full`, `unwritable`: the disk.
            `locked`: another server uses the directory. `damaged`, `too_new`: the directory's content.
            `closed`: the store is closed.
        message: a sentence fit for a client.

    >>> error = StoreError("not_found", "there is no session s-1")
    >>> error.kind, str(error)
    ('not_found', 'there is no session s-1')
    """

    kind: StoreErrorKind
    message: str

    def __init__(self, kind: StoreErrorKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raise errors of the file system and of SQLite in the block, and for huge numbers, as `StoreError`.

    >>> with translate_errors("the file could not be read"):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
        ...
    tinker_sync.local.store.database.StoreError: the file could not be read: the disk is full (No space ...)
    """
    try:
        yield
    except OSError as problem:
        if problem.errno in _FULL:
            raise StoreError("full", f"{what}: the disk is full ({problem.strerror})") from problem
        raise StoreError("unwritable", f"{what}: {problem.strerror or problem}") from problem
    except sqlite3.Error as problem:
        text = str(problem)
        known = [kind for phrase, kind in _SQLITE_PHRASES.items() if phrase in text]
        kind: StoreErrorKind = known[0] if known else "unwritable"
        text = {"full": "the disk is full", "exists": "it exists already"}.get(kind, text)
        raise StoreError(kind, f"{what}: {text}") from problem
    except OverflowError as problem:
        raise StoreError("bad_name", f"{what}: a number has more than 64 bits") from problem


# ------------------------------------------------------------------------------------------ values in columns


def to_micros(moment: datetime) -> int:
    """Convert a moment to whole microseconds since 1970.

    >>> to_micros(datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc))
    1000000
    """
    return (moment - _EPOCH) // _MICROSECOND


def to_moment(micros: int) -> datetime:
    """Convert microseconds since 1970 to a moment in UTC.

    >>> to_moment(1_000_000).isoformat()
    '1970-01-01T00:00:01+00:00'
    """
    return _EPOCH + timedelta(microseconds=micros)


def to_json(tree: Any) -> str:
    """Encode a list or an object for one column."""
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def json_or_none(tree: Any) -> str | None:
    return None if tree is None else to_json(tree)


def texts(metadata: str | None) -> dict[str, str] | None:
    """Return the metadata in a column in the form of the protocol, with values that are not text as JSON.

    >>> texts('{"team":"a","epoch":3}')
    {'team': 'a', 'epoch': '3'}
    """
    if metadata is None:
        return None
    tree = json.loads(metadata)
    return {name: value if isinstance(value, str) else to_json(value) for name, value in tree.items()}


# ------------------------------------------------------------------------------------------ the database


class Database:
    """The connection of this process to the SQLite file. Thread-safe.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> database = Database(Path(folder.name) / "state.sqlite")
    >>> with database.read("nothing was found") as connection:
    ...     connection.execute("SELECT count(*) FROM runs").fetchone()[0]
    0
    >>> database.close(); folder.cleanup()
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()  # held while the connection is in use
        self._path = path
        with translate_errors(f"{path} could not be opened"):
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            with translate_errors(f"{path} could not be opened"):
                self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        connection = self._connection
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise StoreError(
                "too_new", f"{self._path} was written by a newer version; open it with that, or elsewhere"
            )
        for number, step in enumerate(MIGRATIONS[version:], start=version + 1):
            # One transaction: the step and its version number appear together or not at all.
            connection.executescript(f"BEGIN;{step}PRAGMA user_version = {number};COMMIT;")

    @contextmanager
    def write(self, what: str) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction, which is committed at its end and rolled back if it raises.

        Args:
            what: the beginning of the error message, such as "the run could not be added".

        Raises:
            StoreError: SQLite or the file system failed.
        """
        with self._lock, translate_errors(what):
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # some failures roll back by themselves
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def read(self, what: str) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading. Other threads wait until the block ends.

        Raises:
            StoreError: SQLite or the file system failed.
        """
        with self._lock, translate_errors(what):
            yield self._connection

    def close(self) -> None:
        """Close the connection. Later calls raise `StoreError`. Idempotent."""
        with self._lock:
            self._connection.close()
