"""The tables of usage (for the bill) and of audit entries. A base class of `Store`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timezone
from typing import Any, Final, Literal

from tinker_sync.local.store.buffer import HOUR_MICROS, AuditEntry, UsageKey, hour_of
from tinker_sync.local.store.database import from_json, to_json, to_micros, to_moment
from tinker_sync.local.store.rows import AuditRow, HourlyUsageRow
from tinker_sync.local.store.tables import Tables

_GIGABYTE: Final = 10**9


class Ledger(Tables):
    """The methods of `Store` for usage and for the audit log."""

    def record_usage(
        self,
        session_id: str,
        run_id: str | None,
        base_model: str,
        kind: Literal["training", "prefill", "prefill_cached", "sample"],
        tokens: int,
    ) -> None:
        """Record tokens used now. This method does not touch the disk: the next write includes the record.

        Saving a checkpoint records its own usage and storage.
        """
        if tokens > 0:
            key = UsageKey(hour_of(self._now()), session_id, run_id or "", base_model, kind)
            self._buffer.use(key, tokens)

    def usage(self, starting_on: datetime, ending_before: datetime) -> list[HourlyUsageRow]:
        """Return the usage of each hour that begins between two moments, in order of time.

        Storage is in gigabyte hours and counted up to now.
        """
        self._flush_if_possible()
        first, end = -(-to_micros(starting_on) // HOUR_MICROS), -(-to_micros(ending_before) // HOUR_MICROS)
        end = min(end, hour_of(self._now()) + 1)
        with self._database.read("usage could not be summed up") as connection:
            rows = connection.execute(
                "SELECT hour, session_id, project_id, base_model, kind, sum(amount) AS amount"
                " FROM usage LEFT JOIN sessions ON sessions.id = session_id WHERE hour >= ? AND hour < ?"
                " GROUP BY hour, session_id, base_model, kind",
                (first, end),
            )
            used = [
                HourlyUsageRow(
                    bucket_start=to_moment(row["hour"] * HOUR_MICROS),
                    kind=row["kind"],
                    amount=row["amount"],
                    session_id=row["session_id"] or None,
                    project_id=row["project_id"],
                    base_model=row["base_model"] or None,
                )
                for row in rows
            ]
            spans = connection.execute(
                "SELECT project_id, size_bytes, since, coalesce(until, ?) FROM stored"
                " WHERE since < ? AND coalesce(until, ?) > ?",
                (self._now(), end * HOUR_MICROS, self._now(), first * HOUR_MICROS),
            ).fetchall()
        used += _storage(spans, first, end)
        return sorted(used, key=lambda row: row.bucket_start)

    def audit(self, event: str, detail: Mapping[str, Any]) -> None:
        """Add an audit entry. This method does not touch the disk: the next write includes the entry."""
        self._buffer.note(AuditEntry(self._now(), event, to_json(dict(detail))))

    def audit_log(self, day: date | None = None) -> list[AuditRow]:
        """Return the audit entries of a day in UTC (None: today), in the order of time."""
        self._flush_if_possible()
        begin = datetime.combine(day or to_moment(self._now()).date(), time(), timezone.utc)
        with self._database.read("the audit log could not be read") as connection:
            rows = connection.execute(
                "SELECT * FROM audit WHERE at >= ? AND at < ? ORDER BY at, number",
                (to_micros(begin), to_micros(begin) + 24 * HOUR_MICROS),
            )
            return [
                AuditRow(at=to_moment(row["at"]), event=row["event"], detail=from_json(row["detail"]))
                for row in rows
            ]


def _storage(
    spans: Iterable[tuple[str | None, int, int, int]], first: int, end: int
) -> Iterator[HourlyUsageRow]:
    """Yield the gigabyte hours of each project in each hour from `first` to before `end`.

    Each span is the project and the size of a checkpoint, and the moments between which it was stored. The
    work for a span does not depend on its length: its size is added at its first full hour and subtracted
    after its last one.
    """
    parts: dict[tuple[str | None, int], float] = defaultdict(float)
    steps: dict[tuple[str | None, int], int] = defaultdict(int)
    for project, size, begins, ends in spans:
        since, until = max(begins, first * HOUR_MICROS), min(ends, end * HOUR_MICROS)
        whole, after = -(-since // HOUR_MICROS), until // HOUR_MICROS
        if whole > after:  # within one hour
            parts[project, after] += size * (until - since)
            continue
        parts[project, whole - 1] += size * (whole * HOUR_MICROS - since)
        parts[project, after] += size * (until - after * HOUR_MICROS)
        steps[project, whole] += size
        steps[project, after] -= size
    for project in {project for project, _ in (*parts, *steps)}:
        filled = 0
        for hour in range(first, end):
            filled += steps.get((project, hour), 0)
            byte_hours = filled + parts.get((project, hour), 0.0) / HOUR_MICROS
            if byte_hours:
                yield HourlyUsageRow(
                    bucket_start=to_moment(hour * HOUR_MICROS),
                    kind="storage",
                    amount=byte_hours / _GIGABYTE,
                    project_id=project,
                )
