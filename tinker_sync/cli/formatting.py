"""Numbers and times as text for people. Pure functions, except `utc_now`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Final

MISSING: Final = "-"

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86400
_WEEK_S: Final = 7 * _DAY_S
# Beyond this a date is clearer than a number of weeks.
_LONG_AGO_S: Final = 31 * _DAY_S


def format_size(size_bytes: int | None) -> str:
    """Format a number of bytes.

    >>> format_size(5), format_size(1536), format_size(10 * 1024**3), format_size(None)
    ('5 B', '1.5 KB', '10.0 GB', '-')
    """
    from tinker_sync.insight import page  # here, because the help of a group needs no sizes

    return MISSING if size_bytes is None or size_bytes < 0 else page.size(size_bytes)


def format_age(time: datetime | None, now: datetime) -> str:
    """Format a time relative to `now`, or as a date if it is 31 days away or more.

    A time without a zone is in UTC. None becomes "-".

    >>> now = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
    >>> format_age(datetime(2026, 3, 1, 10, tzinfo=timezone.utc), now)
    '2 hours ago'
    >>> format_age(datetime(2026, 3, 8, 13, tzinfo=timezone.utc), now), format_age(datetime(2025, 3, 1), now)
    ('in 7 days', '2025-03-01')
    """
    if time is None:
        return MISSING
    time = time if time.tzinfo else time.replace(tzinfo=timezone.utc)
    apart_s = (now - time).total_seconds()
    distance_s = abs(apart_s)
    if distance_s >= _LONG_AGO_S:
        return time.astimezone(timezone.utc).strftime("%Y-%m-%d")
    if distance_s < _MINUTE_S:
        return "just now" if apart_s >= 0 else "in a moment"
    text = _format_span(distance_s)
    return f"{text} ago" if apart_s > 0 else f"in {text}"


def _format_span(seconds: float) -> str:
    for unit_s, name in ((2 * _WEEK_S, "week"), (_DAY_S, "day"), (_HOUR_S, "hour"), (_MINUTE_S, "minute")):
        if seconds >= unit_s:
            return format_count(int(seconds // (_WEEK_S if name == "week" else unit_s)), name)
    return format_count(int(seconds), "second")


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun.

    >>> format_count(1, "run"), format_count(25000, "checkpoint")
    ('1 run', '25,000 checkpoints')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_flag(value: bool | None) -> str:
    """Format a flag as a word.

    >>> format_flag(True), format_flag(None)
    ('yes', '-')
    """
    return MISSING if value is None else "yes" if value else "no"


def note_hidden(total: int, shown: int) -> str:
    """Return a note on the number of entries that a list does not show, or "" if it shows all.

    >>> note_hidden(25, 20), note_hidden(3, 3)
    ('5 more are not shown; --limit 0 shows all.', '')
    """
    more = total - shown
    if more <= 0:
        return ""
    return f"{more:,} more {'is' if more == 1 else 'are'} not shown; --limit 0 shows all."


def utc_now() -> datetime:
    """Return the present time in UTC. Commands call `Cli.now` instead."""
    return datetime.now(timezone.utc)
