"""The base class of the parts of `Store`: the connection, the clock, and the buffer of pending writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from tinker_sync._base.clock import Clock
from tinker_sync.local.store.buffer import WriteBuffer
from tinker_sync.local.store.database import Database
from tinker_sync.local.store.errors import StoreError

_NOUNS = {"sessions": "session", "runs": "training run"}


class Tables:
    """The base class of the parts of `Store`, which share a database, a clock and a buffer. Thread-safe."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._buffer = WriteBuffer()

    def flush(self) -> None:
        """Write the pending data: times of last use, usage, and audit entries.

        Every other write includes them too. A read of such data calls this first, and goes on if it fails.

        Raises:
            StoreError: the disk refused the write; the data stay pending.
        """
        if self._buffer:
            with self._write("usage could not be recorded"):
                pass

    def _flush_if_possible(self) -> None:
        with suppress(StoreError):  # reading works even when the disk refuses writes
            self.flush()

    def _now(self) -> int:
        return int(self._clock.time() * 1_000_000)

    @contextmanager
    def _write(self, what: str) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction that includes the pending writes."""
        pending = self._buffer.take()
        try:
            with self._database.write(what) as connection:
                pending.store(connection)
                yield connection
        except BaseException:
            self._buffer.put_back(pending)
            raise


def require(connection: sqlite3.Connection, table: Literal["sessions", "runs"], one: str) -> sqlite3.Row:
    """Return the row of a session or training run by its id.

    Raises:
        StoreError: of the kind `not_found`.
    """
    row: sqlite3.Row | None = connection.execute(f"SELECT * FROM {table} WHERE id = ?", (one,)).fetchone()  # noqa: S608  # one of two
    if row is None:
        raise StoreError("not_found", f"there is no {_NOUNS[table]} {one[:255]}")
    return row
