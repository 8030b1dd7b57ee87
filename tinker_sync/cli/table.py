"""Tables of text, with columns that can move below the rows.

If the widest cells of a table do not fit on one line, columns with `below` move to a line under each row, the
widest first and unbroken, so that a path can still be copied. A too wide cell of a column with `whole` moves
alone. After that the widest column is folded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final

from attrs import field, frozen
from rich.cells import cell_len, chop_cells
from rich.text import Text

_GAP: Final = 2
_INDENT: Final = "  "
_KEY: Final = "cyan"
_NARROWEST: Final = 8


def _clean(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows with control characters replaced.

    Text of other users must not move the cursor or change colours.
    """
    return [["".join(each if each.isprintable() else "�" for each in cell) for cell in row] for row in rows]


@frozen
class Column:
    """The title and the layout of one column of a `Table`.

    >>> Column("Size", right=True)
    Column(title='Size', right=True, below=False, whole=False)
    """

    title: str
    right: bool = False
    """Align right, so that numbers can be compared by their last digits."""
    below: bool = False
    """Move to a line below each row if the widest cells of the table do not fit on one line."""
    whole: bool = False
    """Move a cell that does not fit to a line below the row, instead of folding it."""


@frozen
class Table:
    """A table to print: columns, rows of text, a title above and a note below."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]] = field(converter=_clean)
    title: str = ""
    note: str = ""
    """A remark about the rows, shown below them."""


def record(title: str, pairs: Sequence[tuple[str, str]]) -> Table:
    """Return a table of the properties of one thing, as rows of name and value.

    >>> record("Run", [("Id", "run-1")]).rows
    [['Id', 'run-1']]
    """
    return Table((Column(""), Column("", whole=True)), list(pairs), title)


def lay_out(table: Table, width: int | None) -> Iterator[Text]:
    """Yield the lines of a table; a width of None means as wide as needed.

    >>> table = Table((Column("Name"), Column("Path", below=True)), [("a", "tinker://run/weights/a")])
    >>> [line.plain for line in lay_out(table, 20)]
    ['Name', 'a', '  tinker://run/weights/a']
    """
    if table.title:
        yield Text(table.title, "bold")
    if table.rows:
        if table.title:
            yield Text()
        yield from _lay_out_rows(table, width)
    if table.note:
        yield Text()
        yield Text(table.note, "bright_black")


def _lay_out_rows(table: Table, width: int | None) -> Iterator[Text]:
    rows = [[column.title for column in table.columns], *table.rows]
    widths = {place: max(1, *(cell_len(row[place]) for row in rows)) for place in range(len(table.columns))}
    room = math.inf if width is None else width
    for place in sorted(widths, key=lambda place: -widths[place]):
        if table.columns[place].below and len(widths) > 1 and _measure(widths) > room:
            del widths[place]
    if (excess := _measure(widths) - room) > 0:
        widest = max(widths, key=lambda place: widths[place])
        widths[widest] = max(widths[widest] - int(excess), _NARROWEST)
    for number, row in enumerate(rows):
        if not number and not any(row):
            continue  # there are no titles
        whole = [
            place for place in widths if table.columns[place].whole and cell_len(row[place]) > widths[place]
        ]
        for key, rest in _fold_row(
            table, ["" if place in whole else cell for place, cell in enumerate(row)], widths
        ):
            yield Text.assemble((key, _KEY), rest) if number else Text(key + rest, "bold")
        if not number:
            continue
        yield from (Text(_INDENT + row[place]) for place in whole)
        moved = [cell for place, cell in enumerate(row) if place not in widths and cell]
        together = (" " * _GAP).join(moved)
        if cell_len(_INDENT + together) <= room:
            moved = [together]
        yield from (Text(_INDENT + cell, _KEY) for cell in moved if cell)


def _measure(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _fold_row(table: Table, row: Sequence[str], widths: Mapping[int, int]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a row, each as its first cell and the rest. Too wide cells are folded."""
    folded = [chop_cells(row[place], width) for place, width in widths.items()]
    for cells in zip_longest(*folded, fillvalue=""):
        padded = []
        for cell, (place, width) in zip(cells, widths.items(), strict=True):
            blank = " " * (width - cell_len(cell))
            padded.append(f"{blank}{cell}" if table.columns[place].right else f"{cell}{blank}")
        line = (" " * _GAP).join(padded).rstrip()
        yield line[: len(padded[0])], line[len(padded[0]) :]
