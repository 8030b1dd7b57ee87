"""What was used, for the bill, and what was done, for the audit log. A base of `Store`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta, timezone
from typing import Any, Final, Literal

from tinker_sync.local.store.buffer import Audited, UsageKey, hour_of
from tinker_sync.local.store.database import from_json, to_json, to_micros, to_moment
from tinker_sync.local.store.rows import AuditRow, UsageRow
from tinker_sync.local.store.tables import Tables

_HOUR_MICROS: Final = 3_600_000_000
_GIGABYTE: Final = 10**9


class Ledger(Tables):
    """Usage and the audit log."""

    def record_usage(
        self,
        session_id: str,
        run_id: str | None,
        base_model: str,
        kind: Literal["training", "prefill", "prefill_cached", "sample"],
        tokens: int,
    ) -> None:
        """So many tokens were used just now. Never blocks: it waits in memory for the next write.

        Saved checkpoints and storage are counted by themselves.
        """
        if tokens > 0:
            key = UsageKey(hour_of(self._now()), session_id, run_id or "", base_model, kind)
            self._buffer.use(key, tokens)

    def usage(self, starting_on: datetime, ending_before: datetime) -> list[UsageRow]:
        """What was used hour by hour, in the hours that begin within these moments; in the order of time.

        Storage is in gigabyte hours and counts up to now.
        """
        self._flush_if_possible()
        first, end = -(-to_micros(starting_on) // _HOUR_MICROS), -(-to_micros(ending_before) // _HOUR_MICROS)
        end = min(end, hour_of(self._now()) + 1)
        with self._database.read("usage could not be summed up") as connection:
            rows = connection.execute(
                "SELECT hour, session_id, project_id, base_model, kind, sum(amount) AS amount"
                " FROM usage LEFT JOIN sessions ON sessions.id = session_id WHERE hour >= ? AND hour < ?"
                " GROUP BY hour, session_id, base_model, kind",
                (first, end),
            )
            used = [
                UsageRow(
                    bucket_start=to_moment(row["hour"] * _HOUR_MICROS),
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
                (self._now(), end * _HOUR_MICROS, self._now(), first * _HOUR_MICROS),
            ).fetchall()
        used += _storage(spans, first, end)
        return sorted(used, key=lambda row: row.bucket_start)

    def audit(self, event: str, detail: Mapping[str, Any]) -> None:
        """Something was done just now. Never blocks: it waits in memory for the next write."""
        self._buffer.note(Audited(self._now(), event, to_json(dict(detail))))

    def audit_log(self, day: date | None = None, event_type: str | None = None) -> list[AuditRow]:
        """What was done, in the order of time.

        Args:
            day: on this day in UTC; None is today.
            event_type: only this event; None is all.
        """
        self._flush_if_possible()
        begin = datetime.combine(day or to_moment(self._now()).date(), time(), timezone.utc)
        until = begin + timedelta(days=1)
        with self._database.read("the audit log could not be read") as connection:
            rows = connection.execute(
                "SELECT * FROM audit WHERE at >= ? AND at < ? AND (? IS NULL OR event = ?)"
                " ORDER BY at, number",
                (to_micros(begin), to_micros(until), event_type, event_type),
            )
            return [
                AuditRow(at=to_moment(row["at"]), event=row["event"], detail=from_json(row["detail"]))
                for row in rows
            ]


def _storage(spans: Iterable[tuple[str | None, int, int, int]], first: int, end: int) -> Iterator[UsageRow]:
    """Gigabyte hours of each project in each hour from `first` to before `end`.

    The hours that a span fills are not walked through: it adds its size where they begin and takes it away
    where they end.
    """
    parts: dict[tuple[str | None, int], float] = defaultdict(float)
    steps: dict[tuple[str | None, int], int] = defaultdict(int)
    for project, size, begins, ends in spans:
        since, until = max(begins, first * _HOUR_MICROS), min(ends, end * _HOUR_MICROS)
        whole, after = -(-since // _HOUR_MICROS), until // _HOUR_MICROS
        if whole > after:  # within one hour
            parts[project, after] += size * (until - since)
            continue
        parts[project, whole - 1] += size * (whole * _HOUR_MICROS - since)
        parts[project, after] += size * (until - after * _HOUR_MICROS)
        steps[project, whole] += size
        steps[project, after] -= size
    for project in {project for project, _ in (*parts, *steps)}:
        filled = 0
        for hour in range(first, end):
            filled += steps.get((project, hour), 0)
            byte_hours = filled + parts.get((project, hour), 0.0) / _HOUR_MICROS
            if byte_hours:
                yield UsageRow(
                    bucket_start=to_moment(hour * _HOUR_MICROS),
                    kind="storage",
                    amount=byte_hours / _GIGABYTE,
                    project_id=project,
                )
