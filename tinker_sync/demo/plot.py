"""Curves for a terminal: columns of blocks, or of number signs where there are no blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN: Final = "  .::--##"
_FRAME: Final = "┤│└─"
_PLAIN_FRAME: Final = "||+-"
_LABEL: Final = 7
_WIDEST: Final = 60


def speaks_blocks(encoding: str | None) -> bool:
    """Whether text of this encoding can hold the blocks.

    >>> speaks_blocks("utf-8"), speaks_blocks("ascii"), speaks_blocks(None)
    (True, False, False)
    """
    try:
        (_EIGHTHS + _FRAME).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def columns(values: Sequence[float], width: int) -> list[float]:
    """As many values as fit: a value each, or the means of neighbours.

    >>> columns([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def plot(values: Sequence[float], *, width: int = _WIDEST, rows: int = 6, blocks: bool = True) -> list[str]:
    """Lines that show the values as columns over zero, the first on the left.

    >>> for line in plot([1.0, 2.0, 3.0, 4.0], rows=2, blocks=True):
    ...     print(line)
       4.00 ┤  ▄█
            │▄███
       0.00 └────
             1 … 4
    """
    shades, frame = (_EIGHTHS, _FRAME) if blocks else (_PLAIN, _PLAIN_FRAME)
    shown = columns([value if math.isfinite(value) else 0.0 for value in values], width)
    top, bottom = max([*shown, 0.0]), min([*shown, 0.0])
    reach = (top - bottom) or 1.0
    heights = [round((value - bottom) / reach * rows * 8) for value in shown]
    lines = []
    for row in reversed(range(rows)):
        label = f"{top:{_LABEL}.2f} {frame[0]}" if row == rows - 1 else f"{'':{_LABEL}} {frame[1]}"
        lines.append(label + "".join(shades[min(max(height - row * 8, 0), 8)] for height in heights))
    lines.append(f"{bottom:{_LABEL}.2f} {frame[2]}{frame[3] * len(shown)}")
    between = "…" if blocks else "..."
    lines.append(f"{'':{_LABEL}}  1 {between} {len(values)}")
    return lines
