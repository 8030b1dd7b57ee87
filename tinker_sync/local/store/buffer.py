"""What may wait in memory until something is written anyway: last uses, usage, the audit log.

So a heartbeat or a sampled token costs no write to the disk. A crash loses what waits, which is seconds.
"""

from __future__ import annotations

import sqlite3
import threading
from typing import Final, Literal, NamedTuple

from attrs import define, field

Touched = Literal["sessions", "runs"]
_HOUR_MICROS: Final = 3_600_000_000


class UsageKey(NamedTuple):
    """What usage is summed up by."""

    hour: int
    session_id: str
    run_id: str
    base_model: str
    kind: str


class Audited(NamedTuple):
    """One line of the audit log; `detail` is JSON."""

    at: int
    event: str
    detail: str


def hour_of(micros: int) -> int:
    """The hour that holds a moment, counted since 1970.

    >>> hour_of(3_600_000_000), hour_of(3_599_999_999)
    (1, 0)
    """
    return micros // _HOUR_MICROS


@define
class Waiting:
    """What waits. Not thread-safe."""

    touched: dict[tuple[Touched, str], int] = field(factory=dict)
    usage: dict[UsageKey, int] = field(factory=dict)
    audit: list[Audited] = field(factory=list)

    def __bool__(self) -> bool:
        return bool(self.touched or self.usage or self.audit)

    def add(self, later: Waiting) -> None:
        """Append what came later."""
        self.touched.update(later.touched)
        for key, amount in later.usage.items():
            self.usage[key] = self.usage.get(key, 0) + amount
        self.audit += later.audit

    def store(self, connection: sqlite3.Connection) -> None:
        """Write it, in a transaction of the caller."""
        for (table, one), moment in self.touched.items():
            connection.execute(f"UPDATE {table} SET seen = max(seen, ?) WHERE id = ?", (moment, one))  # noqa: S608  # one of two
        connection.executemany(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (hour, session_id, run_id, base_model, kind)"
            " DO UPDATE SET amount = amount + excluded.amount",
            [(*key, amount) for key, amount in self.usage.items()],
        )
        connection.executemany("INSERT INTO audit (at, event, detail) VALUES (?, ?, ?)", self.audit)


class Buffer:
    """What waits, for several threads. Thread-safe; never blocks for long.

    >>> buffer = Buffer()
    >>> buffer.use(UsageKey(0, "s-1", "", "org/base", "sample"), 3)
    >>> buffer.use(UsageKey(0, "s-1", "", "org/base", "sample"), 4)
    >>> list(buffer.take().usage.values()), bool(buffer)
    ([7], False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = Waiting()  # guarded by _lock

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._waiting)

    def touch(self, table: Touched, one: str, moment: int) -> None:
        """Something was used."""
        with self._lock:
            self._waiting.touched[table, one] = moment

    def use(self, key: UsageKey, amount: int) -> None:
        """So much was used up."""
        with self._lock:
            self._waiting.usage[key] = self._waiting.usage.get(key, 0) + amount

    def note(self, line: Audited) -> None:
        """Something was done."""
        with self._lock:
            self._waiting.audit.append(line)

    def take(self) -> Waiting:
        """Everything, to be written now."""
        with self._lock:
            taken, self._waiting = self._waiting, Waiting()
            return taken

    def put_back(self, taken: Waiting) -> None:
        """It could not be written."""
        with self._lock:
            taken.add(self._waiting)
            self._waiting = taken
