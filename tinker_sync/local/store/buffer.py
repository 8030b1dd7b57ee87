"""Writes that wait in memory for the next transaction: last uses, usage, the audit log.

A heartbeat or a sampled token costs no write to the disk. A crash loses the records since the last write; the
server writes at least about every half minute.
"""

from __future__ import annotations

import sqlite3
import threading
from typing import Final, Literal, NamedTuple

from attrs import define, field

TouchedTable = Literal["sessions", "runs"]
HOUR_MICROS: Final = 3_600_000_000


class UsageKey(NamedTuple):
    """The hour, session, run, base model and kind for which the store adds up amounts of usage."""

    hour: int
    session_id: str
    run_id: str
    base_model: str
    kind: str


class AuditEntry(NamedTuple):
    """An entry of the audit log as stored: `at` in microseconds since 1970, `detail` as JSON."""

    at: int
    event: str
    detail: str


def hour_of(micros: int) -> int:
    """Return the hour of a moment, counted since 1970.

    >>> hour_of(3_600_000_000), hour_of(3_599_999_999)
    (1, 0)
    """
    return micros // HOUR_MICROS


@define
class PendingWrites:
    """The writes that wait for the next transaction. Not thread-safe."""

    touched: dict[tuple[TouchedTable, str], int] = field(factory=dict)
    usage: dict[UsageKey, int] = field(factory=dict)
    audit: list[AuditEntry] = field(factory=list)

    def __bool__(self) -> bool:
        return bool(self.touched or self.usage or self.audit)

    def add(self, later: PendingWrites) -> None:
        """Append writes that came later than these."""
        self.touched.update(later.touched)
        for key, amount in later.usage.items():
            self.usage[key] = self.usage.get(key, 0) + amount
        self.audit += later.audit

    def store(self, connection: sqlite3.Connection) -> None:
        """Write everything to the database, in the transaction of the caller."""
        for (table, one), moment in self.touched.items():
            connection.execute(f"UPDATE {table} SET seen = max(seen, ?) WHERE id = ?", (moment, one))  # noqa: S608  # one of two
        connection.executemany(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (hour, session_id, run_id, base_model, kind)"
            " DO UPDATE SET amount = amount + excluded.amount",
            [(*key, amount) for key, amount in self.usage.items()],
        )
        connection.executemany("INSERT INTO audit (at, event, detail) VALUES (?, ?, ?)", self.audit)


class WriteBuffer:
    """The `PendingWrites` of a store, shared by its threads. Thread-safe.

    >>> buffer = WriteBuffer()
    >>> buffer.use(UsageKey(0, "s-1", "", "org/base", "sample"), 3)
    >>> buffer.use(UsageKey(0, "s-1", "", "org/base", "sample"), 4)
    >>> list(buffer.take().usage.values()), bool(buffer)
    ([7], False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending = PendingWrites()  # guarded by _lock

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._pending)

    def touch(self, table: TouchedTable, one: str, moment: int) -> None:
        """Record the last use of a session or run: its id, and the moment in microseconds since 1970."""
        with self._lock:
            self._pending.touched[table, one] = moment

    def use(self, key: UsageKey, amount: int) -> None:
        """Add an amount to the usage under a key."""
        with self._lock:
            self._pending.usage[key] = self._pending.usage.get(key, 0) + amount

    def note(self, line: AuditEntry) -> None:
        """Add an entry to the audit log."""
        with self._lock:
            self._pending.audit.append(line)

    def take(self) -> PendingWrites:
        """Remove and return all pending writes."""
        with self._lock:
            taken, self._pending = self._pending, PendingWrites()
            return taken

    def put_back(self, taken: PendingWrites) -> None:
        """Put back the writes of a failed transaction, before those added meanwhile."""
        with self._lock:
            taken.add(self._pending)
            self._pending = taken
