"""Tables of text, laid out for a width. Pure: rows in, lines of styled pieces out.

A row stays on one line while it fits. Where it does not, columns that allow it move to a line below the row,
the widest first and whole, so that a path can still be copied; if that is not enough the widest are folded.
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
    Column(title='Size', right=True, below=False, whole=False)
    """

    title: str
    right: bool = False
    """Numbers are compared by their last digits."""
    below: bool = False
    """May go on a line below where the row does not fit."""
    whole: bool = False
    """What has no blanks in it is never folded, and goes below instead."""


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
    return Table((Column(""), Column("", whole=True)), list(pairs), title)


def lay_out(table: Table, width: int | None) -> Iterator[list[Piece]]:
    """The lines of a table; None is as wide as it takes."""
    cells = [[_clean(cell) for cell in row] for row in table.rows]
    natural = [
        max([cell_len(column.title), *(cell_len(row[place]) for row in cells)], default=0)
        for place, column in enumerate(table.columns)
    ]
    places = list(range(len(table.columns)))
    below: list[int] = []
    for place in sorted(places, key=lambda place: -natural[place]):
        if width is not None and _total([natural[each] for each in places]) > width and len(places) > 1:
            below += [place] * table.columns[place].below
            places = [each for each in places if each not in below]
    below.sort()
    widths = _shrunk({place: natural[place] for place in places}, width)
    if any(column.title for column in table.columns):
        titles = [column.title for column in table.columns]
        yield from _row(table, widths, titles, "head")
    for row in cells:
        yield from _row(table, widths, row, "plain")
        yield from _below([row[place] for place in below], width)


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


def _row(table: Table, widths: dict[int, int], cells: Sequence[str], style: str) -> Iterator[list[Piece]]:
    whole = [
        place
        for place, wide in widths.items()
        if table.columns[place].whole and " " not in cells[place] and cell_len(cells[place]) > wide
    ]
    folded = {
        place: [""] if place in whole else _folded(cells[place], wide) for place, wide in widths.items()
    }
    first, last = next(iter(widths)), list(widths)[-1]
    for line in range(max(len(parts) for parts in folded.values())):
        pieces: list[Piece] = []
        for place, wide in widths.items():
            text = folded[place][line] if line < len(folded[place]) else ""
            space = " " * (wide - cell_len(text))
            padded = space + text if table.columns[place].right else text if place == last else text + space
            pieces += [(" " * GAP, "plain")] * (place != first)
            pieces.append((padded, "key" if style == "plain" and place == first else style))
        yield pieces
    for place in whole:
        yield [(" " * _INDENT + cells[place], style)]


def _below(cells: Sequence[str], width: int | None) -> Iterator[list[Piece]]:
    """What did not fit into the row: on one line if that is wide enough, else each on its own."""
    filled = [cell for cell in cells if cell]
    together = (" " * GAP).join(filled)
    lines = [together] if width is None or cell_len(together) + _INDENT <= width else filled
    for line in lines:
        if line:
            yield [(" " * _INDENT + line, "key")]


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
