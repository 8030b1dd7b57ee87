"""Escaped HTML in the look that all displays share. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import chain
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
    """Return a duration in its one or two largest units.

    >>> seconds(0.0123), seconds(2.5), seconds(200), seconds(3600), seconds(604800), seconds(90000)
    ('12 ms', '2.5 s', '3 min 20 s', '1 h', '7 days', '1 day 1 h')
    """
    if duration_s < 0.9995:  # as in `size`
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 119.95:
        return f"{duration_s:.1f} s"
    rest = round(duration_s)
    parts: list[str] = []
    for unit_s, name in ((86_400, "day"), (3600, "h"), (60, "min"), (1, "s")):
        count, rest = divmod(rest, unit_s)
        if count or parts:
            parts.append(f"{count} {name}{'s' if name == 'day' and count > 1 else ''}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 "))


Curve = Sequence[tuple[float, float]]
"""The points of a curve: a step and its value."""


def chart(curves: Mapping[str, Curve], colours: Mapping[str, str], label: str = "") -> str:
    """Return curves as a line chart in SVG with its axes; `label` is its text for screen readers.

    >>> chart({"a": [(0, 3.0), (1, 1.0)]}, {"a": "#2563eb"}).count("<polyline")
    1
    """
    width, height, left, bottom, top = 560, 240, 64, 28, 12
    points = list(chain.from_iterable(curves.values()))
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    across, up = max(last - first, 1), (high - low) or abs(high) or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        x = left + (step - first) / across * (width - left - 8)
        y = height - bottom - (value - low) / up * (height - bottom - top)
        return round(x, 1), round(y, 1)

    drawn = []
    for fraction in (0.0, 0.5, 1.0):
        value = low + fraction * up
        _, y = place(first, value)
        ends = f'x1="{left}" x2="{width - 8}" y1="{y}" y2="{y}"'
        drawn.append(f'<line {ends} stroke="currentColor" stroke-opacity=".25"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:.4g}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        x, _ = place(step, low)
        drawn.append(f'<text x="{x}" y="{height - 8}" text-anchor="{anchor}">step {step}</text>')
    for name, line in curves.items():
        places = [place(*point) for point in line]
        colour = colours[name]
        if len(places) == 1:
            drawn.append(f'<circle cx="{places[0][0]}" cy="{places[0][1]}" r="3" fill="{colour}"/>')
        path = " ".join(f"{x},{y}" for x, y in places)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" fill="currentColor" '
        f'font-size="11" style="display:block;width:100%;max-width:{width}px">{"".join(drawn)}</svg>'
    )


def curve(values: Sequence[float], label: str) -> str:
    """Return values as a chart, with a caption that has the first, the lowest and the last one.

    >>> curve([3.0, 1.0], "loss").count("<polyline")
    1
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return note(f"{label}: {number(finite[0])} after one pass" if finite else f"{label}: no pass yet")
    words = (
        f"{label} of {len(finite)} passes: first {number(finite[0])}, least {number(min(finite))}, "
        f"last {number(finite[-1])}"
    )
    return chart({label: list(enumerate(finite))}, {label: "#3b82f6"}, words) + note(words)


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
