"""What the families of tables share: connection, clock, and the buffer that goes along with writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from tinker_sync._clock import Clock
from tinker_sync.local.store.buffer import Buffer
from tinker_sync.local.store.database import Database
from tinker_sync.local.store.errors import StoreError

_NOUNS = {"sessions": "session", "runs": "training run"}


class Tables:
    """The base of each family. Thread-safe, as its parts are."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._buffer = Buffer()

    def flush(self) -> None:
        """Have on the disk what waits in memory: when things were last used, usage, the audit log.

        It goes along with every other write too, and is tried before every read of those.

        Raises:
            StoreError: the disk is full or the like; it goes on waiting.
        """
        if self._buffer:
            with self._write("usage could not be recorded"):
                pass

    def _flush_if_possible(self) -> None:
        """Reading shall work also where writing does not."""
        with suppress(StoreError):
            self.flush()

    def _now(self) -> int:
        return int(self._clock.time() * 1_000_000)

    @contextmanager
    def _write(self, what: str) -> Iterator[sqlite3.Connection]:
        """A transaction that takes along what has waited in the buffer."""
        waiting = self._buffer.take()
        try:
            with self._database.write(what) as connection:
                waiting.store(connection)
                yield connection
        except BaseException:
            self._buffer.put_back(waiting)
            raise


def require(connection: sqlite3.Connection, table: Literal["sessions", "runs"], one: str) -> sqlite3.Row:
    """A row that must be there.

    Raises:
        StoreError: `not_found`.
    """
    row: sqlite3.Row | None = connection.execute(f"SELECT * FROM {table} WHERE id = ?", (one,)).fetchone()  # noqa: S608  # one of two
    if row is None:
        raise StoreError("not_found", f"there is no {_NOUNS[table]} {one[:255]}")
    return row
