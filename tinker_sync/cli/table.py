"""Tables of text, laid out for a width. Pure: rows in, lines of styled pieces out.

A row stays on one line while it fits. Where it does not, the columns that asked for it get lines of their own
below the row, whole, so that a path can still be copied; if that is not enough the widest columns are folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from attrs import frozen
from rich.cells import cell_len, chop_cells

GAP: Final = 2
_NARROWEST: Final = 8
_INDENT: Final = 2

Piece = tuple[str, str]
"""Text and the name of its style: "head", "key", "plain" or "faint"."""


@frozen
class Column:
    """A column of a table.

    >>> Column("Size", right=True)
    Column(title='Size', right=True, below=False)
    """

    title: str
    right: bool = False
    """Numbers are compared by their last digits."""
    below: bool = False
    """Goes on a line of its own where the row does not fit."""


@frozen
class Table:
    """Rows of text under columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    """What there is to know about the rows; it is shown below them."""


def record(title: str, pairs: Sequence[tuple[str, str]]) -> Table:
    """One thing and its properties.

    >>> record("Run", [("Id", "run-1")]).rows
    [('Id', 'run-1')]
    """
    return Table((Column(""), Column("")), list(pairs), title)


def lay_out(table: Table, width: int | None) -> Iterator[list[Piece]]:
    """The lines of a table; None is as wide as it takes."""
    cells = [[_clean(cell) for cell in row] for row in table.rows]
    natural = [
        max([cell_len(column.title), *(cell_len(row[place]) for row in cells)], default=0)
        for place, column in enumerate(table.columns)
    ]
    below: list[int] = []
    places = list(range(len(table.columns)))
    if width is not None and _total(natural) > width:
        below = [place for place in places if table.columns[place].below]
        places = [place for place in places if place not in below]
    widths = _shrunk({place: natural[place] for place in places}, width)
    if any(column.title for column in table.columns):
        titles = [column.title for column in table.columns]
        yield from _row(table, widths, titles, "head", below=())
    for row in cells:
        yield from _row(table, widths, row, "plain", below=below if width is not None else ())


def _clean(cell: str) -> str:
    """What others wrote must not move the cursor or change colours."""
    return "".join(character if character.isprintable() else "�" for character in cell)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _shrunk(widths: dict[int, int], width: int | None) -> dict[int, int]:
    """Widths that fit, the widest made narrower first, none unreadably so."""
    widths = dict(widths)
    while width is not None and widths and _total(list(widths.values())) > width:
        widest = max(widths, key=lambda place: widths[place])
        excess = _total(list(widths.values())) - width
        others = [wide for place, wide in widths.items() if place != widest]
        # Down to the next one's width at most, so that two wide ones share what there is.
        floor = max([_NARROWEST, *(wide for wide in others if wide < widths[widest])])
        narrower = max(widths[widest] - excess, floor)
        if narrower == widths[widest]:
            narrower = max(widths[widest] - 1, _NARROWEST)
        if narrower == widths[widest]:
            break
        widths[widest] = narrower
    return widths


def _row(
    table: Table, widths: dict[int, int], cells: Sequence[str], style: str, below: Sequence[int]
) -> Iterator[list[Piece]]:
    folded = {place: _folded(cells[place], wide) for place, wide in widths.items()}
    for line in range(max((len(parts) for parts in folded.values()), default=0)):
        pieces: list[Piece] = []
        for place, wide in widths.items():
            text = folded[place][line] if line < len(folded[place]) else ""
            space = " " * (wide - cell_len(text))
            last = place == list(widths)[-1]
            padded = space + text if table.columns[place].right else text if last else text + space
            name = "key" if style == "plain" and place == 0 else style
            pieces += [(" " * GAP, "plain")] * (place != next(iter(widths))) + [(padded, name)]
        yield pieces
    for place in below:
        if cells[place]:
            yield [(" " * _INDENT + cells[place], "faint")]


def _folded(text: str, width: int) -> list[str]:
    """A cell in lines no wider than `width`, broken at blanks where that wastes little."""
    if cell_len(text) <= width:
        return [text]
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *whole, line = chop_cells(word, width) or [""]
        lines += whole
    return [*lines, line]
