"""Escaped HTML in the look that all displays share. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Final

CELL: Final = "padding:2px 10px;text-align:left;vertical-align:top"
NUMBER: Final = "padding:2px 10px;text-align:right;font-variant-numeric:tabular-nums"
FAINT: Final = "opacity:.65"
MOST_ROWS: Final = 60


def table(rows: Sequence[Mapping[str, object]], caption: str = "") -> str:
    """Return at most 60 rows as an HTML table, with the keys of the first row as its head.

    >>> table([{"name": "<a>", "count": 1200}]).count("<td")
    2
    >>> "&lt;a&gt;" in table([{"name": "<a>", "count": 1200}])
    True
    """
    if not rows:
        return note(caption or "nothing")
    head = "".join(f'<th style="{CELL}">{escape(name.replace("_", " "))}</th>' for name in rows[0])
    body = "".join(f"<tr>{''.join(_cell(value) for value in row.values())}</tr>" for row in rows[:MOST_ROWS])
    more = f" (the first {MOST_ROWS} are shown)" if len(rows) > MOST_ROWS else ""
    return (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note(caption + more) if caption or more else ''}"
    )


def pairs(values: Mapping[str, object]) -> str:
    """Return names and values as an HTML table of two columns."""
    body = "".join(
        f'<tr><th style="{CELL}">{escape(name)}</th>{_cell(value)}</tr>' for name, value in values.items()
    )
    return f'<table style="border-collapse:collapse">{body}</table>'


def note(text: str) -> str:
    """Return a text as a line of HTML in small print."""
    return f'<div style="{FAINT};font-size:smaller;margin:2px 0">{escape(text)}</div>'


def number(value: float) -> str:
    """Return a number with a few digits and separators of thousands.

    >>> number(1234567), number(0.000123456), number(12.5), number(3.0)
    ('1,234,567', '0.0001235', '12.5', '3')
    """
    if isinstance(value, int) or (value == int(value) if abs(value) < 1e15 else False):
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"


def size(size_bytes: float) -> str:
    """Return a number of bytes with its unit, in steps of 1024.

    >>> size(512), size(505_917), size(10 * 1024**3)
    ('512 B', '494.1 KB', '10.0 GB')
    """
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KB", "MB", "GB", "TB", "PB"):
        size_bytes /= 1024
        if size_bytes < 1023.95:  # a value that rounds to 1024.0 belongs to the next unit
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:.1f} EB"


def seconds(duration_s: float) -> str:
    """Return a duration with its unit.

    >>> seconds(0.0123), seconds(2.5), seconds(200)
    ('12 ms', '2.5 s', '3 min 20 s')
    """
    if duration_s < 0.9995:  # as in `size`
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 119.95:
        return f"{duration_s:.1f} s"
    minutes, rest = divmod(round(duration_s), 60)
    return f"{minutes} min {rest} s"


def curve(values: Sequence[float], label: str) -> str:
    """Return values as a line chart in SVG, with a caption that lists the first, the least and the last one.

    >>> curve([3.0, 1.0], "loss").count("<polyline")
    1
    """
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if len(finite) < 2:
        return note(f"{label}: {number(finite[0])} after one pass" if finite else f"{label}: no pass yet")
    width, height, low, high = 420, 120, min(finite), max(finite)
    across, up = (width - 8) / (len(finite) - 1), (height - 8) / ((high - low) or 1.0)
    points = " ".join(
        f"{4 + at * across:.1f},{4 + (high - value) * up:.1f}" for at, value in enumerate(finite)
    )
    words = (
        f"{label} of {len(finite)} passes: first {number(finite[0])}, least {number(low)}, "
        f"last {number(finite[-1])}"
    )
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(words)}" style="display:block;max-width:100%">'
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" fill="none" stroke="currentColor" '
        f'stroke-opacity=".2"/><polyline points="{points}" fill="none" stroke="#3b82f6" stroke-width="2"/>'
        f"</svg>{note(words)}"
    )


def lines(texts: Iterable[str]) -> str:
    """Return parts of HTML, one below the other."""
    return "".join(f"<div>{text}</div>" for text in texts)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return f'<td style="{CELL}">{"yes" if value else "no"}</td>'
    if isinstance(value, (int, float)):
        return f'<td style="{NUMBER}">{number(value)}</td>'
    if isinstance(value, datetime):
        return f'<td style="{CELL};white-space:nowrap">{value:%Y-%m-%d %H:%M}</td>'
    text = "" if value is None else str(value)
    return f'<td style="{CELL};overflow-wrap:anywhere">{escape(text)}</td>'
