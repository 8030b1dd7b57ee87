"""Tables of text for `rich.table`, with columns that can move below the rows.

If the widest cells of a table do not fit on one line, columns with `below` move to a line under each row, the
widest first and unbroken, so that a path can still be copied. A too wide cell of a column with `whole` moves
alone. After that rich folds the widest cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from attrs import field, frozen
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

_GAP: Final = 2
_INDENT: Final = "  "
_KEY: Final = "cyan"


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


def lay_out(table: Table, console: Console, width: int | None) -> Iterator[Text]:
    """Yield the lines of a table; a width of None means as wide as needed.

    >>> from rich.console import Console
    >>> table = Table((Column("Name"), Column("Path", below=True)), [("a", "tinker://run/weights/a")])
    >>> [line.plain for line in lay_out(table, Console(), 20)]
    ['Name', 'a', '  tinker://run/weights/a']
    """
    if table.title:
        yield Text(table.title, "bold")
    if table.rows:
        if table.title:
            yield Text()
        yield from _lay_out_rows(table, console, width)
    if table.note:
        yield Text()
        yield Text(table.note, "bright_black")


def _lay_out_rows(table: Table, console: Console, width: int | None) -> Iterator[Text]:
    kept = _choose_columns(table, width)
    spare = None if width is None else width - _measure_row(table, kept[:-1]) - _GAP * (len(kept) > 1)
    grid = Grid(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    grid.show_header = any(column.title for column in table.columns)
    for place in kept:
        column = table.columns[place]
        grid.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    below: list[list[Text]] = []
    for number, row in enumerate(table.rows):
        whole = {place for place in kept if table.columns[place].whole and _is_too_wide(row[place], spare)}
        cells = ["" if place in whole else row[place] for place in kept]
        # The number marks the rendered lines of this row, see `_find_row`.
        grid.add_row(Text(cells[0], _KEY), *map(Text, cells[1:]), style=Style(meta={"row": number}))
        moved = [row[place] for place in range(len(row)) if place not in kept and row[place]]
        together = (" " * _GAP).join(moved)
        if moved and not _is_too_wide(_INDENT + together, width):
            moved = [together]
        below.append(
            [
                *(Text(_INDENT + row[place]) for place in whole),
                *(Text(_INDENT + text, _KEY) for text in moved),
            ]
        )
    options = console.options.update(width=width or _measure_row(table, kept))
    rendered = console.render_lines(grid, options, pad=False)
    for row_number, lines_of_row in groupby(rendered, key=_find_row):
        for line in lines_of_row:
            text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
            text.rstrip()
            yield text
        if row_number is not None:
            yield from below[row_number]


def _choose_columns(table: Table, width: int | None) -> list[int]:
    """Return the indexes of the columns that stay in the row; the others move below it."""
    kept = list(range(len(table.columns)))
    for place in sorted(kept, key=lambda place: -_measure_column(table, place)):
        fits = width is None or _measure_row(table, kept) <= width
        if not fits and table.columns[place].below and len(kept) > 1:
            kept.remove(place)
    return kept


def _measure_column(table: Table, place: int) -> int:
    return max(cell_len(table.columns[place].title), *(cell_len(row[place]) for row in table.rows), 0)


def _measure_row(table: Table, places: Sequence[int]) -> int:
    return sum(_measure_column(table, place) for place in places) + _GAP * max(len(places) - 1, 0)


def _is_too_wide(text: str, width: int | None) -> bool:
    return width is not None and cell_len(text) > width


def _find_row(line: Sequence[Segment]) -> int | None:
    """Return the number of the row that a rendered line belongs to, or None for the line of titles."""
    return next((segment.style.meta["row"] for segment in line if segment.style and segment.style.meta), None)
