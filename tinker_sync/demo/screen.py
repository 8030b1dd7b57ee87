"""What a demo shows: headings, progress, curves, and what was said before and after.

Progress is shown to people only: with rich where it is installed, else in one line that is written over and
over. Into a pipe or a file only what stays is written.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TextIO

from tinker_sync.demo.plot import plot, speaks_blocks

_BAR: Final = 24
_NARROW, _WIDE = 60, 110


class Screen:
    """Writes to a text stream. Not thread-safe."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._watched = out.isatty()
        self._blocks = speaks_blocks(getattr(out, "encoding", None))
        columns = shutil.get_terminal_size((_WIDE, 24)).columns if self._watched else _WIDE
        self._width = min(max(columns, _NARROW), _WIDE)

    def say(self, text: str = "") -> None:
        """A line, or several."""
        if not self._blocks:
            text = text.encode("ascii", "replace").decode()
        self._out.write(text + "\n")
        self._out.flush()

    def heading(self, text: str) -> None:
        """What comes now."""
        self.say(f"\n{text}\n{'-' * len(text)}")

    def curve(self, title: str, values: Sequence[float]) -> None:
        """A curve."""
        self.say(f"\n{title}")
        self.say("\n".join(plot(values, width=min(60, self._width - 12), blocks=self._blocks)))

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]], first: int) -> None:
        """Cells side by side, folded where they are long.

        Args:
            heads: what the columns are.
            rows: their cells.
            first: how wide the first column is; the others share what is left.
        """
        others = (self._width - first) // (len(heads) - 1) - 2
        widths = [first, *([others] * (len(heads) - 1))]
        self.say()
        for row in [heads, ["-" * len(head) for head in heads], *rows]:
            cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
            for line in range(max(map(len, cells))):
                parts = (
                    (cell[line] if line < len(cell) else "").ljust(width)
                    for cell, width in zip(cells, widths, strict=True)
                )
                self.say("  ".join(parts).rstrip())

    # ------------------------------------------------------------------------------------- progress

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar; what is given is called after each step, with a word about it."""
        if not self._watched:
            yield lambda _: None
        elif (made := _rich_progress(self._out)) is not None:
            with made as bar:
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


def _rich_progress(out: TextIO) -> Any:
    """A bar of rich, or None where it is not installed."""
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
