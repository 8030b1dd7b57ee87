"""Long lists: printed line by line as they arrive, or gathered behind a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_sync.cli import words
from tinker_sync.cli.data import plain
from tinker_sync.cli.output import Sink

if TYPE_CHECKING:
    from tinker_sync.cli.table import Table
    from tinker_sync.clients.rest.listing import Listing

T = TypeVar("T")


def show_list(
    sink: Sink,
    entries: Listing[T] | Iterable[T],
    name: str,
    table: Callable[[list[T], str], Table],
    *,
    limit: int = 0,
    more: Mapping[str, Any] | None = None,
    data: Callable[[T], Mapping[str, Any]] = plain,
) -> None:
    """Print a list.

    Args:
        sink: where.
        entries: models of the API, or what `data` takes, fetched as they are taken.
        name: of the list in JSON, such as "runs".
        table: makes a table of all entries, with a note below.
        limit: how many are to come at most; 0: nobody knows.
        more: what stands before the list in JSON.
        data: what an entry is in JSON.
    """
    if sink.form == "jsonl":
        for entry in entries:
            sink.item(data(entry))
        return
    got: list[T] = []
    with sink.progress(f"Fetching {name}", limit or None, unit=name) as bar:
        for entry in entries:
            got.append(entry)
            total = getattr(entries, "total", None)
            bar.update(len(got), min(limit or total, total) if total else None)
    total = getattr(entries, "total", None)
    tree = {**(more or {}), name: [data(entry) for entry in got]}
    sink.show(tree, table(got, words.not_shown(total or 0, len(got))))
