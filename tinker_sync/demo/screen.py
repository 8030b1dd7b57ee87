"""`Screen`: headings, progress bars, curves and tables of a demo on a text stream.

Only a terminal gets progress: a bar of rich if that is installed, or else one line that is overwritten.
Pipes and files get only the lasting lines.
"""

from __future__ import annotations

import itertools
import math
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TextIO

_BAR: Final = 24
_NARROW, _WIDE = 60, 110
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN: Final = "  .::--##"
_FRAME: Final = "┤│└─"
_PLAIN_FRAME: Final = "||+-"
_LABEL: Final = 7
_WIDEST: Final = 60


class Screen:
    """A writer of headings, tables, curves and progress to a text stream. Not thread-safe."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._blocks = can_encode_blocks(getattr(out, "encoding", None))
        columns = shutil.get_terminal_size((_WIDE, 24)).columns if self._is_terminal else _WIDE
        self._width = min(max(columns, _NARROW), _WIDE)

    def write(self, text: str = "") -> None:
        """Write one or more lines, not folded. A stream that lacks block characters gets only ASCII."""
        if not self._blocks:
            text = text.encode("ascii", "replace").decode()
        self._out.write(text + "\n")
        self._out.flush()

    def heading(self, text: str) -> None:
        """Write an underlined heading."""
        lines = self._fold(text)
        self.write("\n".join(["", *lines, "-" * max(map(len, lines))]))

    def paragraph(self, text: str) -> None:
        """Write prose, folded between words. A word that is longer than a line stays whole."""
        self.write("\n".join(self._fold(text)))

    def _fold(self, text: str) -> list[str]:
        return textwrap.wrap(text, self._width, break_long_words=False, break_on_hyphens=False)

    def curve(self, title: str, values: Sequence[float]) -> None:
        """Draw a curve under its title."""
        self.write(f"\n{title}")
        self.write("\n".join(plot(values, width=min(60, self._width - 12), blocks=self._blocks)))

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]], first: int) -> None:
        """Write a table, and fold the text of cells that are too long.

        Args:
            heads: the titles of the columns.
            rows: the cells.
            first: the width of the first column; the others share the rest.
        """
        others = (self._width - first) // (len(heads) - 1) - 2
        widths = [first, *([others] * (len(heads) - 1))]
        self.write()
        for row in [heads, ["-" * len(head) for head in heads], *rows]:
            cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
            for line in range(max(map(len, cells))):
                parts = (
                    (cell[line] if line < len(cell) else "").ljust(width)
                    for cell, width in zip(cells, widths, strict=True)
                )
                self.write("  ".join(parts).rstrip())

    # ------------------------------------------------------------------------------------- progress

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """Show a bar in a terminal, and yield a function to call with a short text after each step."""
        if not self._is_terminal:
            yield lambda _: None
        elif (rich_bar := _make_rich_progress(self._out)) is not None:
            with rich_bar as bar:
                task = bar.add_task(title, total=total, word="")
                yield lambda word: bar.update(task, advance=1, word=word)
        else:
            yield from self._plain_bar(title, total)

    def _plain_bar(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        done = 0

        def advance(word: str) -> None:
            nonlocal done
            done += 1
            full = _BAR * done // max(total, 1)
            line = f"{title} [{'#' * full}{'.' * (_BAR - full)}] {done}/{total} {word}"
            self._out.write(f"\r{line[: self._width - 1]:{self._width - 1}}")
            self._out.flush()

        try:
            yield advance
        finally:
            self._out.write("\n")
            self._out.flush()


def _make_rich_progress(out: TextIO) -> Any:
    """Return a progress bar of the package rich, or None if rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[word]}"),
        console=Console(file=out),
    )


def can_encode_blocks(encoding: str | None) -> bool:
    """Return True if an encoding has the block characters.

    >>> can_encode_blocks("utf-8"), can_encode_blocks("ascii"), can_encode_blocks(None)
    (True, False, False)
    """
    try:
        (_EIGHTHS + _FRAME).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def average_columns(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` numbers, each the mean of neighbouring values.

    >>> average_columns([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def plot(values: Sequence[float], *, width: int = _WIDEST, rows: int = 6, blocks: bool = True) -> list[str]:
    """Draw values as columns from left to right, and return the lines. Infinity and NaN count as 0.

    >>> for line in plot([1.0, 2.0, 3.0, 4.0], rows=2, blocks=True):
    ...     print(line)
       4.00 ┤  ▄█
            │▄███
       0.00 └────
             1 … 4
    """
    shades, frame = (_EIGHTHS, _FRAME) if blocks else (_PLAIN, _PLAIN_FRAME)
    shown = average_columns([value if math.isfinite(value) else 0.0 for value in values], width)
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
