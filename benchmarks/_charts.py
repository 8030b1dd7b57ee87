"""The charts of a run, as SVG: our shares of the reference's costs, and curves of growing costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Curve = Sequence[tuple[float, float]]

WIDTH, ROW, LEFT, RIGHT = 880, 26, 460, 90
COLOURS = {"tinker_sync": "#2563eb", "tinker": "#d97706"}
FRAME = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
    'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
)


def draw_shares(path: Path, title: str, shares: Mapping[str, float]) -> None:
    """Draw one bar for each figure: our cost as a share of the reference's, whose bar is the full width."""
    full = WIDTH - LEFT - RIGHT
    body = _text(12, 24, title, bold=True)
    for index, (label, share) in enumerate(shares.items()):
        y = 44 + index * ROW
        body += _text(LEFT - 10, y + 14, label, anchor="end")
        body += f'<rect x="{LEFT}" y="{y}" width="{full}" height="18" fill="#f3e3c7"/>'
        width = full * min(share, 1.0)
        body += f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="18" fill="{COLOURS["tinker_sync"]}"/>'
        body += _text(LEFT + full + 8, y + 14, f"{share:.2f}")
    height = 60 + len(shares) * ROW
    body += _text(LEFT, height - 6, "shaded: the reference, 1.00", small=True)
    path.write_text(FRAME.format(w=WIDTH, h=height, body=body), encoding="utf-8")


def draw_curves(path: Path, title: str, across: str, up: str, curves: Mapping[str, Curve]) -> None:
    """Draw curves over logarithmic axes; `across` and `up` are the labels of the axes."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return
    height, top, bottom, left = 300, 44, 46, 64
    xs, ys = [math.log10(x) for x, _ in points], [math.log10(max(y, 1e-6)) for _, y in points]
    x_low, x_high = math.floor(min(xs)), max(math.ceil(max(xs)), math.floor(min(xs)) + 1)
    y_low, y_high = math.floor(min(ys)), max(math.ceil(max(ys)), math.floor(min(ys)) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - x_low) / (x_high - x_low)
        above = (math.log10(max(y, 1e-6)) - y_low) / (y_high - y_low)
        return left + right * (WIDTH - left - 20), height - bottom - above * (height - top - bottom)

    body = _text(12, 24, title, bold=True)
    for power in range(x_low, x_high + 1):
        x, _ = place(10.0**power, 10.0**y_low)
        body += f'<path d="M{x:.1f} {top}V{height - bottom}" stroke="#e5e7eb"/>'
        body += _text(
            x, height - bottom + 16, f"{10**power:,}" if power >= 0 else f"{10.0**power:g}", anchor="middle"
        )
    for power in range(y_low, y_high + 1):
        _, y = place(10.0**x_low, 10.0**power)
        body += f'<path d="M{left} {y:.1f}H{WIDTH - 20}" stroke="#e5e7eb"/>'
        body += _text(left - 6, y + 4, f"{10.0**power:g}", anchor="end")
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS.get(name, "#6b7280")
        line = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in curve)
        body += f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in curve:
            dot_x, dot_y = place(x, y)
            body += f'<circle cx="{dot_x:.1f}" cy="{dot_y:.1f}" r="3" fill="{colour}"/>'
        body += f'<rect x="{left + 10 + index * 150}" y="32" width="12" height="6" fill="{colour}"/>'
        body += _text(left + 28 + index * 150, 39, name, small=True)
    body += _text(WIDTH - 20, height - 10, across, anchor="end") + _text(12, height - 10, up)
    path.write_text(FRAME.format(w=WIDTH, h=height, body=body), encoding="utf-8")


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, small: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    size = ' font-size="11"' if small else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}{size}>{escape(text)}</text>'
